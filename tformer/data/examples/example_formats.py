"""A split as examples: which of its tokens make one, and what a model reads and is to say of it, by its objective."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tformer.config.run import Config, Data
from tformer.config.tasks import TASKS
from tformer.data.examples import corrupt, denoisers, sentences, tokenized
from tformer.data.examples.corrupt import Noise
from tformer.data.examples.spans import (
    Columns,
    Lengths,
    Spans,
    beginning,
    both_sides,
    in_pieces,
    in_pieces_to_the_end,
    windows,
)
from tformer.data.examples.special_tokens import TEMPLATES, DecoderTemplate, Fields, SpecialTokenTemplate
from tformer.data.ragged import Ragged
from tformer.data.sources.records import Record
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError, choose


@dataclasses.dataclass(frozen=True)
class Examples:
    """Example i is `start[i]:stop[i]` of the tokens of record `record[i]`, or of what is predicted, t1..tn EOS."""

    columns: Mapping[str, Ragged]  # of each record, by the form's encoding
    template: SpecialTokenTemplate
    record: np.ndarray  # int [N]
    start: np.ndarray  # int [N]
    stop: np.ndarray  # int [N]
    lengths: np.ndarray  # int [N, stacks]: positions that the example takes in a row of each stack, at most
    num_dropped: int  # records left out because they are over the length
    num_truncated: int  # records that are not seen whole
    num_skipped: int  # records left out as bad
    fingerprint: str  # of the records, as tokens

    def __len__(self) -> int:
        return len(self.record)

    @property
    def tokens(self) -> Ragged:
        """Of each record: the text, or the target side."""
        return self.columns['tokens']

    def of(self, column: str, index: int) -> np.ndarray:
        """What a column holds for the record of an example."""
        return self.columns[column][self.record[index]]


def make(config: Config, tokenizers: Tokenizers, records: Sequence[Record], split: str, training: bool) -> Examples:
    """Tokenises all `records`, or finds their tokens in the cache, and cuts, drops or truncates to the length.

    Objectives on running text see all of a long one, in pieces as long as the rows of every stack allow. With the
    others `data.overlong` decides about overlong training examples, and evaluation truncates them.

    Raises:
      UserError: a record that cannot be used, too few sentinels, or no example within the length.
    """
    data, example_format = config.data, format_of(config)
    found = tokenized.columns(config, tokenizers, example_format.encoding, records, split)
    template = template_of(config, tokenizers)
    spans = example_format.cut(found.by_name, example_format.lengths, template, data)
    if example_format.num_sentinels is not None:
        most = example_format.num_sentinels((spans.stop - spans.start).max(initial=0, keepdims=True), data)
        corrupt.check_sentinels(int(most.max()), tokenizers.target.sentinels)
    drop = training and choose(OVERLONG, data.overlong, 'data.overlong')
    left_out = spans.overlong.copy() if drop else np.zeros(len(spans.overlong), bool)
    dropped = int(left_out.sum())
    left_out[found.bad] = True
    keep = ~left_out[spans.record]
    if not keep.any():
        raise UserError(f'the {split} split has no example within data.length={data.length} tokens')
    return Examples(
        found.by_name,
        template,
        spans.record[keep], spans.start[keep], spans.stop[keep], np.stack(spans.lengths, axis=1)[keep],
        num_dropped=dropped,
        num_truncated=0 if drop else int(spans.overlong.sum()),
        num_skipped=found.skipped + len(found.bad),
        fingerprint=found.fingerprint,
    )  # fmt: skip


def format_of(config: Config) -> 'ExampleFormat':
    """The form of a run's examples."""
    task = choose(TASKS, config.train.objective, 'train.objective')
    two_stacks = config.model.family == 'encoder_decoder'
    return FORMATS[(two_stacks and task.two_stack_format) or task.format]


