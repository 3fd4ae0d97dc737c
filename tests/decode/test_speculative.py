"""Speculative decoding: the texts of greedy search, the distribution of sampling, whatever drafts the tokens."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import BANNED, CASES, EOS, LATENT_CASES, PAD, B, T, V, batch_of, make, row
from tformer import config
from tformer.decode.generate import make_generate
from tformer.decode.penalties import Penalties
from tformer.decode.rules import Rules
from tformer.decode.sample import Ending, Prompt, Sampling, greedy
from tformer.decode.speculative import MATCHED, by_look_up, by_model, greedy_warp, look_up, speculate

DRAFTS = ('prompt', 'model', 'itself')


@functools.cache
def models(family):
    """A model, and a smaller one that drafts for it."""
    model, variables = make(family, scale=2.0, position='learned', num_kv_heads=2)
    small, others = make(family, scale=2.0, seed=1, num_decoder_layers=1, emb_dim=8, num_heads=2, position='rope')
    return model, variables, small, others


@functools.cache
def program(family, drafted, **fields):
    model, _, small, _ = models(family)
    ends = {
        'eos': EOS,
        'banned': BANNED,
        'others': fields.pop('others', ()),
        'rules': Rules(constraint=fields.pop('constraint', None), bias=fields.pop('bias', ())),
    }
    decode = config.Decode(max_len=T, draft='prompt' if drafted == 'prompt' else None, **fields)
    return make_generate(model, decode, **ends, draft={'model': small, 'itself': model}.get(drafted))


def written(family, drafted, batch, seed=0, **fields):
    _, variables, _, others = models(family)
    draft = {'model': others, 'itself': variables}.get(drafted)
    together = variables if draft is None else {**variables, 'draft': draft}
    tokens, scores = program(family, drafted, **fields)(together, batch, jax.random.key(seed))
    return np.asarray(tokens), np.asarray(scores)


class SumsOfThree(NamedTuple):
    """A token leaves what all before it leave together when it is divided by 3; so does the end."""

    def start(self, shape):
        return jnp.zeros(shape, jnp.int32)

    def allows(self, state, left):
        tokens_V = jnp.arange(V)
        return tokens_V[None] % 3 == state[:, None]

    def follow(self, state, tokens):
        return (state + tokens + 1) % 3


CHANGES = [
    ('decoder', {}),
    *(pytest.param(family, {}, marks=pytest.mark.proof) for family in (*CASES[1:], *LATENT_CASES)),
    pytest.param('decoder', {'forced_end': True}, marks=pytest.mark.proof),
    ('encoder_decoder', {'others': (5,)}),
    pytest.param('prefix_decoder', {'min_len': 3, 'repetition_penalty': 1.5}, marks=pytest.mark.proof),
    ('decoder', {'no_repeat_ngram': 2, 'frequency_penalty': 0.5}),
    ('decoder', {'constraint': SumsOfThree()}),
    ('decoder', {'bias': (((4,), 1.5), ((4, 4), -9.0), ((3, 4), -9.0))}),
]


@pytest.mark.slow
@pytest.mark.parametrize(('family', 'fields'), CHANGES, ids=str)
@pytest.mark.proof_cases(
    "encoder_decoder-{'others': (5,)}",
    "decoder-{'bias': (((4,), 1.5), ((4, 4), -9.0), ((3, 4), -9.0))}",
    "decoder-{'no_repeat_ngram': 2, 'frequency_penalty': 0.5}",
)
def test_a_greedy_text_is_that_of_greedy_search(family, fields) -> None:
    batch = batch_of(family)
    tokens, scores = written(family, None, batch, **fields)
    for drafted, number in (('prompt', 3), ('itself', 3)) if fields else (('prompt', 1), ('model', 3), ('itself', 4)):
        found = written(family, drafted, batch, draft_len=number, **fields)
        np.testing.assert_array_equal(found[0], tokens)
        np.testing.assert_allclose(found[1], scores, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    'drafted', ['model', *(pytest.param(each, marks=pytest.mark.proof) for each in ('prompt', 'itself'))]
)
def test_each_row_is_as_if_alone(drafted) -> None:
    batch = batch_of('decoder')
    fields = {'strategy': 'sample', 'temperature': 1.5, 'draft_len': 2}
    tokens, scores = written('decoder', drafted, batch, **fields)
    for index in range(B):
        alone = written('decoder', drafted, row(batch, index), **fields)
        np.testing.assert_array_equal(alone[0][0], tokens[index])
        np.testing.assert_allclose(alone[1][0], scores[index], atol=1e-4)
    assert (written('decoder', drafted, batch, seed=1, **fields)[0] != tokens).any()


@pytest.mark.slow
def test_several_draws_of_a_text_are_not_the_same() -> None:
    batch = batch_of('decoder')
    fields = {'strategy': 'sample', 'temperature': 3.0, 'draft_len': 2}
    one, _ = written('decoder', 'model', batch, **fields)
    tokens, _ = written('decoder', 'model', batch, num_outputs=3, **fields)
    np.testing.assert_array_equal(tokens[::3], one)
    assert all(len(np.unique(tokens[3 * i : 3 * i + 3], axis=0)) > 1 for i in range(B))


@pytest.mark.slow
def test_a_text_that_fills_the_model_is_written_to_its_end() -> None:
    """The model has 16 positions: drafts that would pass them change nothing."""
    model, variables, small, others = models('decoder')
    batch = batch_of('decoder')
    length = 16 + 1 - batch['inputs'].shape[1]
    decode = config.Decode(max_len=length, min_len=length, draft_len=7)
    plain = make_generate(model, decode, eos=EOS, banned=BANNED)(variables, batch, None)
    for drafted, draft in (('prompt', None), (None, small)):
        asked = dataclasses.replace(decode, draft=drafted)
        made = make_generate(model, asked, eos=EOS, banned=BANNED, draft=draft)
        found = made({**variables, 'draft': others}, batch, None)
        np.testing.assert_array_equal(found[0], plain[0])
        np.testing.assert_allclose(found[1], plain[1], atol=1e-3)


# ---------------------------------------------------------------------------------- distributions written down
STATES, LONG = 31, 3
TABLES = 1.3 * np.random.default_rng(3).standard_normal((2, STATES, 6)).astype(np.float32)  # of the model, of the draft


class Reads(flax.struct.PyTreeNode):
    """What has been read of each row, of which the next token depends, by its place."""

    seen_BS: jax.Array
    index: jax.Array

    def by_row(self):
        return self

    def back(self, tokens):
        return self.replace(index=self.index - tokens)


def stepping(table, calls=None):
    def extend(tokens_BT, positions_BT, cache):
        if calls is not None:
            jax.debug.callback(lambda: calls.append(tokens_BT.shape))
        place = cache.index[:, None] + jnp.arange(tokens_BT.shape[1])[None]
        seen_BS = jax.vmap(lambda row, at, new: row.at[at].set(new))(cache.seen_BS, place, tokens_BT)
        weights_S = 7 ** jnp.arange(seen_BS.shape[1]) % STATES
        upto_BTS = jnp.arange(seen_BS.shape[1])[None, None] <= place[:, :, None]
        state_BT = jnp.sum(jnp.where(upto_BTS, (seen_BS * weights_S[None])[:, None], 0), -1) % STATES
        return jnp.asarray(table)[state_BT], Reads(seen_BS, cache.index + tokens_BT.shape[1])

    return extend


def reads(rows):
    return Reads(jnp.zeros((rows, 20), jnp.int32), jnp.zeros(rows, jnp.int32))


def prompt_of(rows, tokens=(1,)):
    tokens_BP = jnp.tile(jnp.array(tokens), (rows, 1))
    return Prompt(tokens_BP, jnp.broadcast_to(jnp.arange(len(tokens)), tokens_BP.shape), jnp.arange(rows))


def drafting(kind, prompt, number, warp, banned=BANNED):
    rows = len(prompt.rows_B)
    if kind == 'look-up':
        return by_look_up(jnp.tile(jnp.array([3, 4, 5, 1]), (rows, 1)), jnp.ones((rows, 4), bool), number=number)
    table = TABLES[{'itself': 0, 'other': 1}[kind]]
    return by_model(stepping(table), reads(rows), prompt, warp, number=number, longest=99, banned=banned)


GIVEN = (4, 1)  # the prompt
BIASES = (((4,), 0.9), ((3, 4), -2.0), ((4, 1, 5), 1.2), ((3, EOS), 1.5))
RULES = Rules(Penalties(1.6, 0.7, -0.4, no_repeat_ngram=2, min_len=2, ends=(EOS,)), None, BIASES)


def ruled(logits, text):
    """What `RULES` make of the logits behind a text, by rules on lists: first the biases, then the penalties."""
    tokens, found = (*GIVEN, *text), logits.copy()
    for (*before, last), value in BIASES:
        found[last] += value * (tokens[len(tokens) - len(before) :] == tuple(before))
    for token in set(tokens):
        found[token] *= 1.6 if found[token] < 0 else 1 / 1.6
    for token in set(text):
        found[token] -= 0.7 - 0.4 * text.count(token)
    for first, second in itertools.pairwise(tokens):
        found[second] -= np.inf if first == tokens[-1] else 0
    found[EOS] -= np.inf if len(text) < 2 else 0
    return found


def texts(sampling, rules):
    """Returns the probability of every text, written down token by token."""
    found, open_texts = {}, {(): 1.0}
    for step in range(LONG):
        for text, probability in list(open_texts.items()):
            del open_texts[text]
            state = sum(token * (7**place % STATES) for place, token in enumerate((*GIVEN, *text))) % STATES
            logits = np.where(np.isin(np.arange(6), BANNED), -np.inf, TABLES[0][state])
            logits = ruled(logits, text) if rules.any else logits
            weights = np.asarray(jax.nn.softmax(sampling.warp(jnp.asarray(logits)[None])[0]))
            for token in np.flatnonzero(weights).tolist():
                whole = token == EOS or step == LONG - 1
                (found if whole else open_texts)[(*text, token)] = probability * weights[token]
    return found


HOW = {
    'plain': (Sampling(), Rules()),
    'cut': (Sampling(temperature=0.6, top_k=3), Rules()),
    'ruled': (Sampling(temperature=1.5, top_p=0.98, min_p=0.1), RULES),
}
QUICK = [*itertools.product(('look-up', 'other', 'itself'), ('plain', 'cut')), ('look-up', 'ruled')]
DRAWN = [
    pytest.param(kind, how, number, marks=() if number == 2 and (kind, how) in QUICK else pytest.mark.proof)
    for kind, how, number in itertools.product(('look-up', 'other', 'itself'), HOW, (1, 2, 4))
]


@pytest.mark.slow
@pytest.mark.parametrize(('kind', 'how', 'number'), DRAWN)
@pytest.mark.proof_cases('look-up-cut-2', 'other-cut-2', 'other-plain-2')
def test_texts_have_the_distribution_of_the_model_by_itself(kind, how, number) -> None:
    """Chi-squared of 20,000 texts; the bound is passed by one seed in 10,000."""
    sampling, rules = HOW[how]
    rows, ending = 20_000, Ending(LONG, EOS, BANNED)

    def warp(logits_BV):
        return jax.nn.log_softmax(sampling.warp(logits_BV))

    @jax.jit
    def draw(rng):
        prompt = prompt_of(rows, GIVEN)
        draft = drafting(kind, prompt, number, warp)
        return speculate(
            stepping(TABLES[0]), reads(rows), prompt, ending, draft,
            number=number, longest=99, keys_B=prompt.keys(rng), warp=warp, rules=rules,
        )  # fmt: skip

    tokens = np.asarray(draw(jax.random.key(number))[0])
    expected = texts(sampling, rules)
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-5)
    drawn = [tuple(each[: each.index(EOS) + 1] if EOS in each else each) for each in tokens.tolist()]
    counts = {text: drawn.count(text) for text in set(drawn)}
    assert counts.keys() <= expected.keys()
    likely = [text for text, probability in expected.items() if rows * probability >= 5]
    rest = 1 - sum(expected[text] for text in likely)
    pairs = [(counts.get(text, 0), rows * expected[text]) for text in likely]
    if rows * rest >= 5:
        pairs.append((rows - sum(count for count, _ in pairs), rows * rest))
    statistic, freedom = sum((count - want) ** 2 / want for count, want in pairs), len(pairs) - 1
    assert statistic < freedom + 3.72 * np.sqrt(2 * freedom) + 6  # the normal approximation, and its skew


@pytest.mark.slow
def test_a_draft_that_is_the_model_is_accepted_whole() -> None:
    """Eleven tokens, four drafted at a time, of which each reading keeps five: three readings."""
    calls, ending = [], Ending(11, EOS, (*BANNED, EOS))
    for kind, expected in (('itself', 3), ('other', None)):
        calls.clear()
        draft = drafting(kind, prompt_of(1), 4, greedy_warp, ending.banned)
        options = {'number': 4, 'longest': 99, 'keys_B': prompt_of(1).keys(jax.random.key(0)), 'warp': greedy_warp}
        found = speculate(stepping(TABLES[0], calls), reads(1), prompt_of(1), ending, draft, **options)
        plain = greedy(stepping(TABLES[0]), reads(1), prompt_of(1), ending)
        np.testing.assert_array_equal(found[0], plain[0])
        jax.effects_barrier()
        assert set(calls) == {(1, 5)} and (len(calls) == expected or (expected is None and 3 < len(calls) <= 11))


def plain_look_up(tokens, end, number):
    """The latest place of the longest match of at most `MATCHED` last tokens, and what followed there, again and
    again."""
    best = None
    for place in range(end - 1):
        same = 0
        while same < MATCHED and place - same >= 0 and tokens[place - same] == tokens[end - 1 - same]:
            same += 1
        if same and (best is None or same >= best[0]):
            best = same, place
    if best is None:
        return None
    between = tokens[best[1] + 1 : end]
    return [between[i % len(between)] for i in range(number)]


def test_what_followed_the_last_tokens_is_drafted() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(3, 6, (60, 12))
    real = np.arange(12)[None] >= rng.integers(0, 4, 60)[:, None]
    ends = rng.integers(5, 13, 60)
    found = np.asarray(look_up(jnp.asarray(rows), jnp.asarray(real), jnp.asarray(ends), 5))
    checked = 0
    for tokens, own, end, drafted in zip(rows, real, ends, found, strict=True):
        padding = int((~own).sum())
        expected = plain_look_up(tokens[padding:].tolist(), int(end) - padding, 5)
        if expected is not None:
            assert drafted.tolist() == expected
            checked += 1
    assert checked > 40
    repeated = look_up(jnp.array([[7, 8, 9, 7, 8, 9, 7, PAD, PAD]]), jnp.ones((1, 9), bool), jnp.array([7]), 5)
    assert repeated.tolist() == [[8, 9, 7, 8, 9]]
