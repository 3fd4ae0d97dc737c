"""`--profile`: ranges that cannot be traced are refused, and the trace of the others can be read."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from tformer import __main__ as command_line
from tformer.commands import benchmark
from tformer.errors import UserError
from tformer.lab.sweep import matching
from tformer.training import loop
from tformer.training.dummy_batch import assumed
from tformer.training.step_trace import StepTrace
from whole_runs import ROOT, load


@pytest.mark.parametrize('text', ['', '3', '3:', ':3', '0:2', '4:3', '1:2:3', '-1:2', '1.5:2', 'a:b', '1:2 '])
def test_a_range_is_two_steps_in_order(tmp_path, text):
    with pytest.raises(UserError, match=r'^--profile=.* is not FIRST:LAST, two steps from 1 on, in order; write e\.g'):
        StepTrace(text, tmp_path)


def test_a_range_beyond_the_last_step_is_refused_and_one_that_has_begun_is_left_out(tmp_path, capsys):
    """The same command continues a run, so that what it asks to be traced may be over."""
    StepTrace('4:6', tmp_path).check(3, 6)
    with pytest.raises(UserError, match=r'^--profile=4:6: the last step is 5$'):
        StepTrace('4:6', tmp_path).check(0, 5)
    trace = StepTrace('4:6', tmp_path)
    trace.check(4, 6)
    trace.close()
    assert capsys.readouterr().err == '--profile=4:6: nothing is traced, as step 4 is made already\n'


def test_a_file_in_the_place_of_the_directory_is_one_line(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match=rf'^{tmp_path}/file/profile: Not a directory$'):
        StepTrace('1:2', tmp_path / 'file').check(0, 2)


def events(workdir) -> list[dict]:
    (place,) = (workdir / 'profile' / 'plugins' / 'profile').iterdir()
    (protocol,) = place.glob('*.xplane.pb')
    assert jax.profiler.ProfileData.from_file(str(protocol)).planes is not None
    with gzip.open(place / 'perfetto_trace.json.gz') as file:
        return json.load(file)['traceEvents']


def steps(workdir) -> list[int]:
    """The numbers of the traced train steps."""
    named = [event for event in events(workdir) if event.get('name') == 'train']
    return sorted(int(event['args']['step_num']) for event in named)


@pytest.mark.slow
def test_a_trace_holds_its_steps_and_one_that_is_cut_short_those_that_were_made(tmp_path, capsys):
    double = jax.jit(lambda x: 2 * x)
    for name, stop in (('whole', 5), ('cut', 3), ('before', 1)):
        trace = StepTrace('2:4', tmp_path / name)
        for step in range(1, stop + 1):
            trace.begin(step)
            with jax.profiler.StepTraceAnnotation('train', step_num=step):
                found = double(jnp.ones(3))
            trace.end(step, found)
        trace.close()
        trace.close()
        assert stop == 1 or steps(tmp_path / name) == [*range(2, min(stop, 4) + 1)]
    said = capsys.readouterr()
    assert said.err == '--profile=2:4: nothing is traced, as the last step was 1\n'
    assert said.out.splitlines() == [
        f'a trace of steps 2 to {last} is in {tmp_path}/{name}/profile' for last, name in ((4, 'whole'), (3, 'cut'))
    ]


def test_a_range_beyond_the_last_step_leaves_no_workdir(tmp_path):
    given = f'--config={ROOT}/configs/g2p.py:smoke', '--config.train.num_steps=4', f'--workdir={tmp_path / "run"}'
    with pytest.raises(UserError, match=r'^--profile=4:5: the last step is 4$'):
        command_line.main(['tformer', 'train', *given, '--profile=4:5'])
    assert not (tmp_path / 'run').exists()


@pytest.mark.proof
def test_a_run_and_a_benchmark_write_a_trace(tmp_path):
    recipe = 'translate.py:smoke'
    wanted = load(recipe, tmp_path, train__num_steps='4', train__eval_every='4', data__tokenizer='symbol')
    with pytest.raises(UserError, match=r'^--profile=4:5: the last step is 4$'):
        loop.train(wanted, tmp_path / 'run', trace=StepTrace('4:5', tmp_path / 'run'))
    loop.train(wanted, tmp_path / 'run', trace=StepTrace('2:3', tmp_path / 'run'))
    assert steps(tmp_path / 'run') == [2, 3]
    with pytest.raises(UserError, match=r'^--profile=2:3: the last step is 2$'):
        benchmark.benchmark(wanted, 2, trace=StepTrace('2:3', tmp_path / 'timed'))
    found = benchmark.benchmark(wanted, 2, trace=StepTrace('2:2', tmp_path / 'timed'))
    assert steps(tmp_path / 'timed') == [2]
    assert 'mfu' not in found and found['step_ms'] > 0  # the peak of a CPU is not known
    rate = matching.num_flops(assumed(wanted)) / wanted.train.num_steps / (found['step_ms'] / 1e3)
    assert found['product_share'] == pytest.approx(rate / (found['product_gflops'] * 1e9), rel=0.01, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('flags', 'why'),
    [
        (('--profile=1:2',), '--workdir is needed'),
        (('--workdir=here',), '--workdir is where --profile writes its trace'),
        (('--profile=1:2', '--data', '--workdir=here'), '--profile is of train steps; leave out --data'),
    ],
)
def test_a_benchmark_writes_nothing_but_its_trace(flags, why):
    with pytest.raises(UserError, match=f'^{why}'):
        command_line.main(['tformer', 'benchmark', f'--config={ROOT}/configs/lm_stdlib.py:smoke', *flags])
