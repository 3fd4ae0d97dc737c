"""Predicts the class, number, choice, tags or answer of texts, by the objective of a run.

    tformer predict --workdir=DIR [TEXT ...] [--input=FILE] [--output=FILE]

A text is one line. A line that begins with { is a JSON object with the fields of a record: {"text": ..., "pair": ...}
for two texts, {"context": ..., "choices": [...]} for a choice, {"tokens": [...]} for words, {"question": ...,
"context": ...} for an answer; labels are not read. The output has a line of JSON for each text, in their order. It is
printed, or written to --output:

    classification         {"label": ..., "probabilities": {LABEL: ...}}
    regression             {"number": ...}
    cosine_similarity      {"cosine": ...}
    multiple_choice        {"choice": ..., "text": ..., "probabilities": [...]}
    token_classification   {"tokens": [{"text": ..., "tag": ..., "probability": ..., "start": ..., "end": ...}, ...]}
    question_answering     {"answer": ..., "start": ..., "end": ..., "score": ..., "no_answer_score": ...}

`start` and `end` are characters, the latter after the last: of the line, of the words joined by spaces, or of the
context after data.normalization. A score is the sum of two logits. Words beyond data.length have the tag O, or none
where no tag is O.
"""

import functools
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer import commands
from tformer.commands import reading
from tformer.commands import texts as texts_lib
from tformer.commands.run import Run, opened
from tformer.config import json_files
from tformer.config.tasks import TASKS
from tformer.data.examples import corrupt, example_formats
from tformer.data.examples.example_arrays import Examples
from tformer.data.examples.special_tokens import Fields
from tformer.data.sources import fields
from tformer.data.sources.records import BadRecord, Record
from tformer.errors import UserError
from tformer.evaluation import scorer
from tformer.evaluation.many_rows import Method
from tformer.layers import outputs
from tformer.layers.dropout import DropoutRates

SHARED_FLAGS = ('workdir', 'checkpoint', 'input')
FLAGS = {'output': ('string', None, 'the file of the lines of JSON; default: standard output')}
ARGUMENTS = 'TEXT'

_SCORED = ('labels', 'label_weights', 'targets')  # arrays of an example that no model reads
_ANNOTATIONS = ('label', 'tags', 'answers')  # fields of a record that nobody has to give


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    reading.check_output(flags.output, flags.input)
    workdir, texts = commands.needed(flags, 'workdir'), texts_lib.given(arguments, flags.input)
    loaded = Run.load(workdir, overrides, flags.checkpoint)
    reading.write_lines(predict(loaded, texts, source=flags.input), flags.output)


def predict(
    run: Run | str | pathlib.Path,
    texts: Sequence[str | Mapping[str, Any]],
    *,
    source: str | None = None,
    batch_size: int = reading.BATCH_SIZE,
) -> list[dict[str, Any]]:
    """Returns the prediction for each text as `tformer predict` writes it.

        >>> tformer.predict('runs/sst2', ['a fine film', {'text': 'a dull one'}])

    Texts are read as evaluation reads them: cut to data.length, and a line on standard error says how many; contexts of
    answers in windows. Words beyond the length are tagged O, or None where no tag is O, without a probability. `source`
    is the file of the texts, which errors name.

    Raises:
      UserError: the run's objective predicts nothing of whole texts, or a text is malformed.
    """
    run = opened(run)
    objective = run.config.train.objective
    head = TASKS[objective].head
    if head not in PREDICTIONS:
        valid = ', '.join(name for name, task in TASKS.items() if task.head in PREDICTIONS)
        raise UserError(f'predict: train.objective={objective} is not for predictions; valid: {valid}')
    prediction = PREDICTIONS[head]
    texts = texts_lib.several(texts)
    records = [_record(run, prediction, text, reading.place(index, source)) for index, text in enumerate(texts)]
    return of_records(run, records, batch_size) if records else []


