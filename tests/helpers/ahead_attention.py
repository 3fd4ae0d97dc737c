"""Compiles attention by an accelerator's own kernels on long rows, one process for all; prints a line of JSON each.

python tests/helpers/ahead_attention.py v5e:2x4 | h100:8
"""

import json
import re
import sys

from tformer.commands.planning import dry_run
from tformer.config import Config, Data, Mesh, Model, Train
from tformer.distributed import costs, devices, hlo, traffic

MESHES = {
    'data': Mesh(data=8),
    'fsdp': Mesh(data=1, fsdp=8),
    'tensor': Mesh(data=2, tensor=4),
    'context': Mesh(data=2, context=4),
    'stages': Mesh(data=2, tensor=2, pipeline=2),  # of two layers each, one after the other
    'uneven': Mesh(data=1, tensor=8),
}
UNEVEN = ('uneven', 1024, 'pad', 0.0, 'relative')  # fewer heads than devices, and a bias that cuDNN takes
CASES = [
    ('data', 8192, 'pad', 0.0, 'relative'),  # first, as cuDNN must be there before its bias of all pairs is traced
    *((mesh, 8192, batching, 0.0, 'rope') for mesh in list(MESHES)[:4] for batching in ('pad', 'pack')),
    *((mesh, 8192, 'pack', 0.1, 'rope') for mesh in ('data', 'tensor', 'context')),
    *(('data', 32768, 'pack', rate, 'rope') for rate in (0.0, 0.1)),
]
CASES += [
    *(('tensor', 8192, 'pack', 0.1, position) for position in ('relative', 'alibi')),
    *((mesh, 8192, 'pack', 0.1, 'relative') for mesh in ('data', 'context')),
    ('data', 32768, 'pack', 0.1, 'relative'),
    ('context', 8192, 'pack', 0.0, 'relative'),
    ('stages', 8192, 'pack', 0.0, 'rope'),
]


def case(mesh: str, length: int, batching: str, rate: float, position: str) -> Config:
    """Returns the config of a small decoder without any axis of its own that is as long as a block of a row."""
    stages = MESHES[mesh].pipeline
    return Config(
        model=Model(
            vocab_size=512, emb_dim=256, mlp_dim=512, num_heads=4, head_dim=64, num_decoder_layers=2 * stages,
            max_len=length, position=position, norm='rmsnorm', dropout_rate=0.0, attention_dropout_rate=rate,
            dtype='bfloat16', scan_layers=stages == 1,
        ),
        data=Data(length=length, batching=batching),
        train=Train(batch_size=8, num_steps=10, loss_chunk=512),
        mesh=MESHES[mesh],
    )  # fmt: skip


def squares(program: hlo.Program, length: int) -> list[str]:
    """Returns the shapes that a device computes of which two axes are as long as `length`."""
    shapes = {i.shape for i, _, _ in hlo.executions(program, hlo.nothing, into_fusions=False)}
    arrays = {array for shape in shapes for array in re.findall(r'\w+\[[\d,]+\]', shape)}
    return sorted(array for array in arrays if sum(size >= length for size in hlo.dims(array)) > 1)


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    for each in (*CASES, UNEVEN):
        length = each[1]
        run = dry_run.compile_program('train step', case(*each), target)
        held, block = sum(run.held.values()), length // (2 * run.mesh.shape['context'])
        found = {'kernels': costs.kernels(run.program), 'peak': run.peak, 'held': held}
        found['largest'] = max(size for _, _, size in traffic.largest(run.program, 1))
        row = {'case': each, 'squares': squares(run.program, block), **found}
        print(json.dumps(row), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
