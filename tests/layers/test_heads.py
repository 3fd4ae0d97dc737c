"""Heads: what each learns that words alone do not tell, in what family, and how predictions are judged."""

import dataclasses
import json
import pathlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction import text as bags
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline

import toy_data
from hub_files import FILES
from places import ROOT
from tformer import config, objectives
from tformer.commands import train as train_command
from tformer.commands.run import Run
from tformer.config import Config, Data, Model
from tformer.config.tasks import TASKS
from tformer.data.batches import mixture, pipeline
from tformer.data.tokenizers.bytes_and_characters import Byte, Char, Symbol
from tformer.data.tokenizers.hub_tokenizer import HubTokenizer
from tformer.data.tokenizers.subwords import SentencePiece
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import meshes, sharding
from tformer.evaluation import scorer, scores
from tformer.layers.dropout import DropoutRates
from tformer.layers.heads import POOLINGS
from tformer.layers.outputs import best_spans, classify
from tformer.model import build

Row = dict[str, Any]
SPLITS = {'train': 0, 'valid': 1, 'test': 2}


# ------------------------------------------------------------------------------------------------------- made data


def split(make: Callable[[random.Random], Row], count: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    return [make(rng) for _ in range(count)]


def before(rng: random.Random) -> Row:
    """Eight words; the label says which of 'left' and 'right' comes first. Their counts say nothing."""
    words = [*rng.choices(toy_data.WORDS, k=6), 'left', 'right']
    rng.shuffle(words)
    return {'label': 'yes' if words.index('left') < words.index('right') else 'no', 'text': ' '.join(words)}


def same_order(rng: random.Random) -> Row:
    """Two texts of the same three words; are they in the same order?"""
    first = rng.sample(toy_data.WORDS, 3)
    second = list(first)
    while second == first:
        rng.shuffle(second)
    label = rng.choice(['same', 'other'])
    return {'label': label, 'text': ' '.join(first), 'pair': ' '.join(first if label == 'same' else second)}


def leaning(rng: random.Random) -> Row:
    """Five digits; the label is where they weigh on a beam held in the middle: the sum of (place - 2) digit / 10."""
    digits = [rng.randrange(6) for _ in range(5)]
    moment = sum((place - 2) * digit for place, digit in enumerate(digits))
    return {'label': moment / 10, 'text': ' '.join(map(str, digits))}


def titled(rng: random.Random) -> Row:
    """After 'mr' comes a person of two words, after 'in' a place of one. Names are the same words as all others."""
    tokens: list[str] = []
    tags: list[str] = []
    for _ in range(rng.randint(2, 5)):
        kind = rng.choice(['mr', 'in', 'and'])
        name = {'mr': ['B-PER', 'I-PER'], 'in': ['B-LOC'], 'and': ['O']}[kind]
        tokens += [kind, *rng.choices(toy_data.WORDS[4:], k=len(name))]
        tags += ['O', *name]
    return {'tokens': tokens, 'tags': tags}


def what_follows(rng: random.Random) -> Row:
    """'A B key C D .' four times. The question is a key; the answer, of one word or two, follows it, if it is there."""
    *keys, absent = rng.sample([f'k{i}' for i in range(5)], 5)
    asked = absent if rng.random() < 0.3 else rng.choice(keys)
    context, answers = '', []
    for key in keys:
        first, second = (' '.join(rng.choices(toy_data.WORDS, k=rng.randint(1, 2))) for _ in range(2))
        context += f'{first} {key} '
        if key == asked:
            answers = [{'text': second, 'answer_start': len(context)}]
        context += f'{second} . '
    return {'question': asked, 'context': context.strip(), 'answers': answers}


def write(place: pathlib.Path, ending: str, splits: dict[str, list[Row]]) -> None:
    for name, rows in splits.items():
        if ending == 'jsonl':
            lines: Iterable[str] = map(json.dumps, rows)
        elif ending == 'tsv':
            lines = ('\t'.join(map(str, row.values())) for row in rows)
        else:
            lines = (f'{a}\t{b}' for row in rows for a, b in [*zip(row['tokens'], row['tags'], strict=True), ('', '')])
            lines = (line.strip() for line in lines)
        toy_data.write(place / f'{name}.{ending}', lines)


TINY = {
    'model.emb_dim': 32,
    'model.mlp_dim': 64,
    'model.num_heads': 2,
    'model.max_len': 64,
    'model.dropout_rate': 0.0,
    'model.position': 'learned',
    'data.tokenizer': 'symbol',
    'data.length': 24,
    'data.batching': 'pad',
    'optimizer.learning_rate': 3e-3,
    'optimizer.warmup_steps': 20,
    'train.batch_size': 64,
    'mesh.data': 1,
}


STACKS = {'encoder': ('encoder',), 'decoder': ('decoder',), 'encoder_decoder': ('encoder', 'decoder')}


@dataclasses.dataclass(frozen=True)
class Made:
    """A run on a made set.

    Attributes:
      splits: its records, as they were written.
      home: the workdir.
      found: the test scores, as result.json has them.
    """

    splits: dict[str, list[Row]]
    home: pathlib.Path
    found: dict[str, float]

    def column(self, split_name: str, name: str) -> list[Any]:
        return [row[name] for row in self.splits[split_name]]


def run(
    place: pathlib.Path, make: Callable[[random.Random], Row], ending: str, count: int, family: str, **changes: Any
) -> Made:
    """Writes the splits of a made set, and trains on them."""
    splits = {name: split(make, count if name == 'train' else 300, seed) for name, seed in SPLITS.items()}
    write(place, ending, splits)
    own = {f'model.num_{stack}_layers': 1 for stack in STACKS[family]}
    own |= {name.replace('__', '.'): value for name, value in changes.items()}
    own |= {'data.path': str(place), 'model.family': family}
    train_command.train_and_evaluate(config.override(Config(), {**TINY, **own}), str(place / 'run'))
    return Made(splits, place / 'run', json.loads((place / 'run' / 'result.json').read_text())['test'])


def bag(estimator: Any) -> Any:
    """A linear model of how often each word occurs."""
    return make_pipeline(bags.CountVectorizer(token_pattern=r'\S+'), estimator)


# ---------------------------------------------------------------------------------------- what each head learns


def beats_a_bag_of_words(made: Made, margin: float) -> None:
    """The run is better by `margin` than the largest class, and than words of both texts counted apart."""
    train, test = (
        [' '.join([row['text'], *(f'second_{word}' for word in row.get('pair', '').split())]) for row in rows]
        for rows in (made.splits['train'], made.splits['test'])
    )
    labels, right = made.column('train', 'label'), np.array(made.column('test', 'label'))
    linear = np.mean(bag(LogisticRegression(max_iter=1000)).fit(train, labels).predict(test) == right)
    largest = np.mean(right == max(set(labels), key=labels.count))
    assert made.found['accuracy'] > max(linear, largest) + margin
    assert made.found['f1_micro'] == pytest.approx(made.found['accuracy'])
    assert {'f1_macro', 'matthews'} <= made.found.keys()


@pytest.mark.slow
def test_a_decoder_classifies_by_the_order_of_words(tmp_path: pathlib.Path) -> None:
    made = run(
        tmp_path, before, 'tsv', 1000, 'decoder', train__objective='classification', train__num_steps=150,
        model__pooling='last', evaluate__positive_label='yes', data__length=12,
    )  # fmt: skip
    beats_a_bag_of_words(made, margin=0.3)
    assert made.found['f1'] > 0.9


@pytest.mark.proof
def test_an_encoder_compares_two_texts(tmp_path: pathlib.Path) -> None:
    made = run(
        tmp_path, same_order, 'jsonl', 4000, 'encoder', train__objective='classification', train__num_steps=600,
        model__position='rope', model__num_encoder_layers=2, model__num_token_types=2, data__length=12,
        evaluate__positive_label='same',
    )  # fmt: skip
    beats_a_bag_of_words(made, margin=0.3)


@pytest.mark.proof
def test_an_encoder_decoder_weighs_words_by_their_places(tmp_path: pathlib.Path) -> None:
    made = run(
        tmp_path, leaning, 'tsv', 1500, 'encoder_decoder', train__objective='regression', train__num_steps=200,
        data__length=8,
    )  # fmt: skip
    ridge = bag(Ridge()).fit(made.column('train', 'text'), made.column('train', 'label'))
    right, said = np.array(made.column('test', 'label')), ridge.predict(made.column('test', 'text'))
    linear = scores.regression_scores(right, said)
    assert made.found['pearson'] > max(linear['pearson'], 0) + 0.6
    assert made.found['spearman'] > max(linear['spearman'], 0) + 0.6
    assert made.found['mean_squared_error'] < min(linear['mean_squared_error'], right.var()) / 4
    assert made.found['loss'] == pytest.approx(made.found['mean_squared_error'], rel=1e-5)


@pytest.fixture(scope='module')
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return run(
        tmp_path_factory.mktemp('tagger'), titled, 'conll', 500, 'encoder', train__objective='token_classification',
        train__num_steps=150, model__position='rope', data__length=20, data__batching='bucket', data__num_buckets=2,
    )  # fmt: skip


@pytest.mark.slow
def test_an_encoder_tags_words_by_those_before(tagger: Made) -> None:
    linear = make_pipeline(DictVectorizer(), LogisticRegression(max_iter=1000))
    words = [{'word': word} for words in tagger.column('train', 'tokens') for word in words]
    linear.fit(words, [tag for tags in tagger.column('train', 'tags') for tag in tags])
    said = [linear.predict([{'word': word} for word in words]) for words in tagger.column('test', 'tokens')]
    gold = tagger.column('test', 'tags')
    for baseline in (said, [['O'] * len(tags) for tags in gold]):
        assert tagger.found['entity_f1'] > scores.entity_scores(gold, baseline)['entity_f1'] + 0.5
    assert tagger.found['entity_precision'] > 0.9 and tagger.found['entity_recall'] > 0.9
    assert tagger.found['accuracy'] > 0.9


@pytest.fixture(scope='module')
def reader(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return run(
        tmp_path_factory.mktemp('reader'), what_follows, 'jsonl', 3000, 'encoder',
        train__objective='question_answering', train__num_steps=600, optimizer__learning_rate=0.006,
        model__position='rope', model__num_encoder_layers=2, data__length=20, data__stride=8,
        evaluate__null_threshold=0.0, evaluate__answer_length=3,
    )  # fmt: skip


@pytest.mark.proof
def test_an_encoder_finds_answers_in_windows(reader: Made) -> None:
    contexts, asked = reader.column('test', 'context'), reader.column('test', 'question')
    gold = [[answer['text'] for answer in answers] for answers in reader.column('test', 'answers')]
    texts = [' '.join(options) for options in gold]
    constants = [[text] * len(gold) for text in set(texts)]
    overlaps = [
        ' '.join(
            ' '.join(word for word in sentence.split() if word != key)
            for sentence in context.split(' . ') if key in sentence.split()
        )
        for context, key in zip(contexts, asked, strict=True)
    ]  # fmt: skip
    for name in ('squad_exact_match', 'squad_f1'):
        best = max(scores.squad_scores(said, gold)[name] for said in [*constants, overlaps])
        assert reader.found[name] > best + (0.3 if name == 'squad_exact_match' else 0.1), name
    assert reader.found['no_answer_accuracy'] > 0.8 and reader.found['has_answer_f1'] > 0.8
    batches = loaded(reader, 64)[1]
    assert batches.num_examples > 1.5 * len(gold)  # most contexts take several windows


def loaded(made: Made, batch_size: int, **changes: Any) -> tuple[Run, pipeline.Batches]:
    """A trained run, and its test split in batches of a size."""
    trained = Run.load(made.home)
    overrides = {'train.batch_size': batch_size, **{name.replace('__', '.'): v for name, v in changes.items()}}
    cfg = config.override(trained.config, overrides)
    return trained, pipeline.Batches(cfg, trained.tokenizers, 'test', training=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'changes'),
    [
        ('tagger', {}),
        pytest.param('reader', {'data__batching': 'bucket', 'data__num_buckets': 2}, marks=pytest.mark.proof),
    ],
)
def test_scores_do_not_depend_on_the_batches(
    name: str, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(name)
    trained, batches = loaded(made, 7, **changes)
    assert len(batches.records) % 7  # the last batch has rows of padding
    mesh = meshes.make_mesh(trained.config.mesh)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.make_rules(trained.config.mesh)):
        score = scorer.make_scorer(trained.model, batches.config, mesh)
        found = score(trained.variables, batches, None, trained.tokenizers)
    assert found == pytest.approx({key: made.found[key] for key in found}, rel=1e-5)
    assert set(found) >= {key.removeprefix('valid/') for key in scorer.score_names(trained.config)}


DATA = ROOT.parent / 'shared' / 'data'  # real sets, where they are


@pytest.mark.proof
@pytest.mark.skipif(not (DATA / 'lang_id').is_dir(), reason=f'no {DATA}/lang_id')
def test_an_encoder_tells_languages_better_than_a_bag_of_words(tmp_path: pathlib.Path) -> None:
    """32 languages, 4,000 texts, 300 steps: 0.75 right, words counted 0.62."""
    own = {
        **TINY, 'data.path': str(DATA / 'lang_id'), 'train.objective': 'classification', 'model.family': 'encoder',
        'model.num_encoder_layers': 1, 'train.num_steps': 300, 'train.eval_batches': 2, 'data.train_examples': 4000,
        'data.tokenizer': 'sentencepiece', 'data.tokenizer_vocab_size': 2000, 'data.overlong': 'truncate',
        'data.length': 48, 'data.batching': 'bucket', 'data.num_buckets': 2, 'evaluate.max_examples': 1000,
    }  # fmt: skip
    cfg = config.override(Config(), own)
    train_command.train_and_evaluate(cfg, str(tmp_path / 'run'))
    found = json.loads((tmp_path / 'run' / 'result.json').read_text())['test']
    splits = {'train': [*mixture.load(cfg, 'train')], 'test': mixture.load(cfg, 'test')[:1000]}
    beats_a_bag_of_words(Made(splits, tmp_path / 'run', found), margin=0.05)


# ------------------------------------------------------------------------------------------------------ in a family


SMALL = Model(
    vocab_size=11, encoder_vocab_size=11, emb_dim=8, mlp_dim=12, num_heads=2, max_len=8, dropout_rate=0.0,
    position='learned', num_classes=3, pooler=True,
)  # fmt: skip
HEADS = {  # of each objective its parts, beside the stacks
    'classification': {'pooler', 'class_head'},
    'regression': {'pooler', 'number_head'},
    'token_classification': {'tag_head'},
    'question_answering': {'span_head'},
}
BATCH = {
    'inputs': np.array([[1, 7, 8, 9, 2], [1, 10, 2, 0, 0]], np.int32),
    'positions': np.array([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]], np.int32),
}


