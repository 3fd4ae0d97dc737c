"""A served run on loopback: its texts are those of `generate`, and every request is answered, whatever happens."""

import concurrent.futures
import http.client
import json
import pathlib
import queue
import re
import signal
import socket
import time
import types

import jax
import pytest

import hub_directories
from lives import HANG, Life
from tformer.commands import row_writer
from tformer.commands.import_ import import_hub
from tformer.commands.run import Run
from tformer.commands.serve import make_scheduler
from tformer.commands.serve import run as serve_run
from tformer.commands.serving.scheduler import Request
from tformer.decode.drawing import Drawing
from tformer.errors import UserError

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
PROMPTS = ['a b c', 'd', 'e f g h i j', 'k l']


class Server:
    """`tformer serve` in a process of its own."""

    def __init__(self, place, workdir, **flags) -> None:
        given = [f'--{name}={value}' for name, value in flags.items()]
        self.life = Life(place, 'serve', f'--workdir={workdir}', '--port=0', '--name=tiny', *given)
        self.life.wait_for(lambda: re.search(r'serving tiny at http://127\.0\.0\.1:\d+\n', self.life.said))
        self.port = int(re.search(r'serving tiny at http://127\.0\.0\.1:(\d+)\n', self.life.said)[1])

    def ask(self, path, body=None, method=None):
        """Returns (status, answer, headers)."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=HANG)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method or ('GET' if body is None else 'POST'), path, data)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read()), answer.headers
        connection.close()
        return found

    def complete(self, **body):
        return self.ask('/v1/completions', body)

    def stream(self, path='/v1/completions', **body):
        """Yields the events of a stream, without the comments between them."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=HANG)
        connection.request('POST', path, json.dumps({**body, 'stream': True}))
        answer = connection.getresponse()
        assert answer.status == 200 and answer.headers['content-type'].startswith('text/event-stream')
        for line in answer:
            if line.startswith(b'data: '):
                yield line.removeprefix(b'data: ').decode().strip()
        connection.close()

    def idle(self):
        state = self.ask('/health')[1]
        return state['writing'] == state['waiting'] == 0


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    place = tmp_path_factory.mktemp('served')
    hub_directories.write(place / 'hub', 'llama', max_position_embeddings=256)
    names = {'bos_token': '<s>', 'eos_token': '</s>'}
    (place / 'hub' / 'tokenizer_config.json').write_text(json.dumps({**names, 'chat_template': TEMPLATE}))
    import_hub(str(place / 'hub'), place / 'run')
    return place / 'run'


@pytest.fixture(scope='module')
def server(workdir, tmp_path_factory):
    made = Server(tmp_path_factory.mktemp('server'), workdir, rows=3, waiting=20, grace=20)
    yield made
    assert made.life.kill() == -signal.SIGKILL


def load(workdir, **fields):
    return Run.load(workdir, {f'decode.{name}': str(value) for name, value in fields.items()}, placed=True)


@pytest.mark.slow
def test_texts_are_those_that_generate_writes(server, workdir) -> None:
    """Greedy, and drawn by a seed, which the convention calls temperature 1."""
    for strategy, given in (
        ('greedy', {'temperature': 0}),
        ('sample', {'seed': 5}),
        ('sample', {'seed': 6, 'top_k': 3}),
    ):
        fields = {'top_k': given['top_k']} if 'top_k' in given else {}
        run = load(workdir, strategy=strategy, max_len=9, **fields)
        for prompt in PROMPTS:
            status, answer, _ = server.complete(prompt=prompt, max_tokens=9, **given)
            (output,) = next(iter(run.write([prompt], given.get('seed', 0))))[1]
            choice = answer['choices'][0]
            assert (status, choice['text'], choice['index']) == (200, output.text, 0)
            assert choice['finish_reason'] == ('length' if output.length == 9 and not ended(run, output) else 'stop')
            read = len(run.tokenizers.target.encode(prompt)) + len(run.config.data.start)
            usage = {'prompt_tokens': read, 'completion_tokens': output.length, 'total_tokens': read + output.length}
            assert answer['usage'] == usage and answer['model'] == 'tiny' and answer['object'] == 'text_completion'


