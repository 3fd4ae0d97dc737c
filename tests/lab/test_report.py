"""Reports: their statistics are those of `statistics`, their bytes those of the runs, and their page asks for nothing.

The directories are written by hand: nothing trains here.
"""

import base64
import csv
import dataclasses
import hashlib
import html.parser
import io
import itertools
import json
import math
import pathlib
import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import emulated
from browsing import needs_chromium, opened
from lives import HANG
from small_sweeps import TINY
from tformer import __main__ as command_line
from tformer import checks, config
from tformer.config import Config, Evaluate, Train
from tformer.data import stores
from tformer.errors import UserError
from tformer.evaluation import metrics, predictions
from tformer.lab.report import (
    costs,
    drawing,
    explore,
    learning,
    plots,
    prose,
    render,
    report_data,
    response,
    results,
    scaling_analysis,
    tables,
    texts,
    write,
)
from tformer.lab.scaling_laws import scaling
from tformer.lab.statistics import comparison
from tformer.lab.sweep import manifest, matching, trials

LOGGED = dataclasses.replace(TINY, train=Train(num_steps=40, batch_size=8, log_every=10, eval_every=20))
FAILED, UNFINISHED = 'failed', None
FULL = 0.75  # of what their batches could hold, the runs have read


def built(
    home: pathlib.Path,
    arms: Sequence[tuple[Mapping[str, Any], Mapping[int, Any]]],
    base: Config = LOGGED,
    listed: bool = True,
    backwards: bool = False,
) -> pathlib.Path:
    """Writes the directory of a sweep whose runs ended as told, and returns it.

    Args:
      home: the directory.
      arms: what each changes, and {seed: its test loss, its scores by name, FAILED or its error, UNFINISHED}.
      base: of the sweep.
      listed: whether with the list of a sweep, or workdirs alone.
      backwards: whether the last trial is written first.
    """
    overrides = [{**changed, 'train.seed': seed} for changed, seeds in arms for seed in seeds]
    made = trials.trials(base, overrides)
    ends = [end for _, seeds in arms for end in seeds.values()]
    for trial, end in list(zip(made, ends, strict=True))[:: -1 if backwards else 1]:
        left(home / trial.directory, trial.config, end, listed)
    if listed:
        manifest.write(base, made, home, {trial.directory: 10.0 + i for i, trial in enumerate(made)})
    return home


