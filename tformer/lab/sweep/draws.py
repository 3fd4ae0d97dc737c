"""What a search draws: each sampler gives draw `number` of a space as a function of its seed and what is known."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tformer.lab.sweep import optuna_study
from tformer.lab.sweep.distributions import Distribution
from tformer.lab.sweep.optuna_study import Known
from tformer.lab.sweep.overrides import Overrides
from tformer.lab.sweep.overrides import draw as draw_at


def at_random(space: Mapping[str, Distribution], seed: int, known: Known) -> Overrides:
    """Returns the draw that `overrides.sample` makes."""
    return draw_at(space, len(known.drawn), seed)


def quasi_monte_carlo(space: Mapping[str, Distribution], seed: int, known: Known) -> Overrides:
    """Returns the next point of a scrambled Sobol sequence, which fills the space evenly (Bousquet et al. 2017)."""
    from scipy.stats import qmc

    points = qmc.Sobol(len(space), scramble=True, seed=seed)
    if known.drawn:
        points.fast_forward(len(known.drawn))
    return {field: of(float(share)) for (field, of), share in zip(space.items(), points.random(1)[0], strict=True)}


SAMPLERS: dict[str, Callable[[Mapping[str, Distribution], int, Known], dict[str, Any]]] = {
    'random': at_random,  # Bergstra & Bengio 2012
    'qmc': quasi_monte_carlo,
    'tpe': functools.partial(optuna_study.ask, 'tpe'),  # tree-structured Parzen estimator: Bergstra et al. 2011
    'cmaes': functools.partial(
        optuna_study.ask, 'cmaes'
    ),  # covariance matrix adaptation: Hansen 2016; choices are drawn at random
}
LEARNED = ('tpe', 'cmaes')  # by what is known
