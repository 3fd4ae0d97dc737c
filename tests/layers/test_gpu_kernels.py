"""The kernels of activations and of softmax's sums, interpreted: by hand, on meshes, and where a GPU uses them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import activation_cases
from comparing import errors
from tformer.config import Mesh, Model
from tformer.distributed import meshes, sharding
from tformer.layers import heads, linear, mlp, products
from tformer.layers.accelerators import activation_kernel, softmax_kernel
from tformer.layers.resolved import resolve_model

ROUNDOFF = 2.0**-9


def activation(name):
    return functools.partial(activation_kernel.activate, activation_kernel.Options(mlp.WIDE[name], interpret=True))


@pytest.mark.parametrize('name', mlp.WIDE)
@pytest.mark.parametrize('shape', [(2, 33, 256), (1, 3, 384), (4, 32, 128)])  # that tiles do and do not divide
def test_an_activation_and_the_gradients_of_its_input_and_bias_are_those_of_float64(name, shape):
    given = activation_cases.make(shape)
    found = activation_cases.run(activation(name), *given)
    off = errors(found, activation_cases.by_hand(name, *given))
    assert off.pop('bias') < 1e-5
    assert max(off.values()) < ROUNDOFF


def test_the_normal_distribution_is_exact_to_the_digits_of_bfloat16_in_its_tails_too():
    x = np.linspace(-5, 5, 4001)
    exact, found = activation_cases.normal(x)[0], jax.jit(activation_kernel.normal_cdf)(jnp.float32(x))
    np.testing.assert_allclose(found, exact, rtol=2.0**-9)
    np.testing.assert_allclose(found, exact, atol=3e-7)


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [{'data': 2, 'fsdp': 2}, {'data': 1, 'tensor': 4}, {'data': 2, 'tensor': 2}])
@pytest.mark.parametrize('features', (512, 128))  # 128 does not fill the tiles of the devices that share it
def test_each_device_activates_its_own_tokens_and_features(sizes, features):
    given, kernel, mesh = activation_cases.make((4, 12, features)), activation('gelu'), Mesh(**sizes)
    with sharding.placed(meshes.make_mesh(mesh, jax.devices()[:4]), mesh):
        found = activation_cases.run(kernel, *given)
        text = jax.jit(kernel).lower(*given[:2]).as_text()
    assert 'shard_map' in text or 'manual_computation' in text
    for what, wanted in activation_cases.run(kernel, *given).items():
        np.testing.assert_allclose(
            np.float64(found[what]), np.float64(wanted), rtol=2 * ROUNDOFF, atol=1e-4, err_msg=what
        )


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Modules of layers take the GPU's way, whose kernels are interpreted; gives the names of those that are called."""
    called, activate, sums = [], activation_kernel.activate, softmax_kernel.sums
    for module in (mlp, heads, linear, products):
        monkeypatch.setattr(module, 'platform', lambda: 'gpu')
    monkeypatch.setattr(
        activation_kernel,
        'activate',
        lambda options, *given: called.append('activation') or activate(options._replace(interpret=True), *given),
    )
    monkeypatch.setattr(softmax_kernel, 'sums', lambda *given: called.append('softmax') or sums(*given, interpret=True))
    return called


FEED_FORWARD = {'emb_dim': 32, 'mlp_dim': 128, 'dtype': 'bfloat16'}


def feed_forward(called, x, rngs=None, rate=None, **fields):
    """Returns (the feed-forward of x, its gradients) for random parameters; `called` has what this calls."""
    layer = mlp.Mlp(resolve_model(Model(**FEED_FORWARD | fields)), 'encoder')
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    shapes, treedef = jax.tree.flatten(sharding.unboxed(shapes))
    rng = np.random.default_rng(0)
    variables = jax.tree.unflatten(treedef, [jnp.float32(0.3 * rng.standard_normal(each.shape)) for each in shapes])

    called.clear()

    def apply(variables, x):
        return layer.apply(variables, x, None, rate, rngs=rngs)

    y, pull = jax.vjp(apply, variables, x)
    return y, pull(jnp.asarray(np.random.default_rng(1).standard_normal(y.shape), y.dtype))


@pytest.mark.slow
@pytest.mark.parametrize('fields', [{'activation': 'gelu'}, {'activation': 'gelu_tanh', 'mlp_bias': False}])
def test_a_feed_forward_on_a_gpu_is_that_of_float32_with_all_gradients(on_a_gpu, fields):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 5, 32)), jnp.bfloat16)
    found = feed_forward(on_a_gpu, x, **fields)
    assert on_a_gpu == ['activation']
    exact = feed_forward(on_a_gpu, x.astype(jnp.float32), **fields | {'dtype': 'float32'})
    assert on_a_gpu == []
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        mine, theirs = np.float64(mine), np.float64(theirs)
        assert np.linalg.norm(mine - theirs) < 8 * ROUNDOFF * np.linalg.norm(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('shape', 'fields', 'rate'),
    [
        ((2, 1, 32), {}, None),  # a step of decoding
        ((2, 5, 32), {'mlp_dim': 72}, None),
        ((2, 5, 32), {'activation': 'silu'}, None),
        ((2, 5, 32), {}, 0.5),  # XLA joins activation and dropout
    ],
)
def test_other_activations_stay_with_xla(on_a_gpu, shape, fields, rate):
    x = jnp.ones(shape, jnp.bfloat16)
    feed_forward(on_a_gpu, x, {'dropout': jax.random.key(0)}, rate, **{'activation': 'gelu'} | fields)
    assert on_a_gpu == []


