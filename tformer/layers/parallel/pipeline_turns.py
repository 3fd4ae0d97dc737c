"""What a stage of a pipeline computes at each tick, and what it keeps for the backward pass."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.layers.parallel.kept_values import Kept

AXIS = 'pipeline'


class Turn(NamedTuple):
    """What a stage computes at a tick. An idle one has its first turn already, on zeros, or its last turn again."""

    number: jax.Array
    round: jax.Array
    part: jax.Array
    active: jax.Array  # whether the stage is not idle
    begins: jax.Array  # whether the stage takes the part's first values and not received ones


class Timetable(NamedTuple):
    """Which part of the batch a stage computes at which tick, and in which round."""

    stages: int
    parts: int
    rounds: int

    @property
    def turns(self) -> int:
        """The number of ticks in which a stage computes."""
        return self.parts * self.rounds

    @property
    def ticks(self) -> int:
        """The number of ticks after which the last stage has computed every part."""
        return self.stages + self.turns - 1

    @property
    def group(self) -> int:
        """The number of parts that finish all rounds before the next ones begin."""
        return self.stages if self.rounds > 1 else self.parts

    def at(self, time: jax.Array, stage: jax.Array) -> Turn:
        """Returns a stage's turn at a tick."""
        since = time - stage
        turn = jnp.clip(since, 0, self.turns - 1)
        round_ = turn % (self.group * self.rounds) // self.group
        part = turn // (self.group * self.rounds) * self.group + turn % self.group
        return Turn(turn, round_, part, since == turn, (stage == 0) & (round_ == 0))

    def pass_on(self, y: jax.Array) -> jax.Array:
        """Returns what the stage before sent; the last stage sends to the first one if there are several rounds."""
        return jax.lax.ppermute(y, AXIS, self._ways())

    def pass_back(self, dx: jax.Array) -> jax.Array:
        """Returns what the stage after sent."""
        return jax.lax.ppermute(dx, AXIS, [(after, before) for before, after in self._ways()])

    def _ways(self) -> list[tuple[int, int]]:
        ring = [(i, (i + 1) % self.stages) for i in range(self.stages)]
        return ring if self.rounds > 1 else ring[:-1]


def in_turns(
    table: Timetable, layer: Callable[[jax.Array, Any], jax.Array], wholes: Any, unroll: int | bool
) -> Callable[[Any, jax.Array, Any], jax.Array]:
    """Returns stage(own, x, shared), within a `shard_map`: on the last stage [parts, ...], x after all layers.

    The backward pass keeps what the layers keep in each turn, and nothing of ticks in which the stage is idle. Those
    are as many as there are other stages: with four parts in two stages every fifth.

    Args:
      layer: (h, (its parameters, what it sees of `shared`, the part's number)) -> h after the layer.
      wholes: which arrays of `shared` serve all parts; the others are [parts, ...].
      unroll: of `jax.lax.scan` over the stage's layers. Arrays of `own` are [layers, rounds, ...], x [parts, ...].
    """
    varies = False, jax.tree.map(lambda whole: not whole, wholes), True
    passes = _Passes(table, Kept(layer, varies), wholes, unroll)
    stage = jax.custom_vjp(lambda own, x, shared: passes.forward(own, x, shared, None)[0])
    stage.defvjp(passes.keeping, passes.backward)
    return stage


