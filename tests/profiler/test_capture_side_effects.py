"""Forwards with side effects on state, or with other outputs than tensors."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from gplan.core.errors import ModelError
from gplan_profiler.capture.capture import capture
from gplan_profiler.torch_compat import FakeTensorMode
from tests.profiler.models import Around

ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))


class Changing(nn.Module):
    """Calls a function with its linear layer before using it."""

    def __init__(self, change: Callable[[Changing], object]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("unread", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return self.linear(x) + self.mean


def decay_without_gradient(module: Changing) -> None:
    with torch.no_grad():
        module.linear.weight.mul_(0.9)


def decay_data(module: Changing) -> None:
    module.linear.weight.data.mul_(0.9)


def decay_detached(module: Changing) -> None:
    module.linear.weight.detach().mul_(0.9)


def swap_data(module: Changing) -> None:
    module.linear.weight.data = module.linear.weight.data * 0.9


def swap_parameter(module: Changing) -> None:
    module.linear.weight = nn.Parameter(module.linear.weight * 0.9)


@pytest.mark.parametrize(
    "change", [decay_without_gradient, decay_data, decay_detached, swap_data, swap_parameter], ids=lambda x: x.__name__
)
def test_forward_that_writes_a_parameter_is_named(change: Callable[[Changing], object]) -> None:
    model = Around(Changing(change))
    before = {name: (x, x.detach().clone()) for name, x in model.named_parameters()}
    with pytest.raises(ModelError, match=r"layer inner.* writes into the parameter inner\.linear\.weight"):
        capture(model, ROWS)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_use_of_parameter_data_suggests_detach() -> None:
    with pytest.raises(ModelError, match=r"reads `.data` of the parameter inner\.linear\.weight.*\.detach\(\)"):
        capture(Around(Changing(lambda module: module.linear.weight.data.norm())), ROWS)


def test_reassigned_buffer_is_rejected() -> None:
    def assign(module: Changing) -> None:
        module.mean = module.mean * 0.9

    with pytest.raises(ModelError, match=r"layer inner assigns a new tensor to the buffer inner\.mean.*copy_"):
        capture(Around(Changing(assign)), ROWS)


def test_buffer_written_through_view() -> None:
    def write(module: Changing) -> None:
        module.unread[1:].add_(1.0)

    model = Around(Changing(write))
    capture(model, ROWS).stage(0, 3)(ROWS)
    assert model.inner.unread.tolist() == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("output", "named"), [(3, "int \\(3\\)"), ("a", "str"), (None, "NoneType"), ((), "nothing")])
def test_output_without_tensor_is_named(output: object, named: str) -> None:
    class Returns(Around):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return output

    with pytest.raises(ModelError, match=f"Returns returns {named}.*; expected at least one tensor"):
        capture(Returns(nn.Linear(4, 4)), ROWS)


def test_objects_in_the_output_are_left_out() -> None:
    @dataclass
    class Made:
        x: Tensor
        names: dict[str, object]

    class Named(dict[str, object]):
        pass

    class Returns(Around):
        def forward(self, x: Tensor) -> Any:
            made = super().forward(x)
            return Made(made, Named(cache=ModelError(), double=2 * made))

    model = Returns(nn.Linear(4, 4))
    chain = capture(model, ROWS)
    output = chain.model_output(chain.stage(0, 3)(ROWS))
    assert type(output) is Made and type(output.names) is Named and output.names["cache"] is None
    assert torch.equal(output.x, model(ROWS).x) and torch.equal(output.names["double"], 2 * output.x)  # type: ignore[arg-type]
    assert chain.notes == (
        "objects of class gplan.core.errors.ModelError in the model's output are left out: a stage returns only tensors "
        "whose size is known",
    )


def test_output_of_objects_alone_is_named() -> None:
    class Returns(Around):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return ModelError()

    with pytest.raises(
        ModelError,
        match="returns objects of class gplan.core.errors.ModelError; expected at least one tensor whose size",
    ):
        capture(Returns(nn.Linear(4, 4)), ROWS)


def test_an_output_whose_size_depends_on_data_is_named() -> None:
    class Returns(Around):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            return made[made.sum(1) > 0]

    with pytest.raises(
        ModelError, match="returns tensors whose size depends on data; expected at least one tensor whose"
    ):
        capture(Returns(nn.Linear(4, 4)), ROWS)


def test_constants_in_the_output() -> None:
    class Returns(Around):
        def forward(self, x: Tensor) -> Any:
            return {"x": super().forward(x), "rows": x.shape[0], "cache": None, "name": "a"}

    model = Returns(nn.Linear(4, 4))
    chain = capture(model, ROWS)
    output = chain.model_output(chain.stage(0, 3)(ROWS))
    assert torch.equal(output.pop("x"), model(ROWS)["x"])
    assert output == {"rows": 4, "cache": None, "name": "a"}


def test_capture_restores_attributes() -> None:
    class Remembers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = super().forward(x)
            return self.seen

    model = Around(Remembers(4, 4))
    capture(model, ROWS)
    assert not hasattr(model.inner, "seen")


num_calls = 0


class Scheduled(nn.Module):
    """Counts its calls, and does nothing with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        y: Tensor = self.linear(x)
        return y


