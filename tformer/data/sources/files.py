"""Files as a source: the files of each split, and the splits that are held out of others."""

import collections
import functools
import glob
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tformer.config.run import Data
from tformer.config.tasks import RECORDS, TASKS
from tformer.data import cache, remote
from tformer.data.prepared import shards
from tformer.data.sources import token_files
from tformer.data.sources.file_formats import ENDINGS, READERS, ending, opened
from tformer.data.sources.records import Read, Record, fingerprint, split_of, text_of
from tformer.data.sources.spooled import Spooled
from tformer.data.sources.text_reader import PACKS, Numbered, find
from tformer.errors import NoSplitError, UserError, nearest

_NAMES = {'train': ('train',), 'valid': ('valid', 'validation', 'val'), 'test': ('test',)}  # of files of a split
_SAVED, _SPLITS = 'state.json', 'dataset_dict.json'  # beside what the hub's `datasets` have saved
HELD_OUT = 0.02  # the share of the train files that is held out for a split without files of its own


def load(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """Returns the fingerprint of `split` and a function that reads its records.

    The files are those of `config.valid_path` or `config.test_path` where these are set, else those of `config.path`.
    Each entry is a file, a glob of files, or a directory. A directory holds a file `{split}` with an ending of
    `ENDINGS`, or all parts of it, such as `{split}-00000-of-00004.tsv` or `{split}.0.tsv.gz`; `validation` and `val`
    are names of valid, too. Or `save_to_disk` of the hub's `datasets` has written it, with splits or without. If `path`
    names files, or a set without splits, 2 % of their records are held out for each split without a path of its own, by
    the hash of their source, context or text. A .txt file under an objective on running text is one document, so its
    end is held out: 2 % for valid, the last 2 % for test.

    Raises:
      UserError: a file is missing; when the records are read: a file is empty or a line is malformed.
    """
    names = named(config, split)
    if any(map(shards.is_set, names)):
        return _prepared(names, config, objective, split)
    located = locate(config, split)
    if any(ending(path) == token_files.ENDING for path, _ in located):
        return _tokens(located, config, objective, split)
    how: list[object] = [config.columns, config.bad_lines, objective]
    if TASKS[objective].labelled:
        how += [config.labels, config.label_range]
    if config.source_template is not None:
        how += [config.source_template, config.target_template]
    files = [(find(path), parts) for path, parts in located]
    contents = [(file.digest, ending(file.path), file.path.suffix, parts, parts and split) for file, parts in files]

    def read() -> tuple[Spooled, int]:
        texts = [(opened(file, config.bad_lines), parts) for file, parts in files]
        found = itertools.chain.from_iterable(read_splits(*text, split, config, objective) for text in texts)
        spooled = Spooled((record for name, record in found if name == split), cache.directory(config))
        return spooled, sum(text.skipped for text, _ in texts)

    return fingerprint(how, contents), read


def named(config: Data, split: str) -> list[str]:
    """Returns the entries of data.path, or of the path of the split; of a URL the name of a local copy."""
    paths = {'valid': config.valid_path, 'test': config.test_path}.get(split) or config.path
    if not paths:
        raise UserError("data.source='files' needs data.path: directories, or the train files")
    return [remote.fetched(path, cache.directory(config)) for path in paths]


def locate(config: Data, split: str) -> list[tuple[Path, tuple[str, ...]]]:
    """Returns each file of a split, and the splits that are held out of it. A file must not be named twice."""
    own = {'valid': config.valid_path, 'test': config.test_path}
    held_out = tuple(name for name, paths in own.items() if not paths)
    located: list[tuple[Path, tuple[str, ...]]] = []
    for name in named(config, split):
        has_splits = os.path.isdir(name) and not os.path.isfile(os.path.join(name, _SAVED))
        parts = () if own.get(split) or has_splits else held_out
        located += [(path, parts) for path in _located(name, split) if ending(path)]
    seen: dict[str, str] = {}  # the names of files, by those that links lead to
    for path, _ in located:
        name, field = os.path.abspath(path), 'path' if not own.get(split) else f'{split}_path'
        if before := seen.get(os.path.realpath(path)):
            twice = 'is named twice' if before == name else f'is the same file as {before}: it is named twice'
            raise UserError(f'{name} {twice} in data.{field}')
        seen[os.path.realpath(path)] = name
    return located


def _prepared(names: Sequence[str], config: Data, objective: str, split: str) -> tuple[str, Read]:
    """As `load`, of a prepared set."""
    if len(names) > 1:
        raise UserError(
            f'{names[0]} is one of several entries of data.path, and a prepared set is the only one: make '
            'parts of data.mixture'
        )
    if TASKS[objective].fields != ('text',):
        raise UserError(f'{names[0]} has only tokens and {objective} needs {" and ".join(TASKS[objective].fields)}')
    if config.columns:
        raise UserError(f'{names[0]}: data.columns={config.columns} has no effect on a prepared set')
    return shards.load(names[0], split)


def _tokens(
    located: Sequence[tuple[Path, tuple[str, ...]]], config: Data, objective: str, split: str
) -> tuple[str, Read]:
    """As `load`, of files of tokens."""
    for path, _ in located:
        if ending(path) != token_files.ENDING:
            raise UserError(f'{path} holds no tokens, unlike other files of data.path: make parts of data.mixture')
        if path.suffix != token_files.ENDING:
            raise UserError(f'{path} is not a {token_files.ENDING} file: tokens are read where they are, so unpack it')
        if TASKS[objective].fields != ('text',):
            wanted = ' and '.join(TASKS[objective].fields)
            raise UserError(f'{path} has only tokens and {objective} needs {wanted}: use a .tsv or .jsonl file')
    if config.columns:
        raise UserError(f'{located[0][0]}: data.columns={config.columns} has no effect on a file of tokens')
    files = [(token_files.found(path), parts) for path, parts in located]
    contents = [(each.file.digest, each.idx and each.idx.digest, parts, parts and split) for each, parts in files]
    return fingerprint('tokens', contents), token_files.Reader(files, split)


def _located(name: str, split: str) -> list[Path]:
    """Returns the files of an entry of data.path, ordered by the numbers in their names."""
    path, pattern = Path(name), re.search(r'[*?[]', name)
    try:
        if (path / _SAVED).is_file():
            return _saved(path)
        if (path / _SPLITS).is_file():
            return _saved(_of_dict(path, split))
        if path.is_dir():
            return _of_split(path, split)
        if path.exists():
            return [path]
        matches = sorted(map(Path, glob.glob(name, recursive=True)), key=_order) if pattern else []
        siblings = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    except OSError as error:
        raise UserError(f'{path} cannot be read: {error.strerror}') from None
    if not matches and path.is_symlink():
        raise UserError(f'{path} does not exist: it is a link to {os.readlink(path)}')
    if not matches:
        problem = 'matches no file' if pattern else 'does not exist'
        raise UserError(f'{path} {problem}{nearest(path.name, siblings, listed=10)}')
    splits = [_split_of(match) for match in matches]
    if None not in splits and len(set(splits)) > 1:
        other = next(match for match, split in zip(matches, splits, strict=True) if split != splits[0])
        line = f'matches {matches[0].name} and {other.name}, which are splits'
        raise UserError(f'{path} {line}: name their directory, the files of one split, or all of them')
    return matches


def _of_dict(directory: Path, split: str) -> Path:
    """Returns the directory of a split of a `DatasetDict`."""
    present = sorted(path.parent.name for path in directory.glob(f'*/{_SAVED}'))
    if found := [name for name in _NAMES[split] if name in present]:
        return directory / found[0]
    raise NoSplitError(f'{directory} has no split {split}{nearest(split, present)}')


def _saved(directory: Path) -> list[Path]:
    """Returns the Arrow files of a `Dataset` in their order."""
    try:
        state = json.loads((directory / _SAVED).read_text())
        files = [directory / Path(file['filename']).name for file in state['_data_files']]
        selects = bool(state.get('_indices_data_files'))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f'{directory / _SAVED} is not of a saved set: {type(error).__name__} {error}') from None
    if selects:
        raise UserError(f'{directory} is a selection of rows by an old version of datasets: save it by a newer one')
    for file in files:
        if not file.is_file():
            raise UserError(f'{file}, a part of {directory}, does not exist')
    return files


