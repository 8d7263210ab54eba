"""Boolean tasks, Fourier coefficients and the exact minimum-degree interpolator."""
import doctest
import itertools

import pytest
import torch

from tinymask import boolean

pytestmark = pytest.mark.gotu


@pytest.mark.parametrize("name, seen", [
    ("2parity", 24576), ("majority", 24576), ("cyclic3", 28672), ("threesym", 16384)])
def test_sizes(name, seen):
    x, target, mark = boolean.load_task(name)
    assert x.shape == (32768, 15) and target.shape == (32768,) and mark.sum() == seen
    assert x.dtype == target.dtype == torch.float32  # float64 would break on mps
    assert len(x.unique(dim=0)) == 32768


def test_targets_by_brute_force():
    """Each f and each seen set again, in plain Python, on every point of a small cube."""
    for x in itertools.product([-1, 1], repeat=6):
        row = torch.tensor([x], dtype=torch.float32)
        cyclic = sum(x[i] * x[(i + 1) % 6] * x[(i + 2) % 6] for i in range(6))
        values = {
            "2parity": (x[0] * x[1], (x[0], x[1]) != (-1, -1)),
            "majority": (1 if x[0] + x[1] + x[2] > 0 else -1, (x[0], x[1]) != (-1, -1)),
            "cyclic3": (cyclic, x[:3] != (-1, -1, -1)),
            "threesym": (x[0] * x[1] - 1.25 * x[1] * x[2] + 1.5 * x[2] * x[0], x[0] * x[1] * x[2] == 1),
        }
        for name, (value, seen) in values.items():
            function, is_seen = boolean.TASKS[name]
            assert function(row).item() == value and is_seen(row).item() == seen, (name, x)


def test_fourier_against_the_definition():
    values = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = boolean.cube(5).double()
    for k, coefficient in enumerate(boolean.fourier_coefficients(values)):
        character = x[:, [i for i in range(5) if k >> i & 1]].prod(dim=1)
        assert coefficient.item() == pytest.approx((values * character).mean().item())
    parseval = boolean.fourier_coefficients(values).square().sum()
    torch.testing.assert_close(parseval, values.square().mean())


CLOSED_FORMS = {  # the paper, section 5.1; for Majority the one of least degree profile
    "2parity": lambda x: x[:, 0] + x[:, 1] - 1,
    "majority": lambda x: (x[:, 0] + x[:, 1] + 2 * x[:, 2] - x[:, 0] * x[:, 2] - x[:, 1] * x[:, 2]) / 2,
    "cyclic3": lambda x: boolean.cyclic3(x) - x[:, :3].prod(1) + x[:, 0] * x[:, 1] + x[:, 1] * x[:, 2]
    + x[:, 0] * x[:, 2] - x[:, :3].sum(1) + 1,
    "threesym": lambda x: x[:, 2] - 1.25 * x[:, 0] + 1.5 * x[:, 1],
}


@pytest.mark.parametrize("name, accuracy, mse", [
    ("2parity", 0.75, 4.0), ("majority", 0.875, 1.0), ("cyclic3", 0.875, 8.0), ("threesym", None, 9.625)])
def test_mdi_is_the_paper_s(name, accuracy, mse):
    x, target, seen = boolean.load_task(name)
    mdi = boolean.minimum_degree_interpolator(target, seen)
    torch.testing.assert_close(mdi, CLOSED_FORMS[name](x), atol=1e-5, rtol=0)
    assert boolean.accuracy(name, mdi, target) == accuracy
    assert (mdi - target).square().mean().item() == pytest.approx(mse, abs=1e-5)


def test_mdi_has_the_least_degree_profile_of_all_interpolators():
    """On a seen set without structure: no change on the unseen points lowers the energy from the top down."""
    generator = torch.Generator().manual_seed(3)
    values, seen = torch.randn(32, generator=generator, dtype=torch.float64), torch.rand(32, generator=generator) < 0.6
    degrees = boolean.degrees(5)

    def profile(f):
        energy = boolean.fourier_coefficients(f).square()
        return [energy[degrees == d].sum().item() for d in range(5, -1, -1)]

    mdi = boolean.minimum_degree_interpolator(values, seen)
    torch.testing.assert_close(mdi[seen], values[seen])
    for _ in range(200):
        other = mdi.clone()
        other[~seen] += 0.1 * torch.randn(int((~seen).sum()), generator=generator, dtype=torch.float64)
        mine, theirs = profile(mdi), profile(other)
        first = next(i for i in range(6) if abs(mine[i] - theirs[i]) > 1e-9)
        assert mine[first] < theirs[first]


def test_accuracy_by_hand():
    target = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert boolean.accuracy("2parity", torch.tensor([0.2, -3.0, 0.0, 1.0]), target) == 0.5  # 0 is wrong
    assert boolean.accuracy("cyclic3", torch.tensor([1.9, -2.1, 1.0, -0.5]), target) == 0.75
    assert boolean.accuracy("threesym", target, target) is None


def test_tokens():
    assert boolean.to_tokens(torch.tensor([[1.0, -1.0]])).tolist() == [[0, 1]]


def test_unknown_task():
    with pytest.raises(KeyError):
        boolean.load_task("nosuch")


def test_examples_in_the_docstrings():
    assert doctest.testmod(boolean).failed == 0