class LateByAttribute(Scheduled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.step > 100 else 1)


class LateByGlobal(Scheduled):
    def forward(self, x: Tensor) -> Tensor:
        global num_calls
        num_calls = num_calls + 1
        return super().forward(x) * (2 if num_calls > 100 else 1)


class Alternating(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.is_odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.is_odd = not self.is_odd
        return super().forward(x) if self.is_odd else x


class LateByEntry(nn.Module):
    """Counts in an entry of a dict that is there from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), dict[str, int]()

    def forward(self, x: Tensor) -> Tensor:
        self.kept["calls"] = self.kept.get("calls", 0) + 1
        return self.linear(x) * (2 if self.kept["calls"] > 100 else 1)


class LateByClassDefault(nn.Module):
    """Counts from a number of its class, and reads the count in a property."""

    num_seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @property
    def factor(self) -> int:
        return 2 if self.num_seen > 100 else 1

    def forward(self, x: Tensor) -> Tensor:
        self.num_seen += 1
        return self.linear(x) * self.factor


class LateByGetattr(Scheduled):
    def forward(self, x: Tensor) -> Tensor:
        setattr(self, "late", getattr(self, "late", 0) + 1)  # noqa: B010 - as authors write it
        return super().forward(x) * (2 if getattr(self, "late") > 100 else 1)  # noqa: B009


class Meter:
    count = 0


class LateByObject(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        self.meter.count += 1
        return super().forward(x) * (2 if self.meter.count > 100 else 1)


class LateByOtherName(Scheduled):
    def run_model(self, x: Tensor) -> Tensor:
        return Scheduled.forward(self, x) * (2 if self.step > 100 else 1)

    forward = run_model


def undocumented(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def call(module: Any, x: Tensor) -> Tensor:
        return function(module, x)

    return call


class LateByDecorated(Scheduled):
    def run_model(self, x: Tensor) -> Tensor:
        return Scheduled.forward(self, x) * (2 if self.step > 100 else 1)

    forward = undocumented(run_model)


class LateByListed(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [LateByOtherName.run_model]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](self, x)  # type: ignore[arg-type]


class LateByOwnLog(Scheduled):
    is_late = False

    def info(self, now: int) -> None:
        self.is_late = now > 100

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.info(self.step)
        return made * 2 if self.is_late else made


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (LateByAttribute, "step"),
        (LateByGlobal, "num_calls"),
        (Alternating, "is_odd"),
        (LateByEntry, r"kept\['calls'\]"),
        (LateByClassDefault, "num_seen"),
        (LateByGetattr, "late"),
        (LateByObject, "meter.count"),
        (LateByOtherName, "step"),
        (LateByDecorated, "step"),
        (LateByListed, "step"),
        (LateByOwnLog, "step"),
    ],
)
def test_forward_whose_path_depends_on_its_calls_is_refused(kind: type[Scheduled], name: str) -> None:
    with pytest.raises(
        ModelError, match=rf"changes {name} at every call and reads it \(test_capture_side_effects.py, line"
    ):
        capture(kind(), ROWS)


def test_hook_whose_work_depends_on_its_calls_is_refused() -> None:
    class Schedule(Meter):
        def double_late(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            self.count += 1
            return output * (2 if self.count > 100 else 1)

    model = nn.Linear(4, 4)
    model.register_forward_hook(Schedule().double_late)
    with pytest.raises(
        ModelError, match=r"changes .*count at every call and reads it \(test_capture_side_effects.py, line"
    ):
        capture(Around(model), ROWS)


class Logging(Scheduled):
    """Counts for messages, and for a method that its forward does not call."""

    @torch.no_grad()
    def num_steps(self) -> int:
        return self.step

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if self.step % 100 == 0:
            print("step", self.step)
        elif self.training:
            logging.getLogger(__name__).debug("step %d", self.step)
        return made


class LoggingAndLate(Logging):
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if self.step > 100:
            print("step", self.step)
            made = made * 2
        return made


def test_forward_that_only_counts_is_captured() -> None:
    assert len(capture(Scheduled(), ROWS)) == 1
    assert len(capture(Logging(), ROWS)) == 1
    with pytest.raises(ModelError, match="changes step at every call and reads it"):
        capture(LoggingAndLate(), ROWS)


def test_counter_that_a_forward_does_not_advance_is_accepted() -> None:
    class Numbered(nn.Module):
        """Reads a name; another method, of a class that it can reach, draws the next number for one."""

        numbers = itertools.count()

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.name = nn.Linear(4, 4), self.new_name()

        def new_name(self) -> str:
            return f"layer {next(self.numbers)}"

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if self.name else self.linear(x) * len(self.new_name())

    assert len(capture(Numbered(), ROWS)) == 1


class Late(nn.Module):
    """Has a linear layer, which is doubled where a function returns True."""

    def __init__(self, is_late: Callable[[Late, Tensor], bool]) -> None:
        super().__init__()
        self.linear, self.is_late = nn.Linear(4, 4), is_late
        self.history: list[float] = []
        self.recent = deque[float](maxlen=500)
        self.turns, self.ones = itertools.cycle([False] * 50 + [True]), (x for x in [1] * 50)
        self.text, self.by_shape, self.table = "", dict[object, Tensor](), {"calls": 0, "limit": 100}
        self.last: object = None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if self.is_late(self, x) else 1)


def by_length(module: Late, x: Tensor) -> bool:
    module.history.append(x.shape[0])
    return len(module.history) > 100


def by_sum(module: Late, _x: Tensor) -> bool:
    module.history += [1.0]
    return sum(module.history) > 100


def by_deque(module: Late, _x: Tensor) -> bool:
    recent = module.recent
    recent.append(1.0)
    return len(recent) > 100


def by_keys(module: Late, x: Tensor) -> bool:
    module.by_shape[object()] = x.detach()
    return len(module.by_shape) > 100


def by_entry(module: Late, _x: Tensor) -> bool:
    module.table["calls"] += 1
    return any(x > 100 for x in module.table.values())


def by_iterator(module: Late, _x: Tensor) -> bool:
    return next(module.turns)


def by_generator(module: Late, _x: Tensor) -> bool:
    return next(module.ones, None) is None


def by_text(module: Late, _x: Tensor) -> bool:
    module.text = module.text + "x"
    return len(module.text) > 100


def by_computed_names(module: Late, x: Tensor) -> bool:
    name = f"count{x.dim()}"
    setattr(module, name, getattr(module, name, 0) + 1)
    return getattr(module, name) > 100  # type: ignore[no-any-return]


def by_attributes(module: Late, x: Tensor) -> bool:
    vars(module)[f"count{x.dim()}"] = vars(module).get(f"count{x.dim()}", 0) + 1
    return vars(module)["count2"] > 100  # type: ignore[no-any-return]


def by_default(module: Late, _x: Tensor, seen_rows: list[int] = []) -> bool:  # noqa: B006 - what is refused
    seen_rows.append(module.linear.in_features)
    return len(seen_rows) > 100


@pytest.mark.parametrize("around", [Around, lambda x: nn.Sequential(x, nn.Linear(4, 4))], ids=["traced", "sequence"])
@pytest.mark.parametrize(
    ("is_late", "name"),
    [
        (by_length, "history"),
        (by_sum, "history"),
        (by_deque, "recent"),
        (by_keys, "by_shape"),
        (by_entry, r"table\['calls'\]"),
        (by_iterator, "turns"),
        (by_generator, "ones"),
        (by_text, "text"),
        (by_computed_names, "count2"),
        (by_attributes, "count2"),
        (by_default, "seen_rows"),
    ],
)
def test_forward_that_reads_what_every_call_changes_is_refused(
    is_late: Callable[[Late, Tensor], bool], name: str, around: Callable[[nn.Module], nn.Module]
) -> None:
    with pytest.raises(
        ModelError, match=rf"changes .*\b{name} at every call and reads it \(test_capture_side_effects.py"
    ):
        capture(around(Late(is_late)), ROWS)


def log_lately(module: Late, x: Tensor) -> bool:
    """Keeps a window of numbers for the training script."""
    module.history.append(x.shape[0])
    if len(module.history) > 2:
        module.history.pop(0)
    setattr(module, f"count{len('ab')}", x.shape[0])
    module.table["calls"] += 1
    return module.table["limit"] < 100


def keep_last(module: Late, x: Tensor) -> bool:
    module.last = (x.detach(), x.shape[0], f"{x.shape}")
    return module.last is None


def cache_by_shape(module: Late, x: Tensor) -> bool:
    key = (*x.shape, x.dtype)
    if key not in module.by_shape:
        module.by_shape[key] = torch.arange(x.shape[0])
        module.text = f"{len(module.by_shape)} shapes"
    return len(module.by_shape[key]) == 0 or len(module.text) > 100


@pytest.mark.parametrize("around", [Around, lambda x: nn.Sequential(x, nn.Linear(4, 4))], ids=["traced", "sequence"])
@pytest.mark.parametrize("is_late", [log_lately, keep_last, cache_by_shape])
def test_forward_that_keeps_what_it_does_not_read_or_what_settles_is_captured(
    is_late: Callable[[Late, Tensor], bool], around: Callable[[nn.Module], nn.Module]
) -> None:
    model = around(Late(is_late))
    chain = capture(model, ROWS)
    assert torch.equal(chain.model_output(chain.stage(0, len(chain))(ROWS)), model(ROWS))


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda _, x: x.register_hook(halve), "registers a hook"),
        (lambda linear, _: linear.weight.register_hook(halve), "registers a hook"),
        (lambda _, x: register_multi_grad_hook((x,), lambda _: None), "registers a hook"),
        (lambda linear, _: linear.weight.register_post_accumulate_grad_hook(lambda _: None), "registers a hook"),
        (lambda linear, _: linear.weight.grad is None, "reads the gradient of a parameter"),
    ],
    ids=["of an activation", "of a weight", "of several tensors", "after accumulation", "gradient read"],
)
def test_forward_that_works_on_gradients_is_refused(work: Callable[[nn.Linear, Tensor], object], text: str) -> None:
    class Working(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            work(self, made)
            return made

    with pytest.raises(ModelError, match=rf"Around {text}.*test_capture_side_effects.py, line .*autograd\.Function"):
        capture(Around(Working(4, 4)), ROWS)


def test_capture_restores_tensors_that_are_no_buffers() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.calls = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    model = Around(Counting())
    chain = capture(model, ROWS)
    assert model.inner.calls == 0
    chain.stage(0, len(chain))(ROWS)
    assert model.inner.calls == 1


class Resizing(nn.Linear):
    """Resizes a tensor that two attributes have, and then fails."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.kept = self.same = torch.zeros(2)

    def forward(self, _x: Tensor) -> Tensor:
        self.kept.resize_(3).fill_(1.0)
        raise ValueError("no such row")


def test_failing_forward_that_resizes_an_attribute_is_named_and_restored() -> None:
    layer = Resizing()
    kept = layer.kept
    with pytest.raises(ModelError, match="no such row"):
        capture(nn.Sequential(layer, nn.Linear(4, 4)), ROWS)
    assert layer.kept is layer.same is kept and torch.equal(kept, torch.zeros(2))


def test_sparse_tensor_that_a_forward_changes_is_restored() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.calls = torch.eye(4).to_sparse()

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(self.calls)
            return super().forward(x)

    layer = Counting()
    capture(nn.Sequential(layer, nn.Linear(4, 4)), ROWS)
    assert torch.equal(layer.calls.to_dense(), torch.eye(4))


def on_meta() -> Tensor:
    return torch.empty(4, device="meta")


def of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def expanded() -> Tensor:
    return torch.ones(1).expand(4)


def sparse() -> Tensor:
    return torch.ones(4, 4).to_sparse()


def leaf() -> Tensor:
    return torch.ones(4, requires_grad=True)


def of_graph() -> Tensor:
    return leaf() * 2


def view_of_leaf() -> Tensor:
    return leaf()[1:]


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


@pytest.mark.parametrize(
    "make", [on_meta, of_inference, expanded, sparse, leaf, of_graph, view_of_leaf, fake], ids=lambda x: x.__name__
)
def test_attribute_of_any_kind_of_tensor_is_left_as_it_is(make: Callable[[], Tensor]) -> None:
    model = Around(nn.Linear(4, 4))
    model.inner.kept = kept = make()
    strides = () if kept.layout == torch.sparse_coo else kept.stride()
    assert len(capture(model, ROWS)) == 3
    assert model.inner.kept is kept
    assert strides == (() if kept.layout == torch.sparse_coo else kept.stride())


seen: dict[str, Tensor] = {}
masks: dict[int, Tensor] = {}


class Remembering(nn.Module):
    """Its output depends on what it remembers."""

    def __init__(self, remember: Callable[[Remembering, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.remember = nn.Linear(4, 4), remember
        self.register_buffer("mean", torch.zeros(4))
        self.latest: Tensor | None = None
        self.history: list[Tensor] = []
        self.numbers = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.remember(self, x.detach())


def by_attribute(module: Remembering, x: Tensor) -> Tensor:
    module.latest = x if module.latest is None else module.latest + x
    return module.latest


def by_list(module: Remembering, x: Tensor) -> Tensor:
    module.history.append(x)
    return torch.stack(module.history).mean(0)


def by_global(_module: Remembering, x: Tensor) -> Tensor:
    seen["x"] = seen.get("x", x) / 2 + x
    return seen["x"]


def by_own_generator(module: Remembering, x: Tensor) -> Tensor:
    return x * float(module.numbers.random())


@pytest.mark.parametrize(
    ("remember", "text"),
    [
        (by_attribute, r"keeps values from call to call \(its forward sets latest\)"),
        (by_list, r"changes history at every call and reads it \(test_capture_side_effects.py, line"),
        (by_global, "keeps values from call to call, or draws"),
        (by_own_generator, "a generator of its own"),
    ],
)
def test_forward_that_depends_on_its_calls_is_refused(
    remember: Callable[[Remembering, Tensor], Tensor], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        capture(Remembering(remember), ROWS)


def in_buffer(module: Remembering, x: Tensor) -> Tensor:
    mean = module.get_buffer("mean")
    mean.mul_(0.5).add_(x.mean(0))
    return mean


def cached(module: Remembering, x: Tensor) -> Tensor:
    if module.latest is None:
        module.latest = torch.ones(4)
    return module.latest


def cached_globally(_module: Remembering, x: Tensor) -> Tensor:
    if x.shape[1] not in masks:
        masks[x.shape[1]] = torch.ones(x.shape[1])
    return masks[x.shape[1]]


@pytest.mark.parametrize("remember", [in_buffer, cached, cached_globally])
def test_forward_with_a_buffer_or_a_cache_is_captured_twice(remember: Callable[[Remembering, Tensor], Tensor]) -> None:
    model = Remembering(remember)
    for training in (True, False):
        chain = capture(model, ROWS, training=training, traced="")  # as for a profile, which ran the model
        found = chain.model_output(chain.stage(0, len(chain))(ROWS))
        model.get_buffer("mean").zero_()
        assert torch.equal(found, model(ROWS))
        model.get_buffer("mean").zero_()