def left(place: pathlib.Path, stated: Config, end: Any, listed: bool) -> None:
    place.mkdir(parents=True)
    if listed:
        (place / 'trial.json').write_text(json.dumps(config.to_dict(stated)))
    if end is UNFINISHED:
        return
    if isinstance(end, str):
        (place / 'error.txt').write_text(f'ValueError: {end}\n')
        (place / 'log.txt').touch()
        return
    scores = end if isinstance(end, dict) else {'loss': end}
    loss, steps = scores['loss'], stated.train.num_steps
    resolved = checks.resolve(stated, vocab_size=64)
    (place / 'config.json').write_text(json.dumps(config.to_dict(resolved)))
    rows, every = [], {'tokens': matching.num_tokens(stated), 'flops': matching.num_flops(stated)}
    for step in range(10, steps + 1, 10):
        value = loss + 1 - step / steps
        shown = {'train/loss': value if math.isfinite(value) else None, 'train/tokens_per_second': 1000.0}
        spent = {f'train/{name}': FULL * amount * step / steps for name, amount in every.items()}
        rows.append({'step': step, **shown, **spent})
        if step % 20 == 0:
            rows.append({'step': step, 'valid/loss': value if math.isfinite(value) else None})
    (place / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    size = matching.num_parameters(stated)
    (place / 'result.json').write_text(json.dumps({'test': {'step': steps, 'parameters': size, **scores}}))


HOSTILE = '</pre></code>`<script>console.error("x|")</script> <img src=http://example.com/x.png> [a](http://b)'
BASE = {0: 0.50, 1: 0.52, 2: 0.54}
BETTER = {0: 0.48, 1: 0.49, 2: 0.50}  # by 0.02, 0.03, 0.04
WORSE = {0: 0.60, 1: 0.63, 2: FAILED, 3: UNFINISHED, 4: math.nan}
ARMS = [({}, BASE), ({'model.norm': 'rmsnorm'}, BETTER), ({'model.activation': 'swiglu'}, WORSE)]


def computed_of(home: pathlib.Path, **options: Any) -> report_data.Report:
    return report_data.report(results.read(home), **options)


def written(home: pathlib.Path, export: pathlib.Path | None = None, **options: Any) -> str:
    return write.write(computed_of(home, **options), export)


@pytest.fixture(scope='module')
def home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A sweep of three arms, with its report."""
    place = built(tmp_path_factory.mktemp('report') / 'x', ARMS)
    (place / manifest.COMMAND).write_text("tformer sweep '--config=a b.py'\n")
    written(place)
    return place


@pytest.fixture(scope='module')
def number(home: pathlib.Path) -> int:
    return len(results.read(home).done)


# -------------------------------------------------------------------------------------------------------- what is read


def test_the_statistics_are_those_of_the_runs(home: pathlib.Path) -> None:
    report = computed_of(home)
    losses = {'baseline': BASE, 'norm=rmsnorm': BETTER, 'activation=swiglu': {0: 0.60, 1: 0.63, 2: None, 4: math.nan}}
    assert repr(report.rows) == repr(comparison.summary(losses, 'baseline', lower_is_better=True, ended=False))
    assert report.arms == ['baseline', 'norm=rmsnorm', 'activation=swiglu']
    assert {row.label for row in report.rows[1:]} == {'not yet'}  # a trial has not ended
    assert report.rows[2].runs.failed == 2 and report.rows[2].runs.n == 2
    found = report.results
    assert [sum(run.state == state for run in found.runs) for state in ('done', 'failed', 'unfinished')] == [9, 1, 1]
    (home / 'activation=swiglu/seed_3/error.txt').write_text('ValueError: no\n')
    report, other = computed_of(home), computed_of(home, baseline='norm=rmsnorm', alpha=0.2)
    (home / 'activation=swiglu/seed_3/error.txt').unlink()
    losses['activation=swiglu'][3] = None
    assert repr(report.rows) == repr(comparison.summary(losses, 'baseline', lower_is_better=True))
    assert [row.label for row in report.rows[1:]] == ['better', 'too few runs']
    assert report.rows[1].verdict.interval == pytest.approx((-0.03 - 0.024841, -0.03 + 0.024841), abs=3e-4)
    assert repr(other.rows) == repr(comparison.summary(losses, 'norm=rmsnorm', True, alpha=0.2))


def test_the_findings_are_plain_sentences(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = computed_of(built(tmp_path / 'x', ARMS[:2]))
    assert prose.scale(report.rows).decimals == 3 and prose.scale(report.rows[:1]).spread(0.5, 0.02) == '0.500 ± 0.020'
    assert render.sentences(report, 'headline') == [
        '1 arm against `baseline`, by test loss (lower is better). 6 trials: 6 done.'
    ]
    better = '`norm=rmsnorm`: test loss 0.490 ± 0.010, 0.030 lower than the baseline (95 % interval -0.055 to -0.005, '
    assert render.sentences(report, 'arms') == [
        '`baseline`: test loss 0.520 ± 0.020, 3 seeds: the baseline', f'{better}p = 0.035 by Dunnett): better',
    ]  # fmt: skip
    near = computed_of(tmp_path / 'x', alpha=0.01)
    (_, line) = render.sentences(near, 'arms')
    assert '(99 % interval -0.087 to +0.027, p = 0.035 by Dunnett): within noise; if the true difference is ' in line
    assert line.endswith(f'this large, about {near.rows[1].verdict.seeds} fresh seeds decide')
    text = (home / 'report.md').read_text()
    assert '11 trials: 9 done, 1 failed and 1 unfinished.\n' in text
    waits = 'not yet; labels wait for the runs that have not ended'
    assert f'- `norm=rmsnorm`: test loss 0.490 ± 0.010, 0.030 lower than the baseline: {waits}\n' in text
    assert f'0.105 higher than the baseline: {waits}; 2 runs failed\n' in text and '| paired t of 2 pairs |' in text
    assert (
        '| `norm=rmsnorm` | not yet | 3 | 0.490 ± 0.010 | -0.030 | - | - | - | - | - | -1.69 | 0.035 | paired t |'
        in text
    )
    row = '| `norm=rmsnorm` | better | 3 | 0.490 ± 0.010 | -0.030 | -0.055 to -0.005 | 0.035 | Dunnett | '
    assert row in render.markdown(report)


def test_what_keeps_a_label_back_is_said(tmp_path: pathlib.Path) -> None:
    arms = {
        'model.activation': ('swiglu', {7: 0.9}),
        'model.norm': ('rmsnorm', BASE),
        'model.num_heads': (2, {0: 0.1, 1: 0.11, 2: 0.13, 3: FAILED, 4: FAILED}),
        'model.emb_dim': (32, dict.fromkeys(range(3), FAILED)),
    }
    changed = [({field: value}, runs) for field, (value, runs) in arms.items()]
    report = computed_of(built(tmp_path / 'x', [({}, {**BASE, 3: FAILED}), *changed]))
    told = {line.partition(':')[0]: line for line in render.sentences(report, 'arms')}
    assert told['`baseline`'].endswith(', 3 seeds: the baseline; 1 run failed')
    assert told['`activation=swiglu`'].endswith(': too few runs; a label takes 3 finite runs of either side')
    assert told['`norm=rmsnorm`'] == '`norm=rmsnorm`: test loss 0.520 ± 0.020: the same as the baseline in every run'
    assert told['`num_heads=2`'].endswith(
        ': fails more often; its finite runs are better, but they are the ones that did not fail; 2 runs failed'
    )
    assert told['`emb_dim=32`'] == '`emb_dim=32`: no finite test loss (3 failed): worse'
    assert render.sentences(report, 'limited') == []
    all_right, all_wrong = dict.fromkeys(range(3), 0.0), dict.fromkeys(range(3), 1.0)
    few = dataclasses.replace(LOGGED, evaluate=Evaluate(samples=0, max_examples=4))
    report = computed_of(built(tmp_path / 'y', [({}, all_wrong), ({'model.norm': 'rmsnorm'}, all_right)], few))
    assert render.sentences(report, 'arms')[1].endswith(
        ': noise unknown; the differences show no noise, and more seeds would tell'
    )
    assert render.sentences(report, 'limited') == [
        'Only the first 4 records of the test split are scored (evaluate.max_examples).'
    ]


@pytest.mark.parametrize('metric, label', [('test/word_error_rate', 'better'), ('test/bleu', 'worse')])
def test_which_direction_is_better_the_name_says(metric: str, label: str, tmp_path: pathlib.Path) -> None:
    name = metric.partition('/')[2]
    arms = [(changed, {seed: {'loss': 1.0, name: x} for seed, x in runs.items()}) for changed, runs in ARMS[:2]]
    report = computed_of(built(tmp_path / 'x', arms), metric=metric)
    assert report.rows[1].label == label
    assert report.metric == metric and list(report.others) == ['test/loss']
    assert {row.label for row in report.others['test/loss'][1:]} == {'within noise'}


def test_a_run_without_the_metric_is_named_and_has_not_failed(tmp_path: pathlib.Path) -> None:
    ends = {0: {'loss': 1.0, 'bleu': 3.0}, 1: {'loss': 1.0}, 2: FAILED, 3: UNFINISHED}
    report = computed_of(built(tmp_path / 'x', [({}, ends)]), metric='test/bleu')
    assert report.lacking == ['baseline/seed_1'] and (report.rows[0].runs.n, report.rows[0].runs.failed) == (1, 1)
    assert '\n\nDone, but without test bleu: `baseline/seed_1`.\n\n' in render.markdown(report)
    assert render.sentences(report, 'arms')[0].endswith('1 run failed; 1 seed without a result left out')
    assert list(report.others) == ['test/loss']


def test_workdirs_without_a_list_are_arms_by_what_differs(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = [(changed, {seed: x for seed, x in runs.items() if type(x) is float}) for changed, runs in ARMS]
    place = built(tmp_path / 'x', done, listed=False)
    (place / 'norm=rmsnorm/seed_2').rename(place / 'a')
    report = computed_of(place)
    assert report.arms == ['baseline', 'norm=rmsnorm', 'activation=swiglu']
    losses = {'baseline': BASE, 'norm=rmsnorm': BETTER, 'activation=swiglu': {0: 0.60, 1: 0.63, 4: math.nan}}
    assert repr(report.rows) == repr(comparison.summary(losses, 'baseline', lower_is_better=True))
    (by_seconds,) = report.timing.matched
    assert by_seconds.why == 'those of baseline are unknown' and report.costs['baseline'].seconds is None
    shutil.copytree(place / 'a', place / 'again')
    with pytest.raises(UserError, match=r'a and again are runs of the same config and train\.seed'):
        results.read(place)


def test_one_arm_is_its_noise_alone(tmp_path: pathlib.Path) -> None:
    place = built(tmp_path / 'x', ARMS[:1])
    written(place)
    text = (place / 'report.md').read_text()
    assert '`baseline` alone: its noise, by test loss' in text
    assert 'Noise floor of `baseline`: standard deviation 0.020' in text and 'p of all' in text and 'forest' not in text


def test_the_report_of_a_directory_on_a_store_stands_there(tmp_path: pathlib.Path, monkeypatch) -> None:
    built(tmp_path / 'runs', [({}, BASE), ({'model.norm': 'rmsnorm'}, BETTER)])
    store = emulated.memory()
    for file in filter(pathlib.Path.is_file, (tmp_path / 'runs').rglob('*')):
        store.write(file.relative_to(tmp_path / 'runs').as_posix(), file.read_bytes())
    monkeypatch.setattr(stores, 'Store', lambda url: store)
    command_line.main(['tformer', 'report', store.url, '--timing=false'])
    assert {'report.md', 'report.html'} <= {*store.names()}
    for refused in ([store.url, 's3://bucket/other'], [str(tmp_path / 'runs'), f'--export={store.url}']):
        with pytest.raises(UserError, match=f'^{store.url} is a URL, and this takes a path'):
            command_line.main(['tformer', 'report', *refused])


def test_several_sweeps_are_compared_in_one_report(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    """Their arms have the names of their directories, and all are one family against the first baseline."""
    monkeypatch.chdir(tmp_path)
    built(pathlib.Path('runs/a'), [({}, BASE), ({'model.norm': 'rmsnorm'}, {**BETTER, 3: FAILED})])
    slow = dataclasses.replace(LOGGED, train=dataclasses.replace(LOGGED.train, num_steps=20))
    built(pathlib.Path('runs/b/c'), [({}, WORSE)], base=slow, listed=False)
    (tmp_path / 'runs/a/command.txt').write_text('tformer sweep --config=a.py\n')
    command_line.main(['tformer', 'report', 'runs/a', 'runs/b/c', '--timing=false'])
    assert capsys.readouterr().out.splitlines()[-1] == 'runs/report.html'
    text = (tmp_path / 'runs/report.md').read_text()
    assert text.startswith('# Report of `runs/a` and `runs/b/c`\n')
    losses = {'a/baseline': BASE, 'a/norm=rmsnorm': {**BETTER, 3: None}, 'b/c/baseline': {0: 0.6, 1: 0.63, 4: math.nan}}
    report = report_data.report(results.read_several(['runs/a', 'runs/b/c']), timing=False)
    assert repr(report.rows) == repr(comparison.summary(losses, 'a/baseline', lower_is_better=True))
    assert report.differences['b/c/baseline'] == {'train.num_steps': (40, 20)}
    assert '| `a/norm=rmsnorm/seed_3` | failed | `ValueError: failed` | `runs/a/norm=rmsnorm/seed_3/log.txt` |' in text
    assert '    tformer sweep --config=a.py --workdir=runs/a\n' in text
    assert '    tformer train --config=runs/b/c/baseline/seed_0/config.json --workdir=runs_again/b/c/baseline/' in text
    assert (
        '    tformer report runs/a runs/b/c --metric=test/loss --baseline=a/baseline --alpha=0.05 --timing=false'
        in text
    )
    whole = results.read_several([tmp_path / 'runs/a', 'runs/b/c'])
    assert whole.home == tmp_path / 'runs' and list(whole.arms) == list(losses)
    twice = 'runs/a: its runs are also those of'
    for wrong, why in ((['runs/a', './runs/a/'], twice), (['runs', 'runs/a'], twice), ([], 'no directory is given')):
        with pytest.raises(UserError, match=why):
            results.read_several(wrong)


def test_that_arms_have_other_tasks_is_said(tmp_path: pathlib.Path) -> None:
    scores = {'loss': 1.0, 'bits_per_byte': 2.0}
    arms = [({}, {0: scores}), ({'data.tokenizer': 'char', 'model.norm': 'rmsnorm'}, {0: scores})]
    home = built(tmp_path / 'x', arms)
    line = 'The tasks of the arms differ, in data.tokenizer: a difference of test loss may be one of tasks.'
    assert (
        line in written(home).splitlines()
        and line.replace('data.tokenizer', '`data.tokenizer`') in (home / 'report.md').read_text()
    )
    assert 'The tasks' not in written(home, metric='test/bits_per_byte')  # whatever the tokens
    other = built(
        tmp_path / 'y',
        [({}, {0: 1.0})],
        base=dataclasses.replace(LOGGED, data=dataclasses.replace(LOGGED.data, split_by='family')),
    )
    both = report_data.report(results.read_several([home, other]))
    assert both.tasks == ['data.split_by', 'data.tokenizer']


def test_scores_by_other_fields_than_the_run_has_are_tasks_that_differ(tmp_path: pathlib.Path) -> None:
    """`tformer evaluate` of one run, on fewer records: by its config nothing differs."""
    home = built(tmp_path / 'x', [({}, {0: 1.0, 1: 1.5}), ({'model.norm': 'rmsnorm'}, {0: 1.0, 1: 2.0})])
    assert 'The tasks' not in written(home)
    place = sorted(home.glob('*/seed_1'))[0]
    result = {**json.loads((place / 'result.json').read_text()), 'overrides': {'test': {'evaluate.max_examples': 1}}}
    (place / 'result.json').write_text(json.dumps(result))
    assert 'The tasks of the arms differ, in evaluate.max_examples: ' in written(home)
    (place / 'result.json').write_text(json.dumps({**result, 'overrides': {'test': {'average': 2}}}))
    assert 'The tasks of the arms differ, in average: ' in written(home)


def test_many_arms_have_few_words(tmp_path: pathlib.Path, monkeypatch) -> None:
    """Each arm is in the first table and in the files; the other tables have the baseline and the best."""
    monkeypatch.setattr(drawing, 'installed', lambda: False)
    arms = [({}, {0: 2.0})] + [({'optimizer.learning_rate': 0.001 * i}, {0: 1.0 + 0.01 * i}) for i in range(2, 62)]
    report = computed_of(built(tmp_path / 'x', arms))
    text = render.markdown(report)
    count = {arm: text.count(f'\n| `{arm}` |') for arm in report.arms}
    assert min(count[arm] for arm in report.arms[: prose.LISTED]) >= 4
    assert {count[arm] for arm in report.arms[prose.LISTED :]} == {1}
    assert 'Tables after the first have the baseline and the 49 best other arms.' in text
    assert '- 41 more arms, not better than these, in the table against the baseline.' in text
    assert len(render.sentences(report, 'arms')) == prose.TOLD + 1
    assert {len(table.rows) for table in tables.tables(render.markdown(report, most=None, page=True))} >= {61, 60}
    written(tmp_path / 'x')
    shown = (tmp_path / 'x/report.html').read_text()
    assert f'>all {len(arms)} rows</label>' in shown and 'class="more"' in shown
    data = json.loads(re.search('id="data">(.*?)</script>', shown)[1])
    assert data['arms'] == list(map(prose.brief, report.arms)) and len(data['curves']['train/loss']) == explore.CURVES


@pytest.mark.proof
def test_a_thousand_runs_make_a_page_that_loads(tmp_path: pathlib.Path, monkeypatch) -> None:
    """500 arms of four fields with long names, two of whose runs are broken; no model is looked at."""
    rng, arms = np.random.default_rng(0), [({}, {0: 1.0, 1: 1.1})]
    for _ in range(499):
        rates = {field: float(10 ** rng.uniform(-4, -1)) for field in ('optimizer.learning_rate', 'model.dropout_rate')}
        changed = rates | {'optimizer.weight_decay': float(rng.random()), 'train.label_smoothing': float(rng.random())}
        arms.append((changed, {seed: float(1 + rng.random()) for seed in (0, 1)}))
    home = built(tmp_path / 'x', arms)
    broken = sorted(home.glob('*/seed_1/result.json'))[:2]
    broken[0].write_text(broken[0].read_text()[:20])
    broken[1].with_name('metrics.jsonl').write_bytes(b'\0\n')
    matching._of_shapes.cache_clear()
    said = written(home)
    assert matching._of_shapes.cache_info().misses == 0  # the results say how many parameters there are
    assert len(said.splitlines()) == prose.TOLD + 3
    text, page = (home / 'report.md').read_text(), (home / 'report.html').read_text()
    assert '1,000 trials: 998 done and 2 unreadable.' in text
    assert all(f'| `{file.parent.relative_to(home)}` | unreadable |' in text for file in broken)
    assert len(re.sub('<svg .*?</svg>', '', page, flags=re.DOTALL)) < 1_000_000
    assert page.count('<tr>') >= 500 and len(json.loads(re.search('id="data">(.*?)</script>', page)[1])['arms']) == 500


def test_what_matters_in_a_search_stands_beside_its_fields(tmp_path: pathlib.Path) -> None:
    searched(tmp_path / 'x', lambda *shares: 1 + abs(shares[0] - 0.4))
    report = report_data.report(results.read(tmp_path / 'x'))
    text = render.markdown(report)
    assert '| field | values | of the best arm | p |\n' in text
    best = report.fields['optimizer.learning_rate'][report.best]
    p = prose.probability(report.response.search.p['optimizer.learning_rate'])
    least, most = (f'{end(report.fields["optimizer.learning_rate"]):.4g}' for end in (min, max))
    row = f'| `optimizer.learning_rate` | `16 values: {least} to {most}` | `{best:.4g}` | {p} |\n'
    assert next(iter(report.fields)) == 'optimizer.learning_rate' and row in text
    assert min(report.rows, key=lambda row: row.runs.mean).arm == report.arms[report.best]


def test_where_nothing_is_done_the_report_says_why(tmp_path: pathlib.Path) -> None:
    place = built(tmp_path / 'x', [({}, {0: 'no data\nmore'}), ({'model.norm': 'rmsnorm'}, {0: UNFINISHED})])
    written(place)
    text = (place / 'report.md').read_text()
    assert '2 trials: 0 done, 1 failed and 1 unfinished' in text
    assert f'| `baseline/seed_0` | failed | `ValueError: no data` | `{place}/baseline/seed_0/log.txt` |' in text
    assert '| `norm=rmsnorm/seed_0` | unfinished |  | - |' in text


def test_mistakes_are_one_line(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / 'sweep.json').write_text('{"trials": []}')
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'one').mkdir()
    (tmp_path / 'one' / 'config.json').write_text('{}')
    for message, act in {
        "--metric=test/los is in no result; did you mean 'test/loss'": lambda: computed_of(home, metric='test/los'),
        "--baseline=norm=rms is not an arm; did you mean 'norm=rmsnorm'": lambda: computed_of(
            home, baseline='norm=rms'
        ),
        '--alpha=5 must be between 0 and 1': lambda: computed_of(home, alpha=5),
        'not the list of a sweep': lambda: results.read(tmp_path),
        'no runs are here': lambda: results.read(tmp_path / 'empty'),
        'it is one itself, so name the directory that it is in': lambda: results.read(tmp_path / 'one'),
        'report takes one directory or several': lambda: command_line.main(['tformer', 'report']),
    }.items():
        with pytest.raises(UserError, match=re.escape(message)) as error:
            act()
        assert '\n' not in str(error.value)


DAMAGES = {
    'cut': lambda contents: contents[: len(contents) // 2] + b'\n',
    'empty': lambda contents: b'\n',
    'not an object': lambda contents: b'[1, 2]\n',
    'other values': lambda contents: re.sub(rb': [^,}]+', b': "x"', contents),
    'a key twice': lambda contents: re.sub(rb'{\s*("\w+":)', rb'{\1 0, \1', contents, count=1),
    'nested': lambda contents: b'[' * 100_000 + b'\n',
    'huge number': lambda contents: re.sub(rb'(?<=": )\d+', b'9' * 400, contents, count=1),
    'binary': lambda contents: b'\x80\xff\0' + contents,
    'a directory': None,
}


@pytest.mark.slow
@pytest.mark.parametrize('damage', DAMAGES)
@pytest.mark.parametrize('name', ['result.json', 'metrics.jsonl', 'config.json', 'predictions_test.jsonl'])
@pytest.mark.parametrize('listed', [True, pytest.param(False, marks=pytest.mark.proof)])
def test_a_damaged_file_ends_no_report_and_is_named_in_it(
    home: pathlib.Path, number: int, tmp_path: pathlib.Path, monkeypatch, name: str, damage: str, listed: bool
) -> None:
    if damage != 'other values':  # one drawing of each file is enough
        monkeypatch.setattr(drawing, 'installed', lambda: False)
    place = shutil.copytree(home, tmp_path / 'x')
    if not listed:
        (place / 'sweep.json').unlink()
    predictions.write(place / 'baseline/seed_0', 'test', ['a', 'b'], [['a'], ['b', 'c']])
    file, change = place / 'baseline/seed_0' / name, DAMAGES[damage]
    contents = file.read_bytes()
    file.unlink()
    if change is None:
        file.mkdir()
    elif (changed := change(contents)) != contents:
        file.write_bytes(changed)
    else:
        pytest.skip('there is nothing to damage')
    left = results.read(place)
    written(place)
    assert len(left.done) == number - 1 and f'{file}' in (place / 'report.md').read_text()


@pytest.mark.stack
def test_the_command_takes_its_flags(home: pathlib.Path, capsys) -> None:
    flags = ['--baseline=norm=rmsnorm', '--alpha=0.1', '--timing=false', '--reach=train/loss=0.75']
    command_line.main(['tformer', 'report', str(home), *flags])
    said = capsys.readouterr().out.splitlines()
    text = (home / 'report.md').read_text()
    written(home)
    assert said[0].startswith('norm=rmsnorm: test loss 0.490') and said[-1] == str(home / 'report.html')
    assert '## Time' not in text and '90 % interval' in text
    flags.insert(2, flags.pop())
    assert f'tformer report {home} --metric=test/loss {" ".join(flags)}' in text


# ------------------------------------------------------------------------------------------------ curves, costs, fields


def test_curves_are_means_and_arms_are_matched_in_what_they_spent(tmp_path: pathlib.Path) -> None:
    """The loss falls by 1 over a run, evenly; half the batch takes half the tokens and FLOPs a step."""
    arms = [({}, BASE), ({'train.batch_size': 4}, BETTER)]
    report = computed_of(built(tmp_path / 'x', arms))
    band = report.curves['train/loss']['baseline']
    assert band.steps.tolist() == [10, 20, 30, 40] and band.runs == 3
    np.testing.assert_allclose(band.mean, [1.27, 1.02, 0.77, 0.52])
    np.testing.assert_allclose(band.sd, 0.02)
    assert set(report.curves) == {'train/loss', 'valid/loss'} and report.curve == 'valid/loss'
    by_steps, by_tokens = report.matched
    assert (by_steps.quantity, by_steps.same, by_steps.at) == ('steps', (), 40)
    assert (by_tokens.quantity, by_tokens.same, by_tokens.at) == ('tokens', ('flops',), 0.75 * 40 * 4 * 16)
    assert by_steps.rows[1].comparison.difference == pytest.approx(-0.03)
    assert by_tokens.rows[1].comparison.difference == pytest.approx(-0.03 - 0.5)  # the baseline is half way
    (speed_up,) = report.speed_ups
    assert speed_up.value == pytest.approx(0.52) and speed_up.steps == pytest.approx(20 + 20 * (0.99 - 0.52) / 0.5)
    assert speed_up.factor == pytest.approx(40 / speed_up.steps)
    spent = report.costs['train.batch_size=4']
    stated = report.results.arms['train.batch_size=4'][0].stated
    assert (spent.parameters, spent.tokens) == (matching.num_parameters(stated), 0.75 * matching.num_tokens(stated))
    assert spent.flops == pytest.approx(0.75 * matching.num_flops(stated))
    (by_seconds,) = report.timing.matched
    assert by_seconds.at == pytest.approx(10.0) and spent.seconds == pytest.approx(14.0)  # of the shortest run
    assert {(row.verdict.p > 0, row.verdict.interval, row.label, row.comparison) for row in by_seconds.rows} == {
        (False, None, '', None)
    }


def test_amounts_are_those_that_the_logs_tell(tmp_path: pathlib.Path) -> None:
    """An arm whose rows are long at first has read what the baseline does in all after a quarter of its steps."""
    home = built(tmp_path / 'x', [({}, BASE), ({'data.length': 12}, BETTER)])
    for log in home.glob('length=12/*/metrics.jsonl'):
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        for row in rows:
            if 'train/tokens' in row:
                row['train/tokens'] = 40 * 8 * 16 * FULL * (1 + (row['step'] - 10) / 30)
        log.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    report = computed_of(home, metric='test/loss')
    assert report.costs['length=12'].tokens == 2 * report.costs['baseline'].tokens == 2 * FULL * 40 * 8 * 16
    by_tokens = next(found for found in report.matched if found.quantity == 'tokens')
    assert by_tokens.why  # the first evaluation has read more than the baseline ever does
    rows = learning.matched(report.results, report.costs, 'train/loss', 'baseline', True, 0.05, ('tokens',))[0].rows
    assert rows[1].comparison.difference == pytest.approx(-0.03 + 0.75)


def test_when_a_value_is_reached_is_told_of_each_arm(home: pathlib.Path) -> None:
    """A run that ends with L has L + 1 - s / 40 after s steps; the one that is no number reaches nothing."""
    told = render.sentences(computed_of(home, reach=['train/loss=0.75', 'train/loss=0.55']), 'reached')
    assert told == [
        '`baseline`: train loss reaches 0.75 after 31 ± 1 steps in 3 of 3 runs',
        '`norm=rmsnorm`: train loss reaches 0.75 after 30 ± 0 steps in 3 of 3 runs',
        '`activation=swiglu`: train loss reaches 0.75 after 35 ± 1 steps in 2 of 4 runs',
        '`baseline`: train loss reaches 0.55 after 39 ± 1 steps in 3 of 3 runs',
        '`norm=rmsnorm`: train loss reaches 0.55 after 38 ± 0 steps in 3 of 3 runs',
        '`activation=swiglu`: train loss reaches 0.55 in 0 of 4 runs',
    ]
    told = render.sentences(computed_of(home, reach=['train/loss=1.26']), 'reached')  # 1.25, 1.27, 1.29 after 10 steps
    assert (
        told[0]
        == '`baseline`: train loss reaches 1.26 after 11 ± 1 steps in 3 of 3 runs, 1 of them by the first report'
    )
    for wrong, why in (
        ('train/loss', 'is not NAME=VALUE'),
        ('train/loss=nan', 'is not NAME=VALUE'),
        ('train/los=1', "has train/los; did you mean 'train/loss'?"),
    ):
        with pytest.raises(UserError, match=re.escape(why)):
            computed_of(home, reach=[wrong])


def test_which_checkpoints_are_scored_is_told_where_it_is_not_the_last(tmp_path: pathlib.Path) -> None:
    scores = {seed: {'loss': 0.5 + 0.01 * seed, 'step': 20 + 10 * seed} for seed in (0, 1)}
    home = built(tmp_path / 'x', [({}, scores), ({'model.norm': 'rmsnorm'}, BETTER)])
    report = computed_of(home)
    assert [report.costs[arm].scored for arm in report.arms] == [40.0, 25.0][
        :: 1 if report.arms[0] != 'baseline' else -1
    ]
    (told,) = render.sentences(report, 'scored')
    assert told.startswith('The scores are those of the checkpoints best by `valid/loss`, after 25')
    assert render.sentences(computed_of(built(tmp_path / 'y', ARMS)), 'scored') == []


def test_a_mean_is_of_the_steps_that_all_runs_report(tmp_path: pathlib.Path) -> None:
    home = built(tmp_path / 'x', ARMS[:1])
    log = home / 'baseline/seed_1/metrics.jsonl'
    log.write_text(''.join(line for line in log.read_text().splitlines(keepends=True) if '"step": 10' not in line))
    band = computed_of(home).curves['train/loss']['baseline']
    assert band.steps.tolist() == [20, 30, 40] and band.mean[-1] == pytest.approx(0.52)


def test_without_a_curve_of_the_baseline_no_arm_reaches_its_last_value() -> None:
    band = learning.Band(np.array([10, 20]), np.array([2.0, 1.0]), np.zeros(2), 1)
    assert learning.speed_ups({'arm': band}, 'baseline', True) == []
    (found,) = learning.speed_ups({'arm': band, 'baseline': band}, 'baseline', True)
    assert (found.arm, found.value, found.steps, found.factor) == ('arm', 1.0, 20.0, 1.0)


def test_curves_that_share_nothing_are_not_compared(tmp_path: pathlib.Path) -> None:
    arms = [({}, BASE), ({'train.batch_size': 32, 'optimizer.learning_rate': 1e-4}, BETTER)]
    home = built(tmp_path / 'x', arms)
    written(home)
    text = (home / 'report.md').read_text()
    assert 'valid loss at matched steps, after 40:' in text
    assert 'Not compared at matched tokens: no amount lies within the curves of all runs.' in text


def test_the_front_is_what_no_arm_beats() -> None:
    spent = {'a': 1.0, 'b': 2.0, 'c': 2.0, 'd': 3.0, 'e': 4.0, 'f': None, 'g': 0.5}
    means = {'a': 5.0, 'b': 4.0, 'c': 4.0, 'd': 4.5, 'e': 1.0, 'f': 0.0, 'g': math.nan}
    assert costs.front(spent, means, lower_is_better=True) == {'a', 'b', 'c', 'e'}
    assert costs.front(spent, means, lower_is_better=False) == {'a'}


@pytest.mark.slow
def test_a_field_of_numbers_is_drawn_in_lines_with_the_best_of_each(tmp_path: pathlib.Path) -> None:
    rates, widths = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 2.0), (16, 32)
    best = {16: 1e-3, 32: 1e-4}
    arms = [
        ({'model.emb_dim': width, 'model.num_heads': width // 8, 'optimizer.learning_rate': rate},
         {seed: 0.5 + 0.1 * abs(math.log10(rate / best[width])) + 0.01 * seed for seed in (0, 1)})
        for width in widths for rate in rates
    ]  # fmt: skip
    home = built(tmp_path / 'x', arms)
    report = computed_of(home)
    assert report.response.field == 'optimizer.learning_rate'
    for line in report.response.lines:
        assert list(line.fixed) == ['model.emb_dim']  # by which the fields that change with it are known
        assert line.x.tolist() == list(rates) and line.x[line.best] == best[line.fixed['model.emb_dim']]
        assert line.at_edge == (line.fixed['model.emb_dim'] == 32)
        assert line.mean[line.best] == pytest.approx(0.505)
    widths = {16: {0: 0.50, 1: 0.54, 2: 0.52}, 24: {0: 0.52, 1: 0.51, 2: 0.56}, 32: {0: 0.7, 1: 0.73, 2: 0.72}}
    noisy = computed_of(built(tmp_path / 'z', [({'model.emb_dim': width}, runs) for width, runs in widths.items()]))
    assert noisy.response.lines[0].near == [24.0]
    assert '| within noise of it: `24`' in render.markdown(noisy)
    written(home)
    note = 'at the edge of the values tried: a better one may lie beyond'
    row = f'| `model.emb_dim=32` | `0.0001` | 0.5050 ± 0.0071 | {note} |'
    assert row in (home / 'report.md').read_text()
    shown = (home / 'report.html').read_text()
    assert shown.count('Only the baseline and the 9 best other arms are drawn.</figcaption>') == 6
    assert computed_of(built(tmp_path / 'y', ARMS)).response is None


def searched(place: pathlib.Path, loss: Any, count: int = 16) -> report_data.Report:
    """A random search of three fields, with the loss as a function of their shares of the searched ranges."""
    ranges = {'optimizer.learning_rate': 1.0, 'model.dropout_rate': 0.5, 'optimizer.weight_decay': 0.2}
    rng = np.random.default_rng(5)
    arms = []
    for _ in range(count):
        shares = rng.random(len(ranges))
        changed = {field: round(most * share, 4) for (field, most), share in zip(ranges.items(), shares, strict=True)}
        arms.append((changed, {seed: loss(*shares) + 0.01 * rng.normal() for seed in (0, 1)}))
    return computed_of(built(place, arms))


@pytest.mark.parametrize('cause', range(3))
def test_a_random_search_credits_the_field_that_the_loss_depends_on(tmp_path: pathlib.Path, cause: int) -> None:
    report = searched(tmp_path / 'x', lambda *shares: 1 + abs(shares[cause] - 0.4))
    names = ['optimizer.learning_rate', 'model.dropout_rate', 'optimizer.weight_decay']
    found = report.response
    assert found.field == names[cause] and len(found.lines) == 1
    assert [name for name in names if found.search.p[name] <= 0.05] == [names[cause]]
    (told,) = render.sentences(report, 'searched')
    assert f'The test loss depends on `{names[cause]}` (p ' in told
    assert 'No effect is seen of ' in told and told.endswith('Along the line, the other fields vary too.')


@pytest.mark.parametrize('cause', ['optimizer.learning_rate', 'model.dropout_rate', 'model.norm'])
def test_a_search_among_few_values_is_tested_too(tmp_path: pathlib.Path, cause: str) -> None:
    rng, arms = np.random.default_rng(1), []
    for number in range(24):
        rate, rest, kind = float(np.round(rng.random(), 4)), 0.1 * (number % 3), number % 2
        loss = {'optimizer.learning_rate': rate, 'model.dropout_rate': rest, 'model.norm': kind}[cause]
        changed = {'optimizer.learning_rate': rate, 'model.dropout_rate': rest}
        arms.append((changed | {'model.norm': ('layernorm', 'rmsnorm')[kind]}, {0: loss + 0.02 * rng.normal()}))
    found = computed_of(built(tmp_path / 'x', arms)).response
    assert [name for name, p in found.search.p.items() if p <= 0.05] == [cause]
    ablation = [({}, {0: 1.0}), *(({'optimizer.learning_rate': x}, {0: x}) for x in (0.1, 0.2, 0.3))]
    one_at_a_time = computed_of(built(tmp_path / 'y', [*ablation, ({'model.norm': 'rmsnorm'}, {0: 1.0})])).response
    assert one_at_a_time.search is None and len(one_at_a_time.lines) == 1


def test_a_random_search_credits_no_field_that_it_does_not_tell_apart(tmp_path: pathlib.Path) -> None:
    nothing = searched(tmp_path / 'x', lambda *shares: 1.0)
    assert (nothing.response.field, nothing.response.lines) == ('', ())
    assert render.sentences(nothing, 'searched')[0].endswith('No effect of any of them is seen.')
    few = searched(tmp_path / 'y', lambda rate, *_: 1 + rate, count=6)
    assert few.response.field == '' and '[["response"' not in render.markdown(few, page=True)
    assert 'They are too few to tell the fields apart.' in render.markdown(few)


def test_fields_that_change_together_are_named_together(tmp_path: pathlib.Path) -> None:
    arms = [({'model.emb_dim': 8 * heads, 'model.num_heads': heads}, {0: 1.0 / heads}) for heads in (1, 2, 4)]
    report = computed_of(built(tmp_path / 'x', arms))
    assert (report.response.field, report.response.together) == ('model.emb_dim', ['model.num_heads'])
    assert '`model.emb_dim` changes together with `model.num_heads`: these runs do not' in render.markdown(report)


@pytest.mark.parametrize('arms', [12, 30])
@pytest.mark.parametrize('correlation', [0.0, 0.8])
@pytest.mark.parametrize('shape', ['valley', 'slope', 'cliff'])
def test_a_field_that_goes_along_with_the_cause_is_not_credited(shape: str, correlation: float, arms: int) -> None:
    """With independent fields and such that are correlated, of a loss with a best value, a slope, or divergence."""
    shapes = {'valley': lambda z: abs(z - 0.5), 'slope': lambda z: z, 'cliff': lambda z: np.where(z > 1, np.inf, -z)}
    rng, credited = np.random.default_rng(0), []
    for _ in range(200):
        cause, other = rng.normal(size=(2, arms))
        other = correlation * cause + math.sqrt(1 - correlation**2) * other
        loss = shapes[shape](cause) + 0.1 * rng.normal(size=arms)
        p = response.search({'cause': cause.tolist(), 'other': other.tolist()}, loss.tolist()).p
        credited.append([p['cause'] <= 0.05, p['other'] <= 0.05])
    cause, other = np.mean(credited, 0)
    assert other <= 0.07 + 3 * math.sqrt(0.07 * 0.93 / 200)
    assert cause >= (0.9 if arms == 30 and shape != 'cliff' else 0.2)


@pytest.mark.slow
def test_the_law_of_exact_losses_is_found() -> None:
    """E 1.7, A 40, a 0.4, B 60, b 0.5, of one run each without noise."""
    N, D = (each.ravel() for each in np.meshgrid([1e4, 3e4, 1e5, 3e5], [1e5, 3e5, 1e6, 3e6]))
    found = scaling_analysis.fitted(scaling_analysis.Scaling(N, D, 1.7 + 40 * N**-0.4 + 60 * D**-0.5, 6 * N * D), 0.95)
    assert_exact(found.law)
    low, high = found.bounds['alpha']
    assert low <= 0.4001 and high >= 0.3999 and found.budgets[-1] == pytest.approx(10 * 6 * 3e5 * 3e6)
    assert found.profiles is None and found.no_profiles and found.held_out_error < 1e-3


def assert_exact(law: scaling.Law) -> None:
    assert (law.E, law.A, law.alpha, law.B, law.beta) == pytest.approx((1.7, 40, 0.4, 60, 0.5), rel=5e-3)


def sized(place: pathlib.Path, field: str, values: Sequence[Any], number: int = 3) -> pathlib.Path:
    """Runs of so many sizes and lengths of the law's losses, 10 % higher with the second value of a field.

    A run of 160 steps has its best checkpoint half way, with the loss that the law has there.
    """
    arms = []
    for width, steps in itertools.product((16, 32, 64, 128)[:number], (20, 40, 80, 160)[:number]):
        for value, factor in zip(values, (1.0, 1.1), strict=True):
            changed = {'model.emb_dim': width, 'train.num_steps': steps, field: value}
            made, scored = config.override(LOGGED, changed), min(steps, 80)
            N, D = matching.num_parameters(made), FULL * matching.num_tokens(made) * scored / steps
            loss = factor * (1.7 + 40 * N**-0.4 + 60 * D**-0.5)
            arms.append((changed, {0: {'loss': loss, 'step': scored}}))
    return built(place, arms)


@pytest.fixture
def without_bounds(monkeypatch) -> None:
    """Reports without the fits of resampled runs, which take long."""

    def none(*_: Any) -> None:
        raise UserError('none here')

    monkeypatch.setattr(scaling, 'bootstrap', none)


@pytest.mark.slow
@pytest.mark.usefixtures('without_bounds')
def test_the_scaling_law_is_of_the_best_arms_and_of_the_tokens_that_their_losses_had(tmp_path: pathlib.Path) -> None:
    home = sized(tmp_path / 'rates', 'optimizer.learning_rate', (1e-3, 1e-2), number=4)
    found = computed_of(home).scaling
    assert_exact(found.law)
    assert (found.left_out, found.early, found.pooled, len(found.N)) == (16, 4, [], 16)
    written(home)
    text = (home / 'report.md').read_text()
    assert (
        'only the best counts; 16 are left out.' in text and '4 runs had the scored loss before the last step' in text
    )


@pytest.mark.slow
@pytest.mark.usefixtures('without_bounds')
def test_what_arms_differ_in_besides_their_sizes_is_said_or_has_no_law(tmp_path: pathlib.Path) -> None:
    found = computed_of(sized(tmp_path / 'norms', 'model.norm', ('layernorm', 'rmsnorm'))).scaling
    assert (found.pooled, found.left_out) == (['model.norm'], 0)  # of other sizes: one has no biases
    found = computed_of(sized(tmp_path / 'activations', 'model.activation', ('relu', 'gelu'))).scaling
    assert (found.pooled, found.left_out) == ([], 9)  # what is left has one activation
    apart = sized(tmp_path / 'tasks', 'train.objective', ('causal_lm', 'prefix_lm'))
    report = computed_of(apart)
    assert report.scaling.law is None
    told = render.markdown(report)
    assert 'No law: runs that differ in train.objective have no law in common' in told
    assert computed_of(built(tmp_path / 'one', ARMS)).scaling is None


@pytest.mark.slow
def test_iso_flop_designs_have_parabolas(tmp_path: pathlib.Path) -> None:
    """Three budgets of four sizes each; the law is the same in N and D, so that the best N is that of D = N."""
    C = np.repeat([6e10, 6e11, 6e12], 4)
    times = np.tile([0.5, 0.8, 1.25, 2.0], 3)
    N, D = (C / 6) ** 0.5 * times, (C / 6) ** 0.5 / times
    budget = np.geomspace(1e9, 1e13, 200)
    curves = [(N, budget, 1.7 + 40 * N**-0.4 + 40 * (budget / 6 / N) ** -0.4) for N in (1e4, 3e4, 1e5, 3e5, 1e6)]
    found = scaling_analysis.fitted(scaling_analysis.Scaling(N, D, 1.7 + 40 * N**-0.4 + 40 * D**-0.4, C, curves), 0.95)
    assert found.envelope.law.exponent == pytest.approx(0.5, abs=0.01)
    assert [minimum.N for minimum in found.profiles.minima] == pytest.approx([1e5, 1e5 * 10**0.5, 1e6])
    assert found.profiles.law.exponent == pytest.approx(0.5) == found.law.size_exponent
    report = dataclasses.replace(computed_of(built(tmp_path / 'x', ARMS[:1])), scaling=found)
    drawn = {kind for kind in plots.DRAWINGS if f'[["{kind}", ""' in render.markdown(report, page=True)}
    assert {'profiles', 'envelope'} < drawn and {plots.svg(report, kind, '').count('<svg') for kind in drawn} == {1}
    assert '| 6e+10 | 100,000 |' in render.markdown(report)


# ------------------------------------------------------------------------------------------------------ generated text


SAID = ['the cat sat on the mat', 'a dog', 'x y z', '']
RIGHT = [['the cat sat on a mat', 'a cat sat on the mat'], ['a dog'], ['x y'], ['nothing at all']]


@pytest.mark.parametrize('name', texts.CORPORA)
def test_a_metric_of_sums_is_the_metric_of_the_corpus(name: str) -> None:
    """And of the examples drawn twice, and none of others."""
    key = {'word_error_rate': 'g2p', 'phoneme_error_rate': 'g2p'}.get(name, name)
    settings, corpus = Evaluate(metrics=(key,), language='en'), texts.CORPORA[name]
    terms = corpus.statistics(SAID, RIGHT, 'en')
    drawn = np.array([[1, 1, 1, 1], [2, 0, 1, 1]])
    for counts, value in zip(drawn, corpus.metric('en')(drawn @ terms), strict=True):
        said, right = np.repeat(SAID, counts).tolist(), [RIGHT[i] for i in np.repeat(range(4), counts)]
        assert value == pytest.approx(metrics.METRICS[key].scores(said, right, settings)[name], abs=1e-9)


def test_texts_of_the_same_seed_are_compared(tmp_path: pathlib.Path) -> None:
    """Of 40 words the baseline has 10 wrong, the arm the first 4 of them; the third seed has no partner."""
    scores = {seed: {'loss': 1.0 + seed, 'word_error_rate': 0.5} for seed in (0, 1)}
    home = built(tmp_path / 'x', [({}, scores), ({'model.norm': 'rmsnorm'}, {**scores, 2: scores[0]})])
    right = [[f'w {i}'] for i in range(40)]
    for arm, wrong in (('baseline', 10), ('norm=rmsnorm', 4)):
        for seed in (0, 2) if arm != 'baseline' else (0, 1):
            said = [f'w {i}' if i >= wrong else 'x' for i in range(40)]
            predictions.write(home / arm / f'seed_{seed}', 'test', said, right)
    (found,) = computed_of(home).texts
    assert (found.arm, found.metric, found.examples, list(found.seeds)) == (
        'norm=rmsnorm',
        'test/word_error_rate',
        40,
        [0],
    )
    assert (found.seeds[0].arm, found.seeds[0].baseline) == (0.1, 0.25) and found.seeds[0].p < 0.02
    assert found.left_out == [1]  # the seed of which one side has no predictions
    written(home)
    text = (home / 'report.md').read_text()
    assert '| `norm=rmsnorm` | `test/word_error_rate` | 40 | 0 | -0.1500 (' in text
    kept = 'kept no predictions, or predictions of other examples'
    assert f'Left out of `norm=rmsnorm`, `test/word_error_rate`, is seed 1: a run of it {kept}.' in text
    for change in (lambda texts: texts[::-1], lambda texts: texts[:-1], lambda texts: []):
        predictions.write(home / 'baseline/seed_0', 'test', change(said), change(right))
        (found,) = computed_of(home).texts
        assert (found.seeds, found.left_out) == ({}, [0, 1])
        text = render.markdown(computed_of(home))
        assert f'are seeds 0 and 1: a run of each {kept}.' in text and '| `norm=rmsnorm` | `test/word_e' not in text


# ------------------------------------------------------------------------------------------------------------ the files


@pytest.mark.proof
def test_the_same_runs_give_the_same_bytes(tmp_path: pathlib.Path, monkeypatch) -> None:
    made = []
    for place, backwards in (('a', False), ('b', True)):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        home = built(pathlib.Path('x'), ARMS, backwards=backwards)
        for _ in range(2):
            written(home)
            made.append([(home / name).read_bytes() for name in ('report.md', 'report.html')])
    assert all(each == made[0] for each in made)
    written(pathlib.Path('x'), timing=False)
    untimed = pathlib.Path('x/report.html').read_bytes()
    listed = json.loads(pathlib.Path('x/sweep.json').read_text())
    listed['seconds'][listed['trials'][0]['directory']] *= 7
    pathlib.Path('x/sweep.json').write_text(json.dumps(listed))
    written(pathlib.Path('x'), timing=False)
    assert pathlib.Path('x/report.html').read_bytes() == untimed != made[0][1]
    assert not [*pathlib.Path('x').glob('*.tmp')]


def test_the_commands_are_of_the_trials(home: pathlib.Path) -> None:
    text = (home / 'report.md').read_text()
    assert f"    tformer sweep '--config=a b.py' --workdir={home}\n" in text
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith('    tformer train')]
    assert len(commands) == len(ARMS)
    stated = {run.directory: run.stated for run in results.read(home).runs}
    for _, train, spec, workdir in commands:
        assert train == 'train'
        directory = '/'.join(pathlib.Path(workdir.partition('=')[2]).parts[-2:])
        assert config.load(spec.partition('=')[2]) == stated[directory]
        assert not pathlib.Path(workdir.partition('=')[2]).is_relative_to(home)


def test_without_matplotlib_all_but_the_drawings_is_there(home: pathlib.Path, monkeypatch) -> None:
    before = (home / 'report.html').read_text()
    monkeypatch.setattr(drawing, 'installed', lambda: False)
    said = written(home)
    shown, text = (home / 'report.html').read_text(), (home / 'report.md').read_text()
    monkeypatch.undo()
    written(home)
    assert (home / 'report.html').read_text() == before
    assert before.count('<svg ') == 6 and '<svg ' not in shown  # the forest, two curves, three fronts
    assert "matplotlib is not installed: pip install 'tformer[report]'" in said
    assert "not installed: `pip install 'tformer[report]'`" in text
    assert "not installed: <code>pip install 'tformer[report]'</code>" in shown.replace('&#39;', "'")
    assert before.count('<tr>') == shown.count('<tr>') > 20


def test_the_drawings_are_files_of_their_own_too(tmp_path: pathlib.Path) -> None:
    home, place = built(tmp_path / 'x', ARMS[:1]), tmp_path / 'figures'
    said = written(home, export=place).splitlines()
    files = sorted(place.glob('*.svg'))
    assert [file.stem for file in files] == ['curves-train-loss', 'curves-valid-loss']
    assert said[-1] == f'{place}: {len([*place.iterdir()])} files of drawings and tables'
    for file in files:
        root = xml.etree.ElementTree.parse(file).getroot()
        assert root.tag == '{http://www.w3.org/2000/svg}svg' and root.get('role') == 'img'
        assert root[0].tag.endswith('}title') or root[1].tag.endswith('}title')
        assert 'var(--ink)' in file.read_text() and '--ink: #' in file.read_text()
        assert file.with_suffix('.pdf').read_bytes().startswith(b'%PDF-')
        assert file.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    (place / 'taken').touch()
    with pytest.raises(UserError, match='taken/x: Not a directory'):
        written(home, export=place / 'taken/x')


def test_the_tables_are_files_of_their_own_too(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shown = tables.tables(render.markdown(computed_of(home), page=True))
    assert [table.name for table in shown] == [
        'against-the-baseline', 'learning-curves', 'learning-curves-2', 'learning-curves-3', 'cost',
        'what-each-arm-changes', 'failed-unfinished-and-unreadable', 'time', 'time-2',
    ]  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(shown[0]))))
    assert [row['arm'] for row in rows] == ['baseline', 'norm=rmsnorm', 'activation=swiglu']
    assert rows[1]['test loss, mean'] == '0.490' and rows[1]['test loss, sd'] == '0.010'
    assert rows[0]['difference'] == '' and rows[1]['difference'] == '-0.030'
    parameters = next(csv.DictReader(io.StringIO(tables.csv_text(shown[4]))))['parameters']
    assert float(parameters) == computed_of(home).costs['baseline'].parameters >= 1000  # without a comma
    cells = [[tables.Cell('b,c', True), tables.Cell(each, False)] for each in ('-0.1 to +0.2', '-')]
    intervals = tables.Table('x', 'x', ['a', '95 %'], [False, True], cells)
    assert tables.csv_text(intervals) == 'a,"95 %, low","95 %, high"\n"b,c",-0.1,+0.2\n"b,c",,\n'
    said = ['0.171 ± 0.025', '1,174, -0.003 within noise', '7.8 ± 0.1, +0.5 worse', prose.NONE]
    metrics = tables.Table('m', 'M', ['test/loss'], [True], [[tables.Cell(each, False)] for each in said])
    assert tables.csv_text(metrics) == (
        '"test/loss, mean","test/loss, sd","test/loss, difference","test/loss, verdict"\n'
        '0.171,0.025,,\n1174,,-0.003,within noise\n7.8,0.1,+0.5,worse\n,,,\n'
    )


@pytest.mark.slow
def test_probabilities_in_csv_are_numbers_however_small(tmp_path: pathlib.Path) -> None:
    far = {0: 5.50, 1: 5.51, 2: 5.54}
    place, files = built(tmp_path / 'x', [({}, BASE), (ARMS[1][0], far)]), tmp_path / 'files'
    written(place, export=files)
    (_, row) = csv.DictReader(io.StringIO((files / 'against-the-baseline.csv').read_text()))
    assert float(row['p of all']) == computed_of(place).rows[1].verdict.p < 0.001
    assert r'\textless{} 0.001' in (files / 'against-the-baseline.tex').read_text()


@pytest.mark.filterwarnings('ignore::RuntimeWarning')
def test_numbers_at_the_ends_of_doubles_are_written_in_few_digits(tmp_path: pathlib.Path) -> None:
    for unit, mean in ((2e307, '1.04e+307'), (1e-310, '5.2e-311')):
        arms = [(changed, {seed: loss * unit for seed, loss in seeds.items()}) for changed, seeds in ARMS[:2]]
        place = built(tmp_path / f'{unit}', arms)
        written(place)
        assert mean in (text := (place / 'report.md').read_text()) and not re.search(r'[\d,.]{30}', text)


LATEX = r"""\begin{tabular}{lr}
\toprule
a\_b, 95 \% & mean $\pm$ sd \\
\midrule
\texttt{x\_y=\{1\}\textbackslash{}\textasciicircum{}\&\#\$\textasciitilde{}\textless{}} & $-$0.5 $\pm$ 0.1 \\
run-1 says \char34{}x\char34{} & -- \\
\bottomrule
\end{tabular}
"""


def test_a_table_in_latex_shows_what_stands_in_it() -> None:
    rows = [
        [tables.Cell(r'x_y={1}\^&#$~<', True), tables.Cell('-0.5 ± 0.1', False)],
        [tables.Cell('run-1 says "x"', False), tables.Cell('-', False)],
    ]
    assert tables.latex(tables.Table('t', 't', ['a_b, 95 %', 'mean ± sd'], [False, True], rows)) == LATEX


@pytest.mark.skipif(shutil.which('pdflatex') is None, reason='LaTeX is not installed')
def test_a_table_needs_booktabs_and_no_more(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ours = tables.Table(
        't', 't', ['a_b|c', '±'], [False, True], [[tables.Cell('<"\\|~^…>&%$#{}' * 2, x)] * 2 for x in (True, False)]
    )
    made = [ours, *tables.tables(render.markdown(computed_of(home), page=True))]
    text = '\\documentclass{article}\\usepackage{booktabs}\\begin{document}' + '\n\n'.join(map(tables.latex, made))
    (tmp_path / 'x.tex').write_text(text + '\\end{document}')
    command = ['pdflatex', '-interaction=nonstopmode', '-halt-on-error', 'x.tex']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout[-2000:]


class Page(html.parser.HTMLParser):
    """Collects the tags and what they point at, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = ''
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or '' for name, value in attrs if name in ('src', 'href', 'xlink:href', 'action')]
        assert not [name for name, _ in attrs if name.startswith('on')]
        if tag not in ('meta', 'link', 'wbr', 'input'):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_line_marks_nothing_but_code() -> None:
    line, cell = 'a [b](c) <i> *d* 1 < 2 `[e] <b>`', prose.code('x`y\n|\u202ez')
    text = f'# t\n\n## s\n\n{render.escaped(line)}\n\n| h |\n| --- |\n| {cell.replace("|", chr(92) + "|")} |\n'
    assert 'a \\[b](c) \\<i> \\*d\\* 1 < 2 `[e] <b>`' in text and "| `x'y \\| z` |" in text
    shown = render.page(text, lambda *_: '')
    assert 'a [b](c) &lt;i&gt; *d* 1 &lt; 2 <code>[e] &lt;b&gt;</code>' in shown and '<td><code>x&#39;y | z' in shown


@pytest.fixture(scope='module')
def hostile(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A sweep whose names, errors, scores and values are all written by somebody else."""
    ends = [{'loss': x, HOSTILE: x} for x in (0.5, 0.6)]
    arms = [({}, {0: ends[0], 1: ends[1]}), ({'data.cache_dir': HOSTILE}, {0: ends[0], 1: ends[1], 2: HOSTILE})]
    place = built(tmp_path_factory.mktemp('hostile') / 'x', arms)
    listed = json.loads((place / 'sweep.json').read_text())
    for entry in listed['trials'][2:]:
        entry['name'], entry['off_percent'] = f'$\\sum$ 混合 {HOSTILE}', {HOSTILE: 0.5}
    (place / 'sweep.json').write_text(json.dumps(listed))
    (place / 'command.txt').write_text(f'tformer sweep {HOSTILE}\n')
    written(place)  # letters that a font lacks cost no words
    return place


def test_what_others_wrote_is_text_and_no_more(hostile: pathlib.Path) -> None:
    shown = Page((hostile / 'report.html').read_text())
    assert shown.open == [] and not shown.tags & {'img', 'iframe', 'object'}
    text = (hostile / 'report.html').read_text()
    assert text.count('<script') == 2  # the data, and the one that the page allows by its digest
    ours = (pathlib.Path(render.__file__).parent / 'page.js').read_text()
    assert text.endswith(f'<script>{ours}</script>\n</body>\n</html>')
    digest = base64.b64encode(hashlib.sha256(ours.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'; style-src" in text
    assert HOSTILE in json.loads(re.search('id="data">(.*?)</script>', text)[1])['arms'][1]
    assert '<script>console.error(' in shown.text and '$\\sum$' in shown.text
    assert re.search(r'<text[^>]*>\$\\sum\$', (hostile / 'report.html').read_text())
    text = (hostile / 'report.md').read_text()
    lines = [re.sub(r'`[^`]*`', '', line) for line in text.splitlines() if not line.startswith('    ')]
    assert not [line for line in lines if re.search(r'<\S|(?<!\\)\[', line) or '`' in line]
    rows = [re.sub(r'\\\|', '', line).count('|') for line in text.splitlines() if line.startswith('| ')]
    table = [line for line in text.splitlines() if line.startswith('| arm | label | n (failed)')]
    assert len(table) == 1 and rows.count(rows[0]) >= 4


def test_the_page_points_at_nothing_outside(home: pathlib.Path, hostile: pathlib.Path) -> None:
    text = (home / 'report.html').read_text()
    assert '://' not in text and 'url(' not in text.replace('url(#', '') and '@import' not in text
    for place in (home, hostile):
        addresses = Page((place / 'report.html').read_text()).addresses
        assert addresses and all(address.startswith(('#', 'data:,')) for address in addresses)
    ids = re.findall(r' id="([^"]*)"', text)
    assert set(re.findall(r'href="#([^"]*)"', text)) | set(re.findall(r'url\(#([^)]*)\)', text)) <= set(ids)
    assert len(ids) == len(set(ids))
    assert '<text' in text and 'norm=rmsnorm: not yet</text>' in text


# ------------------------------------------------------------------------------------------------------- in a browser

OVERLAPS = """
function overlaps(page) {  // pairs of labels of one drawing that lie on one another
  const found = []
  for (const svg of page.querySelectorAll('figure svg[role=img]')) {
    const slanted = /rotate\\(-30/ // the box of a slanted label says little
    const level = [...svg.querySelectorAll('text')].filter((each) => !slanted.test(each.getAttribute('transform')))
    const boxes = level.map((each) => [each.textContent, each.getBoundingClientRect()])
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      const [x, y] = [Math.min(p.right, q.right) - Math.max(p.left, q.left),
                      Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top)]
      if (x > 1 && y > 1) found.push([a, b])
    }))
  }
  return found
}
"""


def seen(tmp_path: pathlib.Path, frames: Sequence[tuple[str, int]], look: str) -> list[Any]:
    """Opens pages in frames of so many pixels, and returns what the body of a function of `page` and `view` says.

    The console must stay clean.
    """
    shown = ''.join(
        f'<iframe width={width} height=900 srcdoc="{html.escape(text)}"></iframe>' for text, width in frames
    )
    script = f"""<script>{OVERLAPS} onload = () => document.title = JSON.stringify(
      [...document.querySelectorAll('iframe')].map((frame) => {{
        const page = frame.contentDocument, view = frame.contentWindow
        {look}
      }}))</script>"""
    (tmp_path / 'frames.html').write_text(f'<!doctype html><meta charset=utf-8><title></title>{shown}{script}')
    title = re.search('<title>(.*?)</title>', opened((tmp_path / 'frames.html').as_uri(), tmp_path))
    assert title
    return json.loads(html.unescape(title[1]))


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_the_page_without_a_complaint_and_on_a_phone(
    home: pathlib.Path, hostile: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    frames = [((place / 'report.html').read_text(), 390) for place in (home, hostile)]
    look = "return [page.documentElement.scrollWidth, page.querySelectorAll('figure svg[role=img]').length]"
    widths = seen(tmp_path, frames, look)
    assert len(widths) == 2 and all(width <= 390 and drawings >= 3 for width, drawings in widths)
    opened((home / 'report.html').as_uri(), tmp_path, 400)  # the page itself, in no frame


@pytest.fixture(scope='module')
def wide_search(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a search of 60 arms in three fields, whose names are long."""
    rng, arms = np.random.default_rng(0), [({}, dict.fromkeys(range(3), 1.5))]
    for _ in range(60):
        rate, decay = (float(10 ** rng.uniform(-4, -1)) for _ in range(2))
        changed = {'optimizer.learning_rate': rate, 'optimizer.weight_decay': decay}
        loss = 1 + (math.log10(rate) + 2.5) ** 2
        dropout = {'model.dropout_rate': float(rng.uniform(0, 0.4))}
        arms.append((changed | dropout, {seed: loss + 0.05 * rng.normal() for seed in range(3)}))
    place = built(tmp_path_factory.mktemp('search') / 'x', arms)
    written(place)
    return (place / 'report.html').read_text()


