"""Times a config's train step, its data pipeline, its start, or what saving costs; prints one JSON line.

    tformer benchmark --config=FILE[:argument] [--steps=10] [--data | --saves | --start | --suggest]
                      [--config.section.field=value ...] [--profile=FIRST:LAST --workdir=DIR]

A train step is timed on full random batches. Where the device's peak is not known, as on a CPU, a product of two square
matrices on each device is timed between the steps, and `product_share` is the steps' rate as a share of its. --data
times the reading, tokenising and batching of the data instead, and --saves compares steps that save a checkpoint with
steps that do not. --start trains to the end of the first step in two fresh processes, of which the second finds the
programs that the first has compiled. --suggest finds the batch that the devices train on fastest, and a number of
buckets, as flags.
"""

import contextlib
import functools
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tformer import checks, commands
from tformer import config as config_lib
from tformer.commands import start
from tformer.commands.planning.batch_sizes import suggest
from tformer.config import Config
from tformer.data.batches import mixture, pipeline
from tformer.distributed import devices, meshes
from tformer.errors import UserError, choose
from tformer.training import checkpoint_writer, workdir
from tformer.training.dummy_batch import assumed, random_batch, vocabulary_is_alphabet
from tformer.training.program import make_program
from tformer.training.state import TrainState, count_parameters
from tformer.training.step_trace import StepTrace

SHARED_FLAGS = ('config', 'workdir', 'profile')
FLAGS = {
    'steps': ('int', 10, 'how many steps to time'),
    'data': ('bool', False, 'time the data pipeline'),
    'saves': ('bool', False, 'time what saving checkpoints costs'),
    'start': ('bool', False, 'time a training from the command to its first step'),
    'suggest': ('bool', False, 'find the batch size and the buckets that suit the devices'),
}
PROCESSES = True
ALONE = ('saves', 'start', 'suggest')


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    config = checks.load(commands.needed(flags, 'config'), overrides)
    asked = [name for name in ('data', 'saves', 'start', 'suggest') if flags[name].value]
    if len(asked) > 1:
        raise UserError(f'benchmark takes one of --{", --".join(asked)}')
    what = asked[0] if asked else 'train_step'
    trace = None
    if flags.profile is not None:
        if what != 'train_step':
            raise UserError(f'--profile is of train steps; leave out --{what}')
        trace = StepTrace(flags.profile, pathlib.Path(commands.needed(flags, 'workdir')))
    elif flags.workdir is not None:
        raise UserError('--workdir is where --profile writes its trace; benchmark writes nothing else')
    if what == 'start':
        checks.check_here(config)
        print(json.dumps(start.measure(flags.config, overrides, flags.extensions)))
        return
    print(json.dumps(benchmark(config, flags.steps, what, trace)))


def benchmark(
    config: Config, steps: int = 10, what: str = 'train_step', trace: StepTrace | None = None
) -> dict[str, Any]:
    """Returns the time of a config's train step on full random batches, and facts of the model.

        >>> tformer.benchmark(tformer.load_config('configs/g2p.py:demo'))['step_ms']

    `what` is train_step, data (the data pipeline without a model), saves (the cost of saving checkpoints), or suggest
    (the batch that the devices train on fastest). `trace` writes a trace of some of the timed train steps.

    Raises:
      UserError: the config has a mistake, or `steps` is not positive.
    """
    checks.check_here(config)
    if steps < 1:
        raise UserError(f'--steps={steps} must be positive')
    if trace is not None:
        trace.check(0, steps)
    timed = functools.partial(train_step, trace=trace)
    ways: dict[str, Callable[[Config, int], dict[str, Any]]] = {
        'train_step': timed,
        'data': feed,
        'saves': saving,
        'suggest': suggest,
    }
    return choose(ways, what, 'what')(config, steps)


Numbers = Mapping[str, Any]  # what a train step returns beside the state, on the devices


@contextlib.contextmanager
def stepping(config: Config) -> Iterator[tuple[Callable[[], Numbers], Callable[[], TrainState], dict[str, Any]]]:
    """Gives (a function that begins a step and returns its numbers, one that returns the state, facts of the model)."""
    guessed, config = vocabulary_is_alphabet(config), assumed(config)
    if guessed:
        size = config.model.vocab_size
        print(f'tformer: no data is read; a vocabulary of {size:,} is assumed (model.vocab_size)', file=sys.stderr)
    batch = random_batch(config)
    program = make_program(config, batch)
    with program.context():
        state = program.init()
        placed = jax.device_put(batch, meshes.batch_sharding(program.mesh))
        facts = {
            'device': jax.devices()[0].device_kind,
            'devices': program.mesh.size,
            'params': count_parameters(state.params),
            'tokens': sum(value.size for name, value in batch.items() if name.endswith('inputs')),
        }

        def begin() -> Numbers:
            nonlocal state
            state, numbers = program.jitted_step(state, placed, program.hyper, *program.taught)
            return dict(numbers)

        for _ in range(2):
            ended(begin())
        yield begin, lambda: state, facts


def ended(numbers: Numbers) -> tuple[float, float]:
    """Waits until a step has ended; returns its loss and its floating-point operations."""
    (total, weight), flops = jax.device_get((numbers['scores']['loss'], numbers['flops']))
    return float(total / weight), float(flops)


