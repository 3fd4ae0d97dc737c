"""What a report says of a search: the searched runs decide nothing, and what they cost and found is told."""

import itertools
import json
import math
import pathlib

import pytest

from small_searches import SPACE, Worker
from tformer.errors import UserError
from tformer.lab.report import render, report_data, results, searched, write
from tformer.lab.sweep import asha, manifest, optuna_study, search, search_jobs


def ran(home: pathlib.Path, jobs: int | None = None, **fields) -> Worker:
    """A search on paper with the list of its trials, whole or its first jobs."""
    worker = Worker(home, search(SPACE, 'random', **{'trials': 12, 'rungs': asha(rungs=2), 'confirm': 3} | fields))
    for _ in range(10**6 if jobs is None else jobs):
        if (job := worker.next()) is None:
            break
        worker.train(job)
    manifest.write(worker.jobs.base, worker.jobs.listed(home), home, {})
    return worker


@pytest.fixture(scope='module')
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return ran(tmp_path_factory.mktemp('searched') / 'x')


def test_only_runs_with_fresh_seeds_are_arms_and_the_best_of_the_search_is_one(worker: Worker) -> None:
    read = results.read(worker.home)
    assert len(read.arms) == 2 and next(iter(read.arms)) == 'baseline' and read.ended
    assert [run.seed for runs in read.arms.values() for run in runs] == [1, 2, 3] * 2
    assert {run.seed for run in read.searched} == {0} and len(read.searched) == 12
    found = report_data.report(read)
    assert found.search.best.name == found.rows[1].arm and found.rows[1].label in ('better', 'worse', 'within noise')
    ends = [worker.curve(trial, 270) for trial in worker.jobs.confirming(found.search.best.overrides)]
    assert found.search.fresh == pytest.approx(ends, abs=1e-6)


def test_arms_are_told_by_how_far_they_got_and_what_they_had_there(worker: Worker) -> None:
    found = searched.search(results.read(worker.home))
    assert found.steps == [30, 90, None] and found.rule == 'asha' and found.num_draws == 12
    assert [found.count(rung) for rung in range(3)] == [
        len({name for name, until in worker.asked if until == step and name.endswith('seed_0')})
        for step in (30, 90, None)
    ]
    known = [arm for arm in found.arms if math.isfinite(arm.value)]
    assert [arm.rung for arm in known] == sorted((arm.rung for arm in known), reverse=True)
    for one, other in itertools.pairwise(known):
        assert one.rung > other.rung or one.value <= other.value
    (runs,) = (runs for runs in worker.jobs.made(worker.draws()) if runs[0].name == known[-1].name)
    assert known[-1].value == min(worker.curve(runs[0], step) for step in (10, 20, 30))
    values = [each.value for each in found.progress]
    assert values == sorted(values, reverse=True) and found.progress[-1].name == found.best.name


def test_the_section_is_in_the_report_and_its_numbers_are_those_of_the_runs(worker: Worker) -> None:
    write.write(report_data.report(results.read(worker.home)))
    text = (worker.home / 'report.md').read_text()
    section = text.partition('## The search\n')[2].partition('\n## ')[0]
    assert (
        'The sampler `random` drew 12 arms, compared by `valid/loss`. `asha` paused them at rungs: 12 reached'
        in section
    )
    assert 'with 3 fresh seeds. The searched runs decide nothing' in section and 'The best 10 of 12 arms' in section
    rated = '| `optimizer.learning_rate` | ' in section.partition('| field | importance |')[2]
    assert rated == optuna_study.is_installed() and (
        rated or "Optuna, which rates them, is not installed: pip install 'tformer" in section
    )
    assert text.count('learning_rate=') > 0 and '12 trials' not in text.partition('## The search')[0]
    assert (worker.home / 'report.html').read_text().count('The search') >= 1


def test_an_arm_that_failed_is_named_and_has_not_reached_the_rung_that_it_trained_to(tmp_path: pathlib.Path) -> None:
    home = ran(tmp_path / 'x', trials=4, confirm=2).home
    before = searched.search(results.read(home))
    paused = next(run for run in results.read(home).searched if run.state == results.UNFINISHED)
    (home / paused.directory / 'error.txt').write_text('tformer: too large\n')
    found = searched.search(results.read(home))
    assert [found.count(rung) for rung in range(3)] == [before.count(rung) for rung in range(3)]
    assert before.failed == [] and found.failed == [paused.arm]
    assert f' 1 arm failed: `{paused.arm}`.' in render.markdown(report_data.report(results.read(home)))


def test_before_it_has_ended_a_search_gives_no_verdict(tmp_path: pathlib.Path) -> None:
    ran(tmp_path / 'early', jobs=1)
    ran(tmp_path / 'half', jobs=8)
    for home in (tmp_path / 'early', tmp_path / 'half'):
        read = results.read(home)
        assert list(read.arms) == ['baseline'] and not read.ended
        write.write(report_data.report(read))
        assert 'before any verdict.' in (home / 'report.md').read_text()


def test_a_search_that_confirms_nothing_gives_no_verdict(tmp_path: pathlib.Path) -> None:
    ran(tmp_path / 'x', trials=4, rungs=None, confirm=0)
    found = report_data.report(results.read(tmp_path / 'x'))
    assert len(found.rows) == 4 and not found.results.ended
    assert not {row.label for row in found.rows} & {'better', 'worse', 'within noise'}
    write.write(found)
    text = (tmp_path / 'x' / 'report.md').read_text()
    assert 'No arm was run again with fresh seeds, so these runs give no verdict' in text
    assert 'are too few to rate fields' in text or 'Optuna, which rates them, is not installed' in text


def test_a_list_that_is_damaged_is_named(tmp_path: pathlib.Path) -> None:
    worker = ran(tmp_path / 'x', trials=2, rungs=None, confirm=2)
    file = worker.home / 'search.json'
    other = json.loads(file.read_text())
    other['draws'][1]['overrides']['train.seed'] = 5
    line = f'{file} is not the list of a search: draw 2 has train.seed, which is not in the space'
    with pytest.raises(UserError, match=f'^{line}$'):
        file.write_text(json.dumps(other))
        search_jobs.read(worker.home, worker.jobs.search)
    del other['draws'][1]['overrides']['train.seed'], other['draws'][1]['overrides']['optimizer.learning_rate']
    for damaged, told in (
        ('{', f'{file}: '),
        (json.dumps({'draws': []}), "is not the list of a search: 'search'"),
        (json.dumps({'search': 1, 'steps': [], 'draws': []}), f'{file} is not the list of a search: '),
        (json.dumps(other), 'draw 2 lacks optimizer.learning_rate'),
    ):
        file.write_text(damaged)
        found = report_data.report(results.read(worker.home))
        assert found.search is None and len(found.results.damaged) == 1 and told in found.results.damaged[0]
        assert 'Left out, because it cannot be read: ' in render.markdown(found)
