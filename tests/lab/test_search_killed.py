"""A real search that is killed twice and begun again is the unbroken one."""

import json
import pathlib
from collections.abc import Callable

import pytest

import toy_data
from lives import Life
from small_sweeps import TINY, wait_for
from tformer import config
from whole_runs import numbers, scores

SEARCH = """
from tformer.lab.sweep import Sweep, asha, log_uniform, search

def get_sweep():
    rungs = asha(rungs=1, reduction=2)
    space = {'optimizer.learning_rate': log_uniform(1e-3, 1e-1)}
    return Sweep('base.json', search(space, 'random', trials=4, rungs=rungs, confirm=2))
"""


@pytest.mark.proof
@pytest.mark.signals
def test_a_search_that_is_killed_twice_and_begun_again_is_the_unbroken_one(tmp_path: pathlib.Path) -> None:
    wanted = {
        'data.path': (str(toy_data.running(tmp_path / 'data')),),
        'data.byte_fallback': False,
        'train.num_steps': 6,
        'train.eval_every': 2,
        'train.checkpoint_every': None,
    }
    (tmp_path / 'base.json').write_text(json.dumps(config.to_dict(config.override(TINY, wanted))))
    (tmp_path / 'search.py').write_text(SEARCH)

    def live(home: pathlib.Path, until: Callable[[], object] | None = None) -> None:
        life = Life(tmp_path, 'sweep', f'--config={tmp_path}/search.py', f'--workdir={home}')
        if until is None:
            assert life.wait() == 0, life.said
        else:
            wait_for(until)
            life.kill()

    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    live(whole)
    live(killed, lambda: len(draws(killed)) == 2)
    live(killed, lambda: any(killed.glob('*/*/result.json')))
    live(killed)
    assert draws(killed) == draws(whole) and len(draws(whole)) == 4
    left = sorted(place.parent.relative_to(whole) for place in whole.glob('*/*/metrics.jsonl'))
    assert left == sorted(place.parent.relative_to(killed) for place in killed.glob('*/*/metrics.jsonl'))
    ended = [each for each in left if (whole / each / 'result.json').exists()]
    assert len(left) == 4 + 2 * 2 and 2 <= len(ended) - 4 < 4  # half or more of the arms went on
    for each in left:
        assert numbers(killed / each) == numbers(whole / each)
        assert (killed / each / 'result.json').exists() == (each in ended)
    for each in ended:
        assert scores(killed / each) == scores(whole / each)
    reports = [(home / 'report.md').read_text().replace(home.name, '') for home in (whole, killed)]
    first, second = (text.partition('## The search')[2].partition('\n## ')[0] for text in reports)
    assert first == second and f'4 reached step 4, {len(ended) - 4} reached the end.' in first


def draws(home: pathlib.Path) -> list[dict]:
    file = home / 'search.json'
    return json.loads(file.read_text())['draws'] if file.exists() else []
