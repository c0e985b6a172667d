"""The designs of the paper's studies: plans that can be trained, and seeds that nothing shares."""

import pytest

from isoloss import config as configs
from isoloss.paper.brackets import STUDY as BRACKETS
from isoloss.paper.dose_response import STUDY as DOSE_RESPONSE
from isoloss.paper.optimizers import STUDY as OPTIMIZERS
from isoloss.paper.same_loss import STUDY as SAME_LOSS
from isoloss.paper.same_loss_pilot import STUDY as PILOT
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import check

STUDIES = (SAME_LOSS, PILOT, BRACKETS, DOSE_RESPONSE, OPTIMIZERS)
SCALES = [pytest.param(study, name, id=f"{study.name}-{name}") for study in STUDIES for name in study.scales]


@pytest.mark.parametrize(("study", "name"), SCALES)
def test_every_run_can_be_trained_and_is_planned_after_the_run_that_it_goes_on_from(tmp_path, study, name):
    experiments = study.scale(name).experiments
    units = StudyFolder(study, tmp_path, name).plan()
    check(units)
    after = {unit.name: unit.after for unit in units}
    for run, experiment in experiments.items():
        configs.check(experiment.config)
        start = experiment.config.init_from
        goes_on_from = [start.split("/")[1]] if start else []
        assert list(experiment.after) == goes_on_from, run
        assert after[f"train {run}"] == tuple(f"train {one}" for one in goes_on_from)
        assert after[f"measure {run}"] == (f"train {run}",)
    assert {unit.block for unit in units} == set(range(max(one.block for one in experiments.values()) + 1))
    assert not any(unit.done() for unit in units)
    fingerprints = [experiment.fingerprint for experiment in experiments.values()]
    assert len(fingerprints) == len(set(fingerprints))


@pytest.mark.parametrize(("study", "name"), SCALES)
def test_arms_of_a_unit_share_their_seeds_and_no_other_unit_has_them_in_any_draw(study, name):
    used = []
    for offset in (0, 1, 3):
        scale = study.scale(name, seed_offset=offset)
        for unit in scale.units:
            runs = scale.arms(unit).values()
            trained = {one.config.seed for one in runs}
            measured = {part.settings["seed"] for one in runs for part in one.measurements}
            # of the base, of the arms that go on from it, and of the control of dose-response
            assert len(trained) == (3 if study is DOSE_RESPONSE else 2)
            assert len(measured) == 1
            used += [*trained, *measured]
    assert len(used) == len(set(used))


def test_a_study_has_none_of_its_pilots_grammars():
    for scales in (
        [SAME_LOSS.scale("laptop"), SAME_LOSS.scale("laptop", seed_offset=3), PILOT.scale("laptop")],
        [DOSE_RESPONSE.scale("laptop"), DOSE_RESPONSE.scale("laptop", seed_offset=1), DOSE_RESPONSE.scale("pilot")],
    ):
        grammars = [{unit.language.seed for unit in scale.units} for scale in scales]
        assert sum(map(len, grammars)) == len(set().union(*grammars))
