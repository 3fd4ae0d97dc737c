"""Times tformer on a workload, as the process that timings.py asks.

python tests/accelerator/tformer_side.py train|generate|trials|data WORKLOAD [tiny]
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tformer import checks, config
from tformer.commands import benchmark
from tformer.config import Config
from tformer.decode.generate import cache_slots, make_generate
from tformer.distributed import devices, sharding
from tformer.lab.sweep import batched_trials
from tformer.model import build
from tformer.optim.hyperparameters import Hyperparameters
from tformer.training import dummy_batch, program
from workloads import TINY, WORKLOADS, Workload, median_seconds, serve

CONFIGS = {
    'gpt2_124m': 'configs/gpt2.py',
    'bert_base': 'configs/architectures/bert.py',
    'mt_base': 'configs/architectures/original.py',
    'gpt_small': 'configs/gpt2.py',
    'mt_small': 'configs/architectures/original.py:attention_biases',
}
FASTEST = {'model.scan_layers': False, 'train.loss_chunk': None}  # for a step, where memory allows
TRIALS = 8
EOS = 2


def make_config(name: str, workload: Workload, **fields: Any) -> Config:
    """Returns the config of a workload without dropout, on one device."""
    stacks = [stack for stack in ('encoder', 'decoder') if stack in workload.family]
    return checks.load(
        CONFIGS[name],
        {
            **{f'model.num_{stack}_layers': workload.layers for stack in stacks},
            'model.emb_dim': workload.width,
            'model.mlp_dim': workload.hidden,
            'model.num_heads': workload.heads,
            'model.vocab_size': workload.vocabulary,
            **({'model.encoder_vocab_size': workload.vocabulary} if len(stacks) == 2 else {}),
            'model.max_len': workload.length + workload.new_tokens,
            'model.dtype': 'bfloat16',
            'model.dropout_rate': 0.0,
            'model.attention_dropout_rate': 0.0,
            'data.length': workload.length,
            'data.tokenizer_vocab_size': workload.vocabulary,
            'data.batch_tokens': None,
            'train.batch_size': workload.rows,
            'mesh.data': 1,
            **({'decode.max_len': workload.new_tokens} if workload.new_tokens else {}),
            **fields,
        },
    )


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    known = devices.DEVICES[devices.KINDS[device.device_kind]] if device.device_kind in devices.KINDS else None
    return {
        'device': device.device_kind,
        'jax': jax.__version__,
        'peak_flops': devices.peak_flops(device.device_kind, 'bfloat16'),
        'peak_bandwidth': None if known is None else known.bandwidth,
    }


def train(name: str, workload: Workload) -> None:
    with benchmark.stepping(make_config(name, workload, **FASTEST)) as (begin, _, facts):
        _, flops = benchmark.ended(begin())
        serve(
            {**machine(), **facts, 'flops': flops},
            {'steps': lambda times: benchmark.ended([begin() for _ in range(times)][-1])},
        )


def generator(
    name: str, workload: Workload, dtype: str = 'bfloat16', quantization: str | None = None
) -> tuple[Callable[[int], Any], dict[str, int]]:
    """Returns (call(number of new tokens), the bytes of the parameters and of the cache that a step reads)."""
    cfg = dummy_batch.assumed(make_config(name, workload, **{'model.dtype': dtype, 'model.param_dtype': dtype}))
    batch = dummy_batch.random_batch(cfg)
    if workload.family == 'encoder_decoder':  # what it writes begins with one token
        batch |= {field: batch[field][:, :1] for field in ('inputs', 'positions')}
    batch = {field: jax.device_put(x) for field, x in batch.items() if field.endswith(('inputs', 'positions'))}
    model = build(cfg.model)
    variables = sharding.unboxed(jax.jit(model.init)(jax.random.key(0), batch))
    strategy = {'strategy': 'greedy'} if workload.beams == 1 else {'strategy': 'beam', 'beam_size': workload.beams}

    def decode(new_tokens: int) -> config.Decode:
        return config.Decode(**strategy, max_len=new_tokens, quantization=quantization)

    lengths = 1, workload.new_tokens
    calls = {length: make_generate(model, decode(length), eos=EOS, banned=(EOS,)) for length in lengths}
    slots = cache_slots(decode(workload.new_tokens), batch['inputs'].shape[1])
    cache = jax.eval_shape(lambda variables: model.apply(variables, batch, slots, method='start'), variables)

    def size(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    held = {'params_bytes': size(variables), 'cache_bytes': size(cache)}
    return lambda new_tokens: jax.block_until_ready(calls[new_tokens](variables, batch)), held


def generate(name: str, workload: Workload) -> None:
    call, held = generator(name, workload)
    call(workload.new_tokens)
    facts = {**machine(), **held, 'first_token_s': median_seconds(lambda: call(1))}
    serve(facts, {'calls': lambda times: [call(workload.new_tokens) for _ in range(times)]})


def trials(name: str, workload: Workload) -> None:
    """Steps of several trials of modular division under vmap, and as many steps of a trial alone."""
    spec = 'configs/algorithmic.py' + (':smoke' if workload is TINY[name] else '')
    cfg = dummy_batch.assumed(checks.load(spec, {'mesh.data': 1, 'model.vocab_size': 128}))
    batch = dummy_batch.random_batch(cfg)
    alone = program.make_program(cfg, batch)
    mesh = batched_trials.make_mesh(cfg.mesh, TRIALS)
    together = program.make_program(cfg, batch, mesh)
    rates = [cfg.optimizer.learning_rate * (1 + number) for number in range(TRIALS)]
    hypers = [Hyperparameters.of(config.override(cfg, {'optimizer.learning_rate': rate})) for rate in rates]

    def stepper(made: program.Program, step: Any, state: Any, batch: Any, hyper: Any) -> Callable[[int], None]:
        def steps(times: int) -> None:
            nonlocal state
            with made.context():
                for _ in range(times):
                    state, numbers = step(state, batch, hyper)
                jax.block_until_ready(numbers)

        steps(2)
        return steps

    single = stepper(alone, alone.jitted_step, alone.init(), batch, alone.hyper)
    stack = jax.tree.map(lambda x: np.stack([x] * TRIALS), jax.device_get(alone.init()))
    with together.context():
        states = jax.device_put(stack, batched_trials.stacked(together.shardings))
    rows = {field: np.stack([x] * TRIALS) for field, x in batch.items()}
    step = batched_trials.make_step(together, mesh, 'vmap')
    mapped = stepper(together, step, states, rows, batched_trials.stack_hypers(hypers))
    serve({**machine(), 'trials': TRIALS}, {'alone': lambda times: single(times * TRIALS), 'together': mapped})


def data(name: str, workload: Workload) -> None:
    """The pipeline on the standard library's source as bytes, in rows of the workload's length."""
    spec, fields = 'configs/algorithmic.py:reverse,smoke', {}
    if workload is WORKLOADS[name]:
        spec, fields = 'configs/lm_stdlib.py', {'data.tokenizer': 'byte', 'model.max_len': workload.length}
        fields |= {'data.length': workload.length, 'train.batch_size': workload.rows}
    serve(benchmark.benchmark(checks.load(spec, {'mesh.data': 1, **fields}), 20, 'data'), {})


KINDS: dict[str, Callable[[str, Workload], None]] = {
    'train': train,
    'generate': generate,
    'trials': trials,
    'data': data,
}

if __name__ == '__main__':
    kind, name, *tiny = sys.argv[1:]
    KINDS[kind](name, (TINY if tiny else WORKLOADS)[name])
