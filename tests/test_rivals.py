"""Relative positions against cases by hand and sums over pairs, rotary ones against complex numbers."""
import doctest
import math

import pytest
import torch
import torch.nn.functional as F

from tinymask import GPT, MaskedAttention, ViT, init_weights, parameter_groups, rivals, theory
from tinymask.inits import INITS, set_prior
from tinymask.rivals import ConvNet, GatedAttention, RelativeBias, convnet_width, distance_index, offset_index, rotary
from tinymask.transformer import parameter_counts

pytestmark = pytest.mark.attention


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(index, causal=False):
    layer = MaskedAttention(6, 2, head_dim=4, causal=causal).double()
    layer.position_bias = RelativeBias(index, heads=2).double()
    return layer


@pytest.mark.parametrize("index, by_hand", [
    (distance_index(3), [[0, 0, 0], [1, 0, 0], [2, 1, 0]]),
    # patches 0 1 / 2 3: from 0, patch 3 is one down and one right, number (1 + 1) 3 + 1 + 1
    (offset_index(2), [[4, 5, 7, 8], [3, 4, 6, 7], [1, 2, 4, 5], [0, 1, 3, 4]])])
def test_the_bias_of_a_pair_by_hand(index, by_hand):
    """What is added to the logits, and the gradient of a number: the sum of the gradients of its pairs."""
    causal = len(index) == 3
    layer, x = layer_of(index, causal), draw(2, len(index), 6)
    table = layer.position_bias.table
    assert table.shape == (2, 3 if causal else 9) and (table == 0).all() and table.requires_grad
    table.data = draw(*table.shape, seed=1)
    added = torch.tensor([[[of[number] for number in row] for row in by_hand] for of in table.tolist()],
                         dtype=torch.float64, requires_grad=True)
    query, key = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (layer.query, layer.key))
    logits = query @ key.mT / 2 + added
    if causal:
        logits = logits.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(layer.weights(x), logits.softmax(-1))
    loss = draw(2, 2, len(index), len(index), seed=2)
    (layer.weights(x) * loss).sum().backward()
    (logits.softmax(-1) * loss).sum().backward()
    sums = torch.zeros_like(table)
    for i, row in enumerate(by_hand):
        for j, number in enumerate(row):
            sums[:, number] += added.grad[:, i, j]
    torch.testing.assert_close(table.grad, sums)
    assert (table.grad != 0).all()


