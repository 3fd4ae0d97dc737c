"""The command line: `tformer COMMAND`, absl flags, `--config.section.field=value`."""

import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence

from absl import flags, logging

from tformer import errors
from tformer.data.sources import text_reader

FLAGS = flags.FLAGS
# A help text that begins with commands is of a flag that no others take.
flags.DEFINE_string('config', None, 'train, sweep, prepare, inspect, benchmark: a config file, FILE[:argument].')
flags.DEFINE_string('workdir', None, "The run's directory.")
flags.DEFINE_string('split', 'test', 'evaluate: the split that is scored: train, valid or test.')
flags.DEFINE_enum('checkpoint', 'best', ['best', 'latest'], 'evaluate, generate, attention: which.')
flags.DEFINE_integer('average', None, 'evaluate: the mean of the newest N checkpoints kept (train.keep_last).')
flags.DEFINE_string(
    'input', None, 'generate, attention: a file of texts, one a line; default: the arguments, or stdin.'
)
flags.DEFINE_integer('seed', 0, 'generate: of the sampling.', 0, 2**31 - 1)
flags.DEFINE_boolean('saves', False, 'benchmark: of steps with checkpoints among them against steps without.')
flags.DEFINE_boolean('data', False, 'inspect, benchmark: of the data instead of the model.')
flags.DEFINE_string('coordinator', None, 'Of processes that run as one: HOST:PORT of process 0; auto: all is found.')
flags.DEFINE_integer('num_processes', None, 'How many they are.')
flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.')
flags.DEFINE_list('may_differ', [], "train: fields that may differ from those of the workdir's checkpoint.")
flags.DEFINE_integer('step', None, 'replay: the number of the step, from 1.')
flags.DEFINE_integer('steps', 10, 'benchmark: timed steps.')
flags.DEFINE_boolean('dry_run', False, 'sweep: prints the trials and runs none.')
flags.DEFINE_boolean('array', False, 'sweep: writes the list that launch/slurm_array.sbatch takes, and runs none.')
flags.DEFINE_integer('parallel', 1, 'sweep: processes that run at once.')
flags.DEFINE_integer(
    'together', 1, 'sweep: trials that one program trains, at most, where they differ in numbers alone.'
)
flags.DEFINE_string(
    'transform', None, 'train, sweep: of trials together: vmap, or map; default: map on a CPU, else vmap.'
)
flags.DEFINE_string('metric', None, 'sweep, report: that decides, SPLIT/NAME; default: test/loss, or valid/loss.')
flags.DEFINE_string('baseline', None, 'sweep, report: the arm that the others are compared with; default: the first.')
flags.DEFINE_float('alpha', 0.05, 'sweep, report: the chance of a false label that is accepted, over all arms.')
flags.DEFINE_list('reach', [], 'sweep, report: when runs reach these values, such as valid/accuracy=0.99.')
flags.DEFINE_boolean('timing', True, 'sweep, report: with the section of what a clock measured.')

USAGE = """tformer COMMAND [--config=FILE[:argument]] [--workdir=DIR] [--config.section.field=value ...]

  train      --config --workdir          trains; resumes by itself; ends with the final evaluation
  sweep      --config --workdir [--dry_run | --array]  runs the trials of a sweep file; goes on by itself, and
                                         ends with their report, whose flags it takes; --parallel=K
                                         processes at once, of --together=N trials each in one program
  report     DIR [--metric=SPLIT/NAME] [--baseline=ARM] [--alpha=0.05] [--reach=NAME=VALUE] [--timing=false]
                                         writes report.md and report.html of a sweep, or of any directory of workdirs
  replay     --workdir --step=N          runs a step again and shows its batch
  prepare    --config [--workdir]        writes the data as a TFDS set; with a workdir its tokenizers and token cache
  evaluate   --workdir [--split] [--average=N]  scores a checkpoint, or the mean of the last N, on a split
  generate   --workdir [TEXT ...]        text in (arguments, --input, stdin), text out
  attention  --workdir [TEXT ...]        attention maps, as one HTML page
  inspect    --config | --workdir        the config and its parameter table; the checkpoints of a workdir; of a mesh of
                                         several devices, there or not, what a step holds, sends and takes on each
  inspect    --data --config | --workdir the data: amounts, lengths, padding, duplicates, rows as the model reads them
  benchmark  --config [--data | --saves] times the train step, the data pipeline, or what saving costs: one JSON line
"""


