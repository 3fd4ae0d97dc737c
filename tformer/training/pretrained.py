"""Starting from the parameters of another run or of the hub: which are loaded, new here or unused there.

Unintended ones are refused. Those of the hub go tensor by tensor to where the mesh holds them.
"""

import math
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from tformer.config.tasks import HEADS, head_parameters
from tformer.distributed import processes
from tformer.errors import UserError
from tformer.hf import directory as hub_directory
from tformer.hf.convert import Stacked
from tformer.optim.parameters import VOCABULARY_HEAD, check_entries, is_adapter, path_names, within
from tformer.training import checkpoint

Names = tuple[str, ...]  # of a variable: its collection, then the names in its path


def load(directory: str, initial: Any, shardings: Any, excepted: Sequence[str] = (), vocabulary: bool = True) -> Any:
    """Returns `initial` with the variables of another workdir's best checkpoint, or of a hub directory, in place.

    A variable is loaded where its path and shape agree. The others must be named in `excepted`, or be the heads of
    tasks on either side, new adapters, or the vocabulary head that a task's head replaces. Which are which is printed.
    `vocabulary` says whether the model has logits of the vocabulary: otherwise it has no use for such a head.

    `initial` are `params`, and `statistics` if any, and `shardings` is of the same tree. Variables with a name of
    `excepted` in their paths (see `parameters.within`) are not loaded.

    Raises:
      UserError: other variables are fresh, unused or of another shape; none is loaded; an exception matches nothing.
    """
    theirs, title = read(directory)
    ours = _flat(initial)
    check_entries(excepted, [names[1:] for names in (*ours, *theirs)], 'train.init_except')

    def named(names: Names) -> bool:
        return any(within(names[1:], entry) for entry in excepted)

    same = {names for names in ours if names in theirs and ours[names].shape == theirs[names].shape}
    loaded = {names for names in same if not named(names)}
    fresh, left = ours.keys() - loaded, theirs.keys() - loaded
    if not loaded:
        raise UserError(f'train.init_from={directory}: none of its parameters belong to this model')
    if processes.first():
        print(f'{title}: {len(loaded)} arrays')
        for title, part in (('loaded', loaded), ('fresh', fresh), ('left', left)):
            print(f'  {title}: {", ".join(_components(part, ours.keys() | theirs.keys())) or "none"}')

    task = not vocabulary or any(names[1] in head_parameters() for names in ours)
    meant = {names for names in fresh | left if named(names) or names[1] in head_parameters()}
    meant |= {names for names in fresh - theirs.keys() if is_adapter(names)}
    meant |= {names for names in left - ours.keys() if task and names[1] == VOCABULARY_HEAD}
    of_vocabulary = {name for head in HEADS.values() if head.vocabulary for name in (*head.per_row, *head.per_token)}
    if any(names[1] in head_parameters() and names[1] not in of_vocabulary for names in ours):  # its transform alone
        meant |= {names for names in fresh - theirs.keys() if names[1] == VOCABULARY_HEAD}
    _refuse(directory, ours, theirs, fresh - meant, left - meant)

    def take(path: Any, mine: jax.Array, where: Any) -> jax.Array:
        names = path_names(path)
        if names not in loaded:
            return mine
        return placed(theirs[names], where, mine.dtype)

    return jax.tree_util.tree_map_with_path(take, initial, shardings)


def read(directory: str, shardings: Any = None) -> tuple[dict[Names, Any], str]:
    """Returns the variables of a workdir or a hub directory, those of the latter unread, and what they are of.

    Those of a workdir are of its best checkpoint, placed by `shardings` as `checkpoint.load_variables` does.
    """
    path = pathlib.Path(directory)
    if hub_directory.is_hub(path):
        hub = hub_directory.open_hub(directory)
        found = hub.parameters(hub.run_config().model)
        return {('params', *name.split('/')): parameter for name, parameter in found.items()}, directory
    source, step = checkpoint.load_variables(path, shardings=shardings)
    return _flat(source), f'{directory} step {step}'


def placed(variable: Any, sharding: jax.sharding.Sharding, dtype: Any) -> jax.Array:
    """Returns a variable that `read` found, of this dtype, where `sharding` holds it."""
    if isinstance(variable, Stacked):
        return place(variable, sharding, dtype)
    if variable.sharding == sharding and variable.dtype == dtype:
        return variable
    # On the host: a device cannot reach those of other processes.
    value = np.asarray(variable.astype(dtype))
    return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])


def place(parameter: Stacked, sharding: jax.sharding.Sharding, dtype: Any) -> jax.Array:
    """Returns a parameter where `sharding` holds it, on this process's devices, in `dtype`.

    Besides the parameter itself one tensor of the hub is in memory at a time: each device's share is filled from all
    tensors in turn, and is never whole on the host where the mesh splits it.
    """
    places = sharding.addressable_devices_indices_map(parameter.shape)
    bounds = {
        device: tuple(each.indices(size)[:2] for each, size in zip(index or (), parameter.shape, strict=True))
        for device, index in places.items()
    }
    shares = {share: _aligned([stop - start for start, stop in share], dtype) for share in bounds.values()}
    axes = len(parameter.grid)
    for number, at in enumerate(np.ndindex(*parameter.grid)):
        array = parameter.read(number)
        for share, buffer in shares.items():
            if all(start <= i < stop for i, (start, stop) in zip(at, share, strict=False)):
                slot = tuple(i - start for i, (start, _) in zip(at, share, strict=False))
                buffer[slot] = array[tuple(slice(*each) for each in share[axes:])]
    held = []
    for share, buffer in shares.items():
        on = [device for device, each in bounds.items() if each == share]
        held += [jax.block_until_ready(jax.device_put(buffer, device, may_alias=True)) for device in on]
    return jax.make_array_from_single_device_arrays(parameter.shape, sharding, held)


def _aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array at an address that a CPU device takes over without a copy."""
    kind = jax.numpy.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


_ALIGNMENT = 64  # bytes


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
