"""The KV cache: how much fits, what is refused, that copies are exact, and that memory follows use."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from llorch_serve.artifact.manifest import KvLayout
from llorch_serve.cache.kv_cache import KvCache, KvCapacity, plan_capacity
from llorch_serve.errors import LlorchError, ResourceError, UsageError

KV = KvLayout(layers=3, kv_heads=2, head_dim=16)
PER_TOKEN = 2 * 3 * 2 * 16 * 4  # key and value, layers, heads, elements, bytes


def plan(**overrides: int | None) -> KvCapacity:
    values: dict[str, int | None] = {
        "slots": 4,
        "context_length": 1000,
        "max_context": None,
        "free_bytes": 2**40,
        **overrides,
    }
    return plan_capacity(KV, **values)  # type: ignore[arg-type]


def test_a_token_costs_keys_and_values_of_all_layers() -> None:
    assert KV.bytes_per_token == PER_TOKEN


def test_with_room_the_context_is_the_artifacts() -> None:
    capacity = plan()
    assert (capacity.slots, capacity.context, capacity.limited_by_memory) == (4, 1000, False)
    assert capacity.total_bytes == 4 * 1000 * PER_TOKEN


@pytest.mark.parametrize("chosen", [2, 500, 1000])
def test_the_users_choice_holds(chosen: int) -> None:
    capacity = plan(max_context=chosen)
    assert (capacity.context, capacity.limited_by_memory) == (chosen, False)


def test_four_fifths_of_the_free_memory_are_used_and_no_more() -> None:
    needed = 4 * 1000 * PER_TOKEN
    assert not plan(free_bytes=needed * 5 // 4).limited_by_memory
    capacity = plan(free_bytes=needed * 5 // 4 - 5 * PER_TOKEN)
    assert (capacity.context, capacity.limited_by_memory) == (999, True)


def test_short_memory_shortens_the_context_to_what_fits() -> None:
    free = 1_000_000
    capacity = plan(free_bytes=free)
    assert capacity.limited_by_memory
    assert capacity.total_bytes <= 0.8 * free < (capacity.context + 1) * 4 * PER_TOKEN


def test_a_context_longer_than_every_slot_can_have_is_shared() -> None:
    capacity = plan(max_context=500, free_bytes=4 * 400 * PER_TOKEN)
    assert (capacity.context, capacity.budget, capacity.limited_by_memory) == (500, 1280, False)
    assert capacity.total_bytes == 1280 * PER_TOKEN < capacity.reserved_bytes == 2000 * PER_TOKEN


def test_what_the_user_chose_is_refused_where_one_sequence_does_not_fit() -> None:
    with pytest.raises(ResourceError) as caught:
        plan(max_context=500, free_bytes=500 * PER_TOKEN)
    message = str(caught.value)
    assert f"500 tokens x {PER_TOKEN} bytes" in message
    assert "80% of what is free" in message
    assert "--max-context" in message


def test_a_chosen_budget_is_used_whole() -> None:
    capacity = plan(cache_bytes=1000 * PER_TOKEN)
    assert (capacity.context, capacity.budget, capacity.limited_by_memory) == (250, 1000, True)
    assert plan(cache_bytes=10_000 * PER_TOKEN).budget == 4000


def test_a_chosen_budget_beyond_the_free_memory_is_refused() -> None:
    with pytest.raises(ResourceError, match="--kv-cache-memory is 2 MiB and 1 MiB are free"):
        plan(cache_bytes=2 * 2**20, free_bytes=2**20)
    with pytest.raises(ResourceError, match=r"\(--kv-cache-memory\)"):
        plan(cache_bytes=500 * PER_TOKEN - 1, max_context=500)


@pytest.mark.parametrize("free", [0, 4 * PER_TOKEN])
def test_no_memory_for_two_tokens_is_refused(free: int) -> None:
    with pytest.raises(ResourceError):
        plan(free_bytes=free)


@pytest.mark.parametrize(
    ("overrides", "flag"),
    [
        ({"slots": 0}, "--slots"),
        ({"slots": -1}, "--slots"),
        ({"max_context": 1}, "--max-context"),
        ({"max_context": 0}, "--max-context"),
        ({"max_context": -5}, "--max-context"),
        ({"max_context": 1001}, "2 to 1000"),
    ],
)
def test_impossible_choices_are_refused_by_flag(overrides: dict[str, int], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        plan(**overrides)


def filled_cache() -> tuple[KvCache, dict[tuple[int, str], npt.NDArray[np.generic]]]:
    """Return a cache of three slots with random content, and that content by layer and kind."""
    cache = KvCache(KV, KvCapacity(3, 10, PER_TOKEN, 30))
    rng = np.random.default_rng(0)
    content = {}
    for layer in range(KV.layers):
        for kind in ("key", "value"):
            rows = cache.rows(layer, kind, 0, 3)
            rows[...] = rng.standard_normal(rows.shape)
            content[layer, kind] = rows.copy()
    return cache, content


def test_a_copy_takes_the_first_tokens_of_every_layer_and_nothing_else() -> None:
    cache, before = filled_cache()
    cache.copy(2, 0, 4)
    for (layer, kind), old in before.items():
        new = cache.rows(layer, kind, 0, 3)
        np.testing.assert_array_equal(new[0, :, :4], old[2, :, :4])
        np.testing.assert_array_equal(new[0, :, 4:], old[0, :, 4:])
        np.testing.assert_array_equal(new[1:], old[1:])


def test_a_swap_exchanges_the_first_tokens_of_every_layer_and_nothing_else() -> None:
    cache, before = filled_cache()
    cache.swap(0, 2, 4)
    for (layer, kind), old in before.items():
        new = cache.rows(layer, kind, 0, 3)
        np.testing.assert_array_equal(new[0, :, :4], old[2, :, :4])
        np.testing.assert_array_equal(new[2, :, :4], old[0, :, :4])
        np.testing.assert_array_equal(new[:, :, 4:], old[:, :, 4:])
        np.testing.assert_array_equal(new[1], old[1])


def test_rows_are_views_of_neighbouring_slots() -> None:
    cache = KvCache(KV, KvCapacity(4, 10, PER_TOKEN, 40))
    rows = cache.rows(1, "value", 1, 2)
    assert rows.shape == (2, 2, 10, 16)
    assert rows.flags.c_contiguous
    assert not rows.any()
    rows[...] = 7
    everything = cache.rows(1, "value", 0, 4)
    assert everything[:, 0, 0, 0].tolist() == [0, 7, 7, 0]
    assert not cache.rows(1, "key", 0, 4).any()
    assert not cache.rows(0, "value", 0, 4).any()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is known to commit pages one by one here")
def test_memory_follows_use() -> None:
    capacity = KvCapacity(8, 2**17, PER_TOKEN, 2**20)
    assert capacity.total_bytes > 700 * 2**20
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KvCache(KV, capacity)
    for layer in range(KV.layers):
        for kind in ("key", "value"):
            cache.rows(layer, kind, 3, 1)[0, :, 0] = 1.0
    grown = process.memory_info().rss - before
    # 12 pages of 4 KiB; pages of 2 MiB would take 24 MiB.
    assert grown < 8 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is known to commit pages one by one here")
def test_released_memory_goes_back_and_what_is_kept_stays() -> None:
    cache = KvCache(KV, KvCapacity(3, 2**15, PER_TOKEN, 2**17))
    process = psutil.Process()
    for layer in range(KV.layers):
        for kind in ("key", "value"):
            cache.rows(layer, kind, 0, 3)[...] = 3.0
    full = process.memory_info().rss
    cache.release(1, 100)
    freed = full - process.memory_info().rss
    assert freed > 0.9 * 2**15 * PER_TOKEN
    for layer in range(KV.layers):
        for kind in ("key", "value"):
            rows = cache.rows(layer, kind, 0, 3)
            assert (rows[[0, 2]] == 3).all(), "a neighbour's memory was released"
            assert (rows[1, :, :100] == 3).all()
            assert not rows[1, :, 200:].all()


def test_address_space_beyond_the_systems_is_refused_in_our_words() -> None:
    with pytest.raises(ResourceError, match="address space"):
        KvCache(KV, KvCapacity(2**20, 2**30, PER_TOKEN, 2**50))
    assert issubclass(ResourceError, LlorchError)
