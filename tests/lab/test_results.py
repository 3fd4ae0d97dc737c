"""What is read of a directory of runs: when it has ended, its list, versions and scores, and the log of one."""

import json
import math
import pathlib
import types

import pytest

from small_sweeps import TINY
from tformer import checks, config
from tformer.errors import UserError
from tformer.lab.live.watched import Watched
from tformer.lab.report import results
from tformer.lab.sweep import jobs, manifest, trials


def test_a_sweep_has_ended_when_each_of_its_runs_has():
    def ended(*states: bool) -> bool:
        runs = [types.SimpleNamespace(has_ended=state, is_searched=False) for state in states]
        return results.Results(pathlib.Path(), {'a': runs[:1], 'b': runs[1:]}, None).ended

    assert ended(True, True, True)
    assert not ended(True, False, True)
    assert not ended(False, True)


def two_arms(home: pathlib.Path) -> dict[str, pathlib.Path]:
    """The directory of a sweep of two arms, whose runs have ended; the workdirs by their arms."""
    made = trials.trials(TINY, [{}, {'optimizer.learning_rate': 0.01}])
    manifest.claim(TINY, made, home)
    for number, trial in enumerate(made):
        place = home / trial.directory
        (place / 'config.json').write_text(json.dumps(config.to_dict(trial.config)))
        (place / 'result.json').write_text(json.dumps({'test': {'step': 4, 'loss': number}}))
    return {trial.name: home / trial.directory for trial in made}


def test_a_damaged_config_of_an_unfinished_run_does_not_end_it_and_an_arm_that_is_pruned_has_ended(tmp_path):
    _, place = two_arms(tmp_path).values()
    (place / 'config.json').write_text('{')
    assert [run.state for run in results.read(tmp_path).runs] == ['done', 'unreadable']
    assert results.read(tmp_path).ended
    (place / 'result.json').unlink()
    assert not results.read(tmp_path).ended
    (tmp_path / jobs.PRUNED).write_text(json.dumps({'arm': 'learning_rate=0.01'}) + '\n')
    assert not results.read(tmp_path).ended  # it has begun
    (place / 'config.json').unlink()
    assert results.read(tmp_path).ended and results.read(tmp_path).runs[1].state == 'pruned'
    (place / 'error.txt').write_text('no')
    assert results.read(tmp_path).runs[1].state == 'failed'


def test_a_workdir_of_another_trial_is_not_read_as_that_of_the_list(tmp_path):
    one, other = two_arms(tmp_path).values()
    for source, target in ((one.parent, 'x'), (other.parent, one.parent.name), (tmp_path / 'x', other.parent.name)):
        source.rename(tmp_path / target)
    field, line = 'optimizer.learning_rate', 'is not of the trial that sweep.json has there'
    found = results.read(tmp_path)
    rate = TINY.optimizer.learning_rate
    assert [run.error for run in found.runs] == [
        f'{one}/trial.json {line}: {field} is 0.01 here, {rate} there',
        f'{other}/trial.json {line}: {field} is {rate} here, 0.01 there',
    ]
    assert {run.state for run in found.runs} == {'unreadable'} and not any(run.scores for run in found.runs)
    assert [trial.state for trial in Watched(tmp_path).trials] == ['unreadable'] * 2
    assert Watched(tmp_path).verdicts() == {}


def test_a_resolved_config_that_was_edited_is_named_and_what_is_derived_may_differ(tmp_path):
    one, other = two_arms(tmp_path).values()
    resolved = checks.resolve(TINY, vocab_size=64)
    (one / 'config.json').write_text(json.dumps(config.to_dict(resolved)))
    (other / 'config.json').write_text(json.dumps(config.to_dict(config.override(resolved, {'train.seed': 5}))))
    found, seen = results.read(tmp_path), Watched(tmp_path)
    assert [run.state for run in found.runs] == ['done', 'unreadable'] == [trial.state for trial in seen.trials]
    assert found.runs[1].error == seen.trials[1].error
    assert found.runs[1].error.startswith(f'{other}/config.json is not of the trial that sweep.json has there: ')
    (other / 'config.json').write_text('{')
    assert seen.refresh() and seen.trials[1].error.startswith(f'{other}/config.json: ') and not seen.trials[1].scores
    trial = json.loads((other / 'trial.json').read_text())
    (other / 'config.json').write_text(json.dumps(trial))
    assert seen.refresh() and seen.trials[1].state == 'done' and seen.trials[1].scores == {'test/loss': 1.0}


def test_what_steps_cost_is_read_between_the_reports_and_from_nothing_at_the_beginning():
    log = [
        {'step': 10, 'train/tokens': 100, 'train/loss': 3.0},
        {'step': 15, 'valid/loss': 2.0},
        {'step': 20, 'train/tokens': 400, 'train/loss': None},
    ]
    run = results.Run(**dict.fromkeys(results.Run.__dataclass_fields__) | {'log': log})
    assert run.spent('tokens', [0, 5, 10, 15, 20]) == [0, 50, 100, 250, 400]
    assert run.spent('flops', [5]) is None
    steps, losses = run.curve('train/loss')
    assert steps == [10, 20] and losses[0] == 3 and math.isnan(losses[1])
    assert (run.last('train/tokens'), run.last('train/loss'), run.last('valid/loss'), run.num_steps) == (
        400,
        None,
        2,
        20,
    )


def test_a_list_of_another_kind_is_named(tmp_path):
    (tmp_path / manifest.LIST).write_text(json.dumps({'base': {}, 'trials': [{'name': 'a'}]}))
    with pytest.raises(UserError, match=rf'^{tmp_path}/sweep\.json is not the list of a sweep: '):
        results.read(tmp_path)


def test_versions_are_those_of_the_newest_checkpoint_of_each_run_that_can_be_read(monkeypatch):
    noted = {
        ('a', 4): {'versions': {'jax': '0.10', 'numpy': '2.1'}},
        ('b', 2): {'versions': {'jax': '0.9'}},
        ('c', 1): {},
    }
    monkeypatch.setattr(results.checkpoint, 'read_metadata', lambda workdir, step: noted[workdir.name, step])
    monkeypatch.setattr(
        results.checkpoint, 'steps', lambda workdir: {'a': [2, 4], 'b': [2], 'c': [1], 'd': []}[workdir.name]
    )
    runs = [types.SimpleNamespace(directory=name) for name in 'abcd']
    found = results.Results(pathlib.Path(), {'x': runs}, None).versions()
    assert found == {'jax': ['0.10', '0.9'], 'numpy': ['2.1']}


def test_scores_are_numbers_of_a_split_without_facts_and_null_is_nan(tmp_path):
    (tmp_path / 'result.json').write_text(
        json.dumps({'test': {'step': 7, 'parameters': 12, 'loss': 1, 'bleu': None}, 'valid': {'loss': 2.5}})
    )
    scores, steps, parameters = results._scored(tmp_path)
    assert math.isnan(scores.pop('test/bleu')) and scores == {'test/loss': 1.0, 'valid/loss': 2.5}
    assert steps == {'test': 7} and parameters == 12  # neither is stated of the other
