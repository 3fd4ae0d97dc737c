"""What is read of a directory of runs: when it has ended, its list, versions and scores, and the log of one."""

import json
import math
import pathlib
import types

import pytest

from tformer.errors import UserError
from tformer.lab.report import results
from tformer.lab.sweep import manifest


def test_a_sweep_has_ended_when_each_of_its_runs_has():
    def ended(*states: str) -> bool:
        runs = [types.SimpleNamespace(state=state, is_searched=False) for state in states]
        return results.Results(pathlib.Path(), {'a': runs[:1], 'b': runs[1:]}, None).ended

    assert ended(results.DONE, results.FAILED, results.DONE)
    assert not ended(results.DONE, results.UNFINISHED, results.DONE)
    assert not ended(results.UNFINISHED, results.DONE)


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
        json.dumps({'test': {'step': 7, 'loss': 1, 'bleu': None}, 'valid': {'loss': 2.5}})
    )
    scores, steps = results._scored(tmp_path)
    assert math.isnan(scores.pop('test/bleu')) and scores == {'test/loss': 1.0, 'valid/loss': 2.5}
    assert steps == {'test': 7}  # none is stated of the other
