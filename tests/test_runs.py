"""What the scripts share: flags, devices, result lines, checkpoints, tables, downloads, processes."""
import functools
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import refused

from tinymask import Encoder, parallel, records, runs

pytestmark = pytest.mark.gotu
ROOT = Path(__file__).parent.parent


# -- flags, seeds, schedules ------------------------------------------------------------------


def test_generators_are_independent_and_repeatable():
    first, again, seed, purpose = (torch.rand(3, generator=runs.generator(*key)) for key in (
        (1, "weights"), (1, "weights"), (2, "weights"), (1, "batches")))
    assert torch.equal(first, again) and not torch.equal(first, seed) and not torch.equal(first, purpose)


@pytest.mark.parametrize("warmup, done", [(20, 0), (20, 7), (0, 0), (5, 3)])
def test_the_schedule_is_a_warm_up_and_half_a_cosine_for_each_group(warmup, done):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weights[0]], "lr": 0.5}, {"params": [weights[1]], "lr": 2.0}])
    for group in optimizer.param_groups if done else []:
        group["initial_lr"] = group["lr"]  # as a checkpoint has it
    schedule = runs.cosine_schedule(optimizer, 100, warmup, done)
    for step in range(done, 100):
        wanted = min(1, (step + 1) / warmup if warmup else 1) * math.cos(math.pi * step / 200) ** 2
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * wanted, 2 * wanted])
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("convert, good, bad", [
    (runs.number(int, 2, 5), {"2": 2, "5": 5}, ["1", "6", "2.0", "x", ""]),
    (runs.number(float, 0), {"0": 0.0, "1e-3": 1e-3}, ["-1", "nan", "inf", "1e31", "x"]),
    (runs.number(float, above=0, high=2), {"2": 2.0, "1e-9": 1e-9}, ["0", "2.1", "-1"]),
    (runs.LOGIT, {"-10": -10.0, "1e4": 1e4}, ["-10001", "1e5"])])
def test_numbers_of_flags(convert, good, bad):
    assert {text: convert(text) for text in good} == good
    for text in bad:
        with pytest.raises(Exception, match="wanted a"):
            convert(text)


def test_auto_device_and_missing_devices(capsys):
    assert runs.pick_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("tpu", "gpu", "cuda:99", "meta", "", "cpu:x", "a\nb"):
        assert "--device " + name.replace("\n", " ") in refused(capsys, functools.partial(runs.pick_device, name))


@pytest.mark.skipif(sys.platform == "win32", reason="Unix paths")
@pytest.mark.parametrize("bad", ["/proc/x", "TAKEN", "FILE", "FILE/below", "a\0b", "PIPE", "LINK"])
def test_unusable_out(bad, tmp_path, capsys):
    for name in ("PIPE", "LINK"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "PIPE" / "results.jsonl")
    (tmp_path / "LINK" / "results.jsonl").symlink_to(tmp_path / "nosuch" / "results.jsonl")
    (tmp_path / "FILE").write_text("keep", encoding="utf-8")
    (tmp_path / "TAKEN" / "results.jsonl").mkdir(parents=True)
    target = bad if bad.startswith("/") else os.path.join(str(tmp_path), bad)
    assert "--out" in refused(capsys, lambda: runs.open_out(target))
    assert (tmp_path / "FILE").read_text(encoding="utf-8") == "keep"


def test_mean_std_mass_cell_and_table():
    assert runs.mean_std([1.0, 2.0, 3.0], 2) == "2.00 +- 1.00"
    assert runs.mean_std([0.5]) == "0.5000" and runs.mean_std([]) == runs.mean_std([None, 1.0]) == "-"
    masses = [{"support_mass_init": [0.9, a], "support_mass_final": [b, 0.5]} for a, b in ((0.7, 0.2), (0.5, 0.4))]
    assert runs.mass_cell(masses) == "0.90 0.60 -> 0.30 0.50" and runs.mass_cell([]) == "-"
    five = {"support_mass_init": [1.0, 0, 0, 0, 0.5], "support_mass_final": [None] * 5, "support_chance": [0.1] * 5}
    assert runs.mass_cell([five]) == "1.00 0.50 -> - - (0.10 0.10)"
    lines = runs.table(["a", "b"], [["x", 1], ["long", 22]]).splitlines()
    assert lines == ["a      b", "--------", "x      1", "long  22"]
    assert runs.table(["a", "b"], [["x", "-"]], optional=1) == "a\n-\nx"
    assert runs.table(["a", "b"], [["x", "-"], ["y", "1"]], optional=1).splitlines()[0] == "a  b"


