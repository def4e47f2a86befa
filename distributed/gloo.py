"""horovodrun as launch/ starts it: `python -m distributed.gloo --gloo -np 2 ...` takes horovodrun's own arguments.

horovodrun imports TensorFlow in a child process, before the first worker starts, to see that Horovod was built with
Gloo. Every Horovod that uv.lock describes is.
"""
from horovod.runner import launch


def main() -> None:
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()


if __name__ == "__main__":
    main()
