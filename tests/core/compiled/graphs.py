"""What tests of compiled graphs share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.telemetry import StepStatistics

BACKEND = "aot_eager_decomp_partition"
"""Makes no machine code, and cuts backward formulas into the operators that Inductor gets."""


def error_of_weight(
    model: nn.Module,
    weight: Tensor,
    inputs: Tensor,
    bits: int,
    dynamic: bool = False,
    backend: str = BACKEND,
    draws: bool = False,
) -> tuple[float, StepStatistics]:
    """Returns the error of the gradient of a compiled model's weight, and what the step has stored.

    The model is compiled for inputs of any size where `dynamic`. One that `draws` is compiled for the exact gradient as
    well: a graph draws other numbers than the model outside.
    """
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    engine, gradients = ActivationEngine(model, DAFConfig(precision=bits)), list[Tensor]()
    for scope, run in ((torch.enable_grad(), compiled if draws else model), (engine.compress(), compiled)):
        torch.manual_seed(2)
        with scope:
            loss = run(inputs)
        loss.backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
        model.zero_grad()
    exact, found = gradients
    return float((found - exact).norm() / exact.norm()), engine.finish_step()
