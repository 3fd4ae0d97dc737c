"""Memory and floating-point operations of a training step by formula: nothing is compiled."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from tformer.config import Config, Model, own_layers
from tformer.config.tasks import HEADS, TASKS, Head
from tformer.layers.attention import num_narrow
from tformer.optim import freezing
from tformer.optim.parameters import VOCABULARY_HEAD, path_names, place
from tformer.training.teacher import Teacher


def device_bytes(tree: Any) -> int:
    """Returns the bytes that one device holds of a tree of (abstract) arrays with shardings."""
    held = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * width for shape, width in held)


def model_flops(config: Config, params: Any, batch: Mapping[str, Any], *, forward: bool = False) -> float:
    """Returns the operations that a step's products need: 6 for each weight and each token that it multiplies, 12 for
    each head's number of a query and a key, forward and backward (Kaplan et al. 2020, 2.1; Chowdhery et al. 2022,
    appendix B); a third of them goes `forward`. Frozen weights have no gradient, a third, and in layers that have
    nothing trained in or below them nothing has.

    Nothing that is computed again counts, every pair of a query and a key within a window does, masked or not, and of
    experts those that a token goes to.

    The config is resolved. The (abstract) parameters are boxed with their logical names where they have any. The batch
    has `inputs` [B, T] and, with an encoder of its own, `encoder_inputs` [B, S].
    """
    rows, length = batch['inputs'].shape
    source = batch['encoder_inputs'].shape[1] if config.model.family == 'encoder_decoder' else length
    texts = batch['segment_weights'].shape[1] if 'segment_weights' in batch else 1
    head = HEADS[TASKS[config.train.objective].head]
    tied = config.model.tied_embeddings in ('all', 'output') and head.vocabulary
    trained, passed = ({}, {}) if forward else _trained(config, params)
    outside = [names for names, share in trained.items() if share and place(names) != 'layers']
    total = 0.0
    for path, box in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nn.Partitioned)):
        names = path_names(path)
        if names[-1] == 'kernel' or (tied and names == ('embed', 'table')):
            each = 2 * (1 + trained.get(names, 0) + _inputs(names, passed, outside))
            total += each * rows * _vectors(head, names, length, source, texts) * _weights(config.model, names, box)
    return total + rows * _attention(config.model, length, source, passed)


def step_flops(config: Config, params: Any, batch: Mapping[str, Any], teacher: Teacher | None) -> float:
    """Returns `model_flops`, and those of a teacher, which goes forward only."""
    own = model_flops(config, params, batch)
    if teacher is None:
        return own
    return own + model_flops(teacher.config, teacher.abstract['params'], batch, forward=True)


def _trained(config: Config, params: Any) -> tuple[dict[tuple[str, ...], float], dict[str, float]]:
    """Returns the share of each parameter that is trained, by its path, and of each stack the share of its layers that
    gradients pass: those from the lowest on that has something trained in or below it."""
    mask = nn.get_partition_spec(params)
    mask = freezing.trainable_mask(config, mask) if freezing.is_partial(config) else jax.tree.map(lambda x: True, mask)
    shares, passed = dict[tuple[str, ...], float](), dict.fromkeys(own_layers(config.model), 0.0)
    for path, part in jax.tree_util.tree_leaves_with_path(mask):
        keys, by_layer = path_names(path), np.ravel(part)
        shares[keys] = float(np.mean(by_layer))
        if not by_layer.any() or place(keys) == 'top':
            continue
        above = 1.0 if place(keys) == 'bottom' else 1 - float(np.argmax(by_layer)) / len(by_layer)
        own = 'decoder' if keys[0] == 'embed' and 'encoder_embed' in params else keys[0].removesuffix('_embed')
        for stack in passed if own == 'embed' else passed.keys() & {own}:
            passed[stack] = max(passed[stack], above)
    if passed.get('encoder') and 'decoder' in passed:
        passed['decoder'] = 1.0  # every layer reads what the encoder says
    return shares, passed


def _inputs(names: tuple[str, ...], passed: Mapping[str, float], trained: Sequence[tuple[str, ...]]) -> float:
    """Returns in which share of the layers what a kernel multiplies has a gradient; `trained` are the parameters that
    are, outside of the layers."""
    where = 'top' if names[-1] == 'table' else place(names)  # a table that makes logits
    if where == 'layers':
        across = 'cross_attention' in names and names[-2] in ('key', 'value')
        return float(passed.get('encoder', 0) > 0) if across else passed.get(names[0], 0.0)
    below = where == 'top' and any(passed.values())
    return float(below or any(place(other) == where and other[:-1] != names[:-1] for other in trained))


def _vectors(head: Head, names: tuple[str, ...], length: int, source: int, texts: int) -> int:
    """Returns how many vectors of a row a kernel multiplies."""
    transform = names[0] == VOCABULARY_HEAD and not head.vocabulary  # which heads of tasks share with the vocabulary
    if any(names[0] in each.per_row for each in HEADS.values()) or (transform and head.per_row):
        return texts
    if names[-3:] == ('score', 'vector', 'kernel'):  # of additive attention: each pair of target and source
        return length * source
    of_source = 'cross_attention' in names and names[-2] in ('key', 'value')
    return source if names[0] == 'encoder' or of_source else length


def _weights(model: Model, names: tuple[str, ...], box: Any) -> float:
    """Returns how many of a kernel's weights one vector meets, over all layers."""
    number = float(math.prod(nn.unbox(box).shape))
    if model.num_experts and 'experts' in getattr(box, 'names', ()) and 'router' not in names:
        number *= model.experts_per_token / model.num_experts
    if model.layer_sharing and 'layers' in names:
        number *= model.num_encoder_layers if names[0] == 'encoder' else model.num_decoder_layers
    return number


