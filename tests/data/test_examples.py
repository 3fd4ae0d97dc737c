"""Records as examples: places of tokens, columns of labels, templates and windows, of every objective and family."""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hub_files
import toy_data
from tformer import checks
from tformer.config import Config, Data, Model, Train
from tformer.config.tasks import TASKS
from tformer.data.batches import mixture, pipeline
from tformer.data.examples import corrupt, example_arrays, example_formats, special_tokens, tokenized
from tformer.data.tokenizers.bytes_and_characters import Byte, Char, Symbol
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.tokenizers import Tokenizers, train_tokenizers
from tformer.data.tokenizers.vocabulary import BOS, CLS, EOS, NORMALIZATIONS, SEP, Specials, Tokenizer
from tformer.errors import UserError
from tformer.training import dummy_batch

TEXTS = ['the quick brown fox jumps over the lazy dog', 'naïve café in Köln costs 12345', 'one two three.'] * 20
ANY_TEXT = st.text() | st.text('ab é語\u0301\u2581ﬁΣ \n\t\u00a0', max_size=12)
WORDS = st.text('abé語ﬁ\u00b4\u2581', min_size=1, max_size=4)

MAKE = {
    'byte': Byte,
    'char': lambda: Char.train(TEXTS),
    'char_closed': lambda: Char.train(TEXTS, Data(byte_fallback=False)),
    'symbol': lambda: Symbol.train(TEXTS),
    'symbol_closed': lambda: Symbol.train(TEXTS, Data(byte_fallback=False)),
    'unigram': lambda: SentencePiece.train(TEXTS, Data(tokenizer_vocab_size=320)),
    'bpe': lambda: SentencePiece.train(TEXTS, Data(tokenizer_vocab_size=320, tokenizer_model='bpe')),
    **{
        name: lambda name=name: HubTokenizer.load(hub_files.FILES[name]().to_str().encode()) for name in hub_files.FILES
    },
}
LETTERS = ('byte', 'char', 'char_closed', 'unigram', 'bpe', 'gpt2', 'roberta')  # tokens of every character


@pytest.fixture(scope='module', params=MAKE)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope='module')
def tokenizer(kind: str) -> Tokenizer:
    return MAKE[kind]()


# ------------------------------------------------------------------------------------------------- places of tokens


@pytest.mark.slow
@given(text=ANY_TEXT, normalization=st.sampled_from(list(NORMALIZATIONS)))
@example(text='語 é 語', normalization=None)  # symbols of which none is known
@example(text='the 語\u2003é\u1680quick 語', normalization=None)
@example(text='a\u2581b \u2581', normalization=None)
@example(text='E\u0301 ﬁ', normalization='nfkc_lower')
@settings(deadline=None, max_examples=40)
def test_tokens_stand_where_they_say(kind: str, tokenizer: Tokenizer, text: str, normalization: str | None) -> None:
    made = tokenizer.normalized(normalization)
    (ids, begins, ends), (again, *_) = made.encode_with_offsets([text, text])
    text = made.normalize(text)
    assert ids == again == made.encode(text) and len(ids) == len(begins) == len(ends)
    places = list(zip(begins, ends, strict=True))
    assert all(0 <= begin <= end <= len(text) for begin, end in places)
    assert begins == sorted(begins) and ends == sorted(ends)
    if kind in LETTERS:
        rebuilt = ''
        for begin, end in places:
            assert begin <= len(rebuilt) and begin < end
            rebuilt += text[max(begin, len(rebuilt)) : end]
        assert rebuilt == text
        apart = [i for i in range(1, len(ids)) if begins[i] == ends[i - 1]]
        for first, stop in itertools.pairwise([0, *apart, len(ids)]):  # the bytes of a character together
            if first < stop and kind != 'char_closed':
                assert made.decode(ids[first:stop]) == text[begins[first] : ends[stop - 1]]
    if 'symbol' in kind:
        found = dict.fromkeys(place for place in places if text[slice(*place)].strip())
        assert [text[slice(*place)] for place in found] == text.split()


