"""TokensWithOffsets, noise and prefixes: what is left of a text, and what a model is to say of it."""

import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import restoring
import toy_data
from fixed_draws import Fixed
from tformer import checks, config
from tformer.commands import train as train_command
from tformer.commands.run import Run
from tformer.config import Model
from tformer.config.run import Config, Data, Train
from tformer.data.batches import pipeline
from tformer.data.examples import corrupt, denoisers
from tformer.data.examples import spans as spans_lib
from tformer.data.tokenizers import bytes_and_characters, tokenizers
from tformer.data.tokenizers.vocabulary import BOS, CLS, EOS, MASK, SEP
from tformer.errors import UserError

OBJECTIVES = ('span_corruption', 'denoising', 'ul2', 'prefix_lm')
READERS = list(itertools.product(OBJECTIVES, ('encoder_decoder', 'decoder')))
CASES = [(*reader, batching) for reader in READERS for batching in ('pad', 'bucket', 'pack')]
LENGTH, ENCODER_LENGTH, SENTINELS = 24, 32, 12
SIZES, RATES, MEANS = st.integers(0, 300), st.floats(0.01, 0.9), st.floats(1, 9)
SEEDS = st.integers(0, 2**32)
MARKS = np.arange(1000, 1200)  # sentinels


def drawing(rng: Any, **rates: object) -> corrupt.Noise:
    """Noise on bytes that draws from `rng`."""
    noise = corrupt.Noise(Data(**rates), bytes_and_characters.Byte(), ())
    vars(noise)['rng'] = rng
    return noise


