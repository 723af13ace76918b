"""Cost of the families, interleaved: Swin over timm's, CCT, T2T-ViT and CeiT over plain arithmetic, LaPE, folded.

    python benchmarks/families.py                                   # CPU, float32, batch 8
    python benchmarks/families.py --device cuda --batch 128 --bf16 [--compile]

"plain" is the same model with the operations of its published code: attention as two explicit products and a softmax,
and CeiT's convolutions on maps that are copied to be contiguous. "again" is the default a second time: the noise.

Goals: ours over timm's Swin at most 1.00, LaPE over the default at most 1.01, folded over the default at most 1.005.
"""

from __future__ import annotations

import argparse
import copy
from types import MethodType
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import in_turns, inference_step, print_ratios, training_step

import graticule
from graticule.backbones.ceit import LocallyEnhancedFeedForward
from graticule.layers.attention import Attention

FAMILIES = {
    "swin": ("swin_tiny_patch4_window7_224", 224, "swin_tiny_patch4_window7_224"),
    "cct": ("cct_7_3x1_32", 32, None),
    "t2t": ("t2t_vit_7", 224, None),
    "ceit": ("ceit_tiny_patch16_224", 224, None),
}


def plain_attention(self: Any, x: Tensor, *_: Any) -> Tensor:
    """Compute attention like the published code."""
    batch, tokens, dim = x.shape
    q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
    weights = F.dropout(weights, self.attn_drop, self.training)
    return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))


def plain_leff(self: Any, x: Tensor, grid: Any) -> Tensor:
    """Convolve like CeiT's code."""
    prefix, tokens = x[:, :1], x[:, 1:]
    maps = tokens.reshape(len(x), *grid.shape, -1).permute(0, 3, 1, 2).contiguous()
    maps = self.bn3(self.conv3(self.act(self.bn2(self.conv2(self.act(self.bn1(self.conv1(maps))))))))
    return torch.cat((prefix, maps.flatten(2).permute(0, 2, 1)), 1)


def plain(model: nn.Module) -> nn.Module:
    """Copy a model and replace its attention and convolutions with plain arithmetic."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is Attention:
            module.forward = MethodType(plain_attention, module)
        elif isinstance(module, LocallyEnhancedFeedForward):
            module.forward = MethodType(plain_leff, module)
    return model


def models(family: str, inference: bool) -> dict[str, nn.Module]:
    """Build the models to compare."""
    name, _, theirs = FAMILIES[family]
    joined = {"encoding": "learnable+relative_bias"} if family == "swin" else {}
    made = {
        "default": graticule.create_model(name, **joined),
        "again": graticule.create_model(name, **joined),
        "lape": graticule.create_model(name, joining="lape", **joined),
    }
    if theirs:
        made["ours"] = graticule.create_model(name)
        made["timm"] = timm.create_model(theirs)
    else:
        made["plain"] = plain(made["default"])
    if inference:
        made["folded"] = graticule.fold(copy.deepcopy(made["lape"]).eval())
    return made


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--phases", nargs="+", default=["inference", "training"], choices=["training", "inference"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"batch {options.batch}, {'bfloat16' if options.bf16 else 'float32'}, ", end="")
    print(f"{'compiled' if options.compile else 'eager'}, {where}, torch {torch.__version__}, timm {timm.__version__}")
    pairs = [("ours", "timm"), ("default", "plain"), ("lape", "default"), ("folded", "default"), ("again", "default")]
    for family in options.families:
        size = FAMILIES[family][1]
        batch = options.batch * (16 if size < 100 else 1)
        for phase in options.phases:
            torch.manual_seed(0)
            images = torch.randn(batch, 3, size, size, device=options.device)
            build = training_step if phase == "training" else inference_step
            how = {"bf16": options.bf16, "compile": options.compile}
            made = models(family, phase == "inference")
            for model in made.values():
                model.to(options.device)
                if hasattr(model, "reset_classifier"):
                    model.reset_classifier(1000)
            steps = {key: build(model.to(options.device), images, **how) for key, model in made.items()}
            times = in_turns(steps, rounds=options.rounds, warmup=options.warmup, device=options.device)
            print_ratios(f"{family}, {phase}, batch {batch}", times, pairs)


if __name__ == "__main__":
    main()
