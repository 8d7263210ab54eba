"""Images: CIFAR from the official binary files, ImageNet-100 from folders, two sets made by this file.

A set is training images (P, 3, S, S) uint8 and labels (P,) int64, then the same for testing. Images are a tensor, or
an ImageFolder that decodes them when asked; `training_batches`, `in_order`, `sample` and `fingerprint` take both.
Files are only read: an extracted folder wins over an archive, and any number of records will do. A file that is
missing is a FileNotFoundError, one that cannot be used a ValueError; both are one line. Augmentation works on
whole batches, with one generator. Shapes: B batch, P images, C classes, S side.
"""
import copy
import gzip
import hashlib
import itertools
import os
import signal
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

BASE = "https://www.cs.toronto.edu/~kriz/"
CIFAR: dict[str, dict[str, Any]] = {  # layout: BASE + "cifar.html"; sizes and hashes: tensorflow datasets
    "cifar10": {"archive": "cifar-10-binary.tar.gz", "size": 170_052_171, "folder": "cifar-10-batches-bin",
                "label_bytes": 1, "classes": 10,
                "sha256": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    "cifar100": {"archive": "cifar-100-binary.tar.gz", "size": 168_513_733, "folder": "cifar-100-binary",
                 "label_bytes": 2, "classes": 100,
                 "sha256": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
}

# -- built-in sets: 8 x 8 tiles of 4 x 4 pixels, no download ---------------------------------------

CLASSES, GRID, TILE = 10, 8, 4
HOLDS = 0.8  # how often the rule of a set holds; else a tile is any


def builtin(relation: str, train: int = 8000, test: int = 1000, seed: int = 0) -> tuple[Tensor, ...]:
    """A set made from a seed: images of 8 x 8 tiles of ten textures; the class is how textures relate to each other.

    In an image of class c, with probability HOLDS for each tile,

        "local"    a tile has the texture c further on, modulo 10, than the tile before it in its row
        "global"   the tiles of the left half have one texture, those of the right half the one c further on

    or, for half of the images, the same from top to bottom. A tile alone says nothing of the class in either.
    In the first set neighbours decide; in the second, parts of the image that a 3 x 3 window never holds together.
    """
    if relation not in ("local", "global"):
        raise ValueError(f"relation is 'local' or 'global', got {relation!r}")
    generator = Generator().manual_seed(seed)
    textures = torch.randint(0, 200, (CLASSES, 3, TILE, TILE), generator=generator)
    parts = []
    for count in (train, test):
        labels = torch.randint(CLASSES, (count,), generator=generator)
        tiles = torch.randint(CLASSES, (count, GRID, GRID), generator=generator)
        holds = torch.rand(count, GRID, GRID, generator=generator) < HOLDS
        first = tiles[:, :1, 0].clone()  # global: the texture of the left half is that of the first tile
        for column in range(GRID):
            if relation == "local":
                wanted = tiles[:, :, max(column - 1, 0)] + labels[:, None] * (column > 0)  # (P, 8)
            else:
                wanted = first + labels[:, None] * (column >= GRID // 2)  # (P, 1)
            tiles[:, :, column] = torch.where(holds[:, :, column], wanted % CLASSES, tiles[:, :, column])
        downwards = torch.rand(count, 1, 1, generator=generator) < 0.5
        tiles = torch.where(downwards, tiles.transpose(1, 2), tiles)
        images = textures[tiles].permute(0, 3, 1, 4, 2, 5).reshape(count, 3, GRID * TILE, GRID * TILE)
        noise = torch.randint(-20, 21, images.shape, generator=generator)
        parts += [(images + noise).clamp(0, 255).to(torch.uint8), labels]
    return tuple(parts)


# -- CIFAR ----------------------------------------------------------------------------------------


def load_cifar(name: str, data_dir: str | Path = "data") -> tuple[Tensor, ...]:
    """CIFAR-10, or CIFAR-100 with its fine labels, from data_dir; images (P, 3, 32, 32).

    From the folder `cifar-10-batches-bin` (`cifar-100-binary`) if it is there, else from the archive. Training files
    are all `data_batch*.bin` (`train.bin`) in the order of their names, the test file `test_batch.bin` (`test.bin`).
    """
    about = CIFAR[name]
    source, archive = Path(data_dir, about["folder"]), Path(data_dir, about["archive"])
    if source.is_dir():
        files = {path.name: path.read_bytes() for path in source.iterdir() if path.suffix == ".bin"}
    elif archive.is_file():
        source, files = archive, _read_archive(archive, about)
    else:
        raise FileNotFoundError(f"{printable(archive)} is missing: put {BASE}{about['archive']} ({about['size']:,} "
                                f"bytes) there, or its extracted folder {about['folder']}, or give --download")
    parts: list[Tensor] = []
    for kind, starts in (("training", ("data_batch", "train.bin")), ("test", ("test_batch.bin", "test.bin"))):
        names = sorted(name for name in files if name.startswith(starts))
        if not names:
            found = printable(", ".join(files)) or "no .bin file"
            raise ValueError(f"{printable(source)}: no {kind} file there (found: {found})")
        images, labels = zip(*(_records(about, files[name], printable(source / name)) for name in names))
        parts += [torch.cat(images), torch.cat(labels)]
    return tuple(parts)


def _read_archive(path: Path, about: dict[str, Any]) -> dict[str, bytes]:
    """The .bin files of an archive, by name. One of the official size has to have the official checksum."""
    official = path.stat().st_size == about["size"]  # any other is people's own
    if official and (found := hashlib.sha256(path.read_bytes()).hexdigest()) != about["sha256"]:
        raise ValueError(f"{printable(path)}: sha256 is {found}, wanted {about['sha256']}; delete it, fetch it again")
    try:
        with gzip.open(path) as content, tarfile.open(fileobj=content, mode="r:") as tar:
            members = (member for member in tar if member.isfile() and member.name.endswith(".bin"))
            files = {Path(member.name).name: tar.extractfile(member).read() for member in members}  # type: ignore
            content.read()  # to its end, where gzip's own checksum is
        return files
    except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
        reason = f"cannot be read to its end ({error!r})"
        raise ValueError(f"{printable(path)}: {reason}; delete it, fetch it again") from None


def _records(about: dict[str, Any], data: bytes, path: str) -> tuple[Tensor, Tensor]:
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


def printable(path: str | Path) -> str:
    """A path for a message: characters that cannot be printed, as of a name that is not UTF-8, are escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(path))


# -- folders of JPEGs, and what training asks of them and of tensors alike --------------------------


class ImageFolder(Dataset):
    """The images of folder/<class>/, by class and name: [i] decodes one to (3, size, size) uint8. Labels (P,).

    Raises, naming it, ValueError for a dangling link or a class without an image, OSError for a file that is no image.
    """

    def __init__(self, folder: Path, names: list[str], size: int) -> None:
        self.folder, self.names, self.size = folder, names, size
        self.files = [f"{name}/{path.name}" for name in names for path in _visible(folder / name) if path.is_file()]
        classes = [file.split("/")[0] for file in self.files]
        if empty := set(names) - set(classes):
            raise ValueError(f"{printable(folder / min(empty))}: no image in this class folder")
        self.labels = torch.tensor([names.index(name) for name in classes])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        from PIL import Image, ImageOps

        path, size = self.folder / self.files[index], self.size
        try:
            with Image.open(path) as file:
                file.getexif()  # read now, to be dropped: exif_transpose writes it anew, and fails where it is damaged
                file.info.pop("exif", None)
                image = ImageOps.exif_transpose(file)  # upright
            if image.mode.startswith("I"):  # 16 bits, which `convert` would clip
                image = Image.fromarray((numpy.asarray(image) / 257).round().clip(0, 255).astype(numpy.uint8))
            image, scale = image.convert("RGB"), size / min(image.size)
            width, height = (max(size, round(scale * side)) for side in image.size)
            left, top = (width - size) // 2, (height - size) // 2
            image = image.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))
            return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
        except Exception as error:  # pillow raises many kinds
            raise OSError(f"{printable(path)}: not a readable image ({error!r})") from None


Images = Tensor | ImageFolder


def load_folder(folder: Path, size: int = 224, classes: int = 100) -> tuple[ImageFolder, Tensor, ImageFolder, Tensor]:
    """ImageFolders of folder/train/<class>/ and folder/val/<class>/, and their labels. Needs pillow.

    Raises FileNotFoundError without them, ValueError if the classes of the two differ or are not as many as `classes`.
    """
    names = {}
    for part in ("train", "val"):
        where = Path(folder, part)
        if not where.is_dir():
            raise FileNotFoundError(f"{printable(where)} is missing: wanted {classes} class folders of JPEGs there")
        names[part] = [path.name for path in _visible(where) if path.is_dir()]
        if len(names[part]) != classes:
            raise ValueError(f"{printable(where)}: {len(names[part])} class folders, wanted {classes}")
    for name in sorted(set(names["train"]) ^ set(names["val"])):
        raise ValueError(f"{printable(folder)}: class folder {printable(name)} is in one of train and val only")
    try:
        import PIL.ImageOps  # noqa: F401
    except ImportError:
        raise ValueError("JPEGs need pillow; install it with: pip install 'tinymask[images]'") from None
    train, val = (ImageFolder(Path(folder, part), names[part], size) for part in names)
    return train, train.labels, val, val.labels


def _visible(folder: Path) -> list[Path]:
    """What lies in a folder, sorted, without what file managers and editors leave there."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "Thumbs.db")
    for path in paths:
        if not path.exists():
            raise ValueError(f"{printable(path)}: a link to nothing")
    return paths


def names_hash(names: list[str]) -> str:
    """12 hexadecimal digits that name a list of classes: there are several "ImageNet-100"."""
    return hashlib.sha256(os.fsencode("\n".join(names))).hexdigest()[:12]


def fingerprint(data: Iterable[Images]) -> str:
    """12 hexadecimal digits that name a set: from all labels and about 64 images of a tensor, all files of a folder."""
    digest = hashlib.sha256()
    for part in data:
        if isinstance(part, ImageFolder):
            digest.update(b"".join(os.fsencode(f"{f}\0{os.path.getsize(part.folder / f)}\0") for f in part.files))
        else:
            digest.update(str(tuple(part.shape)).encode())
            digest.update((part if part.ndim == 1 else part[:: max(1, len(part) // 64)]).numpy().tobytes())
    return digest.hexdigest()[:12]


def training_batches(images: Images, labels: Tensor, size: int, generator: Generator,
                     first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Random images (B, 3, S, S) uint8 and labels (B,), B = size, without end; drawn with replacement.

    Of a tensor, `generator` draws a batch when it is asked for. A folder is decoded ahead by worker processes:
    there batch k depends on the seed of `generator` and on k alone, and a resumed run goes on with first = k.
    """
    while isinstance(images, Tensor):
        chosen = torch.randint(len(images), (size,), generator=generator)
        yield images[chosen], labels[chosen]
    seed, count = generator.initial_seed(), len(images)
    draws = (numpy.random.default_rng([seed, k]).integers(count, size=size) for k in itertools.count(first))
    indices, ahead = itertools.tee(draws)
    for index, batch in zip(indices, _decoded(images, batch_sampler=ahead)):
        yield batch, labels[index]


def in_order(images: Images, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All images and their labels once, in order, `size` at a time; the last batch may be smaller."""
    batches = images.split(size) if isinstance(images, Tensor) else _decoded(images, batch_size=size)
    return zip(batches, labels.split(size))


def sample(images: Images, count: int, generator: Generator) -> Tensor:
    """`count` different images, drawn at random: (count, 3, S, S) uint8. All of them if there are fewer."""
    return torch.stack([images[i] for i in torch.randperm(len(images), generator=generator)[:count].tolist()])


def part(images: Images, chosen: Tensor) -> Images:
    """The images with these indices, (K,), in this order."""
    if isinstance(images, Tensor):
        return images[chosen]
    folder = copy.copy(images)
    folder.files, folder.labels = [images.files[i] for i in chosen.tolist()], images.labels[chosen]
    return folder


def hold_out(images: Images, labels: Tensor, count: int, generator: Generator) -> tuple[Images, Tensor, Images, Tensor]:
    """The training images without `count` of them, and these: a set of their own, to choose settings on.

    Those of a tensor are its last; of a folder, where images lie class by class, they are drawn. Both parts keep the
    order of the whole. Raises ValueError unless there are more than `count`.
    """
    if len(labels) <= count:
        raise ValueError(f"{len(labels):,} training images, wanted more than {count:,}")
    order = torch.randperm(len(labels), generator=generator)
    if isinstance(images, Tensor):
        order = order.sort().values
    kept, out = order[:-count].sort().values, order[-count:].sort().values
    return part(images, kept), labels[kept], part(images, out), labels[out]


def balanced(labels: Tensor, count: int, generator: Generator) -> Tensor:
    """Which `count` images make a part with its classes as even as they can be: (count,) indices, rising.

    In each round one image of every class is taken, in the order of the classes, drawn from those that are left; a
    class that has none left is passed over. So a smaller part lies inside a larger one, and sizes of a class differ by
    one at most while no class is used up. Raises ValueError for more images than there are, fewer than classes.
    """
    classes = labels.unique()
    if not len(classes) <= count <= len(labels):
        raise ValueError(f"wanted from {len(classes):,}, one a class, to {len(labels):,} images, all there are")
    order = torch.randperm(len(labels), generator=generator)
    rounds = torch.empty_like(labels)  # (P,): in which round an image is taken
    for label in classes:
        of_class = order[labels[order] == label]
        rounds[of_class] = torch.arange(len(of_class))
    taken = (rounds * (classes.max() + 1) + labels).argsort()
    return taken[:count].sort().values


def _decoded(images: ImageFolder, **batching: Any) -> Iterator[Tensor]:
    """Batches (B, 3, S, S) of a folder, decoded by worker processes; a file that is no image is an OSError."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:  # arrays: tensors take more shared memory than containers have; own generator: torch's would be moved
        for batch in DataLoader(images, num_workers=min(8, cores), worker_init_fn=_own_session, collate_fn=numpy.stack,
                                generator=Generator(), **batching):
            yield torch.from_numpy(batch)
    except OSError as error:  # torch puts the worker's traceback before the message
        error.__traceback__ = None  # which would keep the workers alive
        raise OSError(str(error).strip().split("\n")[-1].removeprefix("OSError: ")) from None


def _own_session(worker: int) -> None:
    """Ctrl-C, and a signal to a whole process group, leave the workers to a run that finishes its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()


# -- augmentation ---------------------------------------------------------------------------------


def to_float(images: Tensor) -> Tensor:
    """uint8 (..., S, S) -> float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def flip_and_crop(images: Tensor, generator: Generator, pad: int = 4) -> Tensor:
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


def random_erasing(images: Tensor, generator: Generator, probability: float = 0.25) -> Tensor:
    """With this probability a rectangle of 2 to 33 % of an image is set to 0 (arXiv 1708.04896). Same shape."""
    batch, _, side, _ = images.shape
    area, aspect, hit, top, left = torch.rand(5, batch, generator=generator).to(images.device)
    size, ratio = (0.02 + 0.31 * area) * side**2, 0.3 * (1 / 0.3**2) ** aspect  # sides' ratio from 0.3 to 1 / 0.3
    height, width = (size * ratio).sqrt().clamp(1, side), (size / ratio).sqrt().clamp(1, side)
    inside = _span(top, height, side)[:, :, None] & _span(left, width, side)[:, None, :]  # (B, S, S)
    return images.masked_fill((inside & (hit < probability)[:, None, None])[:, None], 0)


def _span(start: Tensor, length: Tensor, side: int) -> Tensor:
    """(B, S) bool: `length` pixels of a side, beginning at the fraction `start` of where they can begin."""
    first = (start * (side - length.round() + 1)).floor()[:, None]
    position = torch.arange(side, device=start.device)
    return (position >= first) & (position < first + length.round()[:, None])


def soft_labels(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """(B,) -> (B, C): 1 - smoothing on the class, the rest spread over all of them."""
    return F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


def mixup_or_cutmix(images: Tensor, targets: Tensor, generator: Generator, mixup: float = 0.8,
                    cutmix: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mix each image with another one of the batch, and their soft labels (B, C) by the same share. Returns both.

    Half of the batches are blended (mixup, arXiv 1710.09412), with a share from Beta(mixup, mixup), and half get a
    rectangle of the other image (cutmix, arXiv 1905.04899), with one from Beta(cutmix, cutmix). Strength 0: never.
    """
    kinds = [(kind, strength) for kind, strength in (("mixup", mixup), ("cutmix", cutmix)) if strength > 0]
    if not kinds:
        return images, targets
    kind, strength = kinds[int(torch.randint(len(kinds), (1,), generator=generator))]
    seed = int(torch.randint(2**31, (1,), generator=generator))
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
