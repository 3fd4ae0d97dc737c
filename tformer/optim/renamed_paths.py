"""Parameters that have another path now: checkpoints and settings of earlier versions are read by this table."""

from collections.abc import Mapping, Set
from typing import Any

import jax

RENAMED = {  # old name of a part of a parameter's path -> its name now
    'foot': 'input_embedding',
}


def names(tree: Any) -> set[str]:
    """Returns every key of the dictionaries in a tree, at any depth."""
    found: set[str] = set()

    def add(part: Any) -> None:
        if isinstance(part, Mapping):
            found.update(part)
            found.update(*[names(value) for value in part.values()])

    jax.tree.map(add, tree, is_leaf=_is_mapping)
    return found


def rename(tree: Any, table: Mapping[str, str]) -> Any:
    """Returns a tree (parameters, optimizer state, averages) with the keys of its dictionaries renamed by `table`."""

    def one(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        return {table.get(name, name): rename(value, table) for name, value in part.items()}

    return jax.tree.map(one, tree, is_leaf=_is_mapping)


def to_stored(stored: Set[str]) -> dict[str, str]:
    """Returns the table from names of now to the names that a checkpoint has.

    Args:
      stored: all names in the checkpoint's tree.
    """
    return {new: old for old, new in RENAMED.items() if old in stored}


def current(entry: str) -> str:
    """Returns a dotted path, or a part of one, with the names of now."""
    return '.'.join(RENAMED.get(name, name) for name in entry.split('.'))


def _is_mapping(part: Any) -> bool:
    return isinstance(part, Mapping)
