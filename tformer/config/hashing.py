"""Digests of contents, the same on every machine."""

import hashlib
import json
from typing import Any


def digest_bytes(*parts: Any, size: int = 16) -> str:
    """Returns the BLAKE2b digest of `size` bytes of the joined parts, in hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def digest_json(value: Any, size: int = 16) -> str:
    """Returns the digest of a JSON value, in which the order of keys does not count."""
    return digest_bytes(json.dumps(value, sort_keys=True).encode(), size=size)
