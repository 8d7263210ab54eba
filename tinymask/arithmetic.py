"""Addition and multiplication of whole numbers as sequences of digits (paper, section 5.2, table 8).

A problem is a pair of operands below 10^n, written with n digits each, zero-padded; its answer has n + 1
digits (add) or 2 n (mul). Two encodings, each used for training and evaluation alike:

    one-pass         digits of a, then of b, go in; all digits of the answer come out of one forward pass
    autoregressive   a + b = answer as one sequence of tokens, answer plain or with its digits reversed

Whether a problem is shown in training depends on the fraction and the split, not on a run's seed. Shapes: P problems,
n digits an operand, A digits an answer. Digits run from the most significant one unless said otherwise. The
paper has no symbols for these; its "train fraction" is `fraction`, its sequence accuracy the first sum of `grade`.
"""
import torch

# name -> (function, digits of the answer for n-digit operands); generator and grader use this one table
OPERATIONS = {
    "add": (lambda a, b: a + b, lambda digits: digits + 1),
    "mul": (lambda a, b: a * b, lambda digits: 2 * digits),
}
PLUS, EQUALS = 10, 11  # token ids of the operator (whichever it is) and of "="; digits are their own ids
VOCABULARY = 12
SPLIT_SEED = 2608_00418  # of the split: the same in every run, unless another one is asked for


def to_digits(numbers, width):
    """Whole numbers (P,) -> digits (P, width), zero-padded.

    >>> to_digits(torch.tensor([7, 1998]), 4).tolist()
    [[0, 0, 0, 7], [1, 9, 9, 8]]
    """
    powers = 10 ** torch.arange(width - 1, -1, -1)
    return numbers[:, None] // powers % 10


def answer_width(operation, digits):
    """Digits of an answer, for operands of so many digits."""
    return OPERATIONS[operation][1](digits)


def answer_tokens(operation, digits):
    """One-pass, a readout per token: the tokens that give the answer's digits, the highest first.

    The n tokens of b give the n lowest digits, the first tokens of a those above: one for a sum, all for
    a product.

    >>> answer_tokens("add", 3), answer_tokens("mul", 3)
    ([0, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    """
    width = answer_width(operation, digits)
    return [*range(width - digits), *range(digits, 2 * digits)]


def all_pairs(digits):
    """Every pair of operands, number k being (k // 10^n, k % 10^n): (10^(2n), 2) int64."""
    k = torch.arange(100**digits)
    return torch.stack([k // 10**digits, k % 10**digits], dim=1)


def split(fraction, digits=3, seed=SPLIT_SEED):
    """A uniformly drawn part of all pairs for training, and all the rest: two tensors (P, 2), disjoint.

    The smaller of two fractions is a part of the larger. Raises ValueError if no pair would be left for
    training or for evaluation.

    >>> [len(part) for part in split(0.004)]
    [4000, 996000]
    """
    pairs = all_pairs(digits)
    size = round(fraction * len(pairs))
    if not 0 < size < len(pairs):
        raise ValueError(f"fraction {fraction:g} of {len(pairs)} pairs is {size}; wanted some on either side")
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    return pairs[order[:size]], pairs[order[size:]]


def encode(operation, pairs, digits=3):
    """One-pass encoding: operands' digits (P, 2n) and the answer's digits (P, A), both int64.

    >>> encode("add", torch.tensor([[999, 999], [0, 0]]))[1].tolist()
    [[1, 9, 9, 8], [0, 0, 0, 0]]
    >>> encode("mul", torch.tensor([[999, 999]]))
    (tensor([[9, 9, 9, 9, 9, 9]]), tensor([[9, 9, 8, 0, 0, 1]]))
    """
    function, width = OPERATIONS[operation]
    a, b = pairs.T
    operands = torch.cat([to_digits(a, digits), to_digits(b, digits)], dim=1)
    return operands, to_digits(function(a, b), width(digits))


def encode_sequence(operation, pairs, digits=3, reverse=False):
    """Autoregressive encoding: a, operator, b, "=", answer as token ids (P, 2n + 2 + A).

    The first `prompt_length(digits)` tokens are what an evaluation shows. reverse: the answer's least
    significant digit comes first.

    >>> encode_sequence("add", torch.tensor([[5, 17]]), reverse=True).tolist()
    [[0, 0, 5, 10, 0, 1, 7, 11, 2, 2, 0, 0]]
    """
    operands, answer = encode(operation, pairs, digits)
    sign, equals = (torch.full((len(pairs), 1), token) for token in (PLUS, EQUALS))
    if reverse:
        answer = answer.flip(1)
    return torch.cat([operands[:, :digits], sign, operands[:, digits:], equals, answer], dim=1)


def prompt_length(digits):
    """Tokens of a sequence up to and with "=": what is shown before the answer."""
    return 2 * digits + 2


def grade(predicted, answer):
    """Two sums over problems: whole answers right, and single digits right. (P, A), (P, A) -> int, int.

    >>> grade(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]))
    (1, 3)
    """
    right = predicted == answer
    return right.all(dim=1).sum().item(), right.sum().item()
