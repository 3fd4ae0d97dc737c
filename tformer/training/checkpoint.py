"""Checkpoints of a run: their directory, and their arrays read back, on any mesh; damage is found before use.

WORKDIR/checkpoints/STEP holds two trees of arrays: `variables`, which are evaluated (`params`, and `statistics` if
any), and `training`, the rest of the state; `run`, a JSON object that is read without a device; and `digests.json`, the
sizes and checksums of all files.
"""

import json
import math
import pathlib
import secrets
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import jax

from tformer.data.store_copies import shown
from tformer.distributed import processes
from tformer.errors import UserError
from tformer.evaluation import metrics
from tformer.optim import renamed_paths
from tformer.training import copies, digests
from tformer.training.state import TrainState, evaluation_variables

ARRAYS = ('variables', 'training')  # the trees of arrays in a checkpoint


def score(metric: str, value: float) -> float:
    """Returns `value`, negated where less of the metric is better, so that more is better; -inf for NaN."""
    if math.isnan(value):
        return -math.inf
    return -value if metrics.lower_is_better(metric) else value


# ---------------------------------------------------------------------------------------------------- directory


def directory(workdir: pathlib.Path, step: int | None = None) -> pathlib.Path:
    """Returns the directory of a workdir's checkpoints, or of the one at `step`."""
    root = workdir.absolute() / 'checkpoints'
    return root if step is None else root / str(step)


def steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of all checkpoints, in order."""
    return sorted(int(path.name) for path in directory(workdir).glob('*') if path.name.isdigit() and path.is_dir())


def read_metadata(workdir: pathlib.Path, step: int) -> dict[str, Any]:
    """Returns the JSON object `run` of a checkpoint. Raises a `UserError` if it has changed or cannot be read."""
    if damage := digests.find_corruption(directory(workdir, step), arrays=False):
        raise UserError(f'checkpoint {step} is damaged: {damage}')
    file = directory(workdir, step) / 'run' / 'metadata'
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f'{file} cannot be read: {error}') from error


def newest_metadata(workdir: pathlib.Path) -> tuple[int, dict[str, Any]] | None:
    """Returns (step, `read_metadata`) of the newest checkpoint; None where there is none."""
    newest = max(steps(workdir), default=None)
    return None if newest is None else (newest, read_metadata(workdir, newest))


def scores(workdir: pathlib.Path) -> dict[int, float]:
    """Returns step -> score of the checkpoints that have been evaluated."""
    found: dict[int, float] = {}
    for step in steps(workdir):
        later = directory(workdir, step) / 'merit.json'
        try:
            value = read_metadata(workdir, step).get('merit')
        except UserError:
            if not directory(workdir, step).exists():  # its run has deleted it meanwhile
                continue
            raise
        try:
            value = json.loads(later.read_text()) if later.is_file() else value
            found |= {} if value is None else {step: float(value)}
        except (ValueError, TypeError, OSError) as error:
            raise UserError(f'{later} cannot be read: {error}') from error
    return found


def delete(workdir: pathlib.Path, step: int) -> None:
    """Deletes a checkpoint: if it is interrupted, the checkpoint is either complete or gone."""
    aside = directory(workdir, step).with_suffix('.deleted')
    shutil.rmtree(aside, ignore_errors=True)  # an earlier one of the same step
    if aside.exists():  # NFS keeps files that a process has open
        aside = aside.with_name(f'{step}.{secrets.token_hex(8)}.deleted')
    directory(workdir, step).rename(aside)
    shutil.rmtree(aside, ignore_errors=True)  # `latest_valid` deletes what remains


def best(workdir: pathlib.Path) -> int | None:
    """Returns the first step with the highest score, or the latest one where none has a score; None: no checkpoint."""
    known = scores(workdir)
    return max(known, key=lambda step: (known[step], -step)) if known else max(steps(workdir), default=None)


def latest_valid(workdir: pathlib.Path) -> int | None:
    """Returns the step of the newest undamaged checkpoint, every byte of which is checked; None where there is none.

    Damaged checkpoints are renamed and reported. Remains of interrupted saves and deletions are deleted.

    Raises:
      UserError: there are checkpoints, and all of them are damaged.
    """
    for pattern in ('*.orbax-checkpoint-tmp', '*.deleted'):
        for partial in directory(workdir).glob(pattern):
            shutil.rmtree(partial, ignore_errors=True)
    newest, damaged = None, {}
    for step in reversed(steps(workdir)):
        if found := digests.find_corruption(directory(workdir, step), contents=newest is None):
            damaged[step] = found
        else:
            newest = newest or step
    if damaged and newest is None:
        found = damaged[max(damaged)]
        raise UserError(f'every checkpoint of {workdir} is damaged: {found}; use a fresh --workdir to start anew')
    for step, found in damaged.items():
        aside = directory(workdir, step).with_suffix('.damaged')
        shutil.rmtree(aside, ignore_errors=True)
        directory(workdir, step).rename(aside)
        print(shown(f'checkpoint {step} is damaged and was renamed to {aside}: {found}'), flush=True)
    return newest


# ------------------------------------------------------------------------------------------------------- arrays


def checkpoint_items(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, item -> tree, without empty parts."""
    evaluated = evaluation_variables(state)
    training = {'opt_state': state.opt_state, 'guard': state.guard, 'averages': state.averages}
    if evaluated['params'] is not state.params:
        training['params'] = state.params
    return {'variables': evaluated, 'training': {name: x for name, x in training.items() if jax.tree.leaves(x)}}


