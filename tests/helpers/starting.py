"""The initial state of a model and an optimizer that a test makes by itself."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh

from tformer.distributed.sharding import Rules, tree_shardings, unboxed
from tformer.objectives import Objective
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training.state import TrainState, make_init


def make_start(
    model: nn.Module,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    hyper: Hyperparameters,
    batch: Any,
    mesh: Mesh,
    rules: Rules,
) -> tuple[Callable[[Hyperparameters], TrainState], TrainState]:
    """Returns (start(hyper) -> the initial state on the mesh, the shardings of its arrays)."""
    init = make_init(model, objective, optimizer)
    shardings = tree_shardings(jax.eval_shape(init, hyper, batch), mesh, rules)
    start = jax.jit(lambda hyper, batch: unboxed(init(hyper, batch)), out_shardings=shardings)
    return lambda hyper: start(hyper, batch), shardings
