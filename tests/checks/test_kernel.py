"""Which attention kernels serve a model on this machine."""

import dataclasses
import functools

import pytest

from tformer.config import Model
from tformer.errors import UserError
from tformer.layers.kernel_choice import described, pick
from tformer.layers.resolved import resolve_model


@pytest.mark.parametrize(
    ('fields', 'lacks'),
    [
        ({}, None),
        ({'head_dim': 24}, None),
        ({'head_dim': 24, 'value_dim': 24}, None),
        ({'value_dim': 64}, None),  # as wide as a head of 256 / 4
        ({'value_dim': 24}, 'a model.value_dim other than head_dim'),
        ({'head_dim': 24, 'value_dim': 64}, 'a model.value_dim other than head_dim'),
        ({'attention_dropout_rate': 0.1}, 'model.attention_dropout_rate'),
        ({'attention_sink': 'zero'}, 'model.attention_sink'),
        ({'attention_softcap': 5.0}, 'model.attention_softcap'),
    ],
)
@pytest.mark.parametrize('resolve', [lambda model: model, resolve_model], ids=['stated', 'resolved'])
def test_a_kernel_is_refused_for_what_it_lacks_alone_before_and_after_sizes_are_filled_in(fields, lacks, resolve):
    model = resolve(Model(attention_kernel='xla', **fields))
    if lacks is None:
        pick(model, 'cpu')
    else:
        with pytest.raises(
            UserError, match=f'model.attention_kernel=xla does not serve {lacks}; reference, chunked, blocked do'
        ):
            pick(model, 'cpu')


@pytest.mark.parametrize(('head_dim', 'taken'), [(8, True), (256, True), (264, False), (20, False)])
def test_cudnn_takes_heads_of_multiples_of_8_up_to_256(head_dim, taken):
    model = Model(attention_kernel='cudnn', dtype='bfloat16', head_dim=head_dim)
    if taken:
        assert pick(model, 'gpu') == 'cudnn'
    else:
        with pytest.raises(UserError, match=r'cudnn does not serve a model.head_dim that is not a multiple of 8'):
            pick(model, 'gpu')


@pytest.mark.parametrize(
    ('platform', 'fields', 'picked'),
    [
        ('cpu', {}, 'reference'),
        ('tpu', {}, 'flash'),
        ('tpu', {'attention_softcap': 5.0, 'attention_sink': 'zero', 'head_dim': 20, 'value_dim': 8}, 'flash'),
        ('tpu', {'position': 'alibi'}, 'mosaic'),
        ('tpu', {'attention_dropout_rate': 0.1}, 'mosaic'),
        ('tpu', {'attention_dropout_rate': 0.1, 'position': 'relative'}, 'mosaic'),
        ('gpu', {'dtype': 'bfloat16'}, 'cudnn'),
        ('gpu', {'dtype': 'bfloat16', 'position': 'relative'}, 'cudnn'),
        ('gpu', {}, 'triton'),
        ('gpu', {'dtype': 'bfloat16', 'attention_sink': 'learned'}, 'triton'),
        ('gpu', {'attention_dropout_rate': 0.1, 'dtype': 'bfloat16'}, 'triton'),
        ('gpu', {'attention_dropout_rate': 0.1, 'position': 'alibi'}, 'triton'),
    ],
)
def test_auto_is_the_first_that_serves_the_model_on_the_platform(platform, fields, picked):
    assert pick(Model(**fields), platform) == picked == pick(resolve_model(Model(**fields)), platform)


@pytest.mark.parametrize('flag', ['--xla_gpu_deterministic_ops', '--xla_gpu_exclude_nondeterministic_ops=true'])
def test_deterministic_operations_are_not_for_cudnn(monkeypatch, flag):
    """XLA has not one of its programs with two equal layers run under them."""
    monkeypatch.setenv('XLA_FLAGS', f'--xla_gpu_autotune_level=0 {flag}')
    model = Model(dtype='bfloat16')
    assert pick(model, 'gpu') == 'triton'
    assert pick(dataclasses.replace(model, position='relative'), 'gpu') == 'triton'
    assert pick(Model(), 'cpu') == 'reference'
    with pytest.raises(UserError, match=r'cudnn does not serve deterministic operations \(XLA_FLAGS\); reference, ch'):
        pick(dataclasses.replace(model, attention_kernel='cudnn'), 'gpu')
    monkeypatch.setenv('XLA_FLAGS', f'{flag.partition("=")[0]}=false')
    assert pick(model, 'gpu') == 'cudnn'


def test_a_slower_kernel_is_named_with_what_the_faster_ones_lack():
    alibi = Model(position='alibi', attention_softcap=5.0, dtype='bfloat16')
    named = functools.partial(described, packed=False)
    assert named(alibi, 'gpu') == 'attention by triton (cudnn does not serve model.attention_softcap)'
    assert named(Model(), 'tpu') == 'attention by flash'
    assert named(alibi, 'cpu') == 'attention by reference'
    assert named(Model(attention_kernel='chunked'), 'gpu') == 'attention by chunked', 'as the user asked'


@pytest.mark.parametrize('asked', ['auto', 'cudnn'])
def test_rows_of_several_examples_are_said_to_be_of_the_kernel_that_computes_them(asked):
    model = Model(dtype='bfloat16', attention_kernel=asked)
    assert described(model, 'gpu', packed=False) == 'attention by cudnn'
    assert described(model, 'gpu', packed=True) == 'attention by triton (cudnn does not serve packed rows)'
    prefixed = described(model, 'gpu', packed=False, prefix=True)
    assert prefixed == 'attention by triton (cudnn does not serve a prefix)'
    encoder = dataclasses.replace(model, family='encoder', attention_pattern=('local',), window=4)
    assert (
        described(encoder, 'gpu', packed=False) == 'attention by triton (cudnn does not serve a window of an encoder)'
    )


def test_a_prefix_beside_a_window_is_said_to_be_of_the_kernel_that_computes_it():
    model = Model(dtype='bfloat16', attention_pattern=('local',), window=4)
    assert described(model, 'tpu', packed=False) == 'attention by flash'
    assert described(dataclasses.replace(model, window=None), 'tpu', packed=True, prefix=True) == 'attention by flash'
    beside = described(model, 'tpu', packed=True, prefix=True)
    assert beside == 'attention by mosaic (flash does not serve a prefix beside a window)'
