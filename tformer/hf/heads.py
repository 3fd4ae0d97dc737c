"""The heads of a checkpoint: their rules, and which of them a checkpoint or a model has."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from tformer.config import Model
from tformer.errors import UserError
from tformer.hf.rules import Family, Rule, linear

# Heads of which a checkpoint has at most one, whose tensors may have the same names.
TASK_HEADS = ('class', 'number', 'choice', 'tags', 'spans')


def task_heads(
    rows: str, tags: str = '', spans: str = '', pooler: str = '', bias: bool = True, choices: bool = False
) -> tuple[Rule, ...]:
    """Returns the rules of the heads of tasks, by the hub's names of their linear layers; '': there is none.

    Args:
      rows: of the classes of sequences, or of their number.
      tags: of the classes of tokens.
      spans: of the ends of answers.
      pooler: of the layer before `rows`.
      bias: whether `rows` has one.
      choices: whether the scores of choices have the same names.
    """
    rules: list[Rule] = []
    for head in ('class', 'number', 'choice')[: 2 + choices]:
        rules += linear(pooler, 'pooler/dense', head=head) if pooler else ()
        rules += linear(rows, f'{head}_head/classes', head=head)[: 1 + bias]
    rules += linear(tags, 'tag_head/classes', head='tags') if tags else ()
    rules += linear(spans, 'span_head/classes', head='spans') if spans else ()
    return tuple(rules)


CLASSES = ('class_head/classes/kernel', 'tag_head/classes/kernel')  # the kernels that have one column for each class
POOLED = ('pooling', 'pooler', 'pooler_activation', 'class_bias')  # fields of `Model` that heads of sequences read
OUTPUT = ('output_bias', 'output_scale', 'output_softcap', 'mlm_transform')  # that logits of the vocabulary read


def imported(table: Family, cfg: Model, tensors: Collection[str], head: str | None) -> list[Rule]:
    """Returns the rules of a checkpoint; of a head only where the checkpoint has any of it.

    Args:
      tensors: the checkpoint's names.
      head: the head of a task that it is known to have; None: the one with most tensors of those that are whole.
    """
    rules = [rule for rule in table.rules if rule.when(cfg)]
    heads = {rule.head for rule in rules if rule.hub in tensors}
    own = {rule.head for rule in rules if rule.hub in tensors and not rule.ours.startswith('pooler/')}
    names = {each: [rule.hub for rule in rules if rule.head == each] for each in TASK_HEADS if each in own}
    whole = [each for each, wanted in names.items() if all(name in tensors for name in wanted)]
    task = head if head in names else max(whole or names, key=lambda each: len(names[each]), default='tokens')
    return [rule for rule in rules if rule.head in {'', *(heads - {*TASK_HEADS, 'tokens'}), task}]


def exported(table: Family, cfg: Model, paths: Collection[str]) -> set[str]:
    """Returns the heads whose parameters are all there, of those of tasks one; without one, the vocabulary's too.

    Args:
      paths: those of a model's parameters.
    """
    rules = [rule for rule in table.rules if rule.when(cfg)]
    lacking = {rule.head for rule in rules if any(path not in paths for path in rule.paths)}
    whole = {rule.head for rule in rules} - lacking
    task = next((head for head in TASK_HEADS if head in whole), 'tokens')
    inside = {'pooler'} if task in ('class', 'number', 'choice') else set()  # which those heads have in them
    return {'', *(whole - {*TASK_HEADS, 'tokens'} - inside), task}


OF_ROWS = ('sentence_head', 'class_head', 'number_head', 'choice_head')  # these read the pooler
OF_TOKENS = ('head', 'tag_head', 'span_head')


def without_pooler(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that a class of the hub has: none has a pooler beside heads of tokens alone."""
    unread = {*OF_ROWS}.isdisjoint(params) and not {*OF_TOKENS}.isdisjoint(params)
    return {name: value for name, value in params.items() if name != 'pooler' or not unread}


def exported_name(table: Family, heads: Collection[str], name: str) -> str:
    """Returns the name of a tensor of the model itself in a checkpoint with these heads."""
    other = next((other for head, other in table.headed.items() if head in heads), table.prefix)
    return other + name.removeprefix(table.prefix) if name.startswith(table.prefix) else name


def with_classes(cfg: Model, sizes: Mapping[str, int]) -> Model:
    """Returns the model with its number of classes, which where it is None is that of the kernels of `sizes`."""
    found = [size for path, size in sizes.items() if path in CLASSES]
    return cfg if cfg.num_classes is not None or not found else dataclasses.replace(cfg, num_classes=found[0])


def check_heads(family: str, expressed: Model, cfg: Model, parameters: Collection[str]) -> None:
    """Raises a `UserError` where the hub's model, `expressed`, reads otherwise than that whose heads are exported."""
    pools = not {'pooler', *OF_ROWS}.isdisjoint(parameters)
    transforms = not {'class_head', 'number_head', 'choice_head', 'tag_head', 'span_head'}.isdisjoint(parameters)
    names = (*(POOLED if pools else ()), *(['task_transform'] if transforms else []))
    wrong = [name for name in names if getattr(cfg, name) != getattr(expressed, name)]
    if wrong:
        read = ', '.join(f'model.{name}={getattr(expressed, name)}' for name in wrong)
        asked = ' '.join(f'--config.model.{name}={getattr(expressed, name)}' for name in wrong)
        raise UserError(f'{family}: the head of the hub reads {read}: one trained with {asked} can be written')
