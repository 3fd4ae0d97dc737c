"""Commands as the processes that users start, on one small run that all of them share."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import make_stored_run
from lives import HANG, environment
from places import LAUNCH, ROOT
from tformer import checks
from tformer.commands import attention, scoring
from tformer.commands.generate import generate
from tformer.commands.run import Run
from tformer.training import checkpoint, checkpoint_writer
from tformer.training import loop as train_lib
from whole_runs import load

TEXTS = ['the small bird', 'a green tree sees the river']
SAMPLED = {'decode.strategy': 'sample', 'decode.temperature': '2.0'}
FLAGS = [f'--config.{name}={value}' for name, value in SAMPLED.items()]
ENVIRONMENT = environment(cached=False)  # as in this process, which computes the same


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The workdir of a run with checkpoints 2 and 4, of which the first is the best."""
    place = tmp_path_factory.mktemp('trained')
    fields = {**make_stored_run.FIELDS, 'train__num_steps': '4', 'train__keep_last': '2', 'train__eval_every': '2'}
    train_lib.train(load('translate.py:smoke', place, **fields, optimizer__learning_rate='10.0'), place / 'run')
    checkpoint_writer.CheckpointWriter(place / 'run').note_score(2, 5.0)
    assert checkpoint.steps(place / 'run') == [2, 4] and checkpoint.best(place / 'run') == 2
    return place / 'run'


def tformer(*arguments: object, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-m', 'tformer', *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, input=given, capture_output=True, text=True, timeout=HANG)


@pytest.mark.slow
@pytest.mark.stack
def test_generate_answers_each_line_of_standard_input_with_the_seed_of_its_flag(trained) -> None:
    flags = ['--seed=3', '--checkpoint=latest', *FLAGS]
    ran = tformer('generate', f'--workdir={trained}', *flags, given='\n'.join(TEXTS) + '\n')
    assert ran.returncode == 0 and ran.stderr == '', ran.stderr
    run = Run.load(trained, SAMPLED, 'latest')
    assert ran.stdout.splitlines() == generate(run, TEXTS, 3) != generate(run, TEXTS, 4)


@pytest.mark.stack
@pytest.mark.proof
def test_attention_writes_the_page_of_a_line_of_a_file(trained, tmp_path) -> None:
    (tmp_path / 'lines.txt').write_text(TEXTS[0] + '\n')
    ran = tformer('attention', f'--workdir={trained}', f'--input={tmp_path}/lines.txt', '--checkpoint=latest')
    assert (ran.returncode, ran.stdout) == (0, f'{trained}/attention.html\n'), ran.stderr
    page = (trained / 'attention.html').read_text()
    assert attention.attention(Run.load(trained, which='latest'), TEXTS[:1]).read_text() == page
    assert attention.attention(Run.load(trained, which='best'), TEXTS[:1]).read_text() != page


@pytest.mark.stack
@pytest.mark.proof
def test_evaluate_scores_the_mean_of_the_newest_checkpoints(trained, tmp_path) -> None:
    run = tmp_path / 'run'
    shutil.copytree(trained, run)
    ran = tformer('evaluate', f'--workdir={run}', '--split=valid', '--average=2')
    assert ran.returncode == 0 and f'{run} step 4, valid: 12 records' in ran.stdout, ran.stderr
    results = json.loads((run / 'result.json').read_text())
    found = results['valid']
    assert (found['step'], results['overrides']) == (4, {'valid': {'average': 2}})
    one, other = (Run.load(run, which=which) for which in ('best', 'latest'))
    mean = jax.tree.map(lambda x, y: (np.asarray(x) + np.asarray(y)) / 2, one.variables, other.variables)
    scores = scoring.score(one.config, one.tokenizers, mean, 'valid').scores
    assert found['loss'] == pytest.approx(scores['loss'], rel=1e-6)
    assert found['loss'] != pytest.approx(
        scoring.score(one.config, one.tokenizers, one.variables, 'valid').scores['loss']
    )


PRODUCT = ('product_gflops', 'product_share')
STEP = {'device', 'devices', 'params', 'tokens_per_s', 'step_ms', *PRODUCT, 'loss'}
SAVES = {'device', 'devices', 'params', 'tokens', 'ratio', 'step_ms', 'blocked_ms'}
MODES = {
    'a step': (1, 1, (), STEP),
    'saves': (1, 1, ('--saves',), SAVES),
    'two devices': (1, 2, (), STEP),
    'two processes': (2, 1, (), STEP),
}


@pytest.mark.proof
@pytest.mark.parametrize('mode', MODES)
def test_benchmark_prints_one_line_of_json(mode: str) -> None:
    processes, devices, flags, keys = MODES[mode]
    begun = ['-m', 'tformer']
    if processes * devices > 1:
        begun = [str(LAUNCH / 'local'), f'--processes={processes}', f'--devices={devices}']
    command = [sys.executable, *begun, 'benchmark', f'--config={ROOT}/configs/lm_stdlib.py:smoke', '--steps=2', *flags]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stdout.splitlines()
    found = json.loads(line)
    assert found.keys() == keys and found['devices'] == processes * devices
    config = checks.load(f'{ROOT}/configs/lm_stdlib.py:smoke')
    assert found.get('tokens') in (None, config.train.batch_size * config.data.length)
    assert min(value for name, value in found.items() if name not in ('device', 'loss')) > 0
