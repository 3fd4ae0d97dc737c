"""Which parameters are trained: optimizer.frozen, optimizer.frozen_layers, and the base of low-rank adapters.

A mask is a tree like the parameters of True, False (the whole array is frozen) or an array along the `layers` axis.
optax's selective transforms freeze whole arrays only, and their state has another tree than that of older checkpoints.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tformer.config import Config, own_layers
from tformer.config.tasks import head_parameters
from tformer.errors import UserError
from tformer.optim.parameters import along_layers, check_entries, is_adapter, path_names, place, within


def is_partial(config: Config) -> bool:
    """Returns whether any parameter is frozen."""
    return bool(config.optimizer.frozen or config.optimizer.frozen_layers or config.model.lora_rank)


def trainable_mask(config: Config, names: Any) -> Any:
    """Returns which parameters are trained; `names` has the logical axis names of each.

    With model.lora_rank only adapters and heads of tasks are trained, unless they are frozen too.

    Raises:
      UserError: an entry of optimizer.frozen matches no parameter's path, or nothing is left to train.
    """
    frozen, lowest, layers = config.optimizer.frozen, config.optimizer.frozen_layers, own_layers(config.model)
    check_entries(
        frozen, (path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(names)), 'optimizer.frozen'
    )

    def part(path: tuple[Any, ...], axes: PartitionSpec) -> Any:
        keys = path_names(path)
        base = config.model.lora_rank is not None and not (is_adapter(keys) or keys[0] in head_parameters())
        if base or any(within(keys, entry) for entry in frozen):
            return False
        if not lowest or place(keys) == 'top':
            return True
        number = layers[keys[0]] if place(keys) == 'layers' else 0
        above = np.arange(number) >= lowest
        return along_layers(above, axes) if above.any() else False

    found = jax.tree_util.tree_map_with_path(part, names)
    if all(leaf is False for leaf in jax.tree.leaves(found)):
        raise UserError(
            f'optimizer.frozen={frozen} and optimizer.frozen_layers={lowest} leave nothing to train'
            + (f' beside model.lora_rank={config.model.lora_rank}' if config.model.lora_rank else '')
        )
    return found


def stop_frozen_gradients(trained: Any, params: Any) -> Any:
    """Returns `params` with the gradient of frozen parts stopped; trained=None: nothing is frozen."""

    def held(part: Any, x: jax.Array) -> jax.Array:
        if part is True:
            return x
        stopped = jax.lax.stop_gradient(x)
        return stopped if part is False else jnp.where(part, x, stopped)

    return params if trained is None else jax.tree.map(held, trained, params)


def select_trainable(trained: Any, tree: Any) -> Any:
    """Returns `tree` with wholly frozen arrays masked out; trained=None: nothing is frozen."""
    if trained is None:
        return tree
    return jax.tree.map(lambda part, x: optax.MaskedNode() if part is False else x, trained, tree)


def count_trainable(trained: Any, params: Any) -> int:
    """Returns the number of trained scalars."""
    return sum(jax.tree.leaves(jax.tree.map(lambda part, x: round(x.size * np.mean(part)), trained, params)))


def freeze(optimizer: optax.GradientTransformation, trained: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` restricted to trainable arrays: wholly frozen ones have no state, and updates of zero."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        return inner.init(select_trainable(trained, params))

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        steps, state = inner.update(select_trainable(trained, grads), state, select_trainable(trained, params), **extra)

        def filled(part: Any, step: Any, param: jax.Array) -> jax.Array:
            return jnp.full_like(param, -0.0) if part is False else step  # x + -0.0 is x, whatever its sign

        return jax.tree.map(filled, trained, steps, params), state

    return optax.GradientTransformationExtraArgs(init, update)
