"""Beam search over a step function.

Shapes: N prompts, G groups, B = N G rows, P prompt length, M beams of a row, C candidates, T new tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.decode.growth import Growth, check_slots, go_on
from tformer.decode.largest import largest
from tformer.decode.penalties import History
from tformer.decode.rules import Rules
from tformer.decode.sample import PAD, Ending, Extend, Prompt, banned_mask, prefill


class Beams(NamedTuple):
    """How hypotheses are kept, compared and finished."""

    beam_size: int  # hypotheses of each prompt, of all groups together
    length_penalty: float | jax.Array  # alpha, 0 or more
    length_offset: float = 5.0
    early_stopping: str = 'never'  # a key of STOPPING
    count_cut: bool = False  # those that the greatest length cuts are finished, too
    beam_groups: int = 1  # of as many hypotheses each (Vijayakumar et al. 2018, algorithm 1)
    diversity_penalty: float | jax.Array = (
        0.5  # what a token loses for each hypothesis of earlier groups that goes on with it
    )
    coverage_penalty: float = 0.0  # beta, 0 or more, of what `cache.coverage()` says of each hypothesis

    def penalty(self, length: float | jax.Array) -> jax.Array:
        """Returns what divides the log-probability of a text of this length."""
        return length_penalty(length, self.length_penalty, self.length_offset)


class Hypotheses(NamedTuple):
    """Some continuations of each prompt, best first. The score -inf marks an unused place."""

    tokens_BMT: jax.Array
    scores_BM: jax.Array
    lengths_BM: jax.Array


class State(NamedTuple):
    """The loop's state: hypotheses alive, scored by log-probability, and finished ones, by the normalised score."""

    step: jax.Array
    alive: Hypotheses
    finished: Hypotheses
    open_B: jax.Array  # whether the row may still finish others
    last_BM: jax.Array  # the token that the next step reads
    ruled: Any  # the state of the constraint, for each hypothesis
    cache: Any  # of G M hypotheses of each prompt


# decode.early_stopping -> the length of which the best unfinished hypothesis is taken to be when it is asked whether it
# may still beat the worst of a row's finished ones, from (its length, the greatest one); None: it is not asked.
STOPPING: dict[str, Callable[[Any, Any], Any] | None] = {
    'never': lambda length, longest: longest,  # no better score is possible, as log-probabilities only fall
    'likely': lambda length, longest: length,
    'full': None,
}


def length_penalty(length: float | jax.Array, alpha: float | jax.Array, offset: float = 5.0) -> jax.Array:
    """Returns lp(Y) = ((offset + |Y|) / (offset + 1))^alpha, which divides a log-probability (Wu et al. 2016, eq. 14:
    offset 5)."""
    return jnp.power((offset + length) / (offset + 1.0), alpha)


