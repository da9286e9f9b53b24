"""Settings that most files have and that say nothing of the logits at inference.

They are ignored as all settings are that transformers does not read for logits, but not worth a notice: where
a file came from, how it was trained, which tokens begin and end a text.
"""

from __future__ import annotations

from typing import Final

# Where a file came from and how it was stored.
_PROVENANCE: Final = (
    "_name_or_path",
    "_commit_hash",
    "name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "is_llama_config",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    "save_safetensors",
    "_model_name_or_path",
    "model_name_or_path",
    "trust_remote_code",  # nothing here is run, whatever this says
)
# Used while training only.
_TRAINING: Final = (
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "gradient_checkpointing",
)
# Choice of kernels, of slicing that does not change the product, and of what is returned.
_EXECUTION: Final = (
    "pretraining_tp",
    "use_cache",
    "cache_implementation",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_flash_attn_2_enabled",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "torchscript",
    "chunk_size_feed_forward",
    "use_bfloat16",
    "is_decoder",  # a Llama is one, whatever this says
    "tf_legacy_loss",
)
# Read together with the tokenizer, or of no use to a decoder.
_TOKENS: Final = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "mask_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "tokenizer_class",
    "prefix",
)
# Heads for other tasks than generation.
_TASKS: Final = (
    "finetuning_task",
    "problem_type",
    "id2label",
    "label2id",
    "num_labels",
    "task_specific_params",
)
# Generation settings of old files; generation_config.json is what counts.
_GENERATION: Final = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "max_length",
    "min_length",
    "max_new_tokens",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "early_stopping",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "return_dict_in_generate",
    "output_scores",
)

BOOKKEEPING: Final = frozenset((*_PROVENANCE, *_TRAINING, *_EXECUTION, *_TOKENS, *_TASKS, *_GENERATION))

# Keys of a GGUF file, after the architecture's name, that have no influence on the logits or repeat what
# tensors say.
INERT_GGUF_KEYS: Final = frozenset(
    {
        "vocab_size",
        "tensor_data_layout",
        "pooling_type",  # which source/pooling.py reads
        "rope.scaling.finetuned",
        # The converter writes both for some; an architecture reads one of them, and requires it.
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
    }
)
