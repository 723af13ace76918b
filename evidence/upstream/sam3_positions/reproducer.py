"""SAM 3 must rotate patches by their own row and column also if the image of its configuration is not a square."""

import torch
from transformers import Sam3ViTConfig
from transformers.models.sam3.modeling_sam3 import Sam3ViTLayer

square = Sam3ViTLayer.precompute_positions(Sam3ViTConfig(image_size=112, patch_size=14, window_size=4), 0)
print("released:", float((square * torch.arange(1, 65)[:, None]).double().sum()))
config = Sam3ViTConfig(image_size=[28, 56], patch_size=14, window_size=2)  # 2 x 4 patches, row by row
x, y = Sam3ViTLayer.precompute_positions(config, 0).T.tolist()
if y != [0, 0, 0, 0, 1, 1, 1, 1] or x != [0, 1, 2, 3] * 2:
    raise SystemExit(f"fault: rows of 2 x 4 patches are {y}, columns {x}")
