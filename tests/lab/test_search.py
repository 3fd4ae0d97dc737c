"""Searches on paper: what they draw, whom they train how far, and that kills change nothing."""

import collections
import importlib.util
import json
import math
import random

import pytest

from small_searches import BASE, SPACE, Worker, curve, read_rows
from tformer import config
from tformer.errors import UserError
from tformer.lab.sweep import Match, asha, choice, hyperband, integers, log_uniform, median, sample, search, uniform
from tformer.lab.sweep import search_jobs as jobs_lib
from tformer.lab.sweep.jobs import Job, Wait
from tformer.lab.sweep.search_jobs import SearchJobs

RATE = 'optimizer.learning_rate'
NEEDS_OPTUNA = pytest.mark.skipif(importlib.util.find_spec('optuna') is None, reason='needs Optuna')
NEEDS_CMAES = pytest.mark.skipif(importlib.util.find_spec('cmaes') is None, reason='needs cmaes')
LEARNED = [pytest.param('tpe', marks=NEEDS_OPTUNA), pytest.param('cmaes', marks=[NEEDS_OPTUNA, NEEDS_CMAES])]
SAMPLERS = ['random', 'qmc', *LEARNED]


def ran(home, **fields):
    worker = Worker(home, search(SPACE, **{'sampler': 'random', 'trials': 9, 'confirm': 2} | fields))
    worker.run()
    return worker


def finished(worker):
    """Returns the loss at the end of each searched arm that got there, by its draw."""
    made = worker.jobs.made(worker.draws())
    return {n: curve(runs[0], 270) for n, runs in enumerate(made) if worker.of(runs[0]) == 'done'}


# ----------------------------------------------------------------------------------------------------------- draws


def test_the_random_sampler_draws_what_sample_draws_and_qmc_fills_the_space(tmp_path):
    assert ran(tmp_path / 'random', seed=3).draws() == sample(SPACE, 9, seed=3)
    shares = {'train.z_loss': uniform(0, 1), 'optimizer.weight_decay': uniform(0, 1)}
    worker = Worker(tmp_path / 'qmc', search(shares, 'qmc', 16, confirm=0), curve=lambda *_: 1.0)
    worker.run()
    for field in shares:  # a point in each of the 16 slices
        assert sorted(int(16 * each[field]) for each in worker.draws()) == list(range(16))


@pytest.mark.slow
@pytest.mark.proof_cases('qmc', 'cmaes')
@pytest.mark.parametrize('sampler', SAMPLERS)
def test_the_same_search_again_is_the_same_and_another_seed_is_another(tmp_path, sampler):
    fields = {'sampler': sampler, 'trials': 14, 'rungs': asha(rungs=2)}
    first, again = ran(tmp_path / 'a', **fields), ran(tmp_path / 'b', **fields)
    assert first.asked == again.asked and first.draws() == again.draws()
    assert first.draws() != ran(tmp_path / 'c', seed=1, **fields).draws()


@pytest.mark.parametrize('sampler', LEARNED)
def test_samplers_that_learn_draw_nearer_to_the_optimum_than_chance(tmp_path, sampler):
    worker = Worker(tmp_path, search({RATE: SPACE[RATE]}, sampler, 24, confirm=0))
    worker.run()
    misses = [abs(math.log10(each[RATE] / 0.03)) for each in worker.draws()]
    assert sum(misses[12:]) / 12 < 0.6  # of draws by chance it is 1.0


