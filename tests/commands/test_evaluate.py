"""What an evaluation leaves in the workdir."""

import dataclasses
import json
import types

import pytest

from tformer import config
from tformer.commands import evaluate, scoring
from tformer.commands.run import Run
from tformer.config import Config
from tformer.training import workdir, writers


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    losses = {'test': 1.5, 'valid': 2.5}
    monkeypatch.setattr(
        scoring, 'score', lambda config, tokenizers, variables, split, records, workdir: scoring.Scored(
            {'loss': losses[split]}, 3, [], [], ['a sample']
        )
    )  # fmt: skip
    return Run(tmp_path, Config(), None, {}, 7)


def test_scores_of_a_split_stand_beside_those_of_others_with_their_step_and_facts(run, capsys):
    assert evaluate.evaluate(run, 'test', parameters=5) == {'loss': 1.5}
    evaluate.evaluate(dataclasses.replace(run, chosen={'average': 2}), 'valid')
    wanted = {'test': {'step': 7, 'parameters': 5, 'loss': 1.5}}
    wanted['valid'] = {'step': 7, 'loss': 2.5}
    written = json.loads((run.workdir / 'result.json').read_text())
    assert written.pop('overrides') == {'valid': {'average': 2}} and written == run.results == wanted
    said = capsys.readouterr().out
    assert 'valid in result.json is now by average=2; ' in said
    assert f'{run.workdir} step 7, test: 3 records\n  loss  1.5\na sample\n' in said


def test_fields_that_the_config_of_the_run_does_not_have_stand_beside_the_scores(run, capsys):
    """Until the split is scored by the run's own; what changes no score does not."""
    (run.workdir / 'config.json').write_text(json.dumps(config.to_dict(run.config)))
    evaluate.evaluate(run, 'test')
    assert 'overrides' not in json.loads((run.workdir / 'result.json').read_text())
    other = config.override(run.config, {'evaluate.max_examples': '3', 'data.path': 'x', 'evaluate.samples': '0'})
    for split in ('test', 'valid'):
        evaluate.evaluate(dataclasses.replace(run, config=other), split)
    named = {'data.path': ['x'], 'evaluate.max_examples': 3}
    assert 'valid in result.json is now by data.path=' in capsys.readouterr().out
    found = json.loads((run.workdir / 'result.json').read_text())
    assert found['overrides'] == {'test': named, 'valid': named} == writers.overrides(run.workdir)
    assert run.results.keys() == {'test', 'valid'}
    stated = {**config.to_dict(run.config), 'decode': {**config.to_dict(run.config)['decode'], 'top_k': 3}}
    (run.workdir / 'config.json').write_text(json.dumps(stated))  # of an earlier version: without effect under `greedy`
    evaluate.evaluate(dataclasses.replace(run, config=workdir.changed_config(run.workdir, {})), 'test')
    assert writers.overrides(run.workdir) == {'valid': named}


def test_the_wall_time_is_that_of_the_training_until_a_training_ends_again(run):
    for seconds in (3.0, 5.0):
        account = types.SimpleNamespace(seconds=lambda seconds=seconds: {'total': seconds})
        for given, split in ((account, 'test'), (None, 'test'), (None, 'valid')):
            evaluate.evaluate(run, split, account=given)
            written = json.loads((run.workdir / 'result.json').read_text())
            assert written['wall_time'] == {'total': seconds} and split in written


def test_a_trial_keeps_the_scores_of_the_end_of_its_training(run, capsys):
    (run.workdir / 'trial.json').write_text('{}')
    evaluate.evaluate(run, 'test', parameters=5)
    evaluate.evaluate(run, 'valid')
    assert run.results.keys() == {'test'}
    assert 'its result.json keeps the scores of the end of its training' in capsys.readouterr().out
