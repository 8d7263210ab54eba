"""Language (paper, section 5.4 and App. F, Tables 6 and 12): does a prior of nearness help a language model?

    python train_lm.py                   # the built-in text, one seed
    python train_lm.py --data book.txt --inits default mask-slopes --sample 200

All arms see the same windows of the same text. `mask` is the paper's: causal, falling by 10 a token in every
head; `mask-slopes` has a geometric slope for each head, which fixed and without log sigmoid is `alibi`. In place of a
mask, `relative` learns a number for each head and distance, from zero and as a mask is trained, and `rotary` has
rotary positions and no learned ones; `rotary-mask` is `mask-slopes` on top of that. Expected: masks below the
default. Perplexities of different tokenisers do not compare; bits per byte do, and words have none, for their
tokenisers lose spaces and rare words.
"""
import argparse
import hashlib
import itertools
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tinymask import inits, mask_priors, parallel, pictures, qk_init, records, rivals, runs, text
from tinymask.persistence import measures, snapshot
from tinymask.runs import Args
from tinymask.transformer import GPT, generate, init_weights, parameter_counts, parameter_groups

DATASETS = ["builtin", "wikitext2", "wikitext2-raw", "tinystories"]
INITS = inits.rows(["default", "mimetic", "mask", "mask-slopes", "alibi", "bias",
                    "mask-zero", "mask-frozen", "mask-shuffled", "relative", "rotary", "rotary-mask"])
INITS["bias"] = inits.Init(mask=F.logsigmoid, squash=False, design="slopes")  # starts as mask-slopes does
SLOPES = {"ours": lambda heads: [10.0] * heads, "slopes": mask_priors.geometric_slopes}  # of each head, by design
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
EVALUATIONS, POINT_BLOCKS = 20, 64  # on a curve, at most; blocks of the validation text that it is measured on
PAPER = {  # validation and test perplexity: Table 6
    ("wikitext2-raw", "default"): (172.78, 181.91), ("wikitext2-raw", "mimetic"): (178.34, 188.87),
    ("wikitext2-raw", "mask"): (166.76, 179.70), ("tinystories", "default"): (10.42, 10.49),
    ("tinystories", "mimetic"): (10.64, 10.60), ("tinystories", "mask"): (10.40, 10.48),
}
Data = tuple[dict, list[Tensor], list[int | None], Tensor]  # what `load` gives


def parser() -> argparse.ArgumentParser:
    flags = runs.parser("train_lm.py", __doc__, DATASETS, INITS, PRESETS, flag="dataset", rows=6)
    flags.set_defaults(dataset=None)  # the first one, unless there is --data
    add = flags.add_argument
    add("--data", metavar="FILE", type=os.path.expanduser, help="a UTF-8 text file instead of a data set")
    add("--data-dir", default="data", metavar="DIR", type=os.path.expanduser,
        help="where official files and folders lie (default: data)")
    add("--download", action="store_true", help="fetch the official files if they are not there")
    add("--max-bytes", type=runs.number(int, 1000, 2**40), metavar="N", help="of --data, or of a file of TinyStories")
    add("--tokeniser", choices=["byte", "word", "gpt2"], help="word: WikiText-2 as published, else 10,000 words")
    add("--vocabulary", metavar="DIR", type=os.path.expanduser,
        help="where encoder.json and vocab.bpe of GPT-2's release lie, for --tokeniser gpt2 without a network")
    add("--head-dim", type=runs.number(int, 1, 2**16), help="width of a head")
    add("--block", type=runs.number(int, 2, 2**16), help="tokens that the model sees")
    add("--dropout", type=runs.number(float, 0, 0.9), help="in every branch")
    add("--position-std", type=runs.number(float, 0, 1e6), help="scale of the initial position codes")
    add("--token-std", type=runs.number(float, 0, 1e6), help="scale of the initial token embedding")
    add("--bf16", action="store_true", help="train in bfloat16 autocast")
    add("--sample", type=runs.number(int, 0), default=0, metavar="N", help="write N tokens after each run")
    add("--prompt", default="", help="what --sample goes on from (default: the first token of the training text)")
    add("--temperature", type=runs.number(float, 0, 100), default=1.0, help="of --sample (default: 1; 0: likeliest)")
    add("--top-k", type=runs.number(int, 1), help="of --sample: draw from the k likeliest tokens")
    runs.describe_presets(flags, {f"paper, {name}": own for name, own in OF_DATASET.items()})
    return flags


