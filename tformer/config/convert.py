"""Config <-> ConfigDict <-> command line. Values are read by the dataclass annotation of their field."""

import ast
import dataclasses
import functools
import operator
import pathlib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict, FieldReference

from tformer import errors
from tformer.config import extensions, hashing, json_files, python_files, renamed
from tformer.config.python_files import execute
from tformer.config.run import Config

TRUE, FALSE = ('true', '1', 'yes'), ('false', '0', 'no')
UNIONS = types.UnionType, typing.Union


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the tree as nested dicts; tuples stay tuples."""
    return dataclasses.asdict(config)


def config_dict(config: Config) -> ConfigDict:
    """Returns the locked ConfigDict of `config`."""
    tree = to_dict(config)
    for name, annotation in field_types().items():
        if any(typing.get_origin(option) is typing.Literal for option in _options(annotation)):
            section, field = name.split('.')
            tree[section][field] = FieldReference(tree[section][field], field_type=object)  # a number or a word
    return ConfigDict(tree).lock()


def from_dict(tree: Mapping[str, Any] | ConfigDict) -> Config:
    """Returns the `Config` of nested dicts (a ConfigDict, or JSON's). Fields that are absent take their default.

    Fields may have the names that they had in earlier versions (`renamed.RENAMED`).

    Raises:
      UserError: an unknown field or a value of the wrong type.
    """
    tree = tree.to_dict() if isinstance(tree, ConfigDict) else tree
    return _from_dict(Config, tree, '')


def _from_dict(cls: type, tree: Mapping[str, Any], prefix: str) -> Any:
    hints, sections = _hints(cls), _sections(cls)
    values = {}
    if not isinstance(tree, Mapping):
        raise errors.UserError(f'config.{prefix[:-1]}={tree!r} is not a section of fields')
    for given, value in tree.items():
        name = renamed.current(f'{prefix}{given}').removeprefix(prefix)
        if name not in hints:
            raise errors.UserError(f'config.{prefix}{name} is not a field{errors.nearest(name, hints)}')
        if name in sections:
            values[name] = _from_dict(typing.cast(type, hints[name]), value, f'{prefix}{name}.')
        else:
            values[name] = coerce(hints[name], value, f'{prefix}{name}')
    return cls(**values)


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(cls))


@functools.cache
def _sections(cls: type) -> frozenset[str]:
    return frozenset(name for name, hint in _hints(cls).items() if dataclasses.is_dataclass(hint))


def coerce(annotation: Any, value: Any, field: str) -> Any:
    """Returns `value` as its field's type: lists become tuples, whole numbers floats, and numpy's scalars Python's.

    Raises:
      UserError: it is not of that type.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) is int and abs(value) >= 2**63:
        raise errors.UserError(f'config.{field} is a number of more than 64 bits')
    if isinstance(value, str) and '\0' in value:
        raise errors.UserError(f'config.{field}={value!r} has a NUL character')
    if type(value) is annotation:  # most are, and a report reads hundreds of thousands
        return value
    for option in _options(annotation):
        origin = _origin(option)
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(coerce(typing.get_args(option)[0], item, field) for item in value)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if option is type(None) and value is None:
            return None
        if origin is typing.Literal and value in typing.get_args(option):
            return value
        if isinstance(option, type) and isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return value
    raise errors.UserError(f'config.{field}={value!r} is not {_name(annotation)}')


def parse(annotation: Any, text: str, field: str) -> Any:
    """Returns the value of a text of the command line for a field. Raises a `UserError` if it is of another type."""
    options = _options(annotation)
    if text == 'None' and type(None) in options:
        return None
    for option in options:
        try:
            value = _parse(option, text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, OverflowError):
            continue
        return coerce(option, value, field)
    raise errors.UserError(f'config.{field}={text!r} is not {_name(annotation)}')


@functools.cache
def _options(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) in UNIONS else (annotation,)


_origin = functools.cache(typing.get_origin)


def _parse(option: Any, text: str) -> Any:
    if typing.get_origin(option) is tuple:
        (item, *_) = typing.get_args(option)
        if text[:1] in ('(', '['):
            values = ast.literal_eval(text)
            return coerce(option, values if isinstance(values, list | tuple) else (values,), '')
        first, *others = text.split(',')
        parts = [first, *map(str.lstrip, others)]  # spaces belong to a text, but for those behind a comma
        return tuple(_parse(item, part) for part in (parts if item is str else map(str.strip, parts)) if part)
    if typing.get_origin(option) is typing.Literal and text in typing.get_args(option):
        return text
    if option is bool:
        if text.lower() not in TRUE + FALSE:
            raise ValueError(text)
        return text.lower() in TRUE
    if option is int and ('e' in text.lower() or '.' in text) and float(text).is_integer():
        return int(float(text))
    if option is type(None) or typing.get_origin(option) is typing.Literal or (option is str and text == 'None'):
        raise ValueError(text)
    return option(text)


