"""ViViT has a table of positions per frame, and must interpolate each of them for frames of another size."""

import torch
from transformers import VivitConfig, VivitModel

torch.manual_seed(0)
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
config = VivitConfig(**sizes, image_size=32, num_frames=4, tubelet_size=[2, 8, 8])
model = VivitModel(config, add_pooling_layer=False).eval()
with torch.no_grad():
    torch.nn.init.normal_(model.embeddings.position_embeddings)
    print("released:", float(model(torch.ones(1, 4, 3, 32, 32)).last_hidden_state.double().norm()))
    for size in ((64, 64), (32, 64)):
        try:
            model(torch.ones(1, 4, 3, *size), interpolate_pos_encoding=True)
        except RuntimeError as error:
            raise SystemExit(f"fault: {size} pixels raise {error}") from error
