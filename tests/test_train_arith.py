"""train_arith.py against a loop of a few lines, written from the paper; its figures against answers made by hand."""
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from reference import SHARED_FLAGS, assert_same, checkpoint, set_masks, train, words

import train_arith
from tinymask import GPT, Encoder, arithmetic, init_weights, mask_priors, pictures, qk_init, runs
from tinymask.inits import shuffled
from tinymask.persistence import attention_maps, support_mass

pytestmark = pytest.mark.arith
TINY = dict(digits=2, steps=3, dim=12, depth=3, heads=4, head_dim=4, mlp_dim=16, batch_size=16, fraction=0.01,
            eval_size=50)
SMALL = TINY | dict(lr=1e-3, weight_decay=1e-3, token_std=0.02, position_std=0.02, open=5.0, closed=-5.0, mirrors="any",
                    split=260800418, mode="one-pass", readout="token", order="plain", bf16=False, ridge=0.0)
DIGIT_BY_DIGIT = {"mode": "autoregressive"}
FORMS = [{}, {"readout": "mean"}, DIGIT_BY_DIGIT, DIGIT_BY_DIGIT | {"order": "reversed"}]


def run(out, task, init, flags=None, *more):
    flags = words(TINY | (flags or {}))
    return train_arith.main([*flags, "--tasks", task, "--inits", init, "--out", str(out), *more])


def written(pairs, task, f):
    """What is read of each problem, "05+17=" or "0517", and the digits of its answer in their order, as tensors."""
    rows, n = [], f["digits"]
    plus, equals = ("+", "=") if f["mode"] == "autoregressive" else ("", "")
    for a, b in pairs:
        answer = f"{a + b:0{n + 1}}" if task == "add" else f"{a * b:0{2 * n}}"
        rows.append((f"{a:0{n}}{plus}{b:0{n}}{equals}", answer[::-1 if f["order"] == "reversed" else 1]))
    return [torch.tensor([["0123456789+=".index(c) for c in text] for text in part]) for part in zip(*rows)]


def reference(task, init, seed, f):
    """Section 5.2: cross-entropy of the answer's digits. f: the flags. Gives weights, losses, and what is measured."""
    n, sequence = f["digits"], f["mode"] == "autoregressive"
    order = torch.randperm(100**n, generator=torch.Generator().manual_seed(f["split"])).tolist()
    pairs = [divmod(k, 10**n) for k in order]
    shown, rest = pairs[: round(f["fraction"] * 100**n)], pairs[round(f["fraction"] * 100**n):]
    seen = set(shown)
    asked = [(a, b) for a, b in rest if f["mirrors"] == "any" or (b, a) not in seen][-f["eval_size"]:]
    (inputs, targets), (prompts, goals) = written(shown, task, f), written(asked, task, f)
    width, sizes = targets.shape[1], {name: f[name] for name in ("dim", "depth", "heads", "head_dim", "mlp_dim")}
    if sequence:
        inputs = torch.cat([inputs, targets[:, :-1]], dim=1)
        model = GPT(vocabulary=12, block=inputs.shape[1], **sizes)
    else:
        model = Encoder(vocabulary=10, tokens=2 * n, outputs=10 if f["readout"] == "token" else 10 * width,
                        pooling="none" if f["readout"] == "token" else "mean", **sizes)
    init_weights(model, runs.generator(seed, "weights"), f["token_std"], f["position_std"])
    design = "sequence" if sequence else "literal" if init == "mask-literal" else "ours"
    supports = mask_priors.ARITHMETIC[design][task](n, f["depth"], f["heads"], f["order"] == "reversed")
    if init.endswith("shuffled"):
        draws = runs.generator(seed, "shuffle")
        supports = [shuffled(s, draws, sequence) for s in supports]
    if init == "svd-published":
        for block, support in zip(model.transformer.blocks, supports):
            qk_init.impulse(block.attention, model.position, support.expand(f["heads"], -1, -1))
    elif init.startswith(("svd", "opt")):
        some = inputs[torch.randperm(len(inputs), generator=runs.generator(seed, "sample"))[:256]]
        gap = math.log((1 + math.exp(-f["closed"])) / (1 + math.exp(-f["open"])))
        method = functools.partial(qk_init.svd, gap=gap) if init.startswith("svd") else qk_init.opt
        qk_init.apply_layerwise(functools.partial(method, ridge=f["ridge"]), model, some, supports)
    set_masks(model, init, [mask_priors.to_mask(support, f["open"], f["closed"]) for support in supports])

    def masses():
        return support_mass(attention_maps(model, inputs[:256]), supports, sequence)

    def digits_of(output):
        if sequence:
            output = output[:, -width:]
        elif f["readout"] == "token":  # the lowest n digits from b's tokens, the others from the first of a
            output = torch.cat([output[:, : width - n], output[:, n:]], dim=1)
        return output.float().reshape(len(output), width, -1)

    def loss(draws):
        batch = torch.randint(len(inputs), (f["batch_size"],), generator=draws)
        with torch.autocast("cpu", torch.bfloat16, enabled=f["bf16"]):
            output = model(inputs[batch])
        return F.cross_entropy(digits_of(output).flatten(0, 1), targets[batch].flatten())

    start = masses()
    state, losses = train(model, loss, f, seed, init)
    with torch.no_grad():
        logits = digits_of(model(torch.cat([prompts, goals[:, :-1]], dim=1) if sequence else prompts))
        answers = logits.argmax(-1)
        for place in range(width if sequence else 0):  # from its own digits, not from the right ones
            own = digits_of(model(torch.cat([prompts, answers[:, :-1]], dim=1))).argmax(-1)
            answers[:, place] = own[:, place]
    return state, losses, {
        "exact_match": (answers == goals).all(dim=1).float().mean().item(), "evaluated": len(asked),
        "digit_accuracy": (answers == goals).float().mean().item(), "fraction": f["fraction"], "mode": f["mode"],
        "loss": F.cross_entropy(logits.flatten(0, 1), goals.flatten()).item(), "support_mass_init": start,
        "mirrored": sum((b, a) in seen for a, b in asked) / len(asked), "support_mass_final": masses()}


