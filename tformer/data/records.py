"""What a source gives for each objective, and how a key decides about its split."""

import hashlib
from typing import Any

# The fields of an objective, as str; seq2seq may add `references`: list[str], all acceptable targets.
Record = dict[str, Any]

FIELDS: dict[str, tuple[str, ...]] = {
    'causal_lm': ('text',),
    'masked_lm': ('text',),
    'seq2seq': ('source', 'target'),
    'classification': ('label', 'text'),
}


def place_of(key: str) -> float:
    """The place in [0, 1) of `key` by its MD5 hash, the same on every machine."""
    return int.from_bytes(hashlib.md5(key.encode()).digest()[:8], 'big') / 2**64


def split_of(key: str, valid: float, test: float) -> str:
    """The split of `key` by its hash: these shares of all keys, train the rest."""
    place = place_of(key)
    return 'valid' if place < valid else 'test' if place < valid + test else 'train'
