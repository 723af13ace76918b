"""What was run on the models of timm and transformers, class by class: the table of docs/models.md.

`python -m evidence.models_page` runs it on small models with random weights, and writes the page.
"""

from __future__ import annotations

import copy
import importlib
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

import graticule
from graticule.analysis.audit import audit
from graticule.external.open_view import view_of
from graticule.lab.studies.tables import between, markdown
from graticule.system.files import write_text

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
#: Seconds after which an operation is stopped.
SECONDS = 30
#: Small configurations of transformers; the sizes of windows and stages are those of the classes that have them.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
STAGES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
VIDEO: dict[str, Any] = {**SMALL, "num_frames": 4, "tubelet_size": 2}
MERGED: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 8}
#: Class of transformers -> its configuration.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    **{
        f"{name}Model": SMALL
        for name in ("ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "CLIPVision", "SiglipVision", "IJepa")
    },
    "Siglip2VisionModel": {**SMALL, "num_patches": 16},
    "ViTMAEModel": {**SMALL, "mask_ratio": 0.0},
    "BeitModel": {**SMALL, "use_relative_position_bias": True},
    "SwinModel": STAGES,
    "Swinv2Model": STAGES,
    "SamVisionModel": {**SMALL, "mlp_dim": 48, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1]},
    "PixtralVisionModel": SMALL,
    "ViTMSNModel": SMALL,
    "HieraModel": {"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]},
    "VideoMAEModel": VIDEO,
    "VivitModel": {**VIDEO, "tubelet_size": [2, 8, 8]},
    "VJEPA2Model": {**SMALL, "crop_size": 32, "frames_per_clip": 4, "mlp_ratio": 2.0},
}


