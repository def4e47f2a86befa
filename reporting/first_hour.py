"""first_hour.html: the results of launch.first_hour next to published figures, as one self-contained page."""
import html
from pathlib import Path

from common.files import write_atomically
from reporting import charts
from reporting.page import page, table

SHOWN = 120  # last lines of a step's log that the page shows
COLUMNS = ("outcome", "note", "seconds")  # the last columns of every row


def write_first_hour(folder: Path, result: dict, published: list[dict]) -> Path:
    """Writes first_hour.html; returns its path.

    result: content of first_hour.json: pretend, machine, and steps, each with name, title, outcome, seconds, log and
    rows. published: images per second of ResNet-50, each with gpu, gpus, precision, micro_batch_size, source.
    """
    sections = [opening(result), table([result["machine"]]), "<h2>Steps</h2>", table([
        {"step": row["name"], "what": row["title"], "outcome": row["outcome"], "seconds": round(row["seconds"]),
         "log": row["log"]} for row in result["steps"]])]
    for step in result["steps"]:
        sections += [f"<h2>{html.escape(step['title'])}</h2>", *chart(step, published), table(aligned(step["rows"])),
                     log(folder / step["log"])]
    sections += ["<h2>Published figures</h2>", "<p>ResNet-50, in images/s. These results come from other frameworks, "
                 "containers and network layouts, so compare them with care. The column 'measured here' shows the "
                 "fastest result here with the same number of GPUs, precision and micro-batch size.</p>",
                 table(comparison(published, measured(result["steps"])))]
    path = folder / "first_hour.html"
    write_atomically(path, page("The first hour", sections))
    return path


def opening(result: dict) -> str:
    outcomes = [step["outcome"] for step in result["steps"]]
    failed = [step["name"] for step in result["steps"] if step["outcome"] == "failed"]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("ok", "skipped", "failed"))
    counts = f"{len(outcomes)} steps: {counts}" + (f" (<b>{', '.join(failed)}</b>)." if failed else ".")
    pretended = "<b>Trial run on CPUs with tiny sizes: the numbers mean nothing.</b> " if result["pretend"] else ""
    return f"<p>{pretended}{counts}</p>"


def aligned(rows: list[dict]) -> list[dict]:
    """Returns rows that all have the same columns, empty for a row that failed, and adds efficiency to throughput."""
    [one_gpu] = [row["images_per_second"] for row in rows
                 if row.get("workers") == 1 and "images_per_second" in row][:1] or [None]
    rows = [dict(row, efficiency=f"{row['images_per_second'] / row['workers'] / one_gpu:.1%}")
            if one_gpu and "images_per_second" in row else row for row in rows]
    columns = [column for column in dict.fromkeys(key for row in rows for key in row) if column not in COLUMNS]
    shown = (*columns, *COLUMNS)
    return [{column: row.get(column, "") for column in shown} | {"seconds": round(row["seconds"])} for row in rows]


def log(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    left_out = f"({len(lines) - SHOWN:,} earlier lines not shown)\n" if len(lines) > SHOWN else ""
    return (f"<details><summary>{html.escape(path.name)}</summary><pre>{left_out}"
            f"{html.escape(chr(10).join(line[:400] for line in lines[-SHOWN:]))}</pre></details>")


def chart(step: dict, published: list[dict]) -> list[str]:
    """Returns bars of the throughput of one GPU, next to published ones in another colour."""
    rows = [row for row in step["rows"] if "xla" in row and row.get("images_per_second")]
    if not rows:
        return []
    ours = [(f"{row['precision']}, {row['micro_batch_size']}, XLA {row['xla']}", row["images_per_second"], False)
            for row in rows]
    theirs = [(f"{row['gpu']}, {row['precision']}, {row['micro_batch_size']}", row["images_per_second"], True)
              for row in published if row["gpus"] == 1]
    return [charts.bars("images/s (second colour: published figures)", ours + theirs)]


def measured(steps: list[dict]) -> dict[tuple, float]:
    """Returns (GPUs, precision, micro-batch) -> the most images per second of all rows that have them."""
    found = {}
    for row in (row for step in steps for row in step["rows"] if row.get("images_per_second")):
        key = row.get("workers", 1), row.get("precision"), row.get("micro_batch_size")
        found[key] = max(found.get(key, 0.0), row["images_per_second"])
    return found


def comparison(published: list[dict], here: dict[tuple, float]) -> list[dict]:
    return [{"GPU": row["gpu"], "GPUs": row["gpus"], "precision": row["precision"],
             "micro_batch_size": row["micro_batch_size"], "published, images/s": row["images_per_second"],
             "measured here": here.get((row["gpus"], row["precision"], row["micro_batch_size"]), ""),
             "software": row["software"], "source": row["source"]} for row in published]
