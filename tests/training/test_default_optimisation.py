"""Promises of equal numbers at XLA's default level of optimisation, as users run it; other tests compile without it.

Each holds in processes of its own, for the level is that of a process.
"""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import halting
import toy_data
from lives import HANG, Life
from places import ROOT
from resuming import LOADED, STEPS, arguments, arrays, begin, end
from small_sweeps import TINY
from tformer import config
from tformer.lab.sweep import manifest, trials
from tformer.training import checkpoint
from whole_runs import numbers

pytestmark = pytest.mark.proof

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


ON = {'model.dropout_rate': 0.1, 'train.label_smoothing': 0.1, 'train.z_loss': 1e-4}
ARMS = [
    {},
    {'optimizer.learning_rate': 3e-3, 'optimizer.weight_decay': 0.1, 'optimizer.warmup_steps': 5},
    {'model.dropout_rate': 0.2, 'train.label_smoothing': 0.2, 'train.z_loss': 1e-3},
    {'train.seed': 1, 'model.init_scale': 0.5},
]


def test_each_trial_of_a_mapped_program_is_the_trial_alone(tmp_path: pathlib.Path) -> None:
    """Two programs: one computes a trial, the other all of them one after another; what is on, is on in all."""
    fields = {
        'data.path': (str(toy_data.running(tmp_path / 'data')),), 'data.byte_fallback': False, 'train.num_steps': 12,
        'train.checkpoint_every': None, 'train.eval_every': 6,
    }  # fmt: skip
    shared = config.override(TINY, fields | ON)
    made = trials.trials(shared, ARMS)
    homes = {}
    for name in ('alone', 'together'):
        manifest.claim(shared, made, tmp_path / name)
        homes[name] = [tmp_path / name / trial.directory for trial in made]
    end([Life(tmp_path, 'train', *homes['together'], '--transform=map', optimised=True)])
    for mine, theirs in zip(homes['together'], homes['alone'], strict=True):
        end([Life(tmp_path, 'train', f'--config={theirs}/trial.json', f'--workdir={theirs}', optimised=True)])
        assert numbers(mine) == numbers(theirs) and arrays(mine, 12) == arrays(theirs, 12)


PEAKS = """
import json
from tformer.config import Config, Data, Mesh, Model, Optimizer, Train
from tformer.distributed import sharding
from tformer.training import dummy_batch, program
found = []
for chunk in (None, 64):
    config = dummy_batch.assumed(Config(
        model=Model(family='decoder', emb_dim=16, mlp_dim=32, num_heads=1, num_decoder_layers=1, dropout_rate=0.0,
                    max_len=512, vocab_size=32_000),
        data=Data(length=512), mesh=Mesh(data=1), optimizer=Optimizer(warmup_steps=0, schedule='constant'),
        train=Train(objective='causal_lm', num_steps=100, batch_size=8, loss_chunk=chunk),
    ))
    batch = dummy_batch.random_batch(config)
    made = program.make_program(config, batch)
    with made.context():
        step = made.jitted_step.lower(sharding.unboxed(made.abstract), batch, made.hyper).compile()
    found.append(step.memory_analysis().temp_size_in_bytes / 2**20)
print(json.dumps(found))
"""


def test_a_row_of_the_table_of_memory_is_what_the_compiler_says() -> None:
    """In docs/results.md, in MiB; all logits are 500."""
    environment = {**os.environ, 'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    ran = subprocess.run(
        [sys.executable, '-c', PEAKS], env=environment, capture_output=True, text=True, timeout=HANG, check=True
    )
    row = next(line for line in (ROOT / 'docs/results.md').read_text().splitlines() if '`train.loss_chunk=64`' in line)
    stated = re.search(r'(\d+) -> (\d+) MiB', row)
    assert stated and json.loads(ran.stdout) == pytest.approx([float(stated[1]), float(stated[2])], rel=0.01)
