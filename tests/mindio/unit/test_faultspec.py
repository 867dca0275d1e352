from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.mindio import faultspec
from evertrain.mindio.faultspec import FaultSpec, FaultSpecError

specs = st.builds(
    FaultSpec,
    kind=st.sampled_from(list(faultspec.KINDS)),
    step=st.integers(0, 10**6),
    rank=st.integers(0, 1000),
    phase=st.sampled_from(faultspec.PHASES),
    times=st.integers(1, 5),
)


@given(specs)
def test_what_is_printed_is_read_again(spec: FaultSpec) -> None:
    assert faultspec.parse(str(spec)) == spec


@given(st.lists(specs, max_size=4))
def test_survives_the_environment(faults: list[FaultSpec]) -> None:
    assert faultspec.decode(faultspec.encode(faults)) == faults


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("explode@step=1,rank=0", "unknown fault kind 'explode'; kinds are kill"),
        ("kill", "expected KIND@step=N"),
        ("kill@step=1", "expected KIND@step=N"),
        ("kill@step=x,rank=0", "expected KIND@step=N"),
        ("kill@step=1,rank=0,phase=lunch", "unknown phase 'lunch'; phases are data"),
        ("kill@step=-1,rank=0", "step must not be negative"),
        ("kill@step=1,rank=4", "below 4"),
        ("kill@step=1,rank=0,rank=1", "expected KIND@step=N"),
    ],
)
def test_a_mistake_is_explained(text: str, says: str) -> None:
    with pytest.raises(FaultSpecError) as caught:
        faultspec.parse(text, world_size=4)
    assert says in str(caught.value)
