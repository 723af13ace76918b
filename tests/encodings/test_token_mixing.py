"""Dense matrices per group, global filters, and an MLP over the tokens: their laws, in float64."""

import pytest
import torch
import torch.nn.functional as F

import graticule
from graticule import Grid
from graticule.analysis.mixing import mixing_maps
from graticule.encodings.global_filter import GlobalFilter
from graticule.encodings.mlp_mixing import TokenMlpMixing
from graticule.encodings.sgu import DenseMixing, Gsgu
from graticule.layers.gating import mix_tokens
from graticule.position.windows import Windows
from in_turn import in_turn, refusals
from tiny import assert_same, draw

GRIDS = [Grid(4, 6), Grid(3, 5), Grid(1, 4), Grid(5, 1)]
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


def tokens(grid, channels=6, batch=2):
    return torch.randn(batch, grid.patches, channels, dtype=torch.float64)


def test_each_group_has_a_matrix_of_its_own_and_groups_of_equal_matrices_are_sgu():
    single, several, grid = DenseMixing(Grid(2, 3)).double(), Gsgu(Grid(2, 3), groups=3).double(), Grid(2, 3)
    assert torch.equal(draw(several)(grid), several.weight)
    with torch.no_grad():
        several.weight.copy_(draw(single).weight.expand(3, -1, -1))
    for at in (grid, Grid(3, 4)):
        x = tokens(at)
        assert_same(mix_tokens(x, several(at)), mix_tokens(x, single(at)), 1e-12)


def test_a_bias_per_group_is_cut_with_the_windows():
    grid, window = Grid(5, 7), Grid(3, 4)
    x, bias = tokens(grid), torch.randn(2, window.patches, dtype=torch.float64)
    weights = torch.zeros(2, window.patches, window.patches, dtype=torch.float64)
    actual = mix_tokens(x, weights, bias, Windows(grid, window, (1, 2)))
    full = bias.unflatten(1, window.shape)
    for y in range(5):
        for column in range(7):
            expected = full[:, (y - 1) % 3, (column - 2) % 4].repeat_interleave(3)
            assert torch.equal(actual[0, y * 7 + column], expected)


def drawn_filter(grid, groups=3):
    return draw(GlobalFilter(grid, groups)).double()


def filtered(x, weight, grid):
    """Compute GFNet's layer: a product with each frequency."""
    maps = torch.fft.rfft2(x.unflatten(1, grid.shape), dim=(1, 2), norm="ortho")
    weight = torch.view_as_complex(weight).repeat_interleave(x.shape[-1] // weight.shape[2], 2)
    return torch.fft.irfft2(maps * weight, s=grid.shape, dim=(1, 2), norm="ortho").flatten(1, 2)


@every_grid
@in_turn("by_matrix", [True, False])
def test_a_global_filter_is_a_product_with_each_frequency(grid, by_matrix):
    mixing, x = drawn_filter(grid), tokens(grid)
    table = mixing.displacements(grid)
    mixed = mix_tokens(x, table.with_weights() if by_matrix else table)
    assert_same(mixed, filtered(x, mixing.complex_weight, grid), 1e-10)


def test_at_another_grid_real_and_imaginary_parts_are_resampled_with_aligned_corners():
    old, new = Grid(4, 6), Grid(6, 8)
    mixing, x = drawn_filter(old), tokens(new)
    maps = mixing.complex_weight.permute(2, 3, 0, 1).flatten(0, 1)[None]
    resized = F.interpolate(maps, size=(6, 5), mode="bicubic", align_corners=True)[0]
    weight = resized.unflatten(0, (3, 2)).permute(2, 3, 0, 1).contiguous()
    assert_same(mix_tokens(x, mixing(new)), filtered(x, weight, new), 1e-10)
    moved = drawn_filter(old)
    moved.load_state_dict(mixing.state_dict())
    moved.set_grid(new)
    assert_same(moved(new), mixing(new), 1e-12)
    assert_same(moved.complex_weight, weight, 1e-12)
    built = GlobalFilter(new, 3).double()
    assert torch.equal(built.fit_parameter("complex_weight", mixing.complex_weight, old.shape), moved.complex_weight)


def test_filters_of_a_checkpoint_without_a_grid_are_taken_for_a_square():
    built = GlobalFilter(Grid(6, 6), 3).double()
    square, odd = (torch.randn(side, side // 2 + 1, 3, 2, dtype=torch.float64) for side in (4, 5))
    for of_square in (square, odd):
        assert built.fit_parameter("complex_weight", of_square).shape == (6, 4, 3, 2)
    strange = torch.randn(4, 7, 3, 2)
    assert built.fit_parameter("complex_weight", strange) is strange


def test_it_is_an_mlp_of_the_tokens_of_each_channel():
    grid, mixing = Grid(2, 3), draw(TokenMlpMixing(Grid(2, 3), dim=8)).double()
    x, bias = tokens(grid), torch.randn(6, dtype=torch.float64)
    actual = mix_tokens(x, mixing(grid), bias)
    expected = mixing.fc2(F.gelu(mixing.fc1(x.transpose(1, 2)))).transpose(1, 2) + bias[:, None]
    assert_same(actual, expected, 1e-12)
    assert mixing.fc1.out_features == 4


def test_in_part_of_a_window_the_missing_tokens_are_zeros():
    grid, window = Grid(4, 5), Grid(3, 3)
    made, x = draw(TokenMlpMixing(window, dim=8)).double()(window), tokens(grid)
    mixed = mix_tokens(x, made, None, Windows(grid, window, (1, 2)))
    padded = F.pad(x.unflatten(1, grid.shape), (0, 0, 1, 0, 2, 0))  # windows start at the padding
    parts = padded.unflatten(2, (2, 3)).unflatten(1, (2, 3)).transpose(2, 3).flatten(3, 4).flatten(0, 2)
    full = (
        mix_tokens(parts, made).unflatten(1, (3, 3)).unflatten(0, (2, 2, 2)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    )
    assert_same(mixed.unflatten(1, grid.shape), full[:, 2:, 1:], 1e-12)


def test_its_sums_over_constant_maps_keep_their_size_at_another_grid():
    mixing, new = draw(TokenMlpMixing(Grid(4, 4), dim=8)).double(), Grid(8, 8)
    with torch.no_grad():
        mixing.fc1.weight.copy_(mixing.fc1.weight[:, :1].expand(-1, 16))
        mixing.fc2.weight.copy_(mixing.fc2.weight[:1].expand(16, -1))
    small, large = (mix_tokens(torch.ones(1, n, 1).double(), mixing(at)) for n, at in ((16, Grid(4, 4)), (64, new)))
    assert_same(large, small[:, :1].expand(-1, 64, -1), 1e-12)


MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 1}
test_a_ratio_without_hidden_channels_and_maps_of_an_mlp_are_refused = refusals(
    (lambda: TokenMlpMixing(Grid(2, 2), dim=8, ratio=0.1), "`ratio` must give at least one hidden channel"),
    (lambda: mixing_maps(graticule.create_model("mixer_s16_224", **MIXER)), "`model` must mix its tokens by weights"),
)
