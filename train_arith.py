"""Arithmetic (paper, section 5.2, Tables 2 and 8): which init learns the algorithm from least data and fewest steps?

    python train_arith.py                # the table, one seed
    python train_arith.py --tasks add --inits default mask --fraction 0.0005 0.001 0.002 0.004

Training shows a small fraction of all pairs of n-digit numbers; evaluation takes a fixed random part of the
others. Every init gets the same pairs, batches and steps. Expected: with the digits that belong together
opened in the mask, the answers are exact after fewer steps, and from fewer pairs (the two-digit multiplication
of the quick preset is learnt by no init; --preset paper has the one that is).
"""
import argparse
import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinymask import arithmetic, inits, mask_priors, pictures, qk_init, records, runs
from tinymask.persistence import attention_maps, logit_parts, measures, mechanism, snapshot, support_mass
from tinymask.runs import Args
from tinymask.transformer import GPT, Encoder, init_weights, parameter_counts, parameter_groups

TASKS = list(arithmetic.OPERATIONS)
CONTROLS = ["mask-zero", "mask-frozen", "mask-shuffled", "bias", "svd-frozen", "opt-frozen", "svd-shuffled",
            "svd-published"]
INITS = inits.rows(["default", "svd", "opt", "mask", "mask-literal", *CONTROLS])
PRESETS = {"small": dict(steps=400, batch_size=256, lr=1e-3, weight_decay=1e-3, dim=128, depth=3, heads=4, head_dim=32,
                         mlp_dim=256, token_std=0.02, position_std=0.02, open=5.0, closed=-5.0, digits=3,
                         fraction=[0.001, 0.004], eval_size=10_000)}
# Table 8; 800 steps are 50 epochs of 4,000 pairs
PRESETS["paper"] = PRESETS["small"] | dict(steps=800, dim=256, depth=6, head_dim=64, fraction=[0.004])
OF_TASK = {  # where multiplication differs; 5,900 steps are 50 epochs of 30,000 pairs
    "small": {"mul": dict(digits=2, fraction=[0.3], eval_size=5000, token_std=1.0)},
    "paper": {"mul": dict(fraction=[0.03], steps=5900, token_std=1.0)},
}
SMOKE = dict(steps=10, dim=32, depth=4, head_dim=8, mlp_dim=32, eval_size=1000)
MEASURED = {"exact_match": 4, "digit_accuracy": 4, "loss": 4, "steps_to_75": 0, "steps_to_99": 0}  # columns, decimals
EVALUATIONS, POINTS, PROBE = 25, 2000, 256  # on a curve, at most; problems that it, and that attention, is measured on
PAPER = {  # Table 2: whole answers, digits, loss
    ("add", "default"): (0.0119, 0.4059, 4.51), ("add", "svd"): (0.0087, 0.3856, 4.59),
    ("add", "opt"): (0.0339, 0.4987, 3.40), ("add", "mask"): (0.7749, 0.9386, 0.23),
    ("mul", "default"): (0.0501, 0.7078, 2.27), ("mul", "svd"): (0.1113, 0.7457, 1.77),
    ("mul", "opt"): (0.2782, 0.8237, 0.85), ("mul", "mask"): (0.6949, 0.9413, 0.20),
}


