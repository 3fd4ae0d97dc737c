"""The configuration of a run: one frozen dataclass per concern, and `Config`, which holds them."""

import dataclasses
from typing import Literal

from tformer.config.model import Model
from tformer.config.printing import Section

# The axes of the mesh: the later an axis, the more is sent along it, and the nearer are its devices.
AXES = ('pipeline', 'data', 'fsdp', 'expert', 'context', 'tensor')


@dataclasses.dataclass(frozen=True, repr=False)
class Data(Section):
    source: str = 'files'  # the kind of data source
    path: tuple[str, ...] = ()  # files: directories with {train,valid,test}.{jsonl,parquet,...}, files, globs, URLs
    valid_path: tuple[str, ...] = ()  # files: of the valid split, where `path` is not the place
    test_path: tuple[str, ...] = ()  # files: of the test split, likewise
    tfds_name: str | None = None  # tfds: e.g. 'wmt14_translate/de-en'
    tfds_dir: str | None = None  # tfds: the data directory; None: its default
    tfds_splits: tuple[str, ...] = ('train', 'validation', 'test')  # tfds: ours in order, slices allowed
    columns: tuple[str, ...] = ()  # names of the fields in the files, or order (tsv, conll); (): the objective's own
    source_template: str | None = None  # seq2seq: of the source, e.g. 'premise: {premise} hypothesis: {hypothesis}'
    target_template: str | None = None  # seq2seq: of the target, e.g. '{label}', '{tags}', '{answers[text][0]}'
    bad_lines: str = 'stop'  # a malformed line or record: stop, or skip and count it
    cleaning: tuple[str, ...] = ()  # prepare --output: what is done to a text, in order
    deduplicate: str | None = None  # prepare --output: texts that are left out; near: but for case and spaces
    stress: bool = False  # cmudict: keep the stress digits of the vowels
    split_by: str = 'word'  # cmudict: word, as the literature does, or family (inflections stay together)
    task: str = 'modular_division'  # algorithmic: what is computed
    modulus: int = 97  # algorithmic: p of the modular tasks; all numbers are from 0 to p - 1
    train_share: float = 0.5  # algorithmic, modular tasks: of all equations; half of the rest each are valid and test
    train_lengths: tuple[int, ...] = (1, 10)  # algorithmic, copy reverse sort: fewest and most numbers, valid too
    test_lengths: tuple[int, ...] = (11, 20)  # algorithmic, copy reverse sort: of the test split
    mixture: tuple[str, ...] = ()  # parts trained on together: each the fields above that differ, 'path=a weight=2'
    weight: float | None = None  # in a part of a mixture: its share of the examples; None: as many as it has
    mixture_temperature: float = 1.0  # shares are weights to the power 1/T (Raffel et al. 2020, 3.5.2)
    mixture_stages: tuple[str, ...] = ()  # other weights from a step on: 'step=1000 weights=3,1' has one for each part
    train_examples: int | None = None  # size of a sample of the training split, by train.seed, nested; None: all of it
    labels: tuple[str, ...] = ()  # classes, or types of tags (PER, not B-PER), in order; (): training's, sorted
    label_range: tuple[float, ...] = ()  # regression: the smallest label and the largest; (): any number

    tokenizer: str = 'sentencepiece'  # trained on the training split, kept in the workdir
    source_tokenizer: str | None = None  # encoder side; None: one tokenizer for both sides
    tokenizer_from: str | None = None  # a workdir whose tokenizers to use; None: train.init_from's, or trained ones
    tokenizer_path: str | None = None  # huggingface: a tokenizer.json, or the directory that holds one
    tokenizer_vocab_size: int = 8000  # sentencepiece: pieces, specials included
    tokenizer_model: str = 'unigram'  # sentencepiece: unigram or bpe
    byte_fallback: bool = True  # char, symbol, sentencepiece: what the vocabulary lacks becomes its UTF-8 bytes
    normalization: str | None = None  # of every text, before the tokenizer (Unicode Annex 15)
    sentinels: int = 0  # ids after all others that stand for spans (span_corruption), besides those of a hub tokenizer

    chat_template: str | None = None  # chat: a file in Jinja; None: the hub's, or special tokens around each message
    start: tuple[str, ...] = ('bos',)  # special tokens before a decoder's text, never scored; BART: eos, bos; GPT-2: ()
    source_start: tuple[str, ...] = ()  # encoder_decoder: special tokens before an encoder's text; BART: bos
    source_end: tuple[str, ...] = ('eos',)  # encoder_decoder: those after an encoder's text; mBART: eos, en_XX
    end: tuple[str, ...] = ('eos',)  # special tokens after a decoder's text that is classified; the hub's GPT-2: ()
    separator: tuple[str, ...] = ('sep',)  # those between two texts that are classified; RoBERTa: sep, sep

    batching: str = 'bucket'  # rows of like length, all of one length, or several examples a row
    length: int = 256  # longest row, in tokens (decoder side, or the only one)
    encoder_length: int | None = None  # longest encoder row; None: length
    overlong: str = 'drop'  # training examples over the length: drop or truncate (evaluation always truncates)
    num_buckets: int | None = None  # bucket: shapes to pad to, each compiled once; None: by lengths of texts and run
    batch_tokens: int | None = None  # bucket: tokens a batch (longer side); None: train.batch_size rows each
    mask_rate: float = 0.15  # masked_lm, span_corruption, denoising with mask: share of the tokens that is hidden
    mask_unit: str = 'token'  # masked_lm: what is hidden together; word: whole words (Cui et al. 2021)
    mask_keep: float = 0.1  # masked_lm: share of the hidden tokens that stay as they are (Wettig et al. 2023)
    mask_random: float = 0.1  # masked_lm: share of the hidden tokens that become random; the rest become the mask
    mask_copies: int | None = None  # corruptions of a text, which take turns; None: a new one in every epoch
    mean_span_length: float = 3.0  # span_corruption, denoising with infill: tokens of a span (Raffel et al. 2020)
    noise: tuple[str, ...] = ('permute', 'infill')  # denoising: what is done to a text, in order (Lewis et al. 2020)
    infill_rate: float = 0.3  # denoising with infill: share of the tokens that spans hide
    delete_rate: float = 0.15  # denoising with delete: share of the tokens that are left out
    denoisers: tuple[str, ...] = ('r3', 'r8', 's', 'x3', 'x8', 'x64', 'x64_low')  # ul2: one is drawn for each text
    fim_rate: float = 0.5  # fill_in_middle: share of the texts whose middle comes last (Bavarian et al. 2022)
    spm_rate: float = 0.5  # fill_in_middle: share of these that begin with the suffix (SPM), not the prefix (PSM)
    bidirectional_prefix: bool = True  # decoder: attend bidirectionally to the prompt (Raffel et al. 2020, 3.2.1)
    question_length: int = 64  # question_answering: longest question, in tokens
    stride: int = 128  # question_answering: tokens between the windows of a long context (Devlin et al. 2019)
    row_multiple: int | None = None  # rows per batch are a multiple of this; None: microbatches x data-parallel size
    prefetch: int = 8  # batches made ahead of the device
    num_threads: int = 1  # threads that make batches, in each process
    num_workers: int | None = None  # processes that make batches; 0: this one; None: by the cores and the devices
    cache_dir: str | None = None  # of tokenised splits; None: $TFORMER_CACHE, or ~/.cache/tformer


