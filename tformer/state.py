"""What training carries from step to step, and how it starts."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh

from tformer.hyper import Hyper, Scalar
from tformer.objectives import Objective
from tformer.sharding import Rules, tree_shardings, unboxed


class TrainState(flax.struct.PyTreeNode):
    """Attributes:
    step: updates made so far, int32.
    params: the model's parameters.
    opt_state: the optimizer's, sharded as the parameters are.
    """

    step: jax.Array
    params: Any
    opt_state: Any


def step_key(seed: Scalar, step: Scalar) -> jax.Array:
    """Returns the random key of a step: a pure function of the two, whatever the devices."""
    return jax.random.fold_in(jax.random.key(seed), step)


def make_init(model: nn.Module, objective: Objective, optimizer: optax.GradientTransformation) -> Any:
    """Returns init(hyper, batch) -> TrainState, whose arrays are boxed with their logical names."""

    def scaled(path: tuple[Any, ...], value: jax.Array, scale: Scalar) -> jax.Array:
        random = any(getattr(key, 'key', None) in ('kernel', 'table') for key in path)
        return (value * scale).astype(value.dtype) if random else value

    def init(hyper: Hyper, batch: Any) -> TrainState:
        row = jax.tree.map(lambda x: x[:1], batch)
        params = model.init(step_key(hyper.seed, 0), row, method=objective.method)['params']
        params = jax.tree_util.tree_map_with_path(lambda path, x: scaled(path, x, hyper.init_scale), params)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return init


def start_state(
    model: nn.Module,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    hyper: Hyper,
    batch: Any,
    mesh: Mesh,
    rules: Rules,
) -> tuple[TrainState, TrainState]:
    """Returns (the initial state, placed on the mesh; the shardings of its arrays)."""
    init = make_init(model, objective, optimizer)
    shardings = tree_shardings(jax.eval_shape(init, hyper, batch), mesh, rules)
    state = jax.jit(lambda hyper, batch: unboxed(init(hyper, batch)), out_shardings=shardings)(hyper, batch)
    return state, shardings


def count_parameters(params: Any) -> int:
    """Returns the number of scalars in `params`."""
    return sum(x.size for x in jax.tree.leaves(params))
