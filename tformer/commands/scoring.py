"""The scores of a trained model on a split, and the text that it generates."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from tformer import config as config_lib
from tformer.commands import texts as texts_lib
from tformer.config import Config, Model
from tformer.config.tasks import TASKS
from tformer.data.batches import mixture, pipeline
from tformer.data.inspection import rendering
from tformer.data.sources.records import BadRecord, Record
from tformer.data.tokenizers.chat import Messages
from tformer.data.tokenizers.tokenizers import Tokenizers
from tformer.decode import halves, refill
from tformer.decode.drawing import checked_seed
from tformer.decode.generate import texts_of_row
from tformer.decode.text import Output, Share, best, make_writer
from tformer.distributed import meshes, sharding
from tformer.evaluation import metrics, scorer
from tformer.model import build, quantized
from tformer.objectives import OBJECTIVES
from tformer.optim.hyperparameters import standard
from tformer.training import checkpoint, setup, teacher
from tformer.training.dummy_batch import one_row
from tformer.training.state import abstract_variables
from tformer.training.state import variables as variables_of


class Scored(NamedTuple):
    """The result of scoring a split."""

    scores: dict[str, float]  # the metrics by name
    num_records: int  # how many records were scored
    outputs: list[str]  # the generated text of each record, if config.evaluate.metrics score generated text
    references: list[Any]  # the reference texts of each record, likewise
    samples: list[str]  # lines that show some records with their generated text


def score(
    config: Config,
    tokenizers: Tokenizers,
    variables: Any,
    split: str,
    records: Sequence[Record] | None = None,
    workdir: pathlib.Path | None = None,
) -> Scored:
    """Returns the scores of a model on a split, computed on the devices that config.mesh names.

    `records` are those of the split (train, valid or test), if they are loaded already. `workdir` is that of the run,
    whose checkpoints say which teacher it has.

    Raises:
      UserError: the objective has no scores without a teacher, and that is gone, or another.
    """
    mesh = meshes.make_mesh(config.mesh)
    records = scored_records(config, split, records)
    multiple = meshes.row_multiple(mesh, config.mesh)
    make_batches = functools.partial(
        pipeline.Batches, tokenizers=tokenizers, split=split, training=False, records=records, row_multiple=multiple
    )
    with sharding.placed(mesh, config.mesh):
        variables = jax.device_put(variables, shardings(config, mesh))
        plain = standard(config)
        reference = _reference(config, tokenizers, workdir)
        compute: Callable[..., dict[str, float]]
        compute = _scorer(build(plain.model), plain, mesh, reference and reference.model)
        if reference is not None:
            compute = functools.partial(compute, taught=reference.load(mesh))
        found = compute(variables, make_batches(config), None, tokenizers)
        for length in config.evaluate.lengths:
            cut = make_batches(windowed(config, length))
            found[f'loss_at_{length}'] = compute(variables, cut, None, tokenizers)['loss']
    generates = config.evaluate.metrics or config.evaluate.samples
    if jax.process_count() > 1 and generates:  # each process generates all of the text
        whole = multihost_utils.process_allgather(variables, tiled=True)
        variables = jax.device_put(whole, jax.local_devices()[0])
    outputs, references = [], []
    if config.evaluate.metrics:
        outputs = generate(config, tokenizers, variables, _sources(records), cut=True)
        references = [metrics.references_of(record) for record in records]
        found |= metrics.generation_scores(config.evaluate, outputs, records)
    return Scored(found, len(records), outputs, references, samples(config, tokenizers, variables, records))


def scored_records(config: Config, split: str, records: Sequence[Record] | None = None) -> Sequence[Record]:
    """Returns the records of a split (or those given, if it is loaded already), the first evaluate.max_examples."""
    records = mixture.load(config, split) if records is None else records
    most = config.evaluate.max_examples
    if most is None:
        return records
    return records.first(most) if isinstance(records, mixture.Concatenation) else records[:most]


def _reference(config: Config, tokenizers: Tokenizers, workdir: pathlib.Path | None) -> teacher.Teacher | None:
    """Returns the teacher of a run that has no scores without it."""
    if not OBJECTIVES[config.train.objective].with_reference:
        return None
    newest = None if workdir is None else checkpoint.newest_metadata(workdir)
    setup.check_same_data(newest[1]['data'] if newest else {}, teacher.fingerprint(config, tokenizers))
    return teacher.make_teacher(config, one_row(config))


def shardings(config: Config, mesh: jax.sharding.Mesh) -> Any:
    """Returns where each of a run's variables is placed on a mesh; nothing is computed."""
    return sharding.tree_shardings(abstract(config), mesh, sharding.make_rules(config.mesh))


def abstract(config: Config) -> Any:
    """Returns the shapes and dtypes of a run's variables, boxed with their logical names; nothing is computed."""
    found = abstract_variables(build(config.model), OBJECTIVES[config.train.objective], one_row(config))
    return variables_of(found['params'], found.get('statistics', {}))


def windowed(config: Config, length: int) -> Config:
    """Returns the config with rows of `length` tokens, and as many tokens a batch as before, or one row a device."""
    tokens = config.data.batch_tokens or config.train.batch_size * config.data.length
    return config_lib.override(config, {'data.length': length, 'data.batching': 'pad', 'data.batch_tokens': tokens})


def generate(
    config: Config,
    tokenizers: Tokenizers,
    variables: Any,
    texts: Sequence[str | Messages],
    seed: int = 0,
    *,
    cut: bool = False,
) -> list[str]:
    """Returns the model's output for each text: the continuation of a prompt, the text written for a source, or the
    reply to a chat.

    Raises:
      UserError: the family does not generate, or a text is longer than the model takes and may not be `cut`.
    """
    return best(write(config, tokenizers, variables, texts, seed, cut=cut))


