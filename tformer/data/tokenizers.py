"""Text <-> token ids. Ids 0 to 6 are the special tokens of every tokenizer."""

import abc
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from tformer.config.run import Config
from tformer.data.subwords import SentencePiece
from tformer.data.vocabulary import BOS, CLS, EOS, FIRST, MASK, PAD, SEP, SPECIALS, UNK, Tokenizer
from tformer.errors import UserError, choose

__all__ = ['BOS', 'CLS', 'EOS', 'MASK', 'PAD', 'SEP', 'SPECIALS', 'TOKENIZERS', 'UNK', 'Tokenizer', 'Tokenizers']
__all__ += ['train_tokenizers']


class _Listed(Tokenizer):
    """A vocabulary that is a sorted list of the units seen in training."""

    separator: ClassVar[str]

    def __init__(self, units: Sequence[str]) -> None:
        self._units = (*SPECIALS, *units)
        self._ids = {unit: index for index, unit in enumerate(self._units) if index >= FIRST}
        self.vocab_size = len(self._units)
        self.byte_lengths = np.array([0] * FIRST + [len(unit.encode()) for unit in units], np.int64)

    @staticmethod
    @abc.abstractmethod
    def split(text: str) -> Sequence[str]:
        """The units of `text`."""

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 0, model: str = '', seed: int = 0) -> Self:
        return cls(sorted(set().union(*map(cls.split, texts))))

    @classmethod
    def load(cls, data: bytes) -> Self:
        return cls(json.loads(data))

    def dump(self) -> bytes:
        return json.dumps(self._units[FIRST:], ensure_ascii=False, indent=0).encode()

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(unit, UNK) for unit in self.split(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.separator.join(self._units[i] for i in self._ordinary(ids))


class Char(_Listed):
    """The characters of the training split."""

    separator = ''

    @staticmethod
    def split(text: str) -> Sequence[str]:
        return text


class Symbol(_Listed):
    """The whitespace-separated symbols of the training split, e.g. phonemes. Separators have no bytes."""

    separator = ' '

    @staticmethod
    def split(text: str) -> Sequence[str]:
        return text.split()


class Byte(Tokenizer):
    """The 256 bytes of UTF-8 (ByT5, Xue et al. 2022): lossless, nothing to train."""

    lossless = True
    vocab_size = FIRST + 256
    byte_lengths = np.repeat([0, 1], [FIRST, 256])

    @classmethod
    def train(cls, texts: Iterable[str] = (), vocab_size: int = 0, model: str = '', seed: int = 0) -> Self:
        return cls()

    @classmethod
    def load(cls, data: bytes) -> Self:
        return cls()

    def dump(self) -> bytes:
        return b'utf-8'

    def encode(self, text: str) -> list[int]:
        return (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + FIRST).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i - FIRST for i in self._ordinary(ids)).decode(errors='replace')


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of a run."""

    source: Tokenizer | None  # of the encoder's text where there are two stacks; `target` itself where they share one
    target: Tokenizer
    labels: tuple[str, ...] = ()  # classes in the order of their ids; () where there are none

    @property
    def shared(self) -> bool:
        return self.source is self.target

    @property
    def fingerprint(self) -> str:
        parts = [self.source.fingerprint if self.source else '', self.target.fingerprint, *self.labels]
        return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` (which tokenizers, and the labels) and a `tokenizer.SIDE.NAME` for each."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        sides = {'target': self.target} | ({'source': self.source} if self.source and not self.shared else {})
        names = {side: _name(tokenizer) for side, tokenizer in sides.items()}
        for side, tokenizer in sides.items():
            _write(Path(directory, f'tokenizer.{side}.{names[side]}'), tokenizer.dump())
        manifest = {'source': 'target' if self.shared else None, **names, 'labels': self.labels}
        _write(Path(directory, 'tokenizer.json'), json.dumps(manifest, ensure_ascii=False, indent=1).encode())

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> 'Tokenizers':
        """The inverse of `save`.

        Raises:
          UserError: `directory` holds no tokenizer.
        """
        path = Path(directory, 'tokenizer.json')
        if not path.is_file():
            raise UserError(f'{path} does not exist: is {directory} the workdir of a run?')
        try:
            manifest = json.loads(path.read_bytes())
        except ValueError as error:
            raise UserError(f'{path}: {error}') from error

        def read(side: str) -> Tokenizer:
            kind = choose(TOKENIZERS, manifest[side], f'{path}: {side}')
            return kind.load(Path(directory, f'tokenizer.{side}.{manifest[side]}').read_bytes())

        target = read('target')
        if manifest['source'] in (None, 'target'):
            return cls(manifest['source'] and target, target, tuple(manifest['labels']))
        return cls(read('source'), target, tuple(manifest['labels']))


def train_tokenizers(
    config: Config, records: Sequence[dict[str, Any]], pretrained: Tokenizers | None = None
) -> Tokenizers:
    """Returns tokenizers trained on the records of the training split as `config.data` says, or `pretrained` ones.

    A pre-trained run with one stack lends its tokenizer to both sides of two.
    """
    data, seed, objective = config.data, config.train.seed, config.train.objective
    labels = tuple(sorted({record['label'] for record in records})) if objective == 'classification' else ()
    if pretrained is not None:
        source = (pretrained.source or pretrained.target) if objective == 'seq2seq' else None
        return Tokenizers(source, pretrained.target, labels)
    size, model = data.tokenizer_vocab_size, data.tokenizer_model
    target = choose(TOKENIZERS, data.tokenizer, 'data.tokenizer')
    if objective != 'seq2seq':
        return Tokenizers(None, target.train((record['text'] for record in records), size, model, seed), labels)
    if data.source_tokenizer is None:
        both = target.train((record[side] for record in records for side in ('source', 'target')), size, model, seed)
        return Tokenizers(both, both)
    source_kind = choose(TOKENIZERS, data.source_tokenizer, 'data.source_tokenizer')
    return Tokenizers(
        source_kind.train((record['source'] for record in records), size, model, seed),
        target.train((record['target'] for record in records), size, model, seed),
    )


def _name(tokenizer: Tokenizer) -> str:
    return next(name for name, kind in TOKENIZERS.items() if type(tokenizer) is kind)


def _write(path: Path, data: bytes) -> None:
    """Atomically: a killed run leaves the old file or the new one."""
    partial = path.with_name(path.name + '.partial')
    partial.write_bytes(data)
    os.replace(partial, path)


TOKENIZERS: dict[str, type[Tokenizer]] = {
    'char': Char,
    'byte': Byte,
    'symbol': Symbol,
    'sentencepiece': SentencePiece,
}
