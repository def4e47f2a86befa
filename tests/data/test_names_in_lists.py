"""Names of classes that have commas, in lines that list classes with commas."""
import re

from data import facts
from data.dataset import open_dataset
from reporting.progress import result_lines
from tests.rigs.pictures import fill


def test_a_name_with_a_comma_is_quoted(tmp_path):
    fill(tmp_path, 12, classes=("cat", "dog, small"))
    [sizes] = [line for line in facts.of_dataset(open_dataset(tmp_path)) if "images by class: " in line]
    assert re.search(r": cat \d+ \+ \d+, 'dog, small' \d+ \+ \d+$", sizes)
    weakest = [{"class": name, "recall": 0.5, "correct": 1, "images": 2} for name in ("dog, small", "cat")]
    _, line = result_lines({
        "val_top1": 0.5, "val_samples": 4, "val_guess_count": 2, "val_top1_count": 2, "val_loss": 1.0, "seconds": 1.0,
        "balanced_top1": 0.5, "balanced_samples": 4.0, "weakest_classes": weakest}, 2)
    assert line.startswith("weakest classes: 'dog, small': 50.0% (1 of 2), cat: 50.0% (1 of 2); ")
