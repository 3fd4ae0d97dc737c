"""Which records are scored, and which are shown."""

import pytest

from tformer.commands import scoring
from tformer.config import Config, Data, Evaluate, Model, Train
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers

RECORDS = [{'source': letter, 'target': letter.upper() if letter in 'acf' else 'x'} for letter in 'abcdefghij']


def make(**evaluate) -> Config:
    train = Train(objective='seq2seq', num_steps=1)
    return Config(Model(family='encoder_decoder'), Data(), train=train, evaluate=Evaluate(**evaluate))


@pytest.fixture(autouse=True)
def upper(monkeypatch):
    """A model that writes capitals."""
    monkeypatch.setattr(scoring, 'generate', lambda config, tokenizers, variables, texts, **_: [*map(str.upper, texts)])


def test_samples_are_spread_over_the_split_and_marked_where_they_are_right():
    _, _, *lines = scoring.samples(make(samples=4), None, None, RECORDS)
    assert lines == ['= a | A | A', '= c | C | C', '= f | F | F', '  h | H | x']
    assert len(scoring.samples(make(samples=20), None, None, RECORDS)) == 2 + len(RECORDS)
    assert scoring.samples(make(samples=0), None, None, RECORDS) == scoring.samples(make(), None, None, []) == []
    several = {'source': 'a', 'target': 'x', 'references': ['x', 'A']}  # any of them is right, and the first is shown
    assert scoring.samples(make(samples=1), None, None, [several])[2:] == ['= a | A | x']


def test_of_a_chat_the_last_reply_is_shown_beside_what_it_answers(monkeypatch):
    said = [('user', 'a'), ('assistant', 'b'), ('user', 'c'), ('assistant', 'd'), ('user', 'e')]
    chat = [{'role': role, 'content': content} for role, content in said]
    monkeypatch.setattr(scoring, 'generate', lambda *given, **_: [str(len(messages)) for messages in given[3]])
    config = Config(Model(), Data(), train=Train(objective='chat', num_steps=1), evaluate=Evaluate(samples=1))
    _, _, line = scoring.samples(config, Tokenizers(None, Byte()), None, [{'messages': chat}])
    assert line == '  c | 3 | d'


@pytest.mark.parametrize(('most', 'count'), [(None, 10), (3, 3), (99, 10)])
def test_the_first_records_are_scored_if_not_all_are(monkeypatch, most, count):
    seen = []
    monkeypatch.setattr(scoring, 'shardings', lambda config, mesh: {})
    monkeypatch.setattr(scoring, 'build', lambda model: None)
    monkeypatch.setattr(scoring.pipeline, 'Batches', lambda config, **given: seen.append(given) or config)
    monkeypatch.setattr(scoring, '_scorer', lambda *_: lambda variables, batches, limit, tokenizers: {'loss': 1.0})
    config = make(max_examples=most, metrics=('exact_match',), samples=0)
    found = scoring.score(config, None, {}, 'test', RECORDS)
    assert [given['records'] for given in seen] == [RECORDS[:count]] and found.num_records == count
    assert found.outputs == [record['source'].upper() for record in RECORDS[:count]]
    right = sum(record['target'] != 'x' for record in RECORDS[:count])
    assert found.scores == {'loss': 1.0, 'exact_match': pytest.approx(right / count)}
