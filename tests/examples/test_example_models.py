"""The models of the example files: their published sizes, and what is particular to each."""

from collections.abc import Iterator

import pytest
import torch

from tests.example_files import (
    NEEDS_TRANSFORMERS,
    SMALL,
    apply,
    call,
    every_hugging_face,
    load,
    meta_model,
    num_parameters,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more threads, and on a busy machine the threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


# Sizes


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "expected"),
    [
        (18, 128, 31_694_440),
        (18, 208, 81_505_540),
        (18, 256, 122_470_120),
        (18, 416, 319_024_120),
        (18, 544, 542_734_840),
        (36, 544, 1_055_832_376),
        (72, 512, 1_844_858_344),
    ],
)
def test_amoebanet_has_the_parameters_of_the_gpipe_paper(num_layers: int, num_filters: int, expected: int) -> None:
    model = meta_model("amoebanet_d", num_layers=num_layers, num_filters=num_filters, num_classes=1000)
    assert num_parameters(model) == expected


@pytest.mark.parametrize(("depth", "expected"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_resnet_has_the_parameters_of_the_imagenet_models(depth: int, expected: int) -> None:
    assert num_parameters(meta_model("resnet", depth=depth, width=64, num_classes=1000)) == expected


def test_unet_has_the_parameters_of_the_original_size_with_batch_norm() -> None:
    assert num_parameters(meta_model("unet", depth=4, width=64)) == 31_036_481


@NEEDS_TRANSFORMERS
def test_gpt2_has_the_parameters_of_gpt2_small() -> None:
    settings = {"num_blocks": 12, "width": 768, "num_heads": 12, "vocabulary": 50257, "sequence_length": 1024}
    assert num_parameters(meta_model("gpt2_hf", **settings)) == 124_439_808


BERT_BASE = {
    "num_blocks": 12, "width": 768, "feed_forward": 3072, "num_heads": 12, "vocabulary": 30522, "sequence_length": 512
}  # fmt: skip
LLAMA_2_7B = {
    "num_blocks": 32, "width": 4096, "feed_forward": 11008, "num_heads": 32, "num_key_value_heads": 32,
    "vocabulary": 32000,
}  # fmt: skip
T5_SMALL = {
    "num_blocks": 6, "width": 512, "feed_forward": 2048, "num_heads": 8, "head_width": 64, "vocabulary": 32128
}  # fmt: skip
VIT_BASE = {
    "num_blocks": 12, "width": 768, "feed_forward": 3072, "num_heads": 12, "image_size": 224, "patch_size": 16,
    "num_classes": 1000,
}  # fmt: skip


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("bert_hf", BERT_BASE, 109_514_298),
        ("llama_hf", LLAMA_2_7B, 6_738_415_616),
        ("t5_hf", T5_SMALL, 60_506_624),
        ("vit_hf", VIT_BASE, 86_567_656),
    ],
)
def test_hugging_face_models_have_the_parameters_of_the_published_ones(
    name: str, settings: dict[str, int], expected: int
) -> None:
    assert num_parameters(meta_model(name, **settings)) == expected


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (3, 282_182_912),
        (13, 785_765_632),
        (103, 5_318_010_112),
        (415, 21_029_790_976),
        (1663, 83_876_914_432),
    ],
)
def test_transformer_l_has_the_parameters_of_the_gpipe_paper(num_layers: int, expected: int) -> None:
    assert num_parameters(meta_model("transformer_l", num_layers=num_layers, paper=True)) == expected


def test_transformer_l_of_the_paper_can_also_be_spelled_out() -> None:
    settings = {"width": 2048, "feed_forward": 8192, "num_heads": 32, "vocabulary": 32_000}
    assert num_parameters(meta_model("transformer_l", num_layers=3, **settings)) == 282_182_912


def test_transformer_l_takes_what_is_given_instead_of_the_paper_s() -> None:
    d, f, v = 64, 8192, 32_000  # width, feed-forward, vocabulary
    model = meta_model("transformer_l", num_layers=1, paper=True, width=d)
    assert num_parameters(model) == (4 * d * d + 4 * d + 2 * d * f + f + d + 4 * d) + 2 * v * d + v + 2 * d


@pytest.mark.parametrize("tie_embedding", [False, True])
def test_transformer_has_the_parameters_of_the_closed_form(tie_embedding: bool) -> None:
    model = meta_model(
        "transformer_lm", num_blocks=3, width=64, num_heads=2, sequence_length=16, tie_embedding=tie_embedding
    )
    vocabularies = 1 if tie_embedding else 2
    assert num_parameters(model) == 3 * (12 * 64**2 + 13 * 64) + vocabularies * 256 * 64 + 16 * 64 + 2 * 64


# What is particular to a model


def test_tied_head_is_the_token_embedding() -> None:
    tied = load("transformer_lm").model(tie_embedding=True)
    untied = load("transformer_lm").model()
    assert tied.head.weight is tied.embedding.token.weight
    assert untied.head.weight is not untied.embedding.token.weight


@pytest.mark.parametrize("name", ["transformer_lm", "transformer_l"])
def test_transformer_does_not_look_ahead(name: str) -> None:
    model = apply(load(name).model, **SMALL[name])
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10] += 1 - 2 * (changed[:, 10] == 255).long()
    same = (model(tokens) == model(changed)).flatten(2).all(-1).all(0)
    assert same[:10].all() and not same[10:].any()


