"""Compiles the train step of an LSTM for eight devices; prints a line of JSON for each mesh.

python tests/helpers/ahead_recurrent.py h100:8
"""

import json
import sys

from tformer.commands.planning import dry_run, dry_run_report
from tformer.config import Config, Data, Mesh, Model, Train
from tformer.distributed import devices

LENGTH, WIDTH, LAYERS, VOCABULARY = 128, 256, 2, 512
MESHES = (Mesh(data=1, fsdp=8), Mesh(data=1, fsdp=2, tensor=4))


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    for mesh in MESHES:
        config = Config(
            model=Model(
                family='decoder', recurrence='lstm', vocab_size=VOCABULARY, emb_dim=WIDTH, num_decoder_layers=LAYERS,
                max_len=LENGTH, dropout_rate=0.0,
            ),
            data=Data(length=LENGTH),
            train=Train(objective='causal_lm', batch_size=64, num_steps=10),
            mesh=mesh,
        )  # fmt: skip
        run = dry_run.compile_program('train step', config, target)
        print(json.dumps(dry_run_report.figures(run)), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
