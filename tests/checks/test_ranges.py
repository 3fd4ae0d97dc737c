"""The ends of the ranges of fields."""

import pytest

from tformer import config as config_lib
from tformer.checks import ranges
from tformer.config import Config
from tformer.errors import UserError


@pytest.mark.parametrize(
    ('field', 'last', 'beyond', 'words'),
    [
        ('decode.top_p', 1.0, 1.001, 'be at most 1'),
        ('model.num_decoder_layers', 1024, 1025, 'be at most 1,024'),
        ('train.batch_size', 1, 0, 'be positive'),
        ('train.seed', 0, -1, 'not be negative'),
        ('train.seed', 2**31 - 1, 2**31, 'be at most 2,147,483,647'),
        ('model.dropout_rate', 0.0, -0.1, r'be in \[0, 1\)'),
        ('model.dropout_rate', 0.99, 1.0, r'be in \[0, 1\)'),
        ('train.eval_every', 1, 1.0, 'be a whole number of steps, or a share of the run below 1'),
        ('optimizer.warmup_steps', 0.99, 1.5, 'be a whole number of steps, or a share of the run below 1'),
        ('data.mean_span_length', 1.0, 0.99, 'be at least 1'),
        ('data.modulus', 2, 1, 'be at least 2'),
        ('optimizer.learning_rate', 1e9, float('inf'), 'be finite'),
    ],
)
def test_the_last_value_is_taken_and_the_next_refused(field, last, beyond, words):
    ranges.check_ranges(config_lib.override(Config(), {field: last}))
    with pytest.raises(UserError, match=f'{field}=.* must {words}'):
        ranges.check_ranges(config_lib.override(Config(), {field: beyond}))
