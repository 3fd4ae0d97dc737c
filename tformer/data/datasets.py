"""Records from TFDS sets that are prepared as ArrayRecord files: random access, without TensorFlow."""

from collections.abc import Sequence
from typing import Any, overload

from tformer.config.run import Data
from tformer.data.files import keys_of
from tformer.data.records import Record
from tformer.errors import UserError, nearest


def load(config: Data, objective: str, split: str) -> 'Records':
    """The records of `split`, converted as they are read.

    `config.columns` are the features of the objective's fields, a nested one with slashes, e.g.
    ('translation/en', 'translation/de'). Nothing is downloaded.

    Raises:
      UserError: the set is not prepared, not as array_record, or lacks the split or a feature.
    """
    if config.tfds_name is None:
        raise UserError("data.source='tfds' needs data.tfds_name, e.g. 'imdb_reviews'")
    builder = _prepared(config.tfds_name, config.tfds_dir)
    keys = keys_of(config, objective)
    features = {field: _feature(builder.info.features, key, config.tfds_name) for field, key in keys.items()}
    name = dict(zip(('train', 'valid', 'test'), config.tfds_splits, strict=True))[split]
    try:
        rows = builder.as_data_source(name)
    except ValueError as error:
        hint = nearest(name, builder.info.splits)
        raise UserError(f'{config.tfds_name} has no split {name!r} (data.tfds_splits){hint}') from error
    return Records(rows, keys, features)


def _prepared(name: str, directory: str | None) -> Any:
    import tensorflow_datasets as tfds  # here: it takes half a second, and most runs have no need of it

    try:  # the set as its files describe it: the code that made them may want TensorFlow
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=directory)
    except tfds.core.DatasetNotFoundError:
        place = directory or tfds.core.constants.DATA_DIR
        hint = 'prepare it with `tfds build --file_format=array_record`, or set data.tfds_dir'
        raise UserError(f'{name} is not prepared in {place}: {hint}') from None
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        found = builder.info.file_format.value
        raise UserError(
            f'{builder.data_path} is prepared as {found}, which has no random access without TensorFlow: '
            'prepare it with `tfds build --file_format=array_record`'
        )
    return builder


def _feature(features: Any, key: str, name: str) -> Any:
    for part in key.split('/'):
        if not hasattr(features, 'keys') or part not in features:
            hint = nearest(part, features) if hasattr(features, 'keys') else ''
            raise UserError(f'{name} has no feature {key!r} (data.columns){hint}')
        features = features[part]
    return features


class Records(Sequence[Record]):
    """A view of a data source: bytes become str, and class ids their names."""

    def __init__(self, rows: Sequence[Any], keys: dict[str, str], features: dict[str, Any]) -> None:
        self._rows, self._keys, self._features = rows, keys, features

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f'record {index} of {len(self)}')
        row = self._rows[index % len(self)]
        return {field: self._text(field, row) for field in self._keys}

    def _text(self, field: str, value: Any) -> str:
        for part in self._keys[field].split('/'):
            value = value[part]
        if hasattr(self._features[field], 'int2str'):
            return str(self._features[field].int2str(value))
        if isinstance(value, bytes):
            return value.decode()
        if field == 'label':
            return str(value)
        raise UserError(f'feature {self._keys[field]!r} (data.columns) is {type(value).__name__}, not text')
