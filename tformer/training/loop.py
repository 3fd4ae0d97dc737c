"""Training: one straight line from a config to a finished workdir."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax

from tformer.config import Config
from tformer.data.batches import pipeline
from tformer.data.batches.packing import BATCHING
from tformer.data.examples.example_formats import format_of
from tformer.data.examples.special_tokens import marks_prefix
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import meshes, processes, sharding
from tformer.errors import Stopped, UserError
from tformer.evaluation import scorer
from tformer.layers import kernel_choice
from tformer.optim import freezing
from tformer.training import checkpoint, copies, program_cache, setup, stopping, trackers, workdir, writers
from tformer.training.members import Group
from tformer.training.program import Program, check_memory
from tformer.training.recorder import RunRecorder
from tformer.training.state import count_parameters
from tformer.training.step_trace import Trace
from tformer.training.stopping import StopMonitor
from tformer.training.wall_time import Account, Clock


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished training: the resolved config, the tokenizers, the last step and the best one."""

    config: Config
    tokenizers: Tokenizers
    step: int
    best_step: int
    num_parameters: int
    account: Account  # where the wall time went


def train(
    config: Config,
    directory: str | pathlib.Path,
    generated: scorer.GenerationScores | None = None,
    may_differ: Sequence[str] = (),
    trace: Trace | None = None,
    until: int | None = None,
) -> Trained | None:
    """Trains as a checked config (`checks.check_here`) says, in a workdir; resumes where it holds a checkpoint.

    `generated` scores generated text in the evaluations, where config.evaluate.examples_while_training asks for it.
    `may_differ` are dotted fields that may differ from the checkpoint's, besides those that always may. `trace` writes
    a trace of some of the steps. With `until`, a run that has not ended by then is paused after that step: it is saved,
    and goes on to the same bits as if it had not been paused.

    Returns the finished training; None if it is paused.

    Raises:
      UserError: the config, the data or the workdir has a mistake.
      Stopped: a signal, train.max_minutes or a file in the workdir asked for it, and everything is saved.
    """
    if config.evaluate.examples_while_training and jax.process_count() > 1:
        raise UserError('evaluate.examples_while_training needs a single process; evaluate the finished run instead')
    trackers.check(config)
    directory, mesh = pathlib.Path(directory), meshes.make_mesh(config.mesh)
    own = [directory] if processes.first() else []
    with contextlib.ExitStack() as contexts:
        # -------------------------------------------------------------------------------------------- one process
        contexts.enter_context(sharding.placed(mesh, config.mesh))
        if processes.first():
            contexts.enter_context(workdir.lock(directory))
            (directory / stopping.OBEYED).unlink(missing_ok=True)
        stop = contexts.enter_context(StopMonitor(config.train.max_minutes, workdirs=own))
        clock = contexts.enter_context(Clock())

        # ------------------------------------------------------------------------------------- checkpoint and data
        last = processes.same_number(lambda: checkpoint.latest_valid(directory) or 0) or None
        copies.follow(directory)
        previous = None if last is None else checkpoint.read_metadata(directory, last)
        data = setup.load_data(config, directory, mesh, previous, may_differ)
        data = data._replace(tokenizers=program_cache.tokenizers(data.tokenizers))
        if processes.first():
            workdir.save_config(directory, data.config)

        # -------------------------------------------------------------------------------------- program and record
        batch = data.batches.batch(0)
        program = program_cache.program(data.config, batch, mesh)
        check_memory(program, batch)
        scores = program_cache.score_of(program, data.config)
        score = scores if program.reference is None else functools.partial(scores, taught=program.taught[0])
        group = Group(program, [member := RunRecorder(data, directory, score, generated, last, clock=clock)], last)
        contexts.callback(group.ahead.close)
        progress = writers.Progress(data.config.train.num_steps or 0, last or 0)
        contexts.callback(progress.close)
        contexts.callback(member.close)  # also when the run fails
        for line in filter(None, (*program.remarks, headline(program, data.batches, last or 0))):
            progress.message(line)
        if trace is not None:
            trace.check(last or 0, data.config.train.num_steps or 0)
            contexts.callback(trace.close)
        group.ahead.tell = progress.compiled
        if programs := group.compile_ahead(scores):
            progress.message(f'compiling the initial state and {programs} programs of steps and evaluations')
        ended = train_group(group, stop, progress, trace, until)
        return ended[0] if ended else None


