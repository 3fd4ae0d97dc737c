"""Low-rank adapters as the hub's package PEFT keeps them: adapter_config.json and adapter_model.safetensors.

The rules of an adapter's two kernels follow from the rule of the kernel that they adapt (Hu et al. 2022, 4.1).
"""

import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from tformer import config as config_lib
from tformer.config import Model, json_files
from tformer.config.tasks import head_parameters
from tformer.errors import UserError, choose
from tformer.hf import heads, safetensors
from tformer.hf.convert import Stacked, exported, names_of, stacked
from tformer.hf.models import FAMILIES
from tformer.hf.rules import Rule

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'
# The ends of the paths of kernels -> the targets of model.lora_targets.
TARGETS = {
    'attention/query': 'query',
    'attention/key': 'key',
    'attention/value': 'value',
    'attention/out': 'out',
    'mlp/in_0': 'mlp_in',
    'mlp/in_1': 'mlp_in',
    'mlp/out': 'mlp_out',
}
# The names of heads in adapter_config.json.
TASK_TYPES = {'SEQ_CLS': 'class', 'TOKEN_CLS': 'tags', 'QUESTION_ANS': 'spans'}
# What changes the numbers of an adapter and has no counterpart here, with the value that leaves them as they are.
FIXED: dict[str, Any] = {
    'use_rslora': False, 'use_dora': False, 'use_qalora': False, 'bias': 'none', 'rank_pattern': {},
    'alpha_pattern': {}, 'lora_bias': False, 'layers_to_transform': None, 'layer_replication': None,
    'trainable_token_indices': None, 'target_parameters': None, 'alora_invocation_tokens': None,
}  # fmt: skip


def target_of(rule: Rule) -> str | None:
    """Returns the target of model.lora_targets that a rule's kernel is; None: it takes no adapter."""
    place, _, name = rule.ours.rpartition('/')
    return next((target for end, target in TARGETS.items() if name == 'kernel' and place.endswith(end)), None)


def rules_of(rule: Rule) -> tuple[Rule, Rule]:
    """Returns the rules of the adapter's kernels, A [rank, in] and B [out, rank] on the hub."""
    theirs, ours = (_sides(side) for side in rule.layout.split(' -> '))
    (first, first_axes), (second, second_axes) = theirs
    flat = [axis for _, axes in ours for axis in axes]
    (inner, inner_axes), (outer, outer_axes) = (
        ((first, first_axes), (second, second_axes))
        if flat == [*first_axes, *second_axes]
        else ((second, second_axes), (first, first_axes))
    )
    hub, path = rule.hub.removesuffix('.weight'), rule.ours.removesuffix('/kernel')
    a = rule._replace(
        hub=f'{hub}.lora_A.weight', ours=f'{path}/lora_a/kernel', layout=f'rank {inner} -> {" ".join(inner_axes)} rank'
    )
    b = rule._replace(
        hub=f'{hub}.lora_B.weight', ours=f'{path}/lora_b/kernel', layout=f'{outer} rank -> rank {" ".join(outer_axes)}'
    )
    return a, b


def _sides(side: str) -> list[tuple[str, list[str]]]:
    """Returns the axes of one side of a layout, each as it is written and as the axes that it joins."""
    written = side.replace('(', '|(').replace(')', ')|').split('|')
    parts = [part for group in written for part in ([group] if group.startswith('(') else group.split())]
    return [(part, part.strip('()').split()) for part in parts]


def adapter_rules(family: str, model: Model) -> Iterator[Rule]:
    """Yields the rules of all adapters of a model. Raises a `UserError` where the hub joins kernels in one tensor."""
    for rule in choose(FAMILIES, family, 'family').rules:
        places = [rule.ours.format(part=part) for part in rule.parts] or [rule.ours]
        targets = {target_of(rule._replace(ours=place)) for place in places} & {*model.lora_targets}
        if not targets or not rule.when(model):
            continue
        if rule.parts or '{expert}' in rule.hub:
            shared = f'{family}: adapters of {", ".join(sorted(map(str, targets)))} have no counterpart'
            raise UserError(f'{shared}: the hub keeps {rule.hub} whole; --merge adds them to the kernels')
        yield from rules_of(rule)


