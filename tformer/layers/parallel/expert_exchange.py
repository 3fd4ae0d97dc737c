"""Tokens to the places of their experts and back, within a device and between the devices that hold the experts.

Shape letters as in moe.py: R token slots, J experts per token, P places, C places of each expert.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from tformer.distributed.sharding import ROWS

EXPERT = 'expert'  # the mesh's axis between whose devices tokens travel
TOKENS = {*ROWS, 'context'}  # the mesh's axes that split tokens


class Tokens(NamedTuple):
    """Token slots, and the experts that each chose."""

    x_RD: jax.Array
    weight_RJ: jax.Array
    expert_RJ: jax.Array  # the number of experts, or more: one elsewhere
    real_R: jax.Array  # False at padding


class Plan(NamedTuple):
    """Where each choice is computed, and how the experts' kernels apply to the places."""

    place_RJ: jax.Array  # `places` or more: nowhere
    places: int
    expert_P: jax.Array  # whose each place is
    product: Callable[[jax.Array, jax.Array], jax.Array]  # (x_PD, kernel_EDF) -> y_PF, each place by its expert


Planner = Callable[..., Plan]  # of expert_RJ, real_R, the number of experts
Feed = Callable[[jax.Array, Plan], jax.Array]  # x_PD -> y_PD, each place through its expert
Way = Callable[[Tokens, Planner, int, Feed], jax.Array]  # tokens, the number of experts -> y_RD
Kernels = dict[str, tuple[jax.Array, jax.Array | None]]  # `in_0`, ..., `out`: kernel and bias, of all experts
Noise = tuple[float | jax.Array, jax.Array] | None  # dropout's rate and key


def mix(tokens: Tokens, plan: Plan, feed: Feed) -> jax.Array:
    """Returns the weighted sums of what the experts made of each token, float32 [R, D]."""
    x_RJD = jnp.broadcast_to(tokens.x_RD[:, None], (*plan.place_RJ.shape, tokens.x_RD.shape[-1]))
    x_PD = jnp.zeros((plan.places, x_RJD.shape[-1]), x_RJD.dtype).at[plan.place_RJ].add(x_RJD, mode='drop')
    y_RJD = feed(x_PD, plan).at[plan.place_RJ].get(mode='fill', fill_value=0)
    return (y_RJD.astype(jnp.float32) * tokens.weight_RJ[..., None]).sum(1)


# ------------------------------------------------------------------------------------------------ with all experts
def alone(tokens: Tokens, planner: Planner, num_experts: int, feed: Feed) -> jax.Array:
    """Returns y_RD, float32, of tokens that are where all experts are."""
    return mix(tokens, planner(tokens.expert_RJ, tokens.real_R, num_experts), feed)


