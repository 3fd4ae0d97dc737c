"""Classifier-free guidance: each token by hand, from rows with their prompts and rows of their own without them."""

import functools

import jax
import numpy as np
import pytest

from small_decoding import BANNED, CASES, EOS, FORWARD, LENGTHS, B, T, batch_of, make, row
from tformer import config
from tformer.decode.generate import make_generate


@functools.cache
def model_of(family):
    return make(family, scale=2.0, position='learned', num_kv_heads=2)


@functools.cache
def program(family, **fields):
    decode = config.Decode(**{'max_len': T, 'guidance': 2.5, **fields})
    return make_generate(model_of(family)[0], decode, eos=EOS, banned=BANNED)


def written(family, batch, **fields):
    found = program(family, **fields)(model_of(family)[1], batch, jax.random.key(0))
    return tuple(map(np.asarray, found))


def without(family, batch):
    """Returns a row without its prompt: the last token of it, or of the encoder's text."""
    if family == 'encoder_decoder':
        last = int(batch['encoder_positions'].max())
        return {
            **batch,
            'encoder_inputs': batch['encoder_inputs'][:, last:][:, :1],
            'encoder_positions': np.zeros((1, 1), int),
        }
    alone = {**batch, 'inputs': batch['inputs'][:, -1:], 'positions': np.zeros((1, 1), int)}
    return alone | ({'prefix': np.ones((1, 1), bool)} if 'prefix' in batch else {})


def logprobs_after(family, batch, new):
    """Of the token after the prompt and the new ones, by the whole forward pass."""
    count = len(new)
    whole = dict(batch)
    if count:
        after = batch['positions'][:, -1:] + 1 + np.arange(count)[None]
        whole['inputs'] = np.concatenate([batch['inputs'], [new]], 1)
        whole['positions'] = np.concatenate([batch['positions'], after], 1)
        if 'prefix' in batch:
            whole['prefix'] = np.pad(batch['prefix'], ((0, 0), (0, count)))
    model, variables = model_of(family)
    return np.asarray(jax.nn.log_softmax(FORWARD(model, variables, whole)))[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize('family', [*CASES[:-1], pytest.param(CASES[-1], marks=pytest.mark.proof)])
@pytest.mark.proof_cases('encoder_decoder')
def test_each_token_is_the_likeliest_of_the_guided_distribution(family) -> None:
    batch = batch_of(family)
    tokens, scores = written(family, batch)
    plain = make_generate(model_of(family)[0], config.Decode(max_len=T), eos=EOS, banned=BANNED)
    assert (np.asarray(plain(model_of(family)[1], batch, None)[0]) != tokens).any()
    for index in range(B):
        alone, new, total = row(batch, index), [], 0.0
        while len(new) < T and EOS not in new:
            given, not_given = (logprobs_after(family, each, new) for each in (alone, without(family, alone)))
            guided = not_given + 2.5 * (given - not_given)
            chosen = int(np.argmax(np.where(np.isin(np.arange(len(guided)), BANNED), -np.inf, guided)))
            total += float(jax.nn.log_softmax(guided)[chosen])
            new.append(chosen)
        assert tokens[index, : len(new)].tolist() == new
        assert scores[index] == pytest.approx(total, abs=1e-3)
    assert len(set(LENGTHS)) > 1


@pytest.mark.slow
@pytest.mark.parametrize('family', ['decoder', *(pytest.param(each, marks=pytest.mark.proof) for each in CASES[1:])])
def test_every_strategy_is_guided(family) -> None:
    """One beam, drafts and the only token of the top equal the greedy text; several draws share their prompt."""
    batch = batch_of(family)
    tokens, scores = written(family, batch)
    for fields in (
        {'strategy': 'beam', 'beam_size': 1, 'length_penalty': 0.0},
        {'draft': 'prompt', 'draft_len': 2},
        {'strategy': 'sample', 'top_k': 1, 'num_outputs': 2},
    ):
        found = written(family, batch, **fields)
        times = fields.get('num_outputs', 1)
        np.testing.assert_array_equal(found[0], np.repeat(tokens, times, 0))
        np.testing.assert_allclose(found[1], np.repeat(scores, times), atol=1e-3)


@pytest.mark.slow
def test_wide_beams_keep_the_caches_of_both_in_step() -> None:
    """The score of the best text is what the guided distribution says of it."""
    batch = batch_of('decoder')
    tokens, scores = written('decoder', batch, strategy='beam', beam_size=4, length_penalty=0.0)
    for index in range(B):
        alone, total, new = row(batch, index), 0.0, []
        for token in tokens[index].tolist():
            if EOS in new:
                break
            given, not_given = (logprobs_after('decoder', each, new) for each in (alone, without('decoder', alone)))
            total += float(jax.nn.log_softmax(not_given + 2.5 * (given - not_given))[token])
            new.append(token)
        assert scores[index] == pytest.approx(total, abs=1e-3)
