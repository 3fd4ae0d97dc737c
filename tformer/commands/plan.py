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

from jax.sharding import AbstractMesh

from tformer import checks, commands
from tformer import config as config_lib
from tformer.config import AXES, Config
from tformer.distributed import devices
from tformer.distributed.devices import Target
from tformer.distributed.sharding import Schedule
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
# Bytes that a layer's norms and residuals move for each number of the stream, which `tensor` does not split.
UNSPLIT = 100
# The time of a parameter's update is that of moving so many bytes: a float32 parameter with its gradient and moments,
# read and written, and by the compilers of TPUs four times as long.
UPDATED = {'tpu': 110, 'cuda': 28}
LAYER = 1.4e-4  # seconds of a layer, forward and back, of however few tokens
NUMBERS = {'bfloat16': 2, 'float32': 4}  # bytes of a number
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


def expected(config: Config, target: Target, mesh: dict[str, int]) -> float:
    """Returns a mesh's expected seconds: products, what it sends, its idle stages, what it reads of weights and stream,
    what its layers take at least, the update, and what of its state would not fit.

    Bytes are those of a ring, by the parameters and activations that an axis splits (Rajbhandari et al. 2020, section
    7; Shoeybi et al. 2019, section 3; Narayanan et al. 2021, 2.2; Liu et al. 2023).
    """
    model, device, width = config.model, target.device, config.model.emb_dim
    size = NUMBERS[model.dtype]
    attention, experts = 4 * width * width, 3 * width * model.mlp_dim
    weights = sum(_depths(config)) * (attention + experts * (model.num_experts or 1))
    used = sum(_depths(config)) * (attention + experts * _computed(config, target, mesh['expert']))
    own = weights / (mesh['tensor'] * mesh['pipeline'] * mesh['expert'])
    held = own + (model.vocab_size or 0) * width / mesh['tensor']
    rows = config.train.batch_size / (mesh['data'] * mesh['fsdp'] * mesh['expert'])
    stream = rows * _numbers_of_a_row(config) / mesh['context'] / mesh['pipeline']
    keys = stream * mesh['context'] / mesh['tensor'] * (model.num_kv_heads or model.num_heads) / model.num_heads
    stages, parts = mesh['pipeline'], _parts(config, mesh)
    ticks, gradient = parts + stages - 1, 2 * size * own / mesh['fsdp']
    costs = {  # from the axis whose devices are nearest; bytes that a device sends in a step, times n / (n - 1)
        'tensor': 8 * size * stream,
        'context': 10 * size * keys + gradient,  # keys and values thrice, and their gradients in float32
        'expert': 4 * size * stream * model.experts_per_token,
        'fsdp': 3 * size * own * ticks,
        'data': gradient,
        'pipeline': 2 * size * rows * config.data.length / mesh['context'] * width,
    }
    near, sent = 1, {}
    for axis, amount in costs.items():
        near *= mesh[axis]
        speed = device.near_bytes if near <= device.near else device.far_bytes
        sent[axis] = amount * (1 - 1 / mesh[axis]) / speed
    each = config.train.batch_size / target.count / device.flops['bfloat16']
    products = 6 * used * config.data.length * each
    if device.platform == 'cuda':  # a GPU gathers while it multiplies
        sent['fsdp'] = max(sent['fsdp'] - products, 0)
    unseen = 9 * _numbers_of_a_row(config) * config.data.length * each if mesh['context'] > 1 else 0  # by causal masks
    read, updated = 3 * 4 * own * ticks, UPDATED[device.platform] * held / mesh['fsdp']
    moved = (read + updated + UNSPLIT * stream) / device.bandwidth
    layers = sum(_depths(config)) / stages * parts  # that a device computes, one part of its rows at a time
    waits = max(LAYER * layers - products - UNSPLIT * stream / device.bandwidth, 0)
    idle = (products + unseen) * (stages - 1) / parts + waits * ticks / parts
    state = 16 * held / mesh['fsdp']
    return products + sum(sent.values()) + moved + unseen + idle + max(state / device.memory - 0.8, 0) * 1e6


def _computed(config: Config, target: Target, ways: int) -> float:
    """Returns how many experts are computed for a token where devices share them in so many ways: without drops every
    device has the slots of the worst case, and a GPU multiplies them by each of its experts."""
    model = config.model
    if model.num_experts is None or model.expert_dispatch == 'capacity':
        return 1 if model.num_experts is None else model.experts_per_token * model.expert_capacity
    own = model.num_experts / ways
    return ways * min(model.experts_per_token, own) * (own if target.device.platform == 'cuda' else 1)


def _parts(config: Config, mesh: dict[str, int]) -> int:
    """Returns how many parts of a batch pass through the stages one after another."""
    if mesh['pipeline'] == 1:
        return 1
    schedule = Schedule(config.mesh.microbatches, config.mesh.pipeline_repeats)
    return schedule.parts_of(config.train.batch_size, AbstractMesh(tuple(mesh.values()), tuple(mesh)))


def _depths(config: Config) -> tuple[int, int]:
    """Returns the layers of the encoder and of the decoder that a model has."""
    model = config.model
    return model.num_encoder_layers * (model.family != 'decoder'), model.num_decoder_layers * (
        model.family != 'encoder'
    )


def _numbers_of_a_row(config: Config) -> float:
    """Returns the size of a row's residual stream, that of all layers together."""
    encoder, decoder = _depths(config)
    lengths = encoder * (config.data.encoder_length or config.data.length), decoder * config.data.length
    return sum(lengths) * config.model.emb_dim


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


def kept_bytes(config: Config, mesh: dict[str, int]) -> float:
    """Returns about what a device keeps for the backward pass if nothing is computed again, besides attention's scores:
    17 numbers of the stream's width for each token and layer (Korthikanti et al. 2023, eq. 1 and section 5)."""
    size = NUMBERS[config.model.dtype]
    rows = config.train.batch_size / config.train.microbatches
    return 17 * size * rows * _numbers_of_a_row(config) / math.prod(mesh.values())


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
