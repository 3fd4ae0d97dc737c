"""The coverage penalty of beams: a text that leaves tokens of its source unread scores less.

(Wu et al. 2016, section 7.) Shapes: B rows, M hypotheses of a row, S source tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer.decode.growth import slots_of
from tformer.decode.sample import Extend

# (tokens_BM, positions_BM, cache) -> (logits_BMV, the cache with them, the weights_BMS that they give the source)
Attend = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any, jax.Array]]


class Covered(flax.struct.PyTreeNode):
    """A cache of beams, and how much attention each hypothesis has given to each token of its source."""

    cache: Any
    real_BS: jax.Array  # False at padding
    seen_BMS: jax.Array | None = None  # sums over the steps so far; None: no hypotheses yet, only a prompt is read

    @property
    def slots(self) -> int | None:
        return slots_of(self.cache)

    def branch(self, hypotheses: int) -> 'Covered':
        B, S = self.real_BS.shape
        return self.replace(cache=self.cache.branch(hypotheses), seen_BMS=jnp.zeros((B, hypotheses, S)))

    def take(self, parents_BM: jax.Array) -> 'Covered':
        assert self.seen_BMS is not None
        seen_BMS = jnp.take_along_axis(self.seen_BMS, parents_BM[:, :, None], axis=1)
        return self.replace(cache=self.cache.take(parents_BM), seen_BMS=seen_BMS)

    def coverage(self) -> jax.Array:
        """Returns sum_i log(min(sum_j p_ij, 1)) of each hypothesis [B, M], p_ij the attention to source token i at step
        j (eq. 14): 0 where all are read, and less where some are not. A sum of 0 counts as the least positive one."""
        assert self.seen_BMS is not None
        logs_BMS = jnp.log(jnp.clip(self.seen_BMS, jnp.finfo(jnp.float32).tiny, 1.0))
        return jnp.sum(jnp.where(self.real_BS[:, None], logs_BMS, 0.0), 2)


def counted(extend: Extend, attend: Attend) -> Extend:
    """Returns a step function over a `Covered` cache, which reads a prompt by `extend` and hypotheses by `attend`."""

    def step(tokens_BM: jax.Array, positions_BM: jax.Array, cache: Covered) -> tuple[jax.Array, Covered]:
        if cache.seen_BMS is None:
            logits_BMV, held = extend(tokens_BM, positions_BM, cache.cache)
            return logits_BMV, cache.replace(cache=held)
        logits_BMV, held, weights_BMS = attend(tokens_BM, positions_BM, cache.cache)
        return logits_BMV, cache.replace(cache=held, seen_BMS=cache.seen_BMS + weights_BMS)

    return step


def attend_by(model: nn.Module, variables: Any) -> Attend:
    """Returns the step function of an encoder-decoder whose weights are the mean over the heads of the cross-attention
    of the last layer: the paper's model has one attention, whose values reach the output as those of this layer do."""

    def attend(tokens_BM: jax.Array, positions_BM: jax.Array, cache: Any) -> tuple[jax.Array, Any, jax.Array]:
        options: Any = {'method': 'extend', 'mutable': ['alignments']}
        (logits_BMV, cache), sown = model.apply(variables, tokens_BM, positions_BM, cache, **options)
        (weights,) = jax.tree.leaves(sown)
        return logits_BMV, cache, weights.reshape(*tokens_BM.shape, -1)

    return attend