def train_group(
    group: Group,
    stop: StopMonitor,
    progress: writers.Progress,
    trace: Trace | None = None,
    until: int | None = None,
) -> list[Trained]:
    """Trains the members of a group to their end; returns the finished trainings of those that do not fail.

    Returns [] if they are paused after step `until`.

    Raises:
      UserError: the only member fails.
      Stopped: as `train`.
    """
    # ------------------------------------------------------------------------------------------------- start
    (state, hyper), num_steps, step = group.start(), group.num_steps, group.checkpoint_step or 0
    batches = group.batches(step)
    for member in group.active:
        member.metrics.begin()
    while active := group.active:
        # ------------------------------------------------------------------------------ evaluate, save, stop
        reason = stop.reason(step)
        if reason is None and group.should_evaluate(step):
            try:
                scores = group.evaluate(step, state, stop)
            except Stopped as stopped:
                reason = str(stopped)
            else:
                shown = (f'{name.removeprefix("valid/")} {value}' for name, value in scores.items())
                progress.message(f'step {step} valid  ' + '  '.join(shown))
        is_pausing = until is not None and step >= until
        group.save(step, state, requested=reason is not None or is_pausing)
        if reason is not None and (step < num_steps or not group.is_evaluated(step)):
            saved = f'after step {step:,} of {num_steps:,}, which is saved' if step else 'before the first step'
            raise Stopped(f'{reason}: stopped {saved}')
        if step >= num_steps or group.is_out_of_patience():
            break
        if is_pausing:
            progress.message(f'paused after step {step:,} of {num_steps:,}, which is saved')
            return []

        # -------------------------------------------------------------------------------------------- a step
        if trace is not None:
            trace.begin(step + 1)
        with group.clock.spending('steps'), group.clock.spending('waiting_for_data', unless=group.is_computing):
            batch = next(batches)
        if not group.is_compiled(batch):
            with progress.compiling():
                group.compile_step(state, batch, hyper)
        with group.clock.spending('steps'), jax.profiler.StepTraceAnnotation('train', step_num=step + 1):
            state, metrics = meshes.in_turn(group.program.mesh, group.step(state, batch, hyper))
        if trace is not None:
            trace.end(step + 1, metrics)
        step, stop.has_step = step + 1, True
        group.add_metrics(metrics)
        if active[0].should_report(step):
            progress.update(step, group.report(step))
            group.drop_failed(active)

    # --------------------------------------------------------------------------------------------------- end
    if group.active and step < num_steps:
        stale, metric = group.active[0].stale, group.active[0].config.train.best_metric
        progress.message(f'stopped early: {stale} evaluations without a better {metric}')
    for member in (ended := group.active):
        with group.clock.spending('saving'):
            member.end(step, int(jax.device_get(group.state_of(state, member).guard.skipped)))
    group.drop_failed(ended)
    if name := stop.signalled(step + 1):
        raise Stopped(f'{name}: trained to step {step:,}, which is saved, and not scored yet')
    size = count_parameters(sharding.unboxed(group.program.abstract.params))
    return [
        Trained(run.config, run.data.tokenizers, step, checkpoint.best(run.directory) or step, size, run.account)
        for run in group.active
    ]


def headline(program: Program, batches: pipeline.Batches, step: int) -> str:
    """Returns the line that a run prints before its first step."""
    params = sharding.unboxed(program.abstract.params)
    number = count_parameters(params)
    trainable = freezing.count_trainable(freezing.trainable_mask(program.config, program.names), params)
    parameters = f'{number:,} parameters' + (f' ({trainable:,} trainable)' if trainable < number else '')
    resumed = f', resumed at step {step}' if step else ''
    model = program.config.model
    packed = BATCHING[program.config.data.batching].packs or format_of(program.config).several
    rows = {'packed': packed, 'prefix': marks_prefix(program.config)}
    kernel = kernel_choice.described(model, meshes.jax_platform(program.mesh), **rows)
    attention = f', {kernel}' if model.recurrence is None else ''
    if program.teacher is not None:
        parameters += f', teacher of {count_parameters(sharding.unboxed(program.teacher.abstract)):,}'
    return f'{parameters}, {batches.summary}, {meshes.described(program.mesh)}{attention}{resumed}'
