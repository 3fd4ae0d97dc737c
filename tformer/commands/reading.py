"""The outputs of a run's model for many rows, in their order, and lines of JSON of them."""

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tformer import atomic
from tformer.commands import scoring
from tformer.commands.run import Run
from tformer.data import stores
from tformer.data.examples.special_tokens import Fields
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.evaluation import many_rows
from tformer.layers.quantized import INT8
from tformer.model import build, quantized
from tformer.optim.hyperparameters import standard

BATCH_SIZE = 64  # rows computed at once


def outputs(run: Run, rows: Sequence[Fields], method: many_rows.Method, batch_size: int = BATCH_SIZE) -> list[Any]:
    """Returns the outputs of a method of the model for each row, numpy arrays, computed where config.mesh says.

    `progress` is shown. `method` is a function of a module, the same object at each call, so that it is
    compiled once.
    """
    config, found = standard(run.config), [None] * len(rows)
    mesh = meshes.make_mesh(config.mesh)
    multiple = meshes.row_multiple(mesh, config.mesh)
    width = -(-max(min(batch_size, len(rows)), 1) // multiple) * multiple
    specials, longest = run.tokenizers.target.specials, config.model.max_len
    with sharding.placed(mesh, config.mesh), progress(len(rows)) as done:
        model, variables = build(config.model), run.variables
        if INT8 not in variables:  # those that are integers stand where they were made
            variables = jax.device_put(variables, _places(variables, scoring.shardings(config, mesh), mesh))
            variables = quantized(model, variables, config.decode.quantization)
        program = many_rows.make_program(model, method, mesh)
        for chosen, batch in many_rows.batches(rows, specials.pad, width, longest):
            values = jax.device_get(program(variables, jax.device_put(batch, meshes.batch_sharding(mesh))))
            for row, index in enumerate(chosen):
                found[index] = jax.tree.map(lambda array, row=row: array[row], values)
            done(len(chosen))
    return found


def write_lines(rows: Sequence[Mapping[str, Any]], file: str | None) -> None:
    """Writes each row as a line of JSON to a file, or prints it where that is None."""
    lines = [json.dumps(row, ensure_ascii=False) + '\n' for row in rows]
    if file is None:
        sys.stdout.writelines(lines)
    else:
        atomic.write(pathlib.Path(file), ''.join(lines))


def check_output(file: str | None, texts: str | None = None) -> None:
    """Raises a `UserError` where a file cannot be written, before there is anything to write.

    `texts` is the file of the texts, which no output may replace.
    """
    if file is None:
        return
    stores.require_local(file, '--output', written=True)
    path = pathlib.Path(file)
    if not path.name or path.is_dir():
        raise UserError(f'--output={file} is a directory, and the name of a file is needed')
    if path.exists() and not path.is_file():
        raise UserError(f'--output={file} is not a regular file; standard output is written to without it')
    if texts is not None and path.resolve() == pathlib.Path(texts).resolve():
        raise UserError(f'--output={file} is the file of the texts, which would be lost: name another')
    if not path.parent.is_dir():
        raise UserError(f'--output={file}: the directory {path.parent} does not exist')


def place(index: int, source: str | None) -> str:
    """Returns the name of text number `index` in messages: FILE:LINE, or its number where it comes from no file."""
    return f'text {index + 1}' if source is None else f'{source}:{index + 1}'


def _places(variables: Any, shardings: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns the shardings of a tree of variables, which may lack a head and have one that the objective does not.
    Every device has the latter whole."""
    if isinstance(variables, Mapping):
        return {name: _places(below, (shardings or {}).get(name), mesh) for name, below in variables.items()}
    return shardings or jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how many more texts are done.

    On a terminal (standard error) a bar shows them; elsewhere there is a line every half a minute.
    """
    if sys.stderr.isatty():
        from rich import console
        from rich import progress as bars

        with bars.Progress(*bars.Progress.get_default_columns(), console=console.Console(stderr=True)) as bar:
            task = bar.add_task('texts', total=total)
            yield lambda count: bar.update(task, advance=count)
        return
    begin = said = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal said, done
        done, now = done + count, time.monotonic()
        if now - said >= _EVERY and done < total:
            said, left = now, (now - begin) * (total - done) / done
            print(f'{done:,} of {total:,} texts, {left / 60:.0f} min left', file=sys.stderr, flush=True)

    yield advance


_EVERY = 30.0  # seconds between lines
