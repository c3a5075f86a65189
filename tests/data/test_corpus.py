"""Corpora made from documents: splits, limits, the cache, damaged input."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from partita.data import cache
from partita.data.corpus import CORPORA, make_hf, make_stdlib, make_synthetic, make_text
from partita.data.tokenizer import BytesTokenizer, FileTokenizer, IdsTokenizer, make_bpe, make_tokenizer
from partita.errors import ConfigError, PartitaError

BYTES = BytesTokenizer()


def split_documents(corpus) -> list[str]:
    bounds = [*corpus.starts.tolist(), corpus.tokens.size]
    return [BYTES.decode(corpus.tokens[a:b]) for a, b in itertools.pairwise(bounds)]


def write_texts(folder: Path, count: int = 60) -> list[str]:
    folder.mkdir(exist_ok=True)
    texts = [f"document {i}: {'ä€ ' * (i % 7)}text\n" for i in range(count)]
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    return texts


# ------------------------------------------------------------------ standard library


def test_the_standard_library_is_always_there(config):
    made = config()
    train, held = (make_stdlib(made, BYTES, split) for split in ("train", "validation"))
    total = train.tokens.size + held.tokens.size
    assert 4 << 20 <= total <= (4 << 20) + 500  # the end tokens of the documents come on top
    assert 0.005 < held.tokens.size / total < 0.2
    assert set(split_documents(train)).isdisjoint(split_documents(held))
    assert train.tokens[-1] == BYTES.eos and any("def " in text for text in split_documents(held))


def test_the_limit_counts_bytes_of_text(config):
    corpora = [make_stdlib(config(limit=20_000, validation=0.0), BYTES, split) for split in ("train", "validation")]
    assert int((corpora[0].tokens < 256).sum()) == 20_000
    assert corpora[1].tokens.size == 0
    with pytest.raises(ConfigError, match=r"data\.path"):
        make_stdlib(config(path="here"), BYTES, "train")
    with pytest.raises(ConfigError, match=r"data\.limit: 0"):
        make_stdlib(config(limit=0), BYTES, "train")


# ------------------------------------------------------------------ text


def test_text_files_are_split_by_content(tmp_path, config):
    texts = write_texts(tmp_path / "a")
    made = config(name="text", path=str(tmp_path / "a"), validation=0.3)
    train, held = (split_documents(make_text(made, BYTES, split)) for split in ("train", "validation"))
    assert sorted(train + held) == sorted(texts) and len(held) > 5
    # Renamed files and new ones move no document to the other side.
    (tmp_path / "a" / "000.txt").rename(tmp_path / "a" / "zzz.txt")
    (tmp_path / "a" / "new.txt").write_text("more")
    assert set(held) <= set(split_documents(make_text(made, BYTES, "validation")))
    assert set(train) <= set(split_documents(make_text(made, BYTES, "train")))


def test_a_single_document_is_split_by_position(tmp_path, config):
    (tmp_path / "one.txt").write_text("x" * 900 + "y" * 99)
    made = config(name="text", path=str(tmp_path / "one.txt"), validation=0.1)
    train, held = (make_text(made, BYTES, split) for split in ("train", "validation"))
    assert BYTES.decode(train.tokens) == "x" * 900
    assert BYTES.decode(held.tokens) == "y" * 99 and held.starts.tolist() == [0]


def test_lines_gzip_globs_and_bad_bytes(tmp_path, config):
    (tmp_path / "l.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n')
    with gzip.open(tmp_path / "m.jsonl.gz", "wt") as file:
        file.write('{"body": "three"}\n')
    with gzip.open(tmp_path / "n.txt.gz", "wt") as file:
        file.write("four")
    (tmp_path / "o.txt").write_bytes(b"f\xffive")
    (tmp_path / "empty.txt").write_text("")
    made = config(name="text", path=str(tmp_path), column="body", validation=0.0)
    assert split_documents(make_text(made, BYTES, "train")) == ["one", "two", "three", "four", "f�ive"]
    made = config(name="text", path=str(tmp_path / "*.gz"), column="body", validation=0.0)
    assert split_documents(make_text(made, BYTES, "train")) == ["three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\0\1\2", "a.txt is not a text file"),
        ("a.txt.gz", b"no gzip", r"can't read .*a\.txt\.gz"),
        ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-20], r"can't read .*a\.txt\.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9], r"can't read .*a\.jsonl\.gz"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "line 2 is not JSON"),
        ("a.jsonl", b'{"texts": "x"}', r"data\.column: .*line 1 .*texts"),
        ("a.jsonl", b"[1]", "it is no object"),
    ],
)
def test_damaged_text_names_the_file(tmp_path, config, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PartitaError, match=message) as caught:
        make_text(config(name="text", path=str(tmp_path)), BYTES, "train")
    assert name in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_missing_text(tmp_path, config):
    with pytest.raises(ConfigError, match="no text files at"):
        make_text(config(name="text", path=str(tmp_path / "nothing")), BYTES, "train")
    with pytest.raises(ConfigError, match=r"data\.name=text needs one"):
        make_text(config(name="text"), BYTES, "train")


# ------------------------------------------------------------------ Hugging Face datasets


def test_datasets_on_disk(tmp_path, config):
    datasets = pytest.importorskip("datasets")
    texts = [f"row {i}" for i in range(40)]
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(str(tmp_path / "d"))
    made = config(name="hf", path=str(tmp_path / "d"), column="body", validation=0.2)
    parts = [split_documents(make_hf(made, BYTES, split)) for split in ("train", "validation")]
    assert sorted(parts[0] + parts[1]) == sorted(texts) and all(parts)
    with pytest.raises(ConfigError, match=r"data\.column: .* has no column 'text'\n.*body"):
        make_hf(config(name="hf", path=str(tmp_path / "d")), BYTES, "train")


def test_datasets_with_ids_and_their_own_validation(tmp_path, config):
    datasets = pytest.importorskip("datasets")
    parts = {s: datasets.Dataset.from_dict({"ids": [[1, 2], [i, 9]]}) for i, s in enumerate(("train", "validation"))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    made = config(name="hf", path=str(tmp_path / "d"), column="ids", tokenizer="ids", vocab=10)
    assert make_hf(made, IdsTokenizer(10), "train").tokens.tolist() == [1, 2, 0, 9]
    assert make_hf(made, IdsTokenizer(10), "validation").tokens.tolist() == [1, 2, 1, 9]
    with pytest.raises(PartitaError, match=r"token ids from 0 to 9, outside the vocabulary of 5"):
        make_hf(made, IdsTokenizer(5), "train")


def test_what_is_no_dataset(tmp_path, config):
    pytest.importorskip("datasets")
    with pytest.raises(PartitaError, match="is not a dataset on disk"):
        make_hf(config(name="hf", path=str(tmp_path)), BYTES, "train")
    with pytest.raises(ConfigError, match="is not a folder"):
        make_hf(config(name="hf", path=str(tmp_path / "no")), BYTES, "train")


def test_a_missing_package_names_the_extra(tmp_path, config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(PartitaError, match=r"pip install 'partita\[hf\]'"):
        make_hf(config(name="hf", path=str(tmp_path)), BYTES, "train")


# ------------------------------------------------------------------ synthetic


def test_synthetic_depends_on_the_seed_only(config):
    first = make_synthetic(config(name="synthetic", limit=1000), BYTES, "train")
    again = make_synthetic(config(name="synthetic", limit=1000), BYTES, "train")
    other = make_synthetic(config(name="synthetic", limit=1000, seed=1), BYTES, "train")
    assert np.array_equal(first.tokens, again.tokens) and not np.array_equal(first.tokens, other.tokens)
    assert first.tokens.max() < 256
    held = make_synthetic(config(name="synthetic", limit=1000), BYTES, "validation")
    assert first.tokens.size + held.tokens.size == 1000 and held.tokens.size > 0
    assert set(CORPORA) == {"stdlib", "text", "tokens", "hf", "synthetic"}


# ------------------------------------------------------------------ the cache


def cache_entry(made) -> Path:
    return next(p for p in Path(made.data.cache).glob("corpus-*") if p.is_dir())


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "seal"])
def test_a_damaged_entry_is_made_again(tmp_path, config, damage, caplog):
    write_texts(tmp_path / "a")
    made = config(name="text", path=str(tmp_path / "a"))
    good = make_text(made, BYTES, "train").tokens.tolist()
    file = cache_entry(made) / ("seal.json" if damage == "seal" else "train.bin")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": data[:-4], "flip": data, "seal": b"{"}[damage])
    assert make_text(made, BYTES, "train").tokens.tolist() == good
    assert "is damaged" in caplog.text


def test_a_good_entry_is_not_made_again(tmp_path, config):
    write_texts(tmp_path / "a")
    made = config(name="text", path=str(tmp_path / "a"))
    make_text(made, BYTES, "train")
    stamp = (cache_entry(made) / "train.bin").stat().st_mtime_ns
    make_text(made, BYTES, "validation")
    assert (cache_entry(made) / "train.bin").stat().st_mtime_ns == stamp


def test_rests_of_a_killed_builder_are_removed(tmp_path):
    (tmp_path / "e.tmp-dead").mkdir()
    cache.cached(tmp_path, "e", lambda folder: (folder / "x").write_text("1"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e", "e.lock"]


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise PartitaError("broken input")

    with pytest.raises(PartitaError, match="broken input"):
        cache.cached(tmp_path, "e", build)
    assert [p.name for p in tmp_path.iterdir()] == ["e.lock"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PartitaError, match=r"data\.cache: can't write .*file"):
        cache.cached(tmp_path / "file" / "sub", "e", lambda folder: None)


def test_the_default_folder_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert cache.cache_dir(None) == Path("/some/where/partita")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_dir(None) == Path.home() / ".cache" / "partita"
    assert cache.cache_dir("/x") == Path("/x")


def _slow_build(folder: Path) -> None:
    with (folder.parent / "builds").open("a") as file:
        file.write("built\n")
    time.sleep(0.3)
    (folder / "value").write_text("done")


def _ask(folder: Path) -> None:
    assert (cache.cached(folder, "e", _slow_build) / "value").read_text() == "done"


def test_one_process_builds_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_ask, args=(tmp_path,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "builds").read_text() == "built\n"


# ------------------------------------------------------------------ bpe on the corpus


def test_bpe_is_trained_once_on_the_training_documents(tmp_path, config):
    write_texts(tmp_path / "a")
    made = config(name="text", path=str(tmp_path / "a"), tokenizer="bpe", vocab=300)
    tokenizer = make_bpe(made)
    assert tokenizer.vocab_size == 300 and tokenizer.eos == 0 and tokenizer.mask == 1
    corpus = make_text(made, tokenizer, "train")
    assert corpus.tokens.size < make_text(made, BYTES, "train").tokens.size
    assert "document" in tokenizer.decode(corpus.tokens[:50])
    again = make_tokenizer(made)
    assert isinstance(again, FileTokenizer) and again.fingerprint == tokenizer.fingerprint
    json.loads(next(Path(made.data.cache).glob("bpe-*/tokenizer.json")).read_text())