def stream(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


# --------------------------------------------------------------------------------------------------- worked examples


def test_the_spans_of_figure_2_of_t5() -> None:
    """Raffel et al. 2020: Thank you [for inviting] me to your party [last] week, but without the final sentinel."""
    words = bytes_and_characters.Symbol('Thank you for inviting me to your party last week'.split())
    text = np.array(words.encode('Thank you for inviting me to your party last week'))
    x, y = 100, 101
    # 3 of 10 tokens in 2 spans of 2 + 1, before the kept tokens 2 and 6
    inputs, targets = corrupt.corrupt_spans(text, Fixed([1], [6, 2]), np.array([x, y]), rate=0.3, mean_span=1.5)
    assert inputs.tolist() == [
        *words.encode('Thank you'),
        x,
        *words.encode('me to your party'),
        y,
        *words.encode('week'),
    ]
    assert targets.tolist() == [x, *words.encode('for inviting'), y, *words.encode('last')]


def test_counts_of_spans_by_hand() -> None:
    """512 tokens of T5's pre-training: 77 dropped in 26 spans."""
    dropped, spans = corrupt.span_counts(np.array([0, 1, 2, 3, 10, 20, 512]))
    assert dropped.tolist() == [0, 0, 1, 1, 2, 3, 77] and spans.tolist() == [0, 0, 1, 1, 1, 1, 26]


def test_a_span_may_stand_anywhere_also_at_either_end() -> None:
    """Of five tokens one is dropped: each of them in a fifth of the texts."""
    text, sentinels = np.arange(10, 15), np.array([90])
    drawn = [corrupt.corrupt_spans(text, np.random.default_rng(seed), sentinels, 0.2) for seed in range(300)]
    dropped = np.bincount([int(wanted[1]) - 10 for _, wanted in drawn], minlength=5)
    assert dropped.min() > 60 - 4 * (300 * 0.2 * 0.8) ** 0.5
    for inputs, wanted in drawn:
        place = wanted[1] - 10
        assert inputs.tolist() == [*text[:place], 90, *text[place + 1 :]]


def test_a_text_is_cut_at_any_place_but_its_ends() -> None:
    cuts = [corrupt.split_anywhere(np.arange(5), np.random.default_rng(seed)) for seed in range(200)]
    assert {len(first) for first, _ in cuts} == {1, 2, 3, 4}
    assert all([*first, *second] == [0, 1, 2, 3, 4] for first, second in cuts)
    assert [len(part) for part in corrupt.split_anywhere(np.arange(1), np.random.default_rng(0))] == [1, 0]


def test_infilling_by_hand() -> None:
    """A B C D E, infilled as BART's figure 2 is: A _ . D _ E; a span of no tokens inserts a mask."""
    # 6 tokens of 10 in at most 4 spans: lengths 2, 0, 3, then 5 cut to 1; before the kept tokens 0, 1, 3, and last
    text = np.arange(10, 20)
    inputs = corrupt.infill(text, drawing(Fixed([2, 0, 3, 5], [4, 1, 0, 3], mean=3.0), infill_rate=0.6))
    assert inputs.tolist() == [MASK, 12, MASK, 13, 14, MASK, 18, MASK]
    # the first span hides all there is to hide: no others are drawn; and none hides anything but the last
    inputs = corrupt.infill(text, drawing(Fixed([9, 1, 1, 1], [2], mean=3.0), infill_rate=0.6))
    assert inputs.tolist() == [10, 11, MASK, 18, 19]
    inputs = corrupt.infill(text, drawing(Fixed([0, 0, 0, 0], [0, 1, 2, 4], mean=3.0), infill_rate=0.6))
    assert inputs.tolist() == [MASK, 10, MASK, 11, MASK, 12, 13, MASK]


def test_other_noise_by_hand() -> None:
    text = np.arange(10, 16)
    assert corrupt.replace_by_mask(text, drawing(Fixed([1, 4]), mask_rate=0.3)).tolist() == [10, MASK, 12, 13, MASK, 15]
    assert corrupt.delete_tokens(text, drawing(Fixed([1, 4]), delete_rate=0.3)).tolist() == [10, 12, 13, 15]
    assert corrupt.rotate(text, drawing(Fixed(2))).tolist() == [12, 13, 14, 15, 10, 11]
    byte = bytes_and_characters.Byte()
    text = np.array(byte.encode('Go... No? Yes'))
    permuted = corrupt.permute_sentences(text, drawing(Fixed([2, 0, 1])))
    assert byte.decode(permuted) == ' YesGo... No?'


def framed(text: str) -> np.ndarray:
    return np.array([CLS, *bytes_and_characters.Byte().encode(text), SEP], np.int32)


def hidden(inputs: np.ndarray) -> str:
    return ''.join(
        '_' if token == MASK else bytes_and_characters.Byte().piece(token) for token in inputs.tolist()[1:-1]
    )


def test_whole_words_by_hand() -> None:
    """Words of 3, 4, 2 and 4 bytes, 6 of 13 to hide: the second, not the first, which is too much, and the third."""
    text = framed('aa bbb c dddd')
    drawn = [ord(letter) for letter in 'uvwxyz']  # places among the ordinary ids, which are the bytes
    draws = [1, 0, 2, 3], [0.79, 0.81, 0.89, 0.91, 0.0, 0.99], drawn
    inputs, selected = corrupt.mask_tokens(text, drawing(Fixed(*draws), mask_rate=0.5, mask_unit='word'))
    assert np.flatnonzero(selected).tolist() == [4, 5, 6, 7, 8, 9]
    assert hidden(inputs) == 'aa _vw _ dddd'
    # 2 of 13: only the third is that short; and where none is the first one comes all the same
    inputs, _ = corrupt.mask_tokens(text, drawing(Fixed([1, 0, 2, 3], [0.0, 0.0], [0, 0]), mask_unit='word'))
    assert hidden(inputs) == 'aa bbb __dddd'
    noise = drawing(Fixed([1, 0], [0.0] * 4, [0] * 4), mask_unit='word')
    inputs, _ = corrupt.mask_tokens(framed('aaa bbbb'), noise)
    assert hidden(inputs) == 'aaa ____'


# -------------------------------------------------------------------------------------------------------- properties


@given(st.text('ab .\n', max_size=80), st.floats(0.01, 0.9), SEEDS)
@settings(deadline=None)
def test_words_are_hidden_whole_and_as_many_as_fit(text: str, rate: float, seed: int) -> None:
    byte, tokens = bytes_and_characters.Byte(), framed(text)
    before = tokens.copy()
    inputs, selected = corrupt.mask_tokens(tokens, drawing(stream(seed), mask_rate=rate, mask_unit='word'))
    assert (tokens == before).all() and inputs.dtype == tokens.dtype and (inputs[~selected] == tokens[~selected]).all()
    assert not selected[[0, -1]].any() and byte.ordinary[inputs[1:-1]].sum() + (inputs == MASK).sum() == len(text)
    words = np.split(selected, np.flatnonzero(byte.word_starts(tokens))[1:])[1:-1]
    assert all(word.all() or not word.any() for word in words)
    left = max(1, round(rate * len(text))) - selected.sum()
    others = [len(word) for word in words if not word.any()]
    if left < 0:
        assert sum(word.any() for word in words) == 1 and min(map(len, words)) > left + selected.sum()
    else:
        assert (selected.any() or not text) and all(size > left for size in others)


def test_rates_of_whole_words_and_fates() -> None:
    rng, byte = np.random.default_rng(0), bytes_and_characters.Byte()
    text = ' '.join('x' * length for length in rng.integers(1, 8, 20_000))
    tokens = np.array(byte.encode(text))
    noise = drawing(stream(0), mask_rate=0.3, mask_unit='word', mask_keep=0.2, mask_random=0.3)
    inputs, selected = corrupt.mask_tokens(tokens, noise)
    count = selected.sum()
    assert len(tokens) > 90_000 and count == round(0.3 * len(tokens))
    sizes = np.diff(np.flatnonzero(byte.word_starts(tokens)), append=len(tokens))
    picked = selected[byte.word_starts(tokens)]
    for size in range(2, 9):  # words of all lengths are as likely
        some = picked[:-1][sizes[:-1] == size]
        assert abs(some.mean() - 0.3) < 4 * np.sqrt(0.21 / len(some))
    same = 1 / 256  # of the random ones
    shares = {'mask': (inputs == MASK, 0.5), 'stay': (inputs == tokens, 0.2 + 0.3 * same)}
    for name, (found, expected) in shares.items():
        assert abs(found[selected].mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / count), name
    fates = (inputs == MASK)[selected & (tokens == ord('x') + 7)]
    assert 0.2 < (fates[1:] != fates[:-1]).mean() < 0.6  # each token of a word has its own: half of them change


@pytest.mark.parametrize('unit', corrupt.MASK_UNITS)
def test_all_selected_can_meet_one_fate(unit: str) -> None:
    byte, tokens = bytes_and_characters.Byte(), framed('to be or not to be ' * 9)
    for keep, random in ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0)):
        noise = drawing(stream(1), mask_rate=0.5, mask_unit=unit, mask_keep=keep, mask_random=random)
        inputs, selected = corrupt.mask_tokens(tokens, noise)
        assert selected.sum() > 50
        assert (inputs == tokens).all() == (keep == 1)
        assert ((inputs == MASK) == selected).all() == (not keep and not random)
        assert byte.ordinary[inputs[1:-1]].all() == (keep == 1 or random == 1)


