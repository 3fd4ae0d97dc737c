"""Tiny models of the hub's own library, with random weights: their tensors, inputs and logits for test_hf_parity, and
what they write for test_hub_searches.

    python tests/helpers/make_hf_reference.py [CASE ...]  # writes tests/reference/*.npz; needs torch, not JAX
    python tests/helpers/make_hf_reference.py written     # writes tests/reference/written.json

Made with torch 2.13.0 and transformers 5.23.0. Every parameter is random, those of biases and norms among them.
"""

import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

FOLDER = pathlib.Path(__file__).parents[1] / 'reference'
VOCAB = 61


class Reference(NamedTuple):
    """What a model of the hub is and computes.

    Attributes:
      config: config.json.
      tensors: as saved, by name.
      batch: of our contract; positions are -1 at padding.
      outputs: 'logits' [B, T, V]; 'pooled' [B, D] where there is a pooler; of ELECTRA's detector 'detection' [B, T];
        of a head of `HEADS` its name alone.
    """

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


def encoder(width: int) -> dict[str, Any]:
    return {
        'vocab_size': VOCAB,
        'hidden_size': width,
        'num_hidden_layers': 3,
        'num_attention_heads': 4,
        'intermediate_size': 2 * width,
        'max_position_embeddings': 24,
    }


def bert(width: int) -> Any:
    from transformers import BertConfig, BertForPreTraining

    return BertForPreTraining(BertConfig(**encoder(width), layer_norm_eps=1e-3))


def roberta(width: int) -> Any:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(RobertaConfig(**encoder(width), type_vocab_size=1, pad_token_id=1))


def distilbert(width: int) -> Any:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    sizes = {'dim': width, 'hidden_dim': 2 * width, 'n_layers': 3, 'n_heads': 4, 'max_position_embeddings': 24}
    return DistilBertForMaskedLM(DistilBertConfig(vocab_size=VOCAB, **sizes))


def electra(width: int) -> Any:
    """The generator, with a table as wide as the stream."""
    from transformers import ElectraConfig, ElectraForMaskedLM

    return ElectraForMaskedLM(ElectraConfig(**encoder(width), embedding_size=width))


def electra_detector(width: int) -> Any:
    from transformers import ElectraConfig, ElectraForPreTraining

    return ElectraForPreTraining(ElectraConfig(**encoder(width), embedding_size=10))


def albert(width: int) -> Any:
    from transformers import AlbertConfig, AlbertForPreTraining

    return AlbertForPreTraining(AlbertConfig(**encoder(width), embedding_size=10))


