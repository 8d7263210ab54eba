"""Mask priors, the table of inits and query-key inits: the structure that each claims is there at step 0.

The supports themselves are drawn in the docstrings of `mask_priors`; `test_drawing` compares.
"""
import doctest
import math

import pytest
import torch
import torch.nn.functional as F

from tinymask import Encoder, MaskedAttention, arithmetic, boolean, inits, mask_priors, qk_init, rivals
from tinymask.persistence import attention_maps
from tinymask.transformer import init_weights

pytestmark = pytest.mark.gotu
IDS = boolean.to_tokens(boolean.cube())
PRIORS = mask_priors.BOOLEAN["ours"]


EXAMPLES = [example for module in (mask_priors, qk_init) for example in doctest.DocTestFinder().find(module)
            if example.examples]


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name.split(".")[-1] for example in EXAMPLES])
def test_drawing(example):
    assert doctest.DocTestRunner().run(example).failed == 0 and len(EXAMPLES) > 15


def encoder(seed=0, position_std=0.05, **changes):
    sizes = dict(vocabulary=2, tokens=15, outputs=1, dim=48, depth=2, heads=3, head_dim=16) | changes
    return init_weights(Encoder(**sizes), torch.Generator().manual_seed(seed), position_std=position_std)


def sample(seed, size=256):
    return IDS[torch.randperm(len(IDS), generator=torch.Generator().manual_seed(seed))[:size]]


def masses(model, supports):
    maps = attention_maps(model, sample(99))
    supports = [s.expand(a.shape[1:]) for a, s in zip(maps, supports)]
    return [(a * s).sum(-1)[:, s.amin(-1) == 0].mean().item() for a, s in zip(maps, supports)]


# -- Boolean supports -------------------------------------------------------------------------


@pytest.mark.parametrize("task", PRIORS)
def test_every_row_of_a_prior_has_one(task):
    layers = PRIORS[task](15, 3, 3)
    assert len(layers) == 3
    for support in layers:
        assert (support.amax(-1) == 1).all() and (support.amin(-1) == 0).all()


@pytest.mark.parametrize("table, sizes", [(mask_priors.BOOLEAN, (15, 3, 3)), (mask_priors.ARITHMETIC, (3, 6, 4))])
def test_supports_hold_nothing_but_0_and_1(table, sizes):
    supports = [support for of_task in table.values() for prior in of_task.values() for support in prior(*sizes)]
    supports += mask_priors.with_cls(supports) + mask_priors.impulse_support(3, 2, 4)
    assert all(set(support.unique().tolist()) == {0.0, 1.0} for support in supports)


def test_a_wholly_closed_row_is_no_prior():
    literal = mask_priors.BOOLEAN["literal"]
    closed = F.logsigmoid(mask_priors.to_mask(literal["2parity"](15, 1, 3)[0]))
    torch.testing.assert_close(closed[5].softmax(-1), torch.full((15,), 1 / 15))
    assert torch.equal(literal["majority"](4, 1, 3)[0], torch.eye(4)) and literal["cyclic3"] is PRIORS["cyclic3"]
    assert literal["2parity"](4, 2, 3)[1].nonzero().tolist() == [[0, 1], [1, 0]]
    add, mul = (mask_priors.ARITHMETIC["literal"][task](2, 1, 1)[0] for task in ("add", "mul"))  # a1 a0 b1 b0
    assert add.argmax(-1).tolist() == [2, 3, 0, 1] and add.sum() == 4
    assert torch.equal(mul, torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]).float())


def test_to_mask_values_and_their_logits():
    mask = mask_priors.to_mask(torch.eye(3), open=3, closed=-8)
    assert mask.dtype == torch.float32 and mask[0].tolist() == [3.0, -8.0, -8.0]
    bias = F.logsigmoid(mask_priors.to_mask(torch.eye(2)))
    assert bias[0].tolist() == pytest.approx([-4.54e-5, -10.0000454], rel=1e-3)


def test_threesym_s_pairs_and_what_it_hides_without_positions():
    first, later = mask_priors.threesym_support(5, 2, 4)
    assert [head.argmax(-1).tolist() for head in first] == [
        [1, 0, 2, 3, 4], [0, 2, 1, 3, 4], [2, 1, 0, 3, 4], [1, 0, 2, 3, 4]] and torch.equal(later, torch.eye(5))
    alone, later = mask_priors.BOOLEAN["alone"]["threesym"](11, 2, 3)
    assert (alone.sum(-1) == 1).all() and torch.equal(later, torch.eye(11))
    assert (alone.sum(dim=(0, 1))[:3] == alone.sum(dim=(0, 1))[0]).all()  # x0, x1, x2 are looked at equally often
    for tokens, heads, support in ((15, 2, mask_priors.threesym_support), (15, 2, mask_priors.threesym_alone_support),
                                   (8, 3, mask_priors.threesym_alone_support)):
        with pytest.raises(ValueError, match="needs 3 heads"):
            support(tokens, 2, heads)


