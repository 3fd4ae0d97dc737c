"""A user's file adds rows to tables from outside the package, and runs only where the user names it."""

import json
import shutil
import subprocess
import sys

import pytest

import lives
import tformer as library
from lives import HANG
from tformer import checks, config
from tformer.config import extensions
from tformer.errors import UserError
from tformer.lab.sweep import grid, trial_process, trials

EXTENSION = '''"""One row for each of several tables, and a command."""

import jax.numpy as jnp
import optax

from tformer import commands
from tformer.config.tasks import TASKS
from tformer.data.sources import records, sources
from tformer.evaluation.metrics import METRICS, Metric
from tformer.layers.norms import NORMS, Norm
from tformer.layers.placements import PLACEMENTS, Placement, in_turn
from tformer.layers.positions import POSITIONS, Position
from tformer.optim.optimizers import OPTIMIZERS, Method

FLAGS = {'times': ('int', 1, 'how often')}


def slow_angles(cfg, positions_BT):
    """Rotates a pair of dimensions by one angle for each head size: half of rope's slowest."""
    return POSITIONS['rope'].angles(cfg, positions_BT * 0.5)


class MaxNorm(Norm):
    """Divides by the largest magnitude."""

    def __call__(self, x, *rest, **more):
        return x / jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True), 1e-6)


MaxNorm.fields = ()


def half(x, sublayer, alpha):
    return x + 0.5 * sublayer.function(sublayer.norm(x))


def digits(data, objective, split):
    found = [{'source': str(i), 'target': str(i)[::-1]} for i in range(200) if (i % 5 == 0) == (split != 'train')]
    return records.fingerprint('digits', split), lambda: (found, 0)


def hello(arguments, overrides, flags):
    print('hello ' * flags.times)


POSITIONS['slow'] = Position(angles=slow_angles, fields=POSITIONS['rope'].fields)
NORMS['maxnorm'] = MaxNorm
PLACEMENTS['half'] = Placement(in_turn(half), final_norm=True)
METRICS['length_error'] = Metric(
    ('length_error',),
    lambda p, r, _: {'length_error': sum(abs(len(a) - len(b[0])) for a, b in zip(p, r)) / max(len(p), 1)},
    lower_is_better=True,
)
OPTIMIZERS['signed'] = Method(lambda cfg, names: optax.scale_by_sign())
SOURCES = sources.SOURCES
SOURCES['digits'] = sources.Source(digits, (), lambda data: ('pair',))
TASKS['rewriting'] = TASKS['seq2seq']
commands.COMMANDS['hello'] = commands.declared(__file__, hello)
'''

FIELDS = {
    'model.position': 'slow', 'model.norm': 'maxnorm', 'model.norm_placement': 'half',
    'model.family': 'encoder_decoder', 'model.emb_dim': '16', 'model.mlp_dim': '16', 'model.num_heads': '2',
    'model.num_encoder_layers': '1', 'model.num_decoder_layers': '1', 'model.max_len': '32',
    'optimizer.name': 'signed', 'data.source': 'digits', 'data.tokenizer': 'byte', 'data.length': '16',
    'data.num_buckets': '1', 'train.objective': 'rewriting', 'train.num_steps': '2', 'train.batch_size': '8',
    'evaluate.metrics': 'length_error', 'evaluate.samples': '0', 'decode.max_len': '8', 'mesh.data': '1',
    'data.num_workers': '1',
}  # fmt: skip


