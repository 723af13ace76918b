import json
import random
import sys

import numpy as np
import pytest

from graticule.lab.data.registry import load_text
from graticule.lab.data.text_module import build_tokenizer, list_tokenizers
from graticule.lab.data.tokens import BytePairTokenizer, ByteTokenizer, check_vocabulary

TEXTS = [document.text for document in load_text("pydoc")["train"]][:12]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else BytePairTokenizer.train(TEXTS, 400)


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


def test_decoding_inverts_encoding_for_any_text(tokenizer):
    for text in [*SPECIAL, *TEXTS, *random_texts()]:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokens.ndim == 1 and tokens.dtype == np.int64
        assert tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < tokenizer.end
        assert tokenizer.bytes_of(tokens) == len(text.encode())


def test_bytes_are_their_own_tokens_and_pairs_come_after_them():
    text = "AÄ\n"
    assert ByteTokenizer().encode(text).tolist() == [65, 0xC3, 0x84, 10]
    assert ByteTokenizer().vocab_size == 257 and ByteTokenizer().end == 256
    assert BytePairTokenizer([]).encode(text).tolist() == [65, 0xC3, 0x84, 10]
    joined = BytePairTokenizer([(ord("a"), ord("b")), (256, ord("c"))])
    assert joined.encode("abcab a").tolist() == [257, 256, 32, 97]
    assert joined.lengths.tolist() == [1] * 256 + [2, 3, 1]


def test_the_end_of_a_document_comes_after_each_and_counts_one_byte_with_every_tokenizer(tokenizer):
    documents = ["One.", "", "Zwölf."]
    stream = tokenizer.stream(documents)
    assert stream.dtype == np.uint16 and (stream == tokenizer.end).sum() == 3 and stream[-1] == tokenizer.end
    assert tokenizer.decode(stream) == "One.Zwölf."
    assert tokenizer.bytes_of(stream) == 4 + 0 + 7 + 3
    assert len(tokenizer.stream([])) == 0


def test_tokens_that_are_not_utf8_are_decoded_with_replacement_characters(tokenizer):
    assert tokenizer.decode([65, 0xC3, 66, tokenizer.end]) == "A\ufffdB"
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"`tokens` must be from 0 to {tokenizer.end}, got {token}"):
            tokenizer.decode([token])


def test_half_of_a_surrogate_pair_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("\ud800")


def test_pairs_make_text_shorter():
    tokenizer = BytePairTokenizer.train(TEXTS, 400)
    assert tokenizer.vocab_size == 400 == len(tokenizer.lengths)
    text = "".join(TEXTS)
    assert len(tokenizer.encode(text)) < 0.6 * len(text.encode())


def test_training_leaves_nothing_to_chance():
    # the library counts in parallel, in tables whose order differs each time
    assert len({BytePairTokenizer.train(TEXTS, 800).fingerprint for _ in range(5)}) == 1


def test_a_saved_tokenizer_is_the_same_when_it_is_loaded(tmp_path):
    trained = BytePairTokenizer.train(TEXTS, 400)
    path = trained.save(tmp_path / "new" / "tokenizer.json")
    for loaded in (BytePairTokenizer.load(path), build_tokenizer(str(path), [])):
        assert loaded.fingerprint == trained.fingerprint and loaded.merges == trained.merges
        for text in [*SPECIAL, *TEXTS]:
            np.testing.assert_array_equal(loaded.encode(text), trained.encode(text))
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]


def test_two_ways_to_the_same_token_give_it_one_number():
    a, b, c = b"abc"
    tokenizer = BytePairTokenizer([(a, b), (b, c), (256, c), (a, 257)])
    assert tokenizer.vocab_size == 256 + 3 + 1
    assert tokenizer.decode(tokenizer.encode("abcabbc")) == "abcabbc"


def test_fingerprints_differ_where_vocabularies_do_and_the_error_names_both():
    trained = BytePairTokenizer.train(TEXTS, 300)
    others = [ByteTokenizer(), BytePairTokenizer([]), BytePairTokenizer.train(TEXTS[:6], 300), trained]
    assert len({tokenizer.fingerprint for tokenizer in others}) == 4
    check_vocabulary(trained, BytePairTokenizer(trained.merges).fingerprint, "runs/a")
    with pytest.raises(ValueError, match=rf"runs/a, {trained.fingerprint}, got bytes-257-"):
        check_vocabulary(ByteTokenizer(), trained.fingerprint, "runs/a")


def test_a_file_that_is_missing_damaged_or_of_another_kind_is_refused_by_name(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        BytePairTokenizer.load(path)
    BytePairTokenizer([(97, 98)]).save(path)
    good = json.loads(path.read_text())
    bad = {
        "must be JSON": '{"format": ',
        "`format` must be given": json.dumps({"model": {"type": "BPE"}}),
        "must be a saved tokenizer.*`merges.* must be a valid integer": json.dumps(good | {"merges": [[97, "b"]]}),
        "must be a saved tokenizer.*pairs of earlier tokens": json.dumps(good | {"merges": [[97, 256]]}),
        "must be a saved tokenizer.*different pairs": json.dumps(good | {"merges": [[97, 98]] * 2}),
        "must have the vocabulary of": json.dumps(good | {"merges": [[97, 99]]}),
    }
    for message, content in bad.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            BytePairTokenizer.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        BytePairTokenizer.load(path)


def test_a_tokenizer_is_built_by_name_and_arguments_without_effect_are_refused():
    assert list_tokenizers() == ["bytes", "bpe"]
    assert build_tokenizer("bytes", []).vocab_size == 257
    assert build_tokenizer("bpe", TEXTS, 300).vocab_size == 300
    with pytest.raises(ValueError, match="did you mean 'bytes'"):
        build_tokenizer("byte", TEXTS)
    with pytest.raises(ValueError, match="`vocab_size` must be given"):
        build_tokenizer("bpe", TEXTS)
    with pytest.raises(ValueError, match=r"`vocab_size` must be left out.*500"):
        build_tokenizer("bytes", TEXTS, 500)


def test_an_invalid_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"from 257.*got 256"):
        BytePairTokenizer.train(TEXTS, 256)
    with pytest.raises(ValueError, match="at most what the training text gives, 260, got 1000"):
        BytePairTokenizer.train(["abcd"], 1000)
    assert BytePairTokenizer.train(TEXTS, 257).vocab_size == 257


def test_without_the_library_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'-e "\.\[text\]"'):
        BytePairTokenizer.train(TEXTS, 300)
    assert ByteTokenizer().vocab_size == 257
