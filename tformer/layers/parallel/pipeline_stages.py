"""A stack of layers as a circular pipeline (Huang et al. 2019; Narayanan et al. 2021, 2.2).

The devices of the mesh axis `pipeline` are stages, each with the parameters of its own layers. Parts of the batch pass
from stage to stage, in one round through all stages or in several rounds through fewer layers each. Of `stages +
parts x rounds - 1` ticks a stage is idle in `stages - 1`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tformer.distributed.sharding import Schedule, constrain, without_axes
from tformer.errors import UserError
from tformer.layers.parallel.pipeline_turns import AXIS, Timetable, in_turns

ROWS = 'data'  # splits rows and no parameters, so its devices need exchange nothing before all gradients are summed


def pipelined(
    layer: Callable[[Any, jax.Array, Any, jax.Array], jax.Array],
    each: Any,
    x_BTD: jax.Array,
    shared: Any,
    schedule: Schedule,
    unroll: int | bool = 1,
) -> jax.Array:
    """Returns x_BTD after all layers; under a mesh (`jax.set_mesh`) with the axis `pipeline`.

    Row i is in part i % parts, so that devices which split the rows keep them. Layers are stored in order: with several
    rounds, each call sends every layer to the stage that computes it. A weight's gradient is summed over the parts in
    the weight's own dtype.

    Args:
      layer: (a layer's slice of `each`, x of a part's rows, their slice of `shared`, their number) -> x after it.
      each: arrays [L, ...].
      shared: inputs of all layers; arrays [B, ...] hold one entry per row, others (scalars, [1, ...]) serve all rows.
      schedule: with several rounds, the parts are a multiple of the stages.
      unroll: of `jax.lax.scan` over the layers of a stage.

    Raises:
      UserError: the layers, the rows or the parts do not divide.
    """
    rows, table = len(x_BTD), _timetable(len(jax.tree.leaves(each)[0]), len(x_BTD), schedule)
    own_axes = _own_axes(rows // table.parts)

    def split(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(rows // table.parts, table.parts, *a.shape[1:]), 1, 0)

    def one(h: jax.Array, fixed: Any) -> jax.Array:
        own, seen, part = fixed
        first = table.parts * (jax.lax.axis_index(ROWS) if ROWS in own_axes else 0)
        with without_axes(own_axes):
            return layer(own, h, seen, first + part)

    def stage(each: Any, x: jax.Array, shared: Any) -> jax.Array:
        each, x, shared = jax.tree.map(lambda a: a[0], (each, x, shared))
        number = jax.lax.axis_index(AXIS)
        ended = in_turns(table, one, wholes, unroll)(deal(each, number, table.stages, table.rounds), x, shared)
        return jnp.where(number == table.stages - 1, ended, jnp.zeros_like(ended))[None]

    with without_axes({AXIS}):  # before and after, its stages split the rows: embeddings and logits are computed once
        x_BTD = constrain(x_BTD, 'batch', 'stream_length', 'act_embed')
    wholes = jax.tree.map(lambda a: jnp.ndim(a) == 0 or len(a) != rows, shared)
    shared = jax.tree.map(lambda a, whole: a if whole else split(a), shared, wholes)
    y_BTD = jnp.moveaxis(_on_devices(stage, own_axes, each, split(x_BTD), shared, wholes).sum(0), 0, 1)
    return constrain(y_BTD.reshape(x_BTD.shape), 'batch', 'stream_length', 'act_embed')


def _own_axes(rows: int) -> set[str]:
    """Returns the mesh axes whose devices compute a part's rows by themselves: `ROWS` where it divides them."""
    ways = jax.sharding.get_abstract_mesh().shape.get(ROWS, 1)
    return {AXIS, ROWS} if ways > 1 and rows % ways == 0 else {AXIS}


def _on_devices(
    stage: Callable[[Any, jax.Array, Any], jax.Array], axes: set[str], each: Any, x: jax.Array, shared: Any, wholes: Any
) -> jax.Array:
    """Returns stage(each, x, shared) of every stage, [stages, parts, rows, ...], each device with its own rows.

    Every stage gets a copy of x and of `shared`, and every device along `ROWS` one of the layers: gradients are then
    summed outside, once, as XLA for CPU fails at that sum in bfloat16. `wholes` says which of `shared` have no rows.
    """
    mesh, rows = jax.sharding.get_abstract_mesh().shape, ROWS if ROWS in axes else None
    by_row = P(AXIS, None, rows)
    each = jax.tree.map(lambda a: jnp.broadcast_to(a, (mesh[rows] if rows else 1, *a.shape)), each)
    x, shared = jax.tree.map(lambda a: jnp.broadcast_to(a, (mesh[AXIS], *jnp.shape(a))), (x, shared))
    places = P(rows, AXIS), by_row, jax.tree.map(lambda whole: P(AXIS) if whole else by_row, wholes)
    return jax.shard_map(stage, in_specs=places, out_specs=by_row, axis_names=axes, check_vma=False)(each, x, shared)


def _timetable(L: int, rows: int, schedule: Schedule) -> Timetable:
    """Returns the timetable of L layers and a batch. Raises a `UserError` where they do not divide."""
    mesh = jax.sharding.get_abstract_mesh()
    stages, parts, rounds = table = Timetable(mesh.shape[AXIS], schedule.parts_of(rows, mesh), schedule.rounds)
    if L % (stages * rounds):
        raise UserError(f'{L} layers do not divide into mesh.pipeline={stages} stages x mesh.pipeline_repeats={rounds}')
    if rows % parts:
        raise UserError(f'a batch of {rows} rows does not divide into mesh.microbatches={parts}')
    if rounds > 1 and parts % stages:
        raise UserError(
            f'mesh.pipeline_repeats={rounds} needs mesh.microbatches={parts} to be a multiple of {stages} stages'
        )
    return table


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
        received = []
        for now in range(rounds):
            moves = [(int(holder[b]), int(user[b])) for b in block if turn[b] == now]
            received.append(jax.lax.ppermute(a[jnp.asarray(sent[now])[number]], AXIS, moves))
        return jnp.stack(received)[jnp.asarray(arrives)[:, number]].swapaxes(0, 1)

    return jax.tree.map(exchange, blocks)
