"""train_lm.py against a loop of a few lines, written from the paper; its figures against other ways to count them."""
import functools
import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import SHARED_FLAGS, assert_moved, assert_same, checkpoint, set_masks, train, words
from test_text import gpt2_files

import train_lm
from tinymask import GPT, generate, init_weights, parallel, persistence, qk_init, runs, text
from tinymask.inits import shuffled
from tinymask.rivals import RelativeBias

pytestmark = pytest.mark.lm
TINY = dict(steps=3, batch_size=4, dim=12, depth=2, heads=3, head_dim=4, block=4, dropout=0.0)
SMALL = dict(steps=600, batch_size=16, dim=96, depth=3, heads=4, head_dim=24, block=64, lr=3e-3, weight_decay=0.1,
             dropout=0.0, position_std=0.02, token_std=0.02, tokeniser="byte", max_bytes=12_000_000)


def text_of(count, *some):
    return "".join(f"{word} " for word in random.Random(0).choices(some, k=count))


# each part shows where it is from, and cuts fall between words; a third of the test text's words are known, and some
# of its characters have two bytes
PARTS = text_of(1080, "abcd", "efgh", "ijkl", "mnop", "qrst"), text_of(60, "1234", "5678"), "ÀÉÎÔ ÙÜÇÑ abcd " * 20


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "a book.txt"
    path.write_text("".join(PARTS), encoding="utf-8")
    return path


def run(book, out, init, *flags):
    return train_lm.main([*words(TINY), "--data", str(book), "--inits", init, "--out", str(out), *flags])


def model_of(f, vocabulary=256):
    names = "block", "dim", "depth", "heads", "head_dim", "dropout"
    return GPT(vocabulary=vocabulary, **{name: f[name] for name in names})


