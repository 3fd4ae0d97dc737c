"""Losses of preferences: a model learns from pairs of answers to a prompt, the chosen and the rejected one."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tformer.layers.class_scores import Scalar, Scores, Teaching
from tformer.layers.dropout import MaybeScalar
from tformer.layers.heads import TokenStatistics, token_statistics
from tformer.layers.tower import Batch, tokens_of_texts

NAMES = ('loss', 'reward_accuracy', 'reward_margin', 'chosen_log_likelihood', 'rejected_log_likelihood')


def preference_scores(
    loss_of: Callable[[jax.Array, Scalar, MaybeScalar], jax.Array],
    logits_BTV: jax.Array | TokenStatistics,
    batch: Batch,
    smoothing: MaybeScalar,
    z_loss: MaybeScalar,
    teaching: Teaching,
) -> Scores:
    """Scores of every row whose `label_weights` is not 0: its first text is the chosen answer, its second the rejected
    one, each after the prompt, and `weights` mark the answers' tokens.

    An answer's reward is beta times its log-likelihood less that of the teacher (Rafailov et al. 2023, section 4);
    equal rewards are right by half. `loss_of` takes (the difference of the rewards over beta, beta, label smoothing).
    """
    weights, own_BK = batch['label_weights'], answer_log_likelihoods(logits_BTV, batch)
    gain_BK = own_BK - answer_log_likelihoods(teaching.outputs, batch)
    gap_B = gain_BK[:, 0] - gain_BK[:, 1]
    found = (
        loss_of(gap_B, teaching.beta, smoothing),
        (1 + jnp.sign(gap_B)) / 2,
        teaching.beta * gap_B,
        own_BK[:, 0],
        own_BK[:, 1],
    )
    return {name: (jnp.sum(x_B * weights), jnp.sum(weights)) for name, x_B in zip(NAMES, found, strict=True)}


def answer_log_likelihoods(logits_BTV: jax.Array | TokenStatistics, batch: Batch) -> jax.Array:
    """Returns the log-likelihood of each answer of a row, float32 [B, 2]."""
    found = logits_BTV
    if not isinstance(found, TokenStatistics):
        found = token_statistics(found, batch['targets'])
    scored_BT = found.log_likelihood * batch['weights']
    return jnp.sum(jnp.where(tokens_of_texts(batch), scored_BT[:, None], 0), axis=-1)


def dpo_loss(gap_B: jax.Array, beta: Scalar, smoothing: MaybeScalar) -> jax.Array:
    """Rafailov et al. 2023, eq. 7; with `smoothing`, that share of the pairs is taken to be the wrong way round."""
    right_B, wrong_B = jax.nn.softplus(-beta * gap_B), jax.nn.softplus(beta * gap_B)
    return right_B if smoothing is None else (1 - smoothing) * right_B + smoothing * wrong_B


def ipo_loss(gap_B: jax.Array, beta: Scalar, smoothing: MaybeScalar) -> jax.Array:
    """Azar et al. 2024, eq. 17, whose tau is beta."""
    return jnp.square(gap_B - 1 / (2 * beta))


dpo_scores = functools.partial(preference_scores, dpo_loss)
ipo_scores = functools.partial(preference_scores, ipo_loss)
