"""Finds the fastest mesh of some devices, which need not be here, for a config.

    tformer plan --device=v5p:4x4x4 --config=FILE[:argument] [--config.section.field=value ...]

Meshes that fit the model, the batch and the devices are compared by the bytes that they keep, move and send, and by how
long they wait; the best are compiled by the devices' own compiler, some at a time. With `--most` above 2, `data` alone
and `fsdp` alone are among them. Each is compiled with as much to keep as fits: model.remat None, dots, full, then more
train.microbatches. The fastest mesh is compiled with one other choice each, too: the other values of model.remat, the
other attention kernels that serve the model there, all logits at once where they are computed in chunks, layers that
are not scanned where they are few, and sequence parallelism where it has an axis `tensor`; each with as many
train.microbatches as it needs. The fastest of them is compiled with the others that are faster, until none is. The
table is sorted by the estimated seconds of a step, and its last line gives the flags of the fastest. Of all these
fields those that are given on the command line stay as they are.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import Any

from tformer import checks, commands
from tformer.commands.planning.mesh_candidates import first, meshes
from tformer.commands.planning.mesh_costs import depths, expected, kept_bytes, num_rows
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
ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3'}

REMATS = (None, 'dots', 'full')  # what is kept for the backward pass, from the most
UNROLLED = {'gpu': 48, 'tpu': 16}  # layers of a device that are compiled one by one at most, by platform
# What is chosen beside the mesh's axes.
CHOICES = (
    *('model.remat', 'train.microbatches', 'model.attention_kernel', 'train.loss_chunk', 'model.scan_layers'),
    'mesh.rules',
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a plan is made for."""

    spec: str  # of the config's file
    overrides: dict[str, str]  # those that are given, which stay as they are
    target: Target
    config: Config
    extensions: Sequence[str] = ()
    done: dict[frozenset[tuple[str, str]], 'Attempt'] = dataclasses.field(default_factory=dict)  # by overrides

    @property
    def flags(self) -> list[str]:
        """The flags that a command on the config needs besides its overrides."""
        return [f'--extensions={",".join(self.extensions)}'] if self.extensions else []


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A config that was compiled: its overrides, and the figures of `inspect --json`, or why there are none."""

    overrides: dict[str, str]
    figures: dict[str, Any]
    refused: str = ''

    @property
    def fits(self) -> bool:
        """Whether a device has the memory that it needs."""
        return bool(self.figures) and self.excess <= 1

    @property
    def excess(self) -> float:
        """How many times a device's memory it needs; 0 where it failed for another reason, or the memory is unknown."""
        if self.figures:
            peak, limit = self.figures['peak_bytes'], self.figures.get('memory_bytes')
            return float(peak / limit) if limit else 0.0
        needed = re.search(r'needs ([\d.]+)G of the ([\d.]+)G', self.refused)
        return float(needed[1]) / float(needed[2]) if needed else 0.0

    @property
    def seconds(self) -> float:
        """The estimated seconds of a step; infinite if it does not fit."""
        found = self.figures.get('seconds')
        return found['step'] if found and self.fits else float('inf')


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    spec, target = commands.needed(flags, 'config'), Target.parse(commands.needed(flags, 'device'))
    if not target.device.flops:
        raise UserError(f'--device={target}: no peaks of a {target.device.name} are known; inspect shows its memory')
    for name in ('most', 'jobs'):
        number: int | None = flags[name].value
        if number is not None and number < 1:
            raise UserError(f'--{name}={number} must be at least 1')
    devices.prepare(target.device.platform)
    config = checks.load(spec, overrides)
    asked = Asked(spec, overrides, target, config, flags.extensions)
    found = meshes(config, target, {axis for axis in AXES if f'mesh.{axis}' in overrides})
    chosen = first(sorted(found, key=lambda mesh: expected(config, target, mesh)), flags.most)
    count = f'{len(found)} mesh{"es" * (len(found) > 1)} fit{"s" * (len(found) == 1)}'
    print(f'{count}; compiling {len(chosen)} for {target} ...', file=sys.stderr, flush=True)
    with concurrent.futures.ThreadPoolExecutor(flags.jobs or os.cpu_count() or 1) as pool:
        improved(asked, min(pool.map(functools.partial(lowered, asked), chosen), key=rank), pool)
    unsplit = {f'mesh.{axis}' for axis in AXES if getattr(config.mesh, axis) == 1} - overrides.keys()
    print(' '.join([table(list(asked.done.values()), unsplit), *asked.flags]))


