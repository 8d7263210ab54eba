"""Language (paper, section 5.4 and App. F, Tables 6 and 12): does a prior of nearness help a language model?

    python train_lm.py                   # the built-in text, one seed
    python train_lm.py --data book.txt --inits default mask-slopes --sample 200

All arms see the same windows of the same text. `mask` is the paper's: causal, falling by 10 a token in every
head; `mask-slopes` has a geometric slope for each head, which fixed and without log sigmoid is `alibi`. Expected:
masks below the default. Perplexities of different tokenisers do not compare; bits per byte do, and words have none,
for their tokenisers lose spaces and rare words.
"""
import hashlib
import itertools
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from tinymask import mask_priors, parallel, pictures, qk_init, records, runs, text
from tinymask.fetch import fetch
from tinymask.persistence import measures, snapshot
from tinymask.transformer import GPT, generate, init_weights, parameter_counts, parameter_groups

DATASETS = ["builtin", "wikitext2", "wikitext2-raw", "tinystories"]
CONTROLS = ["mask-zero", "mask-frozen", "mask-shuffled"]
INITS = ["default", "mimetic", "mask", "mask-slopes", "alibi", "bias", *CONTROLS]
PRESETS = {
    "small": dict(steps=600, batch_size=16, lr=3e-3, weight_decay=0.1, dim=96, depth=3, heads=4, head_dim=24, block=64,
                  dropout=0.0, position_std=0.02, token_std=0.02, tokeniser="byte", max_bytes=12_000_000),
    # Table 12; the heads are those of the repository that the paper builds on
    "paper": dict(steps=3000, batch_size=128, lr=3e-4, weight_decay=0.01, dim=512, depth=12, heads=12, head_dim=42,
                  block=64, dropout=0.2, position_std=0.02, token_std=0.02, tokeniser="gpt2", max_bytes=12_000_000),
}
OF_DATASET = {"tinystories": dict(steps=5000)}
SMOKE = dict(steps=6, dim=32, depth=2, head_dim=8, batch_size=4)
MEASURED = ["val_bits_per_byte", "bits_per_byte", "val_perplexity", "perplexity"]  # the columns of the table
EVALUATIONS = 20  # points on a curve, at most; they are measured on the first PROBE blocks of the validation text
PROBE = 64
PAPER = {  # validation and test perplexity: Table 6
    ("wikitext2-raw", "default"): (172.78, 181.91), ("wikitext2-raw", "mimetic"): (178.34, 188.87),
    ("wikitext2-raw", "mask"): (166.76, 179.70), ("tinystories", "default"): (10.42, 10.49),
    ("tinystories", "mimetic"): (10.64, 10.60), ("tinystories", "mask"): (10.40, 10.48),
}


def parser():
    flags = runs.parser("train_lm.py", __doc__, DATASETS, INITS, PRESETS, flag="dataset", rows=6)
    flags.set_defaults(dataset=None)  # the first one, unless there is --data
    add = flags.add_argument
    add("--data", metavar="FILE", help="a UTF-8 text file instead of a data set")
    add("--data-dir", default="data", metavar="DIR", help="where official files and folders lie (default: data)")
    add("--download", action="store_true", help="fetch the official files if they are not there")
    add("--max-bytes", type=runs.whole(1000, 2**40), metavar="N", help="of --data, and of each file of TinyStories")
    add("--tokeniser", choices=["byte", "word", "gpt2"], help="word: WikiText-2 as published, else 10,000 words")
    add("--head-dim", type=runs.whole(1, 2**16), help="width of a head")
    add("--block", type=runs.whole(2, 2**16), help="tokens that the model sees")
    add("--dropout", type=runs.real(low=0, high=0.9), help="in every branch")
    add("--position-std", type=runs.real(low=0, high=1e6), help="scale of the initial position codes")
    add("--token-std", type=runs.real(low=0, high=1e6), help="scale of the initial token embedding")
    add("--bf16", action="store_true", help="bfloat16 autocast, on CUDA")
    add("--sample", type=runs.whole(0), default=0, metavar="N", help="write N tokens after each run")
    add("--prompt", default="", help="what --sample goes on from (default: the first token of the training text)")
    add("--temperature", type=runs.real(low=0, high=100), default=1.0, help="of --sample (default: 1; 0: likeliest)")
    add("--top-k", type=runs.whole(1), help="of --sample: draw from the k likeliest tokens")
    runs.describe_presets(flags, {f"paper, {name}": own for name, own in OF_DATASET.items()})
    return flags


