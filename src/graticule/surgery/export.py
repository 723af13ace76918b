"""Export a model as a program for ONNX Runtime or for PyTorch without this library, and run the exported file."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from graticule.backbones.base import Backbone
from graticule.checkpoints.obstacles import check_intact
from graticule.layers.tokenizers import on_axes
from graticule.position.places import by
from graticule.registry.checks import checked, install, known_name
from graticule.registry.fields import Side
from graticule.surgery.export_program import Exportable, Program, Size, Sizes, trace
from graticule.system.files import write_whole

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

    @abstractmethod
    def write(self, path: Path, traced: ExportedProgram, program: Program, sizes: Sizes, int8: bool) -> None:
        """Write a traced program to `path`, with the weights of linear layers in float32 or int8."""

    @abstractmethod
    def open(self, path: Path) -> Runner:
        """Open a file with the runtime of its users."""


class Onnx(Format):
    """ONNX, run by ONNX Runtime on one CPU thread per core."""

    suffix = ".onnx"
    needs = ("onnx", "onnxscript", "onnxruntime")
    needs_int8 = ("onnxruntime.quantization",)

    def write(self, path: Path, traced: ExportedProgram, program: Program, sizes: Sizes, int8: bool) -> None:
        """Translate the operators and write one file; in int8 each other factor gets a scale when it runs."""
        exporter: Any = torch.onnx
        wide = path.with_name("wide.onnx") if int8 else path
        with torch.no_grad(), warnings.catch_warnings(), errors_only("onnxscript"):
            warnings.simplefilter("ignore")
            try:
                exported = exporter.export(traced, dynamo=True, verbose=False, output_names=program.names)
            except Exception as error:  # also of the optimizer
                cause: BaseException = error.__cause__ or error
                while isinstance(cause.__cause__, RuntimeError):
                    cause = cause.__cause__
                reason = str(cause).strip().splitlines()
                raise ValueError(
                    f"`model` must be one whose operators ONNX has, got the error: {reason[0][:300] if reason else ''} "
                    "For a fixed height and width, position is folded into constants; or use the format torch-export."
                ) from error
            exported.save(str(wide), external_data=False)
        if int8:
            import onnx
            from onnxruntime.quantization import QuantType, quantize_dynamic

            model = onnx.load(str(wide))
            del model.graph.value_info[:]  # shapes of intermediate results, which contradict those after quantization
            tables = {constant.name for constant in model.graph.initializer if len(constant.dims) != 2}  # no weights
            options = {"weight_type": QuantType.QInt8, "per_channel": True, "op_types_to_quantize": ["MatMul", "Gemm"]}
            options["nodes_to_exclude"] = [node.name for node in model.graph.node if tables.intersection(node.input)]
            with errors_only(None):  # it recommends a step that the exporter has done
                quantize_dynamic(model, str(path), **options)

    def open(self, path: Path) -> Runner:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (images,) = session.get_inputs()

        def run(x: Tensor) -> list[Tensor]:
            return [torch.from_numpy(output) for output in session.run(None, {images.name: x.numpy()})]

        return run


class TorchExport(Format):
    """A program of `torch.export`, opened by `torch.export.load`."""

    suffix = ".pt2"
    needs_int8 = ("torchao.quantization",)

    def write(self, path: Path, traced: ExportedProgram, program: Program, sizes: Sizes, int8: bool) -> None:
        """Save the program; weights in int8 are dequantized when they are used."""
        if int8:
            with errors_only("torch.utils._pytree"):  # its warnings are for the authors of torchao
                from torchao.quantization import Int8WeightOnlyConfig, quantize_
                from torchao.utils import unwrap_tensor_subclass

            model = copy.deepcopy(program.model)
            quantize_(model, Int8WeightOnlyConfig())
            unwrap_tensor_subclass(model)
            traced = trace(Program(replace(program.subject, model=model), program.features), sizes)
        with path.open("wb") as file:  # for a path PyTorch requires its own suffix
            torch.export.save(traced, file)

    def open(self, path: Path) -> Runner:
        with path.open("rb") as file:
            module = torch.export.load(file).module()

        @torch.no_grad()
        def run(x: Tensor) -> list[Tensor]:
            return list(module(x))

        return run


FORMATS: dict[str, Format] = {"onnx": Onnx(), "torch-export": TorchExport()}


#: Largest accepted difference from PyTorch, relative to the largest output.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class ProgramComparison:
    """The difference of a file from PyTorch for one batch, relative to the largest output."""

    batch: int
    size: Size
    error: float


def difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of outputs, relative to the largest number of each; infinite for other shapes."""
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        return float("inf")
    pairs = zip(outputs, expected, strict=True)
    worst = [float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-12)) for a, b in pairs]
    return float("inf") if any(value != value for value in worst) else max(worst)


def checked_error(error: float, path: Path, size: Size) -> float:
    """Check that a difference is small enough, and return it."""
    if not error <= TOLERANCE:
        raise ValueError(
            f"{path} was not written: at {by(size)} pixels the exported program differs from PyTorch by "
            f"{error:.1e} of the largest output, more than {TOLERANCE:.0e}."
        )
    return error


