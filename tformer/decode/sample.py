"""Greedy decoding and sampling over a step function, without knowledge of the model.

Shapes: B batch, P prompt length, T new tokens, C chunks, V vocabulary.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.decode.growth import Growth, check_slots, go_on
from tformer.decode.penalties import History
from tformer.decode.rules import Rules
from tformer.layers import masks
from tformer.layers.parallel import each_device

PAD = 0  # fills rows after their end, whatever the tokenizer's padding is: readers stop at the end

# (tokens_BT, positions_BT, cache) -> (logits_BTV of these tokens, the cache with them)
Extend = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
Pick = Callable[[jax.Array, jax.Array], jax.Array]  # (logits_BV, number of the step) -> tokens_B


class Prompt(NamedTuple):
    """The tokens before the new ones."""

    tokens_BP: jax.Array  # for a model with an encoder, data.start
    # -1 is padding, in front. The last token is real; a row of padding alone gets no new tokens
    positions_BP: jax.Array
    rows_B: jax.Array  # each example's number, on which its random draws depend, instead of its place in the batch
    prefilled: bool = False  # the cache holds all but the last token already
    draws_B: jax.Array | None = None  # numbers of draws of the same example; None: all are the first, 0
    shared: int = 0  # tokens with which all rows begin, and which the cache holds already
    chunk: int | None = None  # tokens that are read at once; None: all

    def repeat(self, draws: int) -> 'Prompt':
        """Returns the prompts for so many draws of each, one after the other; the cache is prefilled."""
        tokens, positions, rows = (jnp.repeat(x, draws, axis=0) for x in self[:3])
        return Prompt(tokens, positions, rows, True, jnp.tile(jnp.arange(draws), self.rows_B.shape[0]))

    def keys(self, rng: jax.Array) -> jax.Array:
        """Returns a key of each row: `rng` folded with its example's number, and its draw's unless that is 0."""
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(rng, self.rows_B)
        if self.draws_B is None:
            return keys_B
        further_B = jax.vmap(jax.random.fold_in)(keys_B, self.draws_B)
        return jax.vmap(jnp.where)(self.draws_B == 0, keys_B, further_B)


class Ending(NamedTuple):
    """When rows end."""

    max_len: int  # largest number of new tokens, `eos` included
    eos: int  # the token that ends a row
    banned: Sequence[int] = ()  # tokens that are never generated
    forced: bool = False  # the last of `max_len` tokens is `eos`, with probability 1
    others: Sequence[int] = ()  # further tokens that end a row

    def ends(self, tokens: jax.Array) -> jax.Array:
        """Returns where `tokens` end a row: bool, of their shape."""
        return functools.reduce(operator.or_, (tokens == end for end in (self.eos, *self.others)))

    def force(self, logits: jax.Array, step: jax.Array) -> jax.Array:
        """Returns the logits [..., V] of token number `step`, counted from 0."""
        if not self.forced:
            return logits
        only_V = jnp.where(jnp.arange(logits.shape[-1]) == self.eos, 0.0, -jnp.inf)
        return jnp.where(step == self.max_len - 1, only_V, logits)


class Sampling(NamedTuple):
    """How the distribution of a token is changed before it is drawn; all may be traced."""

    temperature: float | jax.Array = 1.0  # divides the logits; positive
    top_k: int | jax.Array | None = None  # only the likeliest `top_k` tokens; None: all
    top_p: float | jax.Array | None = None  # only the likeliest tokens up to this mass; None: all
    min_p: float | jax.Array | None = None  # only tokens with this share of the likeliest one's probability; None: all
    typical_p: float | jax.Array | None = None  # only the most typical tokens up to this mass; None: all
    epsilon_cutoff: float | jax.Array | None = None  # only tokens of this probability, and the likeliest; None: all
    eta_cutoff: float | jax.Array | None = None  # likewise, of less where the entropy is high; None: all

    def warp(self, logits_BV: jax.Array) -> jax.Array:
        """Returns the logits that a token is drawn by: each cut is of what the one before left."""
        if any(cut is not None for cut in self[1:]):  # each passes over all of a row many times
            logits_BV = each_device.whole_rows(logits_BV, 'act_vocab')
        logits_BV = keep_top_k(logits_BV / self.temperature, self.top_k)
        logits_BV = keep_min_p(keep_top_p(logits_BV, self.top_p), self.min_p)
        return keep_eta(keep_epsilon(keep_typical(logits_BV, self.typical_p), self.epsilon_cutoff), self.eta_cutoff)


class State(NamedTuple):
    """The loop's state."""

    step: jax.Array
    tokens_BT: jax.Array
    scores_B: jax.Array
    ended_B: jax.Array
    last_B: jax.Array  # the token that the next step reads
    ruled: Any  # the state of the constraint
    cache: Any


