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

    Both texts are cut, and B begins the rest of one of them. It is as long as the shorter rest, whichever it is from.
    So neither A nor B by itself, nor their lengths, give the label away. But nothing follows a single token, so its B
    is from another text. Source: Devlin et al. 2019, section 3.1.

    Args:
      tokens: int [T], the text, at least one token.
      sentence_ends: bool [vocab_size], the ids that end a sentence.
      other: returns another text's tokens, int [1 or more].

    Returns:
      A and B, both with at least one token and together with no more than the text (2 of a single token), and the
      label, an id of NEXT_SENTENCE.
    """
    cut = _cut(tokens, sentence_ends, rng)
    text = other()
    rests = tokens[cut:], text[_cut(text, sentence_ends, rng) if len(text) > 1 else 0 :]
    label = int(rng.integers(2)) if len(rests[0]) else 1
    return tokens[:cut], rests[label][: max(min(map(len, rests)), 1)], label


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


def _cut(tokens: np.ndarray, sentence_ends: np.ndarray, rng: np.random.Generator) -> int:
    """Returns a random cut of int [T], from 1 to T - 1; T below two tokens."""
    if len(tokens) < 2:
        return len(tokens)
    ends = sentence_ends[tokens]
    cuts = np.flatnonzero(ends[:-1] & ~ends[1:]) + 1  # of adjacent ends, after the last one
    if not len(cuts):
        cuts = np.arange(1, len(tokens))
    return int(cuts[rng.integers(len(cuts))])
