"""`graticule generate`: the generated text is streamed to standard output, and nothing else."""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import signal
import sys

import pytest
import torch

import graticule
from commands import refused, run_command
from forked import forked
from graticule.lab.data.tokens import BytePairTokenizer
from graticule.lab.tasks.classification import Recipe
from graticule.lab.tasks.language import tokenizer_of
from graticule.lab.training.run import Run
from in_turn import in_turn
from text_commands import CONTEXT

#: Printed on standard error after the text.
SPEED = re.compile(r"(\d+) tokens?, \d+ tokens/s(; the document ended)?(; wrote .*)?\n")


def continued(run: Run, prompt: str, new_tokens: int, model=None, **options) -> str:
    """Return the continuation of a prompt by the library, up to the end of the document."""
    tokenizer = tokenizer_of(run)
    begin = torch.as_tensor(tokenizer.encode(prompt) if prompt else [tokenizer.end])
    options = {"generator": torch.Generator().manual_seed(0), **options}
    found = [int(token) for token in graticule.generate(model or run.model(), begin[None], new_tokens, **options)]
    if tokenizer.end in found:
        found = found[: found.index(tokenizer.end)]
    return prompt + tokenizer.decode(found)


def give_tokens(monkeypatch, tokens):
    """Make the model draw `tokens`, of which one may be an exception."""

    def generate(model, begin, new_tokens, **options):
        for token in tokens:
            if isinstance(token, BaseException):
                raise token
            yield torch.tensor([token])

    monkeypatch.setattr(graticule, "generate", generate)


class Recorder(io.StringIO):
    """A standard output that records its contents at each flush."""

    encoding = "utf-8"

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.terminal = terminal
        self.flushed: list[str] = []

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


# Output


@pytest.mark.parametrize("prompt", ["", "the cat où "])
@pytest.mark.parametrize("kind", ["rope_run", "table_run", "pairs_run"])
def test_the_text_of_the_library_is_alone_on_standard_output(capsys, request, kind, prompt):
    run = request.getfixturevalue(kind)
    given = ["--prompt", prompt] if prompt else []
    code, out, err = run_command(capsys, "generate", run.folder, "--tokens", 12, "--device", "cpu", *given)
    assert code == 0 and out == continued(run, prompt, 12)
    assert SPEED.fullmatch(err), err


def test_temperature_and_top_k_and_checkpoint_are_those_of_the_library(capsys, rope_run):
    assert rope_run.best != rope_run.last
    texts = []
    for checkpoint in ("best", "last"):
        code, out, _ = run_command(
            capsys, "generate", rope_run.folder, "--prompt", "of", "--tokens", 20, "--temperature", 0.5, "--top-k", 3,
            "--checkpoint", checkpoint, "--device", "cpu",
        )  # fmt: skip
        model = rope_run.model(checkpoint=checkpoint)
        assert code == 0 and out == continued(rope_run, "of", 20, model, temperature=0.5, top_k=3)
        texts.append(out)
    assert texts[0] != texts[1]


def test_a_seed_is_a_text_and_at_temperature_zero_there_is_one_text(capsys, rope_run):
    def text(*options):
        return run_command(capsys, "generate", rope_run.folder, "--prompt", "for", "--tokens", 24, *options)[1]

    assert text() == text("--seed", 0) != text("--seed", 1)
    assert text("--temperature", 0) == text("--temperature", 0, "--seed", 1)


def test_a_prompt_in_a_file_is_the_same_as_one_that_is_typed(capsys, tmp_path, rope_run):
    (tmp_path / "prompt.txt").write_bytes("\ufeffÜber\r\n\tsie".encode())
    chosen = ("generate", rope_run.folder, "--tokens", 5)
    code, out, _ = run_command(capsys, *chosen, "--prompt-file", tmp_path / "prompt.txt")
    assert code == 0 and out == run_command(capsys, *chosen, "--prompt", "Über\r\n\tsie")[1]
    assert out.startswith("Über\r\n\tsie")


@pytest.mark.parametrize("prompt", ["- an item", "None", "--prompt=-x", "--prompt=__init__ --tokens"])
def test_a_prompt_may_look_like_an_option(capsys, rope_run, prompt):
    given = [prompt] if prompt.startswith("--prompt=") else ["--prompt", prompt]
    code, out, _ = run_command(capsys, "generate", rope_run.folder, *given, "--tokens", 1, "--temperature", 0)
    assert code == 0 and out.startswith(prompt.removeprefix("--prompt="))