def test_with_cls_keeps_heads():
    extended = mask_priors.with_cls([torch.zeros(3, 2, 2)])[0]
    assert extended.shape == (3, 3, 3) and extended[:, 0].eq(1).all() and extended[:, 1:].eq(0).all()


# -- the table of inits and the controls ------------------------------------------------------


def set_up(name, learnable=True):
    layer = MaskedAttention(4, 2)
    inits.set_prior(layer, inits.INITS[name], mask_priors.to_mask(torch.eye(3)), rivals.distance_index(3))
    return layer


@pytest.mark.parametrize("name", inits.INITS)
def test_what_each_name_sets(name):
    """From the names alone: who has a mask, what it adds to the logits, what is trained."""
    layer, prior = set_up(name), mask_priors.to_mask(torch.eye(3))
    masked = name.startswith("mask") or name in ("bias", "alibi", "rotary-mask", "hadamard")
    assert (layer.mask is not None) == masked
    assert (layer.position_bias is not None, layer.rotate) == (
        name == "relative", rivals.rotary if name.startswith("rotary") else None)
    if masked:
        assert layer.mask.requires_grad == (name not in ("mask-frozen", "mask-hard", "alibi"))
        added = F.logsigmoid(layer.mask) if layer.squash else layer.mask
        wanted = {"mask-zero": torch.full((3, 3), math.log(0.5)), "alibi": prior}.get(name, F.logsigmoid(prior))
        torch.testing.assert_close(added.detach(), wanted)
    trained = layer.query.weight.requires_grad, layer.key.bias.requires_grad, layer.value.weight.requires_grad
    assert trained == (not name.endswith(("frozen", "fixed")) or masked,) * 2 + (True,)


def test_columns_of_the_table_that_scripts_read():
    def names(**columns):
        return {name for name, row in inits.INITS.items()
                if all(getattr(row, column) == value for column, value in columns.items())}

    assert names(query_key="svd") == {"svd", "svd-frozen", "svd-fixed", "svd-shuffled"}
    assert names(query_key="opt") == {"opt", "opt-frozen"}
    assert names(shuffled=True) == {"mask-shuffled", "svd-shuffled"} and names(design="literal") == {"mask-literal"}
    assert names(positions=False) == {"mask-only", "rotary", "rotary-mask"}
    assert names(design="slopes") == {"mask-slopes", "alibi", "rotary-mask"}
    assert {name: inits.INITS[name].closed for name in inits.INITS if inits.INITS[name].closed is not None} == {
        "mask-only": -30.0, "mask-hard": -math.inf}
    with pytest.raises(ValueError, match="no init 'nosuch'"):
        inits.rows(["mask", "nosuch"])
    assert inits.rows(["bias", "mask"]) == {"bias": inits.INITS["bias"], "mask": inits.INITS["mask"]}


