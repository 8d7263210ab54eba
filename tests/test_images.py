"""Image sets from files of the exact official layout, the built-in sets, and augmentation."""
import gzip
import hashlib
import io
import tarfile

import numpy
import pytest
import torch

from tinymask import images

pytestmark = pytest.mark.vit


def records(name, count, seed=0):
    """Random labels and pixels, and the bytes of a file that holds them."""
    draw = numpy.random.default_rng(seed)
    about = images.CIFAR[name]
    labels = draw.integers(0, about["classes"], (count, 1), dtype=numpy.uint8)
    coarse = draw.integers(0, 20, (count, about["label_bytes"] - 1), dtype=numpy.uint8)
    pixels = draw.integers(0, 256, (count, 3072), dtype=numpy.uint8)
    return labels[:, 0], pixels.reshape(count, 3, 32, 32), numpy.hstack([coarse, labels, pixels]).tobytes()


def write(name, folder, files, archive):
    """Files (name -> bytes) as the extracted folder in `folder`, or as the archive."""
    about = images.CIFAR[name]
    if not archive:
        (folder / about["folder"]).mkdir(parents=True)
        for file, data in files.items():
            (folder / about["folder"] / file).write_bytes(data)
        return folder / about["folder"]
    with tarfile.open(folder / about["archive"], "w:gz") as tar:
        for file, data in files.items():
            member = tarfile.TarInfo(f"{about['folder']}/{file}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return folder / about["archive"]


@pytest.mark.parametrize("archive", [False, True])
def test_cifar10_layout(archive, tmp_path):
    """Five batch files in order, a test file, and the text files that lie beside them."""
    parts = [records("cifar10", 7, seed) for seed in range(5)]
    test = records("cifar10", 5, 9)
    files = {f"data_batch_{k + 1}.bin": part[2] for k, part in enumerate(parts)}
    files = dict(reversed(files.items())) | {"test_batch.bin": test[2], "batches.meta.txt": b"cat\n"}
    write("cifar10", tmp_path, files, archive)
    x, y, test_x, test_y = images.load_cifar("cifar10", tmp_path)
    assert x.shape == (35, 3, 32, 32) and x.dtype == torch.uint8 and y.dtype == torch.int64
    assert numpy.array_equal(x, numpy.concatenate([part[1] for part in parts]))
    assert y.tolist() == [int(label) for part in parts for label in part[0]]
    assert numpy.array_equal(test_x, test[1]) and test_y.tolist() == test[0].tolist()


@pytest.mark.parametrize("archive", [False, True])
def test_cifar100_takes_the_fine_label(archive, tmp_path):
    train, test = records("cifar100", 11), records("cifar100", 3, 1)
    write("cifar100", tmp_path, {"train.bin": train[2], "test.bin": test[2], "fine_label_names.txt": b""}, archive)
    x, y, test_x, test_y = images.load_cifar("cifar100", tmp_path)
    assert numpy.array_equal(x, train[1]) and y.tolist() == train[0].tolist() and max(y) >= 20
    assert numpy.array_equal(test_x, test[1]) and test_y.tolist() == test[0].tolist()


def test_planes_and_rows_by_hand(tmp_path):
    """A record is the label, then the red, green and blue plane, each row by row."""
    pixels = numpy.zeros(3072, dtype=numpy.uint8)
    pixels[[1, 1024 + 32, 2048 + 1023]] = 10, 20, 30  # red (0, 1), green (1, 0), blue (31, 31)
    data = bytes([7]) + pixels.tobytes()
    write("cifar10", tmp_path, {"data_batch_1.bin": data, "test_batch.bin": data}, False)
    x, y, *_ = images.load_cifar("cifar10", tmp_path)
    assert y.tolist() == [7] and (x[0, 0, 0, 1], x[0, 1, 1, 0], x[0, 2, 31, 31]) == (10, 20, 30) and x.sum() == 60


def test_a_folder_wins_over_an_archive(tmp_path):
    mine, other = records("cifar100", 2), records("cifar100", 9)
    write("cifar100", tmp_path, {"train.bin": other[2], "test.bin": other[2]}, True)
    write("cifar100", tmp_path, {"train.bin": mine[2], "test.bin": mine[2]}, False)
    assert len(images.load_cifar("cifar100", tmp_path)[0]) == 2


def bad_file(tmp_path, data, archive, name="cifar10"):
    files = {"data_batch_1.bin": data, "test_batch.bin": records("cifar10", 1)[2]}
    return write(name, tmp_path, files, archive)


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("data, said", [(b"", "0 bytes"), (records("cifar10", 2)[2][:-1], "6,145 bytes"),
                                        (bytes([10]) + bytes(3072), "record 0 has label 10")])
def test_a_bad_file_is_named_with_what_was_wanted(data, said, archive, tmp_path):
    source = bad_file(tmp_path, data, archive)
    with pytest.raises(ValueError, match=said) as error:
        images.load_cifar("cifar10", tmp_path)
    assert f"{source}/data_batch_1.bin" in str(error.value) and "\n" not in str(error.value)


def test_missing_truncated_and_foreign_archives(tmp_path):
    with pytest.raises(FileNotFoundError, match="cifar-10-binary.tar.gz") as error:
        images.load_cifar("cifar10", tmp_path)
    assert "170,052,171" in str(error.value) and images.BASE in str(error.value) and "--download" in str(error.value)
    archive = bad_file(tmp_path, records("cifar10", 40)[2], True)
    whole = archive.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"<html>503</html>"):
        archive.write_bytes(data)
        with pytest.raises(ValueError, match="delete it") as error:
            images.load_cifar("cifar10", tmp_path)
        assert str(archive) in str(error.value) and "\n" not in str(error.value)
    folder = write("cifar10", tmp_path, {"data_batch_1.bin": records("cifar10", 1)[2]}, False)
    with pytest.raises(ValueError, match="no test file") as error:
        images.load_cifar("cifar10", tmp_path)
    assert str(folder) in str(error.value)


