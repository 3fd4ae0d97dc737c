"""Checkpoints of a run, written by Orbax beside the training: whole or not there, and damage is found before use.

WORKDIR/checkpoints/STEP holds two trees of arrays, `variables`, which are evaluated (`params`, and `statistics` if
any), and `training`, what else training goes on from; `run`, a JSON object, which is read without a device; and
`digests.json`, which lists their files.
"""

import json
import math
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from tformer import atomic
from tformer.distributed import processes
from tformer.errors import UserError
from tformer.evaluation import metrics
from tformer.optim import renamed_paths
from tformer.training import digests
from tformer.training.state import TrainState, evaluation_variables

ARRAYS = ('variables', 'training')


def score(metric: str, value: float) -> float:
    """Returns `value`, negated where less of the metric is better, so that more is better; -inf for NaN."""
    if math.isnan(value):
        return -math.inf
    return -value if metrics.lower_is_better(metric) else value


# ----------------------------------------------------------------------------------------------- what is there


def directory(workdir: pathlib.Path, step: int | None = None) -> pathlib.Path:
    """Returns the directory of a workdir's checkpoints, or of one of them."""
    root = workdir.absolute() / 'checkpoints'
    return root if step is None else root / str(step)


def steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of all checkpoints, the newest last."""
    return sorted(int(path.name) for path in directory(workdir).glob('*') if path.name.isdigit() and path.is_dir())


def read_metadata(workdir: pathlib.Path, step: int) -> dict[str, Any]:
    """Returns the `run` of a checkpoint.

    Raises:
      UserError: it does not read.
    """
    file = directory(workdir, step) / 'run' / 'metadata'
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f'{file} does not read: {error}') from error


def latest_valid_before(workdir: pathlib.Path, before: int) -> int | None:
    """Returns the newest checkpoint of a step under `before` that is whole; None where there is none."""
    found = (step for step in reversed(steps(workdir)) if step < before)
    return next((step for step in found if digests.find_corruption(directory(workdir, step)) is None), None)


def scores(workdir: pathlib.Path) -> dict[int, float]:
    """Returns step -> merit of the checkpoints whose merit is known."""
    found = {}
    for step in steps(workdir):
        later = directory(workdir, step) / 'merit.json'
        value = json.loads(later.read_text()) if later.is_file() else read_metadata(workdir, step).get('merit')
        if value is not None:
            found[step] = float(value)
    return found


def delete(workdir: pathlib.Path, step: int) -> None:
    """Deletes a checkpoint, at once or not at all, whenever it is interrupted."""
    aside = directory(workdir, step).with_suffix('.deleted')
    shutil.rmtree(aside, ignore_errors=True)  # of the same step before
    if aside.exists():  # NFS keeps files that somebody has open
        aside = aside.with_name(f'{step}.{secrets.token_hex(8)}.deleted')
    directory(workdir, step).rename(aside)
    shutil.rmtree(aside, ignore_errors=True)  # what stays, `latest_valid` deletes


def best(workdir: pathlib.Path) -> int | None:
    """The first step of most merit; where none is known, the latest; None where there is no checkpoint."""
    known = scores(workdir)
    return max(known, key=lambda step: (known[step], -step)) if known else max(steps(workdir), default=None)


def latest_valid(workdir: pathlib.Path, say: Callable[[str], object]) -> int | None:
    """Returns the newest checkpoint that is whole, read to the last byte; None where there is none at all.

    Those that are damaged are renamed, and it is said. What an interrupted save or deletion left behind is deleted.

    Raises:
      UserError: there are checkpoints, and each is damaged.
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
        raise UserError(f'no checkpoint of {workdir} is whole: {found}; to begin anew take a fresh --workdir')
    for step, found in damaged.items():
        aside = directory(workdir, step).with_suffix('.damaged')
        shutil.rmtree(aside, ignore_errors=True)
        directory(workdir, step).rename(aside)
        say(f'checkpoint {step} is damaged, now {aside}: {found}')
    return newest


# ------------------------------------------------------------------------------------------------------ writing


