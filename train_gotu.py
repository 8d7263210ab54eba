"""Boolean extrapolation (GOTU; paper, section 5.1, Tables 1, 4 and 7): does a prior change what is learnt?

    python train_gotu.py                 # the table, one seed
    python train_gotu.py --seeds 10      # what the README shows, and two more inits there

Each task shows a part of the cube {-1, +1}^15 and asks for all of it. Expected: the plain transformer fits the
seen part and gets the unseen part wrong, much as the minimum-degree interpolator (MDI) does; svd and opt help
on 2Parity alone; with the same structure in the mask, the unseen part comes out right (ThreeSym: better, and
right with `mask-only`, the mask in place of position codes).
"""
import itertools
import math
import time

import torch
from tqdm import tqdm

from tinymask import boolean, mask_priors, pictures, qk_init, records, runs
from tinymask.persistence import attention_maps, measures, snapshot, support_mass
from tinymask.transformer import Encoder, init_weights, parameter_counts, parameter_groups

TASKS = list(mask_priors.BOOLEAN)
CONTROLS = ["mask-zero", "mask-frozen", "mask-hard", "mask-shuffled", "bias", "svd-frozen", "opt-frozen"]
INITS = ["default", "svd", "opt", "mask", "mask-only", "mask-literal", *CONTROLS]
PRESETS = {
    "small": dict(steps=800, batch_size=128, lr=1e-3, weight_decay=0.0, bits=15, dim=48, depth=2, heads=3,
                  head_dim=16, mlp_dim=192, pooling="mean", position_std=0.05, open=10.0, closed=-6.0),
    # Table 7 on the model of the GOTU code; 8,640 steps are 90 epochs of 2Parity's seen part
    "paper": dict(steps=8640, batch_size=256, lr=1e-3, weight_decay=1e-3, bits=15, dim=256, depth=4, heads=3,
                  head_dim=64, mlp_dim=256, pooling="cls", position_std=1.0, open=10.0, closed=-10.0),
}
OF_TASK = {  # small: at the others' setting the default does not fit Cyclic3 at all, masks fit ThreeSym more slowly
    "cyclic3": dict(steps=2400, lr=2e-3, position_std=1.0),
    "threesym": dict(lr=3e-3),
}
SMOKE = dict(steps=10, bits=9)
MEASURED = ["acc_all", "acc_unseen", "mse_all", "mse_unseen", "mse_seen"]  # the columns of the table
ALONE_CLOSED = -30.0  # --closed of mask-only: what leaks through a closed pair is a bit alone
EVALUATIONS, PROBE = 10, 2048  # points on a curve, at most; points of the cube that it is measured on
PAPER = {  # whole-cube accuracy and mean squared error: Table 1
    ("2parity", "default"): (0.75, 1.379), ("2parity", "svd"): (0.75, 1.737),
    ("2parity", "opt"): (0.75, 1.746), ("2parity", "mask"): (1.0, 0.0029),
    ("majority", "default"): (0.874, 0.509), ("majority", "svd"): (0.874, 0.516),
    ("majority", "opt"): (0.874, 0.495), ("majority", "mask"): (1.0, 0.0051),
    ("cyclic3", "default"): (0.8745, 5.648), ("cyclic3", "svd"): (0.8748, 3.257),
    ("cyclic3", "opt"): (0.8747, 3.230), ("cyclic3", "mask"): (0.9998, 0.0034),
    ("threesym", "default"): ("-", 7.621), ("threesym", "svd"): ("-", 7.616),
    ("threesym", "opt"): ("-", 7.635), ("threesym", "mask"): ("-", 2.9745),
    # and Table 4
    ("2parity", "mask-zero"): (0.75, 1.38), ("majority", "mask-zero"): (0.874, 0.50),
    ("cyclic3", "mask-zero"): (0.8746, 2.53), ("threesym", "mask-zero"): ("-", 7.62),
}


