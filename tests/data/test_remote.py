"""Files at a distance: servers that fail, cut their answers, say nothing or change; what is kept, what is refused."""

import base64
import functools
import gzip
import hashlib
import http.server
import itertools
import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import emulated
from tformer.config.run import Config, Data
from tformer.data import cache, places, remote, stores
from tformer.data.sources import sources
from tformer.data.tokenizers.tokenizers import train_tokenizers
from tformer.errors import UserError

CONTENT = bytes(range(256)) * 400
ETAG = f'"{hashlib.md5(CONTENT).hexdigest()}"'
Answer = Callable[['Server'], None]


class Server(http.server.BaseHTTPRequestHandler):
    """Sends the files of its class, whole or in ranges; `plan` has the faults of the next answers."""

    protocol_version = 'HTTP/1.1'
    files: dict[str, bytes]
    plan: list[Answer]
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get('Range')))
        fault = self.plan.pop(0) if self.plan else whole
        fault(self)

    def log_message(self, *_: object) -> None:
        pass


def whole(server: Server, stop: int | None = None, ranges: bool = True, **headers: str) -> None:
    """Answers as a good server does, or breaks off after `stop` bytes."""
    content = server.files.get(server.path.partition('?')[0])
    if content is None:
        server.send_error(404)
        return
    start, asked = 0, server.headers.get('Range')
    if asked and ranges:
        start = int(asked.removeprefix('bytes=').removesuffix('-'))
    server.send_response(206 if start else 200)
    for name, value in {
        'ETag': f'"{hashlib.md5(content).hexdigest()}"', 'Content-Length': str(len(content) - start),
        'Content-Range': f'bytes {start}-{len(content) - 1}/{len(content)}' if start else '',
        **{name.replace('_', '-'): value for name, value in headers.items()},
    }.items():  # fmt: skip
        if value:
            server.send_header(name, value)
    server.end_headers()
    try:
        server.wfile.write(content[start:][:stop])
        server.wfile.flush()
    except OSError:  # the reader wanted the headers alone
        server.close_connection = True
    if stop is not None:
        server.close_connection = True


def fails(code: int) -> Answer:
    return lambda server: server.send_error(code)


def cut(stop: int, **more: object) -> Answer:
    return functools.partial(whole, stop=stop, **more)  # type: ignore[arg-type]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Server]]:
    own = type('Own', (Server,), {'files': {'/a.bytes': CONTENT}, 'plan': [], 'asked': []})
    running = http.server.ThreadingHTTPServer(('127.0.0.1', 0), own)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    own.url = f'http://127.0.0.1:{running.server_address[1]}'
    monkeypatch.setattr(remote, 'PAUSE', 0)
    monkeypatch.setattr(places, 'PIECE', 1000)
    monkeypatch.setenv('no_proxy', '*')
    yield own
    running.shutdown()
    running.server_close()
    thread.join()


def fetch(server: type[Server], place: Path, name: str = 'a.bytes') -> bytes:
    remote.fetched.cache_clear()
    server.asked.clear()
    return Path(remote.fetched(f'{server.url}/{name}', place)).read_bytes()


def test_a_file_is_fetched_once_and_again_when_it_is_another(server, tmp_path) -> None:
    assert fetch(server, tmp_path) == CONTENT and len(server.asked) == 3  # before, its content, after
    assert fetch(server, tmp_path) == CONTENT and len(server.asked) == 1
    server.files['/a.bytes'] = b'other'
    assert fetch(server, tmp_path) == b'other' and len(server.asked) == 3
    assert fetch(server, tmp_path, 'a.bytes?token=x') == b'other'
    server.files['/empty'] = b''
    assert fetch(server, tmp_path, 'empty') == b''


