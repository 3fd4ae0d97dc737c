"""Starting from another run's parameters: which are loaded, new here or unused there; unintended ones are refused."""

import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from tformer.config.tasks import head_parameters
from tformer.distributed import processes
from tformer.errors import UserError
from tformer.optim.parameters import VOCABULARY_HEAD, check_entries, is_adapter, path_names, within
from tformer.training import checkpoint

Names = tuple[str, ...]  # of a variable: its collection, then the names in its path


def load(directory: str, initial: Any, shardings: Any, excepted: Sequence[str] = ()) -> Any:
    """Returns `initial` with the variables of another workdir's best checkpoint in place, and prints which are which.

    A variable is loaded where its path and shape agree. The others must be named in `excepted`, or be the heads of
    tasks on either side, new adapters, or the vocabulary head that a task's head replaces.

    `initial` are `params`, and `statistics` if any, and `shardings` is of the same tree. Variables with a name of
    `excepted` in their paths (see `parameters.within`) are not loaded.

    Raises:
      UserError: other variables are fresh, unused or of another shape; none is loaded; an exception matches nothing.
    """
    source, step = checkpoint.load_variables(pathlib.Path(directory))
    ours, theirs = _flat(initial), _flat(source)
    check_entries(excepted, [names[1:] for names in (*ours, *theirs)], 'train.init_except')

    def named(names: Names) -> bool:
        return any(within(names[1:], entry) for entry in excepted)

    same = {names for names in ours if names in theirs and ours[names].shape == theirs[names].shape}
    loaded = {names for names in same if not named(names)}
    fresh, left = ours.keys() - loaded, theirs.keys() - loaded
    if not loaded:
        raise UserError(f'train.init_from={directory}: none of its parameters belong to this model')
    if processes.first():
        print(f'{directory} step {step}: {len(loaded)} arrays')
        for title, part in (('loaded', loaded), ('fresh', fresh), ('left', left)):
            print(f'  {title}: {", ".join(_components(part, ours.keys() | theirs.keys())) or "none"}')

    task = any(names[1] in head_parameters() for names in ours)
    meant = {names for names in fresh | left if named(names) or names[1] in head_parameters()}
    meant |= {names for names in fresh - theirs.keys() if is_adapter(names)}
    meant |= {names for names in left - ours.keys() if task and names[1] == VOCABULARY_HEAD}
    _refuse(directory, ours, theirs, fresh - meant, left - meant)

    def take(path: Any, mine: jax.Array, placed: Any) -> jax.Array:
        names = path_names(path)
        if names not in loaded:
            return mine
        # On the host: a device cannot reach those of other processes.
        value = np.asarray(theirs[names].astype(mine.dtype))
        return jax.make_array_from_callback(value.shape, placed, lambda at: value[at])

    return jax.tree_util.tree_map_with_path(take, initial, shardings)


def _refuse(
    directory: str, ours: dict[Names, Any], theirs: dict[Names, Any], fresh: set[Names], left: set[Names]
) -> None:
    """Raises a `UserError` that names the unintended fresh and unused variables."""
    if not fresh | left:
        return
    every, both = ours.keys() | theirs.keys(), fresh & left
    parts = {'fresh here': fresh - both, 'left there': left - both, 'of another shape': both}
    lines = [f'{title}: {", ".join(_components(part, every))}' for title, part in parts.items() if part]
    if both:
        first = min(both)
        shapes = f'{theirs[first].shape} there, {ours[first].shape} here'
        lines[-1] += f' ({".".join(first[1:])} has shape {shapes})'
    raise UserError(
        f'train.init_from={directory} does not fit this model: {"; ".join(lines)}; '
        'name the intended ones in train.init_except'
    )


def _flat(tree: Any) -> dict[Names, jax.Array]:
    return {path_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _components(part: Collection[Names], every: Collection[Names]) -> list[str]:
    """Returns the fewest path prefixes, sorted, that cover all variables of `part` and no other of `every`."""
    mine, others = ({names[1:] for names in group} for group in (part, set(every) - set(part)))
    foreign = {names[:length] for names in others for length in range(len(names) + 1)}

    def shortest(names: Names) -> Names:
        return next((names[:length] for length in range(1, len(names)) if names[:length] not in foreign), names)

    return sorted({'.'.join(shortest(names)) for names in mine})
