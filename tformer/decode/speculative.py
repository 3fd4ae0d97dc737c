"""Speculative decoding: tokens are drafted at little cost, and the model reads several of them at once.

The text has the distribution of the model by itself (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm
2).

Shapes: B batch, P prompt length, D drafted tokens, N = D + 1, T new tokens, S places of a text, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.decode.growth import check_slots, for_steps
from tformer.decode.penalties import History
from tformer.decode.rules import Rules
from tformer.decode.sample import PAD, Ending, Extend, Prompt, banned_mask, prefill
from tformer.layers.parallel.few_tokens import STEP

MATCHED = 3  # tokens of the text's end that `look_up` looks for, at most

# logits_BV, as rules left them -> the log-probabilities of what is drawn
Warp = Callable[[jax.Array], jax.Array]


class Written(NamedTuple):
    """The new tokens of each row."""

    tokens_BS: jax.Array
    count_B: jax.Array  # how many there are; what stands behind is not part of the text
    last_B: jax.Array  # the last one, or of the prompt where there is none


class Draft(NamedTuple):
    """What drafts tokens; a state is carried from one draft to the next."""

    state: Any
    # (state, what is written, keys_BD) -> (tokens_BD, their log-probabilities_BDV or None: they are certain, state)
    propose: Callable[[Any, Written, jax.Array], tuple[jax.Array, jax.Array | None, Any]]
    keep: Callable[[Any, jax.Array], Any]  # (state, how many tokens of N each row keeps_B) -> state


class Loop(NamedTuple):
    """What stays as it is from one reading to the next."""

    extend: Extend
    prompt: Prompt
    ending: Ending
    draft: Draft
    number: int
    longest: int
    keys_B: jax.Array
    warp: Warp
    rules: Rules


class State(NamedTuple):
    """The loop's state."""

    written: Written
    scores_B: jax.Array
    ended_B: jax.Array
    ruled: Any  # the state of the constraint
    cache: Any
    drafting: Any


class Reading(NamedTuple):
    """Drafted tokens, and what the model says of each, and of the one after them."""

    drafted_BD: jax.Array
    drafted_BDV: jax.Array | None  # log-probabilities; None: they are certain
    steps_BN: jax.Array  # new tokens before each
    keys_BN3: jax.Array
    logits_BNV: jax.Array
    cache: Any
    drafting: Any


def greedy_warp(logits_BV: jax.Array) -> jax.Array:
    """Returns the log-probabilities of a draw that is always the likeliest token."""
    best_BV = jax.nn.one_hot(jnp.argmax(logits_BV, 1), logits_BV.shape[1], dtype=bool)
    return jnp.where(best_BV, 0.0, -jnp.inf)


def speculate(
    extend: Extend,
    cache: Any,
    prompt: Prompt,
    ending: Ending,
    draft: Draft,
    *,
    number: int,
    longest: int,
    keys_B: jax.Array,
    warp: Warp,
    rules: Rules = Rules(),
) -> tuple[jax.Array, jax.Array]:
    """Returns (tokens_BT, scores_B) as `greedy` and `sample` do, from `number` drafted tokens at a time.

    Each row goes on by as many tokens as the model agrees with, and one more, whatever the others do. `warp` gives the
    distribution that tokens are drawn from: with `greedy_warp` the text is that of `greedy`. The cache has slots for
    the prompt, `max_len` tokens and `number` more; positions are below `longest`.

    Raises:
      UserError: the cache has too few slots.
    """
    B, max_len = len(prompt.tokens_BP), ending.max_len
    check_slots(cache, prompt.tokens_BP.shape[1] - 1 + max_len + number)
    none_BS = jnp.full((B, max_len + number + 1), PAD, jnp.int32)
    start = State(
        Written(none_BS, jnp.zeros(B, jnp.int32), prompt.tokens_BP[:, -1].astype(jnp.int32)),
        scores_B=jnp.zeros(B, jnp.float32),
        ended_B=prompt.positions_BP[:, -1] < 0,
        ruled=rules.start((B,)),
        cache=for_drafts(prefill(extend, cache, prompt), number),
        drafting=draft.state,
    )
    loop = Loop(extend, prompt, ending, draft, number, longest, keys_B, warp, rules)
    end = jax.lax.while_loop(lambda state: ~jnp.all(state.ended_B), functools.partial(_advance, loop), start)
    tokens_BT = end.written.tokens_BS[:, :max_len]
    return jnp.where(jnp.arange(max_len)[None] < end.written.count_B[:, None], tokens_BT, PAD), end.scores_B


