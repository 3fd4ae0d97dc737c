"""Mixtures: the same batches for any hosts, workers and restarts; every example of a part once a pass; no leak."""

import dataclasses
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_data
from tformer import checks, config
from tformer.config import Config, Data, Model, Train
from tformer.data import order
from tformer.data.batches import mixture, pipeline
from tformer.data.tokenizers import tokenizers
from tformer.errors import UserError
from tformer.layers.resolved import resolve_model
from tformer.model import build
from tformer.objectives import OBJECTIVES

SIZES = (97, 41, 23)  # examples of the parts
WEIGHTS = (1, 2, 1)


@pytest.fixture(scope='module')
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Three sets of parallel text."""
    place = tmp_path_factory.mktemp('mixture')
    for number, size in enumerate(SIZES):
        for split, count in (('train', size), ('valid', 5), ('test', 5)):
            texts = toy_data.sentences(count, seed=10 * number + len(split), lengths=(1, 6))
            rows = (f'{number} {i} {text}\t{" ".join(reversed(text.split()))}' for i, text in enumerate(texts))
            toy_data.write(place / f'part {number}' / f'{split}.tsv', rows)
    return place


def run(
    place: pathlib.Path,
    weights: tuple[int, ...] | None = WEIGHTS,
    family: str = 'encoder_decoder',
    **data: object,
) -> Config:
    shares = [''] * 3 if weights is None else [f' weight={weight}' for weight in weights]
    parts = tuple(f"path='{place}/part {number}'{share}" for number, share in enumerate(shares))
    settings = {'mixture': parts, 'tokenizer': 'symbol', 'length': 16, 'batching': 'pack', **data}
    return Config(
        model=Model(family=family),
        data=Data(**settings),
        train=Train(objective='seq2seq', batch_size=8, seed=3),
    )


def made(cfg: Config, split: str = 'train', *, training: bool = True) -> pipeline.Batches:
    tokens = tokenizers.train_tokenizers(cfg, mixture.load(cfg, 'train'))
    return pipeline.Batches(cfg, tokens, split, training=training)


def assert_equal(one: pipeline.Batch, other: pipeline.Batch) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
        assert one[name].dtype == other[name].dtype


@pytest.mark.parametrize('batching', ['pack', 'bucket'])
@pytest.mark.parametrize('hosts', [1, 2, 4])
@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.proof)])
def test_a_batch_depends_on_seed_and_step_alone(place: pathlib.Path, batching: str, hosts: int, workers: int) -> None:
    """Put together from what each host's fresh iterator gives, from any step on, it is `batch(step)`, bit for bit."""
    if workers and batching == 'bucket' and hosts > 1:
        pytest.skip('processes take seconds to start; packing has been through it')
    cfg = run(place, batching=batching)
    batches = made(cfg)
    assert batches.steps_per_epoch > 3
    expected = [batches.batch(step) for step in range(30)]
    resumed = dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, num_workers=workers, num_threads=2, prefetch=3)
    )
    for start in (0, 7) if workers else (0, 1, 2, 13, 25):
        shares = [pipeline.iterate(made(cfg), start, resumed, share=(host, hosts)) for host in range(hosts)]
        for step, parts in zip(range(start, start + 5), zip(*shares, strict=True), strict=False):
            whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            assert_equal(whole, expected[step])
        for share in shares:
            share.close()


