"""Plans that feel the network: two network namespaces as hosts, and a cable between them that is slowed step by step.

    sudo python benchmarks/cluster_namespaces.py                      about 45 minutes on 2 idle cores; goes on where it stopped
    sudo python benchmarks/cluster_namespaces.py --models small --steps 6 --rates 200     only some of it
    sudo python benchmarks/cluster_namespaces.py --busy               how much a busy cable slows the cores; three minutes
    python benchmarks/cluster_namespaces.py --table                   the tables of what is there, without running

Needs Linux, root and iproute2. The namespaces, joined by a veth pair, have names of their own and one core each; they are
removed at the end, also after an error or Ctrl-C, and no traffic leaves them. Each direction of the cable is limited by a
token bucket (tc tbf). For every rate the cluster is measured by `gplan cluster`; every model is profiled once, planned for
each rate by `gplan balance --machine` with everything on auto, and run by `gplan run` under torchrun. Beside the plan run
equal cuts (as many layers on both hosts) with the plan's own schedule and micro-batches, and the plan that was made for the
unlimited cable. Both hosts share the memory of one machine, which the plan's contention allows for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import gplan
from gplan.core import Plan, Run
from gplan.core.units import bytes_text, percent_text, seconds_text
from gplan.evaluate.compare import STEP_TIME, compare
from gplan.files.json_files import write_bytes
from gplan.files.machine_file import load_machine

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "reports" / "cluster"
HOSTS = ("host-a", "host-b")
DEVICE = "gplan0"  # of the cable, in both namespaces
RATES = ("unlimited", "200", "20")  # Mbit/s
BURST, QUEUE = "2kb", "400ms"  # of a token bucket; what it saves up while idle goes faster, so that is little
TIMEOUT_S = 300
_NUM_TURNS = 3
_PRODUCTS = """
import sys, time, torch
square, end_s, count = torch.ones(192, 192), time.monotonic() + 5, 0
while time.monotonic() < end_s:
    torch.mm(square, square)
    count += 1
print(count / 5, file=sys.stderr)
"""
_SENDER = """
import socket, sys, threading, time
address = ("10.77.0.1", 5555)
if sys.argv[1] == "0":
    connection = socket.create_server(address).accept()[0]
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
def receive():
    while connection.recv(65536):
        pass
threading.Thread(target=receive, daemon=True).start()
while True:
    connection.sendall(bytes(2**17))
"""
OURS, EQUAL, UNLIMITED = "plan", "equal cuts", "plan for the unlimited cable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the experiment, the micro-batch sizes of its profile, and the samples of a step."""

    file: str
    settings: tuple[str, ...]
    sizes: str
    batch_size: int
    words: str


MODELS = {
    "llama": Model(
        file="benchmarks/real_size_models.py", settings=("name=llama", "optimizer_name=sgd"), sizes="1,2,4", batch_size=8,
        words="Llama, 134 M parameters, vocabulary 32,000, 128 tokens, SGD with momentum",
    ),
    "resnet": Model(
        file="examples/resnet.py", settings=("depth=50", "width=64", "num_classes=1000", "image_size=96"), sizes="1,2,4,8",
        batch_size=16, words="ResNet-50, images of 96 x 96, 1,000 classes",
    ),
    "small": Model(
        file="examples/transformer_lm.py", settings=("num_blocks=8",), sizes="1,2,4,8,16", batch_size=32,
        words="a small transformer of 8 blocks",
    ),
}  # fmt: skip
KEY = ["model", "rate", "contender"]


