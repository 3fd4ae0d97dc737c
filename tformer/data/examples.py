"""A split as tokens, and the form that each objective gives its examples."""

import dataclasses
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tformer.config.run import Config, Data
from tformer.data import cache, corrupt, packing
from tformer.data.corrupt import Noise
from tformer.data.ragged import Ragged
from tformer.data.records import FIELDS, Record, Split
from tformer.data.tokenizers import Tokenizers
from tformer.data.vocabulary import Specials
from tformer.errors import UserError, choose, nearest

Fields = dict[str, np.ndarray]
Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]  # texts -> the ids of each

_AT_ONCE = 2000  # records that are tokenised together


@dataclasses.dataclass(frozen=True)
class Examples:
    """Example i is `start[i]:stop[i]` of record `record[i]`: of its tokens, or of its predictions t1..tn EOS."""

    tokens: Ragged  # of each record: the text, or the target side
    sources: Ragged | None  # of each record: the source side (seq2seq)
    labels: np.ndarray | None  # int [records] (classification)
    specials: Specials  # of `tokens`
    source_specials: Specials  # of `sources`
    record: np.ndarray  # int [N]
    start: np.ndarray  # int [N]
    stop: np.ndarray  # int [N]
    lengths: np.ndarray  # int [N, stacks]: positions that the example takes in a row of each stack, at most
    num_dropped: int  # records left out because they are over the length
    num_truncated: int  # records of which only the beginning is seen
    num_skipped: int  # records that the source left out as bad
    fingerprint: str  # of the records, as tokens

    def __len__(self) -> int:
        return len(self.record)


def make(config: Config, tokenizers: Tokenizers, records: Sequence[Record], split: str, training: bool) -> Examples:
    """Tokenises all `records`, or finds their tokens in the cache, and cuts, drops or truncates to the length.

    Objectives on running text see all of a long one, in pieces as long as the rows of every stack allow. With the
    others `data.overlong` decides about overlong training examples, and evaluation truncates them.

    Raises:
      UserError: a label that training lacks, too few sentinels, or no example within the length.
    """
    form = choose(FORMS, config.train.objective, 'train.objective')
    columns, skipped, fingerprint = tokenize(config, tokenizers, form, records, split)
    tokens, sources = columns[form.field], columns.get('source')
    sizes, room = tokens.lengths + form.ends, _room(form, config.data)
    if room < 1:
        raise UserError(f'data.length={config.data.length} has no room for text beside {form.extra} special tokens')
    if form.in_pieces:
        record, start, stop = packing.chunk(sizes, room)
        overlong = np.zeros(len(sizes), bool)
    else:
        record, start, stop = np.arange(len(sizes)), np.zeros(len(sizes), np.int64), np.minimum(sizes, room)
        overlong = sizes > room
    if form.spans is not None:
        corrupt.check_sentinels(int(form.spans(np.array(room), config.data)), tokenizers.target.sentinels)
    lengths = [stop - start + form.extra] if form.lengths is None else form.lengths(stop - start, config.data)
    if sources is not None:
        limit = config.data.encoder_length or config.data.length
        overlong |= sources.lengths >= limit
        lengths.append(np.minimum(sources.lengths + 1, limit))
    drop = training and choose(OVERLONG, config.data.overlong, 'data.overlong')
    keep = ~overlong[record] if drop else np.ones(len(record), bool)
    if not keep.any():
        raise UserError(f'the {split} split has no example within data.length={config.data.length} tokens')
    return Examples(
        tokens,
        sources,
        columns['label'].flat if form.labelled else None,
        tokenizers.target.specials,
        (tokenizers.source or tokenizers.target).specials,
        record[keep], start[keep], stop[keep], np.stack(lengths, axis=1)[keep],
        num_dropped=int(overlong.sum()) if drop else 0,
        num_truncated=0 if drop else int(overlong.sum()),
        num_skipped=skipped,
        fingerprint=fingerprint,
    )  # fmt: skip


def _room(form: 'Form', data: Data) -> int:
    """The most tokens of an example, its end among them where it is predicted, that fit in a row of every stack."""
    if form.lengths is None:
        return data.length - form.extra
    limits = data.length, data.encoder_length or data.length
    sizes = np.arange(1, sum(limits) + 1)  # what one stack lacks of a text, the other has
    fits = [own <= limit for own, limit in zip(form.lengths(sizes, data), limits, strict=True)]
    return int(np.logical_and.reduce(fits).sum())


