"""What disks, users and schedulers do to a run: nothing older is lost, it is said what happened, the rerun goes on."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halting
import make_stored_run
import resuming
import toy_data
from comparing import relative
from lives import Life
from resuming import arguments, arrays
from tformer import atomic, config, errors
from tformer.commands import evaluate, inspect, replay
from tformer.commands import train as train_command
from tformer.commands.run import Run
from tformer.distributed import meshes
from tformer.lab.report import results
from tformer.training import checkpoint, digests, recorder, setup, writers
from tformer.training import loop as train_lib
from tformer.training import workdir as workdir_lib
from whole_runs import ROOT, load, numbers

STEPS = 6


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> pathlib.Path:
    """A finished run with checkpoints 2, 4 and 6, which was evaluated after each."""
    place = tmp_path_factory.mktemp('faults')
    train_command.train_and_evaluate(wanted(place), str(place / 'run'))
    assert checkpoint.steps(place / 'run') == [2, 4, 6]
    return place


def wanted(place: pathlib.Path):
    return load(
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


@pytest.mark.slow
@pytest.mark.parametrize(
    'damage', [each if each in QUICK else pytest.param(each, marks=pytest.mark.proof) for each in DAMAGE]
)
@pytest.mark.proof_cases('an item is gone')
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
    assert arrays(run, 6) == arrays(whole / 'run', 6) and numbers(run) == numbers(whole / 'run')
    assert (run / 'checkpoints' / '6.damaged').is_dir()


@pytest.mark.slow
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
    assert len(numbers(run)) == len(numbers(whole / 'run'))


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
        train_lib.train(config.override(wanted(whole), {'train.num_steps': 8}), run)


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


@pytest.mark.proof
def test_fields_that_are_named_may_differ(whole, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    longer = config.override(wanted(whole), {'train.num_steps': 8, 'optimizer.learning_rate': 1e-4})
    with pytest.raises(errors.UserError, match=r"--may_differ='train.num_step' is unknown; did you mean"):
        train_lib.train(longer, run, may_differ=['train.num_step'])
    with pytest.raises(errors.UserError, match=r'trained with another config: optimizer.learning_rate'):
        train_lib.train(longer, run, may_differ=['train.num_steps'])
    assert train_lib.train(longer, run, may_differ=['train.num_steps', 'optimizer.learning_rate']).step == 8
    assert workdir_lib.load_config(run).train.num_steps == 8


@pytest.mark.signals
@pytest.mark.proof
def test_a_signal_during_an_evaluation_leaves_it_to_the_next_life(whole, tmp_path, monkeypatch, capfd):
    run = tmp_path / 'run'
    monkeypatch.setattr(recorder.RunRecorder, 'evaluate', recorder.RunRecorder.evaluate)  # to be undone
    halting.once(recorder.RunRecorder, 'evaluate', 2, halting.signal_itself)
    with pytest.raises(errors.Stopped, match='SIGTERM: stopped after step 4 of 6, which is saved'):
        train_lib.train(wanted(whole), run)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert checkpoint.steps(run) == [2, 4] and checkpoint.read_metadata(run, 4)['evaluated'] == 2
    assert 4 not in checkpoint.scores(run)
    ended = train_lib.train(wanted(whole), run)
    assert arrays(run, 6) == arrays(whole / 'run', 6) and numbers(run) == numbers(whole / 'run')
    assert checkpoint.scores(run) == checkpoint.scores(whole / 'run') and ended.best_step == checkpoint.best(run)


def distance(run, whole):
    """How far the last checkpoint's parameters and moments are from those of the run that was never stopped."""
    floats = (
        {name: np.frombuffer(raw, np.float32) for name, raw in arrays(place, STEPS).items() if len(raw) > 4}
        for place in (run, whole)
    )
    return relative(*floats)


