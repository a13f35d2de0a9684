import pytest
from rlhf_runtime.errors import DesyncError, InfrastructureError
from rlhf_runtime.replicas import require_agreement


@pytest.mark.parametrize(
    "reports",
    [
        [],
        [{"grad_norm": 0.1}],
        [{"grad_norm": 0.1, "lr": 1e-3}] * 3,
        [{"grad_norm": float("nan")}, {"grad_norm": float("nan")}],
    ],
    ids=["none", "one", "three", "NaN everywhere"],
)
def test_ranks_that_agree_are_let_through(reports: list[dict[str, float]]) -> None:
    require_agreement("policy", reports)


@pytest.mark.parametrize(
    ("values", "odd", "right"),
    [
        ([0.1, 0.1, 0.1 + 2**-56], "2", "0"),
        ([2, 1, 1], "0", "1"),
        ([1, 2, 1, 3], "1, 3", "0"),
        ([1, 2], "1", "0"),
        ([0.0, -0.0], "1", "0"),
        ([0.0, float("nan")], "1", "0"),
    ],
)
def test_the_rank_that_others_contradict_is_named(values: list[float], odd: str, right: str) -> None:
    with pytest.raises(DesyncError) as error:
        require_agreement("policy", [{"same": 1, "grad_norm": value} for value in values])
    assert str(error.value).startswith("policy: got grad_norm ")
    assert f" on rank {odd}; expected" in str(error.value)
    assert f"as on rank {right}, bit for bit" in str(error.value)


def test_the_first_tensor_that_differs_is_named() -> None:
    with pytest.raises(DesyncError, match=r"critic: got layers\.1 7 on rank 1; expected 6"):
        require_agreement(
            "critic", [{"layers.0": 5, "layers.1": 6, "head": 1}, {"layers.0": 5, "layers.1": 7, "head": 2}]
        )


def test_an_entry_that_a_rank_lacks_is_a_difference() -> None:
    with pytest.raises(DesyncError, match="got extra 1 on rank 1; expected None"):
        require_agreement("policy", [{}, {"extra": 1}])


def test_another_try_may_help() -> None:
    assert DesyncError.exit_code == InfrastructureError.exit_code
