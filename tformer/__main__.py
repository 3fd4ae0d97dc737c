"""The command line: `tformer COMMAND [FLAG ...] [--config.section.field=value ...]`."""

import contextlib
import errno
import io
import logging as standard_logging
import os
import signal
import sys
from collections.abc import Sequence

from absl import flags as absl_flags
from absl import logging

from tformer import commands, errors
from tformer.commands import failures, lasting
from tformer.data import store_copies, stores
from tformer.training.versions import versions

Parsed = tuple[commands.Command, list[str], dict[str, str], absl_flags.FlagValues]


def usage() -> str:
    """Returns the help of the command line: a line for each command."""
    lines = [f'  {name:<10} {command.summary}' for name, command in commands.COMMANDS.items()]
    return '\n'.join([
        'tformer COMMAND [FLAG ...] [--config.section.field=value ...]',
        '',
        *lines,
        '',
        'tformer COMMAND --help prints the usage and the flags of a command.',
        'tformer --version prints the versions of packages.',
    ])  # fmt: skip


def parse(argv: Sequence[str]) -> Parsed:
    """Returns (the command, its arguments, the config overrides, its flags); exits after printing help or versions.

    Raises:
      UserError: there is no such command or flag, the command does not take it, or a value does not read.
    """
    overrides: dict[str, str] = {}
    rest = [argv[0]]
    arguments = iter(argv[1:])
    for argument in arguments:
        if argument.startswith(('--config.', '-config.')):
            name, equals, value = argument.lstrip('-').removeprefix('config.').partition('=')
            overrides[name] = value if equals else next(arguments, '--')
            if overrides[name].startswith('--'):
                raise errors.UserError(f'--config.{name} has no value')
        else:
            rest.append(argument)
    asks = {'-h', '--help'} & set(rest)
    if len(rest) < 2 or rest[1] == 'help' or (asks and rest[1] not in commands.COMMANDS):
        print(usage())
        sys.exit(0)
    if rest[1] == '--version':
        print(', '.join(f'{name} {version}' for name, version in versions().items()))
        sys.exit(0)
    name = rest.pop(1)
    if name not in commands.COMMANDS:
        _import_extensions(rest)
    command = errors.choose(commands.COMMANDS, name, 'COMMAND')
    if asks:
        print(command.help())
        sys.exit(0)
    for argument in rest[1:]:
        _check_owner(argument, name, command)
    flags = command.flag_values()
    try:
        positional = flags(rest)[1:]
    except absl_flags.Error as error:
        raise errors.UserError(str(error).splitlines()[0]) from error
    for flag in command.flags:
        number = flags[flag].value
        if isinstance(number, int) and abs(number) >= 2**63:
            raise errors.UserError(f'--{flag} is a number of more than 64 bits')
    if positional and command.arguments is None:
        raise errors.UserError(f'{name} takes no argument {positional[0]!r}')
    _check_processes(name, command, flags)
    return command, positional, overrides, flags


def _import_extensions(rest: Sequence[str]) -> None:
    """Imports the files of --extensions, which may add commands."""
    given = [argument.partition('=')[2] for argument in rest if argument.lstrip('-').startswith('extensions=')]
    if given:
        from tformer.config import extensions

        extensions.give(path for paths in given for path in paths.split(','))


def _check_owner(argument: str, name: str, command: commands.Command) -> None:
    """Raises a `UserError` if the argument is a flag that only other commands take."""
    flag = argument.lstrip('-').partition('=')[0] if argument.startswith('-') else ''
    owners = {other: each.flags for other, each in commands.COMMANDS.items()}
    for meant in (flag, flag.removeprefix('no')):
        takers = [other for other, known in owners.items() if meant in known]
        if takers and meant in commands.PROCESSES and meant not in command.flags:
            raise errors.UserError(f'--{meant}: {", ".join(takers)} can run as several processes, {name} cannot')
        if takers and meant not in command.flags:
            raise errors.UserError(f'{name} takes no --{meant}; it is a flag of {", ".join(takers)}')


