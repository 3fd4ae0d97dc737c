"""Watching runs: only what is new is read, half-written files are survived, and peeked labels are named so."""

import asyncio
import html
import io
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import browsing
from browsing import needs_chromium
from small_sweeps import TINY
from tformer import __main__ as command_line
from tformer import config
from tformer.errors import UserError
from tformer.lab.live import following, requests, terminal, text, trial, watched
from tformer.lab.live.following import Follower
from tformer.lab.live.watched import Watched
from tformer.lab.statistics import comparison
from tformer.lab.sweep import grid, jobs, leases, manifest, product, runner, seeds, trials
from tformer.training import stopping, workdir

HOSTILE = '<img src=x onerror=console.error(1)>[red]\x1b[31m'


def row(step: int, **numbers: float | None) -> str:
    return json.dumps({'step': step, **{f'{name}/loss': value for name, value in numbers.items()}}) + '\n'


def sweep(home: pathlib.Path, rates: Sequence[float] = (0.001, 0.002), count: int = 3) -> list[trials.Trial]:
    """The directory of a sweep that nobody has begun."""
    made = trials.trials(TINY, product(grid({'optimizer.learning_rate': rates}), seeds(count)))
    manifest.claim(TINY, made, home)
    return made


def write(place: pathlib.Path, *rows: str, steps: int = 40) -> None:
    """What a run that has begun leaves."""
    place.mkdir(parents=True, exist_ok=True)
    stated = place / trials.STATED
    begun = config.from_json(stated) if stated.is_file() else config.override(TINY, {'train.seed': 7})
    (place / 'config.json').write_text(json.dumps(config.to_dict(config.override(begun, {'train.num_steps': steps}))))
    (place / 'metrics.jsonl').write_text(''.join(rows))


def end(place: pathlib.Path, loss: float) -> None:
    write(place, row(10, train=loss + 1), row(40, train=loss), row(40, valid=loss))
    total = {'total': 80.0}
    (place / 'result.json').write_text(json.dumps({'test': {'step': 40, 'loss': loss}, 'wall_time': total}))


# ------------------------------------------------------------------------------------------------------------ following


