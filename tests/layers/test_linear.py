"""Products with kernels: in two dtypes, of sizes that suit a GPU, and low-rank adapters merged into their kernels."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.distributed.sharding import unboxed
from tformer.layers import linear
from tformer.layers.linear import Dense, merge_lora
from tformer.layers.resolved import resolve_model


def test_a_merged_kernel_adds_alpha_over_the_rank_times_the_product():
    """Hu et al. 2022, 4.1: alpha 6 and rank 2 make 3; two layers lie side by side."""
    rng = np.random.default_rng(0)
    kernel, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4), (2, 3, 2), (2, 2, 4)))
    for part in (slice(None), 0):
        adapter = {name: {'kernel': jnp.asarray(x[part])} for name, x in (('lora_a', a), ('lora_b', b))}
        params = {'query': {'kernel': jnp.asarray(kernel[part]), 'bias': jnp.ones(4), **adapter}}
        merged = merge_lora(params, 6.0)
        assert merged['query'].keys() == {'kernel', 'bias'}
        np.testing.assert_allclose(merged['query']['kernel'], kernel[part] + 3 * a[part] @ b[part], rtol=1e-5)


def test_the_first_kernel_of_an_adapter_starts_as_a_layer_of_its_own_inputs():
    """LeCun et al. 1998: the variance is 1 over the inputs, of which the second kernel has only the rank's."""
    cfg = resolve_model(Model(initializer='lecun', lora_rank=16, lora_targets=('mlp_in',)))
    layer = Dense(cfg, 'BTD,DF->BTF', (400, 3), ('embed', 'mlp'), role='mlp_in', stack='decoder')
    params = unboxed(layer.init(jax.random.key(0), jnp.zeros((1, 1, 400)))['params'])
    assert np.std(params['lora_a']['kernel']) == pytest.approx(1 / 20, rel=0.03)
    assert params['lora_b']['kernel'].shape == (16, 3) and not params['lora_b']['kernel'].any()


def products(jaxpr):
    """Returns the dtypes and shapes of the operands of all products."""
    found = []
    for each in jaxpr.eqns:
        if each.primitive.name == 'dot_general':
            found.append([(x.aval.dtype, x.aval.shape) for x in each.invars])
        for inner in jax.extend.core.jaxprs_in_params(each.params):
            found += products(inner)
    return found


@pytest.mark.parametrize(('platform', 'size'), [('cpu', 70), ('gpu', 128)])
def test_products_of_bfloat16_with_wide_results_are_of_bfloat16_backwards_too(monkeypatch, platform, size):
    """On a GPU the axis of the results is padded; values and gradients are those of float32 but for rounding."""
    monkeypatch.setattr(linear, 'platform', lambda: platform)
    rng = np.random.default_rng(0)
    x, kernel, dy = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, 3, 8), (70, 8), (2, 3, 70)))
    dy = dy.astype(jnp.float32)

    def pulled(x, kernel, dy):
        y, pull = jax.vjp(lambda x, kernel: linear.product('BTW,VW->BTV', x, kernel, jnp.float32), x, kernel)
        return y, *pull(dy)

    y, dx, dkernel = pulled(x, kernel, dy)
    assert (y.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    operands = products(jax.make_jaxpr(pulled)(x, kernel, dy).jaxpr)
    assert {dtype for each in operands for dtype, _ in each} == {jnp.dtype('bfloat16')}
    assert all(size in shape for each in operands for _, shape in each if shape[-1] != 8 or len(shape) == 2)
    x, kernel, dy = (np.asarray(each, np.float32) for each in (x, kernel, dy))
    np.testing.assert_allclose(y, np.einsum('BTW,VW->BTV', x, kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx.astype(np.float32), np.einsum('BTV,VW->BTW', dy, kernel), rtol=0.02, atol=0.05)
    np.testing.assert_allclose(dkernel.astype(np.float32), np.einsum('BTV,BTW->VW', dy, x), rtol=0.02, atol=0.05)


def test_the_gradient_of_a_bias_is_the_whole_sum_over_tokens():
    """Of numbers between 0 and 1 of 4,096 tokens, to float32's precision; in bfloat16 a sum of 512 takes no 1 more."""
    cfg = resolve_model(Model(dtype='bfloat16', emb_dim=2))
    layer, x = (
        Dense(cfg, 'BTD,DNH->BNTH', (2, 3, 4), ('embed', 'heads', 'head_dim'), bias=True),
        jnp.zeros((4, 1024, 2)),
    )
    params = unboxed(layer.init(jax.random.key(0), x)['params'])
    dy = jax.random.uniform(jax.random.key(1), (4, 3, 1024, 4), jnp.bfloat16)
    pull = jax.jit(lambda params, dy: jax.vjp(lambda params: layer.apply({'params': params}, x), params)[1](dy)[0])
    wanted = np.asarray(dy, np.float64).sum((0, 2))
    np.testing.assert_allclose(pull(params, dy)['bias'], wanted, rtol=1e-5)
