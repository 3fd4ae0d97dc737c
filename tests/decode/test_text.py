"""Texts in, texts out: the order of the outputs, and what is cut off, with a model that repeats what it reads."""

import numpy as np
import pytest

from small_decoding import generator
from tformer.config import Config, Data, Decode, Model, Train
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.chat import ChatTemplate
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.data.tokenizers.vocabulary import EOS
from tformer.decode import text
from tformer.errors import UserError

BYTE = Byte()


@pytest.fixture
def echo(monkeypatch):
    """Returns make(config, cut) -> a generator whose model writes the text that it is given."""

    def generate(variables, batch, rng):
        name = 'encoder_inputs' if 'encoder_inputs' in batch else 'inputs'
        rows = [[t for t in row if BYTE.ordinary[t]] for row in np.asarray(batch[name]).tolist()]
        return np.array([[*row, EOS, *[0] * (32 - len(row))] for row in rows]), np.zeros(len(rows))

    monkeypatch.setattr(text, 'make_generate', lambda *_, **__: generate)

    def make(family: str, cut: bool = False, objective: str = 'causal_lm', max_len: int = 11, **data):
        task = 'seq2seq' if family == 'encoder_decoder' else objective
        model = Model(family=family, vocab_size=BYTE.vocab_size, max_len=max_len)
        run = Config(model, Data(tokenizer='byte', length=8, **data), train=Train(objective=task, num_steps=1))
        run = Config(run.model, run.data, train=run.train, decode=Decode(max_len=4, batch_size=2))
        return generator(None, run, Tokenizers(BYTE, BYTE), cut=cut)

    return make


@pytest.mark.parametrize('family', ['decoder', 'encoder_decoder'])
def test_outputs_come_in_the_order_of_the_texts(echo, family):
    texts = ['ccc', 'a', 'dddd', 'bb', 'e']
    assert echo(family)({}, texts) == texts


def test_a_source_that_is_too_long_loses_its_end_and_a_prompt_its_beginning(echo):
    """Rows of eight tokens: seven of a source and EOS; 11 + 1 - 4 = 8 tokens of a prompt."""
    long = 'abcdefghijkl'
    assert echo('encoder_decoder', cut=True)({}, [long]) == ['abcdefg']
    assert echo('decoder', cut=True)({}, [long]) == ['efghijkl']
    for family in ('encoder_decoder', 'decoder'):
        with pytest.raises(UserError, match=r"'abcdefghijkl'\.\.\. has 12 tokens, the model takes 7"):
            echo(family)({}, [long])


def test_prompts_are_padded_in_front_and_sources_behind():
    rows = [[11, 12, 13], [14]]
    prompts = text._batch(rows, 2, 16, 0, paired=False)
    sources = text._batch(rows, 3, 16, 0, paired=True)
    assert prompts['inputs'][:, -3:].tolist() == [[11, 12, 13], [0, 0, 14]]
    assert prompts['positions'][:, -3:].tolist() == [[0, 1, 2], [-1, -1, 0]]
    assert sources['encoder_inputs'][:, :3].tolist() == [[11, 12, 13], [14, 0, 0], [0, 0, 0]]
    assert sources['encoder_positions'][:, :3].tolist() == [[0, 1, 2], [0, -1, -1], [-1, -1, -1]]


CHAT = [{'role': 'user', 'content': 'abc'}]


def test_a_chat_is_read_as_its_template_writes_it(echo):
    """CLS role SEP content EOS, and the beginning of a reply; the model repeats the text that it is given."""
    assert echo('decoder', objective='chat', max_len=64)({}, ['xy', CHAT]) == ['xy', 'userabcassistant']
    with pytest.raises(UserError, match=r'^a chat has 22 tokens, the model takes 8 '):
        echo('decoder', objective='chat')({}, [CHAT])
    assert echo('decoder', objective='chat', cut=True)({}, [CHAT]) == ['ssistant'[-7:]]
    for family in ('decoder', 'encoder_decoder'):
        with pytest.raises(UserError, match='the run has no chat template; chats need a decoder that was imported'):
            echo(family)({}, [CHAT])
    with pytest.raises(UserError, match=r"^messages\[0\] has no 'content'$"):
        echo('decoder', objective='chat')({}, [[{'role': 'user'}]])


def test_a_turn_of_a_chat_and_decode_ends_end_a_text():
    chat, marks = ChatTemplate('{% for m in messages %}{{ m.content }}<cls>{% endfor %}'), BYTE.specials
    for template, names, expected in (
        (None, (), (marks.eos,)),
        (chat, (), (marks.eos, marks.cls)),
        (None, ('<sep>', '<eos>', '<cls>'), (marks.eos, marks.sep, marks.cls)),
    ):
        run = Config(Model(family='decoder'), decode=Decode(ends=names))
        assert Tokenizers(None, BYTE, own_chat=template).ends(run) == expected
    with pytest.raises(UserError, match=r"^decode\.ends='<sop>' is not a token; did you mean '<sep>'\?$"):
        Tokenizers(None, BYTE).ends(Config(decode=Decode(ends=('<sop>',))))


