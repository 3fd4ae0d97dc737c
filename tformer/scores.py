"""Scores of predictions, as the literature reports them: of classes, numbers, entities, answers and generated text.

Plain values in, plain numbers out: shares in [0, 1], correlations in [-1, 1], errors, and sacrebleu's in [0, 100]. What
has no value (0 / 0, of no examples) is 0.
"""

import functools
import importlib.metadata
import importlib.util
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer.config import Evaluate
from tformer.errors import UserError, choose, nearest

Texts = Sequence[str]
Options = Sequence[Sequence[str]]  # all that is right, of each example


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0


# ----------------------------------------------------------------------------------------- classes and numbers


def class_scores(
    labels: np.ndarray, predicted: np.ndarray, names: Sequence[str] = (), positive: str | None = None
) -> dict[str, float]:
    """Returns `f1_macro`, `f1_micro`, `matthews` (Gorodkin 2004), and `f1` of the class `positive` where it is given.

    `f1_macro` is the mean over the classes that occur in either; `matthews` is 0 where either is constant.

    Args:
      labels: [N] int; where it is -1 nothing counts.
      predicted: [N] int.
      names: of the classes, by their number.
      positive: the one of them that `f1` is of, against all others.

    Raises:
      UserError: no class is called `positive`.
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    labels, predicted = labels[labels >= 0], predicted[labels >= 0]
    found = {
        'f1_macro': _agreement(f1_score, labels, predicted, average='macro', zero_division=0),
        'f1_micro': _agreement(f1_score, labels, predicted, average='micro', zero_division=0),
        'matthews': _agreement(matthews_corrcoef, labels, predicted),
    }
    if positive is not None:
        number = choose({name: i for i, name in enumerate(names)}, positive, 'evaluate.positive_label')
        found['f1'] = _agreement(f1_score, labels == number, predicted == number, zero_division=0)
    return found


def _agreement(score: Callable[..., Any], right: np.ndarray, said: np.ndarray, **options: Any) -> float:
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
        return found | {'mean_squared_error': _mean(np.square(labels - predicted))}


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
    found = {'squad_exact_match': _mean(exact), 'squad_f1': _mean(f1)}
    if not all(answered):
        found['no_answer_accuracy'] = _mean([score for score, has in zip(exact, answered, strict=True) if not has])
        found['has_answer_f1'] = _mean([score for score, has in zip(f1, answered, strict=True) if has])
    return found


# ---------------------------------------------------------------------------------- labels, numbers, tags as text


def _classes(predictions: Texts, references: Options) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Returns (names, labels, predicted): of several references the label is the predicted one, or the first."""
    right = [said if said in options else options[0] for said, options in zip(predictions, references, strict=True)]
    number = {name: i for i, name in enumerate(dict.fromkeys([*right, *predictions]))}
    return list(number), np.array([number[name] for name in right]), np.array([number[name] for name in predictions])


def label_f1(predictions: Texts, references: Options, positive: str | None = None) -> dict[str, float]:
    """Returns `f1_macro` over the classes that the references name, and `f1` of the class `positive`, if given.

    Text that names no class is a miss of the right one, and no class of its own.
    """
    from sklearn.metrics import f1_score

    names, labels, predicted = _classes(predictions, references)
    named = np.unique(labels)
    found = {'f1_macro': _agreement(f1_score, labels, predicted, labels=named, average='macro', zero_division=0)}
    if positive is not None:
        number = names.index(positive) if positive in names else -1
        found['f1'] = _agreement(f1_score, labels == number, predicted == number, zero_division=0)
    return found


def matthews(predictions: Texts, references: Options) -> float:
    """Matthews' correlation of label strings, each of which is a class (Matthews 1975; Gorodkin 2004)."""
    from sklearn.metrics import matthews_corrcoef

    return _agreement(matthews_corrcoef, *_classes(predictions, references)[1:])


def _number(text: str) -> float:
    """Returns the number that a text is, nan for any other text."""
    try:
        value = float(text)
    except ValueError:
        return np.nan
    return value if np.isfinite(value) else np.nan


def correlation(predictions: Texts, references: Options) -> dict[str, float]:
    """Returns `pearson` and `spearman` of numbers in text with the first reference of each.

    A prediction that is no number counts as the mean of the references: it says nothing, and lowers both.

    Raises:
      UserError: a reference is no number.
    """
    labels = np.array([_number(options[0]) for options in references])
    for (text, *_), label in zip(references, labels, strict=True):
        if np.isnan(label):
            raise UserError(f'evaluate.metrics=correlation is of numbers, and a reference is {text[:40]!r}')
    predicted = np.array([_number(text) for text in predictions])
    found = regression_scores(labels, np.where(np.isnan(predicted), _mean(labels), predicted))
    return {name: found[name] for name in ('pearson', 'spearman')}


