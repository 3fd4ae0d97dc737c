"""Tokens of large vocabularies."""

import pytest

from tformer.config import Config
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
