"""The address at which a command serves, and the signals that end it."""

import signal
import socket
import sys
from typing import Any

from tformer.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 is any that is free. Raises a `UserError` where it cannot."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ':' in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise UserError(f'--host={host} --port={port}: {error}') from error


def address(listening: socket.socket) -> str:
    """Returns the URL of a socket that listens."""
    host, port = listening.getsockname()[:2]
    return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'


def run(what: str, server: Any, listening: socket.socket) -> None:
    """Says where `what` is, and runs a server of uvicorn until SIGTERM or SIGINT, at whatever moment it comes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)  # uvicorn restores these, and raises the signal again, when it ends
    print(f'{what} at {address(listening)}', file=sys.stderr, flush=True)
    server.run(sockets=[listening])
