"""Values of records at the ends of what is valid."""

import pytest

from tformer.config.run import Data
from tformer.data.sources import fields
from tformer.data.sources.records import BadRecord


def test_a_label_may_be_either_end_of_its_range():
    make = fields.maker(Data(label_range=(1.0, 5.0)), 'regression')
    assert [make({'label': label, 'text': 'a'})['label'] for label in ('1', 5, 3.5)] == [1, 5, 3.5]
    for label, words in ((0.99, 'outside'), (5.01, 'outside'), ('1_0', 'not a number'), (True, 'neither')):
        with pytest.raises(BadRecord, match=words):
            make({'label': label, 'text': 'a'})


def test_a_choice_is_numbered_from_0_to_one_below_their_number():
    make = fields.maker(Data(), 'multiple_choice')
    record = {'context': 'a', 'choices': ['b', 'c', 'd']}
    assert [make({**record, 'label': label})['label'] for label in (0, '2')] == [0, 2]
    for label in (3, -1, '1.0', 'b'):
        with pytest.raises(BadRecord, match='is not the number of a choice, from 0 to 2'):
            make({**record, 'label': label})


def test_an_answer_may_begin_at_the_first_character_and_end_at_the_last():
    make = fields.maker(Data(), 'question_answering')
    record = {'question': 'q', 'context': 'abc'}
    for start, text in ((0, 'a'), (2, 'c'), (0, 'abc')):
        answers = {'text': [text], 'answer_start': [start]}
        assert make({**record, 'answers': answers})['answers'] == [(start, text)]
    for start, text, words in ((3, 'c', 'outside its context of 3'), (-1, 'c', 'outside'), (1, 'c', 'it stands at 2')):
        with pytest.raises(BadRecord, match=words):
            make({**record, 'answers': {'text': [text], 'answer_start': [start]}})
