"""Decoding: the step function equals the full forward pass, and each search finds what it says it finds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import BANNED, BOS, CASES, EOS, FORWARD, LATENT_CASES, LENGTHS, PAD, B, P, T, V, batch_of, make, row
from tformer import config
from tformer.decode.beam import Beams, beam_search, length_penalty
from tformer.decode.generate import make_generate
from tformer.decode.sample import Ending, Prompt, Sampling, keep_top_k, keep_top_p, sample
from tformer.errors import UserError

FAMILIES = ('decoder', 'encoder_decoder')


@pytest.fixture(
    scope='module', params=[*CASES, *(pytest.param(case, marks=pytest.mark.proof) for case in LATENT_CASES)]
)
def case(request):
    model, variables = make(request.param, scale=2.0, position='learned', num_kv_heads=2)
    return request.param.partition(' of ')[0], model, variables


def full_logprobs(model, variables, batch, tokens_BT):
    """Log-probabilities [B, T, V] of each new token by one forward pass over prompt and new tokens together."""
    prompt_len, new = batch['inputs'].shape[1], tokens_BT.shape[1]
    after = batch['positions'][:, -1:] + 1 + np.arange(new, dtype=np.int32)[None]
    whole = {
        **batch,
        'inputs': np.concatenate([batch['inputs'], tokens_BT], 1),
        'positions': np.concatenate([batch['positions'], after], 1),
    }
    if 'prefix' in batch:
        whole['prefix'] = np.concatenate([batch['prefix'], np.zeros_like(tokens_BT, bool)], 1)
    logits = FORWARD(model, variables, whole)
    return jax.nn.log_softmax(logits[:, prompt_len - 1 : prompt_len - 1 + new])


START = jax.jit(
    lambda model, variables, batch, slots: model.apply(variables, batch, slots, method='start'), static_argnums=(0, 3)
)
EXTEND = jax.jit(
    lambda model, variables, tokens, positions, cache: model.apply(
        variables, tokens, positions, cache, method='extend'
    ),
    static_argnums=0,
)


def score(logprobs_BTV, tokens_BT):
    """Sum of the log-probabilities of the tokens up to EOS."""
    picked = np.take_along_axis(np.asarray(logprobs_BTV), tokens_BT[:, :, None], 2)[:, :, 0]
    ended_before = np.cumsum(tokens_BT == EOS, 1) - (tokens_BT == EOS)
    return np.sum(np.where(ended_before == 0, picked, 0.0), 1)


def generate(case, strategy, batch, seed=0, **fields):
    _, model, variables = case
    key = (model, strategy, tuple(fields.items()))
    if key not in GENERATE:
        decode = config.Decode(**{'strategy': strategy, 'max_len': T, **fields})
        GENERATE[key] = make_generate(model, decode, eos=EOS, banned=BANNED)
    tokens, scores = GENERATE[key](variables, batch, jax.random.key(seed))
    return np.asarray(tokens), np.asarray(scores)


GENERATE = {}  # compiled programs, shared


# --------------------------------------------------------------------------------------------- the step function
@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('position', ['learned', 'rope'])
def test_decoding_equals_the_full_forward_pass(family, position):
    model, variables = make(family, position=position, num_kv_heads=2)
    batch = batch_of(family)
    batch['inputs'] = np.random.default_rng(1).integers(3, V, (B, 6)).astype(np.int32)
    batch['positions'] = np.broadcast_to(np.arange(6, dtype=np.int32), (B, 6))
    want = FORWARD(model, variables, batch)
    for chunks in ([1, 1, 1, 1, 1, 1], [4, 2], [6]) if position == 'rope' else ([1, 3, 2],):
        cache = START(model, variables, batch, 9)
        got, at = [], 0
        for size in chunks:
            where = slice(at, at := at + size)
            logits, cache = EXTEND(model, variables, batch['inputs'][:, where], batch['positions'][:, where], cache)
            got.append(logits)
        np.testing.assert_allclose(np.concatenate(got, 1), want, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['greedy', 'sample', 'beam'])
@pytest.mark.proof_cases(
    'prefix_decoder-greedy', 'prefix_decoder-beam', 'prefix_decoder-sample', 'encoder_decoder-greedy'
)
def test_each_row_is_as_if_alone(case, strategy):
    batch = batch_of(case[0])
    tokens, scores = generate(case, strategy, batch)
    for i in range(B) if strategy == 'greedy' else (1,):
        alone_tokens, alone_scores = generate(case, strategy, row(batch, i))
        np.testing.assert_array_equal(alone_tokens[0], tokens[i])
        np.testing.assert_allclose(alone_scores[0], scores[i], atol=1e-4)


# ------------------------------------------------------------------------------------------------ greedy, sample
@pytest.mark.slow
def test_greedy_is_the_argmax_of_the_full_forward_pass_iterated(case):
    family, model, variables = case
    batch = batch_of(family)
    tokens, scores = generate(case, 'greedy', batch)
    want = np.zeros((B, T), np.int32)
    for step in range(T):
        logprobs = np.array(full_logprobs(model, variables, batch, want)[:, step])
        logprobs[:, BANNED] = -np.inf
        ended = np.any(want[:, :step] == EOS, 1)
        want[:, step] = np.where(ended, PAD, logprobs.argmax(1))
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_allclose(scores, score(full_logprobs(model, variables, batch, tokens), tokens), atol=1e-4)


@pytest.mark.slow
def test_scores_of_samples_are_those_of_the_full_forward_pass(case):
    family, model, variables = case
    batch = batch_of(family)
    tokens, scores = generate(case, 'sample', batch, temperature=1.7, top_k=6, top_p=0.95)
    np.testing.assert_allclose(scores, score(full_logprobs(model, variables, batch, tokens), tokens), atol=1e-4)
    assert not np.isin(tokens, BANNED[1:]).any()


@pytest.mark.slow
def test_samples_depend_on_the_key_and_the_row_number_only(case):
    batch = batch_of(case[0])
    rows = np.array([4, 4, 5, 6, 7, 8])  # several: two rows may well draw the same first token, and it may end them
    batch = {name: np.repeat(value[:1], len(rows), 0) for name, value in batch.items()} | {'rows': rows}
    tokens, _ = generate(case, 'sample', batch, temperature=3.0)
    other, _ = generate(case, 'sample', batch, temperature=3.0, seed=1)
    assert (tokens[0] == tokens[1]).all()
    assert len(np.unique(tokens[1:], axis=0)) > 1 and (tokens != other).any()


@pytest.mark.slow
@pytest.mark.proof_cases('prefix_decoder')
def test_several_draws_of_a_text_begin_with_that_of_one_and_are_not_the_same(case):
    family, model, variables = case
    batch = batch_of(family)
    one, _ = generate(case, 'sample', batch, temperature=3.0)
    tokens, scores = generate(case, 'sample', batch, temperature=3.0, num_outputs=3)
    assert tokens.shape == (3 * B, T)
    np.testing.assert_array_equal(tokens[::3], one)
    many = {name: np.repeat(value, 3, 0) for name, value in batch.items()}
    np.testing.assert_allclose(scores, score(full_logprobs(model, variables, many, tokens), tokens), atol=1e-4)
    assert all(len(np.unique(tokens[3 * i : 3 * i + 3], axis=0)) > 1 for i in range(B))
    alone, _ = generate(case, 'sample', row(batch, 1), temperature=3.0, num_outputs=3)
    np.testing.assert_array_equal(alone, tokens[3:6])


@pytest.mark.parametrize('top_k', [None, 1, 3, 50])
@pytest.mark.parametrize('top_p', [None, 1e-6, 0.3, 0.75, 1.0])
def test_cuts_equal_a_plain_reference(top_k, top_p):
    logits = np.random.default_rng(2).normal(size=(5, 20)).astype(np.float32) * 2
    logits[:, 4] = -np.inf
    got = np.asarray(keep_top_p(keep_top_k(jnp.array(logits) / jnp.float32(0.7), top_k), top_p))
    for row_logits, kept in zip(logits, got, strict=True):
        order = np.argsort(-row_logits)[: top_k or None]
        probs = np.exp(row_logits[order] / 0.7)
        before = np.cumsum(probs / probs.sum()) - probs / probs.sum()
        want = order[before < (1.0 if top_p is None else top_p)]
        np.testing.assert_array_equal(np.flatnonzero(np.isfinite(kept)), sorted(want[np.isfinite(row_logits[want])]))
        np.testing.assert_allclose(kept[want], row_logits[want] / np.float32(0.7), rtol=1e-6)


def test_ties_at_the_border_stay_together():
    logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
    np.testing.assert_array_equal(np.isfinite(keep_top_k(logits, 2)), [[True] * 4])
    np.testing.assert_array_equal(np.isfinite(keep_top_p(logits, 0.5)), [[True] * 4])
    np.testing.assert_array_equal(np.isfinite(keep_top_p(logits, 0.4)), [[True, False, False, False]])


def fixed(logits_V):
    """A step function whose next token has always the same distribution, and counts its calls in the cache."""

    def extend(tokens_BT, positions_BT, cache):
        return jnp.broadcast_to(logits_V[None, None], (*tokens_BT.shape, logits_V.shape[0])), cache + 1

    return extend


def bos_prompt(rows):
    return Prompt(jnp.full((rows, 1), BOS), jnp.zeros((rows, 1), jnp.int32), jnp.arange(rows))


def test_sampling_frequencies_are_the_probabilities():
    logits, rows = jnp.array([-1.0, 3.0, -1e9, 0.0, 0.5, 1.0, 1.5, -0.5]), 4000
    draw = jax.jit(lambda rng, heat: sample(
        fixed(logits), 0, bos_prompt(rows), Ending(2, EOS, BANNED), rng, Sampling(heat, top_k=4)
    ))  # fmt: skip
    tokens = np.asarray(draw(jax.random.key(3), 0.8)[0])
    probs = np.exp(np.array([0.0, 0.5, 1.0, 1.5]) / 0.8)
    want = 2 * rows * probs / probs.sum()
    seen = np.bincount(tokens.ravel(), minlength=8)
    assert seen.sum() == seen[3:7].sum()
    assert np.sum((seen[3:7] - want) ** 2 / want) < 16.27  # chi-square, 3 degrees of freedom, p = 0.001
    together = np.histogram2d(tokens[:, 0], tokens[:, 1], [3, 4, 5, 6, 7])[0]
    pairs = rows * np.outer(probs, probs) / probs.sum() ** 2
    assert np.sum((together - pairs) ** 2 / pairs) < 37.7  # steps are independent: 15 degrees of freedom


def test_draws_of_one_text_are_independent():
    logits, texts, draws = jnp.array([-1e9, -1e9, -1e9, 0.0, 1.0, 1.5]), 1500, 3
    prompt = bos_prompt(texts).repeat(draws)
    tokens = jax.jit(lambda rng: sample(fixed(logits), 0, prompt, Ending(1, EOS, BANNED), rng, Sampling()))(
        jax.random.key(5)
    )[0]
    drawn = np.asarray(tokens).reshape(texts, draws)
    probs = np.exp([0.0, 1.0, 1.5])
    want = texts * np.outer(probs, probs) / probs.sum() ** 2
    for one, other in itertools.combinations(range(draws), 2):
        together = np.histogram2d(drawn[:, one], drawn[:, other], [3, 4, 5, 6])[0]
        assert np.sum((together - want) ** 2 / want) < 26.1  # chi-square, 8 degrees of freedom, p = 0.001


# --------------------------------------------------------------------------------------------------- ends, limits


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['greedy', 'sample', 'beam'])
def test_stops_when_every_row_has_ended_and_pads_behind(case, strategy):
    family, model, variables = case
    calls = []

    class Watched:
        """The model, its logits replaced: after `new` tokens EOS is nearly certain."""

        cfg = model.cfg

        def apply(self, variables, *args, method):
            out = model.apply(variables, *args, method=method)
            if method == 'start':
                return out
            positions_BT = args[1]
            jax.debug.callback(lambda: calls.append(1))
            ends_BT = positions_BT >= (1 if family == 'encoder_decoder' else 6)
            ending_V = jnp.where(jnp.arange(V) == EOS, 50.0, 0.0)
            going_V = jnp.where(jnp.arange(V) == 7, 50.0, 0.0)
            logits = jnp.where(ends_BT[:, :, None], ending_V[None, None], going_V[None, None])
            return logits, out[1]

    batch = batch_of(family)
    decode = config.Decode(strategy=strategy, max_len=T + 3)
    tokens, _ = make_generate(Watched(), decode, eos=EOS, banned=BANNED)(variables, batch, jax.random.key(0))
    jax.effects_barrier()
    new = [2] * B if family == 'encoder_decoder' else [6 - n + 2 for n in LENGTHS]
    for got, length in zip(np.asarray(tokens), new, strict=True):
        np.testing.assert_array_equal(got, [7] * (length - 1) + [EOS] + [PAD] * (T + 3 - length))
    steps = len(calls) - (family != 'encoder_decoder')  # but for the prefill
    assert steps == max(new) or (strategy == 'beam' and steps < T + 3)  # beams go on until none can do better


@pytest.mark.slow
def test_a_row_of_padding_alone_gets_nothing(case):
    batch = batch_of(case[0])
    batch['positions'] = np.where(np.arange(B)[:, None] == 1, -1, batch['positions'])
    for strategy in ('greedy', 'sample', 'beam'):
        tokens, _ = generate(case, strategy, batch)
        assert (tokens[1] == PAD).all() and (tokens[0] != PAD).any()


def test_positions_stay_within_the_model(case):
    batch = batch_of(case[0])
    room = 16 - batch['inputs'].shape[1] + 1
    assert generate(case, 'greedy', batch, max_len=room)[0].shape == (B, room)
    for strategy in ('greedy', 'beam'):
        with pytest.raises(UserError, match=r'decode.max_len=\d+ new tokens need 17 positions, but model.max_len=16'):
            generate(case, strategy, batch, max_len=room + 1)


def test_unknown_strategy_names_the_nearest(case):
    with pytest.raises(UserError, match=r"decode.strategy='beams' is unknown; did you mean 'beam'"):
        generate(case, 'beams', batch_of(case[0]))


# ----------------------------------------------------------------------------------------------------------- beam
def test_length_penalty_of_the_paper():
    np.testing.assert_allclose(length_penalty(1, 0.6), 1.0)
    np.testing.assert_allclose(length_penalty(7, 1.0), 2.0)
    np.testing.assert_allclose(length_penalty(np.arange(4.0), 0.0), np.ones(4))
    np.testing.assert_allclose(length_penalty(3, 2.0, offset=0.0), 9.0)


@pytest.mark.slow
def test_one_beam_is_greedy(case):
    batch = batch_of(case[0])
    tokens, scores = generate(case, 'greedy', batch)
    beam_tokens, beam_scores = generate(case, 'beam', batch, beam_size=1, length_penalty=0.0)
    np.testing.assert_array_equal(beam_tokens, tokens)
    np.testing.assert_allclose(beam_scores, scores, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
def test_enough_beams_find_what_exhaustive_search_finds(family):
    vocab_size, longest, beams = 6, 4, 108
    model, variables = make(family, vocab_size, seed=1, scale=1.5)
    batch = batch_of(family, vocab_size)

    @jax.jit
    def search(variables, alpha):
        def extend(tokens, positions, cache):
            return model.apply(variables, tokens, positions, cache, method='extend')

        slots = batch['inputs'].shape[1] + beams * longest
        cache = model.apply(variables, batch, slots, method='start')
        prompt = Prompt(jnp.array(batch['inputs']), jnp.array(batch['positions']), jnp.arange(B))
        return beam_search(extend, cache, prompt, Ending(longest, EOS, BANNED), Beams(beams, alpha))

    ended = [
        (*words, EOS, *[PAD] * (longest - 1 - n))
        for n in range(longest)
        for words in itertools.product((3, 4, 5), repeat=n)
    ]
    tokens_NT = np.array(ended, np.int32)
    lengths_N = np.sum(tokens_NT != PAD, 1)
    for i in range(B):
        many = {name: np.repeat(value, len(ended), 0) for name, value in row(batch, i).items()}
        plain_N = score(full_logprobs(model, variables, many, tokens_NT), tokens_NT)
        for alpha in (0.0, 0.6, 2.0):
            found = search(variables, alpha)
            want_N = plain_N / ((5 + lengths_N) / 6) ** alpha
            order = np.argsort(-want_N)
            np.testing.assert_array_equal(found.tokens_BMT[i][0], tokens_NT[order[0]])
            np.testing.assert_allclose(found.scores_BM[i][:40], want_N[order[:40]], atol=1e-4)
            np.testing.assert_array_equal(found.lengths_BM[i][:40], np.sum(found.tokens_BMT[i][:40] != PAD, 1))
            assert np.isneginf(found.scores_BM[i][40:]).all() and (found.tokens_BMT[i][40:] == PAD).all()


@pytest.mark.proof_cases('prefix_decoder', 'encoder_decoder')
def test_several_outputs_of_a_beam_are_its_best_hypotheses(case):
    batch = batch_of(case[0])
    one, best = generate(case, 'beam', batch, beam_size=3, length_penalty=1.0)
    tokens, scores = generate(case, 'beam', batch, beam_size=3, length_penalty=1.0, num_outputs=2)
    np.testing.assert_array_equal(tokens[::2], one)
    np.testing.assert_array_equal(scores[::2], best)
    _, model, variables = case
    many = {name: np.repeat(value, 2, 0) for name, value in batch.items()}
    lengths, found = np.sum(tokens != PAD, 1), np.isfinite(scores)
    plain = score(full_logprobs(model, variables, many, tokens), tokens)
    np.testing.assert_allclose(scores[found], (plain / ((5 + lengths) / 6))[found], atol=1e-4)
    assert (tokens[~found] == PAD).all() and found[1::2].any()
    assert (scores[::2] > scores[1::2]).all() and (tokens[::2] != tokens[1::2]).any(1).all()


@pytest.mark.slow
def test_beam_scores_are_normalised_log_probabilities(case):
    family, model, variables = case
    batch = batch_of(family)
    tokens, scores = generate(case, 'beam', batch, beam_size=3, length_penalty=1.0)
    plain = score(full_logprobs(model, variables, batch, tokens), tokens)
    np.testing.assert_allclose(scores, plain / ((5 + np.sum(tokens != PAD, 1)) / 6), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['greedy', 'sample', 'beam'])
def test_penalties_see_the_whole_prompt_however_it_was_read(case, strategy):
    """No token of it, nor a new one, comes again; what such a model writes by itself repeats them."""
    batch = batch_of(case[0])
    asked = {'temperature': 0.5} if strategy == 'sample' else {}
    tokens, _ = generate(case, strategy, batch, max_len=5, no_repeat_ngram=1, **asked)
    for i, written in enumerate(np.asarray(tokens).tolist()):
        prompt = batch['inputs'][i][batch['positions'][i] >= 0].tolist()
        new = [token for token in written if token != PAD]
        assert len({*prompt, *new}) == len({*prompt}) + len(new)


# ------------------------------------------------------------------------------------- prompts that see themselves
def test_a_prompt_sees_itself_whole_and_what_comes_after_it_does_not_change_it(case):
    """Or else the tests above would hold for any decoder."""
    family, model, variables = case
    if family == 'prefix_decoder':
        batch = batch_of(family)
        last = np.full((B, 1), 5, np.int32)
        first = np.asarray(full_logprobs(model, variables, batch, last))
        plain = {name: value for name, value in batch.items() if name != 'prefix'}
        assert np.abs(first - full_logprobs(model, variables, plain, last)).max() > 1e-2


def test_the_last_token_of_a_prompt_is_read_twice_and_written_once():
    """What `make_generate` does by hand: logits of every step as in the full forward pass, with rows of padding."""
    model, variables = make('prefix_decoder', position='learned', num_kv_heads=2)
    batch, new = batch_of('prefix_decoder'), np.array([[3, 4, 5], [6, 7, 8], [9, 10, 3]], np.int32)
    want = np.asarray(full_logprobs(model, variables, batch, new))
    cache = START(model, variables, batch, 16)
    tokens, positions = jnp.asarray(batch['inputs']), jnp.asarray(batch['positions'])
    read = jax.jit(lambda v, c: model.apply(v, tokens, positions, c, batch['prefix'], method='extend'))
    cache, last, got = read(variables, cache)[1].back(1), tokens[:, -1:], []
    assert cache.index == P - 1
    for step in range(3):
        logits, cache = EXTEND(model, variables, last, positions[:, -1:] + step, cache)
        got.append(jax.nn.log_softmax(logits))
        last = jnp.asarray(new[:, step : step + 1])
    np.testing.assert_allclose(np.concatenate(got, 1), want, atol=1e-5)
    assert (
        cache.positions_BS[:, : P + 2] == np.concatenate([positions, positions[:, -1:] + np.array([[1, 2]])], 1)
    ).all()


@pytest.mark.slow
def test_enough_beams_find_the_best_after_a_prompt_that_sees_itself():
    vocab_size, longest = 6, 3
    model, variables = make('prefix_decoder', vocab_size, seed=1, scale=1.5)
    batch = batch_of('prefix_decoder', vocab_size)
    decode = config.Decode(strategy='beam', max_len=longest, beam_size=36, length_penalty=0.6)
    tokens, scores = make_generate(model, decode, eos=EOS, banned=BANNED)(variables, batch, None)
    words = [w for n in range(longest + 1) for w in itertools.product((3, 4, 5), repeat=n)]
    every_NT = np.array([[*w, EOS, PAD, PAD, PAD][:longest] for w in words if len(w) < longest], np.int32)
    lengths_N = np.sum(every_NT != PAD, 1)
    for i in range(B):
        many = {name: np.repeat(value, len(every_NT), 0) for name, value in row(batch, i).items()}
        want_N = score(full_logprobs(model, variables, many, every_NT), every_NT) / ((5 + lengths_N) / 6) ** 0.6
        np.testing.assert_array_equal(tokens[i], every_NT[want_N.argmax()])
        np.testing.assert_allclose(scores[i], want_N.max(), atol=1e-4)
