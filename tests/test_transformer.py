"""The models: shapes, the table of initial distributions, generation, optimiser groups, and what a fork imports."""
import pytest
import torch
import torch.nn as nn

import tinymask
from tinymask import GPT, Encoder, Transformer, generate, init_weights, parameter_groups
from tinymask.persistence import attention_maps
from tinymask.transformer import parameter_counts

pytestmark = pytest.mark.attention


def encoder(**changes):
    return Encoder(**(dict(vocabulary=2, tokens=15, outputs=1, dim=48, depth=2, heads=3, head_dim=16) | changes))


def small_gpt(**changes):
    model = GPT(**(dict(vocabulary=11, block=5, dim=16, depth=2, heads=2) | changes))
    return init_weights(model, torch.Generator().manual_seed(0))


def test_exported_names():
    assert set(tinymask.__all__) == {
        "Block", "Encoder", "GPT", "MaskedAttention", "Transformer", "ViT", "generate", "init_weights",
        "masked_attention", "masks", "parameter_groups"}
    assert all(hasattr(tinymask, name) for name in tinymask.__all__)


def test_init_table():
    model = encoder(dim=256, tokens=200, vocabulary=300, pooling="cls")
    for p in model.parameters():
        nn.init.constant_(p, 7.0)  # nothing is left as it was
    init_weights(model, torch.Generator().manual_seed(0))
    assert abs(model.token.weight.std() - 1.0) < 0.02 and abs(model.token.weight.mean()) < 0.02
    assert abs(model.position.std() - 0.3) < 0.01 and abs(model.cls.std() - 0.3) < 0.05
    covered = {"token.weight", "position", "cls"}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            assert module.weight.abs().max() <= bound
            assert abs(module.weight.std() * 3**0.5 / bound - 1) < (0.1 if module.out_features == 1 else 0.02)
            assert (module.bias == 0).all()
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all()
        else:
            continue
        covered |= {f"{name}.weight", f"{name}.bias"}
    assert covered == {name for name, _ in model.named_parameters()}  # the table leaves nothing out
    patch = init_weights(tinymask.ViT(side=16, patch=8, classes=2), torch.Generator().manual_seed(0)).patch
    assert 0.95 * 192**-0.5 < patch.weight.abs().max() <= 192**-0.5 and patch.bias.abs().sum() == 0  # 3 x 8 x 8 inputs


def test_same_generator_same_weights_whatever_the_global_seed():
    states = []
    for seed, own in ((1, 5), (2, 5), (2, 6)):
        torch.manual_seed(seed)
        states.append(init_weights(encoder(), torch.Generator().manual_seed(own), 0.5, 0.1).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["token.weight"], states[2]["token.weight"])
    assert states[0]["token.weight"].std() == pytest.approx(0.5, rel=0.3)
    assert states[0]["position"].std() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("pooling, length", [("mean", 15), ("cls", 16), ("none", 15)])
def test_encoder_shapes_and_what_its_pooling_reads(pooling, length):
    model = init_weights(encoder(pooling=pooling, outputs=10), torch.Generator().manual_seed(0))
    ids = torch.randint(2, (4, 15), generator=torch.Generator().manual_seed(1))
    maps = attention_maps(model, ids)
    assert [a.shape for a in maps] == [(4, 3, length, length)] * 2
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(4, 3, length))
    each = model.head(model.transformer(model.embed(ids)))  # (B, N, outputs); the head is linear
    torch.testing.assert_close(model(ids), {"mean": each.mean(dim=1), "cls": each[:, 0], "none": each}[pooling])


def test_a_block_is_pre_norm_with_two_residual_branches():
    block = tinymask.Block(dim=8, heads=2, mlp_dim=12)
    x = torch.randn(2, 5, 8)
    mixed = x + block.attention(block.norm1(x))
    up, gelu, down = block.mlp
    torch.testing.assert_close(block(x), mixed + down(nn.functional.gelu(up(block.norm2(mixed)))))
    assert isinstance(gelu, nn.GELU) and up.out_features == 12
    whole = Transformer(dim=8, depth=2, heads=2)
    torch.testing.assert_close(whole(x), whole.norm(whole.blocks[1](whole.blocks[0](x))))
    assert whole.blocks[0].mlp[0].out_features == 32


def test_mean_pooling_without_positions_ignores_the_order():
    ids = torch.randint(2, (8, 15), generator=torch.Generator().manual_seed(1))
    for std, same in ((0.0, True), (0.3, False)):
        model = init_weights(encoder(), torch.Generator().manual_seed(0), position_std=std)
        assert torch.allclose(model(ids), model(ids.flip(1)), atol=1e-5, rtol=1e-5) == same


