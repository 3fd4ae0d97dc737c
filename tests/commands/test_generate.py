"""What is said of texts that training knows nothing of, and the chats that lines hold."""

import json
import types

import pytest

from tformer.commands import generate
from tformer.config import Config, Model
from tformer.data.tokenizers.bytes_and_characters import Char
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError

SOURCE, TARGET = Char('ab'), Char('xy')


@pytest.mark.parametrize(
    ('family', 'tokenizers', 'unknown'),
    [
        ('decoder', Tokenizers(SOURCE, TARGET), "'a' 'b'"),
        ('encoder_decoder', Tokenizers(SOURCE, TARGET), "'x' 'y'"),
        ('encoder_decoder', Tokenizers(None, TARGET), "'a' 'b'"),
        ('encoder_decoder', Tokenizers(Char('abxy'), TARGET), None),
    ],
)
def test_characters_that_the_side_that_reads_them_lacks_are_named(monkeypatch, capsys, family, tokenizers, unknown):
    run = types.SimpleNamespace(config=Config(Model(family=family)), tokenizers=tokenizers)
    monkeypatch.setattr(generate.Run, 'load', lambda *given: run)
    monkeypatch.setattr(generate, 'generate', lambda run, texts, seed: [f'{text}{seed}' for text in texts])
    monkeypatch.setattr(generate.commands, 'needed', lambda flags, name: name)
    generate.run(['ab', 'xya'], {}, types.SimpleNamespace(checkpoint='best', input=None, seed=7, chat=False))
    said = capsys.readouterr()
    assert said.out == 'ab7\nxya7\n'
    line = f'training had none of these, so the output means little: {unknown}\n'
    assert said.err == ('' if unknown is None else line)


CHAT = [{'role': 'system', 'content': 'b'}, {'role': 'user', 'content': 'a'}]


@pytest.mark.parametrize('line', [json.dumps(CHAT), json.dumps({'messages': CHAT, 'id': 1})])
def test_a_chat_in_json_is_read(line: str) -> None:
    assert generate.chat_of(line) == CHAT


@pytest.mark.parametrize('line', ['hello', '', '[1, 2]', '[]', '[a', '{"role": "user"}', '{x}', '"a"', '[' * 10_000])
def test_any_other_line_is_a_users_message(line: str) -> None:
    assert generate.chat_of(line) == [{'role': 'user', 'content': line}]


@pytest.mark.parametrize('line', ['[{"rol": "user", "content": "a"}]', '{"messages": "a"}', '{"messages": []}'])
def test_a_malformed_chat_is_refused(line: str) -> None:
    with pytest.raises(UserError, match='messages'):
        generate.chat_of(line)


def test_only_the_messages_of_a_chat_are_searched_for_what_training_lacked(monkeypatch, capsys) -> None:
    run = types.SimpleNamespace(config=Config(Model(family='decoder')), tokenizers=Tokenizers(None, Char('ab')))
    monkeypatch.setattr(generate.Run, 'load', lambda *given: run)
    monkeypatch.setattr(generate, 'generate', lambda run, chats, seed: [str(len(chat)) for chat in chats])
    monkeypatch.setattr(generate.commands, 'needed', lambda flags, name: name)
    flags = types.SimpleNamespace(checkpoint='best', input=None, seed=0, chat=True)
    generate.run([json.dumps(CHAT), 'abc'], {}, flags)
    said = capsys.readouterr()
    assert said.out == '2\n1\n' and said.err.endswith(": 'c'\n")
