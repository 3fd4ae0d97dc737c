"""The live view in a terminal: a table of the arms that moves as they train, and the log of one trial below it."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tformer.errors import UserError
from tformer.lab.live import requests, text
from tformer.lab.live.trial import DONE, FAILED, PAUSED, RUNNING, STOPPED, UNREADABLE, WAITING, LiveTrial
from tformer.lab.live.watched import Watched

SHORTEST = 24  # characters of an arm's name that there is always room for
NUMBERS, DISPENSABLE = (2, 3, 4, 6), (4, 3, 2, 5)  # columns of the table
EVERY = 1.0  # seconds between looks at the directory
LOG_LINES = 8
HELP = 'up/down: arm   left/right: trial   p: prune arm   s: stop trial   r: resume trial   q: quit'
KEYS = {b'\x1b[A': 'up', b'\x1b[B': 'down', b'\x1b[C': 'right', b'\x1b[D': 'left', b'k': 'up', b'j': 'down',
        b'\x03': 'q', b'\x04': 'q', b'': 'q'}  # fmt: skip
COLOURS = {RUNNING: 'cyan', DONE: 'green', FAILED: 'red', UNREADABLE: 'red', PAUSED: 'yellow', STOPPED: 'yellow'}


class Screen:
    """What the terminal shows: an arm and a trial of it are selected, and a request waits for its 'y'."""

    def __init__(self, watched: Watched, bars: str = text.BARS):
        self.watched, self.bars = watched, bars
        self.arm = watched.arms[0]
        self.trial = 0  # its number within the arm, modulo their count
        self.said = HELP
        self._asked: Callable[[], str] | None = None  # what a 'y' does
        self._rows: list[text.Cells] = []

    def selected(self) -> LiveTrial:
        """Returns the selected trial: of an arm, those that run come first, then those that failed."""
        order = (RUNNING, FAILED, UNREADABLE, PAUSED, STOPPED, DONE, WAITING)
        own = sorted(
            self.watched.by_arm()[self.arm], key=lambda trial: order.index(trial.state) if trial.state in order else 9
        )
        return own[self.trial % len(own)]

    def press(self, key: str) -> bool:
        """Does what a key asks for; returns whether to go on."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self.said = _told(asked) if key == 'y' else 'nothing was done'
        elif key in ('up', 'down'):
            arms = [row[0] for row in self._rows[1:]] or self.watched.arms
            at = arms.index(self.arm) if self.arm in arms else 0
            self.arm, self.trial = arms[(at + (1 if key == 'down' else -1)) % len(arms)], 0
        elif key in ('left', 'right'):
            self.trial += 1 if key == 'right' else -1
        elif key in ('p', 's', 'r'):
            self._ask(key)
        elif key == 'q':
            return False
        return True

    def _ask(self, key: str) -> None:
        home, trials, arm, name = self.watched.home, self.watched.trials, self.arm, self.selected().directory
        what = {
            'p': (
                f'prune {arm}: its trials that have not begun are left out',
                lambda: requests.prune(home, arm, trials),
            ),
            's': (f'stop {name}: it saves and stops', lambda: requests.stop(name, trials)),
            'r': (f'resume {name}', lambda: requests.resume(name, trials)),
        }
        question, self._asked = what[key]
        self.said = f'{question}? y/n'

    def render(self, width: int, height: int) -> Group:
        """Returns the whole screen, of at most `height` lines."""
        watched = self.watched
        self._rows = text.table(watched, self.bars)
        if self.arm not in watched.arms:
            self.arm = watched.arms[0]
        chosen = self.selected()
        log = chosen.tail(LOG_LINES) or ([text.prose.plain(chosen.error)] if chosen.error else ['there is no log'])
        lines = max(3, height - len(log) - 7)
        state = f'{chosen.directory}: {chosen.state}'
        state += f', step {chosen.step:,}' if chosen.step else ''
        state += f', {text.duration(chosen.left)} left' if chosen.left is not None else ''
        return Group(
            _line(text.headline(watched), 'bold'),
            _line(text.about_verdicts(watched), 'dim'),
            self._table(lines, width),
            Rule(_line(text.prose.plain(state), COLOURS.get(chosen.state, ''))),
            *(_line(each, 'dim') for each in log),
            Rule(style='dim'),
            _line(text.prose.plain(self.said), ''),
        )

    def _table(self, lines: int, width: int) -> Table:
        """Returns the arms around the selected one, as many as there is room for."""
        head, *rows = self._rows
        at = next((number for number, row in enumerate(rows) if row[0] == self.arm), 0)
        first = max(0, min(at - lines // 2, len(rows) - lines))
        widths = [max(len(row[column]) for row in self._rows) for column in range(len(head))]
        widths[0] = min(widths[0], max(SHORTEST, width // 3))
        columns = [*range(len(head))]
        for column in DISPENSABLE:  # what a narrow terminal leaves out
            if sum(widths[each] + 1 for each in columns) > width:
                columns.remove(column)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for column in columns:
            table.add_column(_line(head[column], ''), no_wrap=True, justify='right' if column in NUMBERS else 'left')
        for row in rows[first : first + lines]:
            name, *cells = [text.prose.plain(row[column]) for column in columns]
            shown = [_line(_middle(name, widths[0]), ''), *(_line(cell, _colour(cell)) for cell in cells)]
            table.add_row(*shown, style='reverse' if row[0] == self.arm else '')
        return table


def _line(line: str, style: str) -> Text:
    """Returns text in which nothing is marked up, and which is cut where the terminal ends."""
    return Text(line, style=style, no_wrap=True, overflow='ellipsis')


def _middle(name: str, width: int) -> str:
    """Returns a name, shortened in its middle to `width`: those of a sweep often begin alike."""
    return name if len(name) <= width else f'{name[: (width - 1) // 2]}…{name[len(name) - width // 2 :]}'


def _colour(cell: str) -> str:
    return next((colour for state, colour in COLOURS.items() if f'{state}' in cell and cell[0].isdigit()), '')


def _told(action: Callable[[], str]) -> str:
    try:
        return action()
    except (UserError, OSError) as error:
        return str(error)


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float], str | None]]:
    """Gives a function that waits so many seconds for a key; its name, or None."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def waits(seconds: float) -> bool:
        return bool(select.select([number], [], [], seconds)[0])

    def read(seconds: float) -> str | None:
        if not waits(seconds):
            return None
        pressed = os.read(number, 1)  # of several the others are read at the next call
        if pressed == b'\x1b' and waits(0):
            pressed += os.read(number, 2)
        return KEYS.get(pressed, pressed.decode(errors='replace'))

    try:
        tty.setcbreak(number)
        yield read
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def show(watched: Watched, console: Console | None = None) -> None:
    """Shows the directory in the terminal until 'q'."""
    console = console or Console()
    screen = Screen(watched, bars_of(sys.stdout))
    with keyboard() as read, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            watched.refresh()
            live.update(screen.render(*console.size), refresh=True)
            key = read(EVERY)
            if key is not None and not screen.press(key):
                return


def bars_of(stream: Any) -> str:
    """Returns the bars that a stream's encoding has."""
    try:
        text.BARS.encode(getattr(stream, 'encoding', None) or 'ascii')
        return text.BARS
    except UnicodeEncodeError:
        return text.ASCII_BARS


def follow(watched: Watched, once: bool = False) -> None:
    """Prints what changes, a line each, until nothing runs or waits; with `once` prints the state and ends."""
    bars = bars_of(sys.stdout)
    if once:
        print(text.whole(watched, bars), flush=True)
        return
    states: dict[str, str] = {}
    while True:
        for line in text.changes(watched, states):
            print(f'{text.now()} {line}', flush=True)
        new = {trial.directory: trial.state for trial in watched.trials}
        if new != states:
            print(f'{text.now()} {text.headline(watched)}', flush=True)
        states = new
        if not {RUNNING, WAITING, PAUSED} & {*states.values()}:
            print(text.whole(watched, bars), flush=True)
            return
        time.sleep(EVERY)
        watched.refresh()
