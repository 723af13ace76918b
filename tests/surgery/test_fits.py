"""A new position is fitted to the old one: constructed cases are recovered exactly, and the report says so."""

import copy
import json
import re
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import graticule
import graticule.encodings.sinusoidal
from graticule import Grid
from graticule.encodings.factorized import Factorized
from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.joining import TableScale
from graticule.position.position import ENCODINGS
from graticule.surgery.change import change_position
from graticule.surgery.fits.biases import displacement_means
from graticule.surgery.fits.contributions import is_pre_norm, table_contributions
from graticule.surgery.fits.registry import Before
from graticule.surgery.fits.tables import factorize, fit_norm
from in_turn import in_turn
from tiny import DIM, SIZE, assert_same, build, draw, images, tiny

GRID = Grid(3, 5)


@pytest.fixture
def model():
    """Build a ViT on 3 x 5 patches with all weights drawn, in float64."""
    return draw(tiny(img_size=(24, 40))).double().eval()


@pytest.fixture
def x():
    return images(24, 40, dtype=torch.float64)


def kept(model):
    """Return the kept shares of the old position, in order of the layers."""
    return [share.kept for share in model.certificate.shares]


def assert_exact(model, old, x):
    """Check that nothing was lost."""
    assert kept(model) == pytest.approx([1.0] * len(kept(model)), abs=1e-9)
    assert all(fit.fitted for fit in model.certificate.fits)
    assert_same(model(x), old, atol=1e-9)
    assert max(drift.error for drift in model.certificate.drift) < 1e-9


# Exact: positions that the new one can express are recovered


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("sinusoidal_2d", "default"), ("learnable", "default")),
        (("learnable", "default"), ("learnable", "unshared")),
        (("learnable", "default"), ("learnable", "concatenation")),
        (("learnable", "concatenation"), ("learnable", "default")),
        (("learnable", "concatenation"), ("learnable", "concatenation")),
        (("learnable", "default"), ("learnable + relative_bias", "default")),
        (("learnable", "default"), ("learnable + peg", "default")),
        (("mlp_bias", "default"), ("relative_bias", "default")),
        (("sandwich", "default"), ("mirrored_bias", "default")),
        (("mirrored_bias", "default"), ("relative_bias", "default")),
        (("sinusoidal_2d", "default"), ("sinusoidal_2d", "concatenation")),
        (("shared_relative_bias", "default"), ("relative_bias", "default")),
        (("learnable", "lape"), ("learnable", "lape")),
        (("mlp_bias", "default"), ("mlp_bias", "default")),
    ],
    ids=lambda pair: ", ".join(pair),
)
@torch.no_grad()
def test_a_position_that_the_new_one_can_express_is_recovered(old, new, x):
    model = draw(tiny(*old, img_size=(24, 40))).double().eval()
    before = model(x)
    assert_exact(change_position(model, *new, images=x), before, x)


@torch.no_grad()
def test_a_table_of_rows_and_columns_is_factorized_exactly():
    for product in (False, True):
        planted = draw(Factorized(Grid(3, 5), 4, product=product)).double()
        new = Factorized(Grid(3, 5), 4, product=product).double()
        assert factorize(planted, new, Before(GRID, [], [], planted(GRID)))
        assert_same(new(GRID), planted(GRID), atol=1e-9)


@torch.no_grad()
def test_the_residual_of_a_factorization_has_mean_zero_in_rows_and_columns():
    table = torch.randn(3, 5, 4, dtype=torch.float64)
    new = Factorized(Grid(3, 5), 4).double()
    factorize(new, new, Before(GRID, [], [], table.flatten(0, 1)))
    rest = table - new(GRID).unflatten(0, (3, 5))
    assert rest.mean(0).abs().max() < 1e-12 and rest.mean(1).abs().max() < 1e-12


@torch.no_grad()
def test_lape_has_exactly_the_contribution_of_a_table_alone_in_the_residual_stream(model, x):
    """Without content the layer receives LN(w) instead of LN(0): LaPE's norms have the same scale and shift."""
    for parameter in model.patch_embed.parameters():
        parameter.zero_()
    model.cls_token.zero_()
    change_position(model, "learnable", "lape(layers=1)", images=x)
    assert kept(model)[0] == pytest.approx(1, abs=1e-9)
    weight = model.position.joining.norms.get_submodule("0").weight
    assert_same(weight, model.blocks[0].norm1.weight, atol=1e-6)


