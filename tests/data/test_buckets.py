"""The shape that each example is padded to."""

import numpy as np

from tformer.data.batches import packing


def test_an_example_is_in_the_smallest_shape_that_holds_it():
    lengths = np.array([[3, 3], [4, 3], [3, 5], [8, 8], [1, 8]])
    assert packing.bucket_of(lengths, ((4, 4), (4, 8), (8, 8))).tolist() == [0, 0, 1, 2, 1]
    assert packing.bucket_of(lengths, ((4, 8), (4, 4))).tolist() == [1, 1, 0, -1, 0]