def tokenize(
    config: Config, tokenizers: Tokenizers, form: 'Form', records: Sequence[Record], split: str
) -> tuple[dict[str, Ragged], int, str]:
    """The fields of all records as ids, without special tokens, how many bad records the source skipped, a fingerprint.

    The ids of a `Split` are kept in the cache, by the contents of the split and the tokenizers.
    """
    encoders: dict[str, Encode] = {form.field: tokenizers.target.encode_batch}
    depends_on: dict[str, Any] = {form.field: tokenizers.target.fingerprint}
    if 'source' in FIELDS[config.train.objective]:
        assert tokenizers.source is not None, f'{config.train.objective} needs a source tokenizer'
        encoders['source'], depends_on['source'] = tokenizers.source.encode_batch, tokenizers.source.fingerprint
    if form.labelled:
        encoders['label'], depends_on['label'] = _label_encoder(tokenizers.labels, split), list(tokenizers.labels)
    if not isinstance(records, Split):
        rows: dict[str, list[Sequence[int]]] = {field: [] for field in encoders}
        for field, ids in _encoded(records, encoders):
            rows[field] += list(ids)
        columns = {field: Ragged.of(ids) for field, ids in rows.items()}
        return columns, 0, _digest(*(values for column in columns.values() for values in (column.flat, column.offsets)))
    sizes = [len(tokenizers.labels), *(side.vocab_size for side in (tokenizers.target, tokenizers.source) if side)]
    dtype = np.uint16 if max(sizes) <= 2**16 else np.int32

    def write(writer: cache.Writer) -> None:
        ends = dict.fromkeys(encoders, 0)
        for field in encoders:
            writer.append(f'{field}.ids', np.zeros(0, dtype))
            writer.append(f'{field}.offsets', np.zeros(1, np.int64))
        for field, ids in _encoded(records, encoders):
            offsets = ends[field] + np.cumsum([len(row) for row in ids])
            ends[field] = int(offsets[-1])
            writer.append(f'{field}.ids', np.concatenate([np.asarray(row, dtype) for row in ids]))
            writer.append(f'{field}.offsets', offsets)
        writer.facts['skipped'] = records.skipped

    depends_on |= {'split': records.fingerprint}
    found, facts = cache.arrays(cache.directory(config.data), depends_on, write)
    columns = {field: Ragged(found[f'{field}.ids'], found[f'{field}.offsets']) for field in encoders}
    return columns, facts['skipped'], _digest(json.dumps(depends_on, sort_keys=True).encode())


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _encoded(
    records: Sequence[Record], encoders: Mapping[str, Encode]
) -> Iterator[tuple[str, Sequence[Sequence[int]]]]:
    """(field, ids of some records), all fields of them before the next ones; says how far it is if it takes long."""
    since, done, in_order = time.monotonic(), 0, iter(records)
    while some := list(itertools.islice(in_order, _AT_ONCE)):
        done += len(some)
        for field, encode in encoders.items():
            yield field, encode([record[field] for record in some])
        if time.monotonic() > since + 10:
            since = time.monotonic()
            print(f'tokenised {done:,} of {len(records):,} records', file=sys.stderr, flush=True)


def _label_encoder(names: tuple[str, ...], split: str) -> Encode:
    ids = {name: index for index, name in enumerate(names)}

    def encode(labels: Sequence[str]) -> list[list[int]]:
        for label in labels:
            if label not in ids:
                raise UserError(f'label {label!r} of the {split} split has no training example{nearest(label, names)}')
        return [[ids[label]] for label in labels]

    return encode


# ------------------------------------------------------------------------------------------------------------- forms


def next_token(examples: Examples, index: int, noise: Noise) -> Fields:
    """BOS t1..tn -> t1..tn EOS, or a piece of it: a later piece starts with the last target of the one before."""
    tokens, start, stop = examples.tokens[examples.record[index]], examples.start[index], examples.stop[index]
    piece = tokens[max(start - 1, 0) : stop]
    whole = np.empty(stop - start + 1, np.int32)
    whole[int(start == 0) :][: len(piece)] = piece
    if start == 0:
        whole[0] = examples.specials.bos
    if stop > len(tokens):
        whole[-1] = examples.specials.eos
    return {'inputs': whole[:-1], 'targets': whole[1:], 'weights': np.ones(stop - start, np.float32)}


def translate(examples: Examples, index: int, noise: Noise) -> Fields:
    """source EOS; BOS y -> y EOS. A truncated target has no EOS: nothing teaches to stop where it was cut."""
    assert examples.sources is not None
    source = examples.sources[examples.record[index]][: examples.lengths[index, 1] - 1]
    return {'encoder_inputs': _ended(source, examples.source_specials.eos), **next_token(examples, index, noise)}


def unmask(examples: Examples, index: int, noise: Noise) -> Fields:
    """CLS t SEP, corrupted -> the originals, scored where a token was selected."""
    targets = _between_cls_and_sep(examples, index)
    inputs, selected = corrupt.mask_tokens(targets, noise.rng, noise.tokenizer, noise.data.mask_rate)
    return {'inputs': inputs, 'targets': targets, 'weights': selected.astype(np.float32)}


