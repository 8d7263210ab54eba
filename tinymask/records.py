"""The bookkeeping of a run: which are left, their steps, what they leave behind.

A script writes out its loop; this file says which runs are left (`runs_left`), counts their steps (`steps`), keeps the
curve (`add_point`) and the result line (`finish`), strict JSON, appended when a run is complete. A checkpoint holds
only tensors, numbers, strings, lists and dicts; it is written beside its place and moved there.
"""
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import pickle
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from tinymask import __version__, runs
from tinymask.persistence import layers_of, snapshot

# flags that choose which runs are made, or where; a run is the same run whatever they say
NOT_OF_THE_RUN = ("tasks", "dataset", "inits", "seeds", "first_seed", "out", "resume", "plot", "smoke", "device",
                  "data_dir", "download", "eval_only", "sample", "prompt", "temperature", "top_k", "data",
                  "vocabulary")
MASSES = ("support_mass_init", "support_mass_final")
PATHS = ("out", "data_dir", "data", "eval_only", "vocabulary")  # not in a result line
SAVE_EVERY = 500  # steps


@dataclasses.dataclass
class Run:
    """One run: what it is, and how far it has come."""

    script: str
    task: str
    init: str
    seed: int
    args: runs.Args
    out: Path
    device: torch.device
    rank: int = 0  # of this process, under torchrun
    step: int = 0
    curve: list = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    loss: float = math.nan  # of the last step
    diverged: bool = False
    state: dict = dataclasses.field(default_factory=dict)  # model, optimiser, generator of batches
    bar: Any = None

    @property
    def name(self) -> str:
        """How a run is called in print."""
        part = f" {100 * self.args.fraction:g}%" if "fraction" in self.args else ""
        return f"{self.task}{part} {self.init} seed {self.seed}"

    @property
    def checkpoint(self) -> Path:
        """Its file."""
        return self.out / "checkpoints" / f"{run_key(vars(self.args), self.task, self.init, self.seed)}.pt"


# -- the loop's bookkeeping -------------------------------------------------------------------


def wanted(script: str, args_of: Iterable[tuple[str, runs.Args]], out: Path, device: torch.device,
           rank: int = 0) -> list[Run]:
    """The runs that a command line asks for, in order. args_of: the flags of each task."""
    return [Run(script, task, init, seed, args, out, device, rank) for task, args in args_of
            for init in args.inits for seed in range(args.first_seed, args.first_seed + args.seeds)]


def runs_left(wanted: list[Run], results: list[dict], measured: Iterable[str], plotted: Iterable[str]) -> Iterator[Run]:
    """Those of the wanted runs that are to be made, in order; with --resume, result lines of the others go to results.

    measured, plotted: see `read_results`.
    """
    one, processes = wanted[0], dist.get_world_size() if dist.is_initialized() else 1
    finished = read_results(one.out, measured, plotted) if one.args.resume else {}
    if one.rank == 0:
        print(f"device {one.device}, {processes} process(es), {torch.get_num_threads()} threads, "
              f"torch {torch.__version__}, results in {one.out}")
    for run in wanted:
        if run.checkpoint.stem in finished:
            results.append(finished[run.checkpoint.stem])
        else:
            yield run


def take_up(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Generator) -> None:
    """Let a run be saved from here on; with --resume, put it back where its checkpoint left it, bit for bit."""
    run.state = {"model": model, "optimizer": optimizer, "batches": batches}
    if not run.args.resume or not run.checkpoint.exists():
        return
    try:
        saved = load(run.checkpoint)
        check(saved, description(run))
        if "optimizer" not in saved:  # a finished run whose result line is gone
            return
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        batches.set_state(saved["batches"])
        run.step, run.curve, run.seconds = saved["step"], saved["curve"], saved["seconds"]
    except Exception as error:  # zip, pickle, I/O and shape errors alike
        runs.fail(f"{run.checkpoint}: not a checkpoint of this run ({runs.first_line(error)}); delete it to start "
                  "the run anew")


def steps(run: Run) -> Iterator[int]:
    """The numbers of the steps that a run has yet to take; it ends early where run.loss is no finite number.

    Between two steps it saves, now and then and when a signal asks to stop; it then leaves with status 128 + signal.
    """
    run.bar = tqdm(total=run.args.steps, initial=run.step, desc=run.name, disable=None if run.rank == 0 else True,
                   leave=False)
    start = time.perf_counter() - run.seconds
    while run.step < run.args.steps and not run.diverged:
        yield run.step + 1
        run.step += 1
        run.bar.update()
        run.diverged = run.diverged or not math.isfinite(run.loss)
        run.seconds = time.perf_counter() - start
        signum = _stop_signal(run.device)
        if not run.diverged and (signum or run.step % SAVE_EVERY == 0):
            _save_and_perhaps_leave(run, signum)
    run.bar.close()


