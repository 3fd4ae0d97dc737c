"""Samplers over random layouts: every row once a pass, in parts and buckets of any size, and shares of mixtures."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.config import Config, Train
from tformer.data import order
from tformer.data.batches import layout, mixture
from tformer.data.examples.example_arrays import Examples
from tformer.data.examples.pieces import Spans
from tformer.errors import UserError

FEW = settings(max_examples=15)
COUNTS = st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), min_size=1, max_size=3).filter(
    lambda parts: all(map(sum, parts)) and all(np.sum(parts, axis=0))
)
WIDTHS = st.lists(st.integers(1, 5), min_size=2, max_size=2)


def parts_of(counts: list[list[int]], epochs: list[float], seed: int = 0) -> list[layout.Part]:
    """Parts whose rows are dealt to two buckets at random; samplers read nothing of the examples."""
    rng, parts = np.random.default_rng(seed), []
    for sizes, passes in zip(counts, epochs, strict=True):
        bucket = rng.permutation(np.repeat(np.arange(2), sizes))
        by_bucket = tuple(np.flatnonzero(bucket == index) for index in range(2))
        parts.append(layout.Part(None, np.arange(sum(sizes)), by_bucket, passes))  # type: ignore[arg-type]
    return parts


def example_of_lengths(sizes: np.ndarray) -> Examples:
    nowhere = np.zeros_like(sizes)
    spans = Spans(nowhere, nowhere, sizes, [sizes], nowhere.astype(bool))
    return Examples({}, None, spans, 0, 0, 0, '')  # type: ignore[arg-type]


def steps(sampler, count: int):
    """(bucket, part, epoch, row) of every row of the first `count` batches, in order."""
    for step in range(count):
        bucket, rows = sampler.find(step)
        yield from zip(itertools.repeat(bucket), rows.part.tolist(), rows.epoch.tolist(), rows.row.tolist())


@FEW
@given(COUNTS, WIDTHS, st.integers(0, 99))
def test_training_takes_every_row_once_before_any_a_second_time(counts, widths: list[int], seed: int) -> None:
    parts = parts_of(counts, [1.0] * len(counts), seed)
    sampler = layout.TrainSampler(parts, widths, seed)
    totals = np.sum(counts, axis=0)
    assert sampler.steps_per_epoch == pytest.approx((totals / widths).sum())
    seen: dict = {}
    for bucket, part, epoch, row in steps(sampler, int(3 * sampler.steps_per_epoch) + 2):
        assert row in parts[part].by_bucket[bucket]
        so_far = seen.setdefault((bucket, part), [])
        assert epoch == len(so_far) // counts[part][bucket]
        assert row not in so_far[epoch * counts[part][bucket] :]
        so_far.append(row)
    passes = {len(rows) / counts[part][bucket] for (bucket, part), rows in seen.items()}
    assert min(passes) > 1


@FEW
@given(COUNTS, WIDTHS, st.integers(0, 99))
def test_each_pass_has_an_order_of_its_own_that_the_seed_decides(counts, widths: list[int], seed: int) -> None:
    parts = parts_of([[100, 60], *counts], [1.0] * (1 + len(counts)))
    one, again, other = (layout.TrainSampler(parts, widths, number) for number in (seed, seed, seed + 1))
    count = int(2.5 * one.steps_per_epoch)
    rows = list(steps(one, count))
    assert rows == list(steps(again, count)) != list(steps(other, count))
    passes = [[row for b, part, epoch, row in rows if (b, part, epoch) == (0, 0, number)] for number in (0, 1)]
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1] != sorted(passes[1])


def test_every_part_and_every_shape_has_an_order_of_its_own() -> None:
    """Two parts, alike, with twenty rows of each of two shapes."""
    shapes = np.arange(20), np.arange(20, 40)
    parts = [layout.Part(None, np.arange(40), shapes, 1.0) for _ in range(2)]  # type: ignore[arg-type]
    orders: dict = {}
    for bucket, part, _, row in steps(layout.TrainSampler(parts, [5, 5], 0), 16):
        orders.setdefault((bucket, part), []).append(row - 20 * bucket)
    assert all(sorted(order) == list(range(20)) for order in orders.values())
    assert len(orders) == len(set(map(tuple, orders.values()))) == 4


def test_every_part_is_packed_in_an_order_of_its_own_that_the_seed_decides() -> None:
    examples = example_of_lengths(np.full(40, 3))

    def packed(part: int, seed: int) -> tuple[int, ...]:
        config = Config(train=Train(seed=seed))
        laid = layout.lay_out(config, part, examples, 1.0, 'pack', ((9,),), cached=False)
        return tuple(laid.rows.flat.tolist())

    assert packed(0, 0) == packed(0, 0) and len({packed(part, seed) for part in (0, 1) for seed in (0, 1)}) == 4


@FEW
@given(COUNTS, WIDTHS, st.lists(st.floats(0.2, 5), min_size=3, max_size=3))
def test_parts_are_seen_in_proportion_to_their_rows_and_passes(counts, widths: list[int], epochs) -> None:
    """Within a row of a batch for each bucket and part, after a whole number of mixture's epochs."""
    parts = parts_of(counts, epochs[: len(counts)])
    sampler = layout.TrainSampler(parts, widths, 0)
    rows = list(steps(sampler, round(20 * sampler.steps_per_epoch)))
    for part, each in enumerate(parts):
        found = sum(1 for _, index, _, _ in rows if index == part)
        assert found == pytest.approx(20 * len(each.rows) * each.epochs, abs=2 * sum(widths) + 4)


