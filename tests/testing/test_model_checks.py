"""Planted faults in position code: each is found by its check, and correct models pass."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

import graticule
from commands import run_command
from graticule.testing.methods import check_model
from graticule.testing.model_under_test import ModelUnderTest
from graticule.testing.models import CHECKS, inspect_model, sizes
from graticule.testing.order import roughness
from tiny import build

PROCESS_WIDE: dict[object, Tensor] = {}


class Small(nn.Module):
    """One layer of attention with a class token, any size in a forward pass, and one of many faults.

    Args:
        position: 'table' (learned, resampled), 'fixed' (sines), 'bias' (a table of displacements) or 'rope'.
        fault: name of the fault; none by default.
    """

    def __init__(self, position: str = "rope", fault: str = "") -> None:
        super().__init__()
        self.position, self.fault, self.img_size, self.patch_size = position, fault, (12, 20), (4, 4)
        self.dim, self.heads = 32, 2
        self.patch_embed = nn.Conv2d(3, self.dim, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.dim))
        self.norm, self.qkv = nn.LayerNorm(self.dim), nn.Linear(self.dim, 3 * self.dim)
        self.last, self.head = nn.LayerNorm(self.dim), nn.Linear(self.dim, 5)
        if position == "table":
            self.pos_embed = nn.Parameter(torch.randn(1, 16, self.dim) * 0.02)
        if position == "bias":
            self.rel_table = nn.Parameter(torch.randn(self.heads, 41 * 41) * 0.02)
        self.tables: dict[object, Tensor] = {}

    def angles(self, grid: tuple[int, int], x: Tensor) -> Tensor:
        """Return the angle of each patch and frequency, (N, frequencies)."""
        height, width = grid
        if self.fault == "swapped grid":
            height, width = width, height
        y, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        if self.fault == "swapped flattening":
            y, xs = y.T, xs.T
        place = torch.stack([y.flatten(), xs.flatten()], -1).to(x.device)
        low = self.fault == "low precision" and torch.is_autocast_enabled("cpu")
        kind = torch.bfloat16 if low else torch.promote_types(x.dtype, torch.float32)
        omega = (100.0 ** -(torch.arange(self.dim // self.heads // 4) / 4)).to(x.device, kind)
        place = place.to(kind)
        if self.fault == "one axis relative":
            place = place / torch.tensor([1.0, width / 5], dtype=kind)
        if self.fault == "normalized by the width":
            place = 5 * place / torch.tensor([height, width], dtype=kind)
            place = place * torch.tensor([1.0, height / width], dtype=kind)
        return (place[..., None] * omega).flatten(1)

    def embed(self, grid: tuple[int, int], x: Tensor) -> Tensor:
        """Return sines and cosines of the angles, interleaved, (N, 2d)."""
        key: object = {"cache of patches": grid[0] * grid[1], "cache of one size": 0}.get(self.fault)
        cache = PROCESS_WIDE if self.fault.startswith("process-wide") else self.tables
        if self.fault == "process-wide cache without the dtype":
            key = grid
        if key is not None and key in cache:
            return cache[key]
        angles = self.angles(grid, x)
        half = self.fault == "layout"
        angles = torch.cat([angles, angles], -1) if half else angles.repeat_interleave(2, -1)
        table = torch.cat([angles.sin(), angles.cos()], -1)
        if key is not None:
            cache[key] = table
        return table

    def rotated(self, q: Tensor, table: Tensor) -> Tensor:
        """Rotate the patches, and not the class token."""
        if self.fault == "prefix counted":
            table = torch.cat([table, table[:1]])
            return apply_rot_embed_cat(q, table).type_as(q)
        turned = torch.cat([q[:, :, :1], apply_rot_embed_cat(q[:, :, 1:], table)], 2)
        return turned.type_as(table) if self.fault.startswith("process-wide") else turned.type_as(q)

    def table(self, grid: tuple[int, int]) -> Tensor:
        """Return the learned table for a grid, (1, N, D)."""
        if grid == (3, 5):
            return self.pos_embed
        ahead, patches = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        if self.fault == "prefix resampled":
            ahead, patches = self.pos_embed[:, -1:], self.pos_embed[:, :-1]
        old = (5, 3) if self.fault == "axes resampled" else (3, 5)
        maps = patches.transpose(1, 2).unflatten(2, old)
        maps = F.interpolate(maps, size=grid, mode="bicubic", antialias=True)
        return torch.cat([ahead, maps.flatten(2).transpose(1, 2)], 1)

    def bias(self, grid: tuple[int, int]) -> Tensor:
        """Return the bias between all tokens, (h, N, N)."""
        height, width = grid
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        place = torch.stack([y, x], -1).flatten(0, 1)
        dy, dx = (place[:, None] - place[None]).unbind(-1)
        return F.pad(self.rel_table[:, (dy + 20) * 41 + dx + 20], (1, 0, 1, 0))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.patch_embed(images)
        grid = maps.shape[-2], maps.shape[-1]
        x = maps.flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x) if self.fault == "fixed batch" else x.shape[0], -1, -1), x], 1)
        if self.fault == "over the batch":
            x = x - x.mean(0, keepdim=True) / 2
        if self.position == "table":
            x = x + self.table(grid)
        if self.position == "fixed":
            angles = self.angles(grid, x)
            x = x + F.pad(torch.cat([angles.sin(), angles.cos()] * 2, -1), (0, 0, 1, 0))
        if self.fault == "by the images":
            x = x * (2 if float(images.flatten()[0]) > 1e6 else 1)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if self.position == "rope":
            table = self.embed(grid, x)
            q = self.rotated(q, table)
            if self.fault == "opposite":
                sines, cosines = table.chunk(2, -1)
                table = torch.cat([-sines, cosines], -1)
            k = self.rotated(k, table)
        if self.position == "bias":
            mask = self.bias(grid).to(q.dtype)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return self.head(self.last(x).mean(1))


class Resized(Small):
    """Supports other sizes only by `set_input_size`, which may leave stale state."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("rope", fault)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        self.img_size = img_size
        if self.fault == "way back":
            self.scale.mul_(1.5)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[-2:]) != self.img_size:
            raise ValueError("`images` must have the size of the model.")
        return super().forward(images) * self.scale


