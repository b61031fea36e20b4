"""Model files that differ in what their layers pass on: containers, views, tensors without gradients, and more."""

from __future__ import annotations

HEAD = """
import torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

GENERATOR = torch.Generator().manual_seed(0)

def rows(*shape):
    return torch.randn(*shape, generator=GENERATOR)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)

def loss(output, target):
    return ((output - target) ** 2).mean()

def batches(n):
    while True:
        yield rows(n, 4), rows(n, 4)

class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)
"""

# Four layers each, written as a model that is traced.
TRACED = {
    "an integer tensor that is made first and read third": """
class model(Four):
    def forward(self, x):
        x = self.a(x)
        index = x.argsort(1)
        x = self.c(torch.tanh(self.b(x))).gather(1, index)
        return self.d(x)
""",
    "booleans and tensors without gradient": """
class model(Four):
    def forward(self, x):
        y = self.a(x)
        mask, scale = y > 0, y.detach().abs()
        y = torch.where(mask, self.b(y), y)
        y = self.c(y) * scale
        return self.d(torch.where(mask, y, -y))
""",
    "no_grad blocks": """
class model(Four):
    def forward(self, x):
        with torch.no_grad():
            scale = self.a(x).abs()
        y = torch.tanh(self.b(x) + self.a(x))
        return self.d(self.c(y) * scale) + scale
""",
    "skips over all stages": """
class model(Four):
    def forward(self, x):
        first = self.a(x)
        second = torch.tanh(self.b(first))
        third = torch.tanh(self.c(second))
        return self.d(third) + first * second + x
""",
    "in place before and after a cut": """
class model(Four):
    def forward(self, x):
        x = self.a(x)
        x.relu_()
        x = self.b(x)
        x += 1.0
        x = self.c(x * 1.0)
        x[:, 0] = 0
        y = self.d(x)
        y[:, 1:].mul_(2.0)
        return y
""",
    "in place on a skip that is read later": """
class model(Four):
    def forward(self, x):
        skip = self.a(x)
        y = self.b(skip.exp())
        skip.add_(1.0)
        y = self.c(y)
        skip[:, 0] = 0
        return self.d(y) + skip
""",
    "in place on a view of a skip": """
class model(Four):
    def forward(self, x):
        x = self.a(x)
        skip = self.b(x) * 1.0
        y = self.c(x)
        skip.t()[0].add_(y[:, 0])
        return self.d(y) * skip
""",
    "outputs that nobody reads": """
class Split(Layer):
    def forward(self, x):
        x = self.mix(x)
        return x, x.max(1), {"spare": x * 2.0, "none": None}
class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Split() for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x, (values, _), more = layer(x)
        return x + values.unsqueeze(1)
""",
    "nested structures with None and constants": """
class Nested(Layer):
    def forward(self, value, mask=None, scale=1.0):
        x, (y, more) = value
        z = torch.tanh(self.mix(x)) * scale
        return z, (x + y, {"count": more["count"] + 1, "none": None})
class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Nested() for _ in range(4))
    def forward(self, x, mask=None, flags=None, scale=1.0):
        value = x, (x * 2.0, {"count": torch.arange(4), "none": None})
        for layer in self.layers:
            value = layer(value, mask, scale)
        return {"x": value[0], "rest": [value[1], None, 3], "again": value[0]}
def loss(output, target):
    (y, more), none, three = output["rest"]
    assert none is None and three == 3 and more["none"] is None
    assert output["again"] is output["x"]
    return ((output["x"] + y * more["count"] - target) ** 2).mean()
def batches(n):
    while True:
        yield {"x": rows(n, 4), "mask": None, "flags": (None, True), "scale": 2.0}, rows(n, 4)
""",
    "a dataclass for output, and None between the inputs": """
@dataclass
class Output:
    logits: torch.Tensor
    cache: object = None
    name: str = "output"
pytree.register_dataclass(Output)
class model(Four):
    def forward(self, x, mask, y):
        x = torch.tanh(self.b(self.a(x)))
        return Output(self.d(self.c(x) + y), cache=(x, None))
def loss(output, target):
    assert output.name == "output"
    return ((output.logits * output.cache[0] - target) ** 2).mean()
def batches(n):
    while True:
        yield (rows(n, 4), None, rows(n, 4)), rows(n, 4)
""",
    "a layer that returns its input": """
class Same(Layer):
    def forward(self, x):
        return x
class Change(Layer):
    def forward(self, x):
        return torch.tanh(self.mix(x))
class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Change(), Same(), Change(), Change(), Change(), Same()])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
""",
    "views at the cut": """
class model(Four):
    def forward(self, x):
        x = self.a(x).t()
        x = self.b(x.t())[:, ::2]
        x = self.c(torch.cat([x, x], 1)).unsqueeze(1).expand(-1, 3, -1)
        return self.d(x).select(1, 2) + x[:, 0]
""",
    "a tensor that the loss does not need": """
class model(Four):
    def forward(self, x):
        y = self.a(x)
        spare = self.b(x)
        z = self.c(y) + 0.0
        return self.d(z), spare
def loss(output, target):
    return ((output[0] - target) ** 2).mean()
""",
    "a tensor whose gradient is None": """
class model(Four):
    def forward(self, x):
        y = self.a(x)
        side = self.b(y)
        z = self.c(y)
        return self.d(z) * (side > 0)
""",
}

