"""Texts from files of the published layouts, tokenisers, batches."""
import doctest
import json
import zipfile

import pytest
import torch

from tinymask import text

pytestmark = pytest.mark.lm
WIKI = " \n = Title = \n \n A <unk> of words , \n"  # as published: spaces about everything, empty lines of a space


def wikitext(folder, archive, ending="tokens", name="wikitext-2"):
    parts = {f"wiki.{part}.{ending}": WIKI * count for part, count in (("train", 3), ("valid", 1), ("test", 2))}
    folder.mkdir(exist_ok=True)
    if archive:
        with zipfile.ZipFile(folder / f"{name}-v1.zip", "w") as file:
            for path, content in parts.items():
                file.writestr(f"{name}/{path}", content)
    else:
        (folder / name).mkdir()
        for path, content in parts.items():
            (folder / name / path).write_bytes(content.encode())


def test_docstring_examples():
    assert doctest.testmod(text).failed == 0


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name, ending, folder", [("wikitext2", "tokens", "wikitext-2"),
                                                  ("wikitext2-raw", "raw", "wikitext-2-raw")])
def test_wikitext_layout(name, ending, folder, archive, tmp_path):
    wikitext(tmp_path, archive, ending, folder)
    assert text.load_wikitext(name, tmp_path) == (WIKI * 3, WIKI, WIKI * 2)


def test_wikitext_tokens_are_counted_as_published():
    """split() of each line and <eos>: the rule that gives 2,088,628 tokens and 33,278 types on the official files."""
    tokeniser = text.make_tokeniser("lines", WIKI)
    assert tokeniser["types"] == ["<eos>", "=", "Title", "A", "<unk>", "of", "words", ","]
    ids = text.encode(tokeniser, WIKI)
    assert len(ids) == sum(len(line.split()) + 1 for line in WIKI.splitlines()) == 12
    assert text.decode(tokeniser, ids) == "<eos> = Title = <eos> <eos> A <unk> of words , <eos>"
    assert text.decode(tokeniser, text.encode(tokeniser, "A cat \n")) == "A <unk> <eos>"


def test_a_missing_or_broken_archive_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="wikitext-2-v1.zip") as error:
        text.load_wikitext("wikitext2", tmp_path)
    assert "smerity.com" in str(error.value) and "\n" not in str(error.value)
    wikitext(tmp_path, True)
    whole = (tmp_path / "wikitext-2-v1.zip").read_bytes()
    for data in (b"", b"<html>", whole[:-40]):
        (tmp_path / "wikitext-2-v1.zip").write_bytes(data)
        with pytest.raises(ValueError, match="fetch it again"):
            text.load_wikitext("wikitext2", tmp_path)
    (tmp_path / "wikitext-2").mkdir()
    with pytest.raises(FileNotFoundError, match="wiki.train.tokens"):
        text.load_wikitext("wikitext2", tmp_path)


def stories(folder, train, valid):
    (folder / "TinyStories-train.txt").write_bytes(train.encode())
    (folder / "TinyStories-valid.txt").write_bytes(valid.encode())


