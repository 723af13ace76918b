import random

import numpy as np

from graticule.lab.data.registry import load_text
from graticule.lab.data.text_module import ByteTokenizer

TOKENIZER = ByteTokenizer()
TEXTS = [document.text for document in load_text("pydoc")["train"]][:12]


def random_texts(count=300):
    """Return strings of letters, spaces, controls, marks, other scripts and the highest characters, often repeated."""
    source = random.Random(0)
    kinds = [(0, 0x20), (0x20, 0x7F), (0x20, 0x21), (0x80, 0x800), (0x300, 0x370), (0x800, 0xD800), (0xE000, 0x110000)]
    for length in range(count):
        yield "".join(chr(source.randrange(*source.choice(kinds))) * source.choice([1, 1, 3]) for _ in range(length))


SPECIAL = [
    "",
    " ",
    "\n",
    "\r\n",
    "\0",
    "  two  spaces  ",
    "e\u0301 is not \u00e9",
    "\ufeff",
    "<|endoftext|>",
    "<unk>",
    "[UNK] </s>",
    "Ġ Ċ are letters too",
    "\U0001f469\u200d\U0001f4bb",
    "don't, it's",
    "a" * 5000,
]


def test_decoding_inverts_encoding_for_any_text():
    for text in [*SPECIAL, *TEXTS, *random_texts()]:
        tokens = TOKENIZER.encode(text)
        assert TOKENIZER.decode(tokens) == text
        assert tokens.ndim == 1 and tokens.dtype == np.int64
        assert tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < TOKENIZER.end
        assert len(tokens) == len(text.encode())


def test_bytes_are_their_own_tokens():
    text = "AÄ\n"
    assert ByteTokenizer().encode(text).tolist() == [65, 0xC3, 0x84, 10]
    assert ByteTokenizer().vocab_size == 257 and ByteTokenizer().end == 256


def test_the_end_of_a_document_comes_after_each():
    documents = ["One.", "", "Zwölf."]
    stream = TOKENIZER.stream(documents)
    assert stream.dtype == np.uint16 and (stream == TOKENIZER.end).sum() == 3 and stream[-1] == TOKENIZER.end
    assert TOKENIZER.decode(stream) == "One.Zwölf."
    assert len(stream) == 4 + 0 + 7 + 3
    assert len(TOKENIZER.stream([])) == 0
