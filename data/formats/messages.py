"""The protocol buffers of Caffe and Caffe2, of which only the fields that an image with a label needs.

Field numbers from caffe.proto (Datum) and caffe2.proto (TensorProto, TensorProtos).
"""
from functools import cache

INT32, STRING = 2, 4  # TensorProto.DataType


@cache
def _classes() -> dict:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kind = descriptor_pb2.FieldDescriptorProto
    messages = {
        "Datum": [("channels", 1, kind.TYPE_INT32), ("height", 2, kind.TYPE_INT32), ("width", 3, kind.TYPE_INT32),
                  ("data", 4, kind.TYPE_BYTES), ("label", 5, kind.TYPE_INT32), ("encoded", 7, kind.TYPE_BOOL)],
        "TensorProto": [("dims", 1, kind.TYPE_INT64), ("data_type", 2, kind.TYPE_INT32),
                        ("int32_data", 4, kind.TYPE_INT32), ("string_data", 6, kind.TYPE_BYTES)],
        "TensorProtos": [("protos", 1, kind.TYPE_MESSAGE)],
    }
    repeated = {"dims", "int32_data", "string_data", "protos"}
    file = descriptor_pb2.FileDescriptorProto(name="bigbatch.proto", package="bigbatch", syntax="proto2")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, type_ in fields:
            label = kind.LABEL_REPEATED if field in repeated else kind.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, type=type_, label=label)
            if type_ == kind.TYPE_MESSAGE:
                added.type_name = ".bigbatch.TensorProto"
            if field == "int32_data":
                added.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"bigbatch.{name}")) for name in messages}


def datum(image: bytes, label: int) -> bytes:
    return _classes()["Datum"](data=image, label=label, encoded=True).SerializeToString()


def read_datum(value: bytes) -> tuple[bytes, int]:
    message = _parse("Datum", value)
    if not message.encoded or not message.data:
        raise ValueError("is not a Datum with an encoded image")
    return message.data, message.label


def tensors(image: bytes, label: int) -> bytes:
    kinds = _classes()
    parts = [kinds["TensorProto"](dims=[1], data_type=STRING, string_data=[image]),
             kinds["TensorProto"](dims=[1], data_type=INT32, int32_data=[label])]
    return kinds["TensorProtos"](protos=parts).SerializeToString()


def read_tensors(value: bytes) -> tuple[bytes, int]:
    try:
        image, label = _parse("TensorProtos", value).protos
        return image.string_data[0], label.int32_data[0]
    except (ValueError, IndexError):
        raise ValueError("is not TensorProtos of an encoded image and a label") from None


def _parse(name, value):
    from google.protobuf.message import DecodeError

    try:
        return _classes()[name].FromString(bytes(value))
    except DecodeError:
        raise ValueError(f"is not a {name}") from None