def template_of(config: Config, tokenizers: Tokenizers) -> SpecialTokenTemplate:
    """The template of a run's examples."""
    made = TEMPLATES[config.model.family]
    specials = tokenizers.target.specials, (tokenizers.source or tokenizers.target).specials
    return DecoderTemplate(*specials, config.data.bidirectional_prefix) if made is DecoderTemplate else made(*specials)


# ------------------------------------------------------------------------------------------------------------- fields


def next_token(examples: Examples, index: int, noise: Noise) -> Fields:
    """BOS t1..tn -> t1..tn EOS, or a piece of it: a later piece starts with the last target of the one before."""
    tokens, start, stop = examples.of('tokens', index), examples.start[index], examples.stop[index]
    piece = tokens[max(start - 1, 0) : stop]
    whole = np.empty(stop - start + 1, np.int32)
    whole[int(start == 0) :][: len(piece)] = piece
    if start == 0:
        whole[0] = examples.template.specials.bos
    if stop > len(tokens):
        whole[-1] = examples.template.specials.eos
    return {'inputs': whole[:-1], 'targets': whole[1:], 'weights': np.ones(stop - start, np.float32)}


def translate(examples: Examples, index: int, noise: Noise) -> Fields:
    """The target, given the source. A truncated target has no end: nothing teaches to stop where it was cut."""
    tokens, stop = examples.of('tokens', index), int(examples.stop[index])
    wanted, lengths = tokens[:stop], examples.lengths[index]
    given = lengths[0] - 1 - stop if len(lengths) == 1 else lengths[1] - 1
    return examples.template.write(examples.of('sources', index)[:given], wanted, ended=stop > len(tokens))


def unmask(examples: Examples, index: int, noise: Noise) -> Fields:
    """A text, corrupted -> the original, scored where a token was selected."""
    fields = examples.template.read(_piece(examples, index))
    return _masked(fields, noise)


def unmask_next(examples: Examples, index: int, noise: Noise) -> Fields:
    """Two sentences, corrupted -> the originals, and whether the second one follows the first in their text."""

    def other() -> np.ndarray:
        own = np.searchsorted(examples.record, examples.record[index] + np.arange(2))  # pieces of a text are neighbours
        return _piece(examples, sentences.another(range(*own), len(examples), noise.rng))

    text = _piece(examples, index)
    ends, room = noise.tokenizer.sentence_ends, max(len(text), 2)
    first, second, label = sentences.next_sentence(text, ends, room, noise.rng, other)
    return _masked_pair(examples, first, second, label, noise)


def unmask_order(examples: Examples, index: int, noise: Noise) -> Fields:
    """Two sentences that meet, corrupted -> the originals, and whether they are in order."""
    text = _piece(examples, index)
    ends, room = noise.tokenizer.sentence_ends, max(len(text), 2)
    first, second, label = sentences.sentence_order(text, ends, room, noise.rng)
    return _masked_pair(examples, first, second, label, noise)


def classify(examples: Examples, index: int, noise: Noise) -> Fields:
    """A text, or two, and their class or number."""
    (label,) = examples.of('label', index)
    first, second = _shortened(
        examples.of('tokens', index), examples.of('second_text', index), int(examples.stop[index])
    )
    return {**examples.template.read(first, second), 'labels': label, 'label_weights': np.float32(1)}


def tag(examples: Examples, index: int, noise: Noise) -> Fields:
    """Words and their tags, each at the first token of its word."""
    stop = examples.stop[index]
    fields = examples.template.read(examples.of('tokens', index)[:stop])
    words, tags = examples.of('words', index)[:stop], examples.of('tags', index)
    targets, weights = np.zeros(len(fields['inputs']), np.int32), np.zeros(len(fields['inputs']), np.float32)
    places = np.flatnonzero(words >= 0)
    targets[places + 1], weights[places + 1] = tags[words[places]], 1
    return {**fields, 'targets': targets, 'weights': weights}


