"""What the backward pass of a loop's body keeps of each turn."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

# Primitives that call one function.
CALLS = frozenset({'jit', 'pjit', 'closed_call', 'checkpoint', 'shard_map', 'custom_jvp_call', 'custom_vjp_call'})
# Primitives that are not run again: products, kernels, random numbers.
COSTLY = frozenset({'dot_general', 'conv_general_dilated', 'ragged_dot_general', 'pallas_call', 'random_bits'})


class Kept(NamedTuple):
    """function(x, fixed) as two passes; the backward one gets what follows from x and makes the rest anew from `fixed`.

    A loop would else keep slices and casts of weights, masks and angles, once a turn; what `COSTLY` primitives make
    of the part of `fixed` that is another one in each turn is kept. Checkpoints inside `function` hold as ever, which
    a policy of `jax.checkpoint` around it would overrule. The result has the shape and the dtype of x.
    """

    function: Callable[[jax.Array, Any], jax.Array]
    varies: Any  # for each array of `fixed`, or for a subtree of it, whether it is another one in each turn

    def forward(self, x: jax.Array, fixed: Any) -> tuple[jax.Array, list[jax.Array]]:
        """Returns function(x, fixed) and what is kept for the backward pass."""
        (y, *leaves), _, places = self._traced(x, fixed)
        kept = zip(places, leaves, strict=True)
        return y, list({place: leaf for place, leaf in kept if place is not None}.values())

    def backward(self, fixed: Any, kept: list[jax.Array], dy: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the gradients of x and `fixed`; of integers and keys they have the dtype `float0`."""
        (_, *anew), tree, places = self._traced(jnp.zeros_like(dy), fixed)
        found = [leaf if place is None else kept[place] for leaf, place in zip(anew, places, strict=True)]
        return jax.tree.unflatten(tree, found)(dy)

    def _traced(self, x: jax.Array, fixed: Any) -> tuple[list[jax.Array], Any, list[int | None]]:
        """Returns the result and the arrays that the backward pass needs, their tree, and their places.

        An array's place is that in what is kept; None: it is made anew.
        """
        program, (_, pull) = jax.make_jaxpr(lambda *each: jax.vjp(self.function, *each), return_shape=True)(x, fixed)
        varies = jax.tree.leaves(jax.tree.broadcast(self.varies, fixed))
        given = [_Value(object(), True, True), *(_Value(object(), False, it) for it in varies)]
        _, *found = _values(program.jaxpr, given)
        kept = list(dict.fromkeys(value.name for value in found if value.follows))
        places = [kept.index(value.name) if value.follows else None for value in found]
        return jax.extend.core.jaxpr_as_fun(program)(x, *jax.tree.leaves(fixed)), jax.tree.structure(pull), places


class _Value(NamedTuple):
    """What is known of an array of a traced function."""

    name: Hashable  # arrays of one name are equal
    follows: bool  # from x, or from a costly primitive of what varies
    varies: bool


def _values(jaxpr: Any, given: Sequence[_Value]) -> list[_Value]:
    """Returns what is known of a traced function's results, by what is known of its arguments."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def of(variable: Any) -> _Value:
        literal = isinstance(variable, jax.extend.core.Literal)
        return _Value(object(), False, False) if literal or variable not in known else known[variable]

    for equation in jaxpr.eqns:
        inputs = [of(each) for each in equation.invars]
        if equation.primitive.name in CALLS:
            outputs = _of_call(equation, inputs)
        else:
            varies = any(each.varies for each in inputs)
            follows = any(each.follows for each in inputs) or (varies and _costly(equation))
            outputs = [_Value(object(), follows, varies) for _ in equation.outvars]
        known.update(zip(equation.outvars, outputs, strict=True))
    return [of(each) for each in jaxpr.outvars]


def _of_call(equation: Any, inputs: Sequence[_Value]) -> list[_Value]:
    (inner,) = jax.extend.core.jaxprs_in_params(equation.params)
    if equation.primitive.name != 'shard_map':
        return _values(inner, inputs)
    results = _values(inner, [each._replace(name=object()) for each in inputs])  # of one device
    specs = equation.params['out_specs']
    return [each._replace(name=(each.name, spec)) for each, spec in zip(results, specs, strict=True)]


def _costly(equation: Any) -> bool:
    inner = jax.extend.core.jaxprs_in_params(equation.params)
    return equation.primitive.name in COSTLY or any(_costly(each) for jaxpr in inner for each in jaxpr.eqns)
