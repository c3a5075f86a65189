"""Tokenizers and the size of the vocabulary."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.tokenizer import (
    BytesTokenizer,
    FileTokenizer,
    IdsTokenizer,
    Tokenizer,
    make_file,
    make_tokenizer,
    train_bpe,
    vocab_size,
)
from partita.errors import ConfigError, PartitaError

texts = st.text(max_size=60)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["the cat sat on the mat, the dog sat on the log. " * 20], 290, path)
    return path


@given(text=texts)
def test_bytes_round_trip(text):
    tokenizer = BytesTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [t.tolist() for t in tokenizer.encode_all([text, "a"])] == [tokenizer.encode(text).tolist(), [97]]


def test_bytes_specials():
    tokenizer = BytesTokenizer()
    assert tokenizer.decode([104, 256, 105, 257, 259]) == "hi"
    assert tokenizer.decode([0xE2, 0x82]) == "�"
    assert max(tokenizer.special) < tokenizer.vocab_size == 260


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_bpe_round_trip(trained, text):
    tokenizer = FileTokenizer(trained)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_all([text])[0].tolist() == tokenizer.encode(text).tolist()


def test_bpe_merges_and_specials(trained):
    tokenizer = FileTokenizer(trained, size=500)
    assert tokenizer.encode("the cat sat").size < 9
    assert (tokenizer.eos, tokenizer.mask, tokenizer.special, tokenizer.vocab_size) == (0, 1, (0, 1, 2), 500)
    assert tokenizer.decode([0, *tokenizer.encode("cat"), 499]) == "cat"


def test_all_keep_the_protocol(trained):
    assert all(isinstance(t, Tokenizer) for t in (BytesTokenizer(), IdsTokenizer(9), FileTokenizer(trained)))
    assert len({t.fingerprint for t in (BytesTokenizer(), IdsTokenizer(9), IdsTokenizer(8), FileTokenizer(trained))}) == 4


def test_a_folder_tells_its_end_token(trained, tmp_path, config):
    (tmp_path / "tokenizer.json").write_text(trained.read_text())
    made = config(tokenizer=str(tmp_path))
    assert make_file(made).eos == 0
    for end in ("<|pad|>", {"content": "<|pad|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        assert make_tokenizer(made).eos == 2
    assert vocab_size(made) == FileTokenizer(trained).vocab_size


def test_ids():
    tokenizer = IdsTokenizer(100)
    assert tokenizer.encode("5 and 7, 300").tolist() == [5, 7]
    assert tokenizer.decode([5, 99]) == "5 99"
    assert tokenizer.encode("no number").tolist() == [0] and tokenizer.eos is None


@pytest.mark.parametrize(
    ("vocab", "data", "expected"),
    [
        (None, {}, 260),
        (512, {}, 512),
        (None, {"tokenizer": "bpe", "vocab": 1000}, 1000),
        (None, {"tokenizer": "ids", "vocab": 77}, 77),
        (99, {"tokenizer": "ids"}, 99),
        (100, {"name": "tokens"}, 100),
    ],
)
def test_vocabulary_without_training(config, vocab, data, expected):
    assert vocab_size(config(model_vocab=vocab, **data)) == expected


@pytest.mark.parametrize(
    ("vocab", "data", "message"),
    [
        (200, {}, r"model\.vocab: 200 entries, but data\.tokenizer=bytes has 260"),
        (0, {}, r"model\.vocab: 0"),
        (None, {"tokenizer": "bpe", "vocab": 100}, r"data\.vocab: 100 .*\n.*259"),
        (None, {"tokenizer": "bites"}, r"data\.tokenizer: 'bites' is neither a name nor a file"),
        (None, {"tokenizer": "ids", "vocab": 1}, r"data\.vocab: 1 "),
    ],
)
def test_mistakes(config, vocab, data, message):
    with pytest.raises(ConfigError, match=message):
        vocab_size(config(model_vocab=vocab, **data))


def test_damaged_files(tmp_path, config):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in"):
        make_file(config(tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(PartitaError, match=r"tokenizer\.json is not a tokenizer\.json"):
        make_file(config(tokenizer=str(tmp_path)))
    with pytest.raises(ConfigError, match="bpe is trained on text"):
        make_tokenizer(config(name="tokens", tokenizer="bpe"))
