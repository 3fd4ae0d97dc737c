"""The scores of a model on a split: of its probabilities, and of its predictions."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from tformer.config import Config
from tformer.config.tasks import TASKS, Task
from tformer.data.batches.pipeline import Batch, Batches
from tformer.data.examples.example_arrays import Examples
from tformer.data.sources.fields import are_plain
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.distributed import meshes
from tformer.distributed.compilers import jit
from tformer.evaluation import means, metrics, scores
from tformer.evaluation.metrics import Metric
from tformer.layers import masks
from tformer.layers.dropout import DropoutRates
from tformer.objectives import LOSSES, OBJECTIVES, loss_chunk

GenerationScores = Callable[[Config, Any, Tokenizers, Sequence[Mapping[str, Any]]], dict[str, float]]


class Predicted(NamedTuple):
    """The batch of a step, and the model's predictions for it (`Objective.predict`)."""

    step: int
    batch: Batch
    outputs: Any


@dataclasses.dataclass(frozen=True)
class Scorer:
    """What `make_scorer` returns."""

    step: Any  # the compiled (variables, batch, taught) -> (sums, predictions)
    score: Callable[..., dict[str, float]]  # of all batches

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `score`."""
        return self.score(*args, **kwargs)


def make_scorer(model: nn.Module, config: Config, mesh: Mesh, teacher: nn.Module | None = None) -> Scorer:
    """Returns score(variables, batches, limit, tokenizers, taught=None) -> means over a split, or its first `limit`
    batches. `taught` are the variables of the `teacher`, without which some objectives have no scores.

    The means are `loss`; `nll` (nats per target), `accuracy` and `perplexity` where classes or tokens are predicted;
    `bits_per_byte` of language models with a lossless tokenizer; and the metrics of the objective's row of `JUDGES`.
    Dropout, label smoothing and the z-loss are off.
    """
    task, objective = TASKS[config.train.objective], OBJECTIVES[config.train.objective]
    longest = config.evaluate.answer_length
    weight = objective.weight(config.train.second_loss_weight)
    chunk = loss_chunk(config)

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    @functools.partial(jit, out_shardings=everywhere)  # each process has the outputs of all rows
    def step(variables: Any, batch: Mapping[str, jax.Array], taught: Any) -> tuple[Any, Any]:
        batch = objective.weigh(batch, weight)
        with masks.ordered('behind'):
            method, teaching = objective.taught_by(teacher, taught, config.train)(batch, chunk)
            outputs: Any = model.apply(variables, batch, DropoutRates(), method=method)
        predicted = None if objective.predict is None else objective.predict(outputs, batch, longest)
        return objective.scores(outputs, batch, None, None, *teaching), predicted

    def score(
        variables: Any, batches: Batches, limit: int | None, tokenizers: Tokenizers, taught: Any = None
    ) -> dict[str, float]:
        totals: dict[str, tuple[float, float]] = {}
        num_bytes, counts_bytes = 0.0, task.running_text and tokenizers.target.lossless
        pending: list[Any] = []
        seen: list[Batch] = []
        count = int(batches.steps_per_epoch)
        for number in range(min(limit or count, count)):
            batch = batches.batch(number)
            placed = jax.device_put(batch, meshes.batch_sharding(mesh))
            pending.append(meshes.in_turn(mesh, step(variables, placed, taught)))
            if task.judge is not None:
                seen.append(batch)
            if counts_bytes:
                num_bytes += float((tokenizers.target.byte_lengths[batch['targets']] * (batch['weights'] > 0)).sum())
        pending = jax.device_get(pending)
        for sums, _ in pending:
            totals = means.add(totals, sums)
        found = means.means(totals)
        if objective.second is not None:  # the sums are of each batch, whose weights differ
            found['loss'] = found['nll'] + float(weight) * found[objective.second]
        if counts_bytes:
            found['bits_per_byte'] = totals['nll'][0] / np.log(2) / num_bytes if num_bytes else np.nan
        if task.judge is not None:
            predicted = [Predicted(n, batch, pending[n][1]) for n, batch in enumerate(seen)]
            found |= _judge(task, tokenizers.labels).scores(predicted, batches, tokenizers)
        return found

    return Scorer(step, score)


def _judge(task: Task, labels: Sequence[str]) -> Metric:
    """Returns the judge of an objective; tags of which none is of entities have one of their own."""
    return JUDGES['plain_tags' if task.judge == 'tags' and are_plain(labels) else task.judge or '']


def score_names(config: Config, labels: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the names of the scores of evaluations while training, the valid values of train.best_metric.

    `labels` are the names of the classes or tags, where they are known.
    """
    task = TASKS[config.train.objective]
    names = [*LOSSES[task.loss].names, *(['bits_per_byte'] if task.running_text else [])]
    found = [] if task.judge is None else [_judge(task, labels)]
    if config.evaluate.examples_while_training:
        found += [metrics.METRICS[key] for key in config.evaluate.metrics]
    names += [name for metric in found for name in metric.names_for(config.evaluate)]
    return tuple(f'valid/{name}' for name in names)


