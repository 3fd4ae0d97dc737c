"""Layers with a window keep the slots that steps read: texts are those of caches that keep all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import BANNED, EOS, batch_of, make
from tformer import config
from tformer.decode.drawing import Drawing
from tformer.decode.engine import make_engine, write_all
from tformer.decode.generate import begin, make_generate
from tformer.decode.kept_prompts import KeptPrompts
from tformer.decode.sample import prefill
from tformer.decode.single_step import first_step
from tformer.layers.cache import Cache, KeyValues, Near

T, WINDOW, REACH = 66, 5, 24  # new tokens, far more than a ring of REACH slots, of which texts are no multiple
FIELDS = {'max_len': 128, 'window': WINDOW, 'scale': 2.0, 'num_decoder_layers': 3}
KINDS = {
    'all layers': {'attention_pattern': ('local',)},
    'some layers': {'attention_pattern': ('local', 'global')},
    'latents': {'attention_pattern': ('local', 'global'), 'position': 'rope', 'kv_latent_dim': 6, 'rotary_dim': 4},
    'a bias': {'attention_pattern': ('local', 'global'), 'position': 'alibi'},
}
WAYS = {
    'greedy': config.Decode(max_len=T),
    'draws': config.Decode(strategy='sample', max_len=T, num_outputs=2),
    'beams': config.Decode(strategy='beam', max_len=T, beam_size=2),
    'guided': config.Decode(max_len=T, guidance=1.5),
    'drafted': config.Decode(max_len=T, draft='prompt', draft_len=4),
    'many drafted': config.Decode(max_len=T, draft='prompt', draft_len=22),
    'integers': config.Decode(max_len=T, cache_quantization='int8'),
    'chunks': config.Decode(max_len=T, prefill_chunk=2),
}
FAMILIES = ('decoder', 'encoder_decoder', 'prefix_decoder')


def whole(monkeypatch) -> None:
    """Lets every layer keep all slots."""
    monkeypatch.setattr(Cache, 'for_steps', lambda self, end=None: self)
    monkeypatch.setattr(Cache, 'grown', Cache.wide)


def same(found, expected) -> None:
    """Equal tokens, and scores but for rounding."""
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-4)


def of(model, way, variables, batch):
    made = make_generate(model, WAYS[way], eos=EOS, banned=(*BANNED, EOS))  # so that no text ends early
    return jax.device_get(made(variables, batch, jax.random.key(3)))


QUICK = [('decoder', 'some layers', 'greedy'), ('prefix_decoder', 'some layers', 'draws')]
SLOW = [
    ('encoder_decoder', 'all layers', 'drafted'),
    ('decoder', 'latents', 'guided'),
    ('decoder', 'a bias', 'integers'),
    ('decoder', 'all layers', 'many drafted'),
    ('decoder', 'some layers', 'beams'),
]


def mark(*case):
    marks = () if case in QUICK else (pytest.mark.slow if case in SLOW else pytest.mark.proof)
    return pytest.param(*case, marks=marks)


EVERY = [mark(family, kind, way) for family in FAMILIES for kind in KINDS for way in WAYS]


@pytest.mark.parametrize(('family', 'kind', 'way'), EVERY)
def test_texts_are_those_of_caches_that_keep_all(monkeypatch, family, kind, way) -> None:
    model, variables = make(family, **FIELDS, **KINDS[kind])
    found = of(model, way, variables, batch_of(family))
    whole(monkeypatch)
    same(found, of(model, way, variables, batch_of(family)))


@pytest.mark.slow
def test_prompts_that_share_their_beginning_have_the_padding_behind_it_in_their_rings(monkeypatch) -> None:
    """Rows of 60 tokens and of 31, all of which begin with the same 30: 29 slots of padding between them."""
    model, variables = make('decoder', **FIELDS, **KINDS['some layers'])
    shared, rng = np.full((2, 30), 5, np.int32), np.random.default_rng(0)
    tokens = rng.integers(3, 11, (2, 60)).astype(np.int32)
    positions = np.stack([np.arange(60), np.arange(60) - 29]).clip(-1).astype(np.int32)
    tokens[0, :30], tokens[1, 29:59] = 5, 5
    batch = {'inputs': tokens, 'positions': positions, 'shared': shared}
    cfg = config.Decode(max_len=60)
    made = make_generate(model, cfg, eos=EOS, banned=(*BANNED, EOS))
    found = jax.device_get(made(variables, batch, jax.random.key(0)))
    cache, _ = read(model, cfg, variables, batch, 128)
    assert cache.near.positions_BS.shape == (2, 88) and sorted(map(slots_of, cache.own)) == [88, 88, 128]
    whole(monkeypatch)
    same(found, jax.device_get(made(variables, batch, jax.random.key(0))))
    del batch['shared']
    same(found, jax.device_get(make_generate(model, cfg, eos=EOS, banned=(*BANNED, EOS))(variables, batch, None)))


def read(model, cfg, variables, batch, slots):
    """The cache of prompts, as steps read it, and the prompts."""
    extend, cache, prompt = begin(model, variables, batch, slots)
    return prefill(extend, cache, prompt).for_steps(), prompt


def slots_of(layer: KeyValues) -> int:
    return layer.v_BKSU.shape[2]


def test_a_step_reads_the_window_and_what_may_be_drafted_of_layers_that_have_one() -> None:
    model, variables = make('decoder', **FIELDS, **KINDS['some layers'])
    for cfg, near in ((config.Decode(max_len=100), True), (config.Decode(max_len=15), False)):
        begun = jax.eval_shape(lambda cfg=cfg: first_step(model, cfg, variables, batch_of('decoder')))
        assert (begun.cache.near is not None) == near
        whole = begun.cache.slots
        assert list(map(slots_of, begun.cache.own)) == ([REACH, whole, REACH] if near else [whole] * 3)
    beams = config.Decode(strategy='beam', beam_size=2, max_len=100)
    begun = jax.eval_shape(lambda: first_step(model, beams, variables, batch_of('decoder')))
    assert begun.cache.near is None and len(set(map(slots_of, begun.cache.own))) == 1


def test_a_ring_holds_the_last_tokens_and_forgets_those_before() -> None:
    """Slots of a ring of 24 with the keys 0, 1, ... of one row: token p stands in slot p modulo 24."""
    keys = jnp.arange(40.0).reshape(1, 1, 40, 1)
    none = jnp.zeros((1, 40), bool)
    positions = jnp.arange(40)[None]
    cache = Cache((KeyValues.of(keys, keys),) * 2, positions, jnp.int32(40), none, reaches=(24, None)).for_steps()
    assert isinstance(cache.near, Near) and list(map(slots_of, cache.own)) == [24, 40]
    expected = [24 + slot if slot < 16 else slot for slot in range(24)]
    assert cache.near.positions_BS[0].tolist() == expected == cache.own[0].v_BKSU[0, 0, :, 0].tolist()
    assert int(cache.near.index) == 16
    grown = cache.grown(48)
    assert list(map(slots_of, grown.own)) == [24, 48] and grown.near.positions_BS.shape == (1, 24)
    rows = grown.by_row()
    written = rows.place(jnp.array([[40, 41, 42]]))
    assert written.near.positions_BS[0, 14:20].tolist() == [38, 39, 40, 41, 42, 19]
    assert written.back(jnp.array([2])).near.index.tolist() == [17] and written.back(2).index.tolist() == [41]
    new = jnp.full((1, 1, 3, 1), 7.0)
    layer = cache.own[0].extend(KeyValues.of(new, new), jnp.array([22]), around=True)
    assert layer.v_BKSU[0, 0, :, 0].tolist() == [7.0, *range(25, 40), *range(16, 22), 7.0, 7.0]


def test_a_cache_that_is_small_at_first_gets_its_rings_as_it_grows() -> None:
    keys = jnp.arange(16.0).reshape(1, 1, 16, 1)
    none, positions = jnp.zeros((1, 16), bool), jnp.arange(16)[None]
    small = Cache((KeyValues.of(keys, keys),) * 2, positions, jnp.int32(16), none, reaches=(24, None)).for_steps()
    assert small.near is None and list(map(slots_of, small.grown(20).own)) == [20, 20]
    grown = small.grown(40)
    assert list(map(slots_of, grown.own)) == [24, 40] and int(grown.near.index) == 16
    assert grown.near.positions_BS[0].tolist() == [*range(16), *[-1] * 8]
    assert small.wide(40).near is None


def asked(number: int):
    """Prompts of one row, whose texts are of unequal lengths."""
    batch = batch_of('decoder')
    rows = [{name: batch[name][i : i + 1] for name in ('inputs', 'positions')} for i in range(3)]
    return [(rows[i % 3], Drawing(), T - 7 * i) for i in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize('keeps', [False, True])
def test_rows_that_come_and_go_write_what_caches_that_keep_all_write(monkeypatch, keeps) -> None:
    """The slots of all rows go around several times, and so do the rings."""
    model, variables = make('decoder', **FIELDS, **KINDS['some layers'])

    def texts():
        engine = make_engine(model, asked(1)[0][0], rows=2, slots=5 + T - 1, banned=(*BANNED, EOS))
        own = engine.empty(variables).cache.own
        engine = KeptPrompts(engine, 2).keeping() if keeps else engine
        ended = write_all(engine, variables, iter(asked(7)), rows=2, ends=(EOS,))
        return list(map(slots_of, own)), sorted(ended)

    slots, found = texts()
    assert slots == [REACH, 5 + T - 1, REACH]
    whole(monkeypatch)
    slots, expected = texts()
    assert len(set(slots)) == 1
    assert [text[:2] for text in found] == [text[:2] for text in expected]
    np.testing.assert_allclose([text[2] for text in found], [text[2] for text in expected], atol=1e-3)
