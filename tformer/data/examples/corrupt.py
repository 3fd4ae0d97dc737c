"""Corruptions of texts that a model learns to undo: masking, dropped spans, and BART's noise."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from tformer.config.run import Data
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError, choose


@dataclasses.dataclass(frozen=True)
class Noise:
    """The rates, the tokenizer and the random stream of the corruption of one example."""

    data: Data  # holds the rates
    tokenizer: Tokenizer
    key: tuple[int, ...]  # of the random stream, by `noise_key`

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """The source of all randomness; made on first use, because that takes longer than most examples do."""
        return np.random.default_rng(self.key)


def noise_key(
    seed: int, stream: int, part: int, epoch: int, example: int, copies: int | None = None
) -> tuple[int, ...]:
    """Returns the key of the random stream that corrupts one example in one epoch.

    `stream` is the use of the randomness, e.g. `layout.CORRUPT`; `part` is that of the mixture. An example has `copies`
    different corruptions, used in turn: 1 is static masking, and BERT's code makes 10. None draws a new corruption in
    each epoch, which is dynamic masking (Liu et al. 2019, section 4.1).
    """
    return seed, stream, part, epoch if copies is None else epoch % copies, example


# ---------------------------------------------------------------------------------------------------------- masking


def mask_tokens(tokens: np.ndarray, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
    """Applies BERT's masking: of the selected tokens 80 % become the mask, 10 % a random token, and 10 % stay.

    This is drawn for each token by itself, also within a whole word. Special tokens are never selected, nor drawn as
    random ones; the number of selected tokens is rounded as in BERT's code, and at least one. Returns the corrupted
    tokens, int [T], and where the original is to be predicted, bool [T]. Source: Devlin et al. 2019, section 3.1.
    """
    data, tokenizer, rng = noise.data, noise.tokenizer, noise.rng
    places = np.flatnonzero(tokenizer.ordinary[tokens])
    count = min(len(places), max(1, round(data.mask_rate * len(places))))
    chosen = choose(MASK_UNITS, data.mask_unit, 'data.mask_unit')(tokens, places, count, noise)
    fate = rng.random(len(chosen))
    drawn = tokenizer.ordinary_ids[rng.integers(0, len(tokenizer.ordinary_ids), len(chosen))]
    inputs, selected = tokens.copy(), np.zeros(len(tokens), bool)
    selected[chosen] = True
    changed = np.where(fate < 1 - data.mask_keep - data.mask_random, tokenizer.specials.mask, drawn)
    inputs[chosen] = np.where(fate < 1 - data.mask_keep, changed, tokens[chosen])
    return inputs, selected


def _some_words(tokens: np.ndarray, places: np.ndarray, count: int, noise: Noise) -> np.ndarray:
    """Returns the places of whole words, taken in random order; a word that would exceed `count` is passed over.

    If every word is too long, the first one is taken. Source: whole-word masking in BERT's code, May 2019; Cui et
    al. 2021, section 3.1.
    """
    sizes = np.diff(np.flatnonzero(noise.tokenizer.word_starts(tokens)[places]), append=len(places))
    order, left = noise.rng.permutation(len(sizes)).tolist(), count
    taken = []
    for word, size in zip(order, sizes[order].tolist(), strict=True):
        if size <= left:
            taken.append(word)
            left -= size
        if not left:
            break
    picked = np.zeros(len(sizes), bool)
    picked[taken or order[:1]] = True
    return places[np.repeat(picked, sizes)]


# -------------------------------------------------------------------------------------------------- span corruption


def span_counts(sizes: np.ndarray, rate: float = 0.15, mean_span: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many tokens `corrupt_spans` drops from texts of these sizes, and in how many spans.

    Both are int64 [...], and neither decreases with the size. From two tokens on, at least one is dropped and one kept.
    """
    dropped = np.minimum(np.maximum(_rounded(rate * sizes), 1), np.maximum(sizes - 1, 0))
    spans = np.maximum(_rounded(dropped / mean_span), 1)
    return dropped, np.minimum(spans, np.minimum(dropped, sizes - dropped))


