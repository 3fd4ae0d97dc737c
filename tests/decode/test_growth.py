"""A cache that grows while texts are written."""

import jax
import numpy as np
import pytest

from small_decoding import BANNED, CASES, EOS, P, batch_of, make
from tformer import config
from tformer.decode import generate as generating
from tformer.decode.beam import Beams, beam_search
from tformer.decode.coverage import Covered
from tformer.decode.generate import begin, cache_slots, make_generate
from tformer.decode.guidance import Doubled
from tformer.decode.sample import Ending, Sampling, greedy, sample
from tformer.decode.speculative import by_look_up, greedy_warp, speculate
from tformer.errors import UserError
from tformer.layers.cache import Cache

T = 12
WAYS = {
    'greedy': config.Decode(strategy='greedy', max_len=T),
    'draws': config.Decode(strategy='sample', max_len=T, num_outputs=2),
    'beams': config.Decode(strategy='beam', max_len=T, beam_size=3, num_outputs=2),
    'groups': config.Decode(strategy='beam', max_len=T, beam_size=4, beam_groups=2),
    'guided': config.Decode(strategy='greedy', max_len=T, guidance=1.5),
    'drafted': config.Decode(strategy='greedy', max_len=T, draft='prompt'),
}
GROW = ('greedy', 'draws', 'beams', 'groups')
QUICK = {('decoder', 'greedy'), ('encoder_decoder', 'beams'), ('prefix_decoder', 'draws'), ('decoder', 'drafted')}
EVERY = [
    pytest.param(family, way, marks=() if (family, way) in QUICK else pytest.mark.proof)
    for family in CASES
    for way in WAYS
]


def small_stages(monkeypatch) -> list[int]:
    """Lets caches grow in stages of few slots, and returns the list of the sizes that they get."""
    monkeypatch.setattr(generating, '_SLOTS', 1)
    monkeypatch.setattr(generating, '_STAGE', 3)
    sizes, real = [], Cache.grown

    def grown(self, slots, encoder_slots=None):
        sizes.append(slots)
        return real(self, slots, encoder_slots)

    monkeypatch.setattr(Cache, 'grown', grown)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize(('family', 'way'), EVERY)
@pytest.mark.proof_cases('encoder_decoder-beams', 'prefix_decoder-draws')
def test_texts_are_those_of_a_cache_that_has_all_slots(monkeypatch, family, way) -> None:
    model, variables = make(family, scale=2.0)
    batch, key = batch_of(family), jax.random.key(2)
    expected, scores = make_generate(model, WAYS[way], eos=EOS, banned=BANNED)(variables, batch, key)
    sizes = small_stages(monkeypatch)
    found, others = make_generate(model, WAYS[way], eos=EOS, banned=BANNED)(variables, batch, key)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(others, scores, rtol=1e-5, atol=1e-5)
    assert len(sizes) == (4 if way in GROW else 0) and sizes == sorted(set(sizes))


@pytest.mark.parametrize('way', GROW)
def test_each_stage_has_the_slots_of_its_steps(way) -> None:
    decode = config.Decode(**{**vars(WAYS[way]), 'max_len': 250})
    stages = generating._growth(decode, P)
    beams = decode.beam_size if decode.strategy == 'beam' else 1
    assert len(stages) == 4 and stages[-1] == (250, cache_slots(decode, P))
    for steps, slots in stages:
        assert 0 <= slots - (P - 1 + beams * steps) < generating._SLOTS


def drafted(extend, cache, prompt, ending):
    draft, keys_B = by_look_up(prompt.tokens_BP, prompt.positions_BP >= 0, number=2), prompt.keys(jax.random.key(0))
    return speculate(extend, cache, prompt, ending, draft, number=2, longest=99, keys_B=keys_B, warp=greedy_warp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('search', 'needed'),
    [
        (greedy, P - 1 + T),
        pytest.param(lambda *given: sample(*given, jax.random.key(0), Sampling()), P - 1 + T, marks=pytest.mark.proof),
        (lambda *given: beam_search(*given, Beams(3, 0.6))[:2], P - 1 + 3 * T),
        (drafted, P - 1 + T + 2),
    ],
    ids=['greedy', 'sample', 'beams', 'drafts'],
)
def test_a_search_needs_the_slots_of_all_that_it_reads(search, needed) -> None:
    """With as many it writes what it writes with more; with one less, which it would write over, it is refused."""
    model, variables = make('decoder', scale=2.0, max_len=32)
    found = []
    for slots in (needed, needed + 8):
        extend, cache, prompt = begin(model, variables, batch_of('decoder'), slots)
        found.append(jax.jit(lambda search=search, given=(extend, cache, prompt): search(*given, Ending(T, EOS)))())
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4)
    extend, cache, prompt = begin(model, variables, batch_of('decoder'), needed - 1)
    for held in (cache, Covered(cache, None), Doubled(cache, None)):
        with pytest.raises(UserError, match=f'^a cache of {needed - 1} slots is too small: .* need {needed}$'):
            search(extend, held, prompt, Ending(T, EOS))


def test_few_new_tokens_or_a_state_of_one_size_need_no_growth(monkeypatch) -> None:
    assert generating._growth(config.Decode(strategy='greedy', max_len=95), P) == ()
    assert len(generating._growth(config.Decode(strategy='greedy', max_len=96), P)) == 2
    assert len(generating._growth(config.Decode(strategy='beam', beam_size=4, max_len=24), P)) == 2
    sizes = small_stages(monkeypatch)
    model, variables = make('decoder', recurrence='gru', scale=2.0)
    make_generate(model, WAYS['greedy'], eos=EOS)(variables, batch_of('decoder'), None)
    assert sizes == []
