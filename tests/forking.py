"""The command `isoloss` for many short calls: each is a process of its own, forked from one that has torch loaded.

`Commands(folder)` writes scripts `isoloss` and `python` to a folder for the PATH. `isoloss`, and `python -m isoloss`,
hand their arguments, folder, environment and streams to a server, which forks; the child runs
`isoloss.cli.main.entry`, as the console script does, with warnings as errors.
"""

import array
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys

PRELOADED = [
    *("datasets", "rich.progress", "tokenizers", "torch"),
    *("transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert"),
    *("transformers.models.opt.modeling_opt", "transformers.trainer"),
    *(
        "isoloss.lab.evaluation.evaluator",
        "isoloss.lab.languages._pcfg.kernels",
        "isoloss.lab.models.compiled_bert",
    ),
    *(
        "isoloss.comparison.traces",
        "isoloss.lab.evaluation.pretraining",
        "isoloss.comparison.figure",
        "isoloss.comparison.page",
        "isoloss.lab.finetuning",
    ),
]

CLIENT = """#!{python} -SE
import array, json, os, socket, sys
words = sys.argv[1:]
if sys.argv[0].endswith("/python"):
    if words[:2] != ["-m", "isoloss"]:
        os.execv({python!r}, [{python!r}, *words])
    words = words[2:]
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
call = json.dumps([words, os.getcwd(), dict(os.environ)]).encode() + b"\\n"
streams = array.array("i", [0, 1, 2])
link.sendmsg([call[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
link.sendall(call[1:])
sys.exit(int(link.makefile().readline()))
"""


class Commands:
    """The scripts in `folder`, and the server behind them, which ends with the `with` block."""

    def __init__(self, folder, preloaded=PRELOADED):
        self.folder, self.preloaded = folder, preloaded
        folder.mkdir()
        self.address = str(folder / "socket")

    def __enter__(self):
        for name in ("isoloss", "python"):
            script = self.folder / name
            script.write_text(CLIENT.format(python=sys.executable, address=self.address))
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
        read, write = os.pipe()
        self.server = subprocess.Popen(
            [sys.executable, __file__, self.address, str(write), *self.preloaded],
            pass_fds=[write],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )
        os.close(write)
        ready = os.read(read, 1)  # nothing if it has ended
        os.close(read)
        assert ready, "the server did not start"
        return self

    def __exit__(self, *_):
        self.server.terminate()
        self.server.wait()


def serve(address, ready, preloaded):
    """Fork for each call; import first what most commands need."""
    import importlib

    for name in preloaded:
        importlib.import_module(name)
    if preloaded:
        _warm_up()

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    os.write(ready, b"1")
    os.close(ready)
    while True:
        link, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _answer(link, address)
        link.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _warm_up():
    """Have done once what takes most of a second at its first use: numba's and transformers' registries.

    Nothing here starts a thread, and there is no backward pass: the children could not go on with either.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from isoloss.cli.main import main

    get_checkpoint_conversion_mapping("bert")
    with contextlib.redirect_stdout(None):
        for words in ("sample pcfg-laptop", "train x --language pcfg-laptop --print-config"):
            assert main(words.split()) == 0


def _answer(link, listening_at):
    """Run one call in a grandchild, and tell its exit status."""
    first, ancillary, *_ = link.recvmsg(1, socket.CMSG_SPACE(12))
    streams = array.array("i", ancillary[0][2])
    call = first + link.makefile("rb").readline()
    child = os.fork()
    if child:
        _, ended, used = os.wait4(child, 0)
        status = os.waitstatus_to_exitcode(ended)
        with open(f"{listening_at}.seconds", "a") as log:
            log.write(f"{used.ru_utime + used.ru_stime:.1f} {' '.join(json.loads(call)[0])}\n")
        link.sendall(f"{status if status >= 0 else 128 - status}\n".encode())
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    arguments, folder, environment = json.loads(call)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.executable = os.path.join(os.path.dirname(listening_at), "python")  # for the commands that this one starts
    _entry(arguments)


def _entry(arguments):
    import warnings

    from isoloss.cli.main import entry

    warnings.simplefilter("error")
    sys.argv = ["isoloss", *arguments]
    status = 1
    try:
        entry()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