def test_downloads_are_whole_or_not_there(tmp_path):
    source, target = tmp_path / "source", tmp_path / "new" / "file"
    source.write_bytes(b"some bytes")
    url, right = source.as_uri(), hashlib.sha256(b"some bytes").hexdigest()
    for bad_url, checksum in ((url, "0" * 64), (url + "x", right)):
        with pytest.raises(ValueError, match="by hand"):
            runs.download(bad_url, target, checksum)
        assert list(tmp_path.iterdir()) == [source]
    runs.download(url, target, right)
    assert target.read_bytes() == b"some bytes" and list(target.parent.iterdir()) == [target]
    runs.download(url + "x", target, right)  # it is there


# -- result lines -----------------------------------------------------------------------------


def test_strict_json_has_null_for_nan():
    text = json.dumps(records.strict({"a": [math.nan, 1.0], "b": (math.inf,)}), allow_nan=False)
    assert json.loads(text) == {"a": [None, 1.0], "b": [None]}


@pytest.mark.parametrize("metrics, diverged", [({"perplexity": math.inf}, True), ({"loss": math.nan}, True), (
    {"loss": 1.5, "steps_to_75": None, "mode": "x", "support_mass_init": [math.nan]}, False)])
def test_a_run_with_an_infinite_figure_has_diverged(metrics, diverged, tmp_path, capsys):
    run = records.Run("lm", "t", "i", 0, runs.Args(lr=1.0), tmp_path, torch.device("cpu"))
    run.state["model"] = model = torch.nn.Linear(1, 1)
    assert "without --resume" in refused(capsys, lambda: records.start_and_end(run, model, torch.ones(1, 1)))
    assert records.finish(run, metrics, {})["diverged"] == diverged


def test_key_depends_on_the_flags_of_the_run_only():
    base = {"lr": 1e-3, "batch_size": 128, "seeds": 1, "out": "a"}
    assert records.run_key(base, "t") == records.run_key(base | {"seeds": 9, "out": "b"}, "t")
    assert records.run_key(base, "t") != records.run_key(base | {"batch_size": 64}, "t")


def test_long_names_make_a_file_name():
    for name in ("x" * 250, "\N{GRINNING FACE}" * 60):
        assert len(records.run_key({"lr": 1}, name, "mask", 0).encode()) < 100
    names = ["v?", "v\udcff", "v\udcfe", "x" * 60, "x" * 61, "x" * 60 + "y"]
    assert len({records.short(name) for name in names}) == len(names) and records.short("v?") == "v?"


def test_settings_of_a_preset_whatever_the_precision():
    usual = {"lr": 1.0, "bf16": False, "seeds": 1}
    same = [records.same_settings(SimpleNamespace(**usual | {"text": "abc"} | changed), SimpleNamespace(**usual))
            for changed in ({}, {"bf16": True}, {"seeds": 3}, {"lr": 2.0})]
    assert same == [True, True, True, False]


def test_when_an_evaluation_is_due():
    for steps, points in ((100, 10), (3, 10), (25, 10), (7, 7)):
        due = [step for step in range(1, steps + 1) if records.evaluation_due(step, steps, points)]
        assert len(due) == min(steps, points) and due[-1] == steps
        gaps = {b - a for a, b in zip([0, *due], due)}
        assert max(gaps) - min(gaps) <= 1


def line(seed):
    metrics = {"loss": 1.5} | dict.fromkeys(records.MASSES, [0.5, None])
    return json.dumps({"config": {"lr": 1.0}, "task": "t", "init": "i", "seed": seed, "metrics": metrics,
                       "curve": [{"step": 1, "exact_match": 0.5}], "diverged": False, "complete": True})


def read(folder):
    return [result["seed"] for result in
            records.read_results(folder, ["loss", *records.MASSES], ["exact_match"]).values()]


