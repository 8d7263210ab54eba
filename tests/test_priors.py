"""Mask priors and query-key inits: the structure that each claims is there at step 0."""
import doctest

import pytest
import torch
import torch.nn.functional as F

from tinymask import Encoder, arithmetic, boolean, mask_priors, qk_init
from tinymask.transformer import init_weights

pytestmark = pytest.mark.gotu
IDS = boolean.to_tokens(boolean.cube())


def encoder(seed=0, position_std=0.05, depth=2, pooling="mean"):
    model = Encoder(2, 15, 1, 48, depth, 3, 16, pooling=pooling)
    return init_weights(model, torch.Generator().manual_seed(seed), position_std=position_std)


def sample(seed, size=256):
    return IDS[torch.randperm(len(IDS), generator=torch.Generator().manual_seed(seed))[:size]]


def masses(model, supports):
    _, maps = model(sample(99), return_attention=True)
    supports = [s.expand(a.shape[1:]) for a, s in zip(maps, supports)]
    return [(a * s).sum(-1)[:, s.amin(-1) == 0].mean().item() for a, s in zip(maps, supports)]


def test_supports_by_hand():
    parity, majority = (mask_priors.BOOLEAN[task](5, 2, 3)[0].tolist() for task in ("2parity", "majority"))
    assert parity == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert majority == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    literal = mask_priors.parity2_literal_support(4, 1, 3)[0]
    assert literal.nonzero().tolist() == [[0, 1], [1, 0]]
    assert torch.equal(mask_priors.majority3_literal_support(4, 1, 3)[0], torch.eye(4))


@pytest.mark.parametrize("task", mask_priors.BOOLEAN)
def test_every_row_of_a_prior_says_something(task):
    for support in mask_priors.BOOLEAN[task](15, 2, 3):
        assert (support.amax(-1) == 1).all() and (support.amin(-1) == 0).all()


def test_a_wholly_closed_row_is_no_prior():
    closed = mask_priors.to_mask(mask_priors.parity2_literal_support(15, 1, 3)[0])
    bias = F.logsigmoid(closed)
    torch.testing.assert_close(bias[5].softmax(-1), torch.full((15,), 1 / 15))


def test_to_mask_values_and_their_logits():
    mask = mask_priors.to_mask(torch.eye(3), open=3, closed=-8)
    assert mask.dtype == torch.float32 and mask[0].tolist() == [3.0, -8.0, -8.0]
    bias = F.logsigmoid(mask_priors.to_mask(torch.eye(2)))
    assert bias[0].tolist() == pytest.approx([-4.54e-5, -10.0000454], rel=1e-3)


def test_threesym_by_hand():
    first, later = mask_priors.threesym_support(5, 2, 3)
    assert first[0].argmax(-1).tolist() == [1, 0, 2, 3, 4] and first[1].argmax(-1).tolist() == [0, 2, 1, 3, 4]
    assert first[2].argmax(-1).tolist() == [2, 1, 0, 3, 4] and torch.equal(later, torch.eye(5))
    alone = mask_priors.threesym_alone_support(11, 1, 3)[0]
    assert (alone.sum(-1) == 1).all()
    assert alone.argmax(-1).T.tolist() == [[0] * 3, [1] * 3, [2] * 3, [0, 1, 1], [2, 1, 2], [0, 0, 2],
                                           [1, 0, 0], [1, 2, 1], [2, 2, 0], [9] * 3, [10] * 3]
    assert (alone.sum(dim=(0, 1))[:3] == alone.sum(dim=(0, 1))[0]).all()  # x0, x1, x2 are looked at equally often
    for tokens, heads, support in ((15, 2, mask_priors.threesym_support), (15, 2, mask_priors.threesym_alone_support),
                                   (8, 3, mask_priors.threesym_alone_support)):
        with pytest.raises(ValueError, match="needs 3 heads"):
            support(tokens, 2, heads)


