"""Counts what a compiled program computes in one run, from its text: products, bytes moved and kernels."""

import collections
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tformer.distributed import hlo, traffic
from tformer.distributed.hlo import Computation, Instruction, Program, called, dims


class Work(NamedTuple):
    """The work of one instruction of a program on one device, fusions as a whole.

    Attributes:
      name: the instruction's name.
      source: where in the model it comes from: the end of the name that JAX gives the operation; '' if unknown.
      times: how often a run executes it, in the mean.
      flops: operations of its products in one execution, two per multiply-add.
      bytes: those that it reads from and writes to the device's memory in one execution, each array once.
      cycles: the compiler's own estimate of one execution in clock cycles; None where it says hlo.nothing.
      integers: whether the operands of its products are integers of 8 bits, which have a higher peak.
    """

    name: str
    source: str
    times: float
    flops: float
    bytes: float
    cycles: int | None
    integers: bool = False


UNKNOWN = 2**63 - 1  # the cycles that a TPU's compiler estimates for what a SparseCore does

# Targets of custom calls that compute something; others are the compiler's own housekeeping.
KERNELS = re.compile(r'tpu_custom_call|__cudnn\$|__cublas\$|mosaic|triton', re.I)


def works(program: Program) -> list[Work]:
    """Returns the work of every instruction that a run executes."""
    found = []
    for i, c, times in hlo.executions(program, functools.partial(operations, program), into_fusions=False):
        work = work_of(program, i, c, times)
        if work.flops or work.bytes or work.cycles:
            found.append(work)
    return found


def work_of(program: Program, i: Instruction, c: Computation, times: float = 1) -> Work:
    """Returns the work of an instruction, without that of the computations that it runs."""
    if i.opcode in traffic.FREE or i.opcode.endswith('-done'):
        return Work(i.name, '', times, 0.0, 0.0, None)
    flops, moved = operations(program, i, c), traffic.moved(program, i, c)
    return Work(i.name, hlo.source(i), times, flops, moved, _cycles(i), _of_integers(program, i, c))


def _cycles(i: Instruction) -> int | None:
    said = re.search(r'"estimated_cycles":"(\d+)"', i.attributes)
    return int(said[1]) if said and int(said[1]) < UNKNOWN else None


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


def operations(program: Program, i: Instruction, c: Computation) -> float:
    """Returns the floating-point operations of an instruction, of a fusion's with those in it."""
    return products(i, c) + sum(products(*each) for each in inside(program, i))


def _of_integers(program: Program, i: Instruction, c: Computation) -> bool:
    """Returns whether an instruction has products, all of them of integers of 8 bits."""
    parts = [each for each in ((i, c), *inside(program, i)) if products(*each)]
    shapes = [place[name].shape for each, place in parts for name in each.operands[:2]]
    return bool(shapes) and all(re.match(r'[su]8\[', shape) for shape in shapes)


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
    if i.opcode == 'reduce' and re.search(r'op_name="[^"]*\bdot_general"', i.attributes):  # a GPU's, of few rows
        return 2.0 * float(np.prod(dims(c[i.operands[0]].shape)))
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
    if pairs:  # attention by Pallas, of queries, keys and values: the products of pairs that it visits
        arrays = [name for name in i.operands if re.match(r'\w*f\d+\[\d+,\d+,', c[name].shape)]
        (*heads, _, width), value_width = dims(c[arrays[0]].shape), dims(c[arrays[2]].shape)[-1]
        of_keys, of_values = {'fwd': (1, 1), 'dq': (2, 1), 'dkv': (2, 2), 'dbias': (1, 1)}[pairs[2]]
        return 2.0 * int(pairs[1]) * float(np.prod(heads)) * (of_keys * width + of_values * value_width)
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
    found = collections.defaultdict[str, float](float)
    for i, _, times in hlo.executions(program, lambda i, c: float(i.opcode == 'custom-call')):
        target = re.search(r'custom_call_target="([^"]+)"', i.attributes)
        if target and KERNELS.search(target[1]):
            own = ' ' + i.name.rstrip('.0123456789') if target[1] == 'tpu_custom_call' else ''
            found[target[1] + own] += times
    return {name: max(round(times), 1) for name, times in found.items()}


def attention_kernels(program: Program) -> set[str]:
    """Returns which kernels of attention a program calls, keys of `layers.kernel_choice.KERNELS`."""
    found = set()
    for i, _, _ in hlo.executions(program, lambda i, c: float(i.opcode == 'custom-call')):
        if i.opcode != 'custom-call':  # what takes a kernel's results apart has its name, too
            continue
        tiles = re.search(r'op_name="[^"]*\battention_(fwd|dq|dkv)_tiles', i.attributes)
        if tiles:
            found.add('mosaic' if 'custom_call_target="tpu_custom_call"' in i.attributes else 'triton')
        elif i.name.startswith('splash'):
            found.add('flash')
        elif 'custom_call_target="__cudnn$fmha' in i.attributes:
            found.add('cudnn')
    return found
