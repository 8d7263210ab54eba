"""train_lm.py end to end on tiny settings and small files, and what it does with bad input."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_lm
from tinymask import records, text

pytestmark = pytest.mark.lm
ROOT = Path(__file__).parent.parent
TINY = ["--steps", "4", "--batch-size", "4", "--dim", "16", "--depth", "2", "--heads", "2", "--head-dim", "8",
        "--block", "8"]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "a book.txt"
    path.write_text("the cat sat on the mat. é 😀\n" * 40, encoding="utf-8")
    return str(path)


def tiny(out, *more):
    return train_lm.main([*TINY, "--out", str(out), *more])


def lines(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def test_result_lines(tmp_path, book, capsys):
    results = tiny(tmp_path, "--data", book, "--inits", *train_lm.INITS)
    assert len(results) == len(train_lm.INITS)
    for result in results:
        assert (result["params"]["mask"] == 0) == (result["init"] in ("default", "mimetic"))
    by_init = {r["init"]: r for r in results}
    assert by_init["alibi"]["metrics"]["mask_drift"] == by_init["mask-frozen"]["metrics"]["mask_drift"] == 0
    assert by_init["mask"]["metrics"]["mask_drift"] > 0
    assert by_init["default"]["curve"][0]["train_loss"] == pytest.approx(by_init["mask-zero"]["curve"][0]["train_loss"])
    assert "perplexity per byte token" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 600])
def test_scores_are_those_of_one_block_after_the_other(tokens):
    """Whatever the batches: against a loop over single predictions; and for any number of tokens."""
    args = train_lm.settings(TINY, "builtin")
    model = train_lm.build(args, "mask-slopes", 0, 256)
    ids = torch.randint(256, (tokens,), generator=torch.Generator().manual_seed(0))
    got = train_lm.scores(model, ids, 2 * tokens, 8, "cpu")
    total = 0.0
    with torch.no_grad():
        for start in range(0, tokens - 1, 8):
            window = ids[start: start + 9]
            for n in range(1, len(window)):
                total -= model(window[None, :n])[0, -1].log_softmax(-1)[window[n]].item()
    assert got["tokens_evaluated"] == tokens - 1 and got["nll"] == pytest.approx(total / (tokens - 1), rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(got["nll"] / 0.6931472 / 2) and model.training


def test_inits_share_weights():
    args = train_lm.settings(TINY, "builtin")
    states = {init: train_lm.build(args, init, 0, 256).state_dict() for init in train_lm.INITS}
    for name, value in states["default"].items():
        for init, state in states.items():
            if init != "mimetic" or not any(f".{part}." in name for part in ("query", "key", "value", "out")):
                assert torch.equal(value, state[name]), (init, name)
    for name in (name for name in states["mask"] if name.endswith(".mask")):
        right, wrong = states["mask"][name], states["mask-shuffled"][name]
        assert torch.equal(right.triu(1), wrong.triu(1)) and not torch.equal(right, wrong)
        assert all(torch.equal(right[:, i, : i + 1].sort().values, wrong[:, i, : i + 1].sort().values)
                   for i in range(right.shape[1]))


def test_the_checkpoint_holds_the_tokeniser(tmp_path, book, capsys):
    tiny(tmp_path, "--data", book, "--inits", "mask", "--tokeniser", "word", "--sample", "5", "--prompt", "the cat")
    (path,) = (tmp_path / "checkpoints").iterdir()
    tokeniser = records.load(path)["tokeniser"]
    assert text.decode(tokeniser, text.encode(tokeniser, "the mat")) == "the mat"
    assert any(line.startswith("the cat ") for line in capsys.readouterr().out.splitlines())


def test_wikitext_and_stories_from_their_files(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    for part in ("train", "valid", "test"):
        (tmp_path / "wikitext-2" / f"wiki.{part}.tokens").write_text(" \n = A = \n <unk> of words , \n" * 9)
        (tmp_path / f"TinyStories-{part}.txt").write_text("Once there was.\n<|endoftext|>\n" * 20)
    results = tiny(tmp_path / "out", "--dataset", "wikitext2", "tinystories", "--data-dir", str(tmp_path), "--inits",
                   "default", "--tokeniser", "word")
    assert [r["task"] for r in results] == ["wikitext2", "tinystories"]
    assert results[0]["metrics"]["tokens_evaluated"] == 9 * (1 + 4 + 5) - 1


@pytest.mark.parametrize("data", [b"", b"x", b"0123456789", b"caf\xe9" * 500, "ab".encode("utf-16") * 500,
                                  b"word " * 30])
def test_short_and_broken_files_are_named(data, tmp_path, capsys):
    (tmp_path / "x.txt").write_bytes(data)
    with pytest.raises(SystemExit) as stop:
        tiny(tmp_path / "out", "--data", str(tmp_path / "x.txt"), "--inits", "default")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "x.txt" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_as_a_process_on_a_plain_console(tmp_path, book):
    """No UTF-8 anywhere in the environment; samples of broken bytes do not crash it."""
    done = subprocess.run([sys.executable, str(ROOT / "train_lm.py"), *TINY, "--data", book, "--sample", "30", "--out",
                           str(tmp_path)],
                          capture_output=True, encoding="cp1252", errors="replace", cwd=tmp_path,
                          env=os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C",
                                            "PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0 and done.stderr == "" and len(lines(tmp_path)) == 6


def test_words_have_no_bits_per_byte(tmp_path, book):
    (result,) = tiny(tmp_path / "out", "--data", book, "--tokeniser", "word", "--inits", "default")
    assert result["metrics"]["bits_per_byte"] is None and result["metrics"]["perplexity"] > 1
    assert result["metrics"]["unknown"] == 0


def test_resume_does_not_take_the_results_of_another_text(tmp_path, book):
    tiny(tmp_path / "out", "--data", book, "--inits", "default")
    content = Path(book).read_text(encoding="utf-8")
    Path(book).write_text(content[:-20] + content[-20:].upper(), encoding="utf-8")  # the test text alone
    tiny(tmp_path / "out", "--data", book, "--inits", "default", "--resume")
    assert len(lines(tmp_path / "out")) == 2
    Path(book).write_text("other words, many of them\n" * 40, encoding="utf-8")
    tiny(tmp_path / "out", "--data", book, "--inits", "default", "--resume")
    first, second, third = (r["config"] for r in lines(tmp_path / "out"))
    assert first["text"] == second["text"] != third["text"] and first["held_out"] != second["held_out"]


def test_a_prompt_of_lines_does_not_end_its_line():
    tokeniser = text.make_tokeniser("lines", "the cat sat\non the mat\n")
    args = train_lm.settings(["--prompt", "the cat"], "wikitext2")
    assert text.decode(tokeniser, train_lm.encoded_prompt(args, tokeniser, None)) == "the cat"


def test_plot(tmp_path, book):
    pytest.importorskip("matplotlib")
    tiny(tmp_path / "out", "--data", book, "--inits", "default", "mask-slopes", "--plot")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"curves.png", "attention-a book.txt.png", "masks-a book.txt.png"} <= names


def test_a_long_file_is_cut_and_says_so(tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_bytes("é".encode() * 2000)
    (result,) = tiny(tmp_path / "out", "--data", str(path), "--max-bytes", "1001", "--inits", "default")
    assert "the first 1,001 of 4,000 bytes" in capsys.readouterr().out
    assert result["metrics"]["val_tokens_evaluated"] == 2 * 25 - 1  # 500 characters: 450, 25 and 25 of two bytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo under torchrun")
def test_two_processes_give_the_losses_of_one(book, one_and_two_processes):
    flags = [str(ROOT / "train_lm.py"), *TINY, "--data", book, "--inits", "mask", "--device", "cpu"]
    (one,), (two,) = one_and_two_processes(flags)
    for a, b in zip(one["curve"], two["curve"], strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)
        assert a["nll"] == pytest.approx(b["nll"], abs=1e-4)
