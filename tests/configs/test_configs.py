"""Every file under configs/: it loads with each of its arguments, says how to run it, and trains at its smoke size.

Sets of TFDS are made here, with the features that the real ones have.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import recipes
import toy_data
from tformer import checks, config, errors
from tformer.commands import attention, inspect, scoring
from tformer.commands import train as train_command
from tformer.commands.run import Run
from tformer.config.tasks import TASKS
from tformer.data.batches import mixture, pipeline
from tformer.data.examples import corrupt
from tformer.data.tokenizers import tokenizers
from tformer.training import loop as train_lib

# --------------------------------------------------------------------------------------------- every file, every size


@pytest.mark.slow
@pytest.mark.parametrize('file', recipes.FILES)
def test_every_size_loads_and_fits_together(file: str, monkeypatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = recipes.arguments(file)
    assert 'smoke' in sizes
    for size in ('', *sizes, *(f'{size},smoke' for size in sizes if size != 'smoke')):
        loaded = recipes.load(f'{file}:{size}')
        checks.check_here(loaded)
        layers = max(loaded.model.num_encoder_layers, loaded.model.num_decoder_layers)
        if 'smoke' in size:
            assert loaded.train.num_steps == 2 and loaded.model.emb_dim <= 32 and layers <= 4, size
        if 'files' in size:
            assert loaded.data.source == 'files'


@pytest.mark.slow
@pytest.mark.parametrize('file', recipes.FILES)
def test_its_header_has_commands_whose_configs_load(file: str) -> None:
    header = recipes.header(file)
    commands = re.findall(r'--config=configs/([\w/]+)\.py(\S*)', header)
    assert file in [name for name, _ in commands]
    for name, argument in commands:
        checks.check_here(recipes.load(f'{name}{argument}'))
    fields = config.field_types()
    for name in re.findall(r'--config\.(\w+\.\w+)=', header):
        assert name in fields
    if recipes.load(file).data.source == 'tfds':
        assert 'files' in recipes.arguments(file) and 'files --config.data.path=DIR' in header
        header = ' '.join(header.split())
        for word in ('TFDS:', 'DIR holds {', 'files,smoke`', 'Machine and time: not run here', 'Expected', 'et al.'):
            assert word in header, word


@pytest.mark.slow
def test_a_recipe_is_what_it_builds_on_with_differences() -> None:
    for name, on in (('bert', 'architectures/bert'), ('squad', 'bert'), ('t5', 'architectures/t5'),
                     ('text_to_text', 't5'), ('bart', 'architectures/bart'), ('cnn_dailymail', 'bart'),
                     ('gpt2', 'architectures/gpt2'), ('wmt14_en_de', 'architectures/original')):  # fmt: skip
        sizes = {'large', 'big', 'v1_1_base', 'smoke'} & set(recipes.arguments(name)) & set(recipes.arguments(on))
        for size in {'', *sizes} - ({'smoke'} if name == 't5' else set()):  # whose sentinels are more tokens
            ours, theirs = recipes.stated(f'{name}:{size}').model, recipes.stated(f'{on}:{size}').model
            ours = dataclasses.replace(ours, pooling=theirs.pooling, pooler=theirs.pooler)
            assert ours == theirs, (name, size)
    for file in ('bert', 'text_to_text'):
        every = config.changes(f'{recipes.FOLDER}/{file}.py:smoke')
        assert every['train.num_steps'] == 2 and every['model.emb_dim'] == 32
        smoke = config.override(recipes.stated(file), every)
        assert config.to_dict(smoke) == config.to_dict(recipes.stated(f'{file}:smoke'))


def test_the_numbers_of_the_papers() -> None:
    base, big = recipes.load('wmt14_en_de'), recipes.load('wmt14_en_de:big')
    assert (base.train.num_steps, big.train.num_steps) == (100_000, 300_000)
    assert (base.train.keep_last, big.train.keep_last) == (5, 20)
    assert base.train.checkpoint_every * 0.4 == big.train.checkpoint_every * 1.0 == 600  # seconds (section 5.2)
    for run in (base, big):
        assert run.train.eval_every % run.train.checkpoint_every == 0  # or an evaluation's takes the place of one
    assert (base.model.dropout_rate, big.model.dropout_rate, base.train.label_smoothing) == (0.1, 0.3, 0.1)
    assert (base.optimizer.beta1, base.optimizer.beta2, base.optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert (base.decode.beam_size, base.decode.length_penalty) == (4, 0.6)
    first, second = recipes.load('bert'), recipes.load('bert:512')
    assert first.train.num_steps + second.train.num_steps == 1_000_000 and first.train.batch_size == 256
    reached = first.optimizer.learning_rate * first.optimizer.final_fraction
    assert second.optimizer.learning_rate == pytest.approx(reached)
    warmup = {task: recipes.load(f'glue:{task}').optimizer.warmup_steps for task in ('mnli', 'rte')}
    assert warmup == {'mnli': 3682, 'rte': 23}  # a tenth of 3 epochs of 392,702 and 2,490 in batches of 32
    t5 = recipes.load('t5').data
    (hidden,), (spans,) = corrupt.span_counts(np.array([568]), t5.mask_rate, t5.mean_span_length)
    assert (568 - hidden + spans + 1, hidden + spans + 1) == (t5.encoder_length, t5.length) == (512, 114)


# ---------------------------------------------------------------------------------------------------------- the data

SETS = r"""
import json, sys
import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.dataset_builders.conll import conll_dataset_builder_utils as conll

