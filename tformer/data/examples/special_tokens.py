"""How a family reads texts: the special tokens around them, and the stack that they are in."""

import dataclasses
from typing import Any

import numpy as np

from tformer.data.tokenizers.vocabulary import Specials

Fields = dict[str, Any]  # of one example: arrays [its length], and what a row has one of


@dataclasses.dataclass(frozen=True)
class SpecialTokenTemplate:
    """The template of one stack; lengths are in each stack, the decoder's (or the only one's) first.

    Attributes:
      specials: of the tokens that are predicted.
      source: of the tokens that an encoder beside a decoder reads.
    """

    specials: Specials
    source: Specials

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        """A text, or two, to be judged as a whole or token by token: `inputs` begin with one special token."""
        raise NotImplementedError

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        """A text that is to be written where another is given; `ended` with the end of it."""
        raise NotImplementedError

    def to_read(self, size: np.ndarray) -> list[np.ndarray]:
        """The lengths of a text of `size` tokens to read; a second text takes one more token than it has."""
        return [size + 2]

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        """The lengths of a text of `wanted` tokens and its end to write where `given` tokens are given."""
        raise NotImplementedError


class EncoderTemplate(SpecialTokenTemplate):
    """CLS a SEP b SEP, with types 0 and 1 (Devlin et al. 2019, figure 2)."""

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        specials = self.specials
        first = _joined(specials.cls, text, specials.sep)
        if other is None:
            return {'inputs': first}
        second = _joined(other, specials.sep) if len(other) else first[:0]
        return {'inputs': _joined(first, second), 'token_types': _types(len(first), len(second))}


@dataclasses.dataclass(frozen=True)
class DecoderTemplate(SpecialTokenTemplate):
    """BOS a SEP b EOS (Radford et al. 2018, figure 1): to write, b alone is scored and the rest may see itself whole.

    Attributes:
      bidirectional: what is given is marked as `prefix` (Raffel et al. 2020, 3.2.1).
    """

    bidirectional: bool = True

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        return {'inputs': _both(self.specials, text, other)}

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        specials = self.specials
        whole = _joined(specials.bos, given, specials.sep, wanted, *([specials.eos] if ended else []))
        prefix = np.arange(len(whole) - 1) < len(given) + 2
        fields = {'inputs': whole[:-1], 'targets': whole[1:], 'weights': _scored_after(len(given) + 1, len(whole) - 1)}
        return {**fields, 'prefix': prefix} if self.bidirectional else fields

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        return [given + 2 + wanted]


class EncoderDecoderTemplate(SpecialTokenTemplate):
    """given EOS; BOS wanted -> wanted EOS. A text to judge is read by both, and by the decoder last (Lewis et al. 2020,
    section 3.1)."""

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        whole = _both(self.specials, text, other)
        return {'encoder_inputs': whole[1:], 'inputs': whole}

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        specials = self.specials
        whole = _joined(specials.bos, wanted, *([specials.eos] if ended else []))
        fields = {'inputs': whole[:-1], 'targets': whole[1:], 'weights': np.ones(len(whole) - 1, np.float32)}
        return {'encoder_inputs': _joined(given, self.source.eos), **fields}

    def to_read(self, size: np.ndarray) -> list[np.ndarray]:
        return [size + 2, size + 1]

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        return [wanted + 1, given + 1]


def _both(specials: Specials, text: np.ndarray, other: np.ndarray | None) -> np.ndarray:
    """BOS a EOS, or BOS a SEP b EOS."""
    second = _joined(specials.sep, other) if other is not None and len(other) else text[:0]
    return _joined(specials.bos, text, second, specials.eos)


def _joined(*parts: np.ndarray | int) -> np.ndarray:
    return np.concatenate([np.atleast_1d(part) for part in parts], dtype=np.int32, casting='unsafe')


def _types(first: int, second: int) -> np.ndarray:
    return np.repeat(np.array([0, 1], np.int32), [first, second])


def _scored_after(start: int, size: int) -> np.ndarray:
    return (np.arange(size) >= start).astype(np.float32)


TEMPLATES: dict[str, type[SpecialTokenTemplate]] = {
    'encoder': EncoderTemplate,
    'decoder': DecoderTemplate,
    'encoder_decoder': EncoderDecoderTemplate,
}
