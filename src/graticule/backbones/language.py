"""Decoder-only transformer: maps a text to the logits of the next token, for every token."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.backbones.token_model import TokenModel, init_linear
from graticule.hub.config import CHOICES, EncodingChoice, JoiningChoice, check_arguments, given_choices, take_position
from graticule.layers.attention import CausalAttention, KeyValueCache
from graticule.layers.block import Block
from graticule.position.folded import Folded
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder
from graticule.registry.checks import check, checked, is_integer, known_name
from graticule.registry.fields import Channels, Count, Depth, Positive, Ratio, ShareBelowOne, SmallCount
from graticule.system.memory import build_within_memory


@dataclass
class TextCache:
    """State of a growing text: its positions, computed once, and the keys and values of every layer."""

    positions: list[LayerPosition]
    layers: list[KeyValueCache]

    @property
    def length(self) -> int:
        return self.layers[0].length

    @property
    def capacity(self) -> int:
        return self.layers[0].capacity

    @property
    def bytes(self) -> int:
        """Return the memory of keys and values, in bytes."""
        return sum(layer.bytes for layer in self.layers)


class LanguageModel(TokenModel):
    r"""Pre-norm blocks over the tokens of a text, each attending to itself and to those before it, and a softmax head.

    .. math:: x^{(0)}_n = E_{w_n}, \quad X^{(m)} = block(X^{(m-1)}), \quad
              p(w_{n+1} | w_{1:n}) = softmax(G\, LN(x^{(M)}_n))

    It has the blocks, encodings and joinings of the vision backbones: a text is a grid of one axis. Positions
    are computed for `context` tokens, and a shorter text gets the first rows: it is treated as the beginning of a
    longer one, whatever the encoding. A text longer than `context` is accepted if the encoding is computed; if it is
    a table, such a text is refused until `set_context` resamples the table.

    Reference: An Introduction to Transformers (Turner, 2024), sections 2 and 4.1. The norm before the head is GPT-2's
    (Radford et al., 2019), the tied weights are Press and Wolf's (2017).

    Args:
        position: builds the position (`graticule.encodings.PositionBuilder`).
        vocab_size: W, size of the vocabulary.
        context: number of tokens that position information is stored for.
        depth: M, number of blocks.
        tied: whether the head shares the weights of the token embedding, G = E.
        embed_scale: factor of the token embeddings. A table of sinusoids of amplitude 1 outweighs embeddings of std
            0.02; sqrt(D), as in Vaswani et al. (2017, section 3.4), or LaPE, which keeps the table separate, avoids it.
        others: as `Backbone`.
    """

    takes = frozenset({"added_to_stream", "after_norm", "bias", "rotary", "queries_keys", "query_scale"})
    takes_why = "Convolutions and mixing of the tokens themselves would use later tokens."

    def __init__(
        self,
        position: PositionBuilder,
        vocab_size: Count,
        context: Count = 256,
        embed_dim: Channels = 384,
        depth: Depth = 8,
        num_heads: SmallCount = 6,
        mlp_ratio: Ratio = 4.0,
        qkv_bias: bool = True,
        tied: bool = True,
        embed_scale: Positive = 1.0,
        pos_drop_rate: ShareBelowOne = 0.0,
        proj_drop_rate: ShareBelowOne = 0.0,
        attn_drop_rate: ShareBelowOne = 0.0,
        drop_path_rate: ShareBelowOne = 0.0,
        norm_layer: Callable[[int], nn.Module] | None = None,
        act_layer: type[nn.Module] | None = None,
        block_layer: Callable[..., nn.Module] = Block,
    ) -> None:
        super().__init__()
        norm_layer = norm_layer or partial(nn.LayerNorm, eps=1e-6)
        act_layer = act_layer or nn.GELU
        self.vocab_size = vocab_size
        self.embed_dim = self.num_features = embed_dim
        self.tied = tied
        self.embed_scale = embed_scale

        self.embed = nn.Embedding(vocab_size, embed_dim)
        self.grid = Grid(context)
        self.position = position(self.grid, dim=embed_dim, depth=depth, num_heads=num_heads, causal=True)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()  # stochastic depth decay rule
        self.blocks = nn.Sequential(
            *[
                block_layer(
                    embed_dim,
                    num_heads,
                    mlp_ratio,
                    qkv_bias,
                    attn=CausalAttention(embed_dim, num_heads, qkv_bias, attn_drop_rate, proj_drop_rate),
                    proj_drop=proj_drop_rate,
                    drop_path=rate,
                    norm_layer=norm_layer,
                    act_layer=act_layer,
                )
                for rate in rates
            ]
        )
        self.norm = norm_layer(embed_dim)
        # tied weights are one parameter under one name, so that a checkpoint has them once
        self.head = None if tied else nn.Linear(embed_dim, vocab_size, bias=False)
        self.finish()

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize embedding and linear weights from a normal of std 0.02, cut at 2 (absolute); biases are zero."""
        if isinstance(module, nn.Embedding):
            trunc_normal_(module.weight, std=0.02)
        init_linear(module)

    def get_classifier(self) -> nn.Module:
        """Return the module with the weights of the softmax head: with tied weights, the token embedding."""
        return self.embed if self.head is None else self.head

    @property
    def context(self) -> int:
        """Return the number of tokens that position information is stored for."""
        return self.grid.width

    def set_context(self, context: int) -> None:
        """Change the length that position information is stored for; tables are resampled permanently."""
        if not is_integer(context) or context < 1:
            raise ValueError(f"`context` must be a whole number of at least 1, got {context}.")
        grid = Grid(context)
        self.position.set_grid(grid)
        self.grid = grid

    def positions(self, length: int) -> list[LayerPosition]:
        """Return the position of each layer for a text of `length` tokens."""
        self.check_length(length)
        grid = self.grid if length <= self.context else Grid(length)
        return [position.part(0, length) for position in self.position(grid)]

    def check_length(self, length: int) -> None:
        """Check that there is position information for a text of `length` tokens.

        Raises:
            ValueError: if the text is longer than a table, or the constants of a folded model, allow.
        """
        if length < 1:
            raise ValueError("`tokens` must be at least one token long, got none.")
        if length <= self.context:
            return
        if isinstance(self.position, Folded):
            raise ValueError(
                f"`tokens` must be at most {self.context} long: the model is folded for that many, got {length}; call "
                "graticule.unfold(model) first, or cut the text."
            )
        if tables := self.position.resampled_encodings():
            raise ValueError(
                f"`tokens` must be at most {self.context} long, as the table of {' and '.join(tables)} is, got "
                f"{length}: cut the text, or call model.set_context({length}), which resamples the table permanently, "
                "or train with an encoding without a table, such as sinusoidal_1d or none."
            )

    @checked
    def new_cache(self, length: int) -> TextCache:
        """Create an empty cache for a text of up to `length` tokens, and compute its positions, once."""
        positions = self.positions(length)
        return TextCache(positions, [KeyValueCache(length) for _ in positions])

    def forward_features(self, tokens: Tensor, cache: TextCache | None = None) -> Tensor:
        """Turn tokens (B, n) into features after the final norm, (B, n, D); with a cache they are the next tokens."""
        _check_tokens(tokens)
        weight = self.embed.weight
        if type(weight) is nn.Parameter and tokens.device != weight.device and not weight.is_meta:
            raise ValueError(f"`tokens` must be on {weight.device}, the device of the weights, got {tokens.device}.")
        if cache is None:
            positions = self.positions(tokens.shape[1])
        else:
            if not isinstance(cache, TextCache) or len(cache.layers) != len(self.blocks):
                raise ValueError(
                    f"`cache` must be of `new_cache` of this model, of {len(self.blocks)} layers, got "
                    f"{f'{len(cache.layers)} layers' if isinstance(cache, TextCache) else type(cache).__name__}."
                )
            start, stop = cache.length, cache.length + tokens.shape[1]
            if stop > cache.capacity:
                raise ValueError(
                    f"`tokens` must leave the text at {cache.capacity} tokens at most, its cache's, got {stop}."
                )
            positions = [position.part(start, stop) for position in cache.positions]
        try:
            x = self.embed(tokens)
        except IndexError:  # raised on a CPU, where nothing has to wait for the check
            self.check_vocabulary(tokens)
            raise
        x = x if self.embed_scale == 1 else x * self.embed_scale
        where = [()] * len(self.blocks) if cache is None else [(layer,) for layer in cache.layers]
        for after in self.run_blocks(x, zip(self.blocks, positions, where, strict=True)):
            x = after
        return self.norm(x)

    def check_vocabulary(self, tokens: Tensor) -> None:
        """Check that tokens are in the vocabulary; on a GPU this waits for them."""
        low, high = (int(value) for value in tokens.aminmax())
        if not 0 <= low <= high < self.vocab_size:
            raise ValueError(f"`tokens` must be from 0 to {self.vocab_size - 1}, got {low} to {high}.")

    def forward_head(self, x: Tensor) -> Tensor:
        """Turn tokens (B, n, D) into the logits of the next ones, (B, n, vocab_size)."""
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)

    def forward(self, tokens: Tensor, cache: TextCache | None = None) -> Tensor:
        """Turn tokens (B, n), int64, into the logits of the one after each, (B, n, vocab_size).

        With a `cache` of `new_cache` they are the next tokens of the text in the cache.

        Raises:
            ValueError: if the text is longer than a table, or the cache, allows.
        """
        return self.forward_head(self.forward_features(tokens, cache))