DARK = '@media screen and (prefers-color-scheme: dark)'


@needs_chromium
@pytest.mark.proof
def test_a_page_fits_every_screen_and_paper(home: pathlib.Path, wide_search: str, tmp_path: pathlib.Path) -> None:
    """Nothing is wider than the page, no label lies on another, and what a screen shows unasked fits its tables."""
    frames = []
    for page in ((home / 'report.html').read_text(), wide_search):
        printed = page.replace('@media print', '@media all').replace(DARK, '@media not all')
        frames += [
            *((page, width) for width in (400, 800, 1280)),
            (page.replace(DARK, '@media all'), 1280),
            (printed, 720),
        ]
    look = """const tables = [...page.querySelectorAll('.table')]
      const text = page.querySelector('figure .drawing text')
      return {
        width: page.documentElement.scrollWidth,
        wide: tables.filter((each) => each.scrollWidth > each.clientWidth + 1)
          .map((each) => [each.closest('section').id, each.scrollWidth - each.clientWidth]),
        overlaps: overlaps(page),
        paper: view.getComputedStyle(page.body).backgroundColor,
        ink: view.getComputedStyle(text).fill,
        options: view.getComputedStyle(page.querySelector('.options')).display,
        titles: [...page.querySelectorAll('figure svg[role=img] > title')].map((each) => each.textContent.length),
      }"""
    said = seen(tmp_path, frames, look)
    assert len(said) == len(frames)
    for (_, width), each in zip(frames, said, strict=True):
        assert each['width'] <= width and min(each['titles']) > 20 and each['overlaps'] == []
        assert each['wide'] == []
    light, dark, printed = said[2], said[3], said[4]
    assert (light['paper'], light['ink']) == ('rgb(255, 255, 255)', 'rgb(28, 31, 38)')
    assert (dark['paper'], dark['ink']) == ('rgb(16, 18, 24)', 'rgb(233, 235, 240)')
    assert printed['options'] == 'none' and printed['paper'] == light['paper']


