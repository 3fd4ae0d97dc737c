"""The spread of initial values by the formulas of the papers, and what muP makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Model
from tformer.layers.heads import VocabularyHead
from tformer.layers.initializers import make_initializer
from tformer.layers.resolved import resolve_model

D, F, HEADS = 64, 256, 4


def spread(cfg: Model, role: str, fan_in: int, fan_out: int, stack: str = 'decoder') -> float:
    """Returns the standard deviation of 40,000 initial values: within 2 % of the true one at five standard errors."""
    draw = make_initializer(resolve_model(cfg), role, fan_in, fan_out, stack)
    return float(jnp.std(draw(jax.random.key(0), (200, 200), jnp.float32)))


def model(initializer: str, width: int = D, **fields) -> Model:
    sizes = {'emb_dim': width, 'mlp_dim': F, 'num_heads': HEADS, 'num_encoder_layers': 2, 'num_decoder_layers': 3}
    return Model(**{'family': 'decoder', 'initializer': initializer, **sizes, **fields})


@pytest.mark.parametrize(
    ('initializer', 'role', 'wanted'),
    [
        ('xavier', 'mlp_in', (2 / (D + F)) ** 0.5),
        ('xavier', 'embedding', D**-0.5),
        ('lecun', 'mlp_in', D**-0.5),
        ('truncated_normal', 'mlp_in', 0.02 * 0.87962566),  # cut at two deviations
        ('gpt2', 'query', 0.02),
        ('gpt2', 'attention_out', 0.02 / 6**0.5),  # 3 layers of 2 sub-layers
        ('gpt2', 'mlp_out', 0.02 / 6**0.5),
        ('t5', 'embedding', 1.0),
        ('t5', 'query', (D * D / HEADS) ** -0.5),
        ('t5', 'key', D**-0.5),
        ('deepnorm', 'query', (2 / (D + F)) ** 0.5),
        ('deepnorm', 'value', (8 * 3) ** -0.25 * (2 / (D + F)) ** 0.5),
    ],
)
def test_a_deviation_is_that_of_its_paper(initializer, role, wanted):
    np.testing.assert_allclose(spread(model(initializer), role, D, F), wanted, rtol=0.02)


def test_a_decoder_with_an_encoder_adds_three_times_a_layer():
    cfg = model('gpt2', family='encoder_decoder')
    np.testing.assert_allclose(spread(cfg, 'mlp_out', F, D, 'decoder'), 0.02 / 9**0.5, rtol=0.02)
    np.testing.assert_allclose(spread(cfg, 'mlp_out', F, D, 'encoder'), 0.02 / 4**0.5, rtol=0.02)


@pytest.mark.parametrize(
    ('role', 'fans', 'base', 'shrinks'),
    [
        ('mlp_in', (4 * D, 4 * F), (D, F), 0.5),  # hidden: as the base over the root of the factor
        ('embedding', (4 * D, 100), (D, 100), 1.0),
        ('output', (4 * D, 100), (D, 100), 1.0),
    ],
)
def test_mup_starts_from_the_base_width(role, fans, base, shrinks):
    """Yang et al. 2022, table 8, at four times the base width."""
    wide = model('lecun', 4 * D, mlp_dim=4 * F, parametrization='mup', base_emb_dim=D)
    np.testing.assert_allclose(spread(wide, role, *fans), shrinks * spread(model('lecun'), role, *base), rtol=0.03)


def test_mup_divides_the_logits_by_the_factor_in_width():
    logits = []
    for fields in ({}, {'parametrization': 'mup', 'base_emb_dim': D // 4}):
        cfg = resolve_model(model('xavier', **fields, vocab_size=5))
        tied = lambda x, *_: x[..., :5]  # noqa: E731
        logits.append(VocabularyHead(cfg).apply({}, jnp.ones((1, 1, D)), jnp.ones((1, 1), bool), tied))
    np.testing.assert_allclose(logits[1], logits[0] / 4)
