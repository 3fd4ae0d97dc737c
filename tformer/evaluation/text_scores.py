"""Scores of generated text, and the table of them: labels, numbers and tags put as text, errors, BLEU, chrF and ROUGE.

Plain values in, plain numbers out: shares in [0, 1], correlations in [-1, 1], and sacrebleu's in [0, 100].
"""

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer.config import Evaluate
from tformer.errors import UserError, nearest
from tformer.evaluation.scores import (
    Options,
    Texts,
    agreement,
    entity_scores,
    mean_of,
    regression_scores,
    squad_scores,
)

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
    found = {'f1_macro': agreement(f1_score, labels, predicted, labels=named, average='macro', zero_division=0)}
    if positive is not None:
        number = names.index(positive) if positive in names else -1
        found['f1'] = agreement(f1_score, labels == number, predicted == number, zero_division=0)
    return found


def matthews(predictions: Texts, references: Options) -> float:
    """Matthews' correlation of label strings, each of which is a class (Matthews 1975; Gorodkin 2004)."""
    from sklearn.metrics import matthews_corrcoef

    return agreement(matthews_corrcoef, *_classes(predictions, references)[1:])


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
    found = regression_scores(labels, np.where(np.isnan(predicted), mean_of(labels), predicted))
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
    return mean_of([p in r for p, r in zip(predictions, references, strict=True)])


def edits(predictions: Texts, references: Options, split: Callable[[str], Sequence[str]]) -> np.ndarray:
    """Returns (edits to the nearest reference, its symbols) of each prediction, [N, 2]; an edit inserts, deletes or
    replaces a symbol.

    The nearest reference has the smallest edit distance for its length, and the longer one wins a tie.
    """
    from rapidfuzz.distance import Levenshtein

    found = []
    for prediction, options in zip(predictions, references, strict=True):
        symbols = split(prediction)
        distances = [(Levenshtein.distance(symbols, split(option)), len(split(option))) for option in options]
        found.append(min(distances, key=lambda pair: (pair[0] / max(pair[1], 1), -pair[1])))
    return np.array(found, int).reshape(-1, 2)


def error_rate(predictions: Texts, references: Options, split: Callable[[str], Sequence[str]]) -> float:
    """All `edits`, over the symbols of the nearest references."""
    total, length = edits(predictions, references, split).sum(0).tolist()
    return total / max(length, 1)


def rouge(predictions: Texts, references: Options) -> dict[str, float]:
    """Returns the mean F-measures of ROUGE (Lin 2004), each of the reference with the most, with Porter's stemmer.

    `rougeLsum` takes lines for sentences. The package reads the letters a to z and digits: other scripts score 0.
    """
    from rouge_score import rouge_scorer, tokenizers

    names = ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')
    scorer = rouge_scorer.RougeScorer(names, tokenizer=tokenizers.DefaultTokenizer(use_stemmer=True))
    found = [scorer.score_multi(options, said) for said, options in zip(predictions, references, strict=True)]
    return {name: mean_of([scores[name].fmeasure for scores in found]) for name in names}


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
    return float(metric.corpus_score(list(predictions), columns(references)).score)


def columns(references: Options) -> list[list[str | None]]:
    """Returns the first reference of each, the second, and so on, as sacrebleu takes them; None where one has fewer."""
    most = max(map(len, references))
    return [[options[i] if i < len(options) else None for options in references] for i in range(most)]


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
