"""Every kernel of the table computes the same attention, gradients included."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer import config
from tformer.config import Mesh
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.layers import attention, kernels
from tformer.layers.kernel_choice import FEATURES, KERNELS, unserved
from tformer.layers.kernels import ScoreOptions
from tformer.layers.masks import AttentionMask
from tformer.layers.parallel.each_device import on_each_device
from tformer.layers.quantized import Quantized
from tformer.model import build

B = 2
ON_CPU = {  # as they run here: small chunks, so that there are several and the last is padded
    'chunked': functools.partial(kernels.chunked, chunk=4),
    'xla': kernels.xla,
}


class Case(NamedTuple):
    mask: str
    heads: tuple[int, int] = (4, 4)  # N, K
    lengths: tuple[int, int] = (11, 11)  # T, S
    sizes: tuple[int, int] = (8, 8)  # H, V
    bias: int | None = None  # its batch size
    softcap: float | None = None
    sink: bool = False

    @property
    def needs(self):
        asked = {'bias': self.bias, 'softcap': self.softcap, 'sink': self.sink}
        asked['value_dim'] = self.sizes[0] != self.sizes[1]
        return {'float32'} | {feature for feature, value in asked.items() if value}


CASES = {
    'heads causal': Case('causal'),
    'groups window': Case('window', heads=(6, 2)),
    'one key head, across': Case('blind', heads=(3, 1), lengths=(5, 10)),
    'one query': Case('padding', heads=(4, 2), lengths=(1, 9)),
    'two queries': Case('causal', lengths=(2, 12)),  # XLA has aborted at the gradients of these two
    'three queries of few keys': Case('causal', heads=(8, 2), lengths=(3, 3), sizes=(2, 2)),
    'value size': Case('causal', heads=(4, 2), sizes=(8, 5)),
    'bias shared': Case('causal', bias=1),
    'bias per example': Case('blind', heads=(4, 2), lengths=(6, 9), bias=B),
    'softcap': Case('window', softcap=2.0),
    'sink': Case('blind', heads=(4, 2), sink=True),
    'softcap, sink, values': Case('blind', heads=(4, 2), sizes=(4, 12), softcap=1.5, sink=True),
    'several blocks': Case('window', heads=(2, 1), lengths=(140, 300), sink=True),
    'everything': Case('blind', heads=(6, 3), lengths=(7, 13), sizes=(4, 6), bias=1, softcap=3.0, sink=True),
}


def make_mask(kind, T, S):
    """Returns mask_BTS; `blind` has queries that see nothing: the first ones, and the whole last example's last."""
    t, s = np.arange(T)[None, :, None], np.arange(S)[None, None, :]
    padded = s < np.array([S, S - 3])[:, None, None]
    return {
        'causal': np.broadcast_to(t >= s, (B, T, S)),
        'window': (t >= s) & (t - s < 3) & padded,
        'padding': np.broadcast_to(padded, (B, T, S)),
        'blind': (t >= 1) & (s - t < 4) & padded & (t < np.array([T, T - 2])[:, None, None]),
    }[kind]


def make(case, dtype=jnp.float32):
    """Returns the arrays that have gradients, and the rest."""
    draw = np.random.default_rng(0).standard_normal
    (N, K), (T, S), (H, V) = case.heads, case.lengths, case.sizes
    arrays = {'q': draw((B, N, T, H)), 'k': draw((B, K, S, H)), 'v': draw((B, K, S, V))}
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    if case.bias:
        arrays['bias'] = jnp.asarray(draw((case.bias, N, T, S)), jnp.float32)
    if case.sink:
        arrays['sink_N'] = jnp.asarray(draw(N), jnp.float32)
    return arrays, {'mask_BTS': jnp.asarray(make_mask(case.mask, T, S)), 'scale': H**-0.5, 'softcap': case.softcap}


def run(function, arrays, rest):
    """Returns the output and the gradients of a fixed random weighting of it."""

    @jax.jit
    def program(arrays):
        def loss(arrays):
            options = {name: x for name, x in (arrays | rest).items() if name not in ('q', 'k', 'v', 'mask_BTS')}
            out = function(arrays['q'], arrays['k'], arrays['v'], rest['mask_BTS'], ScoreOptions(**options))
            weights = np.random.default_rng(1).standard_normal(out.shape)
            return (out.astype(jnp.float32) * weights).sum(), out

        return jax.grad(loss, has_aux=True)(arrays)

    grads, out = program(arrays)
    return out, grads