def test_a_random_token_is_any_ordinary_one_of_the_vocabulary() -> None:
    """256 bytes, each of them 40 times on average, none a special token."""
    noise, text = drawing(stream(2), mask_rate=0.999, mask_keep=0.0, mask_random=1.0), np.full(10_240, EOS + 9)
    counts = np.bincount(corrupt.mask_tokens(text, noise)[0], minlength=noise.tokenizer.vocab_size)
    assert not counts[~noise.tokenizer.ordinary].any()
    assert counts[noise.tokenizer.ordinary].min() > 10 and counts[noise.tokenizer.ordinary].max() < 80


def test_the_same_key_is_the_same_corruption_and_copies_take_turns() -> None:
    byte, text = bytes_and_characters.Byte(), framed('to be or not to be ' * 5)

    def made(epoch: int, copies: int | None, example: int = 0) -> bytes:
        noise = corrupt.Noise(Data(), byte, corrupt.noise_key(3, 2, 1, epoch, example, copies))
        return corrupt.mask_tokens(text, noise)[0].tobytes()

    for copies, different in ((None, 12), (1, 1), (5, 5)):
        epochs = [made(epoch, copies) for epoch in range(12)]
        assert len(set(epochs)) == different
        assert epochs == [made(epoch, copies) for epoch in range(12)]
        assert copies is None or epochs == [epochs[epoch % copies] for epoch in range(12)]
        assert made(0, copies) == made(0, None) != made(0, copies, example=1)
    assert corrupt.noise_key(3, 2, 1, 7, 9) == (3, 2, 1, 7, 9) and corrupt.noise_key(3, 2, 1, 7, 9, 5) == (
        3,
        2,
        1,
        2,
        9,
    )


