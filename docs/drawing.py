"""Draws docs/architecture.svg: `uv run --group benchmark python -m docs.drawing`. Every SVG has a dark variant.

It draws the parts of a training from left to right: what a recipe and a launch say, what each worker does, and what is
written. The dark variant of NAME.svg is NAME-dark.svg.
"""
from pathlib import Path

FIGURE = Path(__file__).parent / "architecture.svg"
SIZE = 760, 180  # pixels, and the units of BOXES
BOXES = {  # title: (left, bottom, width, height, what it does, colour)
    "Recipe": (1, 101, 130, 54, "data, model, batch,\noptimizer, epochs", "#1f6fc0"),
    "Launch": (1, 25, 130, 54, "workers, hosts,\nnetwork", "#1f6fc0"),
    "Plan": (157, 63, 106, 54, "steps, schedule,\nmicro-batches", "#1f6fc0"),
    "DALI": (303, 87, 92, 54, "reads, decodes,\naugments", "#d97400"),
    "Network": (417, 87, 92, 54, "Keras: gradients\nof micro-batches", "#d97400"),
    "LARS": (531, 87, 70, 54, "a rate for\neach layer", "#d97400"),
    "Horovod": (417, 22, 184, 36, "adds the gradients of all workers", "#d97400"),
    "Checkpoints": (641, 101, 118, 54, "continue, evaluate,\npredict, export", "#238636"),
    "Report": (641, 25, 118, 54, "curves, errors,\nwhere time went", "#238636")}
WORKER = (289, 8, 326, 164)  # the frame around what each worker does
ARROWS = (  # from, to
    ((131, 128), (157, 100)), ((131, 52), (157, 80)), ((263, 90), (289, 90)), ((395, 114), (417, 114)),
    ((463, 87), (463, 58)), ((566, 58), (566, 87)), ((615, 110), (641, 128)), ((615, 70), (641, 52)))
DARK = {"#ffffff": "#0d1117", "#000000": "#e6edf3", "#b0b0b0": "#8b949e", "#cccccc": "#484f58"}  # instead of the light


def save(figure, path: Path) -> None:
    """Writes a figure of Matplotlib as SVG, and its dark variant next to it."""
    figure.savefig(path, metadata={"Date": None})
    dark(path)


def dark(path: Path) -> None:
    """Writes the dark variant of an SVG of Matplotlib, whose texts are black unless they have a colour."""
    text = path.read_text().replace('<style type="text/css">', f'<style type="text/css">text{{fill:{DARK["#000000"]}}}')
    for light, other in DARK.items():
        text = text.replace(light, other)
    path.with_stem(f"{path.stem}-dark").write_text(text)


def draw(path: Path) -> None:
    """Draws the parts of a training."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "architecture", "svg.fonttype": "none"}
    from matplotlib import pyplot
    from matplotlib.patches import FancyBboxPatch

    figure = pyplot.figure(figsize=(SIZE[0] / 96, SIZE[1] / 96))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, SIZE[0]), ylim=(0, SIZE[1]))
    axes.axis("off")

    def frame(left, bottom, width, height, **style):
        axes.add_patch(FancyBboxPatch((left, bottom), width, height, "round,pad=0,rounding_size=6", **style))

    frame(*WORKER, facecolor="none", edgecolor="#808080", linestyle="--", linewidth=0.8)
    axes.text(WORKER[0] + WORKER[2] / 2, 157, "each worker: one process, one GPU or CPU", size=8, ha="center",
              va="center")
    for title, (left, bottom, width, height, does, colour) in BOXES.items():
        frame(left, bottom, width, height, facecolor=colour + "22", edgecolor=colour, linewidth=1)
        middle = left + width / 2
        axes.text(middle, bottom + height - 12, title, size=9, weight="bold", ha="center", va="center")
        axes.text(middle, bottom + (height - 19) / 2, does, size=7.5, ha="center", va="center")
    for start, end in ARROWS:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#808080", "shrinkA": 1, "shrinkB": 1})
    save(figure, path)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(FIGURE)
