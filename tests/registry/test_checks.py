"""Arguments have their annotated type, within its limits."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

import graticule
from graticule import Grid, create_language_model, create_model, fold, load_checkpoint, transfer
from graticule.analysis.attention import attention_maps
from graticule.analysis.correlation import position_correlations
from graticule.analysis.equivariance import translation_error
from graticule.encodings.conditional import Peg
from graticule.encodings.learnable import Learnable
from graticule.encodings.relative_bias import RelativeBias
from graticule.encodings.sinusoidal import Sinusoidal2d
from graticule.layers.attention import Attention
from graticule.position.position import ENCODINGS
from graticule.registry.checks import Checked, check, checked
from graticule.registry.fields import Channels, Depth
from graticule.system import memory
from in_turn import in_turn
from tiny import images, tiny

NAN, INFINITE = float("nan"), float("inf")
#: A type, valid values, and invalid values.
KINDS = [
    (int, (0, -3, np.int64(3)), (1.0, True, None, "3", [3], torch.tensor(3.0))),
    (float, (0, 0.5, np.float32(0.5)), (True, None, "0.5", [0.5], 1j)),
    (bool, (True, False), (0, 1, None, "yes")),
    (str, ("", "a"), (3, None, b"a", ["a"])),
    (int | None, (3, None), (3.5, "none")),
    (Literal["a", "b"], ("a", "b"), (3, None, ["a"])),
    (int | tuple[int, int], (3, (3, 4), [3, 4]), ((3,), (3, 4, 5), (3, "4"), "34", 3.0)),
    (Sequence[int], ([], [3], (3, 4), range(3)), (3, "34", [3.5], None)),
    (Mapping[str, int], ({}, {"a": 3}), (3, [], None)),
    (Callable[[int], int], (int, nn.GELU, lambda x: x), (3, "gelu", None)),
    (type[nn.Module] | None, (nn.GELU, None), (3, "gelu")),
    (nn.Module, (nn.GELU(),), (3, nn.GELU, None)),
    (str | Path, ("a", Path("a")), (3, None, b"a")),
]


@in_turn(("kind", "right", "wrong"), KINDS)
def test_a_value_is_of_its_annotated_type_or_a_type_error_names_the_argument(kind, right, wrong):
    for value in right:
        check("argument", value, kind)
    for value in wrong:
        with pytest.raises(TypeError, match=r"^`argument` must be .*, got "):
            check("argument", value, kind)


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE, np.float32("nan")])
def test_a_number_is_finite(value):
    for given, kind in ((value, float), ([1.0, value], Sequence[float])):
        with pytest.raises(ValueError, match="`argument` must be finite"):
            check("argument", given, kind)


def test_an_error_names_the_choices_or_the_kind_of_values():
    with pytest.raises(ValueError, match="`mode` must be one of a, b; got 'c'"):
        check("mode", "c", Literal["a", "b"] | None)
    with pytest.raises(TypeError, match="`sizes` must be a sequence of values, got 3"):
        check("sizes", 3, Sequence[int | None])
    with pytest.raises(TypeError, match="a sequence of sequences of whole numbers, got"):
        check("sizes", [48], Sequence[tuple[int, ...]])


def test_a_long_value_is_shown_in_a_line():
    with pytest.raises(TypeError) as error:
        check("depth", "a\n" * 1000, int)
    assert str(error.value).isprintable() and len(str(error.value)) < 200


def test_a_decorated_function_keeps_its_name_signature_and_own_errors():
    @checked
    def build(depth: Depth, *, share: float = 0.5, **others: int) -> int:
        """Build."""
        return depth

    assert (build.__name__, build.__doc__, build(3, share=1, more=2)) == ("build", "Build.", 3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'depth'"):
        build()
    with pytest.raises(ValueError, match="`depth` must be at most 1,000, got 1001"):
        build(1001)


def test_constructors_of_a_class_and_its_subclasses_check_their_arguments():
    class Deep(Checked):
        def __init__(self, depth: Depth) -> None:
            self.depth = depth

    class Wide(Deep):
        def __init__(self, dim: Channels, depth: int = 1) -> None:
            super().__init__(depth)

    class Same(Wide):
        pass

    for kind, wrong in ((Deep, [0]), (Wide, [-1]), (Wide, [8, 2000]), (Same, [0])):
        with pytest.raises(ValueError, match=r"`d.*` must be at"):
            kind(*wrong)
    assert Same(8, 2).depth == 2


GRID, IMAGES = Grid(2, 2), images()
MODEL = "vit_nano_patch4_28"
REFUSED: dict[str, Callable[[], object]] = {
    "depth": lambda: create_model(MODEL, depth=10**9),
    "num_heads": lambda: create_model(MODEL, num_heads=0),
    "mlp_ratio": lambda: create_model(MODEL, mlp_ratio=INFINITE),
    "qk_scale": lambda: create_model(MODEL, qk_scale=NAN),
    "drop_rate": lambda: create_model(MODEL, drop_rate=1.5),
    "img_size": lambda: create_model(MODEL, img_size=10**12),
    "num_classes": lambda: create_model(MODEL, num_classes=-1),
    "window_size": lambda: create_model("swin_tiny_patch4_window7_224", window_size=0),
    "depth that Python writes in no text": lambda: create_model(MODEL, depth=10**5000),
    "init_values": lambda: create_model(MODEL, init_values=1e300),
    "pretrained_cfg": lambda: create_model(MODEL, pretrained_cfg=1.5),
    "mena": lambda: create_model(MODEL, pretrained_cfg={"mena": (0.5,)}),
    "num_classes of a detector": lambda: graticule.create_detector(MODEL, num_classes=65536),
    "depths": lambda: create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 10**9)),
    "windows": lambda: create_model("posmlp_nano_32", windows=(7, 7, "a", 7)),
    "context": lambda: create_language_model("lm_nano", 10, context=10**30),
    "shape": lambda: Grid(-1, 3),
    "prefix": lambda: Grid(3, 3, prefix=-1),
    "std": lambda: Learnable(GRID, 4, std=-1),
    "temperature": lambda: Sinusoidal2d(GRID, 4, temperature=0),
    "grid": lambda: RelativeBias((2, 2), 1),
    "kernel": lambda: Peg(4, kernel=-1),
    "attn_drop": lambda: Attention(4, 2, attn_drop=NAN),
    "encoding": lambda: create_model(MODEL, encoding=3),
    "img_size of a fold": lambda: fold(tiny(), "32"),
    "path": lambda: load_checkpoint(tiny(), 3),
    "classifier": lambda: transfer(tiny(), {}, classifier="no"),
    "images": lambda: attention_maps(tiny(), [[1.0]]),
    "stage": lambda: position_correlations(tiny(), stage=1.0),
    "shifts": lambda: translation_error(tiny(), IMAGES, shifts=()),
}  # fmt: skip


#: What comes as an argument that must be a tensor of images, a module or numbers, and the words of the refusal.
TENSORS = {
    "nested": lambda: torch.nested.nested_tensor([*IMAGES]),
    "sparse": IMAGES.to_sparse,
    "complex": lambda: IMAGES.to(torch.complex64),
    "without values": lambda: IMAGES.to("meta"),
    "quantized": lambda: torch.quantize_per_tensor(IMAGES, 0.1, 0, torch.qint8),
    "float8_e4m3fn": lambda: IMAGES.to(torch.float8_e4m3fn),
    "must be torch.float32, as the model's weights": IMAGES.double,
    r"must be \(B, C, height, width\)": lambda: torch.tensor(3.0),
}
CALLS = {
    "position_share": lambda images: graticule.position_share(tiny(), images),
    "attention_maps": lambda images: attention_maps(tiny(), images),
    "translation_error": lambda images: translation_error(tiny(), images),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors is in prototype|quantize_per_tensor)")
@in_turn(("call", "words"), [*product(CALLS, TENSORS)])
def test_images_that_are_no_dense_batch_of_the_models_dtype_are_refused(call, words):
    with pytest.raises(ValueError, match=f"^`images` .*({words}|floating point)"):
        CALLS[call](TENSORS[words]())


WAVES = "rope(scaling='dy_ntk', reference=(2, 2))"
REFUSED |= {
    "model of TorchScript": lambda: graticule.convert(torch.jit.script(nn.Linear(2, 2))),
    "model without weights": lambda: graticule.position_share(nn.Identity(), IMAGES),
    "skip": lambda: graticule.check_model(tiny(), skip=[["a"]]),
    "progress": lambda: graticule.set_progress(tiny(WAVES), torch.ones(2)),
    "overlap": lambda: graticule.get_rope_index([GRID], torch.ones(2)),
    "crop": lambda: Grid(2, 2, crop=3),
    "box": lambda: graticule.Crop((4, 4), torch.ones(2, 4)),
    "prefix of points": lambda: graticule.Points(torch.zeros(2, 2), torch.ones(2)),
    "extent": lambda: graticule.Points(torch.zeros(2, 2), extent="ab"),
    "name of a plugin": lambda: graticule.load_plugin(3),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@in_turn("name", REFUSED)
def test_an_invalid_argument_is_refused_by_name(name):
    with pytest.raises((ValueError, TypeError), match=f"^`{name.partition(' ')[0]}`"):
        REFUSED[name]()


def test_a_model_that_is_larger_than_memory_is_refused_before_it_is_built():
    with pytest.raises(
        ValueError, match=r"`model` must be such that its tensors fit into the free memory, .* GiB, got a size"
    ):
        create_model(MODEL, embed_dim=2**18, num_heads=1, depth=1)


@in_turn(
    ("name", "option"),
    [
        (f"{name}({option}={value})", option)
        for name in ENCODINGS
        for option, value in product(ENCODINGS.options(name), (10**9, 2**64, 1e300, 10**400))
    ],
)
def test_large_options_of_encodings_are_refused_or_take_no_memory(name, option):
    try:
        position = graticule.build_position(GRID, dim=24, depth=2, num_heads=3, encoding=name)
    except ValueError as error:
        assert option in str(error) or "`encoding`" in str(error)
    else:
        assert sum(tensor.numel() for tensor in position.parameters()) < 2**20


def test_a_position_that_is_larger_than_memory_is_refused_before_it_is_built():
    with pytest.raises(
        ValueError, match=r"`encoding` must be such that its tensors fit into the free memory, .* GiB, got a size"
    ):
        graticule.build_position(GRID, dim=24, depth=2, num_heads=3, encoding="peg(kernel=100001)")


def test_a_whole_number_is_a_number():
    scaled = [create_model("resmlp_12_224", num_blocks=1, embed_dim=8, layer_scale=one) for one in (1, 1.0)]
    assert torch.equal(*(model.blocks[0].ls1 for model in scaled))


def test_a_large_model_that_fits_is_built_as_it_would_be_without_a_look_at_memory(monkeypatch):
    torch.manual_seed(0)
    expected = create_model(MODEL).state_dict()
    torch.manual_seed(0)
    monkeypatch.setattr(memory, "_SMALL", 1000)
    found = create_model(MODEL).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
