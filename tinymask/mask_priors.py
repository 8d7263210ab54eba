"""Task structures as initial mask logits M: which token may look at which, before any training.

A prior is built in two steps. First its *support*, a 0/1 matrix: entry (i, j) is 1 where row (query) i may attend to
column (key) j. Then `to_mask` turns it into logits: +10 where open, -10 where closed (paper, table 7 and section G.1),
which log sigmoid maps to -0.00005 and -10.00005. A row whose entries are all equal, all closed included, carries no
prior: softmax ignores the shift, and the row attends as in a plain model. So a support says what *each* row does.

The designs follow the paper's principles (App. E): (1) open the interaction that the task is made of, (2) close the
shortcut that fits the seen part only, (3) give heads different roles, (4) let layers compose. Each docstring draws its
support: a line is a row, # what it may look at. Shapes: N tokens, H heads; a support or mask is (N, N), shared by the
heads, or (H, N, N), and a prior is a list with one for each layer. The paper's symbols: M is what `to_mask` gives, x_i
is token i, f what a task asks for; a support is what its Fig. 2 draws. Priors made wrong on purpose stand in `inits`.
"""
import itertools

import torch
from torch import Tensor

from tinymask.arithmetic import answer_tokens, operand_tokens


def to_mask(support: Tensor, open: float = 10.0, closed: float = -10.0) -> Tensor:
    """Mask logits M of a 0/1 support: `open` where it is 1, `closed` where it is 0. Same shape, float32.

    >>> to_mask(torch.eye(2)).tolist()
    [[10.0, -10.0], [-10.0, 10.0]]
    """
    return torch.where(support > 0, float(open), float(closed))


def draw(support: Tensor) -> str:
    """A support as text, (N, N) or (H, N, N): # where a row may look, one line a row, heads side by side."""
    heads = support if support.ndim == 3 else support[None]
    return "\n".join("   ".join(" ".join(".#"[int(entry > 0)] for entry in row) for row in rows)
                     for rows in heads.transpose(0, 1))


# -- Boolean tasks (section 5.1): n bits, x0 first ------------------------------------------------------------------


def parity2_support(tokens: int, depth: int, heads: int) -> list[Tensor]:
    """2Parity, f = x0 x1: row 0 looks at x1 and row 1 at x0, every other row at itself only.

    Opened (1): the one pair that f multiplies; a row sees its own bit through the residual stream and
    the other through attention, and its MLP can form the product. Closed (2): every way for another
    row to collect x0 and x1 and add them up, as the MDI x0 + x1 - 1 does. On themselves the other rows
    stay constants of their own token; wholly closed, they would attend to everything (see above).

    >>> print(draw(parity2_support(4, depth=1, heads=1)[0]))
    . # . .
    # . . .
    . . # .
    . . . #
    """
    support = torch.eye(tokens)
    support[:2, :2] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    return [support] * depth


def majority3_support(tokens: int, depth: int, heads: int) -> list[Tensor]:
    """3-bit majority: rows 0, 1, 2 look at themselves, every other row at x0, x1 and x2 alike.

    Opened (1): aggregation. The other rows average the three votes, and the sign of that sum is what
    their MLPs have to find. Closed (2): every pair among the votes, for the MDI is made of the products
    x0 x2 and x1 x2, which rows 0 to 2 could form if they saw each other.

    >>> print(draw(majority3_support(5, depth=1, heads=1)[0]))
    # . . . .
    . # . . .
    . . # . .
    # # # . .
    # # # . .
    """
    support = torch.zeros(tokens, tokens)
    support[:, :3] = 1
    support[:3, :3] = torch.eye(3)
    return [support] * depth


def cyclic3_support(tokens: int, depth: int, heads: int) -> list[Tensor]:
    """Cyclic3, the sum of x_i x_{i+1} x_{i+2}: in each layer row i looks at its neighbour i + 1 only.

    Opened (1), by composition (4): layer 1 brings x_{i+1} to row i, layer 2 brings what row i + 1 has
    by then, x_{i+1} x_{i+2}. Closed (2): with two layers x0, x1 and x2 meet in row 0 alone, where the
    same product is formed as in all rows, for which it was learnt from points that show it in full.

    >>> print(draw(cyclic3_support(4, depth=1, heads=1)[0]))
    . # . .
    . . # .
    . . . #
    # . . .
    """
    return [torch.eye(tokens).roll(1, dims=1)] * depth


