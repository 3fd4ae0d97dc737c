"""What every tokenizer has: the special ids, 0 to 6, and one interface."""

import abc
import hashlib
from collections.abc import Iterable
from typing import ClassVar, Self

import numpy as np

SPECIALS = ('<pad>', '<bos>', '<eos>', '<unk>', '<mask>', '<cls>', '<sep>')
PAD, BOS, EOS, UNK, MASK, CLS, SEP = range(len(SPECIALS))
FIRST = len(SPECIALS)  # the first ordinary id


class Tokenizer(abc.ABC):
    """One side's vocabulary.

    Attributes:
      vocab_size: number of ids, specials included.
      lossless: whether encoding keeps every character, so that bits per byte mean something.
      byte_lengths: int64 [vocab_size], UTF-8 bytes of text that each id stands for; 0 for specials.
    """

    lossless: ClassVar[bool] = False
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

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ordinary ids; specials, and ids beyond the vocabulary, are skipped."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.dump()).hexdigest()[:16]

    def _ordinary(self, ids: Iterable[int]) -> list[int]:
        return [int(i) for i in ids if FIRST <= i < self.vocab_size]
