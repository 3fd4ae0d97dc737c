"""Data: sources, splits, corruption, plans and the batch contract."""

import dataclasses
import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tformer.config.run import Config, Data, Train
from tformer.data import corrupt, packing, pipeline, sources, tokenizers
from tformer.data.tokenizers import BOS, CLS, EOS, MASK, PAD, SEP
from tformer.errors import UserError

# ------------------------------------------------------------------------------------------------ the batch contract

BATCHING = ('pad', 'bucket', 'pack')
OBJECTIVES = ('causal_lm', 'masked_lm', 'seq2seq', 'classification')
CASES = [case for case in itertools.product(OBJECTIVES, BATCHING) if case != ('classification', 'pack')]
LENGTH = 24


@functools.cache
def some_records(objective: str, count: int = 53) -> tuple[sources.Record, ...]:
    """Records of different texts: up to 60 characters where they are cut, and else as many as fit."""
    rng = np.random.default_rng(7)
    in_pieces = objective in ('causal_lm', 'masked_lm')
    longest = 60 if in_pieces else LENGTH - 2

    def text(i: int) -> str:
        return f'{i:03d}' + ''.join(rng.choice(list('abcdefgh '), rng.integers(0, longest - 3)))

    fields = sources.FIELDS[objective]
    return tuple({field: 'yes' if field == 'label' else text(i) for field in fields} for i in range(count))


def make(objective: str, batching: str, *, training: bool = True, seed: int = 0, **data: object) -> pipeline.Batches:
    settings_ = Data(**{'tokenizer': 'byte', 'batching': batching, 'length': LENGTH, 'num_buckets': 3, **data})
    config = Config(data=settings_, train=Train(objective=objective, batch_size=4, seed=seed))
    records = some_records(objective)
    tokens = tokenizers.train_tokenizers(config, records)
    return pipeline.Batches(config, tokens, 'train', training=training, multiple_of=2, records=records)


def segments(batch: dict[str, np.ndarray], side: str = '') -> Iterator[tuple[int, np.ndarray]]:
    """(row, where) of each example in a batch."""
    ids = batch.get(f'{side}segment_ids', (batch[f'{side}positions'] >= 0).astype(np.int32))
    for row, row_ids in enumerate(ids):
        for segment in range(1, row_ids.max() + 1):
            yield row, np.flatnonzero(row_ids == segment)


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize(('objective', 'batching'), CASES)
def test_contract(objective: str, batching: str) -> None:
    batches = make(objective, batching, encoder_length=32)
    sides = ('', 'encoder_') if objective == 'seq2seq' else ('',)
    names = {f'{side}{name}' for side in sides for name in ('inputs', 'positions')}
    names |= {f'{side}segment_ids' for side in sides if batching == 'pack'}
    names |= {'labels', 'label_weights'} if objective == 'classification' else {'targets', 'weights'}
    shapes = set()
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        assert batch.keys() == names
        for name, value in batch.items():
            assert value.dtype == (np.float32 if name.endswith('weights') else np.int32), name
            side = 'encoder_' if name.startswith('encoder_') else ''
            assert value.shape == (batch[f'{side}inputs'].shape if 'label' not in name else (4,)), name
        shapes.add(tuple(batch[f'{side}inputs'].shape[1] for side in sides))
        for side in sides:
            padding = batch[f'{side}positions'] == -1
            assert (batch[f'{side}inputs'][padding] == PAD).all()
            assert not batch.get(f'{side}segment_ids', np.zeros(1))[padding if batching == 'pack' else [0]].any()
            for row, where in segments(batch, side):
                np.testing.assert_array_equal(batch[f'{side}positions'][row, where], np.arange(len(where)))
                assert np.all(np.diff(where) == 1)
        if 'weights' in batch:
            assert not batch['weights'][batch['positions'] == -1].any()
            assert not batch['targets'][batch['positions'] == -1].any()
    assert shapes <= set(batches.shapes) and len(batches.shapes) <= (3 if batching == 'bucket' else 1)
    if batching != 'bucket':
        assert batches.shapes == ((LENGTH, 32)[: len(sides)],)


