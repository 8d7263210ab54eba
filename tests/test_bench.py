"""The benchmark runs and measures what it says; no test asserts a time."""
import pytest

from tinymask import bench, runs
from tinymask.transformer import Transformer

pytestmark = pytest.mark.attention


def test_a_step_trains_the_mask_and_nothing_differs_but_the_mask(monkeypatch):
    made = []
    monkeypatch.setattr(bench, "Transformer", lambda *sizes: made.append(Transformer(*sizes)) or made[-1])
    for masked in (False, True):
        bench.training_step((2, 5, 8, 2, 2, 4), masked)()
    plain, masked = (sum(p.numel() for p in model.parameters()) for model in made)
    assert masked - plain == 2 * 5 * 5
    first, second = (dict(model.named_parameters()) for model in made)
    assert set(second) - set(first) == {f"blocks.{layer}.attention.mask" for layer in (0, 1)}
    assert all(block.attention.mask.grad.abs().sum() > 0 for block in made[1].blocks)


def test_table(capsys, monkeypatch):
    monkeypatch.setattr(bench, "SIZES", [(2, 5, 8, 2, 2, 4), (2, 9, 8, 2, 2, 4)])
    monkeypatch.setattr(bench, "memory", lambda size: [1.0, 2.0])
    monkeypatch.setattr(bench, "LANGUAGE", [(2, 4)])
    bench.main(["--repeats", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[3:5]] == ["5", "9"]
    assert len(lines) == 8 and lines[-1].split()[:2] == ["2", "4"]


def test_ctrl_c_stops_it(monkeypatch):
    monkeypatch.setattr(runs, "interrupted", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        bench.overhead(lambda: None, lambda: None, 2)


def test_memory_is_measured_in_processes_of_their_own():
    """At least the attention of both layers, which the backward pass needs: (256, 2, 64, 64) float32 each."""
    assert min(bench.memory((256, 64, 64, 2, 2, 32))) > 2 * 256 * 2 * 64 * 64 * 4 / 2**20


@pytest.mark.parametrize("flags", [["--repeats", "1"], ["--repeats", "x"], ["--nosuch"]])
def test_bad_input(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(flags)
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
