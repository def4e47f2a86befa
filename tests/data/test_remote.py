"""Training from a web server and from a bucket: what is fetched, what is kept, and what happens when that fails."""
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter

import numpy as np
import psutil
import pytest
from conftest import DIGITS, ROOT, SmallDisk, printed_json, rows, run, start, train, trainers, weights

from common.errors import UserError
from data import order
from data.dataset import open_dataset
from data.staging import remote
from data.staging.remote import Missing, RemoteError, RemotePath
from data.staging.window import REQUESTS
from reporting.outcomes import WORST
from tests.rigs.trainings import wait_for
from tests.rigs.web import serving, tag

pytestmark = pytest.mark.trainings

BLOCK = 15
FLAGS = (DIGITS, "--model=convnet", "--epochs=3", "--batch_norm_span=auto", "--deterministic",
         f"--shuffle_block={BLOCK}", "--shuffle_group=4")
BLOCKS = sum(-(-size // BLOCK) for size in (500, 400, 537, 353))


@pytest.fixture
def server(in_format, tmp_path):
    """A server of the digits as TFRecord and RecordIO."""
    for name in ("tfrecord", "recordio"):
        shutil.copytree(in_format(name), tmp_path / "served" / name)
    with serving(tmp_path / "served") as served:
        yield served


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", (0.01, 0.01))


@pytest.fixture(scope="module")
def from_disk(in_format, train_once):
    return train_once(*FLAGS, f"--data_dir={in_format('tfrecord')}")


def losses(folder) -> list[tuple]:
    return [(row["train_loss"], row["val_loss"]) for row in rows(folder)]


def data_requests(server) -> list[tuple[str, int]]:
    return [(name, size) for name, size in server.asked if name.endswith((".tfrecord", ".rec")) and size > 3000]


@pytest.mark.parametrize("name", ["tfrecord", "recordio"])
def test_a_training_is_that_from_a_disk_and_what_fits_is_fetched_once(server, from_disk, tmp_path, name):
    train(*FLAGS, f"--data_dir={server.url}/{name}", f"--output_dir={tmp_path}/run")
    assert losses(tmp_path / "run") == losses(from_disk)
    for ours, theirs in zip(weights(tmp_path / "run").values(), weights(from_disk).values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    fetched = data_requests(server)
    assert len(fetched) == BLOCKS  # of both splits, in three epochs
    for_errors = 3 * 2 * WORST  # of each evaluation, the names and images of the worst
    assert len(server.asked) <= BLOCKS + for_errors + 20  # and none for the name of each validation image
    folder = server.folder / name
    assert sum(size for _, size in fetched) == sum(
        path.stat().st_size for path in folder.iterdir() if path.suffix in (".tfrecord", ".rec"))


def sizes(folder) -> dict:
    """The bytes of each file in a folder. Raises FileNotFoundError if one goes meanwhile."""
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_a_window_keeps_what_is_read_again_soonest(server, tmp_path):
    """A window of about half of the training set fetches less than half of it in each epoch after the first."""
    flags = ("--epochs=6", "--micro_batch_size=8", f"--stage_dir={tmp_path}/disk", "--stage_gb=0.0016",
             f"--data_dir={server.url}/tfrecord")
    most, process = 0, start(tmp_path / "run", 1, (*FLAGS, *flags))
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            found = sizes(tmp_path / "disk")
            if found == sizes(tmp_path / "disk"):  # files that come and go meanwhile were never there together
                most = max(most, sum(found.values()))
        time.sleep(0.02)
    assert process.returncode == 0
    size = sum(path.stat().st_size for path in (server.folder / "tfrecord").glob("train*.tfrecord"))
    window = (1.6e6 / 2) * size / (size + 294_937)  # half is for the files of the spool
    fetched = sum(number for name, number in data_requests(server) if name.startswith("train"))
    assert size < fetched <= size * (1 + 5 * (1.04 - window / size))
    assert 0.5e6 < most <= 1.6e6
    written = rows(tmp_path / "run", "times.jsonl")
    assert 0.9 * fetched <= sum(row["fetched"] for row in written) <= fetched  # the rest was read ahead at the end
    blocks, hits = 6 * sum(-(-number // BLOCK) for number in (500, 400, 537)), sum(row["hits"] for row in written)
    assert 0.2 * blocks < hits <= blocks - sum(row["requests"] for row in written)
    assert window_files(tmp_path / "disk") == {"train", "validation"}


def window_files(place) -> set[str]:
    """The names in the only folder that this user has in a --stage_dir."""
    folder, = (path for path in (place / f"bigbatch-{os.getuid()}").iterdir() if path.is_dir())
    return {*os.listdir(folder)}


def is_idle(process: psutil.Process, seconds=0.5) -> bool:
    before = sum(process.cpu_times())
    time.sleep(seconds)
    return sum(process.cpu_times()) - before < 0.1 * seconds


def test_a_server_that_pauses_is_the_limit_that_the_report_names(server, tmp_path):
    """It answers half of the requests, and the others after training has had nothing to do for some seconds."""
    answers = threading.Event()

    def pausing(handler, name):
        if len(data_requests(server)) >= 50:
            answers.wait()

    server.failing = pausing
    process = start(tmp_path / "run", 1, (*FLAGS, "--epochs=1", "--micro_batch_size=8",
                                          f"--data_dir={server.url}/tfrecord"))
    wait_for(lambda: "start-up: " in (tmp_path / "run.log").read_text(), process)
    began = time.monotonic()
    [trainer] = trainers(process)
    wait_for(lambda: is_idle(trainer), process)
    time.sleep(max(3, time.monotonic() - began))  # as long as the steps before
    answers.set()
    assert process.wait() == 0
    row, = rows(tmp_path / "run", "times.jsonl")
    assert 0.05 < row["storage"] < 1
    assert "storage limits the speed" in (tmp_path / "run" / "report.html").read_text()


def test_two_workers_share_what_one_fetches(server, from_disk, tmp_path):
    train(*FLAGS, f"--data_dir={server.url}/tfrecord", f"--stage_dir={tmp_path}/disk", "--stage_gb=1",
          f"--output_dir={tmp_path}/run", kind="mpirun", workers=2)
    np.testing.assert_allclose(losses(tmp_path / "run")[0], losses(from_disk)[0], rtol=1e-3)  # before rounding grows
    assert len(data_requests(server)) == BLOCKS


def test_a_killed_training_leaves_its_window_and_resumes_to_the_bit(server, from_disk, tmp_path):
    flags = (*FLAGS, f"--data_dir={server.url}/tfrecord", f"--stage_dir={tmp_path}/disk", "--stage_gb=1",
             "--checkpoint_every=0.3")
    process = start(tmp_path / "run", 1, flags)
    while not list((tmp_path / "run").glob("checkpoints/step*")) and process.poll() is None:
        time.sleep(0.05)
    [worker] = trainers(process)
    writers = worker.children(recursive=True)
    worker.kill()
    process.wait()
    psutil.wait_procs(writers, 20)
    deadline = time.monotonic() + 300  # a writer may have started after they were listed
    while not window_files(tmp_path / "disk") <= {"train", "validation"}:
        assert time.monotonic() < deadline, window_files(tmp_path / "disk")
        time.sleep(0.1)
    train(*flags, f"--output_dir={tmp_path}/run")
    assert losses(tmp_path / "run") == losses(from_disk)
    requests = len(data_requests(server))
    assert requests <= BLOCKS + REQUESTS  # those under way at the kill are asked for again
    train(*flags, f"--output_dir={tmp_path}/again")
    assert len(data_requests(server)) == requests


def test_evaluation_and_plan_take_addresses(server, from_disk, tmp_path):
    url = f"--data_dir={server.url}/tfrecord"
    done = train("--mode=evaluate", f"--checkpoint={from_disk}/checkpoints", url)
    assert printed_json(done)["val_loss"] == rows(from_disk)[-1]["val_loss"]
    assert '"train_samples": 1437' in train(DIGITS, "--dry_run", url).stdout


def test_a_server_that_is_busy_is_asked_again(server, capsys):
    failures = iter([503, 429, 500])

    def failing(handler, path):
        if code := next(failures, None):
            handler.send_response(code)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        return code

    path = RemotePath(f"{server.url}/tfrecord/train 0.tfrecord").inspected()
    server.failing = failing
    content = (server.folder / "tfrecord" / "train 0.tfrecord").read_bytes()
    with pytest.raises(RemoteError, match="500"):
        path.read_range(10, 50)
    assert path.read_range(10, 50) == content[10:50]
    assert capsys.readouterr().err.count("trying again in 0.01 s") == 2


@pytest.mark.parametrize("end", ["early", "short"])
def test_an_answer_that_is_too_short_never_comes_through(server, end):
    def failing(handler, path):
        handler.send_response(206)
        handler.send_header("Content-Range", "bytes 10-49/415144" if end == "early" else "bytes 10-19/415144")
        handler.send_header("Content-Length", "40" if end == "early" else "10")
        handler.send_header("ETag", tag(server.folder / "tfrecord" / "train 0.tfrecord"))
        handler.end_headers()
        handler.wfile.write(b"x" * 10)
        handler.close_connection = True
        return True

    path = RemotePath(f"{server.url}/tfrecord/train 0.tfrecord").inspected()
    server.failing = failing
    with pytest.raises(RemoteError, match=r"train 0\.tfrecord"):
        path.read_range(10, 50)


def test_an_object_that_changes_is_named(server):
    path = RemotePath(f"{server.url}/tfrecord/train 0.tfrecord").inspected()
    file = server.folder / "tfrecord" / "train 0.tfrecord"
    os.utime(file, ns=(1, 1))
    with pytest.raises(UserError, match=r"train 0\.tfrecord has changed since training started"):
        path.read_range(10, 50)


def test_training_ends_with_the_name_of_what_cannot_be_fetched(server, tmp_path):
    """After the start: the index says that the file is there."""
    def failing(handler, path):
        if path == "train 1.tfrecord":
            handler.send_error(403)
        return path == "train 1.tfrecord"

    server.failing = failing
    done = run("mpirun", 2, ROOT / "train.py", *FLAGS, f"--data_dir={server.url}/tfrecord",
               f"--output_dir={tmp_path}/run")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{server.url}/tfrecord/train 1.tfrecord: " in done.stderr


def test_a_record_with_another_checksum_is_named(server, digit_records, tmp_path):
    """As data.prepare stores them. Sample 777 is record 277 of the second file."""
    folder = server.folder / "tfrecord"
    for split, name, first, last in (("train", "train 1", 500, 900), ("validation", "validation 0", 0, 353)):
        lines = [f"{zlib.crc32(image):08x} {label}\n" for image, label in digit_records[split][first:last]]
        (folder / f"{name}.tfrecord.crc32").write_text("".join(lines))
    image, _ = digit_records["train"][777]
    path = folder / "train 1.tfrecord"
    path.write_bytes(path.read_bytes().replace(image, image[:-3] + b"abc"))
    done = run("python", 1, ROOT / "train.py", *FLAGS, f"--data_dir={server.url}/tfrecord",
               f"--output_dir={tmp_path}/run")
    assert done.returncode == 1
    assert "train 1.tfrecord, record 277 has another checksum than data.prepare stored" in done.stderr


@pytest.mark.parametrize(("flags", "problem"), [
    (["--data_dir={url}/nothing"], "nothing/dataset.json does not exist"),
    (["--data_dir={url}/tfrecord", "--shuffle_group=0"], "--shuffle_group"),
    (["--data_dir={url}/tfrecord", "--order=file", "--shuffle_group=0"], "--order=file is for LMDB and RecordIO"),
    (["--data_dir={lmdb}", "--stage_dir={disk}", "--stage_gb=1"], "cannot be fetched one by one"),
    (["--data_dir={url}/tfrecord", "--stage_gb=1"], "--stage_gb needs --stage_dir"),
])
def test_what_cannot_be_is_said(server, in_format, tmp_path, flags, problem):
    values = {"url": server.url, "lmdb": in_format("lmdb"), "disk": tmp_path}
    done = run("python", 1, ROOT / "train.py", *FLAGS, *(flag.format(**values) for flag in flags),
               f"--output_dir={tmp_path}/run")
    assert done.returncode in (1, 2)
    assert problem in done.stderr.splitlines()[-1], done.stderr


def test_a_full_disk_shrinks_the_window(server, from_disk, tmp_path):
    with SmallDisk("size=2500k") as disk:
        done = train(*FLAGS, f"--data_dir={server.url}/tfrecord", f"--stage_dir={disk.path}", "--stage_gb=0.004",
                     f"--output_dir={tmp_path}/run")
    assert done.stderr.count("what does not fit is fetched again") >= 1
    assert losses(tmp_path / "run") == losses(from_disk)


def test_a_bucket(server, from_disk, tmp_path, monkeypatch):
    """moto checks signatures and has S3's answers."""
    server_ = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", "0"], stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server_.stderr if "http://127.0.0.1" in line)
        endpoint = "http://127.0.0.1" + line.partition("http://127.0.0.1")[2].strip()
        import boto3

        client = boto3.client("s3", endpoint_url=endpoint, aws_access_key_id="key", aws_secret_access_key="secret",
                              region_name="us-east-1")
        client.create_bucket(Bucket="digits")
        for path in (server.folder / "tfrecord").iterdir():
            client.upload_file(str(path), "digits", f"a set/{path.name}")
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        train(*FLAGS, "--data_dir=s3://digits/a set", f"--output_dir={tmp_path}/run")
        assert losses(tmp_path / "run") == losses(from_disk)
        assert "secret" not in (tmp_path / "run" / "flags.txt").read_text()
        with pytest.raises(UserError, match=r"s3://digits/none/dataset\.json does not exist"):
            open_dataset("s3://digits/none")
        with pytest.raises(Missing):
            RemotePath("s3://digits/none").read_bytes()
    finally:
        server_.kill()
        server_.wait()


def test_a_bucket_without_credentials_is_one_line_at_once(monkeypatch):
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # as on a machine without a role
    done = run("python", 1, ROOT / "train.py", *FLAGS, "--data_dir=s3://digits/a set")
    line, = done.stderr.splitlines()
    assert done.returncode == 1 and "AWS_ACCESS_KEY_ID" in line and "127.0.0.1" not in line


def test_a_group_has_runs_of_consecutive_samples_and_each_sample_comes_once(in_format):
    split = open_dataset(in_format("tfrecord")).train
    found = order.permutation(split, 3, 1, BLOCK, 4)
    assert sorted(found.tolist()) == list(range(1437))
    starts = order.block_starts(split, BLOCK)
    assert starts[:3].tolist() == [0, 15, 30] and {500, 900} <= set(starts.tolist())
    blocks = np.searchsorted(starts, found, side="right")
    groups, first = [], 0
    for chosen in np.split(order.block_order(split, 3, 1, BLOCK), range(4, len(starts), 4)):
        size = sum(int(np.diff(starts, append=1437)[one]) for one in chosen)
        assert set(blocks[first:first + size] - 1) == set(chosen.tolist())
        groups.append(found[first:first + size])
        first += size
    changes = np.mean([np.mean(np.diff(one) != 1) for one in groups])
    assert changes > 0.95 and Counter(found.tolist()).most_common(1)[0][1] == 1
    assert (found != order.permutation(split, 3, 2, BLOCK, 4)).any()
