"""How fast a config trains here, what saving costs it, and how fast its data come."""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tformer.config import Config
from tformer.data.batches import mixture, pipeline
from tformer.data.tokenizers.tokenizers import train_tokenizers
from tformer.distributed import sharding
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import make_optimizer
from tformer.training import checkpoint
from tformer.training.dummy_batch import assumed, random_batch
from tformer.training.state import TrainState, count_parameters, logical_names, make_start
from tformer.training.step import make_train_step


@contextlib.contextmanager
def stepping(config: Config) -> Iterator[tuple[Callable[[], float], Callable[[], TrainState], dict[str, Any]]]:
    """Gives (one step on a full random batch -> its loss, once it is there; the state now; facts of the model)."""
    config = assumed(config)
    mesh, rules = sharding.make_mesh(config.mesh), sharding.make_rules(config.mesh)
    model, objective = build(config.model), OBJECTIVES[config.train.objective]
    hyper, batch = Hyperparameters.of(config), random_batch(config)
    optimizer = make_optimizer(config, logical_names(model, objective, batch))
    with sharding.placed(mesh, config.mesh):
        start, _ = make_start(model, objective, optimizer, hyper, batch, mesh, rules)
        state = start(hyper)
        step = jax.jit(make_train_step(model, objective, optimizer, config), donate_argnums=0)
        placed = jax.device_put(batch, sharding.batch_sharding(mesh))
        facts = {
            'device': jax.devices()[0].device_kind,
            'devices': mesh.size,
            'params': count_parameters(state.params),
            'tokens': sum(value.size for name, value in batch.items() if name.endswith('inputs')),
        }

        def once() -> float:
            nonlocal state
            state, numbers = step(state, placed, hyper)
            total, weight = jax.device_get(numbers['scores']['loss'])
            return float(total / weight)

        for _ in range(2):
            once()
        yield once, lambda: state, facts


def train_step(config: Config, steps: int) -> str:
    """Returns one JSON line: the median time of `steps` train steps on full random batches, after two unmeasured."""
    times, loss = [], 0.0
    with stepping(config) as (once, _, facts):
        for _ in range(steps):
            began = time.perf_counter()
            loss = once()
            times.append(time.perf_counter() - began)
    median = statistics.median(times)
    rate = {'tokens_per_s': round(facts.pop('tokens') / median, 1), 'step_ms': round(median * 1e3, 2)}
    return json.dumps({**facts, **rate, 'loss': round(loss, 4)})


SAVED_EVERY = 10


def saving(config: Config, steps: int) -> str:
    """Returns one JSON line on what asynchronous saving costs: steps with a save among ten against steps without.

    Blocks of ten steps with a checkpoint after the first and blocks without one take turns, until `steps` of each are
    made; `ratio` is that of the blocks' median times, `blocked_ms` the median time that a save keeps the steps waiting.
    """
    blocks: dict[bool, list[float]] = {True: [], False: []}
    blocked = []
    with tempfile.TemporaryDirectory() as place, stepping(config) as (once, state, facts):
        checkpoints = checkpoint.Checkpoints(pathlib.Path(place))
        for block in range(2 * max(1, steps // SAVED_EVERY)):
            saves, began = block % 2 == 0, time.perf_counter()
            for number in range(SAVED_EVERY):
                once()
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
    return json.dumps({**facts, **line})


def feed(config: Config, steps: int) -> str:
    """Returns one JSON line: tokens a second (padding not counted) that the data pipeline gives, without a model.

    `cold`: reading the files, tokenising and laying out with an empty cache, and all of these seconds counted; `warm`
    seconds: the same with the cache there; then `steps` batches made in this process, and by one worker process.
    The tokenizer is trained before, and not counted.
    """
    with tempfile.TemporaryDirectory() as place:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=place))
        tokenizers = train_tokenizers(config, mixture.load(config, 'train'))

        def start() -> tuple[pipeline.Batches, float]:
            began = time.perf_counter()
            batches = pipeline.Batches(config, tokenizers, 'train', training=True)
            batches.batch(0)
            return batches, time.perf_counter() - began

        (batches, cold), (_, warm) = start(), start()
        found = sum(int(part.examples.lengths.sum()) for part in batches.parts)
        rates, shares = {}, []
        for name, workers in (('tokens_per_s', 0), ('worker_tokens_per_s', 1)):
            data = dataclasses.replace(config.data, num_workers=workers)
            made = pipeline.iterate(batches, 0, dataclasses.replace(config, data=data))
            next(made)
            began, tokens = time.perf_counter(), 0
            for batch in itertools.islice(made, steps):
                real = [batch[side] >= 0 for side in batch if side.endswith('positions')]
                shares.append((sum(int(where.sum()) for where in real), sum(where.size for where in real)))
                tokens += shares[-1][0]
            rates[name] = round(tokens / (time.perf_counter() - began), 1)
            made.close()
    real, slots = np.sum(shares, axis=0)
    line = {
        'cold_tokens_per_s': round(found / cold, 1),
        'cold_s': round(cold, 2),
        'warm_s': round(warm, 3),
        **rates,
        'real_share': round(real / slots, 4),
        'examples': batches.num_examples,
    }
    return json.dumps(line)
