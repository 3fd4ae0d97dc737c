"""Batches as text: what a model reads and what it is to predict, with every corruption marked.

Nothing here knows the objectives: the arrays of the batch contract alone decide what a row looks like.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import Tokenizer

Span = tuple[str, str]  # (text, a key of KINDS)
Line = list[Span]
Batch = Mapping[str, np.ndarray]

WIDTH = 120  # columns
_MOST_TOKENS, _MOST_SEGMENTS = 120, 4  # of a row that are shown
_INDENT = 12
_BOUNDARY: Span = ('|', 'faint')


@dataclasses.dataclass(frozen=True)
class Kind:
    """How text of a kind looks."""

    style: str  # in colour, as rich reads it
    plain: str  # without: a format


def plain(line: Line) -> str:
    """A line without colour: marks say what kind a text is of."""
    return ''.join(KINDS[kind].plain.format(text) for text, kind in line)


def coloured(line: Line) -> Text:
    """A line in colour."""
    return Text.assemble(*((text, KINDS[kind].style) for text, kind in line))


def legend(lines: Iterable[Line]) -> Line:
    """What the marks in `lines` mean."""
    used = {kind for line in lines for _, kind in line}
    meant: Line = [('  tokens between |', 'faint')]
    for kind, meaning in LEGEND.items():
        meant += [('  ', 'text'), (meaning, kind)] if kind in used else []
    return meant


def harmless(text: str, most: int = 60) -> str:
    """`text` on one line of at most about `most` characters, which does nothing to a terminal: all that is not a
    printable character (controls, escapes, changes of direction, line ends) is escaped."""
    cut = text if len(text) <= most else text[:most] + '…'
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in cut)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns under the first row: one to the left, the others to the right, empty ones left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(cell_len, column)) for column in columns]
    return [
        '  '.join(
            cell + ' ' * (width - cell_len(cell)) if number == 0 else f'{cell:>{width}}'
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in zip(*columns, strict=True)
    ]


def share(count: float, whole: float) -> str:
    """A part of a whole, as text."""
    part = count / whole if whole else 0
    return '<0.1%' if 0 < part < 0.0005 else f'{part:.1%}' if part else '0'


def row(batch: Batch, index: int, tokenizers: Tokenizers, tags: bool = False) -> Iterator[Line]:
    """The lines that show one row of a batch, segment by segment.

    Args:
      batch: of `Batches.batch`.
      index: of its rows.
      tokenizers: that made it.
      tags: targets are of tokenizers.labels, not tokens.
    """
    if 'labels' in batch:
        yield from _wrapped('label', [(_label(batch['labels'][index], tokenizers.labels), 'label')])
    packed = 'segment_ids' in batch
    count = int(batch['segment_ids'][index].max()) if packed else 1
    for segment in range(1, min(count, _MOST_SEGMENTS) + 1):
        if packed:
            yield [(f'  segment {segment} of {count}', 'faint')]
        for name, tokens in _sides(batch, index, segment, tokenizers, tags):
            yield from _wrapped(name, tokens)
    if count > _MOST_SEGMENTS:
        yield [(f'  … {count - _MOST_SEGMENTS} more segments', 'faint')]


def _label(label: np.ndarray, names: Sequence[str]) -> str:
    """A class by its name, a number, or the places of an answer."""
    if label.ndim == 0 and label.dtype.kind == 'i' and names:
        return harmless(names[int(label)])
    return ' to '.join(f'{number:g}' for number in np.atleast_1d(label))


def _sides(batch: Batch, index: int, segment: int, tokenizers: Tokenizers, tags: bool) -> Iterator[tuple[str, Line]]:
    """(a name, tokens) of each text of a segment."""

    def taken(name: str, side: str = '') -> np.ndarray:
        ids = batch.get(f'{side}segment_ids')
        there = batch[f'{side}positions'][index] >= 0 if ids is None else ids[index] == segment
        return batch[name][index][there]

    if 'encoder_inputs' in batch:
        source = tokenizers.source or tokenizers.target
        yield 'source', [_token(token, source) for token in taken('encoder_inputs', 'encoder_').tolist()]
    target, inputs = tokenizers.target, taken('inputs')
    if 'targets' not in batch:
        yield 'text', [_token(token, target) for token in inputs.tolist()]
        return
    targets, scored = taken('targets'), taken('weights') > 0
    if tags:
        yield 'tags', _tagged(inputs, targets, scored, tokenizers)
        return
    name = 'target' if 'encoder_inputs' in batch else 'text'
    if np.array_equal(inputs[1:], targets[:-1]):  # each token predicts the next: once is enough
        yield name, [_token(token, target) for token in inputs[:1].tolist()] + _scored(targets, scored, target)
    elif not scored.all() and np.array_equal(inputs[~scored], targets[~scored]):
        yield name, _corrupted(inputs, targets, scored, target)
    else:
        differ = inputs != targets
        kinds = np.where(differ, 'changed', 'text').tolist()
        yield 'inputs', [_token(token, target, kind) for token, kind in zip(inputs.tolist(), kinds, strict=True)]
        yield 'targets', _scored(targets, scored, target)


def _tagged(inputs: np.ndarray, tags: np.ndarray, scored: np.ndarray, tokenizers: Tokenizers) -> Line:
    line: Line = []
    for token, tag, counts in zip(inputs.tolist(), tags.tolist(), scored.tolist(), strict=True):
        line.append(_token(token, tokenizers.target))
        line += [(f'/{harmless(tokenizers.labels[tag])}', 'label')] if counts else []
    return line


def _token(token: int, tokenizer: Tokenizer, kind: str = 'text') -> Span:
    return harmless(tokenizer.piece(token)), kind if tokenizer.ordinary[token] else 'special'


def _scored(targets: np.ndarray, scored: np.ndarray, tokenizer: Tokenizer) -> Line:
    return [
        _token(token, tokenizer) if counts else (harmless(tokenizer.piece(token)), 'unscored')
        for token, counts in zip(targets.tolist(), scored.tolist(), strict=True)
    ]


def _corrupted(inputs: np.ndarray, targets: np.ndarray, scored: np.ndarray, tokenizer: Tokenizer) -> Line:
    """Inputs of which only those that are scored may differ from their targets."""
    line: Line = []
    for given, wanted, counts in zip(inputs.tolist(), targets.tolist(), scored.tolist(), strict=True):
        original = harmless(tokenizer.piece(wanted))
        if not counts:
            line.append(_token(wanted, tokenizer, 'context'))
        elif given == wanted:
            line.append((original, 'kept'))
        elif given == tokenizer.specials.mask_or_none:
            line.append((original, 'masked'))
        else:
            line.append((f'{harmless(tokenizer.piece(given))}→{original}', 'replaced'))
    return line


def _wrapped(name: str, tokens: Sequence[Span]) -> Iterator[Line]:
    """Lines of at most WIDTH columns, the boundaries of the tokens shown."""
    if len(tokens) > _MOST_TOKENS:
        tokens = [*tokens[:_MOST_TOKENS], (f'… {len(tokens) - _MOST_TOKENS} more tokens', 'faint')]
    line: Line = [(f'    {name:<{_INDENT - 4}}', 'faint')]
    used = _INDENT
    for number, token in enumerate(tokens):
        wide = cell_len(plain([token])) + 1
        if used + wide > WIDTH and used > _INDENT:
            yield line
            line, used = [(' ' * _INDENT, 'faint')], _INDENT
        line += [token, _BOUNDARY] if number + 1 < len(tokens) else [token]
        used += wide
    yield line


LEGEND = {  # what the kinds mean that need a word
    'masked': 'hidden by the mask',
    'replaced': 'random→original',
    'kept': 'to predict, as it is',
    'changed': 'not its target',
    'unscored': 'not scored',
}

KINDS: dict[str, Kind] = {
    'text': Kind('', '{}'),
    'title': Kind('bold', '{}'),
    'faint': Kind('dim', '{}'),
    'special': Kind('cyan', '{}'),
    'context': Kind('dim', '{}'),  # seen, and not to be predicted
    'masked': Kind('bold red', '[mask:{}]'),
    'replaced': Kind('bold magenta', '{{{}}}'),
    'kept': Kind('bold green', '[keep:{}]'),
    'changed': Kind('bold red', '[{}]'),  # an input that is not its target
    'unscored': Kind('dim', '({})'),
    'label': Kind('bold green', '{}'),
}
