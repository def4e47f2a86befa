"""Sources: folders of images that can be taken for datasets and those that cannot; ImageNet's archives, small."""
import io
import json
import tarfile
from collections import Counter

import numpy as np
import pytest
from conftest import run

from tests.rigs.pictures import CLASSES, command, contents, encode, fill, picture, stored

WNIDS = ("n03000001", "n01000002", "n02000003")  # by their number in the kit: not the order of labels


def prepare(source, output, *flags) -> int:
    return command(f"--source={source}", f"--output={output}", "--format=recordio", *flags)


def test_validation_is_a_fraction_of_each_class(tmp_path):
    for number, (name, count) in enumerate((("many", 40), ("few", 7), ("one", 1), ("none", 0))):
        fill(tmp_path / "source", count, first=100 * number, classes=(name,))
    flags = (tmp_path / "source", tmp_path / "o", "--validation_fraction=0.25")
    assert prepare(*flags) == 0
    pairs = stored(tmp_path / "o")
    counts = {split: Counter(name for _, name in pairs[split]) for split in pairs}
    assert counts["train"] + counts["validation"] == {"many": 40, "few": 7, "one": 1}
    assert 4 <= counts["validation"]["many"] <= 16 and 1 <= counts["validation"]["few"] <= 4
    assert counts["train"]["one"] == 1
    assert not {image for image, _ in pairs["train"]} & {image for image, _ in pairs["validation"]}
    assert prepare(tmp_path / "source", tmp_path / "again", "--validation_fraction=0.25") == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "o")
    assert prepare(tmp_path / "source", tmp_path / "seed", "--validation_fraction=0.25", "--seed=1") == 0
    seeded = stored(tmp_path / "seed")
    assert set(seeded["validation"]) == set(pairs["validation"]) and seeded["train"] != pairs["train"]


def folder_case(name, folder):
    """A folder, flags, and the message it is refused with."""
    match name:
        case "no images":
            for split in ("train", "val"):
                fill(folder / split, 0)
            return [], "train contains no images in class folders"
        case "no validation images":
            fill(folder / "train", 2)
            fill(folder / "val", 0)
            return [], "val contains no images in class folders"
        case "nothing":
            folder.mkdir()
            return [], "contains no class folders"
        case "a single class":
            fill(folder, 4, classes=("cat",))
            return ["--validation_fraction=0.5"], "has a single class, 'cat', so there is nothing to learn"
        case "no validation":
            fill(folder, 2)
            return [], "--validation_fraction=0.2"
        case "validation twice":
            fill(folder / "train", 2)
            fill(folder / "validation", 2, 50)
            return ["--validation_fraction=0.5"], "already has validation images in validation/"
        case "a class of validation alone":
            fill(folder / "train", 2)
            fill(folder / "val", 2, 50, ("cat", *CLASSES))
            return [], "class 'cat' has a folder in val/ but not in train/"
        case "validation alone":
            fill(folder / "val", 2)
            return [], "but no train/"
        case "a fraction of nothing":
            fill(folder, 1)
            return ["--validation_fraction=0.5"], "selects no image"
        case "all rejected":
            fill(folder / "train", 2)
            (folder / "val" / "dog").mkdir(parents=True)
            (folder / "val" / "dog" / "x.jpg").write_text("x")
            return [], "none of the 1 validation images could be used; for example, val/dog/x.jpg: not an image"


@pytest.mark.parametrize("name", [
    "no images", "no validation images", "nothing", "a single class", "no validation", "validation twice",
    "a class of validation alone", "validation alone", "a fraction of nothing", "all rejected"])
def test_folders_that_are_no_source(tmp_path, capsys, name):
    flags, message = folder_case(name, tmp_path / "source")
    assert prepare(tmp_path / "source", tmp_path / "o", *flags) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "o" / "dataset.json").exists()


def test_output_in_the_source(tmp_path, capsys):
    fill(tmp_path / "source", 4)
    (tmp_path / "link").symlink_to(tmp_path / "source")
    assert prepare(tmp_path / "source", tmp_path / "link" / "o", "--validation_fraction=0.5") == 1
    assert "is inside --source" in capsys.readouterr().err and not (tmp_path / "source" / "o").exists()


