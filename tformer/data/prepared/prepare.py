"""Preparation of a set: its stages one after the other by an engine, and the files that they make in their place."""

import collections
import concurrent.futures
import contextlib
import functools
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from tformer import atomic
from tformer.config import Config, hashing
from tformer.data import locks, remote, stores, worker
from tformer.data.prepared import job as job_lib
from tformer.data.prepared import shards, stages
from tformer.data.prepared.job import WORK, Job
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError

_EVERY = 10.0  # seconds between lines of progress
_LOCK = 'lock'  # beside what is made on the way
_OWN = (shards.INDEX, f'{WORK}/{_LOCK}', f'{WORK}/job.json')  # files by which a directory is a set's

Say = Callable[[str], object]
Engine = Callable[[str, str, int, Say], None]  # makes the entries of a stage: (directory, stage, how many, say)
_WORDS = {
    'read': 'parts read',
    'link': 'shares compared',
    'near': 'lists of near duplicates',
    'write': 'shards written',
}


def check_output(place: str) -> None:
    """Raises a `UserError` unless a set may be written in a directory: a new or empty one, or that of a set."""
    if not place:
        raise UserError('--output is empty: name the directory of the set')
    stores.require_local(place, '--output', written=True)
    home = Path(place)
    if home.is_dir() and any(home.iterdir()) and not any((home / name).is_file() for name in _OWN):
        raise UserError(f'--output={place} holds other files, and no prepared set: name a new or an empty directory')


@remote.by_url()
def write(config: Config, tokenizers: Tokenizers, place: str, engine: Engine, say: Say = lambda line: None) -> str:
    """Writes the texts of config.data as a prepared set in the directory `place`, unless it is there.

    What a killed preparation has made is used, once its bytes have passed their checksums. What is there of other files
    may be overwritten: see `check_output`. Returns lines that say what the set holds, and how to train from it.

    Raises:
      UserError: the sources cannot be prepared, no text is left for training, another set is there, another process
        writes it, or the directory cannot be written.
    """
    home, work = Path(place), Path(place, WORK)
    own = job_lib.plan(config, tokenizers)
    try:
        before = _stored_index(home)
        if before is not None and (index := _whole(home, own, say)):
            if not _is_saved(tokenizers, home):
                say(f'{place}: its tokenizer is written again')
                tokenizers.save(place)
            return _summary(config, place, index, 'is already written')
        work.mkdir(parents=True, exist_ok=True)
        with locks.alone(work / _LOCK, f'--output={place}'):
            if _stored_index(home) != before:
                raise UserError(f'--output={place}: another process has written it meanwhile, run again to check it')
            index = _make(config, tokenizers, own, place, engine, say)
            shutil.rmtree(work)
    except OSError as error:
        raise UserError(f'{place} cannot be written: {error.strerror or error}') from error
    return _summary(config, place, index, 'is written')


def _stored_index(home: Path) -> bytes | None:
    return (home / shards.INDEX).read_bytes() if shards.is_set(str(home)) else None


def _whole(home: Path, own: Job, say: Say) -> dict[str, Any] | None:
    """Returns the index of a set, all of whose bytes are as they were written; None: some are not, which is said."""
    try:
        index = shards.read_index(home)
    except UserError:
        say(f'{home} is made again: its {shards.INDEX} is damaged')
        return None
    if index['fingerprint'] != own.fingerprint:
        raise UserError(f'{home} holds a set of other texts, settings or tokens: delete it or name another --output')
    if damaged := list(shards.faults(home, index, whole=True)):
        say(f'{home} is made again: {", ".join(damaged)} changed since it was written')
        return None
    return index


def _is_saved(tokenizers: Tokenizers, home: Path) -> bool:
    try:
        return Tokenizers.load(home).fingerprint == tokenizers.fingerprint
    except UserError:
        return False


def _make(config: Config, tokenizers: Tokenizers, own: Job, place: str, engine: Engine, say: Say) -> dict[str, Any]:
    """Makes a set stage by stage, and returns its index."""
    tokenizers.save(place)
    own.save(Path(place, WORK))
    engine(place, 'read', len(own.parts), say)
    planned = stages.plan(place)
    if config.data.deduplicate == 'minhash':
        engine(place, 'link', planned.shares, say)
        engine(place, 'near', 1, say)
    engine(place, 'write', len(planned.outputs), say)
    return _publish(Path(place), own, tokenizers, planned)


