"""Generalisation on the unseen (GOTU, arXiv 2301.13105): Boolean tasks, and what a network may make of them.

A task is a function f on the cube {-1, +1}^n and a part of the cube that training never shows. Many
functions agree with f on the seen part; transformers tend to pick the minimum-degree interpolator
(MDI), the one with the least Fourier energy at the highest degree, then at the next, and so on down.

    f(x) = sum_S f^(S) chi_S(x),   chi_S(x) = product of x_i over i in S          (paper, section 3)

The paper's symbols: its d is n, or `bits`; its domain Omega_seen is `seen`, a bool for each point; its f~ is what
`minimum_degree_interpolator` gives.

Points and Fourier coefficients share one index: number k of the cube has x_i = -1 where bit i of k
is 1, and coefficient k belongs to the set S of the bits of k. Shapes: P = 2^n points, n bits.
"""
import torch

BITS = 15  # n in the paper and in the GOTU code


def parity2(x):
    """x0 x1; unseen where x0 = x1 = -1. (P, n) -> (P,)."""
    return x[:, 0] * x[:, 1]


def majority3(x):
    """Sign of x0 + x1 + x2; unseen where x0 = x1 = -1. (P, n) -> (P,)."""
    return x[:, :3].sum(dim=1).sign()


def cyclic3(x):
    """sum_i x_i x_{i+1} x_{i+2}, indices mod n; unseen where x0 = x1 = x2 = -1. (P, n) -> (P,)."""
    return (x * x.roll(-1, dims=1) * x.roll(-2, dims=1)).sum(dim=1)


def threesym(x):
    """x0 x1 - 1.25 x1 x2 + 1.5 x2 x0; unseen where x0 x1 x2 = -1. (P, n) -> (P,)."""
    return x[:, 0] * x[:, 1] - 1.25 * x[:, 1] * x[:, 2] + 1.5 * x[:, 2] * x[:, 0]


# name -> (f, where the cube is seen); what counts as a right answer stands in `accuracy`
TASKS = {
    "2parity": (parity2, lambda x: x[:, :2].amax(dim=1) == 1),
    "majority": (majority3, lambda x: x[:, :2].amax(dim=1) == 1),
    "cyclic3": (cyclic3, lambda x: x[:, :3].amax(dim=1) == 1),
    "threesym": (threesym, lambda x: x[:, :3].prod(dim=1) == 1),
}


def cube(bits=BITS):
    """All points of {-1, +1}^bits, (2^bits, bits) float32, in index order.

    >>> cube(2).tolist()
    [[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]
    """
    index = torch.arange(2**bits)[:, None]
    return 1.0 - 2.0 * (index >> torch.arange(bits) & 1)


def load_task(name, bits=BITS):
    """The whole cube of a task: points (P, n), targets (P,), seen (P,) bool. KeyError: unknown name."""
    function, is_seen = TASKS[name]
    x = cube(bits)
    return x, function(x), is_seen(x)


def to_tokens(x):
    """Token ids of points: +1 -> 0, -1 -> 1. (P, n) float -> (P, n) int64."""
    return (x < 0).long()


def accuracy(name, prediction, target):
    """Fraction of right answers, or None for ThreeSym, whose targets are no classes. (P,), (P,) -> float.

    Targets +-1: the sign (a prediction of 0 is wrong). Cyclic3, odd-valued: |prediction - target| < 1.
    """
    if name == "threesym":
        return None
    if name == "cyclic3":
        right = (prediction - target).abs() < 1
    else:
        right = prediction.sign() == target
    return right.sum().item() / len(right)


def fourier_coefficients(values):
    """Fourier coefficients f^(S) of a function given on the whole cube, (2^n,) -> (2^n,).

    The fast Walsh-Hadamard transform: one axis of length 2 per bit, summed and differenced in turn.

    >>> x = cube(2)
    >>> fourier_coefficients(x[:, 0] + x[:, 1] - 1).tolist()   # order: {}, {0}, {1}, {0, 1}
    [-1.0, 1.0, 1.0, 0.0]
    """
    coefficients, bits = values, values.numel().bit_length() - 1
    for bit in range(bits):
        pair = coefficients.reshape(-1, 2, 2**bit)  # axis 1 is bit number `bit`
        pair = torch.stack([pair[:, 0] + pair[:, 1], pair[:, 0] - pair[:, 1]], dim=1)
        coefficients = pair.reshape(-1) / 2
    return coefficients


def degrees(bits):
    """Degree |S| of each coefficient, (2^bits,) int64."""
    return (torch.arange(2**bits)[:, None] >> torch.arange(bits) & 1).sum(dim=1)


def minimum_degree_interpolator(values, seen):
    """Values of the exact MDI on the whole cube, from f and the seen part. (2^n,), (2^n,) bool -> (2^n,).

    values: floating point. Dense algebra of size 2^k, where k bits decide what is seen (k <= 12 or so).

    "Lowest degree" alone does not pick one function (Majority has many of degree 2), so this is the
    least degree profile (arXiv 2301.13105, definition 3): energy at degree n is made least, then at
    n - 1 among those that are left, and so on. The seen set constrains only a few bits; for every
    character of the other bits the problem is the same small one, so it is solved once, as a matrix.

    >>> x, target, seen = load_task("2parity", bits=2)
    >>> minimum_degree_interpolator(target, seen).round(decimals=4).tolist()   # x0 + x1 - 1, not x0 x1
    [1.0, -1.0, -1.0, -3.0]
    """
    bits = values.numel().bit_length() - 1
    grid, marks = values.double().reshape([2] * bits), seen.reshape([2] * bits)  # axis a: bit n-1-a
    axes = [a for a in range(bits) if not torch.equal(marks, marks.flip(a))]  # bits seen depends on
    rest = [a for a in range(bits) if a not in axes]
    small = marks.permute(axes + rest).reshape(2 ** len(axes), -1)[:, 0]  # (2^k,)
    table = grid.permute(axes + rest).reshape(2 ** len(axes), -1)  # (2^k, 2^(n-k))
    solved = _least_profile_matrix(small) @ table
    back = torch.tensor(axes + rest).argsort().tolist()
    return solved.reshape([2] * bits).permute(back).reshape(-1).to(values.dtype)


def _least_profile_matrix(seen):
    """The linear map from f to its MDI on a cube small enough for dense algebra, (2^k, 2^k) float64."""
    bits, points = seen.numel().bit_length() - 1, torch.eye(seen.numel(), dtype=torch.float64)
    hadamard = torch.stack([fourier_coefficients(e) for e in points], dim=1)  # values -> coefficients
    known = points * seen  # keeps the seen values, puts 0 on the unseen points
    free = points[:, ~seen]  # directions that the seen values leave open
    for degree in range(bits, -1, -1):
        rows = hadamard[degrees(bits) == degree]
        step = torch.linalg.pinv(rows @ free) @ (rows @ known)
        known = known - free @ step
        _, sizes, basis = torch.linalg.svd(rows @ free)
        free = free @ basis[int((sizes > 1e-9).sum()):].T
        if not free.shape[1]:
            break
    return known
