"""Data: the batch contract, corruption, layouts, and batches that depend on (seed, step) alone."""

import dataclasses
import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import toy_data
from lives import HANG
from tformer.config import Model
from tformer.config.run import Config, Data, Train
from tformer.config.tasks import TASKS
from tformer.data import order
from tformer.data.batches import layout, packing, pipeline
from tformer.data.examples import corrupt
from tformer.data.examples.example_arrays import Examples
from tformer.data.examples.pieces import Spans
from tformer.data.ragged import Ragged
from tformer.data.sources import sources
from tformer.data.sources.records import Split
from tformer.data.tokenizers import bytes_and_characters, tokenizers
from tformer.data.tokenizers.vocabulary import BOS, CLS, EOS, MASK, PAD, SEP
from tformer.errors import UserError

# ------------------------------------------------------------------------------------------------ the batch contract

BATCHING = ('pad', 'bucket', 'pack', 'best_fit')
OBJECTIVES = ('causal_lm', 'masked_lm', 'masked_lm_sop', 'replaced_token', 'seq2seq', 'classification')
LABELLED = ('masked_lm_nsp', 'masked_lm_sop', 'classification', 'regression', 'question_answering')
MASKED = ('masked_lm', 'masked_lm_nsp', 'masked_lm_sop', 'replaced_token')
CASES = [
    (objective, batching)
    for objective, batching in itertools.product(OBJECTIVES, BATCHING)
    if objective not in LABELLED or not packing.BATCHING[batching].packs
]
SEVERAL = ('contrastive', 'simcse', 'cosine_similarity', 'multiple_choice')  # tests/data/test_several_texts.py
READERS = [
    (name, family)
    for name, task in TASKS.items()
    if name not in SEVERAL and not task.teacher
    for family in task.families
]
LENGTH = 24


