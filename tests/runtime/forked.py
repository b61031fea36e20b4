"""Processes forked from the test's in place of new Pythons, which saves seconds of imports per process.

Sessions, pipes, signals and exit codes are as in new ones; each fork runs its module as `__main__`, and may fork on.
Tests of the command line start real processes.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from gplan.core import Plan, Run
from gplan.runtime.run.launch import run_local_processes
from gplan.runtime.run.run_options import RunOptions
from gplan_profiler.model.model_reference import SettingValue


def run_forked(
    reference: str, plan: Plan, options: RunOptions, *, settings: Mapping[str, SettingValue] | None = None
) -> Run:
    """Run a plan with the torch engine in forked processes."""
    with forking():
        return run_local_processes(reference, dict(settings or {}), plan, options, report=lambda _step, _loss: None)


def forking() -> AbstractContextManager[object]:
    """Inside, jobs fork their processes, and so do the processes that are forked inside."""
    return patch("subprocess.Popen", ForkedProcess)


class ForkedProcess(subprocess.Popen[str]):
    """`python -m MODULE ARGUMENTS` as a fork that runs the module."""

    def __init__(self, args: Sequence[str], *, env: Mapping[str, str], **options: Any) -> None:
        module, *arguments = args[args.index("-m") + 1 :]
        given = {**options, "restore_signals": False}  # a Python of its own would ignore SIGPIPE again
        super().__init__(args, env=env, preexec_fn=lambda: _become(module, arguments, env), **given)


def launcher_environments(hosts: Sequence[int]) -> list[dict[str, str]]:
    """What a launcher sets for each rank, given the number of its host; all are processes on the loopback."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = str(asked.getsockname()[1])
    return [
        {
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "GROUP_RANK": str(host),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(host)),
            "TORCHELASTIC_RUN_ID": "test",
        }
        for rank, host in enumerate(hosts)
    ]


def _become(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a module as its own process would, and exit; called in the fork with its three streams in place."""
    code = 1
    try:
        _give_up_files()
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        faulthandler.enable(sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # it is looked up anew
        torch.set_num_threads(1)  # the threads of the parent are not here
        if not hasattr(sys.modules.get(module), "__path__"):
            sys.modules.pop(module, None)  # it is run anew; of a package, its __main__
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _give_up_files() -> None:
    """Redirect all other files to nowhere, so pipes end and closing the parent's objects closes nothing else."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != nowhere:
            os.dup2(nowhere, number)
