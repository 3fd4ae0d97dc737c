"""Generated text in a report: whether other examples could change which of two runs is better."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer.evaluation import predictions, text_scores
from tformer.evaluation.metrics import SIGNED
from tformer.lab.report.results import Results, Run
from tformer.lab.statistics import resampling

Predicted = tuple[list[str], list[list[str]]]  # predictions, and the references of each


class Corpus(NamedTuple):
    """A corpus metric that depends only on sums over its examples."""

    # (N predictions, their references, language) -> the terms of the sums, [N, K]
    statistics: Callable[[Sequence[str], Sequence[Sequence[str]], str | None], np.ndarray]
    metric: Callable[[str | None], Callable[[np.ndarray], np.ndarray]]  # language -> totals [..., K] -> values [...]


@dataclasses.dataclass(frozen=True)
class Compared:
    """The text of an arm against that of the baseline, seed by seed."""

    arm: str
    metric: str  # SPLIT/NAME
    examples: int
    seeds: Mapping[int, resampling.CorpusComparison]  # the paired bootstrap of each seed that both have
    left_out: Sequence[int]  # seeds that both were scored by, without predictions of the same examples


def compared(results: Results, split: str, baseline: str, alpha: float) -> list[Compared]:
    """Returns the comparisons of every arm by each metric in CORPORA that the runs were scored by.

    Only runs of the same seed are compared, with predictions for the same references. Nothing is returned for a metric
    of which no run kept predictions.
    """
    made = []
    for name, corpus in CORPORA.items():
        metric = f'{split}/{name}'
        scored = [run for run in results.done if metric in run.scores]
        found = {(run.arm, run.seed): _statistics(results, run, split, corpus) for run in scored}
        for arm in [arm for arm in results.arms if arm != baseline]:
            seeds, left_out, examples = {}, [], 0
            for run in results.arms[arm]:
                if (arm, run.seed) not in found or (baseline, run.seed) not in found:
                    continue
                ours, theirs = found[arm, run.seed], found[baseline, run.seed]
                if ours and theirs and ours[1] == theirs[1]:
                    totals = corpus.metric(run.config.evaluate.language)
                    seeds[run.seed] = resampling.compare_corpora(ours[0], theirs[0], totals, alpha)
                    examples = len(ours[1])
                else:
                    left_out.append(run.seed)
            if (seeds or left_out) and any(found.values()):
                made.append(Compared(arm, metric, examples, seeds, left_out))
    return made


def _statistics(results: Results, run: Run, split: str, corpus: Corpus) -> tuple[np.ndarray, Any] | None:
    """Returns ([N, K], the references) of a run; None if it kept no predictions."""
    said, right = predictions.read(results.home / run.directory, split) or ([], [])
    return (corpus.statistics(said, right, run.config.evaluate.language), right) if said else None


def _ratio(totals: np.ndarray) -> np.ndarray:
    return totals[..., 0] / np.maximum(totals[..., 1], 1)


def _rate(split: Callable[[str], Sequence[str]]) -> Corpus:
    return Corpus(lambda said, right, _: text_scores.edits(said, right, split), lambda _: _ratio)


def _share(of_right: bool) -> Corpus:
    def statistics(said: Sequence[str], right: Sequence[Sequence[str]], _: str | None) -> np.ndarray:
        return np.array([[(p in options) == of_right, 1] for p, options in zip(said, right, strict=True)], int)

    return Corpus(statistics, lambda _: _ratio)


def _signed(name: str) -> Corpus:
    """Returns a metric of sacrebleu, from the parts that its PairedTest uses, which gives no interval itself."""

    def statistics(said: Sequence[str], right: Sequence[Sequence[str]], language: str | None) -> np.ndarray:
        columns = text_scores.columns(right)
        return np.array(SIGNED[name](language)._extract_corpus_statistics(list(said), columns), np.float64)

    def metric(language: str | None) -> Callable[[np.ndarray], np.ndarray]:
        scorer = SIGNED[name](language)

        def values(totals: np.ndarray) -> np.ndarray:
            rows = totals.reshape(-1, totals.shape[-1]).tolist()
            scores = [scorer._compute_score_from_stats(row).score for row in rows]
            return np.array(scores).reshape(totals.shape[:-1])

        return values

    return Corpus(statistics, metric)


CORPORA: dict[str, Corpus] = {
    **{name: _signed(name) for name in SIGNED},
    'exact_match': _share(of_right=True),
    'word_error_rate': _share(of_right=False),
    'phoneme_error_rate': _rate(str.split),
    'symbol_error_rate': _rate(str.split),
    'character_error_rate': _rate(list),
}
