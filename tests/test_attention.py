"""Masked attention against F.scaled_dot_product_attention, hand-computed cases and its own rules."""
import doctest
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tinymask import MaskedAttention, attention, masked_attention

pytestmark = pytest.mark.attention


def heads_of(seed, tokens=6, heads=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, tokens, 4)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6)])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_sdpa_with_the_same_bias(shape, causal):
    query, key, value = heads_of(0)
    mask = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = F.logsigmoid(mask).expand(3, 6, 6)
    if causal:
        bias = bias.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
    torch.testing.assert_close(masked_attention(query, key, value, mask, causal), expected)


@pytest.mark.parametrize("constant", [-40.0, 0.0, 10.0])
def test_uniform_mask_is_plain_attention(constant):
    query, key, value = heads_of(2)
    mask = torch.full((6, 6), constant, dtype=torch.float64)
    torch.testing.assert_close(masked_attention(query, key, value, mask), masked_attention(query, key, value))


def test_hand_computed_row():
    """Equal scores; mask logits 0 and log 3 give sigmoids 1/2 and 3/4, so the weights are 2/5 and 3/5."""
    x = torch.ones(1, 1, 2, 1)
    mask = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    _, weights = masked_attention(x, x, x, mask, return_attention=True)
    torch.testing.assert_close(weights[0, 0], torch.tensor([[0.4, 0.6], [0.5, 0.5]]))


@pytest.mark.parametrize("logit", [-1e4, -120.0, 0.0, 120.0, 1e4])
def test_extreme_logits_stay_finite_both_ways(logit):
    query, key, value = (t.float().requires_grad_() for t in heads_of(3, dtype=torch.float32))
    mask = torch.zeros(6, 6)
    mask[::2, 1:4] = logit
    mask.requires_grad_()
    output = masked_attention(query, key, value, mask)
    output.square().sum().backward()
    assert all(t.isfinite().all() for t in (output, query.grad, key.grad, value.grad, mask.grad))


def test_causal_and_fully_closed_masks_stay_finite_together():
    query, key, value = heads_of(4, dtype=torch.float32)
    mask = torch.full((6, 6), -1e4, requires_grad=True)
    output = masked_attention(query, key, value, mask, causal=True)
    output.sum().backward()
    assert output.isfinite().all() and mask.grad.isfinite().all()


def test_only_the_mask_trainable():
    query, key, value = heads_of(5)
    mask = torch.zeros(3, 6, 6, dtype=torch.float64, requires_grad=True)
    masked_attention(query, key, value, mask).square().sum().backward()
    assert mask.grad.abs().sum() > 0


def test_causality():
    layer = MaskedAttention(8, 2, mask=torch.randn(5, 5), causal=True)
    x = torch.randn(1, 5, 8)
    changed = x.clone()
    changed[0, 3] += 1
    before, after = layer(x), layer(changed)
    assert torch.equal(before[0, :3], after[0, :3]) and not torch.equal(before[0, 3:], after[0, 3:])


def test_shorter_inputs_use_the_corner_of_the_mask():
    mask = torch.randn(2, 5, 5)
    layer, x = MaskedAttention(8, 2, mask=mask), torch.randn(1, 3, 8)
    short = MaskedAttention(8, 2, mask=mask[:, :3, :3])
    short.load_state_dict({**layer.state_dict(), "mask": mask[:, :3, :3]})
    torch.testing.assert_close(layer(x), short(x))


@pytest.mark.parametrize("mask, words", [
    (torch.ones(6, 6, dtype=torch.bool), "floating point"),
    (torch.ones(6, 6, dtype=torch.long), "floating point"),
    (torch.zeros(5, 5), r"shape \(5, 5\)"),
    (torch.zeros(4, 6, 6), "shape"),
    (torch.full((6, 6), -math.inf), "without any open entry"),
])
def test_bad_masks_are_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        masked_attention(*heads_of(6), mask)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_mask_is_finite_at_first_and_a_diverged_one_shows(value):
    """A mask that an optimiser made NaN shows as NaN in the loss, where a training loop looks for it."""
    layer = MaskedAttention(6, 1, mask=torch.zeros(6, 6))
    with pytest.raises(ValueError, match="NaN or"):
        layer.set_mask(torch.full((6, 6), value))
    layer.mask.data[2, 2] = math.nan
    assert layer(torch.randn(1, 6, 6)).isnan().any()


def test_hard_row_closed_by_causality_is_refused():
    mask = torch.zeros(4, 4)
    mask[0, 0] = -math.inf
    MaskedAttention(4, 1, mask=mask)  # without causality row 0 still sees the others
    with pytest.raises(ValueError, match="without any open entry"):
        MaskedAttention(4, 1, mask=mask, causal=True)


def test_a_trained_or_shortened_hard_mask_is_checked_too():
    mask = torch.zeros(6, 6)
    mask[1] = -math.inf
    with pytest.raises(ValueError, match="without any open entry"):
        masked_attention(*heads_of(6), mask.requires_grad_())
    only_last = torch.full((4, 4), -math.inf)
    only_last[:, 3] = 0
    with pytest.raises(ValueError, match="without any open entry"):
        MaskedAttention(4, 1, mask=only_last)(torch.randn(1, 3, 4))


def test_finite_masks_stay_finite_in_half_precision():
    query, key, value = (t.half() for t in heads_of(8))
    output = masked_attention(query, key, value, torch.full((6, 6), -1e5))
    assert output.dtype == torch.float16 and output.isfinite().all()


def test_hard_mask_removes_a_pair():
    mask = torch.zeros(6, 6)
    mask[2, 4] = -math.inf
    _, weights = masked_attention(*heads_of(7), mask, return_attention=True)
    assert (weights[:, :, 2, 4] == 0).all() and weights.isfinite().all()


def test_dim_must_be_divisible_unless_head_dim_is_given():
    with pytest.raises(ValueError, match="not a multiple"):
        MaskedAttention(10, 3)
    assert MaskedAttention(10, 3, head_dim=7)(torch.randn(1, 2, 10)).shape == (1, 2, 10)


def test_bfloat16_under_autocast_follows_float32():
    layer, x = MaskedAttention(32, 4, mask=5 * torch.randn(4, 9, 9)), torch.randn(3, 9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(x)
    torch.testing.assert_close(half.float(), layer(x), atol=2e-2, rtol=2e-2)


def test_module_works_when_copied_out_alone(tmp_path):
    source = Path(attention.__file__).read_text(encoding="utf-8")
    (tmp_path / "borrowed.py").write_text(source, encoding="utf-8")
    code = ("import torch, borrowed; print(borrowed.MaskedAttention(8, 2, mask=torch.zeros(3, 3))"
            "(torch.ones(1, 3, 8)).shape)")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([1, 3, 8])", done.stderr


def test_examples_in_the_docstrings():
    assert doctest.testmod(attention).failed == 0