@settings(max_examples=30)
@given(st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_however_a_file_grows_each_row_is_read_once_and_whole(tmp_path_factory, cuts, shuffled) -> None:
    file = tmp_path_factory.mktemp('rows') / 'metrics.jsonl'
    whole = ''.join(row(step, train=step / 3) for step in range(12)).encode()
    follower, seen = Follower(file), list[dict[str, Any]]()
    assert follower.read() == (False, [])
    for cut in [*sorted(len(whole) * cut // 60 for cut in cuts), len(whole)]:
        file.write_bytes(whole[:cut])
        anew, rows = follower.read()
        assert not anew
        seen += rows
    assert [each['step'] for each in seen] == [*range(12)] and follower.error is None
    assert follower.read() == (False, [])


def test_only_what_is_new_is_read(tmp_path, monkeypatch) -> None:
    file = tmp_path / 'metrics.jsonl'
    file.write_text(''.join(row(step, train=1.0) for step in range(1000)))
    follower = Follower(file)
    follower.read()
    parsed = []
    monkeypatch.setattr(following.json_files, 'parse', lambda line: parsed.append(line) or json.loads(line))
    with file.open('a') as more:
        more.write(row(1000, train=0.5) + '{"step": 10')
    assert follower.read() == (False, [{'step': 1000, 'train/loss': 0.5}]) and len(parsed) == 1
    with file.open('a') as more:
        more.write('01}\n')
    assert follower.read() == (False, [{'step': 1001}]) and len(parsed) == 2


def test_a_file_that_a_resumed_run_writes_anew_is_read_anew(tmp_path) -> None:
    file = tmp_path / 'metrics.jsonl'
    old = [row(step, train=1 / 3 + step) for step in range(8)]
    file.write_text(''.join(old))
    follower = Follower(file)
    assert len(follower.read()[1]) == 8
    file.write_text(''.join(old[:4]))
    assert follower.read() == (True, [json.loads(each) for each in old[:4]])
    file.write_text(''.join(old[:2]) + ''.join(row(step, train=2.0) for step in range(2, 20)))  # longer than before
    anew, rows = follower.read()
    assert anew and [each['step'] for each in rows] == [*range(20)]
    file.unlink()
    assert follower.read() == (True, []) and follower.read() == (False, [])


def test_a_row_that_cannot_be_read_is_named_and_the_others_count(tmp_path) -> None:
    file = tmp_path / 'metrics.jsonl'
    file.write_text(row(1, train=1.0) + '{"step": 2, "tr\n' + row(3, train=0.5) + '{"loss": 1}\n')
    follower = Follower(file)
    assert [each['step'] for each in follower.read()[1]] == [1, 3]
    assert follower.error is not None and follower.error.startswith(f'{file}:2: ')


def test_a_file_that_cannot_be_opened_is_named_until_it_can(tmp_path) -> None:
    file = tmp_path / 'metrics.jsonl'
    file.mkdir()
    follower = Follower(file)
    assert follower.read() == (False, []) and follower.error == f'{file}: Is a directory'
    file.rmdir()
    file.write_text(row(1, train=1.0))
    assert len(follower.read()[1]) == 1 and follower.error is None


# --------------------------------------------------------------------------------------------------------------- states


def states(home: pathlib.Path) -> dict[str, str]:
    return {each.directory.removeprefix('learning_rate='): each.state for each in Watched(home).trials}


def test_each_trial_is_in_the_state_that_its_files_say(tmp_path) -> None:
    made = [tmp_path / each.directory for each in sweep(tmp_path, [0.001, 0.002, 0.003, 0.004])]
    assert states(tmp_path) == {
        each.relative_to(tmp_path).as_posix().removeprefix('learning_rate='): 'waiting' for each in made
    }
    end(made[0], 1.0)
    write(made[1], row(10, train=2.0))
    (made[2] / 'error.txt').write_text('ValueError: no\nmore')
    write(made[4], row(10, train=2.0), 'torn\n')
    requests.prune(tmp_path, 'learning_rate=0.003', Watched(tmp_path).trials)
    stopping.request(made[9])
    with workdir.lock(made[3]):
        found = Watched(tmp_path)
    listed = [each.state for each in found.trials]
    assert listed[:6] == ['done', 'paused', 'failed', 'running', 'unreadable', 'waiting']
    assert listed[6:] == ['pruned'] * 3 + ['stopped'] + ['waiting'] * 2
    assert watched.counts(found.trials) == {
        'running': 1, 'waiting': 3, 'done': 1, 'failed': 1, 'paused': 1, 'stopped': 1, 'pruned': 3, 'unreadable': 1,
    }  # fmt: skip
    assert found.trials[4].error == f'{made[4]}/metrics.jsonl:2: Expecting value: line 1 column 1 (char 0)'
    assert found.trials[2].error == 'ValueError: no\nmore' and found.trials[0].scores == {'test/loss': 1.0}


def test_a_trial_that_a_worker_of_another_host_has_leased_runs(tmp_path) -> None:
    made = sweep(tmp_path)
    other = leases.Leases(tmp_path / runner.LEASES, leases.Holder('elsewhere', 1, 1))
    other.look()
    lease = other.take(made[4].directory)
    found = Watched(tmp_path)
    assert [each.state for each in found.trials].count('running') == 1 and found.trials[4].state == 'running'
    lease.release()
    found.refresh()
    assert found.trials[4].state == 'waiting'


def test_a_refresh_says_what_has_changed_and_sees_trials_that_are_added(tmp_path) -> None:
    made = sweep(tmp_path)
    found = Watched(tmp_path)
    assert found.version == 1 and not found.refresh() and found.version == 1
    place = tmp_path / made[1].directory
    write(place, row(10, train=2.0, valid=None))
    assert found.refresh() and found.changed == [1, 2, 1, 1, 1, 1]
    assert found.trials[1].curves['train/loss'] == {10: 2.0} and math.isnan(found.trials[1].curves['valid/loss'][10])
    assert (found.trials[1].step, found.trials[1].num_steps) == (10, 40)
    kept = found.trials[1]
    more = trials.trials(TINY, product(grid({'optimizer.learning_rate': [0.001, 0.002, 0.005]}), seeds(3)))
    manifest.claim(TINY, more, tmp_path)
    assert found.refresh() and len(found.trials) == 9 and found.trials[1] is kept and found.changed[1] == 2


def test_a_directory_of_workdirs_and_a_single_workdir_are_watched_too(tmp_path, monkeypatch) -> None:
    write(tmp_path / 'a', row(5, train=1.0))
    write(tmp_path / 'b', row(6, train=1.0), steps=80)
    assert [(each.arm, each.seed) for each in Watched(tmp_path).trials] == [('baseline', 7), ('num_steps=80', 7)]
    assert [(each.arm, each.step) for each in Watched(tmp_path / 'b').trials] == [('b', 6)]
    monkeypatch.chdir(tmp_path / 'a')
    assert Watched('.').arms == ['a']
    (tmp_path / 'none').mkdir()
    for home, metric in ((tmp_path / 'none', None), (tmp_path / 'no', None)):
        with pytest.raises(UserError, match=r'no runs are here: neither sweep\.json nor \*/config\.json'):
            Watched(home, metric)
    (tmp_path / 'none' / manifest.LIST).write_text('{"trials": [{"name": "a", "seed": 0, "directory": "/etc"}]}')
    with pytest.raises(UserError, match=r'sweep\.json is not the list of a sweep: '):
        Watched(tmp_path / 'none')
    with pytest.raises(UserError, match=r"--baseline=num_steps=8 is not an arm; did you mean 'num_steps=80'\?"):
        Watched(tmp_path, baseline='num_steps=8')


def test_the_time_left_is_by_the_steady_speed_of_those_that_run_and_the_time_of_those_that_ended(tmp_path) -> None:
    made = [tmp_path / each.directory for each in sweep(tmp_path)]
    assert Watched(tmp_path).seconds_left() is None
    end(made[0], 1.0)  # 80 seconds
    assert Watched(tmp_path).seconds_left() == 5 * 80
    spent = {'total': 35.0, 'compiling': 10.0, 'lost_to_restarts': 5.0}  # 20 seconds for 10 of 40 steps
    for place in made[1:3]:
        write(place, row(10, train=1.0))
        (place / 'wall_time.json').write_text(json.dumps(spent))
    with workdir.lock(made[1]), workdir.lock(made[2]):
        found = Watched(tmp_path)
        assert [each.left for each in found.trials] == [None, 60, 60, None, None, None]
        assert found.seconds_left() == (2 * 60 + 3 * 80) / 2
    assert found.trials[1].left == 60
    found.refresh()
    assert found.trials[1].left is None


# ------------------------------------------------------------------------------------------------------------- verdicts


def test_labels_are_those_of_the_report_and_peeked_until_all_have_ended(tmp_path) -> None:
    made = [tmp_path / each.directory for each in sweep(tmp_path, count=4)]
    losses = [[1.0, 1.01, 1.02], [2.0, 2.01, 2.04]]
    for arm, values in enumerate(losses):
        for seed, loss in enumerate(values):
            end(made[4 * arm + seed], loss)
    found = Watched(tmp_path)
    values = {arm: dict(enumerate(each)) for arm, each in zip(found.arms, losses, strict=True)}
    rows = comparison.summary(values, 'baseline', lower_is_better=True, resamples=0)
    assert repr([*found.verdicts().values()]) == repr(rows) and found.metric == 'test/loss'
    assert not found.is_ended and text.table(found)[0][-1] == 'peeked'
    assert text.about_verdicts(found).startswith('peeked by test loss against baseline: ')
    assert found.verdicts()['learning_rate=0.002'].label == 'worse' == text.table(found)[2][-1]
    (made[3] / 'error.txt').write_text('no')
    end(made[7], 2.02)
    found.refresh()
    assert found.is_ended and text.table(found)[0][-1] == 'verdict'
    assert text.table(Watched(tmp_path))[0][-2:] == ('test loss', 'verdict')  # at the first look
    assert found.verdicts()['baseline'].runs.failed == 1
    assert text.about_verdicts(found) == 'verdicts by test loss against baseline'
    for each in made[4:]:
        (each / 'result.json').unlink()
        (each / 'config.json').unlink()
        (each / 'metrics.jsonl').unlink()
    found.refresh()
    assert not found.is_ended
    requests.prune(tmp_path, 'learning_rate=0.002', found.trials)
    found.refresh()
    assert found.is_ended
    for seed, loss in enumerate([*losses[1], 2.02]):
        end(made[4 + seed], loss)
    other = Watched(tmp_path, baseline='learning_rate=0.002')
    assert other.arms[0] == 'learning_rate=0.002' and other.verdicts()['baseline'].label == 'fails more often'
    with pytest.raises(UserError, match=r"^--metric=test/los is in no result; did you mean 'test/loss'\?"):
        Watched(tmp_path, metric='test/los')
    assert Watched(tmp_path, metric='valid/loss').verdicts() == {}  # it is a curve
    (tmp_path / 'begun').mkdir()
    sweep(tmp_path / 'begun')
    assert Watched(tmp_path / 'begun', metric='test/los').verdicts() == {}  # there may be one


def test_runs_by_which_an_arm_was_chosen_decide_nothing(tmp_path) -> None:
    made = [tmp_path / each.directory for each in sweep(tmp_path)]
    listed = json.loads((tmp_path / manifest.LIST).read_text())
    for entry in listed['trials'][:3]:
        entry['searched'] = True
    (tmp_path / manifest.LIST).write_text(json.dumps(listed))
    for number, place in enumerate(made):
        end(place, 1.0 + number)
    found = Watched(tmp_path)
    assert (found.baseline, found.arms[0]) == ('learning_rate=0.002', 'baseline') and found.is_ended
    assert [*found.verdicts()] == ['learning_rate=0.002'] and found.verdicts()[found.baseline].runs.mean == 5.0
    for entry in listed['trials']:
        entry['searched'] = True
    (tmp_path / manifest.LIST).write_text(json.dumps(listed))
    assert not Watched(tmp_path).is_ended and len(Watched(tmp_path).verdicts()) == 2


def test_arms_that_a_search_has_paused_take_no_time(tmp_path) -> None:
    made = [tmp_path / each.directory for each in sweep(tmp_path)]
    end(made[0], 1.0)
    write(made[1], row(10, train=1.0))
    (made[1] / 'wall_time.json').write_text(json.dumps({'total': 20.0}))
    assert Watched(tmp_path).trials[1].state == 'paused' and Watched(tmp_path).seconds_left() == 5 * 80
    listed = json.loads((tmp_path / manifest.LIST).read_text())
    listed['trials'][1]['searched'] = True
    (tmp_path / manifest.LIST).write_text(json.dumps(listed))
    assert Watched(tmp_path).seconds_left() == 4 * 80


def test_verdicts_that_take_long_are_not_computed_at_every_look(tmp_path, monkeypatch) -> None:
    made = [tmp_path / each.directory for each in sweep(tmp_path)]
    now, calls = [100.0], []

    def summary(values, *_, **__):
        now[0] += 2.0
        return calls.append(1) or []

    monkeypatch.setattr(watched.comparison, 'summary', summary)
    monkeypatch.setattr(watched.time, 'monotonic', lambda: now[0])
    found = Watched(tmp_path)
    for number, seconds in enumerate([0, 1, 18, 1, 1]):
        now[0] += seconds
        end(made[number], 1.0 + number)
        found.refresh()
        found.verdicts()
        assert len(calls) == [1, 1, 1, 2, 2][number]
    end(made[5], 2.0)
    found.refresh()
    found.verdicts()
    found.verdicts()
    assert len(calls) == 3  # all have ended


# ------------------------------------------------------------------------------------------------------------- requests


def test_a_pruned_arm_does_not_begin_and_a_stopped_trial_is_left_out_until_it_is_resumed(tmp_path) -> None:
    made = sweep(tmp_path)
    arm = made[3].name
    write(tmp_path / made[3].directory, row(10, train=1.0))
    (tmp_path / jobs.PRUNED).write_text('{"arm": "torn')
    found = Watched(tmp_path)
    assert requests.prune(tmp_path, arm, found.trials) == f'pruned {arm}: 2 trials will not begin'
    requests.prune(tmp_path, arm, found.trials)
    assert jobs.pruned(tmp_path) == {arm} and (tmp_path / jobs.PRUNED).read_text().count(arm) == 1
    state = jobs.State(tmp_path, leases.Leases(tmp_path / runner.LEASES))
    state.look()
    assert [state.of(each) for each in made] == ['free'] * 4 + ['pruned'] * 2
    requests.stop(made[0].directory, found.trials)
    found.refresh()
    requests.stop(arm, found.trials)
    assert [state.of(each) for each in made] == ['stopped', 'free', 'free', 'stopped', 'pruned', 'pruned']
    found.refresh()
    assert [each.state for each in found.trials][:4] == ['stopped', 'waiting', 'waiting', 'stopped']
    assert requests.resume(made[0].directory, found.trials).startswith('1 trial of baseline/seed_0 may go on')
    assert state.of(made[0]) == 'free' and state.of(made[3]) == 'stopped'


def test_a_name_that_is_not_there_is_one_line(tmp_path) -> None:
    made = sweep(tmp_path)
    found = Watched(tmp_path)
    end(tmp_path / made[0].directory, 1.0)
    found.refresh()
    with pytest.raises(
        UserError, match=r"--prune=learning_rate=0\.02 is not an arm; did you mean 'learning_rate=0\.002'"
    ):
        requests.prune(tmp_path, 'learning_rate=0.02', found.trials)
    with pytest.raises(UserError, match='--stop=baseline/seed_9 is neither an arm nor a trial; did you mean'):
        requests.stop('baseline/seed_9', found.trials)
    with pytest.raises(UserError, match='--stop=baseline/seed_0: no trial of it runs or waits'):
        requests.stop('baseline/seed_0', found.trials)
    with pytest.raises(UserError, match='--resume=baseline: no trial of it was asked to stop'):
        requests.resume('baseline', found.trials)


# ----------------------------------------------------------------------------------------------------------------- text


def test_bars_and_curves_are_thinned_by_means() -> None:
    assert text.sparkline([1.0, 2.0, 8.0], '0123456789') == '019' and text.sparkline([2.0, 2.0]) == '▁▁'
    assert text.sparkline([]) == ''
    curve = {step: float(step) for step in range(1, 10)} | {4: math.nan}
    assert watched.thinned(curve, 4) == ([1.5, 4.0, 6.5, 8.5], [1.5, 4.0, 6.5, 8.5])
    assert watched.thinned({5: math.inf}, 4) == ([], []) == watched.thinned({}, 4)
    assert [text.duration(x) for x in (5, 600, 7200, 400000)] == [
        'about 5 seconds', 'about 10 minutes', 'about 2.0 hours', 'about 4.6 days',
    ]  # fmt: skip


def test_once_prints_the_state_and_elsewhere_a_line_is_printed_for_each_change(tmp_path, capsys, monkeypatch) -> None:
    made = [tmp_path / each.directory for each in sweep(tmp_path)]
    end(made[0], 1.0)
    (made[1] / 'error.txt').write_text('ValueError: no')
    command_line.main(['tformer', 'watch', str(tmp_path), '--once'])
    said = capsys.readouterr().out
    assert said.startswith(f'{tmp_path}: 6 trials: 4 waiting, 1 done, 1 failed; about 5 minutes left\npeeked by ')
    assert '\nbaseline             1 waiting, 1 done, 1 failed  13/40' in said
    assert said.endswith('\nbaseline/seed_1: failed: ValueError: no\n')

    def later(seconds: float) -> None:
        for place in made[2:]:
            end(place, 2.0)

    monkeypatch.setattr(terminal.time, 'sleep', later)
    command_line.main(['tformer', 'watch', str(tmp_path)])
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        'baseline/seed_0: done, test/loss 1', 'baseline/seed_1: failed, ValueError: no', 'baseline/seed_2: waiting',
    ]  # fmt: skip
    at = lines.index(f'{tmp_path}: 6 trials: 4 waiting, 1 done, 1 failed; about 5 minutes left')
    assert lines[at + 1] == 'baseline/seed_2: done, test/loss 2'
    assert f'{tmp_path}: 6 trials: 5 done, 1 failed' in lines


def test_mistakes_on_the_command_line(tmp_path) -> None:
    sweep(tmp_path)
    for given_flags, said in (
        ([], 'watch takes one directory, not 0'),
        ([tmp_path, '--prune=a', '--stop=b'], '--prune: one thing at a time'),
        ([tmp_path, '--stop=a', '--serve'], '--stop: one thing at a time'),
        ([tmp_path, '--host=0.0.0.0'], '--host is of --serve: give both'),
        ([tmp_path, '--config.train.seed=1'], 'watch takes no --config'),
        ([tmp_path, '--serve=x'], 'flag --serve=x: '),
        ([tmp_path, '--serve=70000'], 'flag --serve=70000: '),
    ):
        with pytest.raises(UserError, match=said):
            command_line.main(['tformer', 'watch', *map(str, given_flags)])


def test_a_port_is_given_or_the_usual_one() -> None:
    for given_flag, port in (([], None), (['--serve'], 8010), (['--serve=0'], 0), (['--serve=9000'], 9000)):
        assert command_line.parse(['tformer', 'watch', 'DIR', *given_flag])[3].serve == port


# ------------------------------------------------------------------------------------------------------------- terminal


def shown(screen: terminal.Screen, width: int = 110, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen.render(width, height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_terminal_shows_arms_and_the_log_of_a_trial_and_fits(tmp_path) -> None:
    made = [tmp_path / each.directory for each in sweep(tmp_path, [0.001 * rate for rate in range(1, 31)], 1)]
    end(made[0], 1.0)
    write(made[4], row(10, train=2.0))
    (made[4] / 'log.txt').write_text('first\n\x1b[31mred\x1b[0m [bold]x[/bold]\nlast\n')
    with workdir.lock(made[4]):
        screen = terminal.Screen(Watched(tmp_path))
        lines = shown(screen)
        assert len(lines) <= 24 and all(len(line) <= 110 for line in lines)
        whole = shown(screen, width=110 + len(str(tmp_path)))[0]
        assert whole.startswith(f'{tmp_path}: 30 trials: 1 running, 28 waiting, 1 done')
        assert lines[3].startswith('baseline ') and lines[4].startswith('learning_rate=0.005 ')  # which runs
        assert screen.press('down') and screen.arm == 'learning_rate=0.005'
        lines = shown(screen)
        assert any('learning_rate=0.005/seed_0: running, step 10' in line for line in lines)
        assert [line.strip() for line in lines[-6:-2]][1:] == ['first', '[31mred [0m [bold]x[/bold]', 'last']
        for _ in range(28):
            screen.press('down')
        assert any(line.startswith(screen.arm) for line in shown(screen)) and screen.arm == 'learning_rate=0.03'
        assert screen.press('down') and screen.arm == 'baseline'
        assert all(len(line) <= 60 for line in shown(screen, 60, 12)) and len(shown(screen, 60, 12)) <= 12
    assert not screen.press('q')


def test_keys_ask_before_they_prune_or_stop(tmp_path) -> None:
    made = sweep(tmp_path)
    screen = terminal.Screen(Watched(tmp_path))
    shown(screen)
    screen.press('down')
    screen.press('p')
    assert shown(screen)[-1].startswith('prune learning_rate=0.002: ') and jobs.pruned(tmp_path) == set()
    screen.press('n')
    assert screen.said == 'nothing was done' and jobs.pruned(tmp_path) == set()
    screen.press('p')
    screen.press('y')
    assert jobs.pruned(tmp_path) == {'learning_rate=0.002'} and '3 trials will not begin' in screen.said
    screen.press('up')
    screen.press('right')
    for key in ('s', 'y'):
        screen.press(key)
    assert [stopping.is_stopped(tmp_path / each.directory) for each in made[:3]] == [False, True, False]
    screen.press('s')
    assert screen.press('y') and screen.said.startswith('asked 1 trial of ')
    end(tmp_path / made[0].directory, 1.0)


def test_arms_that_a_terminal_shows_alike_are_different_ones(tmp_path) -> None:
    sweep(tmp_path, (0.001, 0.002, 0.003), 1)
    found = Watched(tmp_path)
    names = {'learning_rate=0.002': 'a=x\x1by', 'learning_rate=0.003': 'a=x\x1fy'}
    for each in found.trials:
        each.arm = names.get(each.arm, each.arm)
    screen = terminal.Screen(found)
    chosen = []
    for _ in names:
        shown(screen)
        screen.press('down')
        chosen.append(screen.arm)
    assert sorted(chosen) == sorted(names.values())


def test_keys_that_come_together_are_read_one_after_the_other(monkeypatch) -> None:
    import pty

    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as held:
        monkeypatch.setattr(terminal.sys, 'stdin', held)
        with terminal.keyboard() as read:
            os.write(ours, b'\x1b[B\x1b[Apy\x1b[Dq')
            assert [read(1.0) for _ in range(7)] == ['down', 'up', 'p', 'y', 'left', 'q', None]
    os.close(ours)


def test_a_long_name_keeps_its_ends_and_other_encodings_their_own_bars() -> None:
    assert terminal._middle('learning_rate=0.00012', 12) == 'learn….00012' and terminal._middle('ab', 12) == 'ab'
    assert terminal.bars_of(io.TextIOWrapper(io.BytesIO(), 'latin-1')) == text.ASCII_BARS
    assert terminal.bars_of(io.TextIOWrapper(io.BytesIO(), 'utf-8')) == text.BARS


# ----------------------------------------------------------------------------------------------------------------- page


def ask(
    app: Any, path: str, query: str = '', host: str = '127.0.0.1:8010', method: str = 'GET'
) -> tuple[int, Any, str]:
    """Returns (status, headers, body) of a request to an ASGI application."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {'type': 'http.request', 'body': b'', 'more_body': False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        'type': 'http', 'asgi': {'version': '3.0'}, 'http_version': '1.1', 'method': method, 'path': path,
        'query_string': query.encode(), 'headers': [(b'host', host.encode())], 'scheme': 'http',
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]['headers']}
    return sent[0]['status'], headers, b''.join(message.get('body', b'') for message in sent[1:]).decode()


@pytest.fixture
def served(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(the application, the workdirs of a sweep)."""
    pytest.importorskip('starlette')
    from tformer.lab.live import page

    monkeypatch.setattr(page, 'FRESH', 0.0)
    made = [tmp_path / each.directory for each in sweep(tmp_path)]
    return page.make_app(Watched(tmp_path), '127.0.0.1'), made


def test_the_page_is_told_what_is_new_and_no_more(served) -> None:
    app, made = served
    status, headers, body = ask(app, '/state')
    first = json.loads(body)
    assert status == 200 and len(first['curves']) == 2 and len(first['arms']) == 2 and 'trials' not in first
    same = f'life={first["life"]}&version={first["version"]}'
    assert json.loads(ask(app, '/state', same)[2]) == {'life': first['life'], 'version': first['version']}
    write(made[4], row(10, train=2.0), row(20, train=1.0))
    found = json.loads(ask(app, '/state', f'{same}&arm=learning_rate%3D0.002')[2])
    assert found['curves'] == {'learning_rate=0.002': {'train/loss': [[10, 20], [2, 1]], 'valid/loss': [[], []]}}
    assert [each['step'] for each in found['trials']] == [0, 20, 0] and found['heads'] == ['-', 'peeked']
    other = json.loads(ask(app, '/state', f'life=other&version={found["version"]}')[2])
    assert len(other['curves']) == 2  # of another server: all
    (made[4] / 'log.txt').write_text('a\nb\n')
    assert json.loads(ask(app, '/log', f'trial=learning_rate%3D0.002/{made[4].name}')[2]) == ['a', 'b']
    (made[0].parents[1] / 'other').mkdir()
    (made[0].parents[1] / 'other' / 'log.txt').write_text('a secret')  # of no trial
    assert json.loads(ask(app, '/log', 'trial=other')[2]) == []
    assert headers['content-security-policy'].startswith("default-src 'none'; script-src 'self'")
    os.remove(made[0].parent.parent / 'sweep.json')
    for place in made:
        (place / 'config.json').unlink(missing_ok=True)
    status, _, body = ask(app, '/state', same)
    assert status == 503 and 'no runs are here' in json.loads(body)['error']


def test_a_version_that_is_none_is_that_of_a_new_page(served) -> None:
    app, _ = served
    life = json.loads(ask(app, '/state')[2])['life']
    for version in ('%C2%B2', '9' * 5000, '-1', 'x', ''):
        status, _, body = ask(app, '/state', f'life={life}&version={version}')
        assert status == 200 and 'arms' in json.loads(body)


def test_many_who_ask_share_a_look(tmp_path, monkeypatch) -> None:
    pytest.importorskip('starlette')
    from tformer.lab.live import page

    sweep(tmp_path)
    state, now, looks = page.State(Watched(tmp_path)), [100.0], list[float]()
    monkeypatch.setattr(page.time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(state.watched, 'refresh', lambda: looks.append(now[0]))
    for seconds in (0, 0, 0.9 * page.FRESH, 0.2 * page.FRESH, 0):
        now[0] += seconds
        state.since('', 0, '')
    assert looks == [100.0, 100.0 + 1.1 * page.FRESH]


@needs_chromium
@pytest.mark.proof
def test_a_browser_shows_the_runs_whatever_they_are_called(tmp_path) -> None:
    """The command serves a sweep to Chromium, which draws it with a clean console."""
    pytest.importorskip('uvicorn')
    made = [tmp_path / 'x' / each.directory for each in sweep(tmp_path / 'x')]
    listed = json.loads((tmp_path / 'x' / manifest.LIST).read_text())
    for entry, name in zip(listed['trials'][3:], ['__proto__', HOSTILE, HOSTILE], strict=True):
        entry['name'] = name
    (tmp_path / 'x' / manifest.LIST).write_text(json.dumps(listed))
    for number, place in enumerate(made):
        write(place, *(row(10 * i, train=3.0 + number - i) for i in range(1, 4)))
    command = [sys.executable, '-m', 'tformer', 'watch', str(tmp_path / 'x'), '--serve=0']
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = server.stderr.readline().split()[-1]
            assert re.fullmatch(r'http://127\.0\.0\.1:\d+', address)
            shown = browsing.opened(address, tmp_path / 'profile')
        finally:
            server.terminate()
    assert server.returncode in (0, -signal.SIGTERM)
    body = re.sub('<script.*?</script>', '', shown, flags=re.DOTALL)
    assert '<img' not in body and body.count('__proto__') >= 3 and html.escape(HOSTILE[:8]) in body
    assert len(re.findall('class="curve"', body)) == 3 and body.count('class="spark"') == 3
    assert '6 trials: 6 paused' in body and 'id="problem" role="alert" hidden' in body


def test_the_page_changes_nothing_and_answers_no_other_site(served) -> None:
    app, _ = served
    assert ask(app, '/')[0] == 200 and ask(app, '/watch.js')[1]['content-type'].startswith('text/javascript')
    assert ask(app, '/', host='localhost:1')[0] == 200 and ask(app, '/', host='evil.example')[0] == 400
    for path in ('/', '/state', '/log', '/watch.js'):
        assert ask(app, path, method='POST')[0] == 405
    assert ask(app, '/stop')[0] == 404
    from tformer.lab.live import page

    body = ask(app, '/')[2]
    assert (
        '<script src="page.js">' in body
        and '<script src="watch.js">' in body
        and '--paper: #fff' in body
        and page.POLICY
    )
    assert not [name for name in page.SCRIPTS if 'innerHTML' in ask(app, name)[2]]


def test_states_are_all_known_to_who_counts_them() -> None:
    assert set(trial.STATES) >= {*trial.ENDED, *terminal.COLOURS} and len(set(trial.STATES)) == 8
