"""Text after a video must begin after all positions of the video, also if its frames are more than its rows."""

from functools import partial
from types import SimpleNamespace

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

faults = []
for model in (Qwen2VLModel, Qwen2_5_VLModel):
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    subject = SimpleNamespace(config=config, get_vision_position_ids=partial(model.get_vision_position_ids, None))
    types = torch.tensor([[0, 0, *[1] * 6, 0]])  # text, an image, text
    print("released:", model.get_rope_index(subject, types, types, torch.tensor([[1, 4, 6]]))[0].tolist())
    types = torch.tensor([[0, 0, *[2] * 32, 0]])  # text, a video, text
    times = model.get_rope_index(subject, types, types, video_grid_thw=torch.tensor([[8, 4, 4]]))[0][0, 0]
    if times[-1] <= times[:-1].max():
        faults.append(f"{model.__name__} has text at {times[-1]}, frames up to {times[:-1].max()}")
if faults:
    raise SystemExit(f"fault: {', '.join(faults)}")