def modernbert(width: int) -> Any:
    """Two global layers and two local ones, which see three tokens to each side."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    near, wide = ({'rope_type': 'default', 'rope_theta': theta} for theta in (50.0, 900.0))
    fields = {
        'local_attention': 6,
        'classifier_pooling': 'mean',
        'pad_token_id': 0,
        'bos_token_id': 1,
        'eos_token_id': 2,
        'cls_token_id': 1,
    }
    rope = {'sliding_attention': near, 'full_attention': wide}
    sizes = {**encoder(width), 'num_hidden_layers': 4, 'sep_token_id': 2}
    return ModernBertForMaskedLM(ModernBertConfig(**sizes, **fields, rope_parameters=rope))


def mpnet(width: int) -> Any:
    from transformers import MPNetConfig, MPNetForMaskedLM

    return MPNetForMaskedLM(MPNetConfig(**encoder(width)))


def gpt2(width: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=width, n_layer=3, n_head=4, n_positions=24))


def t5(width: int, **more: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {'d_model': width, 'd_kv': 6, 'd_ff': 2 * width, 'num_heads': 4, 'num_layers': 2, 'num_decoder_layers': 3}
    buckets = {'relative_attention_num_buckets': 8, 'relative_attention_max_distance': 10}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes, **buckets, **more))


def t5_v1_1(width: int) -> Any:
    import torch

    model = t5(width, feed_forward_proj='gated-gelu', tie_word_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, width))  # the library ties it unless a file does not
    return model


def mt5(width: int) -> Any:
    from transformers import MT5Config, MT5ForConditionalGeneration

    sizes = {'d_model': width, 'd_kv': 6, 'd_ff': 2 * width, 'num_heads': 4, 'num_layers': 3}
    return MT5ForConditionalGeneration(MT5Config(vocab_size=VOCAB, **sizes, initializer_factor=0.2))


def two_stacks(width: int) -> dict[str, Any]:
    return {
        'vocab_size': VOCAB,
        'd_model': width,
        'encoder_layers': 2,
        'decoder_layers': 3,
        'encoder_attention_heads': 4,
        'decoder_attention_heads': 4,
        'encoder_ffn_dim': 2 * width,
        'decoder_ffn_dim': 2 * width,
        'max_position_embeddings': 24,
        'pad_token_id': 1,
    }


def bart(width: int) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(BartConfig(**two_stacks(width)))


def mbart(width: int) -> Any:
    from transformers import MBartConfig, MBartForConditionalGeneration

    return MBartForConditionalGeneration(MBartConfig(**two_stacks(width), scale_embedding=True))


def m2m_100(width: int) -> Any:
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    dropped = {'encoder_layerdrop': 0.0, 'decoder_layerdrop': 0.0}
    return M2M100ForConditionalGeneration(M2M100Config(**two_stacks(width), **dropped))


def marian(width: int) -> Any:
    from transformers import MarianConfig, MarianMTModel

    fields = {'activation_function': 'swish', 'scale_embedding': True, 'static_position_embeddings': True}
    return MarianMTModel(MarianConfig(**two_stacks(width), **fields))


def grouped(width: int) -> dict[str, Any]:
    return {**encoder(width), 'num_key_value_heads': 2}


def llama(width: int, **more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**grouped(width), 'head_dim': 8, **more}))


def llama3(width: int) -> Any:
    """With rotary pairs of all three kinds, fast, mixed and slow; tied output, biases."""
    rope = {'rope_type': 'llama3', 'rope_theta': 500.0, 'factor': 4.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
    rope['original_max_position_embeddings'] = 64
    biases = {'attention_bias': True, 'mlp_bias': True}
    return llama(width, max_position_embeddings=128, rope_parameters=rope, tie_word_embeddings=True, **biases)


def mistral(width: int) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**grouped(width), sliding_window=4))


def qwen2(width: int) -> Any:
    """With a window from the second layer on."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    windows = {'use_sliding_window': True, 'sliding_window': 3, 'max_window_layers': 1}
    return Qwen2ForCausalLM(Qwen2Config(**grouped(width), **windows, tie_word_embeddings=True))


def yarn(width: int) -> Any:
    """With pairs of all three kinds and a ramp that does not end at whole ones; a factor on queries and keys."""
    rope = {'rope_type': 'yarn', 'rope_theta': 300.0, 'factor': 4.0, 'original_max_position_embeddings': 40}
    rope |= {'beta_fast': 5.0, 'beta_slow': 0.5, 'truncate': False}
    return llama(width, max_position_embeddings=160, rope_parameters=rope, head_dim=12)


def dynamic(width: int) -> Any:
    rope = {'rope_type': 'dynamic', 'rope_theta': 300.0, 'factor': 2.0}
    return llama(width, max_position_embeddings=8, rope_parameters=rope)


def qwen3(width: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**grouped(width), head_dim=6))


def olmo2(width: int) -> Any:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**grouped(width)))


def phi3(width: int) -> Any:
    """Beyond the length that its short factors are for; the half of each head turns."""
    from transformers import Phi3Config, Phi3ForCausalLM

    half = width // 8 // 2
    rope = {'rope_type': 'longrope', 'rope_theta': 300.0, 'partial_rotary_factor': 0.5}
    rope |= {'short_factor': [1.5] * half, 'long_factor': [2.5 + i for i in range(half)]}
    lengths = {'max_position_embeddings': 32, 'original_max_position_embeddings': 8}
    sizes = {**grouped(width), 'num_attention_heads': 4}
    return Phi3ForCausalLM(Phi3Config(**{**sizes, **lengths}, rope_parameters=rope, sliding_window=5, pad_token_id=0))


