"""What was run on the models of timm and transformers, class by class: the table of docs/backbones.md.

`python -m evidence.models_page` writes the page from evidence/models.csv. With `--measure timm` or `--measure
transformers` it first runs all operations on the models of small_models.csv with random weights, in two processes with
at most 4 GB each. Rows are stored at once, and a call that is repeated on the same day goes on where it stopped. With
`--measure NAME ...` it measures those models, also again, and with `--only OPERATION ...` these operations alone.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import json
import multiprocessing
import re
import resource
import signal
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import graticule
from evidence.records import between, csv_of_records, read_records
from graticule.analysis.audit import audit
from graticule.external.images import call, image_size, own_patch_size
from graticule.external.traced_model import view_of
from graticule.external.transformers_folder import class_of
from graticule.system.files import write_text
from graticule.system.tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "backbones.md"
DATA = Path(__file__).with_name("models.csv")
#: Bytes of memory of a process, and the number of models that two processes measure.
MEMORY, SLICE = 4 * 2**30, 24
#: Seconds of processor time after which an operation is stopped.
SECONDS = 40
with Path(__file__).with_name("small_models.csv").open(encoding="utf-8") as _file:
    #: Name -> library, the row whose values it has too, and options. Of timm: a model of each family with attention, of
    #: MLPs that `convert` takes, and with other options or fewer layers. Of transformers: the encoders of images with
    #: attention, with windows and stages where their classes have some.
    MODELS = {cells["name"]: cells for cells in csv.DictReader(_file)}


def configured(name: str) -> dict[str, Any]:
    """Return the values of a small configuration; one like `known` has the values that its class knows."""
    like, options = MODELS[name]["like"], json.loads(MODELS[name]["options"] or "{}")
    values = configured(like) if like else {}
    if like == "known":
        config = class_of(transformers, name).config_class()
        values = {key: value for key, value in values.items() if isinstance(getattr(config, key, None), int)}
    return {**values, **options}


SMALL, STAGES, VIDEO, MERGED = map(configured, ("small", "stages", "video", "merged"))
#: Names of blocks and of their norm before attention, for `attach`.
BLOCKS = (
    ("blocks.*", "norm1"),
    ("layers.*", "layernorm_before"),
    ("layers.*", "norm1"),
    ("encoder.layer.*", "norm1"),
    ("encoder.layers.*", "layer_norm1"),
    ("model.layer.*", "norm1"),
    ("encoder.layer.*", "layernorm_before"),
    ("transformer.layers.*", "attention_norm"),
    ("vision_encoder.layers.*", "layer_norm1"),
)


@dataclass(frozen=True)
class Row:
    """Results of a model: 'yes', 'in part', '-' or 'slow' of each operation, when, and why it does not convert."""

    library: str
    name: str
    kind: str
    convert: str
    view: str
    audit: str
    attach: str
    export: str
    wide: str
    half: str
    double: str
    saved: str
    kept: str
    onnx: str
    version: str
    date: str
    reason: str


COLUMNS = Row.__match_args__[3:-3]
#: The reason of other classes of transformers, most of which are plain ViTs under other names.
UNTRIED = "not registered"


def for_model(x: Tensor) -> Tensor:
    """Return images as they are, and video (B, C, frames, height, width) in transformers' order of axes."""
    return x.transpose(1, 2) if x.ndim > 4 else x


