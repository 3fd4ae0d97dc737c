"""Compiles train steps that keep arrays in the host's memory, one process for all; prints a line of JSON each.

python tests/helpers/ahead_offload.py v5e:2x4 | h100:8
"""

import json
import sys

from places import ROOT
from tformer.commands.planning import dry_run
from tformer.config import load, override
from tformer.distributed import devices

CASES = {  # what waits on the host -> the fields that send it there
    'nothing': {'model.remat': 'dots'},
    'products': {'model.remat': 'offload'},
    'state': {'model.remat': 'dots', 'optimizer.offload': True, 'optimizer.ema_decay': 0.99},
}


FIELDS = {  # of a small BERT whose biases, of which every device has all, are no multiple of a TPU's lanes
    'model.vocab_size': 512,
    'model.emb_dim': 200,
    'model.mlp_dim': 400,
    'model.num_heads': 4,
    'model.head_dim': 64,
    'model.num_encoder_layers': 2,  # of one alone nothing would wait: its backward pass comes next
    'model.scan_layers': False,
    'model.dropout_rate': 0.0,
    'model.attention_dropout_rate': 0.0,
    'model.dtype': 'bfloat16',
    'data.length': 512,
    'data.batch_tokens': None,
    'train.batch_size': 8,
    'mesh.data': 1,
    'mesh.fsdp': 4,
    'mesh.context': 2,
}


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    bert = load(str(ROOT / 'configs' / 'bert.py'))
    for case, fields in CASES.items():
        run = dry_run.compile_program('train step', override(bert, FIELDS | fields), target)
        row = {'case': case, 'state': run.on_host, 'products': run.kept_on_host, 'peak': run.peak}
        print(json.dumps(row), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
