"""A frozen teacher: its share of the loss, in parts and on a mesh; what a run with one records and refuses."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hub_directories
import toy_data
from comparing import descent, relative
from make_hf_reference import VOCAB
from small_training import make_batch, make_config
from stored_teachers import save_teacher
from tformer import checks, hf
from tformer.commands import evaluate
from tformer.commands.planning import dry_run
from tformer.config import Config, Data, Evaluate, Mesh, Model, Optimizer, Train, override
from tformer.config.tasks import DISTILLED, TASKS
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import meshes, sharding
from tformer.distributed.devices import Target
from tformer.errors import UserError
from tformer.hf import adapters
from tformer.lab.sweep import batched_trials, matching
from tformer.layers.class_scores import Teaching, class_scores
from tformer.model import build
from tformer.objectives import OBJECTIVES, number_scores, span_scores
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training import checkpoint, checkpoint_writer, flops, loop, workdir
from tformer.training import teacher as teacher_lib
from tformer.training.dummy_batch import one_row
from tformer.training.program import make_program
from tformer.training.state import TrainState, initial_variables
from tformer.training.step import make_train_step
from tformer.training.teacher import Teacher


# ------------------------------------------------------------------------------------------------- the loss
def softmax(x):
    odds = np.exp(x - x.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


def distilled(student, teacher, targets, weights, w, T):
    """(1 - w) H(targets, q) + w T^2 KL(p(T) || q(T)), summed by weight (Hinton et al. 2015, section 2)."""
    hard = -np.log(np.take_along_axis(softmax(student), targets[..., None], -1))[..., 0]
    p, q = softmax(teacher / T), softmax(student / T)
    return (((1 - w) * hard + w * T**2 * (p * np.log(p / q)).sum(-1)) * weights).sum()


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape, scale=2)


@pytest.mark.parametrize(('w', 'T'), [(0.0, 3.0), (0.3, 2.0), (1.0, 1.0)])
def test_the_loss_is_that_of_the_paper(w, T):
    student, teacher, weights = (
        numbers(2, 5, 7),
        numbers(2, 5, 7, seed=1),
        np.array([[1, 1, 0, 2, 1], [0, 1, 1, 1, 0.5]]),
    )
    targets = np.random.default_rng(2).integers(0, 7, (2, 5))
    found = jax.jit(class_scores)(
        jnp.asarray(student), targets, weights, None, None, Teaching(jnp.asarray(teacher), w, T)
    )
    total, weight = found['loss']
    assert float(total) == pytest.approx(distilled(student, teacher, targets, weights, w, T), rel=1e-5)
    assert weight == weights.sum()
    apart = distilled(student, teacher, targets, weights, 1.0, T) / T**2
    assert float(found['divergence'][0]) == pytest.approx(apart, rel=1e-5)


def test_smoothing_is_of_the_targets_and_the_z_loss_of_the_whole():
    student, teacher, one = numbers(3, 7), numbers(3, 7, seed=1), np.ones(3)
    targets, w, T, epsilon = np.array([1, 4, 0]), 0.3, 2.0, 0.1
    found = jax.jit(class_scores)(
        jnp.asarray(student), targets, one, epsilon, 0.01, Teaching(jnp.asarray(teacher), w, T)
    )
    smooth = -np.log(softmax(student)).mean(-1).sum()
    hard, soft = (distilled(student, teacher, targets, one, share, T) for share in (0.0, 1.0))
    squares = np.square(np.log(np.exp(student).sum(-1))).sum()
    wanted = (1 - w) * ((1 - epsilon) * hard + epsilon * smooth) + w * soft + 0.01 * squares
    assert float(found['loss'][0]) == pytest.approx(wanted, rel=1e-5)


def test_hot_gradients_match_logits():
    """At a high temperature that of a logit is its distance from the teacher's over V (Hinton et al. 2015, 2.1)."""
    student, teacher = numbers(1, 7), numbers(1, 7, seed=1)
    student, teacher = (x - x.mean(-1, keepdims=True) for x in (student, teacher))

    def loss(logits):
        taught = Teaching(jnp.asarray(teacher), 1.0, 1e3)
        return class_scores(logits, np.array([2]), np.ones(1), None, None, taught)['loss'][0]

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.asarray(student)), (student - teacher) / 7, atol=3e-3)


