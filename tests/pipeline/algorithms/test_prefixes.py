"""Every prefix is found, and counted once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.prefixes import SharedPrefixes

SEQUENCES = st.lists(st.lists(st.sampled_from([2, 3, 256, 70_000]), min_size=1, max_size=12).map(np.array), max_size=15)


def num_nodes(sequences: Sequence[np.ndarray]) -> int:
    """Count the different prefixes of all sequences: the nodes of their tree."""
    return len({tuple(sequence[:end].tolist()) for sequence in sequences for end in range(1, sequence.size + 1)})


@given(SEQUENCES)
def test_each_sequence_brings_the_tokens_that_those_before_it_lack(sequences: list[np.ndarray]) -> None:
    prefixes = SharedPrefixes.of(sequences)
    assert sorted(prefixes.order.tolist()) == list(range(len(sequences)))
    assert prefixes.lengths.tolist() == [sequence.size for sequence in sequences]
    for place, index in enumerate(prefixes.order):
        before = [sequences[other] for other in prefixes.order[:place]]
        new = num_nodes([*before, sequences[index]]) - num_nodes(before)
        assert sequences[index].size - prefixes.shared[place] == new
    assert prefixes.num_tokens == num_nodes(sequences)


@given(SEQUENCES, st.data())
def test_some_of_the_sequences_share_what_they_would_without_the_others(
    sequences: list[np.ndarray], data: st.DataObject
) -> None:
    chosen = data.draw(st.permutations(range(len(sequences))))[: data.draw(st.integers(0, len(sequences)))]
    taken, alone = (SharedPrefixes.of(sequences).take(chosen), SharedPrefixes.of([sequences[i] for i in chosen]))
    assert taken.lengths.tolist() == alone.lengths.tolist()
    assert taken.shared.tolist() == alone.shared.tolist()
    # equal sequences may change places
    ordered = [[sequences[chosen[place]].tolist() for place in one.order] for one in (taken, alone)]
    assert ordered[0] == ordered[1]


def test_sequences_that_share_nothing_keep_their_order() -> None:
    prefixes = SharedPrefixes.none([3, 1, 2])
    assert prefixes.order.tolist() == [0, 1, 2] and prefixes.shared.tolist() == [0, 0, 0]
    assert prefixes.num_tokens == 6
