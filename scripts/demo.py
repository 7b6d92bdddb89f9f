"""Two training jobs at once on one prepared set of digits, with a daemon of their own.

    scripts/demo [--data DIR]

`scripts/demo` makes the environment and runs this. The daemon has its own runtime folder and its store is `.demo/store`, so
a user's daemon is never touched and a second run finds the store made. Exits with 0 only if all of it worked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import digits

CHECKOUT = Path(__file__).resolve().parent.parent
KEEP = CHECKOUT / ".demo"
DATASERVE = Path(sys.executable).with_name("dataserve")

START_TIMEOUT_S = 600
JOBS_TIMEOUT_S = 900
COMMAND_TIMEOUT_S = 30
LATE_DAEMON_S = 5  # a start that was broken off may still bring up its daemon
POLL_S = 0.2

EXIT_NO_DAEMON = 3


@dataclass(frozen=True)
class Job:
    """One run of train.py."""

    seed: int
    lr: float

    @property
    def name(self) -> str:
        """What the daemon calls it."""
        return f"lr-{self.lr}"


JOBS = (Job(seed=1, lr=0.001), Job(seed=2, lr=0.003))


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Two training jobs at once on one prepared MNIST."
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="where MNIST lies in torchvision's layout")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    KEEP.mkdir(exist_ok=True)
    try:
        chosen = digits.choose(args.data, os.environ, CHECKOUT, KEEP)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"Data: {chosen.what}.")
    # A socket's path has 107 bytes at most: the runtime folder is made in /tmp, whatever TMPDIR says.
    runtime = Path(tempfile.mkdtemp(prefix="ds-demo-", dir="/tmp"))
    try:
        return demonstrate(chosen, runtime)
    except KeyboardInterrupt:
        return 130
    except subprocess.CalledProcessError as error:
        print(f"The demo failed: `{shlex.join(map(str, error.cmd))}` ended with {error.returncode}.", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        print(f"The demo failed: `{shlex.join(map(str, error.cmd))}` took {error.timeout} s.", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(runtime)


def leave(number: int, _frame: object) -> None:
    """End on a signal by way of every `finally`."""
    raise SystemExit(128 + number)


def demonstrate(chosen: digits.Digits, runtime: Path) -> int:
    """Serve, train twice, show, stop. The exit status."""
    environ = own_environ(runtime)
    config = runtime / "demo.toml"
    config.write_text(chosen.config())
    print(f"\nThe data sets, as in a file for --config:\n\n{chosen.config()}", flush=True)
    with daemon(config, environ):
        results, seen = train(chosen, runtime, environ)
    print_table(results)
    if len(results) < len(JOBS):
        print("Not all jobs reached their accuracy.", file=sys.stderr)
        return 1
    if not seen:
        print("`dataserve status` never showed the jobs at work together.", file=sys.stderr)
        return 1
    return 0


def own_environ(runtime: Path) -> dict[str, str]:
    """The environment without a user's daemon, launcher or store, and with ours."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {key: value for key, value in os.environ.items() if key not in foreign and not key.startswith("DATASERVE_")}
    return kept | {
        "XDG_RUNTIME_DIR": str(runtime),
        "DATASERVE_ADDRESS": f"ipc://{runtime}/d.sock",
        "DATASERVE_STORE": str(KEEP / "store"),
    }


@contextlib.contextmanager
def daemon(config: Path, environ: dict[str, str]) -> Iterator[None]:
    """A daemon that has all ready; it is stopped however the block or its own start ends."""
    started = False
    try:
        command = ("start", "--config", str(config), "--detach")
        print("$ dataserve", *command, flush=True)
        subprocess.run([DATASERVE, *command], env=environ, check=True, timeout=START_TIMEOUT_S)
        started = True
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave the daemon behind
        stop(environ, must=started)


def stop(environ: dict[str, str], *, must: bool) -> None:
    """End the daemon. Where none `must` be there, one may still be on its way: wait for it a little."""
    print("$ dataserve stop", flush=True)
    deadline = time.monotonic() + LATE_DAEMON_S
    while True:
        ended = subprocess.run(
            [DATASERVE, "stop"], env=environ, timeout=COMMAND_TIMEOUT_S, capture_output=not must, check=must
        )
        if ended.returncode != EXIT_NO_DAEMON or time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def train(chosen: digits.Digits, runtime: Path, environ: dict[str, str]) -> tuple[list[dict[str, Any]], bool]:
    """Run the jobs at the same time; returns the results of those that succeeded, and whether status showed all at work."""
    results = {job: runtime / f"{job.name}.json" for job in JOBS}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for job, result in results.items():
            options = ("--job", job.name, "--seed", str(job.seed), "--lr", str(job.lr), "--json", str(result))
            command = ["scripts/train.py", "--train", digits.TRAIN, "--test", digits.TEST, *options, *chosen.train_args]
            print("$ python", *command, "&", flush=True)
            running.append(subprocess.Popen([sys.executable, *command], cwd=CHECKOUT, env=environ))
        seen = watch(running, environ)
    finally:
        for process in running:
            process.kill()  # only those that an interrupt or the time-out left
            process.wait()
    succeeded = zip(results.values(), running, strict=True)
    return [json.loads(path.read_text()) for path, process in succeeded if process.returncode == 0], seen


def watch(running: list[subprocess.Popen[bytes]], environ: dict[str, str]) -> bool:
    """Wait for the jobs; show the daemon's status once all of them are at work, and say whether that was so."""
    deadline = time.monotonic() + JOBS_TIMEOUT_S
    seen = False
    while any(process.poll() is None for process in running):
        if time.monotonic() > deadline:
            print(f"The jobs were not done after {JOBS_TIMEOUT_S} s.", file=sys.stderr)
            break
        if not seen and all_at_work(environ):
            print("$ dataserve status", flush=True)
            subprocess.run([DATASERVE, "status"], env=environ, timeout=COMMAND_TIMEOUT_S, check=True)
            seen = True
        time.sleep(POLL_S)
    return seen


def all_at_work(environ: dict[str, str]) -> bool:
    """Whether the daemon sees each job on the training set, beyond its first batches."""
    command = (DATASERVE, "status", "--json")
    answer = subprocess.run(command, env=environ, timeout=COMMAND_TIMEOUT_S, check=True, capture_output=True)
    at_work = {
        job["job"]
        for job in json.loads(answer.stdout)["jobs"]
        if job["dataset"] == digits.TRAIN
        and any((consumer["epoch"], consumer["position"]) > (0, 0) for consumer in job["consumers"])
    }
    return at_work >= {job.name for job in JOBS}


def print_table(results: list[dict[str, Any]]) -> None:
    """What came out, a line a job."""
    print(f"\n{'job':10} {'seed':>4} {'lr':>6} {'test accuracy':>14} {'samples/s':>10} {'waited for data':>16}")
    for row in results:
        print(
            f"{row['job']:10} {row['seed']:4} {row['lr']:6} {row['accuracy']:14.2%} {row['samples_per_s']:10,.0f} "
            f"{row['wait_share']:16.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