def for_drafts(cache: Any, number: int) -> Any:
    """Returns a cache whose rows go on by up to `number` drafted tokens and one more."""
    return (for_steps(cache) if number < STEP else cache).by_row()


def _advance(loop: Loop, state: State) -> State:
    """Returns the state after one reading: each row has what it keeps of its drafted tokens, and the one after them."""
    read, ending, N = _read(loop, state), loop.ending, loop.number + 1
    logprobs_BNV, ruled = _distributions(loop, state, read)
    accepted_B, next_B = _judge(logprobs_BNV, read.drafted_BD, read.drafted_BDV, read.keys_BN3)

    chosen_BN = jnp.where(jnp.arange(N)[None] == accepted_B[:, None], next_B[:, None], _padded(read.drafted_BD))
    ends_BN = ending.ends(chosen_BN) | (read.steps_BN == ending.max_len - 1)
    kept_B = jnp.minimum(accepted_B, jnp.argmax(ends_BN.at[:, -1].set(True), 1)) + 1
    kept_B = jnp.where(state.ended_B, 0, kept_B)
    counts_BN = jnp.arange(N)[None] < kept_B[:, None]
    own_BNV = jax.nn.log_softmax(read.logits_BNV)
    scores_BN = jnp.take_along_axis(own_BNV, chosen_BN[:, :, None], 2)[:, :, 0]
    last_B = jnp.take_along_axis(chosen_BN, jnp.maximum(kept_B - 1, 0)[:, None], 1)[:, 0]
    at = jax.tree.map(lambda *states: jax.vmap(lambda i, *each: jnp.stack(each)[i])(accepted_B, *states), *ruled)
    tokens_BS, count_B, _ = state.written
    return State(
        Written(_put(tokens_BS, chosen_BN, count_B), count_B + kept_B, jnp.where(state.ended_B, PAD, last_B)),
        state.scores_B + jnp.sum(jnp.where(counts_BN, scores_BN, 0.0), 1),
        state.ended_B | jnp.any(ends_BN & counts_BN, 1),
        loop.rules.follow(at, next_B),
        read.cache.back(N - kept_B),
        loop.draft.keep(read.drafting, kept_B),
    )


def _read(loop: Loop, state: State) -> Reading:
    """Drafts tokens for each row, and reads them behind its last one."""
    written, D = state.written, loop.number
    steps_BN = written.count_B[:, None] + jnp.arange(D + 1)[None]
    keys_BN3 = _keys(loop.keys_B, steps_BN)
    drafted_BD, drafted_BDV, drafting = loop.draft.propose(state.drafting, written, keys_BN3[:, :D, 0])
    read_BN = jnp.concatenate([written.last_B[:, None], drafted_BD], 1)
    positions_BN = _positions(loop.prompt.positions_BP[:, -1:], steps_BN, loop.longest)
    logits_BNV, cache = loop.extend(read_BN, positions_BN, state.cache)
    logits_BNV = jax.vmap(jax.vmap(loop.ending.force))(logits_BNV.astype(jnp.float32), steps_BN)
    return Reading(drafted_BD, drafted_BDV, steps_BN, keys_BN3, logits_BNV, cache, drafting)


