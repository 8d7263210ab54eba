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
from tinymask import ViT, images, init_weights, mask_priors, qk_init, rivals, runs
from tinymask.inits import shuffled

pytestmark = [pytest.mark.vit, pytest.mark.usefixtures("few_images")]
ROOT = Path(__file__).parent.parent
TINY = dict(steps=3, batch_size=8, dim=24, depth=2, warmup=2)
SMALL = dict(steps=600, batch_size=64, dim=48, depth=2, warmup=30, side=32, patch=4, heads=3, lr=2e-3,
             weight_decay=0.05, pooling="mean", positions="learned", drop_path=0.0, augment="none", open=10.0,
             closed=-10.0, vary_offsets=False, bf16=False, train_size=None, held_out=False,
             ridge=0.0)
CLS = {"pooling": "cls"}


def run(out, init, *flags, dataset="builtin"):
    return train_vit.main([*words(TINY), "--dataset", dataset, "--inits", init, "--out", str(out), *flags])


def model_of(f):
    names = "side", "patch", "dim", "depth", "heads", "pooling", "positions", "drop_path"
    return ViT(classes=10, **{name: f[name] for name in names})


def scaled(x, side):
    x = x.float() / 127.5 - 1
    return F.interpolate(x, size=(side, side), mode="bicubic") if x.shape[-1] != side else x


