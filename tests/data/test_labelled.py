"""Labelled records: every task from every format, bad data by the line, templates, samples, lent tokenizers."""

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from places import ROOT
from tformer import checks
from tformer import config as config_lib
from tformer.config.run import Config, Data, Model, Train
from tformer.config.tasks import TASKS, named
from tformer.data.batches import mixture, pipeline
from tformer.data.sources import fields, prepare, records, sources
from tformer.data.sources.records import Bad
from tformer.data.tokenizers import tokenizers, vocabulary
from tformer.errors import UserError
from tformer.training import workdir

# ------------------------------------------------------------------------------------- every task from every format


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
    return folder


def lines(*rows: object) -> str:
    return ''.join(json.dumps(row) + '\n' for row in rows)


def load(file: Path, objective: str, **data: object) -> list[sources.Record]:
    return list(split_of(file, objective, **data))


def split_of(file: Path, objective: str, **data: object) -> records.Split:
    return sources.load(Data(**{'test_path': (str(file),), **data}), objective, 'test')


def unplaced(found: list[sources.Record]) -> list[sources.Record]:
    return [{field: value for field, value in record.items() if field != 'where'} for record in found]


SQUAD = {'text': ['the mat', 'mat'], 'answer_start': [11, 15]}
ASKED = {'question': 'Where?', 'context': 'It sits on the mat.', 'answers': [(11, 'the mat'), (15, 'mat')]}
UNANSWERED = {'question': 'Why?', 'context': 'It sits.', 'answers': []}
PAIRED = [{'label': 'yes', 'text': 'a b', 'pair': 'c'}, {'label': 'no', 'text': 'd', 'pair': 'e f'}]
POS = ('PRON', 'VERB', 'PROPN', 'NOUN')
SPOKEN = [{'tokens': ['I', 'see'], 'tags': ['PRON', 'VERB']}, {'tokens': ['O'], 'tags': ['PROPN']}]
NEGATIVES = [
    {'text': 'a', 'positive': 'b', 'negative': ['c'], 'texts': ['a', 'b', 'c']},
    {'text': 'd', 'positive': 'e', 'negative': ['f', 'g'], 'texts': ['d', 'e', 'f', 'g']},
]
TAGGED = [
    {'tokens': ['Ada', 'Byron', 'met', 'Ann'], 'tags': ['B-PER', 'I-PER', 'O', 'B-PER']},
    {'tokens': ['#', 'York'], 'tags': ['O', 'B-LOC']},
]
KINDS = {  # (objective, name of the file, its content, data fields, the records)
    'class tsv': ('classification', 'a.tsv', 'yes\ta b\nno\td\n', {},
                  [{'label': 'yes', 'text': 'a b'}, {'label': 'no', 'text': 'd'}]),
    'class pair tsv': ('classification', 'a.tsv', 'yes\ta b\tc\nno\td\te f\n', {}, PAIRED),
    'class columns tsv': ('classification', 'a.tsv.gz', 'c\t9\ta b\tyes\ne f\t8\td\tno\n',
                          {'columns': ('pair', 'x', 'text', 'label')}, PAIRED),
    'class jsonl': ('classification', 'a.jsonl', lines({'label': 'yes', 'text': 'a'}, {'label': 3, 'text': 'b'},
                    {'label': 0.5, 'text': 'c'}), {},
                    [{'label': 'yes', 'text': 'a'}, {'label': '3', 'text': 'b'}, {'label': '0.5', 'text': 'c'}]),
    'class pair jsonl': ('classification', 'a.jsonl', lines(*PAIRED), {}, PAIRED),
    'class keys jsonl': ('classification', 'a.jsonl', lines({'y': 'yes', 's1': 'a b', 's2': 'c'},
                         {'y': 'no', 's1': 'd', 's2': 'e f'}), {'columns': ('y', 's1', 's2')}, PAIRED),
    'class two keys jsonl': ('classification', 'a.jsonl', lines({'y': 'yes', 's1': 'a', 's2': 'c'}),
                             {'columns': ('y', 's1')}, [{'label': 'yes', 'text': 'a'}]),
    'number tsv': ('regression', 'a.tsv', '1.5\ta\n-2e1\tb\n', {},
                   [{'label': 1.5, 'text': 'a'}, {'label': -20.0, 'text': 'b'}]),
    'number pair tsv': ('regression', 'a.tsv', '5\ta\tb\n', {'label_range': (0.0, 5.0)},
                        [{'label': 5.0, 'text': 'a', 'pair': 'b'}]),
    'number jsonl': ('regression', 'a.jsonl', lines({'label': 2, 'text': 'a'}, {'label': '0.25', 'text': 'b'}), {},
                     [{'label': 2.0, 'text': 'a'}, {'label': 0.25, 'text': 'b'}]),
    'positives tsv': ('contrastive', 'a.tsv', 'a\tb\nc\td\n', {},
                      [{'text': 'a', 'positive': 'b', 'texts': ['a', 'b']},
                       {'text': 'c', 'positive': 'd', 'texts': ['c', 'd']}]),
    'negative tsv': ('contrastive', 'a.tsv', 'a\tb\tc\n', {}, NEGATIVES[:1]),
    'negatives jsonl': ('contrastive', 'a.jsonl', lines({'q': 'a', 'd+': 'b', 'd-': 'c'},
                        {'q': 'd', 'd+': 'e', 'd-': ['f', 'g']}), {'columns': ('q', 'd+', 'd-')}, NEGATIVES),
    'similarity tsv': ('cosine_similarity', 'a.tsv', '5\ta\tb\n', {'label_range': (0.0, 5.0)},
                       [{'label': 5.0, 'text': 'a', 'pair': 'b', 'texts': ['a', 'b']}]),
    'tags tsv': ('token_classification', 'a.tsv',
                 'Ada Byron met Ann\tB-PER I-PER O B-PER\n# York\tO B-LOC\n', {}, TAGGED),
    'tags jsonl': ('token_classification', 'a.jsonl', lines(*TAGGED), {'labels': ('LOC', 'PER')}, TAGGED),
    'tags conll': ('token_classification', 'a.conll', '-DOCSTART- O\n\nAda B-PER\nByron I-PER\nmet O\nAnn B-PER\n\n\n'
                   '# O\nYork\tB-LOC', {}, TAGGED),
    'tags iob1 conll': ('token_classification', 'a.conll.gz', '-DOCSTART- -X- O O\r\n\r\nAda NNP I-NP I-PER\r\n'
                        'Byron NNP I-NP I-PER\r\nmet VBD I-VP O\r\nAnn NNP I-NP I-PER\r\n-DOCSTART- -X- O O\r\n'
                        '# NN I-NP O\r\nYork NN I-NP I-LOC\r\n', {}, TAGGED),
    'tags columns conll': ('token_classification', 'a.conll', '1 O # x\n2 B-LOC York y\n',
                           {'columns': ('i', 'tags', 'tokens', 'j')}, TAGGED[1:]),
    'plain tags conll': ('token_classification', 'a.conll', 'I PRON\nsee VERB\n\nO PROPN\n', {'labels': POS}, SPOKEN),
    'plain tags tsv': ('token_classification', 'a.tsv', 'I see\tPRON VERB\nO\tPROPN\n', {}, SPOKEN),
    'choices jsonl': ('multiple_choice', 'a.jsonl', lines({'context': 'a', 'choices': ['b', 'c'], 'label': 1},
                      {'context': 'd', 'choices': ['e', 'f', 'g'], 'label': '0'}), {},
                      [{'context': 'a', 'choices': ['b', 'c'], 'label': 1},
                       {'context': 'd', 'choices': ['e', 'f', 'g'], 'label': 0}]),
    'answers jsonl': ('question_answering', 'a.jsonl', lines({**ASKED, 'answers': SQUAD}, {**UNANSWERED, 'answers':
                      {'text': [], 'answer_start': []}}), {}, [ASKED, UNANSWERED]),
    'answers list jsonl': ('question_answering', 'a.jsonl', lines({**ASKED, 'answers': [
                           {'text': 'the mat', 'answer_start': 11}, {'text': 'mat', 'answer_start': 15}]}, UNANSWERED),
                           {}, [ASKED, UNANSWERED]),
    'pairs jsonl': ('seq2seq', 'a.jsonl', lines({'source': 'a', 'target': 'b', 'references': ['b', 'c']}), {},
                    [{'source': 'a', 'target': 'b', 'references': ['b', 'c']}]),
}  # fmt: skip


