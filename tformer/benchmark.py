"""How fast a config trains here, and how fast its data come."""

import dataclasses
import itertools
import json
import statistics
import tempfile
import time

import jax
import numpy as np
from flax import linen as nn

from tformer import sharding
from tformer.config import Config, resolve
from tformer.data import mixture, pipeline
from tformer.data.tokenizers import TOKENIZERS, train_tokenizers
from tformer.data.vocabulary import FIRST
from tformer.errors import choose
from tformer.hyper import Hyper
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optimizers import make_optimizer
from tformer.state import count_parameters, logical_names, start_state
from tformer.step import make_train_step


def assumed(config: Config) -> Config:
    """Returns `config` resolved without its data: a vocabulary of data.tokenizer_vocab_size (bytes and the hub's have
    theirs), 10 classes, where the model does not say."""
    data, size = config.data, config.data.tokenizer_vocab_size
    if data.tokenizer in ('byte', 'huggingface') and not config.model.vocab_size:
        size = TOKENIZERS[data.tokenizer].train((), data).vocab_size
    return resolve(config, vocab_size=config.model.vocab_size or size, num_classes=config.model.num_classes or 10)


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a full batch of random tokens [train.batch_size, data.length] for the config's objective."""
    rng = np.random.default_rng(seed)
    model, data, rows = config.model, config.data, config.train.batch_size
    assert model.vocab_size

    def side(prefix: str, vocab_size: int, length: int) -> dict[str, np.ndarray]:
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        tokens = rng.integers(FIRST, vocab_size, (rows, length), np.int32)
        return {f'{prefix}inputs': tokens, f'{prefix}positions': positions}

    batch = side('', model.vocab_size, data.length)
    if model.family == 'encoder_decoder':
        batch |= side('encoder_', model.encoder_vocab_size or model.vocab_size, data.encoder_length or data.length)
    classes = model.num_classes or 2
    labels = {
        'classification': rng.integers(0, classes, rows, np.int32),
        'regression': rng.random(rows, np.float32),
        'question_answering': rng.integers(0, data.length, (rows, 2), np.int32),
        'masked_lm_nsp': rng.integers(0, 2, rows, np.int32),
        'masked_lm_sop': rng.integers(0, 2, rows, np.int32),
    }
    if config.train.objective in labels:
        batch |= {'labels': labels[config.train.objective], 'label_weights': np.ones(rows, np.float32)}
    first, stop = (0, classes) if config.train.objective == 'token_classification' else (FIRST, model.vocab_size)
    targets = rng.integers(first, stop, (rows, data.length), np.int32)
    return batch | {'targets': targets, 'weights': np.ones((rows, data.length), np.float32)}


def train_step(config: Config, steps: int) -> str:
    """Returns one JSON line: the median time of `steps` train steps on full random batches, after two unmeasured."""
    config = assumed(config)
    mesh, rules = sharding.make_mesh(config.mesh), choose(sharding.RULES, config.mesh.rules, 'mesh.rules')
    model, objective = build(config.model), OBJECTIVES[config.train.objective]
    hyper, batch = Hyper.of(config), random_batch(config)
    optimizer = make_optimizer(config, logical_names(model, objective, batch))
    tokens = sum(value.size for name, value in batch.items() if name.endswith('inputs'))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        state, _ = start_state(model, objective, optimizer, hyper, batch, mesh, rules)
        step = jax.jit(make_train_step(model, objective, optimizer, config), donate_argnums=0)
        placed = jax.device_put(batch, sharding.batch_sharding(mesh))
        times = []
        for _ in range(steps + 2):
            began = time.perf_counter()
            state, numbers = step(state, placed, hyper)
            loss = jax.device_get(numbers['scores']['loss'])
            times.append(time.perf_counter() - began)
    median = statistics.median(times[2:])
    line = {
        'device': jax.devices()[0].device_kind,
        'devices': mesh.size,
        'tokens_per_s': round(tokens / median, 1),
        'step_ms': round(median * 1e3, 2),
        'params': count_parameters(state.params),
        'loss': round(float(loss[0] / loss[1]), 4),
    }
    return json.dumps(line)


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