def write(
    directory: pathlib.Path, family: str, params: Mapping[str, Any], model: Model, base: str | None
) -> dict[str, Any]:
    """Writes adapter_model.safetensors, and returns the fields of adapter_config.json.

    Args:
      directory: where to.
      family: a hub's model_type.
      params: by path, the adapters and the heads, which were trained with them, among them.
      model: with adapters.
      base: the directory or the name of the hub's model that the adapters are for.

    Raises:
      UserError: an adapter has no counterpart.
    """
    rules = list(adapter_rules(family, model))
    tensors, taken = exported(family, rules, params, model)
    table = FAMILIES[family]
    chosen = heads.exported(table, model, params)
    among = [rule for rule in table.rules if rule.ours in params and rule.head in chosen]
    saved = [rule for rule in among if rule.ours.split('/')[0] in head_parameters()]
    others, _ = exported(family, saved, params, model)
    if lost := [path for path in params if '/lora_' in path and path not in taken]:
        raise UserError(f'{family}: the adapter {lost[0]} has no counterpart; --merge adds it to its kernel')
    names = [*tensors]
    tensors = {PREFIX + name: np.ascontiguousarray(array) for name, array in {**tensors, **others}.items()}
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    safetensors.write(directory / WEIGHTS, shapes, tensors.__getitem__)
    adapted = {name.removesuffix('.lora_A.weight') for name in names if name.endswith('.lora_A.weight')}
    modules = {name.removesuffix('.weight') for rule in table.rules for name in names_of(rule, model)[0]}
    return {
        'peft_type': 'LORA',
        'base_model_name_or_path': base,
        'r': model.lora_rank,
        'lora_alpha': model.lora_alpha,
        'lora_dropout': 0.0,
        'target_modules': ends_of(adapted, modules - adapted),
        'modules_to_save': sorted({rule.hub.removeprefix(table.prefix).split('.')[0] for rule in saved}) or None,
        'bias': 'none',
        'fan_in_fan_out': family == 'gpt2',
        'inference_mode': True,
        'task_type': next((kind for kind, head in TASK_TYPES.items() if head in chosen), None),
    }


def ends_of(adapted: Collection[str], others: Collection[str]) -> list[str]:
    """Returns the shortest ends of the names of adapted modules that no other module has: PEFT takes a module by any
    end of its name, in whole parts."""

    def end_of(name: str) -> str:
        parts = name.split('.')
        ends = ('.'.join(parts[-length:]) for length in range(1, len(parts)))
        return next((end for end in ends if not any(f'.{other}'.endswith(f'.{end}') for other in others)), name)

    return sorted({end_of(name) for name in adapted})


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the fields of adapter_config.json. Raises a `UserError` if it is not of low-rank adapters as ours are."""
    found = json_files.read(directory / CONFIG)
    if found.get('peft_type') != 'LORA':
        raise UserError(f'{directory / CONFIG}: peft_type={found.get("peft_type")!r} has no counterpart; valid: LORA')
    for name, value in FIXED.items():
        if found.get(name, value) not in (value, None):
            raise UserError(f'{directory / CONFIG}: {name}={found[name]!r} has no counterpart; valid: {value!r}')
    if type(found.get('r')) is not int or found['r'] < 1:
        raise UserError(f'{directory / CONFIG}: r={found.get("r")!r} is not a whole number of at least 1')
    return found


def num_classes_of(directory: pathlib.Path, family: str) -> int | None:
    """Returns the number of classes of the head beside the adapters; None: there is none."""
    tensors = safetensors.open_files([directory / WEIGHTS])
    rows = [f'{PREFIX}{rule.hub}' for rule in FAMILIES[family].rules if rule.ours in heads.CLASSES]
    return next((len(tensors[name]) for name in rows if name in tensors and tensors[name].ndim), None)


def with_adapters(directory: pathlib.Path, family: str, model: Model) -> tuple[Model, dict[str, Stacked]]:
    """Returns (the model with the adapters of a directory, their parameters by path, unread).

    Raises:
      UserError: the adapters have no counterpart, or some of their tensors are missing or not mapped.
    """
    fields = read_config(directory)
    tensors = safetensors.open_files([directory / WEIGHTS])
    names = {name.removeprefix(PREFIX): name for name in tensors}
    rules = [rule for rule in FAMILIES[family].rules if rule.when(model) and not rule.parts]
    hub_names = [name.replace('.lora_A.weight', '.weight') for name in names]
    targets = dict.fromkeys(
        target for rule in rules if (target := target_of(rule)) and rule.hub.format(layer=0, expert=0) in hub_names
    )
    alpha = config_lib.coerce(float, fields.get('lora_alpha', 8), 'lora_alpha')
    model = config_lib.override(
        config_lib.Config(model=model),
        {'model.lora_rank': fields['r'], 'model.lora_alpha': alpha, 'model.lora_targets': tuple(targets)},
    ).model
    head = TASK_TYPES.get(str(fields.get('task_type')), 'class')
    saved = [rule for rule in heads.imported(FAMILIES[family], model, names, head) if rule.hub in names]
    found, taken = stacked(family, [*adapter_rules(family, model), *saved], (tensors, names), model)
    if others := [name for name in names if name not in taken]:
        raise UserError(f'{directory / WEIGHTS}: no rule reads the tensor {others[0]}')
    return model, found
