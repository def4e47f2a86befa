"""What --mode=predict writes into --output_dir: predictions.csv, and a page with the pictures."""
import html
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.cores import cores_of_worker
from common.errors import shown
from common.files import as_csv
from common.run_folder import PAGE, PREDICTIONS, RunFolder
from data.images import Rejected, Rules, store
from reporting.outcomes import thumbnail
from reporting.page import facts, page
from training.outcomes import heads

MOST = 2000  # pictures on the page, about 10 MB
CONTROLS = """<p><label>Order <select><option value="">by file<option value="-1">certain first
<option value="1">uncertain first<option value="class">by class</select></label>
<label>Show <input type="search" placeholder="class or file"></label> <output></output></p>"""


def write_predictions(folder: Path, rows: list[dict], about: dict[str, str]) -> None:
    """Writes both files. Raises OSError.

    rows: of `predict`, at least one. about: name -> value, for the table below the pictures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = RunFolder(folder)
    files.write(PREDICTIONS, predictions_csv(rows))
    files.write(PAGE, predictions_page(f"{folder.absolute().name}: predictions", rows, about))
    files.save_or_raise()


def predictions_csv(rows: list[dict]) -> str:
    """Returns the content of predictions.csv: file, and the most probable classes with their probabilities."""
    return as_csv([["file", *heads(len(rows[0]["top"]))], *(
        [shown(row["file"]), *(cell for guess in row["top"] for cell in (shown(guess["class"]), guess["probability"]))]
        for row in rows)])


def predictions_page(title: str, rows: list[dict], about: dict[str, str]) -> str:
    """Returns a page with the pictures, which can be sorted and filtered."""
    with ThreadPoolExecutor(cores_of_worker(1)) as pool:
        pictures = "".join(pool.map(figure, rows[:MOST]))
    left_out = f"<p>The first {MOST:,} of {len(rows):,} images are shown.</p>" * (len(rows) > MOST)
    return page(title, [f'<div class="gallery">{CONTROLS}{left_out}<div class="pictures">{pictures}</div></div>',
                        "<h2>This prediction</h2>", facts(about)])


def figure(row: dict) -> str:
    """Returns the picture of an image with its most probable class. The others are shown when the mouse is over it."""
    try:
        small = thumbnail(store(Path(row["file"]).read_bytes(), Rules(for_tensorflow=True)).encoded)
    except (OSError, Rejected):  # it has gone since
        small = None
    first, *others = row["top"]
    name, file = html.escape(shown(first["class"])), html.escape(shown(row["file"]))
    also = html.escape("\n".join(f"{shown(one['class'])} {one['probability']:.1%}" for one in others))
    image = f'<img loading="lazy" src="{small["image"]}" alt="{name}">' if small else ""
    return (f'<figure data-class="{name}" data-probability="{first["probability"]}" title="{also}">{image}'
            f'<figcaption><b>{name}</b> {first["probability"]:.1%}<br>{file}</figcaption></figure>')
