"""What a text must be, as an automaton over tokens: one of several texts, a regular expression, a JSON schema.

Shapes: R rows or hypotheses, V vocabulary, Q states, C classes of tokens that lead to the same states from everywhere.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tformer.config import Decode
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.decode import json_schemas, regular
from tformer.decode.regular import OfBytes
from tformer.errors import UserError


class Constraint(Protocol):
    """Which tokens may come next; all is traced. A state has rows or hypotheses in front."""

    @property
    def least(self) -> int:
        """The number of tokens of the shortest text, its end included."""

    def start(self, shape: tuple[int, ...]) -> Any:
        """Returns the state before the first token, of so many rows [B] or hypotheses [B, M]."""

    def allows(self, state: Any, left: jax.Array) -> jax.Array:
        """Returns mask [..., V] of the tokens that may come next; with that one, `left` more may be written."""

    def follow(self, state: Any, tokens: jax.Array) -> Any:
        """Returns the state after one more token of each."""


class Automaton(NamedTuple):
    """A deterministic automaton: a text may end with an end's token in the last state alone.

    A token is allowed where the text can still end within what is left, so a text that fits comes out whole.
    """

    classes_V: jax.Array  # the class of each token
    next_QC: jax.Array  # the state after a token of a class; -1: none may come
    least_Q: jax.Array  # the least number of tokens to the last state

    @property
    def least(self) -> int:
        return int(self.least_Q[0])

    def start(self, shape: tuple[int, ...]) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    def allows(self, state: jax.Array, left: jax.Array) -> jax.Array:
        next_C = self.next_QC[state]
        allowed_C = (next_C >= 0) & (self.least_Q[next_C] < left)
        return jnp.take(allowed_C, self.classes_V, axis=-1)

    def follow(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        return self.next_QC[state, self.classes_V[tokens]]


UNREACHED = np.iinfo(np.int32).max


def constraint(cfg: Decode, tokenizer: Tokenizer, ends: Sequence[int], vocab_size: int) -> Automaton | None:
    """Returns what `cfg` asks of a text that a token of `ends` ends, None: nothing.

    Raises:
      UserError: no text that fits has at most `cfg.max_len` tokens; a pattern or schema that cannot be read.
    """
    asked = {kind: value for kind in CONSTRAINTS if (value := getattr(cfg, kind)) not in (None, ())}
    if not asked:
        return None
    named = ' and '.join(f'decode.{kind}={_short(value)}' for kind, value in asked.items())
    if not any(map(tokenizer.spell, tokenizer.ordinary_ids.tolist())):
        needs = 'a tokenizer whose tokens have their spaces: not WordPiece'
        raise UserError(f'{" and ".join(f"decode.{kind}" for kind in asked)} needs {needs}')
    try:
        parts = [CONSTRAINTS[kind](value) for kind, value in asked.items()]
        made = over_tokens(functools.reduce(regular.intersection, parts), tokenizer, ends, vocab_size)
    except UserError as error:
        raise UserError(f'{named}: {error}') from error
    if free := asked.keys() <= {'banned', 'begin'} and not cfg.forced_end:  # no text has to end
        made = made._replace(least_Q=jnp.maximum(made.least_Q - 1, 0))
    if made.least >= UNREACHED - 1:
        raise UserError(f'{named}: the vocabulary has no tokens for any text that fits')
    if made.least > cfg.max_len:
        ended = '' if free else ' with its end'
        line = f'the shortest text that fits has {made.least} tokens{ended}: decode.max_len={cfg.max_len}'
        raise UserError(f'{named}: {line}')
    return made


def _short(asked: Any) -> str:
    text = ' '.join(str(asked).split())
    return text if len(text) < 200 else f'{text[:197]}...'


def over_tokens(of_bytes: OfBytes, tokenizer: Tokenizer, ends: Sequence[int], vocab_size: int) -> Automaton:
    """Returns the automaton of a vocabulary, whose state 0 is before the first token: that may lose a space.

    Raises:
      UserError: its table has too many entries.
    """
    next_QB, accepting_Q = of_bytes
    spelled = [tokenizer.spell(index) for index in range(tokenizer.vocab_size)]
    class_N, column_CQ = _after(next_QB, np.arange(len(next_QB)), spelled)
    start_N = column_CQ[class_N, 0]
    if tokenizer.strips_first_space:
        first_N, start_C1 = _after(next_QB, np.zeros(1, int), [text and text.removeprefix(b' ') for text in spelled])
        start_N = start_C1[first_N, 0]
    pairs, kind_N = np.unique(np.stack([class_N, start_N]), axis=1, return_inverse=True)
    column_CQ = column_CQ[pairs[0]]
    behind_CQ = np.where(column_CQ < 0, -1, column_CQ + 1)  # states follow that before the first token
    start_C = np.where(pairs[1] < 0, -1, pairs[1] + 1)
    tokens_CQ = np.column_stack([start_C, behind_CQ, np.full(len(start_C), -1)])
    end_Q = np.where([accepting_Q[0], *accepting_Q, False], len(next_QB) + 1, -1)
    next_CQ = np.vstack([np.full(len(end_Q), -1), end_Q, tokens_CQ]).astype(np.int32)
    classes_V = np.zeros(vocab_size, np.int32)  # may nowhere come
    classes_V[: len(spelled)] = kind_N.reshape(-1) + 2
    classes_V[np.asarray(ends)] = 1
    next_QC = np.ascontiguousarray(next_CQ.T)
    return Automaton(*map(jnp.asarray, (classes_V, next_QC, _least(next_QC))))


_MOST = 2**24  # entries of a table, which is part of each program


def _after(next_QB: np.ndarray, begin_Q: np.ndarray, texts: Sequence[bytes | None]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the class of each text, [N], and for each class the state after its texts from each of some states,
    int32 [C, Q]; -1 where they may not come, or add nothing.

    Texts that lead to the same states are one class from there on, so that the work is that of few.
    """
    number: dict[bytes, int] = {}
    columns: list[np.ndarray] = []

    def numbered(column: np.ndarray) -> int:
        found = number.setdefault(column.tobytes(), len(columns))
        if found == len(columns):
            columns.append(column)
            if len(columns) * len(begin_Q) > _MOST:
                line = (
                    f'it has {len(begin_Q):,} states, and more than {_MOST:,} numbers say what {len(texts):,} tokens do'
                )
                raise UserError(f'{line} in them: ask for shorter texts or fewer repetitions')
        return found

    nowhere = numbered(np.full(len(begin_Q), -1, np.int32))
    kinds: dict[bytes, int] = {}  # of bytes that lead to the same states
    kind_B = np.array([kinds.setdefault(column.tobytes(), byte) for byte, column in enumerate(next_QB.T)])
    size_N = np.array([len(text or b'') for text in texts])
    class_N = np.where(size_N > 0, numbered(begin_Q.astype(np.int32)), nowhere)
    for place in range(size_N.max(initial=0)):
        longer_N = np.flatnonzero((size_N > place) & (class_N != nowhere))
        byte_N = kind_B[[(texts[row] or b'')[place] for row in longer_N.tolist()]] if len(longer_N) else longer_N
        steps, step_N = np.unique(class_N[longer_N] * 256 + byte_N, return_inverse=True)
        after = []
        for before, byte in zip(*np.divmod(steps, 256), strict=True):
            state_Q = columns[before]
            after.append(numbered(np.where(state_Q < 0, -1, next_QB[state_Q, byte])))
        class_N[longer_N] = np.array(after, int)[step_N.reshape(-1)]
    return class_N, np.stack(columns)


