"""A look at the data of a run before it trains: how much there is, how long, how much of a batch is padding, what comes
twice, and what the model will read."""

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

_BAR, _BARS = 60, 8  # columns of the longest bar; bars of equal steps, at most


def report(config: Config, tokenizers: Tokenizers, train: mixture.Concatenation, say: Say) -> Iterator[Line]:
    """Yields the lines of the report, each section as soon as it is known.

    Args:
      config: a run.
      tokenizers: of the run.
      train: the records of its training split.
      say: takes lines of progress.

    Raises:
      UserError: in the data.
    """
    records, absent = {'train': train}, []
    for split in ('valid', 'test'):
        try:
            there = mixture.load(config, split)
            len(there)
        except NoSplitError as error:
            absent.append(f'no {split} split: {error}')
        else:
            records[split] = there
    splits = {}
    for split, some in records.items():
        say(f'tokens and rows of the {split} split')
        splits[split] = Batches(config, tokenizers, split, training=split == 'train', records=some)
    yield from _section(
        'records', [*amounts.records(config, splits, records), *(harmless(line, 110) for line in absent)]
    )
    given = [part.examples.columns for part in splits['train'].parts]
    texts_of = format_of(config).encoding.texts.items()
    fields = [field for column, field in texts_of if any(len(columns[column].flat) for columns in given)]
    texts = {split: [duplicates.read(part, fields, say) for part in some.splits] for split, some in records.items()}
    yield from _section('text', amounts.vocabulary(config, tokenizers, splits, texts))
    if tokenizers.labels:
        yield from _section('labels', amounts.labels(tokenizers.labels, splits))
    yield from _section('lengths of the records in tokens, special ones among them, uncut', lengths(config, splits))
    yield from _section('batches of an epoch', batching(splits))
    found = padding.compared(config, splits['train'])
    yield from _section('padding of train with other data.batching, data.num_buckets', compared(found))
    yield from _section('records that come again', repeated(records, texts))
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


# ------------------------------------------------------------------------------------------------------------- lengths


def lengths(config: Config, splits: Mapping[str, Batches]) -> list[str]:
    """Percentiles of the records' lengths; the longest of training, often a mistake in the data, and bars."""
    lines: list[tuple[str, ...]] = [('', 'mean', '50 %', '90 %', '99 %', 'longest', 'limit', 'over it')]
    bars: list[str] = []
    for split, batches in splits.items():
        for side, field, sizes, limit in _sides(config, batches):
            found = (f'{value:,.0f}' for value in (*np.percentile(sizes, (50, 90, 99)), sizes.max()))
            over = share((sizes > limit).sum(), len(sizes))
            lines.append((f'{split} {side}', f'{sizes.mean():,.1f}', *found, f'{limit:,}', over))
            if split == 'train':
                place = int(sizes.argmax())
                longest = f'longest: record {place + 1:,}: {harmless(text_of(batches.records[place], side))}'
                bars += ['', f'train {side}, {longest}', *histogram(sizes, limit, field)]
    return table(lines) + bars


def _sides(config: Config, batches: Batches) -> Iterator[tuple[str, str, np.ndarray, int]]:
    """(field, the field of its limit, int [records] positions that each would take, the limit) of each text."""
    example_format, data = format_of(config), config.data
    found = [part.examples for part in batches.parts]
    for column, field in example_format.encoding.texts.items():
        sizes = np.concatenate([one.columns[column].lengths for one in found]) + example_format.num_specials
        if column == 'sources':
            yield field, 'data.encoder_length', sizes, data.encoder_length or data.length
        elif sizes.max() > example_format.num_specials:
            yield field, 'data.length', sizes, data.length


