"""What a run leaves behind: its result line and its checkpoint.

A result line is strict JSON, appended when the run is complete. A checkpoint holds only tensors, numbers,
strings, lists and dicts; it is written beside its place and moved there.
"""
import contextlib
import hashlib
import io
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from tinymask import __version__, runs
from tinymask.persistence import snapshot

# flags that choose which runs are made, or where; a run is the same run whatever they say
NOT_OF_THE_RUN = ("tasks", "dataset", "inits", "seeds", "first_seed", "out", "resume", "plot", "smoke", "device",
                  "data_dir", "download", "eval_only", "sample", "prompt", "temperature", "top_k", "data")
MASSES = ("support_mass_init", "support_mass_final")
PATHS = ("out", "data_dir", "data", "eval_only")  # not in a result line


# -- result lines -----------------------------------------------------------------------------


def run_key(config, *names):
    """File name for one run: the names and a hash of the flags that make the run what it is."""
    of_the_run = {name: value for name, value in config.items() if name not in NOT_OF_THE_RUN}
    text = json.dumps(of_the_run, sort_keys=True)
    return "-".join(short(str(name)) for name in names) + "-" + hashlib.sha256(text.encode()).hexdigest()[:10]


def short(name):
    """A name that is safe in a file name: one that is too long, or no text, is cut and has a hash at its end."""
    data = os.fsencode(name)
    text = data[:60].decode(errors="ignore")
    return text if text == name else f"{text}-{hashlib.sha256(data).hexdigest()[:8]}"


def strict(value):
    """The same with every NaN and infinity as None, for JSON has none of them."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_rss_mb():
    """The most memory that this process has had, in MB; None on Windows."""
    with contextlib.suppress(OSError, TypeError):  # Linux: getrusage would count what started this process, too
        status = Path("/proc/self/status").read_text("utf-8", "replace")
        return round(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**10, 1)
    with contextlib.suppress(ImportError):
        import resource

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


def machine(device):
    """The fields of a result line that tell what it was measured on."""
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {"python": python, "torch": torch.__version__, "numpy": numpy.__version__, "tinymask": __version__}
    return {"peak_rss_mb": peak_rss_mb(), "threads": torch.get_num_threads(), "versions": versions,
            "device": str(device)}


def record(folder, args, script, task, init, seed, *, device, **fields):
    """Make the result line of a finished run and append it to folder/results.jsonl. Returns it."""
    config = {name: value for name, value in vars(args).items() if name not in PATHS}
    result = strict({"script": script, "task": task, "init": init, "seed": seed, "config": config, **fields,
                     **machine(device), "complete": True})
    append_line(folder / "results.jsonl", json.dumps(result, allow_nan=False))
    return result


def append_line(path, line):
    """Append a line in one write; on a full disk the file is left as it was, and the exit status is 1."""
    try:
        with open(path, "a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            cut = size > 0 and file.read(1) != b"\n"  # an earlier write was cut short: start a new line
            data = b"\n" * cut + line.encode() + b"\n"
            try:
                if file.write(data) != len(data):
                    raise OSError("disk full")
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        runs.fail(f"{path}: {error.strerror or error}; this run was not recorded", status=1)


def read_results(folder, measured, plotted):
    """Result lines of folder/results.jsonl by `run_key`, the newest of each; broken lines are passed over.

    measured, plotted: names that the metrics and the points of the curve must have, for tables and figures
    read them; a line of another version, without them, is passed over too.
    """
    results, path = {}, folder / "results.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    except OSError as error:
        runs.fail(f"{path}: {error.strerror or error}")
    for line in lines:
        try:
            result = json.loads(line)
            metrics, curve = result["metrics"], result["curve"]
            if not (result["complete"] and result["diverged"] in (True, False) and isinstance(curve, list)
                    and all(_is_measure(name, metrics[name]) for name in measured)
                    and all(_is_measure(name, point[name]) for point in curve for name in ("step", *plotted))):
                continue
            results[run_key(result["config"], result["task"], result["init"], result["seed"])] = result
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return results


def _is_measure(name, value):
    """Whether a value is a number, or None where there was NaN; of support masses, a list of them, one a layer."""
    values = value if name.startswith("support_mass") else [value]
    return isinstance(values, list) and len(values) > 0 and all(
        number is None or isinstance(number, (int, float)) and abs(number) < 1e300 for number in values)


# -- checkpoints ------------------------------------------------------------------------------


def save(path, state):
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


def load(path):
    """A checkpoint, on the CPU; it holds only tensors, numbers, strings, lists and dicts."""
    return torch.load(path, weights_only=True, map_location="cpu")


def restore(path, model, run=None, flag=""):
    """Load the weights of a finished run; leaves with one line if they are not there.

    run: what the checkpoint's own "run", if it has one, has to say (the init, the heads, ...). flag: what
    named the file.
    """
    try:
        state = load(path)
        for name, wanted in (run or {}).items():
            if (found := state.get("run", {}).get(name, wanted)) != wanted:
                raise ValueError(f"{name} is {found} there, {wanted} here")
        model.load_state_dict(state["model"])
    except Exception as error:  # missing, zip, pickle and shape errors alike
        runs.fail(f"{flag} {path}: not a checkpoint of this run ({runs.first_line(error).rstrip(':')})".strip())


def start_and_end(path, model, inputs):
    """What a new model attends to, and the same with the weights of the finished run at `path`, for figures.

    Two pairs (attention, openness): lists of (B, H, N, N) and of sigmoid(M), (N, N) or (H, N, N), one a layer.
    """
    start = snapshot(model, inputs)
    restore(path, model)
    return [(maps, [logits.sigmoid() for logits in masks]) for maps, masks in (start, snapshot(model, inputs))]


def checkpoint(path, model, optimizer, batches, step, curve, seconds, rank=0):
    """Save all that `resume` needs to go on bit for bit. After Ctrl-C it then leaves, with status 130.

    Under torchrun all processes call it, and the first one saves.
    """
    if rank == 0:
        save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches.get_state(),
                    "step": step, "curve": curve, "seconds": seconds})
    if runs.interrupted():
        if dist.is_initialized():
            dist.barrier()  # nobody leaves before it is saved
        if rank == 0:
            print(f"stopped at step {step}; --resume goes on from here", file=sys.stderr)
        raise SystemExit(130)


def resume(path, model, optimizer, batches):
    """Put a run back where its checkpoint left it. Returns (step, curve, seconds); zeros without a checkpoint."""
    if not path.exists():
        return 0, [], 0.0
    try:
        state = load(path)
        if "model" in state and "optimizer" not in state:  # a finished run whose result line is gone
            return 0, [], 0.0
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.set_state(state["batches"])
        return state["step"], state["curve"], state["seconds"]
    except Exception as error:  # zip, pickle, I/O and shape errors alike
        runs.fail(f"{path}: not a checkpoint of this run ({runs.first_line(error)}); delete it to start the run anew")