@FEW
@given(COUNTS, WIDTHS)
def test_evaluation_takes_every_row_once_and_completes_batches_with_empty_rows(counts, widths: list[int]) -> None:
    parts = parts_of(counts, [1.0] * len(counts))
    sampler = layout.EvalSampler(parts, widths, ((9, 4), (4, 9)))  # neither holds the other
    found = [(bucket, part, row) for bucket, part, _, row in steps(sampler, sampler.steps_per_epoch)]
    expected = {(b, p, row) for p, part in enumerate(parts) for b in range(2) for row in part.by_bucket[b].tolist()}
    taken = [each for each in found if each[1] >= 0]
    assert len(taken) == len(expected) and set(taken) == expected
    assert all(row == -1 for _, part, row in found if part < 0)
    batches = [sampler.find(step) for step in range(sampler.steps_per_epoch)]
    assert all(len(rows.part) == widths[bucket] and rows.part[0] >= 0 for bucket, rows in batches)
    firsts = [(rows.part[0], rows.row[0]) for _, rows in batches]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    ('counts', 'widths', 'shapes', 'wanted'),
    [
        ([4, 4, 4], [8, 8, 8], [(8,), (16,), (32,)], [0, 1, 2]),
        ([3, 4, 1], [8, 8, 8], [(8,), (16,), (32,)], [1, 1, 2]),  # nothing is larger than the last
        ([1, 2, 1], [8, 8, 8], [(8,), (16,), (32,)], [2, 2, 2]),  # 1 + 2 are rare still
        ([1, 3, 1], [8, 8, 8], [(8,), (16,), (32,)], [1, 1, 2]),
        ([1, 0, 1], [8, 8, 8], [(8,), (16,), (32,)], [2, 1, 2]),  # no batch has the second
        ([1, 9, 9], [8, 4, 2], [(8,), (16,), (32,)], [0, 1, 2]),  # rows by data.batch_tokens
        ([1, 1, 5], [8, 8, 8], [(8, 16), (16, 8), (16, 16)], [2, 2, 2]),
        ([1, 9, 9], [8, 8, 8], [(8, 16), (16, 8), (32, 16)], [2, 1, 2]),
    ],
)
def test_rare_shapes_of_evaluations_are_padded_to_the_smallest_larger_one(counts, widths, shapes, wanted) -> None:
    assert layout.fewer_shapes(counts, widths, shapes) == wanted


SHARES = st.lists(st.tuples(st.integers(1, 1000), st.none() | st.floats(0.01, 100)), min_size=1, max_size=5)


