"""How rotary frequencies are changed for longer contexts than were trained: pure functions, and their table.

A function takes the frequencies of the pairs, [R/2] in radians per position, and the numbers that its row of the table
names; with `by_length` also the number of positions of the longest sequence.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Frequencies = np.ndarray | jax.Array


def linear_scaling(frequencies: np.ndarray, factor: float) -> np.ndarray:
    """Divides all frequencies by `factor`: positions move closer together (Chen et al. 2023)."""
    return frequencies / factor


def llama3_scaling(frequencies: np.ndarray, factor: float, trained_len: int) -> np.ndarray:
    """Divides slow frequencies by `factor`, keeps fast ones, interpolates between (Llama Team 2024, as its code does).

    Slow is less than one turn in `trained_len` positions, fast is more than four.
    """
    turns = frequencies * trained_len / (2 * math.pi)
    share = np.clip((turns - 1) / (4 - 1), 0, 1)
    return share * frequencies + (1 - share) * frequencies / factor


def yarn_scaling(
    frequencies: np.ndarray,
    factor: float,
    trained_len: int,
    fast_turns: float,
    slow_turns: float,
    round_ramp: bool,
) -> np.ndarray:
    """Divides slow frequencies by `factor` and keeps fast ones, as `llama3_scaling`, but interpolates by the number of
    the pair and not by its turns (Peng et al. 2023, 3.2, as their code does).

    Fast is more than `fast_turns` turns in `trained_len` positions, slow is less than `slow_turns`. With `round_ramp`
    both ends of the interpolation are whole pairs.
    """
    if len(frequencies) < 2:
        return frequencies
    step = math.log(frequencies[0] / frequencies[1])
    low, high = (math.log(trained_len / (2 * math.pi * turns)) / step for turns in (fast_turns, slow_turns))
    if round_ramp:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    ramp = np.clip((np.arange(len(frequencies)) - low) / (high - low or 0.001), 0, 1)
    return (1 - ramp) * frequencies + ramp * frequencies / factor


def dynamic_scaling(frequencies: np.ndarray, factor: float, trained_len: int, length: jax.Array) -> jax.Array:
    """Raises the base of the frequencies with the length beyond `trained_len`, so that the slowest one falls to about
    1 / s of itself, s = factor length / trained_len - (factor - 1) (Peng et al. 2023, appendix B.1, as the hub's code
    does). Keys in a cache keep the frequencies of the length at which they were made.
    """
    pairs = len(frequencies)
    stretch = factor * jnp.maximum(length, trained_len) / trained_len - (factor - 1)
    return jnp.asarray(frequencies, jnp.float32) * stretch ** -jnp.asarray(np.arange(pairs) / max(pairs - 1, 1))


def longrope_scaling(
    frequencies: np.ndarray,
    trained_len: int,
    short_factors: Sequence[float],
    long_factors: Sequence[float],
    length: jax.Array,
) -> jax.Array:
    """Divides each frequency by a factor of its own, of one list up to `trained_len` positions and of another beyond
    (Ding et al. 2024, section 3.3)."""
    short, long = (
        jnp.asarray(frequencies / np.array(factors), jnp.float32) for factors in (short_factors, long_factors)
    )
    return jnp.where(length > trained_len, long, short)


def yarn_attention(max_len: int, factor: float, trained_len: int) -> float:
    """0.1 ln s + 1, the root of the factor on the scores (Peng et al. 2023, eq. 22)."""
    return 0.1 * math.log(factor) + 1


def longrope_attention(max_len: int, factor: float, trained_len: int) -> float:
    """sqrt(1 + ln s / ln L) of a context s times as long as L, `trained_len` (Ding et al. 2024, as their code does)."""
    return math.sqrt(1 + max(math.log(max_len / trained_len), 0) / math.log(trained_len))


class RopeScaling(NamedTuple):
    """A change of the rotary frequencies."""

    function: Callable[..., Frequencies]  # of the frequencies and the numbers that `fields` name, without `rope_`
    fields: tuple[str, ...] = ()  # the fields of `Model` that it reads
    # (max_len, factor, trained_len) -> the factor on queries and keys where model.rope_attention_factor is None
    attention: Callable[[int, float, int], float] | None = None
    by_length: bool = False  # its function takes `length`, by which all rows of a batch depend on the longest


STRETCHED = ('rope_factor', 'rope_trained_len')
RAMP = ('rope_fast_turns', 'rope_slow_turns', 'rope_round_ramp')
LISTS = ('rope_short_factors', 'rope_long_factors')

ROPE_SCALINGS: dict[str | None, RopeScaling] = {
    None: RopeScaling(lambda frequencies: frequencies),
    'linear': RopeScaling(linear_scaling, ('rope_factor',)),
    'llama3': RopeScaling(llama3_scaling, STRETCHED),
    'yarn': RopeScaling(yarn_scaling, (*STRETCHED, *RAMP, 'rope_attention_factor'), yarn_attention),
    'dynamic': RopeScaling(dynamic_scaling, STRETCHED, by_length=True),
    'longrope': RopeScaling(
        longrope_scaling,
        ('rope_trained_len', *LISTS, 'rope_attention_factor'),
        longrope_attention,
        by_length=True,
    ),
}


def scaled(
    row: RopeScaling, frequencies: np.ndarray, numbers: dict[str, Any], max_len: int, length: jax.Array | None
) -> tuple[Frequencies, float]:
    """Returns (the frequencies that a row makes, the factor on queries and keys).

    Args:
      numbers: the values of the fields that the row reads.
      max_len: the longest sequence of the model, in positions.
      length: the longest one of this batch, where the row asks for it.
    """
    numbers = {name.removeprefix('rope_'): value for name, value in numbers.items()}
    given = numbers.pop('attention_factor', None)
    if row.attention is None:
        factor = 1.0
    else:
        factor = row.attention(max_len, numbers.get('factor', 1.0), numbers['trained_len']) if given is None else given
    return row.function(frequencies, **numbers, **({'length': length} if row.by_length else {})), factor
