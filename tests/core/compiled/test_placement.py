"""The order of loops: sources are made late, what only the caller reads is made early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daf_core.compiled.placement import late


@given(st.data())
def test_every_step_follows_what_it_needs(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    sources = [
        sorted(data.draw(st.sets(st.integers(0, step - 1), max_size=3))) if step else [] for step in range(count)
    ]
    order = late(sources)
    assert sorted(order) == list(range(count))
    assert all(order.index(source) < order.index(step) for step in range(count) for source in sources[step])


def test_random_numbers_are_drawn_where_they_are_read() -> None:
    # 0 has the seeds, 1 and 2 draw numbers; of the chain 3 to 7, 4 and 7 read them
    assert late([[], [0], [0], [], [1, 3], [4], [5], [2, 6]]).index(2) == 6


def test_what_is_saved_is_encoded_before_the_chain_goes_on() -> None:
    # a chain 0, 1, 2, 3; 4 and 5 encode the result of 1 in two steps, after all else as torch puts them
    order = late([[], [0], [1], [2], [1], [4]])
    assert order.index(5) < order.index(2)