def test_a_class_that_validation_lacks_keeps_the_labels(tmp_path):
    fill(tmp_path / "source" / "train", 4)
    fill(tmp_path / "source" / "val", 2, 50, CLASSES[1:])
    assert prepare(tmp_path / "source", tmp_path / "o") == 0
    assert Counter(name for _, name in stored(tmp_path / "o")["validation"]) == dict.fromkeys(CLASSES[1:], 2)


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def packed(files, mode="w") -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode=mode) as archive:
        for name, content in files.items():
            add(archive, name, content)
    return written.getvalue()


def synsets() -> bytes:
    """meta.mat: the three classes, and one above them, which is not to be a class."""
    from scipy.io import savemat

    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(float(number), name, "words", 0.0) for number, name in enumerate((*WNIDS, "n00000004"), 1)]
    written = io.BytesIO()
    savemat(written, {"synsets": np.array(rows, kind).reshape(-1, 1)})
    return written.getvalue()


TRAIN = {wnid: {f"{wnid}_{image}.JPEG": encode(picture(10 * number + image)) for image in range(4)}
         for number, wnid in enumerate(WNIDS)}
SHOWN = [3, 1, 2, 2, 1]  # ground truth: the numbers of the classes
VALIDATION = {f"ILSVRC2012_val_{number:08d}.JPEG": encode(picture(100 + number)) for number in range(1, 6)}
TRUTH = "".join(f"{number}\n" for number in SHOWN).encode()
KIT = "ILSVRC2012_devkit_t12/data/"


def imagenet(folder, kit="packed", train=TRAIN):
    folder.mkdir()
    archives = {f"{wnid}.tar": packed(images) for wnid, images in train.items()}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(packed(archives))
    shuffled = dict(sorted(VALIDATION.items(), key=lambda item: item[1]))  # as an archive may well hold them
    (folder / "ILSVRC2012_img_val.tar").write_bytes(packed(shuffled))
    truth = "ILSVRC2012_validation_ground_truth.txt"
    if kit == "packed":
        (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(
            packed({f"{KIT}{truth}": TRUTH, f"{KIT}meta.mat": synsets(), f"{KIT}readme.txt": b"x"}, "w:gz"))
    elif kit:
        (folder / KIT).mkdir(parents=True)
        (folder / KIT / truth).write_bytes(TRUTH)
        if kit == "map":
            lines = "".join(f"{wnid} {number} some_name\n" for number, wnid in enumerate(WNIDS, 1))
            (folder / KIT / "map_clsloc.txt").write_text(lines)
        else:
            (folder / KIT / "meta.mat").write_bytes(synsets())
    return folder


@pytest.mark.parametrize("kit", ["packed", "folder", "map"])
def test_imagenets_archives(tmp_path, kit):
    assert prepare(imagenet(tmp_path / "source", kit), tmp_path / "o", "--verify") == 0
    pairs = stored(tmp_path / "o")
    assert json.loads((tmp_path / "o" / "dataset.json").read_text())["classes"] == sorted(WNIDS)
    assert sorted(pairs["train"]) == sorted(
        (image, wnid) for wnid, images in TRAIN.items() for image in images.values())
    assert sorted(pairs["validation"]) == sorted(
        (image, WNIDS[number - 1]) for image, number in zip(VALIDATION.values(), SHOWN, strict=True))


def test_imagenets_archives_on_three_ranks(tmp_path):
    source = imagenet(tmp_path / "source")
    assert prepare(source, tmp_path / "one", "--shard_samples=3") == 0
    done = run("mpirun", 3, "-m", "data.prepare", f"--source={source}", f"--output={tmp_path}/three",
               "--format=recordio", "--shard_samples=3")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "three") == contents(tmp_path / "one")