@pytest.mark.parametrize('case', KINDS)
def test_records_of_files(tmp_path: Path, case: str) -> None:
    objective, name, content, data, expected = KINDS[case]
    file = write(tmp_path, {name: content}) / name
    assert unplaced(load(file, objective, **data)) == expected


@pytest.mark.parametrize('objective', ['masked_lm_nsp', 'masked_lm_sop', 'replaced_token', 'ul2'])
def test_objectives_on_text_read_what_masked_lm_reads(tmp_path: Path, objective: str) -> None:
    place = write(tmp_path, {'a.txt': 'one\ntwo\n\nthree\n', 'b.tsv': 'x\tone\n', 'c.jsonl': lines({'text': 'one'})})
    for name in ('a.txt', 'b.tsv', 'c.jsonl'):
        assert load(place / name, objective) == load(place / name, 'masked_lm') != []


def test_where_a_record_stands(tmp_path: Path) -> None:
    files = {'a.tsv': '\nyes\ta\n\nno\tb\n', 'a.jsonl': '\n' + lines({'label': 1, 'text': 'a'}),
             'a.conll': '-DOCSTART- O\n\nYork B-LOC\nis O\n\nhere O\n'}  # fmt: skip
    place = write(tmp_path, files)
    assert [r['where'] for r in load(place / 'a.tsv', 'classification')] == [f'{place}/a.tsv:2', f'{place}/a.tsv:4']
    assert [r['where'] for r in load(place / 'a.jsonl', 'regression')] == [f'{place}/a.jsonl:2']
    found = load(place / 'a.conll', 'token_classification')
    assert [r['where'] for r in found] == [f'{place}/a.conll:3', f'{place}/a.conll:6']


def test_held_out_by_what_must_not_be_in_two_splits(tmp_path: Path) -> None:
    asked = [{'question': f'{i}?', 'context': f'text {i % 200}', 'answers': []} for i in range(2000)]
    tagged = ''.join(f'word{i % 500}\tO\n' for i in range(2000))
    place = write(tmp_path, {'a.jsonl': lines(*asked), 'b.tsv': tagged})
    for name, objective, field in (('a.jsonl', 'question_answering', 'context'),
                                   ('b.tsv', 'token_classification', 'tokens')):  # fmt: skip
        parts = [list(sources.load(Data(path=(str(place / name),)), objective, s)) for s in sources.SPLITS]
        values = [{str(record[field]) for record in part} for part in parts]
        assert sum(map(len, parts)) == 2000 and all(parts)
        assert sum(map(len, values)) == len(set.union(*values))


def test_iob1_becomes_bio_by_hand() -> None:
    for iob1, bio in (
        ('I-A I-A O I-A', 'B-A I-A O B-A'),
        ('I-A B-A I-A', 'B-A B-A I-A'),  # neighbours of one type
        ('I-A I-B I-B', 'B-A B-B I-B'),
        ('O O', 'O O'),
    ):
        assert fields.bio(iob1.split()) == bio.split()


@given(st.lists(st.sampled_from(['O', 'B-A', 'I-A', 'B-B', 'I-B']), max_size=12))
def test_bio_stays_as_it_is(tags: list[str]) -> None:
    once = fields.bio(tags)
    assert fields.bio(once) == once
    assert [tag[2:] for tag in once] == [tag[2:] for tag in tags]
    assert all(last[2:] == tag[2:] for last, tag in zip(['O', *once], once, strict=False) if tag[0] == 'I')


# ---------------------------------------------------------------------------------------------------------- mistakes

CONTEXT = {'question': 'Where?', 'context': 'on the mat', 'answers': {'text': ['mat'], 'answer_start': [7]}}
GOOD = {  # a good line of each
    ('classification', 'tsv'): 'yes\ta\n',
    ('classification', 'jsonl'): lines({'label': 'yes', 'text': 'a'}),
    ('regression', 'tsv'): '1\ta\n',
    ('regression', 'jsonl'): lines({'label': 1, 'text': 'a'}),
    ('token_classification', 'tsv'): 'a b\tO B-PER\n',
    ('token_classification', 'jsonl'): lines({'tokens': ['a'], 'tags': ['O']}),
    ('token_classification', 'conll'): 'a x O\nb y B-PER\n\n',
    ('question_answering', 'jsonl'): lines(CONTEXT),
    ('contrastive', 'tsv'): 'a\tb\n',
    ('contrastive', 'jsonl'): lines({'text': 'a', 'positive': 'b', 'negative': ['c']}),
    ('cosine_similarity', 'tsv'): '1\ta\tb\n',
    ('multiple_choice', 'jsonl'): lines({'context': 'a', 'choices': ['b', 'c'], 'label': 1}),
    ('seq2seq', 'jsonl'): lines({'source': 'a', 'target': 'b'}),
}


def asked(**change: object) -> str:
    return lines({**CONTEXT, **change})


def answered(start: object, text: object = 'mat') -> str:
    return asked(answers={'text': [text], 'answer_start': [start]})


