"""Replaced values of one layer and of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.errors import UserError
from tformer.evaluation import activations

X = jnp.array([1.0, 2.0])


@pytest.mark.parametrize('replacement', [jnp.array([7.0, 8.0]), lambda x: x + 6], ids=['an array', 'a function'])
def test_a_replacement_of_one_layer_leaves_the_others(replacement):
    found = [activations._changed(X, replacement, 1, jnp.array(number)) for number in range(3)]
    np.testing.assert_array_equal(found, [[1, 2], [7, 8], [1, 2]])


def test_a_replacement_of_all_layers_is_of_each_its_own():
    stacked = jnp.array([[10.0, 20.0], [30.0, 40.0]])
    found = [activations._changed(X, stacked, None, jnp.array(number)) for number in range(2)]
    np.testing.assert_array_equal(found, stacked)
    np.testing.assert_array_equal(activations._changed(X, lambda x: 2 * x, None, None), [2, 4])
    with pytest.raises(UserError, match=r'a replacement has shape \(1,\), and the value has \(2,\)'):
        activations._changed(X, lambda x: x[:1], None, None)


@pytest.mark.parametrize(
    ('name', 'place'),
    [
        ('decoder.stack.layers.3.attention', ('decoder.stack.layers.attention', 3)),
        ('decoder.stack.layers.attention', ('decoder.stack.layers.attention', None)),
        ('decoder.stack.layers.0', ('decoder.stack.layers', 0)),
        ('output', ('output', None)),
    ],
)
def test_the_number_of_a_layer_is_read_from_its_name(name, place):
    assert activations._place(name) == place


def test_what_has_several_values_is_replaced_by_a_function_alone():
    """A module that runs twice, or gives two arrays, has no layer axis and no one shape."""
    shapes = {'decoder.layers': (jax.ShapeDtypeStruct((2,), 'float32'),) * 2}
    with pytest.raises(
        UserError, match=r"no activation 'decoder\.layers\.1': decoder\.layers has several values, and no"
    ):
        activations._check('decoder.layers.1', shapes)
    with pytest.raises(UserError, match=r'^decoder\.layers has several values: replace it by a function$'):
        activations._array('decoder.layers', 0.0, shapes)
    with pytest.raises(UserError, match=r'one output array can be replaced, and this one has 2$'):
        activations._changed((X, X), lambda x: x, None, None)
