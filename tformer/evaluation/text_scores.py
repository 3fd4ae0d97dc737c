"""Scores of generated text: of labels, numbers and tags written as text, error rates, BLEU, chrF and ROUGE.

Plain values in, plain numbers out: shares in [0, 1], correlations in [-1, 1], and sacrebleu's in [0, 100].
"""

import functools
import importlib.metadata
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tformer.errors import UserError
from tformer.evaluation.scores import Options, Texts, agreement, class_scores, entity_scores, mean_of, regression_scores

# ---------------------------------------------------------------------------------- labels, numbers, tags as text


def _classes(predictions: Texts, references: Options) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Returns (names, labels, predicted): of several references the label is the predicted one, or the first."""
    right = [said if said in options else options[0] for said, options in zip(predictions, references, strict=True)]
    number = {name: i for i, name in enumerate(dict.fromkeys([*right, *predictions]))}
    return list(number), np.array([number[name] for name in right]), np.array([number[name] for name in predictions])


def label_f1(predictions: Texts, references: Options, positive: str | None = None) -> dict[str, float]:
    """Returns `f1_macro` over the classes that the references name, and `f1` of the class `positive`, if given.

    Text that names no class is a miss of the right class, and does not count as a class.
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
    _, labels, predicted = _classes(predictions, references)
    return class_scores(labels, predicted)['matthews']


def _number(text: str) -> float:
    """Returns the number that a text is, nan for any other text."""
    try:
        value = float(text)
    except ValueError:
        return np.nan
    return value if np.isfinite(value) else np.nan


def correlation(predictions: Texts, references: Options) -> dict[str, float]:
    """Returns `pearson` and `spearman` of numbers in text with the first reference of each.

    A prediction that is not a number counts as the mean of the references, which lowers both.

    Raises:
      UserError: a reference is not a number.
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

    A prediction with more tags than its reference is cut, and one with fewer is filled with O.
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
    """Returns the score, in percent, of a metric of sacrebleu; each text has its own number of references."""
    if not predictions:
        return 0.0
    return float(metric.corpus_score(list(predictions), columns(references)).score)


def columns(references: Options) -> list[list[str | None]]:
    """Returns the first reference of each, the second, and so on, as sacrebleu takes them; None where one has fewer."""
    return list(map(list, itertools.zip_longest(*references)))
