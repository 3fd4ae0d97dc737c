"""Language models scored in windows of other lengths than those they were trained in."""

import dataclasses
import json
import pathlib

import pytest

import recipes
import toy_data
from tformer import checks, config
from tformer.commands import evaluate, scoring
from tformer.commands import train as train_command
from tformer.commands.run import Run
from tformer.errors import UserError
from tformer.training import workdir as workdir_lib


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp('lengths')
    data = {'data__source': 'files', 'data__path': str(toy_data.running(place / 'data')), 'mesh__data': 1}
    length = {'data__length': 16, 'model__max_len': 64, 'evaluate__lengths': (8, 16, 64), 'evaluate__samples': 0}
    cfg = recipes.load('lm_stdlib:smoke', model__position='alibi', **data, **length)
    train_command.train_and_evaluate(cfg, str(place / 'run'))
    return str(place / 'run')


@pytest.mark.slow
def test_a_length_is_scored_as_if_it_were_the_datas(trained: str, capsys) -> None:
    results = json.loads((pathlib.Path(trained) / 'result.json').read_text())['test']
    assert results['loss_at_16'] == pytest.approx(results['loss'], rel=1e-5)
    for length in (8, 64):
        run = Run.load(trained, {'evaluate.lengths': ''})
        of_length = config.override(run.config, {'data.length': length})
        again = evaluate.evaluate(dataclasses.replace(run, config=of_length), 'test')
        assert results[f'loss_at_{length}'] == pytest.approx(again['loss'], rel=1e-5)
        assert 'loss_at_16' not in again
    assert len({results[f'loss_at_{length}'] for length in (8, 16, 64)}) == 3


@pytest.mark.slow
def test_a_batch_has_as_many_tokens_at_every_length(trained: str) -> None:
    cfg = workdir_lib.load_config(pathlib.Path(trained))
    tokens = cfg.train.batch_size * 16
    for length in (8, 32, 64):
        windows = scoring.windowed(cfg, length)
        assert windows.data.length == length and windows.data.batch_tokens == tokens
        assert windows.model == cfg.model
    assert scoring.windowed(config.override(cfg, {'data.batch_tokens': 99}), 8).data.batch_tokens == 99


@pytest.mark.parametrize('fields, message', [
    ({'evaluate__lengths': (16, 65)}, r'evaluate.lengths=\(16, 65\) must be from 3 to model.max_len=64$'),
    ({'evaluate__lengths': (2,)}, r'evaluate.lengths=\(2,\) must be from 3'),
    ({'evaluate__lengths': (8,), 'train__objective': 'prefix_lm'}, 'it applies where train.objective is causal_lm'),
])  # fmt: skip
def test_a_mistake_is_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        checks.check_here(recipes.load('lm_stdlib:smoke', model__max_len=64, **fields))
    assert '\n' not in str(error.value)
