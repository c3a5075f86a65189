"""Reads tutorials, and carries out what they say: in this process with small sizes, or word for word."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
LEFT_OUT = ("takes long", "from PyPI", "with yours")  # how remarks begin behind commands that are not run
REFUSED = "refused"


@dataclass(frozen=True)
class Command:
    """A line to be typed. remark: what stands behind #."""

    words: tuple[str, ...]
    remark: str = ""

    @property
    def script(self) -> str:
        """`train`, `plan`, ... of `python scripts/train.py`; else the first words."""
        return Path(self.words[1]).stem if self.words[0] == "python" else self.words[0]


def blocks(text: str) -> Iterator[str]:
    """The indented blocks of a page, without their indent."""
    block: list[str] = []
    for line in [*text.splitlines(), "end"]:
        if line.startswith("    ") or (block and not line.strip()):
            block.append(line)
            continue
        if any(b.strip() for b in block):
            yield textwrap.dedent("\n".join(block)).strip()
        block = []


def steps(name: str) -> Iterator[Command | str | dict[str, Any]]:
    """What a tutorial has one do, in order: commands, programs (text), and the file ds_config.json (an object)."""
    for block in blocks((FOLDER / f"{name}.md").read_text(encoding="utf-8")):
        if block.startswith("{"):
            yield json.loads(block)
        elif block.startswith("import "):
            yield block
        else:
            for line in block.splitlines():
                typed, _, remark = line.partition("  # ")
                yield Command(tuple(shlex.split(typed)), remark.strip())


def spec_of(overrides: list[str]) -> Any:
    """What the ranks of a run get. Raises ConfigError as the command would."""
    from partita.config.compose import compose_config, registry_for
    from partita.config.plain import to_plain
    from partita.plan.make import make_plan
    from partita.runtime.spec import RunSpec

    config, job = compose_config(overrides)
    registry = registry_for(())
    planned = make_plan(config, registry)
    planned.raise_problems()
    folder = Path(config.run.dir).absolute()
    return RunSpec(to_plain(planned.config), planned.plan, replace(job, dir=folder), planned.plan.layout.world, registry.blocked)


def work(rank: int, world: int, spec: Any) -> Any:
    """One rank of a run, to its end."""
    from partita.train.run import worker

    return worker(spec)


def stand_in(folder: Path) -> None:
    """A tiny model with tokenizer and chat template in the place of SmolLM2."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(["the quick brown fox of Python's statements"] * 20, trainer)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True, head_dim=4, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
