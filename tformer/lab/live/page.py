"""The live view as a page: read-only, for a browser of this machine. The page asks again and again for what is new."""

import math
import pathlib
import re
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import jinja2

from tformer.errors import UserError
from tformer.lab.live import text
from tformer.lab.live.trial import LiveTrial
from tformer.lab.live.watched import ArmLine, Watched, arm_lines, mean_curve
from tformer.lab.report import prose

HERE = pathlib.Path(__file__).parent
SCRIPTS = {'/page.js': HERE.parent / 'report' / 'page.js', '/watch.js': HERE / 'watch.js'}
POINTS = 80  # of a curve
LOG_LINES = 40
FRESH = 0.5  # seconds for which what was seen is told again
LOOPBACK = ('127.0.0.1', 'localhost', '::1')
POLICY = "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:"
HEADERS = {
    'Content-Security-Policy': POLICY,
    'X-Content-Type-Options': 'nosniff',
    'Referrer-Policy': 'no-referrer',
    'Cache-Control': 'no-store',
}


class State:
    """What the page is told; threads of the server ask one after another."""

    def __init__(self, watched: Watched):
        self.watched = watched
        self.life = secrets.token_hex(4)  # so that a page that is still open sees that the server began anew
        self._lock = threading.Lock()
        self._look_at = -math.inf

    def since(self, life: str, version: int, arm: str) -> dict[str, Any]:
        """Returns all that is new since a version of this life, and the trials of `arm`.

        Raises:
          UserError: the directory can no longer be read.
        """
        with self._lock:
            watched = self.watched
            if time.monotonic() >= self._look_at:  # many who ask share a look
                watched.refresh()
                watched.verdicts()
                self._look_at = time.monotonic() + FRESH
            version = version if life == self.life else 0
            found: dict[str, Any] = {'life': self.life, 'version': watched.version}
            if arm in watched.arms:
                found |= {'arm': arm, 'trials': [_trial(trial) for trial in watched.by_arm()[arm]]}
            if version == watched.version:
                return found
            own = watched.by_arm()
            old = zip(watched.trials, watched.changed, strict=True)
            new = {trial.arm for trial, changed in old if changed > version}
            lines = arm_lines(watched)
            names = watched.trials[0].curves
            return {
                **found,
                'headline': text.headline(watched),
                'about': text.about_verdicts(watched),
                'heads': [prose.named(watched.metric) or '-', 'verdict' if watched.is_ended else text.PEEKED],
                'names': [*names],
                'arms': [_line(line) for line in lines],
                'curves': {each: {name: _curve(own[each], name) for name in names} for each in own if each in new},
                'broken': text.broken(watched.trials)[:100],
            }

    def log(self, directory: str) -> list[str]:
        """Returns the end of the log of the trial with this workdir, relative to the sweep's; of no other file."""
        with self._lock:
            trial = next((trial for trial in self.watched.trials if trial.directory == directory), None)
        return [] if trial is None else trial.tail(LOG_LINES)


def _line(line: ArmLine) -> dict[str, Any]:
    return {
        'arm': line.arm,
        'states': line.counts,
        'step': line.step,
        'num_steps': line.num_steps,
        'train': _number(line.train),
        'valid': _number(line.valid),
        'mean': None if line.mean is None else _number(line.mean),
        'label': line.row.label if line.row is not None else None,
    }


def _trial(trial: LiveTrial) -> dict[str, Any]:
    return {
        'directory': trial.directory,
        'state': trial.state,
        'step': trial.step,
        'num_steps': trial.num_steps,
        'left': None if trial.left is None else text.duration(trial.left),
        'error': trial.error,
    }


def _curve(trials: Sequence[LiveTrial], name: str) -> tuple[list[float | None], list[float | None]]:
    steps, values = mean_curve(trials, name, POINTS)
    return [_number(step) for step in steps], [_number(value) for value in values]


def _number(value: float) -> float | None:
    """Returns six digits; None of what JSON does not have."""
    return float(f'{value:.6g}') if math.isfinite(value) else None


def html(watched: Watched) -> str:
    """Returns the page, without anything of the runs but the directory's name."""
    loader = jinja2.FileSystemLoader([HERE, HERE.parent / 'report'])
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    names = watched.trials[0].curves
    return made.get_template('watch.html.jinja').render(
        title=prose.plain(watched.home.resolve().name), names=names, drawn=prose.DRAWN
    )


def make_app(watched: Watched, host: str) -> Any:
    """Returns the ASGI application for a server that listens at `host`.

    On a loopback address it answers only who asks for that address: a page of another site, whose name somebody has
    pointed here, reads nothing.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    state, shown = State(watched), html(watched)

    def page(asked: Request) -> Response:
        return Response(shown, media_type='text/html', headers=HEADERS)

    def code(asked: Request) -> Response:
        return Response(SCRIPTS[asked.url.path].read_text(), media_type='text/javascript', headers=HEADERS)

    def news(asked: Request) -> Response:
        given = asked.query_params
        asked_for = given.get('version', '')
        version = int(asked_for) if re.fullmatch(r'[0-9]{1,15}', asked_for) else 0
        try:
            found = state.since(given.get('life', ''), version, given.get('arm', ''))
        except UserError as error:
            return JSONResponse({'error': str(error)}, 503, HEADERS)
        return JSONResponse(found, headers=HEADERS)

    def log(asked: Request) -> Response:
        return JSONResponse(state.log(asked.query_params.get('trial', '')), headers=HEADERS)

    hosts = [*LOOPBACK] if host in LOOPBACK else ['*']
    routes = {'/': page, **dict.fromkeys(SCRIPTS, code), '/state': news, '/log': log}
    return Starlette(
        routes=[Route(path, answer, methods=['GET']) for path, answer in routes.items()],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )
