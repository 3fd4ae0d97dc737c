"""Pieces of documents by arithmetic, against cutting them one by one; the order of a set of 10^12 tokens."""

import pickle
import resource
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.config import Config, Data, Train
from tformer.data import order
from tformer.data.batches import layout, packing, pipeline
from tformer.data.examples import pieces
from tformer.data.examples.pieces import Pieces, Spans
from tformer.data.ragged import Computed, Ragged
from tformer.data.sources import token_files
from tformer.data.sources.records import Split
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers

BYTE = Byte()


def cut(sizes: list[int], room: int) -> list[tuple[int, int, int]]:
    return [(i, a, min(a + room, size)) for i, size in enumerate(sizes) for a in range(0, size, room)]


def shape_of(lengths: np.ndarray) -> np.ndarray:
    return packing.bucket_of(lengths, ((3,), (5,), (100,)))


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any), st.integers(1, 12),
    st.sampled_from([1, 2, 3, 7, 64]), st.integers(1, 9),
)  # fmt: skip
@settings(deadline=None)
def test_pieces_are_those_of_documents_cut_one_by_one(sizes: list[int], room: int, blocks: int, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, 'MOST_BLOCKS', blocks)
        patch.setattr(pieces, '_AT_ONCE', at_once)
        texts = Ragged.of([np.arange(size) for size in sizes])
        positions = np.arange(room + 1)[:, None] + 1
        made, wanted = Pieces(texts, room, 0, 0, positions), cut(sizes, room)
        assert len(made) == len(wanted) and [made[i] for i in range(len(made))] == wanted
        rng = np.random.default_rng(0)
        places = rng.integers(0, len(wanted), 20) if wanted else np.zeros(0, np.int64)
        assert [*zip(*map(np.ndarray.tolist, made.find(places)), strict=True)] == [wanted[i] for i in places]
        numbers = [[k for k, piece in enumerate(wanted) if piece[0] == i] for i in range(len(sizes))]
        assert [list(made.of_record(i)) for i in range(len(sizes))] == numbers
        assert made.longest == max((stop - start for _, start, stop in wanted), default=0)
        lengths = np.array([[stop - start + 1] for _, start, stop in wanted]).reshape(-1, 1)
        assert made.lengths_of(np.arange(len(made))).tolist() == lengths.tolist()
        low, high = sorted(rng.integers(0, len(wanted) + 1, 2).tolist())
        assert made.lengths_between(low, high).tolist() == lengths[low:high].tolist()
        distinct, counts = made.counted()
        assert np.repeat(distinct, counts, axis=0).tolist() == sorted(lengths.tolist())
        whole = np.array(wanted).reshape(-1, 3).T
        eager = Spans(*whole, [lengths[:, 0]], np.zeros(len(sizes), bool))
        for lazy, plain in zip(made.by_shape(shape_of, 3), eager.by_shape(shape_of, 3), strict=True):
            assert np.asarray(lazy).tolist() == plain.tolist() and len(lazy) == len(plain)
        keep = rng.random(len(sizes)) < 0.5
        assert made.kept(keep).record.tolist() == eager.kept(keep).record.tolist()
        assert pickle.loads(pickle.dumps(made)).of_record(0) == made.of_record(0)


