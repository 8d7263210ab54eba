"""Every table of README.md and results/README.md, from the result lines beside this file.

    python results/tables.py                  # writes the tables of both pages anew, after a new reference run
    python results/tables.py --map FILE       # draws the map of settings; --ease and --moved: two other figures
"""
import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_arith  # noqa: E402
import train_gotu  # noqa: E402
import train_lm  # noqa: E402
import train_vit  # noqa: E402
from tinymask import arithmetic, pictures, records  # noqa: E402
from tinymask.persistence import even, support_mass  # noqa: E402

MAIN = ["default", "svd", "opt", "mask", "mask-only", "mask-literal"]  # controls have a table of their own
PAGES = [ROOT / "README.md", ROOT / "results" / "README.md", ROOT / "results" / "mechanism.md"]


def lines_of(name="gotu.jsonl"):
    text = (ROOT / "results" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def spread(values, digits, scale=1.0):
    if not values or None in values:
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


def support(these, when=("init", "final")):
    """'start → end' of each layer, a mean over seeds."""
    layers = range(these[0]["config"]["depth"])
    return ", ".join(" → ".join(mean([r["metrics"][f"support_mass_{name}"][layer] for r in these]) for name in when)
                     for layer in layers)


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
    """One row a control: solved seeds, mse, and the layers' support at the end, for each task."""
    rows, groups = [], by(lines_of("gotu-controls.jsonl"), "task", "init")
    first = by([r for r in lines_of() if r["seed"] < 3], "task", "init")
    for init in ["default", "svd", "opt", "mask", *(i for i in train_gotu.CONTROLS if any(i in key for key in groups))]:
        cells = []
        for task in train_gotu.TASKS:
            these = (groups if init in train_gotu.CONTROLS else first).get((task, init))
            if not these:
                cells.append("not run yet")
                continue
            errors = spread([r["metrics"]["mse_all"] for r in these], 3)
            cells.append(f"{solved(these)} of {len(these)}; {errors}; {support(these, ['final'])}")
        rows.append(row(f"`{init}`", *cells))
    return rows


def typed(flags):
    """Flags, name -> value, as they were typed."""
    return " ".join(f"--{name.replace('_', '-')} " + (f"{value:g}" if isinstance(value, float) else str(value))
                    for name, value in flags.items())


def changed(result):
    """The flags of a result line that are not the default of its task, as they were typed."""
    usual, config = vars(train_gotu.settings([], result["task"])), records.of_the_run(result["config"])
    if config["mask_lr"] == config["lr"]:
        del config["mask_lr"]
    return typed({name: value for name, value in config.items() if value != usual[name]})


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
    return typed({name: value for name in names if (value := config.get(name, 1.0)) not in (None, usual[name])})


def arith_groups(name):
    """(task, fraction, flags, init) -> result lines of results/`name`."""
    groups = {}
    for r in lines_of(name):
        flags = flags_of(r, train_arith, ("mode", "readout", "order", "lr", "token_std", "position_std"))
        groups.setdefault((r["task"], r["config"]["fraction"], flags, r["init"]), []).append(r)
    return groups


def arith_cells(these):
    """Whole answers, digits, loss, steps to 75 and 99 %, support."""
    metrics = [r["metrics"] for r in these]
    steps = [spread([m[name] for m in metrics], 0) for name in ("steps_to_75", "steps_to_99")]
    return [percent(these, "exact_match"), percent(these, "digit_accuracy"), spread([m["loss"] for m in metrics], 3),
            *steps, support(these)]


def arith_rows(name, *columns):
    """Arithmetic: a row for each task, fraction, flags and init in results/`name`, labelled by its columns."""
    rows = []
    for (task, fraction, _, init), these in arith_groups(name).items():
        config = these[0]["config"]
        label = {"task": task, "shown": f"{100 * fraction:g} %", "init": f"`{init}`", "order": config.get("order"),
                 "rate": f"{config['lr']:g}"}
        rows.append(row(*(label[column] for column in columns), *arith_cells(these)))
    return rows


def arith_scale_rows():
    """At the paper's fraction, exact match: one row for each scale of tokens and positions, one column an init."""
    cells = {}
    for name in ("arith.jsonl", "arith-scale.jsonl"):
        for (task, fraction, _, init), these in arith_groups(name).items():
            if (task, fraction) == ("add", 0.004):
                config = these[0]["config"]
                key = (config.get("token_std", 1.0), config["position_std"])
                cells.setdefault(key, {})[init] = percent(these, "exact_match")
    return [row(f"{token:g}", f"{position:g}", *(of[init] for init in MAIN[:4]))
            for (token, position), of in sorted(cells.items(), reverse=True)]


def arith_paper_rows():
    """The paper's model: one row for each task, flags and init, beside its Table 2."""
    rows = []
    for (task, _, flags, init), these in arith_groups("arith-paper.jsonl").items():
        paper = "{:.2%}, {:.2%}, {:g}".format(*train_arith.PAPER[task, init]).replace("%", " %")
        rows.append(row(task, f"`{flags}`" if flags else "", f"`{init}`", paper, str(len(these)), *arith_cells(these)))
    return rows


def steps_to(these, defaults, name, better):
    """First evaluated step at which each run is where the default of its seed ends, mean and spread; `-` for never."""
    steps = []
    for r in these:
        (end,) = [d["curve"][-1][name] for d in defaults if d["seed"] == r["seed"]]
        steps.append(next((point["step"] for point in r["curve"] if better(point[name], end)), None))
    return spread(steps, 0)


def vit_rows(name="vit.jsonl"):
    """Vision, the built-in sets: one row for each set and init."""
    rows, defaults = [], by(lines_of("vit.jsonl"), "task", "init")
    for (task, init), these in by(lines_of(name), "task", "init").items():
        steps = steps_to(these, defaults[task, "default"], "top1", lambda here, end: here >= end)
        rows.append(row(task, f"`{init}`", percent(these, "top1"), percent(these, "top1_best"),
                        spread([r["metrics"]["loss"] for r in these], 3), steps, support(these)))
    return rows


def lm_rows(name="lm.jsonl"):
    """Language, the built-in text: one row an init."""
    rows, defaults = [], by(lines_of("lm.jsonl"), "init")["default",]
    for (init,), these in by(lines_of(name), "init").items():
        steps = steps_to(these, defaults, "bits_per_byte", lambda here, end: here <= end)
        cells = [spread([r["metrics"][name] for r in these], digits) for name, digits in (
            ("val_bits_per_byte", 3), ("bits_per_byte", 3), ("perplexity", 2))]
        drift = [r["metrics"]["mask_drift"] for r in these]
        rows.append(row(f"`{init}`", *cells, steps, "" if None in drift else mean(drift, 3)))
    return rows


def headline(label, groups, metric, papers, command, digits=2, scale=100, unit=" %"):
    """A row of the front page. groups: result lines of each column, none for "-"; papers: the paper's figures."""
    cells = [(spread([r["metrics"][metric] for r in these], digits, scale) + unit if these else "-")
             + (f" ({paper})" if paper else "") for these, paper in zip(groups, papers, strict=True)]
    counts = sorted({len(these) for these in groups if these})
    minutes = sum(r["seconds"] for these in groups for r in these) / 60
    return row(label, *cells, " or ".join(map(str, counts)), f"`{command}`", f"{minutes:.0f}")


def boolean_headlines():
    groups, rows = by(lines_of(), "task", "init"), []
    for task in train_gotu.TASKS:
        index, metric, form = (1, "mse_all", dict(digits=4, scale=1, unit="")) if task == "threesym" else (
            0, "acc_all", {})
        papers = [train_gotu.PAPER[task, init][index] for init in MAIN[:4]]
        papers = [f"{paper:g}" if index else f"{100 * paper:.2f}" for paper in papers]
        rows.append(headline(task, [groups[task, init] for init in MAIN[:4]], metric, papers,
                             f"train_gotu.py --tasks {task} --seeds 10", **form))
    whole = by(lines_of("gotu-paper.jsonl"), "init")
    rows.insert(1, headline("2parity, the paper's model", [whole.get((init,), []) for init in MAIN[:4]], "acc_all",
                            [f"{100 * train_gotu.PAPER['2parity', init][0]:.2f}" for init in MAIN[:4]],
                            "train_gotu.py --preset paper --tasks 2parity --inits default mask"))
    return rows


def arith_headlines():
    few, splits, rates, paper, sequence = (arith_groups(f"arith{name}.jsonl")
                                           for name in ("", "-splits", "-rates", "-paper", "-sequence"))
    addition, rows = "train_arith.py --tasks add", []

    def one(label, groups, key, command, papers=("",) * 4):
        these = [groups.get((*key, init), []) for init in MAIN[:4]]
        rows.append(headline(label, these, "exact_match", papers, command))

    of = {task: [f"{100 * train_arith.PAPER[task, init][0]:.2f}" for init in MAIN[:4]] for task in train_arith.TASKS}
    whole, mean_of = f"{addition} --preset paper --bf16", "--readout mean --token-std 1 --position-std 1"
    one("add, 4,000 pairs, the paper's model", paper, ("add", 0.004, ""), f"{whole} --seeds 3", of["add"])
    one("add, 4,000, tokens 1, positions 0.02", paper, ("add", 0.004, "--token-std 1"), f"{whole} --token-std 1",
        of["add"])
    one("add, 4,000, both 1, mean readout", paper, ("add", 0.004, mean_of), f"{whole} {mean_of} --seeds 3")
    for pairs, part, name in (("500", 0.0005, "0.0005"), ("1,000", 0.001, "0.001")):
        shown = f"{addition} --fraction {name}"
        one(f"add, {pairs} pairs", few, ("add", part, ""), f"{shown} --seeds 3")
        if pairs == "500":
            one("add, 500 pairs, three splits", splits, ("add", part, ""), f"{shown} --split 1 --first-seed 1")
        one(f"add, {pairs} pairs, rate 0.003", rates, ("add", part, "--lr 0.003"), f"{shown} --lr 3e-3 --seeds 3")
    for order, label, flag in (("plain", "digit after digit", ""),
                               ("reversed", "lowest digit first", "--order reversed ")):
        mode = f"--mode autoregressive --order {order}"
        typed = f"{addition} --mode autoregressive {flag}--fraction 0.001"
        one(f"add, 1,000, {label}", sequence, ("add", 0.001, mode), f"{typed} --seeds 3")
        one(f"add, 1,000, {label}, rate 0.003", sequence, ("add", 0.001, f"{mode} --lr 0.003"),
            f"{typed} --lr 3e-3 --seeds 3")
    whole = "train_arith.py --tasks mul --preset paper --bf16"
    one("mul, 30,000 pairs, the paper's model", paper, ("mul", 0.03, ""), f"{whole} --seeds 3 --inits default mask",
        of["mul"])
    one("mul, 30,000 pairs, both 1", paper, ("mul", 0.03, "--position-std 1"), f"{whole} --position-std 1", of["mul"])
    return rows


def vit_headlines():
    groups = by(lines_of("vit.jsonl"), "task", "init")
    return [headline(task, [groups[task, init] for init in list(train_vit.INITS)[:6]], "top1", [""] * 6,
                     f"train_vit.py --dataset {task} --seeds 5") for task in ("builtin", "builtin-global")]


def lm_headlines():
    groups = by(lines_of("lm.jsonl"), "init")
    return [headline("builtin", [groups[init,] for init in list(train_lm.INITS)[:6]], "bits_per_byte", [""] * 6,
                     "train_lm.py --seeds 5", 3, 1, "")]


def control_headlines():
    """One row an init, one column a section, seeds 0 to 2."""
    def of(*names):
        lines = [r for name in names for r in lines_of(name) if r["seed"] < 3]
        return by([r for r in lines if r["config"].get("fraction") in (None, 0.001)], "task", "init")

    gotu, arith, vit, lm = (of(f"{name}.jsonl", f"{name}-controls.jsonl") for name in ("gotu", "arith", "vit", "lm"))
    columns = [(arith, "add", "exact_match"), (vit, "builtin", "top1"), (vit, "builtin-global", "top1")]
    rows = []
    for init in [*MAIN[:4], "mask-zero", "mask-frozen", "mask-shuffled", "bias", "svd-frozen", "opt-frozen"]:
        cells = [", ".join(str(solved(gotu[task, init])) for task in ("2parity", "majority", "cyclic3"))]
        cells += [percent(groups.get((task, init), []), metric) for groups, task, metric in columns]
        cells.append(spread([r["metrics"]["bits_per_byte"] for r in lm.get(("builtin", init), [])], 3))
        rows.append(row(f"`{init}`", *cells))
    return rows


def default_rows():
    """The default commands, each run alone: training time on all cores, peak memory."""
    rows = []
    for (script,), these in by(lines_of("defaults.jsonl"), "script").items():
        minutes, memory = sum(r["seconds"] for r in these) / 60, max(r["peak_rss_mb"] for r in these)
        rows.append(row(f"`train_{script}.py`", str(len(these)), f"{minutes:.1f}", f"{memory:,.0f} MB", "not measured"))
    return rows


def mechanism_facts():
    """Figures in the prose about what moves a prior."""
    tasks, cells = ("2parity", "majority", "cyclic3"), grid_cells()
    fresh = by(lines_of("gotu-fresh.jsonl"), "task", "init")
    best = {key: [r for r in these if is_tuned(r, key[1])] for key, these in fresh.items()}
    count = {init: [right(best.get((task, init), [])) for task in tasks] for init in MAIN[:4]}
    ease = {init: [f"{sum(right(first) for first in cells_of)} of {len(cells_of)}" for cells_of in (
        [[r for r in these if r["seed"] == 100] for these in cells[task, init].values()] for task in tasks)]
        for init in MAIN[:4]}
    end = {part: statistics.median(r["curve"][-1]["moved"][part][1][0] for r in best["2parity", "svd"])
           for part in ("weights", "inputs")}
    alone = by([r for r in lines_of("gotu-layers.jsonl") if r["config"]["prior_layers"] == [1]], "task", "init")
    layers = {init: alone["2parity", init] for init in ("mask", "svd", "svd-fixed")}
    first = {init: f"{right(these)} of {len(these)}" for init, these in layers.items()}
    masked = {task: best[task, "mask"] for task in tasks[:2]}
    share = {task: [100 * statistics.median(r["curve"][-1]["bound_share"][0][pairs] for r in these) for pairs in (0, 1)]
             for task, these in masked.items()}
    early = [r["curve"][0]["gradient"] for r in masked["2parity"]]
    of_bias = [r["curve"][0]["gradient"] for r in fresh["2parity", "bias"]]
    slope = [statistics.median(g["mask"][0][pairs] for g in early) for pairs in (0, 1)]
    slope += [statistics.median(g["query"][0] for g in early), statistics.median(g["mask"][0][0] for g in of_bias)]
    words = {init: "{}, {} and {}".format(*numbers) for init, numbers in count.items()}
    cell = {init: "{}, {} and {}".format(*numbers) for init, numbers in ease.items()}
    return [
        f"the mask is right on {words['mask']} of 5 fresh seeds, opt on {words['opt']}, svd on {words['svd']} and the "
        f"default on {words['default']}",
        f"the mask is right in {cell['mask']} settings, opt in {cell['opt']}, svd in {cell['svd']}, the default in "
        f"{cell['default']}",
        f"by {short_number(end['weights'])} through W_Q and W_K and by {short_number(end['inputs'])} through what the "
        "layer reads",
        f"right on {first['svd-fixed']} seeds, as the mask there is ({first['mask']}); left to train, svd there is "
        f"right on {first['svd']}",
        f"uses {share['2parity'][0]:.0f} % of it on open and {share['2parity'][1]:.1f} % on closed pairs of 2Parity's "
        f"layer 1, {share['majority'][0]:.0f} and {share['majority'][1]:.1f} % on Majority",
        f"dL/dM is {slope[0]:.0e} on open and {slope[1]:.0e} on closed pairs, that of dL/dW_Q {slope[2]:.0e} (`bias`, "
        f"without log σ: {slope[3]:.0e} on open pairs)",
    ]


def facts():
    """Figures in the README's prose, each as the text that must stand there."""
    lines = lines_of()
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
    mirrored = [arithmetic.mirrored(*train_arith.load_pairs(args_of[-1][1])).float().mean().item() for args_of in (
        train_arith.one_fraction_each(flags, [task]) for task, flags in (
            ("mul", []), ("mul", ["--preset", "paper"]), ("add", [])))]
    chance = {script: [support_mass([even(supports[0][None, None])], supports[:1])[0] for supports in (
        script.prior(script.settings([], task), task, "mask", 0) for task in tasks)]
        for script, tasks in ((train_gotu, ["2parity", "majority", "cyclic3"]), (train_arith, ["add"]))}
    def seeds(name, digits=0, metric="exact_match", **where):
        """Of each seed, in percent: '60, 94, 89'."""
        these = [r for r in lines_of(name) if all((r["config"] | r)[key] == value for key, value in where.items())]
        return ", ".join(f"{100 * r['metrics'][metric]:.{digits}f}" for r in sorted(these, key=lambda r: r["seed"]))

    halves = [seeds(f"vit{name}.jsonl", metric="top1", task="builtin-global", init=init)
              for name, init in (("", "mask"), ("-controls", "mask-shuffled"))]
    frozen = [seeds("arith-controls.jsonl", init=init) for init in ("svd-frozen", "opt-frozen")]
    travel = [r["config"]["lr"] * r["steps"] / 2 for name in ("gotu", "arith", "vit", "lm")
              for r in lines_of(f"{name}.jsonl")]  # half a cosine
    places = {name: [r for r in lines_of("gotu-map.jsonl") if (r["task"], r["init"], changed(r)) == (
        "2parity", "mask", name)] for name in ("--position-std 0.3", "--position-std 1", "--closed -10")}
    return mechanism_facts() + [
        f"(mask by seed: {halves[0]} %)",
        f"of three ({halves[1]} % against {', '.join(halves[0].split(', ')[:3])})",
        f"(svd by seed {seeds('arith-rates.jsonl', init='svd', fraction=0.0005)} %)",
        f"(by seed {frozen[0]} and {frozen[1]} % against {seeds('arith.jsonl', init='mask', fraction=0.001)};",
        f"sum of the rates, {min(travel):.1f} to {max(travel):.1f} here",
        "at 0.3 on {} of 3 seeds, at 1.0 on {} of 3; and with the paper's -10 on {} of 3".format(
            *(solved(these) for these in places.values())),
        f"({mean([r['metrics']['mse_all'] for r in runs_of['threesym', 'mask']], 4)} against 2.4063)",
        f"the support has {chance[train_gotu][0]:.2f} of it (Majority: {chance[train_gotu][1]:.2f}; addition, below: "
        f"{chance[train_arith][0]:.2f})",
        "{:.0%} of the two-digit products, {:.0%} of the paper's three-digit ones, {:.1%} of the sums from 4,000 pairs"
        .format(*mirrored).replace("%", " %"),
        f"at step 1,728, with an mse of {unseen[1728]:.2f} there, and close from step 3,456 on ({unseen[3456]:.4f}; at "
        f"the end {unseen[8640]:.4f}",
        f"from {full:.2f} with heads of 16 to {least[8]:.2f} with 8 and {least[4]:.2f} with 4",
        f"{worst['2parity', 'mask']:.4f} on 2Parity, {worst['majority', 'mask']:.4f} on Majority and "
        f"{worst['cyclic3', 'mask']:.4f} on Cyclic3",
        f"worst seed of ThreeSym: {worst['threesym', 'mask-only']:.4f}",
        f"{statistics.median(r['seconds'] for r in lines if r['steps'] == 800):.0f} seconds for 800 steps",
        f"{max(r['peak_rss_mb'] for r in lines):.0f} MB",
        f"by {drift['adam']:.3f} with Adam and by {drift['sgd']:.5f} with SGD",
        f"{statistics.median(r['seconds'] for r in lines_of('vit.jsonl')):.0f} seconds a run, as above",
        f"{statistics.median(r['seconds'] for r in lines_of('lm.jsonl')):.0f} seconds a run on one thread of",
    ]


# -- results/mechanism.md ---------------------------------------------------------------------


def setting(result):
    """Codes, rate and ridge of a result line, the axes of the grid."""
    config = result["config"]
    ridge = f", ridge {config['ridge']:g}" if config.get("ridge") and result["init"] in ("svd", "opt") else ""
    return f"codes {config['position_std']:g}, rate {config['lr']:g}{ridge}"


def right(these, name="acc_unseen", least=0.99):
    """Seeds that get so much right."""
    return sum((r["metrics"][name] or 0) > least for r in these)


def grid_cells(name="gotu-grid.jsonl"):
    """(task, init) -> setting -> result lines of the tuning seeds; the grid alone: a gap of 10, ridges of .001 on."""
    cells = {}
    for r in lines_of(name):
        config = r["config"]
        if config.get("gap", 10) == 10 and (r["init"] not in ("svd", "opt") or config["ridge"]):
            cells.setdefault((r["task"], r["init"]), {}).setdefault(setting(r), []).append(r)
    return cells


def ease_rows():
    """The grid on seed 100, and each arm's own best on fresh seeds."""
    rows, cells, fresh = [], grid_cells(), by(lines_of("gotu-fresh.jsonl"), "task", "init")
    for task, init in ((task, init) for task in ("2parity", "majority", "cyclic3")
                       for init in MAIN[:4] if (task, init) in TUNED):
        first = [[r for r in these if r["seed"] == 100] for these in cells[task, init].values()]
        solved_cells = sum(right(these) == 1 for these in first)
        chosen = TUNED[task, init]
        these = [r for r in fresh.get((task, init), []) if setting(r) == chosen]
        rows.append(row(task, f"`{init}`", f"{solved_cells} of {len(first)}", chosen,
                        f"{right(these)} of {len(these)}", spread([r["metrics"]["mse_unseen"] for r in these], 3),
                        support(these) if these else ""))
    return rows


TUNED = {  # each arm's best over the tuning seeds: what `ease_rows` shows on fresh ones
    ("2parity", "default"): "codes 0.05, rate 0.001", ("2parity", "mask"): "codes 0.05, rate 0.001",
    ("2parity", "svd"): "codes 0.05, rate 0.0003", ("2parity", "opt"): "codes 0.05, rate 0.001, ridge 0.001",
    ("majority", "default"): "codes 0.3, rate 0.003", ("majority", "mask"): "codes 0.05, rate 0.003",
    ("cyclic3", "default"): "codes 1, rate 0.003", ("cyclic3", "mask"): "codes 0.05, rate 0.003",
    ("cyclic3", "svd"): "codes 0.3, rate 0.003, ridge 0.001", ("cyclic3", "opt"): "codes 0.3, rate 0.003, ridge 0.1",
    ("majority", "svd"): "codes 0.05, rate 0.003, ridge 0.1", ("majority", "opt"): "codes 0.05, rate 0.003, ridge 0.1",
}


MOVED = {  # arm -> its result lines: the tuned ones (the first four), and the published query-key inits' kin
    "default": lambda r: is_tuned(r, "default"), "mask": lambda r: is_tuned(r, "mask"),
    "svd": lambda r: is_tuned(r, "svd"), "opt": lambda r: is_tuned(r, "opt"),
    "bias": lambda r: r["init"] == "bias",
    "svd, no ridge": lambda r: r["init"] == "svd" and r["config"]["ridge"] == 0 and r["config"]["lr"] == 0.001,
    "svd-published": lambda r: r["init"] == "svd-published",
}


def short_number(value):
    """Two digits, at most two decimals."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def is_tuned(r, init):
    return r["init"] == init and setting(r) == TUNED.get((r["task"], init))


def moved_rows(name="gotu-fresh.jsonl", tasks=("2parity", "majority"), arms=MOVED):
    """What moved the logits of open pairs, at the end: root mean squares of each layer, a median over seeds."""
    rows = []
    for task, (label, where) in itertools.product(tasks, arms.items()):
        these = [r for r in lines_of(name) if r["task"] == task and where(r)]
        lost, these = len(these), [r for r in these if not r["diverged"]]
        lost -= len(these)
        if not these:
            rows += [row(task, label, f"{lost} diverged", "", "", "", "", "")] if lost else []
            continue
        parts = [", ".join(short_number(statistics.median(r["curve"][-1]["moved"][part][layer][0] for r in these))
                           for layer in range(these[0]["config"]["depth"])) for part in ("mask", "weights", "inputs")]
        norms = ", ".join(f"{mean([r['metrics']['query_norm_init'][layer] for r in these], 0)}"
                          for layer in range(these[0]["config"]["depth"]))
        seeds = str(len(these)) + f", {lost} more diverged" * bool(lost)
        rows.append(row(task, label, seeds, norms, *parts, support(these)))
    return rows


def sgd_rows():
    """Plain SGD: what moved the logits, and what came out."""
    arms = {init: lambda r, init=init: r["init"] == init and r["config"]["ridge"] == 0
            for init in ("default", "mask", "bias", "svd", "opt")}
    arms |= {f"{init}, ridge 0.1": lambda r, init=init: r["init"] == init and r["config"]["ridge"] == 0.1
             for init in ("svd", "opt")}
    return moved_rows("gotu-sgd.jsonl", arms=arms)


def arith_moved_rows():
    """The same on addition from 500 pairs, three layers, at the default setting."""
    def usual(r):
        config = r["config"]
        return (config["fraction"], config["lr"], config["mask_lr"], config["ridge"]) == (0.0005, 0.001, 0.001, 0)

    arms = {init: lambda r, init=init: r["init"] == init and usual(r)
            for init in ("default", "mask", "bias", "svd", "opt", "svd-published")}
    return moved_rows("arith-fresh.jsonl", tasks=["add"], arms=arms)


def arith_ease_rows():
    """Addition from 500 pairs: the grid on seed 100, and each arm's own best on fresh seeds."""
    grid, fresh = lines_of("arith-grid.jsonl"), lines_of("arith-fresh.jsonl")
    rows = []
    for init in MAIN[:4]:
        cells = {setting(r): r["metrics"]["exact_match"] for r in grid if r["init"] == init}
        chosen = max(cells, key=cells.__getitem__)
        these = [r for r in fresh if r["init"] == init and setting(r) == chosen and r["config"]["fraction"] == 0.0005
                 and r["config"]["mask_lr"] == r["config"]["lr"]]
        ends = ", ".join(f"{100 * r['metrics']['exact_match']:.0f}" for r in these)
        rows.append(row(f"`{init}`", f"{100 * min(cells.values()):.0f} to {100 * max(cells.values()):.0f} %", chosen,
                        percent(these, "exact_match"), ends, support(these) if these else ""))
    return rows


def product_rows():
    """sigma(M) times the softmax beside log sigma(M) inside it, on seed 100."""
    lines = [r for r in lines_of("gotu-grid.jsonl") if r["seed"] == 100]
    rows = []
    for rate in (0.001, 0.003):
        for init in ("hadamard", "mask"):
            cells = []
            for task in train_gotu.TASKS:
                codes = vars(train_gotu.settings([], task))["position_std"]
                these = [r for r in lines if (r["task"], r["init"], r["config"]["lr"], r["config"]["position_std"])
                         == (task, init, rate, codes)]
                cells.append("; ".join(("right" if right([r]) else "wrong") * (r["task"] != "threesym") +
                                       f" {r['metrics']['mse_unseen']:.3f}" for r in these).strip())
            rows.append(row(f"`{init}`, rate {rate:g}", *cells))
    return rows


def steps_to_default(these, ends):
    """Median over seeds of the first evaluated step at which a run is where the default of its seed ends; '-' never."""
    steps = [next((point["step"] for point in r["curve"] if point["exact_match"] >= ends[r["seed"]]), math.inf)
             for r in these]
    middle = statistics.median(steps)
    return "-" if middle == math.inf else f"{middle:.0f}"


def wrong_rows():
    """Addition with a shuffled mask: how long until it is where the default ends, by its gap and its own rate."""
    lines = lines_of("arith-wrong.jsonl")
    ends = {r["seed"]: r["curve"][-1]["exact_match"] for r in lines_of("arith-fresh.jsonl")
            if r["init"] == "default" and r["config"]["fraction"] == 0.004}
    rows = []
    for closed in sorted({r["config"]["closed"] for r in lines}, reverse=True):
        cells = []
        for init, rate in (*(("mask-shuffled", rate) for rate in (0.0, 0.001, 0.03, 0.3)), ("svd-shuffled", 0.001)):
            these = [r for r in lines if r["init"] == init
                     and (r["config"]["closed"], r["config"]["mask_lr"]) == (closed, rate)]
            cells.append(f"{steps_to_default(these, ends)}; {percent(these, 'exact_match')}" if these else "")
        rows.append(row(f"{-closed:g}", *cells))
    return rows


def layer_rows():
    """The prior in one layer, or in all with what feeds it frozen."""
    fresh = [r for r in lines_of("gotu-fresh.jsonl") if is_tuned(r, r["init"]) and r["init"] in ("mask", "svd")
             and r["task"] in ("2parity", "majority")]
    groups = {}
    for r in fresh + lines_of("gotu-layers.jsonl"):
        layers = r["config"].get("prior_layers")
        groups.setdefault((r["task"], r["init"], str(layers[0]) if layers else "both"), []).append(r)
    return [row(task, f"`{init}`", layers, f"{right(these)} of {len(these)}",
                spread([r["metrics"]["mse_unseen"] for r in these], 3), support(these))
            for (task, init, layers), these in sorted(groups.items())]


TABLES = {  # how a table's header begins -> its rows
    "| script | runs by default |": default_rows,
    "| task | default | svd |": boolean_headlines,
    "| task, pairs shown |": arith_headlines,
    "| set | default |": vit_headlines,
    "| text | default |": lm_headlines,
    "| init | Boolean |": control_headlines,
    "| task | init | paper: accuracy, mse |": gotu_rows,
    "| init | 2parity |": control_rows,
    "| change | 2parity": map_rows,
    "| init, paper preset |": paper_rows,
    "| tokens | positions |": arith_scale_rows,
    "| task | shown | init |": lambda: arith_rows("arith.jsonl", "task", "shown", "init"),
    "| init, other pairs | exact match |": lambda: arith_rows("arith-splits.jsonl", "init"),
    "| init, mirrors apart | exact match |": lambda: arith_rows("arith-mirrors.jsonl", "init"),
    "| control | exact match |": lambda: arith_rows("arith-controls.jsonl", "init"),
    "| order | rate | init |": lambda: arith_rows("arith-sequence.jsonl", "order", "rate", "init"),
    "| shown, rate 0.003 | init |": lambda: arith_rows("arith-rates.jsonl", "shown", "init"),
    "| task | changed | init |": arith_paper_rows,
    "| set | init | top-1, last |": vit_rows,
    "| set | control |": lambda: vit_rows("vit-controls.jsonl"),
    "| init | bits/byte: validation |": lm_rows,
    "| control | bits/byte: validation |": lambda: lm_rows("lm-controls.jsonl"),
    "| task | init | of the grid right |": ease_rows,
    "| task | arm | seeds |": moved_rows,
    "| task | init | layers with the prior |": layer_rows,
    "| gap | mask frozen |": wrong_rows,
    "| task | arm, addition | seeds |": arith_moved_rows,
    "| init, 500 sums | of the grid |": arith_ease_rows,
    "| form | 2parity |": product_rows,
    "| task | arm, SGD | seeds |": sgd_rows,
}


def table_at(text, header):
    """(start, end) of the rows of the one table whose header begins so."""
    (start,) = [match.end() for match in re.finditer(rf"^{re.escape(header)}.*\n\|[-|]*\n", text, re.MULTILINE)]
    return start, start + re.match(r"(\|.*\n)*", text[start:]).end()


def dots(groups, inits, titles, path):
    """Where the claim holds: one panel a task, one place on its axis a setting, one dot a run, inits side by side.

    groups: list of (setting, {(task, init): errors, one for each seed, None where it diverged}). The error is on a
    logarithmic axis, with 0.0001 for whatever is below.
    """
    with pictures.drawing(path, len(titles), 1, 9, 2.9, sharex=True) as (_, axes):
        for ax, task in zip(axes.flat, titles):
            for shift, init in enumerate(inits):
                runs = [(place + 0.22 * (shift - (len(inits) - 1) / 2), max(error, 1e-4))
                        for place, (_, errors) in enumerate(groups) for error in errors.get((task, init), [])
                        if error is not None]
                ax.plot(*numpy.reshape(runs, (-1, 2)).T, "o", color=pictures.colour(init, inits), label=init,
                        markersize=4.5, alpha=0.75, markeredgewidth=0)
            ax.set(yscale="log", title=task, ylabel="mean squared error", xlim=(-0.6, len(groups) - 0.4))
            for place in range(len(groups) - 1):
                ax.axvline(place + 0.5, color="#dddddd", linewidth=0.6)
        ax.set_xticks(range(len(groups)), [setting for setting, _ in groups], rotation=60, ha="right", fontsize=8)
        axes[0, 0].legend(frameon=False, ncols=len(inits), loc="lower right", bbox_to_anchor=(1, 1))


def draw_map(path):
    """The map as a figure."""
    groups = [(flags or "as above", {key: [r["metrics"]["mse_all"] for r in these] for key, these in runs_of.items()})
              for flags, runs_of in map_settings().items() if flags.count("--") < 3 and " --position-std" not in flags]
    dots(groups, ["default", "svd", "mask"], ["2parity", "majority"], path)


def draw_ease(path):
    """Every cell of the grid as a point, and the fresh seeds at each arm's best as crosses: one panel a task."""
    cells, fresh, arms = grid_cells(), by(lines_of("gotu-fresh.jsonl"), "task", "init"), MAIN[:4]
    tasks = [task for task in train_gotu.TASKS if (task, "mask") in TUNED]
    with pictures.drawing(path, 1, len(tasks), 3.0, 3.3, sharey=True) as (_, axes):
        for ax, task in zip(axes.flat, tasks):
            for place, init in enumerate(arms):
                grid = [r for these in cells[task, init].values() for r in these if r["seed"] == 100]
                best = [r for r in fresh.get((task, init), []) if setting(r) == TUNED[task, init]]
                for these, shift, form in ((grid, -0.15, dict(marker="o", alpha=0.5)), (best, 0.2, dict(marker="x"))):
                    errors = [max(r["metrics"]["mse_unseen"], 1e-4) for r in these]
                    ax.plot([place + shift] * len(errors), errors, linestyle="", markersize=5,
                            color=pictures.colour(init, arms), **form)
            ax.set(yscale="log", title=task, xlim=(-0.6, len(arms) - 0.4))
            ax.set_xticks(range(len(arms)), arms, fontsize=9)
        axes[0, 0].set_ylabel("mean squared error, unseen part")


def draw_moved(path):
    """What moved the logits of open pairs by the end, one panel a task and layer, three bars an arm."""
    tasks, parts = ["2parity", "majority"], {"mask": "#d62728", "weights": "#1f77b4", "inputs": "#999999"}
    with pictures.drawing(path, len(tasks), 2, 4.2, 2.7, sharey=True) as (figure, axes):
        for (task, layer), ax in zip(itertools.product(tasks, range(2)), axes.flat):
            arms = [(label, [r for r in lines_of("gotu-fresh.jsonl") if r["task"] == task and where(r)])
                    for label, where in MOVED.items()]
            arms = [(label, these) for label, these in arms if these]
            for shift, (part, colour) in enumerate(parts.items()):
                sizes = [statistics.median(r["curve"][-1]["moved"][part][layer][0] for r in these) for _, these in arms]
                places = [place + 0.27 * (shift - 1) for place in range(len(arms))]
                ax.bar(places, sizes, 0.27, color=colour, label=part)
            ax.set(yscale="log", ylim=(0.01, 2e4), title=f"{task}, layer {layer + 1}")
            ax.set_xticks(range(len(arms)), [label for label, _ in arms], fontsize=8, rotation=25, ha="right")
        for ax in axes[:, 0]:
            ax.set_ylabel("logits moved, rms")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside upper center")


def write_tables():
    """Put the rows into the two pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for header, rows in TABLES.items():
            if re.search(rf"^{re.escape(header)}", text, re.MULTILINE):
                start, end = table_at(text, header)
                text = text[:start] + "".join(line + "\n" for line in rows()) + text[end:]
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    draw = {"--map": draw_map, "--ease": draw_ease, "--moved": draw_moved}.get("".join(sys.argv[1:2]))
    draw(sys.argv[2]) if draw else write_tables()
