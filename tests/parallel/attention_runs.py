"""What the ranks of test_context.py run: one attention whose tokens are spread over them."""

from __future__ import annotations

import torch
from torch import nn

from partita.models.common import attend, document_mask
from partita.plan.plan import Layout
from partita.runtime.mesh import Mesh
from partita_parallel.context import AXIS, spread_attention


class _Attention(nn.Module):
    """As far as `spread_attention` looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.mask = attend, document_mask


def attention_parts(
    rank: int, world: int, method: str, kv_heads: int, tokens: int, packed: bool, causal: bool, dtype: str
) -> float:
    """Largest difference, over this rank's tokens, of outputs and gradients from those of whole attention in float32."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(3)
    q, dout = (torch.randn(2, 4, tokens, 8, generator=g) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, tokens, 8, generator=g) for _ in range(2))
    documents = torch.randint(2, (2, tokens), generator=g).cumsum(1) // 3 if packed else None
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = attend(*whole, document_mask(documents, causal), causal)
    expected.backward(dout)
    mesh = Mesh(Layout(context=world), rank, torch.device("cpu"))
    module = _Attention()
    columns = spread_attention(module, method, tokens, mesh.group(AXIS)).columns
    mine = [t[:, :, columns].to(getattr(torch, dtype)).requires_grad_() for t in (q, k, v)]
    mask = module.mask(documents[:, columns] if documents is not None else None, causal)
    got = module.attend(*mine, mask, causal)
    got.backward(dout[:, :, columns].to(got.dtype))
    pairs = [(got, expected), *zip((t.grad for t in mine), (t.grad for t in whole), strict=True)]
    return max(float((a.float() - b[:, :, columns]).abs().max()) for a, b in pairs)
