"""Beam search over a step function.

Shapes: B batch, P prompt length, M beams, C candidates, T new tokens, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.decode.penalties import History
from tformer.decode.rules import Rules
from tformer.decode.sample import PAD, Ending, Extend, Prompt, banned_mask, prefill


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
    last_BM: jax.Array  # the token that the next step reads
    ruled: Any  # the state of the constraint, for each hypothesis
    cache: Any  # of M hypotheses of each row


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
    *,
    beams: int,
    alpha: float | jax.Array,
    offset: float = 5.0,
    rules: Rules = Rules(),
) -> Hypotheses:
    """Keeps the M likeliest unfinished hypotheses at each step and, separately, the M best finished ones.

    A hypothesis finishes where `eos` is among the M best continuations of its row, so that one beam with alpha 0 equals
    greedy search. A row is settled when no unfinished hypothesis can still beat its worst finished one. As
    log-probabilities only fall, the final score is at most the current one over the penalty of the greatest length.

    The cache is empty, with slots for the prompt and M `max_len` tokens. `cache.branch(M)` has M hypotheses of each
    row, of which a call of `extend` reads a token each, T = M; in `cache.take(parents_BM)` each goes on from its
    parent. `alpha`, 0 or more, and `offset` are of the length penalty; the length includes `eos`. `rules` change
    the log-probabilities, and so the scores; none may raise them above 0. Returns M = `beams` hypotheses per row with
    normalised scores; PAD after `eos` and in unused places, which score -inf. A row without finished hypotheses
    returns the unfinished ones.
    """
    penalty = functools.partial(length_penalty, alpha=alpha, offset=offset)
    step_fn = functools.partial(_advance, extend, prompt, ending, rules, penalty)
    max_len, penalty_most = ending.max_len, penalty(ending.max_len)

    def unsettled(state: State) -> jax.Array:
        bound_B = state.alive.scores_BM[:, 0] / penalty_most
        return (state.step < max_len) & jnp.any(bound_B > state.finished.scores_BM[:, -1])

    start = _start(
        prefill(extend, cache, prompt), prompt, beams, rules.start((prompt.tokens_BP.shape[0], beams)), max_len
    )
    end = jax.lax.while_loop(unsettled, step_fn, start)
    alive = end.alive._replace(scores_BM=end.alive.scores_BM / penalty_most)  # they have the greatest length
    return _result(alive, end.finished)


def _start(cache: Any, prompt: Prompt, beams: int, ruled: Any, max_len: int) -> State:
    """Returns the state before the first step; `cache` holds all of the prompt but its last token."""
    B, M = prompt.tokens_BP.shape[0], beams
    none = Hypotheses(
        jnp.full((B, M, max_len), PAD, jnp.int32), jnp.full((B, M), -jnp.inf), jnp.zeros((B, M), jnp.int32)
    )
    # All M beams begin with the same prompt: only one counts.
    real_BM = (prompt.positions_BP[:, -1] >= 0)[:, None] & (jnp.arange(M) == 0)[None]
    return State(
        step=jnp.zeros((), jnp.int32),
        alive=none._replace(scores_BM=jnp.where(real_BM, 0.0, none.scores_BM)),
        finished=none,
        last_BM=jnp.repeat(prompt.tokens_BP[:, -1:].astype(jnp.int32), M, axis=1),
        ruled=ruled,
        cache=cache.branch(M),
    )


def _advance(
    extend: Extend,
    prompt: Prompt,
    ending: Ending,
    rules: Rules,
    penalty: Callable[..., jax.Array],
    state: State,
) -> State:
    """Returns the state one token later."""
    step, alive = state.step, state.alive
    B, M = state.last_BM.shape
    positions_BM = jnp.broadcast_to(prompt.positions_BP[:, -1:] + step, (B, M))
    logits_BMV, cache = extend(state.last_BM, positions_BM, state.cache)
    logits_BMV = ending.force(logits_BMV.astype(jnp.float32), step)
    V = logits_BMV.shape[2]
    logprobs_BMV = jnp.where(banned_mask(V, ending.banned)[None, None], -jnp.inf, jax.nn.log_softmax(logits_BMV))
    if rules.any:
        tokens_RP, positions_RP = (jnp.repeat(x, M, axis=0) for x in prompt[:2])
        history = History.of(tokens_RP, positions_RP >= 0, alive.tokens_BMT.reshape(B * M, -1), step)
        logprobs_RV = logprobs_BMV.reshape(B * M, V)
        logprobs_BMV = rules(logprobs_RV, state.ruled, history, ending.max_len, ending.eos).reshape(B, M, V)

    totals_BMV = alive.scores_BM[:, :, None] + logprobs_BMV
    C = (2 + len(ending.others)) * M  # of which M or more do not end
    scores_BC, flat_BC = jax.lax.top_k(totals_BMV.reshape(B, M * V), C)
    parents_BC, chosen_BC = flat_BC // V, flat_BC % V
    tokens_BCT = take(alive, parents_BC).tokens_BMT
    tokens_BCT = jax.lax.dynamic_update_slice_in_dim(tokens_BCT, chosen_BC[:, :, None], step, axis=2)
    grown = Hypotheses(tokens_BCT, scores_BC, jnp.full((B, C), step + 1))

    ends_BC = ending.ends(chosen_BC)
    alive, kept_BM = best(grown._replace(scores_BM=jnp.where(ends_BC, -jnp.inf, scores_BC)), M)
    counts_BC = ends_BC & (jnp.arange(C)[None] < M)
    normalised_BC = jnp.where(counts_BC, scores_BC / penalty(step + 1), -jnp.inf)
    ended = grown._replace(scores_BM=normalised_BC)
    joined = Hypotheses(*[jnp.concatenate(pair, 1) for pair in zip(state.finished, ended, strict=True)])
    finished, _ = best(joined, M)

    parents_BM, last_BM = (jnp.take_along_axis(x_BC, kept_BM, 1) for x_BC in (parents_BC, chosen_BC))
    ruled = rules.follow(take(state.ruled, parents_BM), last_BM)
    return State(step + 1, alive, finished, last_BM, ruled, cache.take(parents_BM))


def _result(alive: Hypotheses, finished: Hypotheses) -> Hypotheses:
    """Returns the finished hypotheses of each row, or the alive ones of a row that finished none."""
    some_B = jnp.isfinite(finished.scores_BM[:, 0])
    chosen = jax.tree.map(lambda *both: jax.vmap(jnp.where)(some_B, *both), finished, alive)
    real_BM = jnp.isfinite(chosen.scores_BM)
    return chosen._replace(
        tokens_BMT=jnp.where(real_BM[:, :, None], chosen.tokens_BMT, PAD),
        lengths_BM=jnp.where(real_BM, chosen.lengths_BM, 0),
    )
