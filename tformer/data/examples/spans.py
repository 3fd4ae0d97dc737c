"""Which tokens of the records make an example: pieces of a text, its beginning, both sides of a pair, windows."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from tformer.config.run import Data
from tformer.data.examples.special_tokens import SpecialTokenTemplate
from tformer.data.ragged import Ragged
from tformer.errors import UserError

Columns = Mapping[str, Ragged]

# (tokens of examples, the template, the rates) -> positions in each stack, at most; they do not fall where those rise
Lengths = Callable[[np.ndarray, SpecialTokenTemplate, Data], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Spans:
    """Where examples are, as in `Examples`; `overlong`, bool [records], is what they do not show whole."""

    record: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    lengths: list[np.ndarray]
    overlong: np.ndarray


def chunk(sizes: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents of `sizes` units into pieces of at most `room`; an empty document has none.

    Returns:
      record, start, stop: int64 [pieces], piece i is units start[i]:stop[i] of document record[i].
    """
    counts = -(-sizes // room)
    record = np.repeat(np.arange(len(sizes)), counts)
    ordinal = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    return record, ordinal * room, np.minimum((ordinal + 1) * room, sizes[record])


def in_pieces(
    columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data, ends: bool = False
) -> Spans:
    """All of a text, in pieces; with `ends` its end too, as one more token."""
    sizes = columns['tokens'].lengths + ends
    record, start, stop = chunk(sizes, _room(lengths, template, data))
    return Spans(record, start, stop, lengths(stop - start, template, data), np.zeros(len(sizes), bool))


def beginning(columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data) -> Spans:
    """As much of one text, or of two, as there is room for: of the longer one first."""
    sizes = columns['tokens'].lengths
    if 'second_text' in columns:
        sizes = sizes + columns['second_text'].lengths + (columns['second_text'].lengths > 0)
    stop = np.minimum(sizes, _room(lengths, template, data))
    whole = np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
    return Spans(*whole, stop, lengths(stop, template, data), sizes > stop)


def both_sides(columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data) -> Spans:
    """A target, its end included, and its source, which goes before: of it data.encoder_length - 1 tokens at most, and
    in one row with the target as many as leave that half of the row."""
    sources, targets = columns['sources'].lengths, columns['tokens'].lengths + 1
    most = data.encoder_length or data.length
    given = np.minimum(sources, most - 1)
    own = data.length
    if len(template.to_write(given, targets)) == 1:
        given = np.minimum(given, np.maximum(own - 1 - targets, own // 2 - 1))
        own = own - 1 - given
    stop = np.minimum(targets, own)
    whole = np.arange(len(targets)), np.zeros(len(targets), np.int64)
    return Spans(*whole, stop, template.to_write(given, stop - 1), (sources > given) | (targets > stop))


def windows(columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data) -> Spans:
    """All of a context, in windows that begin at most data.stride tokens apart; before each stands the question, cut to
    data.question_length (Devlin et al. 2019, 4.2, as its code does). Overlong is an answer that no window has whole."""
    question = np.minimum(columns['second_text'].lengths, data.question_length)
    sizes = columns['tokens'].lengths
    room = _room(lengths, template, data) - question - 1
    if room.min(initial=1) < 1:
        raise UserError(f'data.length={data.length} has no room for text beside a question of {question.max()} tokens')
    stride = np.minimum(data.stride, room)
    count = 1 + np.maximum(-(-(sizes - room) // stride), 0)
    record = np.repeat(np.arange(len(sizes)), count)
    number = np.arange(len(record)) - np.repeat(np.cumsum(count) - count, count)
    start = number * stride[record]
    stop = np.minimum(start + room[record], sizes[record])
    positions = lengths(question[record] + 1 + stop - start, template, data)
    answered = columns['answer'].lengths > 0
    first, last = np.full((2, len(sizes)), -1)
    first[answered], last[answered] = columns['answer'].flat.reshape(-1, 2).T
    whole = np.zeros(len(sizes), bool)
    whole[record[(start <= first[record]) & (last[record] < stop)]] = True
    return Spans(record, start, stop, positions, answered & ~whole)


def _room(lengths: Lengths, template: SpecialTokenTemplate, data: Data) -> int:
    """The most tokens of an example, its end among them where it is predicted, that fit in a row of every stack."""
    limits = data.length, data.encoder_length or data.length
    sizes = np.arange(sum(limits) + 1)  # what one stack lacks of a text, the other has
    positions = lengths(sizes, template, data)
    fits = [own <= limit for own, limit in zip(positions, limits, strict=False)]
    room = int(np.logical_and.reduce(fits).sum()) - 1
    if room < 1:
        raise UserError(f'data.length={data.length} has no room for text beside {positions[0][0]} special tokens')
    return room


in_pieces_to_the_end = functools.partial(in_pieces, ends=True)
