"""How much data a run has, in records, bytes, tokens and labels."""

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
    """Records and examples of each split, those of training by part."""
    lines: list[tuple[str, ...]] = [
        ('', 'records', 'examples', 'passes per epoch', 'weight', 'bad lines', 'over-long', 'share')
    ]
    for split, batches in splits.items():
        sizes = [len(part) for part in joined[split].splits]
        if split == 'train' and len(sizes) > 1:
            own = zip(config.data.mixture, convert.parts(config.data), batches.parts, sizes, strict=True)
            for name, data, part, size in own:
                weight = 'as many' if data.weight is None else f'{data.weight:g}'
                lines.append(_amount(f'- {_end(name)}', [part], size, f'{part.epochs:.3g}', weight))
        lines.append(_amount(split, batches.parts, sum(sizes), '', ''))
    return table(lines)


def _amount(name: str, parts: Sequence[layout.Part], size: int, epochs: str, weight: str) -> tuple[str, ...]:
    found = [part.examples for part in parts]
    counts = {'dropped': sum(one.num_dropped for one in found), 'cut': sum(one.num_truncated for one in found)}
    over = ', '.join(f'{count:,} {what}' for what, count in counts.items() if count) or '0'
    skipped, examples_ = sum(one.num_skipped for one in found), sum(map(len, found))
    return name, f'{size:,}', f'{examples_:,}', epochs, weight, f'{skipped:,}', over, share(sum(counts.values()), size)


def vocabulary(
    config: Config, tokenizers: Tokenizers, splits: Mapping[str, Batches], texts: Mapping[str, Sequence[Texts]]
) -> list[str]:
    """Bytes and tokens of each split and side, those of training by part: of the text alone, all of it."""
    lines: list[tuple[str, ...]] = [('', 'bytes', 'tokens', 'bytes/token', 'tokens/record', 'unknown', 'share')]
    target, source = tokenizers.target, tokenizers.source or tokenizers.target
    for split, batches in splits.items():
        found = [part.examples for part in batches.parts]
        for column, field in format_of(config).encoding.texts.items():
            ids, tokenizer = [one.columns[column] for one in found], source if column == 'sources' else target
            if not any(len(one.flat) for one in ids):
                continue
            own = field
            sizes = [text.num_bytes[field] for text in texts[split]]
            unknown = [int((one.flat == tokenizer.specials.unk).sum()) for one in ids]
            if split == 'train' and len(ids) > 1:
                for number, name in enumerate(config.data.mixture):
                    some = sizes[number], len(ids[number].flat), len(ids[number]), unknown[number]
                    lines.append((f'- {field} of {_end(name)}', *_rates(*some)))
            some = sum(sizes), sum(len(one.flat) for one in ids), sum(map(len, ids)), sum(unknown)
            lines.append((f'{split} {field}', *_rates(*some)))
    kinds = {'shared': target} if tokenizers.shared else {'source': tokenizers.source, own: target}
    sizes_ = (f'{tokenizer.vocab_size:,} ({name})' for name, tokenizer in kinds.items() if tokenizer)
    return [*table(lines), f'vocabulary: {", ".join(sizes_)}']


def _rates(num_bytes: int, tokens: int, records: int, unknown: int) -> tuple[str, ...]:
    each, long = num_bytes / max(tokens, 1), tokens / max(records, 1)
    return f'{num_bytes:,}', f'{tokens:,}', f'{each:.2f}', f'{long:,.1f}', f'{unknown:,}', share(unknown, tokens)


def labels(names: Sequence[str], splits: Mapping[str, Batches]) -> list[str]:
    """How often each class or tag comes, the most frequent ones first."""
    counts = {
        split: np.sum([np.bincount(_labels(part), minlength=len(names)) for part in batches.parts], axis=0)
        for split, batches in splits.items()
    }
    order = np.argsort(-counts['train'], kind='stable').tolist()
    lines: list[tuple[str, ...]] = [('', *(heading for split in counts for heading in (split, '')))]
    for label in order[:_MOST_LABELS]:
        cells = (cell for of in counts.values() for cell in (f'{of[label]:,}', share(of[label], of.sum())))
        lines.append((harmless(names[label], 40), *cells))
    left, last = order[_MOST_LABELS:], order[-1]
    if left:
        cells = (cell for of in counts.values() for cell in (f'{of[left].sum():,}', share(of[left].sum(), of.sum())))
        lines.append((f'{len(left)} more', *cells))
    rarest = f'the rarest is {harmless(names[last], 40)} with {counts["train"][last]:,} in train'
    return [*table(lines), f'{len(names)} classes; {rarest}']


def _labels(part: layout.Part) -> np.ndarray:
    column = part.examples.columns['tags' if 'tags' in part.examples.columns else 'label']
    return column.flat


def _end(name: str, most: int = 30) -> str:
    """The end of a long name: what tells paths apart."""
    return harmless(name if len(name) <= most else '…' + name[1 - most :])
