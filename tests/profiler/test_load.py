"""Model files and the messages for mistakes in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gplan.core.errors import ModelError, UsageError
from gplan_profiler.capture.capture import capture
from gplan_profiler.model.data import find_loss_reduction
from gplan_profiler.model.load import model_in_memory, open_model_file
from gplan_profiler.model.model_reference import parse_input_shapes
from tests.model_files import load_model_file

GOOD = """
import torch
from torch import Tensor, nn

def model(width=4, depth: int = 1):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

def example_inputs(batch_size, width=4):
    return torch.randn(batch_size, width)

class Net(nn.Linear):
    def __init__(self, width=3):
        super().__init__(width, width)

ready = nn.Linear(2, 2)
corrections = [nn.Linear(2, 3), nn.Linear(3, 4)]
number = 7

def with_inputs():
    return nn.Linear(5, 5), torch.zeros(2, 5)

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(GOOD)
    return path


def test_settings_reach_every_function_that_takes_them(file: Path) -> None:
    loaded = load_model_file(str(file), settings={"width": 6, "depth": 3})
    assert len(list(loaded.model.children())) == 3
    assert loaded.example_inputs(2).shape == (2, 6)


def test_the_same_seed_gives_the_same_weights(file: Path) -> None:
    one, same, other = (load_model_file(str(file), seed=seed).model for seed in (1, 1, 2))
    weights = [next(model.parameters()) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(("name", "kind"), [("Net", nn.Linear), ("ready", nn.Linear), ("corrections", nn.Sequential)])
def test_a_class_a_module_and_a_list_of_modules_are_models(file: Path, name: str, kind: type) -> None:
    assert isinstance(load_model_file(f"{file}:{name}").model, kind)


def test_inputs_may_come_with_the_model_and_are_resized(file: Path) -> None:
    text = file.read_text().replace("def example_inputs", "def other_inputs")
    file.write_text(text)
    assert load_model_file(f"{file}:with_inputs").example_inputs(3).shape == (3, 5)


def test_a_module_on_the_python_path_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    assert isinstance(load_model_file("my_model:ready").model, nn.Linear)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (":nothing", "has no nothing; it has model, Net, ready: write .*my_model.py:model"),
        (":number", "is a int; expected an nn.Module"),
        (":broken", r"could not build its model: RuntimeError: no weights here \(.*my_model.py, line"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(file: Path, name: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        load_model_file(f"{file}{name}")


def test_a_setting_that_cannot_be_used_is_shown_with_its_default(file: Path) -> None:
    with pytest.raises(ModelError, match=r"could not build its model with --set depth=four \(default: \d\): TypeError"):
        load_model_file(str(file), settings={"depth": "four"})


def test_a_file_that_is_missing_or_no_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent.py is not there"):
        load_model_file(str(tmp_path / "absent.py"))
    (tmp_path / "weights.pt").write_text("")
    with pytest.raises(ModelError, match="not a Python file"):
        load_model_file(str(tmp_path / "weights.pt"))
    with pytest.raises(ModelError, match="no module or file is named no_such_package"):
        load_model_file("no_such_package:Net")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("def model(:\n  pass", "SyntaxError"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*bad.py, line 1\)"),
        ("x = 1", r"has no model; define a function model\(\)"),
        ("def modle():\n  pass", "has no model, but modle: rename it, or write .*bad.py:modle"),
        ("from torch import nn\nclass B(nn.Linear): pass\nclass MODEL(nn.Linear): pass", "but MODEL: rename it"),
        ("from torch.nn import Module as Models\ndef mo_del(): pass", "but mo_del: rename it"),
        ("from torch.nn import Linear as Model", "but Model: rename it"),
        (
            "from torch.nn import Linear as Modal\nclass MODEL(Modal): pass\nclass Models(Modal): pass",
            "has no model, but MODEL: rename it",
        ),
        (
            "from torch import nn\nfrom torch.nn import Module as MyModel\nclass Net(nn.Module):\n  pass",
            "has no model; it has Net",
        ),
    ],
)
def test_a_file_that_does_not_import_is_answered_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ModelError, match=told):
        load_model_file(str(path))


