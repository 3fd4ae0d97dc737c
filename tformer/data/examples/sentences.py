"""Pairs of sentences, and their labels. A "sentence" is any span of a text, as in BERT.

Both functions cut a text in two at the end of one of its sentences, drawn uniformly, or between any two tokens if no
sentence ends inside the text.
"""

from collections.abc import Callable

import numpy as np

from tformer.errors import UserError


def next_sentence(
    tokens: np.ndarray, sentence_ends: np.ndarray, rng: np.random.Generator, other: Callable[[], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns a pair for next-sentence prediction: B follows A, or comes from another text, half of the time each.

    A B from another text also starts at one of its cuts, is as long as this text's B would be (if a cut leaves so
    much), and ends a sentence if that would (and a sentence ends in it): so neither its start nor its length gives the
    label away. Nothing follows a single token, so its B is from another text.
    Source: Devlin et al. 2019, section 3.1.

    Args:
      tokens: int [T], the text, at least one token.
      sentence_ends: bool [vocab_size], the ids that end a sentence.
      other: returns another text's tokens, int [1 or more]; called only if they are needed.

    Returns:
      A and B, both with at least one token and together with no more than the text (2 of a single token), and the
      label, an id of NEXT_SENTENCE.
    """
    cut = _cut(tokens, sentence_ends, rng)
    first, second = tokens[:cut], tokens[cut:]
    label = int(rng.integers(2)) if len(second) else 1
    if label:
        second = _like(second, other(), sentence_ends, rng)
    return first, second, label


def sentence_order(
    tokens: np.ndarray, sentence_ends: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns a pair for sentence-order prediction: two adjacent parts of a text, swapped half of the time.

    A single token is in order, and its B is empty. If a text begins or ends inside a sentence, that can give the order
    away. The arguments are those of `next_sentence`; the label is an id of SENTENCE_ORDER. Source: Lan et al. 2020,
    section 3.1.
    """
    cut = _cut(tokens, sentence_ends, rng)
    first, second = tokens[:cut], tokens[cut:]
    if len(second) and rng.integers(2):
        return second, first, 1
    return first, second, 0


def another(own: range, count: int, rng: np.random.Generator) -> int:
    """Returns the index of a random one of `count` texts that is not in `own`; there must be one."""
    if count == len(own):
        raise UserError('next-sentence prediction needs two texts or more, and the split has one')
    return int(own.stop + rng.integers(count - len(own))) % count


def _cut(tokens: np.ndarray, sentence_ends: np.ndarray, rng: np.random.Generator, least: int = 1) -> int:
    """Returns a random cut of int [T] that leaves `least` tokens, else the one that leaves most; T below two tokens."""
    if len(tokens) < 2:
        return len(tokens)
    ends = sentence_ends[tokens]
    cuts = np.flatnonzero(ends[:-1] & ~ends[1:]) + 1  # of adjacent ends, after the last one
    if not len(cuts):
        cuts = np.arange(1, len(tokens))
    allowed = cuts[: max(int(np.searchsorted(cuts, len(tokens) - least, side='right')), 1)]
    return int(allowed[rng.integers(len(allowed))])


def _like(wanted: np.ndarray, text: np.ndarray, sentence_ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns tokens of `text` in place of `wanted`: at most as many, at least one, ending a sentence if that does."""
    size = max(len(wanted), 1)
    start = _cut(text, sentence_ends, rng, size) if len(text) > 1 else 0
    second = text[start : start + size]
    ends = np.flatnonzero(sentence_ends[second])
    return second[: ends[-1] + 1] if len(ends) and sentence_ends[wanted[-1:]].any() else second
