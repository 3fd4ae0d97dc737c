"""The examples of a split, and the arrays of one example under each format: model inputs, targets and weights."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tformer.data.examples import corrupt, denoisers, infilling, sentences
from tformer.data.examples.corrupt import Noise
from tformer.data.examples.pieces import Pieces, Spans
from tformer.data.examples.special_tokens import Fields, SpecialTokenTemplate
from tformer.data.ragged import Ragged

OF_ROWS = ('labels', 'label_weights', 'segment_weights', 'segment_keys')  # arrays that belong to whole rows


@dataclasses.dataclass(frozen=True)
class Examples:
    """The N examples of a split: `record, start, stop = spans[i]`, and example i is tokens `start:stop` of that record.

    Where the end is predicted, these are positions in the predicted tokens t1..tn EOS.
    """

    columns: Mapping[str, Ragged]  # the columns of the format's encoding, with a row for each record
    template: SpecialTokenTemplate
    spans: Spans | Pieces
    num_dropped: int  # records left out because they are too long
    num_truncated: int  # records that were cut
    num_skipped: int  # bad records left out
    fingerprint: str  # of the tokenised records

    def __len__(self) -> int:
        return len(self.spans)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The most positions that each example takes in a row of each stack, int64 [N, stacks], all in memory."""
        return self.spans.lengths_of(np.arange(len(self)))

    def fullest(self) -> tuple[int, int]:
        """Returns the most texts that an example keeps apart in its row, and the first example of so many."""
        if 'ends' not in self.columns:
            return 1, 0
        assert isinstance(self.spans, Spans)
        texts = self.columns['ends'].lengths[self.spans.record]
        return int(texts.max()), int(texts.argmax())

    def texts(self, index: int) -> list[np.ndarray]:
        """Returns the tokens of each of an example's texts, cut to its end."""
        texts = np.split(self.of('tokens', index), self.of('ends', index)[:-1])
        return [text[: self.spans[index][2]] for text in texts]

    def of(self, column: str, index: int) -> np.ndarray:
        """Returns the row of a column that belongs to the record of an example."""
        return self.columns[column][self.spans[index][0]]

    def cut(self, index: int) -> tuple[np.ndarray, int, int]:
        """Returns the tokens of the record of an example, and its first one and the one after its last."""
        record, start, stop = self.spans[index]
        return self.columns['tokens'][record], start, stop


def next_token(examples: Examples, index: int, noise: Noise) -> Fields:
    """BOS t1..tn -> t1..tn EOS, or a piece of it; a later piece starts with the last target of the piece before.

    With data.start=() it is t1..tn -> t2..tn EOS: no token stands before the first one, which is not predicted.
    """
    tokens, start, stop = examples.cut(index)
    piece = tokens[max(start - 1, 0) : stop]
    whole = np.empty(stop - start + 1, np.int32)
    whole[int(start == 0) :][: len(piece)] = piece
    if start == 0:
        (whole[0],) = examples.template.front
    if stop > len(tokens):
        whole[-1] = examples.template.specials.eos
    return {'inputs': whole[:-1], 'targets': whole[1:], 'weights': np.ones(stop - start, np.float32)}


def converse(examples: Examples, index: int, noise: Noise) -> Fields:
    """A chat, whose template has written all special tokens: t1..tn-1 -> t2..tn, scored at those of the assistant."""
    tokens, _, stop = examples.cut(index)
    whole, scored = tokens[:stop].astype(np.int32), examples.of('scored', index)[:stop]
    return {'inputs': whole[:-1], 'targets': whole[1:], 'weights': scored[1:].astype(np.float32)}


def translate(examples: Examples, index: int, noise: Noise) -> Fields:
    """The target, given the source. A truncated target has no EOS, so that the model does not learn to stop there."""
    tokens, _, stop = examples.cut(index)
    wanted, lengths = tokens[:stop], examples.lengths[index]
    beside = examples.template.beside()
    given = lengths[0] - beside[0] - stop if len(lengths) == 1 else lengths[1] - beside[1]
    return examples.template.write(examples.of('sources', index)[:given], wanted, ended=stop > len(tokens))


def unmask(examples: Examples, index: int, noise: Noise) -> Fields:
    """A corrupted text -> the original, scored at the selected tokens."""
    return _masked(examples.template.read(_piece(examples, index)), noise)


def unmask_next(examples: Examples, index: int, noise: Noise) -> Fields:
    """Two corrupted sentences -> the originals, and whether the second follows the first in a text."""

    def other() -> np.ndarray:
        own = examples.spans.of_record(examples.spans[index][0])
        return _piece(examples, sentences.another(own, len(examples), noise.rng))

    pair = sentences.next_sentence(_piece(examples, index), noise.tokenizer.sentence_ends, noise.rng, other)
    return _masked_pair(examples, *pair, noise)


