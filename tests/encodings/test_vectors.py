"""The recorded vectors of other libraries' position code: the verifier, this library, JAX, and published mistakes."""

import importlib.util
import inspect
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from graticule import Grid, Points, get_rope_index
from graticule.encodings.alibi import default_slopes
from graticule.encodings.build import build_position
from graticule.position.resampling import build_resampler

VECTORS = Path(__file__).parents[2] / "vectors"


def _verifier():
    spec = importlib.util.spec_from_file_location("graticule_verify", VECTORS / "verify.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


verify = _verifier()
ALL = {name: (about, inputs, outputs) for name, about, inputs, outputs in verify.vectors()}
#: Our resampler of tables that other code than PyTorch's resamples.
RESAMPLERS = {"resample.timm": "bicubic", "resample.sam3": "tiled", "resample.beit": "geometric(mode='linear')"}
RESAMPLED = [name for name in ALL if name.startswith(("resample.torch", "resample.swin")) and ".steps." not in name]
LTX = "rope(periods=(128.0, 0.0128), offset=-32.0, split=(10, 10, 10), arrangement='interleaved', unrotated='first')"
#: Recorded encodings of our presets of that name.
PRESETS = """rope_vit eva02 pixtral qwen2_vl llama4 gemma4 vjepa2 flux flux.video flux.text flux2 flux2.text wan
wan.video hunyuan_video hunyuan_video.video hunyuan_video.text z_image z_image.video cosmos cosmos.video glm_image
glm_image.text"""
QWEN2_VL = "cohere_compass glm4v exaone4_5 dots3_note mlcd muse_spark"
MINIMAX = "rope(base=10_000.0, split=(16, 16, 16), layout='half_rotated')"
#: Our encoding of each recorded rotary encoding of a grid, and of M-RoPE.
ROTARY = {
    **{f"rope.{name}": f"rope(preset='{name.partition('.')[0]}')" for name in PRESETS.split()},
    **dict.fromkeys([f"rope.{name}" for name in QWEN2_VL.split()], "rope(preset='qwen2_vl')"),
    **dict.fromkeys(("rope.inkling2", "rope.sam2_video"), "rope(base=10_000.0, order='xy')"),
    **dict.fromkeys(("rope.minimax_h3", "rope.minimax_h3.video"), MINIMAX),
    **dict.fromkeys(("rope.qwenimage", "rope.qwenimage.video"), "rope(preset='qwen_image')"),
    "rope.qwenimage.text": "rope(preset='flux')",
    "rope.half": "rope_1d(layout='half')",
    "rope.interleaved": "rope_1d",
    "rope.perception_encoder": "rope(preset='pe')",
    "rope.dinov3_vit": "rope(preset='dinov3')",
    "rope.kimi_k25": "rope(preset='kimi')",
    "rope.lfm3_vl": "rope(base=1_000_000.0, layout='half')",
    "rope.minimax_m3_vl": "rope(base=10_000.0, layout='half')",
    "rope.step3p7": "rope(base=10_000.0, layout='half', order='xy')",
    "rope.hunyuanimage": "rope(base=256.0)",
    "rope.kandinsky": "rope(base=10_000.0, split=(8, 12, 12))",
    "rope.ideogram4": "mrope(base=5_000_000.0, sections=(24, 20, 20), offset=65_536.0)",
    "rope.ltx": LTX,
    "mrope.chunked": "mrope(sections=(2, 3, 3), arrangement='chunked')",
    "mrope.interleaved": "mrope(sections=(4, 2, 2))",
}
#: What is no function of displacements, or has another unit of time than of rows and columns.
OTHERS = {"rope.cogview4", "rope.ernie_image", "rope.ltx.video"}


def test_every_rotation_is_one_of_ours_but_those_that_are_none():
    recorded = {name: about["outputs"]["rotated"] for name, (about, _, _) in ALL.items() if name.startswith("rope.")}
    ours = {recorded[name] for name in ROTARY.keys() & recorded}
    assert {name for name, output in recorded.items() if output not in ours} == OTHERS


@pytest.mark.parametrize("name", ROTARY)
def test_our_rotary_encodings_give_the_vectors(name):
    about, inputs, outputs = ALL[name]
    q, parameters = torch.tensor(inputs["q"]), about["parameters"]
    grid = places = Grid(*parameters.get("grid", (1, 1, 1) if "positions" in inputs else (len(q),)))
    if "text" in parameters:
        positions = verify.CONVENTIONS["token_positions"]
        tokens = inspect.signature(positions).parameters.keys() & parameters.keys()
        places = Points(torch.from_numpy(positions(**{key: parameters[key] for key in tokens})["positions"]))
    if "positions" in inputs:
        places = Points(torch.tensor(inputs["positions"]).T)
    position = build_position(grid, dim=q.shape[1], depth=1, num_heads=1, encoding=ROTARY[name]).double().eval()
    rotated = position(places)[0].rotary(q[None, None], q[None, None])[0][0, 0]
    np.testing.assert_allclose(rotated.numpy(), outputs["rotated"], rtol=0, atol=1e-9)


def test_our_resampling_gives_the_vectors():
    for name in [*RESAMPLED, *RESAMPLERS]:
        about, inputs, outputs = ALL[name]
        parameters = about["parameters"]
        antialias, corners = (parameters.get(option, False) for option in ("antialias", "corners"))
        text = f"bi{parameters.get('kernel')}(antialias={antialias}, align_corners={corners})"
        table, text = torch.tensor(inputs["table"]).permute(2, 0, 1)[None], RESAMPLERS.get(name, text)
        resampled = build_resampler(text, "displacements" if "beit" in name else "positions")(
            table, tuple(parameters["size"])
        )[0].permute(1, 2, 0)
        np.testing.assert_allclose(resampled.numpy(), outputs["resampled"], rtol=0, atol=1e-9, err_msg=name)


def test_our_slopes_of_alibi_give_the_vectors():
    for heads in (8, 12):
        np.testing.assert_allclose(default_slopes(heads), ALL[f"slopes.alibi.{heads}"][2]["slopes"], rtol=1e-12)


def test_our_indices_of_texts_images_and_videos_give_the_vectors():
    for name in [name for name in ALL if name.startswith("mrope.positions")]:
        about, _, outputs = ALL[name]
        parameters, parts = about["parameters"], []
        for part in parameters["parts"]:
            time, *sides = [part] if isinstance(part, int) else [part[0], *(side // 2 for side in part[1:])]
            video = {"spacing": (parameters.get("step", 1.0), 1.0, 1.0)} if sides and time > 1 else {}
            time = time // parameters.get("merge_time", 1) if video else time
            parts.append(Grid(*([time] if video or not sides else []), *sides, **video))
        assert get_rope_index(parts, overlap=True).places.T.tolist() == outputs["positions"].tolist()


@pytest.mark.slow
def test_the_installed_libraries_give_the_vectors():
    """Every vector anew, by the code that recorded it, in a process whose caches are empty."""
    script = """
import sys
import numpy as np
from evidence.vectors import in_float64, resampling, rotary, rotations, tables, texts
sys.path.insert(0, sys.argv[1])
import verify
known = {name: (about, array) for name, about, _, outputs in verify.vectors() for array in outputs.values()}
for rows in (rotary, rotations, texts, tables, resampling):
    with in_float64():
        for name, _, output in rows():
            about, expected = known.pop(name)
            try:
                array = np.asarray(output() if callable(output) else output)
            except ImportError:
                continue  # TensorFlow and OpenCV are not installed for tests
            assert verify.difference(array, expected) <= verify.TOLERANCE[about["dtype"]], name
assert not known, known.keys()
"""
    command = [sys.executable, "-W", "ignore", "-c", script, VECTORS]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=VECTORS.parent)
    assert ran.returncode == 0, ran.stderr


def changed(name, **parameters):
    about, inputs, _ = ALL[name]
    return verify.compute({**about, "parameters": {**about["parameters"], **parameters}}, inputs)


def by_columns(name):
    height, width = ALL[name][0]["parameters"]["grid"]
    return {
        key: value.reshape(height, width, -1).swapaxes(0, 1).reshape(value.shape) for key, value in ALL[name][2].items()
    }


#: Published mistakes: where, the vector, the change that makes it, and the cause that the verifier names, if it can.
MISTAKES = [
    ("timm 2692: DINOv3 with neighboring pairs", "rope.dinov3_vit", {"layout": "interleaved"}, "layout 'interleaved'"),
    ("tiny-vllm 5: Llama with neighboring pairs", "rope.half", {"layout": "interleaved"}, "layout 'interleaved'"),
    ("vllm-ascend 12820: halves", "rope.interleaved", {"layout": "half"}, "layout 'half'"),
    ("VisionLLaMA 4, timm 2541: order of tokens", "rope.pixtral", by_columns, "tokens by columns"),
    ("llama.cpp 13282: rows before columns", "rope.llama4", {"order": "yx"}, "order 'yx'"),
    ("vggt-omega 35, vmlx-swift 225: base", "rope.dinov3_vit", {"base": 10_000.0}, "base 10000.0"),
    ("MNN 4133, ollama 12807: chunked", "mrope.interleaved", {"arrangement": "blocks"}, "arrangement 'blocks'"),
    ("mlx-vlm 576: interleaved", "mrope.chunked", {"arrangement": "alternating"}, "arrangement 'alternating'"),
    ("vmlx-swift 225: order of merged blocks", "positions.blocks", {"merge": 1}, "merge 1 instead of 2"),
    ("vllm 29425: rows are zero", "mrope.interleaved", {"order": "t0x"}, "order 't0x'"),
    ("exllamav3 200: rows on both halves", "rope.gemma4", {"order": "yy"}, "order 'yy' instead of 'xy'"),
    ("llama.cpp 25781: half pixels", "resample.torch.linear.corners.7x9", {"corners": False}, "corners False"),
    (
        "openvino.genai 4444, candle 3512",
        "resample.torch.linear.antialias.3x2",
        {"antialias": False},
        "antialias False",
    ),
    ("mlx-vlm 1243: cubic coefficient", "resample.torch.cubic.7x9", {"a": -0.5}, "a -0.5 instead of -0.75"),
    ("pytorch 177138: the other one", "resample.torch.cubic.antialias.3x2", {"a": -0.75}, "a -0.75 instead of -0.5"),
    ("timm 2542: another kernel", "resample.torch.linear.7x9", {"kernel": "cubic"}, "kernel 'cubic'"),
    ("gemma4: rows before columns", "rope.gemma4", {"order": "yx"}, "order 'yx'"),
    ("Cosmos: one base for all axes", "rope.cosmos.video", {"base": 10_000.0}, "base 10000.0"),
    ("Qwen-Image: not centered", "rope.qwenimage", {"coordinates": "patches"}, "coordinates 'patches'"),
    ("Qwen-Image: other center", "rope.qwenimage", {"coordinates": "floor centered"}, "coordinates 'floor centered'"),
    ("Qwen-Image: text at zero", "rope.qwenimage.text", {"text_at": "zero"}, "text_at 'zero'"),
    ("FLUX.2: text of FLUX", "rope.flux2.text", {"text_at": "zero"}, "text_at 'zero' instead of 'last'"),
    ("HunyuanVideo: text first", "rope.hunyuan_video.text", {"text_first": True}, "text_first True"),
    ("FLUX: equal parts of channels", "rope.flux", {"split": None}, "split None"),
    ("MiniMax: halves of all channels", "rope.minimax_h3", {"still": "last pairs"}, "still 'last pairs'"),
    ("Kimi: axes in blocks", "rope.kimi_k25", {"arrangement": "blocks"}, "arrangement 'blocks'"),
    ("ERNIE-Image, read as a rotation", "rope.ernie_image", {"layout": "half"}, "layout 'half' instead of 'crossed'"),
    (
        "transformers 35569: text after the largest position",
        "mrope.positions.qwen2_vl",
        {"after": "largest"},
        "after 'largest'",
    ),
    ("transformers 48669: whole seconds", "mrope.positions.qwen2_5_vl", {"step": 0.0}, "step 0.0"),
    ("SAM: scaled queries", "bias.sam", {"scaled": True}, "scaled True"),
    ("Swin V2: coordinates of the new window", "log.swin_v2.trained", {"trained": None}, "trained None"),
    ("dinov2 378: size instead of scale", "resample.torch.cubic.steps.7x9", {"steps": None}, "steps None"),
]


def test_published_mistakes_are_found_and_named():
    for mistake, name, change, cause in MISTAKES:
        outputs = change(name) if callable(change) else changed(name, **change)
        compared, failures = verify.compare({f"{name}.{key}": value for key, value in outputs.items()})
        assert (compared, len(failures)) == (1, 1), mistake
        assert cause is None or cause in failures[0], f"{mistake}: {failures[0]}"


def test_outputs_in_a_file_are_compared_by_name(tmp_path):
    good, wrong = ALL["rope.half"][2]["rotated"], changed("rope.pixtral", layout="interleaved")["rotated"]
    save_file(
        {"rope.half.rotated": good.copy(), "rope.pixtral.rotated": wrong, "other": good.copy()}, tmp_path / "mine"
    )
    ran = subprocess.run([sys.executable, VECTORS / "verify.py", tmp_path / "mine"], capture_output=True, text=True)
    assert ran.returncode == 1 and "other: no vector has this name" in ran.stdout
    assert "rope.pixtral.rotated: differs" in ran.stdout and "1 of 2 outputs equal" in ran.stdout


def test_other_shapes_and_other_files_are_refused(tmp_path, capsys):
    _, failures = verify.compare({"rope.half.rotated": np.zeros((2, 3)), "index.swin.index": np.full((15, 15), np.nan)})
    assert "shape (2, 3), expected (7, 16)" in failures[0] and "differs by inf" in failures[1]
    (tmp_path / "text").write_bytes(b"no tensors")
    save_file({"rope.flx.rotated": np.zeros(2)}, tmp_path / "typo")
    for argument, message in (
        ("text", "is not a safetensors file"),
        ("none", "`file` must be a safetensors file of your outputs, and there is none at"),
        ("typo", "rope.flx.rotated: no vector has this name, the nearest is rope.flux.rotated"),
    ):
        status = verify.main([str(tmp_path / argument)])
        printed = capsys.readouterr()
        assert status and message in printed.out + printed.err
    assert (verify.main(["--list"]), verify.main(["--help"])) == (2, 0)
    assert capsys.readouterr().out.count("at most one file") == 2


def test_the_verifier_needs_numpy_alone():
    script = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'safetensors', 'graticule', 'scipy'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import runpy\n"
        "sys.argv = ['verify.py']\n"
        f"runpy.run_path({str(VECTORS / 'verify.py')!r}, run_name='__main__')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert f"{len(ALL)} of {len(ALL)} outputs equal" in ran.stdout


@pytest.mark.slow
def test_jax_gives_the_vectors():
    """JAX on the CPU, in a process of its own, by its own formulas of pairs and its own resampling."""
    script = """
import runpy, sys
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import numpy as np
verify = runpy.run_path(sys.argv[1], run_name="verify")

def rotated(q, places, frequencies, half):  # places (N, n) of frequencies (n,), as complex numbers
    pairs = q.reshape(len(q), 2, -1).swapaxes(1, 2) if half else q.reshape(len(q), -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * jnp.exp(1j * places * frequencies)
    both = jnp.stack([turned.real, turned.imag], -1)
    return (both.swapaxes(1, 2) if half else both).reshape(q.shape)

compared = 0
for name, about, inputs, outputs in verify["vectors"]():
    given = about["parameters"]
    if about["convention"] == "rotation":
        q = jnp.asarray(inputs["q"])
        count = q.shape[1] // 2
        if not set(given) <= {"grid", "base", "layout", "order", "offset"} or " " in given.get("layout", ""):
            continue
        grid, layout = given.get("grid", [len(q)]), given.get("layout", "half")
        n = count // len(grid)
        at = jnp.stack(jnp.meshgrid(*map(jnp.arange, grid), indexing="ij"), -1).reshape(len(q), -1)
        at = at[:, ::-1] if given.get("order") == "xy" else at
        f = jnp.tile(given.get("base", 10_000.0) ** -(jnp.arange(n) / n), len(grid))
        found = rotated(q, jnp.repeat(at + given.get("offset", 0.0), n, 1), f, layout == "half")
        expected = outputs["rotated"]
    elif name.startswith(("resample.torch", "resample.jax")) and given.get("border") == "renormalize":
        table = jnp.asarray(inputs["table"])
        size = (*given["size"], table.shape[-1])
        found = jax.image.resize(table, size, given["kernel"], antialias=given.get("antialias", False))
        expected = outputs["resampled"]
    else:
        continue
    assert np.abs(np.asarray(found) - expected).max() < 1e-9, name
    compared += 1
print(compared)
"""
    ran = subprocess.run([sys.executable, "-c", script, VECTORS / "verify.py"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 24


def test_the_example_of_the_page_holds(monkeypatch):
    """Three lines in the test suite of another library; `rotate` stands for its code."""
    page = (VECTORS.parent / "docs" / "conformance.md").read_text(encoding="utf-8")
    block = page.partition("```python vectors\n")[2].partition("```")[0]
    monkeypatch.setitem(sys.modules, "graticule_vectors", verify)
    monkeypatch.setitem(sys.modules, "graticule_vectors.verify", verify)
    about = ALL["rope.dinov3_vit"][0]
    exec(block, {"rotate": lambda queries: verify.compute(about, {"q": queries})["rotated"]})
    with pytest.raises(AssertionError):
        exec(block, {"rotate": lambda queries: changed("rope.dinov3_vit", layout="interleaved")["rotated"]})
    with pytest.raises(ValueError, match=r"got 'rope.dino'; near it: .*rope.dinov3_vit"):
        verify.inputs("rope.dino")


def test_each_vector_states_its_convention_and_source():
    described = json.loads((VECTORS / "vectors.json").read_text(encoding="utf-8"))
    assert described["conventions"] == {name: function.__doc__ for name, function in verify.CONVENTIONS.items()}
    for about in described["vectors"].values():
        assert about["convention"] in described["conventions"]
        assert any(character.isdigit() for character in about["source"])  # the version


def test_the_package_of_the_vectors_has_the_files_of_the_verifier_and_its_command(capsys):
    described = tomllib.loads((VECTORS / "pyproject.toml").read_text(encoding="utf-8"))
    files = described["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert all((VECTORS / name).is_file() for name in files) and {"verify.py", "vectors.json"} < set(files)
    assert described["project"]["scripts"] == {"graticule-vectors": "graticule_vectors.verify:main"}
    assert verify.main([]) == 0 and f"{len(ALL)} of {len(ALL)}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_example_in_cpp_gives_its_vector(tmp_path, capsys):
    """The port in the README, compiled and run beside the vectors."""
    example = (VECTORS / "README.md").read_text(encoding="utf-8").partition("```cpp\n")[2].partition("```")[0]
    (tmp_path / "port.cpp").write_text(example, encoding="utf-8")
    shutil.copy(VECTORS / "vectors.safetensors", tmp_path)
    subprocess.run(["g++", "-std=c++17", "-o", "port", "port.cpp"], cwd=tmp_path, check=True)
    subprocess.run(["./port"], cwd=tmp_path, check=True)
    assert verify.main([str(tmp_path / "mine.safetensors")]) == 0
    assert "1 of 1 outputs equal" in capsys.readouterr().out
