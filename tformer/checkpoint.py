"""Checkpoints of a run: parameters, optimizer, step and best score, written by Orbax beside the training.

The position in the data is the step: every batch is a pure function of (seed, step). The item `params` holds what is
evaluated; where training goes on from others, those are in `training`. Items that would be empty are not written.
"""

import contextlib
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from tformer.errors import UserError
from tformer.state import TrainState, evaluation_params

LOWER_IS_BETTER = ('loss', 'nll', 'perplexity', 'error_rate', 'bits_per_byte', 'mean_squared_error')


def merit(metric: str, value: float) -> float:
    """Returns `value`, negated for a metric of which less is better: its name says so. What is no number has least."""
    if math.isnan(value):
        return -math.inf
    return -value if metric.endswith(LOWER_IS_BETTER) else value


class Checkpoints:
    """The checkpoints of a workdir: the newest `keep_last` are kept, and the one of most merit."""

    def __init__(self, workdir: pathlib.Path, keep_last: int = 1):
        def merit_of(metrics: dict[str, float]) -> float:
            return metrics['merit']

        kept = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep_last),
                checkpoint_managers.BestN(get_metric_fn=merit_of, n=1, keep_checkpoints_without_metrics=False),
            ]
        )
        options = ocp.CheckpointManagerOptions(preservation_policy=kept, best_fn=merit_of, cleanup_tmp_directories=True)
        handlers = {
            **{name: ocp.StandardCheckpointHandler() for name in ('params', 'statistics', 'opt_state', 'training')},
            'run': ocp.JsonCheckpointHandler(),
        }
        place = (workdir / 'checkpoints').absolute()
        self._manager = ocp.CheckpointManager(place, options=options, item_handlers=handlers)

    def save(self, state: TrainState, run: dict[str, Any], merit: float | None) -> None:
        """Starts writing `state` and the JSON-able `run`; returns once the arrays are copied off the devices.

        Args:
          state: what to save; its step names the checkpoint.
          run: what else a resumed run needs.
          merit: what the best has most of; None where this step was not evaluated.
        """
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(
                run=ocp.args.JsonSave(run),
                **{name: ocp.args.StandardSave(item) for name, item in items(state).items()},
            ),
            metrics=None if merit is None else {'merit': merit},
        )

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The step of most merit; where none was evaluated, the latest."""
        best = self._manager.best_step()
        return self.latest if best is None else best

    def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns (the latest checkpoint's state, its arrays placed as those of `state`; its `run`).

        Args:
          state: of the same shapes, as `start_state` gives it.
        """
        wanted = items(state)
        if 'params' in wanted.get('training', {}):
            del wanted['params']
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
        step = self.latest
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                run=ocp.args.JsonRestore(),
                **{name: ocp.args.StandardRestore(item) for name, item in target.items()},
            ),
        )
        found = dict(restored.items())
        number = jax.device_put(jax.numpy.asarray(step, state.step.dtype), state.step.sharding)
        trained = {name: found[name] for name in ('params', 'opt_state', 'statistics') if name in found}
        return state.replace(step=number, **trained, **found.get('training', {})), found['run']

    def variables(self, step: int | None) -> dict[str, Any]:
        """Returns what is evaluated, of any step and run, on the first device: `params`, and `statistics` if any."""
        metadata = dict(self._manager.item_metadata(step).items())
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def target(item: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), dict(item))

        there = [name for name in ('params', 'statistics') if metadata.get(name) is not None]
        wanted = {name: ocp.args.StandardRestore(target(metadata[name])) for name in there}
        return dict(self._manager.restore(step, args=ocp.args.Composite(**wanted)).items())

    def run(self) -> dict[str, Any]:
        """Returns the newest checkpoint's `run`."""
        return dict(self._manager.restore(self.latest, args=ocp.args.Composite(run=ocp.args.JsonRestore()))['run'])

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, the newest last."""
        return sorted(self._manager.all_steps())

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def items(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a checkpoint: item -> tree."""
    evaluated = evaluation_params(state)
    training = {} if evaluated is state.params else {'params': state.params}
    if state.averages is not None:
        training['averages'] = state.averages
    every = {
        'params': evaluated,
        'statistics': state.statistics,
        'opt_state': state.opt_state,
        'training': training,
    }
    return {name: item for name, item in every.items() if jax.tree.leaves(item)}


def load_variables(workdir: pathlib.Path, which: str = 'best') -> tuple[dict[str, Any], int]:
    """Returns (`params`, and `statistics` if any; the step) of a workdir's best or latest checkpoint.

    Raises:
      UserError: the workdir holds none.
    """
    with opened(workdir) as checkpoints:
        step = checkpoints.best if which == 'best' else checkpoints.latest
        assert step is not None
        return checkpoints.variables(step), step


def load_run(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns what else than arrays the newest checkpoint of a workdir holds.

    Raises:
      UserError: the workdir holds none.
    """
    with opened(workdir) as checkpoints:
        return checkpoints.run()


def load_params(workdir: pathlib.Path, which: str = 'best') -> tuple[Any, int]:
    """Returns (the parameters, the step) of a workdir's best or latest checkpoint.

    Raises:
      UserError: the workdir holds none.
    """
    found, step = load_variables(workdir, which)
    return found['params'], step


def load_average(workdir: pathlib.Path, count: int, keep_last: int) -> tuple[dict[str, Any], int]:
    """Returns (the mean of the newest `count` checkpoints' variables, the newest one's step).

    Vaswani et al. 2017, 6.1.

    Args:
      workdir: of a run.
      count: checkpoints.
      keep_last: newest checkpoints that the run keeps; besides it keeps the best, which may be old.

    Raises:
      UserError: fewer are kept.
    """
    with opened(workdir) as checkpoints:
        steps = checkpoints.steps[-keep_last:][-count:]
        if not 0 < count == len(steps):
            kept = len(checkpoints.steps[-keep_last:])
            raise UserError(f'--average={count}: the newest {kept} checkpoints are kept (train.keep_last={keep_last})')
        newest = checkpoints.variables(steps[-1])
        total = jax.tree.map(lambda x: x.astype(jax.numpy.float32), newest)
        for step in steps[:-1]:
            total = jax.tree.map(jax.numpy.add, total, checkpoints.variables(step))
        return jax.tree.map(lambda x, like: (x / count).astype(like.dtype), total, newest), steps[-1]


@contextlib.contextmanager
def opened(workdir: pathlib.Path) -> Iterator[Checkpoints]:
    """Gives the checkpoints of a finished part of a run, to read.

    Raises:
      UserError: there are none, or one does not read.
    """
    if not (workdir / 'checkpoints').is_dir():
        raise UserError(f'{workdir} holds no checkpoints')
    checkpoints = Checkpoints(workdir)
    try:
        if checkpoints.latest is None:
            raise UserError(f'{workdir}/checkpoints is empty')
        yield checkpoints
    except (ValueError, OSError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f'{workdir}/checkpoints does not read: {str(error).splitlines()[0]}') from error
    finally:
        checkpoints.close()
