"""Pairs of sentences: what is cut, what is swapped, and that only the order and the text tell a label."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixed_draws import Fixed
from tformer.config.tasks import NEXT_SENTENCE, SENTENCE_ORDER
from tformer.data.examples import sentences
from tformer.data.tokenizers import bytes_and_characters
from tformer.data.tokenizers.vocabulary import FIRST
from tformer.errors import UserError

BYTE = bytes_and_characters.Byte()
ENDS = BYTE.sentence_ends
TEXTS = st.text('ab .', min_size=1, max_size=40)
OTHERS = TEXTS.map(str.upper)  # of other letters
SEEDS = st.integers(0, 2**32)


def tokens(text: str) -> np.ndarray:
    return np.array(BYTE.encode(text), np.int32)


def follow(text: str, other: str, rng: object) -> tuple[str, str, str]:
    first, second, label = sentences.next_sentence(tokens(text), ENDS, rng, lambda: tokens(other))  # type: ignore[arg-type]
    assert first.dtype == second.dtype == np.int32
    return BYTE.decode(first), BYTE.decode(second), NEXT_SENTENCE[label]


def order(text: str, rng: object) -> tuple[str, str, str]:
    first, second, label = sentences.sentence_order(tokens(text), ENDS, rng)  # type: ignore[arg-type]
    assert first.dtype == second.dtype == np.int32
    return BYTE.decode(first), BYTE.decode(second), SENTENCE_ORDER[label]


def test_pairs_by_hand() -> None:
    text, other = 'Ab. Cd... Ef!', 'Uvw. Xy? Z. Last.'
    # the draws: the cut of the text, that of the other one, the label
    assert follow(text, other, Fixed(0, 0, 0)) == ('Ab.', ' Cd... Ef!', 'is_next')
    assert follow(text, other, Fixed(0, 0, 1)) == ('Ab.', ' Xy? Z. La', 'not_next')
    assert follow(text, other, Fixed(1, 1, 0)) == ('Ab. Cd...', ' Ef!', 'is_next')
    assert follow(text, other, Fixed(1, 1, 1)) == ('Ab. Cd...', ' Z. ', 'not_next')
    # the rest of the other text is shorter
    assert follow(text, other, Fixed(0, 2, 0)) == ('Ab.', ' Cd...', 'is_next')
    assert follow(text, other, Fixed(0, 2, 1)) == ('Ab.', ' Last.', 'not_next')
    assert order(text, Fixed(1, 0)) == ('Ab. Cd...', ' Ef!', 'in_order')
    assert order(text, Fixed(1, 1)) == (' Ef!', 'Ab. Cd...', 'swapped')


def test_texts_of_one_sentence_or_one_token() -> None:
    assert order('abc.', Fixed(2, 1)) == ('.', 'abc', 'swapped')  # 3 places inside
    assert order('abc', Fixed(0, 0)) == ('a', 'bc', 'in_order')
    assert order('a', Fixed()) == ('a', '', 'in_order')
    assert follow('abc', 'xyz', Fixed(1, 0, 0)) == ('ab', 'c', 'is_next')
    assert follow('abc', 'xyz', Fixed(0, 0, 1)) == ('a', 'yz', 'not_next')
    assert follow('a', 'xyz', Fixed(1)) == ('a', 'z', 'not_next')
    assert follow('abc', 'x', Fixed(0, 0)) == ('a', 'b', 'is_next')
    assert follow('abc', 'x', Fixed(0, 1)) == ('a', 'x', 'not_next')
    assert follow('a', 'x', Fixed()) == ('a', 'x', 'not_next')


@given(TEXTS, SEEDS)
@settings(deadline=None)
def test_two_parts_of_a_text_meet(text: str, seed: int) -> None:
    first, second, label = order(text, np.random.default_rng(seed))
    whole = second + first if label == 'swapped' else first + second
    assert whole == text
    assert len(text) < 2 or (first and second)
    left = second if label == 'swapped' else first
    inside = text[:-1]
    if any(ends and not after for ends, after in itertools.pairwise(ENDS[tokens(text)].tolist())):
        assert left.endswith('.') and inside.startswith(left) and text[len(left)] != '.'


@given(TEXTS, OTHERS, SEEDS)
@settings(deadline=None)
def test_what_is_next_follows_and_what_is_not_is_another_texts(text: str, other: str, seed: int) -> None:
    first, second, label = follow(text, other, np.random.default_rng(seed))
    assert first and second and first in text and len(first + second) <= max(len(text), 2)
    if label == 'is_next':
        assert text.startswith(first + second)
    else:
        assert second in other and (len(text) == 1 or len(second) < len(text))


def test_labels_and_cuts_are_as_likely() -> None:
    rng, count = np.random.default_rng(0), 8000
    text, other = 'aa. bbbb. c. dd. eee.', 'LL. MM. N. OO. PPP. QQ. RR. S. T. UUU. VV. WW.'
    bound = 4 * np.sqrt(0.25 / count)
    made = [follow(text, other, rng) for _ in range(count)]
    assert abs(np.mean([label == 'is_next' for *_, label in made]) - 0.5) < bound
    cuts = collections.Counter(first for first, *_ in made)
    assert len(cuts) == 4 and all(abs(n / count - 0.25) < 4 * np.sqrt(0.1875 / count) for n in cuts.values())
    assert {first for first, _, label in made if label == 'not_next'} == set(cuts)
    assert all(second.startswith(' ') for _, second, _ in made)  # as those that follow
    ordered = [order(text, rng) for _ in range(count)]
    assert abs(np.mean([label == 'swapped' for *_, label in ordered]) - 0.5) < bound


def area(values: np.ndarray, labels: np.ndarray) -> float:
    """Returns the area under the ROC curve: how often a false pair's value is the larger one, ties by half."""
    _, ranks, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = (np.cumsum(counts) - (counts - 1) / 2)[ranks]
    false = int(labels.sum())
    return (middle[labels == 1].sum() - false * (false + 1) / 2) / (false * (len(labels) - false))


