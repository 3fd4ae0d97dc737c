"""Writes a trained model as a hub directory: safetensors, config.json, tokenizer, model card.

    tformer export --workdir=DIR PATH [--family=NAME] [--merge] [--checkpoint=latest]

The hub's library loads PATH with from_pretrained. Low-rank adapters are written as PEFT keeps them, or with --merge
added to their kernels.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tformer import commands
from tformer.commands.import_ import HUB, new_directory
from tformer.commands.run import Run, opened
from tformer.config import Model, json_files
from tformer.config.tasks import HEADS, TASKS, head_parameters
from tformer.data import stores
from tformer.data.examples.special_tokens import marks_prefix
from tformer.errors import UserError, choose
from tformer.hf import (
    adapters,
    card,
    convert,
    generation,
    heads,
    models,
    safetensors,
    sentence_encoders,
    special_tokens,
)
from tformer.hf.directory import is_hub, open_hub
from tformer.layers.linear import merge_lora
from tformer.training import checkpoint

SHARED_FLAGS = ('workdir', 'checkpoint')
FLAGS: dict[str, commands.Flag] = {
    'family': ('string', None, "the hub's model_type, such as llama; default: the first that expresses the model"),
    'merge': ('bool', False, 'add low-rank adapters to their kernels'),
    'shard_bytes': ('int', 5_000_000_000, 'the largest size of a file of tensors'),
}
ARGUMENTS = 'PATH'


def run(arguments: list[str], overrides: dict[str, str], flags: commands.Flags) -> None:
    if len(arguments) != 1:
        raise UserError(f'export takes one PATH, not {len(arguments)}')
    stores.require_local(arguments[0], written=True)  # before the parameters are read
    loaded = Run.load(commands.needed(flags, 'workdir'), overrides, flags.checkpoint, headless=True)
    print(export(loaded, arguments[0], flags.family, merge=flags.merge, shard_bytes=flags.shard_bytes))


def export(
    run: Run | str | pathlib.Path,
    path: str | pathlib.Path,
    family: str | None = None,
    *,
    merge: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> str:
    """Writes a run as a hub directory, whole or not at all, and returns a text that says what it holds.

        >>> print(tformer.export('runs/bert', 'uploads/bert'))

    `family` is the hub's model_type; None: that of the imported model, or the first that expresses the model. `merge`
    adds low-rank adapters to their kernels; without it only they and the heads are written, as PEFT keeps them. Files
    of tensors have at most `shard_bytes`, or one tensor.

    Raises:
      UserError: no family expresses the model, by its first field in which they differ; its decoder sees a given text
        whole; its tokenizer has no room for data.sentinels; the padding is a token of texts, as
        `special_tokens.padded`; or the directory is in use.
    """
    if shard_bytes < 1:
        raise UserError(f'--shard_bytes={shard_bytes} must be positive')
    run, place = opened(run, headless=True), pathlib.Path(path)
    if marks_prefix(run.config):
        sees = "the hub's decoders see no token before its turn"
        raise UserError(f'data.bidirectional_prefix=True has no counterpart: {sees}; valid: a run trained with False')
    model, params = run.config.model, run.params
    if model.lora_rank is not None and merge:
        model, params = dataclasses.replace(model, lora_rank=None), merge_lora(params, model.lora_alpha)
    elif merge:
        raise UserError('--merge: the model has no adapters')
    family = family or _family(run, dataclasses.replace(model, lora_rank=None))
    table, head = choose(models.FAMILIES, family, '--family').model, HEADS[TASKS[run.config.train.objective].head]
    unread = [*([] if head.per_row else ['pooling', 'pooler']), *([] if head.vocabulary else heads.OUTPUT)]
    model = dataclasses.replace(model, **{name: table[name] for name in unread if name in table})
    plain = dataclasses.replace(model, lora_rank=None)
    fields = models.config_of(family, plain)
    run = dataclasses.replace(run, tokenizers=special_tokens.padded(family, run.config, run.tokenizers))
    host = jax.tree.map(np.asarray, heads.without_pooler(params))
    if len(host) < len(params):
        print('the pooler is left out: the hub has none beside a head of tokens')
    with new_directory(place) as partial:
        if model.lora_rank is None:
            said = _write_model(partial, family, run, fields, model, host, shard_bytes)
        else:
            heads.check_heads(family, models.model_of(fields), model, host.keys())
            base, flat = _origin(run), dict(convert.flat(host))
            settings = adapters.write(partial, family, flat, model, base, _others(base, flat))
            _write(partial / adapters.CONFIG, settings)
            named = card.hub_config(family, run.config, run.tokenizers, params)
            _write(partial / 'config.json', {**named, **fields})  # the names of the classes
            said = f'adapters of rank {model.lora_rank} for {base}'
        _write_beside(partial, place.name, family, run)
    return f'{place}: {family}, {said}'


def _write_model(
    place: pathlib.Path, family: str, run: Run, fields: dict[str, Any], model: Model, params: Any, shard_bytes: int
) -> str:
    """Writes config.json, whose fields of the model are `fields`, and the tensors; returns what they are."""
    tensors = convert.export_params(family, params, model)
    for name in models.FAMILIES[family].zeros:
        tensors[name] = np.zeros((1, model.vocab_size or 0), np.float32)
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    files = safetensors.write_directory(place, shapes, tensors.__getitem__, shard_bytes)
    _write(place / 'config.json', {**card.hub_config(family, run.config, run.tokenizers, params), **fields})
    return f'{sum(array.size for array in tensors.values()):,} numbers in {len(files)} file(s)'


def _write_beside(place: pathlib.Path, title: str, family: str, run: Run) -> None:
    """Writes the tokenizer, generation_config.json and the model card."""
    tokenizer = card.tokenizer_files(run.config, run.tokenizers)
    unlike = card.unexpressed(run.config, run.tokenizers, tokenizer)
    for name, stored in (tokenizer or {}).items():
        (place / name).write_bytes(stored)
    tokens = card.tokens(run.config, run.tokenizers)
    if settings := generation.generation_config(run.config, run.tokenizers, tokens):
        _write(place / generation.FILE, settings)
        if lost := generation.unexpressed(run.config):
            unlike.append(f'{generation.FILE} cannot express {", ".join(lost)}')
    for name, found in sentence_encoders.files(run.config).items():
        (place / name).parent.mkdir(exist_ok=True)
        _write(place / name, found)
    for line in unlike:
        print(line)
    newest = checkpoint.newest_metadata(run.workdir)
    text = card.card(title, family, run.config, run.results, newest[1] if newest else {}, unlike)
    (place / 'README.md').write_text(text, encoding='utf-8')


def _write(file: pathlib.Path, tree: Any) -> None:
    file.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')


def _begun_from(run: Run) -> dict[str, Any]:
    """Returns the family and the path of the hub's model that a run began from; {} where it began from none."""
    lender = run.config.train.init_from
    for home in (run.workdir, *([pathlib.Path(lender)] if lender else [])):
        if (home / HUB).is_file():
            return json_files.read(home / HUB)
        if (home / adapters.CONFIG).is_file():
            base = adapters.base_of(home)
            family = json_files.read_if_there(home / 'config.json').get('model_type') or open_hub(str(home)).family
            return {
                'path': str(pathlib.Path(base).absolute()) if pathlib.Path(base).is_dir() else base,
                'model_type': family,
            }
        if is_hub(home):
            return {'path': str(home.absolute()), **json_files.read(home / 'config.json')}
    return {}