def saying(monkeypatch, ids_of, vocab_size: int | None = None, **decode):
    """Returns (a generator of a decoder that writes `ids_of` a batch, what the search was asked for)."""
    asked: dict = {}
    monkeypatch.setattr(text, 'make_generate', lambda *_, **given: asked.update(given) or generate)

    def generate(variables, batch, rng):
        return np.array(ids_of(batch)), np.zeros(len(batch['rows']))

    model = Model(family='decoder', vocab_size=vocab_size or BYTE.vocab_size, max_len=11)
    run = Config(model, train=Train(num_steps=1), decode=Decode(**{'max_len': 4, 'batch_size': 2, **decode}))
    return generator(None, run, Tokenizers(None, BYTE), cut=False), asked


def test_a_text_draws_by_its_own_number_wherever_it_stands(monkeypatch):
    """Texts are sorted by their length; a row of padding has the number -1, which no text has."""
    seen = []

    def numbers(batch):
        seen.extend(batch['rows'].tolist())
        return [[*BYTE.encode(str(row)), EOS, EOS][:3] for row in batch['rows']]

    write, _ = saying(monkeypatch, numbers)
    assert write({}, ['ccc', 'a', 'bb']) == ['0', '1', '2']
    assert sorted(seen) == [-1, 0, 1, 2]


def test_the_first_of_all_ends_ends_a_text(monkeypatch):
    a, b, sep = *BYTE.encode('ab'), BYTE.specials.sep
    rows = [[a, sep, b, EOS], [a, b, EOS, sep]]
    write, asked = saying(monkeypatch, lambda batch: rows, ends=('<sep>',))
    assert write({}, ['x', 'y']) == ['a', 'ab']
    assert (asked['eos'], asked['others']) == (EOS, [sep])


def test_special_tokens_and_ids_without_a_token_are_never_generated(monkeypatch):
    _, asked = saying(monkeypatch, lambda batch: [], vocab_size=BYTE.vocab_size + 3, ends=('<sep>',))
    specials = {*np.flatnonzero(~BYTE.ordinary).tolist()} - {EOS, BYTE.specials.sep}
    assert {*asked['banned']} == specials | {BYTE.vocab_size + more for more in range(3)}


def test_new_tokens_that_leave_no_room_for_a_prompt_are_refused():
    run = Config(Model(max_len=8), decode=Decode(max_len=8))
    assert text.longest_input(run) == (1, 'model.max_len - decode.max_len')
    run = Config(Model(max_len=8), decode=Decode(max_len=9))
    with pytest.raises(UserError, match=r'^decode\.max_len=9 leaves no room for a prompt in model\.max_len=8$'):
        text.longest_input(run)


def test_outputs_have_their_lengths_and_those_that_were_not_found_are_left_out(monkeypatch):
    """Two texts in a batch, two outputs of each; the second text found one. `done` texts stay in their batch."""
    a, b = BYTE.encode('ab')
    tokens = np.array([[a, EOS, 0], [a, b, a], [b, EOS, 0], [0, 0, 0]])
    monkeypatch.setattr(text, 'make_generate', lambda *_, **__: lambda *_: (tokens, np.array([-1, -2, -3, -np.inf])))
    model = Model(family='decoder', vocab_size=BYTE.vocab_size, max_len=11)
    run = Config(model, train=Train(num_steps=1), decode=Decode(max_len=3, num_outputs=2))
    writer = text.make_writer(None, run, Tokenizers(None, BYTE), cut=False)
    first, second = [text.Output('a', -1, 2), text.Output('aba', -2, 3)], [text.Output('b', -3, 2)]
    assert list(writer.write({}, ['x', 'yy'])) == [(0, first), (1, second)]
    assert list(writer.write({}, ['x', 'yy'], done={0})) == [(1, second)]
    assert list(writer.write({}, ['x', 'yy'], done={0, 1})) == []


def test_a_chat_whose_template_writes_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(text, 'make_generate', lambda *_, **__: None)
    tokens = Tokenizers(None, BYTE, own_chat=ChatTemplate('{% for m in messages %}{% endfor %}'))
    run = Config(Model(family='decoder', vocab_size=BYTE.vocab_size, max_len=64), decode=Decode(max_len=4))
    with pytest.raises(UserError, match=r'^a chat has no tokens: its template writes nothing$'):
        text.make_writer(None, run, tokens, cut=False).read([CHAT])
