"""Records from text files: one document, tab-separated lines, or JSON lines, each perhaps gzipped."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tformer.config.run import Data
from tformer.data.records import FIELDS, Record, split_of
from tformer.errors import UserError, choose, nearest

_HELD_OUT = 0.02  # share of a file that becomes a split which has no file of its own


def load(config: Data, objective: str, split: str) -> list[Record]:
    """The records of `split` from `config.path`, or from `valid_path` and `test_path` where they are given.

    A directory holds `{split}.{txt,tsv,jsonl}[.gz]`. Where `path` names a file and a split has no path of its
    own, 2 % of the records are held out for it, by the hash of their source or text. A .txt under causal_lm is
    one document, and loses its end: 2 % for valid, the last 2 % for test.

    Raises:
      UserError: a missing, empty or malformed file, with the line.
    """
    own = {'valid': config.valid_path, 'test': config.test_path}
    held_out = tuple(name for name, paths in own.items() if not paths)
    paths = own.get(split) or config.path
    if not paths:
        raise UserError("data.source='files' needs data.path: directories, or the train files")
    records: list[Record] = []
    for name in paths:
        path = Path(name)
        parts = held_out if path.is_file() and not own.get(split) else ()
        records += _read(_locate(path, split), parts, split, config, objective)
    return records


def _locate(path: Path, split: str) -> Path:
    """`path`, or the file of `split` in it."""
    if path.is_file():
        return path
    if not path.is_dir():
        siblings = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise UserError(f'{path} does not exist{nearest(path.name, siblings, listed=10)}')
    names = {f'{split}{ending}{packed}' for ending in READERS for packed in ('', '.gz')}
    present = sorted(p.name for p in path.iterdir())
    found = [name for name in present if name in names]
    if len(found) > 1:
        raise UserError(f'{path} holds {" and ".join(found)}: name one of them in data.path')
    if not found:
        endings = ','.join(ending[1:] for ending in READERS)
        raise UserError(f'{path / split}.{{{endings}}}[.gz] does not exist{nearest(f"{split}.tsv", present)}')
    return path / found[0]


def _read(path: Path, held_out: tuple[str, ...], split: str, config: Data, objective: str) -> list[Record]:
    """The records of a file; with `held_out` splits, those of `split`."""
    reader = choose(READERS, Path(path.name.removesuffix('.gz')).suffix, f'the ending of {path}')
    text = read_text(path)
    if held_out and reader is _txt and objective == 'causal_lm':
        text, held_out = _cut(text, held_out)[split], ()
    records = list(reader(path, text, config, objective))
    if not records:
        raise UserError(f'{path} holds no examples' + (f' for the {split} split' if split != 'train' else ''))
    if not held_out:
        return records
    key, shares = FIELDS[objective][0 if objective == 'seq2seq' else -1], dict.fromkeys(held_out, _HELD_OUT)
    return [r for r in records if split_of(r[key], shares.get('valid', 0), shares.get('test', 0)) == split]


def _cut(text: str, held_out: tuple[str, ...]) -> dict[str, str]:
    """The splits of one document: `held_out` at its end, from the start of a line where there are lines."""
    parts, size = {}, int(_HELD_OUT * len(text))
    for name in reversed(held_out):
        place = len(text) - size
        start = text.rfind('\n', 0, place) + 1 or place
        text, parts[name] = text[:start], text[start:]
    return {**parts, 'train': text}


def read_text(path: Path) -> str:
    """The whole file as UTF-8, line ends as they are, without a byte order mark."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
        return data.removeprefix(b'\xef\xbb\xbf').decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b'\n', 0, error.start) + 1
        raise UserError(f'{path}:{line}: not UTF-8: byte 0x{error.object[error.start]:02x}') from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f'{path} cannot be read: {error}') from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbers and text of the lines that are not blank."""
    for number, line in enumerate(text.split('\n'), start=1):
        if line.strip():
            yield number, line.removesuffix('\r')


def _txt(path: Path, text: str, config: Data, objective: str) -> Iterable[Record]:
    """One document (causal_lm), or the paragraphs between blank lines (masked_lm)."""
    if FIELDS[objective] != ('text',):
        wanted = ' and '.join(FIELDS[objective])
        raise UserError(f'{path} has only text and {objective} needs {wanted}: use a .tsv or .jsonl file')
    documents = [text] if objective == 'causal_lm' else re.split(r'\r?\n(?:[ \t]*\r?\n)+', text.strip('\r\n'))
    return [{'text': document} for document in documents if document.strip()]


def _tsv(path: Path, text: str, config: Data, objective: str) -> Iterable[Record]:
    """One record a line; `config.columns` names the columns, and others than the objective's are passed over."""
    fields, columns = FIELDS[objective], config.columns
    for number, line in _lines(text):
        values = line.split('\t')
        if not columns:
            columns = ('label', 'text') if fields == ('text',) and len(values) == 2 else fields
        for field in fields:
            if field not in columns:
                hint = nearest(field, columns)
                raise UserError(f'data.columns={columns} lacks {field!r}, which {objective} needs{hint}')
        if len(values) != len(columns):
            raise UserError(f'{path}:{number}: {len(values)} tab-separated columns, expected {len(columns)} '
                            f'({", ".join(columns)}): {line[:40]!r}')  # fmt: skip
        record = dict(zip(columns, values, strict=True))
        yield {field: record[field] for field in fields}


def _jsonl(path: Path, text: str, config: Data, objective: str) -> Iterable[Record]:
    """One object a line; `config.columns` are the keys of the objective's fields."""
    keys = keys_of(config, objective)
    for number, line in _lines(text):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise UserError(f'{path}:{number}: not JSON: {error}: {line[:40]!r}') from None
        if not isinstance(values, dict):
            raise UserError(f'{path}:{number}: not a JSON object: {line[:40]!r}')
        for field, key in keys.items():
            if key not in values:
                raise UserError(f'{path}:{number}: no key {key!r}{nearest(key, values)}')
            if not isinstance(values[key], str | (int if field == 'label' else str)):
                raise UserError(f'{path}:{number}: {key!r} is not a string: {str(values[key])[:40]}')
        yield {field: str(values[key]) for field, key in keys.items()}


def keys_of(config: Data, objective: str) -> dict[str, str]:
    """The name in the data of each of the objective's fields: `config.columns` in the order of `FIELDS`."""
    fields = FIELDS[objective]
    if config.columns and len(config.columns) != len(fields):
        raise UserError(f'data.columns={config.columns} must name {len(fields)} fields: {", ".join(fields)}')
    return dict(zip(fields, config.columns or fields, strict=True))


READERS: dict[str, Callable[[Path, str, Data, str], Iterable[Record]]] = {
    '.txt': _txt,
    '.tsv': _tsv,
    '.jsonl': _jsonl,
}
