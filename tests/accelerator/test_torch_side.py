"""The models in plain torch that tformer is timed beside have its sizes, and decode as they read."""

import importlib.util

import jax
import pytest

from tformer.training import dummy_batch, program
from workloads import TINY

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(importlib.util.find_spec('torch') is None, reason='torch is not installed'),
]


@pytest.mark.parametrize('name', TINY)
def test_both_sides_have_the_same_number_of_parameters(name):
    import tformer_side
    import torch_side

    cfg = dummy_batch.assumed(tformer_side.make_config(name, TINY[name]))
    ours = jax.tree.leaves(program.make_program(cfg, dummy_batch.random_batch(cfg)).abstract.params)
    theirs = torch_side.Transformer(TINY[name]).parameters()
    assert sum(x.numel() for x in theirs) == sum(x.size for x in ours)


def test_decoding_with_kept_keys_writes_what_reading_it_all_again_finds_likeliest():
    import torch

    import torch_side

    torch.manual_seed(0)
    workload = TINY['gpt2_124m']
    call, model, prompt = torch_side.generator(workload, 'cpu', torch.float32)
    written = call(workload.new_tokens)[:, 0]
    read = torch.cat([prompt, written], 1)[:, :-1]
    with torch.no_grad():
        logits = model.logits(model.run('decoder', model.embed(read)))
    assert torch.equal(logits[:, prompt.shape[1] - 1 :].argmax(-1), written)