@pytest.mark.parametrize("causal", [False, True])
def test_shuffled_keeps_the_sparsity_of_each_row(causal):
    support = mask_priors.majority3_support(15, 1, 3)[0].repeat(3, 1, 1)
    support = support.tril() if causal else support
    other = inits.shuffled(support, torch.Generator().manual_seed(0), *[causal] * causal)
    assert torch.equal(other.sum(-1), support.sum(-1)) and set(other.unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(other, support) and not torch.equal(other[0], other[1])
    assert (other.triu(1).sum() == 0) == causal


@pytest.mark.parametrize("seed", range(5))
def test_imperfect_counts_its_mistakes(seed):
    def changed(support, missing, wrong):
        other = inits.imperfect(support, missing, wrong, torch.Generator().manual_seed(seed))
        off = ~torch.eye(15, dtype=torch.bool)
        assert (other.amax(-1) == 1).all()  # no row is left with nothing
        return ((support - other)[..., off] > 0).sum().item(), ((other - support)[..., off] > 0).sum().item()

    parity, majority = mask_priors.parity2_support(15, 1, 3)[0], mask_priors.majority3_support(15, 1, 3)[0]
    assert changed(parity, 1, 0) == (1, 0) and changed(parity, 2, 3) == (2, 3) and changed(majority, 0, 1) == (0, 1)
    assert changed(majority, 5, 0) == (5, 0) and changed(majority, 0, 0) == (0, 0)
    with pytest.raises(ValueError, match="3 missing links, there is room for 2"):
        changed(parity, 3, 0)
    wrong = inits.imperfect(parity, 0, 3, torch.Generator().manual_seed(seed)) - parity
    assert wrong[2:].abs().sum() == 0 and wrong.sum() == 3  # they start where the prior has links
    literal = mask_priors.parity2_literal_support(15, 1, 3)[0]  # rows that are empty on purpose stay empty
    assert (inits.imperfect(literal, 0, 1, torch.Generator().manual_seed(seed)) - literal).abs().sum() == 1


# -- query-key inits --------------------------------------------------------------------------


@pytest.mark.parametrize("task", PRIORS)
@pytest.mark.parametrize("method", [qk_init.svd, qk_init.opt])
@pytest.mark.parametrize("position_std", [0.05, 0.3])
def test_query_key_inits_produce_the_pattern(task, method, position_std):
    model = encoder(position_std=position_std)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    supports = PRIORS[task](15, 2, 3)
    qk_init.apply_layerwise(method, model, sample(0), supports)
    assert min(masses(model, supports)) >= 0.99  # on other points than it was solved on
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert all(p.dtype == torch.float32 for p in model.parameters())  # mps has no float64
    assert changed == {f"transformer.blocks.{i}.attention.{part}.weight" for i in (0, 1) for part in ("query", "key")}


@pytest.mark.parametrize("method", [qk_init.svd, qk_init.opt])
def test_query_key_inits_with_cls_and_biases(method):
    model = encoder(pooling="cls")
    torch.nn.init.ones_(model.transformer.blocks[0].attention.key.bias)
    supports = mask_priors.with_cls(mask_priors.parity2_support(15, 2, 3))
    qk_init.apply_layerwise(method, model, sample(1), supports)
    assert min(masses(model, supports)) >= 0.95 and model.transformer.blocks[0].attention.key.bias.abs().sum() == 0


@pytest.mark.parametrize("gap", [10.0, 4.0])
def test_svd_solves_for_the_scores(gap):
    """Independent of the code path: W_Q W_K^T between position means has the asked-for gap in every row."""
    model, supports = encoder(position_std=0.3), mask_priors.parity2_support(15, 2, 3)
    block = model.transformer.blocks[0]
    qk_init.svd(block.attention, block.norm1(model.embed(sample(2))).detach(), supports[0], gap)
    x = block.norm1(model.embed(sample(3))).double()
    layers = block.attention.query, block.attention.key
    query, key = (F.linear(x, layer.weight.double())[..., :16] for layer in layers)
    scores = (query @ key.transpose(1, 2) / 4).mean(0)  # head 0, sqrt(16) = 4
    opened = scores[supports[0] == 1]
    closed = (scores.sum(-1) - opened[[1, 0, *range(2, 15)]]) / 14
    assert (opened.mean() - closed.mean()).item() == pytest.approx(gap, rel=0.05)


@pytest.mark.parametrize("ridge", [0.1, 1e-3])
def test_a_ridge_makes_the_solve_well_conditioned(ridge):
    """P minimises |X P - E|^2 + r |P|^2, r the ridge's share of the mean of X^T X's diagonal: its gradient is 0."""
    model = encoder()
    x = model.transformer.blocks[0].norm1(model.embed(sample(2))).detach()
    found, rows = qk_init.position_decoder(x, ridge), x.double().flatten(0, 1)
    residual = rows @ found - torch.eye(15).double().repeat(len(x), 1)
    gradient = rows.T @ residual + ridge * rows.square().sum(0).mean() * found
    assert gradient.abs().max() < 1e-6 * rows.square().sum(0).mean()
    assert found.norm() < qk_init.position_decoder(x).norm()


def test_svd_per_head_supports_and_low_rank():
    support = torch.stack([torch.eye(15).roll(shift, 1) for shift in (0, 1, 2)])
    model = encoder(position_std=0.3)
    qk_init.apply_layerwise(qk_init.svd, model, sample(4), [support] * 2)
    assert ((attention_maps(model, sample(5))[0] * support).sum(-1).mean((0, 2)) > 0.95).all()
    narrow = encoder(position_std=0.3, depth=1, head_dim=4)
    qk_init.apply_layerwise(qk_init.svd, narrow, sample(6), [torch.eye(15)])  # rank 14 does not fit into 4
    assert (attention_maps(narrow, sample(7))[0] * torch.eye(15)).sum(-1).mean() < 0.9


@pytest.mark.parametrize("method", [qk_init.svd, qk_init.opt])
def test_heads_wider_than_the_model_and_rows_without_support(method):
    model = encoder(dim=8, depth=1, heads=2)
    qk_init.apply_layerwise(method, model, sample(8), mask_priors.parity2_literal_support(15, 1, 2))
    assert all(p.isfinite().all() for p in model.parameters())


# -- arithmetic -------------------------------------------------------------------------------


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
        known = reaches(mask_priors.ARITHMETIC["ours"][task](digits, depth, heads), 2 * digits)
        for k, row in enumerate(arithmetic.answer_tokens(task, digits)):
            for j in range(min(k + 1, digits)):
                assert known[row, digits - 1 - j] and known[row, 2 * digits - 1 - j], (task, row, j)
    for task, reverse in (("add", False), ("add", True), ("mul", False), ("mul", True)):
        width = arithmetic.answer_width(task, digits)
        support = mask_priors.ARITHMETIC["sequence"][task](digits, 2, 2, reverse)
        known = reaches(support, 2 * digits + 1 + width)
        assert all((layer.tril() == layer).all() for layer in support)
        for t in range(width):
            for j in range(min((t if reverse else width - 1 - t) + 1, digits)):
                assert known[2 * digits + 1 + t, digits - 1 - j] and known[2 * digits + 1 + t, 2 * digits - j]


@pytest.mark.parametrize("design, task, depth, heads", [
    ("ours", "add", 1, 4), ("ours", "add", 4, 1), ("ours", "mul", 3, 4), ("ours", "mul", 4, 1),
    ("sequence", "add", 1, 4), ("sequence", "mul", 1, 4)])
def test_a_model_too_small_for_the_prior_is_refused(design, task, depth, heads):
    with pytest.raises(ValueError, match="layers"):
        mask_priors.ARITHMETIC[design][task](3, depth, heads)


def test_carries_by_hand():
    """a2 a1 a0 b2 b1 b0: in later layers every second head looks at both digits one lower; the lowest at its own."""
    first, second, third = mask_priors.addition_support(3, 3, 3)
    assert [row.nonzero()[:, 0].tolist() for row in first] == [[0, 3], [1, 4], [2, 5]] * 2
    assert torch.equal(second[0], first) and torch.equal(second[2], first) and torch.equal(second, third)
    assert [row.nonzero()[:, 0].tolist() for row in second[1]] == [[1, 4], [2, 5], [2, 5]] * 2


def test_multiplication_by_hand():
    """Tokens a1 a0 b1 b0 give digits 3 2 1 0. Layer 1: a0 b0 in column 0, a0 b1 in column 1; layer 2: those of a1."""
    first, second, third = mask_priors.multiplication_support(2, 3, 2)
    assert [head.argmax(-1).tolist() for head in first] == [[0, 1, 1, 1], [0, 1, 2, 3]]
    assert [head.argmax(-1).tolist() for head in second] == [[0, 0, 0, 3], [0, 2, 3, 3]]
    assert (first.sum(-1) == 1).all() and (second.sum(-1) == 1).all()
    assert [head.argmax(-1).tolist() for head in third] == [[1, 2, 3, 3], [2, 3, 2, 3]]  # one and two columns down
    *down, below, itself = mask_priors.multiplication_support(2, 3, 4)[-1]
    assert torch.equal(torch.stack(down), third) and (third.sum(-1) == 1).all()
    assert torch.equal(below, torch.ones(4, 4).triu()) and torch.equal(itself, torch.eye(4))


@pytest.mark.parametrize("digits", [2, 3])
def test_multiplication_brings_every_product_to_its_column(digits):
    """Digit k of a product is made of the a_i b_j with i + j = k: each pair meets once, in the row for k."""
    met, wanted = {}, {}
    for layer in mask_priors.multiplication_support(digits, digits + 1, 4)[:digits]:
        for row in range(2 * digits):
            left, right = layer[0, row].argmax().item(), layer[-1, row].argmax().item()
            if left != right:
                met.setdefault(2 * digits - 1 - row, set()).add((digits - 1 - left, 2 * digits - 1 - right))
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


# -- language ---------------------------------------------------------------------------------


def test_distance_masks_are_alibi_where_it_matters():
    slopes = mask_priors.geometric_slopes(8)
    assert slopes == [2.0**-k for k in range(1, 9)]  # ALiBi's own example
    mask = mask_priors.distance_mask(6, [10.0, 0.5])
    assert mask.shape == (2, 6, 6) and mask[0, 5].tolist() == [-50, -40, -30, -20, -10, 0] and mask[1, 3, 1] == -1
    assert (mask.triu(1) == 0).all()  # the future is the causal mask's
    torch.testing.assert_close(F.logsigmoid(mask[0])[5, :5], mask[0, 5, :5], atol=1e-4, rtol=0)
    gentle = mask_priors.distance_mask(6, [2.0**-8])[0, 5]  # differences alone count: half of ALiBi's there
    torch.testing.assert_close(F.logsigmoid(gentle).diff(), gentle.diff() / 2, rtol=0.01, atol=0)
    assert mask_priors.distance_mask(1500, [10.0]).min() == -1e4  # what a mask can hold