LOGITS = np.float32(3 * np.random.default_rng(0).standard_normal((2, 3, 8202)))
LOGITS[0, 0] = np.round(LOGITS[0, 0])  # some are equal
LOGITS[0, 0, [100, 100 + softmax_kernel.BLOCK]] = 99  # and two of the largest in one place of their blocks
LOGITS[0, 1, 9:] = -np.inf
TARGETS = np.array([[LOGITS[0, 0].argmax(), 3, 8201], [0, 7, LOGITS[1, 2].argmax()]])


def statistics(logits, **size):
    """Returns (statistics, the gradients of some function of them)."""

    def read(logits):
        found = heads.token_statistics(logits, TARGETS, **size)
        total = jnp.sum(found.normalizer**2 - found.target)
        return total + jnp.sum(jnp.where(jnp.isfinite(found.mean), found.mean, 0) ** 2), found

    (_, found), slopes = jax.jit(jax.value_and_grad(read, has_aux=True))(logits)
    return found, slopes


def test_statistics_of_padded_logits_are_those_without_padding(on_a_gpu):
    """The kernel reads what other platforms do; infinities, and the first of equal logits."""
    found, slopes = statistics(np.pad(LOGITS, [(0, 0), (0, 0), (0, 54)], constant_values=1e6), size=8202)
    assert on_a_gpu == ['softmax']
    wanted, expected = statistics(LOGITS)  # 8,202 numbers do not begin at 16 bytes
    assert on_a_gpu == ['softmax']
    for name in ('normalizer', 'target', 'mean'):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-6, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(found.correct, wanted.correct)
    assert found.correct[0, 0] and found.correct[1, 2]
    np.testing.assert_allclose(slopes[..., :8202], expected, rtol=1e-5, atol=1e-7)
    assert not slopes[..., 8202:].any()


def test_a_row_with_a_number_that_is_none_has_no_loss():
    logits = np.zeros((1, 2, 8192), np.float32)
    logits[0, 0, 5000] = np.nan
    _, total, _, plain = softmax_kernel.sums(jnp.asarray(logits), 8192, interpret=True)
    np.testing.assert_array_equal(np.isnan(total), [[True, False]])
    np.testing.assert_array_equal(np.isnan(plain), [[True, False]])


@pytest.mark.parametrize(('tensor', 'calls'), [(1, 1), (2, 0)])
def test_each_device_reads_its_own_tokens_unless_the_vocabulary_is_split(on_a_gpu, tensor, calls):
    mesh = Mesh(data=2, tensor=tensor)
    logits = LOGITS[..., :8192]
    with sharding.placed(meshes.make_mesh(mesh, jax.devices()[: 2 * tensor]), mesh):
        found = jax.jit(lambda x: heads.token_statistics(x, TARGETS % 8192))(logits)
    assert len(on_a_gpu) == calls
    np.testing.assert_allclose(found.normalizer, jax.nn.logsumexp(logits, -1), rtol=1e-6)


@pytest.mark.parametrize('padded', (True, False))
@pytest.mark.parametrize('biased', (True, False))
def test_a_product_with_padding_has_the_values_and_gradients_of_one_without(on_a_gpu, padded, biased):
    rng = np.random.default_rng(0)
    x, table = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((2, 3, 16), (30, 16)))
    bias = jnp.float32(rng.standard_normal(30)) if biased else None
    dy = jnp.asarray(rng.standard_normal((2, 3, 30)), jnp.bfloat16).astype(jnp.float32)

    def times(x, table, bias):
        return linear.product('BTW,VW->BTV', x, table, jnp.float32, None, bias, padded)

    def plain(x, table, bias):
        y = jnp.einsum('BTW,VW->BTV', x.astype(jnp.float32), table.astype(jnp.float32))
        return y if bias is None else y + bias[None, None]

    y, pull = jax.vjp(times, x, table, bias)
    assert y.shape[-1] == (64 if padded else 30)
    wanted, expected = jax.vjp(plain, x, table, bias)
    np.testing.assert_allclose(y[..., :30], wanted, rtol=1e-5, atol=1e-5)
    given = jnp.pad(dy, [(0, 0), (0, 0), (0, 34)]) if padded else dy
    for mine, theirs in zip(jax.tree.leaves(pull(given)), jax.tree.leaves(expected(dy)), strict=True):
        np.testing.assert_allclose(np.float64(mine), np.float64(theirs), rtol=2 * ROUNDOFF, atol=1e-5)


def test_two_readers_of_a_stream_give_the_sum_of_their_gradients(on_a_gpu):
    def read(fork, x):
        first, second = fork(x)
        return jnp.sum(first**2) + jnp.sum(jnp.sin(second))

    x = jnp.linspace(0, 1, 8)
    slopes = jax.grad(functools.partial(read, products.fork))(x)
    np.testing.assert_array_equal(slopes, jax.grad(functools.partial(read, lambda x: (x, x)))(x))


def test_relu_keeps_its_result_and_not_its_input():
    x = jnp.asarray([-1.0, 0.0, 2.0])
    y, pull = jax.vjp(mlp.relu, x)
    np.testing.assert_array_equal(pull(jnp.ones(3))[0], [0, 0, 1])
    assert all(kept.shape != x.shape or bool((kept == y).all()) for kept in jax.tree.leaves(pull))
