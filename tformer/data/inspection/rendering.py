"""Batches as text: the tokens that a model reads and those it is to predict, with every corruption marked.

A row is shown from the arrays of the batch contract alone, without regard to the objective.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import Tokenizer

if TYPE_CHECKING:
    from rich.text import Text

Span = tuple[str, str]  # (text, a key of KINDS)
Line = list[Span]
Batch = Mapping[str, np.ndarray]
Cell = str | int  # of a table

WIDTH = 120  # columns
_MOST_TOKENS, _MOST_SEGMENTS = 120, 4  # shown of each row
_INDENT = 12
_BOUNDARY: Span = ('|', 'faint')


class Kind(NamedTuple):
    """The appearance of one kind of text."""

    style: str  # of rich, where there is colour
    plain: str = '{}'  # a format string, where there is none
    meaning: str = ''  # in the legend


def plain(line: Line) -> str:
    """Returns a line without colour; brackets mark the kinds of text."""
    return ''.join(KINDS[kind].plain.format(text) for text, kind in line)


def coloured(line: Line) -> 'Text':
    """Returns a line in colour."""
    from rich.text import Text  # imported where it is used: `harmless` serves commands that need no rich

    return Text.assemble(*((text, KINDS[kind].style) for text, kind in line))


def legend(lines: Iterable[Line]) -> Line:
    """Returns the meaning of the marks in `lines`."""
    used = {kind for line in lines for _, kind in line}
    meant: Line = [('  tokens between |', 'faint')]
    for name, kind in KINDS.items():
        meant += [('  ', 'text'), (kind.meaning, name)] if kind.meaning and name in used else []
    return meant


def harmless(text: str, most: int = 60) -> str:
    """Returns at most about `most` characters of `text` on one line that is safe to print on a terminal.

    Characters that are not printable (controls, escapes, changes of direction, line ends) are escaped.
    """
    cut = text if len(text) <= most else text[:most] + '…'
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in cut)


def table(headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[str]:
    """Returns lines of aligned columns under a row of headings.

    The first column is aligned to the left, the others to the right; columns without an entry are left out.
    """
    from rich.cells import cell_len, set_cell_size

    cells = [[cell if isinstance(cell, str) else f'{cell:,}' for cell in row] for row in (headings, *rows)]
    names, *columns = (column for column in zip(*cells, strict=True) if any(column[1:]))
    aligned = [[set_cell_size(name, max(map(cell_len, names))) for name in names]]
    aligned += [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    return ['  '.join(row) for row in zip(*aligned, strict=True)]


def share(count: float, whole: float) -> str:
    """Returns count / whole as a percentage."""
    part = count / whole if whole else 0
    return '<0.1%' if 0 < part < 0.0005 else f'{part:.1%}' if part else '0'


def row(batch: Batch, index: int, tokenizers: Tokenizers, tags: bool = False) -> Iterator[Line]:
    """Yields the lines that show one row of a batch, segment by segment.

    With `tags`, the targets are ids of tokenizers.labels and not of tokens.
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
    """The name of a class, a number, or the positions of an answer."""
    if label.ndim == 0 and label.dtype.kind == 'i' and names:
        return harmless(names[int(label)])
    return ' to '.join(f'{number:g}' for number in np.atleast_1d(label))


def _sides(batch: Batch, index: int, segment: int, tokenizers: Tokenizers, tags: bool) -> Iterator[tuple[str, Line]]:
    """Yields (name, tokens) of each text of a segment."""

    def taken(name: str, side: str = '') -> np.ndarray:
        ids = batch.get(f'{side}segment_ids')
        inside = batch[f'{side}positions'][index] >= 0 if ids is None else ids[index] == segment
        return batch[name][index][inside]

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
    if np.array_equal(inputs[1:], targets[:-1]):  # each token predicts the next: they are shown once
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
    """Inputs of which only the scored ones may differ from their targets."""
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
    """Yields lines of at most WIDTH columns, with a mark between tokens."""
    from rich.cells import cell_len

    if len(tokens) > _MOST_TOKENS:
        tokens = [*tokens[:_MOST_TOKENS], (f'… {len(tokens) - _MOST_TOKENS} more tokens', 'faint')]
    line: Line = [(f'    {name:<{_INDENT - 4}}', 'faint')]
    used = _INDENT
    for index, token in enumerate(tokens):
        wide = cell_len(plain([token])) + 1
        if used + wide > WIDTH and used > _INDENT:
            yield line
            line, used = [(' ' * _INDENT, 'faint')], _INDENT
        line += [token, _BOUNDARY] if index + 1 < len(tokens) else [token]
        used += wide
    yield line


KINDS = {
    'text': Kind(''),
    'title': Kind('bold'),
    'faint': Kind('dim'),
    'special': Kind('cyan'),
    'context': Kind('dim'),  # read, but not to be predicted
    'masked': Kind('bold red', '[mask:{}]', 'replaced by the mask'),
    'replaced': Kind('bold magenta', '{{{}}}', 'random→original'),
    'kept': Kind('bold green', '[keep:{}]', 'to predict, unchanged'),
    'changed': Kind('bold red', '[{}]', 'differs from its target'),
    'unscored': Kind('dim', '({})', 'not scored'),
    'label': Kind('bold green'),
}
