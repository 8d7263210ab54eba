"""Text as token ids: WikiText-2, TinyStories, any UTF-8 file, and a text that comes with every Python.

A set is three strings, for training, validation and testing. Files are taken as they come, from one folder:
an extracted folder wins over an archive. A missing file is a FileNotFoundError, one that cannot be used a
ValueError; both are one line. A tokeniser is a plain dictionary, so that a checkpoint can hold it:

    {"kind": "byte"}                              256 tokens
    {"kind": "lines", "types": [...]}             WikiText-2: what spaces separate, <eos> at each line's end
    {"kind": "word", "types": [...]}              other text: words, signs and newlines; <unk> for rare ones
    {"kind": "gpt2"}                              byte pairs of GPT-2, by the extra `gpt2` (tiktoken)

Shapes: B batch, N tokens of a block, T tokens of a text.
"""
import collections
import io
import re
import zipfile
import zlib
from pathlib import Path

import torch

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


def builtin():
    """The language reference that comes with Python (pydoc_data.topics), cut by `cut`.

    It differs between Python versions: a result should say which, or the hash of the text.
    """
    from pydoc_data.topics import topics

    return cut("\n".join(topics[name] for name in sorted(topics)))


def load_file(path, max_bytes=None):
    """Any UTF-8 text file, or its first max_bytes, cut by `cut`."""
    return cut(read(Path(path), max_bytes))


def cut(text):
    """The first 90 % of the characters for training, 5 % each for validation and test."""
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return text[:first], text[first:second], text[second:]


def read(path, limit=None):
    """A UTF-8 file, or as much of its first `limit` bytes as makes whole characters."""
    try:
        with open(path, "rb") as file:
            data = file.read(-1 if limit is None else limit)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    return _decode(data, path, whole=limit is None or len(data) < limit)


def _decode(data, path, whole=True):
    """Bytes as UTF-8. A character that is cut off at the end is dropped unless the file is whole."""
    try:
        return data.decode().removeprefix("\ufeff")  # not utf-8-sig: its errors count from behind the mark
    except UnicodeDecodeError as error:
        if not whole and len(data) - error.start < 4 and error.reason == "unexpected end of data":
            return data[: error.start].decode().removeprefix("\ufeff")
        raise ValueError(f"{path}: not UTF-8 at byte {error.start:,} ({error.reason})") from None


def load_wikitext(name, data_dir="data"):
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


def load_stories(data_dir="data", max_bytes=12_000_000):
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


def pieces(kind, text):
    """The words of a text, as a tokeniser of this kind sees them.

    >>> pieces("lines", " a <unk> \\n\\n")
    ['a', '<unk>', '<eos>', '<eos>']
    >>> pieces("word", "Don't stop.\\n")
    ['Don', "'", 't', 'stop', '.', '\\n']
    """
    if kind == "lines":
        return [word for line in io.StringIO(text) for word in [*line.split(), END]]
    return re.findall(r"\w+|[^\w\s]|\n", text)


def make_tokeniser(kind, text, size=10_000):
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


def vocabulary_size(tokeniser):
    """How many tokens there are."""
    if tokeniser["kind"] == "byte":
        return 256
    return _gpt2().n_vocab if tokeniser["kind"] == "gpt2" else len(tokeniser["types"])


def encode(tokeniser, text):
    """Token ids of a text, (T,) int64. Words that the tokeniser does not have become <unk>."""
    kind = tokeniser["kind"]
    if kind == "byte":
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() if text else torch.empty(0).long()
    if kind == "gpt2":
        return torch.tensor(_gpt2().encode(text, allowed_special="all"), dtype=torch.long)
    number = {word: index for index, word in enumerate(tokeniser["types"])}
    return torch.tensor([number.get(word, number[UNKNOWN]) for word in pieces(kind, text)], dtype=torch.long)


def decode(tokeniser, ids):
    """The text of token ids (T,), words joined by spaces, broken bytes replaced."""
    kind = tokeniser["kind"]
    if kind == "byte":
        return bytes(ids.tolist()).decode("utf-8", errors="replace")
    if kind == "gpt2":
        return _gpt2().decode(ids.tolist())
    return " ".join(tokeniser["types"][index] for index in ids.tolist())


def _gpt2():
    """GPT-2's byte pair encoding; tiktoken fetches its vocabulary at the first use."""
    try:
        import tiktoken
    except ImportError:
        raise ValueError("the gpt2 tokeniser needs tiktoken; install it with: pip install 'tinymask[gpt2]'") from None
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # its network errors are of many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"tiktoken could not fetch GPT-2's vocabulary ({reason}); it needs the network once") from None


# -- batches --------------------------------------------------------------------------------------


def batch(ids, block, size, generator):
    """Random windows of a text: inputs and targets, the inputs shifted by one, (B, N) each.

    Every start is as likely, the first and the last included. Raises ValueError for a text that is shorter
    than block + 1.
    """
    if len(ids) <= block:
        raise ValueError(f"{len(ids)} tokens, wanted at least {block + 1}, a block and one more")
    start = torch.randint(len(ids) - block, (size, 1), generator=generator)
    window = ids[start + torch.arange(block + 1)]  # (B, N + 1)
    return window[:, :-1], window[:, 1:]


def blocks(ids, block):
    """A text in order, cut into blocks: yields (inputs, targets), (1, N) each, the last ones shorter.

    Every token but the first is a target once: the perplexity of a whole text does not depend on batches.
    """
    for start in range(0, len(ids) - 1, block):
        window = ids[start: start + block + 1]
        yield window[None, :-1], window[None, 1:]
