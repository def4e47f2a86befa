"""Names of classes: one form and one line each, from wherever they come, and what is said about two that look alike."""
import hashlib
import json
import os
import sys
import unicodedata

import numpy as np
import pytest

from common.errors import UserError
from data import facts
from data.class_names import alike, distinct, normal
from data.dataset import open_dataset
from data.sources.imagenet import TRAIN_TAR
from tests.data.test_adopt import slim
from tests.data.test_sources import imagenet
from tests.rigs.pictures import command, encode, fill, picture

NFC, NFD = "café", "cafe\N{COMBINING ACUTE ACCENT}"
TWICE = f"{NFC!a} and {NFD!a} are two spellings of one class, {NFC!r}; use one of them, or rename one class"
BETWEEN = "cafz"  # which is after the one form and before the other one


def both(folder, classes=(BETWEEN, NFC, NFD)):
    """train/ with both forms of a name, and val/ with one."""
    fill(folder / "train", 2, classes=classes)
    fill(folder / "val", 2, first=50, classes=classes[:2])
    return folder


def split_forms(folder):
    """train/ in one form, and val/ in the other one."""
    fill(folder / "train", 3, classes=(NFD, BETWEEN, "oak"))
    fill(folder / "val", 2, first=50, classes=(NFC, BETWEEN, "oak"))
    return folder


def check_labels(folder) -> None:
    """Each image has the class of its folder."""
    dataset = open_dataset(folder)
    assert {*dataset.classes} == {NFC, BETWEEN, "oak"}
    for split in (dataset.train, dataset.validation):
        labels = [label for _, label in split.records(np.arange(split.samples))]
        for name, label in zip(split.names(), labels, strict=True):
            assert normal(name.split("/")[-2]) == dataset.classes[label], name


def test_no_reader_of_lines_divides_a_name():
    ends = [letter for letter in map(chr, range(sys.maxunicode + 1)) if len(f"a{letter}b".splitlines()) > 1]
    assert len(ends) == 10 and "\u2028" in ends  # \r\n is two of them
    for letter in (*ends, "\0", "\x1b"):
        assert len(normal(f"a{letter}b").splitlines()) == 1 and normal(f"a{letter}b").isprintable()
    assert normal(f"{NFD}\n\u2028") == f"{NFC}\\n\\u2028" and normal(os.fsdecode(b"ch\xe2t")) == os.fsdecode(b"ch\xe2t")


def test_a_name_may_occur_twice_but_not_in_two_forms():
    assert distinct(["crane", NFD, "crane"], "here") == ("crane", NFC, "crane")
    with pytest.raises(UserError) as refused:
        distinct([NFC, "oak", NFD], "FILE", [2, 4, 7])
    assert str(refused.value) == f"FILE, lines 2 and 7: {TWICE}"


@pytest.mark.parametrize(("names", "said"), [
    (("oak", "elm", "oak\u200b"), "'oak' and 'oak\\u200b'"), (("Oak", "oak"), "'Oak' and 'oak'"),
    (("o ak", "oak", "o\xa0ak"), "'o ak' and 'oak' and 'o\\xa0ak'"), (("oak\xad", "oak"), "'oak\\xad' and 'oak'"),
    (("é\ufe0f", "é"), "'\\xe9\\ufe0f' and '\\xe9'"), (("É", "é"), "'É' and 'é'"),
    (("\uff4fak", "oak"), "'\uff4fak' and 'oak'"),
    (("crane", "crane"), "'crane' and 'crane'"), (("a", "A", "b", "B"), "'a' and 'A'; 'b' and 'B'"),
    ([f"{letter}{case}" for case in "xX" for letter in "abcdefg"], "'ex' and 'eX' and 2 more such groups"),
    (("cote", "coté", "côte", "oak 1", "oak 11", "o-ak"), None), (map(str, range(1000)), None)])
def test_names_that_look_alike_are_one_line(names, said):
    lines = alike(names)
    assert len(lines) == bool(said) and all(line.endswith(said) for line in lines)


def test_looking_alike_is_told_by_training_preparing_and_adopting(tmp_path, capsys):
    fill(tmp_path / "s" / "train", 2, classes=("oak", "oak\u200b"))
    fill(tmp_path / "s" / "val", 2, first=50, classes=("oak", "oak\u200b"))
    [told] = alike(("oak", "oak\u200b"))
    assert told in facts.of_dataset(open_dataset(tmp_path / "s"))
    for flags in ((f"--source={tmp_path}/s", f"--output={tmp_path}/o"), ("--adopt", f"--output={tmp_path}/s")):
        assert command(*flags) == 0
        assert capsys.readouterr().err.count(f"data.prepare: {told}\n") == 1


