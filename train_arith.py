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
import itertools
import math
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

from tinymask import arithmetic, mask_priors, pictures, qk_init, records, runs
from tinymask.persistence import attention_maps, measures, snapshot, support_mass
from tinymask.transformer import GPT, Encoder, init_weights, parameter_counts, parameter_groups

TASKS = list(arithmetic.OPERATIONS)
CONTROLS = ["mask-zero", "mask-frozen", "mask-shuffled", "bias", "svd-frozen", "opt-frozen"]
INITS = ["default", "svd", "opt", "mask", "mask-literal", *CONTROLS]
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
EVALUATIONS, PROBE = 25, 2000  # points on a curve, at most; problems that it is measured on
PAPER_FRACTION = {"add": 0.004, "mul": 0.03}
PAPER = {  # Table 2: whole answers, digits, loss
    ("add", "default"): (0.0119, 0.4059, 4.51), ("add", "svd"): (0.0087, 0.3856, 4.59),
    ("add", "opt"): (0.0339, 0.4987, 3.40), ("add", "mask"): (0.7749, 0.9386, 0.23),
    ("mul", "default"): (0.0501, 0.7078, 2.27), ("mul", "svd"): (0.1113, 0.7457, 1.77),
    ("mul", "opt"): (0.2782, 0.8237, 0.85), ("mul", "mask"): (0.6949, 0.9413, 0.20),
}


def size(text):
    """argparse type: a number of problems, or "all"."""
    try:
        return text if text == "all" else runs.whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or: all") from None


def parser():
    flags = runs.parser("train_arith.py", __doc__, TASKS, INITS, PRESETS)
    add = flags.add_argument
    add("--mode", choices=["one-pass", "autoregressive"], default="one-pass",
        help="all digits of an answer at once, or one after the other (default: one-pass)")
    add("--readout", choices=list(READOUTS),
        help="one-pass: a digit from each token, or all from their mean (default: token)")
    add("--order", choices=["plain", "reversed"], help="autoregressive: of the answer's digits (default: plain)")
    add("--fraction", type=runs.real(above=0), nargs="+", metavar="F", help="of all pairs, shown in training")
    add("--split", type=runs.whole(0), default=arithmetic.SPLIT_SEED, metavar="S",
        help="which pairs are shown: a seed of its own (default: %(default)s)")
    add("--digits", type=runs.whole(2, 3), help="digits of an operand")
    add("--eval-size", type=size, metavar="N", help="evaluate on so many of the other pairs, at most, or: all")
    add("--head-dim", type=runs.whole(1, 2**16), help="width of a head")
    add("--mlp-dim", type=runs.whole(1, 2**16), help="width of the MLPs")
    add("--token-std", type=runs.real(low=0, high=1e6), help="scale of the initial token embeddings")
    add("--position-std", type=runs.real(low=0, high=1e6), help="scale of the initial position codes")
    add("--open", type=runs.real(), help="mask logit of an open pair")
    add("--closed", type=runs.real(), metavar="M", help="mask logit of a closed pair, as --closed=-5")
    add("--bf16", action="store_true", help="train in bfloat16 autocast: twice as fast where the processor has it")
    for preset, tasks in OF_TASK.items():
        runs.describe_presets(flags, {f"{preset}, {task}": own for task, own in tasks.items()})
    return flags


def settings(argv, task):
    """The flags for one task: as given, else as its preset has them."""
    presets = {name: preset | OF_TASK[name].get(task, {}) for name, preset in PRESETS.items()}
    args = runs.parse(parser(), argv, presets, SMOKE)
    for flag, mode, usual in (("order", "autoregressive", "plain"), ("readout", "one-pass", "token")):
        if args.mode == mode:
            setattr(args, flag, getattr(args, flag) or usual)
        elif getattr(args, flag):
            runs.fail(f"--{flag} {getattr(args, flag)}: only with --mode {mode}")
    if "mask-literal" in args.inits and args.mode != "one-pass":
        runs.fail("--inits mask-literal: only with --mode one-pass, the paper's")
    return args


def load_problems(args, task):
    """(inputs, answers) for training, and for evaluation: token ids (P, N) and digits (P, A).

    Evaluation takes its problems from the end of the split: the same ones for all fractions that leave enough.
    An autoregressive model reads the answer too, so training inputs are whole sequences but the last
    token; evaluation inputs are cut from the same encoding, up to and with "=".
    """
    train, rest = arithmetic.split(args.fraction, args.digits, args.split)
    if args.eval_size != "all":
        rest = rest[-args.eval_size:]
    if args.mode == "one-pass":
        return arithmetic.encode(task, train, args.digits), arithmetic.encode(task, rest, args.digits)
    prompt, reverse = arithmetic.prompt_length(args.digits), args.order == "reversed"
    train, rest = (arithmetic.encode_sequence(task, pairs, args.digits, reverse) for pairs in (train, rest))
    return (train[:, :-1], train[:, prompt:]), (rest[:, :prompt], rest[:, prompt:])