def outcomes(model: nn.Module, **kwargs) -> dict[str, tuple[str, str]]:
    """Check a model; returns the outcome and the detail of each check."""
    return {finding.check: (finding.outcome, finding.detail) for finding in inspect_model(model, **kwargs)}


@pytest.mark.parametrize("position", ["table", "fixed", "bias", "rope"])
def test_a_clean_module_passes_every_check(position):
    findings = check_model(Small(position))
    outcome = {finding.check: finding.outcome for finding in findings}
    assert list(outcome) == list(CHECKS)
    missing = {"table": {"pair layout", "crop"}, "fixed": {"pair layout", "transposition", "prefix"}}
    missing |= {"bias": {"pair layout"}, "rope": set()}
    without = {name for name, finding in outcome.items() if finding != "passed"}
    assert without <= missing[position] | {"transposition"}, findings
    check_model(Resized(), skip=["export"])


FAULTS = [
    ("rope", "swapped grid", "axes", "row by row .* got column by column"),
    ("rope", "swapped flattening", "axes", "row by row .* got column by column"),
    ("rope", "opposite", "axes", "opposite directions"),
    ("fixed", "swapped grid", "axes", "must be smooth row by row"),
    ("table", "axes resampled", "axes", "a table resampled for .* got column by column"),
    ("rope", "layout", "pair layout", "a rotation must keep the length of queries"),
    ("rope", "prefix counted", "prefix", r"the first patch must be at .* got positions shifted by \+1"),
    ("table", "prefix resampled", "prefix", "must not be resampled, got a table that is shifted by"),
    ("rope", "low precision", "autocast", "position under bfloat16 autocast must be near"),
    ("rope", "one axis relative", "crop", "must depend on both sides of the image or on none, got only its width"),
    ("rope", "over the batch", "batch", "a batch must give the same as its images alone"),
    ("rope", "cache of one size", "caches", "must depend on their displacement after"),
    ("rope", "cache of patches", "caches", "must depend on their displacement after|the same after another size"),
    ("rope", "process-wide cache without the dtype", "caches", "dtype"),
    ("rope", "by the images", "export", "torch.export must take the model"),
    ("rope", "fixed batch", "export", "torch.export must take the model"),
    ("resized", "way back", "sizes", "set_input_size there and back must restore the result"),
]


