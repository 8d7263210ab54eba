"""Theorem 1, Corollary 1, Proposition 1 on random inputs, against autograd Jacobians in float64."""
import doctest
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import jacobian

from tinymask import theory

pytestmark = pytest.mark.theory
CASES = list(itertools.product([2, 3, 5, 8, 16], [1e-3, 0.1, 1.0, 30.0, 1e3], range(4)))


def row(size, scale, seed, d=4):
    generator = torch.Generator().manual_seed(1000 * size + seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return scale * draw(d), scale * draw(size, d), scale * draw(size)


@pytest.mark.parametrize("size, scale, seed", CASES)
def test_closed_forms_equal_autograd(size, scale, seed):
    q, k, m = row(size, scale, seed)
    by_q, by_k, by_m = jacobian(theory.attention_row, (q, k, m))
    torch.testing.assert_close(theory.dp_dq(q, k, m), by_q, atol=1e-9 * max(1, scale), rtol=1e-7)
    torch.testing.assert_close(theory.dp_dk(q, k, m), by_k, atol=1e-9 * max(1, scale), rtol=1e-7)
    torch.testing.assert_close(theory.dp_dm(q, k, m), by_m, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("size, scale, seed", CASES)
def test_corollary_1_on_autograd_jacobians(size, scale, seed):
    q, k, m = row(size, scale, seed)
    p = theory.attention_row(q, k, m)
    by_q, by_k, by_m = jacobian(theory.attention_row, (q, k, m))
    bound_q, bound_k, bound_m = theory.bounds(q, k, m)
    slack = 1e-12 * max(1.0, scale**2)
    assert (by_q.norm(dim=-1) <= bound_q + slack).all()
    assert (by_k.norm(dim=-1) <= bound_k[:, None] + slack).all()
    assert (by_m.abs() <= bound_m + 1e-15).all()  # |dp_i/dm_j| <= p_i sigmoid(-m_j)
    assert (bound_m <= p[:, None] + 1e-15).all()  # ... <= p_i


@pytest.mark.parametrize("size, scale, seed", CASES)
def test_loss_gradient_and_its_bound(size, scale, seed):
    q, k, m = row(size, scale, seed)
    g = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    m.requires_grad_()
    p = theory.attention_row(q, k, m)
    (by_m,) = torch.autograd.grad(p @ g, m)
    torch.testing.assert_close(theory.dloss_dm(q, k, m, g), by_m, atol=1e-12, rtol=1e-7)
    assert (by_m.abs() <= torch.sigmoid(-m) * p * (g.max() - g.min()) + 1e-12).all()


def test_bound_is_the_derivative_over_delta_minus_p_and_is_reached():
    q, k, m = row(5, 1.0, 0)
    p = theory.attention_row(q, k, m)
    ratio = theory.dp_dm(q, k, m).abs() / theory.bounds(q, k, m)[2]
    torch.testing.assert_close(ratio, (torch.eye(5, dtype=torch.float64) - p).abs())
    m[0] = 60.0
    m[1:] = -60.0  # p_0 -> 1: column 0 reaches the bound off the diagonal, columns 1.. on it
    ratio = theory.dp_dm(q, k, m).abs() / theory.bounds(q, k, m)[2]
    assert (ratio[1:, 0] > 1 - 1e-9).all() and (ratio.diagonal()[1:] > 1 - 1e-9).all()


@pytest.mark.parametrize("c", [0.01, 3.0, 100.0])
def test_feature_scale_moves_the_query_key_gradients_and_not_the_mask_s(c):
    q, k, m = row(6, 1.0, 1)
    torch.testing.assert_close(theory.attention_row(c * q, k / c, m), theory.attention_row(q, k, m))
    torch.testing.assert_close(theory.dp_dm(c * q, k / c, m), theory.dp_dm(q, k, m))
    torch.testing.assert_close(theory.dp_dk(c * q, k / c, m), c * theory.dp_dk(q, k, m))
    torch.testing.assert_close(theory.dp_dq(c * q, k / c, m), theory.dp_dq(q, k, m) / c)


@pytest.mark.parametrize("logit", [-1e4, -120.0, 0.0, 120.0, 1e4])
def test_extreme_logits_are_finite_both_ways(logit):
    q, k, m = (t.float() for t in row(4, 1.0, 2))
    m[:2] = logit
    m.requires_grad_()
    theory.attention_row(q, k, m)[0].backward()
    assert m.grad.isfinite().all() and theory.dp_dm(q, k, m.detach()).isfinite().all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_proposition_1(size, scale):
    generator = torch.Generator().manual_seed(size)
    a, m = (scale * torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in range(2))
    assert a.softmax(-1).norm() >= 1 - 1e-12
    assert (a + F.logsigmoid(m)).softmax(-1).norm() >= 1 - 1e-12
    plain = jacobian(lambda z: z.softmax(-1), a)
    product = jacobian(lambda z: theory.hadamard_map(z, m), a)
    assert product.norm() <= plain.norm() + 1e-12


def test_the_hadamard_map_vanishes_where_softmax_cannot():
    a, m = torch.zeros(3, 3), torch.full((3, 3), -60.0)
    assert theory.hadamard_map(a, m).norm() < 1e-20 and (a + F.logsigmoid(m)).softmax(-1).norm() >= 1


def test_proposition_1_does_not_order_the_two_masked_maps():
    """One row, A = 0, M = (10, -10, -10). Additive: p = (1 - 2e, e, e) with e = 4.5e-5, Jacobian norm
    about 1.4e-4. Product: J[i, j] = sigmoid(m_i) (delta_ij / 3 - 1/9), first row (2, -1, -1) / 9, norm
    sqrt(6) / 9 = 0.272. So the additive Jacobian is the smaller one here."""
    a, m = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[10.0, -10.0, -10.0]], dtype=torch.float64)
    additive = jacobian(lambda z: (z + F.logsigmoid(m)).softmax(-1), a).norm().item()
    product = jacobian(lambda z: theory.hadamard_map(z, m), a).norm().item()
    assert product == pytest.approx(6**0.5 / 9, rel=1e-3)
    assert additive == pytest.approx(1.4e-4, rel=0.1)


def test_examples_in_the_docstrings():
    assert doctest.testmod(theory).failed == 0