def _least(next_QC: np.ndarray) -> np.ndarray:
    """Returns the least number of tokens from each state to the last one."""
    least_Q = np.full(len(next_QC), UNREACHED, np.int32)
    least_Q[-1], length, reached = 0, 0, True
    while reached:
        length += 1
        nearer_Q = ((next_QC >= 0) & (least_Q[next_QC] == length - 1)).any(axis=1) & (least_Q == UNREACHED)
        least_Q[nearer_Q] = length
        reached = bool(nearer_Q.any())
    return least_Q


def of_choices(texts: Sequence[str]) -> OfBytes:
    """Returns the automaton of several texts."""
    return regular.automaton('|'.join(map(re.escape, texts)))


def of_regex(pattern: str) -> OfBytes:
    """Returns the automaton of a regular expression, which the whole text matches."""
    return regular.automaton(pattern)


def of_json_schema(file: str) -> OfBytes:
    """Returns the automaton of the JSON values that fit the schema in a file, in the order of its properties.

    Raises:
      UserError: the file cannot be read, or its schema has what is not supported.
    """
    try:
        return json_schemas.automaton(json.loads(pathlib.Path(file).read_text()))
    except OSError as error:
        raise UserError(error.strerror or str(error)) from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f'it is not JSON: {error}') from error


def without(texts: Sequence[str]) -> OfBytes:
    """Returns the automaton of the texts in which none of some others stands anywhere (Aho & Corasick 1975)."""
    banned = [text.encode() for text in texts]
    begun = sorted({text[:size] for text in banned for size in range(len(text))}, key=lambda part: (len(part), part))
    number = {part: state for state, part in enumerate(begun)}
    next_QB = np.full((len(begun), 256), -1, np.int32)
    for part, state in number.items():
        for byte in range(256):
            seen = part + bytes([byte])
            if not any(seen.endswith(text) for text in banned):
                next_QB[state, byte] = next(number[seen[i:]] for i in range(len(seen) + 1) if seen[i:] in number)
    return OfBytes(next_QB, np.ones(len(begun), bool))


def beginning(text: str) -> OfBytes:
    """Returns the automaton of the texts that begin with one."""
    size = len(text.encode())
    next_QB = np.full((size + 1, 256), -1, np.int32)
    next_QB[np.arange(size), list(text.encode())] = np.arange(1, size + 1)
    next_QB[size] = size
    return OfBytes(next_QB, np.arange(size + 1) == size)


CONSTRAINTS: dict[str, Callable[[Any], OfBytes]] = {  # of fields of config.decode
    'choices': of_choices,
    'regex': of_regex,
    'json_schema': of_json_schema,
    'banned': without,
    'begin': beginning,
}
