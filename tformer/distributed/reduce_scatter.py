"""What reduce-scatters save: the CPU's compiler has only all-reduces, also where the result is only read as this
device's shard."""

from collections.abc import Iterator

from jax.sharding import Mesh

from tformer.distributed import device_groups, hlo, memory_traffic
from tformer.distributed.hlo import Collective, Computation, Instruction, Program


def savings(program: Program, mesh: Mesh) -> list[Collective]:
    """Returns the saved traffic, as negative bytes: half of such all-reduces, by the axes of the mesh."""
    sizes, saved = tuple(mesh.shape.items()), dict[tuple[str, ...], tuple[int, float]]()
    for i, c, times in hlo.executions(program, lambda i, c: hlo.num_bytes(i.shape)):
        if i.opcode.removesuffix('-start') != 'all-reduce':
            continue
        axes, n = device_groups.of(i.attributes, sizes)
        for result, operand in zip(_results(i, c), i.operands, strict=True):
            if n > 1 and _own_part(program, c, result, n):
                count, total = saved.get(axes, (0, 0.0))
                half = (n - 1) / n * hlo.sent_bytes(program, c, operand)
                saved[axes] = count + times, total - half * times
    return [Collective('all-reduce', axes, *found) for axes, found in saved.items()]


def _results(i: Instruction, c: Computation) -> list[str]:
    """Returns what holds the result of each operand."""
    if not i.shape.startswith('('):
        return [i.name]
    parts = {
        int(x.attributes.partition('index=')[2].split(',')[0]): x.name
        for x in c.values()
        if x.opcode == 'get-tuple-element' and x.operands == (i.name,)
    }
    return [parts.get(number, i.name) for number in range(len(i.operands))]


def _own_part(program: Program, c: Computation, name: str, n: int) -> bool:
    """Returns whether of `name` everything that reads it reads an n-th at most."""
    size = hlo.num_bytes(c[name].shape)
    shares = [read / size <= 1.001 / n for read in _reads(program, c, name, size)]
    return bool(shares) and all(shares)


def _reads(program: Program, c: Computation, name: str, size: float) -> Iterator[float]:
    for user in c.values():
        for place in (place for place, operand in enumerate(user.operands) if operand == name):
            if user.opcode == 'fusion':
                inside = program.computations[hlo.called(user.attributes)['calls'][0]]
                parameter = next(x for x in inside.values() if x.opcode == 'parameter' and x.literal == str(place))
                yield memory_traffic.used(parameter.name, inside, size)
            elif user.opcode == 'dynamic-slice' and place == 0:
                yield hlo.num_bytes(user.shape)
            elif user.opcode in ('bitcast', 'copy', 'all-reduce') and not user.shape.startswith('('):
                yield from _reads(program, c, user.name, size)
            else:
                yield size