def parser():
    flags = runs.parser("train_gotu.py", __doc__, TASKS, INITS, PRESETS)
    flags.add_argument("--bits", type=runs.whole(4, 20), help="n, the length of the inputs")
    flags.add_argument("--head-dim", type=runs.whole(1, 2**16), help="width of a head")
    flags.add_argument("--mlp-dim", type=runs.whole(1, 2**16), help="width of the MLPs")
    flags.add_argument("--pooling", choices=["mean", "cls"], help="how the tokens become one output")
    flags.add_argument("--position-std", type=runs.real(low=0, high=1e6), help="scale of the initial position codes")
    flags.add_argument("--open", type=runs.real(), help="mask logit of an open pair")
    flags.add_argument("--closed", type=runs.real(), metavar="M",
                       help=f"mask logit of a closed pair, as --closed=-6 (mask-only: {ALONE_CLOSED:g}, always)")
    flags.add_argument("--missing-links", type=runs.whole(0), default=0, help="links left out of the prior")
    flags.add_argument("--wrong-links", type=runs.whole(0), default=0, help="links added to it that are wrong")
    flags.add_argument("--mask-weight-decay", type=runs.real(low=0), default=0.0, help="on the mask (default: 0)")
    flags.add_argument("--optimizer", choices=["adam", "sgd"], default="adam", help="sgd: no momentum (default: adam)")
    runs.describe_presets(flags, {f"small, {task}": own for task, own in OF_TASK.items()})
    return flags


def settings(argv, task):
    """The flags for one task: as given, else as its preset has them."""
    presets = PRESETS | {"small": PRESETS["small"] | OF_TASK.get(task, {})}
    return runs.parse(parser(), argv, presets, SMOKE)


@torch.no_grad()
def predict(model, ids):
    """(P, n) token ids -> (P,) on the CPU, in pieces."""
    model.eval()
    prediction = torch.cat([model(piece)[:, 0] for piece in ids.split(2048)]).cpu()
    model.train()
    return prediction


def squared_errors(prediction, target, seen):
    error = (prediction - target).square()
    parts = {"mse_all": error, "mse_seen": error[seen], "mse_unseen": error[~seen]}
    return {name: part.mean().item() for name, part in parts.items()}


def prior(args, task, init, seed):
    """The supports of one run, one for each layer: 0/1, where the prior lets a token look."""
    designs = {"mask-literal": mask_priors.BOOLEAN_LITERAL, "mask-only": mask_priors.BOOLEAN_ALONE}
    supports = designs.get(init, mask_priors.BOOLEAN)[task](args.bits, args.depth, args.heads)
    if args.missing_links or args.wrong_links:  # the same mistakes in every layer that has links
        layers = [layer for layer in range(args.depth) if (supports[layer] * (1 - torch.eye(args.bits))).any()]
        for layer in layers or [0]:
            supports[layer] = mask_priors.imperfect(supports[layer], args.missing_links, args.wrong_links,
                                                    runs.generator(seed, "mistakes"))
    if init == "mask-shuffled":
        order = runs.generator(seed, "shuffle")
        supports = [mask_priors.shuffled(support, order) for support in supports]
    return mask_priors.with_cls(supports) if args.pooling == "cls" else supports


def build(args, task, init, seed):
    """The model of one run with its prior in place, and the supports, one for each layer.

    Every init of a seed starts from the same weights, apart from what it sets.
    """
    model = Encoder(2, args.bits, 1, args.dim, args.depth, args.heads, args.head_dim, args.mlp_dim, args.pooling,
                    bias=args.preset != "paper")  # the GOTU code has no biases in its projections
    init_weights(model, runs.generator(seed, "weights"), position_std=args.position_std)
    if init == "mask-only":  # the mask is what tells the tokens apart
        torch.nn.init.zeros_(model.position).requires_grad_(False)
    supports = prior(args, task, init, seed)
    if init.startswith(("svd", "opt")):  # solved on seen points
        points, _, seen = boolean.load_task(task, args.bits)
        sample = seen.nonzero()[:, 0][torch.randperm(seen.sum(), generator=runs.generator(seed, "sample"))[:256]]
        # svd's gap of 10 is more than the 6 of the small preset's mask: no weak rival
        qk_init.apply_layerwise(getattr(qk_init, init[:3]), model, boolean.to_tokens(points[sample]), supports)
    closed = {"mask-hard": -math.inf, "mask-only": ALONE_CLOSED}.get(init, args.closed)
    for block, support in zip(model.transformer.blocks, supports):
        mask_priors.place(block.attention, init, mask_priors.to_mask(support, args.open, closed))
    return model, supports