def small(family: str, **changes: Any) -> tuple[nn.Module, dict[str, np.ndarray]]:
    """A model and its batch of two rows, the second of which is padded."""
    depth = {f'num_{stack}_layers': 2 for stack in STACKS[family]}
    cfg = dataclasses.replace(SMALL, family=family, **depth, **changes)
    both = {f'encoder_{name}': values for name, values in BATCH.items()} if family == 'encoder_decoder' else {}
    return build(cfg), BATCH | both


def every_head(model: Any, batch: dict[str, np.ndarray]) -> list[jax.Array]:
    return [objectives.OBJECTIVES[name].method(model, batch) for name in HEADS]


@pytest.mark.slow
@pytest.mark.parametrize('family', STACKS)
def test_each_head_learns_with_all_of_its_stacks(family: str) -> None:
    model, batch = small(family)
    rng = np.random.default_rng(0)
    real = (batch['positions'] >= 0).astype(np.float32)
    batch = {**batch, 'targets': np.array([[0, 1, 2, 1, 0]] * 2, np.int32), 'weights': real}
    labels = {
        'classification': np.array([0, 2], np.int32),
        'regression': np.array([0.5, -1], np.float32),
        'token_classification': np.zeros(2, np.int32),
        'question_answering': np.array([[1, 3], [0, 0]], np.int32),
    }
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), batch, method=every_head))
    params = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), sharding.unboxed(shapes)['params']
    )

    def losses(params: Any) -> jax.Array:
        found = []
        for outputs, name in zip(model.apply({'params': params}, batch, method=every_head), HEADS, strict=True):
            labelled = {**batch, 'labels': labels[name], 'label_weights': np.ones(2, np.float32)}
            total, weight = objectives.OBJECTIVES[name].scores(outputs, labelled)['loss']
            found.append(total / weight)
        return jnp.stack(found)

    found = jax.jit(jax.jacrev(losses))(params)
    heads = set().union(*HEADS.values())
    assert found.keys() == {*heads, 'embed', *STACKS[family]} | ({'encoder_embed'} & found.keys())
    for number, name in enumerate(HEADS):
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            own = path[0].key not in heads - HEADS[name]
            assert bool(np.any(np.asarray(leaf[number]) != 0)) == own, (name, jax.tree_util.keystr(path))