def entity_f1(predictions: Texts, references: Options) -> dict[str, float]:
    """Returns `entity_scores` of tags with spaces between, by the first reference of each.

    A prediction of another number of tags than that is cut, or filled with O.
    """
    gold = [options[0].split() for options in references]
    said = [text.split() for text in predictions]
    return entity_scores(
        gold, [(tags + ['O'] * len(right))[: len(right)] for tags, right in zip(said, gold, strict=True)]
    )


# --------------------------------------------------------------------------------------------- generated text


def exact_match(predictions: Texts, references: Options) -> float:
    """The share of predictions that equal one of their references."""
    return _mean([p in r for p, r in zip(predictions, references, strict=True)])


def error_rate(predictions: Texts, references: Options, split: Callable[[str], Sequence[str]]) -> float:
    """Edits (insert, delete, replace) to the nearest reference, over the symbols of those references.

    The nearest reference has the smallest edit distance for its length, and the longer one wins a tie.
    """
    from rapidfuzz.distance import Levenshtein

    edits = length = 0
    for prediction, options in zip(predictions, references, strict=True):
        symbols = split(prediction)
        distances = [(Levenshtein.distance(symbols, split(option)), len(split(option))) for option in options]
        best = min(distances, key=lambda pair: (pair[0] / max(pair[1], 1), -pair[1]))
        edits, length = edits + best[0], length + best[1]
    return edits / max(length, 1)


def rouge(predictions: Texts, references: Options) -> dict[str, float]:
    """Returns the mean F-measures of ROUGE (Lin 2004), each of the reference with the most, with Porter's stemmer.

    `rougeLsum` takes lines for sentences. The package reads the letters a to z and digits: other scripts score 0.
    """
    from rouge_score import rouge_scorer, tokenizers

    names = ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')
    scorer = rouge_scorer.RougeScorer(names, tokenizer=tokenizers.DefaultTokenizer(use_stemmer=True))
    found = [scorer.score_multi(options, said) for said, options in zip(predictions, references, strict=True)]
    return {name: _mean([scores[name].fmeasure for scores in found]) for name in names}


def bleu(language: str | None) -> Any:
    """BLEU as shared tasks report it (Papineni et al. 2002; Post 2018), by sacrebleu's tokenizer for the language."""
    import sacrebleu

    return sacrebleu.BLEU(trg_lang=language or '')


def bleu_tokenized(language: str | None) -> Any:
    """BLEU as Vaswani et al. 2017 report it: of Moses' tokens, compounds apart, without smoothing (`multi-bleu.perl`).

    Predictions and references are raw text, and go through the same steps.
    """
    import sacrebleu

    assert language is not None, 'Moses has rules by language'
    metric = sacrebleu.BLEU(tokenize='none', smooth_method='none', force=True)
    metric.tokenizer = _moses(language)
    metric.tokenizer_signature = f'sacremoses-{importlib.metadata.version("sacremoses")}-{language}-compounds'
    return metric


@functools.cache
def _moses(language: str) -> Callable[[str], str]:
    import sacremoses

    tokenizer = sacremoses.MosesTokenizer(language)
    return lambda text: split_compounds(tokenizer.tokenize(text, return_str=True))


def split_compounds(text: str) -> str:
    """Returns tokens with their hyphens set apart, as papers on WMT14 do: `a-b` becomes `a ##AT##-##AT## b`."""
    return re.sub(r'(\S)-(\S)', r'\1 ##AT##-##AT## \2', text)


def chrf(language: str | None) -> Any:
    """The F-score of character n-grams (Popovic 2015), of any language."""
    import sacrebleu

    return sacrebleu.CHRF()


def corpus_score(metric: Any, predictions: Texts, references: Options) -> float:
    """Returns what a metric of sacrebleu, in percent, gives texts of which each has its own number of references."""
    if not predictions:
        return 0.0
    most = max(map(len, references))
    columns = [[options[i] if i < len(options) else None for options in references] for i in range(most)]
    return float(metric.corpus_score(list(predictions), columns).score)


# ------------------------------------------------------------------------------------------------- the choices


class Metric(NamedTuple):
    """What generated text is scored by.

    Attributes:
      names: of the scores.
      scores: (predictions, references of each, config.evaluate) -> scores by name; there may be more than `names`.
      positive_names: of the scores that evaluate.positive_label adds.
      package: what must be installed besides the core, as it is imported.
    """

    names: tuple[str, ...]
    scores: Callable[[Texts, Options, Evaluate], dict[str, float]]
    positive_names: tuple[str, ...] = ()
    package: str | None = None

    def names_for(self, settings: Evaluate) -> tuple[str, ...]:
        return self.names + (self.positive_names if settings.positive_label is not None else ())


