"""Predictions for single texts, against the logits of each text alone."""

import json

import numpy as np
import pytest
import scipy.special

from fresh_runs import fresh_run
from tformer import __main__ as command_line
from tformer.commands import predict as predict_lib
from tformer.commands.predict import predict
from tformer.commands.run import Run
from tformer.config import override
from tformer.errors import UserError


def logits(run: Run, *texts: str) -> np.ndarray:
    """The outputs for one row: CLS a SEP, or CLS a SEP b SEP."""
    tokenizer = run.tokenizers.target
    parts = [[*tokenizer.encode(text), tokenizer.specials.sep] for text in texts]
    inputs = np.array([[tokenizer.specials.cls, *(token for part in parts for token in part)]])
    types = np.repeat([0, 1], [1 + len(parts[0]), inputs.size - 1 - len(parts[0])])[None]
    return np.asarray(run.apply({'inputs': inputs, 'positions': np.arange(inputs.size)[None], 'token_types': types}))[0]


@pytest.mark.slow
def test_classes_have_the_softmax_of_the_logits_in_the_order_of_the_texts() -> None:
    run = fresh_run('classification', ('no', 'yes', 'perhaps'))
    texts = ['abc', 'e d c b a a b c d e', {'text': 'bad', 'pair': 'a cab', 'label': 'unread'}, '{"text": "dad"}']
    found = predict(run, texts, batch_size=2)
    for one, given in zip(found, [*texts[:2], ('bad', 'a cab'), 'dad'], strict=True):
        wanted = scipy.special.softmax(logits(run, *([given] if isinstance(given, str) else given)))
        assert list(one['probabilities']) == ['no', 'yes', 'perhaps']
        np.testing.assert_allclose(list(one['probabilities'].values()), wanted, atol=1e-5)
        assert one['label'] == run.tokenizers.labels[int(np.argmax(wanted))]
    assert len({tuple(one['probabilities'].values()) for one in found}) == 4


