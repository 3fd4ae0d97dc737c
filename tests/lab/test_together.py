"""Trials in one program: each is what it is alone, whatever becomes of the others."""

import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import halting
import toy_data
from small_sweeps import TINY, wait_for, waiting
from tformer import config, errors
from tformer.commands.report import report as write_report
from tformer.config import Config, Mesh
from tformer.lab.sweep import batched_training, batched_trials, grid, manifest, one_at_a_time, product, seeds, trials
from tformer.optim import hyperparameters
from tformer.training import checkpoint, digests, members, recorder
from tformer.training import loop as train_lib
from whole_runs import numbers, scores

STEPS = 50
VARIED = {
    'optimizer.learning_rate': [1e-4, 3e-3],
    'optimizer.warmup_steps': [10],
    'optimizer.weight_decay': [0.1],
    'optimizer.final_fraction': [0.5],
    'model.dropout_rate': [0.1],
    'model.init_scale': [0.5],
    'train.label_smoothing': [0.1],
    'train.z_loss': [1e-3],
    'train.seed': [1],
}


def base(place: pathlib.Path, **fields: object) -> Config:
    """A smooth activation: where rounding moves a ReLU's input over 0, its gradient jumps, and losses part further."""
    path = (str(toy_data.running(place / 'data')),)
    wanted = {
        'data.path': path,
        'data.byte_fallback': False,
        'optimizer.learning_rate': 1e-3,
        'model.dropout_rate': 0.0,
        'model.activation': 'gelu',
        'train.num_steps': STEPS,
        'train.checkpoint_every': None,
        'train.eval_every': 25,
        'train.keep_last': 2,
        **fields,
    }
    return config.override(TINY, wanted)


def stated(home: pathlib.Path, made: list[trials.Trial]) -> list[pathlib.Path]:
    """Returns the workdirs of trials, with what they are in them."""
    manifest.claim(made[0].config, made, home)
    return [home / trial.directory for trial in made]


def assert_near(mine: pathlib.Path, theirs: pathlib.Path) -> None:
    """The same is recorded at the same steps, within roundings that 50 steps may amplify."""
    rows = [numbers(place) for place in (mine, theirs)]
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
    for row, other in zip(*rows, strict=True):
        assert row == pytest.approx(other, rel=1e-5), row['step']


def losses(place: pathlib.Path) -> np.ndarray:
    return np.array([row['train/loss'] for row in numbers(place) if 'train/loss' in row])


@pytest.fixture(scope='module')
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, list[trials.Trial], pathlib.Path]:
    """(what trials change, the trials, where `trained_alone` trains each): each number that may vary, one at a time."""
    place = tmp_path_factory.mktemp('alone')
    shared = base(place)
    made = trials.trials(shared, one_at_a_time({}, VARIED))
    return shared, made, place


def trained_alone(trial: trials.Trial, place: pathlib.Path) -> pathlib.Path:
    """Returns the workdir of a trial, which is trained when it is first asked for."""
    if not (place / trial.directory).exists():
        train_lib.train(trial.config, place / trial.directory)
    return place / trial.directory


@pytest.mark.stack
@pytest.mark.proof
@pytest.mark.parametrize('transform', batched_trials.TRANSFORMS)
def test_a_trial_among_others_is_what_it_is_alone(alone, transform: str, tmp_path: pathlib.Path) -> None:
    """Either sums in another order here: two to four roundings of 2^-23 after 50 smooth steps.

    As users compile, a map gives equal bits (tests/training/test_default_optimisation.py).
    """
    _, made, place = alone
    assert batched_trials.groups(made, 99) == [made]
    trained = batched_training.train(stated(tmp_path, made), transform)
    assert list(trained) == [tmp_path / trial.directory for trial in made]
    curves = []
    for trial in made:
        mine, theirs = tmp_path / trial.directory, trained_alone(trial, place)
        curves.append(losses(mine))
        assert len(curves[-1]) == STEPS
        np.testing.assert_allclose(curves[-1], losses(theirs), rtol=1e-6, err_msg=trial.name)
        assert_near(mine, theirs)
        assert checkpoint.steps(mine) == checkpoint.steps(theirs) and trained[mine].step == STEPS
        assert checkpoint.read_metadata(mine, STEPS)['config'] == checkpoint.read_metadata(theirs, STEPS)['config']
    apart = [np.abs(one - other).max() for i, one in enumerate(curves) for other in curves[:i]]
    assert min(apart) > 1e-4  # every number that varies makes another curve


