"""The collectives of a compiled program, from its text: between which devices, how many bytes, beside what."""

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple

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
      hidden: the bytes that travel while other work runs, between a start and its end.
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


class Pace(NamedTuple):
    """How fast a device is."""

    working: Callable[[Instruction, Computation], float]  # -> the seconds of an instruction, with all that it runs
    speed: Callable[[tuple[str, ...], bool], float]  # (axes of the mesh, whether between slices) -> bytes a second


def of(program: Program, mesh: Mesh, pace: Pace | None = None) -> list[Collective]:
    """Returns the collectives that one device takes part in during one run, the most bytes first.

    Args:
      program: a parsed program, partitioned over `mesh`.
      mesh: the mesh whose axes name the groups of devices.
      pace: by which work and collectives take their time; None: all work takes longer than any of them.
    """
    sizes = tuple(mesh.shape.items())
    found: dict[tuple[str, tuple[str, ...], bool], np.ndarray] = {}
    scattered, chains = _scattered(program), _chains(program)

    def sent(i: Instruction, c: Computation) -> float:
        kind = _kind(i, c, scattered)
        if kind not in SENT or (id(c), i.name) in chains.again:
            return 0
        size = meshes.count_slices(mesh.devices.flat) if _transfer(i) else device_groups.of(i.attributes, sizes)[1]
        return sum(hlo.num_bytes(c[name].shape) for name in i.operands) * SENT[kind](size)

    def axes(i: Instruction) -> tuple[str, ...]:
        return _axes_between_slices(mesh) if _transfer(i) else device_groups.of(i.attributes, sizes)[0]

    def sending(i: Instruction, c: Computation) -> tuple[float, float]:
        amount = sent(i, c)
        speed = pace.speed(axes(i), bool(_transfer(i))) if pace and amount else np.inf
        return amount / speed, speed

    late = _late(program, chains, sending, pace.working if pace else lambda i, c: float(i.opcode in WORK))
    for i, c, times in hlo.executions(program, sent):
        amount = sent(i, c)
        if amount:
            key = _kind(i, c, scattered), axes(i), bool(_transfer(i))
            hidden = amount * times * (1 - late.get((id(c), i.name), 1.0))
            found[key] = found.get(key, np.zeros(3)) + np.array([times, amount * times, hidden])
    rows = [
        Collective(kind, axes, max(round(count), 1), float(sent), float(hidden), far)
        for (kind, axes, far), (count, sent, hidden) in found.items()
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


Place = tuple[int, str]  # of an instruction: its computation's identity, and its name


class _Chains(NamedTuple):
    """The collectives that a TPU does piece by piece beside products.

    A fusion starts such a collective, others do a piece of it each beside their own work, and one ends it. All of them
    have the collective as an instruction, with the number of its chain.
    """

    starts: dict[Place, str]  # -> the chain
    ends: dict[Place, str]
    again: set[Place]  # those that are others once more


def _chains(program: Program) -> _Chains:
    starts, ends, pieces = dict[Place, str](), dict[Place, str](), dict[Place, str]()
    for computation in program.computations.values():
        calls = ' '.join(i.attributes for i in computation.values() if i.opcode == 'custom-call')
        for i in computation.values():
            chain = re.search(r'\bchain_id="(\d+)"', i.attributes)
            if chain is None:
                continue
            kind = starts if '"AsyncCollectiveStart"' in calls else ends if '"AsyncCollectiveDone"' in calls else pieces
            kind[id(computation), i.name] = chain[1]
    begun = set(starts.values())
    return _Chains(starts, ends, {*ends, *(place for place, chain in pieces.items() if chain in begun)})


@dataclasses.dataclass
class _Sent:
    """A collective that travels while the device goes on: when it was started, from when until when it travels, and how
    long of that the device waits."""

    place: Place
    started: float
    first: float
    last: float
    waited: float = 0.0


def _late(
    program: Program,
    chains: _Chains,
    sending: Callable[[Instruction, Computation], tuple[float, float]],
    working: Callable[[Instruction, Computation], float],
) -> dict[Place, float]:
    """Returns the share of its time for which the device waits for each collective that has a start and an end.

    The instructions of a compiled program stand in the order in which they run. Of the collectives of one network,
    which are those of the same speed, one travels at a time. `sending` says how long, and that speed.
    """
    late = dict[Place, float]()
    for computation in program.computations.values():
        now, free = 0.0, dict[float, float]()  # when the device, and each network, have done what there was
        travels, moving = dict[str, list[_Sent]](), list[_Sent]()
        for i in computation.values():
            started = _started(program, computation, i, chains)
            for each, inside in started:
                seconds, network = sending(each, inside)
                first = max(now, free.get(network, 0.0))
                free[network] = first + seconds
                travels.setdefault(i.name, []).append(_Sent((id(inside), each.name), now, first, first + seconds))
            moving += travels.get(i.name, []) if started else []
            ended = [sent for name in _ended(program, computation, i, chains, travels) for sent in travels.pop(name)]
            until = max([now, *(sent.last for sent in ended)])
            alone, network = (0.0, 0.0) if started else sending(i, computation)
            if alone:  # it has no end of its own
                until = free[network] = max(now, free.get(network, 0.0)) + alone
            if until > now:
                for sent in moving:
                    sent.waited += max(min(sent.last, until) - max(sent.first, now), 0.0)
                moving = [sent for sent in moving if sent.last > until]
            for sent in ended:
                long = sent.last - sent.first
                late[sent.place] = min(sent.waited / long, 1.0) if long else float(now <= sent.started)
            now = until + (0.0 if alone or i.opcode.endswith(('-start', '-done')) else working(i, computation))
    return late


def _started(
    program: Program, computation: Computation, i: Instruction, chains: _Chains
) -> list[tuple[Instruction, Computation]]:
    """Returns the collectives that an instruction starts, and their computations."""
    kind = i.opcode.removesuffix('-start')
    if _transfer(i) or (i.opcode != kind and kind in SENT):
        return [(i, computation)]
    if i.opcode == 'fusion' and chains.starts:
        return [(each, c) for c in _inside(program, i) for each in c.values() if (id(c), each.name) in chains.starts]
    if i.opcode != kind and kind in ELSEWHERE:
        return [(each, c) for c in _inside(program, i) for each in c.values()]
    return []


def _ended(
    program: Program, computation: Computation, i: Instruction, chains: _Chains, travels: dict[str, list[_Sent]]
) -> list[str]:
    """Returns the instructions that started what an instruction ends."""
    if i.opcode == 'send-done':  # what it is exchanged for is yet to come
        return []
    if i.opcode.endswith('-done'):
        return [name for name in _starts(computation, i) if name in travels]
    if i.opcode != 'fusion' or not chains.ends:
        return []
    places = [(id(c), name) for c in _inside(program, i) for name in c]
    ended = {chains.ends[place] for place in places if place in chains.ends}
    return [name for name, some in travels.items() if any(chains.starts.get(each.place) in ended for each in some)]


def _inside(program: Program, i: Instruction) -> list[Computation]:
    """Returns the computations that an instruction names as its own."""
    names = called(i.attributes)
    return [program.computations[name] for key in ('calls', 'to_apply') for name in names.get(key, ())]


_RENDEZVOUS = r'_xla_host_transfer_rendezvous="[^"]*"'


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
