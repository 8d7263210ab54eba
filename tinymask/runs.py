"""What the scripts share and nobody comes to read: flags, devices, seeds, signals, exit statuses, tables.

Functions only, and none of them takes a loop body: the training loops stand in the scripts.
"""
import argparse
import contextlib
import difflib
import functools
import hashlib
import http.client
import math
import os
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LambdaLR

from tinymask import pictures

Args = argparse.Namespace  # the flags of a command line
_signals: list[int] = []  # that asked to stop: SIGINT (Ctrl-C) or SIGTERM
_open_folders: list[Path] = []  # of --out: from then on there is something to save


# -- flags ------------------------------------------------------------------------------------


def fail(message: object, status: int = 2) -> NoReturn:
    """Leave with one line on stderr."""
    if sys.stderr is not None:
        print("error: " + " ".join(str(message).split("\n")), file=sys.stderr)
    raise SystemExit(status)


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """A ValueError or OSError about a flag's value or a file becomes the one line that a user gets."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(f"{what}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """What an exception says, as one line that is never empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def number(kind: type, low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> Callable:
    """argparse type: an int or a finite float in [low, high] and greater than above."""

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high and value > above and abs(value) <= 1e30:  # inside float32
                return value
        limits = [f"{word} {limit:g}" for word, limit in (("at least", low), ("above", above), ("at most", high))
                  if abs(limit) < math.inf]
        raise argparse.ArgumentTypeError(" ".join(["wanted a whole number" if kind is int else "wanted a finite number",
                                                   *limits]) + f", got {text!r}")

    return convert


LOGIT = number(float, low=-1e4, high=1e4)  # what a mask can hold, see attention.LIMIT


def parser(script: str, description: str | None, tasks: list[str], inits: Iterable[str], presets: dict,
           flag: str = "tasks", rows: int = 4) -> argparse.ArgumentParser:
    """The command line that all scripts share. presets: name -> {flag: default}; the script adds its own flags.

    flag: what tasks are called; by default all of them run, with the first `rows` of inits.
    """
    flags = argparse.ArgumentParser(prog=script, description=description, allow_abbrev=False, epilog="",
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    describe_presets(flags, presets)
    flags.error = functools.partial(_refuse, flags)  # type: ignore[method-assign]  # one line, without the usage
    add, names = flags.add_argument, list(inits)
    add("--preset", choices=list(presets), default="small", help="small: minutes on two cores; paper: its settings")
    add(f"--{flag}", nargs="+", choices=tasks, metavar="TASK", default=tasks, help="of: " + " ".join(tasks))
    add("--inits", nargs="+", choices=names, metavar="INIT", default=names[:rows],
        help=f"of: {' '.join(names)} (default: {' '.join(names[:rows])})")
    add("--seeds", type=number(int, 1, 10**6), default=1, metavar="N", help="how many seeds (default: 1)")
    add("--first-seed", type=number(int, 0), default=0, metavar="S", help="the first of them (default: 0)")
    add("--steps", type=number(int, 1), help="optimiser steps")
    add("--batch-size", type=number(int, 1, 2**20), help="examples a step")
    add("--lr", type=number(float, above=0), help="peak learning rate")
    add("--mask-lr", type=number(float, 0), help="the mask's own learning rate (default: as --lr)")
    add("--weight-decay", type=number(float, 0), help="of all parameters but the mask")
    add("--dim", type=number(int, 1, 2**16), help="width of the model")
    add("--depth", type=number(int, 1, 1000), help="layers")
    add("--heads", type=number(int, 1, 1000), help="attention heads")
    add("--device", default="auto", help="auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps")
    name = f"runs/{script[6:-3]}"
    add("--out", metavar="DIR", type=os.path.expanduser,
        help=f"where results go (default: {name}, with --smoke {name}-smoke)")
    add("--smoke", action="store_true", help="a few tiny steps of everything, to see that it runs")
    add("--resume", action="store_true", help="skip finished runs, go on inside unfinished ones")
    add("--plot", action="store_true", help="draw figures from the results (extra plot: matplotlib)")
    return flags


def _refuse(flags: argparse.ArgumentParser, message: str) -> NoReturn:
    """argparse's error as one line, with the flag that a wrong one looks like."""
    wrong = message.removeprefix("unrecognized arguments: ").split(" ")[0].split("=")[0]
    close = difflib.get_close_matches(wrong, flags._option_string_actions, n=1) if wrong.startswith("-") else []
    fail(message + "".join(f"; did you mean {flag}?" for flag in close))


def describe_presets(flags: argparse.ArgumentParser, presets: dict) -> None:
    """Add what presets say, name -> {flag: value}, to the end of --help."""
    for name, preset in presets.items():
        values = ", ".join(f"{option.replace('_', '-')} {value}" for option, value in preset.items())
        flags.epilog = f"{flags.epilog}preset {name}: {values}\n"


def parse(flags: argparse.ArgumentParser, argv: list[str] | None, presets: dict, smoke: dict) -> Args:
    """Parse argv; flags not given take the preset's value, and `smoke`'s with --smoke. --plot needs matplotlib."""
    args = flags.parse_args(argv)
    if args.plot:
        with refused("--plot"):
            pictures.require()
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


def pick_device(name: str) -> torch.device:
    """torch.device of --device. A named device that is missing is an error, not a silent fallback."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if name.split(":")[0] not in ("cpu", "cuda", "mps"):
            raise ValueError("wanted auto, cpu, cuda, cuda:N or mps")
        torch.zeros(1, device=name)
        return torch.device(name)
    except Exception as error:  # torch raises many kinds here, RuntimeError and AssertionError among them
        fail(f"--device {name}: {first_line(error)}")


def open_out(path: str) -> Path:
    """Make the folder of --out and write to it, before any training. Returns its Path."""
    folder, lines = Path(path), Path(path) / "results.jsonl"
    try:
        if not path or lines.exists() and not lines.is_file():
            raise ValueError("results.jsonl is no file" if path else "the name is empty")
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        for writable in (folder, folder / "checkpoints"):
            with tempfile.TemporaryFile(dir=writable) as file:
                file.write(b"x")
        if os.path.lexists(lines):
            open(lines, "a+b").close()
    except (OSError, ValueError) as error:
        fail(f"--out {path}: cannot write there ({getattr(error, 'strerror', None) or error})")
    _open_folders.append(folder)
    return folder


def generator(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose ("weights", "batches", ...), so that no use of one moves another."""
    digest = hashlib.sha256(f"{purpose} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def cosine_schedule(optimizer: torch.optim.Optimizer, steps: int, warmup: int = 20, done: int = 0) -> LambdaLR:
    """Learning rates: half a cosine from each group's own to 0 at `steps`, times a linear rise over `warmup` steps.

    done: steps that a resumed run has taken.
    """
    def factor(step: int) -> float:
        return min(1.0, (step + 1) / max(1, warmup)) * 0.5 * (1 + math.cos(math.pi * step / steps))

    return LambdaLR(optimizer, factor, last_epoch=done - 1)


def download(url: str, path: Path, sha256: str) -> None:
    """Fetch one official file to path, unless it is there; only --download calls this. ValueError if it cannot be had.

    It is written beside its place and moved there once the checksum is right: a path that exists is whole.
    """
    if path.exists():
        return
    made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=sha256, progress=sys.stderr.isatty())
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise ValueError(f"{url}: {first_line(error)}; put the file into {path.parent} by hand, or try again") from None
    finally:
        with contextlib.suppress(OSError):  # a folder that has something in it stays
            for folder in made:
                folder.rmdir()


# -- a script as a process ------------------------------------------------------------------------


def stop_requested() -> int | None:
    """The signal that asked to stop, None if there was none. A loop then saves and leaves with status 128 + signal."""
    return _signals[0] if _signals else None


def script(main: Callable[[list[str] | None], list]) -> Callable[..., list]:
    """A script's main: Ctrl-C and SIGTERM let its loop finish a step and save, and are afterwards handled as before
    (a notebook lives on). Out of memory is one line, status 1."""
    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> list:
        try:
            with _signals_handled():
                return main(argv)
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if isinstance(error, MemoryError) or re.search("(allocate|enough|out of) memory", str(error)):
                fail(f"out of memory ({first_line(error)}): try a smaller --batch-size or model", status=1)
            raise
        finally:
            _open_folders.clear()

    return wrapped


@contextlib.contextmanager
def _signals_handled() -> Iterator[None]:
    def handle(signum: int, frame: Any) -> None:
        if not _open_folders:  # nothing to save yet
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
        _signals.append(signum)
        signal.signal(signum, before[signum])  # a second one stops at once

    _signals.clear()
    before: dict[int, Any] = {}
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: signals are somebody else's
                before[signum] = signal.signal(signum, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def command(main: Callable[[], list]) -> NoReturn:
    """Run a script's main as a process: Ctrl-C, a closed pipe and diverged runs become exit statuses."""
    if sys.stderr is None:  # `2>&-`: where bars and errors would go
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    errors = getattr(sys.stdout, "errors", None)
    reconfigure = getattr(sys.stdout, "reconfigure", lambda **_: None)  # a notebook's stream has none
    reconfigure(errors="replace")  # a console that lacks a character of --out
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
    finally:
        reconfigure(errors=errors)
    signum = stop_requested()
    raise SystemExit(128 + signum if signum else int(any(result["diverged"] for result in results)))


# -- tables -----------------------------------------------------------------------------------


def mean_std(values: list, digits: int = 4) -> str:
    """'0.1234 +- 0.0123' over seeds, '0.1234' for one, '-' where a value is missing."""
    if not values or any(value is None for value in values):
        return "-"
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} +- {statistics.stdev(values):.{digits}f}"


def mass_cell(metrics: list[dict]) -> str:
    """'0.97 0.96 -> 0.94 0.73 (0.07 0.07)': support mass of each layer at the start and at the end, and what chance
    gives, means over seeds; of more than four layers the first and the last. '-' where a layer has none."""
    def means(name: str) -> str:
        layers = list(zip(*(m.get(name) or [] for m in metrics)))
        shown = layers if len(layers) < 5 else [layers[0], layers[-1]]
        return " ".join(mean_std(list(layer), 2).split(" ")[0] for layer in shown)

    start, end, chance = map(means, ("support_mass_init", "support_mass_final", "support_chance"))
    return f"{start} -> {end}" + f" ({chance})" * bool(chance) if start else "-"


def table(header: list, rows: list[list], optional: int = 0) -> str:
    """Plain text columns, ASCII: the first left, the others right aligned; the last `optional` ones only if filled."""
    if optional and all(cell in ("-", "") for row in rows for cell in row[-optional:]):
        header, rows = header[:-optional], [row[:-optional] for row in rows]
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]).rstrip()
             for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