def train_step(config: Config, steps: int, trace: StepTrace | None = None) -> dict[str, Any]:
    """Returns the median time of `steps` train steps on full random batches, after two unmeasured."""
    times: list[float] = []
    products: list[float] = []
    loss = flops = 0.0
    with stepping(config) as (begin, _, facts), contextlib.ExitStack() as contexts:
        peak = devices.peak_flops(facts['device'], config.model.dtype)
        multiply = matrix_product(config.model.dtype) if peak is None else None
        if trace is not None:
            contexts.callback(trace.close)
        for step in range(1, steps + 1):
            if trace is not None:
                trace.begin(step)
            began = time.perf_counter()
            with jax.profiler.StepTraceAnnotation('train', step_num=step):
                loss, flops = ended(begin())
            times.append(time.perf_counter() - began)
            if trace is not None:
                trace.end(step, loss)
            if multiply is not None:
                products.append(multiply())
    median = statistics.median(times)
    rate = {'tokens_per_s': round(facts.pop('tokens') / median, 1), 'step_ms': round(median * 1e3, 2)}
    flops_per_s = flops / median
    if peak is not None:
        share = {'mfu': round(flops_per_s / (peak * facts['devices']), 4)}
    else:
        product = statistics.median(products)
        share = {'product_gflops': round(product / 1e9, 1), 'product_share': round(flops_per_s / product, 4)}
    return {**facts, **rate, **share, 'loss': round(loss, 4)}


PRODUCT_SIZE = 2048  # rows and columns of each matrix


def matrix_product(dtype: str) -> Callable[[], float]:
    """Returns a function that multiplies square matrices on each device of the context's mesh; it returns FLOPs/s."""
    mesh = jax.sharding.get_mesh()
    one_each = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    shape = (mesh.size, PRODUCT_SIZE, PRODUCT_SIZE)
    squares = jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=one_each)()
    multiply = jax.jit(jnp.matmul, out_shardings=one_each)

    def timed() -> float:
        began = time.perf_counter()
        multiply(squares, squares).block_until_ready()
        return mesh.size * 2 * PRODUCT_SIZE**3 / (time.perf_counter() - began)

    timed()
    return timed


SAVED_EVERY = 10


def saving(config: Config, steps: int) -> dict[str, Any]:
    """Returns what asynchronous saving costs: the time of ten steps with one save against ten without.

    Blocks of ten steps with a checkpoint after the first, and blocks without one, alternate until each kind has made
    `steps`. `ratio` is that of the blocks' median times; `blocked_ms` is the median time that a save delays the steps.
    """
    blocks: dict[bool, list[float]] = {True: [], False: []}
    blocked = []
    with tempfile.TemporaryDirectory() as place, stepping(config) as (begin, state, facts):
        checkpoints = checkpoint_writer.CheckpointWriter(pathlib.Path(place))
        for block in range(2 * max(1, steps // SAVED_EVERY)):
            saves, began = block % 2 == 0, time.perf_counter()
            for number in range(SAVED_EVERY):
                ended(begin())
                if saves and number == 0:
                    since = time.perf_counter()
                    checkpoints.save(state(), {}, None)
                    blocked.append(time.perf_counter() - since)
            blocks[saves].append(time.perf_counter() - began)
            checkpoints.wait()
    median = {saves: statistics.median(times) for saves, times in blocks.items()}
    line = {
        'ratio': round(median[True] / median[False], 4),
        'step_ms': round(median[False] / SAVED_EVERY * 1e3, 2),
        'blocked_ms': round(statistics.median(blocked) * 1e3, 2),
    }
    return {**facts, **line}


def feed(config: Config, steps: int) -> dict[str, Any]:
    """Returns the tokens a second, without padding, that the data pipeline makes without a model.

    `cold_s` are the seconds of reading the files, tokenising and laying out with an empty cache, and `warm_s` those
    with a full one. Then `steps` batches are made in this process, and `steps` by data.num_workers worker processes, or
    one. The tokenizer is trained before that, and its time does not count.
    """
    with tempfile.TemporaryDirectory() as place:
        config = config_lib.override(config, {'data.cache_dir': place})
        tokenizers = workdir.new_tokenizers(config, mixture.load(config, 'train'))

        def opened() -> tuple[pipeline.Batches, float]:
            began = time.perf_counter()
            batches = pipeline.Batches(config, tokenizers, 'train', training=True)
            batches.batch(0)
            return batches, time.perf_counter() - began

        (batches, cold), (_, warm) = opened(), opened()
        found = sum(int(part.examples.lengths.sum()) for part in batches.parts)
        rates, shares = {}, []
        for name, workers in (('tokens_per_s', 0), ('worker_tokens_per_s', config.data.num_workers or 1)):
            made = pipeline.iterate(batches, 0, config_lib.override(config, {'data.num_workers': workers}))
            next(made)
            began, tokens = time.perf_counter(), 0
            for batch in itertools.islice(made, steps):
                real = [batch[side] >= 0 for side in batch if side.endswith('positions')]
                shares.append((sum(int(where.sum()) for where in real), sum(where.size for where in real)))
                tokens += shares[-1][0]
            rates[name] = round(tokens / (time.perf_counter() - began), 1)
            made.close()
    real, slots = np.sum(shares, axis=0)
    return {
        'cold_tokens_per_s': round(found / cold, 1),
        'cold_s': round(cold, 2),
        'warm_s': round(warm, 3),
        **rates,
        'real_share': round(real / slots, 4),
        'examples': batches.num_examples,
    }