def test_the_text_is_in_the_file_that_is_asked_for(capsys, tmp_path, pairs_run):
    file = tmp_path / "new" / "text.txt"
    code, out, err = run_command(
        capsys, "generate", pairs_run.folder, "--prompt", "où\r\n", "--tokens", 8, "--output", file
    )
    assert code == 0 and file.read_bytes().decode() == out and f"; wrote {file}" in err
    assert [path.name for path in file.parent.iterdir()] == ["text.txt"]


# Streaming


def test_the_text_is_printed_in_pieces_of_whole_characters(monkeypatch, rope_run):
    give_tokens(monkeypatch, "aé€".encode())
    monkeypatch.setattr(sys, "stdout", out := Recorder())
    assert run_main(rope_run) == 0
    assert list(dict.fromkeys(out.flushed)) == ["", "a", "aé", "aé€"]


def test_bytes_that_are_no_character_are_shown_as_such_also_at_the_end(capsys, monkeypatch, tmp_path, rope_run):
    tokens = [0x61, 0xFF, 0xC3, 0x62, 0xE2, 0x82]
    give_tokens(monkeypatch, tokens)
    code, out, _ = run_command(capsys, "generate", rope_run.folder, "--output", tmp_path / "text.txt")
    assert code == 0 and out == tokenizer_of(rope_run).decode(tokens) == "a\ufffd\ufffdb\ufffd"
    assert (tmp_path / "text.txt").read_text(encoding="utf-8") == out


def test_it_stops_where_the_document_ends_and_shows_nothing_for_it(capsys, monkeypatch, rope_run):
    end = tokenizer_of(rope_run).end
    give_tokens(monkeypatch, [0x61, end, 0x62])
    code, out, err = run_command(capsys, "generate", rope_run.folder)
    assert code == 0 and out == "a"
    found = SPEED.fullmatch(err)
    assert found and found[1] == "1" and found[2]
    give_tokens(monkeypatch, [end])
    code, out, err = run_command(capsys, "generate", rope_run.folder)
    assert code == 0 and out == "" and err.startswith("0 tokens, 0 tokens/s; the document ended")


def test_a_terminal_gets_no_commands_and_a_line_end_and_a_file_gets_all(monkeypatch, tmp_path, rope_run):
    text = "a\x1b[2J\x9b\r\n\tb\u202ec\x07 é"
    for terminal, shown in ((True, "a\\x1b[2J\\x9b\\r\n\tb\\u202ec\\x07 é\n"), (False, text)):
        give_tokens(monkeypatch, text.encode())
        monkeypatch.setattr(sys, "stdout", out := Recorder(terminal))
        assert run_main(rope_run, "--output", tmp_path / "text.txt") == 0
        assert out.getvalue() == shown and (tmp_path / "text.txt").read_bytes() == text.encode()
    give_tokens(monkeypatch, b"b")
    monkeypatch.setattr(sys, "stdout", out := Recorder(terminal=True))
    assert run_main(rope_run, "--prompt", "\x1b]0;title\x07") == 0
    assert out.getvalue() == "\\x1b]0;title\\x07b\n"


def test_a_terminal_of_another_encoding_is_shown_what_it_can_show(monkeypatch, rope_run):
    give_tokens(monkeypatch, "é€\n".encode())
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", newline="")
    monkeypatch.setattr(sys, "stdout", out)
    assert run_main(rope_run) == 0
    assert out.buffer.getvalue() == b"\xe9\\u20ac\n"


def test_the_text_before_it_was_stopped_stays(capsys, monkeypatch, tmp_path, rope_run):
    give_tokens(monkeypatch, [0x61, 0x62, KeyboardInterrupt()])
    file = tmp_path / "text.txt"
    code, out, err = run_command(capsys, "generate", rope_run.folder, "--prompt", "so ", "--output", file)
    assert code == 130 and out == "so ab" and "graticule: stopped." in err
    assert file.read_text() == "so ab"


def test_a_closed_pipe_of_the_reader_is_no_error(capsys, monkeypatch, rope_run):
    give_tokens(monkeypatch, b"abc")
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run_main(rope_run) == 141
    assert capsys.readouterr().err == ""


