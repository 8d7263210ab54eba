"""train_arith.py against a loop of a few lines, written from the paper; its figures against answers made by hand."""
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from reference import SHARED_FLAGS, assert_moved, assert_same, checkpoint, set_masks, train, words

import train_arith
from tinymask import GPT, Encoder, arithmetic, init_weights, mask_priors, qk_init, runs
from tinymask.inits import shuffled
from tinymask.persistence import attention_maps

pytestmark = pytest.mark.arith
TINY = dict(digits=2, steps=3, dim=12, depth=3, heads=4, head_dim=4, mlp_dim=16, batch_size=16, fraction=0.01,
            eval_size=50)
SMALL = TINY | dict(lr=1e-3, weight_decay=1e-3, token_std=0.02, position_std=0.02, open=5.0, closed=-5.0,
                    split=260800418, mode="one-pass", readout="token", order="plain", bf16=False)
FORMS = [["--readout", "token"], ["--readout", "mean"], ["--mode", "autoregressive"],
         ["--mode", "autoregressive", "--order", "reversed"]]


def run(out, task, init, *flags, tiny=TINY):
    return train_arith.main([*words(tiny), "--tasks", task, "--inits", init, "--out", str(out), *flags])


def reference(task, init, seed, f):
    """Section 5.2: cross-entropy of the answer's digits. f: the flags. Gives the weights."""
    n, width = f["digits"], f["digits"] + 1 if task == "add" else 2 * f["digits"]
    order = torch.randperm(100**n, generator=torch.Generator().manual_seed(f["split"]))
    pairs = [divmod(k, 10**n) for k in order[: round(f["fraction"] * 100**n)].tolist()]
    answers = [f"{a + b if task == 'add' else a * b:0{width}}" for a, b in pairs]
    sequence, flipped = f["mode"] == "autoregressive", f["order"] == "reversed"
    rows = []
    for (a, b), answer in zip(pairs, answers):
        text = f"{a:0{n}}+{b:0{n}}=" if sequence else f"{a:0{n}}{b:0{n}}"
        rows.append(text + (answer[::-1] if flipped else answer)[:-1] * sequence)
    inputs = torch.tensor([["0123456789+=".index(c) for c in row] for row in rows])
    targets = torch.tensor([[int(c) for c in (answer[::-1] if flipped else answer)] for answer in answers])
    sizes = {name: f[name] for name in ("dim", "depth", "heads", "head_dim", "mlp_dim")}
    if sequence:
        model = GPT(vocabulary=12, block=inputs.shape[1], **sizes)
    else:
        model = Encoder(vocabulary=10, tokens=2 * n, outputs=10 if f["readout"] == "token" else 10 * width,
                        pooling="none" if f["readout"] == "token" else "mean", **sizes)
    init_weights(model, runs.generator(seed, "weights"), f["token_std"], f["position_std"])
    design = "sequence" if sequence else "literal" if init == "mask-literal" else "ours"
    supports = mask_priors.ARITHMETIC[design][task](n, f["depth"], f["heads"], flipped)
    if init == "mask-shuffled":
        draws = runs.generator(seed, "shuffle")
        supports = [shuffled(s, draws, sequence) for s in supports]
    if init.startswith(("svd", "opt")):
        some = inputs[torch.randperm(len(inputs), generator=runs.generator(seed, "sample"))[:256]]
        gap = math.log((1 + math.exp(-f["closed"])) / (1 + math.exp(-f["open"])))
        method = functools.partial(qk_init.svd, gap=gap) if init.startswith("svd") else qk_init.opt
        qk_init.apply_layerwise(method, model, some, supports)
    set_masks(model, init, [mask_priors.to_mask(support, f["open"], f["closed"]) for support in supports])

    def loss(draws):
        batch = torch.randint(len(inputs), (f["batch_size"],), generator=draws)
        with torch.autocast("cpu", torch.bfloat16, enabled=f["bf16"]):
            output = model(inputs[batch])
        if sequence:
            output = output[:, -width:]
        elif f["readout"] == "token":  # the lowest n digits from b's tokens, the others from the first of a
            output = torch.cat([output[:, : width - n], output[:, n:]], dim=1)
        output = output.float().reshape(-1, output.shape[-1] if sequence else 10)
        return F.cross_entropy(output, targets[batch].flatten())

    return train(model, loss, f, seed, init)[0]


