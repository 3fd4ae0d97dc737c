"""The teacher: a second, frozen model whose outputs for each batch are part of the loss.

Its parameters lie on the mesh beside those of the model that learns, by the same rules. They are an argument of the
compiled step, and no part of the training state or of a checkpoint.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh

from tformer import checks
from tformer import config as config_lib
from tformer.config import Config, Decode, Evaluate, Optimizer, hashing
from tformer.config.tasks import HEADS, TASKS
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import sharding
from tformer.errors import UserError
from tformer.hf import directory as hub_directory
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.parameters import path_names
from tformer.training import checkpoint, digests, pretrained, workdir
from tformer.training.state import abstract_variables, variables

# Fields that decide which tokens both models read, and which classes the outputs are about: they must agree in them.
SHARED = tuple(f'model.{name}' for name in ('family', 'vocab_size', 'encoder_vocab_size', 'num_classes')) + tuple(
    f'data.{name}' for name in ('start', 'source_start', 'source_end', 'bidirectional_prefix')
)
JUDGED = ('data.end', 'data.separator')  # the same, where a whole text is judged


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher without its parameters."""

    directory: str  # a workdir or a hub directory
    config: Config  # of the run that it teaches, with its own model
    model: nn.Module
    abstract: Any  # its variables, boxed with the logical names of their axes

    def shardings(self, mesh: Mesh) -> Any:
        """Returns the shardings of its variables."""
        return sharding.tree_shardings(self.abstract, mesh, sharding.make_rules(self.config.mesh))

    def load(self, mesh: Mesh) -> Any:
        """Returns its variables, of the workdir's best checkpoint, on a mesh.

        Raises:
          UserError: it lacks some, or they have other shapes.
        """
        places = self.shardings(mesh)
        found, _ = pretrained.read(self.directory, places)
        wanted = sharding.unboxed(self.abstract)
        shapes = {path_names(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
        lacking = {names[1] for names, shape in shapes.items() if names not in found or found[names].shape != shape}
        if lacking:
            needs = f'which train.objective={self.config.train.objective} needs'
            raise UserError(f'train.teacher={self.directory} has no {", ".join(sorted(lacking))}, {needs}')
        return jax.tree_util.tree_map_with_path(
            lambda path, like, place: pretrained.placed(found[path_names(path)], place, like.dtype), wanted, places
        )


def directory_of(config: Config) -> str | None:
    """Returns the directory of a run's teacher; None where its objective has none."""
    train = config.train
    return (train.teacher or train.init_from) if TASKS[train.objective].teacher else None


def make_teacher(config: Config, batch: Mapping[str, Any]) -> Teacher | None:
    """Returns the teacher of a run, whose config is resolved; None where its objective has none.

    Of the batch only names, shapes and dtypes are read.

    Raises:
      UserError: the directory holds no model, or one that does not fit the run.
    """
    directory = directory_of(config)
    if directory is None:
        return None
    theirs = checks.settled(workdir.lent_config(directory))
    theirs = dataclasses.replace(theirs, model=resolve_model(theirs.model))
    ours, own = config_lib.values(config), config_lib.values(theirs)
    judged = () if HEADS[TASKS[config.train.objective].head].vocabulary else JUDGED
    for name in checks.with_effect(config, (*SHARED, *judged)):
        if own[name] != ours[name]:
            line = f'train.teacher={directory} has {name}={own[name]}, and this model {ours[name]}'
            raise UserError(f'{line}: both must have the same')
    model = theirs.model
    if model.num_experts is not None:  # its routers learn nothing
        model = dataclasses.replace(model, balance_weight=0.0, router_z_weight=0.0)
    if model.recurrence is None:
        model = dataclasses.replace(model, attention_kernel=config.model.attention_kernel)
    if TASKS[config.train.objective].records == 'preference':  # rewards are differences: both models round alike
        model = dataclasses.replace(model, dtype=config.model.dtype)
    taught, only = dataclasses.replace(config, model=model), Decode(max_len=1)
    try:
        checks.check(dataclasses.replace(taught, optimizer=Optimizer(), decode=only, evaluate=Evaluate()))
    except UserError as error:
        raise UserError(f'train.teacher={directory}: {error}') from error
    module = build(model)
    found = abstract_variables(module, OBJECTIVES[config.train.objective], batch)
    return Teacher(directory, taught, module, variables(found['params'], found.get('statistics', {})))


def fingerprint(config: Config, tokens: Tokenizers) -> dict[str, str]:
    """Returns which parameters teach a run, which have to stay the same: their step and digest; {} without a teacher.

    Raises:
      UserError: the teacher has no checkpoint, or was trained with other tokenizers or classes than `tokens`.
    """
    directory = directory_of(config)
    if directory is None:
        return {}
    theirs, classes = workdir.lent_tokenizers(directory), TASKS[config.train.objective].classes
    for what, fact in TOKEN_FACTS.items():
        if (what != 'classes' or classes) and fact(theirs) != fact(tokens):
            differing = f'{fact(theirs)} there, {fact(tokens)} here'
            raise UserError(f'train.teacher={directory} was trained with other {what}: {differing}')
    path = pathlib.Path(directory)
    if hub_directory.is_hub(path):
        hub = hub_directory.open_hub(directory)
        files = [file for place in (hub.path, hub.adapter) if place for file in sorted(place.iterdir())]
        read = [file for file in files if file.suffix in ('.json', '.safetensors', '.bin')]
        return {FACT: hashing.digest_json([hashing.crc32_file(file) for file in read], size=8)}
    step = checkpoint.best(path)
    if step is None:
        raise UserError(f'train.teacher={directory} has no checkpoints')
    return {FACT: f'step {step} ({digests.digest(checkpoint.directory(path, step), "variables/")})'}


FACT = 'teacher'  # the name of the fingerprint

TOKEN_FACTS: dict[str, Callable[[Tokenizers], Any]] = {
    'tokenizers': lambda tokens: tokens.target.fingerprint,
    'source tokenizers': lambda tokens: (tokens.source or tokens.target).fingerprint,
    'classes': lambda tokens: tokens.labels,
}