def histogram(sizes: np.ndarray, limit: int, field: str) -> list[str]:
    """Bars of equal steps for the bulk of `sizes` [N], then of doubling ones; a rule where the limit is."""
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
    """The padding of each split, and the shapes of training, computed from the layout of one epoch."""
    stacks = len(splits['train'].shapes[0])
    lines: list[tuple[str, ...]] = [('', 'batches', 'slots', 'tokens', 'padding', *_SIDES[stacks])]
    for split, batches in splits.items():
        found = padding.filled(batches)
        slots, tokens = (f'{values.sum():,.0f}' for values in (found.slots, found.tokens))
        lines.append((split, f'{batches.steps_per_epoch:,.1f}', slots, tokens, *_paddings(found)))
    found, train = padding.filled(splits['train']), splits['train']
    shapes: list[tuple[str, ...]] = [
        ('target x source' if stacks > 1 else 'length', 'rows a batch', 'batches', 'slots', 'tokens', 'padding')
    ]
    for shape, width, rows, slots, tokens in zip(
        train.shapes, train.widths, found.rows, found.slots.sum(axis=1), found.tokens.sum(axis=1), strict=True
    ):
        numbers = f'{width:,}', f'{rows / width:,.1f}', f'{slots:,.0f}', f'{tokens:,.0f}'
        shapes.append((' x '.join(map(str, shape)), *numbers, share(slots - tokens, slots)))
    return [*table(lines), '', *table(shapes)]


def compared(found: Mapping[str, padding.Filled]) -> list[str]:
    """The padding and the compiled programs of each batching."""
    stacks = len(next(iter(found.values())).paddings)
    rows = [(name, f'{len(one.shapes)}', *_paddings(one)) for name, one in found.items()]
    return table([('', 'programs', 'padding', *_SIDES[stacks]), *rows])


_SIDES: dict[int, tuple[str, ...]] = {1: (), 2: ('of target', 'of source')}  # by the number of stacks


def _paddings(found: padding.Filled) -> tuple[str, ...]:
    return tuple(
        share(max(value, 0), 1) for value in (found.padding, *(found.paddings if len(found.paddings) > 1 else ()))
    )


# ---------------------------------------------------------------------------------------------- duplicates, rows, cache


def repeated(records: Mapping[str, Sequence[Record]], texts: Mapping[str, Sequence[Texts]]) -> list[str]:
    """How many records of train have come before, and how many of the others are in train; two of each."""
    whole = {split: duplicates.joined(parts) for split, parts in texts.items()}
    lines: list[tuple[str, ...]] = [('', *(cell for alike in duplicates.ALIKE for cell in (alike, 'share')))]
    shown: list[str] = []
    keys = list(dict.fromkeys(reversed([key for _, key in whole['train'].hashes])))
    for split, own in whole.items():
        for key in keys:
            name = f'{split}: {key} in train' + (' before' if split == 'train' else '')
            cells = []
            for alike in duplicates.ALIKE:
                hashes, train = own.hashes[alike, key], whole['train'].hashes[alike, key]
                found = duplicates.within(hashes) if split == 'train' else duplicates.across(hashes, train)
                cells += [f'{len(found):,}', share(len(found), len(hashes))]
                if alike == 'exact':
                    for place in found[:2].tolist():
                        record = records[split][place]
                        text = ' → '.join(
                            text_of(record, field) for field in (own.num_bytes if key == 'whole' else (key,))
                        )
                        shown.append(f'{name}: {harmless(text, 60)}')
            lines.append((name, *cells))
    notes = 'exact: but for outer space and Unicode composition; near: but for case and all space too'
    return [*table(lines), notes, *shown]


def rows(batches: Batches, tokenizers: Tokenizers, count: int) -> Iterator[Line]:
    """`count` rows, evenly spread over the batches of the first epoch."""
    steps, tags = max(1, int(batches.steps_per_epoch)), 'tags' in batches.parts[0].examples.columns
    for number in range(count):
        step = number * steps // count
        batch = batches.batch(step)
        index = number * len(batch['inputs']) // count
        shape = ' x '.join(str(batch[name].shape[1]) for name in ('inputs', 'encoder_inputs') if name in batch)
        yield [(f'  step {step}, row {index} of {len(batch["inputs"])}, {shape}', 'faint')]
        yield from rendering.row(batch, index, tokenizers, tags)


def cached(config: Config, splits: Mapping[str, Batches]) -> list[str]:
    """Where the token cache is, and what the entries of this run take."""
    entries = {
        Path(file).parent
        for batches in splits.values()
        for part in batches.parts
        for ragged in (*part.examples.columns.values(), part.rows)
        for file in ragged.files
    }
    size = sum(file.stat().st_size for entry in entries for file in entry.iterdir())
    return [f'{cache.directory(config.data)}: {len(entries)} entries of this run, {size:,} bytes']
