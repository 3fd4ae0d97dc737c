"""UL2's mixture of denoisers: short spans, long or frequent spans, and the continuation of a text.

Source: Tay et al. 2023, section 3.1 and table 1.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tformer.data.examples import corrupt
from tformer.errors import choose

MODES = ('r', 's', 'x')  # regular, sequential, extreme; the first token of an input names its mode


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """T5's corruption, or without a mean span a prefix LM: one span, which ends the text, is wanted."""

    mode: str
    rate: float  # the share of the tokens that is dropped; of a prefix LM on average
    mean_span: float | None = None  # tokens

    def corrupt(
        self, tokens: np.ndarray, rng: np.random.Generator, sentinels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the given and the wanted tokens of a text, int [T]."""
        if self.mean_span is None:
            return corrupt.split_end(tokens, rng, self.rate)
        return corrupt.corrupt_spans(tokens, rng, sentinels, self.rate, self.mean_span)

    def lengths(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the most given tokens, wanted tokens and spans of texts of these sizes: int [...] each."""
        if self.mean_span is None:
            wanted = corrupt.longest_end(sizes, self.rate)
            return np.maximum(sizes - 1, np.minimum(sizes, 1)), wanted, np.zeros_like(sizes)
        dropped, spans = corrupt.span_counts(sizes, self.rate, self.mean_span)
        return sizes - dropped + spans, dropped + spans, spans


def denoise_ul2(tokens: np.ndarray, noise: corrupt.Noise) -> tuple[np.ndarray, np.ndarray]:
    """Corrupts a text, int [T], by one of the entries of data.denoisers, each equally likely.

    Returns the given tokens, which begin with the mode, and the wanted ones without EOS: int [at most those of
    `lengths`]. Of a single token, nothing is wanted. More spans than sentinels are a `UserError`.
    """
    sentinels, modes = roles(noise.tokenizer.sentinels)
    denoiser = DENOISERS[noise.data.denoisers[int(noise.rng.integers(len(noise.data.denoisers)))]]
    given, wanted = denoiser.corrupt(tokens, noise.rng, sentinels)
    return np.insert(given, 0, modes[denoiser.mode]), wanted


def roles(sentinels: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
    """Splits three or more sentinels of a tokenizer: the last three stand for MODES, and the others for spans."""
    corrupt.check_sentinels(len(MODES), sentinels)
    return sentinels[: -len(MODES)], dict(zip(MODES, sentinels[-len(MODES) :].tolist(), strict=True))


def lengths(sizes: np.ndarray, denoisers: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the most given tokens, mode included, wanted tokens and spans that `denoise_ul2` makes of texts of these
    sizes: int [...] each, never decreasing."""
    each = (choose(DENOISERS, name, 'data.denoisers').lengths(sizes) for name in denoisers)
    given, wanted, spans = functools.reduce(np.maximum, map(np.stack, each))
    return given + 1, wanted, spans


DENOISERS = {  # Tay et al. 2023, table 1
    'r3': Denoiser('r', rate=0.15, mean_span=3),
    'r8': Denoiser('r', rate=0.15, mean_span=8),
    's': Denoiser('s', rate=0.25),
    'x3': Denoiser('x', rate=0.5, mean_span=3),
    'x8': Denoiser('x', rate=0.5, mean_span=8),
    'x64': Denoiser('x', rate=0.5, mean_span=64),
    'x64_low': Denoiser('x', rate=0.15, mean_span=64),
}
