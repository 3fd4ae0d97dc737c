"""Stores of objects without a network: one in memory, and an emulator of S3 on loopback."""

import contextlib
import pathlib
from collections.abc import Iterator

import pytest
import tensorstore

from tformer.data import stores


def memory() -> stores.Store:
    """Returns a store in the memory of this process, by the same calls."""
    made = stores.Store.__new__(stores.Store)
    made.url, made._store = 's3://bucket/run', tensorstore.KvStore.open({'driver': 'memory'}).result()
    return made


@contextlib.contextmanager
def s3() -> Iterator[dict[str, str]]:
    """Gives the environment of a server of S3 with the bucket `some-bucket`; skips the test where moto is missing."""
    server = pytest.importorskip('moto.server', reason="pip install -e '.[store-test]'")
    threaded = server.ThreadedMotoServer('127.0.0.1', 0, verbose=False)
    threaded.start()
    environment = {
        'AWS_ENDPOINT_URL': f'http://127.0.0.1:{threaded.get_host_and_port()[1]}', 'AWS_REGION': 'us-east-1',
        'AWS_ACCESS_KEY_ID': 'x', 'AWS_SECRET_ACCESS_KEY': 'x',
    }  # fmt: skip
    import boto3

    boto3.client(
        's3', endpoint_url=environment['AWS_ENDPOINT_URL'], region_name='us-east-1', aws_access_key_id='x',
        aws_secret_access_key='x',
    ).create_bucket(Bucket='some-bucket')  # fmt: skip
    try:
        yield environment
    finally:
        threaded.stop()


def files(place: pathlib.Path) -> dict[str, str]:
    return {path.relative_to(place).as_posix(): path.read_text() for path in place.rglob('*') if path.is_file()}


def write(place: pathlib.Path, **contents: str) -> None:
    for name, content in contents.items():
        file = place / name.replace('__', '/')
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
