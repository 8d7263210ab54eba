"""What all four scripts do alike: result lines, --resume, divergence, bad input."""
import json

import pytest

import train_arith
import train_gotu
import train_lm
import train_vit
from tinymask import runs

pytestmark = pytest.mark.usefixtures("few_images")
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
    train_arith: "exact_match digit_accuracy loss fraction mode readout steps_to_75 steps_to_99 support_mass_init "
                 "support_mass_final",
    train_vit: "top1 top1_best loss support_mass_init support_mass_final",
    train_lm: "perplexity nll bits_per_byte tokens_evaluated val_perplexity val_nll val_bits_per_byte "
              "val_tokens_evaluated",
}
FIELDS = {"script", "task", "init", "seed", "config", "metrics", "curve", "steps", "seconds", "peak_rss_mb", "params",
          "threads", "versions", "device", "diverged", "complete"}


def scripts(*cases):
    """Parameters (script, ...) with the marker of its subject; by default the four scripts alone."""
    return [pytest.param(script, *more, marks=SUBJECT[script], id=" ".join([script.__name__, *map(str, more)]))
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


@pytest.mark.parametrize("script", scripts())
def test_a_result_line_keeps_the_contract(script, run, tmp_path):
    results = run(script, "out", "--inits", "default", "mask")
    assert lines(tmp_path / "out") == json.loads(json.dumps(results))
    for result, init in zip(results, ("default", "mask"), strict=True):
        assert set(result) == FIELDS and result["init"] == init and f"train_{result['script']}" == script.__name__
        names = {*METRICS[script].split(), "attention_shift", "mask_drift"}
        assert names <= set(result["metrics"])
        assert set(result["versions"]) == {"python", "torch", "numpy", "tinymask"} and "out" not in result["config"]
        assert result["complete"] and not result["diverged"]
        assert len(result["curve"]) == 8 and result["curve"][-1]["step"] == result["steps"] == 8
        assert (result["params"]["mask"] > 0) == (init == "mask")


@pytest.mark.parametrize("script, flags", scripts(
    (train_gotu, []), (train_arith, []), (train_arith, ["--mode", "autoregressive"]), (train_vit, []),
    (train_vit, ["--augment", "full", "--drop-path", "0.5", "--pooling", "cls"]), (train_lm, ["--dropout", "0.3"])))
def test_resume_inside_a_run_equals_an_uninterrupted_one(script, flags, run, tmp_path, monkeypatch):
    flags = ["--inits", "mask", *flags]
    whole = run(script, "whole", *flags)
    assert run(script, "again", *flags)[0]["metrics"] == whole[0]["metrics"]
    calls = iter(range(100))
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(runs, "interrupted", lambda: next(calls) >= 4)  # Ctrl-C during the fifth step
        run(script, "parts", *flags)
    assert stop.value.code == 130 and not (tmp_path / "parts" / "results.jsonl").exists()
    parts = run(script, "parts", *flags, "--resume")
    assert parts[0]["metrics"] == whole[0]["metrics"] and parts[0]["curve"] == whole[0]["curve"]
    assert run(script, "parts", *flags, "--resume") == parts and len(lines(tmp_path / "parts")) == 1


@pytest.mark.parametrize("script", scripts())
def test_resume_makes_what_is_missing(script, run, tmp_path):
    first = run(script, "out", "--inits", "mask")
    second = run(script, "out", "--inits", "mask", "default", "--resume")
    assert second[0] == json.loads(json.dumps(first[0])) and len(lines(tmp_path / "out")) == 2
    run(script, "out", "--inits", "mask", "--batch-size", "2", "--resume")
    assert len(lines(tmp_path / "out")) == 3  # another batch size is another run


@pytest.mark.parametrize("script", scripts())
def test_divergence_is_recorded(script, run, tmp_path, capsys):
    (result,) = run(script, "out", "--inits", "default", "--lr", "1e30")
    assert result["diverged"] and result["steps"] < 8 and "diverged at step" in capsys.readouterr().out
    assert None in lines(tmp_path / "out")[0]["metrics"].values()
    assert run(script, "out", "--inits", "default", "--lr", "1e30", "--resume") == [result]
    (result,) = run(script, "one", "--inits", "default", "--lr", "1e30", "--steps", "1")  # in its only step
    assert result["diverged"]


COMMON = ["--lr nan", "--lr inf", "--lr -1", "--lr 0", "--seeds 0", "--seeds x", "--seeds -1", "--first-seed -1",
          "--steps 0", "--batch-size 0", "--inits nosuch", "--preset huge", "--device tpu", "--device cuda:9",
          "--dim x", "--smoke False", "--see 1", "--mask-lr 1e300", "--weight-decay -1", "--mask-lr nan",
          "--heads 1.5", "--out /dev/null/x", "--out=", "--depth 0"]
BAD = [*((script, flags) for script in TINY for flags in COMMON), *(
    (train_gotu, flags) for flags in (
        "--tasks nosuch", "--tasks", "--open nan", "--open 1e300", "--bits 2", "--bits 64", "--missing-links 99",
        "--wrong-links 300", "--missing-links -1", "--heads 2", "--tasks threesym --inits mask-only --bits 8",
        "--optimizer lion", "--mask-weight-decay -1", "--mask-weight-decay nan")), *(
    (train_arith, flags) for flags in (
        "--fraction 0", "--fraction 1", "--fraction -0.1", "--fraction nan", "--fraction", "--fraction 1e-9",
        "--fraction 0.1 2", "--digits 4", "--digits 1", "--tasks div", "--order reversed", "--eval-size 0",
        "--readout mean --mode autoregressive", "--inits mask-literal --mode autoregressive", "--depth 2", "--heads 1",
        "--position-std 1e30", "--eval-size every", "--mode both", "--readout cls", "--order random", "--mlp-dim 0",
        "--inits mask-hard", "--fraction 0.00001 --smoke --digits 2")), *(
    (train_vit, flags) for flags in (
        "--dataset mnist", "--dataset cifar10", "--dataset imagenet100", "--patch 5", "--heads 5",
        "--dim 30 --heads 3 --positions sincos", "--bf16", "--drop-path 1", "--augment some",
        "--side 1024 --patch 1", "--eval-only=", "--side 0", "--warmup -1")), *(
    (train_lm, flags) for flags in (
        "--dataset wikitext2", "--dataset tinystories", "--dataset ptb", "--data nosuch.txt", "--data .", "--bf16",
        "--tokeniser char", "--top-k 0", "--temperature -1", "--block 1", "--dropout 1", "--max-bytes 1",
        "--sample -1", "--prompt 日本 --tokeniser word", "--prompt=\N{NO-BREAK SPACE} --tokeniser word",
        "--data x --dataset builtin", "--data=", "--prompt \udcff"))]


@pytest.mark.parametrize("script, flags", [
    pytest.param(script, flags, marks=SUBJECT[script], id=f"{script.__name__} {ascii(flags)}")
    for script, flags in BAD])
def test_bad_input_is_one_line_and_status_2(script, flags, tmp_path, capsys, monkeypatch):
    """It names the first of the flags; nothing is written."""
    monkeypatch.chdir(tmp_path)
    arguments = flags.split(" ")
    with pytest.raises(SystemExit) as stop:
        script.main(arguments if "--device" in flags else [*arguments, "--device", "cpu"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and not list(tmp_path.iterdir())
    flag = "False" if flags == "--smoke False" else arguments[0].partition("=")[0].strip("-").replace("-", " ")
    assert flag in error.replace("-", " ").replace("_", " ")
