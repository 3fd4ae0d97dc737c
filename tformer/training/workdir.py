"""A run's directory: its resolved config and its tokenizers, which are made once and checked from then on.

The lock is flock's: the system releases it when its process ends, however it ends.
"""

import contextlib
import dataclasses
import fcntl
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tformer import atomic, checks
from tformer import config as config_lib
from tformer.config import Config, extensions
from tformer.config.tasks import HEADS, TASKS
from tformer.data import locks, store_copies, stores
from tformer.data.batches.mixture import Concatenation
from tformer.data.tokenizers.tokenizers import Tokenizers, cached_tokenizers, train_tokenizers, with_chat
from tformer.distributed import processes
from tformer.errors import UserError, choose, nearest
from tformer.hf import directory as hub_directory
from tformer.layers.resolved import with_resolved_model
from tformer.optim.parameters import within
from tformer.training import checkpoint, digests

# Sections and fields that may differ between a run and its continuation, and between training and evaluation.
FREE_SECTIONS = ('decode', 'evaluate', 'mesh')
CONTENTS = ('data.path', 'data.valid_path', 'data.tfds_dir', 'data.mixture')  # free: fingerprints say what they hold
FREE_FIELDS = (
    *CONTENTS,
    *'data.test_path data.tokenizer_path data.cache_dir data.prefetch data.num_threads data.num_workers'.split(),
    *'train.log_every train.trackers train.keep_last train.keep_every train.max_skipped train.max_minutes'.split(),
    'train.eval_batches',
    'train.teacher',  # the fingerprint of the data has what it is
    *'train.loss_chunk train.checkpoint_every model.scan_layers model.remat model.attention_kernel'.split(),
    'optimizer.offload',
)
LANGUAGES = ('data.start', 'data.source_start', 'data.source_end')  # free in what two stacks read and write
LOCK_SECONDS = 3  # data workers of a killed run hold its lock until they notice that it is gone


def is_free(field: str) -> bool:
    """Returns whether a dotted field may differ, because it changes neither the parameters nor the updates."""
    return field.split('.')[0] in FREE_SECTIONS or field in FREE_FIELDS


def load_config(workdir: pathlib.Path) -> Config:
    """Returns the resolved config of a workdir.

    Raises:
      UserError: as `read_config`, or it needs an extension that the user has not named.
    """
    config = read_config(workdir)
    try:
        return extensions.load(config, trusted=False, place=str(workdir))
    except UserError as error:
        raise UserError(f'{workdir / "config.json"}: {error}') from error


def read_config(workdir: pathlib.Path) -> Config:
    """Returns the resolved config of a workdir, without its extensions.

    A config.json that is not as the run wrote it is compared with the newest checkpoint. A line says which fields
    differ that may.

    Raises:
      UserError: the directory is not a workdir, its config.json cannot be read, or it differs from the checkpoint in
        other fields.
    """
    stores.require_local(workdir)
    file = workdir / 'config.json'
    if not file.exists():
        beside = () if str(workdir) in store_copies.COPIES else workdir.parent.glob('*/config.json')
        others = [path.parent for path in beside]
        raise UserError(f'{workdir} is not a workdir: it has no config.json{nearest(workdir, others)}')
    config = config_lib.from_json(file)
    if not digests.matches(workdir, file.name) and (newest := checkpoint.newest_metadata(workdir)):
        step, before = newest[0], config_lib.from_dict(newest[1].get('config', config_lib.to_dict(config)))
        if changed := _differing(before, config, lambda name: not is_free(name)):
            raise UserError(f'{file} has changed since checkpoint {step} was written: {changed}; restore the values')
        if changed := _differing(before, config):
            line = f'{store_copies.shown(file)} differs from the config of checkpoint {step}: {changed}'
            print(line, file=sys.stderr, flush=True)
    return config


def _differing(before: Config, config: Config, counts: Callable[[str], bool] = lambda name: True) -> str:
    """Returns those of the fields that count which differ, as text."""
    return ', '.join(
        f'{name} ({old!r} there, {new!r} here)'
        for name, (old, new) in config_lib.difference(*map(with_resolved_model, (before, config))).items()
        if counts(name)
    )


