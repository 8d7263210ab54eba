"""Theorem 1, Corollary 1 and Proposition 1 on `masked_attention` itself: autograd in float64 on random inputs."""
import doctest
import itertools

import pytest
import torch
from torch.autograd.functional import jacobian

from tinymask import MaskedAttention, masked_attention, theory

pytestmark = pytest.mark.theory
CASES = list(itertools.product([1e-3, 0.3, 1.0, 5.0, 3e3], range(8)))  # scale of the inputs, seed


def close(found, wanted, atol=1e-12):
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=atol)


def weights(query, key, mask):
    return masked_attention(query, key, torch.zeros_like(key), mask, return_attention=True)[1]  # (B, H, N, N)


def case(scale, seed):
    """Random query, key (2, 3, N, Dh) and mask (3, N, N), N 2 to 5, Dh 1 to 3."""
    tokens, width, generator = 2 + seed % 4, 1 + seed % 3, torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(shape, generator=generator, dtype=torch.float64)
                 for shape in [(2, 3, tokens, width)] * 2 + [(3, tokens, tokens)])


def rows(query, key, mask):
    """For each row of weights: where it is, (b, h, i), and what makes it, q (Dh,), k (N, Dh), m (N,)."""
    for b, h, i in itertools.product(*map(range, query.shape[:3])):
        yield (b, h, i), (query[b, h, i], key[b, h], mask[h, i])


@pytest.mark.parametrize("scale, seed", CASES)
def test_theorem_1_and_corollary_1(scale, seed):
    """A row's derivatives are eq. 2, 3 and 4 by its own query, keys and row of the mask, and 0 by all others."""
    inputs, slack = case(scale, seed), 1e-12 * max(1, scale)
    by_q, by_k, by_m = jacobian(weights, inputs)
    formula_q, formula_k, formula_m = (torch.zeros_like(by) for by in (by_q, by_k, by_m))
    for (b, h, i), row in rows(*inputs):
        q, k, m = row
        logits = torch.stack([q @ k_j for k_j in k]) / len(q) ** 0.5 - torch.logaddexp(torch.zeros_like(m), -m)
        p, bounds = (logits - logits.logsumexp(0)).exp(), theory.bounds(*row)
        close(weights(*inputs)[b, h, i], p)
        close(theory.attention_row(*row), p)
        formula_q[b, h, i, :, b, h, i] = theory.dp_dq(*row)
        formula_k[b, h, i, :, b, h] = theory.dp_dk(*row)
        formula_m[b, h, i, :, h, i] = theory.dp_dm(*row)
        assert (by_q[b, h, i, :, b, h, i].norm(dim=-1) <= bounds[0] + slack).all()
        assert (by_k[b, h, i, :, b, h].norm(dim=-1) <= bounds[1][:, None] + slack).all()
        assert (by_m[b, h, i, :, h, i].abs() <= p[:, None] * torch.sigmoid(-m) + 1e-15).all()
        close(bounds[2], p[:, None] * torch.sigmoid(-m))
    close(by_q, formula_q, atol=100 * slack)
    close(by_k, formula_k, atol=100 * slack)
    close(by_m, formula_m)