def digit_logits(args, task, model, inputs):
    """Scores of the digits of the answers, (B, A, classes), all in one forward pass."""
    width = arithmetic.answer_width(task, args.digits)
    output = model(inputs)
    if args.mode == "autoregressive":
        return output[:, -width:]
    if args.readout == "token":
        return output[:, arithmetic.answer_tokens(task, args.digits)]
    return output.unflatten(-1, (width, 10))


@torch.no_grad()
def predict(args, task, model, inputs, answers):
    """Answers of the model (P, A), and the loss: a mean over digits, each given those before it."""
    guesses, loss = [], 0.0
    model.eval()
    for prompt, answer in zip(inputs.split(1000), answers.split(1000)):
        if args.mode == "one-pass":
            logits = digit_logits(args, task, model, prompt)
            guess = logits.argmax(-1)
        else:
            logits = digit_logits(args, task, model, torch.cat([prompt, answer[:, :-1]], dim=1))
            sequence = prompt  # the answer, one digit after the other, from what was answered before
            for _ in range(answer.shape[1]):
                sequence = torch.cat([sequence, model(sequence)[:, -1:].argmax(-1)], dim=1)
            guess = sequence[:, prompt.shape[1]:]
        guesses.append(guess)
        loss += F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="sum").item()
    model.train()
    return torch.cat(guesses), loss / answers.numel()


def scores(args, task, model, inputs, answers):
    """The figures of the table on some problems: fractions of answers and of digits, mean loss; NaN if it is."""
    guesses, loss = predict(args, task, model, inputs, answers)
    if not math.isfinite(loss):  # argmax over NaN would answer 0, and be right at times
        return dict.fromkeys(("exact_match", "digit_accuracy", "loss"), math.nan)
    exact, digits = arithmetic.grade(guesses, answers)
    return {"exact_match": exact / len(answers), "digit_accuracy": digits / answers.numel(), "loss": loss}


def prior(args, task, init, seed):
    """The supports of one run, one for each layer: 0/1, where the prior lets a token look."""
    designs = mask_priors.ARITHMETIC_LITERAL if init == "mask-literal" else mask_priors.ARITHMETIC[args.mode]
    supports = designs[task](args.digits, args.depth, args.heads, args.order == "reversed")
    if init == "mask-shuffled":
        order, causal = runs.generator(seed, "shuffle"), args.mode == "autoregressive"
        supports = [mask_priors.shuffled(support, order, causal) for support in supports]
    return supports


def build(args, task, init, seed, inputs):
    """The model of one run with its prior in place, and the supports, one for each layer.

    Every init of a seed starts from the same weights, apart from what it sets. inputs: training inputs,
    on which svd and opt are solved.
    """
    width = arithmetic.answer_width(task, args.digits)
    shape = (args.dim, args.depth, args.heads, args.head_dim, args.mlp_dim)
    if args.mode == "autoregressive":
        model = GPT(arithmetic.VOCABULARY, inputs.shape[1], *shape)
    else:
        outputs = 10 if args.readout == "token" else 10 * width
        model = Encoder(10, inputs.shape[1], outputs, *shape, pooling=READOUTS[args.readout])
    init_weights(model, runs.generator(seed, "weights"), args.token_std, args.position_std)
    supports = prior(args, task, init, seed)
    if init.startswith(("svd", "opt")):
        sample = torch.randperm(len(inputs), generator=runs.generator(seed, "sample"))[:256]
        gap = F.logsigmoid(torch.tensor(args.open)) - F.logsigmoid(torch.tensor(args.closed))  # as strong as the mask
        method = functools.partial(qk_init.svd, gap=gap.item()) if init.startswith("svd") else qk_init.opt
        qk_init.apply_layerwise(method, model, inputs[sample], supports)
    for block, support in zip(model.transformer.blocks, supports):
        mask_priors.place(block.attention, init, mask_priors.to_mask(support, args.open, args.closed))
    return model, supports


def first_step(curve, accuracy):
    """The first evaluated step with so many answers right, None if there is none."""
    return next((point["step"] for point in curve if point["exact_match"] >= accuracy), None)


def print_table(common, args_of, results):
    """This run beside the paper's Table 2."""
    rows = []
    for (task, fraction), init in itertools.product(args_of, common.inits):
        these = [r["metrics"] for r in results
                 if (r["task"], r["config"]["fraction"], r["init"]) == (task, fraction, init)]
        cells = [runs.mean_std([m[name] for m in these]) for name in MEASURED[:3]]
        steps = [runs.mean_std([m[name] for m in these], 0) for name in MEASURED[3:]]
        args = args_of[task, fraction]
        same = (args.mode, args.digits, fraction, args.smoke) == ("one-pass", 3, PAPER_FRACTION.get(task), False)
        paper = PAPER.get((task, init), ("-",) * 3) if same else ("-",) * 3
        rows.append([f"{task} {100 * fraction:g}% {init}", *cells, *steps, runs.mass_cell(these), *paper])
    header = ["", "exact match", "digits", "loss", "steps to 75 %", "to 99 %", "support mass",
              "paper: exact", "digits", "loss"]
    print(f"\n{common.seeds} seed(s), mean +- standard deviation; support mass: the least layer's, start -> end")
    print(runs.table(header, rows))