def _check_tokens(tokens: Tensor) -> None:
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype != torch.long or not tokens.shape[1]:
        description = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"`tokens` must be int64 (B, N), N at least 1, got {description}.")


#: The language models; they are not in timm's registry, whose models take images.
SIZES: dict[str, dict[str, int]] = {
    "lm_nano": {"embed_dim": 64, "depth": 4, "num_heads": 4},
    "lm_tiny": {"embed_dim": 128, "depth": 6, "num_heads": 4},
    "lm_small": {"embed_dim": 384, "depth": 8, "num_heads": 6},
    "lm_base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
}


def list_language_models() -> list[str]:
    """List the names that `create_language_model` accepts."""
    return list(SIZES)


def list_language_arguments() -> list[str]:
    """List the arguments of a language model that are plain values, except for its position encoding."""
    hidden = ("self", "position", "norm_layer", "act_layer", "block_layer")
    return [name for name in inspect.signature(LanguageModel.__init__).parameters if name not in hidden]


@checked
def create_language_model(
    name: str, vocab_size: Count, *, encoding: EncodingChoice = None, joining: JoiningChoice = None, **kwargs: Any
) -> LanguageModel:
    """Create one of `list_language_models()`.

    Args:
        name: the size.
        vocab_size: size of the vocabulary.
        encoding: as in `create_model`.
        joining: as in `create_model`.
        **kwargs: `position` instead of these, `context` and the other arguments of `LanguageModel`.

    Raises:
        ValueError: for an unknown name or argument, with the nearest ones, or for an encoding that is not causal.

    Example:
        >>> import torch
        >>> model = create_language_model("lm_nano", vocab_size=65, context=128, encoding="rope_1d")
        >>> model(torch.zeros(2, 7, dtype=torch.long)).shape
        torch.Size([2, 7, 65])
    """
    size = SIZES[known_name("name", name, SIZES)]
    kwargs |= given_choices(encoding, joining)
    check_arguments(kwargs, [*inspect.signature(LanguageModel).parameters, *CHOICES], name)
    position = take_position(kwargs)
    return build_within_memory(partial(LanguageModel, position, vocab_size, **{**size, **kwargs}))


