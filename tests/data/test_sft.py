"""Conversations: what rows say, the text of templates against transformers', which tokens are learnt, and where samples put them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.data.chat import ChatTemplate, RowError, find_template, segments_of
from partita.data.make import make_data
from partita.data.packing import IGNORED
from partita.data.tokenizer import BytesTokenizer
from partita.data.tuning import make_sft
from partita.errors import ConfigError, PartitaError
from partita.plan.plan import Schedule

END = BytesTokenizer.eos
LLAMA = (
    "{{ bos_token }}{% for m in messages %}\n  {%- if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' ~ m.role) }}"
    "{% endif %}\n<|{{ m['role'] }}|>\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie heißt du? "},
    {"role": "assistant", "content": "Partita."},
    {"role": "user", "content": "And\nthen?"},
    {"role": "assistant", "content": " A fugue."},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_text_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", chat_template=LLAMA
    )
    theirs.save_pretrained(tmp_path)
    ours = find_template(_nodes(tokenizer=str(tmp_path)))
    for prompt in (False, True):
        want = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=prompt)
        assert ours.render(TALK, prompt=prompt) == want
    pieces = list(ours.segments(TALK))
    assert "".join(text for text, _ in pieces) == theirs.apply_chat_template(TALK, tokenize=False)
    assert [text for text, learnt in pieces if learnt] == ["Partita.</s>\n", "A fugue.</s>\n"]
    with pytest.raises(RowError, match="no tool"):
        ours.render([{"role": "tool", "content": ""}], prompt=False)


def _nodes(**data: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(data=SimpleNamespace(**{"template": "auto", "tokenizer": "bytes", **data}))


def test_rows_of_all_kinds_say_the_same() -> None:
    template = find_template(_nodes())
    asked, said = TALK[1]["content"], TALK[2]["content"]
    rows = [
        {"messages": TALK[1:3]},
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]},
        {"prompt": TALK[1:2], "completion": TALK[2:3]},
        {"instruction": asked, "input": "", "output": said},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": asked}]}, TALK[2]], "other": 1},
    ]
    want = [(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n", False), (f"{said}<|im_end|>\n", True)]
    assert [segments_of(row, None, template) for row in rows] == [want] * len(rows)
    assert segments_of({"prompt": "2+2=", "response": "4"}, None, template) == [("2+2=", False), ("4", True)]
    assert segments_of({"talk": TALK[1:3]}, "talk", template) == want


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "x"}, "data.column=KEY"),
        ({"messages": "x"}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "no role and content"),
        ({"messages": TALK[:2]}, "no turn is the assistant's"),
        ({"prompt": "x"}, "no text under `completion`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "something else than text"),
    ],
)
def test_rows_that_say_nothing_are_told_with_their_place(row: dict[str, Any], says: str, tmp_path: Path, config) -> None:
    path = write(tmp_path / "talks.jsonl", [{"messages": TALK}, row])
    with pytest.raises(PartitaError, match=rf"talks.jsonl, row 2: .*{says}"):
        make_sft(config(name="sft", path=str(path), sequence=200), BytesTokenizer(), "train")


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    with pytest.raises(RowError, match="in another way"):
        list(ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "it").segments(TALK))


@pytest.mark.parametrize("asked", ["chatmi", "nowhere.jinja"])
def test_a_template_that_is_not_there(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.template.*"):
        find_template(_nodes(template=asked))


# ------------------------------------------------------------------ samples


def talks(count: int) -> list[dict[str, Any]]:
    """Of very different lengths; an answer says how long its question is."""
    return [{"prompt": f"{i}:" + "?" * (i * 7 % 23), "completion": "!" * (1 + i * 5 % 11)} for i in range(count)]


def read(data: Any) -> list[tuple[list[int], list[int], list[int] | None]]:
    """(inputs, labels, documents) of each training sample."""
    batch = data.train.batch(np.arange(len(data.train)), np.arange(len(data.train)))
    documents = batch["documents"].tolist() if "documents" in batch else [None] * len(batch["labels"])
    return list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), documents, strict=True))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_each_answer_is_learnt_once_and_no_question(pack: bool, name: str, tmp_path: Path, config) -> None:
    rows = talks(40)
    made = config(name="sft", path=str(write(tmp_path / name, rows)), sequence=48, pack=pack, validation=0.0)
    data = make_data(made, Schedule(4, 4, 1), 0, 1, BytesTokenizer(), make_sft)
    samples = read(data)
    learnt: list[str] = []
    for inputs, labels, documents in samples:
        word = ""
        for at, label in enumerate(labels):
            if label == IGNORED:
                continue
            if at + 1 < len(inputs):
                assert label == inputs[at + 1]
                assert documents is None or documents[at] == documents[at + 1]
            if label == END:
                learnt.append(word)
                word = ""
            else:
                word += chr(label)
        assert not word
    assert sorted(learnt) == sorted(row["completion"] for row in rows)
    total = sum(len(row["prompt"]) + len(row["completion"]) + 1 for row in rows)
    assert len(samples) == 40 if not pack else total / 48 <= len(samples) <= 1.15 * total / 48
    whole = "".join(chr(t) if t != END else "|" for inputs, *_ in samples for t in inputs)
    assert all(f"{row['prompt']}{row['completion']}" in whole for row in rows)


def test_long_ones_are_cut_and_what_has_nothing_to_learn_is_left_out(tmp_path: Path, config, caplog) -> None:
    rows = [{"prompt": "abcd", "completion": "efghijkl"}, {"prompt": "x" * 20, "completion": "y"}]
    path = str(write(tmp_path / "a.jsonl", rows))
    made = config(name="sft", path=path, sequence=8, validation=0.0)
    data = make_data(made, Schedule(1, 1, 1), 0, 1, BytesTokenizer(), make_sft)
    assert "2 of 2 conversations are longer" in caplog.text
    ((inputs, labels, _),) = read(data)
    assert bytes(inputs) == b"abcdefgh" and bytes(x for x in labels if x >= 0) == b"efgh"
    with pytest.raises(PartitaError, match="larger data"):
        make_sft(config(name="sft", path=path, sequence=4), BytesTokenizer(), "train")
    whole = config(name="sft", path=path, sequence=8, validation=0.0, mask_prompt=False)
    assert (
        sum(
            x >= 0 for _, labels, _ in read(make_data(whole, Schedule(1, 1, 1), 0, 1, BytesTokenizer(), make_sft)) for x in labels
        )
        == 14
    )


def test_validation_by_content_by_name_and_of_a_few(tmp_path: Path, config) -> None:
    def counts(folder: Path, share: float) -> tuple[int, int]:
        made = config(name="sft", path=str(folder), sequence=48, validation=share)
        data = make_data(made, Schedule(1, 1, 1), 0, 1, BytesTokenizer(), make_sft)
        return len(data.train), len(data.validation)

    (tmp_path / "one").mkdir()
    write(tmp_path / "one/a.jsonl", talks(100))
    train, held = counts(tmp_path / "one", 0.2)
    assert train + held == 100 and 5 < held < 40
    write(tmp_path / "one/validation.jsonl", talks(7))
    assert counts(tmp_path / "one", 0.2) == (100, 7)
    (tmp_path / "few").mkdir()
    write(tmp_path / "few/a.jsonl", talks(3))
    assert counts(tmp_path / "few", 1e-9) == (2, 1)
    assert counts(tmp_path / "few", 0.0) == (3, 0)


def test_a_bpe_is_trained_on_conversations_and_limits_are_refused(tmp_path: Path, config) -> None:
    from partita.data.tokenizer import make_bpe

    path = str(write(tmp_path / "a.jsonl", [{"messages": TALK}] * 3))
    made = config(name="sft", path=path, tokenizer="bpe", vocab=300, sequence=64)
    assert "fugue" in make_bpe(made).decode(make_bpe(made).encode("a fugue"))
    with pytest.raises(ConfigError, match=r"data\.limit"):
        make_sft(config(name="sft", path=path, limit=10), BytesTokenizer(), "train")
    with pytest.raises(ConfigError, match="no conversations"):
        make_sft(config(name="sft", path=str(tmp_path / "none")), BytesTokenizer(), "train")


def test_parquet_columns_are_text(tmp_path: Path, config) -> None:
    from partita.data.corpus import make_text

    write(tmp_path / "a.parquet", [{"body": f"text {i}"} for i in range(5)])
    corpus = make_text(config(name="text", path=str(tmp_path), column="body", validation=0.0), BytesTokenizer(), "train")
    assert bytes(t if t < 256 else 124 for t in corpus.tokens.tolist()) == b"text 0|text 1|text 2|text 3|text 4|"
    with pytest.raises(ConfigError, match="one of body"):
        make_text(config(name="text", path=str(tmp_path), column="bodi"), BytesTokenizer(), "train")