@given(SIZES, RATES, MEANS, SEEDS)
@settings(deadline=None)
def test_inputs_and_targets_hold_the_text_in_lengths_known_before(n: int, rate: float, mean: float, seed: int) -> None:
    text = np.arange(n)
    inputs, targets = corrupt.corrupt_spans(text, stream(seed), MARKS if n < 200 else np.arange(1000, 1300), rate, mean)
    dropped, spans = corrupt.span_counts(np.array(n), rate, mean)
    assert (len(inputs), len(targets)) == (n - dropped + spans, dropped + spans)
    assert dropped == 0 or 0 < spans <= dropped < n
    marks = np.flatnonzero(inputs >= 1000)
    assert inputs[marks].tolist() == targets[targets >= 1000].tolist() == list(range(1000, 1000 + spans))
    assert (np.diff(marks) > 1).all()  # spans are not adjacent
    after = np.split(targets, np.flatnonzero(targets >= 1000))[1:]
    assert all(len(span) > 1 for span in after)
    assert restoring.restore(inputs, targets, np.arange(1000, 1300)).tolist() == text.tolist()


@given(SIZES, RATES, MEANS, SEEDS)
@settings(deadline=None)
def test_infilling_keeps_the_rest_in_order_and_stays_within_its_bound(
    n: int, rate: float, mean: float, seed: int
) -> None:
    text = np.arange(100, 100 + n)
    noise = drawing(stream(seed), infill_rate=rate, mean_span_length=mean)
    inputs = corrupt.infill(text, noise)
    hidden, masks = corrupt.infill_counts(np.array(n), noise.data)
    kept = inputs[inputs != MASK]
    assert len(kept) == n - hidden and set(kept.tolist()) <= set(text.tolist()) and (np.diff(kept) > 0).all()
    assert (hidden > 0) <= len(inputs) - len(kept) <= masks
    assert not ((inputs[:-1] == MASK) & (inputs[1:] == MASK)).any()
    # given the text, the masks say where all hidden tokens were: something is at each gap
    bounded = np.concatenate(([99], inputs, [100 + n]))
    for left, right in itertools.pairwise(bounded.tolist()):
        assert MASK in (left, right) or right == left + 1


@given(RATES, MEANS)
@settings(deadline=None)
def test_lengths_never_fall_with_the_size(rate: float, mean: float) -> None:
    sizes = np.arange(0, 400)
    dropped, spans = corrupt.span_counts(sizes, rate, mean)
    data = Data(mask_rate=rate, infill_rate=rate, delete_rate=rate, mean_span_length=mean)
    lengths = [
        dropped,
        spans,
        sizes - dropped + spans,
        *(kind.longest(sizes, data) for kind in corrupt.NOISES.values()),
    ]
    assert all((np.diff(length) >= 0).all() for length in lengths)


@given(SIZES, st.lists(st.sampled_from(list(corrupt.NOISES)), max_size=5), SEEDS)
@settings(deadline=None)
def test_any_noise_stays_within_its_bound_and_leaves_the_text_alone(n: int, kinds: list[str], seed: int) -> None:
    byte, data = bytes_and_characters.Byte(), Data(infill_rate=0.5)
    text = np.array(byte.encode('To be. Or not! ' * 20)[:n], np.int32)
    before, noise, longest, found = text.copy(), corrupt.Noise(data, byte, (seed,)), np.array(n), text
    for kind in kinds:
        found, longest = corrupt.NOISES[kind].corrupt(found, noise), corrupt.NOISES[kind].longest(longest, data)
    assert len(found) <= longest and (text == before).all() and found.dtype == text.dtype
    if set(kinds) <= {'permute', 'rotate'}:
        assert sorted(found.tolist()) == sorted(text.tolist())


def test_rates_over_many_tokens() -> None:
    text = np.arange(2000, 102_000)
    inputs, targets = corrupt.corrupt_spans(text, stream(0), np.arange(1_000_000, 1_010_000))
    assert (targets < 1_000_000).sum() == 15_000 and (inputs >= 1_000_000).sum() == 5000
    lengths = np.diff(np.flatnonzero(targets >= 1_000_000)) - 1
    # a random division of 15000 into 5000 is nearly geometric: as often 1 long as one in three
    assert abs((lengths == 1).mean() - 1 / 3) < 4 * np.sqrt(2 / 9 / 5000)
    hidden = np.setdiff1d(text, inputs)
    assert abs(np.histogram(hidden, 10)[0] / 10_000 - 0.15).max() < 0.03  # evenly over the text
    infilled = corrupt.infill(text, drawing(stream(0)))
    masks = (infilled == MASK).sum()
    assert (infilled != MASK).sum() == 70_000 and abs(masks - 10_000) < 4 * np.sqrt(10_000 / 3)
    inserted = np.flatnonzero(infilled[1:-1] == MASK) + 1
    share = (infilled[inserted + 1] == infilled[inserted - 1] + 1).mean()  # nothing was there
    assert abs(share - np.exp(-3)) < 4 * np.sqrt(np.exp(-3) / 10_000)
    assert (corrupt.replace_by_mask(text, drawing(stream(0))) == MASK).sum() == 15_000
    assert len(corrupt.delete_tokens(text, drawing(stream(0)))) == 85_000


