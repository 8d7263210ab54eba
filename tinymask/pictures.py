"""Figures from result lines. Needs matplotlib, the extra `plot`; nothing else in the package does.

One colour for one init, in every figure of the project.
"""
import warnings

import numpy

from tinymask.runs import fail

COLOURS = {
    "default": "#777777", "svd": "#1f77b4", "opt": "#2ca02c", "mask": "#d62728",
    "mask-only": "#7b1fa2", "mask-literal": "#e6a13c",
    # controls
    "mask-zero": "#bdbdbd", "mask-frozen": "#ff8a80", "mask-hard": "#5d1010", "mask-shuffled": "#8d6e63",
    "bias": "#f06292", "svd-frozen": "#80b1d3", "opt-frozen": "#98df8a",
    # images and text
    "mimetic": "#17a2b8", "impulse": "#3f51b5", "mask-slopes": "#ff7f0e", "alibi": "#556b2f",
}


def pyplot():
    """matplotlib.pyplot, drawing to files. Leaves with one line where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot as plt
    except ValueError as error:  # MPLBACKEND
        fail(f"--plot: {error}")
    except ImportError:
        fail("--plot: needs matplotlib; install it with: pip install 'tinymask[plot]' (or: pip install matplotlib)")
    warnings.filterwarnings("ignore", message="Glyph")  # a character of a file's name that no font has
    return plt


def curves(results, tasks, inits, path):
    """Two rows of panels, one column a task, against the step: error on the unseen part, and the prior.

    results: lines of the Boolean script. Lines are means over seeds, bands one standard deviation.
    The lower row is the attention on the prior's support in the last layer, where it is lost first.
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, len(tasks), figsize=(4.5 * len(tasks), 6), sharex="col", squeeze=False)
    for column, task in enumerate(tasks):
        for init in inits:
            runs = [r for r in results if (r["task"], r["init"], r["diverged"]) == (task, init, False)]
            if not runs:
                continue
            steps = [point["step"] for point in runs[0]["curve"]]
            errors = [[point["mse_unseen"] for point in r["curve"]] for r in runs]
            masses = [[r["metrics"]["support_mass_init"][-1]] + [point["support_mass"][-1] for point in r["curve"]]
                      for r in runs]
            for ax, x, rows in ((axes[0, column], steps, errors), (axes[1, column], [0, *steps], masses)):
                _band(ax, x, rows, init)
        axes[0, column].set(title=task, ylim=(0, None))
        axes[1, column].set(xlabel="step", ylim=(0, 1.03), xlim=(0, None))
    axes[0, 0].set_ylabel("mean squared error, unseen part")
    axes[1, 0].set_ylabel("attention on the support, last layer")
    _legend(figure, axes[0])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def learning(results, tasks, inits, path):
    """One row of panels a task: whole answers right against the step, one panel a fraction of the pairs, and
    where there are several fractions, against the fraction at the end.

    results: lines of the arithmetic script. Lines are means over seeds, bands and bars one standard deviation.
    """
    plt = pyplot()
    fractions = {task: sorted({r["config"]["fraction"] for r in results if r["task"] == task}) for task in tasks}
    columns = max(len(of_task) + (len(of_task) > 1) for of_task in fractions.values())
    figure, axes = plt.subplots(len(tasks), columns, figsize=(3.6 * columns + 0.6, 3.1 * len(tasks) + 0.8),
                                sharey=True, squeeze=False)
    for row, task in zip(axes, tasks):
        row[0].set(ylabel="whole answers right", ylim=(-0.02, 1.02))
        for ax in row[len(fractions[task]):]:
            ax.set(title=f"{task}, at the end", xlabel="fraction of all pairs", xscale="log",
                   visible=ax is row[len(fractions[task])] and len(fractions[task]) > 1)
            ax.set_xticks(fractions[task], [f"{100 * fraction:g} %" for fraction in fractions[task]])
            ax.minorticks_off()
        for ax, fraction in zip(row, fractions[task]):
            ax.set(title=f"{task}, {100 * fraction:g} % of all pairs", xlabel="step")
            for init in inits:
                runs = [r for r in results if (r["task"], r["init"], r["config"]["fraction"], r["diverged"])
                        == (task, init, fraction, False)]
                if runs:
                    steps = [point["step"] for point in runs[0]["curve"]]
                    _band(ax, steps, [[point["exact_match"] for point in r["curve"]] for r in runs], init)
                if runs and len(fractions[task]) > 1:
                    mean, spread = _mean_std([[r["metrics"]["exact_match"]] for r in runs])
                    row[len(fractions[task])].errorbar([fraction], mean, spread, fmt="o", color=COLOURS[init])
    _legend(figure, axes.flat)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def progress(results, tasks, inits, measure, label, path):
    """One panel a task: a measure of the curve against the step. Lines are means over seeds, bands one standard
    deviation."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 4.2), squeeze=False)
    for ax, task in zip(axes[0], tasks):
        ax.set(title=_plain(task), xlabel="step")
        for init in inits:
            runs = [r for r in results if (r["task"], r["init"], r["diverged"]) == (task, init, False)]
            if runs:
                steps = [point["step"] for point in runs[0]["curve"]]
                _band(ax, steps, [[point[measure] for point in r["curve"]] for r in runs], init)
    axes[0, 0].set_ylabel(label)
    _legend(figure, axes[0])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def grid(rows, columns, images, path):
    """Matrices as a grid of grey panels, 0 white and 1 black: masks per head, attention before and after.

    rows, columns: their titles. images: one tensor (N, N) for each panel, row by row.
    """
    plt = pyplot()
    figure, axes = plt.subplots(len(rows), len(columns), squeeze=False,
                                figsize=(1.7 * len(columns) + 0.9, 1.75 * len(rows) + 0.3))
    for number, (ax, image) in enumerate(zip(axes.flat, images)):
        ax.set(xticks=[], yticks=[])
        ax.imshow(image.numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        if number < len(columns):
            ax.set_title(columns[number], fontsize=10)
        if number % len(columns) == 0:
            ax.set_ylabel(rows[number // len(columns)], fontsize=10)
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def dots(groups, inits, titles, path):
    """Where the claim holds: one panel a task, one place on its axis a setting, one dot a run.

    groups: list of (setting, {(task, init): errors, one for each seed, None where it diverged}). inits:
    side by side. The error is on a logarithmic axis, with 0.0001 for whatever is below.
    """
    plt = pyplot()
    figure, axes = plt.subplots(len(titles), 1, figsize=(9, 2.6 * len(titles) + 1.2), sharex=True, squeeze=False)
    for ax, task in zip(axes[:, 0], titles):
        for shift, init in enumerate(inits):
            points = [(place + 0.22 * (shift - (len(inits) - 1) / 2), max(error, 1e-4))
                      for place, (_, runs) in enumerate(groups) for error in runs.get((task, init), [])
                      if error is not None]
            ax.plot([x for x, _ in points], [y for _, y in points], "o", color=COLOURS[init], label=init,
                    markersize=4.5, alpha=0.75, markeredgewidth=0)
        ax.set(yscale="log", title=task, ylabel="mean squared error", xlim=(-0.6, len(groups) - 0.4))
        for place in range(len(groups) - 1):
            ax.axvline(place + 0.5, color="#dddddd", linewidth=0.6)
    axes[-1, 0].set_xticks(range(len(groups)), [setting for setting, _ in groups], rotation=60, ha="right", fontsize=8)
    axes[0, 0].legend(frameon=False, ncols=len(inits), loc="lower right", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plain(text):
    """A file's name as text: no formulas in it, no broken characters."""
    return text.encode("utf-8", "replace").decode().replace("$", r"\$")


def _band(ax, x, rows, init):
    """The mean of rows, a line, and one standard deviation about it, a band."""
    mean, spread = _mean_std(rows)
    ax.plot(x, mean, color=COLOURS[init], label=init)
    ax.fill_between(x, mean - spread, mean + spread, color=COLOURS[init], alpha=0.15, linewidth=0)


def _mean_std(rows):
    rows = numpy.array(rows, dtype=float)
    return rows.mean(axis=0), rows.std(axis=0, ddof=1) if len(rows) > 1 else 0 * rows[0]


def _legend(figure, axes):
    """One legend above all panels, in as many rows as it needs."""
    handles = {line.get_label(): line for ax in axes for line in ax.get_lines() if line.get_label()[0] != "_"}
    columns = max(1, int(figure.get_figwidth() / 1.4))
    if handles:  # none where every run diverged
        figure.legend(handles.values(), handles.keys(), frameon=False, loc="upper center",
                      ncols=min(columns, len(handles)))
    lines = -(-len(handles) // columns)
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.05 + 0.22 * lines) / figure.get_figheight()))
