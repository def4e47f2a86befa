"""A table of files and labels as a source: the same shards as folders, and problems named with their lines."""
import gzip
import json
import shutil
import unicodedata

import numpy as np
import pytest
from conftest import ROOT, run

from common.errors import UserError
from data import facts
from data.dataset import open_dataset
from data.named import is_table, open_named
from data.staging import local_copy
from tests.rigs.pictures import CLASSES, command, contents, encode, fill, picture


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of 8 pictures."""
    return fill(tmp_path_factory.mktemp("table") / "photos", 8)


def paths(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg"))


def write(file, rows, delimiter=",", encoding="utf-8", end="\n", before=""):
    file.write_bytes((before + "".join(delimiter.join(row) + end for row in rows)).encode(encoding))
    return file


def prepared(source, output, *flags):
    assert command(f"--source={source}", f"--output={output}", "--format=recordio", *flags) == 0
    return contents(output)


@pytest.mark.parametrize(("header", "delimiter", "encoding", "end", "before"), [
    (("file", "label"), ",", "utf-8", "\n", ""), (("Filename", "CLASS"), ";", "utf-8-sig", "\r\n", ""),
    (("image", "Label"), "\t", "utf-8", "\n", ""), ((" path ", "class"), ",", "utf-8-sig", "\r\n", ""),
    (("file", "label"), ";", "utf-8-sig", "\r\n", "sep=;\r\n"), (("file", "label"), "|", "utf-8", "\r", "\ufeff\ufeff"),
    (("file", "label"), "\t", "utf-16", "\r\n", "sep=\t\r\n"),
    (("file", "label"), ",", "utf-8", "\n", "# mine\n\n,,\n")])
def test_the_same_shards_as_from_folders(photos, tmp_path, header, delimiter, encoding, end, before):
    """Whatever the order of the lines is, and however the table was saved. It may lie beside the folders."""
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    expected = prepared(folder, tmp_path / "folders", "--validation_fraction=0.3")
    rows = [header, *((path, path.partition("/")[0]) for path in reversed(paths(folder)))]
    table = write(folder / "labels.csv", rows, delimiter, encoding, end, before)
    if before.startswith("#"):
        (folder / "labels.csv.gz").write_bytes(gzip.compress(table.read_bytes()))
        table = folder / "labels.csv.gz"
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
    assert "not used: 3 images of the split test\n" in capsys.readouterr().err


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
    ("\n# mine\nfile,species\n", "line 3: the table needs a header with the columns file (or path, filename, image) "
     "and label (or class), divided by commas, semicolons or tabs; it has 'file', 'species'; --label_column=species "
     "says which one has the classes"),
    ("file,age,species\n", "it has 'file', 'age', 'species'; --label_column=NAME says which one has the classes"),
    ("photo,label\n", "it has 'photo', 'label'\n"),
    ("image,cat,dog\nx.jpg,1.0,0.0\n", "a column for each class is not read: write the name of each image's class"),
    ("file,label,split\nphotos/dog/0 ü.jpg,dog,holdout\n",
     "line 2: the split 'holdout' of photos/dog/0 ü.jpg is none of"),
    ("file,label,split\nphotos/dog/0 ü.jpg,dog,test\n", "has no training images"),
    ("file,label,split\nphotos/dog/0 ü.jpg,dog,val\nphotos/a b/0 ü.jpg,cat,train\n",
     "line 2: no training image has the label 'dog'")])
def test_tables_that_are_none(photos, tmp_path, capsys, text, message):
    (tmp_path / "photos").symlink_to(photos)
    (tmp_path / "labels.csv").write_text(text)
    assert command(f"--source={tmp_path}/labels.csv", f"--output={tmp_path}/o") == 1
    [line] = capsys.readouterr().err.splitlines(keepends=True)
    assert message in line and not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", ["species", " Species", "SPECIES "])
def test_a_column_of_any_name_has_the_classes(photos, tmp_path, capsys, name):
    """Another one called label does not matter then. A name that no column has is one line."""
    (tmp_path / "photos").symlink_to(photos)
    rows = [(f"photos/{path}", "x", path.partition("/")[0]) for path in paths(photos)]
    table = write(tmp_path / "labels.csv", [("file", "label", "Species"), *rows])
    flags = f"--source={table}", f"--output={tmp_path}/o", "--validation_fraction=0.3"
    assert command(*flags, "--label_column=genus") == 1
    assert "the columns file (or path, filename, image) and genus, divided by" in capsys.readouterr().err
    assert command(*flags, f"--label_column={name}") == 0 and open_dataset(tmp_path / "o").classes == CLASSES


def test_a_column_needs_a_table(photos, tmp_path, capsys):
    assert command(f"--source={photos}", f"--output={tmp_path}/o", "--label_column=species") == 2
    assert "--label_column names a column of a table; give that as --source=TABLE" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "message"), [
    (b"file,label\ncaf\xe9.jpg,cat\n", ", line 2, is not UTF-8; save the file as UTF-8"),
    (b"file,label\n1.jpg,c\0at\n", ", line 2, has a NUL character; save the table as CSV in UTF-8"),
    ("file,label\n".encode("utf-16-le"), ", line 1, has a NUL character; save the table as CSV in UTF-8"),
    ("file,label\n".encode("utf-16") + b"x", " is damaged: "),
    (gzip.compress(b"file,label\n", mtime=0)[:-9], " is damaged: Compressed file ended before"),
    (b"PK\3\4 a sheet", " is a spreadsheet or a zip archive; save the table as CSV in UTF-8")])
def test_files_that_are_no_text_in_utf_8(tmp_path, capsys, content, message):
    (tmp_path / "labels.csv").write_bytes(content)
    assert command(f"--source={tmp_path}/labels.csv", f"--output={tmp_path}/o", "--validation_fraction=0.3") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"data.prepare: --source: {tmp_path}/labels.csv{message}")


def test_an_address_is_no_file(tmp_path, capsys):
    assert command("--source=https://example.org/labels.csv", f"--output={tmp_path}/o") == 1
    assert "https://example.org/labels.csv is an address; data.prepare reads files" in capsys.readouterr().err


@pytest.fixture(scope="module")
def thirty(tmp_path_factory):
    """A folder with 30 images: 0.jpg, ..."""
    folder = tmp_path_factory.mktemp("thirty")
    fill(folder, 30, classes=("x",))
    for number, path in enumerate(sorted((folder / "x").iterdir())):
        path.rename(folder / f"{number}.jpg")
    return folder


@pytest.fixture
def judged(thirty, tmp_path, capsys):
    """A function that prepares thirty images in a table: line 2 has 0.jpg, ... Returns exit code and standard error.

    changed: the lines of some images. more: the cells after the label of an image.
    """
    def prepare(header="file,label", changed=(), flags=("--validation_fraction=0.3",), more=lambda number: ""):
        lines = {number: f"{number}.jpg,{label(number)}{more(number)}" for number in range(30)} | dict(changed)
        (thirty / "labels.csv").write_text("".join(f"{line}\n" for line in (header, *lines.values())))
        capsys.readouterr()
        code = command(f"--source={thirty}/labels.csv", f"--output={tmp_path}/o", "--format=recordio", *flags)
        assert (tmp_path / "o").exists() == (code == 0)
        return code, capsys.readouterr().err.replace(f"data.prepare: --source: {thirty}/labels.csv", "")

    return prepare


def label(number: int) -> str:
    return "oak" if number % 2 else "birch"


@pytest.mark.parametrize(("header", "changed", "message"), [
    ("file,label", {5: '5.jpg,"oak'}, ", line 7: the quotation marks of the row that begins here do not match ("),
    ("file,label", {5: '5.jpg,"oak', 23: '23.jpg,"oak"'}, ", line 7: the quotation marks of the row that begins here "),
    ("file,label", {5: '5.jpg,"oak', 23: '23.jpg,oak"'}, ": line 7: the label 'oak\\n6.jpg,birch\\n7.jpg,"),
    ("file,label,notes", {5: '5.jpg,oak,"old', 9: '9.jpg,oak,new"'},
     ": line 7: a cell has the lines of other images; is a quotation mark missing?"),
    ("file,label", {3: "3.jpg,crane, bird", 4: "4.jpg,crane, machine"},
     ": line 5: 3 cells, but the header has 2; a text with a ',' needs quotation marks; line 6: 3 cells, "),
    ("file,label,width", {3: "3.jpg,oak,0,5"}, ": line 5: 4 cells, but the header has 3; "),
    ("file,author,label,year", {0: "0.jpg,oak,2020"}, ": line 2: 3 cells, but the header has 4"),
    ("file,label,class", {}, ", line 1: the columns 'label' and 'class' mean the same; remove or rename all but one"),
    ("file,Image,label", {}, ", line 1: the columns 'file' and 'Image' mean the same; "),
    ("file,label,label", {}, ", line 1: the columns 'label' and 'label' mean the same; "),
    ("file,label", {2: "2.jpg,oak|birch"}, ": line 4: the label 'oak|birch' of 2.jpg is a list, but an image has one "),
    ("file,label", {2: "2.jpg,['oak']"}, """: line 4: the label "['oak']" of 2.jpg is a list, but an image has one """),
    ("file,label", {2: '2.jpg,"oak, birch"'}, ": line 4: the label 'oak, birch' of 2.jpg is a list, but an image "),
    ("file,label", {2: "2.jpg,oak birch"}, ": line 4: the label 'oak birch' of 2.jpg is a list, but an image has one "),
    ("file,label", {2: '2.jpg,"oak\u2028"x'}, ", line 4: the quotation marks of the row that begins here"),
    ("file,label", {2: "2.jpg,o\x85ak"}, ": line 4: the label 'o\\x85ak' of 2.jpg has a control character or a line"),
    ("file,label", {number: f"{number}.jpg,{number * 0.37}" for number in range(28)},
     ": the labels of 30 training images are 28 different numbers; only classes can be trained"),
    ("file,label", {2: "2.jpg,caf\xe9", 4: "4.jpg,cafe\u0301"}, ", lines 4 and 6: 'caf\\xe9' and 'cafe\\u0301' are"),
    ("file,label", {30: f"{'x' * 3000},oak"}, ": line 32: there is no file /"),
    ("file,label", {30: "3.jpg,oak\u200b"}, ": line 32: 3.jpg has the label 'oak\\u200b', but 'oak' in line 5"),
])
def test_lines_that_are_not_what_was_meant(judged, header, changed, message):
    """One line, which is not long, names the line of the table where the row begins."""
    more = "," * (header.count(",") - 1)
    code, said = judged(header, changed, more=lambda number: more and f"{more[1:]},x")
    [line] = said.splitlines()
    assert code == 1 and line.startswith(message) and len(line) < 500, line


def test_lines_that_are_meant(judged):
    """A cell of several lines, cells that are empty at the end, names with commas, and paths and labels of macOS."""
    code, said = judged("file,label,notes", {
        3: '3.jpg,"oak, red","two\nlines, and ""more"""', 5: '5.jpg,"oak, red",x,,', 7: "./7.jpg,caf\xe9,",
        30: "7.jpg,cafe\u0301,"}, more=lambda number: ",x")
    assert code == 0 and "'oak, red'" in said and "café 1 + 0" in said, said


