"""The report of `inspect --data`, on the data of a run before it trains.

It shows the amount of data, the lengths of the texts, the share of padding, the duplicates, and rows as the model reads
them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tformer.config import Config, override
from tformer.data import cache
from tformer.data.batches import mixture
from tformer.data.batches.pipeline import Batches
from tformer.data.examples.example_formats import format_of
from tformer.data.inspection import amounts, duplicates, padding, rendering
from tformer.data.inspection.duplicates import Say, Texts
from tformer.data.inspection.rendering import Cell, Line, harmless, share, table
from tformer.data.ragged import Ragged
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
    """Yields the lines of the report, each section as soon as it is computed; `say` takes lines of progress.

    The rows of a batch are rounded to `row_multiple` (None: data.row_multiple).
    """
    records, absent = {'train': train}, []
    for split in ('valid', 'test'):
        try:
            records[split] = mixture.load(config, split)
            len(records[split])
        except NoSplitError as error:
            records.pop(split, None)
            absent.append(harmless(f'no {split} split: {error}', 110))
    splits = {}
    for split, own in records.items():
        say(f'tokenising and laying out the {split} split')
        training = split == 'train'
        splits[split] = Batches(config, tokenizers, split, training=training, records=own, row_multiple=row_multiple)
        config = override(config, {'data.num_buckets': splits[split].num_buckets})  # as training has them
    yield from _section('records', [*amounts.records(config, splits, records), *absent])
    fields = list(amounts.text_columns(config, splits['train']).values())
    texts: dict[str, list[Texts]] = {}
    if any(part.of_tokens for parts in records.values() for part in parts.splits):
        yield from _section('text', ['files of tokens have none: bytes, unknown and duplicate texts are not counted'])
    else:
        texts |= {of: [duplicates.read(part, fields, say) for part in parts.splits] for of, parts in records.items()}
        yield from _section('text', amounts.vocabulary(config, tokenizers, splits, texts))
    if tokenizers.labels:
        yield from _section('labels', amounts.labels(tokenizers.labels, splits))
    yield from _section(
        'lengths of the records in tokens, with special tokens, before cutting', lengths(config, splits)
    )
    yield from _section('batches of one epoch', batching(splits))
    paddings = padding.compared(config, splits['train'])
    yield from _section('padding of train under other data.batching and data.num_buckets', compared(paddings))
    if texts:
        yield from _section('duplicate records', repeated(records, texts))
    if count := config.evaluate.samples:
        shown = list(rows(splits['train'], tokenizers, count))
        yield from _section(f'{count} rows of the first epoch', ())
        yield rendering.legend(shown)
        yield from shown
    yield from _section('token cache', cached(config, splits))


def _section(title: str, lines: Iterable[str]) -> Iterator[Line]:
    yield [('', 'text')]
    yield [(title, 'title')]
    for line in lines:
        yield [(f'  {line}'.rstrip(), 'text')]


def lengths(config: Config, splits: Mapping[str, Batches]) -> list[str]:
    """Percentiles of the records' lengths; for the training split also the longest record, which is often a mistake in
    the data, and a histogram."""
    data, num_specials = config.data, format_of(config).num_specials
    cells: list[tuple[Cell, ...]] = []
    bars: list[str] = []
    fields = amounts.text_columns(config, splits['train'])
    for (split, batches), (column, field) in itertools.product(splits.items(), fields.items()):
        option, limit = 'data.length', data.length
        if column == 'sources':
            option, limit = 'data.encoder_length', data.encoder_length or data.length
        around = (data.start, data.end, data.separator)[:num_specials]
        beside = len(data.source_start + data.source_end) if column == 'sources' else sum(map(len, around))
        beside = -1 if num_specials is None else beside
        several = column == 'tokens' and format_of(config).several
        sizes = np.concatenate([_sizes(part.examples.columns, column, beside, several) for part in batches.parts])
        percentiles = (f'{value:,.0f}' for value in (*np.percentile(sizes, (50, 90, 99)), sizes.max()))
        over = share((sizes > limit).sum(), len(sizes))
        cells.append((f'{split} {field}', f'{sizes.mean():,.1f}', *percentiles, limit, over))
        if split == 'train':
            index = int(sizes.argmax())
            longest = f'longest: record {index + 1:,}: {harmless(text_of(batches.records[index], field))}'
            bars += ['', f'train {field}, {longest}', *histogram(sizes, limit, option)]
    return table(('', 'mean', '50 %', '90 %', '99 %', 'longest', 'limit', 'over limit'), cells) + bars


def _sizes(columns: Mapping[str, Ragged], column: str, beside: int, several: bool) -> np.ndarray:
    """Returns the tokens of each record in a column, with `beside` special ones around its text or each of several."""
    texts = columns['ends'].lengths if several else 1
    return columns[column].lengths + beside * texts


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


def batching(splits: Mapping[str, Batches]) -> list[str]:
    """The padding of each split in one epoch, and the shapes of training batches."""
    epochs = {split: padding.filled(batches) for split, batches in splits.items()}
    in_splits: list[tuple[Cell, ...]] = []
    for split, epoch in epochs.items():
        slots, tokens = round(epoch.slots.sum()), round(epoch.tokens.sum())
        in_splits.append((split, f'{splits[split].steps_per_epoch:,.1f}', slots, tokens, *_paddings(epoch)))
    train, epoch = splits['train'], epochs['train']
    in_shapes: list[tuple[Cell, ...]] = []
    for shape, width, rows, slots, tokens in zip(
        train.shapes, train.widths, epoch.rows, epoch.slots.sum(axis=1), epoch.tokens.sum(axis=1), strict=True
    ):
        counts = width, f'{rows / width:,.1f}', round(slots), round(tokens)
        in_shapes.append((' x '.join(map(str, shape)), *counts, share(slots - tokens, slots)))
    shape_of = 'target x source' if len(train.shapes[0]) > 1 else 'length'
    return [
        *table(('', 'batches', 'slots', 'tokens', 'padding', 'of target', 'of source'), in_splits),
        '',
        *table((shape_of, 'rows per batch', 'batches', 'slots', 'tokens', 'padding'), in_shapes),
    ]


def compared(epochs: Mapping[str, padding.Filled]) -> list[str]:
    """The padding under each batching, and the number of programs that it compiles."""
    headings = '', 'programs', 'padding', 'of target', 'of source'
    return table(headings, [(name, len(epoch.shapes), *_paddings(epoch)) for name, epoch in epochs.items()])


def _paddings(epoch: padding.Filled) -> tuple[str, ...]:
    """The padding of all stacks, and of each where there are two."""
    whole, *by_stack = (share(max(value, 0), 1) for value in (epoch.padding, *epoch.paddings))
    return whole, *(by_stack if len(by_stack) == 2 else ('', ''))


def repeated(records: Mapping[str, Sequence[Record]], texts: Mapping[str, Sequence[Texts]]) -> list[str]:
    """How many training records occurred before, how many of the other splits' are in train, and two of each."""
    whole = {split: duplicates.joined(parts) for split, parts in texts.items()}
    cells: list[list[Cell]] = []
    samples: list[str] = []
    keys = list(dict.fromkeys(reversed([key for _, key in whole['train'].hashes])))
    for split, key in itertools.product(whole, keys):
        name = f'{split}: {key} in train' + (' before' if split == 'train' else '')
        cells.append([name])
        found = {}
        for alike in duplicates.ALIKE:
            hashes, of_train = (whole[side].hashes[alike, key] for side in (split, 'train'))
            found[alike] = duplicates.within(hashes) if split == 'train' else duplicates.across(hashes, of_train)
            cells[-1] += [len(found[alike]), share(len(found[alike]), len(hashes))]
        fields = whole[split].num_bytes if key == 'whole' else (key,)
        for index in found['exact'][:2].tolist():
            text = ' → '.join(text_of(records[split][index], field) for field in fields)
            samples.append(f'{name}: {harmless(text, 60)}')
    headings = ['', *itertools.chain.from_iterable((alike, 'share') for alike in duplicates.ALIKE)]
    notes = 'exact ignores outer spaces and Unicode composition; near also ignores case and the amount of space'
    return [*table(headings, cells), notes, *samples]


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