@functools.cache
def _pattern(split: str) -> re.Pattern[str]:
    """Returns the pattern of the names of files of a split."""
    endings, packs = '|'.join(ending[1:] for ending in ENDINGS), '|'.join(map(re.escape, PACKS))
    return re.compile(rf'({"|".join(_NAMES[split])})(?:([-._])(\d+)(-of-(\d+))?)?\.({endings})({packs})?')


def _split_of(file: Path) -> str | None:
    """Returns the split that a file is named for, if any."""
    return next((split for split in _NAMES if _pattern(split).fullmatch(file.name)), None)


def _of_split(directory: Path, split: str) -> list[Path]:
    """Returns the file of `split`, or all its parts."""
    endings, packs, pattern = ','.join(ending[1:] for ending in ENDINGS), '|'.join(PACKS), _pattern(split)
    present = sorted(path.name for path in directory.iterdir())
    kinds = collections.defaultdict(list)
    for file in present:
        if match := pattern.fullmatch(file):
            own, separator, part, total, _, suffix, packed = match.groups(default='')
            kinds[f'{own}{separator}{"*" if part else ""}{total}.{suffix}{packed}'].append(file)
    if len(kinds) > 1:
        raise UserError(f'{directory} holds {" and ".join(sorted(kinds))}: name one of them in data.path')
    if not kinds:
        raise NoSplitError(
            f'{directory / split}.{{{endings}}}[{packs}] does not exist{nearest(f"{split}.tsv", present)}'
        )
    [(kind, files)] = kinds.items()
    if counted := re.search(r'-of-(\d+)', kind):
        _check_parts(f'{directory} holds', kind, files, int(counted[1]))
    return sorted((directory / file for file in files), key=_order)


