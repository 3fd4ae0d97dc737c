"""Pairs of sentences, and what a model is to say of them. A "sentence" is any span of a text, as in BERT.

Both functions cut a text in two where one of its sentences ends, any such place as likely; where none does inside it,
at any place between two tokens. A pair that is longer than its room loses tokens of the longer part until it fits: the
first part at its beginning, the second at its end, so that they still meet.
"""

from collections.abc import Callable

import numpy as np

from tformer.errors import UserError


def next_sentence(
    tokens: np.ndarray,
    sentence_ends: np.ndarray,
    room: int,
    rng: np.random.Generator,
    other: Callable[[], np.ndarray],
) -> tuple[np.ndarray, np.ndarray, int]:
    """A pair for next-sentence prediction: B follows A in the text or comes from another text, half of the time each.

    The other text's B comes after one of its cuts too, is as long as this text's B where any of them leaves so much,
    and ends a sentence where that does and one ends in it: neither place nor length tells. Nothing follows a single
    token: its B is another text's.
    Source: Devlin et al. 2019, section 3.1.

    Args:
      tokens: int [T], the text, 1 or more.
      sentence_ends: bool [vocab_size], the ids that end a sentence.
      room: the most tokens of both, 2 or more.
      rng: the source of all randomness.
      other: gives another text's tokens, int [1 or more]; it is called where they are needed.

    Returns:
      A, B: int, neither empty.
      label: an id of NEXT_SENTENCE.
    """
    cut = _cut(tokens, sentence_ends, rng)
    first, second = tokens[:cut], tokens[cut:]
    label = int(rng.integers(2)) if len(second) else 1
    if label:
        second = _like(second, other(), sentence_ends, rng)
    return *_fit(first, second, room), label


def sentence_order(
    tokens: np.ndarray, sentence_ends: np.ndarray, room: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, int]:
    """A pair for sentence-order prediction: two parts of a text that meet, swapped half of the time.

    A single token is in order, and its B is empty. A text that begins or ends inside a sentence, or is cut to the room,
    shows there which part is which. Source: Lan et al. 2020, section 3.1.

    Args:
      tokens: int [T], the text.
      sentence_ends: bool [vocab_size], the ids that end a sentence.
      room: the most tokens of both, 2 or more.
      rng: the source of all randomness.

    Returns:
      A, B: int, neither empty where the text has two tokens.
      label: an id of SENTENCE_ORDER.
    """
    cut = _cut(tokens, sentence_ends, rng)
    first, second = _fit(tokens[:cut], tokens[cut:], room)
    if len(second) and rng.integers(2):
        return second, first, 1
    return first, second, 0


def another(own: range, count: int, rng: np.random.Generator) -> int:
    """Any of `count` texts that is none of `own`.

    Raises:
      UserError: there is no other.
    """
    if count == len(own):
        raise UserError('next-sentence prediction needs two texts or more, and the split has one')
    return int(own.stop + rng.integers(count - len(own))) % count


def _cut(tokens: np.ndarray, sentence_ends: np.ndarray, rng: np.random.Generator, least: int = 1) -> int:
    """Where int [T] is cut so that `least` tokens follow, or where most do; T where there are not two tokens."""
    if len(tokens) < 2:
        return len(tokens)
    ends = sentence_ends[tokens]
    cuts = np.flatnonzero(ends[:-1] & ~ends[1:]) + 1  # of a run of ends after the last one
    if not len(cuts):
        cuts = np.arange(1, len(tokens))
    some = cuts[: max(int(np.searchsorted(cuts, len(tokens) - least, side='right')), 1)]
    return int(some[rng.integers(len(some))])


def _like(wanted: np.ndarray, text: np.ndarray, sentence_ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Tokens of `text` that a B could be: at most as many as `wanted`, at least one, ending a sentence if that does."""
    size = max(len(wanted), 1)
    start = _cut(text, sentence_ends, rng, size) if len(text) > 1 else 0
    found = text[start : start + size]
    ends = np.flatnonzero(sentence_ends[found])
    return found[: ends[-1] + 1] if len(ends) and sentence_ends[wanted[-1:]].any() else found


def _fit(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    size = min(len(first), max(room - len(second), room - room // 2))
    return first[len(first) - size :], second[: room - size]
