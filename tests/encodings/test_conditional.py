"""Laws of the conditional encodings: a convolution over the grid, with or without a residual connection."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graticule import Grid
from graticule.encodings.conditional import ConvolutionalProjection, Peg, QueryKeyPeg
from in_turn import in_turn, refusals
from tiny import assert_same

DIM, BATCH = 6, 2
PADDINGS = ("zeros", "circular", "replicate", "reflect", "none")
MODES = {"zeros": "constant", "circular": "circular", "replicate": "replicate", "reflect": "reflect"}
GRIDS = [Grid(3, 5), Grid(4, 3, prefix=1), Grid(3, 4, prefix=2)]

paddings = in_turn("padding", PADDINGS)
grids = in_turn("grid", GRIDS)
assert_near = partial(assert_same, atol=1e-12)
CONVOLUTIONS = ("depthwise", "separable", "dense")
forms = in_turn("convolution", CONVOLUTIONS)


@torch.no_grad()
def drawn(module, scale=0.3):
    """Draw every parameter and running statistic, so that each one has an effect."""
    for parameter in module.parameters():
        parameter.normal_(0, scale)
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.weight.add_(1)
        norm.running_mean.normal_(0, scale)
        norm.running_var.uniform_(0.5, 2)
    return module


def tokens(grid, dtype=torch.float64, dim=DIM):
    return torch.randn(BATCH, grid.tokens, dim, dtype=dtype)


def as_map(x, grid):
    """Return the patches as a map (B, D, H, W), in a loop."""
    features = x.new_zeros(len(x), x.shape[-1], grid.height, grid.width)
    for row in range(grid.height):
        for column in range(grid.width):
            features[:, :, row, column] = x[:, grid.prefix + row * grid.width + column]
    return features


def as_tokens(features, x, grid):
    return torch.cat([x[:, : grid.prefix], features.permute(0, 2, 3, 1).reshape(len(x), -1, features.shape[1])], 1)


def convolve(features, convolution, padding):
    around = convolution.kernel_size[0] // 2
    if padding != "none" and around:
        features = F.pad(features, [around] * 4, mode=MODES[padding])
    return F.conv2d(features, convolution.weight, convolution.bias, groups=convolution.groups)


def naive(peg, x, grid, padding):
    """Compute x + F(x) over (B, D, H, W) step by step."""
    features = y = as_map(x, grid)
    for step in peg.proj:
        if isinstance(step, nn.Conv2d):
            y = convolve(y, step, padding)
        elif isinstance(step, nn.BatchNorm2d):
            mean, var = step.running_mean[:, None, None], step.running_var[:, None, None]
            y = (y - mean) / (var + step.eps).sqrt() * step.weight[:, None, None] + step.bias[:, None, None]
        else:
            y = y.clamp(min=0)
    top, left = (features.shape[-2] - y.shape[-2]) // 2, (features.shape[-1] - y.shape[-1]) // 2
    encoded = torch.zeros_like(features)
    encoded[:, :, top : top + y.shape[-2], left : left + y.shape[-1]] = y
    return as_tokens(features + encoded, x, grid)


#: (grid, padding, convolution, kernel, layers, bias): kernels of one patch to more than the grid, and stacks.
PEGS = [
    *((grid, "zeros", "depthwise", 3, 1, True) for grid in GRIDS),
    *((Grid(4, 3, prefix=1), padding, "separable", 3, 1, False) for padding in PADDINGS),
    *((Grid(3, 4, prefix=2), "circular", convolution, 3, 1, True) for convolution in CONVOLUTIONS),
    *((Grid(k + 1, k + 2, prefix=1), padding, "depthwise", k, 1, True) for k in (1, 7) for padding in PADDINGS),
    *((Grid(2, 3, prefix=1), padding, "depthwise", 27, 1, True) for padding in ("zeros", "replicate")),
    *((Grid(5, 6, prefix=1), padding, name, 3, 2, True) for padding in PADDINGS for name in CONVOLUTIONS),
    *((Grid(9, 10), padding, name, 3, 4, True) for padding in PADDINGS for name in ("depthwise", "separable")),
]


@in_turn(("grid", "padding", "convolution", "kernel", "layers", "bias"), PEGS)
def test_a_peg_and_its_gradients_are_those_of_the_tokens_and_a_convolution_of_their_map(
    grid, padding, convolution, kernel, layers, bias
):
    scale = 1.0 if layers > 1 else 1 / kernel
    peg = drawn(Peg(DIM, kernel, convolution, layers, padding, bias=bias), scale).double().eval()
    assert [type(step).__name__ for step in peg.proj].count("ReLU") == (layers if layers > 1 else 0)
    x = tokens(grid).requires_grad_()
    actual, by_hand = peg(x, grid), naive(peg, x, grid, padding)
    assert (actual != x)[:, grid.prefix :].any()
    assert_near(actual, by_hand, atol=1e-10 if layers > 1 else 1e-11 if kernel > 3 else 1e-12)
    inputs, weight = [x, *peg.parameters()], tokens(grid)
    gradients, expected = (torch.autograd.grad((y * weight).sum(), inputs) for y in (actual, by_hand))
    assert all(gradient.any() for gradient in gradients)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)
    other = x.detach().clone()
    other[:, : grid.prefix] = 1e6  # prefix tokens are seen by no patch
    assert torch.equal(peg(other, grid)[:, grid.prefix :], actual[:, grid.prefix :])


def test_in_training_a_stack_normalises_over_the_batch_and_the_patches_alone():
    peg, grid = Peg(DIM, layers=2).double().train(), Grid(3, 5, prefix=2)
    x = tokens(grid)
    x[:, :2] = 1e6  # prefix tokens that would change any statistic that included them
    peg(x, grid)
    first = convolve(as_map(x, grid), peg.proj[0], "zeros")
    assert_near(peg.proj[1].running_mean, 0.1 * first.mean((0, 2, 3)))
    assert_near(peg.proj[1].running_var, 0.9 + 0.1 * first.var((0, 2, 3)))


@grids
@paddings
@in_turn("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_prefix_tokens_pass_bit_for_bit(grid, padding, dtype):
    peg, x = drawn(Peg(DIM, padding=padding)).to(dtype), tokens(grid, dtype)
    y = peg(x, grid)
    assert y.dtype == dtype and y.shape == (BATCH, grid.tokens, DIM)
    assert torch.equal(y[:, : grid.prefix], x[:, : grid.prefix])


@forms
@in_turn("layers", [1, 3])
@in_turn("shift", [(1, 0), (0, 2), (-2, 3)])
def test_with_circular_padding_a_shift_of_the_grid_is_a_shift_of_the_encoding(shift, layers, convolution):
    peg, grid = drawn(Peg(DIM, 3, convolution, layers, "circular"), 1.0).double().eval(), Grid(4, 7)
    x = as_map(tokens(grid), grid)
    moved = as_tokens(x.roll(shift, (2, 3)), x.new_zeros(BATCH, 0, DIM), grid)
    still = as_tokens(x, x.new_zeros(BATCH, 0, DIM), grid)
    assert_near(as_map(peg(moved, grid), grid), as_map(peg(still, grid), grid).roll(shift, (2, 3)), atol=1e-10)


def test_in_bfloat16_a_tiny_weight_is_not_lost_beside_the_one_of_the_identity():
    """1 + 0.003 is 1 in bfloat16, but 1.5 + 0.003 * 1.5 is the next number after 1.5, which is 1.5 + 2^-7."""
    peg, grid = Peg(1, bias=False), Grid(2, 3, prefix=1)
    nn.init.zeros_(peg.proj[0].weight)
    with torch.no_grad():
        peg.proj[0].weight[..., 1, 1] = 3e-3
    y = peg.bfloat16()(torch.full((1, 7, 1), 1.5, dtype=torch.bfloat16), grid)
    assert torch.tensor(1 + 3e-3).bfloat16() == 1 and y.flatten().tolist() == [1.5] + [1.5 + 2**-7] * 6


def test_under_autocast_tokens_of_float32_are_not_rounded():
    peg, grid = drawn(Peg(DIM), scale=1e-3), Grid(4, 5, prefix=1)
    x = tokens(grid, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = peg(x, grid)
        rounded = F.conv2d(as_map(x, grid), peg.proj[0].weight, peg.proj[0].bias, padding=1, groups=DIM)
    assert rounded.dtype == torch.bfloat16 and y.dtype == torch.float32
    assert torch.equal(y, as_tokens(as_map(x, grid) + rounded, x, grid))
    assert_same(y, peg(x, grid), 2**-8 * 1e-2)  # 8 bits of about 1e-2
    for parameter in peg.parameters():
        nn.init.zeros_(parameter)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(peg(x, grid), x)


def test_a_module_that_replaces_the_convolution_takes_effect():
    class WithAdapter(nn.Module):
        """A convolution plus a low-rank map, without an attribute `weight`, like adapters and quantization."""

        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base, nn.Conv2d(DIM, 2, 1), nn.Conv2d(2, DIM, 1)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    peg, grid = drawn(Peg(DIM)).double(), Grid(4, 3, prefix=1)
    x = tokens(grid)
    plain = naive(peg, x, grid, "zeros")
    adapter = WithAdapter(peg.proj[0]).double()
    peg.proj[0] = adapter
    assert_near(peg(x, grid) - plain, as_tokens(adapter.up(adapter.down(as_map(x, grid))), x * 0, grid))


def test_without_prefix_tokens_nothing_is_moved_to_become_a_map_and_tokens_again():
    peg, grid = Peg(DIM), Grid(4, 6)
    x = tokens(grid, torch.float32)
    seen = []
    peg.proj[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    y = peg(x, grid)
    assert seen[0].data_ptr() == x.data_ptr() and seen[0].is_contiguous(memory_format=torch.channels_last)
    assert y.is_contiguous()


@in_turn(
    ("padding", "kernel", "layers", "least"),
    [("circular", 7, 1, 3), ("reflect", 7, 1, 4), ("none", 7, 1, 7), ("none", 3, 3, 7), ("reflect", 3, 2, 2)],
)
def test_a_grid_too_small_for_the_kernel_is_refused_and_the_smallest_is_not(padding, kernel, layers, least):
    peg = drawn(Peg(DIM, kernel, layers=layers, padding=padding), 1.0).double().eval()
    for small in (Grid(least - 1, least + 1), Grid(least + 1, least - 1)):
        with pytest.raises(ValueError, match=rf"at least {least} patches .*{kernel} with padding '{padding}', got "):
            peg(tokens(small), small)
    for fits in (Grid(least, least + 1), Grid(least + 1, least)):
        x = tokens(fits)
        assert_near(peg(x, fits), naive(peg, x, fits, padding), atol=1e-10)


@grids
def test_queries_and_keys_get_the_peg_and_values_the_tokens(grid):
    peg = drawn(Peg(DIM)).double()
    x = tokens(grid)
    q, k, v = QueryKeyPeg(peg)(x, grid)
    assert_near(q, naive(peg, x, grid, "zeros"))
    assert torch.equal(q, k) and torch.equal(v, x) and not torch.equal(q, v)


def drawn_projection(*args, **kwargs):
    return drawn(ConvolutionalProjection(DIM, *args, **kwargs)).double()


@grids
@in_turn("padding", PADDINGS[:-1])
@in_turn("kernel", [1, 3, 5])
@in_turn("bias", [True, False])
def test_a_convolutional_projection_is_three_convolutions_and_nothing_added(grid, padding, kernel, bias):
    projection, x = drawn_projection(kernel, padding, bias), tokens(grid)
    made = projection(x, grid)
    for y, convolution in zip(made, (projection.q, projection.k, projection.v), strict=True):
        assert_near(y, as_tokens(convolve(as_map(x, grid), convolution, padding), x, grid))
        assert torch.equal(y[:, : grid.prefix], x[:, : grid.prefix])
    assert not any(torch.equal(made[a], made[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


test_invalid_arguments_are_refused = refusals(
    (lambda: Peg(DIM, -1), "`kernel` must be odd.*got -1"),
    (lambda: Peg(DIM, 3, "depth"), "`convolution` must be one of depthwise, separable, dense; got 'depth'"),
    (lambda: Peg(DIM, padding="same"), "`padding` must be one of zeros, circular, replicate, reflect, none; got"),
    (lambda: ConvolutionalProjection(DIM, padding="same"), "`padding` must be one of .*got 'same'"),
    (lambda: ConvolutionalProjection(DIM, 4), "`kernel` must be odd.*got 4"),
    (
        lambda: ConvolutionalProjection(DIM, 7, "reflect")(torch.randn(2, 15, DIM), Grid(3, 5)),
        r"`grid` must have sides of at least 4 patches .*got 3 x 5",
    ),
    *(
        (
            lambda build=build, count=count: build(DIM)(torch.randn(2, count, DIM), Grid(3, 5, prefix=1)),
            rf"`x` must have as many tokens as the grid, 1 \+ 3 \* 5 = 16, got {count}",
        )
        for build in (Peg, ConvolutionalProjection, lambda dim: QueryKeyPeg(Peg(dim)))
        for count in (14, 17)
    ),
)
