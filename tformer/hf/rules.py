"""Rules between hub tensors and our parameters, which read both ways; each family's table consists of them.

A rule is a pair of names and a layout, 'hub axes -> our axes'. Parentheses join axes into one, so that

    '(N H) D -> D N H'

is the kernel of the queries: a matrix [heads times head size, emb_dim] on the hub, [D, N, H] here.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tformer.config import Model
from tformer.hf.fields import Field


class Rule(NamedTuple):
    """One hub tensor, or one per {layer} and {expert}, which our parameter stacks along leading axes.

    Attributes:
      hub: the tensor's name.
      ours: the parameter's path; {part} stands for each of `parts`.
      layout: 'hub axes -> our axes', by the names of `axis_sizes`; with parts the first of ours is `part`,
        unless they have shares of it.
      parts: parameters that the hub stores in one tensor.
      shares: the axis that each part takes of the axis `part`, where they do not lie side by side along it.
      when: whether a model has this tensor.
      first: the first layer that has it; in those before, nothing reads our parameter.
      head: the output head it belongs to, of which a checkpoint has all tensors or none; '': the model itself. The
        heads of tasks (`heads.TASK_HEADS`) exclude one another and 'tokens'.
    """

    hub: str
    ours: str
    layout: str
    parts: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    when: Callable[[Model], bool] = lambda model: True
    first: int = 0
    head: str = ''

    @property
    def paths(self) -> list[str]:
        """The paths of our parameters."""
        return [self.ours.format(part=part) for part in self.parts] or [self.ours]


class Family(NamedTuple):
    """How the hub stores one family of models.

    Attributes:
      model: the fields of `Model` that are the same throughout the family.
      fields: the correspondences of the other fields with those of config.json.
      rules: the correspondences of tensors.
      prefix: of names in a checkpoint with a head, absent in one without.
      headed: head -> what stands for `prefix` in a checkpoint with this head, where that differs.
      renamed: (old, new) parts of names, of early checkpoints.
      ignored: patterns of tensors that the model does not use.
      copies: tensor -> the tensor that it must equal.
      zeros: tensors that must be 0.
      tied_by_tensors: config.json always says that the output is tied, which it is unless it differs from its copy.
      order: axis of ours -> (model) -> the hub's entries along it in our order; the axis of parts is named by their
        shares, 'C+R'. Other axes are in the same order.
      defaults: values of the fields that config.json may leave out.
      fixed: fields that must have this value where config.json has them.
      neutral: fields that the hub's library does not read of this family, though its files have them.
      start: fields with the ids of the special tokens before a decoder's text -> the token, by its name in
        `vocabulary.NAMES`, where config.json does not say it; '': none.
      source_start: likewise of those before an encoder's text, where there are two stacks.
      padded_positions: whether the hub's library counts positions without the tokens `pad_token_id`, which
        model.position_offset follows.
      separator: the special tokens between two texts, by their names there, where the tokenizer does not say it; of
        decoders those around each text.
    """

    model: Mapping[str, Any]
    fields: tuple[Field, ...]
    rules: tuple[Rule, ...]
    prefix: str = ''
    headed: Mapping[str, str] = {}
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = {}
    zeros: tuple[str, ...] = ()
    tied_by_tensors: bool = False
    order: Mapping[str, Callable[[Model], np.ndarray]] = {}
    defaults: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}
    neutral: tuple[str, ...] = ()
    start: Mapping[str, str] = {'bos_token_id': 'bos'}
    source_start: Mapping[str, str] = {}
    padded_positions: bool = False
    separator: tuple[str, ...] = ('sep',)


# ---------------------------------------------------------------------------------------------------- layouts
Sizes = Mapping[str, int]


def axis_sizes(model: Model) -> dict[str, int]:
    """Returns the size of every axis that a layout names, of a resolved model."""
    sizes = {
        'D': model.emb_dim,  # of the residual stream
        'rank': model.lora_rank,
        'W': model.emb_dim,  # as wide, but not of the stream
        'E': model.embedding_factor_dim or model.emb_dim,  # of the token table
        'F': model.mlp_dim,
        'N': model.num_heads,
        'K': model.num_kv_heads,
        'H': model.head_dim,
        'V': model.value_dim,
        'C': model.kv_latent_dim,
        'L': model.query_latent_dim,
        'R': model.rotary_dim,
        'Q': (model.head_dim or 0) + (model.rotary_dim or 0),  # of queries beside latents
        'vocab': model.vocab_size,
        'positions': model.max_len + model.position_offset,
        'types': model.num_token_types,
        'buckets': model.relative_buckets,
        'experts': model.num_experts,
        'classes': model.num_classes,
        'sentences': 2,  # the classes of next-sentence prediction, in the same order on the hub
        '1': 1,
    }
    return {name: size for name, size in sizes.items() if size is not None}


def axes_of(side: str) -> list[list[str]]:
    """Returns the axes of one side of a layout, each as the list of axes that it joins."""
    return [(joined or alone).split() for joined, alone in re.findall(r'\(([^)]*)\)|(\S+)', side)]


def shape(side: str, sizes: Sizes) -> tuple[int, ...]:
    """Returns the shape of an array with the axes of one side of a layout."""
    return tuple(math.prod(sizes[name] for name in joined) for joined in axes_of(side))


def rearrange(x: np.ndarray, layout: str, sizes: Sizes) -> np.ndarray:
    """Returns `x`, laid out as the left side of `layout`, laid out as its right side."""
    before, after = (
        [name for joined in axes_of(side) for name in joined if name != '1'] for side in layout.split('->')
    )
    x = x.reshape([sizes[name] for name in before]).transpose([before.index(name) for name in after])
    return x.reshape(shape(layout.split('->')[1], sizes))


def reverse(layout: str) -> str:
    """Returns the layout from right to left."""
    left, right = layout.split(' -> ')
    return f'{right} -> {left}'


# ---------------------------------------------------------------------------------------------- what tables repeat
# The end of our path -> 'hub axes -> our axes'. PyTorch keeps kernels as [out, in].
LAYOUTS = {
    'embed/table': 'vocab E -> vocab E',
    'positions/table': 'positions E -> positions E',
    'token_types/table': 'types E -> types E',
    'bias/table': 'buckets N -> buckets N',
    'input_embedding/LayerNorm_0/scale': 'E -> E',
    'input_embedding/LayerNorm_0/bias': 'E -> E',
    'input_embedding/projection/kernel': 'D E -> E D',
    'head/transform_0/kernel': 'E D -> D E',
    'head/transform_0/bias': 'E -> E',
    'head/LayerNorm_0/scale': 'E -> E',
    'head/LayerNorm_0/bias': 'E -> E',
    'attention/sink/sink': 'N -> N',
    'router/bias': 'experts -> experts',
    'query/kernel': '(N H) D -> D N H',
    'query/bias': '(N H) -> N H',
    'key/kernel': '(K H) D -> D K H',
    'key/bias': '(K H) -> K H',
    'value/kernel': '(K V) D -> D K V',
    'value/bias': '(K V) -> K V',
    'attention/out/kernel': 'D (N V) -> N V D',
    'in_0/kernel': 'F D -> D F',
    'in_0/bias': 'F -> F',
    'in_1/kernel': 'F D -> D F',
    'in_1/bias': 'F -> F',
    'mlp/out/kernel': 'D F -> F D',
    'router/kernel': 'experts D -> D experts',
    'logits/kernel': 'vocab D -> D vocab',
    'head/bias': 'vocab -> vocab',
    'class_head/classes/kernel': 'classes W -> W classes',
    'class_head/classes/bias': 'classes -> classes',
    'tag_head/classes/kernel': 'classes W -> W classes',
    'tag_head/classes/bias': 'classes -> classes',
    'number_head/classes/kernel': '1 W -> W 1',
    'number_head/classes/bias': '1 -> 1',
    'choice_head/classes/kernel': '1 W -> W 1',
    'choice_head/classes/bias': '1 -> 1',
    'score/classes/kernel': '1 W -> W 1',
    'score/classes/bias': '1 -> 1',
    'classes/kernel': 'sentences W -> W sentences',
    'classes/bias': 'sentences -> sentences',
    '/kernel': 'W D -> D W',  # any other dense layer
    '': 'D -> D',  # scales of norms, and any other bias
}
ALL_BIASES = ('query', 'key', 'value', 'out')


def gated(model: Model) -> bool:
    return 'glu' in model.activation


def untied(model: Model) -> bool:
    return model.tied_embeddings in (None, 'inputs')


def tensor(hub: str, ours: str, **more: Any) -> Rule:
    """Returns the rule of one tensor, with the layout of `LAYOUTS` unless another is given."""
    layout = next(layout for end, layout in LAYOUTS.items() if ours.endswith(end))
    return Rule(hub, ours, **{'layout': layout, **more})


def linear(hub: str, ours: str, **more: Any) -> tuple[Rule, Rule]:
    """Returns the rules of a kernel and its bias."""
    return tensor(f'{hub}.weight', f'{ours}/kernel', **more), tensor(f'{hub}.bias', f'{ours}/bias', **more)


def norm(hub: str, ours: str, **more: Any) -> tuple[Rule, Rule]:
    """Returns the rules of a LayerNorm."""
    return tensor(f'{hub}.weight', f'{ours}/scale', **more), tensor(f'{hub}.bias', f'{ours}/bias', **more)
