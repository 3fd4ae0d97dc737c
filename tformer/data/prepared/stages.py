"""The stages of a preparation, each a pure function of (directory, number) that makes one entry of the work on disk.

`read` takes a part of the sources and keeps its cleaned texts in runs, sorted by split and digest. `link` finds near
duplicates among a share of all bands, and `near` says which texts they leave out. `write` takes the texts of one split
whose digests are in one range, which is at once a shuffle and all that exact duplicates need, leaves the duplicates
out, and tokenises the rest as a shard. So a set depends on the texts alone: not on the files that they are in, nor on
who makes an entry or when. An entry is written whole or not at all, and is made again if a byte of it has changed.
"""

import collections
import functools
import itertools
import json
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tformer.config import hashing
from tformer.data import cache
from tformer.data.inspection.duplicates import ALIKE
from tformer.data.prepared import cleaning, job, near, shards
from tformer.data.prepared.job import SPLITS, WORK
from tformer.data.prepared.near import NODE
from tformer.data.tokenizers.tokenizers import Tokenizers

RUN = 1 << 24  # bytes of text that are held and sorted together
SHARD = 1 << 24  # bytes of text of a shard
LINKED = 1 << 20  # texts whose bands are compared together
_AT_ONCE, _TEXT_AT_ONCE = 2000, 1 << 22  # texts, and bytes of them, that are tokenised together
_KEYS = 1 << 64  # as many as there are beginnings of digests

_ARRAYS = {'texts': np.uint8, 'nodes': np.uint8, 'ends': np.int64, 'bands': np.int64, 'bearers': np.int32}

Node = bytes  # the number of the split, in ASCII, and the digest


class Plan(NamedTuple):
    """What the texts that were read decide."""

    shares: int  # of `link`
    outputs: list[tuple[str, int, int]]  # of `write`: split, number of the shard, and how many there are


def run(place: str, stage: str, number: int) -> None:
    """Makes an entry of a stage in a set's directory, unless it is there and passes its checksums."""
    own = job.load(f'{place}/{WORK}')
    make = functools.partial(STAGES[stage], place, own, number)
    cache.entry(Path(place, WORK), _key(own, stage, number), make, named_by='--output')


def made(place: str, stage: str, number: int) -> tuple[cache.Arrays, cache.Facts]:
    """Returns the arrays and facts of an entry."""
    return cache.made(Path(place, WORK), _key(job.load(f'{place}/{WORK}'), stage, number))


def _key(own: job.Job, stage: str, number: int) -> dict[str, Any]:
    return {'set': own.fingerprint, 'stage': stage, 'number': number}


