"""The arrays of single examples by hand."""

import numpy as np
import pytest

from tformer.config.run import Data
from tformer.data.examples import example_arrays, pieces, spans
from tformer.data.examples.corrupt import Noise
from tformer.data.examples.example_arrays import Examples
from tformer.data.examples.special_tokens import DecoderTemplate, EncoderTemplate
from tformer.data.ragged import Ragged
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.vocabulary import BOS, CLS, EOS, SEP, Specials

ENCODER, DECODER = EncoderTemplate(Specials(), Specials()), DecoderTemplate(Specials(), Specials())


def example(template, start: int = 0, stop: int = 0, lengths=(), **columns) -> Examples:
    """Returns one example of one record."""
    made = {name: Ragged.of([row]) for name, row in columns.items()}
    one = np.array([0]), np.array([start]), np.array([stop])
    cut = pieces.Spans(*one, [np.array([length]) for length in lengths], np.zeros(1, bool))
    return Examples(made, template, cut, 0, 0, 0, '')


def arrays(function, examples: Examples, **data) -> dict:
    noise = Noise(Data(**data), Byte(), (0,))
    return {name: np.asarray(value).tolist() for name, value in function(examples, 0, noise).items()}


@pytest.mark.parametrize(('template', 'first', 'last'), [(ENCODER, CLS, SEP), (DECODER, BOS, EOS)])
def test_texts_stand_side_by_side_each_counted_from_its_beginning(template, first, last):
    found = arrays(example_arrays.compare, example(template, stop=2, tokens=[51, 52, 53, 61, 51, 52], ends=[3, 4, 6]))
    assert found['inputs'] == [first, 51, 52, last, first, 61, last, first, 51, 52, last]
    assert found['positions'] == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]
    assert found['segment_ids'] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert (found['segment_weights'], found['label_weights']) == ([1, 1, 1], 1)
    one, other, same = found['segment_keys']
    assert one == same != other  # both are 51 52 where the model reads them


def test_texts_have_the_same_key_where_all_of_their_tokens_are_the_same():
    """5 6, 5 7, 6 5 and 5 are four texts."""
    found = arrays(example_arrays.compare, example(ENCODER, stop=9, tokens=[5, 6, 5, 7, 6, 5, 5], ends=[2, 4, 6, 7]))
    assert len({*map(tuple, found['segment_keys'])}) == 4


def test_a_text_twice_is_two_texts():
    found = arrays(example_arrays.compare_twice, example(ENCODER, stop=9, tokens=[51, 52], ends=[2]))
    assert found['inputs'] == [CLS, 51, 52, SEP] * 2 and found['segment_ids'] == [1] * 4 + [2] * 4
    assert found['segment_keys'][0] == found['segment_keys'][1]


@pytest.mark.parametrize(
    ('label', 'limits', 'cosine'),
    [(5, (0.0, 5.0), 1), (1, (0.0, 5.0), 0.2), (3, (1.0, 5.0), 0.5), (-2, (-2.0, 2.0), -1), (-0.25, (), -0.25)],
)
def test_a_label_becomes_a_cosine_by_the_range_of_the_labels(label, limits, cosine):
    """STS-B's labels from 0 to 5 are cosines from 0 to 1; a range that begins below 0 is that from -1 to 1."""
    examples = example(ENCODER, stop=9, tokens=[51, 52], ends=[1, 2], label=[])
    examples.columns['label'] = Ragged(np.array([label], np.float32), np.array([0, 1]))
    assert arrays(example_arrays.compare_scored, examples, label_range=limits)['labels'] == pytest.approx(cosine)


def test_a_tag_is_at_the_first_token_of_its_word_behind_cls():
    found = arrays(
        example_arrays.tag, example(ENCODER, stop=4, tokens=[51, 52, 53, 54], words=[0, -1, 1, -1], tags=[3, 4])
    )
    assert found['inputs'] == [CLS, 51, 52, 53, 54, SEP]
    assert found['targets'] == [0, 3, 0, 4, 0, 0]
    assert found['weights'] == [0, 1, 0, 1, 0, 0]


def test_tags_of_words_that_are_cut_off_are_left_out():
    found = arrays(example_arrays.tag, example(ENCODER, stop=2, tokens=[51, 52, 53], words=[0, -1, 1], tags=[3, 4]))
    assert (found['inputs'], found['targets'], found['weights']) == ([CLS, 51, 52, SEP], [0, 3, 0, 0], [0, 1, 0, 0])


