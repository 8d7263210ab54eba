"""Text as token ids: WikiText-2, TinyStories, any UTF-8 file, and a text that comes with every Python.

A set is three strings, for training, validation and testing. Files are taken as they come, from one folder:
an extracted folder wins over an archive. A missing file is a FileNotFoundError, one that cannot be used a
ValueError; both are one line. A tokeniser is a plain dictionary, so that a checkpoint can hold it:

    {"kind": "byte"}                              256 tokens
    {"kind": "lines", "types": [...]}             WikiText-2: what spaces separate, <eos> at each line's end
    {"kind": "word", "types": [...]}              other text: words, signs and newlines; <unk> for rare ones
    {"kind": "gpt2"}                              byte pairs of GPT-2, by the extra `gpt2` (tiktoken); "vocabulary"
                                                  may name a folder with the files of GPT-2's release

Line ends are \\n throughout: CR LF and a lone CR become one as a text is read, and bytes are counted after that.
Shapes: B batch, N tokens of a block, T tokens of a text.
"""
import collections
import functools
import hashlib
import io
import re
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# addresses and sha256 of the official files. WikiText-2: the author's own host; the old one is gone
WIKITEXT = {
    "wikitext2": dict(folder="wikitext-2", ending="tokens", archive="wikitext-2-v1.zip",
                      sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    "wikitext2-raw": dict(folder="wikitext-2-raw", ending="raw", archive="wikitext-2-raw-v1.zip",
                          sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
}
WIKITEXT_BASE = "https://wikitext.smerity.com/"
STORIES = {
    "TinyStories-train.txt": "c5cf5e22ff13614e830afbe61a99fbcbe8bcb7dd72252b989fa1117a368d401f",  # 1.9 GB
    "TinyStories-valid.txt": "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4",
}
STORIES_BASE = ("https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
                "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/")
SEPARATOR = "<|endoftext|>"
UNKNOWN, END = "<unk>", "<eos>"


# -- sets: train, validation and test text --------------------------------------------------------


def builtin() -> tuple[str, str, str]:
    """The language reference that comes with Python (pydoc_data.topics), cut by `cut`.

    It differs between Python versions: a result should say which, or the hash of the text.
    """
    from pydoc_data.topics import topics

    return cut("\n".join(topics[name] for name in sorted(topics)))


def load_file(path: str | Path, max_bytes: int | None = None) -> tuple[str, str, str]:
    """Any UTF-8 text file, or its first max_bytes, cut by `cut`."""
    return cut(read(Path(path), max_bytes))


def cut(text: str) -> tuple[str, str, str]:
    """The first 90 % of the characters for training, 5 % each for validation and test."""
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return text[:first], text[first:second], text[second:]


def read(path: Path, limit: int | None = None) -> str:
    """A UTF-8 file, or as much of its first `limit` bytes as makes whole characters."""
    try:
        with open(path, "rb") as file:
            data = file.read(-1 if limit is None else limit)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    return _decode(data, path, whole=limit is None or len(data) < limit)


def _decode(data: bytes, path: object, whole: bool = True) -> str:
    """Bytes as UTF-8, lines ended by \\n. A character cut off at the end is dropped unless the file is whole."""
    try:
        text = data.decode().removeprefix("\ufeff")  # not utf-8-sig: its errors count from behind the mark
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        if not whole and len(data) - error.start < 4 and error.reason == "unexpected end of data":
            return _decode(data[: error.start], path)
        raise ValueError(f"{path}: not UTF-8 at byte {error.start:,} ({error.reason})") from None


def load_wikitext(name: str, data_dir: str | Path = "data") -> tuple[str, ...]:
    """WikiText-2 from its folder or its zip: the files wiki.train, wiki.valid and wiki.test."""
    about, data_dir = WIKITEXT[name], Path(data_dir)
    names = [f"wiki.{part}.{about['ending']}" for part in ("train", "valid", "test")]
    folder, archive = data_dir / about["folder"], data_dir / about["archive"]
    if folder.is_dir():
        return tuple(read(folder / file) for file in names)
    if not archive.is_file():
        raise FileNotFoundError(f"{archive} is missing: put {WIKITEXT_BASE}{archive.name} there, or its extracted "
                                f"folder {about['folder']}, or give --download")
    try:
        with zipfile.ZipFile(archive) as source:
            return tuple(_decode(source.read(f"{about['folder']}/{file}"), f"{archive}/{file}") for file in names)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, OSError, RuntimeError) as error:
        raise ValueError(f"{archive}: not a whole archive ({error}); delete it, fetch it again") from None


def load_stories(data_dir: str | Path = "data", max_bytes: int = 12_000_000) -> tuple[str, str, str]:
    """TinyStories: the first max_bytes of the training file, and as much of the other, halved for validation and test.

    Only whole stories are taken: a text that was cut ends with its last separator. (The paper tests on the
    validation part.)
    """
    texts = []
    for name in STORIES:
        path = Path(data_dir) / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: put {STORIES_BASE}{name} there, or give --download")
        text = read(path, max_bytes)
        if path.stat().st_size > max_bytes:
            text = text[: text.rfind(SEPARATOR) + len(SEPARATOR)] if SEPARATOR in text else text
        texts.append(text)
    stories = texts[1].split(SEPARATOR)
    half = (len(stories) + 1) // 2
    return texts[0], SEPARATOR.join(stories[:half]), SEPARATOR.join(stories[half:])


# -- tokenisers -----------------------------------------------------------------------------------


@functools.cache
def _word_pattern() -> re.Pattern:
    """Words with their combining marks, which `\\w` leaves out, and joiners; the two names that texts have; signs."""
    marks = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in ("Mn", "Mc"))
    return re.compile(rf"<unk>|<\|endoftext\|>|[\w{marks}\u200c\u200d]+|[^\w\s]|\n")