def gpt_neox(width: int) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**encoder(width), rope_parameters={'partial_rotary_factor': 0.5}))


def gemma3(width: int) -> Any:
    """With a base of its own in every other layer, and a stretch in the others."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    near, wide = (
        {'rope_type': 'default', 'rope_theta': 50.0},
        {'rope_type': 'linear', 'rope_theta': 900.0, 'factor': 2.0},
    )
    rope = {'sliding_attention': near, 'full_attention': wide}
    fields = {'head_dim': 8, 'query_pre_attn_scalar': 5, 'sliding_window': 4, 'final_logit_softcapping': 3.0}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**grouped(width), **fields, sliding_window_pattern=2, rope_parameters=rope)
    )


def gpt_oss(width: int) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {'rope_type': 'yarn', 'rope_theta': 300.0, 'factor': 4.0, 'truncate': False}
    rope |= {'original_max_position_embeddings': 6}
    fields = {'head_dim': 8, 'sliding_window': 4, 'num_local_experts': 4, 'num_experts_per_tok': 2}
    return GptOssForCausalLM(GptOssConfig(**grouped(width), **fields, rope_parameters=rope))


def latent(width: int) -> dict[str, Any]:
    """Of DeepSeek: odd sizes, all layers dense."""
    ranks = {'kv_lora_rank': 7, 'qk_nope_head_dim': 5, 'qk_rope_head_dim': 6, 'v_head_dim': 3}
    return {**encoder(width), **ranks, 'num_key_value_heads': 4, 'first_k_dense_replace': 3}


def deepseek_v2(width: int) -> Any:
    """Its code takes no odd sizes."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    even = {'kv_lora_rank': 8, 'qk_nope_head_dim': 4, 'q_lora_rank': None}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**{**latent(width), **even}))


def deepseek_v3(width: int) -> Any:
    """With a latent of queries, and a stretch whose factors on scores and on what turns differ."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    rope = {'rope_type': 'yarn', 'rope_theta': 300.0, 'factor': 4.0, 'original_max_position_embeddings': 6}
    rope |= {'beta_fast': 2.0, 'beta_slow': 0.5, 'mscale': 1.4, 'mscale_all_dim': 0.707}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**latent(width), q_lora_rank=5, rope_parameters=rope))


def gemma(width: int) -> Any:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**grouped(width), head_dim=6))


def gemma2(width: int) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    fields = {'head_dim': 8, 'query_pre_attn_scalar': 8, 'sliding_window': 4, 'attn_logit_softcapping': 2.0}
    return Gemma2ForCausalLM(Gemma2Config(**grouped(width), **fields, final_logit_softcapping=3.0))


def mixtral(width: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**grouped(width), num_local_experts=4))


def with_head(name: str, architecture: str) -> Callable[[int], Any]:
    """Returns what makes a case's model with the head of a task, of three classes where it has classes."""

    def make_model(width: int) -> Any:
        import transformers

        config = CASES[name](width).config
        if not architecture.endswith('ForQuestionAnswering'):
            config.num_labels = 3
        if config.pad_token_id is None:
            config.pad_token_id = 0
        return getattr(transformers, architecture)(config)

    return make_model


CASES: dict[str, Callable[[int], Any]] = {
    'bert': bert,
    'roberta': roberta,
    'distilbert': distilbert,
    'electra': electra,
    'electra_detector': electra_detector,
    'albert': albert,
    'modernbert': modernbert,
    'mpnet': mpnet,
    'gpt2': gpt2,
    't5': t5,
    't5_v1_1': t5_v1_1,
    'mt5': mt5,
    'bart': bart,
    'mbart': mbart,
    'm2m_100': m2m_100,
    'marian': marian,
    'llama': llama,
    'llama3': llama3,
    'yarn': yarn,
    'dynamic': dynamic,
    'mistral': mistral,
    'qwen2': qwen2,
    'qwen3': qwen3,
    'olmo2': olmo2,
    'phi3': phi3,
    'gpt_neox': gpt_neox,
    'gemma': gemma,
    'gemma2': gemma2,
    'gemma3': gemma3,
    'mixtral': mixtral,
    'gpt_oss': gpt_oss,
    'deepseek_v2': deepseek_v2,
    'deepseek_v3': deepseek_v3,
}


