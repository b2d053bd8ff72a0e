"""The first tier: types, shapes, dtypes, strides, devices. Reads no tensor data, so it never synchronises a device.

Meant for production: a correct output costs a few microseconds, and no text is built unless something is broken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_contract.checks.expectation import Expectation
from moe_contract.checks.findings import ABSENT, ROWS, TRIPLE, Findings, attribute, is_readable, shape_text
from moe_contract.checks.routes import check_map, check_weights
from moe_contract.dtypes import dtype_name

ROW_ALIGNMENT = 16
"""Bytes: the widest vector load of a CUDA thread, which consumers use on the rows (ROWS-1)."""


def check_metadata(output: object, expectation: Expectation) -> Findings:
    """Everything that can be said of ``output`` without reading its data. Takes any object at all."""
    found = Findings(expectation.rank)
    if isinstance(output, Tensor):
        _check_finalized(output, expectation, found)
        return found
    routed = attribute(output, "routed")
    if routed is ABSENT:
        _check_routed(output, expectation, found)
        return found
    device = _check_routed(routed, expectation, found)
    shared = attribute(output, "shared_output")
    if shared is not None and shared is not ABSENT:
        _check_shared(shared, expectation, device, found)
    _check_scale(attribute(output, "routed_scaling_factor"), found)
    return found


def _check_routed(routed: object, expectation: Expectation, found: Findings) -> torch.device | None:
    """Checks the routed part; answers the device that the output's other tensors have to be on."""
    if isinstance(routed, Tensor):
        return _check_finalized(routed, expectation, found)
    rows, weights, mapped = (attribute(routed, field) for field in TRIPLE)
    if rows is ABSENT or weights is ABSENT or mapped is ABSENT:
        _report_not_a_triple(routed, found)
        return expectation.device
    if expectation.num_tokens == 0:
        got = f"{type(routed).__name__} for 0 tokens"
        found.add("OUT-2", "routed", got, f"the finalized empty tensor [0, {expectation.hidden_size}]")
        return expectation.device
    if expectation.deferred is False:
        found.add(
            "DEFER-1",
            "routed",
            f"an unfinalized {type(routed).__name__}",
            f"a finalized tensor [{expectation.num_tokens}, {expectation.hidden_size}]",
            "defer only where config.should_defer(num_tokens) says so at the call",
        )
    device = expectation.device
    route_major = attribute(routed, "route_major")
    for field, value in zip(TRIPLE, (rows, weights, mapped), strict=True):
        if not isinstance(value, Tensor):
            found.add("OUT-1", field, _kind(value), "a tensor")
            continue
        device = _check_placement(field, value, device, found)
    if isinstance(rows, Tensor):
        _check_rows(rows, expectation, route_major is True, found)
    if isinstance(weights, Tensor):
        check_weights(weights, expectation, found)
    if isinstance(mapped, Tensor):
        check_map(mapped, expectation, found)
    if route_major is not False and route_major is not ABSENT:
        _check_route_major(route_major, expectation, found)
    return device


def _check_finalized(routed: Tensor, expectation: Expectation, found: Findings) -> torch.device | None:
    tokens, hidden = expectation.num_tokens, expectation.hidden_size
    if not is_readable(routed) or routed.shape != (tokens, hidden):
        flat = is_readable(routed) and routed.dim() == 1 and routed.numel() == tokens * hidden
        hint = "a flat view of it: return it as [T, H]" if flat and tokens else ""
        clause = "OUT-1" if tokens else "OUT-2"
        found.add(clause, "routed", f"a tensor of shape {shape_text(routed)}", f"[{tokens}, {hidden}]", hint)
        return expectation.device
    if routed.dtype is not expectation.dtype:
        expected = f"the activation dtype {dtype_name(expectation.dtype)}"
        found.add("OUT-1", "routed", dtype_name(routed.dtype), expected)
    if expectation.deferred and tokens:
        found.add(
            "DEFER-1",
            "routed",
            "a finalized tensor",
            "an UnfinalizedMoEOutput",
            "deferral is opted in and possible at this call; read the config at the call, or declare can_defer=False",
        )
    return _check_placement("routed", routed, expectation.device, found)


def _check_placement(field: str, tensor: Tensor, device: torch.device | None, found: Findings) -> torch.device:
    """OUT-3; answers the device that the other tensors have to be on."""
    if tensor.requires_grad:
        found.add("OUT-3", field, "requires_grad=True", "no autograd", "run the kernel under torch.no_grad()")
    on = tensor.device
    if device is None or on == device:
        return on
    if on.type == device.type and device.index is None:  # "cuda" stands for every CUDA device: take the first one seen
        return on
    found.add("OUT-3", field, f"on {on}", f"on {device}, as the rest of the output")
    return device


