"""Programs in files: what they compute has the bits of the engine that wrote them."""

import json

import jax
import numpy as np
import pytest

from small_decoding import BANNED, LATENT_CASES, B, T, batch_of, make
from tformer.decode import programs
from tformer.decode.drawing import Drawing
from tformer.decode.engine import make_engine
from tformer.errors import UserError

pytest.importorskip('flatbuffers')


def rows_of(family):
    whole = batch_of(family)
    return [{name: value[i : i + 1] for name, value in whole.items() if name != 'rows'} for i in range(B)]


def written(engine, variables, batches):
    """Tokens and log-probabilities of two rows, the second of which is taken again."""
    slots, found = engine.empty(variables), []
    slots = engine.insert(variables, slots, batches[0], np.int32(0), Drawing())
    slots = engine.insert(variables, slots, batches[1], np.int32(1), Drawing(1.5, seed=3))
    for step in range(2 * T):
        if step == T:
            slots = engine.free(slots, np.int32(1))
            slots = engine.insert(variables, slots, batches[2], np.int32(1), Drawing(0.7, top_k=4, top_p=0.9, number=2))
        slots, tokens, logprobs = engine.step(variables, slots)
        found.append((np.asarray(tokens).tolist(), np.asarray(logprobs).tolist()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    'family',
    ['decoder', 'encoder_decoder', *(pytest.param(case, marks=pytest.mark.proof) for case in LATENT_CASES[:2])],
)
def test_loaded_programs_have_the_bits_of_those_that_were_saved(family, tmp_path) -> None:
    model, variables = make(family, scale=2.0, position='rope', num_kv_heads=2, max_len=32)
    batches = rows_of(family)
    engine = make_engine(model, batches[0], rows=2, slots=2 * T + 6, banned=BANNED)
    expected = written(engine, variables, batches)
    programs.save(tmp_path, engine, variables, batches[:1], 2)
    loaded, rows = programs.load(tmp_path)
    assert rows == 2 and written(loaded, variables, batches) == expected
    assert len({tokens[1] for tokens, _ in expected}) > 1


def test_what_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r'holds no programs: .*programs\.json'):
        programs.load(tmp_path)
    model, variables = make('decoder', max_len=32)
    batches = rows_of('decoder')
    engine = make_engine(model, batches[0], rows=1, slots=16)
    programs.save(tmp_path, engine, variables, batches[:1], 1, platforms=('cpu', 'cuda'))
    assert json.loads((tmp_path / programs.FILE).read_text())['platforms'] == ['cpu', 'cuda']
    loaded, _ = programs.load(tmp_path)
    longer = {'inputs': np.zeros((1, 7), np.int32), 'positions': np.arange(7, dtype=np.int32)[None]}
    with pytest.raises(UserError, match=r'has no program for prompts of 7; there are: \[5\]$'):
        loaded.insert(variables, loaded.empty(variables), longer, 0, Drawing())
    programs.save(tmp_path, engine, variables, batches[:1], 1, platforms=('cuda', 'tpu'))
    with pytest.raises(UserError, match=r'has programs for cuda, tpu, not for cpu \(tformer freeze --platforms\)$'):
        programs.load(tmp_path)
    (tmp_path / 'step.bin').unlink()
    with pytest.raises(UserError, match=r'holds no programs: .*step\.bin'):
        programs.load(tmp_path)
    assert jax.default_backend() == 'cpu'
