"""What an evaluation leaves in the workdir."""

import json
import types

import pytest

from tformer.commands import evaluate, scoring
from tformer.commands.run import Run
from tformer.config import Config


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
    evaluate.evaluate(run, 'valid', averaged_checkpoints=2)
    wanted = {'test': {'step': 7, 'parameters': 5, 'loss': 1.5}}
    wanted['valid'] = {'step': 7, 'averaged_checkpoints': 2, 'loss': 2.5}
    assert json.loads((run.workdir / 'result.json').read_text()) == run.results == wanted
    said = capsys.readouterr().out
    assert f'{run.workdir} step 7, test: 3 records\n  loss  1.5\na sample\n' in said


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
