"""Compiles a config's programs for devices that need not be here.

Nothing is allocated and no data are read. Each kind of device has its own compiler, which decides everything that is
reported: memory, collectives, kernels, fusions.
"""

import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tformer.commands.planning import out_of_memory
from tformer.config import AXES, Config
from tformer.config import Mesh as MeshConfig
from tformer.data.batches.packing import BATCHING
from tformer.decode import single_step
from tformer.decode.spread import spread_over
from tformer.decode.text import longest_input
from tformer.distributed import collectives, compilers, costs, devices, estimates, hlo, meshes, sharding, traffic
from tformer.distributed.devices import Target
from tformer.errors import UserError
from tformer.layers import kernel_choice
from tformer.layers.quantized import Quantized, without_kernels
from tformer.model import QUANTIZATIONS, for_steps, quantized
from tformer.training import flops, setup
from tformer.training.dummy_batch import assumed, one_row
from tformer.training.program import Program, make_program, placed_shapes

TRAIN_STEP, PREFILL, DECODE_STEP = 'train step', 'prefill', 'decode step'
MOST_CPUS = 4096  # JAX takes five seconds to start with them, and minutes with four times as many

# The CPU's machine code never runs, so it need not be fast; partitioning and fusion stay the same.
QUICKLY: dict[str, str | bool] = {'xla_backend_optimization_level': '0', 'xla_llvm_disable_expensive_passes': True}


