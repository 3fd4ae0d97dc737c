"""A tokenizer of the Hugging Face hub, read from its `tokenizer.json`."""

import contextlib
import copy
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from tformer.config.run import Data
from tformer.data.tokenizers.vocabulary import MARK, Specials, Tokenizer, TokensWithOffsets
from tformer.errors import UserError, nearest

Json = dict[str, Any]

# The names of special tokens. Each special token is the first of its names that a file has. The later names are
# substitutes: GPT-2 has a single token for all uses, T5 begins with padding, and BERT ends with [SEP].
_END = ('</s>', '<eos>', '[EOS]', '<|end_of_text|>', '<|endoftext|>', '[SEP]', '<sep>')
_PAD = ('<pad>', '[PAD]', '<|pad|>', *_END)
_START = ('<s>', '<bos>', '[BOS]', '<|begin_of_text|>', '<|startoftext|>', '[CLS]', '<cls>', '<|endoftext|>', *_PAD)
NAMES = {
    'pad': _PAD,
    'bos': _START,
    'eos': _END,
    'unk': ('<unk>', '[UNK]', '<|unk|>', *_PAD),
    'mask_or_none': ('<mask>', '[MASK]', '<|mask|>'),
    'cls': ('[CLS]', '<cls>', *_START),
    'sep': ('[SEP]', '<sep>', *_END),
}

_SPACE = '\u2581'  # a space, as Metaspace writes it
_MARKS = ('continuing_subword_prefix', 'end_of_word_suffix')  # of pieces inside words and of those that end one
_LETTERS = ' '.join(map(chr, range(ord('a'), 0x3000)))  # of most scripts
_BYTE_SPACES = {256 + byte: chr(byte) for byte in range(33)}  # the first bytes, as byte-level vocabularies write them
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level vocabularies write as they are
_BYTES_OF_LETTERS = {chr(byte): byte for byte in _SHOWN}
_BYTES_OF_LETTERS |= {chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*_SHOWN}))}
_MOST_IDS = 1 << 24  # arrays have an entry for each
_CHUNK = 10_000  # texts encoded at once; the library's results are much larger than their ids
_PROBE = "The quick\n\n\tbrown  fox\u2026 \u00c9 e\u0301 \uff21\u00a0\u2581\r\n12345 don't , \U0001f468\u200d \0 "


