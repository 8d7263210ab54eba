"""train_gotu.py against a loop of a few lines, written from the paper; its figures against answers made by hand."""
import functools
import importlib.util
import itertools
import math

import pytest
import torch
from reference import SHARED_FLAGS, assert_moved, assert_same, checkpoint, set_masks, train, words

import train_gotu
from tinymask import Encoder, boolean, init_weights, mask_priors, qk_init, runs
from tinymask.inits import imperfect, shuffled

pytestmark = pytest.mark.gotu
TINY = dict(bits=5, steps=3, dim=12, depth=2, heads=3, head_dim=4, mlp_dim=10, batch_size=8)
SMALL = TINY | dict(lr=1e-3, weight_decay=0.0, pooling="mean", position_std=0.05, open=10.0, closed=-6.0,
                    mask_weight_decay=0.0, missing_links=0, wrong_links=0, optimizer="adam", bias=True, ridge=0.0,
                    prior_layers=None, gap=10.0)
OWN = {"cyclic3": dict(lr=2e-3, position_std=1.0), "threesym": dict(lr=3e-3)}
PAPER = SMALL | dict(weight_decay=1e-3, pooling="cls", position_std=1.0, closed=-10.0, bias=False)  # Table 7


def run(out, task, init, *flags, tiny=TINY):
    return train_gotu.main([*words(tiny), "--tasks", task, "--inits", init, "--out", str(out), *flags])