def find_answer(examples: Examples, index: int, noise: Noise) -> Fields:
    """A question and a window of its context. `labels` are the first and last token of the answer, both 0 where it is
    not in the window; `weights` mark what may be one of them: the context, and position 0."""
    start, stop = examples.start[index], examples.stop[index]
    question = examples.of('second_text', index)[: noise.data.question_length]
    fields = examples.template.read(question, examples.of('tokens', index)[start:stop])
    first = len(question) + 2
    place = np.arange(len(fields['inputs']))
    answer = examples.of('answer', index)
    inside = len(answer) > 0 and start <= answer[0] and answer[1] < stop
    labels = answer - start + first if inside else np.zeros(2)
    return {
        **fields,
        'weights': ((place == 0) | ((place >= first) & (place < first + stop - start))).astype(np.float32),
        'labels': labels.astype(np.int32),
        'label_weights': np.float32(1),
    }


def continue_prefix(examples: Examples, index: int, noise: Noise) -> Fields:
    """As `next_token`; a prefix of 1 to all inputs is seen from everywhere, and what comes after it is scored."""
    fields = next_token(examples, index, noise)
    size = int(noise.rng.integers(1, len(fields['inputs']) + 1))
    place = np.arange(len(fields['inputs']))
    fields['weights'] = (place >= size - 1).astype(np.float32)
    return {**fields, 'prefix': place < size} if noise.data.bidirectional_prefix else fields


def continue_text(examples: Examples, index: int, noise: Noise) -> Fields:
    """The rest of a text, given a beginning of 1 token to all but one."""
    sentinels = noise.tokenizer.sentinels
    return examples.template.write(
        *denoisers.SequentialDenoiser().corrupt(_piece(examples, index), noise.rng, sentinels)
    )


def fill_spans(examples: Examples, index: int, noise: Noise) -> Fields:
    """The sentinels, each with its span, given a text with sentinels for spans."""
    data, sentinels = noise.data, noise.tokenizer.sentinels
    text = _piece(examples, index)
    return examples.template.write(
        *corrupt.corrupt_spans(text, noise.rng, sentinels, data.mask_rate, data.mean_span_length)
    )


def denoise(examples: Examples, index: int, noise: Noise) -> Fields:
    """A text, given its corruption."""
    given = wanted = _piece(examples, index)
    for kind in noise.data.noise:
        given = corrupt.NOISES[kind].corrupt(given, noise)
    return examples.template.write(given, wanted)


def denoise_as_ul2(examples: Examples, index: int, noise: Noise) -> Fields:
    """As `fill_spans` or `continue_text`, by one of data.denoisers, whose mode the given text begins with."""
    sentinels, modes = denoisers.roles(noise.tokenizer.sentinels)
    text = _piece(examples, index)
    return examples.template.write(*denoisers.denoise_ul2(text, noise.rng, sentinels, modes, noise.data.denoisers))


def _piece(examples: Examples, index: int) -> np.ndarray:
    return examples.of('tokens', index)[examples.start[index] : examples.stop[index]].astype(np.int32)


def _masked(fields: Fields, noise: Noise) -> Fields:
    how = noise.data.mask_rate, noise.data.mask_unit, noise.data.mask_keep, noise.data.mask_random
    inputs, selected = corrupt.mask_tokens(fields['inputs'], noise.rng, noise.tokenizer, *how)
    return {**fields, 'inputs': inputs, 'targets': fields['inputs'], 'weights': selected.astype(np.float32)}


def _masked_pair(examples: Examples, first: np.ndarray, second: np.ndarray, label: int, noise: Noise) -> Fields:
    fields = _masked(examples.template.read(first, second), noise)
    return {**fields, 'labels': np.int32(label), 'label_weights': np.float32(1)}


