"""The baseline beside a run, against values worked by hand and the formulas of the scores."""

import dataclasses
import json
import random

import numpy as np
import pytest
import scipy.stats

import toy_data
from fresh_runs import fresh_run
from tformer import __main__ as command_line
from tformer import config as config_lib
from tformer.commands import baseline, evaluate, predict, scoring
from tformer.commands.run import Run
from tformer.errors import UserError


def records(count: int, seed: int) -> list[dict]:
    """Texts of the class `bird` where that word occurs."""
    return [{'text': text, 'label': 'bird' if 'bird' in text else 'none'} for text in toy_data.sentences(count, seed)]


def test_classes_that_a_word_decides_are_found() -> None:
    predicted, what = baseline.BASELINES['class'].fit(records(200, 0))
    unseen = records(100, 1)
    right = sum(said == record['label'] for said, record in zip(predicted(unseen), unseen, strict=True))
    assert right >= 98
    assert what.startswith('logistic regression on TF-IDF of words and characters, C=')
    long = [{**record, 'text': f'{record["text"]} {"a " * baseline.LONG}'} for record in records(30, 0)]
    assert 'TF-IDF of words, C=' in baseline.BASELINES['class'].fit(long)[1]


def test_unseen_words_are_known_by_their_characters() -> None:
    def text(kind: str, rng: random.Random) -> dict:
        words = (''.join(rng.choices('bcdfg', k=4)) + {'a': 'ung', 'b': 'tion'}[kind] for _ in range(4))
        return {'text': ' '.join(words), 'label': kind}

    rng = random.Random(0)
    train, unseen = ([text(rng.choice('ab'), rng) for _ in range(100)] for _ in range(2))
    assert baseline.BASELINES['class'].fit(train)[0](unseen) == [record['label'] for record in unseen]


def test_a_single_class_is_always_predicted() -> None:
    train = [{'text': f'a{i}', 'label': 'x'} for i in range(6)]
    assert baseline.BASELINES['class'].fit(train)[0](train) == ['x'] * 6


def test_words_of_the_second_texts_alone_may_decide() -> None:
    train = [{'text': 'the same', 'pair': kind, 'label': kind} for kind in ('uv', 'wx')] * 10
    assert baseline.BASELINES['class'].fit(train)[0](train[:2]) == ['uv', 'wx']


def test_numbers_are_linear_in_words_and_in_the_likeness_of_two_texts() -> None:
    def likeness(count: int, seed: int) -> list[dict]:
        rng, found = random.Random(seed), []
        for text in toy_data.sentences(count, seed, (8, 8)):
            kept = rng.randint(0, 8)
            pair = [*text.split()[:kept], *rng.choices(toy_data.WORDS, k=8 - kept)]
            found.append({'text': text, 'pair': ' '.join(pair), 'label': float(kept)})
        return found

    predicted, what = baseline.BASELINES['number'].fit(likeness(200, 0))
    unseen = likeness(100, 1)
    assert scipy.stats.pearsonr(predicted(unseen), [record['label'] for record in unseen]).statistic > 0.85
    assert what.startswith('ridge regression on TF-IDF')


def test_a_word_has_its_most_frequent_tag_and_an_unknown_one_that_of_all_words() -> None:
    train = [
        {'tokens': ['Bonn', 'Bonn', 'is'], 'tags': ['B-LOC', 'B-PER', 'O']},
        {'tokens': ['Bonn', 'a', 'b'], 'tags': ['B-PER', 'O', 'O']},
    ]
    predicted, _ = baseline.BASELINES['tags'].fit(train)
    assert predicted([{'tokens': ['is', 'Bonn', 'Rome']}]) == [['O', 'B-PER', 'O']]


def test_sums_give_pearsons_correlation_and_0_for_a_constant() -> None:
    rng = np.random.default_rng(0)
    right = rng.normal(1e4, 1, 50)
    said = right + rng.normal(size=50)
    number = baseline.BASELINES['number']
    found = number.metric(number.terms(right.tolist(), said.tolist()).sum(0))
    assert found == pytest.approx(scipy.stats.pearsonr(right, said).statistic, abs=1e-9)
    assert number.metric(number.terms(right.tolist(), [0.3] * 50).sum(0)) == 0


def test_sums_give_the_entity_f1() -> None:
    tags = baseline.BASELINES['tags']
    right = [['B-X', 'I-X', 'O', 'B-Y'], ['O', 'O']]
    said = [['B-X', 'I-X', 'O', 'B-X'], ['O', 'B-Y']]
    assert tags.metric(tags.terms(right, said).sum(0)) == pytest.approx(2 / 5)  # one common, of two and three