@pytest.mark.parametrize('documents', [10, 1000])
def test_documents_that_share_a_block_are_counted_together(documents: int, monkeypatch) -> None:
    """Finding pieces of any number of blocks reads the sizes of documents as often as of a few."""
    monkeypatch.setattr(pieces, 'MOST_BLOCKS', documents // 5)
    read: list[int] = []

    class Counting(Ragged):
        def sizes(self, rows: Any) -> np.ndarray:
            read.append(len(np.arange(documents)[rows]))
            return super().sizes(rows)

    texts = Counting(np.zeros(7 * documents), np.arange(documents + 1) * 7)
    made = Pieces(texts, 3, 0, 0, np.arange(4)[:, None])
    assert len(made) == 3 * documents
    read.clear()
    whole = np.arange(len(made))
    assert made.lengths_of(whole).ravel().tolist() == [3, 3, 1] * documents and read == [documents, len(made)]
    read.clear()
    assert made.lengths_between(1, len(made)).ravel().tolist() == ([3, 3, 1] * documents)[1:]
    assert read == [10, documents]  # of the first and the last block, then of each document


# ---------------------------------------------------------------------------------------- a set of 10^12 tokens


class Endless(Ragged):
    """Documents of tokens that are computed from their places: no number of them is stored."""

    def __init__(self, documents: int, size: int) -> None:
        vars(self).update(documents=documents, size=size)

    documents: int
    size: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Endless, (self.documents, self.size)

    def __len__(self) -> int:
        return self.documents

    def sizes(self, rows: Any) -> np.ndarray:
        return np.full(len(range(self.documents)[rows] if isinstance(rows, slice) else rows), self.size)

    def __getitem__(self, row: int) -> Any:
        return Computed(self.size, lambda places: 7 + (places // 251 + places + row) % 250)


class EndlessTokens(token_files.Tokens):
    def __init__(self, documents: Endless) -> None:
        self.documents = documents  # type: ignore[assignment]

    def of_tokenizer(self, tokenizer: Any, lender: Any = None) -> Any:
        return self.documents


def endless(documents: int, size: int, length: int = 1024, **data: Any) -> pipeline.Batches:
    config = Config(data=Data(tokenizer='byte', length=length, **data), train=Train(objective='causal_lm'))
    records = Split('endless', lambda: (EndlessTokens(Endless(documents, size)), 0), of_tokens=True)
    return pipeline.Batches(config, Tokenizers(None, BYTE), 'train', training=True, records=records)


def place_of(image: int, size: int, key: tuple[int, ...]) -> int:
    """The inverse of `order.permuted`, in plain numbers: the rounds backwards, until the place is below the size."""
    bits = (size - 1).bit_length()
    low_bits, high_bits = bits // 2, bits - bits // 2
    keys = np.random.SeedSequence(key).generate_state(6, np.uint64)
    while True:
        left, right = image >> low_bits, image & ((1 << low_bits) - 1)
        for even, odd in keys.reshape(-1, 2)[::-1]:
            right ^= int(order._hash(np.array([left], np.uint64) ^ odd)[0]) & ((1 << low_bits) - 1)
            left ^= int(order._hash(np.array([right], np.uint64) ^ even)[0]) & ((1 << high_bits) - 1)
        image = left << low_bits | right
        if image < size:
            return image


@pytest.mark.parametrize('documents', [1, 1000])
def test_the_order_of_a_trillion_tokens_takes_no_memory_and_covers_every_piece_once(documents: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = 10**12 // documents
    batches = endless(documents, size, batching='pad')
    each = -(-(size + 1) // 1024)
    count = documents * each
    assert batches.num_examples == count > 976_000_000 and batches.steps_per_epoch == count / 32
    rng = np.random.default_rng(0)
    for epoch in (0, 1, 5):
        key = (0, layout.SHUFFLE, 0, 0, epoch)
        for piece in [0, count - 1, *rng.integers(0, count, 20).tolist()]:
            place = epoch * count + place_of(piece, count, key)  # a bijection: at no other place of the epoch
            segments = batches.segments(place // 32)[place % 32]
            assert segments == [(0, piece // each, piece)]
            row = {name: values[place % 32] for name, values in batches.batch(place // 32).items()}
            start, document = piece % each * 1024, Endless(documents, size)[piece // each]
            own = document[start : start + 1024]
            assert row['targets'][: len(own)].tolist() == own.tolist() and (row['positions'] >= 0).sum() >= len(own)
    assert len(pickle.dumps(batches)) < 200_000  # what a worker process is sent
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_the_end_of_each_stream_has_a_shape_of_its_own() -> None:
    batches = endless(1000, 10**9, batching='bucket', num_buckets=2)
    each = -(-(10**9 + 1) // 1024)
    assert batches.shapes == ((520,), (1024,)) and batches.num_examples == 1000 * each
    ends = {
        batches.segments(step)[0][0][2] for step in range(10**6) if step % 50_000 == 0 and batches._find(step)[0] == 0
    }
    assert all(piece % each == each - 1 for piece in ends)
    tails, full = batches.parts[0].by_bucket
    assert [tails[i] for i in (0, 1, 999)] == [each - 1, 2 * each - 1, 1000 * each - 1] and len(tails) == 1000
    assert [full[i] for i in (0, each - 2, each - 1)] == [0, each - 2, each] and len(full) == 1000 * (each - 1)
