"""A split as tokens, and the form that each objective gives its examples."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tformer.config.run import Config
from tformer.data import packing
from tformer.data.ragged import Ragged
from tformer.data.sources import Record
from tformer.data.tokenizers import BOS, CLS, EOS, SEP, Tokenizers
from tformer.errors import UserError, choose, nearest

Fields = dict[str, np.ndarray]
Corrupt = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # tokens -> corrupted tokens, selected


@dataclasses.dataclass(frozen=True)
class Examples:
    """Example i is `start[i]:stop[i]` of record `record[i]`: of its tokens, or its predictions (BOS is stored)."""

    tokens: Ragged  # of each record: the text, or the target side
    sources: Ragged | None  # of each record: the source side with EOS (seq2seq)
    labels: np.ndarray | None  # of each record: int32 (classification)
    record: np.ndarray  # int [N]
    start: np.ndarray  # int [N]
    stop: np.ndarray  # int [N]
    lengths: np.ndarray  # int [N, stacks]: positions that the example takes in a row of each stack
    num_dropped: int  # records left out because they are over the length
    num_truncated: int  # records of which only the beginning is seen

    def __len__(self) -> int:
        return len(self.record)


def tokenize(config: Config, tokenizers: Tokenizers, records: Sequence[Record], split: str, training: bool) -> Examples:
    """Tokenises all `records`, once, and cuts, drops or truncates what is over the length.

    Language models see all of a long text, in pieces. With the other objectives `data.overlong` decides about
    overlong training examples, and evaluation truncates them.

    Raises:
      UserError: a label that training lacks, or no example within the length.
    """
    form = choose(FORMS, config.train.objective, 'train.objective')
    tokens = Ragged.of([*form.before, *tokenizers.target.encode(record[form.field]), *form.after] for record in records)
    sizes, room = tokens.lengths - len(form.after), config.data.length - form.extra
    if room < 1:
        raise UserError(f'data.length={config.data.length} has no room for text beside {form.extra} special tokens')
    if form.in_pieces:
        record, start, stop = packing.chunk(sizes, room)
        overlong = np.zeros(len(sizes), bool)
    else:
        record, start, stop = np.arange(len(sizes)), np.zeros(len(sizes), np.int64), np.minimum(sizes, room)
        overlong = sizes > room
    lengths, sources = [stop - start + form.extra], None
    if form.two_stacks:
        assert tokenizers.source is not None, f'{config.train.objective} needs a source tokenizer'
        limit = config.data.encoder_length or config.data.length
        sources, cut = _encode_sources(tokenizers.source.encode, records, limit)
        overlong |= cut
        lengths.append(sources.lengths)
    drop = training and choose(OVERLONG, config.data.overlong, 'data.overlong')
    keep = ~overlong[record] if drop else np.ones(len(record), bool)
    if not keep.any():
        raise UserError(f'the {split} split has no example within data.length={config.data.length} tokens')
    labels = _label_ids(tokenizers.labels, records, split) if form.labelled else None
    return Examples(
        tokens, sources, labels, record[keep], start[keep], stop[keep], np.stack(lengths, axis=1)[keep],
        num_dropped=int(overlong.sum()) if drop else 0, num_truncated=0 if drop else int(overlong.sum()),
    )  # fmt: skip


def _encode_sources(
    encode: Callable[[str], list[int]], records: Sequence[Record], limit: int
) -> tuple[Ragged, np.ndarray]:
    """The source sides with EOS, cut to `limit` tokens, and which of them are cut."""
    whole = Ragged.of(encode(record['source']) for record in records)
    return Ragged.of([*tokens[: limit - 1], EOS] for tokens in whole), whole.lengths >= limit


def _label_ids(names: tuple[str, ...], records: Sequence[Record], split: str) -> np.ndarray:
    ids = {name: index for index, name in enumerate(names)}
    for label in (record['label'] for record in records):
        if label not in ids:
            raise UserError(f'label {label!r} of the {split} split has no training example{nearest(label, names)}')
    return np.array([ids[record['label']] for record in records], np.int32)


def next_token(examples: Examples, index: int, corrupt: Corrupt) -> Fields:
    """BOS t1..tn -> t1..tn EOS, or a piece of it: a later piece starts with the last target of the one before."""
    tokens = examples.tokens[examples.record[index]]
    start, stop = examples.start[index], examples.stop[index]
    weights = np.ones(stop - start, np.float32)
    return {'inputs': tokens[start:stop], 'targets': tokens[start + 1 : stop + 1], 'weights': weights}


def translate(examples: Examples, index: int, corrupt: Corrupt) -> Fields:
    """source EOS; BOS y -> y EOS. A truncated target has no EOS: nothing teaches to stop where it was cut."""
    assert examples.sources is not None
    source = examples.sources[examples.record[index]]
    return {'encoder_inputs': source, **next_token(examples, index, corrupt)}


def denoise(examples: Examples, index: int, corrupt: Corrupt) -> Fields:
    """CLS t SEP, corrupted -> the originals, scored where a token was selected."""
    targets = _between_cls_and_sep(examples, index)
    inputs, selected = corrupt(targets)
    return {'inputs': inputs, 'targets': targets, 'weights': selected.astype(np.float32)}


def classify(examples: Examples, index: int, corrupt: Corrupt) -> Fields:
    """CLS t SEP."""
    return {'inputs': _between_cls_and_sep(examples, index)}


def _between_cls_and_sep(examples: Examples, index: int) -> np.ndarray:
    tokens = examples.tokens[examples.record[index]][examples.start[index] : examples.stop[index]]
    return np.concatenate(([CLS], tokens, [SEP]), dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Form:
    """What the pipeline must know of an objective."""

    fields: Callable[[Examples, int, Corrupt], Fields]  # the arrays of one example, [its length]
    field: str = 'text'  # of a record: what becomes `Examples.tokens`
    before: tuple[int, ...] = ()  # stored before the tokens of a record
    after: tuple[int, ...] = ()  # and after them
    extra: int = 0  # special tokens that `fields` adds to an example
    in_pieces: bool = False  # long texts are cut into several examples
    two_stacks: bool = False
    labelled: bool = False


FORMS = {
    'causal_lm': Form(next_token, before=(BOS,), after=(EOS,), in_pieces=True),
    'masked_lm': Form(denoise, extra=2, in_pieces=True),
    'seq2seq': Form(translate, field='target', before=(BOS,), after=(EOS,), two_stacks=True),
    'classification': Form(classify, extra=2, labelled=True),
}

OVERLONG = {'drop': True, 'truncate': False}  # is a training example over the length left out?
