"""Counts what a compiled program does in one run, from its text: products, bytes moved, collectives and kernels."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from tformer.distributed import device_groups, hlo, traffic
from tformer.distributed.hlo import Computation, Instruction, Program, called, dims


class Work(NamedTuple):
    """The work of one instruction of a program on one device, fusions as a whole.

    Attributes:
      name: the instruction's name.
      source: where in the model it comes from: the end of the name that JAX gives the operation; '' if unknown.
      times: how often a run executes it.
      flops: floating-point operations of its products in one execution, two per multiply-add.
      bytes: those that it reads from and writes to the device's memory in one execution, each array once.
      cycles: the compiler's own estimate of one execution in clock cycles; None where it says hlo.nothing.
    """

    name: str
    source: str
    times: int
    flops: float
    bytes: float
    cycles: int | None


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

WORK = frozenset({'fusion', 'dot', 'convolution', 'custom-call', 'while', 'conditional', 'call'})

# Targets of custom calls that compute something; others are the compiler's own housekeeping.
KERNELS = re.compile(r'tpu_custom_call|__cudnn\$|__cublas\$|mosaic|triton', re.I)


# ------------------------------------------------------------------------------------------------ collectives
def collectives(program: Program, mesh: Mesh) -> list[Collective]:
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
        size = len(_slices(mesh)) if _transfer(i) else device_groups.of(i.attributes, sizes)[1]
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


def _slices(mesh: Mesh) -> set[int]:
    return {getattr(device, 'slice_index', 0) for device in mesh.devices.flat}


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
            if (i.opcode.endswith('-start') and i.opcode.removesuffix('-start') in {*SENT, 'async'}) or _transfer(i):
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
    if computation[start].opcode != 'async-start':
        return [(id(computation), start)]
    inner = [program.computations[name] for name in called(computation[start].attributes).get('calls', ())]
    return [(id(each), name) for each in inner for name in each]


# ------------------------------------------------------------------------------------------------ work
def works(program: Program) -> list[Work]:
    """Returns the work of every instruction that a run executes."""
    found = []
    for i, c, times in hlo.executions(program, lambda i, c: _flops(program, i, c), into_fusions=False):
        if i.opcode not in traffic.FREE and not i.opcode.endswith('-done'):
            flops, moved, cycles = _flops(program, i, c), traffic.moved(program, i, c), _cycles(i)
            if flops or moved or cycles:
                found.append(Work(i.name, hlo.source(i), times, flops, moved, cycles))
    return found


def _cycles(i: Instruction) -> int | None:
    said = re.search(r'"estimated_cycles":"(\d+)"', i.attributes)
    return int(said[1]) if said else None


def flops(program: Program) -> float:
    """Returns the floating-point operations of a run's products: two per multiply-add."""
    return sum(work.flops * work.times for work in works(program))


def inside(program: Program, i: Instruction) -> Iterator[tuple[Instruction, Computation]]:
    """Yields the instructions of a fusion, also of fusions in it."""
    for name in called(i.attributes).get('calls', ()) if i.opcode == 'fusion' else ():
        computation = program.computations[name]
        for each in computation.values():
            yield each, computation
            yield from inside(program, each)


def _flops(program: Program, i: Instruction, c: Computation) -> float:
    return products(i, c) + sum(products(*each) for each in inside(program, i))


def products(i: Instruction, c: Computation) -> float:
    """Returns the floating-point operations of an instruction by itself: a product, a convolution or a kernel."""
    if i.opcode in ('dot', 'ragged-dot'):
        left = dims(c[i.operands[0]].shape)
        contracted = re.findall(r'\d+', i.attributes.partition('lhs_contracting_dims={')[2].partition('}')[0])
        return 2.0 * float(np.prod(dims(i.shape)) * np.prod([left[int(axis)] for axis in contracted]))
    if i.opcode == 'convolution':
        return _convolution(i, dims(c[i.operands[0]].shape), dims(c[i.operands[1]].shape))
    if i.opcode == 'custom-call':
        return _kernel(i, c)
    return 0.0