@pytest.mark.proof
@pytest.mark.parametrize('transform', batched_trials.TRANSFORMS)
@pytest.mark.parametrize(
    'mesh',
    [
        Mesh(data=1, fsdp=2),
        Mesh(data=-1),
        Mesh(data=1, tensor=2),
    ],
    ids=['fsdp', 'data', 'tensor'],
)
def test_trials_are_split_over_a_mesh(alone, transform: str, mesh: Mesh, tmp_path: pathlib.Path) -> None:
    """Eight devices: four trials beside each other, on two devices each."""
    _, made, place = alone
    made = [dataclasses.replace(trial, config=dataclasses.replace(trial.config, mesh=mesh)) for trial in made[:4]]
    homes = stated(tmp_path, made)
    found = batched_trials.make_mesh(mesh, len(made))
    assert found.shape['trials'] == 4 and found.size == 8
    batched_training.train(homes, transform)
    for index, home in enumerate(homes):
        np.testing.assert_allclose(losses(home), losses(trained_alone(alone[1][index], place)), rtol=1e-5)


@pytest.mark.signals
@pytest.mark.proof
def test_seeds_whose_batches_differ_in_shape_take_turns(tmp_path: pathlib.Path, capsys) -> None:
    """Each is what it is alone to the bit, also after a stop; steps of the same number have other shapes."""
    fields = {'data.batching': 'bucket', 'data.num_buckets': 3, 'data.train_examples': 40, 'train.num_steps': 12}
    fields |= {'train.checkpoint_every': 3, 'train.eval_every': 6, 'data.length': 64, 'model.max_len': 64}
    fields |= {'train.objective': 'seq2seq', 'model.family': 'encoder_decoder', 'model.num_encoder_layers': 1}
    path = (str(toy_data.parallel(tmp_path / 'pairs')),)
    shared = config.override(base(tmp_path), {**fields, 'data.path': path, 'model.vocab_size': None})
    made = trials.trials(shared, [*seeds(2), {'train.seed': 2, 'optimizer.learning_rate': 1e38}])
    alone, homes = stated(tmp_path / 'alone', made), stated(tmp_path / 'together', made)
    for trial, home in zip(made[:2], alone, strict=False):
        train_lib.train(trial.config, home)
    shapes = [
        data.batches
        for data in batched_training.open_all(dict(zip(alone, [t.config for t in made], strict=True)), None).values()
    ]
    assert any(shapes[0].batch(step)['inputs'].shape != shapes[1].batch(step)['inputs'].shape for step in range(12))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder.RunRecorder, 'evaluate', recorder.RunRecorder.evaluate)  # to be undone
        halting.once(recorder.RunRecorder, 'evaluate', 2, halting.signal_itself)
        with pytest.raises(errors.Stopped, match='SIGTERM: stopped after step 6 of 12, which is saved'):
            batched_training.train(homes)
    assert list(batched_training.train(homes)) == homes[:2]
    assert '3 trials in one program (in turns), 1 of 8 devices' in capsys.readouterr().out
    assert 'is not finite' in (homes[2] / 'error.txt').read_text()
    for mine, theirs in zip(homes[:2], alone, strict=False):
        assert numbers(mine) == numbers(theirs) and leaves(mine) == leaves(theirs) and len(numbers(mine)) > 6


