"""`interpolate_pos_encoding` of Phi-4's vision embeddings, which nothing calls, reads an attribute that is not set."""

import torch
from transformers.models.phi4_multimodal import modeling_phi4_multimodal as phi4

config = phi4.Phi4MultimodalVisionConfig(hidden_size=8, image_size=56, patch_size=14)
torch.manual_seed(0)
embeddings = phi4.Phi4MultimodalVisionEmbeddings(config)
mask = torch.ones(1, 4, 4, dtype=torch.bool)
print("released:", float(embeddings(torch.randn(1, 3, 56, 56), mask).detach().double().norm()))
if hasattr(embeddings, "interpolate_pos_encoding"):
    try:
        embeddings.interpolate_pos_encoding(torch.zeros(1, 16, 8), 56, 56)
    except AttributeError as error:
        raise SystemExit(f"fault: {error}") from error
