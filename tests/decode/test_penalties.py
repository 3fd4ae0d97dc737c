"""What the tokens so far do to the logits of the next one, against rules on lists."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import Nothing
from tformer.decode.beam import Beams, beam_search
from tformer.decode.penalties import History, Penalties
from tformer.decode.rules import Rules
from tformer.decode.sample import Ending, Prompt, Sampling, greedy

TORCH = all(importlib.util.find_spec(name) for name in ('torch', 'transformers'))
EOS, V, P, T = 1, 6, 4, 9
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, V)).astype(np.float32)
PROMPTS = [[2, 3, 2, 3], [5], [4, 4], [5, 2]]  # behind padding of 2
NEW = [[2, 4, 2], [3, 3, 3], [5, 4, 4], [3, 0, 2]]


def history(prompts: list[list[int]], new: list[list[int]]) -> History:
    """Returns a history whose padding and room hold tokens that must not count."""
    step = len(new[0])
    tokens_RP = np.array([[2] * (P - len(row)) + row for row in prompts])
    real_RP = np.array([[False] * (P - len(row)) + [True] * len(row) for row in prompts])
    new_RT = np.array([row + [3] * (T - step) for row in new])
    return History.of(*map(jnp.asarray, (tokens_RP, real_RP, new_RT)), jnp.asarray(step))


def changed(**fields: object) -> np.ndarray:
    penalties = Penalties(ends=(EOS,))._replace(**fields)
    assert penalties.any
    return np.asarray(penalties(jnp.asarray(LOGITS), history(PROMPTS, NEW)))


def test_the_defaults_change_nothing():
    assert not Penalties().any and not Penalties(ends=(1, 2)).any


def test_repetition_divides_what_is_positive_and_multiplies_what_is_negative_of_all_tokens_so_far():
    """The prompt's are among them (Keskar et al. 2019, 4.1)."""
    want = LOGITS.copy()
    for row, tokens in enumerate(p + n for p, n in zip(PROMPTS, NEW, strict=True)):
        for token in set(tokens):
            want[row, token] *= 1.5 if want[row, token] < 0 else 1 / 1.5
    np.testing.assert_allclose(changed(repetition=1.5), want, rtol=1e-6)
    assert (
        (want != LOGITS).sum() == 3 + 2 + 2 + 4
        and (LOGITS[want != LOGITS] > 0).any()
        and (LOGITS[want != LOGITS] < 0).any()
    )


def test_presence_and_frequency_count_the_new_tokens():
    counts = np.array([[row.count(token) for token in range(V)] for row in NEW])
    np.testing.assert_allclose(changed(presence=0.5), LOGITS - 0.5 * (counts > 0), rtol=1e-6)
    np.testing.assert_allclose(changed(frequency=0.25), LOGITS - 0.25 * counts, rtol=1e-6)
    both = changed(presence=-0.5, frequency=0.25)
    np.testing.assert_allclose(both, LOGITS + 0.5 * (counts > 0) - 0.25 * counts, rtol=1e-6)


