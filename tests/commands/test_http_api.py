"""The endpoints of a served run, in this process: what requests may change, and what is let go when clients leave."""

import asyncio
import dataclasses
import itertools
import json
import threading

import jax
import pytest

from fresh_runs import fresh_run
from lives import HANG
from tformer import config
from tformer.commands import row_writer
from tformer.commands.serve import make_scheduler
from tformer.commands.serving import http_api, http_fields
from tformer.config import Config, Data, Decode, Model, Train, tasks
from tformer.data.tokenizers.bytes_and_characters import Char
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.errors import UserError
from tformer.layers.resolved import resolve_model

LETTERS = 'abcdefgh .'
MOST = 7


def run_of(**decode):
    run = fresh_run('causal_lm', family='decoder', letters=LETTERS)
    changes = {f'decode.{name}': str(value) for name, value in {'max_len': MOST, **decode}.items()}
    return dataclasses.replace(run, config=config.override(run.config, changes))


def served(run, *, waiting=8, kept=0, timeout=HANG):
    made, scheduler = make_scheduler(run, rows=2, most_waiting=waiting, kept=kept)
    return http_api.make_app('tiny', run, made, scheduler, timeout=timeout), scheduler


def ask(app, body, *, left=None, path='/v1/completions', read=None):
    """Posts a body; returns a coroutine of the status and the answer, of a stream its bytes.

    The client leaves when the event `left` is set, and before it takes the next part of the answer awaits `read()`.
    """
    sent, given = [], [{'type': 'http.request', 'body': json.dumps(body).encode(), 'more_body': False}]

    async def receive():
        if given:
            return given.pop()
        await (left or asyncio.Event()).wait()
        return {'type': 'http.disconnect'}

    async def send(message):
        if read is not None:
            await read()
        sent.append(message)

    async def answer():
        asgi = {'version': '3.0', 'spec_version': '2.3'}
        await app(
            {'type': 'http', 'asgi': asgi, 'method': 'POST', 'path': path, 'headers': [], 'query_string': b''},
            receive,
            send,
        )
        said = b''.join(message.get('body', b'') for message in sent)
        if not sent:
            return None, said
        return sent[0]['status'], said if body.get('stream') else json.loads(said or b'null')

    return answer()


async def together(*asked):
    return await asyncio.wait_for(asyncio.gather(*asked), HANG)


def texts_of(answers):
    assert [status for status, _ in answers] == [200] * len(answers), answers
    return [choice['text'] for _, answer in answers for choice in answer['choices']]


@pytest.mark.slow
def test_biases_and_forms_of_the_run_and_biases_of_requests_write_what_generate_writes() -> None:
    """All at once; those of one token and of several, greedy and drawn."""
    own = [{}, {'d': 30.5, 'e': 30}, {'d': -100, '.': -100.0}]
    run, prompts = run_of(begin='ha', banned='cc', bias='ab=4,c=3', temperature=9.0), ['', 'abc', 'h. dab']
    app, scheduler = served(run)
    scheduler.start()
    encode = run.tokenizers.target.encode
    bodies = [
        {'prompt': prompt, 'temperature': heat, 'seed': 3, 'max_tokens': MOST}
        | {'logit_bias': {str(encode(text)[0]): value for text, value in biases.items()}}
        for heat in (0, 9)
        for prompt, biases in zip(prompts, own, strict=True)
    ]
    found = texts_of(asyncio.run(together(*(ask(app, body) for body in bodies))))
    for number, (strategy, (prompt, biases)) in enumerate(
        itertools.product(('greedy', 'sample'), zip(prompts, own, strict=True))
    ):
        fields = {'decode.bias': ','.join(['ab=4', 'c=3', *(f'{text}={value}' for text, value in biases.items())])}
        other = config.override(run.config, {**fields, 'decode.strategy': strategy})
        (text,) = dataclasses.replace(run, config=other).generate([prompt], 3)
        assert found[number] == text and text.startswith('ha') and 'cc' not in text
    assert len(set(found)) > 3 and 'd' in found[1]


