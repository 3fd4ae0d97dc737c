"""Batches of a split: random access by step, and an iterator that makes them ahead."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from tformer.config.run import Config
from tformer.data import corrupt, examples, packing, sources
from tformer.data.tokenizers import PAD, Tokenizers
from tformer.errors import UserError, choose

_LAYOUT, _PLAN, _CORRUPT = range(3)  # what a random stream is for
_ENDLESS = 1 << 40  # steps
_PADDING = {'inputs': PAD, 'targets': PAD, 'weights': 0.0, 'positions': -1, 'segment_ids': 0}


class Batches:
    """The batches of a split, each a pure function of the config, the data and its step.

    Training goes through the examples epoch after epoch, each example once an epoch, shuffled by (train.seed,
    epoch). Evaluation is one epoch in the order of the records, and one example a row: it never packs.

    Attributes:
      records: the split.
      num_examples: examples an epoch; a long text makes several under a language-model objective.
      num_dropped: records left out because they are over the length.
      num_truncated: records of which only the beginning is seen.
      shapes: the padded row lengths that occur, (T,) or (T, S): a compiled program each.
      steps_per_epoch: the same in every epoch.
    """

    def __init__(
        self,
        config: Config,
        tokenizers: Tokenizers,
        split: str,
        *,
        training: bool,
        multiple_of: int = 1,
        records: Sequence[sources.Record] | None = None,
    ) -> None:
        """Loads `split` (train, valid or test) unless `records` are given, tokenises it and lays out its rows.

        A batch has train.batch_size rows, or data.batch_tokens over its length of them, rounded down to a
        multiple of `multiple_of` (microbatches times data-parallel devices); at least one multiple.

        Raises:
          UserError: in the data, or a batching that the objective does not have.
        """
        data, objective = config.data, config.train.objective
        make_layout = choose(packing.BATCHING, data.batching, 'data.batching')
        self._form = choose(examples.FORMS, objective, 'train.objective')
        if self._form.labelled and data.batching == 'pack':
            raise UserError(f"data.batching='pack' is not for {objective}: a row has one label; use 'bucket'")
        self.config, self.training = config, training
        self._packed = training and data.batching == 'pack'
        if data.batching == 'pack' and not training:
            make_layout = packing.bucket
        self.records = sources.load(data, objective, split) if records is None else records
        self._examples = examples.tokenize(config, tokenizers, self.records, split, training)
        self.num_examples = len(self._examples)
        self.num_dropped, self.num_truncated = self._examples.num_dropped, self._examples.num_truncated
        self._vocab_size = tokenizers.target.vocab_size

        lengths = self._examples.lengths
        limits = np.array([data.length, data.encoder_length or data.length][: lengths.shape[1]])
        self._layout = make_layout(lengths, limits, data.num_buckets, self._rng(_LAYOUT) if training else None)
        self.shapes = self._layout.shapes
        self._batch_rows = tuple(_batch_rows(config, max(shape), multiple_of) for shape in self.shapes)
        self.steps_per_epoch = packing.num_steps(self._layout, self._batch_rows)
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)  # two: threads straddle the end of an epoch
        self._names = tuple(self._fields(0, epoch=0, segment=1))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of `step`: `inputs targets positions` int32 and `weights` float32 [B, T].

        Two stacks add `encoder_inputs encoder_positions` [B, S]. Packed rows add `[encoder_]segment_ids`, from 1,
        and their positions start at 0 in each segment. Classification has `labels` int32 and `label_weights`
        float32 [B] instead of targets and weights. Padding is PAD at position -1 in segment 0, of no weight.
        """
        epoch, bucket, rows = self._find(step)
        lengths = dict(zip(('', 'encoder_'), self.shapes[bucket], strict=False))
        batch = {name: _padding(name, len(rows), lengths) for name in self._names}
        for row, index in enumerate(rows[rows >= 0]):
            members = enumerate(self._layout.members[index], start=1)
            parts = [self._fields(int(example), epoch, segment) for segment, example in members]
            for name in self._names:
                values = np.concatenate([part[name] for part in parts])
                batch[name][row, : len(values)] = values
        if self._examples.labels is not None:
            records = self.rows(step)
            batch['labels'] = np.where(records >= 0, self._examples.labels[records], 0).astype(np.int32)
            batch['label_weights'] = (records >= 0).astype(np.float32)
        return batch

    def rows(self, step: int) -> np.ndarray:
        """int [B]: the index in `records` of each row of `batch(step)`, of its first example; -1: padding."""
        _, _, rows = self._find(step)
        members, filled = self._layout.members, rows >= 0
        records = np.full(len(rows), -1)
        records[filled] = self._examples.record[members.flat[members.offsets[rows[filled]]]]
        return records

    def _find(self, step: int) -> tuple[int, int, np.ndarray]:
        """The epoch of `step`, its bucket, and the rows of the layout in its batch; -1 from the first empty one."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if step < 0 or (epoch and not self.training):
            raise IndexError(f'step {step} of {self.steps_per_epoch}')
        plan = self._plan(epoch)
        bucket = int(plan.bucket[place])
        return epoch, bucket, plan.rows[place, : self._batch_rows[bucket]]

    def _make_plan(self, epoch: int) -> packing.Plan:
        return packing.plan(self._layout, self._batch_rows, self._rng(_PLAN, epoch) if self.training else None)

    def _fields(self, example: int, epoch: int, segment: int) -> examples.Fields:
        """The arrays of one example, [its length] each."""

        def mask(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rng = self._rng(_CORRUPT, epoch, example)
            return corrupt.mask_tokens(tokens, rng, self._vocab_size, self.config.data.mask_rate)

        fields = self._form.fields(self._examples, example, mask)
        for side in ('', 'encoder_')[: self._examples.lengths.shape[1]]:
            length = len(fields[f'{side}inputs'])
            fields[f'{side}positions'] = np.arange(length)
            if self._packed:
                fields[f'{side}segment_ids'] = np.full(length, segment)
        return fields

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng((self.config.train.seed, *stream))


def iterate(batches: Batches, start_step: int, config: Config) -> Iterator[dict[str, np.ndarray]]:
    """Yields `batches.batch(step)` from `start_step` on: endless in training, else to the end of the epoch.

    `data.num_threads` threads make `data.prefetch` batches ahead. Order and content do not depend on either.
    """
    stop = _ENDLESS if batches.training else batches.steps_per_epoch
    ahead = grain.ReadOptions(num_threads=config.data.num_threads, prefetch_buffer_size=config.data.prefetch)
    steps = grain.MapDataset.range(start_step, stop)
    with contextlib.closing(iter(steps.map(batches.batch).to_iter_dataset(ahead))) as made:
        yield from made


def _batch_rows(config: Config, length: int, multiple_of: int) -> int:
    tokens = config.data.batch_tokens
    rows = config.train.batch_size if tokens is None else tokens // length
    return max(rows // multiple_of, 1) * multiple_of


def _padding(name: str, rows: int, lengths: dict[str, int]) -> np.ndarray:
    """[rows, length of the side that `name` belongs to], nothing in it yet."""
    side = 'encoder_' if name.startswith('encoder_') else ''
    value = _PADDING[name.removeprefix(side)]
    return np.full((rows, lengths[side]), value, np.float32 if isinstance(value, float) else np.int32)
