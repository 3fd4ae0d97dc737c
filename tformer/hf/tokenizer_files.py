"""The vocabulary files of a hub directory, which families put other ids, or other texts, into under the same names."""

import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tformer.config import json_files
from tformer.data.tokenizers.hub_tokenizer import NAMES
from tformer.errors import UserError
from tformer.hf import vocabularies
from tformer.hf.vocabularies import Piece

Json = dict[str, Any]

_KNOWN = {name for names in NAMES.values() for name in names}


def read(directory: pathlib.Path, family: str) -> tuple[bytes, bytes | None]:
    """Returns (the tokenizer.json of what the decoder or the only stack reads, that of the encoder where it differs).

    `family` is the hub's model_type: families put other ids, or other texts, into files of the same name.

    Raises:
      UserError: the directory has no vocabulary that the family reads, or it is malformed.
    """

    def there(*names: str) -> bool:
        return all((directory / name).is_file() for name in names)

    settings = json_files.read_if_there(directory / 'tokenizer_config.json')
    if there('tokenizer.json'):
        return _as_set((directory / 'tokenizer.json').read_bytes(), settings, family), None
    try:
        if str(settings.get('tokenizer_class')).startswith('ByT5'):
            return vocabularies.bytes_alone(_extra(directory, settings, 125)).encode(), None
        for reader in _READERS:
            if there(*reader.files) and family in reader.families:
                added = _added(directory, settings)
                target, *source = (vocabularies.with_added(text, added) for text in reader.read(directory, settings))
                return target.encode(), source[0].encode() if source else None
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f'{directory}: its vocabulary cannot be read: {" ".join(str(error).split())[:200]}') from error
    own = [' with '.join(reader.files) for reader in _READERS if family in reader.families]
    raise UserError(f'{directory} has no vocabulary of {family}; valid: {", ".join(["tokenizer.json", *own])}')


# What the classes of the hub's library set in a tokenizer.json as tokenizer_config.json says: in a part of this type,
# by its names there, those of the settings.
_SET = {
    ('normalizer', 'BertNormalizer'): {
        'lowercase': 'do_lower_case',
        'strip_accents': 'strip_accents',
        'handle_chinese_chars': 'tokenize_chinese_chars',
    },
    ('pre_tokenizer', 'ByteLevel'): {'add_prefix_space': 'add_prefix_space'},
}
_SETTING = ('bert', 'distilbert', 'electra', 'gpt2', 'roberta', 'bart', 'gpt_neox')  # families of such classes
_PLAIN = ('PreTrainedTokenizerFast', 'TokenizersBackend')  # classes that read the file alone


def _as_set(stored: bytes, settings: Json, family: str) -> bytes:
    """Returns a tokenizer.json with what tokenizer_config.json sets in it, where that differs."""
    if family not in _SETTING or settings.get('tokenizer_class') in _PLAIN:
        return stored
    try:
        tree = json_files.parse(stored.decode())
    except ValueError:
        return stored  # whoever reads it says so
    changed = False
    for (place, kind), names in _SET.items():
        part = tree.get(place)
        if isinstance(part, dict) and part.get('type') == kind:
            given = {name: value for name, key in names.items() if isinstance(value := settings.get(key), bool)}
            changed |= any(part.get(name) != value for name, value in given.items())
            part |= given
    return json.dumps(tree, ensure_ascii=False).encode() if changed else stored


class _Reader(NamedTuple):
    """How the vocabularies of some families are read."""

    files: tuple[str, ...]
    families: tuple[str, ...]
    read: Callable[[pathlib.Path, Json], Sequence[str]]  # (directory, settings) -> tokenizer.json of target, source


def _added(directory: pathlib.Path, settings: Json) -> list[vocabularies.Added]:
    """Returns the tokens that added_tokens.json and tokenizer_config.json add, in the order of their ids."""
    file, config = directory / 'added_tokens.json', directory / 'tokenizer_config.json'
    listed = json_files.read_if_there(directory / 'special_tokens_map.json').get('additional_special_tokens') or ()
    special = {name['content'] if isinstance(name, dict) else name for name in listed}
    found = {
        token: vocabularies.Added(token, index, file, {'special': token in special, 'normalized': token not in special})
        for token, index in json_files.read_if_there(file).items()
    }
    for index, token in (settings.get('added_tokens_decoder') or {}).items():
        flags = {name: bool(token.get(name)) for name in ('special', 'normalized', 'lstrip', 'rstrip', 'single_word')}
        found[token['content']] = vocabularies.Added(token['content'], int(index), config, flags)
    return sorted(found.values(), key=lambda each: each.number)


