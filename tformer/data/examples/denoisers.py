"""UL2's mixture of denoisers: short spans, long or many spans, and the rest of a text.

Source: Tay et al. 2023, section 3.1 and table 1.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from tformer.data.examples import corrupt
from tformer.errors import choose

MODES = ('r', 's', 'x')  # regular, sequential, extreme: the token that an input begins with says which


@dataclasses.dataclass(frozen=True)
class SpanDenoiser:
    """T5's corruption at a rate and a length of spans."""

    mode: str
    rate: float  # share of the tokens that is dropped
    mean_span: float  # tokens

    def corrupt(
        self, tokens: np.ndarray, rng: np.random.Generator, sentinels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns what is given of int [T], and what is wanted."""
        return corrupt.corrupt_spans(tokens, rng, sentinels, self.rate, self.mean_span)

    def lengths(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens given and wanted of texts of these sizes, and the spans, at most: int [...] each."""
        dropped, spans = corrupt.span_counts(sizes, self.rate, self.mean_span)
        return sizes - dropped + spans, dropped + spans, spans


@dataclasses.dataclass(frozen=True)
class SequentialDenoiser:
    """A prefix LM: the text after a place of which all are as likely, with something on both sides of two tokens."""

    mode: str = 's'

    def corrupt(
        self, tokens: np.ndarray, rng: np.random.Generator, sentinels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As of `SpanDenoiser`."""
        place = rng.integers(1, max(len(tokens), 2))
        return tokens[:place], tokens[place:]

    def lengths(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As of `SpanDenoiser`."""
        wanted = np.maximum(sizes - 1, 0)
        return np.maximum(wanted, np.minimum(sizes, 1)), wanted, np.zeros_like(sizes)


def denoise_ul2(
    tokens: np.ndarray,
    rng: np.random.Generator,
    sentinels: np.ndarray,
    modes: Mapping[str, int],
    denoisers: Sequence[str],
) -> tuple[np.ndarray, np.ndarray]:
    """One of the denoisers, each as likely, corrupts the text.

    Args:
      tokens: int [T]; of one token nothing is wanted.
      rng: the source of all randomness.
      sentinels: int, the ids of the first, second ... span.
      modes: the id of each of MODES.
      denoisers: keys of DENOISERS; what is named twice is drawn twice as often.

    Returns:
      given: int [at most that of `lengths`], the mode and what is left of the text.
      wanted: int [likewise], without an end.

    Raises:
      UserError: more spans than sentinels.
    """
    denoiser = DENOISERS[denoisers[int(rng.integers(len(denoisers)))]]
    given, wanted = denoiser.corrupt(tokens, rng, sentinels)
    return np.insert(given, 0, modes[denoiser.mode]), wanted


def roles(sentinels: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
    """Parts the sentinels of a tokenizer: those of spans, and the last three, which stand for MODES.

    Raises:
      UserError: fewer than three.
    """
    corrupt.check_sentinels(len(MODES), sentinels)
    return sentinels[: -len(MODES)], dict(zip(MODES, sentinels[-len(MODES) :].tolist(), strict=True))


def lengths(sizes: np.ndarray, denoisers: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The lengths that `denoise_ul2` gives texts of these sizes at most, which do not fall with size.

    Args:
      sizes: int [...], tokens of each text.
      denoisers: keys of DENOISERS.

    Returns:
      given, with the mode, and wanted: int [...].
    """
    given, wanted, _ = _most(sizes, denoisers)
    return given + 1, wanted


def total(sizes: np.ndarray, denoisers: Sequence[str]) -> np.ndarray:
    """int [...]: the tokens given and wanted together, mode included, of texts of these sizes at most: fewer than
    `lengths` says of each. It does not fall with size."""
    return sizes + 1 + 2 * _most(sizes, denoisers)[2]


def num_sentinels(sizes: np.ndarray, denoisers: Sequence[str]) -> np.ndarray:
    """int [...]: the sentinels that texts of these sizes take at most, modes included; it does not fall with size."""
    return _most(sizes, denoisers)[2] + len(MODES)


def _most(sizes: np.ndarray, denoisers: Sequence[str]) -> np.ndarray:
    each = (choose(DENOISERS, name, 'data.denoisers').lengths(sizes) for name in denoisers)
    return functools.reduce(np.maximum, map(np.stack, each))


DENOISERS: dict[str, SpanDenoiser | SequentialDenoiser] = {  # Tay et al. 2023, table 1
    'r3': SpanDenoiser('r', rate=0.15, mean_span=3),
    'r8': SpanDenoiser('r', rate=0.15, mean_span=8),
    's': SequentialDenoiser(),
    'x3': SpanDenoiser('x', rate=0.5, mean_span=3),
    'x8': SpanDenoiser('x', rate=0.5, mean_span=8),
    'x64': SpanDenoiser('x', rate=0.5, mean_span=64),
    'x64_low': SpanDenoiser('x', rate=0.15, mean_span=64),
}