def turned(x):
    """Rotary positions, arXiv 2104.09864: columns 2k and 2k + 1 as complex numbers, turned by n 10000^(-2k / Dh)."""
    tokens, width = x.shape[2:]
    angle = torch.arange(tokens)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def reference(init, seed, f):
    """Section 5.4: next tokens of random windows. f: the flags. Gives the weights, and the losses of all steps."""
    cut = "".join(PARTS).encode()[: f["max_bytes"]].decode()
    shown = cut[: len(cut) * 90 // 100]
    tokeniser = text.make_tokeniser(f["tokeniser"], shown)
    model, ids = model_of(f, text.vocabulary_size(tokeniser)), text.encode(tokeniser, shown)
    init_weights(model, runs.generator(seed, "weights"), f["token_std"], f["position_std"])
    heads, n, steep = f["heads"], torch.arange(f["block"]), init in ("mask", "mask-frozen", "mask-shuffled")
    slopes = torch.tensor([10.0 if steep else 2 ** (-8 * (head + 1) / heads) for head in range(heads)])
    logits, draws = -slopes[:, None, None] * (n[:, None] - n).clamp(min=0), runs.generator(seed, init)
    for block in model.transformer.blocks if init == "mimetic" else []:
        qk_init.mimetic(block.attention, draws, query_key=-0.7, value_out=0.4, sign=1)
    masks = [shuffled(logits, draws, causal=True) if init == "mask-shuffled" else logits for _ in range(f["depth"])]
    set_masks(model, init, masks)
    for block in model.transformer.blocks:
        if init == "relative":
            block.attention.position_bias = RelativeBias((n[:, None] - n).clamp(min=0), heads)
        if init.startswith("rotary"):
            block.attention.rotate = turned
            model.position.data.zero_()
            model.position.requires_grad_(False)

    def loss(draws):
        start = torch.randint(len(ids) - f["block"], (f["batch_size"], 1), generator=draws)
        torch.manual_seed(torch.randint(2**31, (1,), generator=draws).item())
        with torch.autocast("cpu", torch.bfloat16, enabled=f.get("bf16", False)):
            output = model(ids[start + n])
        return -output.float().log_softmax(-1).gather(-1, ids[start + n + 1][..., None]).mean()

    return train(model, loss, f, seed, init)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("init", train_lm.INITS)
def test_three_steps_are_those_of_the_paper(init, seed, book, tmp_path):
    (result,) = run(book, tmp_path, init, "--first-seed", str(seed))
    state, losses = reference(init, seed, SMALL | TINY)
    assert_same(checkpoint(tmp_path)["model"], state)
    assert [point["train_loss"] for point in result["curve"]] == pytest.approx(losses, rel=1e-5)


# one other value for each flag that training depends on; of the rest, where they are moved
MOVED = dict(steps=2, batch_size=2, dim=15, depth=3, heads=4, head_dim=5, block=6, lr=0.01, mask_lr=0.5,
             weight_decay=0.3, dropout=0.5, position_std=0.7, token_std=0.3, tokeniser="word", max_bytes=1000,
             bf16=True)


@pytest.mark.parametrize("name", MOVED)
def test_each_flag_changes_what_it_says(name, book, tmp_path):
    moved = {name: MOVED[name]}
    (result,) = run(book, tmp_path, "mask", *words(moved))
    found = checkpoint(tmp_path)["model"]
    assert_same(found, reference("mask", 0, SMALL | TINY | moved)[0])
    assert_moved(found, reference("mask", 0, SMALL | TINY)[0], result, vars(train_lm.settings([], None)) | TINY,
                 {name} | ({"mask_lr"} if name == "lr" else set()))


def test_no_flag_is_left_out():
    below = {"dataset", "data_dir", "data", "download", "vocabulary", "sample", "prompt", "temperature", "top_k"}
    assert {action.dest for action in train_lm.parser()._actions} == MOVED.keys() | SHARED_FLAGS | below


def test_presets():
    """Table 12."""
    paper = dict(batch_size=128, lr=3e-4, weight_decay=0.01, dim=512, depth=12, heads=12, head_dim=42, block=64,
                 dropout=0.2, position_std=0.02, token_std=0.02, tokeniser="gpt2", max_bytes=12_000_000)
    for task, steps in ((None, 3000), ("wikitext2-raw", 3000), ("tinystories", 5000)):
        assert vars(train_lm.settings(["--preset", "paper"], task)).items() >= (paper | {"steps": steps}).items()
    usual = SMALL | {"inits": ["default", "mimetic", "mask", "mask-slopes", "alibi", "bias"], "dataset": ["builtin"]}
    assert vars(train_lm.settings([], "tinystories")).items() >= usual.items()


def constant(*scores):
    """A model that gives the next token these scores, whatever came before."""
    model = model_of(TINY, len(scores))
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor(scores)
    return model


@pytest.mark.parametrize("limit, bits", [(None, [1, 3, 1, 3, 3]), (2, [1, 3, 1, 3]), (1, [1, 3])])
def test_figures_of_a_text_of_known_probabilities(limit, bits):
    """Six tokens of seven bytes in blocks of 2; after any token, 1 has the probability 1/2 and 2 has 1/8."""
    model, mean = constant(math.log(3 / 8), math.log(1 / 2), math.log(1 / 8)), sum(bits) / len(bits)
    found = train_lm.scores(model, torch.tensor([0, 1, 2, 1, 2, 2]), 7, 2, limit=limit)
    assert found == pytest.approx({"perplexity": 2**mean, "nll": mean * math.log(2), "bits_per_byte": mean * 6 / 7,
                                   "tokens_evaluated": len(bits)})


@pytest.mark.parametrize("nll, perplexity", [(699.5, math.exp(699.5)), (700.5, math.inf), (math.inf, math.inf)])
def test_a_perplexity_beyond_all_numbers_is_infinite(nll, perplexity):
    found = train_lm.scores(constant(0.0, -nll), torch.tensor([0, 1, 1]), None, 2)
    assert found == {"perplexity": perplexity, "nll": nll, "bits_per_byte": None, "tokens_evaluated": 2}


def test_a_result_line(book, tmp_path):
    """Which text a figure is of, how many bytes that has, that dropout is off: counted anew with the saved weights."""
    f = TINY | dict(steps=40, dropout=0.5, lr=0.05)
    (result,) = run(book, tmp_path, "mask", *words(f))
    metrics, model, ends = result["metrics"], model_of(f), []
    train, val, test = (torch.tensor(list(part.encode())) for part in PARTS)
    for block in model.transformer.blocks:
        block.attention.set_mask(torch.zeros(3, 4, 4))
    for state in reference("mask", 0, SMALL | f | {"steps": 0})[0], checkpoint(tmp_path)["model"]:
        model.load_state_dict(state)
        ends.append(persistence.snapshot(model, val[None, :4]))
    persisted = persistence.measures(*ends)
    assert {name: metrics[name] for name in persisted} == {name: pytest.approx(x) for name, x in persisted.items()}
    found = {"val_": metrics, "": metrics, "point": {f"point{name}": x for name, x in result["curve"][-1].items()}}
    for name, part, count in (("val_", val, 299), ("", test, 459), ("point", val, 64 * 4)):
        windows = [part[start: start + 5] for start in range(0, count, 4)]
        losses = [F.cross_entropy(model.eval()(w[None, :-1])[0], w[1:], reduction="sum").item() for w in windows]
        nll = sum(losses) / count
        wanted = dict(nll=nll, perplexity=math.exp(nll), bits_per_byte=nll / math.log(2), tokens_evaluated=count)
        assert {key: found[name][f"{name}{key}"] for key in wanted} == pytest.approx(wanted, rel=1e-4), name
    assert [point["step"] for point in result["curve"]] == list(range(2, 41, 2))
    assert result["params"]["mask"] == 2 * 3 * 4 * 4 and "unknown" not in metrics
    hashes = [hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12] for ids in (train, val, test)]
    assert [result["config"]["text"], result["config"]["held_out"]] == [hashes[0], "-".join(hashes[1:])]