def unmask_order(examples: Examples, index: int, noise: Noise) -> Fields:
    """Two corrupted adjacent sentences -> the originals, and whether they are in order."""
    pair = sentences.sentence_order(_piece(examples, index), noise.tokenizer.sentence_ends, noise.rng)
    return _masked_pair(examples, *pair, noise)


def classify(examples: Examples, index: int, noise: Noise) -> Fields:
    """One or two texts, and their class or number."""
    (label,) = examples.of('label', index)
    tokens, _, stop = examples.cut(index)
    first, second = _shortened(tokens, examples.of('second_text', index), stop, len(examples.template.between))
    return {**examples.template.read(first, second), 'labels': label, 'label_weights': np.float32(1)}


def compare(examples: Examples, index: int, noise: Noise) -> Fields:
    """Several texts, and for each a `segment_keys`, 64 bits, which only texts of the same tokens share."""
    return _compared(examples, examples.texts(index))


def compare_twice(examples: Examples, index: int, noise: Noise) -> Fields:
    """As `compare`, of a text and itself (Gao et al. 2021, section 3)."""
    return _compared(examples, examples.texts(index) * 2)


def _compared(examples: Examples, texts: Sequence[np.ndarray]) -> Fields:
    keys = [hashlib.blake2b(text.tobytes(), digest_size=8).digest() for text in texts]
    return {
        **side_by_side(map(examples.template.read, texts)),
        'segment_keys': np.frombuffer(b''.join(keys), np.int32).reshape(-1, 2),
        'label_weights': np.float32(1),
    }


def compare_scored(examples: Examples, index: int, noise: Noise) -> Fields:
    """Two texts, and the cosine that they should have: data.label_range as [0, 1], or where it has numbers below 0 as
    [-1, 1]."""
    (label,) = examples.of('label', index)
    low, high = noise.data.label_range or (-1.0, 1.0)
    least = -1 if low < 0 else 0
    cosine = least + (1 - least) * (label - low) / (high - low)
    texts = side_by_side(map(examples.template.read, examples.texts(index)))
    return {**texts, 'labels': np.float32(cosine), 'label_weights': np.float32(1)}


def choose(examples: Examples, index: int, noise: Noise) -> Fields:
    """A context with each of its choices, and the number of the right one (Devlin et al. 2019, section 4.4)."""
    (label,), context, stop = examples.of('label', index), examples.of('second_text', index), examples.spans[index][2]
    between = len(examples.template.between)
    pairs = [_shortened(context, choice, stop, between) for choice in examples.texts(index)]
    return {
        **side_by_side(examples.template.read(*pair) for pair in pairs),
        'labels': label,
        'label_weights': np.float32(1),
    }


def prefer(examples: Examples, index: int, noise: Noise) -> Fields:
    """A prompt with the chosen answer, and with the rejected one; the answers are scored. Of a long prompt the end is
    kept. A truncated answer has no EOS."""
    tokens, _, stop = examples.cut(index)
    prompt, chosen, _, rejected = np.split(tokens, examples.of('ends', index)[:-1])
    answers = [
        examples.template.proceed(prompt[max(len(prompt) - stop, 0) :], answer[:stop], ended=len(answer) <= stop)
        for answer in (chosen, rejected)
    ]
    return {**side_by_side(answers), 'label_weights': np.float32(1)}


def side_by_side(texts: Iterable[Fields]) -> Fields:
    """Returns the arrays of a row of K texts that do not see each other: `segment_ids` count them from 1, and positions
    start at 0 in each. `segment_weights` [K] are 1, and 0 where a row of the batch has fewer texts than another."""
    parts = list(texts)
    sizes = [len(part['inputs']) for part in parts]
    return {
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        'positions': np.concatenate(list(map(np.arange, sizes)), dtype=np.int32),
        'segment_ids': np.repeat(np.arange(1, len(parts) + 1, dtype=np.int32), sizes),
        'segment_weights': np.ones(len(parts), np.float32),
    }


def tag(examples: Examples, index: int, noise: Noise) -> Fields:
    """Words and their tags; each tag is at the first token of its word."""
    tokens, _, stop = examples.cut(index)
    fields = examples.template.read(tokens[:stop])
    words, tags = examples.of('words', index)[:stop], examples.of('tags', index)
    targets, weights = np.zeros(len(fields['inputs']), np.int32), np.zeros(len(fields['inputs']), np.float32)
    places = np.flatnonzero(words >= 0)
    first = len(examples.template.front)
    targets[places + first], weights[places + first] = tags[words[places]], 1
    return {**fields, 'targets': targets, 'weights': weights}