def total_bytes(program: jax.stages.Compiled) -> float:
    """Returns the bytes of one device's arguments, results that do not reuse their buffers, and temporaries."""
    memory: Any = program.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(memory.argument_size_in_bytes + new + memory.temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A program of a config, compiled for devices."""

    name: str  # train step, prefill or decode step
    config: Config  # resolved
    target: Target
    mesh: Mesh  # of the devices
    rows: int  # of a batch
    held: dict[str, float]  # the bytes of one device's arguments, by what they are; those on the host are among them
    asked: float  # the operations that the model needs of all devices; 0 if not counted
    executable: jax.stages.Compiled
    seconds: float  # of the compilation

    @functools.cached_property
    def program(self) -> hlo.Program:
        """The compiled program, as its text says."""
        return hlo.parse(self.executable.as_text() or '')

    @functools.cached_property
    def works(self) -> list[costs.Work]:
        """The work of its instructions on one device."""
        return costs.works(self.program)

    @functools.cached_property
    def collectives(self) -> list[collectives.Collective]:
        """The collectives that one device takes part in."""
        device, dtype = self.target.device, self.config.model.dtype
        pace = estimates.pace(self.program, device, dtype, self.mesh.shape) if device.flops else None
        return collectives.of(self.program, self.mesh, pace)

    @property
    def peak(self) -> float:
        """The bytes that one device needs."""
        if self.target.device.platform == 'cpu':  # whose own peak leaves temporaries out
            return total_bytes(self.executable)
        memory: Any = self.executable.memory_analysis()
        return float(memory.peak_memory_in_bytes)

    @property
    def on_host(self) -> float:
        """The bytes of one device's arguments that wait in the host's memory."""
        memory: Any = self.executable.memory_analysis()
        return float(memory.host_argument_size_in_bytes)

    @property
    def kept_on_host(self) -> float:
        """The bytes that one device's forward pass keeps in the host's memory for the backward pass."""
        memory: Any = self.executable.memory_analysis()
        return float(memory.host_temp_size_in_bytes)

    def mfu(self, seconds: float) -> float:
        """Returns the share of the devices' peak that the model's operations take in this time."""
        return self.asked / seconds / self.mesh.size / self.target.device.flops[self.config.model.dtype]

    def times(self) -> estimates.Times:
        """The seconds of a run at the published peaks; not of a CPU, which has none."""
        return estimates.times(
            self.target.device, self.config.model.dtype, self.works, self.collectives, self.mesh.shape
        )


# ------------------------------------------------------------------------------------------------ targets
def num_devices(mesh: MeshConfig) -> int:
    """Returns how many devices a mesh names; an axis of -1 (all devices that are left) counts as one."""
    return math.prod(max(getattr(mesh, axis), 1) for axis in AXES)


def pretend(count: int) -> None:
    """Makes JAX see `count` devices, all of them this machine's CPU, unless JAX has already started.

    It overrides a device count in XLA_FLAGS.
    """
    flags = os.environ.get('XLA_FLAGS', '').split()
    os.environ['XLA_FLAGS'] = ' '.join(flag for flag in flags if 'force_host_platform_device_count' not in flag)
    if count > MOST_CPUS:
        raise UserError(f'mesh: {count:,} devices are more than this machine can pretend to have: {MOST_CPUS:,}')
    with contextlib.suppress(RuntimeError):  # JAX has already started
        jax.config.update('jax_num_cpu_devices', count)
        jax.config.update('jax_platforms', 'cpu')


def make_mesh(config: Config, target: Target) -> Mesh:
    """Returns the mesh of `config` over the devices of a target, all of them.

    Raises:
      UserError: the mesh names more or fewer devices than there are.
    """
    named = math.prod(getattr(config.mesh, axis) for axis in AXES)
    if 0 < named < target.count:
        rest = ': an axis of -1, e.g. mesh.data=-1, takes all that are left'
        said = meshes.nearest_size(named, target.count) or rest
        raise UserError(f'{target} has {target.count:,} devices, the mesh names {named:,}{said}')
    return meshes.make_mesh(config.mesh, target.devices())


# ------------------------------------------------------------------------------------------------ programs
def compile_program(name: str, config: Config, target: Target) -> DryRun:
    """Returns the program `name`, a key of PROGRAMS, of a config, compiled for a target.

    Raises:
      UserError: the mesh does not divide the rows of a batch, or a device has too little memory.
    """
    config = assumed(config)
    mesh = make_mesh(config, target)
    batch = abstract_batch(config, mesh, training=name == TRAIN_STEP)
    with sharding.placed(mesh, config.mesh):
        kernel = kernel_choice.pick(config.model, target.jax_platform, drops=name == TRAIN_STEP)
        if target.jax_platform == 'gpu' and kernel == 'cudnn':
            devices.find_cudnn()
        program = make_program(config, batch, mesh)
        for line in program.remarks if name == TRAIN_STEP else ():
            print(line, file=sys.stderr, flush=True)
        state = program.abstract_state
        traced, held = PROGRAMS[name](program, state, batch)
        began = time.perf_counter()
        try:
            executable = traced.lower().compile(QUICKLY if target.device.platform == 'cpu' else None)
        except jax.errors.JaxRuntimeError as error:
            raise out_of_memory.refusal(config, target, str(error), traced.jaxpr, name == TRAIN_STEP) from error
    asked = flops.step_flops(config, program.abstract.params, batch, program.teacher) if name == TRAIN_STEP else 0.0
    held = {kind: float(flops.device_bytes(tree)) for kind, tree in held.items()}
    return DryRun(
        name, config, target, mesh, len(batch['inputs']), held, asked, executable, time.perf_counter() - began
    )


def check_fits(run: DryRun) -> None:
    """Raises a `UserError` where a compiled program needs more memory than a device has."""
    limit = run.target.device.memory
    if run.peak > limit:
        arrays = [
            (f'{size / 2**30:.2f}G {shape}', place, hlo.dims(shape))
            for shape, place, size in traffic.largest(run.program, 3)
        ]
        needed, there = (f'{size / 2**30:.2f}G' for size in (run.peak, limit))
        raise UserError(out_of_memory.line(run.config, run.target, needed, there, '', arrays, run.name == TRAIN_STEP))


def _train_step(program: Program, state: Any, batch: Any) -> tuple[jax.stages.Traced, dict[str, Any]]:
    held = {
        'parameters': state.params,
        'optimizer state': state.opt_state,
        'averages': state.averages,
        'teacher': _abstract_teacher(program),
        'batch': batch,
    }
    return program.jitted_step.trace(state, batch, program.hyper, *held['teacher']), held


def _abstract_teacher(program: Program) -> tuple[Any, ...]:
    """Returns the abstract `Program.taught`."""
    teacher = program.teacher
    return () if teacher is None else (placed_shapes(teacher.abstract, teacher.shardings(program.mesh)),)


def _prefill(program: Program, state: Any, batch: Any) -> tuple[jax.stages.Traced, dict[str, Any]]:
    variables = _abstract_variables(program, state)
    spread = spread_over(program.mesh, sharding.make_rules(program.config.mesh))

    def read(variables: Any, batch: Any) -> Any:
        return spread(single_step.read_prompts(program.model, program.config.decode, variables, batch))

    return compilers.jit(read).trace(variables, _prompts(program.config, batch)), {'parameters': variables}


def _prompts(config: Config, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch of training as one of generation, whose rows hold one text each, as long as new ones allow.

    Raises:
      UserError: new tokens leave no room for a prompt.
    """
    longest = len(config.data.start)
    if config.model.family != 'encoder_decoder':
        longest = min(batch['inputs'].shape[1], longest_input(config)[0])

    def cut(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        whole = name.startswith('encoder_') or x.ndim < 2
        shape = x.shape if whole else (x.shape[0], longest, *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    return {name: cut(name, x) for name, x in batch.items() if not name.endswith('segment_ids')}


def _abstract_variables(program: Program, state: Any) -> dict[str, Any]:
    """Returns what generation reads: the parameters, and with decode.quantization their integers in the same places."""
    variables, kind = {'params': state.params}, program.config.decode.quantization
    if kind is None:
        return variables

    def placed(kernel: Any, x: Quantized) -> Quantized:
        axes = [*kernel.sharding.spec, *[None] * (kernel.ndim - len(kernel.sharding.spec))]

        def one(part: jax.Array) -> Any:
            spec = PartitionSpec(*(None if size == 1 else axis for size, axis in zip(part.shape, axes, strict=True)))
            return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=NamedSharding(program.mesh, spec))

        return Quantized(one(x.integers), one(x.scales))

    made = jax.eval_shape(lambda found: quantized(program.model, found, kind), variables)[QUANTIZATIONS[kind]]
    kernels = flatten_dict(state.params)
    found = {path: placed(kernels[path], x) for path, x in flatten_dict(made).items()}
    params = without_kernels(state.params, made)
    return {**variables, 'params': params, QUANTIZATIONS[kind]: unflatten_dict(found)}


def _decode_step(program: Program, state: Any, batch: Any) -> tuple[jax.stages.Traced, dict[str, Any]]:
    decode, variables = program.config.decode, _abstract_variables(program, state)
    rows: list[tuple[int, int]] = []

    def start(variables: Any, batch: Any) -> Any:
        found = single_step.first_step(program.model, decode, variables, batch)
        rows.append(found.shape)
        return found.cache

    cache = jax.eval_shape(start, variables, _prompts(program.config, batch))
    place = batch['inputs'].sharding
    tokens = jax.ShapeDtypeStruct(rows[-1], batch['inputs'].dtype, sharding=place)
    read = jax.jit(functools.partial(for_steps, program.model.cfg))
    places = read.lower(variables).compile().output_shardings
    read_by_step = placed_shapes(jax.eval_shape(read, variables), places)
    step = functools.partial(single_step.step, program.model, decode)
    jitted = compilers.jit(step, donate_argnums=3, keep_unused=True)
    return jitted.trace(read_by_step, tokens, tokens, cache), {'parameters': read_by_step}


PROGRAMS: dict[str, Callable[[Program, Any, Any], tuple[jax.stages.Traced, dict[str, Any]]]] = {
    TRAIN_STEP: _train_step,
    PREFILL: _prefill,
    DECODE_STEP: _decode_step,
}


def abstract_batch(config: Config, mesh: Mesh, *, training: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a full batch of abstract arrays, with as many rows as training on `mesh` has, or generation."""
    multiple, place = setup.row_multiple(config, None, mesh), meshes.batch_sharding(mesh)
    rows = config.train.batch_size
    if not training:
        together = meshes.row_multiple(mesh, config.mesh)
        rows = -(-config.decode.batch_size // together) * together
    elif multiple is not None and config.data.batch_tokens is not None:
        rows = max(config.data.batch_tokens // config.data.length // multiple, 1) * multiple
    one = one_row(config)
    if BATCHING[config.data.batching].packs:
        one |= {name.replace('positions', 'segment_ids'): x for name, x in one.items() if name.endswith('positions')}
    return {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=place) for name, x in one.items()}
