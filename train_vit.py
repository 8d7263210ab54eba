"""Vision (paper, section 5.3, Tables 3, 5 and 9 to 11): does a prior of locality help a vision transformer?

    python train_vit.py                  # the built-in sets, one seed
    python train_vit.py --dataset cifar10 --preset cifar-fast --data-dir data --download
    torchrun --nproc-per-node 4 train_vit.py --dataset cifar10 --preset paper --bf16

All arms see the same images, batches and augmentation. Expected: where the class is decided by neighbouring
patches, a mask that opens one neighbour a head learns faster than the same pattern in the query and key
projections (svd), and that faster than the default; where the halves of an image decide, it is in the way.
"""
import functools
import itertools
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from tinymask import images, mask_priors, parallel, pictures, qk_init, records, runs
from tinymask.fetch import fetch
from tinymask.persistence import measures, snapshot
from tinymask.transformer import ViT, init_weights, parameter_counts, parameter_groups

DATASETS = ["builtin", "builtin-global", "cifar10", "cifar100", "imagenet100"]
CLASSES = {"builtin": 10, "builtin-global": 10, "cifar10": 10, "cifar100": 100, "imagenet100": 100}
CONTROLS = ["mask-zero", "mask-shuffled", "bias", "svd-frozen"]
INITS = ["default", "mimetic", "impulse", "svd", "mask", "mask-frozen", *CONTROLS]
PRESETS = {
    "small": dict(steps=600, batch_size=64, lr=2e-3, weight_decay=0.05, warmup=30, side=32, patch=4, dim=48, depth=2,
                  heads=3, pooling="mean", positions="learned", drop_path=0.0, augment="none", open=10.0, closed=-10.0),
    "cifar-fast": dict(steps=10_000, batch_size=128, lr=1e-3, weight_decay=0.05, warmup=500, side=32, patch=4, dim=192,
                       depth=12, heads=3, pooling="mean", positions="learned", drop_path=0.1, augment="full",
                       open=10.0, closed=-10.0),
    # Tables 9 and 10; 39,100 steps are 400 epochs of CIFAR's 50,000 images, warm-up for 50 of them
    "paper": dict(steps=39_100, batch_size=512, lr=2e-3, weight_decay=0.05, warmup=4_900, side=224, patch=16, dim=192,
                  depth=12, heads=3, pooling="cls", positions="learned", drop_path=0.1, augment="full",
                  open=10.0, closed=-10.0),
}
OF_DATASET = {"imagenet100": dict(steps=74_400, lr=1e-3, warmup=1_240, pooling="mean")}  # Table 11: 300 epochs
SMOKE = dict(steps=3, batch_size=16, dim=24, depth=2)
MEASURED = ["top1", "top1_best", "loss"]  # the columns of the table
EVALUATIONS, FEW = 20, 64  # points on a curve, at most; images on which attention is looked at, and svd is solved
GAP = 50.0  # svd: difference in logits; at the mask's 10 the pattern would be lost in what else the layers read
PAPER = {  # best top-1 over epochs: Tables 3 and 5
    ("cifar10", "default"): 0.9420, ("cifar10", "mimetic"): 0.9480, ("cifar10", "impulse"): 0.9512,
    ("cifar10", "mask"): 0.9566, ("cifar10", "mask-frozen"): 0.9416,
    ("cifar100", "default"): 0.7400, ("cifar100", "mimetic"): 0.7680, ("cifar100", "impulse"): 0.7647,
    ("cifar100", "mask"): 0.7795, ("cifar100", "mask-frozen"): 0.7877,
    ("imagenet100", "default"): 0.8338, ("imagenet100", "mimetic"): 0.8438, ("imagenet100", "impulse"): 0.8316,
    ("imagenet100", "mask"): 0.8592, ("imagenet100", "mask-frozen"): 0.8178,
}