RANGE, LABELS = {'label_range': (0.0, 5.0)}, {'labels': ('yes', 'no')}
MISTAKES = [  # (objective, ending, the bad line, data fields, what is said after FILE:LINE)
    ('classification', 'tsv', 'yse\ta\n', LABELS, "label 'yse' is not in data.labels; did you mean 'yes'?"),
    ('classification', 'tsv', 'perhaps\ta\n', LABELS, "label 'perhaps' is not in data.labels; valid: yes, no"),
    ('classification', 'tsv', 'yes\n', {}, "1 tab-separated columns, expected 2 (label, text): 'yes'"),
    ('classification', 'tsv', 'yes\ta\tb\n', {}, "3 tab-separated columns, expected 2 (label, text): 'yes\\ta\\tb'"),
    ('classification', 'tsv', ' \ta\n', {}, 'label is empty'),
    ('classification', 'tsv', 'yes\t \n', {}, 'text is empty'),
    ('classification', 'tsv', b'yes\t\xff\n', {}, 'not UTF-8: byte 0xff'),
    ('classification', 'jsonl', lines({'label': ['yes'], 'text': 'a'}), {},
     "'label' is neither a string nor a number: ['yes']"),
    ('classification', 'jsonl', lines({'label': None, 'text': 'a'}), {},
     "'label' is neither a string nor a number: None"),
    ('classification', 'jsonl', lines({'lable': 'yes', 'text': 'a'}), {}, "no key 'label'; did you mean 'lable'?"),
    ('classification', 'jsonl', lines({'label': 'yes', 'text': 7}), {}, "'text' is not a string: 7"),
    ('classification', 'jsonl', lines({'label': 'yes', 'text': ''}), {}, 'text is empty'),
    ('classification', 'jsonl', lines({'label': 'yes', 'text': 'a', 'pair': 'b'}), {},
     "a key 'pair', unlike the lines before"),
    ('classification', 'jsonl', '["yes"]\n', {}, """not a JSON object: '["yes"]'"""),
    ('regression', 'tsv', 'high\ta\n', {}, "label 'high' is not a number"),
    ('regression', 'tsv', '1_0\ta\n', {}, "label '1_0' is not a number"),
    ('regression', 'tsv', '\ta\n', {}, "label '' is not a number"),
    ('regression', 'tsv', 'nan\ta\n', {}, 'label nan is not finite'),
    ('regression', 'tsv', '-inf\ta\n', {}, 'label -inf is not finite'),
    ('regression', 'tsv', '5.5\ta\n', RANGE, 'label 5.5 is outside data.label_range, from 0 to 5'),
    ('regression', 'tsv', '-1\ta\n', RANGE, 'label -1 is outside data.label_range, from 0 to 5'),
    ('regression', 'tsv', '1\t\n', {}, 'text is empty'),
    ('contrastive', 'tsv', 'a\t \n', {}, 'positive is empty'),
    ('contrastive', 'tsv', 'a\n', {}, "1 tab-separated columns, expected 2 (text, positive): 'a'"),
    ('contrastive', 'jsonl', lines({'text': 'a', 'positive': 'b', 'negative': ['c', ' ']}), {}, 'negative is empty'),
    ('contrastive', 'jsonl', lines({'text': 'a', 'positive': 'b', 'negative': [1]}), {},
     "'negative[0]' is not a string: 1"),
    ('contrastive', 'jsonl', lines({'text': 'a', 'positve': 'b', 'negative': 'c'}), {},
     "no key 'positive'; did you mean 'positve'?"),
    ('multiple_choice', 'jsonl', lines({'context': 'a', 'choices': ['b', 'c'], 'label': 2}), {},
     'label 2 is not the number of a choice, from 0 to 1'),
    ('multiple_choice', 'jsonl', lines({'context': 'a', 'choices': ['b', 'c'], 'label': 'b'}), {},
     "label 'b' is not the number of a choice, from 0 to 1"),
    ('multiple_choice', 'jsonl', lines({'context': 'a', 'choices': ['b'], 'label': 0}), {},
     'choices are 1: there must be two or more'),
    ('multiple_choice', 'jsonl', lines({'context': 'a', 'choices': ['b', ''], 'label': 0}), {}, 'choices is empty'),
    ('cosine_similarity', 'tsv', '5\ta\tb\n', {}, 'label 5 is no cosine: data.label_range is not set, e.g. to 0,5'),
    ('regression', 'jsonl', '{"label": NaN, "text": "a"}\n', {}, 'label nan is not finite'),
    ('regression', 'jsonl', '{"label": true, "text": "a"}\n', {},
     "'label' is neither a string nor a number: True"),
    ('classification', 'jsonl', '{"label": NaN, "text": "a"}\n', {}, 'label nan is not finite'),
    ('classification', 'jsonl', '{"label": 1e400, "text": "a"}\n', {}, 'label inf is not finite'),
    ('classification', 'jsonl', '{"label": true, "text": "a"}\n', {},
     "'label' is neither a string nor a number: True"),
    ('classification', 'tsv', 'A \ta\n', {}, "label 'A ' begins or ends with white space"),
    ('classification', 'jsonl', '{"label": "A", "text": "a", "text": "b"}\n', {},
     "not JSON: the key 'text' is given twice: '{\"label\": \"A\", \"text\": \"a\", \"text\": \"b\"}'"),
    ('regression', 'jsonl', '{"label": 1' + '0' * 400 + ', "text": "a"}\n', {}, 'label 1' + '0' * 39 +
     ' is not a number'),
    ('token_classification', 'tsv', 'a b\tO\n', {}, '2 tokens and 1 tags'),
    ('token_classification', 'tsv', '\tO\n', {}, 'tokens are empty'),
    ('token_classification', 'tsv', 'a  b\tO O\n', {}, 'token 2 is empty'),
    ('token_classification', 'tsv', 'a\tPER\n', {}, "tag 'PER' is neither O nor B-TYPE nor I-TYPE"),
    ('token_classification', 'tsv', 'a\tB-\n', {}, "tag 'B-' is neither O nor B-TYPE nor I-TYPE"),
    ('token_classification', 'tsv', 'a\tS-PER\n', {'labels': ('PER',)},
     "tag 'S-PER' is neither O nor B-TYPE nor I-TYPE; did you mean 'I-PER'?"),
    ('token_classification', 'tsv', 'a\tB-PRE\n', {'labels': ('LOC', 'PER')},
     "tag 'B-PRE': 'PRE' is not in data.labels; did you mean 'PER'?"),
    ('token_classification', 'jsonl', lines({'tokens': 'a', 'tags': ['O']}), {},
     "'tokens' is not a list of strings: 'a'"),
    ('token_classification', 'jsonl', lines({'tokens': ['a'], 'tags': [0]}), {}, "'tags[0]' is not a string: 0"),
    ('token_classification', 'jsonl', lines({'tokens': [], 'tags': []}), {}, 'tokens are empty'),
    ('question_answering', 'jsonl', answered(6), {},
     "answer 'mat' starts at 6, where its context has ' ma'; it stands at 7"),
    ('question_answering', 'jsonl', answered(3, 'dog'), {}, "answer 'dog' starts at 3, where its context has 'the'"),
    ('question_answering', 'jsonl', answered(10), {},
     "answer 'mat' starts at 10, outside its context of 10 characters"),
    ('question_answering', 'jsonl', answered(-3), {},
     "answer 'mat' starts at -3, outside its context of 10 characters"),
    ('question_answering', 'jsonl', answered(7, ''), {}, 'an answer is empty'),
    ('question_answering', 'jsonl', answered('7'), {}, "'answers': the start '7' is not a whole number"),
    ('question_answering', 'jsonl', answered(7, None), {}, "'answers.text[0]' is not a string: None"),
    ('question_answering', 'jsonl', asked(answers={'text': ['mat'], 'answer_start': []}), {},
     "'answers' has 1 texts and 0 starts"),
    ('question_answering', 'jsonl', asked(answers='mat'), {},
     "'answers' is not {\"text\": [...], \"answer_start\": [...]}: 'mat'"),
    ('question_answering', 'jsonl', asked(answers=['mat']), {},
     "'answers' is not {\"text\": [...], \"answer_start\": [...]}: ['mat']"),
    ('question_answering', 'jsonl', asked(question=' '), {}, 'question is empty'),
    ('question_answering', 'jsonl', asked(context='', answers=[]), {}, 'context is empty'),
    ('seq2seq', 'jsonl', lines({'source': 'a', 'target': 'b', 'references': 'b'}), {},
     "a key 'references', unlike the lines before"),
]  # fmt: skip


