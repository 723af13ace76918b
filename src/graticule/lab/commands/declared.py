"""The options of all commands but train and adapt, which are parsed before PyTorch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from graticule.lab.arguments import Positional, Rare, default_of
from graticule.lab.commands.choices import Compare
from graticule.lab.commands.options import (
    Figures,
    JsonOutput,
    NamedData,
    NamedModels,
    OfCheckpoint,
    OnDevice,
    Repeatable,
    command_line,
    parse,
)
from graticule.lab.tasks.options import ImageOptions, SegmentationOptions
from graticule.registry.checks import Range, known_name
from graticule.registry.registry import registered


@dataclass
class Demo:
    """Train a small ViT on embedded digits with a table, a table of LaPE's amplitude, and LaPE; write report.html.

    graticule demo
    graticule demo --quick --seeds 0
    """

    output: Path = Path("runs/demo")
    """folder of the runs and the report"""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    """seeds, the same for all choices"""
    quick: bool = False
    """train a few steps on a few images, to check that everything works"""


@dataclass
class Evaluate(SegmentationOptions, ImageOptions, Figures, NamedData, JsonOutput, OnDevice):
    """Score models on held-out data: models on images at several sizes.

        graticule evaluate RUN RUN --sizes 20 28 40 28x56
        graticule evaluate deit_tiny_patch16_224 --images FOLDER --sizes 160 224 288
        graticule evaluate timm:NAME --images FOLDER --probe ridge

    A table and a plot. A probe reads the class of each image from the others.
    """

    models: Positional[list[str]]
    """runs, published folders, files of weights, names, timm:NAME or hf:NAME, of one task"""
    probe: Literal["knn", "ridge"] | None = None
    """read classes from the frozen features of any backbone, by neighbors or a linear map"""
    precision: Rare[Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"] | None] = None
    """precision of the computation (default: that of the run)"""
    output: Path | None = None
    """folder for the table and the plot (default: the first run's, or runs/NAME)"""


@dataclass
class Predict(Figures, JsonOutput, OnDevice, OfCheckpoint):
    """Draw the predictions of a run: the most likely classes, boxes and masks with labels, or the class of each pixel.

        graticule predict RUN a.jpg b.jpg

    They are also written as JSON: boxes.json and masks.json are results in COCO's format, images.json has the ids of
    the images.
    """

    run: Positional[Path]
    """run folder"""
    images: Positional[list[Path]]
    """files of images"""
    threshold: Annotated[float, Range(0, 1)] = 0.5
    """detections with a lower score are not drawn; JSON has all"""
    output: Path | None = None
    """folder for figures and JSON (default: predictions in the run folder)"""


@dataclass
class Runs(JsonOutput):
    """List the runs in folders with their progress, their best score so far, and the values in which they differ.

    graticule runs
    graticule runs runs/study --sort best
    """

    folders: Positional[list[Path]] = field(default_factory=lambda: [Path("runs")])
    """folders with runs, at any depth"""
    sort: Literal["age", "name", "best"] = "age"
    """sort by the last change, by name, or by the best score (best run last, runs of one metric together)"""


@dataclass(kw_only=True)
class Kinds:
    """Draw what position does in the layers of a model, and print a table.

        graticule analyze correlations RUN
        graticule analyze attention RUN RUN

    correlations: position correlations of every layer, rotations, and the bias of every head.

    translation: distance of every layer from translation equivariance.

    attention: score matrices, and the map of a query on an image.

    mixing: token mixing of gated MLPs, and its non-locality.

    Layers, heads and groups of channels are counted from 0, layers through all stages. graticule analyze KIND --help
    lists the options of a kind.
    """

    kind: Positional[Literal["correlations", "translation", "attention", "mixing"]]
    """kind of analysis"""
    models: Positional[list[str]]
    """runs, published folders, files of weights, names of models, timm:NAME or hf:NAME"""


@dataclass
class Analyze(NamedModels, Figures, JsonOutput):
    """The options of every kind of analysis."""

    models: Positional[list[str]]
    """runs, published folders, files of weights, names of models, timm:NAME or hf:NAME"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: that of the model)"""
    output: Path | None = None
    """folder for the figures and the numbers (default: the first run's, or runs/NAME)"""


@dataclass
class AnalyzeCorrelations(Analyze):
    """Draw the position correlations of every layer (LaPE, Eq. 12), rotations, and the bias of every head.

    graticule analyze correlations RUN
    graticule analyze correlations deit_tiny_patch16_224 --weights random
    """

    untrained: Rare[Annotated[int, Range(0)]] = 39
    """number of untrained models of the same shape against which the range over layers is tested; 0 for none"""


@dataclass
class AnalyzeTranslation(NamedData, OnDevice, Analyze):
    """Measure the distance of each layer from translation equivariance, and of the logits from invariance.

        graticule analyze translation RUN RUN
        graticule analyze translation RUN --shifts 1x0 0x2 --count 64

    Test images are shifted by whole patches. The results are one table per model, and one figure.
    """

    count: Annotated[int | None, Range(2)] = None
    """number of test images, evenly spaced (default: 128, or all if there are fewer)"""
    shifts: list[str] = field(default_factory=list)
    """DOWNxRIGHT, in patches of the coarsest grid (default: 1x0 0x1 1x1)"""
    border: Rare[int] = 1
    """tokens closer to an edge than this many patches are reported separately"""


@dataclass
class AnalyzeAttention(NamedData, Analyze):
    """Draw the attention of chosen layers and heads on one test image: score matrices, and a query's map on the image.

    graticule analyze attention RUN --layers 1 --without-position
    graticule analyze attention RUN RUN --layers 0 5 --heads 0 1 --image 5
    """

    layers: list[int] = field(default_factory=lambda: [1])
    """layers, counted from 0"""
    heads: list[int] = field(default_factory=list)
    """heads, counted from 0 (default: evenly spaced ones, six columns in all)"""
    query: str | None = None
    """ROWxCOLUMN of the patch whose attention is drawn on the image, from 0x0 (default: center), or cls"""
    image: int = 0
    """index of the test image, counted from 0"""
    without_position: bool = False
    """also draw each model with its position information removed"""


@dataclass
class AnalyzeMixing(Analyze):
    """Draw the token mixing of gated MLPs: the weights around a token, the bias maps, and their non-locality.

        graticule analyze mixing RUN
        graticule analyze mixing RUN --layers 0 3 --query 0x3

    If the weights are a dense matrix plus a table of displacements (encoding lrpe_m), both are drawn as well.
    """

    layers: list[int] = field(default_factory=list)
    """layers, counted from 0 (default: all, six of them drawn)"""
    groups: list[int] = field(default_factory=list)
    """groups of channels, counted from 0 (default: eight, evenly spaced)"""
    query: str | None = None
    """ROWxCOLUMN of the token within its grid or window, starting at 0x0 (default: the center)"""
    values: Literal["weights", "logits"] = "weights"
    """weights, or the logits before their softmax"""


@dataclass
class Explore(Repeatable, NamedModels):
    """Write one page to explore position in a model, or in two side by side, and open it in the browser.

        graticule explore RUN
        graticule explore RUN RUN --images 0 5 --sizes 224 288
        graticule explore deit_tiny_patch16_224 --images photo.jpg

    Choose layer, head and token, by pointer or keys: the page shows the position correlations of the token, its
    attention with and without position, the bias, the similarity under rotation, and mixing weights. The page contains
    all its data, so it can be sent as one file.
    """

    models: Positional[list[str]]
    """one or two: runs, published folders, files of weights, names, timm:NAME, hf:NAME, or FILE.py:NAME"""
    images: list[str] = field(default_factory=list)
    """files of images, or indices of test images of runs, counted from 0 (default: 0)"""
    sizes: list[str] = field(default_factory=list)
    """sizes of the images, sides in pixels or HEIGHTxWIDTH, the first shown first (default: each model's)"""
    output: Path | None = None
    """folder for explorer.html, or file NAME.html (default: the first run's, or runs/NAME)"""
    open: bool = True
    """open the page in the browser, if there is a terminal"""


@dataclass
class AuditCommand(Repeatable, NamedModels, JsonOutput, OnDevice):
    """Measure the cost of position information, where it can be decoded, and its effects; one page and a JSON file.

        graticule audit RUN
        graticule audit deit_tiny_patch16_224 --images FOLDER
        graticule audit my_model.py:build --images FOLDER --sizes 288

    MODEL is a run folder, a file of weights in it, the name of a model of graticule or timm (timm:NAME if both have
    it), or FILE.py:NAME. It is not changed. The page has parameters and time, position maps, a linear probe of row and
    column per layer, the effects of zeroing, shuffling or removing position, other sizes, translation, and attention.
    """

    model: Positional[str]
    """run or published folder, file of weights, name, timm:NAME, hf:NAME, or FILE.py:NAME"""
    images: Path | None = None
    """folder of images, at any depth; FOLDER/CLASS/*, or FOLDER/val/CLASS/*, where classes are known (default: the test
    images, or videos, of the run)"""
    count: Annotated[int, Range(5)] = 64
    """largest number of images, evenly spaced; at least one for each of the five folds of the probe"""
    sizes: list[str] = field(default_factory=list)
    """other sizes, sides in pixels, HEIGHTxWIDTH, or DEPTHxHEIGHTxWIDTH of videos (default: about 1.5 times the
    model's)"""
    causes: Rare[bool] = False
    """split the effect of each other size: more tokens, then their content, then the values of position"""
    labels: Rare[Path | None] = None
    """file of lines path,label with paths relative to the folder of images (default: by the folders of the classes)"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: that of the model)"""
    batch_size: Rare[Annotated[int, Range(1)]] = 16
    """images per forward pass"""
    output: Path | None = None
    """folder for audit.html and audit.json (default: the run's, or runs/NAME)"""


@dataclass
class Models(JsonOutput):
    """List all names that options accept, the sizes of models, or which models take which encodings.

        graticule models
        graticule models "deit_*"
        graticule models lape
        graticule models --matrix
        graticule models pvt_tiny --matrix --encodings rope "shaw(clip=4)" --reasons

    Multiply-adds are those of matrix products and convolutions for one image. PosMLP's paper counts the logits of GGQPE
    for each pair of patches as well, 0.12 G in T, S and B; here they are computed per displacement.
    A cell of the matrix lists the joinings, abbreviated; a dash marks an encoding that is refused with all of them.
    Methods and models that --plugin FILE.py registers are included.
    """

    patterns: Positional[list[str]] = field(default_factory=list)
    """words or patterns, as in a shell, such as lape or "deit_*": names that match, with the sizes of models (default:
    the names of all; for a matrix, one of each family)"""
    matrix: bool = False
    """print the supported combinations of models, encodings and joinings"""
    encodings: list[str] = field(default_factory=list)
    """for a matrix: encodings, with options (default: every one)"""
    reasons: bool = False
    """for a matrix: also print the reason why a combination is refused"""


@dataclass
class Check(JsonOutput):
    """Check the position code of a model: axes, pairs of channels, prefix tokens, autocast, sizes, caches, export.

        graticule check vit_small_patch16_rope_224 --skip export
        graticule check my_model.py:build --img-size 64x96
        graticule check my_methods.py        # the classes of a plugin

    MODEL is a name of timm or otherwise of graticule, built with random weights (timm's with two layers per stage).
    FILE.py:NAME is a module, position code alone (`graticule.testing.RotationCode`, `BiasCode` or `TableCode`), or a
    function that builds one. FILE.py is a plugin: its encodings, joinings, resamplers, backbones and tasks are checked,
    tasks by short runs of the first recipe in it.
    The exit code is 1 if a check failed.
    """

    target: Positional[str]
    """MODEL, FILE.py or FILE.py:NAME"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: that of the model)"""
    patch_size: Rare[str | None] = None
    """side in pixels, or HEIGHTxWIDTH, of a patch (default: that of the model)"""
    skip: list[str] = field(default_factory=list)
    """names of checks to leave out"""


@dataclass
class IdentifyCommand(JsonOutput):
    """Name the position encoding that equals code for a rotation, a table or a bias of attention.

        graticule identify my_model.py:rotate
        graticule identify timm:vit_small_patch16_dinov3

    FILE.py:NAME is a function `NAME(queries, grid)` that rotates queries (B, heads, N, channels) on a grid (height,
    width), or a function of a grid; or position code as for graticule check, a module of timm, transformers or
    diffusers, or a function that builds one of them. A name is certified in float64 on several grids, else the nearest
    encoding is shown with its difference, and the exit code is 1.
    """

    target: Positional[str]
    """FILE.py:NAME, a name of timm, or hf:OWNER/NAME"""
    channels: int = 64
    """channels of a head, for a function that rotates queries"""


@dataclass
class New:
    """Write a working Python file to start from, and a passing test of it.

        graticule new encoding my_encoding
        graticule new joining my_joining --output methods

    The file is a plugin: commands take it as --plugin my_encoding.py. An encoding is a table of one row per token,
    which joinings pass to the layers; a bias is an encoding that is added to the attention logits.
    """

    kind: Positional[Literal["encoding", "bias", "joining", "backbone", "dataset", "recipe", "task"]]
    """kind of class or function in the file"""
    name: Positional[str]
    """its name, an identifier such as my_encoding"""
    output: Path = Path()
    """folder to write to (default: this one)"""


@dataclass
class Export(NamedModels, JsonOutput):
    """Export a model as a program for ONNX Runtime or torch.export, run it, and compare it with PyTorch.

        graticule export RUN --dynamic batch
        graticule export RUN --output model.pt2 --dynamic batch sides
        graticule export timm:deit_tiny_patch16_224 --weights FILE --joining lape

    With a fixed height and width, position is folded into constants. Nothing is written if the outputs differ by more
    than 1e-4 of the largest one (in float32).
    """

    model: Positional[str]
    """folder of a run or of a published model, name of a model, timm:NAME or hf:NAME, which are converted"""
    format: str | None = None
    """onnx or torch-export (default: from the name of the output, or onnx)"""
    output: Path | None = None
    """folder for model.onnx or model.pt2, or file (default: the run's folder, or runs/NAME)"""
    dynamic: list[str] = field(default_factory=list)
    """free (dynamic) axes of the program: batch, and sides, all of an image; separated by spaces or commas"""
    img_size: str | None = None
    """side in pixels, HEIGHTxWIDTH, or DEPTHxHEIGHTxWIDTH of videos, if fixed (default: that of the model)"""
    features: list[int] = field(default_factory=list)
    """blocks (or stages, if there are several), counted from 0, whose maps are further outputs"""
    maps: bool = False
    """for a detector or segmentation model, export only the backbone with its pyramid, whose maps are outputs"""
    int8: bool = False
    """quantize the weights of linear layers to 8 bits"""


@dataclass
class Publish(NamedModels):
    """Write a model as a folder for the Hugging Face hub: config.json, model.safetensors and a model card.

        graticule publish RUN FOLDER
        graticule publish timm:vit_small_patch16_224 FOLDER --joining lape
        graticule publish RUN FOLDER --push OWNER/NAME

    graticule.from_pretrained opens it, and timm.create_model("local-dir:FOLDER", pretrained=True) opens classifiers.
    """

    model: Positional[str]
    """folder of a run, file of its weights, name of a model, timm:NAME or hf:NAME (converted), or FILE.py:NAME"""
    folder: Positional[Path]
    """folder to write to"""
    push: str | None = None
    """upload the folder to this repository of the hub, OWNER/NAME"""
    private: Rare[bool] = False
    """make a new repository private"""
    host: str | None = None
    """for FILE.py:NAME with an attached position: the source of the module, such as torchvision:vit_b_16"""
    format: Literal["png", "pdf", "svg"] = "png"
    """format of the figure: pdf and svg, for papers, are written beside the png of the model card"""


#: Kind of analysis -> its options.
KINDS: dict[str, type[Analyze]] = {
    "correlations": AnalyzeCorrelations,
    "translation": AnalyzeTranslation,
    "attention": AnalyzeAttention,
    "mixing": AnalyzeMixing,
}
#: Command -> its options.
DECLARED: dict[str, type] = {
    "compare": Compare,
    "demo": Demo,
    "evaluate": Evaluate,
    "predict": Predict,
    "runs": Runs,
    "analyze": Kinds,
    "explore": Explore,
    "audit": AuditCommand,
    "models": Models,
    "check": Check,
    "identify": IdentifyCommand,
    "new": New,
    "export": Export,
    "publish": Publish,
}


def evaluate_options() -> type:
    """Return the options of evaluate, with those of the evaluations of tasks that a plugin registered."""
    kinds = list(dict.fromkeys(task.evaluation for _, task in sorted(registered("task").items())))
    known = {option.name: option for option in dataclasses.fields(Evaluate)}
    for option in [option for kind in kinds for option in dataclasses.fields(kind)]:
        other = known.setdefault(option.name, option)
        if (other.type, default_of(other)) != (option.type, default_of(option)):
            raise ValueError(
                f"`evaluation` must not have the option {option.name}, which is another one of graticule evaluate."
            )
    return dataclass(type("Evaluate", (*reversed(kinds), Evaluate), {"__doc__": Evaluate.__doc__}))


def parse_declared(name: str, arguments: Sequence[str]) -> Any:
    """Parse the options of one of these commands."""
    if name != "analyze":
        options: Any = parse(evaluate_options() if name == "evaluate" else DECLARED[name], name, arguments)
        if isinstance(options, Repeatable):
            options.line = command_line(name, arguments)
        return options
    if not arguments or arguments[0].startswith("-"):
        parse(Kinds, name, arguments)  # prints the help, or says what is missing
    kind = known_name("KIND", arguments[0], KINDS)
    return parse(KINDS[kind], f"{name} {kind}", arguments[1:])