# ----------------------------------------------------------------------------------------------------------- batches


def make(
    objective: str,
    batching: str,
    family: str = 'encoder_decoder',
    *,
    training: bool = True,
    seed: int = 0,
    **data: object,
) -> pipeline.Batches:
    fields = {'length': LENGTH, 'encoder_length': ENCODER_LENGTH, 'sentinels': SENTINELS, 'num_buckets': 3, **data}
    made = Config(
        model=Model(family=family),
        data=Data(tokenizer='byte', batching=batching, **fields),
        train=Train(objective=objective, batch_size=4, seed=seed),
    )
    rng = np.random.default_rng(7)
    records = [{'text': f'{i:03d}' + ''.join(rng.choice(list('abc. '), rng.integers(0, 70)))} for i in range(53)]
    tokens = tokenizers.train_tokenizers(made, records)
    return pipeline.Batches(made, tokens, 'train', training=training, records=records)


def segments(batch: pipeline.Batch, row: int, side: str = '') -> list[np.ndarray]:
    ids = batch.get(f'{side}segment_ids', (batch[f'{side}positions'] >= 0).astype(np.int32))[row]
    return [np.flatnonzero(ids == segment) for segment in range(1, ids.max() + 1)]


def rebuilt(batches: pipeline.Batches, batch: pipeline.Batch, row: int) -> list[tuple[bytes, bytes]]:
    """(what the model is given, the text) of each example of a row, as bytes."""
    objective, family, found = batches.config.train.objective, batches.config.model.family, []
    marks = batches._tokenizer.sentinels
    for place, where in enumerate(segments(batch, row)):
        inputs, targets, weights = (batch[name][row, where] for name in ('inputs', 'targets', 'weights'))
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
        size = 1  # of what is given in this stack: all that is scored comes after it
        if family == 'decoder':
            prefix = batch['prefix'][row, where]
            size = int(prefix.sum())
            assert size >= 1 and prefix[:size].all()
        assert weights.tolist() == [0] * (size - 1) + [1] * (len(where) - size + 1)
        if objective == 'prefix_lm' and family == 'decoder':
            found.append((prefix.tobytes(), targets.tobytes()))
            continue
        if family == 'decoder':
            given, first, last = inputs[:size], BOS, SEP
        else:
            given, first, last = batch['encoder_inputs'][row, segments(batch, row, 'encoder_')[place]], None, EOS
        assert (inputs[0], given[-1], targets[-1]) == (BOS, last, EOS) and first in (None, given[0])
        given, text = given[int(first is not None) : -1], targets[size - 1 : -1]
        assert not np.isin(given, (BOS, EOS, SEP)).any() and not np.isin(text, (BOS, EOS, SEP)).any()
        found.append((given.tobytes(), original(objective, given, text, marks).tobytes()))
    return found


