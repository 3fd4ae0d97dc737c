"""Kills a training again and again at random instants, and compares what comes of it with a run left in peace.

    python tests/helpers/soak.py [KILLS [SEED]]

Ends with an error where a checkpoint was lost or a number differs. A marked test runs it with a few kills.
"""

import pathlib
import random
import shutil
import sys
import tempfile
import time

from resuming import LOADED, arguments, arrays, begin, end
from tformer.training import checkpoint
from whole_runs import numbers

PER_KILL = 12  # steps that the run is longer for each kill


def soak(place: pathlib.Path, kills: int, seed: int, say=print) -> str:
    """Returns a line on what was seen.

    Raises:
      AssertionError: something was lost.
    """
    steps, random_instants, during_saves = 20 + PER_KILL * kills, random.Random(seed), 0
    command = [x.replace('num_steps=8', f'num_steps={steps}') for x in arguments(place, 'decoder', *LOADED)]
    end(begin(place, command, place / 'whole', 1, 1))
    parts = place / 'parts'
    for number in range(kills):
        newest = max(checkpoint.steps(parts), default=0)
        if newest >= steps - PER_KILL:
            shutil.rmtree(parts)  # and from the beginning again
            newest = 0
        (life,) = begin(place, command, parts, 1, 1)
        if random_instants.random() < 0.7:  # among the steps, each of which saves; else anywhere
            life.wait_for(lambda newest=newest: max(checkpoint.steps(parts), default=0) > newest)
            time.sleep(random_instants.uniform(0, 0.3))
        else:
            time.sleep(random_instants.uniform(0, 6))
        life.kill()
        during_saves += any(parts.glob('checkpoints/*.orbax-checkpoint-tmp'))
        now = max(checkpoint.steps(parts), default=0)
        assert now >= newest and 'damaged' not in life.said and 'Traceback' not in life.said, life.said[-2000:]
        say(f'kill {number + 1} of {kills}: the newest checkpoint is of step {now} of {steps}', flush=True)
    end(begin(place, command, parts, 1, 1))
    assert arrays(parts, steps) == arrays(place / 'whole', steps) and numbers(parts) == numbers(place / 'whole')
    return f'{kills} kills, {during_saves} of them during a save; after {steps} steps all is the same, bit for bit'


if __name__ == '__main__':
    given = [int(number) for number in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as directory:
        print(soak(pathlib.Path(directory), *(given + [50, 0][len(given) :])))
