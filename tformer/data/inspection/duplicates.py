"""Texts that occur more than once in the training split, or both there and in a split that evaluates it."""

import array
import dataclasses
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tformer.config import hashing
from tformer.data.sources.records import Record, text_of

Say = Callable[[str], None]  # takes a line of progress


@dataclasses.dataclass(frozen=True)
class Texts:
    """The sizes of the texts of a split, and a hash of each text."""

    num_bytes: dict[str, int]  # of each field, in UTF-8
    hashes: dict[tuple[str, str], np.ndarray]  # (a key of ALIKE, a field or 'whole') -> uint64 [records]


def read(records: Iterable[Record], fields: Sequence[str], say: Say) -> Texts:
    """Reads the records of a split once and keeps 16 bytes for each of the fields with text of each record.

    Where there are several fields, the key 'whole' holds hashes of whole records.
    """
    since = time.monotonic()
    num_bytes = dict.fromkeys(fields, 0)
    keys = (*fields, 'whole') if len(fields) > 1 else fields
    hashes = {(alike, key): array.array('Q') for alike in ALIKE for key in keys}
    for count, record in enumerate(records, start=1):
        for field in fields:
            num_bytes[field] += len(text_of(record, field).encode('utf-8', 'surrogatepass'))
        for alike, normal in ALIKE.items():
            texts = [unicodedata.normalize('NFC', normal(text_of(record, field))) for field in fields]
            for key, text in zip(keys, [*texts, '\0'.join(texts)], strict=False):  # a single field is the whole
                # 64 bits: any two of ten million different texts share theirs with a probability of 3 in a million.
                hashed = hashing.digest_bytes(text.encode('utf-8', 'surrogatepass'), size=8)
                hashes[alike, key].append(int(hashed, 16))
        if time.monotonic() > since + 5:
            since = time.monotonic()
            say(f'looking for duplicates: {count:,} records read')
    return Texts(num_bytes, {key: np.array(values, np.uint64) for key, values in hashes.items()})


def joined(parts: Sequence[Texts]) -> Texts:
    """The texts of several splits, one after the other."""
    num_bytes = {field: sum(part.num_bytes[field] for part in parts) for field in parts[0].num_bytes}
    return Texts(num_bytes, {key: np.concatenate([part.hashes[key] for part in parts]) for key in parts[0].hashes})


def within(hashes: np.ndarray) -> np.ndarray:
    """Returns the indices of records that occurred before: of equal `hashes`, uint64 [records], all but the first."""
    again = np.ones(len(hashes), bool)
    again[np.unique(hashes, return_index=True)[1]] = False
    return np.flatnonzero(again)


def across(hashes: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Returns the indices of `hashes`, uint64 [records], that are also in `train`, uint64 [training records]."""
    return np.flatnonzero(np.isin(hashes, train))


ALIKE: dict[str, Callable[[str], str]] = {  # two texts are alike where these give the same, in Unicode's form NFC
    'exact': str.strip,
    'near': lambda text: ' '.join(text.lower().split()),
}
