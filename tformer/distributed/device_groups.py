"""The groups of devices of a collective, from its text (HLO), and the axes of the mesh that they span."""

import functools
import re

import numpy as np

Sizes = tuple[tuple[str, int], ...]  # the mesh: its axes in order, each with its size

_PAIRS = re.compile(r'source_target_pairs=\{(\{[\d,{} ]*\})?\}')
_LISTED = re.compile(r'replica_groups=\{(\{[\d,{} ]*\})?\}')
_IOTA = re.compile(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}')


@functools.lru_cache(maxsize=1024)
def of(attributes: str, mesh: Sizes) -> tuple[tuple[str, ...], int]:
    """Returns (the axes of `mesh` along which the devices of a group differ, how many devices a group has).

    Reads lists ({{0,1},{2,3}}), iotas ([2,2]<=[4], transposed too), axes of a mesh of XLA's own, and pairs.

    Raises:
      ValueError: the text has none of them.
    """
    members = devices(attributes, int(np.prod([size for _, size in mesh])))
    places = np.unravel_index(members, tuple(size for _, size in mesh))
    axes = tuple(axis for (axis, _), place in zip(mesh, places, strict=True) if (place != place[:, :1]).any())
    return axes, members.shape[1]


def devices(attributes: str, count: int) -> np.ndarray:
    """Returns the numbers of the devices, of `count`, in each group: int [groups, size]."""
    if found := _PAIRS.search(attributes) or _LISTED.search(attributes):
        listed = [_ints(group) for group in re.findall(r'\{([\d, ]+)\}', found[1] or '')]
        longest = max(map(len, listed), default=0)
        return np.array([group + group[:1] * (longest - len(group)) for group in listed] or [list(range(count))])
    if found := _IOTA.search(attributes):
        return _iota(found[2], found[3]).reshape(_ints(found[1]))
    if found := _MESH.search(attributes):
        return _along(*found.groups())
    raise ValueError(f'no groups of devices in {attributes[:200]!r}')


def _iota(shape: str, order: str | None) -> np.ndarray:
    numbers = np.arange(np.prod(_ints(shape))).reshape(_ints(shape))
    return numbers.transpose(_ints(order)) if order else numbers


def _along(axes: str, device_ids: str | None, grouped: str) -> np.ndarray:
    """Returns the groups along axes: "'a'=2,'b'=4", '[2,4]T(1,0)' or a list or None, "'a'" or "'b':(2)2": two of b's
    four, after two."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    parts = re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", grouped)
    shape: list[int] = []
    chosen: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        cuts = [(int(before), int(cut)) for part, before, cut in parts if part == name and before]
        left = 1  # how far the axis is cut up
        for before, cut in sorted(cuts):
            chosen[name, before] = len(shape) + 1
            shape += [before // left, cut]
            left = before * cut
        if not cuts:
            chosen[name, 0] = len(shape)
        shape.append(size // left)
    if device_ids is None:
        numbers = np.arange(np.prod(shape))
    elif device_ids.startswith('['):
        dims, _, order = device_ids.partition('T')
        numbers = _iota(dims, order)
    else:
        numbers = np.array(_ints(device_ids))
    last = [chosen[name, int(before or 0)] for name, before, _ in parts]
    rest = [axis for axis in range(len(shape)) if axis not in last]
    size = int(np.prod([shape[axis] for axis in last]))
    return numbers.reshape(shape).transpose(rest + last).reshape(-1, size)


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r'\d+', text)]