@pytest.mark.proof_cases('qmc', 'cmaes')
@pytest.mark.parametrize('sampler', SAMPLERS)
def test_every_kind_of_value_is_drawn_as_the_sweep_file_has_it(tmp_path, sampler):
    space = {
        'model.norm': choice(['rmsnorm', 'layernorm', None]),
        'model.attention_pattern': choice([('global',), ('local', 'global')]),
        'model.mlp_dim': integers(8, 64, log=True),
        'train.z_loss': uniform(0, 1),
    }
    base = config.override(BASE, {'model.window': 4, 'model.attention_pattern': ('local', 'global')})
    worker = Worker(tmp_path, search(space, sampler, 20, confirm=0), base, curve=lambda *_: 1.0)
    worker.run()
    drawn = jobs_lib.read(tmp_path, worker.jobs.search)
    assert len(drawn) == 20
    for each in drawn:
        assert each['model.norm'] in ('rmsnorm', 'layernorm', None)
        assert each['model.attention_pattern'] in (('global',), ('local', 'global'))
        assert type(each['model.mlp_dim']) is int and 8 <= each['model.mlp_dim'] <= 64
        assert 0 <= each['train.z_loss'] <= 1 and float(f'{each["train.z_loss"]:.4g}') == each['train.z_loss']
    assert len({each['model.norm'] for each in drawn}) == 3
    assert {each['model.attention_pattern'] for each in drawn} == {('global',), ('local', 'global')}


def test_rounding_leaves_no_range():
    assert uniform(0.9, 0.99996)(1.0) == 0.99996 and uniform(12345, 99999)(0.0) == 12345.0
    assert log_uniform(1.00004e-5, 1e-3)(0.0) == 1.00004e-5 and uniform(0.9, 0.99996)(0.5) == 0.95
    assert SearchJobs(search({'optimizer.beta2': uniform(0.9, 0.99999)}, 'random'), BASE).search.trials == 50


def test_integers_are_equally_likely_or_small_ones_are_by_ratio():
    counts = collections.Counter(integers(1, 4)((share + 0.5) / 400) for share in range(400))
    assert counts == {1: 100, 2: 100, 3: 100, 4: 100}
    counts = collections.Counter(integers(1, 4, log=True)(share / 999) for share in range(1000))
    assert counts[1] > counts[2] > counts[3] > counts[4] > 0
    assert [type(integers(2, 9)(share)) for share in (0.0, 0.5, 1.0)] == [int] * 3


# ------------------------------------------------------------------------------------------------------------ rungs


def test_without_rungs_every_arm_trains_to_its_end_and_the_best_is_run_again_with_fresh_seeds(tmp_path):
    worker = ran(tmp_path, trials=6, confirm=3)
    losses = finished(worker)
    assert len(losses) == 6 and worker.asked[:6] == [
        (runs[0].directory, None) for runs in worker.jobs.made(worker.draws())
    ]
    best = worker.jobs.made(worker.draws())[min(losses, key=losses.get)][0].name
    fresh = [(f'{arm}/seed_{seed}', None) for arm in ('baseline', best) for seed in (1, 2, 3)]
    assert worker.asked[6:] == fresh
    searched = {trial.directory for trial in worker.jobs.listed(tmp_path) if trial.is_searched}
    assert searched == {name for name, _ in worker.asked[:6]}
    assert {trial.directory for trial in worker.jobs.listed(tmp_path)} == {name for name, _ in worker.asked}


@pytest.mark.proof_cases('hyperband', 'median')
@pytest.mark.parametrize('rule', [asha(), hyperband(), median()], ids=['asha', 'hyperband', 'median'])
def test_rungs_cost_less_than_training_every_arm_and_find_the_same(tmp_path, rule):
    plain, paused = ran(tmp_path / 'plain', trials=27), ran(tmp_path / 'rungs', trials=27, rungs=rule)
    assert paused.draws() == plain.draws()
    confirming = 4 * 270
    assert plain.steps == 27 * 270 + confirming and paused.steps - confirming < 0.65 * (plain.steps - confirming)
    assert min(finished(paused).values()) == min(finished(plain).values())
    assert collections.Counter(paused.asked).most_common(1)[0][1] == 1


def test_a_diverged_or_failed_arm_is_the_worst_and_does_not_go_on(tmp_path):
    worker = ran(tmp_path, trials=27, rungs=asha())
    diverged = [runs[0].directory for runs in worker.jobs.made(worker.draws()) if math.isnan(curve(runs[0], 10))]
    assert diverged and all([until for name, until in worker.asked if name == each] == [10] for each in diverged)
    failing = Worker(tmp_path / 'failing', search(SPACE, 'random', 4, confirm=0))
    for number in range(4):
        job = failing.next()
        if number == 2:
            place = failing.home / job.trials[0].directory
            place.mkdir(parents=True)
            (place / 'error.txt').write_text('tformer: too large\n')
            failing.leased.clear()
        else:
            failing.train(job)
    assert failing.next() is None and len(finished(failing)) == 3


