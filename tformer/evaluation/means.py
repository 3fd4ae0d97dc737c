"""Sums of (sum, weight) pairs, and the means that they make."""

import math
from collections.abc import Mapping
from typing import Any

MAX_PERPLEXITY = 1e9


def add(
    totals: dict[str, tuple[float, float]], scores: Mapping[str, tuple[Any, Any]]
) -> dict[str, tuple[float, float]]:
    """Returns the (sum, weight) pairs of both, added up in float64."""
    merged = dict(totals)
    for name, (value, weight) in scores.items():
        old_value, old_weight = merged.get(name, (0.0, 0.0))
        merged[name] = (old_value + float(value), old_weight + float(weight))
    return merged


def means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns sum / weight of each pair; a weight of 0 gives nan."""
    return {name: value / weight if weight else math.nan for name, (value, weight) in totals.items()}


def derived(averages: Mapping[str, float]) -> dict[str, float]:
    """Returns `averages` with the perplexity exp(nll), where there is one, at most `MAX_PERPLEXITY`."""
    if 'nll' not in averages:
        return dict(averages)
    return {**averages, 'perplexity': math.exp(min(averages['nll'], math.log(MAX_PERPLEXITY)))}