def settings(argv, dataset):
    """The flags for one data set: as given, else as its preset has them."""
    presets = PRESETS | {"paper": PRESETS["paper"] | OF_DATASET.get(dataset, {})}
    args = runs.parse(parser(), argv, presets, SMOKE)
    if args.data is not None and args.dataset:
        runs.fail("--data: give it or --dataset, not both")
    args.dataset = args.dataset or DATASETS[:1]
    return args


def download(args, dataset):
    """Fetch the official files of a data set, unless they are there."""
    folder = Path(args.data_dir)
    if dataset == "tinystories":
        for name, checksum in text.STORIES.items():
            fetch(text.STORIES_BASE + name, folder / name, checksum)
    elif dataset in text.WIKITEXT and not (folder / text.WIKITEXT[dataset]["folder"]).is_dir():
        archive = text.WIKITEXT[dataset]["archive"]
        fetch(text.WIKITEXT_BASE + archive, folder / archive, text.WIKITEXT[dataset]["sha256"])


def load(args, dataset):
    """The tokeniser, and a pair (token ids, bytes or None) for each of the training, validation and test texts."""
    flag, name = ("--dataset", dataset) if args.data is None else ("--data", args.data)
    try:
        if args.download and args.data is None:
            download(args, dataset)
        if args.data is not None:
            texts = text.load_file(args.data, args.max_bytes)
        elif dataset == "builtin":
            texts = text.builtin()
        elif dataset == "tinystories":
            texts = text.load_stories(args.data_dir, args.max_bytes)
        else:
            texts = text.load_wikitext(dataset, args.data_dir)
        kind = "lines" if (args.tokeniser, dataset) == ("word", "wikitext2") and args.data is None else args.tokeniser
        tokeniser = text.make_tokeniser(kind, texts[0])
        lossy = "types" in tokeniser  # spaces and rare words are lost: nothing to be had per byte
        parts = [(text.encode(tokeniser, part), None if lossy else len(part.encode())) for part in texts]
    except (OSError, ValueError) as error:
        runs.fail(f"{flag}: {error}" if name in str(error) else f"{flag} {name}: {error}")
    for part, (ids, _) in zip(("training", "validation", "test"), parts):
        if len(ids) <= args.block:
            runs.fail(f"{flag} {name}: {len(ids)} tokens in the {part} text, "
                      f"--block {args.block} wants {args.block + 1}")
    return tokeniser, parts


@torch.no_grad()
def scores(model, ids, size, block, device, limit=None):
    """Perplexity, nats a token and bits a byte on a text of `size` bytes (None: unknown), or its first `limit` blocks.

    Each token but the first is predicted once, from those before it in its block: sums over counts, so that
    nothing depends on how the blocks are batched. With a limit, bits per byte take the tokens per byte of the whole.
    """
    model.eval()
    total, count, pairs = 0.0, 0, list(text.blocks(ids, block))[:limit]
    whole = [pair for pair in pairs if pair[0].shape[1] == block]
    batches = [[torch.cat(part) for part in zip(*whole[start: start + 64])] for start in range(0, len(whole), 64)]
    for inputs, targets in batches + pairs[len(whole):]:
        logits = model(inputs.to(device)).float()
        total += F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum").item()
        count += targets.numel()
    model.train()
    nll = total / count
    return {"perplexity": math.exp(min(nll, 700)), "nll": nll,
            "bits_per_byte": size and nll / math.log(2) * len(ids) / size, "tokens_evaluated": count}


def build(args, init, seed, vocabulary):
    """The model of one run with its prior in place. Every init of a seed starts from the same weights, apart
    from what it sets."""
    model = GPT(vocabulary, args.block, args.dim, args.depth, args.heads, args.head_dim, dropout=args.dropout)
    init_weights(model, runs.generator(seed, "weights"), args.token_std, args.position_std)
    steep = init in ("mask", "mask-frozen", "mask-shuffled")
    slopes = [10.0] * args.heads if steep else mask_priors.geometric_slopes(args.heads)
    mask, draws = mask_priors.distance_mask(args.block, slopes), runs.generator(seed, init)
    for block in model.transformer.blocks:
        attention = block.attention
        if init == "mimetic":  # the signs of language
            qk_init.mimetic(attention, draws, query_key=-0.7, sign=1)
        elif init == "alibi":
            attention.set_mask(mask, learnable=False, squash=False)
        elif init == "mask-shuffled":  # each token sees one past token, a random one in every layer and head
            mask_priors.place(attention, init, mask_priors.shuffled(mask, draws, causal=True))
        else:  # bias: the logits of mask-slopes at the start
            mask_priors.place(attention, init, mask)
    return model