def parser():
    flags = runs.parser("train_vit.py", __doc__, DATASETS, INITS, PRESETS, flag="dataset", rows=6)
    flags.set_defaults(dataset=DATASETS[:2])
    add = flags.add_argument
    add("--warmup", type=runs.whole(0), help="steps of linear warm-up")
    add("--side", type=runs.whole(1, 4096), help="pixels of an image's side; smaller images are scaled up")
    add("--patch", type=runs.whole(1, 4096), help="pixels of a patch's side")
    add("--pooling", choices=["mean", "cls"], help="how the tokens become one output")
    add("--positions", choices=["learned", "sincos"], help="position codes")
    add("--drop-path", type=runs.real(low=0, high=0.9), help="of the last block")
    add("--augment", choices=["none", "full"],
        help="full: flip, crop, mixup 0.8, cutmix 1.0, random erasing, label smoothing 0.1")
    add("--vary-offsets", action="store_true", help="let the layers go on through the 3 x 3 window")
    add("--open", type=runs.real(), help="mask logit of an open pair")
    add("--closed", type=runs.real(), metavar="M", help="mask logit of a closed pair, as --closed=-10")
    add("--data-dir", default="data", metavar="DIR", help="where official files and folders lie (default: data)")
    add("--download", action="store_true", help="fetch CIFAR if it is not there")
    add("--bf16", action="store_true", help="bfloat16 autocast, on CUDA")
    add("--eval-only", metavar="CKPT", help="evaluate a checkpoint of the first data set and init, train nothing")
    runs.describe_presets(flags, {f"paper, {name}": own for name, own in OF_DATASET.items()})
    return flags


