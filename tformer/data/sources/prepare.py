"""Writes a source as a TFDS set of ArrayRecord files, which any number of hosts read at random without TensorFlow."""

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

_EVERY = 10  # seconds between lines of progress
_SPLITS = dict(zip(sources.SPLITS, Data().tfds_splits, strict=True))  # our name of a split: its name in the set
_NAME = re.compile(r'([a-z][a-z0-9_]*)(?:/([^\s:/]+))?(?::(\d+\.\d+\.\d+))?')  # set, configuration, version

Say = Callable[[str], None]
Rows = Iterator[tuple[int, Record]]


def write(config: Data, objective: str, say: Say = lambda line: None) -> str:
    """Writes the splits of `config.source` as the set `config.tfds_name` in `config.tfds_dir`, unless it exists.

    The set keeps the order of the records, the fields of `objective`, and the optional fields that all records have.
    With data.source='tfds', the named set's own code downloads and writes it. A set appears when it is complete. `say`
    takes lines of progress. Returns lines that say what was written, where, and how to train from it.

    Raises:
      UserError: there is no name, a split cannot be read, the name belongs to a set of other records, the directory
        cannot be written, or the set's code is unknown or needs TensorFlow.
    """
    name, example = config.tfds_name, 'e.g. my_set or my_set/de-en:1.0.0'
    if name is None:
        raise UserError(f'data.tfds_name is needed: the name of the set to write, {example}')
    if not _NAME.fullmatch(name):
        raise UserError(f'data.tfds_name={name!r} is not the name of a set, {example}')
    if config.source == 'tfds':
        return _summary(config, tfds_download.write(name, config.tfds_dir, say), {}, changed=())
    splits = _splits(config, objective, say)
    new = _write_records(config, objective, splits, say)
    skipped = {part: split.skipped for part, split in splits.items() if new and split.skipped}
    return _summary(config, new, skipped, changed=('tfds_splits', 'columns', 'source_template', 'target_template'))


def _summary(config: Data, new: bool, skipped: dict[str, int], changed: tuple[str, ...]) -> str:
    """Describes the set in its directory; to train from it, the fields `changed` go back to their defaults."""
    assert config.tfds_name is not None
    builder = tfds_lib.prepared(config.tfds_name, config.tfds_dir)
    lines = [f'{builder.info.full_name} is {"written" if new else "already written"}: {Path(builder.data_dir)}']
    for name, split in builder.info.splits.items():
        bad = f', {skipped[name]:,} bad lines skipped' if name in skipped else ''
        lines.append(f'  {name:<12} {split.num_examples:>12,} records {split.num_bytes:>16,} bytes{bad}')
    overrides = {'source': 'tfds', 'tfds_name': config.tfds_name}
    if config.tfds_dir is not None:
        overrides['tfds_dir'] = config.tfds_dir
    for field in changed:
        default = getattr(Data(), field)
        if getattr(config, field) != default:
            overrides[field] = 'None' if default is None else ','.join(default)
    flags = [f'--config.data.{field}={value}' for field, value in overrides.items()]
    return '\n'.join([*lines, f'train from it with {" ".join(flags)}'])