def differing_data(before: Config, config: Config) -> str:
    """Returns the fields that differ and have a part in what the batches hold, as text."""
    others = 'train.batch_size', 'train.objective', 'train.seed'

    def counts(name: str) -> bool:
        return name in (*CONTENTS, *others) or (name.startswith('data.') and not is_free(name))

    return _differing(before, config, counts)


def load_tokenizers(workdir: pathlib.Path) -> Tokenizers:
    """Returns the tokenizers of a workdir.

    Raises:
      UserError: they are missing or damaged, or not those that the newest checkpoint was trained with.
    """
    made, newest = Tokenizers.load(workdir), checkpoint.newest_metadata(workdir)
    step, record = newest or (0, {})
    wanted = record.get('data', {}).get('tokenizers', made.fingerprint)
    if made.fingerprint != wanted:
        names = sorted(path.name for path in workdir.glob('tokenizer.*') if not digests.matches(workdir, path.name))
        what = f'{", ".join(names)}: these tokenizers are not those of checkpoint {step}'
        raise UserError(f'{workdir}: {what} ({wanted} there, {made.fingerprint} here); restore the files')
    return made


def as_trained(config: Config, record: Mapping[str, Any]) -> Config:
    """Returns `config` with the fields that may not differ as a checkpoint's metadata has them."""
    differing = config_lib.difference(config_lib.from_dict(record['config']), config)
    return config_lib.override(config, {name: old for name, (old, _) in differing.items() if not is_free(name)})


def changed_config(workdir: pathlib.Path, overrides: Mapping[str, str]) -> Config:
    """Returns the resolved config of a workdir, with other values in fields that may differ.

    Raises:
      UserError: another field is overridden, or one without effect, the directory is not a workdir, or its config.json
        cannot be read.
    """
    config = load_config(workdir)
    others = LANGUAGES if config.model.family == 'encoder_decoder' else ()
    for field in overrides:
        if field in config_lib.field_types() and not is_free(field) and field not in others:
            raise UserError(f'config.{field} is part of what was trained in {workdir} and cannot be changed')
    return checks.settle(config_lib.override(config, overrides), overrides)


def check_config(
    workdir: pathlib.Path, before: Config, config: Config, may_differ: Sequence[str] = (), hint: str = ''
) -> None:
    """Raises a `UserError` that names the fields which differ from a checkpoint's config, `before`, and must not.

    `may_differ` are dotted fields that may differ besides those that always may; the `hint` says which could be named.
    """
    fields = config_lib.field_types()
    for name in may_differ:
        choose(dict.fromkeys(fields), name, '--may_differ')
    if changed := _differing(before, config, lambda name: not is_free(name) and name not in may_differ):
        line = f'{workdir} was trained with another config: {changed}; use a fresh --workdir, or its values'
        raise UserError(f'{line}{hint}')
    made, wanted = max(checkpoint.steps(workdir), default=0), config.train.num_steps
    if wanted is not None and made > wanted:
        raise UserError(f'train.num_steps={wanted}: {workdir} has made {made} steps already; use a fresh --workdir')


@contextlib.contextmanager
def lock(workdir: pathlib.Path) -> Iterator[None]:
    """Makes a workdir where there is none, and keeps other processes out of it; the lock ends with the process.

    Raises:
      UserError: another process has the lock, or the directory cannot be made.
    """
    stores.require_local(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'--workdir={workdir}: {error.strerror}') from error
    with locks.alone(workdir / 'lock', f'--workdir={workdir}', LOCK_SECONDS):
        yield


def is_locked(workdir: pathlib.Path, patience: float = 0.0) -> bool:
    """Returns whether a process holds the lock of a workdir, for `patience` seconds or longer; nothing is written."""
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
        except OSError:  # there is no lock file, or the file system has no locks
            return False


