"""Scores a run on tasks of the LM Evaluation Harness (lm-eval).

    tformer harness --workdir=DIR --tasks=TASK,... [--include=DIR] [--shots=N] [--limit=N] [--output=FILE]

`pip install 'tformer[harness]'` installs the harness, which knows the tasks; --include is a directory of further task
files (YAML). Its table is printed, and all that it returns is written to --output as JSON. Log-likelihoods are those of
`tformer score`, those of long texts with --stride=model.max_len, and texts are written as the tasks ask.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tformer import atomic, commands
from tformer import config as config_lib
from tformer.commands import reading, score
from tformer.commands.run import Run
from tformer.errors import UserError, nearest

SHARED_FLAGS = ('workdir', 'checkpoint')
FLAGS: dict[str, commands.Flag] = {
    'tasks': ('list', [], 'names of tasks'),
    'include': ('string', None, 'a directory of further task files'),
    'shots': ('int', None, 'solved examples in front of each; default: what the task says'),
    'limit': ('int', None, 'only the first N examples of each task'),
    'output': ('string', None, 'the file of all results, in JSON'),
}

_NEW_TOKENS = 256  # where a task says nothing
_SAMPLING = ('temperature', 'top_k', 'top_p', 'min_p')


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    workdir = commands.needed(flags, 'workdir')
    if not flags.tasks:
        raise UserError('--tasks is needed: names of tasks that lm-eval knows, or that --include has')
    reading.check_output(flags.output)
    loaded = Run.load(workdir, overrides, flags.checkpoint, placed=True).for_writing()
    found = harness(loaded, flags.tasks, include=flags.include, shots=flags.shots, limit=flags.limit)
    from lm_eval import utils

    print(utils.make_table(found))
    if flags.output is not None:
        text = json.dumps(found, indent=2, default=utils.handle_non_serializable, ensure_ascii=False)
        atomic.write(pathlib.Path(flags.output), text + '\n')


def harness(
    run: Run | str | pathlib.Path,
    tasks: Sequence[str],
    *,
    include: str | pathlib.Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Returns what the harness finds for each task: its `results`, `versions`, `samples` and more.

        >>> tformer.harness('runs/pythia', ['lambada_openai'])['results']['lambada_openai']['acc,none']

    Raises:
      UserError: the harness is not installed, a task is unknown, or one asks for what `decode` has no field for.
    """
    for name, value, least in (('shots', shots, 0), ('limit', limit, 1)):
        if value is not None and value < least:
            raise UserError(f'--{name}={value} must be at least {least}')
    if include is not None and not pathlib.Path(include).is_dir():
        raise UserError(f'--include={include} is not a directory')
    run = run if isinstance(run, Run) else Run.load(run, placed=True)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError("tformer harness needs lm-eval: pip install 'tformer[harness]'") from error
    manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            raise UserError(f'--tasks={task} is unknown to lm-eval' + nearest(task, manager.all_tasks))
    try:
        return simple_evaluate(adapter(run), tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager)
    except (ValueError, FileNotFoundError) as error:  # of a task file, or of data that are not there
        raise UserError(f'lm-eval: {" ".join(str(error).split())[:300]}') from error


def adapter(run: Run) -> Any:
    """Returns a run as the harness sees a model: an `lm_eval.api.model.LM`."""
    from lm_eval.api.model import LM

    longest = run.config.model.max_len

    class Adapter(LM):
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            pairs = [dict(zip(('source', 'target'), request.args, strict=True)) for request in requests]
            return [(each.log_likelihood, each.greedy) for each in score.score(run, pairs, ended=False)]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            texts = [{'source': '', 'target': request.args[0]} for request in requests]
            return [each.log_likelihood for each in score.score(run, texts, ended=False, stride=longest)]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            found = [''] * len(requests)
            asked = [json.dumps(request.args[1], sort_keys=True) for request in requests]
            for each in dict.fromkeys(asked):
                chosen = [place for place, other in enumerate(asked) if other == each]
                write, ends = writing(run, json.loads(each))
                for place, text in zip(chosen, write([requests[i].args[0] for i in chosen]), strict=True):
                    found[place] = before(text, ends)
            return found

    return Adapter()


def writing(run: Run, asked: Mapping[str, Any]) -> tuple[Callable[[Sequence[str]], list[str]], list[str]]:
    """Returns what writes texts as a task asks, and the texts that end them.

    Raises:
      UserError: a setting of the task has no counterpart.
    """
    settings = {name: value for name, value in asked.items() if value is not None}
    ends = settings.pop('until', [])
    wanted, room = settings.pop('max_gen_toks', _NEW_TOKENS), max(run.config.model.max_len // 2, 1)
    if wanted > room:
        line = f'a task asks for {wanted} new tokens, and model.max_len={run.config.model.max_len} leaves {room}'
        print(line, file=sys.stderr, flush=True)
    fields: dict[str, Any] = {'decode.max_len': min(wanted, room), 'decode.min_len': 0, 'decode.num_outputs': 1}
    fields |= {'decode.strategy': 'greedy'}
    chosen = {name: settings.pop(name) for name in _SAMPLING if name in settings}
    if settings.pop('do_sample', False) and chosen.get('temperature') != 0:
        fields |= {'decode.strategy': 'sample', **{f'decode.{name}': value for name, value in chosen.items()}}
    if settings:
        raise UserError(f'a task asks for {settings}, which `decode` has no field for')
    own = dataclasses.replace(run, config=config_lib.override(run.config, fields))
    return functools.partial(own.generate, cut=True), [ends] if isinstance(ends, str) else list(ends)


def before(text: str, ends: Sequence[str]) -> str:
    """Returns what stands before the first of the texts that end it."""
    return text[: min((text.index(end) for end in ends if end and end in text), default=len(text))]
