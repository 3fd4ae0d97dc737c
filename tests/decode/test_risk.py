"""Minimum Bayes risk: the expected utility of draws, and which of them is put out."""

import itertools

import numpy as np
import pytest

from tformer.config import Config, Decode, Model, Train
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode import risk, text

BYTE = Byte()
DRAWS = ['the cat sat', 'a cat sat', 'the cat sat', 'the dog ran off', 'the cat sits']


@pytest.mark.parametrize('name', risk.UTILITIES)
def test_the_expected_utility_is_the_mean_over_all_draws(name: str) -> None:
    utility = risk.UTILITIES[name]()
    found = risk.expected_utilities(DRAWS, utility)
    np.testing.assert_allclose(found, [np.mean([utility(a, b) for b in DRAWS]) for a in DRAWS], rtol=1e-12)
    assert found[0] == found[2] == max(found) and min(found) == found[3]
    assert all(utility(a, a) == pytest.approx(utility('x y', 'x y')) for a in DRAWS)


def test_utilities_are_those_of_their_papers() -> None:
    """Exact match makes the most frequent text the best. Of one word, chrF of order n averages n-grams that exist."""
    assert risk.expected_utilities(['b', 'a', 'a', 'c'], risk.exact_match()) == [0.25, 0.5, 0.5, 0.25]
    # Characters a, b against a, c: of 1-grams precision and recall are 1/2; of 2-grams 0; longer ones do not exist.
    assert risk.chrf()('ab', 'ac') == pytest.approx(25.0)
    # 2 of 3 words and 1 of 2 pairs; no triple of 1, which smoothing makes 1/2 of one: (2/3 1/2 1/2)^(1/3).
    assert risk.bleu()('a b d', 'a b c') == pytest.approx(100 * (1 / 6) ** (1 / 3))


@pytest.mark.parametrize('name', risk.UTILITIES)
def test_most_draws_of_an_empty_text_make_it_the_best(name: str) -> None:
    found = risk.expected_utilities([''] * 15 + ['abc'], risk.UTILITIES[name]())
    assert risk.ranked([''] * 15 + ['abc'], found) == [0, 15] and found[0] == 15 * found[15] > 0


def test_the_first_of_equal_texts_is_put_out_and_each_text_once() -> None:
    assert risk.ranked(DRAWS, [2.0, 3.0, 2.0, 1.0, 2.0]) == [1, 0, 4, 3]


def test_the_best_draws_of_each_text_are_put_out_by_their_utility(monkeypatch) -> None:
    """Four draws of each of two texts, two outputs: the tokens a, b end at EOS."""
    a, b, end = *BYTE.encode('ab'), BYTE.specials.eos
    rows = [[a, end], [b, end], [b, end], [a, b], [b, b], [b, end], [a, a], [b, b]]
    drawn = np.array(rows), -np.arange(8.0)
    monkeypatch.setattr(text, 'make_generate', lambda *_, **__: lambda *_: drawn)
    model = Model(family='decoder', vocab_size=BYTE.vocab_size, max_len=11)
    for number, utility in itertools.product((1, 2), ('exact_match', 'chrf')):
        decode = Decode('mbr', max_len=2, num_outputs=number, candidates=4, utility=utility)
        run = Config(model, train=Train(num_steps=1), decode=decode)
        found = dict(text.make_writer(None, run, Tokenizers(None, BYTE), cut=False).write({}, ['x', 'yy']))
        for i, texts in enumerate((['a', 'b', 'b', 'ab'], ['bb', 'b', 'aa', 'bb'])):
            worth = risk.expected_utilities(texts, risk.UTILITIES[utility]())
            order = sorted(set(texts), key=lambda text: (-worth[texts.index(text)], texts.index(text)))[:number]
            assert [(output.text, output.score) for output in found[i]] == [
                (text, worth[texts.index(text)]) for text in order
            ]
        assert found[1][0] == text.Output('bb', found[1][0].score, 2)