def test_answers_are_distilled_at_both_ends_and_numbers_by_their_square():
    student, teacher = numbers(1, 4, 2), numbers(1, 4, 2, seed=1)
    batch = {'weights': np.array([[1.0, 0, 1, 1]]), 'labels': np.array([[2, 3]]), 'label_weights': np.ones(1)}
    found = jax.jit(span_scores)(jnp.asarray(student), batch, None, None, Teaching(jnp.asarray(teacher), 0.3, 2.0))
    ends = (np.moveaxis(x, 2, 1)[:, :, [0, 2, 3]] for x in (student, teacher))  # without the one that is not to choose
    wanted = distilled(*ends, np.array([[1, 2]]), np.full((1, 2), 0.5), 0.3, 2.0)
    assert float(found['loss'][0]) == pytest.approx(wanted, rel=1e-5)
    batch = {'labels': np.array([1.0, 5.0]), 'label_weights': np.array([1.0, 0.0])}
    found = jax.jit(number_scores)(
        jnp.asarray([3.0, 3.0]), batch, None, None, Teaching(jnp.asarray([4.0, 4.0]), 0.25, 1.0)
    )
    assert float(found['loss'][0]) == 0.75 * 4 + 0.25 * 1


# ------------------------------------------------------------------------------------------- batches in parts
def taught(name, teacher_width=24, **train):
    """(config, model, objective, teacher, its variables, own variables) of a distilled objective without dropout."""
    cfg = make_config(name, model={'dropout_rate': 0.0}, train=train)
    cfg = override(cfg, {'train.objective': f'{name}_distilled', 'train.teacher': 'unread'})
    other = dataclasses.replace(cfg.model, emb_dim=teacher_width)
    objective, batch = OBJECTIVES[cfg.train.objective], make_batch(name)
    model, frozen = build(cfg.model), build(other)
    hyper = Hyperparameters.of(cfg)
    theirs = initial_variables(frozen, objective, hyper.replace(seed=5, init_scale=3.0), batch)
    return cfg, model, objective, Teacher('unread', dataclasses.replace(cfg, model=other), frozen, theirs), theirs


@functools.cache
def stepped(name, mesh=None, teacher_width=24, **train):
    """(gradients, scores, flops) of a step."""
    cfg, model, objective, teacher, theirs = taught(name, teacher_width, **train)
    hyper, batch = Hyperparameters.of(cfg), make_batch(name)
    own = sharding.unboxed(initial_variables(model, objective, hyper, batch))
    step = make_train_step(model, objective, descent(0.1), cfg, teacher)
    state = TrainState(jnp.zeros((), jnp.int32), own['params'], descent(0.1).init(own['params']))
    if mesh is None:
        after, found = jax.jit(step)(state, batch, hyper, sharding.unboxed(theirs))
    else:
        devices = meshes.make_mesh(mesh, jax.devices())
        with sharding.placed(devices, mesh):
            held = jax.device_put(sharding.unboxed(theirs), teacher.shardings(devices))
            assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(held))
            batch = jax.device_put(batch, meshes.batch_sharding(devices))
            after, found = jax.jit(step)(state, batch, hyper, held)
    return jax.device_get((after.opt_state, found['scores'], found['flops']))


def assert_same_step(one, other):
    assert relative(one[0], other[0]) < 3e-6
    for name, (total, weight) in one[1].items():
        assert weight == other[1][name][1]
        assert float(other[1][name][0]) == pytest.approx(float(total), rel=1e-5)


@pytest.mark.slow
def test_a_batch_in_parts_and_in_chunks_of_logits_is_the_whole_one():
    """Chunks of 3 of 8 positions; the teacher is wider than the model that learns."""
    whole = stepped('causal_lm')
    assert set(whole[1]) == {'loss', 'nll', 'accuracy', 'divergence'} and whole[1]['divergence'][0] > 1
    assert_same_step(whole, stepped('causal_lm', microbatches=4, loss_chunk=3))