def test_the_checksum_is_asked_of_official_archives_only(tmp_path):
    archive = tmp_path / "x.tar.gz"
    data = gzip.compress(b"abc" * 100)
    archive.write_bytes(data)
    about = dict(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    images.check_archive(archive, about)
    images.check_archive(archive, about | {"size": 4, "sha256": "0"})  # another size: somebody's own
    archive.write_bytes(data[:-6] + bytes([data[-6] ^ 1]) + data[-5:])  # in gzip's own checksum
    with pytest.raises(OSError, match="CRC"):
        images.check_archive(archive, about | {"size": 4})
    archive.write_bytes(data)
    with pytest.raises(ValueError, match="sha256"):
        images.check_archive(archive, about | {"sha256": "0"})


@pytest.mark.parametrize("relation", ["local", "global"])
def test_builtin_labels_can_be_read_off_the_image(relation):
    """Name every tile by the nearest texture, then read off the class by the rule of the set, in both directions."""
    train_x, train_y, x, y = images.builtin(relation, train=20, test=300, seed=3)
    assert x.shape == (300, 3, 32, 32) and train_x.shape[0] == len(train_y) == 20
    textures = torch.randint(0, 200, (10, 3, 4, 4), generator=torch.Generator().manual_seed(3))
    tiles = x.reshape(300, 3, 8, 4, 8, 4).permute(0, 2, 4, 1, 3, 5)[:, :, :, None]  # (P, 8, 8, 1, 3, 4, 4)
    error = (tiles.float() - textures).abs().mean(dim=(-3, -2, -1))  # (P, 8, 8, 10)
    names = error.argmin(-1)
    assert error.amin(-1).max() < 15
    right = 0
    for image, label in zip(names, y):
        found = []  # in each direction: how clear it is, and the class
        for grid in (image, image.T):
            if relation == "local":
                count = ((grid[:, 1:] - grid[:, :-1]) % 10).flatten().bincount(minlength=10)
                found.append((count.max().item(), count.argmax().item()))
            else:
                left, right_half = (half.flatten().bincount(minlength=10) for half in (grid[:, :4], grid[:, 4:]))
                found.append(((left.max() + right_half.max()).item(),
                              (right_half.argmax() - left.argmax()).item() % 10))
        right += max(found)[1] == label
    assert right > 290


def test_builtin_sets_are_repeatable_and_a_tile_alone_says_nothing():
    local, again, far = (images.builtin(relation, 3000, 10) for relation in ("local", "local", "global"))
    assert torch.equal(local[0], again[0]) and torch.equal(local[1], far[1]) and not torch.equal(local[0], far[0])
    assert set(local[1].tolist()) == set(range(10))
    for images_of, labels in (local[:2], far[:2]):  # mean colours of a class are those of all
        means = torch.stack([images_of[labels == c].float().mean() for c in range(10)])
        assert (means - images_of.float().mean()).abs().max() < 4
    with pytest.raises(ValueError, match="relation"):
        images.builtin("near")


def test_fingerprints_tell_sets_apart():
    local, far = (images.builtin(relation, 200, 20) for relation in ("local", "global"))
    assert images.fingerprint(local) == images.fingerprint(images.builtin("local", 200, 20)) != images.fingerprint(far)
    labels = local[3].clone()
    labels[7] += 1
    assert images.fingerprint((*local[:3], labels)) != images.fingerprint(local)


def test_a_killed_decoding_does_not_leave_word_of_an_older_one(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        for number in range(4):
            image.new("RGB", (8, 8), (200, 0, 0)).save(tmp_path / part / "a" / f"{number}.png")
    whole = images.load_folder(tmp_path, 8, classes=1)[0].clone()
    old = (tmp_path / "train" / "a" / "0.png").read_bytes()
    (tmp_path / "train" / "a" / "0.png").write_bytes(old + b"x")
    monkeypatch.setattr(images, "_decode", lambda *_: 1 / 0)
    monkeypatch.setattr(images.Path, "write_text", lambda *_, **__: 1 / 0)  # killed: nothing is written any more
    with pytest.raises(ZeroDivisionError):
        images.load_folder(tmp_path, 8, classes=1)
    monkeypatch.undo()
    (tmp_path / "train" / "a" / "0.png").write_bytes(old)
    assert torch.equal(images.load_folder(tmp_path, 8, classes=1)[0], whole)
    for path in (tmp_path / "val" / "a").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no image in this class folder"):
        images.load_folder(tmp_path, 8, classes=1)


def test_flip_and_crop_by_hand():
    generator = torch.Generator().manual_seed(0)
    image = torch.arange(1, 17, dtype=torch.uint8).reshape(1, 1, 4, 4).expand(400, 3, 4, 4)
    out = images.flip_and_crop(image, generator, pad=1)
    padded = torch.nn.functional.pad(image[0, 0], (1,) * 4)
    mirrored = torch.nn.functional.pad(image[0, 0].flip(-1), (1,) * 4)
    windows = {tuple(source[r:r + 4, c:c + 4].flatten().tolist()): which for which, source in
               (("plain", padded), ("mirrored", mirrored)) for r in range(3) for c in range(3)}
    seen = [windows[tuple(crop.flatten().tolist())] for crop in out[:, 0]]  # each is one of the 18 windows
    assert 0.4 < seen.count("mirrored") / 400 < 0.6 and torch.equal(out[:, 0], out[:, 2]) and out.dtype == torch.uint8
    assert len({tuple(crop.flatten().tolist()) for crop in out[:, 0]}) == 18


def test_random_erasing_hits_a_rectangle():
    out = images.random_erasing(torch.ones(500, 3, 32, 32), torch.Generator().manual_seed(0), 0.25)
    erased = (out == 0).all(dim=1)  # (B, S, S)
    hit = erased.flatten(1).any(1)
    assert 0.15 < hit.float().mean() < 0.35 and torch.equal(erased, (out == 0).any(dim=1))
    for mask in erased[hit]:
        rows, columns = mask.any(1).sum(), mask.any(0).sum()
        assert mask.sum() == rows * columns and 0.01 < mask.float().mean() < 0.4


def test_soft_labels_by_hand():
    assert torch.allclose(images.soft_labels(torch.tensor([1]), 4, 0.2), torch.tensor([[0.05, 0.85, 0.05, 0.05]]))


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_images_and_labels_are_mixed_by_the_same_share(mixup, cutmix):
    """Images that hold their own class as brightness: the share of each in an image is that in its label."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        x, targets = torch.zeros(2, 3, 32, 32), torch.eye(2)
        x[1] = 1
        mixed, soft = images.mixup_or_cutmix(x, targets, generator, mixup, cutmix)
        assert torch.allclose(mixed.mean(dim=(1, 2, 3)), soft[:, 1], atol=1e-5)
        assert torch.allclose(soft.sum(1), torch.ones(2))
    assert images.mixup_or_cutmix(x, targets, generator, 0, 0)[0] is x


@pytest.fixture
def jpegs(tmp_path):
    """Two classes in the layout of ImageNet: three training images each, one to test, of several sizes, some grey."""
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 3), ("val", 1)):
        for number, name in enumerate(("n01", "n02")):
            folder = tmp_path / "set" / part / name
            folder.mkdir(parents=True)
            for k in range(count):
                mode, colour = ("L", 100 * number) if k == 1 else ("RGB", (100 * number, 20 * k, 50))
                image.new(mode, (20 + 5 * k, 16), colour).save(folder / f"{name}_{k}.JPEG", quality=95)
    return tmp_path / "set"


def test_a_folder_of_jpegs(jpegs):
    x, y, test_x, test_y = images.load_folder(jpegs, size=8, classes=2)
    assert x.shape == (6, 3, 8, 8) and x.dtype == torch.uint8 and y.tolist() == [0, 0, 0, 1, 1, 1]
    assert test_x.shape == (2, 3, 8, 8) and test_y.tolist() == [0, 1]
    assert (x[5, :, 4, 4].int() - torch.tensor([100, 40, 50])).abs().max() < 6
    assert (x[4, :, 4, 4].int() - 100).abs().max() < 6  # grey: the same in three channels
    again = images.load_folder(jpegs, size=8, classes=2)
    assert all(torch.equal(a, b) for a, b in zip((x, y, test_x, test_y), again))


def test_an_interrupted_cache_goes_on(jpegs, monkeypatch):
    decode, calls = images._decode, []

    def stop_at_third(path, size):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(path, size)

    monkeypatch.setattr(images, "_decode", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        images.load_folder(jpegs, size=8, classes=2)
    x, *_ = images.load_folder(jpegs, size=8, classes=2)
    assert len(calls) == 3 + 4 + 2  # the two that were done are not decoded again
    assert torch.equal(x[0], torch.tensor(decode(jpegs / "train" / "n01" / "n01_0.JPEG", 8)))
    (jpegs / "train" / "n01" / "n01_2.JPEG").unlink()
    assert len(images.load_folder(jpegs, size=8, classes=2)[0]) == 5  # another list of files: decoded anew


def test_broken_folders_are_named(jpegs, tmp_path):
    with pytest.raises(FileNotFoundError, match="train is missing"):
        images.load_folder(tmp_path / "nosuch")
    with pytest.raises(ValueError, match="2 class folders, wanted 100"):
        images.load_folder(jpegs)
    (jpegs / "val" / "n02").rename(jpegs / "val" / "n03")
    with pytest.raises(ValueError, match="class folder n02"):
        images.load_folder(jpegs, size=8, classes=2)
    (jpegs / "val" / "n03").rename(jpegs / "val" / "n02")
    broken = jpegs / "train" / "n02" / "n02_1.JPEG"
    for data in (b"", b"not an image", broken.read_bytes()[:200]):
        broken.write_bytes(data)
        with pytest.raises(ValueError, match="n02_1.JPEG: not a readable image") as error:
            images.load_folder(jpegs, size=8, classes=2)
        assert "\n" not in str(error.value)


def test_the_class_list_has_a_name_of_its_own():
    assert images.names_hash(["a", "b"]) == hashlib.sha256(b"a\nb").hexdigest()[:12] != images.names_hash(["a", "c"])