def _check_parts(who: str, kind: str, files: Sequence[str], total: int) -> None:
    """Raises a `UserError` unless files have the numbers of all parts of a split, from 0 or from 1 on."""
    numbers = [int(re.findall(r'\d+', file.partition('-of-')[0])[-1]) for file in files]
    first = int(0 not in numbers and total in numbers)
    if missing := sorted({*range(first, first + total)} - {*numbers}):
        raise UserError(f'{who} {total - len(missing)} of the {total} files {kind}: number {missing[0]} is missing')
    if len(files) != total:
        raise UserError(f'{who} {len(files)} files {kind}')


def _order(path: Path) -> list[int | str]:
    """A sort key that puts part 10 after part 9: text and numbers take turns in it."""
    return [int(part) if part.isdecimal() else part for part in re.split(r'(\d+)', str(path))]


def read_splits(
    text: Numbered, held_out: tuple[str, ...], split: str, config: Data, objective: str
) -> Iterator[tuple[str, Record]]:
    """Yields (split, record) of a file: `split`, or where splits are held out of it each record's own."""
    kind, empty = ending(text.path), not text.partial
    is_document = kind == '.txt' and TASKS[objective].running_text
    key, shares = RECORDS[TASKS[objective].records].held_out_by, dict.fromkeys(held_out, HELD_OUT)
    for record in READERS[kind](text, config, objective):
        empty = False
        if held_out and is_document:
            for name in ('train', *held_out):
                part = _cut(record['text'], held_out, name)
                if part.strip():
                    yield name, {'text': part}
        elif held_out:
            yield split_of(text_of(record, key), shares.get('valid', 0), shares.get('test', 0)), record
        else:
            yield split, record
    if empty:
        bad = f': {text.skipped} bad lines were skipped' if text.skipped else ''
        raise UserError(f'{text.path} holds no examples{bad}')


def _cut(text: str, held_out: tuple[str, ...], split: str) -> str:
    """Returns a split's part of a document. Held-out splits are its end, cut at the start of a line if it has lines."""
    stop, size = len(text), int(HELD_OUT * len(text))
    for name in reversed(held_out):
        place = stop - size
        start = text.rfind('\n', max(0, place - size), place) + 1 or place
        if name == split:
            return text[start:stop]
        stop = start
    return text[:stop]
