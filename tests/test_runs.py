"""What the scripts share: flags, result lines, checkpoints, optimiser groups, tables."""
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinymask import Encoder, parallel, records, runs
from tinymask.transformer import parameter_groups

pytestmark = pytest.mark.gotu
ROOT = Path(__file__).parent.parent


def test_every_parameter_is_in_exactly_one_group_and_the_mask_is_not_decayed():
    model = Encoder(2, 4, 1, 8, 2, 2)
    for block in model.transformer.blocks:
        block.attention.set_mask(torch.full((4, 4), 3.0))
    others, masks = parameter_groups(model, lr=1e-3, mask_lr=1e-2, weight_decay=0.1)
    listed = [id(p) for group in (others, masks) for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    assert len(masks["params"]) == 2 and masks["weight_decay"] == 0 and masks["lr"] == 1e-2
    optimizer = torch.optim.Adam([others, masks])
    before = model.transformer.blocks[0].attention.mask.clone()
    for _ in range(100):  # zero gradients: decay alone would move it
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(model.transformer.blocks[0].attention.mask, before)


def test_frozen_parameters_are_not_given_to_the_optimiser():
    model = Encoder(2, 4, 1, 8, 1, 2)
    attention = model.transformer.blocks[0].attention
    for p in (*attention.query.parameters(), *attention.key.parameters()):
        p.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(parameter_groups(model, 1e-2, 1e-2, 0.1))
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == ("query" in name or "key" in name) or p.grad.abs().sum() == 0


def test_generators_are_independent_and_repeatable():
    first, again, other = (torch.rand(3, generator=runs.generator(*key))
                           for key in ((1, "weights"), (1, "weights"), (1, "batches")))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_cosine():
    assert runs.cosine(0, 100) == pytest.approx(1 / 20)
    assert runs.cosine(50, 100) == pytest.approx(0.5)
    assert 0 < runs.cosine(99, 100) < 0.001


def test_strict_json_has_null_for_nan():
    text = json.dumps(records.strict({"a": [math.nan, 1.0], "b": (math.inf,)}), allow_nan=False)
    assert json.loads(text) == {"a": [None, 1.0], "b": [None]}


def test_key_depends_on_the_flags_of_the_run_only():
    base = {"lr": 1e-3, "batch_size": 128, "seeds": 1, "out": "a"}
    assert records.run_key(base, "t") == records.run_key(base | {"seeds": 9, "out": "b"}, "t")
    assert records.run_key(base, "t") != records.run_key(base | {"batch_size": 64}, "t")


def line(seed):
    metrics = {"loss": 1.5} | dict.fromkeys(records.MASSES, [0.5, None])
    return json.dumps({"config": {"lr": 1.0}, "task": "t", "init": "i", "seed": seed, "metrics": metrics,
                       "curve": [{"step": 1, "exact_match": 0.5}], "diverged": False, "complete": True})


def read(folder):
    return records.read_results(folder, ["loss", *records.MASSES], ["exact_match"])


def test_results_survive_a_write_that_was_cut_short(tmp_path):
    path = tmp_path / "results.jsonl"
    records.append_line(path, line(0))
    with open(path, "a", encoding="utf-8") as file:
        file.write(line(1)[:20])  # as a kill in the middle of a write leaves it
    records.append_line(path, line(2))
    assert [result["seed"] for result in read(tmp_path).values()] == [0, 2]


def test_full_disk_leaves_the_old_result_lines(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.jsonl"
    records.append_line(path, line(0))
    old = path.read_bytes()
    real_open = open

    class Full:
        def __init__(self, *args, **kwargs):
            self.file = real_open(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *details):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            return self.file.write(data[:5])

    monkeypatch.setattr("builtins.open", Full)
    with pytest.raises(SystemExit) as stop:
        records.append_line(path, line(1))
    monkeypatch.undo()
    assert stop.value.code == 1 and "disk full" in capsys.readouterr().err and path.read_bytes() == old


def test_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "a.pt"
    records.save(path, {"step": 1})

    def broken(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(SystemExit) as stop:
        records.save(path, {"step": 2})
    assert stop.value.code == 1 and records.load(path) == {"step": 1}
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("content", [b"", b"nonsense", {"optimizer": 1, "model": {}}, [1], torch.zeros(2)], ids=str)
def test_broken_checkpoint_is_one_line(content, tmp_path, capsys):
    path = tmp_path / "a.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(SystemExit) as stop:
        records.resume(path, Encoder(2, 4, 1, 8, 1, 2), None, None)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and str(path) in error


def test_result_lines_that_are_not_whole_are_passed_over(tmp_path):
    for broken in (b"[]", b"null", b"[" * 100_000, line(1).replace("loss", "error").encode(),
                   *(line(1).replace("1.5", other).encode() for other in ('"1.5"', "[1.5]", "1" + "0" * 400)),
                   *(line(1).replace("[0.5, null]", other).encode() for other in ("[]", "null", '["a"]', "0.5")),
                   *(line(1).replace('"exact_match": 0.5', other).encode()
                     for other in ('"mse": 1', '"exact_match": ""')),
                   *(line(1).replace('[{"step": 1, "exact_match": 0.5}]', other).encode()
                     for other in ("null", '""', "[[]]")),
                   b'{"config": {}}', line(1).replace("true", "false").encode(), b"\xff"):
        with open(tmp_path / "results.jsonl", "ab") as file:
            file.write(broken + b"\n")
    records.append_line(tmp_path / "results.jsonl", line(2).replace('"t"', '"t\u2028"'))  # whole, to JSON
    assert [result["seed"] for result in read(tmp_path).values()] == [2]


def test_auto_device_and_missing_devices(capsys):
    assert runs.pick_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("tpu", "gpu", "cuda:99", "meta", "", "cpu:x"):
        with pytest.raises(SystemExit) as stop:
            runs.pick_device(name)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and f"--device {name}" in error and len(error.splitlines()) == 1
        assert len(error) < 120 or name == "cuda:99"  # what is missing there torch says, at length in CUDA builds


@pytest.mark.skipif(sys.platform == "win32", reason="Unix paths")
@pytest.mark.parametrize("bad", ["/proc/x", "TAKEN", "FILE", "FILE/below", "a\0b", "PIPE"])
def test_unusable_out(bad, tmp_path, capsys):
    (tmp_path / "PIPE").mkdir()
    os.mkfifo(tmp_path / "PIPE" / "results.jsonl")
    (tmp_path / "FILE").write_text("keep", encoding="utf-8")
    (tmp_path / "TAKEN" / "results.jsonl").mkdir(parents=True)
    target = bad if bad.startswith("/") else os.path.join(str(tmp_path), bad)
    with pytest.raises(SystemExit) as stop:
        runs.open_out(target)
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert (tmp_path / "FILE").read_text(encoding="utf-8") == "keep"


def test_a_smoke_run_stays_apart_from_real_results():
    flags = runs.parser("train_x.py", "", ["a"], ["b"], {"small": {"steps": 3}})
    parse = lambda *argv: runs.parse(flags, argv, {"small": {"steps": 3}}, {"steps": 1})  # noqa: E731
    assert parse().out == "runs/x" and parse("--smoke").out == "runs/x-smoke"
    assert parse("--smoke", "--out", "runs/x").out == "runs/x" and parse("--smoke").steps == 1


def test_mean_std_and_table():
    assert runs.mean_std([1.0, 2.0, 3.0], 2) == "2.00 +- 1.00"
    assert runs.mean_std([0.5]) == "0.5000" and runs.mean_std([]) == runs.mean_std([None, 1.0]) == "-"
    lines = runs.table(["a", "b"], [["x", 1], ["long", 22]]).splitlines()
    assert lines == ["a      b", "--------", "x      1", "long  22"]


def test_a_world_size_without_torchrun_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "")
    assert parallel.start("cpu", 3)[:2] == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parallel.start("cpu", 3)[:2] == (0, 1)


@pytest.mark.parametrize("values", [("0", "0", "x"), ("0", "0", "0"), ("5", "0", "2"), ("0", "0", "2")], ids=" ".join)
def test_a_torchrun_environment_that_is_none(values, monkeypatch, capsys):
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # the last case lacks these
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE"), values):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        parallel.start("cpu", 4)
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_an_error_is_one_line_whatever_the_value(capsys):
    with pytest.raises(SystemExit):
        runs.pick_device("a\nb")
    assert capsys.readouterr().err == "error: --device a b: wanted auto, cpu, cuda, cuda:N or mps\n"


def test_a_backend_that_matplotlib_does_not_have(monkeypatch):
    pytest.importorskip("matplotlib")
    code = "from tinymask import pictures; pictures.pyplot()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"MPLBACKEND": "bogus"}, capture_output=True,
                          text=True, cwd=ROOT)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "bogus" in done.stderr


def test_results_that_cannot_be_written_are_said_before_training(tmp_path, capsys):
    (tmp_path / "results.jsonl").symlink_to(tmp_path / "nosuch" / "results.jsonl")
    with pytest.raises(SystemExit) as stop:
        runs.open_out(str(tmp_path))
    assert stop.value.code == 2 and "--out" in capsys.readouterr().err


def test_long_names_make_a_file_name():
    for name in ("x" * 250, "\N{GRINNING FACE}" * 60):
        assert len(records.run_key({"lr": 1}, name, "mask", 0).encode()) < 100
    names = ["v?", "v\udcff", "v\udcfe", "x" * 60, "x" * 61, "x" * 60 + "y"]
    assert len({records.short(name) for name in names}) == len(names) and records.short("v?") == "v?"
