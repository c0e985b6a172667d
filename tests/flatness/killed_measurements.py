"""Measurements that are killed in one process and go on in another; test_stopping compares them with straight ones."""

import hashlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from dense_curvature import batch_of, bert

from isoloss import flatness
from isoloss.flatness import _measurement


def of_documents(measure, model, batches, **options):
    """A measurement whose clusters are documents of four sequences, some of which go on in the next batch."""
    documents = [(torch.arange(6) + 6 * number) // 4 for number in range(len(batches))]
    given = [{**batch, "documents": of_batch} for batch, of_batch in zip(batches, documents, strict=True)]
    return measure(model, given, **options)


# a stream of each kind, independent probes, and steps of one method
MEASURES = {
    "minimal of documents": partial(of_documents, partial(flatness.fisher_trace, rescaling="minimal")),
    "hessian of documents": partial(of_documents, flatness.hessian_trace),
    "sam": partial(flatness.sam_sharpness, num_steps=2),
    "spectrum": partial(flatness.spectral_density, num_probes=5, num_steps=4),
    "eigenvalues": partial(flatness.largest_eigenvalues, num_eigenvalues=2, matrix="hessian", rtol=1e-8),
}


def measured(name, **options):
    """The SHA-256 of all that a measurement returns but for the time: numbers by their bits."""
    result = MEASURES[name](bert(), [batch_of(6, seed=i) for i in range(5)], **options)
    digest = hashlib.sha256()
    for part in result if isinstance(result, list) else [result]:
        for key, value in sorted(vars(part).items()):
            data = value.tobytes() if hasattr(value, "tobytes") else value
            data = value.numpy().tobytes() if hasattr(value, "numpy") else data
            digest.update(b"" if key == "seconds" else f"{key} {data!r}".encode())
    return digest.hexdigest()


def killed(name, path):
    """Measure until the third call of `progress`, which kills the process."""
    calls = []

    def progress(done):
        calls.append(done)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    measured(name, resume=path, progress=progress)


def resumed(name, path):
    """Write what a measurement gives that goes on, and at how many items done it began."""
    seen = []
    found = measured(name, resume=path, progress=seen.append)
    path.with_suffix(".json").write_text(json.dumps([found, seen[0]]))


if __name__ == "__main__":
    _measurement._EVERY_SECONDS = 0.0
    for name in MEASURES:
        for step, ending in ((killed, signal.SIGKILL), (resumed, 0)):
            if (process := os.fork()) == 0:
                step(name, Path(sys.argv[1], f"{name}.half"))
                os._exit(0)
            status = os.waitpid(process, 0)[1]
            assert (os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)) == ending, (name, status)
