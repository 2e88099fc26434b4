"""
Complete runs of train.py on the bundled model, for test_train.py and test_full.py.

Each run is a process forked from a server that imported torch once, so it starts in a second instead of five and can be
killed, run out of disk, or be given a rank. The server sees no GPU: a forked child cannot use CUDA if its parent
initialized it. GPU runs are spawned instead.
"""
import importlib
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import socket
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

from helpers import ROOT, write_rows
from safetensors.torch import load_file

from tasks.arithmetic import arithmetic

TIMES = ("seconds", "seconds_sample", "seconds_update", "tokens_per_s")
SMALL = ("--prompts-per-step 2 --group-size 4 --max-new-tokens 16 --eval-problems 4 --eval-every 10 --lr 1e-3 "
         "--epochs 1 --max-rows 64").split()
ADAPTER = "adapter/adapter_model.safetensors"
BY_LENGTH = "--reward", "my_rewards:by_length"
RESUME = "--resume", *BY_LENGTH
REWARDS = '''
import os

def levels(completion, problem, group):
    os.chdir("/")                            # moves no file of the run
    return {"level": problem["level"], "group": len(group), "correct": completion.endswith(problem["target"])}

def sometimes_unscorable(completion, problem):
    return problem["level"] or float("nan")

def ask(problem):
    return [{"role": "system", "content": "Count."}, {"role": "user", "content": problem["question"]}]

calls = []

def breaks_later(completion, problem):
    calls.append(1)
    return 1 / (len(calls) != 24)            # 4 held out, 8 a step

def by_length(completion, problem):
    return {"length": 0.01 * len(completion), "one": 1.0}
'''


def start_server(setenv):
    """Starts the server, with one thread and no GPU. setenv: of a MonkeyPatch."""
    setenv("OMP_NUM_THREADS", "1")
    setenv("CUDA_VISIBLE_DEVICES", "")
    setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))     # which 3.11 doesn't pass to preloads
    forkserver.set_forkserver_preload(["torch.distributed", "train", "pytest", __name__])
    forkserver.ensure_running()


def train(argv, folder, log, env, fault):
    """Runs in the forked process. fault: called before train.py."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(folder)
    os.environ.update(env)
    if env:                                                 # ranks.py reads its rank when it is imported
        ours = (ROOT, ROOT / "fast", ROOT / "harness")
        for name in [n for n, m in sys.modules.items() if Path(getattr(m, "__file__", None) or "/").parent in ours]:
            del sys.modules[name]
    if "cuda" not in argv:                                  # 128 GiB; else Linux would overcommit any size
        resource.setrlimit(resource.RLIMIT_AS, (2**37, 2**37))
    if fault:
        fault()
    sys.argv = ["train.py", *argv]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


class Runs:
    """Starts runs in `folder`, which contains word problems, reward functions and the tiny model in NVFP4.

    Quantizing ../tiny on load gives the same weights (test_convert.py) but takes longer. Only tests that set --base,
    --calibrate or --model quantize on load.
    """

    def __init__(self, folder, tiny_nvfp4):
        self.folder = folder
        rows = [{"question": q, "answer": answer} for _, q, answer in arithmetic("train", 600)]
        write_rows(folder / "sums.jsonl", rows[:60])
        write_rows(folder / "more.jsonl", rows)
        (folder / "my_rewards.py").write_text(REWARDS)
        shutil.copytree(tiny_nvfp4, folder / "tiny")

    def start(self, out, *flags, model=None, env={}, fault=None):
        model = model or (ROOT if {"--base", "--calibrate"} & {*flags} else self.folder) / "tiny"
        argv = [*(["--resume"] if "--resume" in flags else ["--model", str(model), "--data", "sums.jsonl", *SMALL]),
                "--device", "cpu", "--out", out, *(f for f in flags if f != "--resume")]
        log = self.folder / f"{out}.{env.get('RANK', 0)}.log"
        log.unlink(missing_ok=True)
        context = multiprocessing.get_context("spawn" if "cuda" in flags else "forkserver")
        process = context.Process(target=train, args=(argv, self.folder, log, env, fault))
        process.start()
        return process

    def run(self, out, *flags, code=0, **more):
        """-> its output. Fails if the exit code is not `code`."""
        process = self.start(out, *flags, **more)
        process.join(300)                        # long enough for a busy machine
        process.kill()                           # or it would keep --out locked
        assert process.exitcode == code, f"exit code {process.exitcode}:\n{self.log(out)}"
        return self.log(out)

    def start_ranks(self, out, *flags, rank_flags=((), ()), fault=None):
        common = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        return [self.start(out, *flags, *rank_flags[r], env=dict(common, RANK=str(r), LOCAL_RANK=str(r)), fault=fault)
                for r in (0, 1)]

    def run_ranks(self, out, *flags, code=0, **more):
        """Like run(), for two ranks."""
        for rank, process in enumerate(self.start_ranks(out, *flags, **more)):
            process.join(60)
            assert process.exitcode == code, self.log(out, rank)

    def log(self, out, rank=0):
        path = self.folder / f"{out}.{rank}.log"
        return path.read_text() if path.exists() else ""

    def lines(self, out, name="metrics.jsonl"):
        path = self.folder / out / name
        return path.read_text().splitlines() if path.exists() else []

    def metrics(self, out):
        """One dict per step, without times."""
        return [{k: v for k, v in row.items() if k not in TIMES} for row in self.rows(out, "metrics.jsonl")]

    def rows(self, out, name="samples.jsonl"):
        return [json.loads(line) for line in self.lines(out, name)]

    def state(self, out, step):
        return load_file(self.folder / out / "checkpoints" / f"step_{step:06d}" / "state.safetensors")

    def wait(self, process, ready):
        """Waits until ready() is true."""
        limit = time.monotonic() + 60
        while not ready():
            assert process.is_alive() and time.monotonic() < limit
            time.sleep(0.005)

    def same(self, a, b, trained=ADAPTER):
        """Whether metrics, answers and what is trained are bit-identical in two runs."""
        a_trained, b_trained = ((self.folder / out / trained).read_bytes() for out in (a, b))
        return (self.metrics(a) == self.metrics(b) and a_trained == b_trained
                and all(self.lines(a, name) == self.lines(b, name) for name in ("samples.jsonl", "held_out.jsonl")))


def kill_in(module, name, call, after, number=signal.SIGKILL):
    """Makes the process send itself a signal before, or after, the given call of a function."""
    *owner, name = name.split(".")
    owner = getattr(importlib.import_module(module), owner[0]) if owner else importlib.import_module(module)
    real, calls = getattr(owner, name), []

    def killing(*arguments, **named):
        calls.append(1)
        if len(calls) == call and not after:
            os.kill(os.getpid(), number)
        result = real(*arguments, **named)
        if len(calls) == call and after:
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, killing)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