f = tfds.features
answers = lambda: f.Sequence({'text': f.Text(), 'answer_start': np.int32})
sentences = {'sentence1': f.Text(), 'sentence2': f.Text()}
FEATURES = {
    'wmt14_translate/de-en': f.Translation(['de', 'en']),
    'glue/sst2': {'sentence': f.Text(), 'label': f.ClassLabel(names=['negative', 'positive']), 'idx': np.int32},
    'glue/stsb': {**sentences, 'label': np.float32, 'idx': np.int32},
    'glue/mnli': {'premise': f.Text(), 'hypothesis': f.Text(), 'idx': np.int32,
                  'label': f.ClassLabel(names=['entailment', 'neutral', 'contradiction'])},
    'squad/v2.0': {'id': np.str_, 'title': f.Text(), 'context': f.Text(), 'plausible_answers': answers(),
                   'question': f.Text(), 'is_impossible': np.bool_, 'answers': answers()},
    'conll2003/conll2003': dict(conll.CONLL_2003_ORDERED_FEATURES),
    'cnn_dailymail/plain': {'article': f.Text(), 'highlights': f.Text(), 'publisher': f.Text(), 'id': f.Text()},
    'c4/en': {name: f.Text() for name in ('text', 'url', 'content-type', 'content-length', 'timestamp')},
}
ROWS = json.load(open(sys.argv[1]))

