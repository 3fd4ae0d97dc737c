"""The size of a run's data in records, bytes, tokens and labels."""

from collections.abc import Mapping, Sequence

import numpy as np

from tformer.config import mixtures
from tformer.config.run import Config
from tformer.data.batches import layout, mixture
from tformer.data.batches.pipeline import Batches
from tformer.data.examples.example_formats import format_of
from tformer.data.inspection.duplicates import Texts
from tformer.data.inspection.rendering import Cell, harmless, share, table
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError

_MOST_LABELS = 10


def text_columns(config: Config, train: Batches) -> dict[str, str]:
    """Returns the columns of tokens that are not empty in the training split, each with the field that it encodes."""
    texts = format_of(config).encoding.texts.items()
    return {
        name: field for name, field in texts if any(part.examples.columns[name].lengths.any() for part in train.parts)
    }


def records(config: Config, splits: Mapping[str, Batches], joined: Mapping[str, mixture.Concatenation]) -> list[str]:
    """The records and examples of each split, and of each part of a training mixture."""
    rows: list[tuple[Cell, ...]] = []
    for split, batches in splits.items():
        sizes = [len(part) for part in joined[split].splits]
        if split == 'train' and len(sizes) > 1:
            mixture_parts = zip(config.data.mixture, mixtures.parts(config.data), batches.parts, sizes, strict=True)
            for name, data, part, size in mixture_parts:
                weight = 'its size' if data.weight is None else f'{data.weight:g}'
                rows.append(_amount(f'- {_end(name)}', [part], size, f'{part.epochs:.3g}', weight))
        rows.append(_amount(split, batches.parts, sum(sizes)))
    headings = '', 'records', 'examples', 'passes per epoch', 'weight', 'bad lines', 'over-long', 'share'
    return table(headings, rows)


def _amount(name: str, parts: Sequence[layout.Part], size: int, epochs: str = '', weight: str = '') -> tuple[Cell, ...]:
    examples = [part.examples for part in parts]
    dropped, cut = sum(each.num_dropped for each in examples), sum(each.num_truncated for each in examples)
    over = ', '.join(f'{count:,} {what}' for count, what in ((dropped, 'dropped'), (cut, 'cut')) if count) or '0'
    num_examples, skipped = sum(map(len, examples)), sum(each.num_skipped for each in examples)
    return name, size, num_examples, epochs, weight, skipped, over, share(dropped + cut, size)


def vocabulary(
    config: Config, tokenizers: Tokenizers, splits: Mapping[str, Batches], texts: Mapping[str, Sequence[Texts]]
) -> list[str]:
    """The bytes and tokens of each split and field, and of each part of a training mixture.

    All of the text is counted, without special tokens.
    """
    rows: list[tuple[Cell, ...]] = []
    target, source = tokenizers.target, tokenizers.source or tokenizers.target
    if not (fields := text_columns(config, splits['train'])):
        raise UserError('every text of the training split is empty')
    for split, batches in splits.items():
        for column, field in fields.items():
            unknown = (source if column == 'sources' else target).specials.unk
            columns = [part.examples.columns[column] for part in batches.parts]
            counts = [
                np.array([text.num_bytes[field], len(ids.flat), len(ids), (ids.flat == unknown).sum()])
                for text, ids in zip(texts[split], columns, strict=True)
            ]
            if split == 'train' and len(columns) > 1:
                names = (f'- {field} of {_end(name)}' for name in config.data.mixture)
                rows += [_rates(name, *count.tolist()) for name, count in zip(names, counts, strict=True)]
            rows.append(_rates(f'{split} {field}', *np.sum(counts, axis=0).tolist()))
    *_, last = fields.values()
    kinds = {'shared': target} if tokenizers.shared else {'source': tokenizers.source, last: target}
    sizes = (f'{tokenizer.vocab_size:,} ({name})' for name, tokenizer in kinds.items() if tokenizer)
    headings = '', 'bytes', 'tokens', 'bytes/token', 'tokens/record', 'unknown', 'share'
    return [*table(headings, rows), f'vocabulary: {", ".join(sizes)}']


def _rates(name: str, num_bytes: int, tokens: int, records: int, unknown: int) -> tuple[Cell, ...]:
    bytes_per_token, tokens_per_record = f'{num_bytes / max(tokens, 1):.2f}', f'{tokens / max(records, 1):,.1f}'
    return name, num_bytes, tokens, bytes_per_token, tokens_per_record, unknown, share(unknown, tokens)


def labels(names: Sequence[str], splits: Mapping[str, Batches]) -> list[str]:
    """How often each class or tag occurs, the most frequent first."""
    column = 'tags' if 'tags' in splits['train'].parts[0].examples.columns else 'label'
    counts = {}
    for split, batches in splits.items():
        ids = np.concatenate([part.examples.columns[column].flat for part in batches.parts])
        counts[split] = np.bincount(ids, minlength=len(names))
    order = np.argsort(-counts['train'], kind='stable').tolist()
    groups = [(harmless(names[label], 40), [label]) for label in order[:_MOST_LABELS]]
    if rest := order[_MOST_LABELS:]:
        groups.append((f'{len(rest)} more', rest))
    rows: list[list[Cell]] = []
    for name, group in groups:
        rows.append([name])
        for of in counts.values():
            rows[-1] += [of[group].sum(), share(of[group].sum(), of.sum())]
    headings = ['', *(heading for split in counts for heading in (split, ''))]
    last = f'the rarest is {harmless(names[order[-1]], 40)} with {counts["train"][order[-1]]:,} in train'
    return [*table(headings, rows), f'{len(names)} classes; {last}']


def _end(name: str, most: int = 30) -> str:
    """The end of a long name, which is where paths differ."""
    return harmless(name if len(name) <= most else '…' + name[1 - most :])