def test_places_of_pieces_of_hub_files() -> None:
    (ids, begins, ends), *_ = MAKE['gpt2']().encode_with_offsets(['quick é語'])
    assert begins[-5:] == [6, 6, 7, 7, 7] or begins[-4:] == [6, 7, 7, 7]  # é may be one token
    assert ends[-3:] == [8, 8, 8] and len(ids) == len(ends)
    bert = MAKE['bert']()
    ((ids, begins, ends),) = bert.encode_with_offsets(['The  QUICK 語 fox'])
    pieces = [bert.piece(index).removeprefix('##') for index in ids]
    shown = ['The  QUICK 語 fox'[begin:end] for begin, end in zip(begins, ends, strict=True)]
    assert [s.lower() for s, p in zip(shown, pieces, strict=True) if p != '[UNK]'] == [
        p for p in pieces if p != '[UNK]'
    ]
    assert ''.join(shown) == 'TheQUICK語fox' and pieces.count('[UNK]') == 1


@pytest.mark.parametrize(('starts', 'stops', 'words'), [
    ([0, 1, 2, 4, 5, 6], [1, 2, 4, 5, 6, 7], [0, -1, 1, -1, 2, -1]),  # a|b| c| |d|e
    ([0, 4], [2, 7], [0, 2]),  # ab| de: the second word has no token
    ([0, 0, 2, 4], [0, 2, 4, 7], [0, -1, 1, 2]),  # |ab| c| de: a mark of no width in front
    ([0, 1], [1, 7], [0, 2]),  # a|b c de: a token of several words is the last one's
    ([], [], []),
])  # fmt: skip
def test_first_tokens_of_words_by_hand(starts: list[int], stops: list[int], words: list[int]) -> None:
    found = tokenized._first_of_words(['ab', 'c', 'de'], np.array(starts, int), np.array(stops, int))
    assert found.tolist() == words


@given(words=st.lists(WORDS, min_size=1, max_size=5), normalization=st.sampled_from(list(NORMALIZATIONS)))
@example(words=['ﬁ', 'a'], normalization='nfkc')
@example(words=['\u00b4a', 'b'], normalization='nfkc')  # a space and an accent
@settings(deadline=None, max_examples=40)
def test_words_have_their_first_tokens(
    kind: str, tokenizer: Tokenizer, words: list[str], normalization: str | None
) -> None:
    made = tokenizer.normalized(normalization)
    record = {'tokens': words, 'tags': ['O'] * len(words)}
    columns, bad = tokenized.tagged([record], Tokenizers(None, made, ('O',)))
    assert not bad and columns['tags'] == [[0] * len(words)]
    ((_, begins, ends),) = made.encode_with_offsets([' '.join(words)])
    texts = list(map(made.normalize, words))
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    inside = [
        [i for i in range(len(begins)) if start < ends[i] <= start + len(text) and begins[i] < start + len(text)]
        for start, text in zip(starts.tolist(), texts, strict=False)
    ]
    expected = [-1] * len(begins)
    for word, there in enumerate(inside):
        assert there or kind not in LETTERS
        if there:
            expected[there[0]] = word
    if kind not in ('t5', 'llama'):  # whose first mark has no width
        assert columns['words'] == [expected]
    found = [word for word in columns['words'][0] if word >= 0]
    assert found == sorted(set(found)) and (found == list(range(len(words))) or kind not in LETTERS)


def answer_of(made: Tokenizer, context: str, *answer: tuple[int, str]) -> list[int]:
    columns, bad = tokenized.answers(
        [{'context': context, 'question': 'q', 'answers': list(answer)}], Tokenizers(None, made)
    )
    assert not bad
    return list(columns['answer'][0])


