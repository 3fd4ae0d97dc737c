"""All texts of a list in the rows of an engine: where texts have ended, the next ones begin.

Batches wait for their longest text. Here the rows go on in one compiled loop until as many are free as begin together.
Texts begin in the order of their prompts' lengths, padded to one of few; the cache grows with them.

Shapes: B rows, R rows that begin, T new tokens, S slots of a row's cache.
"""

import collections
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from tformer.config import Config
from tformer.data.tokenizers.chat import Messages
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode import buckets
from tformer.decode.drawing import Drawing, drawing_of, unknown
from tformer.decode.engine import Slots, make_engine
from tformer.decode.generate import cache_slots, texts_of_row
from tformer.decode.spread import spread_over
from tformer.decode.text import Output, Share, Writer, make_writer
from tformer.distributed import meshes, sharding
from tformer.distributed.compilers import jit
from tformer.model import for_steps

_PARTS = 8  # texts begin when this share of the rows is free


class Written(flax.struct.PyTreeNode):
    """Rows that texts come and go in, with what they have written."""

    slots: Slots
    tokens_BT: jax.Array  # the new tokens of a text; behind its end those of earlier ones
    scores_B: jax.Array  # their log-probability


class Programs(NamedTuple):
    """The compiled functions of a `Refill`."""

    empty: Callable[[Any], Written]  # (variables) -> free rows
    # (rows, slots, those of the encoder's text or None) -> the rows with a larger cache
    grow: Callable[[Written, int, int | None], Written]
    # (variables, rows, batch, the rows [R] that begin, drawings [R]) -> the rows
    begin: Callable[[Any, Written, Mapping[str, Any], np.ndarray, Drawing], Written]
    go_on: Callable[[Any, Written, Any], Written]  # (variables, rows, how many are to be free) -> the rows


class Refill(NamedTuple):
    """Writes what a `Writer` of greedy texts or plain draws writes, in rows that come free."""

    writer: Writer
    programs: Programs
    rows: int
    together: int  # texts that begin together

    def write(
        self,
        variables: Any,
        texts: Sequence[str | Messages],
        seed: int = 0,
        *,
        done: Container[int] = (),
        share: Share = (0, 1),
    ) -> Iterator[tuple[int, list[Output]]]:
        """Yields the number of each text that is not `done` and its outputs, as they end, of a `share` of these texts.

        Raises:
          UserError: a text is longer than the model takes and may not be cut.
        """
        inputs, draws = self.writer.read(texts), texts_of_row(self.writer.decoding)
        order = [i for i in sorted(range(len(inputs)), key=lambda i: len(inputs[i])) if i not in done]
        order = order[share[0] :: share[1]]
        waiting = collections.deque(order[k : k + self.together] for k in range(0, len(order), self.together))
        begin, free, written = self.together * draws, list(range(self.rows)), self.programs.empty(variables)
        writing: dict[int, tuple[int, int]] = {}  # row -> (the number of its text, that of the draw)
        found = collections.defaultdict[int, dict[int, Any]](dict)
        while waiting or writing:
            while waiting and len(free) >= begin:
                chosen = [(text, draw) for text in waiting.popleft() for draw in range(draws)]
                taken = [free.pop() for _ in chosen]
                writing |= dict(zip(taken, chosen, strict=True))
                written = self._begin(variables, written, inputs, chosen, taken, seed)
            written = self.programs.go_on(variables, written, np.int32(begin if waiting else self.rows))
            done_B, tokens_BT, scores_B = _on_host(written)
            for row in [row for row in writing if done_B[row]]:
                free.append(row)
                text, draw = writing.pop(row)
                found[text][draw] = tokens_BT[row], scores_B[row]
                if len(found[text]) == draws:
                    tokens, scores = zip(*(found[text][draw] for draw in range(draws)), strict=True)
                    del found[text]
                    yield text, self.writer.outputs(np.stack(tokens), np.stack(scores))

    def _begin(
        self,
        variables: Any,
        written: Written,
        inputs: Sequence[Sequence[int]],
        chosen: Sequence[tuple[int, int]],
        taken: Sequence[int],
        seed: int,
    ) -> Written:
        """Returns the rows in which draws (text, number) of texts begin."""
        writer, draws = self.writer, texts_of_row(self.writer.decoding)
        tokens = [inputs[text] for text, number in chosen if number == 0]
        size = buckets.length(max(map(len, tokens)), writer.longest)
        batch = buckets.padded(writer.batch(tokens, self.together), size, writer.pad)
        cache = written.slots.cache
        slots = cache_slots(writer.decoding, batch['inputs'].shape[1])
        encoder = batch['encoder_inputs'].shape[1] if 'encoder_inputs' in batch else None
        there = None if encoder is None else cache.encoder_positions_BS.shape[1]
        if (cache.positions_BS.shape[1], there) != (slots, encoder):
            written = self.programs.grow(written, slots, encoder)
        spare = self.together * draws - len(chosen)
        rows_R = np.array([*taken, *[self.rows] * spare], np.int32)
        text_R, number_R = np.array([*chosen, *[(0, 0)] * spare], np.int32).T
        drawing = drawing_of(writer.decoding, seed)._replace(row=text_R, number=number_R)
        return self.programs.begin(variables, written, batch, rows_R, drawing)


