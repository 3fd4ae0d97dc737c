"""What grouped products are told besides slots and kernels."""

from typing import Any, NamedTuple

import jax


class Blocks(NamedTuple):
    """Equally long blocks of slots, which belong to one expert each: first those of the first expert."""

    expert_M: jax.Array  # the expert of each block
    count_E: jax.Array  # the blocks of each expert; those behind them hold no token


class Options(NamedTuple):
    """A product besides its arrays."""

    platform: str  # a key of grouped_products.PLATFORMS
    slots: int  # those that hold a token where all experts have equally many, for distributed.costs
    interpret: Any = False  # as of `pl.pallas_call`
