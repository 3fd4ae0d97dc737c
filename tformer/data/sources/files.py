"""Text files as a source: which files a split has, and what is held out of them."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tformer.config.run import Data
from tformer.config.tasks import RECORDS, TASKS
from tformer.data.sources.file_formats import READERS, ending
from tformer.data.sources.records import BAD_LINES, Read, Record, fingerprint, split_of
from tformer.data.sources.text_reader import File, Text, find
from tformer.errors import NoSplitError, UserError, choose, nearest

_HELD_OUT = 0.02  # share of a file that becomes a split which has no file of its own


def load(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """The fingerprint and the records of `split`, from `config.path`, or `valid_path` and `test_path` where given.

    Each entry is a directory, which holds `{split}.{txt,tsv,jsonl,conll}[.gz]` or all parts of it, such as
    `{split}-00000-of-00004.tsv` or `{split}.0.tsv`; a file; or a glob of files. Where `path` names files and a split
    has no path of its own, 2 % of their records are held out for it, by the hash of their source, context or text. A
    .txt under causal_lm is one document, and loses its end: 2 % for valid, the last 2 % for test.

    Raises:
      UserError: a missing file, here; an empty or malformed one, with the line, when the records are read.
    """
    choose(BAD_LINES, config.bad_lines, 'data.bad_lines')
    own = {'valid': config.valid_path, 'test': config.test_path}
    held_out = tuple(name for name, paths in own.items() if not paths)
    paths = own.get(split) or config.path
    if not paths:
        raise UserError("data.source='files' needs data.path: directories, or the train files")
    found: list[tuple[File, tuple[str, ...]]] = []  # and the splits that are held out of it
    for name in paths:
        parts = () if own.get(split) or os.path.isdir(name) else held_out
        found += [(find(path), parts) for path in _located(name, split) if ending(path)]
    how: list[object] = [config.columns, config.bad_lines, objective]
    if TASKS[objective].labelled:
        how += [config.labels, config.label_range]
    if config.source_template is not None:
        how += [config.source_template, config.target_template]
    contents = [(file.digest, ending(file.path), file.path.suffix, parts, parts and split) for file, parts in found]

    def read() -> tuple[list[Record], int]:
        texts = [(Text(file, config.bad_lines), parts) for file, parts in found]
        records = [record for text, parts in texts for record in _read(text, parts, split, config, objective)]
        return records, sum(text.skipped for text, _ in texts)

    return fingerprint(how, contents), read


def _located(name: str, split: str) -> list[Path]:
    """The files of an entry of data.path, in the order of the numbers in their names."""
    path, pattern = Path(name), re.search(r'[*?[]', name)
    try:
        if path.is_dir():
            return _of_split(path, split)
        if path.exists():
            return [path]
        found = sorted(map(Path, glob.glob(name, recursive=True)), key=_order) if pattern else []
        siblings = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    except OSError as error:
        raise UserError(f'{path} cannot be read: {error.strerror}') from None
    if not found:
        what = 'matches no file' if pattern else 'does not exist'
        raise UserError(f'{path} {what}{nearest(path.name, siblings, listed=10)}')
    return found


def _of_split(directory: Path, split: str) -> list[Path]:
    """The file of `split`, or all its parts."""
    endings = ','.join(ending[1:] for ending in READERS)
    pattern = re.compile(rf'{split}(?:([-._])(\d+)(-of-(\d+))?)?\.({endings.replace(",", "|")})(\.gz)?')
    present = sorted(path.name for path in directory.iterdir())
    kinds: dict[str, list[str]] = {}
    for file in present:
        if match := pattern.fullmatch(file):
            mark, part, whole, _, form, packed = match.groups(default='')
            kind = f'{split}{mark}{"*" if part else ""}{whole}.{form}{packed}'
            kinds.setdefault(kind, []).append(file)
    if len(kinds) > 1:
        raise UserError(f'{directory} holds {" and ".join(sorted(kinds))}: name one of them in data.path')
    if not kinds:
        raise NoSplitError(f'{directory / split}.{{{endings}}}[.gz] does not exist{nearest(f"{split}.tsv", present)}')
    [(kind, files)] = kinds.items()
    whole_set = re.search(r'-of-(\d+)', kind)
    if whole_set and len(files) != int(whole_set[1]):
        raise UserError(f'{directory} holds {len(files)} of the {int(whole_set[1])} files {kind}')
    return sorted((directory / file for file in files), key=_order)


def _order(path: Path) -> list[tuple[bool, int, str]]:
    """A sort key with which part 10 comes after part 9."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r'(\d+)', str(path))]


def _read(text: Text, held_out: tuple[str, ...], split: str, config: Data, objective: str) -> Iterator[Record]:
    """The records of a file; with `held_out` splits, those of `split`."""
    kind, empty = ending(text.path), True
    key, shares = RECORDS[TASKS[objective].records].held_out_by, dict.fromkeys(held_out, _HELD_OUT)
    for record in READERS[kind](text, config, objective):
        empty = False
        if held_out and kind == '.txt' and TASKS[objective].running_text:
            part = _cut(record['text'], held_out, split)
            if part.strip():
                yield {'text': part}
            continue
        value = record[key] if isinstance(record[key], str) else ' '.join(record[key])
        if not held_out or split_of(value, shares.get('valid', 0), shares.get('test', 0)) == split:
            yield record
    if empty:
        bad = f': {text.skipped} bad lines were skipped' if text.skipped else ''
        raise UserError(f'{text.path} holds no examples{bad}')


def _cut(text: str, held_out: tuple[str, ...], split: str) -> str:
    """What is `split` of a document: `held_out` are its end, from the start of a line where there are lines."""
    stop, size = len(text), int(_HELD_OUT * len(text))
    for name in reversed(held_out):
        place = stop - size
        start = text.rfind('\n', max(0, place - size), place) + 1 or place
        if name == split:
            return text[start:stop]
        stop = start
    return text[:stop]
