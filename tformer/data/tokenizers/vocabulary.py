"""The interface of every tokenizer: special ids, normalisation, encoding and decoding."""

import abc
import copy
import dataclasses
import functools
import hashlib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from tformer.config.run import Data
from tformer.errors import UserError, choose, nearest

# The special ids of our own tokenizers. A hub tokenizer has others: read `tokenizer.specials`.
SPECIALS = ('<pad>', '<bos>', '<eos>', '<unk>', '<mask>', '<cls>', '<sep>')
PAD, BOS, EOS, UNK, MASK, CLS, SEP = range(len(SPECIALS))
FIRST = len(SPECIALS)  # the first ordinary id
MARK = '\ufdd0'  # before the names of special tokens; a noncharacter of Unicode, so texts do not have it

TokensWithOffsets = tuple[list[int], list[int], list[int]]  # ids, first characters, characters after the last


@dataclasses.dataclass(frozen=True)
class Specials:
    """The ids of the special tokens, some of which may be equal."""

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    unk: int = UNK
    mask_or_none: int | None = MASK
    cls: int = CLS
    sep: int = SEP
    others: tuple[tuple[str, int], ...] = ()  # further special tokens by their names, such as languages

    @property
    def mask(self) -> int:
        """The id of the mask token; raises a `UserError` if the vocabulary has none."""
        if self.mask_or_none is None:
            valid = 'valid: one with <mask> or [MASK]'
            raise UserError(f'the tokenizer has no mask token, which train.objective needs; {valid}')
        return self.mask_or_none

    def of(self, names: Iterable[str]) -> list[int]:
        """Returns the ids of special tokens by their names: keys of `NAMES`, or as the vocabulary has them.

        Raises:
          UserError: the vocabulary has no such token.
        """
        known = {**dict(self.others), **{name: getattr(self, name) for name in NAMES}}
        if wrong := [name for name in names if name not in known]:
            raise UserError(f'{wrong[0]!r} is not a special token of the tokenizer{nearest(wrong[0], known)}')
        return [known[name] for name in names]

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all but the `others`."""
        own = (*(getattr(self, name) for name in NAMES), self.mask_or_none)
        return frozenset(index for index in own if index is not None)


NAMES = ('bos', 'eos', 'pad', 'cls', 'sep', 'unk')  # of the special tokens that every tokenizer has


class Tokenizer(abc.ABC):
    """The vocabulary of one side, and its encoding."""

    specials: Specials = Specials()
    vocab_size: int  # special ids included
    byte_lengths: np.ndarray  # int64 [vocab_size], the UTF-8 bytes of the text of each id; 0 for special ids
    normalization: str | None = None  # a key of NORMALIZATIONS, applied to each text first
    fallback: Sequence[int] = ()  # ids of bytes that spell what the vocabulary lacks
    num_sentinels: int = 0  # ids at the end of the vocabulary that stand for spans of a text (`extended`)
    exact: bool = False  # whether encoding keeps every character of a normalised text
    declared: Mapping[str, Sequence[str]] | None = None  # fields of `specials` -> [its name], where no name shows them
    fields: tuple[str, ...] = ()  # the fields of config.data that its training reads and some others' do not

    def __init__(self, stored: bytes) -> None:
        self._stored = stored

    @property
    def lossless(self) -> bool:
        """Whether bits per byte are defined: encoding keeps every character, and no normalisation changes one."""
        return self.exact and self.normalization is None

    @classmethod
    def train(cls, texts: Iterable[str], data: Data = Data(), seed: int = 0) -> Self:
        """Returns a tokenizer trained on the normalised `texts` by the settings of `data`; a fixed one ignores them."""
        normalize = choose(NORMALIZATIONS, data.normalization, 'data.normalization')
        made = cls._train(map(normalize, texts), data, seed)
        return made.normalized(data.normalization).extended(data.sentinels)

    @classmethod
    @abc.abstractmethod
    def _train(cls, texts: Iterable[str], data: Data, seed: int) -> Self: ...

    @classmethod
    def load(cls, stored: bytes) -> Self:
        """The inverse of `dump`."""
        return cls(stored)

    def dump(self) -> bytes:
        """Returns the tokenizer as bytes, always the same ones, without its normalisation and `extended` sentinels."""
        return self._stored

    def normalized(self, normalization: str | None) -> Self:
        """Returns the tokenizer with another normalisation."""
        tokenizer = copy.copy(self)
        tokenizer.normalization = normalization
        return tokenizer

    def extended(self, num_sentinels: int) -> Self:
        """Returns the tokenizer with more ids at the end, which occur in no text and decode to nothing."""
        tokenizer = copy.copy(self)
        tokenizer.num_sentinels = num_sentinels
        tokenizer.vocab_size = self.vocab_size + num_sentinels
        tokenizer.byte_lengths = np.append(self.byte_lengths, np.zeros(num_sentinels, np.int64))
        tokenizer.ordinary = np.append(self.ordinary, np.zeros(num_sentinels, bool))
        return tokenizer

    @property
    def sentinels(self) -> np.ndarray:
        """The ids that stand for the first, second ... span left out of a text: int64."""
        return np.arange(self.vocab_size - self.num_sentinels, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; the unknown token, for parts that the vocabulary lacks, is the only special one.

        Text that spells a special token stays text.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of each text; many at once are faster."""
        return self._encode_batch(list(map(self.normalize, texts)))

    def unknown(self, texts: Iterable[str]) -> list[str]:
        """Returns the characters or symbols of texts that the vocabulary lacks: unknown, or only spelt as bytes."""
        units = sorted({unit for text in texts for unit in self._split(self.normalize(text))})
        lacking = {self.specials.unk, *self.fallback}
        return [unit for unit, ids in zip(units, self._encode_batch(units), strict=True) if lacking & {*ids}]

    @classmethod
    def _split(cls, text: str) -> Sequence[str]:
        return text

    def normalize(self, text: str) -> str:
        """Returns the normalised text, which `encode` encodes."""
        return NORMALIZATIONS[self.normalization](text)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        """Returns for each text its ids, and the first character and the one after the last of each token.

        Characters are those of the normalised text. All byte tokens of one character have that character. A tokenizer
        that loses characters is a `UserError`.
        """
        return self._encode_with_offsets(list(map(self.normalize, texts)))

    def _encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        if not self.exact:
            problem = 'tags and answers are positions in a text, and this tokenizer loses characters'
            raise UserError(f'{problem}: set data.byte_fallback=True')
        return [(ids, *self._places(text, ids)) for text, ids in zip(texts, self._encode_batch(texts), strict=True)]

    def _places(self, text: str, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the first and last characters of tokens that cover all bytes of the text in order."""
        sizes = self.byte_lengths[np.asarray(ids, np.int64)]
        ends = np.cumsum(sizes)
        size = np.array([len(character.encode()) for character in text])
        first = np.cumsum(size) - size  # byte of each character
        return (np.searchsorted(first, ends - sizes, 'right') - 1).tolist(), np.searchsorted(first, ends).tolist()

    @functools.cached_property
    def special_names(self) -> dict[str, int]:
        """The names of special tokens, with their ids."""
        return {name: index for index, name in enumerate(SPECIALS)}

    def id_of(self, name: str) -> int | None:
        """Returns the id of a token by its name; None where there is none."""
        return self.special_names.get(name)

    @functools.cached_property
    def special_pattern(self) -> str:
        """A regular expression of the names of special tokens, which prefers the longest; without any it finds none."""
        return '|'.join(map(re.escape, sorted(self.special_names, key=len, reverse=True))) or '(?!)'

    def encode_marked(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the ids of a text in which MARK and a name are that special token, and the characters up to the end
        of each, int [T]. The text is not normalised. Where the tokenizer loses characters, tokens end with the text
        between special ones."""
        ids: list[int] = []
        ends: list[int] = []
        start = 0
        for piece in re.split(f'({MARK}(?:{self.special_pattern}))', text):
            if piece.startswith(MARK):
                tokens, stops = [self.special_names[piece[1:]]], [len(piece)]
            elif self.exact:
                [(tokens, _, stops)] = self._encode_with_offsets([piece])
            else:
                [tokens] = self._encode_batch([piece])
                stops = [len(piece)] * len(tokens)
            ids += tokens
            ends += [start + stop for stop in stops]
            start += len(piece)
        return ids, np.array(ends, np.int64)

    @abc.abstractmethod
    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ordinary ids; special ids, and ids beyond the vocabulary, are skipped."""

    def piece(self, index: int) -> str:
        """Returns one id as readable text."""
        sentinel = index - self.vocab_size + self.num_sentinels
        return f'<sentinel_{sentinel}>' if 0 <= sentinel < self.num_sentinels else self._piece(index)

    def _piece(self, index: int) -> str:
        return SPECIALS[index] if index < FIRST else self.decode([index])

    def spell(self, index: int) -> bytes | None:
        """Returns the bytes that an id adds behind other text; None where it adds none, or none by itself alone."""
        return (self._spell(index) or None) if self.ordinary[index] else None

    def _spell(self, index: int) -> bytes | None:
        text = self.decode([index])
        return None if '\ufffd' in text else text.encode()  # a part of a character

    @functools.cached_property
    def strips_first_space(self) -> bool:
        """Whether decoding leaves out a space that a text begins with."""
        spaced = (i for i in self.ordinary_ids.tolist() if (self.spell(i) or b'').startswith(b' '))
        return any(not self.decode([i]).startswith(' ') for i in itertools.islice(spaced, 300))  # not a space as a byte

    @functools.cached_property
    def ordinary(self) -> np.ndarray:
        """Which ids stand for text: bool [vocab_size]."""
        ordinary = np.ones(self.vocab_size, bool)
        ordinary[list(self.specials.ids)] = False
        return ordinary

    @functools.cached_property
    def ordinary_ids(self) -> np.ndarray:
        """The ids that stand for text: int64."""
        return np.flatnonzero(self.ordinary)

    @functools.cached_property
    def sentence_ends(self) -> np.ndarray:
        """Which ids have a text that ends with a full stop, !, ? or a line end: bool [vocab_size]."""
        ends = np.zeros(self.vocab_size, bool)
        for index in self.ordinary_ids.tolist():
            ends[index] = self.piece(index).rstrip(' ').endswith(('.', '!', '?', '\n'))
        return ends

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Marks the tokens of `ids`, int [T], that begin a word, after whitespace or with it: bool [T].

        The first token begins a word, and each special token is one. Whitespace alone belongs to the word before it. A
        vocabulary that does not show where words begin is a `UserError`.
        """
        opens, closes, blank = self._word_edges
        starts = opens[ids]
        starts[1:] |= closes[ids[:-1]]
        starts &= ~blank[ids]
        starts[1:] |= ~self.ordinary[ids[:-1]]
        starts[:1] = True
        return starts

    @functools.cached_property
    def _word_edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which ids have a text that begins with, ends with, or is only whitespace: bool [vocab_size] each."""
        opens, closes, blank = np.zeros((3, self.vocab_size), bool)
        for index in self.ordinary_ids.tolist():
            text = self._spaced(index)
            opens[index], closes[index], blank[index] = text[:1].isspace(), text[-1:].isspace(), text.isspace()
        if not (opens | closes).any():
            needed = 'a tokenizer that shows where words begin'
            raise UserError(f'data.mask_unit=word needs {needed}; use data.mask_unit=token')
        opens |= ~self.ordinary
        return opens, closes, blank

    @functools.cached_property
    def space_leads(self) -> bool:
        """Whether a space belongs to the token after it, so that a mask of that token stands for the space, too."""
        return any(len(text) > 1 and text[0] == ' ' for text in map(self._spaced, self.ordinary_ids.tolist()))

    def _spaced(self, index: int) -> str:
        """Returns the text of an ordinary id, with whitespace at the edges of words."""
        return self._piece(index)

    @property
    def fingerprint(self) -> str:
        given = f'{self.normalization or ""}{self.num_sentinels or ""}{self.declared or ""}'
        return hashlib.sha256(self.dump() + given.encode()).hexdigest()[:16]

    def _ordinary(self, ids: Iterable[int]) -> list[int]:
        given = np.fromiter(ids, np.int64)
        given = given[(given >= 0) & (given < self.vocab_size)]
        return given[self.ordinary[given]].tolist()


def _nfkc_lower(text: str) -> str:
    # Lowering may undo a composition (capital I with a dot above), so the text is composed again.
    return unicodedata.normalize('NFKC', unicodedata.normalize('NFKC', text).lower())


# Unicode Standard Annex 15. Lower case, not case folding, which rewrites words (German sharp s becomes ss).
NORMALIZATIONS: dict[str | None, Callable[[str], str]] = {
    None: str,
    'nfc': functools.partial(unicodedata.normalize, 'NFC'),
    'nfkc': functools.partial(unicodedata.normalize, 'NFKC'),
    'nfkc_lower': _nfkc_lower,
}