def test_parameter_counts():
    """48 wide, 2 layers: each 4 (48 48 + 48) + 48 192 + 192 + 192 48 + 48 + 4 48 = 28,272 (by hand)."""
    model = encoder()
    total = 2 * 28_272 + 2 * 48 + 15 * 48 + 2 * 48 + 49
    assert parameter_counts(model) == {"total": total, "trainable": total, "mask": 0}
    model.transformer.blocks[0].attention.set_mask(torch.zeros(3, 15, 15))
    model.transformer.blocks[1].attention.set_mask(torch.zeros(15, 15), learnable=False)
    assert parameter_counts(model) == {"total": total + 4 * 225, "trainable": total + 3 * 225, "mask": 4 * 225}


@pytest.mark.parametrize("act, words", [
    (lambda: encoder(pooling="max"), "pooling is 'mean', 'cls' or 'none', got 'max'"),
    (lambda: encoder()(torch.zeros(2, 1, dtype=torch.long)), "1 tokens, this model reads 15"),
    (lambda: encoder()(torch.zeros(2, 16, dtype=torch.long)), "16 tokens, this model reads 15"),
    (lambda: small_gpt()(torch.zeros(2, 6, dtype=torch.long)), "6 tokens, this model reads at most 5"),
    (lambda: tinymask.ViT(side=8, patch=4, classes=2, dim=6)(torch.zeros(1, 3, 4, 4)), "images of 4 pixels")])
def test_what_does_not_fit_is_refused(act, words):
    with pytest.raises(ValueError, match=words):
        act()


def test_gpt_sees_the_past_only_and_takes_shorter_inputs():
    model = small_gpt(vocabulary=7, block=9)
    model.transformer.blocks[0].attention.set_mask(torch.randn(9, 9))
    ids = torch.randint(7, (3, 9), generator=torch.Generator().manual_seed(1))
    logits = model(ids)
    assert logits.shape == (3, 9, 7)
    torch.testing.assert_close(model(ids[:, :5]), logits[:, :5])
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 7
    changed = (model(other) != logits).any(dim=-1).any(dim=0)
    assert changed.tolist() == [False] * 5 + [True] * 4


def test_greedy_generation_takes_the_likeliest_and_goes_on_past_the_block():
    model, ids = small_gpt(), torch.tensor([[1, 2], [3, 4]])
    out = generate(model, ids, 9, temperature=0)
    assert out.shape == (2, 11) and torch.equal(out[:, :2], ids)
    for n in range(2, 11):
        window = out[:, max(0, n - 5):n]
        assert torch.equal(model(window)[:, -1].argmax(-1), out[:, n])


def test_generation_is_repeatable_and_keeps_to_the_top_k():
    model, ids = small_gpt(), torch.tensor([[1]] * 300)
    first, again = (generate(model, ids, 1, 2.0, 3, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, again)
    assert set(first[:, 1].tolist()) == set(model(ids[:1])[0, -1].topk(3).indices.tolist())
    share = (model(ids[:1])[0, -1] / 2).softmax(-1)
    free = generate(model, ids.repeat(20, 1), 1, 2.0, None, torch.Generator().manual_seed(5))[:, 1]
    assert torch.allclose(free.bincount(minlength=11) / 6000, share, atol=0.03)
    for temperature in (1e-300, 1e-42):
        assert torch.equal(generate(model, ids[:1], 6, temperature, generator=torch.Generator().manual_seed(0)),
                           generate(model, ids[:1], 6, 0))
    assert generate(model, ids[:1], 6, 1e6, generator=torch.Generator().manual_seed(0)).shape == (1, 7)


def test_dropout_is_off_in_evaluation():
    model, ids = small_gpt(dropout=0.5), torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids)) and torch.equal(model(ids), small_gpt()(ids))


def test_every_trained_parameter_is_in_one_group_and_the_mask_is_not_decayed():
    model = encoder(tokens=4)
    first, second = (block.attention for block in model.transformer.blocks)
    first.set_mask(torch.full((4, 4), 3.0))
    second.query.requires_grad_(False)
    others, of_masks = parameter_groups(model, lr=1e-3, mask_lr=1e-2, weight_decay=0.1)
    listed = [id(p) for group in (others, of_masks) for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert of_masks["params"] == [first.mask] and of_masks["weight_decay"] == 0 and of_masks["lr"] == 1e-2
    assert others["weight_decay"] == 0.1 and others["lr"] == 1e-3
    assert parameter_groups(model, lr=1, mask_lr=1, weight_decay=0, mask_weight_decay=0.5)[1]["weight_decay"] == 0.5
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([others, of_masks])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # decay alone moves
    optimizer.step()
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name]) and p.abs().sum() > 0}
    assert still == {"transformer.blocks.0.attention.mask", "transformer.blocks.1.attention.query.weight",
                     "transformer.blocks.1.attention.query.bias"}
