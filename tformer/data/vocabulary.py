"""What every tokenizer has: the special ids, 0 to 6, and one interface."""

import abc
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

import numpy as np

SPECIALS = ('<pad>', '<bos>', '<eos>', '<unk>', '<mask>', '<cls>', '<sep>')
PAD, BOS, EOS, UNK, MASK, CLS, SEP = range(len(SPECIALS))
FIRST = len(SPECIALS)  # the first ordinary id


@dataclasses.dataclass(frozen=True)
class Specials:
    """The ids of the special tokens, which need not differ from each other."""

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    unk: int = UNK
    mask: int = MASK
    cls: int = CLS
    sep: int = SEP


class Tokenizer(abc.ABC):
    """One side's vocabulary.

    Attributes:
      specials: its special ids.
      vocab_size: number of ids, specials included.
      lossless: whether encoding keeps every character, so that bits per byte mean something.
      byte_lengths: int64 [vocab_size], UTF-8 bytes of text that each id stands for; 0 for specials.
    """

    lossless: ClassVar[bool] = False
    specials: Specials = Specials()
    vocab_size: int
    byte_lengths: np.ndarray

    @classmethod
    @abc.abstractmethod
    def train(cls, texts: Iterable[str], vocab_size: int, model: str, seed: int) -> Self:
        """Builds the vocabulary. Only SentencePiece heeds `vocab_size`, `model` and `seed`."""

    @classmethod
    @abc.abstractmethod
    def load(cls, data: bytes) -> Self:
        """The inverse of `dump`."""

    @abc.abstractmethod
    def dump(self) -> bytes:
        """All of the tokenizer, deterministically."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ordinary ids; no specials are added (but UNK stands for what the vocabulary lacks)."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ordinary ids; specials, and ids beyond the vocabulary, are skipped."""

    @functools.cached_property
    def ordinary(self) -> np.ndarray:
        """bool [vocab_size]: the ids that stand for text."""
        ordinary = np.ones(self.vocab_size, bool)
        ordinary[list(dataclasses.astuple(self.specials))] = False
        return ordinary

    @functools.cached_property
    def ordinary_ids(self) -> np.ndarray:
        """int64: the ids that stand for text."""
        return np.flatnonzero(self.ordinary)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.dump()).hexdigest()[:16]

    def _ordinary(self, ids: Iterable[int]) -> list[int]:
        return [int(i) for i in ids if FIRST <= i < self.vocab_size]
