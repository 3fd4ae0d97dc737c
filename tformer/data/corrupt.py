"""Corruption of inputs that a model learns to undo."""

import numpy as np

from tformer.data.vocabulary import Tokenizer


def mask_tokens(
    tokens: np.ndarray, rng: np.random.Generator, tokenizer: Tokenizer, rate: float = 0.15
) -> tuple[np.ndarray, np.ndarray]:
    """BERT's masking: of the selected tokens 80 % become the mask, 10 % a random token, and 10 % stay.

    Source: Devlin et al. 2019, section 3.1.

    Args:
      tokens: int [T]; special tokens are never selected.
      rng: the source of all randomness.
      tokenizer: of the tokens; random ones are drawn from its ordinary ids.
      rate: share of the ordinary tokens that is selected: rounded as BERT's code does, at least one.

    Returns:
      inputs: the corrupted tokens, int [T].
      selected: where the original is to be predicted, bool [T].
    """
    places = np.flatnonzero(tokenizer.ordinary[tokens])
    count = min(len(places), max(1, round(rate * len(places))))
    chosen = rng.choice(places, count, replace=False)
    fate = rng.random(count)
    drawn = tokenizer.ordinary_ids[rng.integers(0, len(tokenizer.ordinary_ids), count)]
    inputs, selected = tokens.copy(), np.zeros(len(tokens), bool)
    selected[chosen] = True
    inputs[chosen] = np.where(fate < 0.8, tokenizer.specials.mask, np.where(fate < 0.9, drawn, tokens[chosen]))
    return inputs, selected
