"""The logs of a run after damage: what can be read is kept, what cannot is named, and training goes on."""
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import rows

from common.files import in_memory
from common.run_folder import LAYERS, METRICS, OUTCOMES, RUN, STEPS, SUMMARY, TIMES, RunFolder
from reporting.run_log import RunLog
from tests.rigs.run_files import row
from training.observer import Evaluation, Update
from training.state import Progress

LAYER = {"dense/kernel": [1.5, 0.25, 1e-3]}


def started(folder, evaluations: int = 0) -> RunLog:
    """The log of a training of four steps per evaluation that starts, or resumes after so many evaluations."""
    progress = Progress(step=4 * evaluations, samples=1000 * evaluations, evaluations=evaluations,
                        evaluated=1000 * evaluations)
    log = RunLog(RunFolder(folder))
    log.start(SimpleNamespace(folder=folder, plan={"steps": 40}, flags_text="--model=convnet\n", progress=progress))
    return log


def evaluate(log: RunLog, *epochs: int) -> None:
    for epoch in epochs:
        for step in range(4 * epoch - 4, 4 * epoch):
            log.step(Update(step, step / 4, 250, 0.1, 0.9, 2.0, 0.5, layers={} if step else LAYER))
        log.evaluation(Evaluation(row(epoch), LAYER, {"compute": 0.75, "data": 0.25}, None))


@pytest.fixture
def tmp_path(tmp_path):
    """In memory if possible: a thousand damages write ten thousand files."""
    with tempfile.TemporaryDirectory(dir=in_memory(10**6) or tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def four(tmp_path):
    """A run after four evaluations. Its files, which a test may damage, by name."""
    evaluate(started(tmp_path), 1, 2, 3, 4)
    return {name: (tmp_path / name).read_bytes() for name in (METRICS, TIMES, LAYERS, STEPS)}


def damages(content: bytes):
    """Each damage of a file, and how many whole rows precede it."""
    lines = content.splitlines(keepends=True)
    begin = sum(map(len, lines[:-2]))
    for length in range(begin, len(content)):
        yield content[:length], content[:length + 1].count(b"\n")  # a row may lack its line end
    yield content[:begin] + bytes(len(content) - begin), len(lines) - 2
    yield bytes(len(content)), 0
    yield b"", 0
    yield None, 0


def test_damaged_logs_keep_their_whole_rows_and_grow_again(four, tmp_path, capfd):
    """Each log is cut at each byte of its last two rows, or its end or all of it is zeros, or it is missing."""
    for name, content in four.items():
        whole = content.splitlines(keepends=True)
        for number, (damaged, intact) in enumerate(damages(content)):
            if damaged is None:
                (tmp_path / name).unlink()
            else:
                (tmp_path / name).write_bytes(damaged)
            log = started(tmp_path, 4)
            named = capfd.readouterr().err
            torn = damaged is not None and damaged[sum(map(len, whole[:intact])):].strip()
            assert (f"{name}: line {intact + 1} is damaged" in named) == bool(torn), (name, damaged, named)
            lacking = f"{METRICS} lacks {4 - intact} of the 4 evaluations"
            assert (lacking in named) == (name == METRICS and intact < 4), named
            kept = b"".join(whole[:intact])
            assert ((tmp_path / name).read_bytes() if (tmp_path / name).exists() else b"") == kept
            if number % 16 == 0 or damaged is None:
                evaluate(log, 5)
                found = (tmp_path / name).read_bytes()
                assert found.startswith(kept) and found.count(b"\n") == intact + (4 if name == STEPS else 1)
                assert [row["epoch"] for row in rows(tmp_path, name)][-1] == (4.75 if name == STEPS else 5)
                for other, text in four.items():
                    (tmp_path / other).write_bytes(text)


def test_a_damaged_row_in_the_middle_is_left_out_alone(four, tmp_path, capfd):
    lines = four[METRICS].splitlines(keepends=True)
    (tmp_path / METRICS).write_bytes(lines[0] + bytes(len(lines[1])) + b"\n" + lines[2] + lines[3])
    started(tmp_path, 3)
    assert (tmp_path / METRICS).read_bytes() == lines[0] + lines[2]  # by samples, not by count
    errors = capfd.readouterr().err
    assert f"{tmp_path}/metrics.jsonl: line 2 is damaged" in errors and "lacks 1 of the 3 evaluations" in errors
    assert len(rows(tmp_path, TIMES)) == 3 and len(rows(tmp_path, LAYERS)) == 4 and len(rows(tmp_path, STEPS)) == 12


def test_damaged_json_is_named_and_skipped(tmp_path, capfd):
    for name in (SUMMARY, RUN, OUTCOMES):
        files = RunFolder(tmp_path)
        files.write(name, {"diverged": False, "text": "x"})
        files.save()
        content = (tmp_path / name).read_bytes()
        assert files.read(name) == {"diverged": False, "text": "x"} and not capfd.readouterr().err
        for damaged in (*(content[:length] for length in range(content.rindex(b"}"))), bytes(len(content)), b"[]"):
            (tmp_path / name).write_bytes(damaged)
            assert RunFolder(tmp_path).read(name) == {}
            assert capfd.readouterr().err.startswith(f"bigbatch: warning: {tmp_path}/{name} is damaged")
    started(tmp_path)
    assert not (tmp_path / SUMMARY).exists() and len(capfd.readouterr().err.splitlines()) == 1
    (tmp_path / SUMMARY).write_text('{"val_top1": 0.5, "advice": []}')
    started(tmp_path)
    assert (tmp_path / SUMMARY).exists() and not capfd.readouterr().err


def test_a_log_that_is_deleted_meanwhile_is_written_again(tmp_path):
    log = started(tmp_path)
    evaluate(log, 1, 2)
    (tmp_path / METRICS).unlink()
    evaluate(log, 3)
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2, 3]


def test_what_training_writes_at_the_moment_is_no_damage_to_a_reader(four, tmp_path, capfd):
    (tmp_path / METRICS).write_bytes(four[METRICS][:-7])
    assert len(RunFolder(tmp_path, reader="report").rows(METRICS)) == 3 and not capfd.readouterr().err
    (tmp_path / METRICS).write_bytes(b"torn\n" + four[METRICS])
    assert len(RunFolder(tmp_path, reader="report").rows(METRICS)) == 4
    assert capfd.readouterr().err == f"report: warning: {tmp_path}/metrics.jsonl: line 1 is damaged and left out\n"
    assert (tmp_path / METRICS).read_bytes().startswith(b"torn")  # a reader changes nothing


def test_a_training_without_a_checkpoint_starts_its_logs_anew(four, tmp_path):
    started(tmp_path)
    assert all(not rows(tmp_path, name) for name in four)


def test_rows_are_the_same_when_they_are_kept(four, tmp_path):
    started(tmp_path, 4)
    assert all((tmp_path / name).read_bytes() == content for name, content in four.items())
    assert json.loads(four[LAYERS].splitlines()[0]) == {"epoch": 0, "samples": 0, "layers": LAYER}
