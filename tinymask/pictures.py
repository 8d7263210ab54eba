"""Figures from result lines. Needs matplotlib, the extra `plot`; nothing else in the package does.

One colour for one init, in every figure. Figures are drawn to files without pyplot and in matplotlib's default style:
neither a matplotlibrc nor MPLBACKEND matters to them, and the later plots of a notebook are as they would have been.
"""
import colorsys
import contextlib
import itertools
import math
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy
from torch import Tensor

COLOURS = {
    "default": "#777777", "svd": "#1f77b4", "opt": "#2ca02c", "mask": "#d62728", "mask-only": "#7b1fa2",
    "mask-zero": "#bdbdbd", "mask-frozen": "#ff8a80", "mask-hard": "#5d1010", "mask-shuffled": "#8d6e63",
    "mask-literal": "#e6a13c", "bias": "#f06292", "svd-frozen": "#80b1d3", "opt-frozen": "#98df8a",
    "mimetic": "#17a2b8", "impulse": "#3f51b5", "mask-slopes": "#ff7f0e", "alibi": "#556b2f",
    "relative": "#00d9c0", "rotary": "#111111", "rotary-mask": "#e6c700",
    "gated": "#ff00ff", "cnn": "#0000ff",
}


def require() -> ModuleType:
    """matplotlib. Raises ValueError, one line that names the install command, if it cannot be imported."""
    first, backend = "matplotlib" not in sys.modules, os.environ.pop("MPLBACKEND", None)  # a wrong one stops the import
    try:
        import matplotlib.figure
        import matplotlib.style
    except Exception as error:  # missing, or broken
        raise ValueError(f"figures need matplotlib ({' '.join(str(error).split())}); install it with: "
                         "pip install 'tinymask[plot]'") from error
    finally:
        os.environ.update({} if backend is None else {"MPLBACKEND": backend})
    if first and backend:  # what the import would have done
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = backend
    return matplotlib


def colour(init: str, inits: Sequence[str]) -> str:
    """The init's colour, "#rrggbb". A new name's is made from its letters, unlike the table's and other new ones'.

    >>> colour("mask", []), colour("mine", ["mask", "mine"]) == colour("mine", []) != colour("yours", [])
    ('#d62728', True)
    """
    taken = {name: tuple(bytes.fromhex(code[1:])) for name, code in COLOURS.items()}
    for name in sorted({init, *inits} - set(COLOURS)):
        start = zlib.crc32(name.encode("utf-8", "replace"))
        for step in itertools.count():  # golden steps round the hues to one far from all others, less far each time
            hsv = 0.618034 * (start + step) % 1, 1.0, (0.9, 0.7, 0.5)[(start + step) % 3]
            taken[name] = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(*hsv))
            if min(math.dist(taken[name], taken[other]) for other in taken if other != name) > 50 * 0.97**step:
                break
    return "#" + bytes(taken[init]).hex()


def series(results: list[dict], measure: str | Callable[[dict], float], **where: object) -> dict[str, list]:
    """Curves of result lines: {init: [(steps, values), one pair a seed]}, without the runs that diverged.

    measure: a key of a curve's points, or a function of a point. where: which lines, by their own fields or those
    of their config: task="add", fraction=0.001.
    """
    lines: dict[str, list] = {}
    for r in results:
        fields = r["config"] | r
        if not r["diverged"] and all(fields[name] == wanted for name, wanted in where.items()):
            values = [measure(point) if callable(measure) else point[measure] for point in r["curve"]]
            lines.setdefault(r["init"], []).append(([point["step"] for point in r["curve"]], values))
    return lines


