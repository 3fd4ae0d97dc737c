"""Shows a config without running it: its parameters, its data, or a step on a mesh of devices.

    tformer inspect --config=FILE[:argument] | --workdir=DIR [--config.section.field=value ...]
    tformer inspect --device=v5e:2x4 | v5p:4x4x4 | v6e:4x4 | h100:8 | h200:16 | cpu:8 [--decode] --config=FILE ...
    tformer inspect --data --config=FILE[:argument] | --workdir=DIR

The first form prints the resolved config and the table of parameters, and of a workdir its checkpoints. --device adds
the train step, compiled by the compiler of those devices, which need not be here: memory, collectives, kernels, and a
lower bound of its seconds; --decode takes the programs of generation instead. A mesh of several devices without
--device is compiled for as many CPUs. --data prints the amounts, lengths, padding and duplicates of the data, and rows
as the model reads them.
"""

import dataclasses
import functools
import json
import pathlib
import sys

import jax
from flax import linen as nn
from rich.console import Console

from tformer import checks, commands
from tformer import config as config_lib
from tformer.commands.planning import dry_run, dry_run_report
from tformer.config import Config
from tformer.data import store_copies
from tformer.data.batches import mixture
from tformer.data.inspection import rendering, report
from tformer.decode.text import check_writes
from tformer.distributed import devices, meshes
from tformer.distributed.devices import Target
from tformer.errors import UserError
from tformer.layers import kernel_choice
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.training import checkpoint, flops, setup, writers
from tformer.training import workdir as workdir_lib
from tformer.training.dummy_batch import assumed, one_row
from tformer.training.state import abstract_variables, count_parameters
from tformer.training.teacher import make_teacher

SHARED_FLAGS = ('config', 'workdir')
FLAGS = {
    'data': ('bool', False, 'show the data instead of the model'),
    'device': ('string', None, 'devices to compile for: v5e:2x4, v5p:4x4x4, v6e:4x4, h100:8, h200:16, cpu:8 ...'),
    'decode': ('bool', False, 'compile the prefill and the decode step instead of the train step'),
    'json': ('bool', False, 'print the compiled programs alone, one JSON object a line'),
}
ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3'}  # XLA reads it when JAX is imported; refusals are raised


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if flags.config is not None and flags.workdir is not None:
        raise UserError('inspect takes --config or --workdir, not both')
    if flags.workdir is not None:
        config = config_lib.override(workdir_lib.load_config(pathlib.Path(flags.workdir)), overrides)
        config = checks.settle(config, overrides)
    else:
        config = checks.load(commands.needed(flags, 'config'), overrides)
    asks_for_mesh = flags.workdir is None or any(name.startswith('mesh.') for name in overrides)
    target = _target(flags, config, asks_for_mesh)
    checks.check_here(config, None if target is None else target.jax_platform)
    if flags.decode:
        check_writes(config)
    if flags.data:
        show_data(config, flags.workdir)
        return
    programs = (dry_run.PREFILL, dry_run.DECODE_STEP) if flags.decode else (dry_run.TRAIN_STEP,)
    if not flags.json:
        print(inspect(config))
        if flags.workdir is not None:
            print(checkpoints(flags.workdir))
    if target is not None:
        for name in programs:
            run = dry_run_report.compiled(name, config, target)
            print(json.dumps(dry_run_report.figures(run)) if flags.json else dry_run_report.describe(run))
            dry_run.check_fits(run)


def _target(flags: commands.Flags, config: Config, asks_for_mesh: bool) -> Target | None:
    """Returns the devices to compile for, of which JAX is told; None where nothing is compiled."""
    if flags.data and (flags.device or flags.decode or flags.json):
        raise UserError('inspect takes --data or --device, not both')
    target = None if flags.device is None else Target.parse(flags.device)
    if target is None and asks_for_mesh and not flags.data and dry_run.num_devices(config.mesh) > 1:
        target = Target('cpu', (dry_run.num_devices(config.mesh),))
    if target is None and (flags.decode or flags.json):
        raise UserError('inspect --decode and --json need --device, or a mesh of several devices')
    if target is not None:
        dry_run.pretend(target.count if target.device.platform == 'cpu' else 1)
        devices.prepare(target.device.platform)
    return target


def inspect(config: Config) -> str:
    """Returns the resolved config and the model's table of parameters: name, count, axes with their sizes.

        >>> print(tformer.inspect(tformer.load_config('configs/g2p.py:demo')))

    Sizes that only the data tell, such as the vocabulary, are assumed. Nothing is computed.
    """
    resolved = assumed(config)
    objective = OBJECTIVES[resolved.train.objective]
    model = dataclasses.replace(resolved.model, attention_kernel=kernel_choice.AUTO)  # the named one may not serve here
    params = abstract_variables(build(model), objective, one_row(resolved))['params']
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nn.Partitioned)):
        name = '.'.join(key.key for key in path)
        shape = ' '.join(f'{axis}={size}' for axis, size in zip(leaf.names, leaf.value.shape, strict=True))
        rows.append((f'{name:<58} {leaf.value.size:>12,}', shape))
    total = sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(params)))
    teacher = make_teacher(resolved, one_row(resolved))
    frozen = 0 if teacher is None else count_parameters(nn.unbox(teacher.abstract))
    sizes = f'with a vocabulary of {resolved.model.vocab_size:,}'
    n = resolved.data.length
    costs = flops.layer_costs(resolved.model, n)
    return '\n'.join([
        json.dumps(config_lib.to_dict(resolved), indent=2),
        writers.format_table(rows),
        f'{total:,} parameters, {sizes}',
        *([] if teacher is None else [f'{frozen:,} parameters of the teacher, {teacher.directory}']),
        f'a layer at {n:,} tokens: products, sequential products, longest path (Vaswani et al. 2017, table 1)',
        *(f'  {kind:<18} {x.products:>16,} {x.sequential:>12,} {x.path:>12,}' for kind, x in costs.items()),
    ])  # fmt: skip


def checkpoints(directory: str) -> str:
    """Returns a table of a workdir's checkpoints, read without a device; * marks the best one."""
    home = pathlib.Path(directory)
    scores, best, rows = checkpoint.scores(home), checkpoint.best(home), []
    for step in checkpoint.steps(home):
        run = checkpoint.read_metadata(home, step)
        score = f'{scores[step]:.6g}' if step in scores else 'not evaluated'
        cells = f'score {score:<14} jax {dict(run.get("versions", {})).get("jax")}  config {run.get("config_digest")}'
        rows.append((f'{"*" if step == best else " "} {step:,}', cells))
    return writers.format_table([('checkpoints', f'in {store_copies.shown(checkpoint.directory(home))}'), *rows])


def show_data(config: Config, directory: str | None) -> None:
    """Prints a report of a config's data, read with the tokenizers of a workdir or with newly trained ones.

    Raises:
      UserError: the data have a mistake, or the workdir has no tokenizers.
    """
    console = Console(highlight=False, soft_wrap=True)
    in_colour = console.color_system is not None and not console.no_color
    say = functools.partial(print, file=sys.stderr, flush=True)
    records, multiple = mixture.load(config, 'train'), None
    if directory is not None:
        tokenizers = workdir_lib.load_tokenizers(pathlib.Path(directory))
    else:
        say('training the tokenizers on the train split')
        tokenizers = workdir_lib.new_tokenizers(config, records)
        multiple = setup.row_multiple(config, None, meshes.make_mesh(config.mesh))
    for line in report.report(config, tokenizers, records, say, multiple):
        if in_colour:
            console.print(rendering.coloured(line))
        else:
            print(rendering.plain(line))
