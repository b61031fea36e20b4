"""Profiles from configurations: sizes as published, and shares of parallel groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gplan.core import Profile
from gplan.core.errors import FileError, UsageError
from profiler.analytic.decoder_config import Widths, decoder_names, decoder_profile, load_decoder
from profiler.analytic.hardware import load_hardware

H100 = load_hardware("h100")


def profile_of(name: str, **widths: int) -> Profile:
    return decoder_profile(name, H100, widths=Widths(**widths))


PUBLISHED = {  # parameters in billions, by the model cards; DeepSeek-V3's 671 are without multi-token prediction
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "mixtral-8x7b": 46.70,
    "qwen3-0.6b": 0.596,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "kimi-k2": 1026.5,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_those_published(name: str, billions: float) -> None:
    assert profile_of(name).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_deepseek_has_671_billion_parameters_and_a_layer_that_predicts_further() -> None:
    profile = profile_of("deepseek-v3")
    predicted = next(x for x in profile.layers if x.name == "mtp.0")
    main = profile.num_parameters - predicted.num_parameters
    assert main / 1e9 == pytest.approx(671.0, rel=2e-3)
    assert predicted.num_parameters / 1e9 == pytest.approx(11.5, rel=2e-2)
    assert set(decoder_names()) == {*PUBLISHED, "deepseek-v3"}


def test_a_forward_has_two_flops_for_each_active_parameter_and_token() -> None:
    profile = decoder_profile("llama3-8b", H100, widths=Widths(sequence_length=2048))
    products = sum(x.num_flops for layer in profile.layers for x in layer.costs[0].forward_work if x.kind == "matmul")
    weights = profile.num_parameters - 128256 * 4096  # the embedding is looked up
    assert products == pytest.approx(2 * 2048 * weights, rel=1e-3)


def test_work_memory_and_weights_are_divided() -> None:
    whole, split = profile_of("deepseek-v3"), profile_of("deepseek-v3", tensor=2, expert=64, data=64)
    for before, after in zip(whole.layers[1:5], split.layers[1:5], strict=True):
        assert after.costs[0].stash_bytes == before.costs[0].stash_bytes // 2
        flops = [sum(x.num_flops for x in layer.costs[0].forward_work) for layer in (before, after)]
        assert flops[1] == pytest.approx(flops[0] / 2, rel=1e-6)
    sparse = next(i for i, x in enumerate(whole.layers) if x.kind == "SparseBlock")
    assert split.layers[sparse].num_parameters < whole.layers[sparse].num_parameters / 20


def test_a_config_file_is_read_with_other_values(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    path.write_text(json.dumps({**config, "q_lora_rank": None, "architectures": ["LlamaForCausalLM"]}))
    assert load_decoder(str(path), {"num_hidden_layers": 3}).num_hidden_layers == 3
    path.write_text(json.dumps({"hidden_size": "wide"}))
    with pytest.raises(FileError, match="is no configuration of a decoder"):
        load_decoder(str(path))
    path.write_text("{")
    with pytest.raises(FileError, match="cannot be read"):
        load_decoder(str(path))


def test_experts_are_divided_over_ranks_that_are_there() -> None:
    with pytest.raises(UsageError, match="experts are divided by 64; expected a divisor of tensor x data = 2 x 4"):
        Widths(tensor=2, expert=64, data=4)
    with pytest.raises(UsageError, match="the sequence-length size is 0"):
        Widths(sequence_length=0)