@torch.no_grad()
def test_logits_that_depend_on_the_displacement_alone_become_a_bias(x):
    """Rows (cos, sin) of the column, with equal projections to queries and keys, have logits cos(dx)."""
    model = draw(tiny(img_size=(24, 40), depth=1, num_heads=1, class_token=False, global_pool="avg")).double().eval()
    for parameter in (*model.patch_embed.parameters(), model.blocks[0].attn.qkv.bias, model.blocks[0].norm1.bias):
        parameter.zero_()
    dx = GRID.coordinates()[:, 1].double()
    table = torch.zeros(1, 15, DIM, dtype=torch.float64)
    table[0, :, :4] = torch.stack([dx.cos(), -dx.cos(), dx.sin(), -dx.sin()], -1)  # of mean 0 and constant norm
    model.position.encodings[0].pos_embed.copy_(table)
    identity = torch.eye(DIM, dtype=torch.float64)
    model.blocks[0].norm1.weight.fill_(1.0)
    model.blocks[0].attn.qkv.weight.copy_(torch.cat([identity, identity, identity]))
    change_position(model, "relative_bias", images=x)
    assert kept(model) == pytest.approx([1.0], abs=1e-9)
    bias = model.position(model.grid)[0].bias[0]
    # LN makes the squared norm of a row D, up to its eps
    assert_same(bias, DIM**0.5 * (dx[:, None] - dx).cos(), atol=1e-4)


# Least squares: the closest solution


@pytest.mark.parametrize("mirrored", [False, True])
@torch.no_grad()
def test_the_mean_over_pairs_of_a_displacement_is_the_nearest_bias(mirrored):
    logits = torch.randn(2, 15, 15, dtype=torch.float64)
    table = displacement_means(logits, GRID, mirrored)
    index = ((GRID.offsets().abs() @ torch.tensor([5, 1])) if mirrored else GRID.offset_index()).flatten()
    design = F.one_hot(index).double()
    torch.testing.assert_close(table, torch.linalg.lstsq(design, logits.flatten(1).T).solution)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4),
        TableScale(4),
        TableScale(1),
        TableScale(4, shift=True),
        nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), TableScale(4)),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_the_parameters_of_a_norm_are_at_the_minimum(norm):
    norm = norm.double()
    table, target = torch.randn(2, 15, 4, dtype=torch.float64)
    with torch.no_grad():
        fit_norm(norm, table, target)
    (norm(table) - target).square().sum().backward()
    assert all(parameter.grad.abs().max() < 1e-9 for parameter in norm.parameters())


@torch.no_grad()
def test_queries_and_keys_get_the_mean_contribution_of_the_table(model, x):
    means = [contribution.mean for contribution in table_contributions(model, x)]
    change_position(model, "learnable", "queries_keys", images=x)
    mean = torch.stack(means).mean(0)
    torch.testing.assert_close(model.position.encodings[0].pos_embed[0], mean)


@torch.no_grad()
def test_a_shared_table_is_scaled_so_that_the_stream_has_it_once_on_average(model, x):
    """With 3 layers n = 1, 2, 3: c = 6 / 14, and 1 - (n c - 1)^2 is kept."""
    table = model.position.encodings[0].pos_embed.clone()
    change_position(model, "learnable", "shared")
    torch.testing.assert_close(model.position.encodings[0].pos_embed, table * 6 / 14)
    assert kept(model) == pytest.approx([1 - (n * 6 / 14 - 1) ** 2 for n in (1, 2, 3)])


@torch.no_grad()
def test_a_contribution_is_the_difference_that_the_table_makes_to_the_norm(model, x):
    table = model.position.encodings[0].pos_embed[0].clone()
    first = table_contributions(model, x)[0]
    stream = model.embed(x) + table
    difference = model.blocks[0].norm1(stream) - model.blocks[0].norm1(stream - table)
    torch.testing.assert_close(first.mean, difference.mean(0))
    assert first.square == pytest.approx(float(difference.square().sum() / len(x)))
    constant = torch.randn_like(first.mean)
    lost = (difference - constant).square().sum() / difference.square().sum()
    assert first.kept(constant) == pytest.approx(1 - float(lost))
    assert all(first.kept(first.mean) >= first.kept(first.mean + 0.1 * torch.randn_like(constant)) for _ in range(5))


