"""The metrics of generated text, and of every metric whether less of it is better."""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tformer.config import Evaluate
from tformer.errors import UserError, nearest
from tformer.evaluation import text_scores
from tformer.evaluation.scores import Options, Texts, squad_scores


class Metric(NamedTuple):
    """A metric, or several that are computed together: of generated text, or of predictions (`scorer.JUDGES`)."""

    names: tuple[str, ...]  # of the scores that it gives
    scores: Callable[..., dict[str, float]]  # of (texts, the references of each, evaluate); may give more than `names`
    lower_is_better: bool = False  # whether less of each score is better
    positive_names: tuple[str, ...] = ()  # of the scores that evaluate.positive_label adds
    package: str | None = None  # the module of a package that it needs and the core installation lacks
    fields: tuple[str, ...] = ()  # the fields of config.evaluate that it reads

    def names_for(self, settings: Evaluate) -> tuple[str, ...]:
        """Returns the names of the scores under these settings."""
        return self.names + (self.positive_names if settings.positive_label is not None else ())


# The scores, besides those of generated text, of which less is better; of all others more is better.
LOWER_IS_BETTER = (
    *('loss', 'nll', 'perplexity', 'bits_per_byte', 'sentence_loss', 'detection_loss', 'aux_loss'),
    'mean_squared_error',
)


def lower_is_better(name: str) -> bool:
    """Returns whether less of a score is better, named as in metrics.jsonl: SPLIT/SCORE, or SPLIT/SCORE_at_LENGTH."""
    score = re.sub(r'_at_\d+$', '', name.rpartition('/')[2])
    generated = (metric.lower_is_better for metric in METRICS.values() if score in metric.names)
    return score in LOWER_IS_BETTER or any(generated)


def _g2p(predictions: Texts, references: Options) -> dict[str, float]:
    wrong = 1 - text_scores.exact_match(predictions, references) if predictions else 0.0
    return {'word_error_rate': wrong, 'phoneme_error_rate': text_scores.error_rate(predictions, references, str.split)}


def _single(name: str, score: Callable[[Texts, Options], float], lower_is_better: bool = False) -> Metric:
    return Metric((name,), lambda p, r, _: {name: score(p, r)}, lower_is_better)


def _error_rate(name: str, split: Callable[[str], Sequence[str]]) -> Metric:
    return _single(name, lambda p, r: text_scores.error_rate(p, r, split), lower_is_better=True)


def _signed(name: str, package: str | None = None) -> Metric:
    """Returns a metric of sacrebleu, whose settings a signature tells."""

    def scores(predictions: Texts, references: Options, settings: Evaluate) -> dict[str, float]:
        return {name: text_scores.corpus_score(SIGNED[name](settings.language), predictions, references)}

    return Metric((name,), scores, package=package, fields=('language',))


def check(settings: Evaluate) -> None:
    """Raises a `UserError` where a metric lacks its package or the language that it needs."""
    for name in settings.metrics:
        package = METRICS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(f"evaluate.metrics={name} needs the package {package}: pip install 'tformer[metrics]'")
    if 'bleu' in settings.metrics:
        try:
            text_scores.bleu(settings.language)
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
    """Returns every acceptable text for a record of seq2seq."""
    return record.get('references') or [record['target']]


def signature(name: str, settings: Evaluate, references: Options) -> str:
    """Returns sacrebleu's signature of a metric, which comparable scores share; '' for other metrics."""
    if name not in SIGNED:
        return ''
    metric, counts = SIGNED[name](settings.language), sorted({len(options) for options in references})
    text_scores.corpus_score(metric, ['a'] * len(counts), [['a'] * count for count in counts])
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


SIGNED: dict[str, Callable[[str | None], Any]] = {
    'bleu': text_scores.bleu,
    'bleu_tokenized': text_scores.bleu_tokenized,
    'chrf': text_scores.chrf,
}

METRICS: dict[str, Metric] = {
    'exact_match': _single('exact_match', text_scores.exact_match),
    # of whitespace-separated symbols: the word error rate of running text
    'symbol_error_rate': _error_rate('symbol_error_rate', str.split),
    'character_error_rate': _error_rate('character_error_rate', list),
    # the field's names: a word is wrong unless it equals one of its pronunciations (Bisani & Ney 2008)
    'g2p': Metric(('word_error_rate', 'phoneme_error_rate'), lambda p, r, _: _g2p(p, r), lower_is_better=True),
    'bleu': _signed('bleu'),
    'bleu_tokenized': _signed('bleu_tokenized', 'sacremoses'),
    'chrf': _signed('chrf')._replace(fields=()),
    'rouge': Metric(
        ('rouge1', 'rouge2', 'rougeL', 'rougeLsum'), lambda p, r, _: text_scores.rouge(p, r), package='rouge_score'
    ),
    'squad': Metric(('squad_exact_match', 'squad_f1'), lambda p, r, _: squad_scores(p, r)),
    'label_f1': Metric(
        ('f1_macro',),
        lambda p, r, e: text_scores.label_f1(p, r, e.positive_label),
        positive_names=('f1',),
        fields=('positive_label',),
    ),
    'matthews': _single('matthews', text_scores.matthews),
    'correlation': Metric(('pearson', 'spearman'), lambda p, r, _: text_scores.correlation(p, r)),
    'entity_f1': Metric(
        ('entity_precision', 'entity_recall', 'entity_f1'), lambda p, r, _: text_scores.entity_f1(p, r)
    ),
}
