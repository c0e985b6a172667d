"""The numbers of the tasks of benchmarks/regressions.py, whatever the versions of the libraries.

They are those of 0.1.0 and change only where a changelog says so. Weights and data are drawn in float64 by the tasks
themselves; what trains is in float32, whose rounding differs between versions of numba, and is left out.
"""

import pytest
from regressions import TASKS, TOLERANCE

KNOWN = {
    "trace of a GPT-2": {"trace": 232.51225060828904, "stderr": 1.044602552079357},
    "trace of a BERT": {"trace": 279.3149580138081, "stderr": 0.9631474613305834},
    "minimal trace of a GPT-2": {"trace": 38.29884301105534, "stderr": 0.15478415993406697},
    "loss and rise of a GPT-2": {
        "int4 value": 0.008854927562006908,
        "int4 stderr": 0.0019445681966340056,
        "int4-loss value": 6.866990116274667,
        "int4-loss stderr": 0.01650640409517465,
    },
    "conditionals of a grammar": {"masked": 0.4941807671907656, "next": 0.4939808023950233},
    "conditionals of an HMM": {"masked": 0.47556372536390923, "next": 0.47563386418461195},
}


@pytest.mark.parametrize("task", KNOWN)
def test_a_known_value(task):
    assert TASKS[task]()() == pytest.approx(KNOWN[task], rel=TOLERANCE, abs=0)


def test_every_task_in_float64_has_one():
    assert TASKS.keys() - KNOWN.keys() == {"training a BERT"}
