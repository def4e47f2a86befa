"""Runs horovodrun without its check for Gloo: `python -m distributed.gloo --gloo -np 2 ...`, as launch/ does.

It takes horovodrun's own arguments. Before the first worker starts, horovodrun imports TensorFlow in a child process to
check that Horovod was built with Gloo. Every Horovod that uv.lock describes is.
"""
from horovod.runner import launch


def main() -> None:
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()


if __name__ == "__main__":
    main()
