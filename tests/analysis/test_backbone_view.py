"""The view of a backbone for the analyses."""

import torch

import graticule
from graticule.external.open_view import view_of
from graticule.position.folded import Folded
from tests.tiny import tiny


def test_the_position_of_a_model_that_is_folded_for_all_sizes_is_computed_where_it_is_timed():
    model = graticule.fold(tiny("learnable").eval(), sizes=2)
    held = model.position
    seen = []

    def note(position, args, kwargs):
        seen.append(position)

    for variant in (held, held.original):
        variant.register_forward_pre_hook(note, with_kwargs=True)
    computed = view_of(model).variants()["computed"]
    seen.clear()  # folding it again also computes it
    with torch.no_grad():
        computed(torch.randn(1, 3, 32, 32))
    assert seen == [held.original] and not isinstance(seen[0], Folded)
    assert model.position is held
