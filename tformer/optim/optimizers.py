"""Optimizers: a table of descent directions over optax, each with clipping, weight decay and a learning rate.

An update is -learning_rate * factor * (direction + weight_decay * parameter). Learning rate and weight decay are
arguments of `update`, so that both may be traced. `names` is the tree of the parameters' logical names. Wholly frozen
arrays have no state and no update (freezing.py); frozen layers have the factor 0.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tformer import config as config_lib
from tformer.config import Config, own_layers
from tformer.errors import UserError, choose
from tformer.layers.parametrization import width_factor
from tformer.optim import freezing, shared_layers
from tformer.optim.adafactor import adafactor
from tformer.optim.hyperparameters import Scalar
from tformer.optim.parameters import (
    along_layers,
    check_entries,
    each,
    is_hidden,
    matrix_axes,
    path_names,
    place,
    within,
)
from tformer.optim.precision import with_bfloat16_moments, with_master_params


def make_optimizer(config: Config, names: Any) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation from gradients to updates, which are added to the parameters.

    Its `update` takes `learning_rate` and `weight_decay` besides gradients, state and parameters.

    Raises:
      UserError: an unknown optimizer, or optimizer.lr_multipliers or optimizer.frozen that fit no parameter.
    """
    cfg, clipping = config.optimizer, []
    if cfg.clip_value is not None:
        clipping.append(optax.clip(cfg.clip_value))
    if cfg.clip_norm is not None:
        clipping.append(optax.clip_by_global_norm(cfg.clip_norm))
    trained, factors = freezing.trainable_mask(config, names), lr_multipliers(config, names)
    factors = jax.tree.map(lambda part, factor: factor if part is True else factor * part, trained, factors)
    names, factors = freezing.select_trainable(trained, names), freezing.select_trainable(trained, factors)
    row = choose(OPTIMIZERS, cfg.name, 'optimizer.name')
    direction = row.direction(cfg, names)
    if cfg.moment_dtype == 'bfloat16':
        direction = with_bfloat16_moments(direction)
    step = optax.chain(direction, descend(factors, cfg.decayed_roles))
    if row.averages:
        step = schedule_free(step, cfg.beta1)
    if cfg.master_dtype is not None:
        step = with_master_params(step, cfg.master_dtype)
    return freezing.freeze(optax.chain(*clipping, step), trained)


def lr_multipliers(config: Config, names: Any) -> Any:
    """Returns what the rate is multiplied by: optimizer.lr_multipliers times optimizer.layer_decay's times muP's.

    A number for each parameter, or an array along its `layers` axis. The rate multiplies the weight decay, and so does
    a factor.
    muP: hidden matrices by base width / width (Yang et al. 2022, table 8), with parameter-scaled steps by its root
    (Everett et al. 2024, table 1); not an adapter's second kernel, whose inputs stay few (Hayou et al. 2024).

    Raises:
      UserError: an entry is not NAME=FACTOR, or its name is in no parameter's path.
    """
    cfg, model, given = config.optimizer, config.model, []
    for entry in cfg.lr_multipliers:
        written = re.fullmatch(r'([^=]+)=((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)', entry)
        if not written:
            raise UserError(f"optimizer.lr_multipliers={entry!r} is not NAME=FACTOR, such as 'encoder=0.1'")
        given.append((written[1], float(written[2])))
    paths = [path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(names)]
    check_entries((name for name, _ in given), paths, 'optimizer.lr_multipliers')
    shrink = (1 / width_factor(model)) ** (choose(OPTIMIZERS, cfg.name, 'optimizer.name').mup or 0)

    def factor_of(path: tuple[Any, ...], axes: PartitionSpec) -> Any:
        widens = is_hidden(path[-1].key, axes) and 'lora' not in tuple(axes)[:-1]
        found = shrink if widens else 1.0
        for name, factor in given:
            found *= factor if within(path_names(path), name) else 1.0
        return found

    found = jax.tree_util.tree_map_with_path(factor_of, names)
    return found if cfg.layer_decay is None else jax.tree.map(operator.mul, found, layer_factors(config, names))


