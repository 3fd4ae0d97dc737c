"""`Model`: every choice of the architecture, one field each. The only configuration that a module sees."""

import dataclasses

from tformer.config.printing import Section


@dataclasses.dataclass(frozen=True, repr=False)
class Model(Section):
    family: str = 'decoder'  # encoder (BERT), decoder (GPT), encoder_decoder (the original, T5, BART)
    recurrence: str | None = None  # a recurrent cell in place of the transformer block, whose fields are then refused
    bidirectional: bool = False  # recurrence: half of each encoder layer reads backwards (Schuster & Paliwal 1997)
    recurrent_attention: str | None = None  # recurrence: scores of the decoder's attention to the encoder's outputs

    # Sizes
    vocab_size: int | None = None  # decoder and output vocabulary; None: the tokenizer's
    encoder_vocab_size: int | None = None  # None: the source tokenizer's, or vocab_size where it is shared
    emb_dim: int = 256  # width of the residual stream
    mlp_dim: int = 1024  # width inside the feed-forward
    num_encoder_layers: int = 4  # of the families that have an encoder
    num_decoder_layers: int = 4  # of the families that have a decoder
    num_heads: int = 4  # query heads
    num_kv_heads: int | None = None  # key and value heads (Ainslie et al. 2023; 1: Shazeer 2019); None: num_heads
    head_dim: int | None = None  # of queries and keys, d_k; None: emb_dim / num_heads
    value_dim: int | None = None  # of values, d_v; None: head_dim
    kv_latent_dim: int | None = None  # multi-head latent self-attention (DeepSeek-AI 2024, 2.1): d_c; None: heads' own
    query_latent_dim: int | None = None  # kv_latent_dim: queries come from a latent, too, d_c'; None: from the stream
    rotary_dim: int | None = None  # kv_latent_dim: turned numbers of a head beside head_dim, d_h^R; None: head_dim / 2
    max_len: int = 512  # longest sequence, in tokens, either side

    # Embeddings
    tied_embeddings: str | None = 'all'  # who shares a table: all; inputs: encoder, decoder; output: decoder, logits
    embedding_scale: str | None = 'sqrt_dim'  # sqrt_dim: times the root of the table's width (Vaswani et al. 2017, 3.4)
    embedding_factor_dim: int | None = None  # width of a smaller token table, projected up (Lan et al. 2020, 3.1)
    embedding_norm: bool = False  # a norm of the embeddings, before their dropout (Devlin et al. 2019)
    num_token_types: int | None = None  # vectors added by a batch's token_types: sentence A or B (Devlin et al. 2019)

    # Positions
    position: str | None = 'sinusoidal'  # the position encoding
    position_offset: int = 0  # learned, timing_signal: the row of position 0 (RoBERTa, BART and M2M100 have 2)
    rope_theta: float = 10_000.0  # rope: base of the frequencies
    rope_fraction: float = 1.0  # rope: share of each head that is turned (Black et al. 2022)
    rope_scaling: str | None = None  # rope: stretches the frequencies to more positions than were trained
    rope_factor: float = 1.0  # rope_scaling: times as many positions
    rope_trained_len: int = 8192  # rope_scaling but linear: positions before the stretch
    rope_fast_turns: float = 32.0  # rope_scaling yarn: pairs that turn more often in rope_trained_len stay as they are
    rope_slow_turns: float = 1.0  # rope_scaling yarn: pairs that turn less often are divided by rope_factor
    rope_round_ramp: bool = True  # rope_scaling yarn: the ends of the ramp between both are whole pairs
    rope_attention_factor: float | None = None  # yarn, longrope: factor on queries and keys; None: the papers'
    rope_short_factors: tuple[float, ...] = ()  # rope_scaling longrope: a divisor for each pair, up to rope_trained_len
    rope_long_factors: tuple[float, ...] = ()  # rope_scaling longrope: the divisors beyond
    local_rope_theta: float | None = None  # rope: base in local layers, unscaled (Gemma Team 2025); None: as in others
    relative_buckets: int = 32  # relative: number of buckets of distances (Raffel et al. 2020, 2.1)
    relative_max_distance: int = 128  # relative: all larger distances share one bucket
    relative_per_layer: bool = False  # relative: a table for each layer, not one for the stack
    cross_position: bool = False  # rope, alibi, relative: in cross-attention too, by the positions of both sides

    # Block
    norm: str | None = 'layernorm'  # of the residual stream
    norm_placement: str = 'pre'  # how norm and residual stand around a sub-layer
    norm_epsilon: float = 1e-6  # added to the variance
    norm_epsilon_in_root: bool = True  # False: added to the standard deviation instead
    first_norm: bool = True  # before the first attention; False: none, as of normed embeddings (Warner et al. 2024)
    norm_bias: bool = True  # layernorm, batchnorm, dyt: a vector that is added
    final_norm: bool | None = None  # a norm after the last block; None: where the placement leaves the stream as it is
    attention_bias: tuple[str, ...] = ()  # projections with a bias
    mlp_bias: bool = True  # on the feed-forward's projections
    layer_sharing: str | None = None  # one block at every depth

    # Attention
    attention_projections: bool = True  # False: queries, keys and values are the stream itself, cut into heads
    attention_scale: str | None = None  # factor on the scores; None: sqrt_head_dim, with muP head_dim
    attention_scale_dim: float = 64.0  # attention_scale sqrt_scale_dim: scores are divided by its root
    attention_pattern: tuple[str, ...] = ('global',)  # of the layers' self-attention, repeated over the depth
    window: int | None = None  # local layers: distances below w are seen: w keys in a decoder, 2w - 1 in an encoder
    attention_softcap: float | None = None  # c tanh(scores / c) (Gemma Team 2024)
    attention_sink: str | None = None  # a share of the attention that goes to no key
    qk_norm: str | None = None  # of queries and keys, before rotation (Henry et al. 2020)

    # Feed-forward
    activation: str = 'relu'  # of the feed-forward
    num_experts: int | None = None  # a mixture of feed-forwards; None: one, for all tokens
    experts_per_token: int = 2  # mixture: of the most likely experts
    router_bias: bool = False  # mixture: on the router's logits (gpt-oss, Agarwal et al. 2025)
    expert_dispatch: str = 'dropless'  # mixture: how tokens reach their experts
    expert_capacity: float = 1.25  # capacity: slots over the mean load (Fedus et al. 2022, eq. 3)
    balance_weight: float = 0.01  # mixture: of the load-balancing loss (Fedus et al. 2022, eq. 4)
    router_z_weight: float = 0.001  # mixture: of the squared router log-sum-exp (Zoph et al. 2022, eq. 5)

    # Heads
    output_bias: bool = False  # on the vocabulary logits
    output_scale: str | None = None  # factor on the stream before the vocabulary
    output_softcap: float | None = None  # c tanh(logits / c) (Gemma Team 2024)
    mlm_transform: bool = False  # BERT's dense + activation + norm before the vocabulary (Devlin et al. 2019)
    task_transform: bool = False  # the same one before classes, numbers, choices, tags, answers (Warner et al. 2024)
    transform_activation: str | None = None  # of these transforms; None: the feed-forward's
    transform_bias: bool = True  # on the dense layer of these transforms
    num_classes: int | None = None  # of sequences or tokens; None: the number of labels in the training split
    pooling: str = 'mean'  # how a sequence becomes one vector for its class or number
    pooler: bool = False  # BERT's dense + tanh after the pooling
    pooler_activation: str = 'tanh'  # pooler: what stands in place of the tanh (DistilBERT's relu, ELECTRA's gelu)
    class_bias: bool = True  # on the classes, or the number, of a sequence
    similarity_temperature: float = 0.05  # contrastive, simcse: divides the cosines of two texts (Gao et al. 2021)
    generator_fraction: float = 0.25  # replaced_token: width of the generator, by that of the model (Clark et al. 2020)

    # Low-rank adapters (Hu et al. 2022): with them only they and the heads of tasks are trained
    lora_rank: int | None = None  # numbers between an adapter's two kernels; None: no adapters
    lora_alpha: float = 16.0  # lora_rank: adapters count alpha / rank times
    lora_targets: tuple[str, ...] = ('query', 'value')  # lora_rank: which projections have one

    # Dropout
    dropout_rate: float = 0.1  # on the embeddings and on each sub-layer's output (Vaswani et al. 2017, 5.4)
    attention_dropout_rate: float = 0.0  # on the attention probabilities
    activation_dropout_rate: float = 0.0  # inside the feed-forward, after the activation
    head_dropout_rate: float = 0.0  # before the heads of fine-tuning (Devlin et al. 2019, as its code does)

    # Initialisation
    initializer: str | None = None  # of kernels and tables; None: xavier, or what placement or parametrization need
    init_scale: float = 1.0  # factor on every random initial value
    parametrization: str | None = None  # how initial values, multipliers and learning rates go with the width
    base_emb_dim: int | None = None  # mup: the width whose learning rate is known; mlp_dim and the heads grow along

    # Execution: these change speed and memory, not the function
    scan_layers: bool = True  # one compiled block for all layers; False: unrolled (same parameters)
    remat: str | None = None  # activations that the backward pass recomputes instead of storing
    attention_kernel: str = 'auto'  # implementation of attention; auto: the best that serves the model on the platform
    dtype: str = 'float32'  # of activations; softmax, norms and losses are float32 always
    param_dtype: str = 'float32'  # of kernels and tables


# Fields that change training or execution alone, or belong to the heads of tasks.
OUTSIDE_THE_FUNCTION = (
    *('dropout_rate', 'attention_dropout_rate', 'activation_dropout_rate', 'head_dropout_rate'),
    *('initializer', 'init_scale', 'balance_weight', 'router_z_weight', 'expert_capacity', 'generator_fraction'),
    *('scan_layers', 'remat', 'attention_kernel', 'dtype', 'param_dtype'),
    *('num_classes', 'pooling', 'pooler', 'pooler_activation', 'class_bias', 'similarity_temperature'),
    *('task_transform', 'lora_alpha', 'lora_targets'),
)


def own_layers(model: Model) -> dict[str, int]:
    """Returns how many layers with parameters of their own each stack of the family has: one where all share them."""
    layers = {'encoder': model.num_encoder_layers, 'decoder': model.num_decoder_layers}
    return {stack: 1 if model.layer_sharing else number for stack, number in layers.items() if stack in model.family}
