"""Swin must give the same for an image after another, smaller one has passed through the model."""

import torch
from transformers import SwinConfig, SwinModel

torch.manual_seed(0)
sizes = {"patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 8}
model = SwinModel(SwinConfig(image_size=32, **sizes)).eval()
image, small = torch.randn(1, 3, 32, 32), torch.randn(1, 3, 16, 16)  # 16 x 16 patches, and 8 x 8, one window
with torch.no_grad():
    before = model(image).last_hidden_state
    print("released:", float(before.double().norm()))
    model(small)
    difference = float((model(image).last_hidden_state - before).abs().max())
if difference:
    raise SystemExit(f"fault: outputs are {difference:.3f} off after a smaller image, for as long as the model lives")