FUNCTIONS = """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, name=None):
        ctx.factor, ctx.name = factor, name
        return x * factor
    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor * 10, None, None

class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, weight):
        ctx.save_for_backward(x, y, weight)
        order = x.argsort(1)
        scale = y.abs()
        ctx.mark_non_differentiable(order, scale)
        return x * y, order, scale, x + y @ weight
    @staticmethod
    def backward(ctx, product, order, scale, total):
        x, y, weight = ctx.saved_tensors
        assert ctx.needs_input_grad[0] and ctx.needs_input_grad[2]
        return (
            product * y + 3.0 * total,
            product * x + total @ weight.t() if ctx.needs_input_grad[1] else None,
            y.t() @ total,
        )

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0)
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5.0

class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x, options, power=2):
        return x ** power, None
    @staticmethod
    def setup_context(ctx, inputs, output):
        x, options, power = inputs
        ctx.save_for_backward(x)
        ctx.options = options
    @staticmethod
    def backward(ctx, gradient, _):
        x, = ctx.saved_tensors
        return gradient * x * ctx.options["scale"], None, None
"""

CUSTOM = {
    "a custom function with other arguments, at cuts": """
class model(Four):
    def forward(self, x):
        x = Scaled.apply(self.a(x), 2.0)
        x = Scaled.apply(self.b(x), 1, "name")
        return self.d(Scaled.apply(self.c(x), 0.5, None))
""",
    "a custom function within layers that are alike": """
class Inside(Layer):
    def forward(self, x):
        return torch.tanh(Scaled.apply(self.mix(x), 0.1))
class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Inside() for _ in range(5))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
""",
    "a custom function with several outputs": """
class model(Four):
    def forward(self, x):
        y = self.a(x)
        product, order, scale, total = Both.apply(y, x, self.b.weight)
        y = self.b(product) + self.c(total).gather(1, order)
        return self.d(y) * scale
""",
    "a custom function that writes in place": """
class model(Four):
    def forward(self, x):
        x = Doubled.apply(self.a(x))
        y = self.b(x)
        Doubled.apply(y)
        return self.d(torch.tanh(self.c(y))) + y
""",
    "a custom function that writes into a skip of which a part is read later": """
class model(Four):
    def forward(self, x):
        x = self.b(torch.tanh(self.a(x)))
        y = self.c(x.exp())
        part = x[:, :1]
        Doubled.apply(x)
        return self.d(y) + part
""",
    "a custom function with a context set up apart": """
class model(Four):
    def forward(self, x):
        x, none = Setup.apply(self.a(x), {"scale": 7.0})
        assert none is None
        x, _ = Setup.apply(self.b(x), {"scale": 7.0}, 3)
        return self.d(torch.tanh(self.c(x)))
""",
    "a custom function without gradients": """
class model(Four):
    def forward(self, x):
        with torch.no_grad():
            scale = Scaled.apply(self.a(x), 2.0)
        x = self.c(self.b(x)) * scale
        return self.d(Scaled.apply(x.detach(), 2.0)) + x
""",
    "reentrant checkpoints of the author's": """
from torch.utils.checkpoint import checkpoint
class model(Four):
    def forward(self, x):
        x = checkpoint(self.b, self.a(x), use_reentrant=True)
        x = checkpoint(lambda x: torch.tanh(self.c(x)), x, use_reentrant=True)
        return self.d(checkpoint(torch.sin, x, use_reentrant=False))
""",
}

CHILDREN = {
    "structures and constants between children": """
class Pack(Layer):
    def forward(self, x):
        x = self.mix(x)
        return {"x": x, "mask": None, "index": x.argsort(1), "on": (x > 0, 2, "name"), "twice": [x, x.detach()]}
class Through(Layer):
    def forward(self, value):
        return {**value, "x": torch.tanh(self.mix(value["x"]))}
class Unpack(Layer):
    def forward(self, value):
        assert value["mask"] is None and value["on"][2] == "name"
        x = value["x"].gather(1, value["index"]) * value["on"][1]
        return self.mix(torch.where(value["on"][0], x, value["twice"][0]) + value["twice"][1])
def model():
    return nn.Sequential(Pack(), Through(), Through(), Unpack())
""",
    "children that write in place, and those that return their input": """
class Halve(nn.Module):
    def forward(self, x):
        x[:, 0] = 0
        return x
def model():
    layers = nn.Linear(4, 4), nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True)
    return nn.Sequential(*layers, nn.Linear(4, 4), Halve(), nn.Linear(4, 4), nn.Tanh())
""",
    "custom functions in children": """
class Inside(Layer):
    def forward(self, x):
        return torch.tanh(Scaled.apply(self.mix(x), 0.1))
class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
    def forward(self, x):
        return Both.apply(x, x.detach(), self.weight)
class Join(nn.Module):
    def forward(self, value):
        product, order, scale, total = value
        return Doubled.apply(product.gather(1, order) * scale + total)
def model():
    return nn.Sequential(Inside(), Split(), Join(), Inside())
""",
    "views, expanded tensors and one that the loss does not need": """
class View(Layer):
    def forward(self, x):
        x = self.mix(x)
        return x.t(), x[:, :1].expand(-1, 4), self.mix(x)
class Join(Layer):
    def forward(self, value):
        x, y, spare = value
        return self.mix(x.t() * y), spare
class First(Layer):
    def forward(self, value):
        return self.mix(value[0])
def model():
    return nn.Sequential(nn.Linear(4, 4), View(), Join(), First())
""",
}

ALL = {**TRACED, **CUSTOM, **CHILDREN}
