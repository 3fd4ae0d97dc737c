"""Generation on a CPU by one library with random weights, as the process that generation_on_cpu.py asks.

python tests/accelerator/cpu_side.py tformer|tformer_int8|transformers|ctranslate2|ctranslate2_int8 WORKLOAD
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workloads import SMALL, TINY_ON_CPU, Workload, serve

BOS, EOS = 1, 2
Made = tuple[str, Callable[[], object]]  # the library's version, a call


def ids(workload: Workload) -> np.ndarray:
    """Returns the tokens of prompts, or of sources."""
    return np.random.default_rng(0).integers(5, workload.vocabulary, (workload.rows, workload.length))


def tformer(name: str, workload: Workload, quantization: str | None = None) -> Made:
    import jax

    import tformer_side
    from tformer.commands import allocator

    allocator.keep_memory()
    call, _ = tformer_side.generator(name, workload, 'float32', quantization)
    return f'jax {jax.__version__}', lambda: call(workload.new_tokens)


def transformers(name: str, workload: Workload) -> Made:
    import torch
    import transformers as hub

    torch.set_num_threads(cores())
    torch.manual_seed(0)
    names = {'bos_token_id': BOS, 'eos_token_id': EOS, 'pad_token_id': 0, 'vocab_size': workload.vocabulary}
    if workload.family == 'decoder':
        shape = {'n_embd': workload.width, 'n_layer': workload.layers, 'n_head': workload.heads}
        shape |= {'n_inner': workload.hidden, 'n_positions': workload.length + workload.new_tokens}
        model = hub.GPT2LMHeadModel(hub.GPT2Config(**names, **shape))
    else:
        shape = {'d_model': workload.width, 'max_position_embeddings': workload.length + workload.new_tokens}
        for stack in ('encoder', 'decoder'):
            shape |= {f'{stack}_layers': workload.layers, f'{stack}_attention_heads': workload.heads}
            shape |= {f'{stack}_ffn_dim': workload.hidden}
        marian = hub.MarianConfig(
            **names, **shape, activation_function='relu', decoder_start_token_id=BOS, forced_eos_token_id=None
        )
        model = hub.MarianMTModel(marian)
    model.eval()
    tokens = torch.from_numpy(ids(workload))
    amount = {'min_new_tokens': workload.new_tokens, 'max_new_tokens': workload.new_tokens}
    options = {**amount, 'num_beams': workload.beams, 'do_sample': False, 'attention_mask': torch.ones_like(tokens)}

    def call() -> object:
        with torch.inference_mode():
            return model.generate(tokens, **options)

    return f'transformers {hub.__version__}, torch {torch.__version__}', call


def ctranslate2(name: str, workload: Workload, numbers: str = 'float32') -> Made:
    import ctranslate2 as library
    from ctranslate2.specs import TransformerSpec, common_spec

    if workload.family != 'encoder_decoder':
        raise ImportError('only translation is timed')
    width, vocabulary, random = workload.width, workload.vocabulary, np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32) * shape[-1] ** -0.5

    def linear(place: Any, inputs: int, outputs: int) -> None:
        place.weight, place.bias = normal(outputs, inputs), np.zeros(outputs, np.float32)

    def norm(place: Any) -> None:
        place.gamma, place.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    def attention(place: Any, sizes: Sequence[int]) -> None:
        norm(place.layer_norm)
        for each, size in zip(place.linear, sizes, strict=True):
            linear(each, width, size)

    stacks = (workload.layers, workload.layers)
    spec = TransformerSpec.from_config(stacks, workload.heads, activation=common_spec.Activation.RELU)
    table = normal(vocabulary, width)
    for stack, embeddings in ((spec.encoder, spec.encoder.embeddings[0]), (spec.decoder, spec.decoder.embeddings)):
        embeddings.weight = table
        stack.position_encodings.encodings = normal(workload.length + workload.new_tokens, width)
        norm(stack.layer_norm)
        for layer in stack.layer:
            attention(layer.self_attention, (3 * width, width))
            if stack is spec.decoder:
                attention(layer.attention, (width, 2 * width, width))
            norm(layer.ffn.layer_norm)
            linear(layer.ffn.linear_0, width, workload.hidden)
            linear(layer.ffn.linear_1, workload.hidden, width)
    spec.decoder.projection.weight, spec.decoder.projection.bias = table, np.zeros(vocabulary, np.float32)
    words = ['<unk>', '<s>', '</s>', *map(str, range(3, vocabulary))]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = words[:3]
    spec.validate()
    with tempfile.TemporaryDirectory() as place:
        spec.save(place)
        translator = library.Translator(place, compute_type=numbers, inter_threads=1, intra_threads=cores())
    sources = [[words[token] for token in row] for row in ids(workload)]
    amount = {'min_decoding_length': workload.new_tokens, 'max_decoding_length': workload.new_tokens}
    version = f'ctranslate2 {library.__version__}'
    return version, lambda: translator.translate_batch(sources, beam_size=workload.beams, max_batch_size=0, **amount)


def cores() -> int:
    return len(os.sched_getaffinity(0))


LIBRARIES: dict[str, Callable[[str, Workload], Made]] = {
    'tformer': tformer,
    'tformer_int8': functools.partial(tformer, quantization='int8'),
    'transformers': transformers,
    'ctranslate2': ctranslate2,
    'ctranslate2_int8': functools.partial(ctranslate2, numbers='int8'),
}

if __name__ == '__main__':
    library, name, *tiny = sys.argv[1:]
    workload = (TINY_ON_CPU if tiny else SMALL)[name]
    try:
        version, call = LIBRARIES[library](name, workload)
    except ImportError as error:
        serve({'absent': str(error)}, {})
        sys.exit()
    call()
    serve({'version': version}, {'calls': lambda times: [call() for _ in range(times)]})
