"""A split as columns of numbers: its texts tokenised, its labels as ids. Kept in the cache by their contents."""

import dataclasses
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tformer.config.run import Config
from tformer.data import cache
from tformer.data.ragged import Ragged
from tformer.data.sources.records import Bad, Record, Split
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import nearest

_AT_ONCE = 2000  # records that are tokenised together
_KEY_NAMES = {'second_text': 'others'}  # former names of columns: with them old checkpoints know their data again

Rows = Sequence[Sequence[float]]


class Encoded(NamedTuple):
    """Some records as numbers.

    Attributes:
      columns: name -> a row for each record.
      bad: what is wrong with records that cannot be used, by their places; their rows may hold anything.
    """

    columns: dict[str, Rows]
    bad: dict[int, str]


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How records of a kind become columns."""

    encode: Callable[[Sequence[Record], Tokenizers], Encoded]
    texts: Mapping[str, str]  # columns of ids of the vocabulary, each with the field that it is of
    whole: tuple[str, ...] = ()  # of other whole numbers
    real: tuple[str, ...] = ()  # of real numbers


class Columns(NamedTuple):
    """The columns of a split.

    Attributes:
      by_name: a row for each record, without special tokens.
      bad: int [bad records], the places of those that data.bad_lines skips.
      skipped: records that the source itself skipped.
      fingerprint: of all of it.
    """

    by_name: dict[str, Ragged]
    bad: np.ndarray
    skipped: int
    fingerprint: str


def columns(
    config: Config, tokenizers: Tokenizers, encoding: Encoding, records: Sequence[Record], split: str
) -> Columns:
    """Returns the columns of records, those of a `Split` from the cache where they are there.

    Raises:
      UserError: a record that cannot be used, where data.bad_lines stops at it; the line says where it stands.
    """
    sizes = [side.vocab_size for side in (tokenizers.target, tokenizers.source) if side]
    dtypes: dict[str, Any] = dict.fromkeys(encoding.texts, np.uint16 if max(sizes) <= 2**16 else np.int32)
    dtypes |= dict.fromkeys(encoding.whole, np.int32) | dict.fromkeys(encoding.real, np.float32)
    names = list(dtypes)

    def chunks() -> Iterator[tuple[Encoded, list[int]]]:
        bad = Bad(config.data.bad_lines)
        for start, some in _some(records):
            encoded = encoding.encode(some, tokenizers)
            for place, why in sorted(encoded.bad.items()):
                bad.found(some[place].get('where', f'record {start + place + 1} of the {split} split'), why)
            yield encoded, [start + place for place in sorted(encoded.bad)]

    if not isinstance(records, Split):
        rows: dict[str, list[Sequence[float]]] = {name: [] for name in names}
        bad: list[int] = []
        for encoded, places in chunks():
            bad += places
            for name in names:
                rows[name] += encoded.columns[name]
        made = {name: Ragged.of(rows[name], 'f' if name in encoding.real else 'i') for name in names}
        digest = _digest(*(values for column in made.values() for values in (column.flat, column.offsets)))
        return Columns(made, np.array(bad, np.int64), 0, digest)

    def write(writer: cache.Writer) -> None:
        ends, bad = dict.fromkeys(names, 0), []
        for name in names:
            writer.append(f'{name}.ids', np.zeros(0, dtypes[name]))
            writer.append(f'{name}.offsets', np.zeros(1, np.int64))
        for encoded, places in chunks():
            bad += places
            for name in names:
                own = encoded.columns[name]
                offsets = ends[name] + np.cumsum([len(row) for row in own])
                ends[name] = int(offsets[-1])
                writer.append(f'{name}.ids', np.concatenate([np.asarray(row, dtypes[name]) for row in own]))
                writer.append(f'{name}.offsets', offsets)
        writer.facts |= {'skipped': records.skipped, 'bad': bad}

    depends_on: dict[str, Any] = {
        'columns': [encoding.encode.__name__, *(_KEY_NAMES.get(name, name) for name in names)],
        'tokenizers': tokenizers.fingerprint,
        'split': records.fingerprint,
        'bad_lines': config.data.bad_lines,
    }
    found, facts = cache.arrays(cache.directory(config.data), depends_on, write)
    made = {name: Ragged(found[f'{name}.ids'], found[f'{name}.offsets']) for name in names}
    digest = _digest(json.dumps(depends_on, sort_keys=True).encode())
    return Columns(made, np.array(facts['bad'], np.int64), facts['skipped'], digest)


def _some(records: Sequence[Record]) -> Iterator[tuple[int, list[Record]]]:
    """(place of the first, some records) in order; says how far it is if it takes long."""
    since, done, in_order = time.monotonic(), 0, iter(records)
    while some := list(itertools.islice(in_order, _AT_ONCE)):
        yield done, some
        done += len(some)
        if time.monotonic() > since + 10:
            since = time.monotonic()
            print(f'tokenised {done:,} of {len(records):,} records', file=sys.stderr, flush=True)


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------- encodings


def running_text(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """`tokens` of the text."""
    return Encoded({'tokens': tokenizers.target.encode_batch([record['text'] for record in records])}, {})


def pairs(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """`tokens` of the target and `sources`."""
    assert tokenizers.source is not None
    targets = tokenizers.target.encode_batch([record['target'] for record in records])
    return Encoded(
        {'tokens': targets, 'sources': tokenizers.source.encode_batch([record['source'] for record in records])}, {}
    )


def _texts(records: Sequence[Record], tokenizers: Tokenizers) -> dict[str, Rows]:
    """`tokens` of the text and `second_text` of the second one, of which there may be none."""
    encode = tokenizers.target.encode_batch
    second_texts = encode([record.get('pair', '') for record in records])
    return {'tokens': encode([record['text'] for record in records]), 'second_text': second_texts}


def classes(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """A text, or two, and the id of their `label`."""
    ids = {name: index for index, name in enumerate(tokenizers.labels)}
    bad = {place: _unknown(record['label'], ids) for place, record in enumerate(records) if record['label'] not in ids}
    labels = [[ids.get(record['label'], 0)] for record in records]
    return Encoded({**_texts(records, tokenizers), 'label': labels}, bad)


def numbers(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """A text, or two, and the number that is their `label`."""
    return Encoded({**_texts(records, tokenizers), 'label': [[record['label']] for record in records]}, {})


def tagged(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """`tokens` of the words, the place of the word that each token is the first of (else -1), and the words' `tags`.

    Only the first token of a word is tagged (Devlin et al. 2019, 5.3).
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
    """The place of the word that each token [T] is the first of, else -1.

    Args:
      words: joined by spaces, the text of the tokens.
      starts: int [T], the first character of each token.
      stops: int [T], the one after its last.
    """
    spaces = np.cumsum([len(word) + 1 for word in words]) - 1  # after each word
    last = np.maximum(stops - 1, starts)
    word = np.searchsorted(spaces, last)
    inside = np.flatnonzero(spaces[np.minimum(word, len(spaces) - 1)] != last)
    found, first = np.unique(word[inside], return_index=True)
    places = np.full(len(starts), -1)
    places[inside[first]] = found
    return places


def answers(records: Sequence[Record], tokenizers: Tokenizers) -> Encoded:
    """`tokens` of the context, the characters where each `begins` and `ends` (normalised text), the question as
    `second_text`, and the first and last token of the first `answer`, or nothing."""
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
    questions = tokenizers.target.encode_batch([record['question'] for record in records])
    return Encoded({**columns, 'second_text': questions}, {})


def _unknown(label: str, known: Iterable[str], what: str = 'label') -> str:
    return f'{what} {label!r} has no training example{nearest(label, list(known))}'


_TWO_TEXTS = {'tokens': 'text', 'second_text': 'pair'}

TEXT = Encoding(running_text, {'tokens': 'text'})
PAIRS = Encoding(pairs, {'sources': 'source', 'tokens': 'target'})
CLASSES = Encoding(classes, _TWO_TEXTS, whole=('label',))
NUMBERS = Encoding(numbers, _TWO_TEXTS, real=('label',))
TAGGED = Encoding(tagged, {'tokens': 'tokens'}, whole=('words', 'tags'))
ANSWERS = Encoding(answers, {'second_text': 'question', 'tokens': 'context'}, whole=('begins', 'ends', 'answer'))
