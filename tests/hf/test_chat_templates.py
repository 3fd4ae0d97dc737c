"""Chat templates come with a hub directory, and go with one."""

import json
import pathlib

import pytest

import hub_directories
from tformer.commands.export import export
from tformer.commands.import_ import import_hub
from tformer.commands.run import Run
from tformer.data.tokenizers.chat import ChatTemplate
from tformer.errors import UserError
from tformer.hf import chat_templates

TEXT = '{{ bos_token }}{% for m in messages %} {{ m.role[0] }} {{ m.content }} {{ eos_token }}{% endfor %}'
TOKENS = {'bos_token': {'content': '<s>', 'lstrip': False}, 'eos_token': '</s>', 'pad_token': None}
FOUND = (('bos_token', '<s>'), ('eos_token', '</s>'))


def write(place: pathlib.Path, name: str = 'tokenizer_config.json', **fields: object) -> None:
    (place / name).write_text(json.dumps(fields))


def test_a_template_stands_in_the_settings_or_in_a_file_of_its_own(tmp_path: pathlib.Path) -> None:
    assert chat_templates.read(tmp_path) is None
    write(tmp_path, **TOKENS, add_bos_token=True)
    assert chat_templates.read(tmp_path) is None
    write(tmp_path, **TOKENS, chat_template=TEXT)
    assert chat_templates.read(tmp_path) == ChatTemplate(TEXT, FOUND)
    write(tmp_path, chat_template=[{'name': 'rag', 'template': 'b'}, {'name': 'default', 'template': TEXT}])
    write(tmp_path, 'special_tokens_map.json', **TOKENS)
    assert chat_templates.read(tmp_path) == ChatTemplate(TEXT, FOUND)
    write(tmp_path, 'special_tokens_map.json', bos_token='<other>', eos_token='</s>')
    write(tmp_path, chat_template=TEXT, bos_token='<s>')  # which come before those of the map
    assert chat_templates.read(tmp_path) == ChatTemplate(TEXT, FOUND)
    (tmp_path / 'chat_template.jinja').write_text('own')
    assert chat_templates.read(tmp_path) == ChatTemplate('own', FOUND)


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        ([{'name': 'rag', 'template': 'a'}], 'chat_template has no default; there are: rag'),
        (3, 'chat_template is neither a text nor a list of named texts'),
        ('{% if %}', 'the chat template is not one of Jinja: '),
        pytest.param(
            '{{ ' + 5000 * '(' + '1' + 5000 * ')' + ' }}', 'the chat template is not one of Jinja: ', id='deep'
        ),
    ],
)
def test_a_malformed_template_is_refused(tmp_path: pathlib.Path, given: object, said: str) -> None:
    write(tmp_path, chat_template=given)
    with pytest.raises(UserError, match=f'^{tmp_path}/tokenizer_config.json: {said}'):
        chat_templates.read(tmp_path)


@pytest.mark.slow
def test_an_imported_run_replies_and_is_exported_with_its_template(tmp_path: pathlib.Path) -> None:
    hub_directories.write(tmp_path / 'hub', 'llama')
    write(tmp_path / 'hub', **TOKENS, chat_template=TEXT, add_bos_token=True)
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run', {'decode.max_len': 4})
    run = Run.load(tmp_path / 'run')
    chat = [{'role': 'user', 'content': 'a b </s>'}]
    assert run.tokenizers.own_chat == ChatTemplate(TEXT, FOUND)
    tokens = run.tokenizers.target
    ids = run.tokenizers.chat.prompt(chat, tokens)
    assert [tokens.piece(index) for index in ids] == ['<s>', 'u', 'a', 'b', '<unk>', '</s>']
    assert run.generate([chat, 'a b'])[0] == run.generate([chat])[0]
    export(run, tmp_path / 'out')
    settings = json.loads((tmp_path / 'out' / 'tokenizer_config.json').read_text())
    assert settings['chat_template'] == TEXT and settings['eos_token'] == '</s>'
    import_hub(str(tmp_path / 'out'), tmp_path / 'back')
    assert Run.load(tmp_path / 'back').tokenizers.chat.write(chat) == '<s> u a b </s> </s>'
