"""Finds the fastest mesh of some devices, which need not be here, for a config.

    tformer plan --device=v5p:4x4x4 --config=FILE[:argument] [--config.section.field=value ...]

Meshes that fit the model, the batch and the devices are compared by the bytes that they keep, move and send, and by how
long they wait; the best are compiled by the devices' own compiler, some at a time, and `data` alone and `fsdp` alone
are among them. Each is compiled with as much to keep as fits: model.remat None, dots, full, then more
train.microbatches. The fastest mesh is compiled with the other attention kernels that serve the model there, too,
where its logits are computed in chunks with all at once, and where it has an axis `tensor` with sequence parallelism.
The table is sorted by the estimated seconds of a step, and its last line gives the flags of the fastest. The fields of
config.mesh, model.remat, model.attention_kernel and train.loss_chunk that are given on the command line stay as they
are.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from typing import Any

from tformer import checks, commands
from tformer import config as config_lib
from tformer.commands.mesh_costs import expected, kept_bytes
from tformer.config import AXES, Config
from tformer.distributed import devices
from tformer.distributed.devices import Target
from tformer.errors import UserError
from tformer.layers import kernel_choice
from tformer.objectives import loss_chunk

SHARED_FLAGS = ('config',)
FLAGS = {
    'device': ('string', None, 'the devices: v5e:2x4, v5p:4x4x4, v6e:4x4, h100:8, h200:16, cpu:8 ...'),
    'most': ('int', 8, 'how many meshes to compile'),
    'jobs': ('int', None, 'how many are compiled at a time; default: one for each core'),
}
ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '2'}

MOST = 8  # along `tensor`, whose products get too small; along `pipeline`, whose stages wait; along `context`
MOST_EXPERT = 32
LONG = 8192  # tokens of a row from which it may be split
REMATS = (None, 'dots', 'full')  # what is kept for the backward pass, from the most
# What is chosen beside the mesh's axes.
CHOICES = ('model.remat', 'train.microbatches', 'model.attention_kernel', 'train.loss_chunk', 'mesh.rules')


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A config that was compiled: its overrides, and the figures of `inspect --json`, or why there are none."""

    overrides: dict[str, str]
    figures: dict[str, Any]
    refused: str = ''

    @property
    def fits(self) -> bool:
        """Whether a device has the memory that it needs."""
        limit = self.figures.get('memory_bytes')
        return bool(self.figures) and (limit is None or self.figures['peak_bytes'] <= limit)

    @property
    def seconds(self) -> float:
        """The estimated seconds of a step; infinite if it does not fit."""
        found = self.figures.get('seconds')
        return found['step'] if found and self.fits else float('inf')


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    spec, target = commands.needed(flags, 'config'), Target.parse(commands.needed(flags, 'device'))
    if not target.device.flops:
        raise UserError(f'--device={target}: no peaks of a {target.device.name} are known; inspect shows its memory')
    devices.prepare(target.device.platform)
    config = checks.load(spec, overrides)
    fixed = {axis for axis in AXES if f'mesh.{axis}' in overrides}
    meshes = sorted(candidates(config, target, fixed), key=lambda mesh: expected(config, target, mesh))
    if not meshes:
        raise UserError(f'no mesh of {target.count:,} devices divides the rows and the heads of this config')
    chosen = first(meshes, flags.most)
    print(f'{len(meshes)} meshes fit; compiling {len(chosen)} for {target} ...', file=sys.stderr, flush=True)
    jobs = flags.jobs or os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tried = list(pool.map(lambda mesh: lowered(spec, overrides, target, config, mesh), chosen))
        attempts = [attempt for found in tried for attempt in found]
        others = variants(config, target, overrides, min(attempts, key=rank))
        attempts += pool.map(lambda given: compiled(spec, given, target), others)
    unsplit = {f'mesh.{axis}' for axis in AXES if getattr(config.mesh, axis) == 1} - overrides.keys()
    print(table(attempts, unsplit))