# ---------------------------------------------------------------------------------------------------- predictions


def judge_classes(
    predicted: Sequence[Predicted], batches: Batches, tokenizers: Tokenizers, prefix: str = ''
) -> dict[str, float]:
    """Scores of the classes of sequences, or of sentence pairs."""
    labels = [np.where(one.batch['label_weights'] > 0, one.batch['labels'], -1) for one in predicted]
    outputs = [one.outputs for one in predicted]
    positive = batches.config.evaluate.positive_label if not prefix else None
    found = scores.class_scores(np.concatenate(labels), np.concatenate(outputs), tokenizers.labels, positive)
    return {f'{prefix}{name}': value for name, value in found.items()}


def judge_numbers(predicted: Sequence[Predicted], batches: Batches, tokenizers: Tokenizers) -> dict[str, float]:
    """Scores of the numbers of sequences."""
    scored = [one.batch['label_weights'] > 0 for one in predicted]
    labels = [one.batch['labels'][where] for one, where in zip(predicted, scored, strict=True)]
    outputs = [one.outputs[where] for one, where in zip(predicted, scored, strict=True)]
    return scores.regression_scores(np.concatenate(labels), np.concatenate(outputs))


def judge_retrieval(predicted: Sequence[Predicted], batches: Batches, tokenizers: Tokenizers) -> dict[str, float]:
    """Scores of each row's second text among all different texts of the split but the first ones of its rows."""
    vectors_NKD = np.concatenate([one.outputs for one in predicted])
    keys_NK = np.concatenate([one.batch['segment_keys'] for one in predicted]).view(np.int64)[..., 0]
    real_NK = np.concatenate([one.batch['segment_weights'] for one in predicted]) > 0
    kept_N = real_NK.any(axis=1)
    vectors_NKD, keys_NK, real_NK = vectors_NKD[kept_N], keys_NK[kept_N], real_NK[kept_N]
    known, first = np.unique(keys_NK[:, 1:][real_NK[:, 1:]], return_index=True)
    texts_MD = vectors_NKD[:, 1:][real_NK[:, 1:]][first]
    place_N2 = np.searchsorted(known, keys_NK[:, :2]).clip(max=len(known) - 1)
    itself_N = np.where(known[place_N2[:, 0]] == keys_NK[:, 0], place_N2[:, 0], -1)
    return scores.retrieval_scores(scores.ranks(vectors_NKD[:, 0], texts_MD, place_N2[:, 1], itself_N))


def judge_tags(predicted: Sequence[Predicted], batches: Batches, tokenizers: Tokenizers) -> dict[str, float]:
    """Scores of the entities of sentences; words beyond the length, or without a token, count as O."""
    gold, said = _tags(predicted, batches, tokenizers, 'O')
    return scores.entity_scores(gold, said)


def judge_plain_tags(predicted: Sequence[Predicted], batches: Batches, tokenizers: Tokenizers) -> dict[str, float]:
    """Scores of the tags of words; words beyond the length, or without a token, have no tag."""
    gold, said = _tags(predicted, batches, tokenizers, None)
    return scores.tag_scores(gold, said)


def _tags(
    predicted: Sequence[Predicted], batches: Batches, tokenizers: Tokenizers, unread: Any
) -> tuple[list[list[str]], list[list[Any]]]:
    """Returns the tags of each sentence, right and predicted; `unread` is that of words which are not read."""
    gold, said = [], []
    for row in _rows(predicted, batches):
        right = row.record['tags']
        tags = [unread] * len(right)
        for word, place in word_places(batches.parts[row.part].examples, row.example, row.length):
            tags[word] = tokenizers.labels[int(row.outputs[place])]
        gold.append(right)
        said.append(tags)
    return gold, said


