"""The same workloads in plain torch: scaled_dot_product_attention, torch.compile, bfloat16; asked by timings.py.

python tests/accelerator/torch_side.py train|generate WORKLOAD [tiny]
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from workloads import TINY, WORKLOADS, Workload, median_seconds, serve

if importlib.util.find_spec('torch') is None:
    serve({'absent': 'torch is not installed'}, {})
    sys.exit()

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Of `heads` heads; while decoding, keys and values are kept in buffers."""

    def __init__(self, width: int, heads: int, bias: bool):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key_value = nn.Linear(width, 2 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def split(self, x: Any, parts: int) -> Any:
        """Returns tensors [rows, heads, length, size of a head]."""
        rows, length, width = x.shape
        return x.view(rows, length, parts, self.heads, width // parts // self.heads).permute(2, 0, 3, 1, 4)

    def start(self, rows: int, slots: int, like: Any) -> None:
        shape = (rows, self.heads, slots, self.query.out_features // self.heads)
        self.register_buffer('keys', torch.zeros(shape, dtype=like.dtype, device=like.device))
        self.register_buffer('values', torch.zeros_like(self.keys))

    def forward(self, x: Any, source: Any = None, causal: bool = False, at: Any = None, kept: bool = False) -> Any:
        """`at`: the slots of x in the buffers; `kept`: the buffers hold all keys already."""
        (query,) = self.split(self.query(x), 1)
        if not kept:
            keys, values = self.split(self.key_value(x if source is None else source), 2)
        mask = None
        if kept:
            keys, values = self.keys, self.values
        elif at is not None:
            self.keys.index_copy_(2, at, keys)
            self.values.index_copy_(2, at, values)
            if len(at) == 1:
                keys, values, causal = self.keys, self.values, False
                mask = (torch.arange(keys.shape[2], device=x.device) <= at)[None, None, None]
        found = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal)
        return self.out(found.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention, attention to a source where `cross`, and a feed-forward; norms before or after."""

    def __init__(self, workload: Workload, cross: bool, post: bool, bias: bool, activation: Callable[..., Any]):
        super().__init__()
        width, self.post, self.activation = workload.width, post, activation
        self.attention = Attention(width, workload.heads, bias)
        self.cross = Attention(width, workload.heads, bias) if cross else None
        self.wide, self.narrow = nn.Linear(width, workload.hidden), nn.Linear(workload.hidden, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if cross else 2))

    def forward(self, x: Any, source: Any, causal: bool, at: Any, kept: bool) -> Any:
        parts = [lambda x: self.attention(x, None, causal, at)]
        if self.cross is not None:
            parts.append(lambda x: self.cross(x, source, kept=kept))
        parts.append(lambda x: self.narrow(self.activation(self.wide(x))))
        for norm, part in zip(self.norms, parts, strict=True):
            x = norm(x + part(x)) if self.post else x + part(norm(x))
        return x


class Transformer(nn.Module):
    """GPT-2, BERT with its masked-LM head, or the original transformer, as configs/ has them."""

    def __init__(self, workload: Workload):
        super().__init__()
        self.family, self.width = workload.family, workload.width
        width, post = workload.width, workload.family != 'decoder'
        bias, paired = workload.family != 'encoder_decoder', workload.family == 'encoder_decoder'
        activations = {'decoder': lambda x: F.gelu(x, approximate='tanh'), 'encoder': F.gelu, 'encoder_decoder': F.relu}
        activation = activations[workload.family]
        self.table = nn.Embedding(workload.vocabulary, width)
        nn.init.normal_(self.table.weight, std=0.02)
        longest = workload.length + workload.new_tokens
        if paired:
            angles = torch.arange(longest)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
            self.register_buffer('places', torch.cat([angles.sin(), angles.cos()], -1))
        else:
            self.places = nn.Parameter(torch.randn(longest, width) * 0.02)
        stacks = ['encoder', 'decoder'] if paired else [workload.family]
        self.stacks = nn.ModuleDict(
            {
                stack: nn.ModuleList(
                    Block(workload, paired and stack == 'decoder', post, bias, activation)
                    for _ in range(workload.layers)
                )
                for stack in stacks
            }
        )
        self.last = nn.LayerNorm(width) if workload.family == 'decoder' else None
        if workload.family == 'encoder':
            self.types, self.first = nn.Embedding(2, width), nn.LayerNorm(width)
            self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
            self.bias = nn.Parameter(torch.zeros(workload.vocabulary))

    def embed(self, tokens: Any, at: Any = None) -> Any:
        x = self.table(tokens) * (self.width**0.5 if self.family == 'encoder_decoder' else 1)
        x = x + (self.places[: tokens.shape[1]] if at is None else self.places[at]).to(x.dtype)
        return self.first(x + self.types(torch.zeros_like(tokens))) if self.family == 'encoder' else x

    def run(self, stack: str, x: Any, source: Any = None, at: Any = None, kept: bool = False) -> Any:
        for block in self.stacks[stack]:
            x = block(x, source, stack == 'decoder', at, kept)
        return x if self.last is None else self.last(x)

    def logits(self, x: Any) -> Any:
        if self.family == 'encoder':
            x = self.transform_norm(F.gelu(self.transform(x)))
            return F.linear(x, self.table.weight, self.bias)
        return F.linear(x, self.table.weight)

    def forward(self, tokens: Any, targets: Any, source: Any = None) -> Any:
        """Returns the mean loss."""
        encoded = None if source is None else self.run('encoder', self.embed(source))
        stack = 'encoder' if self.family == 'encoder' else 'decoder'
        logits = self.logits(self.run(stack, self.embed(tokens), encoded))
        smoothing = 0.1 if self.family == 'encoder_decoder' else 0.0
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), label_smoothing=smoothing)


def draw(workload: Workload, device: str) -> Any:
    return torch.randint(5, workload.vocabulary, (workload.rows, workload.length), device=device)


def train(workload: Workload, device: str) -> None:
    model = Transformer(workload).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == 'cuda')
    batch = [draw(workload, device) for _ in range(3 if workload.family == 'encoder_decoder' else 2)]
    loss_of = torch.compile(model) if device == 'cuda' else model

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def steps(times: int) -> float:
        return [step() for _ in range(times)][-1].item()

    steps(3)
    params = sum(x.numel() for x in model.parameters())
    serve({'torch': torch.__version__, 'params': params}, {'steps': steps})


def generator(workload: Workload, device: str, dtype: Any) -> tuple[Callable[[int], Any], Transformer, Any]:
    """Returns (call(number of new tokens) -> the new tokens [rows, beams, new tokens], the model, what it is given).

    No row ends before.
    """
    model = Transformer(workload).to(device, dtype).eval()
    paired, rows, beams = workload.family == 'encoder_decoder', workload.rows, workload.beams
    given = draw(workload, device)
    prompt = given[:, :1] if paired else given
    blocks = model.stacks['decoder']
    for block in blocks:
        block.attention.start(rows * beams, prompt.shape[1] + workload.new_tokens, model.table.weight)
        if block.cross is not None:
            block.cross.start(rows * beams, workload.length, model.table.weight)

    def next_logits(tokens: Any, at: Any) -> Any:
        x = model.run('decoder', model.embed(tokens, at), at=at, kept=paired)
        return model.logits(x[:, -1])

    step = torch.compile(next_logits, mode='reduce-overhead') if device == 'cuda' else next_logits

    @torch.no_grad()
    def call(new_tokens: int) -> Any:
        if paired:
            encoded = model.run('encoder', model.embed(given)).repeat_interleave(beams, 0)
            for block in blocks:
                keys, values = block.cross.split(block.cross.key_value(encoded), 2)
                block.cross.keys.copy_(keys)
                block.cross.values.copy_(values)
        tokens, length = prompt.repeat_interleave(beams, 0), prompt.shape[1]
        written = torch.zeros(rows * beams, 0, dtype=torch.long, device=device)
        scores = torch.zeros(rows, beams, device=device)
        scores[:, 1:] = -torch.inf
        for number in range(new_tokens):
            at = torch.arange(length, device=device) if number == 0 else torch.tensor([length + number - 1]).to(device)
            logits = (next_logits if number == 0 else step)(tokens, at)
            tokens, scores, parents = choose(logits.float(), scores)
            if beams > 1:
                written = written[parents]
                for block in blocks:
                    for kept in (block.attention.keys, block.attention.values):
                        kept.copy_(kept[parents])
            written = torch.cat([written, tokens], 1)
        return written.view(rows, beams, -1).cpu()

    return call, model, given


def choose(logits: Any, scores: Any) -> tuple[Any, Any, Any]:
    """Returns (the tokens [rows x beams, 1], the scores [rows, beams], the row that each goes on from)."""
    rows, beams = scores.shape
    if beams == 1:
        return logits.argmax(-1, keepdim=True), scores, None
    totals = scores[..., None] + logits.log_softmax(-1).view(rows, beams, -1)
    scores, best = totals.flatten(1).topk(beams)
    parents = best // logits.shape[-1] + beams * torch.arange(rows, device=best.device)[:, None]
    return (best % logits.shape[-1]).view(-1, 1), scores, parents.view(-1)


def generate(workload: Workload, device: str) -> None:
    call, _, _ = generator(workload, device, torch.bfloat16)
    for _ in range(2):
        call(workload.new_tokens)
    facts = {'torch': torch.__version__, 'first_token_s': median_seconds(lambda: call(1))}
    serve(facts, {'calls': lambda times: [call(workload.new_tokens) for _ in range(times)]})


if __name__ == '__main__':
    kind, name, *tiny = sys.argv[1:]
    if not torch.cuda.is_available() and not tiny:
        serve({'absent': 'torch sees no GPU'}, {})
    else:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision('high')
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
        if device == 'cpu':
            torch.set_num_threads(1)
        {'train': train, 'generate': generate}[kind]((TINY if tiny else WORKLOADS)[name], device)
