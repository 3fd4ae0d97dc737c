"""Requests in rows that come free: who is let go and why, and where a text ends."""

import functools
import itertools
import queue
import threading
import time
import types

import jax
import numpy as np
import pytest

from lives import HANG
from tformer.commands.serving import scheduler as scheduler_lib
from tformer.commands.serving.scheduler import Piece, Request, Scheduler, Text
from tformer.config import Mesh
from tformer.data.tokenizers.bytes_and_characters import Byte, Symbol
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.decode.drawing import Drawing
from tformer.decode.engine import Engine
from tformer.distributed import meshes, sharding

END = 0


class Counting:
    """An engine whose texts count: the tokens of a row are its request's number plus 1, 2, ...; END after five.

    `go` is a semaphore without which no step is made, `broken` what the next step raises.
    """

    def __init__(self) -> None:
        self.go, self.broken, self.seen = threading.Semaphore(0), None, []
        self.engine = Engine(lambda variables: {}, self.insert, self.step, self.free)

    def insert(self, variables, slots, batch, row, drawing):
        self.seen.append(int(batch['inputs'][0, 0]))
        return {**slots, int(row): iter([*(int(batch['inputs'][0, 0]) + n for n in range(1, 6)), END])}

    def step(self, variables, slots):
        self.go.acquire(timeout=HANG)
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        tokens = [next(slots[row], END) if row in slots else END for row in range(2)]
        return slots, np.array(tokens), np.full(2, -0.5)

    def free(self, slots, row):
        return {place: text for place, text in slots.items() if place != row}


@pytest.fixture
def made():
    counting = Counting()
    place = functools.partial(sharding.placed, meshes.make_mesh(Mesh(data=1), jax.devices()[:1]), Mesh(data=1))
    scheduler = Scheduler(
        counting.engine, None, place, rows=2, most_waiting=4, ends=(END,),
        decode=lambda ids: ''.join(f'<{i}>' for i in ids),
    )  # fmt: skip
    scheduler.start()
    return counting, scheduler


def request(number, most=99, seconds=600.0, stops=()):
    """Returns a request and the queue of what is said of it."""
    said = queue.Queue()
    return Request({'inputs': np.array([[number]])}, Drawing(), most, stops, said.put, time.monotonic() + seconds), said


def all_of(said):
    """Returns the text, its number of tokens, and why it ended."""
    pieces = []
    while not pieces or pieces[-1].finish is None:
        pieces.append(said.get(timeout=HANG))
    return ''.join(piece.text for piece in pieces), sum(len(piece.tokens) for piece in pieces), pieces[-1].finish


def test_requests_are_written_in_their_turn_each_as_a_row_is_free(made) -> None:
    counting, scheduler = made
    asked = [request(10 * number, most=3 if number == 1 else 99) for number in range(1, 5)]
    assert scheduler.submit([each for each, _ in asked]) is None
    for _ in range(40):
        counting.go.release()
    found = [all_of(said) for _, said in asked]
    assert found == [
        ('<11><12><13>', 3, 'length'),
        *((''.join(f'<{10 * n + i}>' for i in range(1, 6)), 6, 'stop') for n in (2, 3, 4)),
    ]
    assert counting.seen == [10, 20, 30, 40]


def test_all_of_some_requests_are_taken_or_none(made) -> None:
    counting, scheduler = made
    first = [request(10)[0], request(20)[0]]
    assert scheduler.submit(first) is None
    end = time.monotonic() + HANG
    while len(counting.seen) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    three, five = [request(n)[0] for n in range(3)], [request(n)[0] for n in range(5)]
    assert scheduler.submit(five) == 'full' and scheduler.submit(three) is None
    assert scheduler.submit(three[:2]) == 'full' and scheduler.submit(three[:1]) is None
    assert not scheduler.idle()