@pytest.mark.parametrize(('objective', 'ending', 'bad', 'data', 'said'), MISTAKES)
def test_bad_lines(tmp_path: Path, objective: str, ending: str, bad: str | bytes, data: dict, said: str) -> None:
    good, bad = GOOD[objective, ending].encode(), bad if isinstance(bad, bytes) else bad.encode()
    file = write(tmp_path, {f'a.{ending}': good + bad + good}) / f'a.{ending}'
    with pytest.raises(UserError) as error:
        load(file, objective, **data)
    assert str(error.value) == f'{file}:2: {said}'
    split = split_of(file, objective, bad_lines='skip', **data)
    only = write(tmp_path / 'good', {f'a.{ending}': good + good}) / f'a.{ending}'
    assert (unplaced(split), split.skipped) == (unplaced(load(only, objective, **data)), 1)


BAD_SENTENCES = [  # (the bad sentence, data fields, its line of those, what is said)
    ('c z O\nd O\n\n', {}, 5, "2 columns between spaces, expected 3 (tokens, column 2, tags): 'd O'"),
    ('c z O\nd z PER\n', {}, 5, "tag 'PER' is neither O nor B-TYPE nor I-TYPE"),
    ('c z B-PRE\n', {'labels': ('LOC', 'PER')}, 4, "tag 'B-PRE': 'PRE' is not in data.labels; did you mean 'PER'?"),
    (b'c z O\n\xff z O\nd z O\n', {}, 5, 'not UTF-8: byte 0xff'),
    (b'\xff z O\nd z O\n', {}, 4, 'not UTF-8: byte 0xff'),
    (b'd z O\nc\0 z O\n', {}, 5, 'it has a NUL byte, so it is not text'),
    (b'c\0 z O\nd O\n', {}, 4, 'it has a NUL byte, so it is not text'),
]  # fmt: skip


@pytest.mark.parametrize(('bad', 'data', 'line', 'said'), BAD_SENTENCES)
@pytest.mark.parametrize('last', [False, True])
def test_a_bad_line_spoils_its_sentence_alone(
    tmp_path: Path, bad: str | bytes, data: dict, line: int, said: str, last: bool
) -> None:
    good, bad = GOOD['token_classification', 'conll'].encode(), bad if isinstance(bad, bytes) else bad.encode()
    file = write(tmp_path, {'a.conll': good + bad + (b'' if last else b'\n' + good)}) / 'a.conll'
    with pytest.raises(UserError) as error:
        load(file, 'token_classification', **data)
    assert str(error.value) == f'{file}:{line}: {said}'
    split = split_of(file, 'token_classification', bad_lines='skip', **data)
    assert [record['tokens'] for record in split] == [['a', 'b']] * (1 if last else 2) and split.skipped == 1


def test_a_bad_first_line_does_not_decide_about_the_columns(tmp_path: Path) -> None:
    file = write(tmp_path, {'a.conll': 'lonely\n\nYork NNP B-LOC\n'}) / 'a.conll'
    with pytest.raises(UserError, match=r"a.conll:1: 1 columns between spaces, expected 2 \(tokens, tags\): 'lonely'$"):
        load(file, 'token_classification')
    split = split_of(file, 'token_classification', bad_lines='skip')
    assert [record['tags'] for record in split] == [['B-LOC']] and split.skipped == 1


UNFIT = [  # (objective, file, content, data fields, message)
    ('question_answering', 'a.tsv', 'q\tc\ta\n', {},
     '{} has no lists of answers and question_answering needs question and context and answers: use a .jsonl file'),
    ('token_classification', 'a.txt', 'a\n', {},
     '{} has only text and token_classification needs tokens and tags: use a .conll, .tsv or .jsonl file'),
    ('classification', 'a.conll', 'a O\n', {},
     '{} has tokens and tags and classification needs label and text: use a .tsv or .jsonl file'),
    ('classification', 'a.tsv', 'a\tb\n', {'columns': ('lable', 'text')},
     "data.columns=('lable', 'text') lacks 'label', which classification needs; did you mean 'lable'?"),
    ('token_classification', 'a.conll', 'a O\n', {'columns': ('token', 'tags')},
     "data.columns=('token', 'tags') lacks 'tokens', which token_classification needs; did you mean 'token'?"),
    ('classification', 'a.jsonl', '{}', {'columns': ('a', 'b', 'c', 'd')},
     "data.columns=('a', 'b', 'c', 'd') must name 2 fields: label, text, and may name pair"),
]  # fmt: skip


@pytest.mark.parametrize(('objective', 'name', 'content', 'data', 'said'), UNFIT)
def test_files_that_do_not_fit(tmp_path: Path, objective: str, name: str, content: str, data: dict, said: str) -> None:
    file = write(tmp_path, {name: content}) / name
    for rule in ('stop', 'skip'):
        with pytest.raises(UserError) as error:
            load(file, objective, bad_lines=rule, **data)
        assert str(error.value) == said.replace('{}', str(file))


def test_a_later_stage_reports_bad_records_by_the_same_rule() -> None:
    bad = Bad('skip')
    bad.found('a.tsv:3', 'why')
    bad.found('a.tsv:4', 'why')
    assert bad.skipped == 2
    with pytest.raises(UserError, match=r'^a.tsv:3: why$'):
        Bad('stop').found('a.tsv:3', 'why')


def test_what_is_good_depends_on_the_labels(tmp_path: Path) -> None:
    file = write(tmp_path, {'a.tsv': '1\ta\n'}) / 'a.tsv'
    changes = ({}, {'labels': ('1',)}, {'label_range': (0.0, 2.0)}, {'columns': ('label', 'text')})
    assert len({split_of(file, 'regression', **change).fingerprint for change in changes}) == 4
    text = {split_of(file, 'seq2seq', **change).fingerprint for change in changes[:3]}
    assert len(text) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just('a mat'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(['text', 'answer_start']), inner),
    max_leaves=6,
)
KEYS = ('label', 'text', 'pair', 'tokens', 'tags', 'question', 'context', 'answers')
ANYTHING = st.dictionaries(st.sampled_from(KEYS), JSON).map(json.dumps) | st.text(
    st.sampled_from('aO B-IX\t1.\n'), max_size=20
)
ONCE = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(
    content=ANYTHING, ending=st.sampled_from(['tsv', 'jsonl', 'conll']), objective=st.sampled_from(named('labelled'))
)
@ONCE
def test_anything_is_records_or_one_line(tmp_path: Path, content: str, ending: str, objective: str) -> None:
    file = write(tmp_path, {f'a.{ending}': content}) / f'a.{ending}'
    try:
        for record in load(file, objective):
            assert set(TASKS[objective].fields) <= record.keys() and record['where'].startswith(f'{file}:')
            assert all(text.strip() for text in records.texts(record, objective))
    except UserError as error:
        assert '\n' not in str(error)