def tformer(*arguments, cwd, **environment):
    """Runs the command line and returns (exit code, output, errors)."""
    env = {**lives.environment(), 'TFORMER_CACHE': str(cwd / 'cache'), **environment}
    ran = subprocess.run(
        [sys.executable, '-m', 'tformer', *map(str, arguments)],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    return ran.returncode, ran.stdout, ran.stderr


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A directory with an extension, and a run that uses each of its rows."""
    home = tmp_path_factory.mktemp('extensions')
    (home / 'mine.py').write_text(EXTENSION)
    (home / 'recipe.py').write_text(
        'from tformer import config\n\n\ndef get_config(argument):\n    return config.config_dict(config.Config())\n'
    )
    fields = [f'--config.{name}={value}' for name, value in FIELDS.items()]
    code, out, err = tformer(
        'train', '--config=recipe.py', '--config.extensions=mine.py', *fields, '--workdir=run', cwd=home
    )
    assert code == 0, out + err
    return home


@pytest.mark.proof
def test_a_run_uses_rows_from_outside_the_package(place):
    stored = json.loads((place / 'run' / 'config.json').read_text())
    (entry,) = stored['extensions']
    assert entry.startswith('mine.py@') and len(entry) == len('mine.py@') + 32
    assert (stored['model']['norm'], stored['train']['objective']) == ('maxnorm', 'rewriting')
    assert 'length_error' in json.loads((place / 'run' / 'result.json').read_text())['test']


@pytest.mark.proof
def test_a_workdir_runs_no_code_unless_the_user_names_it(place, tmp_path):
    evaluate = 'evaluate', '--workdir=run', '--split=valid'
    code, _, err = tformer(*evaluate, cwd=place)
    assert code == 2 and len(err.splitlines()) == 1 and 'needs the extension mine.py: name it with --extensions' in err
    assert tformer(*evaluate, '--extensions=mine.py', cwd=place)[0] == 0
    assert tformer(*evaluate, cwd=place, TFORMER_EXTENSIONS=str(place))[0] == 0
    (tmp_path / 'mine.py').write_text(EXTENSION + '# changed\n')
    for given in ({}, {'TFORMER_EXTENSIONS': str(tmp_path)}):
        more = [] if given else [f'--extensions={tmp_path / "mine.py"}']
        code, _, err = tformer(*evaluate, *more, cwd=place, **given)
        assert code == 2 and len(err.splitlines()) == 1 and 'mine.py has changed' in err
    code, _, err = tformer(*evaluate, '--extensions=gone.py', cwd=place)
    assert code == 2 and 'no file gone.py' in err


@pytest.mark.proof
def test_a_run_loads_in_python_with_the_extensions_that_it_needs(place):
    def load(argument):
        code = f"import tformer; print(tformer.load_run('run'{argument}))"
        command = [sys.executable, '-c', code]
        return subprocess.run(command, cwd=place, env=lives.environment(), capture_output=True, text=True)

    assert load(", extensions=['mine.py']").stdout.startswith("Run('run', step=2")
    assert 'needs the extension mine.py' in load('').stderr
    assert 'no file gone.py' in load(", extensions=['gone.py']").stderr


@pytest.mark.proof
def test_a_removed_extension_is_named_when_its_run_is_resumed(place, tmp_path):
    shutil.copytree(place / 'run', tmp_path / 'run')
    (tmp_path / 'recipe.py').write_text((place / 'recipe.py').read_text())
    fields = [f'--config.{name}={value}' for name, value in FIELDS.items()]
    for more, line in (
        (['--config=recipe.py', '--config.extensions=mine.py', *fields], 'extensions: no file mine.py'),
        (['--config=run/config.json'], 'needs the extension mine.py: name it with --extensions'),
        (['--config=run/config.json', '--extensions=mine.py'], 'extensions: no file mine.py'),
    ):
        code, _, err = tformer('train', '--workdir=run', *more, cwd=tmp_path)
        assert code == 2 and len(err.splitlines()) == 1 and line in err


@pytest.mark.proof
def test_an_extension_adds_a_command(place):
    assert tformer('hello', '--extensions=mine.py', '--times=2', cwd=place)[1].split() == ['hello', 'hello']
    assert tformer('hello', cwd=place)[0] == 2


@pytest.mark.proof
def test_a_sweep_passes_its_extensions_on(place):
    """Both to a trial that is trained alone and to trials that are trained together."""
    base = {**FIELDS, 'model.norm': 'maxnorm', 'extensions': 'mine.py'}
    (place / 'sweep.py').write_text(
        'from tformer import config\nfrom tformer.lab.sweep import Sweep\n\n\n'
        'def get_sweep():\n'
        f'    base = config.override(config.Config(), {base!r})\n'
        "    arms = [{}, {'optimizer.learning_rate': 1e-4}, {'model.norm': 'rmsnorm'}]\n"
        '    return Sweep(config.config_dict(base), arms)\n'
    )
    code, out, err = tformer('sweep', '--config=sweep.py', '--workdir=swept', '--together=2', cwd=place)
    assert code == 0, out + err
    assert len(list((place / 'swept').glob('*/seed_*/result.json'))) == 3
    assert '2 trials in one program' in (place / 'swept/baseline/seed_0/log.txt').read_text()


def test_a_job_names_the_extensions_of_its_trials(tmp_path):
    (tmp_path / 'mine.py').write_text('NAMED = 1\n')  # a file is known by its content
    fields = {'extensions': str(tmp_path / 'mine.py'), 'train.num_steps': 2, 'data.num_buckets': 1}
    made = trials.trials(config.override(config.Config(), fields), grid({'optimizer.learning_rate': [1e-3, 1e-4]}))
    assert trial_process.extension_files(made) == [str(tmp_path / 'mine.py')]


def test_an_extension_is_loaded_once_and_refused_if_it_changes(tmp_path, monkeypatch):
    file = tmp_path / 'counted.py'
    file.write_text('import builtins\nbuiltins.loaded = getattr(builtins, "loaded", 0) + 1\n')
    monkeypatch.setattr('builtins.loaded', 0, raising=False)
    asked = config.Config(extensions=(str(file),))
    first = extensions.load(asked, trusted=True, place='here')
    assert extensions.load(first, trusted=False, place='here') == first
    assert extensions.load(asked, trusted=True, place='here') == first
    assert __import__('builtins').loaded == 1 and extensions.files(first) == [str(file)]
    file.write_text('broken(\n')
    with pytest.raises(UserError, match=r'counted.py:1: '):
        extensions.load(asked, trusted=True, place='here')
    stale = config.Config(extensions=(f'{file}@{"0" * 32}',))
    with pytest.raises(UserError, match=r'counted.py has changed'):
        extensions.load(stale, trusted=True, place='here')
    other = config.Config(extensions=(f'elsewhere.py@{"0" * 32}',))
    with pytest.raises(UserError, match=r'runs/a needs the extension elsewhere.py: name it with --extensions'):
        extensions.load(other, trusted=False, place='runs/a')
    with pytest.raises(UserError, match=r'no file elsewhere.py'):
        extensions.load(other, trusted=True, place='here')


def test_a_file_of_a_run_loads_the_extensions_that_the_command_line_names(tmp_path):
    file, run = tmp_path / 'asked.py', tmp_path / 'config.json'
    file.write_text('')
    run.write_text(json.dumps({'extensions': ['asked.py']}))
    with pytest.raises(UserError, match=r'config.json needs the extension asked.py: name it with --extensions'):
        config.load(str(run))
    named = config.load(str(run), {'extensions': str(file)})
    assert extensions.files(named) == [str(file)]


def test_what_the_command_line_names_is_part_of_the_users_configs_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(extensions, '_GIVEN', {})
    file, other = tmp_path / 'given.py', tmp_path / 'other.py'
    for each in (file, other):
        each.write_text(f'NAME = {each.stem!r}\n')
    extensions.give([str(file)])
    entry, own = extensions.import_files([str(file), str(other)])

    def loaded(trusted, *stated):
        return extensions.load(config.Config(extensions=stated), trusted=trusted, place='here').extensions

    assert (loaded(True), loaded(True, own), loaded(True, entry)) == ((entry,), (own, entry), (entry,))
    assert (loaded(False), loaded(False, own)) == ((), (own,))


def test_a_config_without_extensions_has_the_digest_of_its_sections():
    assert config.digest(config.Config()) != config.digest(config.Config(extensions=('a.py',)))
    assert config.override(config.Config(), {'extensions': 'a.py,b.py'}).extensions == ('a.py', 'b.py')


def test_a_new_objective_is_one_row(monkeypatch):
    from tformer.config import tasks
    from tformer.objectives import OBJECTIVES
    from tformer.training.dummy_batch import random_batch

    monkeypatch.setitem(tasks.TASKS, 'my_masked_lm', tasks.TASKS['masked_lm'])
    cfg = config.override(config.Config(), {
        'train.objective': 'my_masked_lm', 'train.num_steps': 1, 'model.family': 'encoder', 'data.length': 16
    })  # fmt: skip
    checks.check(cfg)
    assert OBJECTIVES['my_masked_lm'] == OBJECTIVES['masked_lm']
    assert set(random_batch(checks.resolve(cfg, vocab_size=40))) == {'inputs', 'positions', 'targets', 'weights'}


@pytest.mark.slow
def test_an_objective_that_a_file_adds_is_trained(tmp_path, monkeypatch):
    from tformer.config import tasks

    monkeypatch.setitem(tasks.TASKS, 'my_masked_lm', None)  # the row goes with the test
    (tmp_path / 'mine.py').write_text(
        "from tformer.config.tasks import TASKS\n\nTASKS['my_masked_lm'] = TASKS['masked_lm']\n"
    )
    (tmp_path / 'recipe.py').write_text(
        'from tformer import config\n\n\ndef get_config(argument):\n    return config.config_dict(config.Config())\n'
    )
    fields = {
        'model.family': 'encoder', 'model.emb_dim': '16', 'model.mlp_dim': '16', 'model.num_encoder_layers': '1',
        'model.vocab_size': '40', 'data.length': '8', 'train.num_steps': '2', 'train.batch_size': '4', 'mesh.data': '1',
    }  # fmt: skip

    def losses(objective, **more):
        overrides = {**fields, 'train.objective': objective, **more}
        cfg = library.load_config(str(tmp_path / 'recipe.py'), overrides)
        batch = library.random_batch(cfg)
        state, step = library.new_state(cfg, batch), library.train_step(cfg)
        found = []
        for _ in range(2):
            state, metrics = step(state, batch)
            found.append(metrics['loss'])
        assert int(state.step) == 2
        return found

    mine = losses('my_masked_lm', extensions=str(tmp_path / 'mine.py'))
    assert mine == losses('masked_lm') and mine[0] != mine[1]