def assert_is(result, state, wanted):
    """A result line and its checkpoint are the reference's."""
    weights, losses, figures = wanted
    assert_same(state, weights)
    assert [point["train_loss"] for point in result["curve"]] == pytest.approx(losses, rel=1e-4)
    for name, value in figures.items():
        assert result["metrics"][name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-4)), name
    last = result["curve"][-1] | {"support_mass_final": result["curve"][-1]["support_mass"]}
    assert all(result["metrics"][name] == last[name] for name in figures if name in last)


@pytest.mark.parametrize("task, init, seed, flags", [
    *(("add", init, 0, {}) for init in train_arith.INITS),
    *(("add", init, 1, {"fraction": 0.3}) for init in train_arith.INITS if "frozen" not in init),
    *(("mul", init, 0, flags) for init in ("svd", "mask") for flags in ({}, DIGIT_BY_DIGIT)),
    *(("add", init, 0, FORMS[3]) for init in ("svd", "opt", "mask", "mask-shuffled"))])
def test_three_steps_are_those_of_the_paper(task, init, seed, flags, tmp_path):
    (result,) = run(tmp_path, task, init, flags, "--first-seed", str(seed))
    scale = {"token_std": 1.0 if task == "mul" else 0.02}
    assert_is(result, checkpoint(tmp_path)["model"], reference(task, init, seed, SMALL | scale | flags))


# one other value for each flag, and where the flag needs it, what it stands beside
MOVED = dict(digits=3, steps=2, dim=8, depth=4, heads=2, head_dim=6, mlp_dim=9, batch_size=8, fraction=0.03, lr=0.01,
             mask_lr=0.5, weight_decay=0.3, token_std=0.7, position_std=0.6, open=2.0, closed=-3.0, split=3,
             mode="autoregressive", readout="mean", order="reversed", bf16=True, eval_size=70, mirrors="apart",
             ridge=0.1)
BESIDE = {"order": DIGIT_BY_DIGIT, "mirrors": {"fraction": 0.3}}
COUPLED = {"mode": {"order", "readout"}, "lr": {"mask_lr"}}


@pytest.mark.parametrize("name", MOVED)
def test_each_flag_changes_what_it_says(name, tmp_path):
    init, plain = "svd" if name == "ridge" else "mask", BESIDE.get(name, {})
    moved = plain | {name: MOVED[name]}
    (result,) = run(tmp_path, "add", init, moved)
    found, (weights, _, figures) = checkpoint(tmp_path)["model"], reference("add", init, 0, SMALL | plain)
    assert_is(result, found, reference("add", init, 0, SMALL | moved))
    if name in ("eval_size", "mirrors"):  # what is asked, not what is learnt
        assert_same(found, weights)
        assert result["metrics"]["loss"] != pytest.approx(figures["loss"], rel=1e-6)
    else:
        assert any(name not in weights or found[name].shape != weights[name].shape
                   or not torch.equal(found[name], weights[name]) for name in found)
    usual = vars(train_arith.settings(words(TINY | plain), "add")) | (TINY | plain)
    changed = {key for key, value in result["config"].items() if value != usual[key]}
    assert changed - {"tasks", "inits"} == {name} | COUPLED.get(name, set())


def test_no_flag_is_left_out():
    assert {action.dest for action in train_arith.parser()._actions} == MOVED.keys() | SHARED_FLAGS | {"tasks"}


def flags_of(task, **flags):
    args = train_arith.settings(words(TINY | flags), task)
    args.fraction = args.fraction[0]
    return args


