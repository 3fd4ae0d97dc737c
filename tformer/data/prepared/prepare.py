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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from tformer import atomic
from tformer.config import Config, hashing
from tformer.data import worker
from tformer.data.prepared import job as job_lib
from tformer.data.prepared import shards, stages
from tformer.data.prepared.job import WORK, Job
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError

_EVERY = 10.0  # seconds between lines of progress

Say = Callable[[str], object]
Engine = Callable[[str, str, int, Say], None]  # makes the entries of a stage: (directory, stage, how many, say)
_WORDS = {
    'read': 'parts read',
    'link': 'shares compared',
    'near': 'lists of near duplicates',
    'write': 'shards written',
}


def write(config: Config, tokenizers: Tokenizers, place: str, engine: Engine, say: Say = lambda line: None) -> str:
    """Writes the texts of config.data as a prepared set in the directory `place`, unless it is there.

    What a killed preparation has made is used, once its bytes have passed their checksums. Returns lines that say what
    the set holds, and how to train from it.

    Raises:
      UserError: the sources cannot be prepared, another set is there, or the directory cannot be written.
    """
    home, work = Path(place), Path(place, WORK)
    own = job_lib.plan(config, tokenizers)
    if (home / shards.INDEX).exists():
        index = shards.read_index(home)
        if index['fingerprint'] != own.fingerprint:
            raise UserError(
                f'{place} holds a set of other texts, settings or tokens: delete it or name another --output'
            )
        if not (damaged := list(shards.faults(home, index, whole=True))):
            return _summary(config, place, index, 'is already written')
        say(f'{place} is made again: {", ".join(damaged)} changed since it was written')
    try:
        work.mkdir(parents=True, exist_ok=True)
        tokenizers.save(place)
        own.save(work)
        engine(place, 'read', len(own.parts), say)
        planned = stages.plan(place)
        if config.data.deduplicate == 'minhash':
            engine(place, 'link', planned.shares, say)
            engine(place, 'near', 1, say)
        engine(place, 'write', len(planned.outputs), say)
        index = _publish(home, own, tokenizers, planned)
    except OSError as error:
        raise UserError(f'{place} cannot be written: {error.strerror or error}') from error
    shutil.rmtree(work)
    return _summary(config, place, index, 'is written')


def _publish(home: Path, own: Job, tokenizers: Tokenizers, planned: stages.Plan) -> dict[str, Any]:
    """Gives the shards their names, and writes the arrays and last the index, which it returns."""
    counts: collections.Counter[str] = collections.Counter()
    for number in range(len(own.parts)):
        facts = stages.made(str(home), 'read', number)[1]
        counts.update({name: facts[name] for name in ('records', 'cleaned', 'skipped')})
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
        counts.update({name: facts[name] for name in ('exact', 'near')})
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


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name; where the file system has no such thing, copies it."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _summary(config: Config, place: str, index: dict[str, Any], what: str) -> str:
    counts = index['counts']
    words = {
        'skipped': 'skipped as bad',
        'cleaned': 'left out by cleaning',
        'exact': 'duplicates',
        'near': 'near duplicates',
    }
    notes = ''.join(f', {counts[name]:,} {word}' for name, word in words.items() if counts.get(name))
    lines = [f'{place} {what}: of {counts["records"]:,} texts{notes}']
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
            process.terminate()


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
