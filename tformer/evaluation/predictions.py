"""The text that a run generated for a split, kept in its workdir for reports."""

import json
import pathlib
from collections.abc import Sequence

from tformer import atomic
from tformer.config import json_files
from tformer.errors import UserError


def place(workdir: pathlib.Path, split: str) -> pathlib.Path:
    return workdir / f'predictions_{split}.jsonl'


def write(workdir: pathlib.Path, split: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Writes the predictions and their references, one example a line."""
    pairs = zip(predictions, references, strict=True)
    lines = [json.dumps({'prediction': said, 'references': list(right)}) + '\n' for said, right in pairs]
    atomic.write(place(workdir, split), ''.join(lines))


def read(workdir: pathlib.Path, split: str) -> tuple[list[str], list[list[str]]] | None:
    """Returns the predictions of a split and the references of each, or None if no file holds them.

    Raises:
      UserError: the file cannot be read.
    """
    file = place(workdir, split)
    if not file.exists():
        return None
    rows = json_files.read_rows(file)
    for number, row in enumerate(rows, start=1):
        texts = row.get('references')
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in [row.get('prediction'), *texts]):
            raise UserError(f'{file}:{number}: it holds no prediction with its references')
    return [row['prediction'] for row in rows], [row['references'] for row in rows]