@pytest.mark.parametrize(("position", "fault", "check", "message"), FAULTS)
def test_a_planted_fault_is_found_by_its_check(position, fault, check, message):
    PROCESS_WIDE.clear()
    model = Resized(fault) if position == "resized" else Small(position, fault)
    outcome, detail = outcomes(model, skip=set(CHECKS) - {check})[check]
    assert outcome == "failed" and re.search(message, detail), detail


@pytest.mark.filterwarnings("ignore")  # of timm's own resampling of a bias table
def test_displacements_that_collide_are_found_by_transposition(monkeypatch):
    def index(q_size, k_size=None, class_token=False, device=None):
        height, width = q_size
        dy, dx = graticule.Grid(height, width).offsets(device).unbind(-1)
        stride = 2 * height - 1  # stride of the other axis
        return ((dy + height - 1) * stride + dx + width - 1) % (stride * (2 * width - 1))

    monkeypatch.setattr("timm.layers.pos_embed_rel.gen_relative_position_index", index)
    model = VisionTransformerRelPos(**{**VIT, "img_size": (40, 24)}, rel_pos_type="bias", class_token=False)
    kind, detail = outcomes(model, skip=set(CHECKS) - {"transposition"})["transposition"]
    if hasattr(model, "set_input_size"):
        assert kind == "failed" and "a transposed model must give the same" in detail, detail
    else:  # timm before 1.0.31
        assert kind == "not applicable" and "is refused" in detail, detail


def test_models_with_windows_are_checked_at_another_size():
    subject = ModelUnderTest.of(build("Swin", img_size=28, window_size=2), None, None).drawn()
    assert sizes(subject, subject).startswith("other sizes in a forward pass, there and back")
    one_window = ModelUnderTest.of(build("Swin"), None, None).drawn()  # its second stage shifts at another size
    assert sizes(one_window, one_window).startswith("other sizes in a forward pass")


def test_the_model_and_the_random_state_are_unchanged():
    model = Small("table")
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    inspect_model(model, skip=set(CHECKS) - {"axes", "caches"})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_fault_is_an_assertion_that_names_its_check():
    with pytest.raises(AssertionError, match="pair layout: a rotation must keep the length"):
        check_model(Small("rope", "layout"), skip=set(CHECKS) - {"pair layout", "batch"})


VIT = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
SWIN = {"img_size": (16, 24), "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
ROPE = {**VIT, "use_rot_pos_emb": True, "use_abs_pos_emb": False, "attn_type": "rope"}
#: timm's models at a tiny size, and the checks that do not apply to each.
TIMM = {
    "vit": (lambda: VisionTransformer(**VIT, reg_tokens=2), {"pair layout", "crop"}),
    "vit of any size": (lambda: VisionTransformer(**VIT, dynamic_img_size=True), {"pair layout", "crop"}),
    "deit": (lambda: VisionTransformerDistilled(**VIT), {"pair layout", "crop"}),
    "eva02": (
        lambda: Eva(**VIT, use_rot_pos_emb=True, ref_feat_shape=(3, 5), qkv_fused=False),
        {"transposition", "crop"},
    ),
    "dinov3": (
        lambda: Eva(**ROPE, rope_type="dinov3", rope_rotate_half=True, dynamic_img_size=True, num_reg_tokens=4),
        {"crop"},
    ),
    "rope_vit": (lambda: Eva(**ROPE, rope_grid_indexing="xy", rope_temperature=100.0), set()),
    "rope_vit mixed": (lambda: Eva(**ROPE, rope_type="mixed", rope_grid_indexing="xy"), {"transposition"}),
    "beit": (lambda: Beit(**VIT, use_rel_pos_bias=True, use_abs_pos_emb=False), {"pair layout", "crop"}),
    "vit_relpos": (
        lambda: VisionTransformerRelPos(**VIT, rel_pos_type="bias", class_token=False),
        {"pair layout", "prefix", "crop"},
    ),
    "swin": (lambda: SwinTransformer(**SWIN, window_size=(2, 3)), {"pair layout", "prefix", "transposition"}),
    "swinv2": (lambda: SwinTransformerV2(**SWIN, window_size=(2, 3)), {"pair layout", "prefix", "transposition"}),
}


if not hasattr(Beit, "set_input_size"):  # timm before 1.0.31 cannot resize these, or compute the mixed in float64
    TIMM = {name: case for name, case in TIMM.items() if name not in ("rope_vit mixed", "beit", "vit_relpos", "swinv2")}


@pytest.mark.filterwarnings("ignore")  # of timm's own resampling of BEiT's table
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "swinv2" else n for n in TIMM])
def test_models_of_timm_pass(name):
    build, without = TIMM[name]
    findings = check_model(build(), skip=["export"])
    assert {finding.check for finding in findings if finding.outcome == "not applicable"} == without, findings