def ended(run, output) -> bool:
    return len(run.tokenizers.target.encode(output.text)) < output.length


@pytest.mark.slow
def test_several_prompts_and_several_texts_of_each_come_in_their_order(server, workdir) -> None:
    """Each prompt has its own draws, also of two that are the same: those of `generate` for the list."""
    run = load(workdir, strategy='sample', max_len=7, num_outputs=3)
    for prompts in (PROMPTS[:2], PROMPTS[:1] * 2):
        _, answer, _ = server.complete(prompt=prompts, n=3, max_tokens=7, seed=9)
        written = dict(run.write(prompts, 9))
        texts = [choice['text'] for choice in answer['choices']]
        assert texts == [output.text for row in range(2) for output in written[row]]
        assert [choice['index'] for choice in answer['choices']] == list(range(6))
    assert texts[:3] != texts[3:]


def test_a_stream_says_the_same_in_pieces(server) -> None:
    asked = {'prompt': PROMPTS[:2], 'max_tokens': 12, 'temperature': 0}
    _, whole, _ = server.complete(**asked)
    *events, last, done = server.stream(**asked, stream_options={'include_usage': True})
    assert done == '[DONE]' and json.loads(last)['usage'] == whole['usage'] and json.loads(last)['choices'] == []
    choices = [json.loads(event)['choices'][0] for event in events]
    for index in range(2):
        own = [choice for choice in choices if choice['index'] == index]
        assert ''.join(choice['text'] for choice in own) == whole['choices'][index]['text'] and len(own) > 3
        reasons = [choice['finish_reason'] for choice in own]
        assert reasons[-1] == whole['choices'][index]['finish_reason'] and set(reasons[:-1]) == {None}


def test_a_chat_is_answered_by_the_template(server, workdir) -> None:
    messages = [{'role': 'user', 'content': 'a b'}, {'role': 'user', 'content': 'c'}]
    run = load(workdir, strategy='greedy', max_len=8)
    status, answer, _ = server.ask('/v1/chat/completions', {'messages': messages, 'max_tokens': 8, 'temperature': 0})
    (text,) = run.generate([messages])
    assert status == 200 and answer['object'] == 'chat.completion'
    assert answer['choices'][0]['message'] == {'role': 'assistant', 'content': text}
    first, *events, done = server.stream('/v1/chat/completions', messages=messages, max_tokens=8, temperature=0)
    assert json.loads(first)['choices'][0]['delta'] == {'role': 'assistant', 'content': ''} and done == '[DONE]'
    assert ''.join(json.loads(event)['choices'][0]['delta'].get('content', '') for event in events) == text
    assert json.loads(first)['object'] == 'chat.completion.chunk'


def test_a_text_ends_before_a_stop_and_has_its_probabilities(server, workdir) -> None:
    run = load(workdir, strategy='greedy', max_len=12)
    (output,) = dict(run.write(['a b c']))[0]
    stop = output.text[6:8]
    _, answer, _ = server.complete(prompt='a b c', max_tokens=12, temperature=0, stop=[stop, 'zzz'], logprobs=1)
    (choice,) = answer['choices']
    assert choice['text'] == output.text[: output.text.index(stop)] and choice['finish_reason'] == 'stop'
    _, answer, _ = server.complete(prompt='a b c', max_tokens=12, temperature=0, logprobs=1)
    logprobs = answer['choices'][0]['logprobs']
    assert sum(logprobs['token_logprobs']) == pytest.approx(output.score, abs=1e-4)
    assert len(logprobs['tokens']) == output.length
    streamed = ''.join(
        json.loads(event)['choices'][0]['text']
        for event in server.stream(prompt='a b c', max_tokens=12, temperature=0, stop=stop)
        if event != '[DONE]'
    )
    assert streamed == choice['text']