@pytest.mark.parametrize("task, init, seed, flags", [
    *((task, init, seed, {}) for task, init, seed in itertools.product(["add"], train_arith.INITS, [0, 1])),
    *(("mul", init, 0, {}) for init in ("svd", "mask")),
    *(("add", init, 0, {"mode": "autoregressive", "order": "reversed"}) for init in ("svd", "mask", "mask-shuffled"))])
def test_three_steps_are_those_of_the_paper(task, init, seed, flags, tmp_path):
    run(tmp_path, task, init, "--first-seed", str(seed), *words(flags))
    scale = {"token_std": 1.0 if task == "mul" else 0.02}
    assert_same(checkpoint(tmp_path)["model"], reference(task, init, seed, SMALL | flags | scale))


MOVED = dict(digits=3, steps=2, dim=8, depth=4, heads=2, head_dim=6, mlp_dim=9, batch_size=8, fraction=0.03, lr=0.01,
             mask_lr=0.5, weight_decay=0.3, token_std=0.7, position_std=0.6, open=2.0, closed=-3.0, split=3,
             mode="autoregressive", readout="mean", order="reversed", bf16=True)

@pytest.mark.parametrize("name", MOVED)
def test_each_flag_changes_what_it_says(name, tmp_path):
    moved = {name: MOVED[name]} | ({"mode": "autoregressive"} if name == "order" else {})
    (result,) = run(tmp_path, "add", "mask", *words(moved))
    found = checkpoint(tmp_path)["model"]
    assert_same(found, reference("add", "mask", 0, SMALL | moved))
    coupled = {"mode": {"order", "readout"}, "order": {"mode", "readout"}, "lr": {"mask_lr"}}.get(name, set())
    assert_moved(found, reference("add", "mask", 0, SMALL), result, vars(train_arith.settings([], "add")) | TINY,
                 {name} | coupled)


def test_no_flag_is_left_out():
    below = {"tasks", "mirrors", "eval_size"}
    assert {action.dest for action in train_arith.parser()._actions} == MOVED.keys() | SHARED_FLAGS | below


def problems(task, *flags):
    args = train_arith.settings([*words(TINY), *flags], task)
    args.fraction = args.fraction[0]
    return args, *train_arith.load_problems(args, task)


@pytest.mark.parametrize("flags", FORMS, ids=" ".join)
def test_training_never_sees_a_pair_that_is_asked_and_the_answers_are_right(flags):
    args, (inputs, answers), (prompts, goals), _ = problems("mul", *flags, "--fraction", "0.5", "--eval-size", "all")
    width = prompts.shape[1]
    shown, asked = ({tuple(row) for row in part.tolist()} for part in (inputs[:, :width], prompts))
    assert len(shown) == len(asked) == 5000 and not shown & asked
    both = torch.cat([inputs[:, :width], prompts]), torch.cat([answers, goals])
    for row, answer in zip(*(part[::501].tolist() for part in both)):
        a, b = (row[:2], row[2:4]) if args.mode == "one-pass" else (row[:2], row[3:5])
        digits = answer[::-1] if args.order == "reversed" else answer
        assert "".join(map(str, digits)) == f"{(10 * a[0] + a[1]) * (10 * b[0] + b[1]):04}"


def test_evaluation_takes_the_same_problems_whatever_the_fraction():
    goals = [problems("add", "--fraction", fraction, "--eval-size", "100")[2][1] for fraction in ("0.1", "0.4")]
    assert torch.equal(*goals) and len(goals[0]) == 100
    few, many = (problems("add", "--fraction", fraction, "--eval-size", "5000")[2][1] for fraction in ("0.9", "0.1"))
    assert len(few) == 1000 and torch.equal(few, many[-1000:])  # the curve is measured on the last


