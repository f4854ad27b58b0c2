"""Holds the predicted error of each site against the truth, and measures what choosing precisions by it gains.

Run ``python -m benchmarks.importance --json importance.json``. The truth is the relative error of all trained
gradients, same batch and same dropout masks, with one site alone at a precision and all others exact.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.finetune import Recipe, build_encoder, load_splits, training_batches
from benchmarks.harness import benchmark_parser, whole_number, write_results
from benchmarks.zoo.models import MODELS, build_batch, build_model
from daf_core import ActivationEngine, DAFConfig
from daf_core.autograd.sites import Site
from daf_core.codecs.plane_importance import LEVELS, SiteErrors
from daf_core.knapsack.choose import Knapsack
from daf_core.precision.calibration import calibrate
from daf_core.precision.probe import Gradients, ProbePass, compare
from daf_core.saved_tensors.derive import Derivation
from daf_integrations.cli.bench.tables import Grid

LAYERS = 4
ROWS = {"roberta-base": 4, "gpt2": 4, "resnet18": 16}
SEQ, IMAGE = 128, 64
BITS = (4, 2, 1)
HOPS = (0, 4)
SHARES = {"roberta-base": (8, 16), "gpt2": (8, 16), "resnet18": (8, 16), "minilm": (8, 10, 16, 18, 20, 23)}
WARM_UP = 20
"""Steps before MiniLM is measured: at the first one LoRA's second matrix is zero."""


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Rank correlation (Spearman's) of predicted and measured errors over all sites, at one precision."""

    model: str
    bits: int
    hops: int
    sites: int
    correlation: float
    predicted_total: float
    measured_total: float


@dataclass(frozen=True, kw_only=True)
class EqualBytes:
    """Errors of the gradient in the same share of the raw bytes: chosen precisions, and the largest that fits for all.

    ``plain_error`` is that of the same codec at one precision, nothing derived.
    """

    model: str
    share: int
    error: float
    cosine: float
    adapters_error: float | None
    plain_bits: int | None
    plain_error: float | None


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model and a batch in training."""

    name: str
    model: nn.Module
    batch: dict[str, Tensor]

    def loss(self) -> Tensor:
        """Returns the loss with the same dropout masks each time."""
        torch.manual_seed(0)
        return self.model(**self.batch).loss

    def adapters(self) -> list[int]:
        """Returns which of the trained parameters are adapters."""
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return [index for index, name in enumerate(names) if "lora_" in name]


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What a pass takes: as autograd saves it, and stored apart from lossy activations."""

    raw: int
    fixed: int


def model_work(name: str) -> Work:
    """Returns a model of the training benchmark, cut to a few layers so that the truth stays affordable."""
    spec = MODELS[name]
    with patch.dict(MODELS, {name: replace(spec, config=lambda: _shortened(spec.config()))}):
        model = build_model(name, lora_dropout=0.1)
    return Work(name=name, model=model, batch=build_batch(name, batch=ROWS[name], seq=SEQ, image=IMAGE))


def minilm_work(data: Path, batches: int) -> list[Work]:
    """Returns the encoder after some steps of training, with the batches that follow."""
    rows, model = load_splits(data)["train"], build_encoder(0).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=Recipe.learning_rate)
    following = training_batches(rows, Recipe(), 0)
    torch.manual_seed(0)
    for _ in range(WARM_UP):
        model(**next(following)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [Work(name="minilm", model=model, batch=next(following)) for _ in range(batches)]


def measure_correlations(work: Work, rehearsal: ProbePass) -> list[Correlation]:
    """Compares predictions with the truth, which takes a backward pass for each site and precision."""
    predictions = {hops: _calibrated(rehearsal, hops) for hops in HOPS}
    sites = list(predictions[HOPS[0]])
    results: list[Correlation] = []
    for bits in BITS:
        truth = [rehearsal.compare({site: bits}).error for site in sites]
        together = rehearsal.compare(dict.fromkeys(sites, bits)).error
        for hops, errors in predictions.items():
            squares = [errors[site][LEVELS.index(bits)] for site in sites]
            results.append(
                Correlation(
                    model=work.name,
                    bits=bits,
                    hops=hops,
                    sites=len(sites),
                    correlation=float(spearmanr(truth, squares).statistic),
                    predicted_total=sum(squares) ** 0.5,
                    measured_total=together,
                )
            )
    return results


def measure_equal_bytes(work: Work) -> list[EqualBytes]:
    """Measures errors in shares of the raw bytes."""
    plain = _plain_errors(work)
    taken = _pass_bytes(work)
    results: list[EqualBytes] = []
    with _rehearse(work) as rehearsal:
        sizes, errors, adapters = rehearsal.sizes, _calibrated(rehearsal), work.adapters()
        knapsack = Knapsack([tuple(zip(sizes[site][:-1], errors[site], strict=True)) for site in sizes])
        for share in SHARES[work.name]:
            choice = knapsack.picked(taken.raw / share - taken.fixed)
            found = rehearsal.gradients({site: LEVELS[index] for site, index in zip(sizes, choice, strict=True)})
            measured = compare(found, rehearsal.exact)
            fits = [(bits, error) for bits, size, error in plain if size <= taken.raw / share]
            bits, error = max(fits) if fits else (None, None)
            results.append(
                EqualBytes(
                    model=work.name,
                    share=share,
                    error=measured.error,
                    cosine=measured.cosine,
                    adapters_error=_part_error(found, rehearsal.exact, adapters) if adapters else None,
                    plain_bits=bits,
                    plain_error=error,
                )
            )
    return results


def _shortened(config: object) -> object:
    for name in ("num_hidden_layers", "n_layer"):
        if hasattr(config, name):
            setattr(config, name, LAYERS)
    return config


def _calibrated(rehearsal: ProbePass, hops: int = HOPS[-1]) -> SiteErrors:
    found = calibrate(rehearsal, hops=hops)
    if found is None:
        raise ArithmeticError("the gradient is zero or not finite")
    return found.errors


def _rehearse(work: Work) -> AbstractContextManager[ProbePass]:
    return ActivationEngine(work.model, DAFConfig()).probe_pass(work.loss)


def _plain_errors(work: Work) -> list[tuple[int, int, float]]:
    """Returns (bits, bytes, error) for all sites at one precision, with nothing derived."""
    with patch.object(Derivation, "derive", lambda *_: None):
        fixed = _pass_bytes(work).fixed
        with _rehearse(work) as rehearsal:
            sizes = rehearsal.sizes
            return [
                (bits, fixed + _total(sizes, index), rehearsal.compare(dict.fromkeys(sizes, bits)).error)
                for index, bits in enumerate(LEVELS)
            ]


def _pass_bytes(work: Work) -> Bytes:
    engine = ActivationEngine(work.model, DAFConfig(precision=4, audit_every=None))
    with engine.compress():
        loss = work.loss()
    held, lossy = engine.held_bytes, engine.lossy_bytes
    loss.backward()
    work.model.zero_grad()
    engine.close()
    return Bytes(raw=engine.finish_step().raw_bytes, fixed=held - lossy)


def _total(sizes: Mapping[Site, Sequence[int]], index: int) -> int:
    return sum(site_sizes[index] for site_sizes in sizes.values())


def _part_error(found: Gradients, exact: Gradients, part: list[int]) -> float:
    return compare([found[index] for index in part], [exact[index] for index in part]).error


def correlation_grid(results: Sequence[Correlation]) -> Grid:
    """Returns one row for each model and precision, predictions side by side."""
    headings = ("model", "sites", "bits", *(f"correlation, {hops} hops" for hops in HOPS), "predicted", "measured")
    by_case: dict[tuple[str, int], list[Correlation]] = {}
    for result in results:
        by_case.setdefault((result.model, result.bits), []).append(result)
    rows = [
        (
            *(model, str(found[-1].sites), str(bits), *(f"{result.correlation:.3f}" for result in found)),
            *(f"{total:.4f}" for total in (found[-1].predicted_total, found[-1].measured_total)),
        )
        for (model, bits), found in by_case.items()
    ]
    return Grid("predicted and measured error of each site alone", headings, rows)


def equal_bytes_grid(results: Sequence[EqualBytes]) -> Grid:
    """Returns one row for each model, batch and share."""
    headings = ("model", "bytes", "error", "cosine", "adapters alone", "one precision", "its error", "ratio")
    rows: list[list[str]] = []
    for each in results:
        plain = ["", "", ""]
        if each.plain_bits is not None and each.plain_error is not None:
            plain = [f"{each.plain_bits} bits", f"{each.plain_error:.4f}", f"{each.error / each.plain_error:.2f}"]
        adapters = "" if each.adapters_error is None else f"{each.adapters_error:.3f}"
        rows.append([each.model, f"1/{each.share}", f"{each.error:.4f}", f"{each.cosine:.4f}", adapters, *plain])
    return Grid("error of the gradient in the same bytes", headings, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its tables and writes the file asked for."""
    parser = benchmark_parser("importance", "Predicted against true error.", "json")
    parser.add_argument("--data", type=Path, help="folder of MRPC, for MiniLM; left out without")
    parser.add_argument("--batches", type=whole_number(1), default=3, help="of MiniLM")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    works = [model_work(name) for name in ROWS]
    correlations: list[Correlation] = []
    for work in works:
        with _rehearse(work) as rehearsal:
            correlations += measure_correlations(work, rehearsal)
    if options.data:
        works += minilm_work(options.data, options.batches)
    shares = [result for work in works for result in measure_equal_bytes(work)]
    grids = [correlation_grid(correlations), equal_bytes_grid(shares)]
    write_results(options, {"correlations": correlations, "equal_bytes": shares}, grids)


if __name__ == "__main__":
    main()
