"""Accuracy of what `graticule advise` chooses by 50 images, beside that of the best of all options.

    python benchmarks/advise.py --models table rope swin
    python benchmarks/advise.py --models dinov2 --weights dinov2_small.safetensors --cifar cifar

Small models are trained on 6,000 images of Fashion-MNIST for 10 epochs, if --runs has none, and scored on 400 test
images, zoomed to sizes of about 1.5, 2 and 4 times the tokens, and on 512 on a canvas of that size. Accuracies as
advised are means over 4 draws of 50 other images. The pretrained encoder of docs/pretrained.md at 112 pixels is judged
by ridge regression of the class token and the mean patch of 600 images of CIFAR-10 at that size, on 100 others, with 1
draw. Goal: within one point of the best. Writes docs/data/measured/advice.csv; `python -m evidence.results` its table.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import tempfile
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from pretrained import MEAN, STD, build, ridge
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import graticule
from graticule.lab.data.module import DataModule
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.advise import OWN, advise, distinct
from graticule.lab.training.run import Run

FILE = Path(__file__).parents[1] / "docs/data/measured/advice.csv"
MACHINE = "1 thread of an x86-64 machine with 2 cores, shared"
VIT, SIDES = "vit_nano_patch4_28", (28, 36, 40, 56)
SMALL_SWIN = ("embed_dim=48", "depths=[2, 2]", "num_heads=[2, 4]", "window_size=4")
#: Model -> its name, encoding, options, and sides of images, first in training.
MODELS: dict[str, tuple[str, str, tuple[str, ...], tuple[int, ...]]] = {
    "table": (VIT, "learnable", (), SIDES),
    "rope": (VIT, "rope", (), SIDES),
    "swin": ("swin_tiny_patch4_window7_224", "relative_bias", SMALL_SWIN, (32, 40, 48, 64)),
}


def cells(name: str, rows: list[tuple[Any, ...]], *facts: str) -> list[tuple[str, ...]]:
    """Return the cells of a model: accuracies of its own, as advised, and of the best; on a canvas the first two."""
    table = {(name, "at home"): [rows[0][2]]}
    for times, (_, _, _, own, advised, best, *canvas) in zip(("1.5", "2", "4"), rows, strict=False):
        table[name, f"{times} times the tokens"] = [own, advised, best]
        if canvas:
            table[f"{name}, canvas", f"{times} times the tokens"] = canvas
    texts = {key: " / ".join(f"{value:.1f}" for value in values) for key, values in table.items()}
    return [("model", row, column, text, "", "", *facts) for (row, column), text in texts.items()]


def trained(name: str, folder: Path, quick: bool) -> Any:
    """Return a small model, trained if it is not in the folder."""
    model, encoding, words, (side, *_) = MODELS[name]
    if not (folder / "result.json").exists():
        scale = {"limit_train": 60, "epochs": 3} if quick else {"limit_train": 6_000, "epochs": 10}
        shape = {"model": model, "encoding": encoding, "model_kwargs": words, "img_size": (side, side)}
        rest = {"limit_test": 1_000, "batch_size": 50, "lr": 3e-3, "workers": 0, "accelerator": "cpu"}
        graticule.train(dataclasses.replace(load_recipe("fashion_mnist"), **shape, **scale, **rest), folder)
    return Run.open(folder).model().eval()


@torch.no_grad()
def top1(model: Any, batches: Any) -> float:
    """Return the accuracy in percent."""
    return 100 * float(torch.cat([model(images).argmax(-1) == labels for images, labels in batches]).double().mean())


def small(name: str, options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Return sizes, what is chosen most, accuracies at home, of its own, as advised, of the best, and on a canvas."""
    model = trained(name, options.runs / name, options.quick)
    sizes = [(side, side) for side in MODELS[name][3][1 : 2 if options.quick else None]]
    data = DataModule("fashion_mnist", size=model.img_size)
    data.setup()
    count, draws = (100, 1) if options.quick else (400, 4)
    drawn = [range(count + 50 * draw, count + 50 * (draw + 1)) for draw in range(draws)]
    advices = [advise(model, lambda size, part=part: data.test_images(size, part)[0], sizes) for part in drawn]
    rows = []
    for size in sizes:
        tried = distinct(model, size)
        parts = [data.test_images(size, range(first, first + 50)) for first in range(0, count, 50)]
        scores = {option: top1(changed, parts) for option, changed in tried.items()}
        chosen = [advice.sizes[size].chosen for advice in advices]
        most = max(chosen, key=chosen.count)
        canvas = [top1(tried[option], islice(data.eval_dataloader(size, mode="canvas"), 2)) for option in (OWN, most)]
        home = top1(model, [data.test_images(model.img_size, range(count))])
        advised = fmean(scores[option] for option in chosen)
        rows.append((size, most, home, scores[OWN], advised, max(scores.values()), *canvas))
        print(name, *rows[-1], chosen, scores, flush=True)
    return rows


@torch.no_grad()
def encoder(options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Return the same for the pretrained encoder, without a canvas."""
    model = graticule.resize(graticule.convert(build(options)), 112).eval()

    def folder_images(split: str, first: int, count: int, side: int) -> tuple[Tensor, Tensor]:
        data = ImageFolder(options.cifar / split)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
        pairs = [data[index] for index in order[first : first + count]]
        images = [v2.functional.pil_to_tensor(image.resize((side, side), 3)) / 255 for image, _ in pairs]
        return v2.functional.normalize(torch.stack(images), MEAN, STD), torch.tensor([label for _, label in pairs])

    def features(network: Any, images: Tensor) -> Tensor:
        tokens = torch.cat([network.forward_features(part) for part in images.split(10)])
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)

    images, labels = folder_images("train", 0, 600, 112)
    classify = ridge(features(model, images), F.one_hot(labels, 10))
    rows, sizes = [], [(side, side) for side in (140, 154, 224)]
    advice = advise(model, lambda size: folder_images("test", 100, 50, size[0])[0], sizes)
    for size in sizes:
        tried, scores = {"home": model, **distinct(model, size)}, {}
        for option, network in tried.items():
            queries, truth = folder_images("test", 0, 100, 112 if option == "home" else size[0])
            scores[option] = 100 * float((classify(features(network, queries)).argmax(1) == truth).double().mean())
        home, chosen = scores.pop("home"), advice.sizes[size].chosen
        rows.append((size, chosen, home, scores[OWN], scores[chosen], max(scores.values())))
        print("dinov2", *rows[-1], scores, flush=True)
    return rows


def main() -> None:
    """Measure, print and write; with --quick, nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, "dinov2"], default=["table"])
    parser.add_argument("--runs", type=Path, help="folder of the trained models (default: a temporary one)")
    parser.add_argument("--weights", help="file of the weights of dinov2")
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-10, as train/CLASS/*.png and test/CLASS/*.png")
    parser.add_argument("--quick", action="store_true", help="train and score shortly, to check that everything works")
    options = parser.parse_args()
    options.scale = argparse.Namespace(encoder={})
    header, *kept = map(tuple, csv.reader(FILE.read_text(encoding="utf-8").splitlines()))
    with tempfile.TemporaryDirectory() as folder:
        options.runs = options.runs or Path(folder)
        for name in options.models:
            rows = encoder(options) if name == "dinov2" else small(name, options)
            facts = f"python benchmarks/advise.py --models {name}", str(datetime.date.today()), MACHINE
            kept = [cell for cell in kept if cell[1].partition(",")[0] != name] + cells(name, rows, *facts)
    if not options.quick:
        with FILE.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *kept])


if __name__ == "__main__":
    main()