def test_stories_are_cut_between_two_of_them(tmp_path):
    one, two, last = "Once é.\n<|endoftext|>\n", "Twice.\n<|endoftext|>\n", "A last one without a separator."
    stories(tmp_path, one + two + last, one + two + one + last)
    train, val, test = text.load_stories(tmp_path)
    assert train == one + two + last and val + text.SEPARATOR + test == one + two + one + last
    assert val.count(text.SEPARATOR) == 1
    train, *_ = text.load_stories(tmp_path, max_bytes=len((one + two).encode()) + 5)
    assert train == (one + two).rstrip("\n")
    (tmp_path / "TinyStories-valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match="TinyStories-valid.txt is missing"):
        text.load_stories(tmp_path)


def test_a_limit_in_the_middle_of_a_character(tmp_path):
    (tmp_path / "x").write_bytes("aé€😀".encode())  # 1, 2, 3 and 4 bytes
    for limit, wanted in {1: "a", 2: "a", 3: "aé", 5: "aé", 6: "aé€", 9: "aé€", 10: "aé€😀", 99: "aé€😀"}.items():
        assert text.read(tmp_path / "x", limit) == wanted


@pytest.mark.parametrize("data, offset", [(b"abc\xff", "3"), ("ab".encode("utf-16"), "0"), (b"caf\xe9 noir", "3"),
                                          ("é".encode()[:1], "0")])
def test_bad_utf8_is_named_with_its_place(data, offset, tmp_path):
    (tmp_path / "x.txt").write_bytes(data)
    with pytest.raises(ValueError, match=f"x.txt: not UTF-8 at byte {offset}"):
        text.load_file(tmp_path / "x.txt")


def test_any_file_and_its_cut(tmp_path):
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbf" + bytes(range(48, 68)) * 5)  # with a byte order mark
    train, val, test = text.load_file(tmp_path / "x")
    assert (len(train), len(val), len(test)) == (90, 5, 5) and train[0] == "0"
    with pytest.raises(FileNotFoundError):
        text.load_file(tmp_path / "nosuch")
    with pytest.raises(ValueError, match="directory"):
        text.load_file(tmp_path)


def test_the_builtin_text_is_there():
    train, val, test = text.builtin()
    assert len(train + val + test) > 100_000 and "lambda" in train + val + test


@pytest.mark.parametrize("kind", ["byte", "word", "lines"])
def test_round_trip(kind):
    sample = "Words, and more words: é 😀\nnew line\n"
    tokeniser = text.make_tokeniser(kind, sample)
    ids = text.encode(tokeniser, sample)
    assert ids.dtype == torch.int64 and ids.max() < text.vocabulary_size(tokeniser)
    again = text.decode(tokeniser, ids)
    assert again == sample if kind == "byte" else again.replace(" ", "") == sample.replace(" ", "").replace(
        "\n", "<eos>" if kind == "lines" else "\n")
    assert len(text.encode(tokeniser, "")) == 0


def test_the_most_frequent_words_are_kept():
    tokeniser = text.make_tokeniser("word", "b a b c b a", size=3)
    assert tokeniser["types"] == ["<unk>", "b", "a"]
    assert text.encode(tokeniser, "a b c d").tolist() == [2, 1, 0, 0]
    with pytest.raises(ValueError, match="byte, lines, word or gpt2"):
        text.make_tokeniser("char", "x")


def test_large_vocabularies_do_not_overflow():
    words = " ".join(f"w{k}" for k in range(70_000))
    ids = text.encode(text.make_tokeniser("lines", words), words)
    assert ids.max() == 70_001 and len(ids.unique()) == 70_001


def test_gpt2_by_tiktoken(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([k]): k for k in range(256)} | {b"he": 256, b"the": 257}
    tiny = tiktoken.Encoding("tiny", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: tiny)
    tokeniser = text.make_tokeniser("gpt2", "")
    assert text.encode(tokeniser, "the<|endoftext|>").tolist() == [257, 258]
    assert text.vocabulary_size(tokeniser) == 259 and text.decode(tokeniser, torch.tensor([257, 32])) == "the "
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    with pytest.raises(ValueError, match="needs the network once"):
        text.encode(tokeniser, "x")


def gpt2_files(folder, *merges):
    """encoder.json and vocab.bpe as GPT-2's release has them: printable bytes as they are, others from U+0100 on."""
    byte = {b: chr(b) for b in range(256) if chr(b).isprintable() and b != 32}
    byte |= {b: chr(256 + k) for k, b in enumerate(b for b in range(256) if b not in byte)}
    names = [*byte.values(), *("".join(pair) for pair in merges), "<|endoftext|>"]
    folder.mkdir(exist_ok=True)
    (folder / "encoder.json").write_text(json.dumps({name: k for k, name in enumerate(names)}), encoding="utf-8")
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    return {"kind": "gpt2", "vocabulary": str(folder)}


def test_gpt2_from_files(tmp_path, monkeypatch):
    """As they are now, without a network; pieces are cut before a space, which is U+0120 in the files."""
    monkeypatch.setattr(pytest.importorskip("tiktoken"), "get_encoding", lambda name: 1 / 0)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    tokeniser = gpt2_files(tmp_path / "gpt2", "he", ("t", "he"), ("\u0120", "the"))
    ids = text.encode(tokeniser, "the the<|endoftext|>\n")
    assert ids[:3].tolist() == [257, 258, 259] and text.vocabulary_size(tokeniser) == 260
    assert text.decode(tokeniser, ids) == "the the<|endoftext|>\n"
    gpt2_files(tmp_path / "gpt2", "th")
    assert text.encode(tokeniser, "the").tolist() == [256, ord("e") - 33]
    (tmp_path / "gpt2" / "vocab.bpe").write_text("#version: 0.2\nh e\n", encoding="utf-8")
    for folder in (tokeniser["vocabulary"], str(tmp_path / "nosuch")):
        with pytest.raises(ValueError, match=f"encoder.json and vocab.bpe in the folder --vocabulary {folder}"):
            text.encode({"kind": "gpt2", "vocabulary": folder}, "x")


def test_gpt2_without_tiktoken_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r"tinymask\[gpt2\]"):
        text.encode({"kind": "gpt2"}, "x")