def test_words(book, tmp_path, capsys):
    """Their tokeniser is made from the training text alone; spaces are lost, so nothing is said per byte."""
    (result,) = run(book, tmp_path, "default", "--tokeniser", "word")
    metrics, printed = result["metrics"], capsys.readouterr().out
    assert set(checkpoint(tmp_path)["tokeniser"]["types"]) == {"<unk>", *PARTS[0].split()}
    assert metrics["bits_per_byte"] is None is metrics["val_bits_per_byte"]
    assert metrics["unknown"] == pytest.approx(2 / 3) and metrics["tokens_evaluated"] == 59
    assert "step 3: perplexity " in printed and "on validation\n\n1 seed(s)" in printed  # and no sample
    assert "perplexity per word token, blocks of 4" in printed


def test_gpt2_s_tokens_from_files(book, tmp_path, monkeypatch):
    """Bits per byte are of the text's bytes, a path is no part of a result."""
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    tokeniser, flags = gpt2_files(tmp_path / "gpt2", "ab", "cd"), ["--tokeniser", "gpt2", "--sample", "2"]
    (result,) = run(book, tmp_path / "out", "default", *flags, "--vocabulary", tokeniser["vocabulary"])
    ids, metrics = [text.encode(tokeniser, part) for part in PARTS], result["metrics"]
    assert result["config"]["text"] == hashlib.sha256(ids[0].numpy().tobytes()).hexdigest()[:12]
    assert "vocabulary" not in result["config"] and checkpoint(tmp_path / "out")["tokeniser"] == tokeniser
    assert checkpoint(tmp_path / "out")["model"]["token.weight"].shape[0] == 259
    per_byte = len(ids[2]) / len(PARTS[2].encode())
    assert metrics["bits_per_byte"] == pytest.approx(metrics["nll"] / math.log(2) * per_byte)


def test_only_the_training_text_is_learnt_from(book, tmp_path, monkeypatch, capsys):
    """And the processes of torchrun share a batch: each reads other rows with a dropout of its own, one writes."""
    read, seeds, shared, forward = [], [], [], GPT.forward

    def recorded(model, ids):
        if model.training:
            read.append(ids)
            seeds.append(torch.initial_seed())
        return forward(model, ids)

    monkeypatch.setattr(GPT, "forward", recorded)
    run(book, tmp_path / "all", "default", "--steps", "30")
    assert len(read) == 30 and set(torch.cat(read).flatten().tolist()) == set(PARTS[0].encode())
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel",
                        lambda model: shared.append(model) or functools.partial(model))
    monkeypatch.setattr(parallel, "mean_loss", lambda loss: 7.0)
    for rank in (0, 1):
        monkeypatch.setattr(parallel, "start", lambda *_, rank=rank: (rank, 2, torch.device("cpu")))
        capsys.readouterr()
        (result,) = run(book, tmp_path / str(rank), "default", "--steps", "30", "--sample", "2")
        assert (capsys.readouterr().out > "") == (tmp_path / str(rank) / "results.jsonl").exists() == (rank == 0)
        assert result.get("curve", [{"train_loss": 7.0}])[0]["train_loss"] == 7.0
    assert all(torch.equal(ids, torch.stack([first, second], dim=1).flatten(0, 1))
               for ids, first, second in zip(read[:30], read[30:60], read[60:], strict=True))
    assert seeds[30:] == seeds[:30] + [seed + 1 for seed in seeds[:30]] and len(shared) == 2


