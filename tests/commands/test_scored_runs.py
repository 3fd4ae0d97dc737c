"""Which text is generated and shown when a run is scored, and what is written, with a model that repeats its source."""

import types

import pytest

from tformer import config as config_lib
from tformer.commands import attention, evaluate, scoring
from tformer.commands.run import Run
from tformer.config import Config
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError
from tformer.training import workdir

PAIRS = Config(
    model=config_lib.Model(family='encoder_decoder'), train=config_lib.Train(objective='seq2seq', num_steps=1)
)
RUNNING = Config(train=config_lib.Train(objective='causal_lm', num_steps=1))
RECORDS = [
    {'source': f's{i}', 'target': f's{i}' if i < 2 else 'x', 'references': [f's{i}' if i < 2 else 'x', 's4']}
    for i in range(6)
]


@pytest.fixture
def asked(monkeypatch) -> list[list[str]]:
    """The texts that are given to the model, which repeats each."""
    found: list[list[str]] = []
    monkeypatch.setattr(scoring, 'generate', lambda config, tokens, variables, texts, **_: found.append(texts) or texts)
    return found


def test_samples_of_running_text_are_two_at_most_from_nothing(asked) -> None:
    three, none = (config_lib.override(RUNNING, {'evaluate.samples': count}) for count in (3, 0))
    assert scoring.samples(three, None, None, RECORDS) == ['--- sample', ''] * 2
    assert scoring.samples(none, None, None, RECORDS) == [] and asked == [['', '']]


def test_scores_of_generated_text_compare_each_output_with_its_own_references(asked) -> None:
    stated = config_lib.override(PAIRS, {'evaluate.metrics': ('exact_match',)})
    assert scoring.generated_scores(stated, None, None, RECORDS) == {'exact_match': pytest.approx(3 / 6)}
    assert asked == [[record['source'] for record in RECORDS]]


def test_a_trial_keeps_its_own_result_and_samples_are_printed(tmp_path, monkeypatch, capsys) -> None:
    found = scoring.Scored({'loss': 2.5}, 7, [], [], ['a sample'])
    monkeypatch.setattr(scoring, 'score', lambda *_: found)
    run = Run(tmp_path, Config(), None, {}, 4)  # type: ignore[arg-type]
    assert evaluate.evaluate(run, 'valid') == {'loss': 2.5}
    said = capsys.readouterr().out
    assert said.startswith(f'{tmp_path} step 4, valid: 7 records\n') and said.endswith('\na sample\n')
    written = (tmp_path / 'result.json').read_text()
    (tmp_path / 'trial.json').write_text('{}')
    evaluate.evaluate(run, 'test')
    line = f'{tmp_path} is a trial of a sweep: its result.json keeps the scores of the end of its training\n'
    assert capsys.readouterr().out.endswith(line) and (tmp_path / 'result.json').read_text() == written


def test_what_a_run_has_no_counterpart_for_is_refused(tmp_path, monkeypatch) -> None:
    byte = Byte()
    run = Run(tmp_path, RUNNING, Tokenizers(None, byte), {}, 0)
    with pytest.raises(UserError, match=r'^targets are for model\.family=encoder_decoder, not decoder$'):
        run.batch(['a'], ['b'])
    with pytest.raises(UserError, match=r'^attention: no text is given$'):
        attention.attention(run, [])
    (tmp_path / 'config.json').write_text('{}')
    normed = types.SimpleNamespace(model=types.SimpleNamespace(norm='batchnorm'))
    monkeypatch.setattr(workdir, 'changed_config', lambda *_: normed)
    monkeypatch.setattr(workdir, 'load_tokenizers', lambda _: run.tokenizers)
    monkeypatch.setattr('tformer.checks.check_here', lambda _: None)
    with pytest.raises(UserError, match=r'^--average=2: the statistics of model\.norm=batchnorm belong to one'):
        Run.load(tmp_path, average=2)
