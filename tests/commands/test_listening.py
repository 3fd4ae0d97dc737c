"""A server that commands run ends by a signal, whenever it comes."""

import signal

import pytest

from tformer.commands.serving import listening


@pytest.fixture
def handled():
    """The signals have their handlers again afterwards."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.signals
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_runs_ends_it(handled, number, capsys):
    uvicorn = pytest.importorskip('uvicorn', reason="pip install -e '.[serve]'")

    class Server(uvicorn.Server):
        def run(self, sockets=None):
            signal.raise_signal(number)
            assert self.should_exit
            super().run(sockets)

    async def app(scope, receive, send):
        pytest.fail('nobody asks')

    with listening.listen('127.0.0.1', 0) as place:
        address = listening.address(place)
        listening.run('serving it', Server(uvicorn.Config(app, log_config=None, lifespan='off')), place)
    assert capsys.readouterr().err == f'serving it at {address}\n'
