"""What is trained next, by what is in the sweep's directory."""

import json
import pathlib
from typing import Any

import pytest

from small_sweeps import TINY
from tformer import config
from tformer.lab.sweep import grid, jobs, manifest, plan, product, seeds, trials
from tformer.lab.sweep.jobs import Job, State, Wait, first_free
from tformer.lab.sweep.leases import Holder, Leases
from tformer.lab.sweep.trials import Trial


class Directory:
    """A sweep's directory, as a host sees it, beside another host that trains."""

    def __init__(self, home: pathlib.Path, made: list[Trial]):
        self.home, self.made = home, made
        manifest.claim(TINY, made, home)
        self.state = State(home, Leases(home / 'leases', Holder('here', 1, 1)))
        self.other = Leases(home / 'leases', Holder('there', 1, 1))

    def next(self, together: int = 1) -> Any:
        """The numbers of the trials of the next job, or what else is chosen."""
        self.state.look()
        chosen = first_free(self.state, self.made, together)
        return [self.made.index(trial) for trial in chosen.trials] if isinstance(chosen, Job) else chosen

    def lease(self, number: int, deaths: int | None = None) -> None:
        self.other.look()
        held = self.other.take(self.made[number].directory)
        if deaths is not None:
            held.release(deaths=deaths)

    def write(self, number: int, name: str, text: str = '{}') -> None:
        (self.home / self.made[number].directory / name).write_text(text)


def in_seeds(home: pathlib.Path, count: int, **fields: object) -> Directory:
    base = config.override(TINY, {name.replace('__', '.'): value for name, value in fields.items()})
    return Directory(home, trials.trials(base, seeds(count)))


def test_the_next_is_the_first_that_nothing_is_known_of(tmp_path: pathlib.Path) -> None:
    of = in_seeds(tmp_path, 5)
    assert of.next() == [0]
    of.write(0, 'result.json')
    of.write(1, 'error.txt', 'it failed\n')
    of.lease(2)
    of.state.stopped.add(of.made[3].directory)
    assert of.next() == [4]
    of.lease(4)
    assert of.next() == Wait('2 trials are trained by others')
    of.write(2, 'result.json')
    of.write(4, 'error.txt', 'of a life before\n')  # it trains again
    states = ['done', 'failed', 'done', 'stopped', 'leased']
    assert [of.state.of(trial) for trial in of.made] == states
    of.write(4, 'result.json')
    assert of.next() is None


def test_pruned_arms_do_not_begin(tmp_path: pathlib.Path) -> None:
    made = trials.trials(TINY, product(grid({'optimizer.learning_rate': [1.0, 2.0, 3.0]}), seeds(2)))
    of = Directory(tmp_path, made)
    assert jobs.pruned(tmp_path) == set()
    lines = ['{"arm": "learning_rate=2.0"}', '5', '{"other": 1}', '', '{"arm": "baseline"}', '{"arm": "learning_ra']
    (tmp_path / jobs.PRUNED).write_text('\n'.join(lines))
    of.write(1, 'config.json')  # it has begun
    assert jobs.pruned(tmp_path) == {'learning_rate=2.0', 'baseline'}
    assert of.next() == [1] and [of.state.of(trial) for trial in made] == [
        'pruned',
        'free',
        *2 * ['pruned'],
        *2 * ['free'],
    ]


def test_what_is_left_is_grouped_anew(tmp_path: pathlib.Path) -> None:
    """Six seeds were there, of which some are done; two have been added."""
    of = in_seeds(tmp_path, 8)
    for number in (0, 1, 2, 3, 4):
        of.write(number, 'result.json')
    assert of.next(4) == [5, 6, 7]
    of.lease(5)
    assert of.next(4) == [6, 7] and of.next(1) == [6]


def test_those_that_have_begun_together_go_on_together(tmp_path: pathlib.Path) -> None:
    of = in_seeds(tmp_path, 6)
    begun = json.dumps([of.made[number].directory for number in (0, 2)])
    for number in (0, 2):
        of.write(number, jobs.TOGETHER, begun)
    assert of.next(4) == [0, 1, 2, 3]  # they were to begin, but have not
    of.write(0, 'config.json')
    of.write(2, 'config.json')
    assert of.next(4) == [0, 2] and of.next(1) == [0]
    of.write(0, 'result.json')
    assert of.next(4) == [1, 3, 4, 5]
    for number in (1, 3, 4, 5):
        of.lease(number)
    assert of.next(4) == [0, 2]  # the slice of the one that is done stays
    of.write(2, jobs.TOGETHER, begun[:9])
    assert of.next(4) == [2]


def test_the_plan_shows_the_groups_that_are_trained(tmp_path: pathlib.Path) -> None:
    of = in_seeds(tmp_path, 7)
    for number in (1, 2, 3, 4):  # they have begun together, and one of them is done
        of.write(number, jobs.TOGETHER, json.dumps([of.made[each].directory for each in (1, 2, 3, 4)]))
        of.write(number, 'config.json')
    of.write(2, 'result.json')
    rows = plan.plan(of.made, tmp_path, together=4).splitlines()
    shown = dict(enumerate(row.split()[-1] for row in rows[1:8]))
    assert [number for number in shown if shown[number] == '1'] == [0, 5, 6] == of.next(4)
    assert [number for number in shown if shown[number] == '2'] == [1, 3, 4] and shown[2] == 'done'
    assert '2 programs' in rows[-1]
    for number in (0, 5, 6):
        of.lease(number)
    assert of.next(4) == [1, 2, 3, 4]


def test_a_trial_that_a_process_died_of_trains_alone(tmp_path: pathlib.Path) -> None:
    of = in_seeds(tmp_path, 4)
    of.lease(1, deaths=1)
    assert of.next(4) == [0, 2, 3]
    for number in (0, 2, 3):
        of.lease(number)
    assert of.next(4) == [1]


@pytest.mark.parametrize(
    ('fields', 'sizes'),
    [
        ({}, [4]),
        ({'data__batching': 'bucket'}, [4]),
        ({'data__train_examples': 9}, [4]),
        ({'train__num_steps': None, 'train__num_epochs': 1.0}, [1, 1, 1, 1]),
    ],
)
def test_seeds_train_together_whatever_the_shapes_of_their_batches(tmp_path, fields, sizes) -> None:
    of, found = in_seeds(tmp_path, 4, **fields), []
    while isinstance(chosen := of.next(8), list):
        found.append(len(chosen))
        for number in chosen:
            of.write(number, 'result.json')
    assert found == sizes
