"""Texts that begin and end at different times, in one batch: a row that is free takes the next text.

The rows of a `Slots` go on by a token each step, each from its own position with its own way of drawing. What a text
becomes does not depend on the others: it is that of `greedy` or `sample` by itself. The cache is a ring: all rows write
the same slot, and a text that begins has its prompt in the slots before.

Shapes: B rows, R rows that begin, P prompt length, S slots of a row's cache, K tokens that biases look back at, N
tokens that a text biases by itself, V vocabulary.
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

from tformer.decode.drawing import Drawing, draw, key_of
from tformer.decode.generate import begin
from tformer.decode.penalties import History
from tformer.decode.rules import Rules
from tformer.decode.sample import Prompt, banned_mask, prefill
from tformer.decode.sample import read as read_further
from tformer.distributed.compilers import jit
from tformer.layers.parallel import each_device


class Slots(flax.struct.PyTreeNode):
    """The rows of a batch that texts come and go in."""

    cache: Any
    recent_BK: jax.Array  # the tokens so far, of which the next step reads the last; -1: there are fewer
    position_B: jax.Array  # that of the last; -1 in free rows
    step_B: jax.Array  # new tokens so far
    ruled: Any  # the state of the constraint
    bias: tuple[jax.Array, jax.Array] | None  # of each text: tokens_BN, and what they gain; None: no text has its own
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
    # (variables, slots, a batch of one row, row, drawing, cache, number) -> (the slots of `insert`, the prompt's cache,
    # which others go on from). Of the prompt the batch has what is behind so many tokens that a cache has; None: it has
    # all. None: programs in files
    resume: Callable[..., tuple[Slots, Any]] | None = None


class _Facts(NamedTuple):
    """What the functions of an engine share."""

    model: nn.Module
    banned: Sequence[int]
    rules: Rules
    eos: int
    chunk: int | None
    quantization: str | None

    @property
    def recent(self) -> int:
        """The tokens that biases look back at, at least the last one."""
        return max([len(tokens) - 1 for tokens, _ in self.rules.bias] + [1])


def make_engine(
    model: nn.Module,
    example: Mapping[str, Any],
    *,
    rows: int,
    slots: int,
    banned: Sequence[int] = (),
    rules: Rules = Rules(),
    eos: int = 0,
    chunk: int | None = None,
    quantization: str | None = None,
    spread: Callable[[Any], Any] = lambda rows: rows,
) -> Engine:
    """Returns the engine of a model with so many rows, each of a cache of so many slots for a prompt and its text, of
    which the last token is not read.

    `example` is a batch of one row as `insert` gets it; an encoder's text has the same padded length in every batch.
    With `bias_tokens` and `bias_values` [R, N] in a batch, these tokens' logits gain these values. `banned` tokens are
    never generated; `rules` have a constraint and biases, no penalties, and `eos` is written where they leave nothing.
    No function compiles again for another row, drawing, bias or text, `insert` only for another padded length of a
    prompt. Padding takes no slots. Of a prompt `chunk` tokens are read at once; None: all. The cache has the
    `quantization` of decode.cache_quantization. `spread` says where rows stand on several devices.
    """
    facts = _Facts(model, banned, rules, eos, chunk, quantization)

    @jit
    def empty(variables: Any) -> Slots:
        cache = jax.eval_shape(lambda: _read(facts, variables, example, slots)[0].ring(slots, jnp.int32(0)).for_steps())
        return spread(_free_rows(facts, cache, example, rows))

    @functools.partial(jit, donate_argnums=1)
    def insert(variables: Any, slots: Slots, batch: Mapping[str, Any], row: jax.Array, drawing: Drawing) -> Slots:
        found = _read(facts, variables, batch, slots.cache.slots)
        return spread(_inserted(facts, slots, found, batch, row, drawing))

    @functools.partial(jit, donate_argnums=1)
    def resume(
        variables: Any,
        slots: Slots,
        batch: Mapping[str, Any],
        row: jax.Array,
        drawing: Drawing,
        kept: Any,
        number: jax.Array,
    ) -> tuple[Slots, Any]:
        size = slots.cache.slots
        whole = kept is None
        found = _read(facts, variables, batch, size) if whole else _read_on(facts, variables, batch, kept, number)
        cache = found[0].ring(size, found[1].positions_BP[0, -1])  # position p in slot p
        return spread((_inserted(facts, slots, (cache, found[1]), batch, row, drawing), cache))

    @functools.partial(jit, donate_argnums=1)
    def step(variables: Any, slots: Slots) -> tuple[Slots, jax.Array, jax.Array]:
        positions_B1, tokens_B1 = slots.position_B[:, None], slots.recent_BK[:, -1:]
        logits_B1V, cache = model.apply(variables, tokens_B1, positions_B1, slots.cache, method='extend')
        return spread(_drawn(facts, slots.replace(cache=cache), logits_B1V[:, 0].astype(jnp.float32)))

    @functools.partial(jit, donate_argnums=0)
    def free(slots: Slots, row: jax.Array) -> Slots:
        return spread(slots.replace(position_B=slots.position_B.at[row].set(-1)))

    return Engine(empty, insert, step, free, resume)


def _read(facts: _Facts, variables: Any, batch: Mapping[str, Any], size: int) -> tuple[Any, Prompt]:
    """Returns the cache of a batch, of at least `size` slots, and its prompts."""
    slots = max(batch['inputs'].shape[1], size)
    extend, cache, prompt = begin(facts.model, variables, batch, slots, facts.chunk, facts.quantization)
    return prefill(extend, cache, prompt), prompt


def _read_on(facts: _Facts, variables: Any, batch: Mapping[str, Any], kept: Any, number: Any) -> tuple[Any, Prompt]:
    """Returns the cache of a prompt that goes on behind the first `number` tokens of one whose cache is `kept`.

    What that has behind them is hidden by its positions until it is written over.
    """
    extend, _, prompt = begin(facts.model, variables, batch, 1, facts.chunk, facts.quantization)
    padding = jnp.sum(prompt.positions_BP < 0)  # in front; behind the tokens it is written over
    tokens_BT, positions_BT = (jnp.roll(x[:, :-1], -padding, 1) for x in (prompt.tokens_BP, prompt.positions_BP))
    cache = kept.replace(index=number).wide(kept.slots + tokens_BT.shape[1])
    cache = read_further(extend, cache, tokens_BT, positions_BT, chunk=facts.chunk, empty=False)
    return cache.back(padding), prompt


def _own_bias(batch: Mapping[str, Any]) -> tuple[Any, Any] | None:
    return (batch['bias_tokens'], batch['bias_values']) if 'bias_tokens' in batch else None


def _free_rows(facts: _Facts, row: Any, example: Mapping[str, Any], rows: int) -> Slots:
    """Returns so many free rows, of a cache of the shapes of one row."""

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), tree)

    cache = zeros(row.rows()).at_first()
    drawing: Any = jax.tree.map(lambda value: jnp.zeros(rows, jnp.asarray(value).dtype), Drawing())
    keys_B = jnp.broadcast_to(jax.random.key(0), (rows,))
    recent_BK, nothing = jnp.full((rows, facts.recent), -1, jnp.int32), jnp.zeros(rows, jnp.int32)
    ruled, bias = facts.rules.start((rows,)), zeros(_own_bias(example))
    return Slots(cache, recent_BK, nothing - 1, nothing, ruled, bias, keys_B, drawing)


def _inserted(
    facts: _Facts, slots: Slots, found: tuple[Any, Prompt], batch: Mapping[str, Any], row: jax.Array, drawing: Drawing
) -> Slots:
    """Returns the slots in which rows go on from prompts, as `Engine.insert` says; `found` is their cache and they."""
    near, prompt = slots.cache.near, found[1]
    cache = found[0].ring(slots.cache.slots, slots.cache.index).for_steps(None if near is None else near.index)
    rows_R = jnp.atleast_1d(row)
    draws = len(rows_R) // len(prompt.tokens_BP)
    ways: Any = jax.tree.map(lambda x: jnp.broadcast_to(x, rows_R.shape), drawing)
    each = _last(prompt, facts.recent), prompt.positions_BP[:, -1], _own_bias(batch)
    recent_RK, position_R, bias = jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0), each)
    cache, ruled = cache.repeat(draws).rows(), facts.rules.start(rows_R.shape)
    keys_R, step_R = jax.vmap(key_of)(ways), jnp.zeros_like(position_R)
    new = Slots(cache, recent_RK, position_R, step_R, ruled, bias, keys_R, ways)
    old = slots.replace(cache=slots.cache.rows())
    made: Any = jax.tree.map(functools.partial(_put, rows_R), old, new)
    begun: Slots = made.replace(cache=made.cache.at(slots.cache))
    return begun


def _put(rows_R: jax.Array, x: jax.Array, x_R: jax.Array) -> jax.Array:
    """Returns x [B, ...] with some of its rows replaced; a row B is none.

    Where devices share the rows, a single one has such a row beside it: to write to one alone, at a place that they do
    not know, compilers of accelerators gather all rows on every device.
    """
    if len(rows_R) == 1 and each_device.ways(each_device.split('batch', len(x)) or ()) > 1:
        rows_R, x_R = jnp.append(rows_R, len(x)), jnp.repeat(x_R, 2, axis=0)
    return x.at[rows_R].set(x_R.astype(x.dtype), mode='drop')


def _drawn(facts: _Facts, slots: Slots, logits_BV: jax.Array) -> tuple[Slots, jax.Array, jax.Array]:
    """Returns what `Engine.step` does, of slots whose cache has the last tokens already."""
    rules, (B, V) = facts.rules, logits_BV.shape
    allowed_BV = jnp.where(banned_mask(V, facts.banned)[None], -jnp.inf, logits_BV)
    if rules.any:
        history = History(slots.recent_BK, slots.recent_BK >= 0, facts.recent, jnp.int32(0))
        left_B1 = (slots.drawing.most - slots.step_B)[:, None]
        allowed_BV = rules(allowed_BV, slots.ruled, history, left_B1, facts.eos)
    if slots.bias is not None:
        allowed_BV = allowed_BV.at[jnp.arange(B)[:, None], slots.bias[0]].add(slots.bias[1])
    keys_B = jax.vmap(jax.random.fold_in)(slots.keys_B, slots.step_B)
    chosen_B = draw(keys_B, allowed_BV, slots.drawing).astype(jnp.int32)
    logprobs_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), chosen_B[:, None], 1)[:, 0]
    gone_on = slots.replace(
        cache=slots.cache.replace(index=slots.cache.index % slots.cache.slots),
        recent_BK=jnp.concatenate([slots.recent_BK[:, 1:], chosen_B[:, None]], 1),
        ruled=rules.follow(slots.ruled, chosen_B),
        position_B=jnp.where(slots.position_B >= 0, slots.position_B + 1, -1),
        step_B=slots.step_B + 1,
    )
    return gone_on, chosen_B, logprobs_B


def _last(prompt: Prompt, number: int) -> jax.Array:
    """Returns so many of the last tokens of prompts; -1 where a prompt has fewer."""
    tokens_BP = jnp.where(prompt.positions_BP < 0, -1, prompt.tokens_BP)
    wide_BP = jnp.pad(tokens_BP, ((0, 0), (max(number - tokens_BP.shape[1], 0), 0)), constant_values=-1)
    return wide_BP[:, -number:].astype(jnp.int32)


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
            drawing, row = drawing._replace(most=most), free.pop(0)
            slots = engine.insert(variables, slots, batch, np.int32(row), drawing)
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
