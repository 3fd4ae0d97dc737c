"""How each row of a batch draws its tokens, by numbers that a program is given, and which runs draw so.

Shapes: B rows, V vocabulary.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tformer.config import Decode
from tformer.decode.constraints import CONSTRAINTS
from tformer.decode.sample import Sampling
from tformer.errors import UserError


class Drawing(NamedTuple):
    """How the tokens of a text are drawn."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 2**31 - 1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    row: int = 0  # the number of the text among those of the same seed
    number: int = 0  # of the draw of the same text
    most: int = 2**31 - 1  # new tokens, within which a text of a form ends


# The fields of config.decode that an engine, or who asks it for a text, knows; others change what is written.
KNOWN = (
    *('strategy', 'max_len', 'num_outputs', 'temperature', 'top_k', 'top_p', 'min_p', 'ends', 'bias'),
    *('quantization', 'cache_quantization'),
    *CONSTRAINTS,
)
_HARMLESS = ('batch_size', 'prefill_chunk', 'draft', 'draft_len')  # they change no distribution


def unknown(decode: Decode) -> list[str]:
    """Returns the fields, as they are set, by which a run's texts are others than an engine's."""
    plain = vars(Decode())
    found = {name: value for name, value in vars(decode).items() if value != plain[name]}
    names = [name for name in found if name not in (*KNOWN, *_HARMLESS)]
    names += ['strategy'] if decode.strategy not in ('greedy', 'sample') else []
    return [f'decode.{name}={found[name]}' for name in names]


def checked_seed(seed: object) -> int:
    """Returns a seed as a number.

    Raises:
      UserError: the seed is not an integer, or has more than 64 bits.
    """
    try:
        found = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        found = 2**63
    if not -(2**63) <= found < 2**63:
        raise UserError(f'seed={seed!r} is not an integer of 64 bits')
    return found


def drawing_of(decode: Decode, seed: int) -> Drawing:
    """Returns how a run draws the first text of a seed, where nothing is `unknown`."""
    cuts = {name: value for name in ('top_k', 'top_p', 'min_p') if (value := getattr(decode, name)) is not None}
    heat = decode.temperature if decode.strategy == 'sample' else 0.0
    bits = np.int64(checked_seed(seed)).astype(np.int32)  # that keys are made of
    return Drawing(**cuts, temperature=heat, seed=int(bits), most=decode.max_len)


def key_of(drawing: Drawing) -> jax.Array:
    """Returns the key of a text, as `Prompt.keys`."""
    key = jax.random.fold_in(jax.random.key(drawing.seed), drawing.row)
    return jnp.where(drawing.number == 0, key, jax.random.fold_in(key, drawing.number))


def draw(keys_B: jax.Array, logits_BV: jax.Array, drawing: Any) -> jax.Array:
    """Returns the next token of each row by a `Drawing` of arrays [B]: the likeliest one at temperature 0.

    What no row asks for is not computed: draws, and cuts of what is drawn from.
    """
    cold_B = drawing.temperature == 0
    whole_B = (drawing.top_k >= logits_BV.shape[1]) & (drawing.top_p >= 1) & (drawing.min_p <= 0)
    heat_B1 = jnp.where(cold_B, 1.0, drawing.temperature)[:, None]
    cuts = drawing.top_k[:, None], drawing.top_p[:, None], drawing.min_p[:, None]

    def likeliest() -> jax.Array:
        return jnp.argmax(logits_BV, 1)

    def drawn() -> jax.Array:
        warped_BV = jax.lax.cond(
            jnp.all(cold_B | whole_B), lambda: logits_BV / heat_B1, lambda: Sampling(heat_B1, *cuts).warp(logits_BV)
        )
        return jnp.where(cold_B, likeliest(), jax.vmap(jax.random.categorical)(keys_B, warped_BV))

    return jax.lax.cond(jnp.all(cold_B), likeliest, drawn)
