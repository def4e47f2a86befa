"""Makes docs/report.png and report-dark.png of a run of the digits: `uv run python -m docs.report_image RUN`.

It needs Chromium and Pillow. Each picture keeps the values of the recipe's flags, and the result, as text, so that a
test can tell that it is stale.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops, PngImagePlugin

from common.run_folder import FLAGS, PAGE, SUMMARY
from plan.recipes import DIGITS, flags_in
from plan.values import same
from reporting.progress import result_lines

PICTURES = {Path(__file__).parent / name: scheme for name, scheme in (("report.png", 1), ("report-dark.png", 0))}
SIZE = 1280, 1600  # pixels of the window; the picture ends below the curves
CURVES_ALONE = "<style>h2:nth-of-type(n+2),h2:nth-of-type(n+2)~*{display:none}</style></head>"
DIGITS_CLASSES = 10


def recipe_flags() -> dict[str, str]:
    """Returns the flags of the digits' recipe."""
    return flags_in(DIGITS.read_text())


def result(summary: dict) -> str:
    """Returns what README quotes of the last evaluation on the terminal: all but the seconds."""
    [line] = [line for line in result_lines(summary, DIGITS_CLASSES) if "validation: " in line]
    return line.partition("validation: ")[2].partition("; ")[0]


def main(run: Path) -> None:
    """Writes the pictures. Raises SystemExit if the run has changed a flag of the recipe."""
    used = flags_in((run / FLAGS).read_text())
    if changed := {name: used.get(name) for name, value in recipe_flags().items() if not same(used.get(name), value)}:
        sys.exit(f"docs.report_image: {run} is not a run of the digits' recipe: {changed}")
    about = PngImagePlugin.PngInfo()
    about.add_text("flags", json.dumps(recipe_flags()))
    about.add_text("result", result(json.loads((run / SUMMARY).read_text())))
    with tempfile.TemporaryDirectory() as folder:
        shown, page = Path(folder, "shown.png"), Path(folder, PAGE)
        page.write_text((run / PAGE).read_text().replace("</head>", CURVES_ALONE, 1))
        for path, scheme in PICTURES.items():
            subprocess.run(["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={shown}",
                            f"--window-size={SIZE[0]},{SIZE[1]}", f"--blink-settings=preferredColorScheme={scheme}",
                            page.as_uri()], check=True, stderr=subprocess.DEVNULL)
            picture = Image.open(shown).convert("RGB")
            *_, bottom = ImageChops.difference(picture, Image.new("RGB", SIZE, picture.getpixel((0, 0)))).getbbox()
            picture.crop((0, 0, SIZE[0], bottom + 16)).quantize(256, dither=Image.Dither.NONE).save(
                path, optimize=True, pnginfo=about)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