@pytest.mark.slow
def test_the_last_vector_of_a_decoder_is_the_last_tokens_whatever_the_padding() -> None:
    x_BTD = jnp.arange(24.0).reshape(2, 4, 3)
    for real, places in (
        ([[1, 1, 1, 1], [1, 1, 0, 0]], [3, 1]),
        ([[0, 0, 1, 1], [0, 1, 0, 0]], [3, 1]),  # padding in front
    ):
        found = POOLINGS['last'](x_BTD, jnp.array(real, bool))
        np.testing.assert_array_equal(found, x_BTD[jnp.arange(2), jnp.array(places)])
    model, batch = small('decoder', pooling='last', pooler=False)
    params = model.init(jax.random.key(0), batch, method=classify)

    @jax.jit
    def pool(inputs: np.ndarray, positions: np.ndarray) -> tuple[jax.Array, jax.Array]:
        given = {'inputs': inputs, 'positions': positions}
        pooled = model.apply(params, given, method='pool')
        return pooled, model.apply(params, given, DropoutRates(), method='features')

    pooled, features = pool(batch['inputs'], batch['positions'])
    np.testing.assert_array_equal(pooled, features[jnp.arange(2), jnp.array([4, 2])])
    alone, _ = pool(*(np.stack([values[1, [3, 4, 0, 1, 2]]] * 2) for values in (batch['inputs'], batch['positions'])))
    np.testing.assert_allclose(alone[0], pooled[1], atol=1e-6)  # the same row, padding in front
    changed = batch['inputs'].copy()
    changed[1, 3:] = 5
    np.testing.assert_array_equal(pool(changed, batch['positions'])[0], pooled)
    for place in range(3):  # it has seen every token
        changed = batch['inputs'].copy()
        changed[1, place] = 6
        other = pool(changed, batch['positions'])[0]
        assert np.abs(np.asarray(other - pooled))[1].max() > 1e-4 and (other[0] == pooled[0]).all()


