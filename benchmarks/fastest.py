"""Prints the fastest flags that benchmarks/first_gpu_hour.sh has measured, as the lines of a `.launch` file.

    python -m benchmarks.fastest runs/first_gpu_hour [--precision=mixed_float16] >RECIPE.launch

launch/*.sh read RECIPE.launch with RECIPE.flags. Only speeds in the recipe's precision count (default: float32). What
would change the results, such as another precision, is a comment.
"""
import argparse
import json
from pathlib import Path

LEAST = 1.02  # of the speed with the default: less is noise


def speeds(folder: Path, start: str) -> dict[str, dict]:
    """Returns the measurements in FOLDER/START*.json by the rest of their names, without those that failed."""
    found = {}
    for path in folder.glob(f"{start}*.json"):
        if text := path.read_text():
            content = json.loads(text)
            [found[path.stem[len(start):]]] = content.get("rows") or [
                {stage["name"]: stage for stage in content["stages"]}["train"]]
    return found


def fastest(rows: dict[str, dict], usual: str | None = None) -> str | None:
    """Returns the name with the highest speed, or the usual one if none is LEAST times as fast."""
    best = max(rows, key=lambda name: rows[name]["images_per_second"], default=usual)
    if usual in rows and rows[best]["images_per_second"] < LEAST * rows[usual]["images_per_second"]:
        return usual
    return best


def lines(folder: Path, precision: str) -> list[str]:
    """Returns the lines of the `.launch` file. Raises ValueError if nothing was measured in this precision."""
    speed = {name: row | {"xla": name.split("-xla-")[1]} for name, row in speeds(folder, "speed-").items()}
    own = {name: row for name, row in speed.items() if row["precision"] == precision}
    if not own:
        raise ValueError(f"{folder}: no speed-{precision}-*.json")
    best = own[fastest(own)]
    made = [f"# {best['images_per_second']:,.0f} images/s on one GPU, by benchmarks/first_gpu_hour.sh in {folder}",
            f"--micro_batch_size={best['micro_batch_size']}", f"--xla={best['xla']}"]
    if decoder := fastest(speeds(folder, "decode-")):
        device, *load = decoder.split("-")
        made += [f"--dali_device={device}", *(f"--hw_decoder_load={one}" for one in load)]
    exchange = speeds(folder, "exchange-")
    workers = max((row["workers"] for row in exchange.values()), default=1)
    ring, torus, compressed = (f"{workers}-{rest}" for rest in ("ring-none", "torus-none", "ring-fp16"))
    if fastest({name: exchange[name] for name in (ring, torus) if name in exchange}, ring) == torus:
        made.append("--allreduce=torus")
    offers = {f"--precision={row['precision']}": row["images_per_second"] / best["images_per_second"]
              for row in sorted(speed.values(), key=lambda row: row["images_per_second"])}
    if ring in exchange and compressed in exchange:
        offers["--compression=fp16"] = (
            exchange[compressed]["images_per_second"] / exchange[ring]["images_per_second"])
    return made + [f"# {flag}: {ratio:.2f} times as fast, with other results"
                   for flag, ratio in offers.items() if ratio >= LEAST and flag != f"--precision={precision}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", default="float32")
    options = parser.parse_args()
    print("\n".join(lines(options.folder, options.precision)))