def _g2p(predictions: Texts, references: Options) -> dict[str, float]:
    wrong = 1 - exact_match(predictions, references) if predictions else 0.0
    return {'word_error_rate': wrong, 'phoneme_error_rate': error_rate(predictions, references, str.split)}


def _signed(name: str, package: str | None = None) -> Metric:
    def scores(predictions: Texts, references: Options, settings: Evaluate) -> dict[str, float]:
        return {name: corpus_score(SIGNED[name](settings.language), predictions, references)}

    return Metric((name,), scores, package=package)


def check(settings: Evaluate) -> None:
    """Raises a `UserError` where a metric lacks its package or the language that it needs."""
    for name in settings.metrics:
        package = METRICS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(f"evaluate.metrics={name} needs the package {package}: pip install 'tformer[metrics]'")
    if 'bleu' in settings.metrics:
        try:
            bleu(settings.language)
        except RuntimeError as error:  # the packages that it splits words with are apart
            line = f'evaluate.metrics=bleu of evaluate.language={settings.language} needs more packages: '
            raise UserError(f"{line}pip install 'sacrebleu[{settings.language}]'") from error
    if 'bleu_tokenized' in settings.metrics:
        from sacremoses.corpus import NonbreakingPrefixes

        known = sorted({code for code in NonbreakingPrefixes().available_langs.values() if len(code) == 2})
        if settings.language not in known:
            raise UserError(
                'evaluate.metrics=bleu_tokenized needs evaluate.language, one that Moses has rules for, not '
                f'{settings.language}{nearest(settings.language, known)}'
            )


def references_of(record: Mapping[str, Any]) -> list[str]:
    """Returns all that is right for a record of seq2seq."""
    return record.get('references') or [record['target']]


def signature(name: str, settings: Evaluate, references: Options) -> str:
    """Returns sacrebleu's signature of a metric, '' for others: what another score must share to be compared."""
    if name not in SIGNED:
        return ''
    metric, counts = SIGNED[name](settings.language), sorted({len(options) for options in references})
    corpus_score(metric, ['a'] * len(counts), [['a'] * count for count in counts])
    return str(metric.get_signature())


def generation_scores(settings: Evaluate, predictions: Texts, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns evaluate.metrics of generated text; for those of a corpus also what copying the source scores."""
    references = [references_of(record) for record in records]
    found: dict[str, float] = {}
    for name in settings.metrics:
        found |= METRICS[name].scores(predictions, references, settings)
    for name in [name for name in settings.metrics if name in SIGNED]:
        copied = METRICS[name].scores([record['source'] for record in records], references, settings)
        found[f'copying_the_source_{name}'] = copied[name]
    return found


SIGNED: dict[str, Callable[[str | None], Any]] = {'bleu': bleu, 'bleu_tokenized': bleu_tokenized, 'chrf': chrf}

METRICS: dict[str, Metric] = {
    'exact_match': Metric(('exact_match',), lambda p, r, _: {'exact_match': exact_match(p, r)}),
    # of whitespace-separated symbols: the word error rate of running text
    'symbol_error_rate': Metric(
        ('symbol_error_rate',), lambda p, r, _: {'symbol_error_rate': error_rate(p, r, str.split)}
    ),
    'character_error_rate': Metric(
        ('character_error_rate',), lambda p, r, _: {'character_error_rate': error_rate(p, r, list)}
    ),
    # the field's names: a word is wrong unless it equals one of its pronunciations (Bisani & Ney 2008)
    'g2p': Metric(('word_error_rate', 'phoneme_error_rate'), lambda p, r, _: _g2p(p, r)),
    'bleu': _signed('bleu'),
    'bleu_tokenized': _signed('bleu_tokenized', 'sacremoses'),
    'chrf': _signed('chrf'),
    'rouge': Metric(('rouge1', 'rouge2', 'rougeL', 'rougeLsum'), lambda p, r, _: rouge(p, r), package='rouge_score'),
    'squad': Metric(('squad_exact_match', 'squad_f1'), lambda p, r, _: squad_scores(p, r)),
    'label_f1': Metric(('f1_macro',), lambda p, r, e: label_f1(p, r, e.positive_label), ('f1',)),
    'matthews': Metric(('matthews',), lambda p, r, _: {'matthews': matthews(p, r)}),
    'correlation': Metric(('pearson', 'spearman'), lambda p, r, _: correlation(p, r)),
    'entity_f1': Metric(('entity_precision', 'entity_recall', 'entity_f1'), lambda p, r, _: entity_f1(p, r)),
}