def reference(task, init, seed, f):
    """Section 5.1: squared error on the seen part. f: the flags. Gives the weights."""
    x, target, seen = boolean.load_task(task, f["bits"])
    ids, shown = boolean.to_tokens(x), seen.nonzero()[:, 0]
    model = Encoder(vocabulary=2, tokens=f["bits"], outputs=1, **{name: f[name] for name in (
        "dim", "depth", "heads", "head_dim", "mlp_dim", "pooling", "bias")})
    init_weights(model, runs.generator(seed, "weights"), position_std=f["position_std"])
    design = {"mask-literal": "literal", "mask-only": "alone"}.get(init, "ours")
    supports = mask_priors.BOOLEAN[design][task](f["bits"], f["depth"], f["heads"])
    if f["missing_links"] or f["wrong_links"]:
        supports = [imperfect(s, f["missing_links"], f["wrong_links"], runs.generator(seed, "mistakes"))
                    for s in supports]
    if init == "mask-shuffled":
        draws = runs.generator(seed, "shuffle")
        supports = [shuffled(s, draws) for s in supports]
    if f["pooling"] == "cls":
        supports = mask_priors.with_cls(supports)
    chosen = [f["prior_layers"] - 1] if f["prior_layers"] else range(f["depth"])
    if init == "svd-published":
        for layer in chosen:
            qk_init.impulse(model.transformer.blocks[layer].attention, model.position, supports[layer])
    elif init.startswith(("svd", "opt")):
        some = shown[torch.randperm(len(shown), generator=runs.generator(seed, "sample"))[:256]]
        method = {"s": functools.partial(qk_init.svd, gap=f["gap"]), "o": qk_init.opt}[init[0]]
        qk_init.apply_layerwise(functools.partial(method, ridge=f["ridge"]), model, ids[some], supports, chosen)
    closed = {"mask-hard": -math.inf, "mask-only": -30.0}.get(init, f["closed"])
    set_masks(model, init, [mask_priors.to_mask(support, f["open"], closed) if layer in chosen else None
                            for layer, support in enumerate(supports)])
    if init == "mask-only":
        model.position.data.zero_()

    def loss(draws):
        batch = shown[torch.randint(len(shown), (f["batch_size"],), generator=draws)]
        return torch.nn.functional.mse_loss(model(ids[batch])[:, 0], target[batch])

    return train(model, loss, f, seed, init, {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[f["optimizer"]])[0]


@pytest.mark.parametrize("task, init, seed", [
    *itertools.product(["2parity"], train_gotu.INITS, [0, 1]),
    *itertools.product(["majority", "cyclic3"], ["svd", "mask"], [0]), ("threesym", "mask-only", 0)])
def test_three_steps_are_those_of_the_paper(task, init, seed, tmp_path):
    tiny = TINY | {"bits": 9} if init == "mask-only" or (init, seed) == ("svd", 1) else TINY  # more than svd's sample
    run(tmp_path, task, init, "--first-seed", str(seed), tiny=tiny)
    assert_same(checkpoint(tmp_path)["model"], reference(task, init, seed, SMALL | tiny | OWN.get(task, {})))


# one other value for each flag that training depends on; the rest are tests/test_scripts.py's
MOVED = dict(bits=6, steps=2, dim=15, depth=3, heads=4, head_dim=5, mlp_dim=7, batch_size=4, lr=0.01, mask_lr=0.5,
             weight_decay=0.3, mask_weight_decay=0.2, pooling="cls", position_std=0.7, open=2.0, closed=-3.0,
             missing_links=1, wrong_links=2, optimizer="sgd", ridge=0.1, prior_layers=2, gap=4.0)


@pytest.mark.parametrize("name", MOVED)
def test_each_flag_changes_what_it_says(name, tmp_path):
    init, moved = "svd" if name in ("ridge", "gap") else "mask", {name: MOVED[name]}
    (result,) = run(tmp_path, "2parity", init, *words(moved))
    found = checkpoint(tmp_path)["model"]
    assert_same(found, reference("2parity", init, 0, SMALL | moved))
    assert_moved(found, reference("2parity", init, 0, SMALL), result, vars(train_gotu.settings([], "2parity")) | TINY,
                 {name} | ({"mask_lr"} if name == "lr" else set()))


def test_no_flag_is_left_out():
    assert {action.dest for action in train_gotu.parser()._actions} == MOVED.keys() | SHARED_FLAGS | {"tasks"}


def test_the_paper_s_preset(tmp_path):
    run(tmp_path, "2parity", "mask", "--preset", "paper")
    assert_same(checkpoint(tmp_path)["model"], reference("2parity", "mask", 0, PAPER))
    args = train_gotu.settings(["--preset", "paper"], "2parity")
    assert (args.bits, args.depth, args.heads, args.lr, args.batch_size) == (15, 4, 3, 1e-3, 256)
    assert args.steps == 90 * 2**13 * 3 // 256 and args.dim == 256  # 90 epochs of three quarters of the cube


def oracle(monkeypatch, wrong):
    """Every prediction of the script is the target, off by 2 where `wrong` says, for any points it asks about."""
    def predict(model, ids):
        x = 1.0 - 2.0 * ids.float()
        return boolean.majority3(x) + 2 * wrong(x)

    monkeypatch.setattr(train_gotu, "predict", predict)


@pytest.mark.parametrize("part", ["seen", "unseen"])
def test_figures_of_answers_that_are_wrong_on_one_part(part, monkeypatch, tmp_path):
    """Majority, unseen where x0 = x1 = -1, a quarter; off by +2: -1 becomes a wrong sign, 1 a right one.

    Seen: half of the seen points are -1 only where x2 = -1 and one of x0, x1: two of six corners. Unseen: three
    bits (-1, -1, +-1) both have the target -1.
    """
    oracle(monkeypatch, lambda x: (x[:, :2].amax(dim=1) == (1 if part == "seen" else -1)).float())
    (result,) = run(tmp_path, "majority", "default")
    found = {name: result["metrics"][name] for name in train_gotu.MEASURED + ["acc_seen"]}
    assert found == pytest.approx({"mse_all": 3, "mse_seen": 4, "mse_unseen": 0, "acc_all": 0.75, "acc_seen": 1 - 2 / 6,
                      "acc_unseen": 1} if part == "seen" else
                     {"mse_all": 1, "mse_seen": 0, "mse_unseen": 4, "acc_all": 0.75, "acc_seen": 1, "acc_unseen": 0})
    # there the MDI is 2 x2 - 1, that is 1 or -3; answered is -1 (right) or 1
    assert result["metrics"]["mse_to_mdi"] == pytest.approx(4 if part == "seen" else 8, abs=1e-5)
    for point in result["curve"]:
        assert (point["mse_seen"], point["mse_unseen"]) == ((4, 0) if part == "seen" else (0, 4))


def test_predictions_are_those_of_the_model_in_evaluation():
    model = init_weights(Encoder(vocabulary=2, tokens=12, outputs=1, dim=8, depth=1, heads=2),
                         torch.Generator().manual_seed(0))
    modes, ids = [], boolean.to_tokens(boolean.cube(12))
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    predicted = train_gotu.predict(model, ids)  # 4,096 points, in two pieces
    torch.testing.assert_close(predicted, model(ids)[:, 0].detach(), atol=1e-6, rtol=1e-5)
    assert modes == [False, False, True] and model.training


@pytest.mark.parametrize("init", ["svd", "opt", "mask"])
def test_what_is_hidden_stays_hidden(init, monkeypatch, tmp_path):
    """Neither a training batch nor what svd and opt are solved on holds an unseen point."""
    read, forward, solve = [], Encoder.forward, qk_init.apply_layerwise
    monkeypatch.setattr(Encoder, "forward", lambda self, x: (self.training and read.append(x), forward(self, x))[1])
    monkeypatch.setattr(qk_init, "apply_layerwise", lambda *given: (read.append(given[2]), solve(*given)))
    for task, bits in (("2parity", 2), ("cyclic3", 3)):
        run(tmp_path / task, task, init)
        assert len(read) == 3 + (init != "mask") and all((ids[:, :bits] == 0).any(dim=1).all() for ids in read)
        read.clear()


def test_measures_of_persistence_are_taken_at_both_ends(tmp_path):
    (result,) = run(tmp_path, "2parity", "mask", "--steps", "30", "--lr", "0.3", "--open", "3")
    metrics, last = result["metrics"], result["curve"][-1]
    assert min(metrics["support_mass_init"]) > 0.95 and metrics["support_mass_final"] == last["support_mass"]
    assert min(metrics["support_mass_final"]) < 0.95 < 1 + metrics["attention_shift"] and metrics["mask_drift"] > 0.5
    assert len(result["curve"]) == 10 and [point["step"] for point in result["curve"]] == list(range(3, 31, 3))


def test_mask_only_cannot_tell_single_bits_apart():
    """Without position codes a prior of this kind cannot tell the three bits of ThreeSym apart one by one."""
    model, _ = train_gotu.build(train_gotu.settings(["--dim", "12"], "threesym"), "threesym", "mask-only", 0)
    with torch.no_grad():
        output = model.double()(boolean.to_tokens(boolean.cube(15))[:4096])[:, 0]  # bits 12, 13, 14 stay +1
    coefficients = boolean.fourier_coefficients(output)
    assert coefficients[[1, 2, 4]].std() < 1e-6 and coefficients[[3, 5, 6]].std() > 1e-5
    assert coefficients[7].abs() < 1e-6  # no row sees all three


def test_the_table_and_when_the_paper_s_figures_stand_in_it(tmp_path, capsys):
    run(tmp_path, "2parity", "mask", "--seeds", "2")
    printed = capsys.readouterr().out
    assert "2parity mask seed 1: n = 5, 24 points seen, 8 unseen, 3 steps at 0.001\n" in printed
    lines = printed.splitlines()
    assert lines[-2].split()[:7] == ["2parity", "MDI", "(exact)", "0.7500", "0.0000", "4.0000", "16.0000"]
    for flags, paper in (([], True), (["--dim", "128"], False), (["--smoke"], False), (["--preset", "small"], False)):
        args = train_gotu.settings(["--preset", "paper", "--tasks", "2parity", "--inits", "mask", *flags], "2parity")
        train_gotu.print_table(args, {"2parity": args}, [])
        printed = capsys.readouterr().out
        assert ("paper" in printed) == (printed.split()[-2:] == ["1.0", "0.0029"]) == paper


def test_a_mask_that_runs_off_to_minus_infinity_is_divergence(tmp_path):
    (result,) = run(tmp_path, "2parity", "mask", "--steps", "60", "--optimizer", "sgd", "--mask-weight-decay", "10",
                    "--mask-lr", "1e4", "--pooling", "cls")
    assert result["diverged"] and result["metrics"]["acc_all"] is None


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    run(tmp_path, "threesym", "mask", "--plot", "--seeds", "2", "--pooling", "cls")
    names = {"curves.png", "masks-threesym.png", "attention-threesym.png"}
    assert names <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_the_claim_on_2parity(tmp_path):
    """The default recipe extrapolates with the mask and not without."""
    plain, masked = train_gotu.main(["--tasks", "2parity", "--inits", "default", "mask", "--out", str(tmp_path)])
    assert plain["metrics"]["acc_unseen"] < 0.1 and masked["metrics"]["acc_unseen"] > 0.99


def test_a_fork_adds_a_row(tmp_path, monkeypatch):
    """An init of one's own: on the command line, in the model, in the table and, with a colour, in the figures."""
    monkeypatch.setitem(train_gotu.INITS, "mine", train_gotu.INITS["mask"]._replace(closed=-1.0))
    flags = ["--plot"] if importlib.util.find_spec("matplotlib") else []
    (result,) = run(tmp_path, "2parity", "mine", *flags)
    assert_same(checkpoint(tmp_path)["model"], reference("2parity", "mask", 0, SMALL | {"closed": -1.0}))
    assert result["init"] == "mine" and (tmp_path / "curves.png").exists() == bool(flags)
