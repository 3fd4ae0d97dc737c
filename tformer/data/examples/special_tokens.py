"""The special tokens around the texts of each model family, and the stack that reads each text."""

import dataclasses
from typing import Any

import numpy as np

from tformer.data.tokenizers.vocabulary import Specials

Fields = dict[str, Any]  # of one example: arrays [its length], and values that belong to the whole row


@dataclasses.dataclass(frozen=True)
class SpecialTokenTemplate:
    """The special tokens of one model family. Lengths are listed by stack, the decoder (or the only stack) first."""

    specials: Specials  # of the tokenizer of the predicted tokens
    source: Specials  # of the tokenizer of the encoder's text, where there are two stacks
    bidirectional: bool = True  # a decoder marks the given text as `prefix`, which sees itself whole

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        """Returns the arrays of one or two texts that are read and judged; `inputs` begin with one special token."""
        raise NotImplementedError

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        """Returns the arrays of a text that is to be generated, given another; `ended` adds the end of the text."""
        raise NotImplementedError

    def to_read(self, size: np.ndarray) -> list[np.ndarray]:
        """Returns the lengths in each stack of `read` for texts of `size` tokens; count one more for a second text."""
        return [size + 2]

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        """Returns the lengths in each stack of `write` for these numbers of tokens, the end included."""
        raise NotImplementedError


class EncoderTemplate(SpecialTokenTemplate):
    """CLS a SEP b SEP, with types 0 and 1 (Devlin et al. 2019, figure 2)."""

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        first = _joined(self.specials.cls, text, self.specials.sep)
        if other is None:
            return {'inputs': first}
        second = _joined(other, self.specials.sep) if len(other) else first[:0]
        types = np.repeat(np.array([0, 1], np.int32), [len(first), len(second)])
        return {'inputs': _joined(first, second), 'token_types': types}


class DecoderTemplate(SpecialTokenTemplate):
    """BOS a SEP b EOS (Radford et al. 2018, figure 1). In generation only b is scored, and `prefix` marks the text
    before it (Raffel et al. 2020, section 3.2.1)."""

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        return {'inputs': _both(self.specials, text, other)}

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        specials = self.specials
        whole = _joined(specials.bos, given, specials.sep, wanted, *([specials.eos] if ended else []))
        fields = _predicted(whole, len(given) + 1)
        return {**fields, 'prefix': np.arange(len(whole) - 1) < len(given) + 2} if self.bidirectional else fields

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        return [given + 2 + wanted]


class EncoderDecoderTemplate(SpecialTokenTemplate):
    """given EOS in the encoder; BOS wanted -> wanted EOS in the decoder. Both stacks read a text that is judged (Lewis
    et al. 2020, section 3.1)."""

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        whole = _both(self.specials, text, other)
        return {'encoder_inputs': whole[1:], 'inputs': whole}

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        whole = _joined(self.specials.bos, wanted, *([self.specials.eos] if ended else []))
        return {'encoder_inputs': _joined(given, self.source.eos), **_predicted(whole)}

    def to_read(self, size: np.ndarray) -> list[np.ndarray]:
        return [size + 2, size + 1]

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        return [wanted + 1, given + 1]


def _both(specials: Specials, text: np.ndarray, other: np.ndarray | None) -> np.ndarray:
    """BOS a EOS, or BOS a SEP b EOS."""
    second = _joined(specials.sep, other) if other is not None and len(other) else text[:0]
    return _joined(specials.bos, text, second, specials.eos)


def _predicted(whole: np.ndarray, start: int = 0) -> Fields:
    """Each token of a text predicts the next one, which is scored from position `start` on."""
    weights = (np.arange(len(whole) - 1) >= start).astype(np.float32)
    return {'inputs': whole[:-1], 'targets': whole[1:], 'weights': weights}


def _joined(*parts: np.ndarray | int) -> np.ndarray:
    return np.concatenate([np.atleast_1d(part) for part in parts], dtype=np.int32, casting='unsafe')


TEMPLATES: dict[str, type[SpecialTokenTemplate]] = {
    'encoder': EncoderTemplate,
    'decoder': DecoderTemplate,
    'encoder_decoder': EncoderDecoderTemplate,
}