def test_answers_by_hand() -> None:
    context = 'é was Köln.'  # é and ö are two bytes each
    assert answer_of(Byte(), context, (6, 'Köln'), (0, 'é')) == [7, 11]
    assert answer_of(Byte(), context, (7, 'öl')) == [8, 10]
    assert answer_of(Byte(), context, (0, 'é')) == [0, 1]
    assert answer_of(Byte(), context) == []
    symbols = Symbol.train(['in Paris. now'])
    assert answer_of(symbols, 'in Paris. now', (4, 'aris')) == [1, 1]  # from the middle of a token
    assert answer_of(symbols, 'in Paris. now', (8, '. n')) == [1, 2]
    assert answer_of(symbols, 'in  now', (2, ' ')) == []  # that no token has
    assert answer_of(Char.train(TEXTS).normalized('nfkc'), 'ﬁve ﬁsh', (4, 'ﬁsh')) == [5, 8]  # 'five fish'
    assert answer_of(Byte().normalized('nfc'), 'e\u0301 e\u0301x', (3, 'e\u0301')) == [3, 4]


@given(context=ANY_TEXT.filter(str.strip), normalization=st.sampled_from(list(NORMALIZATIONS)), data=st.data())
@settings(deadline=None, max_examples=40)
def test_an_answer_is_in_its_tokens(
    kind: str, tokenizer: Tokenizer, context: str, normalization: str | None, data: st.DataObject
) -> None:
    made = tokenizer.normalized(normalization)
    start = data.draw(st.integers(0, len(context) - 1))
    answer = context[start : data.draw(st.integers(start + 1, len(context)))]
    places = answer_of(made, context, (start, answer))
    ((_, begins, ends),) = made.encode_with_offsets([context])
    before, after = context[:start], context[start + len(answer) :]
    text, *parts = map(made.normalize, (context, before, answer, after))
    if kind in LETTERS and text == ''.join(parts):  # else what stands beside it changes it
        first, stop = len(parts[0]), len(parts[0]) + len(parts[1])
        begin, end = places
        assert begins[begin] <= first < ends[begin] and begins[end] < stop <= ends[end]
        assert begin == 0 or ends[begin - 1] <= first
        assert end == len(begins) - 1 or begins[end + 1] >= stop


# ----------------------------------------------------------------------------------- labels that training has not


UNKNOWN = {
    'classification': ('tsv', ['x\ta b', 'y\tb c'], ['x\ta', 'z\tb', 'y\tc c'], r"valid.tsv:2: label 'z' has no train"),
    'token_classification': (
        'conll',
        ['a B-PER', 'b O'],
        ['a B-PER', '', 'a O', 'b B-PRE', '', 'a O', 'b B-PER'],
        r"valid.conll:3: tag 'B-PRE' has no training example; did you mean 'B-PER'",
    ),
}


@pytest.mark.parametrize('objective', UNKNOWN)
def test_an_unknown_label_is_a_bad_record(objective: str, tmp_path: pathlib.Path) -> None:
    ending, train, valid, said = UNKNOWN[objective]
    toy_data.write(tmp_path / f'train.{ending}', train)
    toy_data.write(tmp_path / f'valid.{ending}', valid)
    config = Config(
        model=Model(family='encoder'),
        data=Data(
            path=(str(tmp_path),), tokenizer='byte', length=16, batching='pad', cache_dir=str(tmp_path / 'cache')
        ),
        train=Train(objective=objective, batch_size=2),
    )
    tokens = train_tokenizers(config, mixture.load(config, 'train'))
    with pytest.raises(UserError, match=said) as error:
        pipeline.Batches(config, tokens, 'valid', training=False)
    assert '\n' not in str(error.value)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, bad_lines='skip'))
    for _ in range(2):  # the second time from the cache
        batches = pipeline.Batches(config, tokens, 'valid', training=False)
        assert '2 examples (1 skipped as bad)' in batches.summary
        assert batches.segments(0) == [[(0, 0, 0)], [(0, 2, 1)]]
        assert len(batches.records) == 3


# ----------------------------------------------------------------------------------------------------------- templates


MARKS, SOURCE = Specials(), Specials(eos=99)
A, B, NONE = np.array([11, 12]), np.array([13]), np.array([], int)


