"""Scores of classes, or of tokens, from their logits: cross entropy, accuracy, and the divergence from a teacher."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer.layers.dropout import MaybeScalar
from tformer.layers.heads import TokenStatistics, token_statistics

Scalar = float | jax.Array
Pair = tuple[jax.Array, jax.Array]  # (sum, weight)
Scores = dict[str, Pair]


class Teaching(NamedTuple):
    """What a frozen teacher adds to a loss."""

    outputs: Any  # the teacher's, for the same batch; None: the statistics of the logits have the divergence from them
    weight: Scalar  # of the teacher's targets; the data's have the rest
    temperature: Scalar  # divides the logits of both models
    beta: Scalar = 1.0  # of preferences: what a difference of log-likelihoods is worth


def cross_entropy(logits: jax.Array, targets: jax.Array, label_smoothing: MaybeScalar = None) -> jax.Array:
    """Returns -sum_v p_v log softmax(logits)_v of logits [..., V] for targets [...], int, in nats, float32.

    With label smoothing epsilon, p is 1 - epsilon on the target plus epsilon / V on every class (Szegedy et al. 2016,
    7); None is p = 1 on the target.
    """
    return _cross_entropy(token_statistics(logits, targets), label_smoothing)


def _cross_entropy(found: TokenStatistics, smoothing: MaybeScalar) -> jax.Array:
    if smoothing is None:
        return found.normalizer - found.target
    return found.normalizer - (1 - smoothing) * found.target - smoothing * found.mean


def class_scores(
    logits: jax.Array | TokenStatistics,
    targets: jax.Array,
    weights: jax.Array,
    smoothing: MaybeScalar = None,
    z_loss: MaybeScalar = None,
    teaching: Teaching | None = None,
) -> Scores:
    """Returns (sum, weight) of `loss`, which is trained, of `nll` without smoothing, and of `accuracy`.

    Logits are [..., V], or their summary for these targets; targets [...], int, and weights [...]. `z_loss` times the
    squared log-sum-exp of the logits, which keeps them from drifting, is part of the loss (Chowdhery et al. 2022,
    section 5).

    With `teaching` of weight w and temperature T the loss is 1 - w times that of the targets plus w T^2 times the
    divergence from the teacher at T, whose gradients T^2 keeps as large (Hinton et al. 2015, section 2); `divergence`
    is scored, too.
    """
    taught = () if teaching is None else (teaching.outputs, teaching.temperature)
    found = logits if isinstance(logits, TokenStatistics) else token_statistics(logits, targets, *taught)
    weight, nll = jnp.sum(weights), _cross_entropy(found, None)
    loss = nll if smoothing is None else _cross_entropy(found, smoothing)
    if teaching is not None:
        assert found.divergence is not None
        loss = (1 - teaching.weight) * loss + teaching.weight * jnp.square(teaching.temperature) * found.divergence
    if z_loss is not None:
        loss += z_loss * jnp.square(found.normalizer)
    scores = {
        'loss': (jnp.sum(loss * weights), weight),
        'nll': (jnp.sum(nll * weights), weight),
        'accuracy': (jnp.sum(found.correct * weights), weight),
    }
    if found.divergence is not None:
        scores['divergence'] = (jnp.sum(found.divergence * weights), weight)
    return scores