class _Handler(ocp.CompositeCheckpointHandler):
    """Adds the digests once all files are written; then the directory gets its name, and is a checkpoint."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        if processes.first():
            digests.write(pathlib.Path(os.fspath(directory)))


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    pass


class Checkpoints:
    """Writes the checkpoints of a workdir; the newest `keep_last`, the best, and each `keep_every` steps are kept.

    Raises:
      UserError: the directory cannot be made.
    """

    def __init__(self, workdir: pathlib.Path, keep_last: int = 2, keep_every: int | None = None):
        self._workdir, self._keep_last, self._keep_every = workdir, keep_last, keep_every
        try:
            directory(workdir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f'{directory(workdir)}: {error.strerror}') from error
        # Compressing costs more of a step than it saves of a disk: trained numbers are close to random bits.
        handlers = {name: ocp.PyTreeCheckpointHandler(use_compression=False) for name in ARRAYS}
        self._writer = ocp.AsyncCheckpointer(_Handler(run=ocp.JsonCheckpointHandler(), **handlers))

    def save(self, state: TrainState, run: Mapping[str, Any], score: float | None) -> None:
        """Starts writing `state` and the JSON-able `run`; returns once the arrays are copied off the devices.

        Args:
          state: what to save; its step names the checkpoint.
          run: what else a resumed run needs.
          score: what the best has most of; None where this step was not evaluated.

        Raises:
          UserError: the previous checkpoint could not be written.
        """
        self.wait()
        self._writer.save(
            directory(self._workdir, int(state.step)),
            args=_Items(
                run=ocp.args.JsonSave({**run, 'merit': score}),
                **{name: ocp.args.PyTreeSave(item) for name, item in checkpoint_items(state).items()},
            ),
        )

    def note_score(self, step: int, score: float) -> None:
        """Notes the merit of a checkpoint that was written before its evaluation."""
        self.wait()
        if processes.first():
            atomic.write(directory(self._workdir, step) / 'merit.json', json.dumps(score))

    def finish(self) -> None:
        """Waits until everything is on disk.

        Raises:
          UserError: it could not be written.
        """
        try:
            self._writer.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            line = str(error).splitlines()[0]
            kept = f'the newest whole one is of step {max(steps(self._workdir), default=0)}'
            raise UserError(f'a checkpoint could not be written, and {kept}: {line}') from error

    def wait(self) -> None:
        """Waits until everything is on disk, and deletes the checkpoints that are no longer kept.

        Raises:
          UserError: it could not be written.
        """
        self.finish()
        if processes.first():
            there, most = steps(self._workdir), best(self._workdir)
            for step in there[: -self._keep_last]:
                if step != most and (self._keep_every is None or step % self._keep_every):
                    delete(self._workdir, step)
        processes.meet('checkpoints')  # none looks for the best among what is being deleted


def checkpoint_items(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a checkpoint: item -> tree, without parts that would be empty."""
    evaluated = evaluation_variables(state)
    training = {'opt_state': state.opt_state, 'guard': state.guard, 'averages': state.averages}
    if evaluated['params'] is not state.params:
        training['params'] = state.params
    return {'variables': evaluated, 'training': {name: x for name, x in training.items() if jax.tree.leaves(x)}}


# ------------------------------------------------------------------------------------------------------ reading


def restore(workdir: pathlib.Path, step: int, state: TrainState) -> TrainState:
    """Returns the state of a checkpoint, its arrays placed as those of `state`, whatever mesh they were saved from.

    Args:
      workdir: of a run.
      step: of a checkpoint.
      state: of the same shapes, as `make_start` gives it.
    """
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
    old_names = renamed_paths.to_stored(renamed_paths.names(_shapes(workdir, step)))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        wanted = {
            name: ocp.args.StandardRestore(renamed_paths.rename(item, old_names)) for name, item in target.items()
        }
        found = dict(reader.restore(directory(workdir, step), args=ocp.args.Composite(**wanted)).items())
    return dict(renamed_paths.rename(found, renamed_paths.RENAMED))


def _shapes(workdir: pathlib.Path, step: int) -> dict[str, Any]:
    """Returns the shapes and dtypes of what is evaluated, under the names that the checkpoint gives them."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(variables=ocp.StandardCheckpointHandler())) as reader:
        return dict(reader.metadata(directory(workdir, step)).item_metadata['variables'])


def _variables(workdir: pathlib.Path, step: int, shardings: Any = None) -> dict[str, Any]:
    """Returns what is evaluated, of any step and run, on the first device or placed: `params`, and `statistics`."""
    if damage := digests.find_corruption(directory(workdir, step)):
        raise UserError(f'checkpoint {step} is damaged: {damage}')
    shapes = renamed_paths.rename(_shapes(workdir, step), renamed_paths.RENAMED)
    if shardings is None:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda x: here, shapes)
    target = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, shardings)
    return dict(_read(workdir, step, {'variables': target})['variables'])


def load_variables(workdir: pathlib.Path, which: str = 'best', shardings: Any = None) -> tuple[dict[str, Any], int]:
    """Returns (`params`, and `statistics` if any; the step) of a workdir's best or latest checkpoint.

    Args:
      workdir: of a run.
      which: best or latest.
      shardings: of each array; None: all on the first device.

    Raises:
      UserError: the workdir holds none, or it is damaged.
    """
    step = processes.same_number(lambda: _chosen(workdir, which))
    return _variables(workdir, step, shardings), step


def load_average(
    workdir: pathlib.Path, count: int, keep_last: int, shardings: Any = None
) -> tuple[dict[str, Any], int]:
    """Returns (the mean of the newest `count` checkpoints' variables, the newest one's step).

    Vaswani et al. 2017, 6.1.

    Args:
      workdir: of a run.
      count: checkpoints.
      keep_last: newest checkpoints that the run keeps; besides it keeps others, which may be old.
      shardings: of each array; None: all on the first device.

    Raises:
      UserError: fewer are kept, or one is damaged.
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


def _chosen(workdir: pathlib.Path, which: str) -> int:
    latest, most = _steps_there(workdir)[-1], best(workdir)
    return latest if which == 'latest' or most is None else most


def _steps_there(workdir: pathlib.Path) -> list[int]:
    found = steps(workdir)
    if not found:
        raise UserError(f'{workdir} holds no checkpoints')
    return found