@pytest.mark.parametrize(
    ('start', 'stop', 'labels'),
    [(0, 5, [6, 7]), (2, 5, [4, 5]), (3, 5, [3, 4]), (4, 5, [0, 0]), (0, 4, [0, 0]), (2, 4, [0, 0])],
)
def test_an_answer_of_tokens_3_and_4_is_found_in_windows_that_hold_both(start, stop, labels):
    columns = {'tokens': [61, 62, 63, 64, 65], 'second_text': [51], 'answer': [3, 4]}
    found = arrays(example_arrays.find_answer, example(ENCODER, start, stop, **columns), question_length=4)
    assert found['inputs'] == [CLS, 51, SEP, *columns['tokens'][start:stop], SEP]
    assert found['labels'] == labels
    assert found['weights'] == [1, 0, 0, *[1] * (stop - start), 0]


@pytest.mark.parametrize(
    ('first', 'second', 'kept'),
    [(8, 2, (4, 2)), (2, 8, (2, 4)), (8, 8, (3, 3)), (3, 8, (3, 3)), (8, 0, (8, 0)), (2, 2, (2, 2))],
)
def test_of_two_texts_the_longer_one_is_cut(first, second, kept):
    """Seven tokens hold six of two texts and their separator; eight hold as many where there are two of these."""
    for size, between in ((7, 1), (8, 2), (6, 0)):
        if second:
            cut = example_arrays._shortened(np.arange(first), np.arange(second), size, between)
            assert tuple(len(text) for text in cut) == kept
    assert [len(x) for x in example_arrays._shortened(np.arange(first), np.arange(0), 7, 1)] == [min(first, 7), 0]
    assert [len(x) for x in example_arrays._shortened(np.arange(4), np.arange(5), 1, 2)] == [0, 0]


@pytest.mark.parametrize(('stop', 'targets'), [(3, [61, 62, EOS]), (2, [61, 62]), (1, [61])])
def test_a_target_that_is_cut_has_no_end(stop, targets):
    lengths = (4 + stop,)
    found = arrays(example_arrays.translate, example(DECODER, 0, stop, lengths, tokens=[61, 62], sources=[51, 52]))
    assert found['inputs'] == [BOS, 51, 52, SEP, *targets][:-1]
    assert found['targets'] == [51, 52, SEP, *targets]
    assert found['weights'] == [0, 0, 0, *[1] * len(targets)]


def test_the_tokens_behind_a_prefix_are_scored_and_it_sees_itself():
    """The prefix of BOS a b c, drawn from 1 to 4 tokens: its last one predicts the first that is scored."""
    seen = set()
    for key in range(40):
        examples = example(DECODER, 0, 4, tokens=[51, 52, 53])
        found = example_arrays.continue_prefix(examples, 0, Noise(Data(), Byte(), (key,)))
        size = int(found['prefix'].sum())
        seen.add(size)
        assert found['prefix'].tolist() == [place < size for place in range(4)]
        assert found['weights'].tolist() == [float(place >= size - 1) for place in range(4)]
    assert seen == {1, 2, 3, 4}


def test_a_piece_begins_with_the_last_target_of_the_piece_before():
    tokens = [51, 52, 53, 54]
    pieces = [
        arrays(example_arrays.next_token, example(DECODER, i, j, tokens=tokens)) for i, j in ((0, 2), (2, 4), (4, 5))
    ]
    assert [piece['inputs'] for piece in pieces] == [[BOS, 51], [52, 53], [54]]
    assert [piece['targets'] for piece in pieces] == [[51, 52], [53, 54], [EOS]]


def test_two_texts_and_what_separates_them_are_taken_whole_where_they_fit_and_cut_to_the_length():
    """CLS a SEP b SEP: of nine places six are for the texts, the separator between them and a single text alike."""
    columns = {
        'tokens': Ragged.of([[1] * 3, [1] * 4, [1] * 7, [1] * 8]),
        'second_text': Ragged.of([[2] * 3, [2] * 3, [], []]),
    }
    found = spans.beginning(columns, lambda sizes, template, data: template.to_read(sizes), ENCODER, Data(length=9))
    assert found.stop.tolist() == [7, 7, 7, 7]
    assert found.overlong.tolist() == [False, True, False, True]
