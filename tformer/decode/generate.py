"""Generates tokens with a model, by the strategy that the configuration names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer import config
from tformer.config import Model
from tformer.decode.beam import Beams, beam_search
from tformer.decode.coverage import Covered, attend_by, counted
from tformer.decode.growth import Growth
from tformer.decode.guidance import Doubled, guided, with_and_without
from tformer.decode.halves import Halves
from tformer.decode.penalties import Penalties
from tformer.decode.rules import Rules
from tformer.decode.sample import Ending, Extend, Prompt, Sampling, greedy, prefill, read, sample
from tformer.decode.speculative import Draft, Warp, by_look_up, by_model, greedy_warp, speculate
from tformer.distributed.compilers import jit
from tformer.errors import UserError, choose
from tformer.layers import masks
from tformer.layers.moe import DISPATCHES
from tformer.layers.rope_scalings import ROPE_SCALINGS
from tformer.model import for_steps, positions_of, quantized

Generate = Callable[[Any, Mapping[str, Any], jax.Array | None], tuple[jax.Array, jax.Array]]


class Search(NamedTuple):
    """A prompt, and what goes on from it."""

    extend: Extend
    cache: Any
    prompt: Prompt
    ending: Ending
    rules: Rules
    longest: int  # positions that the model has
    draft: Callable[[int, Warp], Draft] | None  # for so many texts of each row; None: the model writes by itself
    growth: Growth  # of the cache

    def plain(self) -> tuple[Extend, Any, Prompt, Ending]:
        """Returns the first arguments of every search."""
        return self.extend, self.cache, self.prompt, self.ending


_SLOTS = 8  # the cache's slots are a multiple of this
_STAGES, _STAGE = 4, 48  # stages in which a cache grows, at most, and slots of a stage, at least


def make_generate(
    model: nn.Module,
    cfg: config.Decode,
    *,
    eos: int,
    banned: Sequence[int] = (),
    others: Sequence[int] = (),
    rules: Rules = Rules(),
    draft: nn.Module | None = None,
) -> Generate:
    """Returns generate(variables, batch, rng) -> (tokens_RT, scores_R), jitted, on a CPU maybe by
    `Halves`; T is `cfg.max_len`.

    R is B times `texts_of_row(cfg)`: the texts of a row follow each other, best first in beam search. A text ends with
    `eos` or one of the `others`; `banned` tokens, and those that the constraint of `rules` does not allow, are never
    generated. The penalties of `rules` are those of `cfg`. A `draft` is a smaller model that drafts tokens, with its
    variables in variables['draft'], and goes before `cfg.draft`.

    `batch` is a model's batch: `inputs` and `positions` [B, P] are the prompt, padded in front (with an encoder,
    data.start); encoder fields and `prefix` are as in training; `rows` [B], optional, are the examples' numbers, by
    which sampling draws (default: 0 to B - 1); `shared` [B, Q], optional, of a decoder without `prefix`, are tokens
    with which every prompt begins and goes on, the same in each row: they are read once for all of them (not with
    guidance). `rng` is the random key for sampling, else None. tokens_RT holds PAD after the end. scores_R is the
    model's log-probability of the new tokens, for beam search divided by the length penalty, and with `cfg.guidance`
    that of the guided distribution; a forced end has the probability 1, and a text that a beam did not find the score
    -inf.

    Raises:
      UserError: an unknown strategy; on a call, a prompt that with the new tokens is longer than the model's max_len.
    """
    strategy = choose(STRATEGIES, cfg.strategy, 'decode.strategy')
    longest: int = model.cfg.max_len

    @jit
    def generate(variables: Any, batch: Mapping[str, Any], rng: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        P = batch['inputs'].shape[1]
        needed = P + cfg.max_len - 1
        if needed > longest:
            raise UserError(
                f'a prompt of {P} and decode.max_len={cfg.max_len} new tokens need {needed} positions, but '
                f'model.max_len={longest}'
            )

        variables = quantized(model, variables, cfg.quantization)
        if draft is not None:
            variables = {**variables, 'draft': quantized(draft, variables['draft'], cfg.quantization)}
        if cfg.guidance != 1:  # rows without their prompts share nothing
            batch = {name: value for name, value in batch.items() if name != 'shared'}
        drafts = draft is not None or cfg.draft is not None
        slots = cache_slots(cfg, P + (cfg.draft_len + 1 if drafts else 0))
        growth = () if drafts or model.cfg.recurrence is not None else _growth(cfg, P)
        extend, cache, prompt = begun(model, cfg, variables, batch, _up(P) if growth else slots)
        if cfg.guidance != 1:
            extend, cache = begun_guided(model, cfg, variables, batch, slots)
        ending = Ending(cfg.max_len, eos, tuple(banned), cfg.forced_end, tuple(others))
        penalties = _penalties(cfg, (eos, *others))
        drafting = _drafting(model, cfg, variables, batch, slots, tuple(banned), draft) if drafts else None
        made = Search(extend, cache, prompt, ending, rules._replace(penalties=penalties), longest, drafting, growth)
        return strategy.search(cfg, rng, made)

    if any(read_together(each.cfg) for each in (model, draft) if each is not None):
        return generate
    return Halves(generate, max(strategy.tokens(cfg), texts_of_row(cfg)))


def _penalties(cfg: config.Decode, ends: tuple[int, ...]) -> Penalties:
    repeated = cfg.repetition_penalty, cfg.presence_penalty, cfg.frequency_penalty, cfg.no_repeat_ngram
    return Penalties(*repeated, cfg.min_len, ends)


def begin(
    model: nn.Module,
    variables: Any,
    batch: Mapping[str, Any],
    slots: int,
    chunk: int | None = None,
    quantization: str | None = None,
) -> tuple[Extend, Any, Prompt]:
    """Returns a model's step function, its cache and the prompt of a batch, of which `chunk` tokens are read at once.

    The cache has the `quantization` of decode.cache_quantization.

    Tokens that all rows share are read once, as a row of their own, and stand in front of each row's cache.
    """
    variables = for_steps(model.cfg, variables)

    def extend(tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return model.apply(variables, tokens_BT, positions_BT, cache, method='extend')

    tokens_BP, positions_BP = batch['inputs'], positions_of(batch)
    shared = batch['shared'].shape[1] if 'shared' in batch else 0
    if shared and 'prefix' in batch:
        raise ValueError('a batch with prefix is read at once: shared is not supported')
    first = {'inputs': batch['shared'][:1]} if shared else batch
    with masks.ordered('front'):
        cache: Any = model.apply(variables, first, slots, method='start')
    if shared and hasattr(cache, 'with_gaps'):  # behind them rows are padded
        cache = cache.with_gaps(tokens_BP.shape[1])
    if quantization is not None:
        cache = cache.quantized()
    if shared:
        cache = read(extend, cache, first['inputs'], positions_of(first), chunk=chunk).repeat(len(tokens_BP))
    if 'prefix' in batch:  # bidirectional: read all at once, and the last one again
        with masks.ordered('front'):
            read_all: Any = model.apply(variables, tokens_BP, positions_BP, cache, batch['prefix'], method='extend')
        cache = read_all[1].back(1)
    rows_B = batch.get('rows', jnp.arange(len(tokens_BP)))
    return extend, cache, Prompt(tokens_BP, positions_BP, rows_B, 'prefix' in batch, shared=shared, chunk=chunk)


def read_together(cfg: Model) -> str | None:
    """Returns the choice by which what becomes of a token depends on the others that are read with it, or None."""
    choices = {f'model.rope_scaling={cfg.rope_scaling}': ROPE_SCALINGS[cfg.rope_scaling].by_length}
    if cfg.num_experts:
        choices[f'model.expert_dispatch={cfg.expert_dispatch}'] = DISPATCHES[cfg.expert_dispatch].whole_batch
    return next((name for name, holds in choices.items() if holds), None)


def begun(
    model: nn.Module, cfg: config.Decode, variables: Any, batch: Mapping[str, Any], slots: int
) -> tuple[Extend, Any, Prompt]:
    """Returns what `begin` does, for beams with a coverage penalty over a `Covered` cache."""
    extend, cache, prompt = begin(model, variables, batch, slots, cfg.prefill_chunk, cfg.cache_quantization)
    if cfg.strategy != 'beam' or not cfg.coverage_penalty:
        return extend, cache, prompt
    covered = Covered(cache, positions_of(batch, 'encoder_') >= 0)
    return counted(extend, attend_by(model, variables)), covered, prompt


def begun_guided(
    model: nn.Module, cfg: config.Decode, variables: Any, batch: Mapping[str, Any], slots: int
) -> tuple[Extend, Doubled]:
    """Returns the step function of guidance and its cache, of the same prompt."""
    extend, cache, _ = begun(model, cfg, variables, with_and_without(batch), slots)
    return guided(extend, cfg.guidance), Doubled(cache, positions_of(batch)[:, -1])


def _drafting(
    model: nn.Module,
    cfg: config.Decode,
    variables: Any,
    batch: Mapping[str, Any],
    slots: int,
    banned: tuple[int, ...],
    draft: nn.Module | None,
) -> Callable[[int, Warp], Draft]:
    """Returns what drafts tokens for so many texts of each row: the model `draft`, or look-up where it is None."""

    def make(draws: int, warp: Warp) -> Draft:
        if draft is None:
            tokens_BP, real_BP = (jnp.repeat(x, draws, axis=0) for x in _given(model, batch))
            return by_look_up(tokens_BP, real_BP, number=cfg.draft_len)
        step, held, own = begin(draft, variables['draft'], batch, slots, cfg.prefill_chunk, cfg.cache_quantization)
        options: dict[str, Any] = {'number': cfg.draft_len, 'longest': draft.cfg.max_len, 'banned': banned}
        return by_model(step, prefill(step, held, own).repeat(draws), own.repeat(draws), warp, **options)

    return make


def _given(model: nn.Module, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens before a text, which it may repeat, and which of them are real: those of the prompt, behind
    those of the encoder where both have a vocabulary of the same size."""
    given = [(batch['inputs'], positions_of(batch) >= 0)]
    if 'encoder_inputs' in batch and model.cfg.encoder_vocab_size == model.cfg.vocab_size:
        given.insert(0, (batch['encoder_inputs'], batch['encoder_positions'] >= 0))
    tokens, real = zip(*given, strict=True)
    return jnp.concatenate(tokens, 1), jnp.concatenate(real, 1)


