"""What every tokenizer has: special ids, normalisation, and one interface."""

import abc
import copy
import dataclasses
import functools
import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import numpy as np

from tformer.config.run import Data
from tformer.errors import UserError, choose

# The special ids of our own tokenizers. Those of the hub have theirs: read `tokenizer.specials`.
SPECIALS = ('<pad>', '<bos>', '<eos>', '<unk>', '<mask>', '<cls>', '<sep>')
PAD, BOS, EOS, UNK, MASK, CLS, SEP = range(len(SPECIALS))
FIRST = len(SPECIALS)  # the first ordinary id


TokensWithOffsets = tuple[list[int], list[int], list[int]]  # ids, first characters, characters after the last


@dataclasses.dataclass(frozen=True)
class Specials:
    """The ids of the special tokens, which need not differ from each other."""

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    unk: int = UNK
    mask_or_none: int | None = MASK
    cls: int = CLS
    sep: int = SEP

    @property
    def mask(self) -> int:
        """The id that hides a token.

        Raises:
          UserError: the vocabulary has none.
        """
        if self.mask_or_none is None:
            raise UserError(
                'the tokenizer has no mask token, which train.objective needs; valid: one with <mask> or [MASK]'
            )
        return self.mask_or_none

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(index for index in dataclasses.astuple(self) if index is not None)


