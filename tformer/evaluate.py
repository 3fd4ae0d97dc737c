"""How good a model is: scores of its probabilities on a split, and metrics of the text it generates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    """Returns score(variables, batches, limit, tokenizers) -> means over a split, or its first `limit` batches.

    `loss` and `nll` (nats a target), `accuracy`, `perplexity`; `bits_per_byte` for language models with a lossless
    tokenizer; `f1_macro`, the mean of the classes' F1, for classification. No dropout, no label smoothing.
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
        for scores, classes in jax.device_get(pending):
            totals = metrics.add(totals, scores)
            predicted.append(classes)
        found = metrics.derived(metrics.means(totals))
        if labels:
            found['f1_macro'] = f1_macro(np.concatenate(labels), np.concatenate(predicted))
        elif batches.config.train.objective == 'causal_lm' and tokenizers.target.lossless:
            found['bits_per_byte'] = totals['nll'][0] / np.log(2) / num_bytes
        return found

    return score


def f1_macro(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the mean of the classes' F1 over the classes that occur; labels of -1 do not count."""
    from sklearn.metrics import f1_score

    scored = labels >= 0
    return float(f1_score(labels[scored], predicted[scored], average='macro'))


# ------------------------------------------------------------------------------------------- generated text


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


def _corpus(
    metric: sacrebleu.metrics.base.Metric, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
    most = max(map(len, references))
    columns: Any = [[options[i] if i < len(options) else None for options in references] for i in range(most)]
    return float(metric.corpus_score(list(predictions), columns).score)


def _g2p(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, ...]:
    return 1 - exact_match(predictions, references), error_rate(predictions, references, str.split)


class Metric(NamedTuple):
    """What generated text is scored by: the names of the scores, and (predictions, references of each) -> scores."""

    names: tuple[str, ...]
    scores: Callable[[Sequence[str], Sequence[Sequence[str]]], tuple[float, ...]]


METRICS: dict[str, Metric] = {
    'exact_match': Metric(('exact_match',), lambda p, r: (exact_match(p, r),)),
    # of whitespace-separated symbols: the word error rate of running text
    'symbol_error_rate': Metric(('symbol_error_rate',), lambda p, r: (error_rate(p, r, str.split),)),
    'character_error_rate': Metric(('character_error_rate',), lambda p, r: (error_rate(p, r, list),)),
    # the field's names: a word is wrong unless it equals one of its pronunciations (Bisani & Ney 2008)
    'g2p': Metric(('word_error_rate', 'phoneme_error_rate'), _g2p),
    'bleu': Metric(('bleu',), lambda p, r: (_corpus(sacrebleu.BLEU(), p, r),)),  # Papineni et al. 2002; Post 2018
    'chrf': Metric(('chrf',), lambda p, r: (_corpus(sacrebleu.CHRF(), p, r),)),  # Popovic 2015
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
        found |= dict(zip(METRICS[name].names, METRICS[name].scores(predictions, references), strict=True))
    for name in [name for name in names if name in SIGNED]:
        (copied,) = METRICS[name].scores([record['source'] for record in records], references)
        found[f'copying_the_source_{name}'] = copied
    return found


def score_names(config: Config) -> tuple[str, ...]:
    """Returns the names of all scores that evaluations while training have: what train.best_metric may be."""
    names = ['loss', 'nll', 'accuracy', 'perplexity']
    names += {'causal_lm': ['bits_per_byte'], 'classification': ['f1_macro']}.get(config.train.objective, [])
    if config.evaluate.examples_while_training:
        names += [name for key in config.evaluate.metrics for name in METRICS[key].names]
    return tuple(f'valid/{name}' for name in names)