def layer_factors(config: Config, names: Any) -> Any:
    """Returns optimizer.layer_decay ** n for each parameter: n is 0 above the layers, 1 in the top one, 2 in the next,
    and L + 1 at the bottom of a stack of L (Howard & Ruder 2018, 3.2; Clark et al. 2020, appendix B).

    Each stack counts its own layers; tables at the bottom of two stacks count those of the deeper one. A block that all
    layers share is one.
    """
    decay, layers = config.optimizer.layer_decay or 1.0, own_layers(config.model)
    feeds = {'encoder_embed': ['encoder'], 'embed': ['decoder'] if 'encoder_embed' in names else list(layers)}

    def factor_of(path: tuple[Any, ...], axes: PartitionSpec) -> Any:
        keys = path_names(path)
        if place(keys) == 'top':
            return 1.0
        depth = max(layers[stack] for stack in feeds.get(keys[0], keys[:1]))
        if place(keys) == 'bottom':
            return decay ** (depth + 1)
        return along_layers(decay ** np.arange(depth, 0, -1, dtype=np.float32), axes)

    return jax.tree_util.tree_map_with_path(factor_of, names)


# ------------------------------------------------------------------------------------------------ the update
def descend(factors: Any, decayed: Sequence[str]) -> optax.GradientTransformationExtraArgs:
    """Returns -learning_rate * factor * (direction + weight_decay * parameter), decay on the roles `decayed` only.

    Decoupled weight decay: Loshchilov & Hutter 2019, algorithm 2, except that the learning rate multiplies the decay,
    and in the paper only the schedule does. `factors` is a tree of numbers, or of arrays with as many axes as the
    parameter: where they are 0 nothing moves.
    """

    def update(
        direction: Any, state: Any, params: Any, *, learning_rate: Scalar, weight_decay: Scalar, **_: Any
    ) -> tuple[Any, Any]:
        def step(path: tuple[Any, ...], d: jax.Array, param: jax.Array, factor: Any) -> jax.Array:
            decay = weight_decay * param if path[-1].key in decayed else jnp.zeros_like(param)
            if isinstance(factor, np.ndarray):
                return jnp.where(factor == 0, -0.0, -learning_rate * factor * (d + decay))
            rate = learning_rate if factor == 1 else learning_rate * factor
            return -rate * (d + decay)

        return jax.tree_util.tree_map_with_path(step, direction, params, factors), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


class ScheduleFree(flax.struct.PyTreeNode):
    """The state of `schedule_free`."""

    z: Any  # the sequence that the base optimizer updates
    weight: jax.Array  # the sum of the squared learning rates so far
    base: Any  # the base optimizer's state
    beta: float = flax.struct.field(pytree_node=False)  # how far the parameters y lie from z towards the average x

    def average(self, params: Any) -> Any:
        """Returns x, the parameters to evaluate, from y = (1 - beta) z + beta x."""

        def average(y: jax.Array, z: Any) -> jax.Array:
            return y if isinstance(z, optax.MaskedNode) else (z + (y - z) / self.beta).astype(y.dtype)

        return jax.tree.map(average, params, self.z)


def schedule_free(base: optax.GradientTransformationExtraArgs, beta: float) -> optax.GradientTransformationExtraArgs:
    """Schedule-free averaging of `base` (Defazio et al. 2024): the parameters are y, where gradients are taken.

    z += step;  x = (1 - c) x + c z, c = rate^2 / sum of rate^2;  y = (1 - beta) z + beta x. Without x it reads
    y += c (z - y) + (1 - beta (1 - c)) step, with z before its step. `rate` is the learning rate of the update, warm-up
    and schedule included. This is not algorithm 1 of the paper, where it is times sqrt(1 - beta2^t) in c, in the step
    and in the weight decay: here this factor stands in the direction alone, as Adam's bias correction. The authors'
    code does the same, but takes the largest rate so far in c. optax.contrib's takes its learning rate when it is made;
    here the rate is an argument of `update`, which trials of one program may trace.
    """

    def init(params: Any) -> ScheduleFree:
        return ScheduleFree(jax.tree.map(jnp.copy, params), jnp.zeros(()), base.init(params), beta)

    def update(grads: Any, state: ScheduleFree, params: Any, **extra: Any) -> tuple[Any, ScheduleFree]:
        steps, inner = base.update(grads, state.base, params, **extra)
        square = jnp.square(jnp.asarray(extra['learning_rate'], jnp.float32))
        weight = state.weight + square
        c = square / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)
        updates = jax.tree.map(lambda y, z, s: c * (z - y) + (1 - beta * (1 - c)) * s, params, state.z, steps)
        return updates, state.replace(z=optax.apply_updates(state.z, steps), weight=weight, base=inner)

    return optax.GradientTransformationExtraArgs(init, update)


