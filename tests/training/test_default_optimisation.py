"""Promises of equal numbers at XLA's default level of optimisation, as users run it; other tests compile without it.

Each holds in processes of its own: the level is one of a process, and programs of both levels never share a cache entry.
"""

import functools
import os
import pathlib
import signal
import subprocess
import sys

import pytest

import halting
from lives import HANG, Life
from places import ROOT, TESTS
from resuming import LOADED, STEPS, arguments, arrays, begin, end
from small_sweeps import TINY
from tformer import config
from tformer.lab.sweep import manifest, one_at_a_time, trials
from tformer.training import checkpoint
from whole_runs import numbers

pytestmark = pytest.mark.slow

MESHES = {'one device': (1, 1, ()), 'fsdp': (1, 4, ('--config.mesh.fsdp=4', '--config.mesh.data=1'))}


@pytest.mark.signals
@pytest.mark.parametrize('mesh', MESHES)
def test_a_run_that_is_killed_and_resumed_is_the_unbroken_one(tmp_path: pathlib.Path, mesh: str) -> None:
    processes, devices, fields = MESHES[mesh]
    command, whole, parts = arguments(tmp_path, 'decoder', *LOADED, *fields), tmp_path / 'whole', tmp_path / 'parts'
    run = functools.partial(begin, tmp_path, command, processes=processes, devices=devices, optimised=True)
    end(run(whole))
    (life,) = run(parts, before=functools.partial(halting.die_at, 'a save', 5))
    assert life.wait() == -signal.SIGKILL and 0 < max(checkpoint.steps(parts)) < STEPS
    end(run(parts))
    assert arrays(parts, STEPS) == arrays(whole, STEPS) and numbers(parts) == numbers(whole)


VARIED = {
    'optimizer.learning_rate': [3e-3], 'optimizer.weight_decay': [0.1], 'model.dropout_rate': [0.1],
    'model.init_scale': [0.5], 'train.label_smoothing': [0.1], 'train.z_loss': [1e-3], 'train.seed': [1],
}  # fmt: skip


def test_each_trial_of_a_mapped_program_is_the_trial_alone(tmp_path: pathlib.Path) -> None:
    """Two programs: one computes a trial, the other all of them one after another."""
    import toy_data

    fields = {
        'data.path': (str(toy_data.running(tmp_path / 'data')),), 'data.byte_fallback': False, 'train.num_steps': 12,
        'train.checkpoint_every': None, 'train.eval_every': 6, 'model.dropout_rate': 0.0,
    }  # fmt: skip
    shared = config.override(TINY, fields)
    made = trials.trials(shared, one_at_a_time({}, VARIED))
    homes = {}
    for name in ('alone', 'together'):
        manifest.claim(shared, made, tmp_path / name)
        homes[name] = [tmp_path / name / trial.directory for trial in made]
    lives = [Life(tmp_path, 'train', *homes['together'], '--transform=map', optimised=True)]
    end(lives)
    for mine, theirs in zip(homes['together'], homes['alone'], strict=True):
        end([Life(tmp_path, 'train', f'--config={theirs}/trial.json', f'--workdir={theirs}', optimised=True)])
        assert numbers(mine) == numbers(theirs) and arrays(mine, 12) == arrays(theirs, 12)