def main() -> None:
    """Run what is not there yet, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rates", nargs="*", choices=RATES, default=list(RATES))
    parser.add_argument("--steps", type=int, default=14, help="of each run; the first three are not timed")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--busy", action="store_true", help="measure only how much a busy cable slows the cores")
    parser.add_argument("--table", action="store_true", help="write the tables only")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            (measure_busy if options.busy else measure)(options)
        except KeyboardInterrupt:
            raise SystemExit("interrupted; the rows so far are kept") from None
    rows = _rows(options.output)
    if rows.empty:
        rows.to_csv(options.output / "rows.csv", index=False)  # what the report names
    text = as_text(rows) + busy_text(options.output / "busy.csv")
    (options.output / "README.md").write_text(text)
    print(text)


def measure(options: argparse.Namespace) -> None:
    """Every rate, model and contender that is not there yet; a row is written when its run ends."""
    if why := why_not():
        raise SystemExit(f"error: {why}")
    with Hosts() as hosts:
        for rate in sorted({"unlimited", *options.rates}, key=RATES.index):
            hosts.limit(rate)
            machine = options.output / f"{rate}.toml"
            if not machine.exists():
                print(f"{rate}: measuring the cluster", flush=True)
                hosts.run(["cluster", "--device", "cpu", "--timeout", str(TIMEOUT_S), "--output", str(machine)])
            for name in options.models:
                _measure_model(name, rate, hosts, options)


def measure_busy(options: argparse.Namespace) -> None:
    """Products a second on each host's core, in turns with a silent cable and with one that is busy in both directions."""
    if why := why_not():
        raise SystemExit(f"error: {why}")
    found = []
    with Hosts() as hosts:
        for rate in options.rates:
            hosts.limit(rate)
            for index in range(_NUM_TURNS):
                silent, busy = (hosts.products_per_s(is_busy=x) for x in (False, True))
                for host, alone, beside in zip(HOSTS, silent, busy, strict=True):
                    found.append(
                        {"rate": rate, "turn": index, "host": host, "silent_per_s": alone, "busy_per_s": beside}
                    )
                    print(*found[-1].values(), flush=True)
    write_bytes(options.output / "busy.csv", pd.DataFrame(found).to_csv(index=False).encode())


def _measure_model(name: str, rate: str, hosts: Hosts, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="gplan-cluster-") as place:
        for contender, plan in _plans(name, rate, options.output):
            rows = _rows(options.output)
            if rate not in options.rates or _is_there(rows, name, rate, contender):
                continue
            plan_file, run_file = Path(place) / "plan.json", Path(place) / "run.json"
            gplan.save(plan, plan_file)
            hosts.run(["run", "--plan", str(plan_file), "--steps", str(options.steps), "--timeout", str(TIMEOUT_S), "--output", str(run_file)])  # fmt: skip
            run = gplan.load(run_file)
            assert isinstance(run, Run)
            row = _row(name, rate, contender, run, machine=options.output / f"{rate}.toml")
            print(*row.values(), flush=True)
            rows = pd.concat([rows, pd.DataFrame([row])], ignore_index=True)
            write_bytes(options.output / "rows.csv", rows.to_csv(index=False).encode())