def write(
    config: Config,
    tokenizers: Tokenizers,
    variables: Any,
    texts: Sequence[str | Messages],
    seed: int = 0,
    *,
    cut: bool = False,
    done: Container[int] = (),
    share: Share = (0, 1),
    draft: Model | None = None,
) -> Iterator[tuple[int, list[Output]]]:
    """Yields the number of each text and its outputs, best first, as they are written, on the mesh of the variables.

    Texts whose numbers are `done` are left out, and of the others a `share` is written. The variables of a model that
    drafts tokens are in variables['draft']. Raises a `UserError` as `generate`.
    """
    seed = checked_seed(seed)
    plain = standard(config)  # so that runs that differ in numbers alone share a program
    mesh = meshes.mesh_of(variables)
    rows, multiple = meshes.batch_sharding(mesh), meshes.row_multiple(mesh, config.mesh)
    left = sum(number not in done for number in range(len(texts_lib.several(texts))))

    def written() -> Iterator[tuple[int, list[Output]]]:
        read = in_fewer_bits(plain.model, variables, plain.decode.quantization, draft)
        if draft is None and refill.serves(plain, left // share[1]):
            yield from _in_free_rows(plain, tokenizers, read, texts, seed, cut, done, share)
            return
        writer = _writer(build(plain.model), plain, tokenizers, cut=cut, draft=None if draft is None else build(draft))
        options: dict[str, Any] = {'multiple': multiple, 'place': lambda batch: jax.device_put(batch, rows)}
        yield from writer.write(read, texts, seed, done=done, share=share, **options)

    return sharding.each_placed(mesh, config.mesh, written())


def in_fewer_bits(cfg: Model, variables: Any, kind: str | None, draft: Model | None = None) -> Any:
    """Returns the variables of a run, and those of what drafts for it, as `quantized` does."""
    found = quantized(build(cfg), variables, kind)
    return found if draft is None else {**found, 'draft': quantized(build(draft), variables['draft'], kind)}


def _in_free_rows(
    config: Config,
    tokenizers: Tokenizers,
    variables: Any,
    texts: Sequence[str | Messages],
    seed: int,
    cut: bool,
    done: Container[int],
    share: Share,
) -> Iterator[tuple[int, list[Output]]]:
    """Yields what `write` does, by a `Refill`, or by two with half of the rows where that is faster."""
    mesh, size = meshes.mesh_of(variables), config.decode.batch_size
    number = 2 if halves.pay(variables, size, texts_of_row(config.decode)) else 1
    part = config_lib.override(config, {'decode.batch_size': size // number})
    made = _refill(build(config.model), part, tokenizers, cut=cut, mesh=mesh)

    def written(index: int) -> Generator[tuple[int, list[Output]], None, None]:
        own = share[0] + share[1] * index, share[1] * number
        return sharding.each_placed(mesh, config.mesh, made.write(variables, texts, seed, done=done, share=own))

    yield from halves.at_once([written(index) for index in range(number)])


def generated_scores(
    config: Config, variables: Any, tokenizers: Tokenizers, records: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Returns the metrics of config.evaluate of the text that the model generates for `records`."""
    outputs = generate(config, tokenizers, variables, _sources(records), cut=True)
    return metrics.generation_scores(config.evaluate, outputs, records)


def samples(config: Config, tokenizers: Tokenizers, variables: Any, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines that show generated text of some records, spread evenly over the split."""
    count = min(config.evaluate.samples, len(records))
    task = TASKS[config.train.objective]
    chats = task.records == 'chat'
    continues = config.model.family == 'decoder' and task.writes and not task.given
    if not count or not (task.in_pairs or continues):
        return []
    if not task.in_pairs and not chats:
        outputs = generate(config, tokenizers, variables, [''] * min(count, 2))
        return [line for output in outputs for line in ('--- sample', output)]
    chosen = [records[i * len(records) // count] for i in range(count)]
    if chats:
        chosen = _last_replies(chosen, tokenizers)
    outputs = generate(config, tokenizers, variables, _sources(chosen), cut=True)
    lines = ['', f'{len(chosen)} examples of the split: source | generated | reference; = marks exact matches']
    for record, output in zip(chosen, outputs, strict=True):
        references = metrics.references_of(record)
        mark = '=' if output in references else ' '
        source = record['source'][-1]['content'] if chats else record['source']
        shown = (rendering.harmless(text, 200) for text in (source, output, references[0]))
        lines.append(f'{mark} {" | ".join(shown)}')
    return lines


def _last_replies(records: Sequence[Mapping[str, Any]], tokenizers: Tokenizers) -> list[Mapping[str, Any]]:
    """Returns the last reply of each chat as the target of what it replies to; chats without one are left out."""
    pairs: list[Mapping[str, Any]] = []
    for messages in (record['messages'] for record in records):
        place = max(number for number, message in enumerate(messages) if message['role'] == 'assistant')
        with contextlib.suppress(BadRecord):  # of data.bad_lines=skip
            tokenizers.chat.prompt(messages[:place], tokenizers.target)
            pairs += [{'source': messages[:place], 'target': messages[place]['content']}] if place else []
    return pairs


def _sources(records: Sequence[Mapping[str, Any]]) -> list[str | Messages]:
    return [record['source'] for record in records]


_writer = functools.lru_cache(maxsize=8)(make_writer)
_refill = functools.lru_cache(maxsize=8)(refill.make_refill)
_scorer = functools.lru_cache(maxsize=8)(scorer.make_scorer)