@given(SHARES, st.floats(1, 10), st.floats(0.1, 10))
def test_shares_of_a_mixture_follow_its_weights_in_any_unit(parts, temperature: float, factor: float) -> None:
    """The share of a part is (its weight / all)^(1 / T), normalised; an epoch has as many examples as all parts."""
    counts, weights = [count for count, _ in parts], [count if weight is None else weight for count, weight in parts]
    epochs = mixture.epochs_of_parts([weight for _, weight in parts], counts, temperature)
    amounts = np.array(epochs) * counts
    expected = np.array([(weight / sum(weights)) ** (1 / temperature) for weight in weights])
    np.testing.assert_allclose(amounts / sum(counts), expected / expected.sum(), rtol=1e-9)
    scaled = mixture.epochs_of_parts([factor * weight for weight in weights], counts, temperature)
    assert scaled == pytest.approx(epochs)
    assert mixture.epochs_of_parts([None] * len(counts), counts, 1.0) == pytest.approx([1.0] * len(counts))


def test_a_part_with_no_share_is_named() -> None:
    with pytest.raises(UserError, match=r'data\.mixture\[1\] is never seen: its share of the examples is 1e-20'):
        mixture.epochs_of_parts([1.0, 1e-20], [5, 5], 1.0)


# ------------------------------------------------------------------------------------------------- stages of a mixture


@FEW
@given(COUNTS, WIDTHS, st.integers(0, 99), st.data())
def test_stages_take_every_row_once_a_pass_and_each_goes_on_where_the_last_one_ends(counts, widths, seed, data) -> None:
    passes = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(counts), max_size=len(counts)).filter(any)
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=3))
    stages = [(sum(sizes[: i + 1]), data.draw(passes)) for i in range(len(sizes))]
    parts = parts_of(counts, [1.0] * len(counts), seed)
    sampler = layout.TrainSampler(parts, widths, seed, stages)
    seen: dict = {}
    for step in range(sum(sizes) + 20):
        bucket, rows = sampler.find(step)
        weights = [own for start, own in stages if start <= step]
        for part, epoch, row in zip(rows.part.tolist(), rows.epoch.tolist(), rows.row.tolist(), strict=True):
            assert not weights or weights[-1][part]
            seen.setdefault((bucket, part), []).append((epoch, row))
    for (bucket, part), taken in seen.items():
        size = counts[part][bucket]
        in_order = sorted(range(len(taken)), key=lambda i: i // size)
        assert [taken[i][0] for i in in_order] == [i // size for i in in_order]
        whole = [{row for epoch, row in taken if epoch == number} for number in range(len(taken) // size)]
        assert all(rows == set(parts[part].by_bucket[bucket].tolist()) for rows in whole)
    plain = layout.TrainSampler(parts, widths, seed)
    for step in range(min((start for start, _ in stages), default=10)):
        found, wanted = sampler.find(step), plain.find(step)
        assert found[0] == wanted[0] and all(map(np.array_equal, vars(found[1]).values(), vars(wanted[1]).values()))


def test_rows_of_a_stage_are_in_its_proportions() -> None:
    parts = parts_of([[500, 0], [100, 0], [50, 0]], [1.0, 1.0, 1.0])
    parts = [layout.Part(None, part.rows, part.by_bucket[:1], 1.0) for part in parts]  # type: ignore[arg-type]
    sampler = layout.TrainSampler(parts, [10], 0, [(100, [0.0, 3.0, 3.0]), (200, [1.0, 5.0, 0.0])])

    def shares(start: int, stop: int) -> list[int]:
        rows = np.concatenate([sampler.find(step)[1].part for step in range(start, stop)])
        return np.bincount(rows, minlength=3).tolist()

    assert shares(100, 200) == [0, 667, 333] and shares(200, 300) == [500, 500, 0]
    assert shares(0, 65) == [500, 100, 50]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 1 << 40))
@settings(deadline=None)
def test_what_is_taken_is_what_the_order_holds(rates: list[float], count: int) -> None:
    counts = order.taken(np.array(rates), count)
    assert counts.sum() == count
    stream, item = order.interleave(np.array(rates), count, 60)
    for number in set(stream.tolist()):
        assert item[stream == number][0] == counts[number]