def test_requests_out_of_time_or_given_up_are_let_go_wherever_they_are(made, monkeypatch) -> None:
    counting, scheduler = made
    now = [time.monotonic()]
    monkeypatch.setattr(scheduler_lib, 'time', types.SimpleNamespace(monotonic=lambda: now[0]))
    late, left, waiting, next_one = request(10, seconds=100), request(20), request(30, seconds=100), request(40)
    assert scheduler.submit([each for each, _ in (late, left, waiting, next_one)]) is None
    counting.go.release()
    assert late[1].get(timeout=HANG).text == '<11>' and left[1].get(timeout=HANG).text == '<21>'
    scheduler.give_up([left[0]])
    now[0] += 200
    for _ in range(40):
        counting.go.release()
    assert all_of(late[1])[2] == 'timeout' and all_of(left[1])[2] == 'cancelled'
    assert all_of(waiting[1]) == ('', 0, 'timeout') and all_of(next_one[1])[2] == 'stop'
    assert counting.seen == [10, 20, 40]


def test_a_closed_scheduler_finishes_what_it_has_and_gives_up_the_rest_after_its_grace(made) -> None:
    counting, scheduler = made
    one, two = request(10), request(20)
    assert scheduler.submit([one[0]]) is None and scheduler.submit([two[0]]) is None
    scheduler.close(60.0)
    assert scheduler.submit([request(30)[0]]) == 'shutdown'
    for _ in range(6):
        counting.go.release()
    assert all_of(one[1])[2] == 'stop'
    scheduler.close(0.0)
    counting.go.release()
    assert all_of(two[1])[2] in ('stop', 'shutdown')


def test_what_a_device_cannot_do_is_an_error_of_the_texts_that_were_written(made, capsys) -> None:
    counting, scheduler = made
    counting.broken = RuntimeError('out of memory')
    lost = [request(10), request(20)]
    kept = request(30)
    assert scheduler.submit([each for each, _ in (*lost, kept)]) is None
    for _ in range(20):
        counting.go.release()
    assert [all_of(said)[2] for _, said in lost] == ['error', 'error']
    assert all_of(kept[1])[2] == 'stop' and scheduler.idle()
    assert 'RuntimeError: out of memory' in capsys.readouterr().err


def test_a_device_that_has_no_rows_left_answers_all_that_wait(made) -> None:
    counting, scheduler = made
    scheduler.engine = counting.engine._replace(empty=lambda variables: 1 / 0)
    asked = [request(10 * number) for number in range(1, 5)]
    assert scheduler.submit([each for each, _ in asked]) is None
    assert [all_of(said)[2] for _, said in asked] == ['error'] * 4
    scheduler.engine = counting.engine
    again = request(50)
    assert scheduler.submit([again[0]]) is None
    for _ in range(10):
        counting.go.release()
    assert all_of(again[1])[2] == 'stop'


def test_who_is_let_go_is_answered_before_the_row_is_free(made) -> None:
    counting, scheduler = made
    one = request(10)
    assert scheduler.submit([one[0]]) is None
    counting.go.release()
    assert one[1].get(timeout=HANG).text == '<11>'
    scheduler.engine = counting.engine._replace(free=lambda slots, row: 1 / 0)
    scheduler.give_up([one[0]])
    for _ in range(3):
        counting.go.release()
    assert all_of(one[1])[2] == 'cancelled'


# ------------------------------------------------------------------------------------------------------ where texts end
def pieces(words, stops=(), most=99, end=True):
    """Returns what is said of a text of these words, a token each."""
    vocabulary = dict(enumerate(words, 1))
    text = Text(most, stops, lambda ids: ''.join(map(vocabulary.get, ids)), (END,))
    found = []
    for token in [*vocabulary, *([END] if end else [])]:
        found.append(text.add(token, -1.0))
        if found[-1].finish:
            break
    return found


@pytest.mark.parametrize(
    ('words', 'stops', 'text', 'finish'),
    [
        (['ab', 'cd', 'ef'], [], 'abcdef', 'stop'),
        (['ab', 'cd', 'ef'], ['de'], 'abc', 'stop'),  # over two tokens
        (['ab', 'cdef'], ['f', 'd', 'e'], 'abc', 'stop'),  # several in one
        (['ab', 'cd', 'ef'], ['cx', 'fz', 'f!'], 'abcdef', 'stop'),  # beginnings that go on otherwise
        (['ab', 'cd', 'ef'], ['ef', 'b'], 'a', 'stop'),  # the first of two
        (['ab', 'ab', 'abc'], ['ababc'], 'ab', 'stop'),
    ],
)
def test_a_text_ends_before_the_first_stop_wherever_tokens_end(words, stops, text, finish) -> None:
    found = pieces(words, stops)
    assert (''.join(piece.text for piece in found), found[-1].finish) == (text, finish)
    settled = list(itertools.accumulate(piece.text for piece in found))
    assert all(text.startswith(part) for part in settled)


