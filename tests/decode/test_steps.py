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


HALF = {'dtype': 'bfloat16'}
LATENT = {'kv_latent_dim': 8, 'rotary_dim': 4, 'head_dim': 8, 'position': 'rope'}


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields',
    [
        {},
        {'family': 'encoder_decoder'},
        {'norm': 'batchnorm'},
        {'layer_sharing': 'all'},
        HALF | {'position': 'learned', 'num_token_types': 2, 'mlp_bias': True},
        HALF | {'family': 'encoder_decoder', 'position': 'relative', 'tied_embeddings': None},
        HALF | {'num_experts': 4, 'experts_per_token': 2, 'router_bias': True, 'norm': 'rmsnorm'},
        HALF | {'lora_rank': 2, 'layer_sharing': 'all'},
        HALF | LATENT,
        HALF | {'recurrence': 'lstm', 'position': None},
    ],
    ids=str,
)
@pytest.mark.proof_cases("{'family': 'encoder_decoder'}")
def test_what_steps_read_gives_the_same_bits(fields) -> None:
    model, variables, batch = made(**fields)
    found = for_steps(model.cfg, variables)

    @jax.jit
    def step(variables):
        cache = model.apply(variables, batch, 8, method='start')
        return model.apply(variables, batch['inputs'][:, :1], jnp.zeros((2, 1), jnp.int32), cache, method='extend')[0]

    if 'recurrence' not in fields:
        names = set(found['params']['decoder']['stack'])
        assert ('layer_2' in names) == ('layer_sharing' not in fields)
    np.testing.assert_array_equal(step(variables), step(found))


@pytest.mark.slow
def test_steps_read_kernels_and_tables_in_the_activations_dtype_and_a_router_in_its_own() -> None:
    model, variables, _ = made(num_experts=4, experts_per_token=2, position='relative', dtype='bfloat16')
    params = for_steps(model.cfg, variables)['params']
    layer, stacked = params['decoder']['stack']['layer_0'], params['decoder']['stack']['layers']
    read = {
        jax.tree_util.keystr(keys, simple=True, separator='.')
        for keys, x in jax.tree_util.tree_leaves_with_path(layer)
        if x.dtype == jnp.bfloat16
    }
    assert {name.rpartition('.')[2] for name in read} == {'kernel'}
    assert not any('router' in name for name in read)
    assert params['embed']['table'].dtype == jnp.bfloat16
    assert params['decoder']['bias']['table'].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(stacked)} == {jnp.dtype('float32')}


def test_a_loop_of_steps_copies_no_parameters_of_a_layer() -> None:
    model, variables, batch = made()
    generate = make_generate(model, config.Decode(strategy='greedy', max_len=4), eos=1)
    text = generate.lower(variables, batch, None).compile().as_text()
    assert 'stack.step' in text
    assert 'stack.step/stack.of_layer/slice' not in text