def _stop_signal(device: torch.device) -> int:
    """The signal that asks to stop, 0 for none. One that reaches a single process under torchrun asks all, at once: a
    process that left alone would let the others wait for it for ever."""
    asked = torch.tensor(runs.stop_requested() or 0, device=device)
    if dist.is_initialized():
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return int(asked)


def evaluation_due(step: int, steps: int, points: int) -> bool:
    """Whether a curve of at most so many points has one after this step; the last step has one."""
    return step * points // steps > (step - 1) * points // steps


def add_point(run: Run, point: dict, error: str, line: str) -> None:
    """One evaluation on the curve, and in print: line is a format of the point. A run whose `error` is not finite has
    diverged."""
    run.curve.append({"step": run.step + 1, **point})
    run.diverged = run.diverged or not math.isfinite(point[error])
    if run.rank == 0:
        text = f"step {run.step + 1}: {line.format(**point)}"
        if run.bar.disable or not sys.stdout.isatty():
            print(f"{run.name} {text}", flush=True)
        run.bar.set_postfix_str(text)


def finish(run: Run, metrics: dict, params: dict, **saved: Any) -> dict:
    """Save the model of a run (saved: what else its checkpoint is to hold), append its result line and return it.

    `diverged` there: the loss, or a figure of metrics at the end, is NaN or infinite, as a perplexity of e^710 is.
    """
    run.diverged = run.diverged or not all(math.isfinite(figure) for figure in metrics.values()
                                           if isinstance(figure, float))
    if run.rank > 0:
        return {"task": run.task, "init": run.init, "metrics": metrics, "diverged": run.diverged}
    save(run.checkpoint, {"model": run.state["model"].state_dict(), "step": run.step, "run": description(run), **saved})
    result = strict({
        "script": run.script, "task": run.task, "init": run.init, "seed": run.seed,
        "config": {name: value for name, value in vars(run.args).items() if name not in PATHS},
        "metrics": metrics, "curve": run.curve, "steps": run.step, "seconds": run.seconds, "params": params,
        "diverged": run.diverged, **machine(run.device), "complete": True})
    append_line(run.out / "results.jsonl", json.dumps(result, allow_nan=False))
    if run.diverged:
        print(f"{run.name}: diverged at step {run.step}")
    return result


# -- result lines -----------------------------------------------------------------------------


def of_the_run(config: dict) -> dict:
    """Those of the flags that make a run what it is."""
    return {name: value for name, value in config.items() if name not in NOT_OF_THE_RUN}


def same_settings(args: runs.Args, preset: runs.Args) -> bool:
    """Whether a run has the settings of a preset, whatever the precision and the data's fingerprint."""
    wanted = of_the_run(vars(preset))
    return all(vars(args)[name] == value for name, value in wanted.items() if name != "bf16")


def run_key(config: dict, *names: object) -> str:
    """File name for one run: the names and a hash of the flags that make the run what it is."""
    text = json.dumps(of_the_run(config), sort_keys=True)
    return "-".join(short(str(name)) for name in names) + "-" + hashlib.sha256(text.encode()).hexdigest()[:10]


def short(name: str) -> str:
    """A name that is safe in a file name: one that is too long, or no text, is cut and has a hash at its end."""
    data = os.fsencode(name)
    text = data[:60].decode(errors="ignore")
    return text if text == name else f"{text}-{hashlib.sha256(data).hexdigest()[:8]}"


