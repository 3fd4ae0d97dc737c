"""The cache of decoding on numbers that say where they come from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tformer.config import Mesh, Model
from tformer.decode.spread import spread_over
from tformer.distributed import collectives, hlo, meshes, sharding
from tformer.layers import kernel_choice, kernels, masks
from tformer.layers.cache import Cache, KeyValues
from tformer.layers.quantized import numbers
from tformer.model import build

ROWS, SLOTS = 2, 4


@pytest.fixture
def cache() -> Cache:
    """A cache of two rows, whose keys are 10 row + slot, and whose first two slots are written."""
    keys = jnp.asarray((10 * np.arange(ROWS)[:, None] + np.arange(SLOTS))[:, None, :, None], jnp.float32)
    positions = jnp.array([[0, 1, -1, -1], [-1, 0, -1, -1]])
    prefix = jnp.array([[True, False, False, False], [False, True, False, False]])
    encoder = jnp.array([[0, 1, 2], [0, -1, -1]])
    return Cache((KeyValues.of(keys, -keys),), positions, jnp.array(2), prefix, (KeyValues.of(keys, keys),), encoder)


def test_hypotheses_of_a_row_have_its_prompt_their_own_tokens_and_those_of_the_one_that_they_go_on_from(cache):
    def slots(cache):
        return [[np.flatnonzero(row).tolist() for row in rows] for rows in np.asarray(cache.branches_BMS)]

    branched = cache.branch(2)
    assert slots(branched) == [[[0, 1], [0, 1]]] * ROWS
    first = branched.place(jnp.array([[2, 2], [1, 1]]))
    assert slots(first) == [[[0, 1, 2], [0, 1, 3]]] * ROWS
    assert first.positions_BS.tolist() == [[0, 1, 2, 2], [-1, 0, 1, 1]] and int(first.index) == 4
    assert slots(first.take(jnp.array([[1, 1], [0, 1]]))) == [
        [[0, 1, 3], [0, 1, 3]],
        [[0, 1, 2], [0, 1, 3]],
    ]
    jax.tree.map(np.testing.assert_array_equal, (branched.own, branched.cross), (cache.own, cache.cross))


def test_new_tokens_stand_in_the_next_slots_and_a_token_may_be_taken_back(cache):
    placed = cache.place(jnp.array([[2], [1]]), jnp.array([[True], [False]]))
    assert placed.positions_BS.tolist() == [[0, 1, 2, -1], [-1, 0, 1, -1]]
    assert placed.prefix_BS.tolist() == [[True, False, True, False], [False, True, False, False]]
    assert int(placed.index) == 3
    assert int(placed.back(1).index) == 2
    new = jnp.full((ROWS, 1, 1, 1), 7.0)
    layer = cache.own[0].extend(KeyValues.of(new, -new), cache.index)
    assert layer.k_BKHS[:, 0, 0].tolist() == [[0, 1, 7, 3], [10, 11, 7, 13]]
    assert layer.v_BKSU[:, 0, :, 0].tolist() == [[0, -1, -7, -3], [-10, -11, -7, -13]]


def test_tokens_outside_a_prefix_are_in_none(cache):
    assert cache.place(jnp.array([[2], [1]])).prefix_BS[:, 2].tolist() == [False, False]


@pytest.mark.parametrize('end', range(5))
@pytest.mark.parametrize('slots', [2, 3, 4])
def test_in_a_ring_what_was_written_stands_before_its_end(cache, slots, end) -> None:
    ring = cache.ring(slots, jnp.array(end % slots))
    before = [(end - 2) % slots, (end - 1) % slots]
    assert np.asarray(ring.positions_BS)[:, before].tolist() == [[0, 1], [-1, 0]]
    assert np.asarray(ring.own[0].pair()[0])[:, 0, before, 0].tolist() == [[0, 1], [10, 11]]
    assert np.asarray(ring.prefix_BS)[:, before].tolist() == [[True, False], [False, True]]
    assert (np.asarray(ring.positions_BS) >= 0).sum() == 3 and int(ring.index) == end % slots


def test_a_cache_grows_by_slots_that_nobody_sees(cache) -> None:
    grown = cache.grown(6, 5)
    assert grown.positions_BS.tolist() == [[0, 1, -1, -1, -1, -1], [-1, 0, -1, -1, -1, -1]]
    assert grown.encoder_positions_BS.tolist() == [[0, 1, 2, -1, -1], [0, -1, -1, -1, -1]]
    assert grown.own[0].k_BKHS[:, 0, 0, :4].tolist() == cache.own[0].k_BKHS[:, 0, 0].tolist()
    shapes = [[x.shape for x in layer.pair()] for layer in (*grown.own, *grown.cross)]
    assert shapes == [[(2, 1, 6, 1)] * 2, [(2, 1, 5, 1)] * 2]
    assert grown.prefix_BS.shape == (2, 6) and not grown.prefix_BS[:, 4:].any() and int(grown.index) == 2


def test_a_cache_of_eight_bits_holds_each_token_and_head_by_a_scale_of_its_own(cache) -> None:
    """Written in two parts, taken as a ring, grown and repeated: within half a step of 127 to the largest magnitude."""
    rng = np.random.default_rng(0)
    size = 10.0 ** np.arange(SLOTS)[:, None]  # what one scale for all tokens would lose
    k_BKSH, v_BKSU = (jnp.asarray(rng.normal(size=(ROWS, 3, SLOTS, 5)) * size, jnp.float32) for _ in range(2))
    empty = KeyValues.of(jnp.zeros_like(k_BKSH), jnp.zeros_like(v_BKSU)).quantized()
    layer = empty
    for part in (slice(0, 3), slice(3, 4)):
        layer = layer.extend(KeyValues.of(k_BKSH[:, :, part], v_BKSU[:, :, part]), jnp.array(part.start))
    held = cache.replace(own=(layer,), cross=None, encoder_positions_BS=None, index=jnp.array(SLOTS))
    moved = held.grown(SLOTS + 2).ring(SLOTS, jnp.array(0)).repeat(2)
    for integers, expected in zip(moved.own[0].pair(), (k_BKSH, v_BKSU), strict=True):
        found = numbers(integers, jnp.float32)
        bound = np.abs(expected).max(-1, keepdims=True) / 254 * 1.001
        assert (np.abs(found[::2] - expected) <= bound).all() and (found[::2] == found[1::2]).all()
    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(each)) for each in (layer, KeyValues.of(k_BKSH, v_BKSU))]
    assert bytes_of[0] / bytes_of[1] == (5 + 4) / (5 * 4)


def test_the_first_tokens_of_a_cache_have_no_prefix_for_kernels_to_look_for_unless_one_is_given(monkeypatch):
    kernel, found = kernel_choice.KERNELS['reference'], []

    def spied(q_BNTH, k_BKSH, v_BKSU, mask, options):
        found.append(mask.prefix_BS is not None)
        return kernel.function(q_BNTH, k_BKSH, v_BKSU, mask, options)

    monkeypatch.setitem(kernel_choice.KERNELS, 'reference', kernel._replace(function=spied))
    model = build(Model(vocab_size=9, emb_dim=8, mlp_dim=8, num_heads=1, num_decoder_layers=1, max_len=8))
    batch = {'inputs': jnp.ones((2, 4), jnp.int32)}
    variables = jax.eval_shape(model.init, jax.random.key(0), batch)

    def read(variables, *prefix):
        with masks.ordered('front'):
            empty = model.apply(variables, batch, 8, method='start')
            return model.apply(
                variables, batch['inputs'], jnp.arange(4)[None].repeat(2, 0), empty, *prefix, method='extend'
            )

    for prefix in ((), (jnp.ones((2, 4), bool),)):
        found.clear()
        jax.eval_shape(read, variables, *prefix)
        assert set(found) == {bool(prefix)}


@pytest.mark.slow
def test_a_step_sums_the_slots_of_each_device_and_asks_no_kernel_for_all(monkeypatch):
    """Kernels of prompts know nothing of slots that devices share."""

    def asked(*_):
        raise AssertionError('a step asks the kernel')

    kernel = kernel_choice.KERNELS['chunked']
    sizes = {'vocab_size': 9, 'emb_dim': 8, 'mlp_dim': 8, 'num_heads': 1, 'num_decoder_layers': 1, 'max_len': 8}
    model = build(Model(attention_kernel='chunked', position='alibi', **sizes))
    batch, names = {'inputs': jnp.ones((2, 4), jnp.int32)}, Mesh(data=2, context=4)
    variables = model.init(jax.random.key(0), batch)
    start = functools.partial(model.apply, variables, batch, 8, method='start')
    extend = functools.partial(model.apply, variables, jnp.ones((2, 1), jnp.int32), jnp.zeros((2, 1), jnp.int32))
    wanted = extend(start(), method='extend')[0]
    monkeypatch.setitem(kernel_choice.KERNELS, 'chunked', kernel._replace(function=asked))
    with sharding.placed(meshes.make_mesh(names), names):
        found = jax.jit(lambda: extend(start(), method='extend')[0])()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_drafted_tokens_are_written_and_read_where_the_slots_are():
    """Nothing of a cache whose slots devices share is sent, however many tokens a step reads."""
    names, slots = Mesh(data=2, context=4), 512
    mesh = meshes.make_mesh(names)
    sizes = {'vocab_size': 9, 'emb_dim': 16, 'mlp_dim': 8, 'num_heads': 2, 'num_decoder_layers': 1, 'max_len': slots}
    model = build(Model(position='rope', attention_kernel='reference', **sizes))
    batch = {'inputs': jnp.ones((2, 4), jnp.int32)}
    variables = model.init(jax.random.key(0), batch)
    start = functools.partial(model.apply, variables, batch, slots, method='start')
    tokens, index = jnp.arange(10).reshape(2, 5) % 9, jnp.array([0, 253])  # the second row's are of two devices

    def step(cache):
        positions = cache.index[:, None] + jnp.arange(5)[None]
        return model.apply(variables, tokens, positions, cache, method='extend')

    wanted = jax.jit(step)(start().replace(index=index))
    with sharding.placed(mesh, names):
        begun = jax.jit(lambda: spread_over(mesh, sharding.make_rules(names))(start().replace(index=index)))()
        compiled = jax.jit(step).lower(begun).compile()
        found = compiled(begun)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)
    sent = [each.bytes for each in collectives.of(hlo.parse(compiled.as_text()), mesh)]
    assert sum(sent) < begun.own[0].v_BKSU.nbytes / 8


@pytest.mark.slow
@pytest.mark.parametrize(('kv_heads', 'held'), [(8, 8), (4, 8), (1, 1)])
def test_a_device_holds_the_heads_of_keys_that_its_queries_read_and_no_others(kv_heads, held):
    """Also where there are fewer than devices that split heads, of which a cache would have to be gathered in each
    step; one that all queries read is on all devices."""
    names = Mesh(data=1, tensor=8, rules='fsdp_tp')
    mesh = meshes.make_mesh(names)
    sizes = {'vocab_size': 16, 'emb_dim': 16, 'mlp_dim': 8, 'num_heads': 8, 'max_len': 1024}
    sizes |= {'num_encoder_layers': 1, 'num_decoder_layers': 1, 'num_kv_heads': kv_heads}
    model = build(Model(family='encoder_decoder', position='rope', attention_kernel='reference', **sizes))
    tokens = jnp.arange(8).reshape(2, 4) + 1
    batch = {'inputs': tokens, 'encoder_inputs': tokens}
    variables = nn.unbox(model.init(jax.random.key(0), batch))

    def step(variables, cache):
        return model.apply(variables, tokens[:, :1], jnp.zeros((2, 1), jnp.int32) + cache.index, cache, method='extend')

    def start(variables):
        return model.apply(variables, batch, 1024, method='start')

    wanted = step(variables, step(variables, start(variables))[1])[0]
    with sharding.placed(mesh, names):
        spread = spread_over(mesh, sharding.make_rules(names))
        begun = jax.jit(lambda: spread(start(variables)))()
        compiled = jax.jit(lambda *given: spread(step(*given))).lower(variables, begun).compile()
        found = compiled(variables, compiled(variables, begun)[1])[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for layer in (*begun.own, *begun.cross):
        assert layer.heads == held
        assert layer.v_BKSU.addressable_shards[0].data.shape[1] == 1
    sent = [each.bytes for each in collectives.of(hlo.parse(compiled.as_text()), mesh)]
    assert sum(sent) < begun.own[0].v_BKSU.nbytes / 8


def test_a_few_tokens_that_see_more_are_a_step() -> None:
    q_BNTH, k_BKSH = (jnp.zeros((2, 1, length, 4)) for length in (5, 5))
    mask = masks.AttentionMask(jnp.zeros((2, 5)), jnp.zeros((2, 5)), causal=True)
    longer = jnp.zeros((2, 1, 64, 4))
    assert not kernels.is_step(q_BNTH, k_BKSH, mask) and kernels.is_step(q_BNTH, longer, mask)
    assert not kernels.is_step(q_BNTH, longer, mask.replace(order='front'))  # a prompt
    assert kernels.is_step(longer[:, :, :1], longer, mask) and not kernels.is_step(longer[:, :, :17], longer, mask)


def test_devices_share_rows_heads_and_slots(cache) -> None:
    """Of an engine's cache, which goes from program to program."""
    names = Mesh(data=2, context=4)
    mesh = meshes.make_mesh(names)
    with sharding.placed(mesh, names):
        spread = jax.jit(spread_over(mesh, sharding.make_rules(names)))(cache)
    (layer,) = spread.own
    for x, axes in ((layer.k_BKHS, P('data', None, None, 'context')), (layer.v_BKSU, P('data', None, 'context'))):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, axes), x.ndim)
    assert spread.positions_BS.sharding.is_equivalent_to(NamedSharding(mesh, P('data')), 2)
    jax.tree.map(np.testing.assert_array_equal, spread, cache)
