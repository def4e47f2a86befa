"""The page of --mode=predict --output_dir=FOLDER, in a real browser."""
import base64
import io
import json
import re
import subprocess

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from inference import predictions
from reporting.outcomes import thumbnail
from tests.reporting.test_browser import browser
from tests.rigs.pictures import encode

# Applies an order and a filter, and shows the captions that are left.
CHOOSER = """<script>
const find = name => document.querySelector(".gallery " + name), told = [];
for (const [order, word] of [["", ""], ["-1", ""], ["1", "B.JPG"], ["class", ""]]) {
  find("select").value = order;
  find("input").value = word;
  find("input").oninput();
  const captions = [...document.querySelectorAll("figcaption")].map(one => one.innerText.split("/").pop());
  told.push([captions, find("output").textContent]);
}
document.body.innerHTML = "<pre></pre>";
document.querySelector("pre").textContent = JSON.stringify(told);
</script></body>"""


def made(folder, count, classes=("cat", "dog")):
    """Rows of `count` predictions of three photographs, which may have been deleted since."""
    random = np.random.default_rng(0)
    for name, photo in zip("abc", random.permutation([*load_sample_images().images] * 2), strict=False):
        (folder / f"{name}.jpg").write_bytes(encode(Image.fromarray(photo)))
    return [{"file": f"{folder}/{'abc'[number % 3]}.jpg", "top": [
        {"class": classes[number % 2], "probability": round(0.5 + number % 7 / 20, 4)},
        {"class": classes[number % 2 - 1], "probability": 0.1}]} for number in range(count)]


def test_pictures_are_ordered_and_filtered(tmp_path):
    rows = made(tmp_path, 6)
    (tmp_path / "c.jpg").unlink()
    text = predictions.predictions_page("mine", rows, {"checkpoint": "<best>"})
    assert text.count("<figure ") == 6 and text.count("<img ") == 4 and "&lt;best&gt;" in text
    (tmp_path / "page.html").write_text(text.replace("</body>", CHOOSER))
    done = subprocess.run([*browser(tmp_path), "--dump-dom", f"file://{tmp_path}/page.html"], capture_output=True,
                          text=True, timeout=300)
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line], done.stderr
    plain, certain, uncertain, by_class = json.loads(re.search("<pre>(.*?)</pre>", done.stdout)[1])
    assert plain == [[f"{name}.jpg" for name in "abcabc"], "6 of 6"]
    assert certain[0] == [f"{name}.jpg" for name in "cbacba"]  # the probability rises with the number
    assert uncertain == [["b.jpg", "b.jpg"], "2 of 6"]
    assert by_class[0] == [f"{name}.jpg" for name in "bcacab"]  # numbers 4, 2, 0 are cats, then 5, 3, 1


def test_a_thousand_photographs_take_less_than_15_mb(tmp_path):
    assert len(predictions.predictions_page("mine", made(tmp_path, 1000), {})) < 15e6


def test_more_are_in_the_table_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "MOST", 4)
    predictions.write_predictions(tmp_path / "new" / "folder", made(tmp_path, 5), {})
    page = (tmp_path / "new" / "folder" / "report.html").read_text()
    assert page.count("<figure ") == 4 and "The first 4 of 5 images are shown." in page
    table = (tmp_path / "new" / "folder" / "predictions.csv").read_text().splitlines()
    assert table[0] == "file,class_1,probability_1,class_2,probability_2" and len(table) == 6
    assert table[2] == f"{tmp_path}/b.jpg,dog,0.55,cat,0.1"


def test_a_picture_is_turned_as_its_exif_data_say(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise
    Image.new("RGB", (60, 20)).save(tmp_path / "a.jpg", exif=exif)
    small = thumbnail((tmp_path / "a.jpg").read_bytes())
    with Image.open(io.BytesIO(base64.b64decode(small["image"].partition(",")[2]))) as image:
        assert image.size == (20, 60)
