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


Block = Callable[[jax.Array, Sequence[Sublayer], float], jax.Array]


def pre_norm(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """x + F(norm(x)) (Baevski & Auli 2019; Xiong et al. 2020)."""
    return x + sub.function(sub.norm(x))


def post_norm(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """norm(x + F(x)) (Vaswani et al. 2017, 3.1)."""
    return sub.norm(x + sub.function(x))


def sandwich(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """x + norm(F(norm(x))) (Ding et al. 2021; Kim et al. 2025, peri-LN)."""
    return x + sub.out_norm(sub.function(sub.norm(x)))


def res_post_norm(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """x + norm(F(x)) (Liu et al. 2022, 3.2; OLMo Team 2025)."""
    return x + sub.norm(sub.function(x))


def deep_norm(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """norm(alpha x + F(x)) (Wang et al. 2022)."""
    return sub.norm(alpha * x + sub.function(x))


def rezero(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """x + gain F(x), gain 0 at first (Bachlechner et al. 2021)."""
    return x + sub.gain().astype(x.dtype) * sub.function(x)


def no_residual(x: jax.Array, sub: Sublayer, alpha: float) -> jax.Array:
    """F(norm(x)): no residual connection, to measure what it contributes."""
    return sub.function(sub.norm(x))


def in_turn(place: Callable[[jax.Array, Sublayer, float], jax.Array]) -> Block:
    """Returns the block that applies its sub-layers one after another."""

    def block(x: jax.Array, sublayers: Sequence[Sublayer], alpha: float) -> jax.Array:
        for sublayer in sublayers:
            x = place(x, sublayer, alpha)
        return x

    return block


def parallel(x: jax.Array, sublayers: Sequence[Sublayer], alpha: float) -> jax.Array:
    """x + F_1(norm(x)) + F_2(norm(x)) + ...: one norm, all sub-layers at once (Wang & Komatsuzaki 2021)."""
    h = sublayers[0].norm(x)
    return x + sum(sublayer.function(h) for sublayer in sublayers)


def parallel_norms(x: jax.Array, sublayers: Sequence[Sublayer], alpha: float) -> jax.Array:
    """x + F_1(norm_1(x)) + F_2(norm_2(x)) + ...: all sub-layers at once, each with its norm (Black et al. 2022)."""
    return x + sum(sublayer.function(sublayer.norm(x)) for sublayer in sublayers)


class Placement(NamedTuple):
    """How a block arranges its sub-layers."""

    block: Block  # (x, sub-layers, DeepNorm's alpha) -> x after the block
    final_norm: bool  # the stream leaves the last block as a bare sum, so that the stack ends with one more norm
    has_norm: bool = True  # the block has norms at all
    before: bool = True  # sub-layers read the stream through a norm
    initializer: str = 'xavier'  # what `model.initializer=None` stands for, a key of `initializers.INITIALIZERS`


PLACEMENTS: dict[str, Placement] = {
    'pre': Placement(in_turn(pre_norm), final_norm=True),
    'post': Placement(in_turn(post_norm), final_norm=False, before=False),
    'sandwich': Placement(in_turn(sandwich), final_norm=True),
    'res_post': Placement(in_turn(res_post_norm), final_norm=True, before=False),
    'deepnorm': Placement(in_turn(deep_norm), final_norm=False, before=False, initializer='deepnorm'),
    'parallel': Placement(parallel, final_norm=True),
    'parallel_norms': Placement(parallel_norms, final_norm=True),
    'rezero': Placement(in_turn(rezero), final_norm=False, has_norm=False, before=False),
    'no_residual': Placement(in_turn(no_residual), final_norm=True),
}