def prefill(extend: Extend, cache: Any, prompt: Prompt) -> Any:
    """Returns the cache with all of the prompt but its last token, which the first step reads.

    Every step is then the same program, and no logits of the prompt are computed.
    """
    if prompt.prefilled or prompt.tokens_BP.shape[1] == 1:
        return cache
    tokens_BT, positions_BT = (x[:, prompt.shared : -1] for x in (prompt.tokens_BP, prompt.positions_BP))
    if prompt.shared:  # rows shorter than the longest one have their last shared tokens here
        positions_BT = jnp.where(positions_BT >= prompt.shared, positions_BT, -1)
    return read(extend, cache, tokens_BT, positions_BT, chunk=prompt.chunk, empty=not prompt.shared)


def read(
    extend: Extend,
    cache: Any,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    *,
    chunk: int | None = None,
    empty: bool = True,
) -> Any:
    """Returns the cache with tokens, of which `chunk` are read at once, and what is left of them first.

    Each chunk sees what the cache has, so that it becomes the same but for rounding, and only the keys and values of
    all tokens are in memory. `empty` says whether the cache is.
    """
    B, T = tokens_BT.shape
    left = T if chunk is None else T % chunk
    if left:
        with masks.ordered('front' if empty else None):  # behind other tokens places are not those of the cache
            cache = extend(tokens_BT[:, :left], positions_BT[:, :left], cache)[1]
    if left == T:
        return cache
    tokens_CBT, positions_CBT = (
        jnp.moveaxis(x[:, left:].reshape(B, -1, chunk), 1, 0) for x in (tokens_BT, positions_BT)
    )

    def further(cache: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return extend(part[0], part[1], cache)[1], None

    with masks.ordered(None):
        return jax.lax.scan(further, cache, (tokens_CBT, positions_CBT))[0]


def banned_mask(vocab_size: int, banned: Sequence[int]) -> jax.Array:
    """Returns mask_V, True at tokens that must not be generated."""
    return jnp.zeros(vocab_size, bool).at[jnp.array(banned, jnp.int32)].set(True)


def keep_top_k(logits_BV: jax.Array, top_k: int | jax.Array | None) -> jax.Array:
    """Returns the `top_k` largest logits of each row (and ties with the last), -inf elsewhere (Fan et al. 2018)."""
    if top_k is None:
        return logits_BV
    kept_BV = _largest(logits_BV, jnp.ones_like(logits_BV, jnp.int32), jnp.minimum(top_k, logits_BV.shape[1]))
    return jnp.where(kept_BV, logits_BV, -jnp.inf)


def keep_top_p(logits_BV: jax.Array, top_p: float | jax.Array | None) -> jax.Array:
    """Returns the logits of the smallest set of most probable tokens with mass `top_p` or more, -inf elsewhere.

    Ties with the least probable of them stay (Holtzman et al. 2020, 3.1: nucleus sampling).
    """
    if top_p is None:
        return logits_BV
    return jnp.where(_largest(logits_BV, jax.nn.softmax(logits_BV), top_p), logits_BV, -jnp.inf)


def keep_min_p(logits_BV: jax.Array, min_p: float | jax.Array | None) -> jax.Array:
    """Returns the logits of tokens whose probability is at least `min_p` times the largest, -inf elsewhere (Nguyen et
    al. 2024, algorithm 1)."""
    if min_p is None:
        return logits_BV
    least_B1 = jnp.max(logits_BV, 1, keepdims=True) + jnp.log(min_p)
    return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)


