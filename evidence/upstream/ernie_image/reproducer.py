"""ERNIE-Image repeats each angle for neighboring channels and pairs channel i with i + d / 2: that is no rotation."""

from types import SimpleNamespace

import torch
from diffusers.models.transformers import transformer_ernie_image as ernie

ernie.dispatch_attention_fn = lambda query, key, value, **_: query  # so that the processor returns rotated queries
same = torch.nn.Identity()
layer = SimpleNamespace(heads=1, to_q=same, to_k=same, to_v=same, norm_q=None, norm_k=None, to_out=[same])
ids = torch.tensor([[[0.0, row, 0.0] for row in range(5)]])
angles = ernie.ErnieImageEmbedND3(32, 256, (8, 16, 8))(ids)
queries = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
rotated = ernie.ErnieImageSingleStreamAttnProcessor()(layer, queries, freqs_cis=angles)
print("released:", float(rotated.double().norm()))
change = float((rotated.norm(dim=-1) / queries.norm(dim=-1) - 1).abs().max())
if change > 1e-5:
    raise SystemExit(f"fault: lengths of rotated queries change by up to {100 * change:.0f} %")
