"""msmon against values that were measured with the original, so that no environment with it is needed."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from compat.recording import Recording

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compat")]

FIRST_STEP = {
    "fc.weight": ("-19.924999", "59.775005", "77.112553", "13.045834", "0.0", "0"),
    "fc.bias": ("-7.1", "21.300001", "22.452175", "7.1", "0.0", "0"),
    "out.bias": ("-7.100001", "-7.100001", "7.100001", "-7.100001", "0.0", "0"),
}
NORMS = [
    (
        "little",
        "grad_reduced_0-0.csv",
        {"fc.weight": 77.112553, "fc.bias": 22.452175, "out.weight": 49.413116, "out.bias": 7.100001},
    ),
    (
        "little",
        "grad_reduced_1-1.csv",
        {"fc.weight": 45.201478, "fc.bias": 8.746546, "out.weight": 27.253213, "out.bias": 2.819999},
    ),
    ("little", "param_origin_0-0.csv", {"fc.weight": 2.87228}),
    ("little", "param_updated_0-0.csv", {"fc.weight": 2.83019}),
    ("little", "param_origin_1-1.csv", {"fc.weight": 2.83019}),
    ("little", "exp_avg_1-1.csv", {"fc.weight": 7.711255}),
    ("little", "exp_avg_sq_1-1.csv", {"fc.weight": 3.8628}),
    ("accumulation", "grad_reduced_0-0.csv", {"fc.weight": 203.3962}),
    ("accumulation", "grad_unreduced_0-0.csv", {"fc.weight": 203.3962}),
]


def test_the_six_statistics_of_a_gradient(ours: Recording) -> None:
    """All six statistics of the first gradient are the measured ones, in the configured order of columns."""
    header, *rows = ours.tables("little")[0, "grad_reduced_0-0.csv"]
    assert ",".join(header) == "vpp_stage,name,step,min,max,norm,mean,zeros,nans,shape,dtype"
    found = {row[1]: row for row in rows}
    for name, expected in FIRST_STEP.items():
        cells = [float(cell) for cell in found[name][3:9]]
        assert cells == pytest.approx([float(value) for value in expected], rel=1e-6)
    assert found["fc.weight"][9:] == ["[2, 3]", "torch.float32"]
    assert found["fc.bias"][9] == "[2]"


@pytest.mark.parametrize(("scenario", "file", "norms"), NORMS)
def test_norms(ours: Recording, scenario: str, file: str, norms: dict[str, float]) -> None:
    """Norms of gradients, weights and moments are the measured ones."""
    found = ours.column(scenario, file, "norm")
    for name, norm in norms.items():
        assert float(found[name]) == pytest.approx(norm, rel=2e-6)


def test_order_of_rows(ours: Recording) -> None:
    """Reduced gradients come in the order of the parameters, unreduced ones in the order in which they arrive."""
    in_order = ["fc.weight", "fc.bias", "out.weight", "out.bias"]
    assert ours.names("little", "grad_reduced_0-0.csv") == in_order
    assert ours.names("little", "grad_unreduced_0-0.csv") == in_order[::-1]


def test_micro_batches_are_running_sums(ours: Recording) -> None:
    """With monitor_mbs_grad each micro-batch has a row of the sum so far, and only unreduced files have micro_step."""
    tables = ours.tables("accumulation-every-micro-batch")
    header, *rows = tables[0, "grad_unreduced_0-0.csv"]
    assert header[:4] == ["vpp_stage", "name", "step", "micro_step"]
    norms = {row[3]: float(row[header.index("norm")]) for row in rows if row[1] == "fc.weight"}
    assert norms == pytest.approx({"0": 38.5563, "1": 203.3962}, rel=2e-6)
    assert "micro_step" not in tables[0, "grad_reduced_0-0.csv"][0]


def test_two_ranks(ours: Recording) -> None:
    """Under DDP names keep the wrapper's prefix; unreduced gradients differ by rank, reduced ones are equal."""
    for rank, unreduced in enumerate([4.242641, 8.485281]):
        assert float(
            ours.column("two-ranks", "grad_unreduced_0-0.csv", "norm", rank)["module.weight"]
        ) == pytest.approx(unreduced, rel=1e-6)
        assert float(ours.column("two-ranks", "grad_reduced_0-0.csv", "norm", rank)["module.weight"]) == pytest.approx(
            6.363961, rel=1e-6
        )


