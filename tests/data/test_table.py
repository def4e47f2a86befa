"""A table of files and labels as a source: the same shards as folders, and problems named with their lines."""
import shutil

import pytest

from tests.rigs.pictures import CLASSES, command, contents, fill


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of 8 pictures."""
    return fill(tmp_path_factory.mktemp("table") / "photos", 8)


def paths(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg"))


def write(file, rows, delimiter=",", encoding="utf-8", end="\n"):
    file.write_bytes("".join(delimiter.join(row) + end for row in rows).encode(encoding))
    return file


def prepared(source, output, *flags):
    assert command(f"--source={source}", f"--output={output}", "--format=recordio", *flags) == 0
    return contents(output)


@pytest.mark.parametrize(("header", "delimiter", "encoding", "end"), [
    (("file", "label"), ",", "utf-8", "\n"), (("Filename", "CLASS"), ";", "utf-8-sig", "\r\n"),
    (("image", "Label"), "\t", "utf-8", "\n"), ((" path ", "class"), ",", "utf-8-sig", "\r\n")])
def test_the_same_shards_as_from_folders(photos, tmp_path, header, delimiter, encoding, end):
    """Whatever the order of the lines is. The table may lie beside the folders."""
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    expected = prepared(folder, tmp_path / "folders", "--validation_fraction=0.3")
    rows = [header, *((path, path.partition("/")[0]) for path in reversed(paths(folder)))]
    table = write(folder / "labels.csv", rows, delimiter, encoding, end)
    assert prepared(table, tmp_path / "table", "--validation_fraction=0.3") == expected


def test_a_column_divides_the_images(photos, tmp_path, capsys):
    """As train/ and val/ do. Of val and test, val is taken. Quotes, Windows' paths and a line twice are understood."""
    for split, numbers in (("train", "01234"), ("val", "56"), ("test", "7")):
        for name in CLASSES:
            (tmp_path / "set" / split / name).mkdir(parents=True)
            for number in numbers:
                shutil.copy(photos / name / f"{number} ü.jpg", tmp_path / "set" / split / name)
    expected = prepared(tmp_path / "set", tmp_path / "folders")
    rows = [(path, path.split("/")[1], path.split("/")[0]) for path in paths(tmp_path / "set")]
    rows = [(f'"{path}"', name, "Training" if split == "train" else split) for path, name, split in rows]
    rows[1] = (rows[1][0].replace("/", "\\"), *rows[1][1:])
    table = write(tmp_path / "set" / "labels.csv", [("file", "label", "split"), *rows, rows[0]])
    capsys.readouterr()
    assert prepared(table, tmp_path / "table") == expected
    assert "note: not used: 3 images of the split test\n" in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "flags", "messages"), [
    ([("a b/0 ü.jpg", "cat"), ("gone.jpg", "dog"), ("dog", "dog")], (),
     ("line 3: there is no file ", "/gone.jpg; line 4: there")),
    ([("a b/0 ü.jpg", "cat"), ("./a b/0 ü.jpg", "dog")], (),
     ("line 3: a b/0 ü.jpg has the label 'dog', but 'cat' in line 2",)),
    ([("a b/0 ü.jpg", "cat"), ("dog/0 ü.jpg", " "), ("", "dog")], (),
     ("line 3: dog/0 ü.jpg has no label; line 4: the file is empty",)),
    ([(f"gone {number}", "cat") for number in range(5)], (), (" and 2 more problems",)),
    ([("a b/0 ü.jpg", "cat"), ("dog/0 ü.jpg", "cat")], ("--validation_fraction=0.5",), ("has a single class, 'cat'",)),
    ([("a b/0 ü.jpg", "cat"), ("dog/0 ü.jpg", "dog")], (),
     ("has no validation images; give", "--validation_fraction=0.2")),
    ([("a b/0 ü.jpg", "cat"), ("dog/0 ü.jpg", "dog")], ("--validation_fraction=0.5",), ("selects no image",))])
def test_problems_are_named_with_their_lines(photos, tmp_path, capsys, rows, flags, messages):
    folder = tmp_path / "photos"
    folder.symlink_to(photos)
    table = tmp_path / "labels.csv"
    write(table, [("file", "label"), *((f"photos/{file}" if file else file, label) for file, label in rows)])
    assert command(f"--source={table}", f"--output={tmp_path}/o", *flags) == 1
    [line] = capsys.readouterr().err.replace("photos/", "").splitlines()
    assert all(message in line for message in messages), line
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("text", "message"), [
    ("0.jpg,cat\n1.jpg,dog\n", "line 1: the table needs a header with the columns file (or path, filename, image)"),
    ("", "line 1: the table needs a header"),
    ("file,label,split\nphotos/dog/0 ü.jpg,dog,holdout\n",
     "line 2: the split 'holdout' of photos/dog/0 ü.jpg is none of"),
    ("file,label,split\nphotos/dog/0 ü.jpg,dog,test\n", "has no training images"),
    ("file,label,split\nphotos/dog/0 ü.jpg,dog,val\nphotos/a b/0 ü.jpg,cat,train\n",
     "line 2: no training image has the label 'dog'")])
def test_tables_that_are_none(photos, tmp_path, capsys, text, message):
    (tmp_path / "photos").symlink_to(photos)
    (tmp_path / "labels.csv").write_text(text)
    assert command(f"--source={tmp_path}/labels.csv", f"--output={tmp_path}/o") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "o").exists()
    (tmp_path / "labels.csv").write_bytes(b"file,label\ncaf\xe9.jpg,cat\n")
    assert command(f"--source={tmp_path}/labels.csv", f"--output={tmp_path}/o") != 0
    assert "line 2, is not UTF-8; save the file as UTF-8" in capsys.readouterr().err
