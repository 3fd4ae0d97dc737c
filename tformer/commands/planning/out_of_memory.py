"""Says in one line that a program does not fit a device: its largest arrays, and what would lower its memory."""

import math
import re
from typing import Any

import jax.extend

from tformer.config import Config, tasks
from tformer.distributed import hlo
from tformer.distributed.devices import Target
from tformer.errors import UserError
from tformer.layers import kernel_choice
from tformer.layers.linear import ALIGNED
from tformer.objectives import computed_in_parts, loss_chunk

OF_PAIRS = ('reference', 'blocked', 'xla')  # kernels that hold a number for each pair of a query and a key


def refusal(config: Config, target: Target, said: str, jaxpr: Any, training: bool) -> UserError:
    """Returns one line of what a compiler says that refuses a program for its memory; else what it says.

    The largest arrays are those that the compiler names, else those of all devices together in the traced program.
    """
    found = re.search(r'Used ([\d.]+[KMGT]) of ([\d.]+[KMGT]) hbm', said) or re.search(
        r'HLO temporaries \(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])\)', said
    )
    if 'RESOURCE_EXHAUSTED' not in said or not found:
        return UserError(f'{target}: the compiler failed: {" ".join(said.split())[:300]}')
    listed = re.findall(r'Size: ([\d.]+[KMGT])\s+(?:Operator: op_name="([^"]*)")?\s*.*?Shape: (\S+?)\{', said)
    arrays = [(f'{size} {shape}', hlo.place(operation), hlo.dims(shape)) for size, operation, shape in listed]
    whole = '' if arrays else ' of all devices together'
    arrays = arrays or [(f'{_size(x)} {x.str_short()}', place, x.shape) for x, place in _largest(jaxpr)]
    return UserError(line(config, target, found[1], found[2], whole, arrays[:3], training))


def line(
    config: Config,
    target: Target,
    needed: str,
    limit: str,
    whole: str,
    arrays: list[tuple[str, str, tuple[int, ...]]],
    training: bool,
) -> str:
    """Returns the line of a program that needs more than the limit; `arrays` are in words, with places and sizes."""
    named = ', '.join(f'{array} ({place})' for array, place, _ in arrays)
    cures = advice(config, target, [sizes for _, _, sizes in arrays], training)
    return (
        f'{target}: the program needs {needed} of the {limit} that a device has; the largest{whole}: {named}; {cures}'
    )


def _size(x: Any) -> str:
    return f'{math.prod(x.shape) * x.dtype.itemsize / 2**30:.2f}G'


def _largest(jaxpr: Any) -> list[tuple[Any, str]]:
    """Returns the largest arrays that a traced program computes, each from another place, and these places."""
    found: dict[str, Any] = {}

    def bytes_of(x: Any) -> int:
        return math.prod(x.shape) * x.dtype.itemsize if hasattr(x, 'shape') and hasattr(x.dtype, 'itemsize') else 0

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            place = hlo.place(f'{equation.source_info.name_stack}/{equation.primitive}')
            for x in (variable.aval for variable in equation.outvars):
                if bytes_of(x) > bytes_of(found.get(place)):
                    found[place] = x
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                walk(inner)

    walk(jaxpr.jaxpr)
    once = {str(x): (x, place) for place, x in found.items()}
    return sorted(once.values(), key=lambda row: -bytes_of(row[0]))[:3]


def advice(config: Config, target: Target, sizes: list[tuple[int, ...]], training: bool) -> str:
    """Returns the fields that would lower the memory of a step of training, or of generation, those that cut the arrays
    of these sizes first."""
    if not training:
        unset = [name for name in ('prefill_chunk', 'cache_quantization') if getattr(config.decode, name) is None]
        fields = ['decode.batch_size', *(f'decode.{name}' for name in unset), 'mesh.data', 'mesh.tensor']
        return f'lower it by {", ".join(fields)}'
    model, kept = config.model, config.model.remat is None
    layers = model.num_decoder_layers if model.family != 'encoder' else model.num_encoder_layers
    of_pairs = not model.recurrence and kernel_choice.pick(model, target.jax_platform) in OF_PAIRS
    in_parts, cures = computed_in_parts(tasks.TASKS[config.train.objective]), []
    for each in sizes:
        if of_pairs and each.count(config.data.length) > 1:
            cures.append('model.attention_kernel')
        if kept and each[:1] == (layers,):
            cures.append('model.remat')
        if in_parts and loss_chunk(config) != 1 and any(0 <= size - (model.vocab_size or 0) < ALIGNED for size in each):
            cures.append('train.loss_chunk')
    cures += ['model.remat'] * kept + ['train.microbatches', 'mesh.fsdp', 'mesh.tensor']
    return f'lower it by {", ".join(dict.fromkeys(cures))}'
