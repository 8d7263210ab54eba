"""Image sets from files of the exact official layout and from folders, the built-in sets, batches, augmentation."""
import functools
import gzip
import hashlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import sys
import tarfile
import types

import numpy
import pytest
import torch

from tinymask import images

pytestmark = pytest.mark.vit
B = os.fsdecode(b"b\xe9\n") if sys.platform == "linux" else "b"  # a name that is not UTF-8, where there are such


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def refused(said, call, *arguments, error=ValueError):
    with pytest.raises(error) as caught:
        call(*arguments)
    assert said in str(caught.value) and str(caught.value).isprintable(), str(caught.value)  # one line, too


def records(name, count, seed=0):
    """Random labels and pixels, and the bytes of a file that holds them."""
    draw, about = numpy.random.default_rng(seed), images.CIFAR[name]
    data = draw.integers(0, 256, (count, about["label_bytes"] + 3072), dtype=numpy.uint8)
    data[:, about["label_bytes"] - 1] %= about["classes"]
    return data[:, -3073].tolist(), data[:, -3072:].reshape(count, 3, 32, 32), data.tobytes()


def write(name, folder, files, archive):
    """Files (name -> bytes) as the extracted folder in `folder`, or as the archive. Returns its path."""
    source, packed = folder / images.CIFAR[name]["folder"], folder / images.CIFAR[name]["archive"]
    source.mkdir()
    for file, data in files.items():
        (source / file).write_bytes(data)
    if not archive:
        return source
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(source, source.name)
    shutil.rmtree(source)
    return packed


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name, trained", [("cifar10", [f"data_batch_{k}.bin" for k in range(1, 6)]),
                                           ("cifar100", ["train.bin"])])