@pytest.mark.proof
def test_one_that_fails_leaves_the_others_as_they_are(alone, tmp_path: pathlib.Path) -> None:
    shared, made, place = alone
    shared = config.override(shared, {'train.max_skipped': 3})
    whole, homes = (
        stated(tmp_path / name, trials.trials(shared, grid({'optimizer.learning_rate': rates})))
        for name, rates in {'whole': [1e-3, 2e-3, 3e-3], 'parts': [1e-3, 1e38, 3e-3]}.items()
    )
    batched_training.train(whole)
    trained = batched_training.train(homes)
    assert list(trained) == [homes[0], homes[2]]
    assert 'were skipped: their loss or gradient is not finite' in (homes[1] / 'error.txt').read_text()
    assert list((homes[1] / 'skipped').iterdir()) and not numbers(homes[1])[-1].keys() & {'valid/loss'}
    assert_near(homes[0], trained_alone(made[0], place))
    for mine, theirs in ((homes[0], whole[0]), (homes[2], whole[2])):
        assert numbers(mine) == numbers(theirs) and leaves(mine) == leaves(theirs)


@pytest.mark.proof
def test_after_an_interruption_all_go_on_from_the_newest_common_step_to_the_bit(
    alone, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One's newest checkpoint was not written, and one had failed before."""
    shared, _, _ = alone
    shared = config.override(shared, {'train.checkpoint_every': 10})
    made = trials.trials(shared, product(grid({'model.dropout_rate': [0.1, 0.2]}), seeds(2)))
    whole, parts = stated(tmp_path / 'whole', made), stated(tmp_path / 'parts', made)
    batched_training.train(whole)

    report = members.Group.report

    def interrupted(group: members.Group, step: int) -> dict[str, float]:
        if step == 33:
            raise KeyboardInterrupt
        return report(group, step)

    monkeypatch.setattr(members.Group, 'report', interrupted)
    with pytest.raises(KeyboardInterrupt):
        batched_training.train(parts)
    monkeypatch.undo()
    assert all(checkpoint.steps(home)[-2:] == [25, 30] for home in parts)
    shutil.rmtree(checkpoint.directory(parts[1], 30))
    (parts[2] / 'error.txt').write_text('ended\n')
    assert list(batched_training.train(parts)) == parts and not (parts[2] / 'error.txt').exists()
    for mine, theirs in zip(parts, whole, strict=True):
        assert numbers(mine) == numbers(theirs) and leaves(mine) == leaves(theirs)
    assert list(batched_training.train(parts)) == parts  # nothing is left to do
    assert numbers(parts[0]) == numbers(whole[0])


def test_no_one_waits_for_those_that_are_far_behind(tmp_path: pathlib.Path) -> None:
    """Of checkpoints that are none: who goes on with whom, from where, and what is deleted."""
    homes = [tmp_path / name for name in 'abcdef']
    for home, steps in zip(homes, ([10, 20], [20, 30], [20, 30], [], [10, 5000], [20]), strict=True):
        for step in steps:
            checkpoint.directory(home, step).mkdir(parents=True)
            digests.write(checkpoint.directory(home, step))
    a, b, c, d, e, f = homes
    assert batched_training.cohorts(homes) == [(20, [a, b, c, f]), (5000, [e]), (None, [d])]
    assert [checkpoint.steps(home) for home in homes] == [[10, 20], [20], [20], [], [10, 5000], [20]]


@pytest.mark.signals
@pytest.mark.proof
def test_a_signal_during_an_evaluation_leaves_the_rest_of_it_to_the_next_life(
    alone, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made, _ = alone
    whole, homes = (stated(tmp_path / name, made[:3]) for name in ('whole', 'parts'))
    batched_training.train(whole)
    monkeypatch.setattr(recorder.RunRecorder, 'evaluate', recorder.RunRecorder.evaluate)  # to be undone
    halting.once(recorder.RunRecorder, 'evaluate', 2, halting.signal_itself)
    with pytest.raises(errors.Stopped, match='SIGTERM: stopped after step 25 of 50, which is saved'):
        batched_training.train(homes)
    monkeypatch.undo()
    assert [checkpoint.read_metadata(home, 25)['evaluated'] for home in homes] == [25, 0, 0]
    batched_training.train(homes)
    for mine, theirs in zip(homes, whole, strict=True):
        assert numbers(mine) == numbers(theirs) and leaves(mine) == leaves(theirs)


def leaves(home: pathlib.Path) -> list[bytes]:
    variables, _ = checkpoint.load_variables(home, 'latest')
    return [bytes(np.asarray(x)) for x in jax.tree.leaves(variables)]


def test_groups_are_of_trials_that_differ_in_numbers_alone() -> None:
    def sizes(arms: list[dict[str, object]], most: int = 99, **fields: object) -> list[list[int]]:
        made = trials.trials(config.override(TINY, fields), arms)
        return [[made.index(trial) for trial in group] for group in batched_trials.groups(made, most)]

    rates = grid({'optimizer.learning_rate': [0.1, 0.2]})
    assert sizes(product(rates, seeds(2))) == [[0, 1, 2, 3]]
    assert sizes(product(rates, seeds(2)), most=3) == [[0, 1, 2], [3]]
    assert sizes(product(rates, seeds(2)), most=1) == [[0], [1], [2], [3]]
    assert sizes(product(grid({'model.norm': ['layernorm', 'rmsnorm']}), rates)) == [[0, 1], [2, 3]]
    assert sizes(product(rates, seeds(2)), **{'data.batching': 'bucket'}) == [[0, 1, 2, 3]]
    assert sizes(product(rates, seeds(2)), **{'data.batching': 'bucket', 'data.num_buckets': 1}) == [[0, 1, 2, 3]]
    assert sizes(product(rates, seeds(2)), **{'data.train_examples': 9}) == [[0, 1, 2, 3]]
    epochs = {'train.num_steps': None, 'train.num_epochs': 1.0}
    assert sizes(product(rates, seeds(2)), **epochs) == [[0, 2], [1, 3]]  # rows of a packed layout are by the seed
    assert sizes(product(rates, seeds(2)), **epochs, **{'data.batching': 'bucket'}) == [[0, 1, 2, 3]]
    assert sizes(rates, **{'train.patience': 2}) == [[0], [1]]
    assert sizes(rates, **{'mesh.pipeline': 2}) == [[0], [1]]
    assert sizes(grid({'optimizer.ema_decay': [None, 0.9, 0.99]})) == [[0], [1, 2]]
    assert sizes(grid({'optimizer.beta1': [0.8, 0.9]})) == [[0], [1]]


def test_what_may_vary_is_what_reaches_the_step_as_a_number() -> None:
    """Every field of `Hyperparameters` follows a field that the standard sets, but one, which evaluations depend on."""
    plain = hyperparameters.Hyperparameters.of(
        config.override(TINY, {'train.label_smoothing': 0.1, 'train.z_loss': 0.1})
    )
    moved = set()
    for field in hyperparameters.STANDARD | hyperparameters.OPTIONAL:
        value = {'train.seed': 7, 'optimizer.warmup_steps': 7}.get(field, 0.77)
        changed = config.override(TINY, {'train.label_smoothing': 0.1, 'train.z_loss': 0.1, field: value})
        assert hyperparameters.standard(changed) == hyperparameters.standard(TINY) or field in hyperparameters.OPTIONAL
        other = hyperparameters.Hyperparameters.of(changed)
        names = [
            each.name for each in dataclasses.fields(plain) if getattr(plain, each.name) != getattr(other, each.name)
        ]
        assert len(names) == 1, field
        moved |= set(names)
    assert moved == {each.name for each in dataclasses.fields(plain)} - {'second_loss_weight'}


def test_what_is_off_in_some_trials_is_0_there_and_what_is_off_in_all_stays_off() -> None:
    made = [
        hyperparameters.Hyperparameters.of(config.override(TINY, {'train.seed': seed, **fields}))
        for seed, fields in (
            (3, {'train.label_smoothing': 0.25, 'model.dropout_rate': 0.0, 'optimizer.warmup_steps': 4}),
            (4, {'train.label_smoothing': 0.0, 'model.dropout_rate': 0.5, 'optimizer.warmup_steps': 0.5}),
        )
    ]
    found = batched_trials.stack_hypers(made)
    assert found.label_smoothing.tolist() == [0.25, 0] and found.dropout_rates.residual.tolist() == [0, 0.5]
    assert found.seed.tolist() == [3, 4] and found.seed.dtype == np.int32
    assert found.warmup_steps.tolist() == [4, 0.5]
    assert found.z_loss is None and found.dropout_rates.attention is None


def test_those_that_do_not_go_together_are_refused(tmp_path: pathlib.Path) -> None:
    made = trials.trials(base(tmp_path), grid({'model.norm': ['layernorm', 'rmsnorm']}))
    with pytest.raises(errors.UserError, match='cannot be trained together: they differ in more than numbers'):
        batched_training.train(stated(tmp_path, made))


@pytest.mark.proof
@pytest.mark.signals
def test_a_sweep_together_is_killed_and_goes_on_to_the_same_results(tmp_path: pathlib.Path) -> None:
    """Of processes that compile as for users: four trials in one program, which is killed with its sweep."""
    go = tmp_path / 'go'
    fields = {'train.num_steps': 12, 'train.checkpoint_every': 2, 'train.eval_every': 6}
    shared = base(tmp_path, **fields)
    (tmp_path / 'base.json').write_text(json.dumps(config.to_dict(shared)))
    (tmp_path / 'sweep.py').write_text("""
from tformer.lab.sweep import Sweep, grid, product, seeds

def get_sweep():
    return Sweep('base.json', product(grid({'optimizer.learning_rate': [1e-3, 3e-3]}), seeds(2)))
""")
    parts, whole = tmp_path / 'parts', tmp_path / 'whole'

    def command(home: pathlib.Path, together: int) -> list[str]:
        arguments = [f'--config={tmp_path}/sweep.py', f'--workdir={home}', f'--together={together}']
        return [sys.executable, '-m', 'tformer', 'sweep', *arguments]

    env = waiting(tmp_path, go, 6, optimised=True)
    go.touch()
    subprocess.run(command(whole, 1), env=env, check=True, capture_output=True)
    go.unlink()
    first = parts / 'baseline/seed_0'
    life = subprocess.Popen(command(parts, 4), env=env, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(checkpoint.steps(first)) > 1 or life.poll() is not None)
    life.send_signal(signal.SIGKILL)
    life.wait()
    go.touch()
    assert not (first / 'result.json').exists()
    done = subprocess.run(command(parts, 4), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'resumed at step' in (first / 'log.txt').read_text()
    for home in sorted(path.parent for path in whole.rglob('result.json')):
        other = parts / home.relative_to(whole)
        assert scores(home) == scores(other)
        assert numbers(home) == numbers(other)
    for home in (whole, parts):
        write_report(home, timing=False)
    for name in ('report.md', 'report.html'):
        texts = [(home / name).read_text().replace('parts', 'whole') for home in (whole, parts)]  # their names
        assert texts[0] == texts[1]


def test_trials_in_turns_take_a_step_when_the_mesh_lets_them(monkeypatch) -> None:
    done = []

    def jitted_step(state, batch, hyper):
        done.append(f'step of {state}')
        return state, {}

    def in_turn(mesh, found):
        done.append(f'{mesh} has ended {found[0]}')
        return found

    monkeypatch.setattr(batched_training.meshes, 'in_turn', in_turn)
    group = types.SimpleNamespace(program=types.SimpleNamespace(jitted_step=jitted_step, mesh='the mesh'))
    step = batched_training.GroupInTurns.step.func(group)
    assert step(['a', 'b'], [1, 2], [3, 4]) == (['a', 'b'], [{}, {}])
    assert done == ['step of a', 'the mesh has ended a', 'step of b', 'the mesh has ended b']
