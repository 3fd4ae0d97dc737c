"""Finds the batch with which the devices of this machine train fastest: what `benchmark --suggest` does.

A batch of the config's size is timed, then of twice that and so on, while a device has the memory and the rate grows. A
batch that a device has no memory for is computed in parts (train.microbatches), and is halved where that does not help.
Training never chooses these numbers by its device: a batch of another size is another experiment.
"""

import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import jax

from tformer import errors
from tformer.commands.planning import dry_run
from tformer.config import Config, override
from tformer.data.batches import mixture, pipeline
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.training import setup, workdir
from tformer.training.dummy_batch import assumed, random_batch
from tformer.training.program import make_program

USABLE = 0.9  # the share of a device's memory that a step may take
GAIN = 1.05  # a batch of twice the size is worth its memory if it trains this much faster
MOST_PARTS = 64  # microbatches


class Batch(NamedTuple):
    """A batch that was tried."""

    size: int  # train.batch_size, or data.batch_tokens where that is given
    parts: int  # train.microbatches
    peak: float  # bytes that a device needs
    rate: float | None  # tokens a second; None: it does not fit


Try = Callable[[int, int], Batch | None]  # (size, parts); None: the parts do not divide the batch


def suggest(config: Config, steps: int) -> dict[str, Any]:
    """Returns the fields of the fastest batch, with its tokens a second and the bytes that a device needs.

    What was tried goes to standard error. Where rows are padded to buckets, their number is found from the lengths of
    the training split, which is read for it.

    Raises:
      UserError: not even the smallest batch fits.
    """
    field = 'train.batch_size' if config.data.batch_tokens is None else 'data.batch_tokens'
    size: int = config.data.batch_tokens or config.train.batch_size
    limit = USABLE * device_memory()
    print(f'batches of at most {limit / 2**30:.2f} GiB a device', file=sys.stderr, flush=True)
    found = fastest(
        lambda size, parts: timed(config, field, size, parts, limit, steps), size, config.train.microbatches
    )
    fields = {field: found.size, 'train.microbatches': found.parts}
    if config.data.batching == 'bucket':
        records = mixture.load(config, 'train')
        tokenizers = workdir.new_tokenizers(config, records)
        fields['data.num_buckets'] = pipeline.Batches(config, tokenizers, 'train', training=True).num_buckets
    flags = ' '.join(f'--config.{name}={value}' for name, value in fields.items())
    return {'flags': flags, 'tokens_per_s': round(found.rate or 0, 1), 'peak_bytes': round(found.peak)}


def fastest(attempt: Try, size: int, parts: int) -> Batch:
    """Returns the smallest batch whose rate no larger one exceeds by much; `size` and `parts` are the first tried.

    Raises:
      UserError: no batch fits.
    """
    first = fitting(attempt, size, parts)
    while first is None:
        if size % 2:
            raise UserError(f'a batch of {size} does not fit a device: lower it by model.remat, mesh.fsdp, mesh.tensor')
        size //= 2
        first = fitting(attempt, size, parts)
    best = first
    for larger in doubled(attempt, first):
        if larger.rate is None or best.rate is None or larger.rate < GAIN * best.rate:
            break
        best = larger
    return best


def fitting(attempt: Try, size: int, parts: int) -> Batch | None:
    """Returns a batch of this size in as few parts as fit; None if none do."""
    while parts <= MOST_PARTS:
        found = attempt(size, parts)
        if found is None or found.rate is not None:
            return found
        parts *= 2
    return None


def doubled(attempt: Try, batch: Batch) -> Iterator[Batch]:
    """Yields batches of 2, 4, 8, ... times the size in as many parts, until one does not fit."""
    size = batch.size
    while (larger := attempt(size := 2 * size, batch.parts)) is not None and larger.rate is not None:
        yield larger


def timed(config: Config, field: str, size: int, parts: int, limit: float, steps: int) -> Batch | None:
    """Compiles the train step of a batch and, if a device has the memory, times it; prints a line."""
    config = assumed(override(config, {field: size, 'train.microbatches': parts}))
    mesh = meshes.make_mesh(config.mesh)
    try:
        multiple = setup.row_multiple(config, None, mesh)
    except UserError:
        return None
    if multiple is not None:
        rows = size // config.data.length // multiple * multiple
        if not rows:
            return None
        config = override(config, {'train.batch_size': rows})
    batch = random_batch(config)
    program = make_program(config, batch, mesh)
    with program.context():
        peak, rate = _run(program, batch, limit, steps)
    found = Batch(size, parts, peak, rate)
    how = f'{rate:,.0f} tokens/s' if rate is not None else 'does not fit'
    print(f'  {field}={size} train.microbatches={parts}: {peak / 2**30:.2f} GiB, {how}', file=sys.stderr, flush=True)
    return found


def _run(program: Any, batch: Any, limit: float, steps: int) -> tuple[float, float | None]:
    """Returns (the bytes that a device needs, tokens a second or None where these are over the limit)."""
    placed = jax.device_put(batch, meshes.batch_sharding(program.mesh))
    places = program.shardings
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        sharding.unboxed(program.abstract),
        places,
    )
    try:
        step = program.jitted_step.lower(state, placed, program.hyper, *program.taught).compile()
        peak = dry_run.total_bytes(step)
        if peak > limit:
            return peak, None
        state = program.init()
        times = []
        for _ in range(steps + 1):
            began = time.perf_counter()
            state, _ = step(state, placed, program.hyper, *program.taught)
            jax.block_until_ready(state)
            times.append(time.perf_counter() - began)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        return float('inf'), None
    tokens = sum(value.size for name, value in batch.items() if name.endswith('inputs'))
    return peak, tokens / median(times[1:])


def device_memory() -> float:
    """Returns the bytes that a device of this process has; CPU devices share those of the machine."""
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get('bytes_limit') or errors.machine_memory() / jax.local_device_count())