def test_frames_to_read_by_hand() -> None:
    def read(template: special_tokens.SpecialTokenTemplate, *texts: np.ndarray) -> dict[str, list[int]]:
        return {name: np.asarray(values).tolist() for name, values in template.read(*texts).items()}

    encoder, decoder = special_tokens.EncoderTemplate(MARKS, SOURCE), special_tokens.DecoderTemplate(MARKS, SOURCE)
    both = special_tokens.EncoderDecoderTemplate(MARKS, SOURCE)
    assert read(encoder, A) == {'inputs': [CLS, 11, 12, SEP]}
    assert read(encoder, A, B) == {'inputs': [CLS, 11, 12, SEP, 13, SEP], 'token_types': [0, 0, 0, 0, 1, 1]}
    assert read(encoder, A, NONE) == {'inputs': [CLS, 11, 12, SEP], 'token_types': [0, 0, 0, 0]}
    assert read(encoder, NONE, NONE) == {'inputs': [CLS, SEP], 'token_types': [0, 0]}
    assert read(decoder, A) == read(decoder, A, NONE) == {'inputs': [BOS, 11, 12, EOS]}
    assert read(decoder, A, B) == {'inputs': [BOS, 11, 12, SEP, 13, EOS]}
    whole = [BOS, 11, 12, SEP, 13, EOS]
    assert read(both, A, B) == {'encoder_inputs': whole[1:], 'inputs': whole}
    assert read(both, A) == {'encoder_inputs': [11, 12, EOS], 'inputs': [BOS, 11, 12, EOS]}


def test_frames_of_the_hubs_classifiers_by_hand() -> None:
    def read(family: str, *texts: np.ndarray, **how: Any) -> list[list[int]]:
        template = special_tokens.TEMPLATES[family](MARKS, SOURCE, **how)
        return [np.asarray(template.read(*texts)[name]).tolist() for name in template.read(*texts)]

    roberta = {'separator': ('sep', 'sep')}
    assert read('encoder', A, B, **roberta) == [[CLS, 11, 12, SEP, SEP, 13, SEP], [0, 0, 0, 0, 0, 1, 1]]
    assert read('encoder', A, **roberta) == [[CLS, 11, 12, SEP]]
    gpt2 = {'start': (), 'end': (), 'separator': ()}
    assert (read('decoder', A, **gpt2), read('decoder', A, B, **gpt2)) == ([[11, 12]], [[11, 12, 13]])
    assert read('decoder', NONE, **gpt2) == [[EOS]]
    assert read('decoder', A, B, end=(), separator=('bos',)) == [[BOS, 11, 12, BOS, 13]]
    bart = {'start': ('eos', 'bos'), 'source_start': ('bos',), 'end': (), 'separator': ('eos', 'eos')}
    assert read('encoder_decoder', A, B, **bart) == [
        [BOS, 11, 12, EOS, EOS, 13, EOS],
        [EOS, BOS, 11, 12, EOS, EOS, 13],
    ]


def test_frames_to_write_by_hand() -> None:
    def write(template: special_tokens.SpecialTokenTemplate, **how: Any) -> dict[str, list[float]]:
        return {name: np.asarray(values).tolist() for name, values in template.write(A, B, **how).items()}

    decoder, both = special_tokens.DecoderTemplate(MARKS, SOURCE), special_tokens.EncoderDecoderTemplate(MARKS, SOURCE)
    assert write(decoder) == {
        'inputs': [BOS, 11, 12, SEP, 13],
        'targets': [11, 12, SEP, 13, EOS],
        'weights': [0, 0, 0, 1, 1],
        'prefix': [True, True, True, True, False],
    }
    assert write(decoder, ended=False) == {
        'inputs': [BOS, 11, 12, SEP],
        'targets': [11, 12, SEP, 13],
        'weights': [0, 0, 0, 1],
        'prefix': [True] * 4,
    }
    assert 'prefix' not in write(special_tokens.DecoderTemplate(MARKS, SOURCE, bidirectional=False))
    own = {'encoder_inputs': [11, 12, 99], 'inputs': [BOS, 13], 'targets': [13, EOS], 'weights': [1, 1]}
    assert write(both) == own
    assert write(both, ended=False) == {**own, 'inputs': [BOS], 'targets': [13], 'weights': [1]}
    with pytest.raises(NotImplementedError):
        special_tokens.EncoderTemplate(MARKS, SOURCE).write(A, B)


