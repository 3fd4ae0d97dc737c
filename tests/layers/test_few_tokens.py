"""The few tokens of a step, which travel to the parts of kernels that devices split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comparing import relative
from tformer.config import Mesh, Model
from tformer.distributed import collectives, hlo, meshes, sharding
from tformer.layers.parallel import few_tokens
from tformer.model import build

B, SLOTS, V, D, F, LAYERS = 16, 20, 96, 64, 128, 2
MESHES = {
    'fsdp': Mesh(data=1, fsdp=8),
    'data and fsdp': Mesh(data=2, fsdp=4),
    'fsdp and tensor': Mesh(data=2, fsdp=2, tensor=2),
    'pipeline': Mesh(data=2, pipeline=2, fsdp=2),
    'expert': Mesh(data=1, expert=2, fsdp=4),
    'context': Mesh(data=2, context=4),
    'expert and context': Mesh(data=1, expert=2, fsdp=2, context=2),
}
FIELDS = {
    'tied': {'tied_embeddings': 'all', 'position': 'learned', 'output_bias': True},
    'apart': {'tied_embeddings': None, 'activation': 'swiglu', 'num_kv_heads': 2, 'attention_bias': ('query', 'value')},
    'mixture': {'num_experts': 4, 'experts_per_token': 2, 'mlp_bias': True, 'tied_embeddings': None},
    'adapted': {'tied_embeddings': None, 'lora_rank': 4, 'lora_targets': ('query', 'value', 'mlp_out')},
}


@pytest.fixture
def of_any_size(monkeypatch):
    """Small kernels stand for large ones."""
    monkeypatch.setattr(few_tokens, 'LEAST', 0)


@functools.cache
def made(fields):
    """Returns a model and its boxed variables, none of which is zero."""
    sizes = {'vocab_size': V, 'emb_dim': D, 'mlp_dim': F, 'num_heads': 4, 'num_decoder_layers': LAYERS}
    model = build(
        Model(family='decoder', max_len=32, dropout_rate=0.0, **sizes | {'position': 'rope'} | FIELDS[fields])
    )
    boxed = model.init(jax.random.key(0), {'inputs': jnp.zeros((1, 1), jnp.int32)})
    return model, jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), boxed)


def step(model, variables, tokens_BT):
    """Returns the logits of the first tokens of texts, read in one step."""
    places_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    with sharding.unpipelined():
        cache = model.apply(variables, {'inputs': tokens_BT}, SLOTS, method='start')
        return model.apply(variables, tokens_BT, places_BT, cache, method='extend')[0]


def tokens(rows=B, length=1):
    return jnp.asarray(np.random.default_rng(0).integers(4, V, (rows, length)))


def on(mesh_config, model, boxed, tokens_BT):
    """Returns the logits on a mesh, and the bytes that a device sends by kind and axes."""
    mesh, rules = meshes.make_mesh(mesh_config), sharding.make_rules(mesh_config)
    with sharding.placed(mesh, mesh_config):
        variables = jax.device_put(sharding.unboxed(boxed), sharding.tree_shardings(boxed, mesh, rules))
        placed = jax.device_put(tokens_BT, meshes.batch_sharding(mesh))
        compiled = jax.jit(functools.partial(step, model)).lower(variables, placed).compile()
        sent = {(row.kind, row.axes): row.bytes for row in collectives.of(hlo.parse(compiled.as_text()), mesh)}
        return np.asarray(compiled(variables, placed)), sent


@pytest.mark.slow
@pytest.mark.parametrize('fields', FIELDS)
@pytest.mark.parametrize('mesh', MESHES)
def test_the_logits_of_a_step_are_those_of_one_device(of_any_size, mesh, fields):
    model, boxed = made(fields)
    expected = jax.jit(functools.partial(step, model))(sharding.unboxed(boxed), tokens())
    assert relative(on(MESHES[mesh], model, boxed, tokens())[0], expected) < 1e-6


@pytest.mark.slow
def test_a_step_sends_what_its_tokens_are_and_become_and_a_prompt_the_parts_of_kernels(of_any_size):
    """By eight devices, in float32: of a token the vector before and after each of the products; gathered are those
    before the last product of heads and of feed-forwards."""
    model, boxed = made('apart')
    heads, feed_forward, kernels = 2 * 2 * D + 2 * (D + D // 2), 3 * (D + F), 2 * D * D + 2 * D * D // 2 + 3 * D * F
    of_a_token = LAYERS * (heads + feed_forward) + D + D + V
    _, sent = on(MESHES['fsdp'], model, boxed, tokens())
    assert 0 < sum(sent.values()) < 1.1 * 2 * 7 / 8 * 4 * B * of_a_token  # twice: CPUs all-reduce where others scatter
    assert sum(size for (kind, _), size in sent.items() if kind == 'all-gather') < 1.1 * 7 / 8 * 4 * B * LAYERS * (
        D + F
    )
    _, sent = on(MESHES['fsdp'], model, boxed, tokens(length=few_tokens.STEP + 1))
    assert sum(sent.values()) >= 7 / 8 * 4 * (LAYERS * kernels + V * D)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['fsdp', 'context', 'expert and context'])
def test_a_step_of_a_mixture_gathers_no_experts(of_any_size, mesh):
    """All that is gathered has fewer numbers than one kernel of one expert."""
    model, boxed = made('mixture')
    _, sent = on(MESHES[mesh], model, boxed, tokens())
    assert sum(size for (kind, _), size in sent.items() if kind == 'all-gather') < 7 / 8 * 4 * D * F


PRODUCT = 'BTD,DF->BTF', (D, F), ('embed', 'mlp')


@pytest.mark.parametrize(
    ('rows', 'length', 'mesh', 'found'),
    [
        (16, 1, {'fsdp': 8}, True),
        (8, 5, {'fsdp': 8}, True),  # 40 tokens of 192 numbers, fewer than 64 x 128
        (8, 6, {'fsdp': 8}, False),
        (88, 1, {'fsdp': 4, 'data': 2}, False),
        (80, 1, {'fsdp': 4, 'data': 2}, True),  # of which each half has its own devices
        (8, 1, {'data': 8}, False),
        (6, 1, {'fsdp': 8}, False),  # which it does not divide
        (8, 1, {'tensor': 8}, False),
        (6, 1, {'context': 8}, True),
        (16, 1, {'fsdp': 2, 'context': 4}, True),
    ],
)
def test_tokens_travel_where_they_are_fewer_numbers_than_a_kernel(of_any_size, rows, length, mesh, found):
    mesh = Mesh(**{'data': 1, **mesh})
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        assert (few_tokens.travel(PRODUCT[0], jnp.zeros((rows, length, D)), *PRODUCT[1:]) is not None) is found


def test_the_parts_of_a_small_kernel_travel():
    mesh = Mesh(data=1, fsdp=8)
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        assert few_tokens.travel(PRODUCT[0], jnp.zeros((8, 1, D)), *PRODUCT[1:]) is None
        assert few_tokens.travel(PRODUCT[0], jnp.zeros((8, 1, 2**10)), (2**10, 2**10), PRODUCT[2]) is not None


@pytest.mark.slow
def test_experts_whose_inputs_are_split_like_their_columns_are_gathered(of_any_size):
    model, boxed = made('mixture')
    expected = jax.jit(functools.partial(step, model))(sharding.unboxed(boxed), tokens())
    mesh = Mesh(data=1, fsdp=4, tensor=2, overrides=('embed=fsdp+tensor',))
    assert relative(on(mesh, model, boxed, tokens())[0], expected) < 1e-6
