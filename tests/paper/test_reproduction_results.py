"""What the study `paper` makes of its results: models at one loss, and its answer."""

import math

import numpy as np
import pytest

from isoloss.paper.reproduction.answer import answer
from isoloss.paper.reproduction.reading import at_same_loss
from isoloss.paper.reproduction.study import STUDY
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Answer, ClaimResult, read_claims
from isoloss.studies.comparison import Measured, difference
from isoloss.studies.verdicts import Verdict


def measured(value, influence=(), unit="nats per predicted token"):
    """An estimate whose error comes from the influence of its examples; without them, an exact one."""
    influence = np.array(influence, dtype=np.float64)
    n = len(influence)
    stderr = math.sqrt(float(np.square(influence).sum()) / (n * (n - 1))) if n else 0.0
    about = {"unit": unit, "num_predictions": max(n, 1), "method": "known"}
    estimate = Estimate(value=value, stderr=stderr, samples=n, **about)
    return Measured(estimate=estimate, inputs="same", settings={}, examples={"influence": influence} if n else {})


def checkpoint(kl, trace, influence):
    return {"kl": measured(kl), "trace": measured(trace, influence)}


def test_a_model_at_another_kl_is_on_the_line_between_its_neighbors():
    first, second, third = (
        checkpoint(0.16, 100.0, [1.0, -1.0, 3.0, -3.0]),
        checkpoint(0.04, 60.0, [2.0, -2.0, 1.0, -1.0]),
        checkpoint(0.01, 50.0, [0.5, -0.5, 2.0, -2.0]),
    )

    def found_at(kl):
        return at_same_loss([first, second, third], checkpoint(kl, 70.0, []))[0]

    found = found_at(0.08)  # half way in the logarithm
    assert found["kl"].estimate.value == 0.08
    assert found["trace"].estimate.value == pytest.approx(80.0)
    assert found["trace"].examples["influence"].tolist() == pytest.approx([1.5, -1.5, 2.0, -2.0])
    assert found_at(0.02)["trace"].estimate.value == pytest.approx(55.0)
    assert found_at(0.04)["trace"].estimate.value == pytest.approx(60.0)
    # the error of a difference is that of (first + second) / 2 - treated, example by example
    treated = measured(70.0, [1.0, -1.0, 1.0, -1.0])
    paired = difference(treated, found["trace"])
    by_hand = np.array([1.0, -1.0, 1.0, -1.0]) - np.array([1.5, -1.5, 2.0, -2.0])
    assert paired.value == pytest.approx(-10.0)
    assert paired.stderr == pytest.approx(math.sqrt(np.square(by_hand).sum() / 12))


def test_a_kl_that_no_two_neighbors_enclose_has_no_model():
    pair = [checkpoint(0.16, 100.0, []), checkpoint(0.04, 60.0, [])]
    assert at_same_loss(pair, checkpoint(0.03, 70.0, [])) is None
    assert at_same_loss(pair, checkpoint(0.17, 70.0, [])) is None
    assert at_same_loss(pair[:1], checkpoint(0.16, 70.0, [])) is None


def test_neighbors_may_come_in_any_order_of_their_kl():
    rising = [checkpoint(0.04, 60.0, []), checkpoint(0.16, 100.0, [])]
    assert at_same_loss(rising, checkpoint(0.08, 70.0, []))[0]["trace"].estimate.value == pytest.approx(80.0)


def test_accuracies_on_sampled_examples_are_interpolated_by_example():
    """Two probes on four examples; the error is that of the mean of the differences, example by example."""
    labels = np.array([0, 1, 1, 0])

    def model(kl, predictions):
        examples = {"predictions": np.array(predictions), "labels": labels}
        accuracy = (examples["predictions"] == labels).mean()
        about = {"unit": "accuracy", "num_predictions": 4, "method": "known", "samples": 4, "stderr": 0.1}
        one = Measured(estimate=Estimate(value=accuracy, **about), inputs="same", settings={}, examples=examples)
        return {"loss": measured(kl), "probe": one}

    first = model(4.0, [[0, 1, 0, 1], [0, 1, 1, 1]])  # correct: 1, 1, 1/2, 0
    second = model(1.0, [[0, 0, 1, 0], [0, 0, 1, 0]])  # correct: 1, 0, 1, 1
    treated = model(2.0, [[0, 1, 1, 0], [0, 1, 1, 1]])  # correct: 1, 1, 1, 1/2
    control, same = at_same_loss([first, second], treated)
    found = difference(same["probe"], control["probe"])
    by_hand = np.array([1, 1, 1, 0.5]) - (np.array([1, 1, 0.5, 0]) + np.array([1, 0, 1, 1])) / 2
    assert found.unit == "percentage points"
    assert found.value == pytest.approx(100 * by_hand.mean())
    assert found.stderr == pytest.approx(100 * by_hand.std(ddof=1) / 2)


def results(verdicts):
    """The result of every claim, by its id: verdict and difference; else not shown."""
    found = []
    for claim in read_claims(STUDY.claims).claims:
        verdict, value = verdicts.get(claim.id, (Verdict.NOT_SHOWN, 0.1))
        about = {"samples": 6, "num_predictions": 6, "method": "known", "unit": "percentage points"}
        estimate = Estimate(value=value, stderr=0.5, **about)
        one = Answer(case="prefix-4", numbers={}, verdict=verdict, explanation="", difference=estimate)
        found.append(ClaimResult(claim=claim, answers=(one,)))
    return found


def test_the_answer_is_five_sentences_that_follow_the_verdicts():
    plain = answer(results({}))
    assert len(plain) == 5
    assert "flatten the model? On grammars: not shown (prefix-4 +0.10 ± 0.50 points)" in plain[3]
    assert "the flatter model transfers better in 0 and worse in 0; in 7 other pairs" in plain[4]
    shown = answer(
        results(
            {
                "sgd-flatter": (Verdict.SHOWN, -20.0),
                "sgd-transfer": (Verdict.CONTRADICTED, -2.0),
                "helper-flatter": (Verdict.SHOWN, -3.0),
                "helper-transfer": (Verdict.SHOWN, 4.0),
                "adversary-sharper": (Verdict.SHOWN, 5.0),
                "adversary-transfer": (Verdict.SHOWN, -6.0),
            }
        )
    )
    assert "On grammars: yes (prefix-4 -20.00 ± 0.50 points)" in shown[3]
    assert "transfer better? On grammars: no, the opposite is shown (prefix-4 -2.00 ± 0.50 points)" in shown[3]
    # helper and adversary agree with the paper; SGD's flatter model transfers worse
    assert "the flatter model transfers better in 2 and worse in 1; in 4 other pairs" in shown[4]
