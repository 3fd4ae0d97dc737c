"""What the backward pass of a loop's body keeps of each turn."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

# Primitives that are not run again: products, kernels, random numbers.
COSTLY = frozenset({'dot_general', 'conv_general_dilated', 'ragged_dot_general', 'pallas_call', 'random_bits'})


def keep_what_follows(function: Callable[[jax.Array, Any], jax.Array]) -> Callable[[jax.Array, Any], jax.Array]:
    """Returns function(x, fixed), whose backward pass keeps what follows from x and makes the rest from `fixed` again.

    A loop with the same `fixed` in each turn would else keep slices and casts of weights, masks and angles, once a
    turn; what `COSTLY` primitives make of `fixed` is kept. Checkpoints inside `function` hold as ever, which a policy
    of `jax.checkpoint` around it would overrule. The result has the shape and the dtype of x.
    """

    @jax.custom_vjp
    def kept(x: jax.Array, fixed: Any) -> jax.Array:
        return function(x, fixed)

    def forward(x: jax.Array, fixed: Any) -> tuple[jax.Array, Any]:
        y, pull = jax.vjp(function, x, fixed)
        traced = jax.make_jaxpr(lambda x, fixed: jax.tree.leaves(jax.vjp(function, x, fixed)[1]))(x, fixed)
        follows = _follow(traced.jaxpr, len(jax.tree.leaves(x)))
        return y, (fixed, [leaf if it else None for leaf, it in zip(jax.tree.leaves(pull), follows, strict=True)])

    def backward(residuals: Any, dy: jax.Array) -> Any:
        fixed, leaves = residuals
        again, tree = jax.tree.flatten(jax.vjp(function, jnp.zeros_like(dy), fixed)[1])
        found = [made if leaf is None else leaf for made, leaf in zip(again, leaves, strict=True)]
        return jax.tree.unflatten(tree, found)(dy)

    kept.defvjp(forward, backward)
    return kept


def _follow(jaxpr: Any, first: int) -> list[bool]:
    """Returns which results of a traced function follow from its `first` arguments, or from costly primitives."""
    found = set(jaxpr.invars[:first])

    def among(variables: Sequence[Any]) -> list[bool]:
        return [not isinstance(each, jax.extend.core.Literal) and each in found for each in variables]

    for equation in jaxpr.eqns:
        if any(among(equation.invars)) or _costly(equation):
            found |= set(equation.outvars)
    return among(jaxpr.outvars)


def _costly(equation: Any) -> bool:
    inner = jax.extend.core.jaxprs_in_params(equation.params)
    return equation.primitive.name in COSTLY or any(_costly(each) for jaxpr in inner for each in jaxpr.eqns)
