"""What is added to the logits of tokens that stand behind others.

Shapes: R rows or hypotheses, S places of a history, K tokens before the last, N biased sequences, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tformer.data.tokenizers.biased_texts import Biases
from tformer.decode.penalties import History


def biased(logits_RV: jax.Array, history: History, biases: Biases) -> jax.Array:
    """Returns the logits, or log-probabilities, of the next token of each row.

    A bias is added to the last token of its sequence where the row ends with those before; several add up.
    """
    N, K = len(biases), max(len(tokens) for tokens, _ in biases) - 1
    before_NK = np.full((N, K), -1)  # no token: any may stand there
    for row, (tokens, _) in enumerate(biases):
        before_NK[row, K + 1 - len(tokens) :] = tokens[:-1]
    places_K = history.prompt + history.step - K + jnp.arange(K)
    tokens_RK, real_RK = (jnp.take(x, jnp.maximum(places_K, 0), axis=1) for x in (history.tokens_RS, history.real_RS))
    same_RNK = (tokens_RK[:, None] == before_NK[None]) & (real_RK & (places_K >= 0)[None])[:, None]
    stand_RN = jnp.all(same_RNK | (before_NK < 0)[None], 2)
    last_N, value_N = (
        np.array([tokens[-1] for tokens, _ in biases]),
        np.array([value for _, value in biases], np.float32),
    )
    return logits_RV.at[:, last_N].add(jnp.where(stand_RN, value_N[None], 0.0))
