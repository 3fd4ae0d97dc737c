"""The HTTP endpoints of `tformer serve`: requests and answers by the completions and chat convention of the field."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from tformer.commands import row_writer
from tformer.commands.run import Run
from tformer.commands.serving.http_fields import Asked, Refusal, parse
from tformer.commands.serving.scheduler import Piece, Request, Scheduler
from tformer.errors import UserError

MOST_BYTES = 2**20  # of a request's body
CHARACTERS = 64  # of a prompt for each token that the model has room for; a longer one is not even split into tokens
BODY = 30.0  # seconds in which a body must be here
_LOOK = 0.5  # seconds after which it is asked whether the client is there
_LATE = 10.0  # seconds after the timeout in which a client may still read
_FULL = 429, 'too many requests wait; try again', 'rate_limit_error'


def make_app(name: str, run: Run, made: row_writer.RowWriter, scheduler: Scheduler, *, timeout: float) -> Any:
    """Returns the ASGI application."""
    from starlette.applications import Starlette
    from starlette.requests import Request as Http
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    api = Api(name, run, made, scheduler, timeout)

    async def models(http: Http) -> Response:
        return JSONResponse({'object': 'list', 'data': [{'id': name, 'object': 'model', 'owned_by': 'tformer'}]})

    async def health(http: Http) -> Response:
        state = {
            'status': scheduler.closed or 'ok',
            'writing': len(scheduler.writing),
            'waiting': len(scheduler.waiting),
            'prompt_tokens': made.kept.given if made.kept else None,
            'kept_tokens': made.kept.kept if made.kept else None,
        }
        return JSONResponse(state, 200 if scheduler.closed is None else 503)

    async def unknown(http: Http, error: Exception) -> Response:
        status = getattr(error, 'status_code', 404)
        return _refused(Refusal(status, f'{http.method} {http.url.path}: {getattr(error, "detail", error)}'))

    async def broken(http: Http, error: Exception) -> Response:
        return _refused(Refusal(500, f'{type(error).__name__}: the server could not answer', 'server_error'))

    return Starlette(
        routes=[
            Route('/v1/completions', Endpoint(api, False), methods=['POST']),
            Route('/v1/chat/completions', Endpoint(api, True), methods=['POST']),
            Route('/v1/models', models, methods=['GET']),
            Route('/health', health, methods=['GET']),
        ],
        exception_handlers={404: unknown, 405: unknown, Exception: broken},
    )


def _refused(error: Refusal) -> Any:
    from starlette.responses import JSONResponse

    body = {'error': {'message': str(error), 'type': error.kind, 'param': None, 'code': None}}
    return JSONResponse(body, error.status, {'Retry-After': '1'} if error.status in (429, 503) else None)


@dataclasses.dataclass
class Api:
    """A served model."""

    name: str
    run: Run
    made: row_writer.RowWriter
    scheduler: Scheduler
    timeout: float
    reading: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)  # one request's prompts are read at a time
    answering: int = 0  # requests, from their first byte until their answer is sent or their client has left


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The ASGI application that answers requests for texts, of which no more are held than rows and waiting ones."""

    api: Api
    chat: bool

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request as Http

        api, requests = self.api, list[Request]()
        if api.answering >= api.scheduler.rows + api.scheduler.most_waiting:
            await _refused(Refusal(*_FULL))(scope, receive, send)
            return
        api.answering += 1
        try:
            async with asyncio.timeout(api.timeout + _LATE):
                response = await self._response(Http(scope, receive), requests)
                await response(scope, receive, send)
        except TimeoutError:  # a client that does not read: the connection is closed
            pass
        finally:  # a stream that never began included
            api.answering -= 1
            api.scheduler.give_up(requests)

    async def _response(self, http: Any, requests: list[Request]) -> Any:
        """Returns the answer, after it has added what is asked of the scheduler to `requests`."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response, StreamingResponse

        try:
            asked = parse(await _body(http), self.chat, self.api.name, self.api.run.config.model.vocab_size or 0)
            async with self.api.reading:
                read = await asyncio.to_thread(_read, self.api, asked)
            texts = Texts(self.api, asked, read)
            requests += texts.requests
            if asked.stream:
                return StreamingResponse(texts.stream(), media_type='text/event-stream')
            return JSONResponse(await texts.whole(http.is_disconnected))
        except Refusal as error:
            return _refused(error)
        except ClientDisconnect:
            return Response(status_code=499)


async def _body(http: Any) -> Mapping[str, Any]:
    """Returns the JSON object of a request, of which no more than `MOST_BYTES` are read, in `BODY` seconds."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY):
            async for part in http.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise Refusal(413, f'the body has more than {MOST_BYTES:,} bytes')
                parts.append(part)
    except TimeoutError as error:
        raise Refusal(408, f'the body took longer than {BODY:.0f} seconds') from error
    try:
        found = json.loads(b''.join(parts))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f'the body is not JSON: {error}') from error
    if not isinstance(found, dict):
        raise Refusal(400, 'the body must be a JSON object')
    return found