def scores(task, model, ids, target, seen):
    """The figures of the table, on the whole cube."""
    prediction = predict(model, ids)
    metrics = squared_errors(prediction, target, seen)
    if not math.isfinite(metrics["mse_all"]):  # NaN has no sign, right or wrong
        return metrics | dict.fromkeys(("acc_all", "acc_seen", "acc_unseen"), math.nan)
    for part, where in (("all", slice(None)), ("seen", seen), ("unseen", ~seen)):
        metrics[f"acc_{part}"] = boolean.accuracy(task, prediction[where], target[where])
    return metrics


def print_table(args, results):
    """This run beside the paper's Table 1 and the exact MDI."""
    rows = []
    for task in args.tasks:
        _, target, seen = boolean.load_task(task, args.bits)
        mdi = boolean.minimum_degree_interpolator(target, seen)
        errors = squared_errors(mdi, target, seen)
        accuracies = [boolean.accuracy(task, mdi[part], target[part]) for part in (slice(None), ~seen)]
        rows.append([f"{task} MDI (exact)", *(runs.mean_std([value]) for value in accuracies),
                     *(f"{errors[name]:.4f}" for name in MEASURED[2:]), "", "", ""])
        for init in args.inits:
            these = [r["metrics"] for r in results if (r["task"], r["init"]) == (task, init)]
            paper = PAPER.get((task, init), ("-", "-")) if args.bits == 15 else ("-", "-")
            cells = [runs.mean_std([m[column] for m in these]) for column in MEASURED]
            rows.append([f"{task} {init}", *cells, runs.mass_cell(these), *paper])
    header = ["", "accuracy", "unseen acc", "mse", "unseen mse", "seen mse", "support mass", "paper: acc", "mse"]
    print(f"\n{args.seeds} seed(s), mean +- standard deviation; support mass: the least layer's, start -> end")
    print(runs.table(header, rows))


def plot(common, args_of, results, out, ids):
    """Figures: the curves; for each task the masks at the start, and attention before and after the first seed.

    args_of: the flags by task. ids: the points that attention is averaged over. The models at the end are
    those of the checkpoints.
    """
    pictures.curves(results, common.tasks, common.inits, out / "curves.png")
    for task, args in args_of.items():
        columns = [f"layer {layer + 1}, {when}" for layer in range(args.depth) for when in ("start", "end")]
        heads = [f"{task}, head {head + 1}" for head in range(args.heads)]
        attention, heads_open, rows = [], [], []
        for init in common.inits:
            model, _ = build(args, task, init, common.first_seed)
            path = out / "checkpoints" / f"{records.run_key(vars(args), task, init, common.first_seed)}.pt"
            (first, openness), (last, _) = records.start_and_end(path, model, ids)
            attention += [maps.mean(dim=(0, 1)) for pair in zip(first, last) for maps in pair]
            if init.startswith("mask"):
                rows += [f"{init}, layer {layer + 1}" for layer in range(args.depth)]
                heads_open += [head for layer in openness for head in layer.expand(args.heads, -1, -1)]
        pictures.grid(common.inits, columns, attention, out / f"attention-{task}.png")
        if rows:
            pictures.grid(rows, heads, heads_open, out / f"masks-{task}.png")