def save_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes the resolved config, and the digests of it and the tokenizers."""
    names = [path.name for path in workdir.glob('tokenizer.*')]
    with locks.in_turn(workdir), digests.recording(workdir, 'config.json', *names, anew=True):
        atomic.write(workdir / 'config.json', json.dumps(config_lib.to_dict(config), indent=2) + '\n')


def make_tokenizers(workdir: pathlib.Path, config: Config, records: Concatenation) -> Tokenizers:
    """Returns the tokenizers of a new run, which are written to its workdir."""
    made = new_tokenizers(config, records, workdir)
    asked, found = config.data.tokenizer_vocab_size, made.target.vocab_size - config.data.sentinels
    trains = config.data.tokenizer == 'sentencepiece' and tokenizer_lender(config, workdir) is None
    if trains and found < asked:
        line = f'the training split has only {found:,} pieces for data.tokenizer_vocab_size={asked:,}'
        print(line, file=sys.stderr, flush=True)
    made.save(workdir)
    return made


def new_tokenizers(config: Config, records: Concatenation, workdir: pathlib.Path | None = None) -> Tokenizers:
    """Returns the tokenizers of a new run: another run's, the hub's, its own imported ones, or newly trained ones."""
    data = config.data
    if source := tokenizer_lender(config, workdir):
        made = train_tokenizers(config, records, lent_tokenizers(source))
    elif 'huggingface' in (data.tokenizer, data.source_tokenizer):  # read from a file, whose contents may change
        made = train_tokenizers(config, records)
    else:
        made = cached_tokenizers(config, records, [split.fingerprint for split in records.splits])
    return with_chat(config, _with_lent_classes(config, made, workdir))


def _with_lent_classes(config: Config, made: Tokenizers, workdir: pathlib.Path | None) -> Tokenizers:
    """Returns tokenizers whose classes have the order of the head that a new run starts from, if it does.

    Raises:
      UserError: the head has as many classes, and others, or data.labels has them in another order.
    """
    source, task = lender(config, workdir), TASKS[config.train.objective]
    if source is None or not task.classes_from_data:
        return made
    head = (*HEADS[task.head].per_row, *HEADS[task.head].per_token)[-1]
    rows = [(head, 'classes', 'kernel'), (head, 'classes', 'bias')]
    objective, theirs = _lent_classes(source)
    if theirs == made.labels or len(theirs) != len(made.labels) or TASKS[objective].head != task.head:
        return made
    if all(any(within(names, entry) for entry in config.train.init_except) for names in rows):
        return made
    if {*theirs} == {*made.labels} and (task.classes == 'tags' or not config.data.labels):
        return dataclasses.replace(made, labels=theirs)
    ours = ', '.join(made.labels)
    if all(re.fullmatch(r'LABEL_\d+', name) for name in theirs):
        if processes.first():
            print(f'{source}: its classes have no names, and are taken for {ours}', file=sys.stderr, flush=True)
        return made
    where = '' if config.train.init_from else f' in another workdir with train.init_from={source}'
    order = '; or state data.labels in that order' if {*theirs} == {*made.labels} else ''
    raise UserError(
        f'{source}: the classes of its head are {", ".join(theirs)}, and here they are {ours}: '
        f'train.init_except={head} begins the head anew{where}{order}'
    )


def _lent_classes(source: str) -> tuple[str, tuple[str, ...]]:
    """Returns the objective of a workdir or a hub directory, and the names of its classes."""
    path = pathlib.Path(source)
    if hub_directory.is_hub(path):
        hub = hub_directory.open_hub(source)
        return hub.objective, hub.labels
    return read_config(path).train.objective, load_tokenizers(path).labels


def lender(config: Config, workdir: pathlib.Path | None) -> str | None:
    """Returns the directory whose model a new run starts from: train.init_from, or its own if `tformer import` made it.

    An imported workdir has a checkpoint of step 0, which training never writes.
    """
    imported = workdir is not None and 0 in checkpoint.steps(workdir)
    return config.train.init_from or (str(workdir) if imported else None)


def tokenizer_lender(config: Config, workdir: pathlib.Path | None) -> str | None:
    """Returns the directory whose tokenizers a new run has: data.tokenizer_from, its `lender`, or its teacher."""
    return config.data.tokenizer_from or lender(config, workdir) or config.train.teacher


def lent_tokenizers(source: str) -> Tokenizers:
    """Returns the tokenizers of a workdir or a hub directory. Raises a `UserError` as `load_tokenizers`."""
    path = pathlib.Path(source)
    return hub_directory.open_hub(source).tokenizers if hub_directory.is_hub(path) else load_tokenizers(path)


def lent_config(source: str) -> Config:
    """Returns the config of a workdir, as `read_config`, or of the model of a hub directory."""
    path = pathlib.Path(source)
    return hub_directory.open_hub(source).run_config() if hub_directory.is_hub(path) else read_config(path)