def test_mirrored_pairs_are_counted_and_kept_apart():
    """At 30 % shown, 30 % of the others have their mirror image there, but for those with a = b, a hundredth."""
    mirrored, counted = {}, {}
    for mirrors in ("any", "apart"):
        args, (inputs, _), (prompts, _), counted[mirrors] = problems("mul", "--fraction", "0.3", "--eval-size", "5000",
                                                                    "--mirrors", mirrors)
        shown = {tuple(row) for row in inputs.tolist()}
        mirrored[mirrors] = [(*row[2:], *row[:2]) in shown for row in prompts.tolist()]
        assert counted[mirrors] == pytest.approx(sum(mirrored[mirrors]) / len(mirrored[mirrors]))
    assert 0.25 < counted["any"] < 0.33 and counted["apart"] == 0 and len(mirrored["apart"]) > 4000


class Oracle(torch.nn.Module):
    """Reads (B, 4) digits of two operands; scores of 100 for the sum's digits, one digit off where a is below 50."""

    def forward(self, operands):
        a, b = 10 * operands[:, 0] + operands[:, 1], 10 * operands[:, 2] + operands[:, 3]
        digits = arithmetic.to_digits(a + b, 3)
        digits[a < 50, 2] = (digits[a < 50, 2] + 1) % 10
        return 100.0 * F.one_hot(digits, 10).flatten(1)


def test_scores_of_a_model_that_is_right_on_a_known_half():
    args, *_ = problems("add", "--readout", "mean")
    pairs = arithmetic.all_pairs(2)[::3]
    below = (pairs[:, 0] < 50).float().mean().item()
    got = train_arith.scores(args, "add", Oracle().train(), *arithmetic.encode("add", pairs, 2))
    assert got == pytest.approx({"exact_match": 1 - below, "digit_accuracy": 1 - below / 3, "loss": 100 * below / 3})


@pytest.mark.parametrize("order", ["plain", "reversed"])
def test_answers_are_written_digit_after_digit_from_the_model_s_own(order):
    """A model that answers 0, 1, 2 ... after what it wrote itself: teacher forcing would show other digits."""
    class Counter(torch.nn.Module):
        def forward(self, ids):  # the next digit is one more than the last token; after "=" (11) it is 5
            following = torch.where(ids == 11, 5, (ids + 1) % 10)
            return 9.0 * F.one_hot(following, 12).float()

    args, _, (prompts, goals), _ = problems("add", "--mode", "autoregressive", "--order", order)
    guesses, loss = train_arith.predict(args, "add", Counter(), prompts, goals)
    assert guesses.tolist() == [[5, 6, 7]] * len(goals)
    before = torch.cat([torch.full((len(goals), 1), 11), goals[:, :-1]], dim=1)  # the loss is given the right digits
    forced = Counter()(before).log_softmax(-1).gather(-1, goals[..., None])
    assert loss == pytest.approx(-forced.mean().item(), rel=1e-4)


def test_evaluation_leaves_the_model_in_training_and_dropout_off():
    modes = []
    model = Oracle()
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    args, *_, (prompts, goals), _ = problems("add", "--readout", "mean")
    train_arith.predict(args, "add", model, prompts, goals)
    assert modes == [False] and model.training


def test_figures_of_a_result_line(tmp_path, monkeypatch):
    """Scores by hand: exact match is the share of the evaluation so far, so that 75 and 99 % are at known points."""
    sizes = []

    def scores(args, task, model, inputs, answers):
        sizes.append(len(answers))
        return {"exact_match": len(sizes) / 8, "digit_accuracy": 0.5, "loss": 2.0}

    monkeypatch.setattr(train_arith, "scores", scores)
    (result,) = run(tmp_path, "add", "mask", "--steps", "8", "--eval-size", "3000")
    metrics = result["metrics"]
    assert sizes == [2000] * 8 + [3000] and (metrics["steps_to_75"], metrics["steps_to_99"]) == (6, 8)
    assert metrics["evaluated"] == 3000 and metrics["fraction"] == 0.01 and metrics["exact_match"] == 9 / 8
    assert train_arith.first_step(result["curve"][:5], 0.75) is None
    assert metrics["support_mass_final"] == result["curve"][-1]["support_mass"]
    assert min(metrics["support_mass_init"]) > 0.9