def main(argv=None):
    common = settings(argv, None)  # what no task has of its own
    args_of = {task: settings(argv, task) for task in common.tasks}
    if common.plot:
        pictures.pyplot()  # a missing matplotlib is said before the training, not after it
    for task, init in itertools.product(common.tasks, common.inits):
        try:
            prior(args_of[task], task, init, 0)
        except ValueError as error:
            runs.fail(f"--tasks {task} --inits {init}: {error}")
    device = runs.pick_device(common.device)
    out = runs.open_out(common.out)
    wanted = [*MEASURED, *records.MASSES], ["mse_unseen", "support_mass"]
    finished = records.read_results(out, *wanted) if common.resume else {}
    print(f"device {device}, {torch.get_num_threads()} threads, torch {torch.__version__}, results in {out}")
    probe = torch.randperm(2**common.bits, generator=runs.generator(0, "probe"))[:PROBE]
    few, results = probe[:256], []  # few: the inputs on which attention is looked at

    for task, init, seed in itertools.product(common.tasks, common.inits, runs.seeds(common)):
        args = args_of[task]
        key = records.run_key(vars(args), task, init, seed)
        if key in finished:
            results.append(finished[key])
            continue

        # data: the whole cube, of which training sees a part
        points, target, seen = boolean.load_task(task, args.bits)
        ids, seen_points, goal = boolean.to_tokens(points).to(device), seen.nonzero()[:, 0], target.to(device)
        name = f"{task} {init} seed {seed}"
        print(f"{name}: n = {args.bits}, {len(seen_points)} points seen, {len(points) - len(seen_points)} unseen, "
              f"{args.steps} steps at {args.lr:g}")

        # model and prior
        model, supports = build(args, task, init, seed)
        model.to(device)
        before = snapshot(model, ids[few])

        # optimiser: the mask is a group of its own, without weight decay unless asked for
        method = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[args.optimizer]
        groups = parameter_groups(model, args.lr, args.mask_lr, args.weight_decay, args.mask_weight_decay)
        optimizer = method(groups)
        batches = runs.generator(seed, "batches")
        checkpoint = out / "checkpoints" / f"{key}.pt"
        step, curve, seconds = records.resume(checkpoint, model, optimizer, batches) if args.resume else (0, [], 0.0)

        # loop
        bar = tqdm(total=args.steps, initial=step, desc=name, disable=None, leave=False)
        start, diverged = time.perf_counter() - seconds, False
        while step < args.steps and not diverged:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * runs.cosine(step, args.steps)
            batch = seen_points[torch.randint(len(seen_points), (args.batch_size,), generator=batches)]
            loss = (model(ids[batch])[:, 0] - goal[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            bar.update()
            diverged = not math.isfinite(loss.item())
            if step * EVALUATIONS // args.steps > (step - 1) * EVALUATIONS // args.steps:
                errors = squared_errors(predict(model, ids[probe]), target[probe], seen[probe])
                masses = support_mass(attention_maps(model, ids[few]), supports)
                curve.append({"step": step, **errors, "support_mass": masses})
                diverged = diverged or not math.isfinite(errors["mse_all"])
                line = "step {step}: mse seen {mse_seen:.4f}, unseen {mse_unseen:.4f}".format(**curve[-1])
                runs.report(bar, name, line)
            if not diverged and (runs.interrupted() or step % 500 == 0):  # long runs can be taken up again
                seconds = time.perf_counter() - start
                records.checkpoint(checkpoint, model, optimizer, batches, step, curve, seconds)
        bar.close()
        seconds = time.perf_counter() - start

        # evaluation: the whole cube
        metrics = scores(task, model, ids, target, seen) | measures(before, snapshot(model, ids[few]), supports)
        records.save(checkpoint, {"model": model.state_dict(), "step": step})
        results.append(records.record(out, args, "gotu", task, init, seed, metrics=metrics, curve=curve,
                                   steps=step, seconds=seconds, params=parameter_counts(model), device=device,
                                   diverged=diverged))
        if diverged:
            print(f"{name}: diverged at step {step}")

    print_table(common, results)
    if common.plot:
        plot(common, args_of, results, out, boolean.to_tokens(boolean.cube(common.bits)[few]))
    return results


if __name__ == "__main__":
    runs.command(main)
