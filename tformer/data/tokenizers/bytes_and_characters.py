"""Tokenizers of bytes, of characters, and of symbols between whitespace."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

import numpy as np

from tformer.config.run import Data
from tformer.data.tokenizers.vocabulary import FIRST, UNK, Tokenizer, TokensWithOffsets

BYTES = 256


class Byte(Tokenizer):
    """The 256 bytes of UTF-8 (ByT5, Xue et al. 2022): lossless, with nothing to train."""

    exact = True
    vocab_size = FIRST + BYTES
    byte_lengths = np.repeat([0, 1], [FIRST, BYTES])

    def __init__(self, stored: bytes = b'utf-8') -> None:
        super().__init__(stored)

    @classmethod
    def _train(cls, texts: Iterable[str], data: Data, seed: int) -> Self:
        return cls()

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [(np.frombuffer(text.encode(), np.uint8).astype(int) + FIRST).tolist() for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return _text_of(self._ordinary(ids))

    def _spell(self, index: int) -> bytes:
        return bytes([index - FIRST])


class _Listed(Tokenizer):
    """A sorted list of the units of the training split, after the 256 bytes if these encode unknown units."""

    fields = ('byte_fallback',)
    separator: ClassVar[str]

    def __init__(self, units: Sequence[str], byte_fallback: bool = False) -> None:
        self._units, self._byte_fallback = tuple(units), byte_fallback
        # A bare list without bytes: the form of all files before byte_fallback existed.
        kept = {'units': self._units} if byte_fallback else self._units
        super().__init__(json.dumps(kept, ensure_ascii=False, indent=0).encode())
        self._first = FIRST + BYTES * byte_fallback  # the id of the first unit
        self.fallback = range(FIRST, self._first)
        self._ids = {unit: index for index, unit in enumerate(units, self._first)}
        self.vocab_size = self._first + len(units)
        self.exact = byte_fallback and not self.separator  # a separator may have been any whitespace
        lengths = [0] * FIRST + [1] * BYTES * byte_fallback + [len(unit.encode()) for unit in units]
        self.byte_lengths = np.array(lengths, np.int64)

    @classmethod
    def _split(cls, text: str) -> Sequence[str]:
        return text.split() if cls.separator else text

    @classmethod
    def _train(cls, texts: Iterable[str], data: Data, seed: int) -> Self:
        return cls(sorted(set().union(*map(cls._split, texts))), data.byte_fallback)

    @classmethod
    def load(cls, stored: bytes) -> Self:
        kept = json.loads(stored)
        return cls(kept) if isinstance(kept, list) else cls(kept['units'], byte_fallback=True)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode_units(self._split(text)) for text in texts]

    def _encode_units(self, units: Sequence[str]) -> list[int]:
        ids = list(map(self._ids.get, units))
        if None not in ids:
            return ids  # type: ignore[return-value]
        encoded: list[int] = []
        for known, run in itertools.groupby(units, self._ids.__contains__):
            if known:
                encoded += [self._ids[unit] for unit in run]
            elif self._byte_fallback:  # with the separator between them, so that two unknown symbols stay apart
                encoded += [byte + FIRST for byte in self.separator.join(run).encode()]
            else:
                encoded += [UNK for _ in run]
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for is_byte, run in itertools.groupby(self._ordinary(ids), lambda index: index < self._first):
            if is_byte:
                parts.append(_text_of(run))
            else:
                parts += [self._units[index - self._first] for index in run]
        return self.separator.join(parts)

    def _spell(self, index: int) -> bytes | None:
        if index >= self._first:
            return (self.separator + self._units[index - self._first]).encode()
        return None if self.separator else bytes([index - FIRST])  # between bytes stands no separator

    def _spaced(self, index: int) -> str:
        text = self._piece(index)
        return text if index < self._first else f'{self.separator}{text}{self.separator}'


class Char(_Listed):
    """The characters of the training split; lossless if bytes encode the other characters."""

    separator = ''

    def _encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        if self.exact:
            return super()._encode_with_offsets(texts)
        return [(self._encode_units(text), [*range(len(text))], [*range(1, len(text) + 1)]) for text in texts]


class Symbol(_Listed):
    """The whitespace-separated symbols of the training split, e.g. phonemes. Separators count no bytes."""

    separator = ' '

    def _encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        """The bytes of an unknown symbol have the symbol's offsets; a space between two unknown symbols has its own."""
        encoded: list[TokensWithOffsets] = []
        for text in texts:
            tokens: list[tuple[int, int, int]] = []
            stop, in_bytes = 0, False
            for symbol in re.finditer(r'\S+', text):
                spelt = self._byte_fallback and symbol[0] not in self._ids
                if spelt and in_bytes:
                    tokens.append((FIRST + ord(self.separator), stop, symbol.start()))
                tokens += [(token, *symbol.span()) for token in self._encode_units([symbol[0]])]
                stop, in_bytes = symbol.end(), spelt
            ids, begins, ends = zip(*tokens, strict=True) if tokens else ((), (), ())
            encoded.append(([*ids], [*begins], [*ends]))
        return encoded


def _text_of(byte_ids: Iterable[int]) -> str:
    return bytes(index - FIRST for index in byte_ids).decode(errors='replace')
