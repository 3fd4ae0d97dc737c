"""Fill-in-the-middle: texts whose middle comes last, so that a decoder learns to write what is between two others.

Source: Bavarian et al. 2022, section 3 and appendix D.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tformer.data.examples.corrupt import Noise
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError


class Marks(NamedTuple):
    """The tokens that stand before each part of a text."""

    prefix: int
    suffix: int
    middle: int


Tokens = Sequence[int] | np.ndarray


def marks(tokenizer: Tokenizer) -> Marks:
    """Returns the special tokens that a hub tokenizer has for this, else the last three sentinels.

    Raises:
      UserError: the tokenizer has neither.
    """
    for names in NAMES:
        found = [index for name in names if (index := tokenizer.special_names.get(name)) is not None]
        if len(found) == len(names):
            return Marks(*found)
    if len(tokenizer.sentinels) < len(Marks._fields):
        raise UserError(
            'train.objective=fill_in_middle needs three special tokens, for the prefix, the suffix and the middle of '
            f'a text, and the tokenizer has {len(tokenizer.sentinels)} sentinels: data.sentinels=3'
        )
    return Marks(*tokenizer.sentinels[-len(Marks._fields) :].tolist())


def prefix_first(own: Marks, prefix: Tokens, middle: Tokens, suffix: Tokens) -> np.ndarray:
    """PSM: <PRE> prefix <SUF> suffix <MID> middle."""
    return np.concatenate([[own.prefix], prefix, [own.suffix], suffix, [own.middle], middle]).astype(np.int32)


def suffix_first(own: Marks, prefix: Tokens, middle: Tokens, suffix: Tokens) -> np.ndarray:
    """SPM: <PRE> <SUF> suffix <MID> prefix middle, which mixes with PSM, as <PRE> comes first in both."""
    return np.concatenate([[own.prefix, own.suffix], suffix, [own.middle], prefix, middle]).astype(np.int32)


def rearranged(tokens: np.ndarray, noise: Noise) -> np.ndarray | None:
    """Returns a text, int [T], with its middle last, or None for the share of texts, 1 - data.fim_rate, that stay.

    The two places where it is cut are independent and uniform, from 0 to T, so that any part may be empty. A share
    data.spm_rate is in the order of SPM, the others are in that of PSM. Returns int [T + 3].
    """
    changed, order = noise.rng.random(2) < (noise.data.fim_rate, noise.data.spm_rate)
    if not changed:
        return None
    parts = np.split(tokens, np.sort(noise.rng.integers(0, len(tokens) + 1, 2)))
    arrange: Callable[..., np.ndarray] = suffix_first if order else prefix_first
    return arrange(marks(noise.tokenizer), *parts)


def prompt(tokenizer: Tokenizer, prefix: Tokens, suffix: Tokens, most: int) -> list[int]:
    """Returns what a model reads before it writes the middle: at most `most` tokens, 3 or more, by leaving out the
    beginning of the prefix, and then the end of the suffix."""
    room = max(most - len(Marks._fields), 0)
    suffix = suffix[:room]
    prefix = prefix[max(len(prefix) - (room - len(suffix)), 0) :]
    return prefix_first(marks(tokenizer), prefix, [], suffix).tolist()


NAMES = (  # of the special tokens before the prefix, the suffix and the middle
    ('<fim_prefix>', '<fim_suffix>', '<fim_middle>'),  # StarCoder
    ('<|fim_prefix|>', '<|fim_suffix|>', '<|fim_middle|>'),  # CodeGemma, Qwen
    ('▁<PRE>', '▁<SUF>', '▁<MID>'),  # Code Llama
)