def parse(argv: Sequence[str]) -> tuple[str, list[str], dict[str, str]]:
    """Returns (the command, its arguments, the config overrides); sets the flags.

    Raises:
      UserError: no or an unknown command, or an unknown flag.
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
    if len(rest) < 2 or rest[1] == 'help' or {'-h', '--help'} & set(rest):
        print(USAGE)
        sys.exit(0)
    command = rest.pop(1)
    errors.choose(COMMANDS, command, 'COMMAND')
    try:
        positional = FLAGS(rest)[1:]
    except flags.Error as error:
        raise errors.UserError(str(error).splitlines()[0]) from error
    for argument in rest[1:]:
        name = argument.lstrip('-').partition('=')[0]
        name = name if name in FLAGS else name.removeprefix('no')
        if argument.startswith('-') and name in FLAGS:
            owners = FLAGS[name].help.partition(':')[0].split(', ')
            if owners[0] in COMMANDS and command not in owners:
                raise errors.UserError(f'{command} takes no --{name}; it is of {", ".join(owners)}')
    if positional and command not in ARGUMENTS:
        raise errors.UserError(f'{command} takes no argument {positional[0]!r}')
    return command, positional, overrides


def needed(flag: str) -> str:
    """Returns a flag's value, or raises a `UserError` where it is not given."""
    if FLAGS[flag].value is None:
        raise errors.UserError(f'--{flag} is needed')
    return str(FLAGS[flag].value)


def train(arguments: list[str], overrides: dict[str, str]) -> None:
    from tformer import checks, config
    from tformer.commands import runs

    if arguments:  # workdirs of a sweep's trials
        if overrides or FLAGS.config or FLAGS.workdir or FLAGS.may_differ or FLAGS.coordinator:
            raise errors.UserError('trials that train together have their own configs: no flag but --transform')
        runs.train_together(arguments, FLAGS.transform)
        return
    loaded = config.load(needed('config'), overrides)
    checks.check_here(loaded)
    runs.train(loaded, needed('workdir'), FLAGS.may_differ)


def sweep(arguments: list[str], overrides: dict[str, str]) -> None:
    import jax

    jax.config.update('jax_platforms', 'cpu')  # of this process, which computes nothing: the devices are the trials'
    from tformer.lab.sweep import manifest, plan, runner, trials

    base, made = trials.load(needed('config'), overrides)
    if FLAGS.dry_run:
        print(plan.plan(made, FLAGS.workdir, FLAGS.parallel))
        return
    from tformer.lab.report import write

    manifest.check(made, pathlib.Path(needed('workdir')))
    kept = [f'--config={FLAGS.config}', *(f'--config.{k}={v}' for k, v in overrides.items())]
    if FLAGS.array:
        print(runner.array(base, made, FLAGS.workdir, FLAGS.together, FLAGS.transform, kept))
        return
    code = runner.sweep(base, made, FLAGS.workdir, FLAGS.parallel, FLAGS.together, FLAGS.transform, arguments=kept)
    print(write.write(FLAGS.workdir, FLAGS.metric, FLAGS.baseline, FLAGS.alpha, FLAGS.timing, FLAGS.reach))
    if code:
        sys.exit(code)


def report(arguments: list[str], overrides: dict[str, str]) -> None:
    import jax

    jax.config.update('jax_platforms', 'cpu')  # sizes are counted, nothing is computed
    from tformer.lab.report import write

    if overrides:
        raise errors.UserError('report takes no --config')
    if len(arguments) != 1:
        raise errors.UserError(f'report takes one directory, not {len(arguments)}: tformer report DIR')
    print(write.write(arguments[0], FLAGS.metric, FLAGS.baseline, FLAGS.alpha, FLAGS.timing, FLAGS.reach))


def replay(arguments: list[str], overrides: dict[str, str]) -> None:
    from tformer.commands import replay

    for line in replay.replay(needed('workdir'), int(needed('step')), overrides):
        print(line, flush=True)


def prepare(arguments: list[str], overrides: dict[str, str]) -> None:
    from tformer import checks, config
    from tformer.data.sources import prepare

    loaded = config.load(needed('config'), overrides)
    checks.check_here(loaded)
    if FLAGS.workdir is None or loaded.data.tfds_name is not None:
        written = prepare.write(loaded.data, loaded.train.objective, lambda line: print(line, file=sys.stderr))
        print(prepare.summary(written))
    if FLAGS.workdir is not None:
        from tformer.commands import runs

        print(runs.prepare(loaded, FLAGS.workdir))


def evaluate(arguments: list[str], overrides: dict[str, str]) -> None:
    from tformer.commands import runs

    run = runs.load(needed('workdir'), overrides, FLAGS.checkpoint, FLAGS.average, placed=True)
    runs.evaluate(run, FLAGS.split, **({} if FLAGS.average is None else {'averaged_checkpoints': FLAGS.average}))


def texts(arguments: list[str]) -> list[str]:
    """Returns the texts to work on: the arguments, the lines of --input, or those of standard input."""
    if arguments:
        return [_utf8(os.fsencode(text), 'the arguments') for text in arguments]
    if FLAGS.input is None:
        text = _utf8(sys.stdin.buffer.read(), 'standard input')
    else:
        text = text_reader.read_text(pathlib.Path(FLAGS.input))
    if not text:
        raise errors.UserError('no text given: as arguments, in --input, or on standard input')
    return [line.removesuffix('\r') for line in text.removesuffix('\n').split('\n')]  # nothing else ends a line


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise errors.UserError(f'{where}: not UTF-8: byte 0x{data[error.start]:02x} at {error.start}') from error


