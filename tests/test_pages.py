"""Every table of the pages is what results/tables.py makes of the result lines; so are figures in prose."""
import re
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "results"))

from tables import MAIN, PAGES, TABLES, changed, facts, lines_of, table_at  # noqa: E402

import train_arith  # noqa: E402
import train_gotu  # noqa: E402
import train_lm  # noqa: E402
import train_vit  # noqa: E402
from tinymask import records  # noqa: E402

pytestmark = pytest.mark.gotu
README = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("header", TABLES)
def test_the_tables_are_those_of_the_result_lines(header):
    start, end = table_at(README, header)
    assert README[start:end].splitlines() == TABLES[header]()


def test_facts_in_the_prose_are_those_of_the_result_lines():
    prose = " ".join(README.split())  # a fact may stand on two lines
    missing = [text for text in facts() if text not in prose]
    assert not missing, "\n".join(missing)


def default_runs(script, name, seeds):
    """Whether results/`name` holds so many whole runs of every init, as the script makes them without a flag."""
    groups = {}
    for r in lines_of(name):
        usual = vars(script.settings([], r["task"])) | {"fraction": r["config"].get("fraction")}
        names = [n for n in r["config"] if n not in (*records.NOT_OF_THE_RUN, "text")]
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


@pytest.mark.parametrize("script, name, seeds", [
    pytest.param(train_arith, "arith.jsonl", 3, marks=pytest.mark.arith),
    pytest.param(train_vit, "vit.jsonl", 5, marks=pytest.mark.vit),
    pytest.param(train_lm, "lm.jsonl", 5, marks=pytest.mark.lm)])
def test_reference_runs_are_whole_and_of_the_default_settings(script, name, seeds):
    assert default_runs(script, name, seeds)


@pytest.mark.parametrize("name", ["arith-scale", "arith-paper", "arith-rates", "arith-controls", "arith-sequence",
                                  "arith-splits", "arith-mirrors", "vit-controls", "lm-controls", "defaults"])
def test_every_line_is_a_whole_run(name):
    assert all(r["complete"] and not r["diverged"] for r in lines_of(f"{name}.jsonl"))


@pytest.mark.parametrize("name", ["gotu-controls", "arith-controls", "arith-mirrors", "arith-rates", "vit-controls",
                                  "lm-controls"])
def test_controls_have_three_seeds_each(name):
    groups = {}
    for r in lines_of(f"{name}.jsonl"):
        key = r["task"], r["init"], r["config"].get("fraction"), r["config"].get("mirrors"), r["config"]["lr"]
        groups.setdefault(key, []).append(r["seed"])
    assert all(sorted(seeds) == [0, 1, 2] for seeds in groups.values()), groups


def test_reported_seeds_are_not_those_that_settings_were_chosen_on():
    for name in ("gotu", "arith"):
        assert all(100 <= r["seed"] < 200 for r in lines_of(f"{name}-grid.jsonl"))
    for name in ("gotu-fresh", "gotu-layers", "gotu-sgd", "arith-fresh", "arith-wrong"):
        assert all(200 <= r["seed"] < 210 and r["complete"] for r in lines_of(f"{name}.jsonl"))


def test_the_text_of_the_language_runs_is_one():
    assert len({r["config"]["text"] for name in ("lm", "lm-controls") for r in lines_of(f"{name}.jsonl")}) == 1


def test_the_paper_preset_s_runs():
    for r in lines_of("gotu-paper.jsonl"):
        usual = vars(train_gotu.settings(["--preset", "paper"], r["task"]))
        assert all(r["config"].get(name, 0.0) == usual[name] for name in train_gotu.PRESETS["paper"])
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
    args_of = {task: train_gotu.settings([], task) for task in args.tasks}
    train_gotu.print_table(args, args_of, [r for r in lines_of("defaults.jsonl") if r["script"] == "gotu"])
    printed = capsys.readouterr().out.splitlines()
    quoted = [line[4:] for line in README.splitlines() if line.startswith("    2parity ") or "unseen acc " in line]
    assert len(quoted) == 3 and all(line in printed for line in quoted)


def test_reference_runs_are_ten_seeds_of_the_default_settings():
    lines = lines_of()
    cells = {(r["task"], r["init"], r["seed"]) for r in lines}
    assert len(lines) == len(cells) == 10 * len({cell[:2] for cell in cells})
    for result in lines:
        defaults = vars(train_gotu.settings([], result["task"]))
        config = {"mlp_dim": 4 * 48, "ridge": 0.0} | result["config"]  # what they were before they were flags
        assert all(config[name] == defaults[name] for name in train_gotu.PRESETS["small"])
        assert result["complete"] and not result["diverged"] and result["steps"] == defaults["steps"]
        assert result["script"] == "gotu" and 0 <= result["seed"] < 10 and result["init"] in MAIN
        assert records.run_key(result["config"], "x")  # the config is whole


def test_the_cost_of_a_mask_in_the_readme_is_the_committed_measurement():
    printed = (ROOT / "results" / "bench.txt").read_text(encoding="utf-8").splitlines()
    assert len(printed) == 15 and all("    " + line in README.splitlines() for line in printed)


def test_the_snippets_run():
    blocks = re.findall(r"(?:^ {4,}\S.*\n)+", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    code = [textwrap.dedent(block) for block in blocks if block.lstrip().startswith(("import torch", "from tinymask"))]
    names = {}
    exec("\n".join(code), names)
    assert len(code) == 3 and names["output"].shape == (8, 3, 15, 16)
    assert names["boolean"].fourier_coefficients(names["mdi"])[:4].tolist() == pytest.approx([-1, 1, 1, 0], abs=1e-5)


def test_every_flag_in_the_readme_exists():
    for script in (train_gotu, train_arith, train_vit, train_lm):
        known = set(script.parser()._option_string_actions)
        commands = re.findall(rf"{script.__name__}\.py[^\n`|]*", README)
        assert commands
        for command in commands:
            assert set(re.findall(r"--[a-z0-9-]+", command)) <= known, command


def test_the_readme_s_test_command_is_what_ci_runs():
    assert "python -m pytest" in README and "python -m pytest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
