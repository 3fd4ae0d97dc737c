"""`Model`: every choice of the architecture, one field each. The only configuration that a module sees."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    family: str = 'decoder'  # encoder (BERT), decoder (GPT), encoder_decoder (the original, T5, BART)

    # Sizes
    vocab_size: int | None = None  # decoder and output vocabulary; None: the tokenizer's
    encoder_vocab_size: int | None = None  # None: the source tokenizer's, or vocab_size where it is shared
    emb_dim: int = 256  # width of the residual stream
    mlp_dim: int = 1024  # width inside the feed-forward
    num_encoder_layers: int = 4  # of the families that have an encoder
    num_decoder_layers: int = 4  # of the families that have a decoder
    num_heads: int = 4  # query heads
    num_kv_heads: int | None = None  # key and value heads; None: num_heads (multi-head attention)
    head_dim: int | None = None  # None: emb_dim / num_heads
    max_len: int = 512  # longest sequence, in tokens, either side

    # Embeddings
    tied_embeddings: str | None = 'all'  # which share a table: all; inputs: encoder, decoder; output: decoder, output
    embedding_scale: str | None = 'sqrt_dim'  # sqrt_dim: times sqrt(emb_dim) at the input (Vaswani et al. 2017, 3.4)
    position: str | None = 'sinusoidal'  # how the model knows the order of its tokens
    rope_theta: float = 10_000.0  # base of the rotary frequencies

    # Block
    norm: str | None = 'layernorm'  # of the residual stream
    norm_placement: str = 'pre'  # before each sub-layer, or after its residual sum
    norm_epsilon: float = 1e-6  # under the root
    final_norm: bool | None = None  # a norm after the last block; None: where the placement is pre
    activation: str = 'relu'  # of the feed-forward
    attention_bias: bool = False  # on the query, key, value and output projections
    mlp_bias: bool = True  # on the feed-forward's projections

    # Heads
    output_bias: bool = False  # on the vocabulary logits
    mlm_transform: bool = False  # BERT's dense + activation + norm before the vocabulary (Devlin et al. 2019)
    num_classes: int | None = None  # classification; None: the number of labels in the training split
    pooling: str = 'mean'  # how a sequence becomes one vector for classification

    # Dropout
    dropout_rate: float = 0.1  # on the embeddings and on each sub-layer's output (Vaswani et al. 2017, 5.4)
    attention_dropout_rate: float = 0.0  # on the attention probabilities
    activation_dropout_rate: float = 0.0  # inside the feed-forward, after the activation

    # Initialisation
    initializer: str = 'xavier'  # of kernels and tables
    init_scale: float = 1.0  # factor on every random initial value

    # Execution: these change speed and memory, not the function
    scan_layers: bool = True  # one compiled block for all layers; False: unrolled (same parameters)
    remat: str | None = None  # what the backward pass computes again
    dtype: str = 'float32'  # of activations; softmax, norms and losses are float32 always
    param_dtype: str = 'float32'  # of kernels and tables