def test_a_person_sees_text_at_once_and_stops_it_with_control_c(rope_run):
    """In a terminal, with a text that would continue for a long time."""
    screen, end = pty.openpty()

    def in_a_terminal() -> None:
        for stream in range(3):
            os.dup2(end, stream)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        # a shell makes its background processes ignore Control-C, including tests and their subprocesses
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os._exit(run_main(rope_run, "--prompt", "Now ", "--tokens", 50_000, "--temperature", 0))

    process = forked(in_a_terminal)
    os.close(end)
    shown = b""
    try:
        while len(shown) < 60:
            shown += os.read(screen, 1000)
        os.kill(process.pid, signal.SIGINT)
        with contextlib.suppress(OSError):  # raised on Linux if the other end is closed
            while more := os.read(screen, 1000):
                shown += more
        process.join(600)
        assert process.exitcode == 130
    finally:
        process.kill()
        process.join()
        os.close(screen)
    assert shown.startswith(b"Now ") and b"Traceback" not in shown and b"\x1b" not in shown
    assert shown.endswith(b"graticule: stopped.\r\n")


def run_main(run: Run, *arguments: object) -> int:
    """Run the command with the current standard output."""
    from graticule.lab.cli import main

    return main(["generate", str(run.folder), *map(str, arguments)])


# Length of the text


def test_a_table_limits_the_text_and_the_last_token_needs_no_place(capsys, table_run):
    code, out, err = run_command(capsys, "generate", table_run.folder, "--prompt", "abc", "--tokens", CONTEXT - 2)
    assert code == 0 and "instead of" not in err
    code, out, err = run_command(capsys, "generate", table_run.folder, "--prompt", "abc", "--tokens", CONTEXT - 1)
    assert code == 1 and out == ""
    for said in (
        f"at most {CONTEXT - 2},",
        "Learnable",
        "3 tokens, got 31",
        "shorter prompt",
        "--context 33",
        "sinusoidal_1d",
    ):
        assert said in err


def test_without_a_number_a_table_gives_what_it_can_and_says_so(capsys, monkeypatch, table_run):
    asked = []

    def generate(model, begin, new_tokens, **options):
        model.check_length(begin.shape[1] + new_tokens - 1)
        asked.append(new_tokens)
        return iter([torch.tensor([0x61])] * new_tokens)

    monkeypatch.setattr(graticule, "generate", generate)
    code, out, err = run_command(capsys, "generate", table_run.folder)
    assert code == 0 and out == "a" * CONTEXT
    assert f"new tokens: {CONTEXT} instead of 400, as the table of Learnable ends there; --context 400 would" in err
    code, out, err = run_command(capsys, "generate", table_run.folder, "--context", 400)
    assert code == 0 and out == "a" * 400 and "instead of" not in err
    code, out, err = run_command(capsys, "generate", table_run.folder, "--prompt", "b" * CONTEXT)
    assert code == 0 and out == "b" * CONTEXT + "a" and "new tokens: 1 instead of 400" in err
    assert asked == [CONTEXT, 400, 1]


def test_a_prompt_that_is_longer_than_a_table_is_refused_with_what_can_be_done(capsys, tmp_path, table_run):
    (tmp_path / "prompt.txt").write_text("x" * (CONTEXT + 1))
    for given in ((), ("--tokens", 5)):
        err = refused(capsys, "generate", table_run.folder, "--prompt-file", tmp_path / "prompt.txt", *given)
        assert f"`prompt` must be at most {CONTEXT} tokens long" in err
        assert f"got {CONTEXT + 1}" in err and f"--context {CONTEXT + (5 if given else 400)}" in err


def test_a_table_is_resampled_in_memory_alone(capsys, table_run):
    before = {path: path.read_bytes() for path in table_run.folder.rglob("*") if path.is_file()}
    code, out, _ = run_command(
        capsys, "generate", table_run.folder, "--prompt", "a", "--tokens", 60, "--context", 60, "--device", "cpu"
    )
    model = table_run.model()
    model.set_context(60)
    assert code == 0 and out == continued(table_run, "a", 60, model)
    assert {path: path.read_bytes() for path in table_run.folder.rglob("*") if path.is_file()} == before


def test_without_a_table_a_text_may_be_longer_than_in_training(capsys, rope_run):
    code, out, _ = run_command(capsys, "generate", rope_run.folder, "--prompt", "x" * 50, "--tokens", 10)
    assert code == 0 and out == continued(rope_run, "x" * 50, 10)
    code, _, err = run_command(capsys, "generate", rope_run.folder, "--context", 64)
    assert code == 1 and "`context` must be left out" in err and "64" in err


