"""Compiles the train step for a mesh of devices that need not exist, and reports what a step needs on each of them.

Nothing is allocated and no data are read. XLA's partitioner, which decides the parameters and collectives of a device,
is the same for every kind of device; temporaries come from its CPU compiler.
"""

import contextlib
import dataclasses
import math
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from tformer.config import AXES, Config, override
from tformer.config import Mesh as MeshConfig
from tformer.distributed import hlo, roofline, sharding
from tformer.errors import UserError
from tformer.training import flops, setup
from tformer.training.dummy_batch import assumed, one_row
from tformer.training.program import make_program
from tformer.training.state import TrainState

MOST_DEVICES = 4096  # JAX takes five seconds to start with them, and minutes with four times as many

# The machine code never runs, so it need not be fast; partitioning and fusion stay the same.
QUICKLY: dict[str, str | bool] = {'xla_backend_optimization_level': '0', 'xla_llvm_disable_expensive_passes': True}


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A train step compiled for a mesh."""

    config: Config  # resolved
    mesh: Mesh  # of real or pretended devices
    state: TrainState  # abstract arrays with shardings
    batch: dict[str, jax.ShapeDtypeStruct]  # abstract arrays with shardings
    params: Any  # abstract parameters, boxed with their logical names
    executable: jax.stages.Compiled  # the compiled step


def num_devices(mesh: MeshConfig) -> int:
    """Returns how many devices a mesh names; an axis of -1 (all devices that are left) counts as one."""
    return math.prod(max(getattr(mesh, axis), 1) for axis in AXES)


def pretend(count: int) -> None:
    """Makes JAX see `count` devices, all of them this machine's CPU, unless JAX has already started.

    It overrides a device count in XLA_FLAGS.
    """
    flags = os.environ.get('XLA_FLAGS', '').split()
    os.environ['XLA_FLAGS'] = ' '.join(flag for flag in flags if 'force_host_platform_device_count' not in flag)
    if count > MOST_DEVICES:
        raise UserError(f'mesh: {count:,} devices are more than this machine can pretend to have: {MOST_DEVICES:,}')
    with contextlib.suppress(RuntimeError):  # JAX has already started
        jax.config.update('jax_num_cpu_devices', count)
        jax.config.update('jax_platforms', 'cpu')


def compile_step(config: Config) -> DryRun:
    """Returns the train step of `config`, compiled for as many of JAX's devices as its mesh names.

    Raises:
      UserError: the mesh does not divide the rows of a batch.
    """
    config = override(assumed(config), {f'mesh.{axis}': max(getattr(config.mesh, axis), 1) for axis in AXES})
    mesh = sharding.make_mesh(config.mesh)
    batch = abstract_batch(config, mesh)
    with sharding.placed(mesh, config.mesh):
        program = make_program(_without_bfloat16(config), batch, mesh)
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            sharding.unboxed(program.abstract),
            program.shardings,
        )
        lowered = program.jitted_step.lower(state, batch, program.hyper)
        return DryRun(config, mesh, state, batch, program.abstract.params, lowered.compile(QUICKLY))


def _without_bfloat16(config: Config) -> Config:
    """Returns `config` with float16 in place of bfloat16, which the CPU compiler would widen to float32."""
    dtypes = {'model.dtype': config.model.dtype, 'model.param_dtype': config.model.param_dtype}
    return override(config, {name: dtype.replace('bfloat16', 'float16') for name, dtype in dtypes.items()})


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a full batch of abstract arrays, with as many rows as training on `mesh` has."""
    multiple = setup.row_multiple(config, None, mesh)
    rows, place = config.train.batch_size, sharding.batch_sharding(mesh)
    if multiple is not None and config.data.batch_tokens is not None:
        rows = max(config.data.batch_tokens // config.data.length // multiple, 1) * multiple
    one = one_row(config)
    return {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=place) for name, x in one.items()}


# ------------------------------------------------------------------------------------------------ in words
NOTES = """\
Compiled for this machine's CPU, which multiplies bfloat16 in float32 and fuses less than an accelerator: temporaries
are overstated (bfloat16 is compiled as float16, which has the same width). The CPU compiler has no reduce-scatter: the
gradients of FSDP appear as all-reduces of twice the bytes. It does not merge all-reduces whose results are summed. The
bytes of a collective are those that a device sends on a ring. The time of the memory counts the step's arguments and
results, each once.
"""


