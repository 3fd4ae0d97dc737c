"""Texts that begin and end at different times, in one batch: a row that is free takes the next text.

The rows of a `Slots` go on by a token each step, each from its own position with its own way of drawing. What a text
becomes does not depend on the others: it is that of `greedy` or `sample` by itself.

Shapes: B rows, P prompt length, S places of a row's cache, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer.decode.generate import begin
from tformer.decode.sample import Sampling, banned_mask, prefill


class Drawing(NamedTuple):
    """How the tokens of a text are drawn."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 2**31 - 1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    row: int = 0  # the number of the text among those of the same seed
    number: int = 0  # of the draw of the same text


class Slots(flax.struct.PyTreeNode):
    """The rows of a batch that texts come and go in."""

    cache: Any
    last_B: jax.Array  # the token that the next step reads
    position_B: jax.Array  # its position; -1 in free rows
    step_B: jax.Array  # new tokens so far
    keys_B: jax.Array
    drawing: Drawing  # each [B]


class Engine(NamedTuple):
    """The compiled functions of a model that writes in `Slots`."""

    empty: Callable[[Any], Slots]  # (variables) -> free rows
    # (variables, slots, a batch of one row, row, drawing) -> slots in which the row writes after its prompt
    insert: Callable[[Any, Slots, Mapping[str, Any], Any, Drawing], Slots]
    # (variables, slots) -> (slots, the next token of each row, its log-probability by the model)
    step: Callable[[Any, Slots], tuple[Slots, jax.Array, jax.Array]]
    free: Callable[[Slots, Any], Slots]  # (slots, row) -> slots in which the row is free


def make_engine(
    model: nn.Module,
    example: Mapping[str, Any],
    *,
    rows: int,
    slots: int,
    banned: Sequence[int] = (),
    chunk: int | None = None,
) -> Engine:
    """Returns the engine of a model with so many rows, each of a cache of so many slots for a prompt and its text.

    `example` is a batch of one row as `insert` gets it; an encoder's text has the same padded length in every batch.
    `banned` tokens are never generated. No function compiles again for another row, drawing or text, `insert` only for
    another padded length of a prompt. Padding takes no slots. Of a prompt `chunk` tokens are read at once; None: all.
    """

    def row_of(variables: Any, batch: Mapping[str, Any]) -> tuple[Any, jax.Array, jax.Array]:
        length = batch['inputs'].shape[1]
        extend, cache, prompt = begin(model, variables, batch, max(length, slots), chunk)
        padding = jnp.sum(prompt.positions_BP < 0)
        cache = prefill(extend, cache, prompt).trimmed(padding, slots).by_row()
        return cache, prompt.tokens_BP[:, -1].astype(jnp.int32), prompt.positions_BP[:, -1]

    @jax.jit
    def empty(variables: Any) -> Slots:
        shapes = jax.eval_shape(row_of, variables, dict(example))[0]
        cache = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), shapes)
        drawing: Any = jax.tree.map(lambda value: jnp.zeros(rows, jnp.asarray(value).dtype), Drawing())
        keys_B = jnp.broadcast_to(jax.random.key(0), (rows,))
        nothing = jnp.zeros(rows, jnp.int32)
        return Slots(cache, nothing, nothing - 1, nothing, keys_B, drawing)

    @functools.partial(jax.jit, donate_argnums=1)
    def insert(variables: Any, slots: Slots, batch: Mapping[str, Any], row: jax.Array, drawing: Drawing) -> Slots:
        cache, last_1, position_1 = row_of(variables, batch)
        key = jax.random.fold_in(jax.random.key(drawing.seed), drawing.row)  # as `Prompt.keys`
        key = jnp.where(drawing.number == 0, key, jax.random.fold_in(key, drawing.number))
        ways = jax.tree.map(lambda x: jnp.asarray(x)[None], drawing)
        new = Slots(cache, last_1, position_1, jnp.zeros(1, jnp.int32), key[None], ways)
        return jax.tree.map(lambda all_rows, one: all_rows.at[row].set(one[0].astype(all_rows.dtype)), slots, new)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(variables: Any, slots: Slots) -> tuple[Slots, jax.Array, jax.Array]:
        positions_B1 = slots.position_B[:, None]
        found: Any = model.apply(variables, slots.last_B[:, None], positions_B1, slots.cache, method='extend')
        logits_BV, cache = found[0][:, 0].astype(jnp.float32), found[1]
        allowed_BV = jnp.where(banned_mask(logits_BV.shape[1], banned)[None], -jnp.inf, logits_BV)
        keys_B = jax.vmap(jax.random.fold_in)(slots.keys_B, slots.step_B)
        chosen_B = jax.vmap(_draw)(keys_B, allowed_BV, slots.drawing).astype(jnp.int32)
        logprobs_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), chosen_B[:, None], 1)[:, 0]
        writes_B = slots.position_B >= 0
        gone_on = slots.replace(
            cache=cache.back((~writes_B).astype(jnp.int32)),
            last_B=chosen_B,
            position_B=jnp.where(writes_B, slots.position_B + 1, -1),
            step_B=slots.step_B + 1,
        )
        return gone_on, chosen_B, logprobs_B

    @functools.partial(jax.jit, donate_argnums=0)
    def free(slots: Slots, row: jax.Array) -> Slots:
        return slots.replace(position_B=slots.position_B.at[row].set(-1))

    return Engine(empty, insert, step, free)


def _draw(key: jax.Array, logits_V: jax.Array, drawing: Drawing) -> jax.Array:
    """Returns the next token of a row: the likeliest one at temperature 0."""
    cold = drawing.temperature == 0
    sampling = Sampling(jnp.where(cold, 1.0, drawing.temperature), drawing.top_k, drawing.top_p, min_p=drawing.min_p)
    drawn = jax.random.categorical(key, sampling.warp(logits_V[None])[0])
    return jnp.where(cold, jnp.argmax(logits_V), drawn)


def write_all(
    engine: Engine,
    variables: Any,
    asked: Iterable[tuple[Mapping[str, Any], Drawing, int]],
    *,
    rows: int,
    ends: Collection[int],
) -> Iterator[tuple[int, list[int], float]]:
    """Yields the number of each text that is asked for, its tokens and their log-probability, as they end.

    A text is asked for by a batch of one row, its drawing and the most new tokens. The first `rows` are begun, and each
    further one as soon as one has ended, by a token of `ends` or its length.
    """
    waiting, slots = enumerate(asked), engine.empty(variables)
    free, writing = list(range(rows)), dict[int, tuple[int, int, list[int], list[float]]]()
    while True:
        while free and (found := next(waiting, None)) is not None:
            number, (batch, drawing, most) = found
            slots = engine.insert(variables, slots, batch, np.int32(row := free.pop(0)), drawing)
            writing[row] = number, most, [], []
        if not writing:
            return
        slots, tokens_B, logprobs_B = engine.step(variables, slots)
        tokens_B, logprobs_B = jax.device_get((tokens_B, logprobs_B))
        for row, (number, most, tokens, logprobs) in list(writing.items()):
            tokens.append(int(tokens_B[row]))
            logprobs.append(float(logprobs_B[row]))
            if tokens[-1] in ends or len(tokens) == most:
                slots = engine.free(slots, np.int32(row))
                free.append(row)
                del writing[row]
                yield number, tokens, math.fsum(logprobs)
