"""Fields of a drafter's configuration that no importer asked for: each is known to change nothing, or it is refused.

A field that is passed over in silence is the worst kind of import: the drafter loads, and drafts something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Fields, Foreign

ROTARY = ("rope_scaling", "rope_parameters")  # objects whose fields `row.layer_options` checks by their kind
# Fields that change no draft, whatever their value is, by the reason.
GROUPS = {
    "names and versions": """
        architectures auto_map base_model_name_or_path name_or_path target_model_name_or_path target_model_type model_type
        draft_model_type speculators_config speculators_version transformers_version peft_version version dtype torch_dtype
        has_no_defaults_at_init task_specific_params finetuning_task problem_type id2label label2id
    """,
    "tokens that no drafter reads": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id image_token_id video_token_id
    """,
    "how it was trained": """
        initializer_range init_std attention_dropout hidden_dropout dropout_rate embd_pdrop resid_pdrop num_anchors ttt_length
        step_loss_decay loss_decay_gamma confidence_head_alpha ce_loss_alpha l1_loss_alpha lambda_base_start aux_loss_alpha
        output_router_logits router_aux_loss_coef router_jitter_noise seq_aux pretraining_tp use_cache attention_mode
        attn_implementation draft_num_hidden_layers embed_requires_grad gradient_checkpointing
    """,
    "how it is served": """
        n_candidates top_k_tokens_per_head spd_type xpress_topc xpress_num_passes num_jacobi_passes beam_width max_seq_len
        max_paths topk num_lookahead_tokens
    """,
    "the tensors say it": """
        attention_bias mlp_bias qkv_bias use_bias tie_word_embeddings use_qk_norm qk_norm projector_type
        enable_confidence_head use_confidence_head confidence_head_with_markov markov_head_type
    """,
    "copied from a target: windows that are off, experts, which drafters' layers do not have": """
        max_window_layers sliding_window use_sliding_window layer_types decoder_sparse_step mlp_only_layers
        moe_intermediate_size shared_expert_intermediate_size num_experts num_local_experts num_experts_per_tok
        n_routed_experts n_shared_experts moe_layer_freq first_k_dense_replace norm_topk_prob routed_scaling_factor
        scoring_func topk_method topk_group n_group num_nextn_predict_layers
    """,
    "settings of transformers' generate()": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
        typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        num_return_sequences output_scores output_attentions output_hidden_states return_dict return_dict_in_generate
        forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens torchscript use_bfloat16 tf_legacy_loss pruned_heads is_decoder is_encoder_decoder
        tie_encoder_decoder cross_attention_hidden_size add_cross_attention chunk_size_feed_forward prefix
    """,
    "of a peft adapter: how it was trained, and what its tensors say": """
        auto_mapping inference_mode lora_dropout revision runtime_config task_type loftq_config target_modules exclude_modules
        layers_pattern megatron_config megatron_core
    """,
}
HARMLESS = {name for group in GROUPS.values() for name in group.split()}


def check_unread(found: Foreign, family: str, usual: Mapping[str, Any]) -> None:
    """Raise UserError for a field that nothing asked for and that may change drafts. usual: values that change nothing."""
    left = sorted(f"{path} {value!r}"[:80] for path, value in _unread(found.config, usual))
    if left:
        raise UserError(
            f"{found.origin}: {found.config_name} says {', '.join(left[:4])}, which drafters of {family} do not know here; "
            "if the drafter does not need it, remove it there"
        )


def _unread(fields: Fields, usual: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if value is None or value in ({}, []) or key.startswith("_") or key in ROTARY or key in HARMLESS:
            continue
        if key not in fields.asked:
            if key not in usual or usual[key] != value:
                yield f"{inside}{key}", value
        elif isinstance(value, Fields):
            yield from _unread(value, usual, f"{inside}{key}.")
