"""The rows of batches: every row once a pass, in another order each time, and the bucket of each example."""

import numpy as np

from tformer.data.batches import layout, mixture, packing
from tformer.data.ragged import Ragged


def part(count: int, epochs: float = 1.0) -> layout.Part:
    """Returns a part of `count` rows of one shape."""
    rows = Ragged(np.arange(count, dtype=np.int32), np.arange(count + 1))
    return layout.Part(None, rows, (np.arange(count),), epochs)  # type: ignore[arg-type]


def passes(seed: int, count: int = 12, width: int = 4) -> list[list[int]]:
    """Returns the rows of the first three passes."""
    sampler = layout.TrainSampler([part(count)], [width], seed)
    rows = [sampler.find(step)[1].row.tolist() for step in range(3 * count // width)]
    flat = [row for batch in rows for row in batch]
    return [flat[i : i + count] for i in range(0, len(flat), count)]


def test_each_pass_has_every_row_once_in_an_order_of_its_own():
    found = passes(seed=0)
    assert all(sorted(each) == list(range(12)) for each in found)
    assert len({tuple(each) for each in found}) == 3


def test_the_order_is_that_of_the_seed():
    assert passes(seed=0) == passes(seed=0)
    assert passes(seed=0) != passes(seed=1)


def test_an_evaluation_has_every_row_in_order_and_fills_its_last_batch_with_empty_ones():
    sampler = layout.EvalSampler([part(3), part(2)], [2])
    assert sampler.steps_per_epoch == 3
    found = [sampler.find(step)[1] for step in range(3)]
    assert np.concatenate([rows.part for rows in found]).tolist() == [0, 0, 0, 1, 1, -1]
    assert np.concatenate([rows.row for rows in found]).tolist() == [0, 1, 2, 0, 1, -1]


def test_an_example_is_in_the_smallest_shape_that_holds_it():
    lengths = np.array([[3, 3], [4, 3], [3, 5], [8, 8], [1, 8]])
    assert packing.bucket_of(lengths, ((4, 4), (4, 8), (8, 8))).tolist() == [0, 0, 1, 2, 1]
    assert packing.bucket_of(lengths, ((4, 8), (4, 4))).tolist() == [1, 1, 0, -1, 0]


def test_shares_are_of_weights_to_the_power_of_one_over_the_temperature():
    """Parts of 100 and 400 examples: shares 1/5 and 4/5; 1/3 and 2/3 at temperature 2."""
    np.testing.assert_allclose(mixture.epochs_of_parts([None, None], [100, 400], 1.0), [1, 1])
    np.testing.assert_allclose(mixture.epochs_of_parts([None, None], [100, 400], 2.0), [500 / 3 / 100, 1000 / 3 / 400])
    np.testing.assert_allclose(mixture.epochs_of_parts([3.0, 1.0], [100, 400], 1.0), [3.75, 125 / 400])
