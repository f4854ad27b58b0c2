"""Fused attention runs again in backward, on what its query, key and value decode to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core.autograd.torch_private import packed_for, run_again, running_node
from daf_core.codecs.raw import RawActivation
from daf_core.errors import ReaderError
from daf_core.readers.attention import INPUTS, KERNELS, Draws, attend_again, can_attend_again, drawing_from, kernel_of
from daf_core.saved_tensors.background import BackgroundPacker
from daf_core.saved_tensors.background_choice import PackingChoice
from tests.core.harness import Scale, assert_empty, engine_for, error, normal, pager_of, watch

CPU = torch.device("cpu")
aten = torch.ops.aten


def _qkv(*shape: int, heads: int = 0, seed: int = 0) -> list[Tensor]:
    """Query, key and value of a shape; key and value have so many heads, if any are given."""
    fewer = (shape[0], heads or shape[1], *shape[2:])
    return [normal(*size, seed=seed + place) for place, size in enumerate((shape, fewer, fewer))]


def _heads_inside(tensor: Tensor) -> Tensor:
    """The same values, with the memory order of a projection that was split into heads."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _with_holes(tensor: Tensor) -> Tensor:
    """The same values, beside others: as a chunk of a projection to query, key and value together."""
    return torch.cat([tensor, tensor, tensor], -1).chunk(3, -1)[1]


SHAPE = (2, 4, 48, 64)
MASK = normal(48, 48, seed=9) > 0
BIAS = normal(2, 1, 48, 48, seed=8)

CALLS: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "plain": (_qkv(*SHAPE), {}),
    "causal": (_qkv(*SHAPE), {"is_causal": True}),
    "scale": (_qkv(*SHAPE), {"scale": 0.5}),
    "bool-mask": (_qkv(*SHAPE), {"attn_mask": MASK}),
    "float-mask": (_qkv(*SHAPE), {"attn_mask": BIAS}),
    "expanded-mask": (_qkv(*SHAPE), {"attn_mask": BIAS[:, :, :1].expand(2, 4, 48, 48)}),
    "grouped": (_qkv(*SHAPE, heads=2), {"enable_gqa": True}),
    "bfloat16": ([tensor.bfloat16() for tensor in _qkv(*SHAPE)], {}),
    "bfloat16-causal": ([tensor.bfloat16() for tensor in _qkv(*SHAPE)], {"is_causal": True}),
    "heads-inside": ([_heads_inside(tensor) for tensor in _qkv(*SHAPE)], {}),
    "holes": ([_with_holes(tensor) for tensor in _qkv(*SHAPE)], {"is_causal": True}),
    "odd-width": (_qkv(2, 4, 48, 50), {}),
    "more-keys": ([normal(2, 4, 20, 64), *_qkv(*SHAPE)[1:]], {}),
}


@pytest.mark.parametrize(("tensors", "options"), CALLS.values(), ids=CALLS)
def test_the_same_inputs_give_the_same_results(tensors: list[Tensor], options: dict[str, Any]) -> None:
    """Bit by bit, and with the strides that backward expects."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    node = F.scaled_dot_product_attention(*inputs, **options).grad_fn
    assert node is not None
    assert node.name() == "ScaledDotProductFlashAttentionForCpuBackward0"
    assert can_attend_again(node, CPU)
    found = attend_again(node, *inputs, node._saved_attn_mask)
    assert set(found) == {"output", "logsumexp"}
    for name, tensor in found.items():
        expected = getattr(node, f"_saved_{name}")
        assert torch.equal(tensor, expected), name
        assert tensor.stride() == expected.stride(), name
        assert not tensor.requires_grad


def _loss(tensors: list[Tensor], weights: Tensor, options: dict[str, Any]) -> Tensor:
    return (F.scaled_dot_product_attention(*tensors, **options) * weights).sum()


def _weights(result: Tensor) -> Tensor:
    """What comes to an attention's backward."""
    return normal(*result.shape, seed=5).to(result.dtype)


