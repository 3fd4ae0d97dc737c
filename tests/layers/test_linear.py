"""Low-rank adapters merged into their kernels."""

import jax.numpy as jnp
import numpy as np

from tformer.layers.linear import merge_lora


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
