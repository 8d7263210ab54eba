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
from tinymask.persistence import attention_maps, measures, snapshot, support_mass
from tinymask.runs import Args
from tinymask.transformer import GPT, Encoder, init_weights, parameter_counts, parameter_groups

TASKS = list(arithmetic.OPERATIONS)
CONTROLS = ["mask-zero", "mask-frozen", "mask-shuffled", "bias", "svd-frozen", "opt-frozen"]
INITS = inits.rows(["default", "svd", "opt", "mask", "mask-literal", *CONTROLS])
READOUTS = {"token": "none", "mean": "mean"}  # as Encoder calls them
PRESETS = {
    "small": dict(steps=400, batch_size=256, lr=1e-3, weight_decay=1e-3, dim=128, depth=3, heads=4, head_dim=32,
                  mlp_dim=256, token_std=0.02, position_std=0.02, open=5.0, closed=-5.0, digits=3,
                  fraction=[0.001, 0.004], eval_size=10_000),
    # Table 8; 800 steps are 50 epochs of 4,000 pairs
    "paper": dict(steps=800, batch_size=256, lr=1e-3, weight_decay=1e-3, dim=256, depth=6, heads=4, head_dim=64,
                  mlp_dim=256, token_std=0.02, position_std=0.02, open=5.0, closed=-5.0, digits=3, fraction=[0.004],
                  eval_size=10_000),
}
OF_TASK = {  # where multiplication differs; 5,900 steps are 50 epochs of 30,000 pairs
    "small": {"mul": dict(digits=2, fraction=[0.3], eval_size=5000, token_std=1.0)},
    "paper": {"mul": dict(fraction=[0.03], steps=5900, token_std=1.0)},
}
SMOKE = dict(steps=10, dim=32, depth=4, head_dim=8, mlp_dim=32, eval_size=1000)
MEASURED = ["exact_match", "digit_accuracy", "loss", "steps_to_75", "steps_to_99"]  # the columns of the table
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
    add("--readout", choices=list(READOUTS),
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


def load_problems(args: Args, task: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], float]:
    """(inputs, answers) to learn from and to be asked: token ids (P, N) and digits (P, A); of the latter, the fraction
    whose mirror image is among the former.

    Evaluation takes its problems from the end of the split: the same ones for all fractions that leave enough.
    An autoregressive model reads the answer too, so training inputs are whole sequences but the last
    token; evaluation inputs are cut from the same encoding, up to and with "=".
    """
    shown, asked = arithmetic.split(args.fraction, args.digits, args.split)
    if args.mirrors == "apart":
        asked = asked[~arithmetic.mirrored(shown, asked)]
        if not len(asked):
            raise ValueError(f"--mirrors apart: {len(shown)} pairs are shown, and no other is left to be asked")
    if args.eval_size != "all":
        asked = asked[-args.eval_size:]
    mirrored = arithmetic.mirrored(shown, asked).float().mean().item()
    if args.mode == "one-pass":
        return arithmetic.encode(task, shown, args.digits), arithmetic.encode(task, asked, args.digits), mirrored
    prompt, reverse = arithmetic.prompt_length(args.digits), args.order == "reversed"
    train, rest = (arithmetic.encode_sequence(task, pairs, args.digits, reverse) for pairs in (shown, asked))
    return (train[:, :-1], train[:, prompt:]), (rest[:, :prompt], rest[:, prompt:]), mirrored


def digit_logits(args: Args, task: str, model: nn.Module, inputs: Tensor) -> Tensor:
    """Scores of the digits of the answers in the order in which they are written, (B, A, classes), in one pass."""
    width, output = arithmetic.answer_width(task, args.digits), model(inputs)
    if args.mode == "autoregressive":
        return output[:, -width:]
    if args.readout == "token":
        return output[:, arithmetic.answer_tokens(task, args.digits)[::-1]]
    return output.unflatten(-1, (width, 10))


