"""Corruption of inputs that a model learns to undo."""

import numpy as np

from tformer.data import tokenizers


def mask_tokens(
    tokens: np.ndarray, rng: np.random.Generator, vocab_size: int, rate: float = 0.15
) -> tuple[np.ndarray, np.ndarray]:
    """BERT's masking: of the selected tokens 80 % become MASK, 10 % a random token, and 10 % stay.

    Source: Devlin et al. 2019, section 3.1.

    Args:
      tokens: int [T]; special tokens are never selected.
      rng: the source of all randomness.
      vocab_size: random tokens come from the ordinary ids below it.
      rate: share of the ordinary tokens that is selected: rounded as BERT's code does, at least one.

    Returns:
      inputs: the corrupted tokens, int [T].
      selected: where the original is to be predicted, bool [T].
    """
    num_specials = len(tokenizers.SPECIALS)
    ordinary = np.flatnonzero(tokens >= num_specials)
    count = min(len(ordinary), max(1, round(rate * len(ordinary))))
    chosen = rng.choice(ordinary, count, replace=False)
    fate = rng.random(count)
    drawn = rng.integers(num_specials, vocab_size, count)
    inputs, selected = tokens.copy(), np.zeros(len(tokens), bool)
    selected[chosen] = True
    inputs[chosen] = np.where(fate < 0.8, tokenizers.MASK, np.where(fate < 0.9, drawn, tokens[chosen]))
    return inputs, selected
