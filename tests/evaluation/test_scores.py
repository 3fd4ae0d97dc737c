"""Every metric is its reference library's, has the values that are worked here by hand, and is defined everywhere."""

import importlib.metadata
import importlib.util
import warnings

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

import toy_data
from places import ROOT
from tformer import checks
from tformer import config as config_lib
from tformer.commands import train as train_command
from tformer.config import Config, Evaluate
from tformer.errors import UserError
from tformer.evaluation import metrics, scores, text_scores
from tformer.evaluation import scorer as scorer_lib
from tformer.training import checkpoint


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        yield


def near(**values):
    return pytest.approx(values, abs=1e-9)


# ----------------------------------------------------------------------------------------- classes and numbers
CLASSES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)


def plain_class_scores(labels, predicted, positive):
    """F1 = 2 right / (predicted + true) of each class that occurs; Gorodkin 2004 of the table of all classes."""
    classes = sorted({*labels, *predicted})
    right, said, true = (
        {c: sum(f(a, b, c) for a, b in zip(labels, predicted, strict=True)) for c in {*classes, positive}}
        for f in (lambda a, b, c: a == b == c, lambda a, b, c: b == c, lambda a, b, c: a == c)
    )
    f1 = {c: 2 * right[c] / max(said[c] + true[c], 1) for c in right}
    n, correct = len(labels), sum(right.values())
    above = n * correct - sum(said[c] * true[c] for c in classes)
    spreads = [n * n - sum(x[c] ** 2 for c in classes) for x in (said, true)]
    return {
        'f1_macro': sum(f1[c] for c in classes) / len(classes),
        'f1_micro': correct / n,
        'f1': f1[positive],
        'matthews': above / (spreads[0] * spreads[1]) ** 0.5 if all(spreads) else 0.0,
    }


@settings(deadline=None, max_examples=50)
@given(CLASSES)
def test_class_scores_are_counts_of_who_is_right(pairs):
    labels, predicted = zip(*pairs, strict=True)
    found = scores.class_scores(np.array(labels), np.array(predicted), 'abcd', 'c')
    assert found == near(**plain_class_scores(labels, predicted, 2))


def test_class_scores_by_hand():
    """Of class 1: 2 right, 1 too many, 1 missed, 2 right rejections: F1 = 4 / 6, Matthews = (2*2 - 1*1) / 9."""
    labels, predicted = np.array([1, 1, 1, 0, 0, 0, -1, -1]), np.array([1, 1, 0, 1, 0, 0, 0, 1])
    found = scores.class_scores(labels, predicted, ('no', 'yes'), 'yes')
    assert found == near(f1_macro=2 / 3, f1_micro=2 / 3, matthews=1 / 3, f1=2 / 3)
    labels, predicted = np.array([1, 0, 0, 0]), np.array([1, 1, 0, 0])  # classes: F1 2/3 and 4/5
    assert scores.class_scores(labels, predicted, ('no', 'yes'), 'no')['f1'] == pytest.approx(4 / 5)
    assert scores.class_scores(labels, predicted, ('no', 'yes'), 'yes')['f1'] == pytest.approx(2 / 3)
    assert scores.class_scores(labels, predicted)['f1_macro'] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert 'f1' not in scores.class_scores(labels, predicted)


def test_class_scores_where_little_occurs():
    one, none, nothing = np.array([1, 1]), np.array([0, 0]), np.array([], int)
    assert scores.class_scores(one, one, 'ab', 'b') == near(f1_macro=1, f1_micro=1, matthews=0, f1=1)
    assert scores.class_scores(one, one, 'ab', 'a') == near(f1_macro=1, f1_micro=1, matthews=0, f1=0)
    assert scores.class_scores(one, none, 'ab', 'b') == near(f1_macro=0, f1_micro=0, matthews=0, f1=0)
    assert scores.class_scores(nothing, nothing, 'ab', 'b') == near(f1_macro=0, f1_micro=0, matthews=0, f1=0)
    assert scores.class_scores(-one, none) == near(f1_macro=0, f1_micro=0, matthews=0)


