"""Says in words what a program that is compiled for some devices needs on each of them."""

import dataclasses
import math
import sys
from typing import Any

from tformer.commands.planning.dry_run import DECODE_STEP, TRAIN_STEP, DryRun, compile_program
from tformer.config import Config
from tformer.data.batches.packing import BATCHING
from tformer.distributed import collectives, costs, hlo, traffic
from tformer.distributed.devices import Target
from tformer.distributed.estimates import times
from tformer.layers import kernel_choice

SHOWN = 5  # arrays and instructions that a report names


def compiled(name: str, config: Config, target: Target) -> DryRun:
    """Returns the program `name` of a config, compiled for a target, and prints progress to standard error."""
    print(f'compiling the {name} for {target.count:,} x {target.device.name} ...', file=sys.stderr, flush=True)
    run = compile_program(name, config, target)
    print(f'compiled in {run.seconds:.0f} s', file=sys.stderr, flush=True)
    return run


def describe(run: DryRun) -> str:
    """Returns the memory, collectives, operations and shortest time of a program on one device of a mesh."""
    axes = ' x '.join(f'{axis} {size}' for axis, size in run.mesh.shape.items() if size > 1) or 'one device'
    unknown = hlo.unknown_loops(run.program)
    rules = run.config.mesh.rules
    sections = [
        '',
        f'{run.name} of {run.rows:,} rows on {run.target} ({axes}), rules {rules}, compiled in {run.seconds:.0f} s',
        *_memory(run),
        *_collectives(run.collectives),
        *_kernels(run),
        *_operations(run),
        *(_times(run) if run.target.device.flops else []),
    ]
    return '\n'.join(sections + [f'{unknown} loops have an unknown length and count once'] * bool(unknown))


def _memory(run: DryRun) -> list[str]:
    memory: Any = run.executable.memory_analysis()
    arguments = memory.argument_size_in_bytes
    rows = {**run.held, 'other arguments': arguments + run.on_host - sum(run.held.values())}
    rows |= {
        "of these in the host's memory": run.on_host,
        'results and temporaries': run.peak - arguments,
        'peak': run.peak,
    }
    lines = [_size(name, size) for name, size in rows.items() if size >= 2**20 or name == 'peak']
    if not math.isinf(limit := run.target.device.memory):
        lines[-1] += f'  {run.peak / limit:.0%} of {_gib(limit)}' + ('' if run.peak <= limit else ': it does not fit')
    if run.kept_on_host:
        lines.append(_size("kept in the host's memory", run.kept_on_host))
    if run.config.optimizer.offload and not run.on_host:
        lines.append('  this compiler leaves optimizer.offload out: what would be on the host counts as on the device')
    lines.append('the largest arrays that it computes')
    found = traffic.largest(run.program, SHOWN)
    return ['memory of a device', *lines, *(f'  {_gib(size):>14}  {shape}  {place}' for shape, place, size in found)]


def _size(name: str, size: float) -> str:
    return f'  {name:<30} {_gib(size):>14}'


def _collectives(found: list[collectives.Collective]) -> list[str]:
    title = 'collectives: kind, mesh axes (far: between slices), count, bytes that a device sends, beside other work'
    total = collectives.Collective(
        'all', (), sum(x.count for x in found), sum(x.bytes for x in found), sum(x.hidden for x in found)
    )
    lines = [
        f'  {x.kind:<20} {" + ".join(x.axes) + " (far)" * x.far:<24} {x.count:>9,} {_gib(x.bytes):>14}'
        for x in [*found, total]
    ]
    shares = [f' {x.hidden / (x.bytes or 1):>6.0%}' for x in [*found, total]]
    return [title, *map(str.__add__, lines, shares)]


def _kernels(run: DryRun) -> list[str]:
    found = costs.kernels(run.program)
    listed = ['kernels', *(f'  {name:<50} {count:>9,}' for name, count in found.items())] if found else []
    return listed if run.config.model.recurrence else [_attention(run), *listed]


def _attention(run: DryRun) -> str:
    """Returns in words which kernels of attention the program calls: some hand over what they do not serve."""
    model, platform, drops = run.config.model, run.target.jax_platform, run.name == TRAIN_STEP
    picked, called = kernel_choice.pick(model, platform, drops), costs.attention_kernels(run.program)
    if run.name == DECODE_STEP and not called:
        return 'attention to the cache by reference'
    others = ' and '.join(sorted(called - {picked}))
    if called and picked not in called:
        packed = drops and BATCHING[run.config.data.batching].packs  # texts are decoded one a row
        return f'attention by {others} ({picked} does not serve {"packed rows" if packed else "this mask"})'
    if not called and kernel_choice.KERNELS[picked].platforms:
        return f'attention by XLA: {picked} serves none of it'
    named = kernel_choice.described(model, platform, packed=False, drops=drops)
    return f'{named}; by {others} what it does not serve' if others else named


def _operations(run: DryRun) -> list[str]:
    done = sum(work.flops * work.times for work in run.works)
    lines = ['operations', f'  {"products, one device":<30} {done:>14.4g}']
    if run.asked:
        share = run.asked / (done * run.mesh.size) if done else 0.0
        said = f'  {share:.0%} of those computed' * (share > 0) + ', with all pairs that masks hide' * (share > 1)
        lines.append(f'  {"model FLOPs, all devices":<30} {run.asked:>14.4g}{said}')
    return lines


def _times(run: DryRun) -> list[str]:
    device, found = run.target.device, run.times()

    def mfu(seconds: float) -> str:
        return f'  MFU {run.mfu(seconds):.1%}' if run.asked else ''

    by = 'as its compiler estimates' if device.clock else 'at the peaks'
    lines = [
        'seconds',
        f'  at the peaks: products {found.compute:.3g}, memory {found.memory:.3g}, network {found.network:.3g}',
        f'  {"no less than":<30} {found.least:>14.3g}{mfu(found.least)}',
        f'  {f"one after the other, {by}":<30} {found.step:>14.3g}{mfu(found.step)}',
        'what takes the longest',
    ]

    def seconds(work: costs.Work) -> float:
        return times(device, run.config.model.dtype, [work], (), run.mesh.shape).step

    slowest = sorted(run.works, key=seconds, reverse=True)[:SHOWN]
    return lines + [f'  {seconds(work):>14.3g}  {work.times:.3g} x {work.source or work.name}' for work in slowest]


def _gib(size: float) -> str:
    return f'{size / 2**30:,.3f} GiB' if abs(size) >= 2**20 else f'{size:,.0f} B'


def figures(run: DryRun) -> dict[str, Any]:
    """Returns the report's figures for another program to read, as `inspect --json` prints them."""
    found = run.times() if run.target.device.flops else None
    return {
        'program': run.name,
        'device': str(run.target),
        'mesh': {axis: size for axis, size in run.mesh.shape.items() if size > 1},
        'compile_seconds': round(run.seconds, 1),
        'peak_bytes': run.peak,
        'host_bytes': run.on_host + run.kept_on_host,
        'memory_bytes': None if math.isinf(run.target.device.memory) else run.target.device.memory,
        'flops': sum(work.flops * work.times for work in run.works),
        'model_flops': run.asked,
        'collectives': [dataclasses.asdict(row) for row in run.collectives],
        'kernels': costs.kernels(run.program),
        'seconds': found and {**found._asdict(), 'least': found.least},
        'mfu': found and run.mfu(found.step),
    }