def test_arms_have_several_seeds_and_are_compared_by_their_mean(tmp_path):
    worker = ran(tmp_path, trials=9, seeds=2, rungs=asha(rungs=1), confirm=2)
    early = [name for name, until in worker.asked if until == 90]
    assert len(early) == 18 and early[::2] == [name.replace('seed_1', 'seed_0') for name in early[1::2]]
    means = {}
    for runs in worker.jobs.made(worker.draws()):
        means[runs[0].name] = (
            sum(min(row['valid/loss'] or math.nan for row in read_rows(tmp_path / run.directory)[:9]) for run in runs)
            / 2
        )
    went = {
        name.partition('/')[0]
        for name, until in worker.asked
        if until is None and name.partition('/')[2] in ('seed_0', 'seed_1')
    }
    assert set(sorted(means, key=lambda name: (math.isnan(means[name]), means[name]))[:3]) <= went
    assert {name.rpartition('/')[2] for name, _ in worker.asked[-4:]} == {'seed_2', 'seed_3'}  # fresh ones


# ------------------------------------------------------------------------------------------------------------ kills


@pytest.mark.proof_cases('qmc', 'tpe')
@pytest.mark.parametrize('sampler', SAMPLERS)
def test_a_worker_that_is_killed_at_any_step_and_begun_again_makes_the_same_search(tmp_path, sampler):
    fields = {'sampler': sampler, 'trials': 12, 'rungs': asha(rungs=2), 'confirm': 2}
    whole, rng = ran(tmp_path / 'whole', **fields), random.Random(sampler)
    worker, kept = Worker(tmp_path / 'killed', search(SPACE, **fields)), []
    while (job := worker.next()) is not None:
        start, end = worker.at(job.trials[0]), job.until or 270
        while rng.random() < 0.5:
            worker.train(job, dies_at=rng.randint(start, end - 1))
            worker = worker.again()
            assert worker.next() == job
        worker.train(job)
        kept.append((job.trials[0].directory, job.until))
    assert kept == whole.asked and worker.draws() == whole.draws()


@pytest.mark.proof_cases('median', 'none')
@pytest.mark.parametrize('rule', [asha(), hyperband(), median(), None], ids=['asha', 'hyperband', 'median', 'none'])
def test_several_workers_that_die_train_nothing_twice_and_count_no_rung_twice(tmp_path, rule):
    rng, made = random.Random(7), search(SPACE, 'random', 20, rungs=rule, confirm=2)
    host, running, ended = Worker(tmp_path, made), [], collections.Counter()
    while True:
        found = host.next() if len(running) < 4 else Wait('all are busy')
        if found is None:
            break
        if isinstance(found, Job):
            running.append(found)
            continue
        job = running.pop(rng.randrange(len(running)))
        if rng.random() < 0.3:
            host.train(job, dies_at=rng.randint(host.at(job.trials[0]), (job.until or 270) - 1))
            if rng.random() < 0.5:  # the host too: another one sees the leases of the others
                host = host.again()
        else:
            host.train(job)
            ended[job.trials[0].directory, job.until] += 1
    assert not running and set(ended.values()) == {1}
    assert host.draws() == sample(SPACE, 20)  # whoever draws
    best = min(finished(host).values())
    assert best == min(
        curve(runs[0], 270) for runs in host.jobs.made(host.draws()) if not math.isnan(curve(runs[0], 270))
    )