def test_results_survive_a_write_that_was_cut_short_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"\xef\xbb\xbf")
    records.append_line(path, line(0))
    with open(path, "a", encoding="utf-8") as file:
        file.write(line(1)[:20])  # as a kill in the middle of a write leaves it
    records.append_line(path, line(2))
    assert read(tmp_path) == [0, 2]
    records.append_line(path, line(0).replace("1.5", "1e307"))
    assert read(tmp_path) == [0, 2]  # the newest of each


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(capsys):
    assert "was not recorded" in refused(capsys, lambda: records.append_line(Path("/dev/full"), line(1)), status=1)


def test_result_lines_that_are_not_whole_are_passed_over(tmp_path):
    for broken in (b"[]", b"null", b"[" * 100_000, line(1).replace("loss", "error").encode(),
                   *(line(1).replace("1.5", other).encode() for other in ('"1.5"', "[1.5]", "1" + "0" * 400)),
                   *(line(1).replace("[0.5, null]", other).encode() for other in ("[]", "null", '["a"]', "0.5")),
                   *(line(1).replace('"exact_match": 0.5', other).encode()
                     for other in ('"mse": 1', '"exact_match": ""')),
                   *(line(1).replace('[{"step": 1, "exact_match": 0.5}]', other).encode()
                     for other in ("null", '""', "[[]]")),
                   *(line(1).replace('"step": 1', f'"step": {other}').encode() for other in ("null", '"1"', "[1]")),
                   *(line(1).replace("true", other).encode() for other in ("false", '"no"', '"true"', "1")),
                   b'{"config": {}}', b"\xff"):
        with open(tmp_path / "results.jsonl", "ab") as file:
            file.write(broken + b"\n")
    records.append_line(tmp_path / "results.jsonl", line(2).replace('"t"', '"t\u2028"'))  # whole, to JSON
    assert read(tmp_path) == [2]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
def test_peak_memory_is_this_process_s_own():
    """Not that of what started it, which getrusage counts too: a small child of a large process."""
    ballast = torch.ones(150 * 2**20)  # 600 MB
    code = "import tinymask.records as r; print(r.peak_rss_mb())"
    small = float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout)
    assert 50 < small < 550 < records.peak_rss_mb() and ballast.sum() > 0


# -- checkpoints ------------------------------------------------------------------------------


def test_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch, capsys):
    path = tmp_path / "deep" / "a.pt"
    records.save(path, {"step": 1})

    def broken(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", broken)
    assert "intact" in refused(capsys, lambda: records.save(path, {"step": 2}), status=1)
    assert records.load(path) == {"step": 1} and [p.name for p in path.parent.iterdir()] == ["a.pt"]


class Unsafe:
    pass


@pytest.mark.parametrize("content, words", [
    (b"", ""), (b"nonsense", ""), ({"optimizer": 1, "model": {}}, "does not say of which run"), ([1], "does not say"),
    ({"run": {"init": "mask"}, "model": {}}, "init is mask there, bias here"), ({"a": Unsafe()}, "more than tensors"),
    ({"run": {"init": "bias"}, "model": {}}, "loading state_dict")], ids=str)
def test_broken_checkpoint_is_one_line(content, words, tmp_path, capsys):
    path = tmp_path / "a.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    model = Encoder(vocabulary=2, tokens=4, outputs=1, dim=8, depth=1, heads=2)
    error = refused(capsys, lambda: records.restore(path, model, {"init": "bias"}, "--eval-only"))
    assert error.startswith(f"error: --eval-only {path}: not a checkpoint of this run") and words in error
    assert "weights_only" not in error


# -- several processes ------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["", "2"])
def test_a_world_size_without_torchrun_is_one_process(world, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    assert parallel.start("cpu", 3)[:2] == (0, 1)
    assert parallel.mean_loss(torch.tensor(1.5)) == 1.5 and parallel.first_alone(lambda: "loaded") == "loaded"


@pytest.mark.parametrize("values", [("0", "0", "x"), ("0", "0", "0"), ("5", "0", "2"), ("0", "0", "2"),
                                    ("0", "0", "3")], ids=" ".join)
def test_a_torchrun_environment_that_is_none(values, monkeypatch, capsys):
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # the last but one lacks these, the last does not divide the batch
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE"), values):
        monkeypatch.setenv(name, value)
    refused(capsys, lambda: parallel.start("cpu", 4))
