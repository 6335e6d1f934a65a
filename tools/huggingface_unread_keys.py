"""The keys of config.json and of generation_config.json that tools/huggingface.py does not read:
which of them change nothing here, and a note of all others.

tools/huggingface_families.py has the keys that are read and those that are refused.
"""
from tools.huggingface_families import ANY, FAMILIES, FIXED
from tools.huggingface_formats import kind_of

# They describe the file or its training, say how transformers computes the same, or belong to
# another head or a tokenizer. Older versions wrote all of them, and those of OF_DRAWING.
HARMLESS = set("""
    model_type architectures transformers_version dtype torch_dtype use_cache name_or_path
    _name_or_path _commit_hash _attn_implementation _attn_implementation_internal
    _attn_implementation_autoset attn_implementation _flash_attn_2_enabled
    _experts_implementation use_flash_attn return_dict return_dict_in_generate output_attentions
    output_hidden_states output_past output_scores
    torchscript use_bfloat16 tf_legacy_loss gradient_checkpointing chunk_size_feed_forward
    initializer_range tokenizer tokenizer_class bos_token_id eos_token_id pad_token_id sep_token_id
    unk_token_id decoder_start_token_id prefix tokenizer_file task_specific_params problem_type
    id2label label2id num_labels finetuning_task pruned_heads is_decoder tie_encoder_decoder
    max_length do_sample early_stopping length_penalty num_return_sequences remove_invalid_values
    transformers.js_config unsloth_version unsloth_fixed is_llama_config quantization_config
    compression_config rope_theta rope_scaling rope_parameters partial_rotary_factor layer_types
    auto_map
    """.split())
OF_GPT2 = set("""n_ctx n_inner reorder_and_upcast_attn
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    """.split()) | set(FIXED)
OF_OPT = set("""ffn_dim word_embed_proj_dim activation_dropout layerdrop
    init_std learned_embeddings""".split()) | set(FIXED)
OF_GPTJ = OF_GPT2 | {"rotary", "rotary_dim"}
OF_LLAMA = {"pretraining_tp", "sliding_window", "max_window_layers"}
OF_MIXTURE = OF_LLAMA | {"output_router_logits", "intermediate_size", "num_local_experts"}
OF_NEOX = {"use_parallel_residual", "rotary_emb_base", "classifier_dropout"}

# What changes the tokens that transformers draws: the value that sample.py has, and its flag.
OF_DRAWING = {
    "temperature": (0.8, "--temperature"), "top_k": (0, "--top-k"), "top_p": (1.0, "--top-p"),
    **{key: (1, None) for key in (
        "repetition_penalty", "encoder_repetition_penalty", "typical_p", "num_beams",
        "num_beam_groups", "guidance_scale")},
    **{key: (None, None) for key in (
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "force_words_ids",
        "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
        "sequence_bias", "exponential_decay_length_penalty", "min_p", "top_h", "epsilon_cutoff",
        "eta_cutoff", "penalty_alpha", "dola_layers", "min_length", "min_new_tokens",
        "stop_strings", "token_healing", "watermarking_config", "constraints",
        "diversity_penalty")}}
IF_DRAWN = ("temperature", "top_k", "top_p", "typical_p", "min_p", "top_h", "epsilon_cutoff",
            "eta_cutoff")               # they count with do_sample alone


def known_keys(kind: str) -> set[str]:
    """The keys of config.json that are read, refused by their value, or change nothing."""
    family = FAMILIES[kind]
    own = {"gpt2": OF_GPT2, "opt": OF_OPT, "galactica": OF_OPT, "gptj": OF_GPTJ,
           "gpt_neox": OF_NEOX}.get(kind, OF_LLAMA)
    if "n_expert" in family.shape:
        own = OF_MIXTURE
    optional = {key for key, _ in family.optional.values()}
    return (HARMLESS | set(OF_DRAWING) | own | set(ANY) | set(family.shape.values())
            | set(family.dropout) | {family.activation_key} | optional | set(family.only))


def unread_keys(config: dict) -> list[str]:
    """The keys of a config.json that have a value and are not known: another program's."""
    known = known_keys(kind_of(config))
    return sorted(key for key, value in config.items() if value and key not in known)


def notes_of_keys(config: dict, drawing: dict) -> list[str]:
    """What a user should know of a config.json and of a generation_config.json, in lines."""
    notes = []
    unread = unread_keys(config)
    if unread:
        architecture = FAMILIES[kind_of(config)].architecture
        notes.append(f"its config.json has {', '.join(unread)}, which neither transformers' "
                     f"{architecture} nor this import reads: a model that was trained with that "
                     f"is another one here")
    flags, others = [], []
    for key, (ours, flag) in OF_DRAWING.items():
        value = drawing.get(key)
        is_drawn = key not in IF_DRAWN or drawing.get("do_sample")
        if not value or value == ours or not is_drawn:
            continue
        if flag is None:
            others.append(f"{key} {value}")
        else:
            flags.append(f"{flag} {value}")
    if flags:
        notes.append(f"to draw tokens as its generation_config.json does, give sample.py "
                     f"{' '.join(flags)}")
    if others:
        notes.append(f"its generation_config.json has what sample.py does not have: "
                     f"{', '.join(others)}")
    return notes