def _check_rows(rows: Tensor, expectation: Expectation, route_major: bool, found: Findings) -> None:
    hidden = expectation.hidden_size
    if not is_readable(rows) or len(shape := rows.shape) != 2:
        hint = "the row buffer is [P, H] over permuted rows, not [T, K, H]" if rows.dim() == 3 else ""
        found.add("ROWS-1", ROWS, f"shape {shape_text(rows)}", f"[P, {hidden}]", hint)
        return
    num_rows, width = shape
    if rows.dtype is not expectation.dtype:
        found.add("ROWS-1", ROWS, dtype_name(rows.dtype), f"the activation dtype {dtype_name(expectation.dtype)}")
    if width != hidden:
        hint = "padded columns: copy the logical H columns into a compact buffer" if width > hidden else ""
        found.add("ROWS-4", ROWS, f"width {width}", f"the logical hidden size {hidden}", hint)
        return
    if route_major and num_rows != expectation.num_tokens * expectation.top_k:
        expected = f"T * K = {expectation.num_tokens * expectation.top_k} rows, since route_major is True"
        found.add("MAP-1", ROWS, f"{num_rows} rows", expected)
    if not rows.is_contiguous():  # which ignores, as it should, the strides of dimensions of size 0 or 1
        hint = "a view of a padded or transposed buffer: return .contiguous()"
        found.add("ROWS-1", ROWS, f"strides {rows.stride()}", f"compact rows, strides {(hidden, 1)}", hint)
    elif past := _address(rows) % ROW_ALIGNMENT:
        got = f"a base address {past} bytes past a multiple of {ROW_ALIGNMENT}"
        found.add("ROWS-1", ROWS, got, f"a {ROW_ALIGNMENT}-byte aligned base")


def _address(tensor: Tensor) -> int:
    """The base address; 0 where there is none: an empty tensor has a null pointer or any other."""
    if not tensor.shape[0] or torch.compiler.is_compiling():  # a traced tensor has no address
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # fake and functional tensors have no address
        return 0


def _check_route_major(route_major: object, expectation: Expectation, found: Findings) -> None:
    if not isinstance(route_major, bool):
        found.add("OUT-1", "route_major", _kind(route_major), "True or False")
    elif not expectation.route_major:
        hint = "route-major rows are an option of contract 1.1: declare and negotiate them"
        found.add("DEFER-4", "route_major", "True", "False: route-major rows are not accepted here", hint)


def _check_shared(shared: object, expectation: Expectation, device: torch.device | None, found: Findings) -> None:
    if not isinstance(shared, Tensor):
        found.add("SHARED-1", "shared_output", _kind(shared), "a tensor or None")
        return
    expected_shape = (expectation.num_tokens, expectation.hidden_size)
    if not is_readable(shared) or shared.shape != expected_shape:
        found.add("SHARED-1", "shared_output", f"shape {shape_text(shared)}", f"[T, H] = {list(expected_shape)}")
    if shared.dtype is not expectation.dtype:
        expected = f"the activation dtype {dtype_name(expectation.dtype)}"
        found.add("SHARED-1", "shared_output", dtype_name(shared.dtype), expected)
    _check_placement("shared_output", shared, device, found)


def _check_scale(scale: object, found: Findings) -> None:
    if scale is ABSENT:  # the field has a default of 1.0
        return
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        found.add("SCALE-1", "routed_scaling_factor", _kind(scale), "a Python float")
    elif not -math.inf < scale < math.inf:  # math.isfinite breaks the graph of torch.compile
        found.add("SCALE-1", "routed_scaling_factor", str(scale), "a finite float")


def _report_not_a_triple(routed: object, found: Findings) -> None:
    missing = [field for field in TRIPLE if attribute(routed, field) is ABSENT]
    if len(missing) < len(TRIPLE):
        for field in missing:
            found.add("OUT-1", field, f"no such attribute on {type(routed).__name__}", "a tensor")
        return
    hint = ""
    if isinstance(routed, list | tuple) and len(routed) == len(TRIPLE):
        hint = "a kernel's own three tensors: wrap them by name, in the contract's order"
    found.add("OUT-1", "routed", _kind(routed), "a finalized [T, H] tensor or an UnfinalizedMoEOutput", hint)


def _kind(value: object) -> str:
    """A value's type in words; lists and tuples with their length."""
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
