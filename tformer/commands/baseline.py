"""The baseline beside a run: TF-IDF with a linear model, or each word's most frequent tag, fitted on the same records.

A fine-tuned model that loses to it has learnt too little, or words alone decide the task (Wang & Manning 2012).
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer.commands import predict
from tformer.commands.run import Run
from tformer.config.tasks import TASKS
from tformer.data.batches import mixture
from tformer.data.sources.fields import are_plain
from tformer.data.sources.records import Record
from tformer.errors import UserError
from tformer.evaluation import scores
from tformer.lab.statistics import resampling

MOST_RECORDS = 50_000  # fitted, spread evenly over the training split
MOST_FEATURES = 100_000  # n-grams of words, and as many of characters: the most frequent ones
MOST_WEIGHTS = 20_000_000  # n-grams of words times classes, likewise
LONG = 500  # characters; where texts are longer in the mean, their words alone are counted
TUNED = 2_000  # records of the cross-validation
FOLDS = 3

Predict = Callable[[Sequence[Record]], list[Any]]  # records -> a prediction for each


class Compared(NamedTuple):
    """A run beside its baseline."""

    scores: dict[str, float]  # of the baseline, and how much better the run is, to write beside the run's
    lines: list[str]  # to print


def compare(run: Run, records: Sequence[Record]) -> Compared:
    """Returns the baseline's scores on `records`, and the run's lead with its 95 % interval.

    The interval is that of a paired bootstrap over the records (Koehn 2004, section 4). The baseline is fitted on the
    run's training split, of which at most `MOST_RECORDS` records are used.

    Raises:
      UserError: the objective has no baseline, or the training split is missing or has fewer records than `FOLDS`.
    """
    baseline = of_objective(run.config.train.objective)
    if baseline is BASELINES['tags'] and are_plain(run.tokenizers.labels):
        baseline = PLAIN_TAGS
    train: Sequence[Record] = mixture.load(run.config, 'train')
    if len(train) < FOLDS:
        raise UserError(f'--baseline: the training split has {len(train)} records, fewer than {FOLDS}')
    count = min(len(train), MOST_RECORDS)
    fitted, what = baseline.fit([train[i * len(train) // count] for i in range(count)])
    right, other = [baseline.right(record) for record in records], fitted(records)
    own = [baseline.read(said) for said in predict.of_records(run, records)]
    found = resampling.compare_corpora(baseline.terms(right, own), baseline.terms(right, other), baseline.metric)
    low, high = found.interval
    verdict = 'the run is better' if low > 0 else 'the baseline is better' if high < 0 else 'neither is better'
    lead, interval = (
        f'{baseline.decides}_over_baseline',
        f'{found.difference:+.4f} (95 % interval {low:+.4f} to {high:+.4f})',
    )
    named = {baseline.decides: found.baseline, **baseline.scores(run, right, other)}
    return Compared(
        {f'baseline_{name}': value for name, value in named.items()}
        | {lead: found.difference, f'{lead}_low': low, f'{lead}_high': high},
        [
            f'baseline: {what}, fitted on {count:,} of {len(train):,} training records',
            f'{baseline.decides}: run {found.arm:.4f}, baseline {found.baseline:.4f}, difference {interval}: {verdict}',
        ],
    )


def of_objective(objective: str) -> 'Baseline':
    """Returns the baseline of an objective. Raises a `UserError` that names those with one if it has none."""
    head = TASKS[objective].head
    if head not in BASELINES:
        valid = ', '.join(name for name, task in TASKS.items() if task.head in BASELINES)
        raise UserError(f'--baseline: train.objective={objective} has none; valid: {valid}')
    return BASELINES[head]


class Baseline(NamedTuple):
    """The baseline of a head, and how its predictions are compared with the run's."""

    fit: Callable[[Sequence[Record]], tuple[Predict, str]]  # training records -> its predictions, and what it is
    right: Callable[[Record], Any]  # what is right for a record
    read: Callable[[dict[str, Any]], Any]  # the same of a prediction of `predict`
    scores: Callable[[Run, list[Any], list[Any]], dict[str, float]]  # (run, right, predicted) -> those of evaluation
    decides: str  # the score that is compared
    terms: Callable[[list[Any], list[Any]], np.ndarray]  # (right, predicted) -> those of its K sums, [N, K]
    metric: Callable[[np.ndarray], np.ndarray]  # sums [..., K] -> values [...]


# ------------------------------------------------------------------------------------------- classes and numbers


class Features:
    """TF-IDF (Salton & Buckley 1988) of words and pairs of words and, in short texts, of 2 and 3 characters of a word.

    Of two texts u and v the features are u, v, |u - v| and their cosine.
    """

    def __init__(self, records: Sequence[Record], most: int) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_union

        texts = [record[field] for record in records for field in ('text', 'pair') if field in record]
        common = {'sublinear_tf': True, 'max_features': most}
        kinds = {'words': TfidfVectorizer(ngram_range=(1, 2), token_pattern=r'\w+|[^\w\s]', **common)}
        if np.mean([len(text) for text in texts]) <= LONG:
            kinds['characters'] = TfidfVectorizer(analyzer='char_wb', ngram_range=(2, 3), **common)
        self.names = ' and '.join(kinds)
        self.union = make_union(*kinds.values()).fit(texts)

    def __call__(self, records: Sequence[Record]) -> Any:
        """Returns the features of records, a sparse matrix [N, F]."""
        from scipy import sparse

        first = self.union.transform([record['text'] for record in records])
        if not any('pair' in record for record in records):
            return first
        second = self.union.transform([record.get('pair', '') for record in records])
        cosine = sparse.csr_matrix(first.multiply(second).sum(1))
        return sparse.hstack([first, second, abs(first - second), cosine], format='csr')


