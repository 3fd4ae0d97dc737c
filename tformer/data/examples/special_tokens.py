"""The special tokens around the texts of each model family, and the stack that reads each text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer.config.run import Config, Data
from tformer.config.tasks import TASKS
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import Specials
from tformer.errors import choose

Fields = dict[str, Any]  # of one example: arrays [its length], and values that belong to the whole row


@dataclasses.dataclass(frozen=True)
class SpecialTokenTemplate:
    """The special tokens of one model family. Lengths are listed by stack, the decoder (or the only stack) first."""

    specials: Specials  # of the tokenizer of the predicted tokens
    source: Specials  # of the tokenizer of the encoder's text, where there are two stacks
    bidirectional: bool = True  # a decoder marks the given text as `prefix`, which sees itself whole
    start: tuple[str, ...] = Data.start  # the names of the special tokens before a decoder's text
    source_start: tuple[str, ...] = Data.source_start  # likewise before an encoder's text, where there are two stacks
    source_end: tuple[str, ...] = Data.source_end  # and after it
    end: tuple[str, ...] = Data.end  # after a decoder's text that is judged
    separator: tuple[str, ...] = Data.separator  # between two texts that are judged

    @property
    def front(self) -> list[int]:
        """The special tokens with which `inputs` begin."""
        return self.specials.of(self.start)

    @property
    def back(self) -> list[int]:
        """The special tokens with which `inputs` end where a text is judged."""
        return self.specials.of(self.end)

    @property
    def between(self) -> list[int]:
        """The special tokens between two texts that are judged."""
        return self.specials.of(self.separator)

    def prompt(self, text: Sequence[int]) -> list[int]:
        """Returns a text as a decoder continues it: with the tokens that stand in front, and BOS if it is empty."""
        return [*self.front, *text] or [self.specials.bos]

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a given text."""
        raise NotImplementedError

    def given(self, text: Sequence[int]) -> list[int]:
        """Returns a text as it is read before another is written."""
        before, after = self.around
        return [*before, *text, *after]

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        """Returns the arrays of one or two texts that are read and judged; `inputs` begin with `front`, end with `back`
        and are one token at least."""
        raise NotImplementedError

    def _both(
        self, before: Sequence[int], text: np.ndarray, other: np.ndarray | None, after: Sequence[int]
    ) -> np.ndarray:
        """before a after, or before a SEP b after; EOS where that is nothing."""
        second = _joined(self.between, other) if other is not None and len(other) else text[:0]
        whole = _joined(before, text, second, after)
        return whole if len(whole) else _joined(self.specials.eos)

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        """Returns the arrays of a text that is to be generated, given another; `ended` adds the end of the text."""
        raise NotImplementedError

    def proceed(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        """Returns the arrays of a text that goes on where the given one stops; its own tokens are scored."""
        whole = _joined(self.front, given, wanted, *([self.specials.eos] if ended else []))
        return _predicted(whole, len(self.front) + len(given) - 1)

    def to_read(self, size: np.ndarray) -> list[np.ndarray]:
        """Returns the lengths in each stack of `read` for texts of `size` tokens, those `between` two included."""
        return [np.maximum(size + len(self.front) + len(self.back), 1)]

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        """Returns the lengths in each stack of `write` for these numbers of tokens, the end included."""
        raise NotImplementedError

    def beside(self) -> list[int]:
        """Returns how many tokens of each stack `write` adds to a given text and to a wanted one with its end."""
        return [int(length) for length in self.to_write(np.array(0), np.array(-1))]


class EncoderTemplate(SpecialTokenTemplate):
    """CLS a SEP b SEP, with types 0 and 1 (Devlin et al. 2019, figure 2). data.separator are the tokens in place of the
    first SEP."""

    @property
    def front(self) -> list[int]:
        return [self.specials.cls]

    @property
    def back(self) -> list[int]:
        return [self.specials.sep]

    def prompt(self, text: Sequence[int]) -> list[int]:
        return [*self.front, *text, *self.back]

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        if other is None:
            return {'inputs': _joined(self.front, text, self.back)}
        first = _joined(self.front, text, self.between if len(other) else self.back)
        second = _joined(other, self.back) if len(other) else first[:0]
        types = np.repeat(np.array([0, 1], np.int32), [len(first), len(second)])
        return {'inputs': _joined(first, second), 'token_types': types}


class DecoderTemplate(SpecialTokenTemplate):
    """BOS a SEP b EOS (Radford et al. 2018, figure 1). In generation only b is scored, and `prefix` marks the text
    before it (Raffel et al. 2020, section 3.2.1). data.start are the tokens in place of BOS; of a text that is judged,
    data.separator are those in place of SEP, and data.end those in place of EOS."""

    @property
    def around(self) -> tuple[list[int], list[int]]:
        return self.front, [self.specials.sep]

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        return {'inputs': self._both(self.front, text, other, self.back)}

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        before, after = self.around
        whole = _joined(before, given, after, wanted, *([self.specials.eos] if ended else []))
        first = len(before) + len(given) + len(after)
        fields = _predicted(whole, first - 1)
        return {**fields, 'prefix': np.arange(len(whole) - 1) < first} if self.bidirectional else fields

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        return [len(self.front) + given + 1 + wanted]


class EncoderDecoderTemplate(SpecialTokenTemplate):
    """given EOS in the encoder; BOS wanted -> wanted EOS in the decoder. Both stacks read a text that is judged (Lewis
    et al. 2020, section 3.1). data.start are the tokens in place of BOS, data.source_start stand before `given`, and
    data.source_end in place of its EOS. If there are two or more of the first, the decoder is given all of them, and
    none is scored. data.end are the tokens in place of EOS behind a text that is judged, in the decoder."""

    @property
    def around(self) -> tuple[list[int], list[int]]:
        return self.source.of(self.source_start), self.source.of(self.source_end)

    def read(self, text: np.ndarray, other: np.ndarray | None = None) -> Fields:
        before = self.specials.of(self.source_start)
        given = self._both(before, text, other, [self.specials.eos])
        return {'encoder_inputs': given, 'inputs': self._both(self.front, text, other, self.back)}

    def write(self, given: np.ndarray, wanted: np.ndarray, ended: bool = True) -> Fields:
        before, after = self.around
        whole = _joined(self.front, wanted, *([self.specials.eos] if ended else []))
        return {'encoder_inputs': _joined(before, given, after), **_predicted(whole, len(self.front) - 1)}

    def to_read(self, size: np.ndarray) -> list[np.ndarray]:
        return [*super().to_read(size), size + len(self.source_start) + 1]

    def to_write(self, given: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
        return [len(self.front) + wanted, len(self.source_start) + given + len(self.source_end)]


def _predicted(whole: np.ndarray, start: int = 0) -> Fields:
    """Each token of a text predicts the next one, which is scored from position `start` on."""
    weights = (np.arange(len(whole) - 1) >= start).astype(np.float32)
    return {'inputs': whole[:-1], 'targets': whole[1:], 'weights': weights}


def _joined(*parts: np.ndarray | Sequence[int] | int) -> np.ndarray:
    return np.concatenate([np.atleast_1d(part) for part in parts], dtype=np.int32, casting='unsafe')


TEMPLATES: dict[str, type[SpecialTokenTemplate]] = {
    'encoder': EncoderTemplate,
    'decoder': DecoderTemplate,
    'encoder_decoder': EncoderDecoderTemplate,
}


def marks_prefix(config: Config) -> bool:
    """Returns whether the rows of a run have `prefix`: a given text, which a decoder sees whole."""
    task = choose(TASKS, config.train.objective, 'train.objective')
    return config.model.family == 'decoder' and task.prefix and config.data.bidirectional_prefix


def template_of(config: Config, tokenizers: Tokenizers) -> SpecialTokenTemplate:
    """Returns the template of a run, which its examples, its prompts and its batches of texts share."""
    data, specials = config.data, tokenizers.target.specials
    source = (tokenizers.source or tokenizers.target).specials
    family = TEMPLATES[config.model.family]
    sources = data.source_start, data.source_end
    return family(specials, source, data.bidirectional_prefix, data.start, *sources, data.end, data.separator)
