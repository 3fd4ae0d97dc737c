"""Bytes and operations by hand."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tformer import checks
from tformer.config import Config, Data, Mesh, Model, Train, override
from tformer.distributed import meshes
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.training import flops
from tformer.training.state import abstract_variables


def test_a_device_holds_its_part_of_what_is_split_and_all_of_the_rest():
    mesh = meshes.make_mesh(Mesh(data=4, tensor=2))

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    assert flops.device_bytes([array((8, 6), jnp.float32, 'data')]) == 2 * 6 * 4
    assert flops.device_bytes([array((8, 6), jnp.bfloat16, 'data', 'tensor')]) == 2 * 3 * 2
    assert flops.device_bytes({'a': array((8, 6), jnp.float32), 'b': array((), jnp.int32)}) == 8 * 6 * 4 + 4


def test_a_token_meets_its_experts_and_the_whole_router():
    """Of 4 experts of 2 x 8 x 32 weights it goes to 2, beside a router of 8 x 4 and projections of 4 x 8 x 8."""
    model = Model(
        emb_dim=8, mlp_dim=32, num_heads=2, num_decoder_layers=3, num_experts=4, experts_per_token=2, activation='relu',
        tied_embeddings=None,
    )  # fmt: skip
    cfg = checks.resolve(Config(model, Data(length=16), train=Train(num_steps=1)), vocab_size=50)
    batch = {'inputs': jax.ShapeDtypeStruct((5, 16), 'int32')}
    params = abstract_variables(build(cfg.model), OBJECTIVES['causal_lm'], batch)['params']
    weights = 3 * (4 * 8 * 8 + 8 * 4 + 2 * (2 * 8 * 32)) + 8 * 50
    pairs = 3 * 16 * 16  # of a query and a key, in a row
    assert flops.model_flops(cfg, params, batch) == 5 * (6 * 16 * weights + 12 * 8 * pairs)


def test_frozen_weights_have_no_gradient_and_what_is_below_all_that_is_trained_goes_forward_only():
    """In units of what goes forward: weights 3, where they are frozen 2; attention 3; below, 1 of either."""

    def counted(family='decoder', **fields):
        sizes = {'num_encoder_layers': 4, 'num_decoder_layers': 4, 'emb_dim': 8, 'mlp_dim': 32, 'num_heads': 2}
        objective = {'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}[family]
        cfg = Config(Model(family=family, activation='relu', tied_embeddings=None, **sizes), Data(length=16))
        cfg = checks.resolve(
            override(cfg, {'train.objective': objective, 'train.num_steps': 1, **fields}), vocab_size=50
        )
        batch = {
            'inputs': jax.ShapeDtypeStruct((1, 16), 'int32'),
            'encoder_inputs': jax.ShapeDtypeStruct((1, 16), 'int32'),
        }
        batch = batch if family == 'encoder_decoder' else {'inputs': batch['inputs']}
        params = abstract_variables(build(cfg.model), OBJECTIVES[objective], batch)['params']
        return flops.model_flops(cfg, params, batch)

    attention, mlp, pairs, head = 2 * 16 * 4 * 64, 2 * 16 * 2 * 256, 4 * 8 * 16 * 16, 2 * 16 * 8 * 50
    layer = attention + mlp + pairs
    assert counted() == 4 * 3 * layer + 3 * head
    assert counted(**{'optimizer.frozen': ('mlp',)}) == 4 * (3 * layer - mlp) + 3 * head
    assert counted(**{'optimizer.frozen_layers': 3}) == 3 * layer + 3 * layer + 3 * head
    assert counted(**{'optimizer.frozen_layers': 4}) == 4 * layer + 3 * head  # the last norm is trained
    assert counted(**{'optimizer.frozen': ('decoder', 'embed')}) == 4 * layer + 2 * head
    adapters = 2 * 2 * 16 * 2 * (8 + 8)  # of queries and values, at rank 2
    low = counted(**{'model.lora_rank': 2, 'model.lora_targets': ('query', 'value')})
    assert low == 4 * (2 * (attention + mlp) + 3 * pairs + 3 * adapters) + 2 * head
    both, cross = counted('encoder_decoder'), 4 * (attention + pairs)
    assert both == 3 * (8 * layer + cross + head)
    frozen = counted('encoder_decoder', **{'optimizer.frozen': ('encoder', 'encoder_embed')})
    assert both - frozen == 2 * 4 * layer + 4 * attention / 2  # nothing sums what keys and values say of the source
    still = counted('encoder_decoder', **{'optimizer.frozen': ('decoder', 'embed')})
    assert both - still == 4 * (2 * attention + mlp)


def test_of_a_window_its_pairs_count():
    """Of a decoder 4 keys of each query, of an encoder 3 to both sides and its own."""

    def pairs(**fields):
        layers = {'num_encoder_layers': 2} if 'family' in fields else {'num_decoder_layers': 4}
        model = Model(emb_dim=8, num_heads=2, **layers, **fields)
        train = Train(num_steps=1, objective='masked_lm' if model.family == 'encoder' else 'causal_lm')
        cfg = checks.resolve(Config(model, Data(length=16), train=train), vocab_size=50)
        return flops._attention(cfg.model, 16, 16, {'encoder': 1.0, 'decoder': 1.0}) / (12 * 8)

    local = {'window': 4, 'attention_pattern': ('local', 'global')}
    assert pairs() == 4 * 16 * 16 and pairs(**local) == 2 * 16 * 16 + 2 * 16 * 4
    assert pairs(window=4, attention_pattern=('local',)) == 4 * 16 * 4
    assert pairs(window=99, attention_pattern=('local',)) == 4 * 16 * 16
    assert pairs(window=4, attention_pattern=('local', 'local', 'global')) == 16 * 16 + 3 * 16 * 4  # the last is local
    assert pairs(family='encoder', **local) == 16 * 16 + 16 * 7


def test_the_costs_of_layers_by_the_length_of_a_row():
    """Vaswani et al. 2017, table 1, for n = 100, d = 8 and a window r = 30."""
    assert flops.LAYER_COSTS['global'](100, 8, 30) == (80_000, 1, 1)
    assert flops.LAYER_COSTS['local'](100, 8, 30) == (24_000, 1, 4)
    assert flops.LAYER_COSTS['recurrent'](100, 8, 30) == (6_400, 100, 100)