def threesym_support(tokens: int, depth: int, heads: int) -> list[Tensor]:
    """ThreeSym, three weighted products of x0, x1, x2: head h has pair h, whose two tokens look at each other.

    Opened (1): the three pairs, told apart by the head (3). Closed (2): every other meeting of bits; the other tokens,
    and all tokens in later layers, look at themselves. Rows 0 to 2 still see all three bits, and with them the shortcut
    (on the seen part a product equals the third bit). Raises ValueError for fewer than 3 heads.

    >>> print(draw(threesym_support(4, depth=1, heads=3)[0]))
    . # . .   # . . .   . . # .
    # . . .   . . # .   . # . .
    . . # .   . # . .   # . . .
    . . . #   . . . #   . . . #
    """
    if heads < 3:
        raise ValueError(f"ThreeSym's prior needs 3 heads, one for each pair, got {heads}")
    first = torch.eye(tokens).repeat(heads, 1, 1)
    for head in range(heads):
        i, j = head % 3, (head + 1) % 3
        first[head, [i, j]] = first[head, [j, i]]
    return [first] + [torch.eye(tokens)] * (depth - 1)


def with_cls(supports: list[Tensor]) -> list[Tensor]:
    """Supports for a sequence with a CLS token in front: it reads all, no row but itself reads it.

    What a prior keeps from meeting in the other rows meets in this one. A list of (..., N, N) -> a list
    of (..., N + 1, N + 1).

    >>> print(draw(with_cls(parity2_support(2, depth=1, heads=1))[0]))
    # # #
    . . #
    . # .
    """
    extended = []
    for support in supports:
        larger = support.new_zeros(*support.shape[:-2], support.shape[-2] + 1, support.shape[-1] + 1)
        larger[..., 1:, 1:] = support
        larger[..., 0, :] = 1
        extended.append(larger)
    return extended


# -- arithmetic (section 5.2): operands of n digits, a_k and b_k being those of significance k (0 the lowest) --------
# All take the same arguments, though only sequences can be reversed.


def addition_support(digits: int, depth: int, heads: int, reverse: bool = False) -> list[Tensor]:
    """One-pass addition, tokens a b: first the digits of one significance, then the carries.

    Layer 1: a digit looks at the digit of its significance, and at itself (1). In the later layers every
    second head looks at both digits of the next lower significance instead, where the carry comes from
    (3); over these layers it travels as far as it must (4). Closed (2): every other pair of digits.
    Raises ValueError for fewer than 2 heads or layers: nothing would carry.

    >>> print(draw(addition_support(2, depth=2, heads=2)[1]))  # tokens a1 a0 b1 b0; head 1 carries
    # . # .   . # . #
    . # . #   . # . #
    # . # .   . # . #
    . # . #   . # . #
    """
    if heads < 2 or depth < 2:
        raise ValueError(f"the prior of a sum needs 2 heads and 2 layers, got {heads} and {depth}")
    a, b = operand_tokens(digits)
    pairs, lower = torch.eye(2 * digits), torch.eye(2 * digits)
    for k in range(digits):
        pairs[[a[k], b[k]], [b[k], a[k]]] = 1
        lower[[a[k], b[k]]] = pairs[[a[k - 1], b[k - 1]]] if k else pairs[[a[k], b[k]]]
    return [pairs] + [torch.stack([(pairs, lower)[head % 2] for head in range(heads)])] * (depth - 1)


