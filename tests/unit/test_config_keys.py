"""The table of keys that transformers reads is what its source says, and is what the reader goes by."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from llorch_export.config.families import FAMILIES
from llorch_export.config.hf import read_config
from llorch_export.config.reference_keys import reference_keys
from llorch_export.config.unread import notice_of
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import of_family, tiny_config
from support.harness.scripts import load_script

ROOT = Path(__file__).parent.parent.parent
TABLE = ROOT / "export" / "llorch_export" / "config" / "reference_keys.json"


def generator() -> ModuleType:
    return load_script("ci/config_keys.py")


@pytest.mark.reference
def test_the_table_is_what_this_versions_source_gives() -> None:
    import transformers

    if transformers.__version__ != reference_keys().transformers:
        pytest.skip(f"transformers is {transformers.__version__}, the table is of another version")
    assert generator().text() == TABLE.read_text(encoding="utf-8"), "run ci/generate-config-keys"


@pytest.mark.reference
@pytest.mark.parametrize("model_type", [name for name, row in FAMILIES.items() if not row.reference])
def test_every_key_that_transformers_asks_for_while_it_computes_is_in_the_table(model_type: str) -> None:
    """The source is read without being run; here it runs, and a config notes what it is asked for."""
    import torch
    import transformers

    data = tiny_config(**of_family(model_type))
    config = transformers.AutoConfig.for_model(data.pop("model_type"), **data)
    plain, asked = type(config), set()

    class Noting(plain):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> object:
            asked.add(name)
            return super().__getattribute__(name)

    config.__class__ = Noting
    model = getattr(transformers, FAMILIES[model_type].causal_lm)(config).eval()
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
    of_files = asked & {*data, *plain.__dataclass_fields__}
    assert len(of_files) > 10
    # Drawing weights, dropout, spreading a model over devices, and what is refused in every family.
    elsewhere = {"initializer_range", "is_encoder_decoder"}
    elsewhere |= {name for name in of_files if name.endswith(("_plan", "dropout", "pdrop"))}
    assert of_files <= reference_keys().keys[model_type] | set(generator()._WITHOUT_EFFECT) | elsewhere


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_setting_that_no_code_reads_is_ignored_and_named(model_type: str) -> None:
    data = tiny_config(**of_family(model_type))
    plain = read_config(data)
    found = read_config({**data, "badwordsids": [1], "internal_version": "2", "use_mrope": False})
    assert found.config == plain.config
    assert plain.ignored_settings == ()
    assert found.ignored_settings == ("badwordsids", "internal_version")
    assert found.code_not_run == ()


def test_settings_of_the_rotary_embedding_that_its_type_does_not_read_are_named_with_their_place() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "finetuned": True}
    assert read_config(tiny_config(rope_scaling=rope)).ignored_settings == ("rope_scaling.finetuned",)


@pytest.mark.parametrize(
    ("model_type", "settings", "ignored"),
    [
        ("mistral", {"attention_bias": True}, ("attention_bias",)),
        ("mistral", {"attention_bias": False}, ()),
        ("mistral", {"sliding_window": 9, "use_sliding_window": False}, ("use_sliding_window",)),
        ("qwen2", {"mlp_bias": True}, ("mlp_bias",)),
        ("phi3", {"lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}, ()),
        ("llama", {"qk_norm": False, "scale_emb": 1, "num_experts": 0}, ()),
        ("llama", {"architectures": ["CustomForCausalLM"]}, ("architectures",)),
        ("llama", {"architectures": ["LLaMAForCausalLM"]}, ()),
        ("llama", {"architectures": []}, ()),
        ("llama", {"architectures": None}, ()),
    ],
)
def test_what_a_file_says_beside_the_family_is_ignored_as_transformers_ignores_it(
    model_type: str, settings: dict[str, object], ignored: tuple[str, ...]
) -> None:
    data = tiny_config(**of_family(model_type))
    found = read_config({**data, **settings})
    kept = {key: value for key, value in settings.items() if key == "sliding_window"}
    assert found.config == read_config({**data, **kept}).config
    assert found.ignored_settings == ignored


@pytest.mark.parametrize(
    ("auto_map", "files"),
    [
        ({}, ()),
        (None, ()),
        ({"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}, ("modeling_llama.py",)),
        (
            {"AutoConfig": "org/name--configuration_x.C", "AutoModel": "org/name--modeling_x.M"},
            ("org/name/configuration_x.py", "org/name/modeling_x.py"),
        ),
        (
            {"AutoConfig": "a.C", "AutoModel": "b.M", "AutoTokenizer": ["c.T", None], "AutoModelForX": "b.N"},
            ("a.py", "b.py", "c.py"),
        ),
        ({"AutoTokenizer": "Xenova/gpt-4o"}, ("Xenova/gpt-4o",)),
        ({"AutoModel": "\x1b[2J.M"}, (r"'\x1b[2J.M'",)),
    ],
)
def test_code_of_a_checkpoint_is_named_and_not_run(auto_map: object, files: tuple[str, ...]) -> None:
    found = read_config({**tiny_config(), "auto_map": auto_map})
    assert found.code_not_run == files
    assert found.config == read_config(tiny_config()).config
    notices = notice_of(found.ignored_settings, found.code_not_run)
    assert len(notices) == (1 if files else 0)
    assert all("llorch verify" in notice for notice in notices)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "belongs to model_type mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "classifies or scores texts"),
        ({"architectures": ["LlamaForTokenClassification"]}, "classifies tokens"),
        ({"architectures": ["LlamaRewardModel"]}, "a reward model"),
        ({"architectures": ["AutoModelForCausalLMWithValueHead"]}, "a model with a value head"),
        ({"architectures": ["LlamaModel"]}, "for embeddings"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "takes more than text"),
        ({"architectures": ["Something"]}, r"names 'Something', expected \['LlamaForCausalLM'\]"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list of class names"),
        ({"architectures": [3]}, "expected a list of class names"),
        (
            {"model_type": "internlm2", "auto_map": {"AutoModel": "modeling_internlm2.M"}},
            r"which exists only as code of the checkpoint \(modeling_internlm2.py\), and that is never run",
        ),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"auto_map": {str(i): f"m{i}.M" for i in range(40)}}, "expected up to 32 classes"),
        ({f"key{i}": 1 for i in range(300)}, "has 300 settings that no code of the family reads"),
    ],
)
def test_what_is_no_language_model_of_a_family_is_refused_with_the_reason(
    settings: dict[str, object], found: str
) -> None:
    with pytest.raises(ArtifactError, match=found) as caught:
        read_config({**tiny_config(), **settings})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_what_transformers_reads_and_never_applies_is_ignored_with_a_notice() -> None:
    data = tiny_config(**of_family("gemma3_text", attn_logit_softcapping=2.0))
    found = read_config(data)
    assert found.ignored_settings == ("attn_logit_softcapping",)
    assert found.config.form.attention_softcap is None
    for absent in (None, 0):
        data["attn_logit_softcapping"] = absent
        assert read_config(data).ignored_settings == ()
