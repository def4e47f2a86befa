"""The parts of a run's report with pictures: the errors of the last evaluation, and training images."""
import base64
import html
from collections import Counter

from plan.run_folder import COLUMNS, ROWS, SAMPLES
from reporting import heat_map
from reporting.charts import number
from reporting.page import table
from reporting.run_data import RunData

MOST_PAIRS = 15  # confused pairs of classes


def mistakes(run: RunData) -> list[str]:
    """Returns the confusion of the classes and the worst errors at the last evaluation."""
    made = run.outcomes
    if not made:
        return []
    classes = made["classes"]
    counts = Counter({(label, predicted): count for label, predicted, count in made["confusion"]})
    wrong = Counter({pair: count for pair, count in counts.items() if pair[0] != pair[1]})
    drawn = [f"<h2>Errors</h2><p>After epoch {number(made['epoch'])}, {wrong.total():,} of {counts.total():,} "
             "validation images are classified wrongly.</p>", '<div class="side">']
    if len(classes) <= heat_map.MOST_CLASSES:
        drawn.append(heat_map.confusion(classes, counts))
    totals = heat_map.class_totals(counts)
    listed = [{"true class": classes[label], "predicted as": classes[predicted], "images": count,
               "of the class": f"{count / totals[label]:.1%}"}
              for (label, predicted), count in wrong.most_common(MOST_PAIRS)]
    if listed:
        listed = table(listed, ("true class", "predicted as"))
        drawn.append(f"<div><h3>Classes that are confused most</h3>{listed}</div>")
    return [*drawn, "</div>", *worst(made)]


def worst(made: dict) -> list[str]:
    """Returns the wrongly classified images with the highest losses."""
    shown = []
    for sample in made["worst"]:
        label, predicted = (html.escape(made["classes"][sample[name]]) for name in ("label", "predicted"))
        small = ' class="pixels"' if sample["width"] < 64 else ""
        name = html.escape(sample["name"])
        file = name.rpartition(" in ")[0] or name.rpartition("/")[2]
        shown.append(
            f'<figure><img{small} src="{html.escape(sample["image"])}" alt="{label}, predicted as {predicted}" '
            f'title="{name}"><figcaption><b>{label}</b>, predicted as <b>{predicted}</b>, loss '
            f'{number(sample["loss"])}<br><span class="muted">{file}</span></figcaption></figure>')
    return ["<h3>Worst errors</h3><p>The wrongly classified images with the highest losses.</p>"
            f'<div class="pictures">{"".join(shown)}</div>'] if shown else []


def samples(run: RunData) -> list[str]:
    """Returns some training images as the model sees them."""
    picture = run.folder / SAMPLES
    if not picture.is_file():
        return []
    source = f"data:image/jpeg;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    after = html.escape(run.flags.get("augmentation", "none"))
    names = run.run.get("sample_classes") or ["training image"] * COLUMNS * ROWS  # of an earlier version
    cut = [f'<figure><div role="img" aria-label="{html.escape(name)}" style="background-position:'
           f'{100 * (index % COLUMNS) / (COLUMNS - 1):.2f}% {100 * (index // COLUMNS) / (ROWS - 1):.2f}%"></div>'
           f"<figcaption>{html.escape(name)}</figcaption></figure>" for index, name in enumerate(names)]
    return ["<h2>Training images</h2>", f"<p>The first images of the training, after augmentation '{after}'.</p>",
            f'<div class="pictures cut" style="--all:url({source});--size:{100 * COLUMNS}% {100 * ROWS}%">'
            f'{"".join(cut)}</div>']
