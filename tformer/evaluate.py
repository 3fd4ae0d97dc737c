"""How good a model is on a split: scores of its probabilities, and which scores there are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from tformer import metrics, scores, sharding
from tformer.config import Config
from tformer.data.pipeline import Batches
from tformer.data.tokenizers import Tokenizers
from tformer.layers.dropout import Rates
from tformer.objectives import Objective

Scorer = Callable[[Any, Batches, int | None, Tokenizers], dict[str, float]]
GenerationScores = Callable[[Config, Any, Tokenizers, Sequence[Mapping[str, Any]]], dict[str, float]]


def make_scorer(model: nn.Module, objective: Objective, mesh: Mesh) -> Scorer:
    """Returns score(variables, batches, limit, tokenizers) -> means over a split, or its first `limit` batches.

    `loss` and `nll` (nats a target), `accuracy`, `perplexity`; `bits_per_byte` for language models with a lossless
    tokenizer; `scores.class_scores` for classification. No dropout, no label smoothing.
    """

    @jax.jit
    def step(variables: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, jax.Array | None]:
        logits: Any = model.apply(variables, batch, Rates(), method=objective.method)
        return objective.scores(logits, batch, None), logits.argmax(-1) if 'labels' in batch else None

    def score(variables: Any, batches: Batches, limit: int | None, tokenizers: Tokenizers) -> dict[str, float]:
        totals: dict[str, tuple[float, float]] = {}
        labels, predicted, num_bytes = [], [], 0.0
        pending: list[Any] = []
        count = int(batches.steps_per_epoch)
        for number in range(min(limit or count, count)):
            batch = batches.batch(number)
            pending.append(step(variables, jax.device_put(batch, sharding.batch_sharding(mesh))))
            if 'labels' in batch:
                labels.append(np.where(batch['label_weights'] > 0, batch['labels'], -1))
            else:
                num_bytes += float((tokenizers.target.byte_lengths[batch['targets']] * (batch['weights'] > 0)).sum())
        for sums, classes in jax.device_get(pending):
            totals = metrics.add(totals, sums)
            predicted.append(classes)
        found = metrics.derived(metrics.means(totals))
        if labels:
            positive = batches.config.evaluate.positive_label
            arrays = np.concatenate(labels), np.concatenate(predicted)
            found |= scores.class_scores(*arrays, tokenizers.labels, positive)
        elif batches.config.train.objective == 'causal_lm' and tokenizers.target.lossless:
            found['bits_per_byte'] = totals['nll'][0] / np.log(2) / num_bytes
        return found

    return score


def score_names(config: Config) -> tuple[str, ...]:
    """Returns the names of all scores that evaluations while training have: what train.best_metric may be."""
    names = ['loss', 'nll', 'accuracy', 'perplexity']
    if config.train.objective == 'causal_lm':
        names += ['bits_per_byte']
    if config.train.objective == 'classification':
        names += ['f1_macro', 'f1_micro', 'matthews', *(['f1'] if config.evaluate.positive_label is not None else [])]
    if config.evaluate.examples_while_training:
        names += [name for key in config.evaluate.metrics for name in scores.METRICS[key].names_for(config.evaluate)]
    return tuple(f'valid/{name}' for name in names)
