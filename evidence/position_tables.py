"""Tables, sinusoids and biases of timm, transformers and diffusers as position code: name -> how it is built."""

from __future__ import annotations

import ast
import csv
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evidence.position_codes import Build, NoInterface, Size, classes, configuration, part, rotations
from graticule.testing.pairs import GRIDS, BiasCode
from graticule.testing.tables import PositionCode, TableCode

#: Side of a patch, and the values of small configurations.
PATCH = 4
SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_channels": 3,
    "patch_size": PATCH,
    "num_hidden_layers": 1,
    "use_absolute_position_embeddings": True,
    "tubelet_size": [1, PATCH, PATCH],
    "num_frames": 1,
}
WIDE: Size = (3, 12)


def _table_of_transformers(module: str, name: str, grid: Size = (4, 4)) -> TableCode:
    """Return `interpolate_pos_encoding(tokens, height, width)` of a small model with a random table of a grid."""
    kind = part(module, name)
    arguments = list(inspect.signature(kind.interpolate_pos_encoding).parameters)[1:]
    if len(arguments) != 3:
        raise NoInterface(f"`interpolate_pos_encoding` has the arguments {', '.join(arguments)}")
    sides = grid[0] * PATCH, grid[1] * PATCH
    config = configuration(kind, **SMALL, image_size=sides[0] if sides[0] == sides[1] else sides)
    try:
        model = kind(config).eval()
    except TypeError as error:
        raise (NoInterface("it takes square images alone") if sides[0] != sides[1] else error) from error
    for key, table in model.named_parameters():
        prefix = table.numel() // table.shape[-1] - grid[0] * grid[1]
        if "position" in key and 0 <= prefix <= 8:
            nn.init.normal_(table)
            break
    else:
        raise NoInterface(f"it has no table of {grid[0]} x {grid[1]} patches")

    def compute(size: Size) -> Tensor:
        tokens = torch.zeros(1, prefix + size[0] * size[1], table.shape[-1])
        return model.interpolate_pos_encoding(tokens, size[0] * PATCH, size[1] * PATCH)

    return TableCode(compute, table, grid, prefix)


def _table(compute: Callable[[Tensor, Size], Tensor], native: Size = (4, 4), prefix: int = 0) -> TableCode:
    table = torch.randn(prefix + native[0] * native[1], 8)
    return TableCode(lambda grid: compute(table, grid), table, native, prefix)


def _nearest(table: Tensor, grid: Size) -> Tensor:
    """Take rows of a table of 27 x 27 as MiniCPM-V does."""
    return table[part("transformers.vision_utils", "get_vision_nearest_position_ids")(torch.tensor([grid]), 27)]


def _weighted(table: Tensor, grid: Size, mode: str) -> Tensor:
    """Resample a table of 4 x 4 as GLM and Qwen-VL do."""
    weigh = part("transformers.vision_utils", "get_vision_interpolation_indices_and_weights")
    indices, weights = weigh(torch.tensor([[1, *grid]]), 4, mode)
    return (table[indices] * weights[..., None].to(table.dtype)).sum(-2)


def _by_mask(model: str, table_side: int = 27) -> TableCode:
    """Return the embeddings of Idefics and SmolVLM, which take rows of the table by fractions of the mask's sides."""
    module = f"transformers.models.{model.lower()}.modeling_{model.lower()}"
    kind = part(module, f"{model}VisionEmbeddings")
    side = PATCH * table_side
    embed = kind(configuration(kind, hidden_size=8, image_size=side, patch_size=PATCH, num_attention_heads=1)).eval()
    with torch.no_grad():
        embed.patch_embedding.weight.zero_(), embed.patch_embedding.bias.zero_()

    def compute(grid: Size) -> Tensor:
        return embed(torch.zeros(1, 3, *(PATCH * n for n in grid)), torch.ones(1, *grid, dtype=torch.bool))

    return TableCode(compute, nn.init.normal_(embed.position_embedding.weight), (table_side, table_side))


def _of_timm(model: str) -> TableCode:
    """Return the table of a model of timm that takes images of any size, as its tokens get it."""
    built = part("timm", "create_model")(model, img_size=64, dynamic_img_size=True).eval()
    table = nn.init.normal_(built.pos_embed)
    prefix = table.shape[1] - 16
    for name in {"cls_token", "dist_token", "reg_token"} & {name for name, _ in built.named_parameters()}:
        nn.init.zeros_(built.get_parameter(name))

    def compute(grid: Size) -> Tensor:
        tokens = built._pos_embed(torch.zeros(1, *grid, table.shape[-1]))
        tokens = tokens[0] if isinstance(tokens, tuple) else tokens
        return tokens[:, tokens.shape[1] - prefix - grid[0] * grid[1] :]

    return TableCode(compute, table, (4, 4), prefix)


class _Scores(TorchFunctionMode):
    """Keeps the scores of attention, or the bias that is added to them."""

    values: Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.softmax, Tensor.softmax, torch.softmax):
            self.values = args[0]
        if func is F.scaled_dot_product_attention:
            self.values = (kwargs or {})["attn_mask"]
        return func(*args, **(kwargs or {}))


