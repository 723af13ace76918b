"""Weights of linear layers in 8 bits, one scale per output channel."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from torch import nn

from graticule.surgery.export_formats import errors_only

Model = TypeVar("Model", bound=nn.Module)


def quantize_linear(model: Model) -> Model:
    """Quantize the weights of linear layers to int8, in place, by torchao; they are dequantized when used."""
    with errors_only("torch.utils._pytree"):  # its warnings are for the authors of torchao
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        from torchao.utils import unwrap_tensor_subclass

    quantize_(model, Int8WeightOnlyConfig())
    unwrap_tensor_subclass(model)
    return model


def quantize_onnx(source: Path, path: Path) -> None:
    """Write the ONNX file `source` with the weights of matrix products in int8 to `path`, by ONNX Runtime.

    The other factor is quantized at run time, with one scale per tensor.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    del model.graph.value_info[:]  # shapes of intermediate results, which contradict those after quantization
    with errors_only(None):  # it recommends a step that the exporter has done
        quantize_dynamic(
            model, str(path), weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
        )
