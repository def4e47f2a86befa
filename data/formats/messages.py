"""The protocol buffers of Caffe and TensorFlow, as messages.pbtxt describes them, without these libraries."""
from collections import defaultdict
from functools import cache
from pathlib import Path

IMAGE = "image/encoded"  # features of an Example
LABEL = "image/class/label"
NAME = "image/filename"


@cache
def _classes() -> dict:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    schema = Path(__file__).with_name("messages.pbtxt").read_text()
    pool.Add(text_format.Parse(schema, descriptor_pb2.FileDescriptorProto()))
    kinds = pool.FindFileByName("bigbatch.proto").message_types_by_name
    return {name: message_factory.GetMessageClass(kind) for name, kind in kinds.items()}


def datum(image: bytes, label: int) -> bytes:
    return _classes()["Datum"](data=image, label=label, encoded=True).SerializeToString()


def read_datum(value: bytes) -> tuple[bytes, int]:
    message = _parse("Datum", value)
    if not message.encoded or not message.data:
        raise ValueError("is not a Datum with an encoded image, as convert_imageset --encoded writes it")
    return checked([message.data], [message.label] if message.HasField("label") else [])


def checked(images, labels, names=("image", "label")) -> tuple[bytes, int]:
    """Returns the image and the label of a record. Raises ValueError unless there is one of each, as DALI needs.

    images, labels: the values in the record. names: of these values in the record's format.
    """
    for name, values in zip(names, (images, labels), strict=True):
        if len(values) != 1:
            raise ValueError(f"has {len(values)} values of {name} instead of one; write the dataset again, with one "
                             "image and one label in each record")
    if not images[0] or not float(labels[0]).is_integer():
        raise ValueError(f"has no image or no whole number as its label ({len(images[0])} bytes, label {labels[0]:g}); "
                         "write the dataset again")
    return images[0], int(labels[0])


def example(image: bytes, label: int, name: str | None = None) -> bytes:
    """Returns a tf.train.Example with the features of data.formats.tfrecord. name: of the file that the image is from.
    """
    entries = [{"key": LABEL, "value": {"int64_list": {"value": [label]}}},
               {"key": IMAGE, "value": {"bytes_list": {"value": [image]}}}]
    if name is not None:
        entries.append({"key": NAME, "value": {"bytes_list": {"value": [name.encode(errors="surrogateescape")]}}})
    return _classes()["Example"](features={"feature": entries}).SerializeToString()


def read_example(value: bytes) -> tuple[bytes, int, dict]:
    """Returns the image, the label and all features by name. Raises ValueError, as `checked` does."""
    features = _features(value)
    return *checked(features[IMAGE].bytes_list.value, features[LABEL].int64_list.value,
                    (f"{IMAGE} (bytes)", f"{LABEL} (int64)")), features


def name_of(example: bytes) -> str | None:
    """Returns the name of the file that an Example's image is from, or None. Raises ValueError."""
    names = _features(example)[NAME].bytes_list.value
    return names[0].decode(errors="surrogateescape") if names else None


def _features(example) -> dict:
    features = defaultdict(_classes()["Feature"])
    return features | {entry.key: entry.value for entry in _parse("Example", example).features.feature}


def _parse(name, value):
    from google.protobuf.message import DecodeError

    try:
        return _classes()[name].FromString(bytes(value))
    except DecodeError:
        raise ValueError(f"is not a valid {name}") from None
