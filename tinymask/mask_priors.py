"""Task structures as initial mask logits M: which token may look at which, before any training.

A prior is built in two steps. First its *support*, a 0/1 matrix: entry (i, j) is 1 where row (query) i
may attend to column (key) j. Then `to_mask` turns it into logits: +10 where open, -10 where closed
(paper, table 7 and section G.1), which log sigmoid maps to -0.00005 and -10.00005.

A row whose entries are all equal, all closed included, carries no prior: softmax ignores the shift
and the row attends as in a plain model. So every support here says what *each* row does (a row that is to look
at everything, as the highest digit of a product does for its carry, has no prior, and is meant to have none).

The designs follow the paper's principles (App. E): (1) open the interaction that the task is made of,
(2) close the shortcut that fits the seen part only, (3) give heads different roles, (4) let layers
compose. Shapes: N tokens, H heads; a support or mask is (N, N), shared by the heads, or (H, N, N), and
a prior is a list with one of them for each layer. The paper's symbols: M is what `to_mask` gives, x_i is
token i, f the function that a task asks for; a support is what its Fig. 2 draws.
"""
import itertools

import torch
import torch.nn.functional as F


def to_mask(support, open=10.0, closed=-10.0):
    """Mask logits M of a 0/1 support: `open` where it is 1, `closed` where it is 0. Same shape, float32.

    >>> to_mask(torch.eye(2)).tolist()
    [[10.0, -10.0], [-10.0, 10.0]]
    """
    return torch.where(support > 0, float(open), float(closed))


