"""Sweeps of a tiny model, run here or in a process."""

import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from lives import HANG, environment
from tformer.config import Config, Data, Evaluate, Mesh, Model, Optimizer, Train
from tformer.lab.sweep import (
    grid,
    runner,
    trial_process,
    trials,
)  # fmt: skip
from tformer.lab.sweep.runner import Placement

TINY = Config(
    model=Model(emb_dim=16, mlp_dim=64, num_heads=4, num_decoder_layers=2, max_len=16, vocab_size=64, norm='layernorm'),
    data=Data(tokenizer='symbol', length=16, batching='pack'),
    optimizer=Optimizer(warmup_steps=1),
    train=Train(num_steps=4, batch_size=8, log_every=1, checkpoint_every=1),
    mesh=Mesh(data=1),
    evaluate=Evaluate(samples=0),
)


def loaded(spec: str, overrides: Mapping[str, str] | None = None) -> tuple[Config, list[trials.Trial]]:
    """Returns (the base config, the trials) of a sweep file that is no search."""
    base, sweep = trials.opened(spec, overrides)
    with trials.beginning(spec):
        return base, trials.listed(base, sweep, overrides)


# Acts a training, in a process that takes job after job: each trial's learning rate says what becomes of it.
ACTOR = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
signal.signal(signal.SIGINT, lambda *_: os._exit(75))

def act(home, log):
    rate = json.loads((home / 'trial.json').read_text())['optimizer']['learning_rate']
    with (home / 'began').open('a') as file:
        file.write('x')
    if rate == 2.0:
        log.write('tformer: it is two\\nand more\\n')
        return 2
    if rate == 3.0:
        log.write('ValueError: it is three\\n')
        return 1
    if rate == 6.0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rate == 7.0 and len((home / 'began').read_text()) < 2:
        os.abort()
    while rate == 5.0 and not (home / 'let go').exists():
        time.sleep(0.01)
    time.sleep(0.1 * (rate >= 10))
    if (home / 'result.json').exists():
        (home / 'twice').touch()
    (home / 'result.tmp').write_text(json.dumps({'test': {'loss': rate}}))
    os.replace(home / 'result.tmp', home / 'result.json')
    return 0

for line in sys.stdin:
    job = json.loads(line)
    with open(job['log'], 'a') as log:
        code = max(act(pathlib.Path(home), log) for home in job['homes'])
    print(json.dumps({'code': code, 'ends': code == 1}), flush=True)
    if code == 1:
        sys.exit(1)
"""


def acting(directory: pathlib.Path, rates: list[float], parallel: int = 1, **placement: Any) -> int:
    made = trials.trials(TINY, grid({'optimizer.learning_rate': rates}))
    with mock.patch.object(trial_process, 'TRAIN', [sys.executable, '-c', ACTOR]):
        return runner.sweep(TINY, made, directory, Placement(parallel, **placement))


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
