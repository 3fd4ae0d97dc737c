"""Compiles unrolled layers of GPT-2's form for a GPU; prints the float32 arrays of their hidden layers.

python tests/helpers/ahead_hidden.py h200:1
"""

import json
import re
import sys

from tformer.commands.planning import dry_run
from tformer.config import Config, Data, Mesh, Model, Train
from tformer.distributed import devices, hlo

ROWS, LENGTH, HIDDEN = 8, 1024, 3072


def config(activation: str) -> Config:
    """Returns the config of two layers in bfloat16."""
    return Config(
        model=Model(
            family='decoder', vocab_size=512, emb_dim=768, mlp_dim=HIDDEN, num_heads=12, num_decoder_layers=2,
            max_len=LENGTH, position='learned', activation=activation, mlp_bias=True, dropout_rate=0.0,
            dtype='bfloat16', scan_layers=False,
        ),
        data=Data(length=LENGTH),
        train=Train(objective='causal_lm', batch_size=ROWS, num_steps=10),
        mesh=Mesh(data=1),
    )  # fmt: skip


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    for activation in ('gelu', 'gelu_tanh'):
        program = dry_run.compile_program('train step', config(activation), target).program
        shapes = ' '.join(i.shape for i, _, _ in hlo.executions(program, hlo.nothing, into_fusions=False))
        arrays = set(re.findall(rf'f32\[(?:{ROWS},{LENGTH}|{ROWS * LENGTH}),{HIDDEN}\]', shapes))
        print(json.dumps({'activation': activation, 'arrays': sorted(arrays)}), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