def settings(argv, dataset):
    """The flags for one data set: as given, else as its preset has them."""
    presets = PRESETS | {"paper": PRESETS["paper"] | OF_DATASET.get(dataset, {})}
    args = runs.parse(parser(), argv, presets, SMOKE)
    if args.side % args.patch:
        runs.fail(f"--side {args.side} is not a multiple of --patch {args.patch}")
    if (tokens := (args.side // args.patch) ** 2) > 2**14:
        runs.fail(f"--side {args.side} --patch {args.patch}: {tokens:,} tokens an image, at most {2**14:,}")
    if args.dim % args.heads:
        runs.fail(f"--dim {args.dim} is not a multiple of --heads {args.heads}")
    if args.positions == "sincos" and args.dim % 4:
        runs.fail(f"--dim {args.dim}: --positions sincos needs one that 4 divides")
    return args


def load(args, dataset):
    """Training images (P, 3, S, S) uint8 and labels, and the same to test."""
    try:
        if dataset.startswith("builtin"):
            return images.builtin("global" if dataset == "builtin-global" else "local")
        if dataset == "imagenet100":
            return images.load_folder(Path(args.data_dir) / "imagenet100", args.side)
        about, folder = images.CIFAR[dataset], Path(args.data_dir)
        if args.download and not (folder / about["folder"]).is_dir():
            fetch(images.BASE + about["archive"], folder / about["archive"], about["sha256"])
        return images.load_cifar(dataset, args.data_dir)
    except (OSError, ValueError) as error:
        runs.fail(f"--dataset {dataset}: {error}")


def to_input(args, batch):
    """uint8 (B, 3, s, s) on the device -> float (B, 3, S, S), scaled up if S is larger."""
    batch = images.to_float(batch)
    if batch.shape[-1] != args.side:
        batch = F.interpolate(batch, size=(args.side, args.side), mode="bicubic", align_corners=False)
    return batch


def augmented(args, batch, labels, classes, generator):
    """A training batch: input (B, 3, S, S) and soft labels (B, C)."""
    if args.augment == "none":
        return to_input(args, batch), images.soft_labels(labels, classes)
    x = to_input(args, images.flip_and_crop(batch, generator, pad=batch.shape[-1] // 8))
    x, targets = images.mixup_or_cutmix(x, images.soft_labels(labels, classes, 0.1), generator)
    return images.random_erasing(x, generator), targets


@torch.no_grad()
def scores(args, model, x, labels, device):
    """Top-1 accuracy, a fraction, and mean loss on a whole set; counts on the CPU."""
    model.eval()
    right, loss = 0, 0.0
    for batch, label in zip(x.split(256), labels.split(256)):
        logits = model(to_input(args, batch.to(device))).float().cpu()
        right += (logits.argmax(-1) == label).sum().item()
        loss += F.cross_entropy(logits, label, reduction="sum").item()
    model.train()
    loss /= len(labels)
    return {"top1": right / len(labels) if math.isfinite(loss) else math.nan, "loss": loss}


def build(args, dataset, init, seed, sample):
    """The model of one run with its prior in place, and the supports, one for each layer.

    Every init of a seed starts from the same weights, apart from what it sets. sample: inputs (B, 3, S, S)
    on which svd is solved.
    """
    model = ViT(args.side, args.patch, CLASSES[dataset], args.dim, args.depth, args.heads, pooling=args.pooling,
                positions=args.positions, drop_path=args.drop_path)
    init_weights(model, runs.generator(seed, "weights"))
    supports = mask_priors.impulse_support(args.side // args.patch, args.depth, args.heads, args.vary_offsets)
    draws = runs.generator(seed, init)
    for block, support in zip(model.transformer.blocks, supports):
        if init == "mimetic":
            qk_init.mimetic(block.attention, draws)
        elif init == "impulse":
            qk_init.impulse(block.attention, model.position[int(args.pooling == "cls"):], support)
    if init == "mask-shuffled":
        supports = [mask_priors.shuffled(support, draws) for support in supports]
    if args.pooling == "cls":
        supports = mask_priors.with_cls(supports)
    if init.startswith("svd"):
        qk_init.apply_layerwise(functools.partial(qk_init.svd, gap=GAP), model, sample, supports)
    for block, support in zip(model.transformer.blocks, supports):
        mask_priors.place(block.attention, init, mask_priors.to_mask(support, args.open, args.closed))
    return model, supports


def describe(args, dataset, init):
    """What a checkpoint says of itself: all that its weights alone would not tell."""
    return {"dataset": dataset, "init": init} | {name: getattr(args, name) for name in (
        "side", "patch", "heads", "pooling", "positions")}


def evaluate_only(args, dataset, init, data, device):
    """Print the scores of the checkpoint --eval-only."""
    model, _ = build(args, dataset, init, args.first_seed, to_input(args, data[0][:FEW]))
    records.restore(Path(args.eval_only), model, describe(args, dataset, init), "--eval-only")
    found = scores(args, model.to(device), *data[2:], device)
    print(f"{dataset} {init}: top-1 {found['top1']:.4f}, loss {found['loss']:.4f} on {len(data[3])} test images")


def print_table(common, results):
    """This run beside the paper's Tables 3 and 5."""
    rows = []
    for dataset, init in itertools.product(common.dataset, common.inits):
        these = [r["metrics"] for r in results if (r["task"], r["init"]) == (dataset, init)]
        cells = [runs.mean_std([m[name] for m in these]) for name in MEASURED]
        rows.append([f"{dataset} {init}", *cells, runs.mass_cell(these), PAPER.get((dataset, init), "-")])
    header = ["", "top-1, last", "top-1, best", "loss", "support mass", "paper: best"]
    print(f"\n{common.seeds} seed(s), mean +- standard deviation; from scratch, at {common.side} pixels")
    print(runs.table(header, rows))


def plot(common, args_of, results, out, data):
    """Figures: the curves; for each data set and each init of the first seed, masks and attention at start and end.

    Both are those of one patch in the middle, which looks at itself, its neighbours or elsewhere: a panel
    has the patches of the image in their places. Attention is a mean over test images.
    """
    pictures.progress(results, common.dataset, common.inits, "top1", "top-1 accuracy", out / "curves.png")
    for dataset, args in args_of.items():
        side = args.side // args.patch
        middle, skip = side // 2 * side + side // 2, int(args.pooling == "cls")
        probe = to_input(args, data[dataset][2][:FEW])
        panels = {"attention": {}, "mask": {}}  # title of a row -> its panels
        for init in common.inits:
            model, _ = build(args, dataset, init, common.first_seed, to_input(args, data[dataset][0][:FEW]))
            key = records.run_key(vars(args), dataset, init, common.first_seed)
            first, last = records.start_and_end(out / "checkpoints" / f"{key}.pt", model, probe)
            rows = {"attention": [[maps.mean(0) for maps in part[0]] for part in (first, last)],
                    "mask": [part[1] for part in (first, last)]}  # name -> start, end -> layer: (H, N, N)
            for name, layers in rows.items():
                if name == "attention" or init.startswith("mask"):
                    panels[name][init] = [head[middle + skip, skip:].unflatten(0, (side, side))
                                          for layer in (0, args.depth - 1) for part in layers for head in part[layer]]
        columns = [f"layer {layer}, head {head + 1}\n{when}" for layer in (1, args.depth) for when in ("start", "end")
                   for head in range(args.heads)]
        for name, rows in panels.items():
            if rows:
                pictures.grid(list(rows), columns, [panel for row in rows.values() for panel in row],
                              out / f"{name}-{dataset}.png")


def main(argv=None):
    common = settings(argv, None)
    args_of = {dataset: settings(argv, dataset) for dataset in common.dataset}
    if common.plot:
        pictures.pyplot()  # a missing matplotlib is said before the training, not after it
    rank, world, device = parallel.start(common.device, common.batch_size)
    if common.bf16 and device.type != "cuda":
        runs.fail(f"--bf16: only on CUDA, this is {device}")
    if common.eval_only is not None and not Path(common.eval_only).is_file():
        runs.fail(f"--eval-only {common.eval_only}: no such file")
    data = parallel.first_alone(lambda: {dataset: load(args, dataset) for dataset, args in args_of.items()})
    for dataset, args in args_of.items():
        args.data_hash = images.fingerprint(data[dataset])  # a run on other images is another run
    if common.eval_only is not None:
        dataset = common.dataset[0]
        evaluate_only(args_of[dataset], dataset, common.inits[0], data[dataset], device)
        return []
    out = runs.open_out(common.out)
    finished = records.read_results(out, [*MEASURED, *records.MASSES], ["top1"]) if common.resume else {}
    if rank == 0:
        print(f"device {device}, {world} process(es), {torch.get_num_threads()} threads, torch {torch.__version__}, "
              f"results in {out}")
        if common.side // common.patch < 4:
            print(f"--patch {common.patch} leaves {(common.side // common.patch) ** 2} tokens of an image: very few")
    results = []

    for dataset, init, seed in itertools.product(common.dataset, common.inits, runs.seeds(common)):
        args = args_of[dataset]
        key = records.run_key(vars(args), dataset, init, seed)
        if key in finished:
            results.append(finished[key])
            continue

        # data
        x, labels, test_x, test_labels = data[dataset]
        few, name = to_input(args, test_x[:FEW].to(device)), f"{dataset} {init} seed {seed}"
        if rank == 0:
            print(f"{name}: {len(x):,} images to learn from, {len(test_x):,} to test on, {args.steps} steps")

        # model and prior
        model, supports = build(args, dataset, init, seed, to_input(args, x[:FEW]))
        model.to(device)
        before = snapshot(model, few)
        shared = model if world == 1 else torch.nn.parallel.DistributedDataParallel(model)

        # optimiser: the mask is a group of its own, without weight decay
        optimizer = torch.optim.AdamW(parameter_groups(model, args.lr, args.mask_lr, args.weight_decay))
        batches = runs.generator(seed, "batches")  # draws batches and their augmentation
        checkpoint = out / "checkpoints" / f"{key}.pt"
        step, curve, seconds = records.resume(checkpoint, model, optimizer, batches) if args.resume else (0, [], 0.0)

        # loop
        bar = tqdm(total=args.steps, initial=step, desc=name, disable=None if rank == 0 else True, leave=False)
        start, diverged = time.perf_counter() - seconds, False
        while step < args.steps and not diverged:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * runs.cosine(step, args.steps, args.warmup)
            batch = torch.randint(len(x), (args.batch_size,), generator=batches)
            inputs, targets = augmented(args, x[batch].to(device), labels[batch].to(device), CLASSES[dataset], batches)
            torch.manual_seed(torch.randint(2**31, (1,), generator=batches).item() + rank)  # for drop path
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = shared(inputs[rank::world])
            loss = F.cross_entropy(logits.float(), targets[rank::world])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss, step = parallel.agree(loss), step + 1
            bar.update()
            diverged = not math.isfinite(loss.item())
            if step * EVALUATIONS // args.steps > (step - 1) * EVALUATIONS // args.steps:
                point = scores(args, model, test_x, test_labels, device)
                curve.append({"step": step, "train_loss": loss.item(), **point})
                diverged = diverged or not math.isfinite(point["loss"])
                if rank == 0:
                    runs.report(bar, name, "step {step}: top-1 {top1:.4f}, loss {loss:.3f}".format(**curve[-1]))
            if not diverged and (runs.interrupted() or step % 500 == 0):
                seconds = time.perf_counter() - start
                records.checkpoint(checkpoint, model, optimizer, batches, step, curve, seconds, rank)
        bar.close()
        seconds = time.perf_counter() - start

        # evaluation
        metrics = scores(args, model, test_x, test_labels, device) | {
            "top1_best": max((point["top1"] for point in curve), default=math.nan), "images": len(x),
        } | measures(before, snapshot(model, few), supports)
        if dataset == "imagenet100":  # there are several sets of this name
            metrics["class_list"] = images.names_hash(images.class_names(Path(args.data_dir) / "imagenet100"))
        if rank > 0:
            results.append({"task": dataset, "init": init, "metrics": metrics, "diverged": diverged})
            continue
        records.save(checkpoint, {"model": model.state_dict(), "step": step, "run": describe(args, dataset, init)})
        results.append(records.record(out, args, "vit", dataset, init, seed, metrics=metrics, curve=curve, steps=step,
                                   seconds=seconds, params=parameter_counts(model), device=device, diverged=diverged))
        if diverged:
            print(f"{name}: diverged at step {step}")

    if rank == 0:
        print_table(common, results)
        if common.plot:
            plot(common, args_of, results, out, data)
    return results


if __name__ == "__main__":
    runs.command(main)