def multiplication_support(digits: int, depth: int, heads: int, reverse: bool = False) -> list[Tensor]:
    """One-pass multiplication, tokens a b: long multiplication, one digit of a to each layer.

    Token 2n - 1 - k gives digit k. In layer i < n (1, 3) its first heads look at a_i and its last ones at b_{k-i},
    the factors of the i-th partial product in column k; where there is none, at itself. In the layers after these
    (4) its heads look, in turn, one column down, two down (at itself where there is none), at itself with all
    columns below, and at itself: where its carry comes from. Closed (2): every product of another column.
    Raises ValueError for fewer than 2 heads or n + 1 layers.

    >>> print(draw(multiplication_support(2, depth=3, heads=2)[1]))  # layer 1: a_1, and b_{k-1} for columns 2, 1
    # . . .   # . . .
    # . . .   . . # .
    # . . .   . . . #
    . . . #   . . . #
    """
    if heads < 2 or depth <= digits:
        raise ValueError(f"the prior of a product needs 2 heads and {digits + 1} layers, got {heads} and {depth}")
    tokens, (a, b), row_of = 2 * digits, operand_tokens(digits), answer_tokens("mul", digits)
    products = torch.eye(tokens).repeat(digits, heads, 1, 1)
    for i, k in itertools.product(range(digits), range(tokens)):
        if 0 <= k - i < digits:
            row = products[i, :, row_of[k]]  # (H, N)
            row.zero_()
            row[: heads // 2, a[i]] = 1
            row[heads // 2:, b[k - i]] = 1
    itself = torch.eye(tokens)
    down = [torch.cat([itself[d:], itself[tokens - d:]]) for d in (1, 2)]  # a lower column is a later token
    kinds = torch.stack([*down, torch.ones(tokens, tokens).triu(), itself])
    return list(products) + [kinds[torch.arange(heads) % 4]] * (depth - digits)


def addition_sequence_support(digits: int, depth: int, heads: int, reverse: bool = False) -> list[Tensor]:
    """Autoregressive addition, a + b = answer: b_k looks at a_k, an answer at the b of its significance and below.

    Every layer has the same: one layer brings the pairs together, the next ones collect what decides a digit, its own
    pair and the carries below. The row that gives a digit is that of the token before it. All other rows, and these
    too, look at themselves. reverse: the answer's lowest digit comes first. Raises ValueError for fewer than 2 layers.

    >>> print(draw(addition_sequence_support(2, depth=2, heads=1)[0]))  # a1 a0 + b1 b0 = c2 c1
    # . . . . . . .
    . # . . . . . .
    . . # . . . . .
    # . . # . . . .
    . # . . # . . .
    . . . # # # . .
    . . . # # . # .
    . . . . # . . #
    """
    if depth < 2:
        raise ValueError("the prior of a sequence needs 2 layers, for pairs of digits and for the answer, got 1")
    (a, b), rows = operand_tokens(digits, sequence=True), answer_tokens("add", digits, sequence=True, reverse=reverse)
    support = torch.eye(3 * digits + 2)
    support[b, a] = 1
    for k, row in enumerate(rows):
        support[row, b[: k + 1]] = 1
    return [support] * depth


def multiplication_sequence_support(digits: int, depth: int, heads: int, reverse: bool = False) -> list[Tensor]:
    """Autoregressive multiplication, a * b = answer: b_k looks at all of a, an answer at all digits that reach it.

    Those of significance k and below, in both factors. Otherwise as `addition_sequence_support`.

    >>> print(draw(multiplication_sequence_support(2, depth=2, heads=1)[0][3:]))  # b1 b0 = c3 c2 c1
    # # . # . . . . .
    # # . . # . . . .
    # # . # # # . . .
    # # . # # . # . .
    # # . # # . . # .
    . # . . # . . . #
    """
    if depth < 2:
        raise ValueError("the prior of a sequence needs 2 layers, for pairs of digits and for the answer, got 1")
    (a, b), rows = operand_tokens(digits, sequence=True), answer_tokens("mul", digits, sequence=True, reverse=reverse)
    support = torch.eye(4 * digits + 1)
    for row in b:
        support[row, a] = 1
    for k, row in enumerate(rows):
        support[row, a[: k + 1] + b[: k + 1]] = 1
    return [support] * depth


# -- images (section 5.3): tokens are the patches of a square, row by row --------------------------------------------

# (down, right) of what a head looks at, in the paper's order: centre, up, right, left, down, then corners
IMPULSES = [(0, 0), (-1, 0), (0, 1), (0, -1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1)]


def impulse_offsets(layer: int, heads: int, vary: bool = False) -> list[tuple[int, int]]:
    """(down, right), one for each head of a layer; vary: as in `impulse_support`."""
    return [IMPULSES[(head + vary * layer * heads) % len(IMPULSES)] for head in range(heads)]


def impulse_support(side: int, depth: int, heads: int, vary: bool = False) -> list[Tensor]:
    """A 3 x 3 convolution as attention (section 5.3, Fig. 9): each head looks at one neighbour of a patch.

    Head h has the h-th of IMPULSES, the same in every layer; vary: layer l goes on where layer l - 1 ended,
    so that three heads see all nine within three layers. A patch without that neighbour, at the border,
    looks at itself. Returns a list of (H, N, N), N = side^2.

    >>> print(draw(impulse_support(2, depth=1, heads=3)[0]))  # centre, up, right
    # . . .   # . . .   . # . .
    . # . .   . # . .   . # . .
    . . # .   # . . .   . . . #
    . . . #   . # . .   . . . #
    """
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    layers = []
    for layer in range(depth):
        support = torch.zeros(heads, side**2, side**2)
        for head, (down, right) in enumerate(impulse_offsets(layer, heads, vary)):
            inside = (row + down).clamp(0, side - 1) == row + down
            inside &= (column + right).clamp(0, side - 1) == column + right
            target = torch.where(inside, (row + down) * side + column + right, row * side + column)
            support[head, torch.arange(side**2), target.flatten()] = 1
        layers.append(support)
    return layers


# -- language (section 5.4, App. F): the further back, the less open -------------------------------------------------


def distance_mask(tokens: int, slopes: list[float]) -> Tensor:
    """Mask logits that fall with the distance to the past, M_ij = -slope max(i - j, 0): (H, N, N).

    slopes: one for each head. The paper has 10 in every head, as log sigmoid(10 M) with M = -distance; here
    the 10 is in M itself, which then moves by the learning rate as all of M does, and not ten times as fast.
    log sigmoid(-x) is -x a few nats down, but falls half as fast near 0. Far down M stops at -10,000, where
    attention is 0 in any precision.

    >>> distance_mask(3, [2.0])[0].tolist()
    [[-0.0, -0.0, -0.0], [-2.0, -0.0, -0.0], [-4.0, -2.0, -0.0]]
    """
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (-torch.tensor(slopes)[:, None, None] * distance.clamp(min=0)).clamp(min=-1e4)


def geometric_slopes(heads: int) -> list[float]:
    """One slope a head, of the published bias without a sigmoid: 2^(-8/H), 2^(-16/H), ..., 2^-8 (arXiv 2108.12409).

    >>> geometric_slopes(2)
    [0.0625, 0.00390625]
    """
    return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]


# -- other designs: in the paper's words where ours differs, and without position codes ------------------------------


def parity2_literal_support(tokens: int, depth: int, heads: int) -> list[Tensor]:
    """2Parity in the paper's words: only x0 <-> x1 is open; rows 2, 3, ... are closed throughout, and have no prior."""
    support = torch.zeros(tokens, tokens)
    support[0, 1] = support[1, 0] = 1
    return [support] * depth


def majority3_literal_support(tokens: int, depth: int, heads: int) -> list[Tensor]:
    """3-bit majority in the paper's words: all off the diagonal is closed, so that bits meet in pooling alone."""
    return [torch.eye(tokens)] * depth


def addition_literal_support(digits: int, depth: int, heads: int, reverse: bool = False) -> list[Tensor]:
    """Addition in the paper's words: attention between corresponding digits of the two numbers only."""
    return [torch.eye(2 * digits).roll(digits, dims=1)] * depth


def multiplication_literal_support(digits: int, depth: int, heads: int, reverse: bool = False) -> list[Tensor]:
    """Multiplication in the paper's words: from every digit of a number to those of the other number."""
    number = torch.arange(2 * digits) >= digits
    return [(number[:, None] != number).float()] * depth


def threesym_alone_support(tokens: int, depth: int, heads: int) -> list[Tensor]:
    """ThreeSym without position codes: each row knows one pair at most, and no bit alone stands out.

    In layer 1, rows 3 to 8 have a pair (i, j) each: head p, for pair p, looks at i and the others at j,
    or the other way round. Where i and j agree, the row does not tell which pair it has; where they
    differ, the two rows of a pair cannot tell, together, which of them is +1. So without position codes
    x0, x1 and x2 alone count alike in the mean over tokens, whatever a row computes, and the MDI
    (-1.25 x0 + 1.5 x1 + x2) cannot be expressed. All other rows, and all rows in later layers, look at
    themselves. For mean pooling: a CLS token sees all bits. Raises ValueError for fewer than 3 heads or
    9 tokens.

    >>> print(draw(threesym_alone_support(9, depth=1, heads=3)[0][:, 3:, :3]))  # rows 3 to 8, columns x0 x1 x2
    # . .   . # .   . # .
    . . #   . # .   . . #
    # . .   # . .   . . #
    . # .   # . .   # . .
    . # .   . . #   . # .
    . . #   . . #   # . .
    """
    if heads < 3 or tokens < 9:
        raise ValueError(f"ThreeSym's prior without position codes needs 3 heads and 9 tokens, got {heads}, {tokens}")
    first = torch.eye(tokens).repeat(heads, 1, 1)
    for row in range(3, 9):
        first[:, row] = 0
        pair, i, j = row % 3, row % 3, (row + 1) % 3
        if row >= 6:
            i, j = j, i
        first[:, row, j] = 1
        first[pair::3, row] = torch.eye(tokens)[i]
    return [first] + [torch.eye(tokens)] * (depth - 1)


# design (a column of the table in `inits`) -> task -> support
BOOLEAN = {"ours": {"2parity": parity2_support, "majority": majority3_support, "cyclic3": cyclic3_support,
                    "threesym": threesym_support}}
BOOLEAN["literal"] = BOOLEAN["ours"] | {"2parity": parity2_literal_support, "majority": majority3_literal_support}
BOOLEAN["alone"] = BOOLEAN["ours"] | {"threesym": threesym_alone_support}
ARITHMETIC = {"ours": {"add": addition_support, "mul": multiplication_support},
              "literal": {"add": addition_literal_support, "mul": multiplication_literal_support},
              "sequence": {"add": addition_sequence_support, "mul": multiplication_sequence_support}}
