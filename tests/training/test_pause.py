"""A run that is paused after a step and goes on is the run that is not."""

import pathlib

import pytest

import toy_data
from places import ROOT
from resuming import arrays
from small_sweeps import TINY
from tformer import __main__ as command_line
from tformer import config
from tformer.commands import train as train_command
from tformer.config import Config
from tformer.errors import UserError
from tformer.training import checkpoint
from whole_runs import numbers, scores


def base(place: pathlib.Path) -> Config:
    wanted = {
        'data.path': (str(toy_data.running(place / 'data')),),
        'data.byte_fallback': False,
        'model.dropout_rate': 0.1,
        'optimizer.ema_decay': 0.9,
        'train.num_steps': 6,
        'train.log_every': 4,
        'train.eval_every': 2,
        'train.checkpoint_every': None,
    }
    return config.override(TINY, wanted)


@pytest.mark.proof
def test_a_run_that_is_paused_and_goes_on_is_the_unbroken_one(tmp_path: pathlib.Path, capsys) -> None:
    wanted, whole, parts = base(tmp_path), tmp_path / 'whole', tmp_path / 'parts'
    result = train_command.train_and_evaluate(wanted, whole)
    for until in (3, 4, 6):  # between evaluations, at one, at the end
        found = train_command.train_and_evaluate(wanted, parts, until=until)
        assert max(checkpoint.steps(parts)) == until
        assert (found == result) if until == 6 else (found == {} and not (parts / 'result.json').exists())
    assert 'paused after step 4 of 6, which is saved' in capsys.readouterr().out
    assert numbers(parts) == numbers(whole) and scores(parts) == scores(whole)
    assert arrays(parts, 6) == arrays(whole, 6)


@pytest.mark.parametrize('until', [0, -3])
def test_a_pause_before_the_first_step_is_refused(until: int) -> None:
    with pytest.raises(UserError, match=f'--until={until} must be a positive number of steps'):
        command_line.main(
            ['tformer', 'train', f'--config={ROOT}/configs/g2p.py:smoke', '--workdir=x', f'--until={until}']
        )
