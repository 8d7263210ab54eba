"""Vision (paper, section 5.3, Tables 3, 5 and 9 to 11): does a prior of locality help a vision transformer?

    python train_vit.py                  # the built-in sets, one seed
    python train_vit.py --dataset cifar10 --preset cifar-fast --data-dir data --download
    torchrun --nproc-per-node 4 train_vit.py --dataset cifar10 --preset paper --bf16

All arms see the same images, batches and augmentation. Expected: where the class is decided by neighbouring
patches, a mask that opens one neighbour a head learns faster than the same pattern in the query and key
projections (svd), and that faster than the default; where the halves of an image decide, it is in the way.
"""
import argparse
import functools
import itertools
import math
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinymask import images, inits, mask_priors, parallel, pictures, qk_init, records, rivals, runs
from tinymask.persistence import measures, snapshot
from tinymask.runs import Args
from tinymask.transformer import ViT, init_weights, parameter_counts, parameter_groups

DATASETS = ["builtin", "builtin-global", "cifar10", "cifar100", "imagenet100"]
CLASSES = {"builtin": 10, "builtin-global": 10, "cifar10": 10, "cifar100": 100, "imagenet100": 100}
RIVALS = ["relative", "gated", "cnn"]
CONTROLS = ["mask-zero", "mask-shuffled", "bias", "svd-frozen"]
INITS = inits.rows(["default", "mimetic", "impulse", "svd", "mask", "mask-frozen", *RIVALS, *CONTROLS])
PRESETS = {
    "small": dict(steps=600, batch_size=64, lr=2e-3, weight_decay=0.05, warmup=30, side=32, patch=4, dim=48, depth=2,
                  heads=3, pooling="mean", positions="learned", drop_path=0.0, augment="none", open=10.0, closed=-10.0),
    # two cores: one head for each offset of the 3 x 3 window; 50,000 images take about half an hour, for 2,000 give
    # --steps 600, a few minutes
    "cifar-small": dict(steps=6_000, batch_size=64, lr=1e-3, weight_decay=0.05, warmup=100, side=32, patch=4, dim=72,
                        depth=4, heads=9, pooling="mean", positions="learned", drop_path=0.0, augment="basic",
                        open=10.0, closed=-10.0),
    "cifar-fast": dict(steps=10_000, batch_size=128, lr=1e-3, weight_decay=0.05, warmup=500, side=32, patch=4, dim=192,
                       depth=12, heads=3, pooling="mean", positions="learned", drop_path=0.1, augment="full",
                       open=10.0, closed=-10.0),
    # Tables 9 and 10; 39,100 steps are 400 epochs of CIFAR's 50,000 images, warm-up for 50 of them
    "paper": dict(steps=39_100, batch_size=512, lr=2e-3, weight_decay=0.05, warmup=4_900, side=224, patch=16, dim=192,
                  depth=12, heads=3, pooling="cls", positions="learned", drop_path=0.1, augment="full",
                  open=10.0, closed=-10.0),
}
OF_DATASET = {"imagenet100": dict(steps=74_400, lr=1e-3, warmup=1_240, pooling="mean")}  # Table 11: 300 epochs
SMOKE = dict(steps=3, batch_size=16, dim=36, depth=2)
MEASURED = ["top1", "top1_best", "loss"]  # the columns of the table
EVALUATIONS, PROBE = 20, 64  # points on a curve, at most; images on which attention is looked at, and svd is solved
NO_ATTENTION = {"support_mass_init": [None], "support_mass_final": [None], "attention_shift": None, "mask_drift": None}
HELD_OUT, POINTS = 5000, 2000  # training images; images that a point of the curve is measured on, at most
GAP = 50.0  # svd: difference in logits; at the mask's 10 the pattern would be lost in what else the layers read
PAPER = {  # best top-1 over epochs: Tables 3 and 5
    ("cifar10", "default"): 0.9420, ("cifar10", "mimetic"): 0.9480, ("cifar10", "impulse"): 0.9512,
    ("cifar10", "mask"): 0.9566, ("cifar10", "mask-frozen"): 0.9416,
    ("cifar100", "default"): 0.7400, ("cifar100", "mimetic"): 0.7680, ("cifar100", "impulse"): 0.7647,
    ("cifar100", "mask"): 0.7795, ("cifar100", "mask-frozen"): 0.7877,
    ("imagenet100", "default"): 0.8338, ("imagenet100", "mimetic"): 0.8438, ("imagenet100", "impulse"): 0.8316,
    ("imagenet100", "mask"): 0.8592, ("imagenet100", "mask-frozen"): 0.8178,
}


