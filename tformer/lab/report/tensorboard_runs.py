"""Runs of other programs that left TensorBoard files, as a directory of workdirs that a report compares.

Each directory of event files is a run; one called `validation`, or as another split, is a part of the run that it lies
in, as Keras writes them. Where a part of its path ends in 'seed' and a number, that is its seed, and the
rest is its arm. A run's workdir holds its scalars in metrics.jsonl and the last value of each in result.json.
"""

import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tformer import config
from tformer.config import Config, hashing
from tformer.errors import UserError
from tformer.evaluation import metrics
from tformer.lab.report.results import FACTS
from tformer.lab.sweep import manifest, trials
from tformer.training import tensorboard, writers

FILES = '*tfevents*'
SEED = re.compile(r'[/_.,-]*seed[_=-]?(\d+)(?=/|$)')
SPLITS = {'train': 'train training', 'valid': 'valid val validation dev eval evaluation', 'test': 'test'}
SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words.split()}
ERRORS = re.compile(r'loss|err|perplexity|ppl|nll|wer$|cer$|mse|mae|rmse', re.IGNORECASE)  # of which less is better


class Found(NamedTuple):
    """The scalars of one run."""

    rows: dict[int, dict[str, float]]  # by step, rising
    seconds: float  # between the first and the last


def is_logs(path: pathlib.Path) -> bool:
    """Returns whether a directory holds TensorBoard files, and is neither a hub's nor a workdir."""
    return path.is_dir() and not (path / 'config.json').exists() and next(path.rglob(FILES), None) is not None


def write(logs: pathlib.Path, home: pathlib.Path) -> list[str]:
    """Writes the workdirs and the list of the runs in `logs` to the directory `home`; returns lines that tell of them.

    Raises:
      UserError: tensorboardX is not installed, no scalar is found, or two runs have the same arm and seed.
    """
    tensorboard.require()
    bad: list[str] = []
    found = _runs(logs, bad)
    if not found:
        raise UserError('; '.join([f'{logs}: no scalar is in its TensorBoard files', *bad]))
    names = named({tag for run in found.values() for row in run.rows.values() for tag in row})
    entries, seconds, known = [], {}, dict[tuple[str, int], pathlib.Path]()
    for place, run in found.items():
        arm, seed = arm_and_seed(place.relative_to(logs).as_posix(), logs.resolve().name)
        if (arm, seed) in known:
            raise UserError(f'{known[arm, seed]} and {place} are both seed {seed} of {arm}: name seeds by seed_N')
        known[arm, seed] = place
        directory = f'{_safe(arm)}/seed_{seed}'
        _write_run(home / directory, run, names)
        seconds[directory] = round(run.seconds, 2)
        entry = {'name': arm, 'seed': seed, 'directory': directory, 'overrides': {trials.SEED: seed}}
        entries.append({**entry, 'off_percent': {}})
    tree = {'imported': str(logs), 'base': config.to_dict(Config()), 'trials': entries, 'seconds': seconds}
    (home / manifest.LIST).write_text(json.dumps(tree, indent=2) + '\n')
    renamed = ', '.join(f'{tag} is {name}' for tag, name in names.items() if tag != name)
    doubtful = [name for name in names.values() if ERRORS.search(name) and not metrics.lower_is_better(name)]
    return [
        f'{len(entries)} runs of {len({arm for arm, _ in known})} arms from {logs}',
        *([f'scalars under the names of a report: {renamed}'] if renamed else []),
        *(f'{name}: a report takes more of it for better' for name in doubtful),
        *bad,
    ]


def arm_and_seed(path: str, otherwise: str) -> tuple[str, int]:
    """Returns the arm and the seed of a run's path: 'lr=1/seed_3/tensorboard' is seed 3 of 'lr=1'.

    An arm that would have no name is called `otherwise`.
    """
    path = path.removesuffix('tensorboard').strip('./')
    found = [*SEED.finditer(path)]
    seed = int(found[-1][1]) if found else 0
    arm = path[: found[-1].start()] + path[found[-1].end() :] if found else path
    return arm.strip('/') or otherwise, seed