def curves(panels: list[dict], inits: Sequence[str], path: str | os.PathLike, columns: int) -> None:
    """Means over seeds as lines, one standard deviation as bands; panels row by row, with one legend above.

    A panel, {} for an empty place: lines, {init: [(x, values), one pair a seed]}, where a None in values is passed over
    and so are steps that not all seeds have; title, ylabel, xlabel ("step"), ylim. With points=True, x are fractions on
    a logarithmic axis, each drawn for itself, a dot and a bar, from the seeds that have it.
    """
    with drawing(path, -(-len(panels) // columns), columns, 4.0, 3.2) as (figure, axes):
        for panel, ax in zip(itertools.chain(panels, itertools.repeat({})), axes.flat):
            ax.set_visible(bool(panel))
            lines, points = panel.get("lines", {}), panel.get("points", False)
            for init in (init for init in inits if lines.get(init)):
                x, mean, std = _mean_std(lines[init], points)
                if points:
                    ax.errorbar(x, mean, std, fmt="o", color=colour(init, inits), label=init)
                else:
                    ax.plot(x, mean, color=colour(init, inits), label=init)
                    ax.fill_between(x, mean - std, mean + std, color=colour(init, inits), alpha=0.15, linewidth=0)
            # a file's name as a title: no broken characters, no formulas
            ax.set(title=panel.get("title", "").encode("utf-8", "replace").decode().replace("$", r"\$"),
                   xlabel=panel.get("xlabel", "step"), ylabel=panel.get("ylabel"), ylim=panel.get("ylim"))
            if points:
                fractions = sorted({x for pairs in lines.values() for xs, _ in pairs for x in xs})
                ax.set_xscale("log")
                ax.set_xticks(fractions, [f"{100 * fraction:g} %" for fraction in fractions])
                ax.minorticks_off()
            else:
                ax.set_xlim(left=0)
        handles = {label: line for ax in axes.flat[::-1] for line, label in zip(*ax.get_legend_handles_labels())}
        figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside upper center",
                      ncols=int(figure.get_figwidth() / 1.4))


def before_and_after(ends: dict[str, list], folder: Path, name: str) -> None:
    """What training makes of a prior, in two figures. ends: init -> two of `records.start_and_end`, start and end.

    folder/attention-<name>.png: attention of each layer, a mean over inputs and heads, one row an init.
    folder/masks-<name>.png: sigmoid(M) of each layer, one row a head of an init that has log sigmoid(M).
    """
    rows, attention, openness = [], [], []
    for init, ((first, opened), (last, closed)) in ends.items():
        columns = [f"layer {layer + 1}, {when}" for layer in range(len(first)) for when in ("start", "end")]
        attention += [maps.mean(dim=(0, 1)) for pair in zip(first, last) for maps in pair]
        masks = [mask.expand(first[0].shape[1:]) for pair in zip(opened, closed) for mask in pair]  # (H, N, N) each
        for head in range(first[0].shape[1] if masks else 0):
            rows.append(f"{init}, head {head + 1}")
            openness += [mask[head] for mask in masks]
    grid(list(ends), columns, attention, folder / f"attention-{name}.png")
    if rows:
        grid(rows, columns, openness, folder / f"masks-{name}.png")


def grid(rows: Sequence[str], columns: Sequence[str], images: Sequence[Tensor], path: str | os.PathLike) -> None:
    """Matrices as a grid of grey panels, 0 white and 1 black: masks per head, attention before and after.

    rows, columns: their titles. images: one tensor (N, N) for each panel, row by row.
    """
    with drawing(path, len(rows), len(columns), 1.7, 1.75) as (_, axes):
        for ax, image in zip(axes.flat, images):
            ax.set(xticks=[], yticks=[])
            ax.imshow(image.numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        for ax, title in zip(axes[0], columns):
            ax.set_title(title, fontsize=10)
        for ax, title in zip(axes[:, 0], rows):
            ax.set_ylabel(title, fontsize=10)


def _mean_std(pairs: list, points: bool) -> tuple:
    """x, and the mean and standard deviation over seeds there, 0 for one seed."""
    seeds = [{x: value for x, value in zip(*pair) if value is not None} for pair in pairs]
    xs = sorted((set.union if points else set.intersection)(*map(set, seeds)))
    values = [[seed[x] for seed in seeds if x in seed] for x in xs]
    spread = [numpy.std(at_x, ddof=1) if len(at_x) > 1 else 0.0 for at_x in values]
    return xs, numpy.array([numpy.mean(at_x) for at_x in values]), numpy.array(spread)


@contextlib.contextmanager
def drawing(path: str | os.PathLike, rows: int, columns: int, width: float, height: float, **axes) -> Iterator[tuple]:
    """A figure and its axes, (rows, columns), each width x height inches; saved to path at the end."""
    matplotlib = require()
    with matplotlib.style.context("default"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a character that no font has, the spread of 1e304
        size = width * columns + 0.6, height * rows + 0.4
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **axes)
        try:
            figure.savefig(path, dpi=110)
        except OSError as error:  # of a full disk, without the name of the file
            raise OSError(f"{path}: {error.strerror or error}") from error
