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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from graticule.backbones.base import Backbone
from graticule.checkpoints.load import load_checkpoint, load_own, published_state_dict
from graticule.checkpoints.read import save_weights
from graticule.encodings.liere import LieRe
from graticule.layers.tokenizers import on_axes
from graticule.position.places import by
from graticule.position.position import ENCODINGS, Encoding, Position
from graticule.registry.checks import checked, install, known_name
from graticule.surgery.export_program import Exportable, Program, Size, Sizes, prepared, trace
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
    def write(self, path: Path, traced: ExportedProgram, program: Program) -> None:
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

    def write(self, path: Path, traced: ExportedProgram, program: Program) -> None:
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

    def write(self, path: Path, traced: ExportedProgram, program: Program) -> None:
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


#: Largest accepted difference from PyTorch, relative to the largest output.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """The difference of a file from PyTorch for one batch, relative to the largest output."""

    batch: int
    size: Size
    error: float


def random_images(channels: int, batch: int, size: Size) -> Tensor:
    """Return images (B, C, height, width), the same for each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, channels, *size, generator=generator)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of outputs, relative to the largest number of each; infinite for other shapes."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return float("inf")
    pairs = zip(found, expected, strict=True)
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


def accuracy(runs: Sequence[Runner], batches: Iterable[tuple[Tensor, Tensor]], free: bool) -> tuple[float, float]:
    """Return the top-1 of the model and of the file, in percent; one image at a time if the batch is not free."""
    right, count = [0, 0], 0
    for images, labels in batches:
        for index, run in enumerate(runs):
            parts = [images] if free else images.split(1)
            found = torch.cat([run(part)[0].argmax(-1) for part in parts])
            right[index] += int((found == labels).sum())
        count += len(labels)
    if not count:
        raise ValueError("`batches` must have at least one image, got none.")
    before, after = (100 * each / count for each in right)
    return before, after


WEIGHTS = "safetensors"


@dataclass(frozen=True)
class Exported:
    """An exported file, and the results of running it.

    path: the file.
    format: its format.
    takes: description of the images that it accepts.
    size: bytes on disk.
    operators: their counts by name; empty for weights alone.
    compared: the differences from PyTorch.
    accuracy: top-1 in percent on the given images, of the model in PyTorch and of the file; None without images.
    """

    path: Path
    format: str
    takes: str
    size: int
    operators: dict[str, int]
    compared: tuple[Comparison, ...]
    accuracy: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Return the largest difference from PyTorch."""
        return max(one.error for one in self.compared)