# ------------------------------------------------------------------------------------------------ which meshes
def candidates(config: Config, target: Target, fixed: set[str]) -> Iterator[dict[str, int]]:
    """Yields the sizes of meshes over all devices that the config allows; axes in `fixed` keep their sizes."""
    model, count = config.model, target.count
    divisors = [size for size in range(1, MOST_EXPERT + 1) if count % size == 0]
    few = [size for size in divisors if size <= MOST]
    splits = {
        'pipeline': [1] if model.recurrence or model.layer_sharing else few,
        'tensor': [size for size in few if model.num_heads % size == 0],
        'context': few if config.data.length >= LONG and not model.recurrence else [1],
        'expert': [size for size in divisors if (model.num_experts or 1) % size == 0],
    }
    splits |= {axis: [getattr(config.mesh, axis)] for axis in fixed & splits.keys()}
    for sizes in itertools.product(*splits.values()):
        mesh = dict(zip(splits, sizes, strict=True))
        left, odd = divmod(count, math.prod(sizes))
        if odd or not left:
            continue
        for fsdp in (size for size in range(1, left + 1) if left % size == 0):
            mesh |= {'fsdp': fsdp, 'data': left // fsdp}
            kept = all(getattr(config.mesh, axis) in (mesh[axis], -1) for axis in fixed)
            if kept and _allowed(config, mesh):
                yield dict(mesh)


def _allowed(config: Config, mesh: dict[str, int]) -> bool:
    try:
        checks.check(config_lib.override(config, {f'mesh.{axis}': size for axis, size in mesh.items()}))
    except UserError:
        return False
    ways = mesh['data'] * mesh['fsdp'] * mesh['expert'] * mesh['pipeline'] * config.train.microbatches
    return config.data.batch_tokens is not None or config.train.batch_size % ways == 0


def first(meshes: list[dict[str, int]], most: int) -> list[dict[str, int]]:
    """Returns the meshes to compile, of the sorted ones: the best, and those of `data` or `fsdp` alone."""
    plain = [mesh for mesh in meshes if math.prod(mesh.values()) in (mesh['data'], mesh['fsdp'])]
    chosen = [*meshes[: max(most - len(plain), 1)], *plain, *meshes]
    return [mesh for number, mesh in enumerate(chosen) if mesh not in chosen[:number]][:most]


# ------------------------------------------------------------------------------------------------ how fast they are
def lowered(
    spec: str, overrides: dict[str, str], target: Target, config: Config, mesh: dict[str, int]
) -> list[Attempt]:
    """Returns the attempts at a mesh, each of which keeps less than the one before; the last one fits, if any does."""
    given = overrides | {f'mesh.{axis}': str(size) for axis, size in mesh.items()}
    steps: list[dict[str, str]] = [{}]
    if 'model.remat' not in overrides:
        kept = [remat for remat in REMATS if remat is not None or kept_bytes(config, mesh) < 1.5 * target.device.memory]
        steps = [{} if remat == config.model.remat else {'model.remat': str(remat)} for remat in kept]
    rows = config.train.batch_size // math.prod(mesh[axis] for axis in ('data', 'fsdp', 'expert'))
    parts = config.train.microbatches
    if config.data.batch_tokens is None:
        more = [number for number in (2, 4, 8) if rows % (parts * number * mesh['pipeline']) == 0]
        steps += [steps[-1] | {'train.microbatches': str(parts * number)} for number in more]
    attempts: list[Attempt] = []
    for step in steps:
        attempts.append(compiled(spec, given | step, target))
        if attempts[-1].fits:
            break
    return attempts


def variants(config: Config, target: Target, overrides: dict[str, str], best: Attempt) -> list[dict[str, str]]:
    """Returns the overrides of `best`, the fastest attempt, with one more each: another attention kernel that serves
    the model, all logits at once, or sequence parallelism; none if it does not fit."""
    model = config.model
    more: list[dict[str, str]] = []
    if not best.fits:
        return []
    if 'model.attention_kernel' not in overrides and model.recurrence is None:
        own, needs = kernel_choice.pick(model, target.jax_platform), kernel_choice.needs(model)
        names = (*kernel_choice.BEST.get(target.jax_platform, ()), 'reference')
        able = [name for name in names if kernel_choice.unserved(name, needs, target.jax_platform) is None]
        more += [{'model.attention_kernel': name} for name in able if name != own]
    if 'train.loss_chunk' not in overrides and loss_chunk(config) is not None:
        more.append({'train.loss_chunk': 'None'})
    if 'mesh.rules' not in overrides and best.overrides.get('mesh.tensor', '1') != '1':
        more += [{'mesh.rules': rules} for rules in ('fsdp_tp', 'fsdp_tp_sp') if rules != config.mesh.rules]
    return [best.overrides | each for each in more]


def compiled(spec: str, overrides: dict[str, str], target: Target) -> Attempt:
    """Returns the figures of a config's train step, compiled in a process of its own."""
    command = [sys.executable, '-m', 'tformer', 'inspect', '--json', f'--device={target}', f'--config={spec}']
    command += [f'--config.{name}={value}' for name, value in overrides.items()]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.stdout.startswith('{'):  # also where it does not fit
        attempt = Attempt(overrides, json.loads(ran.stdout.splitlines()[-1]))
    else:
        attempt = Attempt(overrides, {}, (ran.stderr.strip().splitlines() or [f'exit code {ran.returncode}'])[-1])
    print(f'  {row(attempt)}', file=sys.stderr, flush=True)
    return attempt


def rank(attempt: Attempt) -> tuple[float, float]:
    """Returns a key that sorts attempts: the fastest first, of equally fast ones that with the lowest peak."""
    return attempt.seconds, attempt.figures.get('peak_bytes', float('inf'))


# ------------------------------------------------------------------------------------------------ in words
def table(attempts: list[Attempt], unsplit: Collection[str] = ()) -> str:
    """Returns the attempts, the fastest first, and the flags of the first, but for axes of `unsplit` of size 1, which
    is what the config itself says of them.

    Raises:
      UserError: none fits.
    """
    ranked = sorted(attempts, key=rank)
    lines = [f'{"step, s":>9} {"MFU":>6} {"peak, GiB":>10}  {"sent, GiB":>9}  mesh and what else differs']
    lines += [row(attempt) for attempt in ranked]
    if not ranked[0].fits:
        print('\n'.join(lines))
        raise UserError('no mesh fits these devices; the table above says by how much')
    given = ranked[0].overrides.items()
    flags = ' '.join(f'--config.{name}={value}' for name, value in given if name not in unsplit or value != '1')
    return '\n'.join([*lines, '', f'the fastest: {flags}'])


def row(attempt: Attempt) -> str:
    """Returns an attempt in a line."""
    given = attempt.overrides
    named = [f'{axis} {given[f"mesh.{axis}"]}' for axis in AXES if given.get(f'mesh.{axis}', '1') != '1']
    named += [f'{name.partition(".")[2]} {given[name]}' for name in CHOICES if name in given]
    words = ', '.join(named) or 'one device'
    if not attempt.figures:
        needs = re.search(r'needs (\S+) of the (\S+)', attempt.refused)
        why = f'does not fit: {needs[1]} of {needs[2]}' if needs else attempt.refused
        return f'{"":>9} {"":>6} {"":>10}  {"":>9}  {words}: {why}'
    figures = attempt.figures
    step = figures['seconds']['step']
    sent = sum(found['bytes'] for found in figures['collectives']) / 2**30
    peak = f'{figures["peak_bytes"] / 2**30:.2f}' + ('' if attempt.fits else '!')
    return f'{step:>9.3g} {figures["mfu"]:>6.1%} {peak:>10}  {sent:>9.2f}  {words}' + (
        '' if attempt.fits else ': does not fit'
    )
