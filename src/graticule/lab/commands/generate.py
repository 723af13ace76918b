"""`graticule generate`."""

from __future__ import annotations

import codecs
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.options import OfCheckpoint, OnDevice, choose_device, parse
from graticule.registry.checks import Range, printable

if TYPE_CHECKING:
    from graticule.backbones.language import LanguageModel

#: Default number of new tokens.
_TOKENS = 400
#: Upper bounds of the tokens of a text and of the bytes of a prompt.
_MOST, _LARGEST_PROMPT = 10_000_000, 1 << 24


@dataclass
class Generate(OnDevice, OfCheckpoint):
    """Continue a text with a language model. The text is printed as it is generated, up to the end of the document.

    graticule generate RUN --prompt "def "
    graticule generate RUN --tokens 1000 --temperature 0.8
    """

    run: Positional[Path]
    """run folder"""
    prompt: str = ""
    """beginning of the text (default: none, the beginning of a document)"""
    prompt_file: Path | None = None
    """UTF-8 file with the beginning of the text"""
    tokens: Annotated[int | None, Range(1, _MOST)] = None
    """largest number of new tokens (default: 400, or as many as a learned table allows)"""
    temperature: float = 1.0
    """divisor of the logits: below 1, likely tokens become more likely; 0 always takes the most likely one"""
    top_k: Annotated[int | None, Range(1, _MOST)] = None
    """draw only from this number of most likely tokens (default: from all)"""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """seed of the text"""
    context: Rare[Annotated[int | None, Range(1, _MOST)]] = None
    """resample a learned table to this number of tokens; the run is unchanged"""
    output: Path | None = None
    """file to which the text is also written"""


def run(arguments: list[str]) -> int:
    """Continue a text with a language model."""
    options = parse(Generate, "generate", arguments)
    _check(options)
    prompt = _prompt(options)
    device = choose_device(options.device)
    import torch

    import graticule
    from graticule.backbones.language import LanguageModel
    from graticule.lab.tasks.language import tokenizer_of
    from graticule.lab.training.run import Run

    trained = Run.open(options.run)
    tokenizer = tokenizer_of(trained)
    model = trained.model(checkpoint=options.checkpoint)
    assert isinstance(model, LanguageModel)  # it has a tokenizer
    if options.context is not None:
        _resample(model, options.context)
    begin = torch.as_tensor(tokenizer.encode(prompt) if prompt else [tokenizer.end])
    count = _count(model, len(begin), options.tokens)
    model.to(device)
    generator = torch.Generator(device).manual_seed(options.seed)
    tokens = graticule.generate(
        model,
        begin[None].to(device),
        count,
        temperature=options.temperature,
        top_k=options.top_k,
        generator=generator,
    )
    if options.tokens is None and count < _TOKENS:
        print(
            f"new tokens: {count} instead of {_TOKENS}, as the table of {_held(model)} ends there; "
            f"--context {len(begin) + _TOKENS - 1} would resample it",
            file=sys.stderr,
        )
    return _write(prompt, tokens, tokenizer, options.output)


def _check(options: Generate) -> None:
    """Check the options, as far as possible without loading anything."""
    if options.prompt and options.prompt_file is not None:
        raise ValueError(f"`prompt` must be left out with `prompt_file`, got {options.prompt!r}.")
    if not math.isfinite(options.temperature) or 0 < options.temperature < 1e-4:
        # a smaller divisor would overflow float32
        raise ValueError(f"`temperature` must be 0, or at least 0.0001, got {options.temperature}.")
    if options.temperature == 0 and options.top_k is not None:
        raise ValueError(
            f"`top_k` must be left out with a temperature of 0, which takes the most likely token, got {options.top_k}."
        )
    from graticule.system.files import followed

    options.output = followed(options.output)
    if options.output is not None and options.output.is_dir():
        raise ValueError(f"`output` must be a file, got {str(options.output)!r}, which is a folder.")


