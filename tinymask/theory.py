"""Why a mask persists: closed forms and bounds of Theorem 1, Corollary 1 and Proposition 1, as code.

One attention row, with query q, keys k_1 ... k_N and mask logits m_1 ... m_N (paper, section 6.1, App. D):

    p = softmax(z),   z_j = q . k_j / sqrt(d) + log sigmoid(m_j)

Changing z_j changes p_i by p_i (delta_ij - p_j), and the chain rule does the rest. What reaches q and k carries their
norms as a factor; what reaches m carries sigmoid(-m) <= 1, which saturates where the prior is open, while p_j is small
where it is closed: the mask's gradient is small at both ends. (A step of SGD then is, too. Adam divides that size out.)
At the closed end the paper's bound p_i sigmoid(-m_j) says nothing, for sigmoid(-m_j) is about 1 there: what keeps a
closed entry shut is p_j itself, in p_i p_j sigmoid(-m_j), and query and key have a say in p_j (see `leak`).

Everything here is written for one row, so that it can be read beside the paper, and every function is
checked against autograd in the tests. Symbols are the paper's. Shapes: N keys, d head width; q (d,), k (N, d),
with k_j = k[j], m (N,), p (N,), logits z (N,); L is a loss, g = dL/dp (N,).
"""
import torch
import torch.nn.functional as F
from torch import Tensor