def texts_of(batch: dict[str, np.ndarray], objective: str) -> Iterator[str]:
    """The texts that a batch was made from (of the piece, where texts are cut)."""
    decode = tokenizers.Byte().decode
    name = 'inputs' if objective == 'classification' else 'targets'
    sources_ = list(segments(batch, 'encoder_')) if objective == 'seq2seq' else itertools.repeat((0, []))
    for (row, where), (source_row, source) in zip(segments(batch), sources_, strict=False):
        if objective == 'seq2seq':
            assert row == source_row and batch['encoder_inputs'][row, source][-1] == EOS
            assert (batch['inputs'][row, where][0], batch['targets'][row, where][-1]) == (BOS, EOS)
            np.testing.assert_array_equal(batch['inputs'][row, where][1:], batch['targets'][row, where][:-1])
            yield decode(batch['encoder_inputs'][row, source]) + '->' + decode(batch['targets'][row, where])
        else:
            if objective in ('masked_lm', 'classification'):
                assert (batch[name][row, where][0], batch[name][row, where][-1]) == (CLS, SEP)
            yield decode(batch[name][row, where])


@pytest.mark.parametrize(('objective', 'batching'), CASES)
def test_every_example_once_an_epoch(objective: str, batching: str) -> None:
    batches = make(objective, batching)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        epochs.append([text for step in steps for text in texts_of(batches.batch(step), objective)])
    assert len(epochs[0]) == batches.num_examples
    whole = '->'.join if objective == 'seq2seq' else ''.join
    records = [whole(v for k, v in r.items() if k != 'label') for r in batches.records]
    if objective in ('causal_lm', 'masked_lm'):  # pieces: all the text, cut
        assert sorted(''.join(epochs[0])) == sorted(''.join(records))
        assert max(map(len, epochs[0])) <= LENGTH
    else:
        assert sorted(epochs[0]) == sorted(records)
    for other in epochs[1:]:
        assert sorted(other) == sorted(epochs[0]) and other != epochs[0]


@pytest.mark.parametrize(('objective', 'batching'), CASES)
def test_evaluation_is_one_epoch_in_order(objective: str, batching: str) -> None:
    batches = make(objective, batching, training=False)
    rows = [batches.rows(step) for step in range(batches.steps_per_epoch)]
    seen = np.concatenate(rows)
    assert 'segment_ids' not in batches.batch(0)
    assert sorted({int(i) for i in seen} - {-1}) == list(range(len(batches.records)))
    assert all((np.diff(r[r >= 0]) >= 0).all() for r in rows)
    assert all(len(list(texts_of(batches.batch(s), objective))) == (rows[s] >= 0).sum() for s in range(len(rows)))
    assert_equal(batches.batch(1), make(objective, batching, training=False, seed=0).batch(1))
    with pytest.raises(IndexError):
        batches.batch(batches.steps_per_epoch)


@pytest.mark.parametrize('batching', BATCHING)
def test_causal_lm_predicts_every_token_once_with_the_one_before_as_input(batching: str) -> None:
    batches = make('causal_lm', batching)
    pairs = []
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        scored = batch['weights'] == 1
        pairs += zip(batch['inputs'][scored].tolist(), batch['targets'][scored].tolist(), strict=True)
    encoded = [[BOS, *tokenizers.Byte().encode(r['text']), EOS] for r in batches.records]
    assert sorted(pairs) == sorted(pair for tokens in encoded for pair in itertools.pairwise(tokens))


@pytest.mark.parametrize(('objective', 'batching'), CASES)
def test_resume_and_threads_change_nothing(objective: str, batching: str) -> None:
    batches = make(objective, batching)
    last = 2 * batches.steps_per_epoch + 2
    expected = [batches.batch(step) for step in range(last)]
    fresh = make(objective, batching)
    for start, num_threads, prefetch in ((0, 1, 2), (batches.steps_per_epoch - 1, 4, 8)):
        data = dataclasses.replace(fresh.config.data, num_threads=num_threads, prefetch=prefetch)
        made = pipeline.iterate(fresh, start, dataclasses.replace(fresh.config, data=data))
        for one, other in zip(expected[start:], made, strict=False):
            assert_equal(one, other)
        made.close()
    assert_equal(fresh.batch(3), expected[3])  # whatever was asked before
    other = [make(objective, batching, seed=1).batch(step) for step in range(2)]
    assert any((other[s]['inputs'].shape != expected[s]['inputs'].shape)
               or (other[s]['inputs'] != expected[s]['inputs']).any() for s in range(2))  # fmt: skip