def _read(api: Api, asked: Asked) -> list[list[int]]:
    """Returns the tokens of each prompt. Long ones take a while, so a thread beside the server's reads them.

    Raises a `Refusal` where a prompt cannot be read.
    """
    size, longest = max(len(str(prompt)) for prompt in asked.prompts), api.made.writer.longest
    if size > CHARACTERS * longest:
        raise Refusal(400, f'a prompt has {size:,} characters; the model takes {longest} tokens')
    try:
        return api.made.writer.read(asked.prompts)
    except UserError as error:
        raise Refusal(400, str(error).removesuffix(' (model.max_len - decode.max_len)')) from error


_STATUS = {'timeout': 504, 'shutdown': 503, 'error': 500, 'cancelled': 499}
_WHY = {
    'timeout': 'the time is over before the text was written',
    'shutdown': 'the server stops',
    'error': 'the text could not be written',
    'cancelled': 'the client left',
}


class Texts:
    """The texts of one request: each has its own `Request`, and what is said of them comes in one queue."""

    def __init__(self, api: Api, asked: Asked, read: Sequence[Sequence[int]]) -> None:
        """Takes the tokens of each prompt. Raises a `Refusal` where they or the texts are too many, now or ever."""
        self.api, self.asked = api, asked
        self.loop, self.said = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()
        self.created, kind = int(time.time()), 'chatcmpl' if asked.chat else 'cmpl'
        self.id = f'{kind}-{uuid.uuid4().hex}'
        longest, waiting = api.run.config.model.max_len, api.scheduler.most_waiting
        if (number := len(read) * asked.number) > waiting:  # which the queue has no room for even when it is empty
            raise Refusal(400, f'{number} texts are asked for, and no more than --waiting={waiting} can wait')
        self.requests: list[Request] = []
        for row, tokens in enumerate(read):
            room = row_writer.room(api.run.config, tokens)
            if asked.most is not None and asked.most > room:
                line = f'a prompt of {len(tokens)} tokens leaves {room} of model.max_len={longest}'
                raise Refusal(400, f'{line}, and max_tokens={asked.most}')
            most = asked.most or (room if asked.chat else min(room, max(api.made.least, 16)))
            if most < api.made.least:
                raise Refusal(400, f'max_tokens={most}: the shortest text that fits has {api.made.least} with its end')
            for number in range(asked.number):
                say = functools.partial(self._say, len(self.requests))
                drawing = asked.drawing._replace(row=row, number=number, most=most)
                batch = api.made.batch(tokens) | row_writer.bias_of(asked.biases)
                end = time.monotonic() + api.timeout
                self.requests.append(Request(batch, drawing, most, asked.stops, say, end))
        self.counts = {'prompt_tokens': sum(map(len, read)), 'completion_tokens': 0}
        why = api.scheduler.submit(self.requests)
        if why == 'full':
            raise Refusal(*_FULL)
        if why is not None:
            raise Refusal(503, _WHY[why], 'server_error')

    def _say(self, index: int, piece: Piece) -> None:
        """Takes what the scheduler's thread says of a text."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.said.put_nowait, (index, piece))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece] | None]:
        """Yields the number of a text and what is said of it, until all are finished; None now and then while there is
        nothing. Raises a `Refusal` where a text is given up."""
        left = len(self.requests)
        while left:
            try:
                index, piece = await asyncio.wait_for(self.said.get(), _LOOK)
            except TimeoutError:
                yield None
                continue
            if piece.finish in _STATUS:
                raise Refusal(_STATUS[piece.finish], _WHY[piece.finish], 'server_error')
            left -= piece.finish is not None
            self.counts['completion_tokens'] += len(piece.tokens)
            yield index, piece

    async def whole(self, left: Callable[[], Any]) -> dict[str, Any]:
        """Returns the answer with all texts; raises a `Refusal` where the client leaves before."""
        found, asked = [Piece('', []) for _ in self.requests], time.monotonic()  # their tokens grow
        async for said in self.pieces():
            if time.monotonic() - asked > _LOOK:
                asked = time.monotonic()
                if await left():
                    raise Refusal(_STATUS['cancelled'], _WHY['cancelled'])
            if said is not None:
                index, piece = said
                found[index].tokens.extend(piece.tokens)
                found[index] = piece._replace(text=piece.whole or '', tokens=found[index].tokens)
        return self._answer([self._choice(index, piece, whole=True) for index, piece in enumerate(found)], True)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields events: a chunk for each piece, and [DONE]; a text that is given up ends with an error."""
        try:
            if self.asked.chat:
                for index in range(len(self.requests)):
                    delta = {'index': index, 'delta': {'role': 'assistant', 'content': ''}, 'finish_reason': None}
                    yield self._event(self._answer([delta]))
            async for said in self.pieces():
                if said is None:
                    yield b': waiting\n\n'
                elif said[1].text or said[1].finish or self.asked.logprobs:
                    yield self._event(self._answer([self._choice(*said, whole=False)]))
            if self.asked.usage:
                yield self._event(self._answer([], True))
            yield b'data: [DONE]\n\n'
        except Refusal as error:
            yield self._event({'error': {'message': str(error), 'type': error.kind, 'code': error.status}})

    def _event(self, body: Mapping[str, Any]) -> bytes:
        return f'data: {json.dumps(body, ensure_ascii=False)}\n\n'.encode()

    def _answer(self, choices: list[dict[str, Any]], usage: bool = False) -> dict[str, Any]:
        kind = 'text_completion' if not self.asked.chat else 'chat.completion'
        kind += '.chunk' if self.asked.stream and self.asked.chat else ''
        body = {'id': self.id, 'object': kind, 'created': self.created, 'model': self.api.name, 'choices': choices}
        if usage:
            body['usage'] = {**self.counts, 'total_tokens': sum(self.counts.values())}
        return body

    def _choice(self, index: int, piece: Piece, *, whole: bool) -> dict[str, Any]:
        if not self.asked.chat:
            said: dict[str, Any] = {'text': piece.text}
        elif whole:
            said = {'message': {'role': 'assistant', 'content': piece.text}}
        else:
            said = {'delta': {'content': piece.text} if piece.text else {}}
        logprobs = self._logprobs(piece) if self.asked.logprobs else None
        return {'index': index, **said, 'logprobs': logprobs, 'finish_reason': piece.finish}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        name = self.api.run.tokenizers.target.piece
        if self.asked.chat:
            return {'content': [{'token': name(token), 'logprob': logprob} for token, logprob in piece.tokens]}
        return {
            'tokens': [name(token) for token, _ in piece.tokens],
            'token_logprobs': [logprob for _, logprob in piece.tokens],
        }
