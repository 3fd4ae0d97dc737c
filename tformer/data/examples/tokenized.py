"""The columns of a split: its texts as tokens and its labels as ids, kept in the cache by their contents."""

import collections
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer.config import hashing, mixtures
from tformer.config.run import Config
from tformer.data import cache, ragged
from tformer.data.ragged import Ragged
from tformer.data.sources.records import Bad, BadRecord, Record, Split, text_of
from tformer.data.sources.token_files import Tokens
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError, nearest

_AT_ONCE = 2000  # records that are tokenised together,
_TEXT_AT_ONCE = 1 << 22  # unless their texts have so many characters before
_KEY_NAMES = {'second_text': 'others'}  # former names of columns: with them old checkpoints know their data again

Rows = Sequence[Sequence[float]]


class Encoded(NamedTuple):
    """Some records as numbers."""

    columns: dict[str, Rows]  # a row for each record, by the name of the column
    bad: dict[int, str]  # index of a bad record -> the reason; its rows may hold anything


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How records of one form become columns."""

    name: str  # in the cache's key
    texts: Mapping[str, str]  # the columns of token ids, each with the field that it encodes
    others: Callable[[Sequence[Record], Tokenizers], Encoded] | None = None  # makes columns that `texts` alone do not
    whole: tuple[str, ...] = ()  # the other columns of whole numbers
    real: tuple[str, ...] = ()  # the columns of real numbers

    def encode(self, records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
        """Returns the columns of some records; a text that a record lacks is empty."""
        columns, bad = self.others(records, tokenizers) if self.others else Encoded({}, {})
        for column, field in self.texts.items():
            if column not in columns:
                side = tokenizers.source if column == 'sources' else None
                columns[column] = (side or tokenizers.target).encode_batch(
                    [text_of(record, field) for record in records]
                )
        return Encoded(columns, bad)


class Columns(NamedTuple):
    """The columns of a split."""

    by_name: dict[str, Ragged]  # a row for each record, without special tokens
    bad: np.ndarray  # int, the indices of the records that data.bad_lines skips
    skipped: int  # records that the source itself skipped
    fingerprint: str  # of all columns


def columns(
    config: Config, tokenizers: Tokenizers, encoding: Encoding, records: Sequence[Record], split: str
) -> Columns:
    """Returns the columns of records. Those of a `Split` are kept in the cache.

    Raises:
      UserError: a record is bad and data.bad_lines is stop; the message says where the record is.
    """
    sizes = [side.vocab_size for side in (tokenizers.target, tokenizers.source) if side]
    dtypes: dict[str, Any] = dict.fromkeys(encoding.texts, np.uint16 if max(sizes) <= 2**16 else np.int32)
    dtypes |= dict.fromkeys(encoding.whole, np.int32) | dict.fromkeys(encoding.real, np.float32)
    bad: list[int] = []

    def pieces() -> Iterator[tuple[str, np.ndarray]]:
        """Yields the pieces of the flat arrays of all columns, each with the name of its array."""
        ends, rule = dict.fromkeys(dtypes, 0), Bad(config.data.bad_lines)
        for name, dtype in dtypes.items():
            yield f'{name}.ids', np.zeros(0, dtype)
            yield f'{name}.offsets', np.zeros(1, np.int64)
        for start, some in _some(records):
            encoded = encoding.encode(some, tokenizers)
            for place, why in sorted(encoded.bad.items()):
                rule.found(some[place].get('where', f'record {start + place + 1} of the {split} split'), why)
                bad.append(start + place)
            for name, dtype in dtypes.items():
                own = encoded.columns[name]
                offsets = ends[name] + np.cumsum([len(row) for row in own])
                ends[name] = int(offsets[-1])
                yield f'{name}.ids', np.concatenate([np.asarray(row, dtype) for row in own])
                yield f'{name}.offsets', offsets

    if isinstance(records, Split) and records.of_tokens:
        return _of_tokens(config, tokenizers, encoding, records)
    if isinstance(records, Split):

        def write(writer: cache.Writer) -> None:
            for name, values in pieces():
                writer.append(name, values)
            writer.facts |= {'skipped': records.skipped, 'bad': bad}

        depends_on = {
            'columns': [encoding.name, *(_KEY_NAMES.get(name, name) for name in dtypes)],
            'tokenizers': tokenizers.fingerprint,
            'split': records.fingerprint,
            'bad_lines': config.data.bad_lines,
        }
        check = functools.partial(_check, dtypes)
        arrays, facts = cache.arrays(cache.directory(config.data), depends_on, write, check)
        digest = hashing.digest_json(depends_on, size=8)
    else:
        held = collections.defaultdict(list)
        for name, values in pieces():
            held[name].append(values)
        arrays, facts = {name: np.concatenate(values) for name, values in held.items()}, {'skipped': 0, 'bad': bad}
        digest = hashing.digest_bytes(*arrays.values(), size=8)
    by_name = {name: Ragged(arrays[f'{name}.ids'], arrays[f'{name}.offsets']) for name in dtypes}
    return Columns(by_name, np.array(facts['bad'], np.int64), facts['skipped'], digest)


def _of_tokens(config: Config, tokenizers: Tokenizers, encoding: Encoding, records: Split) -> Columns:
    """Returns the tokens of documents that are in token files, where they are."""
    if encoding != TEXT:
        raise UserError(f'data.path names files of tokens, and train.objective={config.train.objective} needs texts')
    assert isinstance(records.contents, Tokens)
    digest = [tokenizers.fingerprint, records.fingerprint]
    lender = config.data.tokenizer_from
    sets = [path for part in mixtures.parts(config.data) for path in part.path]
    documents = records.contents.of_tokenizer(tokenizers.target, lender if lender in sets else None)
    return Columns({'tokens': documents}, np.zeros(0, np.int64), 0, hashing.digest_json(digest, size=8))


def _check(dtypes: Mapping[str, Any], arrays: cache.Arrays, facts: cache.Facts) -> None:
    """Raises a `ValueError` unless an entry of the cache holds columns of these dtypes, a row for each record."""
    for name, dtype in dtypes.items():
        ragged.check(arrays[f'{name}.ids'], arrays[f'{name}.offsets'], dtype)
    rows = {len(arrays[f'{name}.offsets']) - 1 for name in dtypes}
    counted = all(type(number) is int and number >= 0 for number in (facts['skipped'], *facts['bad']))
    if len(rows) > 1 or not counted or max(facts['bad'], default=-1) >= min(rows):
        raise ValueError('its columns and facts do not describe the same records')


def _some(records: Sequence[Record]) -> Iterator[tuple[int, list[Record]]]:
    """Yields (index of the first, some records) in order, and prints progress if it takes long."""
    last_line, done, in_order = time.monotonic(), 0, iter(records)
    while some := list(_beginning(in_order)):
        yield done, some
        done += len(some)
        if time.monotonic() > last_line + 10:
            last_line = time.monotonic()
            print(f'tokenised {done:,} of {len(records):,} records', file=sys.stderr, flush=True)


def _beginning(records: Iterator[Record]) -> Iterator[Record]:
    """Yields as many records as are tokenised together."""
    size = 0
    for record in itertools.islice(records, _AT_ONCE):
        yield record
        size += sum(len(value) for value in record.values() if isinstance(value, str))
        if size >= _TEXT_AT_ONCE:
            return


# ---------------------------------------------------------------------------------------------------------- encodings


def chats(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """Encodes chats as `tokens`, special ones included, and which of them the assistant writes as `scored`."""
    columns: dict[str, list[Sequence[float]]] = {'tokens': [], 'scored': []}
    bad: dict[int, str] = {}
    for place, record in enumerate(records):
        try:
            tokens, scored = tokenizers.chat.encode(record['messages'], tokenizers.target)
        except BadRecord as error:
            tokens, scored, bad[place] = [], np.zeros(0), str(error)
        if not scored[1:].any():
            bad.setdefault(place, 'the chat template writes no token of the assistant after others')
        columns['tokens'].append(tokens)
        columns['scored'].append(scored.astype(int).tolist())
    return Encoded(dict(columns), bad)


def classes(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """Encodes the class of one or two texts as the id `label`."""
    ids = {name: index for index, name in enumerate(tokenizers.labels)}
    bad = {place: _unknown(record['label'], ids) for place, record in enumerate(records) if record['label'] not in ids}
    labels = [[ids.get(record['label'], 0)] for record in records]
    return Encoded({'label': labels}, bad)


def numbers(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """Returns the number of one or two texts as `label`."""
    return Encoded({'label': [[record['label']] for record in records]}, {})


def tagged(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """Encodes words as `tokens`, the index of the word that each token begins (else -1) as `words`, and their `tags`.

    Only the first token of a word is tagged (Devlin et al. 2019, section 5.3).
    """
    ids = {name: index for index, name in enumerate(tokenizers.labels)}
    columns: dict[str, list[Sequence[float]]] = {'tokens': [], 'words': [], 'tags': []}
    bad: dict[int, str] = {}
    words = [list(map(tokenizers.target.normalize, record['tokens'])) for record in records]
    sentences = tokenizers.target.encode_with_offsets(list(map(' '.join, words)))
    for place, (record, (tokens, starts, stops)) in enumerate(zip(records, sentences, strict=True)):
        unknown = next((tag for tag in record['tags'] if tag not in ids), None)
        if unknown is not None:
            bad[place] = _unknown(unknown, ids, 'tag')
        columns['words'].append(_first_of_words(words[place], np.array(starts), np.array(stops)).tolist())
        columns['tokens'].append(tokens)
        columns['tags'].append([ids.get(tag, 0) for tag in record['tags']])
    return Encoded(dict(columns), bad)


def _first_of_words(words: Sequence[str], starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Returns the index of the word that each token is the first of, else -1: int [T].

    `starts` and `stops`, int [T], are the characters of each token in the words joined by spaces.
    """
    spaces = np.cumsum([len(word) + 1 for word in words]) - 1  # after each word
    last = np.maximum(stops - 1, starts)
    word = np.searchsorted(spaces, last)
    inside = np.flatnonzero(spaces[np.minimum(word, len(spaces) - 1)] != last)
    first_of, first = np.unique(word[inside], return_index=True)
    words_begun = np.full(len(starts), -1)
    words_begun[inside[first]] = first_of
    return words_begun


