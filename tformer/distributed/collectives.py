"""The collectives of a compiled program, from its text: between which devices, how many bytes, beside what."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh

from tformer.distributed import device_groups, hlo, meshes
from tformer.distributed.hlo import Computation, Instruction, Program, called


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over the same axes of the mesh, in one run of a program on one device.

    Attributes:
      kind: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute ...
      axes: the axes of the mesh along which the devices of a group differ, in the order of the mesh.
      count: how many collectives run.
      bytes: the bytes that the device sends, by the table `SENT`.
      hidden: the bytes of those between whose start and end other work runs.
      far: whether they cross slices of TPUs, which only the data center network joins.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: float
    hidden: float = 0.0
    far: bool = False


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

ELSEWHERE = ('async', 'call')  # what instructions start that run others beside: those of a stream, of a SparseCore

WORK = frozenset({'fusion', 'dot', 'convolution', 'custom-call', 'while', 'conditional', 'call'})


def of(program: Program, mesh: Mesh) -> list[Collective]:
    """Returns the collectives that one device takes part in during one run, the most bytes first.

    Args:
      program: a parsed program, partitioned over `mesh`.
      mesh: the mesh whose axes name the groups of devices.
    """
    sizes = tuple(mesh.shape.items())
    found: dict[tuple[str, tuple[str, ...], bool], np.ndarray] = {}
    scattered, (chained, again) = _scattered(program), _chains(program)
    overlapped = _overlapped(program) | chained

    def sent(i: Instruction, c: Computation) -> float:
        kind = _kind(i, c, scattered)
        if kind not in SENT or (id(c), i.name) in again:
            return 0
        size = meshes.count_slices(mesh.devices.flat) if _transfer(i) else device_groups.of(i.attributes, sizes)[1]
        return sum(hlo.num_bytes(c[name].shape) for name in i.operands) * SENT[kind](size)

    for i, c, times in hlo.executions(program, sent):
        amount = sent(i, c)
        if amount:
            axes = _axes_between_slices(mesh) if _transfer(i) else device_groups.of(i.attributes, sizes)[0]
            key = _kind(i, c, scattered), axes, bool(_transfer(i))
            hidden = amount * times if (id(c), i.name) in overlapped else 0
            found[key] = found.get(key, np.zeros(3)) + np.array([times, amount * times, hidden])
    rows = [
        Collective(kind, axes, int(count), float(sent), float(late), far)
        for (kind, axes, far), (count, sent, late) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _kind(i: Instruction, c: Computation, scattered: set[int]) -> str:
    """Returns the kind of a collective; another word for what is none."""
    if id(c) in scattered and i.opcode.startswith('all-reduce'):
        return 'reduce-scatter'
    return _transfer(i) or i.opcode.removesuffix('-start')


def _transfer(i: Instruction) -> str:
    """Returns the kind of the collective whose part between slices this is, through the hosts; '' of what is none."""
    said = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes) if i.opcode == 'send' else None
    kind = said[1].lower().replace('_', '-') if said else ''
    return {'one-to-one': 'collective-permute'}.get(kind, kind)


def _axes_between_slices(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of a mesh along which devices are of different slices."""
    slices = np.vectorize(lambda device: getattr(device, 'slice_index', 0))(mesh.devices)
    return tuple(axis for number, axis in enumerate(mesh.axis_names) if (np.diff(slices, axis=number) != 0).any())


def _scattered(program: Program) -> set[int]:
    """Returns the identities of the computations in which a TPU scatters the sums of an all-reduce."""
    return {id(c) for name, c in program.computations.items() if name.startswith('all-reduce-scatter')}


def _chains(program: Program) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """Returns the collectives that a TPU does piece by piece beside products, and those that are others once more, each
    by its computation's identity and its name.

    A fusion starts such a collective, others do a piece of it each beside their own work, and one ends it. All of them
    have the collective as an instruction, with the number of its chain.
    """
    starts: dict[str, set[tuple[int, str]]] = {}
    pieces: dict[str, set[tuple[int, str]]] = {}
    ends: set[tuple[int, str]] = set()
    for computation in program.computations.values():
        calls = ' '.join(i.attributes for i in computation.values() if i.opcode == 'custom-call')
        for i in computation.values():
            chain = re.search(r'\bchain_id="(\d+)"', i.attributes)
            if chain is None:
                continue
            place = id(computation), i.name
            if '"AsyncCollectiveStart"' in calls:
                starts.setdefault(chain[1], set()).add(place)
            elif '"AsyncCollectiveDone"' in calls:
                ends.add(place)
            else:
                pieces.setdefault(chain[1], set()).add(place)
    beside = [places for chain, places in starts.items() if chain in pieces]
    more = [places for chain, places in pieces.items() if chain in starts]
    return set().union(*beside), ends.union(*more)


_RENDEZVOUS = r'_xla_host_transfer_rendezvous="[^"]*"'


def _overlapped(program: Program) -> set[tuple[int, str]]:
    """Returns the collectives between whose start and end other work runs: (their computation's identity, name).

    The instructions of a compiled program stand in the order in which they run.
    """
    found = set()
    for computation in program.computations.values():
        begun: dict[str, bool] = {}  # a start -> whether work has run since
        for i in computation.values():
            if (i.opcode.endswith('-start') and i.opcode.removesuffix('-start') in {*SENT, *ELSEWHERE}) or _transfer(i):
                begun[i.name] = False
            elif i.opcode.endswith('-done'):
                starts = [name for name in _starts(computation, i) if begun.pop(name, False)]
                found |= {each for name in starts for each in _collectives_of(program, computation, name)}
            elif i.opcode in WORK:
                begun = dict.fromkeys(begun, True)
    return found


def _starts(computation: Computation, i: Instruction) -> list[str]:
    """Returns the start of an instruction that ends what another has started; updates may stand between.

    What was sent to another slice has come back when what it is exchanged for has been received.
    """
    if i.opcode == 'recv-done':
        meets = re.search(_RENDEZVOUS, computation[i.operands[0]].attributes)
        return [each.name for each in computation.values() if _transfer(each) and meets and meets[0] in each.attributes]
    while i.opcode.endswith(('-done', '-update')) and i.operands:
        i = computation[i.operands[0]]
    return [i.name]


def _collectives_of(program: Program, computation: Computation, start: str) -> list[tuple[int, str]]:
    if computation[start].opcode.removesuffix('-start') not in ELSEWHERE:
        return [(id(computation), start)]
    callees = called(computation[start].attributes)
    inner = [program.computations[name] for key in ('calls', 'to_apply') for name in callees.get(key, ())]
    return [(id(each), name) for each in inner for name in each]
