"""Texts that begin and end at different times, in one batch: a row that is free takes the next text.

The rows of a `Slots` go on by a token each step, each from its own position with its own way of drawing. What a text
becomes does not depend on the others: it is that of `greedy` or `sample` by itself. The cache is a ring: all rows write
the same slot, and a text that begins has its prompt in the slots before.

Shapes: B rows, R rows that begin, P prompt length, S slots of a row's cache, V vocabulary.
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

from tformer.config import Decode
from tformer.decode.generate import begin
from tformer.decode.sample import Prompt, Sampling, banned_mask, prefill


class Drawing(NamedTuple):
    """How the tokens of a text are drawn."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 2**31 - 1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    row: int = 0  # the number of the text among those of the same seed
    number: int = 0  # of the draw of the same text


# The fields of config.decode that an engine, or who asks it for a text, knows; others change what is written.
KNOWN = (
    *('strategy', 'max_len', 'num_outputs', 'temperature', 'top_k', 'top_p', 'min_p', 'ends'),
    *('quantization', 'cache_quantization'),
)
_HARMLESS = ('batch_size', 'prefill_chunk', 'draft', 'draft_len')  # they change no distribution


def unknown(decode: Decode) -> list[str]:
    """Returns the fields, as they are set, by which a run's texts are others than an engine's."""
    plain = vars(Decode())
    found = {name: value for name, value in vars(decode).items() if value != plain[name]}
    names = [name for name in found if name not in (*KNOWN, *_HARMLESS)]
    names += ['strategy'] if decode.strategy not in ('greedy', 'sample') else []
    return [f'decode.{name}={found[name]}' for name in names]


def drawing_of(decode: Decode, seed: int) -> Drawing:
    """Returns how a run draws the first text of a seed, where nothing is `unknown`."""
    cuts = {name: value for name in ('top_k', 'top_p', 'min_p') if (value := getattr(decode, name)) is not None}
    heat = decode.temperature if decode.strategy == 'sample' else 0.0
    bits = np.int64(seed).astype(np.int32)  # that keys are made of
    return Drawing(**cuts, temperature=heat, seed=int(bits))


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
    # (variables, slots, a batch of one row, row, drawing) -> slots in which the row writes after its prompt. Of several
    # rows [R] and drawings each goes on from a prompt, or equally many in turn from each; a row B is none
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
    quantization: str | None = None,
) -> Engine:
    """Returns the engine of a model with so many rows, each of a cache of so many slots for a prompt and its text, of
    which the last token is not read.

    `example` is a batch of one row as `insert` gets it; an encoder's text has the same padded length in every batch.
    `banned` tokens are never generated. No function compiles again for another row, drawing or text, `insert` only for
    another padded length of a prompt. Padding takes no slots. Of a prompt `chunk` tokens are read at once; None: all.
    The cache has the `quantization` of decode.cache_quantization.
    """

    read = functools.partial(_read, model, chunk, quantization)

    @jax.jit
    def empty(variables: Any) -> Slots:
        cache, _ = jax.eval_shape(lambda: read(variables, example, slots, jnp.int32(0)))
        return _free_rows(cache, rows)

    @functools.partial(jax.jit, donate_argnums=1)
    def insert(variables: Any, slots: Slots, batch: Mapping[str, Any], row: jax.Array, drawing: Drawing) -> Slots:
        cache, prompt = read(variables, batch, slots.cache.slots, slots.cache.index)
        return _inserted(slots, cache, prompt, jnp.atleast_1d(row), drawing)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(variables: Any, slots: Slots) -> tuple[Slots, jax.Array, jax.Array]:
        positions_B1, tokens_B1 = slots.position_B[:, None], slots.last_B[:, None]
        logits_B1V, cache = model.apply(variables, tokens_B1, positions_B1, slots.cache, method='extend')
        return _drawn(slots.replace(cache=cache), logits_B1V[:, 0].astype(jnp.float32), banned)

    @functools.partial(jax.jit, donate_argnums=0)
    def free(slots: Slots, row: jax.Array) -> Slots:
        return slots.replace(position_B=slots.position_B.at[row].set(-1))

    return Engine(empty, insert, step, free)


