"""The protocol buffers of Caffe and TensorFlow, as messages.pbtxt describes them, without these libraries."""
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
    return message.data, message.label


def example(image: bytes, label: int, name: str | None = None) -> bytes:
    """Returns a tf.train.Example with the features of data.formats.tfrecord. name: of the file that the image is from.
    """
    kinds = _classes()
    entries = [kinds["Features"].Entry(key=LABEL, value=kinds["Feature"](int64_list={"value": [label]})),
               kinds["Features"].Entry(key=IMAGE, value=kinds["Feature"](bytes_list={"value": [image]}))]
    if name is not None:
        entries.append(kinds["Features"].Entry(key=NAME, value=kinds["Feature"](
            bytes_list={"value": [name.encode(errors="surrogateescape")]})))
    return kinds["Example"](features={"feature": entries}).SerializeToString()


def image_of(example: bytes) -> bytes:
    """Returns the encoded image of an Example. Raises ValueError."""
    if (image := _bytes_of(example, IMAGE)) is None:
        raise ValueError(f"is not an Example with {IMAGE}")
    return image


def name_of(example: bytes) -> str | None:
    """Returns the name of the file that an Example's image is from, or None. Raises ValueError."""
    name = _bytes_of(example, NAME)
    return name and name.decode(errors="surrogateescape")


def _bytes_of(example: bytes, key: str) -> bytes | None:
    for entry in _parse("Example", example).features.feature:
        if entry.key == key and entry.value.bytes_list.value:
            return entry.value.bytes_list.value[0]
    return None


def _parse(name, value):
    from google.protobuf.message import DecodeError

    try:
        return _classes()[name].FromString(bytes(value))
    except DecodeError:
        raise ValueError(f"is not a {name}") from None