@pytest.mark.parametrize("init", ["svd", "opt"])
def test_priors_are_solved_on_training_inputs_and_there_at_the_start(init, tmp_path, monkeypatch):
    solved, solve = [], qk_init.apply_layerwise
    monkeypatch.setattr(qk_init, "apply_layerwise", lambda m, model, x, s: (solved.append(x), solve(m, model, x, s)))
    for number, flags in enumerate(FORMS):
        (result,) = run(tmp_path / str(number), "add", init, "--dim", "32", "--head-dim", "16", "--steps", "1", *flags)
        assert min(result["metrics"]["support_mass_init"]) > 0.9
        args, (inputs, _), _, _ = problems("add", *flags)
        assert {tuple(row) for row in solved[-1].tolist()} <= {tuple(row) for row in inputs.tolist()}


@pytest.mark.parametrize("task", train_arith.TASKS)
def test_svd_is_as_strong_as_the_mask(task):
    """At step 0 the attention between equal contents differs by as much between open and closed pairs."""
    contrasts = []
    for init in ("svd", "mask"):
        args, (inputs, _), *_ = problems(task, "--dim", "64", "--head-dim", "32", "--fraction", "0.5")
        model, supports = train_arith.build(args, task, init, 0, inputs)
        (first, *_), support = attention_maps(model, inputs[:200]), supports[0].expand(4, 4, 4)
        logits = first.log().mean(dim=0)
        contrasts.append((logits[support > 0].mean() - logits[support == 0].mean()).item())
    assert contrasts[0] == pytest.approx(contrasts[1], rel=0.05)


def test_several_fractions_are_several_runs(tmp_path, capsys):
    tiny = TINY | {"fraction": 0.02}
    results = run(tmp_path, "add", "mask", "--fraction", "0.02", "0.05", "0.02", tiny=tiny)
    assert [r["config"]["fraction"] for r in results] == [0.02, 0.05]
    assert "add 2% mask" in capsys.readouterr().out
    assert run(tmp_path, "add", "mask", "--fraction", "0.05", "0.02", "--resume", tiny=tiny) == results[::-1]


def test_the_paper_s_figures_stand_beside_its_own_settings_only(capsys):
    def printed(*flags):
        args = train_arith.settings(["--preset", "paper", "--inits", "mask", *flags], "add")
        args.fraction = args.fraction[0]
        train_arith.print_table(args, [("add", args)], [])
        return capsys.readouterr().out

    assert printed("--bf16").split()[-3:] == ["0.7749", "0.9386", "0.23"]
    for flags in (["--smoke"], ["--fraction", "0.003"], ["--mode", "autoregressive"], ["--digits", "2"], ["--lr", "1"]):
        assert "paper" not in printed(*flags)


def test_the_paper_s_preset():
    for task, steps, fraction, std in (("add", 800, 0.004, 0.02), ("mul", 5900, 0.03, 1.0)):
        args = train_arith.settings(["--preset", "paper"], task)
        assert (args.steps, args.fraction, args.digits, args.token_std) == (steps, [fraction], 3, std)
        assert abs(args.steps - 50 * fraction * 1e6 / 256) < 50  # 50 epochs in batches of 256
        assert (args.depth, args.heads, args.dim, args.mlp_dim, args.head_dim, args.lr, args.weight_decay) == (
            6, 4, 256, 256, 64, 1e-3, 1e-3)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    run(tmp_path, "add", "mask", "--seeds", "2", "--fraction", "0.02", "0.05", "--plot")
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_claim_on_addition(tmp_path):
    """The default recipe: the mask needs fewer pairs, and fewer steps."""
    results = train_arith.main(["--tasks", "add", "--inits", "default", "mask", "--fraction", "0.0005", "0.004",
                                "--out", str(tmp_path)])
    few, many = ({r["init"]: r["metrics"] for r in part} for part in (results[:2], results[2:]))
    assert few["mask"]["exact_match"] > few["default"]["exact_match"] + 0.3
    assert many["mask"]["exact_match"] > 0.99 and many["mask"]["steps_to_75"] < many["default"]["steps_to_75"]
