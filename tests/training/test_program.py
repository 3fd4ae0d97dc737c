"""The program of a run: made from a config and a batch, it starts and takes steps without files."""

import dataclasses

import jax
import numpy as np
import pytest

from tformer import errors
from tformer.config import Config, Data, Model, Train, override
from tformer.training import dummy_batch
from tformer.training.program import Program, check_memory, make_program

CONFIG = dummy_batch.assumed(
    Config(
        model=Model(num_decoder_layers=1, emb_dim=16, num_heads=2, mlp_dim=32, vocab_size=64, max_len=8),
        data=Data(length=8),
        train=Train(batch_size=8, num_steps=3),
    )
)


@pytest.fixture(scope='module')
def program() -> Program:
    return make_program(CONFIG, dummy_batch.random_batch(CONFIG))


@pytest.mark.slow
def test_a_program_starts_and_takes_a_step_without_files(program: Program) -> None:
    batch = dummy_batch.random_batch(CONFIG)
    state = program.init()
    before = jax.device_get(state.params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
        lambda x: (x.value.shape, x.value.dtype), program.abstract.params, is_leaf=lambda x: hasattr(x, 'names')
    )
    state, metrics = program.train_step(state, batch)
    total, weight = metrics['scores']['loss']
    assert int(state.step) == 1 and np.isfinite(total / weight) and int(metrics['tokens']) == 64
    moved = jax.tree.map(lambda one, other: np.abs(one - other).max(), before, jax.device_get(state.params))
    assert max(jax.tree.leaves(moved)) > 0
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(program.init().params)))
    assert repr(program).startswith('Program(causal_lm of a decoder, ')


def test_only_the_shapes_of_a_batch_are_read(program: Program) -> None:
    batch = dummy_batch.random_batch(CONFIG)
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    other = make_program(CONFIG, abstract)
    assert jax.tree.all(jax.tree.map(np.array_equal, program.init().params, other.init().params))


def test_what_a_machine_cannot_hold_is_refused_before_a_step(monkeypatch, program: Program) -> None:
    """The state, a gradient of each parameter, and logits: 8 rows of 8 tokens with 64 numbers of 4 bytes, or a part."""
    batch, state = dummy_batch.random_batch(CONFIG), program.init()
    held, logits = sum(x.nbytes for x in jax.tree.leaves((state, state.params))), 8 * 8 * 64 * 4

    def check(size: int, **train: object) -> None:
        monkeypatch.setattr(errors.os, 'sysconf', {'SC_PAGE_SIZE': 2, 'SC_PHYS_PAGES': size // 2}.__getitem__)
        changed = override(CONFIG, {f'train.{name}': value for name, value in train.items()})
        check_memory(dataclasses.replace(program, config=changed), batch)

    for size, train in ((held + logits, {}), (held + logits // 4, {'microbatches': 4}), (held, {'loss_chunk': 4})):
        check(size, **train)
        what = 'the parameters, their gradients and the state' if 'loss_chunk' in train else r'logits of a step \(.*\)'
        with pytest.raises(errors.UserError, match=rf'{what}.* need 0.0 GiB of memory, and this machine has 0.0'):
            check(size - 2, **train)


def test_an_axis_that_splits_no_parameter_is_told_with_the_nearest_that_does() -> None:
    def told(**mesh: object) -> str:
        config = override(CONFIG, {f'mesh.{name}': value for name, value in {'data': 1, **mesh}.items()})
        config = override(config, {'model.emb_dim': 12})
        return ''.join(make_program(config, dummy_batch.random_batch(config)).remarks)

    assert told(fsdp=8) == (
        'mesh.fsdp=8 splits no parameter, as it does not divide model.emb_dim=12; nearest that does and divides the 8 '
        'devices: 4'
    )
    assert told(fsdp=4) == told(fsdp=8, rules='tp') == told() == ''
    assert told(fsdp=8, overrides=('mlp=fsdp',)) == '', 'they split another axis by it'


def test_that_all_devices_hold_the_slots_of_a_capacity_is_told() -> None:
    def told(dispatch: str, **mesh: object) -> list[str]:
        fields = {'model.num_experts': 4, 'model.expert_dispatch': dispatch, 'mesh.data': 1}
        config = override(CONFIG, {**fields, **{f'mesh.{name}': value for name, value in mesh.items()}})
        return make_program(config, dummy_batch.random_batch(config)).remarks

    for mesh in ({'data': 8}, {'fsdp': 8}, {'context': 4}):
        (line,) = told('capacity', **mesh)
        assert line.startswith('model.expert_dispatch=capacity without mesh.expert: every device holds the slots of ')
        assert told('dropless', **mesh) == []
    assert told('capacity', data=4, expert=2) == told('capacity', tensor=2, data=1) == []
