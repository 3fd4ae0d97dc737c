"""Fill-in-the-middle (Bavarian et al. 2022): the orders of the paper, nothing lost, and prompts with a gap."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer import checks
from tformer.config import Config, Data, Decode, Model, Train
from tformer.data.examples import corrupt, example_arrays, example_formats, infilling
from tformer.data.tokenizers.bytes_and_characters import Byte, Symbol
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import BOS, EOS
from tformer.decode import text
from tformer.errors import UserError

BYTE = Byte().extended(3)
PRE, SUF, MID = MARKS = infilling.marks(BYTE)


def noise(tokenizer, *key: int, **data) -> corrupt.Noise:
    return corrupt.Noise(Data(**data), tokenizer, key)


def made(texts: list[str], length: int = 64, start: tuple[str, ...] = ('bos',), tokenizer=BYTE, **data):
    config = Config(
        Model(family='decoder'), Data(length=length, start=start, **data), train=Train(objective='fill_in_middle')
    )
    records = [{'text': one} for one in texts]
    return example_formats.make(config, Tokenizers(None, tokenizer), records, 'train', True)


def test_the_orders_of_the_paper() -> None:
    """Section 3: PRE prefix SUF suffix MID middle EOT; appendix D: PRE SUF suffix MID prefix middle EOT."""
    words = Symbol('a b c d e f'.split()).extended(3)
    own, (a, b, c, d, e, f) = infilling.marks(words), words.encode('a b c d e f')
    parts = [a, b], [c, d, e], [f]
    assert own == (words.vocab_size - 3, words.vocab_size - 2, words.vocab_size - 1)
    assert infilling.prefix_first(own, *parts).tolist() == [own.prefix, a, b, own.suffix, f, own.middle, c, d, e]
    assert infilling.suffix_first(own, *parts).tolist() == [own.prefix, own.suffix, f, own.middle, a, b, c, d, e]
    examples = made(['a b c d e f'], tokenizer=words)

    def fields(spm: float):
        found = noise(words, 0, fim_rate=1.0, spm_rate=spm)
        vars(found)['rng'] = types.SimpleNamespace(
            random=lambda count: np.full(count, 0.5), integers=lambda low, high, count: np.array([5, 2])
        )
        return example_arrays.fill_middle(examples, 0, found)

    for spm, arrange in ((0.0, infilling.prefix_first), (1.0, infilling.suffix_first)):
        whole, found = arrange(own, *parts).tolist(), fields(spm)
        assert found['inputs'].tolist() == [BOS, *whole] and found['targets'].tolist() == [*whole, EOS]
        assert found['weights'].all() and 'prefix' not in found


def restored(tokens: list[int], own: infilling.Marks) -> tuple[list[int], bool]:
    """The text in its order, and whether its suffix came first."""
    suffix, middle = tokens.index(own.suffix), tokens.index(own.middle)
    assert tokens[0] == own.prefix and suffix < middle and {*tokens[1:]} & {own.prefix} == set()
    if suffix == 1:
        return tokens[middle + 1 :] + tokens[2:middle], True  # right where the prefix and the middle are one
    return tokens[1:suffix] + tokens[middle + 1 :] + tokens[suffix + 1 : middle], False


@given(st.lists(st.integers(10, 200), max_size=40), st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
@settings(deadline=None)
def test_the_text_comes_back(text_: list[int], seed: int, spm: float) -> None:
    found = infilling.rearranged(np.array(text_, np.int32), noise(BYTE, seed, fim_rate=1.0, spm_rate=spm))
    assert found is not None and found.dtype == np.int32 and len(found) == len(text_) + 3
    back, first = restored(found.tolist(), MARKS)
    assert back == text_ and (first or not spm)


@pytest.mark.parametrize(('fim', 'spm'), [(0.0, 0.5), (0.9, 0.3), (1.0, 1.0)])
def test_rates_are_shares_of_texts_and_cuts_are_uniform(fim: float, spm: float) -> None:
    n, count = 9, 3000
    own = np.arange(100, 100 + n, dtype=np.int32)
    found = [infilling.rearranged(own, noise(BYTE, 1, i, fim_rate=fim, spm_rate=spm)) for i in range(count)]
    changed = [each.tolist() for each in found if each is not None]
    assert abs(len(changed) / count - fim) < 4 * np.sqrt(0.25 / count)
    if changed:
        # PSM with an empty prefix looks like SPM: the smaller of two of n + 1 places is 0 with (2 n + 1) / (n + 1)^2
        looks = spm + (1 - spm) * (2 * n + 1) / (n + 1) ** 2
        assert abs(np.mean([restored(each, MARKS)[1] for each in changed]) - looks) < 4 * np.sqrt(0.25 / len(changed))
        suffixes = [each.index(MID) - each.index(SUF) - 1 for each in changed]
        expected = (n - n * (4 * n + 5) / (6 * (n + 1))) * 1.0  # the mean of n less the larger of two places
        assert abs(np.mean(suffixes) - expected) < 4 * n / np.sqrt(len(changed))


@given(
    st.lists(st.text('abc', max_size=60), min_size=1, max_size=4).filter(any),
    st.integers(5, 30), st.integers(0, 1), st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_examples_hold_the_whole_text_within_the_length(texts, length: int, front: int, rate: float) -> None:
    start = ('bos',)[:front]
    examples = made(texts, length, start)
    found: list[list[int]] = [[] for _ in texts]
    for index in range(len(examples)):
        fields = example_arrays.fill_middle(examples, index, noise(BYTE, index, fim_rate=rate))
        whole = [*fields['inputs'].tolist(), int(fields['targets'][-1])]
        assert whole[:front] == [BOS] * front and whole[1:] == fields['targets'].tolist()
        assert 0 < len(fields['inputs']) <= examples.lengths[index][0] <= length and fields['weights'].all()
        body, record = whole[front:], examples.spans[index][0]
        if PRE in body:
            assert body[-1] == EOS
            found[record] += restored(body[:-1], MARKS)[0]
        else:
            ended = body[-1] == EOS
            found[record] += body[:-1] if ended else body
            assert ended == (examples.spans[index][2] == len(texts[record])) or len(body) == 2
    assert found == [BYTE.encode(one) for one in texts]


def test_special_tokens_of_hub_tokenizers_come_first() -> None:
    for names in infilling.NAMES:
        known = {'<pad>': 0, **{name: 50 + i for i, name in enumerate(names)}}
        tokenizer = types.SimpleNamespace(special_names=known, sentinels=np.array([1, 2, 3]))
        assert infilling.marks(tokenizer) == (50, 51, 52)  # type: ignore[arg-type]
        del known[names[1]]
        assert infilling.marks(tokenizer) == (1, 2, 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r'needs three special tokens.* has 2 sentinels: data.sentinels=3'):
        infilling.marks(Byte().extended(2))


@given(st.integers(3, 20), st.integers(0, 12), st.integers(0, 12))
def test_a_long_prompt_keeps_what_is_nearest_to_the_gap(most: int, before: int, after: int) -> None:
    prefix, suffix = list(range(100, 100 + before)), list(range(200, 200 + after))
    found = infilling.prompt(BYTE, prefix, suffix, most)
    at = found.index(SUF)
    assert (found[0], found[-1]) == (PRE, MID) and len(found) == min(before + after + 3, most)
    assert prefix[before - (at - 1) :] == found[1:at] and suffix[: len(found) - at - 2] == found[at + 1 : -1]


def test_prompts_with_a_gap_are_read_as_they_were_trained() -> None:
    config = Config(
        Model(family='decoder', max_len=32), Data(tokenizer='byte', sentinels=3),
        train=Train(objective='fill_in_middle'), decode=Decode(max_len=8, gap='[]'),
    )  # fmt: skip
    read = text._reader(config, Tokenizers(None, BYTE), cut=False)
    a, b, c = BYTE.encode('abc')
    assert read(['ab[]c', 'ab', '[]', 'c[]']) == [
        [BOS, PRE, a, b, SUF, c, MID],
        [BOS, a, b],
        [BOS, PRE, SUF, MID],
        [BOS, PRE, c, SUF, MID],
    ]
    with pytest.raises(UserError, match=r"'a\[\]b\[\]'... has 2 times \[\] \(decode.gap\), not once"):
        read(['a[]b[]'])
    with pytest.raises(UserError, match='has 33 tokens, the model takes 24'):
        read(['a' * 20 + '[]' + 'b' * 10])
    (short,) = text._reader(config, Tokenizers(None, BYTE), cut=True)(['a' * 20 + '[]' + 'b' * 10])
    assert len(short) == 25 and short.count(b) == 10 and short[0] == BOS and short[-1] == MID
    with pytest.raises(UserError, match=r'decode\.gap is empty'):
        checks.check_here(Config(decode=Decode(gap=''), train=Train(num_steps=1)))
