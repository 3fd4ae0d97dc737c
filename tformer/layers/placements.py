"""Where norm and residual stand around the sub-layers of a block."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

Function = Callable[[jax.Array], jax.Array]


class Sublayer(NamedTuple):
    """A function of the stream and what its placement may put around it."""

    function: Function
    norm: Function
    out_norm: Function  # of the function's output
    gain: Callable[[], jax.Array]  # ReZero's


def pre_norm(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """x + F(norm(x)) (Baevski & Auli 2019; Xiong et al. 2020)."""
    return x + sub.function(sub.norm(x))


def post_norm(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """norm(x + F(x)) (Vaswani et al. 2017, 3.1)."""
    return sub.norm(x + sub.function(x))


def sandwich(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """x + norm(F(norm(x))) (Ding et al. 2021; Kim et al. 2025, peri-LN)."""
    return x + sub.out_norm(sub.function(sub.norm(x)))


def deep_norm(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """norm(alpha x + F(x)) (Wang et al. 2022)."""
    return sub.norm(alpha * x + sub.function(x))


def rezero(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """x + gain F(x), gain 0 at first (Bachlechner et al. 2021)."""
    return x + sub.gain().astype(x.dtype) * sub.function(x)


def no_residual(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """F(norm(x)): what the residual is good for."""
    return sub.function(sub.norm(x))


def in_turn(place: Callable[[jax.Array, Sublayer, float], jax.Array]) -> Callable[..., jax.Array]:
    """Returns the block that applies its sub-layers one after the other."""

    def block(x: jax.Array, sublayers: Sequence[Sublayer], alpha: float) -> jax.Array:
        for sublayer in sublayers:
            x = place(x, sublayer, alpha)
        return x

    return block


def parallel(x: jax.Array, sublayers: Sequence[Sublayer], alpha: float) -> jax.Array:
    """x + F_1(norm(x)) + F_2(norm(x)) + ...: one norm, all sub-layers at once (Wang & Komatsuzaki 2021)."""
    h = sublayers[0].norm(x)
    return x + sum(sublayer.function(h) for sublayer in sublayers)


PLACEMENTS: dict[str, Callable[[jax.Array, Sequence[Sublayer], float], jax.Array]] = {
    'pre': in_turn(pre_norm),
    'post': in_turn(post_norm),
    'sandwich': in_turn(sandwich),
    'deepnorm': in_turn(deep_norm),
    'parallel': parallel,
    'rezero': in_turn(rezero),
    'no_residual': in_turn(no_residual),
}