@checked
def export(
    model: nn.Module,
    path: str | Path,
    format: str | None = None,
    *,
    img_size: int | tuple[int, ...] | None = None,
    dynamic: Sequence[str] = (),
    features: Sequence[int] = (),
    int8: bool = False,
    batches: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> Exported:
    """Write a model to a file, run the file, and compare it with the model.

    With a fixed height and width the model is folded: tensors that depend on parameters and grid alone are constants.
    With a free height or width the program computes position for the size of its images, by matrix products and
    indices. `model` is not changed; the program is in float32.

    Args:
        model: a backbone of images, films or volumes, a segmentation model, the feature maps of a dense model
            (`model.features`), or a module with an attached position.
        path: the file; nothing is written if the comparison fails.
        format: 'onnx', 'torch-export', or 'safetensors' for the weights under their published names; from the suffix of
            `path` (.onnx, .pt2, .safetensors) by default.
        img_size: in pixels, one side, (height, width) or (depth, height, width); by default the size that the model is
            built for.
        dynamic: the free axes: any of 'batch', 'height', 'width', 'depth' of films and volumes, and 'sides', all of
            these but the batch.
        features: indices of blocks, or of stages if there are several, whose maps are also outputs.
        int8: whether the weights of linear layers are in 8 bits; `Exported` then has the difference of the outputs.
        batches: pairs of images and labels (B,), on which the model and the file are scored.

    Raises:
        ValueError: for an invalid model, option or path, before any work; if the outputs of the file differ from those
            of the model by more than 1e-4 of the largest output.
        ImportError: if a package that the format needs is not installed.
    """
    path = Path(path)
    subject = Exportable.of(model)
    named = _format(path, format)
    if path.is_dir():
        raise ValueError(f"`path` must be a file, got {str(path)!r}, which is a folder.")
    size = subject.size if img_size is None else on_axes(img_size, len(subject.size))
    count = subject.feature_count
    if wrong := [index for index in features if not 0 <= index < count]:
        rule = f"from 0 to {count - 1}" if count else f"left out with {type(model).__name__}, which is not a backbone"
        raise ValueError(f"`features` must be {rule}, got {wrong[0]}.")
    if named == WEIGHTS:
        options = {"dynamic": dynamic, "features": features, "int8": int8, "img_size": img_size, "batches": batches}
        for name, given in options.items():
            if given:
                raise ValueError(f"`{name}` must be left out with the format {WEIGHTS!r}, which contains no program.")
        return _write_weights(subject, path)
    kind = FORMATS[named]
    kind.check(int8)
    subject = subject.plain()
    sizes = Sizes.of(subject, size, dynamic)
    if sizes.free - {"batch"}:
        kind.check_position(subject.position)
    return _write_program(subject, path, named, kind, sizes, features, int8, batches)


def _format(path: Path, given: str | None) -> str:
    suffixes = {**{kind.suffix: name for name, kind in FORMATS.items()}, ".safetensors": WEIGHTS}
    if given is not None:
        return known_name("format", given, [*FORMATS, WEIGHTS])
    if path.suffix not in suffixes:
        known = ", ".join(suffixes)
        raise ValueError(f"`format` must be given where `path` does not end in {known}, got {str(path)!r}.")
    return suffixes[path.suffix]


def _write_weights(subject: Exportable, path: Path) -> Exported:
    """Write the weights, and load them into another copy of the model."""
    published = isinstance(subject.model, Backbone)
    state = published_state_dict(subject.model) if published else subject.model.state_dict()
    model = copy.deepcopy(subject.model).eval()
    images = random_images(subject.channels, 1, subject.size).to(next(model.parameters()))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = Program(Exportable.of(model))
        expected = program(images)
        for parameter in model.parameters():
            parameter.zero_()
        load = load_checkpoint if published else load_own
        load(model, save_weights(state, Path(folder) / "weights.safetensors"))
        error = difference(program(images), expected)
    compared = (Comparison(1, subject.size, checked_error(error, path, subject.size)),)
    save_weights(state, path)
    return Exported(path, WEIGHTS, "weights", path.stat().st_size, {}, compared)


def _write_program(
    subject: Exportable,
    path: Path,
    named: str,
    kind: Format,
    sizes: Sizes,
    features: Sequence[int],
    int8: bool,
    batches: Iterable[tuple[Tensor, Tensor]] | None,
) -> Exported:
    program = Program(prepared(subject, sizes), features)
    expected = _runner(Program(prepared(subject, sizes, folded=False), features))
    traced = trace(program, sizes)
    for batch, size in sizes.checked():  # before translating, which takes longer
        images = random_images(subject.channels, batch, size)
        checked_error(difference(_run_traced(traced, images, sizes), expected(images)), path, size)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model{kind.suffix}"
        _write(kind, file, program, sizes, int8, traced)
        run = kind.open(file)
        compared = []
        for batch, size in sizes.checked():
            images = random_images(subject.channels, batch, size)
            error = difference(run(images), expected(images))
            compared.append(Comparison(batch, size, error if int8 else checked_error(error, path, size)))
        scores = None if batches is None else accuracy([expected, run], batches, "batch" in sizes.free)
        operators = dict(kind.operators(file).most_common())
        write_whole(path, lambda temporary: shutil.copyfile(file, temporary))
    return Exported(
        path,
        named,
        str(sizes),
        path.stat().st_size,
        operators,
        tuple(compared),
        scores,
    )


def _write(
    kind: Format, file: Path, program: Program, sizes: Sizes, int8: bool, traced: ExportedProgram | None = None
) -> None:
    """Write a program, which may be traced already, with weights in float32 or int8."""
    if int8 and kind is not FORMATS["onnx"]:
        program, traced = Program(Exportable.of(quantize_linear(copy.deepcopy(program.model))), program.features), None
    traced = traced or trace(program, sizes)
    if int8 and kind is FORMATS["onnx"]:
        wide = file.with_name("wide.onnx")
        kind.write(wide, traced, program)
        quantize_onnx(wide, file)
    else:
        kind.write(file, traced, program)


def _runner(program: Program) -> Runner:
    @torch.no_grad()
    def run(images: Tensor) -> list[Tensor]:
        return list(program(images))

    return run


def _run_traced(traced: ExportedProgram, images: Tensor, sizes: Sizes) -> list[Tensor]:
    """Run a traced program."""
    run = traced.module()
    try:
        with torch.no_grad():
            return list(run(images))
    except (AssertionError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0]
        rule = "left out, or not both 'batch' and sides," if "batch" in sizes.free else "left out or 'batch'"
        raise ValueError(
            f"`dynamic` must be {rule} with this model, of which a program cannot compute all of these sizes: "
            f"images of {by(images.shape[2:])} are refused, where {sizes} is requested ({said[:200]})."
        ) from error
