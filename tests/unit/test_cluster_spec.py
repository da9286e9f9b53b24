"""The file of a cluster: what it says, and every refusal, all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_export.graph.stage_choice import parse_stages
from llorch_serve.cluster.settings import StageShare
from llorch_serve.cluster.spec import ModelSpec, ReplicaRange, Scaling, read_replicas
from llorch_serve.cluster.spec_file import load_spec, parse_spec
from llorch_serve.config import CacheSharing, EngineConfig, SessionConfig
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.providers import ProviderChoice
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_artifact import write_tiny_artifact
from support.builders.tiny_exports import export_tiny

ELSEWHERE = "0123456789abcdef" * 4
SMALL = f'artifact = "/nowhere/m"\nfingerprint = "{ELSEWHERE}"\n'


def parsed(keys: str, *, name: str = "m") -> ModelSpec:
    [model] = parse_spec(f"[models.{name}]\n{keys}\n".encode(), origin="cluster.toml")
    return model


def refusal(content: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_spec(content.encode(), origin="cluster.toml")
    [line] = str(caught.value).splitlines()
    assert line.startswith("cluster.toml")
    return line


def test_a_model_has_what_llorch_serve_has_by_default():
    model = parsed(f"{SMALL}cores = 2")
    assert model.replicas == ReplicaRange(1, 1)
    assert (model.gpus, model.memory_bytes, model.resources) == (0.0, None, {})
    assert (model.settings.artifact, model.settings.fingerprint) == ("/nowhere/m", ELSEWHERE)
    assert (model.name, model.settings.cores) == ("m", 2)
    assert model.settings.engine == EngineConfig(session=SessionConfig(threads=2, huge_pages=None))


def test_every_key_has_its_effect():
    model = parsed(
        f"""{SMALL}
        replicas = "1:4"
        scaling = {{target_requests = 3, up_delay_s = 1, down_delay_s = 2.5}}
        slots = 16
        cores = 4
        gpus = 0.5
        memory = "2GiB"
        resources = {{fast = 1}}
        drain_s = 60
        max_queued_requests = 5
        max_context = 4096
        kv_cache_memory = "1MiB"
        kv_dtype = "float16"
        single_graph = true
        batch_invariant = true
        huge_pages = true
        provider = "cuda"
        provider_options = ["device_id=0"]
        ep_library = "/lib/ep.so"
        allow_cpu_nodes = true
        prefix_cache = false
        cache_sharing = "client"
        tool_format = "hermes"
        reasoning_format = "none"
        rank_format = "qwen3"
        served_names = ["gpt", "gpt", "b"]
        otlp_endpoint = "http://collector:4318"
        """
    )
    assert model.replicas == ReplicaRange(1, 4)
    assert model.scaling == Scaling(3, 1, 2.5)
    assert (model.gpus, model.memory_bytes, model.resources, model.drain_s) == (0.5, 2**31, {"fast": 1}, 60)
    assert (model.settings.cores, model.max_queued) == (4, 5)
    assert model.settings.otlp_endpoint == "http://collector:4318"
    assert model.settings.engine == EngineConfig(
        session=SessionConfig(
            threads=4,
            slots=16,
            max_context=4096,
            kv_cache_bytes=2**20,
            kv_dtype="float16",
            single_graph=True,
            batch_invariant=True,
            huge_pages=True,
            provider=ProviderChoice("cuda", ("device_id=0",), Path("/lib/ep.so"), allow_cpu_nodes=True),
        ),
        prefix_cache=False,
        cache_sharing=CacheSharing.CLIENT,
        tool_format="hermes",
        reasoning_format="none",
        rank_format="qwen3",
        served_names=("gpt", "b"),
    )


def test_reuse_and_guesses_are_the_engines():
    engine = parsed(f"{SMALL}cores = 1\nstrict_reuse = true\nlookup = 3").settings.engine
    assert (engine.strict_reuse, engine.lookup, engine.draft) == (True, 3, None)
    assert parsed(f"{SMALL}cores = 1\ndraft = '/models/s'").settings.engine.draft == Path("/models/s")


def test_a_replica_on_a_gpu_has_two_cores_unless_it_says_otherwise():
    model = parsed(f'{SMALL}gpus = 1\nprovider = "cuda"')
    assert (model.gpus, model.settings.cores) == (1, 2)


def test_stages_have_nodes_of_their_own():
    model = parsed(f"{SMALL}stages = {{count = 3, cores = 4, memory = '2GiB'}}")
    assert model.settings.stages == StageShare(count=3, cores=4, memory_bytes=2**31)
    assert (model.settings.cores, model.gpus) == (1, 0)
    on_gpus = parsed(f'{SMALL}cores = 3\nprovider = "cuda"\nstages = {{count = 2, gpus = 0.5}}')
    assert on_gpus.settings.stages == StageShare(count=2, cores=2, gpus=0.5)
    assert (on_gpus.settings.cores, on_gpus.gpus) == (3, 0)
    assert parsed(f"{SMALL}replicas = 2\nstages = {{count = 2, cores = 1}}").shares_memory
    several = parsed(f'{SMALL}replicas = 2\nprovider = "cuda"\nstages = {{count = 2, gpus = 1}}')
    assert not several.shares_memory
    assert parsed(f"{SMALL}cores = 1").settings.stages is None


def test_the_stages_of_a_folder_at_hand_are_counted(tmp_path):
    source = write_hf_folder(tmp_path / "source", {"num_hidden_layers": 4})
    staged = export_tiny(source, tmp_path / "staged", stages=parse_stages("3")).folder
    keys = f'artifact = "{staged}"'
    assert parsed(f"{keys}\nstages = {{cores = 1}}").settings.stages == StageShare(count=3, cores=1)
    told = refusal(f"[models.m]\n{keys}\nstages = {{count = 2, cores = 1}}")
    assert f"models.m.stages.count is 2, and {staged} has 3 stages; leave count out" in told
    whole = write_tiny_artifact(tmp_path / "whole")
    told = refusal(f'[models.m]\nartifact = "{whole}"\nstages = {{cores = 1}}')
    assert f"models.m.stages has no effect on {whole}, whose model is not cut into stages" in told


def test_the_fingerprint_of_a_folder_at_hand_is_read(tmp_path):
    folder = write_tiny_artifact(tmp_path / "artifact")
    model = parsed(f'artifact = "{folder}"\ncores = 1')
    assert model.settings.fingerprint == "0" * 64
    stated = refusal(f'[models.m]\nartifact = "{folder}"\nfingerprint = "{ELSEWHERE}"\ncores = 1')
    assert f"has the fingerprint {'0' * 64}, and {ELSEWHERE} is stated" in stated


def test_a_folder_without_an_artifact_is_refused(tmp_path):
    told = refusal(f'[models.m]\nartifact = "{tmp_path}"\ncores = 1')
    assert "holds no artifact" in told


def test_a_damaged_artifact_is_refused(tmp_path):
    folder = write_tiny_artifact(tmp_path / "artifact")
    (folder / "llorch.json").write_text("{")
    told = refusal(f'[models.m]\nartifact = "{folder}"\ncores = 1')
    assert "llorch.json" in told


def test_a_hub_repository_is_taken_with_its_fingerprint():
    model = parsed(f'artifact = "org/name@abc"\nfingerprint = "{ELSEWHERE}"\ncores = 1')
    assert model.settings.artifact == "org/name@abc"


MODEL = "[models.m]\n" + SMALL


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("\0", "is not TOML"),
        ("[", "is not TOML"),
        ("", "names no models"),
        ("models = 3", "names no models"),
        ("model = 3", "did you mean models?"),
        ("[models]\nm = 3", "models.m is '3'; expected a table"),
        ('[models."a b"]\nartifact = "/a"\ncores = 1', "'a b' is no name of a model"),
        (f"[models.{'a' * 64}]\nartifact = '/a'", "is no name of a model"),
        ("[models.m]", "models.m.artifact is missing"),
        (f"{MODEL}", "models.m says neither cores nor gpus"),
        (f"{MODEL}cores = 0", "models.m.cores is 0; expected int >= 1"),
        (f"{MODEL}cores = 1.5", "models.m.cores is 1.5; expected int"),
        (f"{MODEL}cores = 1\nslots = 0", "models.m.slots is 0; expected int >= 1"),
        (f"{MODEL}cores = 1\nslots = 4097", "models.m.slots is 4097; expected int <= 4096"),
        (f"{MODEL}cores = 1\nslots = 'x'", "models.m.slots is 'x'; expected int, got str"),
        (f"{MODEL}cores = 1\nslot = 3", "unknown key 'slot'; did you mean slots?"),
        (f"{MODEL}cores = 1\nzzz = 3", "unknown key 'zzz'; known are artifact, fingerprint"),
        (f"{MODEL}cores = 1\nreplicas = 0", "models.m.replicas is '0'; expected a number like 2"),
        (f"{MODEL}cores = 1\nreplicas = '4:1'", "models.m.replicas is '4:1'"),
        (f"{MODEL}cores = 1\nreplicas = '1:99999'", "models.m.replicas is '1:99999'"),
        (f"{MODEL}cores = 1\nreplicas = '-1'", "models.m.replicas is '-1'"),
        (f"{MODEL}cores = 1\nreplicas = '1:'", "models.m.replicas is '1:'"),
        (f"{MODEL}cores = 1\nreplicas = true", "models.m.replicas is True; expected int | str"),
        (
            f"{MODEL}cores = 1\nscaling = {{up_delay_s = 1}}",
            "models.m.scaling has no effect where replicas is 1",
        ),
        (f"{MODEL}cores = 1\nscaling = 3", "models.m.scaling is '3'; expected a table"),
        (
            f"{MODEL}cores = 1\nreplicas = '1:2'\nscaling = {{up = 1}}",
            "models.m.scaling has the unknown key 'up'",
        ),
        (
            f"{MODEL}cores = 1\nreplicas = '1:2'\nscaling.up_delay_s = -1",
            "scaling.up_delay_s is -1; expected float >= 0",
        ),
        (
            f"{MODEL}cores = 1\nreplicas = '1:2'\nscaling.target_requests = 0",
            "target_requests is 0; expected float > 0",
        ),
        (f"{MODEL}cores = 1\nmemory = 'x'", "models.m.memory is 'x'; expected a number of bytes"),
        (f"{MODEL}cores = 1\nkv_cache_memory = '-1'", "models.m.kv_cache_memory is '-1'"),
        (
            f"{MODEL}cores = 1\nkv_dtype = 'int3'",
            "kv_dtype is 'int3'; expected one of float32, float16, bfloat16, int8",
        ),
        (
            f"{MODEL}cores = 1\ncache_sharing = 'x'",
            "cache_sharing is 'x'; expected one of caller, client, all",
        ),
        (
            f"{MODEL}cores = 1\nresources = {{a = -1}}",
            "models.m.resources is {'a': -1}; expected float > 0.0",
        ),
        (f"{MODEL}cores = 1\nresources = {{a = nan}}", "models.m.resources is {'a': nan}"),
        (f"{MODEL}cores = 1\ndrain_s = inf", "models.m.drain_s is inf"),
        (f"{MODEL}cores = 1\nlookup = 65", "models.m.lookup is 65; expected int <= 64"),
        (
            f"{MODEL}cores = 1\notlp_endpoint = 'collector:4318'",
            "models.m.otlp_endpoint is 'collector:4318'; expected a URL like http://127.0.0.1:4318",
        ),
        (f"{MODEL}cores = 1\nserved_names = ['']", "models.m.served_names is ''"),
        (f"{MODEL}cores = 1\nserved_names = [3]", "models.m.served_names is [3]; expected str"),
        (f"{MODEL}cores = 1\nprovider = 'cudaa'", "did you mean cuda?"),
        (
            f"{MODEL}cores = 1\nprovider_options = ['x']\nprovider = 'cuda'\ngpus = 1",
            "'x'; expected KEY=VALUE",
        ),
        (
            f"{MODEL}cores = 1\nprovider = 'cuda'",
            "Ray hides GPUs from a replica that asks for none; give gpus = 1",
        ),
        (f"{MODEL}cores = 1\nbatch_invariant = true\nlookup = 2", "batch_invariant does not go with lookup"),
        (f"{MODEL}cores = 1\nbatch_invariant = true\ndraft = '/d'", "batch_invariant does not go with draft"),
        (f"{MODEL}cores = 1\nlookup = 2\ndraft = '/d'", "models.m.draft does not go with lookup"),
        (f"{MODEL}cores = 1\ndraft = 'd'", "models.m.draft is 'd'; expected the absolute path of a folder"),
        (
            f"{MODEL}stages = {{count = 2, cores = 1}}\ndraft = '/d'",
            "models.m.draft has no effect on a model",
        ),
        (
            f"{MODEL}cores = 1\nstrict_reuse = true\nprefix_cache = false",
            "strict_reuse has no effect without",
        ),
        (f"{MODEL}gpus = 1", "models.m.gpus has no effect on the CPU"),
        (f"{MODEL}gpus = 2\nprovider = 'cuda'", "models.m.gpus is 2; each replica holds a whole model"),
        (f"{MODEL}cores = 1\ntensor_parallel_size = 2", "models.m.tensor_parallel_size would split a model"),
        (
            f"{MODEL}stages = {{cores = 2}}",
            "models.m.stages.count is missing, and /nowhere/m is not on this machine; add the number",
        ),
        (f"{MODEL}stages = {{count = 2}}", "models.m.stages says neither cores nor gpus"),
        (f"{MODEL}stages = {{count = 1, cores = 1}}", "models.m.stages.count is 1; expected int >= 2"),
        (f"{MODEL}stages = {{count = 101, cores = 1}}", "models.m.stages.count is 101; expected int <= 100"),
        (f"{MODEL}stages = {{count = 2, cores = 0}}", "models.m.stages.cores is 0; expected int >= 1"),
        (f"{MODEL}stages = {{count = 2, cores = 1, gpu = 1}}", "models.m.stages has the unknown key 'gpu'"),
        (f"{MODEL}stages = {{count = 2, cores = 1, memory = 'x'}}", "models.m.stages.memory is 'x'"),
        (f"{MODEL}stages = true", "models.m.stages is 'True'; expected a table"),
        (f"{MODEL}stages = {{count = 2, gpus = 1}}", "models.m.stages.gpus has no effect on the CPU"),
        (
            f"{MODEL}stages = {{count = 2, gpus = 0.00001}}\nprovider = 'cuda'",
            "stages.gpus is 1e-05; expected",
        ),
        (
            f"{MODEL}stages = {{count = 2, cores = 1}}\nprovider = 'cuda'",
            "Ray hides GPUs from a stage that asks for none; give stages.gpus = 1",
        ),
        (
            f"{MODEL}gpus = 1\nstages = {{count = 2, gpus = 1}}\nprovider = 'cuda'",
            "models.m.gpus has no effect on a model whose stages are on nodes of their own; give stages.gpus",
        ),
        (f"{MODEL}share_weights = true\nstages = {{count = 2, cores = 1}}", "share_weights has no effect on"),
        (
            f"[models.m]\nartifact = '/{'a' * 4000}'\nstages = {{cores = 1}}",
            "stages.count is missing, and /aaaa",
        ),
        (f"{MODEL}cores = 1\ntp = 2", "docs/cluster-arithmetic.md"),
        ("[models.m]\nartifact = 'models/m'\ncores = 1", "a folder is named by its absolute path"),
        (f"{MODEL}cores = 1\nallow_cpu_nodes = true", "allow_cpu_nodes has no effect on the CPU"),
        (f"{MODEL}cores = 1\nprovider_options = ['a=1']", "--provider-option a is no option of cpu"),
        ("[models.m]\nartifact = 'models/m.gguf'\ncores = 1", "expected the absolute path of a folder"),
        ("[models.m]\nartifact = 'org/name:Q4'\ncores = 1", "expected the absolute path of a folder"),
        ("[models.m]\nartifact = ''\ncores = 1", "models.m.artifact is ''; expected str of length >= 1"),
        (f"{MODEL}cores = 1\nslots = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        (f"{MODEL}cores = 1\nslots = 0x{'f' * 5000}", "models.m.slots is a number of 20000 bits"),
        (f"{MODEL}cores = 1\nreplicas = 0x{'f' * 5000}", "models.m.replicas is a number of 20000 bits"),
        (f"{MODEL}cores = 1\nlookup = [0x{'f' * 5000}]", "models.m.lookup is a list"),
        (f"{MODEL}cores = 1\nscaling = 0x{'f' * 5000}", "models.m.scaling is a number of 20000 bits"),
        (f"{MODEL}cores = 1\nresources = {{GPU = 1}}", "models.m.resources names GPU, which gpus says"),
        (f"{MODEL}cores = 1\nresources = {{CPU = 1}}", "models.m.resources names CPU, which cores says"),
        (f"{MODEL}cores = 1\nresources = {{memory = 1}}", "names memory, which memory says"),
        (f"{MODEL}cores = 1\nresources = {{bundle = 1}}", "names bundle, which Ray keeps for itself"),
        (f"{MODEL}cores = 1\nresources = {{object_store_memory = 1}}", "which Ray keeps for itself"),
        (f"{MODEL}cores = 1\nresources = {{'' = 1}}", "models.m.resources has an empty name"),
        (f"{MODEL}cores = 1\nresources = {{a = 1.5}}", "resources.a is 1.5; expected a whole number"),
        (f"{MODEL}cores = 1\nresources = {{a = 0.00001}}", "resources.a is 1e-05; expected a whole number"),
        (f"{MODEL}gpus = 0.00001\nprovider = 'cuda'", "models.m.gpus is 1e-05; expected a whole number"),
        (f"[models.m]\nartifact = '/{'a' * 4000}'\ncores = 1", "cannot be looked at (File name too long)"),
        ("[models.m]\nartifact = '/nowhere/m'\ncores = 1", "/nowhere/m is not on this machine"),
        (
            "[models.m]\nartifact = '/nowhere/m'\ncores = 1\nfingerprint = 'ab'",
            "expected 64 hexadecimal digits",
        ),
    ],
)
def test_a_refusal_names_what_was_found_and_what_is_expected(content, told):
    assert told in refusal(content)


def test_all_refusals_come_at_once():
    told = refusal("x = 1\n[models.a]\nslots = 0\nscaling.up = 1\n[models.b]\nartifact = 'c'\nmemory = 'x'")
    for part in (
        "unknown key 'x'",
        "a.artifact is missing",
        "a.slots",
        "scaling",
        "b.artifact",
        "b.memory",
        "cores",
    ):
        assert part in told, part


def test_too_many_models_are_refused():
    tables = "".join(f"[models.m{n}]\n{SMALL}cores = 1\n" for n in range(1001))
    assert "1 to 1000" in refusal(tables)


def test_a_file_that_cannot_be_read_or_is_huge_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml cannot be read"):
        load_spec(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_spec(tmp_path)
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(UsageError, match="larger than"):
        load_spec(huge)


def test_a_number_of_replicas_is_written_as_it_is_read():
    assert str(read_replicas("--replicas", "1:4")) == "1:4"
    assert str(read_replicas("--replicas", "2:2")) == "2"
    assert read_replicas("--replicas", 3) == ReplicaRange(3, 3)
    with pytest.raises(UsageError, match=r"^--replicas is '٣'"):
        read_replicas("--replicas", "٣")


def test_damage_of_a_model_is_an_artifact_error_of_one_who_asks_for_it(tmp_path):
    from llorch_serve.cluster.spec import find_fingerprint

    with pytest.raises(ArtifactError):
        find_fingerprint(str(tmp_path), None)