def test_a_run_that_is_stopped_at_a_rung_before_its_evaluation_has_not_reached_it(tmp_path, monkeypatch):
    worker = Worker(tmp_path, search(SPACE, 'random', 9, rungs=asha()))
    job = worker.next()
    worker.train(job)
    rows = tmp_path / job.trials[0].directory / 'metrics.jsonl'
    kept = rows.read_text()
    rows.write_text('{"step": 10, "train/loss": 1.0}\n')
    other = worker.again()
    assert other.jobs(other) == job  # it is trained there again, which evaluates it
    monkeypatch.setattr(jobs_lib, 'is_evaluated', lambda place, step: True)
    other = worker.again()
    with pytest.raises(UserError, match=r'metrics.jsonl lacks evaluations; delete .*seed_0 to train it again'):
        other.jobs(other)
    rows.write_text(kept)
    assert other.jobs(other).trials != job.trials


def test_a_run_that_was_asked_to_stop_is_left_out_by_every_host_until_it_may_go_on(tmp_path):
    worker = Worker(tmp_path, search(SPACE, 'random', 2, confirm=0))
    job = worker.next()
    worker.train(job, dies_at=100)
    stopped = tmp_path / job.trials[0].directory / 'stopped'
    stopped.touch()
    worker = worker.again()
    second = worker.next()
    assert second.trials != job.trials
    worker.train(second)
    assert worker.next() is None
    stopped.unlink()
    assert worker.next() == job


# ----------------------------------------------------------------------------------------------------------- budget


def test_a_budget_ends_the_search_and_what_is_best_by_then_is_confirmed(tmp_path, monkeypatch):
    def totals(place, step):
        return {'tokens': 100.0 * step, 'flops': 1e6 * step}

    monkeypatch.setattr(jobs_lib, '_totals', totals)
    for name, amount in (('tokens', 100.0 * 1000), ('flops', 1e6 * 1000)):
        worker = ran(tmp_path / name, trials=100, budget={name: amount})
        searched = [each for each, _ in worker.asked if each.endswith('seed_0')]
        assert len(searched) == 4  # the fourth run of 270 steps is begun before 1,000 are spent
        assert [each.rpartition('/')[2] for each, _ in worker.asked[4:]] == ['seed_1', 'seed_2'] * 2


def test_what_trains_on_any_host_counts_in_the_budget_with_what_it_will_need(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs_lib, '_totals', lambda place, step: {'tokens': 100.0 * step, 'flops': 0.0})
    worker = Worker(tmp_path, search(SPACE, 'random', 100, budget={'tokens': 100.0 * 1000}, confirm=0))
    worker.train(worker.next())
    training = [worker.next() for _ in range(3)]  # the third begins where 810 of 1,000 steps are spent or promised
    assert all(isinstance(job, Job) for job in training)
    waits = worker.next()
    assert isinstance(waits, Wait) and waits.may_come
    worker.train(training[0], dies_at=100)
    worker.train(training[1])
    again = worker.next()
    assert again == training[0]  # that died
    worker.train(again)
    assert isinstance(worker.next(), Wait)
    worker.train(training[2])
    assert worker.next() is None and worker.steps == 4 * 270 + 10


def test_more_trials_go_on_with_a_search_and_another_search_is_refused(tmp_path):
    few = ran(tmp_path, trials=3)
    drawn = few.draws()
    worker = Worker(tmp_path, search(SPACE, 'random', 5, confirm=2))
    worker.run()
    assert worker.draws()[:3] == drawn and len(worker.draws()) == 5
    assert not {name for name, _ in worker.asked} & {name for name, _ in few.asked if name.endswith('seed_0')}
    with pytest.raises(UserError, match="holds another search: sampler is 'random' there, 'qmc' here; use a fresh"):
        Worker(tmp_path, search(SPACE, 'qmc', 5)).next()
    (tmp_path / 'search.json').write_text('{"draws": 3}')
    with pytest.raises(UserError, match='is not the list of a search'):
        worker.next()


def test_draws_that_make_the_same_config_are_one_arm(tmp_path):
    worker = Worker(tmp_path, search({'model.norm': choice(['rmsnorm', 'layernorm'])}, 'random', 12, confirm=2))
    worker.run()
    assert len(worker.draws()) == 12 and len(worker.asked) == 2 + 2 + (2 if 'norm=' in worker.asked[-1][0] else 0)


