"""Layers that treat each sample alone, so that members of a team may each compute their own samples of a microbatch.

A batch norm does not, and has its sums over all members here; neither does dropout, whose numbers are drawn for all
samples. Any other layer that is not known is reported to the caller.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from parallel.schedule.shares import even_parts
from parallel.streaming.moments import HALVES, merged, moments, next_share, normalised_part, update_running
from parallel.streaming.operation import module_of
from parallel.team.team_comm import ForwardContext, TeamComm
from parallel.trace.patched_kernels import with_plain_stride
from parallel.trace.stage_module import layout_of

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUT_FUNCTIONS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
FILES = (
    *("activation", "channelshuffle", "conv", "dropout", "flatten", "instancenorm", "linear", "normalization"),
    *("padding", "pixelshuffle", "pooling", "upsampling"),
)
MODULES = {f"torch.nn.modules.{file}" for file in FILES}
"""Modules of torch.nn whose classes treat each sample alone, but for those that ``_module_fault`` names."""
ARITHMETIC = {
    *(operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul, operator.truediv),
    *(operator.floordiv, operator.mod),
}
FORMS = ("shape", "dtype", "device", "ndim")
"""Attributes of a tensor that nodes may take."""
LIBRARIES = ("torch", "_operator", "builtins", "parallel.trace.patched_kernels")
"""Where functions are from whose names are known."""
POINTWISE = {
    *("relu", "relu_", "relu6", "gelu", "silu", "mish", "sigmoid", "tanh", "elu", "leaky_relu", "hardtanh"),
    *("hardswish", "hardsigmoid", "softplus", "add", "sub", "mul", "div", "neg", "exp", "sqrt", "rsqrt", "pow"),
    *("clamp", "abs", "square", "to", "float", "contiguous", "type_as", "clone", "detach"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "layer_norm", "group_norm", "pad", "interpolate"),
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "pixel_shuffle"),
}
"""Names of functions and methods that treat each sample alone whatever they are given."""
ALONG = {"cat": 0, "concat": 0, "softmax": None, "log_softmax": None, "mean": None, "sum": None, "amax": None}
"""Functions and methods that do unless they work along the samples -> dim that they take where none is given."""


def samplewise_fault(model: nn.Module, node: fx.Node) -> str | None:
    """Return why a node cannot be computed by members that each have some samples; None where it can."""
    if node.op in ("placeholder", "output", "get_attr") or _is_constant(node):
        return None
    module = module_of(model, node)
    fault = _function_fault(node) if module is None else _module_fault(module)
    return fault and f"{node.name} {fault}"


def _module_fault(module: nn.Module) -> str | None:
    kind = type(module)
    if isinstance(module, _BatchNorm):
        if kind in NORMS or (kind.forward is _BatchNorm.forward and not module.training):
            return None
        return f"is a {kind.__name__}, whose sums over all samples are not known"
    if kind.__name__.startswith("Lazy") or kind.__module__ not in MODULES:
        return None if kind is nn.Identity else f"is a {kind.__name__}, not known to treat each sample alone"
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "keeps running statistics of each sample"
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return "is attention with batch_first=False"
    if isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmin) and module.dim in (None, 0):
        return "is a softmax over samples"
    if isinstance(module, nn.Flatten) and module.start_dim == 0:
        return "flattens samples"
    if isinstance(module, _DropoutNd) and kind not in DROPOUTS:
        return f"is a {kind.__name__}, whose numbers are not known to be factors"
    return None


def _function_fault(node: fx.Node) -> str | None:
    target = node.target
    name = str(getattr(target, "__name__", target))
    unknown = f"calls {name}, not known to treat each sample alone"
    if isinstance(target, type) and issubclass(target, tuple):  # of outputs, such as GoogLeNet's with its early heads
        return None
    if callable(target) and not str(getattr(target, "__module__", None) or "torch").startswith(LIBRARIES):
        return unknown
    if target in ARITHMETIC:
        counts = any(map(_is_count, node.all_input_nodes))
        return f"computes {name} of the number of samples, of which each rank has its own" if counts else None
    if target in DROPOUT_FUNCTIONS or name in POINTWISE or _is_shape(node):
        return None
    if target is operator.getitem:
        source, place = node.args[0], node.args[1]
        first = place[0] if isinstance(place, tuple) else place
        return None if _is_shape(source) or (isinstance(first, slice) and first == slice(None)) else unknown
    if name in ALONG:
        given = _argument(node, "dim", ALONG[name])
        dims = given if isinstance(given, tuple | list) else (given,)
        behind = all(isinstance(dim, int) and dim > 0 for dim in dims) or set(dims) in ({-1}, {-1, -2})
        return None if dims and behind else unknown
    if name == "flatten":
        return None if _argument(node, "start_dim", 0) > 0 else unknown
    if name in ("view", "reshape"):
        shape = _shape(node)
        return None if shape and _is_count(shape[0]) else unknown
    if name in ("unsqueeze", "squeeze"):
        return None if _argument(node, "dim", 0) > 0 else unknown
    if name == "permute":
        return None if list(_numbers(node, "dims")[:1]) == [0] else unknown
    return unknown


def _is_constant(node: fx.Node) -> bool:
    """Return whether a node computes with parameters and constants alone."""
    if node.op in ("get_attr", "placeholder", "output") or not node.all_input_nodes:
        return node.op == "get_attr"
    return all(map(_is_constant, node.all_input_nodes))


def _is_shape(node: Any) -> bool:
    """Return whether a node gives the shape of a tensor, or a number that tells it."""
    if not isinstance(node, fx.Node):
        return False
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] in FORMS)


def _is_count(node: Any) -> bool:
    """Return whether a node gives the number of samples of a tensor."""
    if not isinstance(node, fx.Node):
        return False
    if node.target == "size":
        return node.args[1:] == (0,)
    return node.target is operator.getitem and _is_shape(node.args[0]) and bool(node.args[1] == 0)


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    """Return the argument behind the tensor."""
    return node.kwargs.get(name, node.args[1] if len(node.args) > 1 else default)


def _shape(node: fx.Node) -> Any:
    """Return the shape that a ``view`` or ``reshape`` is given."""
    return _numbers(node, "size" if node.target == "view" else "shape")


def inferred_shape(node: fx.Node) -> Any:
    """Return the shape that a node gives its samples, if torch is to find the number in place of a -1; else ()."""
    if getattr(node.target, "__name__", node.target) not in ("view", "reshape"):
        return ()
    shape = _shape(node)
    return shape if -1 in shape and _is_count(shape[0]) else ()


def reshaped(own: Tensor, shape: Sequence[Any], known: Mapping[str, Any]) -> Tensor:
    """Return a tensor of no samples in ``shape``, in which torch cannot find the number in place of a -1."""
    sizes = [known[size.name] if isinstance(size, fx.Node) else size for size in shape]
    found = math.prod(own.shape[1:]) // math.prod(size for size in sizes[1:] if size != -1)
    return own.reshape([found if size == -1 else size for size in sizes])


def _numbers(node: fx.Node, name: str) -> Any:
    """Return the numbers that a call is given one by one, or as one argument."""
    first = _argument(node, name, ())
    return first if isinstance(first, tuple | list) else node.args[1:]


@dataclass
class SampleContext(ForwardContext):
    """Forward pass of a microbatch of which each member has some samples.

    Attributes:
        samples: of the microbatch.
    """

    samples: int = 0

    @property
    def rows(self) -> tuple[range, ...]:
        """Return the samples of each member."""
        return even_parts(self.samples, self.comm.members)


def normalise(comm: TeamComm, module: _BatchNorm, own: Tensor, context: SampleContext) -> Tensor:
    """Return this member's samples (n, c, ...), normalised by the statistics of all members' samples.

    Raises:
        ValueError: there is one value per channel in all.
    """
    rows, size = context.rows, torch.Size((context.samples, *own.shape[1:]))
    count = context.samples * math.prod(size[2:])
    if count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")  # as torch
    x = own.float() if own.dtype in HALVES else own
    x = x if x.dim() == 4 else x.reshape(*x.shape[:2], math.prod(x.shape[2:]), 1)
    with torch.no_grad():
        mine = moments(x, (0, 2, 3)) if len(x) else x.new_zeros((3, 1, x.shape[1], 1, 1), dtype=torch.float64)
        gathered = comm.all_gather(mine)
        of_all = merged([each for each, some in zip(gathered, rows, strict=True) if some])
        if module.running_mean is not None and module.running_var is not None:
            update_running(of_all, module.running_mean, module.running_var, next_share(module), count)
    y = normalised_part(x, of_all, (module.weight, module.bias), count, module.eps, comm.all_reduce_async)
    if len(x) == 1 and y.requires_grad:
        y.register_hook(with_plain_stride)  # type: ignore[no-untyped-call]
    return y.reshape(own.shape).to(own.dtype)


def dropped(node: fx.Node, module: nn.Module | None, own: Tensor, context: SampleContext) -> Tensor:
    """Return this member's samples after dropout: numbers are drawn for all samples, as the plain model would."""
    rows = context.rows[context.comm.member]
    ones = torch.empty(
        (context.samples, *own.shape[1:]), dtype=own.dtype, device=own.device, memory_format=layout_of(own)
    ).fill_(1)

    def draw() -> Any:
        if module is not None:
            return module(ones)
        assert callable(node.target)
        return node.target(ones, *node.args[1:], **node.kwargs)

    factors: Tensor = context.run_with_rng(draw)
    return own * factors[rows.start : rows.stop]
