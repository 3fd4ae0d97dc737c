"""A cache that grows while texts are written: a step takes the time of the slots that there are."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tformer.errors import UserError

# The cache has so many slots (the second number) until a step (the first), and more from there. Empty: all of them from
# the beginning.
Growth = Sequence[tuple[int, int]]


def slots_of(cache: Any) -> int | None:
    """Returns the slots of a row of a cache; None where it is of one size, whatever was read."""
    slots: int | None = getattr(cache, 'slots', None)
    return slots


def for_steps(cache: Any) -> Any:
    """Returns a cache that single steps extend from here on."""
    return cache.for_steps() if hasattr(cache, 'for_steps') else cache


def check_slots(cache: Any, needed: int, growth: Growth = ()) -> None:
    """Raises a `UserError` where a cache has fewer slots than a search needs, once it has grown."""
    slots = growth[-1][1] if growth else slots_of(cache)
    if slots is not None and slots < needed:
        raise UserError(f'a cache of {slots} slots is too small: the prompt and what may be written need {needed}')


def go_on(going: Callable[[Any], jax.Array], advance: Callable[[Any], Any], state: Any, growth: Growth) -> Any:
    """Returns the state (with `step` and `cache`) that `advance` leads to while it is `going`."""
    state = state._replace(cache=for_steps(state.cache))
    for steps, slots in growth:
        state = state._replace(cache=state.cache.grown(slots))
        until = functools.partial(lambda end, now: going(now) & (now.step < end), steps)
        state = jax.lax.while_loop(until, advance, state)
    return state if growth else jax.lax.while_loop(going, advance, state)
