"""What somebody who watches asks of the workers: arms to leave out, and trials to stop or to go on with."""

import json
import os
import pathlib
from collections.abc import Sequence

from tformer.errors import UserError, nearest
from tformer.lab.live.trial import PAUSED, PRUNED, RUNNING, WAITING, LiveTrial
from tformer.lab.report import prose
from tformer.lab.sweep import jobs
from tformer.training import stopping


def prune(home: pathlib.Path, arm: str, trials: Sequence[LiveTrial]) -> str:
    """Leaves out the trials of an arm that have not begun; returns a line about them.

    Raises:
      UserError: there is no such arm.
    """
    own = [trial for trial in trials if trial.arm == arm]
    if not own:
        raise UserError(f'--prune={arm} is not an arm{nearest(arm, sorted({trial.arm for trial in trials}))}')
    if arm not in jobs.pruned(home):
        with (home / jobs.PRUNED).open('ab+') as file:
            file.seek(0, os.SEEK_END)
            torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b'\n'
            file.write((b'\n' if torn else b'') + json.dumps({'arm': arm}).encode() + b'\n')
    waiting = sum(trial.state in (WAITING, PRUNED) for trial in own)
    running = sum(trial.state == RUNNING for trial in own)
    more = f'; {prose.count(running, "trial")} of it run on, and --stop stops them' if running else ''
    return f'pruned {arm}: {prose.count(waiting, "trial")} will not begin{more}'


def stop(name: str, trials: Sequence[LiveTrial]) -> str:
    """Asks trials that run or may run again to save and stop; returns a line about them.

    `name` is an arm, or a trial's directory, ARM/seed_N.

    Raises:
      UserError: there is none of the name, or none that could stop.
    """
    asked = [trial for trial in _named('--stop', name, trials) if trial.state in (RUNNING, PAUSED, WAITING)]
    if not asked:
        raise UserError(f'--stop={name}: no trial of it runs or waits')
    for trial in asked:
        trial.place.mkdir(parents=True, exist_ok=True)
        stopping.request(trial.place)
    return f'asked {prose.count(len(asked), "trial")} of {name} to stop: who runs saves at its next step'


def resume(name: str, trials: Sequence[LiveTrial]) -> str:
    """Withdraws what `stop` asked of an arm or a trial; returns a line about it. Raises a `UserError` as `stop`."""
    asked = [trial for trial in _named('--resume', name, trials) if stopping.is_stopped(trial.place)]
    if not asked:
        raise UserError(f'--resume={name}: no trial of it was asked to stop')
    for trial in asked:
        stopping.release(trial.place)
    return f'{prose.count(len(asked), "trial")} of {name} may go on: whoever runs the sweep takes them up'


def _named(flag: str, name: str, trials: Sequence[LiveTrial]) -> list[LiveTrial]:
    found = [trial for trial in trials if name in (trial.arm, trial.directory)]
    if not found:
        names = {known for trial in trials for known in (trial.arm, trial.directory)}
        raise UserError(f'{flag}={name} is neither an arm nor a trial{nearest(name, sorted(names))}')
    return found