# ---------------------------------------------------------------------------------------- judging what is predicted


def test_best_spans_are_those_of_a_search() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((20, 7, 2)).astype(np.float32)
    weights = (rng.random((20, 7)) < 0.7).astype(np.float32)
    weights[:, [0, 3]] = 1
    for longest in (1, 2, 4, 30):
        found = best_spans(jnp.asarray(logits), {'weights': jnp.asarray(weights)}, longest)
        for row, (first, last, score, none) in enumerate(zip(*map(np.asarray, found), strict=True)):
            legal = [
                (logits[row, a, 0] + logits[row, b, 1], a, b)
                for a in range(1, 7) for b in range(a, min(a + longest, 7)) if weights[row, a] and weights[row, b]
            ]  # fmt: skip
            best, a, b = max(legal)
            assert (first, last) == (a, b) and score == pytest.approx(best)
            assert none == pytest.approx(logits[row, 0].sum())


def split_of(
    objective: str,
    records: list[Row] | None,
    tokens: Tokenizers,
    family: str = 'encoder',
    batch_size: int = 2,
    **changes: Any,
) -> pipeline.Batches:
    """The batches of an evaluation on records; None: those of data.path."""
    own = {'train.objective': objective, 'train.batch_size': batch_size, 'model.family': family, 'train.num_steps': 1}
    own |= {name.replace('__', '.'): value for name, value in changes.items()}
    return pipeline.Batches(config.override(Config(), own), tokens, 'test', training=False, records=records)