def test_draws_whose_values_do_not_fit_together_count_as_failed(tmp_path):
    space = {'model.num_heads': choice([4, 8]), 'model.emb_dim': choice([16, 24, 36])}  # 36 is not a multiple of 8
    base = config.override(BASE, {'model.num_heads': 4})
    worker = Worker(tmp_path, search(space, 'random', 12, confirm=2), base, curve=lambda *_: 1.0)
    worker.run()
    made = worker.jobs.made(worker.draws())
    assert any(isinstance(each, str) and 'num_heads' in each for each in made)
    assert all(
        (each['model.num_heads'], each['model.emb_dim']) == (8, 36)
        for each, arm in zip(worker.draws(), made, strict=True)
        if isinstance(arm, str)
    )


def test_arms_of_a_search_are_matched_to_the_baseline(tmp_path):
    made = search({'model.emb_dim': choice([8, 32])}, 'random', 2, confirm=0)
    worker = SearchJobs(made, BASE, Match('parameters', 'model.mlp_dim'))
    ((trial,),) = worker.made([{'model.emb_dim': 8}])
    assert trial.config.model.mlp_dim > 2 * BASE.model.mlp_dim and abs(trial.mismatch_percent['parameters']) < 2


# -------------------------------------------------------------------------------------------------------- the journal


@pytest.mark.parametrize('sampler', LEARNED)
def test_the_journal_is_a_study_that_optuna_reads_and_its_loss_costs_no_draw(tmp_path, sampler):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    worker = ran(tmp_path, sampler=sampler, trials=10, rungs=asha(rungs=1))
    log = tmp_path / 'optuna.log'
    study = optuna.load_study(study_name='search', storage=JournalStorage(JournalFileBackend(str(log))))
    assert [trial.params for trial in study.trials] == worker.draws()
    states = {name.name for name in (trial.state for trial in study.trials)}
    assert states <= {'COMPLETE', 'PRUNED', 'FAIL'} and 'COMPLETE' in states
    losses, drawn = finished(worker), worker.draws()
    assert study.best_value == pytest.approx(min(losses.values()), abs=1e-7)
    assert all(trial.intermediate_values[0] > 1 for trial in study.trials if trial.state.name != 'FAIL')
    text = log.read_bytes()
    for damaged in (text[:-7], text[: text.index(b'\n') + 30], b''):
        log.write_bytes(damaged)
        more = Worker(tmp_path, search(SPACE, sampler, 12, rungs=asha(rungs=1), confirm=0))
        more.run()
        assert more.draws()[:10] == drawn and len(more.draws()) == 12
        (tmp_path / 'search.json').write_text(
            json.dumps(
                json.loads((tmp_path / 'search.json').read_text()) | {'draws': [{'overrides': each} for each in drawn]}
            )
        )


@NEEDS_OPTUNA
def test_the_importance_of_fields_is_found_and_bears_diverged_arms():
    from tformer.lab.sweep import optuna_study

    drawn = sample(SPACE | {'train.z_loss': uniform(0, 1)}, 40)
    values = [math.inf if each[RATE] > 0.5 else math.log10(each[RATE] / 0.03) ** 2 for each in drawn]
    found = optuna_study.importance(SPACE | {'train.z_loss': uniform(0, 1)}, drawn, values)
    assert found[RATE] > 0.8 and sum(found.values()) == pytest.approx(1)
    # Half of the decades count as half of the range, though they are a hundredth of its length.
    values = [float(each[RATE] < 1e-2) + 0.3 * (each['train.z_loss'] > 0.5) for each in drawn]
    found = optuna_study.importance(SPACE | {'train.z_loss': uniform(0, 1)}, drawn, values)
    assert found[RATE] > 0.6 and found['train.z_loss'] > found['optimizer.weight_decay']
    with pytest.raises(UserError, match='7 arms are too few to rate fields: 8'):
        optuna_study.importance(SPACE, sample(SPACE, 7), range(7))