@pytest.mark.slow
def test_a_mesh_gives_what_one_device_gives():
    mesh = Mesh(data=2, fsdp=2, tensor=2)
    assert_same_step(stepped('causal_lm'), stepped('causal_lm', mesh, loss_chunk=3))


@pytest.mark.proof
@pytest.mark.parametrize('name', DISTILLED)
def test_every_distilled_objective_takes_a_step(name):
    whole = stepped(name, loss_chunk=None)
    assert_same_step(whole, stepped(name, microbatches=4))
    assert relative(whole[0], stepped(name, distillation_weight=0.0)[0]) > 0.01


def test_a_teacher_goes_forward_once():
    """A model of the same size adds a third of what training it takes."""
    cfg, _, _, teacher, theirs = taught('causal_lm', 16)
    batch = make_batch('causal_lm')
    own = flops.model_flops(cfg, theirs['params'], batch)
    assert flops.step_flops(cfg, theirs['params'], batch, teacher) == pytest.approx(own * 4 / 3)


def test_distilled_objectives_are_their_base_with_a_teacher():
    for name in DISTILLED:
        assert TASKS[f'{name}_distilled'] == TASKS[name]._replace(teacher=True)
        assert OBJECTIVES[f'{name}_distilled'].teacher and not OBJECTIVES[name].teacher


# ------------------------------------------------------------------------------------------------------- runs
def student(place, **fields):
    base = Config(
        model=Model(emb_dim=8, mlp_dim=16, num_heads=2, num_decoder_layers=1, max_len=64, dropout_rate=0.1),
        data=Data(path=(str(place / 'data'),), length=32, batching='pad'),
        optimizer=Optimizer(warmup_steps=0),
        train=Train(
            objective='causal_lm_distilled', teacher=str(place / 'teacher'), num_steps=4, batch_size=8,
            checkpoint_every=2, log_every=1,
        ),
        mesh=Mesh(data=1),
        evaluate=Evaluate(samples=0),
    )  # fmt: skip
    return override(base, {name.replace('__', '.'): value for name, value in fields.items()})


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp('taught')
    toy_data.running(place / 'data')
    save_teacher(place / 'teacher')
    return place


@pytest.fixture(scope='module')
def run(place):
    loop.train(student(place), place / 'run')
    return place / 'run'


@pytest.mark.proof
def test_a_run_resumes_bit_for_bit_and_notices_another_teacher(place, run, tmp_path, capsys):
    rows = [each for each in (run / 'metrics.jsonl').read_text().splitlines() if 'train/divergence' in each]
    assert len(rows) == 4
    state = checkpoint.load_variables(run, 'latest')[0]
    resumed = tmp_path / 'run'
    shutil.copytree(run, resumed)
    checkpoint.delete(resumed, 4)
    shutil.copytree(place / 'teacher', tmp_path / 'moved')
    loop.train(student(place, train__teacher=str(tmp_path / 'moved')), resumed)
    again = checkpoint.load_variables(resumed, 'latest')[0]
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), *map(jax.device_get, (state, again))))
    assert checkpoint.read_metadata(run, 4)['data'] == checkpoint.read_metadata(resumed, 4)['data']
    save_teacher(tmp_path / 'moved', step=8, seed=1)
    checkpoint.delete(resumed, 4)
    with pytest.raises(UserError, match=r'the teacher has changed since the checkpoint.*step 7 .* there, .*step 8 .*'):
        loop.train(student(place, train__teacher=str(tmp_path / 'moved')), resumed)


@pytest.mark.slow
def test_a_run_is_evaluated_without_its_teacher(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / 'alone')
    override_teacher = workdir.changed_config(tmp_path / 'alone', {'train.teacher': str(tmp_path / 'gone')})
    assert override_teacher.train.teacher == str(tmp_path / 'gone')
    found = evaluate.evaluate(tmp_path / 'alone', 'valid')
    assert found['loss'] == found['nll'] and 'divergence' not in found


