"""Tensors of hub checkpoints to our parameters and back, by the tables of the families. Pure numpy."""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tformer.config import Model
from tformer.errors import UserError, choose, nearest
from tformer.hf import heads
from tformer.hf.models import FAMILIES, config_of, model_of
from tformer.hf.rules import Family, Rule, axis_sizes, rearrange, reverse, shape
from tformer.layers.resolved import resolve_model

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A parameter of ours that stacks tensors of the hub along its leading axes; nothing is read until it is asked for.

    Attributes:
      family: a hub's model_type.
      rule: the correspondence.
      part: its number, where the hub keeps several parameters in one tensor.
      grid: the sizes of the leading axes; (): it is one tensor.
      names: the checkpoint's names of the tensors, in the order of the grid; '': there is none, and nothing reads it.
      tensors: the checkpoint.
      cfg: the model, resolved.
    """

    family: str
    rule: Rule
    part: int
    grid: tuple[int, ...]
    names: tuple[str, ...]
    tensors: Mapping[str, np.ndarray]
    cfg: Model

    @property
    def rest(self) -> tuple[int, ...]:
        """The shape of each tensor in our layout."""
        rule, sizes = self.rule, _sizes(self.rule, self.cfg)
        if rule.shares:
            sizes['part'] = sizes[rule.shares[self.part]]
        whole = shape(rule.layout.split('->')[1], sizes)
        return whole[1:] if rule.parts and not rule.shares else whole

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grid + self.rest

    def is_in(self, array: np.ndarray) -> bool:
        """Returns whether an array holds these numbers, as its dtype rounds them, or a mean of several such arrays."""
        if array.shape != self.shape:
            return False
        near = 4 * float(ml_dtypes.finfo(array.dtype).eps)
        places = ((array[at], self.read(n)) for n, at in enumerate(np.ndindex(*self.grid)) if self.names[n])
        return all(np.allclose(x.astype(np.float32), y.astype(np.float32), rtol=near, atol=0) for x, y in places)

    def read(self, number: int) -> np.ndarray:
        """Returns one tensor in our layout. Raises a `UserError` if its shape, its type or a number does not fit."""
        rule, name, sizes = self.rule, self.names[number], _sizes(self.rule, self.cfg)
        if not name:
            return np.ones(self.rest, np.bool_)
        array = np.asarray(self.tensors[name])
        needed = hub_shape(rule, self.cfg)
        if array.shape != needed:
            which = f'{self.family}: tensor {name}'
            raise UserError(f'{which} has shape {array.shape}, the model needs {needed} ({rule.ours})')
        if array.dtype.kind in 'biuc':
            raise UserError(f'{self.family}: tensor {name} holds {array.dtype}, not floating-point numbers')
        if not _is_finite(array):
            raise UserError(f'{self.family}: tensor {name} holds numbers that are NaN or infinite')
        array = _ordered(FAMILIES[self.family], rule, rearrange(array, rule.layout, sizes), self.cfg)
        if rule.shares:
            ends = np.cumsum([sizes[share] for share in rule.shares])
            return np.split(array, ends[:-1], _part_axis(rule))[self.part]
        return array[self.part] if rule.parts else array

    def whole(self) -> np.ndarray:
        """Returns the parameter, in its tensors' dtype."""
        return np.stack([self.read(number) for number in range(len(self.names))]).reshape(self.shape)


def import_params(family: str, tensors: Mapping[str, np.ndarray], cfg: Model, head: str | None = None) -> Params:
    """Returns the tree of our parameters, in the tensors' own dtypes.

    Args:
      family: a hub's model_type.
      tensors: by name, as in the checkpoint's safetensors files.
      cfg: the model they are for, as `models.model_of` makes it.
      head: the head that the checkpoint has, a key of `outputs.HEADS`; None: the tensors tell.

    Raises:
      UserError: a tensor that is missing, is not mapped, has the wrong shape, or is not finite, by its name.
    """
    return nested({path: parameter.whole() for path, parameter in stacked_params(family, tensors, cfg, head).items()})