@pytest.mark.proof
def test_what_a_lost_optimizer_would_change_is_seen(whole, tmp_path, monkeypatch):
    """On other devices losses agree within 1e-5 (tests/training/test_resume.py); without the moments they would not."""
    run, real = tmp_path / 'run', checkpoint.restore
    shutil.copytree(whole / 'run', run)
    shutil.rmtree(checkpoint.directory(run, 6))

    def forgetful(home, step, state):
        return real(home, step, state).replace(opt_state=jax.tree.map(jnp.copy, state.opt_state))

    monkeypatch.setattr(checkpoint, 'restore', forgetful)
    train_lib.train(wanted(whole), run)
    lost, kept = (found[-1]['valid/loss'] for found in (numbers(run), numbers(whole / 'run')))
    assert abs(lost / kept - 1) > 1e-4
    assert distance(run, whole / 'run') > 1e-3


@pytest.mark.proof
def test_layers_that_were_unrolled_go_on_scanned(whole, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    shutil.rmtree(checkpoint.directory(run, 6))
    before = arrays(run, 4)
    scanned = config.override(wanted(whole), {'model.scan_layers': True})
    train_lib.train(scanned, run)
    assert arrays(run, 4) == before and arrays(run, 6).keys() == arrays(whole / 'run', 6).keys()
    assert distance(run, whole / 'run') < 1e-6  # a lost optimizer: 5e-3
    assert numbers(run)[-1]['valid/loss'] == pytest.approx(numbers(whole / 'run')[-1]['valid/loss'], rel=1e-6)


@pytest.mark.proof
def test_saves_keep_the_last_the_best_and_each_so_many(whole, tmp_path):
    kept = config.override(wanted(whole), {'train.keep_last': 1, 'train.keep_every': 4, 'train.checkpoint_every': 1})
    ended = train_lib.train(kept, tmp_path / 'run')
    assert checkpoint.steps(tmp_path / 'run') == sorted({4, 6, ended.best_step})


def test_what_cannot_be_written_is_one_line(tmp_path):
    data = toy_data.parallel(tmp_path / 'data')
    command = ['train', f'--config={ROOT}/configs/translate.py:smoke', f'--config.data.path={data}']
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'checkpoints').write_text('')
    life = Life(tmp_path, *command, f'--workdir={tmp_path}/run', '--config.data.tokenizer=symbol')
    assert life.wait() == 2
    assert f'tformer: {tmp_path}/run/checkpoints: ' in life.said and 'Traceback' not in life.said


def test_a_save_that_may_not_grow_loses_nothing_older(tmp_path):
    """As a full disk, by the system's limit of a file's size, which needs no rights."""
    command, run = [*arguments(tmp_path, 'decoder'), f'--workdir={tmp_path}/run'], tmp_path / 'run'
    life = Life(tmp_path, *command, before=functools.partial(halting.limit_files, 4, 4096))
    assert life.wait() == 2 and 'Traceback' not in life.said, life.said[-2000:]
    last = life.said.splitlines()[-1]
    assert 'a checkpoint could not be written (the newest complete one is of step 3): ' in last, last
    assert checkpoint.steps(run)[-1] == 3
    again = Life(tmp_path, *command)
    assert again.wait() == 0 and 'resumed at step 3' in again.said and 'damaged' not in again.said
    assert max(checkpoint.steps(run)) == resuming.STEPS