@needs_chromium
@pytest.mark.proof
def test_a_reader_explores_a_page(wide_search: str, tmp_path: pathlib.Path) -> None:
    look = """
      const shown = () => [...page.querySelectorAll('#against-the-baseline tbody tr')]
        .filter((row) => row.offsetParent).map((row) => [row.cells[0].textContent, row.cells[3].textContent])
      const held = page.querySelector('#against-the-baseline .held'), said = { first: shown() }
      const press = (element) => element.dispatchEvent(new view.MouseEvent('click', { bubbles: true }))
      const type = (element, value) => { element.value = value; element.dispatchEvent(new view.Event('input')) }
      press(held.querySelectorAll('th button')[3])
      said.up = shown()
      press(held.querySelectorAll('th button')[3])
      said.down = shown()
      type(held.querySelector('input[type=search]'), 'baseline')
      said.filtered = shown()
      type(held.querySelector('input[type=search]'), '')
      held.querySelector('.unfold').click()
      said.unfolded = shown().length
      const counts = () => Object.fromEntries([...page.querySelectorAll('figure:has(.drawing)')].map((each) =>
        [`${each.dataset.kind} ${each.dataset.of}`.trim(), each.querySelectorAll('.curve, .drawing circle').length]))
      said.drawn = counts()
      said.front = page.querySelector('figure[data-kind=pareto] .front').getAttribute('d').split('L').length
      said.fronts = JSON.parse(page.getElementById('data').textContent).fronts
      const boxes = page.querySelectorAll('.choices input')
      boxes[1].click()
      said.without = counts()
      boxes[50].click()
      said.other = counts()
      const figure = page.querySelector('figure[data-kind=curves]'), svg = () => figure.querySelector('.drawing svg')
      const curve = () => figure.querySelector('.drawing .curve').getAttribute('d')
      const before = curve()
      type(figure.querySelector('input[type=range]'), '0.9')
      said.smoothed = curve() !== before && curve().length > 20
      type(figure.querySelector('input[type=range]'), '0')
      said.restored = curve() === before
      figure.querySelectorAll('.options input[type=checkbox]')[0].click()
      said.logarithmic = curve() !== before
      const scatter = page.querySelector('figure[data-kind=fields]'), dot = scatter.querySelector('.drawing circle')
      const box = scatter.querySelector('.drawing svg').getBoundingClientRect()
      scatter.querySelector('.drawing svg').dispatchEvent(new view.PointerEvent('pointermove', {
        clientX: box.left + Number(dot.getAttribute('cx')), clientY: box.top + Number(dot.getAttribute('cy')) }))
      said.told = scatter.querySelector('.told').textContent
      const select = scatter.querySelector('select')
      said.fields = [...select.options].map((each) => each.value)
      select.value = said.fields[1]
      select.dispatchEvent(new view.Event('change'))
      said.axis = [...scatter.querySelectorAll('.drawing text')].map((each) => each.textContent)
      return said"""
    (said,) = seen(tmp_path, [(wide_search, 1280)], look)
    assert len(said['first']) == render.SHOWN and said['first'][0][0] == 'baseline' and said['unfolded'] == 61
    numbers = {name: [float(mean.split()[0]) for _, mean in said[name]] for name in ('first', 'up', 'down')}
    assert numbers['up'] == sorted(numbers['up']) and numbers['down'] == sorted(numbers['down'], reverse=True)
    assert max(numbers['up']) < min(numbers['down']) and numbers['first'][1:] == numbers['up'][: render.SHOWN - 1]
    assert [name for name, _ in said['filtered']] == ['baseline']
    assert list(said['fronts']) == ['parameters', 'flops', 'seconds'] and said['front'] == len(
        said['fronts']['seconds']
    )
    kinds = {name: said['drawn'][name] for name in ('forest', 'fields', 'curves valid/loss', 'pareto seconds')}
    assert kinds == {'forest': 9, 'fields': 10, 'curves valid/loss': 10, 'pareto seconds': 10}
    assert said['without'] == {name: count - 1 for name, count in said['drawn'].items()}
    curves = {name for name in kinds if name.startswith('curves')}  # those of the fiftieth arm are not in the page
    assert all(said['other'][name] == said['without'][name] + (name not in curves) for name in kinds)
    assert said['smoothed'] and said['restored'] and said['logarithmic']
    assert said['told'].startswith('baseline: test loss 1.5 ± 0 at optimizer.learning_rate ')
    assert said['fields'][0] == 'optimizer.learning_rate' and said['fields'][1] in said['axis']
