"""What is trained: from logits and a batch to sums and weights, divided once by whoever adds them up."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tformer.layers.dropout import Rate

Pair = tuple[jax.Array, jax.Array]  # (sum, weight)
Scores = dict[str, Pair]


def cross_entropy(logits: jax.Array, targets: jax.Array, label_smoothing: Rate = None) -> jax.Array:
    """Returns -sum_v p_v log softmax(logits)_v for each target, in nats, float32.

    Args:
      logits: `[..., V]`.
      targets: `[...]`, int.
      label_smoothing: p is 1 - epsilon on the target plus epsilon / V on every class (Szegedy et al. 2016, 7);
        None is p = 1 on the target.
    """
    logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if label_smoothing is None:
        return normalizer - picked
    return normalizer - (1 - label_smoothing) * picked - label_smoothing * jnp.mean(logits, axis=-1)


def classification_scores(logits: jax.Array, targets: jax.Array, weights: jax.Array, smoothing: Rate) -> Scores:
    """Returns (sum, weight) of `loss`, which is trained, of `nll` without smoothing, and of `accuracy`."""
    weight = jnp.sum(weights)
    correct = jnp.argmax(logits, axis=-1) == targets
    nll = cross_entropy(logits, targets)
    loss = nll if smoothing is None else cross_entropy(logits, targets, smoothing)
    return {
        'loss': (jnp.sum(loss * weights), weight),
        'nll': (jnp.sum(nll * weights), weight),
        'accuracy': (jnp.sum(correct * weights), weight),
    }


def token_scores(logits_BTV: jax.Array, batch: Mapping[str, jax.Array], smoothing: Rate) -> Scores:
    """Scores of every token whose `weights` is not 0."""
    return classification_scores(logits_BTV, batch['targets'], batch['weights'], smoothing)


def label_scores(logits_BC: jax.Array, batch: Mapping[str, jax.Array], smoothing: Rate) -> Scores:
    """Scores of every sequence whose `label_weights` is not 0."""
    return classification_scores(logits_BC, batch['labels'], batch['label_weights'], smoothing)


class Objective(NamedTuple):
    """A training task on the batch contract.

    Attributes:
      method: of the model, from a batch to the logits.
      scores: from logits, batch and label smoothing to sums and weights.
    """

    method: str
    scores: Callable[[jax.Array, Mapping[str, jax.Array], Rate], Scores]


OBJECTIVES: dict[str, Objective] = {  # what the batch holds is decided by tformer.data.pipeline
    'causal_lm': Objective('__call__', token_scores),  # Radford et al. 2018
    'masked_lm': Objective('__call__', token_scores),  # Devlin et al. 2019, 3.1
    'seq2seq': Objective('__call__', token_scores),  # Vaswani et al. 2017
    'classification': Objective('classify', label_scores),  # Devlin et al. 2019, 4.1
    'prefix_lm': Objective('__call__', token_scores),  # Raffel et al. 2020, 3.2.1
    'span_corruption': Objective('__call__', token_scores),  # Raffel et al. 2020, 3.1.4
    'denoising': Objective('__call__', token_scores),  # Lewis et al. 2020, 2.2
}