@pytest.mark.parametrize('batching', ['pack', 'bucket', 'pad'])
def test_each_pass_over_a_part_has_each_example_once(place: pathlib.Path, batching: str) -> None:
    batches = made(run(place, batching=batching))
    seen: dict[tuple[int, int], list[list[int]]] = {}
    for step in range(int(4 * batches.steps_per_epoch)):
        bucket, rows = batches._find(step)
        for part, row in zip(rows.part.tolist(), rows.row.tolist(), strict=True):
            seen.setdefault((part, bucket), []).append(batches.parts[part].rows[row].tolist())
    for number, part in enumerate(batches.parts):
        streams = [(seen[number, b], len(rows)) for b, rows in enumerate(part.by_bucket) if len(rows)]
        for index in range(min(len(stream) // size for stream, size in streams)):
            one = itertools.chain(*(stream[index * size : (index + 1) * size] for stream, size in streams))
            assert sorted(itertools.chain(*one)) == list(range(SIZES[number]))


def test_shares_follow_weights_and_temperature(place: pathlib.Path) -> None:
    for weights, temperature, wanted in (
        (None, 1.0, np.array(SIZES) / sum(SIZES)),
        (WEIGHTS, 1.0, np.array([0.25, 0.5, 0.25])),
        (None, 2.0, np.sqrt(SIZES) / np.sqrt(SIZES).sum()),
        (None, 1e9, np.full(3, 1 / 3)),
    ):
        batches = made(run(place, weights, mixture_temperature=temperature, batching='pad'))
        parts = np.concatenate([batches._find(step)[1].part for step in range(200)])
        np.testing.assert_allclose(np.bincount(parts) / len(parts), wanted, atol=2 / len(parts))
        assert sum(p.epochs * len(p.examples) for p in batches.parts) == pytest.approx(sum(SIZES))
        counts = np.array([np.bincount(batches._find(step)[1].part, minlength=3) for step in range(50)])
        assert (np.abs(counts - 8 * wanted) <= 2).all()  # every batch has the mixture


STAGES = ('step=6 weights=0,1,1', 'step=13 weights=3,1,0')


@pytest.mark.parametrize('batching', ['pack', 'bucket'])
def test_stages_begin_at_their_steps_and_a_batch_depends_on_seed_and_step_alone(place, batching: str) -> None:
    cfg = run(place, mixture_stages=STAGES, batching=batching)
    batches = made(cfg)
    shares = [np.bincount(batches._find(step)[1].part, minlength=3) / 8 for step in range(400)]
    for steps, wanted in ((range(6), WEIGHTS), (range(6, 13), (0, 1, 1)), (range(13, 400), (3, 1, 0))):
        found = np.mean([shares[step] for step in steps], axis=0)
        assert not any(found[part] for part in range(3) if not wanted[part])
        assert batching == 'pack' or np.abs(found - np.array(wanted) / sum(wanted)).max() < 0.1 + 1 / len(steps)
    expected = [batches.batch(step) for step in range(20)]
    for start in (0, 5, 6, 12, 17):
        resumed = pipeline.iterate(made(cfg), start, cfg)
        for step in range(start, min(start + 3, 20)):
            assert_equal(next(resumed), expected[step])
        resumed.close()
    before, (first, _) = made(run(place, batching=batching)), (6, 13)
    for step in range(first):
        assert_equal(before.batch(step), expected[step])
    assert before.fingerprint != batches.fingerprint


@pytest.mark.parametrize(
    ('stages', 'message'),
    [
        (('weights=1,1,1',), r"mixture_stages\[0\]='weights=1,1,1' is not of the form 'step=1000 weights=3,1'"),
        (('step=5 weights=1,1,1 more',), r"mixture_stages\[0\]='step=5 weights=1,1,1 more' is not of the form"),
        (('step=x weights=1,1,1',), r'mixture_stages\[0\]\.step=.x. is not'),
        (('step=1.5 weights=1,1,1',), r'mixture_stages\[0\]\.step=.1\.5. is not'),
        (('step=-1 weights=1,1,1',), r'mixture_stages\[0\]: step=-1 must be at least 0'),
        (('step=5 weights=1,1,1', 'step=5 weights=1,2,1'), r'mixture_stages\[1\]: step=5 must be at least 6'),
        (('step=5 weights=1,1',), r'mixture_stages\[0\]: 2 weights for 3 parts'),
        (('step=5 weights=1,y,1',), r'mixture_stages\[0\]\.weights=.1,y,1. is not'),
        (('step=5 weights=0,0,0',), r'weights=0,0,0 must be 0 or more each, and some above 0'),
        (('step=5 weights=2,-1,1',), r'weights=2,-1,1 must be 0 or more each'),
        (('step=5 weights=inf,1,1',), r'weights=inf,1,1 must be'),
        (('step=5 weights=nan,1,1',), r'weights=nan,1,1 must be'),
        (('step=0 weights=1,0,1', 'step=9 weights=2,0,1'), r'data\.mixture\[1\] is never seen'),
    ],
)
def test_mistakes_in_stages(place: pathlib.Path, stages: tuple[str, ...], message: str) -> None:
    cfg = run(place, mixture_stages=stages)
    with pytest.raises(UserError, match=message) as error:
        checks.check_here(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, num_steps=20)))
    assert '\n' not in str(error.value)


