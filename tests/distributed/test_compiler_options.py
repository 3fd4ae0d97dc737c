"""Every program of a model is compiled with its platform's options, also where it calls others."""

import dataclasses

import jax
import pytest

from fresh_runs import fresh_run
from tformer import config
from tformer.commands import score, scoring
from tformer.commands.freeze import freeze, load_frozen
from tformer.commands.streaming import stream
from tformer.distributed import compilers
from tformer.evaluation import many_rows

TEXTS = ['a', 'abc', 'h' * 20, 'cd', 'e']


def generated(run, directory):
    return run.generate(TEXTS)


def streamed(run, directory):
    return [''.join(pieces) for pieces in stream(run, TEXTS, 0)]


def frozen(run, directory):
    freeze(run, directory / 'frozen', rows=2)
    return load_frozen(directory / 'frozen').write(TEXTS, 6)


def scored(run, directory):
    return [row.log_likelihood for row in score.score(run, TEXTS)]


WAYS = {'by batches': ({}, generated), 'in rows that come free': ({'decode.batch_size': '2'}, generated)}
WAYS |= {'as a stream': ({}, streamed), 'by frozen programs': ({}, frozen), 'scored': ({}, scored)}


@pytest.mark.slow
@pytest.mark.parametrize('way', WAYS)
def test_programs_have_the_options_of_their_platform(way, monkeypatch, tmp_path) -> None:
    pytest.importorskip('flatbuffers')
    changes, function = WAYS[way]
    run = fresh_run('causal_lm', family='decoder', letters='abcdefgh')
    run = dataclasses.replace(run, config=config.override(run.config, changes))

    def found(name, options):
        monkeypatch.setattr(compilers, 'OPTIONS', {'cpu': options})
        for made in (scoring._writer, scoring._refill, many_rows.make_program):
            made.cache_clear()
        (tmp_path / name).mkdir()
        return function(run, tmp_path / name)

    assert found('some', {'xla_cpu_enable_fast_min_max': False}) == found('none', {})
    with pytest.raises(Exception, match='no_such_option'):
        found('wrong', {'no_such_option': 1})


def test_a_program_within_another_has_the_options_of_that(monkeypatch) -> None:
    monkeypatch.setattr(compilers, 'OPTIONS', {'cpu': {'no_such_option': 1}})
    double = compilers.jit(lambda x: 2 * x)
    assert jax.jit(lambda x: double(x) + 1)(3) == 7
    with pytest.raises(Exception, match='no_such_option'):
        double(3)
