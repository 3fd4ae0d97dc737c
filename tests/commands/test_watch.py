"""`tformer watch` around real programs: a training that stops, a terminal's keys, and a browser."""

import json
import os
import pathlib
import pty
import re
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest

from lives import HANG, environment
from places import ROOT
from resuming import arguments, begin
from small_sweeps import TINY
from tformer import __main__ as command_line
from tformer import config
from tformer.lab.sweep import grid, manifest, product, seeds, trials
from tformer.training import checkpoint, stopping

HOSTILE = '<img src=x onerror=console.error(1)>'


@pytest.mark.proof
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_when_it_is_trained_again(tmp_path: pathlib.Path, capsys) -> None:
    command, run = arguments(tmp_path, 'decoder', '--config.train.checkpoint_every=1000000'), tmp_path / 'run'
    command = [re.sub(r'(eval_every|num_steps)=\d+', r'\1=1000000', each) for each in command]
    (life,) = begin(tmp_path, command, run)
    life.wait_for(lambda: 'step 6/' in life.said)
    command_line.main(['tformer', 'watch', str(run), '--stop=run'])
    assert capsys.readouterr().out == 'asked 1 trial of run to stop: who runs saves at its next step\n'
    assert life.wait() == 75, life.said[-2000:]
    (step,) = checkpoint.steps(run)
    assert f'requested by {run}/stop: stopped after step {step:,} of 1,000,000, which is saved\n' in life.said
    assert stopping.is_stopped(run) and not (run / stopping.REQUEST).exists()
    command_line.main(['tformer', 'watch', str(run), '--once'])
    assert capsys.readouterr().out.startswith(f'{run}: 1 trial: 1 stopped\n')
    (again,) = begin(tmp_path, command, run)
    again.wait_for(lambda: 'resumed at step' in again.said and f'step {step + 6}' in again.said)
    assert not stopping.is_stopped(run)
    again.kill()


def two_arms(home: pathlib.Path) -> list[pathlib.Path]:
    """The workdirs of a sweep, one of whose arms has a hostile name, and the beginning of a run."""
    made = trials.trials(TINY, product(grid({'optimizer.learning_rate': [0.001, 0.002]}), seeds(2)))
    manifest.claim(TINY, made, home)
    listed = json.loads((home / 'sweep.json').read_text())
    for entry in listed['trials'][2:]:
        entry['name'] = HOSTILE
    (home / 'sweep.json').write_text(json.dumps(listed))
    places = [home / trial.directory for trial in made]
    (places[0] / 'config.json').write_text(json.dumps(config.to_dict(TINY)))
    (places[0] / 'metrics.jsonl').write_text('{"step": 1, "train/loss": 3.25}\n')
    (places[3] / 'error.txt').write_text(f'ValueError: {HOSTILE}')
    return places


@pytest.mark.proof
def test_a_terminal_shows_the_arms_until_q(tmp_path: pathlib.Path) -> None:
    two_arms(tmp_path)
    ours, theirs = pty.openpty()
    environ = environment() | {'TERM': 'xterm', 'COLUMNS': '160', 'LINES': '30', 'PYTHONIOENCODING': 'utf-8'}
    command = [sys.executable, '-m', 'tformer', 'watch', str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b''
    while b'q: quit' not in said:
        said += os.read(ours, 4096)
    os.write(ours, b'q')
    while True:
        try:
            said += os.read(ours, 4096)
        except OSError:  # the process has closed it
            break
    assert process.wait(HANG) == 0
    text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', said.decode())
    assert '4 trials: 2 waiting, 1 failed, 1 paused' in text and HOSTILE in text and 'Traceback' not in text
    assert said.index(b'\x1b[?1049h') < said.index(b'\x1b[?1049l')  # the screen as it was before comes back


@pytest.mark.proof
@pytest.mark.skipif(shutil.which('chromium') is None, reason='chromium is not installed')
def test_a_browser_shows_what_a_growing_run_writes_without_a_complaint(tmp_path: pathlib.Path, monkeypatch) -> None:
    """The run grows between two questions of the page; the browser's own clock jumps from question to question."""
    uvicorn = pytest.importorskip('uvicorn')
    from tformer.commands.serving import listening
    from tformer.lab.live import page
    from tformer.lab.live.watched import Watched

    home = tmp_path / 'sweep'
    places = two_arms(home)
    since, asked = page.State.since, list[dict[str, Any]]()

    def growing(state: page.State, life: str, version: int, arm: str) -> dict[str, Any]:
        asked.append(since(state, life, version, arm))
        if len(asked) == 3:
            with (places[0] / 'metrics.jsonl').open('a') as file:
                file.write('{"step": 2, "train/loss": 2.125}\n{"step": 3, "train/lo')
        if len(asked) == 5:
            (places[1] / 'result.json').write_text('{"test": {"step": 4, "loss": 1.375}}')
        return asked[-1]

    monkeypatch.setattr(page.State, 'since', growing)
    monkeypatch.setattr(page, 'FRESH', 0)  # the browser does not wait
    place = listening.listen('127.0.0.1', 0)
    options = uvicorn.Config(page.make_app(Watched(home), '127.0.0.1'), log_level='warning', lifespan='off')
    server = uvicorn.Server(options)
    thread = threading.Thread(target=server.run, kwargs={'sockets': [place]})
    thread.start()
    try:
        flags = 'headless no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync'
        flags += f' no-first-run user-data-dir={tmp_path}/chromium enable-logging=stderr window-size=400,900'
        flags += ' virtual-time-budget=30000 dump-dom'
        command = ['chromium', *[f'--{flag}' for flag in flags.split()], listening.address(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    finally:
        server.should_exit = True
        thread.join(HANG)
        place.close()
    assert 'CONSOLE' not in done.stderr
    assert len(asked) > 6 and 'arms' in asked[0] and 'arms' not in asked[1] and 'arms' in asked[3]
    rows = re.findall(r'<tr aria-selected="false">(.*?)</tr>', done.stdout, re.DOTALL)
    cells = [re.findall(r'<td>(.*?)</td>', row) for row in rows]
    assert re.sub('<.*?>', '', cells[0][0]) == 'baseline' and cells[0][1] == '1 done, 1 paused'
    assert cells[0][3] == '2.125' and cells[0][6] == '1.375'
    assert '&lt;img src=x onerror=console.error(1)&gt;' in cells[1][0] and '<img' not in done.stdout
    assert 'id="problem" role="alert" hidden=""' in done.stdout
    curves = re.findall(r'<path d="M(\S+) (\S+)L(\S+) (\S+)" class="curve"', done.stdout)
    x1, y1, x2, y2 = map(float, *curves)  # the one arm with two values, the later one smaller
    assert x1 < x2 and y1 < y2