def test_shuffled_keeps_the_sparsity_of_each_row():
    support = mask_priors.majority3_support(15, 1, 3)[0].repeat(3, 1, 1)
    other = mask_priors.shuffled(support, torch.Generator().manual_seed(0))
    assert torch.equal(other.sum(-1), support.sum(-1)) and set(other.unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(other, support) and not torch.equal(other[0], other[1])


@pytest.mark.parametrize("seed", range(20))
def test_imperfect_counts_its_mistakes(seed):
    def changed(support, missing, wrong):
        other = mask_priors.imperfect(support, missing, wrong, torch.Generator().manual_seed(seed))
        off = ~torch.eye(15, dtype=torch.bool)
        assert (other.amax(-1) == 1).all()  # no row is left with nothing
        return ((support - other)[..., off] > 0).sum().item(), ((other - support)[..., off] > 0).sum().item()

    parity, majority = mask_priors.parity2_support(15, 1, 3)[0], mask_priors.majority3_support(15, 1, 3)[0]
    assert changed(parity, 1, 0) == (1, 0) and changed(parity, 2, 3) == (2, 3) and changed(majority, 0, 1) == (0, 1)
    assert changed(majority, 5, 0) == (5, 0) and changed(majority, 0, 0) == (0, 0)
    with pytest.raises(ValueError, match="3 missing links, there is room for 2"):
        changed(parity, 3, 0)
    wrong = mask_priors.imperfect(parity, 0, 3, torch.Generator().manual_seed(seed)) - parity
    assert wrong[2:].abs().sum() == 0 and wrong.sum() == 3  # they start where the prior has links
    literal = mask_priors.parity2_literal_support(15, 1, 3)[0]  # rows that are empty on purpose stay empty
    assert (mask_priors.imperfect(literal, 0, 1, torch.Generator().manual_seed(seed)) - literal).abs().sum() == 1


def test_with_cls_by_hand():
    extended = mask_priors.with_cls([torch.eye(2)])[0]
    assert extended.tolist() == [[1, 1, 1], [0, 1, 0], [0, 0, 1]]
    assert mask_priors.with_cls([torch.ones(3, 2, 2)])[0].shape == (3, 3, 3)


@pytest.mark.parametrize("task", mask_priors.BOOLEAN)
@pytest.mark.parametrize("method", [qk_init.svd, qk_init.opt])
@pytest.mark.parametrize("position_std", [0.05, 0.3])
def test_query_key_inits_produce_the_pattern(task, method, position_std):
    model = encoder(position_std=position_std)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    supports = mask_priors.BOOLEAN[task](15, 2, 3)
    qk_init.apply_layerwise(method, model, sample(0), supports)
    assert min(masses(model, supports)) >= 0.99  # on other points than it was solved on
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())  # mps has no float64
    assert changed == {f"transformer.blocks.{i}.attention.{part}.weight" for i in (0, 1) for part in ("query", "key")}


@pytest.mark.parametrize("method", [qk_init.svd, qk_init.opt])
def test_query_key_inits_with_cls(method):
    model = encoder(pooling="cls")
    supports = mask_priors.with_cls(mask_priors.parity2_support(15, 2, 3))
    qk_init.apply_layerwise(method, model, sample(1), supports)
    assert min(masses(model, supports)) >= 0.95


def test_svd_solves_for_the_scores():
    """Independent of the code path: W_Q W_K^T between position means has the asked-for gap in every row."""
    model, supports = encoder(position_std=0.3), mask_priors.parity2_support(15, 2, 3)
    qk_init.apply_layerwise(qk_init.svd, model, sample(2), supports)
    block = model.transformer.blocks[0]
    x = block.norm1(model.embed(sample(3))).double()
    layers = block.attention.query, block.attention.key
    query, key = (F.linear(x, layer.weight.double())[..., :16] for layer in layers)
    scores = (query @ key.transpose(1, 2) / 4).mean(0)  # head 0, sqrt(16) = 4
    opened = scores[supports[0] == 1]
    closed = (scores.sum(-1) - opened[[1, 0, *range(2, 15)]]) / 14
    assert (opened.mean() - closed.mean()).item() == pytest.approx(10, rel=0.05)