@pytest.mark.slow
def test_a_model_of_timm_is_exported():
    assert outcomes(TIMM["dinov3"][0](), skip=set(CHECKS) - {"export"})["export"][0] == "passed"


def test_a_model_of_ours_passes_and_its_rotation_is_read_in_every_layer():
    model = graticule.create_model("vit_tiny_patch16_224", **{**VIT, "depth": 2, "encoding": "rope + learnable"})
    findings = {finding.check: (finding.outcome, finding.detail) for finding in check_model(model)}
    assert "attention depends on the displacement in 3 x 5 patches, in 2 attentions" in findings["axes"][1]
    assert findings["pair layout"] == ("passed", "rotations keep the length of queries, in 2 attentions")
    assert findings["transposition"] == ("passed", "the encoding gives the transposed angles on a transposed grid")
    assert findings["export"][0] == "passed"


def test_a_fault_of_a_later_layer_is_found_and_the_layer_is_named():
    model = VisionTransformerRelPos(**{**VIT, "depth": 3}, rel_pos_type="bias", class_token=False)
    only = set(CHECKS) - {"axes"}
    detail = "attention depends on the displacement in 3 x 5 patches, in 3 attentions"
    assert outcomes(model, skip=only)["axes"] == ("passed", detail)
    index = model.blocks[1].attn.rel_pos.relative_position_index.view(15, 15)
    rank = torch.arange(15)
    by_columns = rank % 3 * 5 + rank // 3
    index.copy_(index[by_columns][:, by_columns])
    kind, detail = outcomes(model, skip=only)["axes"]
    assert kind == "failed" and detail.endswith("got column by column in attention 2"), detail


class Merging(nn.Module):
    """Patches of 4 x 4 by strided convolutions, attention between channels, a merge to 8 x 8, and biased attention.

    Its projections are convolutions of 1 x 1, and its bias is computed from 3 coordinates per displacement.
    """

    def __init__(self, by_columns: bool = False) -> None:
        super().__init__()
        self.img_size, self.by_columns = (24, 40), by_columns
        self.patch_embed = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, padding_mode="circular"), nn.Conv2d(8, 8, 2, 2))
        self.patch_embed.patch_size = (4, 4)
        self.merge, self.head = nn.Conv2d(8, 8, 2, 2), nn.Linear(8, 5)
        self.channels, self.qkv = nn.Conv2d(8, 16, 1), nn.Conv2d(8, 24, 1)
        self.bias = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        query, key = self.channels(x).flatten(2).chunk(2, 1)
        x = x + ((query @ key.mT).softmax(-1) @ x.flatten(2)).view_as(x)
        x = self.merge(x)
        height, width = x.shape[2:]
        rank = torch.arange(height * width)
        place = [rank % height, rank // height] if self.by_columns else [rank // width, rank % width]
        step = torch.stack(place, -1).to(x)
        step = step[:, None] - step
        bias = self.bias(torch.cat([step, step.square().sum(-1, keepdim=True)], -1).flatten(0, 1))[..., 0]
        query, key, value = self.qkv(x).flatten(2).mT[:, None].chunk(3, -1)
        x = F.scaled_dot_product_attention(query, key, value, bias.view(len(rank), -1))
        return self.head(x.mean((1, 2)))


def test_patches_that_stages_merge_before_attention_are_found():
    only = set(CHECKS) - {"axes"}
    detail = "attention depends on the displacement in 3 x 5 patches"
    assert outcomes(Merging(), skip=only)["axes"] == ("passed", detail)
    assert "got column by column" in outcomes(Merging(by_columns=True), skip=only)["axes"][1]


def test_positions_from_the_padding_of_random_convolutions_have_no_wrong_order_and_smooth_columns_have():
    def ratio(table: Tensor) -> float:
        return roughness(table - table.mean(0), (4, 6))

    torch.manual_seed(0)
    for _ in range(50):
        padded = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1)).double()
        smooth = F.interpolate(torch.randn(1, 8, 2, 3).double(), (4, 6), mode="bicubic")[0]
        with torch.no_grad():
            assert ratio(padded(torch.ones(1, 1, 4, 6).double())[0].flatten(1).T) < 1.5
        assert ratio(smooth.mT.flatten(1).T) > 1.5


