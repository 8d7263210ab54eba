"""The vision transformer and its inits: sizes that are public, structure that each init claims."""
import pytest
import torch
import torch.nn.functional as F

import train_vit
from tinymask import ViT, mask_priors, qk_init
from tinymask.persistence import attention_maps
from tinymask.transformer import drop_branch, init_weights, parameter_counts, sincos

pytestmark = pytest.mark.vit


def vit(**options):
    settings = dict(side=16, patch=4, classes=5, dim=48, depth=3, heads=3) | options
    return init_weights(ViT(**settings), torch.Generator().manual_seed(0))


def test_vit_tiny_has_its_published_size():
    """DeiT-Tiny / timm vit_tiny_patch16_224 with 1,000 classes."""
    model = ViT(side=224, patch=16, classes=1000)
    assert parameter_counts(model)["total"] == 5_717_416 and model.transformer.blocks[0].attention.heads == 3


@pytest.mark.parametrize("pooling, tokens", [("cls", 17), ("mean", 16)])
@pytest.mark.parametrize("positions", ["learned", "sincos"])
def test_shapes(pooling, tokens, positions):
    model = vit(pooling=pooling, positions=positions)
    images = torch.randn(2, 3, 16, 16)
    assert model(images).shape == (2, 5) and attention_maps(model, images)[0].shape == (2, 3, tokens, tokens)
    read = model.transformer(model.embed(images))  # (B, N, D)
    torch.testing.assert_close(model(images), model.head(read[:, 0] if pooling == "cls" else read.mean(dim=1)))
    assert ("position" in dict(model.named_parameters())) == (positions == "learned")


def test_patches_are_rows_of_pixels():
    """The patch layer is a linear map of each patch: compare with the patch cut out by hand."""
    model, image = vit(pooling="mean"), torch.randn(1, 3, 16, 16)
    patch = image[0, :, 4:8, 8:12].flatten()  # second row, third column: token 6
    expected = model.patch.weight.flatten(1) @ patch + model.patch.bias + model.position[6]
    assert torch.allclose(model.embed(image)[0, 6], expected, atol=1e-5)


def test_bad_sizes():
    for options, said in (({"patch": 5}, "multiple of patch"), ({"heads": 5, "dim": 192}, "multiple of heads"),
                          ({"pooling": "max"}, "pooling"), ({"positions": "none"}, "positions"),
                          ({"dim": 54, "positions": "sincos"}, "4 divides")):
        with pytest.raises(ValueError, match=said):
            vit(**options)


def test_sincos_by_hand():
    codes = sincos(3, 8)
    assert codes.shape == (9, 8) and sincos(2, 12).shape == (4, 12)
    row, column = 2, 1
    angles = torch.tensor([1.0, 1 / 100])
    expected = torch.cat([(row * angles).sin(), (row * angles).cos(), (column * angles).sin(), (column * angles).cos()])
    assert torch.allclose(codes[3 * row + column], expected, atol=1e-6)


def test_drop_path_drops_whole_examples_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(4000, 3, 2)
    out = drop_branch(x, 0.25, training=True)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3]) and (out == out[:, :1, :1]).all()
    assert out.mean() == pytest.approx(1, abs=0.05)
    assert drop_branch(x, 0.25, training=False) is x and drop_branch(x, 0.0, training=True) is x
    model = vit(drop_path=0.2)
    assert [block.drop_path for block in model.transformer.blocks] == pytest.approx([0, 0.1, 0.2])
    image = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.eval()(image), model(image))


def test_impulses_by_hand():
    """What the nine heads of the middle and of the last patch of 3 x 3 look at; the border looks at itself."""
    (support,) = mask_priors.impulse_support(3, 1, 9)
    assert (support.sum(-1) == 1).all()
    assert support[:, 4].argmax(-1).tolist() == [4, 1, 5, 3, 7, 0, 2, 6, 8]  # centre, up, right, left, down, corners
    assert support[:, 8].argmax(-1).tolist() == [8, 5, 8, 7, 8, 4, 8, 8, 8]


def test_impulses_that_vary_cover_the_window_in_three_layers():
    layers = mask_priors.impulse_support(4, 3, 3, vary=True)
    seen = {support[head].argmax(-1)[5].item() for support in layers for head in range(3)}
    assert seen == {0, 1, 2, 4, 5, 6, 8, 9, 10}  # the window of patch (1, 1)
    same = mask_priors.impulse_support(4, 2, 9)
    assert torch.equal(same[0], same[1])


@pytest.mark.parametrize("query_key, sign", [(0.7, -1), (-0.7, 1)])
def test_mimetic_products(query_key, sign):
    """With all the rank there is, the products are c Z + d I: the means and spreads of their entries."""
    model = vit(dim=96, heads=1, depth=1)
    attention = model.transformer.blocks[0].attention
    qk_init.mimetic(attention, torch.Generator().manual_seed(1), query_key, 0.4, sign)
    for product, scale, diagonal in (
            (attention.query.weight.T @ attention.key.weight, query_key, query_key),
            (attention.value.weight.T @ attention.out.weight.T, 0.4, sign * 0.4)):
        product = product.detach()
        off = product[~torch.eye(96, dtype=torch.bool)]
        assert product.diagonal().mean() == pytest.approx(diagonal, abs=0.03)
        assert off.mean() == pytest.approx(0, abs=0.01)
        assert off.std() == pytest.approx(abs(scale) / 96**0.5, rel=0.05)
    assert attention.query.bias.abs().sum() == attention.out.bias.abs().sum() == 0


def test_mimetic_heads_are_cut_to_their_rank():
    attention = vit().transformer.blocks[0].attention
    qk_init.mimetic(attention, torch.Generator().manual_seed(1))
    heads = zip(attention.query.weight.unflatten(0, (3, 16)), attention.key.weight.unflatten(0, (3, 16)))
    for query, key in heads:
        product = query.T @ key
        assert torch.linalg.matrix_rank(product, rtol=1e-4) == 16 and product.diagonal().mean() > 0.15


def test_impulse_attends_to_the_neighbour_it_was_given():
    """Position codes alone: the largest logit of each row is its neighbour's, and the factors have norm 7."""
    model = vit(dim=96, pooling="mean")
    (support,), attention = mask_priors.impulse_support(4, 1, 3), model.transformer.blocks[0].attention
    positions = torch.randn(16, 96, generator=torch.Generator().manual_seed(2))
    qk_init.impulse(attention, positions, support)
    x = F.layer_norm(positions, (96,))
    query, key = (layer(x).unflatten(-1, (3, 32)).transpose(0, 1) for layer in (attention.query, attention.key))
    assert torch.equal((query @ key.transpose(1, 2)).argmax(-1), support.argmax(-1))
    for weight in (attention.query.weight, attention.key.weight):
        assert torch.allclose(weight.unflatten(0, (3, 32)).flatten(1).norm(dim=1), torch.tensor(7.0), atol=1e-3)


def test_svd_of_a_vit_is_solved_without_drop_path():
    """Nothing of it hangs on the global seed, and the model is left in training mode."""
    made, sample = [], torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
    args = train_vit.settings(["--dim", "24", "--depth", "3", "--drop-path", "0.5"], "builtin")
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, _ = train_vit.build(args, "builtin", "svd", 0, sample)
        made.append(model.state_dict())
        assert model.training
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
