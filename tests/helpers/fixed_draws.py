"""A random generator of given draws, each of which must be one that was asked for."""

from typing import Any

import numpy as np


class Fixed:
    """Gives `draws` one after another; `mean` is that of the Poisson numbers among them."""

    def __init__(self, *draws: object, mean: float | None = None) -> None:
        self._draws, self._mean = iter(draws), mean

    def _next(self, size: int | None) -> Any:
        draw = np.asarray(next(self._draws))
        assert draw.shape == (() if size is None else (size,)), f'{size} asked for'
        return draw if draw.shape else draw.item()

    def integers(self, low: int, high: int | None = None, size: int | None = None) -> Any:
        low, high = (0, low) if high is None else (low, high)
        draw = self._next(size)
        assert np.all((np.asarray(draw) >= low) & (np.asarray(draw) < high)), f'{draw} is not from {low} to {high}'
        return draw

    def random(self, size: int | None = None) -> Any:
        draw = self._next(size)
        assert np.all((np.asarray(draw) >= 0) & (np.asarray(draw) < 1))
        return draw

    def choice(self, among: int | np.ndarray, size: int, replace: bool = True) -> Any:
        draw = self._next(size).astype(int)
        assert np.isin(draw, among if isinstance(among, np.ndarray) else range(among)).all(), f'{draw} of {among}'
        assert replace or len(set(draw.tolist())) == size
        return draw

    def permutation(self, count: int) -> Any:
        draw = self._next(count)
        assert sorted(draw.tolist()) == list(range(count))
        return draw

    def poisson(self, mean: float, size: int) -> Any:
        assert mean == self._mean, f'the mean is {mean}'
        return self._next(size)
