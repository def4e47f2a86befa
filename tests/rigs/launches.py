"""What a GPU would launch for a traced function, without one."""

# Operations that start no kernel: they only name, reshape or route a tensor, or call a function.
FREE = {"VarHandleOp", "ReadVariableOp", "Identity", "IdentityN", "Const", "NoOp", "Placeholder", "Reshape", "Shape",
        "ShapeN", "Squeeze", "ExpandDims", "StopGradient", "PartitionedCall", "StatefulPartitionedCall", "If",
        "StatelessIf", "While", "StatelessWhile"}
BRANCHES = ("f", "then_branch", "else_branch")


def launched(graph, without: tuple[str, ...] = ("backward", "one_in_many")) -> int:
    """How many operations of a function graph are launched, Horovod's own not counted, nor those that nothing uses.

    What XLA compiles is one. without: functions that are not counted, by a part of their names: the model, and what one
    step in 20 does. Of two branches, both count.
    """
    library = {one.signature.name: one for one in graph.as_graph_def().library.function}
    needed, left = set(), [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    while left:
        if (one := left.pop()) not in needed:
            needed.add(one)
            left += [*(tensor.op for tensor in one.inputs), *one.control_inputs]

    def total(nodes) -> int:
        count = 0
        for node in nodes:
            count += node.op not in FREE and not node.op.startswith("Horovod")
            for name in (node.attr[branch].func.name for branch in BRANCHES if branch in node.attr):
                if not any(part in name for part in without):
                    compiled = library[name].attr["_XlaMustCompile"].b
                    count += 1 if compiled else total(library[name].node_def)
        return count

    return total([one.node_def for one in needed])
