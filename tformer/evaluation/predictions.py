"""The text that a run generated for a split, kept in its workdir for reports."""

import json
import pathlib
from collections.abc import Sequence

from tformer import atomic
from tformer.errors import UserError


def place(workdir: pathlib.Path, split: str) -> pathlib.Path:
    return workdir / f'predictions_{split}.jsonl'


def write(workdir: pathlib.Path, split: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Writes the predictions and their references, one example a line."""
    pairs = zip(predictions, references, strict=True)
    lines = [json.dumps({'prediction': said, 'references': list(right)}) + '\n' for said, right in pairs]
    atomic.write(place(workdir, split), ''.join(lines))


def read(workdir: pathlib.Path, split: str) -> tuple[list[str], list[list[str]]] | None:
    """Returns (predictions, references of each) of a split; None where there is no file.

    Raises:
      UserError: the file cannot be read.
    """
    file = place(workdir, split)
    if not file.is_file():
        return None
    try:
        rows = [json.loads(line) for line in file.read_text(encoding='utf-8').splitlines()]
        return [row['prediction'] for row in rows], [row['references'] for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{file}: {error}') from error
