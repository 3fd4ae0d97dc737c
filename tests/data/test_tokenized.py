"""Tokens of large vocabularies."""

import numpy as np
import pytest

from tformer.config import Config, Data
from tformer.data.examples import tokenized
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers


@pytest.mark.parametrize('size', [2**16, 2**16 + 1, 2**17])
def test_the_last_id_of_a_vocabulary_is_kept(size):
    class Large(Byte):
        vocab_size = size

        def _encode_batch(self, texts):
            return [[0, size - 1] for _ in texts]

    found = tokenized.columns(Config(), Tokenizers(None, Large()), tokenized.TEXT, [{'text': 'a'}], 'train')
    assert found.by_name['tokens'][0].tolist() == [0, size - 1]
    assert found.by_name['tokens'].flat.itemsize == (2 if size == 2**16 else 4)


def test_records_that_are_tokenised_apart_stand_in_their_order_and_bad_ones_are_counted_from_the_first(monkeypatch):
    monkeypatch.setattr(tokenized, '_AT_ONCE', 2)
    records = [{'text': 'a' * i, 'label': label} for i, label in enumerate(('x', 'y', 'x', 'z', 'z', 'y'))]
    made, cfg = Tokenizers(None, Byte(), ('x', 'y')), Config(data=Data(bad_lines='skip'))
    found = tokenized.columns(cfg, made, tokenized.CLASSES, records, 'train')
    assert found.bad.tolist() == [3, 4]
    assert [len(row) for row in found.by_name['tokens']] == [0, 1, 2, 3, 4, 5]
    assert [found.by_name['label'][i].tolist() for i in (0, 1, 2, 5)] == [[0], [1], [0], [1]]


def test_an_entry_whose_columns_and_facts_are_of_other_records_is_refused():
    def entry(rows, others, **facts):
        found = {}
        for name, count in (('a', rows), ('b', others)):
            found |= {f'{name}.ids': np.zeros(count, np.int32), f'{name}.offsets': np.arange(count + 1)}
        return found, {'skipped': 0, 'bad': [], **facts}

    dtypes = dict.fromkeys('ab', np.int32)
    tokenized._check(dtypes, *entry(3, 3, skipped=2, bad=[0, 2]))
    for wrong in (
        entry(3, 2),
        entry(3, 3, bad=[3]),
        entry(3, 3, bad=[-1]),
        entry(3, 3, skipped=1.0),
        entry(3, 3, bad=[True]),
    ):
        with pytest.raises(ValueError, match='its columns and facts do not describe the same records'):
            tokenized._check(dtypes, *wrong)