def of_records(run: Run, records: Sequence[Record], batch_size: int = reading.BATCH_SIZE) -> list[dict[str, Any]]:
    """Returns the prediction for each record of the run's objective, as `predict`."""
    data, prediction = run.config.data, PREDICTIONS[TASKS[run.config.train.objective].head]
    examples = example_formats.make(run.config, run.tokenizers, records, 'input', training=False)
    if examples.num_truncated:
        shown = f'{examples.num_truncated:,} of {len(records):,} texts were cut to data.length={data.length}'
        print(shown, file=sys.stderr, flush=True)
    noise, make = corrupt.Noise(data, run.tokenizers.target, ()), example_formats.format_of(run.config).fields
    made = [make(examples, index, noise) for index in range(len(examples))]
    rows = [{name: value for name, value in row.items() if name not in _SCORED} for row in made]
    found = reading.outputs(run, rows, prediction.method(run.config.evaluate.answer_length), batch_size)
    of_record: list[list[int]] = [[] for _ in records]
    for index in range(len(examples)):
        of_record[examples.spans[index][0]].append(index)
    read = Read(run, examples, rows, found)
    return [prediction.write(read, record, own) for record, own in zip(records, of_record, strict=True)]


class Read(NamedTuple):
    """The examples of some texts, and the model's outputs for each."""

    run: Run
    examples: Examples
    rows: list[Fields]
    outputs: list[Any]


class Prediction(NamedTuple):
    """How a head predicts."""

    # (longest answer) -> the method of a module, of which the same object comes again
    method: Callable[[int], Method]
    write: Callable[[Read, Record, Sequence[int]], dict[str, Any]]  # (outputs, record, its examples) -> the prediction
    plain: Callable[[str], dict[str, Any]] | None  # a line of text -> fields; None: lines are JSON objects
    unknown: Callable[[Run, Mapping[str, Any]], dict[str, Any]]  # fields -> an annotation, which a record must have


def _record(run: Run, prediction: Prediction, text: str | Mapping[str, Any], where: str) -> Record:
    """Returns the record of a text; raises a `UserError` that names it if it is malformed."""
    data, objective = run.config.data, run.config.train.objective
    plain = isinstance(text, str) and not text.startswith('{')
    try:
        if plain:
            if prediction.plain is None:
                wanted = ', '.join(f'"{name}": ...' for name in TASKS[objective].fields if name not in _ANNOTATIONS)
                raise BadRecord(f'train.objective={objective} needs a JSON object: {{{wanted}}}')
            values: Any = prediction.plain(str(text))
        else:
            values = _object(text, where) if isinstance(text, str) else text
        record = fields.maker(data, objective)({**values, **prediction.unknown(run, values)})
    except BadRecord as error:
        raise UserError(f'{where}: {error}') from error
    return {**record, 'where': where, **({'line': text} if plain else {})}


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        return json_files.parse(text)
    except ValueError as error:
        raise UserError(f'{where}: it begins with {{ and is not a JSON object: {error}') from error


# ------------------------------------------------------------------------------------------------------- the heads


@functools.cache
def _class_method(longest: int) -> Method:
    return lambda model, batch: jax.nn.softmax(outputs.classify(model, batch, DropoutRates()), axis=-1)


@functools.cache
def _number_method(longest: int) -> Method:
    return lambda model, batch: outputs.regress(model, batch, DropoutRates())


@functools.cache
def _cosine_method(longest: int) -> Method:
    return lambda model, batch: outputs.cosines(outputs.embed_texts(model, batch, DropoutRates()))


@functools.cache
def _choice_method(longest: int) -> Method:
    return lambda model, batch: jax.nn.softmax(
        outputs.of_choices(outputs.choose_text(model, batch, DropoutRates()), batch), -1
    )


