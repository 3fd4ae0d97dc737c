"""Writes the data as a set of tokens or of records, or makes a run's tokenizers and token cache.

    tformer prepare --config=FILE[:argument] --output=DIR [--processes=N] [--beam=FLAGS]
    tformer prepare --config=FILE[:argument] --config.data.tfds_name=NAME [--config.data.tfds_dir=DIR]
    tformer prepare --config=FILE[:argument] --workdir=DIR

The first form cleans, de-duplicates, shuffles and tokenises texts of any size into shards; after a kill the same
command goes on. The second writes records as a TFDS set, which any number of hosts read at random. The third makes
everything that `train` makes before its first step. With --workdir and data.tfds_name it does both.
"""

import os
import pathlib
import sys
from typing import Any

from tformer import checks, commands
from tformer import config as config_lib
from tformer.config import Config
from tformer.data import cache
from tformer.data.batches import mixture
from tformer.data.prepared import beam
from tformer.data.prepared import prepare as prepared
from tformer.data.sources import prepare as tfds_sets
from tformer.distributed import meshes
from tformer.errors import UserError
from tformer.training import checkpoint, setup
from tformer.training import workdir as workdir_lib

SHARED_FLAGS = ('config', 'workdir')
FLAGS: dict[str, commands.Flag] = {
    'output': ('string', None, 'the directory of the prepared set'),
    'processes': ('int', None, 'of this machine, that work on --output; as many as there are cores'),
    'beam': ('string', None, "make --output by Apache Beam, with its flags: '--runner=DirectRunner'"),
}
WRITTEN = ('data.tfds_name', 'data.tfds_dir')  # the set that is written, whatever data.source is read
CHANGES = ('data.cleaning', 'data.deduplicate')  # what --output does to the texts


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    config = config_lib.load(commands.needed(flags, 'config'), overrides)
    if flags.output is None:
        for name in ('processes', 'beam'):
            if getattr(flags, name) is not None:
                raise UserError(f'--{name} is of a prepared set: give --output=DIR')
    writes = config.data.source == 'tfds' or 'data.tfds_name' in overrides  # a recipe's set holds other records
    own = CHANGES if flags.output is not None else WRITTEN if writes else ()
    named = {name: config_lib.values(config)[name] for name in own}
    config = config_lib.override(checks.settle(config_lib.override(config, _defaults(own)), overrides), named)
    if flags.output is None:
        print(prepare(config, flags.workdir))
        return
    if flags.workdir is not None:
        raise UserError('--output and --workdir are two preparations: give one of them')
    if flags.beam is not None and flags.processes is not None:
        raise UserError('--processes and --beam are two ways to make a set: give one of them')
    processes = flags.processes if flags.processes is not None or flags.beam is not None else os.cpu_count() or 1
    print(prepare_set(config, flags.output, processes, flags.beam))


def _defaults(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: config_lib.values(Config())[name] for name in names}


def prepare(config: Config, workdir: str | pathlib.Path | None = None) -> str:
    """Writes the data as a TFDS set if data.tfds_name names one, and fills a workdir if one is given.

        >>> print(tformer.prepare(tformer.load_config('configs/g2p.py:demo'), 'runs/demo'))

    The workdir gets the tokenizers and the resolved config; the tokens go to the token cache. Returns a text that names
    the files.

    Raises:
      UserError: the config or the data has a mistake.
    """
    checks.check_here(config)
    said = []
    if workdir is None or config.data.tfds_name is not None:
        said.append(tfds_sets.write(config.data, config.train.objective, lambda line: print(line, file=sys.stderr)))
    if workdir is not None:
        home = pathlib.Path(workdir)
        with workdir_lib.lock(home):
            last = max(checkpoint.steps(home), default=None)
            before = None if last is None else checkpoint.read_metadata(home, last)
            found = setup.load_data(config, home, meshes.make_mesh(config.mesh), before)
            workdir_lib.save_config(home, found.config)
        said.append(f'tokens are in {cache.directory(found.config.data)}')
        said += [f'  train  {found.batches.summary}', f'  valid  {found.valid.summary}']
    return '\n'.join(said)


def prepare_set(
    config: Config, output: str | pathlib.Path, processes: int | None = None, beam_flags: str | None = None
) -> str:
    """Writes the texts of the data, as tokens, to a directory from which any number of hosts train.

        >>> print(tformer.prepare_set(tformer.load_config('configs/lm_stdlib.py'), 'sets/stdlib'))

    So many processes work on it, or Apache Beam, or this process alone. The bytes of the set do not depend on that, nor
    on where an earlier call was killed; what that one has made is kept. Returns a text that says what the set holds.

    Raises:
      UserError: the config or the data has a mistake, or the directory holds another set or other files.
    """
    prepared.check_output(str(output))
    checks.check_choices(config)
    checks.check_here(config_lib.override(config, _defaults(CHANGES)))
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    tokenizers = workdir_lib.new_tokenizers(config, mixture.load(config, 'train'))
    if processes is None:
        engine: prepared.Engine = beam.engine(beam_flags) if beam_flags else prepared.here
        return prepared.write(config, tokenizers, str(output), engine, say)
    if processes < 1:
        raise UserError(f'--processes={processes} must be positive')
    with prepared.processes(processes) as engine:
        return prepared.write(config, tokenizers, str(output), engine, say)