def test_a_positive_class_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"evaluate.positive_label='birds' is unknown; did you mean 'bird'\?"):
        scores.class_scores(np.array([0]), np.array([0]), ('bird', 'none'), 'birds')


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=20))
def test_correlations_are_of_deviations_and_of_ranks_and_of_constants_0(pairs):
    labels, predicted = np.array(pairs, np.float32).T
    found = scores.regression_scores(labels, predicted)

    def correlation(x, y):
        x, y = x - np.mean(x), y - np.mean(y)
        spread = np.sum(x * x) * np.sum(y * y)
        return np.sum(x * y) / spread**0.5 if spread > 0 else 0.0

    def ranks(x):
        """The number of smaller values, and half of the equal ones."""
        return np.array([np.sum(x < value) + np.sum(x == value) / 2 for value in x])

    wide = labels.astype(float), predicted.astype(float)
    expected = correlation(*wide), correlation(*map(ranks, wide))
    assert (found['pearson'], found['spearman']) == pytest.approx(expected, abs=1e-6)
    assert found['mean_squared_error'] == pytest.approx(sum((a - b) ** 2 for a, b in pairs) / len(pairs))


def test_correlations_by_hand():
    """Deviations -1 0 1 and -2 -1 3: 5 / sqrt(2 * 14). Of ranks 1 2 3 4 and 1 2.5 2.5 4: 4.5 / sqrt(5 * 4.5)."""
    found = scores.regression_scores(np.array([1, 2, 3]), np.array([0, 1, 5]))
    assert found == near(pearson=5 / 28**0.5, spearman=1, mean_squared_error=2)
    tied = scores.regression_scores(np.array([1, 2, 3, 4]), np.array([0, 7, 7, 9]))
    assert tied['spearman'] == pytest.approx(4.5 / (5 * 4.5) ** 0.5)
    one, nothing = scores.regression_scores(np.array([1]), np.array([3])), np.array([])
    assert one == near(pearson=0, spearman=0, mean_squared_error=4)
    assert scores.regression_scores(nothing, nothing) == near(pearson=0, spearman=0, mean_squared_error=0)


# -------------------------------------------------------------------------------------------------- plain tags
def test_plain_tags_by_hand():
    """A: 1 right, 2 missing; B: 1 right, 1 too many; C: 1 missing. The last two words have no prediction."""
    found = scores.tag_scores([['A', 'A'], ['B', 'C', 'A']], [['A', 'B'], ['B', None, None]])
    assert found == near(tag_accuracy=2 / 5, tag_f1_macro=(2 / 4 + 2 / 3 + 0) / 3)
    never_right = scores.tag_scores([['A', 'A']], [['A', 'B']])  # B occurs, too, though only as a prediction
    assert never_right == near(tag_accuracy=1 / 2, tag_f1_macro=(2 / 3 + 0) / 2)
    assert scores.tag_scores([], []) == near(tag_accuracy=0, tag_f1_macro=0)


# --------------------------------------------------------------------------------------------------- retrieval
def test_ranks_count_nearer_texts_and_ties_but_not_the_query_itself():
    texts = np.array([[1.0, 0], [0, 1], [0.6, 0.8], [0.6, -0.8]])
    queries = np.array([[1.0, 0], [1, 0], [0, 1], [1, 0]])  # products 1 0 .6 .6, and 0 1 .8 -.8
    right, itself = np.array([2, 2, 0, 0]), np.array([-1, 0, -1, 0])
    assert scores.ranks(queries, texts, right, itself).tolist() == [3, 2, 3, 1]
    three = np.tile(queries[:3], (700, 1)), texts, np.tile(right[:3], 700), np.tile(itself[:3], 700)
    assert scores.ranks(*three).tolist() == [3, 2, 3] * 700  # more than are compared at once