def _on_host(written: Written) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns which rows are free, and their tokens and scores."""
    position_B, *found = jax.device_get((written.slots.position_B, written.tokens_BT, written.scores_B))
    return position_B < 0, *found


def serves(config: Config, texts: int) -> bool:
    """Returns whether so many texts are written in rows that come free: there are more than rows, and an engine knows
    all that is asked of them."""
    decode = config.decode
    known = not unknown(decode) and decode.draft is None and config.model.recurrence is None
    return known and texts > decode.batch_size


def make_refill(
    model: nn.Module,
    config: Config,
    tokenizers: Tokenizers,
    *,
    cut: bool,
    mesh: Mesh,
) -> Refill:
    """Returns what writes texts as `make_writer` does, config.decode.batch_size at once, where it `serves`, on a mesh.

    Raises:
      UserError: the model's family or objective does not write text.
    """
    writer = make_writer(model, config, tokenizers, cut=cut)
    multiple = meshes.row_multiple(mesh, config.mesh)
    size = _up(config.decode.batch_size, multiple)
    count = size * texts_of_row(config.decode)
    first = buckets.padded(writer.batch([[writer.pad]], 1), buckets.length(1, writer.longest), writer.pad)
    programs = _programs(model, writer, first, count, mesh, sharding.make_rules(config.mesh))
    return Refill(writer, programs, count, _up(max(size // _PARTS, 1), multiple))


def _up(number: int, multiple: int) -> int:
    """Returns the least multiple that is at least a number."""
    return -(-number // multiple) * multiple


def _programs(
    model: nn.Module, writer: Writer, first: Mapping[str, Any], count: int, mesh: Mesh, rules: sharding.Rules
) -> Programs:
    decoding, ends = writer.decoding, jnp.array(writer.ends)
    slots = cache_slots(decoding, first['inputs'].shape[1])
    options: dict[str, Any] = {'banned': writer.banned, 'rules': writer.rules, 'eos': writer.ends[0]}
    options['quantization'] = decoding.cache_quantization
    engine = make_engine(model, first, rows=count, slots=slots, chunk=decoding.prefill_chunk, **options)

    spread = spread_over(mesh, rules)

    @jit
    def empty(variables: Any) -> Written:
        tokens_BT = jnp.zeros((count, decoding.max_len), jnp.int32)
        return spread(Written(engine.empty(variables), tokens_BT, jnp.zeros(count)))

    @functools.partial(jit, static_argnums=(1, 2))
    def grow(written: Written, slots: int, encoder_slots: int | None) -> Written:
        cache = written.slots.cache.grown(slots, encoder_slots)
        return spread(written.replace(slots=written.slots.replace(cache=cache)))

    @functools.partial(jit, donate_argnums=1)
    def begin(variables: Any, written: Written, batch: Mapping[str, Any], rows_R: Any, drawing: Drawing) -> Written:
        batch = jax.device_put(batch, meshes.batch_sharding(mesh))
        slots = engine.insert(variables, written.slots, batch, rows_R, drawing)
        scores_B = written.scores_B.at[rows_R].set(0.0, mode='drop')
        return spread(written.replace(slots=slots, scores_B=scores_B))

    def advance(variables: Any, written: Written) -> Written:
        writes_B, step_B = written.slots.position_B >= 0, written.slots.step_B
        slots, tokens_B, logprobs_B = engine.step(variables, written.slots)
        ended_B = jnp.isin(tokens_B, ends) | (step_B + 1 >= decoding.max_len)
        new_BT = writes_B[:, None] & (jnp.arange(decoding.max_len)[None] == step_B[:, None])
        return Written(
            slots.replace(position_B=jnp.where(ended_B, -1, slots.position_B)),
            jnp.where(new_BT, tokens_B[:, None], written.tokens_BT),
            written.scores_B + jnp.where(writes_B, logprobs_B, 0.0),
        )

    @functools.partial(jit, donate_argnums=1)
    def go_on(variables: Any, written: Written, enough: jax.Array) -> Written:
        def waits(now: Written) -> jax.Array:
            return jnp.sum(now.slots.position_B < 0) < enough

        step = functools.partial(advance, for_steps(model.cfg, variables))
        return spread(jax.lax.while_loop(waits, step, written))

    return Programs(empty, grow, begin, go_on)