@dataclasses.dataclass(frozen=True, repr=False)
class Optimizer(Section):
    name: str = 'adamw'  # the optimization method
    learning_rate: float = 1e-3  # the peak; with schedule noam the factor (1 is the paper's)
    schedule: str = 'cosine'  # of the learning rate, after the warm-up
    warmup_steps: int | float = 100  # linear, from 0; inverse_sqrt stays at the peak for them; below 1: of the run
    final_fraction: float = 0.0  # linear, cosine, wsd: of the peak, at the last step
    decay_fraction: float = 0.2  # wsd: share of the run, at its end, in which the rate falls (Hu et al. 2024)
    lr_multipliers: tuple[str, ...] = ()  # NAME=FACTOR: times the rate where NAME (mlp, decoder.mlp) is in the path
    layer_decay: float | None = None  # of the rate, from each layer to the one below (Clark et al. 2020, appendix B)
    frozen: tuple[str, ...] = ()  # names, as in lr_multipliers, of parameters that stay as they are
    frozen_layers: int = 0  # lowest layers of each stack that stay as they are, and the embeddings with them
    momentum: float = 0.95  # sgd, muon: decay of the gradients' sum
    beta1: float = 0.9  # decay of the first moment; schedule_free: from its steps (0) to their average (1)
    beta2: float = 0.98  # decay of the second moment; lion: of its momentum
    epsilon: float = 1e-9  # added to the root of the second moment
    weight_decay: float = 0.0  # decoupled: times the rate
    decayed_roles: tuple[str, ...] = ('kernel', 'table')  # what weight decay reaches; not norms, not biases
    clip_value: float | None = None  # of each number of the gradient, before clip_norm
    clip_norm: float | None = 1.0  # of the global gradient
    master_dtype: str | None = None  # of copies of bfloat16 parameters that updates add up in; None: no copies
    moment_dtype: str = 'float32'  # of moments between steps; bfloat16 is rounded at random, so that they do decay
    offload: bool = False  # its state and the averages wait in the host's memory, and are on the devices for updates
    ema_decay: float | None = None  # of a moving average of the parameters, which is what is evaluated and exported


