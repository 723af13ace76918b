"""Parameters of the full-size models, compared with references and papers without initializing weights."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from in_turn import in_turn
from tiny import count, full_size, spec

FACTS = json.loads((Path(__file__).parents[1] / "parity" / "golden" / "facts.json").read_text())
FIGURES = yaml.safe_load((Path(__file__).parents[1] / "parity" / "golden" / "figures.yaml").read_text())["cpvt"]
TABLE = 197 * 192  # of DeiT-Ti at 224 pixels


@in_turn("row", [row for row in FACTS if row.startswith(("deit", "pvt"))])
def test_the_model_has_the_parameters_of_the_reference(row):
    name, _, joining = row.partition(".")
    model = full_size(name, joining=joining or "default")
    assert count(model) == FACTS[row]["parameters"]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == FACTS[row]["trainable"]


@in_turn(
    ("encoding", "joining", "parameters", "rounded"),
    [
        ("learnable", "default", TABLE, "38K"),
        ("learnable", "shared", TABLE, "38K"),
        ("learnable", "unshared", 12 * TABLE, "454K"),
        ("learnable", "lape", TABLE + 12 * 2 * 192, "42K"),
        ("learnable", "lape_sharing", TABLE + 12 * 2 * 192, "42K"),
        ("sinusoidal_1d", "default", TABLE, "38K"),
        ("sinusoidal_2d", "lape", TABLE + 12 * 2 * 192, "42K"),
        ("relative_bias", "default", 12 * 27 * 27 * 3, "26K"),  # of the code; the table prints 3049K
        ("relative_bias", "lape", 12 * (27 * 27 * 3 + 2 * 196), "31K"),
    ],
)
def test_parameters_of_position_are_those_of_lapes_table_7_or_of_its_code(encoding, joining, parameters, rounded):
    position = full_size("deit_tiny_patch16_224", encoding=encoding, joining=joining).position
    assert count(position) == parameters and f"{round(parameters / 1000)}K" == rounded


@in_turn("row", [row for row, sizes in FIGURES["pyramid_table13"].items() if row.startswith("pvt") and "cls" in sizes])
def test_a_pyramid_has_the_parameters_of_cpvts_table_13(row):
    """Rounded to millions; PVT-Small's 24.5 and 24.1 M are printed as 25."""
    printed = FIGURES["pyramid_table13"][row]["cls"][0]
    assert abs(count(full_size(row)) / 1e6 - printed) < 1


def test_one_peg_has_the_parameters_of_cpvts_table_16_without_bias_and_of_table_8_with_it():
    plain = full_size("cpvt_tiny_patch16_224", encoding="peg(bias=False)")
    without = count(plain)
    assert count(plain.position) == 192 * 9 == 1728
    assert without == FIGURES["params_exact"]["cpvt_tiny_peg0_without_bias"] == 5_681_320
    model = full_size("cpvt_tiny_patch16_224")
    assert count(model) == without + 192 == 5_681_512 and count(model.position) == 192 * 9 + 192 == 1920
    projection = full_size("cpvt_tiny_patch16_224", encoding="convolutional_projection")
    assert count(projection.position) == 3 * 1920  # table 16
    deit = full_size("deit_tiny_patch16_224", encoding="convolutional_projection")
    assert count(deit) == FIGURES["params_exact"]["deit_plus_convolutional_projection"] == 5_685_352


def test_le_and_rpe_have_the_positional_parameters_of_cpvts_table_8():
    """With one table for all layers; one per layer, as in Swin, would be 64,068."""
    shared = full_size("deit_tiny_patch16_224", encoding="learnable+shared_relative_bias")
    assert count(shared.position) == TABLE + 3 * 27 * 27 == 40_011
    every = full_size("deit_tiny_patch16_224", encoding="learnable+relative_bias")
    assert count(every.position) == TABLE + 12 * 3 * 27 * 27 == 64_068


def test_swin_with_peg_has_its_bias_tables_or_not_which_cpvts_table_15_does_not_tell():
    name = "swin_tiny_peg_patch4_window7_224"
    full, removed, plain = (full_size(name, **k) for k in ({}, {"encoding": "peg"}, {"encoding": "relative_bias"}))
    pegs = 10 * (96 + 192 + 384 + 768)
    tables = 13 * 13 * (2 * 3 + 2 * 6 + 6 * 12 + 2 * 24)
    assert count(full) - count(plain) == pegs and count(full) - count(removed) == tables == 23_322
    assert FIGURES["pyramid_table13"]["swin_tiny_peg_gap"]["cls"][0] == 29
    assert {round(count(model) / 1e6, 1) for model in (full, removed, plain)} == {28.3}


def millions(name, **peg):
    """Return the parameters in millions, to one decimal, as printed."""
    return round(count(full_size(name, encoding=spec("peg", **peg))) / 1e6, 1)