@pytest.mark.slow
@pytest.mark.parametrize(('fields', 'line'), [
    ({'train__teacher': None}, 'train.objective=causal_lm_distilled needs train.teacher, a workdir or a hub'),
    ({'train__teacher': '{place}/none'}, 'is {place}/none the workdir of a run'),
    ({'train__objective': 'causal_lm'}, 'train.teacher={place}/teacher has no effect here: .* causal_lm_distilled'),
    ({'train__distillation_weight': 1.5}, 'train.distillation_weight=1.5 must be at most 1'),
    ({'train__distillation_temperature': 0.0}, 'train.distillation_temperature=0.0 must be positive'),
    ({'model__vocab_size': 300}, r'train.teacher={place}/teacher has model.vocab_size=\d+, and this model 300'),
    ({'data__start': ()}, r"train.teacher={place}/teacher has data.start=\('bos',\), and this model \(\)"),
    ({'data__length': 128, 'model__max_len': 128}, 'teacher: data.length=128 .* model.max_len=64'),
    (
        {'mesh__pipeline': 2, 'model__num_decoder_layers': 2, 'train__teacher': '{place}/odd'},
        'train.teacher={place}/odd: .*num_decoder_layers=3',
    ),
    ({'data__tokenizer_from': '{place}/chars'}, 'train.teacher={place}/teacher was trained with other tokenizers'),
])  # fmt: skip
def test_a_mistake_is_one_line(place, tmp_path, fields, line):
    if not (place / 'odd').exists():
        save_teacher(place / 'odd', model__num_decoder_layers=3)
        shutil.copytree(place / 'teacher', place / 'chars')
        Tokenizers(None, Byte().extended(3)).save(place / 'chars')
    fields = {name: value.format(place=place) if isinstance(value, str) else value for name, value in fields.items()}
    with pytest.raises(UserError, match=line.format(place=place)):
        wanted = student(place, **fields)
        checks.check_here(checks.settle(wanted, {name.replace('__', '.') for name in fields} | {'train.teacher'}))
        loop.train(wanted, tmp_path / 'run')


def test_a_hub_directory_teaches_with_its_own_weights(tmp_path):
    reference = hub_directories.write(tmp_path / 'hub', 'llama')
    tokens = workdir.lent_tokenizers(str(tmp_path / 'hub'))
    cfg = student(tmp_path, train__teacher=str(tmp_path / 'hub'), model__vocab_size=VOCAB, data__length=8)
    cfg = checks.resolve(cfg, vocab_size=tokens.target.vocab_size)
    program = make_program(cfg, one_row(cfg))
    own = flops.model_flops(cfg, program.abstract.params, one_row(cfg))
    assert flops.step_flops(cfg, program.abstract.params, one_row(cfg), program.teacher) > own
    wanted = hf.import_params('llama', reference.tensors, program.teacher.config.model)
    jax.tree.map(np.testing.assert_array_equal, program.taught[0]['params'], wanted)
    before = teacher_lib.fingerprint(cfg, tokens)
    tensors = {name: value + 1 for name, value in reference.tensors.items()}
    hub_directories.write(tmp_path / 'hub', 'llama', tensors=tensors)
    assert teacher_lib.fingerprint(cfg, tokens) != before


def test_the_adapters_of_a_teacher_are_part_of_what_teaches(tmp_path):
    hub_directories.write(tmp_path / 'hub', 'llama')
    (tmp_path / 'lora').mkdir()
    fields = {'peft_type': 'LORA', 'r': 2, 'base_model_name_or_path': str(tmp_path / 'hub')}
    (tmp_path / 'lora' / adapters.CONFIG).write_text(json.dumps(fields))
    tokens = workdir.lent_tokenizers(str(tmp_path / 'hub'))
    cfg, facts = student(tmp_path, train__teacher=str(tmp_path / 'lora')), []
    for content in (b'some', b'others', b'some'):
        (tmp_path / 'lora' / adapters.WEIGHTS).write_bytes(content)
        facts.append(teacher_lib.fingerprint(cfg, tokens))
    assert facts[0] == facts[2] != facts[1]


