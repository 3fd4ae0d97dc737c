"""Reads the text of a compiled program (HLO), and says how often each of its instructions runs."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


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
Branch = Callable[..., Any]


class Program(NamedTuple):
    """Computations by name, and the name of the one that runs first."""

    computations: Mapping[str, Computation]
    entry: str


# ------------------------------------------------------------------------------------------------ reading
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) .*\{$')
_LINE = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=]*)\]')


def parse(text: str) -> Program:
    """Returns the program of a text such as that of `compiled.as_text()`."""
    computations: dict[str, dict[str, Instruction]] = {}
    current, entry = '', ''
    text = re.sub(
        r'kernel_metadata=\{\n(.*)\n\}\}', r'kernel_metadata={\1}}', text
    )  # the one attribute of several lines
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


def source(i: Instruction) -> str:
    """Returns where in the model an instruction comes from; '' if its text does not say."""
    named = re.search(r'op_name="([^"]*)"', i.attributes)
    return place(named[1]) if named else ''


def place(operation: str) -> str:
    """Returns the last names of an operation's path, or of an argument's, without those that JAX's transformations put
    around them."""
    around = r'\b(?:jit|jvp|transpose|vmap|checkpoint|rematted_computation)\b|closed_call|body|while'
    path = re.sub(r"\[\\?'([^'\\]*)\\?'\]", r'/\1', operation)  # variables['params']['embed'], escaped in texts
    names = [name.strip('()') for name in re.sub(rf'{around}|{_SHARE}', '', path).split('/')]
    return '/'.join([name for name in names if name][-4:])


# ------------------------------------------------------------------------------------------------ running
def nothing(i: Instruction, c: Computation) -> float:
    """The cost of instructions in a walk that needs none."""
    return 0.0


def executions(
    program: Program, cost: Cost, name: str | None = None, times: float = 1, into_fusions: bool = True
) -> Iterator[tuple[Instruction, Computation, float]]:
    """Yields every instruction that a run reaches, its computation, and how often it runs in the mean.

    Of a conditional that `cond` made each branch counts as often as its share says; of others the branch of the highest
    total `cost` is taken. A loop of unknown length counts once.

    Args:
      program: a parsed program.
      cost: the cost of an instruction by itself.
      name: the computation to begin with; None: the entry.
      times: how often that computation runs.
      into_fusions: also yield the instructions of fusions; else a fusion is one instruction.
    """
    computation = program.computations[name or program.entry]
    for instruction in computation.values():
        yield instruction, computation, times
        if instruction.opcode == 'fusion' and not into_fusions:
            continue
        for callee, repeats in callees(program, instruction, computation, cost):
            yield from executions(program, cost, callee, times * repeats, into_fusions)


def cond(share: float, holds: jax.Array | bool, true: Branch, false: Branch, *operands: Any) -> Any:
    """`jax.lax.cond`, named in the program's text by the share of its runs, in thousandths, in which its condition
    holds."""
    with jax.named_scope(f'share_{round(1000 * share)}'):
        return jax.lax.cond(holds, true, false, *operands)


_SHARE = r'\bshare_(\d+)\b'


def callees(
    program: Program, instruction: Instruction, computation: Computation, cost: Cost
) -> list[tuple[str, float]]:
    """Returns the computations that an instruction of one runs, and how often it runs each in the mean."""
    named = called(instruction.attributes)
    if instruction.opcode == 'while':
        repeats = trips(program, instruction, computation) or 1
        return [(named['body'][0], repeats), (named['condition'][0], repeats)]
    if instruction.opcode == 'conditional':
        keys = ('branch_computations', 'false_computation', 'true_computation')
        branches = [branch for key in keys for branch in named.get(key, ())]
        if said := re.search(rf'{_SHARE}\)*/cond"', instruction.attributes):
            holds, (false, true) = int(said[1]) / 1000, branches
            return [(branch, share) for branch, share in ((false, 1 - holds), (true, holds)) if share]
        return [(max(branches, key=lambda branch: _total(program, cost, branch)), 1)]
    if instruction.opcode in ('call', 'call-start', 'async-start', 'fusion'):
        return [(callee, 1) for key in ('calls', 'to_apply') for callee in named.get(key, ())]
    return []


def _total(program: Program, cost: Cost, name: str | None = None) -> float:
    return sum(cost(i, c) * times for i, c, times in executions(program, cost, name))


def called(attributes: str) -> dict[str, list[str]]:
    """Returns the computations that an instruction names, by attribute."""
    found = re.findall(r'\b(\w+)=(\{%[^}]*\}|%[\w.\-]+)', attributes)
    return {key: re.findall(r'%([\w.\-]+)', value) for key, value in found}


def trips(program: Program, loop: Instruction, computation: Computation) -> int | None:
    """Returns how often a `while` of a computation runs its body; None where its text does not say.

    Either the compiler has noted the number, or the condition compares a counter with a single bound.
    """
    noted = re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', loop.attributes)
    if noted:
        return int(noted[1])
    named = called(loop.attributes)
    reached = [i for i, _, _ in executions(program, nothing, named['condition'][0])]
    bounds = [int(i.literal) for i in reached if i.opcode == 'constant' and i.literal.isdecimal()]
    less = [i for i in reached if i.opcode == 'compare' and 'direction=LT' in i.attributes]
    if not len(bounds) == len(less) == 1:
        return None
    counters = [re.search(r'index=(\d+)', i.attributes) for i in reached if i.opcode == 'get-tuple-element']
    if len(counters) != 1 or counters[0] is None:
        return bounds[0]
    index = int(counters[0][1])
    step, start = _step(program.computations[named['body'][0]], index), _start(computation, loop, index)
    return -(-max(bounds[0] - start, 0) // step)


def _start(computation: Computation, loop: Instruction, index: int) -> int:
    """Returns the constant that a counter of a loop has at first, at this place of its tuple; 0 where it has none."""

    def origin(name: str) -> Instruction:
        i = computation[name]
        while i.opcode in ('copy', 'bitcast', 'opt-barrier'):
            i = computation[i.operands[0]]
        return i

    given = origin(loop.operands[0])
    first = origin(given.operands[index]) if given.opcode == 'tuple' else given
    return int(first.literal) if first.opcode == 'constant' and first.literal.isdecimal() else 0


def _step(body: Computation, index: int) -> int:
    """Returns the constant that a loop adds to the counter at this place of its tuple; 1 where it adds none."""
    (root,) = (i for i in body.values() if i.root)
    if root.opcode != 'tuple':
        return 1
    added = body[root.operands[index]]
    constants = [body[name] for name in added.operands if body[name].opcode == 'constant']
    return int(constants[0].literal) if added.opcode == 'add' and len(constants) == 1 else 1


def unknown_loops(program: Program) -> int:
    """Returns the number of loops whose length the text does not say."""
    loops = ((i, c) for i, c, _ in executions(program, nothing) if i.opcode == 'while')
    return sum(trips(program, *loop) is None for loop in loops)