def _shortened(first: np.ndarray, second: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Two texts of `size` tokens together, one of them for what stands between; cut from the longer one first."""
    if not len(second):
        return first[:size], second
    room = size - 1
    shorter = min(len(first), len(second), room // 2)
    longer = room - shorter
    return (first[:shorter], second[:longer]) if len(first) < len(second) else (first[:longer], second[:shorter])


# ------------------------------------------------------------------------------------------------------------ lengths


def _one_stack(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return [sizes]


def _to_read(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return template.to_read(sizes)


def _to_read_two(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return template.to_read(np.maximum(sizes, 2) + 1)


def _to_continue(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return [sizes, np.maximum(sizes, 2)]  # one token at least is on the other side


def _lengths_of_spans(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    dropped, spans = corrupt.span_counts(sizes, data.mask_rate, data.mean_span_length)
    return template.to_write(sizes - dropped + spans, dropped + spans)


def _sentinels_of_spans(sizes: np.ndarray, data: Data) -> np.ndarray:
    return corrupt.span_counts(sizes, data.mask_rate, data.mean_span_length)[1]


def _lengths_of_noise(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    longest = sizes
    for kind in data.noise:
        longest = choose(corrupt.NOISES, kind, 'data.noise').longest(longest, data)
    return template.to_write(longest, sizes)


def _lengths_of_ul2(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    lengths = template.to_write(*denoisers.lengths(sizes, data.denoisers))
    if len(lengths) == 1:  # what is not given there is wanted
        return template.to_write(denoisers.total(sizes, data.denoisers), np.zeros_like(sizes))
    return lengths


def _sentinels_of_ul2(sizes: np.ndarray, data: Data) -> np.ndarray:
    return denoisers.num_sentinels(sizes, data.denoisers)


@dataclasses.dataclass(frozen=True)
class ExampleFormat:
    """What the pipeline must know of an objective."""

    fields: Callable[
        [Examples, int, Noise], Fields
    ]  # of one example; labels are one for its row, all else [its length]
    encoding: tokenized.Encoding = tokenized.TEXT  # of its records
    cut: Callable[[Columns, Lengths, SpecialTokenTemplate, Data], Spans] = in_pieces
    lengths: Lengths = _to_read
    num_specials: int = 1  # special tokens that a whole text takes
    num_sentinels: Callable[[np.ndarray, Data], np.ndarray] | None = (
        None  # tokens of an example -> sentinels that it takes
    )
    labelled: bool = False  # a row has one label, and so one example


FORMATS = {
    'next_token': ExampleFormat(next_token, cut=in_pieces_to_the_end, lengths=_one_stack),
    'unmask': ExampleFormat(unmask, num_specials=2),
    'unmask_next': ExampleFormat(unmask_next, lengths=_to_read_two, num_specials=3, labelled=True),
    'unmask_order': ExampleFormat(unmask_order, lengths=_to_read_two, num_specials=3, labelled=True),
    'translate': ExampleFormat(translate, tokenized.PAIRS, both_sides),
    'class': ExampleFormat(classify, tokenized.CLASSES, beginning, num_specials=2, labelled=True),
    'number': ExampleFormat(classify, tokenized.NUMBERS, beginning, num_specials=2, labelled=True),
    'tags': ExampleFormat(tag, tokenized.TAGGED, beginning, num_specials=2),
    'answer': ExampleFormat(find_answer, tokenized.ANSWERS, windows, labelled=True),
    'continue_prefix': ExampleFormat(continue_prefix, cut=in_pieces_to_the_end, lengths=_one_stack),
    'fill_spans': ExampleFormat(fill_spans, lengths=_lengths_of_spans, num_sentinels=_sentinels_of_spans),
    'denoise': ExampleFormat(denoise, lengths=_lengths_of_noise),
    'ul2': ExampleFormat(denoise_as_ul2, lengths=_lengths_of_ul2, num_sentinels=_sentinels_of_ul2),
    'continue_text': ExampleFormat(continue_text, lengths=_to_continue),
}

OVERLONG = {'drop': True, 'truncate': False}  # is a training example over the length left out?
