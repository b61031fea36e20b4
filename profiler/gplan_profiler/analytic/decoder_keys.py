"""The keys of a Hugging Face config.json as those of `Decoder`: other names, defaults of families, and keys that change nothing.

What a family adds to the layers of Llama stands in families.toml. A key that is neither read nor known to leave layers as
they are is refused, and so is an unknown family; what has a small effect, or is no part of the language model, is named in
a note. Sources: the configuration and model classes of Hugging Face's transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

_TABLE = Path(__file__).with_name("families.toml")
_REFUSED = "refused"  # the table of families whose layers are not computed, with the reason
_INNER = ("text_config", "llm_config", "language_config")  # where a larger model keeps its language model

_SAME_KEY = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "sliding_window_pattern": "full_attention_interval",
    "no_rope_layer_interval": "no_rope_interval",
    "experts_per_token": "num_experts_per_tok",
    "num_mtp_layers": "num_nextn_predict_layers",
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_num_shared_experts": "n_shared_experts",
    "num_shared_experts": "n_shared_experts",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_layer_interval": "interleave_moe_layer_step",
    "num_dense_layers": "first_k_dense_replace",
    "layers_block_type": "layer_types",
    **dict.fromkeys(("mlp_hidden_act", "hidden_activation", "activation_function", "ffn_act"), "hidden_act"),
}
_LAYER_KINDS = {  # other names in layer_types
    "attention": "full_attention",
    "mamba": "linear_attention",
    "*": "full_attention",
    "M": "linear_attention",
    "-": "mlp",
    "E": "moe",
    "0": "linear_attention",
    "1": "full_attention",
}
_NO_EFFECT = re.compile(  # on the weights of layers and their work
    r"_.*|architectures|auto_map|(torch_)?dtype|(transformers|unsloth|adapter_transformers)_version|model_type|name_or_path|"
    r"(bos|eos|pad|sep|cls|mask|unk|eod|im_start|im_end|image|video|audio|boi|eoi|decoder_start)_token(_id|_ids|_index)?|"
    r"[a-z_]*_token_(id|index)|(pad|mask_init|(im|text|image|video|audio)_(start|end))_id|(id2label|label2id|problem_type|finetuning_task|task_specific_params|return_dict)|"
    r"use_cache|use_return_dict|is_(encoder_decoder|decoder)|output_(attentions|hidden_states|router_logits)|torchscript|"
    r"pretraining_tp|tp_plan|ep_size|cache_implementation|"
    r"chunk_size_feed_forward|tokenizer_class|prefix|use_flash_attn|use_bfloat16|fp32_[a-z_]*|attn_implementation|gradient_checkpointing|"
    r"(original_|initial_)?(max_position_embeddings|context_length)|model_max_length|max_sequence_length|max_window_size|seq_length|"
    r"rope_(theta|scaling|parameters|type|ratio|local_base_freq|interleave|interleaved|traditional)|layer_rope_theta|"
    r"rotary_(dim|pct|emb_base|base)|partial_rotary_factors?|use_rotary_pos_emb|mrope_[a-z_]*|apply_yarn_scaling|"
    r"(rms_|layer_|layer_?norm_|norm_|rmsnorm_)?(eps|epsilon)|(rms_norm|layer_norm|layernorm)_(eps|epsilon)|"
    r"initializer_(range|factor|cutoff_factor)|init_(method|std)|embedding_initializer_range|"
    r"([a-z]+_)?(dropout|pdrop)(_prob|_rate)?|(router_)?jitter_noise|(router|input)_jitter_noise|"
    r"(router_aux_loss|aux_loss|router_z_loss|z_loss|moe_aux_loss|output_router)(_coef|_alpha|_weight)?|aux_loss_alpha|seq_aux|"
    r"(embedding|residual|attention|logits|lm_head|key|ssm_in|ssm_out)_multipliers?|(logits|logit|routed|attn|embedding)_scal(e|ing)(_factor)?|"
    r"routed_scaling_factor|query_pre_attn_scalar|attn_scale|floor_scale|attn_temperature_tuning|"
    r"norm_topk_prob|n_group|topk_group|topk_method|scoring_func|moe_(use_aux_free|norm_min|gate|router_[a-z]*_func)|"
    r"moe_router_(topk_scaling_factor|score_function|use_sigmoid|bias_update_speed)|moe_(expert_)?capacity[a-z_]*|num_expert_group|"
    r"qk_head_dim|swiglu_(alpha|limit)|for_llm_compression|time_step_(limit|min|max|floor|rank)|attention_(probs_)?dropout(_prob)?|"
    r"(num_)?logits_to_keep|use_bidirectional_attention|mamba_expand|is_llama_config|tf_legacy_loss|use_mambapy|"
    r"torch_dtype|architecture|quantization_config|pruned_heads|(text|llm|language)_config|sub_configs"
)
_SMALL_EFFECT = re.compile(r"[a-z_]*softcap(ping)?|clip_qkv")
_OTHER_PARTS = re.compile(r"(vision|audio|image|video|mm|projector|multimodal|spatial)_.*")
_OF_ONE_LAYER = (  # what a layer may have of its own in per_layer_config
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "v_head_dim", "sliding_window",
    "attention_chunk_size", "moe_intermediate_size", "num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok",
    "n_shared_experts", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "attention_bias", "qkv_bias", "mlp_bias",
)  # fmt: skip
MOST_LAYERS = 10_000  # of a model; more would take all memory
_ALIKE = 0.85  # names of keys, for one to be taken for a mistake in spelling


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return msgspec.toml.decode(_TABLE.read_text(encoding="utf-8"), type=dict[str, dict[str, Any]])


@cache
def families() -> dict[str, dict[str, Any]]:
    """What a family adds to the layers of Llama, by its `model_type` without `_text`, with what it inherits."""
    tables = {name: x for name, x in _tables().items() if name != _REFUSED}

    def whole(name: str) -> dict[str, Any]:
        own = tables[name]
        base = whole(own["like"]) if "like" in own else {}
        joined = {x: {**base.get(x, {}), **own.get(x, {})} for x in ("same_keys", "neutral")}
        lists = {x: [*base.get(x, []), *own.get(x, [])] for x in ("ignored", "needs")}
        return {**base, **own, **joined, **lists}

    return {name: whole(name) for name in tables}


def decoder_values(found: Mapping[str, Any], settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The values of a `Decoder`, whose fields are `known`: those of the language model in a larger one. Null is a default.

    `settings` replace keys of the file. Raises ValueError for a family or a key that is not understood.
    """
    inner: Mapping[str, Any] = next((x for key in _INNER if isinstance(x := found.get(key), Mapping)), {})
    flat = {**found, **inner, **settings}
    if name := str(flat.get("model_type") or ""):
        notes = list[str]()
    else:
        name, notes = "llama", ["the configuration has no model_type: its layers are taken for those of Llama"]
    family = families().get(name.removesuffix("_text"))
    if reason := _tables()[_REFUSED].get(name.removesuffix("_text")):
        raise ValueError(
            f"has the model_type {name}: {reason}; profile the model itself with gplan profile --device meta"
        )
    if family is None:  # near it are those of the same makers, as qwen3_moe for qwen4_moe; else those spelt almost so
        stem, known_names = re.match("[a-z]*", name.lower()), families()
        kin = [x for x in known_names if stem and len(stem[0]) > 2 and re.match("[a-z]*", x)[0] == stem[0]]  # type: ignore[index]
        alike = get_close_matches(name.lower(), kin, n=5, cutoff=0.0)
        alike = alike or get_close_matches(name.lower(), known_names, cutoff=0.85)
        near = f"near it: {', '.join(alike)}" if alike else "none has a name near it"
        raise ValueError(
            f"has the model_type {name}, whose layers are not known; of the {len(families())} that are, {near}; where the layers are the "
            f"same as those of one, name it with --set 'model_type=\"{(alike or ['llama'])[0]}\"'"
        )
    renamed = {**_SAME_KEY, **family["same_keys"]}
    ignored, neutral = family["ignored"], family["neutral"]
    values, refused = dict[str, Any](), list[str]()
    for key, value in flat.items():
        targets = renamed.get(key, key)
        targets = [targets] if isinstance(targets, str) else targets
        if key in (*ignored, "per_layer_config") or value is None:
            continue
        if key in neutral:  # values, or the key that has the same one
            same = [flat.get(x, x) if isinstance(x, str) else x for x in neutral[key]]
            if any(x not in same for x in (value if isinstance(value, list) else [value])):
                refused.append(key)
        elif targets[0] in known or targets[0] in family.get("needs", ()):
            values.update(dict.fromkeys(targets, value))
        elif value and not _NO_EFFECT.fullmatch(key):
            is_outside = bool(inner) and key not in inner and key not in settings
            if is_outside or _OTHER_PARTS.fullmatch(key):
                notes.append(f"{key} of the configuration is left out: only the language model is planned")
            elif _SMALL_EFFECT.fullmatch(key):
                notes.append(f"{key} of the configuration is left out: it adds little to the work of a layer")
            else:
                refused.append(key)
    if refused:
        names = [x for x in (*known, *renamed) if x not in flat]
        meant_by = {x: y[0] for x in refused if (y := get_close_matches(x, names, n=1, cutoff=_ALIKE))}
        meant = "".join(
            f"did you mean {y} by {x}? Then give --set {y}={msgspec.json.encode(flat[x]).decode()} --set {x}=null; "
            for x, y in meant_by.items()
        )
        others = [x for x in refused if x not in meant_by]
        without = f"if the layers are those of {name} without, give {' '.join(f'--set {x}=null' for x in others)}; "
        raise ValueError(
            f"has {', '.join(refused)}, which may change what layers compute and {'are' if refused[1:] else 'is'} not computed; "
            f"{meant}{without if others else ''}else profile the model itself with gplan profile --device meta"
        )
    held = {*values, *(["experts"] if values.keys() & {"num_experts", "num_local_experts", "n_routed_experts"} else [])}
    if missing := [x for x in family["needs"] if x not in held]:
        raise ValueError(f"has no {', '.join(missing)}; expected them in a model of the model_type {name}")
    given = {**{x: y for x, y in family.items() if x in known}, **values}
    for conditions, follows in family.get("when", []):
        own = {**family.get("defaults", {}), **{x: y for x, y in flat.items() if y is not None}}
        if all(own.get(x) in allowed for x, allowed in conditions.items()):
            given.update(follows)
    if not given.get("intermediate_size") and "intermediate_ratio" in family:
        given["intermediate_size"] = family["intermediate_ratio"] * given.get("hidden_size", 0)
    decoder = _with_kinds(given, family)
    decoder["per_layer"] = _per_layer(decoder, family, flat)
    for key, value in decoder.items():  # a number for each layer is one number, if all are equal
        if key not in _LISTS and isinstance(value, list) and value and all(x == value[0] for x in value):
            decoder[key] = value[0]
    return {**decoder, "unused": notes}


