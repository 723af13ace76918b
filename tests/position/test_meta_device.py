"""A model from the meta device is the same model once its state dict is loaded: no position is left uninitialized."""

import copy

import pytest
import timm
import torch
from torch import nn

import graticule
from graticule.lab.studies.matrix import build
from graticule.position.position import ENCODINGS
from tiny import SIZE, SMALL, draw, tiny


def difference(make, real, images, how):
    """Return the difference of the outputs of a model, and of one from the meta device with its state dict."""
    other = make(real).eval()
    if how == "to_empty":
        other.to_empty(device="cpu")
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.detach().fill_(3)  # what memory may hold
    other.load_state_dict(real.state_dict(), assign=how == "assign")
    with torch.no_grad():
        return float((other(images) - real(images)).abs().max())


def on_meta(make, *arguments):
    with torch.device("meta"):
        return make(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL)
def test_every_encoding_of_a_family_is_the_same(family):
    """In a plain backbone the contract checks it for every encoding; this is the product of families and encodings."""
    for encoding in (None, *ENCODINGS):
        try:
            model = draw(build(family, encoding)).eval()
        except ValueError:
            continue  # the family does not take it
        images = torch.randn(1, model.in_chans, *model.img_size)
        for how in ("to_empty", "assign"):
            assert difference(lambda _, encoding=encoding: on_meta(build, family, encoding), model, images, how) == 0, (
                encoding
            )


def attached(encoding, joining="default"):
    torch.manual_seed(0)
    host = timm.create_model("vit_tiny_patch16_224", **SIZE)
    return graticule.attach(host, encoding, joining, start="new", remove="pos_embed").eval()


def folded(encoding, joining="default", **options):
    torch.manual_seed(0)
    return graticule.fold(tiny(encoding, joining), **options)


def converted(name):
    torch.manual_seed(0)
    return graticule.convert(timm.create_model(name, **SIZE)).eval()


def debiased():
    torch.manual_seed(0)
    return graticule.debias(tiny("rope").eval(), torch.randn(16, 3, 32, 32))


CHANGED = {
    "attached LaPE": lambda: attached("learnable", "lape"),
    "attached ALiBi": lambda: attached("alibi"),
    "folded LaPE": lambda: folded("learnable", "lape"),
    "folded ALiBi": lambda: folded("alibi"),
    "folded for sizes": lambda: folded("rope", sizes=2),
    "unfolded": lambda: graticule.unfold(folded("relative_bias")),
    "converted ViT": lambda: converted("vit_tiny_patch16_224"),
    "converted with biases": lambda: converted("vit_relpos_small_patch16_224"),
    "converted RoPE": lambda: converted("vit_small_patch16_rope_224"),
    "debiased": debiased,
    "within another": lambda: nn.Sequential(tiny("bucketed_bias + log_n").eval()),
}


@pytest.mark.parametrize("how", ["to_empty", "assign"])
@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_model_is_the_same(case, how):
    """Meta-device reports: transformers#45902, torchtitan#4783, SkyRL#1709."""
    model = CHANGED[case]()
    makers = [lambda real: copy.deepcopy(real).to("meta"), lambda _: on_meta(CHANGED[case])]
    for make in makers[: 1 if case == "debiased" else 2]:  # fitting needs values
        assert difference(make, model, torch.randn(1, 3, 32, 32), how) == 0
