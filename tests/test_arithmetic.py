"""Problems, encodings and the split: against plain Python arithmetic on strings."""
import doctest

import pytest
import torch

from tinymask import arithmetic

pytestmark = pytest.mark.arith
WORKED = {  # by hand
    "add": {(999, 999): "1998", (0, 0): "0000", (5, 17): "0022", (999, 1): "1000"},
    "mul": {(999, 999): "998001", (0, 0): "000000", (12, 12): "000144", (1, 999): "000999"},
}


def text(row):
    return "".join(map(str, row.tolist()))


@pytest.mark.parametrize("operation", arithmetic.OPERATIONS)
def test_worked_examples(operation):
    for pair, answer in WORKED[operation].items():
        operands, digits = arithmetic.encode(operation, torch.tensor([pair]))
        assert text(operands[0]) == f"{pair[0]:03}{pair[1]:03}" and text(digits[0]) == answer


@pytest.mark.parametrize("digits", [1, 2, 3])
@pytest.mark.parametrize("operation, sign", [("add", int.__add__), ("mul", int.__mul__)])
def test_encoding_against_python(operation, sign, digits):
    pairs = arithmetic.all_pairs(digits)[:: 997 if digits == 3 else 1]
    operands, answers = arithmetic.encode(operation, pairs, digits)
    sequences = arithmetic.encode_sequence(operation, pairs, digits, reverse=True)
    width = {"add": digits + 1, "mul": 2 * digits}[operation]
    for (a, b), operand, answer, sequence in zip(pairs.tolist(), operands, answers, sequences):
        right = str(sign(a, b)).zfill(width)
        assert text(operand) == str(a).zfill(digits) + str(b).zfill(digits) and text(answer) == right
        start = arithmetic.prompt_length(digits)
        assert text(sequence[start:]) == right[::-1] and sequence[start - 1] == arithmetic.EQUALS
        assert torch.equal(sequence[:digits], operand[:digits]) and sequence[digits] == arithmetic.PLUS


def test_every_pair_is_there_once():
    pairs = arithmetic.all_pairs(2)
    assert len(pairs) == len({tuple(pair) for pair in pairs.tolist()}) == 10_000 and pairs.amax() == 99


@pytest.mark.parametrize("fraction, size", [(0.004, 4000), (0.03, 30_000), (1e-6, 1)])
def test_split_sizes_and_disjointness(fraction, size):
    train, rest = arithmetic.split(fraction)
    numbers = [1000 * part[:, 0] + part[:, 1] for part in (train, rest)]
    assert len(train) == size and torch.cat(numbers).unique().numel() == 1_000_000


def test_split_is_the_same_whatever_the_seed_and_nested():
    torch.manual_seed(1)
    first, _ = arithmetic.split(0.002)
    torch.manual_seed(2)
    second, _ = arithmetic.split(0.004)
    other, rest = arithmetic.split(0.002, seed=1)
    assert not torch.equal(first, other) and not {*map(tuple, other.tolist())} & {*map(tuple, rest.tolist())}
    assert torch.equal(first, second[: len(first)])


def test_split_is_uniform():
    """Each leading digit pair has its share: chi-square over 100 cells, far below what a biased split gives."""
    train, _ = arithmetic.split(0.03)
    counts = torch.bincount(train[:, 0] // 100 * 10 + train[:, 1] // 100, minlength=100).float()
    assert ((counts - 300) ** 2 / 300).sum() < 150


@pytest.mark.parametrize("fraction", [0, 1, 1e-9, 2, -1, 0.9999999])
def test_a_split_with_an_empty_side_is_refused(fraction):
    with pytest.raises(ValueError, match="either side"):
        arithmetic.split(fraction)


def test_an_evaluation_prompt_is_a_prefix_of_a_training_example():
    pairs = arithmetic.all_pairs(2)[:50]
    length = arithmetic.prompt_length(2)
    plain, turned = (arithmetic.encode_sequence("mul", pairs, 2, reverse) for reverse in (False, True))
    assert torch.equal(plain[:, :length], turned[:, :length])
    assert torch.equal(plain[:, length:], turned[:, length:].flip(1))


def test_grade_by_hand():
    answer = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert arithmetic.grade(torch.tensor([[1, 2, 3], [4, 0, 6]]), answer) == (1, 5)


def test_examples_in_the_docstrings():
    assert doctest.testmod(arithmetic).failed == 0 and doctest.testmod(arithmetic).attempted > 0


def test_mirrored_by_brute_force():
    pairs = arithmetic.all_pairs(1)[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    shown, asked = pairs[:40], pairs[40:]
    known = {tuple(pair) for pair in shown.tolist()}
    assert arithmetic.mirrored(shown, asked).tolist() == [(b, a) in known for a, b in asked.tolist()]
    assert not arithmetic.mirrored(shown[:0], asked).any()
