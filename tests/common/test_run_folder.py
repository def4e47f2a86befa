"""What replaces what in a run's folder, and when a run has ended."""
import json
from pathlib import Path

import pytest

from common.run_folder import OF_A_RUN, RunFolder

FOLDERS = ("checkpoints", "tensorboard")


def filled(folder: Path, text: str, names=OF_A_RUN) -> Path:
    """A run's folder whose files have this text."""
    for name in names:
        file = folder / name / "file" if name in FOLDERS else folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_starts_over_replaces_the_one_before_only_when_it_is_told_to(tmp_path):
    before = content(filled(tmp_path, "old", [name for name in OF_A_RUN if name != "augmentations.png"]))
    assert "predictions.csv" in before
    (tmp_path / "notes.txt").write_text("mine")
    for ends in (RunFolder.restore, RunFolder.forget):
        files = RunFolder(tmp_path)
        files.set_aside()
        assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", ".replaced"}
        filled(tmp_path, "new")
        ends(files)
        expected = before if ends is RunFolder.restore else dict.fromkeys((*before, "augmentations.png"), "new")
        assert content(tmp_path) == expected | {"notes.txt": "mine"}
        RunFolder(tmp_path).restore()  # nothing is left to bring back
        assert content(tmp_path) == expected | {"notes.txt": "mine"}


def test_wherever_a_process_is_killed_no_file_of_the_run_before_is_lost(tmp_path, monkeypatch):
    """A rename that fails stands for the kill. The next process brings back the old run, or leaves the new one."""
    rename, left = Path.rename, []

    def counted(path, target):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rename(path, target)

    new = content(filled(tmp_path / "new", "new", OF_A_RUN[::2]))
    for renames in range(3 * len(OF_A_RUN)):
        for ends in (RunFolder.restore, RunFolder.forget):
            folder, is_killed, left[:] = tmp_path / f"{renames}-{ends.__name__}", False, [1] * renames
            old = content(filled(folder, "old"))
            monkeypatch.setattr(Path, "rename", counted)
            try:
                RunFolder(folder).set_aside()
                filled(folder, "new", OF_A_RUN[::2])
                ends(RunFolder(folder))
            except KeyboardInterrupt:
                is_killed = True
            monkeypatch.undo()
            RunFolder(folder).restore()
            assert content(folder) == (old if is_killed or ends is RunFolder.restore else new)
    assert left  # the last ones were not killed


def test_only_a_training_ends_a_training(tmp_path):
    """An evaluation of a checkpoint wrote the second one."""
    for summary, ends in (({"val_top1": 0.5, "advice": []}, True), ({"val_top1": 0.5}, False),
                          ({"diverged": True, "advice": ["x"]}, True)):
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        assert RunFolder(tmp_path).ending() == (summary if ends else {})
    (tmp_path / "summary.json").unlink()
    assert RunFolder(tmp_path).ending() == {}


@pytest.mark.parametrize("is_saved", [True, False])
def test_what_is_removed_is_not_written_later(is_saved, tmp_path):
    files = RunFolder(tmp_path)
    files.write("outcomes.json", {"epoch": 1})
    if is_saved:
        files.save()
    files.remove("outcomes.json")
    files.save()
    assert [*tmp_path.iterdir()] == []
