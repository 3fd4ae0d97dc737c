"""The coverage penalty: against a plain search, all texts there are, and the attention maps of whole forward passes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import BANNED, BOS, EOS, FORWARD, PAD, B, T, Walk, batch_of, make, row
from tformer import config
from tformer.decode.beam import Beams, beam_search
from tformer.decode.coverage import Covered, counted
from tformer.decode.generate import make_generate
from tformer.decode.sample import Ending, Prompt
from tformer.evaluation import activations, attention_maps

V, ROWS, STATES, SOURCE, LONGEST = 5, 24, 53, 3, 4
DRAWN = np.random.default_rng(0)
TABLES = 1.5 * DRAWN.standard_normal((ROWS, STATES, V)).astype(np.float32)
TABLES[..., EOS] += np.linspace(-2, 2, ROWS)[:, None]
REAL = np.arange(SOURCE) < 1 + np.arange(ROWS)[:, None] % SOURCE
WEIGHTS = DRAWN.dirichlet(np.full(SOURCE, 0.3), (ROWS, STATES)).astype(np.float32)


def attend(tokens_BM, positions_BM, cache):
    cache = cache.read(tokens_BM, positions_BM, STATES)
    return cache.at(TABLES), cache, cache.at(WEIGHTS)


def judged(number, tokens, alpha, beta):
    """Returns (the log-probability, the score as equation 14 has it) of a text of the tables."""
    state, total, seen = 0, 0.0, np.zeros(SOURCE)
    for position, (last, token) in enumerate(zip((BOS, *tokens[:-1]), tokens, strict=True)):
        state = (state * 7 + last + 11 * position) % STATES
        x = TABLES[number, state].astype(np.float64)
        total += x[token] - np.log(np.exp(x).sum())
        seen += WEIGHTS[number, state]
    covered = sum(np.log(min(seen[i], 1.0)) for i in range(SOURCE) if REAL[number, i])
    return total, total / ((5 + len(tokens)) / 6) ** alpha + beta * covered


def plain(number, beams):
    """Returns (score, tokens), best first, of a search that keeps lists and never stops early."""
    alpha, beta, size = beams.length_penalty, beams.coverage_penalty, beams.beam_size
    alive, finished = [(0.0, ())], []
    for step in range(LONGEST):
        grown = [(*tokens, token) for _, tokens in alive for token in range(V) if token not in BANNED]
        grown = sorted(((judged(number, tokens, 0, 0)[0], tokens) for tokens in grown), reverse=True)
        alive = [one for one in grown if one[1][-1] != EOS][:size]
        cut = beams.count_cut and step == LONGEST - 1
        ended = [tokens for _, tokens in grown[:size] if cut or tokens[-1] == EOS]
        finished = sorted(finished + [(judged(number, x, alpha, beta)[1], x) for x in ended], reverse=True)[:size]
        if beams.early_stopping == 'full' and len(finished) == size:
            break
    return finished or sorted(((judged(number, x, alpha, beta)[1], x) for _, x in alive), reverse=True)


def search(beams):
    prompt = Prompt(jnp.full((ROWS, 1), BOS), jnp.zeros((ROWS, 1), int), jnp.arange(ROWS))
    cache = Covered(Walk.start(jnp.arange(ROWS)), jnp.asarray(REAL))
    step = counted(lambda *given: attend(*given)[:2], attend)
    ending = Ending(LONGEST, EOS, BANNED)
    return jax.device_get(jax.jit(lambda: beam_search(step, cache, prompt, ending, beams))())


@pytest.mark.parametrize(
    'beams',
    [
        Beams(1, 0.0, coverage_penalty=0.5),
        Beams(3, 0.6, coverage_penalty=0.2),
        Beams(3, 1.0, coverage_penalty=2.0, count_cut=True),
        Beams(2, 1.0, coverage_penalty=2.0, early_stopping='full'),
    ],
)
def test_few_beams_find_what_the_plain_search_finds(beams) -> None:
    found = search(beams)
    for number in range(ROWS):
        expected = plain(number, beams)
        np.testing.assert_allclose(found.scores_BM[number, : len(expected)], [s for s, _ in expected], rtol=1e-4)
        assert np.isneginf(found.scores_BM[number, len(expected) :]).all()
        for beam, (_, tokens) in enumerate(expected):
            assert found.tokens_BMT[number, beam].tolist() == [*tokens, *[PAD] * (LONGEST - len(tokens))]


@pytest.mark.parametrize(('alpha', 'beta'), [(0.0, 0.3), (1.0, 3.0)])
def test_a_wide_search_finds_the_best_of_all_texts(alpha, beta) -> None:
    """Also though it stops where no text can be better any more."""
    inner = [token for token in range(V) if token not in (*BANNED, EOS)]
    texts = [(*x, EOS) for size in range(LONGEST) for x in itertools.product(inner, repeat=size)]
    found, moved = search(Beams(24, alpha, coverage_penalty=beta)), 0
    for number in range(ROWS):
        ranked = sorted(((judged(number, x, alpha, beta)[1], x) for x in texts), reverse=True)
        for beam, (score, tokens) in enumerate(ranked[:5]):
            assert found.tokens_BMT[number, beam].tolist() == [*tokens, *[PAD] * (LONGEST - len(tokens))]
            assert found.scores_BM[number, beam] == pytest.approx(score, rel=1e-4)
        moved += ranked[0][1] != max(texts, key=lambda x: judged(number, x, alpha, 0)[1])
    assert 3 < moved < ROWS


# ----------------------------------------------------------------------------------------------------------- a model
MODELS = {
    'transformer': {'num_kv_heads': 2, 'attention_sink': 'zero', 'remat': 'attention'},
    'recurrent': {'recurrence': 'lstm', 'recurrent_attention': 'additive', 'num_encoder_layers': 2},
}


@functools.cache
def model_of(name):
    return make('encoder_decoder', scale=3.0, position=None if name == 'recurrent' else 'sinusoidal', **MODELS[name])


@functools.cache
def written(name, beta, guidance=1.0):
    fields = {'beam_size': 4, 'num_outputs': 4, 'coverage_penalty': beta, 'guidance': guidance}
    decode = config.Decode('beam', max_len=T, **fields)
    generate = make_generate(model_of(name)[0], decode, eos=EOS, banned=BANNED)
    tokens_RT, scores_R = generate(model_of(name)[1], batch_of('encoder_decoder'), None)
    return np.asarray(tokens_RT).reshape(B, 4, T), np.asarray(scores_R).reshape(B, 4)


def forward(name, batch, tokens):
    """Returns (the log-probability, the sums of attention) of a text, by one forward pass over all of it."""
    model, variables = model_of(name)
    length = tokens.index(EOS) + 1 if EOS in tokens else T
    whole = {**batch, 'inputs': np.array([[BOS, *tokens[: T - 1]]]), 'positions': np.arange(T)[None]}
    logprobs = np.asarray(jax.nn.log_softmax(FORWARD(model, variables, whole)))[0]
    if name == 'recurrent':
        path = 'decoder.stack.cross_attention.probabilities'
        weights_TS = activations.activations(activations.Forward(model, '__call__'), variables, whole, [path])[path][0]
    else:
        weights_TS = attention_maps.attention_probabilities(model, variables, whole)['cross'][-1, 0].mean(0)
    total = logprobs[np.arange(length), tokens[:length]].sum()
    return total / ((5 + length) / 6) ** 0.6, np.asarray(weights_TS)[:length].sum(0)


@pytest.mark.parametrize('name', [pytest.param('transformer'), pytest.param('recurrent', marks=pytest.mark.proof)])
@pytest.mark.proof_cases('transformer')
def test_scores_have_the_penalty_that_attention_maps_give(name) -> None:
    batch = batch_of('encoder_decoder')
    tokens, scores = written(name, 0.7)
    for index in range(B):
        alone = row(batch, index)
        real = alone['encoder_positions'][0] >= 0
        for text, score in zip(tokens[index].tolist(), scores[index], strict=True):
            if np.isfinite(score):
                total, seen = forward(name, alone, text)
                assert score == pytest.approx(total + 0.7 * np.log(np.minimum(seen[real], 1.0)).sum(), abs=1e-3)
    assert np.isfinite(scores).sum() > B and (scores != written(name, 0.0)[1]).any()


@pytest.mark.proof
def test_guidance_counts_the_attention_of_the_row_with_its_source() -> None:
    """The difference that a penalty makes to the score of a text is that of the same text without guidance."""
    batch, compared = batch_of('encoder_decoder'), 0
    (tokens, scores), (before, least) = written('transformer', 0.7, 1.5), written('transformer', 0.0, 1.5)
    for index in range(B):
        alone = row(batch, index)
        real = alone['encoder_positions'][0] >= 0
        scored = {tuple(text): score for text, score in zip(before[index].tolist(), least[index], strict=True)}
        for text, score in zip(tokens[index].tolist(), scores[index], strict=True):
            if np.isfinite(score) and tuple(text) in scored:
                covered = np.log(np.minimum(forward('transformer', alone, text)[1][real], 1.0)).sum()
                assert score - scored[tuple(text)] == pytest.approx(0.7 * covered, abs=1e-3)
                compared += 1
    assert compared >= B
