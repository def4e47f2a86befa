"""The run's folder: plan.json, flags.txt, metrics.jsonl, summary.json and TensorBoard's events."""
import json
import os
from pathlib import Path


def write_json(path, content) -> None:
    """Writes a file whole or not at all."""
    scratch = Path(f"{path}.part")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(scratch, path)


class RunFolder:
    """An observer of training that writes what it sees."""

    def __init__(self, folder: Path, plan: dict, flags_text: str):
        import tensorflow as tf

        self.folder = folder
        write_json(folder / "plan.json", plan)
        (folder / "flags.txt").write_text(flags_text)
        (folder / "metrics.jsonl").write_text("")
        self._events = tf.summary.create_file_writer(str(folder / "tensorboard"))

    def step(self, samples: int) -> None:
        """Nothing is written for a step."""

    def evaluation(self, row: dict) -> None:
        import tensorflow as tf

        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        with self._events.as_default(step=row["samples"]):
            for name, value in row.items():
                tf.summary.scalar(name, value)
        self._events.flush()

    def end(self, summary: dict) -> None:
        self._events.close()
        write_json(self.folder / "summary.json", summary)
