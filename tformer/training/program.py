"""The program of a training run: model, objective, optimizer, initial state and train step, made from a config.

program = make_program(config, batch)
state = program.init()
state, metrics = program.train_step(state, batch)
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh

from tformer import errors
from tformer.config import Config
from tformer.config.tasks import HEADS, TASKS
from tformer.distributed import compilers, meshes, sharding
from tformer.layers import kernel_choice, masks
from tformer.model import build
from tformer.objectives import OBJECTIVES, Objective, loss_chunk
from tformer.optim.hyperparameters import Hyperparameters
from tformer.optim.optimizers import make_optimizer
from tformer.training.state import OFFLOADED, TrainState, begin, logical_names, make_init
from tformer.training.step import Step, make_train_step
from tformer.training.teacher import Teacher, make_teacher


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The program of runs that differ only in their `Hyperparameters`. Nothing is computed until a method is called."""

    config: Config  # resolved
    mesh: Mesh  # the devices
    model: nn.Module  # of config.model
    objective: Objective  # of config.train.objective
    optimizer: optax.GradientTransformation  # of config.optimizer
    names: Any  # the logical names of every parameter's axes, a tree of `PartitionSpec`s
    abstract: TrainState  # the state's shapes, boxed with the logical names of their axes
    step: Step  # the train step, a pure function that is not compiled
    teacher: Teacher | None  # the frozen model whose outputs are in the loss
    _make_state: Any = dataclasses.field(repr=False)
    _made: dict[Any, Any] = dataclasses.field(repr=False, default_factory=dict)  # by `once`

    def __repr__(self) -> str:
        model = self.config.model
        return f'Program({self.config.train.objective} of a {model.family}, {self.mesh.size} device(s))'

    @functools.cached_property
    def hyper(self) -> Hyperparameters:
        """The hyperparameters that the config states."""
        return Hyperparameters.of(self.config)

    @functools.cached_property
    def device_shardings(self) -> TrainState:
        """The shardings of a state's arrays where all of them are on the devices, as they are for an update."""
        found: TrainState = sharding.tree_shardings(self.abstract, self.mesh, sharding.make_rules(self.config.mesh))
        return found

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The shardings of a state's arrays."""
        found = self.device_shardings
        if self.config.optimizer.offload:
            parts = {name: getattr(self.abstract, name) for name in OFFLOADED}
            found = found.replace(**{name: sharding.on_host(getattr(found, name), x) for name, x in parts.items()})
        return found

    @property
    def remarks(self) -> list[str]:
        """Lines that say what the mesh does not split though one may think so."""
        return [line for line in (self._unsplit(), self._together()) if line]

    def _together(self) -> str:
        """Says that all devices assign the slots of experts together; '' where each does its own."""
        model, mesh = self.config.model, self.mesh.shape
        several = mesh['data'] * mesh['fsdp'] * mesh['context'] > 1 and mesh['expert'] == 1
        if model.num_experts is None or model.expert_dispatch != 'capacity' or not several:
            return ''
        return (
            'model.expert_dispatch=capacity without mesh.expert: every device holds the slots of the whole batch, and '
            'is slow; with mesh.expert, or with dropless, it holds those of its own tokens'
        )

    def _unsplit(self) -> str:
        """Says that the mesh's axis `fsdp` splits no parameter though the rules would; '' where it does."""
        ways, count, width = self.mesh.shape['fsdp'], self.mesh.size, self.config.model.emb_dim
        ruled = 'fsdp' in (dict(sharding.make_rules(self.config.mesh))['embed'] or ())
        if ways == 1 or not ruled or any('fsdp' in str(x.spec) for x in jax.tree.leaves(self.device_shardings.params)):
            return ''
        sizes = [size for size in range(1, count + 1) if count % size == 0 and width % size == 0]
        nearest = min(sizes, key=lambda size: abs(size - ways))
        return (
            f'mesh.fsdp={ways} splits no parameter, as it does not divide model.emb_dim={width}; nearest that does and '
            f'divides the {count} devices: {nearest}'
        )

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """The shapes of a state's arrays, and their places."""
        found: TrainState = placed_shapes(self.abstract, self.shardings)
        return found

    @functools.cached_property
    def jitted_step(self) -> Any:
        """The compiled train step (state, batch, hyper, *taught), for use inside `context()`; it takes the place of the
        state it is given."""
        step = self.step if self.shardings is self.device_shardings else self._offloaded_step
        platform, shardings = meshes.jax_platform(self.mesh), (self.shardings, None)
        return compilers.jit(step, platform, training=True, donate_argnums=0, out_shardings=shardings)

    def _offloaded_step(self, *arguments: Any) -> tuple[TrainState, dict[str, Any]]:
        """Returns what the train step does; its arrays are split as they will wait before they go to the host, where
        TPUs cannot put parts together."""
        state, metrics = self.step(*arguments)
        return jax.lax.with_sharding_constraint(state, self.device_shardings), metrics

    @property
    def reference(self) -> nn.Module | None:
        """The teacher's model, if evaluations need it too."""
        return self.teacher.model if self.teacher is not None and self.objective.with_reference else None

    @functools.cached_property
    def taught(self) -> tuple[Any, ...]:
        """The variables of the teacher, read from its directory; () without a teacher."""
        return () if self.teacher is None else (self.teacher.load(self.mesh),)

    @property
    def attention_kernel(self) -> str:
        """The key of `KERNELS` that computes attention on the program's devices."""
        return kernel_choice.pick(self.config.model, meshes.jax_platform(self.mesh))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned when it was first asked for under this key, of this program or its copies."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @functools.cached_property
    def jitted_init(self) -> Any:
        """The compiled function of the hyperparameters that returns the state before the first step."""
        return jax.jit(lambda hyper: sharding.unboxed(self._make_state(hyper)), out_shardings=self.shardings)

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Within it arrays are placed on the program's mesh, by its rules."""
        return sharding.placed(self.mesh, self.config.mesh)

    def init(self, hyper: Hyperparameters | None = None) -> TrainState:
        """Returns the state before the first step, with random parameters; hyper=None: those of the config."""
        with self.context():
            return self.jitted_init(self.hyper if hyper is None else hyper)

    def init_from(self, hyper: Hyperparameters, params: Any, statistics: Any) -> TrainState:
        """Returns the state before the first step that starts from given parameters and statistics."""
        start = jax.jit(functools.partial(begin, self.optimizer), out_shardings=self.shardings)
        with self.context():
            return start(hyper, params, statistics)

    def train_step(self, state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        """Returns (the state after one step, its metrics); the given state is used up.

        The batch is numpy arrays [B, ...]; B is a multiple of the ways that the mesh splits rows.

        Raises:
          UserError: the attention kernel relies on the order of the tokens, and they have another.
        """
        if kernel_choice.KERNELS[self.attention_kernel].ordered:
            masks.check_order(batch)
        with self.context():
            placed = meshes.place_batch(batch, self.mesh)
            found = self.jitted_step(state, placed, self.hyper, *self.taught)
            return meshes.in_turn(self.mesh, found)


def placed_shapes(boxed: Any, shardings: Any) -> Any:
    """Returns the shapes and dtypes of arrays that are where `shardings` say."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), sharding.unboxed(boxed), shardings
    )


def check_memory(program: Program, batch: Mapping[str, Any]) -> None:
    """Raises a `UserError` where a step surely needs more than the memory of a machine without an accelerator.

    It holds at least the state, the gradients and, unless train.loss_chunk cuts them, the logits of a microbatch. The
    system would kill the process; an accelerator refuses by itself.
    """
    config, shape = program.config, batch['inputs'].shape
    if jax.default_backend() != 'cpu' or jax.process_count() > 1:
        return
    teacher = program.teacher and program.teacher.abstract
    leaves = jax.tree.leaves(sharding.unboxed((program.abstract, program.abstract.params, teacher)))
    state = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    errors.check_memory('the parameters, their gradients and the state of the optimizer', state)
    if HEADS[TASKS[config.train.objective].head].vocabulary and loss_chunk(config) is None:
        width = jax.numpy.dtype(config.model.dtype).itemsize * (config.model.vocab_size or 0)
        logits = width * math.prod(shape) // config.train.microbatches * (1 if teacher is None else 2)
        errors.check_memory('the logits of a step (train.loss_chunk cuts them) and its state', state + logits)


def make_program(config: Config, batch: Mapping[str, Any], mesh: Mesh | None = None) -> Program:
    """Returns the program of a run, whose config is resolved (`dummy_batch.assumed` does it without data).

    Nothing is computed: of the batch only names, shapes and dtypes are read. mesh=None: that of config.mesh over all
    devices.

    Raises:
      UserError: the optimizer's fields name parameters that the model does not have, or the teacher does not fit.
    """
    mesh = meshes.make_mesh(config.mesh) if mesh is None else mesh
    model, objective = build(config.model), OBJECTIVES[config.train.objective]
    row = {name: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    names = logical_names(model, objective, row)
    optimizer = make_optimizer(config, names)
    # Traced once, for its shapes and for the program that computes it.
    make_state = jax.jit(functools.partial(make_init(model, objective, optimizer), batch=row), inline=True)
    with sharding.placed(mesh, config.mesh):
        abstract = jax.eval_shape(make_state, Hyperparameters.of(config))
    teacher = make_teacher(config, row)
    step = make_train_step(model, objective, optimizer, config, teacher)
    return Program(config, mesh, model, objective, optimizer, names, abstract, step, teacher, make_state)
