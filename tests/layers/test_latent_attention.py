"""Multi-head latent attention: the paper's formulas, and decoding by latents alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from small_decoding import V, batch_of, make
from tformer.checks.model import check_model
from tformer.config import Model
from tformer.errors import UserError
from tformer.layers.cache import empty_cache
from tformer.layers.latent_attention import LatentAttention
from tformer.layers.masks import ordered
from tformer.layers.resolved import resolve_model
from tformer.training import flops

C, R, H, U, N = 6, 4, 4, 3, 4
LATENT = {'position': 'rope', 'kv_latent_dim': C, 'rotary_dim': R, 'head_dim': H, 'value_dim': U}


def turned(x, position):
    half = x.size // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def normed(x, params):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * params['scale']


def paper(p, x):
    """Equations 9 to 19, one query and one head at a time; the stream of one row, positions from 0."""
    c = normed(x @ p['latent']['kernel'], p['latent_norm'])
    source = normed(x @ p['query_latent']['kernel'], p['query_latent_norm']) if 'query_latent' in p else x
    q, shared = np.tensordot(source, p['query']['kernel'], 1), x @ p['rotary_key']['kernel']
    heads = np.zeros((len(x), N, U))
    for t in range(len(x)):
        for n in range(N):
            keys = [np.concatenate([c[s] @ p['key_up']['kernel'][:, n], turned(shared[s], s)]) for s in range(t + 1)]
            query = np.concatenate([q[t, n, :H], turned(q[t, n, H:], t)])
            weights = np.exp(np.stack(keys) @ query / np.sqrt(H + R))
            heads[t, n] = weights / weights.sum() @ (c[: t + 1] @ p['value_up']['kernel'][:, n])
    return np.tensordot(heads, p['out']['kernel'], 2)


@pytest.mark.slow
@pytest.mark.parametrize('latent', [None, 5])
def test_one_layer_is_the_papers_equations(latent):
    fields = {'norm': None, 'norm_placement': 'no_residual', 'mlp_bias': False, 'dropout_rate': 0.0}
    model, variables = make('decoder', **LATENT, query_latent_dim=latent, num_decoder_layers=1, **fields)
    tokens = np.array([[3, 7, 5, 4]], np.int32)
    _, state = model.apply(variables, {'inputs': tokens}, capture_intermediates=True, mutable=['intermediates'])
    stack = nn.unbox(variables)['params']['decoder']['stack']['layers']['attention']
    params = jax.tree.map(lambda x: np.asarray(x[0], np.float64), stack)
    table = np.asarray(nn.unbox(variables)['params']['embed']['table'], np.float64)
    layers = state['intermediates']['decoder']['stack']['layers']
    found = layers['attention']['__call__'][0][0, 0]
    np.testing.assert_allclose(found, paper(params, table[tokens[0]] * table.shape[1] ** 0.5), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    'family', ['decoder', 'prefix_decoder', pytest.param('encoder_decoder', marks=pytest.mark.proof)]
)
def test_steps_by_latents_are_the_full_forward_of_ragged_rows(family):
    fields = {'attention_pattern': ('local', 'global'), 'window': 3, 'attention_sink': 'learned'}
    model, variables = make(family, scale=2.0, **LATENT, query_latent_dim=5, attention_softcap=4.0, **fields)
    batch = batch_of(family)
    last = batch['positions'][:, -1:]
    more = np.random.default_rng(1).integers(3, V, (len(last), 4)).astype(np.int32)
    places = last + 1 + np.arange(4, dtype=np.int32)[None]
    whole = {**batch, 'inputs': np.concatenate([batch['inputs'], more], 1)}
    whole['positions'] = np.concatenate([batch['positions'], places], 1)
    if 'prefix' in batch:
        whole['prefix'] = np.concatenate([batch['prefix'], np.zeros(more.shape, bool)], 1)
    expected = jax.jit(model.apply)(variables, whole)
    cache = model.apply(variables, batch, 12, method='start')  # more than half of its slots are read at once
    assert [x.shape for x in cache.own[0].pair()] == [(3, 1, 12, R), (3, 1, 12, C)]
    read = jax.jit(functools.partial(model.apply, method='extend'))
    parts, P = [(batch['inputs'], batch['positions'])], batch['inputs'].shape[1]
    parts += [(more[:, a:b], places[:, a:b]) for a, b in ((0, 1), (1, 2), (2, 4))]  # a token, rows alone, then two
    found = []
    for number, (tokens, positions) in enumerate(parts):
        cache = cache.by_row() if number == 2 else cache
        prefix = batch.get('prefix') if number == 0 else None
        logits, cache = read(variables, tokens, positions, cache, prefix)
        found.append(logits)
    real = whole['positions'] >= 0
    assert jnp.concatenate(found, 1).shape[1] == P + 4
    np.testing.assert_allclose(np.concatenate(found, 1)[real], np.asarray(expected)[real], rtol=1e-4, atol=1e-4)


def test_a_token_takes_a_latent_and_one_rotary_key_of_the_cache():
    cfg = resolve_model(Model(num_decoder_layers=3, vocab_size=V, **LATENT))
    cache = jax.eval_shape(lambda: empty_cache(cfg, 2, 10))
    assert sum(x.size for x in jax.tree.leaves(cache.own)) == 3 * 2 * 10 * (C + R)


@pytest.mark.parametrize(
    ('fields', 'line'),
    [
        ({'position': 'alibi'}, 'needs model.position=rope, not alibi'),
        ({'rotary_dim': 3}, 'needs an even model.rotary_dim, not 3'),
        ({'qk_norm': 'rmsnorm'}, 'needs model.qk_norm=None'),
        ({'num_kv_heads': 2}, 'all heads share a latent'),
        ({'lora_rank': 2}, 'a latent has no adapters'),
        ({'parametrization': 'mup', 'base_emb_dim': 8}, 'needs model.parametrization=None'),
    ],
)
def test_what_does_not_fit_latents_is_refused_in_a_line(fields, line):
    with pytest.raises(UserError, match=line):
        check_model(Model(**{**LATENT, **fields}))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['hypotheses', 'rows'])
def test_hypotheses_of_a_row_and_repeated_rows_by_latents_are_the_full_forward(kind):
    model, variables = make('decoder', scale=2.0, **LATENT)
    batch = batch_of('decoder')
    expected = np.asarray(jax.jit(model.apply)(variables, batch))[:, -1]
    cache = model.apply(variables, batch, 12, method='start')
    read = jax.jit(functools.partial(model.apply, method='extend'))
    logits, cache = read(variables, batch['inputs'], batch['positions'], cache)
    np.testing.assert_allclose(logits[:, -1], expected, rtol=1e-4, atol=1e-4)
    two = np.argsort(-expected, -1)[:, :2].astype(np.int32)
    places = np.repeat(batch['positions'][:, -1:] + 1, 2, 1)
    if kind == 'hypotheses':  # two hypotheses of each row
        found, _ = read(variables, two, places, cache.branch(2))
    else:  # the same as rows of their own
        rows = cache.repeat(2).ring(12, cache.index)
        found, _ = read(variables, two.reshape(-1, 1), places.reshape(-1, 1), rows)
        found = found.reshape(3, 2, V)
    for number in range(2):
        tokens = np.concatenate([batch['inputs'], two[:, number : number + 1]], 1)
        whole = {'inputs': tokens, 'positions': np.concatenate([batch['positions'], places[:, :1]], 1)}
        best = np.asarray(jax.jit(model.apply)(variables, whole))[:, -1]
        np.testing.assert_allclose(np.asarray(found)[:, number], best, rtol=1e-4, atol=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize('family', ['decoder', 'encoder_decoder'])
def test_what_is_computed_again_or_unrolled_changes_no_gradient(family):
    batch, found = {**batch_of(family), **batch_of('decoder')}, {}
    fields = {**LATENT, 'query_latent_dim': 5, 'dropout_rate': 0.0}
    for changes in ({}, {'remat': 'attention'}, {'remat': 'dots'}, {'remat': 'full'}, {'scan_layers': False}):
        model, variables = make(family, scale=2.0, **fields, **changes)
        probe = jax.jit(jax.grad(lambda variables, model=model: jnp.tanh(model.apply(variables, batch)).sum()))
        found[str(changes)] = nn.unbox(probe(variables))
    plain = found.pop('{}')
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(plain))
    for gradients in found.values():
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), gradients, plain)


@pytest.mark.parametrize(('family', 'pairs'), [('decoder', 3 * 10**2), ('encoder_decoder', 2 * 7**2 + 3 * 10**2)])
def test_scores_cost_their_rotary_part_in_self_attention_alone(family, pairs):
    layers = {'num_encoder_layers': 2, 'num_decoder_layers': 3, 'num_heads': N}
    plain = {name: LATENT[name] for name in ('position', 'head_dim', 'value_dim')}
    models = [resolve_model(Model(family, **layers, **fields)) for fields in (LATENT, plain)]
    trained = {'encoder': 1.0, 'decoder': 1.0}
    costs = [flops._attention(model, 10, 7, trained) for model in models]
    assert costs[0] - costs[1] == 6 * N * R * pairs


@pytest.mark.parametrize('by_latents', [False, True])
def test_a_prompt_that_fills_half_of_its_cache_is_read_with_keys_of_each_head(monkeypatch, by_latents):
    """They are narrower than latents, which serve where few tokens read many. The results are the same."""
    model, variables = make('decoder', **LATENT)
    batch, absorbed, calls = batch_of('decoder'), LatentAttention.absorbed, []
    slots = 2 * batch['inputs'].shape[1] + by_latents
    cache = model.apply(variables, batch, slots, method='start')

    def read():
        return model.apply(variables, batch['inputs'], batch['positions'], cache, method='extend')[0]

    plain, real = model.apply(variables, batch), batch['positions'] >= 0
    monkeypatch.setattr(LatentAttention, 'absorbed', lambda *given: calls.append(1) or absorbed(*given))
    with ordered('front'):
        found = read()
    assert bool(calls) == by_latents
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(plain)[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('kind', [None, 'int8'])
def test_a_step_reads_latents_where_they_are(monkeypatch, kind):
    """Also integers. Latents and rotary keys side by side would be a copy of the cache; the result is theirs."""
    model, variables = make('decoder', scale=2.0, **LATENT, attention_softcap=4.0, attention_sink='learned')
    batch, slots = batch_of('decoder'), 13
    cache = model.apply(variables, batch, slots, method='start')
    cache = cache if kind is None else cache.quantized()
    _, cache = model.apply(variables, batch['inputs'], batch['positions'], cache, method='extend')
    tokens, places = batch['inputs'][:, -1:], batch['positions'][:, -1:] + 1

    def step():
        read = functools.partial(model.apply, variables, tokens, places, cache, method='extend')
        return str(jax.make_jaxpr(read)()), read()[0]

    program, found = step()
    monkeypatch.setattr(LatentAttention, 'few', lambda *_: False)
    copying, expected = step()
    copied = f'[{len(tokens)},1,{slots},{C + R}]'
    assert copied in copying and copied not in program
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