def _publish(home: Path, own: Job, tokenizers: Tokenizers, planned: stages.Plan) -> dict[str, Any]:
    """Gives the shards their names, and writes the arrays and last the index, which it returns."""
    counts = _counts(home, own, planned)
    files: dict[str, tuple[int, str]] = {}
    splits: dict[str, Any] = {}
    lengths: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    dtype = ''
    for number, (split, shard, count) in enumerate(planned.outputs):
        arrays, facts = stages.made(str(home), 'write', number)
        name, dtype = f'{split}-{shard:05d}-of-{count:05d}.array_record', facts['dtype']
        stored: Any = arrays['shard'].base  # numpy's view of the file
        _link(Path(stored.filename), home / name)
        files[name] = (home / name).stat().st_size, hashing.crc32_file(home / name)
        lengths[split].append(arrays['lengths'])
        found = splits.setdefault(split, {'documents': 0, 'tokens': 0, 'shards': [], 'records': []})
        found['shards'].append(name)
        found['records'].append(int(shards.records_of(arrays['lengths']).sum()))
        for key in ('documents', 'tokens'):
            found[key] += facts[key]
    for split, parts in lengths.items():
        whole = np.concatenate(parts)
        records = shards.records_of(whole)
        for name, values in (('lengths', whole.astype('<i4')), ('records', np.cumsum(records) - records)):
            file = home / f'{split}.{name}'
            atomic.write(file, values.astype(values.dtype.newbyteorder('<')).tobytes())
            files[file.name] = file.stat().st_size, hashing.crc32_file(file)
    index = {
        'fingerprint': own.fingerprint,
        'tokenizer': tokenizers.target.fingerprint,
        'dtype': dtype,
        'counts': dict(counts),
        'splits': {split: found for split, found in splits.items() if found['documents']},
        'files': files,
    }
    atomic.write(home / shards.INDEX, json.dumps({**index, 'digest': hashing.digest_json(index)}, indent=1) + '\n')
    return index


def _counts(home: Path, own: Job, planned: stages.Plan) -> collections.Counter[str]:
    """Counts the texts that were read, and those that were left out; a `UserError` if none is left for training."""
    counts: collections.Counter[str] = collections.Counter()
    for number in range(len(own.parts)):
        facts = stages.made(str(home), 'read', number)[1]
        counts.update({name: facts[name] for name in ('records', 'cleaned', 'skipped')})
    documents: collections.Counter[str] = collections.Counter()
    for number, (split, _, _) in enumerate(planned.outputs):
        facts = stages.made(str(home), 'write', number)[1]
        counts.update({name: facts[name] for name in ('exact', 'near')})
        documents[split] += facts['documents']
    if not documents['train']:
        others = f', {documents.total():,} in other splits' if documents.total() else ''
        raise UserError(f'no text is left for training: of {_left_out(counts)}{others}')
    return counts


def _left_out(counts: Mapping[str, int]) -> str:
    """Returns how many texts there were, and how many of them were left out by what."""
    words = {
        'skipped': 'skipped as bad',
        'cleaned': 'left out by cleaning',
        'exact': 'duplicates',
        'near': 'near duplicates',
    }
    notes = (f', {counts[name]:,} {word}' for name, word in words.items() if counts.get(name))
    return f'{counts["records"]:,} texts{"".join(notes)}'


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name; where the file system has no such thing, copies it."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _summary(config: Config, place: str, index: dict[str, Any], what: str) -> str:
    lines = [f'{place} {what}: of {_left_out(index["counts"])}']
    for split, found in index['splits'].items():
        lines.append(
            f'  {split:<6} {found["documents"]:>14,} documents {found["tokens"]:>18,} tokens '
            f'{len(found["shards"]):>7,} shards'
        )
    given = {'source': 'files', 'path': place, 'tokenizer_from': place}
    flags = [f'--config.data.{name}={value}' for name, value in given.items() if value != getattr(config.data, name)]
    return '\n'.join([*lines, f'train from it with {" ".join(flags)}'])


# -------------------------------------------------------------------------------------------------------------- engines


def here(place: str, stage: str, count: int, say: Say) -> None:
    """Makes the entries of a stage in this process."""
    _report(stage, count, map(functools.partial(stages.run, place, stage), range(count)), say)


@contextlib.contextmanager
def processes(number: int) -> Iterator[Engine]:
    """Gives an engine of so many processes of this machine, each with a thread for tokenising."""
    context = multiprocessing.get_context('spawn')
    executor = concurrent.futures.ProcessPoolExecutor(number, context, initializer=_begin)
    before = set(multiprocessing.active_children())

    def engine(place: str, stage: str, count: int, say: Say) -> None:
        waiting = [executor.submit(stages.run, place, stage, entry) for entry in range(count)]
        _report(stage, count, (done.result() for done in concurrent.futures.as_completed(waiting)), say)

    try:
        yield engine
    except BrokenProcessPool:
        raise UserError(
            'a process of the preparation was killed, e.g. for want of memory: the same command goes on from there'
        ) from None
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.kill()


def _begin() -> None:
    """Begins a process of `processes`, which ends with the one that it works for."""
    worker.follow()
    SentencePiece.threads = 1
    os.environ |= {'TOKENIZERS_PARALLELISM': 'false', 'RAYON_NUM_THREADS': '1'}


def _report(stage: str, count: int, done: Iterable[None], say: Say) -> None:
    """Waits for the entries of a stage, and tells how far it is and how long the rest will take.

    Entries that were there already take no time, and do not count for the estimate: it is of the last third of what was
    made.
    """
    times = [time.monotonic()]
    last_line = times[0]
    for _ in done:
        now = time.monotonic()
        times.append(now)
        if now > last_line + _EVERY:
            last_line, made = now, len(times) - 1
            recent = max(made // 3, 1)
            left = (now - times[-1 - recent]) / recent * (count - made)
            say(f'{made:,} of {count:,} {_WORDS[stage]}, {math.ceil(left / 60):,} min left')
