"""Task structures as initial mask logits M: which token may look at which, before any training.

A prior is built in two steps. First its *support*, a 0/1 matrix: entry (i, j) is 1 where row (query) i
may attend to column (key) j. Then `to_mask` turns it into logits: +10 where open, -10 where closed
(paper, table 7 and section G.1), which log sigmoid maps to -0.00005 and -10.00005.

A row whose entries are all equal, all closed included, carries no prior: softmax ignores the shift
and the row attends as in a plain model. So every support here says what *each* row does.

The designs follow the paper's principles (App. E): (1) open the interaction that the task is made of,
(2) close the shortcut that fits the seen part only, (3) give heads different roles, (4) let layers
compose. Shapes: N tokens, H heads; a support or mask is (N, N), shared by the heads, or (H, N, N), and
a prior is a list with one of them for each layer.
"""
import torch


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
    """
    support = torch.eye(tokens)
    support[:2, :2] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    return [support] * depth


def majority3_support(tokens, depth, heads):
    """3-bit majority: rows 0, 1, 2 look at themselves, every other row at x0, x1 and x2 alike.

    Opened (1): aggregation. The other rows average the three votes, and the sign of that sum is what
    their MLPs have to find. Closed (2): every pair among the votes, for the MDI is made of the products
    x0 x2 and x1 x2, which rows 0 to 2 could form if they saw each other.
    """
    support = torch.zeros(tokens, tokens)
    support[:, :3] = 1
    support[:3, :3] = torch.eye(3)
    return [support] * depth


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


BOOLEAN = {"2parity": parity2_support, "majority": majority3_support}
BOOLEAN_LITERAL = {"2parity": parity2_literal_support, "majority": majority3_literal_support}


def with_cls(supports):
    """Supports for a sequence with a CLS token in front: it reads all, no row but itself reads it.

    A list of (..., N, N) -> a list of (..., N + 1, N + 1).
    """
    extended = []
    for support in supports:
        larger = support.new_zeros(*support.shape[:-2], support.shape[-2] + 1, support.shape[-1] + 1)
        larger[..., 1:, 1:] = support
        larger[..., 0, :] = 1
        extended.append(larger)
    return extended