def plan(place: str) -> Plan:
    """Returns the plan of a set of which all parts have been read, and keeps it for the later stages."""
    own = job.load(f'{place}/{WORK}')
    sizes: collections.Counter[str] = collections.Counter()
    texts = 0
    for number in range(len(own.parts)):
        facts = made(place, 'read', number)[1]
        sizes.update(facts['bytes'])
        texts += sum(facts['runs'])
    counts = {split: -(-sizes[split] // SHARD) for split in reversed(SPLITS)}
    outputs = [(split, number, count) for split, count in counts.items() for number in range(count)]
    found = Plan(max(-(-texts // LINKED), 1), outputs)
    Path(place, WORK, 'plan.json').write_text(json.dumps(found))
    _plan.cache_clear()
    return found


@functools.lru_cache(maxsize=1)
def _plan(place: str) -> Plan:
    return Plan(*json.loads(Path(place, WORK, 'plan.json').read_text()))


# --------------------------------------------------------------------------------------------------------------- read


def read(place: str, own: job.Job, number: int, writer: cache.Writer) -> None:
    data = own.config.data
    alike = ALIKE[data.deduplicate if data.deduplicate in ALIKE else 'exact']
    held: list[tuple[Node, bytes]] = []
    size = 0
    for name, dtype in _ARRAYS.items():
        writer.append(name, np.zeros(0, dtype))
    facts: dict[str, Any] = {'runs': [], 'records': 0, 'cleaned': 0, 'skipped': 0, 'bytes': collections.Counter()}
    writer.facts |= facts
    for found in own.read(number):
        if isinstance(found, int):
            writer.facts['skipped'] = found
            continue
        split, text = found
        writer.facts['records'] += 1
        text = cleaning.clean(text, data.cleaning)
        if not text:
            writer.facts['cleaned'] += 1
            continue
        content = _encoded(text)
        digest = hashing.digest_bytes(_encoded(unicodedata.normalize('NFC', alike(text))))
        held.append((b'%d' % SPLITS.index(split) + bytes.fromhex(digest), content))
        facts['bytes'][split] += len(content)
        size += len(content)
        if size >= RUN:
            _keep(writer, held, data.deduplicate == 'minhash')
            held, size = [], 0
    _keep(writer, held, data.deduplicate == 'minhash')


def _keep(writer: cache.Writer, held: list[tuple[Node, bytes]], with_bands: bool) -> None:
    """Appends a run of texts to an entry, sorted."""
    if not held:
        return
    held.sort()
    before = writer.facts.get('end', 0)
    ends = before + np.cumsum([len(content) for _, content in held], dtype=np.int64)
    writer.facts['end'] = int(ends[-1])
    writer.facts['runs'].append(len(held))
    writer.append('texts', np.frombuffer(b''.join(content for _, content in held), np.uint8))
    writer.append('nodes', np.frombuffer(b''.join(node for node, _ in held), np.uint8))
    writer.append('ends', ends)
    if with_bands:
        hashes = near.bands([_decoded(content) for _, content in held])
        order = np.argsort(hashes, axis=1, kind='stable')
        writer.append('bands', np.take_along_axis(hashes, order, axis=1).ravel())
        writer.append('bearers', order.astype(np.int32).ravel())


def _encoded(text: str) -> bytes:
    return text.encode('utf-8', 'surrogatepass')


def _decoded(content: Any) -> str:
    return bytes(content).decode('utf-8', 'surrogatepass')


def _runs(place: str, own: job.Job) -> Iterator[tuple[cache.Arrays, slice]]:
    """Yields the arrays that hold a run of texts, and where it stands in them."""
    for number in range(len(own.parts)):
        arrays, facts = made(place, 'read', number)
        stops = list(itertools.accumulate(facts['runs'], initial=0))
        for start, stop in itertools.pairwise(stops):
            yield arrays, slice(start, stop)


def _nodes(arrays: cache.Arrays, run: slice) -> np.ndarray:
    return arrays['nodes'].view(NODE)[run]


# --------------------------------------------------------------------------------------------------------- link, near


def link(place: str, own: job.Job, number: int, writer: cache.Writer) -> None:
    shares = _plan(place).shares
    low, high = (_KEYS * edge // shares - _KEYS // 2 for edge in (number, number + 1))
    hashes: list[list[np.ndarray]] = [[] for _ in range(near.BANDS)]
    nodes: list[list[np.ndarray]] = [[] for _ in range(near.BANDS)]
    for arrays, run in _runs(place, own):
        whole = slice(near.BANDS * run.start, near.BANDS * run.stop)
        rows = zip(*(arrays[name][whole].reshape(near.BANDS, -1) for name in ('bands', 'bearers')), strict=True)
        for band, (values, bearers) in enumerate(rows):
            here = slice(_first(values, low), _first(values, high))
            hashes[band].append(values[here])
            nodes[band].append(_nodes(arrays, run)[bearers[here]])
    found = [near.links(*map(np.concatenate, each)) for each in zip(hashes, nodes, strict=True) if each[0]]
    pairs = np.unique(np.concatenate([np.zeros((0, 2), NODE), *found]), axis=0)
    writer.append('pairs', np.frombuffer(pairs.tobytes(), np.uint8))


def _first(values: np.ndarray, edge: int) -> int:
    """Returns the place of the first of sorted `values`, int64, that is not below `edge`, which may be too large."""
    return len(values) if edge >= _KEYS // 2 else int(np.searchsorted(values, edge))


def leave_out(place: str, own: job.Job, number: int, writer: cache.Writer) -> None:
    pairs = [made(place, 'link', share)[0]['pairs'].view(NODE) for share in range(_plan(place).shares)]
    nodes = near.left_out(np.concatenate(pairs).reshape(-1, 2))
    writer.append('nodes', np.frombuffer(nodes.tobytes(), np.uint8))


# -------------------------------------------------------------------------------------------------------------- write


def write(place: str, own: job.Job, number: int, writer: cache.Writer) -> None:
    split, shard, count = _plan(place).outputs[number]
    edges = _KEYS * shard // count, _KEYS * (shard + 1) // count
    texts, counts = _kept(place, own, SPLITS.index(split), edges)
    tokenizer = _tokenizers(place, own.fingerprint).target
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    lengths: list[int] = []

    def documents() -> Iterator[np.ndarray]:
        for some in _together(texts):
            for tokens in tokenizer.encode_batch(list(map(_decoded, some))):
                lengths.append(len(tokens))
                yield np.array(tokens, dtype)

    with tempfile.TemporaryDirectory(dir=Path(place, WORK)) as beside:
        file = Path(beside, 'shard')
        shards.write(file, documents())
        writer.append('shard', np.fromfile(file, np.uint8))
    writer.append('lengths', np.array(lengths, np.int32))
    writer.facts |= {**counts, 'documents': len(lengths), 'tokens': sum(lengths), 'dtype': np.dtype(dtype).str}


@functools.lru_cache(maxsize=1)
def _tokenizers(place: str, mark: str) -> Tokenizers:
    return Tokenizers.load(place)


def _kept(place: str, own: job.Job, rank: int, edges: tuple[int, int]) -> tuple[list[bytes], dict[str, int]]:
    """Returns the texts of a split whose digests begin in a range, without duplicates, and counts of these."""
    found: dict[Node, list[bytes]] = collections.defaultdict(list)  # without duplicates the smallest text of each
    counts = {'exact': 0, 'near': 0}
    others: set[bytes] = set()  # the digests of splits that come before
    for arrays, run in _runs(place, own):
        nodes = _nodes(arrays, run)
        for each in range(rank + 1):
            low, high = (_place(nodes, each, edge) for edge in edges)
            if each < rank:
                others.update(node[1:] for node in _bytes(nodes[low:high]))
                continue
            stops = arrays['ends'][run][low:high]
            begin = int(arrays['ends'][run.start + low - 1]) if run.start + low else 0
            text = arrays['texts'][begin : int(stops[-1]) if len(stops) else begin].tobytes()
            cuts = itertools.pairwise([0, *(stops - begin).tolist()])
            for node, (start, stop) in zip(_bytes(nodes[low:high]), cuts, strict=True):
                found[node].append(text[start:stop])
                if own.config.data.deduplicate is not None and len(found[node]) > 1:
                    found[node] = [min(found[node])]
                    counts['exact'] += 1
    ordered = sorted(found)
    if own.config.data.deduplicate is None:
        return [text for node in ordered for text in sorted(found[node])], counts
    gone = (
        made(place, 'near', 0)[0]['nodes'].view(NODE) if own.config.data.deduplicate == 'minhash' else np.zeros(0, NODE)
    )
    alike = set(_bytes(gone[_place(gone, rank, edges[0]) : _place(gone, rank, edges[1])]))
    texts = []
    for node in ordered:
        kind = 'exact' if node[1:] in others else 'near' if node in alike else None
        if kind:
            counts[kind] += 1
        else:
            texts += found[node]
    return texts, counts


def _place(nodes: np.ndarray, rank: int, edge: int) -> int:
    """Returns where the sorted nodes of a split from a beginning of digests on begin; `edge` may be one too large."""
    if edge == _KEYS:
        rank, edge = rank + 1, 0
    return int(np.searchsorted(nodes, np.array(b'%d' % rank + edge.to_bytes(8, 'big'), NODE)))


def _bytes(nodes: np.ndarray) -> list[bytes]:
    """Returns nodes whole; numpy's own conversion leaves out zeros at their ends."""
    content = nodes.tobytes()
    return [content[start : start + NODE.itemsize] for start in range(0, len(content), NODE.itemsize)]


def _together(texts: list[bytes]) -> Iterator[list[bytes]]:
    """Yields as many texts as are tokenised together."""
    some: list[bytes] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if len(some) == _AT_ONCE or size >= _TEXT_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


STAGES: dict[str, Callable[[str, job.Job, int, cache.Writer], None]] = {
    'read': read,
    'link': link,
    'near': leave_out,
    'write': write,
}