def test_the_best_checkpoint_of_a_run_teaches(tmp_path):
    for step in (7, 8):
        save_teacher(tmp_path / 'teacher', step=step, seed=step)
    checkpoint_writer.CheckpointWriter(tmp_path / 'teacher').note_score(8, 0.0)
    cfg = checks.resolve(student(tmp_path), vocab_size=Byte().vocab_size)
    best, step = checkpoint.load_variables(tmp_path / 'teacher')
    assert step == 7
    jax.tree.map(np.testing.assert_array_equal, make_program(cfg, one_row(cfg)).taught[0]['params'], best['params'])
    (fact,) = teacher_lib.fingerprint(cfg, Tokenizers(None, Byte())).values()
    assert fact.startswith('step 7 (')


def test_a_teacher_that_is_named_comes_before_where_the_run_begins():
    for teacher, start, found in (('a', 'b', 'a'), ('a', None, 'a'), (None, 'b', 'b')):
        train = Train(objective='dpo', teacher=teacher, init_from=start)
        assert teacher_lib.directory_of(Config(train=train)) == found
    assert teacher_lib.directory_of(Config(train=Train(init_from='b'))) is None


def test_a_teacher_of_other_classes_is_refused(tmp_path):
    save_teacher(tmp_path / 'teacher', train__objective='classification', model__num_classes=2)
    cfg = student(tmp_path, train__objective='classification_distilled', model__num_classes=3)
    cfg = checks.resolve(cfg, vocab_size=Byte().vocab_size)
    with pytest.raises(UserError, match=r'teacher has model\.num_classes=2, and this model 3: both must have the same'):
        teacher_lib.make_teacher(cfg, one_row(cfg))


def test_a_mixture_teaches_a_batch_in_parts(tmp_path):
    """The losses of its routers would need all rows at once, and a teacher's are not trained."""
    save_teacher(tmp_path / 'teacher', model__num_experts=4)
    cfg = checks.resolve(student(tmp_path, train__microbatches=2), vocab_size=Byte().vocab_size)
    assert teacher_lib.make_teacher(cfg, one_row(cfg)).model.cfg.num_experts == 4


def test_a_teacher_that_reads_other_frames_is_refused(tmp_path):
    save_teacher(tmp_path / 'teacher', train__objective='classification', model__num_classes=2)
    fields = {'train__objective': 'classification_distilled', 'model__num_classes': 2}
    cfg = checks.resolve(student(tmp_path, **fields, data__end=()), vocab_size=Byte().vocab_size)
    with pytest.raises(UserError, match=r"teacher has data\.end=\('eos',\), and this model \(\): both must have"):
        teacher_lib.make_teacher(cfg, one_row(cfg))


def test_a_teacher_without_the_head_of_the_objective_is_refused(place):
    cfg = checks.resolve(student(place, train__objective='regression_distilled'), vocab_size=Byte().vocab_size)
    program = make_program(cfg, one_row(cfg))
    with pytest.raises(UserError, match=r'teacher has no number_head, which train\.objective=regression_distilled'):
        _ = program.taught


@pytest.mark.slow
def test_who_looks_at_a_run_counts_its_teacher(place):
    cfg = student(place, model__vocab_size=Byte().vocab_size)
    plain = override(cfg, {'train.objective': 'causal_lm', 'train.teacher': None})
    assert batched_trials.common(cfg) is None and batched_trials.common(plain) is not None
    made = dry_run.compile_program('train step', cfg, Target('cpu', (1,)))
    teacher = make_program(made.config, one_row(made.config)).teacher
    size = sum(x.size for x in jax.tree.leaves(sharding.unboxed(teacher.abstract)))
    assert made.held['teacher'] == 4 * size
    assert matching.num_flops(cfg) > matching.num_flops(plain)
