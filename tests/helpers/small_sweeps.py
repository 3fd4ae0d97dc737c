"""Sweeps of a tiny model, run here or in a process."""

import os
import pathlib
import sys
import time
from collections.abc import Callable
from unittest import mock

from lives import HANG, environment
from tformer.config import Config, Data, Evaluate, Mesh, Model, Optimizer, Train
from tformer.lab.sweep import (
    grid,
    runner,
    trial_process,
    trials,
)  # fmt: skip

TINY = Config(
    model=Model(emb_dim=16, mlp_dim=64, num_heads=4, num_decoder_layers=2, max_len=16, vocab_size=64, norm='layernorm'),
    data=Data(tokenizer='symbol', length=16, batching='pack'),
    optimizer=Optimizer(warmup_steps=1),
    train=Train(num_steps=4, batch_size=8, log_every=1, checkpoint_every=1),
    mesh=Mesh(data=1),
    evaluate=Evaluate(samples=0),
)

ACTOR = """
import json, pathlib, signal, sys, time
stated, home = (pathlib.Path(argument.partition('=')[2]) for argument in sys.argv[1:])
rate = json.loads(stated.read_text())['optimizer']['learning_rate']
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with (home / 'began').open('a') as file:
    file.write('x')
if rate == 2.0:
    print('tformer: it is two\\nand more', file=sys.stderr)
    sys.exit(2)
if rate == 3.0:
    raise ValueError('it is three')
while rate == 5.0 and not (home / 'let go').exists():
    time.sleep(0.01)
(home / 'result.json').write_text(json.dumps({'test': {'loss': rate}}))
"""


def acting(directory: pathlib.Path, rates: list[float], parallel: int = 1) -> int:
    made = trials.trials(TINY, grid({'optimizer.learning_rate': rates}))
    with mock.patch.object(trial_process, 'TRAIN', [sys.executable, '-c', ACTOR]):
        return runner.sweep(TINY, made, directory, parallel)


HALT = """
import pathlib, time
from tformer.training import members
add, calls = members.Group.add_metrics, []

def waiting(self, metrics):
    calls.append(metrics)
    while len(calls) == {step} and not pathlib.Path({go!r}).exists():
        time.sleep(0.01)
    add(self, metrics)

members.Group.add_metrics = waiting
"""


def waiting(place: pathlib.Path, go: pathlib.Path, step: int, optimised: bool = False) -> dict[str, str]:
    """An environment in which a training waits, after so many steps, for the file `go`."""
    (place / 'site').mkdir()
    (place / 'site' / 'sitecustomize.py').write_text(HALT.format(step=step, go=str(go)))
    found = environment(optimised)
    return {**found, 'PYTHONPATH': os.pathsep.join([str(place / 'site'), found['PYTHONPATH']])}


def wait_for(sign: Callable[[], object]) -> None:
    end = time.monotonic() + HANG
    while not sign():
        assert time.monotonic() < end
        time.sleep(0.02)
