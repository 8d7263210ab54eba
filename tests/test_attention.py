"""Masked attention against F.scaled_dot_product_attention, hand-computed cases and its own rules."""
import doctest
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tinymask import GPT, Encoder, MaskedAttention, ViT, attention, init_weights, masked_attention, masks
from tinymask.inits import INITS, set_prior

pytestmark = pytest.mark.attention


def heads_of(seed, tokens=6, heads=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, tokens, 4, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("squash", [True, False])
@pytest.mark.parametrize("shape", [None, (6, 6), (3, 6, 6)])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_sdpa_with_the_same_bias(shape, causal, squash):
    query, key, value = heads_of(0)
    mask = None if shape is None else 5 * torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    bias = torch.zeros(3, 6, 6).double()
    if mask is not None:
        bias = (F.logsigmoid(mask) if squash else mask).expand(3, 6, 6)
    if causal:
        bias = bias.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
    torch.testing.assert_close(masked_attention(query, key, value, mask, causal, squash=squash), expected)


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


def test_queries_of_another_sequence():
    query, key, value = heads_of(3)
    mask = torch.randn(4, 6, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(query[:, :, :4], key, value, attn_mask=F.logsigmoid(mask)[None, None])
    torch.testing.assert_close(masked_attention(query[:, :, :4], key, value, mask), expected)


@pytest.mark.parametrize("logit", [-1e4, -120.0, 0.0, 120.0, 1e4])
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_logits_stay_finite_both_ways(logit, causal):
    query, key, value = (t.requires_grad_() for t in heads_of(3, dtype=torch.float32))
    mask = torch.zeros(6, 6)
    mask[::2, :4] = logit  # with causality row 0 is closed throughout
    mask.requires_grad_()
    output = masked_attention(query, key, value, mask, causal)
    output.square().sum().backward()
    assert all(t.isfinite().all() for t in (output, query.grad, key.grad, value.grad, mask.grad))
    assert mask.grad.abs().sum() > 0


def test_causality():
    layer = MaskedAttention(8, 2, mask=torch.randn(5, 5), causal=True)
    x = torch.randn(1, 5, 8)
    changed = x.clone()
    changed[0, 3] += 1
    before, after = layer(x), layer(changed)
    assert torch.equal(before[0, :3], after[0, :3]) and not torch.equal(before[0, 3:], after[0, 3:])


def test_the_module_is_the_formula_on_its_projections_head_by_head():
    layer, x = MaskedAttention(6, 2, head_dim=4, mask=torch.randn(2, 5, 5)), torch.randn(3, 5, 6)
    mixed = []
    for head, part in enumerate((slice(0, 4), slice(4, 8))):
        q, k, v = (x @ p.weight[part].T + p.bias[part] for p in (layer.query, layer.key, layer.value))
        weights = (q @ k.transpose(1, 2) / 2 + layer.mask[head].sigmoid().log()).softmax(-1)
        torch.testing.assert_close(layer.weights(x)[:, head], weights)
        mixed.append(weights @ v)
    torch.testing.assert_close(layer(x), torch.cat(mixed, dim=-1) @ layer.out.weight.T + layer.out.bias)


def test_shorter_inputs_use_the_corner_of_a_causal_mask_and_are_refused_by_others():
    mask = torch.randn(2, 5, 5)
    layer, x = MaskedAttention(8, 2, mask=mask, causal=True), torch.randn(1, 3, 8)
    short = MaskedAttention(8, 2, mask=mask[:, :3, :3], causal=True)
    short.load_state_dict({**layer.state_dict(), "mask": mask[:, :3, :3]})
    torch.testing.assert_close(layer(x), short(x))
    for causal, tokens in ((False, 3), (False, 6), (True, 6)):
        with pytest.raises(ValueError, match=f"{tokens} tokens, the mask is for 5"):
            MaskedAttention(8, 2, mask=mask, causal=causal)(torch.randn(1, tokens, 8))


@pytest.mark.parametrize("mask, words", [
    (torch.ones(6, 6, dtype=torch.bool), "floating point"), (torch.ones(6, 6, dtype=torch.long), "floating point"),
    (torch.zeros(5, 5), r"shape \(5, 5\)"), (torch.zeros(6, 5), "shape"), (torch.zeros(4, 6, 6), "shape")])
def test_masks_of_another_kind_or_shape_are_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        masked_attention(*heads_of(6), mask)
    if mask.shape != (5, 5):
        with pytest.raises(ValueError, match=words):
            MaskedAttention(6, 3, mask=mask)


def hard(*closed):
    mask = torch.zeros(4, 4)
    for entry in closed:
        mask[entry] = -math.inf
    return mask


@pytest.mark.parametrize("mask, learnable, causal, words", [
    (torch.full((4, 4), math.nan), True, False, "NaN or"), (torch.full((4, 4), math.inf), True, False, "NaN or"),
    (hard((2, 1)), True, False, "learnable=False"), (hard(1), False, False, "without any open entry"),
    (hard((0, 0)), False, True, "without any open entry"), (hard() - 1.1e4, True, False, "half precision")])
def test_values_are_looked_at_where_a_mask_is_set(mask, learnable, causal, words):
    layer = MaskedAttention(4, 1, causal=causal)
    with pytest.raises(ValueError, match=words):
        layer.set_mask(mask, learnable)
    assert layer.mask is None


def test_a_hard_mask_removes_a_pair_and_is_not_trained():
    layer = MaskedAttention(4, 1)
    layer.set_mask(hard((2, 1), (0, 0)), learnable=False)
    weights = layer.weights(torch.randn(2, 4, 4))
    assert (weights[:, 0, 2, 1] == 0).all() and weights.isfinite().all() and not layer.mask.requires_grad


def test_a_mask_that_diverged_shows_in_the_output():
    layer = MaskedAttention(6, 1, mask=torch.zeros(6, 6))
    layer.mask.data[2, 2] = math.nan
    assert layer(torch.randn(1, 6, 6)).isnan().any()


def test_set_mask_takes_a_copy():
    mask = torch.zeros(4, 4)
    layer = MaskedAttention(4, 1, mask=mask)
    mask += 1
    assert (layer.mask == 0).all() and layer.mask.requires_grad


@pytest.mark.parametrize("whole", [True, False])
def test_masks_stay_finite_in_half_precision(whole):
    layer = MaskedAttention(4, 1, mask=torch.full((5, 5), -1e4))
    layer, x = (layer.half(), torch.randn(1, 5, 4).half()) if whole else (layer, torch.randn(1, 5, 4))
    with torch.autocast("cpu", torch.float16, enabled=not whole):
        output = layer(x)
    assert output.dtype == torch.float16 and output.isfinite().all()


def test_bfloat16_under_autocast_follows_float32():
    layer, x = MaskedAttention(32, 4, mask=5 * torch.randn(4, 9, 9)), torch.randn(3, 9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(x)
    torch.testing.assert_close(half.float(), layer(x), atol=2e-2, rtol=2e-2)


def test_what_a_mask_means_is_saved_with_it():
    """A plain bias that is loaded into a layer made for M computes what it did: .95 stays .95."""
    layers = [MaskedAttention(4, 2) for _ in range(3)]
    for layer, init in zip(layers, ("bias", "mask", "mask")):
        set_prior(layer, INITS[init], 3 * torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(1, 3, 4)
    bias, other, same = layers
    other.load_state_dict(bias.state_dict())
    assert torch.equal(other(x), bias(x)) and not other.squash
    other.load_state_dict(same.state_dict())
    assert torch.equal(other(x), same(x)) and other.squash


def test_masks_are_found_by_type_not_by_name():
    model = Encoder(vocabulary=2, tokens=4, outputs=1, dim=8, depth=2, heads=2)
    model.mask = torch.nn.Parameter(torch.zeros(3))  # a fork's own
    model.transformer.blocks[1].attention.set_mask(torch.zeros(4, 4))
    assert list(masks(model)) == ["transformer.blocks.1.attention.mask"]
    assert masks(model)["transformer.blocks.1.attention.mask"] is model.transformer.blocks[1].attention.mask
    assert list(masks(MaskedAttention(4, 1, mask=torch.zeros(2, 2)))) == ["mask"]


def test_dim_must_be_divisible_unless_head_dim_is_given():
    for heads in (3, 0):
        with pytest.raises(ValueError, match="not a multiple"):
            MaskedAttention(10, heads)
    assert MaskedAttention(10, 3, head_dim=7)(torch.randn(1, 2, 10)).shape == (1, 2, 10)


def small_models():
    """(model, its input): one of each, with masks; the GPT reads less than its block."""
    draws = torch.Generator().manual_seed(0)
    sizes = dict(dim=8, depth=2, heads=2)
    ids = torch.randint(5, (2, 4), generator=draws)
    made = [(Encoder(vocabulary=5, tokens=4, outputs=1, **sizes), ids, 4),
            (GPT(vocabulary=5, block=6, **sizes), ids, 6),
            (ViT(side=8, patch=4, classes=3, **sizes), torch.randn(2, 3, 8, 8, generator=draws), 5)]
    for model, _, tokens in made:
        init_weights(model, draws)
        for block in model.transformer.blocks:
            block.attention.set_mask(torch.randn(2, tokens, tokens, generator=draws))
    return [(model.eval(), inputs) for model, inputs, _ in made]


@pytest.mark.parametrize("number", range(3))
def test_models_compile_and_export(number):
    model, inputs = small_models()[number]
    expected = model(inputs)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(inputs), expected)
    torch.testing.assert_close(torch.export.export(model, (inputs,)).module()(inputs), expected)


def test_vmap_over_masks():
    query, key, value = heads_of(8)
    several = torch.randn(5, 6, 6, dtype=torch.float64)
    together = torch.vmap(lambda mask: masked_attention(query, key, value, mask))(several)
    torch.testing.assert_close(together, torch.stack([masked_attention(query, key, value, mask) for mask in several]))


def test_models_build_on_the_meta_device():
    with torch.device("meta"):
        for model, inputs in small_models():
            assert model(inputs.to("meta")).is_meta and len(masks(model)) == 2


def test_module_works_when_copied_out_alone(tmp_path):
    source = Path(attention.__file__).read_text(encoding="utf-8")
    (tmp_path / "borrowed.py").write_text(source, encoding="utf-8")
    code = ("import torch, borrowed; print(borrowed.MaskedAttention(8, 2, mask=torch.zeros(3, 3))"
            "(torch.ones(1, 3, 8)).shape)")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([1, 3, 8])", done.stderr


def test_examples_in_the_docstrings():
    assert doctest.testmod(attention).failed == 0