def _splits(config: Data, objective: str, say: Say) -> dict[str, Split]:
    """Returns the splits that exist, by their names in the set; the training split must exist."""
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
    """Returns whether the set was written: False if a set of the same records exists."""
    import tensorflow_datasets as tfds

    parts = _NAME.fullmatch(config.tfds_name or '')
    assert parts is not None
    base, configuration, version = parts[1], parts[2], parts[3] or '1.0.0'
    fingerprints = {name: split.fingerprint for name, split in splits.items()}
    records_fingerprint = fingerprint(sorted(TASKS[objective].fields), fingerprints)
    place = Path(config.tfds_dir or tfds.core.constants.DATA_DIR).expanduser() / base / (configuration or '') / version
    if place.exists():
        unversioned = parts[0].partition(':')[0]
        existing = tfds_lib.prepared(f'{unversioned}:{version}', config.tfds_dir).info
        if records_fingerprint not in existing.description:
            major, minor, patch = version.split('.')
            other = f'{unversioned}:{major}.{minor}.{int(patch) + 1}'
            raise UserError(f'{existing.full_name} exists and holds other records: delete {place} or write {other}')
        return False
    for left in sorted(place.parent.glob(f'incomplete.*_{place.name}')):
        say(f'{left} belongs to a prepare that is running or was killed; in the latter case delete it')
    first = splits[_SPLITS['train']][0]
    variants = [tfds.core.BuilderConfig(name=configuration, version=version)] if configuration else []

    class Builder(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        name = base
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = variants

        def _info(self) -> Any:
            description = f'Written by tformer prepare from data.source={config.source}: {records_fingerprint}'
            features = tfds.features.FeaturesDict(_features(objective, first))
            kept = {'description': description, 'features': features, 'disable_shuffling': True}
            return tfds.core.DatasetInfo(builder=self, **kept)

        def _shard_iterators_per_split(self, _: Any) -> dict[str, list[Callable[[], Rows]]]:
            return {name: _shards(name, split, tuple(self.info.features), say) for name, split in splits.items()}

    for name, split in splits.items():
        _check_alike(name, split, first)  # reads the split before TFDS does: its errors are clear
    with tfds_download.quiet(), tempfile.TemporaryDirectory() as nothing:
        try:
            builder = Builder(data_dir=config.tfds_dir, config=configuration)
            builder.download_and_prepare(file_format='array_record', download_dir=nothing)
        except OSError as error:
            raise UserError(f'{place} cannot be written: {error.strerror or error}') from error
    return True


def _check_alike(name: str, records: Sequence[Record], first: Record) -> None:
    """Raises a `UserError` if records differ in their optional fields: a field of a set belongs to all its records."""
    wanted = first.keys() - _NOT_STORED
    for count, record in enumerate(records, start=1):
        for field in wanted ^ (record.keys() - _NOT_STORED):
            where = record.get('where', f'record {count} of {name}')
            problem = f'{"has" if field in record else "has no"} {field!r}, unlike the first training record'
            raise UserError(f'{where} {problem}; all records of a set must have the same fields')


def _features(objective: str, record: Record) -> dict[str, Any]:
    """The TFDS feature of each field that `record` has."""
    import tensorflow_datasets as tfds

    text, task = tfds.features.Text(), TASKS[objective]
    others = {
        'answers': tfds.features.Sequence({'text': text, 'answer_start': tfds.features.Scalar(np.int64)}),
        **dict.fromkeys(('tokens', 'tags', 'references', 'negative', 'choices'), tfds.features.Sequence(text)),
    }
    numbers = {'number': np.float64, 'similarity': np.float64, 'choices': np.int64}
    if task.records in numbers:
        others['label'] = tfds.features.Scalar(numbers[task.records])
    return {field: others.get(field, text) for field in task.fields + task.optional if field in record}


def _stored(value: Any) -> Any:
    """Returns a field's value in the form that its feature stores."""
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):  # answers
        return [{'text': text, 'answer_start': start} for start, text in value]
    return value


def _shards(name: str, records: Sequence[Record], fields: tuple[str, ...], say: Say) -> list[Callable[[], Rows]]:
    """Returns a function for each shard that yields its keys and records; TFDS decides the number of shards by size."""
    from tensorflow_datasets.core.utils import shard_utils

    def rows(start: int, stop: int) -> Rows:
        last_line = time.monotonic()
        for index in range(start, stop):
            if time.monotonic() - last_line > _EVERY:
                last_line = time.monotonic()
                say(f'{name}: {index:,} of {len(records):,} records')
            record = records[index]
            yield index, {field: _stored(record[field]) for field in fields}

    size = sum(len(str(record[field])) for record in records for field in fields)
    count = shard_utils.ShardConfig.calculate_number_shards(size, len(records))
    stops = [0, *shard_utils.get_shard_boundaries(len(records), count)]
    return [functools.partial(rows, start, stop) for start, stop in itertools.pairwise(stops)]


_NOT_STORED = {'where', 'name', 'texts'}  # fields that say where a record comes from, or are made of others