def take(hypotheses: Any, index_BM: jax.Array) -> Any:
    """Returns the hypotheses, or what each has, at `index_BM` of each row."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, index_M: row[index_M])(x, index_BM), hypotheses)


def best(hypotheses: Hypotheses, number: int) -> tuple[Hypotheses, jax.Array]:
    """Returns the `number` best hypotheses of each row, sorted, and their indices."""
    index_BM = jax.lax.top_k(hypotheses.scores_BM, number)[1]
    return take(hypotheses, index_BM), index_BM


def beam_search(
    extend: Extend,
    cache: Any,
    prompt: Prompt,
    ending: Ending,
    beams: Beams,
    *,
    rules: Rules = Rules(),
    growth: Growth = (),
) -> Hypotheses:
    """Keeps the likeliest unfinished hypotheses of each prompt at each step and, separately, the best finished ones.

    A hypothesis finishes where `eos` is among the M best continuations of its row, so that one beam with alpha 0 equals
    greedy search. A row is settled when it has M finished hypotheses and `STOPPING` expects no better one. With groups,
    each searches by itself, but a token loses `diversity_penalty` for every hypothesis of an earlier group that takes
    it at the same step.

    The cache is empty, with slots for the prompt and, but for its `growth`, `max_len` tokens of `beam_size` hypotheses.
    `cache.branch(G M)` has as many of each prompt, of which a call of `extend` reads a token each; in
    `cache.take(parents)` each goes on from its parent. With a coverage penalty, `cache.coverage()` is at most 0 for
    each, and beta times it is part of the normalised score, by which hypotheses are compared once they end. Lengths
    include `eos`. `rules` change the log-probabilities, and so the scores, as diversity does; none may raise them above
    0. A hypothesis that they leave no token is dropped; if all of a row are, and none has finished, they end. Returns
    `beam_size` hypotheses for each prompt with normalised scores; PAD after `eos` and in unused places, which score
    -inf. A row without finished hypotheses returns the unfinished ones.

    Raises:
      UserError: the cache has too few slots.
    """
    size, groups, max_len = beams.beam_size, beams.beam_groups, ending.max_len
    N = len(prompt.tokens_BP)
    rows = (N * groups, size // groups)
    check_slots(cache, prompt.tokens_BP.shape[1] - 1 + size * max_len, growth)
    cache = prefill(extend, cache, prompt).branch(size)
    none = Hypotheses(jnp.full((*rows, max_len), PAD, jnp.int32), jnp.full(rows, -jnp.inf), jnp.zeros(rows, jnp.int32))
    real_B = jnp.repeat(prompt.positions_BP[:, -1] >= 0, groups)
    # All hypotheses begin with the same prompt: only one of a row counts.
    first_BM = real_B[:, None] & (jnp.arange(rows[1]) == 0)[None]
    start = State(
        step=jnp.zeros((), jnp.int32),
        alive=none._replace(scores_BM=jnp.where(first_BM, 0.0, none.scores_BM)),
        finished=none,
        open_B=real_B,
        last_BM=jnp.repeat(prompt.tokens_BP[:, -1].astype(jnp.int32), size).reshape(rows),
        ruled=rules.start(rows),
        cache=cache,
    )

    def unsettled(state: State) -> jax.Array:
        return (state.step < max_len) & jnp.any(state.open_B)

    end = go_on(unsettled, lambda state: _advance(extend, prompt, ending, beams, rules, state), start, growth)
    alive = end.alive._replace(scores_BM=end.alive.scores_BM / beams.penalty(max_len))  # they have the greatest length
    if beams.coverage_penalty:
        covered_BM = beams.coverage_penalty * end.cache.coverage().reshape(rows)
        alive, _ = best(alive._replace(scores_BM=alive.scores_BM + covered_BM), rows[1])
    if groups == 1:
        return _result(alive, end.finished)
    joined = jax.tree.map(lambda x: x.reshape(N, size, *x.shape[2:]), (alive, end.finished))
    return _result(*(best(hypotheses, size)[0] for hypotheses in joined))


def _advance(extend: Extend, prompt: Prompt, ending: Ending, beams: Beams, rules: Rules, state: State) -> State:
    """Returns the state one token later."""
    step, alive = state.step, state.alive
    B, M = state.last_BM.shape
    together = (len(prompt.tokens_BP), beams.beam_size)
    positions = jnp.broadcast_to(prompt.positions_BP[:, -1:] + step, together)
    logits, cache = extend(state.last_BM.reshape(together), positions, state.cache)
    logits = ending.force(logits.astype(jnp.float32), step)
    V = logits.shape[-1]
    logprobs_BMV = jax.nn.log_softmax(logits).reshape(B, M, V)
    logprobs_BMV = jnp.where(banned_mask(V, ending.banned)[None, None], -jnp.inf, logprobs_BMV)
    if rules.any:
        tokens, positions = (jnp.repeat(x, beams.beam_size, axis=0) for x in prompt[:2])
        history = History.of(tokens, positions >= 0, alive.tokens_BMT.reshape(B * M, -1), step)
        changed = rules.changed(logprobs_BMV.reshape(B * M, V), state.ruled, history, ending.max_len)
        stuck_B = jnp.all(jnp.isneginf(alive.scores_BM[:, :, None] + changed.reshape(B, M, V)), (1, 2))
        ends_B = stuck_B & jnp.isneginf(state.finished.scores_BM[:, 0])
        own = jnp.where(jnp.arange(V) == ending.eos, logprobs_BMV, -jnp.inf)
        logprobs_BMV = jnp.where(ends_B[:, None, None], own, changed.reshape(B, M, V))

    totals_BMV = alive.scores_BM[:, :, None] + logprobs_BMV
    C = (2 + len(ending.others)) * M  # of which M or more do not end
    scores_BC, flat_BC = _likeliest(totals_BMV, C, ending, beams)
    parents_BC, chosen_BC = flat_BC // V, flat_BC % V
    tokens_BCT = take(alive, parents_BC).tokens_BMT
    tokens_BCT = jax.lax.dynamic_update_slice_in_dim(tokens_BCT, chosen_BC[:, :, None], step, axis=2)
    grown = Hypotheses(tokens_BCT, scores_BC, jnp.full((B, C), step + 1))

    ends_BC = ending.ends(chosen_BC)
    alive, kept_BM = best(grown._replace(scores_BM=jnp.where(ends_BC, -jnp.inf, scores_BC)), M)
    last = beams.count_cut & (step == ending.max_len - 1)
    counts_BC = (ends_BC | last) & (jnp.arange(C) < M)[None] & state.open_B[:, None]
    normalised_BC = scores_BC / beams.penalty(step + 1)
    if beams.coverage_penalty:
        covered_BM = beams.coverage_penalty * cache.coverage().reshape(B, M)
        normalised_BC += jnp.take_along_axis(covered_BM, parents_BC, 1)
    ended = grown._replace(scores_BM=jnp.where(counts_BC, normalised_BC, -jnp.inf))
    joined = Hypotheses(*[jnp.concatenate(pair, 1) for pair in zip(state.finished, ended, strict=True)])
    finished, _ = best(joined, M)

    parents_BM, last_BM = (jnp.take_along_axis(x_BC, kept_BM, 1) for x_BC in (parents_BC, chosen_BC))
    ruled = rules.follow(take(state.ruled, parents_BM), last_BM)
    of_group_BM = parents_BM + (jnp.arange(B) % beams.beam_groups * M)[:, None]
    return State(
        step + 1,
        alive,
        finished,
        state.open_B & _may_improve(alive, finished, step + 1, ending.max_len, beams),
        last_BM,
        ruled,
        cache.take(of_group_BM.reshape(together)),
    )


def _likeliest(totals_BMV: jax.Array, number: int, ending: Ending, beams: Beams) -> tuple[jax.Array, jax.Array]:
    """Returns (scores_BC, the places in [M V]) of the best continuations of each row."""
    B, M, V = totals_BMV.shape
    if beams.beam_groups == 1:
        return largest(totals_BMV.reshape(B, M * V), number)
    totals_NGMV = totals_BMV.reshape(-1, beams.beam_groups, M, V)
    taken_NV = jnp.zeros((len(totals_NGMV), V))
    found = []
    for group in range(beams.beam_groups):
        less_NMV = totals_NGMV[:, group] - beams.diversity_penalty * taken_NV[:, None]
        scores_NC, flat_NC = largest(less_NMV.reshape(-1, M * V), number)
        found.append((scores_NC, flat_NC))
        tokens_NC = flat_NC % V
        scores_NM, kept_NM = jax.lax.top_k(jnp.where(ending.ends(tokens_NC), -jnp.inf, scores_NC), M)
        tokens_NM = jnp.where(jnp.isfinite(scores_NM), jnp.take_along_axis(tokens_NC, kept_NM, 1), V)
        taken_NV += jax.nn.one_hot(tokens_NM, V).sum(1)
    scores_BC, flat_BC = (jnp.stack(x, 1).reshape(B, number) for x in zip(*found, strict=True))
    return scores_BC, flat_BC


def _may_improve(alive: Hypotheses, finished: Hypotheses, length: Any, longest: int, beams: Beams) -> jax.Array:
    """Returns for each row whether an unfinished hypothesis may still take the place of a finished one.

    The coverage penalty of what is still to be written is expected to be 0, the least that it can be.
    """
    best_B, worst_B = alive.scores_BM[:, 0], finished.scores_BM[:, -1]
    expected = STOPPING[beams.early_stopping]
    if expected is None:
        return jnp.isfinite(best_B) & jnp.isneginf(worst_B)
    return best_B / beams.penalty(expected(length, longest)) > worst_B


def _result(alive: Hypotheses, finished: Hypotheses) -> Hypotheses:
    """Returns the finished hypotheses of each row, or the alive ones of a row that finished none."""
    some_B = jnp.isfinite(finished.scores_BM[:, 0])
    chosen = jax.tree.map(lambda *both: jax.vmap(jnp.where)(some_B, *both), finished, alive)
    real_BM = jnp.isfinite(chosen.scores_BM)
    return chosen._replace(
        tokens_BMT=jnp.where(real_BM[:, :, None], chosen.tokens_BMT, PAD),
        lengths_BM=jnp.where(real_BM, chosen.lengths_BM, 0),
    )