class _Passes(NamedTuple):
    """The forward and the backward pass of a stage."""

    table: Timetable
    layer: Kept
    wholes: Any
    unroll: int | bool

    def seen(self, shared: Any, turn: Turn) -> Any:
        """Returns what all layers see of `shared` in a turn."""
        return jax.tree.map(lambda a, whole: a if whole else a[turn.part], shared, self.wholes)

    def forward(self, own: Any, x: jax.Array, shared: Any, kept: Any) -> tuple[jax.Array, Any]:
        """Returns (x after the layers, `kept` with what they keep); None: nothing is kept."""
        stage, table = jax.lax.axis_index(AXIS), self.table

        def tick(carry: Any, time: jax.Array) -> tuple[Any, None]:
            received, ended, kept = carry
            turn = table.at(time, stage)
            sees = self.seen(shared, turn)

            def one(carry: Any, numbered: Any) -> tuple[Any, None]:
                (h, kept), (i, own) = carry, numbered
                fixed = _fixed(own, sees, turn)
                if kept is None:
                    return (self.layer.function(h, fixed), None), None
                h, new = self.layer.forward(h, fixed)
                return (h, jax.tree.map(lambda all_, a: _write(all_, a, turn.number, i), kept, new)), None

            h = jnp.where(turn.begins, x[turn.part], received)
            (y, kept), _ = jax.lax.scan(one, (h, kept), _numbered(own), unroll=self.unroll)
            last = time - stage >= table.turns - 1  # computed again in each tick that is left, from the same values
            return (jnp.where(last, received, table.pass_on(y)), _write(ended, y, turn.part), kept), None

        start = jnp.zeros_like(x[0]), jnp.zeros_like(x), kept
        (_, ended, kept), _ = jax.lax.scan(tick, start, jnp.arange(table.ticks))
        return ended, kept

    def keeping(self, own: Any, x: jax.Array, shared: Any) -> tuple[jax.Array, Any]:
        """Returns (x after the layers, what `backward` needs)."""

        def of_one(own: Any, x: jax.Array, shared: Any) -> Any:
            turn = self.table.at(jnp.array(0), jnp.array(0))
            own = jax.tree.map(lambda a: a[0], own)
            return self.layer.forward(x[0], _fixed(own, self.seen(shared, turn), turn))[1]

        every = self.table.turns, len(jax.tree.leaves(own)[0])
        shapes = jax.eval_shape(of_one, own, x, shared)
        kept = jax.tree.map(lambda a: jnp.zeros((*every, *a.shape), a.dtype), shapes)
        ended, kept = self.forward(own, x, shared, kept)
        return ended, (own, shared, kept)

    def backward(self, residuals: Any, d_ended: jax.Array) -> tuple[Any, jax.Array, Any]:
        """Returns the gradients of own, x and `shared`."""
        own, shared, kept = residuals
        stage, table = jax.lax.axis_index(AXIS), self.table

        def tick(carry: Any, time: jax.Array) -> tuple[Any, None]:
            dh, d_own, dx, d_shared = carry
            turn = table.at(time, stage)
            sees, nothing = self.seen(shared, turn), jnp.zeros_like(dh)
            ends = turn.active & (stage == table.stages - 1) & (turn.round == table.rounds - 1)
            dh = table.pass_back(dh) + jnp.where(ends, d_ended[turn.part], nothing)

            def one(carry: Any, numbered: Any) -> tuple[Any, None]:
                (dh, d_own, d_sees), (i, own) = carry, numbered
                leaves = jax.tree.map(lambda a: a[turn.number, i], kept)
                dh, (d_layer, d_seen, _) = self.layer.backward(_fixed(own, sees, turn), leaves, dh)
                d_own = _each(lambda total, d: _added(total, d, i, turn.round), d_own, d_layer)
                return (dh, d_own, _each(_added, d_sees, d_seen)), None

            start = dh, d_own, _zeros(sees)
            (dh, d_own, d_sees), _ = jax.lax.scan(one, start, _numbered(own), reverse=True, unroll=self.unroll)
            dx = _added(dx, jnp.where(turn.active & turn.begins, dh, nothing), turn.part)

            def of_part(total: Any, d: Any, whole: bool) -> Any:
                return _added(total, d, *(() if whole else (turn.part,)))

            d_shared = _each(of_part, d_shared, d_sees, self.wholes)
            return (jnp.where(turn.active & ~turn.begins, dh, nothing), d_own, dx, d_shared), None

        start = jnp.zeros_like(d_ended[0]), _zeros(own), jnp.zeros_like(d_ended), _zeros(shared)
        (_, *found), _ = jax.lax.scan(tick, start, jnp.arange(table.ticks), reverse=True)
        return tuple(found)


_each = functools.partial(jax.tree.map, is_leaf=lambda a: a is None)  # with None for a gradient that there is not


def _fixed(own: Any, sees: Any, turn: Turn) -> Any:
    """Returns a layer's second argument in a turn; `own` is [rounds, ...]."""
    return jax.tree.map(lambda a: a[turn.round], own), sees, turn.part


def _numbered(own: Any) -> tuple[jax.Array, Any]:
    return jnp.arange(len(jax.tree.leaves(own)[0])), own


def _write(whole: jax.Array, a: jax.Array, *at: jax.Array) -> jax.Array:
    """Returns `whole` with `a` at an index of its first dimensions."""
    rest = (jnp.zeros((), jnp.int32),) * a.ndim
    return jax.lax.dynamic_update_slice(whole, a[(None,) * len(at)], (*at, *rest))


def _zeros(tree: Any) -> Any:
    """Returns zeros for the gradients of a tree; None for integers and keys, which have none."""
    return jax.tree.map(lambda a: jnp.zeros_like(a) if jnp.issubdtype(a.dtype, jnp.inexact) else None, tree)


def _added(total: jax.Array | None, d: jax.Array, *at: jax.Array) -> jax.Array | None:
    """Returns a gradient with `d` added at an index of its first dimensions."""
    return None if total is None else _write(total, total[at] + d, *at)
