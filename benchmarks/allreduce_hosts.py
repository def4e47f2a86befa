"""Counts the bytes and the sequential messages of a ring and a torus, on emulated hosts.

    uv run python -m benchmarks.allreduce_hosts [--rate=1gbit] [--output=hosts.json]

Needs what tests.rigs.hosts needs. The first part runs one worker per host. It counts the messages with gradients
that a worker sends in an exchange. Each message waits for the one before, so their number is the number of steps, which
should be 2 (N - 1) for a ring and 2 (X - 1) + 2 (Y - 1) for a torus. Each message is so small that it is one packet on
the network, so the packets are counted. The second part runs benchmarks.allreduce on two and four hosts with two
workers each, whose links tc has slowed down. It measures times, and the bytes that the busiest host sends in an
exchange.

Open MPI is configured to use its ring algorithms for all collectives, including the baseline. By default it uses
others.
"""
import json
import socket
import sys
from pathlib import Path

from absl import app
from absl import flags as absl_flags

from benchmarks.allreduce import BAR, MPIRUN, ROOT, connect, methods, table, worker_command
from tests.rigs.hosts import Hosts

INTERFACE = "eth0"
SMALLEST = 600  # bytes of gradients in the smallest message: longer than a negotiation message, shorter than a packet
RINGS = {"allreduce": 4, "reduce_scatter": 3, "allgatherv": 3}  # Open MPI's numbers of coll_tuned's ring algorithms
EVERY_PROTOCOL, OUTGOING = 3, 4  # ETH_P_ALL and PACKET_OUTGOING of packet(7)
FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_string("rate", "1gbit", "Rate of each host's link, in the syntax of tc.", flag_values=FLAGS)
absl_flags.DEFINE_list("hosts", ["2", "4"], "Numbers of hosts to time, with two workers each.", flag_values=FLAGS)
absl_flags.DEFINE_list("sizes", ["1000000", "10000000", "100000000"], "Sizes of the float32 tensors in bytes.",
                       flag_values=FLAGS)
absl_flags.DEFINE_list("workers", ["4", "6", "8"], "Numbers of workers to count messages with.", flag_values=FLAGS)
absl_flags.DEFINE_bool("worker", False, "Run as one of the workers of a launcher, and count messages.",
                       flag_values=FLAGS)
absl_flags.DEFINE_string("output", None, "JSON file for the results.", flag_values=FLAGS)


def start(hosts: Hosts, names: list[str], each: int, command: list[str]) -> list[dict]:
    """Runs a command with `each` workers on each of these hosts. Returns the JSON that rank 0 prints."""
    launcher, *words = MPIRUN
    rings = [("--mca", f"coll_tuned_{name}_algorithm", str(number)) for name, number in RINGS.items()]
    done = hosts.run(
        names[0], launcher, *words, *(word for ring in rings for word in ring), "--mca", "coll_tuned_use_dynamic_rules",
        "1", "--mca", "coll", "^han", "--mca", "btl_tcp_if_include", INTERFACE, "--prtemca",
        "plm_ssh_args", "-o StrictHostKeyChecking=no", "--host",
        ",".join(f"{name}:{each}" for name in names), "-x", f"PYTHONPATH={ROOT}", "-x", "TF_CPP_MIN_LOG_LEVEL=3",
        "-np", len(names) * each, *command, timeout=1200)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def count(rounds: int = 20) -> list[dict]:
    """Counts messages per exchange. Returns rows, the same on all workers: workers, method, messages of the busiest."""
    from mpi4py import MPI

    process_sets, world = connect(), MPI.COMM_WORLD
    rows = []
    for name, call in methods(world.size * SMALLEST, process_sets).items():
        if name != BAR and "fp16" not in name:
            call()
            sent = 0
            for _ in range(rounds):
                with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(EVERY_PROTOCOL)) as packets:
                    packets.bind((INTERFACE, EVERY_PROTOCOL))
                    world.Barrier()
                    call()
                    world.Barrier()
                    sent += messages(packets)
            rows.append({"workers": world.size, "method": name,
                         "messages": world.allreduce(sent, op=MPI.MAX) / rounds})
    return rows


def messages(packets) -> int:
    """Returns how many of the packets sent since the socket was opened hold a slice of gradients."""
    packets.setblocking(False)
    slices = 0
    while True:
        try:
            packet, (_, _, kind, *_) = packets.recvfrom(65_536)
        except BlockingIOError:
            return slices
        slices += kind == OUTGOING and len(packet) > SMALLEST


def main(argv) -> None:
    FLAGS(argv)
    if FLAGS.worker:
        rows = count()
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(rows), flush=True)
        return
    most = max(map(int, FLAGS.hosts + FLAGS.workers))
    names, timed, counted = [f"h{number}" for number in range(1, most + 1)], [], []
    with Hosts(*names) as hosts:
        for workers in map(int, FLAGS.workers):
            command = [sys.executable, "-m", "benchmarks.allreduce_hosts", "--worker"]
            counted += start(hosts, names[:workers], 1, command)
        for row in counted:
            print(f"{row['workers']} hosts, 1 worker each: {row['method']}, {row['messages']:g} messages", flush=True)
        hosts.shape(FLAGS.rate)
        for number in map(int, FLAGS.hosts):
            command = worker_command(f"--sizes={','.join(FLAGS.sizes)}", f"--interface={INTERFACE}")
            rows = start(hosts, names[:number], 2, command)
            timed += [{"hosts": number, **row} for row in rows]
            print(f"{number} hosts, 2 workers each, {FLAGS.rate}\n{table(rows)}", flush=True)
    if FLAGS.output:
        Path(FLAGS.output).write_text(json.dumps({"times": timed, "messages": counted}))


if __name__ == "__main__":
    app.run(lambda argv: main(sys.argv), argv=sys.argv[:1])