@dataclass(frozen=True)
class Exported:
    """An exported file, and the results of running it.

    path: the file.
    format: its format.
    takes: description of the images that it accepts.
    size: bytes on disk.
    compared: the differences from PyTorch.
    """

    path: Path
    format: str
    takes: str
    size: int
    compared: tuple[ProgramComparison, ...]

    @property
    def error(self) -> float:
        return max(comparison.error for comparison in self.compared)


@checked
def export(
    model: nn.Module,
    path: str | Path,
    format: str | None = None,
    *,
    img_size: Side | tuple[Side, ...] | None = None,
    dynamic: Sequence[str] = (),
    features: Sequence[int] = (),
    int8: bool = False,
) -> Exported:
    """Write a model to a file, run the file, and compare it with the model.

    With a fixed height and width the model is folded: tensors that depend on parameters and grid alone are constants.
    With a free height or width the program computes position for the size of its images, by matrix products and
    indices. `model` is not changed; the program is in float32.

    Args:
        model: a backbone of images, videos or volumes, a segmentation model, the feature maps of a dense model
            (`model.features`), a module with an attached position, or another model of timm or transformers that takes
            images alone, such as a depth model.
        path: the file; nothing is written if the comparison fails.
        format: 'onnx' or 'torch-export'; from the suffix of `path` (.onnx, .pt2) by default.
        img_size: in pixels, one side, (height, width) or (depth, height, width); by default the size that the model is
            built for.
        dynamic: the free axes: 'batch', and 'sides', all sides of the images.
        features: indices of blocks, or of stages if there are several, whose maps are also outputs.
        int8: whether the weights of linear layers are in 8 bits; `Exported` then has the difference of the outputs.

    Raises:
        ValueError: for an invalid model, option or path, before any work; if the outputs of the file differ from those
            of the model by more than 1e-4 of the largest output.
        ImportError: if a package that the format needs is not installed.
    """
    path = Path(path)
    check_intact(model, "wrapped", "packed", "pruned")
    subject = Exportable.of(model)
    name = _format(path, format)
    if path.is_dir():
        raise ValueError(f"`path` must be a file, got {str(path)!r}, which is a folder.")
    size = subject.size if img_size is None else on_axes(img_size, len(subject.size))
    count = len(model.feature_info) if isinstance(model, Backbone) else 0
    if wrong := [index for index in features if not 0 <= index < count]:
        rule = f"from 0 to {count - 1}" if count else f"left out with {type(model).__name__}, which is not a backbone"
        raise ValueError(f"`features` must be {rule}, got {wrong[0]}.")
    kind = FORMATS[name]
    kind.check(int8)
    subject = subject.plain()
    sizes = Sizes.of(subject, size, dynamic)
    try:
        program, traced, batches = _checked_trace(subject, sizes, features, path)
    except ValueError as refusal:
        if not (sizes.sides and subject.is_external):
            raise
        try:  # a neck may halve the maps, and interpolate odd ones alone
            sizes = sizes.doubled()
            program, traced, batches = _checked_trace(subject, sizes, features, path)
        except ValueError:
            raise ValueError(
                f"`dynamic` must be left out or 'batch' with {type(model).__name__}, unless graticule.convert takes "
                f"it: with free sides, {refusal}"
            ) from refusal
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model{kind.suffix}"
        kind.write(file, traced, program, sizes, int8)
        run = kind.open(file)
        compared = []
        for images, size, expected in batches:
            error = difference(run(images), expected)
            compared.append(ProgramComparison(len(images), size, error if int8 else checked_error(error, path, size)))
        write_whole(path, lambda temporary: shutil.copyfile(file, temporary))
    return Exported(path, name, str(sizes), path.stat().st_size, tuple(compared))


def _checked_trace(
    subject: Exportable, sizes: Sizes, features: Sequence[int], path: Path
) -> tuple[Program, ExportedProgram, list[tuple[Tensor, Size, Sequence[Tensor]]]]:
    """Return a program, its trace, and the images, sizes and outputs that files are compared at, as the trace was."""
    program = Program(subject.at(sizes), features)
    traced, reference = trace(program, sizes), Program(subject.at(sizes, folded=False), features)
    batches = []
    for batch, size in sizes.checked():  # before translating, which takes longer
        images = torch.randn(batch, subject.channels, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = reference(images)
        checked_error(difference(_run_traced(traced, images, sizes), expected), path, size)
        batches.append((images, size, expected))
    return program, traced, batches


def _format(path: Path, name: str | None) -> str:
    if name is not None:
        return known_name("format", name, list(FORMATS))
    suffixes = {kind.suffix: name for name, kind in FORMATS.items()}
    if path.suffix not in suffixes:
        known = ", ".join(suffixes)
        raise ValueError(f"`format` must be given where `path` does not end in {known}, got {str(path)!r}.")
    return suffixes[path.suffix]


def _run_traced(traced: ExportedProgram, images: Tensor, sizes: Sizes) -> list[Tensor]:
    run = traced.module()
    try:
        with torch.no_grad():
            return list(run(images))
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        rule = "left out" if sizes.batch else "left out or 'batch'"
        rule = "left out, or not both 'batch' and sides," if sizes.batch and sizes.sides else rule
        raise ValueError(
            f"`dynamic` must be {rule} with this model, of which a program cannot compute all of these sizes: "
            f"images of {by(images.shape[2:])} are refused, where {sizes} is requested ({reason[:200]})."
        ) from error
