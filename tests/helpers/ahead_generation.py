"""Compiles prompts of a model whose layers stages of a pipeline share, and steps of models that `fsdp` splits, one of
which has experts; prints a line of JSON for each.

python tests/helpers/ahead_generation.py h100:8
"""

import json
import sys

import ahead
from tformer.commands import dry_run, dry_run_report
from tformer.config import override
from tformer.distributed import devices

LAYERS, WIDTH, HIDDEN, VOCABULARY, TEXTS = 8, 1024, 4096, 32_768, 32
SIZES = {
    'model.num_decoder_layers': LAYERS, 'model.emb_dim': WIDTH, 'model.mlp_dim': HIDDEN, 'model.num_heads': 16,
    'model.vocab_size': VOCABULARY, 'model.tied_embeddings': None, 'decode.batch_size': TEXTS, 'decode.max_len': 64,
}  # fmt: skip
CASES = (
    ('prefill', 'pipeline', {}),
    ('decode step', 'fsdp', {}),
    ('decode step', 'fsdp', {'model.num_experts': 8, 'model.num_decoder_layers': 2}),
)


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    for name, mesh, fields in CASES:
        run = dry_run.compile_program(name, override(ahead.case('decoder', mesh), {**SIZES, **fields}), target)
        print(json.dumps(dry_run_report.figures(run)), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
