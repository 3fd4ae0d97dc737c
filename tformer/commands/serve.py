"""Serves a run over HTTP, by the completions and chat convention of the field.

    tformer serve --workdir=DIR [--host=127.0.0.1] [--port=8000] [--rows=8] [--waiting=64] [--kept=4] [--timeout=300]

POST /v1/completions and, for runs with a chat template, /v1/chat/completions, with "stream" too; GET /v1/models and
/health. Texts are written in --rows at once, each as soon as a row is free; --waiting requests wait, and further ones
are refused (429). One process on one host serves, on the devices of config.mesh; SIGTERM refuses new requests and
answers those that are there, for --grace seconds. `pip install 'tformer[serve]'` installs what it needs.
"""

import contextlib
import functools
import math
import sys
from typing import Any

import jax
import numpy as np

from tformer import commands
from tformer.commands import row_writer
from tformer.commands.run import Run
from tformer.commands.serving import http_api, listening
from tformer.commands.serving.scheduler import Scheduler
from tformer.data import store_copies
from tformer.decode.drawing import Drawing
from tformer.decode.text import read_whole
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.model import for_steps, quantized

SHARED_FLAGS = ('workdir', 'checkpoint')
FLAGS: dict[str, commands.Flag] = {
    'host': ('string', '127.0.0.1', 'the address to listen at; 0.0.0.0 is every one of this machine'),
    'port': ('int', 8000, 'the port to listen at; 0: any that is free'),
    'rows': ('int', 8, 'texts that are written at once'),
    'waiting': ('int', 64, 'requests that wait for a row; more are refused'),
    'kept': ('int', 4, "prompts that are kept for others that begin like them, each in a row's memory"),
    'timeout': ('float', 300.0, 'seconds after which a request is answered with an error'),
    'grace': ('float', 30.0, 'seconds that requests have after SIGTERM'),
    'name': ('string', None, "the model's name in requests; default: the workdir's"),
}


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    for name, least in (('rows', 1), ('waiting', 1), ('kept', 0), ('timeout', 0), ('grace', 0)):
        if not least <= (value := getattr(flags, name)) < math.inf:
            raise UserError(f'--{name}={value} must be a number of at least {least}')
    try:
        import uvicorn
    except ImportError as error:
        raise UserError("tformer serve needs starlette and uvicorn: pip install 'tformer[serve]'") from error
    loaded = Run.load(commands.needed(flags, 'workdir'), overrides, flags.checkpoint, placed=True).for_writing()
    with contextlib.closing(listening.listen(flags.host, flags.port)) as place:
        made, scheduler = make_scheduler(loaded, rows=flags.rows, most_waiting=flags.waiting, kept=flags.kept)
        if loaded.config.decode.draft is not None:
            print('decode.draft is not used: texts are written token by token', file=sys.stderr, flush=True)
        if flags.kept and made.kept is None:
            why = read_whole(loaded.config) or f'model.family={loaded.config.model.family}'
            print(f'prompts are read whole, and none is kept: {why}', file=sys.stderr, flush=True)
        scheduler.start()
        name = flags.name or store_copies.name_of(loaded.workdir)
        app = http_api.make_app(name, loaded, made, scheduler, timeout=flags.timeout)
        options = uvicorn.Config(
            app, log_level='warning', lifespan='off', timeout_graceful_shutdown=int(flags.grace) + 10
        )

        class Server(uvicorn.Server):
            def handle_exit(self, sig: int, frame: Any) -> None:
                scheduler.close(flags.grace)
                super().handle_exit(sig, frame)

        listening.run(f'serving {name}', Server(options), place)


def make_scheduler(run: Run, *, rows: int, most_waiting: int, kept: int = 0) -> tuple[row_writer.RowWriter, Scheduler]:
    """Returns what reads texts for a run, and the scheduler that writes them, compiled for prompts of all lengths.

    Raises:
      UserError: as `row_writer.make`.
    """
    made = row_writer.make(run, rows, own_biases=True, kept=kept)
    variables = for_steps(run.model.cfg, quantized(run.model, run.variables, run.config.decode.quantization))
    mesh = meshes.make_mesh(run.config.mesh)
    place = functools.partial(sharding.placed, mesh, run.config.mesh)
    with place():  # no request need wait for the compiler
        slots = made.engine.empty(variables)
        for batch in row_writer.examples(made):
            begin = made.engine.insert if made.kept is None else made.kept.compile
            slots = begin(variables, slots, batch | row_writer.bias_of({}), np.int32(0), Drawing())
            slots = made.engine.free(made.engine.step(variables, slots)[0], np.int32(0))
        jax.block_until_ready(slots)
    options: dict[str, Any] = {'decode': made.writer.decode, 'ends': made.writer.ends}
    options |= {'rows': made.rows, 'most_waiting': most_waiting}
    return made, Scheduler(made.engine, variables, place, **options)
