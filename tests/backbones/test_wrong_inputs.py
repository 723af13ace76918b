"""Inputs of a wrong kind are refused in one sentence before any work, and what is right still is."""

import copy

import PIL.Image
import pytest
import timm
import torch

import graticule
from graticule import Points, create_detector, create_language_model, create_segmenter, generate
from in_turn import refusals
from tiny import SIZE, draw, images, tiny

SIZES = {name: value for name, value in SIZE.items() if name not in ("num_classes", "depth")}
IMAGE = PIL.Image.new("RGB", (32, 32))


def _vit():
    return draw(tiny("rope", depth=1)).eval()


#: Models of images; a detector takes lists of them alone.
MODELS = {
    "backbone": _vit,
    "converted": lambda: graticule.convert(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "depth": 1}).eval()),
    "debiased": lambda: graticule.debias(_vit(), images(batch=9), components=1),
    "segmenter": lambda: create_segmenter("vit_tiny_patch16_224", 3, "segmenter_mask(depth=1)", depth=1, **SIZES),
    "detector": lambda: create_detector("vit_tiny_patch16_224", 3, "fcos", "simple_pyramid(channels=32)", **SIZES),
}
INPUTS = {
    **{
        "an array": lambda x: x.numpy(),
        "None": lambda x: None,
        "a string": lambda x: "x",
        "an empty list": lambda x: [],
    },
    **{"an image in a list": lambda x: [IMAGE], "None in a list": lambda x: [None], "bytes": lambda x: (x * 9).byte()},
    **{"complex": lambda x: x.to(torch.complex64), "meta": lambda x: x.to("meta"), "sparse": lambda x: x.to_sparse()},
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_images_of_a_wrong_kind_are_refused_in_one_sentence(name):
    model, x = MODELS[name]().eval(), images()
    for kind, change in INPUTS.items():
        with pytest.raises(ValueError, match=r"`(x|images)` must") as refusal:
            model(change(x))
        assert "\n" not in str(refusal.value), kind


@torch.no_grad()
def test_images_of_another_dtype_are_computed_in_autocast():
    model, x = _vit(), images()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        torch.testing.assert_close(model(x.bfloat16()), expected, rtol=0.05, atol=0.05)
    swapped = {name: value.double() for name, value in model.named_parameters()}
    actual = torch.func.functional_call(model, swapped, (x.double(),))
    torch.testing.assert_close(actual, copy.deepcopy(model).double()(x.double()))


OTHERS = {
    "keep, a list": lambda model, x: model(x, keep=[1, 2]),
    "keep, one number": lambda model, x: model(x, keep=torch.tensor(1)),
    "crop": lambda model, x: model(x, crop="a"),
    "crop of a list": lambda model, x: model([x[0]], crop=["a"]),
    "grid": lambda model, x: model.position((4, 4)),
    "places": lambda model, x: Points([[1.0, 2.0]]),
    "position": lambda model, x: model.replace_position("rope"),
    "batch_size": lambda model, x: graticule.debias(model, images(batch=9), batch_size=0),
    "batch_size of shares": lambda model, x: graticule.position_share(model, images(batch=9), batch_size=-1),
    "recipe": lambda model, x: graticule.train("digits_quick", "runs"),
    "folder": lambda model, x: graticule.Run.open(None),
}


test_an_argument_of_a_wrong_kind_is_named = refusals(
    *((act, f"^`{name.partition(',')[0].partition(' ')[0]}` must") for name, act in OTHERS.items()),
    call=lambda act: act(_vit(), images()),
    error=(ValueError, TypeError),
)


TEXT = torch.zeros(2, 4, dtype=torch.long)


def _lm(**arguments):
    sizes = {"vocab_size": 10, "context": 16, "depth": 1, "encoding": "rope_1d", **arguments}
    return create_language_model("lm_nano", **sizes).eval()


def _cache(model, batch=2):
    cache = model.new_cache(12)
    model(TEXT[:1].expand(batch, -1), cache)
    return cache


def _generate(model, tokens=TEXT, new_tokens=2, **options):
    return lambda _: list(generate(model, tokens, new_tokens, **options))


#: What is done with a language model of 10 tokens, and the argument of the error.
OF_TEXT = [
    *(
        (lambda model, tokens=tokens: model(tokens), "tokens")
        for tokens in (TEXT + 10, TEXT - 1, TEXT.numpy(), None, [[1]], TEXT.int(), TEXT.to("meta"), TEXT[None])
    ),
    (lambda model: model(TEXT, "a"), "cache"),
    (lambda model: model(TEXT, _cache(model, 1)), "cache"),
    (lambda model: model(TEXT, _cache(copy.deepcopy(model).double())), "cache"),
    (lambda model: model(TEXT, _lm(depth=2).new_cache(12)), "cache"),
    (lambda model: model(TEXT, _cache(_lm(embed_dim=32, num_heads=2))), "cache"),
    *((lambda model, length=length: model.new_cache(length), "length") for length in ("a", 5.5, None, True)),
    *((lambda model, value=value: model.set_context(value), "context") for value in ("a", 1.5, None, True, 0)),
    (_generate(_vit()), "model"),
    (_generate(None), "model"),
]
#: Options of `generate` of a wrong type or out of range.
OPTIONS = {
    "tokens": (TEXT + 10, TEXT - 1, TEXT.numpy(), [[1]]),
    "new_tokens": (None, "a", 1.5, -1, True),
    "temperature": ("a", None, -1, float("nan")),
    "top_k": (1.5, "a", 0, 11, True),
    "generator": ("a", 5),
    "use_cache": ("a", None, 2),
}


test_a_language_model_refuses_wrong_tokens_caches_and_lengths = refusals(
    *((act, f"^`{argument}` must") for act, argument in OF_TEXT),
    call=torch.no_grad()(lambda act: act(_lm())),
    error=(ValueError, TypeError),
)
test_generate_refuses_wrong_options_before_any_work = refusals(
    *(({name: value}, f"^`{name}` must") for name, values in OPTIONS.items() for value in values),
    call=lambda option: generate(_lm(), **{"tokens": TEXT, "new_tokens": 2, **option}),
    error=(ValueError, TypeError),
)


@torch.no_grad()
def test_every_method_of_a_backbone_refuses_them():
    model, x = _vit(), images()
    for method in (model.forward_features, model.forward_intermediates):
        for kind, change in INPUTS.items():
            if "list" not in kind and kind != "nested":
                with pytest.raises(ValueError, match="`x` must"):
                    method(change(x))


@pytest.mark.parametrize("name", ["pos_drop", "head_drop"])
def test_a_dropout_that_was_replaced_is_not_converted(name):
    model = timm.create_model("vit_tiny_patch16_224", **SIZE)
    setattr(model, name, torch.nn.Identity())
    with pytest.raises(
        ValueError, match=f"`{name}` of VisionTransformer must be Dropout to be converted, got Identity"
    ):
        graticule.convert(model)
