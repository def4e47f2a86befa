"""How samples are kept on disk: one module a format, and all alike to use.

Each module has
    SUFFIX              what a shard's name ends in
    ANY_ORDER           whether its DALI reader follows the order it is given; otherwise it reads file after file, as
                        they were written, and what is ours to choose is the order of files and the place to start
    write(path, samples)        writes a shard of (encoded image, label) pairs, and its index where it has one
    make_index(path)            writes the index of a shard made elsewhere
    index_path(path)            where the shard's index lies, or None
    read_index(path)            a sequence with an element a sample; cheap. Raises OSError, ValueError
    records(path, index, samples)   yields (encoded image, label) of these samples, numbers that ascend
    reader(pieces, scratch)     a function for DALI's graph that gives the encoded images and their labels
A piece is a path, its index, and the numbers of samples in it, to be read one after another.
"""
import importlib

WRITTEN = ("tfrecord", "lmdb", "lmdb_caffe2", "recordio")
FORMATS = (*WRITTEN, "folder")  # the last is read in place


def get(name: str):
    """The module of a format."""
    return importlib.import_module(f"data.formats.{name}")
