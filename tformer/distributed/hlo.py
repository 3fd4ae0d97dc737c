"""Counts the products and collectives of a compiled program from its text (HLO); loops count as often as they run."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from tformer.distributed import device_groups


class Instruction(NamedTuple):
    """One line of a computation, as text; `literal` is the text between its parentheses."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str
    root: bool


Computation = Mapping[str, Instruction]
Cost = Callable[[Instruction, Computation], float]


class Program(NamedTuple):
    """Computations by name, and the name of the one that runs first."""

    computations: Mapping[str, Computation]
    entry: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over the same axes of the mesh, in one run of a program on one device.

    Attributes:
      kind: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute ...
      axes: the axes of the mesh along which the devices of a group differ, in the order of the mesh.
      count: how many collectives run.
      bytes: the bytes that the device sends, by the table `SENT`. A number that is widened just before it is sent, as
        the CPU compiler does with bfloat16, counts in its narrow type.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: float


# Kind -> the bytes that a device sends per byte of its operands, on a ring of n devices (Chan et al. 2007, section 4).
SENT: dict[str, Callable[[int], float]] = {
    'all-gather': lambda n: n - 1,  # the operand is 1/n of the result
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'ragged-all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
    'collective-broadcast': lambda n: 1,
}


# ------------------------------------------------------------------------------------------------ reading
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) .*\{$')
_LINE = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=]*)\]')


def parse(text: str) -> Program:
    """Returns the program of a text such as that of `compiled.as_text()`."""
    computations: dict[str, dict[str, Instruction]] = {}
    current, entry = '', ''
    for line in text.splitlines():
        if line[:1] in ('%', 'E') and (header := _HEADER.match(line)):
            current = header[2]
            computations[current] = {}
            entry = current if header[1] else entry
        elif current and (found := _LINE.match(line)):
            computations[current][found[2]] = _instruction(found[2], found[3], bool(found[1]))
        elif line.startswith('}'):
            current = ''
    return Program(computations, entry)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith('(') else text.index(' ')
    opens = text.index('(', end)
    closes = _closing(text, opens)
    inside = text[opens + 1 : closes]
    operands = tuple(re.findall(r'%([\w.\-]+)', inside))
    return Instruction(name, text[:end], text[end:opens].strip(), operands, text[closes + 1 :], inside, root)


def _closing(text: str, start: int) -> int:
    """Returns the index at which the parenthesis closes that opens at `start`."""
    depth = 0
    for found in re.compile(r'[()]').finditer(text, start):
        depth += 1 if found[0] == '(' else -1
        if not depth:
            return found.start()
    raise ValueError(f'unbalanced: {text[:80]}')


def dims(shape: str) -> tuple[int, ...]:
    """Returns the sizes of an array's axes: (4, 8) of 'f32[4,8]{1,0}'."""
    found = _ARRAY.match(shape)
    assert found, shape
    return tuple(int(size) for size in re.findall(r'\d+', found[2]))


def num_bytes(shape: str) -> float:
    """Returns the bytes of an array, or of a tuple's arrays together."""
    total = 0.0
    for dtype, sizes in _ARRAY.findall(shape):
        width = re.search(r'\d+', dtype)
        bits = int(width[0]) if width else 8 if dtype == 'pred' else 0  # f8e4m3fn: 8; a token: 0
        total += bits / 8 * float(np.prod([int(size) for size in re.findall(r'\d+', sizes)]))
    return total


# ------------------------------------------------------------------------------------------------ running
def executions(
    program: Program, cost: Cost, name: str | None = None, times: int = 1
) -> Iterator[tuple[Instruction, Computation, int]]:
    """Yields every instruction that a run reaches, its computation, and how often it runs, also inside fusions.

    Of a conditional the branch of the highest total `cost` is taken. A loop of unknown length counts once.

    Args:
      program: a parsed program.
      cost: the cost of an instruction by itself.
      name: the computation to begin with; None: the entry.
      times: how often that computation runs.
    """
    computation = program.computations[name or program.entry]
    for instruction in computation.values():
        yield instruction, computation, times
        for callee, repeats in _callees(program, instruction, cost):
            yield from executions(program, cost, callee, times * repeats)


