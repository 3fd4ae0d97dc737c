"""Reports: their statistics are those of `statistics`, their bytes those of the runs, and their page asks for nothing."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tformer import config
from tformer.config import Config, Data, Evaluate, Mesh, Model, Optimizer, Train
from tformer.lab import runner, trials

TINY = Config(
    model=Model(emb_dim=16, mlp_dim=64, num_heads=4, num_decoder_layers=2, max_len=16, vocab_size=64, norm='layernorm'),
    data=Data(tokenizer='symbol', length=16, batching='pack'),
    optimizer=Optimizer(warmup_steps=1),
    train=Train(num_steps=40, batch_size=8, log_every=10, eval_every=20),
    mesh=Mesh(data=1),
    evaluate=Evaluate(samples=0),
)
FAILED, UNFINISHED = 'failed', None


def built(
    home: pathlib.Path,
    arms: Sequence[tuple[Mapping[str, Any], Mapping[int, Any]]],
    base: Config = TINY,
    listed: bool = True,
    backwards: bool = False,
) -> pathlib.Path:
    """Writes the directory of a sweep whose runs ended as told, and returns it.

    Args:
      home: the directory.
      arms: what each changes, and {seed: its test loss, its scores by name, FAILED or its error, UNFINISHED}.
      base: of the sweep.
      listed: whether with the list of a sweep, or workdirs alone.
      backwards: whether the last trial is written first.
    """
    overrides = [{**changed, 'train.seed': seed} for changed, seeds in arms for seed in seeds]
    made = trials.trials(base, overrides)
    ends = [end for _, seeds in arms for end in seeds.values()]
    for trial, end in list(zip(made, ends, strict=True))[:: -1 if backwards else 1]:
        write(home / trial.directory, trial.config, end, listed)
    if listed:
        tree = runner.listing(base, made, {trial.directory: 10.0 + i for i, trial in enumerate(made)})
        (home / 'sweep.json').write_text(json.dumps(tree))
    return home


def write(place: pathlib.Path, stated: Config, end: Any, listed: bool) -> None:
    place.mkdir(parents=True)
    if listed:
        (place / 'trial.json').write_text(json.dumps(config.to_dict(stated)))
    if end is UNFINISHED:
        return
    if isinstance(end, str):
        (place / 'error.txt').write_text(f'ValueError: {end}\n')
        return
    scores = end if isinstance(end, dict) else {'loss': end}
    loss, steps = scores['loss'], stated.train.num_steps
    resolved = config.resolve(stated, vocab_size=64)
    (place / 'config.json').write_text(json.dumps(config.to_dict(resolved)))
    rows = []
    for step in range(10, steps + 1, 10):
        value = loss + 1 - step / steps
        shown = {'train/loss': value if math.isfinite(value) else None, 'train/tokens_per_second': 1000.0}
        rows.append({'step': step, **shown})
        if step % 20 == 0:
            rows.append({'step': step, 'valid/loss': value if math.isfinite(value) else None})
    (place / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (place / 'result.json').write_text(json.dumps({'test': {'step': steps, 'parameters': 1, **scores}}))
