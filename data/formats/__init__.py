"""Storage formats: one module per format, all with the same interface.

Each module has
    SUFFIX              the suffix of a shard's name
    ANY_ORDER           whether its DALI reader can follow any order. Otherwise it reads the records of each file as
                        written, and only the order of the files and the start position can be chosen.
                        data.staging.spool lets DALI follow any order there, too
    write(path, samples)        writes a shard of (encoded image, label), or (encoded image, label, name of its file),
                                and its index if the format has one
    make_index(path)            writes the index of a shard made elsewhere, atomically. Only formats with an index
                                have it. Raises ValueError
    index_path(path)            returns the path of the shard's index, or None
    read_index(path)            returns a sequence with one element per sample; cheap. Raises OSError, ValueError
    records(path, index, samples)   yields (encoded image, label) of these samples
    example(stored)             returns a tf.train.Example of a record as it is stored. Raises ValueError. Only formats
                                whose index tells where each record lies have it
    source_name(path, index, sample)    returns the name that the shard has for the file that a sample is from, or None.
                                Raises OSError, ValueError
    stored_sizes(index)         returns the size of each sample in the shard, in bytes: not less than its image's
    reader(slices, scratch)     returns a function for DALI's graph that returns the encoded images and their labels
`slices` is a list, to be read in order. Each is a path, its index, and the numbers of the samples in it.
"""
import importlib

WRITTEN = ("tfrecord", "lmdb", "recordio")
FORMATS = (*WRITTEN, "folder")  # a folder of images is read in place


def get(name: str):
    """Returns the module of a format."""
    return importlib.import_module(f"data.formats.{name}")