def parser() -> argparse.ArgumentParser:
    flags = runs.parser("train_vit.py", __doc__, DATASETS, INITS, PRESETS, flag="dataset", rows=6)
    flags.set_defaults(dataset=DATASETS[:2])
    add = flags.add_argument
    add("--warmup", type=runs.number(int, 0), help="steps of linear warm-up")
    add("--side", type=runs.number(int, 1, 4096), help="pixels of an image's side; smaller images are scaled up")
    add("--patch", type=runs.number(int, 1, 4096), help="pixels of a patch's side")
    add("--pooling", choices=["mean", "cls"], help="how the tokens become one output")
    add("--positions", choices=["learned", "sincos"], help="position codes")
    add("--drop-path", type=runs.number(float, 0, 0.9), help="of the last block")
    add("--augment", choices=["none", "basic", "full"],
        help="basic: flip, crop; full: also mixup 0.8, cutmix 1.0, random erasing, label smoothing 0.1")
    add("--vary-offsets", action="store_true", help="let the layers go on through the 3 x 3 window")
    add("--open", type=runs.LOGIT, help="mask logit of an open pair")
    add("--closed", type=runs.LOGIT, metavar="M", help="mask logit of a closed pair, as --closed=-10")
    add("--ridge", type=runs.number(float, 0, 1e6), default=0.0, help="svd: of its solve (0: a pseudo-inverse)")
    add("--train-size", type=runs.number(int, 1), metavar="N",
        help="train on N images, as many of each class; smaller parts lie inside larger ones (default: all)")
    add("--held-out", action="store_true",
        help=f"score on the last {HELD_OUT:,} training images, which are not trained on, in place of the test images")
    add("--data-dir", default="data", metavar="DIR", type=os.path.expanduser,
        help="where official files and folders lie (default: data)")
    add("--download", action="store_true", help="fetch CIFAR if it is not there")
    add("--bf16", action="store_true", help="train in bfloat16 autocast: faster where the processor has it")
    add("--eval-only", metavar="CKPT", type=os.path.expanduser,
        help="evaluate a checkpoint of the first data set and init, train nothing")
    runs.describe_presets(flags, {f"paper, {name}": own for name, own in OF_DATASET.items()})
    return flags