def judged(
    batches: pipeline.Batches, tokens: Tokenizers, outputs: Callable[[int, pipeline.Batch], Any]
) -> dict[str, float]:
    """The scores of `outputs(step, batch)`."""
    made = []
    for step in range(int(batches.steps_per_epoch)):
        batch = batches.batch(step)
        made.append(scorer.Predicted(step, batch, outputs(step, batch)))
    return scorer.JUDGES[TASKS[batches.config.train.objective].judge].scores(made, batches, tokens)


def test_classes_are_judged_without_rows_of_padding() -> None:
    tokens = Tokenizers(None, Byte(), ('no', 'yes'))
    labels, said = ['no', 'yes', 'yes', 'no', 'no'], np.array([0, 1, 0, 1, 0])
    records = [{'label': label, 'text': 'a'} for label in labels]
    batches = split_of('classification', records, tokens, evaluate__positive_label='yes', data__batching='pad')
    assert int(batches.steps_per_epoch) == 3

    def outputs(step: int, batch: pipeline.Batch) -> np.ndarray:
        return np.append(said, 1)[2 * step : 2 * step + 2]  # of the padding: yes

    found = judged(batches, tokens, outputs)  # of 'yes' 1 is right, 1 too many, 1 missing; of 'no' 2, 1, 1
    assert found == pytest.approx(
        {'f1_macro': (1 / 2 + 2 / 3) / 2, 'f1_micro': 3 / 5, 'matthews': (1 * 2 - 1) / 6, 'f1': 1 / 2}
    )


