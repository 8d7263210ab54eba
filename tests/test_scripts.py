"""What all four scripts do alike: result lines, seeds, --resume, divergence, signals, bad input."""
import functools
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import refused

import train_arith
import train_gotu
import train_lm
import train_vit
from tinymask import records, runs

pytestmark = pytest.mark.usefixtures("few_images")
ROOT = Path(__file__).parent.parent
TINY = {  # one short run each; its task is the first one
    train_gotu: "--bits 9 --steps 8 --dim 12 --head-dim 4 --mlp-dim 48 --batch-size 16 --tasks 2parity",
    train_arith: "--digits 2 --steps 8 --dim 12 --depth 3 --head-dim 4 --mlp-dim 16 --batch-size 16 --fraction 0.01 "
                 "--eval-size 50 --tasks add",
    train_vit: "--steps 8 --batch-size 8 --dim 24 --depth 2 --warmup 1 --dataset builtin",
    train_lm: "--steps 8 --batch-size 4 --dim 16 --depth 2 --heads 2 --head-dim 8 --block 8",
}
SUBJECT = {train_gotu: pytest.mark.gotu, train_arith: pytest.mark.arith, train_vit: pytest.mark.vit,
           train_lm: pytest.mark.lm}
METRICS = {
    train_gotu: "mse_all mse_seen mse_unseen acc_all acc_seen acc_unseen support_mass_init support_mass_final",
    train_arith: "exact_match digit_accuracy loss fraction mode readout steps_to_75 steps_to_99 mirrored "
                 "support_mass_init support_mass_final",
    train_vit: "top1 top1_best loss support_mass_init support_mass_final",
    train_lm: "perplexity nll bits_per_byte tokens_evaluated val_perplexity val_nll val_bits_per_byte "
              "val_tokens_evaluated",
}
FIELDS = {"script", "task", "init", "seed", "config", "metrics", "curve", "steps", "seconds", "peak_rss_mb", "params",
          "threads", "versions", "device", "diverged", "complete"}


def scripts(*cases):
    """Parameters (script, ...) with the marker of its subject; by default the four scripts alone."""
    return [pytest.param(script, *more, marks=SUBJECT[script], id=" ".join([script.__name__, *map(ascii, more)]))
            for script, *more in cases or [(script,) for script in TINY]]


@pytest.fixture
def run(tmp_path):
    """A function that runs a script on small data: the short run above, with more flags."""
    book = tmp_path / "a book.txt"
    book.write_text("the cat sat on the mat. é 😀\n" * 40, encoding="utf-8")

    def run(script, out, *more):
        data = ["--data", str(book)] if script is train_lm else []
        return script.main([*TINY[script].split(), *data, "--out", str(tmp_path / out), *more])

    return run


