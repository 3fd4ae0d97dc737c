"""Prompts that are read in parts, and beginnings that rows share: the caches and texts of those that are read whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import BANNED, EOS, PAD, T, make
from tformer import checks, config
from tformer.config import Config, Data, Decode, Model, Train
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode import text
from tformer.decode.drawing import Drawing
from tformer.decode.engine import make_engine, write_all
from tformer.decode.generate import begin, make_generate
from tformer.decode.sample import prefill
from tformer.decode.sample import read as read_in_parts
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.layers import masks
from tformer.model import build
from tformer.training import dummy_batch

V, P, SHARED = 11, 12, 5
LENGTHS = (12, 7, 9, 0)  # of the prompts; the last row is padding alone
MODELS = {
    'rotary': {'position': 'rope', 'num_kv_heads': 2},
    'window': {'position': 'rope', 'window': 3, 'attention_pattern': ('local', 'global')},
    'biased': {'position': 'alibi', 'attention_sink': 'learned'},
    'relative': {'position': 'relative', 'layer_sharing': 'all'},
    'learned': {'position': 'learned', 'num_experts': 4, 'expert_dispatch': 'dropless'},
    'recurrent': {'position': None, 'recurrence': 'gru'},
}
QUICK = ('window', 'recurrent')
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in MODELS]


@functools.cache
def model_of(name):
    return make('decoder', scale=2.0, max_len=24, **MODELS[name])


def prompts():
    """All begin with the same tokens, which stand at other places of each row."""
    rng = np.random.default_rng(1)
    tokens, same = rng.integers(3, V, (len(LENGTHS), P)), rng.integers(3, V, SHARED)
    positions = np.stack([np.arange(P) - (P - n) for n in LENGTHS]).clip(-1)
    for row, n in enumerate(LENGTHS[:-1]):
        tokens[row, P - n : P - n + SHARED] = same
    batch = {'inputs': np.where(positions < 0, PAD, tokens), 'positions': positions}
    return {name: value.astype(np.int32) for name, value in batch.items()} | {
        'rows': np.arange(4, dtype=np.int32)
    }, same


def held(cache):
    """Returns what a cache holds of each row by position; of a recurrent one the state."""
    if not hasattr(cache, 'positions_BS'):
        return [np.asarray(x) for x in jax.tree.leaves(cache.state)]
    positions_BS = np.asarray(cache.positions_BS)
    found = [sorted(positions_BS[row][positions_BS[row] >= 0].tolist()) for row in range(len(LENGTHS))]
    assert [len(each) for each in found] == [max(n - 1, 0) for n in LENGTHS]
    rows = []
    for row, places in enumerate(found):
        slots = [int(np.flatnonzero(positions_BS[row] == place)[0]) for place in places]
        rows += [np.asarray(x)[row][:, slots] for layer in cache.own for x in layer.pair()]
    return rows


def read(name, chunk=None, shared=False):
    model, variables = model_of(name)
    batch, same = prompts()
    if shared:
        batch['shared'] = np.tile(same, (len(LENGTHS), 1))

    def cached(variables, batch):
        extend, cache, prompt = begin(model, variables, batch, P + T, chunk)
        return prefill(extend, cache, prompt)

    return jax.jit(cached)(variables, batch)


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_a_cache_is_the_same_but_for_rounding_however_its_prompt_was_read(name) -> None:
    """In chunks that divide 11 tokens, or leave some; the last row has what it shares alone, or nothing."""
    whole = held(read(name))
    for chunk in (1, 4, 11, 30):
        for one, other in zip(held(read(name, chunk)), whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    for chunk in (None, 2):
        cache = read(name, chunk, shared=True)
        if hasattr(cache, 'positions_BS'):
            assert int(cache.index) == P - 1
            assert np.asarray(cache.positions_BS)[-1, : SHARED + 1].tolist() == [*range(SHARED), -1]
            cache = cache.replace(positions_BS=cache.positions_BS.at[-1].set(-1))
        rows = slice(None, -1) if name == 'recurrent' else slice(None)
        for one, other in zip(held(cache), whole, strict=True):
            axis_rows = (slice(None), rows) if name == 'recurrent' else (rows,)
            np.testing.assert_allclose(one[axis_rows], other[axis_rows], rtol=2e-5, atol=2e-5)


def test_only_what_is_read_into_an_empty_cache_has_a_known_order() -> None:
    """Kernels that skip blocks by the places of queries and keys would be wrong behind other tokens."""
    seen, tokens = [], jnp.zeros((2, 11), jnp.int32)

    def extend(tokens_BT, positions_BT, cache):
        seen.append((tokens_BT.shape[1], masks.known_order()))
        return tokens_BT, cache

    for chunk, empty in ((None, True), (None, False), (4, True), (4, False)):
        read_in_parts(extend, 0, tokens, tokens, chunk=chunk, empty=empty)
    assert {each for each in seen if each[0] == 11} == {(11, 'front'), (11, None)}
    assert {each for each in seen if each[0] < 11} == {(3, 'front'), (3, None), (4, None)}


WAYS = [
    {'strategy': 'greedy', 'repetition_penalty': 1.4},
    {'strategy': 'sample', 'num_outputs': 2},
    {'strategy': 'beam', 'num_outputs': 2, 'no_repeat_ngram': 2},
    {'strategy': 'greedy', 'draft': 'prompt', 'draft_len': 2},
    {'strategy': 'greedy', 'guidance': 2.0},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields', [pytest.param(x, marks=() if i < 1 else pytest.mark.proof) for i, x in enumerate(WAYS)]
)
@pytest.mark.parametrize('name', ['window', pytest.param('learned', marks=pytest.mark.proof)])
def test_devices_that_split_the_tokens_of_a_row_write_the_same(name, fields) -> None:
    """They share the slots of a cache; eleven tokens of a prompt they do not divide."""
    (model, variables), (batch, _) = model_of(name), prompts()
    decode, mesh = config.Decode(max_len=T, **fields), config.Mesh(data=2, context=4)

    def written():
        generate = make_generate(model, decode, eos=EOS, banned=BANNED)
        return jax.device_get(generate(variables, batch, jax.random.key(3)))

    tokens, scores = written()
    with sharding.placed(meshes.make_mesh(mesh), mesh):
        spread, others = written()
    np.testing.assert_array_equal(spread, tokens)
    np.testing.assert_allclose(others, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields', [pytest.param(x, marks=() if i < 1 else pytest.mark.proof) for i, x in enumerate(WAYS)]
)
def test_texts_are_the_same_token_for_token(fields) -> None:
    (model, variables), (batch, same) = model_of('window'), prompts()

    def written(chunk, shared):
        decode = config.Decode(max_len=T, prefill_chunk=chunk, **fields)
        given = {**batch, 'shared': np.tile(same, (len(LENGTHS), 1))} if shared else batch
        generate = make_generate(model, decode, eos=EOS, banned=BANNED)
        return jax.device_get(generate(variables, given, jax.random.key(3)))

    tokens, scores = written(None, False)
    assert len(set(map(tuple, tokens.tolist()))) > 2
    for chunk, shared in ((4, False), (None, True), (3, True)):
        found = written(chunk, shared)
        np.testing.assert_array_equal(found[0], tokens)
        np.testing.assert_allclose(found[1], scores, atol=1e-4)


@pytest.mark.proof
def test_a_model_that_drafts_reads_prompts_in_parts_too() -> None:
    (model, variables), (small, others), (batch, same) = model_of('window'), model_of('rotary'), prompts()
    both = {**variables, 'draft': others}
    found = []
    for chunk, given in ((None, batch), (4, batch), (3, {**batch, 'shared': np.tile(same, (len(LENGTHS), 1))})):
        decode = config.Decode(max_len=T, prefill_chunk=chunk, draft_len=2)
        found.append(
            np.asarray(make_generate(model, decode, eos=EOS, banned=BANNED, draft=small)(both, given, None)[0])
        )
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.proof
def test_rows_that_come_and_go_read_prompts_in_parts() -> None:
    (model, variables), (batch, _) = model_of('window'), prompts()
    rows = [{name: batch[name][row : row + 1] for name in ('inputs', 'positions')} for row in range(3)]

    def written(chunk):
        engine = make_engine(model, rows[0], rows=2, slots=P + T, banned=BANNED, chunk=chunk)
        asked = iter([(row, Drawing(), T) for row in rows])
        return {number: tokens for number, tokens, _ in write_all(engine, variables, asked, rows=2, ends=(EOS,))}

    assert written(None) == written(4) == written(1)


def test_the_memory_of_a_prompt_is_that_of_a_part() -> None:
    """No array but the cache has the whole length in the program of a prompt of 256 tokens, and no scores do."""
    model, variables = make('decoder', max_len=512, position='rope', num_heads=2)

    def temporary(chunk):
        def cached(variables, batch):
            extend, cache, prompt = begin(model, variables, batch, 320, chunk)
            return prefill(extend, cache, prompt)

        batch = {'inputs': jnp.ones((2, 257), jnp.int32), 'positions': jnp.tile(jnp.arange(257), (2, 1))}
        return jax.jit(cached).lower(variables, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporary(32) < temporary(None) / 3


# --------------------------------------------------------------------------------------------------------- texts
def test_the_tokens_with_which_rows_begin() -> None:
    begun = [*range(40)]
    assert text.common([[*begun, 1], [*begun, 2, 3], [*begun, 1, 5]]) == begun[:32]
    assert text.common([begun[:33], begun]) == begun[:32]
    assert text.common([begun[:32], begun]) == begun[:16]  # the last token of each row is its own
    assert text.common([begun]) == text.common([]) == text.common([begun[:16], begun]) == []
    assert text.common([[*begun[:20], 9], begun, [7, *begun]]) == []


@pytest.mark.slow
@pytest.mark.parametrize('shares', [True, False])
def test_a_run_reads_what_its_prompts_share_once(shares, monkeypatch) -> None:
    """With and without, it writes the same texts."""
    model = Model(family='decoder', vocab_size=Byte.vocab_size, emb_dim=16, num_heads=2, mlp_dim=16, max_len=64)
    decode = Decode(strategy='sample', max_len=6, batch_size=3)
    run = Config(model, Data(tokenizer='byte', length=48), train=Train(num_steps=1), decode=decode)
    run = checks.resolve(run, vocab_size=model.vocab_size)
    made, seen = build(run.model), []
    variables = made.init(jax.random.key(0), dummy_batch.random_batch(run))
    writer = text.make_writer(made, run, Tokenizers(Byte(), Byte()), cut=False)
    texts = [f'You are a helpful assistant. {name}' for name in ('Hi', 'Hello', 'What is it?', 'a', 'Tell me')]

    def program(variables, batch, rng):
        seen.append(batch['shared'].shape[1] if 'shared' in batch else 0)
        return writer.program(variables, batch, rng)

    watched = writer._replace(program=program, shares=writer.shares and shares)
    found = {number: outputs[0].text for number, outputs in watched.write(variables, texts)}
    assert seen == ([16, 16] if shares else [0, 0])
    alone = dict(watched.write(variables, texts[:1]))
    assert alone[0][0].text == found[0] and len(set(found.values())) > 3


@pytest.mark.parametrize(
    ('family', 'objective', 'more', 'words'),
    [
        ('decoder', 'prefix_lm', {}, r'data\.bidirectional_prefix=True'),
        ('decoder', 'causal_lm', {'num_experts': 4, 'expert_dispatch': 'capacity'}, r'model\.expert_dispatch=capacity'),
    ],
)
def test_what_must_be_read_whole_is_refused(family, objective, more, words) -> None:
    run = Config(Model(family, **more), train=Train(objective=objective, num_steps=1), decode=Decode(prefill_chunk=8))
    line = rf'^decode\.prefill_chunk=8 reads prompts in parts, but {words} needs all of their tokens at once: use None$'
    with pytest.raises(UserError, match=line):
        checks.check(run)


@pytest.mark.parametrize(
    ('more', 'words'),
    [
        ({'position': 'rope', 'rope_scaling': 'dynamic', 'rope_factor': 2.0}, r'model\.rope_scaling=dynamic'),
        ({'num_experts': 4, 'expert_dispatch': 'capacity'}, r'model\.expert_dispatch=capacity'),
    ],
)
def test_drafts_of_tokens_that_must_be_read_by_themselves_are_refused(more, words) -> None:
    run = Config(
        Model('decoder', **more), train=Train(objective='causal_lm', num_steps=1), decode=Decode(draft='prompt')
    )
    line = rf'^decode\.draft=prompt reads several tokens in a step, but {words} needs them by themselves: use None$'
    with pytest.raises(UserError, match=line):
        checks.check(run)