def test_numbers_are_judged_without_rows_of_padding() -> None:
    tokens, labels, said = Tokenizers(None, Byte()), [1.0, 2.0, 4.0], np.array([2.0, 3.0, 3.0, 1000.0], np.float32)
    batches = split_of('regression', [{'label': x, 'text': 'a'} for x in labels], tokens, data__batching='pad')
    found = judged(batches, tokens, lambda step, batch: said[2 * step : 2 * step + 2])
    expected = scores.regression_scores(np.array(labels), said[:3])
    assert found == pytest.approx(expected) and found['mean_squared_error'] == 1 and found['spearman'] < 1


def test_texts_are_ranked_among_the_different_ones_of_the_split() -> None:
    """Rows a b, a c with the negative a, d b with d: of the texts a b c d, a is nearest to the query b.

    The query a is itself no candidate: b is its nearest, and c, on the other side, its last of three. Of d, for which
    all are alike, b comes last: three, as d is left out, too.
    """
    texts = [['a', 'b'], ['a', 'c', 'a'], ['d', 'b', 'd']]
    records = [{'text': own[0], 'positive': own[1], 'texts': own} for own in texts]
    vectors = {'a': [1, 0, 0], 'b': [0.8, 0.6, 0], 'c': [-1, 0, 0], 'd': [0, 0, 1]}
    batches = split_of('contrastive', records, Tokenizers(None, Byte()), data__batching='pad')

    def outputs(step: int, batch: dict[str, np.ndarray]) -> np.ndarray:
        found = np.full((2, 3, 3), 9.0, np.float32)  # of the padding: nearest to all
        for row, own in enumerate(texts[2 * step : 2 * step + 2]):
            found[row, : len(own)] = [vectors[text] for text in own]
        return found

    found = judged(batches, Tokenizers(None, Byte()), outputs)
    assert found['recall_at_1'] == pytest.approx(1 / 3) and found['recall_at_5'] == 1
    assert found['mean_reciprocal_rank'] == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)


def test_a_text_that_only_asks_leaves_no_other_out() -> None:
    """None of four queries is a candidate, and of the four candidates each query is furthest from its own."""
    records = [{'text': q, 'positive': p, 'texts': [q, p]} for q, p in ('aw', 'bx', 'cy', 'dz')]
    batches = split_of('contrastive', records, Tokenizers(None, Byte()), batch_size=4, data__batching='pad')
    vectors = np.stack([-np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)], axis=1)
    found = judged(batches, Tokenizers(None, Byte()), lambda step, batch: vectors)
    assert (found['recall_at_1'], found['mean_reciprocal_rank']) == (0, 1 / 4)


@pytest.mark.parametrize('family', STACKS)
@pytest.mark.parametrize(('length', 'seen'), [(10, 4), (9, 4), (8, 3), (6, 3), (5, 2), (4, 2), (3, 2)])
def test_tags_of_words_beyond_the_length_are_o(length: int, seen: int, family: str) -> None:
    """'ab cd ef' is 8 bytes: CLS and SEP leave length - 2; a word counts if its first byte is there."""
    tokens = Tokenizers(Byte() if family == 'encoder_decoder' else None, Byte(), ('O', 'B-X', 'I-X'))
    records = [{'tokens': ['ab', 'cd', 'ef'], 'tags': ['B-X'] * 3}, {'tokens': ['g'], 'tags': ['B-X']}]
    batches = split_of('token_classification', records, tokens, family, batch_size=3, data__length=length)
    # Right at the first token of each word, I-X at all others and in the rows of padding.
    found = judged(batches, tokens, lambda step, batch: np.where(batch['weights'] > 0, batch['targets'], 2))
    assert found == pytest.approx(
        {'entity_precision': 1, 'entity_recall': seen / 4, 'entity_f1': 2 * seen / (4 + seen)}
    )


