"""Tokenizers: text survives them, bytes are counted exactly, and what is stored comes back."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tformer.config.run import Config, Data, Train
from tformer.data import subwords, tokenizers
from tformer.errors import UserError

TEXTS = ['def f(x):\n    return x + 1\n', 'the quick brown fox', 'naïve café costs 12345', 'if x:\n\tpass\n'] * 20


@pytest.fixture(scope='module', params=['unigram', 'bpe'])
def subword(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return subwords.SentencePiece.train(TEXTS, 300, request.param, seed=0)


def check_lossless(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert min(ids, default=7) >= len(tokenizers.SPECIALS)
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


@given(st.text())
def test_bytes_are_lossless(text: str) -> None:
    check_lossless(tokenizers.Byte(), text)


@given(text=st.text() | st.text('ab \n\t\r\u2581\u00a0\u0000'))
@example(text='   a\n\n\n\t b  \n ')
@example(text='👩‍👩‍👧 is one family\r\n')
@example(text='<s></s><pad><unk><mask><0x0A>\u2581')
@settings(deadline=None)
def test_sentencepiece_is_lossless(subword: tokenizers.Tokenizer, text: str) -> None:
    check_lossless(subword, text)


def test_sentencepiece_has_the_specials_and_is_deterministic(subword: tokenizers.Tokenizer) -> None:
    assert isinstance(subword, subwords.SentencePiece)
    assert tuple(subword._processor.id_to_piece(list(range(7)))) == tokenizers.SPECIALS
    for model in ('unigram', 'bpe'):
        once, again = (subwords.SentencePiece.train(iter(TEXTS), 300, model, seed=1) for _ in range(2))
        assert once.fingerprint == again.fingerprint
    assert subword.encode('a\nb').count(subword.encode('\n')[0]) == 1
    assert subword.byte_lengths.shape == (subword.vocab_size,)


def test_decode_skips_specials_and_unknown_ids(subword: tokenizers.Tokenizer) -> None:
    for tokenizer in (subword, tokenizers.Byte(), tokenizers.Char('abc def')):
        ids = np.array([tokenizers.CLS, *tokenizer.encode('abc'), tokenizers.PAD, tokenizer.vocab_size + 5])
        assert tokenizer.decode(ids) == 'abc'


def test_char_and_symbol() -> None:
    char = tokenizers.Char.train(['hello', 'world'])
    assert char.vocab_size == 7 + len(set('helloworld'))
    assert char.decode(char.encode('lord')) == 'lord'
    assert char.encode('z') == [tokenizers.UNK]
    symbol = tokenizers.Symbol.train(['HH AH  L OW', 'W ER L D'])
    assert symbol.vocab_size == 7 + 7
    assert symbol.decode(symbol.encode('L  OW')) == 'L OW'
    assert symbol.encode('L ZH')[1] == tokenizers.UNK


def test_too_small_a_vocabulary_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r'data.tokenizer_vocab_size=100') as error:
        subwords.SentencePiece.train(TEXTS, 100, 'bpe', seed=0)
    assert '\n' not in str(error.value)
    with pytest.raises(UserError, match="did you mean 'unigram'"):
        subwords.SentencePiece.train(TEXTS, 300, 'unigramm', seed=0)


def test_sample_of_lines_is_even_and_bounded() -> None:
    lines = [f'{i:05d}' for i in range(20_000)]
    sample = subwords.sample_lines(['\n'.join(lines)], seed=3, most_characters=10_000)
    assert 5_000 <= sum(map(len, sample)) <= 10_000
    assert abs(np.mean([int(line) for line in sample]) - 10_000) < 1_000
    assert sample == subwords.sample_lines(['\n'.join(lines)], seed=3, most_characters=10_000)
    assert max(map(len, subwords.sample_lines(['x' * 10_000], seed=0))) <= 4_000


RECORDS = {
    'causal_lm': [{'text': 'to be or not to be'}],
    'classification': [{'label': 'ham', 'text': 'hello'}, {'label': 'eggs', 'text': 'bye'}],
    'seq2seq': [{'source': 'abc', 'target': 'AH B S'}],
}


@pytest.mark.parametrize('objective', RECORDS)
@pytest.mark.parametrize('source_tokenizer', [None, 'char'])
@pytest.mark.parametrize('tokenizer', ['char', 'byte', 'symbol', 'sentencepiece'])
def test_save_and_load(tmp_path, objective: str, tokenizer: str, source_tokenizer: str | None) -> None:
    data = Data(tokenizer=tokenizer, source_tokenizer=source_tokenizer, tokenizer_vocab_size=290)
    config = Config(data=data, train=Train(objective=objective))
    made = tokenizers.train_tokenizers(config, RECORDS[objective])
    made.save(tmp_path)
    loaded = tokenizers.Tokenizers.load(tmp_path)
    assert loaded.fingerprint == made.fingerprint
    assert loaded.labels == made.labels == (('eggs', 'ham') if objective == 'classification' else ())
    assert (loaded.source is None) == (objective != 'seq2seq')
    assert loaded.shared == made.shared == (objective == 'seq2seq' and source_tokenizer is None)
    text = RECORDS[objective][0]['target' if objective == 'seq2seq' else 'text']
    assert loaded.target.encode(text) == made.target.encode(text)
    assert not list(tmp_path.glob('*.partial'))
    assert dataclasses.replace(made, labels=('other',)).fingerprint != made.fingerprint


def test_a_directory_without_tokenizers(tmp_path) -> None:
    with pytest.raises(UserError, match=r'tokenizer.json does not exist'):
        tokenizers.Tokenizers.load(tmp_path)
