"""Parameters that have another path now: checkpoints and settings of earlier versions are read by this table."""

from collections.abc import Mapping, Set
from typing import Any

import jax

RENAMED = {  # old name of a part of a parameter's path -> its name today
    'foot': 'input_embedding',
}


def names(tree: Any) -> set[str]:
    """Returns every key of the dictionaries in a tree, at any depth."""
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    return {key.key for path, _ in paths for key in path if isinstance(key, jax.tree_util.DictKey)}


def rename(tree: Any, table: Mapping[str, str]) -> Any:
    """Returns a tree (parameters, optimizer state, averages) with the keys of its dictionaries renamed by `table`."""

    def one(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        return {table.get(name, name): rename(value, table) for name, value in part.items()}

    return jax.tree.map(one, tree, is_leaf=lambda part: isinstance(part, Mapping))


def to_stored(stored: Set[str]) -> dict[str, str]:
    """Returns the table from today's names to those of a checkpoint whose tree has the names `stored`."""
    return {new: old for old, new in RENAMED.items() if old in stored}


def current(entry: str) -> str:
    """Returns a dotted path, or a part of one, with today's names."""
    return '.'.join(RENAMED.get(name, name) for name in entry.split('.'))
