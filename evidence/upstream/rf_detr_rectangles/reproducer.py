"""RF-DETR must cut a rectangular image into windows of its rows and columns, and read its own table of h x w."""

import torch
from transformers import RfDetrDinov2Config
from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Embeddings

torch.manual_seed(0)
config = RfDetrDinov2Config(hidden_size=8, patch_size=8, image_size=64, num_windows=2, window_block_indexes=[0])
square = RfDetrDinov2Embeddings(config).eval()
print("released:", float(square(torch.randn(1, 3, 64, 64)).detach().double().norm()))
tokens = ((torch.arange(33.0) - 1) // 8)[None, :, None].expand(1, 33, 8)  # the row of each patch of 4 x 8
windows = square.window_partition(tokens, 32, 64)[:, 1:, 0]
config.image_size = (24, 96)  # 3 x 12 patches, which are not 6 x 6
table = (wide := RfDetrDinov2Embeddings(config)).position_embeddings
difference = float((wide.interpolate_pos_encoding(table, 24, 96) - table).detach().abs().max())
swapped = sorted(set(windows[0].tolist())) != [0, 1]
if swapped or difference:
    raise SystemExit(
        f"fault: rows of the first window are {windows[0].tolist()}, the own table is {difference:.1f} off"
    )
