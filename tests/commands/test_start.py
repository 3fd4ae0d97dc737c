"""What the time from a command to the first step of its training goes to."""

import json

import pytest

import lives
import toy_data
from places import ROOT
from tformer import __main__ as command_line
from tformer.commands import start
from tformer.errors import UserError


def test_seconds_in_several_spans_count_once() -> None:
    assert start.covered([]) == 0
    assert start.covered([(5, 7), (1, 4), (2, 3), (3.5, 4.5)]) == 5.5


def test_the_parts_of_a_start(monkeypatch) -> None:
    now = [12.0]
    monkeypatch.setattr(start.time, 'time', lambda: now[0])
    marks = start.Marks(10.0)
    marks._on_span('/jax/core/compile/jaxpr_trace_duration', 13.0, 14.0)
    now[0] = 17.0
    marks.check(0, 9)
    marks._on_span('/jax/core/compile/jaxpr_to_mlir_module_duration', 17.0, 19.0)
    marks._on_span('/jax/core/compile/backend_compile_duration', 18.0, 22.0)
    now[0] = 23.0
    with pytest.raises(start.EndedFirstStep):
        marks.end(1, [])
    marks._on_span('/jax/core/compile/backend_compile_duration', 22.0, 29.0)  # in the thread, after the step
    assert marks.found() == {
        'first_step_s': 13, 'imports_s': 2, 'data_s': 4, 'tracing_s': 3, 'compiling_s': 4, 'programs': 1, 'loaded': 0,
    }  # fmt: skip


@pytest.mark.proof
def test_a_second_start_finds_the_programs_of_the_first(tmp_path, capsys, monkeypatch) -> None:
    for name in ('JAX_COMPILATION_CACHE_DIR', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('XLA_FLAGS', lives.XLA_FLAGS)  # of one device
    monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    data = toy_data.parallel(tmp_path / 'data')
    command = ['tformer', 'benchmark', '--start', f'--config={ROOT}/configs/translate.py:smoke']
    command_line.main([*command, f'--config.data.path={data}'])
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert [*found] == ['cold', 'warm']
    assert found['cold']['loaded'] == 0 < found['cold']['programs'] <= found['warm']['loaded']
    for part in found.values():
        assert 0 < part['tracing_s'] < part['first_step_s'] and 0 < part['imports_s'] < part['first_step_s']
    with pytest.raises(UserError, match='nowhere'):
        command_line.main([*command, f'--config.data.path={tmp_path}/nowhere'])