@dataclasses.dataclass(frozen=True, repr=False)
class Train(Section):
    objective: str = 'causal_lm'  # the training objective, which decides what a batch holds
    num_steps: int | None = None  # the length in optimizer steps; give this or num_epochs
    num_epochs: float | None = None  # the length in passes over the training split
    batch_size: int = 32  # rows a step; microbatches times data-parallel devices must divide them
    microbatches: int = 1  # gradient accumulation: parts that a batch is computed in
    loss_chunk: int | Literal['auto'] | None = 'auto'  # positions of logits held at once; None: all; auto: what pays
    label_smoothing: float = 0.0  # epsilon / V over all classes (Szegedy et al. 2016)
    z_loss: float = 0.0  # of the squared log-sum-exp of the logits (Chowdhery et al. 2022, 5)
    second_loss_weight: float | None = None  # masked_lm_nsp, masked_lm_sop: None is 1; replaced_token: None is 50
    teacher: str | None = None  # a workdir, or a hub directory, whose frozen model is in the loss; None: init_from
    distillation_weight: float = 0.5  # of the teacher's targets; the data's have the rest (Hinton et al. 2015, 4.1)
    distillation_temperature: float = 2.0  # divides the logits of both models (the best of Hinton et al. 2015, 4.1)
    preference_beta: float = 0.1  # dpo, ipo: how near the teacher the model stays (Rafailov et al. 2023, appendix B)
    seed: int = 0  # of the parameters, the dropout, the order and corruption of the data
    log_every: int = 50  # steps between reports
    trackers: tuple[str, ...] = ('tensorboard',)  # that also get metrics: tensorboard (if installed), wandb, mlflow
    eval_every: int | float | None = None  # steps; below 1: a share of the run; None: at the end only
    eval_batches: int | None = None  # of the valid split while training; None: all
    checkpoint_every: int | None = None  # steps; besides one at each evaluation; None: only those
    keep_last: int = 2  # newest checkpoints kept (the best is kept besides)
    keep_every: int | None = None  # steps: checkpoints of their multiples are kept, too
    best_metric: str = 'valid/loss'  # decides the best checkpoint and early stopping
    max_skipped: int = 10  # consecutive skipped updates (NaN, Inf or a spike) before the run stops
    skip_spikes: float | None = None  # standard deviations over the last 128 steps' mean, of loss or gradient norm
    max_minutes: float | None = None  # wall-clock minutes after which the run saves and stops; it can be resumed
    patience: int | None = None  # evaluations without a better best_metric before the run stops early
    init_from: str | None = None  # a workdir whose best parameters to start from (fine-tuning)
    init_model: bool = False  # init_from: model fields at their defaults are its own; False once they are read
    init_narrow: tuple[str, ...] = ()  # init_model: FIELD=VALUE where that model's emb_dim is at most 512; then ()
    init_except: tuple[str, ...] = ()  # init_from: names, as in lr_multipliers, of what is not taken from there


@dataclasses.dataclass(frozen=True, repr=False)
class Mesh(Section):
    data: int = -1  # devices, each with its rows of the batch; one axis may be -1: all that are left
    fsdp: int = 1  # the parameters are split, and the rows of the batch too
    tensor: int = 1  # heads, MLP columns and vocabulary are split
    context: int = 1  # the tokens of each row are split, keys go round in a ring, and parameters are split as by fsdp
    expert: int = 1  # the experts are split, the rows of the batch too, and other parameters as by fsdp
    pipeline: int = 1  # the layers are split into stages
    rules: str = 'fsdp_tp'  # which logical names are split over which axes
    overrides: tuple[str, ...] = ()  # NAME=AXIS, NAME=AXIS+AXIS or NAME=none: what is split otherwise than by the rules
    dcn_axis: str = 'data'  # the axis that crosses slices, where devices are joined by more than one fast network
    microbatches: int | None = None  # pipeline: parts of a batch that follow each other; None: up to 4 a stage
    pipeline_repeats: int = 1  # pipeline: how often a part goes round all stages, each with fewer layers


