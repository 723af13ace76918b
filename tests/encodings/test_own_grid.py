"""Tables of published models that have a grid of their own: SAM 2 and Hiera, SAM 3, RADIO; parity and laws."""

import math

import torch
import torch.nn.functional as F
from timm.models.hiera import Hiera
from timm.models.hieradet_sam2 import HieraDet
from torch import nn
from transformers import RadioConfig, Sam2HieraDetConfig, Sam3ViTConfig
from transformers.models.radio.modeling_radio import RadioPatchEmbeddings
from transformers.models.sam2.modeling_sam2 import Sam2HieraDetModel
from transformers.models.sam3.modeling_sam3 import Sam3ViTEmbeddings

import graticule
from graticule import Crop, Grid
from graticule.encodings.learnable import Learnable
from graticule.encodings.own_grid import Cropped, Windowed
from in_turn import in_turn, refusals
from tiny import assert_same, draw_double

DIM = 24
SIZES = {"embed_dim": DIM, "stages": (1, 1), "num_heads": 1, "q_pool": 1}


def windowed(reference, grid, window, **options):
    size, side = tuple(reference.pos_embed.shape[2:]), tuple(window.shape[2:])
    encoding = Windowed(grid, DIM, size, side, **options).double()
    encoding.load_state_dict({"table": reference.pos_embed, "window_table": window})
    return encoding


def rows(map_):
    return map_.flatten(0, 2)


@in_turn("shape", [(16, 16), (8, 24), (24, 8), (12, 4), (4, 4)])
@torch.no_grad()
def test_a_windowed_table_is_that_of_sam_2(shape):
    """facebookresearch/sam2#138, #407, WZH0120/SAM2-UNet#14: images of other sizes."""
    timm_model = draw_double(HieraDet(**SIZES, window_spec=(4, 4), global_pos_size=(7, 5), global_att_blocks=()))
    sizes = {"hidden_size": DIM, "blocks_per_stage": [1, 1], "embed_dim_per_stage": [DIM, 2 * DIM]}
    sizes |= {"num_attention_heads_per_stage": [1, 2], "window_size_per_stage": [4, 4], "global_attention_blocks": []}
    sizes |= {"window_positional_embedding_background_size": [7, 5]}
    released = draw_double(Sam2HieraDetModel(Sam2HieraDetConfig(**sizes)))
    for reference in (timm_model, released):
        ours = windowed(reference, Grid(*shape), reference.pos_embed_window)(Grid(*shape))
        zeros = torch.zeros(1, *shape, DIM).double()
        expected = reference._pos_embed(zeros) if reference is timm_model else reference._get_pos_embed(shape)
        assert_same(ours, rows(expected), 1e-12)


@in_turn("shape", [(16, 16), (8, 24), (24, 16)])
@torch.no_grad()
def test_a_windowed_table_is_that_of_hiera(shape):
    sides = tuple(4 * side for side in shape)
    reference = draw_double(Hiera(sides, **SIZES, abs_win_pos_embed=True, global_pos_size=(14, 12)))
    ours = windowed(reference, Grid(*shape), reference.pos_embed_win, resampler="bicubic")
    expected = reference._pos_embed(torch.zeros(1, math.prod(shape), DIM).double())
    assert_same(ours(Grid(*shape)), expected[0], 1e-12)


def test_windows_are_cut_off_where_sides_are_not_their_multiples():
    """keras-team/keras-hub#2697, facebookresearch/sam2#407 (472 pixels): the released code fails there."""
    encoding = draw_double(Windowed(Grid(118, 118), 4, window=8))
    nn.init.zeros_(encoding.table)
    table = encoding(Grid(118, 5)).unflatten(0, (118, 5))
    assert torch.equal(table[117, 4], encoding.window_table[0, :, 117 % 8, 4])


@in_turn("shape", [(6, 6), (12, 12), (18, 6), (7, 13), (3, 4)])
@torch.no_grad()
def test_a_tiled_table_is_that_of_sam_3(shape):
    """Sompote/SAM3_LoRA#31, CVHub520/X-AnyLabeling-Server#24 and #26: SAM 3 at other sizes."""
    config = Sam3ViTConfig(hidden_size=DIM, image_size=84, pretrain_image_size=84, patch_size=14)
    reference = draw_double(Sam3ViTEmbeddings(config))
    encoding = Learnable(Grid(6, 6), DIM, resampler="tiled").double()
    encoding.load_state_dict({"pos_embed": reference.position_embeddings})
    expected = reference._tile_position_embeddings(reference.position_embeddings, *shape)[0]
    assert torch.equal(encoding(Grid(*shape)), expected)
    moved = Learnable(Grid(6, 6), DIM, resampler="tiled").double()
    moved.load_state_dict(encoding.state_dict())
    moved.set_grid(Grid(*shape))
    assert torch.equal(moved.pos_embed[0], expected)


