"""Sampling over tables: which key a draw has, and the order of the cuts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.config import Decode
from tformer.decode.generate import STRATEGIES, Search
from tformer.decode.rules import Rules
from tformer.decode.sample import Ending, Prompt, Sampling, greedy, sample

EOS, V = 1, 64


def flat(tokens_BT, positions_BT, cache):
    """Every token is as likely at every step, but the end is not."""
    logits = jnp.zeros((*tokens_BT.shape, V)).at[..., EOS].set(-1e9)
    return logits, cache


def prompt(rows) -> Prompt:
    return Prompt(jnp.full((len(rows), 1), 2), jnp.zeros((len(rows), 1), jnp.int32), jnp.asarray(rows))


def test_a_draw_is_that_of_the_key_folded_with_the_rows_number_and_the_step():
    rng = jax.random.key(7)
    tokens, scores = sample(flat, 0, prompt([5, 9, 5]), Ending(4, EOS), rng, Sampling())
    table = np.asarray(flat(jnp.zeros((1, 1)), None, 0)[0][0, 0])
    for row, number in enumerate([5, 9, 5]):
        keys = [jax.random.fold_in(jax.random.fold_in(rng, number), step) for step in range(4)]
        assert tokens[row].tolist() == [int(jax.random.categorical(key, table)) for key in keys]
    assert len(set(tokens[0].tolist())) > 1
    np.testing.assert_allclose(scores, [-4 * np.log(V - 1)] * 3, rtol=1e-5)


def test_top_p_is_of_the_mass_that_top_k_leaves():
    """Probabilities 0.4, 0.3, 0.2, 0.1: two thirds of the best three are the best two; of all, two thirds need two too,
    but 0.75 of the best three is 0.675, which two have, and of all it is 0.75, which needs three."""
    logits = jnp.log(jnp.array([0.0, 0.0, 0.4, 0.3, 0.2, 0.1]))

    def extend(tokens_BT, positions_BT, cache):
        return jnp.broadcast_to(logits[None, None], (*tokens_BT.shape, 6)), cache

    rows = np.arange(400)
    tokens, _ = sample(extend, 0, prompt(rows), Ending(1, EOS), jax.random.key(0), Sampling(1.0, 3, 0.75))
    assert set(tokens[:, 0].tolist()) == {2, 3}
    share = float(np.mean(tokens[:, 0] == 2))
    assert abs(share - 4 / 7) < 4 * (12 / 49 / 400) ** 0.5


def test_top_p_is_of_the_mass_at_the_temperature():
    """Probabilities 0.4, 0.3, 0.2, 0.1: at the temperature 1/2 they are 16, 9, 4 and 1 of 30, of which two have 0.8;
    at the temperature 1 two have 0.7, so 0.8 would need three."""
    logits = jnp.log(jnp.array([0.0, 0.0, 0.4, 0.3, 0.2, 0.1]))

    def extend(tokens_BT, positions_BT, cache):
        return jnp.broadcast_to(logits[None, None], (*tokens_BT.shape, 6)), cache

    tokens, _ = sample(extend, 0, prompt(np.arange(400)), Ending(1, EOS), jax.random.key(0), Sampling(0.5, None, 0.8))
    assert set(tokens[:, 0].tolist()) == {2, 3}


def test_the_last_token_is_forced_to_be_the_end_with_probability_1():
    tokens, scores = greedy(flat, 0, prompt([0]), Ending(3, EOS, forced=True))
    assert tokens.tolist() == [[0, 0, EOS]]
    np.testing.assert_allclose(scores, [-2 * np.log(V - 1)], rtol=1e-5)
    assert greedy(flat, 0, prompt([0]), Ending(3, EOS))[0].tolist() == [[0, 0, 0]]


def test_any_of_several_tokens_ends_a_row():
    """Each row's likeliest tokens in turn: 3 and 4 end it besides EOS."""
    wanted = jnp.array([[2, 3, 2], [4, 2, 2], [2, 2, EOS]])

    def extend(tokens_BT, positions_BT, cache):
        return jax.nn.one_hot(wanted[jnp.arange(3), positions_BT[:, 0]], 5)[:, None], cache

    tokens, _ = greedy(extend, 0, prompt([0, 1, 2]), Ending(3, EOS, others=(3, 4)))
    assert tokens.tolist() == [[2, 3, 0], [4, 0, 0], [2, 2, EOS]]


def test_a_row_that_has_ended_is_padded_and_adds_nothing_to_its_score():
    """The first row ends at once with probability 3/4; the second one never does, and its tokens have 1/2 each."""

    def extend(tokens_BT, positions_BT, cache):
        odds = jnp.asarray([[1.0, 6.0, 1.0], [1.0, 1.0, 2.0]])  # of padding, the end and a word
        return jnp.log(odds)[:, None], cache

    tokens, scores = greedy(extend, 0, prompt([0, 1]), Ending(4, EOS))
    assert tokens.tolist() == [[EOS, 0, 0, 0], [2, 2, 2, 2]]
    np.testing.assert_allclose(scores, [np.log(3 / 4), 4 * np.log(1 / 2)], rtol=1e-5)


def test_sampling_without_a_key_is_refused():
    with pytest.raises(ValueError, match='sampling needs a random key'):
        search = Search(flat, 0, prompt([0]), Ending(4, EOS), Rules(), 99, None, ())
        STRATEGIES['sample'].search(Decode(), None, search)