def _plans(name: str, rate: str, folder: Path) -> Iterator[tuple[str, Plan]]:
    """The contenders at a rate; equal plans once."""
    machine, model = folder / f"{rate}.toml", MODELS[name]
    profile = _profile(name, folder)
    common = ["--machine", str(machine), "--k", "2", "--recompute", "never"]
    search = ["--batch-size", str(model.batch_size), "--microbatches", "auto", "--schedule", "auto"]
    best = _balanced(profile, [*common, *search])
    yield OURS, best
    layers = best.layer_names
    alike = ["--microbatches", str(best.num_microbatches), "--microbatch-size", str(best.microbatch_size), "--schedule", best.schedule]  # fmt: skip
    equal = _balanced(profile, [*common, *alike, "--cut-after", layers[(len(layers) - 1) // 2]])
    if _differ(equal, best):
        yield EQUAL, equal
    if rate != "unlimited":
        free = _balanced(profile, ["--machine", str(folder / "unlimited.toml"), *common[2:], *search])
        alike = ["--microbatches", str(free.num_microbatches), "--microbatch-size", str(free.microbatch_size), "--schedule", free.schedule]  # fmt: skip
        again = _balanced(profile, [*common, *alike, "--cut-after", free.stages[0].layer_names[-1]])
        if _differ(again, best):
            yield UNLIMITED, again


def _differ(one: Plan, other: Plan) -> bool:
    return any(getattr(one, x) != getattr(other, x) for x in ("cuts", "num_microbatches", "schedule"))


def _profile(name: str, folder: Path) -> Path:
    model, path = MODELS[name], folder / f"{name}.profile.json"
    if not path.exists():
        print(f"{name}: profile", flush=True)
        settings = [word for x in model.settings for word in ("--set", x)]
        _gplan(["profile", str(ROOT / model.file), *settings, "--microbatch-size", model.sizes, "--output", str(path)])
    return path


def _balanced(profile: Path, options: Sequence[str]) -> Plan:
    with tempfile.TemporaryDirectory(prefix="gplan-plan-") as place:
        _gplan(["balance", str(profile), *options, "--output", str(Path(place) / "plan.json")])
        plan = gplan.load(Path(place) / "plan.json")
    assert isinstance(plan, Plan)
    return plan


def _gplan(arguments: Sequence[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "gplan", *arguments], check=True, stdout=subprocess.DEVNULL, env=_environment()
    )


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def why_not() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    missing = [x for x in ("ip", "tc", "unshare", "taskset") if shutil.which(x) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if len(os.sched_getaffinity(0)) > 1 else "two hosts need two cores"


class Hosts:
    """Two network namespaces joined by a cable; each has a core and a host name."""

    def __init__(self) -> None:
        self._names = tuple(f"gplan-{os.getpid()}-{x}" for x in "ab")
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            for name in self._names:
                _sh("ip", "netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)  # and its end of the cable
            one, other = self._names
            _sh("ip", "link", "add", DEVICE, "netns", one, "type", "veth", "peer", "name", DEVICE, "netns", other)
            for i, name in enumerate(self._names):
                _sh("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", DEVICE)
                for device in (DEVICE, "lo"):
                    _sh("ip", "-n", name, "link", "set", device, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def limit(self, rate: str) -> None:
        """Limit both directions to so many Mbit/s."""
        for name in self._names:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root"], check=False, capture_output=True)
            if rate != "unlimited":
                _sh("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", f"{rate}mbit", "burst", BURST, "latency", QUEUE)  # fmt: skip

    def run(self, arguments: Sequence[str]) -> None:
        """Run a verb of gplan under torchrun on both hosts; raises SystemExit with the errors of a host that fails."""
        with _started([self._command(i, arguments) for i in range(2)]) as processes:
            texts = [x.communicate()[1] for x in processes]
        failed = [
            f"{host}: {text[-2000:]}" for host, text, x in zip(HOSTS, texts, processes, strict=True) if x.returncode
        ]
        if failed:
            raise SystemExit(f"error: gplan {' '.join(arguments)} failed\n" + "\n".join(failed))

    def products_per_s(self, *, is_busy: bool) -> list[float]:
        """Products of matrices a second on each core, both at the same time; `is_busy`: while both hosts send."""
        senders = [[sys.executable, "-c", _SENDER, str(host)] for host in range(2) if is_busy]
        with _started([self._on_host(i, x) for i, x in enumerate(senders)]):
            time.sleep(1.0)  # until they are connected
            with _started([self._on_host(i, [sys.executable, "-c", _PRODUCTS]) for i in range(2)]) as processes:
                return [float(x.communicate()[1].split()[-1]) for x in processes]

    def _command(self, host: int, arguments: Sequence[str]) -> list[str]:
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "1",
            "--master-addr", "10.77.0.1", "--master-port", "29500", "-m", "gplan", *arguments,
        ]  # fmt: skip
        return self._on_host(host, launcher)

    def _on_host(self, host: int, command: Sequence[str]) -> list[str]:
        core = sorted(os.sched_getaffinity(0))[host]
        named = ["unshare", "--uts", "sh", "-c", f'hostname {HOSTS[host]} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self._names[host], *named, "taskset", "-c", str(core), *command]


@contextmanager
def _started(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes; what is left of them is ended, with their children."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command,
                    env=_environment(GLOO_SOCKET_IFNAME=DEVICE),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def _sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)}: {done.stderr.strip()}")


def _row(name: str, rate: str, contender: str, run: Run, *, machine: Path) -> dict[str, Any]:
    plan, step = run.plan, compare(run).row(STEP_TIME)
    cost = plan.stages[0].cost
    return {
        "model": name,
        "rate": rate,
        "contender": contender,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "layers": json.dumps([x.num_layers for x in plan.stages]),
        "cut_after": plan.stages[0].layer_names[-1],
        "sent_bytes": cost.activation_bytes,
        "link_bytes_per_s": load_machine(machine).between.bytes_per_s,
        "predicted_s": step.predicted,
        "measured_s": step.measured,
        "error": step.error,
        "equal_speed_error": step.equal_speed_error,
        "bubble": plan.prediction.bubble,
        "measured_bubble": run.timeline.bubble,
        "num_counted": run.num_counted,
        "num_disturbed": run.num_disturbed,
    }


def _rows(folder: Path) -> pd.DataFrame:
    path = folder / "rows.csv"
    return pd.read_csv(path, keep_default_na=False, dtype={"rate": str}) if path.exists() else pd.DataFrame(columns=KEY)


def _is_there(rows: pd.DataFrame, *key: str) -> bool:
    return bool((rows[KEY].astype(str) == list(key)).all(axis=1).any())


def as_text(rows: pd.DataFrame) -> str:
    """The report: one line for each run."""
    order = {x: i for i, x in enumerate((*MODELS, *RATES, OURS, EQUAL, UNLIMITED))}
    rows = rows.sort_values(KEY, key=lambda column: column.map(order))
    lines = [
        "# Plans that feel the network",
        "",
        "Made by `python benchmarks/cluster_namespaces.py`: two network namespaces as hosts, one core each, and between them a",
        "cable whose rate is limited in each direction. `gplan cluster` measured it, `gplan balance --machine` planned with",
        "micro-batches and schedule on auto, `gplan run` ran under torchrun. Errors are predicted over measured, less 1, as they",
        "came and at equal host speed. Every figure is in [rows.csv](rows.csv).",
        "",
        *(f"- {name}: {x.words}; {x.batch_size} samples a step" for name, x in MODELS.items()),
        "",
        "| model | Mbit/s | measured rate | run | schedule | M x size | layers | cut after | sent | predicted | measured | error | at equal speed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_line(x) for _, x in rows.iterrows()),
        "",
    ]
    return "\n".join(lines)


def busy_text(path: Path) -> str:
    """How much slower the cores are while the cable is busy; "" where that was not measured."""
    if not path.exists():
        return ""
    rows = pd.read_csv(path, dtype={"rate": str})
    slower = rows.silent_per_s / rows.busy_per_s - 1
    lines = [
        "",
        "## What the cable takes from the cores",
        "",
        "Products of two 192 x 192 matrices a second, on both cores at the same time, with a silent cable and with one that is",
        "busy in both directions, in turns ([busy.csv](busy.csv), `--busy`). The kernel limits the rate and delivers packets on",
        "the same cores, and the receiver wakes up for them. So sending slows the layers of a model too, which the prediction does",
        "not know: a part of the errors at 200 Mbit/s. How much of it remains with network cards was not measured.",
        "",
        "| Mbit/s | products take longer by: median | least | most |",
        "|---|---|---|---|",
        *(
            f"| {rate} | {' | '.join(percent_text(x, signed=True) for x in (of.median(), of.min(), of.max()))} |"
            for rate, of in slower.groupby(rows.rate, sort=False)
        ),
        "",
    ]
    return "\n".join(lines)


def _line(row: Any) -> str:
    equal = row.equal_speed_error
    cells = [
        row.model,
        row.rate,
        f"{bytes_text(row.link_bytes_per_s)}/s",
        row.contender,
        row.schedule,
        f"{int(row.num_microbatches)} x {int(row.microbatch_size)}",
        " + ".join(map(str, json.loads(row.layers))),
        row.cut_after,
        bytes_text(row.sent_bytes),
        seconds_text(row.predicted_s),
        seconds_text(row.measured_s),
        percent_text(row.error, signed=True),
        "" if equal == "" or pd.isna(equal) else percent_text(float(equal), signed=True),
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
