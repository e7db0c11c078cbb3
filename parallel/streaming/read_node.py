"""Table of the layers that can be computed box by box, and why any other cannot.

A new kind of layer is a row of ``ROWS``: a function that returns its rule (rows that it gives and needs) together with
the computation of a box, and the layers, functions and names of methods that it reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallel.streaming.layer import Layer, Reading
from parallel.streaming.operation import Arguments, NotTileable, Operation, module_of
from parallel.streaming.read_norm import batch_norm, group_norm, instance_norm
from parallel.streaming.read_pointwise import (
    IN_PLACE,
    activation,
    along,
    dropout,
    dropped_channels,
    dropped_paths,
    identity,
    indexed,
    joined,
    over_last,
    permuted,
    pointwise,
    stacked,
    transposed,
    viewed,
)
from parallel.streaming.read_window import (
    adaptive_pool,
    average_pool,
    convolution,
    max_pool,
    pad,
    pixel_shuffle,
    pixel_unshuffle,
    reduction,
    refuse_maximum,
    transposed_convolution,
    upsample,
)
from parallel.trace.patched_kernels import conv2d
from parallel.trace.tracer import HOOKS

ADVICE = "use layers of torch.nn and torch.nn.functional, which docs/design/streaming.md lists"
UNKNOWN = f"of a kind that boxes do not know: {ADVICE}"

MAKERS = ("new_empty", "new_zeros", "new_ones", "new_full")
"""Methods that take no more of a map than its type and device."""

ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Threshold,
)  # fmt: skip
FUNCTIONS = (
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    F.sigmoid, F.tanh, F.softplus, torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.log, torch.abs, torch.sqrt,
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.neg, torch.clamp, torch.maximum, torch.minimum,
    torch.square, torch.rsqrt, torch.addcmul,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.iadd,
    operator.imul, operator.isub, operator.itruediv, F.relu_, F.leaky_relu_, F.elu_,
)  # fmt: skip
METHODS = (
    "add", "sub", "mul", "div", "neg", "pow", "sqrt", "exp", "log", "abs", "relu", "sigmoid", "tanh", "clamp", "square",
    "add_", "mul_", "sub_", "div_", "relu_", "float", "to", "type_as", "contiguous", "clone", "sigmoid_", "clamp_",
    "expand_as",
)  # fmt: skip

Row = tuple[Callable[[Layer], Operation], str, tuple[Any, ...]]
"""(read, arguments of a call in order, layers, functions and names of methods)."""
_BATCH_NORM = "input running_mean running_var weight bias"

ROWS: tuple[Row, ...] = (
    (activation, "", ACTIVATIONS),
    (pointwise, "", (*FUNCTIONS, *METHODS)),
    (over_last, "", (nn.Linear, F.linear)),
    (over_last, "input normalized_shape", (nn.LayerNorm, F.layer_norm)),
    (along, "input dim", (nn.Softmax, torch.softmax, F.softmax, "softmax")),
    (partial(along, shares=True, default=0), "input size dim", (torch.chunk, "chunk", torch.split, "split")),
    (joined, "tensors dim", (torch.cat, torch.concat)),
    (stacked, "tensors dim", (torch.stack,)),
    (permuted, "input dims", (torch.permute, "permute")),
    (transposed, "input dim0 dim1", (torch.transpose, "transpose")),
    (viewed, "", ("view", "reshape", torch.reshape, torch.flatten, "flatten")),
    (indexed, "", (operator.getitem,)),
    (identity, "", (nn.Identity,)),
    (dropout, "input p training", (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, F.dropout)),
    (dropped_channels, "", (nn.Dropout2d,)),
    (dropped_paths, "input p mode training", ("stochastic_depth",)),
    (batch_norm, f"{_BATCH_NORM} training momentum eps", (_BatchNorm, F.batch_norm)),
    (instance_norm, f"{_BATCH_NORM} use_input_stats momentum eps", (nn.InstanceNorm2d, F.instance_norm)),
    (group_norm, "input num_groups weight bias eps", (nn.GroupNorm, F.group_norm)),
    (partial(reduction, kind="mean"), "input dim keepdim", (torch.mean, "mean")),
    (partial(reduction, kind="sum"), "input dim keepdim", (torch.sum, "sum")),
    (partial(reduction, kind="max"), "input dim keepdim", (torch.amax, torch.amin, "amax", "amin")),
    (partial(reduction, kind="var"), "input dim unbiased keepdim", (torch.var, "var")),
    (partial(reduction, kind="std"), "input dim unbiased keepdim", (torch.std, "std")),
    (partial(reduction, kind="norm"), "input p dim keepdim", (torch.norm, torch.linalg.vector_norm, "norm")),
)
"""Layers whose maps may have rows and columns as any dims."""

NCHW_ROWS: tuple[Row, ...] = (
    (convolution, "input weight bias stride padding dilation groups", (nn.Conv2d, torch.conv2d, conv2d)),
    (
        transposed_convolution,
        "input weight bias stride padding output_padding groups dilation",
        (nn.ConvTranspose2d, F.conv_transpose2d),
    ),
    (
        max_pool,
        "input kernel_size stride padding dilation ceil_mode return_indices",
        (nn.MaxPool2d, F.max_pool2d, torch.max_pool2d),
    ),
    (
        average_pool,
        "input kernel_size stride padding ceil_mode count_include_pad divisor_override",
        (nn.AvgPool2d, F.avg_pool2d),
    ),
    (adaptive_pool, "input output_size", (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)),
    (refuse_maximum, "", (nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d)),
    (
        upsample,
        "input size scale_factor mode align_corners recompute_scale_factor antialias",
        (nn.Upsample, F.interpolate),
    ),
    (pad, "input pad mode value", (nn.ConstantPad2d, F.pad)),
    (partial(pad, mode="reflect"), "", (nn.ReflectionPad2d,)),
    (partial(pad, mode="replicate"), "", (nn.ReplicationPad2d,)),
    (pixel_shuffle, "input upscale_factor", (nn.PixelShuffle, F.pixel_shuffle)),
    (pixel_unshuffle, "input downscale_factor", (nn.PixelUnshuffle, F.pixel_unshuffle)),
)
"""Layers that take rows and columns as the last two of four dims."""

KINDS = {
    kind: (read, tuple(names.split()), nchw)
    for nchw, rows in ((False, ROWS), (True, NCHW_ROWS))
    for read, names, kinds in rows
    for kind in kinds
}


def read_node(reading: Reading, node: fx.Node) -> Operation:
    """Return how a node that takes maps is computed.

    Raises:
        NotTileable: not box by box.
    """
    for changed in changed_and_used_later(reading, node):
        raise NotTileable(f"changes {changed.name} in place, which is used again by that name")
    module = module_of(reading.model, node)
    key: Any = getattr(node.target, "__original_fn", node.target)  # of what patched_kernels.py replaces
    if module is not None:
        _refuse_run_by_box(module)
        key = next((kind for kind in type(module).__mro__ if kind in KINDS), None)
        if key is None:
            raise NotTileable(f"is a {type(module).__name__}, {UNKNOWN}")
        _refuse_other_forward(type(module), key)
    elif getattr(key, "__name__", "") == "stochastic_depth":  # torchvision's, which is not needed here
        key = "stochastic_depth"
    if key in KINDS:
        read, names, nchw = KINDS[key]
        layer = Layer(reading, node, names)
        if nchw:
            layer.refuse_turned()
        return read(layer)
    maps = reading.maps(node)
    if node.op == "call_function" and len(maps) == 1 and (value := reading.of(node)) is reading.of(maps[0]):
        counted = not value.is_inference()  # tensors of inference mode have no version
        version = value._version if counted else 0
        Arguments(reading.model, node, {}, reading.of).run()
        # In place as by DropBlock, no name tells; a name that does may belong to a function that is off.
        if value._version == version if counted else not changes_in_place(reading.model, node):
            return identity(Layer(reading, node))  # it looked at the whole image's size, and passes it on
    raise NotTileable(UNKNOWN)


def _refuse_run_by_box(module: nn.Module) -> None:
    """Refuse hooks, a forward of the instance, and parameters that count how often they are asked for, as those of a
    spectral norm."""
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise NotTileable("has hooks, which would run for each box: remove them")
    if {"forward", "_conv_forward"} & vars(module).keys():
        raise NotTileable("has a forward of its own on the instance: put it in a class")
    kinds = getattr(module, "parametrizations", {})
    if any(True for name in kinds for _ in kinds[name].buffers()):
        raise NotTileable("has a parameter that changes each time it is computed: take the parametrization away")


def _refuse_other_forward(kind: type[nn.Module], known: type[nn.Module]) -> None:
    """Refuse a layer that is derived from a known one and computes something else."""
    for name in ("forward", "_conv_forward"):
        if getattr(kind, name, None) is not getattr(known, name, None) and known is not _BatchNorm:
            raise NotTileable(f"is a {kind.__name__}, which computes other than {known.__name__}: {ADVICE}")


def changes_in_place(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a node writes into its first argument."""
    if not node.all_input_nodes:
        return False
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.target in IN_PLACE or node.target is operator.setitem or node.kwargs.get("inplace"):
        return True
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") and not name.endswith("__") and getattr(node.target, "__module__", "") != "_operator"


