"""Shows a directory of runs while they train, in the terminal or as a local page.

    tformer watch DIR [--once] [--metric=SPLIT/NAME] [--baseline=ARM]
    tformer watch DIR --serve[=PORT] [--host=127.0.0.1]
    tformer watch DIR --prune=ARM | --stop=ARM | --stop=ARM/seed_N | --resume=ARM

DIR is a sweep, a directory of workdirs, or one workdir. A terminal shows how far each arm is, its curve, the time left,
what the results so far would say, and the log of a trial; elsewhere a line is printed for each change. --prune leaves
out the trials of an arm that have not begun; --stop has trials save and stop at their next step, on whatever host they
run, and --resume lets them go on. The page changes nothing, and is for this machine alone unless --host says otherwise;
`pip install 'tformer[serve]'` installs what it needs.
"""

import contextlib
import pathlib
import sys

import jax

from tformer import commands
from tformer.commands.serving import listening
from tformer.data import stores
from tformer.errors import UserError
from tformer.lab.live import page, requests, terminal
from tformer.lab.live.watched import Watched

SHARED_FLAGS = ('metric', 'baseline')
FLAGS: dict[str, commands.Flag] = {
    'once': ('bool', False, 'print the state as it is, and end'),
    'serve': ('port', None, 'show a page at this port of --host; without a number at 8010'),
    'host': ('string', '127.0.0.1', 'with --serve, the address to listen at; 0.0.0.0 is every one of this machine'),
    'prune': ('string', None, 'an arm whose trials that have not begun are left out'),
    'stop': ('string', None, 'an arm, or a trial ARM/seed_N, that saves and stops'),
    'resume': ('string', None, 'an arm, or a trial, that was stopped and may go on'),
}
ARGUMENTS = 'DIRECTORY'  # not a copy of one on a store, which would not grow


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if overrides:
        raise UserError('watch takes no --config')
    if len(arguments) != 1:
        raise UserError(f'watch takes one directory, not {len(arguments)}: tformer watch DIR')
    jax.config.update('jax_platforms', 'cpu')  # it computes nothing that an accelerator is for
    stores.require_local(pathlib.Path(arguments[0]))
    watched = Watched(arguments[0], flags.metric, flags.baseline)
    if flags.serve is None and flags['host'].present:
        raise UserError('--host is of --serve: give both')
    asked = [flag for flag in ('prune', 'stop', 'resume') if flags[flag].value is not None]
    if len(asked) > 1 or (asked and (flags.serve is not None or flags.once)):
        raise UserError(f'--{asked[0]}: one thing at a time')
    if flags.prune is not None:
        print(requests.prune(watched.home, flags.prune, watched.trials))
    elif flags.stop is not None:
        print(requests.stop(flags.stop, watched.trials))
    elif flags.resume is not None:
        print(requests.resume(flags.resume, watched.trials))
    elif flags.serve is not None:
        serve(watched, flags.host, flags.serve)
    elif sys.stdout.isatty() and not flags.once:
        terminal.show(watched)
    else:
        terminal.follow(watched, flags.once)


def serve(watched: Watched, host: str, port: int) -> None:
    """Answers browsers until SIGTERM or SIGINT. Raises a `UserError` without the packages or the address."""
    try:
        import uvicorn

        app = page.make_app(watched, host)
    except ImportError as error:
        raise UserError("tformer watch --serve needs starlette and uvicorn: pip install 'tformer[serve]'") from error
    with contextlib.closing(listening.listen(host, port)) as place:
        options = uvicorn.Config(app, log_level='warning', lifespan='off', timeout_graceful_shutdown=1)
        listening.run(f'watching {watched.home}', uvicorn.Server(options), place)