class HubTokenizer(Tokenizer):
    """The vocabulary of a hub model, with the ids of its file, so that they fit the model's weights.

    Texts are encoded by the `tokenizers` library without special tokens, truncation, padding and dropout. Text that
    spells a special token stays text. (Exceptions: with a Unigram model, text can spell the byte pieces, such as
    <0x0A>; and U+FDD0, which is not a character, followed by its name is a special token.)

    Byte-level BPE without a normaliser is lossless: GPT-2, RoBERTa, BART, Llama 3. Vocabularies that write spaces as
    U+2581 (T5, Llama 2) are not: most add a space in front, and the character U+2581 itself becomes a space.
    `byte_lengths` are exact for byte-level and byte pieces. WordPiece does not record the spaces between words, so they
    count no bytes.
    """

    def __init__(
        self,
        stored: bytes,
        where: str = 'tokenizer.json',
        declared: Mapping[str, Sequence[str | int]] | None = None,
    ) -> None:
        """Reads the content of the file named `where`; raises a `UserError` if no tokenizer can be made of it.

        `declared` has names or ids of special tokens by the fields of `Specials`. The first that the file has as a
        special token comes before those of `NAMES`.
        """
        super().__init__(stored)
        self._library, tree = _open(stored, where)
        from tokenizers.pre_tokenizers import ByteLevel  # after `_open`, which says so if the package is missing

        vocab: dict[str, int] = self._library.get_vocab()
        special = {name.removeprefix(MARK): index for name, index in vocab.items() if name.startswith(MARK)}
        self._special_names = {index: name for name, index in special.items()}
        self._pieces = {index: piece for piece, index in vocab.items() if index not in self._special_names}
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > _MOST_IDS:
            raise UserError(f'{where} has the id {self.vocab_size - 1:,}; valid: at most {_MOST_IDS - 1:,}')
        plain, ids = (_ids(special, _unknown(tree['model']), given) for given in ({}, declared or {}))
        self.specials = _specials(special, ids, where)
        self.declared = {
            name: [self._special_names[i]] for name, i in ids.items() if i is not None and i != plain[name]
        }
        names = itertools.takewhile(special.__contains__, map('<extra_id_{}>'.format, itertools.count()))
        self._sentinels = [special[name] for name in names]  # T5's
        added = {index: token for index, token in self._library.get_added_tokens_decoder().items() if not token.special}
        byte_level = 'ByteLevel' in {*_types(tree.get('pre_tokenizer')), *_types(tree.get('decoder'))}
        self._letters = self._pieces.keys() - added.keys() if byte_level else frozenset()  # their ids
        self._model = {name: value for name, value in tree['model'].items() if name not in ('vocab', 'merges')}
        self.byte_lengths = np.zeros(self.vocab_size, np.int64)
        for index, piece in self._pieces.items():
            self.byte_lengths[index] = self._num_bytes(index, piece)
        self.exact = (
            byte_level
            and tree.get('normalizer') is None
            and all(letter in vocab for letter in ByteLevel.alphabet())
            and not any(token.lstrip or token.rstrip for token in added.values())
            and self._keeps(_PROBE)
            and self._keeps('  ' + _PROBE)
        )

    @classmethod
    def _train(cls, texts: Iterable[str], data: Data, seed: int) -> Self:
        """Reads data.tokenizer_path; nothing is trained."""
        assert data.tokenizer_path is not None, 'config.checks'
        path = Path(data.tokenizer_path)
        file = path / 'tokenizer.json' if path.is_dir() else path
        if not file.is_file():
            near = nearest(file, file.parent.glob('*.json')) or '; it must be a tokenizer.json or its directory'
            raise UserError(f'data.tokenizer_path={data.tokenizer_path}: {file} does not exist{near}')
        return cls(file.read_bytes(), f'data.tokenizer_path={data.tokenizer_path}')

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in _in_chunks(texts, self._library.encode_batch_fast)]

    def _encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        encoded: list[TokensWithOffsets] = []
        for encoding in _in_chunks(texts, self._library.encode_batch):
            begins, ends = zip(*encoding.offsets, strict=True) if encoding.offsets else ((), ())
            encoded.append((encoding.ids, [*begins], [*ends]))
        return encoded

    @functools.cached_property
    def special_names(self) -> dict[str, int]:
        """The names of the special tokens that the file adds to its model's vocabulary, with their ids."""
        added = self._library.get_added_tokens_decoder()
        return {token.content.removeprefix(MARK): index for index, token in added.items() if token.special}

    def id_of(self, name: str) -> int | None:
        found = self._library.token_to_id(MARK + name)
        return self._library.token_to_id(name) if found is None else found

    @functools.cached_property
    def _marking(self) -> Any:
        """The library's tokenizer, which finds hidden special tokens in texts."""
        made = copy.copy(self._library)
        made.encode_special_tokens = False
        return made

    def encode_marked(self, text: str) -> tuple[list[int], np.ndarray]:
        encoding = self._marking.encode(text, add_special_tokens=False)
        return encoding.ids, np.array([end for _, end in encoding.offsets], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self._library.decode(self._ordinary(ids), skip_special_tokens=False)

    @property
    def sentinels(self) -> np.ndarray:
        """The ids of the file's own sentinels, then those of `extended`: int64."""
        return np.append(np.array(self._sentinels, np.int64), super().sentinels)

    def _piece(self, index: int) -> str:
        return self._special_names.get(index) or self.decode([index])

    def _num_bytes(self, index: int, piece: str) -> int:
        """Returns the number of UTF-8 bytes of the text of a piece."""
        if self._is_byte(piece):
            return 1
        prefix, suffix = (self._model.get(mark) or '' for mark in _MARKS)
        text = piece.removeprefix(prefix).removesuffix(suffix)
        return len(text) if index in self._letters else len(text.replace(_SPACE, ' ').encode())

    def _spaced(self, index: int) -> str:
        """Returns the text of a piece, with spaces in place of the vocabulary's marks for them."""
        piece = self._pieces[index]
        if self._is_byte(piece):
            return chr(int(piece[3:5], 16))
        text = piece.translate(_BYTE_SPACES) if index in self._letters else piece.replace(_SPACE, ' ')
        prefix, suffix = (self._model.get(mark) for mark in _MARKS)
        if prefix or self._model.get('type') == 'WordLevel':
            text = text.removeprefix(prefix) if prefix and text.startswith(prefix) else f' {text}'
        return f'{text.removesuffix(suffix)} ' if suffix and text.endswith(suffix) else text

    def _spell(self, index: int) -> bytes | None:
        piece = self._pieces[index]
        if self._is_byte(piece):
            return bytes([int(piece[3:5], 16)])
        if any(map(self._model.get, _MARKS)) or self._model.get('type') == 'WordLevel':
            return None  # spaces stand between such pieces
        if index in self._letters:
            return bytes(map(_BYTES_OF_LETTERS.__getitem__, piece))
        return (piece if self._letters else piece.replace(_SPACE, ' ')).encode()

    def _is_byte(self, piece: str) -> bool:
        return bool(self._model.get('byte_fallback')) and re.fullmatch('<0x[0-9A-F]{2}>', piece) is not None

    @functools.cached_property
    def ordinary(self) -> np.ndarray:
        """Which ids stand for text: no special token of the file, and no id without a token. bool [vocab_size]."""
        ordinary = np.zeros(self.vocab_size, bool)
        ordinary[list(self._pieces)] = True
        return ordinary

    def _keeps(self, text: str) -> bool:
        ids = self.encode(text)
        return self.decode(ids) == text and self.byte_lengths[ids].sum() == len(text.encode())


def _in_chunks(texts: Sequence[str], encode: Callable[..., Any]) -> Iterator[Any]:
    for start in range(0, len(texts), _CHUNK):
        yield from encode(list(texts[start : start + _CHUNK]), add_special_tokens=False)


def _open(stored: bytes, where: str) -> tuple[Any, Json]:
    """Returns the library's tokenizer, with hidden special tokens, and the file's JSON."""
    try:
        import tokenizers
    except ImportError as error:
        needed = "the package tokenizers: pip install 'tformer[hub]'"
        raise UserError(f"data.tokenizer='huggingface' needs {needed}") from error
    try:
        tree = json.loads(stored)
        if not isinstance(tree, dict) or 'vocab' not in tree.get('model', ()):
            raise ValueError('it has no model with a vocabulary')
        with _without_standard_error():
            library = tokenizers.Tokenizer.from_str(json.dumps(_hide_specials(tree), ensure_ascii=False))
            library.encode('a')  # a model that lacks its unknown token fails here
            if library.normalizer is not None:
                library.normalizer.normalize_str(_LETTERS)  # and a damaged table here
    except BaseException as error:  # the library raises plain Exceptions, and a BaseException where it panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = ' '.join(str(error).split())[:200]
        raise UserError(f'{where} is not a tokenizer of the tokenizers library: {reason}') from error
    library.encode_special_tokens = True
    return library, tree


@contextlib.contextmanager
def _without_standard_error() -> Iterator[None]:
    """Drops what the process writes there, as the library does where it panics before it raises."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open('wb') as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _hide_specials(tree: Json) -> Json:
    """Returns `tree` with other names for its special tokens, which texts do not contain, and the same ids.

    `encode_special_tokens` is not enough, because the model's vocabulary often holds these names too.
    """
    model, added = tree['model'], tree.get('added_tokens') or ()
    known = {name for names in NAMES.values() for name in names}
    special = {token['content'] for token in added if token['special'] or token['content'] in known}
    special |= {_unknown(model)} - {None}

    def hide(name: str) -> str:
        return MARK + name if name in special else name

    def apart(merge: str | list[str]) -> bool:
        left, right = merge.split(' ') if isinstance(merge, str) else merge
        whole = left + right.removeprefix(model.get('continuing_subword_prefix') or '')
        return special.isdisjoint((left, right, whole))

    vocab, changed = model['vocab'], Json()
    if isinstance(vocab, list):
        changed['vocab'] = [[hide(piece), score] for piece, score in vocab]
    else:
        changed['vocab'] = {hide(piece): index for piece, index in vocab.items()}
    if model.get('unk_token'):
        changed['unk_token'] = hide(model['unk_token'])
    if 'merges' in model:
        changed |= {'merges': list(filter(apart, model['merges'])), 'dropout': None}
    tokens = [{**token, 'content': hide(token['content']), 'special': token['content'] in special} for token in added]
    plain = {'added_tokens': tokens, 'truncation': None, 'padding': None, 'post_processor': None}
    return {**tree, **plain, 'model': {**model, **changed}}


def _unknown(model: Json) -> str | None:
    """Returns the name of the model's unknown token."""
    if model.get('unk_id') is not None:
        return model['vocab'][model['unk_id']][0]
    return model.get('unk_token') or None


def _ids(
    special: Mapping[str, int], unknown: str | None, declared: Mapping[str, Sequence[str | int]]
) -> dict[str, int | None]:
    """Returns the ids of our special tokens among those of the file, as it is declared, else by their names."""
    known: dict[str | int, int] = {index: index for index in special.values()}
    known |= special.items()
    names = {field: (*declared.get(field, ()), *own) for field, own in NAMES.items()}
    names['unk'] = (unknown or '', *NAMES['unk'])  # that of the model itself
    end = declared.get('eos', ())  # in place of what there is not, as in NAMES
    names |= {field: (*own, *end) for field, own in names.items() if field != 'mask_or_none'}
    return {field: next((known[name] for name in own if name in known), None) for field, own in names.items()}


def _specials(special: Mapping[str, int], ids: Mapping[str, int | None], where: str) -> Specials:
    """Returns our special tokens with those of the file."""
    if ids['eos'] is None:
        own = ', '.join(sorted(special)[:10]) or 'none'
        raise UserError(f'{where} has no special token that ends a text (it has {own}; valid: {", ".join(_END)})')
    return Specials(**ids, others=tuple(sorted(special.items(), key=lambda each: each[1])))  # type: ignore[arg-type]  # all but the mask's names end in those of the end


def _types(component: Json | None) -> Iterator[str]:
    """Yields the types of a pre-tokenizer or decoder, and of the parts of a sequence."""
    if component:
        yield component['type']
        for part in (*component.get('pretokenizers', ()), *component.get('decoders', ())):
            yield from _types(part)