def keep_typical(logits_BV: jax.Array, mass: float | jax.Array | None) -> jax.Array:
    """Returns the logits of the smallest set of tokens of mass `mass` or more whose information is nearest to the
    entropy, -inf elsewhere (Meister et al. 2023, eq. 12)."""
    if mass is None:
        return logits_BV
    logprobs_BV = jax.nn.log_softmax(logits_BV)
    distance_BV = jnp.where(jnp.isfinite(logprobs_BV), jnp.abs(logprobs_BV + _entropy(logprobs_BV)), jnp.inf)
    return jnp.where(_largest(-distance_BV, jnp.exp(logprobs_BV), mass), logits_BV, -jnp.inf)


def keep_epsilon(logits_BV: jax.Array, epsilon: float | jax.Array | None) -> jax.Array:
    """Returns the logits of tokens whose probability is at least `epsilon`, and of the likeliest, -inf elsewhere.

    (Hewitt et al. 2022, 3.2.)
    """
    if epsilon is None:
        return logits_BV
    likely_BV = jax.nn.softmax(logits_BV) >= epsilon
    return jnp.where(likely_BV | (logits_BV == jnp.max(logits_BV, 1, keepdims=True)), logits_BV, -jnp.inf)


def keep_eta(logits_BV: jax.Array, epsilon: float | jax.Array | None) -> jax.Array:
    """Returns what `keep_epsilon` keeps with min(epsilon, sqrt(epsilon) exp(-entropy)) (Hewitt et al. 2022, eq. 5)."""
    if epsilon is None:
        return logits_BV
    entropy_B1 = _entropy(jax.nn.log_softmax(logits_BV))
    return keep_epsilon(logits_BV, jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-entropy_B1)))


def _entropy(logprobs_BV: jax.Array) -> jax.Array:
    """Returns the entropy of each row, in nats, [B, 1]."""
    products_BV = jnp.where(jnp.isfinite(logprobs_BV), jnp.exp(logprobs_BV) * logprobs_BV, 0.0)
    return -jnp.sum(products_BV, 1, keepdims=True)