def strict(value: Any) -> Any:
    """The same with every NaN and infinity as None, for JSON has none of them."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_rss_mb() -> float | None:
    """The most memory that this process has had, in MB; None on Windows."""
    with contextlib.suppress(OSError, TypeError):  # Linux: getrusage would count what started this process, too
        status = Path("/proc/self/status").read_text("utf-8", "replace")
        return round(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**10, 1)  # type: ignore[index]
    with contextlib.suppress(ImportError):
        import resource

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)
    return None


def machine(device: torch.device) -> dict:
    """The fields of a result line that tell what it was measured on."""
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {"python": python, "torch": torch.__version__, "numpy": numpy.__version__, "tinymask": __version__}
    return {"peak_rss_mb": peak_rss_mb(), "threads": torch.get_num_threads(), "versions": versions,
            "device": str(device)}


def append_line(path: Path, line: str) -> None:
    """Append a line in one write; an earlier one that was cut short is ended first. Full disk: exit status 1."""
    try:
        with open(path, "a+b", buffering=0) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            data = b"\n" * (file.read(1) not in (b"", b"\n")) + line.encode() + b"\n"
            if file.write(data) != len(data):
                raise OSError("disk full")
    except OSError as error:
        runs.fail(f"{path}: {error.strerror or error}; this run was not recorded", status=1)


def read_results(folder: Path, measured: Iterable[str], plotted: Iterable[str]) -> dict[str, dict]:
    """Result lines of folder/results.jsonl by `run_key`, the newest of each; broken lines are passed over.

    measured, plotted: names that the metrics and the points of the curve must have, for tables and figures
    read them; a line of another version, without them, is passed over too.
    """
    results, path = {}, folder / "results.jsonl"
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace") if path.exists() else ""
    except OSError as error:
        runs.fail(f"{path}: {error.strerror or error}")
    for line in text.split("\n"):
        try:
            result = json.loads(line)
            metrics, curve = result["metrics"], result["curve"]
            if (result["complete"] is True and result["diverged"] in (True, False) and isinstance(curve, list)
                    and all(_is_measure(name, metrics[name]) for name in measured)
                    and all(type(point["step"]) is int for point in curve)
                    and all(_is_measure(name, point[name]) for point in curve for name in plotted)):
                results[run_key(result["config"], result["task"], result["init"], result["seed"])] = result
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
    return results


def _is_measure(name: str, value: Any) -> bool:
    """Whether a value is a number, or None where there was NaN; of support masses, a list of them, one a layer."""
    values = value if name.startswith("support_mass") else [value]
    return isinstance(values, list) and len(values) > 0 and all(
        entry is None or isinstance(entry, (int, float)) and math.isfinite(float(entry)) for entry in values)


# -- checkpoints ------------------------------------------------------------------------------


def description(run: Run) -> dict:
    """What a checkpoint says of its run."""
    return {"script": run.script, "task": run.task, "init": run.init, "seed": run.seed} | of_the_run(vars(run.args))


def check(saved: Any, wanted: dict) -> None:
    """ValueError with the fields in which a checkpoint's own description is not what is wanted; of another script's,
    which has hardly one in common, that alone."""
    found = saved.get("run") if isinstance(saved, dict) else None
    if not isinstance(found, dict) or "model" not in saved:
        raise ValueError("it does not say of which run it is")
    differ = [f"{name} is {found.get(name)} there, {value} here" for name, value in wanted.items()
              if found.get(name) != value]
    if differ:
        raise ValueError(differ[0] if differ[0].startswith("script ") else "; ".join(differ))


def save(path: Path, state: dict) -> None:
    """torch.save through a temporary file, so that a crash or a full disk leaves the old file whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            buffer = io.BytesIO()  # in memory first: of a full disk torch says only that a position is wrong
            torch.save(state, buffer)
            part.write_bytes(buffer.getbuffer())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        older = "; the older file there is intact" if path.is_file() else ""
        runs.fail(f"{path}: could not be saved ({runs.first_line(error)}){older}", status=1)


def _save_and_perhaps_leave(run: Run, signum: int) -> None:
    """Under torchrun all processes call it, and the first one saves."""
    if run.rank == 0:
        model, optimizer, batches = run.state.values()
        save(run.checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                              "batches": batches.get_state(), "step": run.step, "curve": run.curve,
                              "seconds": run.seconds, "run": description(run)})
    if signum:
        if dist.is_initialized():
            dist.barrier()  # nobody leaves before it is saved
        run.bar.close()
        if run.rank == 0:
            print(f"stopped at step {run.step}; --resume goes on from here", file=sys.stderr)
        raise SystemExit(128 + signum)


def load(path: Path) -> Any:
    """A checkpoint, on the CPU; it holds only tensors, numbers, strings, lists and dicts. ValueError for others."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:  # torch would advise to load it unsafely
        raise ValueError("it holds more than tensors, numbers, strings, lists and dicts") from None


def restore(path: Path, model: nn.Module, wanted: dict, flag: str = "") -> None:
    """Load the weights of a finished run; leaves with one line if they are not there, or of another run.

    wanted: what the checkpoint's description has to say (the init, the heads, ...). flag: what named the file.
    """
    try:
        saved = load(path)
        check(saved, wanted)
        model.load_state_dict(saved["model"])
    except Exception as error:  # missing, zip, pickle and shape errors alike
        runs.fail(f"{flag} {path}: not a checkpoint of this run ({runs.first_line(error).rstrip(':')})".strip())


def start_and_end(run: Run, model: nn.Module, inputs: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
    """What a new model attends to, and the same with the weights of the finished run, for figures.

    Two pairs (attention, openness): lists of (B, H, N, N), one a layer, and of sigmoid(M), (N, N) or (H, N, N), one a
    layer that has log sigmoid(M).
    """
    if not run.checkpoint.is_file():  # its result line may be there, with --resume
        runs.fail(f"--plot: {run.checkpoint} is missing; the run has to be made anew, without --resume")
    start, layers = snapshot(model, inputs), layers_of(model)
    restore(run.checkpoint, model, description(run))
    shown = [layer.squash for layer in layers if layer.mask is not None]
    return [(maps, [logits.sigmoid() for logits, squash in zip(masks, shown) if squash])
            for maps, masks, _ in (start, snapshot(model, inputs))]