def settings(argv: list[str] | None, dataset: str | None) -> Args:
    """The flags for one data set (None: what none has of its own): as given, else as its preset has them."""
    presets = PRESETS | {"paper": PRESETS["paper"] | OF_DATASET.get(dataset or "", {})}
    args = runs.parse(parser(), argv, presets, SMOKE)
    if args.data is not None and (args.dataset or not args.data):
        runs.fail(f"--data {args.data!r}: wanted a file, and no --dataset beside it")
    if args.vocabulary is not None and args.tokeniser != "gpt2":
        runs.fail(f"--vocabulary {args.vocabulary}: wanted --tokeniser gpt2, not {args.tokeniser}")
    if args.head_dim % 2 and any(INITS[init].rotary for init in args.inits):
        runs.fail(f"--head-dim {args.head_dim}: rotary positions turn pairs of columns, wanted an even number")
    args.dataset = args.dataset or DATASETS[:1]
    return args


def download(dataset: str, folder: Path) -> None:
    """Fetch the official files of a data set, unless they are there. Raises ValueError if they cannot be had."""
    if dataset == "tinystories":
        for name, checksum in text.STORIES.items():
            runs.download(text.STORIES_BASE + name, folder / name, checksum)
    elif dataset in text.WIKITEXT and not (folder / text.WIKITEXT[dataset]["folder"]).is_dir():
        archive = text.WIKITEXT[dataset]["archive"]
        runs.download(text.WIKITEXT_BASE + archive, folder / archive, text.WIKITEXT[dataset]["sha256"])


def load_texts(args: Args, dataset: str) -> tuple[str, ...]:
    """The training, validation and test texts. Raises ValueError or OSError, in one line."""
    if args.data:
        return text.load_file(args.data, args.max_bytes)
    if args.download:
        download(dataset, Path(args.data_dir))
    if dataset == "builtin":
        return text.builtin()
    if dataset == "tinystories":
        return text.load_stories(args.data_dir, args.max_bytes)
    return text.load_wikitext(dataset, args.data_dir)


def load(args: Args, dataset: str) -> Data:
    """A tokeniser, made from the training text; token ids of the training, validation and test texts, (T,) each, and
    their bytes (None: the tokeniser loses some); what samples go on from, (N,). Notes in args which texts they are."""
    with runs.refused(f"--data {args.data}" if args.data else f"--dataset {dataset}"):
        texts = load_texts(args, dataset)
        as_published = (args.tokeniser, dataset, args.data) == ("word", "wikitext2", None)
        tokeniser = text.make_tokeniser("lines" if as_published else args.tokeniser, texts[0])
        if args.vocabulary is not None:
            tokeniser["vocabulary"] = args.vocabulary
        ids = [text.encode(tokeniser, part) for part in texts]
        for part, tokens in zip(("training", "validation", "test"), ids):
            if len(tokens) <= args.block:
                raise ValueError(f"{len(tokens)} tokens in the {part} text, --block {args.block} wants more")
    with runs.refused(f"--prompt {args.prompt!r}"):
        prompt = encode_prompt(tokeniser, args.prompt) if args.prompt else ids[0][:1]
    args.text, *held_out = (hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:12] for tokens in ids)
    args.held_out = "-".join(held_out)  # Pythons and files differ
    return tokeniser, ids, [None if "types" in tokeniser else len(part.encode()) for part in texts], prompt


def encode_prompt(tokeniser: dict, prompt: str) -> Tensor:
    """Token ids of what a text is to go on from, (N,). Raises ValueError for unknown words, no token, or no UTF-8."""
    prompt = os.fsencode(prompt).decode()  # whatever the locale made of it
    if "types" in tokeniser:
        unknown = set(text.pieces(tokeniser["kind"], prompt)) - set(tokeniser["types"])
        if unknown:
            raise ValueError(f"not in the vocabulary: {' '.join(sorted(unknown))}")
    ids = text.encode(tokeniser, prompt)
    if tokeniser["kind"] == "lines" and not prompt.endswith("\n"):
        ids = ids[:-1]  # the line is to go on
    if len(ids) == 0:
        raise ValueError("no token in it")
    return ids


