"""Rows of several texts that do not see each other: how they are cut, and their batches."""

import numpy as np
import pytest

from tformer.config.run import Config, Data, Model, Train
from tformer.data.batches import pipeline
from tformer.data.examples import spans
from tformer.data.examples.special_tokens import EncoderTemplate
from tformer.data.ragged import Ragged
from tformer.data.tokenizers import bytes_and_characters, tokenizers
from tformer.data.tokenizers.vocabulary import Specials
from tformer.errors import UserError

ENCODER = EncoderTemplate(Specials(), Specials())


def record(*texts: str) -> dict:
    return {'text': texts[0], 'positive': texts[1], 'negative': texts[2:], 'texts': list(texts)}


def batches_of(records: list, objective: str = 'contrastive', **data: object) -> pipeline.Batches:
    train = Train(objective=objective, batch_size=2)
    config = Config(Model(family='encoder'), Data(**{'tokenizer': 'byte', 'length': 32, **data}), train=train)
    tokens = tokenizers.train_tokenizers(config, records)
    return pipeline.Batches(config, tokens, 'train', training=False, records=records)


def test_the_longest_texts_are_cut_first_until_the_row_holds_all():
    """Of 14 places 6 are for special tokens: 10, 2 and 3 tokens become 3, 2 and 3; 1, 1 and 6 fit."""
    sizes = [[10, 2, 3], [1, 1, 6], [4, 4], [6, 9]]
    columns = {
        'tokens': Ragged.of([[7] * sum(own) for own in sizes]),
        'ends': Ragged.of([np.cumsum(own) for own in sizes]),
    }
    lengths = lambda sizes, template, data: template.to_read(sizes)  # noqa: E731
    found = spans.several(columns, lengths, ENCODER, Data(length=14))
    assert found.stop[0] == 3 and found.stop[1] >= 6 and found.stop[2] >= 4 and found.stop[3] == 5
    assert found.overlong.tolist() == [True, False, False, True]
    assert found.lengths[0].tolist() == [14, 14, 12, 14]
    twice = spans.twice({'tokens': columns['tokens'], 'ends': Ragged.of([[13]] * 4)}, lengths, ENCODER, Data(length=14))
    assert (twice.stop.tolist(), twice.lengths[0].tolist()) == ([5] * 4, [14] * 4)
    with pytest.raises(UserError, match=r'data.length=8 has no room for text beside the special tokens of 3 texts'):
        spans.several(columns, lengths, ENCODER, Data(length=8))


def test_a_context_stands_with_each_of_its_choices_and_the_longer_of_both_is_cut_first():
    """CLS a SEP b SEP: of 22 places each of two choices has 11, and 8 of them for its texts."""
    record = {'context': 'abcdefgh', 'choices': ['xy', 'XYZ'], 'label': 1}
    other = {'context': 'a', 'choices': ['b', 'c', 'd'], 'label': 0}
    batches = batches_of([record, other], 'multiple_choice', length=22, batching='pad')
    assert batches.parts[0].examples.num_truncated == 1
    batch, row = batches.batch(0), 0
    decode = bytes_and_characters.Byte().decode
    texts = [batch['inputs'][row][batch['segment_ids'][row] == number] for number in (1, 2)]
    types = [batch['token_types'][row][batch['segment_ids'][row] == number] for number in (1, 2)]
    first, second = ([decode(text[of == kind]) for kind in (0, 1)] for text, of in zip(texts, types, strict=True))
    assert (first, second) == (['abcdef', 'xy'], ['abcde', 'XYZ'])
    assert batch['labels'][row] == 1 and batch['segment_weights'][row].tolist() == [1, 1, 0]
    assert sum(map(len, texts)) == 22


@pytest.mark.parametrize('batching', ['pad', 'bucket'])
def test_rows_with_fewer_texts_than_others_say_so(batching):
    batches = batches_of([record('a', 'b'), record('cc', 'd', 'e'), record('f', 'g', 'h', 'i')], batching=batching)
    found = [batches.batch(step) for step in range(int(batches.steps_per_epoch))]
    weights = np.concatenate([batch['segment_weights'] for batch in found])
    assert sorted(filter(None, weights.sum(1))) == [2, 3, 4] and weights.shape == (2 * len(found), 4)
    for batch in found:
        assert batch['segment_keys'].shape == (2, 4, 2)
        for weights_K, ids_T, positions_T in zip(
            batch['segment_weights'], batch['segment_ids'], batch['positions'], strict=True
        ):
            assert set(ids_T[positions_T >= 0]) == set(range(1, 1 + int(weights_K.sum())))
            assert not ids_T[positions_T < 0].any()


def test_rows_of_several_texts_are_not_packed():
    with pytest.raises(UserError, match=r'data\.batching=pack is not for train\.objective=contrastive: .*use bucket'):
        batches_of([record('a', 'b')], batching='pack')
