"""Scores of predictions, as the literature reports them: of classes, numbers, entities and answers.

Plain values in, plain numbers out: shares in [0, 1], correlations in [-1, 1], errors. A score without a value (0 / 0,
or of no examples) is 0.
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tformer.errors import choose

Texts = Sequence[str]
Options = Sequence[Sequence[str]]  # all that is right, of each example


def mean_of(values: Sequence[float] | np.ndarray) -> float:
    """Returns the mean, 0 of nothing."""
    return float(np.mean(values)) if len(values) else 0.0


# ----------------------------------------------------------------------------------------- classes and numbers


def class_scores(
    labels: np.ndarray, predicted: np.ndarray, names: Sequence[str] = (), positive: str | None = None
) -> dict[str, float]:
    """Returns `f1_macro`, `f1_micro`, `matthews` (Gorodkin 2004), and `f1` of the class `positive` where it is given.

    `f1_macro` is the mean over the classes that occur in either; `matthews` is 0 where either is constant. Labels and
    predictions are int [N]; where a label is -1 nothing counts. `names` are those of the classes, by their number.

    Raises:
      UserError: no class is called `positive`.
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    labels, predicted = labels[labels >= 0], predicted[labels >= 0]
    found = {
        'f1_macro': agreement(f1_score, labels, predicted, average='macro', zero_division=0),
        'f1_micro': agreement(f1_score, labels, predicted, average='micro', zero_division=0),
        'matthews': agreement(matthews_corrcoef, labels, predicted),
    }
    if positive is not None:
        number = choose({name: i for i, name in enumerate(names)}, positive, 'evaluate.positive_label')
        found['f1'] = agreement(f1_score, labels == number, predicted == number, zero_division=0)
    return found


def agreement(score: Callable[..., Any], right: np.ndarray, said: np.ndarray, **options: Any) -> float:
    """Returns a score of scikit-learn, 0 of nothing, without its warnings that few classes or examples occur."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return float(score(right, said, **options)) if right.size else 0.0


def regression_scores(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Returns `pearson`, `spearman` and `mean_squared_error` of [N] numbers; correlations with a constant are 0."""
    from scipy import stats

    labels, predicted = np.asarray(labels, np.float64), np.asarray(predicted, np.float64)
    found = {'pearson': 0.0, 'spearman': 0.0}
    with warnings.catch_warnings():  # of constants, for which SciPy's value is nan
        warnings.simplefilter('ignore')
        if len(labels) > 1:
            found['pearson'] = float(np.nan_to_num(stats.pearsonr(labels, predicted).statistic))
            found['spearman'] = float(np.nan_to_num(stats.spearmanr(labels, predicted).statistic))
        return found | {'mean_squared_error': mean_of(np.square(labels - predicted))}


# --------------------------------------------------------------------------------------------------- retrieval

_QUERIES_AT_ONCE = 1024


def ranks(queries_ND: np.ndarray, texts_MD: np.ndarray, right_N: np.ndarray, itself_N: np.ndarray) -> np.ndarray:
    """Returns the rank, from 1, of each query's right text among M texts by the product of their vectors, int [N].

    A text as near as the right one comes before it. `right_N` and `itself_N` are numbers of texts, int; the latter is
    the query's own text, which has no rank (-1: it is not among them).
    """
    found = [np.zeros(0, np.int64)]
    for start in range(0, len(queries_ND), _QUERIES_AT_ONCE):
        some = slice(start, start + _QUERIES_AT_ONCE)
        scores_NM, row_N = queries_ND[some] @ texts_MD.T, np.arange(len(right_N[some]))
        before_NM = scores_NM >= scores_NM[row_N, right_N[some]][:, None]
        before_NM &= np.arange(len(texts_MD)) != itself_N[some, None]
        before_NM[row_N, right_N[some]] = False
        found.append(1 + before_NM.sum(axis=1))
    return np.concatenate(found)


