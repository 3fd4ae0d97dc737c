"""The training state: what a step takes and returns, and how it is initialized and sharded."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tformer.distributed.sharding import unboxed
from tformer.objectives import Objective
from tformer.optim.hyperparameters import Hyperparameters, Scalar
from tformer.optim.optimizers import ScheduleFree
from tformer.optim.parameters import MATRICES
from tformer.optim.precision import master_params
from tformer.training.skipping import Guard, init_guard


class TrainState(flax.struct.PyTreeNode):
    """The state of training."""

    step: jax.Array  # number of steps made, int32
    params: Any  # the model's parameters
    opt_state: Any  # the optimizer's state, sharded like the parameters
    averages: Any = None  # a moving average of the parameters, float32; None: off
    statistics: Any = flax.struct.field(default_factory=dict)  # of the model, as BatchNorm's; {}: none
    guard: Guard = flax.struct.field(default_factory=lambda: init_guard(None))  # decides which steps are skipped

    def __repr__(self) -> str:
        sizes = {'parameters': self.params, 'optimizer_state': self.opt_state, 'averages': self.averages}
        counts = {name: sum(getattr(x, 'size', 0) for x in jax.tree.leaves(tree)) for name, tree in sizes.items()}
        return f'TrainState(step={self.step}, {", ".join(f"{name}={n:,}" for name, n in counts.items() if n)})'


OFFLOADED = ('opt_state', 'averages')  # what optimizer.offload keeps in the host's memory


def step_key(seed: Scalar, step: Scalar) -> jax.Array:
    """Returns the random key of a step, a pure function of seed and step on any devices."""
    return jax.random.fold_in(jax.random.key(seed), step)


def variables(params: Any, statistics: Any) -> dict[str, Any]:
    """Returns the variables that `model.apply` takes: parameters, and statistics if there are any."""
    return {'params': params, **({'statistics': statistics} if statistics else {})}


def evaluation_params(state: TrainState) -> Any:
    """Returns the parameters to evaluate, decode with and export: their averages, where the run has averages."""
    parts = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, ScheduleFree))
    if state.averages is None and not any(isinstance(part, ScheduleFree) for part in parts):
        return state.params
    averages, opt_state = jax.device_put((state.averages, state.opt_state), jax.memory.Space.Device)
    for part in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, ScheduleFree)):
        if isinstance(part, ScheduleFree):
            averages = part.average(master_params(state.params, opt_state))
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), averages, state.params)


def evaluation_variables(state: TrainState) -> dict[str, Any]:
    """Returns the variables of `evaluation_params`."""
    return variables(evaluation_params(state), state.statistics)


def initial_variables(model: nn.Module, objective: Objective, hyper: Hyperparameters, batch: Any) -> dict[str, Any]:
    """Returns a model's random `params`, boxed with their logical names, and its `statistics`, if any.

    Of the batch only shapes and dtypes are read."""
    row = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), batch)  # parameters do not depend on it
    found = model.init(step_key(hyper.seed, 0), row, method=objective.method)

    def scaled(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        random = any(getattr(key, 'key', None) in MATRICES for key in path)
        return (value * hyper.init_scale).astype(value.dtype) if random else value

    params = jax.tree_util.tree_map_with_path(scaled, found['params'])
    return variables(params, found.get('statistics', {}))


def logical_names(model: nn.Module, objective: Objective, batch: Any) -> Any:
    """Returns the logical names of every parameter's axes, a tree of `PartitionSpec`s; nothing is computed."""
    return nn.get_partition_spec(abstract_variables(model, objective, batch)['params'])


def abstract_variables(model: nn.Module, objective: Objective, batch: Any) -> Any:
    """Returns a model's abstract variables, boxed with their logical names; nothing is computed."""
    row = tuple((name, (1, *x.shape[1:]), x.dtype) for name, x in sorted(batch.items()))
    return jax.tree.map(lambda x: x, _abstract_variables(model, objective.method, row))


@functools.lru_cache(maxsize=64)
def _abstract_variables(model: nn.Module, method: Any, row: tuple[tuple[str, tuple[int, ...], Any], ...]) -> Any:
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in row}
    return jax.eval_shape(lambda row: model.init(jax.random.key(0), row, method=method), arrays)


def begin(optimizer: optax.GradientTransformation, hyper: Hyperparameters, params: Any, statistics: Any) -> TrainState:
    """Returns the state before the first update of `params`."""
    wide = jax.tree.map(widened, params)  # moments in bfloat16 would never decay
    averages = None if hyper.ema_decay is None else wide
    guard = init_guard(hyper.skip_spikes)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(wide), averages, statistics, guard)


def widened(x: jax.Array) -> jax.Array:
    """Returns `x` in float32, rounded to its dtype first: XLA drops a rounding that is followed by a widening."""
    wide = jnp.array(x, jnp.float32)
    return wide if x.dtype == jnp.float32 else jax.lax.reduce_precision(wide, 8, 7)


def make_init(model: nn.Module, objective: Objective, optimizer: optax.GradientTransformation) -> Any:
    """Returns init(hyper, batch) -> TrainState, whose arrays are boxed with their logical names."""

    def init(hyper: Hyperparameters, batch: Any) -> TrainState:
        found = initial_variables(model, objective, hyper, batch)
        state = begin(optimizer, hyper, unboxed(found['params']), found.get('statistics', {}))
        return named_as(found['params'], state)

    return init


def named_as(params: Any, tree: Any) -> Any:
    """Returns `tree`, where an array whose path ends like a parameter's, and of its shape, gets its logical names."""

    def is_box(x: Any) -> bool:
        return isinstance(x, nn.Partitioned)

    def keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
        """The last keys of the path that are keys of dicts, as those of parameters are."""
        first = next((i for i in range(len(path), 0, -1) if not hasattr(path[i - 1], 'key')), 0)
        return tuple(key.key for key in path[first:])

    boxes = {keys(path): box for path, box in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)}

    def name(path: tuple[Any, ...], x: jax.Array) -> Any:
        box: Any = boxes.get(keys(path))
        return box.replace(value=x) if is_box(box) and box.value.shape == x.shape else x

    return jax.tree_util.tree_map_with_path(name, tree)


def count_parameters(params: Any) -> int:
    """Returns the number of scalars in `params`."""
    return sum(x.size for x in jax.tree.leaves(params))
