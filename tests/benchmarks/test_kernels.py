"""benchmarks/kernels.py, on profiles that are written here as a GPU and a CPU would."""
import pytest
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

from benchmarks.kernels import counted


def write(folder, **planes):
    """planes: the names and milliseconds of the events of each, by "gpu" or "host"."""
    space = XSpace()
    for where, events in planes.items():
        plane = space.planes.add(name={"gpu": "/device:GPU:0", "host": "/host:CPU"}[where])
        line = plane.lines.add(name="Stream #7")
        for number, (name, milliseconds) in enumerate(events):
            plane.event_metadata[number].name = name
            line.events.add(metadata_id=number, duration_ps=int(milliseconds * 1e9))
    path = folder / "tensorboard" / "plugins" / "profile" / "now" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(space.SerializeToString())


def test_transposes_and_kernels_of_a_gpu(tmp_path):
    """Two steps; operations of the host do not count then."""
    transpose, norm = "void cudnn::ops::nchwToNhwcKernel<float, false>(int)", "cudnn::bn_fw_tr_1C11_kernel_NCHW<float>"
    write(tmp_path, host=[("train", 9), ("train", 9), ("a/transpose:Transpose", 5)],
          gpu=[(norm, 4), (transpose, 1), (transpose, 2), ("void tensorflow::functor::SwapDimension1And2<int>", 3)])
    found = counted(tmp_path)
    assert (found["steps"], found["transposes"]) == (2, 1.5)
    assert next(iter(found["kernels"].items())) == (norm, {"calls": 0.5, "ms": 2})
    assert found["kernels"][transpose] == {"calls": 1, "ms": 1.5}


def test_operations_of_a_cpu(tmp_path):
    write(tmp_path, host=[("train", 9), ("ExecutorState::Process", 9), ("bn/norm:FusedBatchNormV3", 5),
                          ("a/transpose:Transpose", 6)])
    found = counted(tmp_path)
    assert found["transposes"] == 1 and list(found["kernels"]) == ["Transpose", "FusedBatchNormV3"]


def test_a_folder_without_a_profile_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no profile of a training step"):
        counted(tmp_path)