def changed_and_used_later(reading: Reading, node: fx.Node) -> list[fx.Node]:
    """Return the maps that ``node`` changes in place and that later nodes use: they share memory."""
    if not changes_in_place(reading.model, node) or (root := node.all_input_nodes[0]).name not in reading.dims:
        return []
    while root.name in reading.aliases:
        root = reading.aliases[root.name]
    changed, looked_at = [], [root]
    while looked_at:  # a map lies in the memory of one that it is made of, so that its owner's users lead to it
        other = looked_at.pop()
        if other < node and other.name in reading.dims and any(node < user for user in other.users):
            changed.append(other)
        looked_at += [user for user in other.users if reading.aliases.get(user.name) is other]
    return changed


def updates_statistics(reading: Reading, node: fx.Node) -> bool:
    """Return whether a node updates running statistics of a batch norm."""
    module = module_of(reading.model, node)
    if module is not None:
        norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        return any(norm.training and norm.track_running_stats for norm in norms)
    layer = Layer(reading, node, (*_BATCH_NORM.split(), "training"))
    return node.target is F.batch_norm and layer.get("training", False) and layer.get("running_mean") is not None


def refuse_updated(node: fx.Node, updated: Collection[str]) -> None:
    """Refuse buffers that forward passes update, but for statistics of batch norm: boxes run several times."""
    if node.target is F.batch_norm:
        return
    targets = [str(node.target)] if node.op == "call_module" else []
    for path in (*targets, *(str(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr")):
        if name := next((name for name in updated if f"{name}.".startswith(f"{path}.")), None):
            raise NotTileable(
                f"uses {name}, which each forward pass of training updates, and boxes would do so several times"
            )


def takes_type_alone(node: fx.Node, maps: Sequence[fx.Node]) -> bool:
    """Return whether a node takes no more of the maps than their type and device."""
    if node.op != "call_method":
        return False
    return node.target in MAKERS or (node.target in ("to", "type_as") and node.args[0] not in maps)
