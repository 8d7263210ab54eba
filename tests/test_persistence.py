"""The measures of persistence against values worked out by hand."""
import doctest
import math

import pytest
import torch

from tinymask import Encoder, ViT, persistence
from tinymask.persistence import attention_maps, attention_shift, mask_drift, measures, snapshot, support_mass

pytestmark = pytest.mark.attention


def test_the_docstring_example():
    assert doctest.testmod(persistence).failed == 0


def test_maps_are_what_each_layer_makes_of_what_it_reads_without_drop_path():
    model = ViT(side=8, patch=4, classes=2, dim=6, depth=3, heads=2, drop_path=0.5)
    images = torch.randn(2, 3, 8, 8)
    first, again = attention_maps(model, images), attention_maps(model, images)
    assert model.training and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    model.eval()
    x = model.embed(images)
    for block, found in zip(model.transformer.blocks, first, strict=True):
        torch.testing.assert_close(found, block.attention.weights(block.norm1(x)))
        x = block(x)
    assert not any(block.attention._forward_pre_hooks for block in model.transformer.blocks)
    assert not attention_maps(model, images)[0].requires_grad and not model.training


def test_support_mass_counts_the_rows_that_have_a_prior():
    attention = torch.tensor([[[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]]])  # (1, 1, 3, 3)
    support = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert support_mass([attention], [support]) == pytest.approx([0.3])  # rows 1 and 2 say nothing
    assert support_mass([attention] * 2, [support, 1 - support]) == pytest.approx([0.3, 0.7])
    assert math.isnan(support_mass([attention], [torch.ones(3, 3)])[0])


def test_support_mass_of_a_causal_model_looks_at_the_past_alone():
    attention = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]).expand(4, 2, 3, 3)
    support = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    assert support_mass([attention], [support], causal=True) == pytest.approx([0.8])  # row 2; the others see no more
    assert support_mass([attention], [support]) == pytest.approx([(1 + 1 + 0.8) / 3])


def test_heads_have_their_own_support():
    attention = torch.stack([torch.eye(2), torch.eye(2).flip(0)])[None]  # head 0: self, head 1: the other
    assert support_mass([attention], [torch.stack([torch.eye(2), torch.eye(2)])]) == pytest.approx([0.5])
    assert support_mass([attention], [torch.stack([torch.eye(2), torch.eye(2).flip(0)])]) == pytest.approx([1.0])


def test_attention_shift_is_0_for_the_same_and_1_for_disjoint_attention():
    same, swapped, half = torch.eye(2)[None, None], torch.eye(2).flip(0)[None, None], torch.full((1, 1, 2, 2), 0.5)
    assert attention_shift([same], [same]) == 0
    assert attention_shift([same, same], [swapped, half]) == pytest.approx((1 + 0.5) / 2)


def test_mask_drift_is_over_the_finite_entries():
    first = torch.tensor([[1.0, -math.inf], [2.0, 3.0]])
    assert mask_drift([first], [first + 0.25]) == pytest.approx(0.25)
    assert mask_drift([], []) is None


def test_measures_of_a_model_whose_mask_was_moved():
    """With W_Q = 0 the mask alone decides: half of the attention on a pair, then (almost) all of it."""
    model = Encoder(vocabulary=2, tokens=2, outputs=1, dim=4, depth=1, heads=1)
    attention, inputs = model.transformer.blocks[0].attention, torch.tensor([[0, 1]])
    torch.nn.init.zeros_(attention.query.weight)
    torch.nn.init.zeros_(attention.query.bias)
    attention.set_mask(torch.zeros(2, 2))
    before, support = snapshot(model, inputs), torch.eye(2).flip(0)
    with torch.no_grad():
        attention.mask += 20 * (2 * support - 1)
        last = snapshot(model, inputs)
        attention.query.weight[0, :2] = torch.tensor([3.0, 4.0])
        last = (*last[:2], snapshot(model, inputs)[2])
    got = measures(before, last, [support])
    expected = {"support_mass_init": [0.5], "support_mass_final": [1.0], "attention_shift": 0.5, "mask_drift": 20.0,
                "query_norm_init": [0.0], "query_norm_final": [5.0]}
    assert got == {name: pytest.approx(value) for name, value in expected.items()}
    assert set(measures(before, before)) == {"attention_shift", "mask_drift", "query_norm_init", "query_norm_final"}