def test_names_are_those_that_people_write(server, tmp_path) -> None:
    server.files |= {'/%C3%BC%20b.txt': b'one', '/a.txt.gz': b'two'}
    assert fetch(server, tmp_path, 'ü b.txt') == fetch(server, tmp_path, '%C3%BC%20b.txt') == b'one'
    server.plan[:] = [functools.partial(whole, Content_Encoding='x-gzip')] * 3
    assert fetch(server, tmp_path, 'a.txt.gz') == b'two'
    server.url = server.url.replace('http', 'HTTP')
    assert fetch(server, tmp_path) == CONTENT


def test_a_long_read_says_how_far_it_is(server, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    clock = itertools.count(0, 4)
    monkeypatch.setattr(remote.time, 'monotonic', lambda: next(clock))
    monkeypatch.setattr(places, 'PIECE', 30_000)
    server.files['/a.bytes'] = bytes(120_000)
    fetch(server, tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert said and all(line.endswith(f' bytes of {server.url}/a.bytes') for line in said)


def test_files_that_differ_in_what_they_are_asked_by_are_kept_apart(server, tmp_path) -> None:
    """The server gives no version, and contents of one size; nothing of them is kept for later processes."""
    before = len(remote._HELD)
    for number in range(3):
        server.files['/a.bytes'] = content = f'content {number}'.encode()
        server.plan[:] = [functools.partial(whole, ETag='')] * 3
        assert fetch(server, tmp_path) == content
    for held in remote._HELD[before:]:  # as at the end of the process
        held.cleanup()
    assert list(tmp_path.iterdir()) == []
    for number in range(3):
        server.files['/a.bytes'] = content = f'content {number}'.encode()
        server.plan[:] = [functools.partial(whole, ETag='"same"')] * 3
        assert fetch(server, tmp_path, f'a.bytes?id={number}') == content


def test_what_is_damaged_in_the_cache_is_fetched_again(server, tmp_path, capsys) -> None:
    fetch(server, tmp_path)
    (kept,) = tmp_path.glob('*/content')
    kept.write_bytes(CONTENT[:-1] + b'x')
    assert fetch(server, tmp_path) == CONTENT and len(server.asked) == 3
    assert 'makes a damaged entry again' in capsys.readouterr().err


FAULTS: dict[str, list[Answer]] = {
    'errors': [fails(503), fails(500), fails(429), whole, fails(502), fails(504)],
    'cuts': [whole, cut(5_000), cut(0), cut(1), cut(50_000)],
    'cuts without ranges': [
        whole,
        *(cut(stop, ranges=False) for stop in (5_000, 7_000, 9)),
        functools.partial(whole, ranges=False),
    ],
    'many cuts that go on': [whole, *[cut(3_000)] * 20],
    'an error between cuts': [whole, cut(70_000), fails(500), cut(1_000), fails(503)],
    'closed': [lambda server: server.connection.close()] * 2,
    'less than there is, without its length': [whole, functools.partial(whole, stop=900, Content_Length='')],
    'a shorter file': [whole, functools.partial(whole, stop=900, Content_Length='900')],
    'another range once': [whole, cut(900), functools.partial(whole, Content_Range='bytes 893-'), whole],
}


@pytest.mark.parametrize('case', FAULTS)
def test_a_read_that_fails_goes_on_where_it_was(server, tmp_path, case: str) -> None:
    server.plan[:] = FAULTS[case]
    assert fetch(server, tmp_path) == CONTENT
    starts = [int(asked[6:-1]) for _, asked in server.asked if asked]
    assert starts == sorted(starts) and all(start > 0 for start in starts)


def test_a_server_that_says_nothing_is_asked_again(server, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends half of the file and then nothing, until it is asked for the rest."""
    monkeypatch.setattr(places, 'TIMEOUT', 0.2)
    asked_again = threading.Event()

    def half(own: Server) -> None:
        whole(own, stop=len(CONTENT) // 2)
        asked_again.wait(60)

    def rest(own: Server) -> None:
        asked_again.set()
        whole(own)

    server.plan[:] = [whole, half, rest]
    assert fetch(server, tmp_path) == CONTENT
    assert [bool(asked) for _, asked in server.asked] == [False, False, True, False]


REFUSED = {
    'missing': ([fails(404)], r'/a.bytes does not exist$'),
    'forbidden': ([fails(403)], r'/a.bytes cannot be fetched: 403 Forbidden$'),
    'errors without end': ([fails(503)] * 9, r'/a.bytes cannot be fetched: 503 Service Unavailable \(5 times\)$'),
    'cut without progress': ([whole, cut(5_000), *[cut(0)] * 9], r'cannot be fetched: the answer was cut off \(5'),
    'changes between': ([whole, functools.partial(whole, ETag='"other"')], r'changed while it was being fetched'),
    'changes in between': ([whole, cut(99), functools.partial(whole, ETag='"other"')], r'changed while it was being'),
    'changes after': ([whole, whole, functools.partial(whole, ETag='"other"')], r'changed while it was being fetched'),
    'more than there is': (
        [whole, lambda server: (server.files.update({'/a.bytes': CONTENT + b'x'}), whole(server, ETag=ETAG))],
        r'changed while it was being fetched',
    ),
    'another range': (
        [whole, cut(900), *[functools.partial(whole, Content_Range='bytes 893-')] * 9],
        r'cannot be fetched: it was asked for the bytes from 900 on, and gave others \(206\) \(5 times\)$',
    ),
    'nothing': ([lambda server: (server.send_response(204), server.end_headers())] * 9, r'and gave others \(204\)'),
    'packed': ([functools.partial(whole, Content_Encoding='gzip')] * 2, r'/a.bytes .* its server packs it by gzip$'),
    'gone after': ([whole, whole, fails(410)], r'/a.bytes does not exist$'),
    'damaged': (
        [whole, functools.partial(whole, Content_MD5=base64.b64encode(bytes(16)).decode())],
        r'/a.bytes was damaged on its way: its md5 is not the one',
    ),
    'damaged, by its digest': (
        [whole, functools.partial(whole, Repr_Digest=f'sha-256=:{base64.b64encode(bytes(32)).decode()}:')],
        r'/a.bytes was damaged on its way: its sha256 is not the one',
    ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_fetched_is_one_line_and_leaves_nothing(server, tmp_path, case: str) -> None:
    plan, message = REFUSED[case]
    server.plan[:] = plan
    with pytest.raises(UserError, match=message) as error:
        fetch(server, tmp_path)
    assert '\n' not in str(error.value)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_checksum_that_fits_is_no_obstacle(server, tmp_path) -> None:
    digest = base64.b64encode(hashlib.sha256(CONTENT).digest()).decode()
    md5 = base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
    good = functools.partial(whole, Repr_Digest=f'sha-256=:{digest}:', x_goog_hash=f'crc32c=AAAAAA==,md5={md5}')
    server.plan[:] = [whole, good]
    assert fetch(server, tmp_path) == CONTENT


def test_no_server_and_no_list_are_one_line(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, 'PAUSE', 0)
    monkeypatch.setenv('no_proxy', '*')
    with socketserver.TCPServer(('127.0.0.1', 0), socketserver.BaseRequestHandler) as bound:
        url = f'http://127.0.0.1:{bound.server_address[1]}'
    with pytest.raises(UserError, match=r'/a.txt cannot be fetched: .*refused.* \(5 times\)$'):
        remote.fetched(f'{url}/a.txt', tmp_path)
    for path in (f'{url}/*.txt', f'{url}/', url, f'{url}/a/', f'{url}/a.txt/?b=c', f'{url}/a/..', f'{url}/.'):
        with pytest.raises(UserError, match=r'names no file: http has no list of them, name each in data.path$'):
            remote.fetched(path, tmp_path)
    for path, why in {'http://[::1/a': 'Invalid IPv6 URL', 'http://127.0.0.1:a/b': "nonnumeric port: 'a'"}.items():
        with pytest.raises(UserError, match=rf'{re.escape(path)} cannot be fetched: {why}$'):
            remote.fetched(path, tmp_path)
    with pytest.raises(UserError, match=r'^nothing://a/b cannot be read: Protocol not known: nothing'):
        pytest.importorskip('fsspec')
        remote.fetched('nothing://a/b', tmp_path)


def test_records_come_from_servers(server, tmp_path) -> None:
    lines = ''.join(f'word {i}\tWORD {i}\n' for i in range(300)).encode()
    server.files |= {'/all.tsv.gz': gzip.compress(lines, mtime=0)}
    (tmp_path / 'all.tsv.gz').write_bytes(server.files['/all.tsv.gz'])
    for split in sources.SPLITS:
        found, wanted = (
            sources.load(Data(path=(path,), cache_dir=str(tmp_path / 'cache')), 'seq2seq', split)
            for path in (f'{server.url}/all.tsv.gz', str(tmp_path / 'all.tsv.gz'))
        )
        assert found.fingerprint == wanted.fingerprint and list(found) == list(wanted)
    server.files['/t.bin'] = server.files['/no.bin'] = bytes([7, 0, 8, 0])
    server.files['/t.idx'] = b'damaged'
    load = functools.partial(sources.load, objective='causal_lm', split='train')
    assert len(load(Data(path=(f'{server.url}/no.bin',), valid_path=('x',), test_path=('x',)))) == 1
    with pytest.raises(UserError, match=r't\.idx is not an index of Megatron-LM'):
        len(load(Data(path=(f'{server.url}/t.bin',))))


def test_errors_in_fetched_files_name_their_urls(server, tmp_path) -> None:
    server.files |= {'/deep/a.jsonl': b'{"text": "a"}\n{', '/a.bin': b'abc'}
    for name, message in {
        'deep/a.jsonl': '/deep/a.jsonl:2: not JSON: ',
        'deep/a.jsonl?token=x': '/deep/a.jsonl:2: not JSON: ',
        'a.bin': '/a.bin ',
    }.items():
        with pytest.raises(UserError, match=f'^{re.escape(server.url + message)}'):
            paths = (f'{server.url}/{name}',)
            len(sources.load(Data(path=('x',), test_path=paths, cache_dir=str(tmp_path)), 'causal_lm', 'test'))


def test_tokens_in_fetched_files_are_named_by_their_urls(server, tmp_path) -> None:
    server.files['/a.bin'] = bytes([7, 0, 0, 9])
    own = Config(data=Data(path=(f'{server.url}/a.bin',), tokenizer='byte', cache_dir=str(tmp_path)))
    found = sources.load(own.data, 'causal_lm', 'train')
    with pytest.raises(UserError, match=f'^{re.escape(server.url)}/a.bin holds tokens and no text'):
        list(found)
    with pytest.raises(UserError, match=f'^{re.escape(server.url)}/a.bin: token 2304 at place 1 is outside'):
        found.contents.of_tokenizer(train_tokenizers(own, []).target)


def test_objects_of_a_store(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in memory, by the calls of those on the network; tests/data/test_stores.py has an emulator of S3."""
    store = emulated.memory()
    monkeypatch.setattr(stores, 'Store', lambda url: store)
    monkeypatch.setattr(places, 'PIECE', 4)
    contents = {'train.txt': b'nine char', 'valid.txt': b'8 of  it', 'more/test.txt': b''}
    for name, content in contents.items():
        store.write(name, content)

    def fetch() -> dict[str, bytes]:
        remote.fetched.cache_clear()
        place = Path(remote.fetched('s3://bucket/run', tmp_path))
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob('*.txt')}

    assert fetch() == contents
    real, asked = store.part, []
    monkeypatch.setattr(store, 'part', lambda *given: asked.append(given) or real(*given))
    assert fetch() == contents and {stop for _, _, stop in asked} == {0}  # only versions are asked for
    store.write('train.txt', b'another')
    assert fetch()['train.txt'] == b'another'
    store.write('more/', b'')  # what some tools write for a folder
    assert fetch()['more/test.txt'] == b''
    store.write('more', b'')
    with pytest.raises(UserError, match='of which a part is both a file and a directory'):
        fetch()
    store.write('more', None)
    store.write('train.txt', b'and another')

    def changing(name: str, start: int, stop: int) -> tuple[bytes, bytes] | None:
        if start == 4:
            store.write('train.txt', b'and the last one')
        return real(name, start, stop)

    monkeypatch.setattr(store, 'part', changing)
    with pytest.raises(UserError, match=r'^s3://bucket/run/train.txt changed while it was being fetched'):
        fetch()


def test_file_systems_of_fsspec(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip('fsspec')
    files = fsspec.filesystem('memory')
    monkeypatch.setattr(places, 'PIECE', 4)
    monkeypatch.setattr(remote, 'PAUSE', 0)
    for name in ('train.txt', 'valid.txt', 'more/train.txt', 't.bin', 't.idx'):
        files.pipe(f'/set/{name}', f'text of {name}'.encode())
    count = itertools.count()

    def fetch(path: str) -> Path:
        remote.fetched.cache_clear()
        next(count)
        return Path(remote.fetched(path, tmp_path))

    place = fetch('memory://set')
    found = {path.relative_to(place).as_posix(): path.read_text() for path in place.rglob('*.*')}
    assert found == {name: f'text of {name}' for name in ('train.txt', 'valid.txt', 'more/train.txt', 't.bin', 't.idx')}
    pattern = fetch('memory://set/*.txt')
    assert sorted(path.name for path in pattern.parent.glob(pattern.name)) == ['train.txt', 'valid.txt']
    assert not (pattern.parent / 'more').exists()
    assert fetch('memory://set/train.txt').read_text() == 'text of train.txt'
    assert fetch('memory://set/t.bin').with_suffix('.idx').read_text() == 'text of t.idx'
    files.pipe('/set/train.txt', b'another')
    assert fetch('memory://set/train.txt').read_text() == 'another'
    with pytest.raises(UserError, match=r'^memory://set/no.txt does not exist$'):
        fetch('memory://set/no.txt')

    real, faults = type(files).open, [OSError('reset'), LookupError('of a client'), None, TimeoutError()]

    def flaky(self, *given, **named):
        if faults and (fault := faults.pop()):
            raise fault
        return real(self, *given, **named)

    files.pipe('/set/train.txt', b'a third one')
    monkeypatch.setattr(type(files), 'open', flaky)
    assert fetch('memory://set/train.txt').read_text() == 'a third one' and len(faults) < 3
    files.rm('/set', recursive=True)


def test_a_name_that_leads_outside_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        url = 'odd://x'

        def __init__(self, path: str) -> None:
            pass

        def names(self) -> list[str]:
            return ['a', '../b']

        def version(self, name: str) -> str:
            return '1'

        def lasts(self, version: str) -> bool:
            return True

        def read(self, name: str, start: int, version: str) -> Iterator[bytes]:
            yield b'content'

        def checksum(self, name: str) -> None:
            return None

    monkeypatch.setitem(places.PLACES, 'odd', Odd)
    with pytest.raises(UserError, match=r"^odd://x has a file '\.\./b', which leads outside$"):
        remote.fetched('odd://x', tmp_path)


def test_two_processes_fetch_a_file_once(server, tmp_path) -> None:
    """The second waits for the entry that the first makes: here both are threads, which `flock` tells apart."""
    fetch_it = functools.partial(remote.fetched.__wrapped__, f'{server.url}/a.bytes', tmp_path)
    threads = [threading.Thread(target=fetch_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 5  # three versions before, one content, its version after
    assert cache.directory(Data(cache_dir=str(tmp_path))) == tmp_path
