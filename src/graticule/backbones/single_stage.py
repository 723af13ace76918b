"""Base class of gMLP and the mixers: one stage of blocks on a grid of patches."""

from __future__ import annotations

from collections.abc import Callable

from timm.layers import PatchEmbed, lecun_normal_
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from graticule.backbones.pyramid import Pyramid


class SingleStage(Pyramid):
    """A pyramid of one stage, whose blocks mix tokens by the position's weights; names and initial weights of timm."""

    needs = frozenset({"mixing"})
    first_conv = "stem.proj"

    def build_blocks(
        self,
        block: Callable[[], nn.Module],
        patch_size: int | tuple[int, int],
        in_chans: int,
        stem_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        """Build the patch embedding, optionally with a norm after it, and the blocks, one by one."""
        (self.embed_dim,), (count,) = self.embed_dims, self.depths
        self.stem = PatchEmbed(
            None, to_2tuple(patch_size), in_chans, self.embed_dim, norm_layer=stem_norm, strict_img_size=False
        )
        self.blocks = nn.Sequential(*[block() for _ in range(count)])

    def tokenize(self, x: Tensor, stage: int) -> Tensor:
        """Turn the patches of images into tokens (B, H * W, D)."""
        tokens: Tensor = self.stem(x)
        return tokens

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize the weights: Xavier uniform, biases of standard deviation 1e-6 in the blocks, the head at zero."""
        if isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear) and name.startswith("head"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.normal_(module.bias, std=1e-6)
