"""The size of a run's data in records, bytes, tokens and labels."""

from collections.abc import Mapping, Sequence

import numpy as np

from tformer.config import convert
from tformer.config.run import Config
from tformer.data.batches import layout, mixture
from tformer.data.batches.pipeline import Batches
from tformer.data.examples.example_formats import format_of
from tformer.data.inspection.duplicates import Texts
from tformer.data.inspection.rendering import harmless, share, table
from tformer.data.tokenizers.tokenizers import Tokenizers

_MOST_LABELS = 10


def records(config: Config, splits: Mapping[str, Batches], joined: Mapping[str, mixture.Concatenation]) -> list[str]:
    """The records and examples of each split, and of each part of a training mixture."""
    lines: list[tuple[str, ...]] = [
        ('', 'records', 'examples', 'passes per epoch', 'weight', 'bad lines', 'over-long', 'share')
    ]
    for split, batches in splits.items():
        sizes = [len(part) for part in joined[split].splits]
        if split == 'train' and len(sizes) > 1:
            mixture_parts = zip(config.data.mixture, convert.parts(config.data), batches.parts, sizes, strict=True)
            for name, data, part, size in mixture_parts:
                weight = 'its size' if data.weight is None else f'{data.weight:g}'
                lines.append(_amount(f'- {_end(name)}', [part], size, f'{part.epochs:.3g}', weight))
        lines.append(_amount(split, batches.parts, sum(sizes), '', ''))
    return table(lines)


def _amount(name: str, parts: Sequence[layout.Part], size: int, epochs: str, weight: str) -> tuple[str, ...]:
    examples = [part.examples for part in parts]
    counts = {
        'dropped': sum(each.num_dropped for each in examples),
        'cut': sum(each.num_truncated for each in examples),
    }
    over = ', '.join(f'{count:,} {what}' for what, count in counts.items() if count) or '0'
    skipped, num_examples = sum(each.num_skipped for each in examples), sum(map(len, examples))
    return (
        name,
        f'{size:,}',
        f'{num_examples:,}',
        epochs,
        weight,
        f'{skipped:,}',
        over,
        share(sum(counts.values()), size),
    )


def vocabulary(
    config: Config, tokenizers: Tokenizers, splits: Mapping[str, Batches], texts: Mapping[str, Sequence[Texts]]
) -> list[str]:
    """The bytes and tokens of each split and field, and of each part of a training mixture.

    All of the text is counted, without special tokens.
    """
    lines: list[tuple[str, ...]] = [('', 'bytes', 'tokens', 'bytes/token', 'tokens/record', 'unknown', 'share')]
    target, source = tokenizers.target, tokenizers.source or tokenizers.target
    fields = format_of(config).encoding.texts
    for split, batches in splits.items():
        for column, field in fields.items():
            tokenizer = source if column == 'sources' else target
            columns = [part.examples.columns[column] for part in batches.parts]
            if not any(len(ids.flat) for ids in columns):
                continue
            counts = [
                np.array([text.num_bytes[field], len(ids.flat), len(ids), (ids.flat == tokenizer.specials.unk).sum()])
                for text, ids in zip(texts[split], columns, strict=True)
            ]
            if split == 'train' and len(columns) > 1:
                names = (f'- {field} of {_end(name)}' for name in config.data.mixture)
                lines += [(name, *_rates(*count.tolist())) for name, count in zip(names, counts, strict=True)]
            lines.append((f'{split} {field}', *_rates(*np.sum(counts, axis=0).tolist())))
            target_field = field
    kinds = {'shared': target} if tokenizers.shared else {'source': tokenizers.source, target_field: target}
    sizes = (f'{tokenizer.vocab_size:,} ({name})' for name, tokenizer in kinds.items() if tokenizer)
    return [*table(lines), f'vocabulary: {", ".join(sizes)}']


def _rates(num_bytes: int, tokens: int, records: int, unknown: int) -> tuple[str, ...]:
    bytes_per_token, tokens_per_record = f'{num_bytes / max(tokens, 1):.2f}', f'{tokens / max(records, 1):,.1f}'
    return f'{num_bytes:,}', f'{tokens:,}', bytes_per_token, tokens_per_record, f'{unknown:,}', share(unknown, tokens)


def labels(names: Sequence[str], splits: Mapping[str, Batches]) -> list[str]:
    """How often each class or tag occurs, the most frequent first."""
    counts = {
        split: np.sum([np.bincount(_labels(part), minlength=len(names)) for part in batches.parts], axis=0)
        for split, batches in splits.items()
    }
    order = np.argsort(-counts['train'], kind='stable').tolist()
    lines: list[tuple[str, ...]] = [('', *(heading for split in counts for heading in (split, '')))]
    for label in order[:_MOST_LABELS]:
        cells = (cell for of in counts.values() for cell in (f'{of[label]:,}', share(of[label], of.sum())))
        lines.append((harmless(names[label], 40), *cells))
    rest, rarest = order[_MOST_LABELS:], order[-1]
    if rest:
        cells = (cell for of in counts.values() for cell in (f'{of[rest].sum():,}', share(of[rest].sum(), of.sum())))
        lines.append((f'{len(rest)} more', *cells))
    last = f'the rarest is {harmless(names[rarest], 40)} with {counts["train"][rarest]:,} in train'
    return [*table(lines), f'{len(names)} classes; {last}']


def _labels(part: layout.Part) -> np.ndarray:
    column = part.examples.columns['tags' if 'tags' in part.examples.columns else 'label']
    return column.flat


def _end(name: str, most: int = 30) -> str:
    """The end of a long name, which is where paths differ."""
    return harmless(name if len(name) <= most else '…' + name[1 - most :])