DIM = 16
_CONFIG = SimpleNamespace(attention_probs_dropout_prob=0.0, qkv_bias=True, num_attention_heads=2)


def _bias(cells: dict[str, str]) -> BiasCode:
    """Return the bias of a window: the scores of attention between tokens of zeros, or an output that is the bias.

    The arguments of a class are literals, of which grid, side and config are replaced.
    """
    name, module, arguments, given = cells.values()
    layers: dict[Size, Any] = {}
    prefix = int("beit" in module or "data2vec" in module)

    def compute(grid: Size) -> Tensor:
        if grid not in layers:
            torch.manual_seed(0)  # the same network for each grid
            _CONFIG.image_size, _CONFIG.patch_size = grid, 1
            values = {"grid": grid, "side": grid[0], "config": _CONFIG}
            layers[grid] = part(module, name)(*(values.get(value, value) for value in ast.literal_eval(arguments)))
            layers[grid].train(False)
            for key, value in layers[grid].named_parameters():
                if "table" in key or "attention_biases" in key:
                    nn.init.normal_(value)
        if given in ("nothing", "window"):
            layer = getattr(layers[grid], "get_bias", layers[grid])
            return layer(grid) if given == "window" else layer()
        with _Scores() as scores:
            layers[grid](torch.zeros(1, DIM, *grid) if given == "image" else torch.zeros(1, math.prod(grid), DIM))
        return scores.values

    return BiasCode(compute, prefix, grids=((6, 6), (12, 12)) if "side" in arguments else GRIDS)


@dataclass(frozen=True)
class SinusoidCode(BiasCode):
    """The similarity of the positions of patches, which sinusoids give to displacements alone, and the positions."""

    positions: Callable[[Size], Tensor] | None = None


def _sinusoid(module: str, name: str) -> SinusoidCode:
    kind = part(module, name)
    arguments, names = (list(inspect.signature(function).parameters) for function in (kind, kind.forward))
    config = {"config": configuration(kind)} if "config" in arguments else {}
    embed = kind(**config, **({"normalize": True} if "normalize" in arguments else {}))

    def positions(grid: Size) -> Tensor:
        if "width" in names:
            rows: Tensor = embed(grid[1], grid[0], torch.device("cpu"), torch.float32)[0]
            return rows.double()
        mask = torch.ones(1, *grid, dtype=torch.bool)
        maps = embed((1, 8, *grid), "cpu", torch.float32) if "shape" in names else embed(mask[None], mask)
        rows = maps[0].flatten(1).mT
        return rows.double()

    return SinusoidCode(lambda grid: positions(grid) @ positions(grid).mT, positions=positions)


#: Models of timm whose tables are checked.
_TIMM = (
    "vit_tiny_patch16_224 deit_tiny_distilled_patch16_224 vit_small_patch14_reg4_dinov2 eva02_tiny_patch14_224 "
    "vitamin_small_224"
)


@cache
def codes() -> dict[str, tuple[str, Build]]:
    """Return LIBRARY.FOLDER.CLASS -> kind of position code and the function that builds it."""
    entries: dict[str, tuple[str, Build]] = {name: ("rotation", build) for name, build in rotations().items()}
    for name, module in classes("transformers", r"\w+", "def interpolate_pos_encoding").items():
        for grid in ((4, 4), WIDE):
            at = f"{name} {grid[0]} x {grid[1]}"
            entries[at] = "table", partial(_table_of_transformers, module, name.rpartition(".")[2], grid)
    vision = "transformers.vision_utils."
    entries[f"{vision}get_vision_nearest_position_ids"] = "table", partial(_table, _nearest, (27, 27))
    for mode in ("bilinear", "bicubic"):
        key = f"{vision}get_vision_interpolation_indices_and_weights {mode}"
        entries[key] = "table", partial(_table, partial(_weighted, mode=mode))
    for model in ("Idefics2", "Idefics3", "SmolVLM"):
        entries[f"transformers.{model.lower()}.{model}VisionEmbeddings"] = "table", partial(_by_mask, model)
    entries |= {f"timm.{model}": ("table", partial(_of_timm, model)) for model in _TIMM.split()}
    for name, module in classes("transformers", r"\w+(?:SinePositionEmbedding|PositionEmbeddingSine)").items():
        entries[name] = "sinusoid", partial(_sinusoid, module, name.rpartition(".")[2])
    with Path(__file__).with_name("biases.csv").open(encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            folder = re.sub(r"\.(models|layers|modeling_\w+)(?=\.|$)", "", cells["module"])
            entries[f"{folder}.{cells['class']}"] = "bias", partial(_bias, cells)
    return entries


def build(name: str) -> PositionCode:
    """Build position code by its name in `codes()`, with random tables that are the same each time."""
    torch.manual_seed(0)
    return codes()[name][1]()
