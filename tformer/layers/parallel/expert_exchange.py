"""Moves tokens to the slots of their experts and back, within a device and between devices that share the experts.

Shape letters as in moe.py: R tokens, J experts per token, P slots, C slots of each expert.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from tformer.distributed.meshes import ROWS
from tformer.distributed.sharding import constrain
from tformer.layers.parallel import each_device
from tformer.layers.parallel.few_tokens import travel

NAMES = 'experts', 'embed', 'mlp'  # the logical axes of the first kernels of experts, kernel_EDF
EXPERT = 'expert'  # the mesh axis that splits the experts, between whose devices tokens travel
TOKENS = {*ROWS, 'context'}  # the mesh's axes that split tokens


class Tokens(NamedTuple):
    """Tokens, and the experts that the router chose for each."""

    x_RD: jax.Array
    weight_RJ: jax.Array
    expert_RJ: jax.Array  # the number of experts or more stands for an expert on another device
    real_R: jax.Array  # False at padding


class Dispatch(NamedTuple):
    """The slot in which each choice is computed, and how the experts' kernels apply to the slots."""

    slot_RJ: jax.Array  # `num_slots` or more: dropped
    num_slots: int
    expert_P: jax.Array  # the expert of each slot
    product: Callable[[jax.Array, jax.Array], jax.Array]  # (x_PD, kernel_EDF) -> y_PF, each slot by its expert


# (expert_RJ, real_R, number of experts, ways=number of devices that share all experts) -> their slots
DispatchFn = Callable[..., Dispatch]
ExpertFn = Callable[[jax.Array, Dispatch], jax.Array]  # (x_PD, dispatch) -> y_PD, each slot through its expert
Exchange = Callable[[Tokens, DispatchFn, int, ExpertFn], jax.Array]  # (tokens, ..., number of experts, ...) -> y_RD
Kernels = dict[str, tuple[jax.Array, jax.Array | None]]  # `in_0`, ..., `out`: kernel and bias, of all experts
DropoutDraw = tuple[float | jax.Array, jax.Array] | None  # dropout's rate and key


