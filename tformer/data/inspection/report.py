"""The report of `inspect --data`, on the data of a run before it trains.

It shows the amount of data, the lengths of the texts, the share of padding, the duplicates, and rows as the model reads
them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tformer.config.run import Config
from tformer.data import cache
from tformer.data.batches import mixture
from tformer.data.batches.pipeline import Batches
from tformer.data.examples.example_formats import format_of
from tformer.data.inspection import amounts, duplicates, padding, rendering
from tformer.data.inspection.duplicates import Say, Texts
from tformer.data.inspection.rendering import Line, harmless, share, table
from tformer.data.sources.records import Record, text_of
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import NoSplitError

_BAR, _BARS = 60, 8  # columns of the longest bar; the most bars of equal steps


def report(
    config: Config,
    tokenizers: Tokenizers,
    train: mixture.Concatenation,
    say: Say,
    row_multiple: int | None = None,
) -> Iterator[Line]:
    """Yields the lines of the report, each section as soon as it is computed.

    Args:
      config: of the run.
      tokenizers: of the run.
      train: the records of its training split.
      say: takes lines of progress.
      row_multiple: what the rows of a batch are rounded to; None: data.row_multiple.

    Raises:
      UserError: the data is at fault.
    """
    records, absent = {'train': train}, []
    for split in ('valid', 'test'):
        try:
            evaluated = mixture.load(config, split)
            len(evaluated)
        except NoSplitError as error:
            absent.append(f'no {split} split: {error}')
        else:
            records[split] = evaluated
    splits = {}
    for split, concatenation in records.items():
        say(f'tokenising and laying out the {split} split')
        training = split == 'train'
        splits[split] = Batches(
            config, tokenizers, split, training=training, records=concatenation, row_multiple=row_multiple
        )
    yield from _section(
        'records', [*amounts.records(config, splits, records), *(harmless(line, 110) for line in absent)]
    )
    fields = _fields_with_text(config, splits['train'])
    texts = {split: [duplicates.read(part, fields, say) for part in parts.splits] for split, parts in records.items()}
    yield from _section('text', amounts.vocabulary(config, tokenizers, splits, texts))
    if tokenizers.labels:
        yield from _section('labels', amounts.labels(tokenizers.labels, splits))
    yield from _section(
        'lengths of the records in tokens, with special tokens, before cutting', lengths(config, splits)
    )
    yield from _section('batches of one epoch', batching(splits))
    paddings = padding.compared(config, splits['train'])
    yield from _section('padding of train under other data.batching and data.num_buckets', compared(paddings))
    yield from _section('duplicate records', repeated(records, texts))
    if count := config.evaluate.samples:
        shown = list(rows(splits['train'], tokenizers, count))
        yield from _section(f'{count} rows of the first epoch', ())
        yield rendering.legend(shown)
        yield from shown
    yield from _section('token cache', cached(config, splits))


def _fields_with_text(config: Config, train: Batches) -> list[str]:
    """The fields with text that some training record has."""
    columns_of_parts = [part.examples.columns for part in train.parts]
    return [
        field
        for column, field in format_of(config).encoding.texts.items()
        if any(len(columns[column].flat) for columns in columns_of_parts)
    ]


def _section(title: str, lines: Iterable[str]) -> Iterator[Line]:
    yield [('', 'text')]
    yield [(title, 'title')]
    for line in lines:
        yield [(f'  {line}'.rstrip(), 'text')]


# ------------------------------------------------------------------------------------------------------------- lengths


def lengths(config: Config, splits: Mapping[str, Batches]) -> list[str]:
    """Percentiles of the records' lengths; for the training split also the longest record, which is often a mistake in
    the data, and a histogram."""
    lines: list[tuple[str, ...]] = [('', 'mean', '50 %', '90 %', '99 %', 'longest', 'limit', 'over limit')]
    bars: list[str] = []
    for split, batches in splits.items():
        for side, field, sizes, limit in _sides(config, batches):
            percentiles = (f'{value:,.0f}' for value in (*np.percentile(sizes, (50, 90, 99)), sizes.max()))
            over = share((sizes > limit).sum(), len(sizes))
            lines.append((f'{split} {side}', f'{sizes.mean():,.1f}', *percentiles, f'{limit:,}', over))
            if split == 'train':
                index = int(sizes.argmax())
                longest = f'longest: record {index + 1:,}: {harmless(text_of(batches.records[index], side))}'
                bars += ['', f'train {side}, {longest}', *histogram(sizes, limit, field)]
    return table(lines) + bars


def _sides(config: Config, batches: Batches) -> Iterator[tuple[str, str, np.ndarray, int]]:
    """Yields for each field with text: the field, the config field of its limit, the positions that each record takes
    uncut (int [records]), and the limit."""
    example_format, data = format_of(config), config.data
    columns_of_parts = [part.examples.columns for part in batches.parts]
    for column, field in example_format.encoding.texts.items():
        sizes = np.concatenate([columns[column].lengths for columns in columns_of_parts]) + example_format.num_specials
        if column == 'sources':
            yield field, 'data.encoder_length', sizes, data.encoder_length or data.length
        elif sizes.max() > example_format.num_specials:
            yield field, 'data.length', sizes, data.length


def histogram(sizes: np.ndarray, limit: int, field: str) -> list[str]:
    """Draws a histogram of `sizes` [N]: bars of equal steps for most of them, then steps that double; a line marks the
    limit of the config field `field`."""
    step = max(1, -(-min(limit, int(np.percentile(sizes, 99))) // _BARS))
    top = min(limit, step * _BARS)
    edges = {0, *range(step, top, step), top}
    while max(edges) < sizes.max():
        edges.add(max(edges) * 2)
    inner = sorted(edges | ({limit} if limit < sizes.max() else set()))
    counts = np.histogram(sizes, np.array(inner) + 0.5)[0]
    counts[:1] += (sizes == 0).sum()
    lines: list[str] = []
    for low, high, count in zip(inner[:-1], inner[1:], counts, strict=True):
        if not (lines or count):
            continue
        bar = '█' * round(_BAR * count / counts.max()) or '▏' * bool(count)
        lines.append(f'{low + 1:>10,} -{high:>10,}  {count:>11,} {share(count, len(sizes)):>7}  {bar}')
        if high == limit:
            lines.append(f'{"":>10}  {f"{field} = {limit:,} ":─<50}')
    return lines


# ------------------------------------------------------------------------------------------------------------- batches


def batching(splits: Mapping[str, Batches]) -> list[str]:
    """The padding of each split in one epoch, and the shapes of training batches."""
    stacks = len(splits['train'].shapes[0])
    lines: list[tuple[str, ...]] = [('', 'batches', 'slots', 'tokens', 'padding', *_SIDES[stacks])]
    for split, batches in splits.items():
        epoch = padding.filled(batches)
        slots, tokens = (f'{values.sum():,.0f}' for values in (epoch.slots, epoch.tokens))
        lines.append((split, f'{batches.steps_per_epoch:,.1f}', slots, tokens, *_paddings(epoch)))
    epoch, train = padding.filled(splits['train']), splits['train']
    shapes: list[tuple[str, ...]] = [
        ('target x source' if stacks > 1 else 'length', 'rows per batch', 'batches', 'slots', 'tokens', 'padding')
    ]
    for shape, width, rows, slots, tokens in zip(
        train.shapes, train.widths, epoch.rows, epoch.slots.sum(axis=1), epoch.tokens.sum(axis=1), strict=True
    ):
        counts = f'{width:,}', f'{rows / width:,.1f}', f'{slots:,.0f}', f'{tokens:,.0f}'
        shapes.append((' x '.join(map(str, shape)), *counts, share(slots - tokens, slots)))
    return [*table(lines), '', *table(shapes)]


def compared(epochs: Mapping[str, padding.Filled]) -> list[str]:
    """The padding under each batching, and the number of programs that it compiles."""
    stacks = len(next(iter(epochs.values())).paddings)
    rows = [(name, f'{len(epoch.shapes)}', *_paddings(epoch)) for name, epoch in epochs.items()]
    return table([('', 'programs', 'padding', *_SIDES[stacks]), *rows])


_SIDES: dict[int, tuple[str, ...]] = {1: (), 2: ('of target', 'of source')}  # by the number of stacks


def _paddings(epoch: padding.Filled) -> tuple[str, ...]:
    by_stack = epoch.paddings if len(epoch.paddings) > 1 else ()
    return tuple(share(max(value, 0), 1) for value in (epoch.padding, *by_stack))


# ---------------------------------------------------------------------------------------------- duplicates, rows, cache


def repeated(records: Mapping[str, Sequence[Record]], texts: Mapping[str, Sequence[Texts]]) -> list[str]:
    """How many training records occurred before, how many of the other splits' are in train, and two of each."""
    whole = {split: duplicates.joined(parts) for split, parts in texts.items()}
    lines: list[tuple[str, ...]] = [('', *(cell for alike in duplicates.ALIKE for cell in (alike, 'share')))]
    samples: list[str] = []
    keys = list(dict.fromkeys(reversed([key for _, key in whole['train'].hashes])))
    for split, key in itertools.product(whole, keys):
        name = f'{split}: {key} in train' + (' before' if split == 'train' else '')
        repeats = {alike: _repeats(whole, split, (alike, key)) for alike in duplicates.ALIKE}
        size = len(whole[split].hashes['exact', key])
        lines.append((name, *(c for at in repeats.values() for c in (f'{len(at):,}', share(len(at), size)))))
        fields = whole[split].num_bytes if key == 'whole' else (key,)
        for index in repeats['exact'][:2].tolist():
            text = ' → '.join(text_of(records[split][index], field) for field in fields)
            samples.append(f'{name}: {harmless(text, 60)}')
    notes = 'exact ignores outer spaces and Unicode composition; near also ignores case and the amount of space'
    return [*table(lines), notes, *samples]


