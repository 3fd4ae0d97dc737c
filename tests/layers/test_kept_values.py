"""What a loop keeps of each turn for its backward pass."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from comparing import relative
from tformer.layers.parallel.kept_values import Kept

TURNS, B, D = 11, 3, 6
CAST, MASK, INNER, WIDE, PRODUCT, DRAWN = 13, 17, 19, 23, 29, 31  # widths of what one turn computes, which name it


def body(x_BD, fixed):
    """A turn that casts a weight, compares positions, computes within a checkpoint, multiplies weights and draws."""
    weights, positions, key, turn = fixed
    cast = weights['cast'][turn % 2].astype(jnp.bfloat16)
    h = (jnp.tanh(x_BD.astype(jnp.bfloat16) @ cast) @ cast.T).astype(jnp.float32)
    seen = jnp.where(positions[:, None] > positions[None] + turn % 3, 1.0, 0.5)
    h += (jnp.sin(x_BD @ weights['mask'])[:, None] * seen[None]).sum(1) @ weights['mask'].T
    h += jax.checkpoint(lambda x, w: jnp.exp(jnp.sin(x @ w)) @ w.T, prevent_cse=False)(x_BD, weights['inner'])
    product = (jnp.cos(0.1 * turn) * weights['left']) @ weights['right']
    h += jnp.sin(x_BD @ product) @ product.T
    kept = jax.random.bernoulli(jax.random.fold_in(key, turn), 0.5, (D, DRAWN))
    drawn = jnp.where(kept, weights['drawn'], 0.0)
    return x_BD + h + jnp.sin(x_BD @ drawn) @ drawn.T


def kept_of(function):
    """The function with the two passes of `Kept` as its gradient."""
    passes, whole = Kept(function, (False, False, False, True)), jax.custom_vjp(function)

    def forward(x, fixed):
        y, kept = passes.forward(x, fixed)
        return y, (fixed, kept)

    whole.defvjp(forward, lambda residuals, dy: passes.backward(*residuals, dy))
    return whole


def arguments():
    shapes = {
        'cast': (2, D, CAST), 'mask': (D, MASK), 'inner': (D, INNER), 'left': (D, WIDE), 'right': (WIDE, PRODUCT),
        'drawn': (D, DRAWN),
    }  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    weights = {
        name: 0.05 * jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=False)
    }
    return weights, jax.random.normal(keys[-1], (B, D))


def total(function, weights, x_BD):
    fixed = weights, jnp.arange(MASK), jax.random.key(7)
    y_BD, _ = jax.lax.scan(lambda x, turn: (function(x, (*fixed, turn)), None), x_BD, jnp.arange(TURNS))
    return jnp.sum(jnp.sin(y_BD))


def kept_shapes(function):
    """The shapes of one turn of which the loops of a gradient hold one for each turn."""
    program = str(jax.make_jaxpr(jax.grad(lambda *each: total(function, *each), (0, 1)))(*arguments()))
    return {tuple(map(int, shape.split(','))) for shape in re.findall(rf'\w+\[{TURNS},([\d,]+)\]', program)}


def test_gradients_are_those_of_the_function():
    found, expected = (
        jax.jit(jax.value_and_grad(lambda *each, of=of: total(of, *each), (0, 1)))(*arguments())
        for of in (kept_of(body), body)
    )
    assert max(jax.tree.leaves(jax.tree.map(relative, found, expected))) < 1e-6


def test_what_follows_from_the_carry_is_kept_and_casts_of_weights_and_masks_are_made_again():
    kept = kept_shapes(kept_of(body))
    assert {(B, CAST), (B, MASK), (B, PRODUCT), (B, DRAWN)} <= kept
    again = {(D, CAST), (1, MASK, MASK)}
    assert not kept & again and again <= kept_shapes(body)


def test_a_checkpoint_inside_holds_which_a_policy_around_it_would_overrule():
    around = jax.checkpoint(body, policy=lambda primitive, *_, **__: primitive.name != 'slice', prevent_cse=False)
    assert (B, INNER) in kept_shapes(around)
    assert (B, INNER) not in kept_shapes(kept_of(body))


@pytest.mark.parametrize(('shape', 'what'), [((D, PRODUCT), 'products'), ((D, DRAWN), 'random numbers')])
def test_costly_results_are_not_computed_again(shape, what):
    assert shape in kept_shapes(kept_of(body)), what


def test_each_result_within_a_call_is_kept_or_made_anew_by_itself():
    """A function on each device: of its results some follow from x, some from weights alone, and two are the same."""
    mesh = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (same(x), None), lambda _, dy: (dy,))

    def on_device(x_BD, w_DF):
        left, right = jnp.tanh(w_DF) @ jnp.ones((WIDE, PRODUCT)), jnp.cos(w_DF)
        return x_BD @ left, x_BD @ right, jnp.sin(x_BD)

    def function(x_BD, fixed):
        each = jax.shard_map(on_device, mesh=mesh, in_specs=(P('data'), P()), out_specs=P('data'))
        a, b, h = each(x_BD, fixed[0])
        h += (same(x_BD) @ fixed[0] + same(x_BD) @ jnp.cos(fixed[0])) @ jnp.ones((WIDE, D))
        return x_BD + h + a @ jnp.ones((PRODUCT, D)) + jnp.sin(b) @ jnp.ones((WIDE, D))

    weights, x_BD = arguments()
    fixed = (weights['left'], None, None, None)
    passes = Kept(function, (False, None, None, None))
    shapes = [each.shape for each in jax.eval_shape(passes.forward, x_BD, fixed)[1]]
    assert sorted(shapes) == [(B, D), (B, D), (B, WIDE)], shapes  # x of all products, cos(x), cos(b)
    found, expected = (
        jax.grad(lambda x, w, of=of: jnp.sum(jnp.sin(of(x, (w, *fixed[1:])))), (0, 1))(x_BD, fixed[0])
        for of in (kept_of(function), function)
    )
    assert max(jax.tree.leaves(jax.tree.map(relative, found, expected))) < 1e-6