@torch.no_grad()
def predict(args: Args, task: str, model: nn.Module, inputs: Tensor, answers: Tensor) -> tuple[Tensor, float]:
    """Answers of the model (P, A), and the loss: a mean over digits, each given those before it."""
    guesses, loss = [], 0.0
    model.eval()
    for prompt, answer in zip(inputs.split(1000), answers.split(1000)):
        if args.mode == "one-pass":
            logits = digit_logits(args, task, model, prompt)
            guesses.append(logits.argmax(-1))
        else:
            logits = digit_logits(args, task, model, torch.cat([prompt, answer[:, :-1]], dim=1))
            sequence = prompt  # the answer, one digit after the other, from what was answered before
            for _ in range(answer.shape[1]):
                sequence = torch.cat([sequence, model(sequence)[:, -1:].argmax(-1)], dim=1)
            guesses.append(sequence[:, prompt.shape[1]:])
        loss += F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="sum").item()
    model.train()
    return torch.cat(guesses), loss / answers.numel()


def scores(args: Args, task: str, model: nn.Module, inputs: Tensor, answers: Tensor) -> dict[str, float]:
    """The figures of the table on some problems: fractions of answers and of digits, mean loss; NaN if it is."""
    guesses, loss = predict(args, task, model, inputs, answers)
    if not math.isfinite(loss):  # argmax over NaN would answer 0, and be right at times
        return dict.fromkeys(("exact_match", "digit_accuracy", "loss"), math.nan)
    exact, digits = arithmetic.grade(guesses, answers)
    return {"exact_match": exact / len(answers), "digit_accuracy": digits / answers.numel(), "loss": loss}


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
    row, shape = INITS[init], {name: vars(args)[name] for name in ("dim", "depth", "heads", "head_dim", "mlp_dim")}
    model: Encoder | GPT
    if args.mode == "autoregressive":
        model = GPT(vocabulary=arithmetic.VOCABULARY, block=inputs.shape[1], **shape)
    else:
        outputs = 10 if args.readout == "token" else 10 * arithmetic.answer_width(task, args.digits)
        model = Encoder(vocabulary=10, tokens=inputs.shape[1], outputs=outputs, pooling=READOUTS[args.readout], **shape)
    init_weights(model, runs.generator(seed, "weights"), args.token_std, args.position_std)
    supports = prior(args, task, init, seed)
    if row.query_key:
        sample = torch.randperm(len(inputs), generator=runs.generator(seed, "sample"))[:256]
        gap = F.logsigmoid(torch.tensor(args.open)) - F.logsigmoid(torch.tensor(args.closed))  # as strong as the mask
        method = functools.partial(qk_init.svd, gap=gap.item()) if row.query_key == "svd" else qk_init.opt
        qk_init.apply_layerwise(method, model, inputs[sample], supports)
    for block, support in zip(model.transformer.blocks, supports):
        inits.set_prior(block.attention, row, mask_priors.to_mask(support, args.open, args.closed))
    return model, supports


def first_step(curve: list[dict], accuracy: float) -> int | None:
    """The first evaluated step with so many answers right, None if there is none."""
    return next((point["step"] for point in curve if point["exact_match"] >= accuracy), None)


def print_table(common: Args, args_of: list[tuple[str, Args]], results: list[dict]) -> None:
    """This run and, at the paper's settings, its Table 2."""
    rows = []
    for task, args in args_of:
        paper = settings(["--preset", "paper"], task)
        paper.fraction = paper.fraction[0]
        for init in common.inits:
            these = [r["metrics"] for r in results
                     if (r["task"], r["config"]["fraction"], r["init"]) == (task, args.fraction, init)]
            cells = [runs.mean_std([m[name] for m in these], 4 * (name in MEASURED[:3])) for name in MEASURED]
            figures = PAPER.get((task, init), ("-",) * 3) if records.same_settings(args, paper) else ("-",) * 3
            rows.append([f"{task} {100 * args.fraction:g}% {init}", *cells, runs.mass_cell(these), *figures])
    header = ["", "exact match", "digits", "loss", "steps to 75 %", "to 99 %", "support mass",
              "paper: exact", "digits", "loss"]
    print(f"\n{common.seeds} seed(s), mean +- standard deviation; support mass: the least layer's, start -> end")
    print(runs.table(header, rows, optional=3))


