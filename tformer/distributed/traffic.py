"""Counts the bytes that a compiled program moves, and finds its largest arrays, from its text."""

import re

from tformer.distributed import hlo
from tformer.distributed.hlo import Computation, Instruction, Program, called

FREE = frozenset(  # these move nothing, or what they run is counted by itself
    'parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id '
    'async-start async-update async-done call-start add-dependency opt-barrier domain'.split()
)
SLICES = frozenset({'dynamic-slice', 'slice', 'gather'})  # they read no more than they return

_PLACED = re.compile(r'([a-z]\w*\[[\d,<=]*\])(\{[^}]*\})?')  # an array and its layout


def stored_bytes(shape: str) -> float:
    """Returns the bytes of an array, or of a tuple's, that are in the device's main memory; S(1) is on the chip."""
    return sum(hlo.num_bytes(array) for array, layout in _PLACED.findall(shape) if 'S(' not in layout)


def moved(program: Program, i: Instruction, c: Computation) -> float:
    """Returns the bytes that an instruction reads and writes; a part of an array counts as that part."""
    if i.opcode in SLICES:
        return 2 * stored_bytes(i.shape)
    if i.opcode == 'dynamic-update-slice':
        return 2 * stored_bytes(c[i.operands[1]].shape)
    if i.opcode.endswith('-start') and i.opcode != 'all-reduce-start':  # whose result has the operands, too
        return _started(i, c)
    if i.opcode != 'fusion':
        return sum(stored_bytes(c[name].shape) for name in i.operands) + stored_bytes(i.shape)
    total = _written(program, i)
    for number, name in enumerate(i.operands):
        placed = stored_bytes(c[name].shape)
        total += min(placed, _read(program, i, number)) if placed else 0
    return total


def _started(i: Instruction, c: Computation) -> float:
    """Returns the bytes that what an instruction starts reads and writes."""
    shapes = [c[name].shape for name in i.operands]
    given, part = sum(map(stored_bytes, shapes)), hlo.num_bytes(i.shape) - sum(map(hlo.num_bytes, shapes))
    results = max(stored_bytes(i.shape) - given, 0.0)
    read = part if i.opcode == 'slice-start' else given
    return read + results


def _body(program: Program, fusion: Instruction) -> Computation:
    return program.computations[called(fusion.attributes)['calls'][0]]


def _read(program: Program, fusion: Instruction, number: int) -> float:
    """Returns how many bytes of its operand of this number a fusion reads."""
    body = _body(program, fusion)
    (parameter,) = (i for i in body.values() if i.opcode == 'parameter' and int(i.literal) == number)
    return _used(program, body, parameter)


def _used(program: Program, body: Computation, array: Instruction) -> float:
    """Returns how many bytes of an array the instructions of a fusion use."""
    total = 0.0
    for user in (i for i in body.values() if array.name in i.operands):
        if user.opcode in SLICES and user.operands[0] == array.name:
            total += hlo.num_bytes(user.shape)
        elif user.opcode in ('bitcast', 'reshape'):
            total += _used(program, body, user)
        elif user.opcode == 'fusion':
            number = user.operands.index(array.name)
            same = _origin(_body(program, user))
            passed_on = same.opcode == 'parameter' and int(same.literal) == number
            total += _used(program, body, user) if passed_on else _read(program, user, number)
        elif user.opcode != 'dynamic-update-slice' or user.operands[0] != array.name:
            return hlo.num_bytes(array.shape)
    return total


def _origin(body: Computation) -> Instruction:
    """Returns what the result of a fusion is another view of."""
    (result,) = (i for i in body.values() if i.root)
    while result.opcode in ('bitcast', 'reshape'):
        result = body[result.operands[0]]
    return result


def _written(program: Program, fusion: Instruction) -> float:
    """Returns how many bytes of its results a fusion writes: of an array that it updates in place, the new part."""
    body = _body(program, fusion)
    (root,) = (i for i in body.values() if i.root)
    results = [body[name] for name in root.operands] if root.opcode == 'tuple' else [root]
    total = 0.0
    for result, (array, layout) in zip(results, _PLACED.findall(fusion.shape), strict=False):
        while result.opcode in ('bitcast', 'reshape'):
            result = body[result.operands[0]]
        if 'S(' in layout:
            continue
        if result.opcode == 'fusion' and not result.shape.startswith('('):
            total += _written(program, result)
        else:
            in_place = result.opcode == 'dynamic-update-slice'
            total += hlo.num_bytes(body[result.operands[1]].shape if in_place else array)
    return total


def largest(program: Program, count: int = 5) -> list[tuple[str, str, float]]:
    """Returns the largest arrays that a run computes: (dtype and sizes, where they come from, bytes).

    Of arrays that come from the same place, such as those of a gradient, the largest one stands for all.
    """
    found: dict[str, tuple[str, str, float]] = {}
    for i, _, _ in hlo.executions(program, hlo.nothing, into_fusions=False):
        if i.opcode in FREE or i.opcode.endswith('-done'):
            continue
        for array, layout in _PLACED.findall(i.shape):
            size, place = hlo.num_bytes(array), hlo.source(i)
            if 'S(' not in layout and size > found.get(place, ('', '', 0.0))[2]:
                found[place] = array, place, size
    return sorted(found.values(), key=lambda row: -row[2])[:count]
