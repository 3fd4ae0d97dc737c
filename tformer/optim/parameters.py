"""What a parameter is: its role, the last name of its path, and the logical names of its axes.

`names` is always a tree like the parameters, of one `PartitionSpec` of logical names for each array.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tformer.config.tasks import head_parameters
from tformer.errors import UserError, nearest
from tformer.layers.linear import ADAPTERS
from tformer.optim import renamed_paths

MATRICES = ('kernel', 'table')
ROLES = (*MATRICES, 'scale', 'bias', 'gain', 'sink')
STACKED = ('layers', 'experts')  # axes that only put several matrices into one array
# Axes of the ends of the model, which no hidden layer has.
OUTSIDE = ('vocab', 'factor', 'classes', 'positions', 'pos_buckets', 'token_types')
VOCABULARY_HEAD = 'head'  # what language models end in


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names in the path of a parameter, outermost first."""
    return tuple(key.key for key in path)


def within(names: Sequence[str], entry: str) -> bool:
    """Returns whether `entry`, one name or several joined by dots ('mlp', 'decoder.stack'), is in a path."""
    return f'.{renamed_paths.current(entry)}.' in f'.{".".join(names)}.'


def check_entries(entries: Iterable[str], paths: Iterable[Sequence[str]], field: str) -> None:
    """Raises a `UserError` that names `field` and what is nearest for an entry that is in no path."""
    paths = list(paths)
    for entry in entries:
        if not any(within(names, entry) for names in paths):
            known = sorted({name for names in paths for name in names} | {'.'.join(names) for names in paths})
            raise UserError(f'{field}: {entry!r} is not in the path of any parameter{nearest(entry, known)}')


def is_adapter(names: Sequence[str]) -> bool:
    """Returns whether a parameter is of a low-rank adapter."""
    return any(name in ADAPTERS for name in names)


def place(names: Sequence[str]) -> str:
    """Returns where a parameter stands: 'layers', 'bottom' (embeddings and all below the first layer), or 'top'."""
    if 'layers' in names and names[0] not in head_parameters():
        return 'layers'
    below = names[0] in ('encoder', 'decoder') and names[1] != 'stack'
    return 'bottom' if below or names[0] in ('embed', 'encoder_embed') else 'top'


def along_layers(values: np.ndarray, names: PartitionSpec) -> Any:
    """Returns values [L], one a layer, as an array that multiplies one whose axes have these names.

    Without a `layers` axis all layers are one: its value, a scalar.
    """
    if 'layers' not in names:
        return values.item()
    return values.reshape([-1 if name == 'layers' else 1 for name in names])


def is_hidden(role: str, names: PartitionSpec) -> bool:
    """Returns whether an array holds the matrices of hidden layers: no embedding, vector or output head."""
    return bool(matrix_axes(role, names)[0]) and role == 'kernel' and not set(names) & set(OUTSIDE)


def matrix_axes(role: str, names: PartitionSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of (the rows, the columns) of an array's matrices: inputs and outputs, as kernels go.

    Inputs stand first; on one side of every kernel of several axes is `embed` or `lora`, alone. A vector is columns
    only.
    """
    axes = tuple(axis for axis, name in enumerate(names) if name not in STACKED)
    if role not in MATRICES or len(axes) < 2:
        return (), axes
    cut = 1 if names[axes[0]] in ('embed', 'lora', 'latent') else len(axes) - 1
    return axes[:cut], axes[cut:]


def each(function: Callable[..., Any], names: Any, *trees: Any) -> Any:
    """Returns the tree of function(role, names, *leaves of the trees) over all parameters."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path[-1].key, *leaves), names, *trees)
