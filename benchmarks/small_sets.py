"""Small sets of photographs with the defaults: how accurate, and at what cost, compared with Keras's tutorial?

    uv run python -m benchmarks.small_sets --output_dir=runs/small_sets [--set=shapes] [--images=10,100] [--seeds=5]

It makes sets of pictures in three ways (SETS) with different numbers of images per class, and 50 per class to validate.
On each it trains `train.py --data_dir` and the two networks of the tutorial (benchmarks/peers/keras_tutorial.py), one
after the other, and counts the processor time of each process. A line of JSON per set: mean and standard error of the
validation top-1 over the seeds, and median processor seconds. If it is stopped, the same command continues.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT, VALIDATION = 240, 180, 50


def background(random) -> np.ndarray:
    """Returns smooth colours and noise under a gradient of light, float (HEIGHT, WIDTH, 3)."""
    tones = random.uniform(60, 200) + random.normal(0, 25, (4, 5, 3))
    small = Image.fromarray(np.clip(tones, 0, 255).astype(np.uint8)).resize((WIDTH, HEIGHT), Image.BICUBIC)
    light = np.linspace(*random.uniform(0.6, 1.2, 2), WIDTH)[None, :, None]
    return np.clip(np.asarray(small) * light + random.normal(0, 10, (HEIGHT, WIDTH, 3)), 0, 255)


def shapes(random, label: int) -> Image.Image:
    """A bright triangle, square or circle of any colour, size, angle and place, on a noisy background."""
    picture = Image.fromarray((0.6 * background(random)).astype(np.uint8))
    radius, angle = random.uniform(30, 60), random.uniform(0, 2 * np.pi)
    centre = random.uniform([radius, radius], [WIDTH - radius, HEIGHT - radius])
    turns = angle + 2 * np.pi * np.arange((3, 4, 60)[label]) / (3, 4, 60)[label]
    corners = centre + radius * np.stack([np.cos(turns), np.sin(turns)], axis=1)
    ImageDraw.Draw(picture).polygon([*map(tuple, corners)], fill=tuple(random.integers(180, 256, 3).tolist()))
    return picture


def textures(random, label: int) -> Image.Image:
    """Waves under noise: horizontal, vertical, diagonal or crossed, of any colour and length."""
    x, y = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    angle = (0.0, np.pi / 2, np.pi / 4, 0.0)[label] + random.normal(0, 0.15)
    length = random.uniform(10, 30)
    waves = np.sin(2 * np.pi * (x * np.sin(angle) + y * np.cos(angle)) / length + random.uniform(0, 6))
    if label == 3:
        waves = (waves + np.sin(2 * np.pi * (x * np.cos(angle) - y * np.sin(angle)) / length)) / 1.4
    tinted = random.uniform(15, 45) * waves[..., None] * random.uniform(0.3, 1.0, 3)
    return Image.fromarray(np.clip(background(random) + tinted, 0, 255).astype(np.uint8))


def flowers(random, label: int) -> Image.Image:
    """Flowers of five kinds, which differ in the number of petals and, with overlap, in colour and length."""
    picture = Image.fromarray((background(random) * [0.6, 1.0, 0.6]).astype(np.uint8))
    drawn, petals = ImageDraw.Draw(picture), (4, 5, 6, 9, 14)[label]
    for _ in range(random.integers(1, 4)):
        hue = int(50 * label + random.normal(0, 22)) % 256
        colour = tuple(np.asarray(Image.new("HSV", (1, 1), (hue, int(random.integers(120, 255)), 230)).convert("RGB"))[
            0, 0].tolist())
        centre, size = random.uniform([40, 40], [WIDTH - 40, HEIGHT - 40]), random.uniform(22, 45)
        for turn in random.uniform(0, 6) + 2 * np.pi * np.arange(petals) / petals:
            x, y = centre + 0.6 * size * np.array([np.cos(turn), np.sin(turn)])
            half = size * 1.3 / petals + 2
            drawn.ellipse((x - half, y - half, x + half, y + half), fill=colour)
        x, y = centre
        drawn.ellipse((x - size / 4, y - size / 4, x + size / 4, y + size / 4), fill=(240, 200, 40))
    return picture


SETS = {"shapes": (shapes, 3), "textures": (textures, 4), "flowers": (flowers, 5)}


def make(folder: Path, name: str, images: int) -> None:
    """Writes the pictures: JPEGs in folder/train/CLASS and folder/val/CLASS."""
    draw, classes = SETS[name]
    for part, (split, count) in enumerate((("train", images), ("val", VALIDATION))):
        for label in range(classes):
            (folder / split / f"class-{label}").mkdir(parents=True, exist_ok=True)
            for number in range(count):
                picture = draw(np.random.default_rng([part, label, number]), label)
                picture.save(folder / split / f"class-{label}" / f"{number:04}.jpg", quality=85)


def measured(command, environment=None) -> tuple[str, float]:
    """Runs a command. Returns its standard output and its processor seconds."""
    before = os.times()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    after = os.times()
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return done.stdout, (after.children_user + after.children_system - before.children_user - before.children_system)


def ours(folder: Path, seed: int, flags) -> tuple[float, float]:
    out, seconds = measured([sys.executable, "train.py", f"--data_dir={folder}", f"--seed={seed}", *flags,
                             f"--output_dir={folder.parent / f'run-{folder.name}-{seed}'}", "--resume=never"])
    return json.loads(out)["val_top1"], seconds


def tutorial(folder: Path, seed: int, *flags) -> tuple[float, float]:
    out, seconds = measured([sys.executable, "-m", "benchmarks.peers.keras_tutorial", str(folder), str(seed), *flags])
    return float(out.split()[-1]), seconds


def row(folder: Path, name: str, images: int, seeds: int, flags) -> dict:
    """Measures what is not in results.jsonl of the folder yet, and returns a set's line."""
    data, log = folder / f"{name}-{images}", folder / "results.jsonl"
    if not (data / "val").is_dir():
        make(data, name, images)
    programs = {"bigbatch": lambda seed: ours(data, seed, flags), "keras": lambda seed: tutorial(data, seed),
                "keras_augmented": lambda seed: tutorial(data, seed, "--augment")}
    known = {(row["set"], row["images"], row["program"], row["seed"]): row
             for row in map(json.loads, log.read_text().splitlines() if log.exists() else ())}
    line = {"set": name, "images": images}
    for program, train in programs.items():
        rows = []
        for seed in range(seeds):
            if (measured := known.get((name, images, program, seed))) is None:
                top1, seconds = train(seed)
                measured = line | {"program": program, "seed": seed, "top1": top1, "seconds": round(seconds, 1)}
                with log.open("a") as file:
                    kept = ("set", "images", "program", "seed", "top1", "seconds")
                    print(json.dumps({key: measured[key] for key in kept}), file=file)
            rows.append(measured)
        top1 = [row["top1"] for row in rows]
        line |= {program: round(statistics.mean(top1), 4),
                 f"{program}_error": round(statistics.stdev(top1) / len(top1) ** 0.5, 4) if seeds > 1 else None,
                 f"{program}_seconds": round(statistics.median(row["seconds"] for row in rows), 1)}
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default="runs/small_sets")
    parser.add_argument("--set", choices=SETS, help="measure this one only")
    parser.add_argument("--images", default="10,100,1000", help="per class")
    parser.add_argument("--seeds", type=int, default=5)
    options, flags = parser.parse_known_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for images in map(int, options.images.split(",")):
        for name in SETS:
            if options.set in (None, name):
                print(json.dumps(row(options.output_dir.absolute(), name, images, options.seeds, flags)), flush=True)


if __name__ == "__main__":
    main()
