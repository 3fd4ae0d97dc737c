"""Vocabularies of many languages and of bytes: ids of the programs that they were made for, languages around texts."""

import importlib
import importlib.util
import json
import pathlib
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

import hub_directories
from hub_files import PROBES as TEXTS
from hub_files import trained
from tformer import checks, config
from tformer.commands.export import export
from tformer.commands.import_ import import_hub
from tformer.commands.run import Run
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.errors import UserError
from tformer.hf import tokenizer_files

CODES = {
    'mbart': ['ar_AR', 'en_XX', 'ro_RO'],
    'nllb': ['ace_Arab', 'eng_Latn', 'fra_Latn'],
    'm2m': ['__en__', '__fr__'],
}
FRONT = ['<s>', '<pad>', '</s>', '<unk>']
PLAIN = [text for text in TEXTS if text == text.strip() and '①' not in text]  # see below
needs_transformers = pytest.mark.skipif(not importlib.util.find_spec('transformers'), reason='needs transformers')


def written(place: pathlib.Path, kind: str, **settings: Any) -> tuple[HubTokenizer, Any]:
    """Writes the files of a vocabulary; returns our tokenizer of them and SentencePiece's processor."""
    model = {'model_type': 'bpe' if kind == 'nllb' else 'unigram', 'pad_id': -1}  # <unk>, <s>, </s>, as the hub's have
    theirs = trained(place, 'sentencepiece.bpe.model', **model)
    if kind == 'm2m':
        pieces = [*FRONT, *(theirs.id_to_piece(index) for index in range(3, theirs.vocab_size()))]
        (place / 'vocab.json').write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    fields = {'additional_special_tokens': CODES[kind], **settings}
    (place / 'tokenizer_config.json').write_text(json.dumps(fields))
    return HubTokenizer(tokenizer_files.read(place, 'mbart' if kind == 'mbart' else 'm2m_100')[0]), theirs


@pytest.mark.parametrize('kind', CODES)
def test_ids_are_sentencepieces_one_later_and_languages_follow(tmp_path: pathlib.Path, kind: str) -> None:
    ours, theirs = written(tmp_path, kind)
    first = theirs.vocab_size() + 1
    assert [ours.special_names[name] for name in FRONT] == [0, 1, 2, 3]
    assert [ours.special_names[name] for name in CODES[kind]] == [first + number for number in range(len(CODES[kind]))]
    assert ours.vocab_size == first + len(CODES[kind]) + (kind != 'm2m')  # the mask
    for text in TEXTS:
        assert ours.encode(text) == [3 if index == 0 else index + 1 for index in theirs.encode(text)], text


@pytest.mark.parametrize(
    ('kind', 'settings', 'around'),
    [
        ('mbart', {'tokenizer_class': 'MBartTokenizer'}, '$A </s> en_XX'),
        ('mbart', {'tokenizer_class': 'MBart50Tokenizer', 'src_lang': 'ro_RO'}, 'ro_RO $A </s>'),
        ('nllb', {'legacy_behaviour': True}, '$A </s> eng_Latn'),
        ('nllb', {'legacy_behaviour': False}, 'eng_Latn $A </s>'),
        ('m2m', {'src_lang': 'fr'}, '__fr__ $A </s>'),
    ],
)
def test_the_language_of_a_source_stands_in_front_or_behind(
    tmp_path: pathlib.Path, kind: str, settings: dict[str, Any], around: str
) -> None:
    ours, _ = written(tmp_path, kind, **settings)
    made = Tokenizer.from_str(ours.dump().decode())
    assert ' '.join(made.encode('').tokens) == around.replace('$A ', '')


@needs_transformers
@pytest.mark.parametrize(
    ('kind', 'name', 'settings'),
    [
        ('mbart', 'MBartTokenizer', {'src_lang': 'ro_RO'}),
        ('mbart', 'MBart50Tokenizer', {'src_lang': 'ro_RO'}),
        ('nllb', 'NllbTokenizer', {'src_lang': 'fra_Latn'}),
        ('nllb', 'NllbTokenizer', {'src_lang': 'fra_Latn', 'legacy_behaviour': True}),
        ('m2m', 'M2M100Tokenizer', {'src_lang': 'fr'}),
    ],
)
def test_a_source_is_that_of_the_hubs_library(
    tmp_path: pathlib.Path, kind: str, name: str, settings: dict[str, Any]
) -> None:
    """Its newer tokenizers keep spaces at the edges of a text, and mBART's compatibility characters; SentencePiece, for
    which the models were trained, does not."""
    import transformers

    family = {'MBart50Tokenizer': 'mbart50', 'M2M100Tokenizer': 'm2m_100'}.get(name, kind)
    module = importlib.import_module(f'transformers.models.{family}.tokenization_{family}')
    codes = module.FAIRSEQ_LANGUAGE_CODES
    codes = [f'__{code}__' for code in codes['m2m100']] if kind == 'm2m' else codes
    ours, _ = written(tmp_path, kind, tokenizer_class=name, additional_special_tokens=codes, **settings)
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    made = Tokenizer.from_str(ours.dump().decode())
    for text in PLAIN:
        expected = theirs.convert_ids_to_tokens(theirs(text).input_ids)
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
        assert [made.id_to_token(index) for index in made.encode(text).ids] == expected
    assert ('__fr__' if kind == 'm2m' else settings['src_lang']) in (expected[0], expected[-1])