def reference(init, seed, f, dataset="builtin"):
    """Section 5.3: cross-entropy with soft labels. f: the flags. Gives the weights, and the losses of all steps."""
    x, labels, _, _ = images.builtin("global" if dataset == "builtin-global" else "local")
    if f["train_size"]:
        chosen = images.balanced(labels, f["train_size"], runs.generator(0, "train-size"))
        x, labels = x[chosen], labels[chosen]
    model, draws, cls = model_of(f), runs.generator(seed, init), f["pooling"] == "cls"
    if init == "cnn":
        size = sum(p.numel() for p in model.parameters())
        model = rivals.ConvNet(classes=10, width=rivals.convnet_width(size))
    init_weights(model, runs.generator(seed, "weights"))
    supports = mask_priors.impulse_support(f["side"] // f["patch"], f["depth"], f["heads"], f["vary_offsets"])
    if init == "mask-shuffled":
        supports = [shuffled(s, draws) for s in supports]
    blocks = () if init == "cnn" else model.transformer.blocks
    for block, support in zip(blocks, supports):
        if init == "mimetic":
            qk_init.mimetic(block.attention, draws)
        if init == "impulse":
            qk_init.impulse(block.attention, model.position[cls:], support)
    supports = mask_priors.with_cls(supports) if cls else supports
    if init.startswith("svd"):
        some = x[torch.randperm(len(x), generator=runs.generator(seed, "sample"))[:64]]
        qk_init.apply_layerwise(functools.partial(qk_init.svd, gap=50.0, ridge=f["ridge"]), model,
                                 scaled(some, f["side"]), supports)
    if init != "cnn":
        set_masks(model, init, [mask_priors.to_mask(support, f["open"], f["closed"]) for support in supports])
    for block in blocks if init == "relative" else ():
        block.attention.position_bias = rivals.RelativeBias(rivals.offset_index(f["side"] // f["patch"]), f["heads"])
    for layer, block in enumerate(blocks if init == "gated" else ()):
        offsets = [mask_priors.IMPULSES[(h + 3 * layer * f["vary_offsets"]) % 9] for h in range(3)]
        plain, block.attention = block.attention, rivals.GatedAttention(24, 8, offsets)
        block.attention.load_state_dict(plain.state_dict(), strict=False)

    def loss(draws):
        chosen = torch.randint(len(x), (f["batch_size"],), generator=draws)
        targets = F.one_hot(labels[chosen], 10).float()
        inputs = x[chosen] if f["augment"] == "none" else images.flip_and_crop(x[chosen], draws, pad=4)
        inputs = scaled(inputs, f["side"])
        if f["augment"] == "full":
            inputs, targets = images.mixup_or_cutmix(inputs, 0.9 * targets + 0.01, draws)
            inputs = images.random_erasing(inputs, draws)
        torch.manual_seed(torch.randint(2**31, (1,), generator=draws).item())  # drop path
        with torch.autocast("cpu", torch.bfloat16, enabled=f["bf16"]):
            logits = model(inputs)
        return -(targets * logits.float().log_softmax(-1)).sum(-1).mean()

    return train(model, loss, f, seed, init)


def assert_evaluated(metrics, state, f, dataset):
    """The figures are those of these weights on the test images, in float32, with nothing dropped."""
    _, _, x, labels = images.builtin("global" if dataset == "builtin-global" else "local")
    model = model_of(f).eval()
    set_masks(model, "mask", [value for name, value in state.items() if name.endswith(".mask")])
    model.load_state_dict(state)
    scores = model(scaled(x, f["side"])).log_softmax(-1)
    assert metrics["loss"] == pytest.approx(-scores[torch.arange(len(x)), labels].mean().item(), rel=1e-5)
    assert metrics["top1"] == pytest.approx((scores.argmax(-1) == labels).float().mean().item())


@pytest.mark.parametrize("init, seed, flags", [
    *((init, seed, {"vary_offsets": True}) for init in train_vit.INITS for seed in (0, 1)),
    ("svd", 0, CLS), ("impulse", 0, CLS), ("mask", 0, {"augment": "basic"})])
def test_three_steps_are_those_of_the_paper(init, seed, flags, tmp_path):
    (result,) = run(tmp_path, init, "--first-seed", str(seed), *words(flags))
    state, losses = reference(init, seed, SMALL | TINY | flags)
    assert_same(checkpoint(tmp_path)["model"], state)
    assert [point["train_loss"] for point in result["curve"]] == pytest.approx(losses, rel=1e-5)


# one other value for each flag that training depends on; of the rest, where they are moved
MOVED = dict(steps=2, batch_size=4, dim=12, depth=3, heads=2, warmup=1, lr=0.01, mask_lr=0.5, weight_decay=0.9, side=16,
             patch=8, pooling="cls", positions="sincos", drop_path=0.6, augment="full", open=2.0, closed=-3.0,
             vary_offsets=True, bf16=True, train_size=20, ridge=0.1, dataset="builtin-global")


@pytest.mark.parametrize("name", MOVED)
def test_each_flag_changes_what_it_says(name, tmp_path):
    moved, dataset = {name: MOVED[name]}, MOVED["dataset"] if name == "dataset" else "builtin"
    init = "svd" if name == "ridge" else "mask"
    (result,) = run(tmp_path, init, *words(moved), dataset=dataset)
    found, f = checkpoint(tmp_path)["model"], SMALL | TINY | moved
    assert_same(found, reference(init, 0, f, dataset)[0])
    assert_moved(found, reference(init, 0, SMALL | TINY)[0], result, vars(train_vit.settings([], "builtin")) | TINY,
                 {name} - {"dataset"} | ({"mask_lr"} if name == "lr" else set()))
    assert_evaluated(result["metrics"], found, f, dataset)


def test_no_flag_is_left_out():
    below = {"held_out", "data_dir", "download", "eval_only"}
    assert {action.dest for action in train_vit.parser()._actions} == MOVED.keys() | SHARED_FLAGS | below


def test_presets_and_figures_of_the_paper():
    """Tables 9 to 11: ViT-Tiny, 400 epochs of 50,000 in batches of 512, 50 of warm-up; ImageNet-100: 300 and 5."""
    tiny = dict(dim=192, depth=12, heads=3, weight_decay=0.05, drop_path=0.1, augment="full")
    paper = tiny | dict(side=224, patch=16, batch_size=512)
    for dataset, own, epochs, warm, size in (
            ("cifar10", dict(steps=39_100, warmup=4_900, lr=2e-3, pooling="cls"), 400, 50, 50_000),
            ("imagenet100", dict(steps=74_400, warmup=1_240, lr=1e-3, pooling="mean"), 300, 5, 126_689)):
        assert vars(train_vit.settings(["--preset", "paper"], dataset)).items() >= (paper | own).items()
        assert (own["steps"], own["warmup"]) == pytest.approx((epochs * size / 512, warm * size / 512), rel=0.005)
    fast = SMALL | tiny | dict(steps=10_000, warmup=500, batch_size=128, lr=1e-3)
    assert vars(train_vit.settings(["--preset", "cifar-fast"], "cifar10")).items() >= fast.items()
    for preset in train_vit.PRESETS:
        train_vit.settings(["--preset", preset, "--smoke"], None)  # heads divide what --smoke makes of the width
    two_cores = train_vit.settings(["--preset", "cifar-small"], "cifar10")
    assert {two_cores.heads, len(mask_priors.IMPULSES)} == {9} and two_cores.augment == "basic"
    usual = SMALL | {"inits": ["default", "mimetic", "impulse", "svd", "mask", "mask-frozen"],
                     "dataset": ["builtin", "builtin-global"], "data_dir": "data"}
    assert vars(train_vit.settings([], None)).items() >= usual.items()
    most = train_vit.settings(["--data-dir", "~/x", "--side", "1024", "--patch", "8"], None)  # 2^14 tokens
    assert most.data_dir == str(Path.home() / "x")
    for dataset, *row in (("cifar10", .9420, .9480, .9512, .9416, .9566),  # Tables 3 and 5
                          ("cifar100", .7400, .7680, .7647, .7877, .7795),
                          ("imagenet100", .8338, .8438, .8316, .8178, .8592)):
        inits = "default", "mimetic", "impulse", "mask-frozen", "mask"
        assert [train_vit.PAPER[dataset, init] for init in inits] == row


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
    """A curve has 20 points at most, on 50 test images that no seed moves; the last accuracy is that of all 70."""
    accuracies, asked = iter([0.3] * 5 + [0.7] + [0.1] * 14 + [0.2]), []

    def scores(args, model, x, labels, device):
        asked.append((x, labels))
        return {"top1": next(accuracies), "loss": 1.5}

    monkeypatch.setattr(train_vit, "scores", scores)
    monkeypatch.setattr(train_vit, "POINTS", 50)
    (result,) = run(tmp_path, "mask", "--steps", "40", "--first-seed", "3")
    assert (result["metrics"]["top1_best"], result["metrics"]["top1"]) == (0.7, 0.2)
    assert [(point["step"], point["top1"]) for point in result["curve"]][4:7] == [(10, 0.3), (12, 0.7), (14, 0.1)]
    _, _, test_x, test_labels = images.builtin("local")
    few = torch.randperm(70, generator=runs.generator(0, "points"))[:50].sort().values
    assert len(asked) == 21
    for chosen, (x, y) in zip([few] * 20 + [torch.arange(70)], asked):
        assert torch.equal(x, test_x[chosen]) and torch.equal(y, test_labels[chosen])


def test_measures_of_persistence_are_taken_at_both_ends(tmp_path):
    (result,) = run(tmp_path, "mask", "--lr", "0.2", "--open", "3", "--closed", "-3", "--steps", "12")
    metrics = result["metrics"]
    assert min(metrics["support_mass_init"]) > min(metrics["support_mass_final"]) and metrics["mask_drift"] > 0.3
    assert 0 < metrics["attention_shift"] < 1 and result["params"]["mask"] == 2 * 3 * 64**2


@pytest.mark.parametrize("init", ["svd", "mask"])
def test_training_and_svd_see_no_test_image(init, tmp_path, monkeypatch):
    """Test images are marked: white. None is trained on, or what svd is solved on. Attention is looked at on 64 of
    them, the same for all seeds."""
    make, seen, solve, forward = images.builtin, [], qk_init.apply_layerwise, ViT.forward

    def marked(relation):
        x, labels, test_x, test_labels = make(relation)
        test_x = torch.full_like(test_x, 255)
        test_x[:, 0, 0, 0] = torch.arange(len(test_x))  # its number
        return x.clamp(max=200), labels, test_x, test_labels

    monkeypatch.setattr(images, "builtin", marked)
    monkeypatch.setattr(qk_init, "apply_layerwise", lambda *given: (seen.append((True, given[2])), solve(*given)))
    monkeypatch.setattr(ViT, "forward", lambda self, x: (seen.append((self.training, x)), forward(self, x))[1])
    run(tmp_path, init, "--first-seed", "3")
    for training, x in seen:
        assert (x[:, 1].amax(dim=(1, 2)) < 0.9).all() if training else (x[:, 1] == 1).all()
    assert sum(training for training, _ in seen) == 3 + (init == "svd")
    probes = [((x[:, 0, 0, 0] + 1) * 127.5).round().long() for training, x in seen if not training and len(x) == 64]
    wanted = torch.randperm(70, generator=runs.generator(0, "probe"))[:64]
    assert len(probes) == 2 and all(torch.equal(probe, wanted) for probe in probes)


def test_held_out_images_are_scored_on_and_not_trained_on(tmp_path, monkeypatch, capsys):
    """The last 30 of 100 are held out before a part is taken; no test image is looked at."""
    x, labels, *_ = images.builtin("local")
    x[70:] = 255  # marked
    monkeypatch.setattr(images, "builtin", lambda relation: (x, labels, None, None))
    monkeypatch.setattr(images, "fingerprint", lambda data: "")
    monkeypatch.setattr(train_vit, "HELD_OUT", 30)
    seen, forward = [], ViT.forward
    monkeypatch.setattr(ViT, "forward", lambda self, x: (seen.append((self.training, x)), forward(self, x))[1])
    (result,) = run(tmp_path, "mask", "--held-out", "--train-size", "70")
    assert all((batch == 1).flatten(1).all(1).eq(not training).all() for training, batch in seen)
    assert result["metrics"]["images"] == 70 and result["config"]["held_out"] and {len(b) for _, b in seen} == {8, 30}
    monkeypatch.setattr(ViT, "forward", forward)
    (path,) = (tmp_path / "checkpoints").iterdir()
    run(tmp_path, "mask", "--held-out", "--eval-only", str(path))
    out, say = capsys.readouterr().out, "held-out training images"
    assert f"70 images to learn from, scored on 30 {say}" in out and f"last: on all {say}" in out
    assert out.endswith("top-1 {top1:.4f}, loss {loss:.4f} on 30 {}\n".format(say, **result["metrics"]))
    for flags, said in ((["--train-size", "71"], "to 70 images"), (["--dataset", "builtin-global"], "")):
        monkeypatch.setattr(train_vit, "HELD_OUT", 30 if said else 100)
        with pytest.raises(SystemExit) as stop:
            run(tmp_path / "new", "mask", "--held-out", *flags)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and (said or "--held-out: builtin-global: 100 training") in error


def test_the_table_says_what_best_is_and_when_the_paper_s_figures_stand_in_it(capsys):
    for flags, paper in ((["--bf16"], True), (["--dim", "96"], False), (["--preset", "small"], False)):
        args = train_vit.settings(["--preset", "paper", "--inits", "mask", "--dataset", "cifar10", *flags], "cifar10")
        train_vit.print_table(args, {"cifar10": args}, [])
        printed = capsys.readouterr().out
        assert ("paper: best" in printed) == printed.endswith("0.9566\n") == paper and "best: of the\npoints" in printed
        assert "last: on all test images" in printed and "each on 2,000 of them" in printed


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


def test_cifar_from_files_of_the_official_layout_and_from_its_address(tmp_path, monkeypatch, capsys):
    asked, about = [], images.CIFAR["cifar100"]
    monkeypatch.setattr(runs, "download", lambda *given: asked.append(given))
    where = ["--data-dir", str(tmp_path / "data")]
    for flags in ([], ["--download"]):
        with pytest.raises(SystemExit):
            run(tmp_path, "mask", *where, *flags, dataset="cifar100")
    assert asked == [(f"https://www.cs.toronto.edu/~kriz/{about['archive']}", tmp_path / "data" / about["archive"],
                      about["sha256"])] and "--dataset cifar100" in capsys.readouterr().err
    for classes, count in ((10, 24), (100, 12)):
        cifar(tmp_path / "data", classes)
        (result,) = run(tmp_path / str(classes), "mask", *where, "--download", dataset=f"cifar{classes}")
        assert result["metrics"]["images"] == count and len(asked) == 1
        assert checkpoint(tmp_path / str(classes))["model"]["head.weight"].shape == (classes, 24)
    (tmp_path / "data" / "cifar-10-batches-bin" / "data_batch_1.bin").unlink()  # --resume does not take others' results
    (result,) = run(tmp_path / "10", "mask", *where, "--resume", dataset="cifar10")
    assert result["metrics"]["images"] == 12


def test_imagenet_from_folders_and_a_run_that_goes_on(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    for part, number in itertools.product(("train", "val"), range(100)):
        folder = tmp_path / "imagenet100" / part / f"n{number:08}"
        folder.mkdir(parents=True)
        image.new("RGB", (20, 16), (2 * number, 0, 0)).save(folder / "a.JPEG")
    flags, sizes, get = ["--data-dir", str(tmp_path), "--steps", "2"], set(), images.ImageFolder.__getitem__
    monkeypatch.setattr(images.ImageFolder, "__getitem__", lambda self, i: (sizes.add(self.size), get(self, i))[1])
    (whole,) = run(tmp_path / "whole", "svd", *flags, dataset="imagenet100")
    assert whole["metrics"]["class_list"] == images.names_hash([f"n{number:08}" for number in range(100)])
    assert whole["metrics"]["images"] == 100 and sizes == {32}
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(runs, "stop_requested", lambda: 2)
        run(tmp_path / "parts", "svd", *flags, dataset="imagenet100")
    (parts,) = run(tmp_path / "parts", "svd", *flags, "--resume", dataset="imagenet100")
    assert parts["metrics"] == whole["metrics"] and parts["curve"] == whole["curve"]


def test_eval_only(tmp_path, capsys):
    for init in ("svd", "cnn", "gated", "mask"):
        (result,) = run(tmp_path / init, init, "--first-seed", "1")
        (path,) = (tmp_path / init / "checkpoints").iterdir()
        capsys.readouterr()
        assert run(tmp_path, init, "--eval-only", str(path)) == []
        wanted = "builtin {}: top-1 {top1:.4f}, loss {loss:.4f} on 70 test images\n".format(init, **result["metrics"])
        assert capsys.readouterr().out == wanted
    for init, flags, said in (("bias", [], "init is mask there, bias here"),
                              ("mask", ["--heads", "4"], "heads is 3 there, 4 here"),
                              ("mask", ["--positions", "sincos"], "positions is learned there"),
                              ("mask", ["--dataset", "builtin-global"], "task is builtin there"),
                              ("mask", ["--eval-only", "~/nosuch.pt"], f"{Path.home()}/nosuch.pt: no such file")):
        with pytest.raises(SystemExit) as stop:
            run(tmp_path, init, "--eval-only", str(path), *flags)
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_net_without_attention_goes_through_all_of_it(tmp_path, capsys):
    """Its result line has null where others have attention, and is taken up by --resume."""
    pytest.importorskip("matplotlib")
    (result,) = run(tmp_path, "cnn", "--plot")
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "results.jsonl", "checkpoints"}
    assert result["metrics"].items() >= {"support_mass_init": [None], "support_mass_final": [None],
                                         "attention_shift": None, "mask_drift": None}.items()
    results = run(tmp_path, "cnn", "--plot", "--resume", "--inits", "cnn", "default")
    assert results[0] == result and "attention-builtin.png" in {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()


def test_the_share_of_the_gap_that_an_arm_closes(capsys):
    """Means over seeds: default 0.5, cnn 0.75, mask 0.6."""
    args = train_vit.settings(["--inits", "default", "mask", "cnn", "--dataset", "builtin", "--seeds", "2"], "builtin")
    results = [{"task": "builtin", "init": init, "metrics": {"top1": top1, "top1_best": 0.9, "loss": 1.0,
                "support_mass_init": [None], "support_mass_final": [None]}}
               for init, pair in (("default", (0.4, 0.6)), ("mask", (0.5, 0.7)), ("cnn", (0.7, 0.8))) for top1 in pair]
    for shown, last in ((results, ["0.00", "0.40", "1.00"]), (results[:4], ["-"] * 3),
                        ([*results, results[0] | {"metrics": results[0]["metrics"] | {"top1": None}}], ["-"] * 3)):
        train_vit.print_table(args, {"builtin": args}, shown)
        printed = capsys.readouterr().out
        assert [line.split()[-1] for line in printed.splitlines()[-3:]] == last
        assert ("gap to cnn closed" in printed) == (last[0] == "0.00")


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(tmp_path, "mask", "--plot", "--pooling", "cls", "--patch", "16")
    assert {"curves.png", "attention-builtin.png", "masks-builtin.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "100 images to learn from, scored on 70 test images, 3 steps, 4 tokens an image" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="gloo under torchrun")
def test_two_processes_give_the_losses_of_one(tmp_path, one_and_two_processes):
    cifar(tmp_path / "data")
    flags = [str(ROOT / "train_vit.py"), *words(TINY), "--dataset", "cifar10", "--data-dir", str(tmp_path / "data"),
             "--inits", "mask", "gated", "cnn", "--augment", "full", "--device", "cpu"]
    for one, two in zip(*one_and_two_processes(flags), strict=True):
        for a, b in zip(one["curve"], two["curve"], strict=True):
            assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
