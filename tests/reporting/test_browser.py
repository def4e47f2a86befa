"""The report in a browser, during a training and after it: on a desktop and on a phone, by pointer and by finger."""
import html
import json
import queue
import re
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import unquote

import pytest
from conftest import ROOT, environment, launcher, require_tool

from reporting.report import report
from reporting.run_data import RunData
from tests.rigs.run_files import row, whole

# Shows a page as a desktop does and as a phone does, and writes down what it measures there.
FRAMES = """<!doctype html><meta charset="utf-8">
<iframe srcdoc="{page}" style="width:1280px;height:800px"></iframe>
<iframe srcdoc="{page}" style="width:360px;height:800px;border:0"></iframe><pre></pre><script>
const sizes = frame => {{
  const inside = frame.contentDocument, root = inside.documentElement;
  const charts = [...inside.querySelectorAll("figure")].filter(one => one.querySelector("svg"));
  const shown = charts.filter(one => one.getClientRects().length);
  const chart = shown[0].querySelector("svg"), dot = chart.querySelector(".line:last-of-type circle");
  const box = dot.getBoundingClientRect();
  const text = Math.min(...shown.map(one => one.querySelector("svg text").getBoundingClientRect().height));
  const table = inside.querySelector("table"), around = table.parentNode;
  around.scrollLeft = 1000;
  const fixed = table.querySelector("td").getBoundingClientRect().x - around.getBoundingClientRect().x;
  const labels = [...inside.querySelectorAll(".axes label")], titles = chart.querySelectorAll("title").length;
  dot.dispatchEvent(new frame.contentWindow.PointerEvent("pointerdown", {{
    bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2}}));
  const tip = inside.querySelector("#tip"), hover = tip.hidden ? "" : tip.textContent;
  labels[1].click();
  const over_time = charts.filter(one => one.getClientRects().length).length;
  return {{width: root.clientWidth, scroll: root.scrollWidth, titles, hover, text, shown: shown.length,
    over_time, fixed, scrolled: around.scrollLeft,
    hidden_points: charts.filter(one => !one.querySelector("circle,rect")).map(one => one.innerText)}};
}};
onload = () => {{
  document.querySelector("pre").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(sizes));
}};
</script>"""


def browser(folder) -> list:
    return [require_tool("chromium", "chromium-browser", "google-chrome"), "--headless", "--no-sandbox",
            "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--v=0", "--hide-scrollbars",
            f"--user-data-dir={folder}/profile"]


