"""A stack of layers as a circular pipeline (Huang et al. 2019; Narayanan et al. 2021, 2.2).

The devices of the mesh axis `pipeline` are stages, each with the parameters of its own layers. Parts of the batch pass
from stage to stage, in one round through all stages or in several rounds through fewer layers each. Of `stages +
parts x rounds - 1` ticks a stage is idle in `stages - 1`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tformer.errors import UserError

AXIS = 'pipeline'
MOVES = 'slice dynamic_slice gather squeeze reshape transpose broadcast_in_dim convert_element_type'.split()


def computed(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps results of arithmetic; operations that only move or cast numbers, such as a layer's weights, run again."""
    return primitive.name not in MOVES


def pipelined(
    layer: Callable[[Any, jax.Array, Any, jax.Array], jax.Array],
    each: Any,
    x_BTD: jax.Array,
    shared: Any,
    *,
    parts: int,
    rounds: int = 1,
    policy: Callable[..., bool] = computed,
    unroll: int | bool = 1,
) -> jax.Array:
    """Returns x_BTD after all layers, on every stage; under a mesh (`jax.set_mesh`) with the axis `pipeline`.

    Row i is in part i % parts, so that devices which split the rows keep them. Layers are stored in order: with several
    rounds, each call sends every layer to the stage that computes it. A weight's gradient is summed over the parts in
    the weight's own dtype.

    Args:
      layer: (a layer's slice of `each`, x of a part, the part's slice of `shared`, number of the part) -> x after it.
      each: arrays [L, ...].
      x_BTD: all rows.
      shared: inputs of all layers; arrays [B, ...] hold one entry per row, others (scalars, [1, ...]) serve all rows.
      parts: number of parts; with several rounds a multiple of the stages.
      rounds: passes of a part through all stages.
      policy: what the backward pass keeps of a layer (`jax.checkpoint`).
      unroll: of `jax.lax.scan` over the layers of a stage.

    Raises:
      UserError: the layers, the rows or the parts do not divide.
    """
    stages, rows = jax.sharding.get_abstract_mesh().shape[AXIS], len(x_BTD)
    _check_division(len(jax.tree.leaves(each)[0]), rows, stages, parts, rounds)
    group = stages if rounds > 1 else parts  # parts that finish all rounds before the next ones begin

    def by_part(a: jax.Array) -> bool:
        return jnp.ndim(a) > 0 and len(a) == rows

    def split(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(rows // parts, parts, *a.shape[1:]), 1, 0)

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def one(h: jax.Array, own: Any, shared: Any, round_: jax.Array, part: jax.Array) -> jax.Array:
        # Sliced in here, weights are not kept for the backward pass of every tick.
        return layer(jax.tree.map(lambda a: a[round_], own), h, shared, part)

    def stage(each: Any, x: jax.Array, shared: Any) -> jax.Array:
        x, shared = jax.tree.map(lambda a: a[0], (x, shared))
        number = jax.lax.axis_index(AXIS)
        own = deal(each, number, stages, rounds)

        def tick(received: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
            since = time - number
            turn = jnp.clip(since, 0, parts * rounds - 1)
            round_, part = _round_and_part(turn, parts, rounds, group)
            # An idle stage computes on the beginning of a part, not on zeros, from which a layer might make a NaN.
            begins = ((number == 0) & (round_ == 0)) | (since != turn)
            h = jnp.where(begins, x[part], received)
            seen = jax.tree.map(lambda a, whole: a if whole else a[part], shared, wholes)
            y, _ = jax.lax.scan(lambda h, own: (one(h, own, seen, round_, part), None), h, own, unroll=unroll)
            return jax.lax.ppermute(y, AXIS, ring[: stages if rounds > 1 else -1]), y

        _, ys = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(stages + parts * rounds - 1))
        ended = ys[stages - 1 :].reshape(parts // group, rounds, group, *x.shape[1:])[:, -1].reshape(x.shape)
        return jnp.where(number == stages - 1, ended, jnp.zeros_like(ended))[None]

    ring = [(i, (i + 1) % stages) for i in range(stages)]
    wholes = jax.tree.map(lambda a: not by_part(a), shared)
    shared = jax.tree.map(lambda a: split(a) if by_part(a) else a, shared)
    # One copy per stage: gradients are then summed outside, as XLA for CPU fails at that sum in bfloat16.
    copies = jax.tree.map(lambda a: jnp.broadcast_to(a, (stages, *jnp.shape(a))), (split(x_BTD), shared))
    spec = PartitionSpec(AXIS)
    run = jax.shard_map(stage, in_specs=spec, out_specs=spec, axis_names={AXIS}, check_vma=False)
    return jnp.moveaxis(run(each, *copies).sum(0), 0, 1).reshape(x_BTD.shape)


def _check_division(L: int, rows: int, stages: int, parts: int, rounds: int) -> None:
    """Raises a `UserError` where layers, rows or parts do not divide."""
    if L % (stages * rounds):
        raise UserError(f'{L} layers do not divide into mesh.pipeline={stages} stages x mesh.pipeline_repeats={rounds}')
    if rows % parts:
        raise UserError(f'a batch of {rows} rows does not divide into mesh.microbatches={parts}')
    if rounds > 1 and parts % stages:
        raise UserError(
            f'mesh.pipeline_repeats={rounds} needs mesh.microbatches={parts} to be a multiple of {stages} stages'
        )


def _round_and_part(turn: jax.Array, parts: int, rounds: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Returns the round and the part that a stage computes in its turn."""
    return turn % (group * rounds) // group, turn // (group * rounds) * group + turn % group


def deal(each: Any, number: jax.Array, stages: int, rounds: int) -> Any:
    """Returns a stage's k layers of each round, [k, rounds, ...], from its share of consecutive ones, [rounds k, ...].

    Of the blocks of k layers, stage s holds s rounds ... s rounds + rounds - 1 and computes s, s + stages, .... They go
    in `rounds` permutations, in each of which every stage sends one block and receives one: two blocks of one stage,
    before or after, never go in the same.
    """
    blocks = jax.tree.map(lambda a: a.reshape(rounds, -1, *a.shape[1:]), each)
    if rounds == 1:
        return jax.tree.map(lambda a: a.swapaxes(0, 1), blocks)
    block = np.arange(stages * rounds)
    holder, user = block // rounds, block % stages
    turn = (block + block // math.lcm(stages, rounds)) % rounds
    sent = np.empty((rounds, stages), int)  # which of its blocks a stage sends in a turn
    sent[turn, holder] = block % rounds
    arrives = turn.reshape(rounds, stages)  # in which turn a stage receives its block of a round

    def exchange(a: jax.Array) -> jax.Array:
        received = [
            jax.lax.ppermute(
                a[jnp.asarray(sent[now])[number]],
                AXIS,
                [(int(holder[b]), int(user[b])) for b in block if turn[b] == now],
            )
            for now in range(rounds)
        ]
        return jnp.stack(received)[jnp.asarray(arrives)[:, number]].swapaxes(0, 1)

    return jax.tree.map(exchange, blocks)
