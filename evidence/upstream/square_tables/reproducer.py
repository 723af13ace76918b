"""Position tables of h x w patches must be read as h x w, not as a square; at their own size they are not changed."""

from importlib import import_module

import torch
import transformers

names, faults = "ViT DeiT Dinov2 Dinov2WithRegisters Beit ViTMSN ViTMAE IJepa Pixio FlavaImage GroupViTVision ", []
for name in (names + "Data2VecVision Tipsv2Vision InternVLVision QianfanOCRVision VideoPrismVision").split():
    config_class = getattr(transformers, f"{name}Config")
    module = import_module(config_class.__module__.replace("configuration", "modeling"))
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "tubelet_size": [1, 14, 14]}
    sizes["patch_size"] = [14, 14] if name.startswith(("Intern", "Qianfan")) else 14
    for size in ((56, 56), (42, 168)):  # 4 x 4 patches, then 3 x 12, which are not 6 x 6
        torch.manual_seed(0)
        config = config_class(**sizes, image_size=size, use_absolute_position_embeddings=True)
        embeddings = getattr(module, f"{name}Embeddings".replace("PrismVision", "PrismSpatial"))(config)
        table = torch.nn.init.normal_(embeddings.position_embeddings).detach()
        if size[0] == size[1]:
            larger = embeddings.interpolate_pos_encoding(table, 112, 84).detach()
            print("released:", name, float(larger.double().norm()))
        elif not torch.equal(embeddings.interpolate_pos_encoding(table, *size), table):
            faults.append(name)
if faults:
    raise SystemExit(f"fault: {len(faults)} classes change their own table: {', '.join(faults)}")