def original(objective: str, given: np.ndarray, wanted: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """The text that was corrupted; all of it is in the two."""
    if objective == 'ul2':
        marks, modes = denoisers.roles(marks)
        mode = next(mode for mode, token in modes.items() if token == given[0])
        given, objective = given[1:], {'s': 'prefix_lm'}.get(mode, 'span_corruption')
    if objective == 'span_corruption':
        return restoring.restore(given, wanted, marks)
    return np.append(given, wanted) if objective == 'prefix_lm' else wanted


def epoch_of(batches: pipeline.Batches, number: int = 0) -> dict[tuple[int, ...], list[tuple[bytes, bytes]]]:
    """What was made of each example in a pass, by its number."""
    found: dict[int, list[tuple[bytes, bytes]]] = {}
    for step in range(int((number + 1) * batches.steps_per_epoch) + 8):
        if not batches.training and step >= batches.steps_per_epoch:
            break
        batch, (_, rows) = batches.batch(step), batches._find(step)
        for row, members in enumerate(batches.segments(step)):
            if rows.epoch[row] == number and rows.part[row] >= 0:
                for (_, _, example), made in zip(members, rebuilt(batches, batch, row), strict=True):
                    found.setdefault(example, []).append(made)
    return found  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize(('objective', 'family', 'batching'), CASES)
def test_each_pass_has_every_piece_once_and_corrupts_it_anew(objective: str, family: str, batching: str) -> None:
    batches = make(objective, batching, family)
    first, second = epoch_of(batches), epoch_of(batches, 1)
    assert sorted(first) == sorted(second) == list(range(batches.num_examples))
    assert all(len(made) == 1 for made in (*first.values(), *second.values()))
    texts = [text for _, (((_, text)),) in sorted(first.items())]
    assert texts == [text for _, (((_, text)),) in sorted(second.items())]
    ends = (objective, family) == ('prefix_lm', 'decoder')
    whole = [
        np.append(bytes_and_characters.Byte().encode(r['text']), [EOS] * ends).astype(np.int32) for r in batches.records
    ]
    assert b''.join(texts) == np.concatenate(whole).tobytes()
    assert np.mean([first[i] == second[i] for i in first]) < 0.3
    assert epoch_of(make(objective, batching, family)) == first
    other = epoch_of(make(objective, batching, family, seed=1))
    assert np.mean([first[i] == other[i] for i in first]) < 0.3


EXACT = [*itertools.product(['span_corruption'], ('encoder_decoder', 'decoder')), ('prefix_lm', 'decoder')]


@pytest.mark.parametrize(('objective', 'family'), READERS)
def test_evaluation_corrupts_as_the_first_pass_does(objective: str, family: str) -> None:
    batches = make(objective, 'pack', family, training=False)
    assert epoch_of(batches) == epoch_of(make(objective, 'pack', family))
    for number, lengths in enumerate(batches.parts[0].examples.lengths):
        fields = batches._fields(0, number, 0)
        sizes = [len(fields[name]) for name in ('inputs', 'encoder_inputs') if name in fields]
        assert (np.array(sizes) <= lengths).all() and len(sizes) == len(lengths)
        assert sizes == lengths.tolist() or (objective, family) not in EXACT


@given(st.integers(6, 40), st.integers(6, 40), st.sampled_from(READERS))
@settings(deadline=None, max_examples=40)
def test_pieces_are_as_long_as_the_rows_allow(length: int, encoder_length: int, reader: tuple[str, str]) -> None:
    objective, family = reader
    batches = make(objective, 'pad', family, length=length, encoder_length=encoder_length, sentinels=40)
    examples = batches.parts[0].examples
    limits, lengths = np.array([length, encoder_length])[: examples.lengths.shape[1]], examples.lengths
    assert (lengths <= limits).all() and batches.batch(0)['inputs'].shape == (4, length)
    _, start, stop = examples.spans.find(np.arange(len(examples)))
    sizes = stop - start
    longer = batches._format.lengths(np.array([sizes.max() + 1]), examples.template, batches.config.data)
    longest = max(len(r['text']) for r in batches.records) + (batches._format.cut is spans_lib.in_pieces_to_the_end)
    assert (np.concatenate(longer) > limits).any() or sizes.max() == longest


def test_sentinels_come_after_the_vocabulary_and_are_kept(tmp_path: pathlib.Path) -> None:
    for kind in ('byte', 'char', 'symbol'):
        data, train = Data(tokenizer=kind, sentinels=3), Train(objective='span_corruption')
        made = Config(toy_data.reader_of('span_corruption'), data, train=train)
        both = tokenizers.train_tokenizers(made, [{'text': 'to be'}])
        both.save(tmp_path / kind)
        plain = tokenizers.TOKENIZERS[kind].train(['to be'])
        assert both.shared
        for tokenizer in (both.target, tokenizers.Tokenizers.load(tmp_path / kind).target):
            size = plain.vocab_size
            assert tokenizer.vocab_size == size + 3 == len(tokenizer.byte_lengths) == len(tokenizer.ordinary)
            assert tokenizer.sentinels.tolist() == [size, size + 1, size + 2]
            assert not tokenizer.ordinary[size:].any() and not tokenizer.byte_lengths[size:].any()
            assert [tokenizer.piece(size + i) for i in (0, 2)] == ['<sentinel_0>', '<sentinel_2>']
            ids = tokenizer.encode('to be')
            assert ids == plain.encode('to be') and tokenizer.decode([*ids, size]) == plain.decode(ids)
            assert [tokenizer.piece(i) for i in range(size)] == [plain.piece(i) for i in range(size)]
            assert tokenizer.fingerprint == both.target.fingerprint != plain.fingerprint


def test_mistakes() -> None:
    with pytest.raises(UserError, match=r'needs 2 sentinels .* the tokenizer has 1: data.sentinels=2') as error:
        make('span_corruption', 'pack', sentinels=1)
    assert '\n' not in str(error.value)
    make('span_corruption', 'pack', sentinels=2)
    steps = {'train.num_steps': 1}
    for changes, line in (
        ({'train.objective': 'masked_lm'}, 'needs model.family=encoder, not decoder'),
        ({'data.noise': 'infil'}, "did you mean 'infill'"),
        ({'data.mean_span_length': 0.5}, 'data.mean_span_length=0.5 must be at least 1'),
        ({'data.infill_rate': 1.0}, r'data.infill_rate=1.0 must be in \[0, 1\)'),
        ({'data.mask_unit': 'words'}, "did you mean 'word'"),
        ({'data.mask_keep': -0.1}, 'data.mask_keep=-0.1 must not be negative'),
        ({'data.mask_keep': 0.6, 'data.mask_random': 0.5}, 'data.mask_keep=0.6 and data.mask_random=0.5 .* at most 1'),
        ({'data.mask_copies': 0}, 'data.mask_copies=0 must be positive'),
        ({'data.denoisers': ()}, 'data.denoisers is empty'),
        ({'data.denoisers': ('s', 'x32')}, "data.denoisers='x32' is unknown; did you mean 'x3'"),
        (
            {'train.objective': 'prefix_lm', 'evaluate.examples_while_training': 2},
            'it applies where .* is seq2seq',
        ),
    ):
        with pytest.raises(UserError, match=line):
            stated = config.override(Config(), {**steps, **changes})
            checks.check_here(stated)
            checks.settle(stated, changes)


TINY = {
    'train.num_steps': 2,
    'train.batch_size': 4,
    'model.family': 'encoder_decoder',
    'model.emb_dim': 16,
    'model.mlp_dim': 16,
    'model.num_heads': 2,
    'model.max_len': 48,
    'data.tokenizer': 'byte',
    'data.sentinels': 12,
    'data.length': 32,
    'data.encoder_length': 48,
    'data.num_buckets': 1,
    'data.batching': 'pack',
    'mesh.data': 1,
    'decode.max_len': 4,
    'evaluate.samples': 2,
}


def run(directory: pathlib.Path, path: pathlib.Path, **changes: object) -> dict[str, float]:
    """The scores of a run on `path`, in `directory`."""
    own = {'data.path': (str(path),), **{name.replace('__', '.'): value for name, value in changes.items()}}
    return train_command.train_and_evaluate(config.override(Config(), {**TINY, **own}), str(directory))


RUNS = {'span_corruption': 'encoder_decoder', 'denoising': 'decoder', 'ul2': 'decoder', 'prefix_lm': 'encoder_decoder'}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('objective', 'family'),
    [pytest.param(*run, marks=() if run[0] == 'denoising' else pytest.mark.proof) for run in RUNS.items()],
)
def test_a_run_trains_and_is_evaluated(objective: str, family: str, tmp_path: pathlib.Path) -> None:
    text = toy_data.running(tmp_path / 'text')
    found = run(tmp_path / 'run', text, train__objective=objective, model__family=family)
    assert np.isfinite(found['loss']) and 0 <= found['accuracy'] <= 1
    if objective == 'span_corruption':  # and is fine-tuned with its tokenizer, which has sentinels where data has none
        changes = {'train__init_from': str(tmp_path / 'run'), 'data__sentinels': 0, 'evaluate__samples': 0}
        pairs = toy_data.parallel(tmp_path / 'pairs')
        tuned = run(tmp_path / 'tuned', pairs, train__objective='seq2seq', data__overlong='truncate', **changes)
        assert np.isfinite(tuned['loss'])
        vocabularies = [Run.load(tmp_path / name).tokenizers.target.fingerprint for name in ('run', 'tuned')]
        assert vocabularies[0] == vocabularies[1]
