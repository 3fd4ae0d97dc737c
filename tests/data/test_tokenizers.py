"""Tokenizers: text survives them, bytes are counted exactly, and what is stored comes back."""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import toy_data
from tformer.config.run import Config, Data, Train
from tformer.data.tokenizers import bytes_and_characters, subwords, tokenizers, vocabulary
from tformer.errors import UserError

TEXTS = ['def f(x):\n    return x + 1\n', 'the quick brown fox', 'naïve café costs 12345', 'if x:\n\tpass\n'] * 20


@pytest.fixture(scope='module', params=['unigram', 'bpe'])
def subword(request: pytest.FixtureRequest) -> vocabulary.Tokenizer:
    return subwords.SentencePiece.train(TEXTS, sized(300, request.param))


def sized(size: int, model: str, **fields: bool) -> Data:
    return Data(tokenizer_vocab_size=size, tokenizer_model=model, **fields)


def check_lossless(tokenizer: vocabulary.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert min(ids, default=7) >= len(vocabulary.SPECIALS)
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


@given(st.text())
def test_bytes_are_lossless(text: str) -> None:
    check_lossless(bytes_and_characters.Byte(), text)


@given(text=st.text() | st.text('ab \n\t\r\u2581\u00a0\u0000'))
@example(text='   a\n\n\n\t b  \n ')
@example(text='👩‍👩‍👧 is one family\r\n')
@example(text='<s></s><pad><unk><mask><0x0A>\u2581')
@settings(deadline=None)
def test_sentencepiece_is_lossless(subword: vocabulary.Tokenizer, text: str) -> None:
    check_lossless(subword, text)


def test_sentencepiece_has_the_specials_and_is_deterministic(subword: vocabulary.Tokenizer) -> None:
    assert isinstance(subword, subwords.SentencePiece)
    assert tuple(subword._processor.id_to_piece(list(range(7)))) == vocabulary.SPECIALS
    for model in ('unigram', 'bpe'):
        once, again = (subwords.SentencePiece.train(iter(TEXTS), sized(300, model), seed=1) for _ in range(2))
        assert once.fingerprint == again.fingerprint
    assert subword.encode('a\nb').count(subword.encode('\n')[0]) == 1
    assert subword.byte_lengths.shape == (subword.vocab_size,)


def test_decode_skips_specials_and_unknown_ids(subword: vocabulary.Tokenizer) -> None:
    for tokenizer in (subword, bytes_and_characters.Byte(), bytes_and_characters.Char('abc def')):
        ids = np.array([vocabulary.CLS, *tokenizer.encode('abc'), vocabulary.PAD, tokenizer.vocab_size + 5])
        assert tokenizer.decode(ids) == 'abc'


def test_char_and_symbol() -> None:
    closed = Data(byte_fallback=False)
    char = bytes_and_characters.Char.train(['hello', 'world'], closed)
    assert char.vocab_size == 7 + len(set('helloworld')) and not char.lossless
    assert char.decode(char.encode('lord')) == 'lord'
    assert char.encode('z') == [vocabulary.UNK]
    symbol = bytes_and_characters.Symbol.train(['HH AH  L OW', 'W ER L D'], closed)
    assert symbol.vocab_size == 7 + 7
    assert symbol.decode(symbol.encode('L  OW')) == 'L OW'
    assert symbol.encode('L ZH EY') == [symbol.encode('L')[0], vocabulary.UNK, vocabulary.UNK]


@given(text=st.text() | st.text('hello wé'))
@example(text='<pad>hello<unk>')
def test_bytes_stand_in_for_unknown_characters(text: str) -> None:
    char = bytes_and_characters.Char.train(['hello world'])
    assert char.lossless and char.vocab_size == 7 + 256 + len(set('hello world'))
    check_lossless(char, text)
    assert char.encode('lo') == [char.vocab_size - 4, char.vocab_size - 3]  # ' dehlorw': known ones stay one token


@given(st.lists(st.sampled_from(['L', 'OW', 'ZH', '語', 'A\u00e9', '<unk>']) | st.text()))
@example(['L', 'ZH', 'EY', 'OW', 'ZH'])
def test_bytes_stand_in_for_unknown_symbols(symbols: list[str]) -> None:
    symbol = bytes_and_characters.Symbol.train(['HH AH L OW'])
    text = ' '.join(symbols)
    ids = symbol.encode(text)
    assert symbol.decode(ids).split() == text.split()
    assert vocabulary.UNK not in ids and not symbol.lossless
    assert symbol.decode(ids) == ' '.join(text.split())


@pytest.mark.parametrize('fallback', [True, False])
def test_what_training_had_none_of_is_told(fallback: bool) -> None:
    data = Data(byte_fallback=fallback, tokenizer_vocab_size=300)
    for cls, known, unknown in (
        (bytes_and_characters.Char, ['abc ', 'cab'], ['A', 'd', '\U0001f600']),
        (bytes_and_characters.Symbol, ['AA B', 'B AA'], ['A', 'BB', '\U0001f600']),
        (subwords.SentencePiece, ['abc ab', 'cab'], ['A', 'd', '\U0001f600']),
    ):
        tokenizer = cls.train(known * 20, data)
        assert tokenizer.unknown(known) == [] and tokenizer.unknown([*known, *unknown]) == sorted(unknown)
    lower = bytes_and_characters.Char.train(['ab'], Data(normalization='nfkc_lower', byte_fallback=fallback))
    assert lower.unknown(['AB']) == []
    assert bytes_and_characters.Byte().unknown(['a\U0001f600']) == []


def test_tags_and_answers_need_a_tokenizer_that_keeps_every_character() -> None:
    closed = subwords.SentencePiece.train(TEXTS, sized(60, 'unigram', byte_fallback=False))
    with pytest.raises(UserError, match=r'loses characters: set data\.byte_fallback=True$'):
        closed.encode_with_offsets(['the fox'])


def test_half_a_character_is_not_an_error() -> None:
    char, symbol = bytes_and_characters.Char.train(['ab']), bytes_and_characters.Symbol.train(['ab'])
    ids = [*char.encode('é')[:1], *char.encode('a'), *char.encode('é')]
    assert char.decode(ids) == '\ufffdaé'
    assert symbol.decode([*symbol.encode('é')[:1], *symbol.encode('ab')]) == '\ufffd ab'


def test_sentencepiece_without_bytes_says_unknown() -> None:
    for model in ('unigram', 'bpe'):
        closed = subwords.SentencePiece.train(TEXTS, sized(60, model, byte_fallback=False))
        assert not closed.lossless
        assert closed.encode('語') == closed.encode('\u2581') == [vocabulary.UNK]
        assert closed.decode(closed.encode('the fox')) == 'the fox'


BATCH = ['the quick fox', '', 'a\u2581b \u2581', 'naïve 語\n', ' x', '\u2581'] * 3


@pytest.mark.parametrize('fallback', [True, False])
@pytest.mark.parametrize('name', ['char', 'byte', 'symbol', 'sentencepiece'])
def test_a_batch_is_each_of_its_texts(name: str, fallback: bool) -> None:
    data = Data(tokenizer_vocab_size=300 if fallback else 60, byte_fallback=fallback)
    tokenizer = tokenizers.TOKENIZERS[name].train(TEXTS, data)
    for texts in (BATCH, BATCH[:1], tuple(BATCH), []):
        encoded = tokenizer.encode_batch(texts)
        assert encoded == [tokenizer.encode(text) for text in texts]
        assert all(type(index) is int for ids in encoded for index in ids)


# ------------------------------------------------------------------------------------------- normalisation
NORMALIZED = {  # of a decomposed e with an acute, a full-width A, a ligature, capitals, a German sharp s
    None: 'e\u0301 \uff21 \ufb01 \u0130 Straße',
    'nfc': 'é \uff21 \ufb01 \u0130 Straße',
    'nfkc': 'é A fi \u0130 Straße',
    'nfkc_lower': 'é a fi i\u0307 straße',
}


@pytest.mark.parametrize('form', NORMALIZED)
@pytest.mark.parametrize('name', ['char', 'byte', 'symbol', 'sentencepiece'])
def test_normalization(tmp_path, name: str, form: str | None) -> None:
    text = NORMALIZED[None]
    data = Data(tokenizer=name, normalization=form, tokenizer_vocab_size=310)
    made = tokenizers.train_tokenizers(Config(data=data), [{'text': text}] * 10)
    plain = made.target.normalized(None)
    assert made.target.decode(made.target.encode(text)) == NORMALIZED[form]
    assert made.target.encode(text) == plain.encode(NORMALIZED[form]) == made.target.encode_batch([text, text])[1]
    assert made.target.lossless == (form is None and name != 'symbol')
    assert (made.target.fingerprint == plain.fingerprint) == (form is None)
    made.save(tmp_path)
    loaded = tokenizers.Tokenizers.load(tmp_path)
    assert loaded.fingerprint == made.fingerprint and loaded.target.normalization == form
    assert loaded.target.encode(text) == made.target.encode(text)


@given(st.text())
def test_normalized_text_stays_as_it_is(text: str) -> None:
    for form, normalize in vocabulary.NORMALIZATIONS.items():
        assert normalize(normalize(text)) == normalize(text), form


def test_signs_that_stand_for_capitals_become_small_letters() -> None:
    """U+2121 is TEL, U+1D400 a mathematical A. Lowering decomposes a capital I with a dot, before a line below it."""
    lower = vocabulary.NORMALIZATIONS['nfkc_lower']
    assert lower('\u2121 \U0001d400 \u0130') == 'tel a i\u0307'
    assert lower('\u0130\u0331') == 'i\u0331\u0307'


def test_the_vocabulary_is_of_normalised_text() -> None:
    char = bytes_and_characters.Char.train(['\uff21\uff22'], Data(normalization='nfkc_lower', byte_fallback=False))
    assert char.vocab_size == 9 and char.decode(char.encode('bA')) == 'ba'


def test_an_unknown_normalization_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"data\.normalization='nfkd' is unknown; did you mean 'nfkc'"):
        bytes_and_characters.Byte.train([], Data(normalization='nfkd'))