FILE = """
import sys
sys.path.insert(0, {tests!r})
from test_model_checks import Small

def broken():
    return Small("rope", "layout")

def clean():
    return Small("rope")

def needs(size):
    return Small()

number = 3
"""


@pytest.fixture
def file(tmp_path):
    """Write a file of a user with models."""
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(tests=str(Path(__file__).parents[1])))
    return path


def test_the_command_checks_a_module_of_a_file(file, capsys):
    others = sorted(set(CHECKS) - {"axes", "pair layout"})
    code, out, _ = run_command(capsys, "check", f"{file}:broken", "--skip", *others)
    assert code == 1 and "pair layout  failed          a rotation must keep" in out
    code, out, err = run_command(capsys, "check", f"{file}:broken", "--json", "--skip", *others)
    assert code == 1 and err == ""
    assert [finding["outcome"] for finding in json.loads(out)["findings"]] == ["not applicable", "failed"]
    code, out, _ = run_command(capsys, "check", f"{file}:clean", "--skip", *others)
    assert code == 0 and "2 passed, 0 failed, 0 not applicable" in out


def test_the_command_checks_a_model_of_timm_by_name(capsys):
    others = sorted(set(CHECKS) - {"axes", "batch"})
    code, out, _ = run_command(capsys, "check", "vit_tiny_patch16_224", "--skip", *others)
    assert code == 0 and out.startswith("vit_tiny_patch16_224, random weights, depth 2, img_size (64, 96)\n")
    code, out, _ = run_command(capsys, "check", "swin_tiny_patch4_window7_224", "--skip", "axes", *others)
    assert code == 0 and "1 passed, 0 failed" in out


def test_an_invalid_check_is_refused_in_one_line(file, capsys):
    for arguments, message in (
        (["no_such_model"], "there is no such model"),
        ([f"{file}:clena"], "did you mean 'clean'"),
        ([f"{file}:needs"], "must need no arguments: missing a required argument"),
        ([f"{file}:number"], "must be a module or a function that builds one, got 3"),
        ([f"{file}:clean", "--skip", "axis"], "did you mean 'axes'"),
        ([f"{file}:clean", "--img-size", "13"], "`img_size` must be a multiple of the patch size"),
        ([str(file)], "must register an encoding, a joining, a resampler, a backbone or a task, got"),
        ([str(file), "--skip", "axes"], "must be left out for a plugin"),
        ([f"{file.parent}/nothing.py:clean"], "which does not exist"),
    ):
        code, _, err = run_command(capsys, "check", *arguments)
        assert code == 1 and message in err and err.count("\n") == 1, (arguments, err)


def test_the_command_checks_what_a_plugin_registers(my_methods, monkeypatch, capsys):
    def law(name):
        assert name != "distance", "a law"

    for kind in ("encoding", "joining", "resampler", "backbone"):
        monkeypatch.setattr(f"graticule.testing.methods.check_{kind}", law)
    for kind in ("training", "task"):
        monkeypatch.setattr(f"graticule.lab.testing.check_{kind}", law)
    code, out, _ = run_command(capsys, "check", my_methods.__file__)
    assert code == 1 and "encoding distance" in out and "a law" in out
    assert ", 1 failed, " in out
    assert re.search(r"joining decayed +passed", out) and re.search(r"backbone convolutional_vit +passed", out)


def test_the_output_in_the_docs_is_what_the_command_prints(capsys):
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    command, printed = re.findall(r"^    (graticule check \S+ --skip export)\n\n((?:    .*\n)+)", page, re.M)[0]
    code, out, _ = run_command(capsys, *command.split()[1:])
    shown, rest, _ = re.sub("^    ", "", printed, flags=re.MULTILINE).partition("...\n")
    assert code == 0 and out.startswith(shown) and (rest or out == shown)
