"""The nearest row of a table of n x n positions is `i * n // height`; float32 quotients round some of them down."""

import torch
from transformers.vision_utils import get_vision_nearest_position_ids as position_ids

for side in (14, 70):  # the sides of released MiniCPM-V
    sizes = torch.tensor([(height, side) for height in range(1, 257)])
    print("released:", int((position_ids(sizes, side) * torch.arange(1, sizes.prod(1).sum() + 1) % 9973).sum()))
wrong = position_ids(torch.tensor([[27, 27]]), 27) != torch.arange(27 * 27)
sides = [n for n in range(2, 129) if not torch.equal(position_ids(torch.tensor([[n, n]]), n), torch.arange(n * n))]
if sides:
    raise SystemExit(f"fault: {int(wrong.sum())} of 729 ids at 27 x 27 are wrong; {len(sides)} of the sides 2 to 128")