def test_retrieval_by_hand():
    """Ranks 1, 3, 10 and 12: gains 1, 1/log2(4), 1/log2(11) and none."""
    found = scores.retrieval_scores(np.array([1, 3, 10, 12]))
    assert found == near(
        recall_at_1=1 / 4,
        recall_at_5=2 / 4,
        recall_at_10=3 / 4,
        mean_reciprocal_rank=(1 + 1 / 3 + 1 / 10 + 1 / 12) / 4,
        ndcg_at_10=(1 + 1 / 2 + 1 / np.log2(11)) / 4,
    )
    assert set(scores.retrieval_scores(np.zeros(0, int)).values()) == {0}


# ---------------------------------------------------------------------------------------------------- entities
TAG = st.sampled_from(['O', 'O', 'B-X', 'I-X', 'B-Y', 'I-Y', 'E-X', 'S-Y', 'I-Y-Z', 'B', 'I'])
SENTENCES = st.lists(st.lists(st.tuples(TAG, TAG), max_size=8), min_size=1, max_size=5)


@settings(deadline=None, max_examples=300)
@given(SENTENCES)
def test_entity_scores_are_seqevals(sentences):
    seqeval = pytest.importorskip('seqeval.metrics.sequence_labeling')
    gold, predicted = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    found = scores.entity_scores(gold, predicted)
    expected = seqeval.precision_recall_fscore_support(gold, predicted, average='micro', zero_division=0)[:3]
    assert [found[f'entity_{name}'] for name in ('precision', 'recall', 'f1')] == pytest.approx(expected)


def test_entities_by_hand():
    assert scores.entities('B-X I-X O B-X B-X'.split()) == {('X', 0, 1), ('X', 3, 3), ('X', 4, 4)}
    assert scores.entities('I-X I-X I-Y O I-X'.split()) == {('X', 0, 1), ('Y', 2, 2), ('X', 4, 4)}
    assert scores.entities('B-X I-Y'.split()) == {('X', 0, 0), ('Y', 1, 1)}
    assert scores.entities('B-X E-X S-X S-X I-X'.split()) == {('X', 0, 1), ('X', 2, 2), ('X', 3, 3), ('X', 4, 4)}
    assert scores.entities(['B-X', 'hm', '', 'I-X', 'BX', 'o']) == {('X', 0, 0), ('X', 3, 3)}
    assert scores.entities([]) == scores.entities(['O', 'O']) == set()


def test_entity_scores_by_hand():
    """Gold X(0, 1) and Y(3); said X(0, 1), X(3), Y(4): one of three is right, of two found."""
    gold, said = ['B-X I-X O B-Y O'.split(), ['O']], ['B-X I-X O B-X B-Y'.split(), ['O']]
    assert scores.entity_scores(gold, said) == near(entity_precision=1 / 3, entity_recall=1 / 2, entity_f1=2 / 5)
    shorter = scores.entity_scores([['B-X', 'I-X']], [['B-X', 'O']])  # both ends must be right
    none = near(entity_precision=0, entity_recall=0, entity_f1=0)
    assert shorter == scores.entity_scores([['O']], [['O']]) == scores.entity_scores([], []) == none


def test_tags_in_text_are_cut_or_filled():
    found = text_scores.entity_f1(['B-X', 'B-X O B-Y', '', 'we do'], [['B-X O'], ['B-X O'], ['B-X'], ['O']])
    assert found == near(entity_precision=1, entity_recall=2 / 3, entity_f1=4 / 5)


# ----------------------------------------------------------------------------------------------------- answers
ANSWERED = [  # prediction, answers, exact match, F1
    ('The Cat!', ['a cat'], 1, 1),
    ('the black cat', ['cat', 'dog'], 0, 2 / 3),
    ('black cat', ['cat', 'black, cat.'], 1, 1),
    ('cat cat dog', ['cat bird'], 0, 2 / 5),  # a word counts as often as both have it
    ('theatre', ['atre'], 0, 0),  # articles are words
    ('U.S.A.', ['usa'], 1, 1),
    ('an\u00a0apple\n', ['apple'], 1, 1),
    ('caf\u00e9 \u201cx\u201d', ['CAF\u00c9 x'], 0, 1 / 2),  # punctuation is ASCII's
    ('', ['cat'], 0, 0),
]
UNANSWERED = [('', [''], 1, 1), ('', [], 1, 1), ('the', [''], 1, 1), ('cat', ['', 'the'], 0, 0)]


