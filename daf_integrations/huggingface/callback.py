"""Hugging Face: ``Trainer(..., callbacks=[DAFCallback()])``, or a Trainer with one inside."""

from __future__ import annotations

import inspect
import itertools
import traceback
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from logging import getLogger
from typing import Any

from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LabelSmoother
from typing_extensions import override

from daf_core import ConfigError, DAFConfig, HooksActiveError, StepStatistics, UnsupportedDeviceError
from daf_core.autograd.torch_private import in_backward
from daf_core.batch.micro_batches import WholeStepError
from daf_core.model.forward_patch import ForwardPatch
from daf_core.rewrites.causal_lm import smoothed_loss
from daf_core.snapshots.attributes import Attributes, attributes_kept
from daf_integrations.session.options import configured
from daf_integrations.session.session import DAFSession
from daf_integrations.session.unwrap import unwrap_model

FRAMES = 8  # how far up the trainer is looked for; in transformers 5 it is three frames up

EPOCH = "_run_epoch"
"""What runs all of an epoch in transformers 5: loading of data, steps and their events, evaluation, saving."""

log = getLogger("daf")


class DAFCallback(TrainerCallback, ExportableState):
    """Compresses the activations of a training run; nothing else in the script changes.

    It covers `Trainer.compute_loss`, that is the forward pass and the loss, whoever computes it, and what runs again in
    backward, as with losses that cache gradients. Each log entry gets the figures of ``docs/reference/figures.md``.
    Audits call `Trainer.compute_loss` once more, with a part of the batch.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[DAFCallback(precision=4)]).train()

    Args:
        config: A configuration, or a mapping of its fields, instead of options.
        options: The fields of `DAFConfig`, such as ``precision=4``.

    Raises:
        ConfigError: An option is unknown, its value is not allowed or without effect, or both a configuration and
            options are given; when training begins, also where the Trainer has another callback of this kind.
        HooksActiveError: When training begins: TRL's `activation_offloading` is set.
    """

    def __init__(self, config: DAFConfig | Mapping[str, Any] | None = None, **options: Any) -> None:
        self.config = configured(config, options)
        self._session = DAFSession(self.config)
        self._patches: list[_Patch | ForwardPatch] = []
        self._weight, self._losses = 1.0, 0  # of the part that runs, and how many losses were computed

    @property
    def last_step(self) -> StepStatistics | None:
        """Statistics of the last optimizer step; None before the first."""
        return self._session.last_step

    @override
    def state(self) -> dict[str, Any]:
        """Returns the options, and what was learned, for checkpoints; a resumed run goes on from the latter."""
        return {"args": self.config.to_dict(), "attributes": self._session.state()}

    @override
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.config.elastic is None or args.ddp_find_unused_parameters is not None:
            return
        args.ddp_find_unused_parameters = True  # it would wait for gradients of what a step does not train
        # transformers 5.23 has read it already, for the Accelerator that it made.
        handler = getattr(getattr(_calling_trainer(self), "accelerator", None), "ddp_handler", None)
        if handler is not None:
            handler.find_unused_parameters = True

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # After an out-of-memory retry (auto_find_batch_size) this comes again without on_train_end.
        self._uninstall()
        if args.n_gpu > 1:
            raise UnsupportedDeviceError(
                f"{args.n_gpu} GPUs in one process make Trainer use torch.nn.DataParallel, whose threads see no "
                "saved-tensor hooks. Start one process for each GPU: torchrun --nproc-per-node or accelerate launch"
            )
        _check_no_offloading(args)
        trainer = _calling_trainer(self)
        _check_single_callback(trainer)
        self._session = DAFSession(self.config)
        # The Trainer writes into the entry when it saves, and a checkpoint of a run without DAF has none.
        entries: Any = state.stateful_callbacks
        saved = entries.setdefault(type(self).__name__, self.state())
        if state.global_step:  # resumed: before a first step the entry is that of an earlier run of this callback
            self._session.load_state(saved["attributes"])
        self._session.attach(kwargs["model"], None if trainer is None else trainer.model_wrapped)
        try:
            self._install(trainer, kwargs["model"])
        except BaseException:
            self._uninstall()
            raise
        if state.is_world_process_zero:
            tqdm.write(self._session.start_line())

    @override
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        with self._uninstalled_on_error():
            self._session.before_optimizer([kwargs["optimizer"]])

    @override
    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        with self._uninstalled_on_error():
            self._session.after_optimizer()

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._uninstall()
        if state.is_world_process_zero:
            tqdm.write(self._session.report())

    def _install(self, trainer: Trainer | None, model: nn.Module) -> None:
        if trainer is None:
            if self.config.plans_steps:
                raise ConfigError(
                    "DAF did not find the Trainer that calls it, so it cannot run steps within memory_budget; "
                    'budget_covers="activations" limits saved activations alone'
                )
            log.warning(
                "DAF did not find the Trainer that calls it, so it covers the model's forward alone: a loss computed "
                "outside of it (label smoothing, compute_loss_func) is not compressed, and nothing is logged"
            )
            self._patches = [_Patch(model, "forward", self._compressed_forward)]
            return
        reference = weakref.ref(trainer)
        step = partial(self._planned, trainer.compute_loss, reference) if self.config.plans_steps else self._guarded
        self._patches = [
            ForwardPatch(model, self._compressed_in_backward, hidden=True),
            _Patch(trainer, "compute_loss", partial(self._compressed, reference)),
            _Patch(trainer, "training_step", step),
            _Patch(trainer, "log", self._logged),
        ]
        handler = trainer.callback_handler
        parts = [(trainer, EPOCH)] if hasattr(trainer, EPOCH) else []
        parts += [(handler, "on_epoch_begin"), (handler, "on_train_end")]
        self._patches += [_Patch(owner, name, self._given_back) for owner, name in parts]
        self._patches += [_Patch(handler, name, self._without) for name in ("pop_callback", "remove_callback")]
        if type(trainer.label_smoother) is LabelSmoother:
            self._patches.append(_Patch(trainer, "label_smoother", _smoothed))

    @contextmanager
    def _uninstalled_on_error(self) -> Generator[None]:
        """Gives the model back where something inside fails: no event says that training has ended with an error."""
        try:
            yield
        except BaseException:
            self._uninstall()
            raise

    def _given_back(self, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._uninstalled_on_error():
            return part(*args, **kwargs)

    def _without(self, take: Any, *args: Any, **kwargs: Any) -> Any:
        """Gives the model back where this callback is taken from its Trainer while that trains."""
        taken = take(*args, **kwargs)
        if not any(each is self for each in take.__self__.callbacks):
            self._uninstall()
        return taken

    def _uninstall(self) -> None:
        for patch in self._patches:
            patch.remove()
        self._patches = []
        self._session.detach()

    def _compressed_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._session.forward() as passed:
            passed.show(output := forward(*args, **kwargs))
        return output

    def _compressed_in_backward(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compresses what a loss runs again in its backward, as those of sentence-transformers with a cache do."""
        return self._compressed_forward(forward, *args, **kwargs) if in_backward() else forward(*args, **kwargs)

    def _compressed(
        self,
        trainer: weakref.ref[Trainer],
        compute_loss: Callable[..., Any],
        model: nn.Module,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def loss_of(rows: Any) -> Any:
            # The audit's gradients are its own, on every rank, and so are tokens and metrics that trainers count.
            counted = attributes_kept(trainer(), unwrap_model(model))
            with counted, getattr(model, "no_sync", nullcontext)():
                return compute_loss(model, rows, *args, **kwargs)

        with self._session.forward(inputs, loss_of if model.training else None) as forward:
            forward.show(loss := compute_loss(model, inputs, *args, **kwargs))
        self._losses += 1
        return loss if self._weight == 1 else loss * self._weight

    def _guarded(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._uninstalled_on_error():
            loss = training_step(*args, **kwargs)
            self._session.after_backward()
        return loss

    def _planned(
        self,
        compute_loss: Callable[..., Any],
        reference: weakref.ref[Trainer],
        training_step: Callable[..., Any],
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Runs a step within the memory budget: in parts, each of which is a step of the Trainer's own."""
        trainer = reference()
        assert trainer is not None

        def loss_of(rows: Any) -> Any:
            # Not through DistributedDataParallel, which would wait for other processes.
            kept = attributes_kept(trainer, unwrap_model(model))
            with kept, trainer.compute_loss_context_manager():
                prepared = trainer._prepare_inputs(rows)  # pyright: ignore[reportPrivateUsage]
                return compute_loss(unwrap_model(model), prepared, num_items_in_batch=num_items_in_batch)

        def step(part: Any, weight: float, last: bool) -> Any:
            before, self._weight = self._losses, weight
            try:
                loss = training_step(model, part, num_items_in_batch)
            finally:
                self._weight = 1.0
            calls = self._losses - before
            if not last and calls != 1:
                raise WholeStepError(
                    f"training_step of {type(trainer).__name__} calls compute_loss {calls} times for a batch, and DAF "
                    "runs it in parts where it does so once"
                )
            return loss

        model.train()
        # Tokens and metrics that trainers count are those of the attempt that had enough memory.
        counted = Attributes(trainer, private=True, others=unwrap_model(model))
        with self._uninstalled_on_error():
            return self._session.run_step(inputs, loss_of, step, counted.restore)

    def _logged(self, write: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        # Into the caller's own dict: what Trainer.log adds to it is part of what train and evaluate return.
        if "loss" in logs:
            logs.update(self._session.take_metrics())
        return write(logs, *args, **kwargs)


class DAFTrainerMixin:
    """Adds a `DAFCallback` to a Trainer; to be named before it: ``class Mine(DAFTrainerMixin, SFTTrainer)``.

    A Trainer that exists already needs none: ``trainer.add_callback(DAFCallback(precision=4))``.

    Args:
        args: Those of the Trainer.
        daf: The configuration, or a mapping of its fields; None for that of the environment, or the defaults.
        callbacks: As for the Trainer. A `DAFCallback` among them is the one that is used.
        kwargs: Those of the Trainer.

    Raises:
        ConfigError: A field is unknown or its value is not allowed, or both `daf` and a `DAFCallback` are given.
    """

    def __init__(
        self,
        *args: Any,
        daf: DAFConfig | Mapping[str, Any] | None = None,
        callbacks: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = list(callbacks or [])
        if not any(isinstance(each, DAFCallback) or each is DAFCallback for each in given):
            given.append(DAFCallback(daf))
        elif daf is not None:
            raise ConfigError("both daf and a DAFCallback are given; leave one out")
        super().__init__(*args, **{**kwargs, "callbacks": given})


class DAFTrainer(DAFTrainerMixin, Trainer):
    """A Trainer whose activations are compressed.

    Example:
        >>> DAFTrainer(model, args, train_dataset=data, daf={"memory_budget": "600MB"}).train()
    """


def _smoothed(smoother: LabelSmoother, outputs: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes the loss of smoothed labels in chunks where logits are lazy, and elsewhere as the Trainer does."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    loss = smoothed_loss(logits, labels, smoother.epsilon, smoother.ignore_index, *args, **kwargs)
    return smoother(outputs, labels, *args, **kwargs) if loss is None else loss


class _Patch:
    """Replaces a method on one object by a call that is given what was there first, and puts that back."""

    def __init__(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name = weakref.ref(owner), name
        self._replaced = vars(owner).get(name)
        original = getattr(owner, name)

        @wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, patched)

    def remove(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        if self._replaced is None:
            delattr(owner, self._name)
        else:
            setattr(owner, self._name, self._replaced)


def _check_single_callback(trainer: Trainer | None) -> None:
    """Refuses a second callback of DAF's, whose options would not count."""
    callbacks = [] if trainer is None else trainer.callback_handler.callbacks
    found = [each for each in callbacks if isinstance(each, DAFCallback)]
    if len(found) > 1:
        titles = " and ".join(repr(each.config.precision) for each in found)
        raise ConfigError(
            f"the Trainer has {len(found)} DAFCallbacks (of precision {titles}), of which one alone can count; "
            "leave out the others, or remove one with trainer.remove_callback(callback)"
        )


def _check_no_offloading(args: TrainingArguments) -> None:
    """Refuses an option of TRL by its name: the error of the first step knows hooks, and no options."""
    if getattr(args, "activation_offloading", False):
        raise HooksActiveError(
            f"{type(args).__name__}(activation_offloading=True) and DAFCallback both decide where activations wait for "
            "backward, and torch applies one of them alone. Leave out activation_offloading, and DAF holds them in few "
            "bits, with memory_budget within a size; or leave out DAFCallback"
        )


def _calling_trainer(callback: DAFCallback) -> Trainer | None:
    """Finds the Trainer that calls an event, which passes the model and the optimizer, but not the Trainer itself."""
    for frame, _ in itertools.islice(traceback.walk_stack(inspect.currentframe()), FRAMES):
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
    return None
