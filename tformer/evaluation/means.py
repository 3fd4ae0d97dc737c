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
    """Returns sum / weight of each pair, nan for a weight of 0; beside `nll` also `perplexity`, its exp.

    The perplexity is at most `MAX_PERPLEXITY`.
    """
    found = {name: value / weight if weight else math.nan for name, (value, weight) in totals.items()}
    if 'nll' in found:
        found['perplexity'] = math.exp(min(found['nll'], math.log(MAX_PERPLEXITY)))
    return found