def lines(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


# -- result lines and seeds -------------------------------------------------------------------


@pytest.mark.parametrize("script", scripts())
def test_a_result_line_keeps_the_contract(script, run, tmp_path):
    results = run(script, "out", "--inits", "default", "mask", "--device", "cpu")
    assert lines(tmp_path / "out") == json.loads(json.dumps(results))
    for result, init in zip(results, ("default", "mask"), strict=True):
        assert set(result) == FIELDS and result["init"] == init and f"train_{result['script']}" == script.__name__
        assert {*METRICS[script].split(), "attention_shift", "mask_drift"} <= set(result["metrics"])
        assert set(result["versions"]) == {"python", "torch", "numpy", "tinymask"} and "out" not in result["config"]
        assert result["complete"] and not result["diverged"] and result["device"] == "cpu"
        assert result["seed"] == 0 and result["seconds"] > 0 and result["threads"] == torch.get_num_threads()
        assert [point["step"] for point in result["curve"]] == list(range(1, 9)) and result["steps"] == 8
        assert (result["params"]["mask"] > 0) == (init == "mask")
        assert result["params"]["total"] == result["params"]["trainable"] > result["params"]["mask"]


@pytest.mark.parametrize("script", scripts())
def test_a_seed_is_the_same_run_wherever_it_stands_and_another_seed_another(script, run, tmp_path):
    several = run(script, "a", "--inits", "mask", "--seeds", "2", "--first-seed", "3")
    (alone,) = run(script, "b", "--inits", "mask", "--first-seed", "4")
    assert [r["seed"] for r in several] == [3, 4]
    assert several[1]["metrics"] == alone["metrics"] and several[1]["curve"] == alone["curve"]
    assert several[0]["metrics"] != alone["metrics"]
    first, second, again = (records.load(path)["model"] for path in sorted(tmp_path.glob("[ab]/checkpoints/*")))
    assert all(torch.equal(second[name], again[name]) for name in second)
    assert not all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("script", scripts())
def test_smoke_and_presets_yield_to_flags(script):
    smoke, plain, own = (script.settings(flags, None) for flags in (["--smoke"], [], ["--smoke", "--steps", "5"]))
    assert smoke.out == plain.out + "-smoke" == f"runs/{script.__name__[6:]}-smoke"  # apart from real results
    assert {name: vars(smoke)[name] for name in script.SMOKE} == script.SMOKE and own.steps == 5 < plain.steps
    assert plain.steps == script.PRESETS["small"]["steps"] and plain.mask_lr == plain.lr
    paper = script.settings(["--preset", "paper", "--lr", "0.5", "--out", "~/x"], None)
    assert paper.mask_lr == paper.lr == 0.5 and paper.steps == script.PRESETS["paper"]["steps"]
    assert paper.out == str(Path.home() / "x")


# -- --resume ---------------------------------------------------------------------------------


def stopped_at_step_5(run, script, monkeypatch, *flags, signum=signal.SIGINT):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        calls = iter(range(99))
        patch.setattr(runs, "stop_requested", lambda: signum if next(calls) >= 4 else None)
        run(script, "parts", *flags)
    assert stop.value.code == 128 + signum


@pytest.mark.parametrize("script, flags", scripts(
    (train_gotu, []), (train_arith, []), (train_arith, ["--mode", "autoregressive"]), (train_vit, []),
    (train_vit, ["--augment", "full", "--drop-path", "0.5", "--pooling", "cls"]), (train_lm, ["--dropout", "0.3"]),
    (train_lm, ["--inits", "relative"]), (train_lm, ["--inits", "rotary-mask"])))
def test_resume_inside_a_run_equals_an_uninterrupted_one(script, flags, run, tmp_path, monkeypatch):
    flags = ["--inits", "mask", *flags]
    whole = run(script, "whole", *flags)
    stopped_at_step_5(run, script, monkeypatch, *flags)
    assert not (tmp_path / "parts" / "results.jsonl").exists()
    parts = run(script, "parts", *flags, "--resume")
    assert parts[0]["metrics"] == whole[0]["metrics"] and parts[0]["curve"] == whole[0]["curve"]
    saved = [records.load(next((tmp_path / name / "checkpoints").iterdir()))["model"] for name in ("whole", "parts")]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert run(script, "parts", *flags, "--resume") == parts and len(lines(tmp_path / "parts")) == 1


@pytest.mark.parametrize("script", scripts())
def test_resume_makes_what_is_missing(script, run, tmp_path):
    first = run(script, "out", "--inits", "mask")
    second = run(script, "out", "--inits", "mask", "default", "--resume")
    assert second[0] == json.loads(json.dumps(first[0])) and len(lines(tmp_path / "out")) == 2
    run(script, "out", "--inits", "mask", "--batch-size", "2", "--resume")
    assert len(lines(tmp_path / "out")) == 3  # another batch size is another run


@pytest.mark.parametrize("script", scripts())
def test_a_checkpoint_of_another_run_is_refused_by_the_fields_that_differ(script, run, tmp_path, monkeypatch, capsys):
    stopped_at_step_5(run, script, monkeypatch, "--inits", "default")
    (path,) = (tmp_path / "parts" / "checkpoints").iterdir()
    ours, capsys_out = path.read_bytes(), capsys.readouterr()
    assert "stopped at step 5; --resume" in capsys_out.err
    run(script, "other", "--inits", "default", "--batch-size", "2", "--first-seed", "1")
    other = next((tmp_path / "other" / "checkpoints").iterdir()).read_bytes()
    foreign = io.BytesIO()
    torch.save(records.load(path) | {"run": {"script": "another"}}, foreign)
    for content, words in ((other, "batch_size is 2 there"), (other, "seed is 1 there, 0 here"),
                           (foreign.getvalue(), f"(script is another there, {script.__name__[6:]} here); delete"),
                           (b"PK\3\4 no checkpoint", "delete it")):
        path.write_bytes(content)
        error = refused(capsys, lambda: run(script, "parts", "--inits", "default", "--resume"))
        assert words in error and str(path) in error and "weights_only" not in error
    path.write_bytes(ours)
    assert run(script, "parts", "--inits", "default", "--resume")[0]["steps"] == 8


@pytest.mark.parametrize("script", scripts())
def test_divergence_is_recorded(script, run, tmp_path, capsys):
    (result,) = run(script, "out", "--inits", "default", "--lr", "1e30")
    assert result["diverged"] and result["steps"] < 8 and "diverged at step" in capsys.readouterr().out
    assert None in lines(tmp_path / "out")[0]["metrics"].values()
    assert run(script, "out", "--inits", "default", "--lr", "1e30", "--resume") == [result]
    (result,) = run(script, "one", "--inits", "default", "--lr", "1e30", "--steps", "1")  # in its only step
    assert result["diverged"]


# -- the process is left as it was found ------------------------------------------------------


def raise_and_go_on(optimizer, signum, zero_grad=torch.optim.Optimizer.zero_grad):
    signal.raise_signal(signum)
    zero_grad(optimizer)


@pytest.mark.parametrize("script", scripts())
def test_a_signal_stops_one_run_and_not_the_next(script, run, monkeypatch, capsys):
    """As in a notebook: Ctrl-C while a step is taken, then the same cell again. SIGTERM is handled alike."""
    def handlers():
        return [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]

    before = handlers()
    for signum in (signal.SIGINT, signal.SIGTERM):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(torch.optim.Optimizer, "zero_grad", functools.partialmethod(raise_and_go_on, signum))
            run(script, f"{signum}", "--inits", "default")
        assert stop.value.code == 128 + signum and "stopped at step 1;" in capsys.readouterr().err
        assert handlers() == before
    assert run(script, "next", "--inits", "default")[0]["steps"] == 8 and handlers() == before


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                                   RuntimeError("[enforce fail at alloc_cpu.cpp:1] can't allocate memory: 9 bytes")])
@pytest.mark.parametrize("script", scripts())
def test_out_of_memory_is_one_line(script, error, run, monkeypatch, capsys):
    def full(*_):
        raise error

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", full)
    assert "out of memory" in refused(capsys, lambda: run(script, "out", "--inits", "default"), status=1)


