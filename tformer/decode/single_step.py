"""What `make_generate` computes, as programs of their own: prompts that are read, and one step after them."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.config import Decode
from tformer.decode.coverage import attend_by, counted
from tformer.decode.generate import STRATEGIES, begun, begun_guided, cache_slots, texts_of_row
from tformer.decode.growth import for_steps
from tformer.decode.guidance import guided
from tformer.decode.sample import Extend, Sampling, prefill
from tformer.decode.speculative import for_drafts


class Begun(NamedTuple):
    """Texts whose prompts are read.

    Attributes:
      cache: after the prompts without their last tokens, with room for all new ones.
      shape: the rows that a step reads, and of each the tokens.
    """

    cache: Any
    shape: tuple[int, int]


def read_prompts(model: nn.Module, cfg: Decode, variables: Any, batch: Mapping[str, Any]) -> Any:
    """Returns the cache of a batch whose prompts are read, a row for each."""
    slots = cache_slots(cfg, batch['inputs'].shape[1] + (cfg.draft_len + 1 if cfg.draft else 0))
    extend, cache, prompt = begun(model, cfg, variables, batch, slots)
    if cfg.guidance != 1:
        extend, cache = begun_guided(model, cfg, variables, batch, slots)
    return prefill(extend, cache, prompt)


def first_step(model: nn.Module, cfg: Decode, variables: Any, batch: Mapping[str, Any]) -> Begun:
    """Returns what the first step reads: a row for each beam or draw, in the cache or beside each other."""
    cache, rows = read_prompts(model, cfg, variables, batch), len(batch['inputs'])
    beams, draws = STRATEGIES[cfg.strategy].tokens(cfg), texts_of_row(cfg)
    if beams > 1:
        return Begun(cache.branch(beams), (rows, beams))
    cache = for_drafts(cache, cfg.draft_len) if cfg.draft else for_steps(cache)
    return Begun(cache.repeat(draws) if draws > 1 else cache, (rows * draws, cfg.draft_len + 1 if cfg.draft else 1))


def step(
    model: nn.Module, cfg: Decode, variables: Any, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """Returns (what a step finds, the cache): the next token of each row that reads one, else the logits.

    `variables` are those of `for_steps`.
    """
    extend: Extend = functools.partial(model.apply, variables, method='extend')
    if cfg.strategy == 'beam' and cfg.coverage_penalty:
        extend = counted(extend, attend_by(model, variables))
    extend = extend if cfg.guidance == 1 else guided(extend, cfg.guidance)
    logits_BTV, cache = extend(tokens_BT, positions_BT, cache)
    if tokens_BT.shape[1] > 1:
        return logits_BTV, cache
    logits_BV = logits_BTV[:, 0].astype(jnp.float32)
    if cfg.strategy in ('greedy', 'beam'):
        return jnp.argmax(logits_BV, 1), cache
    sampling = Sampling(*(getattr(cfg, name) for name in Sampling._fields))
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), positions_BT[:, 0])
    return jax.vmap(jax.random.categorical)(keys_B, sampling.warp(logits_BV)), cache