def main(argv=None):
    common = settings(argv, None)  # what no task has of its own
    args_of = {}  # (task, fraction) -> flags, with that one fraction
    for task in common.tasks:
        args = settings(argv, task)
        for fraction in dict.fromkeys(args.fraction):
            args_of[task, fraction] = argparse.Namespace(**vars(args) | {"fraction": fraction})
    if common.plot:
        pictures.pyplot()  # a missing matplotlib is said before the training, not after it
    for (task, fraction), args in args_of.items():
        try:
            arithmetic.split(fraction, args.digits)
        except ValueError as error:
            runs.fail(f"--fraction, {task}: {error}")
        try:
            for init in common.inits:
                prior(args, task, init, 0)
        except ValueError as error:
            runs.fail(f"--heads, --depth, {task}: {error}")
    device = runs.pick_device(common.device)
    out = runs.open_out(common.out)
    finished = records.read_results(out, [*MEASURED, *records.MASSES], ["exact_match"]) if common.resume else {}
    print(f"device {device}, {torch.get_num_threads()} threads, torch {torch.__version__}, results in {out}")
    results = []

    for (task, fraction), init, seed in itertools.product(args_of, common.inits, runs.seeds(common)):
        args = args_of[task, fraction]
        key = records.run_key(vars(args), task, init, seed)
        if key in finished:
            results.append(finished[key])
            continue

        # data
        (inputs, answers), (prompts, goals) = load_problems(args, task)
        name = f"{task} {100 * fraction:g}% {init} seed {seed}"
        print(f"{name}: {args.digits} digits, {args.mode}, {len(inputs)} problems to learn from, {len(goals)} others "
              f"to be tested on, {args.steps} steps")

        # model and prior
        model, supports = build(args, task, init, seed, inputs)
        model.to(device)
        inputs, answers, prompts, goals = (part.to(device) for part in (inputs, answers, prompts, goals))
        few, causal = inputs[:256], args.mode == "autoregressive"  # few: the inputs on which attention is looked at
        before = snapshot(model, few)

        # optimiser: the mask is a group of its own, without weight decay
        optimizer = torch.optim.AdamW(parameter_groups(model, args.lr, args.mask_lr, args.weight_decay))
        batches = runs.generator(seed, "batches")
        checkpoint = out / "checkpoints" / f"{key}.pt"
        step, curve, seconds = records.resume(checkpoint, model, optimizer, batches) if args.resume else (0, [], 0.0)

        # loop
        bar = tqdm(total=args.steps, initial=step, desc=name, disable=None, leave=False)
        start, diverged = time.perf_counter() - seconds, False
        while step < args.steps and not diverged:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * runs.cosine(step, args.steps)
            batch = torch.randint(len(inputs), (args.batch_size,), generator=batches)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = digit_logits(args, task, model, inputs[batch])
            loss = F.cross_entropy(logits.float().flatten(0, 1), answers[batch].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            bar.update()
            diverged = not math.isfinite(loss.item())
            if step * EVALUATIONS // args.steps > (step - 1) * EVALUATIONS // args.steps:
                point = scores(args, task, model, prompts[-PROBE:], goals[-PROBE:])
                masses = support_mass(attention_maps(model, few), supports, causal)
                curve.append({"step": step, "train_loss": loss.item(), **point, "support_mass": masses})
                diverged = diverged or not math.isfinite(point["loss"])
                line = "step {step}: exact {exact_match:.2%}, digits {digit_accuracy:.2%}, loss {loss:.3f}"
                runs.report(bar, name, line.format(**curve[-1]))
            if not diverged and (runs.interrupted() or step % 500 == 0):  # long runs can be taken up again
                seconds = time.perf_counter() - start
                records.checkpoint(checkpoint, model, optimizer, batches, step, curve, seconds)
        bar.close()
        seconds = time.perf_counter() - start

        # evaluation
        metrics = scores(args, task, model, prompts, goals) | {
            "evaluated": len(goals), "fraction": fraction, "mode": args.mode, "readout": args.readout,
            "steps_to_75": first_step(curve, 0.75), "steps_to_99": first_step(curve, 0.99),
        } | measures(before, snapshot(model, few), supports, causal)
        records.save(checkpoint, {"model": model.state_dict(), "step": step})
        results.append(records.record(out, args, "arith", task, init, seed, metrics=metrics, curve=curve, steps=step,
                                   seconds=seconds, params=parameter_counts(model), device=device, diverged=diverged))
        if diverged:
            print(f"{name}: diverged at step {step}")

    print_table(common, args_of, results)
    if common.plot:
        pictures.learning(results, common.tasks, common.inits, out / "learning.png")
    return results


if __name__ == "__main__":
    runs.command(main)
