"""A changed program is told from an unchanged one, and by the numbers that differ."""

import ahead
import fingerprints
from tformer.distributed import hlo

ROW = {
    'flops': 1e9, 'peak_bytes': 2.0**20, 'instructions': {'fusion': 9},
    'kernels': {'tpu_custom_call splash_mha_fwd': 4},
    'collectives': [{'kind': 'all-gather', 'axes': ['data', 'fsdp'], 'count': 3, 'bytes': 128.0}],
}  # fmt: skip

PROGRAM = """
HloModule step

%body (s: f32[4]) -> f32[4] {
  %s = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} copy(%s)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %t = f32[4]{0} transpose(%x), dimensions={0}
  ROOT %y = f32[4]{0} call(%t), to_apply=%body
}
"""


def test_a_change_is_named_by_its_numbers():
    one = fingerprints.fingerprint(ROW)
    gathers = [{**ROW['collectives'][0], 'count': 4}]
    other = fingerprints.fingerprint({**ROW, 'collectives': gathers, 'kernels': {}, 'peak_bytes': 2.0**20})
    assert fingerprints.changes(one, one) == []
    assert fingerprints.changes(one, other) == [
        'all-gather over data+fsdp: 3 -> 4',
        'tpu_custom_call splash_mha_fwd: 4 -> 0',
    ]


def test_the_instructions_that_a_run_executes_are_counted_by_kind():
    assert ahead.instructions(hlo.parse(PROGRAM)) == {'transpose': 1, 'copy': 1}
