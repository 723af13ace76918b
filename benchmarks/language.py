"""Cost of the language model: training over torch.nn.TransformerEncoder, and generation per token.

    python benchmarks/language.py                                            # CPU, float32, lm_small, 8 texts of 256
    python benchmarks/language.py --phases generation --context 1024         # the time of every token

"torch" is the same model built from torch.nn.TransformerEncoder (norm_first, GELU, causal mask with is_causal=True)
with an embedding, a learnable table and a tied head; it has our weights, and the difference of the logits is printed.
"again" is our model a second time: the noise. Every round runs each model once, in an order that rotates.

Generation starts with one token and fills the context. It prints the median time per token around positions that
double, and its ratio to that of the first ones; "without" computes the whole text for each token.

Goals: ours over torch at most 1.00; constant time per token up to 1,024.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import Step, in_turns, print_ratios

import graticule

WORDS = 8192
CHOICES = {"ours": {}, "again": {}, "lape": {"joining": "lape"}}


def _choice(name: str) -> dict[str, str]:
    """Return the arguments of a choice: one of `CHOICES`, or the name of an encoding."""
    return CHOICES.get(name, {"encoding": name})


class TorchModel(nn.Module):
    """Our model built from torch.nn.TransformerEncoder, with our weights."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        dim, heads = ours.embed_dim, ours.blocks[0].attn.num_heads
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, F.gelu, 1e-6, batch_first=True, norm_first=True)
        norm = nn.LayerNorm(dim, 1e-6)
        self.encoder = nn.TransformerEncoder(layer, len(ours.blocks), norm, enable_nested_tensor=False)
        self.embed = nn.Embedding.from_pretrained(ours.embed.weight.detach().clone(), freeze=False)
        self.table = nn.Parameter(ours.position.encodings[0].pos_embed[0].detach().clone())
        mask = nn.Transformer.generate_square_subsequent_mask(ours.context)
        self.register_buffer("mask", mask)
        self.norm = self.encoder.norm
        self.norm.load_state_dict(ours.norm.state_dict())
        names = {"norm1": "norm1", "norm2": "norm2", "self_attn.out_proj": "attn.proj"}
        names |= {"linear1": "mlp.fc1", "linear2": "mlp.fc2"}
        for torch_layer, block in zip(self.encoder.layers, ours.blocks, strict=True):
            for name, module in names.items():
                torch_layer.get_submodule(name).load_state_dict(block.get_submodule(module).state_dict())
            torch_layer.self_attn.in_proj_weight.data.copy_(block.attn.qkv.weight)
            torch_layer.self_attn.in_proj_bias.data.copy_(block.attn.qkv.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (B, N, W) of tokens (B, N)."""
        length = tokens.shape[1]
        x = self.embed(tokens) + self.table[:length]
        x = self.encoder(x, self.mask[:length, :length], is_causal=True)
        return F.linear(x, self.embed.weight)


def create(options: argparse.Namespace, **kwargs: Any) -> Any:
    """Build our model."""
    torch.manual_seed(0)
    return graticule.create_language_model(options.size, vocab_size=WORDS, context=options.context, **kwargs)


def training_step(model: nn.Module, tokens: Tensor) -> Step:
    """Build a training step, including the optimizer step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def training(options: argparse.Namespace) -> None:
    """Time interleaved training steps."""
    tokens = torch.randint(WORDS, (options.batch, options.context + 1))
    models = {name: create(options, **_choice(name)) for name in options.choices}
    ours = create(options)
    models["torch"] = TorchModel(ours)
    with torch.no_grad():
        difference = (ours(tokens[:1, :-1]) - models["torch"](tokens[:1, :-1])).abs().max().item()
    print(f"\nlogits of ours and torch's differ by {difference:.1e}")
    steps = {name: training_step(model, tokens) for name, model in models.items()}
    times = in_turns(steps, rounds=options.rounds, warmup=options.warmup, device="cpu")
    pairs = [("ours", "torch"), *((name, "ours") for name in options.choices if name != "ours")]
    print_ratios(f"training, {options.batch} texts of {options.context}", times, pairs)


def seconds_a_token(model: Any, count: int, **kwargs: Any) -> list[float]:
    """Generate `count` tokens after one token; returns the time of each."""
    texts = graticule.generate(model, torch.zeros(1, 1, dtype=torch.long), count, top_k=50, **kwargs)
    times = []
    for _ in range(count):
        before = time.perf_counter()
        next(texts)
        times.append(time.perf_counter() - before)
    return times


def generation(options: argparse.Namespace) -> None:
    """Time every token of texts as long as the context."""
    count = options.context
    marks = [2**power for power in range(4, count.bit_length()) if 2**power <= count]
    print(f"\ngeneration: median ms per token around position, (over that around {marks[0]})")
    print(f"{'':28s}" + "".join(f"{mark:>15d}" for mark in marks))
    for name in options.choices:
        if name == "again":
            continue
        model = create(options, **_choice(name)).eval()
        for how, use_cache in (("", True), (", without", False)):
            if not use_cache and name != "ours":
                continue
            rounds = range(options.generation_rounds if use_cache else 1)
            seconds_a_token(model, min(count, 16), use_cache=use_cache)  # warm up
            seconds = [seconds_a_token(model, count, use_cache=use_cache) for _ in rounds]
            around = [
                statistics.median(t for times in seconds for t in times[max(mark - mark // 8 - 1, 1) : mark])
                for mark in marks
            ]
            row = "".join(f"{1e3 * t:8.2f} ({t / around[0]:4.2f})" for t in around)
            print(f"{name + how:28s}{row}")


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="lm_small", choices=graticule.list_language_models())
    parser.add_argument(
        "--choices",
        nargs="+",
        default=[*CHOICES, "none", "rope_1d", "bucketed_bias", "relative_bias"],
        choices=[*CHOICES, *graticule.list_encodings()],
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--generation-rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--phases", nargs="+", default=["training", "generation"], choices=["training", "generation"])
    parser.add_argument("--quick", action="store_true", help="a small model and short texts, in seconds: as a test")
    options = parser.parse_args()
    if options.quick:
        options.size, options.batch, options.context = "lm_nano", 1, 32
        options.choices, options.rounds, options.generation_rounds = ["ours", "again", "lape", "rope_1d"], 2, 1
    if options.context < 16:
        parser.error("--context must be at least 16, the position of the first mark.")
    threads = torch.get_num_threads()
    print(f"{options.size}, {WORDS} words, float32, eager, CPU, {threads} threads, torch {torch.__version__}")
    for phase in options.phases:
        (training if phase == "training" else generation)(options)


if __name__ == "__main__":
    main()
