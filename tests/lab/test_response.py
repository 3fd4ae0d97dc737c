"""Fields of a sweep that its arms do not tell apart."""

import pytest

from tformer.lab.report import response


@pytest.mark.parametrize(
    ('first', 'second', 'together'),
    [
        ([1, 2, 3], [10, 20, 30], True),
        ([1, 2, 3], [0.5, 0.25, 0.125], True),  # one rises where the other falls
        ([1, 2, 3], [10, 30, 20], False),
        ([1, 1, 2], [5, 5, 7], True),
        ([1, 1, 2], [5, 6, 7], False),
        (['a', 'b', 'a'], [3, 4, 3], True),
        (['a', 'b', 'c'], [3, 5, 4], True),  # words have no order
    ],
)
def test_fields_are_told_apart_where_they_part_the_arms_otherwise(first, second, together):
    stated = [{'a': one, 'b': other, 'c': 0} for one, other in zip(first, second, strict=True)]
    assert response._independent(stated) == ({'a': ['b']} if together else {'a': [], 'b': []})
