"""What the body of a request to `tformer serve` asks for, by the completions and chat convention of the field."""

import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tformer.commands.row_writer import MOST_BIASED
from tformer.data.sources import fields as fields_lib
from tformer.data.sources.records import BadRecord
from tformer.decode.drawing import Drawing
from tformer.errors import nearest

MOST_CHOICES = 32  # texts of one request
_IGNORED = ('user', 'metadata', 'store', 'service_tier')
# Fields of the convention that have no counterpart, with the values that switch them off.
_OFF: dict[str, tuple[Any, ...]] = {
    'suffix': (None, ''),
    'echo': (None, False),
    'presence_penalty': (None, 0),
    'frequency_penalty': (None, 0),
    'tools': (None, []),
    'tool_choice': (None, 'none', 'auto'),
    'response_format': (None, {'type': 'text'}),
    'top_logprobs': (None, 0),
    'best_of': (None, 1),
    'functions': (None, []),
    'function_call': (None, 'none', 'auto'),
    'parallel_tool_calls': (None, True, False),
    'modalities': (None, ['text']),
}

_OFF_IN_STREAMS = ('include_obfuscation', 'continuous_usage_stats')  # of stream_options
_NUMBER = re.compile('0|[1-9][0-9]{0,15}')  # of a token; each has one name


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = 'invalid_request_error') -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Asked(NamedTuple):
    """A request of a client."""

    prompts: list[Any]  # texts, or one chat
    chat: bool
    most: int | None  # new tokens; None: as many as there is room for
    number: int  # texts of each prompt
    drawing: Drawing
    biases: dict[int, float]  # what the logits of tokens gain
    stops: tuple[str, ...]
    stream: bool
    usage: bool  # whether a stream ends with the counts of tokens
    logprobs: bool


_KNOWN = (
    *('model', 'prompt', 'messages', 'max_tokens', 'max_completion_tokens', 'stop', 'temperature', 'top_k', 'top_p'),
    *('min_p', 'seed', 'n', 'stream', 'stream_options', 'logprobs', 'logit_bias'),
)
_OTHER = {True: ('prompt',), False: ('messages', 'max_completion_tokens')}  # fields of the other endpoint


def parse(body: Mapping[str, Any], chat: bool, served: str, vocab_size: int) -> Asked:
    """Returns what a body asks of the model that is served; raises a `Refusal` that names the field."""
    fields = dict(body)

    def take(name: str, kinds: tuple[type, ...], default: Any, least: float = -np.inf, most: float = np.inf) -> Any:
        value = fields.pop(name, None)
        if value is None:
            return default
        wrong = type(value) not in kinds
        if wrong or (isinstance(value, int | float) and not isinstance(value, bool) and not least <= value <= most):
            words = ' or '.join(kind.__name__ for kind in kinds)
            limits = '' if least == -np.inf else f' from {least} to {most}'
            raise Refusal(400, f'{name}={value!r} must be {words}{limits}')
        return value

    model = take('model', (str,), served)
    if model != served:
        raise Refusal(404, f'the model {model!r} is not served; valid: {served!r}', 'not_found_error')
    prompts = _messages(fields) if chat else _prompts(fields)
    most = take('max_tokens', (int,), None, 1, 2**24)
    if chat:
        most = take('max_completion_tokens', (int,), most, 1, 2**24)
    stops = take('stop', (str, list), [])
    stops = [stops] if isinstance(stops, str) else stops
    if not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > 16:
        raise Refusal(400, f'stop={stops!r} must be up to 16 texts')
    drawing = Drawing(
        temperature=float(take('temperature', (int, float), 1.0, 0, 100)),
        top_k=take('top_k', (int,), Drawing().top_k, 1, 2**31 - 1),
        top_p=float(take('top_p', (int, float), 1.0, 1e-6, 1)),
        min_p=float(take('min_p', (int, float), 0.0, 0, 1)),
        seed=take('seed', (int,), secrets.randbits(31), 0, 2**31 - 1),
    )
    usage = _usage(take('stream_options', (dict,), {}))
    biases = _biases(take('logit_bias', (dict,), {}), vocab_size)
    wanted = take('logprobs', (bool,) if chat else (bool, int), False, 0, 1)
    asked = Asked(
        prompts,
        chat,
        most,
        take('n', (int,), 1, 1, MOST_CHOICES),
        drawing,
        biases,
        tuple(stops),
        take('stream', (bool,), False),
        usage,
        wanted is not False,
    )
    if len(prompts) * asked.number > MOST_CHOICES:
        raise Refusal(400, f'{len(prompts)} prompts of n={asked.number} texts: at most {MOST_CHOICES} in all')
    for name, value in fields.items():
        if name in _OFF and value not in _OFF[name]:
            raise Refusal(400, f'{name}={value!r} is not supported')
        if name not in (*_OFF, *_IGNORED):
            known = {*_KNOWN, *_OFF, *_IGNORED} - set(_OTHER[chat])
            raise Refusal(400, f'{name!r} is unknown{nearest(name, known, listed=0)}')
    return asked


def _usage(options: Mapping[str, Any]) -> bool:
    """Returns whether the options of a stream ask for the counts of tokens at its end."""
    for name, value in options.items():
        if name in _OFF_IN_STREAMS and value in (None, False):
            continue
        if name != 'include_usage':
            raise Refusal(400, f'stream_options: {name!r} is not supported; valid: include_usage')
        if not isinstance(value, bool | None):
            raise Refusal(400, f'stream_options: include_usage={value!r} must be bool')
    return options.get('include_usage') is True


def _biases(given: Mapping[str, Any], vocab_size: int) -> dict[int, float]:
    """Returns what logits gain by tokens, which keys of JSON name."""
    if len(given) > MOST_BIASED:
        raise Refusal(400, f'logit_bias has {len(given)} tokens: at most {MOST_BIASED}')
    for token, value in given.items():
        if not (_NUMBER.fullmatch(token) and int(token) < vocab_size):
            raise Refusal(400, f'logit_bias: {token!r} is not the number of a token from 0 to {vocab_size - 1}')
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise Refusal(400, f'logit_bias: {value!r} of token {token} must be int or float from -100 to 100')
    return {int(token): float(value) for token, value in given.items()}


def _prompts(fields: dict[str, Any]) -> list[Any]:
    prompt = fields.pop('prompt', None)
    found = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise Refusal(400, 'prompt must be a text, or a list of texts')
    try:
        return [fields_lib.text(text, 'prompt') for text in found]
    except BadRecord as error:
        raise Refusal(400, str(error)) from error


def _messages(fields: dict[str, Any]) -> list[Any]:
    messages = fields.pop('messages', None)
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, 'messages must be a list of {"role": ..., "content": ...}')
    return [[_plain(message) for message in messages]]


def _plain(message: Any) -> Any:
    """Returns a message whose content is one text where the parts of it are texts."""
    parts = message.get('content') if isinstance(message, dict) else None
    if not isinstance(parts, list) or not parts:
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get('type') != 'text' or not isinstance(part.get('text'), str):
            raise Refusal(400, 'messages: a part of a content must be {"type": "text", "text": ...}')
    return {**message, 'content': ''.join(part['text'] for part in parts)}
