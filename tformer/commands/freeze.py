"""Writes a run's generation as compiled programs, which run without its model's code.

    tformer freeze --workdir=DIR PATH [--rows=8] [--platforms=cpu,cuda,tpu]

PATH holds programs of StableHLO (`jax.export`) that begin a text and go on by a token in --rows rows at once, the
weights as safetensors, the tokenizers, config.json and the file of decode.json_schema. `tformer.load_frozen(PATH)`
writes with them, to the bits of the run itself on the same CPU or TPU and version of JAX. Programs for several
platforms, or for GPUs, have XLA's operations in place of a platform's own kernels, and round otherwise. `pip install
'tformer[programs]'` installs what it needs.
"""

import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tformer import checks, commands
from tformer import config as config_lib
from tformer.commands import row_writer
from tformer.commands import texts as texts_lib
from tformer.commands.import_ import new_directory
from tformer.commands.row_writer import RowWriter
from tformer.commands.run import Run, opened
from tformer.config import Config, Mesh
from tformer.data import stores
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode import programs
from tformer.decode.drawing import Drawing, drawing_of
from tformer.decode.engine import write_all
from tformer.distributed import sharding
from tformer.errors import UserError
from tformer.hf import safetensors
from tformer.layers import kernel_choice
from tformer.model import for_steps, quantized
from tformer.training import workdir as workdir_lib

SHARED_FLAGS = ('workdir', 'checkpoint')
FLAGS: dict[str, commands.Flag] = {
    'rows': ('int', 8, 'texts that are written at once'),
    'platforms': ('list', [], "JAX's platforms that the programs are for; default: that of this process"),
}
ARGUMENTS = 'PATH'
SCHEMA = 'schema.json'  # of decode.json_schema

_PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if len(arguments) != 1:
        raise UserError(f'freeze takes one PATH, not {len(arguments)}')
    stores.require_local(arguments[0], written=True)  # before the parameters are read
    loaded = Run.load(commands.needed(flags, 'workdir'), overrides, flags.checkpoint)
    freeze(loaded, arguments[0], rows=flags.rows, platforms=flags.platforms)


def freeze(
    run: Run | str | pathlib.Path, path: str | pathlib.Path, *, rows: int = 8, platforms: Sequence[str] = ()
) -> None:
    """Writes the programs of a run's generation on one device, whole or not at all.

    Raises:
      UserError: the run does not write text or is recurrent, a platform is unknown, there is something at `path`, or
        the package flatbuffers is missing.
    """
    run = opened(run)
    if rows < 1:
        raise UserError(f'--rows={rows} must be at least 1')
    for platform in platforms:
        if platform not in _PLATFORMS:
            raise UserError(f'--platforms={platform} is unknown; valid: {", ".join(_PLATFORMS)}')
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise UserError("tformer freeze needs flatbuffers: pip install 'tformer[programs]'") from error
    changes = {}
    if (strategy := run.config.decode.strategy) not in ('greedy', 'sample'):
        changes['decode.strategy'] = 'greedy'
        line = f'decode.strategy={strategy} is not frozen: the programs write by the likeliest token'
        print(line, file=sys.stderr, flush=True)
    backend = _backend(platforms)
    kernel = run.config.model.attention_kernel
    if kernel != kernel_choice.AUTO and kernel_choice.unserved(kernel, frozenset(), backend):
        changes['model.attention_kernel'] = kernel_choice.AUTO
    settled = checks.settled(config_lib.override(run.config, changes))
    run = dataclasses.replace(run, config=dataclasses.replace(settled, mesh=Mesh(data=1)))
    made = row_writer.make(run, rows)
    variables = quantized(run.model, run.variables, run.config.decode.quantization)
    variables = for_steps(run.model.cfg, variables, apart=False)  # for platforms of both kinds
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(variables)]
    shapes = {str(place): (leaf.dtype, leaf.shape) for place, leaf in enumerate(leaves)}
    with new_directory(pathlib.Path(path)) as place:
        run.tokenizers.save(place)
        if run.config.decode.json_schema is not None:
            shutil.copyfile(run.config.decode.json_schema, place / SCHEMA)
        workdir_lib.save_config(place, run.config)
        with sharding.traced_for(backend):
            programs.save(place, made.engine, variables, row_writer.examples(made), made.rows, platforms or None)
        safetensors.write(place / safetensors.WHOLE, shapes, lambda name: leaves[int(name)])


def _backend(platforms: Sequence[str]) -> str:
    """Returns the JAX backend whose kernels the programs for these platforms have.

    Those of a CPU are XLA's own, which compile everywhere. Of other kernels JAX promises to keep a TPU's alone.
    """
    return 'tpu' if set(platforms or [jax.default_backend()]) == {'tpu'} else 'cpu'


class Frozen(NamedTuple):
    """Programs of a run that write text."""

    config: Config
    parts: RowWriter
    variables: Any
    tokenizers: Tokenizers

    def write(
        self, texts: Sequence[str], most: int | None = None, drawing: Drawing | None = None, seed: int = 0
    ) -> list[str]:
        """Returns the text written for each, as the run's `generate` writes the first of each.

            >>> tformer.load_frozen('frozen/lm').write(['def f(x):'], 20)

        Args:
          texts: the prompts, or the sources.
          most: so many new tokens at most; None: as many as the run's `decode.max_len`.
          drawing: how the tokens of every text are drawn; None: as the run's `decode` says, by `seed`.
          seed: of the draws.

        Raises:
          UserError: a text leaves no room for so many, or no text of the run's form is that short.
        """
        writer, batch, engine, rows = self.parts[:4]
        reader = texts_lib.reader(self.config, self.tokenizers)
        texts_lib.say_unknown(reader, texts_lib.contents(texts_lib.several(texts)))
        read, decode = writer.read(texts), self.config.decode
        most = decode.max_len if most is None else most
        if most < self.parts.least:
            raise UserError(
                f'the shortest text that fits has {self.parts.least} tokens with its end, and {most} are asked for'
            )
        for tokens in read:
            if most > (room := row_writer.room(self.config, tokens)):
                raise UserError(f'a text of {len(tokens)} tokens leaves {room} new ones, and {most} are asked for')
        own = drawing_of(decode, seed)._replace(most=most)
        asked = [(batch(tokens), drawing or own._replace(row=row), most) for row, tokens in enumerate(read)]
        found = {
            number: writer.decode([token for token in tokens if token not in writer.ends])
            for number, tokens, _ in write_all(engine, self.variables, asked, rows=rows, ends=writer.ends)
        }
        return [found[number] for number in range(len(texts))]


def load_frozen(path: str | pathlib.Path) -> Frozen:
    """Returns what `freeze` wrote.

    Raises:
      UserError: the directory holds no programs, or is damaged.
    """
    place = pathlib.Path(path)
    engine, rows = programs.load(place)
    tensors = safetensors.open_files([place / safetensors.WHOLE])
    variables = [jax.device_put(tensors[str(number)]) for number in range(len(tensors))]
    config = workdir_lib.read_config(place)
    if config.decode.json_schema is not None:
        config = config_lib.override(config, {'decode.json_schema': str(place / SCHEMA)})
    tokenizers = Tokenizers.load(place)
    writer, batch = row_writer.reader(config, tokenizers)
    _, least = row_writer.rules_and_least(config, tokenizers)
    return Frozen(config, RowWriter(writer, batch, engine, rows, least), variables, tokenizers)