def number_or_all(text: str) -> int | str:
    """argparse type: a number of problems, or "all"."""
    try:
        return text if text == "all" else runs.number(int, 1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or: all") from None


def parser() -> argparse.ArgumentParser:
    flags = runs.parser("train_arith.py", __doc__, TASKS, INITS, PRESETS)
    add = flags.add_argument
    add("--mode", choices=["one-pass", "autoregressive"], default="one-pass",
        help="all digits of an answer at once, or one after the other (default: one-pass)")
    add("--readout", choices=["token", "mean"],
        help="one-pass: a digit from each token, or all from their mean (default: token)")
    add("--order", choices=["plain", "reversed"], help="autoregressive: of the answer's digits (default: plain)")
    add("--fraction", type=runs.number(float, above=0), nargs="+", metavar="F", help="of all pairs, shown in training")
    add("--split", type=runs.number(int, 0), default=arithmetic.SPLIT_SEED, metavar="S",
        help="which pairs are shown: a seed of its own (default: %(default)s)")
    add("--mirrors", choices=["any", "apart"], default="any",
        help="apart: ask no pair (a, b) of which (b, a) is shown (default: any)")
    add("--digits", type=runs.number(int, 2, 3), help="digits of an operand")
    add("--eval-size", type=number_or_all, metavar="N", help="evaluate on so many of the other pairs, at most, or: all")
    add("--head-dim", type=runs.number(int, 1, 2**16), help="width of a head")
    add("--mlp-dim", type=runs.number(int, 1, 2**16), help="width of the MLPs")
    add("--token-std", type=runs.number(float, 0, 1e6), help="scale of the initial token embeddings")
    add("--position-std", type=runs.number(float, 0, 1e6), help="scale of the initial position codes")
    add("--open", type=runs.LOGIT, help="mask logit of an open pair")
    add("--closed", type=runs.LOGIT, metavar="M", help="mask logit of a closed pair, as --closed=-5")
    add("--ridge", type=runs.number(float, 0, 1e6), default=0.0,
        help="svd and opt: of their solve (default: 0, a pseudo-inverse)")
    add("--bf16", action="store_true", help="train in bfloat16 autocast: twice as fast where the processor has it")
    for preset, tasks in OF_TASK.items():
        runs.describe_presets(flags, {f"{preset}, {task}": own for task, own in tasks.items()})
    return flags


def settings(argv: list[str] | None, task: str | None) -> Args:
    """The flags for one task (None: what no task has of its own): as given, else as its preset has them."""
    presets = {name: preset | OF_TASK[name].get(task or "", {}) for name, preset in PRESETS.items()}
    args = runs.parse(parser(), argv, presets, SMOKE)
    for flag, mode, usual in (("order", "autoregressive", "plain"), ("readout", "one-pass", "token")):
        if args.mode == mode:
            setattr(args, flag, getattr(args, flag) or usual)
        elif getattr(args, flag):
            runs.fail(f"--{flag} {getattr(args, flag)}: only with --mode {mode}")
    if args.mode != "one-pass" and any(INITS[name].design == "literal" for name in args.inits):
        runs.fail("--inits mask-literal: only with --mode one-pass, the paper's")
    return args


def one_fraction_each(argv: list[str] | None, tasks: list[str]) -> list[tuple[str, Args]]:
    """(task, its flags with one fraction) of all runs, in order; leaves with one line where there is no such run."""
    args_of = []
    for task in tasks:
        args = settings(argv, task)
        with runs.refused(f"--heads, --depth, {task}"):
            for init in args.inits:
                prior(args, task, init, 0)
        for part in dict.fromkeys(args.fraction):
            args_of.append((task, Args(**vars(args) | {"fraction": part})))
            with runs.refused(f"--fraction, {task}"):
                load_pairs(args_of[-1][1])
    return args_of


def load_pairs(args: Args) -> tuple[Tensor, Tensor]:
    """The pairs that training shows, and those that evaluation asks: two tensors (P, 2). ValueError if none is left.

    Evaluation takes its pairs from the end of the split: the same ones for all fractions that leave enough.
    """
    shown, asked = arithmetic.split(args.fraction, args.digits, args.split)
    if args.mirrors == "apart":
        asked = asked[~arithmetic.mirrored(shown, asked)]
        if not len(asked):
            raise ValueError(f"--mirrors apart: {len(shown)} pairs are shown, and no other is left to be asked")
    return shown, asked if args.eval_size == "all" else asked[-args.eval_size:]


def encode(args: Args, task: str, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """(inputs, answers) of pairs (P, 2): token ids (P, N), and digits (P, A) in the order in which they are written.

    An autoregressive model reads the answer too, so its inputs are whole sequences but the last token.
    """
    if args.mode == "one-pass":
        return arithmetic.encode(task, pairs, args.digits)
    sequence = arithmetic.encode_sequence(task, pairs, args.digits, args.order == "reversed")
    return sequence[:, :-1], sequence[:, arithmetic.prompt_length(args.digits):]


def digit_logits(args: Args, task: str, model: nn.Module, inputs: Tensor) -> Tensor:
    """Scores of the answers' digits, each given those before it: (B, N) -> (B, A, classes), in one pass."""
    output = model(inputs)
    if args.readout == "mean":
        return output.unflatten(-1, (-1, 10))
    return output[:, sorted(arithmetic.answer_tokens(task, args.digits, args.mode == "autoregressive"))]


@torch.no_grad()
def scores(args: Args, task: str, model: nn.Module, inputs: Tensor, answers: Tensor) -> dict[str, float]:
    """Of the model's own answers the fractions of whole ones and of digits that are right; mean loss of a digit."""
    guesses, loss = [], 0.0
    model.eval()
    for ids, answer in zip(inputs.split(1000), answers.split(1000)):
        logits = digit_logits(args, task, model, ids)
        loss += F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="sum").item()
        guess = logits.argmax(-1)
        if args.mode == "autoregressive":  # one digit after the other, from what was answered before
            guess = ids[:, :arithmetic.prompt_length(args.digits)]
            for _ in range(answer.shape[1]):
                guess = torch.cat([guess, model(guess)[:, -1:].argmax(-1)], dim=1)
            guess = guess[:, -answer.shape[1]:]
        guesses.append(guess)
    model.train()
    if not math.isfinite(loss):  # argmax over NaN would answer 0, and be right at times
        return dict.fromkeys(("exact_match", "digit_accuracy", "loss"), math.nan)
    exact, digits = arithmetic.grade(torch.cat(guesses), answers)
    return {"exact_match": exact / len(answers), "digit_accuracy": digits / answers.numel(),
            "loss": loss / answers.numel()}


def prior(args: Args, task: str, init: str, seed: int) -> list[Tensor]:
    """The supports of one run, one for each layer: 0/1, where the prior lets a token look."""
    design = INITS[init].design if args.mode == "one-pass" else "sequence"
    supports = mask_priors.ARITHMETIC[design][task](args.digits, args.depth, args.heads, args.order == "reversed")
    if INITS[init].shuffled:
        order, causal = runs.generator(seed, "shuffle"), args.mode == "autoregressive"
        supports = [inits.shuffled(support, order, causal) for support in supports]
    return supports


def build(args: Args, task: str, init: str, seed: int, inputs: Tensor) -> tuple[Encoder | GPT, list[Tensor]]:
    """The model of one run with its prior in place, and the supports, one for each layer.

    inputs: training inputs, on which svd and opt are solved.
    """
    row, tokens = INITS[init], inputs.shape[1]
    shape = {name: vars(args)[name] for name in ("dim", "depth", "heads", "head_dim", "mlp_dim")}
    model: Encoder | GPT
    if args.mode == "autoregressive":
        model = GPT(vocabulary=arithmetic.VOCABULARY, block=tokens, **shape)
    else:
        outputs, pooling = (10, "none") if args.readout == "token" else (
            10 * arithmetic.answer_width(task, args.digits), "mean")
        model = Encoder(vocabulary=10, tokens=tokens, outputs=outputs, pooling=pooling, **shape)
    init_weights(model, runs.generator(seed, "weights"), args.token_std, args.position_std)
    supports = prior(args, task, init, seed)
    if row.query_key == "impulse":
        for block, support in zip(model.transformer.blocks, supports):
            qk_init.impulse(block.attention, model.position, support.expand(args.heads, tokens, tokens))
    elif row.query_key:
        sample = torch.randperm(len(inputs), generator=runs.generator(seed, "sample"))[:256]
        gap = F.logsigmoid(torch.tensor(args.open)) - F.logsigmoid(torch.tensor(args.closed))  # as strong as the mask
        svd, opt = functools.partial(qk_init.svd, ridge=args.ridge, gap=gap.item()), functools.partial(
            qk_init.opt, ridge=args.ridge)
        qk_init.apply_layerwise({"svd": svd, "opt": opt}[row.query_key], model, inputs[sample], supports)
    for block, support in zip(model.transformer.blocks, supports):
        inits.set_prior(block.attention, row, mask_priors.to_mask(support, args.open, args.closed))
    return model, supports


def print_table(common: Args, args_of: list[tuple[str, Args]], results: list[dict]) -> None:
    """This run and, at the paper's settings, its Table 2."""
    rows = []
    for task, args in args_of:
        paper = settings(["--preset", "paper"], task)
        paper.fraction = paper.fraction[0]
        for init in common.inits:
            these = [r["metrics"] for r in results
                     if (r["task"], r["config"]["fraction"], r["init"]) == (task, args.fraction, init)]
            cells = [runs.mean_std([m[name] for m in these], digits) for name, digits in MEASURED.items()]
            figures = PAPER.get((task, init), ("-",) * 3) if records.same_settings(args, paper) else ("-",) * 3
            rows.append([f"{task} {100 * args.fraction:g}% {init}", *cells, runs.mass_cell(these), *figures])
    header = ["", "exact match", "digits", "loss", "steps to 75 %", "to 99 %", "support mass",
              "paper: exact", "digits", "loss"]
    print(f"\n{common.seeds} seed(s), mean +- standard deviation; support mass: by layer, start -> end (by chance)")
    print(runs.table(header, rows, optional=3))


def plot(common: Args, args_of: list[tuple[str, Args]], results: list[dict], path: Path) -> None:
    """Whole answers right: against the step, one panel a fraction; of several fractions, at the end against them."""
    usual: dict = {"ylabel": "whole answers right", "ylim": (-0.02, 1.02)}
    rows = []
    for task in common.tasks:
        fractions = [args.fraction for name, args in args_of if name == task]
        rows.append([usual | {"title": f"{task}, {100 * part:g} % of all pairs", "lines": pictures.series(
            results, "exact_match", task=task, fraction=part)} for part in fractions])
        if len(fractions) > 1:
            ends = {init: [([r["config"]["fraction"]], [r["metrics"]["exact_match"]]) for r in results
                           if (r["task"], r["init"], r["diverged"]) == (task, init, False)] for init in common.inits}
            rows[-1].append(usual | {"title": f"{task}, at the end", "xlabel": "fraction of all pairs",
                                     "points": True, "lines": ends})
    columns = max(map(len, rows))
    panels = [panel for row in rows for panel in row + [{}] * (columns - len(row))]
    pictures.curves(panels, common.inits, path, columns)


@runs.script
def main(argv: list[str] | None = None) -> list[dict]:
    common = settings(argv, None)
    args_of = one_fraction_each(argv, common.tasks)
    device, out = runs.pick_device(common.device), runs.open_out(common.out)
    wanted = records.wanted("arith", args_of, out, device)
    results: list[dict] = []

    for run in records.runs_left(wanted, results, [*MEASURED, *records.MASSES], ["exact_match"]):
        args, task = run.args, run.task

        # data
        shown, asked = load_pairs(args)
        (inputs, answers), (prompts, goals) = encode(args, task, shown), encode(args, task, asked)
        print(f"{run.name}: {args.digits} digits, {args.mode}, {len(inputs)} problems to learn from, {len(goals)} "
              f"others to be tested on, {args.steps} steps")

        # model and prior
        model, supports = build(args, task, run.init, run.seed, inputs)
        model.to(device)
        inputs, answers, prompts, goals = (part.to(device) for part in (inputs, answers, prompts, goals))
        probe, causal = inputs[:PROBE], args.mode == "autoregressive"
        before, start = snapshot(model, probe), logit_parts(model, probe)
        condition = None if INITS[run.init].query_key not in ("svd", "opt") else [
            qk_init.condition(x, args.ridge) for x in start.read]

        # optimiser: the mask is a group of its own, without weight decay
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=args.lr, mask_lr=args.mask_lr,
                                                       weight_decay=args.weight_decay))
        batches = runs.generator(run.seed, "batches")
        records.take_up(run, model, optimizer, batches)
        schedule = runs.cosine_schedule(optimizer, args.steps, done=run.step)

        # loop
        for step in records.steps(run):
            batch = torch.randint(len(inputs), (args.batch_size,), generator=batches)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = digit_logits(args, task, model, inputs[batch])
            loss = F.cross_entropy(logits.float().flatten(0, 1), answers[batch].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            run.loss = loss.item()
            if records.evaluation_due(step, args.steps, EVALUATIONS):
                point = {"train_loss": run.loss, **scores(args, task, model, prompts[-POINTS:], goals[-POINTS:]),
                         "support_mass": support_mass(attention_maps(model, probe), supports, causal),
                         **mechanism(start, model, probe, supports, causal)}
                records.add_point(run, point, "loss",
                                  "exact {exact_match:.2%}, digits {digit_accuracy:.2%}, loss {loss:.3f}")

        # evaluation
        metrics = scores(args, task, model, prompts, goals) | {
            "evaluated": len(goals), "mirrored": arithmetic.mirrored(shown, asked).float().mean().item(),
            "fraction": args.fraction, "mode": args.mode, "readout": args.readout, "solve_condition": condition}
        for percent in (75, 99):  # the first evaluated step with so many answers right
            metrics[f"steps_to_{percent}"] = next(
                (point["step"] for point in run.curve if point["exact_match"] >= percent / 100), None)
        metrics |= measures(before, snapshot(model, probe), supports, causal)
        results.append(records.finish(run, metrics, parameter_counts(model)))

    print_table(common, args_of, results)
    if common.plot:
        plot(common, args_of, results, out / "learning.png")
    return results


if __name__ == "__main__":
    runs.command(main)