# Errors are named


@in_turn(
    ("options", "said"),
    [
        (["--tokens", 0], "`tokens` must be at least 1, got 0"),
        (["--temperature", -1], "`temperature` must be at least 0"),
        (["--temperature", "nan"], "`temperature`"),
        (["--temperature", 1e-40], "`temperature` must be 0, or at least 0.0001"),
        (["--top-k", 0], "`top_k` must be at least 1, got 0"),
        (["--top-k", 258], "`top_k` must be from 1 to `vocab_size`, 257, got 258"),
        (["--top-k", 5, "--temperature", 0], "`top_k` must be left out"),
        (["--seed", -1], "`seed` must be at least 0"),
        (["--seed", 2**63], "`seed`"),
        (["--context", 0], "`context`"),
        (["--device", "gpu9"], "`device` must be one that PyTorch has here"),
        (["--device", "cuda:7"], "`device` must be one that PyTorch has here"),
        (["--prompt", "a", "--prompt-file", "FILE"], "`prompt` must be left out with `prompt_file`"),
        (["--prompt", "a\udcffb"], "at index 1"),
        (["--prompt-file", "nowhere.txt"], "'nowhere.txt', which does not exist"),
        (["--prompt-file", "."], "which is a folder"),
        (["--output", "."], "`output` must be a file"),
        (["--tempreature", 1], "did you mean --temperature"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_is_written(capsys, tmp_path, monkeypatch, table_run, options, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "generate", table_run.folder, *options) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "byte", "likely"),
    [("é".encode("latin-1"), "0xe9 at offset 0", "Latin-1"), ("ab".encode("utf-16"), "0xff at offset 0", "UTF-16")],
)
def test_a_prompt_in_another_encoding_is_named_with_its_byte(capsys, tmp_path, rope_run, content, byte, likely):
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    err = refused(capsys, "generate", rope_run.folder, "--prompt-file", file)
    assert str(file) in err and byte in err and likely in err


def test_a_text_beyond_all_memory_is_named_and_no_other_failure_is_taken_for_it(capsys, monkeypatch, rope_run):
    give_tokens(monkeypatch, [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 TB.\nMore.")])
    err = refused(capsys, "generate", rope_run.folder)
    assert "out of memory (" in err and "tried 1 TB." in err and "shorter texts" in err
    give_tokens(monkeypatch, [RuntimeError("another")])
    with pytest.raises(RuntimeError, match="another"):
        run_command(capsys, "generate", rope_run.folder)


def copied(run: Run, folder) -> Run:
    shutil.copytree(run.folder, folder)
    return Run.open(folder)


def test_the_tokenizer_of_another_text_is_refused_and_a_missing_one_is_named(capsys, tmp_path, pairs_run):
    run = copied(pairs_run, tmp_path / "run")
    BytePairTokenizer.train(["another text of other words"], 270).save(run.folder / "tokenizer.json")
    err = refused(capsys, "generate", run.folder)
    assert "`tokenizer` must have the vocabulary of" in err
    assert json.loads(run.recipe_file.read_text())["vocabulary"] in err and str(run.folder) in err
    (run.folder / "tokenizer.json").write_text('{"format": "graticule by')
    assert str(run.folder / "tokenizer.json") in refused(capsys, "generate", run.folder)
    (run.folder / "tokenizer.json").unlink()
    err = refused(capsys, "generate", run.folder)
    assert str(run.folder / "tokenizer.json") in err and "does not exist" in err


def test_a_run_that_cannot_write_is_named(capsys, tmp_path, rope_run):
    err = refused(capsys, "generate", tmp_path / "nowhere")
    assert "nowhere" in err and "does not exist" in err
    images = tmp_path / "images"
    images.mkdir()
    described = {"recipe": Recipe().to_dict(), "num_classes": 10, "channels": 1, "class_names": list("0123456789")}
    (images / "recipe.json").write_text(json.dumps(described))
    err = refused(capsys, "generate", images)
    assert "`run` must be a run on text" in err and str(images) in err
    run = copied(rope_run, tmp_path / "run")
    shutil.rmtree(run.checkpoints)
    assert "has no best checkpoint yet" in refused(capsys, "generate", run.folder)
    run.recipe_file.write_text('{"recipe": {"task"')
    assert str(run.recipe_file) in refused(capsys, "generate", run.folder)
