"""Beam search with few beams, over random tables, against one that is written down in plain Python."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import Walk
from tformer.decode.beam import STOPPING, Beams, beam_search
from tformer.decode.penalties import Penalties
from tformer.decode.rules import Rules
from tformer.decode.sample import Ending, Prompt

PAD, BOS, EOS = 0, 1, 2
V, T, ROWS, STATES = 6, 5, 48, 89
TABLES = 1.5 * np.random.default_rng(0).standard_normal((ROWS, STATES, V)).astype(np.float32)
TABLES[..., EOS] += np.linspace(-2, 2, ROWS)[:, None]  # rows that seldom end, and rows that end at once


def extend(tokens_BM, positions_BM, cache):
    cache = cache.read(tokens_BM, positions_BM, STATES)
    return cache.at(TABLES), cache


def logprobs(row, tokens):
    """Of the token after BOS and `tokens`."""
    state = 0
    for position, token in enumerate((BOS, *tokens)):
        state = (state * 7 + token + 11 * (3 + position)) % STATES
    x = TABLES[row, state].astype(np.float64)
    return x - np.log(np.exp(x).sum())


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def plain(row, beams, ending):
    """Every step is made by each group in turn. Returns (score, tokens), best first, and the steps that were needed."""
    ends, alpha, size = (ending.eos, *ending.others), beams.length_penalty, beams.beam_size // beams.beam_groups
    groups = [{'alive': [(0.0, ())], 'finished': [], 'open': True} for _ in range(beams.beam_groups)]
    needed = 0
    for step in range(T):
        taken, last = np.zeros(V), ending.forced and step == T - 1
        needed = step + 1 if any(group['open'] for group in groups) else needed
        for group in groups:
            grown = []
            for score, tokens in group['alive']:
                next_ones = np.where(np.arange(V) == EOS, 0.0, -np.inf) if last else logprobs(row, tokens)
                next_ones = next_ones - beams.diversity_penalty * taken
                grown += [(score + next_ones[v], (*tokens, v)) for v in range(V) if v not in (PAD, BOS)]
            grown = sorted((one for one in grown if np.isfinite(one[0])), reverse=True)
            group['alive'] = [one for one in grown if one[1][-1] not in ends][:size]
            for _, tokens in group['alive']:
                taken[tokens[-1]] += beams.beam_groups > 1
            if not group['open']:
                continue
            cut = beams.count_cut and step == T - 1
            ended = [(s / penalty(step + 1, alpha), t) for s, t in grown[:size] if cut or t[-1] in ends]
            group['finished'] = sorted(group['finished'] + ended, reverse=True)[:size]
            if len(group['finished']) == size or not group['alive']:
                best = group['alive'][0][0] if group['alive'] else -np.inf
                length = {'never': T, 'likely': step + 1}.get(beams.early_stopping)
                group['open'] = length is not None and best / penalty(length, alpha) > group['finished'][-1][0]
    finished = sorted((one for group in groups for one in group['finished']), reverse=True)
    alive = sorted((one for group in groups for one in group['alive']), reverse=True)
    return finished or [(score / penalty(T, alpha), tokens) for score, tokens in alive], needed


def search(beams, ending, step_fn=extend):
    """Returns a function of tables and the exponent of the penalty, compiled once."""

    def find(table_B, alpha):
        rows = len(table_B)
        prompt = Prompt(jnp.full((rows, 1), BOS), jnp.full((rows, 1), 3), jnp.arange(rows))
        return beam_search(step_fn, Walk.start(table_B), prompt, ending, beams._replace(length_penalty=alpha))

    return jax.jit(find)


def agree(beams, forced=False, others=()):
    """Asserts that all rows agree with the plain search; returns the hypotheses of each."""
    ending = Ending(T, EOS, (PAD, BOS), forced, others)
    find, several = search(beams, ending), []
    for alpha in (0.0, 0.6, 1.0, 3.0):
        found = jax.device_get(find(jnp.arange(ROWS), alpha))
        for row in range(ROWS):
            expected, _ = plain(row, beams._replace(length_penalty=alpha), ending)
            several.append([tokens for _, tokens in expected])
            scores = [score for score, _ in expected]
            np.testing.assert_allclose(found.scores_BM[row, : len(scores)], scores, rtol=1e-5, atol=1e-5)
            assert np.isneginf(found.scores_BM[row, len(scores) :]).all()
            for beam, (_, tokens) in enumerate(expected):
                assert found.tokens_BMT[row, beam].tolist() == [*tokens, *[PAD] * (T - len(tokens))]
                assert found.lengths_BM[row, beam] == len(tokens)
    return several


@pytest.mark.slow
@pytest.mark.parametrize(
    ('size', 'forced', 'others'),
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
def test_few_beams_find_what_the_plain_search_finds(size, forced, others):
    found = agree(Beams(size, 0.0), forced, others)
    assert size == 1 or sum(len(each) > 1 for each in found) > ROWS


def test_a_search_that_stops_early_finds_what_the_plain_search_finds():
    found = {stopping: agree(Beams(2, 0.0, early_stopping=stopping)) for stopping in STOPPING}
    found['cut'] = agree(Beams(2, 0.0, count_cut=True))
    found['cut early'] = agree(Beams(2, 0.0, early_stopping='full', count_cut=True))
    assert all(one != other for one, other in itertools.combinations(found.values(), 2))


@pytest.mark.slow
@pytest.mark.parametrize(('size', 'groups'), [(2, 2), (4, 2), (6, 3)])
def test_groups_find_what_the_plain_groups_find(size, groups):
    """A penalty that no likelihood outweighs lets no two groups go on with the same first token."""
    for diversity, stopping in ((0.4, 'full'), (30.0, 'never')):
        found = agree(
            Beams(size, 0.0, early_stopping=stopping, beam_groups=groups, diversity_penalty=diversity, count_cut=True)
        )
    if size == groups:
        begins = [[tokens[0] for tokens in each if tokens[0] != EOS] for each in found]
        assert all(len(set(each)) == len(each) for each in begins) and any(len(each) == size for each in begins)


@pytest.mark.parametrize('size', [2, 4])
def test_a_group_that_ended_nothing_adds_nothing_to_what_others_ended(size):
    found = agree(Beams(size, 0.0, beam_groups=2, diversity_penalty=3.0))
    assert any(0 < len(each) < size for each in found)


def test_a_search_stops_as_soon_as_nothing_can_beat_its_worst_hypothesis():
    calls, seen = [], set()

    def counted(*args):
        jax.debug.callback(lambda: calls.append(1))
        return extend(*args)

    ending = Ending(T, EOS, (PAD, BOS))
    for stopping in STOPPING:
        beams = Beams(2, 0.0, early_stopping=stopping)
        find = search(beams, ending, counted)
        for row in range(0, ROWS, 2):
            for alpha in (0.0, 1.0):
                calls.clear()
                jax.block_until_ready(find(jnp.full(1, row), alpha))
                jax.effects_barrier()
                _, needed = plain(row, beams._replace(length_penalty=alpha), ending)
                assert len(calls) == needed
                seen.add((stopping, needed))
        assert {(stopping, 2), (stopping, 3), (stopping, T)} <= seen


class Listed:
    """A constraint to some texts of one token, repeated: the state is the token, or 0 before it."""

    def __init__(self, lengths):
        self.lengths_V = jnp.zeros(V, int).at[jnp.array(list(lengths))].set(jnp.array(list(lengths.values())))

    def start(self, shape):
        return jnp.zeros((*shape, 2), int)  # (the token, how many)

    def follow(self, state, tokens):
        return jnp.stack([tokens, state[..., 1] + 1], -1)

    def allows(self, state, left):
        token, count, every = state[..., :1], state[..., 1:], jnp.arange(V)[None, None]
        going_on = jnp.where(
            count == 0, self.lengths_V[None, None] > 0, (every == token) & (count < self.lengths_V[token])
        )
        return going_on | ((every == EOS) & (count > 0) & (count == self.lengths_V[token]))


def test_a_hypothesis_that_may_not_go_on_is_dropped_and_its_end_is_not_free():
    """Of 3, at most twice, and 4, four times, three tokens at least: what begins with 3 can neither go on nor end."""
    rows, ending = 8, Ending(T, EOS, (PAD, BOS))
    prompt = Prompt(jnp.full((rows, 1), BOS), jnp.full((rows, 1), 3), jnp.arange(rows))
    for lengths, text in (({3: 2, 4: 4}, (4, 4, 4, 4, EOS)), ({3: 2}, (3, 3, EOS))):
        rules = Rules(Penalties(min_len=3, ends=(EOS,)), Listed(lengths))
        found = beam_search(extend, Walk.start(jnp.arange(rows)), prompt, ending, Beams(3, 0.0), rules=rules)
        assert found.tokens_BMT[:, 0].tolist() == [[*text, *[PAD] * (T - len(text))]] * rows
        for row in range(rows):
            score = sum(logprobs(row, text[:i])[token] for i, token in enumerate(text))
            np.testing.assert_allclose(found.scores_BM[row], [score, -np.inf, -np.inf], rtol=1e-5)
