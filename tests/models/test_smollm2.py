"""SmolLM2-135M, from a folder that examples/smollm2.py has made: in shards on two ranks, LoRA on a paragraph, peft, and the merged model.

PARTITA_SMOLLM2=FOLDER PARTITA_LONG_TESTS=1 python -m pytest tests/models/test_smollm2.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import hf_runs
from pool import run_ranks

from partita.models.export import export_run

FOLDER = Path(os.environ.get("PARTITA_SMOLLM2", ""))
PARAGRAPH = (
    "The Universal Declaration of Human Rights states that all human beings are born free and equal in dignity and rights."
)
IDS = [504, 17115, 14434, 282]  # how it begins
LOSS = 1.70249  # mean over its 21 tokens, by transformers

pytestmark = [
    pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="minutes: PARTITA_LONG_TESTS=1"),
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason="PARTITA_SMOLLM2 names no folder of examples/smollm2.py"),
    pytest.mark.timeout(1200),
]


def test_lora_learns_a_paragraph_and_everyone_can_load_it(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    talks = tmp_path / "talks.jsonl"
    talks.write_text(json.dumps({"prompt": "", "completion": PARAGRAPH}) + "\n")
    common = ("+adapter=lora", "zero=stage3", "parallel.data=2", "data=sft", f"data.path={talks}", f"data.tokenizer={FOLDER}",
              "data.sequence=32", "data.limit=null", "data.validation=0", "train.global_batch=2", "optimizer.lr=0.002",
              "lr_schedule=constant", "lr_schedule.warmup=0")  # fmt: skip
    warm = hf_runs.spec_of(
        ("+adapter=lora", "zero=stage3", "parallel.data=2", "+model.options.model_type=llama"), tmp_path / "warm"
    )
    spec = hf_runs.spec_of((*common, f"model.path={FOLDER}"), tmp_path / "run")
    size = 134_515_008 * 4
    for peak in run_ranks(2, hf_runs.peak_of_loading, warm, spec, timeout=600):
        print(f"{peak / size:.2f} times the model's bytes")
        assert peak < 1.3 * size
    ids = AutoTokenizer.from_pretrained(FOLDER)(PARAGRAPH, return_tensors="pt").input_ids
    assert ids[0, :4].tolist() == IDS
    base = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    before = loss_of(base, ids)
    assert before == pytest.approx(LOSS, rel=1e-4)
    want = run_ranks(2, hf_runs.train_and_save, [spec], ids, timeout=600)[0][0]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run", tmp_path / "merged")).eval()
        torch.testing.assert_close(merged(ids).logits, want, rtol=1e-3, atol=2e-3)
        tuned = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
        torch.testing.assert_close(tuned(ids).logits, want, rtol=1e-3, atol=2e-3)
    after = loss_of(merged, ids)
    print(f"loss {before:.4f} -> {after:.4f}")
    assert after < before - 0.01


@torch.no_grad()
def loss_of(model: Any, ids: torch.Tensor) -> float:
    """Mean over the tokens but the first."""
    return float(model(ids, labels=ids).loss)