@torch.no_grad()
def test_blocks_with_norms_before_their_branches_are_measured_in_every_family():
    for family, measured in {"ViT, DeiT": True, "CeiT": True, "ViT-Lite": False}.items():
        model = build(family, "learnable").eval()
        contributions = table_contributions(model, torch.randn(2, model.in_chans, *model.img_size))
        assert [contribution is not None for contribution in contributions] == [measured] * model.depths[0], family
    for block, pre_norm in (("post_norm", False), ("parallel", False), ("pre_norm", True)):
        assert is_pre_norm(tiny(block_layer=block).blocks[0]) == pre_norm
    assert not is_pre_norm(nn.Linear(1, 1))


# The report


@torch.no_grad()
def test_the_report_states_fits_shares_and_drift(model, x):
    report = change_position(model, "learnable", "lape(layers=2)", images=x).certificate
    text = str(report)
    assert "Learnable, Default -> Learnable, Lape: fitted" in text and "table after the norm" in text
    record = json.loads(report.to_json())
    assert [row["layer"] for row in record["shares"]] == [row["layer"] for row in record["drift"]] == [0, 1, 2]
    assert record["shares"][2] == {"layer": 2, "term": "table", "kept": 0.0}  # it is not joined
    assert record["drift"][0]["error"] > 0 and 0.5 < record["drift"][0]["cosine"] < 1


@torch.no_grad()
def test_without_a_fit_the_report_says_so_and_without_images_it_has_no_drift(model):
    report = change_position(model, "shaw").certificate
    assert [(fit.fitted, fit.why) for fit in report.fits] == [(False, "")]
    assert ": not fitted, as initialized" in str(report) and not report.drift
    assert {share.kept for share in report.shares} == {None}


@torch.no_grad()
def test_stages_of_a_pyramid_are_fitted_one_by_one():
    model = graticule.create_model(
        "swinv2_tiny_window8_256", img_size=32, embed_dim=8, depths=(2, 1), num_heads=(1, 2), window_size=4
    )
    draw(model).double().eval()
    x = images(32, 32, dtype=torch.float64)
    before = model(x)
    assert_exact(change_position(model, "relative_bias", images=x), before, x)
    assert [fit.stage for fit in model.certificate.fits] == [0, 1]
    assert [share.layer for share in model.certificate.shares] == [0, 1, 2]


@torch.no_grad()
def test_positions_of_windows_are_fitted_beside_those_of_all_tokens():
    model = draw(build("SAM", "learnable + alibi")).double().eval()
    x = images(*model.img_size, dtype=torch.float64)
    before = model(x)
    assert_exact(change_position(model, "learnable + relative_bias", images=x), before, x)
    biases = [share.term for share in model.certificate.shares].count("bias")
    assert biases == sum(model.depths)
    table = change_position(model, "learnable").certificate  # without the bias, the table is removed from its sum
    assert [fit.fitted for fit in table.fits] == [True] and kept(model).count(1.0) == len(kept(model)) - biases


@torch.no_grad()
def test_a_model_of_timm_is_converted_with_a_certificate(x):
    stock = draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "img_size": (24, 40)})).double().eval()
    model = graticule.convert(stock, joining="lape", images=x)
    assert len(model.certificate.drift) == 3 and all(share.kept > 0 for share in model.certificate.shares)
    with pytest.raises(ValueError, match="`images` must be left out where the position of the model stays"):
        graticule.convert(stock, images=x)


def test_the_code_of_the_guide_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python certificate\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "convert.md", "exec"), {})
    assert "Learnable, Default -> Learnable, Lape: fitted" in capsys.readouterr().out


REFUSED = {
    **{
        f"images of {shape}": (("rope", "default"), torch.zeros(shape), "(B, 3, 24, 40), of the size of the model, got")
        for shape in ((2, 3, 32, 32), (3, 24, 40), (0, 3, 24, 40))
    },
    "bytes": (("rope", "default"), torch.zeros(2, 3, 24, 40).byte(), "must be preprocessed as for the model, in float"),
    "NaN": (("rope", "default"), torch.full((2, 3, 24, 40), torch.nan), "`images` must be finite, got"),
    "sum": (("learnable + sinusoidal_2d", "default"), None, "`encoding` must"),
}


