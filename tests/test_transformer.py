"""The models: shapes, the table of initial distributions, and what a fork imports."""
import pytest
import torch
import torch.nn as nn

import tinymask
from tinymask import Encoder
from tinymask.transformer import GPT, generate, init_weights

pytestmark = pytest.mark.attention


def encoder(**changes):
    settings = dict(vocabulary=2, tokens=15, outputs=1, dim=48, depth=2, heads=3, head_dim=16)
    return Encoder(**(settings | changes))


def test_exported_names():
    assert set(tinymask.__all__) == {
        "Block", "Encoder", "GPT", "MaskedAttention", "Transformer", "ViT", "masked_attention"}
    assert all(hasattr(tinymask, name) for name in tinymask.__all__)


def test_init_table():
    model = init_weights(encoder(dim=256, tokens=200, vocabulary=300), torch.Generator().manual_seed(0))
    assert abs(model.token.weight.std() - 1.0) < 0.02
    assert abs(model.position.std() - 0.3) < 0.01
    covered = {"token.weight", "position"}
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


def test_same_generator_same_weights_whatever_the_global_seed():
    torch.manual_seed(1)
    first = init_weights(encoder(), torch.Generator().manual_seed(5)).state_dict()
    torch.manual_seed(2)
    second = init_weights(encoder(), torch.Generator().manual_seed(5)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("pooling, length", [("mean", 15), ("cls", 16)])
def test_encoder_shapes(pooling, length):
    output, attentions = encoder(pooling=pooling)(torch.zeros(4, 15, dtype=torch.long), return_attention=True)
    assert output.shape == (4, 1) and [a.shape for a in attentions] == [(4, 3, length, length)] * 2
    torch.testing.assert_close(attentions[0].sum(-1), torch.ones(4, 3, length))


def test_mean_pooling_without_positions_ignores_the_order():
    model = init_weights(encoder(), torch.Generator().manual_seed(0), position_std=0.0)
    ids = torch.randint(2, (8, 15), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(ids), model(ids.flip(1)), atol=1e-5, rtol=1e-5)


def test_parameter_count():
    """48 wide, 2 layers: each 4 (48 48 + 48) + 48 192 + 192 + 192 48 + 48 + 4 48 = 28,272 (by hand)."""
    model = encoder()
    blocks = sum(p.numel() for p in model.transformer.blocks.parameters())
    assert blocks == 2 * 28_272
    assert sum(p.numel() for p in model.parameters()) == blocks + 2 * 48 + 15 * 48 + 2 * 48 + 49


def test_bad_pooling():
    with pytest.raises(ValueError, match="pooling"):
        encoder(pooling="max")


def test_encoder_without_pooling_reads_each_token():
    model = init_weights(encoder(pooling="none", outputs=10), torch.Generator().manual_seed(0))
    ids = torch.randint(2, (4, 15), generator=torch.Generator().manual_seed(1))
    output = model(ids)
    assert output.shape == (4, 15, 10)
    mean = encoder(outputs=10)
    mean.load_state_dict(model.state_dict())
    torch.testing.assert_close(mean(ids), output.mean(dim=1))  # the head is linear


def test_gpt_sees_the_past_only_and_takes_shorter_inputs():
    model = init_weights(GPT(7, 9, 16, 2, 2), torch.Generator().manual_seed(0))
    model.transformer.blocks[0].attention.set_mask(torch.randn(9, 9))
    ids = torch.randint(7, (3, 9), generator=torch.Generator().manual_seed(1))
    logits = model(ids)
    assert logits.shape == (3, 9, 7)
    torch.testing.assert_close(model(ids[:, :5]), logits[:, :5])
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 7
    changed = (model(other) != logits).any(dim=-1).any(dim=0)
    assert changed.tolist() == [False] * 5 + [True] * 4


def small_gpt(**options):
    model = GPT(11, 5, 16, 2, 2, **options)
    return init_weights(model, torch.Generator().manual_seed(0))


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
    with torch.no_grad():
        share = (model(ids[:1])[0, -1] / 2).softmax(-1)
    free = generate(model, ids.repeat(20, 1), 1, 2.0, None, torch.Generator().manual_seed(5))[:, 1]
    assert torch.allclose(free.bincount(minlength=11) / 6000, share, atol=0.03)


@pytest.mark.parametrize("temperature", [1e-300, 1e-42, 1e6])
def test_generation_at_any_temperature(temperature):
    model = init_weights(GPT(5, 4, 8, 1, 2), torch.Generator().manual_seed(0))
    start, draws = torch.zeros(1, 1, dtype=torch.long), torch.Generator().manual_seed(0)
    got = generate(model, start, 6, temperature, generator=draws)
    assert got.shape == (1, 7)
    if temperature < 1:
        assert torch.equal(got, generate(model, start, 6, 0))


def test_dropout_is_off_in_evaluation():
    model, ids = small_gpt(dropout=0.5), torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids)) and torch.equal(model(ids), small_gpt()(ids))