def plot(common: Args, args_of: list[tuple[str, Args]], results: list[dict], path: Path) -> None:
    """Whole answers right: against the step, one panel a fraction; and at the end against the fraction."""
    shown = {task: [args.fraction for name, args in args_of if name == task] for task in common.tasks}
    columns, panels = max(map(len, shown.values())) + 1, []
    usual: dict = {"ylabel": "whole answers right", "ylim": (-0.02, 1.02)}
    for task, fractions in shown.items():
        panels += [usual | {"title": f"{task}, {100 * part:g} % of all pairs", "lines": pictures.series(
            results, "exact_match", task=task, fraction=part)} for part in fractions]
        ends: dict[str, list] = {}
        for r in (r for r in results if r["task"] == task and not r["diverged"]):
            ends.setdefault(r["init"], []).append(([r["config"]["fraction"]], [r["metrics"]["exact_match"]]))
        panels.append(usual | {"title": f"{task}, at the end", "xlabel": "fraction of all pairs", "points": True,
                               "lines": ends} if len(fractions) > 1 else {})
        panels += [{}] * (columns - len(fractions) - 1)
    pictures.curves(panels, common.inits, path, columns)


@runs.script
def main(argv: list[str] | None = None) -> list[dict]:
    common = settings(argv, None)
    args_of = []  # (task, flags with one fraction)
    for task in common.tasks:
        args = settings(argv, task)
        for part in dict.fromkeys(args.fraction):
            args_of.append((task, Args(**vars(args) | {"fraction": part})))
    for task, args in args_of:
        with runs.refused(f"--fraction, {task}"):
            arithmetic.split(args.fraction, args.digits)
            if args.mirrors == "apart":
                load_problems(args, task)
        with runs.refused(f"--heads, --depth, {task}"):
            prior(args, task, "mask", 0)
    if common.plot:
        with runs.refused("--plot"):
            pictures.require()
    device, out = runs.pick_device(common.device), runs.open_out(common.out)
    wanted = records.wanted("arith", args_of, out, device)
    results: list[dict] = []

    for run in records.runs_left(wanted, results, [*MEASURED, *records.MASSES], ["exact_match"]):
        args, task = run.args, run.task

        # data
        (inputs, answers), (prompts, goals), mirrored = load_problems(args, task)
        print(f"{run.name}: {args.digits} digits, {args.mode}, {len(inputs)} problems to learn from, {len(goals)} "
              f"others to be tested on, {args.steps} steps")

        # model and prior
        model, supports = build(args, task, run.init, run.seed, inputs)
        model.to(device)
        inputs, answers, prompts, goals = (part.to(device) for part in (inputs, answers, prompts, goals))
        probe, causal = inputs[:PROBE], args.mode == "autoregressive"
        before = snapshot(model, probe)

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
                         "support_mass": support_mass(attention_maps(model, probe), supports, causal)}
                records.add_point(run, point, "loss", "exact {exact_match:.2%}, digits {digit_accuracy:.2%}, "
                                                      "loss {loss:.3f}")

        # evaluation
        metrics = scores(args, task, model, prompts, goals) | {
            "evaluated": len(goals), "mirrored": mirrored, "fraction": args.fraction, "mode": args.mode,
            "readout": args.readout, "steps_to_75": first_step(run.curve, 0.75),
            "steps_to_99": first_step(run.curve, 0.99)} | measures(before, snapshot(model, probe), supports, causal)
        results.append(records.finish(run, metrics, parameter_counts(model)))

    print_table(common, args_of, results)
    if common.plot:
        plot(common, args_of, results, out / "learning.png")
    return results


if __name__ == "__main__":
    runs.command(main)