def _decoded(tensors: list[Tensor], options: dict[str, Any], bits: int) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients through an engine, and what the attention's inputs decoded to in its backward."""
    engine = engine_for(nn.Linear(1, 1), bits)
    inputs, seen = [tensor.detach().requires_grad_() for tensor in tensors], dict[str, Tensor]()
    with engine.compress():
        result = F.scaled_dot_product_attention(*inputs, **options)
    node: Any = result.grad_fn
    node.register_prehook(lambda _: seen.update({name: getattr(node, f"_saved_{name}").detach() for name in INPUTS}))
    result.backward(_weights(result))
    del result
    assert_empty(engine)
    return [tensor.grad for tensor in inputs], [seen[name] for name in INPUTS]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "float-mask"])  # whose bias is decoded as well
@pytest.mark.parametrize("bits", [2, 8])
def test_the_gradient_is_the_exact_one_of_what_was_decoded(name: str, bits: int) -> None:
    tensors, options = CALLS[name]
    found, decoded = _decoded(tensors, options, bits)
    assert all(not torch.equal(a, b) for a, b in zip(decoded, tensors, strict=True))
    expected = [tensor.requires_grad_() for tensor in decoded]
    result = F.scaled_dot_product_attention(*expected, **options)
    result.backward(_weights(result))
    for gradient, tensor in zip(found, expected, strict=True):
        assert torch.equal(gradient, tensor.grad)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.12), (4, 1.0), (2, 1.5)])
def test_sharp_attention_does_not_explode(bits: int, bound: float) -> None:
    """With the true logsumexp errors are .15, 60 and 6e6 here: scores with a deviation of 16."""
    query, key, value = _qkv(2, 4, 128, 64)
    tensors = [query * 4, key * 4, value]
    found, _ = _decoded(tensors, {}, bits)
    inputs = [tensor.requires_grad_() for tensor in tensors]
    result = F.scaled_dot_product_attention(*inputs)
    result.backward(_weights(result))
    assert error(found, [tensor.grad for tensor in inputs]) < bound  # pyright: ignore[reportArgumentType]


def test_a_sharp_attention_computes_its_result_from_the_codes_of_the_value() -> None:
    """Its query and key stay exact. With a result in codes of its own their gradients had errors of .03, now .006."""
    query, key, value = _qkv(2, 4, 128, 64)
    tensors = [query * 4, key * 4, value]
    found, decoded = _decoded(tensors, {}, 8)
    assert torch.equal(decoded[0], tensors[0])
    assert torch.equal(decoded[1], tensors[1])
    assert not torch.equal(decoded[2], value)
    expected = [tensor.requires_grad_() for tensor in decoded]
    result = F.scaled_dot_product_attention(*expected)
    result.backward(_weights(result))
    assert all(torch.equal(*pair) for pair in zip(found, (each.grad for each in expected), strict=True))


def _forms(*, frozen: bool) -> tuple[list[str], int]:
    """Forms in which an attention and a linear layer behind it save, and bytes that are held."""
    model = nn.Linear(256, 256).requires_grad_(not frozen)
    engine = engine_for(nn.ModuleList([model, nn.Linear(1, 1)]), 4)
    seen = watch(engine)
    inputs = [_heads_inside(tensor).requires_grad_() for tensor in _qkv(2, 4, 128, 64)]
    with engine.compress():
        result = F.scaled_dot_product_attention(*[tensor * 1 for tensor in inputs])
        loss = model(result.transpose(1, 2).flatten(2)).sum()
    held = engine.held_bytes
    loss.backward()
    return [saved.form for saved in seen], held