def test_svd_per_head_supports_and_low_rank():
    support = torch.stack([torch.eye(15).roll(shift, 1) for shift in (0, 1, 2)])
    model = encoder(position_std=0.3)
    qk_init.apply_layerwise(qk_init.svd, model, sample(4), [support] * 2)
    _, maps = model(sample(5), return_attention=True)
    assert ((maps[0] * support).sum(-1).mean((0, 2)) > 0.95).all()
    narrow = init_weights(Encoder(2, 15, 1, 48, 1, 3, 4), torch.Generator().manual_seed(0), position_std=0.3)
    qk_init.apply_layerwise(qk_init.svd, narrow, sample(6), [torch.eye(15)])  # rank 14 does not fit into 4
    _, maps = narrow(sample(7), return_attention=True)
    assert (maps[0] * torch.eye(15)).sum(-1).mean() < 0.9


@pytest.mark.parametrize("method", [qk_init.svd, qk_init.opt])
def test_heads_wider_than_the_model_and_rows_without_support(method):
    model = init_weights(Encoder(2, 15, 1, 8, 1, 2, 16), torch.Generator().manual_seed(0))
    qk_init.apply_layerwise(method, model, sample(8), mask_priors.parity2_literal_support(15, 1, 2))
    assert all(p.isfinite().all() for p in model.parameters())


def test_examples_in_the_docstrings():
    assert doctest.testmod(mask_priors).failed == 0


def test_query_key_examples():
    assert doctest.testmod(qk_init).failed == 0


def test_addition_by_hand():
    """Tokens a1 a0 b1 b0: pairs in layer 1; in layer 2 the second head looks one digit lower."""
    first, second, third = mask_priors.addition_support(2, 3, 3)
    pairs = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]).float()
    carry = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1]]).float()
    assert torch.equal(first, pairs) and torch.equal(second, torch.stack([pairs, carry, pairs]))
    assert torch.equal(second, third)


def test_the_paper_s_wording_by_hand():
    """Tokens a1 a0 b1 b0: corresponding digits for a sum, all digits of the other number for a product."""
    (add,), (mul,) = (mask_priors.ARITHMETIC_LITERAL[task](2, 1, 1) for task in ("add", "mul"))
    assert add.argmax(-1).tolist() == [2, 3, 0, 1] and add.sum() == 4
    assert torch.equal(mul, torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]).float())


def reaches(supports, tokens):
    """Which token can have had an effect on which: (N, N), boolean; a row always keeps what it has."""
    known = torch.eye(tokens)
    for support in supports:
        open_to_any = support.reshape(-1, tokens, tokens).amax(dim=0)
        known = ((open_to_any + torch.eye(tokens)) @ known > 0).float()
    return known.bool()


@pytest.mark.parametrize("digits", [2, 3])
def test_every_digit_that_matters_reaches_the_answer(digits):
    """Digit k of an answer depends on the digits of significance k and below, of both operands."""
    for task, heads, depth in (("add", 2, digits + 1), ("mul", 2, digits + 1), ("add", 4, 6), ("mul", 3, 6)):
        known = reaches(mask_priors.ARITHMETIC["one-pass"][task](digits, depth, heads), 2 * digits)
        for k, row in enumerate(reversed(arithmetic.answer_tokens(task, digits))):
            for j in range(min(k + 1, digits)):
                assert known[row, digits - 1 - j] and known[row, 2 * digits - 1 - j], (task, row, j)
    for task, reverse in (("add", False), ("add", True), ("mul", False), ("mul", True)):
        width = arithmetic.answer_width(task, digits)
        support = mask_priors.ARITHMETIC["autoregressive"][task](digits, 2, 2, reverse)
        known = reaches(support, 2 * digits + 1 + width)
        assert all((layer.tril() == layer).all() for layer in support)
        for t in range(width):
            for j in range(min((t if reverse else width - 1 - t) + 1, digits)):
                assert known[2 * digits + 1 + t, digits - 1 - j] and known[2 * digits + 1 + t, 2 * digits - j]


@pytest.mark.parametrize("mode, task, depth, heads", [
    ("one-pass", "add", 1, 4), ("one-pass", "add", 4, 1), ("one-pass", "mul", 3, 4), ("one-pass", "mul", 4, 1),
    ("autoregressive", "add", 1, 4), ("autoregressive", "mul", 1, 4)])
def test_a_model_too_small_for_the_prior_is_refused(mode, task, depth, heads):
    with pytest.raises(ValueError, match="layers"):
        mask_priors.ARITHMETIC[mode][task](3, depth, heads)


