"""Makes a workdir of a hub directory: config.json, safetensors and a vocabulary; or workdirs of TensorBoard files.

    tformer import PATH --workdir=DIR [--config.section.field=value ...]
    tformer import LOGS --workdir=DIR

PATH is a directory, or the name of a repository (org/name), which `huggingface_hub` downloads. The workdir evaluates,
generates, trains and exports like any other, and lends its model to fine-tuning (train.init_from=DIR).

LOGS is a directory of runs that left TensorBoard files, each in LOGS/ARM/seed_N. Their scalars become the directory
DIR, which `tformer report` compares like a sweep.
"""

import contextlib
import json
import pathlib
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from tformer import checks, commands
from tformer import config as config_lib
from tformer.commands import scoring
from tformer.config import Config
from tformer.data import stores
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.hf import sentence_encoders, special_tokens
from tformer.hf.convert import Stacked, nested
from tformer.hf.directory import OBJECTIVES, HubDirectory, are_narrow, open_hub
from tformer.lab.report import tensorboard_runs
from tformer.optim.parameters import path_names
from tformer.training import checkpoint_writer, pretrained, setup
from tformer.training import workdir as workdir_lib
from tformer.training.skipping import init_guard
from tformer.training.state import TrainState

SHARED_FLAGS = ('workdir',)
FLAGS: dict[str, commands.Flag] = {}
ARGUMENTS = 'PATH'
HUB = 'hub.json'  # in an imported workdir: the family that it is of, and its origin


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if len(arguments) != 1:
        raise UserError(f'import takes one PATH, not {len(arguments)}')
    home = commands.needed(flags, 'workdir')
    print(
        (import_logs if tensorboard_runs.is_logs(pathlib.Path(arguments[0])) else import_hub)(
            arguments[0], home, overrides
        )
    )


def import_logs(path: str, workdir: str | pathlib.Path, overrides: Mapping[str, Any] | None = None) -> str:
    """Makes a directory of workdirs of the TensorBoard files in a directory; returns a text that tells of them.

    Raises:
      UserError: there is something at `workdir`, no scalar is in the files, or as `tensorboard_runs.write`.
    """
    if overrides:
        raise UserError(f'{path}: runs of TensorBoard files have no --config')
    with new_directory(pathlib.Path(workdir)) as place:
        return '\n'.join(
            [*tensorboard_runs.write(pathlib.Path(path), place), f'{workdir}: `tformer report` compares them']
        )


def import_hub(path: str, workdir: str | pathlib.Path, overrides: Mapping[str, Any] | None = None) -> str:
    """Makes a workdir of a hub directory and returns a text that says what it holds.

        >>> print(tformer.import_hub('downloads/bert-base-uncased', 'runs/bert'))

    The parameters go tensor by tensor to where config.mesh says. `overrides` are fields to change, such as
    {'data.path': 'my_texts', 'mesh.fsdp': 8}.

    Raises:
      UserError: the directory does not hold a hub's model, a part of it is malformed or has no counterpart, or the
        workdir is in use.
    """
    hub, home = open_hub(path), pathlib.Path(workdir)
    config, tokens = settled(hub, overrides or {})
    if line := sentence_encoders.vectors_of(hub.path, config.model.max_len):
        print(line, file=sys.stderr, flush=True)
    with new_directory(home) as place:
        params = load(hub, config)
        for line in filter(None, (lacking(hub, config, params), widened(hub, config))):
            print(line, file=sys.stderr, flush=True)
        tokens.save(place)
        save_parameters(place, config, tokens, params)
        workdir_lib.save_config(place, config)
        (place / HUB).write_text(json.dumps({'model_type': hub.family, 'path': str(hub.path.absolute())}) + '\n')
    number = sum(x.size for x in jax.tree.leaves(params))
    return f'{home}: {hub.family}, {number:,} parameters, train.objective={config.train.objective}'


def settled(hub: HubDirectory, overrides: Mapping[str, Any]) -> tuple[Config, Tokenizers]:
    """Returns the resolved config of a run of a hub's model, and its tokenizers."""
    config = checks.settle(config_lib.override(hub.run_config(), overrides), overrides, say=lambda line: None)
    tokens = hub.tokenizers
    config = checks.resolve(
        config,
        vocab_size=tokens.target.vocab_size,
        encoder_vocab_size=None if tokens.source is None else config.model.vocab_size,
        num_classes=len(tokens.labels) or None,
    )
    checks.check_here(config)
    special_tokens.check_positions(hub.family, config, tokens)
    return config, tokens


def load(hub: HubDirectory, config: Config) -> dict[str, Any]:
    """Returns a hub's parameters, a tree of arrays that are where config.mesh places them."""
    mesh = meshes.make_mesh(config.mesh)
    shardings, dtypes = places(config)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(path: str, parameter: Stacked) -> jax.Array:
        dtype = dtypes.get(path, config.model.param_dtype)
        return pretrained.place(parameter, shardings.get(path, everywhere), dtype)

    return nested({path: placed(path, parameter) for path, parameter in hub.parameters(config.model).items()})


def lacking(hub: HubDirectory, config: Config, params: Mapping[str, Any]) -> str | None:
    """Returns a line where config.json names a head whose tensors the directory does not have."""
    absent = sorted({path.split('/')[0] for path in places(config)[1]} - params.keys())
    named = hub.hub_config.get('architectures') or ['']
    if not absent or not named[0].endswith(tuple(OBJECTIVES)):
        return None
    reads = 'only embed, export and train.init_from read what is imported'
    return f'{hub.path}: architectures={named[0]}, but it has no tensors of {", ".join(absent)}: {reads}'


def widened(hub: HubDirectory, config: Config) -> str | None:
    """Returns a line where the parameters of a bfloat16 model are float32 because its adapters are not bfloat16."""
    if hub.adapter is None or config.model.param_dtype == 'bfloat16' or not are_narrow(hub.tensors):
        return None
    if are_narrow(hub.adapter_tensors):
        return None
    rounds = '--config.model.param_dtype=bfloat16 halves the memory and rounds them'
    return f'{hub.adapter}: the bfloat16 model becomes float32, as its adapters are not bfloat16: {rounds}'


def places(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the shardings and the dtypes of the parameters of a run's objective by path."""
    abstract = scoring.abstract(config)
    mesh = meshes.make_mesh(config.mesh)
    shardings = sharding.tree_shardings(abstract, mesh, sharding.make_rules(config.mesh))['params']

    def by_path(tree: Any) -> dict[str, Any]:
        return {'/'.join(path_names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    dtypes = {path: leaf.dtype for path, leaf in by_path(sharding.unboxed(abstract)['params']).items()}
    return by_path(shardings), dtypes


def save_parameters(place: pathlib.Path, config: Config, tokens: Tokenizers, params: dict[str, Any]) -> None:
    """Writes the parameters as the checkpoint of step 0, from which training in the workdir starts."""
    state = TrainState(jax.numpy.zeros((), jax.numpy.int32), params, (), guard=init_guard(None))
    writer = checkpoint_writer.CheckpointWriter(place)
    writer.save(state, setup.imported_metadata(config, tokens), None)
    writer.wait()


@contextlib.contextmanager
def new_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a directory beside `path` that takes its name when the block has ended, and is deleted if it fails.

    Raises:
      UserError: there is something at `path` already, it cannot be written, or it is a URL.
    """
    stores.require_local(path, written=True)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f'{path} exists and is not empty; use a fresh directory')
    partial = path.with_name(f'{path.name}.{secrets.token_hex(4)}.tmp')
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f'{path}: {error.strerror}') from error
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