def test_every_offset_of_a_square_has_a_number_of_its_own():
    numbers = {}
    for i, row in enumerate(offset_index(5).tolist()):
        for j, number in enumerate(row):
            numbers.setdefault((j // 5 - i // 5, j % 5 - i % 5), set()).add(number)
    assert len(numbers) == 81 and sorted(n for of in numbers.values() for n in of) == list(range(81))


def test_a_table_of_zeros_is_plain_attention():
    layer, x = layer_of(distance_index(5), causal=True), draw(2, 4, 6)
    biased, layer.position_bias = layer(x), None
    assert torch.equal(biased, layer(x))


def test_the_gradient_is_the_same_with_several_threads():
    """Indexing adds up a gradient of more than 32,768 numbers in whatever order the threads come."""
    bias, loss, threads = RelativeBias(distance_index(200), 2), draw(2, 200, 200).float(), torch.get_num_threads()
    grads = []
    try:
        for number in (1, *[4] * 5):
            torch.set_num_threads(number)
            grads.append(torch.autograd.grad((bias(200) * loss).sum(), bias.table)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(grads[0], grad) for grad in grads)


def test_what_does_not_fit_is_refused():
    layer = layer_of(distance_index(3))
    with pytest.raises(ValueError, match="4 tokens, the position bias is for 3"):
        layer(draw(1, 4, 6))
    layer.set_mask(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="a mask or a position_bias, not both"):
        layer(draw(1, 3, 6))
    with pytest.raises(ValueError, match="even head_dim, got 5"):
        rotary(draw(1, 1, 2, 5))


def test_gated_attention_is_its_closed_form():
    """Two softmaxes, mixed: of content, and of minus the squared distance from the patch at a head's own offset."""
    side, offsets, x = 3, [(0, 0), (-1, 1)], draw(2, 9, 6)
    layer = GatedAttention(6, side, offsets).double()
    query, key = (p(x).unflatten(-1, (2, 3)).transpose(1, 2) for p in (layer.query, layer.key))
    content = (query @ key.mT / 3**0.5).softmax(-1)
    grid = torch.tensor([(i // side, i % side) for i in range(9)], dtype=torch.float64)
    for gates, scale in (([1, 1], 1), ([-2, 0.5], 3)):  # as it starts; after training
        layer.position_bias.gate.data = torch.tensor(gates, dtype=torch.float64)
        layer.position_bias.place.data *= scale
        for head, (offset, gate) in enumerate(zip(offsets, gates)):
            goal = grid + torch.tensor(offset)  # (N, 2): where the head looks from each patch
            place = (-scale * (goal[:, None] - grid).square().sum(-1)).softmax(-1)  # (N, N)
            share = 1 / (1 + math.exp(-gate))
            torch.testing.assert_close(layer.weights(x)[:, head], (1 - share) * content[:, head] + share * place)
    assert layer.weights(x)[:, 1, 3].argmax(-1).tolist() == [1, 1]  # up and right of patch 3
    with pytest.raises(ValueError, match="for 9 patches without"):
        layer(x[:, :4])
    layer.set_mask(torch.zeros(9, 9))
    with pytest.raises(ValueError, match="for 9 patches without"):
        layer(x)


@pytest.mark.parametrize("width, base", [(2, 10_000.0), (8, 10_000.0), (8, 7.0)])
def test_rotary_is_a_multiplication_of_complex_numbers(width, base):
    x = draw(2, 3, 6, width)
    turned = torch.tensor([[math.e ** (1j * n * base ** (-2 * k / width)) for k in range(width // 2)]
                           for n in range(6)])
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turned).flatten(-2)
    found = rotary(x) if base == 10_000.0 else rotary(x, base)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(found[:, :, 0], x[:, :, 0]) and rotary(x.bfloat16()).dtype == torch.bfloat16


def test_rotary_scores_know_the_distance_alone():
    """Equal tokens: the weights of a row depend on i - j, and with a mask beside it, on i - j and the mask."""
    layer, x = MaskedAttention(6, 2, head_dim=4), draw(1, 1, 6).float().expand(1, 7, 6)
    layer.rotate = rotary
    logits = layer.weights(x).log()
    for head in logits[0]:
        score = head - head.diagonal()[:, None]  # over that of a token with itself
        for distance in range(-6, 7):
            along = score.diagonal(distance)
            torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
        assert score.std() > 0.01
    layer.set_mask(mask := draw(7, 7, seed=3).float())
    torch.testing.assert_close(layer.weights(x), (logits + mask.sigmoid().log()).softmax(-1))


@pytest.mark.parametrize("init", ["relative", "rotary", "rotary-mask"])
def test_models_compile_and_export_with_them(init):
    model, ids = GPT(vocabulary=5, block=6, dim=8, depth=2, heads=2), torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    init_weights(model, torch.Generator().manual_seed(0))
    for block in model.transformer.blocks:
        set_prior(block.attention, INITS[init], draw(6, 6).float(), distance_index(6))
    expected = model.eval()(ids)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(ids), expected)
    torch.testing.assert_close(torch.export.export(model, (ids,)).module()(ids), expected)


def test_the_table_is_trained_as_a_mask_is():
    """One that two layers share, as T5's do, is in the group once."""
    model = GPT(vocabulary=5, block=6, dim=8, depth=3, heads=2)
    first, second, third = (block.attention for block in model.transformer.blocks)
    first.position_bias = second.position_bias = RelativeBias(distance_index(6), 2)
    third.set_mask(torch.zeros(6, 6))
    gated = GatedAttention(8, 2, [(0, 0), (0, 1)])
    model.transformer.blocks[1].mlp = gated  # any place
    others, priors = parameter_groups(model, lr=1.0, mask_lr=2.0, weight_decay=0.1)
    wanted = [first.position_bias.table, third.mask, *gated.position_bias.parameters()]
    assert {id(p) for p in priors["params"]} == {id(p) for p in wanted}
    assert (priors["weight_decay"], priors["lr"], len(priors["params"])) == (0.0, 2.0, 4)
    assert len(others["params"]) + 4 == len(list(model.parameters()))


def test_the_convolutional_net_by_hand():
    """Norms are over all of an image; a side that is odd is halved upwards; 7 -> 4 -> 2 -> 1."""
    def convolve(x, part):
        conv, norm, _ = part
        x = F.conv2d(F.pad(x, (1,) * 4), conv.weight)
        x = (x - x.mean(dim=(1, 2, 3), keepdim=True)) / (x.var(dim=(1, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        x = x * norm.weight[:, None, None] + norm.bias[:, None, None]
        return x * (1 + torch.erf(x / 2**0.5)) / 2

    model, x = init_weights(ConvNet(classes=3, width=17), torch.Generator().manual_seed(0)), draw(2, 3, 7, 7).float()
    norms = [part for part in model.modules() if isinstance(part, torch.nn.GroupNorm)]
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in norms) and len(norms) == 10
    for norm in norms:
        norm.weight.data, norm.bias.data = torch.rand(2, norm.num_channels) + 0.5
    out, sizes = convolve(x, model.stem), []
    for widen, (first, second) in zip(model.widen, model.branch):
        out = convolve(out, widen)
        out = F.pad(out, (0, out.shape[-1] % 2) * 2, value=-math.inf).unfold(2, 2, 2).unfold(3, 2, 2).amax(dim=(4, 5))
        out = out + convolve(convolve(out, first), second)
        sizes.append(tuple(out.shape[1:]))
    assert sizes == [(4, 4, 4), (8, 2, 2), (17, 1, 1)]
    torch.testing.assert_close(model(x), out.mean(dim=(2, 3)) @ model.head.weight.T + model.head.bias)
    torch.testing.assert_close(model(x[:1]), model(x)[:1])  # nothing depends on the rest of the batch


@pytest.mark.parametrize("options", [dict(dim=48, depth=2), dict(dim=72, depth=4), dict(dim=192, depth=12)])
def test_a_convolutional_net_as_large_as_a_transformer(options):
    total = parameter_counts(ViT(side=32, patch=4, classes=10, heads=3, **options))["total"]
    assert parameter_counts(ConvNet(classes=10, width=convnet_width(total)))["total"] == pytest.approx(total, rel=0.1)


def test_examples_in_the_docstrings():
    assert doctest.testmod(rivals).failed == 0


def test_the_product_is_the_softmax_times_sigmoid_of_m():
    layer, x = MaskedAttention(6, 2), torch.randn(2, 4, 6)
    plain, mask = layer.weights(x), torch.randn(2, 4, 4)
    set_prior(layer, INITS["hadamard"], mask)
    torch.testing.assert_close(layer.weights(x), plain / (1 + torch.exp(-mask)))
    torch.testing.assert_close(layer.weights(x)[1, 1], theory.hadamard_map(plain[1, 1].log(), mask[1]))
