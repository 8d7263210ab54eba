"""The README's figures are those of results/*.jsonl, and its commands are the ones that CI runs.

`PYTHONPATH=. python tests/test_readme.py` prints the rows, to be pasted after a new reference run; with the name
of a file it draws the map of settings.
"""
import json
import re
import statistics
import sys
from pathlib import Path

import pytest

import train_arith
import train_gotu
import train_lm
import train_vit
from tinymask import pictures, runs

pytestmark = pytest.mark.gotu
ROOT = Path(__file__).parent.parent
MAIN = ["default", "svd", "opt", "mask", "mask-only", "mask-literal"]  # controls have a table of their own
README = (ROOT / "README.md").read_text(encoding="utf-8")


def lines_of(name="gotu.jsonl"):
    text = (ROOT / "results" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def spread(values, digits, scale=1.0):
    if None in values:
        return "-"
    values = [scale * value for value in values]
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
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
    rows, groups = [], by(lines_of(), "task", "init")
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
    rows, groups = [], by(lines_of("gotu-controls.jsonl"), "task", "init")
    first = by([r for r in lines_of() if r["seed"] < 3], "task", "init")
    for init in ["default", "svd", "opt", "mask", *train_gotu.CONTROLS]:
        cells = []
        for task in train_gotu.TASKS:
            these = (groups if init in train_gotu.CONTROLS else first).get((task, init))
            if not these:
                cells.append("not run yet")
                continue
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


def map_settings():
    """Of the map: flags that a setting changes -> (task, init) -> its three result lines; first, none changed."""
    usual = [r for r in lines_of() if r["seed"] < 3 and r["task"] in ("2parity", "majority")]
    settings = {}
    for line in usual + lines_of("gotu-map.jsonl"):
        settings.setdefault(changed(line), []).append(line)
    return {flags: by(lines, "task", "init") for flags, lines in settings.items()}


def map_rows():
    """One row a setting: solved seeds and mse of each init, for each task."""
    rows = []
    for flags, groups in map_settings().items():
        cells = []
        for task in ("2parity", "majority"):
            for init in ("default", "svd", "mask"):
                these = groups.get((task, init))
                cells.append(f"{solved(these)}; {spread([r['metrics']['mse_all'] for r in these], 3)}" if these else "")
        rows.append(row(f"`{flags}`" if flags else "as above", *cells))
    return rows


def paper_rows():
    """The paper preset of the Boolean script: one run each."""
    rows = []
    for r in lines_of("gotu-paper.jsonl"):
        m, (accuracy, mse) = r["metrics"], train_gotu.PAPER[r["task"], r["init"]]
        rows.append(row(f"`{r['init']}`", f"{100 * accuracy:.2f} %, {mse:g}", f"{100 * m['acc_all']:.2f} %",
                        f"{100 * m['acc_unseen']:.2f} %", f"{m['mse_all']:.4f}", f"{m['mse_seen']:.4f}",
                        support([r])))
    return rows


def flags_of(result, script, names):
    """Those of a result line's flags `names` that are not the default of its task and preset, as they were typed."""
    config = result["config"]
    usual = vars(script.settings(["--preset", config["preset"]], result["task"]))
    return " ".join(f"--{name.replace('_', '-')} {value:g}" if isinstance(value, float)
                    else f"--{name.replace('_', '-')} {value}"
                    for name in names if (value := config.get(name, 1.0)) != usual[name])


def arith_groups(name):
    """(task, fraction, flags, init) -> result lines of results/`name`."""
    groups = {}
    for r in lines_of(name):
        flags = flags_of(r, train_arith, ("mode", "readout", "order", "token_std", "position_std"))
        groups.setdefault((r["task"], r["config"]["fraction"], flags, r["init"]), []).append(r)
    return groups


def arith_cells(these):
    """Whole answers, digits, loss, steps to 75 and 99 %, support."""
    metrics = [r["metrics"] for r in these]
    steps = [spread([m[name] for m in metrics], 0) for name in ("steps_to_75", "steps_to_99")]
    return [percent(these, "exact_match"), percent(these, "digit_accuracy"), spread([m["loss"] for m in metrics], 3),
            *steps, mass_of_layers(these)]


def arith_rows():
    """Arithmetic, the default preset: one row for each task, fraction and init."""
    return [row(task, f"{100 * fraction:g} %", f"`{init}`", *arith_cells(these))
            for (task, fraction, _, init), these in arith_groups("arith.jsonl").items()]


def arith_scale_rows():
    """At the paper's fraction, exact match: one row for each scale of tokens and positions, one column an init."""
    cells = {}
    for name in ("arith.jsonl", "arith-scale.jsonl"):
        for (task, fraction, _, init), these in arith_groups(name).items():
            if (task, fraction) == ("add", 0.004):
                config = these[0]["config"]
                key = (config.get("token_std", 1.0), config["position_std"])
                cells.setdefault(key, {})[init] = percent(these, "exact_match")
    return [row(f"{token:g}", f"{position:g}", *(of[init] for init in train_arith.INITS[:4]))
            for (token, position), of in sorted(cells.items(), reverse=True)]


def arith_paper_rows():
    """The paper's model: one row for each task, flags and init, beside its Table 2."""
    rows = []
    for (task, _, flags, init), these in arith_groups("arith-paper.jsonl").items():
        paper = "{:.2%}, {:.2%}, {:g}".format(*train_arith.PAPER[task, init]).replace("%", " %")
        rows.append(row(task, f"`{flags}`" if flags else "", f"`{init}`", paper, str(len(these)), *arith_cells(these)))
    return rows


def arith_control_rows():
    """At 0.1 %: one row for each form and init."""
    return [row(f"`{flags}`" if flags else "", f"`{init}`", *arith_cells(these))
            for (_, _, flags, init), these in arith_groups("arith-controls.jsonl").items()]


def steps_to(these, defaults, name, better):
    """First evaluated step at which each run is where the default of its seed ends, mean and spread; `-` for never."""
    steps = []
    for r in these:
        (end,) = [d["curve"][-1][name] for d in defaults if d["seed"] == r["seed"]]
        steps.append(next((point["step"] for point in r["curve"] if better(point[name], end)), None))
    return spread(steps, 0)


def vit_rows():
    """Vision, the built-in sets: one row for each set and init."""
    rows, groups = [], by(lines_of("vit.jsonl"), "task", "init")
    for (task, init), these in groups.items():
        steps = steps_to(these, groups[task, "default"], "top1", lambda here, end: here >= end)
        rows.append(row(task, f"`{init}`", percent(these, "top1"), percent(these, "top1_best"),
                        spread([r["metrics"]["loss"] for r in these], 3), steps, mass_of_layers(these)))
    return rows


def lm_rows():
    """Language, the built-in text: one row an init."""
    rows, groups = [], by(lines_of("lm.jsonl"), "init")
    for (init,), these in groups.items():
        steps = steps_to(these, groups["default",], "bits_per_byte", lambda here, end: here <= end)
        cells = [spread([r["metrics"][name] for r in these], digits) for name, digits in (
            ("val_bits_per_byte", 3), ("bits_per_byte", 3), ("perplexity", 2))]
        drift = [r["metrics"]["mask_drift"] for r in these]
        rows.append(row(f"`{init}`", *cells, steps, "" if None in drift else mean(drift, 3)))
    return rows


def evidence_rows():
    """The first table of the README: one row a claim, default, best query-key init, mask, the paper's three."""
    def one(claim, name, key, metric, script, paper, scale=100, keys=("default", "svd", "mask"), unit=" %"):
        groups = {}  # (task, fraction, init) -> scale of the positions -> lines
        for r in lines_of(name):
            if r["config"].get("readout") in (None, "token"):
                of = groups.setdefault((r["task"], r["config"].get("fraction"), r["init"]), {})
                of.setdefault(r["config"].get("position_std"), []).append(r)
        cells = [max(groups[(*key, init)].values(), key=lambda these: these[0]["metrics"][metric])  # the better scale
                 if (*key, init) in groups else [] for init in keys]
        return row(claim, *(spread([r["metrics"][metric] for r in these], 2 if scale == 100 else 3, scale) + unit
                            if these else "-" for these in cells), paper, str(len(cells[0])), f"`{script}`",
                   f"{sum(r['seconds'] for these in cells for r in these) / 60:.0f}")

    paper = ", ".join(f"{100 * train_arith.PAPER['mul', key][0]:.2f}" for key in ("default", "svd", "mask"))
    return [
        one("Boolean: 2Parity, unseen part right", "gotu.jsonl", ("2parity", None), "acc_unseen",
            "train_gotu.py --seeds 10", "75, 75, 100 of the whole cube"),
        one("Boolean: Majority, unseen part right", "gotu.jsonl", ("majority", None), "acc_unseen",
            "train_gotu.py --seeds 10", "87.4, 87.4, 100 of the whole cube"),
        one("addition from 500 pairs, answers right", "arith.jsonl", ("add", 0.0005), "exact_match",
            "train_arith.py --tasks add --fraction 0.0005 --seeds 3", "-"),
        one("multiplication from 3 %, answers right", "arith-paper.jsonl", ("mul", 0.03), "exact_match",
            "train_arith.py --preset paper --tasks mul --bf16", paper),
        one("vision: neighbours decide, top-1", "vit.jsonl", ("builtin", None), "top1", "train_vit.py --seeds 5",
            "-"),
        one("vision: halves decide, top-1", "vit.jsonl", ("builtin-global", None), "top1", "train_vit.py --seeds 5",
            "-"),
        one("language: test bits a byte (mimetic for svd)", "lm.jsonl", ("builtin", None), "bits_per_byte",
            "train_lm.py --seeds 5", "-", 1, ("default", "mimetic", "mask"), ""),
    ]


def mass_of_layers(these):
    """'start → end' of the layer that keeps least, a mean over seeds."""
    ends = [mean([min(r["metrics"][f"support_mass_{when}"]) for r in these]) for when in ("init", "final")]
    return " → ".join(ends)


def gotu_facts():
    """Figures in the README's prose, each as the text that must stand there."""
    lines, default = lines_of(), lines_of("gotu-default.jsonl")
    runs_of = by(lines, "task", "init")
    worst = {key: max(r["metrics"]["mse_all"] for r in these) for key, these in runs_of.items()}
    drift = {name: statistics.fmean(r["metrics"]["mask_drift"] for r in these) for name, these in (
        ("adam", runs_of["2parity", "mask"]),
        ("sgd", [r for r in lines_of("gotu-map.jsonl") if r["config"]["optimizer"] == "sgd"
                 and (r["task"], r["init"]) == ("2parity", "mask")]))}
    least = {size: statistics.fmean(min(r["metrics"]["support_mass_init"]) for r in lines_of("gotu-map.jsonl")
                                    if (r["task"], r["init"], r["config"]["head_dim"]) == ("2parity", "svd", size)
                                    and changed(r) == f"--head-dim {size}") for size in (8, 4)}
    full = statistics.fmean(min(r["metrics"]["support_mass_init"]) for r in runs_of["2parity", "svd"])
    unseen = {point["step"]: point["mse_unseen"] for point in lines_of("gotu-paper.jsonl")[1]["curve"]}
    return [
        f"at step 1,728, with an mse of {unseen[1728]:.2f} there, and close from step 3,456 on ({unseen[3456]:.4f}; at "
        f"the end {unseen[8640]:.4f}",
        f"from {full:.2f} with heads of 16 to {least[8]:.2f} with 8 and {least[4]:.2f} with 4",
        f"{worst['2parity', 'mask']:.4f} on 2Parity, {worst['majority', 'mask']:.4f} on Majority and "
        f"{worst['cyclic3', 'mask']:.4f} on Cyclic3",
        f"worst seed of ThreeSym: {worst['threesym', 'mask-only']:.4f}",
        f"{statistics.median(r['seconds'] for r in lines if r['steps'] == 800):.0f} seconds for 800 steps",
        f"{max(r['peak_rss_mb'] for r in lines):.0f} MB",
        f"by {drift['adam']:.3f} with Adam and by {drift['sgd']:.5f} with SGD",
        f"{sum(r['seconds'] for r in default) / 60:.1f} minutes of training on two cores and "
        f"{max(r['peak_rss_mb'] for r in default):.0f} MB",
    ]


def test_gotu_rows_and_facts_stand_in_the_readme():
    prose = " ".join(README.split())  # a fact may stand on two lines
    missing = [text for text in gotu_rows() + control_rows() + map_rows() + paper_rows() if text not in README]
    missing += [text for text in gotu_facts() if text not in prose]
    assert not missing, "\n".join(missing)


def default_runs(script, name, seeds):
    """Whether results/`name` holds so many whole runs of every init, as the script makes them without a flag."""
    groups = {}
    for r in lines_of(name):
        usual = vars(script.settings([], r["task"])) | {"fraction": r["config"].get("fraction")}
        names = [n for n in r["config"] if n not in (*runs.NOT_OF_THE_RUN, "text")]
        assert {n: r["config"][n] for n in names} == {n: usual[n] for n in names}
        assert r["complete"] and not r["diverged"] and r["steps"] == r["config"]["steps"]
        groups.setdefault((r["task"], r["config"].get("fraction"), r["init"]), []).append(r["seed"])
    return groups and all(sorted(of) == list(range(seeds)) for of in groups.values())


@pytest.mark.arith
def test_the_pilots_of_the_product_s_mask():
    at = {r["what"]: 100 * r["exact_match"] for r in lines_of("arith-pilots.jsonl")
          if (r["token_std"], r["position_std"], r["step"]) == (1, 0.02, 1180)}
    prose = " ".join(README.split())
    assert f"{at['every cross-number pair']:.1f} % after 1,180 steps" in prose
    assert f"{at['products, then all lower columns']:.1f} %, the present design" in prose
    assert f"design at {at['products, then one, two and all columns down']:.1f} %" in prose


def test_evidence_rows_stand_in_the_readme():
    missing = [text for text in evidence_rows() if text not in README]
    assert not missing, "\n".join(missing)


@pytest.mark.arith
def test_arith_rows_stand_in_the_readme():
    missing = [text for text in arith_rows() + arith_scale_rows() + arith_paper_rows() if text not in README]
    assert not missing, "\n".join(missing)
    assert default_runs(train_arith, "arith.jsonl", 3)
    assert all(r["complete"] and not r["diverged"] for name in ("arith-scale.jsonl", "arith-paper.jsonl")
               for r in lines_of(name))


@pytest.mark.vit
def test_vit_rows_stand_in_the_readme():
    missing = [text for text in vit_rows() if text not in README]
    assert not missing, "\n".join(missing)
    assert default_runs(train_vit, "vit.jsonl", 5)
    seconds = statistics.median(r["seconds"] for r in lines_of("vit.jsonl"))
    assert f"{seconds:.0f} seconds a run, as above" in README


@pytest.mark.lm
def test_lm_rows_stand_in_the_readme():
    missing = [text for text in lm_rows() if text not in README]
    assert not missing, "\n".join(missing)
    assert default_runs(train_lm, "lm.jsonl", 5)
    assert len({r["config"]["text"] for r in lines_of("lm.jsonl")}) == 1
    seconds = statistics.median(r["seconds"] for r in lines_of("lm.jsonl"))
    assert f"{seconds:.0f} seconds a run on one thread of" in README


def test_the_paper_preset_s_runs():
    for r in lines_of("gotu-paper.jsonl"):
        usual = vars(train_gotu.settings(["--preset", "paper"], r["task"]))
        assert all(r["config"][name] == usual[name] for name in train_gotu.PRESETS["paper"])
        assert r["steps"] == 8640 and r["complete"] and not r["diverged"]


def test_the_map_and_the_controls_are_three_seeds_each():
    for name in ("gotu-map.jsonl", "gotu-controls.jsonl"):
        groups = {}
        for line in lines_of(name):
            assert line["complete"] and line["config"]["preset"] == "small"
            assert not line["diverged"] or line["config"]["optimizer"] == "sgd"
            groups.setdefault((changed(line), line["task"], line["init"]), []).append(line["seed"])
        assert all(sorted(seeds) == [0, 1, 2] for seeds in groups.values())
    assert not any(changed(line) for line in lines_of("gotu-controls.jsonl"))


def test_quick_start_shows_lines_of_the_default_command(capsys):
    args = train_gotu.settings([], None)
    train_gotu.print_table(args, lines_of("gotu-default.jsonl"))
    printed = capsys.readouterr().out.splitlines()
    quoted = [line[4:] for line in README.splitlines() if line.startswith("    2parity ") or "unseen acc " in line]
    assert len(quoted) == 3 and all(line in printed for line in quoted)


def test_reference_runs_are_ten_seeds_of_the_default_settings():
    lines = lines_of()
    cells = {(r["task"], r["init"], r["seed"]) for r in lines}
    assert len(lines) == len(cells) == 10 * len({cell[:2] for cell in cells})
    for result in lines:
        defaults = vars(train_gotu.settings([], result["task"]))
        config = {"mlp_dim": 4 * 48} | result["config"]  # what it was before it was a flag
        assert all(config[name] == defaults[name] for name in train_gotu.PRESETS["small"])
        assert result["complete"] and not result["diverged"] and result["steps"] == defaults["steps"]
        assert result["script"] == "gotu" and 0 <= result["seed"] < 10 and result["init"] in MAIN
        assert runs.run_key(result["config"], "x")  # the config is whole


def test_the_cost_of_a_mask_in_the_readme_is_the_committed_measurement():
    printed = (ROOT / "results" / "bench.txt").read_text(encoding="utf-8").splitlines()
    assert len(printed) == 15 and all("    " + line in README.splitlines() for line in printed)


def test_every_flag_in_the_readme_exists():
    for script in (train_gotu, train_arith, train_vit, train_lm):
        known = set(script.parser()._option_string_actions)
        commands = re.findall(rf"{script.__name__}\.py[^\n`|]*", README)
        assert commands
        for command in commands:
            assert set(re.findall(r"--[a-z0-9-]+", command)) <= known, command


def test_the_readme_s_test_command_is_what_ci_runs():
    assert "python -m pytest" in README and "python -m pytest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def draw_map(path):
    """The map as a figure: `PYTHONPATH=. python tests/test_readme.py results/gotu-map.png`."""
    groups = [(flags or "as above", {key: [r["metrics"]["mse_all"] for r in these] for key, these in runs_of.items()})
              for flags, runs_of in map_settings().items() if flags.count("--") < 3 and " --position-std" not in flags]
    pictures.dots(groups, ["default", "svd", "mask"], ["2parity", "majority"], path)


if __name__ == "__main__":
    if sys.argv[1:]:
        draw_map(sys.argv[1])
    else:
        print("\n".join(gotu_rows() + control_rows() + map_rows() + paper_rows() + arith_rows() + arith_scale_rows()
                        + arith_paper_rows() + vit_rows() + lm_rows() + evidence_rows() + gotu_facts()))