@pytest.mark.parametrize("prompt, flags", [("", {}), ("abcd ", {"temperature": 0}), ("ab", {"top_k": 2}),
                                           ("ab", {"temperature": 2.0})])
def test_samples(prompt, flags, book, tmp_path, capsys):
    """As the saved model draws them, without dropout, from a generator of their own."""
    f = TINY | dict(dropout=0.1, steps=40, lr=0.1, sample=20)
    run(book, tmp_path, "default", *words(f | flags | {"prompt": prompt}))
    model, ids = model_of(f).eval(), torch.tensor([list((prompt or PARTS[0][0]).encode())])
    model.load_state_dict(checkpoint(tmp_path)["model"])
    drawn = generate(model, ids, 20, generator=runs.generator(0, "sample"), **flags)[0]
    assert f"\n{bytes(drawn.tolist()).decode(errors='replace')}\n" in capsys.readouterr().out


def test_prompts_of_lines_go_on():
    tokeniser = text.make_tokeniser("lines", "the cat sat\non the mat\n")
    for prompt, encoded in (("the cat", "the cat"), ("sat\n", "sat <eos>")):
        assert text.decode(tokeniser, train_lm.encode_prompt(tokeniser, prompt)) == encoded
    for prompt, reason in (("the dog", "not in the vocabulary: dog"), (" ", "no token")):
        with pytest.raises(ValueError, match=reason):
            train_lm.encode_prompt(tokeniser, prompt)


def test_sets_from_their_files(tmp_path, monkeypatch, capsys):
    fetched, folder, archive = [], tmp_path / "data", "wikitext-2-raw-v1.zip"

    def download(url, path, sha256):
        fetched.append((url, path, sha256))
        path.write_text("Once there was.\n<|endoftext|>\n" * 200, encoding="utf-8")

    def load(*flags):
        return train_lm.main([*words(TINY), "--out", str(tmp_path / "out"), "--inits", "default", "--data-dir",
                              "~/data", "--max-bytes", "1000", "--tokeniser", "word", "--dataset", *flags])

    monkeypatch.setattr(runs, "download", download)
    monkeypatch.setattr(text, "builtin", lambda: PARTS)
    monkeypatch.setattr("os.path.expanduser", lambda path: path.replace("~", str(tmp_path)))
    (folder / "wikitext-2").mkdir(parents=True)
    for part, count in (("train", 9), ("valid", 5), ("test", 7)):
        (folder / "wikitext-2" / f"wiki.{part}.tokens").write_text(" \n = A = \n <unk> of words , \n" * count, "utf-8")
    with pytest.raises(SystemExit):
        load("tinystories")
    assert "--dataset tinystories: " in capsys.readouterr().err and not fetched
    results = load("builtin", "wikitext2", "tinystories", "--download")
    counts = [(r["task"], r["metrics"]["val_tokens_evaluated"], r["metrics"]["tokens_evaluated"]) for r in results]
    # 33 stories in 1,000 bytes, cut behind the 17th: five tokens each, and their separators with a line's end
    assert counts == [("builtin", 59, 59), ("wikitext2", 5 * 10 - 1, 7 * 10 - 1),
                      ("tinystories", 17 * 5 + 16 + 16 - 1, 16 * 5 + 16 + 16 - 1)]
    with pytest.raises(SystemExit):  # what is downloaded here is no zip
        load("wikitext2-raw", "--download")
    assert fetched == [*((text.STORIES_BASE + name, folder / name, sha256) for name, sha256 in text.STORIES.items()),
                       (text.WIKITEXT_BASE + archive, folder / archive, text.WIKITEXT["wikitext2-raw"]["sha256"])]
    assert train_lm.settings(["--data", "~/x"], None).data == f"{tmp_path}/x"