def generate(arguments: list[str], overrides: dict[str, str]) -> None:
    from tformer.commands import runs

    run = runs.load(needed('workdir'), overrides, FLAGS.checkpoint)
    for text in runs.generate(run, texts(arguments), FLAGS.seed):
        print(text)


def attention(arguments: list[str], overrides: dict[str, str]) -> None:
    from tformer.commands import inspect as inspect_lib
    from tformer.commands import runs

    run = runs.load(needed('workdir'), overrides, FLAGS.checkpoint)
    print(inspect_lib.attention(run, texts(arguments)))


def inspect(arguments: list[str], overrides: dict[str, str]) -> None:
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # of XLA, which is read as JAX is imported
    from tformer import checks, config
    from tformer.commands import dry_run, runs
    from tformer.commands import inspect as inspect_lib

    if FLAGS.config is not None and FLAGS.workdir is not None:
        raise errors.UserError('inspect takes --config or --workdir, not both')
    if FLAGS.workdir is not None:
        loaded = config.override(runs.load_config(FLAGS.workdir), overrides)
    else:
        loaded = config.load(needed('config'), overrides)
    meant = FLAGS.workdir is None or any(name.startswith('mesh.') for name in overrides)
    devices = dry_run.num_devices(loaded.mesh) if meant and not FLAGS.data else 1
    if devices > 1:
        dry_run.pretend(devices)
    checks.check_here(loaded)
    if FLAGS.data:
        inspect_lib.show_data(loaded, FLAGS.workdir)
    else:
        print(inspect_lib.inspect(loaded))
        if FLAGS.workdir is not None:
            print(inspect_lib.checkpoints(FLAGS.workdir))
        if devices > 1:
            print(dry_run.report(loaded, lambda line: print(line, file=sys.stderr, flush=True)))


def benchmark(arguments: list[str], overrides: dict[str, str]) -> None:
    from tformer import checks, config
    from tformer.commands import benchmark

    loaded = config.load(needed('config'), overrides)
    checks.check_here(loaded)
    if FLAGS.steps < 1:
        raise errors.UserError(f'--steps={FLAGS.steps} must be positive')
    timed = benchmark.feed if FLAGS.data else benchmark.saving if FLAGS.saves else benchmark.train_step
    print(timed(loaded, FLAGS.steps))


COMMANDS: dict[str, Callable[[list[str], dict[str, str]], None]] = {
    'train': train,
    'sweep': sweep,
    'report': report,
    'replay': replay,
    'prepare': prepare,
    'evaluate': evaluate,
    'generate': generate,
    'attention': attention,
    'inspect': inspect,
    'benchmark': benchmark,
}

TOGETHER = ('train', 'evaluate', 'benchmark')  # what several processes run as one
ARGUMENTS = ('train', 'report', 'generate', 'attention')  # what takes arguments that are no flags


def main(argv: Sequence[str]) -> None:
    """Runs one command. Raises `UserError` for the user's mistakes."""
    from tformer.commands import allocator

    command, arguments, overrides = parse(argv)
    allocator.keep_memory()
    if FLAGS.coordinator is not None:
        from tformer.distributed import processes

        alone = command if command not in TOGETHER else 'benchmark --saves' if FLAGS.saves else None
        if alone is not None:
            raise errors.UserError(f'--coordinator: several processes {", ".join(TOGETHER)}; {alone} is for one')
        processes.join(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id, preemptible=command == 'train')
    elif FLAGS.num_processes is not None or FLAGS.process_id is not None:
        raise errors.UserError('--num_processes and --process_id go with --coordinator')
    COMMANDS[command](arguments, overrides)


def run() -> None:
    """The installed script: a user's mistake is one line on standard error and exit code 2."""
    # What fails in a thread of Orbax is told once, by us.
    logging.set_verbosity(logging.FATAL)
    sys.unraisablehook = lambda fault: None if fault.object is None else sys.__unraisablehook__(fault)
    try:
        main(sys.argv)
    except errors.UserError as error:
        _end(2, str(error))
    except errors.Stopped as stopped:
        print(f'tformer: {stopped}', file=sys.stderr)
        sys.exit(errors.STOPPED)
    except KeyboardInterrupt:
        _end(130)
    except BrokenPipeError:  # the reader, e.g. head, has seen enough
        sys.stderr.close()
        _end(0)
    except OSError as error:  # a full disk, a directory that cannot be written
        where = f'{error.filename}: ' if error.filename else ''
        _end(2, f'{where}{error.strerror or error}')
    except Exception as error:
        processes = sys.modules.get('tformer.distributed.processes')
        line = processes.lost(error) if processes else None
        if line is None:
            traceback.print_exception(error)
        _end(1, line)


def _end(code: int, message: str | None = None) -> None:
    """Ends the process; one of several that run as one does not wait for the others."""
    if message is not None:
        print(f'tformer: {message}', file=sys.stderr, flush=True)
    if processes := sys.modules.get('tformer.distributed.processes'):
        processes.leave(code)
    sys.exit(code)


if __name__ == '__main__':
    run()
