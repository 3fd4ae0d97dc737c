"""An `Engine` as files: programs of StableHLO, which run without tracing a model, to the same bits.

A directory holds PROGRAM.bin for each program (`jax.export`), insert_P.bin for prompts of a padded length P, and
programs.json, which says what they take.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from tformer.decode.drawing import Drawing
from tformer.decode.engine import Engine
from tformer.distributed.compilers import jit
from tformer.errors import UserError

FILE = 'programs.json'
_DRAWN = (np.float32, np.int32, np.float32, np.float32, np.int32, np.int32, np.int32, np.int32)  # of a `Drawing`


def save(
    directory: pathlib.Path,
    engine: Engine,
    variables: Any,
    batches: Sequence[Mapping[str, Any]],
    rows: int,
    platforms: Sequence[str] | None = None,
) -> None:
    """Writes an engine's programs for these variables, and for batches of the lengths of `batches`.

    `platforms` are those of JAX that the programs are for: cpu, cuda, tpu; None: that of this process. Their kernels
    are those of the current `sharding.platform`. What the directory has of these names is replaced.
    """
    options: dict[str, Any] = {} if platforms is None else {'platforms': tuple(platforms)}
    slots = jax.eval_shape(engine.empty, variables)
    leaves = jax.tree.leaves(slots)
    kind: Any = jax.tree.structure(slots)
    weights: Any = jax.tree.structure(variables)
    row = jax.ShapeDtypeStruct((), np.int32)
    drawn = tuple(jax.ShapeDtypeStruct((), dtype) for dtype in _DRAWN)

    def write(name: str, function: Any, *given: Any) -> None:
        found = export.export(jax.jit(function), **options)(*given)
        (directory / f'{name}.bin').write_bytes(found.serialize())

    def empty(params: list[Any]) -> Any:
        return jax.tree.leaves(engine.empty(weights.unflatten(params)))

    def step(params: list[Any], leaves: list[Any]) -> Any:
        new, tokens, logprobs = engine.step(weights.unflatten(params), kind.unflatten(leaves))
        return jax.tree.leaves(new), tokens, logprobs

    def insert(params: list[Any], leaves: list[Any], batch: Any, row: Any, drawing: Any) -> Any:
        slots = engine.insert(weights.unflatten(params), kind.unflatten(leaves), batch, row, Drawing(*drawing))
        return jax.tree.leaves(slots)

    shapes = jax.tree.leaves(jax.eval_shape(lambda tree: tree, variables))
    write('empty', empty, shapes)
    write('step', step, shapes, leaves)
    write('free', lambda leaves, row: jax.tree.leaves(engine.free(kind.unflatten(leaves), row)), leaves, row)
    lengths = []
    for batch in batches:
        lengths.append(int(batch['inputs'].shape[1]))
        write(
            f'insert_{lengths[-1]}', insert, shapes, leaves, jax.eval_shape(lambda tree: tree, dict(batch)), row, drawn
        )
    facts = {
        'rows': rows,
        'lengths': sorted(lengths),
        'jax': jax.__version__,
        'platforms': platforms or [export.default_export_platform()],
    }
    (directory / FILE).write_text(json.dumps(facts, indent=2) + '\n')


def load(directory: pathlib.Path) -> tuple[Engine, int]:
    """Returns the engine of a directory and its number of rows. Its slots are a list of arrays.

    Raises:
      UserError: a file is missing or is none of these, they are not for this platform, or a prompt has none of the
        lengths.
    """
    try:
        facts = json.loads((directory / FILE).read_text())
        rows, lengths = int(facts['rows']), facts['lengths']
        names = ['empty', 'step', 'free', *(f'insert_{length}' for length in lengths)]
        found = {name: export.deserialize(bytearray((directory / f'{name}.bin').read_bytes())) for name in names}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f'{directory} holds no programs: {error}') from error
    there, here = found['step'].platforms, export.default_export_platform()
    if here not in there:
        raise UserError(f'{directory} has programs for {", ".join(there)}, not for {here} (tformer freeze --platforms)')
    empty, free = jit(found['empty'].call), jit(found['free'].call, donate_argnums=0)
    step = jit(found['step'].call, donate_argnums=1)
    inserts = {length: jit(found[f'insert_{length}'].call, donate_argnums=1) for length in lengths}

    def insert(variables: Any, slots: Any, batch: Mapping[str, Any], row: Any, drawing: Drawing) -> Any:
        length = batch['inputs'].shape[1]
        if length not in inserts:
            raise UserError(f'{directory} has no program for prompts of {length}; there are: {sorted(inserts)}')
        drawn = tuple(np.asarray(value, dtype) for dtype, value in zip(_DRAWN, drawing, strict=True))
        return inserts[length](jax.tree.leaves(variables), slots, dict(batch), np.int32(row), drawn)

    def stepped(variables: Any, slots: Any) -> Any:
        return tuple(step(jax.tree.leaves(variables), slots))

    engine = Engine(
        lambda variables: empty(jax.tree.leaves(variables)),
        insert,
        stepped,
        lambda slots, row: free(slots, np.int32(row)),
    )
    return engine, rows