def settings(argv: list[str] | None, dataset: str | None) -> Args:
    """The flags for one data set (None: what none has of its own): as given, else as its preset has them."""
    presets = PRESETS | {"paper": PRESETS["paper"] | OF_DATASET.get(dataset or "", {})}
    args = runs.parse(parser(), argv, presets, SMOKE)
    if args.side % args.patch:
        runs.fail(f"--side {args.side} is not a multiple of --patch {args.patch}")
    if (tokens := (args.side // args.patch) ** 2) > 2**14:
        runs.fail(f"--side {args.side} --patch {args.patch}: {tokens:,} tokens an image, at most {2**14:,}")
    if args.dim % args.heads:
        runs.fail(f"--dim {args.dim} is not a multiple of --heads {args.heads}")
    if args.positions == "sincos" and args.dim % 4:
        runs.fail(f"--dim {args.dim}: --positions sincos needs one that 4 divides")
    for init in args.inits:
        if (INITS[init].relative or INITS[init].gated) and args.pooling == "cls":
            runs.fail(f"--inits {init}: only with --pooling mean; a class token has no place among the patches")
    if args.eval_only is not None and not Path(args.eval_only).is_file():
        runs.fail(f"--eval-only {args.eval_only}: no such file")
    return args


def load(args: Args, dataset: str) -> tuple:
    """Training images (P, 3, S, S) uint8 and labels (P,), and the same to score on, of the test set or held out.

    Notes in args which images there were.
    """
    with runs.refused(f"--dataset {dataset}"):
        folder = Path(args.data_dir)
        if dataset.startswith("builtin"):
            data: tuple = images.builtin("global" if dataset == "builtin-global" else "local")
        elif dataset == "imagenet100":
            data = images.load_folder(folder / "imagenet100", args.side)
        else:
            about = images.CIFAR[dataset]
            if args.download and not (folder / about["folder"]).is_dir():
                runs.download(images.BASE + about["archive"], folder / about["archive"], about["sha256"])
            data = images.load_cifar(dataset, folder)
        args.data_hash = images.fingerprint(data)  # a run on other images is another run
    with runs.refused(f"--held-out: {dataset}"):
        if args.held_out:
            data = images.hold_out(data[0], data[1], HELD_OUT, runs.generator(0, "held-out"))
    with runs.refused(f"--train-size {args.train_size}: {dataset}"):
        if args.train_size is not None:
            chosen = images.balanced(data[1], args.train_size, runs.generator(0, "train-size"))
            data = (images.part(data[0], chosen), data[1][chosen], *data[2:])
    return data


def scored(args: Args) -> str:
    """What the images are called that a run is scored on."""
    return "held-out training images" if args.held_out else "test images"


def to_input(args: Args, batch: Tensor) -> Tensor:
    """uint8 (B, 3, s, s) -> float (B, 3, S, S), scaled up if S is larger."""
    batch = images.to_float(batch)
    if batch.shape[-1] != args.side:
        batch = F.interpolate(batch, size=(args.side, args.side), mode="bicubic", align_corners=False)
    return batch


def augmented(args: Args, batch: Tensor, labels: Tensor, classes: int,
              generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A training batch: input (B, 3, S, S) and soft labels (B, C)."""
    if args.augment == "none":
        return to_input(args, batch), images.soft_labels(labels, classes)
    x = to_input(args, images.flip_and_crop(batch, generator, pad=batch.shape[-1] // 8))
    if args.augment == "basic":
        return x, images.soft_labels(labels, classes)
    x, targets = images.mixup_or_cutmix(x, images.soft_labels(labels, classes, 0.1), generator)
    return images.random_erasing(x, generator), targets


@torch.no_grad()
def scores(args: Args, model: torch.nn.Module, x: images.Images, labels: Tensor,
           device: torch.device) -> dict[str, float]:
    """Top-1 accuracy, a fraction, and mean loss on all of x; counts on the CPU."""
    model.eval()
    right, loss = 0, 0.0
    for batch, label in images.in_order(x, labels, 256):
        logits = model(to_input(args, batch.to(device))).float().cpu()
        right += int((logits.argmax(-1) == label).sum())
        loss += F.cross_entropy(logits, label, reduction="sum").item()
    model.train()
    loss /= len(labels)
    return {"top1": right / len(labels) if math.isfinite(loss) else math.nan, "loss": loss}


def build(args: Args, dataset: str, init: str, seed: int, train_images: images.Images) -> tuple[Any, list[Tensor]]:
    """The model of one run with its prior in place, and the supports, one for each layer of attention: a ViT, or for
    `cnn` a ConvNet with about as many parameters, and none.

    train_images: of them a random sample is what svd is solved on.
    """
    row, draws = INITS[init], runs.generator(seed, init)
    model: Any = ViT(side=args.side, patch=args.patch, classes=CLASSES[dataset], dim=args.dim, depth=args.depth,
                     heads=args.heads, pooling=args.pooling, positions=args.positions, drop_path=args.drop_path)
    if row.cnn:
        width = rivals.convnet_width(parameter_counts(model)["total"])
        return init_weights(rivals.ConvNet(classes=CLASSES[dataset], width=width), runs.generator(seed, "weights")), []
    for layer, block in enumerate(model.transformer.blocks if row.gated else ()):
        offsets = mask_priors.impulse_offsets(layer, args.heads, args.vary_offsets)
        block.attention = rivals.GatedAttention(args.dim, args.side // args.patch, offsets)
    init_weights(model, runs.generator(seed, "weights"))
    supports = mask_priors.impulse_support(args.side // args.patch, args.depth, args.heads, args.vary_offsets)
    for block, support in zip(model.transformer.blocks, supports):
        if row.query_key == "mimetic":
            qk_init.mimetic(block.attention, draws)
        elif row.query_key == "impulse":
            qk_init.impulse(block.attention, model.position[int(args.pooling == "cls"):], support)
    if row.shuffled:
        supports = [inits.shuffled(support, draws) for support in supports]
    if args.pooling == "cls":
        supports = mask_priors.with_cls(supports)
    if row.query_key == "svd":
        sample = to_input(args, images.sample(train_images, PROBE, runs.generator(seed, "sample")))
        qk_init.apply_layerwise(functools.partial(qk_init.svd, gap=GAP, ridge=args.ridge), model, sample, supports)
    index = rivals.offset_index(args.side // args.patch) if row.relative else None
    for block, support in zip(model.transformer.blocks, supports):
        inits.set_prior(block.attention, row, mask_priors.to_mask(support, args.open, args.closed), index)
    return model, supports


def for_points(data: tuple) -> tuple[images.Images, Tensor]:
    """Images and labels that points of a curve are measured on: POINTS of those to score on, the same in every run."""
    chosen = torch.randperm(len(data[3]), generator=runs.generator(0, "points"))[:POINTS].sort().values
    return images.part(data[2], chosen), data[3][chosen]


def metrics(args: Args, model: torch.nn.Module, data: tuple, curve: list[dict], device: torch.device) -> dict:
    """The figures of the table, and of which images they are: top1 and loss of the last step on all images to score
    on, top1_best of the best point of the curve, on those `for_points`."""
    found: dict = scores(args, model, data[2], data[3], device)
    found |= {"top1_best": max((point["top1"] for point in curve), default=math.nan), "images": len(data[0])}
    if isinstance(data[0], images.ImageFolder):  # there are several sets of this name
        found["class_list"] = images.names_hash(data[0].names)
    return found


def evaluate_only(args: Args, data: tuple, device: torch.device) -> list[dict]:
    """Print the scores of the checkpoint --eval-only, which is of the first data set and init. No result lines."""
    dataset, init = args.dataset[0], args.inits[0]
    model, _ = build(args, dataset, init, args.first_seed, data[0])
    shape = ("side", "patch", "dim", "depth", "heads", "pooling", "positions")
    wanted = {"script": "vit", "task": dataset, "init": init} | {name: vars(args)[name] for name in shape}
    records.restore(Path(args.eval_only), model, wanted, "--eval-only")
    found = scores(args, model.to(device), data[2], data[3], device)
    print(f"{dataset} {init}: top-1 {found['top1']:.4f}, loss {found['loss']:.4f} on {len(data[3])} {scored(args)}")
    return []


def gap_closed(results: list[dict], dataset: str, init: str) -> str:
    """How far top-1 has come from `default` to `cnn`, a share, of means over seeds; '-' where one is not there."""
    means = {}
    for name in ("default", "cnn", init):
        found = [r["metrics"]["top1"] for r in results if (r["task"], r["init"]) == (dataset, name)]
        if not found or None in found:
            return "-"
        means[name] = statistics.fmean(found)
    gap = means["cnn"] - means["default"]
    return f"{(means[init] - means['default']) / gap:.2f}" if gap > 0 else "-"


def print_table(common: Args, args_of: dict[str, Args], results: list[dict]) -> None:
    """This run and, at the paper's settings, its Tables 3 and 5."""
    rows: list[list] = []
    for dataset, init in itertools.product(args_of, common.inits):
        these = [r["metrics"] for r in results if (r["task"], r["init"]) == (dataset, init)]
        cells = [runs.mean_std([m[name] for m in these]) for name in MEASURED]
        at_paper = records.same_settings(args_of[dataset], settings(["--preset", "paper"], dataset))
        paper = PAPER.get((dataset, init), "-") if at_paper else "-"
        rows.append([f"{dataset} {init}", *cells, runs.mass_cell(these), gap_closed(results, dataset, init), paper])
    header = ["", "top-1, last", "top-1, best", "loss", "support mass", "gap to cnn closed", "paper: best"]
    if all(row[-2] == "-" for row in rows):
        header, rows = header[:-2] + header[-1:], [row[:-2] + row[-1:] for row in rows]
    print(f"\n{common.seeds} seed(s), mean +- standard deviation; from scratch, at {common.side} pixels; last: on all "
          f"{scored(common)}; best: of the\npoints of the curve, each on {POINTS:,} of them (or all, if fewer), "
          "chosen on these themselves, so too good by some")
    print(runs.table(header, rows, optional=1))


def plot(common: Args, wanted: list[records.Run], results: list[dict], data: dict[str, tuple]) -> None:
    """Figures: the curves; for each data set attention, on test images, and masks before and after the first seed."""
    out = wanted[0].out
    panels: list[dict] = [{"title": dataset, "ylabel": "top-1 accuracy",
                           "lines": pictures.series(results, "top1", task=dataset)} for dataset in data]
    pictures.curves(panels, common.inits, out / "curves.png", columns=len(data))
    for dataset, (x, *_) in data.items():
        ends = {run.init: records.start_and_end(run, build(run.args, dataset, run.init, run.seed, x)[0],
                                                probe_of(run.args, data[dataset]))
                for run in wanted if (run.task, run.seed) == (dataset, common.first_seed) and not INITS[run.init].cnn}
        if ends:
            pictures.before_and_after(ends, out, dataset)


def probe_of(args: Args, data: tuple) -> Tensor:
    """The test images on which attention is looked at, a random choice that is the same in every run."""
    return to_input(args, images.sample(data[2], PROBE, runs.generator(0, "probe")))


@runs.script
def main(argv: list[str] | None = None) -> list[dict]:
    common = settings(argv, None)
    args_of = {dataset: settings(argv, dataset) for dataset in common.dataset}
    if common.plot:
        with runs.refused("--plot"):
            pictures.require()
    rank, world, device = parallel.start(common.device, common.batch_size)
    data = parallel.first_alone(lambda: {dataset: load(args, dataset) for dataset, args in args_of.items()})
    if common.eval_only is not None:
        return evaluate_only(args_of[common.dataset[0]], data[common.dataset[0]], device)
    wanted = records.wanted("vit", args_of.items(), runs.open_out(common.out), device, rank)
    results: list[dict] = []

    for run in records.runs_left(wanted, results, [*MEASURED, *records.MASSES], ["top1"]):
        # data
        args, (x, labels, test_x, _) = run.args, data[run.task]
        few = for_points(data[run.task])
        probe = probe_of(args, data[run.task]).to(device)
        if rank == 0:
            print(f"{run.name}: {len(x):,} images to learn from, scored on {len(test_x):,} {scored(args)}, "
                  f"{args.steps} steps, {(args.side // args.patch) ** 2:,} tokens an image")

        # model and prior
        model, supports = build(args, run.task, run.init, run.seed, x)
        model.to(device)
        before = snapshot(model, probe)
        shared = model if world == 1 else torch.nn.parallel.DistributedDataParallel(model)

        # optimiser: the mask is a group of its own, without weight decay
        groups = parameter_groups(model, lr=args.lr, mask_lr=args.mask_lr, weight_decay=args.weight_decay)
        optimizer = torch.optim.AdamW(groups)
        draws = runs.generator(run.seed, "batches")  # of batches and their augmentation
        records.take_up(run, model, optimizer, draws)
        schedule = runs.cosine_schedule(optimizer, args.steps, args.warmup, done=run.step)
        batches = images.training_batches(x, labels, args.batch_size, draws, first=run.step)

        # loop
        for step in records.steps(run):
            batch, classes = (part.to(device) for part in next(batches))
            inputs, targets = augmented(args, batch, classes, CLASSES[run.task], draws)
            torch.manual_seed(torch.randint(2**31, (1,), generator=draws).item() + rank)  # for drop path
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = shared(inputs[rank::world])
            loss = F.cross_entropy(logits.float(), targets[rank::world])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            run.loss = parallel.mean_loss(loss)
            if records.evaluation_due(step, args.steps, EVALUATIONS):
                point = {"train_loss": run.loss, **scores(args, model, *few, device)}
                records.add_point(run, point, "loss", "top-1 {top1:.4f}, loss {loss:.3f}")

        # evaluation
        kept = measures(before, snapshot(model, probe), supports) if supports else NO_ATTENTION
        found = metrics(args, model, data[run.task], run.curve, device) | kept
        results.append(records.finish(run, found, parameter_counts(model)))

    if rank == 0:
        print_table(common, args_of, results)
        if common.plot:
            plot(common, wanted, results, data)
    return results


if __name__ == "__main__":
    runs.command(main)