@pytest.mark.proof
@pytest.mark.signals
def test_a_full_disk_while_saving_loses_nothing_older(tmp_path):
    disk = tmp_path / 'disk'
    disk.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=24m', 'tmpfs', str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip('mounting is refused here')
    try:
        data = toy_data.parallel(tmp_path / 'data')
        command = [
            'train', f'--config={ROOT}/configs/translate.py:smoke', f'--config.data.path={data}',
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


@pytest.mark.slow
def test_a_stored_run_still_loads_and_goes_on(tmp_path):
    """tests/helpers/make_stored_run.py made it; only what has changed on purpose may make it anew."""
    stored, run = make_stored_run.PLACE, tmp_path / 'run'
    shutil.copytree(stored, run)
    data = toy_data.parallel(tmp_path / 'data')
    found = evaluate.evaluate(Run.load(run, {'data.path': str(data)}), 'test')
    assert found == pytest.approx(json.loads((stored / 'scores.json').read_text()), rel=1e-5)
    assert '* 3' in inspect.checkpoints(str(run)) and checkpoint.latest_valid(run) == 3
    fields = {**make_stored_run.FIELDS, 'train__num_steps': '4', 'data__path': str(data)}
    longer = load('translate.py:smoke', tmp_path, **fields)
    assert train_lib.train(longer, run, may_differ=['train.num_steps']).step == 4


# ----------------------------------------------------------------------------------- files that changed unnoticed


# Files of a workdir that `Run.load` does not need, and why a change of them changes no result of it.
WITHOUT_EFFECT = {
    'lock': 'names the process that holds the workdir',
    'metrics.jsonl': 'the history, which a continued run compares with its checkpoint',
    'result.json': 'scores, which are written and not read',
    'predictions_test.jsonl': 'generated text, which is written and not read',
    'tensorboard/': 'another form of the history',
    'wall_time.json': 'seconds, which are measured and enter no result but themselves',
    'digests.json': 'without it config.json is compared with the checkpoint',
    'checkpoints/*/_CHECKPOINT_METADATA': "Orbax's own, which is not read",
    'checkpoints/*/commit_success.txt': "Orbax's own, which is not read",
    'checkpoints/{other}/variables/': 'parameters of a checkpoint that is not loaded',
    'checkpoints/{other}/training/': 'not evaluated',
    'checkpoints/{other}/run/commit_success.txt': 'of a checkpoint that is not loaded',
}


def has_effect(name: str, best: int) -> bool:
    step = name.split('/')[1] if name.startswith('checkpoints/') else ''
    general = name.replace(f'checkpoints/{step}/', 'checkpoints/*/' if step == str(best) else 'checkpoints/{other}/')
    return not any(
        general.replace('{other}', '*').startswith(each) or general.startswith(each) for each in WITHOUT_EFFECT
    )


def value_flip(file: pathlib.Path) -> None:
    """Changes a digit or, where there is none, a letter; JSON and text still parse."""
    data = bytearray(file.read_bytes())
    digits = [at for at, byte in enumerate(data) if chr(byte) in '12345678'] or [len(data) // 2]
    data[digits[-1]] ^= 1
    file.write_bytes(data)


def middle_flip(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


FILE_DAMAGE = {
    'a digit': value_flip,
    'a bit': middle_flip,
    'cut in half': lambda file: os.truncate(file, file.stat().st_size // 2),
    'emptied': lambda file: os.truncate(file, 0),
    'removed': os.unlink,
}


@pytest.fixture
def gate(monkeypatch):
    """Loads a run as every command does, up to its arrays: (config, tokenizers, step), or the line of its error."""
    monkeypatch.setattr(checkpoint, '_shapes', lambda workdir, step: {})
    monkeypatch.setattr(checkpoint, '_read', lambda workdir, step, target: {'variables': {}})

    def load(run):
        try:
            found = Run.load(run)
        except errors.UserError as error:
            assert '\n' not in str(error)
            return str(error)
        return found.config, found.tokenizers.fingerprint, found.step

    return load


@pytest.mark.proof
def test_a_file_that_changed_gives_an_equal_run_or_one_line(whole, tmp_path, gate, capsys):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    best = checkpoint.best(run)
    other = next(step for step in checkpoint.steps(run) if step != best)
    expected = gate(run)
    assert expected[2] == best and capsys.readouterr().err == ''
    for step in {*checkpoint.steps(run)} - {best, other, 6}:
        shutil.rmtree(checkpoint.directory(run, step))
    every = [path for path in sorted(run.rglob('*')) if path.is_file()]
    arrays_there = {
        path.parent: path for path in every if len(path.relative_to(run).parts) > 4
    }  # one of each directory
    files = [path for path in every if arrays_there.get(path.parent, path) == path]
    for step in (best, other):
        assert any(path.is_relative_to(checkpoint.directory(run, step)) for path in files)
    for file in files:
        kept, name = file.read_bytes(), file.relative_to(run).as_posix()
        for what, damage in FILE_DAMAGE.items():
            if not kept and what != 'removed':
                continue
            damage(file)
            found, said = gate(run), capsys.readouterr().err
            file.write_bytes(kept)
            if not has_effect(name, best):
                assert found == expected and said == '', (name, what, found, said)
            elif not isinstance(found, str):
                assert found[1:] == expected[1:], (name, what)
                line = f'{run}/config.json differs from the config of checkpoint 6: '
                assert found == expected or said.startswith(line), (name, what)
            if name.startswith(f'checkpoints/{best}/') and has_effect(name, best):
                assert isinstance(found, str), (name, what, found)


OTHER = {bool: lambda x: not x, int: lambda x: x + 10**9, float: lambda x: x + 0.5, str: lambda x: x + 'x'}


def changed_value(value):
    """Another value that a field of JSON could have."""
    if isinstance(value, list):
        return [*value, *(value[-1:] or ['x'])]
    return OTHER[type(value)](value) if value is not None else 3


@pytest.mark.parametrize('listed', [True, False])
@pytest.mark.proof_cases('False')
def test_each_field_of_config_json_that_changed_is_refused_or_said(whole, tmp_path, capsys, listed):
    """Also where no digests.json says that the file is as it was written, as in runs of earlier versions."""
    run = tmp_path / 'run'
    run.mkdir()
    for name in ('config.json', *(['digests.json'] if listed else [])):
        shutil.copy(whole / 'run' / name, run)
    (run / 'checkpoints').symlink_to(whole / 'run' / 'checkpoints')
    tree, expected = json.loads((run / 'config.json').read_text()), workdir_lib.read_config(run)
    assert capsys.readouterr().err == ''
    for section, fields in tree.items():
        for field, value in fields.items() if isinstance(fields, dict) else ():
            name, other = f'{section}.{field}', changed_value(value)
            (run / 'config.json').write_text(json.dumps({**tree, section: {**fields, field: other}}))
            try:
                found = workdir_lib.read_config(run)
            except errors.UserError as error:
                assert name in str(error) and '\n' not in str(error)
                refused = True
            else:
                assert found != expected
                line = f'{run}/config.json differs from the config of checkpoint 6: {name} ('
                assert capsys.readouterr().err.startswith(line), name
                refused = False
            types = [type(other)] if value is not None else []
            assert refused or workdir_lib.is_free(name), (name, types)


TOKENIZER_VALUES = {
    'source': [None, 5, [], 'char'], 'target': [None, 'char', 'byte', 'x', 3],
    'labels': ['ab', ['a'], [1], None, {'a': 1}],
    'normalization': ['nfkc_lower', 'x', 3, []], 'sentinels': [1, 10**9, -1, 1.5, '1', True, None, [], 1 << 70],
}  # fmt: skip


def test_each_value_of_tokenizer_json_that_changed_is_one_line(whole, tmp_path, gate):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    file = run / 'tokenizer.json'
    tree, expected = json.loads(file.read_text()), gate(run)
    assert {*tree} == {*TOKENIZER_VALUES}
    for name, values in TOKENIZER_VALUES.items():
        for value in values:
            file.write_text(json.dumps({**tree, name: value}))
            assert isinstance(gate(run), str), (name, value)
        file.write_text(json.dumps({key: value for key, value in tree.items() if key != name}))
        found = gate(run)
        assert isinstance(found, str) or found == expected, name
    file.write_text(json.dumps(tree))
    (vocabulary,) = run.glob('tokenizer.target.*')
    units = json.loads(vocabulary.read_text())
    units['units'] = units['units'][1::-1] + units['units'][2:]
    vocabulary.write_text(json.dumps(units))
    assert f'{vocabulary.name}: these tokenizers are not those of checkpoint 6' in gate(run)
    longer = config.override(wanted(whole), {'data.tokenizer_from': str(run)})
    for command in (
        lambda: list(replay.replay(run, 3)),
        lambda: train_lib.train(wanted(whole), run),
        lambda: train_lib.train(longer, tmp_path / 'other'),
    ):
        with pytest.raises(errors.UserError, match='these tokenizers are not those of checkpoint 6'):
            command()


def test_scores_noted_after_a_save_are_checked_and_a_best_checkpoint_that_is_gone_is_said(
    whole, tmp_path, gate, capsys
):
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    writer = checkpoint.directory(run, 2)
    atomic.write(writer / 'merit.json', json.dumps(5.0))
    assert gate(run)[2] == 2  # as a run of an earlier version left it
    for text in ('x', '[1]', '{}', ''):
        (writer / 'merit.json').write_text(text)
        assert 'merit.json cannot be read' in gate(run)
    with digests.recording(writer, 'merit.json'):
        atomic.write(writer / 'merit.json', json.dumps(5.0))
    assert gate(run)[2] == 2 and capsys.readouterr().err == ''
    for damage in FILE_DAMAGE.values():
        damage(writer / 'merit.json')
        assert 'checkpoint 2 is damaged' in gate(run)
        atomic.write(writer / 'merit.json', json.dumps(5.0))
    (writer / 'merit.json').unlink()
    listing = json.loads((writer / 'digests.json').read_text())
    del listing['merit.json']
    (writer / 'digests.json').write_text(json.dumps(listing))
    best = checkpoint.best(run)
    if best != 6:
        shutil.rmtree(checkpoint.directory(run, best))
        left = gate(run)[2]
        assert (
            f'its best checkpoint, of score {checkpoint.scores(whole / "run")[best]:.6g}, is gone'
            in (capsys.readouterr().err)
            and left != best
        )


def test_a_life_with_other_validation_data_or_fewer_steps_than_made_is_refused(whole, tmp_path, capsys):
    run, data, mesh = tmp_path / 'run', tmp_path / 'data', meshes.make_mesh(wanted(whole).mesh)
    shutil.copytree(whole / 'run', run)
    shutil.copytree(whole / 'data', data)
    moved = config.override(wanted(whole), {'data.path': (str(data),)})
    shorter, record = config.override(moved, {'train.num_steps': 4}), checkpoint.read_metadata(run, 6)
    setup.load_data(moved, run, mesh, record)
    with pytest.raises(errors.UserError, match=r'train.num_steps=4: .*run has made 6 steps already'):
        setup.load_data(shorter, run, mesh, record, ['train.num_steps'])
    (file,) = data.glob('valid*')
    file.write_text(''.join(file.read_text().splitlines(keepends=True)[1:]))
    line = r'with data.path \(.*\): fingerprint of the validation data \w+ there, \w+ here'
    with pytest.raises(errors.UserError, match=f'{line}; --may_differ=data.valid_path accepts it$'):
        setup.load_data(moved, run, mesh, record)
    assert capsys.readouterr().err == ''
    setup.load_data(moved, run, mesh, record, ['data.valid_path'])
    assert 'are of other validation data: fingerprint' in capsys.readouterr().err
    earlier = {name: value for name, value in record['data'].items() if 'validation' not in name}
    setup.load_data(moved, run, mesh, {**record, 'data': earlier})


def test_rows_of_the_history_that_are_gone_or_changed_are_said(whole, tmp_path, capsys):
    record, kept = checkpoint.read_metadata(whole / 'run', 6), (whole / 'run' / 'metrics.jsonl').read_text()
    lines = kept.splitlines(keepends=True)
    timed = json.dumps({**json.loads(lines[0]), 'train/tokens_per_second': 7}) + '\n'

    def said(text: str) -> str:
        (tmp_path / 'metrics.jsonl').write_text(text)
        writers.MetricWriter(tmp_path, 6, 6, record['history']).close()
        return capsys.readouterr().err

    assert len(lines) > 3 and said(kept) == '' and said(kept + '{"step": 7}\n{"st') == ''
    assert 'train/tokens_per_second' not in lines[0] or said(timed + ''.join(lines[1:])) == ''
    other = json.dumps({**json.loads(lines[0]), 'epoch': 77.0}) + '\n'
    for left in ([], lines[1:], lines[:-1], [*lines, lines[-1]], [other, *lines[1:]], [*lines[1:], lines[0]]):
        line = f'{tmp_path}/metrics.jsonl has {len(left)} rows, which are not the {len(lines)} rows that the run wrote'
        assert said(''.join(left)) == f'{line} up to step 6; the run goes on\n'


def test_a_config_that_the_run_itself_wrote_since_the_checkpoint_is_read_as_it_is(whole, tmp_path, capsys):
    """Fields that a later life may change are in config.json before its first checkpoint, or without any."""
    run = tmp_path / 'run'
    shutil.copytree(whole / 'run', run)
    changed = {'train.patience': 3, 'decode.beam_size': 2}
    again = config.override(workdir_lib.load_config(run), changed)
    workdir_lib.save_config(run, again)
    assert workdir_lib.load_config(run) == again and capsys.readouterr().err == ''
    trained = workdir_lib.as_trained(again, checkpoint.read_metadata(run, 6))
    assert (trained.train.patience, trained.decode.beam_size) == (None, 2)


def test_a_run_of_which_every_step_was_skipped_fails(whole, tmp_path):
    run, config = tmp_path / 'run', workdir_lib.load_config(whole / 'run')
    data = setup.load_data(
        config, whole / 'run', meshes.make_mesh(config.mesh), checkpoint.read_metadata(whole / 'run', 6)
    )
    member = recorder.RunRecorder(data, run, None, None, None)
    for step, skipped, fails in ((6, 0, False), (6, 5, False), (0, 0, False), (6, 6, True), (1, 1, True)):
        member.error = None
        member.end(step, skipped)
        assert (member.error is not None) == fails
    assert 'no step changed the parameters: steps 1 to 1 were skipped' in member.error
    member.close()


@pytest.mark.proof
def test_a_training_of_which_every_step_is_skipped_fails_whenever_it_is_tried(whole, tmp_path):
    never = {'model.init_scale': 1e30, 'train.num_steps': 3, 'train.patience': 1, 'train.eval_every': 1}
    for _ in range(2):
        with pytest.raises(errors.UserError, match='no step changed the parameters'):
            train_lib.train(config.override(wanted(whole), never), tmp_path / 'run')


def test_a_result_that_changed_is_no_result_of_a_report_and_is_evaluated_again_after_it_is_gone(whole, tmp_path):
    run = tmp_path / 'runs' / 'one'
    shutil.copytree(whole / 'run', run)
    expected = results.read(run.parent).runs[0]
    assert expected.state == results.DONE and (run / 'predictions_test.jsonl').is_file()
    for name in ('result.json', 'predictions_test.jsonl'):
        file = run / name
        kept = file.read_bytes()
        for what, damage in FILE_DAMAGE.items():
            damage(file)
            found = results.read(run.parent).runs[0]
            lost = results.UNFINISHED if (name, what) == ('result.json', 'removed') else results.UNREADABLE
            assert found.state == lost and not found.scores, (name, what)
            if name == 'result.json' and what != 'removed':
                with pytest.raises(errors.UserError, match='has changed since it was written'):
                    evaluate.evaluate(run, 'valid')
            file.write_bytes(kept)
    (run / 'result.json').unlink()
    with digests.recording(run, 'result.json'):
        (run / 'result.json').write_text('{"valid": {"loss": 1.5}}')
    assert writers.results(run) == {'valid': {'loss': 1.5}}
    with pytest.raises(ConnectionError), digests.recording(run, 'result.json'):
        (run / 'result.json').write_text('{"valid": {"loss": 2.5}}')
        raise ConnectionError  # what is half done is not listed, and is no false alarm
    assert writers.results(run) == {'valid': {'loss': 2.5}}
