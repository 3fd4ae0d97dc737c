"""The bytes that a compiled program reads from and writes to a device's memory, from the program's text (HLO)."""

from tformer.distributed import hlo
from tformer.distributed.hlo import Computation, Instruction, Program

# What moves nothing by itself: names for what is there, and calls of what is counted where it stands.
_NOTHING = (
    *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'iota', 'after-all', 'partition-id'),
    *('while', 'conditional', 'call', 'async-start', 'async-update'),
)
_SAME = ('bitcast', 'convert', 'copy')  # around an update in place: the CPU's compiler has none of bfloat16
_EACH = (*_SAME, 'add', 'subtract', 'multiply', 'divide', 'maximum', 'negate', 'select')  # number by number
_PARTS = ('dynamic-slice', 'slice', 'gather')  # that read as much of their first operand as they return


def accessed(program: Program) -> float:
    """Returns the bytes that one run reads and writes: operands and results of everything that is not inside a fusion.

    Of what is only sliced the slices count, of what is updated in place the update.
    """

    def cost(i: Instruction, c: Computation) -> float:
        return _moved(program, i, c)

    return sum(cost(i, c) * times for i, c, times in hlo.executions(program, cost, fused=False))


def _moved(program: Program, i: Instruction, c: Computation) -> float:
    if i.opcode in _NOTHING or i.opcode.endswith('-done'):
        return 0
    whole = [hlo.num_bytes(c[name].shape) for name in i.operands]
    if i.opcode != 'fusion':
        return _read(i, c, whole) + _written(i, c)
    inside = program.computations[hlo.called(i.attributes)['calls'][0]]
    parameters = {int(x.literal): x.name for x in inside.values() if x.opcode == 'parameter'}
    read = sum(min(size, used(parameters[number], inside, size)) for number, size in enumerate(whole))
    root = next(x for x in inside.values() if x.root)
    return read + _results(root, inside)


def _read(i: Instruction, c: Computation, whole: list[float]) -> float:
    if i.opcode in _PARTS:
        return hlo.num_bytes(i.shape) + sum(whole[1:])
    return sum(whole[1:]) if i.opcode == 'dynamic-update-slice' else sum(whole)


def _written(i: Instruction, c: Computation) -> float:
    return hlo.num_bytes(c[i.operands[1]].shape if i.opcode == 'dynamic-update-slice' else i.shape)


def _results(i: Instruction, c: Computation) -> float:
    """Returns the bytes that a fusion with the root `i` writes."""
    if i.opcode == 'tuple':
        return sum(_results(c[name], c) for name in i.operands)
    source = i
    while source.opcode in _SAME:
        source = c[source.operands[0]]
    return _written(source if source.opcode == 'dynamic-update-slice' else i, c)


def used(name: str, c: Computation, size: float) -> float:
    """Returns how many of the `size` bytes of the parameter `name` a fusion reads: of what is only sliced, slices."""
    total = 0.0
    for user in c.values():
        for place, operand in enumerate(user.operands):
            if operand != name:
                continue
            if user.opcode in _EACH and not user.root:
                total += used(user.name, c, size)
            elif place == 0 and user.opcode in _PARTS:
                total += hlo.num_bytes(user.shape) * size / hlo.num_bytes(c[name].shape)
            elif place != 0 or user.opcode != 'dynamic-update-slice':
                return size
    return total