def judge_answers(predicted: Sequence[Predicted], batches: Batches, tokenizers: Tokenizers) -> dict[str, float]:
    """Scores of the best answer over the windows of each context; '' where evaluate.null_threshold prefers none.

    Answers are cut out of the normalised context, and compared with normalised right answers.
    """
    best: dict[tuple[int, int], tuple[float, str]] = {}
    null: dict[tuple[int, int], float] = {}
    answers: dict[tuple[int, int], list[str]] = {}
    threshold, normalize = batches.config.evaluate.null_threshold, tokenizers.target.normalize
    for row in _rows(predicted, batches):
        examples, key = batches.parts[row.part].examples, (row.part, row.number)
        first, last, score, none = (np.asarray(value).item() for value in row.outputs)
        answers[key] = [normalize(text) for _, text in row.record['answers']]
        null[key] = min(none, null.get(key, np.inf))
        best.setdefault(key, (-np.inf, ''))
        if score > best[key][0] and first > 0:
            begin, end = answer_place(examples, row.example, first, last, batches.config.data.question_length)
            best[key] = score, normalize(row.record['context'])[begin:end].strip()
    said = [
        '' if threshold is not None and null[key] - score > threshold else text for key, (score, text) in best.items()
    ]
    return scores.squad_scores(said, [answers[key] for key in best])


def word_places(examples: Examples, index: int, length: int) -> Iterator[tuple[int, int]]:
    """Yields (word, position of its first token) for the words that begin in an example's row of `length` tokens."""
    front, back = len(examples.template.front), len(examples.template.back)
    for token, word in enumerate(examples.of('words', index).tolist()):
        if word >= 0 and token + front < length - back:
            yield word, token + front


def answer_place(examples: Examples, index: int, first: int, last: int, question_length: int) -> tuple[int, int]:
    """Returns the characters of the normalised context, first and after the last, of an answer's tokens in a row."""
    question = min(len(examples.of('second_text', index)), question_length)
    template = examples.template
    context = len(template.front) + question + len(template.between) - examples.spans[index][1]
    return int(examples.of('begins', index)[first - context]), int(examples.of('ends', index)[last - context])


class Row(NamedTuple):
    """An example of a batch: the predictions for its row, the row's length, and where the example comes from."""

    outputs: Any
    length: int
    part: int
    number: int  # of the record in its part
    example: int
    record: Mapping[str, Any]


def _rows(predicted: Sequence[Predicted], batches: Batches) -> Iterator[Row]:
    firsts = np.cumsum([0, *(len(part.examples.columns['tokens']) for part in batches.parts)])
    for one in predicted:
        for place, segments in enumerate(batches.segments(one.step)):
            for part, number, example in segments:
                outputs = jax.tree.map(lambda values, place=place: values[place], one.outputs)
                length = int((one.batch['positions'][place] >= 0).sum())
                record = batches.records[int(firsts[part]) + number]
                yield Row(outputs, length, part, number, example, record)


# Metrics that need every prediction of a split; their `scores` take (predicted, batches, tokenizers).
JUDGES: dict[str, Metric] = {
    'classes': Metric(
        ('f1_macro', 'f1_micro', 'matthews'), judge_classes, positive_names=('f1',), fields=('positive_label',)
    ),
    'numbers': Metric(('pearson', 'spearman', 'mean_squared_error'), judge_numbers),
    'retrieval': Metric(
        ('recall_at_1', 'recall_at_5', 'recall_at_10', 'mean_reciprocal_rank', 'ndcg_at_10'), judge_retrieval
    ),
    'tags': Metric(('entity_f1', 'entity_precision', 'entity_recall'), judge_tags),
    'plain_tags': Metric(('tag_accuracy', 'tag_f1_macro'), judge_plain_tags),
    'answers': Metric(('squad_exact_match', 'squad_f1'), judge_answers, fields=('answer_length', 'null_threshold')),
    'sentences': Metric(('sentence_f1_macro',), functools.partial(judge_classes, prefix='sentence_')),
}
