"""Formats of examples: the tokens of a record that make an example, and its arrays; one row of `FORMATS` each."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tformer.config.run import Config, Data
from tformer.config.tasks import TASKS
from tformer.data.batches import packing
from tformer.data.examples import corrupt, denoisers, example_arrays, infilling, spans, special_tokens, tokenized
from tformer.data.examples.corrupt import Noise
from tformer.data.examples.example_arrays import Examples
from tformer.data.examples.pieces import Pieces, Spans
from tformer.data.examples.special_tokens import Fields, SpecialTokenTemplate
from tformer.data.sources.records import Record
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError, choose


def make(config: Config, tokenizers: Tokenizers, records: Sequence[Record], split: str, training: bool) -> Examples:
    """Returns the examples of `records`, which are tokenised, or whose tokens are read from the cache.

    Objectives on running text cut a long text into pieces as long as the rows of every stack allow. With the others,
    data.overlong decides about overlong training examples; evaluation truncates them.

    Raises:
      UserError: a record is malformed, there are too few sentinels, or no example fits in the length.
    """
    data, example_format = config.data, format_of(config)
    columns = tokenized.columns(config, tokenizers, example_format.encoding, records, split)
    template = special_tokens.template_of(config, tokenizers)
    cut = example_format.cut(columns.by_name, example_format.lengths, template, data)
    if example_format.num_sentinels is not None:
        needed = example_format.num_sentinels(np.array([cut.longest]), data)
        corrupt.check_sentinels(int(needed.max()), tokenizers.target.sentinels)
    drop = training and choose(OVERLONG, data.overlong, 'data.overlong')
    overlong = int(cut.overlong.sum())
    if (drop and overlong) or len(columns.bad):
        left_out = cut.overlong & drop
        left_out[columns.bad] = True
        cut = cut.kept(~left_out)
    if not len(cut):
        raise UserError(f'the {split} split has no example within data.length={data.length} tokens')
    return Examples(
        columns.by_name,
        template,
        cut,
        num_dropped=overlong if drop else 0,
        num_truncated=0 if drop else overlong,
        num_skipped=columns.skipped + len(columns.bad),
        fingerprint=columns.fingerprint,
    )


def format_of(config: Config) -> 'ExampleFormat':
    """Returns the format of a run's examples."""
    task = choose(TASKS, config.train.objective, 'train.objective')
    two_stacks = config.model.family == 'encoder_decoder'
    return FORMATS[(two_stacks and task.two_stack_format) or task.format]


def packs(config: Config) -> bool:
    """Returns whether rows of a run hold several examples. Raises a `UserError` where examples are rows."""
    found = choose(packing.BATCHING, config.data.batching, 'data.batching').packs
    if found and format_of(config).labelled:
        line = f'data.batching={config.data.batching} is not for train.objective={config.train.objective}'
        raise UserError(f'{line}: a row has one label; use bucket')
    return found


# ------------------------------------------------------------------------------------------------------------ lengths