@needs_transformers
def test_bytes_are_those_of_the_hubs_library(tmp_path: pathlib.Path) -> None:
    import transformers

    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    theirs = transformers.ByT5Tokenizer.from_pretrained(tmp_path)
    ours = HubTokenizer(tokenizer_files.read(tmp_path, 't5')[0])
    assert ours.vocab_size == len(theirs) == 3 + 256 + 125
    assert ours.special_names == {name: theirs.convert_tokens_to_ids(name) for name in ours.special_names}
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, text


def test_bytes_follow_three_special_tokens(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 4}')
    ours = HubTokenizer(tokenizer_files.read(tmp_path, 't5')[0])
    assert ours.vocab_size == 263 and ours.sentinels.tolist() == [259, 260, 261, 262] and ours.lossless
    assert (ours.specials.pad, ours.specials.eos, ours.specials.unk) == (0, 1, 2)
    for text in [*TEXTS, ''.join(map(chr, range(1, 1000)))]:
        assert ours.encode(text) == [byte + 3 for byte in text.encode()] and ours.decode(ours.encode(text)) == text


def test_languages_must_be_listed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match='no file lists its languages; valid: additional_special_tokens in special_tok'):
        written(tmp_path, 'mbart', additional_special_tokens=['<mask>'])
    (tmp_path / 'tokenizer_config.json').write_text('{}')
    listed = {'additional_special_tokens': [{'content': 'en_XX'}, 'ro_RO']}
    (tmp_path / 'special_tokens_map.json').write_text(json.dumps(listed))
    assert 'ro_RO' in HubTokenizer(tokenizer_files.read(tmp_path, 'mbart')[0]).special_names


def multilingual(place: pathlib.Path, template: str, settings: dict[str, Any], **fields: Any) -> None:
    """Writes a small M2M100 whose tokenizer has two languages in place of two of its words."""
    hub_directories.write(place, 'm2m_100', **fields)
    text = (place / 'tokenizer.json').read_text().replace('"a"', '"__en__"').replace('"b"', '"__fr__"')
    made = Tokenizer.from_str(text)
    made.add_special_tokens(['__en__', '__fr__'])
    known = [(name, made.token_to_id(name)) for name in ('</s>', '__en__', '__fr__')]
    made.post_processor = processors.TemplateProcessing(template, special_tokens=known)
    made.save(str(place / 'tokenizer.json'))
    (place / 'tokenizer_config.json').write_text(json.dumps(settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('template', 'settings', 'ids', 'expected'),
    [
        ('__en__ $A </s>', {'tgt_lang': 'fr'}, {}, (('eos', '__fr__'), ('__en__',), ('eos',))),
        ('$A </s> __en__', {'tgt_lang': '__fr__'}, {}, (('eos', '__fr__'), (), ('eos', '__en__'))),
        ('__en__ $A </s>', {}, {'forced_bos_token_id': 6}, (('eos', '__fr__'), ('__en__',), ('eos',))),
        ('$A </s> __en__', {}, {'decoder_start_token_id': 6}, (('__fr__',), (), ('eos', '__en__'))),
        ('__en__ $A </s>', {}, {}, (('eos',), ('__en__',), ('eos',))),
    ],
)
def test_languages_stand_where_the_tokenizer_puts_them(
    tmp_path: pathlib.Path,
    template: str,
    settings: dict[str, Any],
    ids: dict[str, int],
    expected: tuple[tuple[str, ...], ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    multilingual(tmp_path / 'hub', template, settings, **{'decoder_start_token_id': 2, **ids})
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    data = Run.load(tmp_path / 'run').config.data
    assert (data.start, data.source_start, data.source_end) == expected
    assert ('does not say which language to write' in capsys.readouterr().err) == (data.start == ('eos',))


@pytest.mark.slow
def test_a_language_can_be_chosen_and_an_unknown_one_is_refused(tmp_path: pathlib.Path) -> None:
    multilingual(tmp_path / 'hub', '__en__ $A </s>', {}, decoder_start_token_id=2)
    chosen = {'data.start': ('eos', '__en__'), 'data.source_start': ('__fr__',), 'decode.max_len': 3}
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run', chosen)
    run = Run.load(tmp_path / 'run')
    assert len(run.generate(['c d'])) == 1
    batch = run.batch(['c d'], [''])
    names = run.tokenizers.target.special_names
    assert batch['encoder_inputs'][0].tolist() == [names['__fr__'], 7, 8, 2]
    assert batch['inputs'][0].tolist() == [2, names['__en__']]
    export(run, tmp_path / 'out')
    again = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert (again['decoder_start_token_id'], again['forced_bos_token_id']) == (2, names['__en__'])
    other = Run.load(tmp_path / 'run', {'data.start': 'eos,__fr__', 'data.source_start': '__en__'})
    batch = other.batch(['c d'], [''])
    assert batch['encoder_inputs'][0][0] == names['__en__'] and batch['inputs'][0].tolist() == [2, names['__fr__']]
    wrong = Run.load(tmp_path / 'run', {'data.start': 'eos,__fn__'})
    with pytest.raises(
        UserError, match=r"^'__fn__' is not a special token of the tokenizer; did you mean '__\w\w__'\?$"
    ):
        wrong.generate(['c d'])
    with pytest.raises(UserError, match=r"data\.start='__fr__' is unknown"):
        plain = config.Config(config.Model(family='encoder_decoder'), config.Data(start=('__fr__',)))
        checks.settle(plain)
