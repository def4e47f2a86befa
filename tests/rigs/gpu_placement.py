"""Where TensorFlow would put a graph's operations on a machine with a GPU: as its registry of kernels has it."""
import functools
import os
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

# What a caller gives, and what control flow hands on, may be on either side.
ANYWHERE = {"Placeholder", "While", "If", "PartitionedCall", "StatefulPartitionedCall"}


def operations(graph) -> Iterator[tuple[str, dict]]:
    """(function's name, its nodes by name) of a FuncGraph and of all that it calls."""
    described = graph.as_graph_def()
    yield "", {node.name: node for node in described.node}
    for function in described.library.function:
        yield function.signature.name, {node.name: node for node in function.node_def}


@functools.cache  # TensorFlow makes the list anew in each call
def gpu_kernels(op: str) -> list:
    """The kernels for GPUs of a kind of operation."""
    return [kernel for kernel in kernels.get_registered_kernels_for_op(op).kernel
            if kernel.device_type in ("GPU", "DEFAULT")]


def gpu_kernel(node):
    """The GPU kernel that a node would have, or None."""
    for kernel in gpu_kernels(node.op):
        if all(_allows(one, node) for one in kernel.constraint):
            return kernel
    return None


def _allows(constraint, node) -> bool:
    return constraint.name in node.attr and node.attr[constraint.name].type in constraint.allowed_values.list.type


def on_the_host(graph) -> set[str]:
    """Kinds of operations that have no kernel for a GPU."""
    return {node.op for _, nodes in operations(graph) for node in nodes.values() if gpu_kernel(node) is None}


def hidden_transposes(graph) -> int:
    """How often batch norm's GPU kernels transpose, which no graph shows (TensorFlow's fused_batch_norm_op.cc).

    They compute a training batch norm of NHWC data as NCHW: x and y forward, and dy, x and dx backward, unless the
    variable is set and the data has 16 bits.
    """
    persistent = os.environ.get("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT") == "1"
    return sum({"FusedBatchNormV3": 2, "FusedBatchNormGradV3": 3}.get(node.op, 0)
               for _, nodes in operations(graph) for node in nodes.values()
               if node.attr["is_training"].b and node.attr["data_format"].s == b"NHWC"
               and not (persistent and tf.as_dtype(node.attr["T"].type).size == 2))


def copies_to_the_host(graph) -> set[tuple[str, str]]:
    """(operation, operation): pairs of which the first leaves on the GPU what the second takes from the host."""
    found = set()
    for _, nodes in operations(graph):
        for node in nodes.values():
            kernel, sources = gpu_kernel(node), [name for name in node.input if not name.startswith("^")]
            for source, argument in zip(sources, _arguments(node, op_def_registry.get(node.op).input_arg), strict=True):
                name, _, output = source.partition(":")
                on_host = kernel is None or argument in kernel.host_memory_arg
                if on_host and name in nodes and _leaves_on_gpu(nodes[name], output):
                    found.add((nodes[name].op, node.op))
    return found


def _leaves_on_gpu(node, output: str) -> bool:
    """output: "name:number" inside of a function, "number" or nothing outside."""
    kernel, arguments = gpu_kernel(node), op_def_registry.get(node.op).output_arg
    if kernel is None or not arguments or node.op in ANYWHERE:
        return False
    name = output.partition(":")[0]
    if not name or name.isdecimal():
        name = _arguments(node, arguments)[int(name or 0)]
    return name not in kernel.host_memory_arg


def _arguments(node, described) -> list[str]:
    """The name of each of a node's inputs or outputs, of which one argument may be several."""
    names = []
    for one in described:
        count = node.attr[one.number_attr].i if one.number_attr else (
            len(node.attr[one.type_list_attr].list.type) if one.type_list_attr else 1)
        names += [one.name] * count
    return names