HEADS = {'SequenceClassification': 'class', 'TokenClassification': 'tags', 'QuestionAnswering': 'spans'}
HEADED = (
    *(('bert', 'Bert'), ('roberta', 'Roberta'), ('distilbert', 'DistilBert'), ('electra', 'Electra')),
    *(('albert', 'Albert'), ('gpt2', 'GPT2'), ('gpt_neox', 'GPTNeoX'), ('llama', 'Llama'), ('mistral', 'Mistral')),
    *(('qwen3', 'Qwen3'), ('gemma2', 'Gemma2'), ('phi3', 'Phi3'), ('olmo2', 'Olmo2'), ('gpt_oss', 'GptOss')),
    *(('deepseek_v2', 'DeepseekV2'), ('deepseek_v3', 'DeepseekV3')),
    *(
        ('t5', 'T5'),
        ('t5_v1_1', 'T5'),
        ('mt5', 'MT5'),
        ('bart', 'Bart'),
        ('mbart', 'MBart'),
        ('modernbert', 'ModernBert'),
        ('mpnet', 'MPNet'),
    ),
)
LACKING = (  # by the hub's library
    *('Gemma2ForQuestionAnswering', 'Phi3ForQuestionAnswering', 'BartForTokenClassification'),
    *('MBartForTokenClassification', 'Olmo2ForTokenClassification', 'Olmo2ForQuestionAnswering'),
    *('DeepseekV2ForTokenClassification', 'DeepseekV2ForQuestionAnswering', 'DeepseekV3ForQuestionAnswering'),
    *('GptOssForQuestionAnswering', 'T5ForTokenClassification', 'MT5ForTokenClassification'),  # T5's: of one stack
)
# Stored are one head with a pooler, one of tokens, one without a bias, one of two stacks, one with a transform, and one
# whose tensors have a prefix that other checkpoints of the family lack.
STORED_HEADS = ('distilbert_class', 'roberta_tags', 'gpt2_class', 'bart_spans', 'modernbert_class', 't5_class')
for case_, prefix in HEADED:
    for end, head in HEADS.items():
        if f'{prefix}For{end}' not in LACKING:
            CASES[f'{case_}_{head}'] = with_head(case_, f'{prefix}For{end}')


