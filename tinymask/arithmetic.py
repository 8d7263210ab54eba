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
from torch import Tensor

# name -> (function, digits of the answer for n-digit operands); generator and grader use this one table
OPERATIONS = {
    "add": (lambda a, b: a + b, lambda digits: digits + 1),
    "mul": (lambda a, b: a * b, lambda digits: 2 * digits),
}
PLUS, EQUALS = 10, 11  # token ids of the operator (whichever it is) and of "="; digits are their own ids
VOCABULARY = 12
SPLIT_SEED = 2608_00418  # of the split: the same in every run, unless another one is asked for


def to_digits(numbers: Tensor, width: int) -> Tensor:
    """Whole numbers (P,) -> digits (P, width), zero-padded.

    >>> to_digits(torch.tensor([7, 1998]), 4).tolist()
    [[0, 0, 0, 7], [1, 9, 9, 8]]
    """
    powers = 10 ** torch.arange(width - 1, -1, -1)
    return numbers[:, None] // powers % 10


def answer_width(operation: str, digits: int) -> int:
    """Digits of an answer, for operands of so many digits."""
    return OPERATIONS[operation][1](digits)


# -- the token layout: which token is what; digits are named by significance here, 0 the lowest --------------------


def operand_tokens(digits: int, sequence: bool = False) -> tuple[list[int], list[int]]:
    """The tokens of a_0, a_1, ... and of b_0, b_1, ...; in a sequence the operator stands between a and b.

    >>> operand_tokens(2), operand_tokens(2, sequence=True)  # a1 a0 b1 b0; a1 a0 + b1 b0 = ...
    (([1, 0], [3, 2]), ([1, 0], [4, 3]))
    """
    second = digits + sequence
    return [digits - 1 - k for k in range(digits)], [second + digits - 1 - k for k in range(digits)]


def answer_tokens(operation: str, digits: int, sequence: bool = False, reverse: bool = False) -> list[int]:
    """The tokens that give digit 0, 1, ... of the answer: whose output is read for it.

    One pass, a readout per token: the n tokens of b give the n lowest digits, the first tokens of a those above, one
    for a sum, all for a product. In a sequence it is the token before the digit; reverse: digit 0 is written first.

    >>> answer_tokens("add", 3), answer_tokens("mul", 2)
    ([5, 4, 3, 0], [3, 2, 1, 0])
    >>> answer_tokens("add", 2, sequence=True), answer_tokens("add", 2, sequence=True, reverse=True)  # a1 a0 + b1 b0 =
    ([7, 6, 5], [5, 6, 7])
    """
    width = answer_width(operation, digits)
    if not sequence:
        return [*range(width - digits), *range(digits, 2 * digits)][::-1]
    order = list(range(prompt_length(digits) - 1, prompt_length(digits) - 1 + width))
    return order if reverse else order[::-1]


def prompt_length(digits: int) -> int:
    """Tokens of a sequence up to and with "=": what is shown before the answer."""
    return 2 * digits + 2


# -- problems -----------------------------------------------------------------------------------------------------


def all_pairs(digits: int) -> Tensor:
    """Every pair of operands, number k being (k // 10^n, k % 10^n): (10^(2n), 2) int64."""
    k = torch.arange(100**digits)
    return torch.stack([k // 10**digits, k % 10**digits], dim=1)


def split(fraction: float, digits: int = 3, seed: int = SPLIT_SEED) -> tuple[Tensor, Tensor]:
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


def encode(operation: str, pairs: Tensor, digits: int = 3) -> tuple[Tensor, Tensor]:
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


def encode_sequence(operation: str, pairs: Tensor, digits: int = 3, reverse: bool = False) -> Tensor:
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


def mirrored(shown: Tensor, asked: Tensor) -> Tensor:
    """For each pair (a, b) of asked whether its mirror image (b, a) is among those shown: (P, 2), (Q, 2) -> (Q,) bool.

    >>> mirrored(torch.tensor([[1, 2], [3, 3]]), torch.tensor([[2, 1], [1, 2], [3, 4]])).tolist()
    [True, False, False]
    """
    size = 1 + int(torch.cat([shown, asked]).max())
    return torch.isin(asked[:, 1] * size + asked[:, 0], shown[:, 0] * size + shown[:, 1])


def grade(predicted: Tensor, answer: Tensor) -> tuple[int, int]:
    """Two sums over problems: whole answers right, and single digits right. (P, A), (P, A) -> int, int.

    >>> grade(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]))
    (1, 3)
    """
    right = predicted == answer
    return int(right.all(dim=1).sum()), int(right.sum())

