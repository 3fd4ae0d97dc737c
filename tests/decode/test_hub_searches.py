"""Prompts of several lengths in one batch, padded in front: tokens equal those of the hub's library, one by one."""

import dataclasses
import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest

import make_hf_reference as references
from tformer import hf
from tformer.config import Decode
from tformer.decode.generate import make_generate
from tformer.decode.rules import Rules
from tformer.hf.generation import EARLY_STOPPING
from tformer.model import build

TORCH = all(importlib.util.find_spec(name) for name in ('torch', 'transformers'))
WRITTEN = json.loads(references.WRITTEN.read_text())
QUICK = ('gpt2', 'bart')
NAMES = {value: name for name, value in EARLY_STOPPING.items()}
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in references.WRITERS]


def ours(name: str, reference: references.Reference, seed: int) -> dict[str, list[list[int]]]:
    """Returns the new tokens of each prompt up to the end, by the searches of the reference."""
    cfg = hf.model_of(reference.config, lambda line: None)
    params = hf.import_params(reference.config['model_type'], reference.tensors, cfg)
    paired, rows = cfg.family == 'encoder_decoder', references.prompts(seed)
    longest, front = max(map(len, rows)), references.front_of(name)
    place = np.arange(longest)[None]
    sizes = np.array(list(map(len, rows)))[:, None]
    positions = np.where(place < sizes, place, -1) if paired else np.maximum(place - longest + sizes, -1)
    tokens = np.full(positions.shape, references.PAD)
    tokens[positions >= 0] = [token for row in rows for token in row]
    stack = 'encoder_' if paired else ''
    batch = {f'{stack}inputs': jnp.asarray(tokens), f'{stack}positions': jnp.asarray(positions)}
    if paired:
        batch['inputs'] = jnp.tile(jnp.array(front), (len(rows), 1))
        batch['positions'] = jnp.tile(jnp.arange(len(front)), (len(rows), 1))
    found = {}
    for search, fields in references.SEARCHES.items():
        beams, alpha = fields['num_beams'], fields.get('length_penalty', 0.0)
        decode = Decode('beam' if beams > 1 else 'greedy', references.NEW, beams)
        decode = dataclasses.replace(
            decode,
            forced_end='forced_eos_token_id' not in fields,
            count_cut=True,
            early_stopping=NAMES[fields.get('early_stopping', False)],
            num_outputs=fields.get('num_return_sequences', 1),
            guidance=fields.get('guidance_scale', 1.0),
            length_penalty=alpha,
            length_offset=float(len(front) - 1 if paired else 0),
            repetition_penalty=fields.get('repetition_penalty', 1.0),
            no_repeat_ngram=fields.get('no_repeat_ngram_size'),
            min_len=max(0, fields.get('min_new_tokens', 0) - (len(front) - 1 if paired else 0)),
        )
        banned = fields.get('suppress_tokens', ())
        rules = Rules(bias=tuple((tuple(tokens), value) for tokens, value in fields.get('sequence_bias', ())))
        program = make_generate(build(cfg), decode, eos=references.END, banned=banned, rules=rules)
        made = program({'params': params}, batch, None)
        found[search] = list(map(references.up_to_end, np.asarray(made[0]).tolist()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
@pytest.mark.proof_cases('bart')
def test_a_batch_of_unequal_prompts_gives_the_committed_tokens(name: str) -> None:
    found = ours(name, references.load(name), seed=0)
    assert found == WRITTEN[name]
    assert len({len(row) for rows in found.values() for row in rows}) > 1 or found['greedy'] != found['beam']


@pytest.mark.proof
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
@pytest.mark.parametrize('seed', [1, 2])
@pytest.mark.parametrize('name', references.WRITERS)
def test_a_batch_of_unequal_prompts_gives_the_tokens_of_torch(name: str, seed: int) -> None:
    reference = references.make(name, width=32, seed=seed)
    assert ours(name, reference, seed) == references.write(name, reference, seed)


@pytest.mark.proof
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
@pytest.mark.parametrize('name', ['gpt2', 'llama', 'gemma3'])
def test_guided_texts_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decoders alone: beside an encoder the library reads the wrong text."""
    plain = {'num_beams': 1, 'forced_eos_token_id': None}
    monkeypatch.setattr(references, 'SEARCHES', {'plain': plain, 'guided': {**plain, 'guidance_scale': 3.0}})
    reference = references.make(name, width=32, seed=1)
    found = ours(name, reference, 1)
    assert found == references.write(name, reference, 1) and found['plain'] != found['guided']


@pytest.mark.proof
@pytest.mark.skipif(not TORCH, reason='needs torch and transformers')
@pytest.mark.parametrize('name', ['gpt2', 'gemma3', 'bart'])
def test_biased_texts_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    keys = {tuple(rng.integers(5, references.VOCAB, int(size)).tolist()) for size in rng.integers(1, 3, 900)}
    rising = [[list(tokens), float(rng.normal())] for tokens in sorted(keys)]
    falling = [[tokens, -abs(value)] for tokens, value in rising]
    greedy, beam = ({**references.SEARCHES[search], 'forced_eos_token_id': None} for search in ('greedy', 'beam'))
    biases = {'greedy': {**greedy, 'sequence_bias': rising}, 'beam': {**beam, 'sequence_bias': falling}}
    monkeypatch.setattr(references, 'SEARCHES', {'plain': greedy, **biases})
    reference = references.make(name, width=32, seed=1)
    found = ours(name, reference, 1)
    assert found == references.write(name, reference, 1) and found['plain'] != found['greedy']