class Stored(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')

    def rows(self):
        return ROWS[f'{self.name}/{self.builder_config.name}']

    def _info(self):
        features = FEATURES[f'{self.name}/{self.builder_config.name}']
        features = f.FeaturesDict(features) if isinstance(features, dict) else features
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {split: enumerate(rows) for split, rows in self.rows().items()}

    def _generate_examples(self):
        raise NotImplementedError

for name in dict.fromkeys(place.split('/')[0] for place in FEATURES):
    kinds = [place.split('/')[1] for place in FEATURES if place.startswith(name + '/')]
    title = ''.join(word.title() for word in name.split('_'))
    builder = type(title, (Stored,), {'BUILDER_CONFIGS': [tfds.core.BuilderConfig(name=kind) for kind in kinds]})
    for kind in kinds:
        builder(config=kind, data_dir=sys.argv[2], file_format='array_record').download_and_prepare()
assert 'tensorflow' not in sys.modules
"""

SPLITS = (('train', 32, 0), ('validation', 6, 1), ('test', 6, 2))


def pairs(text: str) -> dict[str, str]:
    return {'en': text, 'de': text[::-1]}


def opinion(text: str) -> dict[str, object]:
    return {'sentence': text, 'label': 'positive' if 'bird' in text else 'negative', 'idx': 0}


def likeness(text: str) -> dict[str, object]:
    return {'sentence1': text, 'sentence2': text[::-1], 'label': float(len(text) % 6), 'idx': 0}


def inference(text: str) -> dict[str, object]:
    label = ('entailment', 'neutral', 'contradiction')[len(text) % 3]
    return {'premise': text, 'hypothesis': text[:9], 'label': label, 'idx': 0}


def asked(text: str) -> dict[str, object]:
    place = text.find('bird')
    answers = {'text': ['bird'], 'answer_start': [place]} if place >= 0 else {'text': [], 'answer_start': []}
    more = {'id': text, 'title': '', 'plausible_answers': {'text': [], 'answer_start': []}, 'is_impossible': place < 0}
    return {'context': text, 'question': 'Which animal?', 'answers': answers, **more}


def tagged(text: str) -> dict[str, object]:
    tags = {'bird': 'B-PER', 'river': 'B-LOC', 'stone': 'B-MISC', 'tree': 'B-ORG'}
    words = text.split()
    same = len(words)
    return {'tokens': words, 'pos': ['NN'] * same, 'chunks': ['O'] * same, 'ner': [tags.get(w, 'O') for w in words]}


def article(text: str) -> dict[str, str]:
    return {'article': f'{text}. {text[::-1]}.', 'highlights': f'{text[:9]}\n{text[-9:]}', 'publisher': '', 'id': ''}


def page(text: str) -> dict[str, str]:
    document = '. '.join(text[i:] for i in range(0, 12, 4)) + '.'
    return {'text': document, **dict.fromkeys(('url', 'content-type', 'content-length', 'timestamp'), '')}


ROWS: dict[str, Callable[[str], dict[str, object]]] = {
    'wmt14_translate/de-en': pairs,
    'glue/sst2': opinion,
    'glue/stsb': likeness,
    'glue/mnli': inference,
    'squad/v2.0': asked,
    'conll2003/conll2003': tagged,
    'cnn_dailymail/plain': article,
    'c4/en': page,
}
RENAMED = {  # splits with names of their own
    'glue/mnli': {'validation': 'validation_matched', 'test': 'validation_mismatched'},
    'conll2003/conll2003': {'validation': 'dev'},
}


def rows_of(name: str) -> dict[str, list[dict[str, object]]]:
    """Returns the rows of each split; the labels of GLUE's test splits are hidden."""
    made = {}
    for split, count, seed in SPLITS:
        rows = [ROWS[name](text) for text in toy_data.sentences(count, seed, (6, 12))]
        hidden = split == 'test' and name in ('glue/sst2', 'glue/stsb')
        split = RENAMED.get(name, {}).get(split, split)
        made[split] = [{**row, 'label': -1} for row in rows] if hidden else rows
    return made


@pytest.fixture(scope='module')
def sets(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of prepared sets; made in a process of its own, so that here nothing knows their code."""
    place = tmp_path_factory.mktemp('tfds')
    (place / 'sets.py').write_text(SETS)
    (place / 'rows.json').write_text(json.dumps({name: rows_of(name) for name in ROWS}))
    command = [sys.executable, 'sets.py', 'rows.json', str(place)]
    done = subprocess.run(command, capture_output=True, cwd=place, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return str(place)


def as_tsv(*names: str) -> Callable[[dict], str]:
    return lambda row: '\t'.join(str(row[name]) for name in names)


def as_conll(row: dict) -> str:
    return ''.join(f'{word} {tag}\n' for word, tag in zip(row['tokens'], row['ner'], strict=True))


LOCAL: dict[str, tuple[str, Callable[[dict], str]]] = {  # what the headers call files of the same shape
    'wmt14_en_de': ('tsv', as_tsv('en', 'de')),
    'glue:sst2': ('tsv', as_tsv('label', 'sentence')),
    'glue:stsb': ('tsv', as_tsv('label', 'sentence1', 'sentence2')),
    'glue:mnli': ('tsv', as_tsv('label', 'premise', 'hypothesis')),
    'squad:v2': ('jsonl', json.dumps),
    'conll2003': ('conll', as_conll),
    'text_to_text:mnli': ('jsonl', json.dumps),
    'text_to_text:stsb': ('jsonl', json.dumps),
    'cnn_dailymail': ('jsonl', json.dumps),
    'gpt2': ('jsonl', json.dumps),
    't5': ('jsonl', json.dumps),
    'bart': ('jsonl', json.dumps),
}


def local(recipe: str, place: pathlib.Path) -> pathlib.Path:
    """Writes {train,valid,test} for a recipe as its header says, the rows of its set; returns the directory."""
    kind, written = LOCAL[recipe]
    named = recipes.load(recipe).data
    name = next(name for name in ROWS if named.tfds_name in (name, name.split('/')[0]))
    rows = rows_of(name)
    if half := rows.get('validation', []):
        rows = {**rows, 'validation[:50%]': half[:3], 'validation[50%:]': half[3:]}
    for split, theirs in zip(('train', 'valid', 'test'), named.tfds_splits, strict=True):
        toy_data.write(place / f'{split}.{kind}', [written(row) for row in rows[theirs]])
    return place


# ----------------------------------------------------------------------------- the same from files and from their set


def batches_of(cfg: config.Config) -> pipeline.Batches:
    records = mixture.load(cfg, 'train')
    made = tokenizers.train_tokenizers(cfg, records)
    for split in ('valid', 'test'):
        assert len(pipeline.Batches(cfg, made, split, training=False).records) > 0
    return pipeline.Batches(cfg, made, 'train', training=True, records=records)


@pytest.mark.slow
@pytest.mark.parametrize('recipe', LOCAL)
def test_files_of_the_same_shape_give_the_same_batches(recipe: str, sets: str, tmp_path: pathlib.Path) -> None:
    chars = {'data__tokenizer': 'byte', 'data__length': '96', 'data__encoder_length': '96', 'mesh__data': '1'}
    chars |= {'data__source_tokenizer': None, 'model__vocab_size': 300, 'data__cache_dir': str(tmp_path / 'cache')}
    size, sep = ('', '') if ':' not in recipe else (recipe.partition(':')[2], ',')
    file = recipe.partition(':')[0]
    named = recipes.load(f'{file}:{size}{sep}smoke', data__tfds_dir=sets, **chars)
    place = local(recipe, tmp_path / 'data')
    here = recipes.load(f'{file}:{size}{sep}files,smoke', data__path=str(place), **chars)
    one, other = (batches_of(cfg) for cfg in (named, here))
    assert one.num_examples == other.num_examples >= 20
    for step in (0, 5):
        a, b = one.batch(step), other.batch(step)
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], key)
    assert 'tensorflow' not in sys.modules


# ------------------------------------------------------------------------------------------------------- whole runs

QUIET = {'mesh__data': '1', 'evaluate__samples': 0}
PLAIN = {  # recipes without a set of TFDS
    'classify:smoke': toy_data.labelled,
    'classify:pretrain,smoke': toy_data.labelled,
    'finetune_classify:smoke': toy_data.labelled,
    'finetune_tag:smoke': toy_data.tagged,
    'finetune_qa:smoke': toy_data.answered,
    'finetune_seq2seq:smoke': toy_data.parallel,
    'finetune_lm:smoke': toy_data.running,
    'few_labels:smoke': toy_data.labelled,
    'few_labels:pretrain,smoke': toy_data.labelled,
    'sentences:smoke': toy_data.parallel,
    'sentences:simcse,smoke': toy_data.labelled,
    'sentences:scored,smoke': toy_data.scored,
    'translate:smoke': toy_data.parallel,
    'modernize:smoke': toy_data.parallel,
    'g2p:smoke': None,
    'lm_stdlib:smoke': None,
    'algorithmic:smoke': None,
    'algorithmic:reverse,smoke': None,
    'shapes:smoke': toy_data.running,
}
WHOLE = ('classify:smoke', 'translate:smoke', 'lm_stdlib:smoke')  # one of each family


def plain(recipe: str, place: pathlib.Path) -> config.Config:
    made = PLAIN[recipe]
    data = {'data__path': str(made(place / 'data'))} if made else {}
    loaded = recipes.load(recipe, mesh__data='1', **data)
    return config.override(loaded, {'decode.max_len': 8} if TASKS[loaded.train.objective].writes else {})


@pytest.mark.proof
@pytest.mark.parametrize('recipe', ['classify', 'lm_stdlib'])
def test_a_recipe_learns_from_a_teacher(recipe: str, tmp_path: pathlib.Path) -> None:
    train_lib.train(plain(f'{recipe}:smoke', tmp_path), tmp_path / 'teacher')
    data = {'data__path': str(tmp_path / 'data')} if PLAIN[f'{recipe}:smoke'] else {}
    taught = recipes.load(f'{recipe}:distilled,smoke', mesh__data='1', train__teacher=str(tmp_path / 'teacher'), **data)
    assert train_lib.train(taught, tmp_path / 'run').step == 2


@pytest.mark.proof
def test_a_recipe_learns_preferences(tmp_path: pathlib.Path) -> None:
    train_lib.train(plain('lm_stdlib:smoke', tmp_path), tmp_path / 'start')
    for split in ('train', 'valid', 'test'):
        rows = [json.dumps({'prompt': 'a', 'chosen': f'b{i}', 'rejected': f'c{i}'}) for i in range(16)]
        toy_data.write(tmp_path / 'data' / f'{split}.jsonl', rows)
    fields = {'mesh__data': '1', 'data__path': str(tmp_path / 'data'), 'train__init_from': str(tmp_path / 'start')}
    assert train_lib.train(recipes.load('lm_stdlib:dpo,smoke', **fields), tmp_path / 'run').step == 2


@pytest.mark.proof
@pytest.mark.parametrize('recipe', [recipe for recipe in PLAIN if recipe not in WHOLE])
def test_a_recipe_trains(recipe: str, tmp_path: pathlib.Path) -> None:
    assert train_lib.train(plain(recipe, tmp_path), tmp_path / 'run').step == 2


def test_every_recipe_is_trained() -> None:
    trained = [*PLAIN, *TUNED, *(start for start, _, _ in TUNED.values()), 'wmt14_en_de', 'gpt2']
    assert {name.partition(':')[0] for name in trained} == {name for name in recipes.FILES if '/' not in name}


@pytest.mark.parametrize('recipe', [WHOLE[0], *(pytest.param(recipe, marks=pytest.mark.proof) for recipe in WHOLE[1:])])
def test_a_recipe_trains_evaluates_and_generates(recipe: str, tmp_path: pathlib.Path, capsys) -> None:
    found = train_command.train_and_evaluate(plain(recipe, tmp_path), str(tmp_path / 'run'))
    assert np.isfinite(found['loss']) and found['loss'] > 0
    results = json.loads((tmp_path / 'run' / 'result.json').read_text())
    assert results['test']['loss'] == found['loss'] and results['test']['step'] == 2
    run = Run.load(tmp_path / 'run')
    if run.config.model.family == 'encoder':
        with pytest.raises(errors.UserError, match='does not generate'):
            run.generate(['text'])
    else:
        texts = run.generate(['the bird', 'a', ''])
        assert len(texts) == 3 and run.generate(['the bird', 'a'])[1] == texts[1]
        with pytest.raises(errors.UserError, match='tokens, the model takes'):
            run.generate(['the bird ' * 200])
        assert len(run.generate(['the bird ' * 200], cut=True)) == 1
    page = attention.attention(run, ['the bird']).read_text()
    assert '<html' in page and 'http' not in page.replace('http://www.w3.org', '')
    assert 'parameters' in inspect.inspect(run.config)


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory: pytest.TempPathFactory, sets: str) -> Callable[[str], str]:
    """Trains 'bert', 't5' or 'bart' at its smoke size, once each; returns its workdir."""
    place, homes = tmp_path_factory.mktemp('pretrained'), {}

    def home(file: str) -> str:
        if file not in homes:
            data = {'data__tfds_dir': sets}
            if file == 'bert':  # from files: paragraphs, where a text has more sentences than one
                texts = [page(text)['text'] for text in toy_data.sentences(32, 0, (6, 12))]
                for split in ('train', 'valid'):
                    toy_data.write(place / 'text' / f'{split}.txt', ['\n\n'.join(map(str, texts))])
                data = {'data__path': str(place / 'text')}
            files = ',files' if file == 'bert' else ''
            loaded = recipes.load(f'{file}:smoke{files}', **QUIET, **data)
            train_lib.train(loaded, place / file)
            homes[file] = str(place / file)
        return homes[file]

    return home


TUNED = {  # what is fine-tuned: from which recipe, what is fresh, and a score that it must have
    'glue:sst2': ('bert', 'class_head', 'valid/accuracy'),
    'glue:stsb': ('bert', 'number_head', 'valid/spearman'),
    'squad:v2': ('bert', 'span_head', 'valid/squad_f1'),
    'conll2003': ('bert', 'tag_head', 'valid/entity_f1'),
    'text_to_text:mnli': ('t5', 'none', 'valid/exact_match'),
    'cnn_dailymail': ('bart', 'none', 'valid/loss'),
}


@pytest.mark.proof
@pytest.mark.parametrize('recipe', TUNED)
def test_a_recipe_fine_tunes_what_its_header_names(recipe, sets, pretrained, tmp_path: pathlib.Path, capsys) -> None:
    start, fresh, score = TUNED[recipe]
    home = pretrained(start)
    capsys.readouterr()
    file, _, size = recipe.partition(':')
    cfg = recipes.load(f'{file}:{size},smoke', data__tfds_dir=sets, train__init_from=home, **QUIET)
    done = train_lib.train(cfg, tmp_path / 'run', scoring.generated_scores)
    said = capsys.readouterr().out
    assert f'  fresh: {fresh}\n' in said and 'loaded: ' in said and 'embed' in said
    assert done.step == 2
    rows = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert np.isfinite(rows[-1]['valid/loss']) and score in rows[-1]
    assert done.tokenizers.target.fingerprint == Run.load(home).tokenizers.target.fingerprint
    assert f'--config.train.init_from=runs/{start}' in recipes.header(file)


@pytest.mark.proof
def test_translation_by_the_name_of_its_set(sets: str, tmp_path: pathlib.Path, capsys) -> None:
    cfg = recipes.load('wmt14_en_de:smoke', data__tfds_dir=sets, mesh__data='1', train__checkpoint_every='1')
    found = train_command.train_and_evaluate(cfg, str(tmp_path / 'run'))
    assert {'bleu', 'bleu_tokenized', 'copying_the_source_bleu'} <= found.keys() and np.isfinite(found['loss'])
    averaged = Run.load(tmp_path / 'run', average=2)
    assert averaged.step == 2 and averaged.config.train.keep_last == 5


@pytest.mark.proof
def test_a_language_model_by_the_name_of_its_set(sets: str, tmp_path: pathlib.Path) -> None:
    done = train_lib.train(recipes.load('gpt2:smoke', data__tfds_dir=sets, **QUIET), tmp_path / 'run')
    assert done.step == 2
