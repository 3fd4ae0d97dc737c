"""Optimizers: a table of directions of descent over optax, and around each clipping, weight decay and the rate.

An update is -rate * factor * (direction + decay * parameter). Rate and decay are arguments of `update`
(`learning_rate`, `weight_decay`), so that both may be traced. `names` is the tree of the parameters' logical names.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from tformer import config as config_lib
from tformer.adafactor import adafactor
from tformer.config import Config
from tformer.errors import UserError, choose, nearest
from tformer.hyper import Scalar
from tformer.parameters import each, is_hidden, matrix_axes

MUP_POWERS = {'adafactor': 0.5}  # of base width / width; 1 for the others, but adafactor's steps shrink as kernels do


def make_optimizer(config: Config, names: Any) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation from gradients to what is added to the parameters.

    Its `update` takes `learning_rate` and `weight_decay` besides gradients, state and parameters.

    Args:
      config: a resolved run.
      names: the logical names of every parameter's axes.

    Raises:
      UserError: an unknown optimizer, or optimizer.rate_factors that fit no parameter.
    """
    cfg, clipping = config.optimizer, []
    if cfg.clip_value is not None:
        clipping.append(optax.clip(cfg.clip_value))
    if cfg.clip_norm is not None:
        clipping.append(optax.clip_by_global_norm(cfg.clip_norm))
    direction = choose(OPTIMIZERS, cfg.name, 'optimizer.name')(cfg, names)
    step = optax.chain(direction, descend(rate_factors(config, names), cfg.decayed))
    if cfg.name == 'schedule_free':
        step = schedule_free(step, cfg.beta1)
    return optax.chain(*clipping, step)


def rate_factors(config: Config, names: Any) -> Any:
    """Returns what the rate is multiplied by for each parameter: optimizer.rate_factors, and muP's.

    Weight decay is times the rate, so a factor is one of the decay too.
    muP: hidden matrices by base width / width (Yang et al. 2022, table 8), with parameter-scaled steps by its root
    (Everett et al. 2024, table 1).

    Raises:
      UserError: an entry that is no NAME=FACTOR, or whose name is in no parameter's path.
    """
    cfg, model, given = config.optimizer, config.model, []
    for entry in cfg.rate_factors:
        written = re.fullmatch(r'([^=]+)=(\d+(?:\.\d*)?(?:e-?\d+)?)', entry)
        if not written:
            raise UserError(f"optimizer.rate_factors={entry!r} is no NAME=FACTOR, such as 'encoder=0.1'")
        given.append((written[1], float(written[2])))
    known = {key.key for path, _ in jax.tree_util.tree_leaves_with_path(names) for key in path}
    for name, _ in given:
        if name not in known:
            raise UserError(f'optimizer.rate_factors: {name!r} is in no parameter{nearest(name, sorted(known))}')
    shrink = 1.0
    if model.parametrization == 'mup' and model.base_emb_dim:
        shrink = (model.base_emb_dim / model.emb_dim) ** MUP_POWERS.get(cfg.name, 1)

    def factor_of(path: tuple[Any, ...], axes: PartitionSpec) -> float:
        found = shrink if is_hidden(path[-1].key, axes) else 1.0
        components = {key.key for key in path}
        for name, factor in given:
            found *= factor if name in components else 1.0
        return found

    return jax.tree_util.tree_map_with_path(factor_of, names)


# ------------------------------------------------------------------------------------------------ the update


def descend(factors: Any, decayed: Sequence[str]) -> optax.GradientTransformationExtraArgs:
    """Returns -learning_rate * factor * (direction + weight_decay * parameter), decay on the roles `decayed` only.

    Decoupled weight decay: Loshchilov & Hutter 2019, algorithm 2.
    """

    def update(
        direction: Any, state: Any, params: Any, *, learning_rate: Scalar, weight_decay: Scalar, **_: Any
    ) -> tuple[Any, Any]:
        def step(path: tuple[Any, ...], d: jax.Array, param: jax.Array, factor: float) -> jax.Array:
            rate = learning_rate if factor == 1 else learning_rate * factor
            decay = weight_decay * param if path[-1].key in decayed else jnp.zeros_like(param)
            return -rate * (d + decay)

        return jax.tree_util.tree_map_with_path(step, direction, params, factors), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


class ScheduleFree(flax.struct.PyTreeNode):
    """Attributes:
    z: the sequence that the base optimizer steps.
    weight: the sum of the squared rates so far.
    base: the base optimizer's state.
    beta: how far the parameters y lie from z towards the average x.
    """

    z: Any
    weight: jax.Array
    base: Any
    beta: float = flax.struct.field(pytree_node=False)

    def average(self, params: Any) -> Any:
        """Returns x, which is what to evaluate, from y = (1 - beta) z + beta x."""
        return jax.tree.map(lambda y, z: (z + (y - z) / self.beta).astype(y.dtype), params, self.z)


def schedule_free(base: optax.GradientTransformationExtraArgs, beta: float) -> optax.GradientTransformationExtraArgs:
    """Averages what `base` does (Defazio et al. 2024, algorithm 1): the parameters are y, where gradients are taken.

    z += step;  x = (1 - c) x + c z, c = rate^2 / sum of rate^2;  y = (1 - beta) z + beta x. Without x it reads
    y += c (z - y) + (1 - beta (1 - c)) step, z before its step.
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


def _sgd(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    return optax.trace(cfg.momentum)


def _adam(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.epsilon)


def _rms(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    """Adam without a first moment."""
    return optax.scale_by_rms(cfg.beta2, cfg.epsilon, eps_in_sqrt=False, bias_correction=True)


def _lion(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    return optax.scale_by_lion(cfg.beta1, cfg.beta2)


def _muon(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    """The nearest orthogonal matrix to each hidden kernel's momentum, at AdamW's usual rms of 0.2; Adam elsewhere."""
    groups = each(lambda role, axes: 'muon' if is_hidden(role, axes) else 'adam', names)

    def numbers(role: str, axes: PartitionSpec, group: str) -> Any:
        if group == 'adam':
            return optax.MaskedNode()
        return optax.contrib.MuonDimensionNumbers(*matrix_axes(role, axes))

    matrices = each(numbers, names, groups)

    def usual(x: jax.Array, sides: optax.contrib.MuonDimensionNumbers) -> jax.Array:
        """An orthogonal matrix has the rms max(rows, columns)^-0.5."""
        return 0.2 * max(math.prod(x.shape[axis] for axis in side) for side in sides) ** 0.5 * x

    orthogonal = optax.contrib.scale_by_muon(beta=cfg.momentum, weight_dimension_numbers=matrices)
    scaled = optax.stateless(lambda updates, params: jax.tree.map(usual, updates, matrices))
    return optax.partition({'muon': optax.chain(orthogonal, scaled), 'adam': _adam(cfg, names)}, groups)


def _adafactor(cfg: config_lib.Optimizer, names: Any) -> optax.GradientTransformation:
    return adafactor(names)


OPTIMIZERS: dict[str, Callable[[config_lib.Optimizer, Any], optax.GradientTransformation]] = {
    'sgd': _sgd,  # Robbins & Monro 1951; momentum: Polyak 1964
    'adam': _adam,  # Kingma & Ba 2015; no weight decay
    'adamw': _adam,  # Loshchilov & Hutter 2019
    'adafactor': _adafactor,  # Shazeer & Stern 2018
    'lion': _lion,  # Chen et al. 2023
    'muon': _muon,  # Jordan et al. 2024; Liu et al. 2025
    'schedule_free': _rms,  # Defazio et al. 2024, with AdamW
}
