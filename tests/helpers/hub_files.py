"""Small tokenizer files of the five kinds that hub models come with."""

import io
import json
import pathlib
from typing import Any

import sentencepiece
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ['def f(x):\n    return x + 1\n', 'the quick <brown> fox </s> and [MASK]', 'naïve café costs <s> 12345'] * 20

BYTES = [f'<0x{byte:02X}>' for byte in range(256)]


def gpt2():
    made = library.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    made.add_special_tokens(['<|endoftext|>'])
    return made


def roberta():
    names = ['<s>', '<pad>', '</s>', '<unk>', '<mask>']
    made = library.Tokenizer(models.BPE(unk_token='<unk>'))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=names)
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.RobertaProcessing(('</s>', 2), ('<s>', 0))
    return made


def bert():
    names = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
    made = library.Tokenizer(models.WordPiece(unk_token='[UNK]'))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=names))
    made.post_processor = processors.BertProcessing(('[SEP]', 3), ('[CLS]', 2))
    made.enable_truncation(4)
    made.enable_padding(length=9)
    return made


def t5():
    names = ['<pad>', '</s>', '<unk>', *BYTES]
    made = library.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=names, unk_token='<unk>')
    made.train_from_iterator(TEXTS, trainer)
    tree = json.loads(made.to_str())
    tree['added_tokens'] = [token for token in tree['added_tokens'] if token['id'] < 3]
    tree['model'] |= {'byte_fallback': True}
    made = library.Tokenizer.from_str(json.dumps(tree))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made.add_special_tokens(['<extra_id_0>', '<extra_id_1>'])
    return made


def llama():
    pieces = [
        '<unk>',
        '<s>',
        '</s>',
        *BYTES,
        *sorted(set(''.join(TEXTS).replace(' ', '▁').replace('\n', ''))),
        '</',
        's>',
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    vocab['th'], vocab['the'] = len(vocab), len(vocab) + 1
    merges = [('<', '/'), ('s', '>'), ('</', 's>'), ('t', 'h'), ('th', 'e')]  # some converted files do merge into </s>
    made = library.Tokenizer(models.BPE(vocab, merges, unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    parts = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(['<unk>', '<s>', '</s>'])
    return made


FILES = {'gpt2': gpt2, 'roberta': roberta, 'bert': bert, 't5': t5, 'llama': llama}


# ------------------------------------------------------------------------------------------ SentencePiece models
PROBES = [
    *('the quick <brown> fox  jumps', 'naïve café costs 12345 ①ﬁ', 'hello   world \n new', '日本語 xx'),
    *(' lead and trail ', '', ' ', 'def f(x):\n    return x + 1\n', 'The QUICK Fox'),
]  # fmt: skip
CORPUS = [line for text in TEXTS for line in text.split('\n')] + [f'hello world {i} times' for i in range(200)]


def trained(place: pathlib.Path, name: str, **settings: Any) -> Any:
    """Writes a SentencePiece model and returns its processor."""
    model = io.BytesIO()
    fields = {'vocab_size': 380, 'pad_id': 3, 'hard_vocab_limit': False, 'minloglevel': 2} | settings
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **fields)
    (place / name).write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