@pytest.mark.parametrize("init, flags", [*(("svd", flags) for flags in FORMS), ("opt", FORMS[0]), ("opt", FORMS[3])])
def test_the_model_learns_from_what_is_shown_and_is_asked_the_rest(init, flags, tmp_path, monkeypatch):
    """All that a model reads: in training, where the prior is solved and attention is looked at, only pairs shown."""
    read = {True: set(), False: set()}

    def note(module, inputs):
        if isinstance(module, (Encoder, GPT)):
            read[module.training] |= {tuple(digit for digit in row[:6] if digit < 10)[:4] for row in inputs[0].tolist()}

    solve = qk_init.apply_layerwise
    monkeypatch.setattr(qk_init, "apply_layerwise", lambda method, model, ids, supports: (
        note(model, (ids,)), solve(method, model, ids, supports)))
    large = {"dim": 32, "head_dim": 16, "steps": 1, "fraction": 0.05, "eval_size": 300}
    with torch.nn.modules.module.register_module_forward_pre_hook(note):
        (result,) = run(tmp_path, "add", init, large | flags)
    shown, asked = ([(*divmod(a, 10), *divmod(b, 10)) for a, b in part.tolist()] for part in arithmetic.split(0.05, 2))
    assert read[True] <= set(shown) and read[False] == {*asked[-300:], *shown[:256]} and not set(asked) & set(shown)
    assert min(result["metrics"]["support_mass_init"]) > 0.9  # the prior is there at the start


def test_what_is_asked_is_the_same_whatever_the_fraction():
    less, more = (train_arith.load_pairs(flags_of("add", fraction=part, eval_size="all"))[1] for part in (0.9, 0.1))
    assert len(less) == 1000 and len(more) == 9000 and torch.equal(less, more[-1000:])  # the curve: on the last


class Oracle(torch.nn.Module):
    """Reads (B, 4) digits of two operands; scores of 100 for the sum's, the last one wrong where a is below 50."""

    def forward(self, operands):
        assert not self.training
        a, b = 10 * operands[:, 0] + operands[:, 1], 10 * operands[:, 2] + operands[:, 3]
        digits = arithmetic.to_digits(a + b, 3)
        digits[a < 50, 2] = (digits[a < 50, 2] + 1) % 10
        return 100.0 * F.one_hot(digits, 10).flatten(1)


def test_scores_of_a_model_that_is_right_on_a_known_half():
    pairs, model = arithmetic.all_pairs(2)[::3], Oracle().train()
    below = (pairs[:, 0] < 50).float().mean().item()
    got = train_arith.scores(flags_of("add", readout="mean"), "add", model, *arithmetic.encode("add", pairs, 2))
    assert got == pytest.approx({"exact_match": 1 - below, "digit_accuracy": 1 - below / 3, "loss": 100 * below / 3})
    assert model.training


class Counter(torch.nn.Module):
    """Counts on from the last token, whatever it is, and from 5 after "=" (11)."""

    def forward(self, ids):
        return 9.0 * F.one_hot(torch.where(ids == 11, 5, (ids + 1) % 10), 12).float()


@pytest.mark.parametrize("order", ["plain", "reversed"])
def test_answers_are_written_digit_after_digit_from_the_model_s_own(order):
    """5, 6, 7 to every problem; one that is shown the right digits answers others."""
    args = flags_of("add", mode="autoregressive", order=order)
    ids, goals = train_arith.encode(args, "add", arithmetic.all_pairs(2))
    got = train_arith.scores(args, "add", Counter(), ids, goals)
    right = (goals == torch.tensor([5, 6, 7])).float().mean().item()
    before = torch.cat([torch.full((len(goals), 1), 11), goals[:, :-1]], dim=1)  # the loss is given the right digits
    loss = F.cross_entropy(Counter()(before).flatten(0, 1), goals.flatten()).item()
    assert got == pytest.approx({"exact_match": 0, "digit_accuracy": right, "loss": loss}, rel=1e-4)


@pytest.mark.parametrize("steps, reached", [(8, (6, 8)), (4, (None, None)), (60, (6, 8))])
def test_figures_of_a_result_line(steps, reached, tmp_path, monkeypatch):
    """Exact match, made by hand, is an eighth of the evaluations so far: 75 and 99 % are at known points."""
    sizes = []

    def scores(args, task, model, inputs, answers):
        sizes.append(len(answers))
        return {"exact_match": len(sizes) / 8, "digit_accuracy": 0.5, "loss": 2.0}

    monkeypatch.setattr(train_arith, "scores", scores)
    (result,) = run(tmp_path, "add", "mask", {"steps": steps, "eval_size": 3000})
    metrics, curve, points = result["metrics"], result["curve"], min(steps, 25)
    assert sizes == [2000] * points + [3000] and len(curve) == points and metrics["exact_match"] == (points + 1) / 8
    assert curve[-1]["step"] == steps and curve[-1]["exact_match"] == points / 8
    reached = tuple(step and curve[step - 1]["step"] for step in reached)
    assert (metrics["steps_to_75"], metrics["steps_to_99"]) == reached and metrics["readout"] == "token"
    assert metrics["mask_drift"] > 0 < metrics["attention_shift"]


