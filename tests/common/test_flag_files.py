"""Flag files as editors and shells write them, against absl's own reader of plain ones."""
import pytest
from absl import flags as absl_flags
from hypothesis import given, settings
from hypothesis import strategies as st

from common import flags
from common.errors import UsageError
from experiments.planned import lines_of
from plan import flags as train_flags
from plan import recipes

TEXT = "# Title\n--epochs=3\n--data_dir=digits\n"
ENCODED = {"plain": TEXT.encode(), "marked": TEXT.encode("utf-8-sig"), "Windows": TEXT.replace("\n", "\r\n").encode(
    "utf-8-sig")}
WRONG = {"latin-1": ("# Größe\n".encode("latin-1"), 1), "utf-16": (TEXT.encode("utf-16"), 1),
         "a name's bytes": (TEXT.encode() + b"--output_dir=/data/caf\xe9\n", 4)}


@pytest.mark.parametrize("kind", ENCODED)
def test_a_byte_order_mark_changes_nothing(kind, tmp_path):
    """Also in a file that another one reads, in a recipe's comment, and in a file of runs."""
    path, outer = tmp_path / "x.flags", tmp_path / "outer.flags"
    path.write_bytes(ENCODED[kind])
    outer.write_text(f"--flagfile={path}\n--seed=5\n")
    found, within = (train_flags.parse(["train.py", f"--flagfile={file}"]) for file in (path, outer))
    assert found.recipe.epochs == within.recipe.epochs == 3 and within.recipe.seed == 5
    assert recipes.read(path) == {"title": "Title", "epochs": "3", "data_dir": "digits"}
    path.write_bytes(ENCODED[kind].replace(b"# Title", b"").replace(b"--data_dir=digits", b""))
    assert lines_of(str(path)) == [{"epochs": "3.0"}]


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_not_utf_8_is_named_with_its_line(kind, tmp_path):
    content, line = WRONG[kind]
    path, outer = tmp_path / "x.flags", tmp_path / "outer.flags"
    path.write_bytes(content)
    outer.write_text(f"--flagfile={path}\n")
    for reads in (lambda: train_flags.parse(["train.py", f"--flagfile={path}"]), lambda: lines_of(str(path)),
                  lambda: train_flags.parse(["train.py", f"--flagfile={outer}"]), lambda: recipes.read(path)):
        with pytest.raises(UsageError) as raised:
            reads()
        assert str(raised.value) == f"{path}, line {line}, is not UTF-8; save the file as UTF-8"


lines = st.one_of(st.sampled_from(["", "  ", "# note", "// note", " # ", "--x=1", " --y ", "word", "--flagfile={inner}",
                                   "--", "--flagfile={outer}"]),
                  st.text(st.characters(exclude_characters="\r\n{}", exclude_categories=["Cs"]), max_size=9))


@settings(deadline=None)
@given(content=st.lists(lines, max_size=6), words=st.sampled_from(
    ["--flagfile={outer}", "--flagfile {outer}", "-flagfile={outer}"]))
def test_a_command_line_reads_as_with_absl(content, words, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    (folder / "inner").write_text("--z=3\n# note\n")
    (folder / "outer").write_text("\n".join(content).replace("{", f"{folder}/").replace("}", ""))
    argv = ["--a=1", *words.format(outer=folder / "outer").split(), "b"]
    read = absl_flags.FlagValues().read_flags_from_files
    assert read(flags.with_files(argv)) == read(argv)
