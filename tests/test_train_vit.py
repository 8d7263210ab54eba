"""train_vit.py end to end on tiny settings, files of the official layout, two processes, bad input."""
import json
import sys
from pathlib import Path

import numpy
import pytest
import torch

import train_vit
from tinymask import images

pytestmark = [pytest.mark.vit, pytest.mark.usefixtures("few_images")]
ROOT = Path(__file__).parent.parent
TINY = ["--steps", "4", "--batch-size", "8", "--dim", "24", "--depth", "2", "--warmup", "1"]


def tiny(out, *more):
    return train_vit.main([*TINY, "--out", str(out), *more])


def lines(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def cifar(folder, classes=10, count=12):
    """A CIFAR-10 (or CIFAR-100) folder with two (one) training files of random records."""
    about = images.CIFAR[f"cifar{classes}"]
    (folder / about["folder"]).mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    names = {10: ["data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"], 100: ["train.bin", "test.bin"]}
    for name in names[classes]:
        records = draw.integers(0, 256, (count, about["label_bytes"] + 3072), dtype=numpy.uint8)
        records[:, about["label_bytes"] - 1] %= classes
        (folder / about["folder"] / name).write_bytes(records.tobytes())


def test_result_lines(tmp_path, capsys):
    results = tiny(tmp_path, "--inits", *train_vit.INITS)
    assert len(results) == 2 * len(train_vit.INITS)
    for result in results:
        metrics = result["metrics"]
        assert metrics["top1"] == result["curve"][-1]["top1"] <= metrics["top1_best"]
        masked = result["init"].startswith("mask") or result["init"] == "bias"
        assert result["params"]["mask"] == (2 * 3 * 64**2 if masked else 0)
    assert "top-1, best" in capsys.readouterr().out


def test_inits_share_weights():
    args = train_vit.settings(TINY, "builtin")
    sample = torch.rand(64, 3, 32, 32)
    states = {init: train_vit.build(args, "builtin", init, 0, sample)[0].state_dict() for init in train_vit.INITS}
    for name, value in states["default"].items():
        for init, state in states.items():
            changed = {"mimetic": ("query", "key", "value", "out"), "impulse": ("query", "key"),
                       "svd": ("query", "key"), "svd-frozen": ("query", "key")}.get(init, ())
            if not any(f".{part}." in name for part in changed):
                assert torch.equal(value, state[name]), (init, name)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_from_files_of_the_official_layout(classes, tmp_path):
    cifar(tmp_path / "data", classes)
    (result,) = tiny(tmp_path / "out", "--dataset", f"cifar{classes}", "--data-dir", str(tmp_path / "data"), "--inits",
                     "mask", "--augment", "full")
    assert result["metrics"]["images"] == (24 if classes == 10 else 12) and len(result["curve"]) == 4


def test_the_paper_preset_takes_steps_at_224_pixels(tmp_path):
    cifar(tmp_path / "data", count=3)
    (result,) = train_vit.main(["--preset", "paper", "--dataset", "cifar10", "--inits", "mask", "--steps", "1",
                                "--batch-size", "2", "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path)])
    assert result["params"]["mask"] == 12 * 3 * 197**2
    assert result["params"]["total"] - result["params"]["mask"] == 5_717_416 - 990 * 193  # 10 classes, not 1,000


def test_imagenet_from_folders(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for number in range(100):
            folder = tmp_path / "imagenet100" / part / f"n{number:08}"
            folder.mkdir(parents=True)
            image.new("RGB", (20, 16), (number, 0, 0)).save(folder / "a.JPEG")
    (result,) = tiny(tmp_path, "--dataset", "imagenet100", "--data-dir", str(tmp_path), "--inits", "default")
    assert len(result["metrics"]["class_list"]) == 12 and result["metrics"]["images"] == 100


def test_eval_only_gives_the_recorded_scores(tmp_path, capsys):
    flags = ["--dataset", "builtin", "--inits", "mask"]
    (result,) = tiny(tmp_path, *flags)
    (path,) = (tmp_path / "checkpoints").iterdir()
    capsys.readouterr()
    assert tiny(tmp_path, *flags, "--eval-only", str(path)) == []
    assert f"top-1 {result['metrics']['top1']:.4f}" in capsys.readouterr().out and len(lines(tmp_path)) == 1
    with pytest.raises(SystemExit) as stop:
        tiny(tmp_path, *flags, "--eval-only", str(tmp_path / "nosuch.pt"))
    assert stop.value.code == 2 and "nosuch.pt" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="gloo under torchrun")
def test_two_processes_give_the_losses_of_one(tmp_path, one_and_two_processes):
    cifar(tmp_path / "data")
    flags = [str(ROOT / "train_vit.py"), *TINY, "--dataset", "cifar10", "--data-dir", str(tmp_path / "data"), "--inits",
             "mask", "--augment", "full", "--device", "cpu"]
    (one,), (two,) = one_and_two_processes(flags)
    for a, b in zip(one["curve"], two["curve"], strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_plot(pooling, tmp_path):
    pytest.importorskip("matplotlib")
    tiny(tmp_path, "--dataset", "builtin", "--inits", "default", "mask", "--plot", "--pooling", pooling)
    assert {"curves.png", "attention-builtin.png", "mask-builtin.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("made, asked, words", [
    (["--inits", "mask"], ["--inits", "bias"], "init is mask there, bias here"),
    (["--inits", "default"], ["--inits", "default", "--heads", "4"], "heads is 3 there, 4 here"),
    (["--inits", "default"], ["--inits", "default", "--dataset", "builtin-global"], "dataset is builtin there"),
])
def test_eval_only_refuses_the_checkpoint_of_another_model(made, asked, words, tmp_path, capsys):
    tiny(tmp_path, "--dataset", "builtin", *made)
    (path,) = (tmp_path / "checkpoints").iterdir()
    with pytest.raises(SystemExit) as stop:
        tiny(tmp_path, "--dataset", "builtin", *asked, "--eval-only", str(path))
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_resume_does_not_take_the_results_of_other_images(tmp_path):
    cifar(tmp_path / "data")
    flags = ["--dataset", "cifar10", "--data-dir", str(tmp_path / "data"), "--inits", "default"]
    tiny(tmp_path / "out", *flags)
    (tmp_path / "data" / "cifar-10-batches-bin" / "data_batch_1.bin").unlink()
    (result,) = tiny(tmp_path / "out", *flags, "--resume")
    assert result["metrics"]["images"] == 12 and len(lines(tmp_path / "out")) == 2


def test_few_tokens_are_said(tmp_path, capsys):
    tiny(tmp_path, "--dataset", "builtin", "--inits", "default", "--patch", "16")
    assert "--patch 16 leaves 4 tokens" in capsys.readouterr().out


def test_a_truncated_file_is_named(tmp_path, capsys):
    cifar(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SystemExit) as stop:
        train_vit.main(["--dataset", "cifar10", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2 and "test_batch.bin" in capsys.readouterr().err and not (tmp_path / "out").exists()
