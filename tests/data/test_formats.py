"""Token files: Megatron pairs, raw files, and what is wrong with damaged ones."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.corpus import make_tokens
from partita.data.formats import MAGIC, read_megatron, read_raw, write_megatron
from partita.data.tokenizer import BytesTokenizer, IdsTokenizer
from partita.errors import ConfigError, PartitaError

documents_of_ids = st.lists(st.lists(st.integers(0, 32767), max_size=20), max_size=12)


@given(documents=documents_of_ids, dtype=st.sampled_from(["uint16", "int32", "int64", "int16"]))
@settings(max_examples=40, deadline=None)
def test_megatron_round_trip(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("megatron") / "corpus_text_document"
    write_megatron(prefix, [np.array(d, np.int64) for d in documents], dtype)
    file = read_megatron(prefix.with_suffix(".bin"))
    flat = [token for document in documents for token in document]
    assert file.tokens.tolist() == flat and file.tokens.dtype == np.dtype(dtype)
    full = [d for d in documents if d]
    assert file.starts is not None
    assert file.starts.tolist() == np.cumsum([0, *map(len, full)])[:-1].tolist()


def by_hand(folder, *, code=8, lengths=(2, 1, 3), offsets=(0, 4, 6), marks=(0, 2, 3), magic=MAGIC, version=1, extra=b""):
    """A pair written from the format's description alone: three sequences of uint16, two documents."""
    index = struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(marks))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    index += struct.pack(f"<{len(marks)}q", *marks) + extra
    (folder / "hand.idx").write_bytes(index)
    (folder / "hand.bin").write_bytes(struct.pack("<6H", 5, 6, 7, 8, 9, 10))
    return folder / "hand.idx"


def test_megatron_by_hand(tmp_path):
    file = read_megatron(by_hand(tmp_path))
    assert file.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert file.starts is not None and file.starts.tolist() == [0, 3]


def test_megatron_with_modes(tmp_path):
    assert read_megatron(by_hand(tmp_path, extra=b"\0\0\0")).tokens.size == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"SOMETHING"}, "not a Megatron index"),
        ({"version": 2}, "version 2"),
        ({"code": 7}, "dtype code 7"),
        ({"lengths": (2, 1, 2)}, "describes 5 tokens"),
        ({"offsets": (0, 6, 4)}, "don't lie one after another"),
        ({"lengths": (2, -1, 5)}, "don't lie one after another"),
        ({"marks": (0, 3, 2)}, "document marks"),
        ({"marks": (0, 9)}, "document marks"),
        ({"extra": b"\0"}, "cut short or damaged"),
    ],
)
def test_damaged_indices_say_what_is_wrong(tmp_path, change, message):
    with pytest.raises(PartitaError, match=message) as caught:
        read_megatron(by_hand(tmp_path, **change))
    assert str(tmp_path / "hand") in str(caught.value)


@given(size=st.integers(0, 80))
@settings(deadline=None)
def test_an_index_cut_anywhere_is_refused(tmp_path_factory, size):
    folder = tmp_path_factory.mktemp("cut")
    path = by_hand(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(size, len(whole) - 1)])
    with pytest.raises(PartitaError, match="cut short"):
        read_megatron(path)


def test_data_cut_short_or_missing(tmp_path):
    path = by_hand(tmp_path)
    (tmp_path / "hand.bin").write_bytes(b"\1\0\2")
    with pytest.raises(PartitaError, match="has 3 bytes"):
        read_megatron(path)
    (tmp_path / "hand.bin").unlink()
    with pytest.raises(PartitaError, match=r"can't read .*hand\.bin"):
        read_megatron(path)


def test_raw_files(tmp_path):
    path = tmp_path / "train.bin"
    np.array([1, 70000, 3], np.uint32).tofile(path)
    assert read_raw(path, "uint32").tokens.tolist() == [1, 70000, 3]
    assert isinstance(read_raw(path, "uint32").tokens, np.memmap)
    path.write_bytes(b"\1\0\2")
    with pytest.raises(PartitaError, match=r"3 bytes, which is no multiple of 2"):
        read_raw(path, "uint16")


# ------------------------------------------------------------------ the corpus


def test_one_file_is_split_by_position(tmp_path, config):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "all.bin")
    made = config(name="tokens", path=str(tmp_path / "all.bin"), validation=0.1)
    train, held = (make_tokens(made, BytesTokenizer(), split) for split in ("train", "validation"))
    assert train.tokens.tolist() == list(range(90)) and held.tokens.tolist() == list(range(90, 100))
    assert train.identity != held.identity


def test_documents_stay_whole_where_they_are_known(tmp_path, config):
    write_megatron(tmp_path / "m", [np.arange(40), np.arange(45), np.arange(15)])
    for path in ("m", "m.bin", "m.idx"):
        made = config(name="tokens", path=str(tmp_path / path), validation=0.1)
        held = make_tokens(made, BytesTokenizer(), "validation")
        assert held.tokens.tolist() == list(range(15))
        assert held.starts is not None and held.starts.tolist() == [0]


def test_a_folder_with_both_parts(tmp_path, config):
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(7, dtype=np.uint16).tofile(tmp_path / "val.bin")
    made = config(name="tokens", path=str(tmp_path))
    assert make_tokens(made, BytesTokenizer(), "train").tokens.size == 50
    assert make_tokens(made, BytesTokenizer(), "validation").tokens.size == 7


def test_the_type_follows_the_vocabulary(tmp_path, config):
    np.array([1, 2, 3, 4], np.uint32).tofile(tmp_path / "t.bin")
    made = config(name="tokens", path=str(tmp_path / "t.bin"), tokenizer="ids", vocab=100_000, validation=0.0)
    assert make_tokens(made, IdsTokenizer(100_000), "train").tokens.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None}, r"data\.path: data\.name=tokens needs one"),
        ({"format": "parquet"}, r"data\.format"),
        ({"dtype": "float32"}, r"data\.dtype"),
        ({"limit": 5}, r"data\.limit"),
        ({"validation": 1.0}, r"data\.validation"),
        ({"path": "nowhere.bin"}, r"can't read nowhere\.bin"),
    ],
)
def test_mistakes(tmp_path, config, options, message):
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "t.bin")
    made = config(**{"name": "tokens", "path": str(tmp_path / "t.bin"), **options})
    with pytest.raises(PartitaError, match=message):
        make_tokens(made, BytesTokenizer(), "train")


def test_empty_files_and_folders(tmp_path, config):
    (tmp_path / "e.bin").write_bytes(b"")
    with pytest.raises(PartitaError, match=r"e\.bin is empty"):
        make_tokens(config(name="tokens", path=str(tmp_path / "e.bin")), BytesTokenizer(), "train")
    with pytest.raises(ConfigError, match=r"no train\.bin"):
        make_tokens(config(name="tokens", path=str(tmp_path)), BytesTokenizer(), "train")