def build(args: Args, init: str, seed: int, vocabulary: int) -> GPT:
    """The model of one run with its prior in place. Every init of a seed starts from the same weights, apart
    from what it sets."""
    row = INITS[init]
    model = GPT(vocabulary=vocabulary, block=args.block, dim=args.dim, depth=args.depth, heads=args.heads,
                head_dim=args.head_dim, dropout=args.dropout)
    init_weights(model, runs.generator(seed, "weights"), token_std=args.token_std, position_std=args.position_std)
    if not row.positions:
        torch.nn.init.zeros_(model.position).requires_grad_(False)
    mask, draws = mask_priors.distance_mask(args.block, SLOPES[row.design](args.heads)), runs.generator(seed, init)
    for block in model.transformer.blocks:
        if row.query_key == "mimetic":  # the signs of language
            qk_init.mimetic(block.attention, draws, query_key=-0.7, sign=1)
        # shuffled: each token sees one past token, a random one in every layer and head
        logits = inits.shuffled(mask, draws, causal=True) if row.shuffled else mask
        inits.set_prior(block.attention, row, logits, rivals.distance_index(args.block))
    return model


@torch.no_grad()
def scores(model: GPT, ids: Tensor, size: int | None, block: int, limit: int | None = None) -> dict:
    """Perplexity, nats a token and bits a byte on a text of `size` bytes (None: unknown), or its first `limit` blocks.

    Each token but the first is predicted once, from those before it in its block: sums over counts, so that
    nothing depends on how the blocks are batched. With a limit, bits per byte take the tokens per byte of the whole.
    """
    model.eval()
    total, count, device = 0.0, 0, model.position.device
    for inputs, targets in text.blocks(ids if limit is None else ids[: limit * block + 1], block, size=64):
        logits = model(inputs.to(device)).float()
        total += F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum").item()
        count += targets.numel()
    model.train()
    nll = total / count
    return {"perplexity": math.exp(nll) if nll < 700 else math.inf, "nll": nll,  # exp(710) is no float
            "bits_per_byte": size and nll / math.log(2) * len(ids) / size, "tokens_evaluated": count}


def metrics(model: GPT, data: Data, block: int) -> dict:
    """The figures of the table, from the whole test and validation texts."""
    tokeniser, (_, val, test), (_, val_bytes, test_bytes), _ = data
    found = scores(model, test, test_bytes, block)
    found |= {f"val_{name}": value for name, value in scores(model, val, val_bytes, block).items()}
    if "types" in tokeniser:
        found["unknown"] = (test == tokeniser["types"].index(text.UNKNOWN)).float().mean().item()
    return found


def print_sample(args: Args, model: GPT, tokeniser: dict, prompt: Tensor) -> None:
    """What the model makes of a prompt, token ids (N,)."""
    model.eval()
    prompt, draws = prompt[None].to(model.position.device), runs.generator(0, "sample")
    ids = generate(model, prompt, args.sample, temperature=args.temperature, top_k=args.top_k, generator=draws)
    print(text.decode(tokeniser, ids[0].cpu()))


def print_table(common: Args, args_of: dict[str, Args], results: list[dict]) -> None:
    """This run, and beside it, at the paper's settings, its Table 6."""
    rows = []
    for task, init in itertools.product(args_of, common.inits):
        these = [r["metrics"] for r in results if (r["task"], r["init"]) == (task, init)]
        cells = [runs.mean_std([m[name] for m in these], digits) for name, digits in zip(MEASURED, (4, 4, 2, 2))]
        papers = not common.data and records.same_settings(args_of[task], settings(["--preset", "paper"], task))
        rows.append([f"{task} {init}", *cells, *(PAPER.get((task, init), ("-", "-")) if papers else ("-", "-"))])
    header = ["", "bits/byte: val", "test", "perplexity: val", "test", "paper: val", "test"]
    print(f"\n{common.seeds} seed(s), mean +- standard deviation; perplexity per {common.tokeniser} token, "
          f"blocks of {common.block}")
    print(runs.table(header, rows, optional=2))