def _words(directory: pathlib.Path, settings: Json) -> tuple[str]:
    if str(kind := settings.get('tokenizer_class')).startswith('BertJapanese'):
        needed = 'it splits words as no vocab.txt says; valid: tokenizer.json beside it'
        raise UserError(f'{directory / "tokenizer_config.json"}: tokenizer_class={kind} has no counterpart: {needed}')
    return (vocabularies.word_pieces(directory, settings),)


def _t5(directory: pathlib.Path, settings: Json) -> tuple[str]:
    return (_model(directory / 'spiece.model', vocabularies.with_sentinels(_extra(directory, settings, 100))),)


def _extra(directory: pathlib.Path, settings: Json, default: int) -> int:
    """Returns the number of sentinels."""
    extra = settings.get('extra_ids', default)
    if type(extra) is not int or not 0 <= extra <= 10_000:
        raise UserError(f'{directory / "tokenizer_config.json"}: extra_ids={extra!r} is not from 0 to 10,000')
    return extra


def _marian(directory: pathlib.Path, settings: Json) -> tuple[str, str]:
    order = vocabularies.in_order_of(vocabularies.ids_of(directory / 'vocab.json'))
    return _model(directory / 'target.spm', order), _model(directory / 'source.spm', order)


def _of_languages(directory: pathlib.Path, settings: Json) -> tuple[str]:
    """mBART, M2M100, NLLB: with the token of the source language around a text, where the settings put it."""
    file, listed = directory / 'special_tokens_map.json', settings
    if 'additional_special_tokens' not in settings:
        listed = json_files.read_if_there(file)
    names = listed.get('additional_special_tokens') or ()
    texts = [name['content'] if isinstance(name, dict) else name for name in names]
    codes = [name for name in texts if name not in _KNOWN]
    if not codes:
        raise UserError(f'{directory}: no file lists its languages; valid: additional_special_tokens in {file.name}')
    if (directory / 'vocab.json').is_file():
        ids = vocabularies.ids_of(directory / 'vocab.json')
        order = vocabularies.in_order_of({**ids, **{code: len(ids) + number for number, code in enumerate(codes)}})
    else:
        order = vocabularies.as_mbart(codes)
    text = _model(directory / 'sentencepiece.bpe.model', order)
    language = language_of(settings.get('src_lang'), codes) or next((code for code in _SOURCES if code in codes), None)
    if language is None:
        return (text,)
    behind = settings.get('tokenizer_class', '').startswith('MBartTok') or settings.get('legacy_behaviour') is True
    return (vocabularies.framed(text, *([], ['</s>', language]) if behind else ([language], ['</s>'])),)


_SOURCES = ('en_XX', '__en__', 'eng_Latn')  # where the settings name no source language


def language_of(code: object, tokens: Iterable[str]) -> str | None:
    """Returns the token of a language by its code: the code itself, or as M2M100 writes it."""
    return next((name for name in (str(code), f'__{code}__') if name in tokens), None)


def _model(file: pathlib.Path, *arrange: Callable[[list[Piece]], list[Piece]]) -> str:
    return vocabularies.sentence_pieces(file.read_bytes(), file, *arrange)


_READERS = (
    _Reader(('vocab.txt',), ('bert', 'distilbert', 'electra'), _words),
    _Reader(
        ('vocab.json', 'merges.txt'), ('gpt2', 'roberta', 'bart'), lambda *given: (vocabularies.byte_pairs(*given),)
    ),
    _Reader(('spiece.model',), ('t5',), _t5),
    _Reader(('spiece.model',), ('mt5',), lambda place, settings: (_model(place / 'spiece.model'),)),
    _Reader(
        ('sentencepiece.bpe.model',),
        ('xlm-roberta',),
        lambda place, settings: (_model(place / 'sentencepiece.bpe.model', vocabularies.as_xlm_roberta),),
    ),
    _Reader(
        ('tokenizer.model',),
        ('llama', 'mistral', 'mixtral', 'gemma', 'gemma2'),
        lambda place, settings: (_model(place / 'tokenizer.model'),),
    ),
    _Reader(('vocab.json', 'sentencepiece.bpe.model'), ('m2m_100',), _of_languages),
    _Reader(('sentencepiece.bpe.model',), ('mbart', 'm2m_100'), _of_languages),
    _Reader(('source.spm', 'target.spm', 'vocab.json'), ('marian',), _marian),
)
