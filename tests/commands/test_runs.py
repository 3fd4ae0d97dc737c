"""Whole runs: interrupted, killed and refused ones, and what a user gets wrong."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import halting
import toy_data
from launching import outlives
from lives import HANG, Life
from tformer import __main__ as command_line
from tformer import config, errors
from tformer.commands import benchmark, texts
from tformer.commands import train as train_command
from tformer.commands.run import Run
from tformer.data.batches import pipeline
from tformer.distributed import meshes
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.training import checkpoint
from tformer.training import flops as flops_lib
from tformer.training import loop as train_lib
from tformer.training.state import abstract_variables
from whole_runs import ENVIRONMENT, ROOT, load, numbers, scores


@pytest.mark.proof
def test_a_masked_language_model_is_fine_tuned_with_its_tokenizer(tmp_path: pathlib.Path, capsys) -> None:
    before = str(tmp_path / 'mlm')
    train_lib.train(load('classify.py:pretrain,smoke', tmp_path), before)
    tuned = train_lib.train(load('classify.py:smoke', tmp_path, train__init_from=before), tmp_path / 'tuned')
    said = capsys.readouterr().out
    assert 'loaded: embed, encoder\n  fresh: class_head\n  left: none\n' in said
    assert tuned.tokenizers.target.fingerprint == Run.load(before).tokenizers.target.fingerprint
    wrong = load('classify.py:smoke', tmp_path, train__init_from=before, model__mlp_dim='32')
    with pytest.raises(errors.UserError, match='has shape'):
        train_lib.train(wrong, tmp_path / 'wrong')


def same(a: object, b: object) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.proof
def test_an_interrupted_run_continues_bit_for_bit(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    wanted = load(
        'translate.py:smoke', tmp_path, train__num_steps='6', train__eval_every='2', train__log_every='3',
        train__keep_last='2', optimizer__ema_decay='0.9', model__dropout_rate='0.1', data__tokenizer='symbol',
        mesh__data='1',
    )  # fmt: skip
    whole = train_lib.train(wanted, tmp_path / 'whole')

    real = train_lib.pipeline.iterate

    def cut(batches, start, config, share):
        for number, batch in enumerate(real(batches, start, config, share), start=start + 1):
            if number == 5:
                raise ConnectionError
            yield batch

    monkeypatch.setattr(train_lib.pipeline, 'iterate', cut)
    with pytest.raises(ConnectionError):
        train_lib.train(wanted, tmp_path / 'parts')
    assert max(saved_steps(tmp_path / 'parts')) == 4  # was being written when the run failed
    monkeypatch.setattr(train_lib.pipeline, 'iterate', real)
    continued = train_lib.train(wanted, tmp_path / 'parts')
    assert continued.step == whole.step == 6 and continued.best_step == whole.best_step
    same(*(checkpoint.load_variables(tmp_path / name, 'latest')[0] for name in ('whole', 'parts')))
    assert numbers(tmp_path / 'whole') == numbers(tmp_path / 'parts')
    batches = pipeline.Batches(whole.config, whole.tokenizers, 'train', training=True)
    made = [batches.batch(step) for step in range(6)]
    assert len({batch['inputs'].shape for batch in made}) > 1  # what is spent goes by each batch's own shape
    (last,) = (row for row in numbers(tmp_path / 'parts') if row['step'] == 6 and 'train/tokens' in row)
    tokens = sum(int((batch[side] >= 0).sum()) for batch in made for side in ('positions', 'encoder_positions'))
    model, objective = build(whole.config.model), OBJECTIVES[whole.config.train.objective]
    params = abstract_variables(model, objective, made[0])['params']
    flops = sum(flops_lib.model_flops(whole.config, params, batch) for batch in made)
    assert last['train/tokens'] == tokens and last['train/flops'] == pytest.approx(flops, rel=1e-6)

    # The last two checkpoints, 4 and 6, averaged; and evaluated from the command line.
    (one, _), (other, step) = (checkpoint.load_average(tmp_path / 'whole', n, 2) for n in (1, 2))
    assert step == 6 and not np.array_equal(one['params']['embed']['table'], other['params']['embed']['table'])
    arguments = ['tformer', 'evaluate', f'--workdir={tmp_path / "whole"}', '--split=valid', '--average']
    command_line.main([*arguments, '2'])
    assert 'step 6, valid' in capsys.readouterr().out
    assert json.loads((tmp_path / 'whole' / 'result.json').read_text())['overrides'] == {'valid': {'average': 2}}
    with pytest.raises(errors.UserError, match=r'newest 2 checkpoints are kept \(train.keep_last=2\)'):
        command_line.main([*arguments, '3'])

    again = train_lib.train(wanted, tmp_path / 'parts')  # nothing is left to do
    assert again.step == 6
    with pytest.raises(
        errors.UserError, match=r'trained with another config: optimizer.learning_rate \(0.002 there, 0.5 here\)'
    ):
        train_lib.train(config.override(wanted, {'optimizer.learning_rate': 0.5}), tmp_path / 'parts')


@pytest.mark.slow
def test_a_run_stops_early_when_the_validation_metric_no_longer_improves(tmp_path: pathlib.Path, capsys) -> None:
    wanted = load(
        'classify.py:smoke', tmp_path, train__num_steps='9', train__eval_every='1', train__patience='2',
        optimizer__learning_rate='1e-9',
    )  # fmt: skip
    stopped = train_lib.train(wanted, tmp_path / 'run')
    assert stopped.step == 3
    assert 'stopped early: 2 evaluations' in capsys.readouterr().out
    again = train_lib.train(wanted, tmp_path / 'run')
    assert again.step == 3


@pytest.mark.slow
def test_a_length_in_epochs_is_that_many_passes(tmp_path: pathlib.Path) -> None:
    wanted = load('translate.py:smoke', tmp_path, train__num_steps='None', train__num_epochs='1.5',
                  data__tokenizer='symbol', data__num_buckets='1')  # fmt: skip
    assert train_lib.train(wanted, tmp_path / 'run').step == 12  # 64 examples in batches of 8


def saved_steps(workdir: pathlib.Path) -> list[int]:
    return [int(path.name) for path in workdir.glob('checkpoints/*') if path.name.isdigit()]


def tformer(*arguments: object) -> list[str]:
    return [sys.executable, '-m', 'tformer', *map(str, arguments)]


@pytest.mark.signals
def test_an_interrupt_outside_of_training_ends_with_130(tmp_path: pathlib.Path) -> None:
    data = toy_data.parallel(tmp_path / 'data')
    command = [f'--config={ROOT}/configs/translate.py:smoke', f'--config.data.path={data}', f'--workdir={tmp_path}/run']
    reads = tmp_path / 'reads'
    before = functools.partial(halting.halt, reads, 'training.setup', 'load_data')
    life = Life(tmp_path, 'prepare', *command, before=before)
    life.wait_for(reads.exists)
    life.signal(signal.SIGINT)
    assert life.wait() == 130 and life.said == ''


def mistakes(place: pathlib.Path) -> dict[str, tuple[list[str], str]]:
    data = toy_data.parallel(place / 'data')
    bad = toy_data.parallel(place / 'bad')
    (bad / 'train.tsv').write_text('a\tb\nno tab here\n')
    empty = toy_data.parallel(place / 'empty')
    (empty / 'train.tsv').write_text('')
    wrong = place / 'wrong.py'
    wrong.write_text('def get_config(argument):\n    return 1 // 0\n')
    start = [f'--config={ROOT}/configs/translate.py:smoke', f'--workdir={place}/run']
    good = [*start, f'--config.data.path={data}']
    return {
        'unknown command': (['trian'], "did you mean 'train'?"),
        'no config': (['train', f'--workdir={place}/run'], '--config is needed'),
        'missing config': (['train', f'--config={ROOT}/configs/translat.py'], 'translate.py'),
        'unknown size': (['train', f'--config={ROOT}/configs/translate.py:huge', start[1]], 'smoke'),
        'missing data': (['train', *start, f'--config.data.path={place}/dta'], f'{place}/dta'),
        'missing file': (['train', *start, f'--config.data.path={data}/trian.tsv'], 'train.tsv'),
        'empty file': (['train', *start, f'--config.data.path={empty}'], 'train.tsv'),
        'malformed line': (['train', *start, f'--config.data.path={bad}'], 'train.tsv:2'),
        'unknown field': (['train', *good, '--config.model.norn=rmsnorm'], 'model.norm'),
        'unknown key': (['train', *good, '--config.model.norm=rmsnrom'], "'rmsnorm'"),
        'wrong type': (['train', *good, '--config.model.emb_dim=wide'], 'model.emb_dim'),
        'heads': (['train', *good, '--config.model.num_heads=3'], 'does not divide'),
        'too long': (['train', *good, '--config.data.length=999'], 'model.max_len'),
        'unknown flag': (['train', *good, '--wrkdir=x'], 'wrkdir'),
        'flag of another command': (
            ['train', *good, '--alpha=0.1'],
            'it is a flag of report, sweep',
        ),
        'switched off': (['train', *good, '--notiming'], 'train takes no --timing; it is a flag of report, sweep'),
        'argument of none': (['evaluate', f'--workdir={place}/run', 'x'], "evaluate takes no argument 'x'"),
        'a file that fails': (
            ['train', f'--config={wrong}', start[1]],
            'wrong.py:2: ZeroDivisionError: ',
        ),
        'alone': (
            ['benchmark', start[0], '--saves', '--coordinator=host:1'],
            '--coordinator: benchmark --saves cannot run as several processes',
        ),
        'a count without an address': (
            ['train', *good, '--num_processes=2'],
            '--num_processes and --process_id go with --coordinator',
        ),
        'no steps': (['benchmark', *start[:1], '--steps=0'], '--steps=0 must be positive'),
        'a config of a report': (['report', f'{place}', '--config.train.seed=1'], 'report takes no --config'),
        'a config of trials': (
            ['train', f'{place}/a', f'{place}/b', '--config.train.seed=1'],
            'trials that train together have their own configs: the only flag is --transform',
        ),
        'no workdir': (['evaluate', f'--workdir={place}/nowhere'], 'nowhere'),
    }


def test_a_users_mistake_is_one_clear_line(tmp_path: pathlib.Path) -> None:
    for name, (arguments, fragment) in mistakes(tmp_path).items():
        with pytest.raises(errors.UserError) as caught:
            command_line.main(['tformer', *arguments])
        assert fragment in str(caught.value), (name, str(caught.value))
        assert '\n' not in str(caught.value), name


def test_a_users_mistake_exits_with_2_and_no_traceback(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        tformer('train', f'--config={ROOT}/configs/translate.py:smoke', '--config.model.num_heads=3', '--workdir=x'),
        env=ENVIRONMENT, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ''
    assert done.stderr.startswith('tformer: model.num_heads=3') and done.stderr.count('\n') == 1
    assert not (tmp_path / 'x').exists()


@pytest.mark.slow
def test_a_run_whose_data_changed_is_refused(tmp_path: pathlib.Path) -> None:
    data = toy_data.parallel(tmp_path / 'data')
    wanted = load('translate.py:smoke', tmp_path, data__path=str(data), data__tokenizer='symbol', train__num_steps='2')
    train_lib.train(wanted, tmp_path / 'run')
    train_lib.train(wanted, tmp_path / 'run')  # finished: nothing to do
    lines = (data / 'train.tsv').read_text().splitlines()
    (data / 'train.tsv').write_text('\n'.join([lines[1], lines[0], *lines[2:]]) + '\n')
    with pytest.raises(
        errors.UserError, match='checkpoint was trained on other data: fingerprint of the data'
    ) as error:
        train_lib.train(wanted, tmp_path / 'run')
    assert '\n' not in str(error.value)


@pytest.mark.stack
@pytest.mark.proof
def test_prepare_makes_what_training_needs(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv('TFORMER_CACHE', str(tmp_path / 'cache'))
    data = toy_data.parallel(tmp_path / 'data')
    start = [f'--config={ROOT}/configs/translate.py:smoke', f'--config.data.path={data}', f'--workdir={tmp_path}/run']
    command_line.main(['tformer', 'prepare', *start])
    assert f'tokens are in {tmp_path}/cache' in capsys.readouterr().out
    made = sorted(path.name for path in (tmp_path / 'cache').iterdir())
    command_line.main(['tformer', 'train', *start, '--config.mesh.data=1', '--config.evaluate.samples=0'])
    assert made == sorted(path.name for path in (tmp_path / 'cache').iterdir() if path.name in made)
    assert (tmp_path / 'run' / 'result.json').is_file()


@pytest.mark.proof
def test_a_mixture_trains_and_bad_lines_are_counted(tmp_path: pathlib.Path, capsys) -> None:
    for name in 'ab':
        toy_data.parallel(tmp_path / name)
    with open(tmp_path / 'b' / 'train.tsv', 'ab') as file:
        file.write(b'no tab\n\xff\tx\n')
    parts = (f'path={tmp_path}/a weight=1', f'path={tmp_path}/b weight=3 bad_lines=skip')
    wanted = load('translate.py:smoke', tmp_path, data__batching='pack', data__tokenizer='symbol')
    wanted = config.override(wanted, {'data.mixture': parts})
    train_lib.train(wanted, tmp_path / 'run')
    said = capsys.readouterr().out
    assert '128 examples of 2 parts (passes per epoch: 0.5, 1.5) (2 skipped as bad)' in said


@pytest.mark.stack
def test_benchmark_of_the_data_is_one_json_line(tmp_path: pathlib.Path, capsys) -> None:
    data = toy_data.parallel(tmp_path / 'data')
    start = ['benchmark', f'--config={ROOT}/configs/translate.py:smoke', f'--config.data.path={data}', '--data']
    command_line.main(['tformer', *start, '--steps=3', '--config.data.tokenizer=symbol'])
    line = json.loads(capsys.readouterr().out)
    assert line['examples'] == 64 and 0 < line['real_share'] <= 1
    assert min(line[name] for name in ('cold_tokens_per_s', 'tokens_per_s', 'worker_tokens_per_s')) > 100


def test_the_tokens_that_a_benchmark_counts_are_those_of_both_stacks(monkeypatch) -> None:
    def program(stated: config.Config, batch: dict) -> types.SimpleNamespace:
        numbers = {'scores': {'loss': (np.float32(1), np.float32(1))}, 'flops': np.float32(1)}
        return types.SimpleNamespace(
            mesh=meshes.make_mesh(stated.mesh), context=contextlib.nullcontext, hyper=None, taught=(),
            init=lambda: types.SimpleNamespace(params={}), jitted_step=lambda state, *given: (state, numbers),
        )  # fmt: skip

    monkeypatch.setattr(benchmark, 'make_program', program)
    for family, objective, lengths in (('encoder_decoder', 'seq2seq', (8, 12)), ('decoder', 'causal_lm', (8, None))):
        data = config.Data(length=lengths[0], encoder_length=lengths[1])
        train = config.Train(objective=objective, num_steps=1, batch_size=4)
        stated = config.Config(config.Model(family=family), data, train=train, mesh=config.Mesh(data=1))
        with benchmark.stepping(stated) as (_, _, facts):
            assert facts['tokens'] == 4 * sum(filter(None, lengths))


def test_a_benchmark_compares_the_operations_of_a_step_with_the_peak_of_all_devices(monkeypatch) -> None:
    """Each of three steps takes 2 s, and 4e9 operations on four devices of 1e9 a second."""
    clock = itertools.count(0, 2)
    monkeypatch.setattr(benchmark, 'time', types.SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(benchmark.devices, 'peak_flops', lambda kind, dtype: 1e9)
    facts = {'device': 'x', 'devices': 4, 'tokens': 100}
    given = (lambda: {'scores': {'loss': (0.5, 1.0)}, 'flops': 4e9}), None, facts
    monkeypatch.setattr(benchmark, 'stepping', lambda stated: contextlib.nullcontext(given))
    found = benchmark.train_step(config.Config(), 3)
    assert found == {
        'device': 'x', 'devices': 4, 'step_ms': 2000, 'tokens_per_s': 50, 'mfu': 0.5, 'loss': 0.5,
    }  # fmt: skip


@pytest.mark.proof
def test_without_a_test_split_the_valid_one_is_scored_and_a_bad_one_is_found_before_training(tmp_path, capsys) -> None:
    data = toy_data.parallel(tmp_path / 'data')
    wanted = load('translate.py:smoke', tmp_path, data__path=str(data), data__tokenizer='symbol')
    (data / 'test.tsv').write_text('no tab here\n')
    with pytest.raises(errors.UserError, match=r'test.tsv:1'):
        train_command.train_and_evaluate(wanted, str(tmp_path / 'run'))
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()
    (data / 'test.tsv').unlink()
    train_command.train_and_evaluate(wanted, str(tmp_path / 'run'))
    assert 'there is no test split, so the run is scored on valid' in capsys.readouterr().out
    assert scores(tmp_path / 'run').keys() == {'valid'}


@pytest.mark.slow
def test_a_refused_run_leaves_its_config(tmp_path: pathlib.Path) -> None:
    data, other = toy_data.parallel(tmp_path / 'data'), toy_data.parallel(tmp_path / 'other', train=32)
    wanted = load('translate.py:smoke', tmp_path, data__path=str(data), data__tokenizer='symbol')
    train_lib.train(wanted, tmp_path / 'run')
    before = (tmp_path / 'run' / 'config.json').read_text()
    with pytest.raises(errors.UserError, match='other data'):
        train_lib.train(config.override(wanted, {'data.path': str(other)}), tmp_path / 'run')
    assert (tmp_path / 'run' / 'config.json').read_text() == before


def test_the_source_tokenizer_of_a_file_is_read_again(tmp_path: pathlib.Path) -> None:
    from tformer.data.batches import mixture
    from tformer.training import workdir

    hub = pytest.importorskip('tokenizers')
    data = toy_data.parallel(tmp_path / 'data')
    sizes = []
    for words in (['<unk>', '</s>', 'the'], ['<unk>', '</s>', 'the', 'a', 'small']):
        model = hub.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>')
        stored = hub.Tokenizer(model)
        stored.add_special_tokens(['</s>'])
        stored.save(str(tmp_path / 'tokenizer.json'))
        wanted = load('translate.py:smoke', tmp_path, data__path=str(data), data__tokenizer='char')
        changes = {'data.source_tokenizer': 'huggingface', 'data.tokenizer_path': str(tmp_path / 'tokenizer.json')}
        wanted = config.override(wanted, changes)
        made = workdir.new_tokenizers(wanted, mixture.load(wanted, 'train'))
        assert made.source is not None
        sizes.append(made.source.vocab_size)
    assert sizes[0] < sizes[1]


def children(pid: int) -> list[int]:
    found = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(pid)], capture_output=True, text=True).stdout
    return [int(line) for line in found.split()]


# Shells start commands in the background with interrupts ignored, and children inherit that.
HEEDING_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.proof
@pytest.mark.signals
@pytest.mark.parametrize('ending', [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_run(tmp_path: pathlib.Path, ending: signal.Signals) -> None:
    if subprocess.run(['which', 'ps'], capture_output=True).returncode:
        pytest.skip('there is no ps')
    data = toy_data.parallel(tmp_path / 'data')
    fields = {'data.path': data, 'train.num_steps': 100000, 'data.tokenizer': 'symbol', 'data.num_workers': 1}
    command = tformer(
        'train',
        f'--config={ROOT}/configs/translate.py:smoke',
        f'--workdir={tmp_path}/run',
        '--config.train.log_every=5',
        *(f'--config.{name}={value}' for name, value in fields.items()),
    )
    run = subprocess.Popen(
        [sys.executable, '-c', HEEDING_INTERRUPTS, *command],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert any('step 5/' in line for line in run.stdout)
    workers = children(run.pid)
    assert workers
    if ending == signal.SIGKILL:
        run.kill()
    else:
        os.killpg(run.pid, ending)  # as schedulers and terminals do
    _, said = run.communicate(timeout=HANG)
    assert run.returncode == (-ending if ending == signal.SIGKILL else 75)
    assert not any(map(outlives, workers))
    assert 'Traceback' not in said


def test_text_to_generate_from_is_utf8_and_only_a_line_feed_ends_a_line(tmp_path: pathlib.Path) -> None:
    file = tmp_path / 'lines.txt'
    file.write_text('one\u2028still one\r\ntwo\n', encoding='utf-8')
    assert texts.given([], str(file)) == ['one\u2028still one', 'two']
    assert texts.given(['', 'a\nb'], None) == ['', 'a\nb']
    with pytest.raises(errors.UserError, match='the arguments: not UTF-8: byte 0xff at 1'):
        texts.given(['a\udcff'], None)
    with pytest.raises(errors.UserError, match='the arguments: it has a NUL byte'):
        texts.given(['a\0b'], None)
    with pytest.raises(errors.UserError, match=r'^--input=.*: the arguments are texts, too; give one of them$'):
        texts.given(['a'], str(file))
    file.write_text('')
    with pytest.raises(errors.UserError, match='no text is given: pass it as arguments, with --input=FILE, or on'):
        texts.given([], str(file))


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_is_one_line(tmp_path: pathlib.Path) -> None:
    data = toy_data.parallel(tmp_path / 'data')
    (tmp_path / 'file').write_text('')
    command = tformer(
        'train',
        f'--config={ROOT}/configs/translate.py:smoke',
        f'--config.data.path={data}',
        f'--workdir={tmp_path}/file',
    )
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and f'{tmp_path}/file' in done.stderr
