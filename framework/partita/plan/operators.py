"""Which operators' outputs a block keeps: names of groups, or shell patterns on the names of torch.ops.aten."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

GROUPS = {
    # products with weights; those of two activations (bmm) are larger than what goes into them
    "matmul": ("mm", "addmm", "_scaled_mm"),
    "attention": ("_scaled_dot_product_*attention*", "_flash_attention_forward", "_efficient_attention_forward"),
}
ATTENTION = "_scaled_dot_product_flash_attention"  # what stands for fused attention where a model is traced


def keeps(name: str, operators: Sequence[str]) -> bool:
    """Whether the output of the operator of that name (`addmm`) is kept."""
    return any(fnmatchcase(name, p) for given in operators for p in GROUPS.get(given, (given,)))