@pytest.mark.parametrize("line", ["import a_package", "from a_package import Net", "from a_package.nets import Net"])
def test_a_file_with_the_name_of_a_package_that_it_imports(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a_package.py"
    path.write_text(f"{line}\n\ndef model():\n    return a_package.Net()\n")
    try:
        with pytest.raises(
            ModelError, match=r"a_package\.py imports a_package, which is the file itself: give the file another"
        ):
            load_model_file(str(path))
    finally:
        sys.modules.pop("a_package", None)


def test_own_class_is_proposed_before_imported_ones(tmp_path: Path) -> None:
    path = tmp_path / "language.py"
    path.write_text("from torch.nn import RMSNorm, Module\nclass LM(Module): pass\n")
    with pytest.raises(ModelError, match=r"has no lm, but LM: rename it, or write .*language.py:LM"):
        load_model_file(f"{path}:lm")
    with pytest.raises(ModelError, match=r"has no rms; it has LM: write .*language.py:LM"):
        load_model_file(f"{path}:rms")


def test_unknown_setting_lists_known_settings(file: Path) -> None:
    with pytest.raises(UsageError, match="--set widht: no function in .* has this parameter; expected depth, width"):
        load_model_file(str(file), settings={"widht": 8})


def test_what_gplan_passes_is_no_setting_of_a_function_that_takes_any(tmp_path: Path) -> None:
    """It can be one of another function."""
    (tmp_path / "m.py").write_text(f"{GOOD}\ndef loss(depth, labels, **settings):\n    return settings\n")
    opened = open_model_file(str(tmp_path / "m.py"), settings={"depth": 2, "width": 6})
    assert opened.functions["loss"](1, 2) == {"width": 6}


def test_what_gplan_passes_is_no_setting(tmp_path: Path) -> None:
    """Whatever the author calls it."""
    (tmp_path / "m.py").write_text(f"{GOOD}\ndef loss(logits, labels, smoothing=0.0):\n    return logits.sum()\n")
    with pytest.raises(UsageError, match="--set logits: .* expected depth, smoothing, width$"):
        load_model_file(str(tmp_path / "m.py"), settings={"logits": 8})


def test_wrong_function_signature_is_explained(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(f"{GOOD}\ndef batches():\n    yield 1, 2\n")
    loaded = load_model_file(str(tmp_path / "m.py"))
    told = r"batches in .* cannot be called with 1 argument: .*takes 0 .*; expected\ndef batches\(batch_size\)"
    with pytest.raises(ModelError, match=told):
        next(loaded.batches(4))


def test_missing_function_shows_example_code(file: Path) -> None:
    with pytest.raises(
        ModelError, match=r"(?s)defines no loss; add it:\ndef loss\(output, target\):.*then profile and balance again$"
    ):
        load_model_file(str(file)).require("loss")


def test_all_missing_functions_are_named_at_once(file: Path) -> None:
    told = r"(?s)defines no batches; add it:\ndef batches\(.*\n[^\n]*defines no loss; add it:\n.*defines no optimizer; add it:\n"
    with pytest.raises(ModelError, match=told) as caught:
        load_model_file(str(file)).require("batches", "loss", "optimizer")
    assert str(caught.value).count("then profile and balance again") == 1


def test_input_shapes_are_read_with_their_dtypes() -> None:
    image, tokens = parse_input_shapes("2,3,8,8;2,16:int64")
    assert (tuple(image.shape), image.dtype) == ((2, 3, 8, 8), torch.float32)
    assert (tuple(tokens.shape), tokens.dtype) == ((2, 16), torch.int64)


@pytest.mark.parametrize("text", ["", "a,b", "8,0", "8,8:float31", "8;;8"])
def test_an_input_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--input-shape"):
        parse_input_shapes(text)


def test_lazy_file_has_no_weights_and_draws_nothing(file: Path) -> None:
    opened = open_model_file(str(file), settings={"width": 6, "depth": 2})
    state = torch.get_rng_state()
    lazy = opened.load(seed=0, lazy=True)
    assert torch.equal(torch.get_rng_state(), state)
    real = opened.load(seed=0)
    assert lazy.is_lazy and not real.is_lazy
    shapes = [[x.shape for x in loaded.model.parameters()] for loaded in (lazy, real)]
    assert shapes[0] == shapes[1] and lazy.example_inputs(2).shape == (2, 6)


@pytest.mark.parametrize(("name", "is_lazy"), [("Net", True), ("with_inputs", True), ("corrections", False)])
def test_existing_model_stays_real(file: Path, name: str, is_lazy: bool) -> None:
    assert load_model_file(f"{file}:{name}", lazy=True).is_lazy == is_lazy


def test_inputs_that_come_with_a_lazy_model_are_real(file: Path) -> None:
    text = file.read_text().replace("def example_inputs", "def other_inputs")
    file.write_text(text.replace("torch.zeros(2, 5)", "torch.randn(3000, 50)"))
    inputs = load_model_file(f"{file}:with_inputs", lazy=True).example_inputs(2)
    assert inputs.device.type == "cpu" and inputs.std() > 0.5


@pytest.mark.parametrize("lazy", [True, False])
def test_parse_input_shapes(file: Path, lazy: bool) -> None:
    one, same = (
        load_model_file(f"{file}:Net", input_shapes="2,3;70000", lazy=lazy).example_inputs(2) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    with pytest.raises(UsageError, match="--input-shape '2,x'"):
        load_model_file(f"{file}:Net", input_shapes="2,x", lazy=lazy)


def test_a_file_that_builds_on_meta_is_lazy_without_asking(file: Path) -> None:
    file.write_text(file.read_text() + "with torch.device('meta'):\n    made = nn.Linear(2, 2)\n")
    loaded = load_model_file(f"{file}:made")
    assert loaded.is_lazy and loaded.model.weight.device.type == "cpu"


@pytest.mark.parametrize("stated", ["mean", "sum", None])
def test_a_file_may_state_how_its_loss_combines_samples(file: Path, stated: str | None) -> None:
    if stated:
        file.write_text(f"{file.read_text()}\nloss_reduction = {stated!r}\n")
    assert load_model_file(str(file)).loss_reduction == stated
    assert model_in_memory(nn.ReLU(), loss_reduction=stated).loss_reduction == stated


def test_a_loss_reduction_that_is_none_of_the_two_is_refused(file: Path) -> None:
    file.write_text(file.read_text() + "loss_reduction = 'median'\n")
    with pytest.raises(ModelError, match='loss_reduction of .*my_model.py is \'median\'; expected "mean" or "sum"'):
        load_model_file(str(file))
    with pytest.raises(ModelError, match="loss_reduction of ReLU is 'total'"):
        model_in_memory(nn.ReLU(), loss_reduction="total")


OWN_LOSS = """
import torch
from torch import Tensor, nn

class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.line = form, nn.Linear(4, 4)

    def forward(self, x, y):
        out = self.line(x)
        loss = nn.functional.mse_loss(out, y)
        forms = {"scalar": loss, "pair": (out, loss), "dict": {"out": out, "error": loss}, "none": out, "two": (out, loss, loss),
                 "count": (out, torch.tensor(3), loss)}
        return forms[self.form]

def model(form="scalar"):
    return Net(form)

def batches(batch_size, way="dict"):
    while True:
        x = torch.randn(batch_size, 4)
        yield {"dict": {"x": x, "y": x}, "pair": ((x, x), None), "target": ((x, x), x)}[way]
"""


@pytest.mark.parametrize("way", ["dict", "pair", "target"])
@pytest.mark.parametrize("form", ["scalar", "pair", "dict", "count"])
@pytest.mark.parametrize("lazy", [False, True])
def test_the_only_scalar_that_a_model_returns_is_its_loss(tmp_path: Path, form: str, way: str, lazy: bool) -> None:
    path = tmp_path / "own_loss.py"
    path.write_text(OWN_LOSS)
    loaded = load_model_file(str(path), settings={"form": form, "way": way}, lazy=lazy)
    assert loaded.has_loss
    assert len(loaded.notes) == (way == "target"), "targets that are left out are mentioned"
    if not lazy:
        inputs, target = next(loaded.batches(3))
        assert loaded.loss(loaded.forward(inputs), target).item() >= 0


@pytest.mark.parametrize("wrong", ["output.detach()", "output.round().bool().float()", "output.argmax(-1).float()"])
def test_a_loss_without_a_gradient_is_named(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "mine.py"
    made = "from torch import nn\ndef model():\n    return nn.Linear(4, 4)\ndef loss(output, target):\n"
    path.write_text(f"{made}    return {wrong}.sum()\n")
    loaded = load_model_file(str(path))
    output = loaded.forward(torch.ones(2, 4))
    with pytest.raises(
        ModelError, match="returned a torch.float32 tensor that has no gradient; expected one .* without detach"
    ):
        loaded.loss(output, None)
    with torch.no_grad():
        assert loaded.loss(output, None).dim() == 0


@pytest.mark.parametrize(("form", "found"), [("none", "no scalar `loss`"), ("two", "2 scalars and none named `loss`")])
def test_an_output_without_one_scalar_is_no_loss(tmp_path: Path, form: str, found: str) -> None:
    path = tmp_path / "own_loss.py"
    path.write_text(OWN_LOSS)
    assert not load_model_file(str(path), settings={"form": form, "way": "target"}).has_loss
    loaded = load_model_file(str(path), settings={"form": form})
    with pytest.raises(ModelError, match=found):
        loaded.loss(loaded.forward(next(loaded.batches(3))[0]), None)


@pytest.mark.parametrize("reference", ["mine_{}.model", "mine_{}.model:model", "single_{}"])
def test_modules_are_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    key = tmp_path.name.translate(str.maketrans("-.", "__"))
    package = tmp_path / f"mine_{key}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text(GOOD)
    (package / "model.py").write_text("from .layers import model, example_inputs")
    (tmp_path / f"single_{key}.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [x for x in sys.path if x])
    assert len(list(load_model_file(reference.format(key)).model.children())) == 1


UNUSABLE = """
import torch
from torch import Tensor, nn
def model(): return {model}
def optimizer(parameters): return torch.optim.{optimizer}(parameters)
"""


@pytest.mark.parametrize(
    "model", ["nn.LazyLinear(3)", "nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())", "nn.LazyConv1d(2, 1)"]
)
@pytest.mark.parametrize("lazy", [False, True])
def test_layers_without_shapes_are_named(tmp_path: Path, model: str, lazy: bool) -> None:
    path = tmp_path / "unusable.py"
    path.write_text(UNUSABLE.format(model=model, optimizer="SGD"))
    with pytest.raises(
        ModelError, match=r"(the model|1) of .* is a Lazy\w+, whose weights have no shape .*: give the layer"
    ):
        load_model_file(str(path), lazy=lazy)


@pytest.mark.parametrize(
    "lines",
    ['torch.set_default_device("meta")', 'def model():\n  torch.set_default_device("meta")\n  return nn.Linear(2, 2)'],
)
def test_default_device_without_values_is_refused(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "unusable.py"
    path.write_text(UNUSABLE.format(model="nn.Linear(2, 2)", optimizer="SGD") + lines)
    try:
        with pytest.raises(ModelError, match=r'sets the default device to "meta".*leave torch.set_default_device out'):
            load_model_file(str(path))
    finally:
        torch.set_default_device(None)


def test_optimizer_that_needs_a_closure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "unusable.py"
    path.write_text(UNUSABLE.format(model="nn.Linear(2, 2)", optimizer="LBFGS"))
    loaded = load_model_file(str(path))
    with pytest.raises(ModelError, match=r"returned LBFGS, whose step calls a closure .*; expected .* such as AdamW"):
        loaded.optimizer(list(loaded.model.parameters()))
    path.write_text(UNUSABLE.format(model="nn.Linear(2, 2)", optimizer="Rprop"))
    loaded = load_model_file(str(path))
    loaded.optimizer(list(loaded.model.parameters()))


def test_scheduler_that_needs_a_measured_loss_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plateau.py"
    path.write_text(
        UNUSABLE.format(model="nn.Linear(2, 2)", optimizer="SGD")
        + "\n\ndef scheduler(optimizer):\n    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
    )
    loaded = load_model_file(str(path))
    with pytest.raises(
        ModelError, match=r"returned ReduceLROnPlateau, whose step takes a measured loss; expected a sched"
    ):
        loaded.scheduler(loaded.optimizer(list(loaded.model.parameters())))


@pytest.mark.parametrize("kind", ["module", "parameter", "buffer"])
def test_control_character_in_a_name_is_refused(kind: str) -> None:
    model = nn.Linear(2, 2)
    if kind == "module":
        model.add_module("a\nb", nn.Linear(2, 2))
    elif kind == "parameter":
        model.register_parameter("a\x1bb", nn.Parameter(torch.zeros(2)))
    else:
        model.register_buffer("a\rb", torch.zeros(2))
    with pytest.raises(ModelError, match=r"of the name 'a.*b'; expected names without control characters"):
        model_in_memory(model)


def penalty(output: Tensor, target: Tensor) -> Tensor:
    return torch.autograd.grad(output.sum(), target, create_graph=True)[0].square().mean()


def gradient_of_parts(output: Tensor, target: Tensor) -> Tensor:
    output.sum().backward()
    return output.mean()


@pytest.mark.parametrize("loss", [penalty, gradient_of_parts])
def test_loss_that_takes_gradients_itself_is_named(loss: Any) -> None:
    file = model_in_memory(nn.Linear(2, 2), loss=loss, batches=lambda n: [(torch.ones(n, 2), torch.ones(n, 2))])
    with pytest.raises(
        ModelError, match=r"a gradient penalty, .*are not supported.*supported is a loss of the model's"
    ):
        find_loss_reduction(file, 2)


class Forces(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.energy, self.how = nn.Linear(2, 1), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "function":
            found: Tensor = torch.func.grad(lambda y: self.energy(y).sum())(x)
            return found
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_model_that_takes_gradients_itself_is_named() -> None:
    for how in ("function", "grad"):
        with pytest.raises(ModelError, match="gradients of inputs, are not supported"):
            capture(Forces(how), torch.ones(3, 2))


def test_other_errors_of_a_loss_do_not_speak_of_gradients() -> None:
    file = model_in_memory(
        nn.Linear(2, 2), loss=lambda o, t: o @ t, batches=lambda n: [(torch.ones(n, 2), torch.ones(5))]
    )
    with pytest.raises(ModelError) as raised:
        file.loss(torch.ones(2, 2), torch.ones(5))
    assert "gradient" not in str(raised.value)


def test_file_of_a_package_gets_the_name_of_its_module(tmp_path: Path) -> None:
    package = tmp_path / "mine" / "models"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "net.py").write_text("from . import parts\n")
    with pytest.raises(ModelError, match=rf"in the folder {tmp_path}, .*: mine.models.net$"):
        load_model_file(str(package / "net.py"))


def test_a_name_behind_a_dot_is_written_behind_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dotted_net.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"; write dotted_net:Net$"):
        load_model_file("dotted_net.Net")
    assert load_model_file("dotted_net:Net").model.in_features == 3