def _per_layer(given: Mapping[str, Any], family: Mapping[str, Any], flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is another in each layer: by its kind, by a list, or in the `per_layer_config` that transformers writes."""
    written = {str(x).lstrip("0") or "0": y for x, y in dict(flat.get("per_layer_config") or {}).items()}
    for layer, sizes in written.items():
        of_model = [x for x in sizes if x not in _OF_ONE_LAYER and not _NO_EFFECT.fullmatch(x)]
        if of_model or layer not in map(str, range(given.get("num_hidden_layers") or 0)):
            what = f"{of_model[0]} of layer {layer}" if of_model else f"layer {layer}"
            raise ValueError(
                f"has {what} in per_layer_config; expected sizes of a layer of the model, such as {', '.join(_OF_ONE_LAYER[:4])}"
            )
    written = {layer: {x: y for x, y in sizes.items() if x in _OF_ONE_LAYER} for layer, sizes in written.items()}
    own = {**({} if written else family.get("defaults", {})), **{x: y for x, y in flat.items() if y is not None}}
    by_kind, kinds, found = family.get("by_kind"), given.get("layer_types", ()), list[dict[str, Any]]()
    count, kinds = given.get("num_hidden_layers"), kinds if isinstance(kinds, list) else ()
    for i in range(min(MOST_LAYERS, count) if isinstance(count, int) else 0):
        of_kind = by_kind.get(str(kinds[i]), {}) if by_kind and kinds[i:] else {}
        named = {x: own.get(y) if isinstance(y, str) else y for x, y in of_kind.items()}
        listed = {
            x: own[y][i] for x, y in family.get("lists", {}).items() if isinstance(own.get(y), list) and own[y][i:]
        }
        found.append({x: y for x, y in {**named, **listed, **written.get(str(i), {})}.items() if y is not None})
    return found if any(found) else []


def _with_kinds(given: dict[str, Any], family: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds of layers by their usual names, from a list or a pattern such as M-M* or LLLG."""
    full = given.pop("attn_layer_indices", None)
    if isinstance(full, list):
        count = int(given.get("num_hidden_layers", 0))
        given["layer_types"] = ["full_attention" if i in full else "linear_attention" for i in range(count)]
    kinds, interval = given.get("layer_types"), given.get("full_attention_interval")
    if isinstance(interval, str):
        if interval != "L" * (len(interval) - 1) + "G":
            raise ValueError(f"has the sliding_window_pattern {interval}; expected L for windows and one G at the end")
        given["full_attention_interval"] = len(interval)
    if isinstance(kinds, list | str) and kinds:
        names = {**_LAYER_KINDS, **family.get("kinds", {})}
        given["layer_types"] = [names.get(str(x), x) for x in kinds]
        given.setdefault("num_hidden_layers", len(kinds))
    return given


_LISTS = {
    "layer_types", "mlp_layer_types", "moe_layer_freq", "moe_layers", "mlp_only_layers", "no_rope_layers", "per_layer", "unused",
}  # fmt: skip