# --------------------------------------------------------------------------------------------------------- templates

MNLI = {'source_template': 'mnli premise: {premise} hypothesis: {hypothesis}', 'target_template': '{label}'}
TEMPLATED = [  # (file, content, data fields, source, target)
    ('a.jsonl', lines({'premise': 'a b', 'hypothesis': 'c', 'label': 1}), MNLI, 'mnli premise: a b hypothesis: c', '1'),
    ('a.tsv', 'a b\tc\t7\tyes\n', {**MNLI, 'columns': ('premise', 'hypothesis', 'id', 'label')},
     'mnli premise: a b hypothesis: c', 'yes'),
    ('a.jsonl', lines(CONTEXT),
     {'source_template': '{question} {context}', 'target_template': '{answers[text][0]}'},
     'Where? on the mat', 'mat'),
    ('a.jsonl', lines({**CONTEXT, 'answers': [{'text': 'on'}]}),
     {'source_template': '{{{question}}}', 'target_template': '{answers[0][text]:>4}'}, '{Where?}', '  on'),
    ('a.jsonl', lines({'w': ['a', 'b'], 't': ['O', 'B-X']}), {'source_template': '{w}', 'target_template': '{t}'},
     'a b', 'O B-X'),
    ('a.conll', 'a O\nb B-X\n', {'source_template': '{tokens}', 'target_template': '{tags}'}, 'a b', 'O B-X'),
    ('a.conll', 'a NN O\nb NN B-X\n', {'source_template': '{w}', 'target_template': '{t}', 'columns': ('w', 'p', 't')},
     'a b', 'O B-X'),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'content', 'data', 'source', 'target'), TEMPLATED)
def test_templates(tmp_path: Path, name: str, content: str, data: dict, source: str, target: str) -> None:
    file = write(tmp_path, {name: content}) / name
    assert load(file, 'seq2seq', **data) == [{'source': source, 'target': target}]
    assert split_of(file, 'seq2seq', **data).fingerprint != split_of(file, 'seq2seq').fingerprint


ANSWERS = {'source_template': '{question}', 'target_template': '{answers[text][0]}'}
TEMPLATE_MISTAKES = [  # (file, bad line, data fields, message after the file)
    ('a.jsonl', lines({'premise': 'a', 'hypotheses': 'b', 'label': 1}), MNLI,
     ":1: no key 'hypothesis'; did you mean 'hypotheses'?"),
    ('a.jsonl', lines({'premise': 'a', 'hypothesis': None, 'label': 1}), MNLI, ":1: 'hypothesis' is null"),
    ('a.jsonl', asked(answers={'text': []}), ANSWERS, ':1: there is no item 0 in a list of 0'),
    ('a.jsonl', asked(answers={'text': [None]}), ANSWERS, ':1: item 0 of a list is null'),
    ('a.jsonl', asked(question=['a', None]), ANSWERS, ':1: item 1 of a list is null'),
    ('a.jsonl', asked(answers={'texts': []}), ANSWERS, ":1: no key 'text'; did you mean 'texts'?"),
    ('a.jsonl', asked(answers=[]), ANSWERS, ':1: there is no item text in a list of 0'),
    ('a.jsonl', asked(question='\ud800'), ANSWERS,
     ":1: 'data.source_template' has half of a surrogate pair: '\\ud800'"),
    ('a.jsonl', asked(question='a'), {**ANSWERS, 'source_template': '{question:d}'},
     ":1: data.source_template='{question:d}': Unknown format code 'd' for object of type 'str'"),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'content', 'data', 'said'), TEMPLATE_MISTAKES)
def test_mistakes_of_templates_in_data(tmp_path: Path, name: str, content: str, data: dict, said: str) -> None:
    file = write(tmp_path, {name: content}) / name
    with pytest.raises(UserError) as error:
        load(file, 'seq2seq', **data)
    assert str(error.value) == f'{file}{said}'
    with pytest.raises(UserError, match='holds no examples: 1 bad lines were skipped'):
        load(file, 'seq2seq', bad_lines='skip', **data)


def test_templates_need_names_of_columns(tmp_path: Path) -> None:
    file = write(tmp_path, {'a.tsv': 'a\tb\tc\n'}) / 'a.tsv'
    with pytest.raises(UserError, match=r'a.tsv: data.source_template needs data.columns, the names of the columns$'):
        load(file, 'seq2seq', **MNLI)
    with pytest.raises(UserError, match=r"lacks 'hypothesis', which the templates name; did you mean 'hypotesis'\?$"):
        load(file, 'seq2seq', columns=('premise', 'hypotesis', 'label'), **MNLI)


ENCODER = {'model.family': 'encoder', 'train.num_steps': 1}
PAIRS = {'model.family': 'encoder_decoder', 'train.objective': 'seq2seq', 'train.num_steps': 1}
TEMPLATES = {'data.source_template': '{a}', 'data.target_template': '{b}'}
CLASSES = {**ENCODER, 'train.objective': 'classification'}
CONFIGS = [
    ({**CLASSES, **TEMPLATES}, 'train.objective is seq2seq'),
    ({**PAIRS, 'data.source_template': '{a}'}, 'go together: set both or neither'),
    ({**PAIRS, **TEMPLATES, 'data.target_template': '{b'}, "data.target_template='{b': expected '}'"),
    ({**PAIRS, **TEMPLATES, 'data.target_template': '{}'}, r'data.target_template: {} must name a column or key'),
    ({**PAIRS, **TEMPLATES, 'data.target_template': '{0}'}, r'{0} must name a column or key'),
    ({**PAIRS, **TEMPLATES, 'data.target_template': '{a.b}'}, r'{a.b} must name a column or key'),
    ({**PAIRS, **TEMPLATES, 'data.target_template': 'label'}, "'label' names no column or key of the data"),
    ({**PAIRS, 'data.mixture': ("path=a 'source_template={a}'",)}, 'go together: set both or neither'),
    ({**CLASSES, 'data.mixture': ('path=a', 'path=b'), 'data.train_examples': 5}, 'not of a mixture'),
    ({**CLASSES, 'data.train_examples': 0}, 'data.train_examples=0 must be positive'),
    ({**ENCODER, 'train.objective': 'masked_lm', 'data.labels': ('a',)},
     'it applies where train.objective is classification'),
    ({**CLASSES, 'data.labels': ('a', 'a')}, 'names a label twice'),
    ({**CLASSES, 'data.label_range': (0.0, 1.0)}, 'it applies where train.objective is regression'),
    ({**CLASSES, 'data.tokenizer_from': 'runs/a', 'train.init_from': 'runs/b'},
     'data.tokenizer_from=runs/a differs from train.init_from=runs/b'),
]  # fmt: skip


