"""The kernel of softmax's sums on the chip, against float64, as losses read them: values and gradients.

Logits of the first two tokens hold equal largest ones and infinities.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import accelerator
from tformer.layers import heads
from tformer.layers.accelerators import softmax_kernel

pytestmark = pytest.mark.accelerator

SIZES = ((10_304, 10_304), (9_024, 9_018), (8192, 8192))  # with the padding, and without
CLOSE = 2e-6  # of sums of numbers near 1, relative


def make(width, size):
    """Returns (logits [2, 3, width], targets): what is behind `size` must not matter."""
    rng = np.random.default_rng(0)
    logits = np.float32(3 * rng.standard_normal((2, 3, width)))
    logits[0, 0] = np.round(logits[0, 0])
    logits[0, 1, 7:] = -np.inf
    logits[..., size:] = 1e4
    return logits, np.array([[np.argmax(logits[0, 0, :size]), 3, 5], [6, size - 1, np.argmax(logits[1, 2, :size])]])


@pytest.mark.parametrize(('width', 'size'), SIZES)
def test_statistics_of_logits_and_their_gradient_are_those_of_float64(monkeypatch, width, size):
    if accelerator.MODE == 'chip' and jax.default_backend() != 'gpu':
        pytest.skip('the kernel is for GPUs')
    kernel, called = softmax_kernel.sums, []
    monkeypatch.setattr(heads, 'platform', lambda: 'gpu')
    monkeypatch.setattr(
        softmax_kernel, 'sums', lambda *given: called.append(1) or kernel(*given, interpret=accelerator.MODE == 'cpu')
    )
    logits, targets = make(width, size)

    @jax.jit
    def program(logits, targets):
        def read(logits):
            found = heads.token_statistics(logits, targets, size=size)
            return found.normalizer - found.target, found

        nll, pull, found = jax.vjp(read, logits, has_aux=True)
        return nll, found, pull(jnp.ones_like(nll))[0]

    nll, found, slopes = jax.device_get(program(logits, targets))
    assert called
    exact = np.float64(logits[..., :size])
    wanted = special.logsumexp(exact, -1)
    np.testing.assert_allclose(found.normalizer, wanted, rtol=CLOSE)
    np.testing.assert_allclose(nll, wanted - np.take_along_axis(exact, targets[..., None], -1)[..., 0], rtol=CLOSE)
    np.testing.assert_array_equal(found.correct, np.argmax(exact, -1) == targets)
    finite = np.isfinite(exact).all(-1)
    np.testing.assert_allclose(found.mean[finite], exact.mean(-1)[finite], atol=CLOSE * np.abs(exact[finite]).mean())
    np.testing.assert_allclose(slopes[..., :size], special.softmax(exact, -1) - np.eye(size)[targets], atol=CLOSE)
    assert not slopes[..., size:].any()
