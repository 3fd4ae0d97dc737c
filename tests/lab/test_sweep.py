"""Sweeps: what their lists compose to, what is matched, and trials that end, fail, stop and go on."""

import contextlib
import dataclasses
import fcntl
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

import recipes
import toy_data
from lives import HANG, environment
from places import ROOT, TESTS
from small_sweeps import ACTOR, TINY, acting, loaded, wait_for, waiting
from tformer import __main__ as command_line
from tformer import checks, config
from tformer.commands import report as report_command
from tformer.commands import sweep as sweep_command
from tformer.commands import train as train_command
from tformer.config import Config
from tformer.distributed import processes
from tformer.errors import Stopped, UserError
from tformer.lab.report import results
from tformer.lab.sweep import (
    Match,
    Sweep,
    chain,
    choice,
    devices,
    grid,
    leases,
    log_uniform,
    manifest,
    matching,
    one_at_a_time,
    plan,
    product,
    runner,
    sample,
    search,
    seeds,
    trial_process,
    trials,
    uniform,
    zipped,
)  # fmt: skip
from tformer.lab.sweep.leases import Holder, Leases
from tformer.lab.sweep.runner import Placement
from tformer.lab.sweep.search_jobs import SearchJobs
from tformer.training import checkpoint, workdir
from whole_runs import numbers, scores

NORMS, HEADS = {'model.norm': ['layernorm', 'rmsnorm']}, {'model.num_heads': [4, 2, 1]}


# ------------------------------------------------------------------------------------------------- lists of overrides


def test_a_grid_is_the_product_of_its_fields_and_the_last_one_is_the_fastest() -> None:
    assert grid(NORMS | HEADS) == product(grid(NORMS), grid(HEADS))
    assert [(each['model.norm'], each['model.num_heads']) for each in grid(NORMS | HEADS)] == [
        ('layernorm', 4), ('layernorm', 2), ('layernorm', 1), ('rmsnorm', 4), ('rmsnorm', 2), ('rmsnorm', 1),
    ]  # fmt: skip
    assert grid({}) == product() == [{}]


def test_products_and_chains_are_associative_and_distribute() -> None:
    a, b, c = grid(NORMS), grid(HEADS), seeds(2)
    assert product(product(a, b), c) == product(a, product(b, c)) == product(a, b, c)
    assert chain(chain(a, b), c) == chain(a, b, c) == a + b + c
    assert product(chain(a, b), c) == chain(product(a, c), product(b, c))
    assert len(product(a, b, c)) == 2 * 3 * 2 and product(a, []) == []


def test_what_is_composed_is_not_the_lists_it_was_made_of() -> None:
    arms = grid(NORMS)
    for copied in (chain(arms), product(arms), one_at_a_time(arms[0], {})):
        copied[0]['model.norm'] = None
    assert arms == grid(NORMS)


def test_zipped_one_at_a_time_and_seeds() -> None:
    assert zipped({'model.emb_dim': [8, 16], 'model.mlp_dim': [32, 64]}) == [
        {'model.emb_dim': 8, 'model.mlp_dim': 32}, {'model.emb_dim': 16, 'model.mlp_dim': 64},
    ]  # fmt: skip
    assert one_at_a_time({'model.norm': 'dyt'}, NORMS | {'model.emb_dim': [8]}) == [
        {'model.norm': 'dyt'}, {'model.norm': 'layernorm'}, {'model.norm': 'rmsnorm'},
        {'model.norm': 'dyt', 'model.emb_dim': 8},
    ]  # fmt: skip
    assert seeds(2, first=5) == [{'train.seed': 5}, {'train.seed': 6}]


def test_a_draw_stays_what_it_is_whatever_else_is_drawn() -> None:
    rate, width = {'optimizer.learning_rate': log_uniform(1e-4, 1e-1)}, {'model.emb_dim': choice([8, 16])}
    few, many = sample(rate, 3, seed=1), sample(rate | width, 300, seed=1)
    assert few == [{'optimizer.learning_rate': each['optimizer.learning_rate']} for each in many[:3]]
    assert few == [{'optimizer.learning_rate': value} for value in (0.0253, 0.0006634, 0.0696)]
    assert few != sample(rate, 3, seed=2)
    assert 80 < sum(each['optimizer.learning_rate'] < 1e-3 for each in many) < 120  # a third of the decades
    assert 120 < sum(each['model.emb_dim'] == 8 for each in many) < 180
    drawn = [each['x'] for each in sample({'x': uniform(1, 3)}, 300)]
    assert 1 <= min(drawn) < 1.05 and 2.95 < max(drawn) < 3 and abs(sum(drawn) / 300 - 2) < 0.1


MISTAKES = {
    'model.norm: expected a list of values, not': lambda: grid({'model.norm': 'rmsnorm'}),
    'model.norm: its list of values is empty': lambda: grid({'model.norm': []}),
    'every field needs equally many values, not 2 of model.norm, 3 of': lambda: zipped(NORMS | HEADS),
    'product: model.norm is set by two of its lists': lambda: product(grid(NORMS), grid(NORMS)),
    "expected a list of dicts, not {'model.norm': 'dyt'}": lambda: product({'model.norm': 'dyt'}, seeds(2)),
    r"expected a list of dicts, not \['model.norm'\]": lambda: chain(['model.norm']),
    "arm 1 of 1: 'model.norm' is not a dict of fields": lambda: trials.trials(TINY, ['model.norm']),
    'the first must be the smaller': lambda: uniform(3, 1),
    'both must be positive': lambda: log_uniform(0, 1),
    r'sample: optimizer.learning_rate=\[1, 2\] is none of uniform\(\)': lambda: sample(
        {'optimizer.learning_rate': [1, 2]}, 3
    ),
    'match: .parameters. is not a Match': lambda: trials.trials(TINY, [{}], ['parameters']),
    "match: 'flops' is not a Match": lambda: trials.trials(TINY, [{}], 'flops'),
    'match: two of them adjust model.mlp_dim': lambda: trials.trials(
        TINY, [{}], [Match('flops', 'model.mlp_dim'), Match('parameters', 'model.mlp_dim')]
    ),
    'the sweep has no arms': lambda: trials.trials(TINY, []),
    "arm 2 of 2: config.model.nrom is not a field; did you mean 'model.norm'": lambda: trials.trials(
        TINY, [{}, {'model.nrom': None}]
    ),
    "arm 1 of 1: config.model.emb_dim='wide' is not int": lambda: trials.trials(TINY, [{'model.emb_dim': 'wide'}]),
    'arm 2 of 2: .*num_heads': lambda: trials.trials(TINY, [{}, {'model.num_heads': 3}]),
    "arm 1 of 1: train.trackers='tensorbord' is unknown; did you mean 'tensorboard'": lambda: trials.trials(
        TINY, [{'train.trackers': ('tensorbord',)}]
    ),
    "model.norm='rmsnrm' is unknown; did you mean 'rmsnorm'": lambda: trials.trials(TINY, [{'model.norm': 'rmsnrm'}]),
    "Match.quantity='weights' is unknown": lambda: matched(Match('weights', 'model.mlp_dim')),
    'Match.field=model.norm is not an integer': lambda: matched(Match('parameters', 'model.norm')),
    'Match.multiple=0 must be positive': lambda: matched(Match('parameters', 'model.mlp_dim', multiple=0)),
    "Match.to='base' is unknown": lambda: matched(Match('parameters', 'model.mlp_dim', to='base')),
    'changing the field does not change the quantity': lambda: matched(Match('tokens', 'model.mlp_dim')),
    'both varied and adjusted': lambda: matched(Match('parameters', 'model.emb_dim')),
    "with data.length and data.batching='bucket' the amount of padding is unknown; use 'pack'": lambda: matched(
        Match('tokens', 'data.length'), data__batching='bucket'
    ),
    "with data.length and data.batching='bucket' the amount of padding is unknown; use 'pad' or 'pack'": lambda: (
        matched(Match('flops', 'data.length'), data__batching='bucket')
    ),
    "length=8: .*with data.length and data.batching='pad' the amount of padding is unknown; use 'pack'": lambda: (
        of_rows('data.length', 8)
    ),
    "with data.normalization and data.batching='pad'": lambda: of_rows('data.normalization', 'nfc'),
    "with data.batching and data.batching='pad'": lambda: of_rows('data.batching', 'pack'),
    "with train.objective and data.batching='pad'": lambda: of_rows('train.objective', 'prefix_lm'),
    'set train.num_steps': lambda: matched(
        Match('flops', 'model.mlp_dim'), train__num_steps=None, train__num_epochs=1.0
    ),
}


