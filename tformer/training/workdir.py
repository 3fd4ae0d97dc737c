"""A run's directory: its resolved config and its tokenizers, made once and checked ever after."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from tformer import atomic
from tformer import config as config_lib
from tformer.config import Config, extensions
from tformer.data.batches.mixture import Concatenation
from tformer.data.tokenizers.tokenizers import Tokenizers, cached_tokenizers, train_tokenizers
from tformer.errors import UserError, choose, nearest

# What may differ between a run and its continuation, and between training and evaluation: sections, and fields.
FREE_SECTIONS = ('decode', 'evaluate', 'mesh')
FREE_FIELDS = (
    'data.path',
    'data.valid_path',
    'data.test_path',
    'data.mixture',  # its weights are in the fingerprint of the data
    'data.tfds_dir',
    'data.tokenizer_path',
    'data.prefetch',
    'data.num_threads',
    'data.num_workers',
    'data.cache_dir',
    'train.log_every',
    'train.keep_last',
    'train.keep_every',
    'train.max_skipped',
    'train.max_minutes',
    'train.eval_batches',
    'train.loss_chunk',
    'train.checkpoint_every',
    'model.scan_layers',
    'model.remat',
    'model.attention_kernel',
)


LOCK_SECONDS = 3  # a killed run's data workers hold its lock until they have seen that it is gone


def is_free(field: str) -> bool:
    """Returns whether a dotted field may differ: it changes neither the parameters nor the updates."""
    return field.split('.')[0] in FREE_SECTIONS or field in FREE_FIELDS


def load_config(workdir: pathlib.Path) -> Config:
    """Returns the resolved config of a workdir.

    Raises:
      UserError: it is no workdir, its config.json does not read, or it needs an extension that the user has not named.
    """
    file = workdir / 'config.json'
    if not file.is_file():
        parent = workdir.parent
        others = [str(path.parent) for path in parent.glob('*/config.json')] if parent.is_dir() else []
        raise UserError(f'{workdir} is no workdir: it has no config.json{nearest(workdir, others) if others else ""}')
    try:
        tree = json.loads(file.read_text())
        if not isinstance(tree, dict):
            raise ValueError('not a JSON object')
        return extensions.load(config_lib.from_dict(tree), trusted=False, place=str(workdir))
    except ValueError as error:
        raise UserError(f'{file}: {error}') from error


def changed_config(workdir: pathlib.Path, overrides: Mapping[str, str]) -> Config:
    """Returns the resolved config of a workdir, with other values in fields that are free.

    Raises:
      UserError: another field, it is no workdir, or its config.json does not read.
    """
    for field in overrides:
        if field in config_lib.field_types() and not is_free(field):
            raise UserError(f'config.{field} is part of what was trained in {workdir} and cannot be changed')
    return config_lib.override(load_config(workdir), overrides)


def check_config(workdir: pathlib.Path, before: Config, config: Config, may_differ: Sequence[str] = ()) -> None:
    """Raises a `UserError` that names the fields that differ, of those that must not, from the config of a checkpoint.

    Args:
      workdir: that holds the checkpoint.
      before: the checkpoint's config.
      config: of the run that is to go on.
      may_differ: dotted fields that may, besides those that are free.
    """
    fields = config_lib.field_types()
    for name in may_differ:
        choose(dict.fromkeys(fields), name, '--may_differ')
    differing = config_lib.difference(before, config)
    changed = [
        f'{name} ({old!r} there, {new!r} here)'
        for name, (old, new) in differing.items()
        if not is_free(name) and name not in may_differ
    ]
    if changed:
        raise UserError(
            f'{workdir} is of another config: {", ".join(changed)}; use a fresh --workdir, or its values'
            ' (or name what may differ in --may_differ)'
        )


@contextlib.contextmanager
def lock(workdir: pathlib.Path) -> Iterator[None]:
    """Makes a workdir where there is none, and keeps other processes from training in it; ends with the process.

    Raises:
      UserError: another one does, or the directory cannot be made.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'--workdir={workdir}: {error.strerror}') from error
    with (workdir / 'lock').open('a+') as file:
        for attempt in range(LOCK_SECONDS * 10 + 1):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt == LOCK_SECONDS * 10:
                    file.seek(0)
                    holder = file.read().strip() or 'another process'
                    raise UserError(f'--workdir={workdir} is in use by {holder}') from error
                time.sleep(0.1)
            except OSError as error:  # a file system that has no locks
                line = f'nothing keeps a second process out of it, for its file system locks no files: {error.strerror}'
                print(f'--workdir={workdir}: {line}', file=sys.stderr, flush=True)
                break
        file.truncate(0)
        file.write(f'process {os.getpid()} on {socket.gethostname()}, since {time.strftime("%Y-%m-%d %H:%M:%S")}\n')
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # data workers that have not ended hold it, too


def is_locked(workdir: pathlib.Path, patience: float = 0.0) -> bool:
    """Returns whether a process holds a workdir, and goes on to for `patience` seconds; nothing is written."""
    end = time.monotonic() + patience
    while True:
        try:
            with (workdir / 'lock').open('rb') as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            if time.monotonic() >= end:
                return True
            time.sleep(0.1)
        except OSError:  # no lock is there, or the file system has none
            return False


def save_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes the resolved config."""
    atomic.write(workdir / 'config.json', json.dumps(config_lib.to_dict(config), indent=2) + '\n')


def tokenizers(workdir: pathlib.Path, config: Config, records: Concatenation, begun: bool) -> Tokenizers:
    """Returns the tokenizers of a run: its own where it has `begun`, else another run's, else trained ones."""
    if begun:
        return Tokenizers.load(workdir)
    made = new_tokenizers(config, records)
    made.save(workdir)
    return made


def new_tokenizers(config: Config, records: Concatenation) -> Tokenizers:
    """Returns the tokenizers of a run that begins."""
    if lender := config.data.tokenizer_from or config.train.init_from:
        return train_tokenizers(config, records, Tokenizers.load(lender))
    if 'huggingface' in (config.data.tokenizer, config.data.source_tokenizer):  # of a file, whose contents may change
        return train_tokenizers(config, records)
    return cached_tokenizers(config, records, [split.fingerprint for split in records.splits])
