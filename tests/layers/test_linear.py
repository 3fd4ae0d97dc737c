"""Low-rank adapters merged into their kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.distributed.sharding import unboxed
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
