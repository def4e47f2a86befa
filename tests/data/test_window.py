"""The window in --stage_dir: it stays for the next training, and holds what the data far away hold."""
import json
import os
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest
from conftest import ROOT

from data import order
from data.dataset import Window, open_dataset
from data.staging.window import CHECKSUM, FULL, Blocks, name_of, window_folder
from tests.rigs.web import serving

BLOCK = 50
BLOCKS = 10 + 8 + 11  # of files with 500, 400 and 537 samples
READER = f"""
import json, sys, zlib
from pathlib import Path
from data.dataset import Window, open_dataset
from data.staging.window import Blocks, name_of, window_folder
url, place, size = sys.argv[1:]
dataset = open_dataset(url)
folder = window_folder(Path(place), name_of(dataset, {BLOCK}), stays=True)
print(folder.name, flush=True)
split = dataset.in_window(Window(folder, int(size), 0, {BLOCK}, 0)).train
blocks, found = Blocks(split, split.window), 0
for block in range({BLOCKS}):
    blocks.ask([(block, 0)])
    for sample in range(split.samples):
        if blocks.of(sample) == block:
            found = zlib.crc32(blocks.example(sample), found)
print(json.dumps([found, blocks.requests]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(in_format, tmp_path):
    for name in "abc":
        shutil.copytree(in_format("tfrecord"), tmp_path / "served" / name)
    with serving(tmp_path / "served") as served:
        yield served


def reader(server, place, name="a", size=2_000_000) -> subprocess.Popen:
    """A process that reads all training samples of a dataset, and then keeps its window open."""
    return subprocess.Popen([sys.executable, "-c", READER, f"{server.url}/{name}", place, str(size)],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def read(*arguments, **options) -> tuple[str, int, int]:
    """The name of the window's folder, a checksum of all samples, and the number of requests."""
    name, found = reader(*arguments, **options).communicate()[0].splitlines()
    return name, *json.loads(found)


@pytest.fixture
def content(in_format) -> int:
    """The checksum of all samples, read from the files."""
    split, found = open_dataset(in_format("tfrecord")).train, 0
    for path, entries in zip(split.paths, split.entries, strict=True):
        stored = path.read_bytes()
        for offset, size in entries[:, :2].tolist():
            found = zlib.crc32(split.kind.example(stored[offset:offset + size]), found)
    return found


def test_a_window_stays_and_a_block_with_a_flipped_byte_is_fetched_once_more(server, content, tmp_path):
    place = tmp_path / "disk"
    name, *found = read(server, place)
    assert found == [content, BLOCKS]
    assert read(server, place) == (name, content, 0)
    block = place / f"bigbatch-{os.getuid()}" / name / "train" / "7"
    stored = block.read_bytes()
    block.write_bytes(stored[:9000] + bytes([stored[9000] ^ 4]) + stored[9001:])
    assert read(server, place) == (name, content, 1)
    block.write_bytes(stored[:-20])
    assert read(server, place) == (name, content, 1) and block.read_bytes() == stored
    file = server.folder / "a" / "train 1.tfrecord"
    os.utime(file, ns=(1, 1))  # its tag
    other, *found = read(server, place)
    assert found == [content, BLOCKS] and other != name


def test_a_record_that_came_damaged_is_fetched_once_more(server, digit_records, tmp_path):
    """As data.prepare's checksums tell. The block's own checksum is that of what came."""
    path = server.folder / "a" / "train 0.tfrecord"
    path.with_name(f"{path.name}.crc32").write_text(
        "".join(f"{zlib.crc32(image):08x} {label}\n" for image, label in digit_records["train"][:500]))
    dataset = open_dataset(f"{server.url}/a")
    folder = window_folder(tmp_path / "disk", name_of(dataset, BLOCK), stays=True)
    split = dataset.in_window(Window(folder, 10**9, 0, BLOCK, 0)).train
    blocks, right, damaged = Blocks(split, split.window), path.read_bytes(), []

    def failing(handler, name):
        if not damaged:
            start, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
            damaged.append(right[start:start + 300] + bytes([right[start + 300] ^ 4]) + right[start + 301:end + 1])
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{end}/{len(right)}")
            handler.send_header("Content-Length", str(len(damaged[0])))
            handler.send_header("ETag", split.paths[0].tag)
            handler.end_headers()
            handler.wfile.write(damaged[0])
            return True

    server.failing = failing
    blocks.ask([(0, 0)])
    examples = [blocks.example(sample) for sample in range(BLOCK)]
    assert all(image in example for (image, _), example in zip(digit_records["train"], examples, strict=False))
    assert len(damaged) == 1 and blocks.requests == 2


def test_a_window_gives_way_to_that_of_other_data_unless_it_is_in_use(server, content, tmp_path):
    """The digits in a, b and c have other tags, and a smaller window keeps fewer blocks."""
    place, private = tmp_path / "disk", tmp_path / "disk" / f"bigbatch-{os.getuid()}"
    first, *_ = read(server, place, "a")
    in_use = reader(server, place, "b")
    name = in_use.stdout.readline().strip()
    assert [path.name for path in private.glob("[!.]*")] == [name] != [first]
    third, *found = read(server, place, "c")
    assert {path.name for path in private.glob("[!.]*")} == {name, third} and found == [content, BLOCKS]
    assert json.loads(in_use.communicate()[0]) == [content, BLOCKS]
    assert read(server, place, "b")[1:] == (content, 0)  # it has stayed
    assert read(server, place, "b", size=900_000)[1] == content
    assert 600_000 < sum(path.stat().st_size for path in private.glob("*/*/*")) <= 900_000


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_small_window_keeps_the_blocks_that_are_needed_next(server, tmp_path, repeats):
    """The fewest requests are those of a window that deletes the block with the latest next use (Belady 1966)."""
    size, epochs = 500_000, 12
    window = Window(tmp_path, size, 0, BLOCK, 0, group=4, repeats=repeats)
    split = open_dataset(f"{server.url}/a").in_window(window).train
    blocks = Blocks(split, split.window)
    samples = order.stream(split, 0, np.arange(epochs * split.samples), BLOCK, 4, repeats)
    in_epoch = np.arange(len(samples)) // split.samples
    wanted = list(dict.fromkeys(zip(blocks.of(samples).tolist(), in_epoch.tolist(), strict=True)))
    uses = [block for block, _ in wanted]
    kept, fewest = {}, 0
    for place, (block, epoch) in enumerate(wanted[:len(wanted) // 2]):
        blocks.ask([(block, epoch)])
        stored = len(blocks._asked[block].result()[1]) + CHECKSUM.size
        if block not in kept:
            fewest += 1
            following = {other: [*uses[place + 1:], other].index(other) for other in kept}
            for other in sorted(kept, key=following.get, reverse=True):
                if sum(kept.values()) + stored <= FULL * split.window.size:
                    break
                del kept[other]
            kept[block] = stored
    assert len(kept) < BLOCKS and len(set(uses)) == BLOCKS
    assert fewest <= blocks.requests <= 1.15 * fewest