# ------------------------------------------------------------------------------------------- words


def words(tokenizer: vocabulary.Tokenizer, text: str) -> list[str]:
    ids = np.array(tokenizer.encode(text), np.int32)
    starts = tokenizer.word_starts(ids)
    assert starts.shape == ids.shape and starts.dtype == bool and starts[:1].all()
    return [tokenizer.decode(part) for part in np.split(ids, np.flatnonzero(starts)[1:])]


def test_words_by_hand(subword: vocabulary.Tokenizer) -> None:
    text = 'to be,  or\n\tnot 語'
    for tokenizer in (bytes_and_characters.Byte(), bytes_and_characters.Char.train([text[:9]])):
        assert words(tokenizer, text) == ['to ', 'be,  ', 'or\n\t', 'not ', '語']
        assert words(tokenizer, ' to') == [' ', 'to']
    assert [word.strip() for word in words(subword, 'the fox\nx:  quick')] == ['the', 'fox', 'x:', 'quick']
    closed = bytes_and_characters.Symbol.train(['HH AH L OW'], Data(byte_fallback=False))
    assert words(closed, 'HH L L OW') == ['HH', 'L', 'L', 'OW']
    symbol = bytes_and_characters.Symbol.train(['HH AH L OW'])  # unknown symbols are their bytes
    assert [word.strip() for word in words(symbol, 'HH ZH EY1 L OW')] == ['HH', 'ZH', 'EY1', 'L', 'OW']