@pytest.mark.parametrize("task", train_arith.TASKS)
def test_svd_is_as_strong_as_the_mask(task):
    """At step 0 the attention between equal contents differs by as much between open and closed pairs."""
    args, contrasts = flags_of(task, dim=64, head_dim=32, fraction=0.5), []
    inputs, _ = train_arith.encode(args, task, train_arith.load_pairs(args)[0])
    for init in ("svd", "mask"):
        model, supports = train_arith.build(args, task, init, 0, inputs)
        (first, *_), support = attention_maps(model, inputs[:200]), supports[0].expand(4, 4, 4)
        logits = first.log().mean(dim=0)
        contrasts.append((logits[support > 0].mean() - logits[support == 0].mean()).item())
    assert contrasts[0] == pytest.approx(contrasts[1], rel=0.05)


def test_several_fractions_are_several_runs_and_panels(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(pictures, "require", lambda: None)
    monkeypatch.setattr(pictures, "curves", lambda panels, inits, path, columns: drawn.append((panels, path, columns)))
    results = run(tmp_path, "add", "mask", {}, "--fraction", "0.02", "0.05", "0.02", "--plot")
    assert [r["config"]["fraction"] for r in results] == [r["metrics"]["fraction"] for r in results] == [0.02, 0.05]
    assert "add 2% mask" in capsys.readouterr().out
    assert run(tmp_path, "add", "mask", {}, "--fraction", "0.05", "0.02", "--resume") == results[::-1]
    ((panels, path, columns),) = drawn
    assert columns == 3 and path == tmp_path / "learning.png"
    assert [p["title"] for p in panels] == ["add, 2 % of all pairs", "add, 5 % of all pairs", "add, at the end"]
    for panel, result in zip(panels, results):
        assert panel["lines"] == {"mask": [([1, 2, 3], [point["exact_match"] for point in result["curve"]])]}
    assert panels[2]["lines"] == {"mask": [([r["config"]["fraction"]], [r["metrics"]["exact_match"]]) for r in results]}


def test_the_paper_s_figures_stand_beside_its_own_settings_only(capsys):
    def printed(*flags):
        args = train_arith.settings(["--preset", "paper", "--inits", "mask", *flags], "add")
        args.fraction = args.fraction[0]
        train_arith.print_table(args, [("add", args)], [])
        return capsys.readouterr().out

    assert printed("--bf16").split()[-3:] == ["0.7749", "0.9386", "0.23"]
    for flags in (["--smoke"], ["--fraction", "0.003"], ["--mode", "autoregressive"], ["--digits", "2"], ["--lr", "1"]):
        assert "paper" not in printed(*flags)


def test_the_presets():
    for task, steps, fraction, std in (("add", 800, 0.004, 0.02), ("mul", 5900, 0.03, 1.0)):
        args = train_arith.settings(["--preset", "paper"], task)
        assert (args.steps, args.fraction, args.digits, args.token_std) == (steps, [fraction], 3, std)
        assert abs(args.steps - 50 * fraction * 1e6 / 256) < 50  # 50 epochs in batches of 256
        assert (args.depth, args.heads, args.dim, args.mlp_dim, args.head_dim, args.lr, args.weight_decay) == (
            6, 4, 256, 256, 64, 1e-3, 1e-3) and (args.open, args.closed, args.batch_size) == (5, -5, 256)
    add, mul = (vars(train_arith.settings([], task)) for task in train_arith.TASKS)
    assert (add["digits"], add["fraction"], add["eval_size"], add["dim"], add["depth"]) == (
        3, [0.001, 0.004], 10_000, 128, 3)
    assert {name for name in add if add[name] != mul[name]} == {"digits", "fraction", "eval_size", "token_std"}


@pytest.mark.slow
def test_the_claim_on_addition(tmp_path):
    """The default recipe: the mask needs fewer pairs, and fewer steps."""
    results = train_arith.main(["--tasks", "add", "--inits", "default", "mask", "--fraction", "0.0005", "0.004",
                                "--out", str(tmp_path)])
    few, many = ({r["init"]: r["metrics"] for r in part} for part in (results[:2], results[2:]))
    assert few["mask"]["exact_match"] > few["default"]["exact_match"] + 0.3
    assert many["mask"]["exact_match"] > 0.99 and many["mask"]["steps_to_75"] < many["default"]["steps_to_75"]
