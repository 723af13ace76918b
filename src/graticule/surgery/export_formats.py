"""The formats of exported models: writing, opening and counting of operators."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from graticule.encodings.liere import LieRe
from graticule.position.position import ENCODINGS, Encoding, Position
from graticule.registry.checks import install
from graticule.surgery.export_program import Program

#: Function that runs a file on images (B, C, height, width), and returns its outputs.
Runner = Callable[[Tensor], list[Tensor]]


@contextlib.contextmanager
def errors_only(name: str | None) -> Iterator[None]:
    """Hide messages of a logger that are not errors; None is the root logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Format(ABC):
    """Format of a file with a program."""

    #: The suffix of its files.
    suffix: str
    #: The packages that it needs, and the further ones for weights in int8.
    needs: tuple[str, ...] = ()
    needs_int8: tuple[str, ...] = ()

    def check(self, int8: bool) -> None:
        """Check that the packages are installed."""
        for name in (*self.needs, *(self.needs_int8 if int8 else ())):
            try:
                importlib.import_module(name)
            except ImportError:
                raise ImportError(f"this export needs {name}, which is not installed: {install('export')}.") from None

    #: Encodings that it cannot compute for images of any size, and the operator that it lacks.
    lacks: ClassVar[Mapping[type[Encoding], str]] = {}

    def check_position(self, position: Position) -> None:
        """Check that a program for images of any size can compute a position."""
        for module in position.modules():
            for kind, what in self.lacks.items():
                if isinstance(module, kind):
                    raise ValueError(
                        f"`dynamic` must be left out or 'batch' with the encoding {ENCODINGS.name_of(kind)!r} in this "
                        f"format, which has no {what}; or use the format torch-export."
                    )

    @abstractmethod
    def write(self, path: Path, traced: torch.export.ExportedProgram, program: Program) -> None:
        """Write a traced program to `path`."""

    @abstractmethod
    def open(self, path: Path) -> Runner:
        """Open a file with the runtime of its users."""

    @abstractmethod
    def operators(self, path: Path) -> Counter[str]:
        """Count the operators of a file by name."""


class Onnx(Format):
    """ONNX, run by ONNX Runtime on one CPU thread per core."""

    suffix = ".onnx"
    needs = ("onnx", "onnxscript", "onnxruntime")
    needs_int8 = ("onnxruntime.quantization",)
    lacks: ClassVar = {LieRe: "matrix exponential"}

    def write(self, path: Path, traced: torch.export.ExportedProgram, program: Program) -> None:
        """Translate the operators and write one file."""
        exporter: Any = torch.onnx
        with torch.no_grad(), warnings.catch_warnings(), errors_only("onnxscript"):
            warnings.simplefilter("ignore")
            try:
                made = exporter.export(traced, dynamo=True, verbose=False, output_names=program.names)
            except exporter.OnnxExporterError as error:
                reason = str(error.__cause__ or error).strip().splitlines()
                raise ValueError(
                    f"`model` must be one whose operators ONNX has, got the error: {reason[0][:300] if reason else ''} "
                    "For a fixed height and width, position is folded into constants; or use the format torch-export."
                ) from error
            made.save(str(path), external_data=False)

    def open(self, path: Path) -> Runner:
        """Open a file with ONNX Runtime."""
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (images,) = session.get_inputs()

        def run(x: Tensor) -> list[Tensor]:
            return [torch.from_numpy(found) for found in session.run(None, {images.name: x.numpy()})]

        return run

    def operators(self, path: Path) -> Counter[str]:
        """Count the nodes by the name of their operator."""
        import onnx

        return Counter(node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node)


class TorchExport(Format):
    """A program of `torch.export`, opened by `torch.export.load`."""

    suffix = ".pt2"
    needs_int8 = ("torchao.quantization",)

    def write(self, path: Path, traced: torch.export.ExportedProgram, program: Program) -> None:
        """Save the program."""
        with path.open("wb") as file:  # for a path PyTorch requires its own suffix
            torch.export.save(traced, file)

    def open(self, path: Path) -> Runner:
        """Load a program."""
        with path.open("rb") as file:
            module = torch.export.load(file).module()

        @torch.no_grad()
        def run(x: Tensor) -> list[Tensor]:
            return list(module(x))

        return run

    def operators(self, path: Path) -> Counter[str]:
        """Count the calls by the name of the operator."""
        with path.open("rb") as file:
            graph = torch.export.load(file).graph
        # without arithmetic on sizes, and without checks
        called = (node.target.__name__ for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        return Counter(name.split(".")[0] for name in called if not name.startswith("_assert"))


FORMATS: dict[str, Format] = {"onnx": Onnx(), "torch-export": TorchExport()}


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