def test_a_tiled_table_gets_one_gradient_per_patch_and_crops_and_halves_are_parts_of_it():
    encoding = draw_double(Learnable(Grid(4, 6), DIM, resampler="tiled"))
    encoding(Grid(9, 6)).sum().backward()
    counts = encoding.pos_embed.grad[0, :, 0].view(4, 6)
    assert counts.tolist() == [[3.0] * 6, *[[2.0] * 6] * 3]  # rows 0, 4, 8; 1, 5; ...
    tiled = encoding(Grid(9, 6)).view(9, 6, DIM)
    assert torch.equal(encoding(Grid(3, 2, crop=Crop((9, 6), (5, 3, 3, 2)))), tiled[5:8, 3:5].flatten(0, 1))
    assert torch.equal(encoding(Grid(2, 3)), encoding.pos_embed[0].view(4, 6, DIM)[:2, :3].flatten(0, 1))


@in_turn("shape", [(8, 8), (4, 4), (3, 7), (12, 5), (16, 16)])
@torch.no_grad()
def test_a_cropped_table_is_that_of_radio_in_evaluation(shape):
    """NVlabs/RADIO#74 and #100; transformers interpolates in float32, so the formula is compared exactly."""
    config = RadioConfig(hidden_size=DIM, patch_size=4, max_img_size=32, num_channels=3, num_registers=0)
    reference = draw_double(RadioPatchEmbeddings(config))
    encoding = Cropped(Grid(*shape), DIM, 8).double().eval()
    table = reference.position_embedding.mT.unflatten(2, (8, 8))
    encoding.load_state_dict({"table": table})
    longest = max(shape)
    expected = F.interpolate(table, size=(longest, longest), mode="bilinear")[..., : shape[0], : shape[1]]
    assert_same(encoding(Grid(*shape)), expected[0].flatten(1).T, 1e-12)
    assert_same(encoding(Grid(*shape)), reference._interpolate_position_embedding(shape, torch.float64)[0], 1e-6)


@in_turn("shape", [(5, 7), (12, 3), (1, 4), (8, 8)])
@torch.no_grad()
def test_a_part_in_training_is_sampled_as_in_radio(shape):
    encoding = draw_double(Cropped(Grid(*shape), DIM, 8)).train()
    state = torch.get_rng_state()
    (top, left), (height, width) = encoding.draw(2)
    torch.set_rng_state(state)
    table = encoding(Grid(*shape, prefix=1))
    x, y = (torch.linspace(0, 1, side, dtype=torch.float64) for side in reversed(shape))
    at = torch.stack(torch.meshgrid(left + x * width, top + y * height, indexing="xy"), -1)  # (H, W, 2)
    sampled = F.grid_sample(encoding.table, 2 * at[None] - 1, align_corners=True)
    assert not table[0].any()
    assert_same(table[1:], sampled[0].flatten(1).T, 1e-12)


def test_parts_have_the_areas_and_aspects_of_radio_and_whole_tables_without_options():
    encoding = Cropped(Grid(4, 4), 2, 8)
    torch.manual_seed(0)
    starts, sides = (torch.stack(values) for values in zip(*(encoding.draw(2) for _ in range(4000)), strict=True))
    assert (starts >= 0).all() and (starts + sides <= 1 + 1e-12).all() and sides.max() == 1
    inner = sides[(sides < 1).all(1)]
    areas, ratios = inner.prod(1), (inner[:, 1] / inner[:, 0]).log() / math.log(4 / 3)
    assert 0.1 <= areas.min() < 0.102 and areas.max() > 0.9
    assert -2 <= ratios.min() < -1.95 and 1.95 < ratios.max() <= 2  # the ratio of the sides is a squared
    assert abs(ratios.mean()) < 0.05
    whole = Cropped(Grid(4, 4), 2, 8, least=1.0, aspect=1.0)
    assert [values.tolist() for values in whole.draw(2)] == [[0, 0], [1, 1]]
    assert [len(values) for values in whole.draw(1)] == [1, 1]


def test_parts_are_drawn_by_seed_also_compiled_and_not_in_evaluation():
    grid = Grid(5, 7, prefix=1)
    encoding = Cropped(grid, DIM, 9)

    def table(encoding, seed):
        torch.manual_seed(seed)
        return encoding(grid)

    compiled = torch.compile(encoding, fullgraph=True, backend="eager")
    assert torch.equal(table(encoding, 1), table(encoding, 1)) and torch.equal(table(compiled, 1), table(encoding, 1))
    assert not torch.equal(table(encoding, 1), table(encoding, 2))
    assert torch.equal(table(encoding.eval(), 1), table(encoding, 2))


test_sizes_without_a_meaning_are_refused = refusals(
    ("windowed(size=0)", "`size` must be a side of 1 to 65,536 for all or for each of 2 axes, got 0"),
    ("windowed(window=[4])", r"`window` must be a side .* 2 axes, got \(4,\)"),
    ("cropped(size=[4, 4, 4])", r"`size` must be a side .* 2 axes, got \(4, 4, 4\)"),
    ("cropped(least=0.0)", "`least` of encoding cropped must be greater than 0, got 0.0"),
    ("cropped(aspect=0.5)", "`aspect` of encoding cropped must be at least 1, got 0.5"),
    ("relative_bias(resampler='tiled')", "`resampler` must be one for tables of displacements"),
    call=lambda encoding: graticule.create_model("vit_nano_patch4_28", encoding=encoding),
)