@pytest.mark.parametrize(('prediction', 'answers', 'exact', 'f1'), ANSWERED + UNANSWERED)
def test_answers_by_hand(prediction, answers, exact, f1):
    found = scores.squad_scores([prediction], [answers])
    assert (found['squad_exact_match'], found['squad_f1']) == pytest.approx((exact, f1))


def test_answers_of_both_kinds():
    answered = [row[:2] for row in ANSWERED]
    found = scores.squad_scores(*zip(*answered, strict=True))
    assert found == near(squad_exact_match=4 / 9, squad_f1=(4 + 2 / 3 + 2 / 5 + 1 / 2) / 9)
    both = scores.squad_scores(*zip(*answered, *(row[:2] for row in UNANSWERED), strict=True))
    assert both['no_answer_accuracy'] == 3 / 4
    assert both['has_answer_f1'] == found['squad_f1']
    assert both['squad_f1'] == pytest.approx((9 * found['squad_f1'] + 3) / 13)
    assert scores.squad_scores([''], [[]])['has_answer_f1'] == 0
    assert scores.squad_scores([], []) == near(squad_exact_match=0, squad_f1=0)


# ---------------------------------------------------------------------------------- labels, numbers, tags as text
def test_labels_in_text_are_classes():
    said, right = ['yes', 'yes', 'no', 'no', 'no', 'maybe'], ['yes', 'no', 'no', 'no', 'yes', 'yes']
    found = text_scores.label_f1(said, [[label] for label in right], 'yes')
    assert found['f1'] == pytest.approx(2 * 1 / (2 + 3))
    assert found['f1_macro'] == pytest.approx((2 / 5 + 2 * 2 / (3 + 3)) / 2)  # 'maybe' is a miss, not a class
    assert text_scores.label_f1(said, [[label] for label in right]) == near(f1_macro=found['f1_macro'])
    expected = plain_class_scores(right, said, 'yes')['matthews']  # where 'maybe' is a class
    assert text_scores.matthews(said, [[label] for label in right]) == pytest.approx(expected)


def test_labels_in_text_where_little_occurs():
    assert text_scores.label_f1(['a', 'x'], [['b', 'a'], ['b', 'a']], 'b') == near(f1_macro=1 / 2, f1=0)
    assert text_scores.label_f1(['a'] * 3, [['a']] * 3, 'never') == near(f1_macro=1, f1=0)
    assert text_scores.label_f1(list('abcdefg'), [[label] for label in 'abcdefg'], 'a') == near(f1_macro=1, f1=1)
    assert text_scores.label_f1([], [], 'a') == near(f1_macro=0, f1=0)
    assert text_scores.label_f1([''], [['a']], 'a') == near(f1_macro=0, f1=0)
    assert (
        text_scores.matthews(['a', 'a'], [['a'], ['b']])
        == text_scores.matthews(['a'], [['a']])
        == text_scores.matthews([], [])
        == 0
    )


def test_numbers_in_text():
    right = [['1.0'], ['2'], ['6']]
    assert text_scores.correlation(['0.5', ' 1', '3e0'], right) == near(pearson=1, spearman=1)
    said = text_scores.correlation(['1', '', '4'], right)  # '' is 3, the mean of the references
    assert said == near(pearson=7 / (42 / 9 * 14) ** 0.5, spearman=1)  # deviations -5/3 1/3 4/3 and -2 -1 3
    assert text_scores.correlation(['one', 'nan', 'inf'], right) == near(pearson=0, spearman=0)
    assert text_scores.correlation([], []) == near(pearson=0, spearman=0)
    with pytest.raises(UserError, match="a reference is 'two'"):
        text_scores.correlation(['1', '2'], [['1'], ['two']])


# --------------------------------------------------------------------------------------------- generated text
PREDICTIONS = ['The cat sat on the mat.', '', 'A \u201cdog\u201d\u2026 barks - well-known!', 'no\nmore of it']
REFERENCES = [
    ['A cat sat on the mats.', 'The cats sat on a mat.'],
    ['Nothing is said.'],
    ['The \u201cdog\u201d barks, well-known!', 'A \u201cdog\u201d barks', 'Dogs bark'],
    ['of it more\nno'],
]


