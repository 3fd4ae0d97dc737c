"""Beam search with few beams, over random tables, against one that is written down in plain Python."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tformer.decode.beam import beam_search
from tformer.decode.sample import Ending, Prompt

PAD, BOS, EOS = 0, 1, 2
V, T, ROWS, STATES = 6, 5, 48, 89
TABLES = 1.5 * np.random.default_rng(0).standard_normal((ROWS, STATES, V)).astype(np.float32)
TABLES[..., EOS] += np.linspace(-2, 2, ROWS)[:, None]  # rows that seldom end, and rows that end at once


class Cache(flax.struct.PyTreeNode):
    """Each row's table, and a number for all that each of its hypotheses has read."""

    table_B: jax.Array
    state_BM: jax.Array

    def branch(self, hypotheses):
        return self.replace(state_BM=jnp.repeat(self.state_BM, hypotheses, axis=1))

    def take(self, parents_BM):
        return self.replace(state_BM=jnp.take_along_axis(self.state_BM, parents_BM, axis=1))


def extend(tokens_BM, positions_BM, cache):
    state_BM = (cache.state_BM * 7 + tokens_BM + 11 * positions_BM) % STATES
    return jnp.asarray(TABLES)[cache.table_B[:, None], state_BM], cache.replace(state_BM=state_BM)


def logprobs(row, tokens):
    """Of the token after BOS and `tokens`."""
    state = 0
    for position, token in enumerate((BOS, *tokens)):
        state = (state * 7 + token + 11 * (3 + position)) % STATES
    x = TABLES[row, state].astype(np.float64)
    return x - np.log(np.exp(x).sum())


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def plain(row, beams, alpha, forced, ends=(EOS,)):
    """Every step is made: no search ends early. Returns (score, tokens), best first, and the steps that were needed."""
    alive, finished, needed = [(0.0, ())], [], 0
    for step in range(T):
        if alive and (len(finished) < beams or alive[0][0] / penalty(T, alpha) > finished[-1][0]):
            needed = step + 1
        grown = []
        for score, tokens in alive:
            next_ones = logprobs(row, tokens)
            if forced and step == T - 1:
                next_ones = np.where(np.arange(V) == EOS, 0.0, -np.inf)
            grown += [(score + next_ones[v], (*tokens, v)) for v in range(V) if v not in (PAD, BOS)]
        grown = sorted((one for one in grown if np.isfinite(one[0])), reverse=True)
        finished += [(s / penalty(step + 1, alpha), t) for s, t in grown[:beams] if t[-1] in ends]
        finished = sorted(finished, reverse=True)[:beams]
        alive = [one for one in grown if one[1][-1] not in ends][:beams]
    return finished or [(score / penalty(T, alpha), tokens) for score, tokens in alive], needed


def search(beams, ending, step_fn=extend):
    """Returns a function of tables and the exponent of the penalty, compiled once."""

    def find(table_B, alpha):
        rows = len(table_B)
        prompt = Prompt(jnp.full((rows, 1), BOS), jnp.full((rows, 1), 3), jnp.arange(rows))
        return beam_search(step_fn, Cache(table_B, jnp.zeros((rows, 1), int)), prompt, ending, beams=beams, alpha=alpha)

    return jax.jit(find)


@pytest.mark.parametrize(
    ('beams', 'forced', 'others'),
    [
        (1, False, ()),
        (2, False, ()),
        (2, True, ()),
        (3, False, ()),
        (4, False, ()),
        (2, False, (4,)),
        (1, False, (4, 5)),
    ],
)
def test_few_beams_find_what_the_plain_search_finds(beams, forced, others):
    find, several = search(beams, Ending(T, EOS, (PAD, BOS), forced, others)), 0
    for alpha in (0.0, 0.6, 1.0, 3.0):
        found = jax.device_get(find(jnp.arange(ROWS), alpha))
        for row in range(ROWS):
            expected, _ = plain(row, beams, alpha, forced, (EOS, *others))
            several += len(expected) > 1
            scores = [score for score, _ in expected]
            np.testing.assert_allclose(found.scores_BM[row, : len(scores)], scores, rtol=1e-5, atol=1e-5)
            assert np.isneginf(found.scores_BM[row, len(scores) :]).all()
            for beam, (_, tokens) in enumerate(expected):
                assert found.tokens_BMT[row, beam].tolist() == [*tokens, *[PAD] * (T - len(tokens))]
                assert found.lengths_BM[row, beam] == len(tokens)
    assert beams == 1 or several > ROWS


def test_a_search_stops_as_soon_as_nothing_can_beat_its_worst_hypothesis():
    calls, seen = [], set()

    def counted(*args):
        jax.debug.callback(lambda: calls.append(1))
        return extend(*args)

    find = search(2, Ending(T, EOS, (PAD, BOS)), counted)
    for row in range(0, ROWS, 2):
        for alpha in (0.0, 1.0):
            calls.clear()
            jax.block_until_ready(find(jnp.full(1, row), alpha))
            jax.effects_barrier()
            _, needed = plain(row, 2, alpha, False)
            assert len(calls) == needed
            seen.add(needed)
    assert {2, 3, T} <= seen
