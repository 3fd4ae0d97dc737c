"""Preferences: rows of a prompt with two answers, the losses of them, and runs whose teacher is where they start."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_data
from comparing import descent, relative
from stored_teachers import save_teacher
from tformer import checks
from tformer.commands import evaluate, replay
from tformer.config import Config, Data, Evaluate, Mesh, Model, Optimizer, Train, override
from tformer.data.batches import pipeline
from tformer.data.tokenizers.bytes_and_characters import Byte
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import meshes, sharding
from tformer.errors import UserError
from tformer.layers.class_scores import Teaching
from tformer.layers.heads import token_statistics
from tformer.layers.preferences import answer_log_likelihoods, dpo_scores, ipo_scores
from tformer.model import build
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training import loop
from tformer.training.state import TrainState, initial_variables
from tformer.training.step import make_train_step
from tformer.training.teacher import Teacher

TOKENS = Tokenizers(None, Byte())
RECORDS = [
    {'prompt': 'ab', 'chosen': 'cd', 'rejected': 'e'},
    {'prompt': '', 'chosen': 'x', 'rejected': 'yz'},
    {'prompt': 'a longer prompt', 'chosen': ' is cut', 'rejected': ' as its answers are'},
]


def run_config(**fields):
    base = Config(
        model=Model(emb_dim=16, mlp_dim=16, num_heads=2, num_decoder_layers=2, max_len=64, dropout_rate=0.0),
        data=Data(length=32, batching='pad', overlong='truncate'),
        optimizer=Optimizer(warmup_steps=0, schedule='constant'),
        train=Train(objective='dpo', init_from='unread', num_steps=2, batch_size=8, log_every=1),
        mesh=Mesh(data=1),
        evaluate=Evaluate(samples=0),
    )
    return override(base, {name.replace('__', '.'): value for name, value in fields.items()})


def resolved(**fields):
    return checks.resolve(run_config(**fields), vocab_size=TOKENS.target.vocab_size)


@functools.cache
def batch_of(rows=8):
    records = [{**each, 'texts': [each[n] for n in ('prompt', 'chosen', 'prompt', 'rejected')]} for each in RECORDS]
    made = pipeline.Batches(resolved(train__batch_size=rows), TOKENS, 'valid', training=False, records=records)
    return made.batch(0)


# ------------------------------------------------------------------------------------------------------- rows
def test_a_row_is_the_prompt_with_each_answer():
    batch, bos, eos = batch_of(), TOKENS.target.specials.bos, TOKENS.target.specials.eos
    ids = TOKENS.target.encode_batch(['ab', 'cd', 'e'])
    first, second = [bos, *ids[0], *ids[1], eos], [bos, *ids[0], *ids[2], eos]
    assert batch['inputs'][0, :9].tolist() == first[:-1] + second[:-1]
    assert batch['targets'][0, :9].tolist() == first[1:] + second[1:]
    assert batch['weights'][0].tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1] + [0] * (batch['weights'].shape[1] - 9)
    assert batch['segment_ids'][0, :10].tolist() == [1] * 5 + [2] * 4 + [0]
    assert batch['positions'][0, :10].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, -1]
    assert batch['label_weights'].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert batch['weights'][1, :5].tolist() == [1] * 5  # of no prompt BOS is before the answers


def test_of_a_long_prompt_the_end_is_kept_and_a_cut_answer_does_not_end():
    """Each of the texts, the prompt twice, is cut to 7 tokens, which fill 30 of 32 with two of BOS."""
    batch, row = batch_of(), 2
    said = [TOKENS.target.decode(batch['inputs'][row][batch['segment_ids'][row] == k][1:].tolist()) for k in (1, 2)]
    assert said == [' prompt is cut', ' prompt as it']  # the last token is a target: EOS, and s
    last = [np.flatnonzero(batch['segment_ids'][row] == k)[-1] for k in (1, 2)]
    ends = batch['targets'][row][last] == TOKENS.target.specials.eos
    assert ends.tolist() == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(('line', 'why'), [
    ({'chosen': 'a', 'rejected': 'b'}, "no key 'prompt'"),
    ({'prompt': 'p', 'chosen': ' ', 'rejected': 'b'}, 'chosen is empty'),
    ({'prompt': 'p', 'chosen': 'a', 'rejected': 'a'}, 'chosen and rejected are the same'),
])  # fmt: skip
def test_a_record_without_a_preference_is_refused(tmp_path, line, why):
    toy_data.write(tmp_path / 'train.jsonl', [json.dumps(line)])
    save_teacher(tmp_path / 'teacher')
    with pytest.raises(UserError, match=rf'train\.jsonl:1: {why}'):
        loop.train(
            run_config(data__path=(str(tmp_path),), train__init_from=str(tmp_path / 'teacher')), tmp_path / 'run'
        )


# ------------------------------------------------------------------------------------------------------- losses
def log_likelihoods(logits, batch):
    """log p of each answer [B, 2], token by token."""
    found = np.zeros((len(logits), 2))
    for row, place in zip(*np.nonzero(batch['weights']), strict=True):
        scores = logits[row, place]
        chance = scores[batch['targets'][row, place]] - np.log(np.exp(scores).sum())
        found[row, batch['segment_ids'][row, place] - 1] += chance
    return found


@pytest.mark.parametrize('whole', [True, False])
def test_the_losses_are_those_of_the_papers(whole):
    """-log sigmoid(beta (log p(w)/q(w) - log p(l)/q(l))) (Rafailov et al. 2023, eq. 7); Azar et al. 2024, eq. 17."""
    batch, rng, beta, epsilon = batch_of(), np.random.default_rng(0), 0.3, 0.1
    own, theirs = rng.normal(size=(2, *batch['inputs'].shape, TOKENS.target.vocab_size))
    taught = Teaching(jnp.asarray(theirs), 0.5, 2.0, beta)
    logits = jnp.asarray(own)
    if not whole:
        targets = jnp.asarray(batch['targets'])
        logits, taught = (
            token_statistics(logits, targets),
            taught._replace(outputs=token_statistics(taught.outputs, targets)),
        )
    mine, reference = (log_likelihoods(x, batch) for x in (own, theirs))
    gap = ((mine - reference)[:, 0] - (mine - reference)[:, 1])[:3]
    sigmoid = 1 / (1 + np.exp(-beta * gap))
    found = dpo_scores(logits, batch, None, None, taught)
    wanted = {
        'loss': -np.log(sigmoid).sum(), 'reward_accuracy': (gap > 0).sum(), 'reward_margin': beta * gap.sum(),
        'chosen_log_likelihood': mine[:3, 0].sum(), 'rejected_log_likelihood': mine[:3, 1].sum(),
    }  # fmt: skip
    assert {name: float(total) for name, (total, _) in found.items()} == pytest.approx(wanted, rel=1e-4)
    assert {float(weight) for _, weight in found.values()} == {3}
    smooth = dpo_scores(logits, batch, epsilon, None, taught)['loss'][0]
    assert float(smooth) == pytest.approx(
        -((1 - epsilon) * np.log(sigmoid) + epsilon * np.log(1 - sigmoid)).sum(), rel=1e-4
    )
    squares = ipo_scores(logits, batch, None, None, taught)['loss'][0]
    assert float(squares) == pytest.approx(np.square(gap - 1 / (2 * beta)).sum(), rel=1e-4)


# -------------------------------------------------------------------------------------------------------- steps
@functools.cache
def stepped(mesh=None, own_seed=0, **train):
    """(gradients, scores) of a step; the teacher has the parameters of seed 0."""
    cfg, batch = resolved(**{f'train__{name}': value for name, value in train.items()}), batch_of()
    model, objective, hyper = build(cfg.model), OBJECTIVES['dpo'], Hyperparameters.of(cfg)
    boxed = initial_variables(model, objective, hyper.replace(init_scale=3.0), batch)
    theirs = sharding.unboxed(boxed)
    own = sharding.unboxed(initial_variables(model, objective, hyper.replace(init_scale=3.0, seed=own_seed), batch))
    step = jax.jit(make_train_step(model, objective, descent(0.1), cfg, Teacher('unread', cfg, model, boxed)))
    state = TrainState(jnp.zeros((), jnp.int32), own['params'], descent(0.1).init(own['params']))
    if mesh is None:
        after, found = step(state, batch, hyper, theirs)
    else:
        devices = meshes.make_mesh(mesh, jax.devices())
        with sharding.placed(devices, mesh):
            after, found = step(state, jax.device_put(batch, meshes.batch_sharding(devices)), hyper, theirs)
    return jax.device_get((after.opt_state, found['scores']))


def test_at_the_start_no_answer_is_preferred():
    _, scores = stepped()
    means = {name: float(total) / float(weight) for name, (total, weight) in scores.items()}
    assert means['loss'] == np.float32(np.log(2)) and means['reward_margin'] == 0 and means['reward_accuracy'] == 0.5


@pytest.mark.slow
def test_parts_of_a_batch_chunks_of_logits_and_a_mesh_give_the_whole():
    whole = stepped(own_seed=1)
    assert float(whole[1]['reward_margin'][0]) != 0
    for other in (
        stepped(own_seed=1, microbatches=4, loss_chunk=5),
        stepped(Mesh(data=2, fsdp=2, tensor=2), own_seed=1),
    ):
        assert relative(whole[0], other[0]) < 1e-5
        for name, (total, weight) in whole[1].items():
            assert weight == other[1][name][1] and float(other[1][name][0]) == pytest.approx(float(total), rel=1e-4)


def test_an_answer_does_not_see_the_other():
    """Its log-likelihood is that of a row of its own."""
    cfg, batch = resolved(), batch_of()
    model = build(cfg.model)
    params = sharding.unboxed(initial_variables(model, OBJECTIVES['dpo'], Hyperparameters.of(cfg), batch))
    apply = jax.jit(model.apply)
    together = answer_log_likelihoods(apply(params, batch), batch)
    for number in (1, 2):
        mine = batch['segment_ids'] == number
        alone = {'inputs': np.where(mine, batch['inputs'], 0), 'positions': np.where(mine, batch['positions'], -1)}
        found = log_likelihoods(np.asarray(apply(params, alone)), {**batch, 'weights': batch['weights'] * mine})
        np.testing.assert_allclose(together[:, number - 1], found[:, number - 1], rtol=1e-4)


# --------------------------------------------------------------------------------------------------------- runs
@pytest.mark.proof
def test_a_run_learns_the_preference_and_is_scored_against_where_it_began(tmp_path, capsys):
    """It began in float32: the reference rounds as the run does, so no answer is preferred at first."""
    rows = [{'prompt': text, 'chosen': ' yes', 'rejected': ' no'} for text in toy_data.sentences(24, 0, (1, 1))]
    for split in ('train', 'valid', 'test'):
        toy_data.write(tmp_path / 'data' / f'{split}.jsonl', [json.dumps(row) for row in rows])
    start = save_teacher(tmp_path / 'start', model__num_decoder_layers=1)
    fields = {'data__path': (str(tmp_path / 'data'),), 'train__init_from': str(start), 'model__num_decoder_layers': 1}
    fields['model__dtype'] = 'bfloat16'
    loop.train(run_config(**fields, optimizer__learning_rate=0.01, train__num_steps=4), tmp_path / 'run')
    rows = list(map(json.loads, (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()))
    assert rows[0]['train/loss'] == pytest.approx(np.log(2), rel=1e-6) and rows[0]['train/reward_accuracy'] == 0.5
    assert rows[-1]['valid/loss'] < 0.69 and rows[-1]['valid/reward_accuracy'] == 1
    found = evaluate.evaluate(tmp_path / 'run', 'valid')
    assert found['reward_margin'] == pytest.approx(rows[-1]['valid/reward_margin'], rel=1e-5)
    assert 'step 1, from the beginning' in next(replay.replay(tmp_path / 'run', 1))
    shutil.rmtree(start)
    save_teacher(start, seed=3, model__num_decoder_layers=1)
    with pytest.raises(UserError, match='the teacher has changed since the checkpoint was written'):
        evaluate.evaluate(tmp_path / 'run', 'valid')


@pytest.mark.parametrize(('fields', 'line'), [
    ({'train__init_from': None}, 'train.objective=dpo needs train.teacher, a workdir or a hub directory'),
    ({'train__distillation_weight': 0.3}, 'distillation_weight=0.3 has no effect here: .* causal_lm_distilled or'),
    ({'train__objective': 'causal_lm', 'train__preference_beta': 0.3}, 'applies where train.objective is dpo or ipo'),
    ({'train__preference_beta': 0.0}, 'train.preference_beta=0.0 must be positive'),
    ({'train__objective': 'ipo', 'train__label_smoothing': 0.1}, 'train.label_smoothing=0.1 has no effect here'),
    ({'model__family': 'encoder'}, 'train.objective=dpo needs model.family=decoder, not encoder'),
])  # fmt: skip
def test_a_mistake_is_one_line(fields, line):
    with pytest.raises(UserError, match=line):
        checks.check_here(checks.settle(run_config(**fields), {name.replace('__', '.') for name in fields}))