def test_iterate_ends_with_evaluation() -> None:
    batches = make('causal_lm', 'bucket', training=False)
    assert len(list(pipeline.iterate(batches, 2, batches.config))) == batches.steps_per_epoch - 2


def test_far_steps_cost_nothing() -> None:
    batches = make('seq2seq', 'pack')
    assert batches.batch(10**9).keys() == batches.batch(0).keys()


def test_batch_tokens_gives_short_rows_larger_batches() -> None:
    batches = make('causal_lm', 'bucket', batch_tokens=150)
    for step in range(batches.steps_per_epoch):
        rows, length = batches.batch(step)['inputs'].shape
        assert rows == 150 // length // 2 * 2
    assert make('causal_lm', 'pad', batch_tokens=1).batch(0)['inputs'].shape == (2, LENGTH)


@pytest.mark.parametrize('objective', ['seq2seq', 'classification'])
def test_overlong(objective: str) -> None:
    room = {'length': 12, 'encoder_length': None}
    dropped, cut = (make(objective, 'pad', overlong=how, **room) for how in ('drop', 'truncate'))
    fields = sources.FIELDS[objective]
    over = sum(any(len(r[f]) + (1 if f in ('source', 'target') else 2) > 12 for f in fields) for r in dropped.records)
    assert 0 < over == dropped.num_dropped == cut.num_truncated
    assert (dropped.num_truncated, cut.num_dropped) == (0, 0)
    assert cut.num_examples == dropped.num_examples + over == len(cut.records)
    evaluated = make(objective, 'pad', overlong='drop', training=False, **room)
    assert (evaluated.num_examples, evaluated.num_truncated) == (cut.num_examples, over)
    with pytest.raises(UserError, match=r'no example within data.length=3'):
        make(objective, 'pad', length=3)
    with pytest.raises(UserError, match='has no room for text beside 2 special tokens'):
        make('masked_lm', 'pad', length=2)


def test_mistakes_of_batches() -> None:
    with pytest.raises(UserError, match="one label; use 'bucket'"):
        make('classification', 'pack')
    with pytest.raises(UserError, match="did you mean 'bucket'"):
        make('causal_lm', 'buckets')
    config = Config(data=Data(tokenizer='byte'), train=Train(objective='classification'))
    tokens = tokenizers.train_tokenizers(config, some_records('classification'))
    with pytest.raises(UserError, match=r"label 'yess' of the valid split .*did you mean 'yes'"):
        records = [{'label': 'yess', 'text': 'a'}]
        pipeline.Batches(config, tokens, 'valid', training=False, records=records)


# --------------------------------------------------------------------------------------------- corruption and plans


def test_corruption_rates() -> None:
    tokens = np.random.default_rng(0).integers(7, 1000, (500, 202))
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    made = [corrupt.mask_tokens(row, np.random.default_rng(i), 1000) for i, row in enumerate(tokens)]
    inputs, selected = (np.stack(part) for part in zip(*made, strict=True))
    assert not selected[:, [0, -1]].any() and (inputs[~selected] == tokens[~selected]).all()
    count = selected.sum()
    assert selected[:, 1:-1].mean() == pytest.approx(0.15, abs=0.002)
    masked, kept = inputs[selected] == MASK, inputs[selected] == tokens[selected]
    drawn = inputs[selected][~masked & ~kept]
    for share, expected in ((masked, 0.8), (kept, 0.1)):
        assert abs(share.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / count)
    assert drawn.min() >= 7 and drawn.max() < 1000
    assert abs(drawn.mean() - 503) < 4 * 287 / np.sqrt(len(drawn))


@given(st.integers(0, 40), st.integers(0, 2**32))
def test_corruption_selects_at_least_one(length: int, seed: int) -> None:
    tokens = np.full(length + 2, 9, np.int32)
    tokens[[0, -1]] = CLS, SEP
    inputs, selected = corrupt.mask_tokens(tokens, np.random.default_rng(seed), 20)
    assert selected.sum() == min(length, max(1, round(0.15 * length)))
    assert inputs.dtype == tokens.dtype and (tokens[1:-1] == 9).all()


