"""Writes the data as a TFDS set, or makes a run's tokenizers and token cache.

    tformer prepare --config=FILE[:argument] --config.data.tfds_name=NAME [--config.data.tfds_dir=DIR]
    tformer prepare --config=FILE[:argument] --workdir=DIR

The first form writes a set that any number of hosts read at random; the second makes everything that `train` makes
before its first step. With --workdir and data.tfds_name it does both.
"""

import pathlib
import sys

from tformer import checks, commands
from tformer import config as config_lib
from tformer.config import Config
from tformer.data import cache
from tformer.data.sources import prepare as tfds_sets
from tformer.distributed import sharding
from tformer.training import checkpoint, setup
from tformer.training import workdir as workdir_lib

SHARED_FLAGS = ('config', 'workdir')
FLAGS: dict[str, commands.Flag] = {}
WRITTEN = ('data.tfds_name', 'data.tfds_dir')  # the set that is written, whatever data.source is read


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    config = config_lib.load(commands.needed(flags, 'config'), overrides)
    named = {name: config_lib.values(config)[name] for name in WRITTEN}
    settled = checks.settle(config_lib.override(config, dict.fromkeys(WRITTEN)), overrides)
    print(prepare(config_lib.override(settled, named), flags.workdir))


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
            found = setup.load_data(config, home, sharding.make_mesh(config.mesh), before)
            workdir_lib.save_config(home, found.config)
        said.append(f'tokens are in {cache.directory(found.config.data)}')
        said += [f'  train  {found.batches.summary}', f'  valid  {found.valid.summary}']
    return '\n'.join(said)