def test_macos_paths_are_found(photos, tmp_path):
    """They are written in another form of Unicode. The shards are the same."""
    shutil.copytree(photos, tmp_path / "photos")
    rows, made = [("file", "label"), *((path, path.partition("/")[0]) for path in paths(photos))], []
    for form in ("NFC", "NFD"):
        table = tmp_path / "photos" / f"{form}.csv"
        write(table, [[unicodedata.normalize(form, cell) for cell in row] for row in rows])
        made.append(prepared(table, tmp_path / form, "--validation_fraction=0.3"))
    assert made[0] == made[1]


WORDS = "train, training, val, valid, validation, test, testing"


@pytest.mark.parametrize(("column", "values"), [
    ("is_valid", ("False", "True")), ("Usage", ("Training", "PublicTest")), ("set", ("a", "b")), ("fold", "12"),
    ("k-fold", "12"), ("split_2", ("train", "holdout")), ("isTest", "01")])
def test_a_column_that_may_divide_the_images_is_not_ignored(judged, column, values):
    for flags in ((), ("--validation_fraction=0.3",)):
        code, said = judged(f"file,label,{column}", flags=flags, more=lambda number: f",{values[number % 5 == 3]}")
        line, word = (5, values[1]) if values[0].startswith(("T", "t")) else (2, values[0])
        assert code == 1 and said == (
            f", line {line}: the column {column!r} may divide the images, but {word!r} is none of {WORDS}; write these "
            "words into a column split, or remove this column\n")


