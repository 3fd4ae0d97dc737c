"""The table of the commands, each of which is one file of this folder.

A file is a command if it assigns `FLAGS`. Its docstring is its help, and the docstring's first line is its line in
`tformer help`; its function `run(arguments, overrides, flags)` does the work. These assignments declare the command:

    FLAGS         name -> (kind, default, help); a kind is one of `KINDS`, or a tuple of the valid values
    SHARED_FLAGS  names of flags that several commands take, from `SHARED`
    ARGUMENTS     what the arguments that are not flags are called, such as 'TEXT'; without it the command takes none
    PROCESSES     True: several processes can run the command as one
    ALONE         flags with which one process runs it all the same
    ENVIRONMENT   environment variables to set, if they are unset, before the file is imported

They are literals and are read without importing the file, so that `tformer help` does not load JAX. The command's name
is the file's, without the last underscore of a name that is a word of Python.
A new command is one new file here. A command of another file joins the table with
`commands.COMMANDS['name'] = commands.declared(file, run)`.
"""

import ast
import dataclasses
import functools
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags as absl_flags

from tformer.distributed import gpu_memory
from tformer.errors import UserError

Flag = tuple[Any, Any, str]  # kind, default, help
Flags = absl_flags.FlagValues
Action = Callable[[list[str], dict[str, str], Flags], None]

DEFAULT_PORT = 8010


class _Port(absl_flags.IntegerParser):
    """Reads a port, or of a flag without a value the default one."""

    def parse(self, argument: Any) -> int:
        try:
            return DEFAULT_PORT if argument == 'true' else super().parse(argument)
        except (TypeError, ValueError) as error:
            raise ValueError(f'{argument!r} is not a port, from 0 to 65535') from error


def _define_port(name: str, default: int | None, text: str, flag_values: Flags) -> None:
    port = absl_flags.Flag(_Port(0, 65535), None, name, default, text, boolean=True)
    absl_flags.DEFINE_flag(port, flag_values)


KINDS: dict[str, Callable[..., Any]] = {
    'string': absl_flags.DEFINE_string,
    'int': absl_flags.DEFINE_integer,
    'float': absl_flags.DEFINE_float,
    'bool': absl_flags.DEFINE_boolean,
    'list': absl_flags.DEFINE_list,
    'port': _define_port,
}

SHARED: dict[str, Flag] = {
    'config': ('string', None, 'a config file, FILE[:argument]'),
    'workdir': ('string', None, "the run's directory"),
    'checkpoint': (('best', 'latest'), 'best', 'which checkpoint to load'),
    'input': ('string', None, 'a file of texts, one a line, in place of arguments; default: standard input'),
    'profile': ('string', None, 'FIRST:LAST, steps whose trace goes to DIR/profile, for xprof and Perfetto'),
    'transform': ('string', None, 'how trials share one program: vmap or map; default: map on a CPU, else vmap'),
    'metric': ('string', None, 'the metric that decides, SPLIT/NAME; default: test/loss, or valid/loss'),
    'baseline': ('string', None, 'the arm that the others are compared with; default: the first'),
    'alpha': ('float', 0.05, 'the accepted probability of any false positive among all arms'),
    'extensions': ('list', [], 'files that add rows to tables; a workdir made with extensions needs them'),
    'reach': ('list', [], 'also report when runs reach these values, such as valid/accuracy=0.99'),
    'timing': ('bool', True, 'include the section of measured times'),
}

PROCESSES: dict[str, Flag] = {
    'coordinator': ('string', None, 'HOST:PORT of process 0 of several that run as one; auto: the cluster tells'),
    'num_processes': ('int', None, 'how many processes run as one'),
    'process_id': ('int', None, 'the number of this process among them, from 0'),
}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the command line."""

    usage: str  # its help; the first line stands in `tformer help`
    run: Action  # does it, given (arguments, config overrides, flags)
    flags: dict[str, Flag]  # its flags by name
    arguments: str | None = None  # what its positional arguments are called; None if it takes none
    processes: bool = False  # whether several processes can run it as one
    alone: tuple[str, ...] = ()  # flags with which only one process runs it

    @property
    def summary(self) -> str:
        """The first line of the usage."""
        return self.usage.splitlines()[0]

    def help(self) -> str:
        """Returns the usage and a line for each flag."""
        lines = []
        for name, (kind, default, text) in self.flags.items():
            value = f'={"|".join(kind)}' if isinstance(kind, tuple) else f'={kind.upper()}'
            value = {'bool': '', 'port': '[=PORT]'}.get(kind, value)
            known = '' if default in (None, False, []) else f' (default: {str(default).lower()})'
            lines.append(f'  --{name + value:<27} {text}{known}')
        return '\n'.join([self.usage, '', *lines])

    def flag_values(self) -> Flags:
        """Returns fresh absl flags of this command alone."""
        values = Flags()
        for name, (kind, default, text) in self.flags.items():
            if isinstance(kind, tuple):
                absl_flags.DEFINE_enum(name, default, kind, text, flag_values=values)
            else:
                KINDS[kind](name, default, text, flag_values=values)
        return values


def declared(file: str | os.PathLike[str], run: Action | None = None) -> Command | None:
    """Returns the command that a Python file declares by the assignments that this module's docstring lists, or None.

    The file is read and not run. run=None: the function `run` of this package's module of the file's name.
    """
    path = pathlib.Path(file)
    tree = ast.parse(path.read_text(encoding='utf-8'))
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, 'target', None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value is not None:
            found[target.id] = node.value
    if 'FLAGS' not in found:
        return None

    def literal(name: str, default: Any) -> Any:
        return ast.literal_eval(found[name]) if name in found else default

    shared, processes = literal('SHARED_FLAGS', ()), literal('PROCESSES', False)
    return Command(
        usage=(ast.get_docstring(tree) or path.stem).strip(),
        run=run or functools.partial(_run, path.stem, literal('ENVIRONMENT', {})),
        flags={name: SHARED[name] for name in (*shared, 'extensions')}
        | literal('FLAGS', {})
        | (PROCESSES if processes else {}),
        arguments=literal('ARGUMENTS', None),
        processes=processes,
        alone=literal('ALONE', ()),
    )


def _run(
    name: str,
    environment: Mapping[str, str],
    arguments: list[str],
    overrides: dict[str, str],
    flags: Flags,
) -> None:
    for variable, value in environment.items():
        os.environ.setdefault(variable, value)
    if name != 'sweep':  # whose trials take it
        gpu_memory.take()
    if 'device' in flags and flags.device:  # JAX looks for its plugin of GPUs when it is imported
        sys.path.append(os.path.join(os.environ.get('TFORMER_COMPILERS', 'build/compilers'), 'cuda'))
    if flags.extensions:
        from tformer.config import extensions

        extensions.give(flags.extensions)
    module = importlib.import_module(f'{__name__}.{name}')
    if 'jax' in sys.modules:
        from tformer.distributed import compilation_cache

        compilation_cache.keep()
    module.run(arguments, overrides, flags)


def _found() -> dict[str, Command]:
    files = sorted(pathlib.Path(__file__).parent.glob('*.py'))
    commands = {file.stem.removesuffix('_'): declared(file) for file in files if file.stem != '__init__'}
    return {name: command for name, command in commands.items() if command is not None}


COMMANDS: dict[str, Command] = _found()


def needed(flags: Flags, name: str) -> str:
    """Returns a flag's value. Raises a `UserError` if it is not given."""
    if flags[name].value in (None, ''):
        raise UserError(f'--{name} is needed')
    return str(flags[name].value)