@pytest.mark.parametrize('n', [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize('step', [0, 1, 3])
def test_a_token_that_would_repeat_n_tokens_is_banned(n: int, step: int):
    new = [row[:step] for row in NEW]
    found = Penalties(no_repeat_ngram=n)(jnp.asarray(LOGITS), history(PROMPTS, new))
    for row, tokens in enumerate(p + x for p, x in zip(PROMPTS, new, strict=True)):
        grams = {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}
        for token in range(V):
            again = tuple([*tokens, token][-n:]) in grams
            assert found[row, token] == (-np.inf if again else LOGITS[row, token])


def test_no_end_comes_before_the_least_length():
    step = len(NEW[0])
    for least in (step + 1, T):
        assert (changed(min_len=least, ends=(EOS, 4))[:, [EOS, 4]] == -np.inf).all()
        assert (changed(min_len=least, ends=(EOS, 4))[:, [0, 2, 3, 5]] == LOGITS[:, [0, 2, 3, 5]]).all()
    np.testing.assert_array_equal(changed(min_len=step), LOGITS)


# -------------------------------------------------------------------------------------------------------- searches
def table(tokens_BT, positions_BT, cache):
    """The token 2 is likeliest, then 3, then the end, whatever was written."""
    logits = jnp.array([-9.0, 1.0, 3.0, 2.0, -1.0, -2.0])
    return jnp.broadcast_to(logits, (*tokens_BT.shape, V)), cache


def prompt(*tokens: int) -> Prompt:
    return Prompt(jnp.array([tokens]), jnp.arange(len(tokens))[None], jnp.zeros(1, jnp.int32))


def test_greedy_search_repeats_no_token_and_does_not_end_too_soon_and_scores_by_the_models_own_distribution():
    found, score = greedy(
        table, 0, prompt(2), Ending(5, EOS), rules=Rules(Penalties(no_repeat_ngram=1, min_len=2, ends=(EOS,)))
    )
    assert found.tolist() == [[3, 4, EOS, 0, 0]]
    logits = np.asarray(table(jnp.zeros((1, 1)), None, 0)[0][0, 0], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(score, [logprobs[3] + logprobs[4] + logprobs[EOS]], rtol=1e-5)


def test_a_forced_end_comes_whatever_is_changed():
    penalties = Penalties(no_repeat_ngram=1, min_len=9, ends=(EOS,))
    assert greedy(table, 0, prompt(2), Ending(3, EOS, forced=True), rules=Rules(penalties))[0].tolist() == [[3, 4, EOS]]


def test_a_row_that_has_no_token_left_ends():
    """Token by token all are written; the least length would have it go on."""
    penalties = Penalties(no_repeat_ngram=1, min_len=9, ends=(EOS, 0))
    tokens, _ = greedy(table, 0, prompt(5), Ending(9, EOS, banned=(0,)), rules=Rules(penalties))
    assert tokens.tolist() == [[2, 3, 4, EOS, 0, 0, 0, 0, 0]]
    found = beam_search(table, Nothing(), prompt(5), Ending(9, EOS, banned=(0,)), Beams(2, 0.0), rules=Rules(penalties))
    assert sorted(found.tokens_BMT[0, 0, :3].tolist()) == [2, 3, 4] and found.lengths_BM[0, 0] == 4


def test_each_hypothesis_of_a_beam_has_a_history_of_its_own():
    """Two beams that may not repeat a token: 2 3 and 3 2 are equally likely, and then both end."""

    found = beam_search(
        table,
        Nothing(),
        prompt(5),
        Ending(4, EOS),
        Beams(2, 0.0),
        rules=Rules(Penalties(no_repeat_ngram=1, min_len=2, ends=(EOS,))),
    )
    rows = sorted(row[: row.index(EOS) + 1] for row in found.tokens_BMT[0].tolist())
    assert rows == [[2, 3, EOS], [3, 2, EOS]]


# ------------------------------------------------------------------------------------------------------------ cuts
def cut(**fields: float) -> list[list[int]]:
    """Returns the tokens that are left of probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625 and of even ones."""
    logits = jnp.log(jnp.array([[0.0, 0.5, 0.25, 0.125, 0.0625, 0.0625], [0.0, 0.2, 0.2, 0.2, 0.2, 0.2]]))
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in Sampling(**fields).warp(logits)]


EVEN = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ('fields', 'left'),
    [
        ({}, EVEN),
        ({'min_p': 0.25}, [1, 2, 3]),
        ({'min_p': 0.26}, [1, 2]),
        ({'min_p': 1.0}, [1]),
        ({'min_p': 0.5, 'temperature': 0.5}, [1]),  # of probabilities in the ratio 16 : 4 : 1
        ({'epsilon_cutoff': 0.125}, [1, 2, 3]),
        ({'epsilon_cutoff': 0.9}, [1]),  # the likeliest stays
        # The entropy is 1.875 bits: the information of 0.25 (2 bits) is nearest, then 0.5 (1), 0.125 (3).
        ({'typical_p': 0.2}, [2]),
        ({'typical_p': 0.25}, [2]),
        ({'typical_p': 0.3}, [1, 2]),
        ({'typical_p': 0.8}, [1, 2, 3]),
        # sqrt(0.5) 2^-1.875 = 0.193; sqrt(0.04) 2^-1.875 = 0.0545, of which 0.04 is less
        ({'eta_cutoff': 0.5}, [1, 2]),
        ({'eta_cutoff': 0.04}, EVEN),
        ({'top_k': 2, 'epsilon_cutoff': 0.3}, [1, 2]),  # 2/3 and 1/3 of what is left
    ],
)
def test_what_the_cuts_leave(fields: dict, left: list[int]):
    found, even = cut(**fields)
    assert found == left
    assert even == (EVEN if 'top_k' not in fields else even)


@pytest.mark.slow
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
def test_penalties_and_cuts_are_those_of_the_hubs_library():
    import torch
    from transformers.generation import logits_process as theirs

    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 50)).astype(np.float32) * 3
    ids = rng.integers(0, 8, (4, 12))
    so_far = History.of(jnp.asarray(ids[:, :5]), jnp.ones((4, 5), bool), jnp.asarray(ids[:, 5:]), jnp.asarray(7))
    pairs = [
        (theirs.RepetitionPenaltyLogitsProcessor(1.3), Penalties(repetition=1.3)),
        (theirs.NoRepeatNGramLogitsProcessor(2), Penalties(no_repeat_ngram=2)),
        (theirs.NoRepeatNGramLogitsProcessor(3), Penalties(no_repeat_ngram=3)),
        (theirs.MinNewTokensLengthLogitsProcessor(5, 8, [2], device='cpu'), Penalties(min_len=8, ends=(2,))),
        (theirs.MinPLogitsWarper(0.1), Sampling(min_p=0.1)),
        (theirs.TypicalLogitsWarper(0.6), Sampling(typical_p=0.6)),
        (theirs.EpsilonLogitsWarper(0.03), Sampling(epsilon_cutoff=0.03)),
        (theirs.EtaLogitsWarper(0.02), Sampling(eta_cutoff=0.02)),
    ]
    for processor, own in pairs:
        want = processor(torch.tensor(ids), torch.tensor(logits)).numpy()
        found = own.warp(jnp.asarray(logits)) if isinstance(own, Sampling) else own(jnp.asarray(logits), so_far)
        np.testing.assert_allclose(found, want, rtol=1e-6)
        assert (want != logits).any()
