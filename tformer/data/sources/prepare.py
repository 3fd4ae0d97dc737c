"""Writes a source as a TFDS set of ArrayRecord files: random access from any number of hosts, without TensorFlow."""

import dataclasses
import functools
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tformer.config.run import Data
from tformer.config.tasks import TASKS
from tformer.data.sources import sources, tfds_download
from tformer.data.sources import tfds as tfds_lib
from tformer.data.sources.records import Record, Split, fingerprint
from tformer.errors import NoSplitError, UserError

_EVERY = 10  # seconds between lines about the progress
_SPLITS = dict(zip(sources.SPLITS, Data().tfds_splits, strict=True))  # ours: the name that it is written under
_NAME = re.compile(r'([a-z][a-z0-9_]*)(?:/([^\s:/]+))?(?::(\d+\.\d+\.\d+))?')  # set, configuration, version

Say = Callable[[str], None]
Rows = Iterator[tuple[int, Record]]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A set that can be read.

    Attributes:
      name: with its configuration and version.
      place: its directory.
      splits: the name of each, its records and bytes.
      skipped: bad lines that were left out of a split, by its name.
      new: False where it was there before.
      overrides: of the configuration, with which to train from it.
    """

    name: str
    place: Path
    splits: dict[str, tuple[int, int]]
    skipped: dict[str, int]
    new: bool
    overrides: tuple[str, ...]


def write(config: Data, objective: str, say: Say = lambda line: None) -> Prepared:
    """Writes the splits of `config.source` as the set `config.tfds_name` in `config.tfds_dir`, unless it is there.

    Records keep their order and come back as they are: the fields of `objective`, and those optional ones
    that all of them have.
    With source='tfds' it is the named set's own code that downloads and writes. A set appears when it is complete.

    Args:
      say: is given a line about the progress now and then; standard output is closed to it.

    Raises:
      UserError: no name, a split that cannot be read, other records under this name, a directory that cannot be
        written, or a set whose code is unknown or needs TensorFlow.
    """
    if config.tfds_name is None:
        raise UserError('data.tfds_name is needed: the name of the set to write, e.g. my_set or my_set/de-en:1.0.0')
    if not _NAME.fullmatch(config.tfds_name):
        raise UserError(f'data.tfds_name={config.tfds_name!r} is no name of a set, e.g. my_set or my_set/de-en:1.0.0')
    if config.source == 'tfds':
        return _prepared(config, tfds_download.write(config.tfds_name, config.tfds_dir, say), {}, changed=())
    splits = _splits(config, objective, say)
    new = _write_records(config, objective, splits, say)
    skipped = {name: split.skipped for name, split in splits.items() if new and split.skipped}
    return _prepared(config, new, skipped, changed=('tfds_splits', 'columns', 'source_template', 'target_template'))


def summary(prepared: Prepared) -> str:
    """What was written, how much of it, where, and how to train from it."""
    lines = [f'{prepared.name} is {"written" if prepared.new else "there already"}: {prepared.place}']
    for name, (records, size) in prepared.splits.items():
        skipped = f', {prepared.skipped[name]:,} bad lines skipped' if name in prepared.skipped else ''
        lines.append(f'  {name:<12} {records:>12,} records {size:>16,} bytes{skipped}')
    return '\n'.join([*lines, f'train from it with {" ".join(prepared.overrides)}'])


def _prepared(config: Data, new: bool, skipped: dict[str, int], changed: tuple[str, ...]) -> Prepared:
    """The set as it stands in its directory; the fields `changed` have their defaults there."""
    assert config.tfds_name is not None
    builder = tfds_lib.prepared(config.tfds_name, config.tfds_dir)
    splits = {name: (split.num_examples, split.num_bytes) for name, split in builder.info.splits.items()}
    overrides = {'source': 'tfds', 'tfds_name': config.tfds_name}
    if config.tfds_dir is not None:
        overrides['tfds_dir'] = config.tfds_dir
    for field in changed:
        if getattr(config, field) != getattr(Data(), field):
            default = getattr(Data(), field)
            overrides[field] = str(default) if default is None else ','.join(default)
    flags = tuple(f'--config.data.{field}={value}' for field, value in overrides.items())
    return Prepared(builder.info.full_name, Path(builder.data_dir), splits, skipped, new, flags)


def _splits(config: Data, objective: str, say: Say) -> dict[str, Split]:
    """The splits that there are, by the names that they are written under; there is always a training split."""
    splits = {}
    for ours, theirs in _SPLITS.items():
        try:
            splits[theirs] = sources.load(config, objective, ours)
        except NoSplitError as error:
            if ours == 'train':
                raise
            say(f'no {ours} split: {error}')
    return splits


def _write_records(config: Data, objective: str, splits: dict[str, Split], say: Say) -> bool:
    """Whether it was written: False where a set of the same records is there."""
    import tensorflow_datasets as tfds

    assert config.tfds_name is not None
    mark = fingerprint(sorted(TASKS[objective].fields), {name: split.fingerprint for name, split in splits.items()})
    base, configuration, version = _parts(config.tfds_name)
    variants = [tfds.core.BuilderConfig(name=configuration, version=version)] if configuration else []

    class Builder(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        name = base
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = variants

        def _info(self) -> Any:
            description = f'Written by tformer prepare from data.source={config.source}: {mark}'
            features = tfds.features.FeaturesDict(_features(objective, splits[_SPLITS['train']][0]))
            return tfds.core.DatasetInfo(
                builder=self, description=description, features=features, disable_shuffling=True
            )

        def _shard_iterators_per_split(self, _: Any) -> dict[str, list[Callable[[], Rows]]]:
            return {name: _shards(name, split, tuple(self.info.features), say) for name, split in splits.items()}

    place = Path(config.tfds_dir or tfds.core.constants.DATA_DIR).expanduser() / base / (configuration or '') / version
    if place.exists():
        there = tfds_lib.prepared(f'{config.tfds_name.partition(":")[0]}:{version}', config.tfds_dir)
        if mark not in there.info.description:
            other = f'{config.tfds_name.partition(":")[0]}:{_next(version)}'
            raise UserError(
                f'{there.info.full_name} is there already, of other records: delete {place} or write {other}'
            )
        return False
    for left in sorted(place.parent.glob(f'incomplete.*_{place.name}')):
        say(f'{left} is of a prepare that runs, or was killed: then delete it')
    for name, split in splits.items():
        _check_alike(name, split, splits[_SPLITS['train']][0])  # is read here: its errors are ours
    with tfds_download.quiet(), tempfile.TemporaryDirectory() as nothing:
        try:
            builder = Builder(data_dir=config.tfds_dir, config=configuration)
            builder.download_and_prepare(file_format='array_record', download_dir=nothing)
        except OSError as error:
            raise UserError(f'{place} cannot be written: {error.strerror or error}') from error
    return True


def _check_alike(name: str, records: Sequence[Record], first: Record) -> None:
    """Raises a `UserError` where a record lacks an optional field that others have, for a set has it or has it not."""
    wanted = first.keys() - _NOT_STORED
    for number, record in enumerate(records, start=1):
        for field in wanted ^ (record.keys() - _NOT_STORED):
            where = record.get('where', f'record {number} of {name}')
            has = 'has' if field in record else 'has no'
            raise UserError(f'{where} {has} {field!r}, unlike the first training record: a set has it or has it not')


def _features(objective: str, record: Record) -> dict[str, Any]:
    """The TFDS feature of each field that `record` has."""
    import tensorflow_datasets as tfds

    text = tfds.features.Text()
    others = {
        'answers': tfds.features.Sequence({'text': text, 'answer_start': tfds.features.Scalar(np.int64)}),
        **dict.fromkeys(('tokens', 'tags', 'references'), tfds.features.Sequence(text)),
    }
    if TASKS[objective].records == 'number':
        others['label'] = tfds.features.Scalar(np.float64)
    fields = [field for field in (*TASKS[objective].fields, *TASKS[objective].optional) if field in record]
    return {field: others.get(field, text) for field in fields}


def _stored(value: Any) -> Any:
    """A field's value as its feature takes it."""
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):  # answers
        return [{'text': text, 'answer_start': start} for start, text in value]
    return value