@pytest.mark.parametrize(
    ('body', 'status', 'words'),
    [
        (b'{"prompt"', 400, 'the body is not JSON'),
        ([1], 400, 'the body must be a JSON object'),
        ({}, 400, 'prompt must be a text, or a list of texts'),
        ({'prompt': [1, 2]}, 400, 'prompt must be a text, or a list of texts'),
        ({'prompt': 'a', 'model': 'other'}, 404, "the model 'other' is not served; valid: 'tiny'"),
        ({'prompt': 'a', 'max_tokens': 0}, 400, 'max_tokens=0 must be int from 1 to'),
        ({'prompt': 'a', 'max_tokens': 1.5}, 400, 'max_tokens=1.5 must be int'),
        ({'prompt': 'a', 'temperature': -1}, 400, 'temperature=-1 must be int or float from 0 to 100'),
        ({'prompt': 'a', 'temperature': float('nan')}, 400, 'temperature=nan must be int or float from 0 to 100'),
        ({'prompt': 'a', 'n': 33}, 400, 'n=33 must be int from 1 to 32'),
        ({'prompt': ['a'] * 17, 'n': 2}, 400, '17 prompts of n=2 texts: at most 32 in all'),
        ({'prompt': 'a', 'stop': [1]}, 400, 'stop=[1] must be up to 16 texts'),
        ({'prompt': 'a', 'presence_penalty': 0.5}, 400, 'presence_penalty=0.5 is not supported'),
        ({'prompt': 'a', 'max_token': 5}, 400, "'max_token' is unknown; did you mean 'max_tokens'?"),
        ({'prompt': 'a', 'max_completion_tokens': 3}, 400, "'max_completion_tokens' is unknown; did you mean"),
        ({'prompt': 'a', 'logprobs': 5}, 400, 'logprobs=5 must be bool or int from 0 to 1'),
        ({'prompt': 'a', 'stream_options': 5}, 400, 'stream_options=5 must be dict'),
        ({'prompt': 'a', 'best_of': 3}, 400, 'best_of=3 is not supported'),
        (b'{"prompt": "\\ud800"}', 400, "'prompt' has half of a surrogate pair"),
        (b'[' * 100_000, 400, 'the body is not JSON'),
        ({'prompt': 'a ' * 300}, 400, ' tokens, the model takes '),
        ({'prompt': 'a ' * 200, 'max_tokens': 100}, 400, 'leaves '),
        ({'prompt': 'a' * 2**20}, 413, 'the body has more than 1,048,576 bytes'),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_answered_is_said(server, body, status, words) -> None:
    found, answer, _ = server.ask('/v1/completions', body)
    assert found == status and words in answer['error']['message'], answer
    assert '\n' not in answer['error']['message']


def test_other_paths_and_methods_are_refused(server) -> None:
    assert server.ask('/v1/models')[1]['data'][0]['id'] == 'tiny'
    assert server.ask('/v2')[:1] == (404,) and server.ask('/v1/completions', method='GET')[0] == 405
    for messages, words in (
        ([], 'messages must be a list'),
        ([{'role': 'user', 'content': None}], 'content'),
        ([{'content': 'a'}], 'role'),
        (['a'], 'is not a list of'),
    ):
        status, answer, _ = server.ask('/v1/chat/completions', {'messages': messages})
        assert status == 400 and words in answer['error']['message'], answer


def test_a_prompt_that_leaves_little_room_is_filled_up(server, workdir) -> None:
    status, answer, _ = server.complete(prompt='a ' * 250, temperature=0, best_of=1, logprobs=0)
    room = load(workdir).config.model.max_len + 1 - answer['usage']['prompt_tokens']
    assert status == 200 and answer['usage']['completion_tokens'] <= room < 16
    assert answer['choices'][0]['logprobs']['tokens']


@pytest.mark.parametrize(
    ('field', 'value'), [('guidance', '2.0'), ('repetition_penalty', '1.5'), ('strategy', 'beam'), ('min_len', '2')]
)
def test_a_run_that_writes_otherwise_is_not_served(workdir, field, value) -> None:
    with pytest.raises(
        UserError, match=rf'^decode\.{field}=.*: texts that are written side by side know greedy and sample, '
    ):
        make_scheduler(load(workdir, **{field: value}), rows=1, most_waiting=1)


def test_many_clients_at_once_are_all_answered(server) -> None:
    """64 clients of a server that writes 3 texts and lets 20 wait: each is answered, or told to come again."""
    alone = {prompt: server.complete(prompt=prompt, max_tokens=40, temperature=0)[1] for prompt in PROMPTS}

    def client(number):
        refusals = 0
        while True:
            prompt = PROMPTS[number % 4]
            status, answer, headers = server.complete(prompt=prompt, max_tokens=40, temperature=0)
            if status == 200:
                assert answer['choices'] == alone[prompt]['choices']
                return refusals
            assert status == 429 and headers['retry-after'] == '1' and answer['error']['type'] == 'rate_limit_error'
            refusals += 1
            time.sleep(0.05)

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        refusals = list(pool.map(client, range(64)))
    assert sum(refusals) > 0 and server.idle()


@pytest.mark.proof
@pytest.mark.skipif(not pathlib.Path('/proc/self/status').exists(), reason='resident memory is read from /proc')
def test_memory_does_not_grow_with_requests(server) -> None:
    """Of 64 clients some ask for too much, some leave and do not read: 16 MiB hold what 1,200 requests leave behind."""
    body = json.dumps({'prompt': 'a b', 'max_tokens': 200, 'seed': 1, 'n': 8, 'stream': True})
    head = f'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n'
    asked = (
        ({'prompt': 'a b c ' * 20, 'max_tokens': 9, 'logit_bias': {'5': 3}}, {200, 429}),
        ({'prompt': 'a' * 2**20}, {413, 429}),
        ({'prompt': 'a ' * 2**13}, {400, 429}),
        ({'prompt': ['e f'] * 32, 'n': 2}, {400, 429}),
    )

    def client(number):
        if number % 8 == 7:  # does not read, and leaves in the end
            with socket.create_connection(('127.0.0.1', server.port)) as one:
                one.sendall((head + body).encode())
                time.sleep(0.2)
            return
        given, statuses = asked[number % 8 if number % 8 < 4 else 0]
        try:
            assert server.complete(**given)[0] in statuses
        except ConnectionError:  # a long body is refused before it is read
            assert statuses & {413}

    def resident():
        lines = pathlib.Path(f'/proc/{server.life.pid}/status').read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith('VmRSS:')) / 1024

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        list(pool.map(client, range(600)))
        before = resident()
        list(pool.map(client, range(1200)))
    assert resident() - before < 16
    server.life.wait_for(server.idle)
    assert server.complete(prompt='c', max_tokens=5)[0] == 200


def test_clients_that_leave_or_do_not_read_hold_nobody_up(server) -> None:
    """Streams are asked for and left, or never read; others are answered meanwhile, and rows are free again."""
    body = json.dumps({'prompt': 'a b', 'max_tokens': 200, 'temperature': 0.9, 'seed': 1, 'n': 2, 'stream': True})
    head = f'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n'
    sockets = [socket.create_connection(('127.0.0.1', server.port)) for _ in range(6)]
    for each in sockets:
        each.sendall((head + body).encode())
    for each in sockets[:3]:  # these leave
        each.close()
    for _ in range(3):
        assert server.complete(prompt='c', max_tokens=5)[0] == 200
    end = time.monotonic() + HANG
    while not server.idle():
        assert time.monotonic() < end
        time.sleep(0.02)
    for each in sockets[3:]:
        each.close()
    assert server.complete(prompt='c', max_tokens=5)[0] == 200


@pytest.mark.signals
def test_a_server_that_is_to_stop_answers_what_is_there(workdir, tmp_path) -> None:
    """Of ten long requests some are written and some wait when SIGTERM comes: all are answered, and it ends with 0."""
    server = Server(tmp_path, workdir, rows=2, waiting=64, grace=60, kept=0)
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(server.complete, prompt='a b', max_tokens=150, seed=seed) for seed in range(10)]
        server.life.wait_for(lambda: server.ask('/health')[1]['writing'])
        server.life.signal(signal.SIGTERM)
        found = [each.result() for each in asked]
    assert {status for status, _, _ in found} <= {200, 503} and any(status == 200 for status, _, _ in found)
    assert all('choices' in answer or answer['error']['message'] == 'the server stops' for _, answer, _ in found)
    assert server.life.wait() == 0, server.life.said
    with pytest.raises(OSError):
        server.ask('/health')