# ------------------------------------------------------------------------------------------------ how fast they are
def lowered(asked: Asked, mesh: dict[str, int]) -> Attempt:
    """Returns the last of the attempts at a mesh, each of which keeps less than the one before, until one fits."""
    config, memory = asked.config, asked.target.device.memory
    given = asked.overrides | {f'mesh.{axis}': str(size) for axis, size in mesh.items()}
    steps: list[dict[str, str]] = [{}]
    if 'model.remat' not in asked.overrides:
        kept = [remat for remat in REMATS if remat is not None or kept_bytes(config, mesh) < 1.5 * memory]
        steps = [{} if remat == config.model.remat else {'model.remat': str(remat)} for remat in kept]
    for step in steps[:-1]:
        attempt = compiled(asked, given | step)
        if attempt.excess <= 1:
            return attempt
    return fitting(asked, given | steps[-1])


def fitting(asked: Asked, overrides: dict[str, str]) -> Attempt:
    """Returns the last of the attempts at a config, each with more microbatches than the one before, until one fits.

    What microbatches share is in memory once, whatever their number, so that twice the memory needs twice as many at
    least: numbers between are left out.
    """
    attempt = compiled(asked, overrides)
    number = int(overrides.get('train.microbatches', asked.config.train.microbatches))
    for more in microbatches(asked, overrides):
        if attempt.excess <= 1:
            break
        if more >= attempt.excess * number:
            number, attempt = more, compiled(asked, overrides | {'train.microbatches': str(more)})
    return attempt