def test_transformer_l_tells_places_apart_by_sines_and_cosines() -> None:
    embedding = load("transformer_l").model(width=4, num_heads=1, feed_forward=4).embedding
    positions = embedding(torch.zeros(1, 3, dtype=torch.long))[0] - embedding.token.weight[0]
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.01], [2.0, 0.02]])  # place / 10000^(2 i / width)
    torch.testing.assert_close(positions, torch.cat([angles.sin(), angles.cos()], dim=1))
    assert embedding.bfloat16()(torch.zeros(1, 3, dtype=torch.long)).dtype == torch.bfloat16


def test_transformer_dropout_acts_in_training_only() -> None:
    example = load("transformer_lm")
    model = example.model(dropout=0.5)
    tokens = example.example_inputs(2)
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_amoebanet_is_a_sequence_of_named_layers() -> None:
    model = meta_model("amoebanet_d", num_layers=18)
    normals = [f"normal_{number}" for number in range(1, 19)]
    names = [name for name, _ in model.named_children()]
    assert names == [
        *("stem", "reduction_1", "reduction_2", *normals[:6], "reduction_3", *normals[6:12]),
        *("reduction_4", *normals[12:], "classifier"),
    ]


def test_amoebanet_cells_hand_on_their_output_and_the_previous_one() -> None:
    example = load("amoebanet_d")
    stem, *cells, _ = example.model(num_layers=3, num_filters=16)
    value = stem(example.example_inputs(2))
    previous, before = value, value
    for cell in cells:
        value = cell(value)
        output, handed_on = value
        assert handed_on is previous
        previous, before = output, previous
    assert previous.shape == (2, 4 * 64, 2, 2) and before.shape == (2, 3 * 64, 2, 2)  # 4 * num_filters, 64 / 32 pixels


def test_amoebanet_factorized_reduction_reads_the_even_and_the_odd_pixels() -> None:
    reduction = load("amoebanet_d").FactorizedReduction(4, 8)
    image = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    reduction(image).pow(3).sum().backward()  # batch norm fixes the sums of the first and the second power
    assert image.grad is not None
    row, column = torch.arange(6)[:, None] % 2, torch.arange(6) % 2
    assert torch.equal(image.grad.abs().sum((0, 1)) > 0, row == column)


def test_resnet_has_the_usual_children_and_blocks() -> None:
    model = meta_model("resnet", depth=50)
    names = [name for name, _ in model.named_children()]
    assert names == ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    assert [len(list(model.get_submodule(f"layer{i}").children())) for i in range(1, 5)] == [3, 4, 6, 3]


def test_unet_answers_at_the_size_of_the_image_whatever_its_depth() -> None:
    example = load("unet")
    images = example.example_inputs(2)
    assert [example.model(depth=depth, width=2)(images).shape for depth in (1, 2, 4)] == [images.shape] * 3


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("name", "class_name", "parameter"),
    [
        ("gpt2_hf", "GPT2LMHeadModel", "transformer.h.0.attn.c_attn.weight"),
        ("bert_hf", "BertForMaskedLM", "bert.encoder.layer.0.attention.self.query.weight"),
        ("llama_hf", "LlamaForCausalLM", "model.layers.0.self_attn.q_proj.weight"),
        ("t5_hf", "T5ForConditionalGeneration", "decoder.block.0.layer.1.EncDecAttention.q.weight"),
        ("vit_hf", "ViTForImageClassification", "vit.layers.0.attention.q_proj.weight"),
    ],
)
def test_model_is_the_class_of_transformers_with_its_own_names(name: str, class_name: str, parameter: str) -> None:
    model = load(name).model()
    assert type(model).__name__ == class_name
    assert parameter in dict(model.named_parameters())


@NEEDS_TRANSFORMERS
@every_hugging_face
def test_model_draws_no_random_numbers_in_training_and_keeps_no_cache(name: str) -> None:
    example = load(name)
    model, inputs = apply(example.model, **SMALL[name]).train(), apply(example.example_inputs, 2, **SMALL[name])
    output, again = call(model, inputs), call(model, inputs)
    assert torch.equal(output.logits, again.logits)
    assert output.get("past_key_values") is None


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("name", ["gpt2_hf", "bert_hf", "t5_hf", "vit_hf"])
def test_dropout_of_a_hugging_face_model_acts_in_training(name: str) -> None:
    example = load(name)
    model = apply(example.model, **SMALL[name], dropout=0.5).train()
    inputs = apply(example.example_inputs, 2, **SMALL[name])
    assert not torch.equal(call(model, inputs).logits, call(model, inputs).logits)


@every_hugging_face
def test_loss_reads_logits_from_an_attribute_or_a_key(name: str) -> None:
    target = torch.arange(8) if name == "vit_hf" else torch.arange(8).view(2, 4)  # of images, of sequences

    class Output:
        logits = torch.randn(*target.shape, 256, generator=torch.Generator().manual_seed(0))

    loss = load(name).loss
    assert loss(Output(), target) == loss({"logits": Output.logits}, target) > 0
