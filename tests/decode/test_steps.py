"""What a loop of steps reads: parameters of each layer by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tformer import config
from tformer.decode.generate import make_generate
from tformer.model import build, for_steps

SMALL = {'vocab_size': 24, 'emb_dim': 16, 'mlp_dim': 32, 'num_heads': 2, 'max_len': 32, 'num_decoder_layers': 3}


def made(**fields):
    """Returns a small model, its variables and a batch of two prompts."""
    cfg = config.Model(**{**SMALL, 'num_encoder_layers': 2, **fields})
    tokens_BP = jax.random.randint(jax.random.key(1), (2, 5), 2, 24)
    batch = {'inputs': tokens_BP}
    if cfg.family == 'encoder_decoder':
        batch |= {'encoder_inputs': tokens_BP[:, ::-1], 'encoder_positions': jnp.tile(jnp.arange(5), (2, 1))}
    model = build(cfg)
    return model, nn.meta.unbox(model.init(jax.random.key(0), batch)), batch


@pytest.mark.parametrize(
    'fields', [{}, {'family': 'encoder_decoder'}, {'norm': 'batchnorm'}, {'layer_sharing': 'all'}], ids=str
)
@pytest.mark.slow_cases("{'family': 'encoder_decoder'}")
def test_layers_apart_give_the_same_bits(fields) -> None:
    model, variables, batch = made(**fields)
    apart = for_steps(model.cfg, variables)

    @jax.jit
    def step(variables):
        cache = model.apply(variables, batch, 8, method='start')
        return model.apply(variables, batch['inputs'][:, :1], jnp.zeros((2, 1), jnp.int32), cache, method='extend')[0]

    names = set(apart['params']['decoder']['stack'])
    assert ('layer_2' in names) == ('layer_sharing' not in fields)
    np.testing.assert_array_equal(step(variables), step(apart))


def test_a_loop_of_steps_copies_no_parameters_of_a_layer() -> None:
    model, variables, batch = made()
    generate = make_generate(model, config.Decode(strategy='greedy', max_len=4), eos=1)
    text = generate.lower(variables, batch, None).compile().as_text()
    assert 'stack.step' in text
    assert 'stack.step/stack.of_layer/slice' not in text
