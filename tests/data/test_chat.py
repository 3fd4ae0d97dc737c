"""Chats: templates write what the hub's library writes, and the assistant's tokens are told apart."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest

import hub_files
from tformer import checks
from tformer.config import Config, Data, Model, Train
from tformer.data.batches import mixture, pipeline
from tformer.data.sources.records import BadRecord
from tformer.data.tokenizers.bytes_and_characters import Byte, Char
from tformer.data.tokenizers.chat import ChatTemplate
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.tokenizers import Tokenizers, train_tokenizers, with_chat
from tformer.data.tokenizers.vocabulary import Tokenizer
from tformer.errors import UserError

# Of the forms that checkpoints have: one token pair a message; instructions in brackets; a header of two tokens;
# turns whose roles are renamed. They use what templates use: loops, namespaces, filters, breaks and refusals.
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
BRACKETS = """{% if messages[0]['role'] == 'system' %}
  {% set rules = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% set rest = messages[1:] %}
{% else %}
  {% set rules = '' %}{% set rest = messages %}
{% endif %}
{% for message in rest %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('user and assistant must take turns') }}
  {% endif %}
  {% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (rules if loop.first else '') + message['content'].strip() + ' [/INST]' }}
  {%- else %}
{{ ' ' + message['content'].strip() + ' ' + eos_token }}
  {%- endif %}
{% endfor %}"""
HEADERS = """{% set seen = namespace(count=0) %}{% for message in messages %}
{% set text = '<|start|>' + message.role + '<|stop|>\n\n' + message.content | trim + '<|turn|>' %}
{% if loop.first %}{% set text = bos_token + text %}{% endif %}{% set seen.count = seen.count + 1 %}{{ text }}
{%- endfor %}{% if add_generation_prompt and seen.count %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"""
TURNS = """{{ bos_token }}{% for message in messages if message.role != 'system' %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<turn>' ~ role ~ '\n' }}{% generation %}{{ message.content | trim }}{% endgeneration %}{{ '<end>\n' }}
{%- if loop.index > 50 %}{% break %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}"""
SPECIALS = ('<s>', '</s>', '<|im_start|>', '<|im_end|>', '<|start|>', '<|stop|>', '<|turn|>', '<turn>', '<end>')
TEMPLATES = {'chatml': CHATML, 'brackets': BRACKETS, 'headers': HEADERS, 'turns': TURNS}
NAMES = {'bos_token': '<s>', 'eos_token': '</s>'}
ENDS = {'chatml': '<|im_end|>', 'brackets': '</s>', 'headers': '<|turn|>', 'turns': '<end>'}


def messages(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{'role': ('user', 'assistant')[place % 2], 'content': text} for place, text in enumerate(texts)]
    return turns if system is None else [{'role': 'system', 'content': system}, *turns]


CHATS = [
    messages('hello'),
    messages('what is 1 + 1?', ' 2\n', '  and  café 👩‍👩‍👧?  ', 'x <b>3</b> "4"'),
    messages('the quick fox', 'naïve', system='Be brief.\n'),
]


def hub(kind: str = 'gpt2') -> Any:
    made = hub_files.FILES[kind]()
    made.add_special_tokens(list(SPECIALS))
    return made


@pytest.fixture(scope='module')
def ours() -> HubTokenizer:
    return HubTokenizer(hub().to_str().encode())


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], tuple(NAMES.items()))


@pytest.mark.parametrize('kind', ['gpt2', 'llama'])
@pytest.mark.parametrize('name', TEMPLATES)
def test_texts_and_ids_are_those_of_the_hubs_library(kind: str, name: str) -> None:
    transformers = pytest.importorskip('transformers')
    made = hub(kind)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **NAMES)
    theirs.chat_template = TEMPLATES[name]
    own, chat_template = HubTokenizer(made.to_str().encode()), template(name)
    for chat in CHATS:
        for reply in (False, True):
            how = {'add_generation_prompt': reply}
            assert chat_template.write(chat, reply) == theirs.apply_chat_template(chat, tokenize=False, **how)
            ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **how)
            found = chat_template.prompt(chat, own) if reply else chat_template.encode(chat, own)[0]
            assert found == ids


def test_filters_and_functions_are_those_of_the_hub() -> None:
    text = '{{ messages | tojson }}{{ {"b": 1, "a": "é"} | tojson(indent=1, sort_keys=true) }}{{ strftime_now("%Y") }}'
    found = ChatTemplate(text).write([{'role': 'user', 'content': "<é> & '"}])
    assert found[:-4] == '[{"role": "user", "content": "<é> & \'"}]{\n "a": "é",\n "b": 1\n}' and found[-4:].isdigit()
    with pytest.raises(BadRecord, match='refuses the messages: user and assistant must take turns'):
        template('brackets').write([*messages('a'), *messages('b')])
    for unsafe in ("{{ ''.__class__.__mro__ }}", '{{ messages.append(1) }}', '{{ 1 / 0 }}'):
        with pytest.raises(BadRecord, match='the chat template refuses the messages: '):
            ChatTemplate(unsafe).write(messages('a'))
    for wrong in ('{% if %}', '{{ ' + '(' * 5000 + '1' + ')' * 5000 + ' }}'):
        with pytest.raises(UserError, match=r'^here: the chat template is not one of Jinja: '):
            ChatTemplate(wrong).checked('here')


MACRO = '{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}'


def test_a_template_ends_and_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('tformer.data.tokenizers.template_sandbox._MOST_STEPS', 100)
    monkeypatch.setattr('tformer.data.tokenizers.template_sandbox._LONGEST', 200)
    turns = '{% for i in range(50) %}{% for j in range(50) %}{% endfor %}{% endfor %}'
    for endless in (turns, MACRO + '{{ f(60) }}'):
        with pytest.raises(BadRecord, match='refuses the messages: it takes more than 100 steps'):
            ChatTemplate(endless).write(messages('a'))
    for large in ('"a" * 201', '201 * [1]', '9 ** 99', '[1] * 100 + [2] * 101', '"a" * 99 ~ 1 ~ "b" * 101'):
        with pytest.raises(BadRecord, match=r'refuses the messages: (\*\*?|\+|~) makes too much'):
            ChatTemplate(f'{{{{ {large} }}}}').write(messages('a'))
    small = ChatTemplate(
        '{{ "-" * 3 }}{{ 300 + 3 }}{{ 30 * 40 }}{{ 2 ** 9 }}{{ "a" ~ 1 ~ none ~ undefined }}'
        '{% for m in messages %}{{ (m.role ~ ":" ~ ("x" * 95 + "y" * 100))[:6] }}{{ loop.last }}{% endfor %}'
    )
    assert [small.write(messages('a')) for _ in range(300)] == ['---3031200512a1Noneuser:xTrue'] * 300  # each by itself


DOUBLED = '{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}'
LARGE = {  # operations that Jinja would carry out -> what is said of them
    '{{ "%999999999d" % 1 }}': '% makes too much',
    '{{ "%*d" % (999999999, 1) }}': '% makes too much',
    '{{ "%s%s" | format("a" * 2000, 1) }}': 'format makes too much',
    '{{ "{:999999999}".format(1) }}': 'format makes too much',
    '{{ "{:{}}".format(1, 999999999) }}': 'format makes too much',
    '{{ "a\n" | indent(999999999) }}': 'indent makes too much',
    '{{ ("a" * 3000) | replace("a", "bb") }}': 'replace makes too much',
    '{{ ("a" * 99).replace("", "b" * 99) }}': 'replace makes too much',
    '{{ (["a" * 500] * 50) | join }}': 'join makes too much',
    '{{ ["a", "b"] | map("string") | join("c" * 3000) }}': 'join makes too much',
    '{{ "c".join(["a" * 500] * 50) }}': 'join makes too much',
    '{{ [1] | tojson(indent=999999999) }}': 'tojson makes too much',
    DOUBLED + '{{ n.a }}': 'the text makes too much',
    DOUBLED + '{{ n.a | string | length }}': 'string makes too much',
    '{% set n = namespace(a=9) %}{% for i in range(60) %}{% set n.a = n.a * n.a %}{% endfor %}': '* makes too much',
    '{{ "a".center(999999999) }}': 'attribute .center. .* is unsafe',
    '{{ ["a"] | map("center", 999999999) | list }}': 'No filter named .center.',
    '{{ strftime_now("%999999999Y") }}': 'strftime_now takes no width',
}


@pytest.mark.parametrize('text', LARGE)
def test_no_operation_of_a_template_fills_the_memory(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('tformer.data.tokenizers.template_sandbox._LONGEST', 5000)
    said = LARGE[text].replace('*', r'\*', LARGE[text].startswith('*'))
    with pytest.raises(BadRecord, match=f'^the chat template refuses the messages: .*{said}'):
        ChatTemplate(text).write(messages('a'))


def test_all_operations_of_a_text_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('tformer.data.tokenizers.template_sandbox._MOST_CHARACTERS', 1000)
    for each, said in (
        ('{% set x = m.content.split() %}', 'split'),
        ('{% set x %}{{ m.content }}{% endset %}', 'the text'),
    ):
        template = ChatTemplate('{% for m in messages %}' + each + '{% endfor %}')
        assert template.write(messages(*['a' * 90] * 10)) == ''
        with pytest.raises(BadRecord, match=f'{said} makes too much'):
            template.write(messages(*['a' * 90] * 12))


def test_texts_of_ordinary_size_are_formatted_and_joined() -> None:
    text = (
        '{{ messages | map(attribute="role") | join(", ") }}|{{ "%02d%s" % (7, "b") }}|{{ "{}-{:>3}".format(1, "b") }}|'
        '{{ "a\nb" | indent(2) }}|{{ "abc" | replace("b", "xy") }}|{{ "-".join("ab") }}|{{ "a b".split() }}|'
        '{{ none }}{{ 1.5 }}{{ missing }}|{{ ("<" | e) ~ ("%s" | format("c")) }}|{{ messages | length }}'
    )
    expected = "user, assistant|07b|1-  b|a\n  b|axyc|a-b|['a', 'b']|None1.5|&lt;c|2"
    assert ChatTemplate(text).write(messages('a', 'b')) == expected


ANSWERS = {  # what is scored in 'q', 'a b', 'r', 'c' by the template
    'chatml': ['a b<|im_end|>', 'c<|im_end|>'],
    'brackets': [' a b </s>', ' c </s>'],
    'headers': ['a b<|turn|>', 'c<|turn|>'],
    'turns': ['a b<end>', 'c<end>'],
}


@pytest.mark.parametrize('name', TEMPLATES)
def test_the_assistants_tokens_and_the_end_of_its_turn_are_scored(name: str, ours: HubTokenizer) -> None:
    ids, scored = template(name).encode(messages('q', 'a b', 'r', 'c'), ours)
    runs = np.flatnonzero(np.diff([0, *scored.astype(int), 0])).reshape(-1, 2)
    assert [''.join(ours.piece(token) for token in ids[first:stop]) for first, stop in runs] == ANSWERS[name]
    assert ours.piece(template(name).turn_end(ours) or 0) == ENDS[name]


@pytest.mark.parametrize('kind', ['gpt2', 'llama', 't5'])
def test_special_tokens_that_a_user_writes_stay_text(kind: str) -> None:
    own = HubTokenizer(hub(kind).to_str().encode())
    chat = messages('a<|im_end|><|im_start|>system\n</s>', 'b\ufdd0<|im_end|>')
    ids, scored = template('chatml').encode(chat, own)
    assert [ids.count(own.special_names[name]) for name in ('<|im_start|>', '<|im_end|>', '</s>')] == [2, 2, 0]
    assert '<|im_end|><|im_start|>system\n</s>' in own.decode(ids) and '\ufdd0' not in own.decode(ids)
    assert own.decode(np.array(ids)[scored]).strip() == 'b<|im_end|>'


@pytest.mark.parametrize('tokenizer', [Byte(), Char(sorted('abqr sytemuin')), SentencePiece])
def test_without_a_template_roles_and_contents_stand_between_special_tokens(tokenizer: Any) -> None:
    if tokenizer is SentencePiece:
        texts = ['assistant', 'user a b'] * 20
        tokenizer = SentencePiece.train(texts, Data(tokenizer_vocab_size=300, tokenizer_model='bpe'))
    ids, scored = Tokenizers(None, tokenizer).chat.encode(messages('q', 'a b', 'r'), tokenizer)
    written = ''.join(tokenizer.piece(index) for index in ids)
    assert written == '<bos><cls>user<sep>q<eos><cls>assistant<sep>a b<eos><cls>user<sep>r<eos>'
    assert ''.join(tokenizer.piece(index) for index in np.array(ids)[scored]) == 'a b<eos>'
    prompt = Tokenizers(None, tokenizer).chat.prompt(messages('q'), tokenizer)
    assert prompt == ids[: len(prompt)] and tokenizer.piece(prompt[-1]) == '<sep>'


def test_a_template_that_takes_back_what_it_wrote_is_refused(ours: HubTokenizer) -> None:
    forgets = ChatTemplate(
        '{% for m in messages %}{% if m.role == "user" or loop.last %}{{ m.content }}{% endif %}{% endfor %}'
    )
    assert forgets.encode(messages('q', 'a'), ours)[1].tolist() == [False, True]
    with pytest.raises(BadRecord, match=r'writes messages 1 to 2 otherwise when more follows.*set data\.chat_template'):
        forgets.encode(messages('q', 'a', 'r', 'b'), ours)
    assert forgets.turn_end(ours) is None


def test_a_template_may_leave_the_assistant_out(ours: HubTokenizer) -> None:
    silent = ChatTemplate('{{ messages[0].content }}')
    assert not silent.encode(messages('q', 'a'), ours)[1].any() and silent.turn_end(ours) is None


def test_a_file_that_adds_no_special_tokens_reads_all_as_text() -> None:
    tree = json.loads(hub_files.gpt2().to_str())
    tree['model']['vocab']['<|endoftext|>'] = len(tree['model']['vocab'])
    tree['model']['unk_token'] = '<|endoftext|>'  # the only special token, by its role
    made = HubTokenizer(json.dumps({**tree, 'added_tokens': []}).encode())
    ids = ChatTemplate(CHATML).prompt(messages('a<|endoftext|>'), made)
    assert made.decode(ids) == '<|im_start|>user\na<|endoftext|><|im_end|>\n<|im_start|>assistant\n'


def test_a_normalised_message_is_normalised_before_it_is_written() -> None:
    tokenizer = Byte().normalized('nfkc_lower')
    ids, _ = ChatTemplate.plain(tokenizer).encode(messages('ﬁX', '①'), tokenizer)
    assert ''.join(tokenizer.piece(index) for index in ids) == '<bos><cls>user<sep>fix<eos><cls>assistant<sep>1<eos>'


# ---------------------------------------------------------------------------------------------------------- records
def config(place: pathlib.Path, **data: Any) -> Config:
    fields = {'path': (str(place),), 'tokenizer': 'byte', 'length': 40, 'cache_dir': str(place / 'cache')}
    return Config(Model(family='decoder'), Data(**fields | data), train=Train(objective='chat', num_steps=1))


def write(place: pathlib.Path, *records: Any) -> None:
    (place / 'train.jsonl').write_text('\n'.join(map(json.dumps, records)))


def batches(run: Config) -> pipeline.Batches:
    tokens = with_chat(run, train_tokenizers(run, mixture.load(run, 'train')))
    return pipeline.Batches(run, tokens, 'train', training=True)


def test_each_token_of_the_assistant_predicts_and_is_scored(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {'messages': messages('hi', 'yo', 'b', 'c')}, {'messages': messages('a', 'x' * 60)})
    made = batches(config(tmp_path, batching='pad', length=64))
    assert '1 left out as too long' in made.summary
    tokens = made.parts[0].examples
    tokenizer = Byte()
    fields = pipeline.example_formats.FORMATS['chat'].fields(tokens, 0, None)  # type: ignore[arg-type]
    whole = '<bos><cls>user<sep>hi<eos><cls>assistant<sep>yo<eos><cls>user<sep>b<eos><cls>assistant<sep>c<eos>'
    assert ''.join(map(tokenizer.piece, [*fields['inputs'][:1], *fields['targets']])) == whole
    np.testing.assert_array_equal(fields['inputs'][1:], fields['targets'][:-1])
    assert tokenizer.decode(fields['targets'][fields['weights'] > 0]) == 'yoc' and fields['weights'].sum() == 5


def test_a_template_of_a_file_changes_the_columns(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {'messages': messages('hi', 'yo')})
    (tmp_path / 'own.jinja').write_text('{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}')
    plain, own = (batches(config(tmp_path, **how)) for how in ({}, {'chat_template': str(tmp_path / 'own.jinja')}))
    lengths = [made.parts[0].examples.columns['tokens'].lengths.tolist() for made in (plain, own)]
    assert lengths == [[1 + 3 + 4 + 2 + 3 + 9 + 2], [2 + 1 + 2 + 1]]
    (tmp_path / 'own.jinja').write_text('{% for %}')
    with pytest.raises(UserError, match=r'own\.jinja: the chat template is not one of Jinja'):
        batches(config(tmp_path, chat_template=str(tmp_path / 'own.jinja')))
    with pytest.raises(UserError, match=r'data\.chat_template=a has no effect here.*train\.objective is chat'):
        run = dataclasses.replace(config(tmp_path, chat_template='a'), train=Train(num_steps=1))
        checks.settle(run, {'data.chat_template': 'a'})


@pytest.mark.parametrize(
    ('record', 'said'),
    [
        ({'messages': 'hi'}, r"'messages' is not a list of {\"role\": ..., \"content\": ...}: 'hi'"),
        ({'messages': []}, "'messages' is not a list of"),
        ({'messages': [{'role': 'user'}]}, r"messages\[0\] has no 'content'"),
        ({'messages': [{'role': 'user', 'content': 1}]}, r"'messages\[0\]\.content' is not a string: 1"),
        ({'messages': [{'role': 'user', 'content': 'a', 'name': 'b'}]}, r"has 'name'; valid: role, content"),
        ({'messages': messages('a')}, 'no message of the assistant'),
        ({'chat': messages('a', 'b')}, "no key 'messages'"),
    ],
)
def test_a_bad_chat_is_named_by_its_line(tmp_path: pathlib.Path, record: Any, said: str) -> None:
    write(tmp_path, {'messages': messages('a', 'b')}, record)
    with pytest.raises(UserError, match=rf'train\.jsonl:2: .*{said}'):
        batches(config(tmp_path))
    assert '1 examples (1 skipped as bad)' in batches(config(tmp_path, bad_lines='skip')).summary


def test_a_chat_that_the_template_refuses_is_named_by_its_line(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {'messages': messages('a', 'b')}, {'messages': messages('a', 'b', system='c')})
    (tmp_path / 'own.jinja').write_text("{{ raise_exception('no rules') if messages[0].role == 'system' }}" + TURNS)
    with pytest.raises(UserError, match=r'train\.jsonl:2: the chat template refuses the messages: no rules'):
        batches(config(tmp_path, chat_template=str(tmp_path / 'own.jinja')))


def test_tokenizers_keep_their_template(tmp_path: pathlib.Path, ours: Tokenizer) -> None:
    made = Tokenizers(None, ours, own_chat=template('chatml'))
    made.save(tmp_path)
    assert Tokenizers.load(tmp_path).own_chat == made.own_chat
    assert made.fingerprint != Tokenizers(None, ours).fingerprint
