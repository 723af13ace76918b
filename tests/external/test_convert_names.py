"""Each tensor of every model of the supported families has a counterpart after conversion, at the model's size."""

import pytest
import timm
import torch

import graticule
from tiny import without_memory

FAMILIES = (
    *("vit_*_rope*", "eva02_*", "*_dinov3*", "vit_relpos_*", "vit_srelpos_*", "beit*", "samvit*"),
    *("convit*", "mixer_*", "resmlp_*", "swinv2_*", "mvitv2*", "cait*"),
)
#: Models without a counterpart: names -> text of the error.
REFUSED = {
    "swinv2_cr_*": "`model` must be of one of timm's classes",
}


def matching(*patterns):
    return {name for pattern in patterns for name in timm.list_models(pattern)}


def on_meta(name):
    """Build a model without weights, with one layer where timm supports it."""
    chosen = {"depths": (1, 1, 1, 1)} if name.startswith("swinv2") else {"depth": 1}
    chosen = {} if name.startswith(("mixer", "resmlp", "mvitv2", "convit")) else chosen
    with without_memory():
        model = timm.create_model(name, **chosen)
    for module in model.modules():  # a bias that must be zero for the conversion
        if getattr(module, "k_bias", None) is not None:
            module.k_bias = torch.zeros(module.k_bias.shape, device="cpu")
    return model


@pytest.mark.slow
def test_every_model_of_these_families_is_converted_or_refused_with_a_reason():
    wrong, names = {}, matching(*FAMILIES)
    refused = {name: why for pattern, why in REFUSED.items() for name in matching(pattern)}
    larger = matching("*large*", "*huge*", "*giant*", "*enormous*", "*_7b_*", "swinv2_cr_[bst]*")
    assert len(names - larger - refused.keys()) > 60
    for name in sorted(names - larger):  # the large ones differ only in size
        try:
            with without_memory():
                graticule.convert(on_meta(name))
            said = ""
        except ValueError as error:
            said = str(error)
        if not (refused[name] in said if name in refused else not said):
            wrong[name] = said
    assert not wrong
