"""What --data_dir may name: a prepared dataset's folder, a folder of images a class, a built-in, synthetic data."""
from data.dataset import Dataset, open_dataset
from data.prepare import locate
from data.synthetic import NAME, synthetic_dataset


def open_named(data_dir: str) -> Dataset:
    """Raises DatasetError."""
    return synthetic_dataset(data_dir) if data_dir.startswith(f"{NAME}:") else open_dataset(locate(data_dir))