def _prompt(options: Generate) -> str:
    """Return the beginning of the text, "" for the beginning of a document."""
    path = options.prompt_file
    if path is not None:
        from graticule.system.files import check_plain, read_utf8

        if not path.exists() or path.is_dir():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise FileNotFoundError(f"`prompt_file` must be a text file, got {str(path)!r}, which {what}.")
        if (size := check_plain(path)) > _LARGEST_PROMPT:
            raise ValueError(
                f"`prompt_file` must have at most {_LARGEST_PROMPT:,} bytes, got {size:,} in {str(path)!r}."
            )
        return read_utf8(path, _LARGEST_PROMPT)
    try:
        options.prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        wrong = options.prompt[error.start]
        raise ValueError(
            f"`prompt` must be text that UTF-8 can encode, got {wrong!r} at index {error.start}: does the terminal use "
            "another encoding? A file in UTF-8 can be given as --prompt-file."
        ) from None
    return options.prompt


def _held(model: LanguageModel) -> str:
    """Return the names of the encodings of `model` with a table."""
    return " and ".join(model.position.resampled_encodings())


def _resample(model: LanguageModel, context: int) -> None:
    """Resample the tables of `model` to `context` tokens."""
    if not _held(model):
        raise ValueError(
            f"`context` must be left out, as the run has no table to resample: a text can have any length, got "
            f"{context}."
        )
    model.set_context(context)


def _count(model: LanguageModel, begin: int, wanted: int | None) -> int:
    """Return the number of tokens to draw after the first `begin`; the last one is not read and needs no position."""
    count = _TOKENS if wanted is None else wanted
    held = _held(model)
    room: int = model.context - begin + 1
    if not held or count <= room:
        return count
    if wanted is None and room > 0:
        return room
    if room > 0:
        starts = f"the text begins with {begin} token{'s' * (begin > 1)}"
        wrong = (
            f"`tokens` must be at most {room}, as the table of {held} has {model.context} positions and {starts}, got "
            f"{wanted}: take fewer{', or a shorter prompt' * (begin > 1)}"
        )
    else:
        wrong = (
            f"`prompt` must be at most {model.context} tokens long, as the table of {held} is, got {begin}: take a "
            "shorter one"
        )
    raise ValueError(
        f"{wrong}, or --context {begin + count - 1}, which resamples the table, or a run trained with an encoding "
        "without a table, such as sinusoidal_1d or none."
    )


def _write(prompt: str, tokens: Any, tokenizer: Any, output: Path | None) -> int:
    """Show `prompt` and the text of `tokens` until the document ends, and write it to `output`; returns the exit code.

    If it is interrupted, the text so far is written to `output`, too.
    """
    from graticule.system.files import write_bytes

    screen = _Screen()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the bytes of a character until it is complete
    count, ended = 0, False
    started = time.perf_counter()
    try:
        screen.show(prompt)
        for token in map(int, tokens):
            if token == tokenizer.end:
                ended = True
                break
            count += 1
            screen.show(decoder.decode(tokenizer.vocabulary[token]))
        screen.show(decoder.decode(b"", final=True))
        screen.close()
    finally:
        if output is not None:
            write_bytes(output, "".join(screen.shown).encode())
    rate = count / (time.perf_counter() - started)
    said = f"{count} token{'s' * (count != 1)}, {rate:.0f} tokens/s{'; the document ended' * ended}"
    print(said if output is None else f"{said}; wrote {printable(str(output))}", file=sys.stderr)
    return 0


class _Screen:
    """Standard output that shows a text piece by piece, without control characters for a terminal.

    shown: the pieces, unchanged.
    """

    def __init__(self) -> None:
        self.shown: list[str] = []
        self._stream = sys.stdout
        self._terminal = sys.stdout.isatty()

    def show(self, text: str) -> None:
        self.shown.append(text)
        if self._terminal:
            text = "".join(c if c in "\n\t" else printable(c) for c in text)
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()

    def close(self) -> None:
        """End the line, so that the next output begins on a new one."""
        if self._terminal and not "".join(self.shown).endswith("\n"):
            self._stream.write("\n")
            self._stream.flush()