def test_evaluation_goes_through_the_parts_in_their_order(place: pathlib.Path) -> None:
    batches = made(run(place), 'valid', training=False)
    assert [record['source'][0] for record in batches.records] == ['0'] * 5 + ['1'] * 5 + ['2'] * 5
    assert batches.records[-1]['source'][0] == '2' and len(batches.records[4:6]) == 2
    seen = [row[0][:2] for step in range(int(batches.steps_per_epoch)) for row in batches.segments(step) if row]
    assert sorted(seen) == [(part, record) for part in range(3) for record in range(5)]


def test_a_seed_and_the_data_have_a_fingerprint(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cfg = run(place)
    tokens = tokenizers.train_tokenizers(cfg, mixture.load(cfg, 'train'))

    def fingerprint(cfg: Config) -> str:
        return pipeline.Batches(cfg, tokens, 'train', training=True).fingerprint

    assert fingerprint(cfg) == fingerprint(cfg)
    assert fingerprint(cfg) != fingerprint(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, length=17)))
    assert fingerprint(run(place, None)) != fingerprint(cfg)
    moved = tmp_path / 'elsewhere'
    moved.symlink_to(place)
    assert fingerprint(run(moved)) == fingerprint(cfg)


@pytest.mark.parametrize(
    ('parts', 'message'),
    [
        (('path=a pth=b',), r"data.mixture\[0\]: 'pth=b' is not FIELD=VALUE of a part; did you mean 'path'"),
        (('path=a', 'path'), r"data.mixture\[1\]: 'path' is not FIELD=VALUE"),
        (('path=a length=3',), r"'length=3' is not FIELD=VALUE"),
        (('path=a weight=x',), r'mixture\[0\].weight=.x. is not'),
        (('path=a weight=1', 'path=b'), r'data.mixture\[1\] has no weight'),
        (('path=a weight=inf', 'path=b weight=1'), r'data.mixture\[0\]: weight=inf must be finite'),
        (('path=a weight=1', 'path=b weight=nan'), r'data.mixture\[1\]: weight=nan must be positive'),
        (('path=a weight=0', 'path=b weight=1'), r'data.mixture\[0\]: weight=0.0 must be positive'),
        (("path='a",), r'data.mixture\[0\]: No closing quotation'),
        (('source=algorithmic modulus=1',), r'data.mixture\[0\]: modulus=1 must be at least 2'),
        (('path=a', 'source=algorithmic train_share=1.5'), r'data.mixture\[1\]: train_share=1.5 must be in \[0, 1\)'),
        (('source=fils',), r"data.mixture\[0\]: .*did you mean 'files'"),
    ],
)
def test_mistakes_in_a_mixture(parts: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        checks.check_here(Config(data=Data(mixture=parts), train=Train(num_steps=1)))
    assert '\n' not in str(error.value)


def test_what_parts_have_in_common_is_scored_once_and_a_part_need_not_have_it(place: pathlib.Path, tmp_path) -> None:
    common = run(place, valid_path=(str(place / 'part 1' / 'valid.tsv'),))
    assert len(mixture.load(common, 'valid')) == 5 and len(mixture.load(common, 'train')) == sum(SIZES)
    toy_data.write(tmp_path / 'train.tsv', ['a\tb'] * 3)
    cfg = run(place, None)
    cfg = config.override(cfg, {'data.mixture': (*cfg.data.mixture[:2], f'path={tmp_path}')})
    assert len(mixture.load(cfg, 'valid')) == 10 and 'passes' not in made(cfg, 'valid', training=False).summary
    only = config.override(cfg, {'data.mixture': (f'path={tmp_path}',)})
    with pytest.raises(UserError, match=r'valid.* does not exist'):
        mixture.load(only, 'valid')


def test_an_error_names_its_part(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    toy_data.write(tmp_path / 'train.tsv', [f'{"a " * 50}\tb'])
    cfg = run(place, None)
    cfg = config.override(cfg, {'data.mixture': (*cfg.data.mixture[:2], f'path={tmp_path}')})
    with pytest.raises(UserError, match=r'data.mixture\[2\]: the train split has no example within'):
        made(cfg)
    with pytest.raises(UserError, match=r'data.mixture\[1\] is never seen'):
        made(run(place, None, mixture_temperature=0.01))


def test_a_weight_is_of_a_part() -> None:
    with pytest.raises(UserError, match=r'data.weight=2.0 belongs to a part of a mixture'):
        checks.check_here(config.override(Config(train=Train(num_steps=1)), {'data.weight': '2'}))


@pytest.mark.slow
@pytest.mark.parametrize('family', [pytest.param('encoder_decoder', marks=pytest.mark.proof), 'decoder'])
def test_nothing_leaks_between_packed_examples(place: pathlib.Path, family: str) -> None:
    """Other tokens in all other segments of a row, of all stacks, change no bit of a segment's logits."""
    cfg = run(place, family=family, **({'encoder_length': 20} if family == 'encoder_decoder' else {'length': 40}))
    batches = made(cfg)
    batch = batches.batch(1)
    assert batch['segment_ids'].max() >= 3
    size = batches._tokenizer.vocab_size
    model = build(
        resolve_model(
            Model(family, vocab_size=size, emb_dim=16, mlp_dim=32, num_heads=2, num_encoder_layers=2, max_len=64)
        )
    )
    method = OBJECTIVES['seq2seq'].method
    variables = model.init(jax.random.key(0), batch, method=method)
    logits = jax.jit(lambda batch: model.apply(variables, batch, method=method))
    before = logits(batch)
    rng = np.random.default_rng(0)
    for segment in (1, 2):
        other = dict(batch)
        for side in ('', 'encoder_')[: 1 + (family == 'encoder_decoder')]:
            inputs = batch[f'{side}inputs']
            drawn = rng.integers(7, size, inputs.shape).astype(np.int32)
            other[f'{side}inputs'] = np.where(batch[f'{side}segment_ids'] == segment, inputs, drawn)
        after = logits(other)
        mine = jnp.asarray(batch['segment_ids'] == segment)[..., None]
        assert float(jnp.abs(jnp.where(mine, before - after, 0)).max()) == 0.0
        assert float(jnp.abs(jnp.where(mine, 0, before - after)).max()) > 0


def test_far_steps_of_a_mixture_cost_nothing(place: pathlib.Path) -> None:
    batches = made(run(place))
    assert_equal(batches.batch(10**10), made(run(place)).batch(10**10))
    stream, item = order.interleave(np.array(WEIGHTS, float), 10**12, 4)
    assert sorted(stream) == [0, 1, 1, 2] and item.max() == 10**12 // 2 + 1


def test_a_part_trains_with_the_others_or_not_at_all_and_may_lack_what_is_not_trained_on(
    place: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for split, part in itertools.product(('train', 'valid'), range(3)):
        if (split, part) not in (('train', 1), ('valid', 2)):
            toy_data.write(tmp_path / f'part {part}' / f'{split}.tsv', ['a b\tb a'])
    with pytest.raises(UserError, match=r'part 1/train\..* does not exist'):
        mixture.load(run(tmp_path), 'train')
    assert len(mixture.load(run(tmp_path), 'valid').splits) == 1  # equal records count once