def stacked_params(
    family: str, tensors: Mapping[str, np.ndarray], cfg: Model, head: str | None = None
) -> dict[str, Stacked]:
    """Returns the parameters of `import_params` by path, unread; only tensors that none of them holds are compared.

    Raises:
      UserError: as `import_params`; a wrong shape or number is found when the tensor is read.
    """
    table, cfg = choose(FAMILIES, family, 'family'), resolve_model(cfg)
    names = renamed(table, tensors)
    rules = heads.imported(table, cfg, names, head)
    if cfg.num_classes is None:
        scores = {rule.ours: rule.hub for rule in rules if rule.ours in heads.CLASSES and rule.hub in names}
        cfg = heads.with_classes(cfg, {path: len(tensors[names[name]]) for path, name in scores.items()})
    found, taken = stacked(family, rules, (tensors, names), cfg)
    _account_for(family, table, tensors, names, taken)
    return found


def stacked(
    family: str, rules: Iterable[Rule], source: tuple[Mapping[str, np.ndarray], Mapping[str, str]], cfg: Model
) -> tuple[dict[str, Stacked], set[str]]:
    """Returns (the parameters of some rules by path, unread; the names of their tensors).

    `source` are the tensors, and their names by those of the rules. Raises a `UserError` if one is missing.
    """
    tensors, names = source
    found: dict[str, Stacked] = {}
    taken: set[str] = set()
    for rule in rules:
        theirs, grid = names_of(rule, cfg)
        for name in filter(None, theirs):
            if name not in names:
                raise UserError(f'{family}: the checkpoint has no tensor {name}{nearest(name, names, listed=0)}')
        taken.update(theirs)
        originals = tuple(name and names[name] for name in theirs)
        for part, path in enumerate(rule.paths):
            found[path] = Stacked(family, rule, part, grid, originals, tensors, cfg)
    return found, taken


def export_params(family: str, params: Params, cfg: Model) -> dict[str, np.ndarray]:
    """Returns the hub's tensors of our parameters, the inverse of `import_params`.

    Raises:
      UserError: a model that the family cannot express, by its field; a parameter that is missing or that no rule
        reads, by its path.
    """
    expressed = model_of(config_of(family, cfg))
    table, cfg = choose(FAMILIES, family, 'family'), resolve_model(cfg)
    ours = dict(flat(params))
    chosen = heads.exported(table, cfg, ours)
    heads.check_heads(family, expressed, cfg, params.keys())
    cfg = heads.with_classes(cfg, {path: np.shape(array)[-1] for path, array in ours.items() if np.ndim(array)})
    rules = [rule for rule in table.rules if rule.when(cfg) and rule.head in chosen]
    trunk, taken = exported(family, [rule for rule in rules if not rule.head], ours, cfg)
    ends, read = exported(family, [rule for rule in rules if rule.head], ours, cfg)
    taken |= read
    for path in ours:
        if path not in taken:
            raise UserError(f'{family}: no rule reads the parameter {path}')
    return {heads.exported_name(table, chosen, name): tensor for name, tensor in trunk.items()} | ends


def exported(
    family: str, rules: Iterable[Rule], ours: Mapping[str, Any], cfg: Model
) -> tuple[dict[str, np.ndarray], set[str]]:
    """Returns (the hub's tensors of some rules, the paths of their parameters).

    Raises:
      UserError: a parameter is missing.
    """
    tensors: dict[str, np.ndarray] = {}
    taken: set[str] = set()
    for rule in rules:
        for path in rule.paths:
            if path not in ours:
                raise UserError(f'{family}: there is no parameter {path}{nearest(path, ours, listed=0)}')
        taken.update(rule.paths)
        names, grid = names_of(rule, cfg)
        arrays = [np.asarray(ours[path]) for path in rule.paths]
        if rule.shares:
            stacked = np.concatenate(arrays, len(grid) + _part_axis(rule))
        else:
            stacked = np.stack(arrays, len(grid)) if rule.parts else arrays[0]
        for name, array in zip(names, stacked.reshape(-1, *stacked.shape[len(grid) :]), strict=True):
            array = _ordered(FAMILIES[family], rule, array, cfg, back=True)
            if name:
                tensors[name] = rearrange(array, reverse(rule.layout), _sizes(rule, cfg))
    return tensors, taken


def renamed(table: Family, tensors: Collection[str]) -> dict[str, str]:
    """Returns the checkpoint's names of its tensors by the names that the table has."""
    known = (table.prefix, *table.headed.values())
    prefix = '' if any(name.startswith(known) for name in tensors) else table.prefix
    found = {}
    for original in tensors:
        name = original
        for other in {*table.headed.values()}:
            name = table.prefix + name.removeprefix(other) if name.startswith(other) else name
        for old, new in table.renamed:
            name = name.replace(old, new)
        found[prefix + name] = original
    return found