def answers(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """Encodes the context as `tokens`, and the first and last token of the first answer, if there is one, as `answer`.
    `begins` and `ends` are the characters of each token in the normalised context."""
    columns: dict[str, list[Sequence[float]]] = {'tokens': [], 'begins': [], 'ends': [], 'answer': []}
    contexts = tokenizers.target.encode_with_offsets([record['context'] for record in records])
    for record, (tokens, begins, ends) in zip(records, contexts, strict=True):
        answer: list[int] = []
        if record['answers']:
            start, text = record['answers'][0]
            before = record['context'][:start]
            first, stop = (len(tokenizers.target.normalize(read)) for read in (before, before + text))
            inside = np.flatnonzero((np.array(ends) > first) & (np.array(begins) < stop))
            answer = [int(inside[0]), int(inside[-1])] if len(inside) else []
        for name, row in zip(columns, (tokens, begins, ends, answer), strict=True):
            columns[name].append(row)
    return Encoded(dict(columns), {})


def several(field: str, records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """Encodes the texts in a field of each record as `tokens`, one after the other, and where each of them stops as
    `ends`. The `label` of records that have one is a number."""
    texts = [[text] if isinstance(text := record[field], str) else text for record in records]
    encoded = iter(tokenizers.target.encode_batch(list(itertools.chain(*texts))))
    rows = [list(itertools.islice(encoded, len(own))) for own in texts]
    ends = [list(itertools.accumulate(map(len, row))) for row in rows]
    labels = [[record['label']] if 'label' in record else [] for record in records]
    return Encoded({'tokens': [list(itertools.chain(*row)) for row in rows], 'ends': ends, 'label': labels}, {})


def _unknown(label: str, known: Iterable[str], what: str = 'label') -> str:
    return f'{what} {label!r} has no training example{nearest(label, list(known))}'


_TWO_TEXTS = {'tokens': 'text', 'second_text': 'pair'}
_QUESTION = {'second_text': 'question', 'tokens': 'context'}

TEXT = Encoding('running_text', {'tokens': 'text'})
PAIRS = Encoding('pairs', {'sources': 'source', 'tokens': 'target'})
CHATS = Encoding('chats', {'tokens': 'messages'}, chats, whole=('scored',))
CLASSES = Encoding('classes', _TWO_TEXTS, classes, whole=('label',))
NUMBERS = Encoding('numbers', _TWO_TEXTS, numbers, real=('label',))
TAGGED = Encoding('tagged', {'tokens': 'tokens'}, tagged, whole=('words', 'tags'))
TEXTS = Encoding('texts', {'tokens': 'texts'}, functools.partial(several, 'texts'), whole=('ends',))
SCORED = Encoding('scored', {'tokens': 'texts'}, functools.partial(several, 'texts'), whole=('ends',), real=('label',))
CHOICES = Encoding(
    'choices', {'tokens': 'choices', 'second_text': 'context'}, functools.partial(several, 'choices'),
    whole=('ends', 'label'),
)  # fmt: skip
PREFERENCES = dataclasses.replace(TEXTS, name='preferences')
SINGLE = Encoding('single', {'tokens': 'text'}, functools.partial(several, 'text'), whole=('ends',))
ANSWERS = Encoding('answers', _QUESTION, answers, whole=('begins', 'ends', 'answer'))
