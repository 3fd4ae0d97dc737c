"""Prompts that go on from kept ones: the texts of prompts that are read whole, with fewer tokens read."""

import functools

import numpy as np
import pytest

from small_decoding import BANNED, EOS, PAD, T, V, make
from tformer.decode import buckets
from tformer.decode.drawing import Drawing
from tformer.decode.engine import make_engine, write_all
from tformer.decode.kept_prompts import KeptPrompts
from tformer.decode.rules import Rules

LONGEST = 64
MODELS = {
    'latent': {'position': 'rope', 'kv_latent_dim': 8, 'rotary_dim': 4, 'num_heads': 2, 'num_kv_heads': None},
    'window': {'position': 'rope', 'window': 3, 'attention_pattern': ('local', 'global'), 'num_kv_heads': 2},
    'biased': {'position': 'alibi', 'attention_sink': 'learned'},
    'relative': {'position': 'relative', 'layer_sharing': 'all'},
    'learned': {'position': 'learned', 'num_experts': 4, 'expert_dispatch': 'dropless'},
}
SYSTEM = np.random.default_rng(1).integers(3, V, 20).tolist()
OTHER = np.random.default_rng(2).integers(3, V, 52).tolist()
ASKED = [  # prompts, and how many of their tokens a kept one has
    ([*SYSTEM, 3, 4, 5, 6, 7], 0),
    ([*SYSTEM, 9, 8, 7, 6, 5, 4, 3, 4, 5], 20),
    (OTHER[:40], 0),
    (OTHER, 39),  # all of the one before but its last token
    ([*OTHER, *range(3, V)], 51),  # behind one that itself went on from another
    ([*SYSTEM, 3, 4, 5, 6, 7], 23),  # the same again, of which the rules look back at two tokens
    (SYSTEM[:5], 0),  # too short to save anything
    ([*SYSTEM, *OTHER[:30]], 20),
]
RULES = Rules(bias=(((6, 7, 9), 90.0), ((5,), 0.5)))


@functools.cache
def model_of(name):
    return make('decoder', scale=2.0, max_len=LONGEST + T, **MODELS[name])


def batch_of(tokens):
    batch = {'inputs': np.array([tokens], np.int32), 'positions': np.arange(len(tokens), dtype=np.int32)[None]}
    return buckets.padded(batch, buckets.length(len(tokens), LONGEST), PAD)


def written(name, most, chunk=None):
    """Returns all texts, of which two are written at once, the store, and the engine."""
    model, variables = model_of(name)
    engine = make_engine(
        model, batch_of([PAD]), rows=2, slots=LONGEST + T, banned=BANNED, rules=RULES, eos=EOS, chunk=chunk
    )
    store = KeptPrompts(engine, most)
    drawings = [Drawing(), Drawing(1.5, seed=3), Drawing(0.8, top_k=4, seed=4)]
    asked = [(batch_of(tokens), drawings[i % 3], T - i % 2) for i, (tokens, _) in enumerate(ASKED)]
    ended = write_all(store.keeping() if most else engine, variables, iter(asked), rows=2, ends=(EOS,))
    return {number: tokens for number, tokens, _ in ended}, store, engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'chunk'),
    [pytest.param(name, None, marks=() if name == 'latent' else pytest.mark.proof) for name in MODELS]
    + [pytest.param('window', 7, marks=pytest.mark.proof)],
)
def test_texts_are_those_of_prompts_that_are_read_whole(name, chunk) -> None:
    """Token for token, with rows that begin at other places of the ring, and by one program of each padded length."""
    expected, _, _ = written(name, 0)
    found, store, engine = written(name, 2, chunk)
    assert found == expected and len(set(map(tuple, found.values()))) > 3
    assert found[0][0] == found[5][0] == 9  # by the bias behind the prompt's last tokens
    assert (store.given, store.kept) == (sum(len(tokens) for tokens, _ in ASKED), sum(kept for _, kept in ASKED))
    assert [kept.tokens for kept in store.prompts] == [ASKED[0][0][:-1], ASKED[7][0][:-1]]
    assert engine.resume._cache_size() == 5  # of 16, 32 and 48 tokens alone, of 16 and 32 behind others
    assert engine.insert._cache_size() == 0


def test_prompts_are_kept_that_were_used_last_and_a_longer_one_takes_the_place_of_its_beginning() -> None:
    made = []

    def resume(variables, slots, batch, row, drawing, cache, number):
        made.append((cache, int(number), int((batch['positions'] >= 0).sum()), batch['inputs'].shape[1]))
        return slots, len(made)

    engine = make_engine(*([None] * 2), rows=1, slots=1)._replace(resume=resume, empty=lambda variables: Slots)
    store = KeptPrompts(engine, 2)

    class Slots:
        recent_BK = np.zeros((1, 1))

    def ask(*parts):
        made.clear()
        tokens = [token for first, size in parts for token in range(first, first + size)]
        store.keeping().insert(None, Slots, batch_of(tokens), 0, Drawing())
        return made[0][1:], [kept.tokens[0] for kept in store.prompts], [len(kept.tokens) for kept in store.prompts]

    assert ask((100, 30)) == ((0, 30, 32), [100], [29])
    assert ask((200, 40)) == ((0, 40, 48), [100, 200], [29, 39])
    assert ask((100, 30), (500, 8)) == ((29, 9, 16), [200, 100], [39, 37])  # in the place of the first
    assert ask((100, 20), (600, 4)) == ((20, 4, 16), [200, 100], [39, 37])  # a system prompt with another question
    assert ask((200, 20), (700, 40)) == ((20, 40, 48), [200, 200], [39, 59])  # mostly new: both; the first one goes
    assert ask((100, 30)) == ((0, 30, 32), [200, 100], [59, 29])
    assert ask((200, 3), (800, 60)) == ((0, 63, 64), [100, 200], [29, 62])  # 60 to read are padded as 63 are
    store.keeping().empty(None)
    assert store.prompts == []