def test_data_parallel_group(ours: Recording) -> None:
    """With dp_group only its first rank writes reduced gradients, and all write unreduced ones."""
    tables = ours.tables("two-ranks-data-parallel-group")
    assert {rank for rank, name in tables if name.startswith("grad_reduced")} == {0}
    assert {rank for rank, name in tables if name.startswith("grad_unreduced")} == {0, 1}


def test_tensor_parallel_group(ours: Recording) -> None:
    """With tp_group a rank that is not the first writes only the parameters marked as split."""
    assert ours.names("two-ranks-tensor-parallel-group", "grad_reduced_0-0.csv", 0) == ["module.weight", "module.bias"]
    assert ours.names("two-ranks-tensor-parallel-group", "grad_reduced_0-0.csv", 1) == ["module.weight"]


def test_moments_are_those_before_the_step(ours: Recording) -> None:
    """There are no moments before the first step, so no file of step 0; with plain SGD there are none at all."""
    assert sorted(file for file in ours.files("little") if file.startswith("exp_avg_sq")) == [
        "exp_avg_sq_1-1.csv",
        "exp_avg_sq_2-2.csv",
    ]
    assert not any(file.startswith("exp_avg") for file in ours.files("stateless"))


def steps_of(ours: Recording, scenario: str) -> list[str]:
    return sorted(file for file in ours.files(scenario) if file.startswith("grad_reduced"))


def test_which_steps(ours: Recording) -> None:
    """start_step 1, step_interval 2 and collect_times 2 collect the steps 1 and 3; start_iteration 10 counts from 10."""
    assert steps_of(ours, "some-steps") == ["grad_reduced_1-1.csv", "grad_reduced_3-3.csv"]
    assert steps_of(ours, "start-iteration") == [f"grad_reduced_{step}-{step}.csv" for step in (10, 11, 12)]


def test_steps_of_a_file(ours: Recording) -> None:
    """step_count_per_record 3 makes files of three steps, named after all that they could hold."""
    assert steps_of(ours, "steps-per-file") == [f"grad_reduced_{first}-{first + 2}.csv" for first in (0, 3, 6)]
    _, *rows = ours.tables("steps-per-file")[0, "grad_reduced_6-8.csv"]
    assert {row[2] for row in rows} == {"6"}


def test_ranks_that_do_not_watch(ours: Recording) -> None:
    """A rank that module_ranks leaves out has no directory."""
    assert ours.directories("another-rank") == []
    assert [directory.name.split("-rank")[1][0] for directory in ours.directories("two-ranks-one-watched")] == ["1"]


def test_digits(ours: Recording) -> None:
    """Values are rounded to ndigits decimals."""
    assert ours.column("few-digits", "grad_reduced_0-0.csv", "norm")["fc.weight"] == "203.3962"


def test_frozen_weights_are_recorded_and_have_no_gradient(ours: Recording) -> None:
    """A frozen parameter has rows of its weight and none of a gradient."""
    assert "0.weight" in ours.names("frozen", "param_origin_0-0.csv")
    assert "0.weight" not in ours.names("frozen", "grad_reduced_0-0.csv")


def test_a_step_is_described(ours: Recording) -> None:
    """A skipped step of a loss scaler is a line of steps.csv that says so."""
    with (ours.directories("loss-scaling")[0] / "steps.csv").open(newline="") as file:
        assert [line["skipped"] for line in csv.DictReader(file)] == ["0", "1", "0"]