def test_an_image_of_an_archive_that_is_damaged_is_named(tmp_path):
    train = {wnid: dict(images) for wnid, images in TRAIN.items()}
    train[WNIDS[0]][f"{WNIDS[0]}_2.JPEG"] = encode(picture(1))[:-60]
    assert prepare(imagenet(tmp_path / "source", train=train), tmp_path / "o", "--verify") == 0
    rows = [json.loads(line) for line in (tmp_path / "o" / "rejected.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == [f"{WNIDS[0]}/{WNIDS[0]}_2.JPEG"] and "truncated" in rows[0]["reason"]


def truncate(name, size):
    def harm(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:size if size > 0 else len(content) + size])
    return harm


def without(name):
    return lambda folder: (folder / name).unlink()


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def inner_header(folder):
    """Destroys the header of the second image of the first class's archive, where tarfile would see an end."""
    content = bytearray((folder / "ILSVRC2012_img_train.tar").read_bytes())
    offset = content.index(f"{WNIDS[0]}_1.JPEG".encode())
    content[offset + 148:offset + 156] = b"77777777"
    (folder / "ILSVRC2012_img_train.tar").write_bytes(content)


@pytest.mark.parametrize(("harm", "message"), [
    (without("ILSVRC2012_img_train.tar"), "has no ILSVRC2012_img_train.tar"),
    (without("ILSVRC2012_img_val.tar"), "has no ILSVRC2012_img_val.tar"),
    (without("ILSVRC2012_devkit_t12.tar.gz"), "has neither ILSVRC2012_devkit_t12.tar.gz"),
    (write("ILSVRC2012_devkit_t12.tar.gz", packed({f"{KIT}ILSVRC2012_validation_ground_truth.txt": TRUTH}, "w:gz")),
     "neither meta.mat nor map_clsloc.txt"),
    (write("ILSVRC2012_devkit_t12.tar.gz", b"no archive"), "is not a tar archive"),
    (write("ILSVRC2012_devkit_t12.tar.gz", packed({"ILSVRC2012_validation_ground_truth.txt": TRUTH[:-2],
                                                   "meta.mat": synsets()}, "w:gz")),
     "5 images, but the development kit"),
    (write("ILSVRC2012_devkit_t12.tar.gz", packed({"ILSVRC2012_validation_ground_truth.txt": b"1\n2\n3\n1\n9\n",
                                                   "meta.mat": synsets()}, "w:gz")), "has no class 9"),
    (write("ILSVRC2012_devkit_t12.tar.gz", packed({"ILSVRC2012_validation_ground_truth.txt": b"1\n2\n3\n1\n4\n",
                                                   "meta.mat": synsets()}, "w:gz")), "has no n00000004.tar"),
    (write("ILSVRC2012_devkit_t12.tar.gz", packed({"ILSVRC2012_validation_ground_truth.txt": TRUTH,
                                                   "meta.mat": b"x" * 200}, "w:gz")), "meta.mat of ImageNet's"),
    (write("ILSVRC2012_img_val.tar", packed({f"x{name}": image for name, image in VALIDATION.items()})), "no label"),
    (write("ILSVRC2012_img_train.tar", b""), "is not a tar archive"),
    (write("ILSVRC2012_img_train.tar", packed({"readme.txt": b"x"})), "contains no class archives"),
    (truncate("ILSVRC2012_img_train.tar", 9_000), "damaged"),
    (truncate("ILSVRC2012_img_val.tar", 1_000), "archive"),
    (inner_header, "truncated or damaged"),
])
def test_a_part_of_imagenet_that_is_missing_or_damaged(tmp_path, capsys, harm, message):
    harm(imagenet(tmp_path / "source"))
    assert prepare(tmp_path / "source", tmp_path / "o") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "o").exists()


def test_an_empty_class_of_imagenet(tmp_path, capsys):
    assert prepare(imagenet(tmp_path / "source", train=TRAIN | {"n00500000": {}}), tmp_path / "o") == 0
    assert "no training images in class 'n00500000'" in capsys.readouterr().err
    assert json.loads((tmp_path / "o" / "dataset.json").read_text())["classes"] == sorted(["n00500000", *WNIDS])
    assert command(f"--source={tmp_path}/source", f"--output={tmp_path}/p", "--validation_fraction=0.1") == 1