@pytest.mark.parametrize(('changes', 'message'), CONFIGS)
def test_fields_that_do_not_fit(changes: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        checks.check(checks.settle(config_lib.override(Config(), changes), changes))
    assert message in str(error.value) and '\n' not in str(error.value)


def test_fields_that_fit() -> None:
    for changes in (
        {**PAIRS, **TEMPLATES},
        {**PAIRS, 'data.mixture': ("path=a 'source_template=x {a}' target_template={b}", 'path=b')},
        {**CLASSES, 'data.labels': ('B-a', 'O'), 'data.train_examples': 7},
        {**CLASSES, 'data.tokenizer_from': 'runs/a/', 'train.init_from': 'runs/a'},
    ):
        checks.check_here(config_lib.override(Config(), changes))
    for objective, changes, message in (
        ('regression', {'label_range': (5.0, 1.0)}, 'must be two numbers, the smallest label and the largest'),
        ('regression', {'label_range': (0.0, float('inf'))}, 'must be finite'),
        ('token_classification', {'labels': ('O', 'B-PER', 'LOC')}, 'and not O: O, B-PER'),
    ):
        train = Train(objective=objective, num_steps=1)
        config = Config(data=Data(**changes), train=train, model=Model(family='encoder'))
        with pytest.raises(UserError, match=message):
            checks.check(config)
        checks.check(dataclasses.replace(config, data=Data()))


# -------------------------------------------------------------------------------------------------------------- TFDS

TFDS = r"""
import sys
import numpy as np
import tensorflow_datasets as tfds
f = tfds.features
CONTEXT = 'naïve: on the mat'

class Many(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
        features = {
            'sentence1': f.Text(), 'sentence2': f.Text(), 'label': f.ClassLabel(names=['no', 'yes']),
            'score': np.float32, 'tokens': f.Sequence(f.Text()), 'id': np.int32,
            'ner': f.Sequence(f.ClassLabel(names=['O', 'B-PER', 'I-PER'])), 'question': f.Text(), 'context': f.Text(),
            'answers': f.Sequence({'text': f.Text(), 'answer_start': np.int32}), 'raw': f.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=f.FeaturesDict(features), disable_shuffling=True)

    def _split_generators(self, dl_manager):
        made = self._generate_examples
        return {'train': made(100), 'validation': made(3), 'test': made(5, bad=True)}

    def _generate_examples(self, count, bad=False):
        for i in range(count):
            answers = [{'text': 'mat', 'answer_start': 14}, {'text': 'on', 'answer_start': 7}][:i % 3]
            row = {
                'sentence1': f'naïve {i}', 'sentence2': f'zwei {i}', 'label': i % 2, 'score': i / 4, 'id': i,
                'tokens': ['Zoë', 'is'], 'ner': [2, 0], 'question': f'{i}?', 'context': CONTEXT, 'answers': answers,
                'raw': b'\xff' if bad and i == 4 else b'',
            }
            if bad and i == 1:
                row |= {'label': -1, 'score': float('nan'), 'ner': [0], 'sentence2': ' '}
                row |= {'answers': [{'text': 'mat', 'answer_start': 13}]}
            yield i, row

Many(data_dir=sys.argv[1], file_format='array_record').download_and_prepare()
assert 'tensorflow' not in sys.modules
"""


@pytest.fixture(scope='module')
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A prepared set; made in a process of its own, so that here nothing knows its code."""
    place = tmp_path_factory.mktemp('tfds')
    (place / 'many.py').write_text(TFDS)
    done = subprocess.run([sys.executable, str(place / 'many.py'), str(place)], capture_output=True, cwd=place)
    assert done.returncode == 0, done.stderr[-2000:]
    return {'source': 'tfds', 'tfds_name': 'many', 'tfds_dir': str(place)}


COLUMNS = {
    'classification': ('label', 'sentence1', 'sentence2'),
    'regression': ('score', 'sentence1', 'sentence2'),
    'token_classification': ('tokens', 'ner'),
    'question_answering': (),
}


def valid(many: dict, objective: str, split: str = 'valid', **data: object) -> records.Split:
    return sources.load(Data(**{'columns': COLUMNS[objective], **many, **data}), objective, split)


def test_records_of_sets(many: dict) -> None:
    where = [f'many validation record {i}' for i in (1, 2, 3)]
    found = list(valid(many, 'classification'))
    assert found == [{'label': ('no', 'yes')[i % 2], 'text': f'naïve {i}', 'pair': f'zwei {i}', 'where': where[i]}
                     for i in range(3)]  # fmt: skip
    assert unplaced(valid(many, 'classification', columns=COLUMNS['classification'][:2])) == [
        {'label': r['label'], 'text': r['text']} for r in found]  # fmt: skip
    assert [(r['label'], r['pair'], r['where']) for r in valid(many, 'regression', label_range=(0.0, 0.5))] == [
        (i / 4, f'zwei {i}', where[i]) for i in range(3)]  # fmt: skip
    tagged = list(valid(many, 'token_classification', labels=('PER',)))
    assert tagged == [{'tokens': ['Zoë', 'is'], 'tags': ['B-PER', 'O'], 'where': w} for w in where]
    asked = list(valid(many, 'question_answering'))
    assert [r['answers'] for r in asked] == [[], [(14, 'mat')], [(14, 'mat'), (7, 'on')]]
    assert asked[1] == {'question': '1?', 'context': 'naïve: on the mat', 'answers': [(14, 'mat')], 'where': where[1]}
    made = valid(many, 'question_answering', tfds_splits=('train', 'train[10:13]', 'test'))
    assert made[2]['where'] == 'many train[10:13] record 3' and made[2]['question'] == '12?'
    assert 'tensorflow' not in sys.modules


BAD_ROWS = {
    'classification': 'class -1 is not among the 2 classes of the set: is it a split without labels?',
    'regression': 'label nan is not finite',
    'token_classification': '2 tokens and 1 tags',
    'question_answering': "answer 'mat' starts at 13, where its context has ' ma'; it stands at 14",
}


@pytest.mark.parametrize('objective', BAD_ROWS)
def test_bad_records_of_sets(many: dict, objective: str) -> None:
    split = valid(many, objective, 'test')
    assert len(split) == 5 and split[0]['where'] == 'many test record 1'  # read as they are asked for
    with pytest.raises(UserError) as error:
        list(split)
    assert str(error.value) == f'many test record 2: {BAD_ROWS[objective]}'
    skipping = valid(many, objective, 'test', bad_lines='skip')
    assert [r['where'][-1] for r in skipping] == ['1', '3', '4', '5'] and skipping.skipped == 1
    assert skipping[1:3] == [skipping[1], skipping[2]] and skipping.fingerprint != split.fingerprint


def test_mistakes_with_sets(many: dict) -> None:
    for objective, data, message in (
        ('classification', {'columns': ('label', 'sentence')}, "no feature 'sentence' .*did you mean 'sentence2'"),
        ('classification', {'columns': ('label', 'answers')}, "not text; it holds answers/answer_start, answers/text$"),
        ('classification', {'labels': ('nope', 'yes')},
         "record 1: label 'no' is not in data.labels; did you mean 'nope'"),
        ('classification', {'columns': ('ner', 'sentence1')}, "'ner' is neither a string nor a number"),
        ('regression', {'columns': ('label', 'sentence1')}, "record 1: label 'no' is not a number"),
        ('token_classification', {'columns': ('sentence1', 'ner')}, "'sentence1' is not a list of strings: 'naïve 0'"),
        ('classification', {'bad_lines': 'skp'}, "did you mean 'skip'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message) as error:
            list(valid(many, objective, **data))
        assert '\n' not in str(error.value)
    with pytest.raises(UserError, match=r"^many test record 5: not UTF-8: b'\\xff'$"):
        list(sources.load(Data(**many, columns=('raw',)), 'masked_lm', 'test'))


def test_templates_of_sets(many: dict) -> None:
    templates = {'source_template': '{id}: {tokens} {sentence1}', 'target_template': '{label} {ner} {answers[text]}'}
    found = sources.load(Data(**many, **templates), 'seq2seq', 'valid')
    assert found[2] == {'source': '2: Zoë is naïve 2', 'target': 'no I-PER O mat on'}
    with pytest.raises(UserError, match=r"no feature 'lable' .*; did you mean 'label'\?$"):
        sources.load(Data(**many, source_template='{id}', target_template='{lable}'), 'seq2seq', 'valid')
    with pytest.raises(UserError, match=r'^many validation record 1: there is no item 0 in a list of 0$'):
        list(sources.load(Data(**many, **ANSWERS), 'seq2seq', 'valid'))


# ----------------------------------------------------------------------------------------------------------- prepare


@pytest.mark.parametrize(
    'case', ['class pair tsv', 'class jsonl', 'number jsonl', 'tags conll', 'answers jsonl', 'pairs jsonl']
)
def test_prepared_records_come_back(tmp_path: Path, case: str) -> None:
    objective, name, content, data, expected = KINDS[case]
    place = write(tmp_path / 'files', {name.replace('a.', f'{split}.'): content for split in sources.SPLITS})
    config = Data(path=(str(place),), tfds_name='mine', tfds_dir=str(tmp_path), **data)
    done = prepare.write(config, objective)
    assert [line.split()[1:3] for line in done.splitlines()[1:-1]] == [[str(len(expected)), 'records']] * 3
    back = Data(source='tfds', tfds_name='mine', tfds_dir=str(tmp_path))
    for split in sources.SPLITS:
        assert unplaced(sources.load(back, objective, split)) == expected
    assert 'is already written' in prepare.write(config, objective) and 'tensorflow' not in sys.modules


def test_prepared_templates_are_written_out(tmp_path: Path) -> None:
    place = write(tmp_path / 'files', {'train.jsonl': lines({'premise': 'a', 'hypothesis': 'b', 'label': 'c'})})
    done = prepare.write(Data(path=(str(place),), tfds_name='mine', tfds_dir=str(tmp_path), **MNLI), 'seq2seq')
    assert {'--config.data.source_template=None', '--config.data.target_template=None'} <= set(done.split())
    back = sources.load(Data(source='tfds', tfds_name='mine', tfds_dir=str(tmp_path)), 'seq2seq', 'train')
    assert list(back) == [{'source': 'mnli premise: a hypothesis: b', 'target': 'c'}]


def test_a_set_has_an_optional_field_or_has_it_not(tmp_path: Path) -> None:
    place = write(tmp_path / 'files', {'train.tsv': 'yes\ta\tb\n', 'valid.tsv': 'yes\ta\n'})
    with pytest.raises(UserError, match=r"valid.tsv:1 has no 'pair', unlike the first training record"):
        prepare.write(Data(path=(str(place),), tfds_name='mine', tfds_dir=str(tmp_path)), 'classification')
    assert not list(tmp_path.rglob('*array_record*'))


# ----------------------------------------------------------------------------------------------------------- samples


def sampled(config: Config, count: int | None, seed: int = 0, split: str = 'train') -> mixture.Concatenation:
    data = dataclasses.replace(config.data, train_examples=count)
    return mixture.load(
        dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, seed=seed)), split
    )


@pytest.fixture
def labelled(tmp_path: Path) -> Config:
    rows = {split: ''.join(f'class {i % 9}\t{split} {i}\n' for i in range(2000)) for split in ('train', 'valid')}
    place = write(tmp_path / 'files', {f'{split}.tsv': text for split, text in rows.items()})
    data = Data(path=(str(place),), tokenizer='byte', cache_dir=str(tmp_path / 'cache'))
    return Config(data=data, train=Train(objective='classification'))


@pytest.mark.parametrize('source', ['files', 'tfds'])
def test_samples_are_nested(labelled: Config, many: dict, source: str) -> None:
    config, sizes = labelled, (50, 200, 1000)
    if source == 'tfds':
        config = dataclasses.replace(labelled, data=Data(**many, columns=COLUMNS['classification']))
        sizes = (5, 20, 100)
    small, middle, large = (list(sampled(config, size)) for size in sizes)
    assert (small, middle) == (large[: sizes[0]], large[: sizes[1]]) and len(large) == sizes[2]
    assert len({record['where'] for record in large}) == sizes[2]
    whole = list(sampled(config, None))
    assert small != whole[: sizes[0]] and all(record in whole for record in small)
    assert list(sampled(config, sizes[0], seed=1)) != small
    assert list(sampled(config, sizes[0], split='valid')) == list(sampled(config, None, split='valid'))
    marks = [
        sampled(config, *args).splits[0].fingerprint for args in ((None,), (sizes[0],), (sizes[1],), (sizes[0], 1))
    ]
    assert len(set(marks)) == 4 and sampled(config, sizes[0]).splits[0].fingerprint == marks[1]
    with pytest.raises(
        UserError, match=rf'^data.train_examples=5000 is more than the training split has: {len(whole)}$'
    ):
        len(sampled(config, 5000))


def test_a_sample_is_the_same_on_every_machine(labelled: Config) -> None:
    assert [record['text'] for record in sampled(labelled, 2)] == SAMPLE
    assert [record['text'] for record in sampled(labelled, 2, seed=3)] != SAMPLE


SAMPLE = ['train 997', 'train 104']


def test_a_sample_of_a_set_reads_no_more_than_itself(many: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from tformer.data.sources import tfds

    made: list[object] = []
    plain = tfds._plain
    monkeypatch.setattr(tfds, '_plain', lambda feature, value: made.append(value) or plain(feature, value))
    config = Config(data=Data(**many, columns=COLUMNS['classification']), train=Train(objective='classification'))
    assert len(list(sampled(config, 5))) == 5 and len(made) == 5 * 3


def test_a_sample_takes_none_of_the_bad_records(tmp_path: Path) -> None:
    rows = ''.join(f'{"nan" if i % 3 else i}\ttext {i}\n' for i in range(300))
    place = write(tmp_path / 'files', {'train.tsv': rows})
    config = Config(data=Data(path=(str(place),), bad_lines='skip'), train=Train(objective='regression'))
    found = sampled(config, 100)
    assert {record['label'] for record in found} == set(map(float, range(0, 300, 3)))
    assert found.splits[0].skipped == 200
    with pytest.raises(UserError, match='more than the training split has: 100'):
        len(sampled(config, 101))


# -------------------------------------------------------------------------------------------- labels and tokenizers


def test_labels_are_those_of_the_whole_split(labelled: Config) -> None:
    few = sampled(labelled, 3)
    classes = tuple(f'class {i}' for i in range(9))
    assert len({record['label'] for record in few}) < 9
    assert tokenizers.train_tokenizers(labelled, few).labels == classes
    assert workdir.new_tokenizers(dataclasses.replace(
        labelled, data=dataclasses.replace(labelled.data, train_examples=3)), few).labels == classes  # fmt: skip
    declared = dataclasses.replace(labelled, data=dataclasses.replace(labelled.data, labels=classes[::-1]))
    assert tokenizers.train_tokenizers(declared, few).labels == classes[::-1]
    lacking = dataclasses.replace(labelled, data=dataclasses.replace(labelled.data, labels=classes[:7]))
    with pytest.raises(UserError, match=r"lacks the label 'class 7' of the training split$"):
        tokenizers.train_tokenizers(lacking, few)


@pytest.mark.parametrize(('bad', 'data', 'said'), [
    ('a\tB-X\n', {}, "tag 'B-X' is of entities, unlike the tags before"),
    ('a\tO\n', {}, "tag 'O' is of entities, unlike the tags before"),
    ('a b\tNOUN \n', {}, "tag '' is empty, or begins or ends with white space"),
    ('a\tNUON\n', {'labels': POS}, "tag 'NUON' is not in data.labels; did you mean 'NOUN'?"),
])  # fmt: skip
def test_plain_tags_are_not_mixed_with_those_of_entities(tmp_path: Path, bad: str, data: dict, said: str) -> None:
    file = write(tmp_path, {'a.tsv': 'a b\tNOUN VERB\n' + bad}) / 'a.tsv'
    with pytest.raises(UserError) as error:
        load(file, 'token_classification', **data)
    assert str(error.value) == f'{file}:2: {said}'


def test_labels_of_plain_tags_are_these() -> None:
    for labels, expected in (((), ('PRON', 'PROPN', 'VERB')), (POS, POS)):
        config = Config(data=Data(tokenizer='char', labels=labels), train=Train(objective='token_classification'))
        assert tokenizers.train_tokenizers(config, SPOKEN).labels == expected
    mixed = [*SPOKEN, {'tokens': ['a'], 'tags': ['B-X']}]
    config = Config(model=Model(family='encoder'), data=Data(tokenizer='char'), train=config.train)
    tokens = tokenizers.train_tokenizers(config, mixed)
    assert tokens.labels == ('O', 'B-X', 'I-X')
    with pytest.raises(UserError, match=r"record 1 of the train split: tag 'PRON' has no training example"):
        pipeline.Batches(config, tokens, 'train', training=True, records=mixed)


def test_labels_of_tags_are_all_tags_of_their_types() -> None:
    some = [{'tokens': ['a', 'b'], 'tags': ['B-PER', 'O']}, {'tokens': ['c', 'd'], 'tags': ['B-LOC', 'I-LOC']}]
    for labels, expected in (
        ((), ('O', 'B-LOC', 'I-LOC', 'B-PER', 'I-PER')),
        (('PER', 'LOC', 'ORG'), ('O', 'B-PER', 'I-PER', 'B-LOC', 'I-LOC', 'B-ORG', 'I-ORG')),
    ):
        config = Config(data=Data(tokenizer='char', labels=labels), train=Train(objective='token_classification'))
        assert tokenizers.train_tokenizers(config, some).labels == expected


@pytest.mark.parametrize(('objective', 'record', 'letters'), [
    ('classification', {'label': 'x', 'text': 'ab', 'pair': 'cd'}, 'abcd'),
    ('regression', {'label': 7.0, 'text': 'ab'}, 'ab'),
    ('token_classification', {'tokens': ['a', 'b'], 'tags': ['O', 'B-X']}, ' ab'),
    ('question_answering', {'question': 'ab', 'context': 'cde', 'answers': [(0, 'c')]}, 'abcde'),
    ('masked_lm_nsp', {'text': 'ab'}, 'ab'),
])  # fmt: skip
def test_a_tokenizer_learns_from_all_texts_and_nothing_else(objective: str, record: dict, letters: str) -> None:
    assert sorted(set(''.join(records.texts(record, objective)))) == list(letters)
    config = Config(data=Data(tokenizer='char', byte_fallback=False), train=Train(objective=objective))
    made = tokenizers.train_tokenizers(config, [record] * 5).target
    assert made.vocab_size == len(vocabulary.SPECIALS) + len(letters)


def test_tokenizers_of_another_run(labelled: Config, tmp_path: Path) -> None:
    other = dataclasses.replace(labelled.data, tokenizer='char')
    lender = tokenizers.train_tokenizers(dataclasses.replace(labelled, data=other), [{'label': 'x', 'text': 'abc'}])
    lender.save(tmp_path / 'other')
    config = dataclasses.replace(
        labelled, data=dataclasses.replace(labelled.data, tokenizer_from=str(tmp_path / 'other'))
    )
    lent = workdir.new_tokenizers(config, mixture.load(config, 'train'))
    assert lent.target.fingerprint == lender.target.fingerprint and lent.source is None
    assert lent.labels == tuple(f'class {i}' for i in range(9))
    nowhere = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_from=str(tmp_path / 'no')))
    with pytest.raises(UserError, match=r'tokenizer.json does not exist: is .*/no the workdir of a run'):
        workdir.new_tokenizers(nowhere, mixture.load(nowhere, 'train'))


def test_a_few_labels_train_and_all_are_judged(labelled: Config) -> None:
    data = dataclasses.replace(labelled.data, train_examples=20)
    config = dataclasses.replace(labelled, data=data)
    tokens = workdir.new_tokenizers(config, mixture.load(config, 'train'))
    train = pipeline.Batches(config, tokens, 'train', training=True)
    whole = pipeline.Batches(labelled, tokens, 'train', training=True)
    assert (train.num_examples, whole.num_examples) == (20, 2000) and train.fingerprint != whole.fingerprint
    assert pipeline.Batches(config, tokens, 'valid', training=False).num_examples == 2000


def test_the_recipe_of_few_labels_loads() -> None:
    for size in ('', ':smoke', ':pretrain', ':pretrain,smoke'):
        changed = {} if 'pretrain' in size else {'data.train_examples': '50', 'data.tokenizer_from': 'runs/x'}
        checks.check_here(config_lib.load(f'{ROOT}/configs/few_labels.py{size}', changed))