def columns(references):
    most = max(map(len, references))
    return [[options[i] if i < len(options) else None for options in references] for i in range(most)]


def test_bleu_and_chrf_are_sacrebleus():
    for metric, reference in ((text_scores.bleu(None), sacrebleu.BLEU()), (text_scores.chrf(None), sacrebleu.CHRF())):
        expected = reference.corpus_score(PREDICTIONS, columns(REFERENCES)).score
        assert text_scores.corpus_score(metric, PREDICTIONS, REFERENCES) == expected > 0
        assert text_scores.corpus_score(metric, [], []) == 0
        assert text_scores.corpus_score(metric, [''], [['a b']]) == 0


def test_bleu_of_chinese_is_of_characters():
    """Of 4 characters 3 are right, of 3 pairs 2, of 2 triples 1, of 1 quadruple none: 1/2 of one by smoothing."""
    found = text_scores.corpus_score(
        text_scores.bleu('zh'), ['\u6211\u7231\u4f60\u4eec'], [['\u6211\u7231\u4f60\u5417']]
    )
    assert found == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25)
    assert 'tok:zh' in metrics.signature('bleu', Evaluate(language='zh'), [['a']])
    assert 'tok:13a' in metrics.signature('bleu', Evaluate(language='de'), [['a']])


def test_compounds_are_split_as_the_script_does():
    split = ' ##AT##-##AT## '
    assert text_scores.split_compounds('rich-text - x- -y') == f'rich{split}text - x- -y'
    assert text_scores.split_compounds('aa-bb-cc') == f'aa{split}bb{split}cc'
    assert text_scores.split_compounds('a-b-c') == f'a{split}b-c'


def test_bleu_tokenized_by_hand():
    """Said: Das Reich ##AT##-##AT## Tor , ja . (7 tokens); right: Das U ##AT##-##AT## Tor , ja . (7).

    n-grams that both have: 6 of 7, 4 of 6, 3 of 5, 2 of 4 (- Tor , ja and Tor , ja .).
    """
    pytest.importorskip('sacremoses')
    metric = text_scores.bleu_tokenized('de')
    found = text_scores.corpus_score(metric, ['Das Reich-Tor, ja.'], [['Das U-Tor, ja.']])
    assert found == pytest.approx(100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25)
    short = text_scores.corpus_score(metric, ['Das U-Tor,'], [['Das U-Tor, ja.']])  # 5 tokens of 7, all of them right
    assert short == pytest.approx(100 * np.exp(1 - 7 / 5))
    several = [['Das U-Tor, ja.', 'Das Reich-Tor.']]
    assert text_scores.corpus_score(metric, ['Das Reich-Tor, ja.'], several) == pytest.approx(
        100 * (7 / 7 * 6 / 6 * 5 / 5 * 3 / 4) ** 0.25
    )
    assert text_scores.corpus_score(metric, ['Das U'], [['Das U-Tor, ja.']]) == 0  # not smoothed
    assert text_scores.corpus_score(metric, [], []) == text_scores.corpus_score(metric, [''], [['a']]) == 0


def test_bleu_tokenized_goes_by_the_language():
    """French keeps an apostrophe at the word before, German apart: one token more to get right."""
    pytest.importorskip('sacremoses')
    said, right = ["l'eau est ici l\u00e0"], [["l'eau est ici bas"]]
    french, german = (
        text_scores.corpus_score(text_scores.bleu_tokenized(language), said, right) for language in ('fr', 'de')
    )
    assert french == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert german == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)


def test_signatures_say_what_was_compared():
    for name in ('bleu', 'chrf'):
        assert metrics.signature(name, Evaluate(), REFERENCES).startswith('nrefs:var|')
        assert metrics.signature(name, Evaluate(), [['a', 'b']] * 2).startswith('nrefs:2|')
    assert metrics.signature('exact_match', Evaluate(), REFERENCES) == ''
    pytest.importorskip('sacremoses')
    said = metrics.signature('bleu_tokenized', Evaluate(language='de'), [['a']])
    version = importlib.metadata.version('sacremoses')
    assert f'tok:sacremoses-{version}-de-compounds|smooth:none' in said