def _convolution(i: Instruction, inputs: tuple[int, ...], kernel: tuple[int, ...]) -> float:
    """Returns the operations of a convolution; what meets padding is not counted."""
    labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', i.attributes)
    assert labels
    size_in, size_kernel = dict(zip(labels[1], inputs, strict=True)), dict(zip(labels[2], kernel, strict=True))
    size_out = dict(zip(labels[3], dims(i.shape), strict=True))
    pairs = 1.0
    for axis, window in _window(i.attributes).items():
        at = np.arange(size_out[axis])[:, None] * window['stride'] - window['pad']
        at = at + np.arange(size_kernel[axis]) * window['rhs_dilate']
        seen = (at >= 0) & (at <= (size_in[axis] - 1) * window['lhs_dilate']) & (at % window['lhs_dilate'] == 0)
        pairs *= float(seen.sum())
    return 2.0 * size_out['b'] * size_out['f'] * size_kernel['i'] * pairs


def _window(attributes: str) -> dict[str, dict[str, int]]:
    """Returns the window of each spatial axis, by the axis's digit in `dim_labels`."""
    text = re.search(r'window=\{([^}]*)\}', attributes)
    if not text:
        return {}
    fields = dict(field.split('=') for field in text[1].split())
    count = len(fields['size'].split('x'))
    ones, zeros = 'x'.join(['1'] * count), 'x'.join(['0_0'] * count)
    columns = {name: fields.get(name, ones).split('x') for name in ('stride', 'lhs_dilate', 'rhs_dilate')}
    columns['pad'] = [pair.split('_')[0] for pair in fields.get('pad', zeros).split('x')]
    return {str(axis): {name: int(values[axis]) for name, values in columns.items()} for axis in range(count)}


def _kernel(i: Instruction, c: Computation) -> float:
    """Returns the operations of a kernel: what its author says, or what its configuration tells."""
    said = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', i.attributes)
    if said:
        return float(said[1])
    products = re.search(r'op_name="[^"]*\bproducts_(\d+)\b', i.attributes)
    if products:  # of experts, by Pallas
        return float(products[1])
    pairs = re.search(r'op_name="[^"]*\bpairs_(\d+)\b[^"]*_(fwd|dq|dkv|dbias)_', i.attributes)
    if (
        pairs
    ):  # attention by Pallas, of queries [..., T, H]: the products of each pair of a query and a key that it visits
        queries = next(name for name in i.operands if re.match(r'\w*f\d+\[\d+,\d+,', c[name].shape))
        *heads, _, width = dims(c[queries].shape)
        return 2.0 * {'fwd': 2, 'dq': 3, 'dkv': 4, 'dbias': 2}[pairs[2]] * int(pairs[1]) * float(np.prod(heads)) * width
    scores = re.search(r'"intermediate_tensor_shape":\s*\{[^}]*"dimensions":\s*\[([^\]]*)\]', i.attributes)
    if scores:  # cuDNN's attention: two products forward, five backward
        B, N, T, S = (int(size) for size in re.findall(r'\d+', scores[1]))
        H = np.prod(dims(c[i.operands[0]].shape)) / (B * N * T)
        return (10.0 if 'Backward' in i.attributes else 4.0) * B * N * _seen_pairs(i.attributes, T, S) * float(H)
    contracted = re.search(r'"lhs_contracting_dimensions":\["(\d+)"\]', i.attributes)
    if contracted and '__cublas$' in i.attributes:
        result = re.match(r'\(?([^ ]*\])', i.shape)
        return (
            2.0 * float(np.prod(dims(result[1])) * dims(c[i.operands[0]].shape)[int(contracted[1])]) if result else 0.0
        )
    return 0.0


def _seen_pairs(attributes: str, T: int, S: int) -> int:
    """Returns how many pairs of a query and a key the mask of cuDNN's attention leaves: of a causal one, with T = S,
    those within its window. Lengths of rows are known at run time alone, and leave all."""
    if not re.search(r'"mask_type":\s*"(PADDING_)?CAUSAL"', attributes):
        return T * S
    window = re.search(r'"sliding_window_length":\s*([1-9]\d*)', attributes)
    width = min(int(window[1]), T) if window else T
    return T * width - width * (width - 1) // 2


def kernels(program: Program) -> dict[str, int]:
    """Returns how often a run calls each kernel: the library's or the compiler's own name for it."""
    found: collections.Counter[str] = collections.Counter()
    for i, _, times in hlo.executions(program, lambda i, c: float(i.opcode == 'custom-call')):
        target = re.search(r'custom_call_target="([^"]+)"', i.attributes)
        if target and KERNELS.search(target[1]):
            own = ' ' + i.name.rstrip('.0123456789') if target[1] == 'tpu_custom_call' else ''
            found[target[1] + own] += times
    return dict(found)
