"""Near duplicates: texts whose sets of words in a row are alike, by MinHash (Broder 1997) and bands of it.

Two texts are linked where all hashes of a band are equal, and of texts that are linked, directly or through others, one
stays. A pair whose sets have the share s of their union in common is linked with a probability of 1 - (1 - s^8)^14: of
s = 0.8 with 92 %, of 0.7 with 56 %, of 0.5 with 5 % (the bands of Penedo et al. 2024).
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer.data.sources.text_reader import needed

WORDS, BANDS, ROWS, SEED = 5, 14, 8, 0  # words in a row; bands, and the hashes of each
NODE = np.dtype('S17')  # of a text: a digit for its split, and the digest of its content
_APART = r'\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff'  # letters of languages without spaces
_WORD = re.compile(rf'[{_APART}]|[^\W{_APART}]+')


def version() -> int:
    """Returns what differs where the library computes other hashes."""
    return int(_library().ALGORITHM_VERSION)


def _library() -> Any:
    return needed('rensa', "data.deduplicate='minhash'", "'tformer[dedup]'").RMinHash


def bands(texts: Sequence[str]) -> np.ndarray:
    """Returns the hashes of the bands of texts, int64 [BANDS, texts]."""
    rows = _library().digests_from_token_sets(list(map(_shingles, texts)), BANDS * ROWS, SEED)
    values = np.array(rows, '<i8').reshape(len(texts), BANDS, ROWS)
    hashed = [hashlib.blake2b(band.tobytes(), digest_size=8).digest() for row in values for band in row]
    return np.frombuffer(b''.join(hashed), '<i8').reshape(len(texts), BANDS).T


def _shingles(text: str) -> list[str]:
    words = _WORD.findall(text.lower()) or [text]
    return [' '.join(words[start : start + WORDS]) for start in range(max(len(words) - WORDS + 1, 1))]


def links(hashes: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Returns the pairs of different nodes [texts] whose hashes of one band, int64 [texts], are equal: [pairs, 2].

    Each node but the first of those with the same hash is paired with the first.
    """
    order = np.lexsort((nodes, hashes))
    hashes, nodes = hashes[order], nodes[order]
    begins = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    first = nodes[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return np.stack([first, nodes], axis=1)[first != nodes]


def left_out(pairs: np.ndarray) -> np.ndarray:
    """Returns the nodes, sorted, of linked `pairs` [pairs, 2] that do not stay: all but the least of those linked."""
    from scipy.sparse import coo_array, csgraph

    if not len(pairs):
        return np.zeros(0, NODE)
    nodes, ends = np.unique(pairs, return_inverse=True)
    ends = ends.reshape(-1, 2)
    graph = coo_array((np.ones(len(ends), bool), (ends[:, 0], ends[:, 1])), shape=(len(nodes), len(nodes)))
    _, group = csgraph.connected_components(graph, directed=False)
    _, least = np.unique(group, return_index=True)
    return np.delete(nodes, least)