def test_sums_give_the_accuracy_of_plain_tags() -> None:
    tags, right, said = baseline.PLAIN_TAGS, [['A', 'B', 'B'], ['A']], [['A', 'A', None], ['A']]
    assert tags.metric(tags.terms(right, said).sum(0)) == 2 / 4 == tags.scores(None, right, said)['tag_accuracy']


@pytest.fixture
def run(monkeypatch, tmp_path) -> Run:
    """A run whose predictions are `bird` for all texts."""
    splits = {'train': records(150, 0), 'valid': records(80, 1)}
    monkeypatch.setattr(baseline.mixture, 'load', lambda config, split: splits[split])
    monkeypatch.setattr(scoring, 'score', lambda *given: scoring.Scored({'accuracy': 0.5}, 80, [], [], []))
    monkeypatch.setattr(predict, 'of_records', lambda run, records: [{'label': 'bird'}] * len(records))
    made = fresh_run('classification', ('bird', 'none'))
    return Run(tmp_path, made.config, made.tokenizers, made.variables, made.step)


def test_both_stand_in_the_result_with_the_interval_of_their_difference(run: Run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(evaluate.Run, 'load', lambda *given, **more: run)
    command_line.main(['tformer', 'evaluate', '--workdir=x', '--split=valid', '--baseline'])
    unseen = records(80, 1)
    share = sum(record['label'] == 'bird' for record in unseen) / 80
    found = json.loads((run.workdir / 'result.json').read_text())['valid']
    assert found['accuracy'] == 0.5 and found['baseline_accuracy'] >= 0.97
    assert found['accuracy_over_baseline'] == pytest.approx(share - found['baseline_accuracy'])
    width = found['accuracy_over_baseline_high'] - found['accuracy_over_baseline_low']
    assert width == pytest.approx(2 * 1.96 * (share * (1 - share) / 80) ** 0.5, rel=0.3)  # of a share, nearly
    said = capsys.readouterr().out
    assert 'fitted on 150 of 150 training records\n' in said and said.count(': the baseline is better\n') == 1
    assert run.config.evaluate.max_examples is None and 'baseline_f1_macro' in found


def test_the_class_that_f1_is_of_is_that_of_the_baseline_too(run: Run, monkeypatch) -> None:
    """It finds 3 of 4 birds and takes 2 other texts for birds: an F1 of 2 * 3 / (5 + 4)."""
    right, said = ('bird bird bird bird none none none none', 'bird bird bird none bird bird none none')
    monkeypatch.setitem(
        baseline.BASELINES, 'class', baseline.BASELINES['class']._replace(fit=lambda _: (lambda _: said.split(), 'x'))
    )
    asked = [{'text': 'a', 'label': label} for label in right.split()]
    assert 'baseline_f1' not in baseline.compare(run, asked).scores
    for label, f1 in (('bird', 2 * 3 / (5 + 4)), ('none', 2 * 2 / (3 + 4))):
        config = config_lib.override(run.config, {'evaluate.positive_label': label})
        found = baseline.compare(dataclasses.replace(run, config=config), asked)
        assert found.scores['baseline_f1'] == pytest.approx(f1)


def test_of_many_records_those_that_are_fitted_lie_all_over_the_split(run: Run, monkeypatch) -> None:
    """The split begins with one class, and the other one follows."""
    by_class = sorted(records(150, 0), key=lambda record: record['label'])
    monkeypatch.setattr(baseline.mixture, 'load', lambda config, split: by_class)
    monkeypatch.setattr(baseline, 'MOST_RECORDS', 50)
    found = baseline.compare(run, records(80, 1))
    assert found.scores['baseline_accuracy'] >= 0.9 and 'fitted on 50 of 150 training records' in found.lines[0]


def test_what_has_no_baseline_is_named(run: Run, monkeypatch) -> None:
    with pytest.raises(UserError, match=r'train.objective=masked_lm has none; valid: classification, regression, '):
        evaluate.evaluate(fresh_run('masked_lm'), baseline=True)
    monkeypatch.setattr(baseline.mixture, 'load', lambda config, split: records(2, 0))
    with pytest.raises(UserError, match='--baseline: the training split has 2 records, fewer than 3'):
        baseline.compare(run, records(4, 1))