@pytest.mark.parametrize('family', ['encoder', 'decoder', 'encoder_decoder'])
def test_a_batch_of_texts_has_the_outputs_that_are_predicted(family: str) -> None:
    run = fresh_run('classification', ('no', 'yes', 'maybe'), family=family)
    texts = ['a bad cab', 'deed']
    expected = [list(row['probabilities'].values()) for row in predict(run, texts)]
    found = scipy.special.softmax(np.asarray(run.apply(run.batch(texts))), -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(UserError, match=r'^targets are for '):
        run.batch(texts, texts)


@pytest.mark.parametrize('objective', ['simcse', 'replaced_token'])
def test_an_objective_that_reads_more_than_a_text_has_no_batch_of_them(objective: str) -> None:
    with pytest.raises(UserError, match=rf'^train\.objective={objective} reads more than a text'):
        fresh_run(objective).batch(['a bad cab'])


def test_numbers_are_the_outputs() -> None:
    run = fresh_run('regression', label_range=(2.0, 3.0))
    found = predict(run, ['ab', {'text': 'ab', 'pair': 'c'}])
    np.testing.assert_allclose([one['number'] for one in found], [logits(run, 'ab'), logits(run, 'ab', 'c')], atol=1e-5)


def test_tags_have_the_characters_of_their_words_in_the_line(capsys) -> None:
    run = fresh_run('token_classification', ('O', 'B-X', 'I-X'))
    long = 'abcde abcde abcde abcde e'
    first, second, cut = predict(run, [' ab   c', '{"tokens": ["ab", "c"]}', long])
    assert [(one['text'], one['start'], one['end']) for one in first['tokens']] == [('ab', 1, 3), ('c', 6, 7)]
    assert [(one['start'], one['end']) for one in second['tokens']] == [(0, 2), (3, 4)]
    probabilities = scipy.special.softmax(logits(run, 'ab c'), axis=-1)[[1, 4]]  # of the first letters, after CLS
    for one in (first, second):
        assert [each['tag'] for each in one['tokens']] == [run.tokenizers.labels[i] for i in probabilities.argmax(-1)]
        np.testing.assert_allclose([each['probability'] for each in one['tokens']], probabilities.max(-1), atol=1e-5)
    assert [each['probability'] is None for each in cut['tokens']] == [False] * 4 + [True]
    assert cut['tokens'][-1] == {'text': 'e', 'tag': 'O', 'probability': None, 'start': 24, 'end': 25}
    assert capsys.readouterr().err == '1 of 3 texts were cut to data.length=24\n'


def test_plain_tags_of_words_beyond_the_length_are_none() -> None:
    run = fresh_run('token_classification', ('NOUN', 'VERB'))
    (found,) = predict(run, ['abcde abcde abcde abcde e'])
    assert {each['tag'] for each in found['tokens'][:-1]} <= {'NOUN', 'VERB'}
    assert found['tokens'][-1] == {'text': 'e', 'tag': None, 'probability': None, 'start': 24, 'end': 25}


def pair_of(run: Run, first: str, second: str = '') -> np.ndarray:
    """The row CLS a SEP b SEP, or CLS a SEP, as a text of its own."""
    tokenizer = run.tokenizers.target
    parts = [[*tokenizer.encode(text), tokenizer.specials.sep] for text in (first, second) if text]
    inputs = np.array([[tokenizer.specials.cls, *(token for part in parts for token in part)]])
    types = np.repeat([0, 1], [1 + len(parts[0]), inputs.size - 1 - len(parts[0])])[None]
    places = {'positions': np.arange(inputs.size)[None], 'segment_ids': np.ones_like(inputs)}
    return np.asarray(run.apply({'inputs': inputs, 'token_types': types, **places, 'segment_weights': np.ones((1, 1))}))


@pytest.mark.slow
def test_choices_have_the_softmax_of_the_scores_of_each_with_the_context() -> None:
    run = fresh_run('multiple_choice')
    asked = [('ab', ['c', 'd e', 'e']), ('cab', ['de', 'a b'])]
    found = predict(run, [json.dumps({'context': context, 'choices': choices}) for context, choices in asked])
    for one, (context, choices) in zip(found, asked, strict=True):
        wanted = scipy.special.softmax([pair_of(run, context, choice).item() for choice in choices])
        np.testing.assert_allclose(one['probabilities'], wanted, atol=1e-5)
        assert one['choice'] == int(np.argmax(wanted)) and one['text'] == choices[one['choice']]
    with pytest.raises(UserError, match=r'needs a JSON object: \{"context": ..., "choices": ...\}'):
        predict(run, ['ab'])


def test_cosines_are_the_products_of_the_vectors_of_the_texts() -> None:
    run = fresh_run('cosine_similarity', label_range=(0.0, 5.0))
    one, other = (pair_of(run, text)[0, 0] for text in ('ab', 'c d e'))
    (found,) = predict(run, [{'text': 'ab', 'pair': 'c d e'}])
    assert found == {'cosine': pytest.approx(float(one @ other), abs=1e-5)} and abs(found['cosine']) < 1


@pytest.mark.slow
def test_answers_are_the_best_spans_of_all_windows() -> None:
    run = fresh_run('question_answering', stride=4)
    asked = [('ab', 'c d e a b c'), ('e', 'edcba' * 5 + ' ' + 'abcde' * 7)]
    asked += [(question, f' {letter}' * 3) for question in 'abc' for letter in 'abcde']
    found = predict(run, [json.dumps({'question': q, 'context': c}) for q, c in asked])
    found_in, led = [], False
    for one, (question, context) in zip(found, asked, strict=True):
        room, best = 24 - 3 - len(question), []
        starts = range(0, max(len(context) - room, 0) + 4, 4)
        for start in starts:
            part, first = context[start : start + room], 2 + len(question)
            scores = logits(run, question, part)
            spans = [
                (scores[first + i, 0] + scores[first + j, 1], start + i, start + j + 1)
                for i in range(len(part)) for j in range(i, min(len(part), i + run.config.evaluate.answer_length))
            ]  # fmt: skip
            best.append((*max(spans), scores[0].sum()))
        found_in.append(best.index(max(best)))
        score, start, end, _ = max(best)
        text = context[start:end]
        led |= text.startswith(' ') and bool(text.strip())
        assert one['answer'] == context[one['start'] : one['end']] == text.strip()
        assert one['score'] == pytest.approx(score, abs=1e-4)
        assert one['no_answer_score'] == pytest.approx(min(each[3] for each in best), abs=1e-4)
    assert max(found_in) > 0 and led


def test_no_answer_is_given_where_it_is_better_by_more_than_the_threshold() -> None:
    run, asked = fresh_run('question_answering'), {'question': 'ab', 'context': 'c d e a b c'}
    (best,) = predict(run, [asked])
    none = {'answer': '', 'start': None, 'end': None, 'score': None, 'no_answer_score': best['no_answer_score']}
    lead = best['no_answer_score'] - best['score']
    for threshold, expected in ((lead + 0.01, best), (lead - 0.01, none)):
        config = override(run.config, {'evaluate.null_threshold': threshold})
        assert predict(Run(run.workdir, config, run.tokenizers, run.variables, run.step), [asked]) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('objective', 'text', 'line'),
    [
        ('classification', '', 'in.txt:2: text is empty'),
        ('classification', '{"texts": "a"}', "in.txt:2: no key 'text'; did you mean 'texts'"),
        ('classification', '{"text": "a', r'in.txt:2: it begins with { and is not a JSON object'),
        ('classification', '{"text": ' + '[' * 100_000, r'in.txt:2: it begins with { and is not .*nested too deeply'),
        ('classification', '{"text": ' + '1' * 5_000 + '}', r'in.txt:2: it begins with { and is not a JSON object'),
        ('classification', '{"text": "a", "text": "b"}', r"in.txt:2: .*the key 'text' is given twice"),
        ('question_answering', 'a', r'in.txt:2: .* needs a JSON object: {"question": ..., "context": ...}'),
    ],
)
def test_a_bad_line_is_named(objective, text, line) -> None:
    good = '{"text": "a", "question": "b", "context": "c"}'
    with pytest.raises(UserError, match=line):
        predict(
            fresh_run(objective, ('x', 'y') if objective == 'classification' else ()), [good, text], source='in.txt'
        )


def test_language_models_predict_nothing_of_texts() -> None:
    with pytest.raises(UserError, match=r'train.objective=masked_lm is not for predictions; valid: classification, '):
        predict(fresh_run('masked_lm'), ['a'])


def test_the_command_prints_lines_of_json_or_writes_them(monkeypatch, tmp_path, capsys) -> None:
    run = fresh_run('classification', ('no', 'yes'))
    monkeypatch.setattr(predict_lib.Run, 'load', lambda *given: run)
    (tmp_path / 'in.txt').write_text('ab\n{"text": "a", "pair": "b"}\n')
    arguments = ['tformer', 'predict', '--workdir=x', f'--input={tmp_path}/in.txt']
    command_line.main(arguments)
    said = capsys.readouterr().out
    assert [json.loads(line) for line in said.splitlines()] == predict(run, ['ab', {'text': 'a', 'pair': 'b'}])
    command_line.main([*arguments, f'--output={tmp_path}/out.jsonl'])
    assert (tmp_path / 'out.jsonl').read_text() == said and capsys.readouterr().out == ''
