"""The measures of persistence against values worked out by hand."""
import doctest
import math

import pytest
import torch

from tinymask import GPT, Encoder, ViT, init_weights, persistence
from tinymask.persistence import (
    attention_maps,
    attention_shift,
    gradient_sizes,
    logit_changes,
    logit_parts,
    mask_drift,
    measures,
    mechanism,
    snapshot,
    support_mass,
)

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
        last = last._replace(query_norms=snapshot(model, inputs).query_norms)
    got = measures(before, last, [support])
    expected = {"support_mass_init": [0.5], "support_mass_final": [1.0], "support_chance": [0.5],
                "attention_shift": 0.5, "mask_drift": 20.0, "query_norm_init": [0.0], "query_norm_final": [5.0]}
    assert got == {name: pytest.approx(value) for name, value in expected.items()}
    assert set(measures(before, before)) == {"attention_shift", "mask_drift", "query_norm_init", "query_norm_final"}


def centred_logs(model, inputs, causal):
    """Row-centred logits, read off the attention itself: log p is the logit less a constant of its row."""
    maps = []
    for attention in attention_maps(model.double(), inputs):
        visible = torch.ones_like(attention).tril() if causal else torch.ones_like(attention)
        logs = torch.where(visible > 0, attention, 1).log()
        maps.append((logs - logs.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)) * visible)
    return maps


@pytest.mark.parametrize("causal, masked, seed", [(False, True, 0), (True, True, 1), (False, False, 2)])
def test_the_three_parts_add_up_to_what_the_attention_shows(causal, masked, seed):
    draws, shape = torch.Generator().manual_seed(seed), dict(vocabulary=3, dim=6, depth=2, heads=2)
    model = GPT(block=4, **shape) if causal else Encoder(tokens=4, outputs=1, **shape)
    init_weights(model, draws).double()
    for block in model.transformer.blocks if masked else []:
        block.attention.set_mask(torch.randn(2, 4, 4, generator=draws, dtype=torch.float64), squash=seed == 0)
    ids = torch.randint(3, (5, 4), generator=draws)
    start, before = logit_parts(model, ids), centred_logs(model, ids, causal)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    for parts, first, last in zip(logit_changes(start, model, ids, causal), before, centred_logs(model, ids, causal)):
        torch.testing.assert_close(parts["mask"] + parts["weights"] + parts["inputs"], last - first)
        torch.testing.assert_close(parts["all"], last - first)
        assert (parts["mask"].abs().max() > 0) == masked


@pytest.mark.parametrize("moved", ["mask", "weights", "inputs"])
def test_each_part_is_what_moved_it(moved):
    """One head of width 1, which reads the first of two columns: +1 of token 0, -1 of token 1."""
    model = Encoder(vocabulary=2, tokens=2, outputs=1, dim=2, depth=1, heads=1, head_dim=1)
    layer, inputs = model.transformer.blocks[0].attention, torch.tensor([[0, 1]])
    with torch.no_grad():
        model.token.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))  # read as (1, -1) and (-1, 1)
        for projection in (layer.query, layer.key):
            projection.weight.copy_(torch.tensor([[1.0, 0.0]]))
            projection.bias.zero_()
        layer.set_mask(torch.zeros(2, 2))
        start = logit_parts(model, inputs)  # logits [[1, -1], [-1, 1]] and log sigmoid(0) all over
        if moved == "mask":
            layer.mask[0, 0] = 1e3  # log sigmoid 0 in place of -log 2: row 0 gains log 2, half of it after centring
        elif moved == "weights":
            layer.query.weight *= 3  # logits [[3, -3], [-3, 3]]
        else:
            model.token.weight[1] = model.token.weight[0]  # both read as +1: logits [[1, 1], [1, 1]]
    (parts,) = logit_changes(start, model, inputs)
    half = math.log(2) / 2
    wanted = {"mask": [[half, -half], [0, 0]], "weights": [[2, -2], [-2, 2]], "inputs": [[-1, 1], [1, -1]]}[moved]
    for name, part in parts.items():
        expected = torch.tensor(wanted) if name in (moved, "all") else torch.zeros(2, 2)
        torch.testing.assert_close(part[0, 0], expected.float(), atol=1e-4, rtol=1e-4)
    found = mechanism(start, model, inputs, [torch.eye(2).flip(0)])["moved"]
    size = {"mask": half / 2**0.5, "weights": 2, "inputs": 1}[moved]
    assert found[moved] == [pytest.approx([size, size], abs=1e-3)] == found["all"]


def test_sizes_of_gradients_and_the_share_of_the_bound():
    """Even attention of 2 tokens: p = 1/2, so 2 p (1 - p) = 1/2 of p_i sigma(-m_j) summed over i, for every pair."""
    model = Encoder(vocabulary=2, tokens=2, outputs=1, dim=4, depth=1, heads=2)
    layer, support, inputs = model.transformer.blocks[0].attention, torch.eye(2), torch.tensor([[0, 1]])
    start = logit_parts(model, inputs)
    assert gradient_sizes(model, [support]) == {"mask": [None], "query": [None], "key": [None]}
    layer.set_mask(torch.zeros(2, 2))
    layer.mask.grad = torch.tensor([[3.0, 1.0], [2.0, 4.0]])
    layer.query.weight.grad = torch.full((4, 4), -2.0)
    sizes = gradient_sizes(model, [support])
    assert sizes["mask"] == [pytest.approx([12.5**0.5, 2.5**0.5], rel=1e-3)] and sizes["query"] == [2.0]
    assert gradient_sizes(model, [torch.tensor([[1.0, 1.0], [0.0, 1.0]])])["mask"] == [[4.0, 2.0]]  # row 0: no prior
    torch.nn.init.zeros_(layer.query.weight)
    torch.nn.init.zeros_(layer.query.bias)
    assert mechanism(start, model, inputs, [support])["bound_share"] == [[0.5, 0.5]]