@functools.cache
def some_records(objective: str, count: int = 53) -> tuple[sources.Record, ...]:
    """Records of different texts: up to 60 characters where they are cut, and else as many as fit."""
    rng = np.random.default_rng(7)
    longest = 60 if TASKS[objective].fields == ('text',) else LENGTH - 2

    def text(i: int) -> str:
        return f'{i:03d}' + ''.join(rng.choice(list('abcdefgh '), rng.integers(0, longest - 3)))

    def value(field: str, i: int) -> object:
        if field == 'label':
            return float(i) if objective == 'regression' else 'yes'
        if field in ('tokens', 'tags'):
            return ['O' if field == 'tags' else 'ab'] * (1 + i % 7)
        if field == 'answers':
            return [(i % 3, 'ab')] if i % 2 else []
        if field == 'messages':
            return [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': text(i)[:2]}]
        return text(i)

    return tuple({field: value(field, i) for field in TASKS[objective].fields} for i in range(count))


def make(
    objective: str,
    batching: str,
    family: str | None = None,
    *,
    training: bool = True,
    seed: int = 0,
    records: tuple[sources.Record, ...] | None = None,
    **data: object,
) -> pipeline.Batches:
    fixed = {'tokenizer': 'byte', 'batching': batching, 'length': LENGTH, 'num_buckets': 3, 'sentinels': 12}
    fixed |= {'question_length': 10}
    train = Train(objective=objective, batch_size=4, seed=seed)
    model = toy_data.reader_of(objective) if family is None else Model(family=family)
    config = Config(model=model, data=Data(**{**fixed, **data}), train=train)
    records = some_records(objective) if records is None else records
    tokens = tokenizers.train_tokenizers(config, records)
    return pipeline.Batches(config, tokens, 'train', training=training, records=records)


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


def names_of(objective: str, family: str) -> set[str]:
    """What a batch holds besides tokens, positions and segments."""
    pairs = objective in ('classification', 'regression', 'question_answering', 'masked_lm_nsp', 'masked_lm_sop')
    names = {'labels', 'label_weights'} if objective in LABELLED else set()
    names |= {'token_types'} if pairs and family == 'encoder' else set()
    names |= {'prefix'} if family == 'decoder' and TASKS[objective].prefix else set()
    names |= {'weights'} if objective not in ('classification', 'regression') else set()
    return names | ({'targets'} if objective == 'token_classification' or objective not in LABELLED[2:] else set())


@pytest.mark.slow
@pytest.mark.parametrize(('objective', 'family'), READERS)
@pytest.mark.parametrize('batching', BATCHING)
def test_contract(objective: str, family: str, batching: str) -> None:
    if packing.BATCHING[batching].packs and objective in LABELLED:
        with pytest.raises(UserError, match='one label; use bucket'):
            make(objective, batching, family)
        return
    batches = make(objective, batching, family, encoder_length=32)
    sides = ('', 'encoder_') if family == 'encoder_decoder' else ('',)
    names = {f'{side}{name}' for side in sides for name in ('inputs', 'positions')}
    names |= {f'{side}segment_ids' for side in sides if packing.BATCHING[batching].packs} | names_of(objective, family)
    shapes = set()
    for step in range(int(2 * batches.steps_per_epoch)):
        batch = batches.batch(step)
        assert batch.keys() == names
        for name, value in batch.items():
            real_number = name.endswith('weights') or (name == 'labels' and objective == 'regression')
            assert value.dtype == (np.bool_ if name == 'prefix' else np.float32 if real_number else np.int32), name
            side = 'encoder_' if name.startswith('encoder_') else ''
            row = (4, 2) if name == 'labels' and objective == 'question_answering' else (4,)
            assert value.shape == (batch[f'{side}inputs'].shape if 'label' not in name else row), name
        shapes.add(tuple(batch[f'{side}inputs'].shape[1] for side in sides))
        for side in sides:
            padding = batch[f'{side}positions'] == -1
            assert (batch[f'{side}inputs'][padding] == PAD).all()
            assert not batch.get(f'{side}segment_ids', np.zeros(1))[
                padding if packing.BATCHING[batching].packs else [0]
            ].any()
            for row, where in segments(batch, side):
                np.testing.assert_array_equal(batch[f'{side}positions'][row, where], np.arange(len(where)))
                assert np.all(np.diff(where) == 1)
        for name in {'weights', 'targets', 'prefix', 'token_types'} & names:
            assert not batch[name][batch['positions'] == -1].any()
    assert shapes <= set(batches.shapes) and len(batches.shapes) <= (3 if batching == 'bucket' else 1)
    if batching != 'bucket':
        assert batches.shapes == ((LENGTH, 32)[: len(sides)],)


def texts_of(batch: dict[str, np.ndarray], objective: str) -> Iterator[str]:
    """The texts that a batch was made from (of the piece, where texts are cut)."""
    decode = bytes_and_characters.Byte().decode
    name = 'inputs' if objective == 'classification' else 'targets'
    sources_ = list(segments(batch, 'encoder_')) if objective == 'seq2seq' else itertools.repeat((0, []))
    for (row, where), (source_row, source) in zip(segments(batch), sources_, strict=False):
        if objective == 'masked_lm_sop':
            text, types = batch['targets'][row, where], batch['token_types'][row, where]
            first, second = text[types == 0], text[types == 1]
            assert (first[0], first[-1], *second[-1:]) == (CLS, SEP, SEP)[: 2 + (len(second) > 0)]
            pair = decode(first), decode(second)
            yield ''.join(pair[::-1] if batch['labels'][row] else pair)
        elif objective == 'seq2seq':
            assert row == source_row and batch['encoder_inputs'][row, source][-1] == EOS
            assert (batch['inputs'][row, where][0], batch['targets'][row, where][-1]) == (BOS, EOS)
            np.testing.assert_array_equal(batch['inputs'][row, where][1:], batch['targets'][row, where][:-1])
            yield decode(batch['encoder_inputs'][row, source]) + '->' + decode(batch['targets'][row, where])
        else:
            if objective in (*MASKED, 'classification'):
                assert (batch[name][row, where][0], batch[name][row, where][-1]) == (CLS, SEP)
            yield decode(batch[name][row, where])


def passes(batches: pipeline.Batches, count: int) -> list[list[dict[str, np.ndarray]]]:
    """The rows of the first `count` passes over the data, each row a batch of one."""
    rows: dict[tuple[int, int], list[dict[str, np.ndarray]]] = {}
    for step in range(int((count + 1) * batches.steps_per_epoch) + 4 * len(batches.shapes)):
        batch, (bucket, where) = batches.batch(step), batches._find(step)
        for row, part in enumerate(where.part.tolist()):
            rows.setdefault((bucket, part), []).append({name: values[row : row + 1] for name, values in batch.items()})
    found: list[list[dict[str, np.ndarray]]] = [[] for _ in range(count)]
    for (bucket, part), some in rows.items():
        size = len(batches.parts[part].by_bucket[bucket])
        assert len(some) >= count * size
        for index in range(count):
            found[index] += some[index * size : (index + 1) * size]
    return found


@pytest.mark.parametrize(('objective', 'batching'), CASES)
def test_every_example_once_a_pass(objective: str, batching: str) -> None:
    """And a batch that straddles two passes has the last rows of one and the first of the other."""
    batches = make(objective, batching)
    epochs = [[text for row in rows for text in texts_of(row, objective)] for rows in passes(batches, 3)]
    assert len(epochs[0]) == batches.num_examples
    whole = '->'.join if objective == 'seq2seq' else ''.join
    records = [whole(v for k, v in r.items() if k != 'label') for r in batches.records]
    if TASKS[objective].fields == ('text',):  # pieces: all the text, cut
        assert sorted(''.join(epochs[0])) == sorted(''.join(records))
        assert max(map(len, epochs[0])) <= LENGTH
    else:
        assert sorted(epochs[0]) == sorted(records)
    for other in epochs[1:]:
        assert sorted(other) == sorted(epochs[0]) and other != epochs[0]


@pytest.mark.parametrize('batching', BATCHING)
def test_after_whole_epochs_every_shape_is_within_a_batch_of_its_rows(batching: str) -> None:
    batches = make('seq2seq', batching, num_buckets=5)
    for epochs in (1, 2, 7):
        seen = np.zeros(len(batches.shapes))
        for step in range(round(epochs * batches.steps_per_epoch)):
            bucket, rows = batches._find(step)
            seen[bucket] += len(rows.part)
        wanted = [epochs * len(rows) for rows in batches.parts[0].by_bucket]
        assert (np.abs(seen - wanted) <= np.array(batches.widths)).all()


@pytest.mark.parametrize(('objective', 'batching'), CASES)
def test_evaluation_is_one_epoch_in_order(objective: str, batching: str) -> None:
    batches = make(objective, batching, training=False)
    rows = [batches.segments(step) for step in range(int(batches.steps_per_epoch))]
    seen = [[record for segments_ in batch for _, record, _ in segments_] for batch in rows]
    assert 'segment_ids' not in batches.batch(0)
    assert sorted(set(itertools.chain(*seen))) == list(range(len(batches.records)))
    assert all(list(records) == sorted(records) for records in seen)
    assert all(len(list(texts_of(batches.batch(s), objective))) == len(seen[s]) for s in range(len(rows)))
    assert_equal(batches.batch(1), make(objective, batching, training=False, seed=0).batch(1))
    with pytest.raises(IndexError):
        batches.batch(int(batches.steps_per_epoch))


@pytest.mark.parametrize('batching', BATCHING)
def test_causal_lm_predicts_every_token_once_with_the_one_before_as_input(batching: str) -> None:
    batches = make('causal_lm', batching)
    pairs = []
    for batch in passes(batches, 1)[0]:
        scored = batch['weights'] == 1
        pairs += zip(batch['inputs'][scored].tolist(), batch['targets'][scored].tolist(), strict=True)
    encoded = [[BOS, *bytes_and_characters.Byte().encode(r['text']), EOS] for r in batches.records]
    assert sorted(pairs) == sorted(pair for tokens in encoded for pair in itertools.pairwise(tokens))


@pytest.mark.slow
@pytest.mark.parametrize(('objective', 'batching'), CASES)
def test_resume_and_threads_change_nothing(objective: str, batching: str) -> None:
    batches = make(objective, batching)
    last = int(2 * batches.steps_per_epoch) + 2
    expected = [batches.batch(step) for step in range(last)]
    fresh = make(objective, batching)
    for start, num_threads, prefetch in ((0, 1, 2), (int(batches.steps_per_epoch) - 1, 4, 8)):
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
    assert len(list(pipeline.iterate(batches, 2, batches.config))) == int(batches.steps_per_epoch) - 2


def test_far_steps_cost_nothing() -> None:
    batches = make('seq2seq', 'pack')
    assert batches.batch(10**9).keys() == batches.batch(0).keys()


def test_batch_tokens_gives_short_rows_larger_batches() -> None:
    batches = make('causal_lm', 'bucket', batch_tokens=150, row_multiple=2)
    for step in range(int(batches.steps_per_epoch)):
        rows, length = batches.batch(step)['inputs'].shape
        assert rows == 150 // length // 2 * 2
    assert make('causal_lm', 'pad', batch_tokens=1, row_multiple=2).batch(0)['inputs'].shape == (2, LENGTH)
    for sides in ((24, 48), (48, 24)):  # the longer side counts
        (width,) = make('seq2seq', 'pad', batch_tokens=480, length=sides[0], encoder_length=sides[1]).widths
        assert width == 10


def test_the_row_multiple_that_is_given_comes_before_that_of_the_config() -> None:
    one = make('causal_lm', 'bucket', batch_tokens=150, row_multiple=2)
    tokens = tokenizers.train_tokenizers(one.config, one.records)
    other = pipeline.Batches(one.config, tokens, 'train', training=True, records=one.records, row_multiple=4)
    assert {rows % 4 for rows in other.widths} == {0} and {rows % 4 for rows in one.widths} >= {2}


@pytest.mark.parametrize('objective', ['seq2seq', 'classification'])
def test_overlong(objective: str) -> None:
    room = {'length': 12, 'encoder_length': None}
    dropped, cut = (make(objective, 'pad', overlong=how, **room) for how in ('drop', 'truncate'))
    fields = TASKS[objective].fields
    over = sum(any(len(r[f]) + (1 if f in ('source', 'target') else 2) > 12 for f in fields) for r in dropped.records)
    (drop,), (truncate,) = ([part.examples for part in batches.parts] for batches in (dropped, cut))
    assert 0 < over == drop.num_dropped == truncate.num_truncated
    assert (drop.num_truncated, truncate.num_dropped) == (0, 0)
    assert f'{over} left out as too long' in dropped.summary and f'{over} cut to the length' in cut.summary
    assert cut.num_examples == dropped.num_examples + over == len(cut.records)
    evaluated = make(objective, 'pad', overlong='drop', training=False, **room)
    assert (evaluated.num_examples, evaluated.parts[0].examples.num_truncated) == (cut.num_examples, over)
    with pytest.raises(UserError, match=r'no example within data.length=3'):
        make(objective, 'pad', length=3)
    with pytest.raises(UserError, match='has no room for text beside 2 special tokens'):
        make('masked_lm', 'pad', length=2)


def test_more_labels_than_sixteen_bits_hold(tmp_path) -> None:
    records = [{'label': f'{i:05d}', 'text': 'a'} for i in range(70_000)]
    model, data = Model(family='encoder'), Data(tokenizer='byte', cache_dir=str(tmp_path))
    config = Config(model=model, data=data, train=Train(objective='classification'))
    tokens = tokenizers.train_tokenizers(config, records)
    split = Split('many', lambda: (records, 0))
    batches = pipeline.Batches(config, tokens, 'train', training=False, records=split)
    assert batches.parts[0].examples.columns['label'].flat.tolist() == list(range(70_000))


def test_mistakes_of_batches() -> None:
    with pytest.raises(UserError, match='one label; use bucket'):
        make('classification', 'pack')
    with pytest.raises(UserError, match="did you mean 'bucket'"):
        make('causal_lm', 'buckets')
    config = Config(Model(family='encoder'), Data(tokenizer='byte'), train=Train(objective='classification'))
    tokens = tokenizers.train_tokenizers(config, some_records('classification'))
    with pytest.raises(UserError, match=r"record 1 of the valid split: label 'yess' .*did you mean 'yes'"):
        records = [{'label': 'yess', 'text': 'a'}]
        pipeline.Batches(config, tokens, 'valid', training=False, records=records)


# --------------------------------------------------------------------------------------------- corruption and plans


WORDS = bytes_and_characters.Symbol([str(i) for i in range(993)])  # 1000 ids


def test_corruption_rates() -> None:
    tokens = np.random.default_rng(0).integers(7, 1000, (500, 202))
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    made = [corrupt.mask_tokens(row, corrupt.Noise(Data(), WORDS, (i,))) for i, row in enumerate(tokens)]
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
    inputs, selected = corrupt.mask_tokens(tokens, corrupt.Noise(Data(), WORDS, (seed,)))
    assert selected.sum() == min(length, max(1, round(0.15 * length)))
    assert inputs.dtype == tokens.dtype and (tokens[1:-1] == 9).all()


@pytest.mark.parametrize('objective', ['masked_lm', 'masked_lm_nsp', 'replaced_token'])
@pytest.mark.parametrize('copies', [None, 1, 2])
def test_corruption_differs_by_epoch_or_by_copy(objective: str, copies: int | None) -> None:
    batches, made = make(objective, 'bucket', mask_copies=copies), {}
    epochs = passes_of_examples(batches, 3)
    for example in range(batches.num_examples):
        made[example] = [b''.join(values.tobytes() for _, values in sorted(e[example].items())) for e in epochs]
    same = [np.mean([made[i][one] == made[i][other] for i in made]) for one, other in ((0, 1), (0, 2), (1, 2))]
    static = {None: (), 1: (0, 1, 2), 2: (1,)}[copies]
    assert all(share == 1 if number in static else share < 0.3 for number, share in enumerate(same))


def passes_of_examples(batches: pipeline.Batches, count: int) -> list[dict[int, dict[str, np.ndarray]]]:
    """What was made of each example, one a row, in each of the first passes."""
    found: list[dict[int, dict[str, np.ndarray]]] = [{} for _ in range(count)]
    for step in range(int((count + 1) * batches.steps_per_epoch) + 8):
        batch, (_, rows) = batches.batch(step), batches._find(step)
        for row, ((_, _, example),) in enumerate(batches.segments(step)):
            if rows.epoch[row] < count:
                found[rows.epoch[row]][example] = {name: values[row] for name, values in batch.items()}
    assert all(len(some) == batches.num_examples for some in found)
    return found


@pytest.mark.parametrize('objective', MASKED)
def test_no_special_token_is_hidden(objective: str) -> None:
    batches = make(objective, 'bucket', mask_rate=0.9)
    for step in range(int(batches.steps_per_epoch)):
        batch = batches.batch(step)
        ordinary = bytes_and_characters.Byte().ordinary[batch['targets']]
        assert (batch['weights'] > 0).sum() > 0.8 * ordinary.sum() and not batch['weights'][~ordinary].any()
        unhidden = batch['weights'] == 0
        assert (batch['inputs'] == batch['targets'])[unhidden].all()
        assert not np.isin(batch['inputs'][batch['weights'] > 0], (PAD, CLS, SEP, BOS, EOS)).any()


def test_what_is_not_next_is_of_another_record_half_of_the_time() -> None:
    """Record i is of one letter of its own; one has no text."""
    texts = [chr(65 + i) * (4 * i + 1) for i in range(12)] + ['']
    batches = make('masked_lm_nsp', 'bucket', records=tuple({'text': text} for text in texts))
    labels, others = [], set()
    for epoch in passes_of_examples(batches, 60):
        for example, batch in epoch.items():
            text, types, real = batch['targets'], batch['token_types'], batch['positions'] >= 0
            first, second = text[real & (types == 0)], text[real & (types == 1)]
            assert (first[0], first[-1], second[-1]) == (CLS, SEP, SEP)
            record, start, stop = batches.parts[0].examples.spans[example]
            mine = texts[record][:1]
            first, second = (bytes_and_characters.Byte().decode(part) for part in (first, second))
            assert set(first) == {mine} and len(set(second)) == 1
            assert (second[0] == mine) == (batch['labels'] == 0) and batch['label_weights'] == 1
            assert len(first + second) <= max(stop - start, 2)
            if batch['labels']:
                others.add((mine, second[0]))
            labels += [batch['labels']] if stop - start > 1 else []  # nothing follows a single token
    assert abs(np.mean(labels) - 0.5) < 4 * np.sqrt(0.25 / len(labels))
    assert len(others) > 100


@pytest.mark.parametrize(('objective', 'family'), READERS)
def test_hosts_feed_the_rows_of_one_batch(objective: str, family: str) -> None:
    batches, others = make(objective, 'bucket', family), make(objective, 'bucket', family)
    for step in (0, 3, int(2 * batches.steps_per_epoch)):
        whole = batches.batch(step)
        for hosts in (1, 2, 4):
            shares = [others.batch(step, (host, hosts)) for host in range(hosts)]
            assert_equal({name: np.concatenate([share[name] for share in shares]) for name in whole}, whole)


@pytest.mark.slow
@pytest.mark.parametrize('objective', ['masked_lm_nsp', 'ul2'])
@pytest.mark.proof_cases('masked_lm_nsp')
def test_processes_corrupt_as_this_one_does(objective: str) -> None:
    batches = make(objective, 'bucket')
    start = int(batches.steps_per_epoch) - 1
    data = dataclasses.replace(batches.config.data, num_workers=2)
    made = pipeline.iterate(batches, start, dataclasses.replace(batches.config, data=data))
    for step, batch in zip(range(start, start + 5), made, strict=False):
        assert_equal(batch, batches.batch(step))
    made.close()


def test_more_worker_processes_than_the_cores_can_use_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(pipeline.os, 'cpu_count', lambda: 3)
    batches = make('causal_lm', 'pad')
    data = dataclasses.replace(batches.config.data, num_workers=13)
    with pytest.raises(UserError, match=r'^data\.num_workers=13 must be at most 12: 4 for each core$'):
        next(pipeline.iterate(batches, 0, dataclasses.replace(batches.config, data=data)))


# ---------------------------------------------------------------------------------- decoders that write from a source


def test_a_pair_of_texts_by_hand() -> None:
    made = make('seq2seq', 'pad', 'decoder', records=({'source': 'ab', 'target': 'c'},), length=8)
    byte = dict(zip('abc', bytes_and_characters.Byte().encode('abc'), strict=True))
    batch = {name: values[0].tolist() for name, values in made.batch(0).items()}
    assert batch['inputs'] == [BOS, byte['a'], byte['b'], SEP, byte['c'], PAD, PAD, PAD]
    assert batch['targets'] == [byte['a'], byte['b'], SEP, byte['c'], EOS, PAD, PAD, PAD]
    assert batch['weights'] == [0, 0, 0, 1, 1, 0, 0, 0]
    assert batch['prefix'] == [True] * 4 + [False] * 4


@pytest.mark.parametrize('batching', BATCHING)
def test_a_decoder_reads_the_source_and_writes_the_target(batching: str) -> None:
    batches = make('seq2seq', batching, 'decoder', length=50)
    causal = make('seq2seq', batching, 'decoder', length=50, bidirectional_prefix=False)
    found, decode = [], bytes_and_characters.Byte().decode
    for row in passes(batches, 1)[0]:
        for _, where in segments(row):
            inputs, targets, weights, prefix = (
                row[name][0, where] for name in ('inputs', 'targets', 'weights', 'prefix')
            )
            size = int(prefix.sum())
            np.testing.assert_array_equal(inputs[1:], targets[:-1])
            assert (inputs[0], inputs[size - 1], targets[-1]) == (BOS, SEP, EOS)
            assert prefix[:size].all() and weights.tolist() == [0] * (size - 1) + [1] * (len(where) - size + 1)
            found.append((decode(inputs[:size]), decode(targets[size - 1 :])))
    assert sorted(found) == sorted((r['source'], r['target']) for r in batches.records)
    for step in range(3):
        batch = batches.batch(step)
        batch.pop('prefix')
        assert_equal(batch, causal.batch(step))


def test_a_decoder_cuts_the_source_first() -> None:
    records = tuple({'source': 'a' * s, 'target': 'b' * t} for s, t in ((20, 20), (20, 3), (3, 20), (4, 4)))
    batches = make('seq2seq', 'pad', 'decoder', records=records, length=12, overlong='truncate', training=False)
    batch, decode = batches.batch(0), bytes_and_characters.Byte().decode
    for row, (source, target, ended) in enumerate(((5, 6, False), (7, 3, True), (3, 8, False), (4, 4, True))):
        prefix, scored = batch['prefix'][row], batch['weights'][row] > 0
        assert decode(batch['inputs'][row][prefix]) == 'a' * source
        assert decode(batch['targets'][row][scored]) == 'b' * target
        assert (batch['targets'][row][scored][-1] == EOS) == ended


LENGTHS = arrays.arrays(np.int64, st.tuples(st.integers(1, 60), st.integers(1, 2)), elements=st.integers(1, 20))


@pytest.mark.parametrize('pack', [packing.pack, packing.best_fit])
@given(LENGTHS, st.integers(1, 70), st.integers(0, 5), st.integers(1, 9))
@settings(deadline=None)
def test_packing_places_each_once_within_the_limits(
    pack: Any, lengths: np.ndarray, window: int, seed: int, few: int
) -> None:
    limits = np.array([20, 23])[: lengths.shape[1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, 'OPEN_ROWS', few)
        patch.setattr(packing, 'NEIGHBOURS', few)
        rows = Ragged.of(pack(lengths, limits, np.random.default_rng(seed), window))
        again = Ragged.of(pack(lengths, limits, np.random.default_rng(seed), window))
    assert rows.flat.tolist() == again.flat.tolist()
    assert sorted(rows.flat.tolist()) == list(range(len(lengths)))
    assert all((lengths[row].sum(axis=0) <= limits).all() for row in rows)


def test_packing_takes_the_example_that_fills_the_largest_shares_of_the_room_that_is_left() -> None:
    """Panigrahy et al. 2011, section 3: of rows of 10 and 100 tokens (6, 20) fills 0.6 + 0.2, and (2, 50) 0.2 + 0.5;
    beside it (1, 30) fills 0.1 * 0.4 + 0.3 * 0.8, and (4, 1) fills 0.4 * 0.4 + 0.01 * 0.8."""
    lengths, limits = np.array([[2, 50], [6, 20]]), np.array([10, 100])
    assert [row.tolist() for row in packing.pack(lengths, limits, np.random.default_rng(0))] == [[1, 0]]
    lengths = np.array([[6, 20], [4, 1], [1, 30]])
    assert [row.tolist() for row in packing.pack(lengths, limits, np.random.default_rng(0))] == [[0, 2], [1]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
@settings(deadline=None)
def test_best_fit_is_that_of_one_example_after_the_other(sizes: list[int]) -> None:
    """The fullest row that holds an example takes it, longest first; no row is closed before the end of a window."""
    free: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [index for index, room in enumerate(free) if room >= size]
        if not fits:
            free.append(20)
        free[min(fits, key=free.__getitem__) if fits else -1] -= size
    rows = packing.best_fit(np.array(sizes)[:, None], np.array([20]), np.random.default_rng(0))
    assert sorted(20 - sum(sizes[i] for i in row) for row in rows) == sorted(free)


def test_rows_with_room_wait_for_the_examples_of_later_windows() -> None:
    """Five windows of 64 neighbours, of which two have examples of 13 only: each may be followed by a 7, if one is left
    that has not found a row of two before."""
    lengths = np.repeat([13, 7], [128, 192])[:, None]
    seeds = [np.random.default_rng(seed) for seed in range(5)]
    rows = [len(list(packing.best_fit(lengths, np.array([20]), seed, window=64))) for seed in seeds]
    assert min(rows) == 128 + 32 and max(rows) < 128 + 96
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, 'OPEN_ROWS', 0)
        assert len(list(packing.best_fit(lengths, np.array([20]), np.random.default_rng(0), window=64))) == 128 + 96


def test_best_fit_wastes_less_than_the_packer_of_small_windows() -> None:
    sizes = np.random.default_rng(0).lognormal(6.3, 1.1, 6000).astype(int) + 1
    lengths = np.concatenate([np.full((sizes // 1024).sum(), 1024), (sizes % 1024)[sizes % 1024 > 0]])[:, None]
    least = lengths.sum() / 1024
    waste = [
        len(list(packing.BATCHING[name].rows(lengths, np.array([1024]), np.random.default_rng(0)))) / least - 1
        for name in ('pack', 'best_fit')
    ]
    assert waste[1] < 0.5 * waste[0] and waste[1] < 3e-4


@pytest.mark.parametrize('count', [1, 63, 64, 65, 1000])
def test_the_plan_of_best_fit_is_kept_and_its_damage_is_noticed(tmp_path, count: int, capsys) -> None:
    lengths = np.random.default_rng(0).integers(1, 20, count)
    spans = Spans(*np.zeros((2, count), int), lengths, [lengths], np.zeros(count, bool))
    examples = Examples({}, None, spans, 0, 0, 0, '')  # type: ignore[arg-type]
    config = Config(data=Data(cache_dir=str(tmp_path)))

    def laid() -> list[list[int]]:
        part = layout.lay_out(config, 0, examples, 1.0, 'best_fit', ((20,),), cached=True)
        return [row.tolist() for row in part.rows]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, '_AT_ONCE', 100)
        rows = laid()
        assert rows == laid() and sorted(itertools.chain(*rows)) == list(range(count))
    assert rows == laid()
    (file,) = tmp_path.glob('*/examples')
    file.write_bytes(bytes([255]) + file.read_bytes()[1:])
    assert rows == laid() and 'makes a damaged entry again' in capsys.readouterr().err


@given(st.lists(st.integers(1, 20), max_size=80), st.integers(1, 30), st.integers(1, 300))
@settings(deadline=None)
def test_packing_in_one_stack_is_that_of_one_example_after_the_other(sizes: list[int], window: int, few: int) -> None:
    """The last of the longest that fit comes next in a row, and a new row begins where none fits."""
    rows: list[list[int]] = []
    order_ = np.random.default_rng(3).permutation(len(sizes)).tolist()
    for start in range(0, len(order_), window):
        waiting, free = order_[start : start + window], 0
        while waiting:
            if not (fits := [size for example in waiting if (size := sizes[example]) <= free]):
                rows.append([])
                free = 20
                continue
            last = max(index for index, example in enumerate(waiting) if sizes[example] == max(fits))
            free -= max(fits)
            rows[-1].append(waiting.pop(last))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, '_AT_ONCE', few)  # several windows together, or one
        found = packing.pack(np.array(sizes, int)[:, None], np.array([20]), np.random.default_rng(3), window)
    assert [row.tolist() for row in found] == rows


def calls(function: Any, *arguments: Any) -> int:
    """Returns how many functions are called, C's and Python's."""
    seen = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event in ('call', 'c_call')

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return seen


def test_many_windows_are_packed_by_as_many_calls_as_few() -> None:
    """So a large set begins in seconds: the arrays of a call grow, and not the number of calls."""
    sizes = np.minimum(np.random.default_rng(0).integers(1, 100, 100_000), 64)[:, None]
    few, many = (
        calls(packing.pack, sizes[:count], np.array([64]), np.random.default_rng(0), 500) for count in (5000, 100_000)
    )
    assert many < 1.5 * few


def test_packing_wastes_little() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(100, 5000, 400)
    lengths = np.concatenate([np.full((sizes // 256).sum(), 256), (sizes % 256)[sizes % 256 > 0]])[:, None]
    rows = packing.pack(lengths, np.array([256]), rng)
    assert lengths.sum() / (256 * len(rows)) > 0.98
    source = rng.geometric(1 / 12, 20_000)
    pairs = np.stack([np.clip(source * rng.normal(1, 0.2, 20_000), 1, 128), np.clip(source, 1, 128)], axis=1).astype(
        int
    )
    rows = packing.pack(pairs, np.array([128, 128]), rng)
    most = pairs.sum() / (256 * np.ceil(pairs.sum(axis=0).max() / 128))  # the longer side alone, cut anywhere
    assert pairs.sum() / (256 * len(rows)) > 0.98 * most


@given(LENGTHS, st.integers(1, 8))
@settings(deadline=None)
def test_shapes_hold_every_example_and_more_of_them_waste_less(lengths: np.ndarray, num_buckets: int) -> None:
    limits = np.full(lengths.shape[1], 20)

    def slots(count: int) -> int:
        shapes = packing.bucket_shapes(lengths, limits, count)
        bucket = packing.bucket_of(lengths, shapes)
        assert len(shapes) <= count and set(bucket) == set(range(len(shapes)))
        assert (lengths <= np.array(shapes)[bucket]).all()
        return int(np.array(shapes)[bucket].sum())

    assert slots(num_buckets + 1) <= slots(num_buckets) <= slots(1) == lengths.max(axis=0).sum() * len(lengths)
    assert slots(61) == lengths.sum()


@pytest.mark.parametrize(
    ('lengths', 'number'),
    [
        ([20] * 50, 1),
        ([20] * 50 + [60] * 50, 2),
        ([20] * 5000 + [21] * 20 + [60] * 5000, 2),  # a third would save 20 of 405,000 positions
        ([*range(1, 65)], 8),  # eight equal parts pad 3.5 positions a row of 36; a ninth saves 16 of 2,304
    ],
)
def test_as_many_buckets_as_are_worth_a_shape(lengths: list[int], number: int) -> None:
    column = np.array(lengths)[:, None]
    assert packing.enough_buckets(column, np.array([64])) == number
    distinct, counts = np.unique(lengths, return_counts=True)
    assert packing.enough_buckets(distinct[:, None], np.array([64]), counts) == number
    assert packing.enough_buckets(column, np.array([64]), num_steps=2000) == number
    assert packing.enough_buckets(column, np.array([64]), num_steps=160) == min(number, 2)  # saves a fifth
    assert packing.enough_buckets(column, np.array([64]), num_steps=2) == 1


@given(arrays.arrays(np.int64, st.integers(1, 12), elements=st.integers(1, 20)), st.integers(1, 4))
@settings(deadline=None)
def test_shapes_are_near_the_best_there_are(lengths: np.ndarray, num_buckets: int) -> None:
    def slots(boundaries: tuple[int, ...]) -> int:
        return sum(min(b for b in boundaries if b >= length) for length in lengths.tolist())

    found = tuple(length for (length,) in packing.bucket_shapes(lengths[:, None], np.array([20]), num_buckets))
    *shorter, longest = np.unique(lengths).tolist()
    divisions = [c for n in range(num_buckets) for c in itertools.combinations(shorter, n)]
    best = min(slots((*c, longest)) for c in divisions)
    assert slots(found) <= 1.25 * best and (num_buckets > 2 or slots(found) == best)


@given(st.integers(1, 3000) | st.integers(1, 1 << 40), st.integers(0, 9))
@settings(deadline=None)
def test_a_permutation_has_every_place_once(size: int, key: int) -> None:
    some = np.arange(min(size, 5000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, '_SMALL', 0 if key % 2 else order._SMALL)
        places = order.permuted(some, size, (1, key))
        assert len(set(places.tolist())) == len(some) and places.min() >= 0 and places.max() < size
        np.testing.assert_array_equal(places[::7], order.permuted(some[::7], size, (1, key)))
        other = order.permuted(some, size, (1, key + 2))
    assert size < 50 or (places != other).any()


def test_large_permutations_are_even() -> None:
    size, bins = 100_003, 10
    for key in range(3):
        places = order.permuted(np.arange(size), size, (key,))
        moved = np.histogram2d(np.arange(size), places, bins=bins)[0]
        expected = size / bins**2
        assert ((moved - expected) ** 2 / expected).sum() < 150  # chi square of 81 degrees of freedom: 99.9999 %
        assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.02


RATES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6).map(np.array)


@given(RATES, st.integers(0, 300), st.integers(1, 60))
def test_interleaving_is_by_time_from_any_place(rates: np.ndarray, start: int, count: int) -> None:
    stream, item = order.interleave(rates, start, count)
    shares, last = rates / rates.sum(), start + count
    times = sorted(((i + 0.5) / share, c, i) for c, share in enumerate(shares) for i in range(last))
    assert [(c, i) for _, c, i in times[start:last]] == list(zip(stream.tolist(), item.tolist(), strict=True))


@given(RATES, st.integers(0, 1 << 40))
@settings(deadline=None)
def test_every_stream_is_near_its_share_however_far(rates: np.ndarray, start: int) -> None:
    stream, item = order.interleave(rates, start, 50)
    later = order.interleave(rates, start + 20, 30)
    np.testing.assert_array_equal(stream[20:], later[0])
    np.testing.assert_array_equal(item[20:], later[1])
    shares = rates / rates.sum()
    assert (np.abs(item - (start + np.arange(50)) * shares[stream]) <= len(rates) + 1e-9 * start).all()


# --------------------------------------------------------------------------------------------------- what is loaded


def test_imports_and_exit_are_clean() -> None:
    """Neither TensorFlow nor torch is loaded, and a process that leaves an iterator open ends without a word."""
    script = """
import sys
from tformer.config import Model
from tformer.config.run import Config, Data, Train
from tformer.data.batches import pipeline
from tformer.data.tokenizers import tokenizers
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
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG)
    assert (done.stdout, done.stderr) == ('[] []\n', '')