def generate(
    model: LanguageModel,
    tokens: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Continue texts: yield `new_tokens` times the next token of each, (B,), int64.

    The model is in evaluation mode until the last token, or until the iterator is closed.

    Args:
        model: the language model.
        tokens: (B, N), int64, the beginnings of the texts, at least one token.
        new_tokens: number of tokens to draw.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens; among all by default.
        generator: random generator that draws the tokens, on their device.
        use_cache: cache keys and values; otherwise every token costs a forward pass over the whole text.

    Raises:
        ValueError: before any work, if the text would become longer than a table allows (its last token is not read),
            or an argument is out of range.

    Example:
        >>> from graticule import create_language_model
        >>> model = create_language_model("lm_nano", vocab_size=10)
        >>> len([token for token in generate(model, torch.zeros(1, 1, dtype=torch.long), 5)])
        5
    """
    if not isinstance(getattr(model, "_orig_mod", model), LanguageModel):
        raise ValueError(f"`model` must be a language model, got {type(model).__name__}; see create_language_model.")
    _check_tokens(tokens)
    model.check_vocabulary(tokens)
    if not is_integer(new_tokens) or new_tokens < 0:
        raise ValueError(f"`new_tokens` must be a whole number of at least 0, got {new_tokens}.")
    if not isinstance(temperature, numbers.Real) or not 0 <= temperature < math.inf:
        raise ValueError(f"`temperature` must be at least 0 and finite, got {temperature}.")
    if top_k is not None and not (is_integer(top_k) and 1 <= top_k <= model.vocab_size):
        raise ValueError(f"`top_k` must be from 1 to `vocab_size`, {model.vocab_size}, got {top_k}.")
    check("generator", generator, torch.Generator | None)
    check("use_cache", use_cache, bool)
    model.check_length(tokens.shape[1] + max(new_tokens - 1, 0))

    @torch.inference_mode()
    def continued() -> Iterator[Tensor]:
        training = model.training
        model.eval()
        try:
            cache = model.new_cache(tokens.shape[1] + new_tokens - 1) if use_cache and new_tokens else None
            text = tokens
            for _ in range(new_tokens):
                features = model.forward_features(text, cache)
                token = draw(model.forward_head(features[:, -1]), temperature, top_k, generator)
                yield token
                text = token[:, None] if use_cache else torch.cat([text, token[:, None]], 1)
        finally:
            if training:
                model.train()

    return continued()


def draw(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Draw a token from each row of logits (B, W): (B,), int64; the most likely with a temperature of 0."""
    if temperature == 0:
        return logits.argmax(-1)
    likeliest = logits.float() / temperature
    if top_k is None:
        return torch.multinomial(likeliest.softmax(-1), 1, generator=generator)[:, 0]
    values, indices = likeliest.topk(top_k)
    return indices.gather(1, torch.multinomial(values.softmax(-1), 1, generator=generator))[:, 0]
