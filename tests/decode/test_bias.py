"""Biased texts and tokens: what is added, against rules on lists, and what texts become of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from small_decoding import Nothing
from tformer import checks
from tformer.config import Config, Data, Decode, Train
from tformer.data.tokenizers import biased_texts
from tformer.data.tokenizers.bytes_and_characters import Byte, Char
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.decode.beam import Beams, beam_search
from tformer.decode.bias import biased
from tformer.decode.penalties import History
from tformer.decode.rules import Rules
from tformer.decode.sample import Ending, Prompt, greedy
from tformer.errors import UserError

EOS, V, T = 1, 6, 5
TABLE = np.random.default_rng(3).normal(size=(V, V)).astype(np.float32)  # the next token's logits after each token
BIASES = (
    ((2,), 0.5),
    ((3, 2), -2.0),
    ((2,), 0.25),
    ((5, 3, 2), 4.0),
    ((EOS,), -1.0),
    ((4, 4, 4, 5), 1.0),
    ((2, 4), -2.0),
)
FALLING = (((2,), -0.5), ((3, 2), -2.0), ((4, 3), -3.0), ((2, 4, 3), -1.0), ((EOS,), -0.25), ((4, EOS), -1.5))


def added(tokens, biases):
    """Returns what each token gains behind the tokens of a row."""
    gains = np.zeros(V)
    for sequence, value in biases:
        before = list(sequence[:-1])
        if tokens[len(tokens) - len(before) :] == before and len(tokens) >= len(before):
            gains[sequence[-1]] += value
    return gains


@pytest.mark.parametrize('step', range(4))
def test_the_last_token_of_a_sequence_gains_where_the_others_stand_before_it(step) -> None:
    """Not where padding, or what stands in room for tokens to come, has their numbers."""
    prompts, new = [[4, 4], [5], [3], [4]], [[4, 5, 3], [3, 2, 3], [2, 5, 3], [4, 4, 4]]
    tokens_RP = np.array([[5, 3][: 2 - len(row)] + row for row in prompts])
    real_RP = np.array([[False] * (2 - len(row)) + [True] * len(row) for row in prompts])
    history = History.of(*map(jnp.asarray, (tokens_RP, real_RP, np.array(new))), jnp.asarray(step))
    found = biased(jnp.asarray(TABLE[:4]), history, BIASES)
    expected = [added(prompt + row[:step], BIASES) for prompt, row in zip(prompts, new, strict=True)]
    np.testing.assert_allclose(found, TABLE[:4] + np.array(expected), atol=1e-6)


def step_fn(tokens_BT, positions_BT, cache):
    return jnp.asarray(TABLE)[tokens_BT], cache


def prompt(tokens):
    rows = jnp.asarray(tokens)[:, None]
    return Prompt(rows, jnp.zeros_like(rows), jnp.arange(len(tokens)))


def test_greedy_texts_take_the_likeliest_token_with_its_bias() -> None:
    ending, rules = Ending(T, EOS, (0,)), Rules(bias=BIASES)
    tokens, scores = greedy(step_fn, Nothing(), prompt(range(2, V)), ending, rules=rules)
    plain, _ = greedy(step_fn, Nothing(), prompt(range(2, V)), ending)
    for row, first in enumerate(range(2, V)):
        text, total = [first], 0.0
        while len(text) <= T and text[-1] != EOS:
            logits = TABLE[text[-1]] + added(text, BIASES) + np.where(np.arange(V) == 0, -np.inf, 0)
            total += TABLE[text[-1], logits.argmax()] - np.log(np.exp(TABLE[text[-1]]).sum())
            text.append(int(logits.argmax()))
        assert tokens[row].tolist() == text[1:] + [0] * (T + 1 - len(text))
        assert scores[row] == pytest.approx(total, abs=1e-4)  # of the model's own distribution
    assert (tokens != plain).any()


def test_a_wide_beam_finds_the_best_text_of_log_probabilities_and_biases() -> None:
    find = jax.jit(
        lambda tokens: beam_search(
            step_fn, Nothing(), prompt(tokens), Ending(4, EOS, (0,)), Beams(96, 1.0), rules=Rules(bias=FALLING)
        )
    )
    found, logprobs = find(np.arange(2, V)), TABLE - np.log(np.exp(TABLE).sum(1, keepdims=True))
    texts = [(*x, EOS) for size in range(4) for x in itertools.product(range(2, V), repeat=size)]
    for row, first in enumerate(range(2, V)):

        def score(text, first=first, biases=FALLING):
            total, whole = 0.0, [first]
            for token in text:
                total += logprobs[whole[-1], token] + added(whole, biases)[token]
                whole.append(token)
            return total / ((5 + len(text)) / 6)

        best = max(texts, key=score)
        assert found.tokens_BMT[row, 0, : len(best)].tolist() == list(best)
        assert found.scores_BM[row, 0] == pytest.approx(score(best), abs=1e-4)


# ----------------------------------------------------------------------------------------------------------- texts
@pytest.mark.parametrize(
    'made', [Byte(), SentencePiece.train(['the cat sat', 'a=b cats'] * 20)], ids=lambda made: type(made).__name__
)
def test_texts_and_names_of_special_tokens_become_tokens_and_come_back(made) -> None:
    entries = (' cat=2.5', 'the=-1', 'a=b=0.5', '<eos>=-2')
    found = biased_texts.of_tokens(entries, made)
    assert [value for _, value in found] == [2.5, -1.0, 0.5, -2.0]
    assert [list(tokens) for tokens, _ in found[:3]] == made.encode_batch([' cat', 'the', 'a=b'])
    assert found[3][0] == (made.specials.eos,)
    for tokens, _ in found:
        text = biased_texts.text_of(tokens, made)
        assert text is not None and biased_texts.tokens_of(text, made) == list(tokens)
    assert biased_texts.text_of([made.specials.eos, made.specials.bos], made) is None
    assert biased_texts.text_of([made.vocab_size], made) is None and biased_texts.text_of([], made) is None


@pytest.mark.parametrize('entry', ['cat', 'cat=', '=2', 'cat=nan', 'cat=inf', 'cat=much'])
def test_an_entry_without_a_text_or_a_number_is_one_line(entry) -> None:
    run = Config(train=Train(num_steps=1), decode=Decode(bias=(entry,)))
    with pytest.raises(UserError, match=rf"^decode\.bias='{entry}' is not TEXT=NUMBER, such as ' cat=-2.5'$"):
        checks.check(run)


def test_beams_take_no_bias_that_raises_scores() -> None:
    run = Config(train=Train(num_steps=1), decode=Decode(strategy='beam', bias=('a=-1', 'b=0.5')))
    with pytest.raises(UserError, match=r"^decode\.bias='b=0\.5' is positive: decode\.strategy=beam needs scores that"):
        checks.check(run)
    checks.check(Config(train=Train(num_steps=1), decode=Decode(strategy='beam', bias=('a=-1', 'b=0'))))


def test_a_text_has_one_number() -> None:
    with pytest.raises(UserError, match=r"^decode\.bias has 'a' twice$"):
        checks.check(Config(train=Train(num_steps=1), decode=Decode(bias=('a=-1', 'b=0.5', 'a=2'))))


def test_a_text_that_the_vocabulary_lacks_is_one_line() -> None:
    made = Char.train(['the cat sat'], Data(byte_fallback=False))
    with pytest.raises(UserError, match=r"^decode\.bias: the vocabulary has no tokens for '\u4e2d'$"):
        biased_texts.of_tokens(('\u4e2d=1',), made)