@functools.cache
def _tags_method(longest: int) -> Method:
    def best(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        probabilities_BTC = jax.nn.softmax(outputs.tag(model, batch, DropoutRates()), axis=-1)
        return jnp.argmax(probabilities_BTC, axis=-1), jnp.max(probabilities_BTC, axis=-1)

    return best


@functools.cache
def _spans_method(longest: int) -> Method:
    return lambda model, batch: outputs.best_spans(outputs.find_spans(model, batch, DropoutRates()), batch, longest)


def _write_class(read: Read, record: Record, own: Sequence[int]) -> dict[str, Any]:
    probabilities = dict(zip(read.run.tokenizers.labels, map(float, read.outputs[own[0]]), strict=True))
    return {'label': max(probabilities, key=probabilities.__getitem__), 'probabilities': probabilities}


def _write_number(read: Read, record: Record, own: Sequence[int]) -> dict[str, Any]:
    return {'number': float(read.outputs[own[0]])}


def _write_cosine(read: Read, record: Record, own: Sequence[int]) -> dict[str, Any]:
    return {'cosine': float(read.outputs[own[0]])}


def _write_choice(read: Read, record: Record, own: Sequence[int]) -> dict[str, Any]:
    probabilities = read.outputs[own[0]][: len(record['choices'])].tolist()
    choice = max(range(len(probabilities)), key=probabilities.__getitem__)
    return {'choice': choice, 'text': record['choices'][choice], 'probabilities': probabilities}


def _write_tags(read: Read, record: Record, own: Sequence[int]) -> dict[str, Any]:
    (index,) = own
    tags, probabilities = read.outputs[index]
    found: dict[int, tuple[str | None, float | None]] = {
        word: (read.run.tokenizers.labels[int(tags[place])], float(probabilities[place]))
        for word, place in scorer.word_places(read.examples, index, len(read.rows[index]['inputs']))
    }
    words = re.finditer(r'\S+', record['line']) if 'line' in record else None
    start, tokens = 0, []
    for number, text in enumerate(record['tokens']):
        start = next(words).start() if words else start
        tag, probability = found.get(number, ('O' if 'O' in read.run.tokenizers.labels else None, None))
        end = start + len(text)
        tokens.append({'text': text, 'tag': tag, 'probability': probability, 'start': start, 'end': end})
        start = end + 1
    return {'tokens': tokens}


def _write_answer(read: Read, record: Record, own: Sequence[int]) -> dict[str, Any]:
    """The best answer over the windows of a context, '' where evaluate.null_threshold prefers none."""
    config = read.run.config
    none = min(float(read.outputs[index][3]) for index in own)
    index = max(own, key=lambda index: float(read.outputs[index][2]))
    first, last, score = (value.item() for value in read.outputs[index][:3])
    threshold = config.evaluate.null_threshold
    if first == 0 or (threshold is not None and none - score > threshold):
        return {'answer': '', 'start': None, 'end': None, 'score': None, 'no_answer_score': none}
    start, end = scorer.answer_place(read.examples, index, first, last, config.data.question_length)
    text = read.run.tokenizers.target.normalize(record['context'])[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    return {'answer': text, 'start': start, 'end': start + len(text), 'score': score, 'no_answer_score': none}


def _any_tags(run: Run, values: Mapping[str, Any]) -> dict[str, Any]:
    tokens, labels = values.get('tokens'), run.tokenizers.labels
    tag = 'O' if 'O' in labels else labels[0]
    return {'tags': [tag] * len(tokens) if isinstance(tokens, list) else []}


def _lowest(run: Run, values: Mapping[str, Any]) -> dict[str, Any]:
    return {'label': (run.config.data.label_range or (0.0,))[0]}


PREDICTIONS: dict[str, Prediction] = {  # by the head, a key of `config.tasks.HEADS`
    'class': Prediction(
        _class_method, _write_class, lambda line: {'text': line}, lambda run, _: {'label': run.tokenizers.labels[0]}
    ),
    'number': Prediction(_number_method, _write_number, lambda line: {'text': line}, _lowest),
    'vectors': Prediction(_cosine_method, _write_cosine, None, _lowest),
    'choice': Prediction(_choice_method, _write_choice, None, lambda run, _: {'label': 0}),
    'tags': Prediction(
        _tags_method,
        _write_tags,
        lambda line: {'tokens': line.split()},
        _any_tags,
    ),
    'spans': Prediction(_spans_method, _write_answer, None, lambda run, _: {'answers': []}),
}
