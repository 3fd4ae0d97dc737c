"""What a prepared set is made of: its config, and the parts of its sources, each of which is read by itself."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tformer import atomic
from tformer import config as config_lib
from tformer.config import Config, extensions
from tformer.config.tasks import TASKS
from tformer.data.prepared import near, shards
from tformer.data.sources import files, passages, records, sources, tables, text_reader, token_files
from tformer.data.sources.file_formats import ending, opened
from tformer.data.sources.passages import Passages
from tformer.data.sources.tables import TABLES, RowGroups
from tformer.data.sources.text_reader import File, Part
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import NoSplitError, UserError

SPLITS = ('test', 'valid', 'train')  # a text that is in several stays in the first of them
WORK = 'unfinished'  # the directory, in that of a set, of what is made on the way
PART = 1 << 24  # bytes of a file that are read together
RECORDS = 1 << 13  # records of another source, likewise
_FORMAT = 1  # increased when the same job makes other bytes


@dataclasses.dataclass(frozen=True)
class Job:
    """All that the bytes of a set depend on. Equal fingerprints mean equal sets."""

    config: Config
    files: list[tuple[str, str, tuple[int, int], tuple[str, ...], str]]  # path, digest, state, held out of it, split
    parts: list[tuple[int, str, int, int]]  # number of a file or -1, split, and bytes, records or groups; 0, 0: all
    fingerprint: str

    def save(self, place: Path) -> None:
        """Writes the job for the processes that work on it."""
        stored = {**vars(self), 'config': config_lib.to_dict(self.config), 'extensions': extensions.files(self.config)}
        atomic.write(place / 'job.json', json.dumps(stored))
        load.cache_clear()

    def read(self, number: int) -> Iterator[tuple[str, str] | int]:
        """Yields (split, text) of a part, and at its end the number of records that data.bad_lines skips."""
        data, objective = self.config.data, self.config.train.objective
        file, split, start, stop = self.parts[number]
        if file < 0:
            for record in _records(data, objective, split)[start:stop]:
                yield split, record['text']
            return
        path, digest, state, held_out, _ = self.files[file]
        found = File(Path(path), digest)
        text: Any = opened(found, data.bad_lines)
        if stop:
            text = PARTS[ending(found.path)](found, data.bad_lines, start, stop, (state[0], state[1]))
        if isinstance(text, Passages):
            yield from ((split, passage) for passage in text.texts())
        else:
            for own, record in files.read_splits(text, tuple(held_out), split, data, objective):
                yield own, record['text']
        yield text.skipped


_records = functools.lru_cache(maxsize=len(SPLITS))(sources.load)


@functools.lru_cache(maxsize=1)
def load(place: str) -> Job:
    """Returns the job that was saved in a directory."""
    stored = json.loads(Path(place, 'job.json').read_text())
    extensions.import_files(stored.pop('extensions'))
    return Job(**{**stored, 'config': config_lib.from_dict(stored['config'])})


def plan(config: Config, tokenizers: Tokenizers) -> Job:
    """Returns the job of a config; all files are found and hashed.

    Raises:
      UserError: a split cannot be read, the objective needs more than texts, or the source has tokens already.
    """
    data, objective = config.data, config.train.objective
    if TASKS[objective].fields != ('text',):
        raise UserError(
            f'--output is for objectives on texts, and train.objective={objective} is none: set '
            'data.tfds_name, which writes the records'
        )
    if data.mixture:
        raise UserError('--output prepares one source: prepare each part of data.mixture as a set of its own')
    if data.train_examples is not None:
        raise UserError('--output prepares all texts: leave out data.train_examples, and set it where you train')
    found: list[tuple[str, str, tuple[int, int], tuple[str, ...], str]] = []
    parts: list[tuple[int, str, int, int]] = []
    contents: list[Any] = []
    for split in reversed(SPLITS):  # training first, which must exist
        try:
            if data.source == 'files':
                _add_files(config, split, found, parts)
            else:
                records_ = _records(data, objective, split)
                contents.append((split, records_.fingerprint))
                parts += [(-1, split, start, start + RECORDS) for start in range(0, len(records_), RECORDS)]
        except NoSplitError:
            if split == 'train':
                raise
    contents += [(digest, ending(Path(path)), held_out, split) for path, digest, _, held_out, split in found]
    how = [objective, data.columns, data.bad_lines, data.cleaning, data.deduplicate, PART, parts]
    how += [near.version()] if data.deduplicate == 'minhash' else []
    mark = records.fingerprint(_FORMAT, contents, how, tokenizers.fingerprint)
    return Job(config, found, parts, mark)


def _add_files(config: Config, split: str, found: list[Any], parts: list[Any]) -> None:
    """Adds the files of a split and their parts, unless they are read with those of the training split."""
    if any(map(shards.is_set, files.named(config.data, split))):
        raise UserError(f'{files.named(config.data, split)[0]} is a prepared set already')
    for path, held_out in files.locate(config.data, split):
        if ending(path) == token_files.ENDING:
            raise UserError(f'{path} holds tokens already, from which training reads as it is')
        if held_out and split != 'train':
            continue
        before = text_reader.state(path)
        file = text_reader.find(path)
        edges = list(_edges(path, split, held_out, before[0], config))
        parts += [(len(found), *edge) for edge in (edges if len(edges) > 1 else [(split, 0, 0)])]
        found.append((str(path.absolute()), file.digest, before, held_out, split))


def _edges(
    path: Path, split: str, held_out: tuple[str, ...], size: int, config: Config
) -> Iterator[tuple[str, int, int]]:
    """Yields (split, start, stop) of the parts of a file, each of about `PART` bytes, unless it is read whole."""
    if path.suffix == '.jsonl':
        count = -(-size // PART)
        yield from ((split, size * i // count, size * (i + 1) // count) for i in range(count))
    elif path.suffix == '.txt' and size > PART:
        if TASKS[config.train.objective].running_text and not config.data.columns:
            yield from passages.edges(path, held_out, files.HELD_OUT, PART)
    elif path.suffix in TABLES:
        ends = list(itertools.accumulate(tables.group_sizes(path, path.suffix)))
        inside = (i + 1 for i, (end, after) in enumerate(itertools.pairwise(ends)) if end // PART < after // PART)
        yield from ((split, *edge) for edge in itertools.pairwise([0, *inside, len(ends)]))


PARTS: dict[str, Callable[..., Any]] = {  # how the parts of a file are read
    '.jsonl': Part,
    '.txt': Passages,
    **dict.fromkeys(TABLES, RowGroups),
}