def seen(page: str, folder) -> list[dict]:
    """What a desktop and a phone show of a page. Asserts that the browser complains of nothing."""
    (folder / "frames.html").write_text(FRAMES.format(page=html.escape(page)))
    done = subprocess.run([*browser(folder), "--window-size=1700,900", "--dump-dom", f"file://{folder}/frames.html"],
                          capture_output=True, text=True, timeout=300)
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line], done.stderr
    return json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", done.stdout)[1]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A training: its folder, and the pages that could be seen while it ran."""
    folder, found = tmp_path_factory.mktemp("run"), []
    process = subprocess.Popen(
        [*launcher("python", 1), ROOT / "train.py", "--model=convnet", "--epochs=5", "--log_trust_ratios",
         f"--output_dir={folder}"], cwd=ROOT, env=environment(), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None:
        if (folder / "report.html").is_file() and (page := (folder / "report.html").read_text()) not in found[-1:]:
            found.append(page)
        time.sleep(0.02)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors.splitlines()[-1] == f"report: {folder}/report.html"
    assert json.loads(output) == json.loads((folder / "summary.json").read_text())
    return folder, found


def test_the_page_can_be_watched_from_the_first_step_on(pages):
    """Each page says how far the training has come, and all but the last reload themselves."""
    folder, found = pages
    epochs = [re.search(r"<b>In progress</b>: epoch ([\d.]+) of 5", page) for page in found]
    epochs = [float(epoch[1]) for epoch in epochs if epoch]
    assert epochs == sorted(epochs) and epochs[0] == 0 and 1 <= epochs[-1] < 5
    assert all('http-equiv="refresh"' in page for page in found if "In progress" in page)
    last = (folder / "report.html").read_text()
    assert "In progress" not in last and "refresh" not in last and not list(folder.glob("*.part"))
    top1 = json.loads((folder / "summary.json").read_text())["val_top1"]
    shown = re.search(r"last epoch</dt><dd>([\d.]+)%</dd>", last)[1]
    assert float(shown) == pytest.approx(100 * top1, abs=0.5)


def check(page: str, folder, figures: int) -> None:
    desktop, phone = seen(page, folder)
    for one in (desktop, phone):
        assert one["scroll"] <= one["width"], "the page scrolls sideways"
        assert not one["hidden_points"] and one["shown"] == one["over_time"] == figures and one["titles"]
        assert re.search(r"^train: [\d.]+ \(epoch \d\)$", one["hover"], re.MULTILINE), one
        assert re.search(r"^validation: [\d.]+ \(epoch \d\)$", one["hover"], re.MULTILINE), one
    assert phone["width"] == 360 and phone["text"] >= 10  # pixels from the top of a letter to its bottom, with space


def test_while_it_trains(pages, tmp_path):
    """Loss, accuracy, learning rate, throughput, step time, trust ratios, confusion matrix."""
    evaluated = [page for page in pages[1] if re.search(r"<b>In progress</b>: epoch [1-4]", page)]
    check(evaluated[0], tmp_path, figures=7)


def test_after_the_end(pages, tmp_path):
    check((pages[0] / "report.html").read_text(), tmp_path, figures=7)


# Unfolds, switches and scrolls at the first visit. Tells a server what is seen at each.
READER = """<script>onload = () => {{
  const unfolded = [...document.querySelectorAll("details")], time = document.querySelector("#by-time");
  new Image().src = "http://127.0.0.1:{port}/?" + encodeURIComponent(JSON.stringify(
    [unfolded.map(one => one.open), time.checked, scrollY]));
  if (window.name) return;
  unfolded[1].open = true;
  time.click();
  scrollTo(0, 700);
}}</script></body>"""


def test_what_is_seen_stays_when_a_file_reloads_itself(tmp_path):
    told = queue.Queue()

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self):
            told.put(json.loads(unquote(self.path[2:])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = report(RunData.read(whole(tmp_path / "run", epochs=9, rows=[row(1), row(2)], done=False)))
        page = page.replace('content="10"', 'content="1"').replace("</body>", READER.format(port=server.server_port))
        (tmp_path / "page.html").write_text(page)
        with subprocess.Popen([*browser(tmp_path), "--remote-debugging-port=0", f"file://{tmp_path}/page.html"],
                              stderr=subprocess.DEVNULL) as process:
            visits = [told.get(timeout=300) for _ in range(3)]
            process.kill()
        server.shutdown()
    assert visits == [[[False] * 5, False, 0], *[[[False, True, False, False, False], True, 700]] * 2]


def test_imagenet_on_a_phone(tmp_path):
    """1,000 classes and 161 layers over 90 epochs; the confusion matrix is left out."""
    check(report(RunData.read(whole(tmp_path / "run", epochs=90, classes=1000, layers=160))), tmp_path, figures=6)


def test_several_runs(pages, tmp_path):
    from reporting.compare import comparison

    runs = [RunData.read(pages[0]), RunData.read(whole(tmp_path / "a run"))]
    desktop, phone = seen(comparison(runs)[0], tmp_path)
    assert phone["scrolled"] > 100 and phone["fixed"] == 0, "the names of the runs are out of sight"
    for one in (desktop, phone):
        assert one["scroll"] <= one["width"] and not one["hidden_points"] and one["shown"] == one["over_time"] == 10
        assert "a run: " in one["hover"]


# Clicks on the heads of a table and shows the texts of its columns afterwards.
CLICKS = """<script>onload = () => {
  const column = name => {
    const heads = [...document.querySelectorAll("table:first-of-type th")].slice(0, 10);
    const index = heads.findIndex(one => one.textContent === name);
    return [heads[index], () => [...document.querySelector("table").rows].slice(1).map(
      one => one.cells[index].textContent)];
  };
  const found = [];
  for (const name of ["time", "top-1", "learning rate", "time"]) {
    const [head, texts] = column(name);
    head.click();
    found.push(texts());
    if (name === "top-1") head.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"})), found.push(texts());
  }
  document.querySelector("h1").textContent = JSON.stringify(found);
}</script></body>"""


def test_a_table_is_sorted_by_the_column_that_is_clicked(tmp_path):
    """Times by their length, rates as numbers; by a second choice the other way around."""
    from reporting.sweep import write_sweep

    found = [{"flags": {"learning_rate": rate}, "seed": 0, "val_top1": top1, "best_top1": top1, "best_epoch": 1,
              "val_samples": 100, "seconds": seconds, "folder": f"{rate}", "diverged_at": None}
             for rate, top1, seconds in (
                 (2, 0.1, 100.0), (10, 0.3, 9.0), ("0:1,5:2", 0.2, 4000.0), (5e-5, 0.05, 200.0))]
    page = write_sweep(tmp_path, found, 4).read_text().replace("</body>", CLICKS)
    (tmp_path / "page.html").write_text(page)
    done = subprocess.run([*browser(tmp_path), "--dump-dom", f"file://{tmp_path}/page.html"], capture_output=True,
                          text=True, timeout=300)
    times = ["9.0 s", "100 s", "3 min 20 s", "1 h 6 min"]
    assert json.loads(re.search(r"<h1>(.*?)</h1>", done.stdout)[1]) == [
        times, ["5%", "10%", "20%", "30%"], ["30%", "20%", "10%", "5%"],
        ["0:1,5:2", "5e-05", "2", "10"], times]