@in_turn("name", REFUSED)
def test_what_cannot_be_changed_is_refused_before_anything_changes(name):
    model = draw(tiny(img_size=(24, 40))).double().eval()
    (encoding, joining), wrong, message = REFUSED[name]
    position = model.position
    with pytest.raises(ValueError) as refusal:
        change_position(model, encoding, joining, images=wrong)
    assert message in str(refusal.value) and model.position is position and model.certificate is None


def test_a_model_of_another_library_is_refused_and_the_message_names_convert():
    with pytest.raises(ValueError, match=r"one of our backbones, got VisionTransformer; graticule\.convert makes"):
        change_position(timm.create_model("vit_tiny_patch16_224", depth=1), "learnable", "lape")
    with pytest.raises(ValueError, match=r"one of ours already; graticule\.change_position gives"):
        graticule.convert(graticule.create_model("vit_nano_patch4_28", depth=1), joining="lape")


# From LaPE, and to fixed biases


@torch.no_grad()
def test_a_table_after_norms_is_not_compared_with_one_in_the_residual_stream(model, x):
    change_position(model, "learnable", "lape", images=x)
    change_position(model, "learnable", images=x)
    assert [fit.fitted for fit in model.certificate.fits] == [False]
    assert {(share.term, share.kept) for share in model.certificate.shares} == {("after_norm, from the stream", None)}
    assert model(x).isfinite().all()


def is_fixed(encoding):
    """Return whether a bias has no parameters."""
    return not list(graticule.build_position(GRID, dim=DIM, depth=1, num_heads=3, encoding=encoding).parameters())


FIXED = [name for name, kind in ENCODINGS.items() if issubclass(kind, BiasEncoding) and is_fixed(name)]


@pytest.mark.parametrize("encoding", FIXED)
@torch.no_grad()
def test_a_fixed_bias_is_kept_and_has_no_parameters_to_fit(encoding, x):
    model = draw(tiny(encoding, img_size=(24, 40))).double().eval()
    before = model(x)
    change_position(change_position(model, "relative_bias", images=x), encoding, images=x)
    assert kept(model) == pytest.approx([1.0] * 3, abs=1e-9)
    assert "not fitted, as it has no parameters to fit" in str(model.certificate)
    assert_same(model(x), before, atol=1e-9)


@torch.no_grad()
def test_a_fixed_table_is_harmful_unless_its_projection_or_norms_are_fitted(model, x):
    target = model.position(model.grid)[0].added_to_stream.clone()
    plain, projected, normed = (copy.deepcopy(model) for _ in range(3))
    change_position(plain, "sinusoidal_2d", images=x)
    assert plain.certificate.harmful == [0, 1, 2] and plain.certificate.lost
    assert "not fitted, as its table is fixed; the joinings concatenation and lape" in str(plain.certificate)
    for changed, joining in ((projected, "concatenation"), (normed, "lape")):
        change_position(changed, "sinusoidal_2d", joining, images=x)
        assert changed.certificate.fits[0].fitted and not changed.certificate.harmful
    # least squares: what is missing is orthogonal to every channel of the table
    table = projected.position.encodings[0](model.grid)
    missing = target - projected.position(model.grid)[0].added_to_stream
    assert_same(table.T @ missing, torch.zeros(DIM, DIM).double(), atol=1e-9)


@torch.no_grad()
def test_a_model_in_training_mode_is_fitted_as_in_evaluation_mode_and_stays_in_it(x):
    models = [draw(tiny(img_size=(24, 40), drop_rate=0.5, proj_drop_rate=0.5)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for part, mode in zip(models, (True, False), strict=True):
        change_position(part.train(mode), "learnable", "lape", images=x)
        assert part.training is mode
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name])


@pytest.mark.parametrize("least", [0.0, 0.9])
def test_a_position_that_keeps_too_little_is_refused_and_the_model_is_unchanged(model, x, least):
    """A fixed table of sines is farther from the old one than none; a fitted bias keeps a part."""
    encoding = "sinusoidal_2d" if least == 0 else "relative_bias"
    with torch.no_grad():
        model.position.encodings[0].pos_embed.mul_(0.2)
    before, created = {name: value.clone() for name, value in model.state_dict().items()}, model.created
    with pytest.raises(
        ValueError, match=f"must keep at least {least} of the old position, got {encoding}, which keeps"
    ):
        change_position(model, encoding, images=x, least=least)
    assert model.created == created and before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    change_position(model, encoding, images=x)
    assert model.certificate.kept < least
