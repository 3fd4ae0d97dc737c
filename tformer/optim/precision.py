"""Number formats of the training state: master copies of low-precision parameters, and moments in bfloat16."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class MasterParams(NamedTuple):
    """The state of `with_master_params`."""

    params: Any  # copies of the parameters, in which updates accumulate
    base: Any  # the state of the optimizer that updates them


def with_master_params(
    base: optax.GradientTransformationExtraArgs, dtype: str
) -> optax.GradientTransformationExtraArgs:
    """Updates copies of the parameters in `dtype`, which keep changes too small for the parameters' own format.

    The parameters after an update are `master_params`, rounded (Micikevicius et al. 2018, 3.1).
    """

    def init(params: Any) -> MasterParams:
        copies = jax.tree.map(lambda x: jnp.array(x, dtype), params)
        return MasterParams(copies, base.init(copies))

    def update(grads: Any, state: MasterParams, params: Any, **extra: Any) -> tuple[Any, MasterParams]:
        steps, inner = base.update(grads, state.base, state.params, **extra)
        return steps, MasterParams(optax.apply_updates(state.params, steps), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def master_params(params: Any, opt_state: Any) -> Any:
    """Returns the master copies of the parameters, and those in `params` that the optimizer keeps no copy of."""

    def is_master_params(part: Any) -> bool:
        return isinstance(part, MasterParams)

    def of(x: jax.Array, master: Any) -> jax.Array:
        return x if isinstance(master, optax.MaskedNode) else master

    found = [part for part in jax.tree.leaves(opt_state, is_leaf=is_master_params) if is_master_params(part)]
    return jax.tree.map(of, params, found[0].params) if found else params


class Bfloat16State(NamedTuple):
    """The state of `with_bfloat16_moments`."""

    step: jax.Array  # updates made
    base: Any  # the state of the optimizer, its arrays in bfloat16


def with_bfloat16_moments(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keeps the moments of `base` in bfloat16 between updates, which are computed in float32.

    Rounding is stochastic: rounding to nearest would lose every relative change below 1/512, so that with beta2 = 0.999
    a second moment that is large once would stay large.
    """

    def narrow(step: jax.Array, state: Any) -> Any:
        def of(number: int, x: jax.Array) -> jax.Array:
            seed = step.astype(jnp.uint32) * len(leaves) + number
            return stochastic_round(x, seed) if x.ndim and x.dtype == jnp.float32 else x

        leaves, tree = jax.tree.flatten(state)
        return jax.tree.unflatten(tree, [of(number, x) for number, x in enumerate(leaves)])

    def init(params: Any) -> Bfloat16State:
        step = jnp.zeros((), jnp.int32)
        return Bfloat16State(step, narrow(step, base.init(params)))

    def update(grads: Any, state: Bfloat16State, params: Any = None) -> tuple[Any, Bfloat16State]:
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state.base)
        direction, inner = base.update(grads, wide, params)
        step = state.step + 1
        return direction, Bfloat16State(step, narrow(step, inner))

    return optax.GradientTransformation(init, update)


def stochastic_round(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Returns float32 `x` rounded stochastically to bfloat16, with mean x (Gupta et al. 2015, section 2).

    The draw for each element depends only on its index and on `seed`, uint32, on any devices.
    """
    strides = [np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32) for axis in range(x.ndim)]
    place = sum(jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride for axis, stride in enumerate(strides))
    noise = mixed(place + mixed(seed)) >> 16
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise  # bfloat16 is the upper half of float32
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def mixed(x: jax.Array) -> jax.Array:
    """Returns a bijective hash of uint32 `x`: the finalizer of Appleby's MurmurHash3.

    These few elementwise operations fuse with the update, so no array of random numbers is stored.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