def test_what_runs_again_is_not_stored() -> None:
    """Of what an attention saves three tensors are held, unless the layer behind it needs the fourth on its own."""
    frozen, held = _forms(frozen=True)
    trained, more = _forms(frozen=False)
    own = ["planes", "planes", "planes", "raw", "attended"]  # the logsumexp is let go of when the result comes
    assert [form for form in frozen if form != "parameter"] == own
    assert [form for form in trained if form != "parameter"] == [*own, "planes"]
    # Half a byte an element, and a page of headers; no logsumexp, which takes a page as well.
    assert (held, more) == (3 * (32768 + 4096), 4 * (32768 + 4096))


def test_packing_in_the_background_stores_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = CALLS["causal"]
    expected, _ = _decoded(tensors, options, 4)
    sent, send = list[str](), BackgroundPacker.send
    monkeypatch.setattr(
        BackgroundPacker, "send", lambda packer, saved: sent.append(saved.site.op) or send(packer, saved)
    )
    monkeypatch.setattr(PackingChoice, "threads", lambda choice: 1)
    found, _ = _decoded(tensors, options, 4)
    assert "ScaledDotProductFlashAttentionForCpuBackward0" in sent
    assert all(map(torch.equal, found, expected))


def test_exact_inputs_keep_the_logsumexp_as_it_was() -> None:
    """Small tensors stay as they are: nothing is computed again, whatever the values are."""
    engine = engine_for(nn.Linear(1, 1), 2)
    inputs = [tensor.requires_grad_() for tensor in _qkv(1, 2, 16, 64)]
    with engine.compress():
        loss = F.scaled_dot_product_attention(*inputs).sum()
    node: Any = loss.grad_fn.next_functions[0][0]  # pyright: ignore[reportOptionalMemberAccess]
    assert node._saved_logsumexp.shape == (1, 2, 16)
    assert isinstance(packed_for(node, "output", engine._packer.unpack), RawActivation)


def test_exact_mode_stores_all() -> None:
    """Also where query and key are not stored but follow from others, exactly."""
    engine = engine_for(nn.Linear(1, 1), "exact")
    seen = watch(engine)
    query, key, value = (tensor.requires_grad_() for tensor in _qkv(*SHAPE))
    with engine.compress():
        loss = F.scaled_dot_product_attention(*(F.dropout(x.softmax(-1), 0.5) for x in (query, key)), value).sum()
    found = {saved.form for saved in seen}
    assert "product" in found
    assert "attended" not in found
    del loss


def test_others_that_save_the_result_get_codes_of_it() -> None:
    """An operator right behind the attention saves the same tensor, which its own node has saved before."""
    scale = Scale()
    engine = engine_for(scale, 8)
    seen = watch(engine)
    with engine.compress():
        loss = scale(F.scaled_dot_product_attention(*[tensor.requires_grad_() for tensor in _qkv(*SHAPE)])).sum()
    assert [saved.form for saved in seen if saved.shape == SHAPE][-2:] == ["attended", "planes"]
    loss.backward()
    result = F.scaled_dot_product_attention(*_qkv(*SHAPE))
    assert scale.weight.grad is not None
    assert float(scale.weight.grad) == pytest.approx(float(result.sum()), rel=0.05)


def test_a_node_that_is_run_by_hand_gets_what_belongs_to_its_inputs() -> None:
    """As a calibration does, inside the backward of another node or of none."""
    engine = engine_for(nn.Linear(1, 1), 4)
    inputs = [tensor.requires_grad_() for tensor in _qkv(*SHAPE)]
    with engine.compress():
        result = F.scaled_dot_product_attention(*inputs)
    found = run_again(result.grad_fn, [_weights(result)])
    assert running_node() is None
    expected = torch.autograd.grad(result, inputs, _weights(result))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=False) if a is not None)