def restore(workdir: pathlib.Path, step: int, state: TrainState) -> TrainState:
    """Returns the state of a checkpoint, whatever mesh it was saved from: its arrays are placed like those of `state`,
    which has the same shapes.

    Raises:
      UserError: the checkpoint has arrays of other names or shapes.
    """
    copies.follow(workdir, step)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), checkpoint_items(state)
    )
    try:
        found = _read(workdir, step, target)
    except (ValueError, KeyError) as error:
        raise UserError(f'checkpoint {step} of {workdir} does not fit: {str(error).splitlines()[0]}') from error
    number = jax.device_put(jax.numpy.asarray(step, state.step.dtype), state.step.sharding)
    return state.replace(step=number, **{**found['variables'], **found['training']})


def _read(workdir: pathlib.Path, step: int, target: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a checkpoint as `target` names and places them, whatever names an earlier version gave."""
    import orbax.checkpoint as ocp  # slow to import

    old_names = renamed_paths.to_stored(renamed_paths.names(_shapes(workdir, step)))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        wanted = {
            name: ocp.args.StandardRestore(renamed_paths.rename(item, old_names)) for name, item in target.items()
        }
        found = dict(reader.restore(directory(workdir, step), args=ocp.args.Composite(**wanted)).items())
    return dict(renamed_paths.rename(found, renamed_paths.RENAMED))


def _shapes(workdir: pathlib.Path, step: int) -> dict[str, Any]:
    """Returns the shapes and dtypes of what is evaluated, under the names that the checkpoint gives them."""
    import orbax.checkpoint as ocp

    return dict(ocp.StandardCheckpointHandler().metadata(directory(workdir, step) / 'variables'))


def _variables(workdir: pathlib.Path, step: int, shardings: Any = None) -> dict[str, Any]:
    """Returns the variables of a checkpoint, placed by `shardings`, or where those lack it on the first device."""
    copies.follow(workdir, step)
    if damage := digests.find_corruption(directory(workdir, step)):
        raise UserError(f'checkpoint {step} is damaged: {damage}')
    shapes = renamed_paths.rename(_shapes(workdir, step), renamed_paths.RENAMED)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = dict(jax.tree_util.tree_leaves_with_path(shardings))
    target = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places.get(path, here)), shapes
    )
    return dict(_read(workdir, step, {'variables': target})['variables'])


def load_variables(workdir: pathlib.Path, which: str = 'best', shardings: Any = None) -> tuple[dict[str, Any], int]:
    """Returns (`params`, and `statistics` if any; the step) of a workdir's best or latest checkpoint.

    `shardings` are those of each array; None: all are on the first device.

    Raises:
      UserError: the workdir has no checkpoint, or it is damaged.
    """

    def chosen() -> int:
        latest, most = _steps_there(workdir)[-1], best(workdir)
        if which == 'latest' or most is None:
            return latest
        recorded = read_metadata(workdir, latest).get('best', {}).get('merit')
        if recorded is not None and recorded > max(scores(workdir).values(), default=-math.inf):
            line = f'its best checkpoint, of score {recorded:.6g}, is gone; the best one left is that of step {most}'
            print(f'{shown(workdir)}: {line}', file=sys.stderr, flush=True)
        return most

    for more in (True, True, True, False):
        step = processes.same_number(chosen)
        try:
            return _variables(workdir, step, shardings), step
        except Exception:
            if not more or jax.process_count() > 1 or directory(workdir, step).exists():
                raise
            print(f'{shown(workdir)}: its run has deleted checkpoint {step} meanwhile', file=sys.stderr, flush=True)
    raise AssertionError


def load_average(
    workdir: pathlib.Path, count: int, keep_last: int, shardings: Any = None
) -> tuple[dict[str, Any], int]:
    """Returns (the mean of the variables of the newest `count` checkpoints, the step of the newest).

    Vaswani et al. 2017, 6.1. The run keeps its newest `keep_last` checkpoints; others that it keeps may be old.
    `shardings` are those of each array; None: all are on the first device.

    Raises:
      UserError: fewer are kept, or one of them is damaged.
    """
    last = processes.same_number(lambda: _steps_there(workdir)[-1])
    kept = [step for step in _steps_there(workdir) if step <= last][-keep_last:]
    if not 0 < count <= len(kept):
        raise UserError(f'--average={count}: the newest {len(kept)} checkpoints are kept (train.keep_last={keep_last})')
    averaged = kept[-count:]
    newest = _variables(workdir, averaged[-1], shardings)
    total = jax.tree.map(lambda x: x.astype(jax.numpy.float32), newest)
    for step in averaged[:-1]:
        total = jax.tree.map(jax.numpy.add, total, _variables(workdir, step, shardings))
    return jax.tree.map(lambda x, like: (x / count).astype(like.dtype), total, newest), averaged[-1]


def _steps_there(workdir: pathlib.Path) -> list[int]:
    found = steps(workdir)
    if not found:
        raise UserError(f'{workdir} has no checkpoints')
    return found
