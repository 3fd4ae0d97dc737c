"""Steps that are not made: they change nothing, are counted, told of, kept, and can be run again."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_training import Trainer, make_batch, make_config
from tformer import __main__ as command_line
from tformer import config, errors
from tformer.training import loop as train_lib
from tformer.training import program_cache, skipping
from whole_runs import load, numbers


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_step_whose_loss_is_no_number_changes_nothing_and_the_next_is_made(value):
    fields = {'optimizer': config.Optimizer(ema_decay=0.9), 'train': {'skip_spikes': 4.0}}
    trainer = Trainer(make_config('causal_lm', **fields))
    state, step = jax.jit(trainer.start)(trainer.hyper), jax.jit(trainer.step)
    state, _ = step(state, make_batch('causal_lm', 0), trainer.hyper)
    poisoned = {**make_batch('causal_lm', 1)}
    poisoned['weights'] = poisoned['weights'].astype(np.float32)
    after = state
    for number in (1, 2):
        bad = {**poisoned, 'weights': jnp.asarray(poisoned['weights']).at[0, 0].set(value)}
        after, numbers = step(after, bad, trainer.hyper)
        assert numbers['skipped'] == after.guard.skipped == number and after.step == 1 + number
    assert bits(after.replace(step=state.step, guard=state.guard)) == bits(state)
    made, numbers = step(after, poisoned, trainer.hyper)
    assert numbers['skipped'] == 0 and bits(made.params) != bits(state.params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(made.params))
    heavy, _ = step(after, {**poisoned, 'weights': 3 * poisoned['weights']}, trainer.hyper)
    np.testing.assert_allclose(heavy.guard.recent, made.guard.recent, rtol=1e-5)  # losses and norms are of means


def test_spikes_are_those_of_a_plain_computation():
    """Over mean + k standard deviations of the last 128 finite values, once there are 64 of them; of loss or norm."""
    random, factor = np.random.default_rng(0), 4.0
    values = random.normal(size=(400, 2)) + 5
    for place, row in {20: 0, 63: 0, 64: 0, 70: 0, 150: 1, 151: 0, 300: 1}.items():
        values[place, row] = 50
    values[[80, 200, 201], [0, 1, 0]] = np.nan, np.inf, np.nan
    values[360:] += 8  # a level that lasts is no spike after a while: what is skipped enters the window too

    def one(state, inputs):
        step, pair = inputs
        good, state = skipping.update_guard(state, step, pair[0], pair[1], factor)
        return state, (good, state.skipped)

    _, (good, skipped) = jax.lax.scan(
        one, skipping.init_guard(factor), (jnp.arange(400), jnp.asarray(values, jnp.float32))
    )
    expected, in_a_row = [], []
    for step, pair in enumerate(values):
        recent = values[max(0, step - skipping.WINDOW) : step]
        recent = recent[np.isfinite(recent).all(1)]
        made = np.isfinite(pair).all()
        if made and len(recent) >= skipping.WINDOW // 2:
            made = not (pair > recent.mean(0) + factor * recent.std(0)).any()
        expected.append(made)
        in_a_row.append(0 if made else (in_a_row[-1] if in_a_row else 0) + 1)
    assert good.tolist() == expected and skipped.tolist() == in_a_row
    assert not expected[150] and not expected[300] and expected[20] and max(in_a_row[:360]) == 2
    assert not any(expected[360:363]) and all(expected[380:])
    assert expected[63] and not expected[64]  # of which 63 and 64 steps before are known


@pytest.mark.stack
@pytest.mark.proof
def test_a_run_of_steps_that_cannot_be_made_stops_and_is_replayed(tmp_path, monkeypatch, capsys):
    """From the third step on the rate is infinite: no loss is a number from the fourth on."""
    wanted = load(
        'translate.py:smoke', tmp_path, train__num_steps='20', train__log_every='2', train__max_skipped='3',
        train__checkpoint_every='2', data__tokenizer='symbol',
    )  # fmt: skip
    real, seen = program_cache.make_program, {}

    def poisoned(*args):
        program = real(*args)

        def step(state, batch, hyper):
            jax.debug.callback(lambda done, values: seen.update({int(done) + 1: values}), state.step, batch)
            spoiled = jnp.where(state.step < 3, 1, jnp.nan)
            return program.step(state, {**batch, 'weights': batch['weights'] * spoiled}, hyper)

        return dataclasses.replace(program, step=step)

    monkeypatch.setattr(program_cache, 'make_program', poisoned)
    with pytest.raises(errors.UserError, match=r'steps 4 to 6 were skipped') as stopped:
        train_lib.train(wanted, tmp_path / 'run')
    monkeypatch.undo()
    kept = tmp_path / 'run' / 'skipped' / '4.npz'
    assert str(kept) in str(stopped.value) and f'tformer replay --workdir={tmp_path}/run --step=4' in str(stopped.value)
    rows = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert [row.get('train/skipped') for row in rows] == [None, 1, 2]
    assert rows[1]['train/loss'] > 0 and rows[2]['train/loss'] is None  # a mean of the steps that were made

    command_line.main(['tformer', 'replay', f'--workdir={tmp_path}/run', '--step=4'])
    said = capsys.readouterr().out
    assert f'{tmp_path}/run step 4, from checkpoint 2' in said and said.count('row ') == 8
    with np.load(kept) as batch:
        assert set(batch) == set(seen[4])
        for name, values in batch.items():
            np.testing.assert_array_equal(values, seen[4][name])


@pytest.mark.proof
def test_a_replayed_step_has_the_numbers_that_training_had(tmp_path, capsys):
    wanted = load(
        'translate.py:smoke', tmp_path, train__num_steps='7', train__log_every='1', train__checkpoint_every='3',
        model__dropout_rate='0.2', data__tokenizer='symbol', train__keep_last='1',
    )  # fmt: skip
    train_lib.train(dataclasses.replace(wanted), tmp_path / 'run')
    rows = {row['step']: row for row in numbers(tmp_path / 'run') if 'train/loss' in row}
    capsys.readouterr()
    for step, origin in ((5, 'the beginning'), (7, 'the beginning')):
        command_line.main(['tformer', 'replay', f'--workdir={tmp_path}/run', f'--step={step}'])
        said = capsys.readouterr().out
        row = rows[step]
        assert f'step {step}, from {origin}\n' in said
        assert f'  loss {row["train/loss"]:.6g}  grad_norm {row["train/grad_norm"]:.6g}  learning_rate' in said
    for step in (0, 8):
        with pytest.raises(errors.UserError, match=rf'--step={step}: the run has steps 1 to 7'):
            command_line.main(['tformer', 'replay', f'--workdir={tmp_path}/run', f'--step={step}'])
