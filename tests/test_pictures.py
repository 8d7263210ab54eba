"""Figures hold the numbers of the result lines, and leave the process as they found it."""
import doctest
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinymask import pictures

pytestmark = pytest.mark.gotu
pytest.importorskip("matplotlib")


@pytest.fixture
def saved(monkeypatch):
    """The figures that were saved, in place of files."""
    figures: list = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_series_are_the_curves_of_the_lines_asked_for():
    def line(init, values, task="add", fraction=0.5, diverged=False):
        curve = [{"step": 10 * number, "top1": value} for number, value in enumerate(values, start=1)]
        return {"task": task, "init": init, "diverged": diverged, "curve": curve,
                "config": {"fraction": fraction, "task": "of no account"}}

    results = [line("a", [1, 2]), line("b", [5]), line("a", [3]), line("a", [9], diverged=True),
               line("a", [7], fraction=0.1), line("a", [8], task="mul")]
    assert pictures.series(results, "top1", task="add", fraction=0.5) == {"a": [([10, 20], [1, 2]), ([10], [3])],
                                                                          "b": [([10], [5])]}
    assert pictures.series(results, lambda point: -point["top1"], task="mul") == {"a": [([10], [-8])]}


def test_curves_draw_means_and_standard_deviations(saved):
    """1 and 5 at step 10, 3 and 9 at 20: means 3 and 6, deviations sqrt(8) and sqrt(18); step 30 is one seed's."""
    lines = {"svd": [([10, 20, 30], [1, 3, 8]), ([10, 20], [5, 9])], "new": [([10, 20], [0.5, None])], "none": []}
    ends = {"svd": [([0.1], [1]), ([0.1], [5]), *[([0.4], [value]) for value in (1, 1, 4)]], "mask": [([0.4], [7])]}
    panels: list = [{"title": "a$b$\udcff", "ylabel": "error", "ylim": (0, 7), "lines": lines}, {},
              {"lines": ends, "points": True, "xlabel": "fraction"}]
    pictures.curves(panels, ["mask", "svd", "new", "none"], "", columns=2)
    steps, empty, points, beyond = saved[0].axes
    svd, new = steps.get_lines()
    assert (svd.get_xydata().tolist(), new.get_xydata().tolist()) == ([[10, 3], [20, 6]], [[10, 0.5]])
    assert (svd.get_color(), svd.get_label()) == (pictures.COLOURS["svd"], "svd")
    band = {tuple(corner) for corner in steps.collections[0].get_paths()[0].vertices.round(3).tolist()}
    assert band == {(10, 0.172), (10, 5.828), (20, 1.757), (20, 10.243)}
    assert (steps.get_xlabel(), steps.get_ylabel(), steps.get_title()) == ("step", "error", r"a\$b\$?")
    assert (steps.get_xlim()[0], steps.get_ylim()) == (0, (0, 7)) and not (empty.get_visible() or beyond.get_visible())
    dots, _, (bars,) = points.containers[1]
    assert dots.get_xydata().tolist() == [[0.1, 3], [0.4, 2]]
    assert [bar[:, 1].round(3).tolist() for bar in bars.get_segments()] == [[0.172, 5.828], [0.268, 3.732]]
    assert (points.get_xscale(), points.get_xlabel()) == ("log", "fraction")
    assert [label.get_text() for label in points.get_xticklabels()] == ["10 %", "40 %"]
    assert {text.get_text() for text in saved[0].legends[0].get_texts()} == {"mask", "svd", "new"}


def test_grids_and_what_they_show_of_a_prior(saved, tmp_path):
    pictures.grid(["r", "s"], ["c", "d"], [torch.full((2, 2), value / 4) for value in range(4)], "")
    assert [(ax.get_title(), ax.get_ylabel()) for ax in saved[0].axes] == [("c", "r"), ("d", ""), ("", "s"), ("", "")]
    assert [ax.images[0].get_array().max() for ax in saved[0].axes] == [0, 0.25, 0.5, 0.75]
    assert all(ax.images[0].get_clim() == (0, 1) and ax.images[0].cmap.name == "Greys" for ax in saved[0].axes)
    maps = [torch.full((3, 2, 2, 2), value / 8) for value in range(4)]  # layers 1 and 2, start and end
    masks = [torch.eye(2)] * 2, [torch.zeros(2, 2), torch.ones(2, 2, 2)]
    ends = {"svd": [(maps[:2], []), (maps[2:], [])], "mask": [(maps[:2], masks[0]), (maps[2:], masks[1])]}
    pictures.before_and_after(ends, tmp_path, "x")
    attention, openness = ([ax.images[0].get_array().mean() for ax in figure.axes] for figure in saved[1:])
    assert attention == [0, 2 / 8, 1 / 8, 3 / 8] * 2 and openness == [0.5, 0, 0.5, 1] * 2  # start, end of each layer
    assert [ax.get_ylabel() for ax in saved[2].axes[::4]] == ["mask, head 1", "mask, head 2"]
    assert saved[2].axes[1].get_title() == "layer 1, end"


def test_a_new_init_has_a_colour_of_its_own_in_every_figure():
    new = [*(f"init {number}" for number in range(19)), "name\udcff"]
    colours = [bytes.fromhex(pictures.colour(init, new)[1:]) for init in [*new, *pictures.COLOURS]]
    assert min(math.dist(*pair) for pair in itertools.combinations(colours, 2)) > 25  # of 255 for red, green and blue
    assert doctest.testmod(pictures).failed == 0  # one of them holds that the figure does not matter


@pytest.mark.parametrize("backend, found", [("bogus", "svg"), ("module://matplotlib_inline.backend_inline",) * 2])
def test_neither_mplbackend_nor_a_matplotlibrc_matters_or_is_changed(tmp_path, backend, found):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.family: Nosuch\nbackend: svg\n", encoding="utf-8")
    code = f"""if True:
        import os, sys, warnings
        from tinymask import pictures
        filters, environment = warnings.filters[:], dict(os.environ)
        draw = lambda: pictures.curves([{{"title": "\\u540d", "lines": {{}}}}], [], "figure.png", 1)
        draw()
        import matplotlib
        assert matplotlib.rcParams["text.usetex"] and matplotlib.rcParams["font.family"] == ["Nosuch"]
        assert matplotlib.get_backend() == {found!r} and "matplotlib.pyplot" not in sys.modules
        assert (warnings.filters, os.environ) == (filters, environment)
        matplotlib.rcParams["backend"] = "pdf"
        draw()
        assert matplotlib.get_backend() == "pdf" """
    env = os.environ | {"MPLBACKEND": backend, "PYTHONPATH": str(Path(pictures.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_figure_that_cannot_be_saved_is_named(tmp_path):
    (tmp_path / "a.png").symlink_to("/dev/full")
    with pytest.raises(OSError, match="a.png: No space left"):
        pictures.curves([{}], [], tmp_path / "a.png", 1)


def test_a_missing_matplotlib_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"\A[^\n]*pip install 'tinymask\[plot\]'\Z"):
        pictures.require()
    assert os.environ["MPLBACKEND"] == "agg"
