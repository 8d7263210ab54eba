"""train_gotu.py end to end on tiny settings, and what it does with bad input."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_gotu
from tinymask import boolean, records, runs

pytestmark = pytest.mark.gotu
ROOT = Path(__file__).parent.parent
TINY = ["--bits", "9", "--steps", "8", "--dim", "12", "--head-dim", "4", "--mlp-dim", "48", "--batch-size", "16"]


def tiny(out, *more):
    return train_gotu.main([*TINY, "--out", str(out), *more])


def lines(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def process(*arguments, **options):
    return subprocess.run([sys.executable, str(ROOT / "train_gotu.py"), *arguments], capture_output=True,
                          encoding="cp1252", **options)


def test_result_lines(tmp_path, capsys):
    results = tiny(tmp_path, "--tasks", "2parity", "threesym", "--inits", *train_gotu.INITS)
    assert len(results) == 2 * len(train_gotu.INITS) == 26
    for result in results:
        per_head = 2 if result["task"] == "threesym" else 0  # ThreeSym's first layer has a mask for each head
        masked = result["init"].startswith(("mask", "bias"))
        assert result["params"]["mask"] == ((2 + per_head) * 81 if masked else 0)
    mass = {r["init"]: min(r["metrics"]["support_mass_init"]) for r in results if r["task"] == "2parity"}
    assert mass["mask"] > 0.97 and mass["default"] < 0.4
    table = capsys.readouterr().out
    assert "2parity: " not in table
    assert "2parity default seed 0: n = 9, 384 points seen, 128 unseen, 8 steps at 0.001\n" in table


def test_a_run_is_repeatable_bit_for_bit_and_inits_share_weights_and_batches(tmp_path):
    first, again = (tiny(tmp_path / name, "--tasks", "2parity") for name in "ab")
    assert [r["metrics"] for r in first] == [r["metrics"] for r in again]
    args = train_gotu.settings(TINY, "2parity")
    states = [train_gotu.build(args, "2parity", init, 3)[0].state_dict() for init in ("default", "svd", "mask")]
    for name in states[0]:
        if "query" not in name and "key" not in name:
            assert torch.equal(states[0][name], states[1][name])
        assert torch.equal(states[0][name], states[2][name])


def test_a_mask_that_diverges_is_recorded_and_the_other_runs_go_on(tmp_path):
    results = tiny(tmp_path, "--tasks", "2parity", "--inits", "mask", "bias", "--steps", "40", "--lr", "1e10")
    assert len(lines(tmp_path)) == 2 and all(r["diverged"] for r in results)
    assert all(r["metrics"]["acc_all"] is None for r in results if r["metrics"]["mse_all"] is None)


def test_a_mask_that_runs_off_to_minus_infinity_is_divergence(tmp_path):
    (result,) = tiny(tmp_path, "--tasks", "2parity", "--inits", "mask", "--steps", "60", "--optimizer", "sgd",
                     "--mask-weight-decay", "10", "--mask-lr", "1e4", "--pooling", "cls")
    assert result["diverged"] and len(lines(tmp_path)) == 1


def test_ctrl_c_in_the_step_that_diverges_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "interrupted", lambda: True)
    (result,) = tiny(tmp_path, "--tasks", "2parity", "--inits", "default", "--lr", "1e30", "--steps", "1")
    assert result["diverged"]


def test_as_a_process_from_another_directory(tmp_path):
    done = process(*TINY, "--tasks", "majority", "--inits", "mask", "--out", "a b/ü", cwd=tmp_path,
                   env={**os.environ, "PYTHONIOENCODING": "cp1252", "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.replace("ü", "").isascii()
    assert "majority mask" in done.stdout.splitlines()[-1]
    assert len(lines(tmp_path / "a b" / "ü")) == 1


def test_help_and_exit_status(tmp_path):
    help_text = process("--help")
    assert help_text.returncode == 0 and "--position-std" in help_text.stdout
    assert "preset small: steps 800" in help_text.stdout
    unknown = process("--tasks", "nosuch")
    assert unknown.returncode == 2 and "2parity" in unknown.stderr
    diverged = process(*TINY, "--tasks", "2parity", "--inits", "default", "--lr", "1e30", "--out", str(tmp_path))
    assert diverged.returncode == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and pipes")
def test_ctrl_c_saves_and_leaves_with_130(tmp_path):
    command = [sys.executable, str(ROOT / "train_gotu.py"), *TINY, "--steps", "100000", "--tasks", "2parity",
               "--inits", "mask", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline().startswith("device") and running.stdout.readline()
        time.sleep(1)
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    assert running.returncode == 130 and "--resume" in error and "Traceback" not in error
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_one_line(tmp_path):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([sys.executable, str(ROOT / "train_gotu.py"), *TINY, "--out", str(tmp_path)],
                              stdout=full, stderr=subprocess.PIPE, encoding="utf-8")
    assert done.returncode == 1 and "Traceback" not in done.stderr and "No space left" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_a_closed_pipe_is_quiet(tmp_path):
    command = f'"{sys.executable}" "{ROOT / "train_gotu.py"}" {" ".join(TINY)} --out "{tmp_path}" | head -1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("device") and done.stderr == ""


def test_paper_preset_builds():
    model, supports = train_gotu.build(train_gotu.settings(["--preset", "paper"], "2parity"), "2parity", "mask", 0)
    attention = model.transformer.blocks[3].attention
    assert len(supports) == 4 and attention.mask.shape == (16, 16) and attention.query.bias is None
    assert attention.query.weight.shape == (192, 256) and model.cls is not None
    assert model.transformer.blocks[0].mlp[0].weight.shape == (256, 256)


@pytest.mark.slow
def test_the_claim_on_2parity(tmp_path):
    """The default command's recipe: the mask gets the unseen part right, the default gets it wrong."""
    default, mask = train_gotu.main(["--tasks", "2parity", "--inits", "default", "mask", "--out", str(tmp_path)])
    assert mask["metrics"]["acc_all"] > 0.999 and default["metrics"]["acc_all"] == 0.75


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--tasks", "majority", "threesym", "--inits", "default", "mask", "--seeds", "2", "--plot"]
    tiny(tmp_path, *flags)
    tiny(tmp_path, *flags, "--resume")
    pictures = {f"{name}.png" for name in ("curves", "attention-majority", "attention-threesym", "masks-majority",
                                           "masks-threesym")}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_plot_without_its_checkpoint_is_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    flags = ["--tasks", "2parity", "--inits", "mask"]
    tiny(tmp_path, *flags)
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(SystemExit) as stop:
        tiny(tmp_path, *flags, "--resume", "--plot")
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_plot_when_every_run_diverged(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tiny(tmp_path, "--tasks", "2parity", "--inits", "default", "--lr", "1e30", "--plot")
    assert (tmp_path / "curves.png").exists() and "legend" not in capsys.readouterr().err


def test_mistakes_in_a_prior(capsys):
    plain, wrong = (train_gotu.prior(train_gotu.settings(flags, task), task, init, 0)
                    for task, init, flags in (("2parity", "mask-literal", []),
                                              ("2parity", "mask-literal", ["--wrong-links", "1"])))
    assert (wrong[0] - plain[0]).abs().sum() == 1  # rows left empty on purpose stay empty
    first, later = train_gotu.prior(train_gotu.settings(["--missing-links", "1"], "threesym"), "threesym", "mask", 0)
    assert torch.equal(later, torch.eye(15)) and first.sum() == 45
    for flags in (["--missing-links", "1"], ["--wrong-links", "1"]):  # a prior without links
        with pytest.raises(SystemExit):
            train_gotu.main(["--tasks", "majority", "--inits", "mask-literal", *flags])
        assert capsys.readouterr().err.endswith("links, there is room for 0\n")


def test_plot_without_matplotlib_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stop:
        tiny(tmp_path / "new", "--plot")
    assert stop.value.code == 2 and "tinymask[plot]" in capsys.readouterr().err and not (tmp_path / "new").exists()


def built(init, task="2parity", *flags):
    return train_gotu.build(train_gotu.settings([*TINY, *flags], task), task, init, 0)


def bias_of(model, layer=0):
    """What is added to the logits, from what the model does: its attention with W_Q = 0."""
    attention = model.transformer.blocks[layer].attention
    with torch.no_grad():
        attention.query.weight.zero_()
        _, weights = attention(torch.zeros(1, 9, 12), return_attention=True)
    return weights[0, 0].log()


def test_controls_say_what_they_change():
    supports = built("mask")[1]
    expected = bias_of(built("mask")[0])
    assert expected[0, 1] > -0.2 and expected[0, 0] == pytest.approx(-6, abs=0.2)
    for init in ("mask-frozen", "bias"):  # the same attention at the start
        torch.testing.assert_close(bias_of(built(init)[0]), expected)
    uniform = torch.full((9, 9), 1 / 9).log()
    torch.testing.assert_close(bias_of(built("mask-zero")[0]), uniform)
    torch.testing.assert_close(bias_of(built("default")[0]), uniform)
    hard = bias_of(built("mask-hard")[0])
    assert torch.equal(hard == 0, supports[0] == 1) and torch.equal(hard.isneginf(), supports[0] == 0)
    model, shuffled = built("mask-shuffled")
    assert not torch.equal(shuffled[0], supports[0]) and torch.equal(bias_of(model) > -1, shuffled[0] == 1)
    trained = {init: [name for name, p in built(init)[0].named_parameters() if p.requires_grad and "mask" in name]
               for init in ("mask", "mask-zero", "bias", "mask-frozen", "mask-hard")}
    assert [len(names) for names in trained.values()] == [2, 2, 2, 0, 0]


def test_bias_is_learnt_without_the_sigmoid():
    """d logits / d parameter is 1 for the bias, sigmoid(-m) for the mask (Theorem 1)."""
    gradients = []
    for init in ("mask", "bias"):
        model, _ = built(init)
        model(boolean.to_tokens(boolean.cube(9))).sum().backward()
        gradients.append(model.transformer.blocks[1].attention.mask.grad)
    start = built("mask")[0].transformer.blocks[1].attention.mask
    torch.testing.assert_close(gradients[0], gradients[1] * torch.sigmoid(-start), rtol=1e-3, atol=1e-9)


def test_frozen_query_key_priors_do_not_move(tmp_path):
    for init in ("svd-frozen", "opt-frozen"):
        states = []
        for steps in ("2", "8"):
            tiny(tmp_path / steps, "--tasks", "2parity", "--inits", init, "--lr", "0.1", "--steps", steps)
            (checkpoint,) = (tmp_path / steps / "checkpoints").glob(f"2parity-{init}-*")
            states.append(records.load(checkpoint)["model"])
        same = {name for name in states[0] if torch.equal(states[0][name], states[1][name])}
        assert same == {name for name in states[0] if "query" in name or "key" in name}


def test_mask_only_has_no_position_codes_and_hides_single_bits(tmp_path):
    """Without position codes a prior of this kind cannot tell the three bits of ThreeSym apart one by one."""
    model, supports = built("mask-only", "threesym", "--bits", "15")
    assert model.position.abs().sum() == 0 and not model.position.requires_grad
    x = boolean.cube(15)
    with torch.no_grad():
        output = model.double()(boolean.to_tokens(x[:4096]))[:, 0]  # bits 12, 13, 14 stay +1
    coefficients = boolean.fourier_coefficients(output)
    assert coefficients[[1, 2, 4]].std() < 1e-6 and coefficients[[3, 5, 6]].std() > 1e-5
    assert coefficients[7].abs() < 1e-6  # no row sees all three


def test_sgd_and_mask_weight_decay(tmp_path):
    sgd, adam = (tiny(tmp_path, "--tasks", "2parity", "--inits", "mask", "--optimizer", name)[0]
                 for name in ("sgd", "adam"))
    assert sgd["metrics"] != adam["metrics"] and sgd["metrics"]["mask_drift"] < adam["metrics"]["mask_drift"]
    (decayed,) = tiny(tmp_path, "--tasks", "2parity", "--inits", "mask", "--mask-weight-decay", "0.1")
    assert decayed["metrics"]["mask_drift"] > 2 * adam["metrics"]["mask_drift"]