def test_plain_tags_of_words_beyond_the_length_are_wrong() -> None:
    """'ab cd ef' is 8 bytes, of which CLS and SEP leave 4: two words; both tags have one word less than they should."""
    tokens = Tokenizers(None, Byte(), ('NOUN', 'VERB'))
    records = [{'tokens': ['ab', 'cd', 'ef'], 'tags': ['NOUN', 'VERB', 'VERB']}]
    batches = split_of('token_classification', records, tokens, batch_size=1, data__length=6)

    def outputs(step: int, batch: dict[str, np.ndarray]) -> np.ndarray:
        return np.where(batch['weights'] > 0, batch['targets'], 0)

    found = scorer.judge_plain_tags(
        [scorer.Predicted(0, batch := batches.batch(0), outputs(0, batch))], batches, tokens
    )
    assert found == pytest.approx({'tag_accuracy': 2 / 3, 'tag_f1_macro': (1 + 2 / 3) / 2})


def test_tags_are_those_of_the_first_tokens() -> None:
    tokens = Tokenizers(None, Byte(), ('O', 'B-X', 'I-X'))
    records = [{'tokens': ['ab', 'c'], 'tags': ['B-X', 'I-X']}]
    batches = split_of('token_classification', records, tokens, batch_size=1)
    for said, right in (
        ([1, 1, 0, 0, 2, 0], True),  # CLS a b space c SEP
        ([2, 1, 1, 1, 2, 1], True),
        ([0, 1, 2, 2, 0, 0], False),
        ([0, 0, 1, 0, 2, 0], False),
    ):
        outputs = np.array([said + [1] * 99])[:, : batches.shapes[0][0]]
        assert (judged(batches, tokens, lambda step, batch, o=outputs: o)['entity_f1'] == 1) == right


def test_a_word_without_a_token_is_o() -> None:
    tokens = Tokenizers(None, HubTokenizer.load(FILES['bert']().to_str().encode()), ('O', 'B-X', 'I-X'))
    records = [{'tokens': ['the', '\u200d', 'fox'], 'tags': ['B-X', 'B-X', 'B-X']}]  # BERT leaves out format characters
    batches = split_of('token_classification', records, tokens)
    found = judged(batches, tokens, lambda step, batch: np.ones_like(batch['inputs']))
    assert found == pytest.approx({'entity_precision': 1, 'entity_recall': 2 / 3, 'entity_f1': 4 / 5})


def test_what_is_left_out_as_bad_leaves_the_others_with_their_records(tmp_path: pathlib.Path) -> None:
    toy_data.write(tmp_path / 'test.conll', ['a B-Y', 'b O', '', 'c O', 'd B-X', 'e I-X', '', 'f B-Y', '', 'g B-X'])
    tokens = Tokenizers(None, Byte(), ('O', 'B-X', 'I-X'))
    batches = split_of(
        'token_classification', None, tokens, data__path=str(tmp_path), data__bad_lines='skip',
        data__cache_dir=str(tmp_path / 'cache'),
    )  # fmt: skip
    assert '2 examples (2 skipped as bad)' in batches.summary
    found = judged(batches, tokens, lambda step, batch: batch['targets'])
    assert found == {'entity_precision': 1, 'entity_recall': 1, 'entity_f1': 1}


def test_parts_of_a_mixture_are_judged_by_their_own_records(tmp_path: pathlib.Path) -> None:
    toy_data.write(tmp_path / 'a' / 'test.conll', ['a B-X', '', 'b O', 'c B-X', 'd I-X', '', 'e O'])
    toy_data.write(tmp_path / 'b' / 'test.conll', ['f O', 'g B-X', '', 'h B-X', 'i B-X'])
    tokens = Tokenizers(None, Byte(), ('O', 'B-X', 'I-X'))
    batches = split_of(
        'token_classification', None, tokens, data__cache_dir=str(tmp_path / 'cache'),
        data__mixture=(f'path={tmp_path}/a', f'path={tmp_path}/b'),
    )  # fmt: skip
    assert len(batches.parts) == 2 and len(batches.records) == 5
    found = judged(batches, tokens, lambda step, batch: batch['targets'])
    assert found == {'entity_precision': 1, 'entity_recall': 1, 'entity_f1': 1}


