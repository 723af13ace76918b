"""`train` and `eval` of a module return the module: `attention = attention.eval()` must not be None."""

import timm
import torch
from transformers import LevitConfig, LevitModel

torch.manual_seed(0)
models = {"levit_128s of transformers": LevitModel(LevitConfig())}
for name in ("levit_128s", "tiny_vit_5m_224", "efficientformer_l1", "efficientformerv2_s0", "efficientvit_m0"):
    models[name] = timm.create_model(name)
print("released:", float(models["levit_128s"].eval()(torch.ones(1, 3, 224, 224)).detach().double().norm()))
faults = [name for name, model in models.items() if any(module.eval() is not module for module in model.modules())]
if faults:
    raise SystemExit(f"fault: eval() returns None in {', '.join(faults)}")