def test_it_runs_once_for_each_backward_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[list[weakref.ref[Tensor]]]()

    def record(node: Any, *inputs: Tensor, **_: object) -> dict[str, Tensor]:
        found = attend_again(node, *inputs)
        calls.append([weakref.ref(tensor.untyped_storage()) for tensor in (*inputs[:3], *found.values())])
        return found

    monkeypatch.setattr("daf_core.saved_tensors.attention_again.attend_again", record)
    engine = engine_for(nn.Linear(1, 1), 4)
    inputs = [tensor.requires_grad_() for tensor in _qkv(*SHAPE)]
    with engine.compress():
        loss = _loss(inputs, normal(*SHAPE), {})
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert len(calls) == 2
    assert all(map(torch.equal, first, second))
    assert not engine._packer._attention._held
    gc.collect()
    assert all(reference() is None for call in calls for reference in call)


def test_draws_are_asked_for_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each attention when the next one saves, or the pass ends: then it has saved them. On a GPU they lie there."""
    name = "ScaledDotProductFlashAttentionForCpuBackward0"
    monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], drawn=("logsumexp",)))
    asked, given = list[object](), list[object]()

    def draws_of(node: Any) -> Any:
        asked.append(node.name())
        return len(asked)

    def record(node: Any, *inputs: Tensor, draws: object) -> dict[str, Tensor]:
        given.append(draws)
        return attend_again(node, *inputs)

    monkeypatch.setattr("daf_core.saved_tensors.attention_again.draws_of", draws_of)
    monkeypatch.setattr("daf_core.saved_tensors.attention_again.attend_again", record)
    engine = engine_for(nn.Linear(1, 1), 4)
    inputs = [tensor.requires_grad_() for tensor in _qkv(*SHAPE)]
    with engine.compress():
        middle = F.scaled_dot_product_attention(*inputs)
        assert asked == []
        loss = F.scaled_dot_product_attention(middle, *inputs[1:]).square().sum()
        assert asked == [name]
    assert asked == [name, name]
    loss.backward()
    assert given == [2, 1]


def test_an_error_in_between_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(nn.Linear(1, 1), 4)
    with engine.compress():
        loss = _loss([tensor.requires_grad_() for tensor in _qkv(*SHAPE)], normal(*SHAPE), {})

    def fail(*_: object, **__: object) -> dict[str, Tensor]:
        raise MemoryError

    monkeypatch.setattr("daf_core.saved_tensors.attention_again.attend_again", fail)
    with pytest.raises(MemoryError):
        loss.backward()
    assert not engine._packer._attention._held


@pytest.mark.parametrize("name", ["output", "logsumexp"])
def test_results_are_for_its_own_backward_alone(name: str) -> None:
    engine = engine_for(nn.Linear(1, 1), 4)
    with engine.compress():
        result = F.scaled_dot_product_attention(*[tensor.requires_grad_() for tensor in _qkv(*SHAPE)])
    with pytest.raises(ReaderError, match="fused attention"):
        getattr(result.grad_fn, f"_saved_{name}")


def test_a_second_derivative_fails_as_it_does_without() -> None:
    """Torch has none for fused attention. The first one, with a graph, is the same as without one."""
    messages = list[str]()
    for compressed in (False, True):
        engine = engine_for(nn.Linear(1, 1), 8)
        inputs = [tensor.requires_grad_() for tensor in _qkv(*SHAPE)]
        if compressed:
            with engine.compress():
                loss = _loss(inputs, normal(*SHAPE), {})
        else:
            loss = _loss(inputs, normal(*SHAPE), {})
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            first[0].square().sum().backward()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "derivative" in messages[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_are_left_alone() -> None:
    """They are no plain tensors, and on a CPU their attention is written out: the gradient is the exact one."""
    parts = [normal(rows, 4, 64, seed=rows) for rows in (40, 64)]
    gradients = list[Tensor]()
    for compressed in (False, True):
        engine = engine_for(nn.Linear(1, 1), 8)
        leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        view = leaf.transpose(1, 2)
        if compressed:
            with engine.compress():
                loss = F.scaled_dot_product_attention(view, view, view).values().square().sum()
        else:
            loss = F.scaled_dot_product_attention(view, view, view).values().square().sum()
        loss.backward()
        gradients.append(leaf.grad.values())  # pyright: ignore[reportOptionalMemberAccess]
    assert error(gradients[1:], gradients[:1]) < 0.05


def test_a_rehearsal_measures_the_error_that_training_has() -> None:
    """Queries and keys are tried at each precision, and the results belong to them: no error of 1e4 is predicted."""
    model = nn.Linear(256, 768)
    engine = engine_for(model, "auto", audit_every=1)
    x = normal(2, 128, 256) * 4

    def loss() -> Tensor:
        query, key, value = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in model(x).chunk(3, -1))
        return (F.scaled_dot_product_attention(query * 2, key * 2, value) * normal(2, 4, 128, 64)).sum()

    with engine.probe_pass(loss) as rehearsal:
        assert engine.config.precision == "auto"
        errors = [rehearsal.compare({site: bits for site, _ in rehearsal.activations}).error for bits in (8, 2)]
    assert errors[0] < 0.2
    assert errors[1] < 2


META = torch.device("meta")


def _meta(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=META, requires_grad=True)


def _starts() -> Tensor:
    return torch.empty(4, dtype=torch.int32, device=META)


ELSEWHERE: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "ScaledDotProductFlashAttentionBackward0": lambda: aten._scaled_dot_product_flash_attention(
        _meta(2, 8, 40, 64), _meta(2, 2, 56, 64), _meta(2, 2, 56, 64), 0.0, True, scale=0.3
    ),
    "ScaledDotProductEfficientAttentionBackward0": lambda: aten._scaled_dot_product_efficient_attention(
        _meta(2, 4, 40, 64), _meta(2, 4, 56, 64), _meta(2, 4, 56, 32), _meta(2, 4, 40, 56), True
    ),
    "ScaledDotProductCudnnAttentionBackward0": lambda: aten._scaled_dot_product_cudnn_attention(
        _meta(2, 4, 40, 64), _meta(2, 4, 56, 64), _meta(2, 4, 56, 64), None, True, is_causal=True
    ),
    "ScaledDotProductFusedAttentionOverrideableBackward0": lambda: (
        aten._scaled_dot_product_fused_attention_overrideable(
            _meta(2, 4, 40, 64), _meta(2, 4, 56, 64), _meta(2, 4, 56, 64)
        )
    ),
    "FlashAttentionBackward0": lambda: aten._flash_attention_forward(
        *(_meta(96, 4, 64) for _ in range(3)), _starts(), _starts(), 40, 40, 0.0, True, False, window_size_left=3
    ),
    "EfficientAttentionBackward0": lambda: aten._efficient_attention_forward(
        *(_meta(1, 96, 4, 64) for _ in range(3)), None, _starts(), _starts(), 40, 40, 0.0, 0, True
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_kernels_of_gpus_are_called_as_they_expect(name: str) -> None:
    """With the node's own settings, and what they give has the shapes and strides that the node saved."""
    node: Any = ELSEWHERE[name]()[0].grad_fn
    kernel = KERNELS[name]
    assert node.name() == name
    assert can_attend_again(node, META)
    bias = None if kernel.bias is None else getattr(node, f"_saved_{kernel.bias}")
    inputs = [getattr(node, f"_saved_{each}").detach() for each in INPUTS]
    found = attend_again(node, *inputs, *([] if kernel.bias is None else [bias]))
    for result in kernel.results:
        expected = getattr(node, f"_saved_{result}")
        assert (found[result].shape, found[result].stride()) == (expected.shape, expected.stride())


