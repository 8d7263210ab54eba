"""Figures from result lines. Needs matplotlib, the extra `plot`; nothing else in the package does.

One colour for one init, in every figure of the project.
"""
from tinymask.runs import fail

COLOURS = {"default": "#777777", "svd": "#1f77b4", "opt": "#2ca02c", "mask": "#d62728", "mask-literal": "#e6a13c"}


def pyplot():
    """matplotlib.pyplot, drawing to files. Leaves with one line where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot as plt
    except ImportError:
        fail("--plot: needs matplotlib; install it with: pip install 'tinymask[plot]' (or: pip install matplotlib)")
    return plt


def curves(results, tasks, inits, path):
    """Two rows of panels, one column a task, against the step: error on the unseen part, and the prior.

    results: lines of the Boolean script. Lines are means over seeds, bands one standard deviation.
    The lower row is the attention on the prior's support in the last layer, where it is lost first.
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, len(tasks), figsize=(4.5 * len(tasks), 6), sharex=True, squeeze=False)
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
                mean, spread = _mean_std(rows)
                ax.plot(x, mean, color=COLOURS[init], label=init)
                ax.fill_between(x, mean - spread, mean + spread, color=COLOURS[init], alpha=0.15, linewidth=0)
        axes[0, column].set(title=task, ylim=(0, None))
        axes[1, column].set(xlabel="step", ylim=(0, 1.03), xlim=(0, None))
    axes[0, 0].set_ylabel("mean squared error, unseen part")
    axes[1, 0].set_ylabel("attention on the support, last layer")
    axes[0, -1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _mean_std(rows):
    import numpy

    rows = numpy.array(rows, dtype=float)
    return rows.mean(axis=0), rows.std(axis=0, ddof=1) if len(rows) > 1 else 0 * rows[0]
