"""pantile.flex_attention against the masks of torch's, in float64."""

from __future__ import annotations

import pantile
import pytest
import torch

flex = pytest.importorskip("torch.nn.attention.flex_attention")
IDS = torch.tensor([[0] * 9 + [1] * 4 + [2] * 17, [5] * 20 + [4] * 10], dtype=torch.int32)


def causal(b, h, q, k):
    return q >= k


def document(b, h, q, k):
    return IDS[b, q] == IDS[b, k]


def window(b, h, q, k):
    return (q - k <= 5) & (k - q <= 2)


def blocks(b, h, q, k):
    return (q // 64 + k // 64) % 2 == 0


CHECKER = torch.tensor([[[[True]]]])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (None, None),
        (pantile.FlexMask(causal=True), [causal]),
        (pantile.FlexMask(window=(5, 2)), [window]),
        (pantile.Documents(IDS), [document]),
        (pantile.FlexMask(causal=True, mask=pantile.Documents(IDS)), [causal, document]),
        (pantile.BlockMask(CHECKER, 64), [blocks]),
    ],
    ids=["none", "causal", "window", "documents", "causal_documents", "blocks"],
)
def test_equals_torch(ours, theirs):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 30, 16), (2, 2, 30, 16), (2, 2, 30, 16)]
    q, k, v = (torch.randn(s, generator=generator).requires_grad_() for s in shapes)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    if theirs is not None:
        visible = flex.create_mask(flex.and_masks(*theirs), 2, None, 30, 30, device="cpu")
        scores = scores.masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1) @ wide[2].repeat_interleave(2, 1)
    o, lse = pantile.flex_attention(
        q, k, v, block_mask=ours, enable_gqa=True, return_lse=True, scale=0.3
    )
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    seed = torch.randn(o.shape, generator=generator)
    grads = torch.autograd.grad(o, (q, k, v), seed)
    others = torch.autograd.grad(expected, wide, seed.double())
    for mine, other in zip(grads, others, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=1e-4, rtol=1e-4)


def test_refusals():
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(pantile.UnsupportedError, match="score_mod is"):
        pantile.flex_attention(x, x, x, lambda s, b, h, q, k: s)
    made = flex.create_block_mask(causal, None, None, 8, 8, device="cpu")
    with pytest.raises(pantile.UnsupportedError, match="block_mask is a BlockMask"):
        pantile.flex_attention(x, x, x, block_mask=made)
    with pytest.raises(ValueError, match="enable_gqa is False"):
        pantile.flex_attention(torch.randn(1, 4, 8, 16), x, x)
    with pytest.raises(TypeError, match="enable_gqa is 1"):
        pantile.flex_attention(x, x, x, enable_gqa=1)