def encoded_prompt(args, tokeniser, train):
    """Token ids of --prompt, or the first token of the training text. Unknown words are an error."""
    try:
        prompt = os.fsencode(args.prompt).decode()  # whatever the locale made of it
    except UnicodeDecodeError as error:
        runs.fail(f"--prompt: not UTF-8 at byte {error.start}")
    if "types" in tokeniser:
        unknown = set(text.pieces(tokeniser["kind"], prompt)) - set(tokeniser["types"]) - {text.END}
        if unknown:
            runs.fail(f"--prompt: not in the vocabulary: {' '.join(sorted(unknown))}")
    ids = text.encode(tokeniser, prompt) if prompt else train[:1]
    if tokeniser["kind"] == "lines" and prompt and not prompt.endswith("\n"):
        ids = ids[:-1]  # the line is to go on
    if len(ids) == 0:
        runs.fail(f"--prompt {args.prompt!r}: no token in it")
    return ids


def write_sample(args, model, tokeniser, prompt, device):
    """Print what the model makes of a prompt, token ids (N,)."""
    model.eval()
    draws = runs.generator(0, "sample")
    ids = generate(model, prompt[None].to(device), args.sample, args.temperature, args.top_k, draws)
    model.train()
    print(text.decode(tokeniser, ids[0].cpu()))


def print_table(common, names, results):
    """This run beside the paper's Table 6."""
    rows = []
    for name, init in itertools.product(names, common.inits):
        these = [r["metrics"] for r in results if (r["task"], r["init"]) == (name, init)]
        cells = [runs.mean_std([m[part] for m in these], digits) for part, digits in zip(MEASURED, (4, 4, 2, 2))]
        paper = PAPER.get((name, init), ("-", "-")) if common.tokeniser == "gpt2" else ("-", "-")
        rows.append([f"{name} {init}", *cells, *paper])
    header = ["", "bits/byte: val", "test", "perplexity: val", "test", "paper: val", "test"]
    print(f"\n{common.seeds} seed(s), mean +- standard deviation; perplexity per {common.tokeniser} token, "
          f"blocks of {common.block}")
    print(runs.table(header, rows))


