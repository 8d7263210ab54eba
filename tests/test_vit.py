"""The vision transformer and its inits: sizes that are public, structure that each init claims."""
import pytest
import torch
import torch.nn.functional as F

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
def test_what_is_read_and_from_where(pooling, tokens, positions):
    """The patch layer is a linear map of a patch cut out by hand; the class token stands in front, codes are added."""
    model, images, cls = vit(pooling=pooling, positions=positions), torch.randn(2, 3, 16, 16), int(pooling == "cls")
    x = model.embed(images)
    patch = images[0, :, 4:8, 8:12].flatten()  # second row, third column: token 6
    codes = model.position
    torch.testing.assert_close(x[0, 6 + cls], model.patch.weight.flatten(1) @ patch + model.patch.bias + codes[6 + cls])
    if cls:
        torch.testing.assert_close(x[1, 0], model.cls[0] + codes[0])
    read = model.transformer(x)
    torch.testing.assert_close(model(images), model.head(read[:, 0] if cls else read.mean(dim=1)))
    assert attention_maps(model, images)[0].shape == (2, 3, tokens, tokens) and model(images).shape == (2, 5)
    assert ("position" in dict(model.named_parameters())) == (positions == "learned")


@pytest.mark.parametrize("options, said", [
    ({"patch": 5}, "multiple of patch"), ({"heads": 5}, "multiple of heads"), ({"pooling": "max"}, "pooling"),
    ({"positions": "none"}, "positions"), ({"dim": 54, "positions": "sincos"}, "4 divides")])
def test_bad_sizes(options, said):
    with pytest.raises(ValueError, match=said):
        vit(**options)


def test_sincos_by_hand():
    row, column, angles = 2, 1, torch.tensor([1.0, 1 / 100])
    expected = torch.cat([(row * angles).sin(), (row * angles).cos(), (column * angles).sin(), (column * angles).cos()])
    torch.testing.assert_close(sincos(3, 8)[3 * row + column], expected)
    assert sincos(3, 8).shape == (9, 8) and sincos(2, 12).shape == (4, 12)


def test_drop_path_drops_whole_examples_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(4000, 3, 2)
    out = drop_branch(x, 0.25, training=True)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3]) and (out == out[:, :1, :1]).all()
    assert out.mean() == pytest.approx(1, abs=0.05)
    assert drop_branch(x, 0.25, training=False) is x and drop_branch(x, 0.0, training=True) is x
    model, image = vit(drop_path=0.8, pooling="mean"), torch.randn(8, 3, 16, 16)
    assert [block.drop_path for block in model.transformer.blocks] == pytest.approx([0, 0.4, 0.8])
    assert torch.equal(model.eval()(image), model(image))
    model.train()
    for made in (first := [], second := []):  # nor does svd hang on what is dropped
        qk_init.apply_layerwise(qk_init.svd, model, image, mask_priors.impulse_support(4, 3, 3))
        made += [block.attention.query.weight.clone() for block in model.transformer.blocks]
    assert all(map(torch.equal, first, second)) and model.training


def test_impulses_by_hand():
    """What the nine heads of the middle and of the last patch of 3 x 3 look at; the border looks at itself."""
    (support,) = mask_priors.impulse_support(3, 1, 9)
    assert (support.sum(-1) == 1).all()
    assert support[:, 4].argmax(-1).tolist() == [4, 1, 5, 3, 7, 0, 2, 6, 8]  # centre, up, right, left, down, corners
    assert support[:, 8].argmax(-1).tolist() == [8, 5, 8, 7, 8, 4, 8, 8, 8]
    layers = mask_priors.impulse_support(3, 3, 3, vary=True)  # that vary: the same nine, three a layer
    assert torch.equal(torch.cat(layers), support)
    assert all(torch.equal(layer, support[:3]) for layer in mask_priors.impulse_support(3, 2, 3))


@pytest.mark.parametrize("query_key, sign", [(0.7, -1), (-0.7, 1)])
def test_mimetic_products(query_key, sign):
    """With all the rank there is, the products are c Z + d I: means and spreads. Heads are cut to their own rank."""
    attention = vit(dim=96, heads=1, depth=1).transformer.blocks[0].attention
    qk_init.mimetic(attention, torch.Generator().manual_seed(1), query_key, 0.4, sign)
    for product, scale, diagonal in ((attention.query.weight.T @ attention.key.weight, query_key, query_key),
                                     (attention.value.weight.T @ attention.out.weight.T, 0.4, sign * 0.4)):
        off = product[~torch.eye(96, dtype=torch.bool)]
        assert product.diagonal().mean().item() == pytest.approx(diagonal, abs=0.03)
        assert off.mean().item() == pytest.approx(0, abs=0.01)
        assert off.std().item() == pytest.approx(abs(scale) / 96**0.5, rel=0.05)
    assert attention.query.bias.abs().sum() == attention.out.bias.abs().sum() == 0
    attention = vit().transformer.blocks[0].attention
    qk_init.mimetic(attention, torch.Generator().manual_seed(1))
    for query, key in zip(attention.query.weight.unflatten(0, (3, 16)), attention.key.weight.unflatten(0, (3, 16))):
        assert torch.linalg.matrix_rank(query.T @ key, rtol=1e-4) == 16 and (query.T @ key).diagonal().mean() > 0.15


def test_impulse_attends_to_the_neighbour_it_was_given():
    """Position codes alone: the largest logit of each row is its neighbour's, and the factors have norm 7."""
    (support,), attention = mask_priors.impulse_support(4, 1, 3), vit(dim=96).transformer.blocks[0].attention
    positions = torch.randn(16, 96, generator=torch.Generator().manual_seed(2))
    qk_init.impulse(attention, positions, support)
    x, layers = F.layer_norm(positions, (96,)), (attention.query, attention.key)
    query, key = (layer(x).unflatten(-1, (3, 32)).transpose(0, 1) for layer in layers)
    assert torch.equal((query @ key.transpose(1, 2)).argmax(-1), support.argmax(-1))
    for layer in layers:
        torch.testing.assert_close(layer.weight.unflatten(0, (3, 32)).flatten(1).norm(dim=1), torch.full((3,), 7.0))