@pytest.mark.parametrize(("column", "words"), [
    ("set", ("Train", "test")), ("Subset", ("training", "val")), ("purpose", ("train", "valid"))])
def test_a_column_of_the_words_for_splits_divides_the_images(judged, tmp_path, column, words):
    """Whatever its name is, and it is said. Another one beside it is refused, and so is a fraction."""
    def more(number):
        return f",Ann,{words[number % 5 == 3]}"

    code, said = judged(f"file,label,author,{column}", more=more)
    assert code == 1 and f"already has validation images ({words[1].lower()} in the column {column}); remove" in said
    code, said = judged(f"file,label,split,{column}", flags=(), more=lambda number: f",train{more(number)[4:]}")
    assert code == 1 and said.startswith(f", line 1: the columns 'split' and {column!r} mean the same")
    code, said = judged(f"file,label,author,{column}", flags=(), more=more)
    assert code == 0 and f"the column {column} divides the images\n" in said
    split = open_dataset(tmp_path / "o").validation
    assert sorted(split.names()) == sorted(f"{number}.jpg" for number in range(30) if number % 5 == 3)


def test_a_column_that_does_not_divide_the_images(judged):
    """Although most of its words are those of splits."""
    assert judged("file,label,author", more=lambda number: f",{'train' if number else 'Ann'}")[0] == 0