def test_rouge_is_the_packages():
    rouge_scorer = pytest.importorskip('rouge_score.rouge_scorer')
    names = ['rouge1', 'rouge2', 'rougeL', 'rougeLsum']
    scorer, found = rouge_scorer.RougeScorer(names, use_stemmer=True), text_scores.rouge(PREDICTIONS, REFERENCES)
    for name in names:
        best = [
            max(scorer.score(right, said)[name].fmeasure for right in options)
            for said, options in zip(PREDICTIONS, REFERENCES, strict=True)
        ]
        assert found[name] == pytest.approx(np.mean(best)) and found[name] > 0
    assert found['rougeLsum'] != found['rougeL']


def test_rouge_by_hand():
    """cats stems to cat: 3 words of 4 are right, 1 pair (the cat) of 3, and in order 2 words; a line is a sentence."""
    pytest.importorskip('rouge_score')
    found = text_scores.rouge(['The cats\nslept here'], [['here sat the cat']])
    assert found == near(rouge1=3 / 4, rouge2=1 / 3, rougeL=2 / 4, rougeLsum=3 / 4)
    assert (
        text_scores.rouge([], []) == text_scores.rouge([''], [['a']]) == near(rouge1=0, rouge2=0, rougeL=0, rougeLsum=0)
    )


def test_error_rates_by_hand():
    """kitten -> sitting takes 3 edits of 7 characters; the nearest reference decides, the longer one in a tie."""
    assert text_scores.error_rate(['kitten'], [['sitting']], list) == 3 / 7
    assert text_scores.error_rate(['kitten', ''], [['sitting'], ['abc']], list) == 6 / 10
    assert text_scores.error_rate(['a b c'], [['x', 'a b d']], str.split) == 1 / 3
    assert text_scores.error_rate(['a', 'a'], [['b', 'b c'], ['a']], str.split) == 2 / 3
    assert text_scores.error_rate([], [], list) == text_scores.error_rate([''], [['']], list) == 0
    assert text_scores.exact_match(['a', 'b '], [['b', 'a'], ['b']]) == 1 / 2
    assert text_scores.exact_match([], []) == 0
    found = metrics.METRICS['g2p'].scores(['A B', 'C', 'D'], [['A X', 'A B'], ['C'], ['E F']], Evaluate())
    assert found == near(word_error_rate=1 / 3, phoneme_error_rate=2 / 5)


# ------------------------------------------------------------------------------------------------- the choices
PERFECT = {
    'label_f1': ['yes', 'no', 'yes'],
    'matthews': ['yes', 'no', 'yes'],
    'correlation': ['1.5', '-3', '2'],
    'entity_f1': ['B-X I-X O', 'O', 'B-Y'],
}
TEXTS = ['The cat sat on the mat.', 'It is a well-known, old \u201ctale\u201d of four words', 'yes it is so, twice']


def installed(name):
    package = metrics.METRICS[name].package
    return package is None or importlib.util.find_spec(package) is not None


@pytest.mark.parametrize('name', metrics.METRICS)
def test_a_perfect_prediction_has_the_best_score(name):
    if not installed(name):
        pytest.skip(f'{metrics.METRICS[name].package} is not installed')
    asked = Evaluate(metrics=(name,), language='en', positive_label='yes')
    texts = PERFECT.get(name, TEXTS)
    records = [{'source': 'yes', 'target': text, 'references': ['7', text][name in PERFECT :]} for text in texts]
    perfect = metrics.generation_scores(asked, texts, records)
    other = metrics.generation_scores(asked, [*texts[:-1], 'B-X no'], records)
    none = metrics.generation_scores(asked, [], [])
    names = metrics.METRICS[name].names_for(asked)
    assert set(names) <= set(perfect) and set(names) <= set(none)
    for score in names:
        worst, best = (0, 0) if checkpoint.score(score, 1) < 0 else (0, 100 if name in metrics.SIGNED else 1)
        assert perfect[score] == pytest.approx(best)
        assert checkpoint.score(score, other[score]) < checkpoint.score(score, perfect[score])
        assert none[score] == worst
    assert (f'copying_the_source_{name}' in perfect) == (name in metrics.SIGNED)