@pytest.mark.parametrize("content, reason", [
    (b"", "0 tokens in the training text"), (b"caf\xe9" * 500, "not UTF-8 at byte 3"),
    (b"word " * 15, "4 tokens in the validation text, --block 4 wants more")])
def test_short_and_broken_files_are_named(content, reason, book, tmp_path, capsys):
    book.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        run(book, tmp_path / "out", "default")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and f"--data {book}: " in error and reason in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_long_file_is_cut_and_says_so(book, tmp_path, capsys):
    for most, said in ((6160, []), (6159, [f"{book}: the first 6,159 of 6,160 bytes; more with --max-bytes"])):
        run(book, tmp_path, "default", f"--max-bytes={most}")
        assert [line for line in capsys.readouterr().out.splitlines() if "--max-bytes" in line] == said


def test_resume_knows_its_text_and_a_very_bad_run_is_a_finished_one(book, tmp_path):
    def count(*flags):
        (result,) = run(book, tmp_path, "default", *flags, "--resume")
        return len((tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()), result

    _, bad = count("--lr", "500", "--steps", "1")
    assert bad["metrics"]["perplexity"] is None and bad["metrics"]["nll"] > 700 and bad["diverged"]
    assert count("--lr", "500", "--steps", "1") == (1, bad)
    assert count()[0] == count()[0] == 2
    book.write_text("".join(PARTS)[:-5] + "xbcd ", encoding="utf-8")  # the test text alone
    assert count()[0] == count()[0] == 3
    assert count("--lr", "1e30", "--sample", "3")[1]["diverged"]


def test_the_table_and_when_the_paper_s_figures_stand_in_it(capsys):
    """Table 6, beside its own settings alone."""
    table6 = "172.78 181.91 178.34 188.87 166.76 179.7 10.42 10.49 10.64 10.6 10.4 10.48".split()
    metrics = {"val_bits_per_byte": 1.5, "bits_per_byte": 1.25, "val_perplexity": 2.25, "perplexity": 4}
    tasks, inits = ["wikitext2-raw", "tinystories"], ["default", "mimetic", "mask"]
    results = [{"task": task, "init": init, "metrics": metrics} for task in tasks for init in [*inits, "bias"]]
    for flags, paper in (["--seeds", "1"], 1), (["--lr", "1"], 0), (["--preset", "small"], 0), (["--data", "x"], 0):
        args_of = {task: train_lm.settings(["--preset", "paper", "--inits", *inits, *flags], task) for task in tasks}
        train_lm.print_table(args_of["tinystories"], args_of, results)
        printed = capsys.readouterr().out.splitlines()[-6:]
        assert [line.split() for line in printed] == [
            [task, init, "1.5000", "1.2500", "2.25", "4.00", *table6[2 * row: 2 * row + 2] * paper]
            for row, (task, init) in enumerate((task, init) for task in tasks for init in inits)]


def test_plot(book, tmp_path):
    pytest.importorskip("matplotlib")
    run(book, tmp_path / "out", "mask-slopes", "--plot", "--seeds", "2", "--inits", "relative", "rotary-mask", "rotary")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"curves.png", "attention-a book.txt.png", "masks-a book.txt.png"} <= names


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo under torchrun")
def test_two_processes_give_the_losses_of_one(book, one_and_two_processes):
    flags = [*words(TINY), "--data", str(book), "--inits", "mask", "--device", "cpu"]
    (one,), (two,) = one_and_two_processes([train_lm.__file__, *flags])
    for a, b in zip(one["curve"], two["curve"], strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-5)
        assert a["nll"] == pytest.approx(b["nll"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo under torchrun")
def test_a_signal_to_one_of_two_processes_stops_both(book, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               train_lm.__file__, *words(TINY | {"steps": 100_000}), "--data", str(book), "--inits", "default",
               "--out", str(tmp_path / "out"), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while "seed 0" not in running.stdout.readline():
            pass
        time.sleep(1)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text(encoding="utf-8").split()
        os.kill(int(children[-1]), signal.SIGTERM)
        _, error = running.communicate(timeout=60)
    assert running.returncode == 1 and "stopped at step" in error and "143" in error
    assert len(list((tmp_path / "out" / "checkpoints").glob("*.pt"))) == 1