def _largest(values_BV: jax.Array, weights_BV: jax.Array, enough: float | jax.Array) -> jax.Array:
    """Returns mask_BV, True at the fewest largest values of each row whose weights sum to `enough`, and at ties.

    The least of them is found by bisection on its bits, 32 sums: on a CPU, sorting a vocabulary costs 50 times more.
    """
    bits_BV = jax.lax.bitcast_convert_type(values_BV.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order_BV = jnp.where(bits_BV < sign, bits_BV | sign, ~bits_BV)  # whole numbers that are ordered as the values are

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B1, high_B1 = bounds
        middle_B1 = low_B1 + (high_B1 - low_B1) // 2
        sum_B1 = jnp.sum(jnp.where(order_BV >= middle_B1, weights_BV, 0), 1, keepdims=True)
        return jnp.where(sum_B1 >= enough, middle_B1, low_B1), jnp.where(sum_B1 >= enough, high_B1, middle_B1)

    most_B1 = jnp.max(order_BV, 1, keepdims=True)
    least_B1, _ = jax.lax.fori_loop(0, 32, halve, (jnp.zeros_like(most_B1), most_B1 + 1))
    return order_BV >= least_B1


def _generate(
    extend: Extend, cache: Any, prompt: Prompt, ending: Ending, rules: Rules, pick: Pick, growth: Growth
) -> tuple[jax.Array, jax.Array]:
    """The loop of `greedy` and `sample`."""
    max_len = ending.max_len
    check_slots(cache, prompt.tokens_BP.shape[1] - 1 + max_len, growth)
    first_B, ended_B = prompt.positions_BP[:, -1] + 1, prompt.positions_BP[:, -1] < 0

    def unfinished(state: State) -> jax.Array:
        return (state.step < max_len) & ~jnp.all(state.ended_B)

    def advance(state: State) -> State:
        positions_B = first_B - 1 + state.step
        logits_B1V, cache = extend(state.last_B[:, None], positions_B[:, None], state.cache)
        logits_BV = ending.force(logits_B1V[:, 0].astype(jnp.float32), state.step)
        mask_1V = banned_mask(logits_BV.shape[1], ending.banned)[None]
        changed_BV = jnp.where(mask_1V, -jnp.inf, logits_BV)
        if rules.any:
            history = History.of(prompt.tokens_BP, prompt.positions_BP >= 0, state.tokens_BT, state.step)
            changed_BV = rules(changed_BV, state.ruled, history, max_len, ending.eos)
        chosen_B = pick(changed_BV, state.step).astype(jnp.int32)
        logprobs_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), chosen_B[:, None], 1)[:, 0]
        tokens_B = jnp.where(state.ended_B, PAD, chosen_B)
        return State(
            step=state.step + 1,
            tokens_BT=jax.lax.dynamic_update_slice_in_dim(state.tokens_BT, tokens_B[:, None], state.step, axis=1),
            scores_B=state.scores_B + jnp.where(state.ended_B, 0.0, logprobs_B),
            ended_B=state.ended_B | ending.ends(tokens_B),
            last_B=tokens_B,
            ruled=rules.follow(state.ruled, chosen_B),
            cache=cache,
        )

    start = State(
        step=jnp.zeros((), jnp.int32),
        tokens_BT=jnp.full((ended_B.shape[0], max_len), PAD, jnp.int32),
        scores_B=jnp.zeros(ended_B.shape, jnp.float32),
        ended_B=ended_B,
        last_B=prompt.tokens_BP[:, -1].astype(jnp.int32),
        ruled=rules.start(ended_B.shape),
        cache=prefill(extend, cache, prompt),
    )
    end = go_on(unfinished, advance, start, growth)
    return end.tokens_BT, end.scores_B


def greedy(
    extend: Extend, cache: Any, prompt: Prompt, ending: Ending, *, rules: Rules = Rules(), growth: Growth = ()
) -> tuple[jax.Array, jax.Array]:
    """Takes the likeliest token at each step, until every row has ended.

    The cache is empty, with slots for the prompt and, but for its `growth`, `max_len` tokens. `rules` change the
    logits before. Returns (tokens_BT, int32, PAD after `eos`; scores_B, the sum of the model's own log-probabilities of
    these tokens).

    Raises:
      UserError: the cache has too few slots.
    """
    return _generate(extend, cache, prompt, ending, rules, lambda logits_BV, _: jnp.argmax(logits_BV, 1), growth)


def sample(
    extend: Extend,
    cache: Any,
    prompt: Prompt,
    ending: Ending,
    rng: jax.Array,
    sampling: Sampling,
    *,
    rules: Rules = Rules(),
    growth: Growth = (),
) -> tuple[jax.Array, jax.Array]:
    """Draws each token from softmax(logits / temperature), cut by one rule of `Sampling` after another.

    The key of a token is that of its row (`Prompt.keys`) folded with its step. Otherwise like `greedy`; scores_B are
    those of the model's own distribution, before rules, temperature and cuts.
    """
    keys_B = prompt.keys(rng)

    def pick(logits_BV: jax.Array, step: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
        return jax.vmap(jax.random.categorical)(keys, sampling.warp(logits_BV))

    return _generate(extend, cache, prompt, ending, rules, pick, growth)
