"""Object stores, `s3://BUCKET/PATH` and `gs://BUCKET/PATH`: their objects, by names below a URL.

TensorStore, which Orbax needs anyway, reads and writes both kinds by the same calls.
"""

import os
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tformer.errors import Unsaved, UserError

T = TypeVar('T')

TIMEOUT = 60.0  # seconds without an answer
STALL = 120  # seconds in which no byte of an object has gone
PATIENCE, PAUSE = 300.0, 5.0  # seconds for which a store that does not answer is asked again, and between two times
FAILING = re.compile(r'ABORTED|UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|RESOURCE_EXHAUSTED|CANCELLED|no answer')
_URL = re.compile(r'([a-z][a-z0-9+.-]+):(/+)', re.IGNORECASE)


class StoreError(UserError):
    """A store does not do what it is asked for."""


class Unreachable(StoreError):
    """A store does not answer, and may when it is asked again: by the same command."""

    code = 1


def address(text: str) -> str | None:
    """Returns the URL of a workdir on an object store, None for a path here.

    Raises:
      UserError: the text is a URL, but of no such store.
    """
    if not (found := _URL.match(text)):
        return None
    scheme, rest = found[1].lower(), text[found.end() :]
    if scheme not in ('s3', 'gs'):
        raise UserError(f'{text} is a URL of {scheme}; workdirs may be on s3:// and gs://, or here')
    if found[2] != '//' or not rest.strip('/'):
        raise UserError(f'{text} names no bucket: write {scheme}://{rest or "BUCKET/PATH"}')
    return f'{scheme}://{rest}'


def require_local(path: pathlib.Path | str, field: str = '', written: bool = False) -> None:
    """Raises a `UserError` if a path is a URL, or one that became a path, where only a path here can be read, or
    `written`."""
    text = path if isinstance(path, str) else path.as_posix()
    if found := _URL.match(text):
        url = f'{found[1]}://{text[found.end() :]}'
        where = f'{field}={url} is a URL' if field else f'{url} is a URL'
        copy = 'copy it to the store from there' if written else 'copy it from the store first'
        raise UserError(f'{where}, and this takes a path of this machine: {copy}')


def insist(act: Callable[[], T]) -> T:
    """Returns act(), which is tried again for `PATIENCE` seconds while a store does not answer.

    Raises:
      Unsaved: it still does not, or it refuses.
    """
    end, told = time.monotonic() + PATIENCE, False
    while True:
        try:
            return act()
        except StoreError as error:
            if not isinstance(error, Unreachable) or time.monotonic() >= end:
                raise Unsaved(str(error)) from error
            if not told:
                say(f'{error}; asking again for {end - time.monotonic():.0f} s')
            told = True
            time.sleep(PAUSE)


def say(line: str) -> None:
    print(f'tformer: {line}', file=sys.stderr, flush=True)


class Store:
    """The objects below a URL, by their names relative to it. All methods raise a `UserError` where the store fails."""

    def __init__(self, url: str):
        self.url = url.rstrip('/')
        os.environ.setdefault('TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS', f'{STALL}')
        os.environ.setdefault('TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES', '1')
        scheme, bucket, path = self.url.split('/', 3)[0], *f'{self.url[5:]}/'.split('/', 1)
        import tensorstore

        spec: dict[str, Any] = {'driver': 's3' if scheme == 's3:' else 'gcs', 'bucket': bucket, 'path': path}
        if scheme == 's3:' and (endpoint := os.environ.get('AWS_ENDPOINT_URL')):
            spec |= {'endpoint': endpoint, 'aws_region': os.environ.get('AWS_REGION', 'us-east-1')}
        if scheme == 's3:' and os.environ.get('AWS_ACCESS_KEY_ID'):  # the other kinds complain that they find nothing
            spec['aws_credentials'] = {'type': 'environment'}
        retries = {'max_retries': 4, 'initial_delay': '200ms', 'max_delay': '2s'}
        context = tensorstore.Context({'s3_request_retries': retries, 'gcs_request_retries': retries})
        self._store = self._result(lambda: tensorstore.KvStore.open(spec, context=context))
        self.names()  # a store that cannot be reached says so before anything is done

    def _result(self, begin: Any, timeout: float | None = TIMEOUT) -> Any:
        """Returns what a request returns. Without a timeout it goes on as long as bytes do."""
        try:
            return begin().result(timeout=timeout)
        except (ValueError, RuntimeError, OSError, TimeoutError) as error:
            why = re.split(r' \[|\n', str(error) or f'no answer in {TIMEOUT:.0f} s')[0]
            if why.startswith('PERMISSION_DENIED'):
                why += ' (who asks is said by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role)'
            raise (Unreachable if FAILING.match(why) else StoreError)(f'{self.url}: {why}') from error

    def names(self) -> list[str]:
        """Returns the names of all objects."""
        return [name.decode() for name in self._result(lambda: self._store.list()) if not name.endswith(b'/')]

    def read(self, name: str, unlike: bytes | None = None) -> tuple[bytes | None, bytes]:
        """Returns (the content, its generation). The content is None where there is no object, or where the reader has
        it already: its generation is `unlike`."""
        found = self._result(lambda: self._store.read(name, if_not_equal=unlike), timeout=None)
        return (bytes(found.value) if found.state == 'value' else None), bytes(found.stamp.generation)

    def part(self, name: str, start: int, stop: int) -> tuple[bytes, bytes] | None:
        """Returns (bytes from `start` to `stop` or the end, the object's generation), or None if there is no object."""
        for wanted in (slice(start, stop), slice(start, None), slice(0, 0)):
            try:
                found = self._result(lambda wanted=wanted: self._store.read(name, byte_range=wanted))
            except UserError as error:
                if 'OUT_OF_RANGE' not in str(error):
                    raise  # else the end comes before
            else:
                return (bytes(found.value), bytes(found.stamp.generation)) if found.state == 'value' else None
        return None

    def write(self, name: str, content: bytes | None, only: bytes | None = None) -> bytes:
        """Writes an object, None deletes it; with `only` if it is of this generation. Returns the new one, or b''."""
        done = self._result(lambda: self._store.write(name, content, if_equal=only), timeout=None)
        return bytes(done.generation)
