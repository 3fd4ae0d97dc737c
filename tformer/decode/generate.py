"""Generates tokens with a model, by the strategy that the configuration names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer import config
from tformer.decode.beam import Beams, beam_search
from tformer.decode.constraints import Constraint
from tformer.decode.penalties import Penalties
from tformer.decode.rules import Rules
from tformer.decode.sample import Ending, Extend, Prompt, Sampling, greedy, prefill, sample
from tformer.errors import UserError, choose
from tformer.layers import masks
from tformer.model import positions_of

Generate = Callable[[Any, Mapping[str, Any], jax.Array | None], tuple[jax.Array, jax.Array]]
Search = tuple[Extend, Any, Prompt, Ending]  # the step function, the cache, ...

_SLOTS = 8  # the cache's slots are a multiple of this


def make_generate(
    model: nn.Module,
    cfg: config.Decode,
    *,
    eos: int,
    banned: Sequence[int] = (),
    others: Sequence[int] = (),
    constraint: Constraint | None = None,
) -> Generate:
    """Returns generate(variables, batch, rng) -> (tokens_RT, scores_R), jitted; T is `cfg.max_len`.

    R is B times `texts_of_row(cfg)`: the texts of a row follow each other, best first in beam search. A text ends with
    `eos` or one of the `others`; `banned` tokens, and those that a `constraint` does not allow, are never generated.

    `batch` is a model's batch: `inputs` and `positions` [B, P] are the prompt, padded in front (with an encoder,
    data.start); encoder fields and `prefix` are as in training; `rows` [B], optional, are the examples' numbers, by
    which sampling draws (default: 0 to B - 1). `rng` is the random key for sampling, else None. tokens_RT holds PAD
    after the end. scores_R is the model's log-probability of the new tokens, for beam search divided by the length
    penalty; a forced end has the probability 1, and a text that a beam did not find the score -inf.

    Raises:
      UserError: an unknown strategy; on a call, a prompt that with the new tokens is longer than the model's max_len.
    """
    strategy = choose(STRATEGIES, cfg.strategy, 'decode.strategy')
    longest: int = model.cfg.max_len

    @jax.jit
    def generate(variables: Any, batch: Mapping[str, Any], rng: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        B, P = batch['inputs'].shape
        read = P + cfg.max_len - 1
        if read > longest:
            raise UserError(
                f'a prompt of {P} and decode.max_len={cfg.max_len} new tokens need {read} positions, but '
                f'model.max_len={longest}'
            )

        def extend(tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            return model.apply(variables, tokens_BT, positions_BT, cache, method='extend')

        tokens_BP, positions_BP = batch['inputs'], positions_of(batch)
        with masks.ordered('front'):
            cache = model.apply(variables, batch, cache_slots(cfg, P), method='start')
        if 'prefix' in batch:  # bidirectional: read all at once, and the last one again
            with masks.ordered('front'):
                read_all: Any = model.apply(variables, tokens_BP, positions_BP, cache, batch['prefix'], method='extend')
            cache = read_all[1].back(1)
        prompt = Prompt(tokens_BP, positions_BP, batch.get('rows', jnp.arange(B)), prefilled='prefix' in batch)
        ending = Ending(cfg.max_len, eos, tuple(banned), cfg.forced_end, tuple(others))
        penalties = Penalties(
            cfg.repetition_penalty,
            cfg.presence_penalty,
            cfg.frequency_penalty,
            cfg.no_repeat_ngram,
            cfg.min_len,
            (eos, *others),
        )
        return strategy.search(cfg, rng, (extend, cache, prompt, ending), Rules(penalties, constraint))

    return generate


def cache_slots(cfg: config.Decode, prompt: int) -> int:
    """Returns the slots of a row of the cache, for a prompt of this many tokens and what `cfg` has generated."""
    used = prompt + STRATEGIES[cfg.strategy].tokens(cfg) * cfg.max_len - 1  # the last new token is not read
    return -(-used // _SLOTS) * _SLOTS


def texts_of_row(cfg: config.Decode) -> int:
    """Returns how many texts are generated for each row of a batch."""
    return cfg.candidates if cfg.strategy == 'mbr' else cfg.num_outputs


def _greedy(cfg: config.Decode, rng: jax.Array | None, search: Search, rules: Rules) -> tuple[jax.Array, jax.Array]:
    return greedy(*search, rules=rules)


def _sampled(cfg: config.Decode, rng: jax.Array | None, search: Search, rules: Rules) -> tuple[jax.Array, jax.Array]:
    if rng is None:
        raise ValueError('sampling needs a random key')
    sampling = Sampling(*(getattr(cfg, name) for name in Sampling._fields))
    extend, cache, prompt, ending = search
    if (draws := texts_of_row(cfg)) > 1:  # the prompt is read once for all of them
        cache, prompt = prefill(extend, cache, prompt).repeat(draws), prompt.repeat(draws)
    return sample(extend, cache, prompt, ending, rng, sampling, rules=rules)


def _best_of_beam(
    cfg: config.Decode, rng: jax.Array | None, search: Search, rules: Rules
) -> tuple[jax.Array, jax.Array]:
    beams = Beams(*(getattr(cfg, name) for name in Beams._fields))
    found, n = beam_search(*search, beams, rules=rules), cfg.num_outputs
    return found.tokens_BMT[:, :n].reshape(-1, cfg.max_len), found.scores_BM[:, :n].reshape(-1)


class Strategy(NamedTuple):
    """A way to choose the next token."""

    # (decode section, random key, Search, Rules) -> (tokens_RT, scores_R)
    search: Callable[..., tuple[jax.Array, jax.Array]]
    fields: tuple[str, ...] = ()  # the fields of config.decode that it reads and some others do not
    tokens: Callable[[config.Decode], int] = lambda cfg: 1  # that a step adds to the cache of a row


STRATEGIES: dict[str, Strategy] = {
    'greedy': Strategy(_greedy),
    'sample': Strategy(_sampled, (*Sampling._fields, 'num_outputs')),
    'mbr': Strategy(_sampled, (*Sampling._fields, 'num_outputs', 'candidates', 'utility')),
    'beam': Strategy(_best_of_beam, (*Beams._fields, 'num_outputs'), lambda cfg: cfg.beam_size),
}