def classify(examples: Examples, index: int, noise: Noise) -> Fields:
    """CLS t SEP."""
    return {'inputs': _between_cls_and_sep(examples, index)}


def continue_prefix(examples: Examples, index: int, noise: Noise) -> Fields:
    """As `next_token`; a prefix of 1 to all inputs is seen from everywhere, and what comes after it is scored."""
    fields = next_token(examples, index, noise)
    size = int(noise.rng.integers(1, len(fields['inputs']) + 1))
    place = np.arange(len(fields['inputs']))
    return {**fields, 'prefix': place < size, 'weights': (place >= size - 1).astype(np.float32)}


def fill_spans(examples: Examples, index: int, noise: Noise) -> Fields:
    """t with sentinels for spans EOS; BOS y -> y EOS, where y are the sentinels, each with its span."""
    data, sentinels = noise.data, noise.tokenizer.sentinels
    given, wanted = corrupt.corrupt_spans(
        _piece(examples, index), noise.rng, sentinels, data.mask_rate, data.mean_span_length
    )
    return _paired(given, wanted, examples.specials)


def denoise(examples: Examples, index: int, noise: Noise) -> Fields:
    """t corrupted EOS; BOS t -> t EOS."""
    given = wanted = _piece(examples, index)
    for kind in noise.data.noise:
        given = corrupt.NOISES[kind].corrupt(given, noise)
    return _paired(given, wanted, examples.specials)


def _piece(examples: Examples, index: int) -> np.ndarray:
    tokens = examples.tokens[examples.record[index]][examples.start[index] : examples.stop[index]]
    return tokens.astype(np.int32)


def _between_cls_and_sep(examples: Examples, index: int) -> np.ndarray:
    specials = examples.specials
    return np.concatenate(([specials.cls], _piece(examples, index), [specials.sep]), dtype=np.int32)


def _ended(tokens: np.ndarray, end: int) -> np.ndarray:
    whole = np.empty(len(tokens) + 1, np.int32)
    whole[:-1], whole[-1] = tokens, end
    return whole


def _paired(given: np.ndarray, wanted: np.ndarray, specials: Specials) -> Fields:
    framed = np.concatenate(([specials.bos], wanted, [specials.eos]), dtype=np.int32)
    return {
        'encoder_inputs': _ended(given, specials.eos),
        'inputs': framed[:-1],
        'targets': framed[1:],
        'weights': np.ones(len(wanted) + 1, np.float32),
    }


def _lengths_of_spans(sizes: np.ndarray, data: Data) -> list[np.ndarray]:
    dropped, spans = corrupt.span_counts(sizes, data.mask_rate, data.mean_span_length)
    return [dropped + spans + 1, sizes - dropped + spans + 1]


def _most_spans(sizes: np.ndarray, data: Data) -> np.ndarray:
    return corrupt.span_counts(sizes, data.mask_rate, data.mean_span_length)[1]


def _lengths_of_noise(sizes: np.ndarray, data: Data) -> list[np.ndarray]:
    longest = sizes
    for kind in data.noise:
        longest = choose(corrupt.NOISES, kind, 'data.noise').longest(longest, data)
    return [sizes + 1, longest + 1]


@dataclasses.dataclass(frozen=True)
class Form:
    """What the pipeline must know of an objective."""

    fields: Callable[[Examples, int, Noise], Fields]  # the arrays of one example, [its length]
    field: str = 'text'  # of a record: what becomes `Examples.tokens`
    ends: bool = False  # the end of a text is predicted too
    extra: int = 0  # special tokens that `fields` adds to each example
    in_pieces: bool = False  # long texts are cut into several examples
    two_stacks: bool = False
    labelled: bool = False
    lengths: Callable[[np.ndarray, Data], list[np.ndarray]] | None = None  # sizes -> positions in each stack, at most
    spans: Callable[[np.ndarray, Data], np.ndarray] | None = None  # sizes -> sentinels that an example takes


FORMS = {
    'causal_lm': Form(next_token, ends=True, in_pieces=True),
    'masked_lm': Form(unmask, extra=2, in_pieces=True),
    'seq2seq': Form(translate, field='target', ends=True, two_stacks=True),
    'classification': Form(classify, extra=2, labelled=True),
    'prefix_lm': Form(continue_prefix, ends=True, in_pieces=True),
    'span_corruption': Form(fill_spans, in_pieces=True, two_stacks=True, lengths=_lengths_of_spans, spans=_most_spans),
    'denoising': Form(denoise, in_pieces=True, two_stacks=True, lengths=_lengths_of_noise),
}

OVERLONG = {'drop': True, 'truncate': False}  # is a training example over the length left out?