def parity2_support(tokens, depth, heads):
    """2Parity, f = x0 x1: row 0 looks at x1 and row 1 at x0, every other row at itself only.

    Opened (1): the one pair that f multiplies; a row sees its own bit through the residual stream and
    the other through attention, and its MLP can form the product. Closed (2): every way for another
    row to collect x0 and x1 and add them up, as the MDI x0 + x1 - 1 does. The other rows carry bits
    that do not matter: on themselves they stay constants of their own token, whereas a wholly closed
    row would attend to everything (see above), and the model then extrapolates wrongly.

    >>> parity2_support(3, depth=1, heads=1)[0].tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    support = torch.eye(tokens)
    support[:2, :2] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    return [support] * depth


def majority3_support(tokens, depth, heads):
    """3-bit majority: rows 0, 1, 2 look at themselves, every other row at x0, x1 and x2 alike.

    Opened (1): aggregation. The other rows average the three votes, and the sign of that sum is what
    their MLPs have to find. Closed (2): every pair among the votes, for the MDI is made of the products
    x0 x2 and x1 x2, which rows 0 to 2 could form if they saw each other.

    >>> majority3_support(4, depth=1, heads=1)[0][2:].tolist()  # a vote, and a row that counts
    [[0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    """
    support = torch.zeros(tokens, tokens)
    support[:, :3] = 1
    support[:3, :3] = torch.eye(3)
    return [support] * depth


def cyclic3_support(tokens, depth, heads):
    """Cyclic3, the sum of x_i x_{i+1} x_{i+2}: in each layer row i looks at its neighbour i + 1 only.

    Opened (1), by composition (4): layer 1 brings x_{i+1} to row i, layer 2 brings what row i + 1 has
    by then, x_{i+1} x_{i+2}. Closed (2): with two layers x0, x1 and x2 meet in row 0 alone, where the
    same product is formed as in all rows, for which it was learnt from points that show it in full.

    >>> cyclic3_support(3, depth=1, heads=1)[0].tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    return [torch.eye(tokens).roll(1, dims=1)] * depth


def threesym_support(tokens, depth, heads):
    """ThreeSym, three weighted products of x0, x1, x2: head h has pair h, whose two tokens look at each other.

    Opened (1): the three pairs, told apart by the head (3). Closed (2): every other meeting of bits; the
    other tokens, and all tokens in later layers, look at themselves. Rows 0 to 2 still see all three bits,
    and with them the shortcut (on the seen part a product equals the third bit). Raises ValueError for
    fewer than 3 heads.

    >>> threesym_support(3, depth=1, heads=3)[0][1].tolist()  # head 1: x1 and x2
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    if heads < 3:
        raise ValueError(f"ThreeSym's prior needs 3 heads, one for each pair, got {heads}")
    first = torch.eye(tokens).repeat(heads, 1, 1)
    for head in range(heads):
        i, j = head % 3, (head + 1) % 3
        first[head, [i, j]] = first[head, [j, i]]
    return [first] + [torch.eye(tokens)] * (depth - 1)


def threesym_alone_support(tokens, depth, heads):
    """ThreeSym without position codes: each row knows one pair at most, and no bit alone stands out.

    In layer 1, rows 3 to 8 have a pair (i, j) each: head p, for pair p, looks at i and the others at j,
    or the other way round. Where i and j agree, the row does not tell which pair it has; where they
    differ, the two rows of a pair cannot tell, together, which of them is +1. So without position codes
    x0, x1 and x2 alone count alike in the mean over tokens, whatever a row computes, and the MDI
    (-1.25 x0 + 1.5 x1 + x2) cannot be expressed. All other rows, and all rows in later layers, look at
    themselves. For mean pooling: a CLS token sees all bits. Raises ValueError for fewer than 3 heads or
    9 tokens.
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


def parity2_literal_support(tokens, depth, heads):
    """2Parity in the paper's words: only x0 <-> x1 is open, so rows 2, 3, ... are closed throughout.

    Those rows then carry no prior at all (a constant row), and attend as in a plain model.
    """
    support = torch.zeros(tokens, tokens)
    support[0, 1] = support[1, 0] = 1
    return [support] * depth


def majority3_literal_support(tokens, depth, heads):
    """3-bit majority in the paper's words: everything off the diagonal is closed, so no bits ever meet.

    Only the pooling still adds the tokens up: the model is a sum of functions of one bit each.
    """
    return [torch.eye(tokens)] * depth


BOOLEAN = {
    "2parity": parity2_support, "majority": majority3_support,
    "cyclic3": cyclic3_support, "threesym": threesym_support,
}
# where another design is wanted: in the paper's words, and with the mask in place of position codes
BOOLEAN_LITERAL = BOOLEAN | {"2parity": parity2_literal_support, "majority": majority3_literal_support}
BOOLEAN_ALONE = BOOLEAN | {"threesym": threesym_alone_support}


# -- arithmetic: operands of n digits, a_k and b_k being those of significance k (0 the lowest) ----
# All take the same arguments, though only sequences can be reversed, so that a script can call any.


def addition_support(digits, depth, heads, reverse=False):
    """One-pass addition, tokens a b: first the digits of one significance, then the carries.

    Layer 1: a digit looks at the digit of its significance, and at itself (1). In the later layers every
    second head looks at both digits of the next lower significance instead, where the carry comes from
    (3); over these layers it travels as far as it must (4). Closed (2): every other pair of digits.
    Raises ValueError for fewer than 2 heads or layers: nothing would carry.

    >>> pairs, (same, lower) = addition_support(2, depth=2, heads=2)  # tokens a1 a0 b1 b0
    >>> pairs[0].tolist(), lower[0].tolist()  # a1 looks at a1 and b1, then at a0 and b0
    ([1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0])
    """
    if heads < 2 or depth < 2:
        raise ValueError(f"the prior of a sum needs 2 heads and 2 layers, got {heads} and {depth}")
    a, b = _digit_tokens(digits, second=digits)
    pairs, lower = torch.eye(2 * digits), torch.eye(2 * digits)
    for k in range(digits):
        pairs[[a[k], b[k]], [b[k], a[k]]] = 1
        lower[[a[k], b[k]]] = pairs[[a[k - 1], b[k - 1]]] if k else pairs[[a[k], b[k]]]
    return [pairs] + [torch.stack([(pairs, lower)[head % 2] for head in range(heads)])] * (depth - 1)


def multiplication_support(digits, depth, heads, reverse=False):
    """One-pass multiplication, tokens a b: long multiplication, one digit of a to each layer.

    The answer has as many digits as there are tokens, and token 2n - 1 - k has to give digit k. In layer
    i < n (1, 3) its first heads look at a_i and its last ones at b_{k-i}, the factors of the i-th partial
    product in column k; where there is none, at itself. In the layers after these (4) its heads look, in
    turn, one column down, two down (at itself where there is none), at itself with all columns below, and at
    itself: where its carry comes from. Closed (2): every product of another column.
    Raises ValueError for fewer than 2 heads or n + 1 layers.
    """
    if heads < 2 or depth <= digits:
        raise ValueError(f"the prior of a product needs 2 heads and {digits + 1} layers, got {heads} and {depth}")
    tokens, (a, b) = 2 * digits, _digit_tokens(digits, second=digits)
    products = torch.eye(tokens).repeat(digits, heads, 1, 1)
    for i, k in itertools.product(range(digits), range(tokens)):
        if 0 <= k - i < digits:
            row = products[i, :, tokens - 1 - k]  # (H, N)
            row.zero_()
            row[: heads // 2, a[i]] = 1
            row[heads // 2:, b[k - i]] = 1
    itself = torch.eye(tokens)
    down = [torch.cat([itself[d:], itself[tokens - d:]]) for d in (1, 2)]  # a lower column is a later token
    kinds = torch.stack([*down, torch.ones(tokens, tokens).triu(), itself])
    return list(products) + [kinds[torch.arange(heads) % 4]] * (depth - digits)


def addition_literal_support(digits, depth, heads, reverse=False):
    """Addition in the paper's words: attention between corresponding digits of the two numbers only."""
    return [torch.eye(2 * digits).roll(digits, dims=1)] * depth


def multiplication_literal_support(digits, depth, heads, reverse=False):
    """Multiplication in the paper's words: from every digit of a number to those of the other number."""
    number = torch.arange(2 * digits) >= digits
    return [(number[:, None] != number).float()] * depth


def addition_sequence_support(digits, depth, heads, reverse=False):
    """Autoregressive addition, a + b = answer: b_k looks at a_k, an answer at the b of its significance and below.

    Every layer has the same: one layer brings the pairs together, the next ones collect what decides a
    digit, its own pair and the carries below. The row that gives a digit is that of the token before it.
    All other rows, and these too, look at themselves. reverse: the answer's lowest digit comes first.
    Raises ValueError for fewer than 2 layers.
    """
    _check_two_layers(depth)
    a, b = _digit_tokens(digits, second=digits + 1)
    support = torch.eye(3 * digits + 2)
    support[b, a] = 1
    for k in range(digits + 1):
        row = 2 * digits + 1 + (k if reverse else digits - k)
        support[row, b[: k + 1]] = 1
    return [support] * depth


def multiplication_sequence_support(digits, depth, heads, reverse=False):
    """Autoregressive multiplication, a * b = answer: b_k looks at all of a, an answer at all digits that reach it.

    Those of significance k and below, in both factors. Otherwise as `addition_sequence_support`.
    """
    _check_two_layers(depth)
    a, b = _digit_tokens(digits, second=digits + 1)
    support = torch.eye(4 * digits + 1)
    for row in b:
        support[row, a] = 1
    for k in range(2 * digits):
        row = 2 * digits + 1 + (k if reverse else 2 * digits - 1 - k)
        support[row, a[: k + 1] + b[: k + 1]] = 1
    return [support] * depth


def _digit_tokens(digits, second):
    """Tokens of a_0, a_1, ... and b_0, b_1, ..., for a b that starts at token `second`."""
    return [digits - 1 - k for k in range(digits)], [second + digits - 1 - k for k in range(digits)]


def _check_two_layers(depth):
    if depth < 2:
        raise ValueError("the prior of a sequence needs 2 layers, for pairs of digits and for the answer, got 1")


ARITHMETIC = {
    "one-pass": {"add": addition_support, "mul": multiplication_support},
    "autoregressive": {"add": addition_sequence_support, "mul": multiplication_sequence_support},
}
ARITHMETIC_LITERAL = {"add": addition_literal_support, "mul": multiplication_literal_support}  # one-pass


# -- images: tokens are the patches of a square, row by row ----------------------------------------

# (down, right) of what a head looks at, in the paper's order: centre, up, right, left, down, then corners
IMPULSES = [(0, 0), (-1, 0), (0, 1), (0, -1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1)]


def impulse_support(side, depth, heads, vary=False):
    """A 3 x 3 convolution as attention (section 5.3, Fig. 9): each head looks at one neighbour of a patch.

    Head h has the h-th of IMPULSES, the same in every layer; vary: layer l goes on where layer l - 1 ended,
    so that three heads see all nine within three layers. A patch without that neighbour, at the border,
    looks at itself. Returns a list of (H, N, N), N = side^2.
    """
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    layers = []
    for layer in range(depth):
        support = torch.zeros(heads, side**2, side**2)
        for head in range(heads):
            down, right = IMPULSES[(head + vary * layer * heads) % len(IMPULSES)]
            inside = (row + down).clamp(0, side - 1) == row + down
            inside &= (column + right).clamp(0, side - 1) == column + right
            target = torch.where(inside, (row + down) * side + column + right, row * side + column)
            support[head, torch.arange(side**2), target.flatten()] = 1
        layers.append(support)
    return layers


# -- language: the further back, the less open (section 5.4, App. F) --------------------------------


def distance_mask(tokens, slopes):
    """Mask logits that fall with the distance to the past, M_ij = -slope max(i - j, 0): (H, N, N).

    slopes: one for each head. The paper has 10 in every head, as log sigmoid(10 M) with M = -distance; here
    the 10 is in M itself, which then moves by the learning rate as all of M does, and not ten times as fast.
    log sigmoid(-x) is -x a few nats down, but falls half as fast near 0: steep slopes, fixed, are ALiBi
    (arXiv 2108.12409), gentle ones about half of it. `alibi` in train_lm.py leaves out log sigmoid.

    >>> distance_mask(3, [2.0])[0].tolist()
    [[-0.0, -0.0, -0.0], [-2.0, -0.0, -0.0], [-4.0, -2.0, -0.0]]
    """
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return -torch.tensor(slopes)[:, None, None] * distance.clamp(min=0)


def geometric_slopes(heads):
    """ALiBi's slopes: 2^(-8/H), 2^(-16/H), ..., 2^-8 (arXiv 2108.12409).

    >>> geometric_slopes(2)
    [0.0625, 0.00390625]
    """
    return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]


# -- controls -------------------------------------------------------------------------------------


def place(attention, init, mask):
    """Give a MaskedAttention what the name of an init says of it; a name that says nothing of masks, nothing.

    mask: the prior's logits. mask, mask-...: M, learnable unless frozen or hard (-inf has no gradient);
    mask-zero: M = 0; bias: the same start without log sigmoid; svd-frozen, opt-frozen: query and key not trained.
    """
    if init == "mask-zero":
        attention.set_mask(torch.zeros_like(mask))
    elif init == "bias":
        attention.set_mask(F.logsigmoid(mask), squash=False)
    elif init.startswith("mask"):
        attention.set_mask(mask, learnable=init not in ("mask-frozen", "mask-hard"))
    elif init.endswith("frozen"):
        attention.query.requires_grad_(False)
        attention.key.requires_grad_(False)


def shuffled(support, generator, causal=False):
    """The control with the right sparsity and the wrong structure: each row's columns permuted. Same shape.

    By chance a row may keep a right link. causal: only the columns that a row can see are permuted.
    """
    order = torch.rand(support.shape, generator=generator)
    if causal:
        order += torch.arange(support.shape[-1]).expand(support.shape).triu(1)  # the future stays where it is
    return support.gather(-1, order.argsort(dim=-1))


def imperfect(support, missing, wrong, generator):
    """A prior with mistakes: `missing` of its links closed, `wrong` links opened that it does not have.

    A link is an open pair (i, j), i != j. Wrong links start in rows that have a right one, where they
    do most harm; a row that loses all looks at itself. Heads share the mistakes. (N, N) or (H, N, N),
    same shape. Raises ValueError if there are fewer links to close, or to open, than asked for.
    """
    tokens = support.shape[-1]
    others = ~torch.eye(tokens, dtype=torch.bool)
    links = others & (support.reshape(-1, tokens, tokens).amax(dim=0) > 0)
    openable = others & ~links & links.any(dim=-1, keepdim=True)
    changed = support.clone()
    for value, count, pairs, kind in ((0, missing, links, "missing"), (1, wrong, openable, "wrong")):
        pairs = pairs.nonzero()  # (pairs, 2)
        if count > len(pairs):
            raise ValueError(f"{count} {kind} links, there is room for {len(pairs)}")
        rows, columns = pairs[torch.randperm(len(pairs), generator=generator)[:count]].T
        changed[..., rows, columns] = value
    emptied = (changed.amax(dim=-1, keepdim=True) == 0) & (support.amax(dim=-1, keepdim=True) > 0)
    return torch.maximum(changed, torch.eye(tokens) * emptied)


def with_cls(supports):
    """Supports for a sequence with a CLS token in front: it reads all, no row but itself reads it.

    What a prior keeps from meeting in the other rows meets in this one. A list of (..., N, N) -> a list
    of (..., N + 1, N + 1).
    """
    extended = []
    for support in supports:
        larger = support.new_zeros(*support.shape[:-2], support.shape[-2] + 1, support.shape[-1] + 1)
        larger[..., 1:, 1:] = support
        larger[..., 0, :] = 1
        extended.append(larger)
    return extended
