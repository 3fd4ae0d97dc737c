"""Checkpoints of a run: parameters, optimizer, step and best score, written by Orbax beside the training.

The position in the data is the step: every batch is a pure function of (seed, step).
"""

import math
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from tformer.errors import UserError
from tformer.state import TrainState

LOWER_IS_BETTER = ('loss', 'nll', 'perplexity', 'error_rate', 'bits_per_byte')


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
            'params': ocp.StandardCheckpointHandler(),
            'opt_state': ocp.StandardCheckpointHandler(),
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
                params=ocp.args.StandardSave(state.params),
                opt_state=ocp.args.StandardSave(state.opt_state),
                run=ocp.args.JsonSave(run),
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

    def restore(self, state: TrainState, shardings: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns (the latest checkpoint's state, placed by `shardings`; its `run`).

        Args:
          state: of the same shapes, as `start_state` gives it.
          shardings: where its arrays go.
        """

        def abstract(x: jax.Array, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        target = jax.tree.map(abstract, state, shardings)
        step = self.latest
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(target.params),
                opt_state=ocp.args.StandardRestore(target.opt_state),
                run=ocp.args.JsonRestore(),
            ),
        )
        number = jax.device_put(jax.numpy.asarray(step, state.step.dtype), shardings.step)
        return TrainState(number, restored.params, restored.opt_state), restored.run

    def params(self, step: int | None) -> Any:
        """Returns the parameters alone, of any step and run, on the first device."""
        metadata = self._manager.item_metadata(step).params
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), dict(metadata))
        return self._manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(target))).params

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def load_params(workdir: pathlib.Path, which: str = 'best') -> tuple[Any, int]:
    """Returns (the parameters, the step) of a workdir's best or latest checkpoint.

    Raises:
      UserError: the workdir holds none.
    """
    if not (workdir / 'checkpoints').is_dir():
        raise UserError(f'{workdir} holds no checkpoints')
    checkpoints = Checkpoints(workdir)
    step = checkpoints.best if which == 'best' else checkpoints.latest
    if step is None:
        raise UserError(f'{workdir}/checkpoints is empty')
    try:
        params = checkpoints.params(step)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f'{workdir}/checkpoints/{step} does not read: {str(error).splitlines()[0]}') from error
    checkpoints.close()
    return params, step