def by_hand(arrays, rest):
    """Attention one query at a time, float64, without any of jax."""
    q, k, v = (np.asarray(arrays[name], np.float64) for name in 'qkv')
    _, N, T, _ = q.shape
    out = np.zeros((B, N, T, v.shape[-1]))
    for b, n, t in np.ndindex(B, N, T):
        head = n // (N // k.shape[1])
        seen = np.flatnonzero(rest['mask_BTS'][b, t])
        scores = k[b, head, seen] @ q[b, n, t] * rest['scale']
        if rest['softcap']:
            scores = rest['softcap'] * np.tanh(scores / rest['softcap'])
        if 'bias' in arrays:
            bias = np.asarray(arrays['bias'], np.float64)
            scores = scores + bias[b % bias.shape[0], n, t, seen]
        weights = np.exp(scores)
        sink = np.exp(np.float64(arrays['sink_N'][n])) if 'sink_N' in arrays else 0.0
        if len(seen):
            out[b, n, t] = weights @ v[b, head, seen] / (weights.sum() + sink)
    return out


@pytest.mark.parametrize('name', ['one query', 'value size', 'bias shared', 'softcap, sink, values', 'everything'])
def test_integers_with_scales_are_the_numbers_that_they_stand_for(name):
    arrays, rest = make(CASES[name])
    rng = np.random.default_rng(3)
    integers, scales = {}, {}
    for part in 'kv':
        integers[part] = rng.integers(-127, 128, arrays[part].shape).astype(np.int8)
        scales[part] = rng.uniform(0.001, 0.02, (*arrays[part].shape[:3], 1)).astype(np.float32)
    numbers = {part: integers[part] * scales[part] for part in 'kv'}
    places = (jnp.zeros((B, length), jnp.int32) for length in CASES[name].lengths)
    mask = AttentionMask(*places, visible_BTS=rest['mask_BTS'])
    options = ScoreOptions(rest['scale'], arrays.get('bias'), rest['softcap'], arrays.get('sink_N'))
    keys, values = (Quantized(jnp.asarray(integers[part]), jnp.asarray(scales[part])) for part in 'kv')
    found = jax.jit(attention.of_integers)(arrays['q'], keys, values, mask, options)
    np.testing.assert_allclose(found, by_hand(arrays | numbers, rest), atol=1e-5)


@functools.cache
def reference(name):
    return run(kernels.reference, *make(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_reference_is_attention(name):
    out, grads = reference(name)
    np.testing.assert_allclose(out, by_hand(*make(CASES[name])), atol=1e-5)
    assert all(np.isfinite(grad).all() and np.any(grad) for grad in grads.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kernel', 'name'),
    [(kernel, name) for kernel in ON_CPU for name, case in CASES.items() if case.needs <= KERNELS[kernel].serves],
)
def test_kernel_equals_the_reference(kernel, name):
    out, grads = run(ON_CPU[kernel], *make(CASES[name]))
    expected, expected_grads = reference(name)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for array, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[array], atol=1e-5, err_msg=array)


@pytest.mark.parametrize('kernel', ['reference', *ON_CPU])
def test_a_query_that_sees_nothing_gets_zero_and_gives_no_gradient(kernel):
    arrays, rest = make(CASES['heads causal'])
    rest['mask_BTS'] = rest['mask_BTS'].at[0].set(False)
    out, grads = run(ON_CPU.get(kernel, kernels.reference), arrays, rest)
    for array in (out, *grads.values()):
        assert not np.any(array[0]) and np.any(array[1]) and np.isfinite(array).all()


@pytest.mark.parametrize('kernel', ['reference', *ON_CPU])
def test_bfloat16_stays_near_float32(kernel):
    """Within 2^-5 of numbers that are about 1: the queries, the weights and the output are rounded to 2^-9 each."""
    arrays, rest = make(CASES['groups window'], jnp.bfloat16)
    exact = reference('groups window')
    out, grads = run(ON_CPU.get(kernel, kernels.reference), arrays, rest)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), exact[0], atol=2**-5)
    for name, grad in grads.items():
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_allclose(grad.astype(np.float32), exact[1][name], atol=2**-5, rtol=2**-5)


def test_probabilities_sum_to_one_and_with_a_sink_to_less():
    arrays, rest = make(CASES['sink'])
    sink_N, mask_BTS = arrays['sink_N'], rest['mask_BTS']
    plain = kernels.probabilities(arrays['q'], arrays['k'], mask_BTS, ScoreOptions(0.3))
    np.testing.assert_allclose(plain.sum(-1), 1, atol=1e-6)
    sunk = kernels.probabilities(arrays['q'], arrays['k'], mask_BTS, ScoreOptions(0.3, sink_N=sink_N))
    seen = np.broadcast_to(np.asarray(mask_BTS.any(-1))[:, None, None], sunk.shape[:-1])
    total = np.asarray(sunk.sum(-1))
    assert (total[seen] < 1).all() and (total[seen] > 0).all() and not total[~seen].any()
    never = ScoreOptions(0.3, sink_N=jnp.full_like(sink_N, -1e9))
    none = kernels.probabilities(arrays['q'], arrays['k'], mask_BTS, never)
    np.testing.assert_allclose(np.asarray(none)[seen], np.asarray(plain)[seen], atol=1e-6)


