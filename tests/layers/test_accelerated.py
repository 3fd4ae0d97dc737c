"""The kernels of accelerators, interpreted on a CPU: they see whom the mask's array says, alone and split by a mesh."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu

import norm_cases
from attention_cases import BIASED, CASES, Case, by_hand, make, make_mask
from tformer.config import Mesh, Model
from tformer.distributed import meshes, sharding
from tformer.layers import kernels, norms
from tformer.layers.accelerators import cudnn, mosaic, norm_kernel, splash, tiled_attention, triton
from tformer.layers.accelerators.tiles import Tiles
from tformer.layers.accelerators.tiles import met as tiled_met
from tformer.layers.kernels import ScoreOptions
from tformer.layers.masks import AttentionMask
from tformer.layers.parallel import ring_attention, ring_kernels
from tformer.layers.resolved import resolve_model

KERNELS = {
    'flash': functools.partial(splash.flash, interpret=True),
    'mosaic': functools.partial(mosaic.mosaic, interpret=True),
    'triton': functools.partial(triton.triton, interpret=True),
}


def run(kernel, case, arrays=None):
    """Returns the outputs at tokens, zeros at padding, and the gradients of a fixed weighting of them."""
    arrays = make(case) if arrays is None else arrays
    mask, real = make_mask(case)

    @jax.jit
    def program(arrays, mask):
        def loss(arrays):
            vectors = {name: arrays[name] for name in ('sink_N', 'bias_1NX') if name in arrays}
            options = ScoreOptions(case.sizes[0] ** -0.5, softcap=case.softcap, **vectors)
            out = kernel(arrays['q'], arrays['k'], arrays['v'], mask, options)
            out = jnp.where(real[:, None, :, None], out, 0).astype(jnp.float32)
            return (out * np.random.default_rng(1).standard_normal(out.shape)).sum(), out

        return jax.grad(loss, has_aux=True)(arrays)

    grads, out = program(arrays, mask)
    return out, grads


def by_array(q, k, v, mask, options):
    return kernels.reference(q, k, v, mask.array(), options.of_pairs(q.shape[2]))


@functools.cache
def reference(name):
    return run(by_array, (CASES | BIASED)[name])


def assert_near(found, expected):
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    for name, grad in found[1].items():
        np.testing.assert_allclose(grad, expected[1][name], atol=2e-5, err_msg=name)


# Every other case of a kernel, of two kernels together all.
EACH = [
    pytest.param(kernel, name, marks=pytest.mark.proof if (row + place) % 2 else ())
    for row, kernel in enumerate(KERNELS)
    for place, name in enumerate(CASES)
]


@pytest.mark.slow
@pytest.mark.parametrize(('kernel', 'name'), EACH)
def test_a_kernel_sees_whom_the_array_says(kernel, name):
    assert_near(run(KERNELS[kernel], CASES[name]), reference(name))


@pytest.mark.slow
@pytest.mark.parametrize('name', BIASED)
@pytest.mark.parametrize('kernel', ['mosaic', 'triton'])
@pytest.mark.proof_cases('mosaic-bias, prefix', 'triton-bias, padded in front')
def test_a_bias_by_distance_is_added_and_has_one_gradient_for_all_rows(kernel, name):
    """To what the cap leaves of the scores."""
    assert_near(run(KERNELS[kernel], BIASED[name]), reference(name))


@pytest.mark.parametrize('parts', [1, 2])
def test_a_program_of_triton_sums_over_a_part_of_the_rows(monkeypatch, parts):
    monkeypatch.setattr(triton, 'PARTS', parts)
    assert_near(run(KERNELS['triton'], BIASED['bias, groups']), reference('bias, groups'))


@pytest.mark.parametrize('name', ['bias, groups', 'bias, packed in several blocks, softcap, sink'])
def test_the_bias_of_all_pairs_is_that_of_their_distances(name):
    """And the gradient of each distance is the sum over its pairs."""
    case = BIASED[name]
    (mask, real), arrays = make_mask(case), make(case)
    found = run(by_array, case)
    weights = np.random.default_rng(1).standard_normal(found[0].shape) * real[:, None, :, None]
    options = ScoreOptions(case.sizes[0] ** -0.5, softcap=case.softcap)
    out, grads = by_hand(arrays, np.asarray(mask.array()), options, weights)
    assert_near(found, (np.where(real[:, None, :, None], out, 0), grads))


BOUNDED = ['causal', 'packed', 'packed in several blocks', 'padded in front', 'a prompt and free slots']
BOUNDED += ['encoder, packed in several blocks', 'bias, full']


@pytest.mark.parametrize('name', BOUNDED)
def test_tiles_that_no_query_sees_are_left_out(name):
    """The first and the last tile of keys of each tile of queries, and of queries of each of keys, are those of the
    array."""
    case = (CASES | BIASED)[name]
    mask, real_BT = make_mask(case)
    sees_BTS = np.asarray(mask.array()) & real_BT[:, :, None]
    B, T, S = sees_BTS.shape
    tiles_BIJ = np.zeros((B, -(-T // triton.BLOCK), -(-S // triton.BLOCK)), bool)
    for b, t, s in np.argwhere(sees_BTS):
        tiles_BIJ[b, t // triton.BLOCK, s // triton.BLOCK] = True
    arrays = (kernels.pad(jnp.zeros((B, 1, length, 1)), 2, triton.BLOCK) for length in (T, S))
    assert tiled_attention._in_order(mask)
    read = tiled_attention.make_tokens(mask, *arrays, Tiles(triton.BLOCK, causal=case.causal))
    for found_B2I, met_BIJ in ((read.keys_B2I, tiles_BIJ), (read.queries_B2J, tiles_BIJ.swapaxes(1, 2))):
        meets_BI, last_BI = met_BIJ.any(2), met_BIJ.shape[2] - met_BIJ[:, :, ::-1].argmax(2)
        assert meets_BI.sum() > B
        np.testing.assert_array_equal(np.asarray(found_B2I)[:, 0][meets_BI], met_BIJ.argmax(2)[meets_BI])
        np.testing.assert_array_equal(np.asarray(found_B2I)[:, 1][meets_BI], last_BI[meets_BI])


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('kernel', ['mosaic', 'triton'])
def test_examples_may_begin_at_any_position(kernel, causal):
    """As a piece from the middle of a document does."""
    case = Case(causal=causal, lengths=(384, 384), heads=(2, 1))
    (mask, _), own = make_mask(case), np.arange(384) >= 100
    positions = jnp.asarray(np.where(own, 700, 0) + np.arange(384) - 100 * own)[None]
    segments = jnp.asarray(1 + own.astype(np.int32))[None]
    arrays = (jnp.broadcast_to(x.astype(jnp.int32), (2, 384)) for x in (positions, positions, segments, segments))
    mask = mask.replace(**dict(zip(
        ('query_positions_BT', 'key_positions_BS', 'query_segments_BT', 'key_segments_BS'), arrays, strict=True
    )))  # fmt: skip
    given, options = make(case), ScoreOptions(0.25)
    found = KERNELS[kernel](given['q'], given['k'], given['v'], mask, options)
    np.testing.assert_allclose(found, by_array(given['q'], given['k'], given['v'], mask, options), atol=1e-5)


@pytest.mark.parametrize('kernel', ['mosaic', 'triton'])
def test_the_keys_of_another_sequence_are_all_visited(kernel):
    case = Case(causal=False, across=True, lengths=(140, 260), heads=(2, 1))
    assert not tiled_attention._in_order(make_mask(case)[0])
    assert_near(run(KERNELS[kernel], case), run(by_array, case))


@pytest.mark.parametrize('name', ['a window in several blocks', 'encoder, window in several blocks'])
def test_tiles_beyond_the_window_are_left_out(name):
    mask, _ = make_mask(CASES[name])
    block, (sees_TS,) = 64, np.asarray(mask.array())[:1]
    count = len(sees_TS) // block
    tiles_IJ = sees_TS[: count * block, : count * block].reshape(count, block, count, block).any((1, 3))
    tiles = Tiles(block, causal=mask.causal, window=True, in_order=True)
    for of_IJ, own in ((tiles_IJ, lambda i: (0, i + 1)), (tiles_IJ.T, lambda j: (j, count))):
        for i, met_J in enumerate(of_IJ):
            bounds = own(i) if mask.causal else (0, count)
            begin, end = tiled_met(tiles, i, count, mask.window, *bounds)
            np.testing.assert_array_equal(np.flatnonzero(met_J), np.arange(begin, end))


ON_A_CHIP = ['a prompt and free slots', 'packed in several blocks', 'a window in several blocks', 'across and packed']
ON_A_CHIP += ['bias, packed in several blocks, softcap, sink', 'bias, a prompt and free slots']


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize('name', ON_A_CHIP)
@pytest.mark.proof_cases(*ON_A_CHIP[-2:], 'a window in several blocks')
def test_a_chip_that_is_simulated_reads_nothing_that_is_not_there(name):
    """Nor anything that was not written, which is NaN."""
    chip = tpu.InterpretParams(out_of_bounds_reads='raise', uninitialized_memory='nan')
    case = (CASES | BIASED)[name]
    assert_near(run(functools.partial(mosaic.mosaic, interpret=chip), case), reference(name))


SPLIT = ['groups', 'fewer key heads than devices', 'prefix and packed', 'softcap and sink']
SPLIT = [(kernel, name) for kernel in KERNELS for name in SPLIT]
SPLIT += [('mosaic', 'bias, groups'), ('triton', 'bias, groups')]


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize(('kernel', 'name'), SPLIT)
def test_each_device_computes_its_own_rows_and_heads(kernel, name):
    mesh, case = Mesh(data=2, tensor=4, rules='fsdp_tp'), (CASES | BIASED)[name]
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        found = jax.device_get(run(KERNELS[kernel], case, jax.device_get(make(case))))
    assert_near(found, reference(name))


def test_devices_sum_the_gradient_of_a_bias_by_distance_and_not_that_of_all_pairs(monkeypatch):
    """Of a bias in cuDNN's place the devices hold all rows' together, a number for each distance."""
    by_xla = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, 'dot_product_attention', lambda *given, implementation, **named: by_xla(*given, **named)
    )
    mesh, case = Mesh(data=2, tensor=4, rules='fsdp_tp'), Case(bias=True, heads=(8, 4))
    arrays = jax.device_get(make(case))
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        assert_near(jax.device_get(run(cudnn.cudnn, case, arrays)), run(by_array, case))
        program = str(jax.make_jaxpr(lambda: run(cudnn.cudnn, case, arrays))())
    T, S = case.lengths
    summed = re.findall(r"f32\[([\d,]+)\] = psum\[\s*axes=\([^)]*'data'", program)
    assert summed
    assert max(math.prod(map(int, shape.split(','))) for shape in summed) <= 8 // 4 * (T + S - 1)


@pytest.mark.parametrize('kernel', [triton.triton, cudnn.cudnn])
def test_a_step_of_decoding_fills_no_tile_with_few_queries(kernel):
    def of(kernel, queries):
        case = Case(across=True, order='front', lengths=(queries, 21), heads=(4, 2))
        arrays, mask = make(case), make_mask(case)[0]
        mask = mask.replace(order=None) if queries == 5 else mask  # which is not known of drafts
        return functools.partial(kernel, arrays['q'], arrays['k'], arrays['v'], mask, ScoreOptions(0.25))

    assert 'pallas_call' in str(jax.make_jaxpr(of(kernel, 17))())
    for queries in (1, 5):
        assert 'pallas_call' not in str(jax.make_jaxpr(of(kernel, queries))())
        np.testing.assert_allclose(of(kernel, queries)(), of(by_array, queries)(), atol=1e-6)


def test_tiles_of_a_window_visit_what_is_near() -> None:
    tiles, mask = Tiles(64, causal=True, window=True, in_order=True), make_mask(Case())[0]
    whole = 1024 * (1024 + 64) // 2

    def visited(tiles=tiles, **fields):
        return tiled_attention._visited(tiles, mask.replace(**fields), 1024, 1024)

    assert visited(widths=(None,)) == whole == visited(widths=(1024,))
    assert visited(widths=(256,)) == 1024 * (256 + 64)
    assert visited(widths=(256, None), narrow=0.75) == (3 * 1024 * (256 + 64) + whole) / 4
    assert visited(tiles._replace(in_order=False), widths=(256,)) == 1024 * 1024
    encoder = tiles._replace(causal=False)
    assert visited(encoder, widths=(None,)) == 1024 * 1024 == visited(encoder, widths=(1024,))
    assert visited(encoder, widths=(64,)) == 1024 * (2 * 64 - 1 + 64)


@pytest.mark.parametrize('kernel', [*KERNELS, 'cudnn'])
@pytest.mark.parametrize('order', ['behind', 'front', None])
def test_each_hypothesis_of_a_beam_sees_its_own_tokens(kernel, order):
    case = Case(lengths=(18, 54), heads=(4, 2), sizes=(8, 8))
    visible = jnp.asarray(np.random.default_rng(2).random((2, 18, 54)) < 0.6)
    places = jnp.broadcast_to(jnp.arange(54), (2, 54))
    mask = AttentionMask(jnp.full((2, 18), 54), places, visible_BTS=visible, causal=True, order=order)
    function, arrays = KERNELS.get(kernel, cudnn.cudnn), make(case)
    found = function(arrays['q'], arrays['k'], arrays['v'], mask, ScoreOptions(0.3))
    np.testing.assert_allclose(
        found, by_array(arrays['q'], arrays['k'], arrays['v'], mask, ScoreOptions(0.3)), atol=1e-6
    )


@pytest.mark.parametrize(
    ('case', 'most', 'by'),
    [
        (Case(bias=True), 128**2, 'cudnn'),
        (Case(bias=True), 128**2 - 1, 'triton'),  # more pairs than cuDNN gets the biases of
        (Case(bias=True, packed=True), 128**2, 'triton'),
        (Case(), 1, 'cudnn'),
    ],
)
def test_cudnn_gets_the_bias_of_all_pairs_where_they_are_few_and_it_knows_the_mask(monkeypatch, case, most, by):
    case, given = case._replace(lengths=(128, 128)), []
    arrays, (mask, _) = make(case), make_mask(case)
    monkeypatch.setattr(cudnn, 'MOST_PAIRS', most)
    monkeypatch.setattr(cudnn, '_attend', lambda *call, scale: given.append('cudnn'))
    monkeypatch.setattr(cudnn, 'triton', lambda *call: given.append('triton'))
    cudnn.cudnn(arrays['q'], arrays['k'], arrays['v'], mask, ScoreOptions(0.3, bias_1NX=arrays.get('bias_1NX')))
    assert given == [by]


KNOWN = {'causal', 'several blocks', 'full', 'across', 'groups', 'fewer key heads than devices', 'window'}
KNOWN |= {'a window in several blocks', 'window, here none'}


@pytest.mark.parametrize('name', CASES)
def test_the_arguments_of_cudnn_mean_the_mask_at_every_token(name):
    """By the words of `jax.nn.dot_product_attention`; other masks go to `triton`."""
    mask, real = make_mask(CASES[name])
    if name in ('full', 'across'):
        mask = mask.replace(order='behind')
    assert cudnn.knows(mask) == (name in KNOWN)
    if name not in KNOWN:
        return
    found = []
    mask.by_width(lambda sight: found.append(cudnn.arguments(mask, sight, len(real))) or jnp.zeros(()))
    words = found[0] if name != 'window, here none' else found[1]
    t, s = np.indices(mask.array().shape[1:])
    means = np.ones_like(mask.array())
    if words.get('is_causal'):
        means &= t >= s
    if words.get('local_window_size') is not None:
        before, after = words['local_window_size']
        means &= (t - s <= before) & (s - t <= after)
    if 'key_value_seq_lengths' in words:
        means &= s[None] < np.asarray(words['key_value_seq_lengths'])[:, None, None]
    np.testing.assert_array_equal(means[real], np.asarray(mask.array())[real])
    np.testing.assert_array_equal(mask.sees(), np.asarray(mask.array()).any(-1) & real)


# ------------------------------------------------------------------------------------------------------- the ring
LENGTH = 1024  # eight blocks of 128, which splash attention takes at least
LONG = {'lengths': (LENGTH, LENGTH), 'heads': (2, 1), 'sizes': (8, 8)}
RINGS = {
    'zigzag': Case(order='zigzag', **LONG),
    'zigzag, packed, softcap, sink': Case(order='zigzag', packed=True, softcap=2.0, sink=True, **LONG),
    'zigzag, window in some layers': Case(order='zigzag', widths=(200, None), window=200, **LONG),
    'in order, no window here': Case(widths=(200, None), window=2**31 - 1, **LONG),
    'window to both sides': Case(causal=False, widths=(200,), window=200, **LONG),
    'across, packed': Case(causal=False, order=None, across=True, packed=True, **LONG),
    'a prompt and free slots': Case(order='front', lengths=(900, 1500), heads=(2, 1), sizes=(8, 8)),
    'across, blocks do not divide': Case(
        causal=False, order=None, across=True, packed=True, lengths=(700, 1100), heads=(2, 1), sizes=(8, 8)
    ),
}
RINGS_BY_POSITION = {'prefix, zigzag': Case(order='zigzag', prefix=True, **LONG), 'unknown': Case(order=None, **LONG)}
BIASED_RINGS = {
    'bias, zigzag, packed, softcap': Case(order='zigzag', packed=True, softcap=2.0, bias=True, **LONG),
    'bias, full': Case(causal=False, bias=True, **LONG),
    'bias, window in some layers': Case(widths=(200, None), window=200, bias=True, **LONG),
    'bias, a prompt and free slots': Case(order='front', lengths=(900, 1500), heads=(2, 1), sizes=(8, 8), bias=True),
    'bias, blocks do not divide': Case(causal=False, lengths=(700, 700), heads=(2, 1), sizes=(8, 8), bias=True),
}
RUNS = [(kernel, name) for kernel in KERNELS for name in RINGS]
RUNS += [(kernel, name) for kernel in ('mosaic', 'triton') for name in RINGS_BY_POSITION]
RUNS += [(kernel, name) for kernel in ('mosaic', 'triton') for name in BIASED_RINGS]
QUICK = ('zigzag, packed, softcap, sink', 'bias, zigzag, packed, softcap')
RUNS = [pytest.param(*each, marks=[] if each[1] in QUICK else pytest.mark.proof) for each in RUNS]


def in_zigzag(arrays, mask, real):
    order = ring_attention.zigzag(LENGTH, 4)
    arrays = {name: jnp.take(x, order, 2) if x.ndim == 4 else x for name, x in arrays.items()}
    return arrays, jax.tree.map(lambda x: jnp.take(x, order, 1) if x.ndim else x, mask), real[:, order]


@pytest.mark.slow
@pytest.mark.parametrize(('kernel', 'name'), RUNS)
@pytest.mark.proof_cases(
    'triton-zigzag, packed, softcap, sink',
    'triton-bias, zigzag, packed, softcap',
    'mosaic-bias, zigzag, packed, softcap',
)
def test_a_ring_of_kernels_is_the_reference(kernel, name):
    case = (RINGS | RINGS_BY_POSITION | BIASED_RINGS)[name]
    arrays, (mask, real) = make(case), make_mask(case)
    if case.order == 'zigzag':
        arrays, mask, real = in_zigzag(arrays, mask, real)
    options = ScoreOptions(0.25, softcap=case.softcap)
    weights = np.random.default_rng(1).standard_normal(arrays['q'].shape)

    def value(attend, arrays, mask):
        own = options._replace(sink_N=arrays.get('sink_N'), bias_1NX=arrays.get('bias_1NX'))
        out = jnp.where(real[:, None, :, None], attend(arrays['q'], arrays['k'], arrays['v'], mask, own), 0)
        return (out * weights).sum(), out

    def both(attend):
        return jax.jit(jax.grad(functools.partial(value, attend), has_aux=True))(arrays, mask)

    def by_places(q, k, v, mask, options):
        pairs = options.of_pairs(case.lengths[0])
        if pairs.bias is not None and case.order == 'zigzag':
            order = ring_attention.zigzag(LENGTH, 4)
            pairs = pairs._replace(bias=pairs.bias[:, :, order][..., order])
        return by_array(q, k, v, mask, pairs)

    wanted = both(by_places)
    mesh = Mesh(data=2, context=4)
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        given = options._replace(bias_1NX=arrays.get('bias_1NX'))
        assert ring_kernels.pick(kernel, *case.lengths, mask, given) == kernel
        found = jax.device_get(both(functools.partial(ring_kernels.ring, kernel, interpret=True)))
    assert_near(found[::-1], wanted[::-1])


NORM = {'layernorm': True, 'rmsnorm': False}  # whether the mean is taken away
WIDTHS = ((2, 33, 320), (3, 8, 256), (1, 3, 4100), (2, 1, 768))  # that tiles do and do not divide


@pytest.mark.stack
@pytest.mark.parametrize('name', NORM)
@pytest.mark.parametrize('shape', WIDTHS)
def test_the_kernel_of_a_norm_has_its_values_and_gradients(name, shape):
    given, options = norm_cases.make(shape), norm_kernel.Options(NORM[name], 1e-5, 'float32', interpret=True)
    found = norm_cases.run(functools.partial(norm_kernel.norm, options), *given)
    for what, wanted in norm_cases.by_hand(NORM[name], 1e-5, *given).items():
        np.testing.assert_allclose(found[what], wanted, atol=2e-6 * max(1, np.abs(wanted).max()), err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('sizes', 'rules', 'length'),
    [
        ({'data': 2, 'fsdp': 2}, 'fsdp', 12),
        ({'data': 1, 'tensor': 4}, 'tp_sp', 12),
        ({'data': 1, 'context': 4}, 'dp', 11),
        ({'data': 1, 'context': 2, 'fsdp': 2}, 'fsdp', 13),
    ],
)
def test_each_device_norms_its_own_tokens(sizes, rules, length):
    """Of a stream split by rows, and by length as sequence parallelism splits it, in unequal parts too; gradients are
    summed over all."""
    given, options = norm_cases.make((4, length, 256)), norm_kernel.Options(True, 1e-5, 'float32', interpret=True)
    norm, mesh = functools.partial(norm_kernel.norm, options), Mesh(**sizes, rules=rules)
    with sharding.placed(meshes.make_mesh(mesh, jax.devices()[:4]), mesh):
        found = norm_cases.run(norm, *given)
        text = jax.jit(norm).lower(given[0], *given[2].values()).as_text()
    assert 'shard_map' in text or 'manual_computation' in text
    for what, wanted in norm_cases.run(norm, *given).items():
        np.testing.assert_allclose(found[what], wanted, atol=1e-5, err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize('norm', ['layernorm', 'rmsnorm', 'rmsnorm_offset'])
def test_the_kernel_norms_streams_on_a_gpu_and_nothing_else(monkeypatch, norm):
    """Wide streams of several tokens, where the epsilon is in the root; it has the values of XLA's."""
    called, kernel, x = [], norm_kernel.norm, norm_cases.make((2, 5, 256))[0]

    def interpreted(options, *arrays):
        called.append(options)
        return kernel(options._replace(interpret=True), *arrays)

    monkeypatch.setattr(norm_kernel, 'norm', interpreted)

    def values(platform, x, **fields):
        monkeypatch.setattr(norms, 'platform', lambda: platform)
        layer, called[:] = norms.make_norm(resolve_model(Model(norm=norm, **fields))), []
        variables = layer.init(jax.random.key(0), x)
        variables = jax.tree.map(lambda x: x + 0.1 * jnp.arange(x.size).reshape(x.shape), sharding.unboxed(variables))
        return layer.apply(variables, x), len(called) > 0

    wanted, found = values('cpu', x), values('gpu', x)
    assert (wanted[1], found[1]) == (False, True)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    for other in (x[:, :1], x[..., :64], x[:, None]):
        assert not values('gpu', other)[1]
    assert not values('gpu', x, norm_epsilon_in_root=False)[1]
