"""train_vit.py against a loop of a few lines, written from the paper; its figures, official files, two processes."""
import functools
import itertools
import math
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from reference import SHARED_FLAGS, assert_moved, assert_same, checkpoint, set_masks, train, words

import train_vit
from tinymask import ViT, images, init_weights, mask_priors, qk_init, runs
from tinymask.inits import shuffled

pytestmark = [pytest.mark.vit, pytest.mark.usefixtures("few_images")]
ROOT = Path(__file__).parent.parent
TINY = dict(steps=3, batch_size=8, dim=24, depth=2, warmup=2)
SMALL = TINY | dict(side=32, patch=4, heads=3, lr=2e-3, weight_decay=0.05, pooling="mean", positions="learned",
                    drop_path=0.0, augment="none", open=10.0, closed=-10.0, vary_offsets=False, bf16=False)


def run(out, init, *flags, dataset="builtin"):
    return train_vit.main([*words(TINY), "--dataset", dataset, "--inits", init, "--out", str(out), *flags])


def scaled(x, side):
    x = x.float() / 127.5 - 1
    return F.interpolate(x, size=(side, side), mode="bicubic") if x.shape[-1] != side else x


def reference(init, seed, f, relation="local"):
    """Section 5.3: cross-entropy with soft labels. f: the flags. Gives the weights."""
    x, labels, _, _ = images.builtin(relation)
    model = ViT(classes=10, **{name: f[name] for name in (
        "side", "patch", "dim", "depth", "heads", "pooling", "positions", "drop_path")})
    init_weights(model, runs.generator(seed, "weights"))
    draws, cls = runs.generator(seed, init), f["pooling"] == "cls"
    supports = mask_priors.impulse_support(f["side"] // f["patch"], f["depth"], f["heads"], f["vary_offsets"])
    if init == "mask-shuffled":
        supports = [shuffled(s, draws) for s in supports]
    for block, support in zip(model.transformer.blocks, supports):
        if init == "mimetic":
            qk_init.mimetic(block.attention, draws)
        if init == "impulse":
            qk_init.impulse(block.attention, model.position[cls:], support)
    supports = mask_priors.with_cls(supports) if cls else supports
    if init.startswith("svd"):
        some = x[torch.randperm(len(x), generator=runs.generator(seed, "sample"))[:64]]
        qk_init.apply_layerwise(functools.partial(qk_init.svd, gap=50.0), model, scaled(some, f["side"]), supports)
    set_masks(model, init, [mask_priors.to_mask(support, f["open"], f["closed"]) for support in supports])

    def loss(draws):
        chosen = torch.randint(len(x), (f["batch_size"],), generator=draws)
        targets = F.one_hot(labels[chosen], 10).float()
        if f["augment"] == "full":
            inputs = scaled(images.flip_and_crop(x[chosen], draws, pad=4), f["side"])
            inputs, targets = images.mixup_or_cutmix(inputs, 0.9 * targets + 0.01, draws)
            inputs = images.random_erasing(inputs, draws)
        else:
            inputs = scaled(x[chosen], f["side"])
        torch.manual_seed(torch.randint(2**31, (1,), generator=draws).item())  # drop path
        with torch.autocast("cpu", torch.bfloat16, enabled=f["bf16"]):
            logits = model(inputs)
        return -(targets * logits.float().log_softmax(-1)).sum(-1).mean()

    return train(model, loss, f, seed, init)[0]


@pytest.mark.parametrize("init, seed", [*itertools.product(train_vit.INITS, [0, 1])])
def test_three_steps_are_those_of_the_paper(init, seed, tmp_path):
    run(tmp_path, init, "--first-seed", str(seed), "--vary-offsets")
    assert_same(checkpoint(tmp_path)["model"], reference(init, seed, SMALL | {"vary_offsets": True}))


MOVED = dict(steps=2, batch_size=4, dim=12, depth=3, heads=2, warmup=1, lr=0.01, mask_lr=0.5, weight_decay=0.9, side=16,
             patch=8, pooling="cls", positions="sincos", drop_path=0.6, augment="full", open=2.0, closed=-3.0,
             vary_offsets=True, bf16=True)


@pytest.mark.parametrize("name", MOVED)
def test_each_flag_changes_what_it_says(name, tmp_path):
    moved = {name: MOVED[name]}
    (result,) = run(tmp_path, "mask", *words(moved))
    found = checkpoint(tmp_path)["model"]
    assert_same(found, reference("mask", 0, SMALL | moved))
    assert_moved(found, reference("mask", 0, SMALL), result, vars(train_vit.settings([], "builtin")) | TINY,
                 {name} | ({"mask_lr"} if name == "lr" else set()))


def test_no_flag_is_left_out():
    below = {"dataset", "data_dir", "download", "eval_only"}
    assert {action.dest for action in train_vit.parser()._actions} == MOVED.keys() | SHARED_FLAGS | below


@pytest.mark.parametrize("init, flags", [("svd", {"pooling": "cls"}), ("impulse", {"pooling": "cls"})])
def test_priors_leave_the_class_token_alone(init, flags, tmp_path):
    run(tmp_path, init, *words(flags))
    assert_same(checkpoint(tmp_path)["model"], reference(init, 0, SMALL | flags))


def test_halves_are_the_other_set(tmp_path):
    run(tmp_path, "mask", dataset="builtin-global")
    assert_same(checkpoint(tmp_path)["model"], reference("mask", 0, SMALL, "global"))


def test_presets_are_the_paper_s():
    """Tables 9 to 11: ViT-Tiny, 400 epochs of 50,000 in batches of 512, 50 of warm-up; ImageNet-100: 300 and 5."""
    tiny = dict(side=224, patch=16, dim=192, depth=12, heads=3, batch_size=512, weight_decay=0.05, drop_path=0.1)
    for dataset, own, epochs, warm, size in (("cifar10", dict(lr=2e-3, pooling="cls"), 400, 50, 50_000),
                                             ("imagenet100", dict(lr=1e-3, pooling="mean"), 300, 5, 126_689)):
        args = vars(train_vit.settings(["--preset", "paper"], dataset))
        assert (tiny | own).items() <= args.items() and args["augment"] == "full"
        assert args["steps"] == pytest.approx(epochs * size / 512, rel=0.005)
        assert args["warmup"] == pytest.approx(warm * size / 512, rel=0.005)


# -- figures ----------------------------------------------------------------------------------


class Brightness(torch.nn.Module):
    """Says class 1 with logit 2 where an image is bright, class 0 with logit 1 where it is not."""

    def forward(self, x):
        bright = x.mean(dim=(1, 2, 3)) > 0
        return torch.stack([1.0 * ~bright, 2.0 * bright], dim=1)


def test_scores_of_a_model_that_is_right_on_a_known_half():
    """300 images of class 1, in two batches: 150 bright ones, all right, and 150 dark ones, all wrong."""
    x = torch.full((300, 3, 8, 8), 20, dtype=torch.uint8)
    x[:150] = 230
    modes, model = [], Brightness()
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    args = train_vit.settings(["--side", "16"], None)
    got = train_vit.scores(args, model, x, torch.ones(300, dtype=torch.long), torch.device("cpu"))
    wanted = (math.log(1 + math.exp(-2)) + math.log(1 + math.e)) / 2
    assert got == pytest.approx({"top1": 0.5, "loss": wanted}) and modes == [False, False] and model.training


def test_best_is_of_the_curve_and_last_is_the_last(tmp_path, monkeypatch):
    accuracies, asked = iter([0.3, 0.7, 0.1, 0.2]), []

    def scores(args, model, x, labels, device):
        asked.append((x, labels))
        return {"top1": next(accuracies), "loss": 1.5}

    monkeypatch.setattr(train_vit, "scores", scores)
    (result,) = run(tmp_path, "mask")
    metrics = result["metrics"]
    assert (metrics["top1_best"], metrics["top1"], metrics["images"]) == (0.7, 0.2, 100)
    _, _, test_x, test_labels = images.builtin("local")
    assert len(asked) == 4 and all(torch.equal(x, test_x) and torch.equal(y, test_labels) for x, y in asked)


def test_measures_of_persistence_are_taken_at_both_ends(tmp_path):
    (result,) = run(tmp_path, "mask", "--lr", "0.2", "--open", "3", "--closed", "-3", "--steps", "12")
    metrics = result["metrics"]
    assert min(metrics["support_mass_init"]) > min(metrics["support_mass_final"]) and metrics["mask_drift"] > 0.3
    assert 0 < metrics["attention_shift"] < 1 and result["params"]["mask"] == 2 * 3 * 64**2


@pytest.mark.parametrize("init", ["svd", "mask"])
def test_training_and_svd_see_no_test_image(init, tmp_path, monkeypatch):
    """Test images are marked: white; no white image is trained on, or what svd is solved on; the probe is white."""
    make, seen, solve, forward = images.builtin, [], qk_init.apply_layerwise, ViT.forward

    def marked(relation):
        x, labels, test_x, test_labels = make(relation)
        return x.clamp(max=200), labels, torch.full_like(test_x, 255), test_labels

    monkeypatch.setattr(images, "builtin", marked)
    monkeypatch.setattr(qk_init, "apply_layerwise", lambda *given: (seen.append((True, given[2])), solve(*given)))
    monkeypatch.setattr(ViT, "forward", lambda self, x: (seen.append((self.training, x)), forward(self, x))[1])
    run(tmp_path, init)
    for training, x in seen:
        assert (x.amax(dim=(1, 2, 3)) == 1).all() if not training else (x.amax(dim=(1, 2, 3)) < 0.9).all()
    assert sum(training for training, _ in seen) == 3 + (init == "svd")


def test_the_table_says_what_best_is_and_when_the_paper_s_figures_stand_in_it(capsys):
    for flags, paper in ((["--bf16"], True), (["--dim", "96"], False), (["--preset", "small"], False)):
        args = train_vit.settings(["--preset", "paper", "--inits", "mask", "--dataset", "cifar10", *flags], "cifar10")
        train_vit.print_table(args, {"cifar10": args}, [])
        printed = capsys.readouterr().out
        assert ("paper: best" in printed) == printed.endswith("0.9566\n") == paper and "chosen on the test" in printed


# -- data sets and checkpoints ----------------------------------------------------------------


def cifar(folder, classes=10, count=12):
    """A CIFAR-10 (or CIFAR-100) folder with two (one) training files of random records."""
    about = images.CIFAR[f"cifar{classes}"]
    (folder / about["folder"]).mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    names = {10: ["data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"], 100: ["train.bin", "test.bin"]}
    for name in names[classes]:
        content = draw.integers(0, 256, (count, about["label_bytes"] + 3072), dtype=numpy.uint8)
        content[:, about["label_bytes"] - 1] %= classes
        (folder / about["folder"] / name).write_bytes(content.tobytes())


def test_cifar_from_files_of_the_official_layout(tmp_path):
    for classes, count in ((10, 24), (100, 12)):
        cifar(tmp_path / "data", classes)
        where = ["--data-dir", str(tmp_path / "data")]
        (result,) = run(tmp_path / str(classes), "mask", *where, dataset=f"cifar{classes}")
        assert result["metrics"]["images"] == count and result["params"]["total"] > 0
        assert checkpoint(tmp_path / str(classes))["model"]["head.weight"].shape == (classes, 24)
    (tmp_path / "data" / "cifar-10-batches-bin" / "data_batch_1.bin").unlink()  # --resume does not take others' results
    (result,) = run(tmp_path / "10", "mask", "--data-dir", str(tmp_path / "data"), "--resume", dataset="cifar10")
    assert result["metrics"]["images"] == 12


def test_imagenet_from_folders_and_a_run_that_goes_on(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    for part, number in itertools.product(("train", "val"), range(100)):
        folder = tmp_path / "imagenet100" / part / f"n{number:08}"
        folder.mkdir(parents=True)
        image.new("RGB", (20, 16), (2 * number, 0, 0)).save(folder / "a.JPEG")
    flags = ["--data-dir", str(tmp_path), "--steps", "2"]
    (whole,) = run(tmp_path / "whole", "svd", *flags, dataset="imagenet100")
    assert len(whole["metrics"]["class_list"]) == 12 and whole["metrics"]["images"] == 100
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(runs, "stop_requested", lambda: 2)
        run(tmp_path / "parts", "svd", *flags, dataset="imagenet100")
    (parts,) = run(tmp_path / "parts", "svd", *flags, "--resume", dataset="imagenet100")
    assert parts["metrics"] == whole["metrics"] and parts["curve"] == whole["curve"]


def test_eval_only(tmp_path, capsys):
    (result,) = run(tmp_path, "mask")
    (path,) = (tmp_path / "checkpoints").iterdir()
    capsys.readouterr()
    assert run(tmp_path, "mask", "--eval-only", str(path)) == []
    assert f"top-1 {result['metrics']['top1']:.4f}" in capsys.readouterr().out
    for init, flags, said in (("bias", [], "init is mask there, bias here"),
                              ("mask", ["--heads", "4"], "heads is 3 there, 4 here"),
                              ("mask", ["--dataset", "builtin-global"], "task is builtin there"),
                              ("mask", ["--eval-only", str(tmp_path / "nosuch.pt")], "no such file")):
        with pytest.raises(SystemExit) as stop:
            run(tmp_path, init, "--eval-only", str(path), *flags)
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_few_tokens_are_said(tmp_path, capsys):
    run(tmp_path, "default", "--patch", "16")
    assert "--patch 16 leaves 4 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_plot(pooling, tmp_path):
    pytest.importorskip("matplotlib")
    run(tmp_path, "mask", "--plot", "--pooling", pooling)
    assert {"curves.png", "attention-builtin.png", "masks-builtin.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.skipif(sys.platform == "win32", reason="gloo under torchrun")
def test_two_processes_give_the_losses_of_one(tmp_path, one_and_two_processes):
    cifar(tmp_path / "data")
    flags = [str(ROOT / "train_vit.py"), *words(TINY), "--dataset", "cifar10", "--data-dir", str(tmp_path / "data"),
             "--inits", "mask", "--augment", "full", "--device", "cpu"]
    (one,), (two,) = one_and_two_processes(flags)
    for a, b in zip(one["curve"], two["curve"], strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
