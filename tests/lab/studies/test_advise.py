"""`graticule.advise` chooses what the position of a frozen model should do at other sizes, by unlabeled images."""

import json
import re

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import stats
from transformers import PixioConfig, PixioModel

import graticule
from commands import refused, run_command
from graticule.lab.data.registry import load_dataset
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.advise import OWN, Advice, Scores, SizeAdvice, advise, build, distinct, size_options
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.loop import train
from in_turn import in_turn

SWIN = {"img_size": 32, "embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4, "in_chans": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe: Recipe = load_recipe("digits_quick").quick()
    return train(recipe, tmp_path_factory.mktemp("runs") / "run", progress=False)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Write two images of each of the embedded digits, in one folder per class."""
    images, info = load_dataset("digits", "test")
    folder, left = tmp_path_factory.mktemp("images"), dict.fromkeys(range(10), 2)
    for index in range(len(images)):
        image, label = images[index]
        if left[label]:
            left[label] -= 1
            (folder / info.class_names[label]).mkdir(exist_ok=True)
            image.save(folder / info.class_names[label] / f"{index}.png")
    return folder


def vit(encoding, **options):
    torch.manual_seed(0)
    return graticule.create_model("vit_nano_patch4_28", encoding=encoding, depth=2, num_classes=3, **options).eval()


def swin():
    torch.manual_seed(0)
    return graticule.create_model("swin_tiny_patch4_window7_224", num_classes=3, **SWIN).eval()


#: Encoding, or the model -> some of the options that differ from its own at twice its size, and one that is equal.
FROZEN = {
    "learnable(std=1.0)": ("bilinear", "area", "tiled", "not bicubic"),
    "learnable(std=1.0) + rope": ("bilinear", "scaling='interpolation'", "not crop"),
    "rope": ("scaling='interpolation'", "scaling='yarn'", "scaling='yarn', ramp=(0.25, 1.0)", "not scaling=None"),
    "rope(preset='dinov3')": ("not coordinates='min'",),
    "rope(coordinates='corners', base=30)": ("not coordinates='area'",),
    "rope(preset='eva02', reference=(7, 7))": ("scaling=None", "not scaling='interpolation'"),
    "rope(preset='eva02')": (),  # it is scaled at its own size, to 7 x 7 patches
    "rope_mixed": ("scaling='interpolation'", "not scaling=None"),
    "relative_bias(std=1.0)": ("clamped", "geometric(mode='linear')", "not bilinear(antialias=False)"),
    "swin": ("larger windows", "larger windows, clamped", "not larger windows, bicubic(antialias=False)"),
}


@in_turn("encoding", FROZEN)
def test_every_option_is_the_model_at_its_own_size_and_is_what_its_line_sets(encoding):
    model = swin() if encoding == "swin" else vit(encoding)
    home, size = model.img_size, tuple(2 * side for side in model.img_size)
    torch.manual_seed(1)
    small, large = torch.randn(2, 1, *home), torch.randn(2, 1, *size)
    with torch.no_grad():
        known, expected = model(small), model(large)
        at_home, options, tried = size_options(model, home), size_options(model, size), distinct(model, size)
        for name, changed in tried.items():
            torch.testing.assert_close(build(model, at_home[name])(small), known, rtol=0, atol=1e-5, msg=name)
            again = swin() if encoding == "swin" else vit(encoding)
            exec(options[name], {"model": again, "graticule": graticule})
            assert torch.equal(again(large), changed(large)), name
            assert (name == OWN) == torch.allclose(changed(large), expected, atol=1e-7), name
        assert torch.equal(model(large), expected)  # unchanged
    named = {name: name.removeprefix("not ") in tried for name in FROZEN[encoding]}
    assert named == {name: not name.startswith("not ") for name in named} and len(tried) > len(named) - 1


def test_losses_are_of_the_patches_without_position_and_changes_of_the_output():
    model, images = vit("learnable(std=1.0)"), torch.randn(12, 1, 28, 28)
    enlarged = F.interpolate(images, (40, 40), mode="bilinear", antialias=True)
    with torch.no_grad():
        probabilities = [model(x).softmax(-1) for x in (images, enlarged)]
        old, new = (model.forward_features(x)[:, 1:] for x in (images, enlarged))
    new = graticule.position.resampling.build_resampler("bilinear")(new.mT.unflatten(2, (10, 10)), (7, 7)).flatten(2).mT
    content = [tokens - tokens.mean(0) for tokens in (old, new)]
    scores = advise(model, images, [(40, 40)]).sizes[40, 40].scores[OWN]
    assert scores.loss == pytest.approx((1 - F.cosine_similarity(*(x.flatten(1) for x in content))).tolist(), abs=1e-5)
    difference = (probabilities[0] - probabilities[1]).abs().sum(-1) / 2
    assert scores.change == pytest.approx(float(difference.mean()), abs=1e-5)
    model.reset_classifier(0)
    encoder = advise(model, images, [(40, 40)]).sizes[40, 40].scores[OWN]
    change = 1 - F.cosine_similarity(*(x.mean(1) for x in content))
    assert encoder.change == pytest.approx(float(change.mean()), abs=1e-5) and encoder.loss == scores.loss


def advice(**losses):
    scores = {name: Scores(loss, sum(loss) / len(loss)) for name, loss in losses.items()}
    scores[OWN] = scores.pop("own")
    return SizeAdvice(scores, {"other": "graticule.resize(...)"})


def test_an_option_is_chosen_if_it_is_better_beyond_chance_and_else_the_model_stays_as_it_is():
    own = [0.23, 0.24, 0.25, 0.26, 0.23, 0.24, 0.25, 0.26, 0.23, 0.24]
    other = [value - 0.2 - 0.01 * (index % 2) for index, value in enumerate(own)]
    better = advice(own=own, other=other)
    assert better.chosen == "other" and better.tests["other"][0].value == pytest.approx(0.205)
    assert better.tests["other"][1] == pytest.approx(2 / 2**10, abs=1e-3)  # all signs equal, of all that there are
    assert better.lines() == ["other, 4 % of the output changes", "graticule.resize(...)"]
    noisy = advice(own=own, other=[value + 0.2 * (-1) ** index - 0.02 for index, value in enumerate(own)])
    assert noisy.chosen == OWN and "no difference found, so leave the model as it is" in noisy.lines()[0]
    assert noisy.lines()[1] == "nothing here keeps the features: fine-tune at this size"
    worse = advice(own=own, other=[value + 0.2 for value in own])
    assert worse.chosen == OWN and "24 % of the output changes; nothing else is better" in worse.lines()[0]
    slightly = advice(own=own, other=[value - 0.0001 - 0.00001 * (index % 2) for index, value in enumerate(own)])
    assert slightly.chosen == OWN and slightly.tests["other"][1] < 0.01  # printed as 0.0
    alone = advice(own=own)
    assert alone.chosen == OWN and "24 % of the output changes; there is nothing to choose" in alone.lines()[0]
    text = str(Advice((28, 28), {(40, 40): better}))
    assert re.search(r"^40 x 40 +other +3\.\d .*\] +20\.5 \[\d+\.\d, \d+\.\d\]\*", text, re.MULTILINE)


def test_p_is_corrected_for_the_options_and_equal_ones_count_once():
    generator = np.random.default_rng(0)
    own = generator.normal(size=(1, 30)) + 1
    gains = generator.normal(0.4, 1, size=(8, 30))

    def least(values):
        return advice(own=own[0].tolist(), **{f"{i}": (own[0] - x).tolist() for i, x in enumerate(values)}).tests["0"][
            1
        ]

    alone, copies, several = least(gains[:1]), least(gains[[0] * 8]), least(gains)
    assert alone == copies and several > 2 * alone
    assert alone == pytest.approx(stats.ttest_1samp(gains[0], 0).pvalue, abs=0.02)


def test_a_run_is_advised_on_digits(capsys, run, digits, tmp_path):
    code, out, err = run_command(
        capsys, "advise", run.folder, "--images", digits, "--sizes", 20, "20x40", "--output", tmp_path
    )
    assert code == 0 and not err, err  # no bar without a terminal
    assert "20 images against the same at 28 x 28" in out
    assert re.search(r"^20 x 40: .* % of the output changes", out, re.MULTILINE)
    record = json.loads((tmp_path / "advice.json").read_text())
    assert record["img_size"] == [28, 28] and len(record["sizes"]["(20, 40)"]["scores"]["area"]["loss"]) == 20


def test_models_of_other_libraries_are_advised(capsys, digits, tmp_path):
    (tmp_path / "small.py").write_text(
        "import timm\nstock = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, depth=1)\n"
    )
    arguments = ["--images", digits, "--sizes", 40, "--output", tmp_path]
    code, out, err = run_command(capsys, "advise", f"{tmp_path}/small.py:stock", *arguments)
    assert code == 0 and "20 images against the same at 32 x 32" in out, err
    stock = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
    found = advise(stock, torch.randn(10, 3, 32, 32), [(40, 40)])
    assert found.sizes[40, 40].python["area"].startswith("model = graticule.convert(model)\ngraticule.resize(model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    pixio = PixioModel(PixioConfig(image_size=28, patch_size=4, num_channels=1, **sizes)).eval()
    torch.nn.init.normal_(pixio.embeddings.position_embeddings)
    scores = advise(pixio, torch.randn(10, 1, 28, 28), [(40, 40)]).sizes[40, 40].scores
    assert scores["bilinear"].loss != pytest.approx(scores[OWN].loss, abs=1e-4)
    # it resamples its own table like this
    assert scores["bicubic(antialias=False)"].loss == pytest.approx(scores[OWN].loss, abs=1e-5)


def test_invalid_sizes_and_images_are_refused_and_one_way_to_compute_is_no_choice(capsys, run, digits, tmp_path):
    model = ["vit_nano_patch4_28", "--images", digits]
    (tmp_path / "three").mkdir()
    for index in range(3):
        Image.new("L", (28, 28), index).save(tmp_path / "three" / f"{index}.png")
    wrong = [
        (model, "`sizes` must be one or more different sizes other than that of the model, 28 x 28, got none"),
        ([*model, "--sizes", 28], "`sizes` must be one or more different sizes"),
        ([*model, "--sizes", 41], "the nearest sizes are 40 and 44"),
        ([*model, "--sizes", 40, "--count", 3], "`count` must be at least 10"),
        ([model[0], "--images", tmp_path / "none", "--sizes", 40], "`images` must be a folder"),
        ([model[0], "--images", tmp_path / "three", "--sizes", 40], "`images` must be at least 10, got 3"),
        ([*model, "--size", 40], "did you mean --sizes?"),
        (["vit_nano", "--images", digits, "--sizes", 40], "vit_nano_patch4_28"),
    ]
    for arguments, why in wrong:
        assert why in refused(capsys, "advise", *arguments)
    for encoding in ("none", "sinusoidal_2d", "rope(preset='dinov3')"):  # computed in one way, on squares
        parts = advise(vit(encoding), torch.randn(10, 1, 28, 28), [(40, 40)]).sizes[40, 40]
        assert [*parts.scores] == [OWN] and "there is nothing to choose" in parts.lines()[0]
    with pytest.raises(ValueError, match=r"`images` must be preprocessed images .* with B at least 10, got"):
        advise(vit("rope"), torch.randn(3, 1, 28, 28), [(40, 40)])
    with pytest.raises(ValueError, match=r"call graticule\.unfold"):
        advise(graticule.fold(vit("rope")), torch.randn(10, 1, 28, 28), [(40, 40)])
