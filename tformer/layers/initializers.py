"""Initial values of kernels and tables."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.nn import initializers

Initializer = Callable[..., jax.Array]


class Init(NamedTuple):
    """How a model's parameters start: each field returns a jax initializer."""

    kernel: Callable[[Sequence[int], Sequence[int]], Initializer]  # (input axes, output axes)
    embedding: Callable[[int], Initializer]  # (emb_dim)


def _xavier_kernel(in_axis: Sequence[int], out_axis: Sequence[int]) -> Initializer:
    return initializers.variance_scaling(1.0, 'fan_avg', 'uniform', in_axis=in_axis, out_axis=out_axis)


def _lecun_kernel(in_axis: Sequence[int], out_axis: Sequence[int]) -> Initializer:
    return initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal', in_axis=in_axis, out_axis=out_axis)


def _truncated_normal(*_: object) -> Initializer:
    return initializers.truncated_normal(0.02)


def _unit_embedding(emb_dim: int) -> Initializer:
    return initializers.normal(emb_dim**-0.5)


INITIALIZERS: dict[str, Init] = {
    'xavier': Init(_xavier_kernel, _unit_embedding),  # Glorot & Bengio 2010, as the original's code does
    'lecun': Init(_lecun_kernel, _unit_embedding),  # LeCun et al. 1998
    'truncated_normal': Init(_truncated_normal, _truncated_normal),  # Devlin et al. 2019: standard deviation 0.02
}