@pytest.mark.signals
@pytest.mark.proof
def test_what_is_left_after_the_grace_is_answered_with_an_error(workdir, tmp_path) -> None:
    server = Server(tmp_path, workdir, rows=1, waiting=64, grace=0, kept=0)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(server.complete, prompt='a b', max_tokens=200, seed=seed) for seed in range(6)]
        server.life.wait_for(lambda: server.ask('/health')[1]['waiting'] > 2)
        server.life.signal(signal.SIGTERM)
        statuses = [each.result()[0] for each in asked]
    assert 503 in statuses and set(statuses) <= {200, 503} and server.life.wait() == 0


@pytest.mark.proof
def test_on_several_devices_no_program_is_compiled_after_the_start(workdir) -> None:
    """Prompts of several lengths, some of which go on from kept ones, written by whatever program came before."""
    run = Run.load(workdir, {'mesh.data': '2', 'mesh.tensor': '2'}, placed=True)
    made, scheduler = make_scheduler(run, rows=3, most_waiting=9, kept=2)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    scheduler.start()
    texts = [['a b c ' * number for number in (30, 1, 25, 12)], ['a b c ' * 30 + 'd', 'e f ' * 20, 'a b c ' * 31]]
    for asked in texts * 2:
        said = queue.Queue()
        batches = [made.batch(made.writer.read([text])[0]) | row_writer.bias_of({}) for text in asked]
        end = time.monotonic() + HANG
        assert scheduler.submit([Request(batch, Drawing(most=4), 4, (), said.put, end) for batch in batches]) is None
        finished = 0
        while finished < len(asked):
            piece = said.get(timeout=HANG)
            assert piece.finish in (None, 'stop', 'length')
            finished += piece.finish is not None
    assert [name for name in compiled if 'compile' in name] == [] and made.kept.kept > 0


