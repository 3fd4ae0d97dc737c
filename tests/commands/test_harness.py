"""The LM Evaluation Harness on tasks of the tests: its numbers are those of `tformer score`, and of texts by hand."""

import json
import math
import pathlib
import types

import numpy as np
import pytest

from fresh_runs import fresh_run
from places import TESTS
from tformer import __main__ as command_line
from tformer.commands.harness import adapter, before, harness, writing
from tformer.commands.score import score
from tformer.errors import UserError

LETTERS = 'abcde .f'


def task(folder: pathlib.Path, name: str, docs: list[dict], **settings) -> None:
    """Writes a task file and its data."""
    data = folder / f'{name}.jsonl'
    data.write_text(''.join(json.dumps(doc) + '\n' for doc in docs))
    whole = {
        'task': name,
        'dataset_path': 'json',
        'dataset_kwargs': {'data_files': {'test': str(data)}},
        'test_split': 'test',
        **settings,
    }
    (folder / f'{name}.yaml').write_text(json.dumps(whole))  # JSON is YAML


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> pathlib.Path:
    """A directory of three tasks, whose data the harness keeps beside them."""
    pytest.importorskip('lm_eval')
    monkeypatch.setenv('HF_HOME', str(tmp_path / 'home'))
    import datasets

    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    accuracy = [{'metric': 'acc', 'aggregation': 'mean', 'higher_is_better': True}]
    match = [{'metric': 'exact_match', 'aggregation': 'mean', 'higher_is_better': True}]
    choices = {'output_type': 'multiple_choice', 'doc_to_text': '{{question}}', 'doc_to_choice': '{{choices}}'}
    task(tmp_path, 'toy_choice', CHOICES, **choices, doc_to_target='label', metric_list=accuracy)
    written = {'output_type': 'generate_until', 'doc_to_text': '{{question}}', 'doc_to_target': '{{answer}}'}
    ends = {'until': ['.'], 'max_gen_toks': 5, 'do_sample': False}
    task(tmp_path, 'toy_answer', ANSWERS, **written, generation_kwargs=ends, metric_list=match)
    rolling = {'output_type': 'loglikelihood_rolling', 'doc_to_text': '', 'doc_to_target': '{{text}}'}
    words = [{'metric': name} for name in ('word_perplexity', 'byte_perplexity', 'bits_per_byte')]
    task(tmp_path, 'toy_text', TEXTS, **rolling, metric_list=words)
    return tmp_path


CHOICES = [
    {'question': question, 'choices': [' ab', ' fed', ' c.'], 'label': label}
    for label, question in enumerate(('abc', 'dd', 'f. e'))
] * 2
ANSWERS = [{'question': question, 'answer': 'a'} for question in ('ab', 'e.e', 'fff', 'c')]
TEXTS = [{'text': 'ab cd. effe' * times} for times in (1, 7)]


@pytest.mark.proof
@pytest.mark.parametrize(
    ('objective', 'family'),
    [('causal_lm', 'decoder'), ('seq2seq', 'encoder_decoder')],
)
def test_tasks_are_scored_as_by_hand(tasks, objective, family) -> None:
    run = fresh_run(objective, family=family, letters=LETTERS)
    names = ['toy_choice', 'toy_answer', *(['toy_text'] if family == 'decoder' else [])]
    found = harness(run, names, include=tasks)['results']
    right = []
    for doc in CHOICES:
        pairs = [{'source': doc['question'], 'target': choice} for choice in doc['choices']]
        likelihoods = [each.log_likelihood for each in score(run, pairs, ended=False)]
        right.append(int(np.argmax(likelihoods)) == doc['label'])
    assert found['toy_choice']['acc,none'] == pytest.approx(np.mean(right))
    write, ends = writing(run, {'until': ['.'], 'max_gen_toks': 5})
    answers = [before(text, ends) for text in write([doc['question'] for doc in ANSWERS])]
    assert found['toy_answer']['exact_match,none'] == pytest.approx(np.mean([text == 'a' for text in answers]))
    if family == 'decoder':
        scores = score(run, [doc['text'] for doc in TEXTS], stride=run.config.model.max_len)
        bits = -sum(each.log_likelihood for each in scores) / math.log(2) / sum(each.bytes for each in scores)
        assert found['toy_text']['bits_per_byte,none'] == pytest.approx(bits, rel=1e-4)


