"""Laws of what is made of a model: opened, converted, attached, folded or debiased, it is exported and called alike."""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import timm
import torch

import graticule
from tiny import SIZE, draw, gradients, images, tiny


def _own():
    return draw(tiny("learnable", "lape", depth=1)).eval()


def _host():
    return draw(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "depth": 1}, dynamic_img_size=True)).eval()


def _opened():
    with tempfile.TemporaryDirectory() as folder:
        return graticule.from_pretrained(graticule.save_pretrained(_own(), Path(folder) / "model")).eval()


def _debiased(model, method="mean"):
    return graticule.debias(model, images(batch=9), method, components=2)


def _attached():
    return graticule.attach(_host(), "learnable", "lape")


WRAPPERS = {
    "own": _own,
    "opened": _opened,
    "converted": lambda: graticule.convert(_host()),
    "attached": _attached,
    "folded": lambda: graticule.fold(_own()),
    "folded for sizes": lambda: graticule.fold(_own(), sizes=1),
    "attached, folded": lambda: graticule.fold(_attached(), sizes=1),
    "debiased": lambda: _debiased(_own()),
    "debiased of directions": lambda: _debiased(_own(), "leace"),
    "debiased, folded": lambda: graticule.fold(_debiased(_own())),
    "debiased, converted": lambda: _debiased(graticule.convert(_host())),
    "debiased, attached": lambda: _debiased(_attached()),
    "debiased host": lambda: _debiased(_host()),
    "host": _host,
}
#: Wrapper -> what cannot be exported, and the error.
_FEATURES = {"features": "`features` must be left out with"}
_UNKNOWN = "`model` must be a backbone of images, a model with one, a model of timm or transformers, or have an"
REFUSED = {
    **{name: _FEATURES for name in WRAPPERS if name == "host" or "attached" in name or "debiased" in name},
    "debiased host": {"": _UNKNOWN},
}
OPTIONS = {
    "fixed": {},
    "batch": {"dynamic": ["batch"]},
    "sides": {"dynamic": ["sides"]},
    "batch and sides": {"dynamic": ["batch", "sides"]},
    "size": {"img_size": (24, 40)},
    "size and batch": {"img_size": (24, 40), "dynamic": ["batch"]},
    "features": {"features": [0]},
    "int8": {"int8": True},
    "onnx": {"format": "onnx", "dynamic": ["batch"]},
}


#: In `make test`, with a free batch; all wrappers with all options in `make test-slow`.
FAST = ("attached, folded", "debiased", "debiased host", "host")


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, option, marks=() if name in FAST and option == "batch" else pytest.mark.slow)
        for name in WRAPPERS
        for option in OPTIONS
    ],
)
def test_every_wrapper_is_exported_with_every_option_or_refused(name, option, tmp_path):
    torch.manual_seed(0)
    model, path = WRAPPERS[name](), tmp_path / "model.pt2"
    refused = next((rule for word, rule in REFUSED.get(name, {}).items() if option.startswith(word)), None)
    if refused is not None:
        with pytest.raises(ValueError, match=refused):
            graticule.export(model, path, **OPTIONS[option])
        assert not path.exists()
        return
    exported = graticule.export(model, path, **OPTIONS[option])
    assert exported.error < (0.1 if option == "int8" else 1e-5)
    if option == "batch":
        x = images(batch=5)
        with torch.no_grad():
            torch.testing.assert_close(torch.export.load(path).module()(x)[0], model(x), rtol=1e-4, atol=1e-4)


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name not in ("folded", "debiased, folded")])
@torch.inference_mode()
def test_every_wrapper_has_the_same_outputs_in_several_threads(name, frequent_switches):
    """Images of two sizes with as many patches; a model that is folded for one size refuses the other."""
    model = WRAPPERS[name]()
    x = [images(24, 40), images(40, 24)]
    expected = [model(image) for image in x]

    def run(thread):
        with torch.inference_mode():
            return [torch.equal(model(x[thread % 2]), expected[thread % 2]) for _ in range(20)]

    with ThreadPoolExecutor(4) as threads:
        assert all(map(all, threads.map(run, range(4))))


def test_activation_checkpointing_of_an_attached_position_works_in_the_threads_of_the_backward_pass():
    """The backward pass of a GPU runs in a thread of its own."""
    model, x = _attached().train(), images()
    model.set_grad_checkpointing(True)
    errors = []

    def backward(loss):
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(str(error))

    def run_in_thread(function, *args):
        thread = Thread(target=function, args=args)
        thread.start()
        thread.join()

    def check():
        model.zero_grad()
        run_in_thread(backward, model(x).sum())
        assert not errors
        torch.testing.assert_close(gradients(model), expected)

    model(x).sum().backward()
    expected = {name: value.clone() for name, value in gradients(model).items()}
    check()
    with ThreadPoolExecutor(1) as other:
        other.submit(model, images(24, 40)).result()
        check()


@pytest.mark.parametrize("encoding", ["learnable", "relative_bias"])
def test_activation_checkpointing_of_two_sizes_in_one_backward_pass_has_the_same_gradients(encoding):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, dynamic_img_size=True)
    graticule.attach(model, encoding=encoding)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    wide, high, by_mode = images(24, 40), images(40, 24), []
    for checkpointing in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(checkpointing)
        (model(wide).square().sum() + model(high).square().sum()).backward()
        by_mode.append({name: value.clone() for name, value in gradients(model).items()})
    torch.testing.assert_close(*by_mode)