def matched(match: Match, **fields: object) -> list[trials.Trial]:
    base = config.override(TINY, {name.replace('__', '.'): value for name, value in fields.items()})
    return trials.trials(base, [{}, {'model.emb_dim': 32, 'train.batch_size': 16}], [match])


def of_rows(field: str, value: object, quantity: str = 'tokens') -> list[trials.Trial]:
    """Returns the trials of two arms of padded rows that differ in what a row holds."""
    base = config.override(TINY, {'data.batching': 'pad', 'train.num_steps': 400})
    return trials.trials(base, [{}, {field: value}], [Match(quantity, 'train.num_steps')])


@pytest.mark.parametrize('message', MISTAKES)
def test_a_mistake_is_one_line(message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        MISTAKES[message]()
    assert '\n' not in str(error.value)


# -------------------------------------------------------------------------------------------------------------- trials


def test_arms_are_named_after_what_differs_from_the_first() -> None:
    arms = chain(grid(NORMS | {'train.batch_size': ['8', 16]}), [{'data.normalization': 'nfc', 'model.num_heads': '2'}])
    made = trials.trials(TINY, product(arms, seeds(2)))
    names = ['baseline', 'train.batch_size=16', 'norm=rmsnorm', 'norm=rmsnorm,train.batch_size=16']
    names.append('num_heads=2,normalization=nfc')
    assert [trial.directory for trial in made] == [f'{name}/seed_{seed}' for name in names for seed in (0, 1)]
    assert made[-1].config.model.num_heads == 2
    assert made[-1].overrides == {'model.num_heads': 2, 'data.normalization': 'nfc', 'train.seed': 1}
    assert {trial.seed == trial.config.train.seed for trial in made} == {True}


def test_names_are_unique_and_safe() -> None:
    values = ['a/b', 'a b', 'a//b', '..', 'é', 'x' * 300, 'x' * 301, 'a+b', 'a,b=c', None]
    made = trials.trials(TINY, chain([{}], grid({'data.cache_dir': values}), grid({'model.norm': ['layernorm', None]})))
    names = [trial.name for trial in made]
    assert len(set(names)) == len(names) == 1 + len(values) - 1 + 1  # a None and a layernorm are the baseline
    for name in names:
        assert set(name) <= set('abcdefghijklmnopqrstuvwxyz0123456789_=,.+-~None') and len(name) < 200, name
    assert 'norm=None' in names


def test_arms_of_the_same_config_are_one_trial() -> None:
    arms = one_at_a_time({}, NORMS | {'model.mlp_dim': [64, 128]})
    assert [trial.name for trial in trials.trials(TINY, arms)] == ['baseline', 'norm=rmsnorm', 'mlp_dim=128']


@pytest.mark.slow
@pytest.mark.parametrize('quantity, field, multiple', [
    ('parameters', 'model.mlp_dim', 1), ('parameters', 'model.mlp_dim', 8),
    ('parameters', 'model.num_decoder_layers', 1),
    ('flops', 'train.num_steps', 1), ('flops', 'model.mlp_dim', 4), ('tokens', 'train.num_steps', 1),
])  # fmt: skip
def test_what_is_matched_is_as_near_as_the_field_allows(quantity: str, field: str, multiple: int) -> None:
    base = config.override(TINY, {'train.num_steps': 1000, 'model.num_decoder_layers': 6})
    gated = {'model.activation': 'swiglu', 'model.mlp_bias': False, 'train.batch_size': 24}
    arms = product([{}, gated, {'model.norm_epsilon': 1e-5}], seeds(2))
    made = {trial.directory: trial for trial in trials.trials(base, arms, [Match(quantity, field, multiple)])}
    assert made['baseline/seed_1'].config == config.override(base, {'train.seed': 1})
    assert {name: trial.config.train.seed for name, trial in made.items()} == {name: int(name[-1]) for name in made}
    assert made['norm_epsilon=1e-05/seed_0'].mismatch_percent == {quantity: 0.0}
    adjusted = made['mlp_bias=False,activation=swiglu,train.batch_size=24/seed_1']
    measured, value = matching.QUANTITIES[quantity], adjusted.overrides[field]
    assert value % multiple == 0 and adjusted.overrides['train.seed'] == 1
    near, target = measured(adjusted.config), measured(base)
    assert adjusted.mismatch_percent[quantity] == pytest.approx(100 * (near - target) / target)
    for other in (value - multiple or value, value + multiple):
        assert abs(measured(config.override(adjusted.config, {field: other})) - target) >= abs(near - target)


@pytest.mark.parametrize('turned', [False, True])
def test_two_matches_take_turns_and_what_they_say_is_true_of_the_arms_that_run(turned: bool) -> None:
    base = config.override(TINY, {'train.num_steps': 400, 'model.num_decoder_layers': 6})
    arms = [{}, {'model.activation': 'swiglu', 'model.mlp_bias': False}, {'model.num_kv_heads': 1}]
    both = [Match('flops', 'train.num_steps'), Match('parameters', 'model.mlp_dim')]
    made = trials.trials(base, arms, both[::-1] if turned else both)
    for trial in made:
        for quantity, measured in matching.QUANTITIES.items():
            off = 100 * (measured(trial.config) / measured(base) - 1)
            assert quantity == 'tokens' or (trial.mismatch_percent[quantity] == pytest.approx(off) and abs(off) < 0.5)
    changed = {trial.name: (trial.config.train.num_steps, trial.config.model.mlp_dim) for trial in made}
    assert changed == {
        'baseline': (400, 64), 'mlp_bias=False,activation=swiglu': (393, 44), 'num_kv_heads=1': (400, 76),
    }  # fmt: skip


def test_a_match_that_another_undoes_says_so() -> None:
    """Steps times rows are the tokens, and with a wider model's FLOPs they cannot both be the baseline's."""
    both = [Match('flops', 'train.num_steps'), Match('tokens', 'train.batch_size')]
    base = config.override(TINY, {'train.num_steps': 400})
    wide = trials.trials(base, [{}, {'model.mlp_dim': 128}], both)[1]
    assert max(map(abs, wide.mismatch_percent.values())) > 10
    for quantity, off in wide.mismatch_percent.items():
        measured = matching.QUANTITIES[quantity]
        assert off == pytest.approx(100 * (measured(wide.config) / measured(base) - 1))


@pytest.mark.parametrize('match', [None, (), Match('parameters', 'model.mlp_dim')])
def test_a_sweep_may_have_no_match_or_one(match: Match | None, tmp_path: pathlib.Path) -> None:
    (tmp_path / 'base.py').write_text("def get_config(argument): return {'train': {'num_steps': 2}}")
    text = 'from tformer.lab.sweep import Match, Sweep\n\ndef get_sweep():\n'
    (tmp_path / 'one.py').write_text(f"{text}    return Sweep('base.py', [{{'model.norm': 'dyt'}}], match={match!r})")
    _, (trial,) = loaded(f'{tmp_path}/one.py', {'model.emb_dim': '64'})
    assert trial.mismatch_percent == ({'parameters': 0.0} if match else {})


def test_padding_costs_flops_and_is_no_token() -> None:
    assert abs(of_rows('data.length', 8, 'flops')[1].mismatch_percent['flops']) < 0.1
    assert of_rows('train.batch_size', 16)[1].config.train.num_steps == 200  # of both the same share is padding


def test_hand_worked_amounts() -> None:
    """Per layer 4 16^2 of attention and 2 16 64 + 64 + 16 of the feed-forward, 4 16 of norms; a table of 64 16."""
    layer = 4 * 16**2 + 2 * 16 * 64 + 64 + 16 + 4 * 16
    stated = config.override(TINY, {'train.num_steps': 10})
    assert matching.num_parameters(stated) == 2 * layer + 64 * 16 + 2 * 16
    assert matching.num_tokens(stated) == 10 * 8 * 16
    two_stacks = {'model.family': 'encoder_decoder', 'train.objective': 'seq2seq', 'data.encoder_length': 24}
    assert matching.num_tokens(config.override(stated, two_stacks)) == 10 * 8 * (16 + 24)
    assert matching.num_tokens(config.override(stated, {**two_stacks, 'data.batch_tokens': 100})) == 10 * 4 * (16 + 24)
    kernels, pairs = 2 * (4 * 16**2 + 2 * 16 * 64) + 64 * 16, 2 * 16**2
    assert matching.num_flops(stated) == 10 * (6 * 8 * 16 * kernels + 8 * 12 * 16 * pairs)


@pytest.mark.parametrize('start', [1, 7, 1000])
def test_the_nearest_number_is_found_from_anywhere_in_few_looks(start: int) -> None:
    looks: list[int] = []
    for rising in (lambda x: 10 * x, lambda x: x**3, lambda x: 50 * (x // 4) + x):
        for number in (1, 2, 3, 100, 701, 7000):
            for target in (rising(number), rising(number) + 3, rising(number) - 3):
                looks.clear()
                found = matching.nearest(lambda x: looks.append(x) or rising(x), target, start)  # noqa: B023
                least = min(abs(rising(other) - target) for other in range(1, 7010))
                assert found > 0 and abs(rising(found) - target) == least
                assert len(looks) == len(set(looks)) <= 50
    matching.nearest(lambda x: looks.append(x) or 10 * x + 7, 3000, looks.clear() or 1000)
    assert len(looks) <= 8  # of a straight line


# ---------------------------------------------------------------------------------------------------------- the files


WIDTHS = {'sweeps/glu': ('model.mlp_dim', 1), 'sweeps/recurrent': ('model.emb_dim', 2)}  # matched, in multiples of


def nearest_width(trial, baseline, field: str, step: int) -> bool:
    """Whether the widths beside it have no number of parameters nearer to the baseline's."""
    target, width = matching.num_parameters(baseline.config), trial.overrides[field]
    of = {at: config.override(trial.config, {field: at}) for at in (width - step, width, width + step)}
    misses = {at: abs(matching.num_parameters(changed) - target) for at, changed in of.items()}
    return min(misses, key=misses.get) == width


TAKE_LONG = {'sweeps/recurrent', 'sweeps/glu'}


@pytest.mark.slow
@pytest.mark.parametrize(
    'file', [pytest.param(file, marks=pytest.mark.proof if file in TAKE_LONG else ()) for file in recipes.SWEEPS]
)
def test_every_sweep_loads_and_its_header_says_how_to_run_it(file: str, monkeypatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    path = f'{recipes.FOLDER}/{file}.py'
    for spec in (path, f'{path}:smoke'):
        base, sweep = trials.opened(spec)
        made = trials.listed(base, sweep)
        if isinstance(sweep.arms, search):
            jobs = SearchJobs(sweep.arms, base, sweep.match)
            base, made = (
                jobs.base,
                [*jobs.confirming({}), *jobs.arm({field: of(0.5) for field, of in sweep.arms.space.items()})],
            )
        assert made[0].name == 'baseline' and len({trial.name for trial in made}) >= 2
        for trial in made:
            checks.check_here(trial.config)
            stated = config.override(base, trial.overrides)
            assert checks.settle(stated, say=lambda line: None) == trial.config
            if trial.seed == made[0].seed:
                assert all(
                    abs(off) < 0.1 or nearest_width(trial, made[0], *WIDTHS[file])
                    for off in trial.mismatch_percent.values()
                )
            assert trial.config.train.num_steps == 2 or not spec.endswith('smoke')
    header = recipes.header(file)
    assert f'tformer sweep --config=configs/{file}.py --workdir=' in header and re.search(r'(19|20)\d\d', header)
    assert 'Machine and time' in header


def test_a_sweep_of_two_arms_is_written_in_under_ten_lines(tmp_path: pathlib.Path, capsys) -> None:
    (tmp_path / 'base.py').write_text("""
from tformer.config import Config, Train, config_dict

def get_config(argument):
    return config_dict(Config(train=Train(num_steps=9)))
""")
    text = """
        from tformer.lab.sweep import Sweep, grid, product, seeds

        def get_sweep():
            return Sweep('base.py', product(grid({'model.norm': ['layernorm', 'rmsnorm']}), seeds(2)))
    """
    (tmp_path / 'two.py').write_text('\n'.join(line[8:] for line in text.splitlines()))
    base, made = loaded(f'{tmp_path}/two.py', {'model.emb_dim': '64'})
    assert [trial.directory for trial in made][1:3] == ['baseline/seed_1', 'norm=rmsnorm/seed_0']
    assert {trial.config.model.emb_dim for trial in made} == {base.model.emb_dim} == {64}
    command_line.main(['tformer', 'sweep', f'--config={tmp_path}/two.py', '--dry_run', '--config.model.emb_dim=64'])
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:5]] == [trial.directory for trial in made]
    assert [line.split()[1] for line in said[1:5]] == [f'{matching.num_parameters(trial.config):,}' for trial in made]
    with pytest.raises(UserError, match=r'--config.model.norm: .* varies this field itself'):
        loaded(f'{tmp_path}/two.py', {'model.norm': 'dyt'})
    matched = text.replace(', seeds(2)))', '), match=Match("parameters", "model.mlp_dim"))').replace(
        'grid,', 'Match, grid,'
    )
    (tmp_path / 'matched.py').write_text('\n'.join(line[8:] for line in matched.splitlines()))
    _, made = loaded(f'{tmp_path}/matched.py', {'model.mlp_dim': '48'})
    assert made[0].config.model.mlp_dim == 48, 'the baseline has what is given, and the others are adjusted to it'
    with pytest.raises(UserError, match=r'two.py: .*argument'):
        loaded(f'{tmp_path}/two.py:small')
    with pytest.raises(UserError, match=r'defines no get_sweep\(\)'):
        loaded(f'{tmp_path}/base.py')
    with pytest.raises(UserError, match=r'no file .*tow.py; did you mean .*two.py'):
        loaded(f'{tmp_path}/tow.py')
    of_dict = Sweep(config.config_dict(TINY), [{}])
    assert trials.trials(config.from_dict(of_dict.base), of_dict.arms)[0].config == TINY


def test_the_command_ends_with_a_report_by_its_flags(monkeypatch, capsys) -> None:
    arguments, seen = inspect.signature(report_command.report), []
    monkeypatch.setattr(sweep_command, '_sweep', lambda *given: 0)
    monkeypatch.setattr(
        report_command, 'report', lambda *given: seen.append(arguments.bind(*given).arguments) or 'findings'
    )
    flags = ['--metric=valid/loss', '--baseline=x', '--alpha=0.1', '--timing=false', '--reach=train/loss=0.75']
    command_line.main(['tformer', 'sweep', '--config=unread', '--workdir=here', *flags])
    wanted = {'metric': 'valid/loss', 'baseline': 'x', 'alpha': 0.1, 'timing': False, 'reach': ['train/loss=0.75']}
    assert seen == [{'directory': 'here', **wanted}] and capsys.readouterr().out == 'findings\n'


@pytest.mark.parametrize(
    'flag, message',
    {
        '--alpha=7': '--alpha=7.0 must be between 0 and 1',
        '--reach=x': '--reach=x is not NAME=VALUE, such as valid/accuracy=0.99',
        '--reach==1': '--reach==1 is not NAME=VALUE',
        '--baseline=nrm=rmsnorm': "--baseline=nrm=rmsnorm is not an arm; did you mean 'norm=rmsnorm'?",
        '--metric=loss': '--metric=loss is not SPLIT/NAME, with test or valid',
        '--metric=tset/loss': "--metric=tset/loss is not SPLIT/NAME, with test or valid; did you mean 'test/loss'?",
        '--metric=test/los': "--metric=test/los will be in no result; did you mean 'test/loss'?",
        '--metric=test/word_error_rat': "did you mean 'test/word_error_rate'?",
    }.items(),
)
def test_a_flag_of_the_report_is_checked_before_anything_trains(tmp_path, flag: str, message: str) -> None:
    arms = [{}, {'model.norm': 'rmsnorm'}]
    (tmp_path / 'two.py').write_text(
        'from tformer.lab.sweep import Sweep\n\n'
        f'def get_sweep():\n    return Sweep({str(ROOT / "configs/g2p.py:smoke")!r}, {arms})\n'
    )
    command = [
        'tformer',
        'sweep',
        f'--config={tmp_path}/two.py',
        f'--workdir={tmp_path}/x',
        '--config.train.num_steps=7',
    ]
    for more in ([], ['--dry_run']):
        with pytest.raises(UserError, match=re.escape(message)):
            command_line.main([*command, flag, *more])
    assert not (tmp_path / 'x').exists()


def test_the_baseline_of_a_search_is_an_arm_that_is_known(tmp_path) -> None:
    (tmp_path / 'search.py').write_text(
        'from tformer.lab.sweep import Sweep, log_uniform, search\n\n'
        'def get_sweep():\n'
        "    space = {'optimizer.learning_rate': log_uniform(1e-4, 1e-2)}\n"
        f'    return Sweep({str(ROOT / "configs/lm_stdlib.py:smoke")!r}, search(space, "qmc", trials=2, confirm=2))\n'
    )
    command = ['tformer', 'sweep', f'--config={tmp_path}/search.py', f'--workdir={tmp_path}/x', '--dry_run']
    with pytest.raises(UserError, match=r"--baseline=basline is not an arm; did you mean 'baseline'"):
        command_line.main([*command, '--baseline=basline'])
    command_line.main([*command, '--baseline=baseline'])


def test_a_metric_that_depends_on_the_data_is_left_to_the_report() -> None:
    loaded_as = sweep_command._Loaded(TINY, trials.trials(TINY, [{}]), None)
    for metric in (None, 'valid/loss', 'test/loss_at_40', 'test/spearman'):
        sweep_command._check_report(metric, 'baseline', loaded_as)


@pytest.mark.parametrize(
    'sweep, message',
    {
        'Sweep(BASE, 5)': 'expected a list of dicts, not 5',
        'Sweep(BASE, None)': 'expected a list of dicts, not None',
        'Sweep(BASE, [5])': 'expected a list of dicts',
        'Sweep(BASE, {"train.seed": 1})': 'expected a list of dicts',
        'Sweep(5, seeds(2))': 'neither FILE',
        'Sweep({"model": 5}, seeds(2))': 'config.model=5 is not a section',
        'Sweep(BASE, seeds(2), 5)': '5 is not a Match',
        'Sweep(BASE, seeds("2"))': "seeds: '2' is not an integer",
        'Sweep(BASE, seeds(10**9))': '1,000,000,000 trials are more than a sweep can have',
        'Sweep(BASE, sample({}, 10**9))': '1,000,000,000 trials are more than a sweep can have',
        'Sweep(BASE, product(seeds(10**4), seeds(10**4, 10**5)))': '100,000,000 trials are more',
        'Sweep(BASE, grid({"model.emb_dim": 8}))': 'expected a list of values, not 8',
        'Sweep(BASE, zipped({"a": [1], "b": [1, 2]}))': 'equally many values',
        'Sweep(BASE, grid({"optimizer.learning_rate": [10**400]}))': 'more than 64 bits',
        'Sweep()': 'missing 2 required positional arguments',
        '5': 'returns int, not a Sweep',
        'exit(7)': 'SystemExit: 7',
    }.items(),
)
def test_a_mistake_in_a_sweep_file_is_a_line_that_names_it(tmp_path, sweep: str, message: str):
    (tmp_path / 'base.py').write_text('def get_config(_): return {"train": {"num_steps": 1}}\n')
    text = f'from tformer.lab.sweep import *\nBASE = "base.py"\ndef get_sweep():\n    return {sweep}\n'
    (tmp_path / 'mine.py').write_text(text)
    with pytest.raises(UserError) as error:
        loaded(f'{tmp_path}/mine.py')
    assert 'mine.py' in str(error.value) and message in str(error.value) and '\n' not in str(error.value)


# ---------------------------------------------------------------------------------- the runner, of trainings that act


def begun(directory: pathlib.Path) -> dict[str, int]:
    """How often each trial began, by its arm."""
    return {file.parts[-3]: len(file.read_text()) for file in sorted(directory.glob('*/seed_0/began'))}


@pytest.mark.stack
def test_failures_are_told_and_kept_and_stop_nothing(tmp_path: pathlib.Path, capsys) -> None:
    assert acting(tmp_path, [2.0, 1.0, 4.0]) == 2
    said = capsys.readouterr().out
    assert re.search(r'2/3  learning_rate=1\.0/seed_0  \d+ s  done, test loss 1', said)
    assert re.search(
        rf'baseline/seed_0  \d+ s  failed: tformer: it is two \({tmp_path}/baseline/seed_0/log.txt\)', said
    )
    assert (tmp_path / 'baseline/seed_0/error.txt').read_text() == 'tformer: it is two\n'
    assert acting(tmp_path, [2.0, 1.0, 3.0, 4.0]) == 1
    assert (tmp_path / 'learning_rate=3.0/seed_0/error.txt').read_text() == 'ValueError: it is three\n'
    assert begun(tmp_path) == {'baseline': 2} | {f'learning_rate={x}': 1 for x in (1.0, 3.0, 4.0)}
    listed = json.loads((tmp_path / 'sweep.json').read_text())
    assert config.from_dict(listed['base']) == TINY
    for trial in listed['trials']:
        stated = config.override(TINY, trial['overrides'])
        assert config.digest(stated) == trial['config_digest'] and listed['seconds'][trial['directory']] > 0
        assert config.load(f'{tmp_path}/{trial["directory"]}/trial.json') == stated


def test_a_trial_of_the_same_name_and_another_config_is_refused_before_anything_is_written(tmp_path) -> None:
    assert acting(tmp_path, [1.0]) == 0
    before = (tmp_path / 'sweep.json').read_text()
    with pytest.raises(UserError, match=r'with another config: optimizer.learning_rate \(1.0 there, 4.0 here'):
        acting(tmp_path, [4.0, 1.0])
    assert (tmp_path / 'sweep.json').read_text() == before and not list(tmp_path.glob('learning_rate*'))
    tracked = config.override(TINY, {'optimizer.learning_rate': 1.0, 'train.trackers': ()})
    manifest.check(trials.trials(tracked, [{}]), tmp_path)  # who is told the metrics changes none
    (tmp_path / 'other/baseline/seed_0').mkdir(parents=True)
    (tmp_path / 'other/baseline/seed_0/config.json').write_text('{}')
    with pytest.raises(UserError, match='not of a sweep'):
        acting(tmp_path / 'other', [1.0])
    (tmp_path / 'other/config.json').write_text('{}')
    with pytest.raises(UserError, match='other is the workdir of a run'):
        acting(tmp_path / 'other', [2.0])
    with pytest.raises(UserError, match='seed_0 holds a trial with another config'):
        plan.plan(trials.trials(TINY, [{'optimizer.learning_rate': 4.0}]), tmp_path)
    with pytest.raises(UserError, match='--parallel=0'):
        acting(tmp_path, [1.0], parallel=0)


def test_a_trial_keeps_why_it_failed(tmp_path: pathlib.Path) -> None:
    """However it was begun, e.g. as a task of an array; a run that is no trial leaves nothing."""
    wanted = config.override(TINY, {'data.path': (f'{tmp_path}/nothing.txt',)})
    for stated in (False, True):
        if stated:
            (tmp_path / 'x/trial.json').write_text('{}')
        with pytest.raises(UserError) as error:
            train_command.train_and_evaluate(wanted, f'{tmp_path}/x')
        assert (tmp_path / 'x/error.txt').exists() == stated
    assert (tmp_path / 'x/error.txt').read_text() == f'tformer: {error.value}\n'


HOLDER = """
import pathlib, sys
from tformer.training import workdir
with workdir.lock(pathlib.Path(sys.argv[1])):
    print('held', flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held_by_another(place: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """Another process is in a workdir."""
    pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'env': {**os.environ, 'PYTHONPATH': str(ROOT)}}
    with subprocess.Popen([sys.executable, '-c', HOLDER, str(place)], text=True, **pipes) as holder:
        assert holder.stdout.readline() == 'held\n'
        yield holder
        holder.stdin.close()


@pytest.mark.proof
def test_a_trial_that_another_process_runs_does_not_fail(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    """It is begun a second time, by itself, with others together, or by a sweep, which tries it again later."""
    monkeypatch.setattr(workdir, 'LOCK_SECONDS', 0)
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0, 4.0]}))
    manifest.claim(TINY, made, tmp_path)
    running, other = (tmp_path / trial.directory for trial in made)
    (running / 'error.txt').write_text('of one of some together\n')
    with held_by_another(running) as holder:
        assert workdir.is_locked(running) and not workdir.is_locked(other) and not (other / 'lock').exists()
        with pytest.raises(UserError, match='is in use by process'):
            train_command.train_and_evaluate(made[0].config, str(running))
        with pytest.raises(UserError, match='is in use by process'):
            train_command.train_together([str(running), str(other)])
        assert (running / 'error.txt').read_text() == 'of one of some together\n'
        (running / 'error.txt').unlink()
        actor = ACTOR.replace(
            'import json', 'from tformer.training import workdir; workdir.LOCK_SECONDS = 0; import json'
        )
        actor = actor.replace(
            '    rate = ',
            """
    try:
        with workdir.lock(home): log.write('ValueError: of its own')
    except Exception as error: log.write(f'tformer: {error}')
    return 1
    rate = """,
        )
        outcome, states = trial_process.Training.outcome, []

        def let_go(*given: object) -> tuple[trial_process.End, str]:
            end, text = outcome(*given)
            if end is trial_process.End.FAILED:  # the other trial: it was not held up
                states.append(results.read(tmp_path).runs[0].state)
                holder.stdin.close()
                holder.wait()
            return end, text

        monkeypatch.setattr(trial_process.Training, 'outcome', let_go)
        monkeypatch.setattr(runner, 'BUSY_SECONDS', 1.0)
        with mock.patch.object(trial_process, 'TRAIN', [sys.executable, '-c', actor]):
            assert runner.sweep(TINY, made, tmp_path) == 1
        said = capsys.readouterr().out
        assert re.search(rf'baseline/seed_0  .* s  is tried again later: .*--workdir={running} is in use', said)
        assert re.search(r'learning_rate=4.0/seed_0  .* s  failed: ValueError: of its own', said)
        assert re.search(r'baseline/seed_0  .* s  failed: ValueError: of its own', said)
        assert states[0] == 'unfinished'
    assert not workdir.is_locked(running) and trials.clear_error(other) and trials.error_of(other) is None


def test_a_workdir_is_free_though_data_workers_have_not_ended(tmp_path: pathlib.Path) -> None:
    with workdir.lock(tmp_path):
        assert workdir.is_locked(tmp_path)
        numbers = [file for file in pathlib.Path('/proc/self/fd').iterdir() if file.resolve() == tmp_path / 'lock']
        worker = subprocess.Popen(['sleep', '60'], pass_fds=[int(file.name) for file in numbers])
    free = not workdir.is_locked(tmp_path)
    worker.kill()
    worker.wait()
    assert numbers and free


def test_where_the_file_system_has_no_locks_it_is_said_once(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, 'Operation not supported')

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with workdir.lock(tmp_path):
        assert not workdir.is_locked(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'--workdir={tmp_path}: nothing keeps a second process out') and 'not supported' in line


@pytest.mark.parametrize('cause', [None, 'ValueError: the cause'])
def test_of_processes_that_run_as_one_the_first_error_is_kept(tmp_path, monkeypatch, cause: str | None) -> None:
    monkeypatch.setattr(processes, 'lost', lambda error: f'another process of the run has ended ({error})')
    (tmp_path / 'trial.json').write_text('{}')
    with pytest.raises(RuntimeError), trials.kept(tmp_path):
        if cause is not None:
            trials.write_error(tmp_path, cause)
        raise RuntimeError('UNAVAILABLE: peer')
    assert trials.error_of(tmp_path) == (cause or 'tformer: another process of the run has ended (UNAVAILABLE: peer)')


@pytest.mark.parametrize('before', [False, True])
def test_another_than_the_first_process_tells_the_first_one_from_another_run(tmp_path, monkeypatch, before) -> None:
    """The first one holds the workdir while the others train; another run has held it before they begin."""
    monkeypatch.setattr(processes, 'first', lambda: False)
    (tmp_path / 'trial.json').write_text('{}')
    with contextlib.ExitStack() as holding:
        if before:
            holding.enter_context(workdir.lock(tmp_path))
        with pytest.raises(ValueError), trials.kept(tmp_path):
            if not before:
                holding.enter_context(workdir.lock(tmp_path))
            raise ValueError('x')
    assert trials.error_of(tmp_path) == (None if before else 'ValueError: x')


def test_a_sweep_that_is_refused_leaves_the_command_of_the_one_before(tmp_path: pathlib.Path) -> None:
    rates = ({'optimizer.learning_rate': rate} for rate in (1.0, 4.0))
    made, other = (trials.trials(TINY, [rate]) for rate in rates)
    manifest.enter(TINY, made, Leases(tmp_path / 'leases'), arguments=['--config=first file.py'])
    with pytest.raises(UserError, match='holds a trial with another config'):
        runner.sweep(TINY, other, tmp_path, arguments=['--config=second.py'])
    assert (tmp_path / 'command.txt').read_text() == "tformer sweep '--config=first file.py'\n"


def test_sweeps_of_other_trials_do_not_share_a_directory_at_once(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0, 2.0, 4.0]}))
    first = manifest.enter(TINY, made[:2], Leases(tmp_path / 'leases'))
    listed = (tmp_path / 'sweep.json').read_text()
    with pytest.raises(UserError, match=f'^{tmp_path} is swept by another command with other trials; use a fresh --w'):
        manifest.enter(TINY, [made[0], made[2]], Leases(tmp_path / 'leases'))
    assert (tmp_path / 'sweep.json').read_text() == listed
    manifest.enter(TINY, made, Leases(tmp_path / 'leases')).release(done=True)  # it lacks none
    first.release(done=True)
    capsys.readouterr()
    manifest.enter(TINY, made[::2], Leases(tmp_path / 'leases')).release(done=True)
    assert capsys.readouterr().out == f'no longer in the sweep, but still in {tmp_path}: learning_rate=2.0/seed_0\n'
    Leases(tmp_path / 'leases', Holder('elsewhere', 1, started=1)).take('session/it')
    monkeypatch.setattr(leases, 'PATIENCE', -1.0)  # what is silent is dead
    manifest.enter(TINY, made[:2], Leases(tmp_path / 'leases')).release(done=True)


def test_the_metric_of_a_search_is_checked_before_anything_trains(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'search.py').write_text(
        'from tformer.lab.sweep import Sweep, search, uniform\n\n'
        "def get_sweep(name):\n    space = {'optimizer.learning_rate': uniform(0.1, 0.2)}\n"
        f'    return Sweep({str(ROOT / "configs/g2p.py:smoke")!r}, search(space, "random", metric=name))\n'
    )
    command, spec = ['tformer', 'sweep', '--dry_run'], f'--config={tmp_path}/search.py'
    with pytest.raises(UserError, match="search: metric='valid/lss' is unknown; did you mean 'valid/loss'"):
        command_line.main([*command, f'{spec}:valid/lss'])
    with pytest.raises(UserError, match="search: metric='valid/word_error_rate' is unknown"):  # while training
        command_line.main([*command, f'{spec}:valid/word_error_rate'])
    command_line.main([*command, f'{spec}:valid/word_error_rate', '--config.evaluate.examples_while_training=8'])


def test_what_failed_runs_again_once_a_host_that_left_its_leases_is_gone(tmp_path: pathlib.Path, monkeypatch) -> None:
    """One that has died far away, or before this host began anew; one that lives is heard of within seconds."""
    made, place = trials.trials(TINY, [{}]), tmp_path / 'baseline/seed_0'
    place.mkdir(parents=True)
    trials.write_error(place, 'it failed')
    far = Leases(tmp_path / 'leases', Holder('elsewhere', 1, started=1))
    far.take('session/killed')
    (tmp_path / 'leases/session@cut.1').touch()
    lives = far.take('other/seed_0')
    monkeypatch.setattr(manifest.time, 'sleep', lambda _: lives.renew())
    manifest.enter(TINY, made, Leases(tmp_path / 'leases')).release(done=True)
    assert trials.error_of(place) == 'it failed'
    lives.release(done=True)
    monkeypatch.setattr(manifest.time, 'sleep', lambda _: monkeypatch.setattr(leases, 'PATIENCE', 0.0))
    manifest.enter(TINY, made, Leases(tmp_path / 'leases')).release(done=True)
    assert trials.error_of(place) is None and not list((tmp_path / 'leases').glob('session@*'))


def test_who_joins_a_search_may_know_less_of_it_than_is_drawn(tmp_path: pathlib.Path, capsys) -> None:
    made = trials.trials(TINY, product(grid({'optimizer.learning_rate': [1.0, 2.0]}), seeds(2)))
    drawn = [dataclasses.replace(made[2], is_searched=True), made[3]]  # and run again
    session = manifest.enter(TINY, [*made[:2], *drawn], Leases(tmp_path / 'leases'))
    listed = (tmp_path / manifest.LIST).read_bytes()
    assert manifest.enter(TINY, made[:2], Leases(tmp_path / 'leases')) is not None
    assert (tmp_path / manifest.LIST).read_bytes() == listed and capsys.readouterr().out == ''
    session.release()


def test_a_trial_that_is_done_is_not_begun_again(tmp_path: pathlib.Path, capsys) -> None:
    """Alone, or where all of some together are done."""
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0, 4.0]}))
    manifest.claim(TINY, made, tmp_path)
    homes = [tmp_path / trial.directory for trial in made]
    for home in homes:
        (home / 'result.json').write_text(json.dumps({'test': {'step': 4, 'loss': 0.5}}))
    before = {home: sorted(home.iterdir()) for home in homes}
    assert train_command.train_and_evaluate(made[0].config, str(homes[0])) == {'step': 4, 'loss': 0.5}
    assert f'{homes[0]} is done' in capsys.readouterr().out
    train_command.train_together([str(home) for home in homes])
    assert {home: sorted(home.iterdir()) for home in homes} == before
    with pytest.raises(UserError):  # its data are not there
        train_command.train_and_evaluate(config.override(made[0].config, {'train.num_steps': 8}), str(homes[0]))


def test_the_plan_tells_what_is_done_and_what_time_is_left(tmp_path: pathlib.Path) -> None:
    acting(tmp_path, [1.0, 2.0])
    listed = json.loads((tmp_path / 'sweep.json').read_text())
    listed['seconds']['baseline/seed_0'] = 30.0
    (tmp_path / 'sweep.json').write_text(json.dumps(listed))
    (tmp_path / 'baseline/seed_0/error.txt').write_text('of a life before\n')
    arms = [{'optimizer.learning_rate': 1.0}, {'optimizer.learning_rate': 2.0}, {'train.num_steps': 12}]
    arms[2]['optimizer.learning_rate'] = 1.0
    made = trials.trials(TINY, arms, [Match('parameters', 'model.mlp_dim')])
    head, *rows, last = plan.plan(made, tmp_path).splitlines()
    assert re.split('  +', head) == ['trial', 'parameters', 'FLOPs at most', 'tokens at most', 'matched', 'state']
    assert rows[0].startswith('baseline/seed_0') and rows[0].endswith('done, 30 s')
    assert f'{matching.num_parameters(TINY):,}' in rows[0] and '512' in rows[0] and 'parameters +0.000 %' in rows[0]
    assert rows[1].endswith('failed: tformer: it is two') and rows[2].endswith('about 90 s')
    assert last.startswith('3 trials, 1 of them done; about 2.0 minutes are left')
    assert plan.plan(made, tmp_path, parallel=2).endswith('about 1.0 minutes are left')
    assert not list(tmp_path.glob('num_steps*'))
    del listed['seconds']['baseline/seed_0']  # as a task of an array leaves it
    (tmp_path / 'sweep.json').write_text(json.dumps(listed))
    _, row, *_ = plan.plan(made, tmp_path).splitlines()
    assert row.endswith(' done')
    epochs = config.override(TINY, {'train.num_steps': None, 'train.num_epochs': 1.0})
    assert plan.plan(trials.trials(epochs, [{}]), None).splitlines()[1].split()[2:] == ['-', '-']


def in_a_process(directory: pathlib.Path, rates: list[float], parallel: int) -> subprocess.Popen[str]:
    code = f'import sys; sys.path.append({str(TESTS / "helpers")!r})\nimport pathlib, small_sweeps, tformer.errors\n'
    code += f'try: small_sweeps.acting(pathlib.Path({str(directory)!r}), {rates}, {parallel})\n'
    code += 'except tformer.errors.Stopped as stopped: print(stopped); sys.exit(75)'
    return subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, env=environment())


@pytest.mark.slow
@pytest.mark.signals
@pytest.mark.parametrize('ending', [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_ended_leaves_no_process_and_goes_on(ending: signal.Signals, tmp_path: pathlib.Path) -> None:
    """Two at once: one waits to be let go, the other has ended, the third has begun and waits."""
    rates = [1.0, 5.0, 4.0]
    (tmp_path / 'x').mkdir()
    waiting = tmp_path / 'learning_rate=5.0/seed_0'
    life = in_a_process(tmp_path, rates, 2)
    wait_for(lambda: (tmp_path / 'learning_rate=4.0/seed_0/result.json').exists() and (waiting / 'began').exists())
    life.send_signal(ending)
    said, _ = life.communicate(timeout=HANG)
    if ending == signal.SIGTERM:
        assert life.returncode == 75 and 'learning_rate=5.0/seed_0' in said and 'stopped\n' in said
        assert 'SIGTERM: 2 of 3 trials are done; run the same command again to resume' in said
    wait_for(lambda: not trainings(tmp_path))
    assert not (waiting / 'error.txt').exists() and not (waiting / 'result.json').exists()
    (waiting / 'let go').touch()
    assert acting(tmp_path, rates, 2) == 0
    assert begun(tmp_path) == {'baseline': 1, 'learning_rate=4.0': 1, 'learning_rate=5.0': 2}


def trainings(directory: pathlib.Path) -> list[str]:
    """The processes whose command names the directory as a workdir."""
    found = []
    for file in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
        try:
            command = file.read_bytes().decode(errors='replace')
        except OSError:
            continue
        if f'--workdir={directory}' in command:
            found.append(command)
    return found


def test_trials_at_once_share_the_cores() -> None:
    cores, none = os.sched_getaffinity(0), devices.Devices(None, ())
    shares = [devices.share(slot, len(cores), none).cores for slot in range(len(cores))]
    assert len(cores) == 1 or (set().union(*shares) == cores and {len(share) for share in shares} == {1})
    assert devices.share(0, 1, none).cores == devices.share(0, len(cores) + 1, none).cores == set()


# -------------------------------------------------------------------------------------------- the runner, of trainings


def real(place: pathlib.Path) -> tuple[Config, list[trials.Trial]]:
    """Two arms of two seeds, of which one arm comes to no number."""
    path = (str(toy_data.running(place / 'data')),)
    base = config.override(TINY, {'data.path': path, 'data.byte_fallback': False, 'train.max_skipped': 1})
    return base, trials.trials(base, product([{}, {'optimizer.learning_rate': 1e38}], seeds(2)))


@pytest.mark.signals
@pytest.mark.proof
def test_trainings_end_fail_and_after_a_kill_end_as_if_there_was_none(tmp_path: pathlib.Path, monkeypatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    base, made = real(tmp_path)
    assert runner.sweep(base, made, tmp_path / 'whole', Placement(2)) == 2
    for trial in made:
        place = tmp_path / 'whole' / trial.directory
        failed = trial.name != 'baseline'
        assert (place / 'result.json').exists() != failed == (place / 'error.txt').exists()
        assert not failed or 'were skipped: their loss or gradient is not finite' in (place / 'error.txt').read_text()

    (tmp_path / 'again.py').write_text("""
import pathlib
from tformer.lab.sweep import Sweep, seeds

def get_sweep():
    return Sweep('base.json', seeds(2))
""")
    go = tmp_path / 'go'
    (tmp_path / 'base.json').write_text(json.dumps(config.to_dict(base)))
    parts = tmp_path / 'parts'
    command = [sys.executable, '-m', 'tformer', 'sweep', f'--config={tmp_path}/again.py', f'--workdir={parts}']
    first = parts / 'baseline/seed_0'
    life = subprocess.Popen([*command, '--parallel=2'], stdout=subprocess.DEVNULL, env=waiting(tmp_path, go, 3))
    wait_for(lambda: checkpoint.steps(first) or life.poll() is not None)
    life.kill()
    life.wait()
    go.touch()
    assert not (first / 'result.json').exists()
    done = subprocess.run([*command, '--parallel=2'], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'resumed at step' in (first / 'log.txt').read_text()
    assert done.stdout.splitlines()[-2:] == [f'{parts}/report.md', f'{parts}/report.html']
    assert f'tformer sweep --config={tmp_path}/again.py --workdir={parts}\n' in (parts / 'report.md').read_text()
    for trial in made[:2]:
        one, other = (place / trial.directory for place in (tmp_path / 'whole', parts))
        assert scores(one) == scores(other)
        assert numbers(one) == numbers(other) and len(numbers(one)) >= 4
    assert numbers(tmp_path / 'whole' / made[0].directory) != numbers(tmp_path / 'whole' / made[1].directory)


@pytest.mark.signals
def test_a_signal_in_this_process_is_a_stop(tmp_path: pathlib.Path, monkeypatch) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    made = trials.trials(TINY, [{}, {'optimizer.learning_rate': 5.0}])
    actor = ACTOR.replace('rate = ', 'os.kill(os.getppid(), signal.SIGTERM); time.sleep(3600); rate = ')
    monkeypatch.setattr(trial_process, 'TRAIN', [sys.executable, '-c', actor])
    with pytest.raises(Stopped, match='SIGTERM: 0 of 2'):
        runner.sweep(TINY, made, tmp_path)
    assert begun(tmp_path) == {} and signal.getsignal(signal.SIGTERM) == handler


def test_a_trial_that_is_no_longer_listed_and_one_that_misses_its_match_are_told(tmp_path, capsys) -> None:
    made = trials.trials(TINY, grid({'optimizer.learning_rate': [1.0, 4.0]}))
    manifest.claim(TINY, made, tmp_path)
    manifest.write(TINY, made, tmp_path, {trial.directory: 1.0 for trial in made})
    manifest.claim(TINY, made[:1], tmp_path)
    assert capsys.readouterr().out == f'no longer in the sweep, but still in {tmp_path}: {made[1].directory}\n'
    off = dataclasses.replace(made[1], mismatch_percent={'flops': 0.99, 'tokens': -12.34})
    runner._print_mismatches([off, off])
    assert capsys.readouterr().out == f'{off.name}: misses the tokens that it should match by -12.3 %\n'


def test_what_no_trial_can_be_run_with_is_refused(tmp_path) -> None:
    made = trials.trials(TINY, [{}])
    with pytest.raises(UserError, match=r'^--parallel=0 must be positive$'):
        plan.plan(made, None, parallel=0)
    with pytest.raises(UserError, match=r"^--transform='mpa' is unknown; did you mean 'map'\?"):
        runner.sweep(TINY, made, tmp_path / 'x', Placement(transform='mpa'))
    with pytest.raises(UserError, match=r'^--transform is of trials that share one program: give --together$'):
        runner.sweep(TINY, made, tmp_path / 'x', Placement(transform='map'))
    assert not (tmp_path / 'x').exists()
    (tmp_path / 'base.py').write_text("def get_config(argument): return {'train': {'num_steps': 2}}")
    (tmp_path / 'all.py').write_text(
        'from tformer.lab.sweep import Sweep\n\n'
        "def get_sweep():\n    return Sweep('base.py', [{'model.position': 'alibi'}])\n"
    )
    with pytest.raises(UserError, match=r'all\.py: --config\.model\.rope_theta=5\.0 has no effect in any arm$'):
        loaded(f'{tmp_path}/all.py', {'model.rope_theta': '5'})