@pytest.mark.parametrize("script", scripts())
def test_figures_need_matplotlib_before_the_training(script, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "tinymask[plot]" in refused(capsys, lambda: run(script, "new", "--plot"))
    assert not (tmp_path / "new").exists()


def process(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, encoding="cp1252", **options)


@pytest.mark.parametrize("script, signum", scripts((train_gotu, signal.SIGINT), (train_lm, signal.SIGTERM)))
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_signal_to_a_process(script, signum, tmp_path):
    command = [sys.executable, script.__file__, *TINY[script].split(), "--steps", "100000", "--inits", "default",
               "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while "seed 0" not in running.stdout.readline():  # the first run is about to start
            pass
        running.send_signal(signum)
        _, error = running.communicate(timeout=60)
    assert running.returncode == 128 + signum and "--resume" in error and "Traceback" not in error
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 1


@pytest.mark.parametrize("script", scripts())
def test_as_a_process_from_another_directory(script, tmp_path):
    """A console that knows no UTF-8, a folder with a space and an umlaut, the default encoding of a C locale."""
    done = process(script.__file__, *TINY[script].split(), "--inits", "mask", "--out", "a b/ü", cwd=tmp_path,
                   env={**os.environ, "PYTHONIOENCODING": "cp1252", "LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and done.stderr == "" and done.stdout.replace("ü", "").isascii()
    assert " mask" in done.stdout.splitlines()[-1] and len(lines(tmp_path / "a b" / "ü")) == 1


@pytest.mark.gotu
def test_exit_statuses_and_streams_of_a_process(tmp_path):
    code = ("import io, sys, train_gotu; from tinymask import runs; sys.stdout = io.StringIO()\n"  # a notebook's stream
            "try: runs.command(lambda: train_gotu.main(sys.argv[1:]))\n"
            "except SystemExit as stop: sys.stderr.write(f'{stop.code} {len(sys.stdout.getvalue()) > 99}')")
    tiny = [*TINY[train_gotu].split(), "--inits", "default", "--out", str(tmp_path)]
    assert process("-c", code, *tiny, cwd=ROOT).stderr == "0 True"
    diverged = process(train_gotu.__file__, *tiny, "--lr", "1e30")
    assert diverged.returncode == 1
    done = subprocess.run(f'"{sys.executable}" "{train_gotu.__file__}" {" ".join(tiny)} | head -1', shell=True,
                          capture_output=True, text=True)
    assert done.stdout.startswith("device") and done.stderr == ""
    helped = process(train_gotu.__file__, "--help")
    assert helped.returncode == 0 and "--position-std" in helped.stdout and "preset small: steps 800" in helped.stdout
    if Path("/dev/full").exists():
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run([sys.executable, train_gotu.__file__, *tiny], stdout=full, stderr=subprocess.PIPE,
                                  text=True)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


# -- bad input --------------------------------------------------------------------------------

COMMON = ["--lr nan", "--lr inf", "--lr -1", "--lr 0", "--seeds 0", "--seeds x", "--first-seed -1", "--steps 0",
          "--batch-size 0", "--inits nosuch", "--preset huge", "--device tpu", "--device cuda:9", "--dim x",
          "--smoke False", "--see 1", "--mask-lr 1e300", "--weight-decay -1", "--mask-lr nan", "--heads 1.5",
          "--out /dev/null/x", "--out=", "--depth 0"]
BAD = [*((script, flags) for script in TINY for flags in COMMON), *(
    (train_gotu, flags) for flags in (
        "--tasks nosuch", "--tasks", "--open nan", "--open 1e5", "--bits 2", "--bits 64", "--missing-links 99",
        "--wrong-links 300", "--missing-links -1", "--heads 2", "--tasks threesym --inits mask-only --bits 8",
        "--optimizer lion", "--mask-weight-decay -1", "--mask-weight-decay nan", "--prior-layers 0",
        "--prior-layers 3", "--prior-layers", "--gap -1", "--ridge nan")), *(
    (train_arith, flags) for flags in (
        "--fraction 0", "--fraction 1", "--fraction -0.1", "--fraction nan", "--fraction", "--fraction 1e-9",
        "--fraction 0.1 2", "--digits 4", "--digits 1", "--tasks div", "--order reversed", "--eval-size 0",
        "--readout mean --mode autoregressive", "--inits mask-literal --mode autoregressive", "--depth 2", "--heads 1",
        "--position-std 1e30", "--eval-size every", "--mode both", "--readout cls", "--order random", "--mlp-dim 0",
        "--inits mask-hard", "--fraction 0.00001 --smoke --digits 2", "--mirrors some",
        "--ridge -1")), *(
    (train_vit, flags) for flags in (
        "--dataset mnist", "--dataset cifar10", "--dataset imagenet100", "--patch 5", "--heads 5",
        "--dim 30 --heads 3 --positions sincos", "--drop-path 1", "--augment some",
        "--side 1024 --patch 1", "--eval-only=", "--side 0", "--warmup -1", "--train-size 0", "--train-size 9",
        "--train-size 101", "--held-out", "--inits relative --pooling cls",
        "--inits gated --pooling cls", "--ridge -1")), *(
    (train_lm, flags) for flags in (
        "--dataset wikitext2", "--dataset tinystories", "--dataset ptb", "--data nosuch.txt", "--data .",
        "--tokeniser char", "--top-k 0", "--temperature -1", "--block 1", "--dropout 1", "--max-bytes 1",
        "--sample -1", "--prompt 日本 --tokeniser word", "--prompt=\N{NO-BREAK SPACE} --tokeniser word",
        "--data x --dataset builtin", "--data=", "--prompt \udcff", "--head-dim 5 --inits rotary-mask",
        "--vocabulary x"))]


@pytest.mark.parametrize("script, flags", scripts(*BAD))
def test_bad_input_is_one_line_and_status_2(script, flags, tmp_path, capsys, monkeypatch):
    """It names the first of the flags; nothing is written."""
    monkeypatch.chdir(tmp_path)
    arguments = flags.split(" ")
    error = refused(capsys, lambda: script.main(arguments if "--device" in flags else [*arguments, "--device", "cpu"]))
    flag = "False" if flags == "--smoke False" else arguments[0].partition("=")[0].strip("-").replace("-", " ")
    assert flag in error.replace("-", " ").replace("_", " ") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", scripts())
def test_a_flag_that_is_nearly_one_gets_a_hint(script, capsys):
    assert refused(capsys, lambda: script.main(["--init", "mask"])).endswith("did you mean --inits?\n")
