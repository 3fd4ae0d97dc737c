"""Records from TFDS sets that are prepared as ArrayRecord files, read at random and without TensorFlow."""

import functools
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tformer.config.run import Data
from tformer.config.tasks import TASKS
from tformer.data.sources import fields, templates
from tformer.data.sources.records import SPLITS, Bad, BadRecord, Read, Record, Subset, View, fingerprint
from tformer.errors import NoSplitError, UserError, nearest

_PREPARE = 'prepare it with `tformer prepare`'


def load(config: Data, objective: str, split: str) -> tuple[str, Read]:
    """Returns the fingerprint of `split` and a function that gives its records, which are converted on access.

    `config.columns` are the features of the objective's fields; a nested feature is written with slashes, e.g.
    ('translation/en', 'translation/de'). Optional fields are the features `references` of pairs, and `pair` of labelled
    texts. With data.bad_lines=skip, all records are read once to find the bad ones. Nothing is downloaded.

    Raises:
      UserError: no set is named, it is not prepared as array_record, or it lacks the split, a file of it or a feature.
    """
    if config.tfds_name is None:
        raise UserError("data.source='tfds' needs data.tfds_name, e.g. 'imdb_reviews'")
    builder = prepared(config.tfds_name, config.tfds_dir)
    info, keys, features = builder.info, *_wanted(builder.info.features, config, objective)
    name = config.tfds_splits[SPLITS.index(split)]
    try:
        files = info.splits[name].file_instructions
    except (KeyError, ValueError):
        hint = nearest(name, info.splits)
        raise NoSplitError(f'{config.tfds_name} has no split {name!r} (data.tfds_splits){hint}') from None
    if info.splits[name].num_examples < 1 or _is_reversed(name, info.splits):
        raise NoSplitError(f'the split {name!r} of {config.tfds_name} (data.tfds_splits) is empty')
    for file in files:
        if not Path(file.filename).is_file():
            raise UserError(f'{file.filename}, a part of {config.tfds_name}, does not exist')
    sizes = {part: [own.num_bytes, own.shard_lengths] for part, own in info.splits.items()}
    slices = [[file.basename(), file.skip, file.take] for file in files]
    meaning: list[Any] = [keys, [getattr(feature, 'names', None) for feature in features.values()]]
    meaning += [objective, config.labels, config.label_range] if TASKS[objective].labelled else []
    meaning += [config.source_template, config.target_template] if config.source_template is not None else []
    meaning += [config.bad_lines] if config.bad_lines != 'stop' else []

    def read() -> tuple[View, int]:
        source = f'{config.tfds_name} {name}'
        make = fields.maker(config, objective, keys)
        records = Records(builder.as_data_source(name), features, make, source, named=TASKS[objective].labelled)
        if config.bad_lines == 'stop':
            return records, 0
        bad = Bad(config.bad_lines)
        return Subset(records, records.good(bad)), bad.skipped

    return fingerprint(info.full_name, info.description, sizes, slices, meaning), read


def prepared(name: str, directory: str | None) -> Any:
    """Returns the TFDS builder of a set in array_record files, made from these: the set's code may need TensorFlow."""
    import tensorflow_datasets as tfds  # imported here: it takes half a second, and most runs do not need it

    place = directory or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=directory)
    except tfds.core.DatasetNotFoundError:
        raise UserError(f'{name} is not prepared in {place}: {_PREPARE}, or set data.tfds_dir') from None
    except Exception as error:  # what TFDS raises of damaged files is of no common kind
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f'{name} cannot be read in {place}: {why}') from None
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        problem = f'prepared as {builder.info.file_format.value}, which has no random access without TensorFlow'
        raise UserError(f'{builder.data_path} is {problem}: move it away and {_PREPARE}')
    return builder


def _is_reversed(name: str, splits: Any) -> bool:
    """Returns whether a slice ends before it begins, of which TFDS may give the records up to the end of a file."""
    import tensorflow_datasets as tfds

    parts = tfds.core.ReadInstruction.from_spec(name).to_absolute(splits)
    return any(part.to is not None and part.to < (part.from_ or 0) for part in parts)


def _wanted(features: Any, config: Data, objective: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the name in the set of each field, and the feature of each name, for the objective or the templates."""
    assert config.tfds_name is not None
    if config.source_template is not None:
        return {}, {name: _feature(features, name, config.tfds_name) for name in templates.names(config)}
    keys = fields.keys_of(config, objective)
    for field in TASKS[objective].optional:
        if keys[field] == field and (field not in features or hasattr(features[field], 'keys')):
            del keys[field]  # the set has no such feature, or one that is not text
    by_key = {key: _feature(features, key, config.tfds_name) for key in keys.values()}
    for field, key in keys.items():
        if field not in fields.READERS and hasattr(by_key[key], 'keys'):
            names = getattr(by_key[key], 'feature', by_key[key])  # of a sequence
            inside = ', '.join(f'{key}/{name}' for name in sorted(names))
            raise UserError(f'feature {key!r} of {config.tfds_name} (data.columns) is not text; it holds {inside}')
    return keys, by_key


def _feature(features: Any, key: str, name: str) -> Any:
    for part in key.split('/'):
        inside = features if hasattr(features, 'keys') else {}
        if part not in inside:
            raise UserError(f'{name} has no feature {key!r} (data.columns){nearest(part, inside)}')
        features = features[part]
    return features


class Records(View):
    """The records of a TFDS data source. Bytes become str, class ids become names, and arrays become lists."""

    def __init__(self, rows: Any, features: dict[str, Any], make: fields.Make, name: str, named: bool) -> None:
        """Takes a TFDS data source, the features to read, the function that makes a record of their plain values, the
        name of the set and split, and whether records get a `where`."""
        self._rows, self._features, self._make, self._name, self._named = rows, features, make, name, named

    def __len__(self) -> int:
        return len(self._rows)

    def good(self, bad: Bad) -> list[int]:
        """Returns the indices of the valid records; reads all records and counts the others in `bad`."""
        return [index for some in self.chunks() for index, _ in self._read(some, bad)]

    def _records(self, indices: Sequence[int]) -> list[Record]:
        return [record for _, record in self._read(indices, Bad('stop'))]

    def _read(self, indices: Sequence[int], bad: Bad) -> Iterator[tuple[int, Record]]:
        try:
            rows = self._rows.__getitems__(indices)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f'{self._rows} cannot be read: {str(error).splitlines()[0]}') from error
        for index, row in zip(indices, rows, strict=True):
            where = f'{self._name} record {index + 1}'
            values = {key: functools.reduce(operator.getitem, key.split('/'), row) for key in self._features}
            try:
                record = self._make({key: _plain(feature, values[key]) for key, feature in self._features.items()})
            except BadRecord as error:
                bad.found(where, error)
            else:
                yield index, {**record, 'where': where} if self._named else record


def _plain(feature: Any, value: Any) -> Any:
    """Returns a value as JSON has it."""
    inner = getattr(feature, 'feature', feature)  # of a sequence
    if isinstance(value, list) or getattr(value, 'ndim', False):
        return [_plain(inner, item) for item in value]
    if hasattr(inner, 'keys'):
        return {key: _plain(inner[key], value[key]) for key in inner}
    if hasattr(inner, 'int2str'):
        if not 0 <= value < inner.num_classes:  # often -1
            known = f'the {inner.num_classes} classes of the set'
            raise BadRecord(f'class {value} is not among {known}: is it a split without labels?')
        return str(inner.int2str(int(value)))
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise BadRecord(f'not UTF-8: {value[:40]!r}') from None
    return value.tolist() if hasattr(value, 'tolist') else value
