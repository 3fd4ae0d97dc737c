"""Compiles prompts of a model whose layers stages of a pipeline share, steps of models that `fsdp` splits, one of which
has experts, prompts and steps with a position bias, and the beginning of a text in rows that devices share; prints a
line of JSON for each.

python tests/helpers/ahead_generation.py h100:8
"""

import dataclasses
import json
import sys

import jax
import numpy as np

import ahead
from tformer.commands.planning import dry_run, dry_run_report
from tformer.config import override
from tformer.decode.drawing import Drawing
from tformer.decode.engine import make_engine
from tformer.decode.spread import spread_over
from tformer.distributed import collectives, devices, hlo, sharding
from tformer.model import build
from tformer.training.dummy_batch import assumed
from tformer.training.program import make_program, placed_shapes

LAYERS, WIDTH, HIDDEN, VOCABULARY, TEXTS = 8, 1024, 4096, 32_768, 32
SIZES = {
    'model.num_decoder_layers': LAYERS, 'model.emb_dim': WIDTH, 'model.mlp_dim': HIDDEN, 'model.num_heads': 16,
    'model.vocab_size': VOCABULARY, 'model.tied_embeddings': None, 'decode.batch_size': TEXTS, 'decode.max_len': 64,
}  # fmt: skip
BIASED = {
    'model.position': 'relative', 'model.num_encoder_layers': 1, 'decode.max_len': 240, 'decode.batch_size': 256,
}  # fmt: skip
CASES = (
    ('prefill', 'pipeline', 'decoder', {}),
    ('decode step', 'fsdp', 'decoder', {}),
    ('decode step', 'fsdp', 'decoder', {'model.num_experts': 8, 'model.num_decoder_layers': 2}),
    ('prefill', 'tensor', 'encoder_decoder', BIASED),
    ('decode step', 'tensor', 'encoder_decoder', BIASED),
)


def begin_a_text(target: devices.Target) -> list[collectives.Collective]:
    """Returns what is sent when a text begins in one of the rows that all devices share."""
    config = assumed(override(ahead.case('data', 'decoder'), SIZES))
    mesh, row = dry_run.make_mesh(config, target), {'inputs': np.zeros((1, 64), np.int32)}
    with sharding.placed(mesh, config.mesh):
        batch = dry_run.abstract_batch(config, mesh, training=False)
        params = make_program(config, batch, mesh).abstract_state.params
        spread = spread_over(mesh, sharding.make_rules(config.mesh))
        engine = make_engine(build(config.model), row, rows=TEXTS, slots=128, spread=spread)
        empty = engine.empty.lower({'params': params})
        slots = placed_shapes(jax.eval_shape(engine.empty, {'params': params}), empty.compile().output_shardings)
        made = engine.insert.lower({'params': params}, slots, row, np.int32(0), Drawing()).compile()
    return collectives.of(hlo.parse(made.as_text()), mesh)


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    for name, mesh, family, fields in CASES:
        run = dry_run.compile_program(name, override(ahead.case(mesh, family), {**SIZES, **fields}), target)
        print(json.dumps(dry_run_report.figures(run)), flush=True)
    print(json.dumps({'collectives': [dataclasses.asdict(row) for row in begin_a_text(target)]}), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
