"""Runs horovodrun, made safer. It takes horovodrun's own arguments.

    python -m distributed.gloo --gloo -np 2 COMMAND...
    python -m distributed.gloo --gloo -np 2 --min-np 1 --max-np 2 --network-interfaces=eth0 \\
        --host-discovery-script ./hosts.sh COMMAND...                                          elastic training

Its server listens only on the network interface that the workers use, answers only these, and unpickles only Horovod's
messages: see distributed/services.py. It never starts Horovod's search for that interface, because this writes the
job's key into command lines, which all users of a host can read. For the same reason, workers get the environment by
inheritance or over ssh's standard input.

It does without horovodrun's check for Gloo, which imports TensorFlow before the first worker starts. Every Horovod that
uv.lock describes has Gloo.
"""
import os
import pickle
import shlex
import sys

from horovod.runner import gloo_run, launch
from horovod.runner.common.util import env as env_util
from horovod.runner.driver import driver_service
from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES, create_rendezvous_handler
from horovod.runner.http.http_server import BAD_REQUEST
from horovod.runner.util.remote import get_remote_command

from common import command, launcher
from common.errors import UsageError, complain
from distributed import environment, services

PROGRAM = "distributed.gloo"
LOOPBACK = "lo"
SERVER = "HOROVOD_GLOO_RENDEZVOUS_ADDR"  # the address of this process's server


def elastic_handler(driver):
    """Returns the handler of the server's requests in elastic training. It rejects other pickles, and keeps keys."""
    class Handler(create_rendezvous_handler(driver)):
        def do_PUT(self):
            try:
                super().do_PUT()
            except pickle.UnpicklingError as error:
                complain(f"a message from {self.client_address[0]} was rejected: {error}", PROGRAM)
                self.send_status_code(BAD_REQUEST)

        def _get_value(self, scope, key):
            return None if scope == PUT_WORKER_ADDRESSES else super()._get_value(scope, key)

    return Handler


def refuse_search(*_, **__):
    raise UsageError("workers on other hosts need --network-interfaces=NAME, an interface that all hosts share")


def remotely(quoted: str, **options) -> str:
    """Returns the command that runs a command, which is one quoted word of sh, on another host."""
    return environment.sending(get_remote_command(shlex.quote(environment.RECEIVE) + quoted, **options))


def secretly(variables_of, token: str):
    """Returns gloo_run's function of the variables in command lines, which leaves out the server's address.

    The workers inherit it, with the token.
    """
    def variables(server_ip, nics, port, elastic=False):
        found = variables_of(server_ip, nics, port, elastic)
        os.environ[SERVER] = f"{found.pop(SERVER)}:{port}/{token}"
        return found

    return variables


def main() -> int:
    """Runs a command line; returns the exit code."""
    launch.gloo_built = lambda verbose=False: True
    driver_service._driver_fn = refuse_search
    gloo_run.create_rendezvous_handler = elastic_handler
    gloo_run.get_remote_command = remotely
    env_util.is_exportable = lambda name: name != SERVER and (  # in command lines
        name.startswith("HOROVOD_") or name not in os.environ)
    options = launch.parse_args()
    with command.shell(PROGRAM) as ending:
        launcher.check_alone()
        if launch._is_elastic(options) and not options.nics:
            raise UsageError("elastic training needs --network-interfaces=NAME, an interface that all hosts share, or "
                             f"{LOOPBACK} on a single machine")
        services.restrict(next(iter(options.nics or [LOOPBACK])))
        gloo_run.create_run_env_vars = secretly(gloo_run.create_run_env_vars, services.require_token())
        launch.run_commandline()
    return ending.code


if __name__ == "__main__":
    sys.exit(main())