def plot(common: Args, wanted: list[records.Run], results: list[dict], data: dict[str, Data]) -> None:
    """Figures: the curves; for each text attention, on validation blocks, and masks before and after the first seed."""
    out = wanted[0].out
    measure, label = ("bits_per_byte", "bits per byte") if common.tokeniser != "word" else ("nll", "nats per token")
    panels = [{"title": task, "ylabel": f"{label}, validation", "lines": pictures.series(results, measure, task=task)}
              for task in data]
    pictures.curves(panels, common.inits, out / "curves.png", columns=len(panels))
    for task, (tokeniser, (_, val, _), _, _) in data.items():
        inputs, size = next(text.blocks(val, common.block, size=16))[0], text.vocabulary_size(tokeniser)
        ends = {run.init: records.start_and_end(run, build(run.args, run.init, run.seed, size), inputs)
                for run in wanted if (run.task, run.seed) == (task, common.first_seed)}
        pictures.before_and_after(ends, out, records.short(task))


@runs.script
def main(argv: list[str] | None = None) -> list[dict]:
    common = settings(argv, None)
    args_of = {task: settings(argv, task) for task in ([Path(common.data).name] if common.data else common.dataset)}
    rank, world, device = parallel.start(common.device, common.batch_size)
    data = parallel.first_alone(lambda: {task: load(args, task) for task, args in args_of.items()})
    wanted = records.wanted("lm", args_of.items(), runs.open_out(common.out), device, rank)
    if rank == 0 and common.data and (size := os.path.getsize(common.data)) > common.max_bytes:
        print(f"{common.data}: the first {common.max_bytes:,} of {size:,} bytes; more with --max-bytes")
    results: list[dict] = []

    for run in records.runs_left(wanted, results, MEASURED, ["bits_per_byte", "nll"]):
        # data
        args, (tokeniser, (train, val, test), (_, val_bytes, _), prompt) = run.args, data[run.task]
        if rank == 0:
            print(f"{run.name}: {len(train):,} training, {len(val):,} validation and {len(test):,} test tokens")

        # model and prior
        model = build(args, run.init, run.seed, text.vocabulary_size(tokeniser)).to(device)
        probe = val[None, : args.block].to(device)
        before = snapshot(model, probe)
        shared = model if world == 1 else torch.nn.parallel.DistributedDataParallel(model)

        # optimiser: the mask is a group of its own, without weight decay
        groups = parameter_groups(model, lr=args.lr, mask_lr=args.mask_lr, weight_decay=args.weight_decay)
        optimizer = torch.optim.AdamW(groups)
        batches = runs.generator(run.seed, "batches")
        records.take_up(run, model, optimizer, batches)
        schedule = runs.cosine_schedule(optimizer, args.steps, done=run.step)

        # loop
        for step in records.steps(run):
            batch = text.batch(train, args.block, args.batch_size, batches)
            inputs, targets = (part[rank::world].to(device) for part in batch)  # (B, N) each
            torch.manual_seed(torch.randint(2**31, (1,), generator=batches).item() + rank)  # for dropout
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = shared(inputs)  # (B, N, V)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            run.loss = parallel.mean_loss(loss)
            if records.evaluation_due(step, args.steps, EVALUATIONS):
                point = {"train_loss": run.loss} | scores(model, val, val_bytes, args.block, limit=POINT_BLOCKS)
                bits = "" if val_bytes is None else "{bits_per_byte:.4f} bits/byte, "
                records.add_point(run, point, "nll", bits + "perplexity {perplexity:.2f} on validation")

        # evaluation: both texts, whole
        found = metrics(model, data[run.task], args.block) | measures(before, snapshot(model, probe))
        results.append(records.finish(run, found, parameter_counts(model), tokeniser=tokeniser))
        if args.sample and rank == 0 and not run.diverged:
            print_sample(args, model, tokeniser, prompt)

    if rank == 0:
        print_table(common, args_of, results)
        if common.plot:
            plot(common, wanted, results, data)
    return results


if __name__ == "__main__":
    runs.command(main)
