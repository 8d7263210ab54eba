"""What the scripts share and nobody comes to read: flags, devices, seeds, exit statuses, tables.

Functions only, and none of them takes a loop body: the training loops stand in the scripts.
"""
import argparse
import hashlib
import math
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import torch

_interrupted, _ready = [], []  # Ctrl-C was pressed; there is something to save


# -- flags ------------------------------------------------------------------------------------


def fail(message, status=2):
    """Leave with one line on stderr."""
    if sys.stderr is not None:
        print("error: " + " ".join(str(message).split("\n")), file=sys.stderr)
    raise SystemExit(status)


def first_line(error):
    """What an exception says, as one line that is never empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def whole(low, high=2**31 - 1):
    """argparse type: a whole number in [low, high]."""

    def convert(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"wanted a whole number from {low} to {high}, got {text!r}")
        return value

    return convert


def real(low=-math.inf, above=-math.inf, high=1e30):
    """argparse type: a finite number that is at least low, greater than above and at most high."""

    def convert(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (abs(value) <= high and value >= low and value > above):  # 1e30: inside float32
            limits = [f"at least {low:g}"] * (low > -math.inf) + [f"above {above:g}"] * (above > -math.inf)
            limits += [f"at most {high:g}"] * (high < 1e30)
            raise argparse.ArgumentTypeError(" ".join(["wanted a finite number", *limits]) + f", got {text!r}")
        return value

    return convert


def parser(script, description, tasks, inits, presets, flag="tasks", rows=4):
    """The command line that all scripts share. presets: name -> {flag: default}; the script adds its own flags.

    flag: what tasks are called; by default all of them run, with the first `rows` of inits.
    """
    flags = argparse.ArgumentParser(prog=script, description=description, allow_abbrev=False, epilog="",
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    describe_presets(flags, presets)
    flags.error = fail  # one line, without the usage
    add = flags.add_argument
    add("--preset", choices=list(presets), default="small", help="small: minutes on two cores; paper: its settings")
    add(f"--{flag}", nargs="+", choices=tasks, metavar="TASK", default=tasks, help="of: " + " ".join(tasks))
    add("--inits", nargs="+", choices=inits, metavar="INIT", default=inits[:rows],
        help=f"of: {' '.join(inits)} (default: {' '.join(inits[:rows])})")
    add("--seeds", type=whole(1, 10**6), default=1, metavar="N", help="how many seeds (default: 1)")
    add("--first-seed", type=whole(0), default=0, metavar="S", help="the first of them (default: 0)")
    add("--steps", type=whole(1), help="optimiser steps")
    add("--batch-size", type=whole(1, 2**20), help="examples a step")
    add("--lr", type=real(above=0), help="peak learning rate")
    add("--mask-lr", type=real(low=0), help="the mask's own learning rate (default: as --lr)")
    add("--weight-decay", type=real(low=0), help="of all parameters but the mask")
    add("--dim", type=whole(1, 2**16), help="width of the model")
    add("--depth", type=whole(1, 1000), help="layers")
    add("--heads", type=whole(1, 1000), help="attention heads")
    add("--device", default="auto", help="auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps")
    name = f"runs/{script[6:-3]}"
    add("--out", metavar="DIR", help=f"where results go (default: {name}, with --smoke {name}-smoke)")
    add("--smoke", action="store_true", help="a few tiny steps of everything, to see that it runs")
    add("--resume", action="store_true", help="skip finished runs, go on inside unfinished ones")
    add("--plot", action="store_true", help="draw figures from the results (extra plot: matplotlib)")
    return flags


def describe_presets(flags, presets):
    """Add what presets say, name -> {flag: value}, to the end of --help."""
    for name, preset in presets.items():
        values = ", ".join(f"{option.replace('_', '-')} {value}" for option, value in preset.items())
        flags.epilog += f"preset {name}: {values}\n"


def parse(flags, argv, presets, smoke):
    """Parse argv; flags not given take the preset's value, and `smoke`'s with --smoke."""
    args = flags.parse_args(argv)
    for name, value in (presets[args.preset] | (smoke if args.smoke else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.mask_lr is None:
        args.mask_lr = args.lr
    if args.out is None:
        args.out = f"runs/{flags.prog[6:-3]}" + "-smoke" * args.smoke  # apart from real results
    for name in {"tasks", "dataset", "inits"} & vars(args).keys():
        setattr(args, name, list(dict.fromkeys(getattr(args, name) or [])))  # named twice, run once
    return args


def pick_device(name):
    """torch.device of --device. A named device that is missing is an error, not a silent fallback."""
    if name.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
        fail(f"--device {name}: wanted auto, cpu, cuda, cuda:N or mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "mps" and not torch.backends.mps.is_available():
        fail("--device mps: not on this machine")
    try:
        chosen = torch.device(name)
        torch.zeros(1, device=chosen)
    except Exception as error:  # torch raises many kinds here, RuntimeError and AssertionError among them
        fail(f"--device {name}: {first_line(error)}")
    return chosen


def open_out(path):
    """Make the folder of --out and write to it, before any training. Returns its Path."""
    folder = Path(path)
    try:
        if not str(path):
            raise ValueError("the name is empty")
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        if (folder / "results.jsonl").exists() and not (folder / "results.jsonl").is_file():
            raise ValueError("results.jsonl is no file")
        for writable in (folder, folder / "checkpoints"):
            with tempfile.TemporaryFile(dir=writable) as file:
                file.write(b"x")
        if os.path.lexists(folder / "results.jsonl"):
            open(folder / "results.jsonl", "a+b").close()
    except (OSError, ValueError) as error:
        fail(f"--out {path}: cannot write there ({getattr(error, 'strerror', None) or error})")
    _ready.append(folder)
    return folder


def seeds(args):
    """The seeds of --first-seed and --seeds, a range."""
    return range(args.first_seed, args.first_seed + args.seeds)


def generator(seed, purpose):
    """A CPU generator for one purpose ("weights", "batches", ...), so that no use of one moves another."""
    digest = hashlib.sha256(f"{purpose} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


# -- running and printing ---------------------------------------------------------------------


def cosine(step, steps, warmup=20):
    """Factor on the learning rate: half a cosine from 1 to 0 at `steps`, times a linear rise over `warmup` steps."""
    return min(1.0, (step + 1) / max(1, warmup)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def interrupt():
    """What Ctrl-C does: every loop finishes its step, saves and leaves."""
    _interrupted.append(True)


def interrupted():
    """True once Ctrl-C was pressed in training: a loop then finishes its step, saves and leaves with status 130."""
    return bool(_interrupted)


def command(main):
    """Run a script's main as a process: Ctrl-C, a closed pipe and diverged runs become exit statuses."""

    def stop(signum, frame):
        if not _ready:
            raise KeyboardInterrupt
        interrupt()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C stops at once

    signal.signal(signal.SIGINT, stop)
    if sys.stderr is None:  # `2>&-`: where bars and errors would go
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")  # a console that lacks a character of --out
    try:
        results = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:  # `| head -1`, or a full disk behind standard output
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from None
        fail(first_line(error), status=1)
    raise SystemExit(130 if interrupted() else 1 if any(result["diverged"] for result in results) else 0)


def report(bar, name, line):
    """One evaluation: on the bar of a terminal, and as a plain line where the output is no terminal."""
    if bar.disable or not sys.stdout.isatty():
        print(f"{name} {line}", flush=True)
    bar.set_postfix_str(line)


def mean_std(values, digits=4):
    """'0.1234 +- 0.0123' over seeds, '0.1234' for one, '-' where a value is missing."""
    if not values or any(value is None for value in values):
        return "-"
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} +- {statistics.stdev(values):.{digits}f}"


def mass_cell(metrics):
    """'start -> end': support mass of the layer that keeps least, over seeds; '-' where a layer has none."""
    least = [[None if None in m[f"support_mass_{when}"] else min(m[f"support_mass_{when}"]) for m in metrics]
             for when in ("init", "final")]
    return " -> ".join(mean_std(values, 2) for values in least)


def table(header, rows):
    """Plain text columns, ASCII: the first left, the others right aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]).rstrip()
             for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