def test_corruption_differs_by_epoch() -> None:
    batches = make('masked_lm', 'pad')
    masked = {}
    for step in range(2 * batches.steps_per_epoch):
        batch = batches.batch(step)
        for row, where in segments(batch):
            text = batch['targets'][row, where].tobytes()
            masked.setdefault(text, []).append(batch['weights'][row, where].tobytes())
    assert np.mean([one == two for one, two in masked.values()]) < 0.3


LENGTHS = arrays.arrays(np.int64, st.tuples(st.integers(1, 60), st.integers(1, 2)), elements=st.integers(1, 20))


@given(LENGTHS, st.integers(1, 8))
def test_first_fit_places_each_once_within_the_limits(lengths: np.ndarray, window: int) -> None:
    limits = np.full(lengths.shape[1], 20)
    rows = packing.first_fit(lengths, limits, window)
    assert sorted(rows.flat.tolist()) == list(range(len(lengths)))
    assert all((lengths[row].sum(axis=0) <= limits).all() for row in rows)


@given(LENGTHS, st.integers(1, 5), st.sampled_from(BATCHING), st.integers(1, 4))
@settings(deadline=None)
def test_plans_deal_each_row_once(lengths: np.ndarray, num_buckets: int, batching: str, width: int) -> None:
    limits = np.full(lengths.shape[1], 20)
    layout = packing.BATCHING[batching](lengths, limits, num_buckets, np.random.default_rng(0))
    for row, bucket in zip(layout.members, layout.bucket, strict=True):
        assert (lengths[row].sum(axis=0) <= layout.shapes[bucket]).all()
    widths = (width,) * len(layout.shapes)
    for rng in (None, np.random.default_rng(1)):
        plan = packing.plan(layout, widths, rng)
        assert len(plan.rows) == packing.num_steps(layout, widths)
        assert sorted(plan.rows[plan.rows >= 0].tolist()) == list(range(len(layout.members)))


@given(arrays.arrays(np.int64, st.integers(1, 12), elements=st.integers(1, 20)), st.integers(1, 4))
def test_buckets_take_the_fewest_positions(lengths: np.ndarray, num_buckets: int) -> None:
    def positions(boundaries: tuple[int, ...]) -> int:
        return sum(min(b for b in boundaries if b >= length) for length in lengths)

    found = tuple(packing.bucket_boundaries(lengths, num_buckets, 20))
    *shorter, longest = np.unique(lengths)
    divisions = [c for n in range(num_buckets) for c in itertools.combinations(shorter, n)]
    assert positions(found) == min(positions((*c, longest)) for c in divisions)
    assert len(found) <= num_buckets and found[-1] == longest


@given(arrays.arrays(np.int64, st.integers(1, 10), elements=st.integers(0, 50)), st.integers(1, 12))
def test_chunks_cover_documents(sizes: np.ndarray, room: int) -> None:
    record, start, stop = packing.chunk(sizes, room)
    assert ((stop - start) <= room).all() and ((stop - start) > 0).all()
    covered = [(int(r), i) for r, a, b in zip(record, start, stop, strict=True) for i in range(a, b)]
    assert covered == [(r, i) for r, size in enumerate(sizes) for i in range(size)]


def test_packing_wastes_little_on_long_documents() -> None:
    rng = np.random.default_rng(0)
    _, start, stop = packing.chunk(rng.integers(100, 5000, 400), 256)
    lengths = (stop - start)[:, None]
    rows = packing.first_fit(lengths, np.array([256]))
    assert lengths.sum() / (256 * len(rows)) > 0.97


# --------------------------------------------------------------------------------------------------- what is loaded


def test_imports_and_exit_are_clean() -> None:
    """Neither TensorFlow nor torch is loaded, and a process that leaves an iterator open ends without a word."""
    script = """
import sys
from tformer.config.run import Config, Data, Train
from tformer.data import pipeline, tokenizers
own = [name for name, module in sys.modules.items() if name.startswith('tformer.data') and hasattr(module, 'jax')]
config = Config(data=Data(tokenizer='byte', length=16), train=Train(batch_size=2))
records = [{'text': 'hello world'}] * 9
tokens = tokenizers.train_tokenizers(config, records)
batches = pipeline.Batches(config, tokens, 'train', training=True, records=records)
iterator = pipeline.iterate(batches, 0, config)
next(iterator)
print([name for name in ('tensorflow', 'torch') if name in sys.modules], own)
"""
    command = [sys.executable, '-W', 'error', '-c', script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ('[] []\n', '')