@dataclasses.dataclass(frozen=True, repr=False)
class Decode(Section):
    strategy: str = 'greedy'  # how the next token is chosen: greedy, sampling, minimum Bayes risk or beam search
    max_len: int = 64  # the largest number of new tokens
    beam_size: int = 4  # beam: hypotheses kept
    num_outputs: int = 1  # texts for each: the best ones of beam_size (beam) or candidates (mbr), or draws (sample)
    candidates: int = 16  # mbr: draws, of which the text most like all of them is put out (Eikema & Aziz 2020)
    utility: str = 'chrf'  # mbr: how texts are compared
    ends: tuple[str, ...] = ()  # tokens that end a text, besides EOS and that of a chat's turn: '<|eot_id|>'
    forced_end: bool = False  # the last of max_len new tokens is EOS, with probability 1 (BART, Marian)
    length_penalty: float = 0.6  # beam: alpha of ((5 + length) / 6)^alpha (Wu et al. 2016, eq. 14)
    length_offset: float = 5.0  # beam: c of ((c + length) / (c + 1))^alpha; 0: length^alpha, as in the hub's library
    early_stopping: str = 'never'  # beam: when a text is done: no better one is possible, is likely, beam_size ended
    count_cut: bool = False  # beam: a text that max_len cuts is one of the ended ones, as in the hub's library
    beam_groups: int = 1  # beam: searches that avoid each other's tokens, of beam_size / beam_groups hypotheses
    diversity_penalty: float = 0.5  # beam: what a token costs that earlier groups take (Vijayakumar et al. 2018, 3.2)
    coverage_penalty: float = 0.0  # beam: beta of what source tokens cost that are left unread (Wu et al. 2016, eq. 14)
    temperature: float = 1.0  # sample, mbr: divides the logits
    top_k: int | None = None  # sample: among the k likeliest tokens
    top_p: float | None = None  # sample: among the likeliest tokens that make up p (Holtzman et al. 2020)
    min_p: float | None = None  # sample: among tokens of this share of the likeliest's probability (Nguyen et al. 2024)
    typical_p: float | None = None  # sample: among the most typical tokens that make up p (Meister et al. 2023)
    epsilon_cutoff: float | None = None  # sample: among tokens of this probability (Hewitt et al. 2022)
    eta_cutoff: float | None = None  # sample: of less where the entropy is high (Hewitt et al. 2022)
    repetition_penalty: float = 1.0  # divides the logits of all tokens so far (Keskar et al. 2019, 4.1); 1: none
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were generated
    frequency_penalty: float = 0.0  # subtracted as often as a token was generated
    no_repeat_ngram: int | None = None  # no n-gram of this n comes twice (Paulus et al. 2018, 2.5); None: any may
    min_len: int = 0  # the least number of new tokens before the end; at most max_len
    choices: tuple[str, ...] = ()  # the text is one of these; (): any
    regex: str | None = None  # the text matches this regular expression, the whole of it
    json_schema: str | None = None  # the text is JSON that fits the schema in this file
    banned: tuple[str, ...] = ()  # texts that stand nowhere in it, by whatever tokens
    begin: str | None = None  # the text begins with this one, by whatever tokens
    bias: tuple[str, ...] = ()  # TEXT=NUMBER: added to the logit of its last token behind its others; beam: 0 or less
    guidance: float = 1.0  # how much what the prompt adds counts (Sanchez et al. 2024); 1: as much as without guidance
    draft: str | None = None  # 'prompt': tokens are drafted as they followed in the text before, and read together
    draft_len: int = 4  # tokens that are drafted at a time
    gap: str = '<FILL_ME>'  # fill_in_middle: what stands in a prompt where the text is to be written
    batch_size: int = 64  # sequences decoded together
    quantization: str | None = None  # 'int8': products by integers of 8 bits, of parameters and activations
    cache_quantization: str | None = None  # 'int8': keys and values of earlier tokens in 8 bits
    prefill_chunk: int | None = None  # tokens of a prompt that are read at once, which bounds memory; None: all


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluate(Section):
    metrics: tuple[str, ...] = ()  # metrics of generated text
    language: str | None = None  # of generated text (ISO 639-1): words of bleu in zh, ja, ko, and of bleu_tokenized
    positive_label: str | None = None  # classification, label_f1: the class that the score f1 is of
    max_examples: int | None = None  # of the split, its first ones; None: all
    examples_while_training: int = 0  # of the valid split, generated from at every evaluation
    samples: int = 10  # generated and printed at the end
    lengths: tuple[int, ...] = ()  # causal_lm: the split is also scored in windows of so many tokens: loss_at_N
    answer_length: int = 30  # question_answering: longest answer, in tokens
    null_threshold: float | None = None  # question_answering: how much better no answer must be; None: always one


@dataclasses.dataclass(frozen=True, repr=False)
class Config(Section):
    """All of a run: a tree of frozen dataclasses, equal to the locked ConfigDict that `configs/*.py` return."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    mesh: Mesh = Mesh()
    decode: Decode = Decode()
    evaluate: Evaluate = Evaluate()
    extensions: tuple[str, ...] = ()  # Python files that add rows to tables: PATH, resolved to PATH@DIGEST