def output(model: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a model as `convert` defines it."""
    result = call(model, for_model(x))
    if isinstance(result, Tensor):
        return result
    names = ("logits", "predicted_depth", "feature_maps", "image_embeds", "pooler_output", "last_hidden_state")
    value = next(result[name] for name in names if name in result)
    return value if isinstance(value, Tensor) else torch.cat([part.flatten(1) for part in value], 1)


def tokens(x: Tensor) -> Tensor:
    """Return outputs with a map as tokens."""
    return x.flatten(2).mT if x.ndim == 4 else x


def is_same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether outputs are the same up to rounding."""
    close = torch.allclose(actual, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    return actual.shape == expected.shape and close


#: Names of lists of blocks and stages.
LISTS = ("blocks", "block", "layers", "layer", "stages")


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output of a model, and the outputs of its blocks in the order of their calls."""
    called: list[Tensor] = []

    def keep(_: nn.Module, __: Any, result: Any) -> None:
        called.extend([part for part in tree_leaves(result) if isinstance(part, Tensor)][:1])

    named = [part for name, part in model.named_modules() if name.rpartition(".")[2] in LISTS]
    blocks = [block for part in named if isinstance(part, nn.ModuleList | nn.Sequential) for block in part]
    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        return [output(model, x), *called]
    finally:
        for handle in handles:
            handle.remove()


def are_same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether the outputs of a model and of its blocks are the same up to rounding."""
    return len(actual) == len(expected) and all(map(is_same, actual, expected))


@torch.no_grad()
def perturb(model: nn.Module) -> nn.Module:
    """Change all weights of a model, many of whose tables and biases start at zero, and return it."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


class Called(nn.Module):
    """A model that returns one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for images as `output` does."""
        return output(self.model, x)


class Operations:
    """The operations on a model, a method per column: None is 'yes', an error '-', and other results are as returned.

    model: the model, which is not changed.
    size: of its images.
    resized: the first copy that was resized, with its images.
    reasons: the error of each operation that raised one.
    """

    def __init__(self, model: nn.Module, size: tuple[int, ...]) -> None:
        self.model, self.size, self.x = model, size, torch.randn(6, 3, *size)
        self.resized: tuple[nn.Module, Tensor] | None = None
        self.reasons: dict[str, str] = {}

    def attempt(self, name: str) -> str:
        """Run an operation; 'slow' if it takes too long."""

        def stop(*_: Any) -> None:
            raise TimeoutError

        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return getattr(self, name)() or "yes"
        except TimeoutError:
            return "slow"
        except Exception as error:  # any error of another library
            self.reasons[name] = " ".join(str(error).split())[:300]
            return "-"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def convert(self) -> str | None:
        """Convert, and back."""
        ours = graticule.convert(self.model)
        to = graticule.to_timm if type(self.model).__module__.startswith("timm") else graticule.to_transformers
        back, name = to(ours).state_dict(), type(self.model).__name__
        if not all(torch.equal(back[key], value) for key, value in self.model.state_dict().items()):
            return "not back"
        if name.startswith("Qwen"):  # it takes packed patches, and merges its tokens afterwards
            return None
        expected, actual = tokens(output(self.model, self.x[:2])), ours(self.x[:2])
        if name == "PixtralVisionModel":  # all images in one row
            expected = expected.view_as(actual)
        return None if torch.allclose(actual, expected, rtol=1e-3, atol=1e-4) else "other outputs"

    def view(self) -> None:
        """Run the model block by block."""
        view_of(copy.deepcopy(self.model), self.size).run(self.x[:2])

    def audit(self) -> str | None:
        """Measure what `graticule audit` measures, but for times."""
        report = audit(copy.deepcopy(self.model), {self.size: self.x}, self.size, timed=False)
        return "in part" if report.unavailable else None

    def attach(self) -> None:
        """Attach LaPE, by the known names of blocks and norms."""
        example = for_model(self.x[:2])
        for names in ({}, *({"blocks": blocks, "norm": norm} for blocks, norm in BLOCKS)):
            try:
                changed = graticule.attach(copy.deepcopy(self.model), "learnable", "lape", example=example, **names)
            except ValueError:
                continue
            call(changed, example[:1])
            return
        raise ValueError("`model` must have one of the known names of blocks.")

    def export(self) -> None:
        """Export the converted model."""
        with tempfile.TemporaryDirectory() as folder:
            graticule.export(graticule.convert(self.model), Path(folder) / "model.onnx")

    def wide(self) -> str | None:
        """Resize to 16:9, in patches or in multiples of them."""
        patch = own_patch_size(self.model) or (4, 4)
        errors = []
        for rows, columns in (*((step * patch[0], step * patch[1]) for step in (1, 2, 4)), (32, 32)):
            try:
                return self.resize((9 * rows, 16 * columns))
            except Exception as error:  # any error of another library
                errors.append(error)
        raise errors[0]

    def half(self) -> str | None:
        """Resize to half of the size."""
        return self.resize((self.size[-2] // 2, self.size[-1] // 2))

    def double(self) -> str | None:
        """Resize to twice the size."""
        return self.resize((2 * self.size[-2], 2 * self.size[-1]))

    def resize(self, pixels: tuple[int, int]) -> str | None:
        """Resize a copy, and compare it with the model itself where that takes the size."""
        shape = (*self.size[:-2], *pixels)
        images = torch.randn(1, 3, *shape)
        expected = self.expected(shape, images)
        changed = copy.deepcopy(self.model)
        try:
            assert graticule.resize(changed, shape) is changed
            actual = outputs(changed, images)
        except Exception:  # any error of another library
            if expected is None or hasattr(changed, "set_input_size"):
                raise
            return "itself"
        self.resized = self.resized or (changed, images)
        if expected is None:
            return "runs"
        return None if are_same(actual, expected) else "other outputs"

    def expected(self, shape: tuple[int, ...], images: Tensor) -> list[Tensor] | None:
        """Return what timm's `set_input_size` makes of a model, or else what the model itself computes at a size."""
        for prepare in (lambda model: model.set_input_size(img_size=shape), lambda _: None):
            model = copy.deepcopy(self.model)  # which may change its windows for the size
            try:
                prepare(model)
                return outputs(model, images)
            except Exception:  # any error of another library
                continue
        return None

    def result(self) -> tuple[nn.Module, Tensor]:
        """Return the resized model and its images."""
        for resize in (self.wide, self.half, self.double):
            if self.resized is None:
                with suppress(Exception):
                    resize()
        if self.resized is None:
            raise ValueError("`model` must have been resized.")
        return self.resized

    def saved(self) -> str | None:
        """Save the resized model as its library does, and open it by that, or else by `graticule.load`."""
        model, images = self.result()
        expected, word = outputs(model, images), None
        with tempfile.TemporaryDirectory() as folder:
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(folder)
                with suppress(Exception):  # of a class that refuses or reads another grid
                    if are_same(outputs(type(model).from_pretrained(folder).eval(), images), expected):
                        return None
                opened, word = graticule.load(folder).eval(), "load"
            else:
                torch.save(model, f"{folder}/model.pt")
                opened = torch.load(f"{folder}/model.pt", weights_only=False)
        if type(opened) is type(model):
            return word if are_same(outputs(opened, images), expected) else "other outputs"
        return word if is_same(opened(images), tokens(expected[0])) else "other outputs"

    def kept(self) -> None:
        """Compare the parameters before and after: a parameter of the same shape must be the same object."""
        _, images = self.result()
        model = copy.deepcopy(self.model)
        before = dict(model.named_parameters())
        after = dict(graticule.resize(model, tuple(images.shape[2:])).named_parameters())
        moved = [name for name, value in before.items() if after.get(name) is not value]
        if others := [name for name in moved if name not in after or after[name].shape == before[name].shape]:
            raise ValueError(f"{len(others)} of {len(before)} parameters are other objects, such as {others[0]}")

    def onnx(self) -> str | None:
        """Export the resized model and run the file."""
        model, images = self.result()
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/model.onnx"
            torch.onnx.export(Called(model), (images,), file, dynamo=True, verbose=False)
            session = onnxruntime.InferenceSession(file)
            (actual,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        return None if is_same(torch.from_numpy(actual), output(model, images)) else "other outputs"


def small(name: str) -> tuple[nn.Module, int]:
    """Return a model of timm with few layers and for small images, if its class can have them, and its image size."""
    options = configured(name)
    name = name.partition("(")[0]
    pixels = timm.get_pretrained_cfg(name).input_size[-1]
    frames: list[tuple[int, dict[str, Any]]] = [(side, {"img_size": side}) for side in (64, 56)]
    # of ConViT, whose last layers must not be gated; of others; of Swin
    layers: list[dict[str, Any]] = [{"depth": 2, "local_up_to_layer": 1}, {"depth": 2}, {"window_size": 2}, {}]
    for side, shape in (
        (side, frame | layer) for side, frame in [*frames, (128, {}), (pixels, {})] for layer in layers
    ):
        try:
            model = timm.create_model(name, **shape | options).eval()
            with torch.no_grad():
                model(torch.randn(1, 3, side, side))
            patch = getattr(getattr(model, "patch_embed", None), "patch_size", None) or (1,)
            if any(side % patch_side for patch_side in patch):
                continue
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
            continue
        # timm leaves the size of the published weights
        model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "input_size": (3, side, side)}
        return model, side
    return timm.create_model(name, **options).eval(), pixels


def built(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a small model of timm or transformers, and the size of its images, or (frames, height, width)."""
    if MODELS[name]["library"] == "timm":
        model, side = small(name)
        return model, (side, side)
    kind = class_of(transformers, name)
    model = kind(kind.config_class(**configured(name))).eval()
    frames = [getattr(model.config, key) for key in ("num_frames", "frames_per_clip") if hasattr(model.config, key)]
    return model, (*frames, *(image_size(model) or (64, 64)))


def measure(name: str, only: list[str], before: Row | None) -> Row | None:
    """Run operations on a model; others are as before."""
    torch.manual_seed(0)
    library = MODELS[name]["library"]
    try:
        model, size = built(name)
        operations = Operations(perturb(model), size)
    except Exception as error:  # any error of another library
        return print(f"{name} cannot be built: {error}", file=sys.stderr)
    cells = {
        column: getattr(before, column, "-") if only and column not in only else operations.attempt(column)
        for column in COLUMNS
    }
    print(name, cells, operations.reasons, file=sys.stderr)
    why = before.reason if before and before.convert == cells["convert"] else operations.reasons.get("convert", "")
    why = UNTRIED if "must be of one of timm's classes" in why else why
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return Row(library, name, type(operations.model).__name__, **cells, version=version(library), date=date, reason=why)


def record(names: list[str], only: list[str]) -> None:
    """Measure models in processes of a few each, two at a time, and store each row at once."""
    rows = {row.name: row for row in read_records(DATA, Row)}
    context, limit = multiprocessing.get_context("spawn"), (resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for start in range(0, len(names), SLICE):  # `max_tasks_per_child` of Python 3.11 can stop for ever
        with ProcessPoolExecutor(2, context, resource.setrlimit, limit) as pool:
            part = names[start : start + SLICE]
            for row in pool.map(measure, part, [only] * len(part), map(rows.get, part)):
                rows |= {row.name: row} if row else {}
                ordered = sorted(rows.values(), key=lambda row: (row.library, row.kind, row.name))
                write_text(DATA, csv_of_records(Row, ordered))


def table(rows: list[Row]) -> str:
    """Return a row for all classes of a library with the same results."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        label = f"`{row.kind}`" + (f" ({row.name})" if row.name != row.kind else "")
        groups.setdefault(tuple(getattr(row, column) for column in COLUMNS), []).append(label)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = [(*cells, ", ".join(names)) for cells, names in ordered]
    return markdown([(*COLUMNS, "classes"), *lines]).replace("| ", "|").replace(" |", "|")


def main() -> None:
    """Measure models, if asked to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs="*", default=[], help="timm, transformers, or names of models")
    parser.add_argument("--only", nargs="*", default=[], help="operations to measure (default: all)")
    options = parser.parse_args()
    requested = set(options.measure)
    if unknown := requested - {"timm", "transformers", *MODELS}:
        parser.error(f"`--measure` must name timm, transformers or models of small_models.csv, got {unknown}")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    measured = {row.name for row in read_records(DATA, Row) if row.date == today}
    names = [name for name, cells in MODELS.items() if cells["library"] in requested and name not in measured]
    record([*names, *(name for name in MODELS if name in requested)], options.only)
    rows = read_records(DATA, Row)
    text = PAGE.read_text(encoding="utf-8")
    texts = []
    for library in ("timm", "transformers"):
        of_library = [row for row in rows if row.library == library]
        text = between(text, library, table(of_library))
        versions, dates = sorted({row.version for row in of_library}), sorted({row.date for row in of_library})
        texts.append(f"{library} {' and '.join(versions)} ({' to '.join(dict.fromkeys((dates[0], dates[-1])))})")
    write_text(PAGE, re.sub(r"(?s)(measured it with ).*?(, on small)", rf"\g<1>{' and '.join(texts)}\g<2>", text))


if __name__ == "__main__":
    main()