def test_the_parts_of_a_content_are_one_text():
    def messages(*parts):
        body = {'messages': [{'role': 'user', 'content': list(parts)}]}
        return http_fields.parse(body, True, 'tiny', 17).prompts

    one, other = ({'type': 'text', 'text': text} for text in ('a ', 'b'))
    assert messages(one, other) == [[{'role': 'user', 'content': 'a b'}]]
    for wrong in ({'type': 'image_url', 'image_url': {}}, {'type': 'text'}, 'a'):
        with pytest.raises(http_fields.Refusal, match='a part of a content must be'):
            messages(one, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('given', 'words'),
    [
        ({'logit_bias': {'x': 1}}, "logit_bias: 'x' is not the number of a token from 0 to 16"),
        ({'logit_bias': {'17': 1}}, "logit_bias: '17' is not the number of a token from 0 to 16"),
        ({'logit_bias': {'9' * 5000: 1}}, 'is not the number of a token from 0 to 16'),
        ({'logit_bias': {'5': 1, '05': 2}}, "logit_bias: '05' is not the number of a token from 0 to 16"),
        ({'logit_bias': {'5': 100.5}}, 'logit_bias: 100.5 of token 5 must be int or float from -100 to 100'),
        ({'logit_bias': {'5': True}}, 'logit_bias: True of token 5 must be int or float'),
        ({'logit_bias': {'5': float('nan')}}, 'logit_bias: nan of token 5 must be int or float'),
        ({'logit_bias': [5]}, 'logit_bias=[5] must be dict'),
        ({'logit_bias': {str(i): 1 for i in range(301)}}, 'logit_bias has 301 tokens: at most 300'),
        ({'stream_options': {'include_usage': 'yes'}}, "stream_options: include_usage='yes' must be bool"),
        ({'stream_options': {'usage': True}}, "stream_options: 'usage' is not supported; valid: include_usage"),
        ({'stream_options': {'include_obfuscation': True}}, "'include_obfuscation' is not supported"),
        ({'prompt': ['a'] * 3, 'n': 3}, '9 texts are asked for, and no more than --waiting=8 can wait'),
        ({'max_tokens': 2}, 'max_tokens=2: the shortest text that fits has 4 with its end'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_biases_that_name_nothing_and_lengths_that_fit_nothing_are_refused(given, words) -> None:
    left = asyncio.Event()
    left.set()
    status, answer = asyncio.run(ask(served_form()[0], {'prompt': 'a', **given}, left=left))
    assert (status, answer['error']['type']) == (400, 'invalid_request_error') and words in answer['error']['message']


def row_writer_of(objective, family, length, encoder_length, max_len):
    paired = family == 'encoder_decoder'
    model = Model(family=family, emb_dim=16, mlp_dim=32, num_heads=2, max_len=max_len, vocab_size=len(LETTERS) + 7)
    data = Data(length=length, encoder_length=encoder_length)
    made = Config(resolve_model(model), data, train=Train(objective=objective), decode=Decode(max_len=2))
    reader = row_writer.reader(made, Tokenizers(Char(LETTERS) if paired else None, Char(LETTERS)))
    return row_writer.RowWriter(*reader, None, 1)


@pytest.mark.parametrize(('length', 'encoder_length', 'max_len'), [(24, None, 100), (40, 70, 100), (9, None, 12)])
@pytest.mark.parametrize(
    ('objective', 'family'),
    [(name, family) for name in tasks.named('writes') for family in tasks.TASKS[name].families],
)
def test_a_prompt_is_as_long_as_the_objective_and_the_model_allow(
    objective, family, length, encoder_length, max_len
) -> None:
    """A source has data.encoder_length tokens, a prompt those of the model; what they are padded to is compiled."""
    made = row_writer_of(objective, family, length, encoder_length, max_len)
    sourced = family == 'encoder_decoder' or tasks.TASKS[objective].given
    longest, side = encoder_length or length if sourced else max_len, 'encoder_' * (family == 'encoder_decoder')
    shapes = [batch[f'{side}inputs'].shape for batch in row_writer.examples(made)]
    assert shapes[-1] == (1, longest) and len({*shapes}) == len(shapes)
    around = len(made.writer.read([''])[0])
    for size in range(longest - around + 1):
        (tokens,) = made.writer.read(['a' * size])
        batch = made.batch(tokens)
        assert batch[f'{side}inputs'].shape in shapes and (batch[f'{side}positions'] >= 0).sum() == size + around
    with pytest.raises(UserError, match=rf'has {size + 1} tokens, the model takes {size} \([^\n]*\)$'):
        made.writer.read(['a' * (size + 1)])


@pytest.mark.parametrize('chat', [False, True])
def test_what_is_far_too_long_is_not_split_into_tokens(chat) -> None:
    api, read = served_form()[0].routes[0].endpoint.api, []
    long = 'a' * (http_api.CHARACTERS * api.made.writer.longest + 1)
    body = {'messages': [{'role': 'user', 'content': long}]} if chat else {'prompt': ['a', long]}
    made = api.made._replace(writer=api.made.writer._replace(read=read.append))
    status, answer = asyncio.run(ask(http_api.Endpoint(dataclasses.replace(api, made=made), chat), body))
    assert status == 400 and 'characters; the model takes' in answer['error']['message'] and not read


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(http_api, 'BODY', 0.0)
    endpoint, sent = served_form()[0].routes[0].endpoint, []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {'type': 'http', 'method': 'POST', 'path': '/v1/completions', 'headers': [], 'query_string': b''}
    asyncio.run(endpoint(scope, receive, send))
    assert sent[0]['status'] == 408 and endpoint.api.answering == 0


@pytest.mark.proof
def test_others_are_answered_while_a_long_prompt_is_read() -> None:
    run, begun, goes_on = run_of(), threading.Event(), threading.Event()
    made, scheduler = make_scheduler(run, rows=2, most_waiting=8)
    read = made.writer.read

    def slow(prompts):
        begun.set()
        assert threading.current_thread() is not threading.main_thread()  # or nobody would be answered meanwhile
        assert goes_on.wait(HANG)
        return read(prompts)

    slowly = made._replace(writer=made.writer._replace(read=slow))
    app = http_api.make_app('tiny', run, slowly, scheduler, timeout=HANG)
    scheduler.start()

    async def both():
        long = asyncio.create_task(ask(app, {'prompt': 'abc', 'max_tokens': 2}))
        assert await asyncio.to_thread(begun.wait, HANG)
        other, _ = await ask(app, {}, path='/v1/unknown')
        goes_on.set()
        return other, await long

    other, long = asyncio.run(both())
    assert other == 404 and len(texts_of([long])) == 1


_FORMS = []


def served_form():
    """A server of texts of three letters, which writes nothing yet; the same for all who ask."""
    if not _FORMS:
        _FORMS.append(served(run_of(regex='[a-h]{3,5}')))
    return _FORMS[0]


@pytest.mark.slow
def test_nothing_is_compiled_for_a_request_and_prompts_that_begin_alike_are_read_in_part() -> None:
    """Prompts of each padded length, alone and behind kept ones, with biases, draws and streams, several at once."""
    run, compiled = run_of(), []
    (plain, _), (keeping, scheduler) = (pair := served(run)), served(run, kept=2)
    pair[1].start()
    scheduler.start()
    system = 'abcdefgh. abcd.'
    prompts = [*(system + more for more in ('', ' e', 'hhhhh', ' cafe')), 'b', 'bad. bad', 'g' * 30]
    bodies = [
        {'prompt': prompt, 'max_tokens': 2, 'temperature': number % 2 * 2, 'seed': number, 'logit_bias': {'6': number}}
        for number, prompt in enumerate(prompts)
    ]
    expected = texts_of(asyncio.run(together(*(ask(plain, body) for body in bodies))))

    def note(name, *_, **__):
        compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        found = texts_of(asyncio.run(together(*(ask(keeping, body) for body in bodies))))
        stream = asyncio.run(ask(keeping, {**bodies[0], 'stream': True, 'stop': ['zz'], 'top_k': 3}))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert found == expected and stream[0] == 200 and stream[1].endswith(b'data: [DONE]\n\n')
    assert [name for name in compiled if 'compile' in name] == []
    state = asyncio.run(health(keeping))
    assert 0 < state['kept_tokens'] < state['prompt_tokens'] == sum(map(len, [*prompts, prompts[0]])) + 8


@pytest.mark.slow
def test_a_decoder_that_reads_less_than_its_model_is_served_for_all_it_reads() -> None:
    run = fresh_run('seq2seq', family='decoder', letters=LETTERS, fields={'max_len': 64})
    app, scheduler = served(run)
    scheduler.start()
    most = run.config.data.length - len(app.routes[0].endpoint.api.made.writer.read([''])[0])
    prompts = ['a', 'abc', 'h' * most]
    bodies = [{'prompt': prompt, 'max_tokens': 6, 'temperature': 0} for prompt in prompts]
    assert texts_of(asyncio.run(together(*(ask(app, body) for body in bodies)))) == run.generate(prompts)
    status, answer = asyncio.run(ask(app, {**bodies[0], 'prompt': 'h' * (most + 1)}))
    assert status == 400 and f'the model takes {most} (data.encoder_length)' in answer['error']['message']


async def health(app):
    sent = []

    async def send(message):
        sent.append(message)

    await app({'type': 'http', 'method': 'GET', 'path': '/health', 'headers': [], 'query_string': b''}, None, send)
    return json.loads(sent[1]['body'])


# ------------------------------------------------------------------------------------------------ clients that leave
def test_a_stream_whose_client_leaves_before_its_first_piece_is_let_go() -> None:
    """Whether it has been begun or not; nothing waits for the timeout."""
    app, scheduler = served_form()
    left = asyncio.Event()
    left.set()
    for number in range(3):
        asyncio.run(ask(app, {'prompt': 'a', 'stream': number < 2, 'n': 2}, left=left))
    assert {request.given_up for request in scheduler.waiting} == {'cancelled'} and len(scheduler.waiting) == 6
    scheduler.waiting.clear()


def test_requests_are_held_until_their_answers_are_read_or_the_time_is_over(monkeypatch) -> None:
    """Clients that do not read hold no rows, and no more requests than rows and waiting ones: others come again."""
    monkeypatch.setattr(http_api, '_LATE', 0.0)
    app, scheduler = served(run_of(), waiting=1)
    scheduler.start()
    go, begun, body = asyncio.Event(), [], {'prompt': 'a', 'max_tokens': 2, 'stream': True}

    async def read():
        begun.append(True)
        await go.wait()

    async def asked():
        stuck = []
        while len(stuck) < 3:
            stuck.append(asyncio.ensure_future(ask(app, body, read=read)))
            while len(begun) < len(stuck) or not scheduler.idle():
                await asyncio.sleep(0.01)
        status, answer = await ask(app, {**body, 'stream': False})
        assert (status, answer['error']['type']) == (429, 'rate_limit_error')
        go.set()
        assert [status for status, _ in await asyncio.gather(*stuck)] == [200] * 3
        assert (await ask(app, {**body, 'stream': False}))[0] == 200
        go.clear()
        app.routes[0].endpoint.api.timeout = 0.1
        assert await ask(app, body, read=read) == (None, b'')  # its connection is closed

    asyncio.run(asyncio.wait_for(asked(), HANG))
