"""Counts the kernels in the profile of a run: `python -m benchmarks.kernels RUN`, after `train.py --profile=A:B`.

It prints, as JSON, the number of transposes per step, and for each kernel its calls and milliseconds per step, those
that take most time first. On GPUs, these are kernels. On CPUs, they are TensorFlow's operations. A step that is
launched before the results of the last one are known is in the profile, too.
"""
import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

from common.run_folder import TENSORBOARD

GPU = "/device:GPU:"
HOST = "/host:CPU"
TRANSPOSES = re.compile("transpose|nchwtonhwc|nhwctonchw|swapdimension", re.IGNORECASE)
OPERATION = re.compile(r"[^:]:(\w+)$")  # in the name of an event on a CPU, such as conv2d/Conv2D:Conv2D
STEP = "train"  # the name that training/monitoring.py gives to a step


def counted(folder: Path) -> dict:
    """Returns what the profiles in a run's folder contain, as the module says. Raises ValueError if there is none."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    calls, seconds, steps = defaultdict(int), defaultdict(float), 0
    for path in (folder / TENSORBOARD).rglob("*.xplane.pb"):
        planes = XSpace.FromString(path.read_bytes()).planes
        on_gpu = any(plane.name.startswith(GPU) for plane in planes)
        for plane in planes:
            names = {number: about.name for number, about in plane.event_metadata.items()}
            for event in (event for line in plane.lines for event in line.events):
                name = names[event.metadata_id]
                steps += plane.name == HOST and name == STEP
                if plane.name.startswith(GPU):
                    kernel = name
                elif not on_gpu and (operation := OPERATION.search(name)):
                    kernel = operation[1]
                else:
                    continue
                calls[kernel] += 1
                seconds[kernel] += event.duration_ps / 1e12
    if not steps:
        raise ValueError(f"{folder}: no profile of a training step; train with --profile=10:20")
    kernels = {name: {"calls": calls[name] / steps, "ms": 1e3 * seconds[name] / steps}
               for name in sorted(calls, key=seconds.get, reverse=True)}
    return {"steps": steps, "transposes": sum(calls[name] for name in calls if TRANSPOSES.search(name)) / steps,
            "kernels": kernels}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    print(json.dumps(counted(parser.parse_args().run), indent=1))
