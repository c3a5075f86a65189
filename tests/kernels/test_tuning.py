"""Tiles: the default without tuning, measuring once, what is kept on disk, ranks that measure at once, broken files."""

from __future__ import annotations

import json
import time

import pytest
import torch

from partita_kernels import tuning

X = torch.zeros(3, dtype=torch.bfloat16)
DEFAULT, FAST, BROKEN = (128, 64), (64, 64), (256, 256)


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_NATIVE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "device_name", lambda device: "a device")
    yield
    tuning.choose("default")


def launches(seen):
    def launch(tile):
        seen.append(tile)
        if tile == BROKEN:
            raise RuntimeError("out of resource: shared memory")
        time.sleep(0 if tile == FAST else 0.005)

    return launch


def ask(sizes=(100, 64), seen=None):
    return tuning.tile("k", X, sizes, DEFAULT, [BROKEN, FAST, DEFAULT], launches([] if seen is None else seen))


def test_without_tuning_nothing_is_read_or_launched(tmp_path):
    seen = []
    tuning.path().write_text(json.dumps({"a device": {"k bfloat16 128x64": FAST}}))
    assert ask(seen=seen) == DEFAULT
    assert seen == []


def test_the_fastest_is_kept_for_a_class_of_shapes():
    seen = []
    with tuning.tuning("tune"):
        assert ask(seen=seen) == FAST
        assert set(seen) == {DEFAULT, FAST, BROKEN}
        del seen[:]
        assert ask((65, 33), seen) == FAST  # the same class
        assert seen == []
    assert json.loads(tuning.path().read_text()) == {"a device": {"k bfloat16 128x64": list(FAST)}}
    with tuning.tuning("tuned"):
        assert ask(seen=seen) == FAST
        assert ask((100, 65), seen) == DEFAULT  # another one, and nothing is measured
        assert seen == []
    assert ask() == DEFAULT


def test_the_first_of_several_ranks_decides():
    assert tuning.write("a device", "key", (1, 2)) == [1, 2]
    assert tuning.write("a device", "key", (3, 4)) == [1, 2]
    assert tuning.write("another", "key", (5,)) == [5]
    assert tuning.write("a device", "more", (6,)) == [6]
    assert json.loads(tuning.path().read_text()) == {"a device": {"key": [1, 2], "more": [6]}, "another": {"key": [5]}}


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="no tuning mode 'fast'"):
        tuning.choose("fast")
    tuning.path().write_text("{")
    with tuning.tuning("tuned"), pytest.raises(ValueError, match=r"tiles\.json is no table"):
        ask()
    with pytest.raises(RuntimeError, match="out of resource"):
        tuning.measure(launches([]), [BROKEN], X.device)