def _callees(program: Program, instruction: Instruction, cost: Cost) -> list[tuple[str, int]]:
    """Returns the computations that an instruction runs, and how often it runs each."""
    named = called(instruction.attributes)
    if instruction.opcode == 'while':
        repeats = trips(program, instruction) or 1
        return [(named['body'][0], repeats), (named['condition'][0], repeats)]
    if instruction.opcode == 'conditional':
        keys = ('branch_computations', 'true_computation', 'false_computation')
        branches = [branch for key in keys for branch in named.get(key, ())]
        return [(max(branches, key=lambda branch: _total(program, cost, branch)), 1)]
    if instruction.opcode in ('call', 'async-start', 'fusion'):
        return [(callee, 1) for key in ('calls', 'to_apply') for callee in named.get(key, ())]
    return []


def _total(program: Program, cost: Cost, name: str | None = None) -> float:
    return sum(cost(i, c) * times for i, c, times in executions(program, cost, name))


def called(attributes: str) -> dict[str, list[str]]:
    """Returns the computations that an instruction names, by attribute."""
    found = re.findall(r'\b(\w+)=(\{%[^}]*\}|%[\w.\-]+)', attributes)
    return {key: re.findall(r'%([\w.\-]+)', value) for key, value in found}


def trips(program: Program, loop: Instruction) -> int | None:
    """Returns how often a `while` runs its body; None where its text does not say.

    Either the compiler has noted the number, or the condition compares a counter from 0 with a single bound.
    """
    noted = re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', loop.attributes)
    if noted:
        return int(noted[1])
    condition = called(loop.attributes)['condition'][0]
    reached = [i for i, _, _ in executions(program, lambda i, c: 0, condition)]
    bounds = [int(i.literal) for i in reached if i.opcode == 'constant' and i.literal.isdecimal()]
    less = [i for i in reached if i.opcode == 'compare' and 'direction=LT' in i.attributes]
    return bounds[0] if len(bounds) == len(less) == 1 else None


def unknown_loops(program: Program) -> int:
    """Returns the number of loops whose length the text does not say."""
    loops = (i for i, _, _ in executions(program, lambda i, c: 0) if i.opcode == 'while')
    return sum(trips(program, loop) is None for loop in loops)


# ------------------------------------------------------------------------------------------------ counting
def collectives(compiled_text: str, mesh: Mesh) -> list[Collective]:
    """Returns the collectives that one device takes part in during one run, the most bytes first.

    Args:
      compiled_text: `compiled.as_text()` of a program partitioned over `mesh`.
      mesh: the mesh whose axes name the groups of devices.
    """
    program, sizes = parse(compiled_text), tuple(mesh.shape.items())
    found: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}

    def sent(i: Instruction, c: Computation) -> float:
        kind = i.opcode.removesuffix('-start')
        if kind not in SENT:
            return 0
        _, size = device_groups.of(i.attributes, sizes)
        return sum(_sent_bytes(program, c, name) for name in i.operands) * SENT[kind](size)

    for i, c, times in executions(program, sent):
        amount = sent(i, c)
        if amount:
            key = i.opcode.removesuffix('-start'), device_groups.of(i.attributes, sizes)[0]
            count, total = found.get(key, (0, 0.0))
            found[key] = count + times, total + amount * times
    rows = [Collective(*key, *value) for key, value in found.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def _sent_bytes(program: Program, c: Computation, name: str) -> float:
    """Returns the bytes of an operand, in the type it had before it was widened."""
    whole, i = num_bytes(c[name].shape), c[name]
    while i.opcode in ('fusion', 'bitcast', 'copy', 'transpose', 'reshape'):  # these keep the numbers
        if i.opcode == 'fusion':
            c = program.computations[called(i.attributes)['calls'][0]]
            i = next(i for i in c.values() if i.root)
        else:
            i = c[i.operands[0]]
    before = num_bytes(c[i.operands[0]].shape) if i.opcode == 'convert' else whole
    return min(whole, before)


def flops(program: Program) -> float:
    """Returns the floating-point operations of a run's matrix products and convolutions: two per multiply-add."""
    return _total(program, _products)


def _products(i: Instruction, c: Computation) -> float:
    if i.opcode in ('dot', 'ragged-dot'):
        left = dims(c[i.operands[0]].shape)
        contracted = re.findall(r'\d+', i.attributes.partition('lhs_contracting_dims={')[2].partition('}')[0])
        return 2.0 * float(np.prod(dims(i.shape)) * np.prod([left[int(axis)] for axis in contracted]))
    if i.opcode == 'convolution':
        kernel, labels = dims(c[i.operands[1]].shape), re.search(r'dim_labels=\w+_(\w+)->', i.attributes)
        assert labels
        window = [size for size, label in zip(kernel, labels[1], strict=True) if label != 'o']
        return 2.0 * float(np.prod(dims(i.shape)) * np.prod(window))
    return 0.0