def test_both_forms_are_refused_from_every_source(tmp_path, capsys):
    """With the folders or the lines, in a way that shows their difference."""
    in_folders = TWICE.replace(f"{NFC!a} and {NFD!a}", f"{NFD!a} and {NFC!a}")

    def refused(said, *flags):
        assert command(*flags) == 1
        assert capsys.readouterr().err == f"data.prepare: {said}\n"

    folder = both(tmp_path / "two")
    for check_files in (True, False):
        with pytest.raises(UserError) as raised:
            open_dataset(folder, check_files)
        assert str(raised.value) == f"{folder}/train: {in_folders}"
    refused(f"--source: {folder}/train: {in_folders}", f"--source={folder}", f"--output={tmp_path}/o")
    refused(f"{folder}/train: {in_folders}", "--adopt", f"--output={folder}")
    fill(tmp_path / "val" / "train", 2, classes=(BETWEEN, NFC))
    fill(tmp_path / "val" / "val", 2, first=50, classes=(NFC, NFD))
    refused(f"--source: {tmp_path}/val/val: {in_folders}", f"--source={tmp_path}/val", f"--output={tmp_path}/o")
    test = fill(tmp_path / "flat", 2, classes=(NFC, NFD))
    refused(f"--source: {test}: {in_folders}", f"--source={test}", f"--output={tmp_path}/o", "--validation_fraction=1")
    with pytest.raises(UserError, match="two spellings"):
        open_dataset(test, fraction=1)
    archives = imagenet(tmp_path / "tars", train={name: {"1.JPEG": encode(picture(1))} for name in (NFC, NFD)})
    (archives / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    data = archives / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n" * 5)
    (data / "map_clsloc.txt").write_text(f"{NFC} 1 x\n")
    refused(f"--source: {archives}/{TRAIN_TAR}: {in_folders}", f"--source={archives}", f"--output={tmp_path}/o")
    (tmp_path / "names.txt").write_text(f"oak\n\n{NFC}\n{NFD}\n")
    (tmp_path / "slim").mkdir()
    refused(f"--classes: {tmp_path}/names.txt, lines 3 and 4: {TWICE}", "--adopt",
            f"--output={slim(tmp_path / 'slim')}", f"--classes={tmp_path}/names.txt")
    assert command("--adopt", f"--output={tmp_path}/slim") == 0
    described = json.loads((tmp_path / "slim" / "dataset.json").read_text())
    (tmp_path / "slim" / "dataset.json").write_text(json.dumps(described | {"classes": [NFC, NFD, "oak"]}))
    with pytest.raises(UserError) as raised:
        open_dataset(tmp_path / "slim")
    assert str(raised.value) == f"{tmp_path}/slim/dataset.json: {TWICE}"


def test_the_forms_of_two_splits_may_differ(tmp_path):
    """In place, prepared and adopted: each image has the label of its folder. Labels follow the folders of train/."""
    folder = split_forms(tmp_path / "s")
    check_labels(folder)
    assert open_dataset(folder).classes == (NFC, BETWEEN, "oak")
    assert command(f"--source={folder}", f"--output={tmp_path}/o") == 0
    check_labels(tmp_path / "o")
    assert command("--adopt", f"--output={folder}") == 0
    check_labels(folder)
    assert json.loads((folder / "dataset.json").read_text())["classes"] == [NFC, BETWEEN, "oak"]


def test_a_list_of_names_gives_adopted_folders_their_labels(tmp_path, capsys):
    folder = split_forms(tmp_path / "s")
    (tmp_path / "names.txt").write_text(f"oak\n{NFC}\n{BETWEEN}\n")
    assert command("--adopt", f"--output={folder}", f"--classes={tmp_path}/names.txt") == 0
    check_labels(folder)
    assert open_dataset(folder).classes == ("oak", NFC, BETWEEN)
    (folder / "dataset.json").unlink()
    for text, said in ((f"\ufeff\ufeffoak\n{NFC}\nelm\n", f"class '{BETWEEN}' must have a folder in each split"),
                       ("oak\nc\0at\n", ", line 2, has a NUL character; save the file as UTF-8")):
        (tmp_path / "names.txt").write_text(text)
        capsys.readouterr()
        assert command("--adopt", f"--output={folder}", f"--classes={tmp_path}/names.txt") == 1
        assert said in capsys.readouterr().err


def test_the_bytes_on_disk_set_images_aside(tmp_path):
    """As before names had one form, so that no image of an earlier run moves."""
    dataset = open_dataset(fill(tmp_path / "s", 20, classes=(NFD, "oak")), fraction=0.3)
    hashed = {f"{name}/{number} ü.jpg": int(hashlib.sha256(f"{name}/{number} ü.jpg".encode()).hexdigest()[:16], 16)
              for name in (NFD, "oak") for number in range(20)}
    assert dataset.classes == (NFC, "oak")
    assert {*dataset.validation.entries[0].files} == {file for file, number in hashed.items() if number < 0.3 * 2**64}
    assert {unicodedata.is_normalized("NFD", file.split("/")[0]) for file in dataset.train.entries[0].files} == {True}


def test_a_line_end_shifts_no_list(tmp_path):
    """In the name of a folder, in a list of names and in the texts of records."""
    dataset = open_dataset(fill(tmp_path / "s", 4, classes=("oak\n", "elm\u2028x")))
    assert dataset.classes == ("elm\\u2028x", "oak\\n") and dataset.train.samples + dataset.validation.samples == 8
    for number, (text, flags) in enumerate((("class\n", ()), ("x", [f"--classes={tmp_path}/names.txt"]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        slim(folder, lambda label, text=text: {"image/class/text": f"{text}{label}\u2028"})
        (tmp_path / "names.txt").write_text("class\u20281\nclass\x852\nclass\v3\n")
        assert command("--adopt", f"--output={folder}", *flags) == 0
        assert open_dataset(folder).classes == (
            ("class\\u20281", "class\\x852", "class\\x0b3") if flags else tuple(f"class\\n{n}\\u2028" for n in "123"))


def test_a_description_of_an_earlier_version_is_read_in_one_form(tmp_path):
    (tmp_path / "slim").mkdir()
    assert command("--adopt", f"--output={slim(tmp_path / 'slim')}") == 0
    file = tmp_path / "slim" / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": [NFD, "oak\n", "elm"]}))
    assert open_dataset(tmp_path / "slim").classes == (NFC, "oak\\n", "elm")