def _check_processes(name: str, command: commands.Command, flags: absl_flags.FlagValues) -> None:
    if not command.processes:
        return
    alone = [flag for flag in command.alone if flags[flag].value]
    if flags.coordinator is not None and alone:
        raise errors.UserError(f'--coordinator: {name} --{alone[0]} cannot run as several processes')
    if flags.coordinator is None and (flags.num_processes is not None or flags.process_id is not None):
        raise errors.UserError('--num_processes and --process_id go with --coordinator')


def main(argv: Sequence[str]) -> None:
    """Runs one command. Raises `UserError` for the user's mistakes."""
    from tformer.commands import allocator

    command, arguments, overrides, flags = parse(argv)
    if _trains(command):
        lasting.begin()
    absl_flags.FLAGS.mark_as_parsed()
    remote = stores.address(flags.workdir or '') if 'workdir' in command.flags else None
    if remote and 'executor' in command.flags and flags.executor != 'local':
        raise errors.UserError(f'--workdir={remote}: workers of --executor={flags.executor} need one that all share')
    several = command.processes and flags.coordinator is not None
    if remote and several and command not in (commands.COMMANDS['train'], commands.COMMANDS['evaluate']):
        raise errors.UserError(f'--workdir={remote}: several processes need a directory that all share')
    allocator.keep_memory()
    if several:
        from tformer.distributed import processes

        preemptible = command is commands.COMMANDS['train']
        processes.join(flags.coordinator, flags.num_processes, flags.process_id, preemptible=preemptible)
    with contextlib.ExitStack() as contexts:
        if command.arguments in ('DIR...', 'WORKDIR') and len(arguments) == 1 and (url := stores.address(arguments[0])):
            arguments = [_local(contexts, command, url, False)]
        elif command.arguments in ('DIR...', 'WORKDIR'):
            for argument in arguments:
                stores.require_local(argument)
        if remote:
            flags['workdir'].value = _local(contexts, command, remote, several)
        command.run(arguments, overrides, flags)


def _local(contexts: contextlib.ExitStack, command: commands.Command, url: str, several: bool) -> str:
    """Returns the local copy of a workdir on an object store."""
    if several:
        from tformer.training import copies

        return contexts.enter_context(copies.local(url, _trains(command)))
    return contexts.enter_context(store_copies.local(url, _trains(command)))


def _trains(command: commands.Command) -> bool:
    """Returns whether what a command is for is in its workdir, not in what it prints."""
    return command in (commands.COMMANDS['train'], commands.COMMANDS['sweep'])


def run() -> None:
    """The installed script: a user's mistake is one line on standard error and exit code 2."""
    # Failures in Orbax's threads and tasks also reach the main thread, which reports them once.
    logging.set_verbosity(logging.FATAL)
    standard_logging.getLogger('asyncio').setLevel(standard_logging.CRITICAL)
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # which this process never gets
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='backslashreplace')  # what the terminal's encoding lacks
    sys.unraisablehook = lambda fault: None if fault.object is None else sys.__unraisablehook__(fault)
    try:
        main(sys.argv)
    except errors.Stopped as stopped:
        print(f'tformer: {stopped}', file=sys.stderr)
        sys.exit(errors.STOPPED)
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE and error.filename is None:
            sys.stderr.close()  # the reader of what is printed, such as `head`, has read enough
            _end(0)
        _end(*failures.explain(error))


def _end(code: int, message: str | None = None) -> None:
    """Ends the process; one of several that run as one does not wait for the others."""
    if message is not None:
        print(f'tformer: {message}', file=sys.stderr, flush=True)
    if processes := sys.modules.get('tformer.distributed.processes'):
        processes.leave(code)
    sys.exit(code)


if __name__ == '__main__':
    run()