def corrupt_spans(
    tokens: np.ndarray, rng: np.random.Generator, sentinels: np.ndarray, rate: float = 0.15, mean_span: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    """Applies T5's corruption: a sentinel replaces each span, and the targets repeat it before the span's tokens.

    A share `rate` of the tokens, int [T], is dropped in spans of `mean_span` tokens on average. All divisions of the
    dropped tokens into spans are equally likely, and so are all positions of spans that do not touch. (The paper's code
    ends every text with a dropped span, so a single span has a fixed position there.) Returns the inputs,
    int [T - dropped + spans], and the targets, int [dropped + spans], both without EOS. More spans than sentinels are a
    `UserError`. Source: Raffel et al. 2020, sections 3.1.4 and 3.3.4.
    """
    dropped, spans = (int(count) for count in span_counts(np.array(len(tokens)), rate, mean_span))
    check_sentinels(spans, sentinels)
    if not spans:
        return tokens.copy(), tokens[:0]
    lengths = np.diff(np.sort(rng.choice(dropped - 1, spans - 1, replace=False)) + 1, prepend=0, append=dropped)
    places = np.sort(rng.choice(len(tokens) - dropped + 1, spans, replace=False))
    hidden = _hidden(len(tokens), places, lengths)
    own = sentinels[:spans].astype(tokens.dtype)
    inputs = np.insert(tokens[~hidden], places, own)
    targets = np.insert(tokens[hidden], np.cumsum(lengths) - lengths, own)
    return inputs, targets


def split_anywhere(tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text [T] at a uniformly random position, with at least one token on both sides (T > 1)."""
    place = rng.integers(1, max(len(tokens), 2))
    return tokens[:place], tokens[place:]


def split_end(tokens: np.ndarray, rng: np.random.Generator, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Cuts off the end of a text [T], of uniformly random length from 1 to `longest_end`: rate * T on average."""
    most = int(longest_end(np.array(len(tokens)), rate))
    place = len(tokens) - int(rng.integers(1, most + 1)) if most else len(tokens)
    return tokens[:place], tokens[place:]


def longest_end(sizes: np.ndarray, rate: float) -> np.ndarray:
    """Returns the most tokens that `split_end` cuts off texts of these sizes, which keep one at least: int64 [...]."""
    return np.minimum(np.maximum(_rounded(2 * rate * sizes) - 1, 1), np.maximum(sizes - 1, 0))


def check_sentinels(needed: int, sentinels: np.ndarray) -> None:
    """Raises a `UserError` if an example needs more sentinels than there are."""
    if needed > len(sentinels):
        raise UserError(
            f'train.objective needs {needed} sentinels for one example, and the tokenizer has {len(sentinels)}: '
            f'data.sentinels={needed}, a shorter data.length or longer spans (data.mean_span_length, data.denoisers)'
        )


def _hidden(size: int, places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Marks the tokens in spans: bool [size]. Span i has lengths[i] tokens, after places[i] kept tokens."""
    hidden = np.zeros(size, bool)
    hidden[np.repeat(places, lengths) + np.arange(lengths.sum())] = True
    return hidden


def _rounded(numbers: np.ndarray) -> np.ndarray:
    return np.rint(numbers).astype(np.int64)


# -------------------------------------------------------------------------------------------------------- denoising


def infill_counts(sizes: np.ndarray, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many tokens `infill` hides in texts of these sizes, and the most masks for them: int64 [...]."""
    hidden = np.minimum(_rounded(data.infill_rate * sizes), sizes)
    most = np.maximum(2 * _rounded(hidden / data.mean_span_length), 1)
    return hidden, np.minimum(np.where(hidden > 0, most, 0), sizes - hidden + 1)


def infill(tokens: np.ndarray, noise: Noise) -> np.ndarray:
    """Applies BART's text infilling: one mask replaces each span of Poisson length; a span of length 0 inserts a mask.

    Spans are drawn until they hide their share of the tokens; the last one is cut to it. There are at most twice as
    many as are needed on average, so that the length has a bound; if these hide too little, the last one is longer.
    A text of T tokens becomes int [T - hidden + masks], see `infill_counts`; no two masks are adjacent.
    """
    hidden, most = (int(count) for count in infill_counts(np.array(len(tokens)), noise.data))
    if not hidden:
        return tokens.copy()
    stops = np.minimum(np.cumsum(noise.rng.poisson(noise.data.mean_span_length, most)), hidden)
    stops[-1] = hidden
    lengths = np.diff(stops[: int(np.argmax(stops == hidden)) + 1], prepend=0)
    places = np.sort(noise.rng.choice(len(tokens) - hidden + 1, len(lengths), replace=False))
    return np.insert(tokens[~_hidden(len(tokens), places, lengths)], places, noise.tokenizer.specials.mask)


def replace_by_mask(tokens: np.ndarray, noise: Noise) -> np.ndarray:
    """Applies BART's token masking: a share of the tokens [T] becomes the mask."""
    inputs, count = tokens.copy(), round(noise.data.mask_rate * len(tokens))
    inputs[noise.rng.choice(len(tokens), count, replace=False)] = noise.tokenizer.specials.mask
    return inputs


def delete_tokens(tokens: np.ndarray, noise: Noise) -> np.ndarray:
    """Applies BART's token deletion: a share of the tokens [T] is left out, without a mark."""
    count = round(noise.data.delete_rate * len(tokens))
    return np.delete(tokens, noise.rng.choice(len(tokens), count, replace=False))


def permute_sentences(tokens: np.ndarray, noise: Noise) -> np.ndarray:
    """Applies BART's sentence permutation to a text [T]; of adjacent tokens that end a sentence, the last one does."""
    ends = noise.tokenizer.sentence_ends[tokens]
    sentences = np.split(tokens, np.flatnonzero(ends[:-1] & ~ends[1:]) + 1)
    return np.concatenate([sentences[index] for index in noise.rng.permutation(len(sentences))])


def rotate(tokens: np.ndarray, noise: Noise) -> np.ndarray:
    """Applies BART's document rotation: the text [T] starts at a random token, and the tokens before it come last."""
    return np.roll(tokens, -noise.rng.integers(max(len(tokens), 1)))


@dataclasses.dataclass(frozen=True)
class Corruption:
    """One kind of noise: int [T] -> int [at most longest(T)]; `longest` does not decrease with T."""

    corrupt: Callable[[np.ndarray, Noise], np.ndarray]
    longest: Callable[[np.ndarray, Data], np.ndarray] = lambda sizes, data: sizes
    fields: tuple[str, ...] = ()  # the fields of config.data that it reads


def _longest_infilled(sizes: np.ndarray, data: Data) -> np.ndarray:
    hidden, masks = infill_counts(sizes, data)
    return sizes - hidden + masks


MASK_UNITS: dict[str, Callable[[np.ndarray, np.ndarray, int, Noise], np.ndarray]] = {
    'token': lambda tokens, places, count, noise: noise.rng.choice(places, count, replace=False),
    'word': _some_words,
}

NOISES = {  # Lewis et al. 2020, section 2.2
    'mask': Corruption(replace_by_mask, fields=('mask_rate',)),
    'delete': Corruption(
        delete_tokens, lambda sizes, data: sizes - _rounded(data.delete_rate * sizes), ('delete_rate',)
    ),
    'infill': Corruption(infill, _longest_infilled, ('infill_rate', 'mean_span_length')),
    'permute': Corruption(permute_sentences),
    'rotate': Corruption(rotate),
}
