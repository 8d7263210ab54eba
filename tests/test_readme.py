"""The README's figures are those of results/*.jsonl, and its commands are the ones that CI runs.

`PYTHONPATH=. python tests/test_readme.py` prints the rows, to be pasted after a new reference run.
"""
import json
import re
import statistics
from pathlib import Path

import pytest

import train_gotu
from tinymask import runs

pytestmark = pytest.mark.gotu
ROOT = Path(__file__).parent.parent
MAIN = ["default", "svd", "opt", "mask", "mask-only", "mask-literal"]  # controls have a table of their own
README = (ROOT / "README.md").read_text(encoding="utf-8")


def gotu_lines(name="gotu.jsonl"):
    text = (ROOT / "results" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def spread(values, digits, scale=1.0):
    if None in values:
        return "-"
    values = [scale * value for value in values]
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def mean(values, digits=2):
    return f"{statistics.fmean(values):.{digits}f}"


def by(lines, *names):
    """Result lines in groups: (r[name] for each of names) -> lines, in the order of their first."""
    groups = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return groups


def support(these):
    """'start → end' of each layer, a mean over seeds."""
    pairs = zip(*([[r["metrics"][f"support_mass_{when}"][layer] for r in these]
                   for layer in range(these[0]["config"]["depth"])] for when in ("init", "final")))
    return ", ".join(f"{mean(start)} → {mean(end)}" for start, end in pairs)


def solved(these):
    """Seeds that extrapolate: over 99 % on the unseen part; for ThreeSym, an mse below 0.05."""
    accuracies = [r["metrics"]["acc_unseen"] for r in these]
    if None in accuracies:
        return sum(r["metrics"]["mse_all"] < 0.05 for r in these)
    return sum(accuracy > 0.99 for accuracy in accuracies)


def row(*cells):
    return "| " + " | ".join(cells) + " |"


def percent(these, name):
    text = spread([r["metrics"][name] for r in these], 2, 100)
    return text if text == "-" else text + " %"


def gotu_rows():
    """The main table."""
    rows, groups = [], by(gotu_lines(), "task", "init")
    for task, init in [(task, init) for task in train_gotu.TASKS for init in MAIN if (task, init) in groups]:
        these = groups[task, init]
        accuracy, mse = train_gotu.PAPER.get((task, init), (None, "-"))
        paper = f"{100 * accuracy:.2f} %, {mse:g}" if isinstance(accuracy, float) else f"{mse}"
        metrics = [r["metrics"] for r in these]
        rows.append(row(task, f"`{init}`", paper, percent(these, "acc_all"), percent(these, "acc_unseen"),
                        f"{solved(these)} of {len(these)}", spread([m["mse_all"] for m in metrics], 4),
                        spread([m["mse_seen"] for m in metrics], 4), support(these)))
    return rows


def control_rows():
    """One row a control: solved seeds, mse, and the least support at the end, for each task."""
    rows, groups = [], by(gotu_lines("gotu-controls.jsonl"), "task", "init")
    first = by([r for r in gotu_lines() if r["seed"] < 3], "task", "init")
    for init in ["default", "svd", "opt", "mask", *train_gotu.CONTROLS]:
        cells = []
        for task in train_gotu.TASKS:
            these = (groups if init in train_gotu.CONTROLS else first)[task, init]
            least = statistics.fmean(min(r["metrics"]["support_mass_final"]) for r in these)
            errors = spread([r["metrics"]["mse_all"] for r in these], 3)
            cells.append(f"{solved(these)} of {len(these)}; {errors}; {least:.2f}")
        rows.append(row(f"`{init}`", *cells))
    return rows


def changed(result):
    """The flags of a result line that are not the default of its task, as they were typed."""
    usual, config = vars(train_gotu.settings([], result["task"])), dict(result["config"])
    if config["mask_lr"] == config["lr"]:
        del config["mask_lr"]
    names = [name for name in config if name not in runs.NOT_OF_THE_RUN and config[name] != usual[name]]
    return " ".join(f"--{name.replace('_', '-')} {config[name]:g}" if isinstance(config[name], float)
                    else f"--{name.replace('_', '-')} {config[name]}" for name in names)


def map_rows():
    """One row a setting: solved seeds and mse of each init, for each task."""
    lines = [r for r in gotu_lines() if r["seed"] < 3 and r["task"] in ("2parity", "majority")]
    settings = {}
    for line in lines + gotu_lines("gotu-map.jsonl"):
        settings.setdefault(changed(line), []).append(line)
    rows = []
    for flags, lines in settings.items():
        groups, cells = by(lines, "task", "init"), []
        for task in ("2parity", "majority"):
            for init in ("default", "svd", "mask"):
                these = groups.get((task, init))
                cells.append(f"{solved(these)}; {spread([r['metrics']['mse_all'] for r in these], 3)}" if these else "")
        rows.append(row(f"`{flags}`" if flags else "as above", *cells))
    return rows


def gotu_facts():
    """Figures in the README's prose, each as the text that must stand there."""
    lines, default = gotu_lines(), gotu_lines("gotu-default.jsonl")
    mask = {task: [r["metrics"] for r in lines if (r["task"], r["init"]) == (task, "mask")]
            for task in ("2parity", "majority")}
    drift = [m["mask_drift"] for task in mask for m in mask[task]]
    return [
        f"{max(m['mse_all'] for m in mask['2parity']):.4f} on 2Parity and "
        f"{max(m['mse_all'] for m in mask['majority']):.4f} on Majority",
        f"{statistics.fmean(r['seconds'] for r in lines):.0f} seconds a run",
        f"{max(r['peak_rss_mb'] for r in lines):.0f} MB",
        f"by {statistics.fmean(drift):.3f} on average",
        f"{sum(r['seconds'] for r in default) / 60:.1f} minutes of training on two cores and "
        f"{max(r['peak_rss_mb'] for r in default):.0f} MB",
    ]


def test_gotu_rows_and_facts_stand_in_the_readme():
    missing = [text for text in gotu_rows() + gotu_facts() if text not in README]
    assert not missing, "\n".join(missing)


def test_quick_start_shows_lines_of_the_default_command(capsys):
    args = runs.parse(train_gotu.parser(), [], train_gotu.PRESETS, {})
    args.tasks = ["2parity", "majority"]
    train_gotu.print_table(args, gotu_lines("gotu-default.jsonl"))
    printed = capsys.readouterr().out.splitlines()
    quoted = [line[4:] for line in README.splitlines() if line.startswith("    2parity ") or "unseen acc " in line]
    assert len(quoted) == 3 and all(line in printed for line in quoted)


def test_reference_runs_are_ten_seeds_of_the_default_settings():
    lines = gotu_lines()
    cells = {(r["task"], r["init"], r["seed"]) for r in lines}
    assert len(lines) == len(cells) == 10 * len({cell[:2] for cell in cells})
    for result in lines:
        defaults = vars(train_gotu.settings([], result["task"]))
        assert {name: result["config"][name] for name in train_gotu.PRESETS["small"]} == {
            name: defaults[name] for name in train_gotu.PRESETS["small"]}
        assert result["complete"] and not result["diverged"] and result["steps"] == defaults["steps"]
        assert result["script"] == "gotu" and 0 <= result["seed"] < 10 and result["init"] in MAIN
        assert runs.run_key(result["config"], "x")  # the config is whole


def test_every_flag_in_the_readme_exists():
    known = set(train_gotu.parser()._option_string_actions)
    commands = re.findall(r"python train_gotu\.py[^\n`|]*", README)
    assert commands
    for command in commands:
        assert set(re.findall(r"--[a-z-]+", command)) <= known, command


def test_the_readme_s_test_command_is_what_ci_runs():
    assert "python -m pytest" in README and "python -m pytest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


if __name__ == "__main__":
    print("\n".join(gotu_rows() + gotu_facts()))
