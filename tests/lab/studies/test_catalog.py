"""The catalog that `graticule models` prints matches the registries and the models."""

import json

import pytest

import graticule
from commands import run_command
from evidence.names import catalog_text
from graticule.backbones.registry import backbone_of
from graticule.lab.studies import catalog as module
from graticule.registry import plugins
from tiny import without_memory

KEPT = json.loads(module.FILE.read_text(encoding="utf-8"))


def test_the_catalog_file_equals_the_registries():
    assert module.build_catalog(KEPT) == KEPT, "run: python -m evidence.names"
    assert catalog_text(KEPT) == module.FILE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_smallest_model_of_every_backbone_has_the_size_that_is_kept():
    smallest = {}
    for name in sorted(KEPT["models"], key=lambda name: -KEPT["models"][name]["parameters"]):
        smallest[backbone_of(name)] = name
    assert len(smallest) >= 8
    for name in smallest.values():
        with without_memory():
            found = module.measure(name)
        assert found == KEPT["models"][name], f"{name}: run python -m evidence.names"


def test_multiply_adds_of_a_vit_by_hand():
    # ViT-Ti: 196 patches of 16 x 16 x 3; per block 12 d^2 per token in linear layers, 2 N^2 d in attention; the head
    dim, tokens, patches = 192, 197, 196
    expected = patches * 768 * dim + 12 * (12 * tokens * dim**2 + 2 * tokens**2 * dim) + dim * 1000
    assert KEPT["models"]["vit_tiny_patch16_224"]["multiply_adds"] == expected


@pytest.mark.parametrize("pattern", ["*", "lm_nano"])
def test_models_of_the_package_are_listed_without_building_one(capsys, monkeypatch, pattern):
    monkeypatch.setattr(plugins, "_registered", {})  # those of other tests
    monkeypatch.setattr(module, "build_catalog", None)
    code, out, _ = run_command(capsys, "models", pattern)
    assert code == 0 and "lm_nano " in out and ("posmlp_nano_32 " in out) == (pattern == "*")


def test_a_model_of_a_plugin_is_measured_without_memory_and_listed(capsys, my_methods, monkeypatch):
    built = []
    create = graticule.create_model

    def remembering(*arguments, **options):
        built.append(create(*arguments, **options))
        return built[-1]

    monkeypatch.setattr(graticule, "create_model", remembering)
    code, out, _ = run_command(capsys, "models", "convolutional*")
    assert code == 0 and out.splitlines()[2].startswith("convolutional_vit ")
    for kind, name in (
        ("encodings", "random_fourier"),
        ("joinings", "decayed"),
        ("resamplers", "nearest"),
        ("tasks", "slant"),
    ):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{kind} ")]
        assert name in line
    (model,) = built  # all others are in the file
    assert all(parameter.is_meta for parameter in model.parameters())
