"""Groups of devices are read from every form that XLA writes, against groups enumerated by loops over the mesh."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.distributed import device_groups

NAMES = 'abcd'
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4).map(tuple)
Groups = list[list[int]]


def number(place: dict[int, int], shape: tuple[int, ...]) -> int:
    """The number of the device at a place: the last axis counts fastest."""
    found = 0
    for axis, size in enumerate(shape):
        found = found * size + place[axis]
    return found


def along(shape: tuple[int, ...], order: list[int]) -> list[int]:
    """The devices in the order in which the axes `order` count, the last of them fastest."""
    places = itertools.product(*(range(shape[axis]) for axis in order))
    return [number(dict(zip(order, place, strict=True)), shape) for place in places]


def split(numbers: list[int], size: int) -> Groups:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def text(numbers) -> str:
    return ','.join(map(str, numbers))


def listed(groups: Groups) -> str:
    return '{' + ','.join('{' + text(group) + '}' for group in groups) + '}'


@settings(max_examples=40)
@given(SHAPES, st.data())
def test_every_form_names_the_same_groups(shape: tuple[int, ...], data: st.DataObject) -> None:
    axes = list(range(len(shape)))
    chosen = sorted(data.draw(st.sets(st.sampled_from(axes))))
    order = [axis for axis in axes if axis not in chosen] + chosen
    groups = split(along(shape, order), math.prod(shape[axis] for axis in chosen))
    mesh = tuple(zip(NAMES, shape, strict=False))
    sizes = ','.join(f"'{name}'={size}" for name, size in mesh)
    grouped = ','.join(f"'{NAMES[axis]}'" for axis in chosen)
    counts = f'{len(groups)},{len(groups[0])}'
    forms = [
        f'channel_id=1, replica_groups={listed(groups)}, use_global_device_ids=true',
        f'replica_groups=[{counts}]<=[{text(shape)}]T({text(order)}), dimensions={{0}}',
        f'replica_groups=mesh[{sizes}] {{{grouped}}}',
    ]
    if order == axes:
        forms.append(f'replica_groups=[{counts}]<=[{text(shape)}]')
    for form in forms:
        assert device_groups.devices(form, math.prod(shape)).tolist() == groups
        spanned = tuple(NAMES[axis] for axis in chosen if shape[axis] > 1)
        assert device_groups.of(form, mesh) == (spanned, len(groups[0]))


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([2, 3]), st.sampled_from([1, 2, 4]))
def test_a_part_of_an_axis_is_cut_out_of_its_middle(outer: int, before: int, cut: int, after: int) -> None:
    """'b':(before)cut of an axis of before x cut x after devices."""
    shape = (outer, before, cut, after)
    form = f"replica_groups=mesh['a'={outer},'b'={before * cut * after}] {{'b':({before}){cut}}}"
    found = device_groups.devices(form, math.prod(shape))
    assert found.tolist() == split(along(shape, [0, 1, 3, 2]), cut)


def test_the_devices_of_a_mesh_may_have_another_order() -> None:
    """A mesh of 2 x 3: its rows are 0 2 4 and 1 3 5 as iota or list, so the pairs along 'a' are neighbours."""
    for ids in ('[3,2]T(1,0)', '0,2,4,1,3,5'):
        form = f"replica_groups=mesh['a'=2,'b'=3], device_ids=({ids}) {{'a'}}"
        assert device_groups.devices(form, 6).tolist() == [[0, 1], [2, 3], [4, 5]]


@settings(max_examples=40)
@given(SHAPES, st.data())
def test_pairs_of_a_ring_span_its_axis_alone(shape: tuple[int, ...], data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    rings = split(along(shape, [other for other in range(len(shape)) if other != axis] + [axis]), shape[axis])
    pairs = [[device, ring[(i + 1) % len(ring)]] for ring in rings for i, device in enumerate(ring)]
    form = f'source_target_pairs={listed(pairs)}, metadata={{}}'
    mesh = tuple(zip(NAMES, shape, strict=False))
    assert device_groups.of(form, mesh) == ((NAMES[axis],) if shape[axis] > 1 else (), 2)


def test_no_group_is_one_of_all_devices_and_unequal_ones_are_filled_with_their_first() -> None:
    assert device_groups.devices('replica_groups={}', 4).tolist() == [[0, 1, 2, 3]]
    assert device_groups.devices('replica_groups={{0,1,2},{3}}', 4).tolist() == [[0, 1, 2], [3, 3, 3]]
    assert device_groups.of('replica_groups={}', (('a', 2), ('b', 1), ('c', 2))) == (('a', 'c'), 4)
    with pytest.raises(ValueError, match='no groups of devices'):
        device_groups.devices('dimensions={0}', 4)