def test_less_error_is_better():
    assert checkpoint.score('valid/mean_squared_error', 1) > checkpoint.score('valid/mean_squared_error', 2)
    for name in ('f1', 'f1_macro', 'matthews', 'pearson', 'entity_f1', 'squad_f1', 'no_answer_accuracy', 'rougeLsum'):
        assert checkpoint.score(f'valid/{name}', 1) < checkpoint.score(f'valid/{name}', 2)


def test_a_record_without_references_has_its_target():
    records = [{'source': 's', 'target': 't'}, {'source': 's', 'target': 't', 'references': []}]
    records.append({'source': 's', 'target': 't', 'references': ['u']})
    found = metrics.generation_scores(Evaluate(metrics=('exact_match',)), ['t', 't', 't'], records)
    assert found == near(exact_match=2 / 3)


def asked(**evaluate):
    return config_lib.override(Config(), {'train.num_steps': '1', 'train.objective': 'seq2seq'} | SEQ2SEQ | evaluate)


SEQ2SEQ = {'model.family': 'encoder_decoder'}


@pytest.mark.parametrize(('name', 'package'), [('rouge', 'rouge_score'), ('bleu_tokenized', 'sacremoses')])
def test_a_missing_package_is_said_before_the_run(name, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda wanted: None if wanted == package else find(wanted))
    with pytest.raises(UserError, match=rf"metrics={name} needs .* {package}: pip install 'tformer\[metrics\]'$"):
        checks.check_here(asked(**{'evaluate.metrics': name}))
    checks.check_here(asked(**{'evaluate.metrics': 'bleu,chrf'}))


def test_a_language_that_does_not_do_is_said_before_the_run():
    with pytest.raises(UserError, match=r'evaluate.language=german must be a code of two letters'):
        checks.check_here(asked(**{'evaluate.language': 'german'}))
    if importlib.util.find_spec('MeCab') is None:
        with pytest.raises(UserError, match=r"language=ja needs more packages: pip install 'sacrebleu\[ja\]'"):
            checks.check_here(asked(**{'evaluate.language': 'ja', 'evaluate.metrics': 'bleu'}))
    pytest.importorskip('sacremoses')
    for language in ('None', 'xx'):
        with pytest.raises(UserError, match=f'bleu_tokenized needs evaluate.language, .*not {language}; valid: .*de'):
            checks.check_here(asked(**{'evaluate.language': language, 'evaluate.metrics': 'bleu_tokenized'}))
    for language in ('de', 'ru'):
        checks.check_here(asked(**{'evaluate.language': language, 'evaluate.metrics': 'bleu_tokenized'}))


@pytest.mark.proof
def test_a_run_has_the_scores_of_its_positive_class(tmp_path):
    changes = {'data.path': str(toy_data.labelled(tmp_path / 'data')), 'mesh.data': '1', 'evaluate.samples': '0'}
    changes |= {'train.best_metric': 'valid/f1', 'evaluate.positive_label': 'bird'}
    recipe = f'{ROOT}/configs/classify.py:smoke'
    chosen = config_lib.load(recipe, changes)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        found = train_command.train_and_evaluate(chosen, str(tmp_path / 'run'))
    assert {f'valid/{name}' for name in found} >= set(scorer_lib.score_names(chosen))
    assert 'valid/f1' not in scorer_lib.score_names(config_lib.override(chosen, {'evaluate.positive_label': 'None'}))
    with pytest.raises(UserError, match=r"evaluate.positive_label='birds' is unknown; did you mean 'bird'\?"):
        train_command.train_and_evaluate(
            config_lib.override(chosen, {'evaluate.positive_label': 'birds'}), str(tmp_path / 'other')
        )