@given(st.text('ab\u00e9 \n\t', max_size=40).map(str.lstrip))
@example('the quick   brown\n\n  fox costs 12345')
@settings(deadline=None)
def test_words_are_what_whitespace_parts(subword: vocabulary.Tokenizer, text: str) -> None:
    for tokenizer in (subword, bytes_and_characters.Byte(), bytes_and_characters.Char.train(['ab \n\t'])):
        found = words(tokenizer, text)
        assert ''.join(found) == text and [word.strip() for word in found if word] == text.split()


def test_special_tokens_are_words(subword: vocabulary.Tokenizer) -> None:
    for tokenizer in (subword, bytes_and_characters.Byte()):
        body = tokenizer.encode('fox')
        ids = np.array([vocabulary.CLS, *tokenizer.encode(' fox'), vocabulary.MASK, *body, *body, vocabulary.SEP])
        starts = tokenizer.word_starts(ids)
        special = np.flatnonzero(~tokenizer.ordinary[ids])
        assert starts[special].all() and starts[special[:-1] + 1].all()
        assert starts[special[1] :].sum() == 3  # the mask, one word of two bodies, the end


def test_a_vocabulary_without_whitespace_has_no_words() -> None:
    char = bytes_and_characters.Char.train(['hello'], Data(byte_fallback=False))
    with pytest.raises(UserError, match='needs a tokenizer that shows where words begin'):
        char.word_starts(np.array(char.encode('hell')))


