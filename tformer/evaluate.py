"""How good a model is: scores of its probabilities on a split, and metrics of the text it generates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import sacrebleu
from flax import linen as nn
from jax.sharding import Mesh
from rapidfuzz.distance import Levenshtein

from tformer import metrics, sharding
from tformer.config import Config
from tformer.data.pipeline import Batches
from tformer.data.tokenizers import Tokenizers
from tformer.layers.dropout import Rates
from tformer.objectives import Objective

Scorer = Callable[[Any, Batches, int | None, Tokenizers], dict[str, float]]
GenerationScores = Callable[[Config, Any, Tokenizers, Sequence[Mapping[str, Any]]], dict[str, float]]


def make_scorer(model: nn.Module, objective: Objective, mesh: Mesh) -> Scorer:
    """Returns score(params, batches, limit, tokenizers) -> means over a split, or its first `limit` batches.

    `loss` and `nll` (nats a target), `accuracy`, `perplexity`; `bits_per_byte` for language models; `f1_macro`, the
    mean of the classes' F1, for classification. No dropout, no label smoothing.
    """

    @jax.jit
    def step(params: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, jax.Array | None]:
        logits: Any = model.apply({'params': params}, batch, Rates(), method=objective.method)
        return objective.scores(logits, batch, None), logits.argmax(-1) if 'labels' in batch else None

    def score(params: Any, batches: Batches, limit: int | None, tokenizers: Tokenizers) -> dict[str, float]:
        totals: dict[str, tuple[float, float]] = {}
        labels, predicted, num_bytes = [], [], 0.0
        pending: list[Any] = []
        for number in range(min(limit or batches.steps_per_epoch, batches.steps_per_epoch)):
            batch = batches.batch(number)
            pending.append(step(params, jax.device_put(batch, sharding.batch_sharding(mesh))))
            if 'labels' in batch:
                labels.append(np.where(batch['label_weights'] > 0, batch['labels'], -1))
            else:
                num_bytes += float((tokenizers.target.byte_lengths[batch['targets']] * (batch['weights'] > 0)).sum())
        for scores, classes in jax.device_get(pending):
            totals = metrics.add(totals, scores)
            predicted.append(classes)
        found = metrics.derived(metrics.means(totals))
        if labels:
            found['f1_macro'] = f1_macro(np.concatenate(labels), np.concatenate(predicted))
        elif batches.config.train.objective == 'causal_lm' and num_bytes:
            found['bits_per_byte'] = totals['nll'][0] / np.log(2) / num_bytes
        return found

    return score


def f1_macro(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the mean of the classes' F1 over the classes that occur; labels of -1 do not count."""
    from sklearn.metrics import f1_score

    scored = labels >= 0
    return float(f1_score(labels[scored], predicted[scored], average='macro'))


# ------------------------------------------------------------------------------------------- generated text
# A metric is a function of the predictions and of the acceptable references of each.


def exact_match(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The share of predictions that equal one of their references."""
    return sum(p in r for p, r in zip(predictions, references, strict=True)) / max(len(predictions), 1)


def error_rate(
    predictions: Sequence[str], references: Sequence[Sequence[str]], split: Callable[[str], Sequence[str]]
) -> float:
    """Edits (insert, delete, replace) to the nearest reference, over the symbols of those references.

    The nearest reference has the smallest edit distance for its length, and the longer one wins a tie.
    """
    edits = length = 0
    for prediction, options in zip(predictions, references, strict=True):
        symbols = split(prediction)
        distances = [(Levenshtein.distance(symbols, split(option)), len(split(option))) for option in options]
        nearest = min(distances, key=lambda pair: (pair[0] / max(pair[1], 1), -pair[1]))
        edits, length = edits + nearest[0], length + nearest[1]
    return edits / max(length, 1)


def _corpus(score: Callable[..., Any], predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    first = [options[0] for options in references]
    return float(score(list(predictions), [first]).score)


def _exact(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    return {'exact_match': exact_match(predictions, references)}


def _symbols(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    return {'symbol_error_rate': error_rate(predictions, references, str.split)}


def _characters(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    return {'character_error_rate': error_rate(predictions, references, list)}


def _g2p(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The field's names: a word is wrong unless it equals one of its pronunciations (Bisani & Ney 2008)."""
    return {
        'word_error_rate': 1 - exact_match(predictions, references),
        'phoneme_error_rate': error_rate(predictions, references, str.split),
    }


def _bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    return {'bleu': _corpus(sacrebleu.corpus_bleu, predictions, references)}


def _chrf(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    return {'chrf': _corpus(sacrebleu.corpus_chrf, predictions, references)}


METRICS: dict[str, Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]]] = {
    'exact_match': _exact,
    'symbol_error_rate': _symbols,  # of whitespace-separated symbols: the word error rate of running text
    'character_error_rate': _characters,
    'g2p': _g2p,
    'bleu': _bleu,  # Papineni et al. 2002; Post 2018
    'chrf': _chrf,  # Popovic 2015
}
SIGNED = {'bleu': sacrebleu.BLEU, 'chrf': sacrebleu.CHRF}


def signature(name: str) -> str:
    """Returns sacrebleu's signature of a metric, '' for others: what another score must share to be compared."""
    if name not in SIGNED:
        return ''
    metric = SIGNED[name]()
    metric.corpus_score(['a'], [['a']])
    return str(metric.get_signature())


def generation_scores(
    names: Sequence[str], predictions: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Returns the metrics `names` of generated text; for corpus metrics also what copying the source scores."""
    references = [record.get('references', [record['target']]) for record in records]
    found: dict[str, float] = {}
    for name in names:
        found |= METRICS[name](predictions, references)
    for name in [name for name in names if name in SIGNED]:
        copied = METRICS[name]([record['source'] for record in records], references)
        found |= {f'copying_the_source_{key}': value for key, value in copied.items()}
    return found