def test_cifar_from_files_of_the_official_layout(name, trained, archive, tmp_path):
    parts, test = [records(name, 9, seed) for seed in range(len(trained))], records(name, 5, 9)
    files = {file: part[2] for file, part in zip(trained, parts)} | {"._" + trained[0]: b"", "batches.meta.txt": b"cat"}
    files |= {"test_batch.bin" if name == "cifar10" else "test.bin": test[2]}
    write(name, tmp_path, dict(reversed(files.items())), archive)
    before = sorted(tmp_path.rglob("*"))
    x, y, test_x, test_y = images.load_cifar(name, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert x.dtype == torch.uint8 and y.dtype == torch.int64 and y.tolist() == [k for part in parts for k in part[0]]
    assert numpy.array_equal(x, numpy.concatenate([part[1] for part in parts]))
    assert numpy.array_equal(test_x, test[1]) and test_y.tolist() == test[0]


def test_planes_and_rows_by_hand_and_a_folder_wins_over_an_archive(tmp_path):
    pixels, both = numpy.zeros(3072, dtype=numpy.uint8), ["data_batch_1.bin", "test_batch.bin"]
    pixels[[1, 1024 + 32, 2048 + 1023]] = 10, 20, 30  # red (0, 1), green (1, 0), blue (31, 31)
    write("cifar10", tmp_path, dict.fromkeys(both, records("cifar10", 9)[2]), True)
    write("cifar10", tmp_path, dict.fromkeys(both, b"\7" + pixels.tobytes()), False)
    x, y, *_ = images.load_cifar("cifar10", tmp_path)
    assert y.tolist() == [7] and (x[0, 0, 0, 1], x[0, 1, 1, 0], x[0, 2, 31, 31]) == (10, 20, 30) and x.sum() == 60


def test_missing_damaged_and_foreign_files(tmp_path, monkeypatch):
    load, data = (lambda: images.load_cifar("cifar10", tmp_path)), records("cifar10", 4)[2]
    refused(f"{tmp_path}/cifar-10-binary.tar.gz is missing: put {images.BASE}cifar-10-binary.tar.gz (170,052,171 bytes",
            load, error=FileNotFoundError)
    eleventh = data + b"\12" + bytes(3072)
    for bad, said in ((b"", "0 bytes"), (data[:-1], "12,291 bytes"), (eleventh, "record 4 has label 10")):
        archive = write("cifar10", tmp_path, {"data_batch_1.bin": bad, "test_batch.bin": b""}, True)
        refused(f"{archive}/data_batch_1.bin: {said}", load)
    data = write("cifar10", tmp_path, {"data_batch_1.bin": data, "test_batch.bin": data}, True).read_bytes()
    flipped = data[:-6] + bytes([data[-6] ^ 1]) + data[-5:]  # in gzip's own checksum
    for bad in (data[: len(data) // 2], b"", b"<html>503</html>", flipped, gzip.compress(b"no tar")):
        archive.write_bytes(bad)
        refused(f"{archive}: cannot be read", load)
    archive.write_bytes(data)
    about = images.CIFAR["cifar10"] | {"size": len(data)}  # of the official size: the checksum is asked for
    monkeypatch.setitem(images.CIFAR, "cifar10", about | {"sha256": hashlib.sha256(data).hexdigest()})
    assert len(load()[0]) == 4
    monkeypatch.setitem(images.CIFAR, "cifar10", about)
    refused(f"wanted {about['sha256']}", load)
    source = write("cifar10", tmp_path, {"data_batch_1.bin": records("cifar10", 1)[2], "cat.txt": b""}, False)
    refused(f"{source}: no test file there (found: data_batch_1.bin)", load)


@pytest.mark.parametrize("relation, data_hash", [("local", "22dd4728dd70"), ("global", "789426ec06fe")])
def test_builtin_sets_follow_their_rule(relation, data_hash):
    assert images.fingerprint(images.builtin(relation)) == data_hash  # as in results/vit-controls.jsonl
    train_x, train_y, x, y = images.builtin(relation, train=300, test=300, seed=3)
    assert not torch.equal(train_x, x) and not torch.equal(train_y, y) and set(y.tolist()) == set(range(10))
    textures = torch.randint(0, 200, (10, 3, 4, 4), generator=generator(3))
    tiles = x.reshape(300, 3, 8, 4, 8, 4).permute(0, 2, 4, 1, 3, 5)[:, :, :, None]  # (P, 8, 8, 1, 3, 4, 4)
    tiles = (tiles.float() - textures).abs().mean(dim=(-3, -2, -1)).argmin(-1)  # (P, 8, 8): the nearest texture
    kept = []  # in each direction: the share of tiles of each image that are as the rule says
    for grid in (tiles, tiles.transpose(1, 2)):
        if relation == "local":
            kept.append(((grid[:, :, 1:] - grid[:, :, :-1]) % 10 == y[:, None, None]).float().mean(dim=(1, 2)))
        else:
            left, right = grid[:, :, :4].flatten(1), grid[:, :, 4:].flatten(1)
            texture = left.mode(dim=1).values[:, None]
            kept.append(((left == texture).float() + (right == (texture + y[:, None]) % 10)).mean(dim=1) / 2)
    assert 0.4 < (kept[0] > kept[1]).float().mean() < 0.6
    assert torch.maximum(*kept).mean() == pytest.approx(0.82, abs=0.02)  # 0.8 + 0.2 / 10
    refused("'near'", images.builtin, "near")


@pytest.fixture
def folder(tmp_path):
    """Two classes: five training images each and one to test, of 8 x 8 pixels of the brightness 10, 20, ..."""
    image, brightness = pytest.importorskip("PIL.Image"), itertools.count(10, 10)
    for part, name, count in (("train", "a", 5), ("train", B, 5), ("val", "a", 1), ("val", B, 1)):
        (tmp_path / "set" / part / name).mkdir(parents=True)
        for k in range(count):
            image.new("L", (8, 8), next(brightness)).save(tmp_path / "set" / part / name / f"{k}.png")
    return tmp_path / "set"


def test_a_folder_without_what_others_leave_there(folder):
    fingerprints = [images.fingerprint(images.load_folder(folder, 8, classes=2))]
    for junk in (".DS_Store", "Thumbs.db", "a/Thumbs.db", "a/._0.png"):
        (folder / "train" / junk).write_bytes(b"junk")
    for junk in (".ipynb_checkpoints", "a/more"):
        (folder / "train" / junk).mkdir()
    files = sorted(folder.rglob("*"))
    x, y, test_x, test_y = images.load_folder(folder, 8, classes=2)
    assert [image.unique().tolist() for image in x] == [[10 * k] for k in range(1, 11)] and len(x) == 10
    assert [image.unique().tolist() for image in test_x] == [[110], [120]] and test_y.tolist() == [0, 1]
    assert y.tolist() == [0] * 5 + [1] * 5 and x[9].shape == (3, 8, 8) and x[9].dtype == torch.uint8
    assert images.names_hash(x.names) == hashlib.sha256(os.fsencode(f"a\n{B}")).hexdigest()[:12]
    assert sorted(folder.rglob("*")) == files
    moved = folder.rename(folder.with_name("elsewhere"))
    image, other = moved / "val" / "a" / "0.png", moved / "val" / "a" / "1.png"
    for change in (lambda: None, lambda: image.rename(other), lambda: other.write_bytes(b"x")):
        change()
        fingerprints.append(images.fingerprint(images.load_folder(moved, 8, classes=2)))
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == 3


def test_decoding_by_hand(folder):
    from PIL import Image

    def decoded(array, size, exif=None, **format):
        Image.fromarray(array).save(folder / "train" / "a" / "0.png", exif=exif or b"", **format)
        return images.load_folder(folder, size, classes=2)[0][0]

    ramp = numpy.tile(numpy.arange(40, dtype=numpy.uint8)[:, None] * 6, (1, 20))  # (40, 20): brighter downwards
    wanted = 6 * (10 + 2 * torch.arange(10) + 0.5)[:, None]  # two rows make one; rows 10 to 29 are the middle
    for found in (decoded(ramp, 10)[0], decoded(ramp.T, 10)[0].T):
        assert found.shape == (10, 10) and (found - wanted).abs().max() <= 1
    colour = numpy.arange(48, dtype=numpy.uint8).reshape(4, 4, 3)
    values = numpy.arange(256).reshape(16, 16)
    wide = values * 257 - 100 * (values > 0)
    assert numpy.array_equal(decoded(wide.astype(numpy.uint16), 16)[1], values)  # pillow's mode I;16
    wide[0, 0], wide[15, 15] = -1000, 70_000
    assert numpy.array_equal(decoded(wide.astype(numpy.int32), 16, format="TIFF")[1], values)  # I
    for orientation, turns in ((1, 0), (3, 2), (6, -1), (8, 1)):  # quarters against the clock
        fields = struct.pack(">HHIHxx HHI4s", 0x0112, 3, 1, orientation, 0x011A, 2, 4, b"abc")  # no resolution: damaged
        exif = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 2) + fields + bytes(4)
        assert numpy.array_equal(decoded(colour, 4, exif), numpy.rot90(colour, turns).transpose(2, 0, 1))


def test_broken_folders_and_images_are_named(folder, monkeypatch):
    load = functools.partial(images.load_folder, folder, 8, 2)
    x, y, *_ = load()
    for broken in (b"not an image", (folder / "train" / "a" / "0.png").read_bytes()[:50]):
        (folder / "train" / B / "0.png").write_bytes(broken)
        refused("0.png: not a readable image", x.__getitem__, 5, error=OSError)
    batches = images.in_order(x, y, 5)
    assert next(batches)[1].tolist() == [0] * 5
    refused("0.png: not a readable image", next, batches, error=OSError)
    assert not multiprocessing.active_children()
    refused("a/train is missing: wanted 100", images.load_folder, folder / "train" / "a", error=FileNotFoundError)
    refused("train: 2 class folders, wanted 100", images.load_folder, folder)
    class_b, image = folder / "val" / B, folder / "val" / B / "0.png"
    class_b.rename(folder / "val" / "c")
    refused("class folder b", load)
    (folder / "val" / "c").rename(class_b)
    image.rename(folder / "0.png")
    refused(f"{images.printable(class_b)}: no image", load)
    for link, target in ((image, folder / "0.png"), (folder / "train" / "c", class_b)):
        link.symlink_to(folder / "gone")
        refused(f"{images.printable(link)}: a link to nothing", load)
        link.unlink()
        link.symlink_to(target)
    refused("train: 3 class folders", load)  # a link that leads somewhere is as good as what is there
    (folder / "train" / "c").unlink()
    assert load()[2][1].unique().tolist() == [120]
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused("pip install 'tinymask[images]'", load)


def test_batches_of_a_folder_go_on_where_they_were(folder):
    x, y, *_ = images.load_folder(folder, 8, classes=2)
    state, draws = torch.get_rng_state(), generator(1)
    batches = images.training_batches(x, y, 6, draws)
    first = [next(batches) for _ in range(2)]
    workers = multiprocessing.active_children()
    first += [next(batches) for _ in workers]  # each of them is at work now
    for worker in workers:
        assert os.getsid(worker.pid) == worker.pid
        os.kill(worker.pid, signal.SIGINT)  # Ctrl-C
    first += [next(batches) for _ in range(10)]
    batches.close()
    assert workers and not multiprocessing.active_children() and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(draws.get_state(), generator(1).get_state())
    torch.rand(5, generator=draws)
    for before, again in zip(first[3:], images.training_batches(x, y, 6, draws, first=3)):
        assert torch.equal(before[0], again[0]) and torch.equal(before[1], again[1]) and len(again[1]) == 6
    values = torch.stack([batch[:, 0, 0, 0] for batch, _ in first])  # (steps, 6): 10 to 100
    assert torch.equal(torch.stack([labels for _, labels in first]), (values > 50).long())
    assert set(values.flatten().tolist()) == set(range(10, 101, 10)) and len(values.unique(dim=0)) == len(values)
    assert any(len(row.unique()) < 6 for row in values)  # drawn with replacement
    other = next(images.training_batches(x, y, 6, generator(2)))[0]
    assert not any(torch.equal(other, batch) for batch, _ in first)


def test_batches_of_tensors_are_drawn_one_by_one():
    x, y, draws, reference = torch.arange(60).view(20, 3, 1, 1), torch.arange(20), generator(4), generator(4)
    for batch, labels in itertools.islice(images.training_batches(x, y, 7, draws, first=2), 3):
        wanted = torch.randint(20, (7,), generator=reference)
        assert torch.equal(batch, x[wanted]) and torch.equal(labels, wanted)
        assert torch.rand(1, generator=draws) == torch.rand(1, generator=reference)


@pytest.mark.parametrize("tensor", [True, False])
def test_in_order_and_sample_and_what_workers_get_can_be_pickled(tensor, folder, monkeypatch):
    def loader(dataset, **options):  # Windows and macOS spawn workers
        assert options["num_workers"] > 0
        dataset, options = pickle.loads(pickle.dumps((dataset, options)))
        return make(dataset, **options)

    make = images.DataLoader
    monkeypatch.setattr(images, "DataLoader", loader)
    x, y, *_ = images.load_folder(folder, 8, classes=2)
    x = torch.stack(list(x)) if tensor else x
    batches, labels = zip(*images.in_order(x, y, 4))
    assert [len(batch) for batch in batches] == [4, 4, 2] and torch.equal(torch.cat(labels), y)
    assert torch.cat(batches)[:, 2, 7, 7].tolist() == list(range(10, 101, 10))
    drawn = [images.sample(x, 6, generator(seed))[:, 0, 0, 0].tolist() for seed in range(40)]
    assert all(len(set(values)) == 6 for values in drawn) and len(set(map(tuple, drawn))) == 40
    assert all(sum(values.count(10 * k) for values in drawn) > 10 for k in range(1, 11))  # of 24 that are expected
    assert images.sample(x, 6, generator())[:, 0, 0, 0].tolist() == drawn[0]
    assert len(images.sample(x, 64, generator())[:, 0, 0, 0].unique()) == 10


def test_parts_are_balanced_and_nested():
    """Sizes of a class differ by one at most, the first classes have the one more; class 3 has 4 images, all taken."""
    labels = torch.arange(3).repeat(20).tolist() + [3] * 4
    labels = torch.tensor(labels)[torch.randperm(64, generator=generator())]
    parts = {count: images.balanced(labels, count, generator(5)) for count in range(4, 65)}
    sizes = {count: labels[part].bincount(minlength=4).tolist() for count, part in parts.items()}
    assert [sizes[n] for n in (4, 6, 16, 19, 20, 64)] == [[1, 1, 1, 1], [2, 2, 1, 1], [4] * 4, [5, 5, 5, 4],
                                                          [6, 5, 5, 4], [20, 20, 20, 4]]
    for count, part in parts.items():
        assert torch.equal(part, part.unique()) and len(part) == count  # each image once, in their order
        assert count == 64 or set(part.tolist()) < set(parts[count + 1].tolist())
    assert torch.equal(parts[64], torch.arange(64))
    assert not torch.equal(parts[16], images.balanced(labels, 16, generator(6)))
    for count in (3, 65):
        refused("wanted from 4, one a class, to 64 images", images.balanced, labels, count, generator())


@pytest.mark.parametrize("tensor", [True, False])
def test_a_part_of_a_set(tensor, folder):
    """A folder's part is decoded as the whole is, and the whole stays whole."""
    whole, labels, *_ = images.load_folder(folder, 8, classes=2)
    some = images.part(torch.stack(list(whole)) if tensor else whole, torch.tensor([7, 2]))
    ((batch, found),) = images.in_order(some, labels[[7, 2]], 4)
    assert batch[:, 0, 0, 0].tolist() == [80, 30] and found.tolist() == [1, 0] and len(whole) == 10 == len(whole.labels)
    assert tensor or some.labels.tolist() == [1, 0]


@pytest.mark.parametrize("tensor", [True, False])
def test_images_held_out(tensor, folder):
    """Of a tensor the last four; of a folder some of each class. None is in both parts, none is lost."""
    whole, labels, *_ = images.load_folder(folder, 8, classes=2)
    whole = torch.stack(list(whole)) if tensor else whole
    parts = images.hold_out(whole, labels, 4, generator(3))
    kept, out = ([int(image[0, 0, 0]) for image in part] for part in parts[::2])
    assert sorted(kept + out) == list(range(10, 101, 10)) and kept == sorted(kept) and out == sorted(out)
    for found, values in zip(parts[1::2], (kept, out)):
        assert found.tolist() == [int(value > 50) for value in values]
    assert out == [70, 80, 90, 100] if tensor else set(parts[3].tolist()) == {0, 1}
    refused("10 training images, wanted more than 10", images.hold_out, whole, labels, 10, generator())


def test_flip_and_crop_by_hand():
    image = torch.arange(1, 17, dtype=torch.uint8).reshape(1, 1, 4, 4).expand(900, 3, 4, 4)
    out = images.flip_and_crop(image, generator(), pad=1)
    sources = [torch.nn.functional.pad(source, (1,) * 4) for source in (image[0, 0], image[0, 0].flip(-1))]
    windows = [source[r:r + 4, c:c + 4].tolist() for source in sources for r in range(3) for c in range(3)]
    seen = [windows.index(crop.tolist()) for crop in out[:, 0]]
    assert min(seen.count(k) for k in range(18)) > 25  # of 50 that are expected
    assert torch.equal(out, out[:, :1].expand_as(out)) and out.dtype == torch.uint8
    empty = (images.flip_and_crop(torch.ones(900, 1, 12, 12), generator()) == 0).all(dim=3).sum(dim=(1, 2))
    assert sorted(set(empty.tolist())) == [0, 1, 2, 3, 4]


def test_random_erasing_of_a_rectangle():
    out = images.random_erasing(torch.full((4000, 3, 32, 32), 7.0), generator())
    assert set(out.unique().tolist()) == {0, 7} and torch.equal(out, out[:, :1].expand_as(out))
    hit = (out == 0).flatten(1).any(1)
    erased = out[hit, 0] == 0  # (B, S, S)
    rows, columns, area = erased.any(2), erased.any(1), erased.float().mean(dim=(1, 2))
    height, width = rows.sum(1), columns.sum(1)
    ratio = (height / width).log()  # uniform in [-1.2, 1.2], but sides are rounded
    assert 0.22 < hit.float().mean() < 0.28 and torch.equal(height * width, erased.sum(dim=(1, 2)))
    assert 0.015 < area.min() < 0.03 and 0.31 < area.max() < 0.35 and 0.165 < area.mean() < 0.185
    assert abs(ratio.mean()) < 0.1 and 1.1 < ratio.abs().max() < 1.6
    first = torch.stack([side.float().argmax(1) / (33 - length) for side, length in ((rows, height), (columns, width))])
    assert (first.mean(1) - 16 / 33).abs().max() < 0.04 and abs(torch.corrcoef(first)[0, 1]) < 0.1
    assert erased.any(0).all()


def test_to_float_and_soft_labels_by_hand():
    assert images.to_float(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([-1, -0.6, 1])
    assert images.soft_labels(torch.tensor([1]), 4, 0.2).tolist() == [pytest.approx([0.05, 0.85, 0.05, 0.05])]
    assert images.soft_labels(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("strengths", [(0.3, 0), (0, 0.4), ()])
def test_images_and_labels_are_mixed_by_the_same_share(strengths, monkeypatch):
    """Image i of a batch has the brightness i: its mean is that of its soft label. The share from Beta is 0.9 here."""
    asked, own, blended, cut = set(), [], 0, torch.zeros(32, 32, dtype=torch.bool)
    beta = types.SimpleNamespace(beta=lambda a, b: asked.add((a, b)) or 0.9)
    monkeypatch.setattr(numpy.random, "default_rng", lambda seed: beta)
    draws, x, targets = generator(), torch.arange(5.0)[:, None, None, None].expand(5, 3, 32, 32), torch.eye(5)
    for _ in range(200):
        mixed, soft = images.mixup_or_cutmix(x, targets, draws, *strengths)
        assert torch.allclose(mixed.mean(dim=(1, 2, 3)), soft @ torch.arange(5.0), atol=1e-4)
        assert torch.allclose(soft.sum(1), torch.ones(5))
        changed = (mixed != x).any(dim=0)[0]  # (S, S); in cutmix one rectangle for the whole batch
        assert changed.sum() == changed.any(0).sum() * changed.any(1).sum()
        blended, cut = blended + mixed.frac().any().item(), cut | (changed & ~changed.all())
        own += soft.diag()[soft.diag() < 1].tolist()  # the others stayed with themselves
    assert min(own) == pytest.approx(0.9, abs=0.02) and len(own) > 700
    if strengths == (0.3, 0):
        assert asked == {(0.3, 0.3)} and blended > 190 and max(own) == pytest.approx(0.9)
    elif strengths:  # less is cut at the border
        assert asked == {(0.4, 0.4)} and blended == 0 and cut.all() and max(own) == pytest.approx(0.975, abs=0.02)
    else:
        assert asked == {(0.8, 0.8), (1, 1)} and 70 < blended < 130
    assert images.mixup_or_cutmix(x, targets, draws, 0, 0)[0] is x


def test_augmentation_draws_from_its_generator_alone():
    x = torch.randint(256, (6, 3, 8, 8), generator=generator(), dtype=torch.uint8)
    state, found = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        draws = generator(seed)
        mixed, soft = images.mixup_or_cutmix(images.flip_and_crop(x, draws).float(), torch.eye(6), draws)
        found.append(torch.cat([images.random_erasing(mixed, draws, 0.5).flatten(), soft.flatten()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert len({images.mixup_or_cutmix(x, torch.eye(6), draws, 1, 0)[1][0].max().item() for _ in range(20)}) > 10
    assert torch.equal(torch.get_rng_state(), state)