# ------------------------------------------------------------------------------------------------ with some of them
def grouped(tokens: Tokens, planner: Planner, num_experts: int, feed: Feed) -> jax.Array:
    """Returns y_RD: each device sends the C places of an expert to where it is (Lepikhin et al. 2021, 3.2).

    A device's tokens are a group of their own: the plan, and who finds no place, is that of the group alone. Each
    device sends E C D numbers to the others and receives as many back.
    """
    ways = jax.lax.axis_size(EXPERT)

    def feed_there(x_PD: jax.Array, plan: Plan) -> jax.Array:
        x_ECD = x_PD.reshape(num_experts, -1, x_PD.shape[-1])
        x_PD = jax.lax.all_to_all(x_ECD, EXPERT, 0, 1, tiled=True).reshape(x_PD.shape)  # own experts, C of each device
        y_PD = feed(x_PD, plan._replace(expert_P=plan.expert_P // ways))
        y_ECD = y_PD.reshape(num_experts // ways, -1, x_PD.shape[-1])
        return jax.lax.all_to_all(y_ECD, EXPERT, 1, 0, tiled=True).reshape(x_PD.shape)

    return mix(tokens, planner(tokens.expert_RJ, tokens.real_R, num_experts), feed_there)


def gathered(tokens: Tokens, planner: Planner, num_experts: int, feed: Feed) -> jax.Array:
    """Returns y_RD: each device computes its own experts' choices among the tokens of all, and sums are scattered.

    Nothing is dropped, however uneven the choices, so each device receives all tokens of its row of `expert`: n R D
    numbers with n devices, the least that a program of fixed shapes can do, where even choices would need R J D. The
    places are those of the worst case too: n R min(J, E / n).
    """
    own = num_experts // jax.lax.axis_size(EXPERT)
    dtype = tokens.x_RD.dtype
    tokens = jax.tree.map(lambda x: jax.lax.all_gather(x, EXPERT, tiled=True), tokens)
    expert_RJ = tokens.expert_RJ - jax.lax.axis_index(EXPERT) * own
    tokens = tokens._replace(expert_RJ=jnp.where(expert_RJ < 0, own, expert_RJ))
    y_RD = alone(tokens, planner, own, feed).astype(dtype)
    return jax.lax.psum_scatter(y_RD, EXPERT, tiled=True)


# ------------------------------------------------------------------------------------------------ the mesh
def split_over(name: str, size: int) -> tuple[str, ...]:
    """Returns the axes of the ambient mesh that split a parameter's axis of this logical name; () where none does."""
    (axes,) = nn.logical_to_mesh_axes((name,)) or (None,)
    axes = (axes,) if isinstance(axes, str) else axes or ()
    ways = math.prod(jax.sharding.get_abstract_mesh().shape.get(axis, 1) for axis in axes)
    return axes if ways > 1 and size % ways == 0 else ()


def tokens_are_split() -> bool:
    """Returns whether devices of the ambient mesh have tokens of their own."""
    return any(jax.sharding.get_abstract_mesh().shape.get(axis, 1) > 1 for axis in TOKENS)


def over_devices(function: Callable[..., jax.Array], kernels: Kernels, tokens: Tokens, noise: Noise) -> jax.Array:
    """Returns y_BTD = function(kernels, tokens, noise, columns), each device with its part of the experts and tokens.

    Every axis of the mesh is manual inside; XLA gathers what `fsdp` splits of the kernels on the way in.

    Args:
      function: `columns` are the mesh's axes that split F, over which the outputs are to be summed.
      tokens: of axes [B, T, ...], which are padded to what the mesh divides.
      noise: a device's key is its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    columns = split_over('mlp', kernels['out'][0].shape[1])
    if not TOKENS.isdisjoint(columns):  # what differs in tokens cannot be summed
        columns = ()
    wide = (PartitionSpec(EXPERT, None, columns), PartitionSpec(EXPERT, columns))  # kernel_EDF, bias_EF
    narrow = (PartitionSpec(EXPERT, columns), PartitionSpec(EXPERT))  # kernel_EFD, bias_ED
    placed = PartitionSpec(ROWS, 'context')

    def part(kernels: Kernels, tokens: Tokens, noise: Noise) -> jax.Array:
        if noise is not None:
            rate, key = noise
            noise = rate, jax.random.fold_in(key, jax.lax.axis_index((*ROWS, 'context', *columns)))
        return function(kernels, tokens, noise, columns)

    run = jax.shard_map(
        part,
        in_specs=({name: narrow if name == 'out' else wide for name in kernels}, placed, PartitionSpec()),
        out_specs=placed,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    )
    B, T = tokens.real_R.shape
    short = -B % math.prod(mesh.shape[axis] for axis in ROWS), -T % mesh.shape['context']
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, n) for n in short] + [(0, 0)] * (x.ndim - 2)), tokens)
    return run(kernels, padded, noise)[:B, :T]


def flat(x: jax.Array) -> jax.Array:
    """Returns [B, T, ...] as [R, ...]."""
    return x.reshape(-1, *x.shape[2:])
