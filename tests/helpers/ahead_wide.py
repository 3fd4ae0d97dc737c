"""Compiles a train step and the reading of prompts, whose products have operands of hundreds of megabytes; prints a
line of JSON for each.

python tests/helpers/ahead_wide.py v5e:2x4
"""

import json
import sys

from tformer.commands.planning import dry_run, dry_run_report
from tformer.config import Config, Data, Mesh, Model, Train
from tformer.distributed import devices


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    config = Config(
        model=Model(
            family='decoder', vocab_size=512, emb_dim=768, mlp_dim=3072, num_heads=12, num_decoder_layers=2,
            max_len=1024, position='rope', dropout_rate=0.0, dtype='bfloat16',
        ),
        data=Data(length=1024),
        train=Train(objective='causal_lm', batch_size=64, num_steps=10),
        mesh=Mesh(data=1, fsdp=8),
    )  # fmt: skip
    for name in ('train step', 'prefill'):
        print(json.dumps(dry_run_report.figures(dry_run.compile_program(name, config, target))))


if __name__ == '__main__':
    main(sys.argv[1])