# kind of texts -> (its lengths, by a generator; share of tokens that end a sentence; whether each text ends one)
KINDS = {
    'alike': (lambda rng: 60, 0.05, False),
    'alike and whole': (lambda rng: 60, 0.05, True),
    'uniform': (lambda rng: rng.integers(20, 201), 0.05, True),
    'short': (lambda rng: rng.integers(2, 9), 0.3, True),
    'skewed': (lambda rng: 2 + int(rng.exponential(40)), 0.1, True),
    'two sizes': (lambda rng: rng.choice([6, 300]), 0.05, False),
    'no sentences': (lambda rng: rng.integers(2, 100), 0.0, False),
}


@pytest.mark.parametrize('kind', KINDS)
def test_neither_text_nor_its_length_tells_whether_it_is_next(kind: str) -> None:
    rng, (length, share, whole), count = np.random.default_rng(3), KINDS[kind], 8000
    sizes = [int(length(rng)) for _ in range(count)]
    texts = [np.where(rng.random(size) < share, ord('.'), ord('a')) + FIRST for size in sizes]
    for text in texts:
        text[-1] = (ord('.') if whole else text[-1] - FIRST) + FIRST
    made = [
        sentences.next_sentence(
            text, ENDS, rng, lambda own=own: texts[sentences.another(range(own, own + 1), count, rng)]
        )
        for own, text in enumerate(texts)
    ]
    first, second = (np.array([len(pair[side]) for pair in made]) for side in (0, 1))
    labels = np.array([label for *_, label in made])
    ended = np.array([ENDS[pair[1][-1]] for pair in made])
    for values in (first, second, first + second, first - second, ended):
        assert abs(area(values, labels) - 0.5) < 0.02


def test_the_same_stream_gives_the_same_pair() -> None:
    for seed in range(20):
        once, again = (follow('aa. bb. cc.', 'XX. YY.', np.random.default_rng(seed)) for _ in range(2))
        assert once == again


def test_another_text() -> None:
    rng = np.random.default_rng(0)
    found = collections.Counter(sentences.another(range(2, 3), 5, rng) for _ in range(4000))
    assert sorted(found) == [0, 1, 3, 4]
    assert {sentences.another(range(1, 4), 5, rng) for _ in range(50)} == {0, 4}
    assert all(abs(n / 4000 - 0.25) < 4 * np.sqrt(0.1875 / 4000) for n in found.values())
    with pytest.raises(UserError, match='two texts or more'):
        sentences.another(range(2), 2, rng)