def _distributions(loop: Loop, state: State, read: Reading) -> tuple[jax.Array, list[Any]]:
    """Returns the log-probabilities by which each token is drawn, [B, N, V], and the constraint's state before each:
    after the drafted ones in front of it."""
    tokens_BS = _put(state.written.tokens_BS, read.drafted_BD, state.written.count_B)
    mask_1V = banned_mask(read.logits_BNV.shape[2], loop.ending.banned)[None]
    logprobs, states = [], [state.ruled]
    for place in range(loop.number + 1):
        logits_BV = jnp.where(mask_1V, -jnp.inf, read.logits_BNV[:, place])
        if loop.rules.any:
            logits_BV = _ruled(loop, logits_BV, states[-1], tokens_BS, read.steps_BN[:, place])
        logprobs.append(loop.warp(logits_BV))
        if place < loop.number:
            states.append(loop.rules.follow(states[-1], read.drafted_BD[:, place]))
    return jnp.stack(logprobs, 1), states


def _judge(
    logprobs_BNV: jax.Array, drafted_BD: jax.Array, drafted_BDV: jax.Array | None, keys_BN3: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (how many drafted tokens of each row are accepted, the token after them).

    A token drafted with probability q is accepted with min(1, p / q). The first one that is not is drawn again, from
    what p has more than q; after the last one comes a draw from p.
    """
    D, V = drafted_BD.shape[1], logprobs_BNV.shape[2]
    p_BNV = jnp.exp(logprobs_BNV)
    q_BDV = jax.nn.one_hot(drafted_BD, V) if drafted_BDV is None else jnp.exp(drafted_BDV)
    p_BD, q_BD = (jnp.take_along_axis(x, drafted_BD[:, :, None], 2)[:, :, 0] for x in (p_BNV[:, :D], q_BDV))
    uniform_BD = jax.vmap(jax.vmap(jax.random.uniform))(keys_BN3[:, :D, 1])
    agreed_BD = uniform_BD * q_BD < p_BD
    accepted_B = jnp.sum(jnp.cumprod(agreed_BD.astype(jnp.int32), 1), 1)
    more_BDV = jnp.maximum(p_BNV[:, :D] - q_BDV, 0.0)
    none_BD1 = jnp.sum(more_BDV, 2, keepdims=True) == 0  # p equals q but for rounding
    left_BNV = jnp.concatenate([jnp.where(none_BD1, p_BNV[:, :D], more_BDV), p_BNV[:, D:]], 1)
    left_BV, key_B = (jax.vmap(lambda row, place: row[place])(x, accepted_B) for x in (left_BNV, keys_BN3[:, :, 2]))
    return accepted_B, jax.vmap(jax.random.categorical)(key_B, jnp.log(left_BV)).astype(jnp.int32)


def _positions(first: jax.Array, steps: jax.Array, longest: int) -> jax.Array:
    """Returns the positions of tokens so many steps after the first ones: -1 where there is none, or it is padding."""
    return jnp.where((first >= 0) & (first + steps < longest), first + steps, -1)


def _keys(keys_B: jax.Array, steps_BN: jax.Array) -> jax.Array:
    """Returns three keys for each row and step: for the draft, for its judgement, and for a draw in its place."""
    at_step = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys_B, steps_BN)
    return jax.vmap(jax.vmap(lambda key: jax.random.split(key, 3)))(at_step)


def _ruled(loop: Loop, logits_BV: jax.Array, state: Any, tokens_BS: jax.Array, step_B: jax.Array) -> jax.Array:
    """Returns the logits of step `step_B` of each row, after the first so many of its tokens."""
    prompt, ending = loop.prompt, loop.ending

    def one(*row: Any) -> jax.Array:
        logits, state, tokens, positions, new = jax.tree.map(lambda x: x[None], row[:-1])
        history = History.of(tokens, positions >= 0, new, row[-1])
        return loop.rules(logits, state, history, ending.max_len, ending.eos)[0]

    return jax.vmap(one)(logits_BV, state, prompt.tokens_BP, prompt.positions_BP, tokens_BS, step_B)


def _put(tokens_BS: jax.Array, new_BN: jax.Array, start_B: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice_in_dim(row, new, start, 0))(
        tokens_BS, new_BN, start_B
    )


def _padded(drafted_BD: jax.Array) -> jax.Array:
    return jnp.pad(drafted_BD, ((0, 0), (0, 1)))


# ------------------------------------------------------------------------------------------------- what drafts tokens


def by_model(
    extend: Extend, cache: Any, prompt: Prompt, warp: Warp, *, number: int, longest: int, banned: tuple[int, ...] = ()
) -> Draft:
    """Drafts with a smaller model, as `extend` and an empty cache: what it draws by the same `warp`.

    The cache has slots as that of the model whose tokens are drafted.
    """
    first_B = prompt.positions_BP[:, -1]

    def propose(cache: Any, written: Written, keys_BD: jax.Array) -> tuple[jax.Array, jax.Array | None, Any]:
        token_B, tokens, logprobs = written.last_B, [], []
        for place in range(number + 1):
            position_B = _positions(first_B, written.count_B + place, longest)
            logits_B1V, cache = extend(token_B[:, None], position_B[:, None], cache)
            if place == number:
                break  # the last drafted token is read, for it may be kept
            logits_BV = logits_B1V[:, 0].astype(jnp.float32)
            logits_BV = jnp.where(banned_mask(logits_BV.shape[1], banned)[None], -jnp.inf, logits_BV)
            logprobs.append(warp(logits_BV))
            token_B = jax.vmap(jax.random.categorical)(keys_BD[:, place], logprobs[-1]).astype(jnp.int32)
            tokens.append(token_B)
        return jnp.stack(tokens, 1), jnp.stack(logprobs, 1), cache

    cache = for_drafts(prefill(extend, cache, prompt), number)
    return Draft(cache, propose, lambda cache, kept_B: cache.back(number + 1 - kept_B))


def by_look_up(tokens_BP: jax.Array, real_BP: jax.Array, *, number: int) -> Draft:
    """Drafts what followed the last tokens where they stood before, in the given ones or in the text itself.

    (Prompt look-up: Saxena 2023. Of several places the latest one with the longest match counts.)
    """

    def propose(state: None, written: Written, keys_BD: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
        tokens_BS = jnp.concatenate([tokens_BP, written.tokens_BS], 1)
        real_BS = jnp.concatenate([real_BP, jnp.ones(written.tokens_BS.shape, bool)], 1)
        return look_up(tokens_BS, real_BS, tokens_BP.shape[1] + written.count_B, number), None, None

    return Draft(None, propose, lambda state, kept_B: state)


def look_up(tokens_BS: jax.Array, real_BS: jax.Array, end_B: jax.Array, number: int) -> jax.Array:
    """Returns tokens_BD that followed the last tokens before `end_B` where they stood before; any, where they did not.

    Behind the end the tokens between both places come again.
    """
    place_S = jnp.arange(tokens_BS.shape[1])

    def one(tokens_S: jax.Array, real_S: jax.Array, end: jax.Array) -> jax.Array:
        same_S, matched_S = jnp.ones(len(tokens_S), bool), jnp.zeros(len(tokens_S), jnp.int32)
        for back in range(MATCHED):
            before_S = jnp.roll(tokens_S, back)
            real_before_S = jnp.roll(real_S, back) & (place_S >= back)
            same_S &= (before_S == tokens_S[end - 1 - back]) & real_before_S & (end - 1 - back >= 0)
            matched_S += same_S
        matched_S = jnp.where(place_S < end - 1, matched_S, -1)
        found = len(tokens_S) - 1 - jnp.argmax(matched_S[::-1])
        period = jnp.maximum(end - 1 - found, 1)
        return tokens_S[found + 1 + jnp.arange(number) % period]

    return jax.vmap(one)(tokens_BS, real_BS, end_B).astype(jnp.int32)