def test_an_argument_that_a_later_torch_adds_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.15 adds a window to one of these operators: without it another attention would run again."""
    name = "ScaledDotProductFlashAttentionForCpuBackward0"
    older = replace(KERNELS[name], saved={"dropout_p": "dropout_p"})
    monkeypatch.setitem(KERNELS, name, older)
    kernel_of.cache_clear()
    try:
        kernel = kernel_of(name)
        assert kernel is not None
        assert kernel.arguments - older.arguments >= {"scale", "is_causal"}
        inputs = [tensor.requires_grad_() for tensor in _qkv(*SHAPE)]
        node = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.5).grad_fn
        found = attend_again(node, *inputs, None)
        assert torch.equal(found["output"], node._saved_output)
    finally:
        kernel_of.cache_clear()


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_has_these_names_in_this_torch(name: str) -> None:
    """A new argument without a default, or another name of an old one, is noticed here, and keeps tensors exact."""
    kernel = kernel_of(name)
    assert kernel is not None
    schema = getattr(aten, kernel.operator).default._schema
    needed = {each.name for each in schema.arguments if not each.has_default_value()}
    assert needed <= kernel.arguments
    assert [each.name for each in schema.returns][:1] in ([""], ["output"])
    assert schema.returns[1].name in ("", "logsumexp", "log_sumexp", "softmax_logsumexp")
    fields = set(dir(getattr(torch._C._functions, name)))
    known = {each.name for each in schema.arguments if f"_saved_{each.name}" in fields}
    assert known <= kernel.arguments
    wanted = {*kernel.tensors, *kernel.saved.values(), *kernel.drawn}
    assert {f"_saved_{field}" for field in wanted} <= fields


def test_what_no_kernel_is_known_of_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(4, 4).requires_grad_()
    assert not can_attend_again((x * x).grad_fn, CPU)
    kernel = KERNELS["FlashAttentionBackward0"]
    renamed = type(kernel)(kernel.operator, kernel.logsumexp, {"another_name": "dropout_p"})
    gone = type(kernel)("_no_such_operator", kernel.logsumexp, {})
    monkeypatch.setitem(KERNELS, "RenamedBackward0", renamed)
    monkeypatch.setitem(KERNELS, "GoneBackward0", gone)
    assert kernel_of("RenamedBackward0") is None
    assert kernel_of("GoneBackward0") is None


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("ScaledDotProductFlashAttentionBackward0", "cuda", True),
        ("ScaledDotProductFlashAttentionBackward0", "meta", False),
        ("ScaledDotProductFusedAttentionOverrideableBackward0", "cuda", False),
    ],
)
def test_dropout_runs_again_only_where_its_numbers_are_known(name: str, device: str, expected: bool) -> None:
    class Node:
        _saved_dropout_p = 0.1

        def name(self) -> str:
            return name

    assert can_attend_again(Node(), torch.device(device)) is expected


class _Philox:
    """The generator of a GPU: its state is a seed and an offset, 64 bits each."""

    def __init__(self) -> None:
        self.state = torch.tensor([7, 8]).view(torch.uint8)

    def get_state(self) -> Tensor:
        return self.state.clone()

    def set_state(self, state: Tensor) -> None:
        self.state = state.clone()


def test_dropout_draws_from_where_it_drew_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the generator has the saved seed and offset, afterwards its own, also after an error."""
    generator: Any = _Philox()
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    start = torch.tensor([2**63 + 5, 12], dtype=torch.uint64).view(torch.int64)

    def fail() -> None:
        with drawing_from(torch.device("cuda", 1), Draws(start)):
            assert generator.state.view(torch.uint64).tolist() == [2**63 + 5, 12]
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert generator.state.view(torch.int64).tolist() == [7, 8]


def test_pages_are_read_once_for_backward_and_for_running_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget may take planes in between: what was decoded twice might differ."""
    engine = engine_for(nn.Linear(1, 1), 4)
    with engine.compress():
        loss = _loss([tensor.requires_grad_() for tensor in _qkv(*SHAPE)], normal(*SHAPE), {})
    pager, reads = pager_of(engine), list[object]()
    reading = pager.reading
    monkeypatch.setattr(pager, "reading", lambda lease: reads.append(lease) or reading(lease))
    loss.backward()
    assert len(reads) == 4  # query, key and value, and the weights behind them
    assert len(set(map(id, reads))) == 4