def _next(version: str) -> str:
    major, minor, patch = version.split('.')
    return f'{major}.{minor}.{int(patch) + 1}'


def _parts(name: str) -> tuple[str, str | None, str]:
    """The set, configuration and version of its name."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return match[1], match[2], match[3] or '1.0.0'


def _shards(name: str, records: Sequence[Record], fields: tuple[str, ...], say: Say) -> list[Callable[[], Rows]]:
    """What gives the records of each shard, with keys: as many shards as TFDS would make of so much text."""
    from tensorflow_datasets.core.utils import shard_utils

    def rows(start: int, stop: int) -> Rows:
        told = time.monotonic()
        for index in range(start, stop):
            if time.monotonic() - told > _EVERY:
                told = time.monotonic()
                say(f'{name}: {index:,} of {len(records):,} records')
            record = records[index]
            yield index, {field: _stored(record[field]) for field in fields}

    size = sum(len(str(record[field])) for record in records for field in fields)
    count = shard_utils.ShardConfig.calculate_number_shards(size, len(records))
    stops = [0, *shard_utils.get_shard_boundaries(len(records), count)]
    return [functools.partial(rows, start, stop) for start, stop in itertools.pairwise(stops)]


_NOT_STORED = {'where', 'name'}  # which only say where a record comes from
