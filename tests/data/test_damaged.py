"""Which images DALI cannot decode: by how they were damaged, however many are decoded at a time."""
import os

import numpy as np
import pytest

from data import damaged
from tests.rigs.pictures import encode, fill, picture

BAD = {"text.jpg": b"not an image", "empty.png": b"", "half.jpg": encode(picture(1))[:300],
       "short.png": encode(picture(2), "PNG")[:-50]}
GOOD = {"grey.jpg": encode(picture(3).convert("L")), "alpha.png": encode(picture(4).convert("RGBA"), "PNG"),
        "cmyk.jpg": encode(picture(5).convert("CMYK")), "progressive.jpg": encode(picture(6), progressive=True)}


@pytest.fixture
def paths(tmp_path):
    """24 sound pictures with the bad ones and the odd ones among them."""
    fill(tmp_path, 8)
    for name, content in (BAD | GOOD).items():
        (tmp_path / "dog" / name).write_bytes(content)
    return sorted(str(path) for path in tmp_path.glob("*/*"))


@pytest.mark.parametrize("threads", [1, 3, 40])
def test_the_damaged_ones_are_found(paths, threads):
    done = []
    fails = damaged.are_damaged(paths, threads, done.append)
    assert [os.path.basename(path) for path in np.array(paths)[fails]] == sorted(BAD)
    assert sum(done) == len(paths) == 32 and not damaged.are_damaged([], threads, done.append).size


def test_only_what_is_new_or_has_changed_is_decoded_again(paths, tmp_path, monkeypatch):
    """By the time, by the size, by the name; a cache that cannot be written is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    states = damaged.states(paths)
    damaged.remember(states[:16])
    damaged.remember(states[16:])
    assert np.isin(states, damaged.remembered()).all() and len(np.unique(states)) == 32
    os.utime(paths[3], ns=(0, 12345))
    with open(paths[7], "ab") as file:
        file.write(b"\0")
    os.utime(paths[7], ns=(0, os.stat(paths[8]).st_mtime_ns))
    os.rename(paths[9], renamed := f"{paths[9]}.jpg")
    paths[9] = renamed
    assert np.flatnonzero(~np.isin(damaged.states(paths), damaged.remembered())).tolist() == [3, 7, 9]
    monkeypatch.setattr(damaged, "REMEMBERED", 10)
    damaged.remember(states[:4])
    assert damaged.remembered().tolist() == [*states[26:], *states[:4]]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
    damaged.remember(states)
    assert not len(damaged.remembered())


def test_a_file_that_cannot_be_opened_is_an_error(paths):
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        damaged.are_damaged([*paths, "gone.jpg"], 2, lambda count: None)