TEXTS = ['der Fluss heißt Elbe, in Köln', 'was ist das?', 'the quick brown fox'] * 20
TOKENIZERS = {
    'byte': Byte,
    'char': lambda: Char.train(TEXTS),
    'symbol': lambda: Symbol.train(TEXTS),
    'sentencepiece': lambda: SentencePiece.train(TEXTS, Data(tokenizer_vocab_size=310)),
    'normalized': lambda: SentencePiece.train(TEXTS, Data(tokenizer_vocab_size=310, normalization='nfkc_lower')),
    **{name: lambda make=make: HubTokenizer.load(make().to_str().encode()) for name, make in FILES.items()},
}
RIVER = 'Der ﬂotte Fluss heißt 語 Elbe, e\u0301tait in Köln; ' * 3 + 'und der Rhein.'
QUESTIONS = [
    {'question': 'Was?', 'context': RIVER, 'answers': [(RIVER.index(text), text)], 'where': ''}
    for text in ('Elbe', 'ﬂotte Fluss', 'e\u0301tait in', 'Köln', 'heißt', 'Rhein')
] + [{'question': 'Wer?', 'context': RIVER, 'answers': [], 'where': ''}]


def as_labelled(step: int, batch: pipeline.Batch) -> tuple[np.ndarray, ...]:
    """The answer of each window, where it has one, else none."""
    has = batch['labels'][:, 0] > 0
    first, last = np.where(has[:, None], batch['labels'], 2).T
    return first, last, np.where(has, 3.0, -3.0), np.zeros(len(has))


@pytest.mark.parametrize('family', STACKS)
@pytest.mark.parametrize('kind', TOKENIZERS)
def test_answers_are_cut_out_of_their_contexts(kind: str, family: str) -> None:
    made = TOKENIZERS[kind]()
    tokens = Tokenizers(made if family == 'encoder_decoder' else None, made)
    batches = split_of(
        'question_answering', QUESTIONS, tokens, family, batch_size=8, data__length=32, data__stride=12,
        data__question_length=3, evaluate__null_threshold=0.0,
    )  # fmt: skip
    assert batches.num_examples > len(QUESTIONS)  # several windows
    found = judged(batches, tokens, as_labelled)
    assert found['squad_exact_match'] == 1
    assert found['no_answer_accuracy'] == 1
    always = config.override(batches.config, {'evaluate.null_threshold': None, 'train.batch_size': 3})
    again = pipeline.Batches(always, tokens, 'test', training=False, records=QUESTIONS)
    without = judged(again, tokens, as_labelled)
    assert without['no_answer_accuracy'] == 0 and without['has_answer_f1'] == found['has_answer_f1']


def test_the_best_answer_of_all_windows_by_hand() -> None:
    tokens = Tokenizers(None, Byte())
    records = [{'question': 'q', 'context': 'abcdefghij', 'answers': [(7, 'h')]}]
    # CLS q SEP, then 4 tokens: abcd, cdef, efgh, ghij, SEP
    how: dict[str, Any] = {'data__length': 8, 'data__stride': 2, 'batch_size': 5}
    first, last = np.array([3, 4, 6, 5, 3]), np.array([6, 4, 6, 5, 3])  # abcd, d, h, i
    score, none = np.array([1.0, 2, 5, 4, 99]), np.array([7.0, 6, 9, 8, -99])

    def exact(threshold: float | None, **changes: np.ndarray) -> float:
        batches = split_of('question_answering', records, tokens, **how, evaluate__null_threshold=threshold)
        assert batches.num_examples == 4
        outputs = {'first': first, 'last': last, 'score': score, 'none': none, **changes}
        return judged(batches, tokens, lambda step, batch: tuple(outputs.values()))['squad_exact_match']

    assert exact(None) == 1  # of window 2; what the row of padding says is nothing
    assert exact(None, score=np.array([1.0, 2, 5, 6, 99])) == 0
    # no answer counts as in the window where it is least likely: 6, which is 1 more than 5
    assert (exact(1.0), exact(0.99)) == (1, 0)
    assert exact(0.99, none=np.array([7.0, 5.9, 9, 8, -99])) == 1
    # position 0 is never an answer, whatever its score: the best of the others is i, then h
    nowhere = np.array([3, 4, 0, 5, 3]), np.array([6, 4, 0, 5, 3])
    assert exact(None, first=nowhere[0], last=nowhere[1], score=np.array([1.0, 2, 99, 4, 99])) == 0
    there = np.array([3, 4, 0, 4, 3]), np.array([6, 4, 0, 4, 3])
    assert exact(None, first=there[0], last=there[1], score=np.array([1.0, 2, 99, 4, 99])) == 1
