"""The batches of a split: random access by step, and an iterator that prefetches."""

import collections
import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from tformer.config import extensions, hashing
from tformer.config.mixtures import parts
from tformer.config.run import Config
from tformer.data import worker
from tformer.data.batches import layout, mixture, packing
from tformer.data.examples import corrupt, example_arrays, example_formats
from tformer.data.examples.special_tokens import Fields
from tformer.data.sources.records import Record, Split
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError, check_memory

_ENDLESS = 1 << 40  # steps
_PADDING: dict[str, Any] = {  # other arrays: the pad token
    'weights': 0,
    'prefix': False,
    'token_types': 0,
    'positions': -1,
    'segment_ids': 0,
}

Batch = dict[str, np.ndarray]


class Batches:
    """The batches of a split. Each is a pure function of the config, the data and the step.

    Training batches never end: rows are shuffled by train.seed, and the parts of a mixture meet in each batch
    (`layout.TrainSampler`). Evaluation is one epoch in the order of the records, one example per row: it never packs.

    Attributes:
      records: of the split; the parts of a mixture one after the other.
      parts: the parts of the mixture, laid out.
      shapes: the padded row lengths, (T,) or (T, S); each that occurs is compiled as its own program.
      num_buckets: data.num_buckets, or the number that suits the lengths of this split.
      widths: the rows of a batch of each shape.
      steps_per_epoch: in training a mean, because batches cross the ends of epochs.
    """

    def __init__(
        self,
        config: Config,
        tokenizers: Tokenizers,
        split: str,
        *,
        training: bool,
        records: Sequence[Record] | None = None,
        row_multiple: int | None = None,
    ) -> None:
        """Loads `split` (train, valid or test) unless `records` are given, tokenises it and lays out its rows.

        A batch has train.batch_size rows; with data.batch_tokens it has that many tokens over its length, rounded down
        to a multiple of `row_multiple` (None: data.row_multiple), and at least one multiple.

        Raises:
          UserError: the data is at fault, or the objective does not allow data.batching.
        """
        data = config.data
        self.config, self.training, self._tokenizer = config, training, tokenizers.target
        self._format = example_formats.format_of(config)
        packs = example_formats.packs(config)
        self._packed = training and packs
        self.records = mixture.load(config, split) if records is None else records
        splits = self.records.splits if isinstance(self.records, mixture.Concatenation) else [self.records]
        mixed = training and len(splits) > 1
        examples = _examples(config, tokenizers, splits, split, training)
        weights = [part.weight for part in parts(data)] if mixed else [None] * len(splits)
        sizes = list(map(len, examples))
        epochs = mixture.epochs_of_parts(weights, sizes, data.mixture_temperature)
        self._stages = mixture.stages(data, sizes) if mixed else []
        if self._stages and self._stages[0][0] == 0:
            epochs = self._stages.pop(0)[1]

        batching = 'bucket' if packs and not training else data.batching
        lengths, counts = map(np.concatenate, zip(*(part.spans.counted() for part in examples), strict=True))
        limits = np.array([data.length, data.encoder_length or data.length][: lengths.shape[1]])
        self.num_buckets = data.num_buckets or packing.enough_buckets(
            lengths, limits, counts, _steps(config, sum(sizes))
        )
        self.shapes = packing.BATCHING[batching].shapes(lengths, limits, self.num_buckets, counts)
        self.widths = _widths(config, self.shapes, row_multiple or data.row_multiple or 1)
        self.parts = tuple(
            layout.lay_out(config, index, part, epochs[index], batching, self.shapes, isinstance(records_, Split))
            for index, (part, records_) in enumerate(zip(examples, splits, strict=True))
        )
        self._sampler: layout.TrainSampler | layout.EvalSampler = (
            layout.TrainSampler(self.parts, self.widths, config.train.seed, self._stages)
            if training
            else layout.EvalSampler(self.parts, self.widths, self.shapes)
        )
        self.steps_per_epoch = self._sampler.steps_per_epoch

        fullest = max(range(len(examples)), key=lambda part: examples[part].fullest()[0])
        fields = self._fields(fullest, examples[fullest].fullest()[1], epoch=0)
        example = {name: np.asarray(value) for name, value in fields.items()}
        self._per_row = {name: example.pop(name) for name in example_arrays.OF_ROWS if name in example}
        self._dtypes: dict[str, dict[str, np.dtype]] = {side: {} for side in ('', 'encoder_')[: lengths.shape[1]]}
        for name, array in example.items():
            self._dtypes['encoder_' if name.startswith('encoder_') else ''][name] = array.dtype
        self._positions = np.arange(lengths.max(), dtype=np.int32)

    def __getstate__(self) -> dict[str, Any]:
        """The state that another process needs to make batches: everything but the records.

        That process first imports the extensions that the rest refers to.
        """
        return {'_extensions': extensions.Pickled(self.config), **vars(self), 'records': ()}

    @property
    def num_examples(self) -> int:
        """The number of examples of all parts; language modelling cuts a long text into several."""
        return sum(len(part.examples) for part in self.parts)

    @property
    def summary(self) -> str:
        """The number of examples, and of records that were left out, cut or skipped."""
        left_out = {
            'left out as too long': sum(part.examples.num_dropped for part in self.parts),
            'cut to the length': sum(part.examples.num_truncated for part in self.parts),
            'skipped as bad': sum(part.examples.num_skipped for part in self.parts),
        }
        notes = ', '.join(f'{count:,} {what}' for what, count in left_out.items() if count)
        shares = ', '.join(f'{part.epochs:.3g}' for part in self.parts)
        mixed = f' of {len(self.parts)} parts' if len(self.parts) > 1 else ''
        mixed += f' (passes per epoch: {shares})' if mixed and self.training else ''
        notes = f' ({notes})' if notes else ''
        return f'{self.num_examples:,} examples{mixed}{notes}, {self.steps_per_epoch:,.1f} steps per epoch'

    @functools.cached_property
    def shape_order(self) -> tuple[Any, ...]:
        """What decides the shape of each training batch: where it is equal, so are the shapes of each step."""
        rates = self._sampler.batch_rates if isinstance(self._sampler, layout.TrainSampler) else ()
        rates = [tuple(own) for own in rates] if len(self.shapes) > 1 else []
        return self.shapes, self.widths, *rates, *([start for start, _ in self._stages] if rates else [])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the tokenised records and their positions in the batches."""
        parts = (f'{part.examples.fingerprint} {part.epochs}'.encode() for part in self.parts)
        stages = [repr(self._stages).encode()] if self._stages else []
        return hashing.digest_bytes(repr((self.shapes, self.widths)).encode(), *parts, *stages, size=8)

    def batch(self, step: int, share: tuple[int, int] = (0, 1)) -> Batch:
        """Returns the batch of `step`: `inputs` and `positions` int32 [B, T], and the other arrays of the objective.

        Those may be `targets` int32, `weights` float32, `prefix` bool and `token_types` int32 [B, T]; `labels` int32 or
        float32 [B] (of an answer [B, 2]) and `label_weights` float32 [B]; and `encoder_inputs` and `encoder_positions`
        int32 [B, S]. Packed rows also have `[encoder_]segment_ids`, from 1, and their positions start at 0 in each
        segment. Padding is the pad token at position -1, in segment 0, with weight 0 and outside the prefix.

        Args:
          step: from 0.
          share: (index, count): returns one of `count` equal shares of the rows, which one host feeds.
        """
        bucket, rows = self._find(step)
        mine = range(share[0] * len(rows.part) // share[1], (share[0] + 1) * len(rows.part) // share[1])
        batch = self._empty(len(mine), self.shapes[bucket])
        for index, row in enumerate(mine):
            if rows.part[row] >= 0:
                self._fill({name: array[index, ...] for name, array in batch.items()}, rows, row)
        return batch

    def kinds(self, steps: Iterable[int]) -> list[Batch]:
        """Returns a batch of padding of each shape that the batches of `steps` have, in the order of their first."""
        found: dict[int, Batch] = {}
        for step in steps:
            bucket, _ = self._find(step)
            if bucket not in found:
                found[bucket] = self._empty(self.widths[bucket], self.shapes[bucket])
            if len(found) == len(self.shapes):
                break
        return list(found.values())

    def _fill(self, arrays: Batch, rows: layout.Rows, row: int) -> None:
        """Writes row number `row` into `arrays`, the views of this row in each array of a batch of padding."""
        part, epoch, ends = int(rows.part[row]), int(rows.epoch[row]), dict.fromkeys(self._dtypes, 0)
        for segment, example in enumerate(self.parts[part].rows[rows.row[row]].tolist(), start=1):
            fields = self._fields(part, example, epoch)
            for side, start in ends.items():
                ends[side] = stop = start + len(fields[f'{side}inputs'])
                arrays[f'{side}positions'][start:stop] = self._positions[: stop - start]
                if self._packed:
                    arrays[f'{side}segment_ids'][start:stop] = segment
                for name in self._dtypes[side]:
                    arrays[name][start:stop] = fields[name]
            for name in self._per_row:
                arrays[name][tuple(map(slice, np.shape(fields[name])))] = fields[name]

    def segments(self, step: int) -> list[list[tuple[int, int, int]]]:
        """Returns (part, record of the part, example of the part) of each segment of each row of `batch(step)`."""
        _, rows = self._find(step)
        segments: list[list[tuple[int, int, int]]] = []
        for index, row in zip(rows.part.tolist(), rows.row.tolist(), strict=True):
            part = self.parts[index]
            members = part.rows[row].tolist() if index >= 0 else []
            segments.append([(index, part.examples.spans[example][0], example) for example in members])
        return segments

    def _find(self, step: int) -> tuple[int, layout.Rows]:
        if step < 0 or (not self.training and step >= self.steps_per_epoch):
            raise IndexError(f'step {step} of {self.steps_per_epoch}')
        return self._sampler.find(step)

    def _fields(self, part: int, example: int, epoch: int) -> Fields:
        """The arrays of one example of a part, as corrupted in this epoch."""
        data, seed = self.config.data, self.config.train.seed
        key = corrupt.noise_key(seed, layout.CORRUPT, part, epoch, example, data.mask_copies)
        noise = corrupt.Noise(data, self._tokenizer, key)
        return self._format.fields(self.parts[part].examples, example, noise)

    def _empty(self, rows: int, shape: tuple[int, ...]) -> Batch:
        """A batch of padding."""
        template = self.parts[0].examples.template
        batch: Batch = {}
        for (side, dtypes), length in zip(self._dtypes.items(), shape, strict=True):
            pad = (template.source if side else template.specials).pad
            for name, dtype in dtypes.items():
                batch[name] = np.full((rows, length), _PADDING.get(name, pad), dtype)
            batch[f'{side}positions'] = np.full((rows, length), -1, np.int32)
            if self._packed:
                batch[f'{side}segment_ids'] = np.zeros((rows, length), np.int32)
        for name, value in self._per_row.items():
            batch[name] = np.zeros((rows, *value.shape), value.dtype)
        return batch


def _steps(config: Config, examples: int) -> float:
    """Returns about how many steps a run has, before its batches are known."""
    return config.train.num_steps or max(1.0, (config.train.num_epochs or 0) * examples / config.train.batch_size)


def _widths(config: Config, shapes: packing.Shapes, multiple: int) -> tuple[int, ...]:
    """Returns the rows of a batch of each shape; raises a `UserError` where the largest exceeds the memory."""
    tokens = config.data.batch_tokens
    rows = [config.train.batch_size if tokens is None else tokens // max(shape) for shape in shapes]
    widths = tuple(max(count // multiple, 1) * multiple for count in rows)
    most, shape = max(zip(widths, shapes, strict=True), key=lambda each: each[0] * sum(each[1]))
    # The tokens, positions, targets and weights have 4 bytes each.
    check_memory(f'batches of {most:,} rows of {" + ".join(map(str, shape))} tokens', 16 * most * sum(shape))
    return widths


def _examples(
    config: Config, tokenizers: Tokenizers, splits: Sequence[Sequence[Record]], split: str, training: bool
) -> list[example_arrays.Examples]:
    """The examples of each part; an error names its part of a training mixture."""
    examples = []
    for index, records in enumerate(splits):
        try:
            examples.append(example_formats.make(config, tokenizers, records, split, training))
        except UserError as error:
            in_part = f'data.mixture[{index}]: ' if training and len(splits) > 1 else ''
            raise UserError(f'{in_part}{error}') from error
    return examples


def iterate(
    batches: Batches, start_step: int, config: Config, share: tuple[int, int] = (0, 1)
) -> Generator[Batch, None, None]:
    """Yields `batches.batch(step, share)` from `start_step` on, without end in training, else to the end of the epoch.

    data.num_workers processes (0 or None: this one) with data.num_threads threads prefetch data.prefetch batches. The
    batches and their order do not depend on these numbers.
    """
    data = config.data
    stop = _ENDLESS if batches.training else int(batches.steps_per_epoch)
    if not data.num_workers:
        yield from _by_threads(batches, range(start_step, stop), share, data.num_threads, data.prefetch)
        return
    import grain  # and so Orbax: slow to import

    ahead = grain.ReadOptions(num_threads=data.num_threads, prefetch_buffer_size=data.prefetch)
    steps = grain.MapDataset.range(start_step, stop).map(functools.partial(batches.batch, share=share))
    dataset = steps.to_iter_dataset(ahead)
    most = max(8, 4 * (os.cpu_count() or 1))
    if batches.training and data.num_workers > most:
        raise UserError(f'data.num_workers={data.num_workers} must be at most {most}: 4 for each core')
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain passes absl's flags on to its processes, and fails if none were parsed
    per_worker = -(-data.prefetch // data.num_workers)
    workers = grain.MultiprocessingOptions(data.num_workers, per_worker_buffer_size=per_worker)
    # Pipes and not shared memory, which killed runs leave behind and of which containers have little.
    pipes = grain.experimental.DatasetOptions(min_shm_size=1 << 62)
    dataset = grain.experimental.WithOptionsIterDataset(dataset.mp_prefetch(workers, worker.follow), pipes)
    with contextlib.closing(iter(dataset)) as prefetched:
        yield from worker.watched(prefetched, data.num_workers)


def _by_threads(
    batches: Batches, steps: Iterable[int], share: tuple[int, int], threads: int, prefetch: int
) -> Iterator[Batch]:
    """Yields the batches of steps, of which threads of this process make some ahead."""
    coming: collections.deque[concurrent.futures.Future[Batch]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads, 'batches') as pool:
        try:
            for step in steps:
                coming.append(pool.submit(batches.batch, step, share))
                if len(coming) > prefetch:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