def microbatches(asked: Asked, overrides: dict[str, str]) -> list[int]:
    """Returns the numbers of microbatches that the config may have besides its own, the smallest first."""
    if 'train.microbatches' in asked.overrides:
        return []
    mesh = {axis: int(overrides.get(f'mesh.{axis}', '1')) for axis in AXES}
    stages = math.lcm(mesh['pipeline'], asked.config.mesh.microbatches or 1) if mesh['pipeline'] > 1 else 1
    rows = num_rows(asked.config) // math.prod(mesh[axis] for axis in ('data', 'fsdp', 'expert')) // stages
    own = int(overrides.get('train.microbatches', asked.config.train.microbatches))
    if asked.config.data.batch_tokens is not None:  # whose rows become a multiple of them
        return [own * 2**power for power in range(1, max(rows // own, 1).bit_length())]
    return [number for number in range(2 * own, rows + 1, own) if rows % number == 0]


def improved(asked: Asked, best: Attempt, pool: concurrent.futures.Executor) -> Attempt:
    """Returns the fastest attempt at the mesh of `best`, if that fits, by other choices than its own.

    Each is made alone first. Of those that are faster the fastest is taken, and the others are made beside it, until
    none is faster.
    """
    changes = variants(asked, best.overrides) if best.fits else []
    while changes:
        given = [changed(asked, best, change) for change in changes]
        tried = pool.map(functools.partial(fitting, asked), given)
        both = sorted(zip(tried, changes, strict=True), key=lambda pair: rank(pair[0]))
        faster = [(attempt, change) for attempt, change in both if attempt.seconds < best.seconds]
        if not faster:
            break
        best, taken = faster[0]
        changes = [change for _, change in faster if not change.keys() & taken.keys()]
    return best


def changed(asked: Asked, best: Attempt, change: dict[str, str]) -> dict[str, str]:
    """Returns the overrides of an attempt with one other choice; what is kept decides the number of microbatches."""
    anew = {'train.microbatches'} - asked.overrides.keys() if 'model.remat' in change else set()
    return {name: value for name, value in best.overrides.items() if name not in anew} | change


def variants(asked: Asked, given: dict[str, str]) -> list[dict[str, str]]:
    """Returns the choices that can be made otherwise than `given`, the overrides of an attempt, each of one field."""
    config, platform = asked.config, asked.target.jax_platform
    model = config.model
    now = given.get('model.remat', str(model.remat))
    more = [{'model.remat': str(remat)} for remat in REMATS if str(remat) != now]
    if model.recurrence is None:
        picked, needs = kernel_choice.pick(model, platform), kernel_choice.needs(model)
        names = (*kernel_choice.BEST.get(platform, ()), 'reference')
        able = [name for name in names if kernel_choice.unserved(name, needs, platform) is None]
        more += [{'model.attention_kernel': name} for name in able if name != picked]
    if loss_chunk(config) is not None:
        more.append({'train.loss_chunk': 'None'})
    unrolled = platform == 'gpu' or given.get('mesh.pipeline', '1') == '1'  # stages of a TPU scan their layers anyway
    if unrolled and model.scan_layers and _layers(asked, given) <= UNROLLED.get(platform, 0):
        more.append({'model.scan_layers': 'False'})
    if given.get('mesh.tensor', '1') != '1':
        more += [{'mesh.rules': rules} for rules in ('fsdp_tp', 'fsdp_tp_sp') if rules != config.mesh.rules]
    return [change for change in more if not change.keys() & asked.overrides.keys()]


def _layers(asked: Asked, given: dict[str, str]) -> int:
    """Returns how many layers a device computes."""
    return sum(depths(asked.config)) // int(given.get('mesh.pipeline', '1'))


def compiled(asked: Asked, overrides: dict[str, str]) -> Attempt:
    """Returns the figures of a config's train step, compiled in a process of its own, once."""
    key = frozenset(overrides.items())
    if key in asked.done:
        return asked.done[key]
    command = [sys.executable, '-m', 'tformer', 'inspect', '--json', f'--device={asked.target}']
    command += [f'--config={asked.spec}', *asked.flags]
    command += [f'--config.{name}={value}' for name, value in overrides.items()]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.stdout.startswith('{'):  # also where it does not fit
        attempt = Attempt(overrides, json.loads(ran.stdout.splitlines()[-1]))
    else:
        attempt = Attempt(overrides, {}, (ran.stderr.strip().splitlines() or [f'exit code {ran.returncode}'])[-1])
    print(f'  {row(attempt)}', file=sys.stderr, flush=True)
    return asked.done.setdefault(key, attempt)


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
        unfit = [attempt for attempt in attempts if attempt.excess > 1]
        if not unfit:
            raise UserError(ranked[0].refused.removeprefix('tformer: '))
        raise UserError(
            'no mesh that was compiled fits these devices; the table above says by how much: a smaller '
            'train.batch_size, or more devices, may'
        )
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
        why = f'does not fit: {needs[1]} of {needs[2]}' if needs else attempt.refused.removeprefix('tformer: ')
        return f'{"":>9} {"":>6} {"":>10}  {"":>9}  {words}: {why}'
    figures = attempt.figures
    step = figures['seconds']['step']
    sent = sum(found['bytes'] for found in figures['collectives']) / 2**30
    peak = f'{figures["peak_bytes"] / 2**30:.2f}' + ('' if attempt.fits else '!')
    return f'{step:>9.3g} {figures["mfu"]:>6.1%} {peak:>10}  {sent:>9.2f}  {words}' + (
        '' if attempt.fits else f': does not fit {figures["memory_bytes"] / 2**30:.2f} GiB'
    )
