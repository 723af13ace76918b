"""Texts, their tokens and their windows."""

import math
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from graticule.lab.data.sampling import BatchIndices
from graticule.lab.data.sets.texts import load_text
from graticule.lab.data.text_module import PADDING, ByteTokenizer, EvaluationWindows, TextModule, TextWindows

TOKENIZER = ByteTokenizer()
TEXTS = load_text("pydoc")["train"][:12]


def counted(n=1000):
    """Return tokens equal to their positions."""
    return np.arange(n, dtype=np.uint16)


def epoch_of(windows, epoch):
    return windows[BatchIndices(np.arange(len(windows)), epoch)]


@pytest.mark.parametrize(("n", "context"), [(1000, 128), (1024, 128), (7, 7), (10, 1), (129, 128)])
def test_an_epoch_has_every_token_as_a_target_once_but_for_less_than_a_window(n, context):
    windows = TextWindows(counted(n), context, seed=0)
    for epoch in range(3):
        inputs, targets = epoch_of(windows, epoch)
        assert inputs.shape == targets.shape == (n // context, context) and inputs.dtype == torch.int64
        assert len(targets.unique()) == targets.numel() > n - context
        assert torch.equal(targets, (inputs + 1) % n)


@pytest.mark.parametrize("length", [1, 3, 8, 13, 14, 100])
def test_evaluation_has_every_token_as_a_target_once_at_any_length(length):
    tokenizer = ByteTokenizer()
    documents = ["abcab", "", "zddäd"]
    tokens = tokenizer.stream(documents)
    windows = EvaluationWindows(tokens, length)
    inputs, targets = windows[BatchIndices(np.arange(len(windows)))]
    assert inputs.shape == targets.shape == (math.ceil(len(tokens) / length), length)
    assert targets[targets != PADDING].tolist() == tokens.tolist()
    assert inputs.flatten()[: len(tokens)].tolist() == [tokenizer.end, *tokens[:-1].tolist()]
    assert ((inputs >= 0) & (inputs < tokenizer.vocab_size)).all()  # padding is also a valid index of the embedding
    assert len(tokens) == len("".join(documents).encode()) + len(documents)


def module(**options):
    return TextModule(**{"batch_size": 16, "seed": 3} | options)


def epoch_batches(data, epoch, **options):
    order = data.train_order(**options)
    order.start(epoch)
    return list(data.train_dataloader(order))


def test_the_module_gives_batches_of_the_stated_shapes():
    data = module()
    assert data.size == 128 and data.skipped == ()
    for inputs, targets in (next(iter(data.train_dataloader())), next(iter(data.eval_dataloader(data.size)))):
        assert inputs.shape == targets.shape == (len(inputs), 128) and inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_processes_and_parts_share_the_windows_of_an_epoch_and_a_resumed_run_sees_the_rest():
    data = module(limit_train=64, context=32)
    epoch = [inputs for inputs, _ in epoch_batches(data, 5)]
    shares = [epoch_batches(data, 5, rank=rank, world_size=2, accumulate=2) for rank in range(2)]
    for step, batch in enumerate(epoch):
        dealt = torch.cat([share[2 * step + part][0] for share in shares for part in range(2)])
        assert sorted(dealt.tolist()) == sorted(batch.tolist())
    order = module(limit_train=64, context=32).train_order()
    order.start(5, 2)
    rest = [inputs for inputs, _ in data.train_dataloader(order)]
    assert len(rest) == len(epoch) - 2 and all(torch.equal(a, b) for a, b in zip(rest, epoch[2:], strict=True))
    assert not torch.equal(epoch_batches(data, 6)[0][0], epoch[0])


def test_the_held_out_text_is_seen_once_by_any_number_of_processes():
    data = module(eval_batch_size=32)
    everything = torch.from_numpy(data._tokens["test"].astype(np.int64))
    batches = list(data.eval_dataloader(data.size))
    assert torch.equal(torch.cat([t[t != PADDING] for _, t in batches]), everything)
    assert all(len(inputs) <= 32 and inputs.shape[1] == 128 for inputs, _ in batches)
    ranks = [list(data.eval_dataloader(data.size, rank, 3)) for rank in range(3)]
    assert len({len(of_rank) for of_rank in ranks}) == 1
    targets = torch.cat([t[t != PADDING] for of_rank in ranks for _, t in of_rank])
    assert torch.equal(targets.sort().values, everything.sort().values)


def test_invalid_settings_are_refused_by_name():
    cases = [
        (lambda: TextModule("pydocs"), "did you mean 'pydoc'"),
        (lambda: TextModule(context=500_000), "`context` must not exceed"),
        (lambda: TextWindows(counted(100), 128, 0), "`context` must not exceed .* training tokens, 100, got 128"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


SPECIAL = ["", "\n", "\0", "  two  spaces  ", "e\u0301", "\ufeff", "<|endoftext|>", "\U0001f469\u200d", "a" * 5000]


def test_decoding_inverts_encoding_for_any_text():
    for text in [*SPECIAL, *TEXTS]:
        tokens = TOKENIZER.encode(text)
        assert TOKENIZER.decode(tokens) == text
        assert tokens.ndim == 1 and tokens.dtype == np.int64
        assert tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < TOKENIZER.end
        assert len(tokens) == len(text.encode())


def test_the_end_of_a_document_comes_after_each():
    documents = ["One.", "", "Zwölf."]
    stream = TOKENIZER.stream(documents)
    assert stream.dtype == np.uint16 and (stream == TOKENIZER.end).sum() == 3 and stream[-1] == TOKENIZER.end
    assert TOKENIZER.decode(stream) == "One.Zwölf."
    assert len(stream) == 4 + 0 + 7 + 3
    assert len(TOKENIZER.stream([])) == 0


HELD_OUT_TOPICS = {
    "booleans",
    "break",
    "exprlists",
    "imaginary",
    "import",
    "power",
    "string-methods",
    "truth",
    "typesmapping",
    "typesmodules",
}


def give_python_topics(monkeypatch, topics):
    module = ModuleType("pydoc_data.topics")
    module.topics = topics
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)


def test_every_topic_of_python_is_in_one_part_and_about_a_tenth_of_the_bytes_is_held_out():
    from pydoc_data.topics import topics

    corpus = load_text("pydoc")
    assert corpus["test"] == [topics[name] for name in sorted(HELD_OUT_TOPICS & topics.keys())]
    assert len(corpus["train"]) + len(corpus["test"]) == len(topics)
    size = {split: sum(len(text.encode()) for text in of_split) for split, of_split in corpus.items()}
    assert 0.08 < size["test"] / sum(size.values()) < 0.13
    assert size["train"] > 300_000


def test_a_python_without_topics_is_refused_with_an_alternative(monkeypatch):
    for topics in ({}, {"import": "Held out."}, {"compound": "Trained on."}):
        give_python_topics(monkeypatch, topics)
        with pytest.raises(ValueError, match=r"topics held out.*text_file"):
            load_text("pydoc")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ImportError, match=r"pydoc_data.*text_file"):
        load_text("pydoc")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_last_tenth_of_a_file_is_held_out_from_a_line_on_and_nothing_is_changed(tmp_path, end):
    text = end.join(f"line {n}: Ä" for n in range(1000))
    path = tmp_path / "a.txt"
    path.write_bytes(f"\ufeff{text}".encode())
    corpus = load_text("text_file", path)
    (train,), (test,) = corpus["train"], corpus["test"]
    assert train + test == text and train.endswith(end) and test.startswith("line ")
    assert 0.09 < len(test) / len(text) <= 0.1
    path.write_bytes(b"one line " * 10)
    assert load_text("text_file", path) == {"train": ["one line " * 9], "test": ["one line "]}


def test_a_file_that_does_not_exist_or_has_too_little_text_is_named(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n" * 40)
    (tmp_path / "end.txt").write_text("text" + " " * 40)
    for name in ("empty.txt", "end.txt"):
        with pytest.raises(ValueError, match=rf"`data_root` must have text in its first nine tenths .*{name}"):
            load_text("text_file", tmp_path / name)
    for root, match in (
        (None, "got none"),
        (tmp_path, "is not a file"),
        (tmp_path / "no.txt", r"no\.txt.* not a file"),
    ):
        with pytest.raises(FileNotFoundError, match=match):
            load_text("text_file", root)