def _name(annotation: Any) -> str:
    def one(option: Any) -> str:
        if typing.get_origin(option) is typing.Literal:
            return ' | '.join(map(repr, typing.get_args(option)))
        plain = isinstance(option, type) and not typing.get_args(option)
        return option.__name__.replace('NoneType', 'None') if plain else str(option)

    return ' | '.join(map(one, _options(annotation)))


@functools.cache
def field_types(cls: type = Config, prefix: str = '') -> Mapping[str, Any]:
    """Returns the annotation of every field by its dotted name, e.g. 'model.norm'."""
    fields: dict[str, Any] = {}
    for name, annotation in _hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            fields |= field_types(typing.cast(type, annotation), f'{prefix}{name}.')
        else:
            fields[f'{prefix}{name}'] = annotation
    return types.MappingProxyType(fields)


def override(config: Config, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Config:
    """Returns `config` with dotted fields replaced; text is parsed by the field's annotation.

    Raises:
      UserError: an unknown field, naming the nearest, or a wrong type.
    """
    fields = field_types()
    for name, value in dict(values).items():
        if name in renamed.RENAMED:
            raise errors.UserError(f'config.{name} is now config.{renamed.RENAMED[name]}')
        if name not in fields:
            raise errors.UserError(f'config.{name} is not a field{errors.nearest(name, fields)}')
        read = parse if isinstance(value, str) else coerce
        section, _, field = name.rpartition('.')
        changed: Any = {field: read(fields[name], value, name)}
        if section:
            changed = {section: dataclasses.replace(getattr(config, section), **changed)}
        config = dataclasses.replace(config, **changed)
    return config


def recipe(base: Config, arguments: str | None, **differences: Mapping[str, Any] | str) -> ConfigDict:
    """Returns the locked ConfigDict of `base` with named differences applied in order, e.g. 'pretrain,small'.

    `base` is the recipe without an argument, and `arguments` are names, separated by commas. Each difference is dotted
    fields and their values, or FILE:argument of another recipe, for the fields that its argument changes.

    Raises:
      UserError: a name that the recipe does not have.
    """
    for name in filter(None, (arguments or '').split(',')):
        chosen = errors.choose(differences, name, 'the config argument')
        base = override(base, changes(chosen) if isinstance(chosen, str) else chosen)
    return config_dict(base)


def split(spec: str) -> tuple[str, str]:
    """Returns (FILE, argument) of `FILE[:argument]`; colons before the file's ending are its own."""
    ends = [spec.find(f'{ending}:') + len(ending) for ending in ('.py', '.json') if f'{ending}:' in spec]
    if not ends and not spec.endswith(('.py', '.json')):
        ends = [spec.find(':')] if ':' in spec else []
    return (spec[: min(ends)], spec[min(ends) + 1 :]) if ends else (spec, '')


def load(spec: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Returns the config of `FILE[:argument]`, with overrides applied.

    The file is Python, with `get_config(argument)`, or JSON: the config.json of a workdir.

    Raises:
      UserError: a missing file, one without `get_config`, a bad override, or an extension that may not be run.
    """
    path, argument = split(spec)
    trusted = not path.endswith('.json') or 'extensions' in (overrides or {})
    if path.endswith('.json'):
        config = from_json(pathlib.Path(path))
    else:
        made = execute(path, 'get_config', argument)
        if not isinstance(made, ConfigDict | Mapping):
            raise errors.UserError(f'{path}: get_config returns {type(made).__name__}, not a ConfigDict')
        with python_files.one_line(path):
            config = from_dict(made)
    config = override(config, overrides or {})
    return extensions.load(config, trusted=trusted, place=path, beside=pathlib.Path(path).parent)


def from_json(file: pathlib.Path) -> Config:
    """Returns the config in a JSON file. Raises a `UserError` that names the file if there is none in it."""
    tree = json_files.read(file)
    try:
        return from_dict(tree)
    except errors.UserError as error:
        raise errors.UserError(f'{file}: {error}') from error


def changes(spec: str) -> dict[str, Any]:
    """Returns what the argument of `FILE:argument` changes: dotted fields and their values."""
    file, _ = split(spec)
    return {name: value for name, (_, value) in difference(load(file), load(spec)).items()}


def digest(config: Config) -> str:
    """Returns a digest of all fields, in hexadecimal digits; without extensions it is that of the sections alone."""
    return digest_tree(to_dict(config))


def digest_tree(tree: Mapping[str, Any]) -> str:
    """Returns the `digest` of the config that is kept as a tree of JSON."""
    return hashing.digest_json({name: value for name, value in tree.items() if name != 'extensions' or value})


def difference(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the fields that differ: dotted name -> (value in a, value in b)."""
    there = values(b)
    return {name: (value, there[name]) for name, value in values(a).items() if value != there[name]}


def values(config: Config) -> dict[str, Any]:
    """Returns every field by its dotted name."""
    return {name: operator.attrgetter(name)(config) for name in field_types()}
