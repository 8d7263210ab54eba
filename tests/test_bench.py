"""The benchmark runs and measures what it says; no test asserts a time."""
import pytest
import torch

from tinymask import GPT, bench, masks
from tinymask.transformer import Transformer

pytestmark = pytest.mark.attention


def test_a_step_trains_the_mask_and_nothing_differs_but_the_mask(monkeypatch):
    made = []
    monkeypatch.setattr(bench, "Transformer", lambda **sizes: made.append(Transformer(**sizes)) or made[-1])
    for masked in (False, True):
        bench.transformer_step((2, 5, 8, 2, 2), masked)()
    plain, masked = (dict(model.named_parameters()) for model in made)
    assert set(masked) - set(plain) == {f"blocks.{layer}.attention.mask" for layer in (0, 1)}
    assert all(mask.shape == (5, 5) and mask.grad.abs().sum() > 0 for mask in masks(made[1]).values())


@pytest.mark.parametrize("masked", [False, True])
def test_the_library_s_model_computes_the_same(masked, monkeypatch):
    made = []
    monkeypatch.setattr(bench, "GPT", lambda **sizes: made.append(GPT(**sizes)) or made[-1])
    for library in (False, True):
        bench.language_step(2, 6, masked, library)
    ids = torch.randint(256, (3, 6), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(made[0](ids), made[1](ids))
    assert [len(masks(model)) > 0 for model in made] == [masked] * 2 and "layer.query" in str(made[1].state_dict())


def test_tables(capsys, monkeypatch):
    monkeypatch.setattr(bench, "SIZES", [(2, 5, 8, 2, 2), (2, 9, 8, 2, 2)])
    monkeypatch.setattr(bench, "LANGUAGE", [(2, 4)])
    monkeypatch.setattr(bench, "memory", lambda size: [1.0, 2.0])
    ticks = iter(range(10**6))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks) ** 2)  # each step takes longer than the last
    assert bench.times([lambda: None, lambda: None], 2) == [[25, 33], [29, 37]]  # rounds 4 and 5: 13^2 - 12^2, ...
    bench.main(["--repeats", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[3:5]] == ["5", "9"] and lines[3].split()[-2:] == ["1", "2"]
    assert len(lines) == 8 and lines[-1].split()[:2] == ["2", "4"]
    assert all(line.split()[3].startswith("+") for line in lines[3:5])  # masked came second, and took longer
    assert all(float(ratio) > 1 for ratio in lines[-1].split()[-2:])


def test_memory_is_measured_in_processes_of_their_own():
    """At least the attention of both layers, which the backward pass needs: (256, 2, 64, 64) float32 each."""
    assert min(bench.memory((256, 64, 64, 2, 2))) > 2 * 256 * 2 * 64 * 64 * 4 / 2**20


@pytest.mark.parametrize("flags", [["--repeats", "1"], ["--repeats", "x"], ["--nosuch"]])
def test_bad_input(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(flags)
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