def attention_row(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """p = softmax(q . k_j / sqrt(d) + log sigmoid(m_j)). (d,), (N, d), (N,) -> (N,).

    >>> attention_row(torch.zeros(1), torch.zeros(2, 1), torch.tensor([0.0, 0.0])).tolist()
    [0.5, 0.5]
    """
    return (k @ q / k.shape[-1] ** 0.5 + F.logsigmoid(m)).softmax(dim=-1)


def dp_dz(p: Tensor) -> Tensor:
    """Softmax Jacobian p_i (delta_ij - p_j), (N,) -> (N, N).

    >>> dp_dz(torch.tensor([0.5, 0.5])).tolist()
    [[0.25, -0.25], [-0.25, 0.25]]
    """
    return p.diag() - torch.outer(p, p)


def dp_dq(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """Theorem 1, eq. 2: p_i (k_i - sum_l p_l k_l) / sqrt(d). Returns (N, d).

    >>> dp_dq(torch.zeros(1), torch.tensor([[1.0], [-1.0]]), torch.zeros(2)).tolist()  # the mean key is 0
    [[0.5], [-0.5]]
    """
    p = attention_row(q, k, m)
    return p[:, None] * (k - p @ k) / k.shape[-1] ** 0.5


def dp_dk(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """Theorem 1, eq. 3: p_i (delta_ij - p_j) q / sqrt(d). Returns (N, N, d): [i, j] is dp_i / dk_j.

    >>> dp_dk(torch.tensor([2.0]), torch.zeros(2, 1), torch.zeros(2))[0].tolist()  # 1/2 (1 - 1/2) 2, then its opposite
    [[0.5], [-0.5]]
    """
    p = attention_row(q, k, m)
    return dp_dz(p)[:, :, None] * q / k.shape[-1] ** 0.5


def dp_dm(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """Theorem 1, eq. 4: p_i (delta_ij - p_j) sigmoid(-m_j). Returns (N, N): [i, j] is dp_i / dm_j.

    >>> dp_dm(torch.zeros(1), torch.zeros(2, 1), torch.zeros(2)).tolist()  # 1/2 (1 - 1/2) 1/2
    [[0.125, -0.125], [-0.125, 0.125]]
    """
    return dp_dz(attention_row(q, k, m)) * torch.sigmoid(-m)


def dp_dwq(x: Tensor, q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """On to the weights: q = W_Q^T x with x (D,), so dp_i/dW_Q is x times dp_i/dq. Returns (N, D, d).

    >>> dp_dwq(torch.tensor([3.0]), torch.zeros(1), torch.tensor([[1.0], [-1.0]]), torch.zeros(2)).flatten().tolist()
    [1.5, -1.5]
    """
    return x[:, None] * dp_dq(q, k, m)[:, None]


def dp_dwk(x: Tensor, q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """k_j = W_K^T x_j with x (N, D): dp_i/dW_K = p_i (x_i - sum_j p_j x_j) times q / sqrt(d). Returns (N, D, d).

    >>> dp_dwk(torch.tensor([[1.0], [3.0]]), torch.ones(1), torch.zeros(2, 1), torch.zeros(2)).flatten().tolist()
    [-0.5, 0.5]
    """
    p = attention_row(q, k, m)
    return (p[:, None] * (x - p @ x))[:, :, None] * q / k.shape[-1] ** 0.5


def leak(q: Tensor, k: Tensor, m: Tensor) -> Tensor:
    """How far a closed entry j can open beside an open one i: p_j <= e^(s_j - s_i) sigmoid(m_j) / sigmoid(m_i).

    s = q . k / sqrt(d), the logits of query and key, which can make up for any closed m_j. With it the sharp form of
    Corollary 1, |dp_i/dm_j| = p_i p_j sigmoid(-m_j), is bounded from the inputs alone. Returns (N, N), [i, j].

    >>> print(leak(torch.zeros(1), torch.zeros(2, 1), torch.tensor([10.0, -10.0]))[0])  # e^-10 at equal logits
    tensor([1.0000e+00, 4.5400e-05])
    """
    z = k @ q / k.shape[-1] ** 0.5 + F.logsigmoid(m)
    return (z - z[:, None]).exp()


def bounds(q: Tensor, k: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Corollary 1: upper bounds on the norms of the three derivatives, each (N,) over i or (N, N).

    Returns (dq, dk, dm): |dp_i/dq| <= 2 p_i max|k| / sqrt(d), |dp_i/dk_j| <= p_i |q| / sqrt(d), and
    |dp_i/dm_j| = p_i |delta_ij - p_j| sigmoid(-m_j) <= p_i sigmoid(-m_j) <= p_i; the third is the one in between. It is
    reached only in a limit, p_j -> 0 for i = j, 1 else: of an open i and a closed j it is 1 / p_j times too large,
    22,000 times at M = +10 and -10.

    >>> [bound.tolist() for bound in bounds(torch.tensor([2.0]), torch.ones(2, 1), torch.zeros(2))]
    [[1.0, 1.0], [1.0, 1.0], [[0.25, 0.25], [0.25, 0.25]]]
    """
    p, root = attention_row(q, k, m), k.shape[-1] ** 0.5
    return (
        2 * p * k.norm(dim=-1).max() / root,
        p * q.norm() / root,
        torch.outer(p, torch.sigmoid(-m)),
    )


def dloss_dm(q: Tensor, k: Tensor, m: Tensor, g: Tensor) -> Tensor:
    """Gradient of a loss on the mask, with g = dL/dp (N,): sigmoid(-m_j) p_j (g_j - sum_i p_i g_i).

    The bracket is at most max g - min g, so |dL/dm_j| <= sigmoid(-m_j) p_j (max g - min g). Returns (N,).

    >>> dloss_dm(torch.zeros(1), torch.zeros(2, 1), torch.zeros(2), torch.tensor([1.0, 0.0])).tolist()
    [0.125, -0.125]
    """
    p = attention_row(q, k, m)
    return torch.sigmoid(-m) * p * (g - p @ g)


def hadamard_map(a: Tensor, m: Tensor) -> Tensor:
    """The multiplicative alternative of App. B: sigmoid(M) o softmax(A), whose rows no longer sum to 1.

    Proposition 1: |softmax(A)|_F >= 1 for any square A, masked or not, while this map can vanish; and
    at the same A its Jacobian has the smaller Frobenius norm. The second statement compares it with
    softmax(A), not with softmax(A + log sigmoid(M)): the tests hold a counter-example to that reading.
    (N, N), (N, N) -> (N, N).
    """
    return torch.sigmoid(m) * a.softmax(dim=-1)