def _origin(run: Run) -> str | None:
    """Returns where the model is that a run's adapters are for: on the hub, else the workdir that it began from."""
    return _begun_from(run).get('path') or run.config.train.init_from


def _others(base: str | None, params: Mapping[str, np.ndarray]) -> set[str]:
    """Returns the paths of parameters, but for adapters and heads of tasks, that are not those of the hub's model."""
    place = pathlib.Path(base or '')
    if base is None or ((place / 'config.json').is_file() and not is_hub(place)):  # the workdir that the run began from
        return set()
    try:
        if not place.is_dir():
            raise UserError(f'{base} is not here')
        hub = open_hub(base)
        theirs = hub.parameters(hub.run_config().model)
    except UserError as error:
        print(f'{error}: it is not known whether all but the adapters is as there', file=sys.stderr)
        return set()
    kept = {path for path in params if '/lora_' not in path and path.split('/')[0] not in head_parameters()}
    return {path for path in kept if path not in theirs or not theirs[path].is_in(params[path])}


def _family(run: Run, model: Model) -> str:
    """Returns the family that a run's model came from, or the first of the hub's that expresses it."""
    if (known := _begun_from(run).get('model_type')) in models.FAMILIES:
        return str(known)
    reasons = []
    for name, family in models.FAMILIES.items():
        if family.model['family'] != model.family:
            continue
        try:
            models.config_of(name, model)
        except UserError as error:
            reasons.append(str(error))
        else:
            return name
    raise UserError(f'no family of the hub expresses the model: {"; ".join(reasons)[:1000]}')