# ------------------------------------------------------------------------------------------- stored


def test_too_small_a_vocabulary_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r'data.tokenizer_vocab_size=100') as error:
        subwords.SentencePiece.train(TEXTS, sized(100, 'bpe'))
    assert '\n' not in str(error.value)
    with pytest.raises(UserError, match="did you mean 'unigram'"):
        subwords.SentencePiece.train(TEXTS, sized(300, 'unigramm'))


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
    config = Config(model=toy_data.reader_of(objective), data=data, train=Train(objective=objective))
    made = tokenizers.train_tokenizers(config, RECORDS[objective])
    made.save(tmp_path)
    loaded = tokenizers.Tokenizers.load(tmp_path)
    assert loaded.fingerprint == made.fingerprint
    assert loaded.labels == made.labels == (('eggs', 'ham') if objective == 'classification' else ())
    assert (loaded.source is None) == (objective != 'seq2seq')
    assert loaded.shared == made.shared == (objective == 'seq2seq' and source_tokenizer is None)
    text = RECORDS[objective][0]['target' if objective == 'seq2seq' else 'text']
    assert loaded.target.encode(text) == made.target.encode(text)
    assert not list(tmp_path.glob('*.tmp'))
    assert dataclasses.replace(made, labels=('other',)).fingerprint != made.fingerprint


def test_runs_of_before_normalisation_and_byte_fallback_load(tmp_path) -> None:
    (tmp_path / 'tokenizer.json').write_text('{"source": "char", "target": "symbol", "labels": []}')
    (tmp_path / 'tokenizer.source.char').write_text('[\n"a",\n"b"\n]')
    (tmp_path / 'tokenizer.target.symbol').write_text('[\n"AH",\n"B"\n]')
    loaded = tokenizers.Tokenizers.load(tmp_path)
    assert loaded.source is not None
    assert loaded.source.encode('abz') == [7, 8, vocabulary.UNK] and loaded.source.vocab_size == 9
    assert loaded.target.encode('B AH ZH') == [8, 7, vocabulary.UNK]
    assert loaded.target.dump() == (tmp_path / 'tokenizer.target.symbol').read_bytes()
    assert loaded.target.fingerprint == hashlib.sha256(loaded.target.dump()).hexdigest()[:16]


def test_a_directory_without_tokenizers(tmp_path) -> None:
    with pytest.raises(UserError, match=r'tokenizer.json does not exist'):
        tokenizers.Tokenizers.load(tmp_path)