def names_of(rule: Rule, cfg: Model) -> tuple[list[str], tuple[int, ...]]:
    """Returns the names of a rule's tensors, '' of layers without one, and the leading axes along which ours stacks
    them."""
    layers = cfg.num_encoder_layers if rule.ours.startswith('encoder/') else cfg.num_decoder_layers
    counts = {'layer': layers, 'expert': cfg.num_experts or 0}
    counts = {key: count for key, count in counts.items() if f'{{{key}}}' in rule.hub}
    grid = tuple(counts.values())
    places = [dict(zip(counts, index, strict=True)) for index in np.ndindex(*grid)]
    return [rule.hub.format(**place) if place.get('layer', 0) >= rule.first else '' for place in places], grid


def hub_shape(rule: Rule, cfg: Model) -> tuple[int, ...]:
    """Returns the shape of each of a rule's tensors on the hub."""
    return shape(rule.layout.split('->')[0], _sizes(rule, cfg))


def _sizes(rule: Rule, cfg: Model) -> dict[str, int]:
    sizes = axis_sizes(cfg)
    return {**sizes, 'part': sum(sizes[share] for share in rule.shares) if rule.shares else len(rule.parts)}


def _part_axis(rule: Rule) -> int:
    """Returns the axis of an array of ours along which parts with shares lie."""
    return rule.layout.split(' -> ')[1].split().index('part')


def _ordered(table: Family, rule: Rule, array: np.ndarray, cfg: Model, back: bool = False) -> np.ndarray:
    """Returns an array of ours with the entries along its axes in our order, or back in the hub's."""
    for place, axis in enumerate(rule.layout.split(' -> ')[1].split()):
        name = '+'.join(rule.shares) if axis == 'part' else axis
        if name in table.order:
            order = table.order[name](cfg)
            array = np.take(array, np.argsort(order) if back else order, place)
    return array


def nested(flat: Mapping[str, Any]) -> Params:
    """Returns the tree of values whose paths are joined by '/'."""
    tree: Params = {}
    for path, value in flat.items():
        *parents, name = path.split('/')
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return tree


def flat(params: Params, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of each parameter of a tree, the inverse of `nested`."""
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from flat(dict(value), f'{prefix}{name}/')
        else:
            yield f'{prefix}{name}', value


def _account_for(
    family: str, table: Family, tensors: Mapping[str, np.ndarray], names: Mapping[str, str], taken: set[str]
) -> None:
    """Raises a `UserError` for the first tensor that no rule read and that may not be left out.

    `names` are those of the checkpoint by those of the table.
    """
    for name, original in names.items():
        if name in taken or any(fnmatch.fnmatchcase(name, pattern) for pattern in table.ignored):
            continue
        source = table.copies.get(name)
        if source is not None:
            if source not in names or not _equal(tensors[original], tensors[names[source]]):
                raise UserError(f'{family}: tensor {name} is not the copy of {source} that config.json says it is')
        elif name in table.zeros:
            if np.any(tensors[original]):
                raise UserError(f'{family}: tensor {name} is not 0, and the model has no place for it')
        else:
            raise UserError(f'{family}: no rule reads the tensor {original}')


def has_own_output(family: str, tensors: Mapping[str, np.ndarray]) -> bool:
    """Returns whether the tensors alone say that the output is tied, and this one differs from its copy."""
    table, output = choose(FAMILIES, family, 'family'), 'lm_head.weight'
    if not table.tied_by_tensors or output not in tensors:
        return False
    return table.copies[output] not in tensors or not _equal(tensors[output], tensors[table.copies[output]])


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two arrays are equal."""
    return a.shape == b.shape and all(itertools.starmap(np.array_equal, zip(_parts(a), _parts(b), strict=True)))


def _is_finite(array: np.ndarray) -> bool:
    """Returns whether all numbers are finite: whether no exponent has the bits of that of infinity."""
    bits = np.dtype(f'u{array.dtype.itemsize}')
    exponent = np.array(np.inf, array.dtype).view(bits)
    return all(np.max(part.view(bits) & exponent, initial=0) < exponent for part in _parts(array))


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the rows of an array, some at a time, so that what is computed of them takes little memory."""
    rows = max(1, _AT_ONCE // max(1, math.prod(array.shape[1:])))
    array = np.atleast_1d(array)
    return (array[start : start + rows] for start in range(0, len(array), rows))


_AT_ONCE = 1 << 20  # numbers