def _read(
    model: nn.Module,
    chunk: int | None,
    quantization: str | None,
    variables: Any,
    batch: Mapping[str, Any],
    size: int,
    end: Any,
) -> tuple[Any, Prompt]:
    """Returns the cache of a batch, a ring of `size` slots whose next one is `end`, and its prompts."""
    extend, cache, prompt = begin(model, variables, batch, max(batch['inputs'].shape[1], size), chunk, quantization)
    return prefill(extend, cache, prompt).ring(size, end), prompt


def _free_rows(row: Any, rows: int) -> Slots:
    """Returns so many free rows of a cache of the shapes of one row."""
    cache = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), row.replace(index=None))
    drawing: Any = jax.tree.map(lambda value: jnp.zeros(rows, jnp.asarray(value).dtype), Drawing())
    keys_B = jnp.broadcast_to(jax.random.key(0), (rows,))
    nothing = jnp.zeros(rows, jnp.int32)
    return Slots(cache.replace(index=jnp.int32(0)), nothing, nothing - 1, nothing, keys_B, drawing)


def _inserted(slots: Slots, cache: Any, prompt: Prompt, rows_R: jax.Array, drawing: Drawing) -> Slots:
    """Returns the slots in which rows go on from prompts, as `Engine.insert` says; `cache` is that of the prompts."""
    draws = len(rows_R) // len(prompt.tokens_BP)
    ways: Any = jax.tree.map(lambda x: jnp.broadcast_to(x, rows_R.shape), drawing)
    last_R, position_R = (jnp.repeat(x[:, -1], draws) for x in (prompt.tokens_BP, prompt.positions_BP))
    cache = cache.repeat(draws).replace(index=None)
    new = Slots(cache, last_R, position_R, jnp.zeros_like(last_R), jax.vmap(_key)(ways), ways)
    old = slots.replace(cache=slots.cache.replace(index=None))
    made: Any = jax.tree.map(lambda x, x_R: x.at[rows_R].set(x_R.astype(x.dtype), mode='drop'), old, new)
    found: Slots = made.replace(cache=made.cache.replace(index=slots.cache.index))
    return found


def _drawn(slots: Slots, logits_BV: jax.Array, banned: Sequence[int]) -> tuple[Slots, jax.Array, jax.Array]:
    """Returns what `Engine.step` does, of slots whose cache has the last tokens already."""
    allowed_BV = jnp.where(banned_mask(logits_BV.shape[1], banned)[None], -jnp.inf, logits_BV)
    keys_B = jax.vmap(jax.random.fold_in)(slots.keys_B, slots.step_B)
    chosen_B = _draw(keys_B, allowed_BV, slots.drawing).astype(jnp.int32)
    logprobs_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), chosen_B[:, None], 1)[:, 0]
    gone_on = slots.replace(
        cache=slots.cache.replace(index=slots.cache.index % slots.cache.slots),
        last_B=chosen_B,
        position_B=jnp.where(slots.position_B >= 0, slots.position_B + 1, -1),
        step_B=slots.step_B + 1,
    )
    return gone_on, chosen_B, logprobs_B


def _key(drawing: Drawing) -> jax.Array:
    """Returns the key of a text, as `Prompt.keys`."""
    key = jax.random.fold_in(jax.random.key(drawing.seed), drawing.row)
    return jnp.where(drawing.number == 0, key, jax.random.fold_in(key, drawing.number))


def _draw(keys_B: jax.Array, logits_BV: jax.Array, drawing: Any) -> jax.Array:
    """Returns the next token of each row by a `Drawing` of arrays [B]: the likeliest one at temperature 0.

    What no row asks for is not computed: draws, and cuts of what is drawn from.
    """
    cold_B = drawing.temperature == 0
    whole_B = (drawing.top_k >= logits_BV.shape[1]) & (drawing.top_p >= 1) & (drawing.min_p <= 0)
    heat_B1 = jnp.where(cold_B, 1.0, drawing.temperature)[:, None]
    cuts = drawing.top_k[:, None], drawing.top_p[:, None], drawing.min_p[:, None]

    def likeliest() -> jax.Array:
        return jnp.argmax(logits_BV, 1)

    def drawn() -> jax.Array:
        warped_BV = jax.lax.cond(
            jnp.all(cold_B | whole_B), lambda: logits_BV / heat_B1, lambda: Sampling(heat_B1, *cuts).warp(logits_BV)
        )
        return jnp.where(cold_B, likeliest(), jax.vmap(jax.random.categorical)(keys_B, warped_BV))

    return jax.lax.cond(jnp.all(cold_B), likeliest, drawn)


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
