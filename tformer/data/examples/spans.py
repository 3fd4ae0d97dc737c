"""The tokens of a record that make an example: pieces of a text, its beginning, both sides of a pair, or windows."""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from tformer.config.run import Data
from tformer.data.examples.pieces import Pieces, Spans
from tformer.data.examples.special_tokens import SpecialTokenTemplate
from tformer.data.ragged import Ragged
from tformer.errors import UserError

Columns = Mapping[str, Ragged]

# (tokens of examples, template, config.data) -> the most positions that they take in each stack, never decreasing
Lengths = Callable[[np.ndarray, SpecialTokenTemplate, Data], list[np.ndarray]]


def _pieces(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the record and the ordinal of each piece, int [pieces], from the number of pieces of each record."""
    record = np.repeat(np.arange(len(counts)), counts)
    return record, np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)


def in_pieces(
    columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data, ends: bool = False
) -> Pieces:
    """The whole text, in pieces; with `ends`, its end is one more token, and its first one needs one before it."""
    unseen = int(ends and not template.front)
    room = _room(lengths, template, data)
    positions = np.stack(lengths(np.arange(room + 1), template, data), axis=1)
    return Pieces(columns['tokens'], room, ends - unseen, unseen, positions)


def beginning(columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data) -> Spans:
    """As much of one text, or of two, as fits; the longer one is cut first."""
    sizes = columns['tokens'].lengths
    if 'second_text' in columns:
        sizes = sizes + columns['second_text'].lengths + len(template.between) * (columns['second_text'].lengths > 0)
    stop = np.minimum(sizes, _room(lengths, template, data))
    whole = np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
    return Spans(*whole, stop, lengths(stop, template, data), sizes > stop)


def several(columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data, copies: int = 1) -> Spans:
    """All texts of a record, or copies of them, in one row, each after the record's second text where it has one: each
    is cut to `stop` tokens, as many as let the row hold all."""
    ends, records = columns['ends'], np.arange(len(columns['ends']))
    record = np.repeat(records, ends.lengths)
    sizes, least = np.concatenate([np.diff(own, prepend=0) for own in ends]), 1
    if 'second_text' in columns:  # and what separates it
        between = len(template.between)
        sizes, least = sizes + columns['second_text'].lengths[record] + between, between + 2

    def positions(stop: np.ndarray) -> np.ndarray:
        (own,) = lengths(np.minimum(sizes, stop[record]), template, data)
        return copies * np.bincount(record, own, len(records)).astype(np.int64)

    stop = np.zeros(len(records), np.int64)
    for bit in reversed(range(data.length.bit_length())):  # the largest that fits, from its highest bit on
        stop += (positions(stop + (1 << bit)) <= data.length) << bit
    if stop.min(initial=least) < least:
        most = copies * int(ends.lengths[stop.argmin()])
        raise UserError(f'data.length={data.length} has no room for text beside the special tokens of {most} texts')
    return Spans(records, np.zeros_like(stop), stop, [positions(stop)], np.bincount(record, sizes > stop[record]) > 0)


def both_sides(columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data) -> Spans:
    """A target with its end, and its source before it.

    The source has at most data.encoder_length tokens, special ones included; in one row with the target it leaves half
    of the row to it.
    """
    sources, targets = columns['sources'].lengths, columns['tokens'].lengths + 1
    beside, *encoder = template.beside()
    longest = data.encoder_length or data.length
    if longest < sum(encoder):
        raise UserError(f'data.encoder_length={longest} has no room for text beside {sum(encoder)} special tokens')
    given = np.minimum(sources, longest - sum(encoder or [1]))
    own = data.length - beside
    if not encoder:
        given = np.minimum(given, np.maximum(own - targets, data.length // 2 - 1))
        own = own - given
    stop = np.minimum(targets, own)
    whole = np.arange(len(targets)), np.zeros(len(targets), np.int64)
    return Spans(*whole, stop, template.to_write(given, stop - 1), (sources > given) | (targets > stop))


def windows(columns: Columns, lengths: Lengths, template: SpecialTokenTemplate, data: Data) -> Spans:
    """The whole context, in windows that begin at most data.stride tokens apart, as in BERT's code (Devlin et al. 2019,
    section 4.2).

    Each window follows the question, cut to data.question_length. A record is overlong if no window holds its answer.
    """
    question = np.minimum(columns['second_text'].lengths, data.question_length)
    sizes = columns['tokens'].lengths
    before = question + len(template.between)
    room = _room(lengths, template, data) - before
    if room.min(initial=1) < 1:
        raise UserError(f'data.length={data.length} has no room for text beside a question of {question.max()} tokens')
    stride = np.minimum(data.stride, room)
    record, ordinal = _pieces(1 + np.maximum(-(-(sizes - room) // stride), 0))
    start = ordinal * stride[record]
    stop = np.minimum(start + room[record], sizes[record])
    positions = lengths(before[record] + stop - start, template, data)
    answered = columns['answer'].lengths > 0
    first, last = np.full((2, len(sizes)), -1)
    first[answered], last[answered] = columns['answer'].flat.reshape(-1, 2).T
    whole = np.zeros(len(sizes), bool)
    whole[record[(start <= first[record]) & (last[record] < stop)]] = True
    return Spans(record, start, stop, positions, answered & ~whole)


def _room(lengths: Lengths, template: SpecialTokenTemplate, data: Data) -> int:
    """Returns the most tokens of an example, with its end if that is predicted, that fit in a row of every stack."""
    limits = data.length, data.encoder_length or data.length
    sizes = np.arange(sum(limits) + 1)  # one stack may hold what the other lacks
    positions = lengths(sizes, template, data)
    fits = [own <= limit for own, limit in zip(positions, limits, strict=False)]
    room = int(np.logical_and.reduce(fits).sum()) - 1
    if room < 1:
        raise UserError(f'data.length={data.length} has no room for text beside {positions[0][0]} special tokens')
    return room


twice = functools.partial(several, copies=2)
in_pieces_to_the_end = functools.partial(in_pieces, ends=True)
