"""Products of a step's few tokens, which travel to the parts of a kernel; of many tokens the parts do (`fsdp`)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from flax import linen as nn

from tformer.distributed import sharding
from tformer.layers.parallel.each_device import free_axes, split, ways

STEP = 16  # tokens of a row that a step of decoding reads, at most
LEAST = 2**20  # numbers of a kernel; the parts of a smaller one arrive as soon as tokens do, there and back


class Travel(NamedTuple):
    """Where tokens are multiplied by a kernel whose parts stay (Pope et al. 2023, 3.2: weight-stationary)."""

    rows: tuple[str, ...]  # the axes of the mesh that split rows
    shared: set[str]  # those that split tokens, and the kernel too
    axes: dict[str, tuple[str, ...]]  # those that split each axis of the product, by its letter; B: rows

    def to_kernel(self, x: jax.Array, letters: str) -> jax.Array:
        """Returns an operand where the parts of the kernel are, or the result where they have made it."""
        return sharding.divided(x, [self.axes.get(letter, ()) for letter in letters])

    def back(self, y: jax.Array, letters: str) -> jax.Array:
        """Returns the result, or the sum of what the parts have made of it, where its rows are."""
        if any(self.shared.intersection(self.axes.get(letter, ())) for letter in letters if letter != 'B'):
            y = self.to_kernel(y, letters)
        left = {letter: tuple(axis for axis in axes if axis not in self.shared) for letter, axes in self.axes.items()}
        return sharding.divided(y, [self.rows if letter == 'B' else left.get(letter, ()) for letter in letters])


def travel(equation: str, x: jax.Array, shape: Sequence[int], names: Sequence[str | None]) -> Travel | None:
    """Returns how x meets a kernel of a shape and logical names in a product, or a table; None: where x is.

    Tokens travel where the same axes of the mesh split tokens and kernel, and what they are and become has fewer
    numbers than the kernel.
    """
    inputs, rest = equation.split(',')
    letters, outputs = rest.split('->')
    mesh, rules = jax.sharding.get_abstract_mesh(), nn.get_logical_axis_rules()
    tokens = [size for letter, size in zip(inputs, x.shape, strict=False) if letter not in letters]
    if mesh.size == 1 or not rules or math.prod(shape) < LEAST or math.prod(tokens[1:]) > STEP:
        return None
    rows = split('batch', x.shape[0]) or ()
    own, free = sharding.axes_of(shape, names, rules, mesh), free_axes()
    axes = {letter: tuple(axis for axis in each if axis in free) for letter, each in zip(letters, own, strict=True)}
    lengths = split('length', 0) or ()  # also where they do not divide the few tokens
    shared = {axis for each in axes.values() for axis in each}.intersection((*rows, *lengths))
    axes['B'] = tuple(axis for axis in rows if axis not in shared)
    sizes = dict(zip(letters, shape, strict=True))
    moved = sum(math.prod(sizes.get(letter, 1) for letter in each) for each in (inputs, outputs))  # of a token
    many = math.prod(tokens) // ways(axes['B']) * moved >= math.prod(shape)
    return None if many or not shared else Travel(rows, shared, axes)
