"""Data that a resumed run must share with its checkpoint."""

import pytest

from tformer.errors import UserError
from tformer.training.setup import VALIDATION, check_same_data

FACTS = {'tokenizers': 'a', 'training examples': 10, VALIDATION: 'b'}


def test_other_training_data_are_refused_and_facts_that_are_not_recorded_are_not_compared():
    check_same_data(FACTS, FACTS)
    check_same_data({'tokenizers': 'a'}, FACTS)
    with pytest.raises(UserError, match=r'other data: training examples 10 there, 11 here$'):
        check_same_data(FACTS, {**FACTS, 'training examples': 11}, ['data.valid_path'])


def test_other_validation_data_are_said_where_they_may_differ(capsys):
    other = {**FACTS, VALIDATION: 'c'}
    with pytest.raises(UserError, match=r'--may_differ=data\.valid_path accepts it$'):
        check_same_data(FACTS, other)
    check_same_data(FACTS, other, ['data.valid_path'])
    assert f'{VALIDATION} b there, c here' in capsys.readouterr().err