def test_a_port_that_is_taken_and_odd_flags_are_one_line(server, workdir) -> None:
    flags = {'workdir': str(workdir), 'checkpoint': 'best', 'host': '127.0.0.1', 'port': server.port, 'name': None}
    flags |= {'rows': 1, 'waiting': 1, 'kept': 0, 'timeout': 1.0, 'grace': 1.0}
    for changes, line in (
        ({}, rf'^--host=127\.0\.0\.1 --port={server.port}: .*in use'),
        ({'port': 70_000}, r'^--host=127\.0\.0\.1 --port=70000: '),
        ({'kept': -1}, r'^--kept=-1 must be a number of at least 0$'),
        ({'rows': 0}, r'^--rows=0 must be a number of at least 1$'),
        ({'grace': float('nan')}, r'^--grace=nan must be a number of at least 0$'),
        ({'grace': float('inf')}, r'^--grace=inf must be a number of at least 0$'),
        ({'timeout': -1.0}, r'^--timeout=-1\.0 must be a number of at least 0$'),
    ):
        given = {name: types.SimpleNamespace(value=value) for name, value in {**flags, **changes}.items()}

        class Flags(dict):
            def __getattr__(self, name):
                return self[name].value

        with pytest.raises(UserError, match=line):
            serve_run([], {}, Flags(given))
