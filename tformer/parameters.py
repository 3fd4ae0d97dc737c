"""What a parameter is: its role, the last name of its path, and the logical names of its axes.

`names` is always a tree like the parameters, of one `PartitionSpec` of logical names for each array.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

MATRICES = ('kernel', 'table')
ROLES = (*MATRICES, 'scale', 'bias', 'gain', 'sink')
STACKED = ('layers', 'experts')  # axes that only put several matrices into one array
# Axes of the ends of the model, which no hidden layer has.
OUTSIDE = ('vocab', 'factor', 'classes', 'positions', 'pos_buckets', 'token_types')


def is_hidden(role: str, names: PartitionSpec) -> bool:
    """Returns whether an array holds the matrices of hidden layers: no embedding, vector or output head."""
    return bool(matrix_axes(role, names)[0]) and role == 'kernel' and not set(names) & set(OUTSIDE)


def matrix_axes(role: str, names: PartitionSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of (the rows, the columns) of an array's matrices: inputs and outputs, as kernels go.

    Inputs stand first; on one side of every kernel of several axes is `embed`, alone. A vector is columns only.
    """
    axes = tuple(axis for axis, name in enumerate(names) if name not in STACKED)
    if role not in MATRICES or len(axes) < 2:
        return (), axes
    cut = 1 if names[axes[0]] == 'embed' else len(axes) - 1
    return axes[:cut], axes[cut:]


def each(function: Callable[..., Any], names: Any, *trees: Any) -> Any:
    """Returns the tree of function(role, names, *leaves of the trees) over all parameters."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path[-1].key, *leaves), names, *trees)