def _fit_linear(records: Sequence[Record], model: Any, name: str, grid: Sequence[float]) -> tuple[Any, str]:
    """Returns (records -> predictions of a linear model of scikit-learn, its features and setting).

    The setting `name` is the value of `grid` that cross-validation over at most `TUNED` of the records finds best.
    """
    from sklearn.model_selection import GridSearchCV, KFold

    labels = np.array([record['label'] for record in records])
    features = Features(records, min(MOST_FEATURES, MOST_WEIGHTS // len(set(labels))))
    x_NF = features(records)
    some = np.random.default_rng(0).permutation(len(records))[:TUNED]
    with warnings.catch_warnings():  # of classes that a fold lacks
        warnings.simplefilter('ignore')
        search = GridSearchCV(model, {name: grid}, cv=KFold(FOLDS), refit=False).fit(x_NF[some], labels[some])
        model.set_params(**search.best_params_).fit(x_NF, labels)
    value = search.best_params_[name]
    said = f'TF-IDF of {features.names}, {name.rpartition("__")[2]}={value:g} by {FOLDS}-fold cross-validation'
    return lambda records: model.predict(features(records)).tolist(), said


def _fit_classes(records: Sequence[Record]) -> tuple[Predict, str]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    one = LogisticRegression(solver='liblinear', dual=True, tol=0.1, random_state=0)
    said, what = _fit_linear(records, OneVsRestClassifier(one), 'estimator__C', (1.0, 10.0, 100.0))
    return said, f'logistic regression on {what}'


def _fit_numbers(records: Sequence[Record]) -> tuple[Predict, str]:
    from sklearn.linear_model import Ridge

    said, what = _fit_linear(records, Ridge(), 'alpha', (0.1, 1.0, 10.0))
    return said, f'ridge regression on {what}'


def _class_scores(run: Run, right: list[str], said: list[str]) -> dict[str, float]:
    number = {name: i for i, name in enumerate(run.tokenizers.labels)}
    labels, predicted = (np.array([number[name] for name in names]) for names in (right, said))
    return scores.class_scores(labels, predicted, run.tokenizers.labels, run.config.evaluate.positive_label)


def _moments(right: list[float], said: list[float]) -> np.ndarray:
    """The terms of Pearson's correlation, of numbers less their first, which is 0 for a constant."""
    x, y = (np.array(values, np.float64) - values[0] for values in (right, said))
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=-1)


def _pearson(sums: np.ndarray) -> np.ndarray:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    spread = np.sqrt(np.maximum((n * xx - x * x) * (n * yy - y * y), 0))
    return np.where(spread > 0, (n * xy - x * y) / np.where(spread > 0, spread, 1), 0.0)


# ---------------------------------------------------------------------------------------------------------- tags


def _fit_tags(records: Sequence[Record]) -> tuple[Predict, str]:
    """Each word has its most frequent tag, and an unknown word that of all words; of two, the first that was seen."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for word, tag in zip(record['tokens'], record['tags'], strict=True):
            counts[word][tag] += 1
    (unknown, _), *_ = sum(counts.values(), Counter()).most_common(1)
    tags = {word: counter.most_common(1)[0][0] for word, counter in counts.items()}
    said = "each word's most frequent tag"
    return lambda records: [[tags.get(word, unknown) for word in record['tokens']] for record in records], said


def _common_entities(right: list[list[str]], said: list[list[str]]) -> np.ndarray:
    pairs = [(scores.entities(a), scores.entities(b)) for a, b in zip(right, said, strict=True)]
    return np.array([(len(a & b), len(a) + len(b)) for a, b in pairs])


BASELINES: dict[str, Baseline] = {  # by the head, a key of `config.tasks.HEADS`
    'class': Baseline(
        _fit_classes,
        right=lambda record: record['label'],
        read=lambda said: said['label'],
        scores=_class_scores,
        decides='accuracy',
        terms=lambda right, said: np.array([(a == b, 1) for a, b in zip(right, said, strict=True)]),
        metric=lambda sums: sums[..., 0] / sums[..., 1],
    ),
    'number': Baseline(
        _fit_numbers,
        right=lambda record: record['label'],
        read=lambda said: said['number'],
        scores=lambda run, right, said: scores.regression_scores(np.array(right), np.array(said)),
        decides='pearson',
        terms=_moments,
        metric=_pearson,
    ),
    'tags': Baseline(
        _fit_tags,
        right=lambda record: record['tags'],
        read=lambda said: [token['tag'] for token in said['tokens']],
        scores=lambda run, right, said: scores.entity_scores(right, said),
        decides='entity_f1',
        terms=_common_entities,
        metric=lambda sums: 2 * sums[..., 0] / np.maximum(sums[..., 1], 1),
    ),
}

PLAIN_TAGS = BASELINES['tags']._replace(
    scores=lambda run, right, said: scores.tag_scores(right, said),
    decides='tag_accuracy',
    terms=lambda right, said: np.array(
        [(sum(x == y for x, y in zip(a, b, strict=True)), len(a)) for a, b in zip(right, said, strict=True)]
    ),
    metric=lambda sums: sums[..., 0] / sums[..., 1],
)
