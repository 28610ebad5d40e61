"""A decoder-only transformer whose attention and convolutions stop at document boundaries.

Axes: B rows, T tokens of a row, H query heads, G key-value heads, D head dimension, W width, V vocabulary, K width of
the convolutions. A row holds packed documents; `documents` numbers them (0 is padding) and `positions` counts from 0
inside each.

Every block is  x + attend(canon(norm(x)));  x + mlp(canon(norm(x))),  where canon adds a short causal depthwise
convolution to its input (Allen-Zhu, Physics of Language Models 4.1: Canon A and C, with residual). Departure: the
convolution, like attention, never looks across a document's start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig


@dataclass
class LayerCache:
    """What a block remembers of the tokens it has seen: all buffers are allocated once."""

    # [B, G, capacity, D]
    keys: Tensor
    values: Tensor
    # The last K-1 inputs of the two convolutions, oldest first: [B, K-1, W]; K-1 = 0 without convolutions.
    attention_tail: Tensor
    mlp_tail: Tensor

    def rows(self, index: Tensor) -> LayerCache:
        """A cache with rows gathered by index [B'] (repetition allowed)."""
        return LayerCache(self.keys[index], self.values[index], self.attention_tail[index], self.mlp_tail[index])


@dataclass
class Context:
    """What the blocks of one forward pass share."""

    # Rotations of queries and keys: cos and sin, each [B, 1, T, rope/2].
    cos: Tensor
    sin: Tensor
    # True where a query may see a key: [B, 1, T, S].
    visible: Tensor
    # For lag j = 1..K-1, 1.0 where token t and token t-j share a document: [B, T, 1] each; None while decoding.
    same_document: list[Tensor] | None
    # First column of the cache this pass writes to.
    start: int = 0


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Canon(nn.Module):
    """x + causal depthwise convolution of x, blind across documents. Weights [K, W], lag 0 first."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        bound = kernel**-0.5
        self.weight = nn.Parameter(torch.empty(kernel, width).uniform_(-bound, bound))

    def forward(self, x: Tensor, same_document: list[Tensor]) -> Tensor:
        # x [B, T, W]
        out = x + x * self.weight[0]
        for lag, same in enumerate(same_document, start=1):
            past = F.pad(x[:, : x.shape[1] - lag], (0, 0, lag, 0)) if lag < x.shape[1] else torch.zeros_like(x)
            out = out + past * same * self.weight[lag]
        return out

    def step(self, x: Tensor, tail: Tensor) -> Tensor:
        """One token: x [B, 1, W] after tail [B, K-1, W], which is advanced in place."""
        window = torch.cat([tail, x], dim=1)
        tail.copy_(window[:, 1:])
        return x + torch.einsum("bkw,kw->bw", window, self.weight.flip(0)).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2·(rope/2) dimensions of x [B, H, T, D] by position, half against half; the rest pass."""
    half = cos.shape[-1]
    if half == 0:
        return x
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.heads, config.key_value_heads, config.head_size
        self.queries = nn.Linear(config.width, self.heads * self.size, bias=False)
        self.keys = nn.Linear(config.width, self.kv_heads * self.size, bias=False)
        self.values = nn.Linear(config.width, self.kv_heads * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, config.width, bias=False)
        self.query_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        batch, length, _ = x.shape
        q = self.queries(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.keys(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.values(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        q = rotate(self.query_norm(q), context.cos, context.sin)
        k = rotate(self.key_norm(k), context.cos, context.sin)
        if cache is not None:
            end = context.start + length
            cache.keys[:, :, context.start : end] = k
            cache.values[:, :, context.start : end] = v
            k, v = cache.keys[:, :, :end], cache.values[:, :, :end]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=context.visible, enable_gqa=self.heads != self.kv_heads)
        return self.out(out.transpose(1, 2).reshape(batch, length, self.heads * self.size))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden_size, bias=False)
        self.up = nn.Linear(config.width, config.hidden_size, bias=False)
        self.down = nn.Linear(config.hidden_size, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)
        self.attention_canon = Canon(config.width, config.canon) if config.canon else None
        self.mlp_canon = Canon(config.width, config.canon) if config.canon else None

    @staticmethod
    def _mix(canon: Canon | None, x: Tensor, context: Context, tail: Tensor | None) -> Tensor:
        if canon is None:
            return x
        if context.same_document is None:
            assert tail is not None
            return canon.step(x, tail)
        if tail is not None:  # prefill: remember the last inputs, zeros standing for what is not there
            kept = tail.shape[1]
            tail.copy_(F.pad(x, (0, 0, kept, 0))[:, x.shape[1] :])
        return canon(x, context.same_document)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        tails = (None, None) if cache is None else (cache.attention_tail, cache.mlp_tail)
        x = x + self.attention(
            self._mix(self.attention_canon, self.attention_norm(x), context, tails[0]), context, cache
        )
        return x + self.mlp(self._mix(self.mlp_canon, self.mlp_norm(x), context, tails[1]))


class Transformer(nn.Module):
    """Tokens [B, T] to logits [B, T, V], always fp32. `vocabulary` is V."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, vocabulary, bias=False)
        self._initialise()
        if config.tied:
            self.head.weight = self.embedding.weight
        half = config.rope_size // 2
        frequencies = config.rope_base ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
        angles = torch.outer(torch.arange(config.max_length, dtype=torch.float64), frequencies)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def _initialise(self) -> None:
        """Normal with std 1/sqrt(fan in); projections into the residual stream shrink by sqrt(2 layers)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith(("attention.out", "mlp.down")):
                    std /= math.sqrt(2 * self.config.layers)
                nn.init.normal_(module.weight, std=std)
        nn.init.normal_(self.embedding.weight, std=self.config.width**-0.5)

    def parameter_count(self) -> int:
        """Parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits of every token.

        tokens [B, T]; positions [B, T] count from 0 in each document; documents [B, T] number a row's documents, 0
        being padding. Both left out: each row is one document. Raises ValueError for a document longer than max_length.
        """
        batch, length = tokens.shape
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand(batch, length)
        if documents is None:
            documents = torch.ones_like(tokens)
        return self._logits(self._run(tokens, self._packed(positions, documents), None))

    def prefill(self, tokens: Tensor, real: Tensor, capacity: int) -> tuple[Tensor, list[LayerCache]]:
        """Read left-padded prompts into new caches.

        tokens [B, T]; real [B, T] is False on the padding at the left; capacity is the columns of the cache. Returns
        the logits after the last token [B, V] and one cache a block.
        """
        batch, length = tokens.shape
        config = self.config
        like = self.embedding.weight
        tail = max(config.canon - 1, 0)
        caches = [
            LayerCache(
                like.new_zeros(batch, config.key_value_heads, capacity, config.head_size),
                like.new_zeros(batch, config.key_value_heads, capacity, config.head_size),
                like.new_zeros(batch, tail, config.width),
                like.new_zeros(batch, tail, config.width),
            )
            for _ in range(config.layers)
        ]
        positions = (real.cumsum(1) - 1).clamp_min(0)
        context = self._packed(positions, real.long())
        x = self._run(tokens, context, caches)
        if tail:
            # The window must not hold what the convolution saw of the padding.
            inside = F.pad(real, (tail, 0))[:, length:].unsqueeze(-1)
            for cache in caches:
                cache.attention_tail.mul_(inside)
                cache.mlp_tail.mul_(inside)
        return self._logits(x[:, -1]), caches

    def step(self, tokens: Tensor, positions: Tensor, visible: Tensor, column: int, caches: list[LayerCache]) -> Tensor:
        """Logits [B, V] after one more token a row.

        tokens [B], positions [B] inside each document; visible [B, column + 1] marks the cache columns a row may see,
        its own (the last) included; column is where the caches are written.
        """
        cos, sin = self.cos[positions][:, None, None], self.sin[positions][:, None, None]
        context = Context(cos, sin, visible[:, None, None], None, start=column)
        return self._logits(self._run(tokens[:, None], context, caches)[:, -1])

    def _packed(self, positions: Tensor, documents: Tensor) -> Context:
        batch, length = documents.shape
        if length > self.config.max_length and int(positions.max()) >= self.config.max_length:
            raise ValueError(f"a document is longer than model.max_length = {self.config.max_length}")
        causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
        visible = (documents[:, :, None] == documents[:, None, :]) & causal
        same_document = []
        for lag in range(1, self.config.canon):
            same = documents.new_zeros(batch, length, dtype=torch.bool)
            if lag < length:
                same[:, lag:] = documents[:, lag:] == documents[:, :-lag]
            same_document.append(same.unsqueeze(-1).to(self.cos.dtype))
        return Context(self.cos[positions][:, None], self.sin[positions][:, None], visible[:, None], same_document)

    def _run(self, tokens: Tensor, context: Context, caches: list[LayerCache] | None) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, context, None if caches is None else caches[index])
        return self.norm(x)

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(x).float()


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at tokens, fp32. logits [..., V], tokens [...]."""
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
