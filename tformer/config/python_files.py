"""Python files of the user: recipes, sweeps and extensions. A mistake in one is one line that names the file."""

import contextlib
import importlib.machinery
import pathlib
import sys
import traceback
import types
import typing
from collections.abc import Iterator
from typing import Any

from tformer import errors


def execute(path: str, function: str, *arguments: str) -> Any:
    """Returns what a function that a Python file defines returns.

    Raises:
      UserError: a missing file, one without the function, an argument that its `Literal` does not name, or one that
        does not run.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise errors.UserError(f'--config: no file {path}{errors.nearest(path, file.parent.glob("*.py"))}')
    with one_line(path):
        module = _run(file, f'tformer_config_{file.stem}', register=False)
        if not hasattr(module, function):
            raise errors.UserError(f'it defines no {function}({"argument" if arguments else ""})')
        called = getattr(module, function)
        for argument, (name, hint) in zip(arguments, typing.get_type_hints(called).items(), strict=False):
            if typing.get_origin(hint) is typing.Literal:
                errors.choose(dict.fromkeys(typing.get_args(hint)), argument, name)
        return called(*arguments)


def import_as(file: pathlib.Path, name: str) -> types.ModuleType:
    """Runs a Python file as a module that other code can import by `name`. Raises a `UserError` if it fails."""
    with one_line(str(file)):
        return _run(file, name, register=True)


def _run(file: pathlib.Path, name: str, register: bool) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = str(file.resolve())
    if register:
        sys.modules[name] = module
    try:
        importlib.machinery.SourceFileLoader(name, str(file)).exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextlib.contextmanager
def one_line(path: str) -> Iterator[None]:
    """Makes an exception of the code in the file at `path` a `UserError` that names the file and the line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        file = str(pathlib.Path(path))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        why = str(error)
        if isinstance(error, SyntaxError):
            lines, why = lines + [error.lineno] * (error.filename == file), error.msg
        elif not isinstance(error, errors.UserError | ImportError | TypeError):
            why = f'{type(error).__name__}: {error}'
        where = f'{path}:{lines[-1]}' if lines and lines[-1] else path
        raise errors.UserError(f'{where}: {why}') from error