def plot(common, args_of, results, out, data):
    """Figures: the curves; for each text and each init of the first seed, attention at the start and at the end, a
    mean over heads and validation blocks, and sigmoid(M) of each head."""
    measure, label = ("bits_per_byte", "bits per byte") if common.tokeniser != "word" else ("nll", "nats per token")
    pictures.progress(results, list(args_of), common.inits, measure, f"{label}, validation", out / "curves.png")
    for name, args in args_of.items():
        tokeniser, (_, (val, _), _) = data[name]
        few = val[: len(val) // args.block * args.block].view(-1, args.block)[:16]
        columns = [f"layer {layer + 1}, {when}" for layer in range(args.depth) for when in ("start", "end")]
        attention, openness, rows = [], [], []
        for init in common.inits:
            model = build(args, init, common.first_seed, text.vocabulary_size(tokeniser))
            path = out / "checkpoints" / f"{records.run_key(vars(args), name, init, common.first_seed)}.pt"
            (first, first_open), (last, last_open) = records.start_and_end(path, model, few)
            attention += [maps.mean(dim=(0, 1)) for pair in zip(first, last) for maps in pair]
            if init.startswith("mask"):
                rows += [f"{init}, head {head + 1}" for head in range(args.heads)]
                openness += [layer[head].tril() for head in range(args.heads)
                             for pair in zip(first_open, last_open) for layer in pair]
        pictures.grid(common.inits, columns, attention, out / f"attention-{records.short(name)}.png")
        if rows:
            pictures.grid(rows, columns, openness, out / f"masks-{records.short(name)}.png")


def main(argv=None):
    common = settings(argv, None)
    names = common.dataset if common.data is None else [Path(common.data).name]
    args_of = {name: settings(argv, name) for name in names}
    if common.plot:
        pictures.pyplot()  # a missing matplotlib is said before the training, not after it
    rank, world, device = parallel.start(common.device, common.batch_size)
    if common.bf16 and device.type != "cuda":
        runs.fail(f"--bf16: only on CUDA, this is {device}")
    data = parallel.first_alone(lambda: {name: load(args, name) for name, args in args_of.items()})
    for name, args in args_of.items():  # which text it is, for Pythons and files differ
        train, *others = (hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12] for ids, _ in data[name][1])
        args.text, args.held_out = train, "-".join(others)
    prompts = {name: encoded_prompt(args, data[name][0], data[name][1][0][0]) for name, args in args_of.items()}
    out = runs.open_out(common.out)
    finished = records.read_results(out, MEASURED, ["bits_per_byte", "nll"]) if common.resume else {}
    if rank == 0:
        print(f"device {device}, {world} process(es), {torch.get_num_threads()} threads, torch {torch.__version__}, "
              f"results in {out}")
        if common.data is not None and (size := Path(common.data).stat().st_size) > common.max_bytes:
            print(f"{common.data}: the first {common.max_bytes:,} of {size:,} bytes; more with --max-bytes")
    results = []

    for task, init, seed in itertools.product(args_of, common.inits, runs.seeds(common)):
        args = args_of[task]
        # data
        tokeniser, ((train, _), (val, val_bytes), (test, test_bytes)) = data[task]
        key = records.run_key(vars(args), task, init, seed)
        if key in finished:
            results.append(finished[key])
            continue
        name = f"{task} {init} seed {seed}"
        if rank == 0:
            print(f"{name}: {len(train):,} tokens to learn from, {len(val):,} and {len(test):,} to validate and "
                  "test on")

        # model and prior
        model = build(args, init, seed, text.vocabulary_size(tokeniser)).to(device)
        few = val[None, : args.block].to(device)
        before = snapshot(model, few)
        shared = model if world == 1 else torch.nn.parallel.DistributedDataParallel(model)

        # optimiser: the mask is a group of its own, without weight decay
        optimizer = torch.optim.AdamW(parameter_groups(model, args.lr, args.mask_lr, args.weight_decay))
        batches = runs.generator(seed, "batches")
        checkpoint = out / "checkpoints" / f"{key}.pt"
        step, curve, seconds = records.resume(checkpoint, model, optimizer, batches) if args.resume else (0, [], 0.0)

        # loop
        bar = tqdm(total=args.steps, initial=step, desc=name, disable=None if rank == 0 else True, leave=False)
        start, diverged = time.perf_counter() - seconds, False
        while step < args.steps and not diverged:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * runs.cosine(step, args.steps)
            inputs, targets = (part.to(device) for part in text.batch(train, args.block, args.batch_size, batches))
            torch.manual_seed(torch.randint(2**31, (1,), generator=batches).item() + rank)  # for dropout
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = shared(inputs[rank::world])
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets[rank::world].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss, step = parallel.agree(loss), step + 1
            bar.update()
            diverged = not math.isfinite(loss.item())
            if step * EVALUATIONS // args.steps > (step - 1) * EVALUATIONS // args.steps:
                point = scores(model, val, val_bytes, args.block, device, limit=PROBE)
                curve.append({"step": step, "train_loss": loss.item(), **point})
                diverged = diverged or not math.isfinite(point["nll"])
                if rank == 0:
                    bits = "" if val_bytes is None else f"{point['bits_per_byte']:.4f} bits/byte, "
                    runs.report(bar, name, f"step {step}: {bits}perplexity {point['perplexity']:.2f} on validation")
            if not diverged and (runs.interrupted() or step % 500 == 0):
                seconds = time.perf_counter() - start
                records.checkpoint(checkpoint, model, optimizer, batches, step, curve, seconds, rank)
        bar.close()
        seconds = time.perf_counter() - start

        # evaluation: both texts, whole
        validation = scores(model, val, val_bytes, args.block, device)
        metrics = scores(model, test, test_bytes, args.block, device) | {
            f"val_{measure}": value for measure, value in validation.items()} | measures(before, snapshot(model, few))
        if "types" in tokeniser:
            metrics["unknown"] = (test == tokeniser["types"].index(text.UNKNOWN)).float().mean().item()
        if rank > 0:
            results.append({"task": task, "init": init, "metrics": metrics, "diverged": diverged})
            continue
        records.save(checkpoint, {"model": model.state_dict(), "step": step, "tokeniser": tokeniser})
        results.append(records.record(out, args, "lm", task, init, seed, metrics=metrics, curve=curve, steps=step,
                                   seconds=seconds, params=parameter_counts(model), device=device, diverged=diverged))
        if diverged:
            print(f"{name}: diverged at step {step}")
        elif args.sample:
            write_sample(args, model, tokeniser, prompts[task], device)

    if rank == 0:
        print_table(common, args_of, results)
        if common.plot:
            plot(common, args_of, results, out, data)
    return results


if __name__ == "__main__":
    runs.command(main)
