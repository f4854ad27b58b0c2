"""The operator that counts what graphs hold."""

from __future__ import annotations

import torch
from torch import fx

from daf_core.compiled.account import GraphAccount, counting


def test_what_counts_runs_between_two_cuda_graphs() -> None:
    """A replay calls no Python: figures would be those of the step that was captured."""
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    graph = fx.Graph()
    node = graph.call_function(torch.ops.daf.count.default, (graph.placeholder("kept"), "{}", []))
    assert is_cudagraph_unsafe_fx_node(node)


def test_what_is_held_goes_with_the_result() -> None:
    account, kept = GraphAccount(), torch.ones(3)
    text = "{'raw': [(8.0, [1])], 'held': [(2.0, [1])], 'stored_as': {'planes': 1}}"
    with counting(account):
        copy = torch.ops.daf.count(kept, text, [5])
    assert torch.equal(copy, kept)
    assert (account.pass_raw_bytes, account.held_bytes, account.take_stored()) == (40, 10, {"planes": 1})
    del copy
    assert account.held_bytes == 0