def cache_slots(cfg: config.Decode, prompt: int, steps: int | None = None) -> int:
    """Returns the slots of a row of the cache, for a prompt of this many tokens and so many steps (None: all)."""
    steps = cfg.max_len if steps is None else steps
    return _up(prompt + STRATEGIES[cfg.strategy].tokens(cfg) * steps - 1)  # the last new token is not read


def _up(slots: int) -> int:
    return -(-slots // _SLOTS) * _SLOTS


def _growth(cfg: config.Decode, prompt: int) -> Growth:
    """Returns the growth of a cache: in few stages, each of which is compiled, of enough slots to be worth it."""
    new = STRATEGIES[cfg.strategy].tokens(cfg) * cfg.max_len
    stages = min(new // _STAGE, _STAGES) if cfg.guidance == 1 and not cfg.coverage_penalty else 0
    ends = [-(-cfg.max_len * stage // stages) for stage in range(1, stages + 1)]
    return tuple((end, cache_slots(cfg, prompt, end)) for end in ends) if stages > 1 else ()


def texts_of_row(cfg: config.Decode) -> int:
    """Returns how many texts are generated for each row of a batch."""
    return cfg.candidates if cfg.strategy == 'mbr' else cfg.num_outputs


def _greedy(cfg: config.Decode, rng: jax.Array | None, search: Search) -> tuple[jax.Array, jax.Array]:
    if search.draft is None:
        return greedy(*search.plain(), rules=search.rules, growth=search.growth)
    return _drafted(cfg, search, search.draft(1, greedy_warp), search.prompt.keys(jax.random.key(0)), greedy_warp)


def _sampled(cfg: config.Decode, rng: jax.Array | None, search: Search) -> tuple[jax.Array, jax.Array]:
    if rng is None:
        raise ValueError('sampling needs a random key')
    sampling = Sampling(*(getattr(cfg, name) for name in Sampling._fields))
    if (draws := texts_of_row(cfg)) > 1:  # the prompt is read once for all of them
        cache = prefill(search.extend, search.cache, search.prompt).repeat(draws)
        search = search._replace(cache=cache, prompt=search.prompt.repeat(draws))
    if search.draft is None:
        return sample(*search.plain(), rng, sampling, rules=search.rules, growth=search.growth)

    def warp(logits_BV: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(sampling.warp(logits_BV))

    return _drafted(cfg, search, search.draft(draws, warp), search.prompt.keys(rng), warp)


def _drafted(
    cfg: config.Decode, search: Search, draft: Draft, keys_B: jax.Array, warp: Warp
) -> tuple[jax.Array, jax.Array]:
    options: dict[str, Any] = {'number': cfg.draft_len, 'longest': search.longest, 'rules': search.rules}
    return speculate(*search.plain(), draft, keys_B=keys_B, warp=warp, **options)


def _best_of_beam(cfg: config.Decode, rng: jax.Array | None, search: Search) -> tuple[jax.Array, jax.Array]:
    beams = Beams(*(getattr(cfg, name) for name in Beams._fields))
    found, n = beam_search(*search.plain(), beams, rules=search.rules, growth=search.growth), cfg.num_outputs
    return found.tokens_BMT[:, :n].reshape(-1, cfg.max_len), found.scores_BM[:, :n].reshape(-1)


DRAFTS = ('prompt', None)  # values of decode.draft


class Strategy(NamedTuple):
    """A way to choose the next token."""

    # (decode section, random key, Search) -> (tokens_RT, scores_R)
    search: Callable[..., tuple[jax.Array, jax.Array]]
    fields: tuple[str, ...] = ()  # the fields of config.decode that it reads and some others do not
    tokens: Callable[[config.Decode], int] = lambda cfg: 1  # that a step adds to the cache of a row


STRATEGIES: dict[str, Strategy] = {
    'greedy': Strategy(_greedy, ('draft', 'draft_len')),
    'sample': Strategy(_sampled, (*Sampling._fields, 'num_outputs', 'draft', 'draft_len')),
    'mbr': Strategy(_sampled, (*Sampling._fields, 'num_outputs', 'candidates', 'utility', 'draft', 'draft_len')),
    'beam': Strategy(_best_of_beam, (*Beams._fields, 'num_outputs'), lambda cfg: cfg.beam_size),
}