class Tokenizer(abc.ABC):
    """One side's vocabulary.

    Attributes:
      specials: its special ids.
      vocab_size: number of ids, specials included.
      byte_lengths: int64 [vocab_size], UTF-8 bytes of text that each id stands for; 0 for specials.
      normalization: a key of NORMALIZATIONS: what happens to a text before all else.
      num_sentinels: ids at the end of the vocabulary that stand for spans of a text (`extended`).
      exact: whether encoding keeps every character of a normalised text.
    """

    specials: Specials = Specials()
    vocab_size: int
    byte_lengths: np.ndarray
    normalization: str | None = None
    num_sentinels: int = 0
    exact: bool = False

    @property
    def lossless(self) -> bool:
        """Whether encoding keeps every character, so that bits per byte mean something.

        Normalised text is another text, often of fewer bytes: its bits per byte cannot be compared.
        """
        return self.exact and self.normalization is None

    @classmethod
    def train(cls, texts: Iterable[str], data: Data = Data(), seed: int = 0) -> Self:
        """Builds the vocabulary from normalised `texts` as `data` says, or without them where it is fixed."""
        normalize = choose(NORMALIZATIONS, data.normalization, 'data.normalization')
        made = cls._train(map(normalize, texts), data, seed)
        return made.normalized(data.normalization).extended(data.sentinels)

    @classmethod
    @abc.abstractmethod
    def _train(cls, texts: Iterable[str], data: Data, seed: int) -> Self: ...

    @classmethod
    @abc.abstractmethod
    def load(cls, data: bytes) -> Self:
        """The inverse of `dump`."""

    @abc.abstractmethod
    def dump(self) -> bytes:
        """All of the tokenizer but its normalisation and the sentinels it was given, deterministically."""

    def normalized(self, normalization: str | None) -> Self:
        """Returns the tokenizer with another normalisation."""
        tokenizer = copy.copy(self)
        tokenizer.normalization = normalization
        return tokenizer

    def extended(self, num_sentinels: int) -> Self:
        """Returns the tokenizer with so many more ids after all others: no text has them, and they decode to none."""
        tokenizer = copy.copy(self)
        tokenizer.num_sentinels = num_sentinels
        tokenizer.vocab_size = self.vocab_size + num_sentinels
        tokenizer.byte_lengths = np.append(self.byte_lengths, np.zeros(num_sentinels, np.int64))
        tokenizer.ordinary = np.append(self.ordinary, np.zeros(num_sentinels, bool))
        return tokenizer

    @property
    def sentinels(self) -> np.ndarray:
        """int64: the ids that stand for the first, second ... span left out of a text."""
        return np.arange(self.vocab_size - self.num_sentinels, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Ordinary ids; no specials are added, and text that looks like one stays text.

        The unknown token stands for what the vocabulary lacks.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each; many at once are faster."""
        return self._encode_batch(list(map(self.normalize, texts)))

    def normalize(self, text: str) -> str:
        """What `encode` first makes of a text."""
        return NORMALIZATIONS[self.normalization](text)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        """(`encode`, the first character, the one after the last) of each token, in the normalised text.

        Tokens of the bytes of one character all have that character.

        Raises:
          UserError: the tokenizer does not say which characters its tokens stand for.
        """
        return self._encode_with_offsets(list(map(self.normalize, texts)))

    def _encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        if not self.exact:
            raise UserError(
                'tags and answers are places in a text, which a tokenizer that loses characters does not tell: '
                'set data.byte_fallback=True'
            )
        return [(ids, *self._places(text, ids)) for text, ids in zip(texts, self._encode_batch(texts), strict=True)]

    def _places(self, text: str, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The places of tokens that stand for all bytes of the text, in order."""
        ends = np.cumsum(self.byte_lengths[np.asarray(ids, np.int64)])
        begins = np.concatenate(([0], ends[:-1]))[: len(ids)]
        size = np.array([len(character.encode()) for character in text])
        first = np.cumsum(size) - size  # byte of each character
        return (np.searchsorted(first, begins, 'right') - 1).tolist(), np.searchsorted(first, ends).tolist()

    @abc.abstractmethod
    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ordinary ids; specials, and ids beyond the vocabulary, are skipped."""

    def piece(self, index: int) -> str:
        """How one id reads."""
        sentinel = index - self.vocab_size + self.num_sentinels
        return f'<sentinel_{sentinel}>' if 0 <= sentinel < self.num_sentinels else self._piece(index)

    def _piece(self, index: int) -> str:
        return SPECIALS[index] if index < FIRST else self.decode([index])

    @functools.cached_property
    def ordinary(self) -> np.ndarray:
        """bool [vocab_size]: the ids that stand for text."""
        ordinary = np.ones(self.vocab_size, bool)
        ordinary[list(self.specials.ids)] = False
        return ordinary

    @functools.cached_property
    def ordinary_ids(self) -> np.ndarray:
        """int64: the ids that stand for text."""
        return np.flatnonzero(self.ordinary)

    @functools.cached_property
    def sentence_ends(self) -> np.ndarray:
        """bool [vocab_size]: the ordinary ids whose text ends with a full stop, ! or ?, or with a line."""
        ends = np.zeros(self.vocab_size, bool)
        for index in self.ordinary_ids.tolist():
            ends[index] = self.piece(index).rstrip(' ').endswith(('.', '!', '?', '\n'))
        return ends

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """The tokens that begin a word: after whitespace, or with it. Whitespace alone belongs to the word before it.

        Args:
          ids: int [T]; a special token is a word.

        Returns:
          bool [T]; the first token begins one.

        Raises:
          UserError: nothing in the vocabulary says where words begin.
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
        """bool [vocab_size] each: the ids whose text begins with whitespace, ends with it, and is nothing else."""
        opens, closes, blank = np.zeros((3, self.vocab_size), bool)
        for index in self.ordinary_ids.tolist():
            text = self._spaced(index)
            opens[index], closes[index], blank[index] = text[:1].isspace(), text[-1:].isspace(), text.isspace()
        if not (opens | closes).any():
            raise UserError('the tokenizer does not say where words begin, as data.mask_unit=word needs; use token')
        opens |= ~self.ordinary
        return opens, closes, blank

    def _spaced(self, index: int) -> str:
        """The text of an ordinary id, with whitespace at the edges of words."""
        return self._piece(index)

    @property
    def fingerprint(self) -> str:
        given = f'{self.normalization or ""}{self.num_sentinels or ""}'
        return hashlib.sha256(self.dump() + given.encode()).hexdigest()[:16]

    def _ordinary(self, ids: Iterable[int]) -> list[int]:
        given = np.fromiter(ids, np.int64)
        given = given[(given >= 0) & (given < self.vocab_size)]
        return given[self.ordinary[given]].tolist()


def _nfkc_lower(text: str) -> str:
    # Lower case may undo a composition (capital I with a dot above): composed again.
    return unicodedata.normalize('NFKC', unicodedata.normalize('NFKC', text).lower())


# Unicode Standard Annex 15. Lower case, not case folding, which rewrites words (German sharp s becomes ss).
NORMALIZATIONS: dict[str | None, Callable[[str], str]] = {
    None: str,
    'nfc': functools.partial(unicodedata.normalize, 'NFC'),
    'nfkc': functools.partial(unicodedata.normalize, 'NFKC'),
    'nfkc_lower': _nfkc_lower,
}
