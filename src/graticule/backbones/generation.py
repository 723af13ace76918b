"""Generate texts with a language model, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from graticule.backbones.language import LanguageModel


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
    if tokens.ndim != 2 or tokens.dtype != torch.long or not tokens.shape[1]:
        raise ValueError(f"`tokens` must be int64 (B, N), N at least 1, got {tokens.dtype} {tuple(tokens.shape)}.")
    if not isinstance(new_tokens, int) or new_tokens < 0:
        raise ValueError(f"`new_tokens` must be a whole number of at least 0, got {new_tokens}.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"`temperature` must be at least 0 and finite, got {temperature}.")
    if top_k is not None and not 1 <= top_k <= model.vocab_size:
        raise ValueError(f"`top_k` must be from 1 to `vocab_size`, {model.vocab_size}, got {top_k}.")
    model.check_length(tokens.shape[1] + max(new_tokens - 1, 0))
    return _tokens(model, tokens, new_tokens, temperature, top_k, generator, use_cache)


@torch.inference_mode()
def _tokens(
    model: LanguageModel,
    tokens: Tensor,
    new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    use_cache: bool,
) -> Iterator[Tensor]:
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


def draw(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Draw a token from each row of logits (B, W): (B,), int64; the most likely with a temperature of 0."""
    if temperature == 0:
        return logits.argmax(-1)
    likeliest = logits.float() / temperature
    if top_k is None:
        return torch.multinomial(likeliest.softmax(-1), 1, generator=generator)[:, 0]
    values, kept = likeliest.topk(top_k)
    return kept.gather(1, torch.multinomial(values.softmax(-1), 1, generator=generator))[:, 0]
