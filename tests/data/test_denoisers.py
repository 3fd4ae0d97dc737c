"""UL2's denoisers: what is given begins with the mode, and with what is wanted holds the text."""

import itertools
import types
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import restoring
from fixed_draws import Fixed
from tformer.config.run import Data
from tformer.data.examples import corrupt, denoisers, example_formats, special_tokens
from tformer.data.tokenizers.vocabulary import Specials
from tformer.errors import UserError

NAMES = list(denoisers.DENOISERS)
MARKS = np.arange(1000, 1303)
SENTINELS, MODES = denoisers.roles(MARKS)
SIZES, SEEDS = st.integers(0, 600), st.integers(0, 2**32)
SOME = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)


def corrupted(text: np.ndarray, rng: object, *names: str, marks: np.ndarray = MARKS) -> tuple[np.ndarray, np.ndarray]:
    """What becomes of a text under some denoisers and a tokenizer with the sentinels `marks`."""
    noise = corrupt.Noise(Data(denoisers=names), types.SimpleNamespace(sentinels=marks), ())  # type: ignore[arg-type]
    vars(noise)['rng'] = rng
    return denoisers.denoise_ul2(text, noise)


def in_one_stack(sizes: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The most given and wanted tokens together, with the mode, without BOS and SEP."""
    template = special_tokens.DecoderTemplate(Specials(), Specials())
    (lengths,) = example_formats.FORMATS['ul2'].lengths(sizes, template, Data(denoisers=tuple(names)))
    return lengths - 2


def test_the_papers_mixture() -> None:
    """Tay et al. 2023, table 1, for 512 tokens: dropped tokens and spans."""
    found = {}
    for name, denoiser in denoisers.DENOISERS.items():
        _, wanted, spans = denoiser.lengths(np.array(512))
        found[name] = denoiser.mode, int(wanted - spans), int(spans)
    assert found == {
        'r3': ('r', 77, 26),
        'r8': ('r', 77, 10),
        's': ('s', 255, 0),  # at most: L / 4 on average
        'x3': ('x', 256, 85),
        'x8': ('x', 256, 32),
        'x64': ('x', 256, 4),
        'x64_low': ('x', 77, 1),
    }
    assert list(Data().denoisers) == NAMES


def test_denoisers_by_hand() -> None:
    text = np.arange(10, 20, dtype=np.int32)
    first, second = SENTINELS[:2].tolist()
    inputs, targets = corrupted(text, Fixed(1, 4), 'r3', 's')
    assert inputs.tolist() == [MODES['s'], 10, 11, 12, 13, 14, 15] and targets.tolist() == [16, 17, 18, 19]
    # 2 of 10 tokens in one span before the kept token 3; 5 of 10 in two of 4 + 1, before the kept tokens 0 and 5
    draws = Fixed(0, np.array([], int), np.array([3]), 1, np.array([3]), np.array([5, 0]))
    inputs, targets = corrupted(text, draws, 'r3', 'x3')
    assert inputs.tolist() == [MODES['r'], 10, 11, 12, first, 15, 16, 17, 18, 19] and targets.tolist() == [
        first,
        13,
        14,
    ]
    inputs, targets = corrupted(text, draws, 'r3', 'x3')
    assert inputs.tolist() == [MODES['x'], first, 14, 15, 16, 17, 18, second]
    assert targets.tolist() == [first, 10, 11, 12, 13, second, 19]
    assert inputs.dtype == targets.dtype == text.dtype


@given(SIZES, SOME, SEEDS)
@example(1, ['s'], 0)
@example(2, ['s'], 0)
@settings(deadline=None)
def test_the_text_comes_back_and_lengths_are_known_before(n: int, names: list[str], seed: int) -> None:
    text = np.arange(n)
    inputs, targets = corrupted(text, np.random.default_rng(seed), *names)
    mode = next(mode for mode, index in MODES.items() if index == inputs[0])
    assert mode in {denoisers.DENOISERS[name].mode for name in names}
    assert not np.isin(np.append(inputs[1:], targets), list(MODES.values())).any()
    back = np.append(inputs[1:], targets) if mode == 's' else restoring.restore(inputs[1:], targets, SENTINELS)
    assert back.tolist() == text.tolist() == list(range(n))
    assert n < 2 or (len(inputs) > 1 and len(targets))
    longest = denoisers.lengths(np.array(n), names)
    assert len(inputs) <= longest[0] and len(targets) <= longest[1]
    most = in_one_stack(np.array(n), names)
    assert len(inputs) + len(targets) <= most and (len(set(names)) > 1 or len(inputs) + len(targets) == most)
    taken = (inputs[1:] >= 1000).sum() + len(MODES)
    most = denoisers.lengths(np.array(n), names)[2] + len(MODES)
    assert taken <= most and (len(set(names)) > 1 or taken == most)


@given(SOME)
@settings(deadline=None)
def test_bounds_never_fall_with_the_size(names: list[str]) -> None:
    sizes = np.arange(700)
    both = in_one_stack(sizes, names)
    for bound in (*denoisers.lengths(sizes, names), both):
        assert bound.shape == sizes.shape and (np.diff(bound) >= 0).all()
    each = [denoisers.lengths(sizes, [name]) for name in names]
    together = denoisers.lengths(sizes, names)
    assert all(
        (np.max(one, axis=0) == whole).all() for one, whole in zip(zip(*each, strict=True), together, strict=True)
    )


@pytest.mark.parametrize('size', [2, 3, 4, 16, 101, 512])
def test_a_quarter_of_a_text_is_its_end_on_average(size: int) -> None:
    """Tay et al. 2023, table 1: mu = L / 4, r = 0.25, one span. It is uniform, from one token on."""
    rng, text, count = np.random.default_rng(0), np.arange(size), 4000
    ends = np.array([len(corrupted(text, rng, 's')[1]) for _ in range(count)])
    most = max(round(size / 2) - 1, 1)
    assert ends.min() == 1 and ends.max() == most and (size % 4 or size < 8 or (1 + most) / 2 == size / 4)
    assert abs(ends.mean() - (1 + most) / 2) <= 4 * np.sqrt((most**2 - 1) / 12 / count)
    assert abs(ends.std() - np.sqrt((most**2 - 1) / 12)) <= 0.03 * most


def test_denoisers_are_as_likely() -> None:
    rng, text, count = np.random.default_rng(0), np.arange(101), 7000
    made = [corrupted(text, rng, *NAMES) for _ in range(count)]
    modes = np.array([inputs[0] for inputs, _ in made])
    for mode, share in (('r', 2 / 7), ('s', 1 / 7), ('x', 4 / 7)):
        assert abs((modes == MODES[mode]).mean() - share) < 4 * np.sqrt(share * (1 - share) / count), mode
    twice = np.mean([corrupted(text, rng, 's', 's', 'r3')[0][0] == MODES['s'] for _ in range(2000)])
    assert abs(twice - 2 / 3) < 4 * np.sqrt(2 / 9 / 2000)


def test_rates_over_many_tokens() -> None:
    text, marks = np.arange(100_000), np.arange(1_000_000, 1_020_003)
    for name, rate in (('r3', 0.15), ('r8', 0.15), ('x3', 0.5), ('x8', 0.5), ('x64', 0.5), ('x64_low', 0.15)):
        inputs, targets = corrupted(text, np.random.default_rng(1), name, marks=marks)
        wanted = (targets < 1_000_000).sum()
        assert wanted == round(rate * 100_000) and (inputs < 1_000_000).sum() == 100_000 - wanted
        assert (targets >= 1_000_000).sum() == round(wanted / {'3': 3, '8': 8, '6': 64}[name[1]])


def test_sentinels_suffice_when_they_are_as_many_as_it_says() -> None:
    text = np.arange(200)
    for name, spare in itertools.product(NAMES, (0, -1)):
        needed = int(denoisers.lengths(np.array(200), [name])[2]) + len(MODES)
        marks = np.arange(1000, 1000 + needed + spare)
        if spare == 0:
            spans, modes = denoisers.roles(marks)
            assert list(modes.values()) == marks[-3:].tolist() and len(spans) == needed - 3
            corrupted(text, np.random.default_rng(0), name, marks=marks)
        else:
            with pytest.raises(UserError, match=r'train\.objective needs .* sentinels') as error:
                corrupted(text, np.random.default_rng(0), name, marks=marks)
            assert '\n' not in str(error.value)


def test_an_unknown_denoiser_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"data\.denoisers='r33' is unknown; did you mean 'r3'"):
        denoisers.lengths(np.array(5), ['r33'])