# what may stand around a text: data.start, data.source_start, data.source_end and data.end
STARTS = {
    'encoder': [(('bos',), ())],
    'decoder': [(('bos',), ()), ((), (), ('eos',), ()), (('eos',), ())],
    'encoder_decoder': [(('bos',), ()), (('eos', 'bos'), ('bos',)), (('pad',), ('bos', 'cls'), ('eos', 'sep'), ())],
}
SEPARATORS = (('sep',), (), ('eos', 'eos'))  # data.separator


@given(
    first=st.integers(0, 9), second=st.integers(0, 9), family=st.sampled_from(list(special_tokens.TEMPLATES)),
    data=st.data(),
)  # fmt: skip
def test_frames_are_as_long_as_they_say(first: int, second: int, family: str, data: st.DataObject) -> None:
    separator = data.draw(st.sampled_from(SEPARATORS))
    around = data.draw(st.sampled_from(STARTS[family]))
    template = special_tokens.TEMPLATES[family](MARKS, SOURCE, True, *around, separator=separator)

    def sizes(fields: special_tokens.Fields) -> list[int]:
        return [len(fields[name]) for name in ('inputs', 'encoder_inputs') if name in fields]

    a, b = np.arange(first), np.arange(second)
    between = second + len(separator) if second else 0
    assert sizes(template.read(a)) == list(map(int, template.to_read(np.array(first))))
    assert sizes(template.read(a, b)) == list(map(int, template.to_read(np.array(first + between))))
    if family != 'encoder':
        assert sizes(template.write(a, b)) == list(map(int, template.to_write(np.array(first), np.array(second))))


# --------------------------------------------------------------------------------- examples of every objective


CASES = [(name, family) for name, task in TASKS.items() for family in task.families if not task.teacher]
LOOSE = (
    'masked_lm_nsp',
    'masked_lm_sop',
    'denoising',
    'ul2',
    'fill_in_middle',
)  # lengths are drawn: those known before are the most
BYTE = Byte().extended(64)


def record(objective: str, rng: np.random.Generator, pairs: bool, longest: int) -> dict[str, Any]:
    def text(least: int = 1) -> str:
        return ''.join(rng.choice(list('ab. '), int(rng.integers(least, longest + 1))))

    made: dict[str, Any] = {field: text() for field in TASKS[objective].fields}
    if objective in ('classification', 'regression'):
        made |= {'label': 'x' if objective == 'classification' else 0.5} | ({'pair': text()} if pairs else {})
    if 'positive' in made:
        made['texts'] = [text() for _ in range(int(rng.integers(2, 5)))]
    if objective == 'cosine_similarity':
        made |= {'label': 0.5, 'texts': [made['text'], made['pair']]}
    if objective == 'multiple_choice':
        made |= {'label': 0, 'choices': [text() for _ in range(int(rng.integers(2, 5)))]}
    if objective == 'token_classification':
        words = text().split() or ['a']
        made = {'tokens': words, 'tags': list(rng.choice(['O', 'B-X'], len(words)))}
    if objective == 'chat':
        made['messages'] = [{'role': role, 'content': text()} for role in ('user', 'assistant')]
    if objective == 'question_answering':
        start = int(rng.integers(len(made['context'])))
        stop = int(rng.integers(start + 1, len(made['context']) + 1))
        made['answers'] = [(start, made['context'][start:stop])] if rng.random() < 0.7 else []
    return made


def config_of(objective: str, family: str, **data: Any) -> Config:
    how = {'tokenizer': 'byte', 'sentinels': 64, **data}
    return Config(model=Model(family=family), data=Data(**how), train=Train(objective=objective))