@pytest.mark.slow
def test_texts_are_written_as_tasks_ask(tasks) -> None:
    run = fresh_run('causal_lm', family='decoder', letters=LETTERS)
    model, texts = adapter(run), ['ab', 'abc', 'ff', 'e', 'd.']
    plain = {'until': [], 'max_gen_toks': 6}
    asked = [
        plain,
        {'until': 'a', 'max_gen_toks': 6},
        plain,
        {**plain, 'max_gen_toks': 2},
        {**plain, 'do_sample': True},
    ]
    requests = [types.SimpleNamespace(args=each) for each in zip(texts, asked, strict=True)]
    found = model.generate_until(requests)
    whole = [model.generate_until([types.SimpleNamespace(args=(text, plain))])[0] for text in texts]
    assert found[0] == whole[0] and found[2] == whole[2]
    assert found[1] == whole[1].split('a')[0]
    assert whole[3].startswith(found[3]) and len(found[3]) <= 2 < len(whole[3])


def test_settings_of_tasks_become_fields_or_are_refused(monkeypatch, capsys) -> None:
    run, made = fresh_run('causal_lm', family='decoder', letters=LETTERS), []
    monkeypatch.setattr(type(run), 'generate', lambda self, texts, cut: made.append(self.config.decode) or [])
    sampled = {'do_sample': True, 'temperature': 0.5, 'top_p': 0.9, 'until': None}
    for asked in (sampled, {**sampled, 'temperature': 0}, {'temperature': 0.7}, {'max_gen_toks': 3}):
        write, ends = writing(run, asked)
        assert (write([]), ends) == ([], [])
    drawn, cold, greedy, short = made
    assert (drawn.strategy, drawn.temperature, drawn.top_p, drawn.max_len) == ('sample', 0.5, 0.9, 16)
    assert cold.strategy == greedy.strategy == 'greedy' and short.max_len == 3
    line = 'a task asks for 256 new tokens, and model.max_len=32 leaves 16\n'
    assert capsys.readouterr().err == line * 3
    with pytest.raises(UserError, match=r"^a task asks for \{'num_beams': 4\}, which `decode` has no field for$"):
        writing(run, {'num_beams': 4})


def test_the_first_end_cuts_a_text() -> None:
    assert before('a b. c\n', ['\n', '.', 'x']) == 'a b'
    assert before('a b', ['.', '']) == 'a b'


@pytest.mark.proof
def test_the_command_prints_the_table_and_writes_the_results(tasks, capsys) -> None:
    flags = [f'--workdir={TESTS}/stored_run', f'--include={tasks}', '--limit=2', f'--output={tasks}/out.json']
    command_line.main(['tformer', 'harness', '--tasks=toy_choice', *flags])
    assert '|toy_choice|' in capsys.readouterr().out
    assert json.loads((tasks / 'out.json').read_text())['results']['toy_choice']['sample_len'] == 2
    with pytest.raises(UserError, match=r"^--tasks=toy_choise is unknown to lm-eval; did you mean 'toy_choice'\?$"):
        command_line.main(['tformer', 'harness', '--tasks=toy_choise', *flags])
    for flag, line in (
        ('--limit=0', '--limit=0 must be at least 1'),
        ('--shots=-1', '--shots=-1 must be at least 0'),
        ('--shots=1000', 'lm-eval: '),
        ('--include=nowhere', '--include=nowhere is not a directory'),
    ):
        with pytest.raises(UserError, match=f'^{line}'):
            command_line.main(['tformer', 'harness', '--tasks=toy_choice', *flags, flag])
    with pytest.raises(UserError, match=r'^--tasks is needed: '):
        command_line.main(['tformer', 'harness', *flags])
