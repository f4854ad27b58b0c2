"""The reference as a backend: any device that torch runs on, slowly and with temporaries."""

from __future__ import annotations

import torch
from torch import Tensor

from daf_kernels.backend import PageMemory, Pages, Seed, TwoValues, bits_of_elements
from daf_kernels.layout import PlaneLayout, sampled_groups
from daf_kernels.reference import codec as reference
from daf_kernels.reference import gelu_derivative as slopes


class ReferenceBackend:
    """Torch operations instead of kernels; see `daf_kernels.backend.Backend` for the contract."""

    def limit_threads(self, count: int) -> None:
        """See `Backend.limit_threads`; torch alone decides."""

    def relative_range(self, values: Tensor, layout: PlaneLayout) -> float:
        """See `Backend.relative_range`."""
        groups = sample_groups(values, layout).float()
        squares = float((groups.amax(1) - groups.amin(1)).double().square().sum())
        variances = float(groups.double().var(1, correction=0).sum())
        return squares / variances if variances else 0.0

    def encode(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages, seed: Seed | None
    ) -> bool:
        """See `Backend.encode`."""
        content = reference.encode(values.reshape(-1), layout, planes, seed)
        memory.write(pages, content)
        means, _ = reference.read_header(content[: layout.header_pages], layout)
        return not bool(means.isnan().any())

    def decode(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode`."""
        out.copy_(reference.decode(memory.read(pages), layout, planes, out.dtype).view(out.shape))

    def encode_slopes(self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> bool:
        """See `Backend.encode_slopes`."""
        magnitudes = values.reshape(-1).float().abs()
        negative = bits_of_elements(values) < 0  # torch drops the sign of some float16 NaNs
        inputs = torch.where(negative, -magnitudes, magnitudes)
        memory.write(pages[layout.header_pages :], reference.pack_planes(slopes.codes_of(inputs), layout, planes))
        return bool(inputs.isfinite().all())

    def decode_slopes(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_slopes`."""
        codes = reference.unpack_planes(memory.read(pages), layout, planes)
        table = torch.from_numpy(slopes.inputs_of_codes()[planes]).to(out.device)
        out.copy_(table[codes].view(out.shape))

    def two_values(self, values: Tensor) -> TwoValues | None:
        """See `Backend.two_values`."""
        found = bits_of_elements(values).unique()
        if found.numel() > 2:
            return None
        zero, one = (int(value) & _mask(values) for value in (found[0], found[-1]))
        return zero, one

    def encode_mask(self, values: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> bool:
        """See `Backend.encode_mask`."""
        bits = bits_of_elements(values)
        zero, one = (_signed(bit, bits) for bit in two)
        if not bool(((bits == zero) | (bits == one)).all()):
            return False
        memory.write(pages, reference.encode_mask(bits, one, memory.page_bytes))
        return True

    def decode_mask(self, out: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_mask`."""
        flags = reference.decode_mask(memory.read(pages), out.numel())
        zero, one = (_signed(bit, bits_of_elements(out)) for bit in two)
        out.copy_(torch.where(flags, one, zero).view(out.dtype).view(out.shape))

    def encode_nonzero(self, values: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.encode_nonzero`."""
        nonzero = (values.reshape(-1) != 0).to(torch.uint8)
        memory.write(pages, reference.encode_mask(nonzero, torch.ones_like(nonzero[0]), memory.page_bytes))

    def rectify(self, out: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.rectify`."""
        flags = reference.decode_mask(memory.read(pages), out.numel()).view(out.shape)
        out.copy_(torch.where(flags, out.clamp_min(torch.finfo(out.dtype).tiny), 0.0))


def _mask(values: Tensor) -> int:
    return (1 << 8 * values.element_size()) - 1


def _signed(bits: int, like: Tensor) -> Tensor:
    """Returns unsigned `bits` as a number of the integer type of `like`."""
    size = like.element_size()
    return torch.frombuffer(bytearray(bits.to_bytes(size, "little")), dtype=like.dtype)[0].to(like.device)


def sample_groups(values: Tensor, layout: PlaneLayout) -> Tensor:
    """Returns the groups that stand for all, of shape (groups, elements of a group); see `layout.sampled_groups`."""
    count, step, size = sampled_groups(layout)
    first = torch.arange(count, device=values.device) * (step * layout.group)
    return values.reshape(-1)[first[:, None] + torch.arange(size, device=values.device)]