def retrieval_scores(ranks_N: np.ndarray) -> dict[str, float]:
    """Returns `recall_at_1`, `_5` and `_10`, `mean_reciprocal_rank` and `ndcg_at_10` (Järvelin & Kekäläinen 2002) of
    queries with one right text each, from its rank."""
    gains_N = np.where(ranks_N <= 10, 1 / np.log2(1 + ranks_N), 0.0)
    recalls = {f'recall_at_{k}': mean_of(ranks_N <= k) for k in (1, 5, 10)}
    return {**recalls, 'mean_reciprocal_rank': mean_of(1 / ranks_N), 'ndcg_at_10': mean_of(gains_N)}


# ---------------------------------------------------------------------------------------------------- entities


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Returns (type, first, last) of each entity, as the CoNLL 2003 evaluation finds it.

    It begins at B-type, or at I-type after anything but the same type, and goes on while I-type follows. The E and S of
    IOBES are read too: end, and single. A tag of no such form is O.
    """
    found = set()
    mark, kind, first = 'O', '', 0
    for place, tag in enumerate([*tags, 'O']):
        before, kind_before = mark, kind
        mark, _, kind = tag.partition('-')
        if mark in ('I', 'E') and before in ('B', 'I') and kind == kind_before:
            continue
        if before in ('B', 'I', 'E', 'S'):
            found.add((kind_before, first, place - 1))
        first = place
    return found


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns `entity_precision`, `entity_recall`, `entity_f1` of BIO tags over all sequences.

    An entity is right where its type and both ends are (Tjong Kim Sang & De Meulder 2003, 2.3).
    """
    pairs = [(entities(right), entities(said)) for right, said in zip(gold, predicted, strict=True)]
    common = sum(len(right & said) for right, said in pairs)
    num_gold, num_predicted = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    return {
        'entity_precision': common / max(num_predicted, 1),
        'entity_recall': common / max(num_gold, 1),
        'entity_f1': 2 * common / max(num_gold + num_predicted, 1),
    }


def tag_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """Returns `tag_accuracy` of the words of all sequences, and `tag_f1_macro`, the mean over the tags that occur.

    A predicted None is that there is no tag.
    """
    from sklearn.metrics import f1_score

    right, said = (np.array([tag or '' for tags in every for tag in tags]) for every in (gold, predicted))
    occurring = sorted({*right, *said} - {''})
    f1 = agreement(f1_score, right, said, labels=occurring, average='macro', zero_division=0)
    return {'tag_accuracy': mean_of(right == said), 'tag_f1_macro': f1}


# ----------------------------------------------------------------------------------------------------- answers


def answer_words(text: str) -> list[str]:
    """Returns an answer's words: lower case, no ASCII punctuation, no articles (Rajpurkar et al. 2016, 6.1)."""
    bare = text.lower().translate(str.maketrans('', '', string.punctuation))
    return re.sub(r'\b(?:a|an|the)\b', ' ', bare).split()


def _word_f1(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    return 2 * sum((Counter(said) & Counter(right)).values()) / (len(said) + len(right))


def squad_scores(predictions: Texts, answers: Options) -> dict[str, float]:
    """Returns `squad_exact_match` and `squad_f1`, each of the best of its answers (Rajpurkar et al. 2016, 6.1).

    No answer, or none but empty ones, says that there is none, and so does an empty prediction (2018, SQuAD 2.0). Where
    that occurs, also `no_answer_accuracy` of those and `has_answer_f1` of the others.
    """
    exact, f1, answered = [], [], []
    for prediction, options in zip(predictions, answers, strict=True):
        said, rights = answer_words(prediction), [words for option in options if (words := answer_words(option))]
        answered.append(bool(rights))
        exact.append(max(float(said == right) for right in rights or [[]]))
        f1.append(max(_word_f1(said, right) for right in rights or [[]]))
    found = {'squad_exact_match': mean_of(exact), 'squad_f1': mean_of(f1)}
    if not all(answered):
        found['no_answer_accuracy'] = mean_of([score for score, has in zip(exact, answered, strict=True) if not has])
        found['has_answer_f1'] = mean_of([score for score, has in zip(f1, answered, strict=True) if has])
    return found
