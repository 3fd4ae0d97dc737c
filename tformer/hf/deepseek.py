"""DeepSeek's decoders with latent attention on the hub: fields of config.json, names and layouts of tensors.

Their mixtures, of shared experts and of layers that differ from the first ones, have no counterpart.
"""

from typing import Any

import numpy as np

from tformer.config import Model
from tformer.errors import UserError
from tformer.hf import llama
from tformer.hf.fields import Field, HubConfig, field, fields
from tformer.hf.rotary import ROTARY, yarn_scale
from tformer.hf.rules import Family, Rule, tensor


def _read_dense(hub: HubConfig) -> dict[str, Any]:
    dense, layers = hub.size('first_k_dense_replace', least=0), llama.depth(hub)
    if dense < layers:
        raise UserError(
            f'config.json: first_k_dense_replace={dense} leaves layers of shared and routed experts (n_shared_experts, '
            f'n_routed_experts), which have no counterpart; valid: num_hidden_layers={layers} or more'
        )
    return {}


def _read_rotary(hub: HubConfig) -> dict[str, Any]:
    """YaRN's factor m^2 on all scores is that of a smaller width of heads: d^-0.5 m^2 = (d / m^4)^-0.5."""
    found, rope = ROTARY.read(hub), hub.section('rope_parameters') or hub.section('rope_scaling')
    if rope is None or not rope.get('mscale_all_dim'):
        return found
    factor = yarn_scale(rope.number('factor'), rope.number('mscale_all_dim'))
    width = hub.size('qk_nope_head_dim') + hub.size('qk_rope_head_dim')
    return {**found, 'attention_scale': 'sqrt_scale_dim', 'attention_scale_dim': width / factor**4}


def _write_rotary(model: Model) -> dict[str, Any]:
    found = ROTARY.write(model)
    if model.attention_scale == 'sqrt_scale_dim' and model.rope_scaling == 'yarn' and model.rope_factor > 1:
        assert model.head_dim is not None and model.rotary_dim is not None
        factor = ((model.head_dim + model.rotary_dim) / model.attention_scale_dim) ** 0.25
        share = (factor - 1) / (yarn_scale(model.rope_factor, 1.0) - 1)
        found['rope_parameters']['mscale_all_dim'] = round(share, 6)  # as files state it; another is refused
    return found


def _in_halves(kept: int, turned: int) -> np.ndarray:
    """Returns the hub's entry of each of ours: of those that turn its pairs are (2i, 2i + 1), ours (i, i + R/2)."""
    return np.r_[0:kept, kept : kept + turned : 2, kept + 1 : kept + turned : 2]


def _from_latent(model: Model) -> bool:
    return model.query_latent_dim is not None


THEIRS, ATTENTION = f'{llama.LAYER}.self_attn', f'{llama.OURS}/attention'
DEEPSEEK: dict[str, Any] = {
    'model': llama.LLAMA,
    'rules': (
        *llama.ENDS,
        Rule(f'{THEIRS}.q_proj.weight', f'{ATTENTION}/query/kernel', '(N Q) D -> D N Q',
             when=lambda model: not _from_latent(model)),
        Rule(f'{THEIRS}.q_a_proj.weight', f'{ATTENTION}/query_latent/kernel', 'L D -> D L', when=_from_latent),
        Rule(f'{THEIRS}.q_a_layernorm.weight', f'{ATTENTION}/query_latent_norm/scale', 'L -> L', when=_from_latent),
        Rule(f'{THEIRS}.q_b_proj.weight', f'{ATTENTION}/query/kernel', '(N Q) L -> L N Q', when=_from_latent),
        Rule(f'{THEIRS}.kv_a_proj_with_mqa.weight', f'{ATTENTION}/{{part}}/kernel', 'part D -> D part',
             parts=('latent', 'rotary_key'), shares=('C', 'R')),
        Rule(f'{THEIRS}.kv_a_layernorm.weight', f'{ATTENTION}/latent_norm/scale', 'C -> C'),
        Rule(f'{THEIRS}.kv_b_proj.weight', f'{ATTENTION}/{{part}}/kernel', '(N part) C -> C N part',
             parts=('key_up', 'value_up'), shares=('H', 'V')),
        tensor(f'{THEIRS}.o_proj.weight', f'{ATTENTION}/out/kernel'),
        *llama.gated_mlp(),
        *llama.scales(attention_norm='input_layernorm', mlp_norm='post_attention_layernorm'),
    ),
    **llama.NAMES,
    'order': {
        'Q': lambda model: _in_halves(model.head_dim, model.rotary_dim),
        'C+R': lambda model: _in_halves(model.kv_latent_dim, model.rotary_dim),
    },
    'neutral': (  # of experts, of a tail that drafts, and derived ones
        *('n_routed_experts', 'n_shared_experts', 'num_experts_per_tok', 'moe_intermediate_size', 'moe_layer_freq'),
        *('n_group', 'topk_group', 'topk_method', 'scoring_func', 'norm_topk_prob', 'routed_scaling_factor'),
        *('aux_loss_alpha', 'seq_aux', 'ep_size', 'num_mtp_layers', 'num_nextn_predict_layers'),
        *('head_dim', 'qk_head_dim'),
    ),
}  # fmt: skip
FIELDS = (
    *fields(kv_latent_dim='kv_lora_rank'),
    *llama.WITHOUT_HEADS,
    Field(_read_rotary, _write_rotary),
    llama.ACTIVATION,
    *fields(head_dim='qk_nope_head_dim', rotary_dim='qk_rope_head_dim', value_dim='v_head_dim'),
    field('query_latent_dim', 'q_lora_rank', null=True),
    Field(_read_dense, lambda model: {'first_k_dense_replace': model.num_decoder_layers}),
)
SIZES = {**llama.DEFAULTS, **llama.SILU, 'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64, 'v_head_dim': 128}
SIZES |= {'kv_lora_rank': 512, 'q_lora_rank': 1536}
del SIZES['head_dim']
FIXED = {'attention_bias': False, 'rms_norm_eps': 1e-6}  # the hub's norms of latents have this epsilon always

FAMILIES = {
    'deepseek_v2': Family(  # DeepSeek-AI 2024a
        **DEEPSEEK,
        fields=(*FIELDS, *fields(mlp_bias='mlp_bias')),
        defaults={**SIZES, 'mlp_bias': False},
        fixed=FIXED,
    ),
    'deepseek_v3': Family(  # DeepSeek-AI 2024b
        **DEEPSEEK,
        fields=FIELDS,
        defaults={**SIZES, 'num_key_value_heads': 128},
        fixed={**FIXED, 'rope_interleave': True},
    ),
}