def _repeats(whole: Mapping[str, Texts], split: str, kind: tuple[str, str]) -> np.ndarray:
    """The indices of the records of a split that occur earlier in train, or in train at all if it is another split."""
    hashes = whole[split].hashes[kind]
    return duplicates.within(hashes) if split == 'train' else duplicates.across(hashes, whole['train'].hashes[kind])


def rows(batches: Batches, tokenizers: Tokenizers, count: int) -> Iterator[Line]:
    """Shows `count` rows, evenly spread over the batches of the first epoch."""
    steps, tags = max(1, int(batches.steps_per_epoch)), 'tags' in batches.parts[0].examples.columns
    for shown in range(count):
        step = shown * steps // count
        batch = batches.batch(step)
        index = shown * len(batch['inputs']) // count
        shape = ' x '.join(str(batch[name].shape[1]) for name in ('inputs', 'encoder_inputs') if name in batch)
        yield [(f'  step {step}, row {index} of {len(batch["inputs"])}, {shape}', 'faint')]
        yield from rendering.row(batch, index, tokenizers, tags)


def cached(config: Config, splits: Mapping[str, Batches]) -> list[str]:
    """The directory of the token cache, and the size of this run's entries."""
    entries = {
        Path(file).parent
        for batches in splits.values()
        for part in batches.parts
        for ragged in (*part.examples.columns.values(), part.rows)
        for file in ragged.files
    }
    size = sum(file.stat().st_size for entry in entries for file in entry.iterdir())
    return [f'{cache.directory(config.data)}: {len(entries)} entries belong to this run, {size:,} bytes']
