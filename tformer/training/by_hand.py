"""Training in Python without a workdir: a config, a batch, a state and a step."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tformer import checks
from tformer.config import Config
from tformer.training import dummy_batch, program
from tformer.training.state import TrainState
from tformer.training.step import Batch


def load_config(spec: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the checked config of a file, with fields changed.

        >>> tformer.load_config('configs/g2p.py:demo', {'model.norm': 'rmsnorm'})

    FILE[:argument] is a Python file with `get_config`, or the config.json of a workdir. The overrides are dotted fields
    and their values; text is parsed as on the command line.

    Raises:
      UserError: the file is missing or fails, or a field or value is not valid.
    """
    config = checks.load(spec, overrides)
    checks.check(config)
    return config


def random_batch(config: Config, seed: int = 0) -> dict[str, Any]:
    """Returns a batch of random tokens for the config's objective, numpy arrays [train.batch_size, data.length].

    >>> batch = tformer.random_batch(config)
    """
    return dummy_batch.random_batch(dummy_batch.assumed(config), seed)


def new_state(config: Config, batch: Batch) -> TrainState:
    """Returns the state before the first step: random parameters and the optimizer's state.

        >>> state = tformer.new_state(config, tformer.random_batch(config))
        >>> state
        TrainState(step=0, parameters=3,319,808, optimizer_state=6,639,618)

    Sizes that only the data tell, such as the vocabulary, are assumed if the config has none. Of the batch, arrays
    [B, ...] for the config's objective, only names and shapes are read.
    """
    return _program(config, _rows(batch)).init()


def train_step(config: Config) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, float]]]:
    """Returns step(state, batch) -> (the next state, metrics), compiled when it is first called.

        >>> step = tformer.train_step(config)
        >>> state, metrics = step(state, batch)
        >>> metrics['loss']

    The given state is used up. The metrics are means over the batch (`loss`, `accuracy`, ...), and `grad_norm`,
    `learning_rate`, `skipped`, `tokens` and `flops` of the step.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
        state, found = _program(config, _rows(batch)).train_step(state, batch)
        found = jax.device_get(found)
        means = {name: float(total) / max(float(weight), 1e-9) for name, (total, weight) in found.pop('scores').items()}
        return state, {**means, **{name: float(value) for name, value in found.items()}}

    return step


def _rows(batch: Batch) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((name, tuple(x.shape[1:]), str(x.dtype)) for name, x in sorted(batch.items()))


@functools.lru_cache(maxsize=8)
def _program(config: Config, rows: tuple[tuple[str, tuple[int, ...], str], ...]) -> program.Program:
    batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, shape, dtype in rows}
    return program.make_program(dummy_batch.assumed(config), batch)
