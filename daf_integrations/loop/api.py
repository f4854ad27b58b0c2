"""A training loop of one's own: ``model = daf.prepare(model)``, and the rest of the loop stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from logging import getLogger
from typing import Any, TypeVar

from torch import Tensor, nn

from daf_core import ConfigError, DAFConfig
from daf_integrations.loop.training import Training, training_of, trainings
from daf_integrations.session.options import configured
from daf_integrations.session.own_loss import loss_in

Model = TypeVar("Model", bound=nn.Module)

log = getLogger("daf")


def prepare(model: Model, config: DAFConfig | Mapping[str, Any] | None = None, **options: Any) -> Model:
    """Has a model's activations compressed whenever it is called in training mode; returns the same model.

    A step ends with the `step` of any torch optimizer that holds parameters of the model. Where the model returns its
    loss, as those of transformers do when they are given labels, audits call it once more with a part of the batch;
    where it does not, there are none, which the log says once: ``precision="auto"`` is then 4 bits for all, and
    ``max_gradient_error`` an error. Preparing again replaces the configuration.

    A `memory_budget` covers whole steps: run them with `step`. A loop that calls the model itself keeps the budget too,
    but its batches are not split, and no step is run again.

    Example:
        >>> import daf_integrations as daf
        >>> model = daf.prepare(model, precision=4)
        >>> for batch in loader:
        ...     loss = model(**batch).loss
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     tracker.log({"loss": loss.item(), **daf.metrics(model)})
        >>> print(daf.summary(model))

    Args:
        model: The model as it is called: compiled, in a DistributedDataParallel, set up by Lightning Fabric, or none of
            these.
        config: A configuration, or a mapping of its fields, instead of options.
        options: The fields of `DAFConfig`, such as ``precision=4``. They go before those that an Accelerate
            configuration file or the environment gives (``ACCELERATE_USE_DAF=1``, ``ACCELERATE_DAF_CONFIG`` as JSON).

    Raises:
        ConfigError: An option is unknown, its value is not allowed or without effect, both `config` and options are
            given, or `model` is no model.
        HooksActiveError: Saved-tensor hooks of someone else are active.
        NothingToTrainError: No parameter requires a gradient.
        UnsupportedDeviceError: The model is on device "meta", or in a DataParallel.
    """
    chosen = configured(config, options)
    before = training_of(model)
    if before is not None:
        before.stop()
    log.info("%s", Training(model, chosen).exit_summary.title)
    return model


def step(
    model: nn.Module,
    batch: Any,
    loss_function: Callable[[Any], Tensor] | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Tensor:
    """Runs forward and backward of a training step, and leaves the gradients; returns the loss, detached.

    Where `memory_budget` covers steps, the step keeps it: the batch is split into micro-batches if that is faster than
    what else there is, with the gradients of the whole batch, and a step that runs out of memory is run again with a
    tighter plan. Where DAF is off, or there is no such budget, it is a plain step.

    Example:
        >>> model = daf.prepare(model, memory_budget="600MB")
        >>> for batch in loader:
        ...     loss = daf.step(model, batch)
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Args:
        model: A prepared model.
        batch: The batch: tensors in mappings, lists and tuples, the rows in their first dimension.
        loss_function: Returns the loss of a batch or of some of its rows; by default that which the model returns.
        backward: What runs the backward pass of a loss, such as ``accelerator.backward`` or
            ``fabric.backward``.

    Raises:
        AuditError: The model returns no loss, and no function is given.
        ConfigError: Steps are planned, and the model was prepared before it was wrapped for several processes.
        PlanError: No plan keeps the budget.
        ProfileError: What a step takes cannot be measured.
    """
    loss_of = loss_function or partial(_own_loss, model)
    training = _training_in(model)
    if training is not None:
        return training.step(model, batch, loss_of, backward)
    loss = loss_of(batch)
    backward(loss)
    return loss.detach()


@contextmanager
def scope(model: nn.Module | None = None) -> Generator[None]:
    """Compresses what is saved inside as well, for a loss that is computed outside of the model.

    To be put around forward pass and loss, and left before backward. Does nothing where DAF is off, so that a script
    runs with and without it. There are no audits here.

    Example:
        >>> with daf.scope():
        ...     loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> loss.backward()

    The model that is called inside may be left out where one is prepared.

    Raises:
        AuditError: `max_gradient_error` is set; only a loss that the model returns can be audited.
        ConfigError: No model is given, and several are prepared.
        HooksActiveError: Other saved-tensor hooks are active, among them the scope of another model.
        ProfileError: The budget covers steps, and the loss is not known here.
    """
    training = _training(model)
    if training is None:
        yield
        return
    with training.scope():
        yield


def metrics(model: nn.Module | None = None) -> dict[str, float]:
    """Returns the figures of the steps since the last call, for the log; {} if there were none, or DAF is off.

    The model may be left out where one is prepared.

    Returns:
        The figures of ``docs/reference/figures.md`` by their names there, such as ``daf/ratio``.

    Raises:
        ConfigError: No model is given, and several are prepared.
    """
    training = _training(model)
    return {} if training is None else training.session.take_metrics()


def summary(model: nn.Module | None = None) -> str:
    """Returns a table of all steps so far.

    The model may be left out where one is prepared.

    Raises:
        ConfigError: No model is given, and several are prepared.
    """
    training = _training(model)
    return "DAF is not active" if training is None else training.session.report()


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns what DAF has learned about a prepared model, and its figures, for a checkpoint; {} where DAF is off.

    Only ``precision="auto"``, a `memory_budget` and `elastic` learn: with others a run resumes to the same numbers
    without it.
    """
    training = _training_in(model)
    return {} if training is None else training.session.state()


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Goes on from what `state_dict` returned; does nothing where DAF is off, or was.

    Raises:
        StateError: It is something else.
    """
    training = _training_in(model)
    if training is not None and state:
        training.load_state(state)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        return loss_in(model(**batch))
    return loss_in(model(*batch) if isinstance(batch, list | tuple) else model(batch))


def _training(model: nn.Module | None) -> Training | None:
    """Returns the training of a model, or the only one where none is given."""
    return _only(trainings(), "") if model is None else _training_in(model)


def _training_in(model: nn.Module) -> Training | None:
    """Returns the training of a model, or of the one inside of something that is not known to be a wrapper."""
    training = training_of(model)
    if training is not None:
        return training
    parts = set(model.modules())
    return _only([each for each in trainings() if each.model in parts], f" inside of {type(model).__name__}")


def _only(found: list[Training], where: str) -> Training | None:
    if len(found) > 1:
        names = ", ".join(type(training.model).__name__ for training in found)
        raise ConfigError(
            f"{len(found)} models are prepared{where} ({names}); give the one that is meant, as in scope(model)"
        )
    return next(iter(found), None)
