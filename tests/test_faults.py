"""What disks, users and schedulers do to a run: nothing older is lost, it is said what happened, the rerun goes on."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess

import jax
import jax.numpy as jnp
import make_stored_run
import pytest
import test_runs
import toy_data
from lives import Life
from test_resume import arrays, rows

from tformer import errors
from tformer.commands import evaluate, inspect
from tformer.commands import train as train_command
from tformer.commands.run import Run
from tformer.training import checkpoint, recorder
from tformer.training import loop as train_lib
from tformer.training import workdir as workdir_lib

STEPS = 6


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> pathlib.Path:
    """A finished run with checkpoints 2, 4 and 6, which was evaluated after each."""
    place = tmp_path_factory.mktemp('faults')
    train_command.train_and_evaluate(wanted(place), str(place / 'run'))
    assert checkpoint.steps(place / 'run') == [2, 4, 6]
    return place


def wanted(place: pathlib.Path):
    return test_runs.load(
        'translate.py:smoke', place, train__num_steps=str(STEPS), train__eval_every='2', train__keep_last='3',
        train__log_every='4', data__tokenizer='symbol', evaluate__samples='0', model__dropout_rate='0.1',
    )  # fmt: skip


def largest(step: pathlib.Path) -> pathlib.Path:
    return max((path for path in step.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)


def flip(step: pathlib.Path) -> None:
    file = largest(step)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(step: pathlib.Path) -> None:
    os.truncate(largest(step), largest(step).stat().st_size - 1)


DAMAGE = {
    'a flipped bit': (flip, 'has changed since it was written'),
    'a file cut short': (truncate, 'bytes, not '),
    'no record': (lambda step: (step / 'run' / 'metadata').unlink(), 'run/metadata is missing'),
    'no metadata of arrays': (
        lambda step: (step / 'variables' / '_METADATA').unlink(),
        'variables/_METADATA is missing',
    ),
    'no digests': (lambda step: (step / 'digests.json').unlink(), 'digests.json is missing'),
    'digests cut short': (lambda step: os.truncate(step / 'digests.json', 40), 'digests.json cannot be read'),
    'an item is gone': (lambda step: shutil.rmtree(step / 'training'), 'is missing'),
}


QUICK = 'a flipped bit', 'an item is gone'


@pytest.mark.parametrize(
    'damage', [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in DAMAGE]
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_is_used(whole, tmp_path, capsys, damage):
    spoil, fault = DAMAGE[damage]
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    spoil(checkpoint.directory(run, 6))
    for command in (lambda: Run.load(run, which='latest'), lambda: Run.load(run, average=2)):
        with pytest.raises(errors.UserError, match=r'checkpoint 6 is damaged|cannot be read') as error:
            command()
        assert '\n' not in str(error.value)
    train_lib.train(wanted(whole), run)
    said = capsys.readouterr().out
    assert 'checkpoint 6 is damaged and was renamed to ' in said and 'resumed at step 4' in said
    assert fault in said
    assert arrays(run, 6) == arrays(whole / 'run', 6) and rows(run) == rows(whole / 'run')
    assert (run / 'checkpoints' / '6.damaged').is_dir()


def test_where_every_checkpoint_is_damaged_nothing_is_begun_anew(whole, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    for step in checkpoint.steps(run):
        flip(checkpoint.directory(run, step))
    for _ in range(2):
        with pytest.raises(
            errors.UserError, match=r'every checkpoint of .*run is damaged: .*use a fresh --workdir to start anew'
        ):
            train_lib.train(wanted(whole), run)
    assert checkpoint.steps(run) == [2, 4, 6]
    assert len(rows(run)) == len(rows(whole / 'run'))


def test_a_lost_config_is_that_of_the_checkpoint_and_what_an_interrupted_save_left_is_gone(whole, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    (run / 'config.json').unlink()
    left = [run / 'checkpoints' / name for name in ('8.orbax-checkpoint-tmp', '1.deleted')]
    for path in left:
        (path / 'params').mkdir(parents=True)
    again = train_lib.train(wanted(whole), run)
    assert again.step == STEPS and not any(path.exists() for path in left)
    assert (run / 'config.json').read_text() == (whole / 'run' / 'config.json').read_text()
    with pytest.raises(errors.UserError, match=r'trained with another config: train.num_steps \(6 there, 8 here\)'):
        train_lib.train(test_runs.config.override(wanted(whole), {'train.num_steps': 8}), run)


def test_a_checkpoint_is_deleted_again_whatever_stayed_of_it(tmp_path, monkeypatch):
    """NFS does not remove the directory of a file that somebody has open."""
    for stays in (False, True, True):
        (checkpoint.directory(tmp_path, 3) / 'run').mkdir(parents=True)
        checkpoint.directory(tmp_path, 3).with_suffix('.deleted').joinpath('run').mkdir(parents=True, exist_ok=True)
        with monkeypatch.context() as patch:
            if stays:
                patch.setattr(shutil, 'rmtree', lambda path, ignore_errors=False: None)
            checkpoint.delete(tmp_path, 3)
        left = [*checkpoint.directory(tmp_path).iterdir()]
        assert checkpoint.steps(tmp_path) == [] and bool(left) == stays
    assert checkpoint.latest_valid(tmp_path) is None and not [*checkpoint.directory(tmp_path).iterdir()]


def test_fields_that_are_named_may_differ(whole, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    longer = test_runs.config.override(wanted(whole), {'train.num_steps': 8, 'optimizer.learning_rate': 1e-4})
    with pytest.raises(errors.UserError, match=r"--may_differ='train.num_step' is unknown; did you mean"):
        train_lib.train(longer, run, may_differ=['train.num_step'])
    with pytest.raises(errors.UserError, match=r'trained with another config: optimizer.learning_rate'):
        train_lib.train(longer, run, may_differ=['train.num_steps'])
    assert train_lib.train(longer, run, may_differ=['train.num_steps', 'optimizer.learning_rate']).step == 8
    assert workdir_lib.load_config(run).train.num_steps == 8


def test_a_signal_during_an_evaluation_leaves_it_to_the_next_life(whole, tmp_path, monkeypatch, capfd):
    run, real, calls = tmp_path / 'run', recorder.RunRecorder.evaluate, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while True:  # an evaluation that would never end
                pass
        return real(*args)

    monkeypatch.setattr(recorder.RunRecorder, 'evaluate', interrupted)
    with pytest.raises(errors.Stopped, match='SIGTERM: stopped after step 4 of 6, which is saved'):
        train_lib.train(wanted(whole), run)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert checkpoint.steps(run) == [2, 4] and checkpoint.read_metadata(run, 4)['evaluated'] == 2
    assert 4 not in checkpoint.scores(run)
    ended = train_lib.train(wanted(whole), run)
    assert arrays(run, 6) == arrays(whole / 'run', 6) and rows(run) == rows(whole / 'run')
    assert checkpoint.scores(run) == checkpoint.scores(whole / 'run') and ended.best_step == checkpoint.best(run)


def test_what_a_lost_optimizer_would_change_is_seen(whole, tmp_path, monkeypatch):
    """On other devices losses agree within 1e-5 (tests/test_resume.py); without the moments they would not."""
    run, real = tmp_path / 'run', checkpoint.restore
    shutil.copytree(whole / 'run', run)
    shutil.rmtree(checkpoint.directory(run, 6))

    def forgetful(home, step, state):
        return real(home, step, state).replace(opt_state=jax.tree.map(jnp.copy, state.opt_state))

    monkeypatch.setattr(checkpoint, 'restore', forgetful)
    train_lib.train(wanted(whole), run)
    lost, kept = (found[-1]['valid/loss'] for found in (rows(run), rows(whole / 'run')))
    assert abs(lost / kept - 1) > 1e-4


def test_layers_that_were_unrolled_go_on_scanned(whole, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    shutil.rmtree(checkpoint.directory(run, 6))
    before = arrays(run, 4)
    scanned = test_runs.config.override(wanted(whole), {'model.scan_layers': True})
    train_lib.train(scanned, run)
    assert arrays(run, 4) == before and arrays(run, 6).keys() == arrays(whole / 'run', 6).keys()
    assert rows(run)[-1]['valid/loss'] == pytest.approx(rows(whole / 'run')[-1]['valid/loss'], rel=1e-2)


def test_saves_keep_the_last_the_best_and_each_so_many(whole, tmp_path):
    kept = test_runs.config.override(
        wanted(whole), {'train.keep_last': 1, 'train.keep_every': 4, 'train.checkpoint_every': 1}
    )
    ended = train_lib.train(kept, tmp_path / 'run')
    assert checkpoint.steps(tmp_path / 'run') == sorted({4, 6, ended.best_step})


def test_what_cannot_be_written_is_one_line(tmp_path):
    data = toy_data.parallel(tmp_path / 'data')
    command = ['train', f'--config={test_runs.ROOT}/configs/translate.py:smoke', f'--config.data.path={data}']
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'checkpoints').write_text('')
    life = Life(tmp_path, *command, f'--workdir={tmp_path}/run', '--config.data.tokenizer=symbol')
    assert life.wait() == 2
    assert f'tformer: {tmp_path}/run/checkpoints: ' in life.said and 'Traceback' not in life.said


def test_a_full_disk_while_saving_loses_nothing_older(tmp_path):
    disk = tmp_path / 'disk'
    disk.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=24m', 'tmpfs', str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip('mounting is refused here')
    try:
        data = toy_data.parallel(tmp_path / 'data')
        command = [
            'train', f'--config={test_runs.ROOT}/configs/translate.py:smoke', f'--config.data.path={data}',
            f'--workdir={disk}/run', '--config.data.tokenizer=symbol', '--config.train.checkpoint_every=4',
            '--config.train.num_steps=100000', '--config.train.eval_every=100000', '--config.train.log_every=1',
        ]  # fmt: skip
        life = Life(tmp_path, *command)
        life.wait_for(lambda: len(checkpoint.steps(disk / 'run')) > 1)
        with open(disk / 'filler', 'wb', buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(b'0' * 4096)
        code = life.wait()
        assert code == 2 and 'Traceback' not in life.said and 'space' in life.said.splitlines()[-1], life.said[-2000:]
        before = checkpoint.steps(disk / 'run')
        os.remove(disk / 'filler')
        again = Life(tmp_path, *command)
        again.wait_for(lambda: 'resumed at step' in again.said)
        assert f'resumed at step {max(before)}' in again.said and 'damaged' not in again.said
        again.wait_for(lambda: max(checkpoint.steps(disk / 'run')) > max(before))
        again.kill()
    finally:
        subprocess.run(['umount', '-l', str(disk)], check=True)


def test_a_stored_run_still_loads_and_goes_on(tmp_path):
    """tests/make_stored_run.py made it; only what has changed on purpose may make it anew."""
    stored, run = make_stored_run.PLACE, tmp_path / 'run'
    shutil.copytree(stored, run)
    data = toy_data.parallel(tmp_path / 'data')
    found = evaluate.evaluate(Run.load(run, {'data.path': str(data)}), 'test')
    assert found == pytest.approx(json.loads((stored / 'scores.json').read_text()), rel=1e-5)
    assert '* 3' in inspect.checkpoints(str(run)) and checkpoint.latest_valid(run) == 3
    fields = {**make_stored_run.FIELDS, 'train__num_steps': '4', 'data__path': str(data)}
    longer = test_runs.load('translate.py:smoke', tmp_path, **fields)
    assert train_lib.train(longer, run, may_differ=['train.num_steps']).step == 4