def pieces(kind: str, text: str) -> list[str]:
    """The words of a text, as a tokeniser of this kind sees them.

    >>> pieces("lines", " a <unk> \\n\\n")
    ['a', '<unk>', '<eos>', '<eos>']
    >>> pieces("word", "Don't stop.\\n")
    ['Don', "'", 't', 'stop', '.', '\\n']
    """
    if kind == "lines":
        return [word for line in io.StringIO(text) for word in [*line.split(), END]]
    return _word_pattern().findall(text)


def make_tokeniser(kind: str, text: str, size: int = 10_000) -> dict:
    """A tokeniser of this kind, its words the types of a training text: all ("lines"), or the `size` most frequent.

    Raises ValueError for another kind than byte, lines, word and gpt2.
    """
    if kind in ("byte", "gpt2"):
        return {"kind": kind}
    if kind not in ("lines", "word"):
        raise ValueError(f"a tokeniser is byte, lines, word or gpt2, got {kind!r}")
    counts = collections.Counter(pieces(kind, text))
    types = list(counts) if kind == "lines" else [word for word, _ in counts.most_common(size - 1)]
    return {"kind": kind, "types": types if UNKNOWN in types else [UNKNOWN, *types]}


def vocabulary_size(tokeniser: dict) -> int:
    """How many tokens there are."""
    if tokeniser["kind"] == "byte":
        return 256
    return _gpt2(tokeniser.get("vocabulary")).n_vocab if tokeniser["kind"] == "gpt2" else len(tokeniser["types"])


def encode(tokeniser: dict, text: str) -> Tensor:
    """Token ids of a text, (T,) int64. Words that the tokeniser does not have become <unk>."""
    kind = tokeniser["kind"]
    if kind == "byte":
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() if text else torch.empty(0).long()
    if kind == "gpt2":
        return torch.tensor(_gpt2(tokeniser.get("vocabulary")).encode(text, allowed_special="all"), dtype=torch.long)
    number = {word: index for index, word in enumerate(tokeniser["types"])}
    return torch.tensor([number.get(word, number[UNKNOWN]) for word in pieces(kind, text)], dtype=torch.long)


def decode(tokeniser: dict, ids: Tensor) -> str:
    """The text of token ids (T,), words joined by spaces, broken bytes replaced."""
    kind = tokeniser["kind"]
    if kind == "byte":
        return bytes(ids.tolist()).decode("utf-8", errors="replace")
    if kind == "gpt2":
        return _gpt2(tokeniser.get("vocabulary")).decode(ids.tolist())
    return " ".join(tokeniser["types"][index] for index in ids.tolist())


def _gpt2(folder: str | None) -> Any:
    """GPT-2's byte pair encoding; without a folder that has its vocabulary, tiktoken fetches it at the first use."""
    try:
        import tiktoken
    except ImportError:
        raise ValueError("the gpt2 tokeniser needs tiktoken; install it with: pip install 'tinymask[gpt2]'") from None
    try:
        if folder is None:
            return tiktoken.get_encoding("gpt2")
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str

        files = [Path(folder) / name for name in ("vocab.bpe", "encoder.json")]
        sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]  # or it reads its copy of older ones
        ranks = data_gym_to_mergeable_bpe_ranks(str(files[0]), str(files[1]), sums[0], sums[1])
        return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                                 special_tokens={SEPARATOR: len(ranks)})
    except Exception as error:  # its errors are of many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"tiktoken could not load GPT-2's vocabulary ({reason}); it needs the network once, or "
                         f"GPT-2's encoder.json and vocab.bpe in the folder --vocabulary {folder or 'DIR'}") from None


# -- batches --------------------------------------------------------------------------------------


def batch(ids: Tensor, block: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of a text: inputs and targets, the inputs shifted by one, (B, N) each.

    Every start is as likely, the first and the last included. Raises ValueError for a text that is shorter
    than block + 1.
    """
    if len(ids) <= block:
        raise ValueError(f"{len(ids)} tokens, wanted at least {block + 1}, a block and one more")
    start = torch.randint(len(ids) - block, (size, 1), generator=generator)
    window = ids[start + torch.arange(block + 1)]  # (B, N + 1)
    return window[:, :-1], window[:, 1:]


def blocks(ids: Tensor, block: int, size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """A text in order, cut into blocks, `size` of them at a time: yields (inputs, targets), (B, N) each, B <= size.

    What is left over comes last, alone and shorter, (1, n). Every token but the first is a target once: the perplexity
    of a whole text does not depend on batches. Nothing is made before it is asked for.
    """
    whole = max(0, len(ids) - 1) // block
    for first in range(0, whole, size):
        start = block * torch.arange(first, min(first + size, whole))[:, None]
        window = ids[start + torch.arange(block + 1)]  # (B, N + 1)
        yield window[:, :-1], window[:, 1:]
    if len(rest := ids[whole * block:]) > 1:
        yield rest[None, :-1], rest[None, 1:]