def padded(
    rng: np.random.Generator, lengths: tuple[int, ...], padding: int, front: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns random tokens [B, T] and their positions; with `front` the second row is padded in front."""
    positions = np.arange(max(lengths))[None]
    positions = np.where(positions < np.array(lengths)[:, None], positions, -1)
    if front:
        positions[1] = np.roll(positions[1], max(lengths) - lengths[1])
    return np.where(positions >= 0, rng.integers(5, VOCAB, positions.shape), padding), positions


def with_options(model: Any, options: dict[str, Any]) -> Any:
    """Returns a model of the same class whose config.json has these fields changed."""
    derived = ('architectures', 'model_type', 'transformers_version')
    fields = {key: value for key, value in model.config.to_dict().items() if key not in derived}
    return type(model)(type(model.config)(**{**fields, **options}))


def make(name: str, width: int, seed: int = 0, options: dict[str, Any] | None = None) -> Reference:
    """Returns the reference of one case, computed by torch in float32; `options` change fields of its config.json."""
    import torch
    from safetensors.numpy import load_file

    torch.manual_seed(seed)
    model = CASES[name](width)
    model = (with_options(model, options) if options else model).float().eval()
    model.set_attn_implementation('eager')
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if name != 'marian' or 'embed_positions' not in key:  # sinusoids
                parameter.add_(0.2 * torch.randn_like(parameter))
        if name == 'marian':
            model.final_logits_bias.normal_()
    batch, asked = inputs_of(model, np.random.default_rng(seed))
    with torch.no_grad():
        given = {key: torch.from_numpy(value) for key, value in asked.items()}
        answer = model(**given)
        head = next((key for end, key in HEADS.items() if type(model).__name__.endswith(end)), None)
        if head == 'spans':
            outputs = {'spans': torch.stack([answer.start_logits, answer.end_logits], -1)}
        elif head is not None:
            outputs = {head: answer.logits}
        elif name == 'electra_detector':
            outputs = {'detection': answer.logits}
        else:
            outputs = {'logits': answer.prediction_logits if name in ('bert', 'albert') else answer.logits}
        if name in ('bert', 'albert'):  # with all that they were trained with
            outputs['pooled'] = model.base_model(**given).pooler_output
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        config = json.loads((pathlib.Path(place) / 'config.json').read_text())
        tensors = load_file(f'{place}/model.safetensors')
    return Reference(config, tensors, batch, {key: value.numpy() for key, value in outputs.items()})


def read(name: str, config: dict[str, Any], tensors: dict[str, np.ndarray], seed: int) -> np.ndarray:
    """Returns the logits of a directory with this config.json and these tensors, of the inputs of `make`."""
    import torch
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as place:
        (pathlib.Path(place) / 'config.json').write_text(json.dumps(config))
        own = {key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}
        save_file(own, f'{place}/model.safetensors', {'format': 'pt'})
        kind = type(CASES[name](width=16))
        model, info = kind.from_pretrained(place, attn_implementation='eager', output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys'], info
    asked = inputs_of(model, np.random.default_rng(seed))[1]
    with torch.no_grad():
        answer = model.float().eval()(**{key: torch.from_numpy(value) for key, value in asked.items()})
    return (answer.prediction_logits if name in ('bert', 'albert') else answer.logits).numpy()


def inputs_of(model: Any, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns a batch of our contract, and the same as the hub's library takes it."""
    config, padding = model.config, model.config.pad_token_id or 0
    decodes = type(model).__name__.endswith(('ForCausalLM', 'LMHeadModel'))
    tokens, positions = padded(rng, (11, 7, 4), padding, front=decodes)
    batch = {'inputs': tokens, 'positions': positions}
    asked = {'input_ids': tokens, 'attention_mask': (positions >= 0).astype(np.int64)}
    if decodes:
        asked['position_ids'] = np.maximum(positions, 0)
    if config.model_type in ('bert', 'electra', 'albert'):
        asked['token_type_ids'] = batch['token_types'] = rng.integers(0, 2, tokens.shape)
    if config.is_encoder_decoder:
        sources, source_positions = padded(rng, (9, 13, 3), padding)
        if type(model).__name__.endswith('SequenceClassification'):  # it reads where the source ends
            sources, source_positions = np.where(tokens == config.eos_token_id, 3, tokens), positions
            sources[np.arange(3), (positions >= 0).sum(1) - 1] = config.eos_token_id
        batch |= {'encoder_inputs': sources, 'encoder_positions': source_positions}
        asked = {'input_ids': sources, 'attention_mask': (source_positions >= 0).astype(np.int64)}
        asked |= {'decoder_input_ids': tokens}
    return batch, asked


def save(name: str, reference: Reference) -> None:
    groups = {'tensor': reference.tensors, 'batch': reference.batch, 'output': reference.outputs}
    arrays = {f'{group}/{key}': value for group, values in groups.items() for key, value in values.items()}
    np.savez_compressed(FOLDER / f'{name}.npz', config=np.array(json.dumps(reference.config)), **arrays)


@functools.cache
def _arrays(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of one case, which nobody may write to."""
    with np.load(FOLDER / f'{name}.npz') as file:
        arrays = dict(file)
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def load(name: str) -> Reference:
    """Returns the committed reference of one case."""
    arrays = _arrays(name)

    def group(prefix: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(f'{prefix}/'): arrays[key] for key in arrays if key.startswith(f'{prefix}/')}

    return Reference(json.loads(str(arrays['config'])), group('tensor'), group('batch'), group('output'))


# --------------------------------------------------------------------------------------------- what models write
WRITERS = ('gpt2', 'llama', 'gemma3', 'mixtral', 'qwen3', 'phi3', 'deepseek_v2', 'deepseek_v3', 't5', 'bart', 'marian')
WRITTEN = FOLDER / 'written.json'
NEW = 5  # new tokens, of which the last one is the end
LENGTHS = (
    3,
    1,
    2,
)  # of the prompts, which with the new tokens stay within the length that phi3's short factors are for
# The library's penalties count padding, which a prompt by itself has none of.
PENALISED: dict[str, Any] = {'min_new_tokens': 3, 'suppress_tokens': [1]}
CUT: dict[str, Any] = {'forced_eos_token_id': None, 'num_return_sequences': 2}
SEARCHES: dict[str, dict[str, Any]] = {
    'greedy': {'num_beams': 1},
    'beam': {'num_beams': 3, 'length_penalty': 0.0},
    'long beam': {'num_beams': 3, 'length_penalty': 1.5, 'early_stopping': 'never'},
    'greedy with penalties': {'num_beams': 1, 'repetition_penalty': 1.7, 'no_repeat_ngram_size': 1, **PENALISED},
    'beam with penalties': {
        'num_beams': 3,
        'length_penalty': 0.0,
        'repetition_penalty': 1.4,
        'no_repeat_ngram_size': 2,
        **PENALISED,
    },
    # Whether a text that the length cuts may win, and when a search ends: both of three hypotheses are compared.
    'beam in haste': {**CUT, 'num_beams': 3, 'length_penalty': 1.5, 'early_stopping': True},
    'beam by length': {**CUT, 'num_beams': 3, 'length_penalty': 2.0, 'early_stopping': False},
}
PAD, END, START, FORCED = 1, 2, 0, 3


def front_of(name: str) -> list[int]:
    """Returns the tokens that a decoder beside an encoder starts from."""
    return [START, FORCED] if name == 'bart' else [START]


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCAB, length).tolist() for length in LENGTHS]


def write(name: str, reference: Reference, seed: int) -> dict[str, list[list[int]]]:
    """Returns by `SEARCHES` the new tokens of each of `prompts`, up to the end, by the hub's library in one batch."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    paired = bool(reference.config.get('is_encoder_decoder'))
    with tempfile.TemporaryDirectory() as place:
        (pathlib.Path(place) / 'config.json').write_text(json.dumps(reference.config))
        save_file(reference.tensors, f'{place}/model.safetensors', {'format': 'pt'})
        kind = AutoModelForSeq2SeqLM if paired else AutoModelForCausalLM
        model = kind.from_pretrained(place, attn_implementation='eager').float().eval()
    longest = max(LENGTHS)
    rows, real = np.full((len(LENGTHS), longest), PAD), np.zeros((len(LENGTHS), longest), np.int64)
    for row, prompt in enumerate(prompts(seed)):
        where = slice(0, len(prompt)) if paired else slice(longest - len(prompt), longest)
        rows[row, where], real[row, where] = prompt, 1
    front = len(front_of(name)) if paired else longest
    ids = {'pad_token_id': PAD, 'bos_token_id': START, 'eos_token_id': END, 'forced_eos_token_id': END}
    if paired:
        forced = FORCED if front == 2 else None
        ids |= {'decoder_start_token_id': START, 'forced_bos_token_id': forced, 'max_new_tokens': NEW + front - 1}
    found = {}
    for search, fields in SEARCHES.items():
        whole = model.generate(
            torch.from_numpy(rows),
            attention_mask=torch.from_numpy(real),
            **{'do_sample': False, 'use_cache': False, 'max_new_tokens': NEW, **ids, **fields},
        )
        new = [row[front:] for row in whole.tolist()]
        found[search] = list(map(up_to_end, new))
    return found


def up_to_end(tokens: list[int]) -> list[int]:
    """Returns the tokens of a text, with the one that ends it where there is one."""
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens[:NEW]


if __name__ == '__main__':
    FOLDER.mkdir(exist_ok=True)
    if sys.argv[1:] == ['written']:
        texts = {name: write(name, load(name), seed=0) for name in WRITERS}
        lines = (f'{json.dumps(name)}: {json.dumps(found)}' for name, found in texts.items())
        WRITTEN.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
        sys.exit()
    stored = [name for name in CASES if name in STORED_HEADS or not name.endswith(tuple(HEADS.values()))]
    for case in sys.argv[1:] or stored:
        save(case, make(case, width=16))