def test_the_bounds_are_reached():
    """p_0 -> 1: |delta_ij - p_j| -> 1 below the diagonal in column 0, and on it in the others; k_1 = -k_0, the mean."""
    q, k, m = (torch.tensor(x, dtype=torch.float64) for x in ([1, 2], [[3, 4], [-3, -4], [3, 4]], [30, -30, -30]))
    by_q, by_k, by_m = (by[0, 0, 0] for by in jacobian(weights, (q.expand(1, 1, 3, 2), k[None, None], m.expand(3, 3))))
    bound_q, bound_k, bound_m = theory.bounds(q, k, m)
    assert (by_q[1, 0, 0, 0].norm() / bound_q[1]).item() == pytest.approx(1)
    for ratio in (by_k[:, 0, 0].norm(dim=-1) / bound_k[:, None], by_m[:, 0].abs() / bound_m):
        close(ratio, torch.tensor([[0, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("scale, seed", CASES)
def test_the_sharp_form_bounds_an_open_entry_by_a_closed_one(scale, seed):
    """p_i p_j sigma(-m_j) <= p_i leak_ij sigma(-m_j), through masked_attention; leak from the inputs alone."""
    inputs = case(scale, seed)
    by_m = jacobian(weights, inputs)[2]
    for (b, h, i), (q, k, m) in rows(*inputs):
        p, leak = theory.attention_row(q, k, m), theory.leak(q, k, m)
        off = ~torch.eye(len(p), dtype=torch.bool)
        found, sharp = by_m[b, h, i, :, h, i].abs(), p[:, None] * p * torch.sigmoid(-m)
        close(found[off], sharp[off])
        bound = (p[:, None] * leak * torch.sigmoid(-m)).nan_to_num(torch.inf)  # 0 times what is beyond float64
        assert (p <= leak * (1 + 1e-9)).all() and (found <= bound + 1e-12)[off].all()


@pytest.mark.parametrize("closed", [-5.0, -10.0])
def test_how_loose_the_bound_is_for_an_open_and_a_closed_entry(closed):
    """Two keys of equal logits, M = (10, closed): 1 / p_1 = 1 + sigma(10) / sigma(closed), 150 and 22,025 times."""
    q, k, m = torch.zeros(1).double(), torch.zeros(2, 1).double(), torch.tensor([10.0, closed]).double()
    ratio = theory.bounds(q, k, m)[2][0, 1] / theory.dp_dm(q, k, m)[0, 1].abs()
    assert ratio.item() == pytest.approx(1 + (1 + torch.exp(-m[1])).item() / (1 + torch.exp(-m[0])).item())
    assert ratio.item() == pytest.approx({-5.0: 150.4, -10.0: 22027.5}[closed], rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_carried_on_to_the_weights(seed):
    """dp/dW_Q and dp/dW_K of a MaskedAttention with two heads; the weights of another head do not move a row."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 4, 5, generator=draws, dtype=torch.float64)
    layer = MaskedAttention(5, 2, head_dim=3, mask=torch.randn(2, 4, 4, generator=draws, dtype=torch.float64)).double()

    def maps(*given):
        query, key = ((x @ weight.T + part.bias).unflatten(-1, (2, -1)).transpose(1, 2)
                      for weight, part in zip(given, (layer.query, layer.key)))
        return weights(query, key, layer.mask)

    given = layer.query.weight.detach(), layer.key.weight.detach()
    close(maps(*given), layer.weights(x))
    found = [by.unflatten(-2, (2, 3)) for by in jacobian(maps, given)]  # (1, H, N, N, H, Dh, D)
    query, key = (part.detach()[0] for part in layer.query_and_key(x))
    for h, i in itertools.product(range(2), range(4)):
        row = query[h, i], key[h], layer.mask[h, i].detach()
        close(found[0][0, h, i, :, h].transpose(-1, -2), theory.dp_dwq(x[0, i], *row))
        close(found[1][0, h, i, :, h].transpose(-1, -2), theory.dp_dwk(x[0], *row))
        assert not found[0][0, h, i, :, 1 - h].any() and not found[1][0, h, i, :, 1 - h].any()


@pytest.mark.parametrize("scale, seed", CASES)
def test_the_gradient_of_a_loss_on_the_mask(scale, seed):
    """L = |output - target|^2 / 2, so g_ij = dL/dp_ij = (output_i - target_i) . v_j."""
    query, key, mask = case(scale, seed)
    generator, leaf = torch.Generator().manual_seed(seed + 100), mask.clone().requires_grad_()
    value, target = torch.randn(2, *query.shape, generator=generator, dtype=torch.float64)
    ((masked_attention(query, key, value, leaf) - target).square().sum() / 2).backward()
    formula, bound = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for (b, h, i), (q, k, m) in rows(query, key, mask):
        p = theory.attention_row(q, k, m)
        g = value[b, h] @ (p @ value[b, h] - target[b, h, i])
        formula[h, i] += theory.dloss_dm(q, k, m, g)
        bound[h, i] += torch.sigmoid(-m) * p * (g.max() - g.min())
    close(leaf.grad, formula)
    assert (leaf.grad.abs() <= bound + 1e-12).all()


@pytest.mark.parametrize("seed", range(8))
def test_a_constant_added_to_a_row_of_logits_moves_nothing(seed):
    """One vector added to all keys is such a constant, and so is log c_i, by a factor c_i on row i of sigmoid(M)."""
    query, key, mask = case(1.0, seed)
    factors = torch.linspace(0.1, 0.9, mask.shape[-1], dtype=torch.float64)[:, None]
    close(weights(query, key + torch.arange(1, key.shape[-1] + 1), mask), weights(query, key, mask))
    close(weights(query, key, (factors * torch.sigmoid(mask)).logit()), weights(query, key, mask))


def attention_of(a, m):
    """softmax(A + log sigmoid(M)), (N, N), by masked_attention: its queries are sqrt(N) A, its keys unit vectors."""
    return weights(len(a) ** 0.5 * a[None, None], torch.eye(len(a), dtype=a.dtype)[None, None], m)[0, 0]


@pytest.mark.parametrize("size, scale", list(itertools.product([2, 5, 16], [1e-3, 1.0, 1e3])))
def test_proposition_1(size, scale):
    a, m = scale * torch.randn(2, size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    close(theory.hadamard_map(a, m), torch.exp(a - a.logsumexp(-1, keepdim=True)) / (1 + torch.exp(-m)))
    assert attention_of(a, m).norm() >= 1 - 1e-12
    assert attention_of(0 * a, 0 * m).norm().item() == pytest.approx(1)  # the least: every row attends to all alike
    plain, product = jacobian(lambda z: z.softmax(-1), a), jacobian(lambda z: theory.hadamard_map(z, m), a)
    assert product.norm() <= plain.norm() + 1e-12


def test_proposition_1_compares_the_product_with_plain_attention_only():
    """Row 0 of A = 0, M = (10, -10, -10). Additive: p = (1 - 2e, e, e), e = 4.5e-5, Jacobian norm about 1.4e-4.
    Product, greater: J[i, j] = sigmoid(m_i) (delta_ij / 3 - 1/9), first row (2, -1, -1) / 9, norm sqrt(6) / 9."""
    a, m = torch.zeros(3, 3, dtype=torch.float64), torch.tensor([10, -10, -10], dtype=torch.float64).expand(3, 3)
    assert jacobian(lambda z: attention_of(z, m)[0], a).norm().item() == pytest.approx(1.4e-4, rel=0.1)
    assert jacobian(lambda z: theory.hadamard_map(z, m)[0], a).norm().item() == pytest.approx(6**0.5 / 9, rel=1e-3)
    assert theory.hadamard_map(a, m - 70).norm() < 1e-20 and attention_of(a, m - 70).norm() >= 1  # it can vanish


def test_examples_in_the_docstrings():
    assert doctest.testmod(theory).failed == 0