def class_of(name: str) -> Any:
    """Return a class of transformers by its name; that of Qwen2-VL's encoder is not among its public names."""
    if name.startswith("Qwen2"):
        return getattr(importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl"), name)
    return getattr(transformers, name)


#: A model of each class of timm with attention that is widely used, and of those that `convert` takes.
TIMM = (
    *("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"),
    *("vit_relpos_small_patch16_224", "samvit_base_patch16", "cait_xxs24_224", "convit_tiny", "mvitv2_tiny"),
    *("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "twins_svt_small", "mixer_s32_224"),
    *("naflexvit_base_patch16_gap", "vit_dwee_patch16_reg1_gap_256", "hiera_tiny_224", "sam2_hiera_tiny"),
    *("xcit_nano_12_p16_224", "levit_128s", "tiny_vit_5m_224", "maxvit_nano_rw_256", "davit_tiny", "pvt_v2_b0"),
    *("swinv2_cr_tiny_ns_224", "gcvit_xxtiny", "vitamin_small_224", "tnt_s_patch16_224", "pit_ti_224"),
    *("crossvit_tiny_240", "coat_tiny", "nest_tiny", "volo_d1_224", "efficientformer_l1", "visformer_tiny"),
)
#: Names of blocks and of their norm before attention, for `attach`.
BLOCKS = (
    ("blocks.*", "norm1"),
    ("layers.*", "layernorm_before"),
    ("layers.*", "norm1"),
    ("encoder.layer.*", "norm1"),
    ("encoder.layers.*", "layer_norm1"),
    ("model.layer.*", "norm1"),
    ("encoder.layer.*", "layernorm_before"),
    ("transformer.layers.*", "attention_norm"),
    ("vision_encoder.layers.*", "layer_norm1"),
)


class TooSlowError(Exception):
    """An operation ran longer than `SECONDS`."""


def attempt(work: Callable[[], str | None]) -> str:
    """Return 'yes' or what `work` returns; '-' if it raises, 'slow' if it takes too long."""

    def stop(*_: Any) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return work() or "yes"
    except TooSlowError:
        return "slow"
    except Exception as error:
        print(f"{work.__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return "-"
    finally:
        signal.alarm(0)


def output(model: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a model as `convert` defines it."""
    given = {}
    if type(model).__name__ == "ViTMAEModel":  # keeps the order of the patches
        given = {"noise": torch.arange(16.0).expand(len(x), -1)}
    found = model(x, **given)
    if isinstance(found, Tensor):
        return found
    names = [one for one in ("logits", "image_embeds", "pooler_output", "last_hidden_state") if one in found]
    return found[names[0]]


def rows_of(model: nn.Module, side: int) -> dict[str, str]:
    """Run every operation on a model for images of `side` pixels; return its results by the name of the column."""
    x = torch.randn(6, 3, side, side)

    def convert() -> str | None:
        ours = graticule.convert(model)
        to = graticule.to_timm if type(model).__module__.startswith("timm") else graticule.to_transformers
        back = to(ours).state_dict()
        if not all(torch.equal(back[name], value) for name, value in model.state_dict().items()):
            return "not back"
        if type(model).__name__ == "Siglip2VisionModel":  # takes patches
            return None
        expected = output(model, x[:2])
        found = ours(x[:2])
        if expected.ndim == 4:  # a map
            expected = expected.flatten(2).mT
        if type(model).__name__ == "PixtralVisionModel":  # all images in one row
            expected = expected.view_as(found)
        return None if torch.allclose(found, expected, rtol=1e-3, atol=1e-4) else "other outputs"

    def view() -> None:
        view_of(copy.deepcopy(model), (side, side)).run(x[:2])

    def measured() -> str | None:
        found = audit(copy.deepcopy(model), {(side, side): x}, (side, side), timed=False)
        return "in part" if found.unavailable else None

    def resize() -> None:
        larger = graticule.resize(copy.deepcopy(model), side * 2)
        if type(model).__name__ != "Siglip2VisionModel":
            larger(torch.randn(1, 3, side * 2, side * 2))

    def attach() -> None:
        for blocks, norm in BLOCKS:
            try:
                changed = graticule.attach(copy.deepcopy(model), "learnable", "lape", blocks=blocks, norm=norm)
            except ValueError:
                continue
            changed(x[:1])
            return
        raise ValueError("`model` must have one of the known names of blocks.")

    def export() -> None:
        with tempfile.TemporaryDirectory() as folder:
            graticule.export(graticule.convert(model), Path(folder) / "model.onnx")

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        works = {"convert": convert, "view": view, "audit": measured, "resize": resize, "attach": attach}
        return {name: attempt(work) for name, work in {**works, "export": export}.items()}


def timm_models() -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the name, a small model and its image size of each model of the table of timm."""
    for name in TIMM:
        yield name, *small(name)


def small(name: str) -> tuple[nn.Module, int]:
    """Return a model of timm with few layers and for small images, if its class can have them, and its image size."""
    sides: tuple[dict[str, Any], ...] = ({"img_size": 64}, {"img_size": 56}, {})
    # of ConViT, whose last layers must not be gated; of others; of Swin
    layers: tuple[dict[str, Any], ...] = ({"depth": 2, "local_up_to_layer": 1}, {"depth": 2}, {"window_size": 2}, {})
    for shape in (side | layer for side in sides for layer in layers if side | layer):
        try:
            model = timm.create_model(name, **shape).eval()
            side = shape.get("img_size") or model.pretrained_cfg["input_size"][-1]
            with torch.no_grad():
                model(torch.randn(1, 3, side, side))
            patch = getattr(getattr(model, "patch_embed", None), "patch_size", None) or (1,)
            if any(side % one for one in patch):
                continue
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
            continue
        # timm leaves the size of the published weights
        model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "input_size": (3, side, side)}
        return model, side
    model = timm.create_model(name).eval()
    return model, model.pretrained_cfg["input_size"][-1]


def transformers_models() -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the class, a small model and its image size of each class of the table."""
    for name, given in TRANSFORMERS.items():
        kind = getattr(transformers, name)
        size = given["image_size"]
        yield name, kind(kind.config_class(**given)).eval(), size if isinstance(size, int) else size[0]


def table(models: Iterator[tuple[str, nn.Module, int]]) -> str:
    """Run all operations on models; return the table."""
    rows = []
    for name, model, side in models:
        found = rows_of(model, side)
        label = f"`{type(model).__name__}`"
        rows.append([label if name == type(model).__name__ else f"{label}, `{name}`", *found.values()])
        print(*rows[-1], flush=True)
    return markdown([["class", *found], *sorted(rows)])


def main() -> None:
    """Write the page."""
    torch.manual_seed(0)
    text = PAGE.read_text(encoding="utf-8")
    text = between(text, "transformers", table(transformers_models()))
    text = between(text, "timm", table(timm_models()))
    versions = f"timm {timm.__version__} and transformers {transformers.__version__}"
    write_text(PAGE, re.sub(r"(Measured with ).*?(, on small)", rf"\g<1>{versions}\g<2>", text))


if __name__ == "__main__":
    main()