# -------------------------------------------------------------------------------------------------- directions
def _adam(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.epsilon)


def _rms(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    """Adam without a first moment."""
    return optax.scale_by_rms(cfg.beta2, cfg.epsilon, eps_in_sqrt=False, bias_correction=True)


def _muon(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    """Orthogonal steps for hidden kernels (Jordan et al. 2024) at AdamW's rms of 0.2 (Liu et al. 2025); Adam elsewhere.

    m = b m + (1 - b) g, and five steps of the quintic Newton-Schulz iteration bring (1 - b) g + b m near the nearest
    orthogonal matrix. No momentum is bias-corrected, as in the author's code; optax's is.
    """
    groups = each(lambda role, axes: 'muon' if is_hidden(role, axes) else 'adam', names)

    def numbers(role: str, axes: PartitionSpec, group: str) -> Any:
        if group == 'adam':
            return optax.MaskedNode()
        return optax.contrib.MuonDimensionNumbers(*matrix_axes(role, axes))

    matrices = each(numbers, names, groups)

    def usual(x: jax.Array, sides: optax.contrib.MuonDimensionNumbers) -> jax.Array:
        """Scales to an rms of 0.2; that of an orthogonal matrix is max(rows, columns)^-0.5."""
        return 0.2 * max(math.prod(x.shape[axis] for axis in side) for side in sides) ** 0.5 * x

    orthogonal = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=matrices)

    def whole(role: str, axes: PartitionSpec, x: Any) -> Any:
        return shared_layers.whole(x, axes) if isinstance(x, jax.Array) else x

    def stored(role: str, axes: PartitionSpec, x: Any, moment: Any) -> Any:
        return shared_layers.stored(x, axes, moment.shape) if isinstance(x, jax.Array) else x

    def follow(grads: Any, moments: Any) -> Any:
        return jax.tree.map(lambda g, m: (1 - cfg.momentum) * g + cfg.momentum * m, grads, moments)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moments = follow(grads, state.mu)
        mixed = each(whole, names, follow(grads, moments))
        steps, state = orthogonal.update(mixed, state._replace(mu=mixed), params)  # which counts for nothing there
        return each(stored, names, steps, moments), state._replace(mu=moments)

    scaled = optax.stateless(lambda updates, params: jax.tree.map(usual, updates, matrices))
    return optax.partition(
        {
            'muon': optax.chain(optax.GradientTransformation(orthogonal.init, update), scaled),
            'adam': _adam(cfg, names),
        },
        groups,
    )


class Method(NamedTuple):
    """An optimization method."""

    # (config.optimizer, logical names of the parameters) -> from gradients to the direction of a step
    direction: Callable[[config_lib.Optimizer, Any], optax.GradientTransformation]
    fields: tuple[str, ...] | None = None  # those of config.optimizer that it reads and some others do not; None: all
    # hidden matrices learn at (width / base width)^-mup of the rate under muP; None: that is not known
    mup: float | None = None
    averages: bool = False  # the parameters are averaged by schedule-free steps, which replaces optimizer.ema_decay


_ADAM = ('beta1', 'beta2', 'epsilon')

OPTIMIZERS: dict[str, Method] = {
    # Robbins & Monro 1951; momentum: Polyak 1964
    'sgd': Method(lambda cfg, names: optax.trace(cfg.momentum), ('momentum', 'weight_decay')),
    'adam': Method(_adam, _ADAM, mup=1),  # Kingma & Ba 2015
    'adamw': Method(_adam, (*_ADAM, 'weight_decay'), mup=1),  # Loshchilov & Hutter 2019
    # Shazeer & Stern 2018; its steps shrink as the kernels do
    'adafactor': Method(lambda cfg, names: adafactor(names), ('weight_decay',), mup=0.5),
    # Chen et al. 2023
    'lion': Method(
        lambda cfg, names: optax.scale_by_lion(cfg.beta1, cfg.beta2), ('beta1', 'beta2', 'weight_decay'), mup=1
    ),
    'muon': Method(_muon, (*_ADAM, 'momentum', 'weight_decay')),  # Jordan et al. 2024; Liu et al. 2025
    # Defazio et al. 2024, with AdamW
    'schedule_free': Method(_rms, (*_ADAM, 'weight_decay'), mup=1, averages=True),
}