def _one_stack(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return [sizes]


def _lengths_of_chats(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return [np.maximum(sizes - 1, 0)]  # each token but the last one is read


def _to_read(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return template.to_read(sizes)


def _after_front(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return [sizes + len(template.front)]


def _to_read_two(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return template.to_read(np.maximum(sizes, 2) + len(template.between))


def _to_continue(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return template.to_write(np.maximum(sizes - 1, 1), sizes - 1)  # at least one token is on the other side


def _lengths_of_spans(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    dropped, count = corrupt.span_counts(sizes, data.mask_rate, data.mean_span_length)
    return template.to_write(sizes - dropped + count, dropped + count)


def _lengths_of_noise(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    longest = sizes
    for kind in data.noise:
        longest = choose(corrupt.NOISES, kind, 'data.noise').longest(longest, data)
    return template.to_write(longest, sizes)


def _lengths_of_ul2(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    given, wanted, spans = denoisers.lengths(sizes, data.denoisers)
    lengths = template.to_write(given, wanted)
    if len(lengths) == 1:  # one stack: a token is either given or wanted, with the mode and each sentinel twice
        return template.to_write(sizes + 1 + 2 * spans, np.zeros_like(sizes))
    return lengths


def _with_marks(sizes: np.ndarray, template: SpecialTokenTemplate, data: Data) -> list[np.ndarray]:
    return [sizes + len(template.front) + len(infilling.Marks._fields)]


def _sentinels_of_spans(sizes: np.ndarray, data: Data) -> np.ndarray:
    return corrupt.span_counts(sizes, data.mask_rate, data.mean_span_length)[1]


def _sentinels_of_ul2(sizes: np.ndarray, data: Data) -> np.ndarray:
    return denoisers.lengths(sizes, data.denoisers)[2] + len(denoisers.MODES)


@dataclasses.dataclass(frozen=True)
class ExampleFormat:
    """How records become examples: the columns of numbers, the tokens of each example, and its arrays."""

    # (examples, index of one, its noise) -> its arrays; those of `example_arrays.OF_ROWS` belong to its row as a whole,
    # and all others have the example's length
    fields: Callable[[Examples, int, Noise], Fields]
    encoding: tokenized.Encoding = tokenized.TEXT
    cut: Callable[[spans.Columns, spans.Lengths, SpecialTokenTemplate, Data], Spans | Pieces] = spans.in_pieces
    lengths: spans.Lengths = _to_read
    # parts of the special tokens of a whole text: data.start, data.end, data.separator; None: they are part of the text
    num_specials: int | None = 1
    num_sentinels: Callable[[np.ndarray, Data], np.ndarray] | None = None  # needed by examples of so many tokens
    pairs: bool = False  # an example may be two texts, whose types (0 and 1) an encoder reads
    labelled: bool = False  # arrays of whole rows belong to one example, and so a row is one
    reads: tuple[str, ...] = ()  # the fields of config.data that it reads and some other formats do not

    @property
    def several(self) -> bool:
        """Whether an example is several texts that do not see each other."""
        return self.cut in (spans.several, spans.twice)


_MASKS = ('mask_rate', 'mask_unit', 'mask_keep', 'mask_random', 'mask_copies')

FORMATS = {
    'next_token': ExampleFormat(example_arrays.next_token, cut=spans.in_pieces_to_the_end, lengths=_one_stack),
    'chat': ExampleFormat(
        example_arrays.converse, tokenized.CHATS, spans.beginning, _lengths_of_chats, num_specials=None,
        reads=('overlong', 'chat_template'),
    ),
    'unmask': ExampleFormat(example_arrays.unmask, num_specials=2, reads=_MASKS),
    'unmask_next': ExampleFormat(
        example_arrays.unmask_next, lengths=_to_read_two, num_specials=3, pairs=True, labelled=True, reads=_MASKS
    ),
    'unmask_order': ExampleFormat(
        example_arrays.unmask_order, lengths=_to_read_two, num_specials=3, pairs=True, labelled=True, reads=_MASKS
    ),
    'translate': ExampleFormat(example_arrays.translate, tokenized.PAIRS, spans.both_sides, reads=('overlong',)),
    'class': ExampleFormat(
        example_arrays.classify, tokenized.CLASSES, spans.beginning, num_specials=2, pairs=True, labelled=True,
        reads=('overlong',),
    ),
    'number': ExampleFormat(
        example_arrays.classify, tokenized.NUMBERS, spans.beginning, num_specials=2, pairs=True, labelled=True,
        reads=('overlong',),
    ),
    'texts': ExampleFormat(
        example_arrays.compare, tokenized.TEXTS, spans.several, num_specials=2, labelled=True, reads=('overlong',)
    ),
    'text_twice': ExampleFormat(
        example_arrays.compare_twice, tokenized.SINGLE, spans.twice, num_specials=2, labelled=True,
        reads=('overlong',),
    ),
    'scored_texts': ExampleFormat(
        example_arrays.compare_scored, tokenized.SCORED, spans.several, num_specials=2, labelled=True,
        reads=('overlong',),
    ),
    'choices': ExampleFormat(
        example_arrays.choose, tokenized.CHOICES, spans.several, num_specials=3, pairs=True, labelled=True,
        reads=('overlong',),
    ),
    'preferred': ExampleFormat(
        example_arrays.prefer, tokenized.PREFERENCES, spans.several, _after_front, labelled=True, reads=('overlong',)
    ),
    'tags': ExampleFormat(
        example_arrays.tag, tokenized.TAGGED, spans.beginning, num_specials=2, reads=('overlong',)
    ),
    'answer': ExampleFormat(
        example_arrays.find_answer, tokenized.ANSWERS, spans.windows, pairs=True, labelled=True,
        reads=('overlong', 'question_length', 'stride'),
    ),
    'continue_prefix': ExampleFormat(
        example_arrays.continue_prefix, cut=spans.in_pieces_to_the_end, lengths=_one_stack, reads=('mask_copies',)
    ),
    'fill_spans': ExampleFormat(
        example_arrays.fill_spans, lengths=_lengths_of_spans, num_sentinels=_sentinels_of_spans,
        reads=('mask_rate', 'mean_span_length', 'mask_copies'),
    ),
    'denoise': ExampleFormat(example_arrays.denoise, lengths=_lengths_of_noise, reads=('noise', 'mask_copies')),
    'ul2': ExampleFormat(
        example_arrays.denoise_as_ul2, lengths=_lengths_of_ul2, num_sentinels=_sentinels_of_ul2,
        reads=('denoisers', 'mask_copies'),
    ),
    'fill_in_middle': ExampleFormat(
        example_arrays.fill_middle, lengths=_with_marks, reads=('fim_rate', 'spm_rate', 'mask_copies')
    ),
    'continue_text': ExampleFormat(example_arrays.continue_text, lengths=_to_continue, reads=('mask_copies',)),
}  # fmt: skip

OVERLONG = {'drop': True, 'truncate': False}  # whether a training example that is too long is left out
