"""Runs on the chip: the same bits each time and after a kill; from CPU to chip and back. Processes of their own.

The parent never touches the chip, which some platforms give to one process at a time.
"""

import functools
import pathlib
import signal

import numpy as np
import pytest

import accelerator
import halting
from lives import Life, on_cpu
from resuming import LOADED, STEPS, arguments, arrays, end
from tformer.training import checkpoint
from whole_runs import numbers

pytestmark = [pytest.mark.accelerator, pytest.mark.signals]

LOSSES = 1e-4  # relative; AdamW divides small gradients by their own size, and so their roundings too
ONE = '--config.mesh.data=1'
CASES = {
    'packed rows, float32': ('decoder', [*LOADED, ONE]),
    'padded rows, bfloat16': ('encoder_decoder', ['--config.model.dtype=bfloat16', '--config.data.batching=pad', ONE]),
}
dying = functools.partial(halting.die_at, 'a step', 5)


def train(place, command, workdir, on_chip=True, before=None):
    return Life(place, *command, f'--workdir={workdir}', before=before, on_chip=on_chip)


def killed(life, workdir):
    """Returns the step of the newest checkpoint that the killed process leaves."""
    assert life.wait() == -signal.SIGKILL, life.said[-3000:]
    kept = max(checkpoint.steps(workdir))
    assert 0 < kept < STEPS
    return kept


@pytest.mark.parametrize('case', CASES)
def test_a_run_again_and_a_run_that_is_killed_and_resumed_have_the_same_bits(tmp_path: pathlib.Path, case) -> None:
    family, fields = CASES[case]
    command = arguments(tmp_path, family, *fields)
    whole, again, parts = (tmp_path / name for name in ('whole', 'again', 'parts'))
    end([train(tmp_path, command, whole)])
    if case == 'packed rows, float32':
        end([train(tmp_path, command, again)])
    killed(train(tmp_path, command, parts, before=dying), parts)
    end([train(tmp_path, command, parts)])
    wanted = on_cpu(arrays, whole, STEPS)
    assert len(wanted) > 20
    for other in filter(pathlib.Path.exists, (again, parts)):
        found = on_cpu(arrays, other, STEPS)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if found[name] != wanted[name]] == []
        assert numbers(other) == numbers(whole)


def test_a_run_goes_from_cpu_to_the_chip_and_back(tmp_path: pathlib.Path) -> None:
    """Within a bound of the run that stays on the CPU; it is killed on the CPU, then on the chip."""
    command = arguments(tmp_path, 'decoder', *LOADED, ONE, '--config.train.log_every=1')
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    end([train(tmp_path, command, whole, on_chip=False)])
    on_the_cpu = functools.partial(halting.die_at, 'a step', 3)
    on_the_chip = functools.partial(accelerator.highest_precision, functools.partial(halting.die_at, 'a step', 3))
    first = killed(train(tmp_path, command, parts, on_chip=False, before=on_the_cpu), parts)
    life = train(tmp_path, command, parts, before=on_the_chip)
    second = killed(life, parts)
    assert f'resumed at step {first}' in life.said and first < second
    back = train(tmp_path, command, parts, on_chip=False)
    end([back])
    assert f'resumed at step {second}' in back.said
    losses = [[row['train/loss'] for row in numbers(home) if 'train/loss' in row] for home in (whole, parts)]
    assert len(losses[0]) == STEPS
    np.testing.assert_allclose(losses[1], losses[0], rtol=LOSSES)
