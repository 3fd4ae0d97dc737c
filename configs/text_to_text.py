r"""GLUE, SQuAD and summaries as text to text, with a pre-trained T5 (Raffel et al. 2020, 2.4, 3.1.2 and appendix D).

    tformer train --config=configs/text_to_text.py:mnli --workdir=runs/mnli --config.train.init_from=runs/t5
    tformer train --config=configs/text_to_text.py:squad --workdir=runs/squad --config.train.init_from=runs/t5

    tformer train --config=configs/text_to_text.py:mnli,files --config.data.path=DIR --workdir=runs/mnli \
        --config.train.init_from=runs/t5                                                         # or from files

runs/t5 is a run of configs/t5.py (use the same size in both). Arguments: a task of cola sst2 mrpc stsb qqp mnli qnli
rte squad cnn_dailymail, sst2 if none is given; `smoke`, a size that any machine trains: `:mnli,files,smoke`. TFDS:
glue/TASK, squad/v1.1, cnn_dailymail. DIR holds {train,valid}.jsonl, one object per line with the keys of the task's
templates.

If the test labels are hidden, the validation split is scored as test (of mnli the mismatched one).

Machine and time: not run here; the paper gives none.
Expected of the base size on the validation splits (table 1, "baseline average"): GLUE, the mean of its tasks, 83.28;
CNN/Daily Mail 19.24 ROUGE-2; SQuAD 80.88 exact match. The score of a GLUE task is `exact_match`; of cola `matthews`,
of stsb `pearson` and `spearman`, of mrpc and qqp also `f1` of the positive class. All scores here are shares of 1.
The paper trains GLUE's tasks together and accepts any answer to a question; this recipe trains one task and uses the
first answer.

From the paper: 2^18 steps of 128 rows of 512 tokens at a constant 1e-3, dropout 0.1, the best of the checkpoints that
are 5,000 steps apart; greedy decoding, but beam 4 with alpha 0.6 for long texts. Labels of stsb are rounded to 0.1
here and to 0.2 in the paper.
"""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from tformer.config import changes, load, override, recipe

T5 = f'{pathlib.Path(__file__).parent}/t5.py'
SIZES = 'small', 'large', '3b', '11b', 'v1_1_small', 'v1_1_base', 'v1_1_large', 'v1_1_xl', 'v1_1_xxl'


def task(
    name: str,
    source: str,
    target: str = '{label}',
    metrics: tuple[str, ...] = ('exact_match',),
    positive: str | None = None,
    splits: tuple[str, ...] = ('train', 'validation', 'validation'),
    best: str | None = None,
) -> dict[str, Any]:
    """Returns the differences of a task; it is judged by `best`, or its first metric."""
    return {
        'data.tfds_name': name,
        'data.tfds_splits': splits,
        'data.source_template': source,
        'data.target_template': target,
        'evaluate.metrics': metrics,
        'evaluate.positive_label': positive,
        'train.best_metric': f'valid/{best or metrics[0]}',
    }


F1 = 'exact_match', 'label_f1'
PAIR = 'sentence1: {sentence1} sentence2: {sentence2}'
MNLI_SPLITS = 'train', 'validation_matched', 'validation_mismatched'
TASKS = {
    'cola': task('glue/cola', 'cola sentence: {sentence}', metrics=('matthews',)),
    'sst2': task('glue/sst2', 'sst2 sentence: {sentence}'),
    'mrpc': task('glue/mrpc', f'mrpc {PAIR}', metrics=F1, positive='equivalent'),
    'stsb': task('glue/stsb', f'stsb {PAIR}', '{label:.1f}', ('correlation',), best='pearson'),
    'qqp': task('glue/qqp', 'qqp question1: {question1} question2: {question2}', metrics=F1, positive='duplicate'),
    'mnli': task('glue/mnli', 'mnli hypothesis: {hypothesis} premise: {premise}', splits=MNLI_SPLITS),
    'qnli': task('glue/qnli', 'qnli question: {question} sentence: {sentence}'),
    'rte': task('glue/rte', f'rte {PAIR}'),
    'squad': {
        **task(
            'squad/v1.1', 'question: {question} context: {context}', '{answers[text][0]}', ('squad',),
            best='squad_exact_match',
        ),
        'decode.max_len': 64,
    },
    'cnn_dailymail': {
        **task(
            'cnn_dailymail', 'summarize: {article}', '{highlights}', ('rouge',),
            splits=('train', 'validation', 'test'), best='rouge2',
        ),
        'decode.strategy': 'beam',
        'decode.max_len': 256,
    },
}  # fmt: skip


def get_config(arguments: str = '') -> ConfigDict:
    base = override(
        load(T5),
        {
            'data.length': 512,
            'data.overlong': 'truncate',
            'optimizer.learning_rate': 1e-3,
            'optimizer.schedule': 'constant',
            'optimizer.warmup_steps': 0,
            'train.objective': 'seq2seq',
            'train.num_steps': 2**18,
            'decode.max_len': 16,
            'evaluate.examples_while_training': 1000,
            **TASKS['sst2'],
        },
    )
    return recipe(
        base,
        arguments,
        **TASKS,
        **{size: f'{T5}:{size}' for size in SIZES},
        files={'data.source': 'files'},
        smoke={**changes(f'{T5}:smoke'), 'data.length': 32, 'evaluate.examples_while_training': 8},
    )
