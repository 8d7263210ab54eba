"""train_arith.py end to end on tiny settings, and what it does with bad input."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train_arith
from tinymask import arithmetic, records
from tinymask.persistence import attention_maps

pytestmark = pytest.mark.arith
ROOT = Path(__file__).parent.parent
TINY = ["--digits", "2", "--steps", "6", "--dim", "12", "--depth", "3", "--head-dim", "4", "--mlp-dim", "16",
        "--batch-size", "16", "--fraction", "0.01", "--eval-size", "50"]
FORMS = [["--readout", "token"], ["--readout", "mean"], ["--mode", "autoregressive"],
         ["--mode", "autoregressive", "--order", "reversed"]]


def tiny(out, *more):
    return train_arith.main([*TINY, "--out", str(out), *more])


def lines(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def built(init, task="add", *flags, seed=0):
    args = train_arith.settings([*TINY, "--fraction", "0.5", "--eval-size", "5000", *flags], task)
    args.fraction = args.fraction[0]
    (inputs, answers), (prompts, goals) = train_arith.load_problems(args, task)
    return args, *train_arith.build(args, task, init, seed, inputs), inputs, answers, prompts, goals


def test_result_lines(tmp_path, capsys):
    results = tiny(tmp_path, "--inits", *train_arith.INITS)
    assert len(results) == 2 * len(train_arith.INITS) == 22
    for result in results:
        assert result["metrics"]["evaluated"] == 50 and result["config"]["fraction"] == 0.01
        assert len(result["metrics"]["support_mass_init"]) == 3
        assert (result["params"]["mask"] > 0) == (result["init"].startswith("mask") or result["init"] == "bias")
    assert "add 1% mask-frozen" in capsys.readouterr().out


@pytest.mark.parametrize("flags", FORMS, ids=" ".join)
@pytest.mark.parametrize("task", train_arith.TASKS)
def test_every_form_can_learn(flags, task, tmp_path):
    """100 pairs, long enough to know them by heart: scores and answers line up."""
    (result,) = tiny(tmp_path, "--tasks", task, "--inits", "default", "--steps", "200", "--lr", "0.01", "--dim", "32",
                     "--mlp-dim", "64", "--head-dim", "8", "--token-std", "1", "--position-std", "1", *flags)
    assert result["curve"][-1]["train_loss"] < 0.35


@pytest.mark.parametrize("flags", FORMS, ids=" ".join)
@pytest.mark.parametrize("init", ["svd", "opt", "mask"])
@pytest.mark.parametrize("task", train_arith.TASKS)
def test_the_prior_is_there_at_the_start(task, init, flags, tmp_path):
    (result,) = tiny(tmp_path, "--tasks", task, "--inits", init, "--dim", "32", "--head-dim", "16", "--steps", "1",
                     "--token-std", "0.02", *flags)
    assert min(result["metrics"]["support_mass_init"]) > 0.9


@pytest.mark.parametrize("task", train_arith.TASKS)
def test_svd_is_as_strong_as_the_mask(task):
    """At step 0 the attention between equal contents differs by as much between open and closed pairs."""
    contrasts = []
    for init in ("svd", "mask"):
        args, model, supports, inputs, *_ = built(init, task, "--dim", "64", "--head-dim", "32")
        (first, *_), support = attention_maps(model, inputs[:200]), supports[0].expand(4, 4, 4)
        logits = first.log().mean(dim=0)
        contrasts.append((logits[support > 0].mean() - logits[support == 0].mean()).item())
    assert contrasts[0] == pytest.approx(contrasts[1], rel=0.05)


@pytest.mark.parametrize("flags", FORMS, ids=" ".join)
def test_inits_share_weights_and_a_zero_mask_is_the_default(flags):
    models = {init: built(init, "add", *flags)[1] for init in ("default", "svd", "mask", "mask-zero")}
    states = {init: model.state_dict() for init, model in models.items()}
    for name, value in states["default"].items():
        if "query" not in name and "key" not in name:
            assert torch.equal(value, states["svd"][name])
        assert torch.equal(value, states["mask"][name])
    inputs = built("default", "add", *flags)[3][:20]
    with torch.no_grad():
        assert torch.allclose(models["default"](inputs), models["mask-zero"](inputs), atol=1e-5)


def test_training_never_sees_a_pair_that_is_tested():
    for flags in FORMS:
        args, _, _, inputs, answers, prompts, goals = built("default", "mul", *flags, "--eval-size", "all")
        width = prompts.shape[1]
        shown = {tuple(row) for row in inputs[:, :width].tolist()}
        asked = {tuple(row) for row in prompts.tolist()}
        assert len(shown) == len(asked) == 5000 and not shown & asked
        both = torch.cat([inputs[:, :width], prompts]), torch.cat([answers, goals])
        for row, answer in zip(*(part[::501].tolist() for part in both)):
            a, b = (row[:2], row[2:4]) if args.mode == "one-pass" else (row[:2], row[3:5])
            product = (10 * a[0] + a[1]) * (10 * b[0] + b[1])
            digits = answer[::-1] if args.order == "reversed" else answer
            assert "".join(map(str, digits)) == f"{product:04}"


def test_evaluation_takes_the_same_problems_whatever_the_fraction():
    goals = [built("default", "add", "--fraction", fraction, "--eval-size", "100")[-1] for fraction in ("0.1", "0.4")]
    assert torch.equal(*goals) and len(goals[0]) == 100
    few, all_of_them = (built("default", "add", "--fraction", fraction)[-1] for fraction in ("0.9", "0.1"))
    assert len(few) == 1000 and torch.equal(few, all_of_them[-1000:])  # the curve is measured on the last


@pytest.mark.parametrize("order", ["plain", "reversed"])
def test_generation_agrees_with_teacher_forcing(order):
    """A greedy answer is right as a whole just when each digit, given the right ones before it, is."""
    args, model, _, inputs, answers, prompts, goals = built("default", "add", "--mode", "autoregressive", "--order",
                                                            order, "--dim", "32", "--eval-size", "500")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in range(0, 5000, 50):
        logits = train_arith.digit_logits(args, "add", model, inputs[batch: batch + 50])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), answers[batch: batch + 50].flatten()).backward()
        optimizer.step()
    guesses, loss = train_arith.predict(args, "add", model, prompts, goals)
    with torch.no_grad():
        forced = train_arith.digit_logits(args, "add", model, torch.cat([prompts, goals[:, :-1]], dim=1))
    right = (forced.argmax(-1) == goals).all(1)
    assert torch.equal((guesses == goals).all(1), right) and 0 < right.float().mean() < 1
    assert loss == pytest.approx(F.cross_entropy(forced.flatten(0, 1), goals.flatten()).item(), rel=1e-5)


def test_scores_of_a_model_that_is_right():
    class Oracle(torch.nn.Module):
        def forward(self, operands):  # (B, 4) digits: the sum's, as one-hot scores
            a, b = 10 * operands[:, 0] + operands[:, 1], 10 * operands[:, 2] + operands[:, 3]
            return 100.0 * F.one_hot(arithmetic.to_digits(a + b, 3), 10).flatten(1)

    args, *_, prompts, goals = built("default", "add", "--readout", "mean")
    got = train_arith.scores(args, "add", Oracle(), prompts, goals)
    assert got == {"exact_match": 1, "digit_accuracy": 1, "loss": 0}


def test_first_step():
    curve = [{"step": 5, "exact_match": 0.2}, {"step": 10, "exact_match": 0.8}, {"step": 15, "exact_match": 0.7}]
    assert train_arith.first_step(curve, 0.75) == 10 and train_arith.first_step(curve, 0.99) is None


@pytest.mark.parametrize("init, frozen", [("mask-frozen", ["mask"]), ("svd-frozen", ["query", "key"]),
                                          ("opt-frozen", ["query", "key"])])
def test_what_is_frozen_stays_to_the_last_bit(init, frozen, tmp_path):
    (result,) = tiny(tmp_path, "--tasks", "add", "--inits", init, "--lr", "0.1", "--weight-decay", "0.1")
    (path,) = (tmp_path / "checkpoints").iterdir()
    args = train_arith.settings([*TINY, "--lr", "0.1"], "add")
    args.fraction = 0.01
    start = train_arith.build(args, "add", init, 0, train_arith.load_problems(args, "add")[0][0])[0].state_dict()
    for name, value in records.load(path)["model"].items():
        assert torch.equal(value, start[name]) == any(f".{part}" in name for part in frozen), name
    assert result["params"]["trainable"] < result["params"]["total"]


def test_several_fractions_are_several_runs(tmp_path, capsys):
    results = tiny(tmp_path, "--tasks", "add", "--inits", "mask", "--fraction", "0.02", "0.05", "0.02")
    assert [r["config"]["fraction"] for r in results] == [0.02, 0.05] and len(lines(tmp_path)) == 2
    assert "add 2% mask" in capsys.readouterr().out
    again = tiny(tmp_path, "--tasks", "add", "--inits", "mask", "--fraction", "0.05", "0.02", "--resume")
    assert again == results[::-1]


def test_the_paper_s_figures_stand_beside_its_own_problems_only(capsys):
    def cells(*flags):
        args = train_arith.settings(["--inits", "mask", "--fraction", "0.004", *flags], "add")
        train_arith.print_table(args, {("add", args.fraction[0]): args}, [])
        return capsys.readouterr().out.splitlines()[-1].split()[-3:]

    assert cells() == ["0.7749", "0.9386", "0.23"]
    for flags in (["--smoke"], ["--fraction", "0.003"], ["--mode", "autoregressive"], ["--digits", "2"]):
        assert cells(*flags) == ["-"] * 3


def test_as_a_process_from_another_directory(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "train_arith.py"), *TINY, "--tasks", "mul", "--out", "a b"],
                          cwd=tmp_path, capture_output=True, encoding="utf-8", env=os.environ)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.isascii()
    assert "mul 1% mask" in done.stdout.splitlines()[-1] and len(lines(tmp_path / "a b")) == 4


def test_paper_preset_builds():
    for task, steps, fraction in (("add", 800, 0.004), ("mul", 5900, 0.03)):
        args = train_arith.settings(["--preset", "paper"], task)
        assert (args.steps, args.fraction, args.digits) == (steps, [fraction], 3)  # 50 epochs in batches of 256
        assert abs(args.steps - 50 * fraction * 1e6 / 256) < 50
        model, supports = train_arith.build(args, task, "mask", 0, torch.zeros(300, 6, dtype=torch.long))
        attention = model.transformer.blocks[5].attention
        assert len(supports) == 6 and attention.query.weight.shape == (256, 256) and attention.heads == 4


@pytest.mark.slow
def test_the_claim_on_addition(tmp_path):
    """The default recipe: the mask needs fewer pairs, and fewer steps."""
    results = train_arith.main(["--tasks", "add", "--inits", "default", "mask", "--fraction", "0.0005", "0.004",
                                "--out", str(tmp_path)])
    few, many = {r["init"]: r["metrics"] for r in results[:2]}, {r["init"]: r["metrics"] for r in results[2:]}
    assert few["mask"]["exact_match"] > few["default"]["exact_match"] + 0.3
    assert many["mask"]["exact_match"] > 0.99 and many["mask"]["steps_to_75"] < many["default"]["steps_to_75"]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    tiny(tmp_path, "--inits", "mask", "default", "--seeds", "2", "--fraction", "0.02", "0.05", "--plot")
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