def report(config: Config) -> str:
    """Returns the report of the train step of a config, and prints progress to standard error."""
    began = time.perf_counter()
    print(f'compiling for {num_devices(config.mesh):,} devices ...', file=sys.stderr, flush=True)
    run = compile_step(config)
    print(f'compiled in {time.perf_counter() - began:.0f} s', file=sys.stderr, flush=True)
    return describe(run)


def describe(run: DryRun) -> str:
    """Returns the memory, collectives, operations and shortest step time of one device of a mesh."""
    text = run.executable.as_text() or ''
    program, collectives = hlo.parse(text), hlo.collectives(text, run.mesh)
    axes = ' x '.join(f'{axis} {size}' for axis, size in run.mesh.shape.items() if size > 1)
    rows, length = run.batch['inputs'].shape
    where = f'{run.mesh.size:,} devices ({axes}), rules {run.config.mesh.rules}'
    asked, done = flops.model_flops(run.config, run.params, run.batch), hlo.flops(program)
    lines = [
        '',
        f'dry run on {where}: {rows:,} rows of {length:,} tokens',
        *_memory(run),
        *_collectives(collectives),
        'operations of a step',
        f'  {"matrix products, one device":<30} {done:>14.4g}',
        f'  {"model FLOPs, all devices":<30} {asked:>14.4g}  {asked / (done * run.mesh.size):.0%} of those computed',
        *_times(run, asked, done, collectives),
        '',
        *textwrap.wrap(NOTES, 120),
    ]
    unknown = hlo.unknown_loops(program)
    return '\n'.join(lines + [f'{unknown} loops have an unknown length and count once.'] * bool(unknown))


def needed_bytes(run: DryRun) -> float:
    """Returns the bytes that a device needs in a step: arguments, results that do not reuse their buffers, temporaries.

    The CPU compiler's own peak leaves temporaries out.
    """
    memory: Any = run.executable.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(memory.argument_size_in_bytes + new + memory.temp_size_in_bytes)


def _memory(run: DryRun) -> list[str]:
    memory: Any = run.executable.memory_analysis()
    state, needed = run.state, needed_bytes(run)
    rows = {
        'parameters': flops.device_bytes(state.params),
        'optimizer state': flops.device_bytes(state.opt_state),
        'averages': flops.device_bytes(state.averages),
        'batch': flops.device_bytes(run.batch),
        'arguments, as compiled': memory.argument_size_in_bytes,
        'activations and temporaries': memory.temp_size_in_bytes,
        'needed': needed,
    }
    lines = [f'  {name:<30} {_gib(size):>14}' for name, size in rows.items() if size]
    for name, device in roofline.DEVICES.items():
        fits = 'fits' if needed <= device.memory else 'does not fit'
        lines.append(f'  {fits} {name}: needs {_gib(needed)} per device, which has {_gib(device.memory)}')
    return ['memory of a device', *lines]


def _collectives(found: list[hlo.Collective]) -> list[str]:
    def line(kind: str, axes: Sequence[str], rows: Sequence[hlo.Collective]) -> str:
        count, sent = sum(row.count for row in rows), sum(row.bytes for row in rows)
        return f'  {kind:<20} {" + ".join(axes):<24} {count:>9,} {_gib(sent):>14}'

    title = 'collectives of a step: kind, mesh axes, count, bytes sent by a device'
    return [title, *(line(row.kind, row.axes, [row]) for row in found), line('all', (), found)]


def _times(run: DryRun, asked: float, done: float, collectives: list[hlo.Collective]) -> list[str]:
    memory: Any = run.executable.memory_analysis()
    traffic = memory.argument_size_in_bytes + memory.output_size_in_bytes
    lines = [f'  {"":<20} {"products":>9} {"memory":>9} {"network":>9} {"step, MFU":>16} {"in turn, MFU":>16}']
    for name, device in roofline.DEVICES.items():
        found = roofline.times(device, run.config.model.dtype, done, traffic, collectives, run.mesh.shape)
        peak = run.mesh.size * device.flops[run.config.model.dtype]
        cells = [f'{seconds:>9.3g}' for seconds in found]
        cells += [f'{seconds:>9.3g} {asked / seconds / peak:>6.1%}' for seconds in (max(found), sum(found))]
        lines.append(f'  {name:<20} {" ".join(cells)}')
    return ['seconds of a step at the published peaks: overlapped (step), or one after the other (in turn)', *lines]


def _gib(size: float) -> str:
    return f'{size / 2**30:,.3f} GiB' if abs(size) >= 2**20 else f'{size:,.0f} B'
