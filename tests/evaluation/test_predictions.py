"""The generated text of a split, as it is kept for reports."""

import pytest

from tformer.errors import UserError
from tformer.evaluation import predictions


def test_what_is_written_is_read_and_any_other_row_is_named(tmp_path):
    assert predictions.read(tmp_path, 'test') is None
    predictions.write(tmp_path, 'test', ['a', '\u2028'], [['b'], ['c', '']])
    assert predictions.read(tmp_path, 'test') == (['a', '\u2028'], [['b'], ['c', '']])
    file = predictions.place(tmp_path, 'test')
    good = file.read_text()
    for bad in ('{"prediction": "a"}', '{"prediction": 1, "references": []}', '{"references": ["a"]}',
                '{"prediction": "a", "references": "b"}', '{"prediction": "a", "references": [2]}'):  # fmt: skip
        file.write_text(good + bad + '\n')
        with pytest.raises(UserError, match=r'predictions_test\.jsonl:3: it holds no prediction with its references$'):
            predictions.read(tmp_path, 'test')
