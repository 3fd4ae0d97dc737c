"""What is said of texts that training knows nothing of."""

import types

import pytest

from tformer.commands import generate
from tformer.config import Config, Model
from tformer.data.tokenizers.bytes_and_characters import Char
from tformer.data.tokenizers.tokenizers import Tokenizers

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
    generate.run(['ab', 'xya'], {}, types.SimpleNamespace(checkpoint='best', input=None, seed=7))
    said = capsys.readouterr()
    assert said.out == 'ab7\nxya7\n'
    line = f'training had none of these, so the output means little: {unknown}\n'
    assert said.err == ('' if unknown is None else line)
