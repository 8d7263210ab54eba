"""Images as tensors: CIFAR from the official binary files, ImageNet-100 from folders, two sets made by this file.

A set is four tensors: training images (P, 3, S, S) uint8 and labels (P,) int64, then the same for testing.
Files are taken as they come, from one folder (`data_dir`): an extracted folder wins over an archive and is
read as it stands, whatever the number of its records. A file that is missing is a FileNotFoundError, one
that cannot be used a ValueError; both are one line.

Augmentation works on whole batches, with one generator. Shapes: B batch, P images, C classes, S side.
"""
import gzip
import hashlib
import json
import tarfile
import zlib
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from tqdm import tqdm

BASE = "https://www.cs.toronto.edu/~kriz/"
CIFAR = {  # layout: https://www.cs.toronto.edu/~kriz/cifar.html; sizes and hashes: tensorflow datasets
    "cifar10": dict(
        archive="cifar-10-binary.tar.gz", size=170_052_171, folder="cifar-10-batches-bin", label_bytes=1, classes=10,
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "cifar100": dict(
        archive="cifar-100-binary.tar.gz", size=168_513_733, folder="cifar-100-binary", label_bytes=2, classes=100,
        sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
}

# -- built-in sets: 8 x 8 tiles of 4 x 4 pixels, no download ---------------------------------------

CLASSES, GRID, TILE = 10, 8, 4
HOLDS = 0.8  # how often the rule of a set holds; else a tile is any


def builtin(relation, train=8000, test=1000, seed=0):
    """A set made from a seed: images of 8 x 8 tiles of ten textures; the class is how textures relate to each other.

    In an image of class c, with probability HOLDS for each tile,

        "local"    a tile has the texture c further on, modulo 10, than the tile before it in its row
        "global"   the tiles of the left half have one texture, those of the right half the one c further on

    or, for half of the images, the same from top to bottom. A tile alone says nothing of the class in either.
    In the first set neighbours decide; in the second, parts of the image that a 3 x 3 window never holds
    together. Raises ValueError for another relation.
    """
    if relation not in ("local", "global"):
        raise ValueError(f"relation is 'local' or 'global', got {relation!r}")
    generator = torch.Generator().manual_seed(seed)
    textures = torch.randint(0, 200, (CLASSES, 3, TILE, TILE), generator=generator)
    return tuple(part for count in (train, test) for part in _tiled(relation, count, textures, generator))


def _tiled(relation, count, textures, generator):
    """`count` images (P, 3, 32, 32) and labels (P,) of a built-in set."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    tiles = torch.randint(CLASSES, (count, GRID, GRID), generator=generator)
    holds = torch.rand(count, GRID, GRID, generator=generator) < HOLDS
    first = tiles[:, :, 0].clone()  # global: the texture of the left half is that of the first tile
    for column in range(GRID):
        if relation == "local":
            wanted = tiles[:, :, max(column - 1, 0)] + labels[:, None] * (column > 0)  # (P, 8)
        else:
            wanted = first[:, :1] + labels[:, None] * (column >= GRID // 2)  # (P, 1)
        tiles[:, :, column] = torch.where(holds[:, :, column], wanted % CLASSES, tiles[:, :, column])
    downwards = torch.rand(count, generator=generator) < 0.5
    tiles = torch.where(downwards[:, None, None], tiles.transpose(1, 2), tiles)
    images = textures[tiles].permute(0, 3, 1, 4, 2, 5).reshape(count, 3, GRID * TILE, GRID * TILE)
    noise = torch.randint(-20, 21, images.shape, generator=generator)
    return (images + noise).clamp(0, 255).to(torch.uint8), labels


# -- CIFAR ----------------------------------------------------------------------------------------


def load_cifar(name, data_dir="data"):
    """CIFAR-10, or CIFAR-100 with its fine labels, from data_dir; images (P, 3, 32, 32).

    Read from the folder `cifar-10-batches-bin` (`cifar-100-binary`) if it is there, else from the archive,
    in place. Training files are all `data_batch*.bin` (`train.bin`) in the order of their names; the test
    file is `test_batch.bin` (`test.bin`).
    """
    about, data_dir = CIFAR[name], Path(data_dir)
    folder, archive = data_dir / about["folder"], data_dir / about["archive"]
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.suffix == ".bin")
        return _sets(about, {path.name: path.read_bytes for path in files}, folder)
    if not archive.is_file():
        raise FileNotFoundError(
            f"{archive} is missing: put {BASE}{about['archive']} ({about['size']:,} bytes) there, or its extracted "
            f"folder {about['folder']}, or give --download"
        )
    try:
        check_archive(archive, about)
        with tarfile.open(archive) as tar:  # members are read in place, nothing is extracted
            members = sorted((m for m in tar if m.isfile() and m.name.endswith(".bin")), key=lambda m: m.name)
            return _sets(about, {Path(m.name).name: lambda m=m: tar.extractfile(m).read() for m in members}, archive)
    except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
        reason = _first_line(error)
        raise ValueError(f"{archive}: cannot be read to its end ({reason}); delete it, fetch it again") from None


def _sets(about, files, source):
    """The four tensors of a set, from the names of its files and functions that read them."""
    names = {"training": [n for n in files if n.startswith("data_batch") or n == "train.bin"],
             "test": [n for n in files if n in ("test_batch.bin", "test.bin")]}
    parts = []
    for kind in names:
        if not names[kind]:
            raise ValueError(f"{source}: no {kind} file there (found: {', '.join(files) or 'no .bin file'})")
        images, labels = zip(*(_records(about, files[n](), f"{source}/{n}") for n in names[kind]))
        parts += [torch.cat(images), torch.cat(labels)]
    return tuple(parts)


def _records(about, data, path):
    """Images and labels of one file: records of 1 or 2 label bytes (the last one counts) and 3,072 of image."""
    length = about["label_bytes"] + 3 * 32 * 32
    if not data or len(data) % length:
        raise ValueError(f"{path}: {len(data):,} bytes, wanted whole records of {length:,}; delete it, fetch it again")
    records = torch.from_numpy(numpy.frombuffer(data, dtype=numpy.uint8).reshape(-1, length).copy())
    labels = records[:, about["label_bytes"] - 1].long()
    wrong = (labels >= about["classes"]).nonzero()[:, 0]
    if len(wrong):
        raise ValueError(f"{path}: record {wrong[0]} has label {labels[wrong[0]]}, wanted below {about['classes']}")
    return records[:, about["label_bytes"]:].reshape(-1, 3, 32, 32), labels


def check_archive(path, about):
    """Raise ValueError for an archive of the official size but another checksum.

    Another size is people's own data: it has to be a whole gzip file, else OSError, EOFError or zlib.error.
    """
    if path.stat().st_size != about["size"]:
        with gzip.open(path) as whole:  # its own checksum, which tarfile does not come to
            while whole.read(2**20):
                pass
        return
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != about["sha256"]:
        raise ValueError(f"{path}: sha256 is {found}, wanted {about['sha256']}; delete it, fetch it again")


# -- folders of JPEGs -----------------------------------------------------------------------------


def class_names(folder, classes=100):
    """The names of the class folders in folder/train, sorted; folder/val must have the same ones.

    Raises FileNotFoundError without them, and ValueError, naming a folder, if the two differ or are not
    as many as `classes`. There are several "ImageNet-100"; `names_hash` tells which one this is.
    """
    names = {}
    for part in ("train", "val"):
        where = Path(folder) / part
        if not where.is_dir():
            raise FileNotFoundError(f"{where} is missing: wanted {classes} class folders of JPEGs there")
        names[part] = sorted(path.name for path in where.iterdir() if path.is_dir())
        if len(names[part]) != classes:
            raise ValueError(f"{where}: {len(names[part])} class folders, wanted {classes}")
    for name in sorted(set(names["train"]) ^ set(names["val"])):
        raise ValueError(f"{folder}: class folder {name} is in one of train and val only")
    return names["train"]


def names_hash(names):
    """A short name for a list of classes, 12 hexadecimal digits."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def load_folder(folder, size=224, classes=100):
    """Images from folder/train/<class>/ and folder/val/<class>/; (P, 3, size, size) each, memory-mapped.

    Decoded once, the shorter side resized to size and the middle cut out, into folder/cache-<size>; if that
    is interrupted, the next call goes on. A changed list of files is decoded anew. Needs pillow.
    """
    folder, parts = Path(folder), []
    names = class_names(folder, classes)
    for part in ("train", "val"):
        files = [path for name in names for path in sorted((folder / part / name).iterdir()) if path.is_file()]
        for name in sorted(set(names) - {path.parent.name for path in files}):
            raise ValueError(f"{folder / part / name}: no image in this class folder")
        labels = torch.tensor([names.index(path.parent.name) for path in files])
        parts += [torch.from_numpy(_decoded(files, folder / f"cache-{size}" / part, size)), labels]
    return tuple(parts)


def _decoded(files, cache, size):
    """All images of a list, (P, 3, size, size) uint8: the memory map cache.u8, completed if it is not yet."""
    lines = [f"{path.parent.name}/{path.name} {path.stat().st_size}" for path in files]
    listing = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    shape, data, state = (len(files), 3, size, size), cache.with_suffix(".u8"), cache.with_suffix(".json")
    try:
        known = json.loads(state.read_text(encoding="utf-8"))
        whole = known["files"] == listing and data.stat().st_size == numpy.prod(shape)
        done = known["done"] if whole and type(known["done"]) is int and 0 <= known["done"] <= len(files) else 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        done = 0
    if done < len(files):
        cache.parent.mkdir(parents=True, exist_ok=True)
        if not done:
            state.unlink(missing_ok=True)  # it told of the data that go now
        array = numpy.memmap(data, dtype=numpy.uint8, mode="r+" if done else "w+", shape=shape)
        try:
            for done in tqdm(range(done, len(files)), initial=done, total=len(files), desc=str(cache), disable=None):
                array[done] = _decode(files[done], size)
            done = len(files)
        finally:  # also after Ctrl-C or a broken file: what was decoded stays
            array.flush()
            state.write_text(json.dumps({"files": listing, "done": done}), encoding="utf-8")
    return numpy.memmap(data, dtype=numpy.uint8, mode="c", shape=shape)


def _decode(path, size):
    """(3, size, size) uint8 of an image file of any size and colour."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("JPEGs need pillow; install it with: pip install 'tinymask[images]'") from None
    try:
        with Image.open(path) as image:
            image = image.convert("RGB")
            scale = size / min(image.size)
            width, height = (max(size, round(scale * side)) for side in image.size)
            left, top = (width - size) // 2, (height - size) // 2
            image = image.resize((width, height), Image.BICUBIC).crop((left, top, left + size, top + size))
            return numpy.asarray(image).transpose(2, 0, 1)
    except Exception as error:  # pillow raises many kinds
        raise ValueError(f"{path}: not a readable image ({_first_line(error)})") from None


def _first_line(error):
    """What an exception says, as one line that is never empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def fingerprint(data):
    """A short name for a set, from all labels and about 64 images of each part: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(str(tuple(part.shape)).encode())
        digest.update((part if part.ndim == 1 else part[:: max(1, len(part) // 64)]).numpy().tobytes())
    return digest.hexdigest()[:12]


# -- augmentation ---------------------------------------------------------------------------------


def to_float(images):
    """uint8 (..., S, S) -> float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def flip_and_crop(images, generator, pad=4):
    """Each image mirrored with probability 1/2, then shifted by up to `pad` pixels, 0 moving in. Same shape."""
    batch, _, side, _ = images.shape
    mirrored = torch.rand(batch, generator=generator).to(images.device) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    shift = torch.randint(0, 2 * pad + 1, (2, batch, 1), generator=generator).to(images.device)
    window = torch.arange(side, device=images.device)
    rows, columns = shift + window  # (B, S) each
    padded = F.pad(images, (pad,) * 4)
    return padded[torch.arange(batch, device=images.device)[:, None, None], :, rows[:, :, None],
                  columns[:, None, :]].permute(0, 3, 1, 2)


def random_erasing(images, generator, probability=0.25):
    """With this probability a rectangle of 2 to 33 % of an image is set to 0 (arXiv 1708.04896). Same shape."""
    batch, _, side, _ = images.shape
    area, aspect, hit, top, left = torch.rand(5, batch, generator=generator).to(images.device)
    size, ratio = (0.02 + 0.31 * area) * side**2, 0.3 * (1 / 0.3**2) ** aspect  # sides' ratio from 0.3 to 1 / 0.3
    height, width = (size * ratio).sqrt().clamp(1, side), (size / ratio).sqrt().clamp(1, side)
    inside = _span(top, height, side)[:, :, None] & _span(left, width, side)[:, None, :]  # (B, S, S)
    return images.masked_fill((inside & (hit < probability)[:, None, None])[:, None], 0)


def _span(start, length, side):
    """(B, S) bool: `length` pixels of a side, beginning at the fraction `start` of where they can begin."""
    first = (start * (side - length.round() + 1)).floor()[:, None]
    position = torch.arange(side, device=start.device)
    return (position >= first) & (position < first + length.round()[:, None])


def soft_labels(labels, classes, smoothing=0.0):
    """(B,) -> (B, C): 1 - smoothing on the class, the rest spread over all of them."""
    return F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


def mixup_or_cutmix(images, targets, generator, mixup=0.8, cutmix=1.0):
    """Mix each image with another one of the batch, and their soft labels (B, C) by the same share.

    Half of the batches are blended (mixup, arXiv 1710.09412), with a share from Beta(mixup, mixup), and
    half get a rectangle of the other image (cutmix, arXiv 1905.04899), with one from Beta(cutmix, cutmix).
    A strength of 0 leaves that kind out; both 0: nothing is done. Returns images and targets.
    """
    kinds = [(kind, strength) for kind, strength in (("mixup", mixup), ("cutmix", cutmix)) if strength > 0]
    if not kinds:
        return images, targets
    kind, strength = kinds[torch.randint(len(kinds), (1,), generator=generator).item()]
    seed = torch.randint(2**31, (1,), generator=generator).item()
    share = numpy.random.default_rng(seed).beta(strength, strength)
    order = torch.randperm(len(images), generator=generator).to(images.device)
    if kind == "mixup":
        images = share * images + (1 - share) * images[order]
    else:
        side = images.shape[-1]
        centre = torch.randint(side, (2,), generator=generator)
        half = side * (1 - share) ** 0.5 / 2
        (top, left), (bottom, right) = ((centre + sign * half).round().long().clamp(0, side) for sign in (-1, 1))
        images = images.clone()
        images[:, :, top:bottom, left:right] = images[order, :, top:bottom, left:right]
        share = 1 - ((bottom - top) * (right - left)).item() / side**2
    return images, share * targets + (1 - share) * targets[order]