def test_batches_are_shifted_by_one_and_reach_both_ends():
    ids, generator = torch.arange(10), torch.Generator().manual_seed(0)
    x, y = text.batch(ids, 4, 500, generator)
    assert x.shape == y.shape == (500, 4) and torch.equal(y, x + 1)
    assert x[:, 0].min() == 0 and y[:, -1].max() == 9 and set(x[:, 0].tolist()) == set(range(6))
    assert text.batch(ids, 9, 3, generator)[0].tolist() == [list(range(9))] * 3
    for block in (10, 11):
        with pytest.raises(ValueError, match=f"10 tokens, wanted at least {block + 1}"):
            text.batch(ids, block, 3, generator)


@pytest.mark.parametrize("tokens, block", [(10, 4), (9, 4), (8, 4), (2, 4), (10, 1), (1, 4), (0, 4)])
def test_blocks_have_every_token_but_the_first_as_a_target_once(tokens, block):
    pairs = list(text.blocks(torch.arange(tokens), block))
    targets = [token for _, y in pairs for token in y[0].tolist()]
    assert targets == list(range(1, tokens)) and all(torch.equal(y, x + 1) for x, y in pairs)
    assert all(1 <= x.shape[1] <= block for x, _ in pairs)
    several = list(text.blocks(torch.arange(tokens), block, size=2))  # whole blocks two at a time, the rest alone
    assert [token for _, y in several for token in y.flatten().tolist()] == targets
    assert all(len(x) == 2 for x, _ in several[: len(pairs) // 2 - 1]) and all(len(x) <= 2 for x, _ in several)


@pytest.mark.parametrize("limit", range(20, 30))
def test_a_byte_order_mark_moves_no_offset(limit, tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "日本語éa".encode() * 3)
    got = text.read(path, limit)
    assert ("日本語éa" * 3).startswith(got) and len(got.encode()) > limit - 3 - 3
    path.write_bytes(b"\xef\xbb\xbfabcdef\xff")
    with pytest.raises(ValueError, match="at byte 9 "):
        text.read(path)


def test_a_damaged_zip_is_one_line(tmp_path):
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for part in ("train", "valid", "test"):
            archive.writestr(f"wikitext-2/wiki.{part}.tokens", " a b c <unk> \n" * 500)
    whole = (tmp_path / "wikitext-2-v1.zip").read_bytes()
    refused = 0
    for place in range(60, 160, 7):
        (tmp_path / "wikitext-2-v1.zip").write_bytes(whole[:place] + b"\xff\x00\xff" + whole[place + 3:])
        try:
            text.load_wikitext("wikitext2", tmp_path)
        except ValueError as error:
            refused += 1
            assert "fetch it again" in str(error) and "\n" not in str(error)
    assert refused > 10  # of 15; damage to a field that nobody reads is none


def test_line_ends_are_one_whatever_wrote_them(tmp_path):
    """CR LF and a lone CR are read as LF, also where a file is cut between the two; bytes are those of what is read."""
    unix = "one\ntwo\n\nthree é\n" * 20
    for ends in ("\r\n", "\r"):
        path = tmp_path / "x.txt"
        path.write_bytes(unix.replace("\n", ends).encode())
        assert text.read(path) == unix and "".join(text.load_file(path)) == unix
    path.write_bytes(b"ab\r\ncd")
    assert text.read(path, 3) == "ab\n"


def test_words_of_scripts_with_combining_marks_are_whole():
    assert text.pieces("word", "नमस्ते दुनिया, cafe\u0301 میخواهم\u200cی") == [
        "नमस्ते", "दुनिया", ",", "cafe\u0301", "میخواهم\u200cی"]
    assert text.pieces("word", "a <unk> b<|endoftext|>c <x>") == [
        "a", "<unk>", "b", "<|endoftext|>", "c", "<", "x", ">"]


def test_a_file_whose_name_is_no_text_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is missing") as error:
        text.load_file(tmp_path / "\udcff.txt")
    assert str(error.value).encode("ascii", "backslashreplace").endswith(b"udcff.txt is missing")