def find_answer(examples: Examples, index: int, noise: Noise) -> Fields:
    """A question and a window of its context.

    `labels` are the first and the last token of the answer, both 0 if it is not in the window. `weights` mark the
    positions that a label may have: the context, and position 0.
    """
    tokens, start, stop = examples.cut(index)
    question = examples.of('second_text', index)[: noise.data.question_length]
    fields = examples.template.read(question, tokens[start:stop])
    first = len(examples.template.front) + len(question) + len(examples.template.between)
    place = np.arange(len(fields['inputs']))
    answer = examples.of('answer', index)
    inside = len(answer) > 0 and start <= answer[0] and answer[1] < stop
    labels = answer - start + first if inside else np.zeros(2)
    return {
        **fields,
        'weights': ((place == 0) | ((place >= first) & (place < first + stop - start))).astype(np.float32),
        'labels': labels.astype(np.int32),
        'label_weights': np.float32(1),
    }


def continue_prefix(examples: Examples, index: int, noise: Noise) -> Fields:
    """As `next_token`, but a prefix of random length, from 1 to all inputs, is given; the tokens after it are scored.

    With data.bidirectional_prefix every position sees the whole prefix.
    """
    fields = next_token(examples, index, noise)
    size = int(noise.rng.integers(1, len(fields['inputs']) + 1))
    place = np.arange(len(fields['inputs']))
    fields['weights'] = (place >= size - 1).astype(np.float32)
    return {**fields, 'prefix': place < size} if noise.data.bidirectional_prefix else fields


def continue_text(examples: Examples, index: int, noise: Noise) -> Fields:
    """The rest of a text, given its beginning of random length, from one token to all but one."""
    return examples.template.write(*corrupt.split_anywhere(_piece(examples, index), noise.rng))


def fill_spans(examples: Examples, index: int, noise: Noise) -> Fields:
    """Each sentinel and its span, given the text with sentinels in place of the spans."""
    text, sentinels, data = _piece(examples, index), noise.tokenizer.sentinels, noise.data
    pair = corrupt.corrupt_spans(text, noise.rng, sentinels, data.mask_rate, data.mean_span_length)
    return examples.template.write(*pair)


def denoise(examples: Examples, index: int, noise: Noise) -> Fields:
    """A text, given a corruption of it."""
    given = wanted = _piece(examples, index)
    for kind in noise.data.noise:
        given = corrupt.NOISES[kind].corrupt(given, noise)
    return examples.template.write(given, wanted)


def denoise_as_ul2(examples: Examples, index: int, noise: Noise) -> Fields:
    """As `fill_spans` or `continue_text`, by one of data.denoisers; the given text starts with its mode."""
    return examples.template.write(*denoisers.denoise_ul2(_piece(examples, index), noise))


def fill_middle(examples: Examples, index: int, noise: Noise) -> Fields:
    """A text in the order prefix, suffix, middle, EOS, or left as it is: all of it is scored.

    A text that stays has EOS where its record ends, or if it is one token.
    """
    tokens, start, stop = examples.cut(index)
    piece = tokens[start:stop].astype(np.int32)
    arranged = infilling.rearranged(piece, noise)
    if arranged is not None:
        return examples.template.proceed(piece[:0], arranged)
    return examples.template.proceed(piece[:0], piece, ended=stop == len(tokens) or len(piece) == 1)


def _piece(examples: Examples, index: int) -> np.ndarray:
    tokens, start, stop = examples.cut(index)
    return tokens[start:stop].astype(np.int32)


def _masked(fields: Fields, noise: Noise) -> Fields:
    inputs, selected = corrupt.mask_tokens(fields['inputs'], noise)
    return {**fields, 'inputs': inputs, 'targets': fields['inputs'], 'weights': selected.astype(np.float32)}


def _masked_pair(examples: Examples, first: np.ndarray, second: np.ndarray, label: int, noise: Noise) -> Fields:
    fields = _masked(examples.template.read(first, second), noise)
    return {**fields, 'labels': np.int32(label), 'label_weights': np.float32(1)}


def _shortened(first: np.ndarray, second: np.ndarray, size: int, between: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts two texts to `size` tokens together, `between` of which separate them; the longer text is cut first."""
    if not len(second):
        return first[:size], second
    room = max(size - between, 0)
    shorter = min(len(first), len(second), room // 2)
    longer = room - shorter
    return (first[:shorter], second[:longer]) if len(first) < len(second) else (first[:longer], second[:shorter])