def test_half_a_character_and_the_beginning_of_a_stop_wait() -> None:
    said = [piece.text for piece in pieces(['a\N{REPLACEMENT CHARACTER}', 'b'])]
    assert said == ['a', '\N{REPLACEMENT CHARACTER}b', '']
    assert [piece.text for piece in pieces(['ab', 'c', 'd'], ['bcx'])] == ['a', '', 'bcd', '']
    assert [piece.text for piece in pieces(['ab', 'c'], ['bcx'])] == ['a', '', 'bc']
    assert pieces(['ab', 'c'], ['bcx'], most=2, end=False)[-1] == Piece('bc', [(2, -1.0)], 'length', 'abc')


@pytest.mark.parametrize(
    'made',
    [
        Byte(),
        SentencePiece.train(['the cat sat', 'a=b c\N{BLACK STAR}ts'] * 20),
        Symbol(('a', 'cat', 'the'), byte_fallback=True),
    ],
    ids=lambda made: type(made).__name__,
)
def test_a_long_text_is_decoded_a_few_times_and_is_the_same(made) -> None:
    """Its pieces are its text, whatever tokens say: letters of several bytes, bytes of none, and stops that begin."""
    rng, decoded = np.random.default_rng(0), []
    words = made.encode('the cat sat a=b c\N{BLACK STAR}ts ' * 10)
    ids = [*words, *rng.choice(made.ordinary_ids, 30).tolist(), *words * 4]

    def decode(some):
        decoded.append(len(some))
        return made.decode(some)

    stops = ('t sat a=', 'the cat the')
    for given, text in (((), made.decode(ids)), (stops[1:], made.decode(ids))):
        found, decoded[:] = Text(len(ids), given, decode, ()), []
        pieces = [found.add(token, -1.0) for token in ids]
        assert pieces[-1].whole == text and pieces[-1].finish == 'length'
        assert ''.join(piece.text for piece in pieces) == text
        assert max(decoded[:-1]) <= 80 and sum(decoded) < 50 * len(ids) and len(ids) > 200
    found = Text(len(ids), stops, decode, ())
    pieces = list(itertools.takewhile(lambda piece: piece.finish is None, (found.add(token, -1.0) for token in ids)))
    assert ''.join(piece.text for piece in pieces) == made.decode(ids).split(stops[0])[0]


def test_a_character_behind_a_long_run_of_broken_bytes_is_said_once() -> None:
    """Also where what is decoded anew moves on while the character is half there."""
    tokens, spare = Byte(), Byte().encode('a')[0] - ord('a')
    for broken in range(58, 66):
        ids = [spare + byte for byte in b'\xff' * broken + '\N{BLACK STAR}\N{GRINNING FACE}'.encode() * 2 + b'b' * 20]
        text = Text(len(ids), (), tokens.decode, ())
        assert ''.join(text.add(token, -1.0).text for token in ids) == tokens.decode(ids)


def test_text_that_a_decoder_writes_anew_is_not_lost() -> None:
    """Bytes that turn out to be no character: what was said stays said, and the whole text is the last one."""
    odd = '\N{REPLACEMENT CHARACTER}'
    wholes = ['Hi', 'Hi\n', f'Hi{odd}{odd}', f'Hi{odd}{odd} rest']
    text = Text(99, (), lambda ids: wholes[len(ids) - 1], (END,))
    found = [text.add(token, -1.0) for token in (1, 2, 3, 4, END)]
    assert [piece.text for piece in found] == ['Hi', '\n', '', f'{odd}{odd} rest', '']
    assert found[-1].whole == wholes[-1] and {piece.whole for piece in found[:-1]} == {None}