def made_of(config: Config, records: Sequence[dict[str, Any]], training: bool = False) -> example_arrays.Examples:
    labels = {'classification': ('x',), 'token_classification': ('O', 'B-X', 'I-X')}.get(config.train.objective, ())
    tokens = Tokenizers(BYTE if config.model.family == 'encoder_decoder' else None, BYTE, labels)
    if TASKS[config.train.objective].in_pairs:
        tokens = Tokenizers(BYTE, BYTE)
    return example_formats.make(config, tokens, records, 'test', training)


@pytest.mark.slow
@pytest.mark.parametrize(('objective', 'family'), CASES)
@given(
    length=st.integers(3, 40), encoder_length=st.none() | st.integers(3, 40), longest=st.integers(1, 60),
    seed=st.integers(0, 2**32), pairs=st.booleans(), training=st.booleans(),
    overlong=st.sampled_from(['drop', 'truncate']), start=st.integers(0, 2), separator=st.sampled_from(SEPARATORS),
)  # fmt: skip
@settings(deadline=None, max_examples=25)
def test_an_example_fits_and_is_as_long_as_was_said(
    objective: str, family: str, length: int, encoder_length: int | None, longest: int, seed: int, pairs: bool,
    training: bool, overlong: str, start: int, separator: tuple[str, ...],
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    records = [record(objective, rng, pairs, longest) for _ in range(5)]
    starts = dict(
        zip(('start', 'source_start', 'source_end', 'end'), STARTS[family][start % len(STARTS[family])], strict=False)
    )
    config = config_of(
        objective, family, length=length, encoder_length=encoder_length, overlong=overlong, question_length=3, stride=4,
        separator=separator, **starts,
    )  # fmt: skip
    try:
        made = made_of(config, records, training)
    except UserError as error:
        assert 'has no room for text' in str(error) or 'no example within data.length' in str(error)
        return
    limits = [length, encoder_length or length]
    fields_of = example_formats.format_of(config).fields
    for index in range(len(made)):
        noise = corrupt.Noise(config.data, BYTE, corrupt.noise_key(0, 0, 0, 0, index))
        fields = fields_of(made, index, noise)
        sizes = [len(fields[name]) for name in ('inputs', 'encoder_inputs') if name in fields]
        said = made.lengths[index].tolist()
        assert len(sizes) == len(said) == (1 if family != 'encoder_decoder' else 2)
        assert all(0 < size <= most <= limit for size, most, limit in zip(sizes, said, limits, strict=False))
        exact = objective not in LOOSE and not (objective == 'prefix_lm' and family == 'encoder_decoder')
        assert sizes == said or not exact or made.num_truncated
        own = ('inputs', 'targets', 'weights', 'prefix', 'token_types', 'segment_ids')
        assert {len(fields[name]) for name in own if name in fields} == {sizes[0]}
        assert ('label_weights' in fields) == example_formats.format_of(config).labelled
        assert ('labels' in fields) == ('label_weights' in fields and 'segment_keys' not in fields)


@pytest.mark.parametrize(('objective', 'family'), CASES)
def test_a_batch_without_data_has_the_arrays_of_real_ones(objective: str, family: str) -> None:
    """Else `inspect`, `plan` and `benchmark` would speak of another program than that which trains."""
    config = config_of(objective, family, length=40, question_length=4)
    records = [record(objective, np.random.default_rng(seed), True, 12) for seed in range(5)]
    noise = corrupt.Noise(config.data, BYTE, corrupt.noise_key(0, 0, 0, 0, 0))
    real = set(example_formats.format_of(config).fields(made_of(config, records), 0, noise))
    made = set(dummy_batch.random_batch(checks.resolve(config, vocab_size=300, num_classes=3)))
    assert real <= made and made - real <= {
        *('positions', 'encoder_positions', 'targets', 'weights'),
        *('labels', 'segment_keys'),
    }


# ---------------------------------------------------------------------------------------------------------- windows


@given(
    contexts=st.lists(st.integers(1, 60), min_size=1, max_size=4), question=st.integers(1, 9),
    length=st.integers(8, 30), stride=st.integers(1, 30), family=st.sampled_from(TASKS['question_answering'].families),
    data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_windows_leave_nothing_out(
    contexts: list[int], question: int, length: int, stride: int, family: str, data: st.DataObject
) -> None:
    records = []
    for size in contexts:
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        context = ''.join(chr(97 + i % 26) for i in range(size))
        records.append({'context': context, 'question': 'q' * question, 'answers': [(start, context[start:stop])]})
    made = made_of(config_of('question_answering', family, length=length, stride=stride, question_length=4), records)
    asked, cut = min(question, 4), made.spans
    room = length - 3 - asked
    find = example_formats.format_of(config_of('question_answering', family)).fields
    noise = corrupt.Noise(Data(question_length=4), BYTE, (0,))
    found = dict.fromkeys(range(len(records)), False)
    for number, one in enumerate(records):
        windows = np.flatnonzero(cut.record == number)
        starts, stops = cut.start[windows], cut.stop[windows]
        covered = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
        assert set(covered.tolist()) == set(range(len(one['context'])))
        assert (stops - starts <= room).all() and (np.diff(starts) == min(stride, room)).all()
        assert len(windows) == 1 or stops[-2] < len(one['context'])  # none that is not needed
        ((start, text),) = one['answers']
        for index in windows.tolist():
            fields = find(made, index, noise)
            inputs, (first, last) = fields['inputs'], fields['labels']
            context = BYTE.decode(inputs[asked + 2 : asked + 2 + cut.stop[index] - cut.start[index]])
            assert context == one['context'][cut.start[index] : cut.stop[index]]
            scored = np.flatnonzero(fields['weights']).tolist()
            assert scored == [0, *range(asked + 2, asked + 2 + len(context))]
            whole = cut.start[index] <= start and start + len(text) <= cut.stop[index]
            assert (first > 0) == whole
            if whole:
                assert BYTE.decode(inputs[first : last + 1]) == text
                found[number] = True
            else:
                assert (first, last) == (0, 0)
        assert found[number] or len(text) > room - min(stride, room) + 1
    assert made.num_truncated == list(found.values()).count(False)


def test_an_answer_that_no_window_has_is_overlong() -> None:
    config = config_of('question_answering', 'encoder', length=10, stride=6)
    halved = {'context': 'abcdefghi', 'question': 'q', 'answers': [(5, 'fg')]}  # windows abcdef, ghi
    whole = {**halved, 'answers': [(4, 'ef')]}
    dropped = made_of(config, [halved, whole], training=True)
    assert (dropped.num_dropped, dropped.num_truncated, dropped.spans.record.tolist()) == (1, 0, [1, 1])
    kept = made_of(config, [halved, whole])
    assert (kept.num_dropped, kept.num_truncated, kept.spans.record.tolist()) == (0, 1, [0, 0, 1, 1])
    with pytest.raises(UserError, match=r'data.length=10 has no room for text beside a question of 7 tokens'):
        made_of(config, [{**whole, 'question': 'q' * 7}])


def test_a_source_leaves_a_decoder_half_of_the_row_for_its_target() -> None:
    """BOS source SEP target EOS, without its last token: a row of 12."""
    sizes = [(3, 4), (10, 3), (10, 20), (3, 20), (20, 1)]
    records = [{'source': 'a' * source, 'target': 'b' * target} for source, target in sizes]
    config = config_of('seq2seq', 'decoder', length=12)
    made = made_of(config, records)
    found = []
    for index in range(len(made)):
        fields = example_arrays.translate(made, index, corrupt.Noise(config.data, BYTE, (0,)))
        targets = fields['targets'][fields['weights'] > 0]
        found.append((int((fields['inputs'] == BYTE.encode('a')[0]).sum()), len(targets), targets[-1] == EOS))
        assert len(fields['inputs']) == made.lengths[index] <= 12
    assert found == [(3, 5, True), (7, 4, True), (5, 6, False), (3, 8, False), (9, 2, True)]
    assert made.num_truncated == 4
