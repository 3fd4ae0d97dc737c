"""Records from TFDS sets that are prepared as ArrayRecord files: random access, without TensorFlow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tformer.config.run import Data
from tformer.data.formats import keys_of
from tformer.data.records import SPLITS, Read, Record, View, fingerprint
from tformer.errors import NoSplitError, UserError, nearest

_AHEAD = 1024  # records read together: ten times as fast as one by one
_PREPARE = 'prepare it with `tformer prepare`'


def load(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """The fingerprint and the records of `split`, which are converted one by one, whenever they are asked for.

    `config.columns` are the features of the objective's fields, a nested one with slashes, e.g.
    ('translation/en', 'translation/de'). A feature `references` goes with seq2seq. Nothing is downloaded.

    Raises:
      UserError: the set is not prepared, not as array_record, or lacks the split, a file of it or a feature.
    """
    if config.tfds_name is None:
        raise UserError("data.source='tfds' needs data.tfds_name, e.g. 'imdb_reviews'")
    builder = prepared(config.tfds_name, config.tfds_dir)
    info, keys = builder.info, keys_of(config, objective)
    if objective == 'seq2seq' and 'references' in info.features:
        keys['references'] = 'references'
    features = {field: _feature(info.features, key, config.tfds_name) for field, key in keys.items()}
    name = dict(zip(SPLITS, config.tfds_splits, strict=True))[split]
    try:
        files = info.splits[name].file_instructions
    except (KeyError, ValueError):
        hint = nearest(name, info.splits)
        raise NoSplitError(f'{config.tfds_name} has no split {name!r} (data.tfds_splits){hint}') from None
    for file in files:
        if not Path(file.filename).is_file():
            raise UserError(f'{file.filename} does not exist, a part of {config.tfds_name}')
    sizes = {part: [found.num_bytes, found.shard_lengths] for part, found in info.splits.items()}
    slices = [[file.basename(), file.skip, file.take] for file in files]
    meaning = [keys, [getattr(feature, 'names', None) for feature in features.values()]]

    def read() -> tuple[Records, int]:
        return Records(builder.as_data_source(name), keys, features), 0

    return fingerprint(info.full_name, info.description, sizes, slices, meaning), read


def prepared(name: str, directory: str | None) -> Any:
    """The TFDS builder of a set as its files describe it: the code that made them may want TensorFlow.

    Raises:
      UserError: it is not prepared in `directory`, or not as array_record.
    """
    import tensorflow_datasets as tfds  # here: it takes half a second, and most runs have no need of it

    place = directory or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=directory)
    except tfds.core.DatasetNotFoundError:
        raise UserError(f'{name} is not prepared in {place}: {_PREPARE}, or set data.tfds_dir') from None
    except ValueError as error:
        raise UserError(f'{name} cannot be read in {place}: {str(error).splitlines()[0]}') from None
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        found = builder.info.file_format.value
        raise UserError(f'{builder.data_path} is prepared as {found}, which has no random access without TensorFlow: '
                        f'move it away and {_PREPARE}')  # fmt: skip
    return builder


def _feature(features: Any, key: str, name: str) -> Any:
    for part in key.split('/'):
        if not hasattr(features, 'keys') or part not in features:
            hint = nearest(part, features) if hasattr(features, 'keys') else ''
            raise UserError(f'{name} has no feature {key!r} (data.columns){hint}')
        features = features[part]
    return features


class Records(View):
    """A view of a data source: bytes become str, and class ids their names."""

    def __init__(self, rows: Any, keys: dict[str, str], features: dict[str, Any]) -> None:
        self._rows, self._keys, self._features = rows, keys, features

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), _AHEAD):
            yield from self._records(range(start, min(start + _AHEAD, len(self))))

    def _records(self, indices: range) -> list[Record]:
        try:
            rows = self._rows.__getitems__(indices)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f'{self._rows} does not read: {str(error).splitlines()[0]}') from error
        return list(map(self._record, rows))

    def _record(self, row: Any) -> Record:
        try:
            return {field: self._value(field, row) for field in self._keys}
        except UnicodeDecodeError as error:
            raise UserError(f'{self._rows}: a record is not UTF-8: {bytes(error.object[:40])!r}') from error

    def _value(self, field: str, value: Any) -> str | list[str]:
        for part in self._keys[field].split('/'):
            value = value[part]
        if hasattr(self._features[field], 'int2str'):
            return str(self._features[field].int2str(value))
        if field == 'references':
            return [reference.decode() for reference in value]
        if isinstance(value, bytes):
            return value.decode()
        if field == 'label':
            return str(value)
        raise UserError(f'feature {self._keys[field]!r} (data.columns) is {type(value).__name__}, not text')