# ---------------------------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    'the space is a dict of fields and their ranges': lambda: search([RATE]),
    "search: optimizer.learning_rte is not a field; did you mean 'optimizer.learning_rate'": lambda: search(
        {'optimizer.learning_rte': uniform(0, 1)}
    ),
    'train.seed is not searched; seeds=N runs each arm': lambda: search({'train.seed': integers(0, 9)}),
    r'learning_rate=\[1, 2\] is none of uniform\(\)': lambda: search({RATE: [1, 2]}),
    "sampler='tpee' is unknown; did you mean 'tpe'": lambda: search(SPACE, 'tpee'),
    'direction=maximize: of valid/loss one wants to minimize': lambda: search(SPACE, direction='maximize'),
    "direction='least' is unknown": lambda: search(SPACE, direction='least'),
    'metric=test/loss: a search sees evaluations while arms train: valid/NAME': lambda: search(
        SPACE, metric='test/loss'
    ),
    r"rungs='asha' is none of asha\(\)": lambda: search(SPACE, rungs='asha'),
    'trials=0 is not an integer from 1': lambda: search(SPACE, trials=0),
    'trials=2.5 is not an integer': lambda: search(SPACE, trials=2.5),
    'confirm=1 tells no noise': lambda: search(SPACE, confirm=1),
    "budget='minutes' is unknown": lambda: search(SPACE, budget={'minutes': 2}),
    'budget of hours=0 must be a positive number': lambda: search(SPACE, budget={'hours': 0}),
    'budget=2 is not a dict': lambda: search(SPACE, budget=2),
    'rungs need train.num_steps': lambda: SearchJobs(
        search(SPACE, 'random', rungs=asha()), config.override(BASE, {'train.num_steps': None, 'train.num_epochs': 1.0})
    ),
    'rungs need earlier evaluations: one each 270 steps of 270; set train.eval_every': lambda: SearchJobs(
        search(SPACE, 'random', rungs=asha()), config.override(BASE, {'train.eval_every': None})
    ),
    'train.eval_every=45 does not fit the base: .* evaluates nothing at step 30, where a rung is': lambda: SearchJobs(
        search({'train.eval_every': choice([10, 45])}, 'random', rungs=asha(rungs=2)), BASE
    ),
    "model.norm='rmsnrm' does not fit the base: .*did you mean 'rmsnorm'": lambda: SearchJobs(
        search({'model.norm': choice(['rmsnrm', 'layernorm'])}, 'random'), BASE
    ),
    'learning_rate=-1.0 does not fit the base': lambda: SearchJobs(search({RATE: uniform(-1, 1)}, 'random'), BASE),
    r"uniform\('1', 2\): both must be finite numbers": lambda: uniform('1', 2),
    r'log_uniform\(1, inf\): both must be finite numbers': lambda: log_uniform(1, math.inf),
    r'integers\(1.5, 3\): both must be integers': lambda: integers(1.5, 3),
    r'integers\(0, 3, log=True\): both must be positive': lambda: integers(0, 3, log=True),
}


@pytest.mark.parametrize('message', MISTAKES)
def test_mistakes_are_told(message):
    with pytest.raises(UserError, match=message):
        MISTAKES[message]()


def test_evaluations_may_be_told_as_a_share_of_the_run():
    base = config.override(BASE, {'train.eval_every': 0.1})
    assert SearchJobs(search(SPACE, 'random', rungs=asha(rungs=2)), base).steps == (54, 108, None)


def test_a_metric_that_no_evaluation_has_is_told_with_the_nearest(tmp_path):
    worker = Worker(tmp_path, search(SPACE, 'random', 3, metric='valid/lss', direction='maximize'))
    with pytest.raises(UserError, match=r"metric=valid/lss is in no evaluation of .*; did you mean 'valid/loss'"):
        worker.run()


@pytest.mark.skipif(importlib.util.find_spec('optuna') is not None, reason='Optuna is installed')
def test_without_optuna_a_sampler_that_needs_it_says_so(tmp_path):
    with pytest.raises(UserError, match=r"pip install 'tformer\[search\]'"):
        ran(tmp_path, sampler='tpe')
