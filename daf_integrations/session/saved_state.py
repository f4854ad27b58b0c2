"""What a run saves with a checkpoint, looked at as a whole before anything goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daf_core import DAFConfig, StateError
from daf_core.codecs.common_row import CommonRows
from daf_core.precision.audit import restored
from daf_core.precision.policy import PrecisionPolicy
from daf_integrations.session.metrics import RunTotals

ELASTIC = "elastic_state"  # the part that states of older versions do not have


def parts_of(state: Any, config: DAFConfig) -> tuple[RunTotals, Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Returns the parts of what `DAFSession.state` returned.

    These are figures of the run so far, what the engine had learned (None before it began), and where elastic training
    was.

    Raises:
        StateError: It is something else, or a part of it is damaged; of the last the model's training knows more.
    """
    try:
        totals, engine, elastic = RunTotals.from_state(state["totals"]), state["engine_state"], state.get(ELASTIC)
        if not isinstance(elastic, Mapping | None):
            raise TypeError(f"{ELASTIC} is a {type(elastic).__name__}")
    except (LookupError, TypeError, AttributeError) as error:
        raise StateError(f"this is no saved state of a run with DAF: {error!r}") from error
    if engine is not None:
        restored(config, PrecisionPolicy(config), CommonRows(), engine)
    return totals, engine, elastic
