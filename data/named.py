"""What --data_dir may name: a prepared dataset's folder, a folder of images a class, a built-in, synthetic data."""
from pathlib import Path

from data.dataset import Dataset, open_dataset
from data.prepare import SOURCES, locate
from data.synthetic import NAME, synthetic_dataset

BUILT_IN = tuple(SOURCES)


def absolute(data_dir: str) -> str:
    """The same name for a process in another folder."""
    return data_dir if data_dir in BUILT_IN or data_dir.startswith(f"{NAME}:") else str(Path(data_dir).absolute())


def open_named(data_dir: str) -> Dataset:
    """Raises DatasetError."""
    return synthetic_dataset(data_dir) if data_dir.startswith(f"{NAME}:") else open_dataset(locate(data_dir))