def test_the_backward_pass_of_softmax_keeps_the_probabilities_alone():
    logits, slope = (jnp.asarray(np.random.default_rng(seed).normal(size=(3, 7)), jnp.float32) for seed in (0, 1))
    probs, pull = jax.vjp(kernels.softmax, logits)
    expected, pull_of_jax = jax.vjp(lambda x: jax.nn.softmax(x, -1), logits)
    np.testing.assert_array_equal(probs, expected)
    np.testing.assert_allclose(pull(slope)[0], pull_of_jax(slope)[0], atol=1e-6)
    assert [kept.shape for kept in jax.tree.leaves(pull)] == [probs.shape]


@pytest.mark.parametrize('kernel', ['reference', 'chunked'])  # `triton` is in test_tile_dropout.py
def test_dropout_keeps_or_drops_each_probability(kernel):
    """With the identity as values the output is the probabilities themselves."""
    S, rate = 32, 0.25
    q, k = jax.random.normal(jax.random.key(0), (2, B, 4, S, 8))
    v, mask = jnp.broadcast_to(jnp.eye(S), (B, 4, S, S)), jnp.ones((B, S, S), bool)
    function = ON_CPU.get(kernel, kernels.reference)

    @jax.jit
    def attend(**options):
        return function(q, k, v, mask, ScoreOptions(0.3, **options))

    plain = attend()
    np.testing.assert_array_equal(attend(dropout_key=jax.random.key(1)), plain)
    dropped = np.asarray(attend(dropout_rate=rate, dropout_key=jax.random.key(1)))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], np.asarray(plain)[kept] / (1 - rate), rtol=1e-5)
    assert abs(kept.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / kept.size) ** 0.5
    assert len(np.unique(kept.reshape(-1, S), axis=0)) == B * 4 * S  # no two queries share their draws


def temporary_bytes(function, T, S):
    """Returns the scratch memory of the compiled gradient with respect to queries, keys and values."""
    q, k = jax.ShapeDtypeStruct((1, 4, T, 16), jnp.float32), jax.ShapeDtypeStruct((1, 4, S, 16), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, T, S), jnp.bool_)

    def loss(q, k, v, mask):
        return (function(q, k, v, mask, ScoreOptions(0.25)) ** 2).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, mask)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_memory_of_chunked_grows_with_the_length_and_that_of_the_reference_with_its_square():
    chunked = functools.partial(kernels.chunked, chunk=64)
    small, large = temporary_bytes(chunked, 1024, 1024), temporary_bytes(chunked, 2048, 2048)
    assert small < temporary_bytes(kernels.reference, 1024, 1024) / 4
    assert large < temporary_bytes(kernels.reference, 2048, 2048) / 8
    assert large < 2.5 * small


def test_the_table_says_what_a_kernel_cannot_do():
    for name in ('reference', 'chunked'):
        assert unserved(name, set(FEATURES), 'cpu') is None
    assert unserved('xla', {'bias', 'float32'}, 'tpu') is None
    assert unserved('cudnn', {'softcap', 'bfloat16'}, 'gpu') == (
        'model.attention_kernel=cudnn does not serve model.attention_softcap; reference, chunked, blocked, triton do'
    )
    assert unserved('flash', {'bfloat16'}, 'gpu') == (
        'model.attention_kernel=flash does not serve platform gpu; reference, chunked, blocked, xla, cudnn, triton do'
    )
    with pytest.raises(UserError, match=r"model.attention_kernel='flsh' is unknown; did you mean 'flash'"):
        unserved('flsh', set(), 'cpu')
    with pytest.raises(AssertionError, match='soft_cap'):
        unserved('xla', {'soft_cap'}, 'cpu')


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
@pytest.mark.parametrize('position', ['rope', 'relative'])
def test_parameters_begin_without_a_kernel_whose_library_may_be_missing(monkeypatch, platform, position):
    """A model with dropout trains by another kernel than it is evaluated with, and only that one need be there."""
    missing = KERNELS['reference']._replace(function=lambda *_: pytest.fail('it is called'), platforms=())
    for name in KERNELS.keys() - {'reference'}:
        monkeypatch.setitem(KERNELS, name, missing)
    monkeypatch.setattr(attention, 'platform', lambda: platform)
    model = build(config.Model(
        vocab_size=8, emb_dim=16, num_heads=2, num_decoder_layers=2, position=position, attention_dropout_rate=0.1,
    ))  # fmt: skip
    batch = {'inputs': jnp.ones((1, 4), jnp.int32)}
    begun = jax.eval_shape(model.init, jax.random.key(0), batch)
    with pytest.raises(pytest.fail.Exception, match='it is called'):
        jax.eval_shape(model.apply, begun, batch)