def test_test_images_alone(photos, tmp_path, capsys):
    """A table and folders of them give the same shards, all for evaluation. So does a single class."""
    shutil.copytree(photos, tmp_path / "set" / "test")
    rows = [(path, path.split("/")[1], "test") for path in paths(tmp_path / "set")]
    table = write(tmp_path / "set" / "labels.csv", [("file", "label", "split"), *rows])
    for source in (table, tmp_path / "set"):
        for flags in ((), ("--validation_fraction=0.5",)):
            assert command(f"--source={source}", f"--output={tmp_path}/o", *flags) == 1
            assert "--validation_fraction=1 prepares test images alone, for --mode=evaluate" in capsys.readouterr().err
    assert prepared(table, tmp_path / "1", "--validation_fraction=1").keys() == prepared(
        tmp_path / "set", tmp_path / "2", "--validation_fraction=1").keys()
    shutil.rmtree(tmp_path / "set" / "test" / CLASSES[0])
    shutil.rmtree(tmp_path / "set" / "test" / CLASSES[1])
    assert prepared(tmp_path / "set", tmp_path / "3", "--validation_fraction=1")
    for number, samples in (("1", 24), ("2", 24), ("3", 8)):
        opened = open_dataset(tmp_path / number, fraction=1)
        assert (opened.train.samples, opened.validation.samples) == (0, samples)
        assert opened.classes == CLASSES[-(samples // 8):]


@pytest.mark.parametrize("has_split", [False, True])
def test_a_table_is_read_in_place_as_it_is_prepared(photos, tmp_path, has_split):
    """The same images in the same splits with the same labels, in the table's folder, above it, or with a whole path.
    """
    below = tmp_path / "tables"
    below.mkdir()
    (below / "mine").symlink_to(photos)
    words = ["train", "val", "train", "test"]
    rows = [(("mine/", "../tables/mine/", f"{below}/mine/")[number % 3] + path, path.partition("/")[0],
             words[number % 4]) for number, path in enumerate(paths(photos))]
    header = ("image", "species", "split")
    table = write(below / "labels.csv", [row[:3 if has_split else 2] for row in (header, *rows)])
    flags = [] if has_split else ["--validation_fraction=0.3"]
    prepared(table, tmp_path / "o", "--label_column=species", *flags)
    theirs, ours = open_dataset(tmp_path / "o"), open_named(str(table), fraction=0.3, label_column="species")
    assert ours.classes == theirs.classes == CLASSES and ours.train.fraction == (0 if has_split else 0.3)
    for name in ("train", "validation"):
        made, read = (sorted(getattr(one, name).records(np.arange(getattr(one, name).samples)))
                      for one in (theirs, ours))
        assert made == read and len(read) == getattr(ours, name).samples > 0
    assert facts.of_dataset(ours)[:len(ours.notes)] == list(ours.notes)
    assert ["images of the split test" in note for note in ours.notes] == [True] * has_split


def test_a_table_in_place_has_its_problems_named(photos, tmp_path):
    (tmp_path / "mine").symlink_to(photos)
    rows = [(f"mine/{path}", path.partition("/")[0]) for path in paths(photos)]
    for changed, flags, message in (
            ([("file", "label"), ("mine/gone.jpg", "dog"), *rows], {}, "line 2: there is no file"),
            ([("file", "species"), *rows], {}, "; --label_column=species says which one has the classes"),
            ([("file", "label"), rows[0], rows[-1]], {}, "has no class with two images"),
            ([("file", "species"), *rows, ("phone.jpg", "dog")], {"label_column": "species"},
             "--source={0}/labels.csv --output={0}/labels.csv-prepared --format=tfrecord --label_column=species "
             "--validation_fraction=0.3`")):
        (tmp_path / "phone.jpg").write_bytes(encode(picture(1), "HEIF"))
        table = write(tmp_path / "labels.csv", changed)
        with pytest.raises(UserError) as raised:
            open_named(str(table), fraction=0.3, **flags)
        assert message.format(tmp_path) in str(raised.value) and "--source:" not in str(raised.value)
    assert not is_table(str(tmp_path / "none.csv")) and not is_table("digits")


def test_the_images_of_a_table_are_staged(photos, tmp_path):
    """Those of the table alone, and none that lies elsewhere."""
    shutil.copytree(photos, tmp_path / "mine")
    (tmp_path / "disk").mkdir()
    rows = [(f"mine/{path}", path.partition("/")[0]) for path in paths(photos)]
    dataset = open_named(str(write(tmp_path / "labels.csv", [("file", "label"), *rows])), fraction=0.3)
    (tmp_path / "mine" / "dog" / "other.jpg").write_bytes(b"not in the table")
    copied = local_copy.stage(dataset, tmp_path / "disk")
    assert paths(copied.folder) == sorted(file for file, _ in rows) and copied.folder.is_relative_to(tmp_path / "disk")
    for split in ("train", "validation"):
        ours, theirs = (getattr(one, split) for one in (dataset, copied))
        assert [*ours.records(np.arange(ours.samples))] == [*theirs.records(np.arange(ours.samples))]
    (tmp_path / "deep").mkdir()
    outside = open_named(str(write(tmp_path / "deep" / "labels.csv", [("file", "label"), *(
        (f"../{file}", label) for file, label in rows)])), fraction=0.3)
    with pytest.raises(UserError, match=r"^--stage_dir: \.\./mine/.* lies outside of the folder of .*/deep"):
        local_copy.stage(outside, tmp_path / "disk")


@pytest.mark.trainings
def test_a_table_trains_on_two_workers_and_is_evaluated(photos, tmp_path):
    (tmp_path / "mine").symlink_to(photos)
    rows = [(f"mine/{path}", path.partition("/")[0]) for path in paths(photos)]
    table = write(tmp_path / "labels.csv", [("file", "species"), *rows])
    done = run("mpirun", 2, ROOT / "train.py", f"--data_dir={table}", "--label_column=species", "--model=convnet",
               "--image_size=16", "--epochs=1", f"--output_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    trained = json.loads(done.stdout)
    assert trained["train_samples"] + trained["val_samples"] == 24
    done = run("python", 1, ROOT / "train.py", "--mode=evaluate", f"--checkpoint={tmp_path}/run/checkpoints")
    assert json.loads(done.stdout)["val_top1_count"] == trained["val_top1_count"], done.stderr
    done = run("python", 1, ROOT / "train.py", f"--data_dir={photos}", "--label_column=species")
    assert done.returncode == 2 and "give that as --data_dir=TABLE" in done.stderr
