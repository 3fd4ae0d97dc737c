"""A position bias by distance, as `mosaic` takes it, is the bias of all pairs, in whole models, with its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import make
from tformer.config import Mesh
from tformer.distributed import meshes, sharding
from tformer.layers import kernel_choice, masks
from tformer.layers.accelerators import mosaic
from tformer.layers.dropout import DropoutRates
from tformer.layers.parallel import ring_attention, ring_kernels

T, S = 9, 7
MODELS = {
    'decoder, alibi': ('decoder', {'position': 'alibi'}),
    'decoder, relative': ('decoder', {'position': 'relative', 'relative_buckets': 8, 'relative_max_distance': 6}),
    'a table a layer': ('decoder', {'position': 'relative', 'relative_per_layer': True, 'num_kv_heads': 2}),
    'encoder, windows in some layers': (
        'encoder',
        {'position': 'relative', 'num_encoder_layers': 2, 'attention_pattern': ('local', 'global'), 'window': 3},
    ),
    'both': ('encoder_decoder', {'position': 'relative'}),
    'both, across too': ('encoder_decoder', {'position': 'alibi', 'cross_position': True}),
}
WITH_PREFIX = 'a prefix'


@pytest.fixture
def given(monkeypatch):
    """The biases of pairs and by distance that attention is given, where `mosaic` takes the place of `reference`."""
    seen = []

    def spied(q_BNTH, k_BKSH, v_BKSU, mask, options):
        seen.append((options.bias is not None, options.bias_1NX is not None))
        return mosaic.mosaic(q_BNTH, k_BKSH, v_BKSU, mask, options, interpret=True)

    def use():
        every = frozenset(kernel_choice.FEATURES)
        kernel = kernel_choice.Kernel(spied, every, ordered=True, by_distance=True)
        monkeypatch.setitem(kernel_choice.KERNELS, 'reference', kernel)
        return seen

    return use


def batch_of(family, packed, prefix, T=T):
    """Rows of two texts, or of one and padding."""
    rng = np.random.default_rng(0)

    def side(name, length):
        cut = length // 2
        places = np.broadcast_to(np.arange(length), (2, length))
        second = places >= cut
        if packed:
            positions, segments = np.where(second, places - cut, places), 1 + second
        else:
            positions, segments = np.where(places < np.array([[length], [cut]]), places, -1), None
        made = {'inputs': rng.integers(1, 11, (2, length)), 'positions': positions, 'segment_ids': segments}
        return {f'{name}{key}': np.asarray(x, np.int32) for key, x in made.items() if x is not None}

    batch = side('', T) | (side('encoder_', S) if family == 'encoder_decoder' else {})
    return batch | ({'prefix': (batch['positions'] >= 0) & (batch['positions'] < 2)} if prefix else {})


def value_and_gradients(model, variables, batch, order, scale=1.0):
    """Returns the gradients of a random sum of the output, times `scale`, and the output."""
    real = (batch['positions'] >= 0)[..., None]

    @jax.jit
    def program(variables):
        def loss(variables):
            out = jnp.where(real, model.apply(variables, batch, DropoutRates()), 0)
            weights = np.random.default_rng(1).standard_normal(out.shape) * scale
            if order == 'zigzag':
                weights = weights[:, ring_attention.zigzag(out.shape[1], WAYS)]
            return (out * weights).sum(), out

        with masks.ordered(order):
            return jax.grad(loss, has_aux=True)(variables)

    return program(variables)


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('name', [*MODELS, WITH_PREFIX])
def test_by_distance_and_by_pairs_are_one_model(given, name, packed):
    family, fields = MODELS['decoder, relative'] if name == WITH_PREFIX else MODELS[name]
    model, variables = make(family, **fields)
    batch = batch_of(family, packed, name == WITH_PREFIX)
    expected = value_and_gradients(model, variables, batch, 'behind')
    seen = given()
    found = value_and_gradients(model, variables, batch, 'behind')
    assert (False, True) in seen
    assert ((True, False) in seen) == (name == 'both, across too'), 'places across do not tell a distance'
    assert_same(found, expected)


def test_positions_in_an_unknown_order_are_compared(given):
    family, fields = MODELS['decoder, relative']
    model, variables = make(family, **fields)
    batch = batch_of(family, packed=False, prefix=False)
    batch['positions'] = batch['positions'][:, ::-1].copy()
    expected = value_and_gradients(model, variables, batch, None)
    seen = given()
    assert_same(value_and_gradients(model, variables, batch, None), expected)
    assert seen and all(pairs for pairs, _ in seen)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [Mesh(data=2, tensor=4, rules='fsdp_tp'), Mesh(data=2, pipeline=2)])
def test_a_table_has_one_gradient_on_every_mesh(given, mesh):
    family, fields = MODELS['decoder, relative']
    model, variables = make(family, **fields)
    batch = {name: np.concatenate([x, x]) for name, x in batch_of(family, packed=True, prefix=False).items()}
    variables = jax.device_get(sharding.unboxed(variables))
    expected = jax.device_get(value_and_gradients(model, variables, batch, 'behind'))
    given()
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        found = jax.device_get(value_and_gradients(model, variables, batch, 'behind'))
    assert_same(found, expected)


WAYS = 4  # of a ring


def in_a_ring(model, variables, batch, scale=1.0):
    """The output and gradients on a mesh that splits rows, those of a decoder in zigzag."""
    mesh, balanced = Mesh(data=2, context=WAYS), model.cfg.family == 'decoder'
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        batch, order = ring_attention.balance(batch) if balanced else (batch, 'behind')
        grads, out = jax.device_get(value_and_gradients(model, variables, batch, order, scale))
    length = out.shape[1]
    return grads, out[:, np.argsort(ring_attention.zigzag(length, WAYS))] if balanced else out


@pytest.mark.parametrize('name', ['decoder, alibi', 'a table a layer', 'encoder, windows in some layers'])
@pytest.mark.proof
def test_a_ring_takes_it_by_distance(given, monkeypatch, name):
    family, fields = MODELS[name]
    model, variables = make(family, max_len=1024, **fields)
    batch, scale = batch_of(family, packed=True, prefix=False, T=1024), (T / 1024) ** 0.5  # gradients of T tokens' size
    variables = jax.device_get(sharding.unboxed(variables))
    expected = jax.device_get(value_and_gradients(model, variables, batch, 'behind', scale))
    seen = given()
    monkeypatch.setitem(ring_kernels.OF_KERNELS, 'reference', ('mosaic',))
    ring, rings = functools.partial(ring_kernels.ring, interpret=True), []
    monkeypatch.setattr(ring_kernels, 'ring', lambda *given: rings.append(given[-1].bias_1NX) or ring(*given))
    assert_same(in_a_ring(model, variables, batch, scale), expected)
    assert rings and not seen and all(bias is not None for bias in rings)


@pytest.mark.slow
def test_a_short_ring_takes_the_bias_of_pairs(given, monkeypatch):
    family, fields = MODELS['decoder, relative']
    model, variables = make(family, **fields)
    batch = batch_of(family, packed=True, prefix=False, T=16)
    variables = jax.device_get(sharding.unboxed(variables))
    expected = jax.device_get(value_and_gradients(model, variables, batch, 'behind'))
    given()
    monkeypatch.setitem(ring_kernels.OF_KERNELS, 'reference', ('mosaic',))
    assert_same(in_a_ring(model, variables, batch), expected)


@pytest.mark.slow
def test_attention_that_is_looked_at_has_the_bias(given):
    """Its maps are made by the definition, whatever the kernel."""
    family, fields = MODELS['decoder, relative']
    model, variables = make(family, **fields)
    batch = batch_of(family, packed=False, prefix=False)
    expected, _ = model.apply(variables, batch, mutable=['intermediates'])
    given()
    with masks.ordered('behind'):
        found, _ = model.apply(variables, batch, mutable=['intermediates'])
    np.testing.assert_allclose(found, expected)
