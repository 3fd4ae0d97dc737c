"""Compiles tiny train steps for the devices of an accelerator as they are asked for; prints a line of JSON each.

echo 'fsdp decoder' | python tests/helpers/ahead.py v5e:2x4 | v5e:2x4:2 | h100:8
"""

import collections
import json
import sys

from tformer.commands.planning import dry_run, dry_run_report
from tformer.config import Config, Data, Mesh, Model, Optimizer, Train
from tformer.distributed import devices, hlo

MESHES = {
    'data': Mesh(data=8),
    'fsdp': Mesh(data=1, fsdp=8),
    'tensor': Mesh(data=2, tensor=4),
    'sequence': Mesh(data=2, tensor=4, rules='fsdp_tp_sp'),
    'context': Mesh(data=2, context=4),
    'pipeline': Mesh(data=2, pipeline=4),
    'expert': Mesh(data=2, expert=4),
    'capacity': Mesh(data=2, expert=4),
}
SLICES = {'slices': Mesh(data=2, fsdp=8)}  # of two slices, which the data center network joins
EXPERTS = {
    'expert': {'num_experts': 8, 'experts_per_token': 2},
    'capacity': {'num_experts': 8, 'experts_per_token': 2, 'expert_dispatch': 'capacity'},
}
OBJECTIVES = {'encoder': 'masked_lm', 'decoder': 'causal_lm', 'encoder_decoder': 'seq2seq'}
CASES = [(mesh, family) for mesh in MESHES for family in OBJECTIVES]
COUNTED = frozenset(
    'convolution copy custom-call dot dynamic-update-slice fusion gather reduce scatter sort transpose while'.split()
)


def case(mesh: str, family: str) -> Config:
    """Returns the config of a model of a million parameters, in bfloat16, on a mesh of eight devices or two slices."""
    return Config(
        model=Model(
            family=family, vocab_size=512, emb_dim=256, mlp_dim=512, num_heads=4, num_encoder_layers=4,
            num_decoder_layers=4, max_len=256, position='rope', norm='rmsnorm', dropout_rate=0.0, dtype='bfloat16',
            **EXPERTS.get(mesh, {}),
        ),
        data=Data(length=256, encoder_length=256 if family == 'encoder_decoder' else None),
        train=Train(objective=OBJECTIVES[family], batch_size=16, num_steps=10),
        optimizer=Optimizer(),
        mesh={**MESHES, **SLICES}[mesh],
    )  # fmt: skip


def instructions(program: hlo.Program) -> dict[str, int]:
    """Returns how many instructions of each kind a run executes, fusions as one."""
    found: collections.Counter[str] = collections.Counter()
    for i, _, times in hlo.executions(program, hlo.nothing, into_fusions=False):
        if i.opcode in COUNTED:
            found[i.opcode] += times
    return dict(found)


def main(device: str) -> None:
    target = devices.Target.parse(device)
    dry_run.pretend(1)
    devices.prepare(target.device.platform)
    for line in sys.stdin:
        run = dry_run.compile_program('train step', case(*line.split()), target)
        found = {'held': run.held, 'instructions': instructions(run.program)}
        print(json.dumps({**dry_run_report.figures(run), **found}), flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