def combine(tokens: Tokens, dispatch: Dispatch, expert_fn: ExpertFn) -> jax.Array:
    """Returns the weighted sum of the experts' outputs for each token, float32 [R, D]."""
    (R, J), slot_RJ = dispatch.slot_RJ.shape, dispatch.slot_RJ
    choice_P = jnp.full(dispatch.num_slots, R * J).at[slot_RJ.ravel()].set(jnp.arange(R * J), mode='drop')
    y_PD = expert_fn(_to_slots(tokens.x_RD, slot_RJ, choice_P // J), dispatch)
    return _weighted(y_PD, tokens.weight_RJ, slot_RJ, choice_P)


@jax.checkpoint  # the backward pass keeps y_PD alone
def _weighted(y_PD: jax.Array, weight_RJ: jax.Array, slot_RJ: jax.Array, choice_P: jax.Array) -> jax.Array:
    return (_to_choices(y_PD, slot_RJ, choice_P).astype(jnp.float32) * weight_RJ[..., None]).sum(1)


@jax.custom_vjp
def _to_slots(x_RD: jax.Array, slot_RJ: jax.Array, token_P: jax.Array) -> jax.Array:
    """Returns x_PD, the token of each slot, 0 where there is none. Like `_to_choices` it reads rows in both directions,
    where XLA would add up rows that are written anywhere."""
    return _rows(x_RD, token_P)


_to_slots.defvjp(
    lambda x_RD, slot_RJ, token_P: (_to_slots(x_RD, slot_RJ, token_P), slot_RJ),
    lambda slot_RJ, dx_PD: (_rows(dx_PD, slot_RJ).sum(1), None, None),
)


@jax.custom_vjp
def _to_choices(y_PD: jax.Array, slot_RJ: jax.Array, choice_P: jax.Array) -> jax.Array:
    """Returns y_RJD, the slot of each choice, 0 where it is dropped."""
    return _rows(y_PD, slot_RJ)


_to_choices.defvjp(
    lambda y_PD, slot_RJ, choice_P: (_to_choices(y_PD, slot_RJ, choice_P), choice_P),
    lambda choice_P, dy_RJD: (_rows(dy_RJD.reshape(-1, dy_RJD.shape[-1]), choice_P), None, None),
)


def _rows(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns the rows of these numbers, 0 where a number is beyond the last."""
    found: jax.Array = x.at[numbers].get(mode='fill', fill_value=0)
    return found


# ------------------------------------------------------------------------------------------------ with all experts
def local(tokens: Tokens, dispatch_fn: DispatchFn, num_experts: int, expert_fn: ExpertFn) -> jax.Array:
    """Returns y_RD, float32, on a device that has all experts."""
    return combine(tokens, dispatch_fn(tokens.expert_RJ, tokens.real_R, num_experts), expert_fn)


# ------------------------------------------------------------------------------------------------ with some of them
def grouped(tokens: Tokens, dispatch_fn: DispatchFn, num_experts: int, expert_fn: ExpertFn) -> jax.Array:
    """Returns y_RD: each device sends the C slots of an expert to the device that has it (Lepikhin et al. 2021, 3.2).

    Each device dispatches, and drops, its own tokens alone. It sends E C D numbers and receives as many back.
    """
    ways = jax.lax.axis_size(EXPERT)

    def expert_fn_there(x_PD: jax.Array, dispatch: Dispatch) -> jax.Array:
        x_ECD = x_PD.reshape(num_experts, -1, x_PD.shape[-1])
        x_PD = jax.lax.all_to_all(x_ECD, EXPERT, 0, 1, tiled=True).reshape(x_PD.shape)  # own experts, C of each device
        y_PD = expert_fn(x_PD, dispatch._replace(expert_P=dispatch.expert_P // ways))
        y_ECD = y_PD.reshape(num_experts // ways, -1, x_PD.shape[-1])
        return jax.lax.all_to_all(y_ECD, EXPERT, 1, 0, tiled=True).reshape(x_PD.shape)

    return combine(tokens, dispatch_fn(tokens.expert_RJ, tokens.real_R, num_experts), expert_fn_there)


def gathered(tokens: Tokens, dispatch_fn: DispatchFn, num_experts: int, expert_fn: ExpertFn) -> jax.Array:
    """Returns y_RD: each device computes its own experts on the tokens of all devices, and the sums are scattered.

    Nothing is dropped, however uneven the choices, so each device receives all tokens of its row of `expert`: n R D
    numbers with n devices, the least for a program of fixed shapes, where even choices would need R J D. The number of
    slots is that of the worst case too: n R min(J, E / n).
    """
    ways = jax.lax.axis_size(EXPERT)
    own, dtype = num_experts // ways, tokens.x_RD.dtype
    tokens = jax.tree.map(lambda x: jax.lax.all_gather(x, EXPERT, tiled=True), tokens)
    expert_RJ = tokens.expert_RJ - jax.lax.axis_index(EXPERT) * own
    tokens = tokens._replace(expert_RJ=jnp.where(expert_RJ < 0, own, expert_RJ))
    dispatch = dispatch_fn(tokens.expert_RJ, tokens.real_R, own, ways=ways)
    return jax.lax.psum_scatter(combine(tokens, dispatch, expert_fn).astype(dtype), EXPERT, tiled=True)


# ------------------------------------------------------------------------------------------------ the mesh
def split_over(name: str, size: int) -> tuple[str, ...]:
    """Returns the mesh axes that split a parameter's axis of this logical name; () where none does."""
    (axes,) = nn.logical_to_mesh_axes((name,)) or (None,)
    axes = (axes,) if isinstance(axes, str) else axes or ()
    ways = math.prod(jax.sharding.get_abstract_mesh().shape.get(axis, 1) for axis in axes)
    return axes if ways > 1 and size % ways == 0 else ()


def over_devices(
    function: Callable[..., jax.Array], kernels: Kernels, tokens: Tokens, dropout_draw: DropoutDraw
) -> jax.Array:
    """Returns y_BTD = function(kernels, tokens, dropout_draw, columns, inner), on each device's own experts and tokens.

    Every mesh axis is manual inside; XLA gathers the parts of the kernels that FSDP splits on the way in, or the few
    tokens of a step, whose part of D each device has then, if the mesh axes `inner` split it.

    `columns` are the mesh axes that split F, over which the outputs are summed. The axes [B, T, ...] of `tokens`
    are padded to sizes that the mesh divides. Each device folds its place in the mesh into dropout's key.
    """
    mesh = jax.sharding.get_abstract_mesh()
    columns = split_over('mlp', kernels['out'][0].shape[1])
    if not TOKENS.isdisjoint(columns):  # outputs of different tokens cannot be summed
        columns = ()
    own = split_over('experts', kernels['out'][0].shape[0])
    few = travel('BTD,EDF->BTF', tokens.x_RD, kernels['in_0'][0].shape, NAMES)
    inner = few.axes['D'] if few is not None else ()
    inner = () if {*own, *columns}.intersection(inner) else inner
    wide = (PartitionSpec(own, inner, columns), PartitionSpec(own, columns))  # kernel_EDF, bias_EF
    narrow = (PartitionSpec(own, columns, inner), PartitionSpec(own, inner))  # kernel_EFD, bias_ED
    rows = tuple(axis for axis in ROWS if axis not in mesh.manual_axes and axis not in inner)
    length = () if 'context' in inner else ('context',)
    placed, part_of_D = PartitionSpec(rows, length), PartitionSpec(rows, length, inner)

    def part(kernels: Kernels, tokens: Tokens, dropout_draw: DropoutDraw) -> jax.Array:
        if dropout_draw is not None:
            rate, key = dropout_draw
            dropout_draw = rate, jax.random.fold_in(key, jax.lax.axis_index((*rows, *length, *columns)))
        own = tokens._replace(x_RD=jax.lax.pcast(tokens.x_RD, columns, to='varying'))  # its gradient is summed here
        y_BTD = function(kernels, own, dropout_draw, columns, inner)
        return jax.lax.psum(y_BTD, columns) if columns else y_BTD

    run = jax.shard_map(
        part,
        in_specs=(
            {name: narrow if name == 'out' else wide for name in kernels},
            jax.tree.map(lambda x: placed, tokens)._replace(x_RD=part_of_D),
            PartitionSpec(),
        ),
        out_specs=part_of_D,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    )
    B, T = tokens.real_R.shape
    short = -B % each_device.ways(rows), -T % each_device.ways(length)
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, n) for n in short] + [(0, 0)] * (x.ndim - 2)), tokens)
    y_BTD = run(kernels, padded, dropout_draw)[:B, :T]
    return constrain(y_BTD, 'batch', 'length', 'act_embed') if inner else y_BTD


def flat(x: jax.Array) -> jax.Array:
    """Returns [B, T, ...] as [R, ...]."""
    return x.reshape(-1, *x.shape[2:])