def _attention(model: Model, length: int, source: int, passed: Mapping[str, float]) -> float:
    """Returns the operations of the products of queries with keys, and of their weights with values, in a row."""
    assert model.head_dim and model.value_dim
    times = {stack: 2 * (1 + 2 * passed.get(stack, 0.0)) for stack in ('encoder', 'decoder')}
    if model.recurrence is not None:
        products = {'dot': 2, 'additive': 1, None: 0}[model.recurrent_attention]  # additive scores are in the weights
        return times['decoder'] * model.emb_dim * products * length * source
    own = {'encoder': 0.0, 'decoder': 0.0}  # pairs of self-attention
    if model.family != 'decoder':
        own['encoder'] = source * _seen(model, model.num_encoder_layers, source, 2 * (model.window or 0) - 1)
    if model.family != 'encoder':
        own['decoder'] = length * _seen(model, model.num_decoder_layers, length, model.window or 0)
    own = {stack: times[stack] * pairs for stack, pairs in own.items()}
    cross = times['decoder'] * model.num_decoder_layers * length * source if model.family == 'encoder_decoder' else 0
    total = model.num_heads * (model.head_dim + model.value_dim) * (sum(own.values()) + cross)
    if model.kv_latent_dim is not None and model.rotary_dim:  # of self-attention alone
        total += model.num_heads * model.rotary_dim * sum(own.values())
    return total


def _seen(model: Model, layers: int, length: int, window: int) -> float:
    """Returns how many keys of a row count for a query, in all layers of a stack."""
    local = num_narrow(model, layers)
    return float(local * min(window, length) + (layers - local) * length)


# ------------------------------------------------------------------------------------------- by the length of a row


class LayerCost(NamedTuple):
    """The costs of a kind of layer, as leading terms without constants, by the length n of a row and the width d."""

    products: int  # multiplications of two numbers
    sequential: int  # operations that wait for one another
    path: int  # operations between the first token and what sees it last


def layer_costs(model: Model, length: int) -> dict[str, LayerCost]:
    """Returns the costs of each kind of layer that a model has (Vaswani et al. 2017, table 1)."""
    if model.recurrence is None:
        kinds = {kind: kind for kind in dict.fromkeys(model.attention_pattern)}
    else:
        kinds = {model.recurrence: 'recurrent', **({'attention': 'global'} if model.recurrent_attention else {})}
    window = min(model.window or length, length)
    return {name: LAYER_COSTS[kind](length, model.emb_dim, window) for name, kind in kinds.items()}


LAYER_COSTS: dict[str, Callable[[int, int, int], LayerCost]] = {  # of n, d and the window r
    'global': lambda n, d, r: LayerCost(n * n * d, 1, 1),
    'local': lambda n, d, r: LayerCost(r * n * d, 1, -(-n // r)),
    'recurrent': lambda n, d, r: LayerCost(n * d * d, n, n),
}
