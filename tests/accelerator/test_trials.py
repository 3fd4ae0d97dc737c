"""Trials under vmap on the chip: each is what it is alone there."""

import pathlib

import jax
import numpy as np
import pytest

import toy_data
from small_sweeps import TINY
from tformer import config
from tformer.lab.sweep import batched_training, grid, manifest, trials
from tformer.training import loop
from whole_runs import numbers

pytestmark = pytest.mark.accelerator

STEPS = 50
LOSSES = 4e-6  # relative: the larger figure of docs/results.md, "Six trials in one program"


def test_trials_under_vmap_are_the_trials_alone(tmp_path: pathlib.Path) -> None:
    shared = config.override(
        TINY,
        {
            'data.path': (str(toy_data.running(tmp_path / 'data')),), 'data.byte_fallback': False,
            'optimizer.learning_rate': 1e-3, 'model.dropout_rate': 0.1, 'model.activation': 'gelu',
            'train.num_steps': STEPS, 'train.eval_every': STEPS, 'train.checkpoint_every': None,
        },
    )  # fmt: skip
    made = trials.trials(shared, grid({'optimizer.learning_rate': [1e-3, 3e-3]}))
    with jax.default_matmul_precision('highest'):
        manifest.claim(shared, made, tmp_path / 'together')
        homes = [tmp_path / 'together' / trial.directory for trial in made]
        batched_training.train(homes, 'vmap')
        alone = [tmp_path / 'alone' / trial.directory for trial in made]
        for trial, home in zip(made, alone, strict=True):
            loop.train(trial.config, home)
    curves = []
    for mine, theirs in zip(homes, alone, strict=True):
        found, wanted = ([row['train/loss'] for row in numbers(x) if 'train/loss' in row] for x in (mine, theirs))
        assert len(found) == STEPS
        np.testing.assert_allclose(found, wanted, rtol=LOSSES)
        curves.append(np.array(found))
    assert np.abs(curves[0] - curves[1]).max() > 1e-4
