"""The address at which a command serves."""

import socket

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
