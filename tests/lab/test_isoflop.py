"""Budgets of operations, and what sizes and tokens they pay for."""

import numpy as np

from tformer.lab.scaling_laws import isoflop
from tformer.lab.scaling_laws.scaling import Law


def test_a_budget_is_six_operations_for_each_parameter_and_token():
    """Kaplan et al. 2020, 2.1."""
    N, D = Law(E=1.0, A=400.0, B=400.0, alpha=0.5, beta=0.5).optimal(6e6)
    np.testing.assert_allclose((N, D), (1e3, 1e3))
    budget = np.repeat([6e9, 6e10, 6e11], 4)
    centre = 2.5e3 * (budget / 6e9) ** 0.5  # the best size grows as the root
    sizes = centre * np.tile([0.4, 0.8, 1.6, 3.2], 3)
    found = isoflop.profiles(sizes, budget / 6 / sizes, 2 + np.log(sizes / centre) ** 2)
    np.testing.assert_allclose([minimum.flops for minimum in found.minima], [6e9, 6e10, 6e11])
    np.testing.assert_allclose([minimum.N for minimum in found.minima], centre[::4])