@pytest.mark.parametrize(
    ("size", "printed", "told"), [("tiny", (5.9, 6.1), (5.69, 5.70)), ("small", (22.9, 23.8), (21.99, 22.02))]
)
def test_cpvts_table_12_has_separable_pegs_at_6_and_12_places(size, printed, told):
    """Not depth-wise ones at 5 and 11, as its text says, which would be `told`."""
    name = f"cpvt_{size}_patch16_224"
    assert tuple(millions(name, convolution="separable", places=[*range(places)]) for places in (6, 12)) == printed
    counts = [count(full_size(name, encoding=spec("peg", places=[*range(places)]))) for places in (5, 11)]
    assert tuple(round(n / 1e6, 2) for n in counts) == told
    assert all(round(n / 1e6, 1) != printed_count for n, printed_count in zip(counts, printed, strict=True))


def test_the_6_13_millions_of_cpvts_table_5_are_those_of_two_models():
    """Twelve separable 1 x 1 PEGs, or one stack of twelve dense 1 x 1 convolutions, batch norms and ReLUs."""
    places = {"convolution": "separable", "kernel": 1, "places": [*range(12)]}
    stack = {"convolution": "dense", "kernel": 1, "layers": 12}
    counts = {count(full_size("cpvt_tiny_patch16_224", encoding=spec("peg", **form))) for form in (places, stack)}
    assert counts == {5_679_592 + 12 * 192 * (192 + 3)} and round(counts.pop() / 1e6, 2) == 6.13


def test_four_separable_layers_have_more_than_the_960_parameters_of_cpvts_section_4_4_on_top_of_a_table():
    """One has: 38,592 (printed as 38,952) - 192 * 14 * 14 = 960."""
    form = {"convolution": "separable", "bias": False}
    single = count(full_size("cpvt_tiny_patch16_224", encoding=spec("peg", **form)).position)
    assert single == 192 * 192 + 9 * 192 == 38_592 and single - 192 * 14 * 14 == 960
    four = full_size("cpvt_tiny_patch16_224", encoding=spec("peg", **form, layers=4)).position
    convolutions = sum(count(module) for module in four.modules() if isinstance(module, torch.nn.Conv2d))
    assert convolutions == 4 * single == 154_368


def test_no_cpvt_base_of_cpvt_has_the_88_millions_of_its_table_4():
    assert FIGURES["params"]["cpvt_base"] == 88
    forms = [("", {}), ("", {"places": [0, 1, 2, 3, 4]}), ("_gap", {"places": [0, 1, 2, 3, 4]})]
    forms += [("", {"places": [*range(n)], "convolution": "separable"}) for n in (5, 6)]
    sizes = [millions(f"cpvt_base{gap}_patch16_224", **form) for gap, form in forms]
    assert sizes == [86.4, 86.5, 86.5, 89.4, 90.0]


def test_a_kernel_of_27_before_the_first_block_comes_to_the_5_8_millions_of_cpvts_table_6():
    assert millions("cpvt_tiny_patch16_224", kernel=27, places=-1) == 5.8
    assert millions("cpvt_tiny_patch16_224", kernel=3, places=-1) == 5.7


@in_turn("row", FIGURES["architecture_table9"])
@in_turn("gap", ["", "_gap"])
def test_a_cpvt_has_the_sizes_of_table_9(row, gap):
    sizes = FIGURES["architecture_table9"][row]
    model = full_size(f"{row}{gap}_patch16_224")
    assert (model.embed_dim, len(model.blocks)) == (sizes["dim"], sizes["layers"])
    assert {block.attn.num_heads for block in model.blocks} == {sizes["heads"]}


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_a_cpvt_is_deit_with_a_convolution_instead_of_the_table(size):
    deit = FACTS[f"deit_{size}_patch16_224.default"]["parameters"]
    model = full_size(f"cpvt_{size}_patch16_224")
    assert count(model) == deit - 197 * model.embed_dim + 10 * model.embed_dim
    assert count(full_size(f"cpvt_{size}_gap_patch16_224")) == count(model) - model.embed_dim


@pytest.mark.parametrize("size", ["tiny", "small", "medium"])
def test_forms_of_a_pyramid_differ_by_tables_pegs_and_class_token_alone(size):
    plain, peg, gap, both = (count(full_size(f"pvt_{size}{form}")) for form in ("", "_peg", "_gap", "_peg_gap"))
    dims = (64, 128, 320, 512)
    grids = (56 * 56, 28 * 28, 14 * 14, 7 * 7)
    tables = sum(dim * patches for dim, patches in zip(dims, grids, strict=True))
    assert plain - gap == 2 * 512  # the token and its row of the table
    assert gap - both == tables - 10 * sum(dims) and peg - both == 512