def test_multiplication_by_hand():
    """Tokens a1 a0 b1 b0 give digits 3 2 1 0. Layer 1: a0 b0 in column 0, a0 b1 in column 1; layer 2: those of a1."""
    first, second, third = mask_priors.multiplication_support(2, 3, 2)
    assert [head.argmax(-1).tolist() for head in first] == [[0, 1, 1, 1], [0, 1, 2, 3]]
    assert [head.argmax(-1).tolist() for head in second] == [[0, 0, 0, 3], [0, 2, 3, 3]]
    assert (first.sum(-1) == 1).all() and (second.sum(-1) == 1).all()
    assert [head.argmax(-1).tolist() for head in third] == [[1, 2, 3, 3], [2, 3, 2, 3]]  # one and two columns down
    *down, below, itself = mask_priors.multiplication_support(2, 3, 4)[-1]
    assert torch.equal(torch.stack(down), third) and (third.sum(-1) == 1).all()
    assert torch.equal(below, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]).float())
    assert torch.equal(itself, torch.eye(4))


@pytest.mark.parametrize("digits", [2, 3])
def test_multiplication_brings_every_product_to_its_column(digits):
    """Digit k of a product is made of the a_i b_j with i + j = k: each pair meets once, in the row for k."""
    layers = mask_priors.multiplication_support(digits, digits + 1, 4)
    met = {}
    for layer in layers[:digits]:
        for row in range(2 * digits):
            left, right = layer[0, row].argmax().item(), layer[-1, row].argmax().item()
            if left != right:
                met.setdefault(2 * digits - 1 - row, set()).add((digits - 1 - left, 2 * digits - 1 - right))
    wanted = {}
    for i in range(digits):
        for j in range(digits):
            wanted.setdefault(i + j, set()).add((i, j))
    assert met == wanted


@pytest.mark.parametrize("reverse", [False, True])
def test_sequences_by_hand(reverse):
    """Tokens a1 a0 + b1 b0 = c c (2 digits): which rows look where, apart from themselves."""
    def looks(support):
        return {row: set(columns.nonzero()[:, 0].tolist()) - {row} for row, columns in enumerate(support)}

    support, _ = mask_priors.addition_sequence_support(2, 2, 3, reverse)
    low, middle, top = {4}, {4, 3}, {4, 3}
    answers = (low, middle, top) if reverse else (top, middle, low)
    assert looks(support) == {0: set(), 1: set(), 2: set(), 3: {0}, 4: {1}} | dict(zip((5, 6, 7), answers))
    support, _ = mask_priors.multiplication_sequence_support(2, 2, 3, reverse)
    every = {0, 1, 3, 4}
    answers = ({1, 4}, every, every, every) if reverse else (every, every, every, {1, 4})
    assert looks(support) == {0: set(), 1: set(), 2: set(), 3: {0, 1}, 4: {0, 1}} | dict(zip((5, 6, 7, 8), answers))


def test_shuffled_sequences_keep_their_sparsity_in_the_past():
    support = mask_priors.addition_sequence_support(3, 2, 2, True)[0].repeat(2, 1, 1)
    other = mask_priors.shuffled(support, torch.Generator().manual_seed(0), causal=True)
    assert torch.equal(other.sum(-1), support.sum(-1)) and not torch.equal(other, support)
    assert other.triu(1).sum() == 0


def test_distance_masks_are_alibi_where_it_matters():
    slopes = mask_priors.geometric_slopes(8)
    assert slopes == [2.0**-k for k in range(1, 9)]  # ALiBi's own example
    mask = mask_priors.distance_mask(6, [10.0, 0.5])
    assert mask.shape == (2, 6, 6) and mask[0, 5].tolist() == [-50, -40, -30, -20, -10, 0] and mask[1, 3, 1] == -1
    assert (mask.triu(1) == 0).all()  # the future is the causal mask's
    alibi, learnt = mask[0], F.logsigmoid(mask[0])
    assert torch.allclose(alibi[5, :5], learnt[5, :5], atol=1e-4)
    gentle = mask_priors.distance_mask(6, [2.0**-8])[0, 5]  # differences alone count: half of ALiBi's there
    torch.testing.assert_close(F.logsigmoid(gentle).diff(), gentle.diff() / 2, rtol=0.01, atol=0)
