"""Texts under a constraint, against regular expressions of Python and against all texts one by one."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hub_files
from small_decoding import Nothing, generator
from tformer import checks
from tformer.config import Config, Data, Decode, Model, Train
from tformer.data.tokenizers.bytes_and_characters import Byte, Char, Symbol
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import FIRST
from tformer.decode import constraints, regular
from tformer.decode.beam import Beams, beam_search
from tformer.decode.penalties import Penalties
from tformer.decode.rules import Rules
from tformer.decode.sample import Ending, Prompt, Sampling, greedy, sample
from tformer.errors import UserError
from tformer.model import build
from tformer.training import dummy_batch

END = 1
PIECES = [None, None, b'a', b'b', b'ab', b'ba ', b' a', b' ', '\u00e9'.encode(), '\u00e9'.encode()[:1], b'\xa9', b'c']
V = len(PIECES)


class Pieces:
    """A tokenizer of these pieces, which drops a space that a text begins with."""

    vocab_size, strips_first_space = V, True
    ordinary = np.array([piece is not None for piece in PIECES])

    ordinary_ids = np.flatnonzero(ordinary)

    def spell(self, index):
        return PIECES[index]

    def decode(self, ids):
        return b''.join(PIECES[index] or b'' for index in ids).removeprefix(b' ').decode(errors='replace')


def automaton(max_len=6, **asked):
    made = constraints.constraint(Decode(max_len=max_len, **asked), Pieces(), (END,), V)
    assert made is not None
    return made


PATTERNS = ['(ab)*', 'a b?c|\u00e9+', '[^a]{2}', 'a.{0,2}', '(b|ba a)c?', '']


def written(made, rows):
    """Returns whether each row of tokens, [N, T], and an end are allowed one after the other."""
    tokens = np.column_stack([np.reshape(rows, (len(rows), -1)).astype(int), np.full(len(rows), END)])
    state, allowed = made.start((len(rows),)), np.ones(len(rows), bool)
    for number in range(tokens.shape[1]):
        mask = np.asarray(made.allows(state, jnp.asarray(tokens.shape[1] - number)))
        allowed &= mask[np.arange(len(rows)), tokens[:, number]]
        state = made.follow(state, jnp.asarray(tokens[:, number]))
    return allowed.tolist()


def rows_up_to(length):
    """Yields all rows of ordinary tokens of each length."""
    for each in range(length + 1):
        yield [*itertools.product(range(2, V), repeat=each)]


@pytest.mark.slow
@pytest.mark.parametrize('pattern', PATTERNS)
def test_the_texts_that_can_be_written_are_those_that_match(pattern):
    made, found = automaton(regex=pattern), 0
    for rows in rows_up_to(3):
        for tokens, allowed in zip(rows, written(made, rows), strict=True):
            text = Pieces().decode(tokens)
            starts_with_nothing = tokens[:1] == (PIECES.index(b' '),)  # it would add no text
            matches = '\ufffd' not in text and re.fullmatch(pattern, text) is not None
            assert allowed == (matches and not starts_with_nothing), (tokens, text)
            found += matches
    assert found > (3 if pattern else 0)


@pytest.mark.slow
def test_choices_are_written_by_any_of_their_tokens_and_nothing_else():
    made = automaton(choices=('ab', 'aba c', 'b', 'a.'))
    rows = [row for rows in rows_up_to(4) for row, allowed in zip(rows, written(made, rows), strict=True) if allowed]
    assert {Pieces().decode(row) for row in rows} == {'ab', 'aba c', 'b'} and {(4,), (2, 3)} < {*rows}
    assert int(made.least_Q[0]) == 2  # ab, the end


@pytest.mark.slow
def test_banned_texts_stand_nowhere_by_whatever_tokens():
    """Over two tokens, inside one, as bytes of a character; and of texts that fit a form."""
    banned = ('ab', 'a.', 'c b', 'bab', '\u00e9c')
    made, forbidden, free = automaton(banned=banned), 0, 0
    for rows in rows_up_to(3):
        for tokens, allowed in zip(rows, written(made, rows), strict=True):
            text = Pieces().decode(tokens)
            starts_with_nothing = tokens[:1] == (PIECES.index(b' '),)
            stands = any(each in text for each in banned)
            if '\ufffd' not in text:
                assert allowed == (not stands and not starts_with_nothing), (tokens, text)
            forbidden, free = forbidden + stands, free + (not stands)
    assert min(forbidden, free) > 100
    assert bool(made.allows(made.start((1,)), jnp.asarray(1))[0, PIECES.index(b'b')])  # no text has to come out whole
    both = automaton(regex='[abc ]{0,3}', banned=('ab', 'c'))
    rows = [row for rows in rows_up_to(3) for row, allowed in zip(rows, written(both, rows), strict=True) if allowed]
    texts = {Pieces().decode(row) for row in rows}
    assert texts and all(re.fullmatch('[ab ]{0,3}', text) and 'ab' not in text for text in texts)


def test_a_text_begins_as_it_is_asked_to_by_whatever_tokens():
    made, found = automaton(begin='ab'), 0
    for rows in rows_up_to(3):
        for tokens, allowed in zip(rows, written(made, rows), strict=True):
            text = Pieces().decode(tokens)
            if '\ufffd' not in text and tokens[:1] != (PIECES.index(b' '),):
                assert allowed == text.startswith('ab'), (tokens, text)
                found += allowed
    assert found > 20
    begun = made.follow(made.start((1,)), jnp.asarray([PIECES.index(b'ab')]))
    assert made.allows(begun, jnp.asarray(1))[0, PIECES.index(b'c')]  # the length may cut it
    assert not made.allows(made.start((1,)), jnp.asarray(1))[0, PIECES.index(b'a')]
    both = automaton(begin='a', banned=('ab',), regex='[abc]{3}')
    rows = [row for rows in rows_up_to(3) for row, allowed in zip(rows, written(both, rows), strict=True) if allowed]
    texts = {Pieces().decode(row) for row in rows}
    assert texts == {f'a{x}{y}' for x in 'ac' for y in 'abc'} - {'aab'}


# ------------------------------------------------------------------------------------------------------ strategies
TABLE = np.random.default_rng(3).normal(size=(V, V)).astype(np.float32)  # the next token's logits after each token


def step(tokens_BT, positions_BT, cache):
    return jnp.asarray(TABLE)[tokens_BT], cache


def prompts(*tokens):
    rows = jnp.asarray(tokens)[:, None]
    return Prompt(rows, jnp.zeros_like(rows), jnp.arange(len(tokens)))


def texts_of(tokens_BT):
    for row in np.asarray(tokens_BT).tolist():
        assert END in row
        yield Pieces().decode(row[: row.index(END)])


@pytest.mark.slow
@pytest.mark.parametrize('max_len', [4, 9])
def test_what_every_strategy_writes_fits_and_ends_in_time(max_len):
    """The longest text that fits needs more tokens than there are, so the end must be seen coming."""
    pattern = '(ab|b a|\u00e9c){2,9}'
    rules = Rules(constraint=automaton(max_len, regex=pattern))
    ending, given = Ending(max_len, END, banned=(0,)), prompts(*range(2, V))
    draw = jax.jit(lambda key: sample(step, 0, given, ending, key, Sampling(temperature=3.0), rules=rules)[0])
    found = [greedy(step, 0, given, ending, rules=rules)[0], *map(draw, jax.random.split(jax.random.key(0), 20))]
    found += [beam_search(step, Nothing(), given, ending, Beams(3, 0.6), rules=rules).tokens_BMT[:, 0]]
    texts = [text for tokens_BT in found for text in texts_of(tokens_BT)]
    assert all(re.fullmatch(pattern, text) for text in texts) and len(set(texts)) > 1


def test_a_wide_beam_finds_the_likeliest_text_that_fits():
    made, max_len = automaton(4, regex='[ab]{1,3}'), 4
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(TABLE)))
    fitting = {}
    for rows in rows_up_to(max_len - 1):
        for tokens, allowed in zip(rows, written(made, rows), strict=True):
            if allowed:
                fitting[tokens] = sum(logprobs[a, b] for a, b in itertools.pairwise([5, *tokens, END]))
    best = max(fitting, key=fitting.get)
    found = beam_search(
        step,
        Nothing(),
        prompts(5),
        Ending(max_len, END, banned=(0,)),
        Beams(40, 0.0),
        rules=Rules(constraint=made),
    )
    assert tuple(found.tokens_BMT[0, 0, : len(best) + 1].tolist()) == (*best, END)
    assert float(found.scores_BM[0, 0]) == pytest.approx(fitting[best], rel=1e-5)
    assert np.isfinite(found.scores_BM[0]).sum() == min(40, len(fitting))


def test_penalties_that_leave_nothing_of_what_fits_end_the_text():
    rules = Rules(Penalties(no_repeat_ngram=1, ends=(END,)), automaton(5, regex='c{3}'))
    tokens, _ = greedy(step, 0, prompts(2), Ending(5, END), rules=rules)
    assert tokens.tolist() == [[V - 1, END, 0, 0, 0]]


def test_a_forced_end_comes_behind_the_beginning():
    cfg = Decode(max_len=4, begin='cca', forced_end=True)
    rules = Rules(constraint=constraints.constraint(cfg, Pieces(), (END,), V))
    tokens, _ = greedy(step, 0, prompts(2, 3, 11), Ending(4, END, banned=(0,), forced=True), rules=rules)
    assert set(texts_of(tokens)) == {'cca'}


def test_classes_are_those_of_every_token_byte_by_byte():
    of_bytes = regular.automaton('(ab|b a|\u00e9c){2,9}| ?[a-c]{3}')
    made, Q = constraints.over_tokens(of_bytes, Pieces(), (END,), V + 3), len(of_bytes.next_QB)
    for token, piece in enumerate(PIECES):
        for state in range(Q):
            after = -1 if piece is None else state
            for byte in piece or b'':
                after = -1 if after < 0 else of_bytes.next_QB[after, byte]
            if token != END:
                assert made.next_QC[state + 1, made.classes_V[token]] == (after + 1 or -1)
    assert np.all(np.asarray(made.next_QC)[:, np.asarray(made.classes_V[V:])] == -1)


def test_a_table_that_would_be_large_is_refused(monkeypatch):
    monkeypatch.setattr(constraints, '_MOST', 200)
    with pytest.raises(
        UserError, match=r'^decode\.regex=.*: it has 91 states, and more than 200 numbers .* repetitions$'
    ):
        automaton(60, regex='(ab|c){30}')


def test_any_pure_functions_are_a_constraint():
    """Tokens rise; the state is the last one."""

    class Rising:
        def start(self, shape):
            return {'last': jnp.zeros(shape, jnp.int32)}

        def allows(self, state, left):
            return jax.vmap(lambda last: (jnp.arange(V) > last) | (jnp.arange(V) == END))(state['last'].ravel())

        def follow(self, state, tokens):
            return {'last': tokens}

    rules, ending = Rules(constraint=Rising()), Ending(8, END)
    tokens, _ = sample(step, 0, prompts(2, 3, 4), ending, jax.random.key(1), Sampling(), rules=rules)
    beams = beam_search(step, Nothing(), prompts(2, 3), ending, Beams(2, 1.0), rules=rules)
    for row in [*tokens.tolist(), *beams.tokens_BMT.reshape(-1, 8).tolist()]:
        kept = row[: row.index(END)] if END in row else row
        assert kept == sorted(set(kept))


# ------------------------------------------------------------------------------------------------------ tokenizers
TEXTS = ['the cat', 'a  b\n\u00e9\u4e2d', 'xyz the', '\U0001f600 the cat']


@functools.cache
def tokenizer(name):
    ours = {'byte': Byte, 'char': Char, 'symbol': Symbol, 'sentencepiece': SentencePiece}
    if name in ours:
        return ours[name].train(TEXTS * 20)
    return HubTokenizer(hub_files.FILES[name]().to_str().encode())


@pytest.mark.parametrize(
    ('name', 'strips'),
    {
        'byte': False,
        'char': False,
        'symbol': True,
        'sentencepiece': False,
        'gpt2': False,
        't5': True,
        'llama': True,
    }.items(),
)
def test_a_text_is_what_its_tokens_spell(name, strips):
    made = tokenizer(name)
    texts = ['the cat', 'xyz b'] if name == 'symbol' else [*TEXTS, ' the', *hub_files.TEXTS]
    for given in texts:
        ids = made.encode(given)
        spelled = b''.join(made.spell(index) for index in ids)
        assert spelled.removeprefix(b' ' if strips else b'').decode() == made.decode(ids)
    assert made.strips_first_space == strips and made.spell(made.specials.eos) is None
    if name == 'symbol':
        assert made.spell(FIRST + 97) is None  # a byte, beside which no separator stands


def test_pieces_between_which_spaces_stand_spell_nothing():
    made = tokenizer('bert')
    assert not any(map(made.spell, range(made.vocab_size)))
    with pytest.raises(UserError, match=r'^decode\.choices needs a tokenizer whose tokens have their spaces'):
        constraints.constraint(Decode(choices=('a',)), made, (END,), made.vocab_size)


# ---------------------------------------------------------------------------------------------------------- files
SCHEMA = {
    'type': 'object',
    'properties': {'name': {'enum': ['a', 'b']}, 'size': {'type': 'integer'}, 'old': {'type': 'boolean'}},
    'required': ['name', 'size', 'old'],
}


def test_what_is_written_by_a_schema_is_json_that_fits_it(tmp_path):
    (tmp_path / 'schema.json').write_text(json.dumps(SCHEMA))
    made, max_len = Byte(), 60
    cfg = Decode(max_len=max_len, json_schema=str(tmp_path / 'schema.json'))
    rules = Rules(constraint=constraints.constraint(cfg, made, (made.specials.eos,), made.vocab_size))
    size = made.vocab_size
    given = Prompt(jnp.full((4, 1), size - 1), jnp.zeros((4, 1), jnp.int32), jnp.arange(4))

    def flat(tokens_BT, positions_BT, cache):
        return jnp.zeros((*tokens_BT.shape, size)), cache

    tokens, _ = sample(flat, 0, given, Ending(max_len, made.specials.eos), jax.random.key(0), Sampling(), rules=rules)
    for row in tokens.tolist():
        value = json.loads(made.decode(row[: row.index(made.specials.eos)]))
        assert [*value] == SCHEMA['required'] and value['name'] in 'ab'
        assert type(value['size']) is int and type(value['old']) is bool


@pytest.mark.parametrize(
    ('asked', 'message'),
    [
        ({'regex': 'a('}, r'regex=a\(: it is not a regular expression: missing \), unterminated subpattern'),
        (
            {'regex': 'a{9}'},
            r'regex=a\{9\}: the shortest text that fits has 10 tokens with its end: decode\.max_len=6$',
        ),
        ({'begin': 'aaaaaaa'}, r'begin=aaaaaaa: the shortest text that fits has 7 tokens: decode\.max_len=6$'),
        (
            {'begin': 'aaaaaa', 'forced_end': True},
            'begin=aaaaaa: the shortest text that fits has 7 tokens with its end',
        ),
        ({'begin': 'ab', 'banned': ('b',)}, r'banned=.* and decode\.begin=ab: the vocabulary has no tokens for any'),
        ({'regex': 'x'}, r'regex=x: the vocabulary has no tokens for any text that fits$'),
        ({'json_schema': 'nowhere.json'}, r'json_schema=nowhere\.json: .*No such file'),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(asked, message):
    with pytest.raises(UserError, match=rf'^decode\.{message}') as error:
        automaton(**asked)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('contents', ['{', '[1]', '{"type": "nothing"}', '{"enum": [NaN]}', '[' * 100_000, '\xff'])
def test_a_file_that_is_no_schema_is_one_line(contents, tmp_path):
    file = tmp_path / 'schema.json'
    file.write_bytes(contents.encode('latin-1'))
    with pytest.raises(UserError, match=r'^decode\.json_schema=.*schema\.json: ') as error:
        automaton(json_schema=str(file))
    assert '\n' not in str(error.value)


def test_a_text_has_one_constraint():
    run = Config(train=Train(num_steps=1), decode=Decode(regex='a', choices=('b',)))
    with pytest.raises(UserError, match=r'^decode\.choices and decode\.regex are set: a text has one form$'):
        checks.check(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('family', 'strategy'), [('decoder', 'greedy'), ('decoder', 'sample'), ('encoder_decoder', 'beam')]
)
@pytest.mark.proof_cases('encoder_decoder-beam')
def test_a_run_writes_what_its_config_asks_for(family, strategy):
    """By untrained models, whose texts would be anything; another seed draws another text."""
    decode = Decode(strategy=strategy, max_len=9, regex='(ab|ba|c\u00e9){2,}', batch_size=3)
    model = Model(family=family, vocab_size=Byte.vocab_size + 5, emb_dim=8, num_heads=2, mlp_dim=8, max_len=24)
    objective = 'seq2seq' if family == 'encoder_decoder' else 'causal_lm'
    run = Config(model, Data(tokenizer='byte', length=12), train=Train(objective=objective, num_steps=1), decode=decode)
    run = checks.resolve(run, vocab_size=model.vocab_size, encoder_vocab_size=model.vocab_size)
    made = build(run.model)
    variables = made.init(jax.random.key(0), dummy_batch.random_batch(run))
    generate = generator(made, run, Tokenizers(Byte(), Byte()), cut=True)
    found = [each for seed in range(3) for each in generate(variables, ['x', 'yz', 'a', ''], seed)]
    assert all(re.fullmatch(decode.regex, each) for each in found)
    assert (len(set(found)) > 4) == (strategy == 'sample')