@pytest.mark.parametrize(
    'name, feature',
    [('xla', 'softcap'), ('xla', 'sink_N'), ('xla', 'dropout_rate'), ('flash', 'bias'), ('cudnn', 'softcap')],
)
def test_a_kernel_given_what_it_does_not_serve_raises(name, feature):
    x, places = jnp.ones((1, 2, 4, 8)), jnp.arange(4)[None]
    given = {'softcap': 2.0, 'sink_N': jnp.zeros(2), 'dropout_rate': 0.5, 'bias': jnp.zeros((1, 2, 4, 4))}[feature]
    more = {'dropout_key': jax.random.key(0)} if feature == 'dropout_rate' else {}
    with pytest.raises(ValueError, match='does not serve'):
        KERNELS[name].function(x, x, x, AttentionMask(places, places), ScoreOptions(1.0, **{feature: given}, **more))


def test_on_a_cpu_masks_are_added_to_the_same_scores(monkeypatch):
    """XLA adds to a product as it makes it, and selects from it in a pass of its own."""
    random = np.random.default_rng(0)
    q_BKGTH, k_BKSH = (jnp.asarray(random.normal(size=size), jnp.float32) for size in ((2, 2, 2, 8, 4), (2, 2, 8, 4)))
    mask_BTS = jnp.asarray(random.random((2, 8, 8)) < 0.5).at[0, 0].set(False)
    options = ScoreOptions(scale=1.0)
    found = {}
    for platform in ('cpu', 'gpu'):
        monkeypatch.setattr(kernels, 'platform', lambda platform=platform: platform)
        lowered = jax.jit(lambda *arrays: kernels.masked_logits(*arrays, options)).lower(q_BKGTH, k_BKSH, mask_BTS)
        selects = ''.join(line for line in lowered.as_text().splitlines() if 'stablehlo.select' in line)
        assert ('tensor<2x2x2x8x8xf32>' in selects) == (platform == 'gpu')
        found[platform] = lowered.compile()(q_BKGTH, k_BKSH, mask_BTS)
    np.testing.assert_array_equal(found['cpu'], found['gpu'])


@pytest.mark.parametrize('heads', [(4, 4), (4, 2)], ids=str)
def test_a_tpu_asks_one_query_a_head_twice_and_nothing_changes(monkeypatch, heads):
    case = Case('padding', heads=heads, lengths=(1, 9), bias=B, softcap=3.0, sink=True)
    arrays, rest = make(case)
    found, products = {}, {}
    for platform in ('cpu', 'tpu'):
        monkeypatch.setattr(kernels, 'platform', lambda platform=platform: platform)
        found[platform] = run(kernels.reference, arrays, rest)
        options = ScoreOptions(rest['scale'], bias=arrays['bias'])
        given = arrays['q'], arrays['k'], arrays['v'], rest['mask_BTS'], options
        text = str(jax.make_jaxpr(lambda *given: kernels.reference(*given))(*given))
        products[platform] = set(re.findall(r':f32\[2,\d,(\d),\d+\] = dot_general', text))
    assert products == {'cpu': {str(heads[0] // heads[1])}, 'tpu': {'2'}}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *found.values())


@pytest.mark.slow
@pytest.mark.parametrize('heads', [4, 3])  # which two devices divide, and do not
def test_a_kernel_of_each_device_has_its_heads_of_what_all_rows_share(heads):
    """And its gradient is the sum over all rows."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((4, heads, 5, 2)), jnp.float32) for _ in range(3))
    bias_1NTS = jnp.asarray(rng.standard_normal((1, heads, 5, 5)), jnp.float32)

    def loss(bias_1NTS):
        def attend(q, k, v, by_row, bias):
            return jax.nn.softmax(q @ k.swapaxes(2, 3) + bias) @ v

        return (on_each_device(attend, q, k, v, None, bias_1NTS) ** 3).sum()

    alone = jax.value_and_grad(loss)(bias_1NTS)
    mesh_config = Mesh(data=2, tensor=2)
    with sharding.placed(meshes.make_mesh(mesh_config, jax.devices()[:4]), mesh_config):
        found = jax.jit(jax.value_and_grad(loss))(bias_1NTS)
    for got, wanted in zip(found, alone, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