def named(tags: Iterable[str]) -> dict[str, str]:
    """Returns the name SPLIT/SCORE of each tag: 'val_loss' and 'Loss/val' become valid/loss, 'loss' train/loss.

    Of tags that would have the same name, all but the first keep their own.
    """
    found: dict[str, str] = {}
    for tag in sorted(tags):
        name = _name(tag)
        found[tag] = name if name not in found.values() else tag if '/' in tag else f'train/{tag}'
    return found


def _name(tag: str) -> str:
    if tag.partition('/')[0] in SPLITS:
        return tag
    first, last = re.match(r'([A-Za-z]+)[/_](.+)', tag), re.match(r'(.+)[/_]([A-Za-z]+)$', tag)
    if first and (split := SPLIT_OF.get(first[1].lower())):
        return f'{split}/{first[2].lower()}'
    if last and (split := SPLIT_OF.get(last[2].lower())):
        return f'{split}/{last[1].lower()}'
    return tag if '/' in tag else f'train/{tag.lower()}'


def _safe(arm: str) -> str:
    """Returns an arm's name as that of a directory."""
    name = re.sub(r'[^\w.+=,-]+', '-', arm, flags=re.ASCII)[: trials.LONGEST]
    return arm if name == arm else f'{name}~{hashing.digest_json(arm, size=4)}'


def _runs(logs: pathlib.Path, bad: list[str]) -> dict[pathlib.Path, Found]:
    """Returns the runs in `logs` that have scalars, by their directories."""
    found: dict[pathlib.Path, Found] = {}
    for place in sorted({file.parent for file in logs.rglob(FILES)}):
        run, home = _scalars(place, bad), place.parent if place.name == 'tensorboard' and place != logs else place
        if split := SPLIT_OF.get(home.name.lower()) if home != logs else None:
            home = home.parent
        rows, seconds = found.get(home, Found({}, 0.0))
        for step, row in run.rows.items():
            rows.setdefault(step, {}).update({_of_split(tag, split): value for tag, value in row.items()})
        if rows:
            found[home] = Found(dict(sorted(rows.items())), max(seconds, run.seconds))
    return dict(sorted(found.items()))


def _of_split(tag: str, split: str | None) -> str:
    """Returns the tag of a scalar in the directory of a split: 'valid/loss' of 'epoch_loss' and 'loss'."""
    own = any(word in SPLIT_OF for word in re.split('[/_]', tag.lower()))
    return tag if split is None or own else f'{split}/{tag.removeprefix("epoch_")}'


def _scalars(place: pathlib.Path, bad: list[str]) -> Found:
    """Returns the scalars of all event files of a directory, in the order in which they began.

    What a run repeats after it was resumed replaces what it had written from there on, as TensorBoard shows it.
    """
    rows: dict[int, dict[str, float]] = {}
    times = []
    for file in sorted(file for file in place.glob(FILES) if file.is_file()):
        try:
            for event in tensorboard.read(file):
                times.append(event.wall_time)
                if event.restarts_at:
                    rows = {step: row for step, row in rows.items() if step < event.restarts_at}
                if event.numbers:
                    rows.setdefault(event.step, {}).update(event.numbers)
        except (UserError, OSError) as error:
            bad.append(str(error))
    return Found(rows, max(times) - min(times) if times else 0.0)


def _write_run(place: pathlib.Path, run: Found, names: Mapping[str, str]) -> None:
    place.mkdir(parents=True)
    scores: dict[str, dict[str, float | None]] = {}
    lines = []
    for step, row in run.rows.items():
        numbers = {names[tag]: writers.rounded(value) for tag, value in row.items()}
        lines.append(json.dumps({'step': step, **numbers}) + '\n')
        for name, value in row.items():
            split, _, score = names[name].partition('/')
            if score not in FACTS:
                scores.setdefault(split, {})[score] = value if math.isfinite(value) else None
    (place / 'metrics.jsonl').write_text(''.join(lines))
    (place / trials.RESULT).write_text(json.dumps(scores) + '\n')
